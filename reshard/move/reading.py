"""Reads parts of source files for the engine, and sums them on the way."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from formats.files.checksum import PIECE, Part, PartialSum, file_checksum, sum_part
from formats.store import read_into, unreadable
from reshard.move.slabs import Region
from reshard.source.source import SourceFile, SourcePlace

if TYPE_CHECKING:
    from reshard.move.ahead import Ahead
    from reshard.store.remote import Read

Bytes = NDArray[np.uint8]
Room = Callable[[int], Bytes]
"""Returns a buffer of so many bytes."""


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
    """Reads regions of source files, each file opened once. What was requested of a remote file comes from ``ahead``.

    ``summed`` is called with file, offset, length and sum of what is read, but for rows of which a part is needed.
    """

    def __init__(
        self,
        summed: Callable[[SourceFile, int, int, Part], None] | None = None,
        piece: int = PIECE,
    ) -> None:
        self._summed, self._piece = summed, piece
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

    def read(self, place: SourcePlace, region: Region, room: Room) -> Bytes:
        """Read a region of a tensor into a buffer of ``room``; returns it in the region's shape, bytes last.

        Raises CheckpointError if the file cannot be read or is too short.
        """
        data, file = room(region.nbytes), place.file
        is_whole = region.needed is None or (not file.is_elsewhere and region.shape[-1] <= _ROW)
        for first, size in ((0, data.size),) if is_whole else _needed(region):
            for begin, piece in pieces(data[first : first + size], self._piece):
                for offset, at, length in region.ranges(first + begin, piece.size):
                    if region.needed is None:
                        self.fill(piece[at : at + length], file, place.offset + offset)
                    else:
                        self._fill(file, place.offset + offset, piece.data[at : at + length])
        return data.reshape(region.shape)

    def request(self, regions: Iterable[tuple[SourcePlace, Region]]) -> None:
        """Request the bytes of remote files that ``read`` of these regions will read, as one step, which
        ``ahead.end_step`` ends.
        """
        self.ahead.request((place.file, needed(place, region)) for place, region in regions if place.file.is_elsewhere)

    def fill(self, data: Bytes, file: SourceFile, offset: int) -> Part | None:
        """Fill ``data`` from ``offset`` of a file; returns its sum, or None without ``summed``."""
        self._fill(file, offset, data.data)
        if self._summed is None:
            return None
        part = sum_part(data, offset)
        self._summed(file, offset, data.size, part)
        return part

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

    def _fill(self, file: SourceFile, offset: int, view: memoryview) -> None:
        if file.is_elsewhere:
            self.ahead.fill(file, offset, view)
            return
        if file.remote is not None:  # computed from files of this machine
            if file not in self._computed:
                self._computed[file] = file.remote.open()
            content = self._computed[file](offset, offset + len(view))
            np.frombuffer(view, np.uint8)[:] = np.frombuffer(content, np.uint8)  # without Python's lock
            return
        path = file.local
        if path not in self._descriptors:
            try:
                self._descriptors[path] = os.open(path, os.O_RDONLY)
            except OSError as error:
                raise unreadable(path, error) from error
        read_into(path, self._descriptors[path], offset, view)


def checksum_of(file: SourceFile) -> str:
    """The checksum of a whole file, which is read for it. Raises CheckpointError."""
    if file.remote is None:
        return file_checksum(file.path)
    total = PartialSum(file.size)
    reader = Reader(lambda _, offset, length, part: total.add(offset, length, part))
    buffer = np.empty(_AT_ONCE, dtype=np.uint8)
    try:
        for begin in range(0, file.size, _AT_ONCE):
            end = min(begin + _AT_ONCE, file.size)
            reader.ahead.request([(file, [(begin, end)])])
            reader.fill(buffer[: end - begin], file, begin)
            reader.ahead.end_step()
    finally:
        reader.close()
    return total.value()


def needed(place: SourcePlace, region: Region) -> list[tuple[int, int]]:
    """The ranges of a remote file (the first byte, and the one behind the last) that ``Reader.read`` of a region
    reads.
    """
    begins = (
        (place.offset + o, length) for begin, size in _needed(region) for o, _, length in region.ranges(begin, size)
    )
    return [(begin, begin + length) for begin, length in begins]


def _needed(region: Region) -> Iterator[tuple[int, int]]:
    """The first byte, and the number, of what is needed of a region."""
    if region.needed is None:
        yield 0, region.nbytes
        return
    for row in range(0, region.nbytes, region.shape[-1]):
        yield from ((row + run.offset, run.length) for run in region.needed)


def pieces(data: Bytes, size: int) -> Iterator[tuple[int, Bytes]]:
    """Cut a buffer into pieces of at most ``size`` bytes, each with its offset."""
    return ((begin, data[begin : begin + size]) for begin in range(0, data.size, size))
