"""How far two elements are apart: as numbers, and in units of the dtype's last place. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from formats.files.safetensors import unit_of
from formats.quantization.dequantizing import e4m3_values

Codes = NDArray[Any]
"""Elements as unsigned integers."""
Numbers = NDArray[np.float64]


def codes_of(content: NDArray[np.uint8], dtype: str) -> Codes:
    """The elements of a piece of a tensor, or its bytes if these hold several."""
    return content.view(f"<u{unit_of(dtype)}")


_VALUES: Mapping[str, Callable[[Codes], NDArray[Any]]] = {
    "F64": lambda codes: codes.view("<f8"),
    "F32": lambda codes: codes.view("<f4"),
    "F16": lambda codes: codes.view("<f2"),
    "BF16": lambda codes: (codes.astype("<u4") << np.uint32(16)).view("<f4"),
    "F8_E5M2": lambda codes: (codes.astype("<u2") << np.uint16(8)).view("<f2"),
    "F8_E4M3": lambda codes: e4m3_values()[codes],
}
"""The dtypes of sign and magnitude: what their bits mean. Others (packed integers, scales) have no difference here."""


@dataclass(frozen=True)
class Distance:
    """What lies between changed elements and the elements that they were.

    ``changed`` is their number, ``largest`` the largest difference, ``squares`` the sum of squares, ``ulps`` the
    largest difference in units of the last place, counted over the numbers of the dtype; it leaves out elements that
    cross zero, and is None without others. ``other`` elements are, before or after, infinite or NaN, and have no
    difference. Without numbers only ``changed`` counts.
    """

    changed: int = 0
    largest: float = 0.0
    squares: float = 0.0
    ulps: int | None = None
    other: int = 0

    def plus(self, more: Distance) -> Distance:
        """The distance of both together."""
        return replace(
            self, changed=self.changed + more.changed, largest=max(self.largest, more.largest),
            squares=self.squares + more.squares, ulps=largest_ulps(self.ulps, more.ulps), other=self.other + more.other,
        )  # fmt: skip


def has_numbers(dtype: str) -> bool:
    """Whether elements of a dtype are compared as numbers."""
    return dtype in _VALUES


def distance(left: Codes, right: Codes, dtype: str) -> Distance:
    """The distance of elements that differ."""
    if not has_numbers(dtype):
        return Distance(left.size)
    with np.errstate(invalid="ignore"):  # a NaN of the checkpoint's own
        before, after = (_VALUES[dtype](codes).astype(np.float64) for codes in (left, right))
    finite = np.isfinite(before) & np.isfinite(after)
    if not finite.all():
        before, after, left, right = before[finite], after[finite], left[finite], right[finite]
    if not before.size:
        return Distance(finite.size, other=finite.size)
    with np.errstate(over="ignore"):
        difference = np.abs(after - before)
        difference = np.minimum(difference, np.finfo(np.float64).max)  # of two float64 of opposite signs
        squares = min(float(np.dot(difference, difference)), float(np.finfo(np.float64).max))
    magnitude = left.dtype.type((1 << (8 * left.itemsize - 1)) - 1)
    has_crossed = np.sign(before) * np.sign(after) < 0
    first, second = ((codes & magnitude)[~has_crossed] for codes in (left, right))
    ulps = int((np.maximum(first, second) - np.minimum(first, second)).max()) if first.size else None
    return Distance(finite.size, float(difference.max()), squares, ulps, finite.size - before.size)


def largest_ulps(*ulps: int | None) -> int | None:
    """The largest of those that are known."""
    return max((each for each in ulps if each is not None), default=None)
