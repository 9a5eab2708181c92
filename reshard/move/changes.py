"""Changes of a block's elements on their way: another dtype, or a function."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
from numpy.typing import NDArray

from reshard.formats.errors import MismatchError, PlanError
from reshard.formats.files.safetensors import DTYPE_BITS, DTYPE_NAMES
from reshard.formats.numbers import CODES, as_float32, convert

Block = NDArray[np.uint8]
"""An array of bytes whose last dimension has the bytes of one element."""
Edit = Callable[[Block], Block]
"""A function that changes the elements of a block."""


@dataclass(frozen=True)
class Change:
    """A change of each element, from ``before`` bytes to ``after``: by ``formats``' dtypes and a function's name.

    ``cast`` is the dtype to which it is rounded first; of a cast, ``name`` stands for all layers and experts.
    """

    name: str
    dtype: str
    target: str
    function: str | None
    cast: str | None = None

    @property
    def before(self) -> int:
        """Bytes of an element before."""
        return DTYPE_BITS[self.dtype] // 8

    @property
    def after(self) -> int:
        """Bytes of an element after."""
        return DTYPE_BITS[self.target] // 8

    def elements(self) -> Edit:
        """Return the function that makes this change. Raises PlanError for an unknown change.

        The function raises MismatchError if it would lose something (without a cast), or if a finite value would become
        infinite (with one).
        """
        name, dtype, target = self.name, self.dtype, self.target
        if self.cast is not None:
            first, then = partial(_cast, name, dtype, self.cast), replace(self, dtype=self.cast, cast=None)
            if (target, self.function) == (self.cast, None):
                return first
            follow = then.elements()
            return lambda block: follow(first(block))
        if dtype == "F32" and target in {"BF16", "F16"} and self.function is None:
            return partial(_narrow, name, target)
        if target != "F32" or dtype not in {"BF16", "F16", "F32"} or self.function not in {None, "-exp"}:
            raise PlanError(f"tensor '{name}' is {dtype}, and would be stored as {target}: no bits may be lost")

        def change(block: Block) -> Block:
            values = _as_f32(block, dtype)
            if self.function is not None:  # -exp(x), rounded once
                values = -np.exp(values.astype(np.float64)).astype("<f4")
            return np.ascontiguousarray(values).view(np.uint8).reshape(*values.shape, 4)

        return change


def _as_f32(block: Block, dtype: str) -> NDArray[np.float32]:
    """The values of BF16, F16 or F32; a NaN keeps its bits."""
    codes = np.ascontiguousarray(block).view(CODES[dtype])[..., 0]
    return as_float32(codes, dtype) if dtype == "BF16" else codes.astype("<f4", copy=False)


def _narrow(name: str, target: str, block: Block) -> Block:
    """Undo a widening. Raises MismatchError for values that no widening gives."""
    values = _as_f32(block, "F32")
    codes = (values.view("<u4") >> 16).astype("<u2") if target == "BF16" else values.astype("<f2")
    narrowed = codes.view(np.uint8).reshape(*values.shape, 2)
    if (_as_f32(narrowed, target).view("<u4") != values.view("<u4")).any():
        raise MismatchError(f"tensor '{name}' is stored as F32 and has values that {target} cannot have", _CHANGED)
    return narrowed


_CHANGED = "the original was of that type: these values were changed since"


# --------------------------------------------------------------------------------------------------------------- casts

_CAST_AT_A_TIME = 1 << 18
"""Elements that are computed at a time: with fewer, threads wait for Python's lock."""


def _cast(name: str, dtype: str, target: str, block: Block) -> Block:
    """Elements in another dtype, bit for bit as torch's CPU kernels have them: by way of float32, rounded to nearest,
    ties to even. Raises MismatchError where a finite value would become infinite.
    """
    if dtype == target:  # a program stores all as float32, say
        return block
    codes = np.ascontiguousarray(block).reshape(-1).view(CODES[dtype])
    rounded = np.empty(codes.size, CODES[target])
    for begin in range(0, codes.size, _CAST_AT_A_TIME):
        here = slice(begin, begin + _CAST_AT_A_TIME)
        if convert(codes[here], dtype, target, rounded[here]):
            why = f"tensor '{name}' has values that are beyond {DTYPE_NAMES[target]}, and would become infinite"
            raise MismatchError(why, "bf16 has the range of fp32" if target == "F16" else None)
    return rounded.view(np.uint8).reshape(*block.shape[:-1], rounded.itemsize)
