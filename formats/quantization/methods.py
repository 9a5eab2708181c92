"""The settings of quantization in ``config.json``, and the patterns of each method, with their sources.

A method is a function from its settings in ``config.json`` to a table of patterns (see ``companions``) or, where
modules have settings of their own, to a scheme.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from formats.documents import Reader, Unfit, anything, items, json_object, mapping, optional, text, unfit, whole
from formats.errors import PlanError
from formats.quantization.companions import (
    BITSANDBYTES_STATES,
    OF_ACTIVATIONS,
    OF_KEYS,
    OF_QUERIES,
    Entry,
    Refused,
    Scheme,
    Table,
)

_KEYS = ("quantization_config", "compression_config")
"""Today's name and an older one."""
_INNER = ("quantization_config", "quantization")
"""What settings may hold once more: compressed-tensors' in a config of its own, ModelOpt's beside its producer."""
_DEEPEST = 3
"""Sections within sections that are searched."""


def quantization_settings(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The settings of a checkpoint's quantization, from the first place in ``config.json`` that has any: its top, then
    its sections as they stand (``text_config``). Empty if there are none.
    """
    place = _place(config, _DEEPEST)
    section = config
    for key in place or ():
        section = section[key]
    if not place:
        return {}
    inner: Mapping[str, Any] = next((section[key] for key in _INNER if isinstance(section.get(key), dict)), {})
    return {**section, **inner}


def without_quantization(config: Mapping[str, Any]) -> dict[str, Any]:
    """The same config without the settings of quantization, at its top and in its sections."""
    return {
        key: without_quantization(value) if isinstance(value, dict) else value
        for key, value in config.items()
        if key not in _KEYS
    }


def _place(config: Mapping[str, Any], depth: int) -> tuple[str, ...] | None:
    """The keys that lead to the settings."""
    for key in _KEYS:
        if isinstance(config.get(key), dict) and config[key]:
            return (key,)
    sections = ((key, value) for key, value in config.items() if isinstance(value, dict) and depth)
    inner = ((key, _place(section, depth - 1)) for key, section in sections)
    return next(((key, *place) for key, place in inner if place), None)


_COUNT = optional(whole(-1, 1 << 30))
_BLOCK = optional(items(whole(1, 1 << 30), 2))


def _expressions(value: object, where: str) -> None:
    """An object by regular expressions."""
    for name in json_object(value, where):
        _expression(name.removeprefix("-:").removeprefix("+:"), where)


def _expression(pattern: str, where: str) -> None:
    try:
        re.compile(pattern)
    except (re.error, OverflowError, RecursionError):
        raise unfit(where, "a regular expression", pattern) from None


def _target(value: object, where: str) -> None:
    name = text(value, where)
    if name.startswith("re:"):
        _expression(name[3:], where)


_KINDS: Mapping[str, Reader[Any]] = {
    **dict.fromkeys(("bits", "w_bit", "num_bits"), optional(whole(0, 1024))),
    **dict.fromkeys(("group_size", "q_group_size"), _COUNT),
    **dict.fromkeys(("weight_block_size", "block_structure"), _BLOCK),
    **dict.fromkeys(("extra_config", "quantized_layers", "config_groups"), optional(mapping(anything))),
    **dict.fromkeys(("weights", "global_quant_config"), optional(json_object)),
    "targets": optional(items(_target)),
}
_OUTERMOST: Mapping[str, Reader[Any]] = {"dynamic": optional(_expressions)}
"""What some word means at the top alone: compressed-tensors says of weights whether they are ``dynamic``."""


def check_settings(settings: Mapping[str, Any], method: str) -> None:
    """Raise PlanError, which names the setting, for settings of a known method that are not of their kind."""
    todo = [(settings, "quantization_config")]
    try:
        while todo:
            section, where = todo.pop()
            for key, value in section.items():
                kind = _OUTERMOST.get(key) if section is settings else None
                (kind or _KINDS.get(key, anything))(value, f"{where}.{key}")
                if isinstance(value, dict):
                    todo.append((value, f"{where}.{key}"))
    except Unfit as error:
        raise PlanError(f"config.json, quantized by '{method}': {error}") from None


def method_of(settings: Mapping[str, Any]) -> str:
    """The name of the quantization method, in small letters; empty where the settings name none."""
    producer = settings.get("producer")
    named = producer.get("name") if isinstance(producer, dict) else None
    return str(settings.get("quant_method") or settings.get("quant_library") or named or "").lower()


_KEY = "weight_block_size"


def block_size(config: Mapping[str, Any]) -> tuple[int, int] | None:
    """Rows and columns of a block; None where the settings name no block size."""
    block = quantization_settings(config).get(_KEY)
    if isinstance(block, (list, tuple)) and len(block) == 2 and all(type(n) is int and n > 0 for n in block):
        return block[0], block[1]
    return None


def with_block_size(config: Mapping[str, Any], block: tuple[int, int]) -> dict[str, Any]:
    """The same config with another block size, in the place where ``quantization_settings`` found it."""
    return _with_blocks(config, _place(config, _DEEPEST) or (), [*block])


def _with_blocks(at: Mapping[str, Any], place: tuple[str, ...], block: list[int]) -> dict[str, Any]:
    if not place:
        inner = next((name for name in _INNER if isinstance(at.get(name), dict) and _KEY in at[name]), None)
        return {**at, inner: {**at[inner], _KEY: block}} if inner else {**at, _KEY: block}
    return {**at, place[0]: _with_blocks(at[place[0]], place[1:], block)}


def scheme_of(config: Mapping[str, Any]) -> Scheme:
    """What the quantization settings of a config say of names. Where they name no method, scales are read as ModelOpt
    writes them.

    Raises PlanError for settings that are not of their kind.
    """
    settings = quantization_settings(config)
    if not settings:
        modelopt = {suffix: entry for suffix, entry in _modelopt({}).items() if suffix != " U8"}
        return Scheme({**modelopt, **_ASCEND})
    method = method_of(settings)
    if method not in _METHODS:
        return Scheme({})
    check_settings(settings, method)
    known = _METHODS[method]
    table = known(settings) if callable(known) else known
    return table if isinstance(table, Scheme) else Scheme(table)


def unknown_method(config: Mapping[str, Any], tensor: str) -> str | None:
    """The method by which a checkpoint is quantized, if it is none of those that are known here.

    ``tensor`` is the name of a tensor that does not fit.

    MLX names none: ``{"quantization": {"group_size": 64, "bits": 4}}`` (mlx-lm, utils.py). msModelSlim says it in a
    file of its own (``quant_model_description.json``).
    """
    settings = quantization_settings(config)
    method = method_of(settings)
    if method:
        return None if method in _METHODS else f"'{method}'"
    mlx = config.get("quantization")
    if any(isinstance(place, Mapping) and {"bits", "group_size"} <= place.keys() for place in (settings, mlx)):
        return "MLX"
    return None


def _tables_by_module(
    method: Callable[[Mapping[str, Any]], Table], settings: Mapping[str, Any], named: Mapping[str, Any]
) -> dict[str, Table]:
    """The tables of modules that have settings over the general ones; one for all that have the same."""
    settings_of = {name: stated if isinstance(stated, dict) else {} for name, stated in named.items()}
    tables = {repr(stated): stated for stated in settings_of.values()}
    table_of = {key: method({**settings, **stated}) for key, stated in tables.items()}
    return {name: table_of[repr(stated)] for name, stated in settings_of.items()}


_SCALAR = ("", "1")
_BY_ROW = ("lead out 1", "lead out")
# "lead" before "1": of fused experts a rank may hold one alone; without experts "lead" is "", and does not fit
_BY_EXPERT = ("", "lead", "1", "lead 1 1")


def _of_attention(shapes: tuple[str, ...]) -> dict[str, Entry]:
    """Scales of the cache, of the queries and of the attention's own probabilities; ``{}`` is the number of heads.

    One for the tensor or, in compressed-tensors ("attn_head"), one for each head, with two dimensions of 1 behind it.
    ``prob_output_scale`` is Quark's name. Sources: vLLM, model_executor/model_loader/weight_utils.py;
    compressed-tensors, quantization/lifecycle/initialize.py.
    """
    kinds = {"kvheads": OF_KEYS, "heads": OF_QUERIES}
    return {f".{w}": tuple(t.format(heads) for t in shapes) for heads, words in kinds.items() for w in words}


_SCALES_OF_ACTIVATIONS: dict[str, Entry] = {
    **{f".{word}": _BY_EXPERT for word in OF_ACTIVATIONS},
    **{f"_{word}": _BY_EXPERT for word in OF_ACTIVATIONS},
    ".input_scale_ub": _SCALAR,
    **_of_attention((*_SCALAR, "{} 1 1")),
}


#: Ascend's ModelSlim, W8A8: scales and offsets for each output, and what it adds for activations of a fixed scale: a
#: factor and a sum for each output. Its settings stand in a file of its own, quant_model_description.json. Source:
#: vllm-ascend, quantization/methods.
_ASCEND: Table = {".weight_offset": _BY_ROW, ".deq_scale": ("lead out",), ".quant_bias": ("lead out",)}


def _fp8(settings: Mapping[str, Any]) -> Table:
    """Scales for blocks of 128 x 128, or one for the tensor; MXFP8 has one for each 32 along the input.

    Beside them experts may have 4 bits, two to a byte along the input, with a scale for each 32: I8 in DeepSeek-V4,
    which calls all scales ``scale``, and U8 in MiMo-V2.5 ("store_dtype": "mxfp4"). Sources: transformers,
    integrations/finegrained_fp8.py; DeepSeek-V3, README_WEIGHTS.md; DeepSeek-V4, inference/convert.py; vllm#45200.
    """
    block = settings.get("weight_block_size")
    inverse = (_blocks(block), "lead 1 1") if block else (*_BY_EXPERT, _blocks((128, 128)))
    scales = inverse if block else (*_BY_EXPERT, *_BY_ROW, "lead 1 out")
    kinds = {".weight_scale_inv": inverse, "_scale_inv": inverse, ".weight_scale": scales, "_scale": scales}
    four, four_scale = ("stored lead out in/2",), ("stored lead out in/32",)
    fours = {" I8": four, ".scale of I8": four_scale}
    if settings.get("store_dtype") == "mxfp4":
        fours |= {" U8": four, ".weight_scale of U8": four_scale}
    return {**_SCALES_OF_ACTIVATIONS, **kinds, ".scale": scales, **fours}


def _int8_blocks(settings: Mapping[str, Any]) -> Table:
    """SGLang's blockwise_int8 (DeepSeek-R1-Block-INT8): as fp8 with blocks, of whole integers."""
    inverse = (_blocks(settings.get("weight_block_size") or (128, 128)),)
    return {**_SCALES_OF_ACTIVATIONS, ".weight_scale_inv": inverse}


_ROWS8: Table = {**_SCALES_OF_ACTIVATIONS, ".weight_scale": _BY_ROW}
"""SGLang's w8a8_int8 and w8a8_fp8 (DeepSeek-R1-Channel-INT8): a scale for each output."""


def _w4afp8(settings: Mapping[str, Any]) -> Table:
    """DeepSeek-R1-W4AFP8: fp8 in blocks, and experts of 4 bits, two to an int8 along the input, with a scale for each
    group. Sources: SGLang, layers/quantization/w4afp8.py; vLLM, model_executor/layers/quantization/w4afp8.py.
    """
    size = int(settings.get("group_size") or 128)
    table = _fp8({"weight_block_size": (128, 128), **settings})
    return {**table, ".weight_scale_inv of I8": (f"stored lead out in/{size}",)}


def _fp8_scheme(settings: Mapping[str, Any]) -> Scheme:
    """fp8, with ModelOpt's tensors in those modules that ModelOpt has quantized anew (its DeepSeek-V4)."""
    return replace(_modelopt_scheme(settings), general=_fp8(settings))


def _blocks(block: Any) -> str:
    rows, columns = block
    return f"stored lead out/{rows} in/{columns}"


_FBGEMM: Table = {**_SCALES_OF_ACTIVATIONS, ".weight_scale": _BY_ROW, "_scale": ("lead 1 out", "lead out 1")}
"""A scale for each output, of Llama 4's fused experts too: transformers, integrations/fbgemm_fp8.py."""


def _gptq(settings: Mapping[str, Any]) -> Table:
    """GPTQ: input first, ``32 / bits`` inputs to an integer, or 32 of 3 bits to three; zero points packed along the
    output.

    With act-order a row may belong to any group, so that every rank keeps all groups. Without, ``g_idx`` keeps the
    original's group numbers. AutoGPTQ gives every linear a bias, of zeros where the model has none. Source: AutoGPTQ,
    nn_modules/qlinear/qlinear_cuda_old.py.
    """
    names = (".qweight", ".qzeros", ".scales", ".g_idx")
    layout = str(settings.get("checkpoint_format") or "gptq").lower()
    if layout not in {"gptq", "gptq_v2"} or settings.get("is_marlin_format"):
        reason = f"GPTQ in the '{layout}' format is stored in an order of its kernel's own, not as rows and columns"
        return dict.fromkeys((*names, ".B", ".s"), Refused(reason, "take the checkpoint in the 'gptq' format"))
    pack, size = _integers(_bits(settings)), _group_size(settings)
    if _bits(settings) == 3:
        pack = "*3/32"
    if isinstance(pack, Refused):
        return dict.fromkeys(names, pack)
    groups = "1" if size is None else "groups" if settings.get("desc_act") else f"in/{size}"
    return {
        ".qweight": (f"in{pack} -> out",),
        ".qzeros": (f"{groups} -> out{pack}",),
        ".scales": (f"{groups} -> out",),
        ".g_idx": ("in",),
        ".bias of None": ("lead out",),
    }


def _gptq_scheme(settings: Mapping[str, Any]) -> Scheme:
    """GPTQModel's ``dynamic``: regular expressions, ``+:`` for other settings, ``-:`` for modules left as they are."""
    dynamic = (settings.get("dynamic") or {}).items()
    changed = ((name.removeprefix("+:"), new) for name, new in dynamic if not name.startswith("-:"))
    named = ((re.compile(name), _gptq({**settings, **(new if isinstance(new, dict) else {})})) for name, new in changed)
    return Scheme(_gptq(settings), tuple(named))


def _awq(settings: Mapping[str, Any]) -> Table:
    """AWQ: input first, eight outputs to an integer in an order of their own: AutoAWQ, awq/modules/linear/gemm.py."""
    names = (".qweight", ".qzeros", ".scales")
    version = str(settings.get("version") or settings.get("format") or "gemm").lower()
    if version not in {"gemm", "exllama", "ipex"}:
        refused = Refused(f"AWQ version '{version}' has a layout that is not known", "convert it to version 'gemm'")
        return dict.fromkeys(names, refused)
    pack, size = _integers(_bits(settings)), _group_size(settings)
    if isinstance(pack, Refused):
        return dict.fromkeys(names, pack)
    groups = "1" if size is None else f"in/{size}"
    return {
        ".qweight": (f"in -> out{pack}",),
        ".qzeros": (f"{groups} -> out{pack}",),
        ".scales": (f"{groups} -> out",),
    }


def _auto_round(settings: Mapping[str, Any]) -> Scheme:
    """AutoRound writes the tensors of AWQ or GPTQ: ``packing_format`` says which."""
    method = _awq if "awq" in str(settings.get("packing_format") or settings.get("backend") or "") else _gptq
    return Scheme(method(settings), within=_tables_by_module(method, settings, settings.get("extra_config") or {}))


def _compressed_scheme(settings: Mapping[str, Any]) -> Scheme:
    """compressed-tensors: groups of modules by class, by name or by ``re:`` expression; names win over classes."""
    general: dict[str, Entry] = {}
    named: list[tuple[re.Pattern[str], Table]] = []
    within: dict[str, Table] = {}
    for group in (settings.get("config_groups") or {}).values():
        if not isinstance(group, dict):
            continue
        table = _compressed(group.get("weights") or {}, str(group.get("format") or settings.get("format") or ""))
        for target in group.get("targets") or ():
            if target.startswith("re:"):
                named.append((re.compile(target[3:]), table))
            elif "." in target:
                within[target] = table
            else:
                general = _either(general, table)
    return Scheme(general or _compressed({}, str(settings.get("format") or "")), tuple(named), within)


def _either(one: Table, other: Table) -> dict[str, Entry]:
    joined = {**one, **other}
    for key in one.keys() & other.keys():
        a, b = one[key], other[key]
        if isinstance(a, tuple) and isinstance(b, tuple):
            joined[key] = tuple(dict.fromkeys((*a, *b)))
    return joined


_SPARSE = (
    ".compressed",
    ".bitmask",
    ".row_offsets",
    ".shape",
    ".meta",
    ".scale_packed",
    ".weight_packed",
    ".weight_scale",
)


def _compressed(weights: Mapping[str, Any], layout: str) -> Table:
    """compressed-tensors, from its src/compressed_tensors/compressors and quantization/lifecycle/initialize.py.

    Packed integers have their zero points packed too, along the output. With ``actorder`` "group" every rank keeps all
    groups.
    """
    if "24" in layout or "bitmask" in layout:
        reason = f"compressed-tensors '{layout}' keeps sparse values, which do not lie in rows and columns"
        return {**_SCALES_OF_ACTIVATIONS, **dict.fromkeys(_SPARSE, Refused(reason))}
    bits, size = int(weights.get("num_bits") or 8), weights.get("group_size")
    strategy = str(weights.get("strategy") or ("tensor" if size is None else "group" if size > 0 else "channel"))
    actorder = weights.get("actorder") in {True, "group", "dynamic"}
    inner = "1" if not strategy.endswith("group") else "groups" if actorder else f"in/{size}"
    scale: tuple[str, ...] = (f"lead out {inner}",)
    if strategy == "tensor":
        scale = _BY_EXPERT
    elif strategy == "channel":
        scale = _BY_ROW
    elif strategy == "block":
        scale = (_blocks(weights.get("block_structure") or (128, 128)),)
    floats = weights.get("type") == "float"
    pack = "/2" if floats else _integers(bits)
    packed: Entry = pack if isinstance(pack, Refused) else (f"lead out in{pack}",)
    zero: Entry = pack if isinstance(pack, Refused) else (f"lead out{pack} {inner}",)
    return {
        **_SCALES_OF_ACTIVATIONS,
        ".weight_shape": ("2",),
        ".weight_global_scale": _BY_EXPERT,
        ".input_global_scale": _BY_EXPERT,
        ".weight_packed": packed,
        ".weight_scale": scale,
        ".weight_zero_point": zero if layout == "pack-quantized" and strategy in {"group", "channel"} else scale,
        ".weight_g_idx": ("in",),
    }


def _modelopt_scheme(settings: Mapping[str, Any]) -> Scheme:
    """ModelOpt; with MIXED_PRECISION the algorithm of each module, or of all within it, by its name."""
    layers = settings.get("quantized_layers") or {}
    return Scheme(_modelopt(settings), within=_tables_by_module(_modelopt, settings, layers))


def _modelopt(settings: Mapping[str, Any]) -> Table:
    """NVIDIA ModelOpt, from its modelopt/torch/export/quant_utils.py and unified_export_hf.py.

    fp8 with a scale for the tensor, for each output or (FP8_PB_WO) for a block; NVFP4 and MXFP4 with two values a byte
    along the input and a scale for 16 or 32; int4 AWQ with two values a byte along the output. The dtype of the scales
    tells NVFP4 (F8_E4M3) and MX (U8) from the others.
    """
    algorithm = str(settings.get("quant_algo") or "").upper()
    size = int(settings.get("group_size") or 0)
    awq = algorithm in {"W4A16_AWQ", "W4A8_AWQ"}
    scale: tuple[str, ...] = (*_BY_EXPERT, *_BY_ROW, "out/128 1 in/128 1")
    if algorithm == "FP8_PB_WO":
        scale = ("out/128 1 in/128 1", _blocks((128, 128)))
    elif awq:
        scale = (f"lead out in/{size or 128}",)
    table = {**_SCALES_OF_ACTIVATIONS, ".pre_quant_scale": ("in",)}
    table[" U8"] = ("lead out/2 in",) if awq else ("stored lead out in/2",)
    for mark in "._":
        table[f"{mark}weight_scale"] = scale
        table[f"{mark}weight_scale F8_E4M3"] = (f"stored lead out in/{size or 16}",)
        table[f"{mark}weight_scale U8"] = (f"stored lead out in/{size or 32}",)
        table[f"{mark}weight_scale_2"] = _BY_EXPERT
    return table


def _quark(settings: Mapping[str, Any]) -> Table:
    """AMD Quark: fp8 and int8 with a scale for the tensor or each output, and MXFP4; its packed int4 is refused.

    Source: vLLM, model_executor/layers/quantization/quark/schemes.
    """
    weight = (settings.get("global_quant_config") or {}).get("weight") or {}
    weight = weight if isinstance(weight, dict) else {}
    size = int(weight.get("group_size") or 32)
    scale = (f"lead out in/{size}",) if weight.get("qscheme") == "per_group" else (*_SCALAR, *_BY_ROW)
    return {
        **_SCALES_OF_ACTIVATIONS,
        " U8": ("lead out in/2",),
        " I32": Refused("Quark packs integers of 4 bits in an order of its own"),
        ".weight_scale": scale,
        ".weight_scale U8": (f"lead out in/{size}",),
        ".weight_zero_point": scale,
    }


_MXFP4: Table = {"_blocks": ("lead out in/32 16",), "_scales": ("lead out in/32",)}
"""MXFP4 of gpt-oss, output before input: 32 values along the input in 16 bytes, and a scale for them.

Source: transformers, integrations/mxfp4.py.
"""

_BITSANDBYTES: Table = {
    ".SCB": ("out",),
    ".weight_format": _SCALAR,
    " U8": ("(out in)/2 1",),
    ".weight.absmax": ("(out in)/64",),
    ".weight.nested_absmax": ("(out in)/16384",),
    ".weight.quant_map": ("16",),
    ".weight.nested_quant_map": ("256",),
    **dict.fromkeys(BITSANDBYTES_STATES, ("...",)),
}
"""bitsandbytes: int8 has a scale for each output (``SCB``); 4 bits lie in one row, in blocks of 64.

``absmax`` has a scale for each block, ``nested_absmax`` (double quantization) one for 256 of these, and
``quant_state`` states the weight's shape. A weight is stored output before input. Sources: bitsandbytes,
nn/modules.py and functional.py (``quantize_4bit``, ``QuantState``).
"""

_QUARTERS = "BitNet packs into one byte four rows that lie a quarter of the matrix apart"
_BITNET: Table = {" U8": Refused(_QUARTERS, "split the bf16 checkpoint"), ".weight_scale": _SCALAR}
"""BitNet: four outputs to a byte, a quarter of the rows apart. transformers, integrations/bitnet.py."""


def _bits(settings: Mapping[str, Any]) -> int:
    return int(settings.get("bits") or settings.get("w_bit") or 4)


def _integers(bits: int) -> str | Refused:
    """Behind a dimension: counted in 32-bit integers."""
    if 32 % bits:
        reason = f"values of {bits} bits run across the 32-bit integers that hold them"
        return Refused(reason, "take a checkpoint of 2, 4 or 8 bits, or split the unquantized one")
    return f"/{32 // bits}"


def _group_size(settings: Mapping[str, Any]) -> int | None:
    """How many inputs share a scale; None where all do (-1)."""
    size = settings.get("group_size", settings.get("q_group_size"))
    return 128 if size is None else int(size) if int(size) > 0 else None


_METHODS: Mapping[str, Table | Callable[[Mapping[str, Any]], Table | Scheme]] = {
    "fp8": _fp8_scheme,
    "mxfp8": _fp8_scheme,
    "w4afp8": _w4afp8,
    "blockwise_int8": _int8_blocks,
    "w8a8_int8": _ROWS8,
    "w8a8_fp8": _ROWS8,
    "fbgemm_fp8": _FBGEMM,
    "gptq": _gptq_scheme,
    "awq": _awq,
    "auto-round": _auto_round,
    "compressed-tensors": _compressed_scheme,
    "sparseml": _compressed_scheme,
    "modelopt": _modelopt_scheme,
    "modelopt_fp4": _modelopt_scheme,
    "modelopt_fp8": _modelopt_scheme,
    "quark": _quark,
    "mxfp4": _MXFP4,
    "bitsandbytes": _BITSANDBYTES,
    "bitnet": _BITNET,
}
