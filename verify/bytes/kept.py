"""The weights that a cast or a quantization leaves alone: verify's own word, where split has another.

``kept.json`` has what transformers' classes and publishers keep in float32. It is made by tools/kept.py, without the
``[float32]`` tables that split goes by. Of fp8 blocks, split names what stays; here stands what is quantized.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import Any

KEPT = Path(__file__).with_name("kept.json")
QUANTIZED = {
    *("q_proj", "k_proj", "v_proj", "o_proj", "q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj"),
    *("gate_proj", "up_proj", "down_proj", "w1", "w2", "w3"),
    *("in_proj_qkvz", "in_proj_qkv", "in_proj_z", "out_proj"),
}
"""The layers that have scales in published fp8 checkpoints: DeepSeek-V3, Kimi K2, MiniMax-M2, Qwen3 to 3.6."""


def is_known(config: Mapping[str, Any]) -> bool:
    """Whether the table has what stays in float32 in models of these types."""
    return types_of(config) in (*_table()["some"], *_table()["none"])


def stays_float32(config: Mapping[str, Any], dtype: str) -> Callable[[str], bool]:
    """Return whether a tensor of this name stays float32 in a cast of the model to ``bf16`` or ``fp16``."""
    some = _table()["some"]
    ends = {end for types in ("*", *_types(config), types_of(config)) for end in some.get(types, {}).get(dtype, ())}
    return lambda name: any(fnmatchcase(name, f"*{end}") for end in ends)


def is_quantized(name: str) -> bool:
    """Whether a matrix of this name has 8 bits in a checkpoint of fp8 blocks."""
    *modules, layer, kind = name.split(".")
    return kind == "weight" and layer in QUANTIZED and "visual" not in modules and any(map(str.isdigit, modules))


@cache
def _table() -> dict[str, Any]:
    table: dict[str, Any] = json.loads(KEPT.read_text(encoding="utf-8"))
    return table


def types_of(config: Mapping[str, Any]) -> str:
    """The model types that a config names, its own and those of its parts, as the table has them."""
    return " ".join(sorted({*_types(config)}))


def _types(config: Mapping[str, Any]) -> Iterator[str]:
    for key, value in config.items():
        if key == "model_type":
            yield str(value)
        elif isinstance(value, Mapping):
            yield from _types(value)
