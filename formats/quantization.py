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
from formats.errors import PlanError


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
    method = _METHODS.get(str(settings.get("quant_method", "")).lower())
    for suffix, patterns in method(settings).items() if method else ():
        if name.endswith(suffix):
            base = name[: -len(suffix)]
            return Companion(base if suffix.startswith("_") else f"{base}.weight", patterns)
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

_Patterns = Mapping[str, tuple[str, ...]]
_SCALAR = ("", "1")
_ACTIVATION_SCALES: _Patterns = {
    suffix: _SCALAR
    for suffix in (".input_scale", ".activation_scale", ".input_global_scale", ".output_scale", ".k_scale", ".v_scale")
}


def _fp8(settings: Mapping[str, Any]) -> _Patterns:
    """DeepSeek's scales for blocks of 128 x 128, and static ones: huggingface.co/deepseek-ai/DeepSeek-V3, README_WEIGHTS."""
    block = settings.get("weight_block_size")
    rows, columns = block or (128, 128)
    blocks = f"lead out/{rows} in/{columns}"
    static = (*_SCALAR, "out 1", "out")
    return _ACTIVATION_SCALES | {
        "_scale_inv": (blocks, *_SCALAR),
        ".weight_scale": (blocks,) if block else static,
        "_scale": (blocks,) if block else static,
    }


def _gptq(settings: Mapping[str, Any]) -> _Patterns:
    """GPTQ: input first, ``32 / bits`` inputs to an integer; zero points packed along the output.

    With act-order a row may belong to any group, so that every rank keeps all groups. ``g_idx`` keeps the original's group numbers.
    """
    pack = _per_integer(settings)
    groups = "groups" if settings.get("desc_act") else _groups(settings)
    return {
        ".qweight": (f"in/{pack} -> out",),
        ".qzeros": (f"{groups} -> out/{pack}",),
        ".scales": (f"{groups} -> out",),
        ".g_idx": ("in",),
    }


def _awq(settings: Mapping[str, Any]) -> _Patterns:
    """AWQ (gemm): input first, eight outputs to an integer, in an order of their own within it."""
    if str(settings.get("version", "gemm")).lower() != "gemm":
        raise PlanError(f"AWQ version '{settings['version']}' cannot be split: its layout is not known", "convert it to version 'gemm'")
    pack, groups = _per_integer(settings), _groups(settings)
    return {
        ".qweight": (f"in -> out/{pack}",),
        ".qzeros": (f"{groups} -> out/{pack}",),
        ".scales": (f"{groups} -> out",),
    }


def _compressed(settings: Mapping[str, Any]) -> _Patterns:
    """compressed-tensors: https://github.com/vllm-project/compressed-tensors, formats pack-, float-, int- and nvfp4-pack-quantized."""
    patterns: dict[str, tuple[str, ...]] = {**_ACTIVATION_SCALES, ".weight_shape": ("2",), ".weight_global_scale": _SCALAR}
    for group in (settings.get("config_groups") or {}).values():
        weights = group.get("weights") or {}
        bits, strategy = int(weights.get("num_bits", 8)), weights.get("strategy", "tensor")
        size = weights.get("group_size")
        scale = {
            "tensor": _SCALAR,
            "channel": ("out 1", "out"),
            "group": (f"out in/{size}",),
            "tensor_group": (f"out in/{size}",),
            "block": ("lead out/{} in/{}".format(*(weights.get("block_structure") or (128, 128))),),
        }[strategy]
        inner = "1" if strategy != "group" else f"in/{size}"
        patterns |= {
            ".weight_packed": ("out in/2",) if weights.get("type") == "float" else (f"out in/{_integers(bits)}",),
            ".weight_scale": scale,
            ".weight_zero_point": (*scale, f"out/{_integers(bits)} {inner}") if bits < 8 else scale,
            ".weight_g_idx": ("in",),
        }
    return patterns


def _modelopt(settings: Mapping[str, Any]) -> _Patterns:
    """NVIDIA ModelOpt: fp8 with one scale a tensor, NVFP4 with two values a byte and a scale for 16."""
    if "NVFP4" in str(settings.get("quant_algo", "")).upper():
        return _ACTIVATION_SCALES | {
            ".weight": ("lead out in", "lead out in/2"),
            ".weight_scale": ("lead out in/16", *_SCALAR),
            ".weight_scale_2": _SCALAR,
        }
    return _ACTIVATION_SCALES | {".weight_scale": (*_SCALAR, "out 1", "out")}


def _mxfp4(settings: Mapping[str, Any]) -> _Patterns:
    """MXFP4 of gpt-oss: 32 values in 16 bytes with one scale, along the input; output before input."""
    return {"_blocks": ("lead out in/32 16",), "_scales": ("lead out in/32",)}


def _bitsandbytes(settings: Mapping[str, Any]) -> _Patterns:
    raise PlanError(
        "a checkpoint quantized by bitsandbytes cannot be split: each weight is one flat run of blocks whose full shape stands "
        "in a serialized state beside it",
        "split the unquantized checkpoint, and let each rank quantize on load",
    )


def _per_integer(settings: Mapping[str, Any]) -> int:
    return _integers(int(settings.get("bits", settings.get("w_bit", 4))))


def _integers(bits: int) -> int:
    """Values in a 32-bit integer."""
    if 32 % bits:
        raise PlanError(f"weights of {bits} bits cannot be split: their values run across the 32-bit integers that hold them")
    return 32 // bits


def _groups(settings: Mapping[str, Any]) -> str:
    """The input dimension in groups that share a scale; one group for all where the size is -1."""
    size = int(settings.get("group_size", settings.get("q_group_size", 128)))
    return f"in/{size}" if size > 0 else "1"


_METHODS = {
    "fp8": _fp8,
    "gptq": _gptq,
    "awq": _awq,
    "compressed-tensors": _compressed,
    "modelopt": _modelopt,
    "mxfp4": _mxfp4,
    "bitsandbytes": _bitsandbytes,
}
