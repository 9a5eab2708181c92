"""Reads parts of source files, and keeps the sums of the bytes."""

from __future__ import annotations

import itertools
import os
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from reshard.formats.files.checksum import PartialSum, file_checksum, sum_part
from reshard.formats.files.safetensors import TensorInfo
from reshard.formats.store import NEAR, Range, joined, local_path, read_into, unreadable
from reshard.move.jobs import FilePlan
from reshard.move.slabs import Region
from reshard.source.source import Source, SourceFile, SourcePlace
from reshard.store.threads import Threads, result

ByteArray = NDArray[np.uint8]

REQUESTS = 16
"""Requests that a reader has under way at a time."""

PART = 4 << 20
"""Bytes of the longest request."""

GAP = 1 << 20
"""The most bytes between two ranges of a tensor that are read with them, because one more request would cost as
much.
"""

_AT_ONCE = 64 << 20
"""Bytes of a remote file that are requested together for its checksum."""

_ROW = 1 << 18
"""Bytes of a row of a local file that is read whole, even if a part is needed: a system call for each part costs more,
and the kernel reads ahead.
"""

Targets = frozenset[FilePlan]
"""The files for which bytes of a source are read."""


class Sums:
    """The sums of the bytes read of each source file, one for each set of target files that wanted the bytes.

    So a finished target file has the sums of exactly the bytes it was made of. Headers and other bytes outside tensors
    count from the start, because they were read before.
    """

    def __init__(self, files: Iterable[SourceFile]) -> None:
        self.of: dict[SourceFile, dict[Targets, PartialSum]] = {file: {} for file in files}
        self._of_target: dict[FilePlan, list[tuple[SourceFile, Targets]]] = {}
        self.fetched = 0
        """Bytes that were requested of remote files."""
        for file in self.of:
            for offset, content in [*([(0, file.header)] if file.header is not None else []), *file.rest]:
                part = PartialSum(file.size)
                part.add(offset, len(content), sum_part(content, offset))
                self.add(file, frozenset(), part)

    def add(self, file: SourceFile, targets: Targets, part: PartialSum) -> None:
        """Add the sum of bytes of a file that these targets wanted."""
        if targets not in self.of[file]:
            self.of[file][targets] = PartialSum(file.size)
            for target in targets:
                self._of_target.setdefault(target, []).append((file, targets))
        self.of[file][targets].merge(part)

    def read_for(self, target: FilePlan) -> Iterator[tuple[SourceFile, Targets, PartialSum]]:
        """The sums of the bytes read for a target: of all its bytes, once the target is complete."""
        return ((file, targets, self.of[file][targets]) for file, targets in self._of_target.get(target, ()))

    def checksum(self, file: SourceFile) -> str | None:
        """The checksum of a whole file; None if parts of it were not read."""
        total = PartialSum(file.size)
        for part in self.of[file].values():
            total.merge(part)
        return total.value() if total.is_complete else None


class PendingBytes(NamedTuple):
    """Bytes ``begin`` to ``end`` of a file, on their way."""

    begin: int
    end: int
    content: Future[memoryview]


