"""The pure planner of slabs, which says which bytes go where between two spreads of one atom
(``reshard.placement.pieces``).

It yields slabs: steps of bounded size, which read long ranges of the source's files and write long ranges of the
target's. No source byte is read twice, and no target byte is written twice. This module opens no file. Splitting (1 ->
N), merging (N -> 1) and re-splitting (N -> M) are the same operation.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

from reshard.formats.errors import PlanError
from reshard.formats.notation.axes import Run, merge_runs
from reshard.placement.pieces import Cuts, Piece, Runs, Segment, Spread, local_index

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from reshard.move.changes import Change, Edit

LARGEST = 8 << 20
"""The largest budget in bytes of a slab: what is read, copied and written stays in the processor's cache."""


ALONE = 1 << 18
"""Bytes, read and written, of a plain range that is a step of its own: it is written as it was read, not copied."""


class Rows(NamedTuple):
    """Bytes of a tensor, in an order: from ``offset`` on in pieces of ``inner`` bytes each. ``outer`` has the sizes and
    strides (bytes) of the dimensions that the pieces make, fastest first; () for one piece.
    """

    offset: int
    outer: tuple[tuple[int, int], ...]
    inner: int

    def ranges(self, begin: int, length: int) -> Iterable[tuple[int, int, int]]:
        """Return the ranges of the tensor that hold bytes ``begin`` to ``begin + length`` of these rows: the offset of
        each, its position among these bytes, and its length.
        """
        return self._pieces(begin, length) if self.outer else ((self.offset + begin, 0, length),)

    def _pieces(self, begin: int, length: int) -> Iterator[tuple[int, int, int]]:
        position = 0
        while position < length:
            row, within = divmod(begin + position, self.inner)
            count, at = min(self.inner - within, length - position), self.offset + within
            for size, stride in self.outer:
                row, index = divmod(row, size)
                at += index * stride
            yield at, position, count
            position += count


def rows_of(piece: Piece, order: Sequence[int], bits: int) -> Rows:
    """The bytes of a piece, with its dimensions in this order; an element has ``bits`` bits.

    Raises PlanError if it begins or ends within a byte.
    """

    def nbytes(elements: int) -> int:
        whole, remainder = divmod(elements * bits, 8)
        if remainder:
            raise PlanError(f"elements of {bits} bits would be cut within a byte")
        return whole

    shape, inner, outer = piece.shape, 1, list[tuple[int, int]]()
    for size, stride in ((shape[d], piece.strides[d]) for d in reversed(order)):
        if size == 1:
            continue
        if not outer and stride == inner:
            inner *= size
        elif outer and stride == outer[-1][0] * outer[-1][1]:
            outer[-1] = outer[-1][0] * size, outer[-1][1]
        else:
            outer.append((size, stride))
    return Rows(nbytes(piece.base), tuple((size, nbytes(stride)) for size, stride in outer), nbytes(inner))


@dataclass(frozen=True)
class Region:
    """A part of a rank's bytes of an atom."""

    rank: int
    offset: int
    """The first byte of its rows."""
    shape: tuple[int, ...]
    """The dimensions, with bytes last."""
    rows: Rows
    needed: Runs | None = None
    """The runs to read of the last dimension, if not all of a row is needed."""

    @cached_property
    def nbytes(self) -> int:
        """Size in bytes."""
        return math.prod(self.shape)

    def ranges(self, begin: int, length: int) -> Iterable[tuple[int, int, int]]:
        """Return the ranges of ``length`` bytes from ``begin`` on in the rank's tensor (see ``Rows.ranges``)."""
        return self.rows.ranges(self.offset + begin, length)

    def shifted(self, by: int) -> Region:
        """The same, moved by ``by`` indices of the first dimension."""
        return Region(self.rank, self.offset + by * math.prod(self.shape[1:]), self.shape, self.rows, self.needed)


Slices = tuple[Any, ...]
"""An index into a numpy array."""


@dataclass(frozen=True, slots=True)
class Copy:
    """A copy of a block from a region that is read to one that is written, through ``edit``; both by their numbers in
    the slab. Without a source it writes zeros. As a check, the target is another region that is read, and must be
    equal.
    """

    source: int | None
    source_slices: Slices
    target: int
    target_slices: Slices
    edit: Edit | None = None

    def block(self, regions: Sequence[NDArray[np.uint8]]) -> NDArray[np.uint8] | int:
        """The bytes that the target gets, or has, given the regions that were read."""
        if self.source is None:
            return 0
        block = regions[self.source][self.source_slices]
        return block if self.edit is None else self.edit(block)


