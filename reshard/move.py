"""The engine: carries out transfers between files, in one pass, in bounded memory, on a few threads.

It knows byte ranges and nothing else: no dtype, no model. Jobs are tensors in the order of the source; each is cut
into slabs (see ``reshard.transfer``) that are read, checked, rearranged and written. Each thread has a stretch of the
jobs of its own, so that threads seldom write to the same file, and helps the others when it is done with that.
What is read is mapped, so that bytes are copied once, by the call that writes them, or twice where they are
rearranged. Sums, copies and writes release the interpreter lock.
"""

from __future__ import annotations

import contextlib
import itertools
import mmap
import os
import threading
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TypeVar

import numpy as np

from formats.errors import MismatchError
from reshard.checksum import PIECE, Part, PartialSum, sum_part
from reshard.output import disk_errors, refused
from reshard.reading import Bytes, Reader, SourceFile, SourcePlace, pieces
from reshard.system import reserve
from reshard.transfer import Copy, Region, Slab, Way

STEPS = 64 << 20
"""Bytes that the steps of all threads together read and write at a time, about. Large steps are for large windows, as
threads wait for each other when a mapping comes or goes.
"""

WRITE = 1 << 16
"""Bytes of one system call that writes, which ends where a multiple of it ends in the file. Larger ones take larger
pages of memory, which a virtual machine may have to get from its host first: as measured, up to four times slower.
"""

T = TypeVar("T")


@dataclass(eq=False)
class TargetFile:
    """A file to be written: its final path, its header, and what the data adds up to."""

    path: Path
    header: bytes
    size: int
    sum: PartialSum = field(init=False)
    descriptor: int = -1
    """Where it is open for writing, while it is."""
    lock: threading.Lock = field(init=False, default_factory=threading.Lock)
    """Held by the thread that writes a larger part, for which the others had better look for something else to do."""

    def __post_init__(self) -> None:
        self.sum = PartialSum(self.size)

    @property
    def staged(self) -> Path:
        """Where it is written until it is complete."""
        return self.path.with_name(self.path.name + ".incomplete")


@dataclass(frozen=True, slots=True)
class TargetPlace:
    """A tensor in a target file, at an absolute offset."""

    file: TargetFile
    offset: int


@dataclass(frozen=True)
class Job:
    """A tensor to move: where each source rank has it, and where each target rank wants it (None: not)."""

    name: str
    transfer: Way
    sources: Sequence[SourcePlace | None]
    targets: Sequence[TargetPlace | None]
    nbytes: int
    """Bytes of the full tensor: how much work it is, about."""

    def source(self, rank: int) -> SourcePlace:
        """Where a source rank has it that is known to have it."""
        place = self.sources[rank]
        assert place is not None
        return place


@dataclass
class Options:
    """How to move: threads, checksums, durability."""

    workers: int | None = None
    checksum: bool = True
    fsync: bool = False
    record: bool = True
    """Whether the checksums of what is written are wanted: a merged checkpoint has no manifest to hold them."""

    @property
    def sums_targets(self) -> bool:
        """Whether what is written is summed."""
        return self.checksum and self.record

    @cached_property
    def threads(self) -> int:
        """The number of threads: as asked, or one for each core, at least two and at most eight."""
        return self.workers or max(2, min(8, os.cpu_count() or 1))

    @property
    def step(self) -> int:
        """Bytes that one thread may read and write at a time."""
        return STEPS // max(2, self.threads)


def move(
    jobs: Sequence[Job],
    targets: Sequence[TargetFile],
    options: Options,
    *,
    finished: Callable[[TargetFile, str | None], None],
    progress: Callable[[int], None] = lambda nbytes: None,
) -> None:
    """Carry out jobs, in order. ``finished`` is called with each target file that is complete, and its checksum.

    ``progress`` is called with the number of bytes written. Raises CheckpointError for files that cannot be read or
    written, MismatchError for replicas that differ and for padding that is not zero. On any error, and on
    KeyboardInterrupt, the threads are stopped and the files closed before it is raised.
    """
    mover = _Mover(options, finished, progress)
    try:
        for target in targets:
            mover.start(target)
        mover.run(jobs)
    except BaseException:
        mover.stop()
        raise
    finally:
        mover.close()


