"""Weights of 8-bit floats: what they are in bfloat16, and what others are in them, in blocks of 128 x 128.

**Dequantizing** is the number times its scale in float32, rounded once to bfloat16: the arithmetic of DeepSeek's own
``inference/fp8_cast_bf16.py`` and ``kernel.py`` (``weight_dequant``), bit for bit. Scales may stand for a block, an
output, a matrix or the whole tensor.

**Quantizing**: the scale of a block is its largest magnitude / 448 in float32, as 448 is the largest number of E4M3. A
number becomes the nearest of E4M3 to x / scale, of two as near the even one. So do DeepSeek's kernel and slime's
``convert_hf_to_fp8.py``. A block of zeros has the scale 1, as transformers and verl give it.
"""

from __future__ import annotations

import itertools
import math
import tomllib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from reshard.formats.errors import NotationError, PlanError
from reshard.formats.notation.axes import parse
from reshard.formats.numbers import CODES, as_float32, round_to
from reshard.formats.quantization.companions import is_of_activations, shape_of
from reshard.formats.quantization.methods import method_of, quantization_settings, scheme_of

PACKED = "F8_E4M3"
DTYPE = "BF16"
BLOCK = 128
SETTINGS = {
    "quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [BLOCK, BLOCK],
}  # fmt: skip
_SCALES = {"F32", "BF16", "F16", "F8_E8M0"}
_SUFFIXES = ("_scale_inv", "_scale", ".scale")
_AT_ONCE = 1 << 18
"""Elements that are computed at a time: with fewer, threads wait for Python's lock."""


class Grid(NamedTuple):
    """The blocks of a weight that share a scale: sizes of each of its matrices, and of a block."""

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


def scaled_weights(
    config: Mapping[str, Any],
    tensors: Mapping[str, Stored],
    input_first: Callable[[str, tuple[int, ...]], Collection[bool]],
    is_cached: Callable[[str], bool],
) -> tuple[dict[str, Scaled], set[str]]:
    """The weights of a checkpoint that can be dequantized, by name, and the names of what is then of no use.

    ``input_first`` says of a weight, given its shape, whether its rule has the input first (both, if it may be either);
    ``is_cached`` whether the attention caches what it makes. Raises PlanError, which names the tensor, for a checkpoint
    with anything else that is quantized.
    """
    scheme, dtypes = scheme_of(config), {name: info.dtype for name, info in tensors.items()}
    scaled, gone = dict[str, Scaled](), set[str]()
    for name, info in tensors.items():
        companion = scheme.companion(name, info.dtype, dtypes)
        if companion is None:
            continue
        if companion.of_attention or (name.endswith("output_scale") and is_cached(companion.weight)):
            raise PlanError(
                f"tensor '{name}' is a scale of the attention or of its KV cache, which cannot be dequantized: a "
                "checkpoint without quantization has no place for it",
                "leave --dequantize out, or take the checkpoint that was quantized",
            )
        if is_of_activations(name):
            gone.add(name)
            continue
        weight = tensors.get(companion.weight)
        is_scale = info.dtype in _SCALES and name.endswith(_SUFFIXES) and companion.weight not in scaled
        if weight is None or weight is info or weight.dtype != PACKED or not is_scale:
            raise _refused(name, config, f"{info.dtype} beside {'none' if weight is None else weight.dtype}")
        ways = input_first(companion.weight, weight.shape)
        grid = _grid(weight.shape, info.shape, companion.patterns, ways)
        if grid is None:
            raise _refused(name, config, f"{list(info.shape)} for {list(weight.shape)}")
        scaled[companion.weight] = Scaled(name, grid)
        gone.add(name)
    for name, info in tensors.items():
        if info.dtype.startswith("F8") and name not in scaled and name not in gone:
            raise _refused(name, config, f"{info.dtype} without a scale")
    return scaled, gone


def _refused(name: str, config: Mapping[str, Any], what: str) -> PlanError:
    method = method_of(quantization_settings(config)) or "no method"
    return PlanError(
        f"tensor '{name}' ({what}; {method}) cannot be dequantized",
        f"--dequantize is for weights of 8-bit floats ({PACKED}) with one scale each",
    )


