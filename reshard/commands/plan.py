"""What each rank of a mesh has of each tensor, from headers alone."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path

from formats.errors import PlanError
from formats.notation.format import Format
from formats.notation.format_file import HUGGING_FACE, format_to_write
from reshard.mesh.plan import Degrees, Plan
from reshard.placement.program_plan import check_kept, plan_for
from reshard.source.access import Access, open_any
from reshard.store.selection import Weights


@dataclass(frozen=True)
class PlanRequest(Access, Degrees):
    """What ``plan`` takes. ``format`` is the name of another program's format to plan for."""

    source: str | Path = field(repr=False)  # a URL may have a password
    _: KW_ONLY
    format: str | None = None


def plan(request: PlanRequest) -> Plan:
    """The plan of a checkpoint: each rank's part of each tensor. Reads headers only.

    Raises CheckpointError if the source is not a checkpoint, PlanError if a degree is not possible.
    """
    format = planned_format(request)
    return plan_for(open_any(request.source, request, Weights.HEADERS).model, format, request)


def planned_format(request: PlanRequest) -> Format:
    """The requested format. Raises PlanError if it cannot be planned for."""
    format = format_to_write(request.format)
    if format is HUGGING_FACE:
        what = f"'{format.name}' is one full checkpoint: there are no ranks to plan for"
        raise PlanError(what, "give the format of a program that loads ranks")
    check_kept(request, format)
    return format