class _Mover:
    def __init__(
        self, options: Options, finished: Callable[[TargetFile, str | None], None], progress: Callable[[int], None]
    ) -> None:
        self._options = options
        self._finished = finished
        self._progress = progress
        self._reader = Reader(checksum=options.checksum)
        self._started: list[TargetFile] = []
        self._stopped = threading.Event()
        self._local = threading.local()

    # -- files

    def start(self, target: TargetFile) -> None:
        """Create a target file of full size and write its header."""
        with disk_errors(target.staged):
            target.descriptor = os.open(target.staged, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o666)
            self._started.append(target)
            reserve(target.descriptor, target.size)
        self._write_piece(target, 0, np.frombuffer(target.header, dtype=np.uint8))

    def _finish(self, target: TargetFile) -> None:
        with disk_errors(target.path):
            if self._options.fsync:
                os.fsync(target.descriptor)
            self._close(target)
            target.staged.rename(target.path)
        self._finished(target, target.sum.value() if self._options.sums_targets else None)

    @staticmethod
    def _close(target: TargetFile) -> None:
        descriptor, target.descriptor = target.descriptor, -1
        os.close(descriptor)

    def stop(self) -> None:
        self._stopped.set()

    def close(self) -> None:
        self._reader.close()
        for target in self._started:
            if target.descriptor >= 0:  # unfinished: of no use to the next run, and it may have filled the disk
                with contextlib.suppress(OSError):
                    self._close(target)
                    target.staged.unlink()

    # -- running

    def run(self, jobs: Sequence[Job]) -> None:
        """Let the threads draw slabs, each from its own stretch of the jobs first; the first error stops them all."""
        stretches = [_Stretch(part, self._options.step) for part in _stretches(jobs, self._options.threads)]
        with ThreadPoolExecutor(len(stretches)) as pool:
            futures = [pool.submit(self._work, stretches[i:] + stretches[:i]) for i in range(len(stretches))]
            try:
                done, _ = wait(futures, return_when=FIRST_EXCEPTION)
            except BaseException:
                self.stop()
                raise
            for future in done:
                future.result()

    def _work(self, stretches: Sequence[_Stretch]) -> None:
        try:
            for stretch in stretches:
                while not self._stopped.is_set():
                    step = stretch.draw()
                    if step is None:
                        break
                    self._carry_out(*step)
        except BaseException:
            self.stop()
            raise

    def _carry_out(self, job: Job, slab: Slab) -> None:
        arena = _Arena(self._local)
        if slab.is_flat and not slab.checks:
            self._stream(job, slab, arena)
            return
        read = {region.rank: self._reader.read(job.source(region.rank), region, arena.take) for region in slab.reads}
        check_slab(job, slab, read)
        if slab.is_flat:
            self._write_flat(job, slab, read)
        else:
            self._write_blocks(job, slab, read, arena)

    # -- reading and writing

    def _stream(self, job: Job, slab: Slab, arena: _Arena) -> None:
        """Move plain byte ranges window by window: each is read once and written to all that want it."""
        starts = {region.rank: region.offset for region in slab.writes}
        for region in slab.reads:
            source = job.source(region.rank)
            start = source.offset + region.offset

            def move(window: _Window, file: SourceFile = source.file, start: int = start) -> None:
                arena.clear()
                data = self._reader.view(file, start + window.begin, window.end - window.begin, arena.take)
                for place, piece in pieces(data):
                    part = self._reader.sum(file, start + window.begin + place, piece)
                    for copy in window.copies:
                        (held,), (wanted,) = copy.source_slices, copy.target_slices
                        at = starts[copy.target] + wanted.start + window.begin + place - held.start
                        self._write(job, copy.target, at, piece, part)

            windows = _windows([copy for copy in slab.copies if copy.source == region.rank], self._options.step)
            self._one_by_one(job, ((window.copies[0].target, window) for window in windows), move)
        for copy in slab.copies:
            if copy.source is None:
                self._write_zeros(job, copy, starts[copy.target])

    def _one_by_one(self, job: Job, items: Iterable[tuple[int, T]], move: Callable[[T], None]) -> None:
        """Move items, each for a target rank: those first to whose file no other thread is writing."""
        waiting = deque(items)
        while waiting:
            for _ in range(len(waiting)):
                lock = self._place(job, waiting[0][0]).file.lock
                if lock.acquire(blocking=False):
                    break
                waiting.rotate(-1)
            else:
                lock.acquire()
            try:
                move(waiting.popleft()[1])
            finally:
                lock.release()

    @staticmethod
    def _place(job: Job, rank: int) -> TargetPlace:
        place = job.targets[rank]
        assert place is not None
        return place

    def _write_zeros(self, job: Job, copy: Copy, offset: int) -> None:
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
            data = read[copy.source][copy.source_slices]
            self._write(job, copy.target, offsets[copy.target] + copy.target_slices[0].start, data)

    def _write_blocks(self, job: Job, slab: Slab, read: dict[int, Bytes], arena: _Arena) -> None:
        mark = arena.used

        def move(region: Region) -> None:
            arena.clear(mark)
            at = self._place(job, region.rank).offset + region.offset
            block = arena.take(region.nbytes, at).reshape(region.shape)
            for copy in slab.copies:
                if copy.target == region.rank:
                    block[copy.target_slices] = copy.block(read)
            self._write(job, region.rank, region.offset, block.reshape(-1))

        self._one_by_one(job, ((region.rank, region) for region in slab.writes), move)

    def _write(self, job: Job, rank: int, offset: int, data: Bytes, part: Part | None = None) -> None:
        """Write at ``offset`` of a rank's tensor; ``part`` are the sums of the data, if they are known."""
        place = self._place(job, rank)
        for begin, piece in pieces(data):
            known = part if piece.size == data.size else None
            self._write_piece(place.file, place.offset + offset + begin, piece, known)

    def _write_piece(self, target: TargetFile, offset: int, data: Bytes, part: Part | None = None) -> None:
        if not self._options.sums_targets:
            part = None
        elif part is None or not part.fits(offset):
            part = sum_part(data, offset)
        position, size, view = 0, data.size, data.data
        try:
            while position < size:
                end = position + WRITE - (offset + position) % WRITE
                position += os.pwrite(target.descriptor, view[position:end], offset + position)
        except OSError as error:
            raise refused("write", target.path, error) from error
        self._progress(size)
        if target.sum.add(offset, size, part):
            self._finish(target)


