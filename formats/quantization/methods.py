"""The settings of quantization in ``config.json``, and the patterns of each method, with their sources.

The tables of all methods stand in ``methods.toml``. Here is how modules come to settings of their own.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

from reshard.formats.documents import (
    Reader,
    Unfit,
    anything,
    items,
    json_object,
    mapping,
    optional,
    reader_of,
    text,
    unfit,
    whole,
)
from reshard.formats.errors import NotationError, PlanError
from reshard.formats.notation.expressions import Expression
from reshard.formats.plugins import plugins
from reshard.formats.quantization.companions import (
    OF_ACTIVATIONS,
    OF_KEYS,
    OF_QUERIES,
    Entry,
    Scheme,
    Table,
)

_KEYS = ("quantization_config", "compression_config")
"""Today's name and an older one."""
_INNER = ("quantization_config", "quantization")
"""Keys under which settings may stand once more: compressed-tensors in a config of its own; ModelOpt beside its
producer.
"""
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
"""Readers of words that have a meaning at the top alone: compressed-tensors has ``dynamic`` for weights."""


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


def scheme_of(config: Mapping[str, Any]) -> Scheme:
    """Return the companions that a config's quantization settings give each weight. Settings without a method are read
    as ModelOpt's.

    Raises PlanError for settings of a wrong kind.
    """
    settings = quantization_settings(config)
    if not settings:
        return _scheme("ascend", {})
    method = method_of(settings)
    scheme = _METHODS.get(method) or plugins("quantizations").get(method)
    if scheme is None:
        return Scheme({})
    check_settings(settings, method)
    try:
        return scheme(settings)
    except NotationError as error:
        raise PlanError(f"config.json, quantized by '{method}': {error.message}", error.hint) from None


def unknown_method(config: Mapping[str, Any], tensor: str) -> str | None:
    """The method by which a checkpoint is quantized, if it is none of those that are known here.

    ``tensor`` is the name of a tensor that does not fit.

    MLX names none: ``{"quantization": {"group_size": 64, "bits": 4}}`` (mlx-lm, utils.py). msModelSlim says it in a
    file of its own (``quant_model_description.json``).
    """
    settings = quantization_settings(config)
    method = method_of(settings)
    if method:
        return None if method in _METHODS or method in plugins("quantizations") else f"'{method}'"
    mlx = config.get("quantization")
    if any(isinstance(place, Mapping) and {"bits", "group_size"} <= place.keys() for place in (settings, mlx)):
        return "MLX"
    return None


@dataclass(frozen=True)
class _Lines:
    """A table of ``methods.toml``."""

    when: Expression | None = None
    base: tuple[str, ...] = ()
    sizes: Mapping[str, Expression] = field(default_factory=dict)
    parts: Mapping[str, Expression] = field(default_factory=dict)
    tensors: Mapping[str, str] = field(default_factory=dict)
    refused: str = ""
    why: str = ""
    hint: str | None = None


@cache
def _methods() -> Mapping[str, Sequence[_Lines]]:
    text_of = Path(__file__).with_suffix(".toml").read_text(encoding="utf-8")
    return mapping(items(reader_of(_Lines)))(tomllib.loads(text_of), "")


def _table(name: str, settings: Mapping[str, Any]) -> Table:
    """The patterns of a method for its settings."""
    words = {key: value.lower() if isinstance(value, str) else value for key, value in settings.items()} | _PARTS
    table: dict[str, Entry] = {}
    for lines in _methods()[name]:
        for base in lines.base:
            table |= _ACTIVATIONS if base == "activations" else _table(base, settings)
        for key, size in lines.sizes.items():
            words[key] = size.evaluate(words.get)
        if lines.when is not None and not lines.when.evaluate(words.get):
            continue
        for key, part in lines.parts.items():
            words[key] = part.evaluate(words.get).format_map(words)
        for ends, text_of in lines.tensors.items():
            patterns = tuple(pattern.strip() for pattern in text_of.format_map(words).split("|"))
            table |= dict.fromkeys(ends.split(", "), patterns)
        if lines.refused:
            table |= dict.fromkeys(lines.refused.split(", "), PlanError(lines.why.format_map(words), lines.hint))
    return table


_PARTS = {"scalar": " | 1", "by_row": "lead out 1 | lead out", "by_expert": " | lead | 1 | lead 1 1"}
"""Patterns that many tables use. ``lead`` comes before ``1``: a rank may hold one of several fused experts, and without
experts ``lead`` is empty and does not fit.
"""


