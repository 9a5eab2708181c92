"""What should be stored in place of the original's elements, where a format changes or repeats them.

The proof has its own arithmetic for this, to be independent of the engine. It covers casts, wider dtypes and functions,
scales that are repeated for each smaller scale block, and tensors that state the shape of a weight.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

import numpy as np

from formats.errors import PlanError
from formats.files.safetensors import DTYPE_BITS, TensorInfo
from formats.notation.axes import Run
from verify.bytes.reading import Files, nearest
from verify.bytes.views import Array, Chunk, View

_SHAPE = re.compile(rb'("shape": \[)([^\]]*)\]')
_INTEGERS = {"I32": "<i4", "I64": "<i8"}


# ------------------------------------------------------------------------------------------------------------- casts

_ROUNDED = {"F16": (10, -14, 0x7C00), "F32": (23, -126, 0x7F800000)}
"""Bits of the mantissa, the smallest exponent, and the bits of infinity."""


def cast(codes: Array, before: str, after: str) -> Array:
    """Elements in another dtype, by way of float32, to nearest even; a NaN is that of torch."""
    if before == after:
        return codes
    codes = np.atleast_1d(codes)
    with np.errstate(all="ignore"):
        wide = _rounded(codes.view("<f8"), "F32") if before == "F64" else widened(codes, (before, "F32"))
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


def differing(left: Array, right: Array, dtypes: tuple[str, str], function: str | None) -> Array | None:
    """Which elements are not what they should be; None if all are.

    ``dtypes`` are the original's dtype, after any cast, and the stored one. Raises PlanError for an unknown change.
    """
    if function is not None:
        wrong = ~_is_near(left, right, dtypes, function)
        return wrong if wrong.any() else None
    if dtypes[0] != dtypes[1]:
        left = widened(left, dtypes)
    elif _in_words(left) and _in_words(right) and (left.view("<u8") == right.view("<u8")).all():
        return None
    found = left != right
    return found if found.any() else None


def _in_words(array: Array) -> bool:
    """Whether the last dimension lies in one piece of whole words."""
    return bool(array.ndim and array.strides[-1] == array.itemsize and array.shape[-1] * array.itemsize % 8 == 0)


def expected(left: Array, dtypes: tuple[str, str], function: str | None) -> bytes:
    """The bytes that should be stored for an element."""
    if function is not None:
        wide = widened(left, dtypes)
        return bytes((-np.exp(wide.view("<f4").astype(np.float64))).astype("<f4").tobytes())
    return bytes((left if dtypes[0] == dtypes[1] else widened(left, dtypes)).tobytes())


def widened(left: Array, dtypes: tuple[str, str]) -> Array:
    """The original's elements, exactly, in the wider dtype in which they are stored. Raises PlanError."""
    if dtypes == ("F32", "F32"):
        return left
    if dtypes == ("BF16", "F32"):
        return left.astype("<u4") << np.uint32(16)
    if dtypes == ("F16", "F32"):
        return np.ascontiguousarray(left).view("<f2").astype("<f4").view("<u4")
    raise PlanError(f"a tensor of {dtypes[0]} is stored as {dtypes[1]}, which is not known to be exact")


def _is_near(left: Array, right: Array, dtypes: tuple[str, str], function: str) -> Array:
    """Whether each F32 is the function of the original's element, as computed in float64, within one unit in the last
    place: the function itself need not be rounded correctly.
    """
    if function != "-exp" or dtypes[1] != "F32":
        raise PlanError(f"the function '{function}' in {dtypes[1]} is not known")
    original = widened(left, dtypes)
    values = np.ascontiguousarray(original).view("<f4").astype(np.float64)
    with np.errstate(over="ignore"):
        exact = -np.exp(values)
        nearest = exact.astype("<f4")
    found = np.ascontiguousarray(right).view("<f4")
    with np.errstate(invalid="ignore"):
        close = np.abs(found.astype(np.float64) - exact) <= np.spacing(np.abs(nearest)).astype(np.float64)
    near: Array = close | (found == nearest) | (np.isnan(found) & np.isnan(nearest))
    return near


def pattern(value: float, dtype: str) -> int:
    """The bits of a number. Raises PlanError for a dtype in which the formats have no constants but zero."""
    if not value:
        return 0
    if dtype == "F16":
        return int(np.array(value, "<f2").view("<u2"))
    if dtype not in {"F32", "BF16"}:
        raise PlanError(f"a constant of dtype {dtype} is not known")
    bits = int(np.array(value, "<f4").view("<u4"))
    return bits if dtype == "F32" else bits >> 16


# ------------------------------------------------------------------------------------------------- smaller scale blocks


def coarse(view: View, chunk: Chunk) -> tuple[tuple[int, ...], Run]:
    """For an original with larger scale blocks: its shape, and which of its elements a chunk is made of."""
    repeats = view.repeats or ()
    shape = tuple(-(-size // times) for size, times in zip(view.shape, repeats, strict=True))
    outer = [i // times for i, times in zip(chunk.outer, repeats, strict=False)]
    times, row = repeats[view.axis], math.prod(shape[view.axis + 1 :])
    begin, end = chunk.begin // times, -(-min(chunk.end, view.shape[view.axis]) // times)
    first = 0
    for index, size in zip(outer, shape, strict=False):
        first = first * size + index
    return shape, Run((first * shape[view.axis] + begin) * row, (end - begin) * row)


def repeated(view: View, chunk: Chunk, data: Array, count: int) -> Array:
    """The ``count`` elements of a chunk, from the bytes of the original's elements, each of which is repeated."""
    repeats, item = view.repeats or (), view.bits // 8
    shape, run = coarse(view, chunk)
    row = math.prod(shape[view.axis + 1 :])
    found = data.reshape(run.length // row if row else 0, *shape[view.axis + 1 :], item)
    for dim, times in enumerate(repeats[view.axis :]):
        found = np.repeat(found, times, axis=dim)
    inner = view.shape[view.axis + 1 :]
    rows = count // math.prod(inner) if math.prod(inner) else 0
    return np.ascontiguousarray(found[(slice(0, rows), *map(slice, inner))]).reshape(-1)


# ------------------------------------------------------------------------------------------------------- stated shapes


def stating(files: Files, info: TensorInfo, shape: Sequence[int]) -> Array:
    """The content of a tensor that states a weight's shape, with another shape in it, in as many bytes.

    A tensor of integers is the shape itself. In JSON the shape is a list, followed by spaces if the old one was longer.
    """
    content = files.read(info.file, info.offset, info.nbytes)
    if info.dtype in _INTEGERS:
        stated: Array = np.array(shape, _INTEGERS[info.dtype]).view(np.uint8)
        return stated
    text = ", ".join(map(str, shape)).encode()
    new = _SHAPE.sub(lambda found: found[1] + text.ljust(len(found[2])) + b"]", content.tobytes())
    return np.frombuffer(new, np.uint8)
