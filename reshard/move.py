"""The engine: carries out transfers between files, in one pass, in bounded memory, on a few threads.

It knows byte ranges and nothing else: no dtype, no model. Jobs are tensors in the order of the source; each is cut
into slabs (see ``reshard.transfer``) that are read, checked, rearranged and written. Each thread has a stretch of the
jobs of its own, so that threads seldom write to the same file, and helps the others when it is done with that.
Reads, checksums, copies and writes all release the interpreter lock.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import threading
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from formats.errors import CheckpointError, MismatchError
from reshard.checksum import PartialSum
from reshard.output import disk_errors, refused
from reshard.transfer import Copy, Region, Slab, Way

SLAB = 2 << 20
"""Bytes of buffer for a slab: large system calls, and still in a processor's cache between read, checksum and write."""

STREAM = 1 << 18
"""Bytes at a time where a slab is plain byte ranges: they need no larger buffer, and stay in a core's own cache."""

WRITE = 1 << 18
"""Bytes of one system call that writes. Larger ones take larger pages of memory, which a virtual machine may have to
get from its host first: as measured, calls of 1 MB were up to five times slower, and those of 32 KB a third slower.
"""

Bytes = NDArray[np.uint8]


@dataclass(eq=False)
class SourceFile:
    """A file to read from, with the checksum it should have, if one is known."""

    path: Path
    size: int
    expected: str | None = None
    sum: PartialSum = field(init=False)

    def __post_init__(self) -> None:
        self.sum = PartialSum(self.size)


@dataclass(eq=False)
class TargetFile:
    """A file to be written: its final path, its header, and what the data adds up to."""

    path: Path
    header: bytes
    size: int
    sum: PartialSum = field(init=False)

    def __post_init__(self) -> None:
        self.sum = PartialSum(self.size)

    @property
    def staged(self) -> Path:
        """Where it is written until it is complete."""
        return self.path.with_name(self.path.name + ".incomplete")


@dataclass(frozen=True, slots=True)
class SourcePlace:
    """A tensor in a source file, at an absolute offset."""

    file: SourceFile
    offset: int


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

    @property
    def threads(self) -> int:
        """The number of threads: as asked, or one for each core, at least two and at most eight."""
        return self.workers or max(2, min(8, os.cpu_count() or 1))


