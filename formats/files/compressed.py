"""A tensor's changed bytes, compressed: as slime's trainer writes them, and its SGLang reads them (slime#2089).

A change is one zstd frame. ``xor``: each byte of the tensor before, XOR the byte after. ``overwrite``: the number of
changed bytes, their places in ascending order (each a little-endian U32), then their new values. A frame can only be
read from its beginning on: ``Changes`` keeps what was read last.
"""

from __future__ import annotations

import threading
import zlib
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from functools import reduce
from importlib import import_module
from typing import IO, TYPE_CHECKING, NamedTuple, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from reshard.formats.errors import CheckpointError, require
from reshard.formats.store import Range, RangeFile

if TYPE_CHECKING:
    import zstandard

XOR, OVERWRITE = "xor", "overwrite"
LEVEL = 1
STEP = 1 << 20
"""Bytes of a tensor that are changed at a time: a block."""

_WINDOW = 8 << 20
"""A frame may look back so many bytes, as zstd's own specification has decoders support: so much memory it takes."""
_BLOCKS, _READERS = 64, 16
"""So many blocks, and readers of frames that are at some block of theirs, are kept for the next ranges."""
_PLACE = 4

Bytes = NDArray[np.uint8]
K = TypeVar("K")
V = TypeVar("V")
ReadRange = Callable[[int, int], bytes | memoryview]


class Frame(NamedTuple):
    """A change of a tensor of ``nbytes`` bytes: its frame is bytes ``begin`` to ``end`` of a file."""

    name: str
    how: str
    begin: int
    end: int
    nbytes: int


def require_zstd() -> None:
    """Raise PlanError if the package that compresses is not installed."""
    require("a compressed delta", "zstandard")


def compressor(nbytes: int) -> zstandard.ZstdCompressionObj:
    """Return a compressor for one frame of ``nbytes`` bytes."""
    import zstandard

    return zstandard.ZstdCompressor(level=LEVEL).compressobj(size=nbytes)


class FrameReader:
    """The content of a frame, from its beginning on."""

    def __init__(self, frame: Frame, read_range: ReadRange) -> None:
        import zstandard

        def stored(ranges: Sequence[Range]) -> Sequence[bytes]:
            return [bytes(read_range(frame.begin + begin, frame.begin + end)) for begin, end in ranges]

        file = cast(IO[bytes], RangeFile(stored, frame.end - frame.begin))
        decompressor, self._error = zstandard.ZstdDecompressor(max_window_size=_WINDOW), zstandard.ZstdError
        self._name, self._stream = frame.name, decompressor.stream_reader(file, read_size=STEP)

    def take(self, count: int, *, is_last: bool = False) -> Bytes:
        """The next bytes of the content. Raises CheckpointError if there are fewer or, after the last ones, more: a
        frame of a few bytes may hold terabytes.
        """
        try:
            content, is_longer = self._stream.read(count), is_last and self._stream.read(1)
        except self._error as error:
            raise self.refused(f"cannot be decompressed: {error}") from None
        if len(content) != count or is_longer:
            raise self.refused("has more bytes than its tensor's change" if is_longer else "has too few bytes")
        return np.frombuffer(content, np.uint8)

    def refused(self, why: str) -> CheckpointError:
        """The error for this frame."""
        return CheckpointError(f"the compressed change of tensor '{self._name}' {why}", "write the delta again")


class Block(NamedTuple):
    """A change of ``STEP`` bytes of a tensor: values to XOR into it, or values and their places in it."""

    values: Bytes
    places: NDArray[np.int64] | None

    def change(self, begin: int, content: Bytes) -> None:
        """Change the tensor's bytes that begin with byte ``begin`` of the block."""
        if self.places is None:
            content ^= self.values[begin : begin + content.size]
            return
        low, high = np.searchsorted(self.places, (begin, begin + content.size))
        content[self.places[low:high] - begin] = self.values[low:high]


def _xor_blocks(frame: Frame, read_range: ReadRange) -> Iterator[Block]:
    """The blocks of a frame, one after the other."""
    content = FrameReader(frame, read_range)
    for begin in range(0, frame.nbytes, STEP):
        count = min(STEP, frame.nbytes - begin)
        yield Block(content.take(count, is_last=begin + count == frame.nbytes), None)


