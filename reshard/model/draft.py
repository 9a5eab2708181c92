"""A first version of an architecture file, for a model without rules: it builds on the nearest one that there is.

Nearest is the built-in file whose lines fit most of the tensors, by name and by shape; the draft names it as its base.
A line of which another shape fits is written with that shape. A tensor that no line fits is whole on every rank, and so
is all that is split in its part of a layer (its attention, its MLP). Each of these lines is marked, to be checked by a
person. A draft takes effect only when it is passed with ``--plan``.
"""

from __future__ import annotations

import tomllib
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import tomli_w

from reshard.formats.errors import PlanError, ReshardError
from reshard.formats.notation.architecture import Architecture, Rule, without_numbers
from reshard.formats.notation.architecture_files import architecture_of, built_in_architectures
from reshard.formats.quantization.methods import scheme_of
from reshard.model.binding import bind
from reshard.model.model import AnyTensor, Model
from reshard.model.unknown import named_in

_NEAREST = 8
"""So many files, those that know most of the names, are compared by shapes, too."""


@dataclass(frozen=True)
class Draft:
    """The text of a file, its base, the model that it fits, and how many of its lines are marked to be checked."""

    text: str
    base: str
    model: Model
    checks: int


def draft(config: Mapping[str, Any], tensors: Collection[AnyTensor]) -> Draft:
    """A draft for tensors of these names and shapes. Raises PlanError where a quantized weight hides its shape."""
    kinds = _kinds(config, tensors)
    names = {base.name: sum(base.match(kind.name) is not None for kind in kinds) for base in _bases()}
    bases = sorted(_bases(), key=lambda base: -names[base.name])[:_NEAREST]
    fitting = {base.name: sum(_fits(base, config, kind) for kind in kinds) for base in bases}
    for base in sorted(bases, key=lambda base: -fitting[base.name]) if kinds else ():
        with suppress(PlanError):
            lines = dict(_lines(base, config, kinds))
            text = _text(config, base.name, f"{fitting[base.name]} of {len(kinds)} kinds of tensors fit it", lines)
            architecture = architecture_of(tomllib.loads(text), Path("draft"))
            return Draft(text, base.name, bind(architecture, config, tensors, every_rule=True), len(lines))
    raise PlanError("no draft: no architecture is near to it", "write a file: 'reshard plan SIMILAR --save FILE'")


@cache
def _bases() -> Sequence[Architecture]:
    """The built-in architectures: first those of the most model types."""
    types = Counter(file.stem for file in built_in_architectures().values())
    return [replace(architecture_of({"base": [name]}, Path("draft")), name=name) for name, _ in types.most_common()]


def _kinds(config: Mapping[str, Any], tensors: Collection[AnyTensor]) -> list[AnyTensor]:
    """A tensor for each shape and each name without its numbers. What belongs to quantized weights is left out."""
    scheme, names = scheme_of(dict(config)), {tensor.name for tensor in tensors}
    kinds: dict[tuple[Any, ...], AnyTensor] = {}
    for tensor in tensors:
        weight = scheme.companion(tensor.name)
        if weight is None:
            kinds.setdefault((without_numbers(tensor.name), tensor.shape), tensor)
        elif not weight.of_attention and weight.weight not in names:
            raise PlanError(
                f"no draft for '{tensor.name}': its weight is packed, so that its shape does not show",
                "make the draft from the model before it was quantized, and use that",
            )
    return [*kinds.values()]


def _fits(architecture: Architecture, config: Mapping[str, Any], tensor: AnyTensor) -> bool:
    """Whether a line covers the tensor and fits its shape."""
    if architecture.match(tensor.name) is None:
        return False
    try:
        bind(architecture, config, [tensor])
    except ReshardError:
        return False
    return True


def _lines(
    base: Architecture, config: Mapping[str, Any], kinds: Sequence[AnyTensor]
) -> Iterator[tuple[str, tuple[str, str]]]:
    """The lines that differ from the base's: the template, the shape, and a remark on what the user must check."""
    groups: dict[str, list[AnyTensor]] = defaultdict(list)
    for kind in kinds:
        match = base.match(kind.name)
        groups[match.template if match else named_in(base, kind.name)].append(kind)
    unclear = set[str]()
    unlike = {name: group for name, group in groups.items() if not all(_fits(base, config, kind) for kind in group)}
    for template, group in unlike.items():
        shapes = [shape for rule in base.tensors.get(template, ()) for shape in rule.shapes if not shape.is_open]
        for shape in shapes:
            rules = {**base.tensors, template: (Rule((shape,)),)}
            if all(_fits(replace(base, tensors=rules), config, kind) for kind in group):
                yield template, (str(shape), f"in '{base.name}' it is so in other models only")
                break
        else:
            theirs = " or ".join(f"'{shape}'" for shape in shapes)
            why = f"'{base.name}' has {theirs}" if shapes else f"'{base.name}' does not know it"
            yield template, ("...", f"{_lengths(group)}, {why}")
            if len(group[0].shape or ()) > 1 or template.endswith(".bias"):
                unclear.add(_part(template))
    for template in (family for family in groups if family not in unlike):
        is_split = any(shape.axes & base.dealt for rule in base.tensors[template] for shape in rule.shapes)
        if is_split and "{layer}" in template and _part(template) in unclear:
            yield template, ("...", f"{_lengths(groups[template])}, a weight beside it is not clear")


def _lengths(group: Sequence[AnyTensor]) -> str:
    """The shapes on disk, for a person who replaces the ``...``."""
    return " or ".join(dict.fromkeys("x".join(map(str, kind.shape or ())) or "a number" for kind in group))


def _part(template: str) -> str:
    """The part of a layer that a tensor belongs to: its attention, its MLP."""
    prefix, _, suffix = template.partition("}.")
    return f"{prefix}.{suffix.partition('.')[0]}"


def _text(config: Mapping[str, Any], base: str, fit: str, lines: Mapping[str, tuple[str, str]]) -> str:
    """The text of the file, with a remark on what to check behind each rule."""
    model_type = config.get("model_type")
    document = {
        "model_types": [model_type] if isinstance(model_type, str) and model_type.isprintable() else [],
        "base": [base],
        "tensors": {template: shape for template, (shape, _) in lines.items()},
    }
    marks = {tomli_w.dumps({name: shape}).rstrip(): check for name, (shape, check) in lines.items()}
    rows = [
        "# DRAFT: to be checked, passed with --plan, and its result verified.",
        f"# The nearest architecture is '{base}': {fit}.",
        "# 'reshard plan SOURCE --plan THIS --save FILE' writes all rules.",
        "# CHECK marks the lines that differ from it. A tensor with '...' is whole on every rank.",
    ]
    rows += [f"{row}  # CHECK: {marks[row]}" if row in marks else row for row in tomli_w.dumps(document).split("\n")]
    return "\n".join(rows)