class Reader:
    """Reads ranges of source files, each file opened once.

    Those of remote files are requested before they are read: many at a time, for a few steps ahead. The first step
    requested is the first to be read.
    """

    def __init__(self) -> None:
        self._descriptors: dict[Path, int] = {}
        self._threads: Threads | None = None
        self._steps = list[dict[SourceFile, Sequence[PendingBytes]]]()
        """The parts that were requested for each step of the work, by file, in order."""
        self.fetched = 0
        """Bytes that were requested of remote files so far."""

    def request(self, tensors: Iterable[tuple[SourceFile, Sequence[Range]]]) -> None:
        """Request the ranges of a step; each entry has those of one tensor. Ranges of local files are left out.

        Ranges that lie close are joined into one request, and long ones are cut into several.
        """
        ranges_in: dict[SourceFile, list[Range]] = {}
        for file, ranges in tensors:
            if file.is_elsewhere:
                ranges_in.setdefault(file, []).extend(joined(ranges, GAP))
        step = dict[SourceFile, Sequence[PendingBytes]]()
        for file, ranges in ranges_in.items():
            counts = ((begin, end, max(1, -(-(end - begin) // PART))) for begin, end in joined(ranges, NEAR))
            bounds = ([begin + (end - begin) * i // n for i in range(n + 1)] for begin, end, n in counts)
            step[file] = [self._part(file, *part) for ends in bounds for part in itertools.pairwise(ends)]
        self._steps.append(step)

    @property
    def requested(self) -> int:
        """The bytes of all steps that have not ended."""
        return sum(part.end - part.begin for step in self._steps for parts in step.values() for part in parts)

    def end_step(self) -> None:
        """Forget the first step."""
        self._steps.pop(0)

    def fill(self, data: ByteArray, file: SourceFile, offset: int) -> None:
        """Fill ``data`` from ``offset`` of a file. Raises CheckpointError if it cannot be read or is too short, and
        MismatchError if a remote one has changed.
        """
        if file.is_elsewhere:
            position = 0
            while position < data.size:
                begin, last = offset + position, offset + data.size
                part = self._find(file, begin) or self._part(file, begin, min(last, begin + PART))  # not asked for
                content = np.frombuffer(result(part.content), np.uint8)[begin - part.begin : last - part.begin]
                data[position : position + content.size] = content  # numpy copies without Python's lock
                position += content.size
        elif file.remote is not None:  # computed from files of this machine
            data[:] = np.frombuffer(file.remote.read(offset, offset + data.size), np.uint8)
        else:
            path = local_path(file.path)
            assert path is not None
            if path not in self._descriptors:
                try:
                    self._descriptors[path] = os.open(path, os.O_RDONLY)
                except OSError as error:
                    raise unreadable(path, error) from error
            read_into(path, self._descriptors[path], offset, data.data)

    def close(self) -> None:
        """Close the files, and cancel requests that have not begun."""
        for descriptor in self._descriptors.values():
            os.close(descriptor)
        self._descriptors.clear()
        for part in (part for step in self._steps for parts in step.values() for part in parts):
            part.content.cancel()
        if self._threads is not None:
            self._threads.close()

    def _find(self, file: SourceFile, offset: int) -> PendingBytes | None:
        for step in self._steps:
            parts = step.get(file, ())
            number = bisect_right(parts, offset, key=lambda part: part.begin) - 1
            if number >= 0 and offset < parts[number].end:
                return parts[number]
        return None

    def _part(self, file: SourceFile, begin: int, end: int) -> PendingBytes:
        assert file.remote is not None
        self._threads = self._threads or Threads(REQUESTS)
        self.fetched += file.remote.over_network(end - begin)
        return PendingBytes(begin, end, self._threads.submit(file.remote.read, begin, end))


def contents_of(source: Source, tensors: Iterable[TensorInfo]) -> Iterator[ByteArray]:
    """The bytes of stored tensors, one after the other; those of remote files are requested together.

    Raises CheckpointError, MismatchError.
    """
    reader, places = Reader(), [(source.files[info.file], info) for info in tensors]
    try:
        reader.request((file, [(info.offset, info.offset + info.nbytes)]) for file, info in places)
        for file, info in places:
            data = np.empty(info.nbytes, np.uint8)
            reader.fill(data, file, info.offset)
            yield data
    finally:
        reader.close()


def checksum_of(file: SourceFile) -> str:
    """The checksum of a whole file, which is read for it. Raises CheckpointError."""
    if file.remote is None:
        return file_checksum(file.path)
    total, reader, buffer = PartialSum(file.size), Reader(), np.empty(_AT_ONCE, dtype=np.uint8)
    try:
        for begin in range(0, file.size, _AT_ONCE):
            data = buffer[: min(_AT_ONCE, file.size - begin)]
            reader.request([(file, [(begin, begin + data.size)])])
            reader.fill(data, file, begin)
            reader.end_step()
            total.add(begin, data.size, sum_part(data, begin))
    finally:
        reader.close()
    return total.value()


def ranges_of(place: SourcePlace, region: Region) -> Iterable[tuple[int, int, int]]:
    """Return the ranges to read of a region: for each, the offset from the place on, the position in the region, the
    length.

    Everything is read, or the needed parts of its rows; of short rows in a file on this machine, everything.
    """
    if region.needed is None or not (place.file.is_elsewhere or region.shape[-1] > _ROW):
        return region.ranges(0, region.nbytes)
    rows = range(0, region.nbytes, region.shape[-1])
    parts = ((row + run.offset, run.length) for row in rows for run in region.needed)
    return ((offset, begin + at, n) for begin, size in parts for offset, at, n in region.ranges(begin, size))