class Reader:
    """Reads regions of source files, each file opened once; sums what it reads where a checksum is expected."""

    def __init__(self, *, checksum: bool) -> None:
        self._checksum = checksum
        self._descriptors: dict[Path, int] = {}
        self._lock = threading.Lock()

    def read(self, job: Job, region: Region, data: Bytes) -> Bytes:
        """Fill ``data`` with a region of a job's source rank, and return it in the region's shape."""
        place = job.sources[region.rank]
        assert place is not None
        offset = place.offset + region.offset
        if region.wanted is None:
            self.fill(place.file, offset, data.data)
        else:
            for row in range(0, data.size, region.shape[-1]):
                for run in region.wanted:
                    first = row + run.offset
                    self._fill(place.file.path, offset + first, data.data[first : row + run.end])
        return data.reshape(region.shape)

    def fill(self, file: SourceFile, offset: int, view: memoryview) -> int | None:
        """Fill ``view`` with the bytes of a file from ``offset`` on; their CRC-32, where it is wanted for this file."""
        self._fill(file.path, offset, view)
        if not self._checksum or file.expected is None:
            return None
        crc = crc32(view)
        file.sum.add(offset, len(view), crc)
        return crc

    def close(self) -> None:
        """Close the files."""
        for descriptor in self._descriptors.values():
            os.close(descriptor)
        self._descriptors.clear()

    def _fill(self, path: Path, offset: int, view: memoryview) -> None:
        position, size = 0, len(view)
        try:
            descriptor = self._descriptors.get(path) or self._open(path)
            while position < size:
                count = os.preadv(descriptor, [view[position:]], offset + position)
                if count == 0:
                    raise CheckpointError(f"{path} ended at byte {offset + position} while it was read")
                position += count
        except OSError as error:
            raise refused("read", path, error) from error

    def _open(self, path: Path) -> int:
        with self._lock:
            if path not in self._descriptors:
                self._descriptors[path] = os.open(path, os.O_RDONLY)
            return self._descriptors[path]


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
        self._descriptors: dict[Path, int] = {}
        self._lock = threading.Lock()
        self._stopped = threading.Event()
        self._local = threading.local()

    # -- files

    def start(self, target: TargetFile) -> None:
        """Create a target file of full size and write its header."""
        with disk_errors(target.staged):
            descriptor = os.open(target.staged, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o666)
            self._descriptors[target.staged] = descriptor
            os.ftruncate(descriptor, target.size)
        self._write(target, 0, memoryview(target.header))

    def _finish(self, target: TargetFile) -> None:
        with self._lock:
            descriptor = self._descriptors.pop(target.staged)
        with disk_errors(target.path):
            if self._options.fsync:
                os.fsync(descriptor)
            os.close(descriptor)
            target.staged.rename(target.path)
        self._finished(target, target.sum.value() if self._options.sums_targets else None)

    def stop(self) -> None:
        self._stopped.set()

    def close(self) -> None:
        self._reader.close()
        for descriptor in self._descriptors.values():
            with contextlib.suppress(OSError):
                os.close(descriptor)

    # -- running

    def run(self, jobs: Sequence[Job]) -> None:
        """Let the threads draw slabs, each from its own stretch of the jobs first; the first error stops them all."""
        stretches = [_Stretch(part) for part in _stretches(jobs, self._options.threads)]
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
        if slab.is_flat and not slab.checks:
            self._stream(job, slab)
            return
        arena = _Arena(self._buffer(slab.nbytes))
        read = {region.rank: self._reader.read(job, region, arena.take(region.nbytes)) for region in slab.reads}
        check_slab(job, slab, read)
        if slab.is_flat:
            self._write_flat(job, slab, read)
        else:
            self._write_blocks(job, slab, read, arena)

    def _buffer(self, nbytes: int) -> Bytes:
        buffer: Bytes | None = getattr(self._local, "buffer", None)
        if buffer is None or buffer.size < nbytes:
            buffer = self._local.buffer = np.empty(max(nbytes, STREAM), dtype=np.uint8)
        return buffer

    # -- reading and writing

    def _stream(self, job: Job, slab: Slab) -> None:
        """Move plain byte ranges piece by piece: each piece is read once and written to all that want some of it."""
        view = self._buffer(STREAM).data
        starts = {region.rank: region.offset for region in slab.writes}
        for region in slab.reads:
            source = job.sources[region.rank]
            assert source is not None
            copies = [copy for copy in slab.copies if copy.source == region.rank]
            for begin in range(0, region.nbytes, STREAM):
                end = min(begin + STREAM, region.nbytes)
                crc = self._reader.fill(source.file, source.offset + region.offset + begin, view[: end - begin])
                for copy in copies:
                    (held,), (wanted,) = copy.source_slices, copy.target_slices
                    first, last = max(begin, held.start), min(end, held.stop)
                    if first < last:
                        place = self._target(job, copy.target)
                        at = place.offset + starts[copy.target] + wanted.start + first - held.start
                        is_whole = last - first == end - begin
                        self._write(place.file, at, view[first - begin : last - begin], crc if is_whole else None)
        for copy in slab.copies:
            if copy.source is None:
                self._write_zeros(job, copy, starts[copy.target])

    @staticmethod
    def _target(job: Job, rank: int) -> TargetPlace:
        place = job.targets[rank]
        assert place is not None
        return place

    def _write_zeros(self, job: Job, copy: Copy, offset: int) -> None:
        place, part = self._target(job, copy.target), copy.target_slices[0]
        zeros = np.zeros(min(STREAM, part.stop - part.start), dtype=np.uint8)
        for begin in range(part.start, part.stop, STREAM):
            self._write(place.file, place.offset + offset + begin, zeros[: part.stop - begin].data)

    def _write_flat(self, job: Job, slab: Slab, read: dict[int, Bytes]) -> None:
        offsets = {region.rank: region.offset for region in slab.writes}
        for copy in slab.copies:
            if copy.source is None:
                self._write_zeros(job, copy, offsets[copy.target])
                continue
            place, part = self._target(job, copy.target), copy.target_slices[0]
            data = read[copy.source][copy.source_slices]
            self._write(place.file, place.offset + offsets[copy.target] + part.start, data.data)

    def _write_blocks(self, job: Job, slab: Slab, read: dict[int, Bytes], arena: _Arena) -> None:
        written = {region.rank: arena.take(region.nbytes).reshape(region.shape) for region in slab.writes}
        for copy in slab.copies:
            data: Any = 0 if copy.source is None else read[copy.source][copy.source_slices]
            written[copy.target][copy.target_slices] = data
        for region in slab.writes:
            place = self._target(job, region.rank)
            self._write(place.file, place.offset + region.offset, written[region.rank].reshape(-1).data)

    def _write(self, target: TargetFile, offset: int, view: memoryview, crc: int | None = None) -> None:
        position, size = 0, len(view)
        if crc is None:
            crc = crc32(view) if self._options.sums_targets else 0
        try:
            descriptor = self._descriptors[target.staged]
            while position < size:
                position += os.pwrite(descriptor, view[position : position + WRITE], offset + position)
        except OSError as error:
            raise refused("write", target.path, error) from error
        self._progress(size)
        if target.sum.add(offset, size, crc):
            self._finish(target)


class _Stretch:
    """Neighbouring jobs, from which threads draw slabs."""

    def __init__(self, jobs: Sequence[Job]) -> None:
        self._steps = ((job, slab) for job in jobs for slab in job.transfer.slabs(SLAB))
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
    """Pieces of one buffer, handed out one after the other."""

    def __init__(self, buffer: Bytes) -> None:
        self._buffer, self._used = buffer, 0

    def take(self, nbytes: int) -> Bytes:
        self._used += nbytes
        return self._buffer[self._used - nbytes : self._used]


def check_slab(job: Job, slab: Slab, read: Mapping[int, Bytes]) -> None:
    """Compare replicas, and padding with zero. Raises MismatchError that names the tensor and the files."""
    for check in slab.checks:
        block = read[check.source][check.slices]
        place = job.sources[check.source]
        assert place is not None
        if check.other is None:
            if block.any():
                raise MismatchError(f"{place.file.path}: the padding of tensor '{job.name}' is not zero")
        elif not np.array_equal(block, read[check.other][check.other_slices]):
            other = job.sources[check.other]
            assert other is not None
            raise MismatchError(
                f"tensor '{job.name}' should be the same in {other.file.path} and {place.file.path}, and differs",
                "the shards are damaged, or of different runs",
            )
