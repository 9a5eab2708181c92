"""Where the elements of a stored tensor come from: blocks of elements, with their strides there and in the original.

The placement (``reshard.placement.geometry``) is taken as data: which pieces of an atom a rank or a chunk has, with a
stride along each factor. With the place of these factors in the original's tensor they are *blocks*: elements with one
stride along each factor on both sides. The engine that moved them is not asked.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from formats.errors import PlanError
from formats.notation.axes import Run
from formats.notation.components import components
from reshard.mesh.plan import Layout
from reshard.model.model import Kind, Model
from reshard.placement.arrangement import Arrangement
from reshard.placement.geometry import Geometry, row_major
from reshard.placement.pieces import Piece as Place
from reshard.placement.portions import Portion, rule_of
from reshard.placement.stored import Stored


class Piece(NamedTuple):
    """Neighbouring indices of a factor on a rank: they begin at ``start`` in the full tensor, at ``local`` in the
    rank's part.
    """

    start: int
    length: int
    local: int
    padding: bool


def pieces(runs: Iterable[Run], full: int) -> Iterator[Piece]:
    """Pieces from runs, cut at the end of the unpadded dimension."""
    local = 0
    for run in runs:
        inside = max(0, min(run.length, full - run.offset))
        if inside:
            yield Piece(run.offset, inside, local, False)
        if run.length > inside:
            yield Piece(run.offset + inside, run.length - inside, local + inside, True)
        local += run.length


@dataclass(frozen=True)
class Block:
    """Elements of an atom, a dimension for each of its factors in the order in which the program stores them.

    ``shard`` is the first element in the rank's tensor and ``shard_strides`` the steps there, ``original`` and
    ``original_strides`` those in the original's tensor; all count elements. If an atom is one index of a tensor's first
    dimension, they count from that index on. ``original`` is None for padding. ``first`` is the index of the first
    element in the padded tensor, and a step along a factor moves ``step`` along dimension ``dim`` there.
    """

    shape: tuple[int, ...]
    shard: int
    shard_strides: tuple[int, ...]
    original: int | None
    original_strides: tuple[int, ...]
    first: tuple[int, ...]
    along: tuple[tuple[int, int], ...]

    def of_index(self, index: int, elements: int) -> Block:
        """The same block, counted in the whole tensor: the atom is this index of its first dimension, of so many
        elements each.
        """
        original = None if self.original is None else self.original + index * elements
        return replace(self, original=original, first=(self.first[0] + index, *self.first[1:]))


class Spread(NamedTuple):
    """Where the factors of an atom lie in a tensor of this shape.

    ``along`` has, for each factor, its dimension and how far one step of the factor moves there. ``first`` says where
    the atom begins in each dimension.
    """

    shape: tuple[int, ...]
    along: tuple[tuple[int, int], ...]
    first: tuple[int, ...]


def spread_of(model: Model, kind: Kind, portion: Portion, sizes: Mapping[str, int]) -> Spread:
    """Where the factors of a portion's atoms lie in tensors of a kind, with these sizes of the axes."""
    component, shift = portion.component, int(portion.component.index is not None)
    rule = rule_of(model, kind)
    lengths = component.shape.sizes(sizes)
    first = [0] * (len(component.counts) + shift)
    joined = 1
    if component.label is not None:
        parts = components(rule)
        number = [part.label for part in parts].index(component.label)
        extents = [math.prod(part.shape.sizes(sizes)[p] for p in part.of_dim(part.dim)[part.lead :]) for part in parts]
        joined, first[component.dim + shift] = sum(extents), sum(extents[:number])
    along = [(0, 0)] * len(lengths)
    for dim in range(len(component.counts)):
        step, places = 1, component.of_dim(dim)
        for number, place in reversed([*enumerate(places)]):
            if component.label is not None and dim == component.dim and number == component.lead - 1:
                step = joined
            along[place] = dim + shift, step
            step *= lengths[place]
    return Spread(rule.sizes(sizes), tuple(along), tuple(first))


class Parts:
    """What each rank has of each stored tensor; those of equal layouts are computed once."""

    def __init__(self, arrangement: Arrangement) -> None:
        self._plan = arrangement.plan
        self.kinds = {tensor.name: tensor.kind for tensor in arrangement.plan.model.tensors}
        self._cache: dict[tuple[Geometry, int, int], tuple[Block, ...]] = {}

    def of(self, stored: Stored, holder: int, number: int) -> tuple[Block, ...]:
        """The blocks that a rank, or a file with chunks, has of an atom of a stored tensor.

        Raises PlanError where an atom has other dimensions than factors.
        """
        geometry, key = stored.geometry, (stored.geometry, holder, number)
        if key not in self._cache:
            portions, layout = geometry.portions, geometry.layouts[number]
            portion, kind = portions[number % len(portions)], self.kinds[stored.atoms[number % len(portions)].tensor]
            if len(layout.full) != len(portion.order):
                raise PlanError(f"'{layout.rule}' has other dimensions than factors")
            blocks: tuple[Block, ...] = ()
            if places := geometry.spread(number).pieces.get(holder):
                model, sizes = self._plan.model, self._plan.model.sizes.of(dict(kind.indices))
                full = spread_of(model, kind, portion, sizes)._replace(shape=kind.shape)
                padding = {axis: size for axis, size in self._plan.padding.items() if axis in sizes}
                padded = spread_of(model, kind, portion, {**sizes, **padding}) if padding else full
                first = geometry.first(holder, number)
                blocks = tuple(block for at in places for block in _blocks(at, first, layout, portion, full, padded))
            self._cache[key] = blocks
        return self._cache[key]


