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
    for power in _powers(length):
        if first & _ONE:
            second ^= power
        first <<= 1
    return second


_ONE = 1 << 31
"""The polynomial 1: the highest bit is the lowest power."""


@lru_cache(maxsize=4096)
def _powers(length: int) -> tuple[int, ...]:
    """x^(8 length), x^(8 length + 1) … x^(8 length + 31) modulo the polynomial."""
    powers = [_shift(length)]
    while len(powers) < 32:
        powers.append(_times_x(powers[-1]))
    return tuple(powers)


def _shift(length: int) -> int:
    """x^(8 length) modulo the polynomial."""
    power, square = _ONE, _ONE >> 8
    while length:
        if length & 1:
            power = _multiply(square, power)
        square = _multiply(square, square)
        length >>= 1
    return power


def _multiply(a: int, b: int) -> int:
    product = 0
    while a:
        if a & _ONE:
            product ^= b
        a = (a << 1) & 0xFFFFFFFF
        b = _times_x(b)
    return product


def _times_x(a: int) -> int:
    return (a >> 1) ^ _POLYNOMIAL if a & 1 else a >> 1


class PartialSum:
    """The checksum of a file of ``size`` bytes as its parts come in. Safe to use from several threads.

    Parts that meet are joined at once: what is kept grows with the number of places at which threads work.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self._starts: dict[int, tuple[int, int]] = {}
        self._ends: dict[int, int] = {}
        self._seen = 0
        self._lock = threading.Lock()

    def add(self, offset: int, length: int, crc: int) -> bool:
        """Take in a part; True if it was the last one missing."""
        with self._lock:
            self._seen += length
            if length:
                self._join(offset, offset + length, crc)
            return self._seen == self.size

    def _join(self, start: int, end: int, crc: int) -> None:
        if start in self._ends:
            before = self._ends.pop(start)
            crc = combine(self._starts.pop(before)[1], crc, end - start)
            start = before
        if end in self._starts:
            after, second = self._starts.pop(end)
            del self._ends[after]
            crc = combine(crc, second, after - end)
            end = after
        self._starts[start] = end, crc
        self._ends[end] = start

    @property
    def is_complete(self) -> bool:
        """Whether parts of all bytes have come in."""
        return self._seen == self.size

    def value(self) -> str:
        """The checksum as eight hex digits. Raises RuntimeError if the parts do not tile the file exactly."""
        end, crc = self._starts.get(0, (0, 0))
        if self.size and (end != self.size or len(self._starts) > 1):
            parts = ", ".join(f"{start} to {end}" for start, (end, _) in sorted(self._starts.items()))
            raise RuntimeError(f"parts of a file do not cover its {self.size} bytes: {parts}")
        return f"{crc:08x}"


def file_checksum(path: Path) -> str:
    """The CRC-32 of a file as eight hex digits."""
    crc = 0
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            crc = crc32(block, crc)
    return f"{crc:08x}"
