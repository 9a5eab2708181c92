"""Which bytes go where: the pure planner between two layouts of one tensor.

It intersects each source rank's part of a tensor with each target rank's part, and yields slabs: steps of bounded size.
Every byte range that a slab reads is contiguous in its source file, and every range that it writes is contiguous in its
target file. No source byte is read twice, and no target byte is written twice. This module opens no file. Splitting
(1 -> N), merging (N -> 1) and re-splitting (N -> M) are the same operation.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol

from formats.errors import PlanError
from formats.files.safetensors import DTYPE_BITS
from formats.notation.axes import Run, merge_runs
from reshard.planning.plan import Layout

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

STREAM_SLAB = 64 << 20
"""The budget in bytes of a slab that is moved piece by piece: it bounds work, not memory."""

BLOCK_SLAB = 8 << 20
"""The largest budget in bytes of a slab that is rearranged, so that it stays in the processor's cache."""


@dataclass(frozen=True, slots=True)
class Segment:
    """Neighbouring indices of a dimension that the same source ranks hold and the same target ranks want.

    ``is_data`` is False for padding: zeros that the full checkpoint does not have.
    """

    offset: int
    length: int
    sources: frozenset[int]
    targets: frozenset[int]
    is_data: bool


class Holding:
    """A rank's runs of one dimension; translates an index of the full dimension into the rank's own."""

    __slots__ = ("_ends", "_starts", "length", "runs")

    def __init__(self, runs: Sequence[Run]) -> None:
        self.runs = tuple(runs)
        self._starts = [run.offset for run in runs]
        self._ends = list(itertools.accumulate((run.length for run in runs), initial=0))
        self.length = self._ends[-1]

    def local(self, index: int) -> int:
        """The number of owned indices before an index of the full dimension."""
        place = bisect_right(self._starts, index) - 1
        if place < 0:
            return 0
        return self._ends[place] + min(index - self._starts[place], self.runs[place].length)


@dataclass(frozen=True, slots=True)
class Dimension:
    """A dimension, joined with those behind it that no rank splits; the last one counts bytes."""

    segments: tuple[Segment, ...]
    sources: tuple[Holding, ...]
    targets: tuple[Holding, ...]


@dataclass(frozen=True, slots=True)
class Region:
    """A contiguous part of a rank's tensor: ``offset`` in bytes from the tensor's start, ``shape`` with bytes last.

    ``wanted`` has the runs to read of the last dimension, if not all of a row is needed, else None.
    """

    rank: int
    offset: int
    shape: tuple[int, ...]
    wanted: tuple[Run, ...] | None = None

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return math.prod(self.shape)


Slices = tuple[Any, ...]
"""An index into a numpy array: slices, or arrays of indices (for scales, see ``reshard.engine.regrid``)."""

Edit = Callable[["NDArray[np.uint8]"], "NDArray[np.uint8]"]
"""Returns the changed block, for a block that is not copied as it is (see ``reshard.engine.restate``)."""


@dataclass(frozen=True, slots=True)
class Copy:
    """Copies a block from a read region to a written one, through ``edit``; without a source it writes zeros."""

    source: int | None
    source_slices: Slices
    target: int
    target_slices: Slices
    edit: Edit | None = None

    def block(self, read: Mapping[int, NDArray[np.uint8]]) -> NDArray[np.uint8] | int:
        """The bytes to write, given the regions that were read."""
        if self.source is None:
            return 0
        block = read[self.source][self.source_slices]
        return block if self.edit is None else self.edit(block)


@dataclass(frozen=True, slots=True)
class Check:
    """A block of a read region, after ``edit``, must equal a block of the region ``other``; without one, be zero."""

    source: int
    slices: Slices
    other: int | None
    other_slices: Slices
    edit: Edit | None = None

    def block(self, read: Mapping[int, NDArray[np.uint8]]) -> NDArray[np.uint8]:
        """The bytes to compare, given the regions that were read."""
        block = read[self.source][self.slices]
        return block if self.edit is None else self.edit(block)


