"""What this rank holds of a torch model: DTensors by their placements, everything else whole.

Nothing is copied, and no collective runs: the tensors are views of the live parameters.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import zip_longest
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard as StridedShard

from formats.errors import LiveError, PlanError, ReshardError
from formats.notation.architecture import without_wrappers
from formats.notation.axes import Run
from formats.notation.placements import Cut, Runs, runs_of
from formats.torch_internals import TORCH_DTYPES, unsaved_buffers
from reshard.live.sides import Slice

DTYPE_NAMES = {dtype: name for name, dtype in TORCH_DTYPES.items()}
"""What headers call a dtype of torch."""

_ADAPTER = re.compile(r"\.(base_layer|lora_\w+|original_module|modules_to_save)\.")

Named = Mapping[str, torch.Tensor] | Iterable[tuple[str, torch.Tensor]]


def unwrapped(model: Any) -> Any:
    """The module within DDP, Megatron's wrappers and their like; anything else as it is."""
    while isinstance(model, nn.Module) and isinstance(inner := getattr(model, "module", None), nn.Module):
        model = inner
    return model


@torch.no_grad()
def slices_of(model: nn.Module | Named, *, tied_once: bool = True) -> list[tuple[Slice, torch.Tensor]]:
    """What this rank holds of each parameter and each buffer that checkpoints have, with the live tensor.

    The model, or its tensors with their names, which are those of ``named_parameters()``; a tied parameter comes once,
    or under each name.
    A dictionary has parameters alone: what ``state_dict()`` gives may be a copy.
    A DTensor's tensor is the local one, which may be empty; any other tensor is held whole. Modules of FSDP2 are
    resharded first: after a forward without a backward some hold whole parameters. Raises PlanError, with the tensor's
    name, for what has no runs: a partial sum, an unknown placement, a dtype without a name.
    """
    model = unwrapped(model)
    if isinstance(model, nn.Module):
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()
    parts = []
    for name, tensor in _named(model, tied_once):
        if _ADAPTER.search(name):
            raise PlanError(f"'{name}' is of an adapter that is not merged", "push what merge_and_unload() gives")
        if isinstance(tensor, DTensor) and tensor.device_mesh.get_coordinate() is None:
            continue  # it is on a mesh that this rank is no part of
        part, local = _of(name, tensor)
        is_buffer = isinstance(model, nn.Module) and not isinstance(tensor, nn.Parameter)
        parts.append((part._replace(is_buffer=is_buffer), local))
    return parts


def check_unchanged(planned: Sequence[Slice], now: Sequence[Slice]) -> None:
    """Raise LiveError, with the tensor's name, unless a later reading of the model gave what the plan was made of."""
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
            raise PlanError(f"'{name}' is no parameter", "give the model itself: a state_dict() may be a copy")
        yield name, tensor


def piece(name: str, shape: tuple[int, ...], runs: tuple[Runs, ...], local: torch.Tensor) -> tuple[Slice, torch.Tensor]:
    """The part ``runs`` of a tensor of ``shape``, whose elements are in ``local``.

    Raises PlanError if they have no dtype of checkpoints, or are not yet there, or not plainly.
    """
    dtype = DTYPE_NAMES.get(local.dtype)
    if dtype is None:
        raise PlanError(f"{name} is of {local.dtype}, which no checkpoint has")
    if type(local) not in (torch.Tensor, nn.Parameter):
        raise PlanError(
            f"{name}: a {type(local).__name__} is no plain tensor, so its bytes are not where its shape says"
        )
    if local.device.type == "meta":
        raise PlanError(f"{name} is on the meta device: it has no data yet")
    return Slice(name, dtype, shape, runs), local.detach()


def _of(name: str, tensor: torch.Tensor) -> tuple[Slice, torch.Tensor]:
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


def _plain(placement: Placement, dims: int) -> Cut | None:
    """A placement as data. Raises PlanError for one that is not known to be a part of a tensor."""
    if type(placement) is Replicate:
        return None
    if type(placement) not in (Shard, StridedShard):
        hint = "sum it (redistribute) before a push" if isinstance(placement, Partial) else None
        raise PlanError(f"the placement {placement!r} does not say which elements a rank holds", hint)
    assert isinstance(placement, Shard | StridedShard)
    return Cut(placement.dim % dims, int(placement.split_factor) if isinstance(placement, StridedShard) else 1)


def _shown(part: Slice | None) -> str:
    if part is None:
        return "no tensor"
    runs = ["+".join(f"{run.offset}:{run.end}" for run in dim) for dim in part.runs]
    return f"{part.name} ({part.dtype} [{', '.join(runs)}] of {[*part.shape]})"
