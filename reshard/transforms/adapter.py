"""``--adapter``: a base model with an adapter merged into it. Its weights are computed when they are read.

The files have the headers of the base model's: only bytes of the weights that the adapter changes differ. Each element
is ``W + scale * (B A)`` in float32, rounded once to the dtype of the weight, to nearest, ties to even. The products are
summed in the order of the rank, one after the other, so no bit depends on which range is read, or on a library.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from formats.documents import read_config
from formats.errors import CheckpointError, MismatchError
from formats.files.checkpoint import ADAPTER, ADAPTER_CONFIG, has_adapter
from formats.files.checksum import check_unchanged, stamps_in, stamps_of
from formats.files.safetensors import TensorInfo, read_header
from formats.notation.format_file import Factor
from formats.numbers import CODES, as_float32
from formats.store import FilePath, location_of
from reshard.source.low_rank import Product, changes_of
from reshard.source.source import Source
from reshard.store.range_store import RangeStore
from reshard.transforms.tensors import (
    ArrayCache,
    Bytes,
    Computed,
    Content,
    Opened,
    Part,
    computed,
    file_of,
    store_of,
    tensors_of,
    whole_of,
)

_TILE = 1 << 16
"""So many elements are computed at a time: they stay in a core's cache."""

Floats = NDArray[np.float32]
T = TypeVar("T", bound=np.generic)


