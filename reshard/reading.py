"""Reads parts of source files for the engine: mapped where that is cheaper than a copy, and summed in passing."""

from __future__ import annotations

import contextlib
import mmap
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from formats.errors import CheckpointError
from reshard.checksum import PIECE, Part, PartialSum, sum_part
from reshard.output import refused
from reshard.system import populate
from reshard.transfer import Region

MAPPED = 1 << 20
"""Bytes from which a mapping is cheaper than a copy."""

Bytes = NDArray[np.uint8]
Room = Callable[[int], Bytes]
"""Gives a buffer of so many bytes."""


@dataclass(eq=False)
class SourceFile:
    """A file to read from, with the checksum it should have, if one is known."""

    path: Path
    size: int
    expected: str | None = None
    sum: PartialSum = field(init=False)

    def __post_init__(self) -> None:
        self.sum = PartialSum(self.size)


@dataclass(frozen=True, slots=True)
class SourcePlace:
    """A tensor in a source file, at an absolute offset."""

    file: SourceFile
    offset: int


class Reader:
    """Reads regions of source files, each file opened once.

    Where a file's checksum is expected, ``summed`` is called with the offset and the sums of what is read of it.
    """

    def __init__(self, summed: Callable[[SourceFile, int, int, Part], None] | None = None) -> None:
        self._summed = summed
        self._descriptors: dict[Path, int] = {}

    def read(self, place: SourcePlace, region: Region, room: Room) -> Bytes:
        """A region of a tensor, in the region's shape; only to be read. ``room`` gives a buffer for it."""
        offset = place.offset + region.offset
        if region.wanted is None:
            data = self.view(place.file, offset, region.nbytes, room)
            for begin, piece in pieces(data):
                self.sum(place.file, offset + begin, piece)
        else:
            data = room(region.nbytes)
            for row in range(0, data.size, region.shape[-1]):
                for run in region.wanted:
                    first = row + run.offset
                    self._fill(place.file.path, offset + first, data.data[first : row + run.end])
        return data.reshape(region.shape)

    def view(self, file: SourceFile, offset: int, nbytes: int, room: Room) -> Bytes:
        """Bytes of a file, only to be read: mapped, or where that is not possible or not worth it, in a buffer.

        A file that another program cuts off while it is mapped ends this process with SIGBUS, as all that map files.
        """
        if nbytes >= MAPPED:
            with contextlib.suppress(OSError, ValueError):  # whatever is wrong, reading will say it
                return self._map(file.path, offset, nbytes)
        data = room(nbytes)
        self._fill(file.path, offset, data.data)
        return data

    def sum(self, file: SourceFile, offset: int, data: Bytes) -> Part | None:
        """Sum bytes that were read, where that is wanted for this file."""
        if self._summed is None or file.expected is None:
            return None
        part = sum_part(data, offset)
        self._summed(file, offset, data.size, part)
        return part

    def close(self) -> None:
        """Close the files."""
        for descriptor in self._descriptors.values():
            os.close(descriptor)
        self._descriptors.clear()

    def _map(self, path: Path, offset: int, nbytes: int) -> Bytes:
        before = offset % mmap.ALLOCATIONGRANULARITY
        window = mmap.mmap(self._descriptor(path), before + nbytes, access=mmap.ACCESS_READ, offset=offset - before)
        data = np.frombuffer(window, dtype=np.uint8)
        populate(data)
        return data[before:]

    def _fill(self, path: Path, offset: int, view: memoryview) -> None:
        position, size = 0, len(view)
        try:
            descriptor = self._descriptor(path)
            while position < size:
                count = os.preadv(descriptor, [view[position:]], offset + position)
                if count == 0:
                    raise CheckpointError(f"{path} ended at byte {offset + position} while it was read")
                position += count
        except OSError as error:
            raise refused("read", path, error) from error

    def _descriptor(self, path: Path) -> int:
        if path not in self._descriptors:
            self._descriptors[path] = os.open(path, os.O_RDONLY)
        return self._descriptors[path]


def pieces(data: Bytes) -> Iterator[tuple[int, Bytes]]:
    """Pieces that are summed and used one after the other, and where they begin."""
    return ((begin, data[begin : begin + PIECE]) for begin in range(0, data.size, PIECE))
