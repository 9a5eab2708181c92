"""What belongs to a quantized weight: packed integers, scales, zero points, as functions of the weight's own rule.

No tensor of a quantized checkpoint has a rule of its own. ``"in/8 -> out"`` says how GPTQ stores a weight whose rule is ``output input``: the
input first, eight to an integer. ``out`` and ``in`` stand for the weight's two dimensions, ``lead`` for those before them (experts).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from formats.axes import Dim, Shape, parse


@dataclass(frozen=True)
class Companion:
    """A tensor that belongs to a weight: the weight's name, and the shapes that it may have in terms of the weight's."""

    weight: str
    patterns: tuple[str, ...]


def companion(name: str, config: Mapping[str, Any]) -> Companion | None:
    """The weight that a tensor belongs to, by the method in ``quantization_config``; None if it belongs to none.

    Raises PlanError for a method that cannot be split.
    """
    settings = config.get("quantization_config")
    if not isinstance(settings, dict):
        return None
    method = str(settings.get("quant_method", settings.get("quant_algo", ""))).lower()
    if method not in _METHODS:
        return None
    for suffix, patterns in _METHODS[method](settings).items():
        if name.endswith(suffix):
            base = name[: -len(suffix)]
            weight = base if suffix.startswith("_") else f"{base}.weight"
            return Companion(weight, (patterns,) if isinstance(patterns, str) else tuple(patterns))
    return None


@lru_cache(maxsize=4096)
def shape_of(patterns: tuple[str, ...], weight: Shape, shape: tuple[int, ...] | None) -> Shape | None:
    """The rule of a weight's companion given the weight's, chosen among its patterns by the dimensions on disk."""
    for pattern in patterns:
        found = _substitute(parse(pattern), weight)
        if found is not None and (shape is None or _fits(found, shape)):
            return found
    return None


def _fits(rule: Shape, shape: tuple[int, ...]) -> bool:
    if len(rule.dims) != len(shape):
        return False
    return all(dim.axes or dim.size({}) == length for dim, length in zip(rule.dims, shape, strict=True))


def _substitute(pattern: Shape, weight: Shape) -> Shape | None:
    """Put the weight's dimensions in the place of ``lead``, ``out`` and ``in``; None if the weight is no matrix."""
    output = weight.output_dim
    if output is None:
        return pattern if not pattern.axes else None
    inner = 2 * len(weight.dims) - 3 - output
    dims: list[Dim] = []
    for dim in pattern.dims:
        word = replace(dim, step=1).axis
        if word == "lead":
            dims += weight.dims[:-2]
        elif word in {"out", "in"}:
            dims.append(replace(weight.dims[output if word == "out" else inner], step=dim.step))
        else:
            dims.append(dim)
    arrow = None if pattern.arrow is None else pattern.arrow + len(dims) - len(pattern.dims)
    return Shape(tuple(dims), arrow)


# -------------------------------------------------------------------------------------------------------- methods

_Patterns = Mapping[str, "str | tuple[str, ...]"]
_PER_TENSOR = ("", "1")


def _fp8(settings: Mapping[str, Any]) -> _Patterns:
    """DeepSeek's block scales, and static ones: https://huggingface.co/deepseek-ai/DeepSeek-V3."""
    rows, columns = settings.get("weight_block_size") or (128, 128)
    blocks = f"lead out/{rows} in/{columns}"
    scale = (*_PER_TENSOR, "out 1") if not settings.get("weight_block_size") else (blocks,)
    return {
        ".weight_scale_inv": (blocks, *_PER_TENSOR),
        "_scale_inv": (blocks, *_PER_TENSOR),
        ".weight_scale": scale,
        ".input_scale": _PER_TENSOR,
        ".activation_scale": _PER_TENSOR,
    }


_METHODS = {"fp8": _fp8}
