"""``average``: the weighted mean of checkpoints of one model, each in any form. It is computed as it is read.

Each element is ``w1 * x1 + w2 * x2 + ...`` in float32, products and sums rounded one after the other, in the order in
which the checkpoints are given, and then rounded once to the dtype of the first, to nearest, ties to even.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from reshard.formats.errors import CheckpointError, MismatchError, PlanError, refused
from reshard.formats.files.safetensors import DTYPE_BITS
from reshard.formats.notation.architecture import SETTINGS
from reshard.formats.numbers import CODES, as_float32
from reshard.formats.store import public_name
from reshard.model.naming import spelled_alike
from reshard.move.changes import Change
from reshard.source.source import Source
from reshard.transforms.tensors import Arithmetic, Content, Tensor, changed, computed, derived, is_quantized, tensors_of

_AT_ONCE = 1 << 18
"""So many elements are read and computed at a time."""
_FLOATS = {"F32", "F16", "BF16"}


def mean_of(name: str, inputs: Sequence[Tensor], weights: Sequence[float], dtype: str) -> Content:
    """The mean of tensors in another dtype, or F32. Reading it raises MismatchError where it is not finite."""
    change = Change(name, "F32", dtype, None, dtype)

    def mean(arithmetic: Arithmetic, first: int, last: int) -> NDArray[Any]:
        means, edit = np.empty((last - first, change.after), np.uint8), change.elements()
        for at in range(first, last, _AT_ONCE):
            till = min(at + _AT_ONCE, last)
            total, product = np.empty((2, till - at), np.float32)
            with np.errstate(over="ignore", invalid="ignore"):
                for number, (tensor, weight) in enumerate(zip(inputs, weights, strict=True)):
                    size = DTYPE_BITS[tensor.dtype] // 8
                    codes = np.frombuffer(tensor.content.read(arithmetic, size * at, size * till), CODES[tensor.dtype])
                    values = as_float32(codes, tensor.dtype)
                    np.multiply(values, np.float32(weight), out=product if number else total)
                    if number:
                        total += product
            if not np.isfinite(total).all():
                raise MismatchError(f"the mean of tensor '{name}' is not finite")
            means[at - first : till - first] = edit(total.view(np.uint8).reshape(-1, 4))
        return means

    return computed(
        mean, [tensor.content for tensor in inputs], (change, [each.dtype for each in inputs], weights), change.after
    )


def _same_of(name: str, tensors: Sequence[Tensor]) -> Tensor:
    """A tensor that is not of floats, the same in all checkpoints. Reading it raises MismatchError if it is not."""
    inputs = [tensor.content for tensor in tensors]

    def same(arithmetic: Arithmetic, first: int, last: int) -> NDArray[Any]:
        one, *others = (content.read(arithmetic, first, last) for content in inputs)
        if any(bytes(one) != bytes(other) for other in others):
            raise MismatchError(f"tensor '{name}' ({tensors[0].dtype}) differs, and only floats have a mean")
        return np.frombuffer(one, np.uint8)

    return tensors[0]._replace(content=computed(same, inputs, (name, tensors[0].dtype)))


def average(sources: Sequence[Source], weights: Sequence[float], *, wide: bool) -> Source:
    """The weighted mean of checkpoints: in the dtypes and files of the first or, if ``wide``, in float32.

    Raises SettingError for weights that are not one for each or do not sum to 1; CheckpointError for adapters,
    quantized checkpoints and other tensors; PlanError for another dtype or shape.
    """
    if len(weights) != len(sources):
        raise refused("weights", tuple(weights), f"there are {len(sources)} checkpoints: give one for each")
    if not all(map(math.isfinite, weights)) or abs(math.fsum(weights) - 1) > 1e-6:
        raise refused("weights", tuple(weights), "they do not sum to 1")
    for source in sources:
        if (is_adapter := SETTINGS in source.model.config) or is_quantized(source):
            what = "an adapter: the mean of its factors is not that of their products" if is_adapter else "quantized"
            raise CheckpointError(f"{source.path} is {what}", "average full checkpoints of floats")
    first, *_ = sources
    own, tables = dict.fromkeys(tensor.name for tensor in first.model.tensors), [tensors_of(first)]
    for other in sources[1:]:
        spelled = spelled_alike(first.model, other.model)
        tables.append({spelled.get(name, name): tensor for name, tensor in tensors_of(other).items()})
        names = {spelled.get(tensor.name, tensor.name) for tensor in other.model.tensors}
        if differing := min(own.keys() ^ names, default=None):
            has, lacks = (first, other) if differing in own else (other, first)
            raise CheckpointError(f"{has.path} has tensor '{differing}', and {lacks.path} does not: not one model")
    contents = dict[str, Tensor]()
    for name in own:
        one, *others = tensors = [table[name] for table in tables]
        if one.dtype == "F64":
            what = f"tensor '{name}' is F64: a mean is computed in float32"
            raise PlanError(what, "merge each with --dtype fp32 first")
        for tensor, source in zip(others, sources[1:], strict=True):
            if tensor.shape != one.shape or (tensor.dtype != one.dtype and not {tensor.dtype, one.dtype} <= _FLOATS):
                ours, theirs = (f"{tensor_of.dtype} {list(tensor_of.shape)}" for tensor_of in (one, tensor))
                raise PlanError(f"tensor '{name}' is {ours} in {first.path} and {theirs} in {source.path}")
        if one.dtype not in _FLOATS:  # the mean of integers is what all have
            contents[name] = _same_of(name, tensors)
            continue
        dtype = "F32" if wide else one.dtype
        contents[name] = Tensor(dtype, one.shape, mean_of(name, tensors, tuple(weights), dtype))
    contents |= {second: contents[name] for second, name in first.aliases.items()}
    title = f"the mean of {' and '.join(public_name(source.path) for source in sources)}"
    return derived(first, changed(first, title, contents))
