"""Reads checkpoints: those in chunks, and whole ones, with torch's own reader, and a rank's files as they are."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.checkpoint.state_dict_loader import load


def read(folder: str, names: Collection[str] | None = None) -> tuple[dict[str, Tensor], set[str]]:
    """The tensors of a folder that have these names, by default all, and the names of the others."""
    reader: Any = (FileSystemReader if (Path(folder) / ".metadata").exists() else HuggingFaceStorageReader)(folder)
    stored: dict[str, Any] = reader.read_metadata().state_dict_metadata
    known = stored.keys() if names is None else stored.keys() & names
    found = {name: torch.empty(stored[name].size, dtype=stored[name].properties.dtype) for name in known}
    load(found, storage_reader=reader, no_dist=True)
    return found, stored.keys() - known


def mapped(folder: str, pattern: str) -> dict[str, Tensor]:
    """The tensors of the files of a folder that match a pattern; mapped, not read."""
    found = dict[str, Tensor]()
    for file in sorted(Path(folder).glob(pattern)):
        with safe_open(file, "pt") as content:
            found |= {name: content.get_tensor(name) for name in content.keys()}  # noqa: SIM118
    return found
