"""Merges shards into one full checkpoint."""

from __future__ import annotations

from formats.errors import CheckpointError
from formats.notation.format import HUGGING_FACE
from reshard.mesh.plan import make_plan
from reshard.source.access import open_any
from reshard.source.source import UNSPLIT
from reshard.writing.output import Output
from reshard.writing.rewrite import WriteRequest, rewrite, start
from reshard.writing.summary import Summary


def merge(request: WriteRequest) -> Summary:
    """Merge shards into one full Hugging Face checkpoint.

    The original files are restored byte for byte, as the manifest describes them. With ``max_shard_size``, or without a
    manifest, or if the original was not safetensors, new files of at most this size are written. The source may be a
    full checkpoint in safetensors only with ``patch``, ``dequantize`` or ``adapter``. Raises ReshardError; ``out``
    exists only if it is complete.
    """
    began, opened = start(request), open_any(request.source, request)
    is_full = not opened.is_split and all(file.header is not None for file in opened.files.values())
    if is_full and not (request.deltas or request.dequantize or request.adapter is not None):
        raise CheckpointError(
            f"{request.source} is a full checkpoint, there is nothing to merge",
            "give the folder that 'reshard split' wrote",
        )
    plan = make_plan(opened.model, UNSPLIT)
    return rewrite(Output(opened, plan, HUGGING_FACE, request.max_shard_size), began, request)
