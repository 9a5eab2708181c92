"""The engine: carries out transfers between files, in one pass, in bounded memory, on a few threads.

It knows byte ranges and nothing else: no dtype, no model. Jobs are tensors in the order of the source; each is cut
into slabs (see ``reshard.transfer``) that are read, checked, rearranged and written by whichever thread is free.
Reads, checksums, copies and writes all release the interpreter lock.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from formats.errors import CheckpointError, MismatchError, ReshardError
from reshard.checksum import PartialSum
from reshard.transfer import Copy, Region, Slab, Way

SLAB = 4 << 20
"""Bytes of buffer for a slab: large system calls, and still in a processor's cache between read, checksum and write."""

STREAM = 1 << 18
"""Bytes at a time where a slab is plain byte ranges: they need no larger buffer, and stay in a core's own cache."""

WRITE = 1 << 15
"""Bytes of one system call that writes: the largest that Linux serves from a core's own lists of free pages (order 3).

Larger ones take their pages from the free lists of the whole machine, which two threads contend for, and where a
virtual machine keeps memory that its host has taken back: they are faster at best, and several times slower at worst.
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
        """The number of threads: as asked, or two for each of up to four cores."""
        return self.workers or max(2, min(8, os.cpu_count() or 1))


class Reader:
    """Reads regions of source files, each file opened once; sums what it reads where a checksum is expected."""

    def __init__(self, *, checksum: bool) -> None:
        self._checksum = checksum
        self._descriptors: dict[Path, int] = {}
        self._lock = threading.Lock()

    def read(self, job: Job, region: Region, data: Bytes) -> Bytes:
        """Fill ``data`` with a region of a job's source rank, and return it in the region's shape."""
        return self.read_and_sum(job, region, data)[0]

    def read_and_sum(self, job: Job, region: Region, data: Bytes) -> tuple[Bytes, int | None]:
        """As ``read``, with the CRC-32 of the region, if it was taken."""
        crc: int | None = None
        place = job.sources[region.rank]
        assert place is not None
        offset = place.offset + region.offset
        with _disk_errors(place.file.path, "read"):
            if region.wanted is None:
                self._fill(place.file.path, data, offset)
                if self._checksum and place.file.expected is not None:
                    crc = crc32(data.data)
                    place.file.sum.add(offset, data.size, crc)
            else:
                for row in range(0, data.size, region.shape[-1]):
                    for run in region.wanted:
                        self._fill(place.file.path, data[row + run.offset : row + run.end], offset + row + run.offset)
        return data.reshape(region.shape), crc

    def close(self) -> None:
        """Close the files."""
        for descriptor in self._descriptors.values():
            os.close(descriptor)
        self._descriptors.clear()

    def _fill(self, path: Path, data: Bytes, offset: int) -> None:
        descriptor, view, position = self._descriptor(path), data.data, 0
        while position < len(view):
            count = os.preadv(descriptor, [view[position:]], offset + position)
            if count == 0:
                raise CheckpointError(f"{path} ended at byte {offset + position} while it was read")
            position += count

    def _descriptor(self, path: Path) -> int:
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
        with _disk_errors(target.staged, "write"):
            descriptor = os.open(target.staged, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o666)
            self._descriptors[target.staged] = descriptor
            os.ftruncate(descriptor, target.size)
        self._write(target, 0, np.frombuffer(target.header, dtype=np.uint8))

    def _finish(self, target: TargetFile) -> None:
        with self._lock:
            descriptor = self._descriptors.pop(target.staged)
        with _disk_errors(target.path, "write"):
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
        """Let the threads draw slabs from one iterator; the first error stops them all."""
        steps = self._steps(jobs)
        draw = threading.Lock()
        with ThreadPoolExecutor(self._options.threads) as pool:
            futures = [pool.submit(self._work, steps, draw) for _ in range(self._options.threads)]
            try:
                done, _ = wait(futures, return_when=FIRST_EXCEPTION)
            except BaseException:
                self.stop()
                raise
            for future in done:
                future.result()

    def _steps(self, jobs: Sequence[Job]) -> Iterator[tuple[Job, Slab]]:
        for job in jobs:
            for slab in job.transfer.slabs(SLAB):
                yield job, slab

    def _work(self, steps: Iterator[tuple[Job, Slab]], draw: threading.Lock) -> None:
        try:
            while not self._stopped.is_set():
                with draw:
                    step = next(steps, None)
                if step is None:
                    return
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
        offsets = {region.rank: region.offset for region in slab.writes}
        for region in slab.reads:
            copies = [copy for copy in slab.copies if copy.source == region.rank]
            for begin in range(0, region.nbytes, STREAM):
                length = min(STREAM, region.nbytes - begin)
                piece = Region(region.rank, region.offset + begin, (length,))
                data, crc = self._reader.read_and_sum(job, piece, self._buffer(length)[:length])
                for copy in copies:
                    first, last = copy.source_slices[0].start - begin, copy.source_slices[0].stop - begin
                    start, stop = max(0, first), min(length, last)
                    if start < stop:
                        place = self._target(job, copy.target)
                        at = offsets[copy.target] + copy.target_slices[0].start + start - first
                        known = crc if stop - start == length else None
                        self._write(place.file, place.offset + at, data[start:stop], known)
        for copy in slab.copies:
            if copy.source is None:
                self._write_zeros(job, copy, offsets[copy.target])

    @staticmethod
    def _target(job: Job, rank: int) -> TargetPlace:
        place = job.targets[rank]
        assert place is not None
        return place

    def _write_zeros(self, job: Job, copy: Copy, offset: int) -> None:
        place, part = self._target(job, copy.target), copy.target_slices[0]
        zeros = np.zeros(min(STREAM, part.stop - part.start), dtype=np.uint8)
        for begin in range(part.start, part.stop, STREAM):
            self._write(place.file, place.offset + offset + begin, zeros[: part.stop - begin])

    def _write_flat(self, job: Job, slab: Slab, read: dict[int, Bytes]) -> None:
        offsets = {region.rank: region.offset for region in slab.writes}
        for copy in slab.copies:
            if copy.source is None:
                self._write_zeros(job, copy, offsets[copy.target])
                continue
            place, part = self._target(job, copy.target), copy.target_slices[0]
            data = read[copy.source][copy.source_slices]
            self._write(place.file, place.offset + offsets[copy.target] + part.start, data)

    def _write_blocks(self, job: Job, slab: Slab, read: dict[int, Bytes], arena: _Arena) -> None:
        written = {region.rank: arena.take(region.nbytes).reshape(region.shape) for region in slab.writes}
        for copy in slab.copies:
            data: Any = 0 if copy.source is None else read[copy.source][copy.source_slices]
            written[copy.target][copy.target_slices] = data
        for region in slab.writes:
            place = self._target(job, region.rank)
            self._write(place.file, place.offset + region.offset, written[region.rank].reshape(-1))

    def _write(self, target: TargetFile, offset: int, data: Bytes, crc: int | None = None) -> None:
        view, position = data.data, 0
        if crc is None:
            crc = crc32(view) if self._options.sums_targets else 0
        with _disk_errors(target.path, "write"):
            descriptor = self._descriptors[target.staged]
            while position < len(view):
                position += os.pwrite(descriptor, view[position : position + WRITE], offset + position)
        self._progress(len(view))
        if target.sum.add(offset, len(view), crc):
            self._finish(target)


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


@contextlib.contextmanager
def _disk_errors(path: Path, verb: str) -> Iterator[None]:
    """Say in one line what the operating system refused."""
    try:
        yield
    except ReshardError:
        raise
    except OSError as error:
        hint: Any = None
        if verb == "write":
            hint = "free some space and run the same command again: it goes on where it stopped"
        raise CheckpointError(f"cannot {verb} {path}: {error.strerror or error}", hint) from error
