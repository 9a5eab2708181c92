"""A failure of the shards' model where the original's runs: in which module, and which tensor's rule does not fit
there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch.distributed as dist

from formats.errors import CheckpointError, ReshardError
from reshard.mesh.plan import Plan
from verify.forward.job import Failure
from verify.forward.worker import is_of_collective
from verify.rank.loading import UnfitError
from verify.rank.machine import machine_fault
from verify.rank.roles import Kind, roles


class UnlikeError(CheckpointError):
    """The shards' model does not return at ``place`` what the original's does, whatever its values."""

    def __init__(self, message: str, place: str) -> None:
        super().__init__(message)
        self.place = place


def is_of_model(error: Exception) -> bool:
    """Whether the cause of an error is the model, not the machine or another rank."""
    if isinstance(error, ReshardError):
        return isinstance(error, (UnfitError, UnlikeError))
    return not (isinstance(error, OSError) or machine_fault(error) or is_of_collective(error))


def failure_of(error: Exception, plan: Plan, path: Sequence[str], sources: Mapping[str, tuple[str, ...]]) -> Failure:
    """Where the shards' model failed, and which tensor's rule does not fit there."""
    place, tensor, is_gathered = path[-1] if path else "", None, False
    if isinstance(error, UnfitError):
        place = error.parameter.rpartition(".")[0]
        tensor = next((name for name in plan.entries if name.endswith(error.parameter)), None) if place else None
    elif isinstance(error, UnlikeError):
        place = error.place
    if tensor is None:
        tensor, is_gathered = _unfitting(place, plan, sources)
    rule = str(plan.entries[tensor].layout.rule) if tensor else None
    message = error.message if isinstance(error, ReshardError) else " ".join(f"{type(error).__name__}: {error}".split())
    return Failure(place, dist.get_rank(), message, tensor, rule, is_gathered)


def _unfitting(place: str, plan: Plan, sources: Mapping[str, tuple[str, ...]]) -> tuple[str | None, bool]:
    """The tensor to look at if a module fails: the nearest in its block of which nothing takes a part, or its own."""
    found = roles(plan, sources)
    around = place
    while around and (around == place or any(segment.isdigit() for segment in around.split("."))):
        for name, role in found.items():
            if name.startswith(f"{around}.") and role.is_gathered and role.kind is Kind.COLUMN:
                return role.entry.name, True
        around = around.rpartition(".")[0]
    own = (role.entry.name for name, role in found.items() if name.rpartition(".")[0] == place and role.along)
    return next(own, None), False
