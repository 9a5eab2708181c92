"""The tensors of transformers' own modules, which adapters name, by the lines of a checkpoint's tensors.

A checkpoint may have other names than the modules (``block_sparse_moe`` for ``mlp``), each expert by name where the
module has one tensor ``experts.gate_up_proj``, or a packed tensor where modules have its components. What a module's
tensor is made of stands in ``formats/programs/transformers.json``.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from formats.notation.architecture import Architecture, Rule
from formats.notation.axes import Dim, Shape, Summand
from formats.notation.components import components, linear, unfused
from formats.notation.expressions import Expression
from formats.notation.format import Use
from formats.notation.format_file import format_of


@dataclass(frozen=True)
class Part:
    """One source of a module's tensor: a checkpoint's tensor, by its template, whole or only the component ``label``.

    With ``at`` the source is one matrix of a stack: its number is that index of the module's name.
    """

    source: str
    label: str | None = None
    at: str | None = None


@dataclass(frozen=True)
class ModuleTensor:
    """A tensor of a module, and the checkpoint's tensors that it is made of, joined along their output.

    ``stacked`` is the index of the sources' names that is its first dimension. With ``turned``, the sources have their
    input first and it has its output first. A rule of it has one shape for each of the sources'.
    """

    name: str
    parts: tuple[Part, ...]
    shapes: tuple[tuple[Shape, Expression | None], ...]
    stacked: str | None = None
    turned: bool = False

    @property
    def dims(self) -> int:
        """The number of dimensions of its first shape; 0 if it may have any."""
        first = self.shapes[0][0] if self.shapes else None
        return 0 if first is None or first.is_open else len(first.dims)


def module_tensors(base: Architecture, config: Mapping[str, Any]) -> Iterator[ModuleTensor]:
    """The tensors that transformers' modules for a config.json have, in place of those of a checkpoint's lines.

    Of a model type that is not known there, they are the checkpoint's.
    """
    rules = format_of("transformers").of(config).rules
    joined: dict[tuple[int, str, bool], dict[int, tuple[Use, Part, tuple[Rule, ...]]]] = defaultdict(dict)
    order: list[tuple[int, str, bool]] = []
    for template, of in base.tensors.items():
        for own in ([(template, Part(template), of)], list(_components(template, of))):
            covering = ((use for use in rules.uses(name) if not use.line.also) for name, _, _ in own)
            uses = [next(use, None) for use in covering]
            if own and all(uses):
                break
        else:
            yield ModuleTensor(template, (Part(template),), tuple(_each(of)))
            continue
        for use, (_, part, of_part) in zip(uses, own, strict=True):
            assert use is not None
            key = id(use.line), use.target, part.label is not None
            order.append(key)
            joined[key][use.source] = use, part, of_part
    for key in dict.fromkeys(order):
        found = [joined[key][slot] for slot in sorted(joined[key])]
        use = found[0][0]
        name = _spelled(base, use.target)
        if len(found) == len(use.line.sources) and name is not None:
            shapes = tuple(_joined(use, [rules for _, _, rules in found]))
            turned = use.line.output_first and any(rule.shapes[0].arrow is not None for rule in found[0][2])
            yield ModuleTensor(name, tuple(part for _, part, _ in found), shapes, use.stacked, turned)


def _spelled(base: Architecture, name: str) -> str | None:
    """A name in the architecture's own spelling: that of its line, or with its first prefix in place of another.

    None if it would be another line's name with another prefix.
    """
    prefixes = sorted(base.prefixes, key=len, reverse=True)
    tail = next((name.removeprefix(prefix) for prefix in prefixes if name.startswith(prefix)), None)
    spelled = [name] if tail is None else [name, *(prefix + tail for prefix in base.prefixes)]
    covered = (base.match(with_first_indices(each)) for each in spelled[:2])
    own = next((match.template for match in covered if match and not match.template.endswith("*")), None)
    if own is not None or tail is None:
        return own or name
    is_free = all(base.match(with_first_indices(each)) is None for each in spelled)
    return spelled[1] if is_free else None


def as_modules(base: Architecture) -> Iterator[ModuleTensor]:
    """The tensors of a checkpoint as tensors of modules with the same names."""
    return (ModuleTensor(name, (Part(name),), tuple(_each(of))) for name, of in base.tensors.items())


def of_experts(stack: ModuleTensor) -> Iterator[ModuleTensor]:
    """The matrices of each expert, under names of their own, of a tensor that a checkpoint has for all of them."""
    whole = stack.parts[0]
    if not stack.shapes or len(stack.parts) > 1 or whole.label is not None or stack.stacked is not None:
        return
    shape, when = stack.shapes[0]
    for name, own in unfused(stack.name, shape).items():
        if name.endswith(".weight"):
            part = Part(whole.source, own.label, own.index)
            turned = stack.turned != (shape.arrow is not None)
            yield ModuleTensor(name, (part,), ((linear(own), when),), turned=turned)


def in_halves(tensor: ModuleTensor) -> ModuleTensor:
    """A stack that joins components index by index, with these one after the other; else the same."""
    found = [each for each in of_experts(tensor) if each.parts[0].label is not None]
    stack = tensor.shapes[0][0] if found else Shape(())
    one_after_another = {summand.label for dim in stack.dims for summand in dim.summands}
    if all(each.parts[0].label in one_after_another for each in found):
        return tensor
    outs = [each.shapes[0][0].dims[0] for each in found]
    joined = Dim(tuple(Summand((dim,), f"part{place}") for place, dim in enumerate(outs)))
    dims = (stack.dims[0], joined, found[0].shapes[0][0].dims[1])
    parts = tuple(replace(each.parts[0], at=None) for each in found)
    return ModuleTensor(tensor.name, parts, ((Shape(dims), tensor.shapes[0][1]),), turned=found[0].turned)


def _components(name: str, of: tuple[Rule, ...]) -> Iterator[tuple[str, Part, tuple[Rule, ...]]]:
    """The components of a checkpoint's tensor that lie in one piece, under their names where they are not packed."""
    shape, (module, _, leaf) = of[0].shapes[0], name.rpartition(".")
    for part in components(shape) if not shape.is_open else ():
        own = [Dim((Summand(of.factors),)) for of in shape.dims[part.dim].summands if of.label == part.label]
        if len(own) == 1:
            rule = Rule((Shape((*shape.dims[: part.dim], *own, *shape.dims[part.dim + 1 :]), shape.arrow),), of[0].when)
            yield f"{module.rpartition('.')[0]}.{part.label}_proj.{leaf}", Part(name, part.label), (rule,)