_ACTIVATIONS: Table = {
    **dict.fromkeys((f"{mark}{word}" for word in OF_ACTIVATIONS for mark in "._"), ("", "lead", "1", "lead 1 1")),
    ".input_scale_ub": ("", "1"),
    **{f".{word}": ("", "1", "kvheads 1 1") for word in OF_KEYS},
    **{f".{word}": ("", "1", "heads 1 1") for word in OF_QUERIES},
}
"""Scales of activations, of the cache, of the queries and of the attention's own probabilities.

Of an attention there is one for the tensor or, in compressed-tensors ("attn_head"), one for each head, with two
dimensions of 1 behind it. ``prob_output_scale`` is Quark's name. Sources: vLLM,
model_executor/model_loader/weight_utils.py; compressed-tensors, quantization/lifecycle/initialize.py.
"""


# ------------------------------------------------------------------------------------------------------------- schemes


def _scheme(method: str, settings: Mapping[str, Any], modules: str | None = None) -> Scheme:
    """The scheme of a method; under the key ``modules`` stand settings of a module, or of all within it, by its name.

    There is one table for all modules that have the same.
    """
    named = (settings.get(modules) or {}) if modules is not None else {}
    settings_of = {name: stated if isinstance(stated, dict) else {} for name, stated in named.items()}
    tables = {repr(stated): stated for stated in settings_of.values()}
    table_of = {key: _table(method, {**settings, **stated}) for key, stated in tables.items()}
    return Scheme(_table(method, settings), within={name: table_of[repr(at)] for name, at in settings_of.items()})


def _fp8(settings: Mapping[str, Any]) -> Scheme:
    """fp8, with ModelOpt's tensors in those modules that ModelOpt has quantized anew (its DeepSeek-V4)."""
    return replace(_scheme("modelopt", settings, "quantized_layers"), general=_table("fp8", settings))


def _gptq(settings: Mapping[str, Any]) -> Scheme:
    """GPTQModel's ``dynamic``: regular expressions, ``+:`` for other settings, ``-:`` for modules left as they are."""
    dynamic = (settings.get("dynamic") or {}).items()
    changed = {name.removeprefix("+:"): new for name, new in dynamic if not name.startswith("-:")}
    stated = {name: {**settings, **(new if isinstance(new, dict) else {})} for name, new in changed.items()}
    return Scheme(_table("gptq", settings), tuple((re.compile(n), _table("gptq", at)) for n, at in stated.items()))


def _auto_round(settings: Mapping[str, Any]) -> Scheme:
    """AutoRound writes the tensors of AWQ or GPTQ: ``packing_format`` says which."""
    packing = str(settings.get("packing_format") or settings.get("backend") or "")
    return _scheme("awq" if "awq" in packing else "gptq", settings, "extra_config")


def _compressed(settings: Mapping[str, Any]) -> Scheme:
    """compressed-tensors: groups of modules by class, by name or by ``re:`` expression; names win over classes."""
    general: dict[str, Entry] = {}
    named: list[tuple[re.Pattern[str], Table]] = []
    within: dict[str, Table] = {}
    layout, groups = str(settings.get("format") or ""), (settings.get("config_groups") or {}).values()
    for group in (group for group in groups if isinstance(group, dict)):
        stated = {**(group.get("weights") or {}), "format": str(group.get("format") or layout)}
        table = _table("compressed-tensors", stated)
        for target in group.get("targets") or ():
            if target.startswith("re:"):
                named.append((re.compile(target[3:]), table))
            elif "." in target:
                within[target] = table
            else:
                general = _either(general, table)
    return Scheme(general or _table("compressed-tensors", {"format": layout}), tuple(named), within)


def _either(one: Table, other: Table) -> dict[str, Entry]:
    joined = {**one, **other}
    for key in one.keys() & other.keys():
        a, b = one[key], other[key]
        if isinstance(a, tuple) and isinstance(b, tuple):
            joined[key] = tuple(dict.fromkeys((*a, *b)))
    return joined


def _quark(settings: Mapping[str, Any]) -> Scheme:
    """The settings are those of the weights, or a list of several."""
    weight = (settings.get("global_quant_config") or {}).get("weight")
    return _scheme("quark", weight if isinstance(weight, dict) else {})


_PLAIN = ("w4afp8", "blockwise_int8", "fbgemm_fp8", "awq", "mxfp4", "bitsandbytes", "bitnet")
_METHODS: Mapping[str, Callable[[Mapping[str, Any]], Scheme]] = {
    **{name: partial(_scheme, name) for name in _PLAIN},
    **dict.fromkeys(("w8a8_int8", "w8a8_fp8"), partial(_scheme, "w8a8")),
    **dict.fromkeys(("fp8", "mxfp8"), _fp8),
    **dict.fromkeys(
        ("modelopt", "modelopt_fp4", "modelopt_fp8"), partial(_scheme, "modelopt", modules="quantized_layers")
    ),
    **dict.fromkeys(("compressed-tensors", "sparseml"), _compressed),
    "gptq": _gptq,
    "auto-round": _auto_round,
    "quark": _quark,
}