@dataclass(frozen=True)
class Slab:
    """One step: read, check, copy, write. Copies and checks name regions by rank.

    If ``is_flat``, all regions are plain byte ranges and each copy is contiguous in source and target.
    """

    reads: tuple[Region, ...]
    writes: tuple[Region, ...]
    copies: tuple[Copy, ...]
    checks: tuple[Check, ...]
    is_flat: bool

    @cached_property
    def copies_to(self) -> Mapping[int, Sequence[Copy]]:
        """The copies of each target rank."""
        found: dict[int, list[Copy]] = {}
        for copy in self.copies:
            found.setdefault(copy.target, []).append(copy)
        return found

    def shifted(self, by: int) -> Slab:
        """The same step, moved by ``by`` indices of the first dimension."""
        return replace(self, reads=_shifted(self.reads, by), writes=_shifted(self.writes, by))

    @property
    def nbytes(self) -> int:
        """Bytes read and written."""
        return sum(region.nbytes for region in self.reads) + sum(region.nbytes for region in self.writes)


def _shifted(regions: Sequence[Region], by: int) -> tuple[Region, ...]:
    return tuple(Region(r.rank, r.offset + by * math.prod(r.shape[1:]), r.shape, r.wanted) for r in regions)


@dataclass(frozen=True)
class Change:
    """A change of each element, from ``before`` bytes to ``after``: by ``formats``' dtypes and a function's name."""

    name: str
    dtype: str
    target: str
    function: str | None

    @property
    def before(self) -> int:
        """Bytes of an element before."""
        return DTYPE_BITS[self.dtype] // 8

    @property
    def after(self) -> int:
        """Bytes of an element after."""
        return DTYPE_BITS[self.target] // 8

    def elements(self) -> Edit:
        """What does it. Raises PlanError."""
        from reshard.engine.convert import conversion

        return conversion(self.name, self.dtype, self.target, self.function) or (lambda block: block)


class Way(Protocol):
    """How a tensor goes from one layout to another."""

    def __hash__(self) -> int: ...

    def slabs(self, budget: int) -> Iterator[Slab]:
        """Steps of about ``budget`` bytes of buffer each."""
        ...