def _grid(
    weight: tuple[int, ...], scale: tuple[int, ...], patterns: Sequence[str], ways: Collection[bool]
) -> Grid | None:
    """Return the blocks that fit the shapes of a weight and its scales, by the patterns that scales may have; None if
    no pattern fits, or two fit with different blocks.

    ``ways`` says whether the weight may have its input first (True) or its output first (False).
    """
    *lead, rows, columns = (1,) * (2 - len(weight)) + weight
    sizes = {"rows": rows, "columns": columns} | {f"lead{place}": size for place, size in enumerate(lead)}
    grids = set[Grid]()
    for is_input_first, pattern in itertools.product(ways, patterns):
        axes = [*[*sizes][2:], "rows", *(["->"] if is_input_first else []), "columns"]
        rule = shape_of((pattern,), parse(" ".join(axes)), None)
        try:
            if rule is None or rule.sizes(sizes) != scale:
                continue
        except NotationError:  # by something else than rows and columns
            continue
        blocks = {axis: min(dim.step, sizes[axis]) for dim in rule.dims if (axis := dim.whole.axis)}
        if not blocks:
            every = max(1, math.prod(lead) * rows)
            grids.add(Grid(every, columns, every, columns))
        elif "lead" in pattern and [*blocks] == [axis for axis in axes if axis in blocks]:
            grids.add(Grid(rows, columns, blocks.get("rows", rows), blocks.get("columns", columns)))
    return grids.pop() if len(grids) == 1 else None


def _table() -> NDArray[np.float32]:
    """The 256 values of E4M3 (OCP 8-bit floating point, revision 1.0): bias 7, no infinities, one NaN a sign."""
    codes = np.arange(256)
    exponents, mantissas = (codes >> 3) & 15, codes & 7
    sizes = np.where(exponents > 0, np.ldexp(8.0 + mantissas, exponents - 10), np.ldexp(1.0 * mantissas, -9))
    values: NDArray[np.float32] = np.where(codes & 128, -sizes, sizes).astype(np.float32)
    values[codes & 127 == 127] = np.nan
    return values


E4M3_VALUES = _table()
"""By their bits."""


def scales_from(content: memoryview, dtype: str, grid: Grid) -> NDArray[np.float32]:
    """The scales of a weight as float32, those of each matrix below each other. Raises PlanError for other dtypes."""
    if dtype in CODES:
        scales = as_float32(np.frombuffer(content, CODES[dtype]), dtype)
    elif dtype == "F8_E8M0":
        codes = np.frombuffer(content, np.uint8)
        scales = np.ldexp(1.0, np.minimum(codes, 254).astype(np.int32) - 127).astype(np.float32)
        scales[codes == 255] = np.nan
    else:
        raise PlanError(f"scales of dtype {dtype} are not known")
    return scales.reshape(-1, grid.shape[1])


def dequantize(codes: NDArray[np.uint8], begin: int, grid: Grid, scales: NDArray[np.float32]) -> NDArray[np.uint16]:
    """The bits of bfloat16 of elements ``begin`` and following of a weight, in the order of its bytes.

    ``scales`` are those of the whole weight, as ``scales_from`` gives them.
    """
    rounded = np.empty(codes.size, np.uint16)
    with np.errstate(all="ignore"):
        for band, start, column, count, width in _bands(begin, begin + codes.size, grid):
            across = np.repeat(scales[band], grid.block_columns)[column : column + width]
            at = slice(start - begin, start - begin + count * width)
            numbers = _values(codes[at]).reshape(count, width)
            numbers *= across
            round_to(numbers.reshape(-1), "BF16", 0x7FC0, rounded[at])
    return rounded


