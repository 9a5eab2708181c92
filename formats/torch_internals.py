"""Undocumented parts of torch that are used, with the versions that were tried; torch's dtypes by name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.distributed_c10d import PrefixStore
from torch.nn.utils.stateless import _reparametrize_module as with_tensors
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from reshard.formats.files.safetensors import TORCH_NAMES

TORCH_DTYPES: Mapping[str, torch.dtype] = {
    dtype: getattr(torch, name) for dtype, name in TORCH_NAMES.items() if hasattr(torch, name)
}
"""The dtypes of headers that torch has as one."""

__all__ = [
    "PrefixStore", "TorchDispatchMode", "tree_leaves", "tree_map", "with_tensors",  # passed on
]  # fmt: skip


def bytes_in(tensor: Tensor) -> Tensor:
    """The bytes of a contiguous tensor, which it shares. Of a dimension of length 1 the stride may be any number."""
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def own_parameters(module: nn.Module) -> dict[str, nn.Parameter | None]:
    """The parameters of a module itself, by name. A value put in takes the old one's place, without registering it."""
    return module._parameters


def own_buffers(module: nn.Module) -> dict[str, Tensor | None]:
    """The buffers of a module itself, by name. A value put in takes the old one's place."""
    return module._buffers


def unsaved_buffers(module: nn.Module) -> frozenset[str]:
    """The names of a module's own buffers that are not saved."""
    return frozenset(module._non_persistent_buffers_set)


def renumber(modules: nn.ModuleList, numbers: Any) -> None:
    """Keep these modules of a list, under the numbers that they had in it."""
    modules._modules = {str(i): modules[i] for i in numbers}


def collective_of(frame: FrameType) -> str | None:
    """The collective of torch.distributed that a frame of the stack is in."""
    is_collective = frame.f_globals.get("__name__", "") == "torch.distributed.distributed_c10d"
    name = frame.f_code.co_name
    return name if is_collective and not name.startswith("_") else None


def share_memory(memory: Tensor) -> list[Any]:
    """Return a handle (numbers, texts and None, for JSON) with which one process on the same GPU can open a tensor's
    memory.

    It is the IPC of CUDA and ROCm. The handle works once; the memory must stay until the other process is done with it.
    """
    handle: tuple[Any, ...] = memory.untyped_storage()._share_cuda_()  # type: ignore[no-untyped-call]
    return [each.hex() if isinstance(each, bytes) else each for each in handle]


def shared_memory(handle: Sequence[Any], device: torch.device) -> Tensor:
    """The bytes behind what :func:`share_memory` returned, on the same GPU as this process counts it."""
    _, *rest = (bytes.fromhex(each) if isinstance(each, str) else each for each in handle)
    number = torch.cuda.current_device() if device.index is None else device.index
    storage = torch.UntypedStorage._new_shared_cuda(number, *rest)
    return torch.empty(0, dtype=torch.uint8, device=device).set_(storage)


def is_timeout(error: BaseException) -> bool:
    """Whether an error is a collective's timeout. No class of error says so; gloo and NCCL have different words."""
    return any(words in str(error).lower() for words in ("timed out", "timeout"))
