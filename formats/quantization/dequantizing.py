"""Dequantizes weights of 8-bit floats: the number times its scale in float32, rounded once to bfloat16.

This is the arithmetic of DeepSeek's own ``inference/fp8_cast_bf16.py`` and ``kernel.py`` (``weight_dequant``), bit for
bit. Scales may stand for a block, an output, a matrix or the whole tensor.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from formats.errors import PlanError
from formats.quantization.companions import OF_ATTENTION, is_of_activations
from formats.quantization.methods import scheme_of
from formats.quantization.settings import method_of, quantization_settings

PACKED = "F8_E4M3"
DTYPE = "BF16"
_SCALES = {"F32", "BF16", "F16", "F8_E8M0"}
_SUFFIXES = ("_scale_inv", "_scale", ".scale")
_BLOCKS = re.compile(r"\bout(?:/(\d+))? in/(\d+)$")
_AT_ONCE = 1 << 15
"""Elements that are computed at a time: they stay in a processor's cache."""


class Grid(NamedTuple):
    """Where a weight's scales apply: ``rows`` x ``columns`` of each of its matrices, and those of a block."""

    rows: int
    columns: int
    block_rows: int
    block_columns: int

    @property
    def shape(self) -> tuple[int, int]:
        """The numbers of scales of one matrix."""
        return -(-self.rows // self.block_rows), -(-self.columns // self.block_columns)


class Stored(NamedTuple):
    """A tensor's dtype and shape on disk."""

    dtype: str
    shape: tuple[int, ...]


class Scaled(NamedTuple):
    """The name of a weight's scales, and where they apply."""

    scale: str
    grid: Grid


def scaled_weights(config: Mapping[str, Any], tensors: Mapping[str, Stored]) -> tuple[dict[str, Scaled], set[str]]:
    """The weights of a checkpoint that can be dequantized, by name, and the names of what is then of no use.

    Raises PlanError, which names the tensor, for a checkpoint with anything else that is quantized.
    """
    scheme, dtypes = scheme_of(config), {name: info.dtype for name, info in tensors.items()}
    found, gone = dict[str, Scaled](), set[str]()
    for name, info in tensors.items():
        companion = scheme.companion(name, info.dtype, dtypes)
        if companion is None:
            continue
        if is_of_activations(name) and not name.endswith(tuple(OF_ATTENTION)):
            gone.add(name)
            continue
        weight = tensors.get(companion.weight)
        is_scale = info.dtype in _SCALES and name.endswith(_SUFFIXES) and companion.weight not in found
        if weight is None or weight is info or weight.dtype != PACKED or not is_scale:
            raise _refused(name, config, f"{info.dtype} beside {'none' if weight is None else weight.dtype}")
        is_fused = not companion.weight.endswith(".weight")
        grid = _grid(weight.shape, info.shape, companion.patterns, is_fused=is_fused)
        if grid is None:
            raise _refused(name, config, f"{list(info.shape)} for {list(weight.shape)}")
        found[companion.weight] = Scaled(name, grid)
        gone.add(name)
    for name, info in tensors.items():
        if info.dtype.startswith("F8") and name not in found and name not in gone:
            raise _refused(name, config, f"{info.dtype} without a scale")
    return found, gone


def _refused(name: str, config: Mapping[str, Any], what: str) -> PlanError:
    method = method_of(quantization_settings(config)) or "no method"
    return PlanError(
        f"tensor '{name}' ({what}; {method}) cannot be dequantized",
        f"--dequantize is for weights of 8-bit floats ({PACKED}) with one scale each; docs/quantization.md",
    )


def _grid(weight: tuple[int, ...], scale: tuple[int, ...], patterns: Sequence[str], *, is_fused: bool) -> Grid | None:
    """Where the scales of a weight apply, by their shapes and the patterns that scales may have; None: it is not known.

    Fused experts may be stored input first, and blocks with them.
    """
    *outer, rows, columns = (1,) * (2 - len(weight)) + weight
    said = [(int(match[1] or 1), int(match[2])) for text in patterns if (match := _BLOCKS.search(text))]
    blocks = {way for block in said for way in ((block, block[::-1]) if is_fused else (block,))}
    lead = tuple(outer)
    fit = [block for block in blocks if scale == (*lead, *Grid(rows, columns, *block).shape)]
    if len(fit) > 1:
        return None
    for block in (*fit, (1, columns), (rows, columns), (rows, 1)):
        grid = Grid(rows, columns, *block)
        shapes = {(*lead, *grid.shape)}
        shapes |= {(*lead, rows)} if block == (1, columns) else set()
        shapes |= {lead} if block == (rows, columns) else set()
        if scale in shapes:
            return grid
    if math.prod(scale) != 1:
        return None
    every = max(1, math.prod(lead) * rows)
    return Grid(every, columns, every, columns)


def _table() -> NDArray[np.float32]:
    """The 256 values of E4M3 (OCP 8-bit floating point, revision 1.0): bias 7, no infinities, one NaN a sign."""
    codes = np.arange(256)
    exponents, mantissas = (codes >> 3) & 15, codes & 7
    sizes = np.where(exponents > 0, np.ldexp(8.0 + mantissas, exponents - 10), np.ldexp(1.0 * mantissas, -9))
    found: NDArray[np.float32] = np.where(codes & 128, -sizes, sizes).astype(np.float32)
    found[codes & 127 == 127] = np.nan
    return found


_VALUES = _table()


def scales_from(content: memoryview, dtype: str, grid: Grid) -> NDArray[np.float32]:
    """The scales of a weight as float32, those of each matrix below each other. Raises PlanError for other dtypes."""
    if dtype == "F32":
        found = np.frombuffer(content, "<f4").copy()
    elif dtype == "F16":
        found = np.frombuffer(content, "<f2").astype(np.float32)
    elif dtype == "BF16":
        found = (np.frombuffer(content, "<u2").astype(np.uint32) << 16).view(np.float32)
    elif dtype == "F8_E8M0":
        codes = np.frombuffer(content, np.uint8)
        found = np.ldexp(1.0, np.minimum(codes, 254).astype(np.int32) - 127).astype(np.float32)
        found[codes == 255] = np.nan
    else:
        raise PlanError(f"scales of dtype {dtype} are not known")
    return found.reshape(-1, grid.shape[1])


def dequantize(codes: NDArray[np.uint8], begin: int, grid: Grid, scales: NDArray[np.float32]) -> NDArray[np.uint16]:
    """The bits of bfloat16 of elements ``begin`` and following of a weight, in the order of its bytes.

    ``scales`` are those of the whole weight, as ``scales_from`` gives them.
    """
    found = np.empty(codes.size, np.uint16)
    is_finite = np.isfinite(scales).all()
    with np.errstate(all="ignore"):
        for band, first, column, count, width in _bands(begin, begin + codes.size, grid):
            across = np.repeat(scales[band], grid.block_columns)[column : column + width]
            at = slice(first - begin, first - begin + count * width)
            numbers = _VALUES[codes[at].reshape(count, width)]
            numbers *= across
            if not is_finite:
                numbers[np.isnan(numbers)] = np.nan  # one NaN, which rounding leaves a NaN
            bits = numbers.view(np.uint32)
            rounding = bits >> 16
            rounding &= 1
            rounding += 0x7FFF  # to the nearest, of two as near the even one
            bits += rounding
            bits >>= 16
            found[at].reshape(count, width)[...] = bits
    return found


def _bands(begin: int, end: int, grid: Grid) -> Iterator[tuple[int, int, int, int, int]]:
    """Cut a range of elements into rectangles of one row of scales each.

    Yields the row of scales, the first element, its column, and the numbers of rows and columns.
    """
    per_matrix = grid.shape[0]
    while begin < end:
        row, column = divmod(begin, grid.columns)
        matrix, inner = divmod(row, grid.rows)
        band, within = divmod(inner, grid.block_rows)
        count, width = 1, min(grid.columns - column, end - begin)
        if column == 0 and width == grid.columns:
            left = min(grid.block_rows - within, grid.rows - inner, (end - begin) // width)
            count = max(1, min(left, _AT_ONCE // width))
        yield matrix * per_matrix + band, begin, column, count, width
        begin += count * width
