"""A tensor's changed bytes, compressed: as slime's trainer writes them, and its SGLang reads them (slime#2089).

A change is one zstd frame. ``xor``: each byte of the tensor before, XOR the byte after. ``overwrite``: the number of
changed bytes, their places in ascending order (each a little-endian U32), then their new values. A frame can only be
read from its beginning on: ``Changes`` keeps the readers that are further on.
"""

from __future__ import annotations

import threading
import zlib
from collections.abc import Callable, Iterator
from typing import IO, TYPE_CHECKING, NamedTuple, Protocol, cast

import numpy as np
from numpy.typing import NDArray

from formats.errors import CheckpointError
from formats.extras import need

if TYPE_CHECKING:
    import zstandard

XOR, OVERWRITE = "xor", "overwrite"
LEVEL = 1
STEP = 1 << 20
"""Bytes that are taken from a frame at a time."""

_WINDOW = 8 << 20
"""A frame may look back so many bytes, as zstd's own specification has decoders support: so much memory it takes."""
_KEPT = 16
"""So many readers of frames, which are at some place of theirs, are kept for the next ranges."""
_PLACE = 4

Bytes = NDArray[np.uint8]
ReadRange = Callable[[int, int], bytes | memoryview]


class Frame(NamedTuple):
    """A change of a tensor of ``nbytes`` bytes: its frame is bytes ``begin`` to ``end`` of a file."""

    name: str
    how: str
    begin: int
    end: int
    nbytes: int


def need_zstd() -> None:
    """Raise PlanError if the package that compresses is not installed."""
    need("a compressed delta", "zstandard", extra="compress")


def compressor(nbytes: int) -> zstandard.ZstdCompressionObj:
    """What compresses a frame of so many bytes."""
    import zstandard

    return zstandard.ZstdCompressor(level=LEVEL).compressobj(size=nbytes)


class _Frame:
    """The content of a frame, from its beginning on."""

    def __init__(self, frame: Frame, read: ReadRange) -> None:
        import zstandard

        self._name, self._at, self._end, self._read = frame.name, frame.begin, frame.end, read
        decompressor, self._error = zstandard.ZstdDecompressor(max_window_size=_WINDOW), zstandard.ZstdError
        self._stream = decompressor.stream_reader(cast(IO[bytes], self), read_size=STEP)

    def read(self, size: int) -> bytes:
        """The next bytes of the frame as it is stored: the decompressor asks for them."""
        begin, self._at = self._at, min(self._at + size, self._end)
        return bytes(self._read(begin, self._at)) if self._at > begin else b""

    def take(self, count: int) -> Bytes:
        """The next bytes of the content. Raises CheckpointError if there are fewer."""
        try:
            found = self._stream.read(count)
        except self._error as error:
            raise self.refused(f"cannot be decompressed: {error}") from None
        if len(found) != count:
            raise self.refused("has too few bytes")
        return np.frombuffer(found, np.uint8)

    def skip(self, count: int) -> None:
        """Pass over bytes of the content."""
        for begin in range(0, count, STEP):
            self.take(min(STEP, count - begin))

    def check_ended(self) -> None:
        """Raise CheckpointError if there is more: a frame of a few bytes may hold terabytes."""
        try:
            more = self._stream.read(1)
        except self._error as error:
            raise self.refused(f"cannot be decompressed: {error}") from None
        if more:
            raise self.refused("has more bytes than its tensor's change")

    def refused(self, why: str) -> CheckpointError:
        """The error for this frame."""
        return CheckpointError(f"the compressed change of tensor '{self._name}' {why}", "write the delta again")


class _Forward(Protocol):
    """Changes ranges of a tensor, each behind the last one."""

    at: int

    def change(self, begin: int, content: Bytes) -> None:
        """Change ``content``, the tensor's bytes from ``begin`` on."""


