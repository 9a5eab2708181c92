"""How programs store A and B of experts, in the files of ``formats/adapters/``.

A file says the name and the axes of A and of B, for a stack of matrices ``expert x y``::

    [lora_A]
    name = "{module}.{wrapped}lora_A.weight"
    axes = "(expert rank) x"

``in`` and ``out`` are the input and the output of a matrix. ``x`` is the side that PEFT takes as the input, ``y`` the
other: by its position, so it may be the output. A file without A and B is a format in which each expert has its own.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import Any

from formats.documents import Record, Unfit, optional, record, structure, text
from formats.errors import PlanError
from formats.hints import nearest, with_hint

FOLDER = Path(__file__).parents[1] / "adapters"


@dataclass(frozen=True)
class Factor:
    """A or B of all experts: its ``name``, and its ``axes``, dimension by dimension, each slowest first."""

    name: str
    axes: str

    @property
    def dims(self) -> tuple[tuple[str, ...], ...]:
        """The axes of each dimension."""
        return tuple(tuple(dim.strip("()").split()) for dim in re.findall(r"\([^)]*\)|\w+", self.axes))

    @property
    def side(self) -> str:
        """The axis that is neither expert nor rank: ``in`` or ``out``."""
        return next(axis for dim in self.dims for axis in dim if axis not in {"expert", "rank"})


@dataclass(frozen=True)
class AdapterFormat:
    """How a program stores an adapter.

    ``tried`` says what ran. ``factors`` are A and B of a stack; None: each expert has its own. ``second``: PEFT takes
    the second dimension of a matrix as the input, except in models of the types ``flipped``. ``since`` is the first
    version of PEFT that does so. ``words`` stand in names for those of weights. ``halves``: gate and up lie one after
    the other, also where the checkpoint interleaves them. ``one_scale``: one rank and alpha for all. ``settings`` are
    entries of ``adapter_config.json``.
    """

    name: str
    loaded_by: str
    load: str
    tried: str
    factors: tuple[Factor, Factor] | None
    second: bool = False
    flipped: frozenset[str] = frozenset()
    since: tuple[int, ...] | None = None
    words: Mapping[str, str] = field(default_factory=dict)
    halves: bool = False
    one_scale: bool = False
    settings: Mapping[str, Any] = field(default_factory=dict)

    def takes_second(self, model_type: object) -> bool:
        """Whether the second dimension of a matrix is taken as the input in models of this type."""
        return self.second != (str(model_type) in self.flipped)


@cache
def adapter_format_names() -> Sequence[str]:
    """The names of all formats of adapters, sorted."""
    return sorted(path.stem for path in FOLDER.glob("*.toml"))


@cache
def adapter_format(name: str) -> AdapterFormat:
    """The format of adapters of this name. Raises PlanError if there is none."""
    names = adapter_format_names()
    if name not in names:
        hint = with_hint(nearest(name, names), f"known formats of adapters: {', '.join(names)}")
        raise PlanError(f"'{name}' is no format of adapters", hint)
    path = FOLDER / f"{name}.toml"
    try:
        return record(lambda fields: _format(name, fields))(_with_base(path), "")
    except Unfit as error:
        raise PlanError(f"{path}: {error}") from None


@cache
def versions() -> Sequence[AdapterFormat]:
    """PEFT's own formats, the newest first."""
    found = [each for each in map(adapter_format, adapter_format_names()) if each.since is not None]
    return sorted(found, key=lambda each: each.since or (), reverse=True)


def _with_base(path: Path) -> dict[str, Any]:
    document = tomllib.loads(path.read_text(encoding="utf-8"))
    base = document.pop("base", None)
    return document if base is None else _with_base(path.parent / f"{base}.toml") | document


def version_of(found: str | None) -> tuple[int, ...] | None:
    """The numbers of a version: at most three. None if it has none."""
    match = re.match(r"\d{1,4}(\.\d{1,4}){1,2}", found or "")
    return tuple(map(int, match[0].split("."))) if match else None


def _format(name: str, fields: Record) -> AdapterFormat:
    a, b = (fields.find(key, optional(record(partial(structure, Factor))), None) for key in ("lora_A", "lora_B"))
    return structure(
        AdapterFormat,
        fields,
        name=name,
        factors=None if a is None or b is None else (a, b),
        second=fields.find("input", text, "first") == "second",
        since=version_of(fields.find("since", text, "")),
    )
