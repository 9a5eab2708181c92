"""Moves bytes: cuts jobs into steps, hands these to threads, and in each reads, checks, rearranges and writes.

Bytes are written while the processor's cache still has them. Each thread has its own stretch of the jobs, so that two
threads seldom write to the same file. A thread that is done helps with the other stretches.

``fill`` puts what a slab writes into memory: for one who wants the bytes and no file.
"""

from __future__ import annotations

import contextlib
import itertools
import mmap
import os
import time
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Container, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np

from formats.errors import MismatchError
from formats.files.checksum import Part, PartialSum, sum_part
from formats.store import joined
from reshard.move.jobs import Job, Options, Run, Sizes, TargetFile, add_run, parts_within
from reshard.move.reading import Bytes, Reader, TargetSet, pieces
from reshard.move.slabs import Copy, Region, Route, Slab
from reshard.publishing.journal import Moved
from reshard.source.source import SourceFile, SourcePlace
from reshard.store.threads import StoppedError
from reshard.system import disk_error


@dataclass(frozen=True, slots=True)
class Window:
    """Bytes ``begin`` to ``end`` of a source's region, and the copies that want all of them."""

    begin: int
    end: int
    copies: Sequence[Copy]


def windows(copies: Sequence[Copy], size: int) -> Iterator[Window]:
    """The wanted parts of a source's region, of at most ``size`` bytes each."""
    slices = [copy.source_slices[0] for copy in copies]
    bounds = sorted({bound for part in slices for bound in (part.start, part.stop)})
    starting: list[list[Copy]] = [[] for _ in bounds]
    for copy, part in zip(copies, slices, strict=True):
        for i in range(bisect_left(bounds, part.start), bisect_left(bounds, part.stop)):
            starting[i].append(copy)
    for (first, last), overlapping in zip(itertools.pairwise(bounds), starting, strict=False):
        if overlapping:
            for begin in range(first, last, size):
                yield Window(begin, min(begin + size, last), overlapping)


_FEW = 256 << 20
"""The slabs of a tensor of at most so many bytes are kept for the next tensor that moves in the same way."""


class Step(NamedTuple):
    """A slab of a job; ``number`` has those of the job and of the slab."""

    job: Job
    slab: Slab
    number: tuple[int, int]


class Steps:
    """The steps of all jobs."""

    def __init__(self, jobs: Sequence[Job], sizes: Sizes) -> None:
        self._jobs, self._sizes = jobs, sizes
        self._kept: Callable[[Route], Sequence[Slab]] = lru_cache(maxsize=32)(lambda way: tuple(way.slabs(sizes.step)))

    def of(self, number: int, first: int = 0, last: int | None = None) -> Iterator[Step]:
        """The steps of a job, from ``first`` to before ``last``."""
        job = self._jobs[number]
        slabs = self._kept(job.transfer) if job.nbytes <= _FEW else job.transfer.slabs(self._sizes.step)
        return (Step(job, slab, (number, i)) for i, slab in enumerate(itertools.islice(slabs, first, last), first))

    def left(self, numbers: Iterable[int], complete: Container[tuple[int, int]]) -> Iterator[Sequence[Step]]:
        """The steps of some jobs that are not ``complete``, as they are carried out: small tensors together."""
        for is_small, alike in itertools.groupby(
            numbers, lambda number: self._jobs[number].is_small(self._sizes.small)
        ):
            for together in self._together(alike) if is_small else ([number] for number in alike):
                steps = (step for number in together for step in self.of(number) if step.number not in complete)
                yield from [[*steps]] if is_small else ([step] for step in steps)

    def _together(self, numbers: Iterable[int]) -> Iterator[Sequence[int]]:
        """Groups of small tensors that are moved together."""
        group, room = list[int](), self._sizes.together
        for number in numbers:
            group.append(number)
            room -= self._jobs[number].nbytes
            if room <= 0:
                yield group
                group, room = [], self._sizes.together
        if group:
            yield group


