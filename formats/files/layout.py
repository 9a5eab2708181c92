"""A file of tensors before it is written: where each is to lie, and all that is no tensor. Each container makes one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple


class Tensor(NamedTuple):
    """A tensor to be written: its name, dtype, shape, and size in bytes."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int


class Crc(NamedTuple):
    """The CRC-32 of bytes ``begin`` to ``end`` of a file stands at these offsets, in four bytes, little-endian."""

    begin: int
    end: int
    places: tuple[int, ...]


@dataclass(frozen=True)
class Layout:
    """A file of ``size`` bytes with tensors of these ``names`` at these ``offsets``."""

    size: int
    names: Sequence[str] = ()
    offsets: Sequence[int] = ()
    head: Sequence[bytes] = ()
    """The parts of the header, for safetensors; files with the same tensors share the longest."""
    fixed: tuple[tuple[int, bytes], ...] = ()
    """Other bytes that come from no source, with their offsets; in them zeros stand for the CRC-32s."""
    crcs: tuple[Crc, ...] = ()
    """Checksums that are written into the file last, in increasing order of their places."""
    ranges: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    """For a ``.distcp`` file: offset and length of the archive of each tensor and object."""

    @property
    def header(self) -> bytes:
        """The header, for safetensors."""
        return b"".join(self.head)

    @property
    def places(self) -> tuple[tuple[str, int], ...]:
        """The name of each tensor, and its offset."""
        return tuple(zip(self.names, self.offsets, strict=True))
