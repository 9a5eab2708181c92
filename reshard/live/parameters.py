"""Live tensors of this rank in a torch model: DTensors by their placements, everything else whole; those of
Megatron-Core by their ``sharded_state_dict()``.

Nothing is copied, and no collective runs: the tensors are views of the live parameters.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from copy import copy
from itertools import zip_longest
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard as StridedShard

from reshard.formats.errors import LiveError, PlanError, ReshardError
from reshard.formats.notation.axes import Run
from reshard.formats.notation.placements import Runs, ShardedDim, runs_of
from reshard.formats.torch_internals import TORCH_DTYPES, unsaved_buffers
from reshard.formats.wrappers import without_wrappers
from reshard.live.sides import HeldSlice

DTYPE_NAMES = {dtype: name for name, dtype in TORCH_DTYPES.items()}
"""The dtypes' names in headers."""

_ADAPTER = re.compile(r"\.(base_layer|lora_\w+|original_module|modules_to_save)\.")

Named = Mapping[str, torch.Tensor] | Iterable[tuple[str, torch.Tensor]]


def unwrapped(model: Any) -> Any:
    """The module within DDP, Megatron's wrappers and their like; anything else as it is."""
    while isinstance(model, nn.Module) and isinstance(inner := getattr(model, "module", None), nn.Module):
        model = inner
    return model


@torch.no_grad()
def slices_of(model: nn.Module | Named, *, tied_once: bool = True) -> list[tuple[HeldSlice, torch.Tensor]]:
    """Return this rank's slice of each parameter, and of each buffer that checkpoints have, with the live tensor.

    ``model`` is a module or its tensors by name, as ``named_parameters()`` gives them. A tied parameter comes once or,
    with ``tied_once=False``, under each name. A dictionary should have parameters alone: a tensor of ``state_dict()``
    may be a copy. The tensor of a DTensor is the local one, which may be empty; any other tensor is held whole. Modules
    of FSDP2 are resharded first: after a forward pass without a backward some hold whole parameters.

    Raises PlanError, with the tensor's name, for a partial sum, an unknown placement or a dtype without a name.
    """
    model = unwrapped(model)
    if isinstance(model, nn.Module):
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()
    parts = []
    for name, tensor in _named(model, tied_once):
        if not isinstance(name, str) or not isinstance(tensor, torch.Tensor):
            wrong, what = (tensor, "tensor") if isinstance(name, str) else (name, "name")
            raise PlanError(f"'{name}' is not a {what}: it is of type {type(wrong).__name__}", "leave it out")
        if tensor.is_nested:
            raise PlanError(f"{name}: a nested tensor is not a plain tensor", "leave it out")
        if _ADAPTER.search(name):
            raise PlanError(f"'{name}' belongs to an adapter that is not merged", "push what merge_and_unload() gives")
        if isinstance(tensor, DTensor) and tensor.device_mesh.get_coordinate() is None:
            continue  # it is on a mesh that this rank is no part of
        part, local = _of(name, tensor)
        is_buffer = isinstance(model, nn.Module) and not isinstance(tensor, nn.Parameter)
        parts.append((part._replace(is_buffer=is_buffer), local))
    return parts


def check_unchanged(planned: Sequence[HeldSlice], now: Sequence[HeldSlice]) -> None:
    """Raise LiveError, with the tensor's name, if the model no longer has the slices from which the plan was made."""
    for old, new in zip_longest(planned, now):
        if old != new:
            raise LiveError(
                f"the model has {_shown(new)} where the plan has {_shown(old)}",
                "push when the model is sharded as it was, or plan anew",
            )


def _named(model: nn.Module | Named, tied_once: bool) -> Iterator[tuple[str, torch.Tensor]]:
    """The parameters and the persistent buffers. Not by ``state_dict()``, which gathers in some models' hooks."""
    if isinstance(model, nn.Module):
        passing = {
            f"{prefix}.{name}".lstrip(".")
            for prefix, module in model.named_modules(remove_duplicate=False)
            for name in unsaved_buffers(module)
        }
        tensors = [*model.named_parameters(remove_duplicate=False), *model.named_buffers()]
        saved = [(without_wrappers(name), tensor) for name, tensor in tensors if name not in passing]
        if tied_once:  # under the name that checkpoints have: transformers says which they do not save
            second, seen = {*getattr(model, "all_tied_weights_keys", ())}, dict[int, str]()
            for name, tensor in sorted(saved, key=lambda entry: entry[0] in second):
                seen.setdefault(id(tensor), name)
            saved = [(name, tensor) for name, tensor in saved if seen[id(tensor)] == name]
        yield from saved
        return
    for name, tensor in model.items() if isinstance(model, Mapping) else model:
        if isinstance(model, Mapping) and not isinstance(tensor, nn.Parameter):
            raise PlanError(f"'{name}' is not a parameter", "give the model itself: a state_dict() may be a copy")
        yield name, tensor


