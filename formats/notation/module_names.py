"""The tensors of transformers' own modules, which adapters name, by the lines of a checkpoint's tensors.

A checkpoint may have other names than the modules (``block_sparse_moe`` for ``mlp``), each expert by name where the
module has one tensor ``experts.gate_up_proj``, or a packed tensor where modules have its components. What a module's
tensor is made of stands in ``formats/programs/transformers.json``.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from formats.notation.architecture import Architecture, Rule, with_first_indices
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
        for candidates in ([(template, Part(template), of)], list(_components(template, of))):
            covering = ((use for use in rules.uses(name) if not use.line.also) for name, _, _ in candidates)
            uses = [next(use, None) for use in covering]
            if candidates and all(uses):
                break
        else:
            yield ModuleTensor(template, (Part(template),), tuple(_each(of)))
            continue
        for use, (_, part, of_part) in zip(uses, candidates, strict=True):
            assert use is not None
            key = id(use.line), use.target, part.label is not None
            order.append(key)
            joined[key][use.source] = use, part, of_part
    for key in dict.fromkeys(order):
        joining = [joined[key][slot] for slot in sorted(joined[key])]
        use = joining[0][0]
        name = _spelled(base, use.target)
        if len(joining) == len(use.line.sources) and name is not None:
            shapes = tuple(_joined(use, [rules for _, _, rules in joining]))
            turned = use.line.output_first and any(rule.shapes[0].arrow is not None for rule in joining[0][2])
            yield ModuleTensor(name, tuple(part for _, part, _ in joining), shapes, use.stacked, turned)


def _spelled(base: Architecture, name: str) -> str | None:
    """A name in the architecture's own spelling: that of its line, or with its first prefix in place of another.

    None if it would be another line's name with another prefix.
    """
    prefixes = sorted(base.prefixes, key=len, reverse=True)
    tail = next((name.removeprefix(prefix) for prefix in prefixes if name.startswith(prefix)), None)
    spelled = [name] if tail is None else [name, *(prefix + tail for prefix in base.prefixes)]
    covered = (base.match(with_first_indices(spelling)) for spelling in spelled[:2])
    template = next((match.template for match in covered if match and not match.template.endswith("*")), None)
    if template is not None or tail is None:
        return template or name
    is_free = all(base.match(with_first_indices(spelling)) is None for spelling in spelled)
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
    for name, matrix in unfused(stack.name, shape).items():
        if name.endswith(".weight"):
            part = Part(whole.source, matrix.label, matrix.index)
            turned = stack.turned != (shape.arrow is not None)
            yield ModuleTensor(name, (part,), ((linear(matrix), when),), turned=turned)


def in_halves(tensor: ModuleTensor) -> ModuleTensor:
    """A stack that joins components index by index, with these one after the other; else the same."""
    matrices = [matrix for matrix in of_experts(tensor) if matrix.parts[0].label is not None]
    stack = tensor.shapes[0][0] if matrices else Shape(())
    one_after_another = {summand.label for dim in stack.dims for summand in dim.summands}
    if all(matrix.parts[0].label in one_after_another for matrix in matrices):
        return tensor
    outs = [matrix.shapes[0][0].dims[0] for matrix in matrices]
    joined = Dim(tuple(Summand((dim,), f"part{place}") for place, dim in enumerate(outs)))
    dims = (stack.dims[0], joined, matrices[0].shapes[0][0].dims[1])
    parts = tuple(replace(matrix.parts[0], at=None) for matrix in matrices)
    return ModuleTensor(tensor.name, parts, ((Shape(dims), tensor.shapes[0][1]),), turned=matrices[0].turned)


def _components(name: str, of: tuple[Rule, ...]) -> Iterator[tuple[str, Part, tuple[Rule, ...]]]:
    """The components of a checkpoint's tensor that lie in one piece, under their names where they are not packed."""
    shape, (module, _, leaf) = of[0].shapes[0], name.rpartition(".")
    for part in components(shape) if not shape.is_open else ():
        dim = [Dim((Summand(of.factors),)) for of in shape.dims[part.dim].summands if of.label == part.label]
        if len(dim) == 1:
            rule = Rule((Shape((*shape.dims[: part.dim], *dim, *shape.dims[part.dim + 1 :]), shape.arrow),), of[0].when)
            yield f"{module.rpartition('.')[0]}.{part.label}_proj.{leaf}", Part(name, part.label), (rule,)


def _each(of: Sequence[Rule]) -> Iterator[tuple[Shape, Expression | None]]:
    return ((shape, rule.when) for rule in of for shape in rule.shapes)


def _joined(use: Use, of: Sequence[Sequence[Rule]]) -> Iterator[tuple[Shape, Expression | None]]:
    """The shapes of a tensor that is joined of these, one for each shape that all of them have."""
    for alternatives in zip(*map(list, map(_each, of)), strict=False):
        shapes = [shape for shape, _ in alternatives]
        if any(shape.is_open for shape in shapes):
            continue
        shape_of = shapes[0]
        if use.line.output_first and shape_of.arrow is not None:
            shape_of = Shape((*shape_of.dims[:-2], shape_of.dims[-1], shape_of.dims[-2]))
        if len(shapes) > 1:
            at = shape_of.output_dim if shape_of.output_dim is not None else 0
            dims = [shape.dims[at] for shape in shapes]
            sum_of = Dim(tuple(Summand((dim,), f"part{place}") for place, dim in enumerate(dims)))
            shape_of = Shape((*shape_of.dims[:at], sum_of, *shape_of.dims[at + 1 :]), shape_of.arrow)
        if use.stacked:
            arrow = None if shape_of.arrow is None else shape_of.arrow + 1
            shape_of = Shape((Dim((Summand((use.stacked,)),)), *shape_of.dims), arrow)
        yield shape_of, alternatives[0][1]
