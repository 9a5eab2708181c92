"""Places of an original tensor's elements in the tensors of each holder, and the chunks in which they are compared.

The placement (``reshard.placement.geometry``) is taken as data: the pieces of an atom that a holder (a rank, or a file
with chunks) has. With the place of the atom's factors in the original's tensor they are *blocks*: elements with one
step along each factor on both sides. The engine that moved them is not asked.

A *chunk* is a range of the original's elements as they are stored, padding included. It takes blocks of each *part*
(the elements that a holder has, in one of its own tensors), which lie in one range of the holder's bytes. Each byte of
the original is read once. So is each byte of a holder, if a chunk's elements fill their range; if they do not, as in a
transposed matrix, several chunks *share* the range.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from reshard.formats.errors import PlanError
from reshard.formats.notation.axes import Run, Shape
from reshard.formats.notation.components import components
from reshard.mesh.plan import Layout
from reshard.placement.geometry import Geometry, row_major
from reshard.placement.portions import Portion

CHUNK = 2 << 20
"""Bytes of the original that are compared at a time: they fit into the cache, and Python's overhead is small."""

WIDER = 8
"""So many times as many, if each chunk has some bytes of a long range of a holder."""

WINDOW = 4 << 20
"""So many bytes of such a range are compared at a time."""

Array = npt.NDArray[Any]


def dot(indices: Iterable[int], steps: Iterable[int]) -> int:
    """Return the distance, in elements, from the first element to the one at these indices."""
    return sum(index * step for index, step in zip(indices, steps, strict=True))