class Added(Computed):
    """A weight of the base model with what terms add to its matrices: A and B are in the second of the inputs.

    ``what`` has the name, dtype and shape of the weight, and the terms.
    """

    def read(self, opened: Opened, begin: int, end: int) -> Bytes:
        """Compute them."""
        (base, adapter), (name, dtype, (*_, rows, columns), terms) = self.inputs, self.what

        def factor(info: TensorInfo) -> Floats:
            def read() -> Floats:
                content = adapter.read(opened, info.offset, info.offset + info.nbytes)
                return _floats(content, info.dtype, info.shape)

            return _FACTORS.get((adapter, info.offset), read)

        size = _SIZES[dtype]
        first, last = begin // size, -(-end // size)  # a range may begin or end within an element
        count = last - first
        top, bottom = first // columns, -(-last // columns)
        padded = np.zeros((bottom - top) * columns, f"<u{size}")  # whole rows: what lies around the range is cut off
        whole = padded[first - top * columns :][:count]
        whole[:] = np.frombuffer(base.read(opened, first * size, last * size), padded.dtype)
        lines = padded.reshape(-1, columns)
        for term in terms:
            start = term.matrix * rows
            if start >= bottom or start + rows <= top:
                continue
            a, b = factors(term.product, term.expert, factor(term.product.a), factor(term.product.b))
            of, along = slice(term.at, term.at + term.length), term.along
            a, b = (a, b[:, of]) if along else (a[of], b)
            if term.product.turned:
                a, b, along = b.T, a.T, 1 - along
            column, row = (term.begin, start) if along else (0, start + term.begin)
            across, down = (term.step, 1) if along else (1, term.step)
            b = np.ascontiguousarray(b)
            low, high = (min(max(-((row - edge) // down), 0), len(a)) for edge in (top, bottom))
            step = max(1, _TILE // b.shape[1])
            for at in range(low, high, step):
                until = min(at + step, high)
                rows_of = slice(row + at * down - top, row + (until - 1) * down + 1 - top, down)
                block = lines[rows_of, column : column + (b.shape[1] - 1) * across + 1 : across]
                block[:] = _sum(block, name, dtype, a[at:until], b, term.product.scale)
        return whole.view(np.uint8).data[begin - first * size :][: end - begin]


_FACTORS = ArrayCache(256 << 20)
"""A and B of the modules used last, in float32."""


def factors(product: Product, expert: int, a: Floats, b: Floats) -> tuple[Floats, Floats]:
    """The two matrices whose product is that of an expert, as the weight has it."""
    sizes = product.sizes
    both = ((product.form.a, a), (product.form.b, b))
    sides = {factor.side: by_expert(matrix, factor, sizes)[expert] for factor, matrix in both}
    return (sides["in"], sides["out"].T) if product.crossed else (sides["out"], sides["in"].T)


def by_expert(matrix: NDArray[T], factor: Factor, sizes: Mapping[str, int]) -> NDArray[T]:
    """A or B with the dimensions expert, side, rank."""
    axes = [axis for dim in factor.dims for axis in dim]
    apart = matrix.reshape([sizes[axis] for axis in axes])
    if "expert" not in axes:
        axes, apart = ["expert", *axes], apart[None]
    return apart.transpose([axes.index(axis) for axis in ("expert", factor.side, "rank")])


@np.errstate(over="ignore", invalid="ignore")
def _sum(block: NDArray[Any], name: str, dtype: str, a: Floats, b: Floats, scale: float) -> NDArray[Any]:
    """``W + scale * (left right)`` as numbers of the weight's dtype, given those of W. Raises MismatchError."""
    weight = _widened(block, dtype)
    total, term = a[:, :1] * b[0], np.empty((len(a), b.shape[1]), np.float32)
    for k in range(1, len(b)):
        np.multiply(a[:, k : k + 1], b[k], out=term)
        total += term
    total *= np.float32(scale)
    total += weight
    rounded = _rounded(total, dtype)
    lost = ~np.isfinite(_widened(rounded, dtype))
    if lost.any() and np.isfinite(weight[lost]).any():
        raise MismatchError(
            f"tensor '{name}' of the base model is finite and would not be with the adapter in it: numbers of A "
            f"or B are not finite, or their sum is too large for {dtype}",
            "give an adapter that was trained on this base model",
        )
    return rounded


def _widened(numbers: NDArray[Any], dtype: str) -> Floats:
    return as_float32(np.ascontiguousarray(numbers).view(CODES[dtype]), dtype)


def _rounded(values: Floats, dtype: str) -> NDArray[Any]:
    """The nearest numbers of a dtype, ties to even."""
    bits = values.view("<u4")
    if dtype == "F32":
        return bits
    if dtype == "F16":
        return values.astype("<f2").view("<u2")
    even = (bits + (0x7FFF + ((bits >> 16) & 1))) >> 16
    return np.where(np.isnan(values), (bits >> 16) | 0x40, even).astype("<u2")


_SIZES = {"BF16": 2, "F16": 2, "F32": 4}


@np.errstate(over="ignore")  # the sum is checked
def _floats(content: Bytes, dtype: str, shape: tuple[int, ...]) -> Floats:
    return as_float32(np.frombuffer(content, CODES[dtype]), dtype).reshape(shape)


def add_adapter(source: Source, adapter: FilePath) -> RangeStore:
    """A base model as if an adapter had been merged into it: a store.

    Raises CheckpointError if the adapter is none, PlanError if it is not plain LoRA, and MismatchError if it is for
    another base model.
    """
    if not has_adapter(adapter):
        raise CheckpointError(f"{adapter} is no PEFT adapter: it needs {ADAPTER} and {ADAPTER_CONFIG}, and no model")
    stamps = stamps_of([adapter / ADAPTER, adapter / ADAPTER_CONFIG], adapter, stamps_in(adapter))
    infos, settings = read_header(adapter / ADAPTER).tensors, read_config(adapter / ADAPTER_CONFIG)
    tensors, whole = tensors_of(source), whole_of(source)
    added, replaced = changes_of(source.model, settings, infos)
    file, contents = file_of(adapter / ADAPTER, adapter, stamps[adapter / ADAPTER]), dict[str, Content]()
    for name, tensor in tensors.items():
        if name in replaced:
            tensor = tensor._replace(content=Part(file, replaced[name].offset))
        terms = tuple(added.get(name, ()))
        what = name, tensor.dtype, tensor.shape, terms
        contents[name] = Added((tensor.content, Part(file, 0)), what) if terms else tensor.content
    check_unchanged(stamps)
    name_of = f"{source.location} + {location_of(adapter)}"
    return store_of(source, name_of, (computed(f, contents) for f in whole.files), {**whole.sides, **whole.index})
