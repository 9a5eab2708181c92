"""Where the elements of a stored tensor of another program's come from: blocks that lie in both, with their strides.

A program's page says what it joins, stacks and reorders (``reshard.planning.arrangement.Portion``), the plan says which
runs of each factor a rank owns. From these alone follows a *block*: elements that have one stride along each factor, in
the original's tensor as well as in the rank's. Where the engine finds them is not asked.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from formats.errors import PlanError
from formats.notation.components import components
from reshard.planning.arrangement import Geometry, Portion
from reshard.planning.model import Kind, Model
from reshard.planning.plan import Layout
from verify.bytes.views import pieces


@dataclass(frozen=True)
class Block:
    """Elements of an atom, a dimension for each of its factors in the order in which the program stores them.

    ``shard`` is the first element in the rank's tensor and ``shard_strides`` the steps there, ``original`` and
    ``original_strides`` those in the original's tensor; all count elements. For an atom that is what one index of a
    tensor has, they count from that index on. ``original`` is None for padding. ``first`` is the index of the first
    element in the original's tensor (the padded one), and a step along a factor moves ``step`` along dimension ``dim``.
    """

    shape: tuple[int, ...]
    shard: int
    shard_strides: tuple[int, ...]
    original: int | None
    original_strides: tuple[int, ...]
    first: tuple[int, ...]
    along: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Part:
    """What a rank has of a stored tensor: its shape, and the blocks of each atom (None: it has nothing of it)."""

    shape: tuple[int, ...]
    atoms: tuple[tuple[Block, ...] | None, ...]


@dataclass(frozen=True)
class Spread:
    """Where the factors of an atom lie in the original's tensor.

    ``along`` has, for each factor, its dimension and how far one step of it moves there; ``first`` where the atom
    begins in each dimension.
    """

    along: tuple[tuple[int, int], ...]
    first: tuple[int, ...]


def spread_of(model: Model, kind: Kind, portion: Portion) -> Spread:
    """Where the factors of a portion's atoms lie in tensors of a kind."""
    component, shift = portion.component, int(portion.by_index)
    sizes = model.sizes.of(dict(kind.indices))
    lengths = component.shape.sizes(sizes)
    first = [0] * (len(component.counts) + shift)
    joined = 1
    if component.label is not None:
        parts = components(kind.rule)
        number = [part.label for part in parts].index(component.label)
        own = [math.prod(part.shape.sizes(sizes)[p] for p in part.of_dim(part.dim)[part.lead :]) for part in parts]
        joined, first[component.dim + shift] = sum(own), sum(own[:number])
    along = [(0, 0)] * len(lengths)
    for dim in range(len(component.counts)):
        step, places = 1, component.of_dim(dim)
        for number, place in reversed([*enumerate(places)]):
            if component.label is not None and dim == component.dim and number == component.lead - 1:
                step = joined
            along[place] = dim + shift, step
            step *= lengths[place]
    return Spread(tuple(along), tuple(first))


def part_of(geometry: Geometry, kinds: Sequence[Kind], model: Model, rank: int) -> Part | None:
    """What a rank has of a stored tensor, whose portions are of these kinds; None if it has nothing of it.

    Raises PlanError where an atom has other dimensions than factors.
    """
    portions, layouts = geometry.portions, geometry.layouts
    spreads = [spread_of(model, kind, portion) for kind, portion in zip(kinds, portions, strict=True)]
    atoms: list[tuple[Block, ...] | None] = [None] * len(layouts)
    shape: tuple[int, ...] = ()
    count = size = 0
    for start in range(0, len(layouts), len(portions)):
        slots = layouts[start : start + len(portions)]
        if any(rank not in layout.boxes for layout in slots):
            continue
        lengths = [_lengths(layout, rank, portion) for layout, portion in zip(slots, portions, strict=True)]
        shape, begin = _shape(portions, lengths), 0
        row = sum(math.prod(own[p.outer :]) for own, p in zip(lengths, portions, strict=True))
        size = math.prod(shape)
        for slot, (own, portion) in enumerate(zip(lengths, portions, strict=True)):
            inner = own[portion.outer :]
            strides = (*_strides(own[: portion.outer], row), *_strides(inner, 1))
            base = count * size + begin
            atoms[start + slot] = tuple(_blocks(slots[slot], rank, kinds[slot], portion, spreads[slot], base, strides))
            begin += math.prod(inner)
        count += 1
    if not count:
        return None
    return Part((count, *shape) if geometry.is_stack else shape, tuple(atoms))


def _lengths(layout: Layout, rank: int, portion: Portion) -> list[int]:
    """The rank's length of each factor, in the stored order."""
    dims = layout.boxes[rank].dims
    if len(dims) != len(portion.order):
        raise PlanError(f"'{layout.rule}' has other dimensions than factors")
    return [sum(run.length for run in dims[place]) for place in portion.order]


def _shape(portions: Sequence[Portion], lengths: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """The shape of what is joined; scalars are joined to a vector."""
    first = portions[0]
    if len(portions) > 1 and not first.counts:
        return (len(portions),)
    shape, start = [], 0
    for dim, factors in enumerate(first.counts):
        ends = (start + portion.counts[dim] for portion in portions)
        own = [math.prod(each[start:end]) for each, end in zip(lengths, ends, strict=True)]
        shape.append(sum(own) if dim == first.dim else own[0])
        start += factors
    return tuple(shape)


def _strides(lengths: Sequence[int], last: int) -> list[int]:
    """The strides of dimensions in row-major order, the last of which has a stride of ``last``."""
    found = [last]
    for length in reversed(lengths[1:]):
        found.insert(0, found[0] * length)
    return found[: len(lengths)]


def _blocks(
    layout: Layout, rank: int, kind: Kind, portion: Portion, spread: Spread, base: int, strides: Sequence[int]
) -> Iterator[Block]:
    """The blocks of an atom on a rank: one for each piece of each factor."""
    steps = _strides(kind.shape, 1)
    owned = [list(pieces(layout.boxes[rank].dims[place], layout.full[place])) for place in portion.order]
    along = tuple(spread.along[place] for place in portion.order)
    for chosen in itertools.product(*owned):
        first = [*spread.first]
        for piece, (dim, step) in zip(chosen, along, strict=True):
            first[dim] += piece.start * step
        inside = not any(piece.padding for piece in chosen)
        yield Block(
            shape=tuple(piece.length for piece in chosen),
            shard=base + sum(piece.local * stride for piece, stride in zip(chosen, strides, strict=True)),
            shard_strides=tuple(strides),
            original=sum(i * step for i, step in zip(first, steps, strict=True)) if inside else None,
            original_strides=tuple(steps[dim] * step for dim, step in along),
            first=tuple(first),
            along=along,
        )
