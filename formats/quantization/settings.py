"""The settings of quantization in ``config.json``: where they lie, and what each of them should be.

Reads and replaces the block size in ``config.json``: how many elements of a weight share a scale.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from formats.documents import Reader, Unfit, anything, items, json_object, mapping, optional, text, unfit, whole
from formats.errors import PlanError

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


def with_setting(config: Mapping[str, Any], key: str, value: Any) -> dict[str, Any]:
    """The same config with another value of a setting, in the place where ``quantization_settings`` found it."""
    place = _place(config, _DEEPEST) or ()
    return _replaced(config, place, key, value)


def _replaced(at: Mapping[str, Any], place: tuple[str, ...], key: str, value: Any) -> dict[str, Any]:
    if place:
        return {**at, place[0]: _replaced(at[place[0]], place[1:], key, value)}
    inner = next((name for name in _INNER if isinstance(at.get(name), dict) and key in at[name]), None)
    return {**at, inner: {**at[inner], key: value}} if inner else {**at, key: value}


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
    """The same config with another block size."""
    return with_setting(config, _KEY, list(block))