def _values(codes: NDArray[np.uint8]) -> NDArray[np.float32]:
    """The numbers, by their bits; those that are no normal ones of E4M3 are looked up."""
    bits = codes.view(np.int8).astype("<i4").view("<u4")  # the sign is the first bit
    bits <<= np.uint32(23 - 3)
    bits &= np.uint32(0x87F00000)
    bits += np.uint32((127 - 7) << 23)
    values = bits.view("<f4")
    others = np.flatnonzero((codes + np.uint8(1)) & np.uint8(127) <= 8)
    values[others] = E4M3_VALUES[codes[others]]
    return values


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
            rows = min(grid.block_rows - within, grid.rows - inner, (end - begin) // width)
            count = max(1, min(rows, _AT_ONCE // width))
        yield matrix * per_matrix + band, begin, column, count, width
        begin += count * width


# ------------------------------------------------------------------------------------------------------- quantizing


class Error(NamedTuple):
    """Sums of squares: of what was lost, and of the numbers."""

    lost: float
    all: float


@cache
def what_stays() -> tuple[Mapping[str, str], Mapping[str, str]]:
    """Parts of the names of weights that stay, with what they are; the model types, each with what shows it."""
    document = tomllib.loads((Path(__file__).parent / "fp8_block.toml").read_text(encoding="utf-8"))
    return document["stay"], document["model_types"]


def scales_of(content: memoryview, dtype: str, columns: int) -> NDArray[np.float32]:
    """The scales of a row of blocks, given all ``columns`` of its rows; not finite where a number is not."""
    largest = np.maximum.reduceat(_magnitudes(_bits(content, dtype, columns)).max(axis=0), range(0, columns, BLOCK))
    with np.errstate(over="ignore", invalid="ignore"):
        values = as_float32(largest.view(CODES[dtype]), dtype)
    smallest = np.finfo(np.float32).smallest_normal  # a smaller scale would have few bits
    scales: NDArray[np.float32] = np.where(values == 0, 1, np.maximum(values / np.float32(448), smallest))
    return scales.astype(np.float32)


def _bits(content: memoryview, dtype: str, columns: int) -> NDArray[Any]:
    return np.frombuffer(content, f"<u{np.dtype(CODES[dtype]).itemsize}").reshape(-1, columns)


def _magnitudes(bits: NDArray[Any]) -> NDArray[Any]:
    """The bits without their signs: in the order of the magnitudes."""
    return bits & (np.iinfo(bits.dtype).max >> 1)


def codes_of(
    content: memoryview, dtype: str, columns: int, scales: NDArray[np.float32]
) -> tuple[NDArray[np.uint8], Error]:
    """The numbers of E4M3 of a row of blocks, given its finite scales, and what is lost."""
    raw, across = _bits(content, dtype, columns), np.repeat(scales, BLOCK)[:columns]
    codes, squares, lost, total = np.empty(raw.shape, np.uint8), across.astype(np.float64) ** 2, 0.0, 0.0
    for begin in range(0, len(raw), step := max(1, _AT_ONCE // columns)):
        bits, part = raw[begin : begin + step], codes[begin : begin + step]
        part[:] = bits >> (8 * bits.itemsize - 8)
        part &= 0x80
        numbers = as_float32(_magnitudes(bits).view(CODES[dtype]), dtype) / across
        own, rest = _nearest(numbers)
        part |= own
        rest -= numbers
        total += float(np.einsum("ij,ij->j", numbers, numbers) @ squares)
        lost += float(np.einsum("ij,ij->j", rest, rest) @ squares)
    return codes.reshape(-1), Error(lost, total)


def _nearest(sizes: NDArray[np.float32]) -> tuple[NDArray[np.uint8], NDArray[np.float32]]:
    """The numbers of E4M3 that are nearest to magnitudes, ties to even: their bits, and themselves.

    E4M3 has 3 bits of mantissa, and 2 ** -6 is its smallest normal number. A float32 so much larger than a value that
    no other bits of it are left is added, and taken away again.
    """
    larger = np.maximum(sizes, np.float32(2.0**-6)).view("<u4")
    larger &= np.uint32(0x7F800000)
    larger += np.uint32((23 - 3) << 23)
    rounded = sizes + larger.view("<f4")
    bits = larger >> np.uint32(23 - 3)
    bits += rounded.view("<u4")
    rounded -= larger.view("<f4")
    codes = bits.astype(np.uint8)  # the lowest alone count
    codes -= np.uint8((127 - 6 + 23 - 3) * 8 % 256)
    return codes, rounded
