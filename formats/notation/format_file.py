"""Formats: the ways in which other programs store the same elements, by lines that rename, join, stack or reorder.

A *format* is a list of lines. A line has a tensor name of the program, and the Hugging Face tensors that this tensor is
made of::

    "**.qkv_proj.*" = ["**.q_proj.*", "**.k_proj.*", "**.v_proj.*"]
    "**.experts.w2_*" = "**.experts.{expert}.down_proj.*"

Several tensors are joined along their output. An index that is not in the program's name is stacked, as the first
dimension. ``**`` stands for any text, ``*`` for text without a dot, ``{expert}`` for an index. The components of a
packed tensor have their names in models that do not pack them (``q_proj`` of ``qkv_proj``), so one line serves both.
Formats are in ``formats/programs/``; see docs/reference/formats.md. A format may build on another, its ``base``.

The files of ``formats/adapters/`` say how programs store A and B of experts: the name and the axes of A and of B, for a
stack of matrices ``expert x y``::

    [lora_A]
    name = "{module}.{wrapped}lora_A.weight"
    axes = "(expert rank) x"

``in`` and ``out`` are the input and the output of a matrix. ``x`` is the side that PEFT takes as the input, ``y`` the
other: by its position, so it may be the output. A file without A and B is a format in which each expert has its own.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from itertools import pairwise
from pathlib import Path
from typing import Any

from reshard.formats.documents import (
    READERS,
    Record,
    Unfit,
    anything,
    items,
    mapping,
    reader_of,
    record,
    structure,
    text,
    truth,
)
from reshard.formats.errors import NotationError, PlanError
from reshard.formats.notation.expressions import read_expression
from reshard.formats.notation.format import (
    MODULES,
    PUBLISHED,
    RULES,
    SOURCE_NAMES,
    Constant,
    Dropped,
    Format,
    Pattern,
    Rules,
    Types,
    lines_of_types,
    of_types,
)
from reshard.formats.notation.tables import version_of
from reshard.formats.plugins import plugins

FOLDER = Path(__file__).parents[1] / "adapters"


@dataclass(frozen=True)
class ExpertFactor:
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
    """The form in which a program stores an adapter."""

    name: str = field(metadata={"key": None})
    loaded_by: str
    load: str
    tried: str
    """A sentence on what ran."""
    a: ExpertFactor | None = field(default=None, metadata={"key": "lora_A"})
    b: ExpertFactor | None = field(default=None, metadata={"key": "lora_B"})
    second: bool = field(default=False, metadata={"key": "input", "read": lambda value, where: value == "second"})
    """Whether PEFT takes the second dimension of a matrix as the input."""
    flipped: frozenset[str] = frozenset()
    """The model types in which it takes the first."""
    since: tuple[int, ...] | None = field(default=None, metadata={"read": lambda value, where: version_of(str(value))})
    """The first version of PEFT that does so."""
    words: Mapping[str, str] = field(default_factory=dict)
    """Words that stand in names for those of weights."""
    halves: bool = False
    """Whether gate and up lie one after the other, also where the checkpoint interleaves them."""
    one_scale: bool = False
    """Whether there is one rank and alpha for all."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Entries of ``adapter_config.json``."""

    @property
    def factors(self) -> tuple[ExpertFactor, ExpertFactor] | None:
        """A and B of a stack; None: each expert has its own."""
        return None if self.a is None or self.b is None else (self.a, self.b)

    def takes_second(self, model_type: object) -> bool:
        """Whether PEFT takes the second dimension of a matrix as the input in models of this type."""
        return self.second != (str(model_type) in self.flipped)


@cache
def adapter_format_names() -> Sequence[str]:
    """The names of all formats of adapters, sorted."""
    return sorted(path.stem for path in FOLDER.glob("*.toml"))


@cache
def adapter_format(name: str) -> AdapterFormat:
    """The format of adapters of this name, which is one of ``adapter_format_names``."""
    path = FOLDER / f"{name}.toml"
    try:
        return record(partial(structure, AdapterFormat, name=name))(_with_base(path, [FOLDER]), "")
    except Unfit as error:
        raise PlanError(f"{path}: {error}") from None


