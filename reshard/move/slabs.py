"""Which bytes go where: the pure planner between two spreads of one atom (``reshard.placement.pieces``).

It yields slabs: steps of bounded size, which read long ranges of the source's files and write long ranges of the
target's. No source byte is read twice, and no target byte is written twice. This module opens no file. Splitting
(1 -> N), merging (N -> 1) and re-splitting (N -> M) are the same operation.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from formats.errors import PlanError
from formats.notation.axes import Run, merge_runs, segments
from reshard.placement.pieces import Piece, Runs, Spread

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from reshard.move.moves import Change, Edit

STREAM_SLAB = 32 << 20
"""The budget in bytes of a slab that is moved piece by piece: it bounds what a killed run loses, not memory."""

BLOCK_SLAB = 8 << 20
"""The largest budget in bytes of a slab that is rearranged, so that it stays in the processor's cache."""


class Rows(NamedTuple):
    """Bytes of a tensor, in an order: from ``offset`` on in pieces of ``inner`` bytes each. ``outer`` has the sizes and
    strides (bytes) of the dimensions that the pieces make, fastest first; () for one piece.
    """

    offset: int
    outer: tuple[tuple[int, int], ...]
    inner: int

    def ranges(self, begin: int, length: int) -> Iterator[tuple[int, int, int]]:
        """The ranges of the tensor in which the bytes ``begin`` to ``begin + length`` of these are: the offset of each,
        its position among these bytes, and its length.
        """
        if not self.outer:
            yield self.offset + begin, 0, length
            return
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


@dataclass(frozen=True, slots=True)
class Region:
    """A part of what a rank has of an atom: from byte ``offset`` of its ``rows`` on, in ``shape`` with bytes last.

    ``needed`` has the runs to read of the last dimension, if not all of a row is needed, else None.
    """

    rank: int
    offset: int
    shape: tuple[int, ...]
    rows: Rows
    needed: Runs | None = None

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return math.prod(self.shape)

    def ranges(self, begin: int, length: int) -> Iterator[tuple[int, int, int]]:
        """Where ``length`` bytes from ``begin`` on lie in the rank's tensor (see ``Rows.ranges``)."""
        return self.rows.ranges(self.offset + begin, length)

    def shifted(self, by: int) -> Region:
        """The same, moved by ``by`` indices of the first dimension."""
        return Region(self.rank, self.offset + by * math.prod(self.shape[1:]), self.shape, self.rows, self.needed)


Slices = tuple[Any, ...]
"""An index into a numpy array: slices, or arrays of indices (for scales, see ``reshard.move.moves``)."""


@dataclass(frozen=True, slots=True)
class Copy:
    """Copies a block from a region that is read to one that is written, through ``edit``; both by their numbers in the
    slab. Without a source it writes zeros.
    """

    source: int | None
    source_slices: Slices
    target: int
    target_slices: Slices
    edit: Edit | None = None

    def block(self, regions: Sequence[NDArray[np.uint8]]) -> NDArray[np.uint8] | int:
        """The bytes to write, given the regions that were read."""
        if self.source is None:
            return 0
        block = regions[self.source][self.source_slices]
        return block if self.edit is None else self.edit(block)


@dataclass(frozen=True, slots=True)
class Check:
    """A block of a region that was read, after ``edit``, must equal a block of ``other``; without one, be zero."""

    source: int
    slices: Slices
    other: int | None
    other_slices: Slices
    edit: Edit | None = None

    def block(self, regions: Sequence[NDArray[np.uint8]]) -> NDArray[np.uint8]:
        """The bytes to compare, given the regions that were read."""
        block = regions[self.source][self.slices]
        return block if self.edit is None else self.edit(block)


@dataclass(frozen=True)
class Slab:
    """One step: read, check, copy, write. Copies and checks name regions by their numbers.

    If ``is_flat``, all regions are plain byte ranges and each copy is contiguous in source and target.
    """

    reads: tuple[Region, ...]
    writes: tuple[Region, ...]
    copies: tuple[Copy, ...]
    checks: tuple[Check, ...]
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

    @property
    def nbytes(self) -> int:
        """Bytes read and written."""
        return sum(region.nbytes for region in (*self.reads, *self.writes))


