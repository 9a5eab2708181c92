"""Weights of 8-bit floats with scales: does a model have them, so that ``--dequantize`` can compute others?"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from reshard.formats.errors import PlanError
from reshard.formats.notation.architecture import Architecture
from reshard.formats.quantization.companions import makes_heads
from reshard.formats.quantization.fp8 import DTYPE, Scaled, Stored, scaled_weights
from reshard.model.model import AxisSizes, Model


def scaled_of(model: Model, tensors: Mapping[str, Stored]) -> tuple[dict[str, Scaled], set[str]]:
    """Return the weights among these tensors that can be dequantized, and the names of tensors that are then useless.

    Raises PlanError for a tensor that cannot be dequantized, and for a model in float16, whose weights would be in
    bfloat16 beside float16.
    """
    rules, sizes = model.architecture, AxisSizes(model.architecture, model.config, {})
    scaled, gone = scaled_weights(
        model.config, tensors, partial(_input_first, rules, sizes), partial(_is_cached, rules)
    )
    kept = (name for name, tensor in tensors.items() if name not in gone and tensor.dtype == "F16")
    problem = next((f"tensor '{name}' is F16" for name in kept), None)
    if problem is None and "float16" in {sizes.settings.get("dtype"), sizes.settings.get("torch_dtype")}:
        problem = "config.json says float16"
    if scaled and problem is not None:
        raise PlanError(
            f"{problem}, but dequantized weights would be {DTYPE}: not one dtype",
            f"--dequantize is for models of which the other weights are {DTYPE} or F32",
        )
    return scaled, gone


def can_be_dequantized(model: Model) -> bool:
    """Whether a model has weights of 8-bit floats and no other quantized weights, judged by one tensor of each kind."""
    try:
        scaled, _ = scaled_of(model, {kind.name: Stored(kind.dtype, kind.shape) for kind in model.kinds})
    except PlanError:
        return False
    return bool(scaled)


def _input_first(architecture: Architecture, sizes: AxisSizes, weight: str, shape: tuple[int, ...]) -> set[bool]:
    """Return {True} if a weight's rule has the input first, {False} if the output; both if its shape fits several
    layouts or none.
    """
    match = architecture.match(weight)
    rule = sizes.holds(match) if match else None
    if match is None or rule is None:
        return {False, True}
    known = sizes.of(match.indices)  # not a size that is measured
    fitting = (layout for layout in rule.shapes if not layout.axes <= known.keys() or layout.sizes(known) == shape)
    return {layout.arrow is not None for layout in fitting}


def _is_cached(architecture: Architecture, weight: str) -> bool:
    """Whether an attention caches the output of a weight, or multiplies it with cached values: queries, keys, values,
    latents.
    """
    match = architecture.match(weight)
    shapes = (shape for rule in (match.rules if match else ()) for shape in rule.shapes)
    return any(map(makes_heads, shapes)) or ".kv_a_proj" in weight