class Line(NamedTuple):
    """The place of a block's elements in a tensor: the number of the first, and the step along each factor."""

    first: int
    steps: tuple[int, ...]

    def at(self, index: Iterable[int]) -> int:
        """The number of an element."""
        return self.first + dot(index, self.steps)

    def moved(self, index: Iterable[int]) -> Line:
        """The same from an element on."""
        return Line(self.at(index), self.steps)

    def end(self, shape: Iterable[int]) -> int:
        """The number behind the last element, of so many along each factor."""
        return self.at(n - 1 for n in shape) + 1

    def in_bytes(self, shape: tuple[int, ...], bits: int) -> tuple[Line, tuple[int, ...], int]:
        """The same in bytes, how many elements there are along each factor, and the bytes of one.

        If a byte has parts of several elements, the bytes count as elements. Raises PlanError where these elements do
        not follow each other.
        """
        if not bits % 8:
            item = bits // 8
            return Line(self.first * item, tuple(step * item for step in self.steps)), shape, item
        if self.steps[-1:] != (1,) or any(n * bits % 8 for n in (self.first, shape[-1], *self.steps[:-1])):
            raise PlanError(f"elements of {bits} bits would be cut within a byte")
        steps = (*(step * bits // 8 for step in self.steps[:-1]), 1)
        return Line(self.first * bits // 8, steps), (*shape[:-1], shape[-1] * bits // 8), 1

    def extent(self, shape: tuple[int, ...], bits: int) -> tuple[int, int]:
        """The first byte, and how many there are to the last element."""
        line, shape, item = self.in_bytes(shape, bits)
        return line.first, line.end(shape) - line.first - 1 + item

    def array(self, data: Array, begin: int, shape: tuple[int, ...], bits: int) -> Array:
        """The elements as unsigned integers, from bytes that begin with the element ``begin``."""
        line, shape, item = self.in_bytes(shape, bits)
        return np.ndarray(shape, f"<u{item}", data.data, line.first - begin * bits // 8, line.steps)


class Block(NamedTuple):
    """Elements of a tensor, a dimension for each factor in the order in which a holder stores them.

    They lie in the holder's tensor, in the original with its padding, and in the original: None for padding.
    """

    shape: tuple[int, ...]
    stored: Line
    padded: Line
    original: Line | None

    def cut(self, runs: Sequence[Run]) -> Block:
        """The elements of a range of each factor."""
        shape, starts = tuple(run.length for run in runs), [run.offset for run in runs]
        if shape == self.shape:
            return self
        original = self.original and self.original.moved(starts)
        return Block(shape, self.stored.moved(starts), self.padded.moved(starts), original)

    def further(self, original: int, padded: int) -> Block:
        """A block that lies as many elements further on, in the original and in the padded one."""
        own = self.original and self.original._replace(first=self.original.first + original)
        return self._replace(padded=self.padded._replace(first=self.padded.first + padded), original=own)


class HolderPart(NamedTuple):
    """A holder's part of a tensor."""

    use: int
    """The number of the stored tensor, among those that have elements of this one."""
    holder: int
    """The number of the rank or file."""
    blocks: tuple[Block, ...]
    bits: int
    """The bits of a stored element."""
    function: str | None = None
    """The function of the original's element that is stored."""
    zero: bool = False
    """Whether the holder has zeros there."""
    stated: tuple[int, ...] | None = None
    """The shape of a weight that the holder states, instead of the original's."""


def whole(shape: Sequence[int]) -> Block:
    """All elements of two tensors that are stored alike."""
    line = Line(0, row_major(shape, 1))
    return Block(tuple(shape), line, line, line)


def line_of(rule: Shape, portion: Portion, sizes: Mapping[str, int], shape: tuple[int, ...]) -> Line:
    """Return the place of a portion's atoms in tensors with a rule, of these sizes of the axes and this shape: their
    factors in the order in which the program stores them. An atom at one index of the first dimension lies as at index
    0.
    """
    component, shift = portion.component, int(portion.component.index is not None)
    lengths, first, joined = component.shape.sizes(sizes), [0] * (len(portion.component.counts) + shift), 1
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
    rows = row_major(shape, 1)
    return Line(dot(first, rows), tuple(rows[dim] * step for dim, step in (along[factor] for factor in portion.order)))


def blocks_of(geometry: Geometry, holder: int, number: int, original: Line, padded: Line) -> Iterator[Block]:
    """Yield a holder's blocks of an atom of a stored tensor: one for each run of each factor, without and with padding.

    ``original`` and ``padded`` are the place of the whole atom in the original and in the padded original. Raises
    PlanError if the atom has other dimensions than factors.
    """
    layout, order = geometry.layouts[number], geometry.portions[number % len(geometry.portions)].order
    if len(layout.full) != len(order):
        raise PlanError(f"'{layout.rule}' has other dimensions than factors")
    for piece in geometry.spread(number).pieces.get(holder, ()):
        first = geometry.first(holder, number) + piece.base
        line = Line(first, tuple(piece.strides[factor] for factor in order))
        for chosen in itertools.product(*(_ranges(piece.runs[factor], layout.full[factor]) for factor in order)):
            starts, is_padding = [at for at, *_ in chosen], any(beyond for *_, beyond in chosen)
            yield Block(
                tuple(length for _, length, *_ in chosen),
                line.moved(local for *_, local, _ in chosen),
                padded.moved(starts),
                None if is_padding else original.moved(starts),
            )


def _ranges(runs: Iterable[Run], full: int) -> Iterator[tuple[int, int, int, bool]]:
    """Cut runs of a factor at the begin of padding. Yields the begin and length of each, the holder's index, and
    whether it is padding.
    """
    local = 0
    for run in runs:
        inside = max(0, min(run.length, full - run.offset))
        if inside:
            yield run.offset, inside, local, False
        if run.length > inside:
            yield run.offset + inside, run.length - inside, local + inside, True
        local += run.length


def owners(shape: Sequence[int], owned: Sequence[Sequence[Sequence[Run]]]) -> tuple[list[list[int]], Array]:
    """Cut each dimension wherever an owner's run begins or ends, and count the owners of each cell of that grid.

    ``owned`` has, of each owner, its runs along each dimension.
    """
    cuts = [
        sorted({0, size, *(n for dims in owned for run in dims[dim] for n in (run.offset, run.end))})
        for dim, size in enumerate(shape)
    ]
    count = np.zeros([len(ends_of_dim) - 1 for ends_of_dim in cuts], np.intp)
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


# -------------------------------------------------------------------------------------------------------------- chunks


class Read(NamedTuple):
    """A chunk's share of a part."""

    part: int
    begin: int
    """The first element, in the holder's tensor."""
    end: int
    """The element behind the last."""
    elements: int
    """The number of elements in the blocks; if it is less than all from ``begin`` to ``end``, others lie between them.
    """
    blocks: tuple[Block, ...]


class View:
    """The parts of a tensor of this shape, padded shape and bits of an element; tensors that are alike share a view.

    ``shared`` are the parts in which several chunks have bytes of the same range.
    """

    def __init__(
        self, shape: tuple[int, ...], padded: tuple[int, ...], bits: int, parts: Iterable[HolderPart]
    ) -> None:  # fmt: skip
        self.shape, self.padded, self.parts = shape, padded, tuple(parts)
        self._rows, self._size = row_major(padded, 1), math.prod(padded)
        # Chunks are whole rows of the first dimension of which a row is small enough, and end with that dimension: the
        # next element may lie elsewhere. They begin at a word if rows are short.
        most = 8 * CHUNK // bits
        rows = ((row, n * row) for row, n in zip(self._rows, padded, strict=True) if 0 < row <= most)
        row, self._whole = next(rows, (1, math.prod(padded[-1:])))
        self._step = max(8, row, most // max(8, row) * max(8, row))
        self.reads = lru_cache(1)(self._reads)  # many tensors may be so small that they are one chunk, and alike
        all_reads = (read for chunk in self.chunks() for read in self.reads(chunk))
        self.shared = frozenset(read.part for read in all_reads if read.elements != read.end - read.begin)
        self._step *= WIDER if self.shared else 1

    def chunks(self) -> Iterator[Run]:
        """All chunks, as ranges of the positions in the padded tensor."""
        for first in range(0, self._size, self._whole or 1):
            for begin in range(first, first + self._whole, self._step):
                yield Run(begin, min(self._step, first + self._whole - begin))

    def of_original(self, chunk: Run) -> Run:
        """The elements of the original in a chunk; none, if it is only padding."""
        begin, end = self._without_padding(chunk.offset), self._without_padding(chunk.end)
        return Run(begin, end - begin)

    def _without_padding(self, position: int) -> int:
        """The number of the original's elements before a position in the padded tensor."""
        count = 0
        for size, row, own_row in zip(self.shape, self._rows, row_major(self.shape, 1), strict=True):
            index, position = divmod(position, row)
            if index >= size:
                return count + size * own_row
            count += index * own_row
        return count + position

    def _reads(self, chunk: Run) -> Sequence[Read]:
        """Return the chunk's share of each part that has any of its elements."""
        reads = []
        for number, part in enumerate(self.parts):
            near = (b for b in part.blocks if b.padded.first < chunk.end and b.padded.end(b.shape) > chunk.offset)
            if blocks := tuple(inside for block in near for inside in _within(block, chunk)):
                begin = min(block.stored.first for block in blocks)
                end = max(block.stored.end(block.shape) for block in blocks)
                reads.append(Read(number, begin, end, sum(math.prod(block.shape) for block in blocks), blocks))
        return reads


def _within(block: Block, chunk: Run) -> Iterator[Block]:
    """The blocks that a chunk has of a block: a range of each factor."""
    (first, steps), shape = block.padded, block.shape
    order = sorted(range(len(steps)), key=lambda factor: -steps[factor])
    factors = [(shape[factor], steps[factor]) for factor in order]
    for chosen in ranges_between(factors, chunk.offset - first, chunk.end - first):
        runs = dict(zip(order, chosen, strict=True))
        yield block.cut([runs[factor] for factor in range(len(steps))])


def ranges_between(factors: Sequence[tuple[int, int]], begin: int, end: int) -> Iterator[tuple[Run, ...]]:
    """The indices of factors whose positions (the sums of index times step) are from ``begin`` to ``end``.

    ``factors`` are the length and the step of each. The indices come as products of one range for each factor; these
    products are disjoint.
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


def tiles(block: Block, bits: int) -> Iterator[Block]:
    """A block cut into blocks that each lie within ``WINDOW`` bytes of the holder's tensor."""
    limits = [*block.shape]
    while limits and max(spans := [(n - 1) * step for n, step in zip(limits, block.stored.steps, strict=True)]) > 0:
        if sum(spans) * bits <= 8 * WINDOW:
            break
        dim = spans.index(max(spans))
        limits[dim] = -(-limits[dim] // 2)
    ranges = (range(0, length, limit) for length, limit in zip(block.shape, limits, strict=True))
    for begins in itertools.product(*ranges):
        extents = zip(begins, limits, block.shape, strict=True)
        yield block.cut([Run(begin, min(limit, length - begin)) for begin, limit, length in extents])
