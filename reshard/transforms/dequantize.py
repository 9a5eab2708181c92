"""``--dequantize``: weights of 8-bit floats as if they were in bfloat16, without the settings of quantization."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from reshard.formats.documents import json_bytes
from reshard.formats.errors import CheckpointError
from reshard.formats.files.checkpoint import CONFIG, MODELOPT
from reshard.formats.files.safetensors import tensor_bytes
from reshard.formats.quantization.fp8 import DTYPE, Grid, Stored
from reshard.formats.quantization.methods import without_quantization
from reshard.formats.store import public_name
from reshard.model.scaled import scaled_of
from reshard.source.source import Source
from reshard.store.threads import ArrayCache
from reshard.transforms.tensors import Arithmetic, Tensor, changed, computed, derived, tensors_of

_SCALES = ArrayCache(64 << 20)
"""The scales, of all files together, that are kept for the next ranges of their weights."""


def _dequantized(weight: Tensor, scale: Tensor, grid: Grid) -> Tensor:
    """A weight of 8-bit floats times its scales, which apply as ``grid`` says."""
    nbytes = tensor_bytes("", scale.dtype, scale.shape)

    def compute(arithmetic: Arithmetic, first: int, last: int) -> NDArray[Any]:
        def scales() -> Any:
            return arithmetic.scales(memoryview(scale.content.read(arithmetic, 0, nbytes)), scale.dtype, grid)

        codes = np.frombuffer(weight.content.read(arithmetic, first, last), np.uint8)
        numbers = arithmetic.numbers(codes, first, grid, _SCALES.get((arithmetic.scales, scale.content, grid), scales))
        return numbers.astype("<u2", copy=False)

    inputs, what = (weight.content, scale.content), (scale.dtype, nbytes, grid)
    return Tensor(DTYPE, weight.shape, computed(compute, inputs, what, 2))


def dequantize(source: Source) -> Source:
    """A checkpoint as if its weights were in bfloat16.

    Raises CheckpointError if it is not quantized, PlanError for a tensor that cannot be dequantized and for a model in
    float16, whose weights would be in bfloat16 beside float16, MismatchError if a file changes meanwhile.
    """
    tensors, config = tensors_of(source), source.model.config
    scaled, gone = scaled_of(source.model, {name: Stored(each.dtype, each.shape) for name, each in tensors.items()})
    if not scaled:
        raise CheckpointError(f"{source.path} has no weights of 8-bit floats", "leave out --dequantize")
    contents = {name: tensor for name, tensor in tensors.items() if name not in gone}
    for name, how in scaled.items():
        contents[name] = _dequantized(tensors[name], tensors[how.scale], how.grid)
    sides = {name: content for name, content in source.side_files.items() if name != MODELOPT}
    sides[CONFIG] = json_bytes(without_quantization(config)) + b"\n"
    return derived(source, changed(source, f"{public_name(source.path)} (dequantized)", contents, sides))
