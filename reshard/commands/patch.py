"""Puts a delta on its base."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path

from reshard.commands.merge import merge
from reshard.writing.rewrite import WriteRequest
from reshard.writing.summary import Summary


@dataclass(frozen=True, kw_only=True)
class PatchRequest(WriteRequest):
    """What ``patch`` takes: ``source`` is the base, ``delta`` what ``diff`` wrote."""

    delta: str | Path = field(repr=False)  # a URL may have a password


def patch(request: PatchRequest) -> Summary:
    """Put a delta on its base: writes the files that a merge of the other checkpoint would write.

    Raises ReshardError; a delta for another base is refused before anything is written.
    """
    return merge(replace(request, patch=request.delta))
