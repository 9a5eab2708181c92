"""The block size of a checkpoint whose weights have a scale for each block: where config.json says it, and saying
another.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def block_size(config: Mapping[str, Any]) -> tuple[int, int] | None:
    """Rows and columns of a block, as in ``quantization_config.weight_block_size``; None where there are no blocks."""
    for settings in _settings(config):
        block = settings.get("weight_block_size")
        if isinstance(block, (list, tuple)) and len(block) == 2 and all(type(n) is int and n > 0 for n in block):
            return block[0], block[1]
    return None


def with_block_size(config: Mapping[str, Any], block: tuple[int, int]) -> dict[str, Any]:
    """The same config with another block size."""
    if "weight_block_size" in config:
        return {**config, "weight_block_size": list(block)}
    return {key: with_block_size(value, block) if isinstance(value, dict) else value for key, value in config.items()}


def _settings(config: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    places = [config, *(value for value in config.values() if isinstance(value, dict))]
    found = [place.get("quantization_config") for place in places]
    return [settings for settings in found if isinstance(settings, dict)]
