"""The engine: moves tensors between files, in one pass, in bounded memory, in a few processes.

It knows byte ranges only: no dtype, no model. A job is a tensor; jobs come in the order of the source. Each job is cut
into slabs (see ``reshard.engine.transfer``), which are read, checked, rearranged and written. Each process has its own
stretch of the jobs, so that two seldom write to the same file; when it is done it helps with the other stretches. Bytes
are written while the processor's cache still has them. The first process opens and finishes the files, and adds up what
the others report."""

from __future__ import annotations

import contextlib
import mmap
import os
import zlib
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np

from formats.errors import MismatchError
from formats.files.checksum import PIECE, Part, PartialSum, sum_part
from reshard.engine.apart import has_threads, move_apart
from reshard.engine.crc import Run, add_run, joined, parts_within
from reshard.engine.gathering import Runs
from reshard.engine.jobs import STEP, Job, Options, TargetFile
from reshard.engine.reading import Bytes, Reader, Sums, Wanted, pieces, ranges
from reshard.engine.steps import Stretch, Window, stretches_of, windows
from reshard.engine.times import Clock, Moved
from reshard.engine.transfer import Copy, Region, Slab
from reshard.engine.workers import Report, share
from reshard.storage.retries import Traffic
from reshard.storage.source import SourceFile, SourcePlace
from reshard.system import disk_errors, refused, reserve

WRITE = 1 << 16
"""A system call writes at most so many bytes, and ends at a multiple of this in the file. Larger calls take larger
pages of memory, which a virtual machine may first have to get from its host: up to four times slower as measured.
"""


SECONDS = 5.0
"""A process whose source is slow reports after as many seconds, or when it has read the next piece."""

AHEAD = 64 << 20
"""About so many bytes of remote files are requested before the steps that read them are carried out."""


_FLAGS = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW

K = TypeVar("K")
T = TypeVar("T")


def move(
    jobs: Sequence[Job],
    sums: Sums,
    targets: Sequence[TargetFile],
    options: Options,
    *,
    finished: Callable[[TargetFile, str | None], None],
    progress: Callable[[Moved], None] = lambda moved: None,
) -> None:
    """Carry out jobs in order, from the files of ``sums`` to ``targets``. Adds what is read to ``sums``.

    ``finished`` is called with each complete target file and its checksum, ``progress`` with what was moved since
    its last call. Raises CheckpointError if a file cannot be read or written; MismatchError if replicas differ or
    padding is not zero. Before any error or KeyboardInterrupt leaves this function, the processes have ended, the files
    are closed, and unfinished files are removed.
    """
    if _processes(jobs, options) > 1 and has_threads():
        move_apart(jobs, sums, targets, options, finished=finished, progress=progress)
        return
    mover = _Mover(options, sums, targets, jobs, finished, progress)
    try:
        mover.run()
    finally:
        mover.close()


