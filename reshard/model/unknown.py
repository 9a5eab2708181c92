"""Explains why no line covers a tensor, and proposes a line that puts no matrix whole on every rank.

In a proposed line a length is the dimension that the model has of this length. If it has several, the length is ``?``,
which no reader of lines takes: a person chooses. A plain number stands only beside what ranks divide.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

import tomli_w

from reshard.formats.errors import NotationError, PlanError, listed
from reshard.formats.notation.architecture import SETTINGS, Architecture, LineNames
from reshard.formats.notation.axes import Dim, Summand
from reshard.formats.notation.tables import newer_than_tables
from reshard.formats.quantization.methods import unknown_method
from reshard.model.model import AnyTensor, AxisSizes


class NoRuleError(PlanError):
    """A tensor that no line of an architecture covers."""


@dataclass(frozen=True)
class Unknown:
    """A tensor that no line covers, among all ``names`` of a checkpoint; ``others`` are all names without a line."""

    tensor: AnyTensor
    names: Sequence[str]
    others: Sequence[str]


def named_in(architecture: Architecture, name: str) -> str:
    """A tensor's name as a line would have it: its numbers are indices, whose names the architecture may not know."""
    return architecture.in_general(
        name, lambda at, before: "expert" if before == "experts" else "layer" if at == 0 else f"index_{at}"
    )


def no_rule(unknown: Unknown, architecture: Architecture, config: Mapping[str, Any], sizes: AxisSizes) -> NoRuleError:
    """The refusal of a tensor that no line covers, with what to do about it."""
    tensor = unknown.tensor
    shape = "x".join(map(str, tensor.shape)) if tensor.shape is not None else "?"
    what = f"{tensor.where}: tensor '{tensor.name}' ({tensor.dtype}, {shape}) has no rule in plan '{architecture.name}'"
    method = unknown_method(sizes.settings, tensor.name)
    if method is not None:
        return NoRuleError(f"{what}: the model is quantized by {method}, a method that is not known here", UNQUANTIZED)
    if SETTINGS in config:
        return NoRuleError(what, "is config.json that of the adapter's base model?")
    newer = newer_than_tables(config)
    what += f"; {newer}" if newer else ""
    many, hint = _of_many(unknown, architecture, config)
    if many:
        return NoRuleError(f"{what}; {many}", hint)
    return NoRuleError(what, _line_to_add(tensor, architecture, sizes))


def _of_many(unknown: Unknown, architecture: Architecture, config: Mapping[str, Any]) -> tuple[str, str]:
    """Return a reason that covers all tensors without a line together, and its hint; empty if there is none."""
    from reshard.formats.notation.adapters import tensors_of_modules  # for an error alone

    others, count = unknown.others, f"{len(unknown.others):,}"
    modules = LineNames((tensor.name for tensor in tensors_of_modules(architecture, config)), architecture.prefixes)
    if all(modules.find(name) for name in others):
        return (
            "it is a name of transformers' modules",
            "save it again with save_original_format=True, which writes the published names",
        )
    strangers = [name for name in others if architecture.match(f"{name.rpartition('.')[0]}.weight") is None]
    if 2 * len(strangers) > len(unknown.names) > 1:
        return f"{count} of {len(unknown.names):,} tensors have none", "is config.json that of these tensors?"
    templates = dict.fromkeys(named_in(architecture, name) for name in others)
    known_ones = {named_in(architecture, name) for name in unknown.names}.difference(templates)
    if beginning := _beginning(templates, known_ones):
        draft = "'reshard plan SOURCE --draft FILE' writes a draft of rules that has them"
        return f"the names of all {count} tensors without one begin with '{beginning}'", draft
    return "", ""