def owners(shape: Sequence[int], owned: Sequence[Sequence[Sequence[Run]]]) -> tuple[list[list[int]], NDArray[np.intp]]:
    """The cuts of each dimension between what any of several owners has, and how many have each cell of that grid.

    ``owned`` has, of each owner, its runs along each dimension.
    """
    cuts = [
        sorted({0, size, *(n for dims in owned for run in dims[dim] for n in (run.offset, run.end))})
        for dim, size in enumerate(shape)
    ]
    count: NDArray[np.intp] = np.zeros([len(ends_of_dim) - 1 for ends_of_dim in cuts], np.intp)
    for dims in owned:
        ends = zip(cuts, dims, strict=True)
        cells = (
            np.isin(ends_of_dim[:-1], [n for r in runs for n in ends_of_dim if r.offset <= n < r.end])
            for ends_of_dim, runs in ends
        )
        count[np.ix_(*cells)] += 1
    return cuts, count


def check_all_owned(layout: Layout) -> None:
    """Raise PlanError if no rank holds some element."""
    cuts, count = owners(layout.full, [box.dims for box in layout.boxes.values()])
    inside = tuple(slice(0, ends.index(size)) for ends, size in zip(cuts, layout.full, strict=True))
    if not count[inside].all():
        raise PlanError(f"no rank holds some elements of a tensor with the rule '{layout.rule}'")


def _blocks(
    piece: Place, first: int, layout: Layout, portion: Portion, full: Spread, padded: Spread
) -> Iterator[Block]:
    """The blocks of a piece, which counts from element ``first`` on: one for each run of each factor, without and with
    padding. The factors lie in the original as ``full`` says.
    """
    order, rows = portion.order, row_major(full.shape, 1)
    strides, along = tuple(piece.strides[factor] for factor in order), tuple(padded.along[factor] for factor in order)
    original_strides = tuple(rows[dim] * step for dim, step in (full.along[factor] for factor in order))
    for chosen in itertools.product(*(pieces(piece.runs[factor], layout.full[factor]) for factor in order)):
        starts, index = [part.start for part in chosen], [*padded.first]
        for start, (dim, step) in zip(starts, along, strict=True):
            index[dim] += start * step
        original = (
            None if any(part.padding for part in chosen) else dot(full.first, rows) + dot(starts, original_strides)
        )
        shard = first + piece.base + dot([part.local for part in chosen], strides)
        shape = tuple(part.length for part in chosen)
        yield Block(shape, shard, strides, original, original_strides, tuple(index), along)


def dot(indices: Iterable[int], steps: Iterable[int]) -> int:
    """How far these indices are from the first element."""
    return sum(index * step for index, step in zip(indices, steps, strict=True))


class Strided(NamedTuple):
    """The bytes of elements: the first byte, the number of elements along each dimension, the steps and the element
    size, in bytes.
    """

    begin: int
    shape: tuple[int, ...]
    steps: tuple[int, ...]
    item: int

    @property
    def nbytes(self) -> int:
        """The bytes from the first to the last element."""
        return dot((n - 1 for n in self.shape), self.steps) + self.item


def strided(offset: int, shape: tuple[int, ...], first: int, strides: Sequence[int], bits: int) -> Strided:
    """Where elements of a tensor at ``offset`` are. If a byte has several elements, the bytes count as elements.

    Raises PlanError where elements that share a byte do not follow each other.
    """
    if not bits % 8:
        item = bits // 8
        return Strided(offset + first * item, shape, tuple(stride * item for stride in strides), item)
    count = 8 // bits
    if not strides or strides[-1] != 1 or any(n % count for n in (first, shape[-1], *strides[:-1])):
        raise PlanError(f"elements of {bits} bits would be cut within a byte")
    steps = (*(stride // count for stride in strides[:-1]), 1)
    return Strided(offset + first // count, (*shape[:-1], shape[-1] // count), steps, 1)


Factors = Sequence[tuple[int, int]]
"""The length of each factor of a dimension, and how far one step of it moves along the dimension."""


def ranges_between(factors: Factors, begin: int, end: int) -> Iterator[tuple[Run, ...]]:
    """The indices of factors whose positions (the sums of index times step) are from ``begin`` to ``end``.

    They come as products of one range for each factor; these products are disjoint.
    """
    if not factors:
        if begin <= 0 < end:
            yield ()
        return
    (length, step), *inner = factors
    extent = 1 + sum((n - 1) * inner_step for n, inner_step in inner)
    first, last = max(0, -(-begin // step)), min(length, (end - extent) // step + 1)
    if first < last:
        yield (Run(first, last - first), *(Run(0, n) for n, _ in inner))
    touched = range(max(0, (begin - extent) // step + 1), min(length, -(-end // step)))
    for index in touched:
        if not first <= index < last:
            yield from (
                (Run(index, 1), *runs) for runs in ranges_between(inner, begin - index * step, end - index * step)
            )