def piece(
    name: str, shape: tuple[int, ...], runs: tuple[Runs, ...], local: torch.Tensor
) -> tuple[HeldSlice, torch.Tensor]:
    """The part ``runs`` of a tensor of ``shape``, whose elements are in ``local``.

    Raises PlanError if they have no dtype of checkpoints, or are not yet there, or not plainly.
    """
    dtype = DTYPE_NAMES.get(local.dtype)
    if dtype is None:
        raise PlanError(f"{name} is of {local.dtype}, which no checkpoint has")
    if type(local) not in (torch.Tensor, nn.Parameter) or local.layout is not torch.strided:
        kind = type(local).__name__ if local.layout is torch.strided else f"tensor in {local.layout}"
        raise PlanError(f"{name}: a {kind} is not a plain tensor, so its bytes are not where its shape says")
    if local.is_neg() or local.is_conj():
        why = "shows memory with other signs than are there"
        raise PlanError(f"{name}: {why}", "give what its resolve_neg().resolve_conj() gives")
    if local.device.type == "meta":
        raise PlanError(f"{name} is on the meta device: it has no data yet")
    return HeldSlice(name, dtype, shape, runs), local.detach()


def _of(name: str, tensor: torch.Tensor) -> tuple[HeldSlice, torch.Tensor]:
    shape = tuple(tensor.shape)
    if not isinstance(tensor, DTensor):
        return piece(name, shape, tuple((Run(0, size),) if size else () for size in shape), tensor)
    mesh, local = tensor.device_mesh, tensor.to_local()
    try:
        placements = [_plain(placement, tensor.dim()) for placement in tensor.placements]
        runs = runs_of(shape, mesh.shape, mesh.get_coordinate() or (), placements, local.shape)
    except ReshardError as error:
        raise PlanError(f"{name}: {error.message}", error.hint) from error
    return piece(name, shape, runs, local)


def _plain(placement: Placement, dims: int) -> ShardedDim | None:
    """Return a placement as data. Raises PlanError for one that is not known to give a part of a tensor."""
    if type(placement) is Replicate:
        return None
    if type(placement) not in (Shard, StridedShard):
        hint = "sum it (redistribute) before a push" if isinstance(placement, Partial) else None
        raise PlanError(f"the placement {placement!r} does not say which elements a rank holds", hint)
    assert isinstance(placement, Shard | StridedShard)
    return ShardedDim(placement.dim % dims, int(placement.split_factor) if isinstance(placement, StridedShard) else 1)


def _shown(part: HeldSlice | None) -> str:
    if part is None:
        return "no tensor"
    runs = ["+".join(f"{run.offset}:{run.end}" for run in dim) for dim in part.runs]
    return f"{part.name} ({part.dtype} [{', '.join(runs)}] of {[*part.shape]})"


# --- Megatron-Core ------------------------------------------------------------------------------------------------


@torch.no_grad()
def slices_of_megatron(model: nn.Module | Iterable[nn.Module]) -> list[tuple[HeldSlice, torch.Tensor]]:
    """Return this rank's slices of the tensors that Megatron-Core stores, each with the live tensor of equal
    dimensions.

    ``model`` is the model, or its chunks if the pipeline is interleaved; wrapped by Megatron's DDP or Float16Module, or
    not. A rank may hold several parts of one tensor: layers, experts, and gate and up, which are stored one after the
    other. A table of the vocabulary has the rows to which this mesh pads it. Raises PlanError for a part that is not a
    view of a parameter.

    Source: Megatron-Core 0.16.1, ``dist_checkpointing/mapping.py``. Names and shapes are those of its distributed
    checkpoints (``formats/programs/megatron.toml``). Megatron-Core is not imported here.
    """
    parts = []
    for chunk in [model] if isinstance(model, nn.Module) else model:
        chunk = unwrapped(chunk)
        live = {parameter.untyped_storage().data_ptr() for parameter in [*chunk.parameters(), *chunk.buffers()]}
        if not hasattr(chunk, "sharded_state_dict"):
            raise PlanError(f"a {type(chunk).__name__} is not a model of Megatron-Core: it has no sharded_state_dict()")
        for part, tensor in _parts(chunk.sharded_state_dict(metadata={"singleton_local_shards": False})):
            if tensor.untyped_storage().data_ptr() not in live:
                raise PlanError(f"{part.key}: Megatron-Core would store a copy, not what the model holds")
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
        raise PlanError(f"{name}: what Megatron-Core would store is not a view of the model's own")
    return whole.as_strided(indices.shape, strides, whole.storage_offset() + offset)
