"""Live modules as a source: a checkpoint that is on no disk, read from the memory of its tensors."""

from __future__ import annotations

import json
from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any
from uuid import uuid4

import torch
from torch import nn

from reshard.formats.documents import json_bytes
from reshard.formats.errors import MismatchError, PlanError
from reshard.formats.files.checkpoint import CONFIG
from reshard.formats.files.chunks import chunks_metadata
from reshard.formats.files.safetensors import build_header
from reshard.formats.store import StoredPath
from reshard.formats.torch_internals import bytes_in
from reshard.live.parameters import slices_of, unwrapped
from reshard.store.range_store import FileContent, RangeStore
from reshard.store.remote import Remote

FILE = "shard-00001-model-00001-of-00001.safetensors"
"""Transformers' distributed checkpoints have the names of live modules, and such files."""


def state_dict(model: nn.Module | Mapping[str, Any]) -> StoredPath:
    """The tensors of a module, or those that its ``state_dict()`` gave, as a source for ``reshard.split`` and others.

    Nothing is copied: what reads it reads the tensors, on whatever device they are. They must not change meanwhile, and
    be whole: of a model that is sharded over ranks, give one rank what torch's ``get_model_state_dict`` gathers. The
    config.json is that of the module; without one, name it by ``config``. Raises PlanError.
    """
    module = unwrapped(model)
    if not isinstance(module, nn.Module | Mapping):
        raise PlanError(f"{type(model).__name__} is neither a module nor tensors by name")
    parts = slices_of(module if isinstance(module, nn.Module) else module.items(), tied_once=False)
    for part, tensor in parts:
        if tuple(tensor.shape) != part.shape:
            raise PlanError(
                f"this rank has {list(tensor.shape)} of '{part.name}', which is {list(part.shape)}",
                "gather it first, with get_model_state_dict(..., StateDictOptions(full_state_dict=True))",
            )
    header = build_header(
        [(part.name, part.dtype, part.shape) for part, _ in parts],
        chunks_metadata({part.name: (0,) * len(part.shape) for part, _ in parts}),
    )
    files: dict[str, FileContent] = {FILE: _TensorsFile(header, [tensor for _, tensor in parts])}
    config: Any = getattr(module, "config", None)
    if config is not None:
        document: dict[str, Any] = json.loads(config.to_json_string())
        document["architectures"] = document.get("architectures") or [type(module).__name__]
        files[CONFIG] = json_bytes(document) + b"\n"
    generation: Any = getattr(module, "generation_config", None)
    if generation is not None:
        files["generation_config.json"] = generation.to_json_string().encode()
    store = RangeStore(f"{type(module).__name__} in memory", files)
    store.keep({FILE: {0: header}})
    return StoredPath(store)


class _TensorsFile(Remote):
    """Tensors as a safetensors file."""

    def __init__(self, header: bytes, tensors: Sequence[torch.Tensor]) -> None:
        self._name = f"memory:{uuid4().hex}"
        self._tensors = [torch.frombuffer(bytearray(header), dtype=torch.uint8), *tensors]
        self._versions = [_version(tensor) for tensor in self._tensors]
        *self._begins, self.size = accumulate((tensor.nbytes for tensor in self._tensors), initial=0)

    @property
    def identity(self) -> str:
        return self._name

    @property
    def address(self) -> str:
        return "memory"

    def over_network(self, nbytes: int) -> int:
        return 0

    def check_unchanged(self) -> None:
        if self._versions != [_version(tensor) for tensor in self._tensors]:
            raise MismatchError("the tensors were changed while they were read", "write between two steps")

    def read(self, start: int, stop: int) -> memoryview:
        parts: list[memoryview] = []
        for number in range(bisect_right(self._begins, start) - 1, bisect_left(self._begins, stop)):
            begin = self._begins[number]
            parts.append(_bytes_of(self._tensors[number], max(start - begin, 0), stop - begin))
        return parts[0] if len(parts) == 1 else memoryview(b"".join(parts))


def _bytes_of(tensor: torch.Tensor, first: int, last: int) -> memoryview:
    """The bytes of a tensor's elements, in order. If it is not contiguous, only the rows around them are copied."""
    while not tensor.is_contiguous():
        row = tensor.nbytes // len(tensor)
        begin, end = first // row, -(-min(last, tensor.nbytes) // row)
        rows = tensor[begin:end]
        tensor = rows[0] if end - begin == 1 else rows.contiguous()
        first, last = first - begin * row, last - begin * row
    return bytes_in(tensor)[first:last].cpu().numpy().data


def _version(tensor: torch.Tensor) -> int | None:
    """A number that grows with each change in place, as far as torch counts them."""
    return None if tensor.is_inference() else tensor._version
