"""``reshard models``: the model types that have rules, and what the tests have verified of them."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import click

from reshard.cli.coverage import coverage
from reshard.cli.options import Command, Value, model_types
from reshard.cli.printing import pair_lines, print_json, print_lines
from reshard.formats.errors import PlanError
from reshard.formats.hints import nearest, with_hint
from reshard.formats.notation.architecture_files import built_in_architectures, load_architecture
from reshard.text import align, plural

_VERIFIED = {
    None: ("same rules", "not by itself: the tests have other types with the same rules"),
    "bytes": ("bytes", "bytes, not forward; the tests have a small model of it, for --tp {}"),
    "forward": ("bytes, forward", "bytes and forward; the tests have a small model of it, for --tp {}"),
}
"""The tests' results for a type: in a list of types, and alone."""


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
    rules': the tests have a model of another type with the same rules.
    """
    files = built_in_architectures()
    part, words = (name or "").lower(), {type_of: f"{type_of} {file.stem}".lower() for type_of, file in files.items()}
    names = [type_of for type_of in files if type_of == name] or [each for each in files if part in words[each]]
    if not names:
        draft = "'reshard plan SOURCE --draft FILE' writes a draft of rules for a new one"
        raise PlanError(f"no model type has '{name}' in its name", with_hint(nearest(str(name), files), draft))
    chosen = [_tested(type_of) for type_of in sorted(names, key=str.lower)]
    if as_json:
        print_json({"models": [row | _ruled(row["model_type"]) for row in chosen]})
    elif len(chosen) == 1:
        _print_one(**chosen[0])
    else:
        cells = [("model type", "rules", "verified", "--tp tried")]
        for row in chosen:
            tried, (verified, _) = ", ".join(map(str, row["tp_tried"])), _VERIFIED[row["verified"]]
            cells.append((row["model_type"], row["rules"], verified, tried))
        which = f" with '{name}' in their name or in that of their rules" if name else ""
        count = f"{plural(len(chosen), 'model type')}{which}. 'reshard models NAME' shows one in detail."
        print_lines(*align(cells, right=(), width=None), "", count)


def _tested(name: str) -> dict[str, Any]:
    """A model type, the name of its rules, and what the tests verify of it (None: only types of the same rules)."""
    tested = coverage().get(name)
    verified = None if tested is None else "forward" if tested.forward else "bytes"
    degrees = [*tested.degrees] if tested else []
    return {"model_type": name, "rules": built_in_architectures()[name].stem, "verified": verified, "tp_tried": degrees}


_load = lru_cache(load_architecture)


def _ruled(name: str) -> dict[str, Any]:
    """Return the families of axes that a model type's rules split, and the axes that they pad."""
    architecture = _load(built_in_architectures()[name])
    families = {dim: [[*family] for family in families] for dim, families in architecture.families.items()}
    return {"families": families, "padded": [*architecture.pad]}


def _print_one(model_type: str, rules: str, verified: str | None, tp_tried: list[int]) -> None:
    files, ruled = built_in_architectures(), _ruled(model_type)
    others = [other for other in sorted(files, key=str.lower) if other != model_type]
    alike = [other for other in others if files[other].stem == rules]
    similar = [other for other in others if model_type in other and other not in alike]
    # each family takes the whole degree
    families = {dim: ", ".join(map(" x ".join, families)) for dim, families in ruled["families"].items() if families}
    splits = {dim: f"splits {axes}" for dim, axes in families.items()}
    pairs = [
        ("rules", f"{rules} (formats/architectures/{files[model_type].name})"),
        ("same rules", ", ".join(alike) or "no other type"),
        ("--tp", splits.get("tp", "not possible")),
        ("--ep", splits.get("ep", "not possible: the rules name no experts")),
        ("padded", ", ".join(ruled["padded"]) or "nothing"),
        ("verified", _VERIFIED[verified][1].format(", ".join(map(str, tp_tried)))),
        *([("see also", ", ".join(similar))] if similar else []),
    ]
    print_lines(model_type, *pair_lines(*pairs))
