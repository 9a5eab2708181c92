"""Reads pieces of weight files, local or remote.

The proof has its own code for this, to be independent of the engine.
"""

from __future__ import annotations

import math
import os
import re
import threading
from collections.abc import Mapping, Sequence
from functools import lru_cache
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from reshard.formats.errors import CheckpointError, PlanError
from reshard.formats.files.checksum import PartialSum, sum_part
from reshard.formats.files.safetensors import DTYPE_BITS, TensorInfo
from reshard.formats.quantization.fp8 import Error, Grid
from reshard.formats.store import FilePath, open_file, unreadable
from reshard.source.source import Source, SourceFile
from reshard.store.threads import ArrayCache
from reshard.system import cpu_count
from reshard.verify.bytes.blocks import Array

OPEN = 64
"""So many files stay open."""

BLOCK = 4 << 20
"""Remote files are read in blocks of so many bytes."""

ROOM = 1 << 30
"""Bytes of blocks of remote files that are kept: ranks share most blocks, and are compared at about the same time."""

ROOM_HERE = 64 << 20
"""Bytes of blocks of local files that are kept: only blocks that several chunks have bytes of."""

_WORKERS, _WORKERS_ELSEWHERE = 4, 16


class Files:
    """Files to read pieces of, from any thread; the files used last stay open.

    ``sums`` has the sums of the headers; what is compared is added to it, each byte once.
    """

    def __init__(self, *sources: Source, sums: Mapping[FilePath, PartialSum] = MappingProxyType({})) -> None:
        files = (file for source in sources for file in source.files.values())
        self._elsewhere = {file.path: file for file in files if file.remote is not None}
        self._file = lru_cache(OPEN)(open_file)
        self._blocks = ArrayCache(ROOM if self._elsewhere else ROOM_HERE)
        self._sums, self._summed = sums, set[tuple[FilePath, int]]()
        self._lock = threading.Lock()

    @property
    def workers(self) -> int:
        """The number of threads that should read: many if files are remote, because threads then wait for answers."""
        return _WORKERS_ELSEWHERE if self._elsewhere else min(_WORKERS, cpu_count())

    def read(self, path: FilePath, begin: int, nbytes: int) -> Array:
        """Bytes of a file. Raises CheckpointError if it cannot be read or is shorter, MismatchError if replaced."""
        if path in self._elsewhere:
            return self._in_blocks(path, begin, nbytes, 0, self._elsewhere[path].size)
        content, filled = np.empty(nbytes, np.uint8), 0
        try:
            file = self._file(path)
            while filled < nbytes:
                count = os.preadv(file.fileno(), [content[filled:].data], begin + filled)
                if not count:
                    raise CheckpointError(f"{path} became shorter while it was read")
                filled += count
        except OSError as error:
            raise unreadable(path, error) from None
        return content

    def read_once(self, path: FilePath, begin: int, nbytes: int) -> Array:
        """The same of bytes that are asked for once: they are added to the file's sum."""
        content = self.read(path, begin, nbytes)
        if path not in self._elsewhere:
            self._add(path, begin, content)
        return content

    def read_shared(self, info: TensorInfo, begin: int, nbytes: int) -> Array:
        """Bytes of a tensor from ``begin``, if nearby bytes are asked for too: they are read in blocks, and kept."""
        if info.file in self._elsewhere:
            return self.read(info.file, info.offset + begin, nbytes)
        return self._in_blocks(info.file, info.offset + begin, nbytes, info.offset, info.offset + info.nbytes)

    def _in_blocks(self, path: FilePath, begin: int, nbytes: int, first: int, end: int) -> Array:
        """Bytes of a file, read in blocks that follow each other from ``first`` to ``end``."""
        places = range(begin - (begin - first) % BLOCK, begin + nbytes, BLOCK)
        blocks = [self._block(path, place, min(BLOCK, end - place)) for place in places]
        whole = blocks[0] if len(blocks) == 1 else np.concatenate([np.empty(0, np.uint8), *blocks])
        return whole[(begin - first) % BLOCK :][:nbytes]

    def _block(self, path: FilePath, begin: int, nbytes: int) -> Array:
        """A block of a file. It is added to the file's sum once, however often it is read."""

        def read() -> Array:
            file, skip = self._elsewhere.get(path), 0
            if file is None:
                content = self.read(path, begin, nbytes)
            else:
                content, skip = self._fetched(file, begin), max(0, len(file.header or b"") - begin)
            with self._lock:
                is_first = (path, begin) not in self._summed
                self._summed.add((path, begin))
            if is_first:
                self._add(path, begin + skip, content[skip:])
            return content

        return self._blocks.get((path, begin), read)

    def _fetched(self, file: SourceFile, begin: int) -> Array:
        """A block of a file that lies elsewhere; the last is shorter. Raises CheckpointError, MismatchError."""
        from reshard.transforms.tensors import Arithmetic  # rarely needed

        if begin >= file.size:
            raise CheckpointError(f"{file.path} has no byte {begin}")
        assert file.remote is not None
        proof = Arithmetic(_scales, _bits, _block_scales, _codes, _sums)
        return np.frombuffer(proof.read(file.remote, begin, min(begin + BLOCK, file.size)), np.uint8)

    def _add(self, path: FilePath, begin: int, content: Array) -> None:
        if path in self._sums:
            part = sum_part(content, begin)
            with self._lock:
                self._sums[path].add(begin, content.size, part)


