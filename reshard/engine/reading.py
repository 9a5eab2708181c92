"""Reads parts of source files for the engine, summed in passing."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from formats.errors import CheckpointError
from formats.files.checksum import PIECE, Part, PartialSum, sum_part
from formats.files.safetensors import TensorInfo
from reshard.engine.transfer import Region
from reshard.storage.output import refused

Bytes = NDArray[np.uint8]
Room = Callable[[int], Bytes]
"""Gives a buffer of so many bytes."""


Wanted = frozenset[int]
"""The numbers of the target files that want some bytes of a source."""


@dataclass(eq=False)
class SourceFile:
    """A file to read from: ``name`` relative to the source's folder, ``expected`` its checksum, if one is known.

    ``sums`` has what was read of it, apart by which target files wanted it: so it can be told which sums are those of
    the bytes that finished files were made of.
    """

    path: Path
    name: str
    size: int
    expected: str | None = None
    sums: dict[Wanted, PartialSum] = field(default_factory=dict)

    def add(self, wanted: Wanted, part: PartialSum) -> None:
        """Take in the sum of bytes that these targets wanted."""
        self.sums.setdefault(wanted, PartialSum(self.size)).merge(part)

    def checksum(self) -> str | None:
        """The checksum of the whole file, None if not all of it was summed."""
        total = PartialSum(self.size)
        for part in self.sums.values():
            total.merge(part)
        return total.value() if total.is_complete else None


class SourcePlace(NamedTuple):
    """A tensor in a source file, at an absolute offset."""

    file: SourceFile
    offset: int


Places = Callable[[int], "SourcePlace | None"]
"""Where a rank has a tensor; None where it does not."""


def place_of(
    ranks: Sequence[Mapping[str, TensorInfo]], files: Mapping[Path, SourceFile], name: str, rank: int
) -> SourcePlace | None:
    """Where a rank has a tensor, given the tensors of each rank; None where it does not."""
    info = ranks[rank].get(name)
    return SourcePlace(files[info.file], info.offset) if info else None


class Reader:
    """Reads regions of source files, each file opened once.

    ``summed`` is called with the offset and the sums of all that is read whole.
    """

    def __init__(self, summed: Callable[[SourceFile, int, int, Part], None] | None = None) -> None:
        self._summed = summed
        self._descriptors: dict[Path, int] = {}

    def read(self, place: SourcePlace, region: Region, room: Room) -> Bytes:
        """A region of a tensor, in the region's shape. ``room`` gives a buffer for it."""
        offset = place.offset + region.offset
        data = room(region.nbytes)
        if region.wanted is None:
            for begin, piece in pieces(data):
                self.fill(piece, place.file, offset + begin)
        else:
            for row in range(0, data.size, region.shape[-1]):
                for run in region.wanted:
                    first = row + run.offset
                    self._fill(place.file.path, offset + first, data.data[first : row + run.end])
        return data.reshape(region.shape)

    def fill(self, data: Bytes, file: SourceFile, offset: int) -> Part | None:
        """Read into ``data``; its sums, if sums are taken."""
        self._fill(file.path, offset, data.data)
        if self._summed is None:
            return None
        part = sum_part(data, offset)
        self._summed(file, offset, data.size, part)
        return part

    def close(self) -> None:
        """Close the files."""
        for descriptor in self._descriptors.values():
            os.close(descriptor)
        self._descriptors.clear()

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
