"""Reference encoders and dequantizers of quantized weights, written from each format's published definition.

A dequantizer sees the tensors of one weight as one folder holds them (the whole model's, or one rank's alone) and
gives the weight as float32, output before input. An encoder makes such tensors from random integers and random
scales. Nothing here knows of ranks, but for one thing that GPTQ needs: see ``group_numbers``.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

Array = np.ndarray
Rng = np.random.Generator


@dataclass(frozen=True)
class Stored:
    """A tensor as safetensors has it: the name of its dtype, and its elements as integers where numpy has no such
    float."""

    dtype: str
    array: Array


NUMPY = {
    "U8": np.uint8, "I8": np.int8, "I32": np.int32, "I64": np.int64, "F16": np.float16, "F32": np.float32,
    "BF16": np.uint16, "F8_E4M3": np.uint8, "F8_E8M0": np.uint8,
}  # fmt: skip


def values(stored: Stored) -> Array:
    """The elements as float32."""
    if stored.dtype == "F8_E4M3":
        return E4M3[stored.array]
    if stored.dtype == "F8_E8M0":
        return e8m0(stored.array)
    if stored.dtype == "BF16":
        return (stored.array.astype(np.uint32) << 16).view(np.float32)
    return stored.array.astype(np.float32)


def _e4m3() -> Array:
    """Float8 E4M3 without infinities (OCP 8-bit floating point, revision 1.0): bias 7, NaN where all other bits are
    1."""
    code = np.arange(256)
    exponent, mantissa = code >> 3 & 15, code & 7
    size = np.where(exponent == 0, mantissa / 8 * 2.0**-6, np.ldexp(1 + mantissa / 8, exponent - 7))
    size = np.where(code & 127 == 127, np.nan, size)
    return np.where(code & 128, -size, size).astype(np.float32)


E4M3 = _e4m3()
#: Float4 E2M1 (OCP microscaling formats, revision 1.0): a sign and 0, 0.5, 1, 1.5, 2, 3, 4, 6.
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)


def e8m0(codes: Array) -> Array:
    """Powers of two (OCP microscaling formats, revision 1.0): 2 ** (code - 127), and NaN for 255."""
    # not exp2, whose last bit is wrong on some processors
    powers = np.ldexp(np.float32(1), np.minimum(codes, 254).astype(np.int32) - 127)
    return np.where(codes == 255, np.float32(np.nan), powers)


# ---------------------------------------------------------------------------------------------------------- packing


def pack(numbers: Array, bits: int, axis: int, order: tuple[int, ...] | None = None) -> Array:
    """Lay neighbours along an axis into int32s, the first lowest, or those of each integer in the given order.

    Where ``bits`` do not divide 32, values run across: 32 values of 3 bits are three integers.
    """
    split = np.moveaxis(numbers, axis, -1).astype(np.uint32)
    if order:
        split = split.reshape(*split.shape[:-1], -1, len(order))[..., order].reshape(split.shape)
    each = (split[..., None] >> np.arange(bits, dtype=np.uint32) & 1).reshape(*split.shape[:-1], -1, 32)
    words = (each << np.arange(32, dtype=np.uint32)).sum(-1, dtype=np.uint32)
    return np.moveaxis(words.view(np.int32), -1, axis)


def unpack(packed: Array, bits: int, axis: int, order: tuple[int, ...] | None = None) -> Array:
    """The inverse of ``pack``."""
    words = np.moveaxis(np.ascontiguousarray(packed).view(np.uint32), axis, -1)
    each = (words[..., None] >> np.arange(32, dtype=np.uint32) & 1).reshape(*words.shape[:-1], -1, bits)
    numbers = (each << np.arange(bits, dtype=np.uint32)).sum(-1, dtype=np.int64)
    if order:
        numbers = numbers.reshape(*numbers.shape[:-1], -1, len(order))[..., np.argsort(order)].reshape(numbers.shape)
    return np.moveaxis(numbers, -1, axis)


def nibbles(packed: Array, axis: int = -1) -> Array:
    """Two values of 4 bits to a byte along an axis, the low half first."""
    split = np.moveaxis(packed, axis, -1)[..., None] >> np.array([0, 4], np.uint8) & 15
    return np.moveaxis(split.reshape(*split.shape[:-2], -1), -1, axis)


def spread(scales: Array, size: int, axis: int, length: int) -> Array:
    """Each scale for the ``size`` elements that it covers (the last block may be shorter)."""
    return np.repeat(scales, size, axis).take(np.arange(length), axis)


# ---------------------------------------------------------------------------------------------------------- methods

Tensors = Mapping[str, Stored]


@dataclass(frozen=True)
class Method:
    """One way to quantize: what config.json says, and how to make and read the tensors of a weight.

    ``encode(rng, shape)`` is given the weight's shape, output before input, and gives its tensors by the end of
    their names: ``.qweight`` of a module's weight, ``_scale_inv`` and ``""`` of a parameter that is fused over experts.
    ``block`` is the size in which dimensions are dealt: four ranks get whole blocks, eight would cut one (None:
    nothing is cut). ``unit`` is what all sizes of the model are multiples of. The weights of which the name ends with
    one of ``plain`` are not quantized.
    """

    settings: dict[str, Any]
    encode: Callable[[Rng, tuple[int, ...]], dict[str, Stored]]
    decode: Callable[[Tensors], Array]
    block: int | None
    fused: bool = False
    input_first: bool = False
    config: dict[str, Any] = field(default_factory=dict)
    plain: tuple[str, ...] = ()
    own_unit: int | None = None

    @property
    def unit(self) -> int:
        return self.own_unit or self.block or 8


def _scale(rng: Rng, *shape: int, dtype: str = "F32") -> Stored:
    drawn = rng.uniform(0.01, 1, shape).astype(np.float32)
    if dtype == "BF16":
        return Stored("BF16", (drawn.view(np.uint32) >> 16).astype(np.uint16))
    return Stored(dtype, drawn.astype(NUMPY[dtype]))


def _codes(rng: Rng, *shape: int, dtype: str = "F8_E4M3") -> Stored:
    """Random elements of one byte, none of them a NaN."""
    drawn = rng.integers(0, 256, shape, np.uint8)
    if dtype == "F8_E4M3":
        drawn = np.where(drawn & 127 == 127, drawn - 1, drawn)
    return Stored(dtype, drawn.view(NUMPY[dtype]))


def _exponents(rng: Rng, *shape: int, dtype: str = "U8") -> Stored:
    return Stored(dtype, rng.integers(117, 137, shape, np.uint8))


def _gptq(
    bits: int, size: int, act_order: bool = False, bias: int = 1, module_bias: bool = False, **settings: Any
) -> Method:
    """GPTQ: AutoGPTQ, auto_gptq/nn_modules/qlinear/qlinear_cuda_old.py (``pack`` and ``forward``).

    ``weight[i, o] = scales[g, o] * (qweight[i, o] - (qzeros[g, o] + 1))`` with ``g = g_idx[i]``; GPTQModel's "gptq_v2"
    does not add the one. With ``module_bias`` each module has a bias beside these, of zeros.
    """

    def encode(rng: Rng, shape: tuple[int, ...]) -> dict[str, Stored]:
        outputs, inputs = shape
        groups = -(-inputs // size) if size > 0 else 1
        g_idx = np.arange(inputs) // size if size > 0 else np.zeros(inputs)
        return {
            ".qweight": Stored("I32", pack(rng.integers(0, 2**bits, (inputs, outputs)), bits, 0)),
            ".qzeros": Stored("I32", pack(rng.integers(0, 2**bits, (groups, outputs)), bits, 1)),
            ".scales": _scale(rng, groups, outputs, dtype="F16"),
            ".g_idx": Stored("I32", (rng.permutation(g_idx) if act_order else g_idx).astype(np.int32)),
            **({".bias": Stored("F16", np.zeros(outputs, np.float16))} if module_bias else {}),
        }

    def decode(tensors: Tensors) -> Array:
        groups = group_numbers(tensors[".g_idx"].array, act_order=act_order)
        zeros = unpack(tensors[".qzeros"].array, bits, 1) + bias
        scales = values(tensors[".scales"])
        return (scales[groups] * (unpack(tensors[".qweight"].array, bits, 0) - zeros[groups])).astype(np.float32).T

    named = {"quant_method": "gptq", "bits": bits, "group_size": size, "desc_act": act_order, **settings}
    return Method(named, encode, decode, max(size, 32 if bits == 3 else 8))


def group_numbers(g_idx: Array, *, act_order: bool) -> Array:
    """The row of the scales that each input uses.

    With act-order a folder holds all groups. Without, a rank of a row-parallel weight holds its own groups, in order,
    while ``g_idx`` keeps the numbers that they have in the whole model: they are numbered anew.
    """
    return g_idx if act_order else np.unique(g_idx, return_inverse=True)[1]


def _awq(size: int) -> Method:
    """AWQ: AutoAWQ, awq/modules/linear/gemm.py and awq/utils/packing_utils.py.

    ``weight[i, o] = scales[g, o] * (qweight[i, o] - qzeros[g, o])``; of eight outputs, the first, third … come first.
    """
    order = (0, 2, 4, 6, 1, 3, 5, 7)

    def encode(rng: Rng, shape: tuple[int, ...]) -> dict[str, Stored]:
        outputs, inputs = shape
        groups = inputs // size if size > 0 else 1
        return {
            ".qweight": Stored("I32", pack(rng.integers(0, 16, (inputs, outputs)), 4, 1, order)),
            ".qzeros": Stored("I32", pack(rng.integers(0, 16, (groups, outputs)), 4, 1, order)),
            ".scales": _scale(rng, groups, outputs, dtype="F16"),
        }

    def decode(tensors: Tensors) -> Array:
        numbers, zeros = (unpack(tensors[name].array, 4, 1, order) for name in (".qweight", ".qzeros"))
        length = len(numbers)
        each = size if size > 0 else length
        scales = spread(values(tensors[".scales"]), each, 0, length)
        return (scales * (numbers - spread(zeros, each, 0, length))).astype(np.float32).T

    return Method(
        {"quant_method": "awq", "bits": 4, "group_size": size, "zero_point": True, "version": "gemm"},
        encode,
        decode,
        max(size, 8),
    )


def _packed(bits: int, size: int | None, symmetric: bool = True, actorder: str | None = None, **group: Any) -> Method:
    """compressed-tensors "pack-quantized": compressors/pack_quantized/base.py and helpers.py;
    quantization/lifecycle/forward.py.

    Numbers are stored with ``2 ** (bits - 1)`` added, ``weight = scale * (number - zero_point)``. Zero points are
    packed along the output. ``weight_shape`` says how many inputs there are in the last integer of a row.
    """
    half = 2 ** (bits - 1)

    def encode(rng: Rng, shape: tuple[int, ...]) -> dict[str, Stored]:
        outputs, inputs = shape
        groups = inputs // size if size else 1
        found = {
            ".weight_packed": Stored("I32", pack(rng.integers(0, 2**bits, (outputs, inputs)), bits, 1)),
            ".weight_scale": _scale(rng, outputs, groups, dtype="BF16"),
            ".weight_shape": Stored("I64", np.array([outputs, inputs])),
        }
        if not symmetric:
            found[".weight_zero_point"] = Stored("I32", pack(rng.integers(0, 2**bits, (outputs, groups)), bits, 0))
        if actorder:
            found[".weight_g_idx"] = Stored(
                "I32", rng.permutation(np.arange(inputs) // (size or inputs)).astype(np.int32)
            )
        return found

    def decode(tensors: Tensors) -> Array:
        outputs, length = tensors[".weight_shape"].array
        numbers = unpack(tensors[".weight_packed"].array, bits, 1)[:outputs, :length] - half
        groups = tensors[".weight_g_idx"].array if actorder else np.arange(length) // (size or length)
        scales = values(tensors[".weight_scale"])
        zeros = (
            np.zeros(scales.shape, np.int64)
            if symmetric
            else unpack(tensors[".weight_zero_point"].array, bits, 0) - half
        )
        return (scales[:, groups] * (numbers - zeros[:, groups])).astype(np.float32)

    weights = {"num_bits": bits, "type": "int", "symmetric": symmetric, "group_size": size, "actorder": actorder}
    weights["strategy"] = "group" if size else "channel"
    return Method(
        _groups({"targets": ["Linear"], "weights": weights, **group}, "pack-quantized"),
        encode,
        decode,
        max(size or 0, 32 // bits),
    )


def _groups(group: dict[str, Any], layout: str) -> dict[str, Any]:
    return {
        "quant_method": "compressed-tensors",
        "format": layout,
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
    }


def _scaled(
    settings: dict[str, Any], kind: str, *, scale: str = ".weight_scale", dtype: str = "F8_E4M3",
    block: tuple[int, int] = (0, 0), extra: tuple[str, ...] = (), zero: str = "",
) -> Method:  # fmt: skip
    """Values of one byte times a scale: for the tensor ("", "1"), each output ("out", "out 1") or a block of outputs
    and inputs.

    transformers, integrations/finegrained_fp8.py and fbgemm_fp8.py; compressed-tensors,
    compressors/naive_quantized/base.py; ModelOpt, torch/export/quant_utils.py; bitsandbytes, functional.py (``SCB``
    over 127); DeepSeek-V4, inference/convert.py (``scale``); vllm-ascend, quantization/methods (``weight_offset``).
    """
    rows, columns = block

    def encode(rng: Rng, shape: tuple[int, ...]) -> dict[str, Stored]:
        *lead, outputs, inputs = shape
        grid = (*lead, -(-outputs // rows), -(-inputs // columns)) if rows else ()
        shapes = {"": (), "1": (1,), "out": (*lead, outputs), "out 1": (*lead, outputs, 1), "block": grid}
        shapes["block 4"] = grid and (grid[0], 1, grid[1], 1)
        found = {".weight": _codes(rng, *shape, dtype=dtype), scale: _scale(rng, *shapes[kind])}
        if zero:
            found[zero] = Stored("I8", rng.integers(-9, 9, shapes[kind], np.int8))
        return found | {name: _scale(rng, *((outputs,) if name in _BY_OUTPUT else ())) for name in extra}

    def decode(tensors: Tensors) -> Array:
        numbers = values(tensors[".weight"])
        scales = values(tensors[scale])
        if kind.startswith("block"):
            scales = scales.reshape(scales.shape[0], -1) if kind == "block 4" else scales
            scales = spread(spread(scales, rows, -2, numbers.shape[-2]), columns, -1, numbers.shape[-1])
        elif kind == "out":
            scales = scales[..., None]
        numbers = numbers - values(tensors[zero]) if zero else numbers
        return (numbers * scales).astype(np.float32)

    return Method(settings, encode, decode, max(block) or None)


def _fused_fp8(settings: dict[str, Any], kind: str, scale: str, block: tuple[int, int] = (0, 0)) -> Method:
    """Experts fused in one parameter, stored input first: values of one byte and scales that lie as the values do.

    transformers, integrations/finegrained_fp8.py (``gate_up_proj_scale_inv``) and fbgemm_fp8.py
    (``FbgemmFp8Llama4TextExperts``, a scale for each output: [expert, 1, output] for gate and up, [expert, output, 1]
    for down).
    """

    def encode(rng: Rng, shape: tuple[int, ...]) -> dict[str, Stored]:
        experts, outputs, inputs = shape
        rows, columns = block
        shapes = {"": (), "expert": (experts,), "1 out": (experts, 1, outputs), "out 1": (experts, outputs, 1)}
        if rows:
            shapes["block"] = (experts, -(-inputs // columns), -(-outputs // rows))
        drawn = "out 1" if kind == "1 out" and outputs < inputs else kind
        return {"": _codes(rng, experts, inputs, outputs), scale: _scale(rng, *shapes[drawn])}

    def decode(tensors: Tensors) -> Array:
        numbers, scales = values(tensors[""]), values(tensors[scale])
        if kind == "block":
            scales = spread(spread(scales, block[1], 1, numbers.shape[1]), block[0], 2, numbers.shape[2])
        elif kind == "expert":
            scales = scales[:, None, None]
        elif kind == "1 out":
            scales = scales.reshape(len(scales), 1, -1)
        return (numbers * scales).astype(np.float32).transpose(0, 2, 1)

    return Method(settings, encode, decode, max(block) or None, fused=True, input_first=True)


def _fp4(
    settings: dict[str, Any],
    names: tuple[str, str, str],
    size: int,
    input_first: bool = False,
    dtypes: tuple[str, str] = ("U8", "U8"),
) -> Method:
    """Two E2M1 values to a byte along the input, the low half first, with a scale for ``size`` of them.

    NVFP4: E4M3 scales for 16 and one for the tensor, which ModelOpt multiplies by
    (torch/quantization/qtensor/nvfp4_tensor.py) and compressed-tensors divides by (compressors/nvfp4/base.py,
    quantization/lifecycle/forward.py). MXFP4: powers of two for 32 (compressors/mxfp4/base.py). ModelOpt turns fused
    experts that the model has input first back after packing.
    """
    weight, scale, second = names
    divide = second == ".weight_global_scale"

    def encode(rng: Rng, shape: tuple[int, ...]) -> dict[str, Stored]:
        *lead, outputs, inputs = shape
        grid = (*lead, outputs, inputs // size)
        found = {weight: _codes(rng, *lead, outputs, inputs // 2, dtype=dtypes[0])}
        found[scale] = _codes(rng, *grid) if second else _exponents(rng, *grid, dtype=dtypes[1])
        if input_first:
            found = {name: Stored(t.dtype, np.ascontiguousarray(t.array.swapaxes(-1, -2))) for name, t in found.items()}
        return found | ({second: _scale(rng, *([1] if divide else []))} if second else {})

    def decode(tensors: Tensors) -> Array:
        packed, scales = tensors[weight].array.view(np.uint8), tensors[scale]
        if input_first:
            packed, scales = packed.swapaxes(-1, -2), Stored(scales.dtype, scales.array.swapaxes(-1, -2))
        numbers = E2M1[nibbles(packed)]
        each = values(scales) if second else e8m0(scales.array)
        whole = values(tensors[second]) if second else np.float32(1)
        each = each / whole if divide else each * whole
        return (numbers * spread(each, size, -1, numbers.shape[-1])).astype(np.float32)

    return Method(settings, encode, decode, size, fused=not weight.startswith("."), input_first=input_first)


def _int4_awq(size: int) -> Method:
    """ModelOpt's W4A8_AWQ: two's complement, two outputs to a byte (torch/export/quant_utils.py,
    ``pack_int4_in_uint8``).

    ``weight = number * weight_scale * pre_quant_scale``: the activations are multiplied by ``pre_quant_scale`` before.
    """

    def encode(rng: Rng, shape: tuple[int, ...]) -> dict[str, Stored]:
        outputs, inputs = shape
        return {
            ".weight": _codes(rng, outputs // 2, inputs, dtype="U8"),
            ".weight_scale": _scale(rng, outputs, inputs // size),
            ".weight_scale_2": _scale(rng),
            ".pre_quant_scale": _scale(rng, inputs, dtype="BF16"),
        }

    def decode(tensors: Tensors) -> Array:
        numbers = (nibbles(tensors[".weight"].array, 0).astype(np.int64) + 8) % 16 - 8
        scales = spread(values(tensors[".weight_scale"]), size, 1, numbers.shape[1])
        return (numbers * scales * values(tensors[".pre_quant_scale"])).astype(np.float32)

    return Method({"quant_method": "modelopt", "quant_algo": "W4A8_AWQ", "group_size": size}, encode, decode, size)


def _gpt_oss() -> Method:
    """MXFP4 as gpt-oss publishes it: transformers, integrations/mxfp4.py (``convert_moe_packed_tensors``).

    ``_blocks`` is [expert, output, input / 32, 16], two E2M1 values to a byte, the low half first; ``_scales`` are
    powers of two.
    """

    def encode(rng: Rng, shape: tuple[int, ...]) -> dict[str, Stored]:
        experts, outputs, inputs = shape
        blocks = _codes(rng, experts, outputs, inputs // 32, 16, dtype="U8")
        return {"_blocks": blocks, "_scales": _exponents(rng, experts, outputs, inputs // 32)}

    def decode(tensors: Tensors) -> Array:
        numbers = E2M1[nibbles(tensors["_blocks"].array)] * e8m0(tensors["_scales"].array)[..., None]
        return numbers.reshape(*numbers.shape[:2], -1).astype(np.float32)

    return Method({"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}, encode, decode, 32, fused=True)


#: The values of NF4 (QLoRA, arXiv:2305.14314, appendix E) and of FP4, as bitsandbytes has them (functional.py,
#: ``get_4bit_type``).
NF4 = np.array(
    [-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
     -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
     0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0], np.float32,
)  # fmt: skip
FP4 = np.array([0, 0.0625, 8, 12, 4, 6, 2, 3, -0.0, -0.0625, -8, -12, -4, -6, -2, -3], np.float32) / 12


def _bitsandbytes(kind: str, double: bool = False) -> Method:
    """bitsandbytes' 4 bits: functional.py, ``quantize_4bit``, ``dequantize_4bit`` and ``QuantState``.

    One row of values, two to a byte, the high half first; ``absmax`` for 64 of them, which may be quantized themselves
    (one byte each, ``nested_absmax`` for 256 of them, one offset for all). Block sizes, the offset and the weight's
    shape are JSON in ``quant_state``.
    """
    state = f".weight.quant_state.bitsandbytes__{kind}"

    def encode(rng: Rng, shape: tuple[int, ...]) -> dict[str, Stored]:
        count = -(-math.prod(shape) // 64)
        settings = {"quant_type": kind, "blocksize": 64, "dtype": "bfloat16", "shape": shape}
        found = {
            ".weight": _codes(rng, -(-math.prod(shape) // 2), 1, dtype="U8"),
            ".weight.absmax": _codes(rng, count, dtype="U8") if double else _scale(rng, count),
            ".weight.quant_map": Stored("F32", {"nf4": NF4, "fp4": FP4}[kind]),
        }
        if double:
            found[".weight.nested_absmax"] = _scale(rng, -(-count // 256))
            found[".weight.nested_quant_map"] = Stored("F32", np.linspace(-1, 1, 256, dtype=np.float32))
            settings |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": 1.5}
        return found | {state: Stored("U8", np.frombuffer(json.dumps(settings).encode(), np.uint8))}

    def decode(tensors: Tensors) -> Array:
        settings = json.loads(tensors[state].array.tobytes())
        count, scales = math.prod(settings["shape"]), values(tensors[".weight.absmax"])
        if double:
            nested = spread(tensors[".weight.nested_absmax"].array, settings["nested_blocksize"], 0, len(scales))
            codes = tensors[".weight.nested_quant_map"].array[tensors[".weight.absmax"].array]
            scales = codes * nested + np.float32(settings["nested_offset"])
        packed = tensors[".weight"].array.reshape(-1)
        numbers = tensors[".weight.quant_map"].array[np.stack([packed >> 4, packed & 15], 1).reshape(-1)]
        return (numbers[:count] * spread(scales, settings["blocksize"], 0, count)).reshape(settings["shape"])

    named = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": kind}
    if double:  # 256 blocks of 64 are more than a rank has of a row: only column-parallel weights
        rows = ("o_proj.weight", "down_proj.weight")
        return Method({**named, "bnb_4bit_use_double_quant": True}, encode, decode, None, plain=rows, own_unit=128)
    return Method(named, encode, decode, 64)


_FLOAT = {"num_bits": 8, "type": "float", "symmetric": True}
_INPUT = (".input_scale",)
_BY_OUTPUT = (".deq_scale", ".quant_bias")
_COMPRESSED_FP4 = (".weight_packed", ".weight_scale", ".weight_global_scale")
_MODELOPT = {"quant_method": "modelopt", "ignore": ["lm_head"]}
_NV_WEIGHTS = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}
_MX_WEIGHTS = {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32}


def _linear(weights: dict[str, Any], layout: str) -> dict[str, Any]:
    return _groups({"targets": ["Linear"], "weights": weights}, layout)


_QUARK_FP8 = {"weight": {"dtype": "fp8_e4m3", "qscheme": "per_tensor"}}
_QUARK_FP4 = {"weight": {"dtype": "fp4", "qscheme": "per_group", "group_size": 32}}
_INT8 = {"num_bits": 8, "type": "int", "strategy": "channel"}
_BLOCKS = {**_FLOAT, "strategy": "block", "block_structure": [16, 32]}
_NVFP4 = {**_MODELOPT, "quant_algo": "NVFP4"}
_FP8 = {"quant_method": "fp8", "activation_scheme": "static"}

METHODS: dict[str, Method] = {
    "gptq": _gptq(4, 16),
    "gptq-8": _gptq(8, 16),
    "gptq-3": _gptq(3, 16),
    "gptq-3-act-order": _gptq(3, 16, act_order=True),
    "gptq-bias": _gptq(4, 16, module_bias=True),
    "gptq-v2": _gptq(4, 16, bias=0, checkpoint_format="gptq_v2"),
    "gptq-act-order": _gptq(4, 8, act_order=True),
    "gptq-one-group": _gptq(4, -1),
    "awq": _awq(16),
    "awq-one-group": _awq(-1),
    "packed-4": _packed(4, 32),
    "packed-4-zeros": _packed(4, 16, symmetric=False),
    "packed-4-act-order": _packed(4, 8, actorder="group"),
    "packed-8-channel-zeros": _packed(8, None, symmetric=False),
    "int8": _scaled(_linear(_INT8, "int-quantized"), "out 1", dtype="I8"),
    "int8-zeros": _scaled(
        _linear({**_INT8, "symmetric": False}, "int-quantized"), "out 1", dtype="I8", zero=".weight_zero_point"
    ),
    "float8-tensor": _scaled(_linear({**_FLOAT, "strategy": "tensor"}, "float-quantized"), "1", extra=_INPUT),
    "float8-channel": _scaled(_linear({**_FLOAT, "strategy": "channel"}, "float-quantized"), "out 1"),
    "float8-block": _scaled(_linear(_BLOCKS, "float-quantized"), "block", block=(16, 32)),
    "compressed-nvfp4": _fp4(_linear(_NV_WEIGHTS, "nvfp4-pack-quantized"), _COMPRESSED_FP4, 16),
    "compressed-mxfp4": _fp4(_linear(_MX_WEIGHTS, "mxfp4-pack-quantized"), (".weight_packed", ".weight_scale", ""), 32),
    "fp8-block": _scaled(
        {"quant_method": "fp8", "weight_block_size": [32, 16]}, "block", scale=".weight_scale_inv", block=(32, 16)
    ),
    "fp8-block-scale": _scaled(
        {"quant_method": "fp8", "weight_block_size": [32, 16]}, "block", scale=".scale", block=(32, 16)
    ),
    "fp8-beside-fp4": _fp4(
        {"quant_method": "fp8", "weight_block_size": [32, 16]}, (".weight", ".scale", ""), 32, dtypes=("I8", "F8_E8M0")
    ),
    "fp8-beside-mxfp4": _fp4(
        {"quant_method": "fp8", "weight_block_size": [32, 16], "store_dtype": "mxfp4"},
        (".weight", ".weight_scale", ""),
        32,
    ),
    "w4afp8": _fp4(
        {"quant_method": "w4afp8", "group_size": 32}, (".weight", ".weight_scale_inv", ""), 32, dtypes=("I8", "F8_E8M0")
    ),
    "blockwise-int8": _scaled(
        {"quant_method": "blockwise_int8", "weight_block_size": [32, 16]},
        "block",
        scale=".weight_scale_inv",
        dtype="I8",
        block=(32, 16),
    ),
    "w8a8-int8": _scaled({"quant_method": "w8a8_int8"}, "out 1", dtype="I8"),
    "w8a8-fp8": _scaled({"quant_method": "w8a8_fp8"}, "out 1"),
    "mxfp8": _scaled(
        {"quant_method": "mxfp8", "weight_block_size": [1, 32]}, "block", scale=".weight_scale_inv", block=(1, 32)
    ),
    "fp8-tensor": _scaled(_FP8, "", scale=".weight_scale_inv", extra=(".activation_scale",)),
    "fp8-static": _scaled(_FP8, "1", extra=_INPUT),
    "fbgemm": _scaled({"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0}, "out 1"),
    "modelopt-fp8": _scaled({**_MODELOPT, "quant_algo": "FP8"}, "", extra=_INPUT),
    "modelopt-fp8-channel": _scaled({**_MODELOPT, "quant_algo": "FP8_PER_CHANNEL_PER_TOKEN"}, "out"),
    "modelopt-fp8-block": _scaled({**_MODELOPT, "quant_algo": "FP8_PB_WO"}, "block 4", block=(128, 128)),
    "modelopt-nvfp4": _fp4(_NVFP4, (".weight", ".weight_scale", ".weight_scale_2"), 16),
    "modelopt-int4-awq": _int4_awq(16),
    "no-config-fp8": _scaled({}, "", extra=_INPUT),
    "no-config-int8": _scaled({}, "out 1", dtype="I8", zero=".weight_offset", extra=(*_INPUT, *_BY_OUTPUT)),
    "quark-fp8": _scaled({"quant_method": "quark", "global_quant_config": _QUARK_FP8}, "", extra=_INPUT),
    "quark-fp8-kv": _scaled({"quant_method": "quark", "global_quant_config": _QUARK_FP8}, "", extra=(".output_scale",)),
    "quark-mxfp4": _fp4(
        {"quant_method": "quark", "global_quant_config": _QUARK_FP4}, (".weight", ".weight_scale", ""), 32
    ),
    "bitsandbytes-int8": _scaled(
        {"quant_method": "bitsandbytes", "load_in_8bit": True}, "out", scale=".SCB", dtype="I8"
    ),
    "bitsandbytes-nf4": _bitsandbytes("nf4"),
    "bitsandbytes-fp4": _bitsandbytes("fp4"),
    "bitsandbytes-nf4-double": _bitsandbytes("nf4", double=True),
    "gpt-oss": _gpt_oss(),
    "fused-fp8-block": _fused_fp8(
        {"quant_method": "fp8", "weight_block_size": [16, 32]}, "block", "_scale_inv", (16, 32)
    ),
    "fused-fp8-expert": _fused_fp8({"quant_method": "fp8"}, "expert", "_scale_inv"),
    "fused-fbgemm": _fused_fp8({"quant_method": "fbgemm_fp8"}, "1 out", "_scale"),
    "fused-modelopt-fp8": _fused_fp8({**_MODELOPT, "quant_algo": "FP8"}, "", "_weight_scale"),
    "fused-modelopt-nvfp4": _fp4(_NVFP4, ("", "_weight_scale", "_weight_scale_2"), 16, input_first=True),
}
