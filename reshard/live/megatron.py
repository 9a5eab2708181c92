"""What this rank holds of a model of Megatron-Core, as its ``sharded_state_dict()`` says: views of the live tensors.

Source: Megatron-Core 0.16.1, ``dist_checkpointing/mapping.py``. Names and shapes are those of its distributed
checkpoints (``formats/programs/megatron.toml``). No collective runs. Megatron-Core is not imported here.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from copy import copy
from typing import Any

import torch
from torch import nn

from formats.errors import PlanError
from formats.notation.axes import Run
from reshard.live.parameters import piece, unwrapped
from reshard.live.sides import Slice


@torch.no_grad()
def slices_of(model: nn.Module | Iterable[nn.Module]) -> list[tuple[Slice, torch.Tensor]]:
    """What this rank holds of each stored tensor, with the live tensor, which has the dimensions of the stored one.

    The model, or its chunks where the pipeline is interleaved; wrapped by Megatron's DDP or Float16Module, or not. A
    rank may hold several parts of one tensor: layers, experts, and gate and up, which are stored one after the other.
    A table has the rows that this mesh pads it to. Raises PlanError for a part that is no view of a parameter.
    """
    parts = []
    for chunk in [model] if isinstance(model, nn.Module) else model:
        chunk = unwrapped(chunk)
        live = {parameter.untyped_storage().data_ptr() for parameter in [*chunk.parameters(), *chunk.buffers()]}
        if not hasattr(chunk, "sharded_state_dict"):
            raise PlanError(f"a {type(chunk).__name__} is no model of Megatron-Core: it has no sharded_state_dict()")
        for part, tensor in _parts(chunk.sharded_state_dict(metadata={"singleton_local_shards": False})):
            if tensor.untyped_storage().data_ptr() not in live:
                raise PlanError(f"{part.key}: what Megatron-Core would store is not what the model holds, but a copy")
            local = tensor[(None,) * part.prepend_axis_num]
            offsets = zip(part.global_offset, local.shape, strict=True)
            runs = tuple((Run(int(at), size),) if size else () for at, size in offsets)
            parts.append(piece(part.key, tuple(part.global_shape), runs, local))
    return parts


def _parts(state: Any) -> Iterator[tuple[Any, torch.Tensor]]:
    """Each part of a stored tensor in a state, with its live tensor. Objects, such as extra states, are passed over.

    A part is a ``ShardedTensor``: its first ``prepend_axis_num`` dimensions, of size 1, are missing in ``data``. What
    has a ``build`` is a parameter that is stored in several parts.
    """
    if isinstance(state, Mapping):
        state = list(state.values())
    if isinstance(state, list):
        for entry in state:
            yield from _parts(entry)
    elif hasattr(state, "prepend_axis_num"):
        yield state, state.data
    elif hasattr(state, "build"):
        whole, parts = state.data, [*_parts(state.build())]
        if all(tensor.untyped_storage().data_ptr() == whole.untyped_storage().data_ptr() for _, tensor in parts):
            yield from parts
            return
        probe = copy(state)  # it copies: given indices instead, it shows where its parts lie
        probe.data = torch.arange(whole.numel()).view(whole.shape)
        for part, indices in _parts(probe.build()):
            yield part, _view(whole, indices, part.key)


def _view(whole: torch.Tensor, indices: torch.Tensor, name: str) -> torch.Tensor:
    """The elements of ``whole`` at ``indices``, as a view of it. Raises PlanError if no view has them."""
    first = (0,) * indices.dim()
    offset = int(indices[first])
    strides, viewed = [], torch.tensor(offset)
    for dim, size in enumerate(indices.shape):
        strides.append(int(indices[(*first[:dim], 1, *first[dim + 1 :])]) - offset if size > 1 else 1)
        viewed = viewed[..., None] + torch.arange(size) * strides[-1]
    if not whole.is_contiguous() or min(strides) < 0 or not viewed.equal(indices):
        raise PlanError(f"{name}: what Megatron-Core would store is no view of what the model holds")
    return whole.as_strided(indices.shape, strides, whole.storage_offset() + offset)
