"""Faults of a distributed checkpoint that its names, dtypes and shapes show: another .metadata, another config.json."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from tests.support import changed_json

NORM = "decoder.final_layernorm.weight"


def _entries(change: Callable[[dict[str, Any]], object]) -> Callable[[Path, Path], None]:
    def inject(_: Path, out: Path) -> None:
        file = out / "release/.metadata"
        metadata = pickle.loads(file.read_bytes())
        change(metadata.state_dict_metadata)
        file.write_bytes(pickle.dumps(metadata))

    return inject


def _properties(entries: dict[str, Any]) -> None:
    entries[NORM] = replace(entries[NORM], properties=replace(entries[NORM].properties, dtype=torch.float64))


def _shorter(entries: dict[str, Any]) -> None:
    entries[NORM] = replace(entries[NORM], size=torch.Size([entries[NORM].size[0] - 1]))


def _exchanged(original: Path, _: Path) -> None:
    """Take the width of the MLP for that of the model."""
    with changed_json(original / "config.json") as config:
        config |= {"hidden_size": config["intermediate_size"], "intermediate_size": config["hidden_size"]}


FAULTS: dict[str, tuple[Callable[[Path, Path], None], str]] = {
    "renamed": (_entries(lambda of: of.update(renamed=of.pop(NORM))), f"'{NORM}': the shards lack it"),
    "lacking": (_entries(lambda of: of.pop(NORM)), f"'{NORM}': the shards lack it"),
    "extra": (_entries(lambda of: of.update(more=of[NORM])), "'more': only the shards have it"),
    "dtype": (_entries(_properties), f"'{NORM}': float64 "),
    "shape": (_entries(_shorter), f"'{NORM}': "),
    "chunk": (_entries(lambda of: of[NORM].chunks.clear()), f"'{NORM}': its chunks do not hold each element once"),
    "settings": (_exchanged, "the engine has "),
}
"""Each with what its first difference says. They change the original's config.json or the shards."""