class _Xor:
    def __init__(self, frame: Frame, read: ReadRange) -> None:
        self.at, self._nbytes, self._frame = 0, frame.nbytes, _Frame(frame, read)

    def change(self, begin: int, content: Bytes) -> None:
        self._frame.skip(begin - self.at)
        for first in range(0, content.size, STEP):
            part = content[first : first + STEP]
            part ^= self._frame.take(part.size)
        self.at = begin + content.size
        if self.at == self._nbytes:
            self._frame.check_ended()


class _Overwrite:
    def __init__(self, frame: Frame, read: ReadRange) -> None:
        self.at, self._nbytes = 0, frame.nbytes
        self._places, self._values = _Frame(frame, read), _Frame(frame, read)
        self._left = int(self._places.take(_PLACE).view("<u4")[0])
        self._values.skip(_PLACE * (1 + self._left))
        self._next, self._last = np.zeros(0, "<u4"), -1

    def change(self, begin: int, content: Bytes) -> None:
        end = begin + content.size
        for places, values in self._until(end):
            inside = places >= begin
            content[places[inside] - begin] = values[inside]
        self.at = end
        if end == self._nbytes:
            if self._left or self._next.size:
                raise self._places.refused(f"has a place behind its {self._nbytes} bytes")
            self._values.check_ended()

    def _until(self, end: int) -> Iterator[tuple[NDArray[np.int64], Bytes]]:
        """The changed bytes before ``end`` that were not yet passed: places and values."""
        while self._left or self._next.size:
            if not self._next.size:
                count = min(self._left, STEP // _PLACE)
                self._next, self._left = self._places.take(_PLACE * count).view("<u4"), self._left - count
                if int(self._next[0]) <= self._last or (self._next[1:] <= self._next[:-1]).any():
                    raise self._places.refused("is not in ascending order")
                self._last = int(self._next[-1])
            count = int(np.searchsorted(self._next, end))
            yield self._next[:count].astype(np.int64), self._values.take(count)
            self._next = self._next[count:]
            if self._next.size:
                return


class Changes:
    """Changes ranges of tensors, in any order and from any thread; it is fast where they come one behind the other."""

    def __init__(self) -> None:
        self._lock, self._idle = threading.Lock(), list[tuple[Frame, _Forward]]()

    def change(self, frame: Frame, read: ReadRange, begin: int, content: Bytes) -> None:
        """Change ``content``, a tensor's bytes from ``begin`` on. Raises CheckpointError for a damaged frame."""
        reader = self._reader(frame, begin) or (_Xor if frame.how == XOR else _Overwrite)(frame, read)
        reader.change(begin, content)
        with self._lock:
            self._idle.append((frame, reader))
            del self._idle[:-_KEPT]

    def _reader(self, frame: Frame, begin: int) -> _Forward | None:
        """The reader of this frame that has come closest to a place, if one is before it."""
        with self._lock:
            found = [each for each in self._idle if each[0] == frame and each[1].at <= begin]
            if not found:
                return None
            best = max(found, key=lambda each: each[1].at)
            self._idle.remove(best)
            return best[1]


# --------------------------------------------------------------------------------------------------------- checksums


class Hasher(Protocol):
    """What computes a checksum from front to back."""

    def update(self, data: bytes | memoryview, /) -> object:
        """Take in the next bytes."""

    def hexdigest(self) -> str:
        """The checksum of all."""


class Adler32:
    """The checksum of zlib."""

    def __init__(self) -> None:
        self._value = 1

    def update(self, data: bytes | memoryview, /) -> None:
        """Take in the next bytes."""
        self._value = zlib.adler32(data, self._value)

    def hexdigest(self) -> str:
        """Eight hex digits."""
        return f"{self._value:08x}"


ADLER, XXH, BLAKE = "adler32", "xxh3-128", "blake3"


def hasher(kind: str) -> Hasher:
    """What computes checksums of a kind. Raises PlanError if a package is not installed."""
    if kind == XXH:
        need("a delta with checksums of xxh3-128", "xxhash", extra="compress")
        import xxhash

        return xxhash.xxh3_128()
    if kind == BLAKE:
        need("a delta with checksums of blake3", "blake3", extra="compress")
        import blake3

        found: Hasher = blake3.blake3()
        return found
    return Adler32()