class Transfer:
    """The way of a tensor from one layout to another, for some target ranks."""

    def __init__(
        self,
        source: Layout,
        target: Layout,
        item_bits: int,
        ranks: frozenset[int],
        *,
        compare: bool = True,
        zeros: bool = True,
        order: Sequence[int] = (),
        change: Change | None = None,
    ) -> None:
        """``source`` and ``target`` have the same full shape; ``item_bits`` is the size of an element in bits.

        Only the target ranks ``ranks`` are written. Without ``compare`` only one of several replicas is read; without
        ``zeros`` the source's padding is not, and may be anything. ``order``
        has the dimensions in the order in which the target stores them, if that is another. ``change`` changes each
        element. Raises PlanError if a cut falls within a byte (elements smaller than a byte).
        """
        dims: list[_Raw] = [
            (
                source.runs(d),
                [runs if rank in ranks else () for rank, runs in enumerate(target.runs(d))],
                max(source.padded[d], target.padded[d]),
                source.full[d],
            )
            for d in range(len(source.full))
        ]
        dims = dims or [_one(source, target, ranks)]
        self._compare, self._zeros = compare, zeros
        moved = [place for place, dim in enumerate(order) if place != dim]
        self._moved, self._change = bool(moved) or change is not None, change
        if not self._moved:
            self.dims = tuple(_dimension(*dim) for dim in _join(dims, item_bits))
            return
        first, end = (moved[0], moved[-1] + 1) if moved else (len(dims), len(dims))
        one = _one(source, target, ranks)
        before = _join(dims[:first], 8) if first else [one]
        behind = _join([one, *dims[end:]], 8 if change else item_bits)
        item = [_scale(one, item_bits, 8)] if change else []
        self.dims = tuple(_dimension(*dim) for dim in (*before, *dims[first:end], *behind, *item))
        self._outer, self._order = len(before) - 1, [place - first for place in order[first:end]]

    def slabs(self, budget: int) -> Iterator[Slab]:
        """Steps of about ``budget`` bytes of buffer each, in the order of the source."""
        budget = max(budget, STREAM_SLAB) if self._is_stream else min(budget, BLOCK_SLAB)
        depth = self._depth(budget)
        leading = itertools.product(*(self._indices(dim) for dim in self.dims[:depth])) if depth else iter([()])
        for lead in leading:
            before: tuple[Segment, Slab] | None = None
            for group in self._groups(lead, depth, budget):
                if before is not None and len(group) == 1 and _continues(before[0], group[0]):
                    slab = before[1].shifted(group[0].offset - before[0].offset)
                else:
                    slab = self._slab(lead, depth, group)
                before = (group[0], slab) if len(group) == 1 else None
                if slab.reads or slab.writes:
                    yield slab

    @property
    def _is_stream(self) -> bool:
        """Whether all is plain byte ranges with one source each: they need no buffer of their size."""
        return len(self.dims) == 1 and all(len(segment.sources) <= 1 for segment in self.dims[0].segments)

    def _depth(self, budget: int) -> int:
        """The first dimension whose single indices fit into the budget."""
        for depth in range(self._outer if self._moved else len(self.dims)):
            if max((self._cost(depth, s) for s in self.dims[depth].segments), default=0) <= budget:
                return depth
        return self._outer if self._moved else len(self.dims) - 1

    def _cost(self, depth: int, segment: Segment) -> int:
        """Bytes of buffer for one index of a segment."""
        below = self.dims[depth + 1 :]
        source = max((math.prod(dim.sources[r].length for dim in below) for r in segment.sources), default=0)
        target = max((math.prod(dim.targets[r].length for dim in below) for r in segment.targets), default=0)
        return len(segment.sources) * source + len(segment.targets) * target

    @staticmethod
    def _indices(dim: Dimension) -> Iterator[tuple[int, Segment]]:
        for segment in dim.segments:
            for index in range(segment.offset, segment.offset + segment.length):
                yield index, segment

    def _groups(self, lead: Sequence[tuple[int, Segment]], depth: int, budget: int) -> Iterator[list[Segment]]:
        """Groups of neighbouring segments, or parts of them, that fit into the budget."""
        group: list[Segment] = []
        room = budget
        for segment in self.dims[depth].segments:
            if not segment.targets and segment.is_data and all(s.is_data for _, s in lead):
                if group:
                    yield group
                group, room = [], budget
                continue
            cost = max(1, self._cost(depth, segment))
            offset, left = segment.offset, segment.length
            while left:
                if room < cost and group:
                    yield group
                    group, room = [], budget
                length = max(1, min(left, room // cost))
                group.append(Segment(offset, length, segment.sources, segment.targets, segment.is_data))
                offset, left, room = offset + length, left - length, room - length * cost
        if group:
            yield group

    def _slab(self, lead: Sequence[tuple[int, Segment]], depth: int, group: Sequence[Segment]) -> Slab:
        below = self.dims[depth + 1 :]
        lead_sources = _common([s.sources for _, s in lead])
        lead_targets = _common([s.targets for _, s in lead])
        start, end = group[0].offset, group[-1].offset + group[-1].length
        regions = _Regions(self.dims, [index for index, _ in lead], depth, start, end)
        copies: list[Copy] = []
        checks: list[Check] = []
        for parts in itertools.product(group, *(dim.segments for dim in below)):
            sources = _common([lead_sources, *(part.sources for part in parts)])
            targets = _common([lead_targets, *(part.targets for part in parts)])
            is_data = all(part.is_data for part in parts) and all(s.is_data for _, s in lead)
            assert sources is not None and targets is not None
            holders = sorted(sources) if self._compare else sorted(sources)[:1]
            holders = holders if is_data or self._zeros else []
            _block(regions, parts, holders, sorted(targets), is_data, copies, checks)
        flat = not below
        slab = Slab(
            regions.reads(), regions.writes(), tuple(_coalesce(copies) if flat else copies), tuple(checks), flat
        )
        return self._reordered(slab, depth) if self._moved else slab

    def _reordered(self, slab: Slab, depth: int) -> Slab:
        """The same step, which writes the dimensions in the target's order."""
        start = self._outer + 1 - depth
        axes = [*range(start), *(start + place for place in self._order)]
        axes += range(len(axes), len(self.dims) - depth)
        change = self._change.elements() if self._change else None
        before, after = (self._change.before, self._change.after) if self._change else (1, 1)

        def edit(block: NDArray[np.uint8]) -> NDArray[np.uint8]:
            return (change(block) if change else block).transpose(axes)

        def written(region: Region) -> Region:
            shape = tuple(region.shape[axis] for axis in axes)
            if change:
                shape = (*shape[:-1], after)
            return replace(region, offset=region.offset // before * after, shape=shape)

        def copied(copy: Copy) -> Copy:
            slices = tuple(copy.target_slices[axis] for axis in axes)
            return replace(copy, target_slices=(*slices[:-1], slice(None)) if change else slices, edit=edit)

        return replace(slab, writes=tuple(map(written, slab.writes)), copies=tuple(map(copied, slab.copies)))


def _continues(before: Segment, segment: Segment) -> bool:
    """Whether a part follows a part of equal length in the same segment: then the slab is the one before, shifted."""
    return (
        segment.offset == before.offset + before.length
        and segment.length == before.length
        and segment.is_data == before.is_data
        and segment.sources is before.sources
        and segment.targets is before.targets
    )


class _Regions:
    """The regions that a slab reads and writes, collected block by block."""

    def __init__(self, dims: Sequence[Dimension], lead: Sequence[int], depth: int, start: int, end: int) -> None:
        self._dims, self._lead, self._depth, self._start, self._end = dims, lead, depth, start, end
        self._sources: dict[int, Region] = {}
        self._targets: dict[int, Region] = {}
        self._wanted: dict[int, set[Run]] = {}

    def source(self, rank: int, parts: Sequence[Segment]) -> Slices:
        """The slices of a block in a source rank's region."""
        holdings = [dim.sources[rank] for dim in self._dims]
        if rank not in self._sources:
            self._sources[rank] = self._region(rank, holdings)
        slices = self._slices(holdings, parts)
        self._wanted.setdefault(rank, set()).add(Run(slices[-1].start, slices[-1].stop - slices[-1].start))
        return slices

    def target(self, rank: int, parts: Sequence[Segment]) -> Slices:
        """The slices of a block in a target rank's region."""
        holdings = [dim.targets[rank] for dim in self._dims]
        if rank not in self._targets:
            self._targets[rank] = self._region(rank, holdings)
        return self._slices(holdings, parts)

    def _region(self, rank: int, holdings: Sequence[Holding]) -> Region:
        place = 0
        for holding, index in zip(holdings, self._lead, strict=False):
            place = place * holding.length + holding.local(index)
        first, last = (holdings[self._depth].local(index) for index in (self._start, self._end))
        shape = (last - first, *(holding.length for holding in holdings[self._depth + 1 :]))
        row = math.prod(shape[1:])
        return Region(rank, (place * holdings[self._depth].length + first) * row, shape)

    def _slices(self, holdings: Sequence[Holding], parts: Sequence[Segment]) -> Slices:
        base = holdings[self._depth].local(self._start)
        slices = []
        for i, (holding, part) in enumerate(zip(holdings[self._depth :], parts, strict=True)):
            begin = holding.local(part.offset) - (0 if i else base)
            slices.append(slice(begin, begin + part.length))
        return tuple(slices)

    def reads(self) -> tuple[Region, ...]:
        found = []
        for rank, region in sorted(self._sources.items()):
            runs = tuple(merge_runs(sorted(self._wanted[rank], key=lambda run: run.offset)))
            partial = len(region.shape) > 1 and runs != (Run(0, region.shape[-1]),)
            found.append(Region(rank, region.offset, region.shape, runs) if partial else region)
        return tuple(found)

    def writes(self) -> tuple[Region, ...]:
        return tuple(region for _, region in sorted(self._targets.items()))


def _block(
    regions: _Regions,
    parts: Sequence[Segment],
    sources: Sequence[int],
    targets: Sequence[int],
    is_data: bool,
    copies: list[Copy],
    checks: list[Check],
) -> None:
    """Add the copies of a block to its targets, and the checks of its replicas or its padding."""
    if is_data and not targets:
        return
    if is_data and not sources:
        raise PlanError("a target wants elements that no source holds")
    places = {rank: regions.source(rank, parts) for rank in sources}
    if not is_data:
        checks += [Check(rank, places[rank], None, ()) for rank in sources]
        copies += [Copy(None, (), rank, regions.target(rank, parts)) for rank in targets]
        return
    first = sources[0]
    checks += [Check(rank, places[rank], first, places[first]) for rank in sources[1:]]
    copies += [Copy(first, places[first], rank, regions.target(rank, parts)) for rank in targets]


def _coalesce(copies: Sequence[Copy]) -> Iterator[Copy]:
    """Join copies of plain byte ranges that follow each other in source and target."""
    last: dict[int, Copy] = {}
    for copy in copies:
        before = last.get(copy.target)
        if before is not None and _follows(before, copy):
            source = _joined(before.source_slices, copy.source_slices) if copy.source is not None else ()
            last[copy.target] = Copy(
                copy.source, source, copy.target, _joined(before.target_slices, copy.target_slices)
            )
            continue
        if before is not None:
            yield before
        last[copy.target] = copy
    yield from last.values()


def _follows(before: Copy, copy: Copy) -> bool:
    if before.source != copy.source or before.target_slices[0].stop != copy.target_slices[0].start:
        return False
    return copy.source is None or before.source_slices[0].stop == copy.source_slices[0].start


def _joined(first: Slices, second: Slices) -> Slices:
    return (slice(first[0].start, second[0].stop),)


def _common(sets: Sequence[frozenset[int] | None]) -> frozenset[int] | None:
    known = [s for s in sets if s is not None]
    return frozenset.intersection(*known) if known else None


# ---------------------------------------------------------------------------------------------- joining dimensions


def _one(source: Layout, target: Layout, ranks: frozenset[int]) -> _Raw:
    """A dimension of one index, which all ranks have that have any of the tensor."""
    one = (Run(0, 1),)
    held = [one if rank in source.boxes else () for rank in range(source.ranks)]
    wanted = [one if rank in target.boxes and rank in ranks else () for rank in range(target.ranks)]
    return held, wanted, 1, 1


_Raw = tuple[Sequence[Sequence[Run]], Sequence[Sequence[Run]], int, int]
"""The runs of each source rank, the runs of each target rank, the padded size, and the size without padding."""


def _join(dims: Sequence[_Raw], item_bits: int) -> list[_Raw]:
    """Join each dimension that no rank splits to the one before it, and count the last one in bytes."""
    joined: list[_Raw] = []
    for dim in dims:
        if joined and _is_whole(dim):
            joined[-1] = _scale(joined[-1], dim[2], 1)
        else:
            joined.append(dim)
    joined[-1] = _scale(joined[-1], item_bits, 8)
    return joined


def _is_whole(dim: _Raw) -> bool:
    sources, targets, _, size = dim
    everything = (Run(0, size),)
    return all(tuple(runs) == everything for runs in (*sources, *targets) if runs)


def _scale(dim: _Raw, factor: int, divisor: int) -> _Raw:
    sources, targets, padded, size = dim
    return (
        [_scaled(runs, factor, divisor) for runs in sources],
        [_scaled(runs, factor, divisor) for runs in targets],
        padded * factor // divisor,
        size * factor // divisor,
    )


def _scaled(runs: Sequence[Run], factor: int, divisor: int) -> Sequence[Run]:
    if any(run.offset * factor % divisor or run.length * factor % divisor for run in runs):
        raise PlanError(f"elements of {factor} bits would be cut within a byte")
    return [Run(run.offset * factor // divisor, run.length * factor // divisor) for run in runs]


def _dimension(sources: Sequence[Sequence[Run]], targets: Sequence[Sequence[Run]], padded: int, size: int) -> Dimension:
    segments = segments_of(sources, targets, padded, size)
    return Dimension(segments, tuple(Holding(runs) for runs in sources), tuple(Holding(runs) for runs in targets))


def segments_of(
    sources: Sequence[Sequence[Run]], targets: Sequence[Sequence[Run]], padded: int, size: int
) -> tuple[Segment, ...]:
    """Cut a dimension into segments, wherever the set of ranks changes that hold or want it.

    ``sources`` and ``targets`` have the runs of each rank. Of the ``padded`` indices the first ``size`` are data.
    """
    edges = {0, size, padded}
    for runs in (*sources, *targets):
        for run in runs:
            edges |= {run.offset, run.end}
    starts = sorted(edges)
    held = _covering(sources, starts)
    wanted = _covering(targets, starts)
    return tuple(
        Segment(begin, end - begin, frozenset(held[i]), frozenset(wanted[i]), begin < size)
        for i, (begin, end) in enumerate(itertools.pairwise(starts))
    )


def _covering(holders: Sequence[Sequence[Run]], starts: Sequence[int]) -> list[list[int]]:
    """The ranks that cover each interval between neighbouring starts."""
    place = {start: i for i, start in enumerate(starts)}
    found: list[list[int]] = [[] for _ in starts]
    for rank, runs in enumerate(holders):
        for run in runs:
            for i in range(place[run.offset], place[run.end]):
                found[i].append(rank)
    return found