def _each(of: Sequence[Rule]) -> Iterator[tuple[Shape, Expression | None]]:
    return ((shape, rule.when) for rule in of for shape in rule.shapes)


def _joined(use: Use, of: Sequence[Sequence[Rule]]) -> Iterator[tuple[Shape, Expression | None]]:
    """The shapes of a tensor that is joined of these, one for each shape that all of them have."""
    for each in zip(*map(list, map(_each, of)), strict=False):
        shapes = [shape for shape, _ in each]
        if any(shape.is_open for shape in shapes):
            continue
        made = shapes[0]
        if use.line.output_first and made.arrow is not None:
            made = Shape((*made.dims[:-2], made.dims[-1], made.dims[-2]))
        if len(shapes) > 1:
            at = made.output_dim if made.output_dim is not None else 0
            dims = [shape.dims[at] for shape in shapes]
            sum_of = Dim(tuple(Summand((dim,), f"part{place}") for place, dim in enumerate(dims)))
            made = Shape((*made.dims[:at], sum_of, *made.dims[at + 1 :]), made.arrow)
        if use.stacked:
            arrow = None if made.arrow is None else made.arrow + 1
            made = Shape((Dim((Summand((use.stacked,)),)), *made.dims), arrow)
        yield made, each[0][1]


def with_first_indices(name: str) -> str:
    """The first of the names that a line covers."""
    return re.sub(r"\{\w+\}", "0", name)
