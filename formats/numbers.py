"""Floats of 16 bits and more as float32, and float32 rounded to them: bit for bit as torch's CPU kernels have it."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

CODES = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "<u2"}
"""The types of numpy that hold the elements of these dtypes."""
_INFINITE = {"F16": 65520.0, "BF16": float(np.array(0x7F7F8000, "<u4").view("<f4"))}
"""The smallest float32 that is rounded to infinity."""


def as_float32(codes: NDArray[Any], dtype: str) -> NDArray[np.float32]:
    """The values of elements, of which ``codes`` has the type of ``CODES``; those of F32 are not copied."""
    if dtype == "BF16":
        wide = codes.astype("<u4")
        wide <<= np.uint32(16)
        return wide.view("<f4")
    values: NDArray[np.float32] = codes.astype("<f4", copy=False)
    if dtype == "F16" and (nan := np.isnan(values)).any():  # numpy may leave a signalling NaN as it is
        values.view("<u4")[nan] |= np.uint32(0x400000)
    return values


def round_to(values: NDArray[np.float32], target: str, nan_of_bf16: int, out: NDArray[Any]) -> bool:
    """Round values to 16 bits, to nearest, ties to even. Returns whether a finite value became infinite."""
    bits, limit = values.view("<u4"), _INFINITE[target]
    if target == "F16":
        out[:] = values
    else:
        rounded = bits >> np.uint32(16)
        rounded &= np.uint32(1)
        rounded += bits
        rounded += np.uint32(0x7FFF)
        rounded >>= np.uint32(16)
        out[:] = rounded
    if -limit < values.min() and values.max() < limit:  # also false for a NaN
        return False
    if (nan := np.isnan(values)).any():
        sign, payload = bits[nan] >> np.uint32(16) & np.uint32(0x8000), bits[nan] >> np.uint32(13) & np.uint32(0x1FF)
        out.view("<u2")[nan] = nan_of_bf16 if target == "BF16" else sign | payload | np.uint32(0x7E00)
    return bool((np.isfinite(values) & (np.abs(values) >= limit)).any())


def convert(codes: NDArray[Any], dtype: str, target: str, out: NDArray[Any]) -> bool:
    """Put elements into ``out`` in another dtype, by way of float32. Returns whether a finite value became infinite.

    From 16 bits to 16 it looks them up: numpy computes float16 one by one.
    """
    if dtype != target and codes.itemsize == out.itemsize == 2:
        (table, is_lost, least), bits = _table(dtype, target), codes.view("<u2")
        table.take(bits, out=out, mode="clip")  # its fast way
        is_large = bits.max(initial=0) >= least + 0x8000 or bits.view("<i2").max(initial=0) >= least  # of either sign
        return is_large and bool(is_lost.take(bits, mode="clip").any())
    with np.errstate(over="ignore", invalid="ignore"):
        values = as_float32(codes, dtype)
        became_infinite = dtype == "F64" and bool((np.isinf(values) & np.isfinite(codes)).any())
        if target != "F32":
            return round_to(values, target, 0x7FC0 if dtype == "F16" else 0xFFFF, out) or became_infinite
        out[:] = values
        return became_infinite


@cache
def _table(dtype: str, target: str) -> tuple[NDArray[Any], NDArray[np.bool_], int]:
    """Return every number of 16 bits in another dtype of 16 bits, a mask of those that become infinite, and the least
    magnitude of these, in bits.
    """
    every = np.arange(1 << 16, dtype="<u2").view(CODES[dtype])
    table = np.empty(1 << 16, CODES[target])
    with np.errstate(over="ignore", invalid="ignore"):
        round_to(as_float32(every, dtype), target, 0x7FC0 if dtype == "F16" else 0xFFFF, table)
        is_lost = np.isfinite(as_float32(every, dtype)) & ~np.isfinite(as_float32(table, target))
    return table, is_lost, int(np.argmax(is_lost)) or 0x8000


@np.errstate(over="ignore", invalid="ignore")
def sums(codes: NDArray[Any], dtype: str, left: NDArray[np.float64], right: NDArray[np.float64]) -> NDArray[Any]:
    """A matrix plus ``left right``: in float64 the products are added in the order of the rank, the matrix to these,
    and the sum is rounded to float32, and to the matrix's dtype.

    A library multiplies, in an order of its own. Where the bound of all orders' errors leaves two results, it is done
    in order: no bit depends on the library, or on the range.
    """
    weight, rank = as_float32(codes, dtype), len(right)
    total: NDArray[np.float64] = np.matmul(left, right)
    total += weight.astype(np.float64)
    largest = rank * np.abs(left).max(initial=0) * np.abs(right).max(initial=0)
    error = 2.0**-52 * (rank + 4) * (largest + max(weight.max(), -weight.min())) if largest else 0.0
    total -= error
    low = total.astype(np.float32)
    total += 2 * error
    rounded = total.astype(np.float32)
    if (unsure := np.flatnonzero(low != rounded)).size:  # a NaN, too
        rows, columns = np.divmod(unsure, rounded.shape[1])
        in_order = np.add.accumulate(left[rows] * right[:, columns].T, axis=1)[:, -1] + 0.0  # no negative zero
        rounded[rows, columns] = in_order + weight[rows, columns]
    if dtype == "F32":
        return rounded
    result: NDArray[Any] = np.empty(codes.shape, codes.dtype)
    round_to(rounded.reshape(-1), dtype, 0x7FC0, result.reshape(-1))
    return result
