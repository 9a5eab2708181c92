"""The directory of a zip archive that is a range of a file, as torch writes them; the data is not read.

Source: PKWARE's APPNOTE.TXT 6.3.10, 4.3 to 4.5.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import NamedTuple

Read = Callable[[int, int], bytes]
"""Reads so many bytes of the archive from an offset on; fewer, where it ends."""

MAX_DIRECTORY = 256 << 20
"""Bytes of a directory; an entry has some 70."""
_END, _END_64, _LOCATOR_64, _CENTRAL, _LOCAL = b"PK\5\6", b"PK\6\6", b"PK\6\7", b"PK\1\2", b"PK\3\4"
_MOST_32, _MOST_16 = 0xFFFFFFFF, 0xFFFF


class Entry(NamedTuple):
    """An entry: the offset of its header in the archive, the bytes of its data, and whether these are as they are."""

    name: str
    at: int
    size: int
    is_plain: bool


def read_directory(read_range: Read, size: int) -> dict[str, Entry]:
    """The entries of an archive of ``size`` bytes, by name, in their order.

    Raises ValueError with the reason if there is none, or if it contradicts itself.
    """
    count, begin, length = _find_directory(read_range, size)
    if not 0 <= begin <= begin + length <= size or length > MAX_DIRECTORY:
        raise ValueError(f"its directory of {length:,} bytes from byte {begin:,} on is not in its {size:,} bytes")
    content, place = read_range(begin, length), 0
    entries: dict[str, Entry] = {}
    for _ in range(count):
        fixed = content[place : place + 46]
        if len(fixed) < 46 or fixed[:4] != _CENTRAL:
            raise ValueError("its directory ends before its last entry")
        flags, method = struct.unpack("<HH", fixed[8:12])
        packed, plain, name, extra, comment = struct.unpack("<IIHHH", fixed[20:34])
        (at,) = struct.unpack("<I", fixed[42:46])
        behind = place + 46 + name
        key = content[place + 46 : behind].decode("utf-8", "surrogateescape")
        if _MOST_32 in (packed, plain, at):
            plain, packed, at = _in_64_bits(content[behind : behind + extra], plain, packed, at)
        if key in entries:
            raise ValueError("a record of the zip archive appears twice")
        entries[key] = Entry(key, at, plain, method == 0 and not flags & 1 and packed == plain)
        place = behind + extra + comment
    if place > length:
        raise ValueError("its directory ends within an entry")
    return entries


def data_offset(read_range: Read, entry: Entry) -> int | None:
    """The offset of an entry's data in the archive; None if no entry begins where the directory says."""
    local = read_range(entry.at, 30)
    if len(local) < 30 or local[:4] != _LOCAL:
        return None
    name, extra = struct.unpack("<HH", local[26:30])
    return int(entry.at + 30 + name + extra)


def _find_directory(read_range: Read, size: int) -> tuple[int, int, int]:
    """The number of entries, and offset and length (bytes) of the directory."""
    end = size - 22
    tail = read_range(max(0, end), 22)
    if tail[:4] != _END or tail[20:] != b"\0\0":  # a comment may stand behind it
        start = max(0, size - 22 - _MOST_16)
        tail = read_range(start, size - start)
        place = tail.rfind(_END)
        if place < 0 or len(tail) < place + 22:
            raise ValueError("its directory is missing")
        end, tail = start + place, tail[place : place + 22]
    count, length, begin = struct.unpack("<HII", tail[10:20])
    locator = read_range(end - 20, 20) if end >= 20 else b""
    if locator[:4] != _LOCATOR_64:
        return count, begin, length
    (offset,) = struct.unpack("<Q", locator[8:16])
    record = read_range(min(offset, size), 56)
    if len(record) < 56 or record[:4] != _END_64:
        raise ValueError("its directory of 64 bits is missing")
    count, length, begin = struct.unpack("<QQQ", record[32:56])
    return count, begin, length


def _in_64_bits(extra: bytes, *values: int) -> tuple[int, ...]:
    """The values, of which those that 32 bits do not hold stand in an extra field."""
    place = 0
    while place + 4 <= len(extra):
        kind, length = struct.unpack("<HH", extra[place : place + 4])
        if kind == 1:
            numbers = iter(struct.unpack(f"<{length // 8}Q", extra[place + 4 : place + 4 + length // 8 * 8]))
            return tuple(next(numbers, value) if value == _MOST_32 else value for value in values)
        place += 4 + length
    return values