class Route(Protocol):
    """How a tensor goes from one layout to another."""

    def __hash__(self) -> int: ...

    @property
    def written(self) -> Sequence[Rows]:
        """The bytes that it writes of each piece of the target, in the target's order."""
        ...

    @property
    def in_one_piece(self) -> bool:
        """Whether what it reads and writes of each rank lies in one piece."""
        ...

    def slabs(self, budget: int) -> Iterator[Slab]:
        """Steps of about ``budget`` bytes of buffer each."""
        ...


@dataclass(frozen=True, slots=True)
class Segment:
    """Neighbouring indices of a dimension that the same pieces of source and target have.

    ``is_data`` is False for padding: zeros that the full checkpoint does not have.
    """

    offset: int
    length: int
    sources: frozenset[int]
    targets: frozenset[int]
    is_data: bool


class _Holding:
    """The indices that a piece has of one dimension."""

    __slots__ = ("_ends", "_starts", "length", "runs")

    def __init__(self, runs: Runs) -> None:
        self.runs = runs
        self._starts = [run.offset for run in runs]
        self._ends = list(itertools.accumulate((run.length for run in runs), initial=0))
        self.length = self._ends[-1]

    def local(self, index: int) -> int:
        """The number of its own indices before an index."""
        place = bisect_right(self._starts, index) - 1
        if place < 0:
            return 0
        return self._ends[place] + min(index - self._starts[place], self.runs[place].length)


class _Part(NamedTuple):
    """A piece of a rank: its bytes, and what it has of each dimension."""

    rank: int
    rows: Rows
    dims: tuple[_Holding, ...]


class _Dim(NamedTuple):
    """A dimension, and the runs that each piece of source and target has of it.

    ``place`` is the first, ``last`` the last place of its dimensions in the target's order.
    """

    full: int
    runs: tuple[Runs, ...]
    place: int
    last: int


