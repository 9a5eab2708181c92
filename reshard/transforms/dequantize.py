"""``--dequantize``: weights of 8-bit floats as if they were in bfloat16, without the settings of quantization."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from reshard.formats.documents import json_bytes
from reshard.formats.errors import CheckpointError, PlanError
from reshard.formats.files.checkpoint import CONFIG, MODELOPT
from reshard.formats.files.safetensors import tensor_bytes
from reshard.formats.notation.architecture import Architecture
from reshard.formats.quantization.companions import makes_heads
from reshard.formats.quantization.fp8 import DTYPE, Grid, Stored, scaled_weights
from reshard.formats.quantization.methods import without_quantization
from reshard.formats.store import public_name
from reshard.model.model import AxisSizes
from reshard.source.source import Source
from reshard.store.range_store import RangeStore
from reshard.store.threads import ArrayCache
from reshard.transforms.tensors import Arithmetic, Tensor, changed, computed, tensors_of

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


def dequantize(source: Source) -> RangeStore:
    """A checkpoint as if its weights were in bfloat16: a store.

    Raises CheckpointError if it is not quantized, PlanError for a tensor that cannot be dequantized and for a model in
    float16, whose weights would be in bfloat16 beside float16, MismatchError if a file changes meanwhile.
    """
    tensors, config = tensors_of(source), source.model.config
    sizes = AxisSizes(source.model.architecture, config, {})
    kinds = {name: Stored(tensor.dtype, tensor.shape) for name, tensor in tensors.items()}
    rules = source.model.architecture
    scaled, gone = scaled_weights(config, kinds, partial(_input_first, rules, sizes), partial(_is_cached, rules))
    if not scaled:
        raise CheckpointError(f"{source.path} has no weights of 8-bit floats", "leave out --dequantize")
    contents = {name: tensor for name, tensor in tensors.items() if name not in gone}
    problem = next((f"tensor '{name}' is F16" for name, kept in contents.items() if kept.dtype == "F16"), None)
    if problem is None and "float16" in {sizes.settings.get("dtype"), sizes.settings.get("torch_dtype")}:
        problem = "config.json says float16"
    if problem is not None:
        raise PlanError(
            f"{problem}, but dequantized weights would be {DTYPE}: not one dtype",
            f"--dequantize is for models of which the other weights are {DTYPE} or F32",
        )
    for name, how in scaled.items():
        contents[name] = _dequantized(tensors[name], tensors[how.scale], how.grid)
    sides = {name: content for name, content in source.side_files.items() if name != MODELOPT}
    sides[CONFIG] = json_bytes(without_quantization(config)) + b"\n"
    return changed(source, f"{public_name(source.path)} (dequantized)", contents, sides)


def _input_first(architecture: Architecture, sizes: AxisSizes, weight: str, shape: tuple[int, ...]) -> set[bool]:
    """Whether the rule of a weight has its input first; both, if none of its layouts is told by the shape."""
    match = architecture.match(weight)
    rule = sizes.holds(match) if match else None
    if match is None or rule is None:
        return {False, True}
    known = sizes.of(match.indices)  # not a size that is measured
    fitting = (layout for layout in rule.shapes if not layout.axes <= known.keys() or layout.sizes(known) == shape)
    return {layout.arrow is not None for layout in fitting}


def _is_cached(architecture: Architecture, weight: str) -> bool:
    """Whether an attention caches what a weight makes, or multiplies it with that: queries, keys, values, latents."""
    match = architecture.match(weight)
    shapes = (shape for rule in (match.rules if match else ()) for shape in rule.shapes)
    return any(map(makes_heads, shapes)) or ".kv_a_proj" in weight
