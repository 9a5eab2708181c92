"""Reads parts of source files, and knows the sums of what was read."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from formats.files.checksum import PartialSum, file_checksum, sum_part
from formats.store import read_into, unreadable
from reshard.move.slabs import Region
from reshard.source.source import SourceFile, SourcePlace

if TYPE_CHECKING:
    from reshard.move.ahead import Ahead
    from reshard.store.remote import Read

Bytes = NDArray[np.uint8]

_AT_ONCE = 64 << 20
"""Bytes of a remote file that are requested together for its checksum."""

_ROW = 1 << 18
"""Bytes of a row of a local file that is read whole, even if a part is needed: a system call for each part costs more,
and the kernel reads ahead.
"""

TargetSet = frozenset[int]
"""The numbers of the target files for which bytes of a source are read."""


class Sums:
    """The sums of what was read of each source file, one for each set of target files that wanted the bytes.

    So a finished target file has the sums of exactly the bytes it was made of. Headers and other bytes outside tensors
    count from the start, because they were read before.
    """

    def __init__(self, files: Iterable[SourceFile]) -> None:
        self.of: dict[SourceFile, dict[TargetSet, PartialSum]] = {file: {} for file in files}
        self._of_target: dict[int, list[tuple[SourceFile, TargetSet]]] = {}
        self.fetched = 0
        """Bytes that were requested of remote files."""
        for file in self.of:
            for offset, content in [*([(0, file.header)] if file.header is not None else []), *file.rest]:
                part = PartialSum(file.size)
                part.add(offset, len(content), sum_part(content, offset))
                self.add(file, frozenset(), part)

    def add(self, file: SourceFile, targets: TargetSet, part: PartialSum) -> None:
        """Add the sum of bytes of a file that these targets wanted."""
        if targets not in self.of[file]:
            self.of[file][targets] = PartialSum(file.size)
            for number in targets:
                self._of_target.setdefault(number, []).append((file, targets))
        self.of[file][targets].merge(part)

    def read_for(self, number: int) -> Iterator[tuple[SourceFile, TargetSet, PartialSum]]:
        """The sums of what was read for a target: of all its bytes, once the target is complete."""
        return ((file, targets, self.of[file][targets]) for file, targets in self._of_target.get(number, ()))

    def checksum(self, file: SourceFile) -> str | None:
        """The checksum of a whole file; None if parts of it were not read."""
        total = PartialSum(file.size)
        for part in self.of[file].values():
            total.merge(part)
        return total.value() if total.is_complete else None


class Reader:
    """Reads ranges of source files, each file opened once. What was requested of a remote file comes from ``ahead``."""

    def __init__(self) -> None:
        self._descriptors: dict[Path, int] = {}
        self._computed: dict[SourceFile, Read] = {}
        self._ahead: Ahead | None = None

    @property
    def ahead(self) -> Ahead:
        """The ranges of remote files that are under way."""
        if self._ahead is None:
            from reshard.move.ahead import Ahead  # rarely needed

            self._ahead = Ahead()
        return self._ahead

    def request(self, regions: Iterable[tuple[SourcePlace, Region]]) -> None:
        """Request what is read of these regions of remote files, as one step, which ``ahead.end_step`` ends."""
        self.ahead.request(
            (place.file, [(place.offset + at, place.offset + at + n) for at, _, n in ranges_of(place, region)])
            for place, region in regions
            if place.file.is_elsewhere
        )

    def fill(self, data: Bytes, file: SourceFile, offset: int) -> None:
        """Fill ``data`` from ``offset`` of a file. Raises CheckpointError if it cannot be read or is too short."""
        if file.is_elsewhere:
            self.ahead.fill(file, offset, data.data)
            return
        if file.remote is not None:  # computed from files of this machine
            if file not in self._computed:
                self._computed[file] = file.remote.open()
            content = self._computed[file](offset, offset + data.size)
            data[:] = np.frombuffer(content, np.uint8)  # without Python's lock
            return
        path = file.local
        if path not in self._descriptors:
            try:
                self._descriptors[path] = os.open(path, os.O_RDONLY)
            except OSError as error:
                raise unreadable(path, error) from error
        read_into(path, self._descriptors[path], offset, data.data)

    @property
    def fetched(self) -> int:
        """Bytes that were requested of remote files."""
        return self._ahead.fetched if self._ahead is not None else 0

    def close(self) -> None:
        """Close the files."""
        for descriptor in self._descriptors.values():
            os.close(descriptor)
        self._descriptors.clear()
        if self._ahead is not None:
            self._ahead.close()


def checksum_of(file: SourceFile) -> str:
    """The checksum of a whole file, which is read for it. Raises CheckpointError."""
    if file.remote is None:
        return file_checksum(file.path)
    total, reader, buffer = PartialSum(file.size), Reader(), np.empty(_AT_ONCE, dtype=np.uint8)
    try:
        for begin in range(0, file.size, _AT_ONCE):
            data = buffer[: min(_AT_ONCE, file.size - begin)]
            reader.ahead.request([(file, [(begin, begin + data.size)])])
            reader.fill(data, file, begin)
            reader.ahead.end_step()
            total.add(begin, data.size, sum_part(data, begin))
    finally:
        reader.close()
    return total.value()


def ranges_of(place: SourcePlace, region: Region) -> Iterable[tuple[int, int, int]]:
    """What is read of a region: the offset from the place on, the position in the region, and the length of each range.

    It is all of it, or what is needed of its rows; of short rows of a file on this machine, all.
    """
    if region.needed is None or not (place.file.is_elsewhere or region.shape[-1] > _ROW):
        return region.ranges(0, region.nbytes)
    rows = range(0, region.nbytes, region.shape[-1])
    parts = ((row + run.offset, run.length) for row in rows for run in region.needed)
    return ((offset, begin + at, n) for begin, size in parts for offset, at, n in region.ranges(begin, size))
