"""What the settings of a quantization method in ``config.json`` should be, wherever in them a key stands."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from formats.documents import Reader, Unfit, anything, items, json_object, mapping, optional, text, unfit, whole
from formats.errors import PlanError

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
            found, where = todo.pop()
            for key, value in found.items():
                kind = _OUTERMOST.get(key) if found is settings else None
                (kind or _KINDS.get(key, anything))(value, f"{where}.{key}")
                if isinstance(value, dict):
                    todo.append((value, f"{where}.{key}"))
    except Unfit as error:
        raise PlanError(f"config.json, quantized by '{method}': {error}") from None