# ------------------------------------------------------------------------------------------------ computed originals


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
    columns = math.ceil(grid.columns / grid.block_columns)
    if dtype == "F8_E8M0":
        return np.array([2.0 ** (code - 127) if code < 255 else math.nan for code in bytes(content)]).reshape(
            -1, columns
        )
    with np.errstate(invalid="ignore"):  # a NaN of the checkpoint's own
        return _rows_of(content, dtype, columns).astype(np.float64)


def _bits(codes: NDArray[np.uint8], begin: int, grid: Grid, scales: Numbers) -> NDArray[np.uint16]:
    """The bits of bfloat16 of a range of elements."""
    rounded = np.empty(codes.size, np.uint16)
    of_column = np.arange(grid.columns) // grid.block_columns
    blocks = math.ceil(grid.rows / grid.block_rows)
    at = 0
    while at < codes.size:
        row, column = divmod(begin + at, grid.columns)
        end = min(codes.size, at + grid.columns - column)
        block = row // grid.rows * blocks + row % grid.rows // grid.block_rows
        with np.errstate(all="ignore"):
            product = _VALUES[codes[at:end]] * scales[block][of_column[column : column + end - at]]
            rounded[at:end] = nearest(product.astype(np.float32))
        at = end
    return rounded


def _rows_of(content: memoryview, dtype: str, columns: int) -> NDArray[np.float32]:
    """Rows of a weight that is to be quantized, or of scales."""
    codes = np.frombuffer(content, f"<u{DTYPE_BITS[dtype] // 8}")
    return cast(codes, dtype, "F32").view(np.float32).reshape(-1, columns)


def _block_scales(content: memoryview, dtype: str, columns: int) -> NDArray[np.float32]:
    """A block's largest magnitude in units of 448; of zeros 1."""
    values = _rows_of(content, dtype, columns)
    blocks = [np.abs(values[:, begin : begin + 128]).max() for begin in range(0, columns, 128)]
    return np.array([max(size / np.float32(448), 2.0**-126) if size else 1 for size in blocks], np.float32)


