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

BLOCK = 128
SETTINGS = {
    "quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [BLOCK, BLOCK],
}  # fmt: skip
_AT_ONCE = 1 << 18
"""Elements that are computed at a time: with fewer, threads wait for Python's lock."""


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
    codes, across = np.empty(raw.shape, np.uint8), np.repeat(scales, BLOCK)[:columns]
    largest, lost, total = scales.max(), 0.0, 0.0
    weights = across / largest  # sums of squares neither overflow nor vanish
    with np.errstate(under="ignore"):
        for begin in range(0, len(raw), step := max(1, _AT_ONCE // columns)):
            numbers = as_float32(raw[begin : begin + step], dtype) / across
            bits, rest = _nearest(numbers)
            bits |= (numbers.view("<u4") >> np.uint32(24)) & np.uint32(0x80)
            codes[begin : begin + step] = bits
            rest -= np.abs(numbers, out=numbers)
            for part in (numbers, rest):
                part *= weights
            total += float(np.vdot(numbers, numbers))
            lost += float(np.vdot(rest, rest))
    unit = float(largest) ** 2
    return codes.reshape(-1), Error(lost * unit, total * unit)


def _nearest(values: NDArray[np.float32]) -> tuple[NDArray[np.uint32], NDArray[np.float32]]:
    """The numbers of E4M3 that are nearest, ties to even: their bits without the sign, and their magnitudes.

    E4M3 has 3 bits of mantissa, and 2 ** -6 is its smallest normal number. A float32 so much larger than a value that
    no other bits of it are left is added, and taken away again.
    """
    power = values.view("<u4") & np.uint32(0x7F800000)
    np.maximum(power, np.uint32((127 - 6) << 23), out=power)
    larger = (power + np.uint32((23 - 3) << 23)).view("<f4")
    sizes: NDArray[np.float32] = np.abs(values)
    sizes += larger
    codes = sizes.view("<u4") & np.uint32(0x7FFFFF)
    sizes -= larger
    power -= np.uint32((127 - 6) << 23)
    power >>= np.uint32(23 - 3)
    codes += power
    return codes, sizes
