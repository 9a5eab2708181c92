"""One rank of a checkpoint in memory."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from formats.notation.format_file import OWN
from reshard.mesh.plan import Degrees
from reshard.placement.arrangement import arrangement_of
from reshard.placement.program_plan import plan_for
from reshard.source.access import Access, open_any

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class LoadRequest(Access, Degrees):
    """What ``load`` takes: a full checkpoint or one that is split to any degree, and the number of a rank."""

    source: str | Path = field(repr=False)  # a URL may have a password
    _: KW_ONLY
    rank: int = 0


def load(request: LoadRequest) -> dict[str, torch.Tensor]:
    """The tensors of one rank of a checkpoint. Reads only the bytes that it owns.

    Returns CPU tensors by name, in the rank's local shapes and the checkpoint's dtypes. Raises ReshardError.
    """
    from reshard.commands.rank_tensors import load_rank  # torch

    request.mesh.check_ranks([request.rank])
    opened = open_any(request.source, request)
    tensors = load_rank(opened, arrangement_of(plan_for(opened.model, OWN, request), OWN), request.rank)
    opened.check_unchanged()
    return tensors
