"""A checksum of files whose parts are read or written in any order, by any process, as fast as memory is read.

The file, padded with zeros, is a sequence of little-endian 64-bit words. They are summed, modulo 2^64, in 1021
columns: word i goes to column i mod 1021. The checksum is the BLAKE2b (8 bytes, as hex digits) of these sums and of the
number of bytes, each as a little-endian 64-bit word.

Sums of parts add up in any order, so that each part is summed while it is in the cache, and numpy does it several times
faster than zlib a CRC-32. Whatever changes within 8168 bytes changes it. Changes further apart can only cancel where
they are opposite and a multiple of 1021 words apart: a prime, so that what is moved by a few rows, heads, experts or
pages of a disk is seen, and two rows that are exchanged are not if they are 1021 rows apart. It is against accidents,
not against forgery.

A ``Stamp`` tells one state of a file from another without reading it.
"""

from __future__ import annotations

import base64
import hashlib
import platform
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache, partial
from hashlib import blake2b
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from reshard.formats.documents import LARGEST, whole
from reshard.formats.errors import MismatchError
from reshard.formats.hub_cache import etag_of
from reshard.formats.store import FilePath, StoredPath, local_path, name_in, open_file, unreadable, walk

WIDTH = 1021
WORD = 8
PIECE = 4 << 20
"""Bytes that are best summed at a time: they stay in a processor's cache for whoever uses them next."""

Words = NDArray[np.uint64]


@dataclass(frozen=True, slots=True)
class ColumnSums:
    """The sums of a part of a file in columns, of which the first is that of the word in which the part begins.

    A part of fewer words than there are columns has as many columns as words.
    """

    phase: int
    """The byte of a word with which the part begins."""
    columns: Words

    def fits(self, offset: int) -> bool:
        """Whether the sums stay valid if the bytes lie at another offset."""
        return offset % WORD == self.phase


def sum_part(data: memoryview | bytes | NDArray[np.uint8], offset: int) -> ColumnSums:
    """Sum a part of a file that begins at ``offset`` bytes of it (only ``offset`` modulo 8 matters)."""
    phase = offset % WORD
    raw = np.frombuffer(data, dtype=np.uint8)
    if phase or raw.size % WORD:
        raw = np.frombuffer(b"".join((bytes(phase), raw.data, bytes(-(phase + raw.size) % WORD))), dtype=np.uint8)
    words = raw.view("<u8")
    if words.size < WIDTH:
        return ColumnSums(phase, words.astype(np.uint64))  # a copy, as the data may change
    whole = words.size // WIDTH * WIDTH
    columns: Words = np.add.reduce(words[:whole].reshape(-1, WIDTH), axis=0, dtype=np.uint64)
    columns[: words.size - whole] += words[whole:]
    return ColumnSums(phase, columns)


class PartialSum:
    """The checksum of a file of ``size`` bytes as its parts come in."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.seen = 0
        self._columns = np.zeros(WIDTH, dtype=np.uint64)

    def add(self, offset: int, length: int, part: ColumnSums | None) -> None:
        """Take in a part, or (None) only count its bytes."""
        self.seen += length
        if part is None:
            return
        assert part.fits(offset)
        first = offset // WORD % WIDTH
        last = first + part.columns.size
        if last <= WIDTH:
            self._columns[first:last] += part.columns
        else:
            self._columns[first:] += part.columns[: WIDTH - first]
            self._columns[: last - WIDTH] += part.columns[WIDTH - first :]

    def merge(self, other: PartialSum) -> None:
        """Take in all that another sum of the same file has."""
        self.seen += other.seen
        self._columns += other._columns

    def equals(self, other: PartialSum) -> bool:
        """Whether both have summed the same number of bytes, with equal sums."""
        return self.seen == other.seen and bool((self._columns == other._columns).all())

    def to_text(self) -> str:
        """The sums as a line of text."""
        return base64.b64encode(np.append(self._columns, np.uint64(self.seen)).astype("<u8").tobytes()).decode()

    @classmethod
    def from_text(cls, text: str, size: int) -> PartialSum:
        """The inverse of ``to_text``, for a file of ``size`` bytes. Raises ValueError."""
        words = np.frombuffer(base64.b64decode(text, validate=True), dtype="<u8")
        if words.size != WIDTH + 1:
            raise ValueError(f"{words.size} words are no sum")
        partial = cls(size)
        partial._columns, partial.seen = words[:WIDTH].astype(np.uint64), int(words[WIDTH])
        return partial

    @property
    def is_complete(self) -> bool:
        """Whether all bytes have been summed."""
        return self.seen == self.size

    def value(self) -> str:
        """The checksum as 16 hex digits. Raises RuntimeError unless the parts that came in have the file's size."""
        if not self.is_complete:
            raise RuntimeError(f"{self.seen} of the {self.size} bytes of a file were summed")
        return self.digest()

    def digest(self) -> str:
        """16 hex digits of the parts that have come in: of all parts, the checksum."""
        words = np.append(self._columns, np.uint64(self.seen))
        return blake2b(words.astype("<u8").tobytes(), digest_size=8).hexdigest()


