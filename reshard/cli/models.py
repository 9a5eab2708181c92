"""``reshard models``: the model types that have rules, and what the tests have verified of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from formats.errors import PlanError
from formats.hints import nearest, with_hint
from formats.notation.architecture_files import built_in_architectures, load_architecture
from reshard.cli.options import Command, Value, model_types
from reshard.cli.printing import pair_lines, print_json, print_lines
from reshard.text import align, plural

if TYPE_CHECKING:
    from verify.coverage import Tested


@dataclass(frozen=True)
class _Listed:
    """A model type, the file of its rules, and what the tests do with it (None: only with types of the same rules)."""

    model_type: str
    file: Path
    tested: Tested | None

    @property
    def rules(self) -> str:
        return self.file.stem

    @property
    def verified(self) -> str:
        if self.tested is None:
            return "same rules"
        return "bytes, forward" if self.tested.forward else "bytes"


@click.command(
    "models",
    cls=Command,
    examples={
        "reshard models": "all model types",
        "reshard models phi3": "one of them in detail",
        "reshard models qwen": "all with qwen in their name",
    },
)
@click.argument("name", type=Value("model type", known=model_types), required=False)
def models_command(name: str | None, as_json: bool) -> None:
    """List the model types (model_type in config.json) that can be split.

    NAME shows one type in detail, or lists all types with NAME in their name or in the name of their rules.

    'verified' says what the tests verify on a small model of that type: the bytes, or the forward pass too. 'same
    rules': they have a model of another type, which has the same rules.
    """
    everything = _all()
    chosen = everything if name is None else _matching(name, everything)
    if as_json:
        print_json({"models": [_document(listed) for listed in chosen]})
    elif len(chosen) == 1:
        _print_one(chosen[0], everything)
    else:
        cells = [("model type", "rules", "verified", "--tp tried")]
        for listed in chosen:
            tried = ", ".join(map(str, listed.tested.degrees)) if listed.tested else ""
            cells.append((listed.model_type, listed.rules, listed.verified, tried))
        which = f" with '{name}' in their name or in that of their rules" if name else ""
        count = f"{plural(len(chosen), 'model type')}{which}. 'reshard models NAME' shows one in detail."
        print_lines(*align(cells, right=(), width=None), "", count)


def _all() -> list[_Listed]:
    from verify.coverage import coverage

    files, tested = built_in_architectures(), coverage()
    return [_Listed(name, files[name], tested.get(name)) for name in sorted(files, key=str.lower)]


def _matching(name: str, everything: Sequence[_Listed]) -> list[_Listed]:
    """The type of that name, else those with the name in their own or in that of their rules.

    Raises PlanError with the nearest names if there is none.
    """
    exact = [listed for listed in everything if listed.model_type == name]
    if exact:
        return exact
    part = name.lower()
    matches = [listed for listed in everything if part in listed.model_type.lower() or part in listed.rules.lower()]
    if not matches:
        near = nearest(name, [listed.model_type for listed in everything])
        draft = "'reshard plan SOURCE --draft FILE' writes a draft of rules for a new one"
        raise PlanError(f"no model type has '{name}' in its name", with_hint(near, draft))
    return matches


def _print_one(listed: _Listed, everything: Sequence[_Listed]) -> None:
    architecture = _load(listed.file)
    others = [other for other in everything if other != listed]
    alike = [other.model_type for other in others if other.file == listed.file]
    similar = [
        other.model_type for other in others if listed.model_type in other.model_type and other.file != listed.file
    ]
    verified = "not by itself: the tests have other types with the same rules"
    if listed.tested is not None:
        how, degrees = "bytes and forward" if listed.tested.forward else "bytes, not forward", listed.tested.degrees
        verified = f"{how}; the tests have a small model of it, for --tp {', '.join(map(str, degrees))}"

    def families(dim: str) -> str:  # each takes the whole degree
        axes = [" x ".join(family) for family in architecture.families.get(dim, ())]
        return f"splits {', '.join(axes)}" if axes else ""

    pairs = [
        ("rules", f"{listed.rules} (formats/architectures/{listed.file.name})"),
        ("same rules", ", ".join(alike) or "no other type"),
        ("--tp", families("tp") or "not possible"),
        ("--ep", families("ep") or "not possible: the rules name no experts"),
        ("padded", ", ".join(architecture.pad) or "nothing"),
        ("verified", verified),
        *([("see also", ", ".join(similar))] if similar else []),
    ]
    print_lines(listed.model_type, *pair_lines(*pairs))


_load = lru_cache(load_architecture)


def _document(listed: _Listed) -> dict[str, Any]:
    architecture = _load(listed.file)
    return {
        "model_type": listed.model_type,
        "rules": listed.rules,
        "families": {dim: [list(family) for family in families] for dim, families in architecture.families.items()},
        "padded": list(architecture.pad),
        "verified": None if listed.tested is None else "forward" if listed.tested.forward else "bytes",
        "tp_tried": list(listed.tested.degrees) if listed.tested else [],
    }
