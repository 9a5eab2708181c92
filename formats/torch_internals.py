"""What is used of torch that it does not document: a new release that moves any of it breaks this file alone.

Needs torch. ``tests/formats/test_internals.py`` names every symbol.
"""

from __future__ import annotations

from types import FrameType
from typing import Any

from torch import Tensor, nn
from torch.distributed.distributed_c10d import PrefixStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map

__all__ = [
    "PrefixStore",
    "TorchDispatchMode",
    "collective_of",
    "has_buffers_of_its_own",
    "is_timeout",
    "own_buffers",
    "own_parameters",
    "renumber",
    "tree_flatten",
    "tree_leaves",
    "tree_map",
    "unsaved_buffers",
]


def own_parameters(module: nn.Module) -> dict[str, nn.Parameter | None]:
    """The parameters of a module itself, by name. What is put in takes the old one's place, unregistered as it is."""
    return module._parameters


def own_buffers(module: nn.Module) -> dict[str, Tensor | None]:
    """The buffers of a module itself, by name. What is put in takes the old one's place."""
    return module._buffers


def has_buffers_of_its_own(module: nn.Module) -> bool:
    """Whether a module has buffers that are not saved."""
    return bool(module._non_persistent_buffers_set)


def unsaved_buffers(module: nn.Module) -> frozenset[str]:
    """The names of a module's own buffers that are not saved."""
    return frozenset(module._non_persistent_buffers_set)


def renumber(held: nn.ModuleList, kept: Any) -> None:
    """Keep these modules of a list, under the numbers that they had in it."""
    held._modules = {str(i): held[i] for i in kept}


def collective_of(frame: FrameType) -> str | None:
    """The collective of torch.distributed that a frame of the stack is in."""
    of = frame.f_globals.get("__name__", "") == "torch.distributed.distributed_c10d"
    name = frame.f_code.co_name
    return name if of and not name.startswith("_") else None


def is_timeout(error: BaseException) -> bool:
    """Whether a collective gave up waiting: no class of error says it, and gloo and NCCL word it differently."""
    return any(words in str(error).lower() for words in ("timed out", "timeout"))