@dataclass(frozen=True, slots=True)
class _Window:
    """A part of a source's region, and the copies that want all of it."""

    begin: int
    end: int
    copies: Sequence[Copy]


def _windows(copies: Sequence[Copy], size: int) -> Iterator[_Window]:
    """The parts of a source's region that are wanted, of at most ``size`` bytes each."""
    held = [copy.source_slices[0] for copy in copies]
    bounds = sorted({bound for part in held for bound in (part.start, part.stop)})
    wanted: list[list[Copy]] = [[] for _ in bounds]
    for copy, part in zip(copies, held, strict=True):
        for i in range(bisect_left(bounds, part.start), bisect_left(bounds, part.stop)):
            wanted[i].append(copy)
    for (first, last), found in zip(itertools.pairwise(bounds), wanted, strict=False):
        if found:
            for begin in range(first, last, size):
                yield _Window(begin, min(begin + size, last), found)


class _Stretch:
    """Neighbouring jobs, from which threads draw slabs."""

    def __init__(self, jobs: Sequence[Job], step: int) -> None:
        self._steps = ((job, slab) for job in jobs for slab in job.transfer.slabs(step))
        self._lock = threading.Lock()

    def draw(self) -> tuple[Job, Slab] | None:
        """The next step; None if there is none left."""
        with self._lock:
            return next(self._steps, None)


def _stretches(jobs: Sequence[Job], count: int) -> Iterator[Sequence[Job]]:
    """Cut a sequence of jobs into ``count`` parts of about equal bytes."""
    ends = list(itertools.accumulate(job.nbytes for job in jobs))
    total = ends[-1] if ends else 0
    cuts = [bisect_left(ends, total * i // count) for i in range(count)] + [len(jobs)]
    return (jobs[first:last] for first, last in itertools.pairwise(cuts))


class _Arena:
    """Buffers of one thread, handed out one after the other and taken back all at once; memory is kept for the next."""

    def __init__(self, kept: threading.local) -> None:
        self._kept = kept
        self.used = 0

    def take(self, nbytes: int, offset: int = 0) -> Bytes:
        """A buffer of arbitrary content, which lies in its page of memory as ``offset`` does in its page of a file:
        some processors copy several times slower between places that differ by a few bytes there.
        """
        memory: Bytes | None = getattr(self._kept, "memory", None)
        first = -(-self.used // mmap.PAGESIZE) * mmap.PAGESIZE + offset % mmap.PAGESIZE
        self.used = first + nbytes
        if memory is None or memory.size < self.used:
            # what was handed out before stays alive in the old memory, as long as it is used
            memory = self._kept.memory = np.frombuffer(mmap.mmap(-1, max(self.used, PIECE)), dtype=np.uint8)
        return memory[first : self.used]

    def clear(self, used: int = 0) -> None:
        """Take back all buffers but the first ``used`` bytes."""
        self.used = used


def check_slab(job: Job, slab: Slab, read: Mapping[int, Bytes]) -> None:
    """Compare replicas, and padding with zero. Raises MismatchError that names the tensor and the files."""
    for check in slab.checks:
        block = check.block(read)
        place = job.source(check.source)
        if check.other is None:
            if block.any():
                raise MismatchError(f"{place.file.path}: the padding of tensor '{job.name}' is not zero")
        elif not np.array_equal(block, read[check.other][check.other_slices]):
            other = job.source(check.other)
            raise MismatchError(
                f"tensor '{job.name}' should be the same in {other.file.path} and {place.file.path}, and differs",
                "the shards are damaged, or of different runs",
            )
