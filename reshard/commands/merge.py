"""Merges shards into one full checkpoint."""

from __future__ import annotations

from formats.errors import CheckpointError
from reshard.source.access import open_any
from reshard.writing.full_checkpoint import FullCheckpoint
from reshard.writing.rewrite import WriteRequest, begun, place_of, rewrite
from reshard.writing.summary import Summary


def merge(request: WriteRequest) -> Summary:
    """Merge shards into one full Hugging Face checkpoint.

    The original files are restored byte for byte, as the manifest describes them. With ``max_shard_size``, or without a
    manifest, or if the original was not safetensors, new files of at most this size are written. The source may be a
    full checkpoint in safetensors only with ``patch``, ``dequantize`` or ``adapter``. Raises ReshardError; ``out``
    exists only if it is complete.
    """
    start, place = begun(), place_of(request.out, request.cache_dir)
    opened = open_any(request.source, request)
    is_full = opened.checkpoint is not None and all(file.header is not None for file in opened.files.values())
    if is_full and not (request.deltas or request.dequantize or request.adapter is not None):
        raise CheckpointError(
            f"{request.source} is a full checkpoint, there is nothing to merge",
            "give the folder that 'reshard split' wrote",
        )
    return rewrite(FullCheckpoint(opened, request.max_shard_size), place, start, request)