def _beginning(templates: Iterable[str], known: Iterable[str]) -> str:
    """The shortest beginning, before any index, of all these names of several modules and of no known one; else ""."""
    modules = {template.rpartition(".")[0] for template in templates}
    levels = zip(*(module.split(".") for module in modules), strict=False)
    common = [words[0] for words in takewhile(lambda words: len({*words}) == 1 and "{" not in words[0], levels)]
    beginnings = (".".join(common[:length]) + "." for length in range(1, len(common) + 1))
    taken = tuple(known)
    free = (each for each in beginnings if not any(name.startswith(each) for name in taken))
    return next(free, "") if len(modules) > 1 else ""


def _line_to_add(tensor: AnyTensor, architecture: Architecture, sizes: AxisSizes) -> str:
    save, give = "save the plan with 'reshard plan SOURCE --save FILE', add", "and pass it with --plan FILE"
    module = tensor.name.rpartition(".")[0]
    weight = architecture.match(f"{module}.weight")
    if weight is not None:  # plain numbers would replicate the tensor: wrong if it belongs to a split weight
        rule = f"'{weight.rules[0].shapes[0]}'"
        line_of_weight = f"if it belongs to '{module}.weight', write its shape in the axes of that weight ({rule})"
        return f"{save} a line for it, {give}; {line_of_weight}"
    if tensor.shape is None:  # numbers would put it whole anywhere
        return f"{save} a line with the axes of each dimension, {give}"
    known = dims_by_length(architecture, sizes.of(architecture.indices_in(tensor.name)))
    choices = [[str(dim) for dim in known.get(length, ())] or [str(length)] for length in tensor.shape]
    words = [each[0] if len(each) == 1 else "?" for each in choices]
    chosen = [
        dim for length, word in zip(tensor.shape, words, strict=True) for dim in known.get(length, ()) if word != "?"
    ]
    is_divided = "?" in words or any(dim.axes & architecture.dealt for dim in chosen)
    if len(words) > 1 and 0 not in tensor.shape and not is_divided:
        of_none = "ranks divide no axis of its lengths: if every rank is to hold all of it, its shape is '...'"
        return f"{save} a line for it, {give}; {of_none}"
    line = {named_in(architecture, tensor.name): "..." if 0 in tensor.shape else " ".join(words)}
    pairs = zip(tensor.shape, choices, strict=True)
    open_ones = dict.fromkeys(f"{length} is {listed(each, 4)}" for length, each in pairs if len(each) > 1)
    to_choose = (
        f" with the right one for each '?' ({'; '.join(open_ones)})" if open_ones and 0 not in tensor.shape else ""
    )
    return f"{save} the line {tomli_w.dumps(line).strip()}{to_choose}, {give}"


def dims_by_length(architecture: Architecture, sizes: Mapping[str, int]) -> Mapping[int, Sequence[Dim]]:
    """The dimensions that a model's tensors may have, by their length: those of its lines, each axis, each family."""
    dims = {
        dim.whole: None
        for rules in architecture.tensors.values()
        for rule in rules
        for shape in rule.shapes
        for dim in shape.dims
        if dim.axes
    }
    axes = dict.fromkeys(axis for dim in dims for axis in sorted(dim.axes)) | dict.fromkeys(sorted(architecture.dealt))
    families = [tuple(family) for of_mesh in architecture.families.values() for family in of_mesh]
    dims |= {Dim((Summand(factors),)): None for factors in (*((axis,) for axis in axes), *families)}
    by_length: dict[int, dict[str, Dim]] = defaultdict(dict)
    for dim in dims:
        try:
            by_length[dim.size(sizes)].setdefault(_BRACKETS.sub("", str(dim)), dim)
        except NotationError:  # an axis that this model does not have
            continue
    return {length: [*alike.values()] for length, alike in by_length.items()}


_BRACKETS = re.compile(r"[\[\]]")

UNQUANTIZED = (
    "split the model as it was before it was quantized, or quantized by a method that is read: fp8, GPTQ, AWQ, "
    "bitsandbytes, compressed-tensors, ModelOpt, MXFP4, Quark"
)