@cache
def versions() -> Sequence[AdapterFormat]:
    """PEFT's own formats, the newest first."""
    formats = [format for format in map(adapter_format, adapter_format_names()) if format.since is not None]
    return sorted(formats, key=lambda format: format.since or (), reverse=True)


PROGRAMS = Path(__file__).parents[1] / "programs"

READ: dict[str, Format] = {}
"""The formats that were read, by name. A format is read when it is first asked for."""


def all_formats() -> Mapping[str, Format]:
    """The formats of programs, by name."""
    return {name: format_of(name) for name in format_names()}


def format_of(name: str) -> Format:
    """The format of this name. Raises PlanError if there is none."""
    if name not in READ:
        if name in adapter_format_names():
            raise PlanError(f"'{name}' is a format of adapters", f"'reshard split ADAPTER OUT --as {name}' writes it")
        if name not in _names_in(PROGRAMS) and name not in format_names():
            from reshard.formats.hints import nearest, with_hint  # for an error alone

            names = names_to_write()
            hint = with_hint(nearest(name, names), f"known formats: {', '.join(names)}")
            raise PlanError(f"unknown format '{name}'", hint)
        READ.setdefault(name, read_format(_file_of(name, _folders())))  # the same object in every thread
    return READ[name]


def format_to_write(name: str | None) -> Format:
    """The format that ``--as`` names; reshard's own without a name. Raises PlanError if there is none."""
    return OWN if not name else HUGGING_FACE if name == HUGGING_FACE.name else format_of(name)


@cache
def format_names() -> Sequence[str]:
    """The names of all formats, sorted. Raises PlanError if a package has one of a name that is taken."""
    names = sorted(name for folder in _folders() for name in _names_in(folder))
    for name in (name for name, following in pairwise(names) if name == following):
        raise PlanError(f"two formats are called '{name}'", "remove the package that has the second")
    return names


@cache
def _names_in(folder: Path) -> Sequence[str]:
    return sorted(path.stem for path in folder.glob("*.toml"))


def _folders() -> Iterator[Path]:
    """The folders of formats: the built-in ones, and those of packages (entry points ``reshard.formats``)."""
    yield PROGRAMS
    yield from (Path(package.__file__).parent for package in plugins("formats").values())


def _file_of(name: str, folders: Iterable[Path]) -> Path:
    """The file of a name in the first folder that has one. Raises NotationError if none has."""
    files = (folder / f"{name}.toml" for folder in folders)
    if (found := next(filter(Path.is_file, files), None)) is None:
        raise NotationError(f"there is no file '{name}.toml'")
    return found


def names_to_write() -> Sequence[str]:
    """Return the names that ``--as`` offers, sorted: the formats of programs and of adapters, and Hugging Face's own.

    A name with ``-live`` is left out: it describes a program's memory, and no program loads such files.
    """
    return sorted([HUGGING_FACE.name, *adapter_format_names(), *(n for n in format_names() if not n.endswith("-live"))])


def read_format(path: Path, table: Mapping[str, Any] | None = None) -> Format:
    """Read a format, with ``table`` in the place of its table of model types.

    Raises PlanError that names the file and what is wrong in it.
    """
    try:
        document = _with_base(path, [path.parent, PROGRAMS])
        types = document.pop("types", None)
        if table is None and types is not None:
            beside, built_in = path.parent / text(types, "types"), PROGRAMS / text(types, "types")
            table = json.loads((beside if beside.is_file() else built_in).read_text(encoding="utf-8"))
        of_some = record(_of_types)(dict(table or {}), "")
        return record(lambda fields: _format(path.stem, fields, *of_some))(document, "")
    except (NotationError, ValueError) as error:
        raise PlanError(f"{path}: {error}") from None