def checksum(pieces: Iterable[memoryview | bytes | NDArray[np.uint8]]) -> str:
    """The checksum of a file of these pieces, in order."""
    total = PartialSum(0)
    for piece in pieces:
        total.add(total.seen, len(piece), sum_part(piece, total.seen))
    return total.digest()


def file_checksum(path: FilePath) -> str:
    """The checksum of a file."""
    with open_file(path) as file:
        return checksum(iter(partial(file.read, PIECE), b""))


_NUMBER = {"read": whole(-LARGEST, 2**64)}


@dataclass(frozen=True)
class Stamp:
    """The state of a file."""

    name: str
    size: int
    """Bytes."""
    mtime_ns: int = field(metadata=_NUMBER)
    """The time when its content last changed."""
    ctime_ns: int = field(metadata=_NUMBER)
    """The time when its content or inode last changed."""
    inode: int = field(metadata=_NUMBER)
    """The number on ``host``."""
    host: str
    content: str | None = None
    """A name of the content itself, where it is known: the Hub's etag, a recorded checksum."""
    made_of: str | None = None
    """The inodes, on ``host``, of the files that a computed file is made of."""

    def is_same(self, other: Stamp) -> bool:
        """Whether two files have equal content, as far as stamps can tell: by the content's name, or else by size, time
        and (on one machine) inode.
        """
        if (self.name, self.size) != (other.name, other.size):
            return False
        if self.content is not None and other.content is not None:
            return self.content == other.content and (self.host != other.host or self.made_of == other.made_of)
        return self.mtime_ns == other.mtime_ns and (self.host != other.host or self.inode == other.inode)

    @property
    def open_state(self) -> tuple[Any, ...]:
        """Size, time and inode: a write to an open file, or its replacement, changes one of them."""
        return self.size, self.mtime_ns, self.inode

    @property
    def closed_state(self) -> tuple[Any, ...]:
        """The values that stay equal on one machine until somebody touches the file. They include the inode's change
        time: an inode number is used again for a new file, and the time of the content can be set by anybody.
        """
        return self.name, self.size, self.mtime_ns, self.ctime_ns, self.inode, self.content, self.made_of

    @property
    def anywhere(self) -> list[Any]:
        """Name, size, and the content's name or time: equal for copies of the file on several machines that share the
        work.
        """
        return [self.name, self.size, self.content or self.mtime_ns]


def stamp_of(path: FilePath, name: str) -> Stamp:
    """The state of a file now; ``name`` is what it is called relative to its folder. Raises CheckpointError."""
    local = local_path(path)
    try:
        if local is None:
            stored = cast(StoredPath, path).stat()
            return Stamp(name, stored.st_size, 0, 0, 0, _host(), f"etag:{stored.version}", stored.made_of)
        stat = local.stat()
    except OSError as error:
        raise unreadable(path, error) from error
    etag = etag_of(local, name, stat.st_mtime)
    content = f"etag:{etag}" if etag else None
    return Stamp(name, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino, _host(), content)


def check_unchanged(stamps: Mapping[FilePath, Stamp]) -> None:
    """Raise MismatchError if a file is no longer in the state that it had before it was read."""
    for path, stamp in stamps.items():
        if not path.exists() or stamp_of(path, stamp.name).open_state != stamp.open_state:
            hint = "run the command again when nobody writes there"
            raise MismatchError(f"{path} was changed while it was read", hint)


def stamps_in(folder: FilePath) -> dict[FilePath, Stamp]:
    """The state of each file in a folder and its direct subfolders; to be taken before any of them is read."""
    states: dict[FilePath, Stamp] = {}
    for root, folders, names in walk(folder):
        folders[:] = [name for name in folders if root == folder and not name.startswith(".")]
        paths = (root / name for name in names)
        states |= {file: stamp_of(file, name_in(file, folder)) for file in paths if file.is_file()}
    return states


def stamps_of(files: Iterable[FilePath], folder: FilePath, stamps: Mapping[FilePath, Stamp]) -> dict[FilePath, Stamp]:
    """The states of these files of a folder: those that are known, and else what they are now."""
    return {file: stamps.get(file) or stamp_of(file, name_in(file, folder)) for file in files}


@lru_cache(maxsize=1)
def _host() -> str:
    return hashlib.sha256(platform.node().encode()).hexdigest()[:8]
