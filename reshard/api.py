"""The Python API: plan, split, merge, load."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from formats.mesh import mesh_of
from reshard.engine.jobs import Options
from reshard.planning.arrangement import arrangement_of
from reshard.planning.plan import Padding, Plan, plan_of
from reshard.storage.access import Access, open_any
from reshard.storage.fetched import Weights
from reshard.writing.merge import merge
from reshard.writing.split import split, wanted_ranks
from reshard.writing.summary import Summary

if TYPE_CHECKING:
    import torch

__all__ = ["Access", "Options", "Padding", "Summary", "load", "merge", "plan", "split"]


def plan(
    source: str | Path,
    tp: int = 1,
    *,
    ep: int = 1,
    pp: int = 1,
    pp_layers: Sequence[int] = (),
    same_ranks: bool = False,
    uneven: bool = False,
    access: Access = Access(),
    padding: Padding = Padding(),
) -> Plan:
    """The plan of a checkpoint on a mesh of ``pp`` x ``ep`` x ``tp`` ranks: each rank's part of each tensor.

    Reads headers only. ``pp_layers`` and ``uneven`` as for ``split``. Raises CheckpointError if the source is not a
    checkpoint, PlanError if a degree is not possible.
    """
    opened = open_any(source, access, Weights.HEADERS)
    return plan_of(opened.model, mesh_of(tp, ep, same_ranks, pp, pp_layers), uneven=uneven, padding=padding)


def load(
    source: str | Path,
    tp: int = 1,
    rank: int = 0,
    *,
    ep: int = 1,
    pp: int = 1,
    pp_layers: Sequence[int] = (),
    same_ranks: bool = False,
    uneven: bool = False,
    access: Access = Access(),
    padding: Padding = Padding(),
) -> dict[str, torch.Tensor]:
    """The tensors of one rank of a checkpoint (full, or split to any degree). Reads only the bytes that it owns.

    ``pp_layers`` and ``uneven`` as for ``split``. Returns CPU tensors by name, in the rank's local shapes and the
    checkpoint's dtypes. Raises ReshardError.
    """
    from reshard.engine.loading import load_rank

    mesh = mesh_of(tp, ep, same_ranks, pp, pp_layers)
    wanted_ranks([rank], mesh)
    opened = open_any(source, access)
    target = plan_of(opened.model, mesh, uneven=uneven, padding=padding)
    tensors = load_rank(opened, arrangement_of(target, None), rank)
    opened.check_unchanged()
    return tensors