@dataclass(frozen=True)
class Slab:
    """One step: read, check, copy, write. Copies and checks name regions by their numbers.

    If ``is_flat``, all regions are plain byte ranges and each copy is contiguous in source and target.
    """

    reads: tuple[Region, ...]
    writes: tuple[Region, ...]
    copies: tuple[Copy, ...]
    checks: tuple[Copy, ...]
    is_flat: bool

    @cached_property
    def copies_to(self) -> Sequence[Sequence[Copy]]:
        """The copies of each region that is written."""
        copies: list[list[Copy]] = [[] for _ in self.writes]
        for copy in self.copies:
            copies[copy.target].append(copy)
        return copies

    def shifted(self, by: int) -> Slab:
        """The same step, moved by ``by`` indices of the first dimension."""
        reads, writes = (tuple(r.shifted(by) for r in regions) for regions in (self.reads, self.writes))
        return replace(self, reads=reads, writes=writes)

    @cached_property
    def nbytes(self) -> int:
        """Bytes read and written."""
        return sum(region.nbytes for region in (*self.reads, *self.writes))


class Route(ABC):
    """The way of a tensor from one layout to another."""

    change: Change | None = None
    """The change of each element on the way."""

    @abstractmethod
    def slabs(self, budget: int) -> Iterator[Slab]:
        """Steps of about ``budget`` bytes of buffer each, in the order of the source."""


class _RankPiece(NamedTuple):
    """A piece of a rank: its bytes, and the runs that it has of each dimension, and how many indices these are."""

    rank: int
    rows: Rows
    runs: tuple[Runs, ...]
    shape: tuple[int, ...]