def stretches_of(jobs: Sequence[Job], count: int, small: int) -> Iterator[range]:
    """Cut a sequence of jobs into ``count`` parts of about equal work: the numbers of the jobs of each."""
    ends = list(itertools.accumulate(job.work(small) for job in jobs))
    total = ends[-1] if ends else 0
    cuts = [bisect_left(ends, total * i // count) for i in range(count)] + [len(jobs)]
    return itertools.starmap(range, itertools.pairwise(cuts))


SECONDS = 5.0
"""A thread whose source is slow reports after as many seconds, or when it has read the next piece."""

AHEAD = 64 << 20
"""About so many bytes of remote files are requested before the steps that read them are carried out."""

K = TypeVar("K", bound=Hashable)
T = TypeVar("T")


@dataclass
class Account:
    """What a thread has moved since its last report."""

    steps: list[tuple[int, int]] = field(default_factory=list)
    """The steps that are complete: all that was read and written is of these."""
    read: dict[tuple[int, TargetSet], PartialSum] = field(default_factory=dict)
    """Sums of bytes read, by the source's number and the numbers of the targets that wanted them."""
    written: dict[int, PartialSum] = field(default_factory=dict)
    """Sums of bytes written, by the target's number."""
    nbytes: int = 0
    """Bytes written."""
    fetched: int = 0
    """Bytes requested of remote files."""
    runs: dict[int, list[Run]] = field(default_factory=dict)
    """CRC-32s of bytes written, by the target's number, as far as they are needed."""


def requested(drawn: Iterable[Sequence[Step]], reader: Reader) -> Iterator[Sequence[Step]]:
    """The drawn steps, each when what it and the next ones read of remote files was requested."""
    waiting = deque[Sequence[Step]]()
    for steps in drawn:
        reader.request(_reads_of(steps))
        waiting.append(steps)
        while reader.ahead.nbytes > AHEAD:
            yield waiting.popleft()
            reader.ahead.end_step()
    for steps in waiting:
        yield steps
        reader.ahead.end_step()


def _reads_of(steps: Sequence[Step]) -> Iterator[tuple[SourcePlace, Region]]:
    """What some steps read for targets that are not complete."""
    for job, slab, _ in steps:
        if not slab.writes or not all(job.target(region.rank).file.done for region in slab.writes):
            yield from ((job.source(region.rank), region) for region in slab.reads)


class Mover:
    """What a thread does: carries out the steps that it draws from ``stretches``, from the first one first.

    ``busy`` has a 1 for each target that a thread is writing to. ``send`` takes its reports.
    """

    def __init__(
        self,
        sources: Sequence[SourceFile],
        targets: Sequence[TargetFile],
        options: Options,
        busy: bytearray,
        send: Callable[[Account], None],
    ) -> None:
        self._sources, self._targets, self._options, self._sizes = sources, targets, options, options.sizes
        self._busy, self._send = busy, send
        self._source_numbers = {file: number for number, file in enumerate(sources)}
        self._numbers = {file: number for number, file in enumerate(targets)}
        self._summed_for: TargetSet | None = frozenset()
        self._reader = Reader(self._read if options.checksum else None, self._sizes.piece)
        self._account, self._shown = Account(), 0
        self._fetched, self._reported = 0, time.monotonic()
        self._arena = _Arena(self._sizes.piece)

    def carry_out(self, stretches: Sequence[Iterator[Sequence[Step]]]) -> None:
        """Carry out the steps that this thread draws."""
        is_remote = any(file.is_elsewhere for file in self._sources)
        try:
            for stretch in stretches:
                for steps in requested(stretch, self._reader) if is_remote else stretch:
                    if len(steps) != 1 or steps[0].job.is_small(self._sizes.small):
                        self._carry_out_together(steps)
                    else:
                        self._carry_out(steps[0].job, steps[0].slab)
                    self._account.steps += [step.number for step in steps]
                    if self._account.nbytes >= self._sizes.step or self._is_late():
                        self.report()
            self.report()
        finally:
            self._reader.close()

    def _is_late(self) -> bool:
        return time.monotonic() - self._reported >= SECONDS

    def report(self) -> None:
        """Report what was moved since the last report."""
        account, self._account = self._account, Account()
        now = self._reader.fetched
        account.fetched, self._fetched = now - self._fetched, now
        account.nbytes, self._shown = account.nbytes - self._shown, 0
        self._send(account)
        self._reported = time.monotonic()

    def _carry_out_together(self, steps: Sequence[Step]) -> None:
        """Move small tensors: neighbours in a file are read or written with one call."""
        reads, writes = _Runs[tuple[SourceFile, TargetSet | None]](), _Runs[int]()
        ready = []
        for job, slab, _ in steps:
            places = [(number, region, job.target(region.rank)) for number, region in enumerate(slab.writes)]
            targets = frozenset([self._numbers[place.file] for _, _, place in places])
            unwritten = [entry for entry in places if not entry[2].file.done]
            if targets and not unwritten:
                continue
            sources = [(region, job.source(region.rank)) for region in slab.reads]
            summed = None if job.again else targets
            spans = [reads.add((place.file, summed), place.offset, region) for region, place in sources]
            written = [(i, writes.add(self._numbers[place.file], place.offset, r)) for i, r, place in unwritten]
            ready.append((job, slab, spans, written))
        for run in reads.make_room():
            file, self._summed_for = run.key
            self._reader.fill(run.data, file, run.begin)
        filled = writes.make_room()
        for job, slab, spans, written in ready:
            blocks = [span.data for span in spans]
            check_slab(job, slab, blocks)
            for number, span in written:
                block = span.data
                for copy in slab.copies_to[number]:
                    block[copy.target_slices] = copy.block(blocks)
        for part in filled:
            self.write(self._targets[part.key], part.begin, part.data)

    def _carry_out(self, job: Job, slab: Slab) -> None:
        arena = self._arena
        arena.clear()
        if slab.is_flat and not slab.checks:
            self._stream(job, slab)
            return
        if not self._want(job, (region.rank for region in slab.writes)):
            return
        blocks = [self._reader.read(job.source(region.rank), region, arena.take) for region in slab.reads]
        check_slab(job, slab, blocks)
        if slab.is_flat:
            self._write_flat(job, slab, blocks)
        else:
            self._write_blocks(job, slab, blocks)

    # -- reading and writing

    def _want(self, job: Job, ranks: Iterable[int]) -> bool:
        """Set the target files for which the next bytes are read and summed (None: they are not summed).

        Returns whether any of the files is unfinished.
        """
        files = [job.target(rank).file for rank in ranks]
        self._summed_for = None if job.again else frozenset(self._numbers[file] for file in files)
        return not files or not all(file.done for file in files)

    def _stream(self, job: Job, slab: Slab) -> None:
        """Move plain byte ranges window by window: each is read once and written to all its targets."""
        for number, region in enumerate(slab.reads):
            source = job.source(region.rank)

            def move(window: Window, source: SourcePlace = source, region: Region = region) -> None:
                if not self._want(job, (slab.writes[copy.target].rank for copy in window.copies)):
                    return
                self._arena.clear()
                data = self._arena.take(window.end - window.begin)
                ranges = region.ranges(window.begin, data.size)
                parts = [self._reader.fill(data[at : at + n], source.file, source.offset + o) for o, at, n in ranges]
                part = parts[0] if len(parts) == 1 else None
                for copy in window.copies:
                    target, begin = slab.writes[copy.target], copy.target_slices[0].start - copy.source_slices[0].start
                    place = job.target(target.rank)
                    for offset, at, n in target.ranges(begin + window.begin, data.size) if not place.file.done else ():
                        if n == data.size:
                            part = self.write(place.file, place.offset + offset, data, part)
                        else:
                            self.write(place.file, place.offset + offset, data[at : at + n])

            all_windows = windows([copy for copy in slab.copies if copy.source == number], self._sizes.piece)
            self._one_by_one(job, ((slab.writes[window.copies[0].target].rank, window) for window in all_windows), move)
        for copy in slab.copies:
            if copy.source is None:
                self._write_zeros(job, slab.writes[copy.target], copy)

    def _one_by_one(self, job: Job, items: Iterable[tuple[int, T]], move: Callable[[T], None]) -> None:
        """Move items, each with its target rank; files that another thread is writing to come last."""
        waiting = deque(items)
        while waiting:
            for _ in range(len(waiting)):
                number = self._numbers[job.target(waiting[0][0]).file]
                if not self._busy[number]:
                    break
                waiting.rotate(-1)
            self._busy[number] = 1
            move(waiting.popleft()[1])
            self._busy[number] = 0
            if self._is_late():  # within a step only how far it is
                self._send(Account(nbytes=self._account.nbytes - self._shown))
                self._shown, self._reported = self._account.nbytes, time.monotonic()

    def _write_zeros(self, job: Job, region: Region, copy: Copy) -> None:
        if job.target(region.rank).file.done:
            return
        part = copy.target_slices[0]
        zeros = np.zeros(min(self._sizes.piece, part.stop - part.start), dtype=np.uint8)
        for begin in range(part.start, part.stop, self._sizes.piece):
            self._write_at(job, region, begin, zeros[: part.stop - begin])

    def _write_flat(self, job: Job, slab: Slab, blocks: Sequence[Bytes]) -> None:
        for copy in slab.copies:
            region = slab.writes[copy.target]
            if copy.source is None:
                self._write_zeros(job, region, copy)
            elif not job.target(region.rank).file.done:
                self._write_at(job, region, copy.target_slices[0].start, blocks[copy.source][copy.source_slices])

    def _write_blocks(self, job: Job, slab: Slab, blocks: Sequence[Bytes]) -> None:
        arena = self._arena
        mark = arena.used

        def move(number: int) -> None:
            region = slab.writes[number]
            arena.clear(mark)
            at = job.target(region.rank).offset + region.rows.offset + region.offset
            block = arena.take(region.nbytes, at).reshape(region.shape)
            for copy in slab.copies_to[number]:
                block[copy.target_slices] = copy.block(blocks)
            self._write_at(job, region, 0, block.reshape(-1))

        ranks = enumerate(region.rank for region in slab.writes)
        self._one_by_one(job, [(rank, i) for i, rank in ranks if not job.target(rank).file.done], move)

    def _write_at(self, job: Job, region: Region, begin: int, data: Bytes) -> None:
        """Write from byte ``begin`` of a region on."""
        place = job.target(region.rank)
        for first, piece in pieces(data, self._sizes.piece):
            for offset, at, length in region.ranges(begin + first, piece.size):
                self.write(place.file, place.offset + offset, piece[at : at + length])

    def write(self, target: TargetFile, offset: int, data: Bytes, part: Part | None = None) -> Part | None:
        """Write at ``offset`` of a file; ``part`` is the sum of the data, if known. Returns the sum, if wanted."""
        if not self._options.checksum:
            part = None
        elif part is None or not part.fits(offset):
            part = sum_part(data, offset)
        position, size, view, most, opened = 0, data.size, data.data, self._sizes.write, target.opened
        if opened is None:
            raise StoppedError
        try:
            while position < size:
                end = position + most - (offset + position) % most
                position += os.pwrite(opened.fileno(), view[position:end], offset + position)
        except OSError as error:
            raise disk_error(target.path, error) from error
        self._add_written(target, offset, data, part)
        return part

    def _add_written(self, target: TargetFile, offset: int, data: Bytes, part: Part | None) -> None:
        """Take into account what a file has from ``offset`` on, and its sum."""
        for begin, end, is_whole in parts_within(target.crcs, offset, data.size) if target.crcs else ():
            runs = self._account.runs.setdefault(self._numbers[target], [])
            add_run(runs, begin, data.data[begin - offset : end - offset], is_whole=is_whole)
        self._account.nbytes += data.size
        _sum_of(self._account.written, self._numbers[target], target.size).add(offset, data.size, part)

    # -- what earlier runs have moved

    def take_over(self, earlier: Iterable[Moved], steps: Steps) -> None:
        """Report what earlier runs have moved, as far as the files still have it."""
        names = {target.name: number for number, target in enumerate(self._targets) if not target.done}
        numbers = {target.name: number for number, target in enumerate(self._targets)}
        files = {file.name: number for number, file in enumerate(self._sources)}
        for moved in earlier:
            known = moved.steps if moved.size == self._sizes.step else ()
            mine = [step for job, slab in known for step in steps.of(job, slab, slab + 1)]
            self._add_again(mine)
            sums, expected = self._account.written, {names[n]: is_ for n, is_ in moved.written.items() if n in names}
            if not sums or any(expected.get(number) != part.digest() for number, part in sums.items()):
                self._account = Account()
                continue
            for read in moved.reads:
                wanted = frozenset(numbers[name] for name in read.targets)
                if not wanted or not wanted.isdisjoint(names.values()):  # else a finished file has these sums
                    key = files[read.source], wanted
                    self._account.read[key] = PartialSum.from_text(read.sum, self._sources[key[0]].size)
            self._account.steps = [step.number for step in mine]
            self.report()

    def _add_again(self, steps: Iterable[Step]) -> None:
        """Take into account what unfinished files have where steps write."""
        ranges: dict[int, list[tuple[int, int]]] = {}
        for job, slab, _ in steps:
            for region in slab.writes:
                place = job.target(region.rank)
                if not place.file.done:
                    found = ((place.offset + offset, n) for offset, _, n in region.ranges(0, region.nbytes))
                    ranges.setdefault(self._numbers[place.file], []).extend((at, at + n) for at, n in found)
        for number, parts in ranges.items():
            target = self._targets[number]
            for begin, end in joined(parts, 0):
                for offset in range(begin, end, self._sizes.piece):
                    self._arena.clear()
                    data = self._arena.take(min(self._sizes.piece, end - offset), offset)
                    assert target.opened is not None
                    with contextlib.suppress(OSError):  # what cannot be read is written again
                        data = data[: os.preadv(target.opened.fileno(), [data.data], offset)]
                        self._add_written(target, offset, data, sum_part(data, offset))

    def _read(self, file: SourceFile, offset: int, length: int, part: Part) -> None:
        if self._summed_for is None:
            return
        key = (self._source_numbers[file], self._summed_for)
        _sum_of(self._account.read, key, file.size).add(offset, length, part)


def _sum_of(sums: dict[K, PartialSum], key: K, size: int) -> PartialSum:
    """The sum under a key, a new one of a file of ``size`` bytes if there is none: too large to be made in vain."""
    total = sums.get(key)
    if total is None:
        total = sums[key] = PartialSum(size)
    return total


class _Arena:
    """Hands out buffers of one memory, one after the other, and takes them back all at once."""

    def __init__(self, smallest: int) -> None:
        self._memory: Bytes = np.empty(0, dtype=np.uint8)
        self._smallest = smallest
        self.used = 0

    def take(self, nbytes: int, offset: int = 0) -> Bytes:
        """A buffer of arbitrary content, aligned to a page of memory as ``offset`` is to a page of the file.

        Some processors copy several times slower between addresses whose alignment differs by a few bytes.
        """
        first = -(-self.used // mmap.PAGESIZE) * mmap.PAGESIZE + offset % mmap.PAGESIZE
        self.used = first + nbytes
        if self._memory.size < self.used:
            # earlier buffers keep the old memory alive while they are used
            self._memory = np.frombuffer(mmap.mmap(-1, max(self.used, self._smallest)), dtype=np.uint8)
        return self._memory[first : self.used]

    def clear(self, used: int = 0) -> None:
        """Take back all buffers behind the first ``used`` bytes."""
        self.used = used


def check_slab(job: Job, slab: Slab, blocks: Sequence[Bytes]) -> None:
    """Check that replicas are equal and padding is zero. Raises MismatchError with the tensor and the files."""
    for check in slab.checks:
        block = check.block(blocks)
        place = job.source(slab.reads[check.source].rank)
        if check.other is None:
            if block.any():
                raise MismatchError(f"{place.file.path}: the padding of tensor '{job.name}' is not zero")
        elif not np.array_equal(block, blocks[check.other][check.other_slices]):
            other, rank = job.source(slab.reads[check.other].rank), slab.reads[check.source].rank
            if rank >= job.holders > 0:
                raise MismatchError(
                    f"tensor '{job.copies[rank // job.holders - 1]}' in {place.file.path} should be '{job.name}' once "
                    "more, because the two are tied, but differs",
                    'if the model has a head of its own, say so in config.json: "tie_word_embeddings": false',
                )
            raise MismatchError(
                f"tensor '{job.name}' should be the same in {other.file.path} and {place.file.path}, but differs",
                "the shards are damaged, or come from different runs",
            )


# ----------------------------------------------------------------------------------- many small tensors together


@dataclass
class _Gathered(Generic[K]):
    """Bytes ``begin`` to ``end`` of the file that ``key`` stands for; ``data`` is empty until ``_Runs.make_room``."""

    key: K
    begin: int
    end: int
    data: Bytes = field(default_factory=lambda: _NONE)


_NONE: Bytes = np.empty(0, dtype=np.uint8)


class _Span(NamedTuple):
    """Bytes ``begin`` to ``end`` of a run, in the shape of a region."""

    run: _Gathered[Any]
    begin: int
    end: int
    shape: tuple[int, ...]

    @property
    def data(self) -> Bytes:
        """A view of the run's bytes, in the region's shape."""
        return self.run.data[self.begin : self.end].reshape(self.shape)


class _Runs(Generic[K]):
    """Ranges of files; ranges that follow each other are joined into one run."""

    def __init__(self) -> None:
        self._runs: list[_Gathered[K]] = []
        self._last: dict[K, _Gathered[K]] = {}

    def add(self, key: K, offset: int, region: Region) -> _Span:
        """Add a region of the tensor that begins at ``offset`` (bytes) of a file."""
        begin, run = offset + region.rows.offset + region.offset, self._last.get(key)
        if run is None or run.end != begin:
            run = self._last[key] = _Gathered(key, begin, begin)
            self._runs.append(run)
        run.end = begin + region.nbytes
        return _Span(run, begin - run.begin, run.end - run.begin, region.shape)

    def make_room(self) -> Sequence[_Gathered[K]]:
        """Allocate a buffer for each run, and return the runs."""
        for run in self._runs:
            run.data = np.empty(run.end - run.begin, dtype=np.uint8)
        return self._runs


def allocate(nbytes: int) -> Bytes:
    """A new buffer."""
    return np.empty(nbytes, dtype=np.uint8)


def fill(job: Job, slab: Slab, reader: Reader, blocks: Sequence[Bytes]) -> None:
    """Fill the regions that a slab writes. Raises CheckpointError, MismatchError."""
    is_direct = slab.is_flat and not slab.checks  # plain byte ranges are read into their places
    sources = [] if is_direct else [reader.read(job.source(r.rank), r, allocate) for r in slab.reads]
    check_slab(job, slab, sources)
    for copy in slab.copies:
        block = blocks[copy.target][copy.target_slices]
        if copy.source is None or not is_direct:
            block[...] = copy.block(sources)
            continue
        region = slab.reads[copy.source]
        place = job.source(region.rank)
        for offset, at, length in region.ranges(copy.source_slices[0].start, block.size):
            reader.fill(block[at : at + length], place.file, place.offset + offset)