def _overwrite_blocks(frame: Frame, read_range: ReadRange) -> Iterator[Block]:
    """The blocks of a frame, one after the other: the places and the values are read side by side."""
    places, values = FrameReader(frame, read_range), FrameReader(frame, read_range)
    remaining = int(places.take(_PLACE).view("<u4")[0])
    if remaining > frame.nbytes:
        raise places.refused(f"has {remaining} places for {frame.nbytes} bytes")
    for begin in range(0, before := _PLACE * (1 + remaining), STEP):
        values.take(min(STEP, before - begin))
    ahead, last = np.zeros(0, "<u4"), -1
    for begin in range(0, frame.nbytes, STEP):
        end, inside = min(begin + STEP, frame.nbytes), [np.zeros(0, np.int64)]
        while ahead.size or remaining:
            if not ahead.size:
                count = min(remaining, STEP // _PLACE)
                ahead, remaining = places.take(_PLACE * count).view("<u4"), remaining - count
                if int(ahead[0]) <= last or (ahead[1:] <= ahead[:-1]).any():
                    raise places.refused("is not in ascending order")
                last = int(ahead[-1])
            count = int(np.searchsorted(ahead, end))
            inside.append(ahead[:count].astype(np.int64) - begin)
            ahead = ahead[count:]
            if ahead.size:
                break
        positions = np.concatenate(inside)
        if (is_last := end == frame.nbytes) and (remaining or ahead.size):
            raise places.refused(f"has a place behind its {frame.nbytes} bytes")
        yield Block(values.take(positions.size, is_last=is_last), positions)


Key = tuple[Hashable, Frame]


class Changes:
    """Changes ranges of tensors, from any thread. Each block is decompressed once if all ranges near it are asked for
    at nearly the same time, in whatever order.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._locks = [threading.Lock() for _ in range(_READERS)]
        self._readers: OrderedDict[Key, tuple[int, Iterator[Block]]] = OrderedDict()
        self._blocks: OrderedDict[tuple[Key, int], Block] = OrderedDict()

    def change(self, file: Hashable, frame: Frame, read_range: ReadRange, begin: int, content: Bytes) -> None:
        """Change ``content``, a tensor's bytes from ``begin`` on; ``file`` says which file, in which state, is read.

        Raises CheckpointError for a damaged frame.
        """
        end = begin + content.size
        for number in range(begin // STEP, -(-end // STEP)):
            first, last = max(begin, number * STEP), min(end, (number + 1) * STEP)
            block = self._block((file, frame), read_range, number)
            block.change(first - number * STEP, content[first - begin : last - begin])

    def _block(self, key: Key, read_range: ReadRange, number: int) -> Block:
        with self._locks[hash(key) % len(self._locks)]:
            with self._lock:
                if (known := self._blocks.get((key, number))) is not None:
                    return known
                first, blocks = self._readers.pop(key, (number + 1, iter(())))  # one that fails is not used again
            if first > number:
                first, blocks = 0, (_xor_blocks if key[1].how == XOR else _overwrite_blocks)(key[1], read_range)
            for at in range(first, number + 1):
                block = next(blocks)
                self._keep(self._blocks, (key, at), block, _BLOCKS)
            self._keep(self._readers, key, (number + 1, blocks), _READERS)
            return block

    def _keep(self, cache: OrderedDict[K, V], key: K, value: V, most: int) -> None:
        with self._lock:
            cache[key] = value
            while len(cache) > most:
                cache.popitem(last=False)


# --------------------------------------------------------------------------------------------------------- checksums

ADLER, XXH, BLAKE = "adler32", "xxh3-128", "blake3"


def checksum_of(kind: str, pieces: Iterable[bytes | memoryview]) -> str:
    """The checksum, of a kind, of what the pieces are end to end. Raises PlanError if a package is not installed."""
    if kind == ADLER:
        return f"{reduce(lambda value, piece: zlib.adler32(piece, value), pieces, 1):08x}"
    package, name = ("xxhash", "xxh3_128") if kind == XXH else ("blake3", "blake3")
    require(f"a delta with checksums of {kind}", package)
    digest = getattr(import_module(package), name)()
    for piece in pieces:
        digest.update(piece)
    return str(digest.hexdigest())
