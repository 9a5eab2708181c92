"""``--adapter``: a base model with an adapter merged into it. Its weights are computed when they are read.

The files have the headers of the base model's: only bytes of the weights that the adapter changes differ. Each element
is ``W + scale * (B A)`` in float64, where ``scale`` and all numbers are float32: the products of three are summed in
the order of the rank, then W is added. The sum is rounded to float32, and that to the dtype of the weight, to nearest,
ties to even.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from reshard.formats.errors import CheckpointError, MismatchError
from reshard.formats.files.checkpoint import ADAPTER, ADAPTER_CONFIG, has_adapter
from reshard.formats.files.safetensors import DTYPE_BITS, tensor_bytes
from reshard.formats.numbers import CODES, as_float32
from reshard.formats.store import FilePath, public_name
from reshard.source.folder import Folder
from reshard.source.lora import find_lora, open_alone
from reshard.source.opening import open_source
from reshard.source.recognition import recognise
from reshard.source.source import Source
from reshard.store.threads import ArrayCache
from reshard.transforms.low_rank import Term, changes_of
from reshard.transforms.tensors import Arithmetic, Content, Tensor, changed, computed, derived, tensors_of

_PICKLED = "adapter_model.bin"
_TILE = 1 << 17
"""So many elements are computed at a time: with fewer, threads wait for Python's lock."""

Floats = NDArray[np.float64]


def _added(name: str, weight: Tensor, content: Content, terms: Sequence[Term]) -> Content:
    """Return the content of a base model's weight with the terms added to its matrices.

    Reading it raises MismatchError where a sum is not finite.
    """
    dtype, (*_, rows, columns), size = weight.dtype, weight.shape, DTYPE_BITS[weight.dtype] // 8

    def compute(arithmetic: Arithmetic, first: int, last: int) -> NDArray[Any]:
        def floats(tensor: Tensor) -> NDArray[np.float32]:
            nbytes = tensor_bytes("", tensor.dtype, tensor.shape)

            @np.errstate(over="ignore")  # the sum is checked
            def read() -> NDArray[np.float32]:
                codes = np.frombuffer(tensor.content.read(arithmetic, 0, nbytes), CODES[tensor.dtype])
                return as_float32(codes, tensor.dtype).reshape(tensor.shape)

            return _FACTORS.get(tensor.content, read)

        top, bottom = first // columns, -(-last // columns)
        padded = np.zeros((bottom - top) * columns, f"<u{size}")  # whole rows: what lies around the range is cut off
        whole = padded[first - top * columns :][: last - first]
        whole[:] = np.frombuffer(content.read(arithmetic, first * size, last * size), padded.dtype)
        lines = padded.reshape(-1, columns)
        for term in terms:
            start = term.matrix * rows
            if start >= bottom or start + rows <= top:
                continue
            a, b = (term.product.matrix(side, term.expert, floats) for side in term.product.sides)
            part, begin_of, step_of = slice(term.at, term.at + len(term.rows)), term.rows.start, term.rows.step
            a, b = (a, b[part].T) if term.along else (a[part], b.T)
            column, row = (begin_of, start) if term.along else (0, start + begin_of)
            across, down = (step_of, 1) if term.along else (1, step_of)
            low, high = (min(max(-((row - edge) // down), 0), len(a)) for edge in (top, bottom))
            scale, right = np.float64(np.float32(term.product.scale)), np.ascontiguousarray(b, np.float64)
            step = max(1, _TILE // right.shape[1])
            for at in range(low, high, step):
                until = min(at + step, high)
                rows_of = slice(row + at * down - top, row + (until - 1) * down + 1 - top, down)
                block = lines[rows_of, column : column + (right.shape[1] - 1) * across + 1 : across]
                left = a[at:until].astype(np.float64) * scale
                block[:] = _sum(arithmetic, np.ascontiguousarray(block), name, dtype, left, right)
        return whole

    factors = dict.fromkeys(factor.content for term in terms for factor in (term.product.a, term.product.b))
    return computed(compute, (content, *factors), (name, dtype, weight.shape, terms), size)


_FACTORS = ArrayCache(128 << 20)
"""A and B of the modules used last, in float32."""


def _sum(arithmetic: Arithmetic, block: NDArray[Any], name: str, dtype: str, a: Floats, b: Floats) -> NDArray[Any]:
    """``W + a b`` as numbers of the weight's dtype, given those of W. Raises MismatchError."""
    codes = arithmetic.sums(block.view(CODES[dtype]), dtype, a, b)
    lost = ~np.isfinite(as_float32(codes, dtype))
    if lost.any() and np.isfinite(as_float32(block.view(CODES[dtype])[lost], dtype)).any():
        raise MismatchError(
            f"tensor '{name}' of the base model is finite and would not be with the adapter in it: numbers of A "
            f"or B are not finite, or their sum is too large for {dtype}",
            "give an adapter that was trained on this base model",
        )
    return codes.view(block.dtype)


def add_adapter(source: Source, path: FilePath, *, is_part: bool = False) -> Source:
    """A base model, or a part of one, as if an adapter had been merged into it.

    Raises CheckpointError if the adapter is none, PlanError if it is not plain LoRA, and MismatchError if it is for
    another base model.
    """
    if not has_adapter(path) and (path / ADAPTER_CONFIG).is_file() and (path / _PICKLED).is_file():
        what = f"{path} is a PEFT adapter in {_PICKLED}, and {ADAPTER} is read"
        raise CheckpointError(what, "load it with PEFT and save it again (save_pretrained)")
    if has_adapter(path):
        return with_adapter(source, open_source(path, adapted=source.model), is_part=is_part)
    run = find_lora(folder := recognise(Folder(path)), source.model)
    if run is None:
        raise CheckpointError(f"{path} is not a PEFT adapter: it needs {ADAPTER} and {ADAPTER_CONFIG}, and no model")
    return with_adapter(source, open_alone(folder, run, source.model), is_part=is_part)


def with_adapter(source: Source, adapter: Source, *, is_part: bool = False) -> Source:
    """A base model, or a part of one, with an adapter to it merged into it. Raises PlanError, MismatchError."""
    places = dict.fromkeys((public_name(source.path), public_name(adapter.path)))
    tensors = tensors_of(source)
    added, replaced = changes_of(source.model, adapter.model, tensors_of(adapter))
    for name, tensor in tensors.items():
        content = replaced.get(name, tensor).content
        if name in added:
            content = _added(name, tensor, content, added[name])
        tensors[name] = tensor._replace(content=content)
    adapter.check_unchanged()
    title = " + ".join(places) if len(places) > 1 else f"{next(iter(places))}, merged"
    return derived(source, changed(source, title, tensors), is_part=is_part)