class Transfer:
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
        self._compare, self._zeros, self._change = compare, zeros, change
        sources = [(rank, piece) for rank, pieces in sorted(source.pieces.items()) for piece in pieces]
        targets = [(rank, piece) for rank, pieces in sorted(target.pieces.items()) if rank in ranks for piece in pieces]
        both, place = [piece for _, piece in (*sources, *targets)], {d: i for i, d in enumerate(target.order)}
        dims = [_Dim(source.full[d], tuple(piece.runs[d] for piece in both), place[d], place[d]) for d in source.order]
        if change is None:
            dims = _in_bytes(dims, item_bits, len(both))
        joined = _joined(dims)
        order = sorted(range(len(joined)), key=lambda d: joined[d].place)
        same = next((d for d, at in enumerate(order) if d != at), len(joined))
        if not same:  # the slowest dimension is another one there, or there is none
            joined, order, same = [_whole(1, len(both), -1), *joined], [0, *(d + 1 for d in order)], 1
        self._outer, self._order = same - 1, order
        self._sizes = [dim.full for dim in joined]
        bits = (change.before * 8, change.after * 8) if change else (item_bits, item_bits)
        rows = [rows_of(piece, source.order, bits[0]) for _, piece in sources]
        rows += [rows_of(piece, target.order, bits[1]) for _, piece in targets]
        parts = [
            _Part(rank, rows[i], tuple(_Holding(dim.runs[i]) for dim in joined))
            for i, (rank, _) in enumerate((*sources, *targets))
        ]
        self._sources, self._targets = parts[: len(sources)], parts[len(sources) :]
        self._cache: dict[tuple[int, frozenset[int], frozenset[int]], tuple[Segment, ...]] = {}
        self._tails = ((change.before,), (change.after,)) if change else ((), ())

    @property
    def written(self) -> tuple[Rows, ...]:
        """The bytes that it writes of each piece of the target, in the target's order."""
        return tuple(part.rows for part in self._targets)

    @property
    def in_one_piece(self) -> bool:
        """Whether what it reads and writes of each rank lies in one piece."""
        return not any(part.rows.outer for part in (*self._sources, *self._targets))

    def slabs(self, budget: int) -> Iterator[Slab]:
        """Steps of about ``budget`` bytes of buffer each, in the order of the source."""
        budget = max(budget, STREAM_SLAB) if self._is_stream else min(budget, BLOCK_SLAB)
        depth = self._depth(budget)
        for lead in self._leads(depth):
            previous: tuple[Segment, Slab] | None = None
            for group in self._groups(lead, depth, budget):
                if previous is not None and len(group) == 1 and _continues(previous[0], group[0]):
                    slab = previous[1].shifted(group[0].offset - previous[0].offset)
                else:
                    slab = self._slab(lead, depth, group)
                previous = (group[0], slab) if len(group) == 1 else None
                if slab.reads or slab.writes:
                    yield slab

    def _segments(self, depth: int, within: Segment | None) -> tuple[Segment, ...]:
        """The segments of a dimension, of the pieces that have indices of those before it."""
        sources = frozenset(range(len(self._sources))) if within is None else within.sources
        targets = frozenset(range(len(self._targets))) if within is None else within.targets
        key = depth, sources, targets
        if key not in self._cache:
            runs = {i: self._sources[i].dims[depth].runs for i in sources}
            runs |= {~i: self._targets[i].dims[depth].runs for i in targets}
            self._cache[key] = tuple(
                Segment(
                    run.offset, run.length, frozenset(i for i in ids if i >= 0), frozenset(~i for i in ids if i < 0),
                    run.offset < self._sizes[depth],
                )
                for run, ids in segments(runs, (0, self._sizes[depth]))
            )  # fmt: skip
        return self._cache[key]

    @property
    def _is_stream(self) -> bool:
        """Whether all is plain byte ranges with one source each: they need no buffer of their size."""
        return self._is_flat(0) and all(len(segment.sources) <= 1 for segment in self._segments(0, None))

    def _is_flat(self, depth: int) -> bool:
        return depth == len(self._order) - 1 and self._change is None

    def _depth(self, budget: int) -> int:
        """The first dimension whose single indices fit into the budget."""
        for depth in range(self._outer):
            if max((self._cost(depth, segment) for segment in self._segments(depth, None)), default=0) <= budget:
                return depth
        return self._outer

    def _cost(self, depth: int, segment: Segment) -> int:
        """Bytes of buffer for one index of a segment."""
        nbytes = 0
        for numbers, parts, tail in zip(
            (segment.sources, segment.targets), (self._sources, self._targets), self._tails, strict=True
        ):
            sizes = (math.prod(dim.length for dim in parts[i].dims[depth + 1 :]) for i in numbers)
            nbytes += len(numbers) * max(sizes, default=0) * math.prod(tail)
        return nbytes

    def _leads(
        self, depth: int, within: Segment | None = None, first: int = 0
    ) -> Iterator[tuple[tuple[int, Segment], ...]]:
        """All indices of the dimensions before ``depth``, each with its segment."""
        if first == depth:
            yield ()
            return
        for segment in self._segments(first, within):
            for index in range(segment.offset, segment.offset + segment.length):
                for following in self._leads(depth, segment, first + 1):
                    yield ((index, segment), *following)

    def _groups(self, lead: Sequence[tuple[int, Segment]], depth: int, budget: int) -> Iterator[list[Segment]]:
        """Groups of neighbouring segments, or parts of them, that fit into the budget."""
        group: list[Segment] = []
        room = budget
        for segment in self._segments(depth, lead[-1][1] if lead else None):
            if not segment.targets and segment.is_data and all(s.is_data for _, s in lead):
                if group:
                    yield group
                group, room = [], budget
                continue
            cost = max(1, self._cost(depth, segment))
            offset, remaining = segment.offset, segment.length
            while remaining:
                if room < cost and group:
                    yield group
                    group, room = [], budget
                length = max(1, min(remaining, room // cost))
                group.append(replace(segment, offset=offset, length=length))
                offset, remaining, room = offset + length, remaining - length, room - length * cost
        if group:
            yield group

    def _cells(self, depth: int, segments: Sequence[Segment]) -> Iterator[tuple[Segment, ...]]:
        """All blocks of which the same pieces have all elements: a segment of each dimension from ``depth`` on."""
        for segment in segments:
            if depth + 1 == len(self._sizes):
                yield (segment,)
            else:
                below = self._segments(depth + 1, segment)
                yield from ((segment, *following) for following in self._cells(depth + 1, below))

    def _slab(self, lead: Sequence[tuple[int, Segment]], depth: int, group: Sequence[Segment]) -> Slab:
        start, end = group[0].offset, group[-1].offset + group[-1].length
        indices, order = [index for index, _ in lead], [d for d in self._order if d >= depth]
        sources = _Regions(self._sources, indices, start, end, range(depth, len(self._sizes)), self._tails[0])
        targets = _Regions(self._targets, indices, start, end, order, self._tails[1])
        axes = [d - depth for d in order]
        edit = None if self._change is None and axes == sorted(axes) else _Edit(self._change, tuple(axes))
        copies, checks = list[Copy](), list[Check]()
        is_lead_data = all(s.is_data for _, s in lead)
        for cell in self._cells(depth, group):
            is_data = is_lead_data and all(part.is_data for part in cell)
            holders, receivers = sorted(cell[-1].sources), cell[-1].targets
            if is_data and not receivers:
                continue
            if is_data and not holders:
                raise PlanError("a target wants elements that no source holds")
            holders = holders[: None if self._compare else 1] if is_data or self._zeros else []
            places = [(sources.number(i), sources.slices(i, cell)) for i in holders]
            if not is_data:
                checks += [Check(*place, None, ()) for place in places]
                copies += [Copy(None, (), targets.number(i), targets.slices(i, cell)) for i in sorted(receivers)]
                continue
            checks += [Check(*place, *places[0]) for place in places[1:]]
            copies += [Copy(*places[0], targets.number(i), targets.slices(i, cell), edit) for i in sorted(receivers)]
        flat = self._is_flat(depth)
        return Slab(
            sources.regions(partial=True),
            targets.regions(),
            tuple(_coalesced(copies) if flat else copies),
            tuple(checks),
            flat,
        )


def _whole(size: int, pieces: int, place: int) -> _Dim:
    """A dimension of which each piece has all indices."""
    return _Dim(size, ((Run(0, size),),) * pieces, place, place)


def _in_bytes(dims: Sequence[_Dim], bits: int, pieces: int) -> list[_Dim]:
    """Dimensions of which the last one counts bytes. Raises PlanError if a byte would be cut."""
    if bits % 8 == 0:
        return [*dims, _whole(bits // 8, pieces, len(dims))]
    *outer, last = dims or [_whole(1, pieces, 0)]
    ends = [number for runs in last.runs for run in runs for number in (run.offset, run.length)]
    if last.place != len(outer) or any(number * bits % 8 for number in (last.full, *ends)):
        raise PlanError(f"elements of {bits} bits would be cut within a byte")
    return [*outer, _scaled(last, bits, 8)]


def _scaled(dim: _Dim, factor: int, divisor: int = 1) -> _Dim:
    runs = tuple(
        tuple(Run(run.offset * factor // divisor, run.length * factor // divisor) for run in dim_runs)
        for dim_runs in dim.runs
    )
    return _Dim(dim.full * factor // divisor, runs, dim.place, dim.last)


def _joined(dims: Sequence[_Dim]) -> list[_Dim]:
    """Each dimension that is whole everywhere is joined to the one before it, if that is so on both sides."""
    joined: list[_Dim] = []
    for dim in dims:
        everything = all(runs == (Run(0, dim.full),) for runs in dim.runs)
        if joined and everything and dim.place == joined[-1].last + 1:
            joined[-1] = _scaled(joined[-1], dim.full)._replace(last=dim.last)
        else:
            joined.append(dim)
    return joined


def _continues(previous: Segment, segment: Segment) -> bool:
    """Whether a part follows a part of equal length in the same segment: then the slab is the one before, shifted."""
    return (
        segment.offset == previous.offset + previous.length
        and segment.length == previous.length
        and segment.is_data == previous.is_data
        and segment.sources is previous.sources
        and segment.targets is previous.targets
    )


@dataclass(frozen=True)
class _Edit:
    """Changes the elements of a block, and brings its dimensions into the target's order."""

    change: Change | None
    axes: tuple[int, ...]

    @cached_property
    def _elements(self) -> Edit | None:
        return self.change.elements() if self.change else None

    def __call__(self, block: NDArray[np.uint8]) -> NDArray[np.uint8]:
        block = block if self._elements is None else self._elements(block)
        return block.transpose([*self.axes, *range(len(self.axes), block.ndim)])


class _Regions:
    """The regions that a slab reads or writes, collected block by block. ``order`` has the dimensions as they lie."""

    def __init__(
        self,
        parts: Sequence[_Part],
        lead: Sequence[int],
        start: int,
        end: int,
        order: Sequence[int],
        tail: tuple[int, ...],
    ) -> None:
        self._parts, self._lead, self._start, self._end, self._order, self._tail = parts, lead, start, end, order, tail
        self._numbers: dict[int, tuple[int, Region]] = {}
        self._needed: dict[int, set[Run]] = {}

    def number(self, piece: int) -> int:
        """The number of a piece's region."""
        if piece not in self._numbers:
            self._numbers[piece] = len(self._numbers), self._region(self._parts[piece])
        return self._numbers[piece][0]

    def slices(self, piece: int, cell: Sequence[Segment]) -> Slices:
        """The slices of a block in a piece's region."""
        dims, depth, parts = self._parts[piece].dims, len(self._lead), []
        for d in self._order:
            begin = dims[d].local(cell[d - depth].offset) - (dims[d].local(self._start) if d == depth else 0)
            parts.append(slice(begin, begin + cell[d - depth].length))
        if not self._tail:
            self._needed.setdefault(piece, set()).add(Run(parts[-1].start, cell[self._order[-1] - depth].length))
        return (*parts, *(slice(None) for _ in self._tail))

    def _region(self, part: _Part) -> Region:
        dims, depth, place = part.dims, len(self._lead), 0
        for dim, index in zip(dims, self._lead, strict=False):
            place = place * dim.length + dim.local(index)
        first, last = dims[depth].local(self._start), dims[depth].local(self._end)
        shape = (*(last - first if d == depth else dims[d].length for d in self._order), *self._tail)
        row = math.prod(shape[1:])
        return Region(part.rank, (place * dims[depth].length + first) * row, shape, part.rows)

    def regions(self, *, partial: bool = False) -> tuple[Region, ...]:
        """The regions by their numbers; with ``partial``, only what is wanted of their rows is read."""
        numbered = []
        for piece, (_, region) in self._numbers.items():
            runs = tuple(merge_runs(sorted(self._needed.get(piece, ()), key=lambda run: run.offset)))
            is_part = partial and not self._tail and len(region.shape) > 1 and runs != (Run(0, region.shape[-1]),)
            numbered.append(replace(region, needed=runs) if is_part else region)
        return tuple(numbered)


def _coalesced(copies: Sequence[Copy]) -> Iterator[Copy]:
    """Join copies of plain byte ranges that follow each other in source and target."""
    last: dict[int, Copy] = {}
    for copy in copies:
        prior = last.get(copy.target)
        if prior is not None and _follows(prior, copy):
            source = _union(prior.source_slices, copy.source_slices) if copy.source is not None else ()
            last[copy.target] = Copy(copy.source, source, copy.target, _union(prior.target_slices, copy.target_slices))
            continue
        if prior is not None:
            yield prior
        last[copy.target] = copy
    yield from last.values()


def _follows(previous: Copy, copy: Copy) -> bool:
    if previous.source != copy.source or previous.target_slices[0].stop != copy.target_slices[0].start:
        return False
    return copy.source is None or previous.source_slices[0].stop == copy.source_slices[0].start


def _union(first: Slices, second: Slices) -> Slices:
    return (slice(first[0].start, second[0].stop),)
