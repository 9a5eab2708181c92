"""Puts a delta on its base."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from reshard.commands.merge import merge
from reshard.writing.rewrite import WriteRequest
from reshard.writing.summary import Summary


@dataclass(frozen=True, kw_only=True)
class PatchRequest(WriteRequest):
    """What ``patch`` takes: ``source`` is the base, ``delta`` what ``diff`` wrote, ``patch`` what follows on it."""

    delta: str | Path = field(repr=False)  # a URL may have a password

    @property
    def deltas(self) -> tuple[str | Path, ...]:
        """All deltas, in their order."""
        return (self.delta, *super().deltas)


def patch(request: PatchRequest) -> Summary:
    """Put a delta on its base: writes the files that a merge of the other checkpoint would write.

    Raises ReshardError; a delta for another base is refused before anything is written.
    """
    return merge(request)
