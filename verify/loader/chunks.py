"""Reads checkpoints in chunks, and whole ones, with torch's own reader."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch
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