def _with_base(path: Path, folders: Sequence[Path]) -> dict[str, Any]:
    """A file's parsed form with what it takes over from its ``base``, table by table. Its own lines stand before those
    of the base.

    A key that is ``false`` is taken away. Raises NotationError for one in a table that the base does not have.
    """
    document = tomllib.loads(path.read_text(encoding="utf-8"))
    below = _with_base(_file_of(document.pop("base"), folders), folders) if "base" in document else {}
    for name, stated in document.items():
        if not isinstance(stated, dict):
            continue
        inherited: dict[str, Any] = below[name] if isinstance(below.get(name), dict) else {}
        for key in stated:
            if stated[key] is False and key not in inherited:
                raise NotationError(f"'{key} = false' under [{name}] removes nothing: no base has it")
        document[name] = {key: value for key, value in {**stated, **inherited, **stated}.items() if value is not False}
    return {key: value for key, value in {**below, **document}.items() if value is not False}


def _of_types(table: Record) -> tuple[Types, Rules]:
    """The table that a tool writes: what is known of each model type, and the rules that hold for some types."""
    dropped = table.get("dropped", of_types("names", items(READERS[Pattern])), ())
    return structure(Types, table), Rules(
        lines=lines_of_types(table.get("lines", anything, [])),
        constants=table.get("constants", items(reader_of(Constant)), ()),
        dropped=tuple(Dropped(pattern, types=types) for types, patterns in dropped for pattern in patterns),
    )


def _format(name: str, table: Record, types: Types, of_some: Rules) -> Format:
    """A format. Lines and names for some model types stand before those for all."""
    known = replace(
        types, only=table.get("model_types", items(text), ()), of_tokens=table.get("of_tokens", truth, False)
    )
    some = (_of_models(*models) for models in table.get("models", mapping(anything), {}).items())
    general = structure(Rules, table)
    parts = (*some, general, of_some)
    every: dict[str, Any] = {name: tuple(rule for part in parts for rule in getattr(part, name)) for name in RULES}
    return structure(Format, table, name=name, types=known, rules=replace(general, **every))


def _of_models(names: str, value: object) -> Rules:
    """Read a table ``[models."a, b"]``, whose rules hold only for these model types."""
    types = [name.strip() for name in names.split(",")]
    if "" in types:
        raise Unfit(f"'{names}' names a model type without a name")
    condition = f"model_type in {types}" if len(types) > 1 else f"model_type == {types[0]!r}"

    def only(rule: Any) -> Any:
        return replace(rule, when=read_expression(condition + (f" and ({rule.when.text})" if rule.when else "")))

    of_all: dict[str, Any] = {"vectors": (), "numbered": (), "keep": False, "dtypes": {}, "around_layers": None}
    rules = record(partial(structure, Rules, **of_all))(value, f"models.{names}")
    some: dict[str, Any] = {name: tuple(map(only, getattr(rules, name))) for name in RULES}
    return replace(rules, **some)


@cache
def in_modules(plain: Format) -> Format:
    """A format that takes any names, with the names and joined tensors of transformers' own modules.

    A full checkpoint has a tied tensor once, a distributed one under each of its names, as a state dict has it.
    """
    spelled = format_of("transformers")
    return replace(
        spelled if plain.container.chunks else spelled.of_states,
        name=plain.name, files=plain.files, container=plain.container, loading=plain.loading, spelling=MODULES,
    )  # fmt: skip


@cache
def in_published() -> Format:
    """One full checkpoint with the names of published ones, of whatever prefix the model's tensors have their names."""
    known = format_of("transformers").types
    types, rules = Types(classes=known.classes), Rules(known.published, keep=True)
    return replace(HUGGING_FACE, rules=rules, types=types, spelling=PUBLISHED, plain=False)


def with_names(format: Format, names: str, of_source: str | None) -> Format:
    """A format with the ``names`` that are asked for, if it takes any: ``source``, which are ``of_source``,
    ``published`` or ``modules``.
    """
    wanted = of_source if names == SOURCE_NAMES else names
    return in_modules(format) if wanted == MODULES and format.takes_any_names and format is not OWN else format


def is_in_modules(format: Format) -> bool:
    """Whether a format is one full checkpoint with the names of transformers' modules, for whatever model."""
    return format.spelling == MODULES and format.files is HUGGING_FACE.files


OWN, HUGGING_FACE = (read_format(PROGRAMS / "plain" / f"{name}.toml") for name in ("reshard", "huggingface"))
"""The formats that store tensors as Hugging Face does: that of ranks' folders, and that of one full checkpoint."""
