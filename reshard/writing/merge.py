"""Merges shards into one full checkpoint."""

from __future__ import annotations

from pathlib import Path

from formats.errors import CheckpointError
from reshard.engine.jobs import Options
from reshard.launcher import Share
from reshard.storage.access import Access, open_any
from reshard.storage.place import place_of
from reshard.writing.full_checkpoint import FullCheckpoint
from reshard.writing.progress import Progress, no_progress
from reshard.writing.rewrite import begun, rewrite
from reshard.writing.summary import Summary


def merge(
    shards: str | Path,
    out: str | Path,
    *,
    access: Access = Access(),
    options: Options | None = None,
    max_shard_size: int | None = None,
    overwrite: bool = False,
    dry_run: bool = False,
    part: Share | None = None,
    progress: Progress = no_progress,
) -> Summary:
    """Merge shards into one full Hugging Face checkpoint.

    The original files are restored byte for byte, as the manifest describes them. With ``max_shard_size`` (bytes), or
    without a manifest, or if the original was not safetensors, new files of at most this size are written. A full
    checkpoint is taken to be dequantized (``Access.dequantize``) alone. With
    ``part`` this process writes its share of the files, and the last of all processes publishes. Raises ReshardError;
    ``out`` exists only if it is complete. It may be the URL of a place in a bucket.
    """
    start, place = begun(), place_of(out, access.cache_dir)
    opened = open_any(shards, access)
    if not opened.is_split and not access.dequantize:
        raise CheckpointError(
            f"{shards} is a full checkpoint, there is nothing to merge",
            "give the folder that 'reshard split' wrote",
        )
    return rewrite(
        FullCheckpoint(opened, max_shard_size), place, start, access=access, options=options or Options(),
        overwrite=overwrite, dry_run=dry_run, part=part, progress=progress,
    )  # fmt: skip