def _processes(jobs: Sequence[Job], options: Options) -> int:
    """The number of processes to use: at most one for each step of work."""
    return max(1, min(options.processes, sum(job.work for job in jobs) // STEP))


_Steps = Sequence[tuple[Job, Slab]]


@dataclass
class _Account:
    """What a process has moved since its last report."""

    read: dict[tuple[int, Wanted], PartialSum] = field(default_factory=dict)
    """Sums of bytes read, by the source's number and the numbers of the targets that wanted them."""
    written: dict[int, PartialSum] = field(default_factory=dict)
    """Sums of bytes written, by the target's number."""
    nbytes: int = 0
    """Bytes written."""
    moved: Moved = field(default_factory=Moved)
    """The same, what was read, and the time of it."""
    traffic: Traffic = field(default_factory=Traffic)
    """What was requested of files that lie elsewhere."""
    runs: dict[int, list[Run]] = field(default_factory=dict)
    """CRC-32s of bytes written, by the target's number, as far as they are needed."""


class _Mover:
    def __init__(
        self,
        options: Options,
        sums: Sums,
        targets: Sequence[TargetFile],
        jobs: Sequence[Job],
        finished: Callable[[TargetFile, str | None], None],
        progress: Callable[[Moved], None],
    ) -> None:
        self._options, self._sums, self._targets, self._jobs = options, sums, targets, jobs
        self._sources = list(sums.of)
        self._finished, self._progress = finished, progress
        self._source_numbers = {file: number for number, file in enumerate(self._sources)}
        self._numbers = {file: number for number, file in enumerate(targets)}
        self._wanted: Wanted | None = frozenset()
        self._busy = mmap.mmap(-1, max(1, len(targets)))
        self._clock = Clock()
        self._reader = Reader(self._read if options.checksum else None, self._clock)
        self._account = _Account()
        self._traffic, self._bytes_read = Traffic(), 0
        self._send: Report = self._take
        self._reported = self._clock.last
        self._arena = _Arena()

    # -- files

    def _start(self, target: TargetFile) -> None:
        """Create a target file of full size and write its header."""
        with disk_errors(target.staged):
            target.staged.unlink(missing_ok=True)  # a run that was killed may still be writing to it
            target.descriptor = os.open(target.staged, _FLAGS, 0o666)
            reserve(target.descriptor, target.size)
        self._clock.lap("writing")
        for offset, content in ((0, target.header), *target.fixed):
            self._write_piece(target, offset, np.frombuffer(content, dtype=np.uint8))

    def _finish(self, target: TargetFile) -> None:
        with disk_errors(target.path):
            if self._options.fsync:
                os.fsync(target.descriptor)
            self._close(target)
            target.staged.rename(target.path)
        self._finished(target, target.sum.value() if self._options.sums(target) else None)

    @staticmethod
    def _close(target: TargetFile) -> None:
        descriptor, target.descriptor = target.descriptor, -1
        os.close(descriptor)

    def close(self) -> None:
        """Close all files, and remove unfinished ones: a next run cannot use them, and they may fill the disk."""
        self._reader.close()
        for target in self._targets:
            if target.descriptor >= 0:
                with contextlib.suppress(OSError):
                    self._close(target)
                    target.staged.unlink()

    # -- running

    def run(self) -> None:
        """Create the files, then let the processes draw slabs, each from its own stretch of the jobs first."""
        for target in self._targets:
            if not target.done:
                self._start(target)
        self._report(self._take)
        count = _processes(self._jobs, self._options)
        stretches = [Stretch(part, STEP) for part in stretches_of(self._jobs, count)]
        try:
            share(count, lambda number, report: self._work(stretches[number:] + stretches[:number], report), self._take)
        finally:
            for stretch in stretches:
                stretch.close()
        self._progress(Moved(times=self._clock.take()))

    def _work(self, stretches: Sequence[Stretch], report: Report) -> None:
        self._clock.start()
        self._send, self._reported = report, self._clock.last
        try:
            for stretch in stretches:
                for steps in self._requested(stretch.draw()):
                    if len(steps) != 1 or steps[0][0].is_small:
                        self._carry_out_together(steps)
                    else:
                        self._carry_out(*steps[0])
                    self._report_if_due()
        finally:
            self._report(report)

    def _requested(self, drawn: Iterable[_Steps]) -> Iterator[_Steps]:
        """The drawn steps, each when what it and the next ones read of remote files was requested."""
        if not any(file.remote for file in self._sources):
            yield from drawn
            return
        ahead, waiting = self._reader.ahead, deque[_Steps]()
        for steps in drawn:
            self._reader.request(self._reads_of(steps))
            waiting.append(steps)
            while ahead.nbytes > AHEAD:
                yield waiting.popleft()
                ahead.done()
        for steps in waiting:
            yield steps
            ahead.done()

    @staticmethod
    def _reads_of(steps: _Steps) -> Iterator[tuple[SourcePlace, Region]]:
        """What some steps read for targets that are not complete."""
        for job, slab in steps:
            if not slab.writes or not all(job.target(region.rank).file.done for region in slab.writes):
                yield from ((job.source(region.rank), region) for region in slab.reads)

    def _report_if_due(self) -> None:
        if self._account.nbytes >= STEP or self._clock.last - self._reported >= SECONDS:
            self._report(self._send)

    def _report(self, report: Report) -> None:
        account, self._account = self._account, _Account()
        now = self._reader.traffic
        account.traffic, self._traffic = now.since(self._traffic), now
        read, self._bytes_read = self._reader.nbytes - self._bytes_read, self._reader.nbytes
        account.moved = Moved(read, account.nbytes, self._clock.take())
        report(account)
        self._clock.lap("writing")  # without workers, this is where files are finished
        self._reported = self._clock.last

    def _take(self, account: _Account) -> None:
        """Add a report to the sums, and finish the files that are complete."""
        self._sums.traffic = self._sums.traffic.plus(account.traffic)
        for (number, wanted), part in account.read.items():
            self._sums.add(self._sources[number], wanted, part)
        for number, runs in account.runs.items():
            self._targets[number].runs += runs
        for number, part in account.written.items():
            file = self._targets[number]
            file.sum.merge(part)
            if file.crcs and file.sum.seen == file.size - file.late:
                self._write_crcs(file)
            if file.sum.is_complete:
                self._finish(file)
        self._progress(account.moved)

    def _write_crcs(self, target: TargetFile) -> None:
        """Write the CRC-32s of a file's parts. A part that was written in small pieces is read once more for it."""
        target.runs.sort()
        begins = [run.begin for run in target.runs]
        with disk_errors(target.staged):
            for crc in target.crcs:
                runs = target.runs[bisect_left(begins, crc.begin) : bisect_left(begins, crc.end)]
                value = joined(crc, runs)
                if value is None:
                    value = 0
                    for begin in range(crc.begin, crc.end, PIECE):
                        value = zlib.crc32(os.pread(target.descriptor, min(PIECE, crc.end - begin), begin), value)
                content = value.to_bytes(4, "little")
                for offset in crc.places:
                    os.pwrite(target.descriptor, content, offset)
                    target.sum.add(offset, 4, sum_part(content, offset) if self._options.sums(target) else None)
        self._progress(Moved(written=target.late))

    def _carry_out_together(self, steps: Sequence[tuple[Job, Slab]]) -> None:
        """Move small tensors: neighbours in a file are read or written with one call."""
        reads, writes = Runs[tuple[SourceFile, Wanted | None]](), Runs[int]()
        ready = []
        for job, slab in steps:
            places = [(region, job.target(region.rank)) for region in slab.writes]
            wanted = frozenset([self._numbers[place.file] for _, place in places])
            left = [(region, place) for region, place in places if not place.file.done]
            if wanted and not left:
                continue
            sources = [(region, job.source(region.rank)) for region in slab.reads]
            summed = None if job.again else wanted
            read = {region.rank: reads.add((place.file, summed), place.offset, region) for region, place in sources}
            written = [(r.rank, writes.add(self._numbers[place.file], place.offset, r)) for r, place in left]
            ready.append((job, slab, read, written))
        for run in reads.make_room():
            file, self._wanted = run.key
            self._reader.fill(run.data, file, run.begin)
        filled = writes.make_room()
        for job, slab, read, written in ready:
            found = {rank: span.data for rank, span in read.items()}
            check_slab(job, slab, found)
            self._clock.lap("checking")
            for rank, span in written:
                block = span.data
                for copy in slab.copies_to[rank]:
                    block[copy.target_slices] = copy.block(found)
            self._clock.lap("arranging")
        for part in filled:
            self._write_piece(self._targets[part.key], part.begin, part.data)

    def _carry_out(self, job: Job, slab: Slab) -> None:
        arena = self._arena
        arena.clear()
        if slab.is_flat and not slab.checks:
            self._stream(job, slab)
            return
        if not self._want(job, (region.rank for region in slab.writes)):
            return
        read = {region.rank: self._reader.read(job.source(region.rank), region, arena.take) for region in slab.reads}
        check_slab(job, slab, read)
        self._clock.lap("checking")
        if slab.is_flat:
            self._write_flat(job, slab, read)
        else:
            self._write_blocks(job, slab, read)

    # -- reading and writing

    def _want(self, job: Job, ranks: Iterable[int]) -> bool:
        """Set the target files for which the next bytes are read and summed (None: they are not summed).

        Returns whether any of the files is unfinished.
        """
        files = [job.target(rank).file for rank in ranks]
        self._wanted = None if job.again else frozenset(self._numbers[file] for file in files)
        return not files or not all(file.done for file in files)

    def _is_done(self, job: Job, rank: int) -> bool:
        return job.target(rank).file.done

    def _stream(self, job: Job, slab: Slab) -> None:
        """Move plain byte ranges window by window: each is read once and written to all its targets."""
        starts = {region.rank: region.offset for region in slab.writes}
        for region in slab.reads:
            place = job.source(region.rank)

            def move(window: Window, source: SourcePlace = place, start: int = region.offset) -> None:
                if not self._want(job, (copy.target for copy in window.copies)):
                    return
                self._arena.clear()
                data = self._arena.take(window.end - window.begin)
                part = self._reader.fill_from(source, start + window.begin, data)
                for copy in window.copies:
                    (held,), (wanted,) = copy.source_slices, copy.target_slices
                    place = job.target(copy.target)
                    begin = starts[copy.target] + wanted.start + window.begin - held.start
                    if place.file.done:
                        continue
                    if place.rows is None:
                        part = self._write_piece(place.file, place.offset + begin, data, part)
                        continue
                    for offset, at, length in ranges(place, begin, data.size):
                        self._write_piece(place.file, offset, data[at : at + length])

            found = windows([copy for copy in slab.copies if copy.source == region.rank], PIECE)
            self._one_by_one(job, ((window.copies[0].target, window) for window in found), move)
        for copy in slab.copies:
            if copy.source is None:
                self._write_zeros(job, copy, starts[copy.target])

    def _one_by_one(self, job: Job, items: Iterable[tuple[int, T]], move: Callable[[T], None]) -> None:
        """Move items, each with its target rank; files that another process is writing to come last."""
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
            self._report_if_due()

    def _write_zeros(self, job: Job, copy: Copy, offset: int) -> None:
        if self._is_done(job, copy.target):
            return
        part = copy.target_slices[0]
        zeros = np.zeros(min(PIECE, part.stop - part.start), dtype=np.uint8)
        for begin in range(part.start, part.stop, PIECE):
            self._write(job, copy.target, offset + begin, zeros[: part.stop - begin])

    def _write_flat(self, job: Job, slab: Slab, read: dict[int, Bytes]) -> None:
        offsets = {region.rank: region.offset for region in slab.writes}
        for copy in slab.copies:
            if copy.source is None:
                self._write_zeros(job, copy, offsets[copy.target])
                continue
            if self._is_done(job, copy.target):
                continue
            data = read[copy.source][copy.source_slices]
            self._write(job, copy.target, offsets[copy.target] + copy.target_slices[0].start, data)

    def _write_blocks(self, job: Job, slab: Slab, read: dict[int, Bytes]) -> None:
        arena = self._arena
        mark = arena.used

        def move(region: Region) -> None:
            arena.clear(mark)
            at = job.target(region.rank).offset + region.offset
            block = arena.take(region.nbytes, at).reshape(region.shape)
            for copy in slab.copies:
                if copy.target == region.rank:
                    block[copy.target_slices] = copy.block(read)
            self._clock.lap("arranging")
            self._write(job, region.rank, region.offset, block.reshape(-1))

        left = [(region.rank, region) for region in slab.writes if not self._is_done(job, region.rank)]
        self._one_by_one(job, left, move)

    def _write(self, job: Job, rank: int, offset: int, data: Bytes) -> None:
        """Write at ``offset`` (bytes) of a rank's tensor."""
        place = job.target(rank)
        for begin, piece in pieces(data):
            for there, at, length in ranges(place, offset + begin, piece.size):
                self._write_piece(place.file, there, piece[at : at + length])

    def _write_piece(self, target: TargetFile, offset: int, data: Bytes, part: Part | None = None) -> Part | None:
        """Write at ``offset`` of a file; ``part`` is the sum of the data, if known. Returns the sum, if wanted."""
        if not self._options.sums(target):
            part = None
        elif part is None or not part.fits(offset):
            part = sum_part(data, offset)
            self._clock.lap("checking")
        position, size, view = 0, data.size, data.data
        try:
            while position < size:
                end = position + WRITE - (offset + position) % WRITE
                position += os.pwrite(target.descriptor, view[position:end], offset + position)
        except OSError as error:
            raise refused("write", target.path, error) from error
        self._clock.lap("writing")
        for begin, end, is_whole in parts_within(target.crcs, offset, size) if target.crcs else ():
            runs = self._account.runs.setdefault(self._numbers[target], [])
            add_run(runs, begin, view[begin - offset : end - offset], is_whole=is_whole)
            self._clock.lap("checking")
        self._account.nbytes += size
        _sum_of(self._account.written, self._numbers[target], target.size).add(offset, size, part)
        return part

    def _read(self, file: SourceFile, offset: int, length: int, part: Part) -> None:
        if self._wanted is None:
            return
        key = (self._source_numbers[file], self._wanted)
        _sum_of(self._account.read, key, file.size).add(offset, length, part)


def _sum_of(sums: dict[K, PartialSum], key: K, size: int) -> PartialSum:
    """The sum under a key, a new one of a file of ``size`` bytes if there is none: too large to be made in vain."""
    found = sums.get(key)
    if found is None:
        found = sums[key] = PartialSum(size)
    return found


class _Arena:
    """Hands out buffers of one memory, one after the other, and takes them back all at once."""

    def __init__(self) -> None:
        self._memory: Bytes = np.empty(0, dtype=np.uint8)
        self.used = 0

    def take(self, nbytes: int, offset: int = 0) -> Bytes:
        """A buffer of arbitrary content, aligned to a page of memory as ``offset`` is to a page of the file.

        Some processors copy several times slower between addresses whose alignment differs by a few bytes.
        """
        first = -(-self.used // mmap.PAGESIZE) * mmap.PAGESIZE + offset % mmap.PAGESIZE
        self.used = first + nbytes
        if self._memory.size < self.used:
            # earlier buffers keep the old memory alive while they are used
            self._memory = np.frombuffer(mmap.mmap(-1, max(self.used, PIECE)), dtype=np.uint8)
        return self._memory[first : self.used]

    def clear(self, used: int = 0) -> None:
        """Take back all buffers behind the first ``used`` bytes."""
        self.used = used


def check_slab(job: Job, slab: Slab, read: Mapping[int, Bytes]) -> None:
    """Check that replicas are equal and padding is zero. Raises MismatchError with the tensor and the files."""
    for check in slab.checks:
        block = check.block(read)
        place = job.source(check.source)
        if check.other is None:
            if block.any():
                raise MismatchError(f"{place.file.shown}: the padding of tensor '{job.name}' is not zero")
        elif not np.array_equal(block, read[check.other][check.other_slices]):
            other = job.source(check.other)
            raise MismatchError(
                f"tensor '{job.name}' should be the same in {other.file.shown} and {place.file.shown}, but differs",
                "the shards are damaged, or come from different runs",
            )
