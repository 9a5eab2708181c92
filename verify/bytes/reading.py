"""Reads pieces of weight files, local or remote.

The proof has its own code for this, to be independent of the engine.
"""

from __future__ import annotations

import math
import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from functools import partial
from types import MappingProxyType
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray

from formats.errors import CheckpointError
from formats.files.checksum import PartialSum, sum_part
from formats.files.safetensors import TensorInfo
from formats.quantization.dequantizing import Grid
from formats.store import FilePath, open_file, unreadable
from reshard.source.source import Source, SourceFile
from reshard.store.remote import Read
from verify.bytes.views import Array

OPEN = 64
"""So many files stay open."""

BLOCK = 4 << 20
"""Remote files are read in blocks of so many bytes."""

ROOM = 1 << 30
"""Bytes of blocks of remote files that are kept: ranks share most blocks, and are compared at about the same time."""

ROOM_HERE = 64 << 20
"""Bytes of blocks of local files that are kept: only blocks that several chunks have bytes of."""

Summed = Callable[[FilePath, int, Array], None]
"""Takes the bytes of a file from this offset on."""

_WORKERS, _WORKERS_ELSEWHERE = 4, 16


class Files:
    """Files to read pieces of, from any thread; the files used last stay open.

    ``sums`` has the sums of the headers; blocks of remote files are added to it as they are fetched.
    """

    def __init__(self, *sources: Source, sums: Mapping[FilePath, PartialSum] = MappingProxyType({})) -> None:
        elsewhere = (file for source in sources for file in source.files.values() if file.remote is not None)
        self._elsewhere = {file.path: _Blocks(file, sums.get(file.path)) for file in elsewhere}
        self._open: OrderedDict[FilePath, BinaryIO] = OrderedDict()
        self._kept: OrderedDict[tuple[FilePath, int], tuple[Future[Array], int]] = OrderedDict()
        self._kept_bytes, self._room = 0, ROOM if self._elsewhere else ROOM_HERE
        self._summed: set[tuple[FilePath, int]] = set()
        self._lock = threading.Lock()

    @property
    def workers(self) -> int:
        """The number of threads that should read: many if files are remote, because threads then wait for answers."""
        return _WORKERS_ELSEWHERE if self._elsewhere else min(_WORKERS, os.cpu_count() or 1)

    def is_elsewhere(self, path: FilePath) -> bool:
        """Whether a file is remote, so that its bytes are added to its sum as they are fetched."""
        return path in self._elsewhere

    def read(self, path: FilePath, begin: int, nbytes: int) -> Array:
        """Bytes of a file. Raises CheckpointError, MismatchError."""
        found = np.empty(nbytes, np.uint8)
        self.fill(path, begin, found)
        return found

    def fill(self, path: FilePath, begin: int, buffer: Array) -> None:
        """Fill a buffer with bytes of a file.

        Raises CheckpointError if it cannot be read or has become shorter, MismatchError if it was replaced.
        """
        done = 0
        if path in self._elsewhere:
            while done < buffer.size:
                number, skip = divmod(begin + done, BLOCK)
                block = self._block(path, number, BLOCK, partial(self._elsewhere[path].read, number))
                piece = block[skip : skip + buffer.size - done]
                buffer[done : done + len(piece)] = piece
                done += len(piece)
            return
        try:
            file = self._file(path)
            while done < buffer.size:
                count = os.preadv(file.fileno(), [buffer[done:].data], begin + done)
                if not count:
                    raise CheckpointError(f"{path} became shorter while it was read")
                done += count
        except OSError as error:
            raise unreadable(path, error) from None

    def read_shared(self, info: TensorInfo, begin: int, nbytes: int, summed: Summed) -> Array:
        """Bytes of a tensor from ``begin``, if nearby bytes will be asked for too: they are read in blocks, and kept.

        Each block is passed to ``summed`` once.
        """
        if self.is_elsewhere(info.file):
            return self.read(info.file, info.offset + begin, nbytes)
        numbers = range(begin // BLOCK, (begin + nbytes - 1) // BLOCK + 1)
        blocks = [self._shared_block(info, number, summed) for number in numbers]
        whole = blocks[0] if len(blocks) == 1 else np.concatenate(blocks)
        skip = begin - numbers.start * BLOCK
        return whole[skip : skip + nbytes]

    def _shared_block(self, info: TensorInfo, number: int, summed: Summed) -> Array:
        offset, nbytes = info.offset + number * BLOCK, min(BLOCK, info.nbytes - number * BLOCK)

        def read() -> Array:
            found = self.read(info.file, offset, nbytes)
            with self._lock:
                is_first = (info.file, offset) not in self._summed
                self._summed.add((info.file, offset))
            if is_first:
                summed(info.file, offset, found)
            return found

        return self._block(info.file, offset, nbytes, read)

    def _block(self, path: FilePath, number: int, nbytes: int, read: Callable[[], Array]) -> Array:
        """A block of a file; who asks first reads it, the others wait."""
        key, mine = (path, number), Future[Array]()
        with self._lock:
            block, _ = self._kept.setdefault(key, (mine, nbytes))
            self._kept.move_to_end(key)
            self._kept_bytes += nbytes if block is mine else 0
            while self._kept_bytes > self._room and len(self._kept) > 1:
                self._kept_bytes -= self._kept.popitem(last=False)[1][1]
        if block is mine:
            try:
                mine.set_result(read())
            except BaseException as error:
                mine.set_exception(error)
        return block.result()

    def _file(self, path: FilePath) -> BinaryIO:
        with self._lock:
            if path not in self._open:
                self._open[path] = open_file(path)
                if len(self._open) > OPEN:
                    self._open.popitem(last=False)
            self._open.move_to_end(path)
            return self._open[path]


class _Blocks:
    """The blocks of a file that lies elsewhere; each is added to ``total`` once."""

    def __init__(self, file: SourceFile, total: PartialSum | None) -> None:
        self._file, self._total, self._lock = file, total, threading.Lock()
        self._summed: set[int] = set()
        self._opened: Read | None = None

    def read(self, number: int) -> Array:
        """A block; the last is shorter. Raises CheckpointError, MismatchError."""
        with self._lock:
            if self._opened is None:
                from reshard.transforms.tensors import Opened  # rarely needed

                assert self._file.remote is not None
                self._opened = Opened(_scales, _bits)(self._file.remote)  # with the arithmetic of the proof
        begin = number * BLOCK
        if begin >= self._file.size:
            raise CheckpointError(f"{self._file.path} has no byte {begin}")
        found = self._opened(begin, min(begin + BLOCK, self._file.size))
        if self._total is not None:
            self._sum(number, begin, found)
        return np.frombuffer(found, np.uint8)

    def _sum(self, number: int, begin: int, found: memoryview) -> None:
        skip = max(0, len(self._file.header or b"") - begin)
        part = sum_part(found[skip:], begin + skip)
        with self._lock:
            if self._total is not None and number not in self._summed:
                self._summed.add(number)
                self._total.add(begin + skip, max(0, len(found) - skip), part)


# ------------------------------------------------------------------------------------------------ dequantized originals


Numbers = NDArray[np.float64]


def _value(code: int) -> float:
    """A number of E4M3: a sign, four bits of exponent and three of mantissa; all ones are NaN."""
    sign, exponent, mantissa = (-1.0 if code >= 128 else 1.0), code % 128 // 8, code % 8
    if code % 128 == 127:
        return math.nan
    return sign * (mantissa * 2.0**-9 if exponent == 0 else (8 + mantissa) * 2.0 ** (exponent - 10))


_VALUES: Numbers = np.array([_value(code) for code in range(256)])


def _scales(content: memoryview, dtype: str, grid: Grid) -> Numbers:
    """The scales, one row of blocks below the other."""
    raw = np.frombuffer(content, {"F32": "<u4", "F8_E8M0": "u1"}.get(dtype, "<u2"))
    with np.errstate(invalid="ignore"):  # a NaN of the checkpoint's own
        if dtype == "F8_E8M0":
            found = np.array([2.0 ** (int(code) - 127) if code < 255 else math.nan for code in raw])
        elif dtype == "F16":
            found = raw.view(np.float16).astype(np.float64)
        else:
            found = (raw.astype("<u4") << (16 if dtype == "BF16" else 0)).view(np.float32).astype(np.float64)
    return found.reshape(-1, math.ceil(grid.columns / grid.block_columns))


def _bits(codes: NDArray[np.uint8], begin: int, grid: Grid, scales: Numbers) -> NDArray[np.uint16]:
    """The bits of bfloat16 of a range of elements."""
    found = np.empty(codes.size, np.uint16)
    of_column = np.arange(grid.columns) // grid.block_columns
    blocks = math.ceil(grid.rows / grid.block_rows)
    at = 0
    while at < codes.size:
        row, column = divmod(begin + at, grid.columns)
        end = min(codes.size, at + grid.columns - column)
        block = row // grid.rows * blocks + row % grid.rows // grid.block_rows
        with np.errstate(all="ignore"):
            product = _VALUES[codes[at:end]] * scales[block][of_column[column : column + end - at]]
            found[at:end] = nearest(product.astype(np.float32))
        at = end
    return found


def nearest(numbers: NDArray[np.float32]) -> NDArray[np.uint16]:
    """The bits of the nearest bfloat16; of two as near, of the one that ends in 0. NaN is 0x7FC0."""
    bits = numbers.view(np.uint32)
    high, low = (bits >> 16).astype(np.uint16), bits & 0xFFFF
    up = (low > 0x8000) | ((low == 0x8000) & (high % 2 == 1))
    found: NDArray[np.uint16] = high + up.astype(np.uint16)
    found[np.isnan(numbers)] = 0x7FC0
    return found
