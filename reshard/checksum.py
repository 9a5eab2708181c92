"""CRC-32 of a file whose parts are read or written in any order, by any thread.

The CRC of a concatenation follows from the CRCs of its parts and their lengths, so that each part is summed while it is
in the cache, and the sum of the file is the one that ``zlib.crc32`` (or gzip, or cksfv) gives for it.
"""

from __future__ import annotations

import threading
from functools import lru_cache
from pathlib import Path
from zlib import crc32

_POLYNOMIAL = 0xEDB88320


def combine(first: int, second: int, length: int) -> int:
    """The CRC-32 of two parts laid one after the other; ``length`` is that of the second in bytes.

    Multiplies the first by x^(8 length) modulo the polynomial (bits reflected), as zlib's crc32_combine does.
    """
    return _multiply(_shift(length), first) ^ second


def _multiply(a: int, b: int) -> int:
    product = 0
    mask = 1 << 31
    while a:
        if a & mask:
            product ^= b
            a ^= mask
        mask >>= 1
        b = (b >> 1) ^ (_POLYNOMIAL if b & 1 else 0)
    return product


@lru_cache(maxsize=4096)
def _shift(length: int) -> int:
    """x^(8 length) modulo the polynomial."""
    power, square = 1 << 31, 1 << 23
    while length:
        if length & 1:
            power = _multiply(square, power)
        square = _multiply(square, square)
        length >>= 1
    return power


class PartialSum:
    """The checksum of a file of ``size`` bytes as its parts come in. Safe to use from several threads."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._parts: dict[int, tuple[int, int]] = {}
        self._seen = 0
        self._lock = threading.Lock()

    def add(self, offset: int, length: int, crc: int) -> bool:
        """Take in a part; True if it was the last one missing."""
        with self._lock:
            if length:
                self._parts[offset] = (length, crc)
                self._seen += length
            return self._seen == self.size

    @property
    def is_complete(self) -> bool:
        """Whether parts of all bytes have come in."""
        return self._seen == self.size

    def value(self) -> str:
        """The checksum as eight hex digits. Raises RuntimeError if the parts do not tile the file exactly."""
        position = crc = 0
        for offset in sorted(self._parts):
            length, part = self._parts[offset]
            if offset != position:
                raise RuntimeError(f"parts of a file do not follow each other: {position} is followed by {offset}")
            crc = combine(crc, part, length)
            position += length
        if position != self.size:
            raise RuntimeError(f"parts of a file cover {position} of {self.size} bytes")
        return f"{crc:08x}"


def file_checksum(path: Path) -> str:
    """The CRC-32 of a file as eight hex digits."""
    crc = 0
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            crc = crc32(block, crc)
    return f"{crc:08x}"
