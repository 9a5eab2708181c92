"""Quantizes weights to 8-bit floats in blocks of 128 x 128: the arithmetic, and which weights stay.

The scale of a block is its largest magnitude / 448 in float32: 448 is the largest number of E4M3. A number becomes the
nearest of E4M3 to x / scale, of two as near the even one. So do DeepSeek's kernel and slime's ``convert_hf_to_fp8.py``.
A block of zeros has the scale 1, as transformers and verl give it.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from formats.numbers import CODES, as_float32
from formats.quantization.dequantizing import E4M3_VALUES

BLOCK = 128
SETTINGS = {
    "quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [BLOCK, BLOCK],
}  # fmt: skip
_AT_ONCE = 1 << 18
"""Elements that are computed at a time: with fewer, threads wait for Python's lock."""
_DROPPED = 18
"""Bits of a float32 that only tell whether it is above a number of E4M3, or halfway between two."""


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
    raw = np.frombuffer(content, CODES[dtype]).reshape(-1, columns)
    largest = np.zeros(columns, np.float32)
    with np.errstate(over="ignore", invalid="ignore"):
        for begin in range(0, len(raw), step := max(1, _AT_ONCE // columns)):
            np.maximum(largest, np.abs(as_float32(raw[begin : begin + step], dtype)).max(axis=0), out=largest)
    largest = np.maximum.reduceat(largest, range(0, columns, BLOCK))
    smallest = np.finfo(np.float32).smallest_normal  # a smaller scale would have few bits
    scales: NDArray[np.float32] = np.where(largest == 0, 1, np.maximum(largest / np.float32(448), smallest))
    return scales.astype(np.float32)


def codes_of(
    content: memoryview, dtype: str, columns: int, scales: NDArray[np.float32]
) -> tuple[NDArray[np.uint8], Error]:
    """The numbers of E4M3 of a row of blocks, given its finite scales, and what is lost."""
    raw = np.frombuffer(content, CODES[dtype]).reshape(-1, columns)
    codes, (nearest, values) = np.empty(raw.shape, np.uint8), _table()
    across = np.repeat(scales, BLOCK)[:columns]
    largest, lost, total = scales.max(), 0.0, 0.0
    weights = across / largest  # sums of squares neither overflow nor vanish
    with np.errstate(under="ignore"):
        for begin in range(0, len(raw), step := max(1, _AT_ONCE // columns)):
            numbers = as_float32(raw[begin : begin + step], dtype) / across
            bits = numbers.view("<u4")
            keys = bits & np.uint32((1 << _DROPPED) - 1)
            keys += np.uint32((1 << _DROPPED) - 1)  # one bit says whether any of those is set
            keys |= bits
            keys >>= np.uint32(_DROPPED)
            nearest.take(keys, out=codes[begin : begin + step], mode="clip")
            rest = numbers - values.take(keys, mode="clip")
            for part in (numbers, rest):
                part *= weights
            total += float(np.vdot(numbers, numbers))
            lost += float(np.vdot(rest, rest))
    unit = float(largest) ** 2
    return codes.reshape(-1), Error(lost * unit, total * unit)


@cache
def _table() -> tuple[NDArray[np.uint8], NDArray[np.float32]]:
    """By the upper bits of a float32: the nearest number of E4M3, as its bits and as a float32."""
    numbers = E4M3_VALUES[:127].astype(np.float64)
    halfway = (numbers[:-1] + numbers[1:]) / 2
    bits = np.arange(1 << (32 - _DROPPED), dtype="<u4") << np.uint32(_DROPPED)
    with np.errstate(invalid="ignore"):  # a NaN has no code
        sizes = np.abs(bits.view("<f4").astype(np.float64))
    codes = np.searchsorted(halfway, sizes)
    is_tie = sizes == np.append(halfway, np.nan)[codes]
    codes += is_tie & (codes % 2 == 1)
    codes |= (bits >> np.uint32(31) << np.uint32(7)).astype(np.intp)
    return codes.astype(np.uint8), E4M3_VALUES[codes]