class Transfer(Route):
    """The way of an atom from one spread to another, for some target ranks."""

    def __init__(
        self,
        source: Spread,
        target: Spread,
        item_bits: int,
        ranks: frozenset[int],
        *,
        compare: bool = True,
        zeros: bool = True,
        change: Change | None = None,
    ) -> None:
        """An element has ``item_bits`` bits; ``change`` changes each.

        Without ``compare`` only one of several replicas is read. Without ``zeros`` the source's padding is not read,
        and may hold anything. Raises PlanError if a cut falls within a byte.
        """
        self._compare, self._zeros, self.change = compare, zeros, change
        sources = [(rank, piece) for rank, pieces in sorted(source.pieces.items()) for piece in pieces]
        targets = [(rank, piece) for rank, pieces in sorted(target.pieces.items()) if rank in ranks for piece in pieces]
        dims, self._order = _dims(
            source, target, [piece for _, piece in (*sources, *targets)], None if change else item_bits
        )
        self._outer = next((d for d, at in enumerate(self._order) if d != at), len(dims)) - 1
        bits = (change.before * 8, change.after * 8) if change else (item_bits, item_bits)
        rows = [rows_of(piece, source.order, bits[0]) for _, piece in sources]
        rows += [rows_of(piece, target.order, bits[1]) for _, piece in targets]
        parts = []
        for i, (rank, _) in enumerate((*sources, *targets)):
            runs = tuple(dim.runs[i] for dim in dims)
            parts.append(_RankPiece(rank, rows[i], runs, tuple(sum(run.length for run in of_dim) for of_dim in runs)))
        self._sources, self._targets = parts[: len(sources)], parts[len(sources) :]
        sides = ([part.runs for part in side] for side in (self._sources, self._targets))
        self._cuts = Cuts([dim.size for dim in dims], *sides)
        self._tails = ((change.before,), (change.after,)) if change else ((), ())

    def slabs(self, budget: int) -> Iterator[Slab]:
        """Steps of about ``budget`` bytes of buffer each, in the order of the source."""
        steps = self._steps(min(budget, LARGEST), (), self._cuts.all)
        return (slab for slab in steps if slab.reads or slab.writes)

    def _steps(self, budget: int, lead: tuple[int, ...], within: Segment) -> Iterator[Slab]:
        """The steps of one index of each dimension in ``lead``, the last of them in the segment ``within``.

        Neighbouring segments are one step as far as they fit into the budget. One that is too large is cut into ranges
        of its indices, or, if an index is too large, into the steps of each.
        """
        depth, room, groups = len(lead), -1, list[list[Segment]]()
        is_flat = self._is_flat(depth)
        for segment in self._cuts.segments(depth, within):
            if segment.is_data and not segment.targets:
                room = -1
                continue
            nbytes = segment.length * self._cost(depth, segment)
            is_alone = is_flat and nbytes >= ALONE
            if nbytes > room or is_alone:
                groups.append([])
                room = budget
            groups[-1].append(segment)
            room = -1 if is_alone else room - nbytes
        for group in groups:
            first, cost = group[0], max(1, self._cost(depth, group[0]))
            most, end = max(1, budget // cost), first.offset + first.length
            if len(group) > 1 or first.length <= most:
                yield self._slab(lead, group)
            elif cost > budget and depth < self._outer:
                for index in range(first.offset, end):
                    yield from self._steps(budget, (*lead, index), first)
            else:
                slab = self._slab(lead, [first._replace(length=most)])
                yield from (slab.shifted(by) for by in range(0, first.length - most + 1, most))
                if rest := first.length % most:
                    yield self._slab(lead, [first._replace(offset=end - rest, length=rest)])

    def _is_flat(self, depth: int) -> bool:
        """Whether plain byte ranges are read and written from a dimension on."""
        return depth == len(self._order) - 1 and self.change is None

    def _cost(self, depth: int, segment: Segment) -> int:
        """Bytes of buffer for one index of a segment."""
        nbytes = 0
        for ids, parts, tail in (
            (segment.sources, self._sources, self._tails[0]),
            (segment.targets, self._targets, self._tails[1]),
        ):
            sizes = (math.prod(parts[i].shape[depth + 1 :]) for i in ids)
            nbytes += len(ids) * max(sizes, default=0) * math.prod(tail)
        return nbytes

    def _slab(self, lead: Sequence[int], group: Sequence[Segment]) -> Slab:
        """The step of some neighbouring segments of the dimension behind ``lead``."""
        depth, start, end = len(lead), group[0].offset, group[-1].offset + group[-1].length
        order = [d for d in self._order if d >= depth]
        sources = _Regions(self._sources, lead, start, end, sorted(order), self._tails[0])
        targets = _Regions(self._targets, lead, start, end, order, self._tails[1])
        edit = _edit(self.change, [d - depth for d in order])
        copies, checks = list[Copy](), list[Copy]()
        for cell in ((first, *rest) for first in group for rest in self._cuts.cells(depth + 1, first)):
            holders, is_data = sorted(cell[-1].sources), cell[-1].is_data
            if is_data and not holders:
                raise PlanError("a target wants elements that no source holds")
            holders = holders[: None if self._compare else 1] if is_data or self._zeros else []
            places = [sources.block(i, cell) for i in holders]
            into = [targets.block(i, cell) for i in sorted(cell[-1].targets)]
            if is_data:
                checks += [Copy(*place, *places[0]) for place in places[1:]]
                copies += [Copy(*places[0], *place, edit) for place in into]
            else:
                checks += [Copy(None, (), *place) for place in places]
                copies += [Copy(None, (), *place) for place in into]
        return Slab(
            sources.regions(partial=True), targets.regions(), tuple(copies), tuple(checks), self._is_flat(depth)
        )


class _Dim(NamedTuple):
    """One dimension of an atom, or several that neither side takes apart: its size, and the runs of each piece."""

    size: int
    runs: Sequence[Runs]


def _dims(source: Spread, target: Spread, pieces: Sequence[Piece], bits: int | None) -> tuple[list[_Dim], list[int]]:
    """The dimensions as the source stores them, and their numbers in the order in which the target does.

    The last one counts bytes of elements of so many ``bits``, or, without, elements. Each that is whole everywhere is
    joined to the one before it, if that is so on both sides. Raises PlanError if a byte would be cut.
    """
    dims = {d: _Dim(source.full[d], tuple(piece.runs[d] for piece in pieces)) for d in source.order}
    order, goal = [*source.order], [*target.order]
    if bits is not None and bits % 8 == 0:
        dims[len(dims)] = _whole(bits // 8, len(pieces))
        order, goal = [*order, len(order)], [*goal, len(goal)]
    elif bits is not None:
        last = dims[order[-1]] if order else _whole(1, len(pieces))
        ends = [number for runs in last.runs for run in runs for number in (run.offset, run.length)]
        if order[-1:] != goal[-1:] or any(number * bits % 8 for number in (last.size, *ends)):
            raise PlanError(f"elements of {bits} bits would be cut within a byte")
        dims[order[-1]] = _scaled(last, bits, 8)
    place, groups = {d: i for i, d in enumerate(goal)}, list[list[int]]()
    for d in order:
        is_whole = all(runs == (Run(0, dims[d].size),) for runs in dims[d].runs)
        if groups and is_whole and place[d] == place[groups[-1][-1]] + 1:
            groups[-1].append(d)
        else:
            groups.append([d])
    joined = [_scaled(dims[first], math.prod(dims[d].size for d in others)) for first, *others in groups]
    numbers = sorted(range(len(groups)), key=lambda i: place[groups[i][0]])
    if numbers[:1] != [0]:  # the slowest dimension is another one there, or there is none
        joined, numbers = [_whole(1, len(pieces)), *joined], [0, *(number + 1 for number in numbers)]
    return joined, numbers


def _whole(size: int, pieces: int) -> _Dim:
    """A dimension of which each piece has all indices."""
    return _Dim(size, ((Run(0, size),),) * pieces)


def _scaled(dim: _Dim, factor: int, divisor: int = 1) -> _Dim:
    runs = (
        tuple(Run(run.offset * factor // divisor, run.length * factor // divisor) for run in of_piece)
        for of_piece in dim.runs
    )
    return _Dim(dim.size * factor // divisor, tuple(runs))


def _edit(change: Change | None, axes: Sequence[int]) -> Edit | None:
    """Return a function that changes a block's elements, and brings its dimensions into the target's order; None for
    neither.

    Raises PlanError for a change that is not known.
    """
    elements = change.elements() if change is not None else None
    if elements is None and [*axes] == sorted(axes):
        return None

    def edit(block: NDArray[np.uint8]) -> NDArray[np.uint8]:
        block = block if elements is None else elements(block)
        return block.transpose([*axes, *range(len(axes), block.ndim)])

    return edit


class _Regions:
    """The regions that a slab reads or writes, collected block by block. ``order`` has the dimensions as they lie."""

    def __init__(
        self, parts: Sequence[_RankPiece], lead: Sequence[int], start: int, end: int, order: Sequence[int],
        tail: tuple[int, ...],
    ) -> None:  # fmt: skip
        self._parts, self._lead, self._start, self._end, self._order, self._tail = parts, lead, start, end, order, tail
        self._of: dict[int, tuple[int, int, Region]] = {}
        """For each piece: the number of its region, its first index of the dimension that is cut, and the region."""
        self._needed: dict[int, set[Run]] = {}

    def block(self, piece: int, cell: Sequence[Segment]) -> tuple[int, Slices]:
        """The number of a piece's region, and the slices of a block in it."""
        part, depth = self._parts[piece], len(self._lead)
        if piece not in self._of:
            first, last = (local_index(part.runs[depth], index) for index in (self._start, self._end))
            shape = (*(last - first if d == depth else part.shape[d] for d in self._order), *self._tail)
            place = 0
            for size, runs, index in zip(part.shape, part.runs, self._lead, strict=False):
                place = place * size + local_index(runs, index)
            offset = (place * part.shape[depth] + first) * math.prod(shape[1:])
            self._of[piece] = len(self._of), first, Region(part.rank, offset, shape, part.rows)
        number, first, _ = self._of[piece]
        slices = []
        for d in self._order:
            begin = local_index(part.runs[d], cell[d - depth].offset) - (first if d == depth else 0)
            slices.append(slice(begin, begin + cell[d - depth].length))
        if not self._tail:
            self._needed.setdefault(piece, set()).add(Run(slices[-1].start, slices[-1].stop - slices[-1].start))
        return number, (*slices, *(slice(None) for _ in self._tail))

    def regions(self, *, partial: bool = False) -> tuple[Region, ...]:
        """The regions by their numbers; with ``partial``, only the needed parts of their rows are read."""
        numbered = []
        for piece, (_, _, region) in self._of.items():
            runs = tuple(merge_runs(sorted(self._needed.get(piece, ()), key=lambda run: run.offset)))
            is_part = partial and not self._tail and len(region.shape) > 1 and runs != (Run(0, region.shape[-1]),)
            numbered.append(replace(region, needed=runs) if is_part else region)
        return tuple(numbered)