def _codes(
    content: memoryview, dtype: str, columns: int, scales: NDArray[np.float32]
) -> tuple[NDArray[np.uint8], Error]:
    """The nearest numbers of E4M3 to value / scale; of two as near, that with the even code."""
    values = _rows_of(content, dtype, columns)
    quotients = (values / scales[np.arange(columns) // 128]).astype(np.float64)
    sizes = np.minimum(np.abs(quotients), 448)
    above = np.searchsorted(_VALUES[:127], sizes)
    below = np.maximum(above - 1, 0)
    to_below, to_above = sizes - _VALUES[below], _VALUES[above] - sizes
    codes = np.where((to_below < to_above) | ((to_below == to_above) & (below % 2 == 0)), below, above)
    return (codes + 128 * np.signbit(quotients)).astype(np.uint8).reshape(-1), Error(0, 0)


def _sums(codes: Array, dtype: str, left: Numbers, right: Numbers) -> Array:
    """A matrix plus the product of two, one rank after the other."""
    total = np.zeros(codes.shape)
    with np.errstate(all="ignore"):
        for column, row in zip(left.T, right, strict=True):
            total += np.outer(column, row)
        total += widened(codes.view(f"<u{codes.itemsize}"), dtype, "F32").view("<f4")
        single = total.astype("<f4")
    return nearest(single) if dtype == "BF16" else cast(single.view("<u4"), "F32", dtype).view(codes.dtype)


def nearest(numbers: NDArray[np.float32]) -> NDArray[np.uint16]:
    """The bits of the nearest bfloat16; of two as near, of the one that ends in 0. NaN is 0x7FC0."""
    bits = numbers.view(np.uint32)
    high, low = (bits >> 16).astype(np.uint16), bits & 0xFFFF
    up = (low > 0x8000) | ((low == 0x8000) & (high % 2 == 1))
    codes: NDArray[np.uint16] = high + up.astype(np.uint16)
    codes[np.isnan(numbers)] = 0x7FC0
    return codes


# ------------------------------------------------------------------------------------------------------------- casts

_ROUNDED = {"F16": (10, -14, 0x7C00), "F32": (23, -126, 0x7F800000)}
"""Bits of the mantissa, the smallest exponent, and the bits of infinity."""


def cast(codes: Array, before: str, after: str) -> Array:
    """Elements in another dtype, by way of float32, to nearest even; a NaN is that of torch."""
    if before == after:
        return codes
    codes = np.atleast_1d(codes)
    with np.errstate(all="ignore"):
        wide = _rounded(codes.view("<f8"), "F32") if before == "F64" else widened(codes, before, "F32")
        if before == "F64":
            payload = codes >> np.uint64(29) & np.uint64(0x3FFFFF)
            quiet = (codes >> np.uint64(63) << np.uint64(31) | payload | np.uint64(0x7FC00000)).astype("<u4")
            wide = np.where(np.isnan(codes.view("<f8")), quiet, wide)
        elif before == "F16":
            wide = np.where(np.isnan(wide.view("<f4")), wide | np.uint32(0x400000), wide)
        values = wide.view("<f4")
        nan = np.isnan(values)
        if after == "BF16":
            return np.where(nan, np.uint16(0x7FC0 if before == "F16" else 0xFFFF), nearest(values))
        if after == "F16":
            quiet = wide >> np.uint32(16) & np.uint32(0x8000) | wide >> np.uint32(13) & np.uint32(0x1FF) | 0x7E00
            return np.where(nan, quiet.astype("<u2"), _rounded(values, after))
    return wide


def _rounded(values: Array, dtype: str) -> Array:
    """The bits of the nearest numbers of a dtype; of two as near, of the one that ends in 0."""
    bits, smallest, infinity = _ROUNDED[dtype]
    magnitude = np.abs(values.astype("<f8"))
    exponent = np.maximum(np.frexp(magnitude)[1] - 1, smallest)
    exponent[magnitude == 0] = smallest
    steps = np.rint(np.ldexp(magnitude, bits - exponent))  # of the last place; the last one carries over
    code = np.minimum((exponent - smallest) * 2.0**bits + steps, infinity)
    code = np.where(np.isfinite(values), code, infinity).astype("<u4")
    code |= np.signbit(values).astype("<u4") << np.uint32(DTYPE_BITS[dtype] - 1)
    return code.astype(f"<u{DTYPE_BITS[dtype] // 8}")


# ------------------------------------------------------------------------------------------------- dtypes, functions


def widened(ours: Array, before: str, after: str) -> Array:
    """Elements, exactly, in the same or the wider dtype in which they are stored. Raises PlanError."""
    if before == after:
        return ours
    if (before, after) == ("BF16", "F32"):
        return ours.astype("<u4") << np.uint32(16)
    if (before, after) == ("F16", "F32"):
        return np.ascontiguousarray(ours).view("<f2").astype("<f4").view("<u4")
    raise PlanError(f"a tensor of {before} is stored as {after}, which is not known to be exact")


def differing(ours: Array, theirs: Array, dtype: str, function: str | None) -> Array | None:
    """Return a mask of the elements that differ from the original's, to which ``function`` is applied; None if none
    differs.

    An F32 that a function computes, in float64, may be one unit in the last place off: the function itself need not be
    rounded correctly. Raises PlanError for an unknown function.
    """
    if function is not None:
        exact, stored = _applied(ours, dtype, function), np.ascontiguousarray(theirs).view("<f4")
        with np.errstate(over="ignore", invalid="ignore"):
            nearest = exact.astype("<f4")
            close = np.abs(stored.astype(np.float64) - exact) <= np.spacing(np.abs(nearest)).astype(np.float64)
        unequal = ~(close | (stored == nearest) | (np.isnan(stored) & np.isnan(nearest)))
    elif _in_words(ours) and _in_words(theirs) and (ours.view("<u8") == theirs.view("<u8")).all():
        return None
    else:
        unequal = ours != theirs
    return unequal if unequal.any() else None


def _in_words(array: Array) -> bool:
    """Whether the last dimension is contiguous and made of whole 8-byte words."""
    return bool(array.ndim and array.strides[-1] == array.itemsize and array.shape[-1] * array.itemsize % 8 == 0)


def expected(ours: Array, dtype: str, function: str | None) -> bytes:
    """The bytes that should be stored for an element."""
    value = ours if function is None else _applied(ours, dtype, function).astype("<f4")
    return bytes(np.ascontiguousarray(value).tobytes())


def _applied(ours: Array, dtype: str, function: str) -> Numbers:
    """The function of elements. Raises PlanError."""
    if function != "-exp" or dtype != "F32":
        raise PlanError(f"the function '{function}' in {dtype} is not known")
    with np.errstate(over="ignore"):
        return -np.exp(np.ascontiguousarray(ours).view("<f4").astype(np.float64))


def pattern(value: float, dtype: str) -> int:
    """The bits of a number. Raises PlanError for a dtype in which the formats have no constants but zero."""
    if not value:
        return 0
    if dtype not in {"F32", "F16", "BF16"}:
        raise PlanError(f"a constant of dtype {dtype} is not known")
    return int(cast(np.array([value], "<f4").view("<u4"), "F32", dtype)[0])


# ------------------------------------------------------------------------------------------------------- stated shapes


_SHAPE = re.compile(rb'("shape": \[)([^\]]*)\]')
_INTEGERS = {"I32": "<i4", "I64": "<i8"}


def stating(files: Files, info: TensorInfo, shape: Sequence[int]) -> Array:
    """The content of a tensor that states a weight's shape, with another shape in it, in as many bytes.

    A tensor of integers is the shape itself. In JSON the shape is a list, followed by spaces if the old one was longer.
    """
    content = files.read(info.file, info.offset, info.nbytes)
    if info.dtype in _INTEGERS:
        stated: Array = np.array(shape, _INTEGERS[info.dtype]).view(np.uint8)
        return stated
    text = ", ".join(map(str, shape)).encode()
    new = _SHAPE.sub(lambda match: match[1] + text.ljust(len(match[2])) + b"]", content.tobytes())
    return np.frombuffer(new, np.uint8)
