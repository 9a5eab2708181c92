"""Puts a delta on its base."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path

from reshard.delta.patched import patched_path
from reshard.source.access import Access, find, open_any, open_found
from reshard.source.source import Source
from reshard.store.selection import Weights
from reshard.writing.full_checkpoint import FullCheckpoint
from reshard.writing.rewrite import WriteRequest, begun, place_of, rewrite
from reshard.writing.summary import Summary


@dataclass(frozen=True, kw_only=True)
class PatchRequest(WriteRequest):
    """What ``patch`` takes: ``source`` is the base, ``delta`` what ``diff`` wrote."""

    delta: str | Path = field(repr=False)  # a URL may have a password


def patch(request: PatchRequest) -> Summary:
    """Put a delta on its base: writes the files that a merge of the other checkpoint would write.

    Raises ReshardError; a delta for another base is refused before anything is written.
    """
    start, place = begun(), place_of(request.out, request.cache_dir)
    opened = open_patched(request.source, request.delta, request)
    return rewrite(FullCheckpoint(opened, request.max_shard_size), place, start, request)


def open_patched(source: str | Path, delta: str | Path, access: Access) -> Source:
    """Open a base with a delta. Raises ReshardError."""
    base = open_any(source, access)
    path = find(delta, replace(access, revision=None), Weights.FILES)
    return open_found(patched_path(base, path), replace(access, revision=None, config=None))
