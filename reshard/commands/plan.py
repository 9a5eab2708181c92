"""What each rank of a mesh has of each tensor, from headers alone."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path

from formats.errors import PlanError
from formats.notation.format import Format
from formats.notation.format_file import HUGGING_FACE, format_of
from reshard.mesh.plan import Degrees, Plan, plan_of
from reshard.placement.kept_settings import check_kept
from reshard.source.access import Access, open_any
from reshard.source.source import Source
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
    format = wanted_format(request)
    return planned(open_any(request.source, request, Weights.HEADERS), request, format)


def wanted_format(request: PlanRequest) -> Format | None:
    """The requested format; None: reshard's own. Raises PlanError if it cannot be planned for."""
    if request.format == HUGGING_FACE:
        what = f"'{HUGGING_FACE}' is one full checkpoint: there are no ranks to plan for"
        raise PlanError(what, "give the format of a program that loads ranks")
    format = format_of(request.format) if request.format else None
    check_kept(request, request.format, format)
    return format


def planned(source: Source, degrees: Degrees, format: Format | None) -> Plan:
    """The plan of an open source in a program's format, or without one in reshard's own form. Raises PlanError."""
    if format is None:
        return plan_of(source.model, degrees)
    from reshard.placement.program_plan import plan_for  # rarely needed

    return plan_for(source.model, format, degrees)
