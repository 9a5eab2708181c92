"""Merges shards into one full checkpoint."""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path

from formats.errors import CheckpointError, MismatchError
from formats.files.safetensors import TensorInfo, build_header, tensor_bytes
from formats.files.sharded import MANIFEST
from reshard.engine.jobs import Options
from reshard.launcher import Share
from reshard.planning.arrangement import arrangement_of
from reshard.planning.model import in_order
from reshard.planning.plan import Plan, make_plan
from reshard.storage.access import Access, open_any
from reshard.storage.marks import tidy
from reshard.storage.output import PublishedError
from reshard.storage.place import place_of
from reshard.storage.retries import tried_again
from reshard.storage.source import UNSPLIT, Source
from reshard.writing.files import (
    DEFAULT_SHARD_SIZE,
    NewFile,
    check_place,
    deal,
    new_file,
    noted,
    staging_for,
    task_of,
    write_files,
)
from reshard.writing.progress import Progress, no_progress
from reshard.writing.publishing import publish_output
from reshard.writing.shard_files import index_text, partition
from reshard.writing.summary import Summary, done, summed_up


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
    began = time.monotonic()
    (folder, bucket), options = place_of(out, access.cache_dir), options or Options()
    before = tried_again()
    opened = open_any(shards, access)
    if not opened.is_split and not access.dequantize:
        raise CheckpointError(
            f"{shards} is a full checkpoint, there is nothing to merge",
            "give the folder that 'reshard split' wrote",
        )
    target = make_plan(opened.model, UNSPLIT)
    files, documents = _full_checkpoint(opened, target, max_shard_size)
    total = sum(file.size for file in files)

    task = {"command": "merge", "source": opened.record.id, "files": [[file.name, file.size] for file in files]}
    task |= task_of(opened, options)
    dealt = deal(files, part)

    def check() -> None:
        check_place(bucket or folder, opened, files, dealt, task, overwrite=overwrite)

    summary = Summary(
        command="merge" if opened.is_split else "write", source=opened.location, out=bucket.name if bucket else folder,
        source_mesh=opened.plan.mesh, mesh=UNSPLIT,
        tensors=len(target.model.tensors), files=len(files), nbytes=total, written=0, padding={}, ranks=(0,),
        complete=False, dry_run=dry_run, left_behind=opened.left_behind, note=noted(access, opened),
        tried_again=tried_again() - before,
    )  # fmt: skip
    summary = summed_up(summary, files, part, dealt)
    if not dry_run:
        tidy(folder)
    try:
        check()
        if dry_run:
            return summary
        with staging_for(folder, bucket, task, [""], opened, files, dealt, options, check) as staging:
            written = write_files(opened, arrangement_of(target, None), files, staging, options, progress)
            complete = publish_output(
                opened, written, staging, options, lambda sums: documents | opened.read_side_files(),
                overwrite=overwrite,
            )  # fmt: skip
    except PublishedError:
        return dataclasses.replace(summary, complete=True)
    return done(summary, written, complete=complete, began=began)


def _full_checkpoint(source: Source, plan: Plan, max_shard_size: int | None) -> tuple[list[NewFile], dict[str, bytes]]:
    """The files of the full checkpoint and its index: the original ones from the manifest, or new ones."""
    record = source.record
    if record.files and max_shard_size is None:
        _check_restorable(source, plan)
        index = {record.index_name: record.index} if record.index_name and record.index is not None else {}
        return [
            NewFile(f.name, "", 0, f.header, f.size, f.places, expected=f.checksum, summed=f.checksum is not None)
            for f in record.files
        ], index
    sizes = {kind: tensor_bytes(kind.name, kind.dtype, kind.shape) for kind in plan.model.kinds}
    tensors = ((name, kind.dtype, kind.shape, sizes[kind]) for name, kind, _ in in_order(plan.model.tensors))
    shards = partition(tensors, max_shard_size or DEFAULT_SHARD_SIZE)
    headers = [build_header(shard.tensors, {"format": "pt"}) for shard in shards]
    files = [new_file(shard, "", 0, header, summed=False) for shard, header in zip(shards, headers, strict=True)]
    return files, {"model.safetensors.index.json": index_text(shards).encode()} if len(shards) > 1 else {}


def _check_restorable(source: Source, plan: Plan) -> None:
    """Raise MismatchError unless the headers in the manifest describe exactly the tensors of the shards."""
    kept: dict[str, TensorInfo] = {}
    for file in source.record.files:
        kept.update(file.tensors)
    for name, kind, _ in plan.model.tensors:
        info = kept.pop(name, None)
        if info is None or info.shape != kind.shape or info.dtype != kind.dtype:
            raise MismatchError(
                f"{source.path / MANIFEST}: its source files do not have tensor '{name}' as the shards have it"
            )
    if kept:
        raise MismatchError(f"{source.path}: tensor '{min(kept)}' is in the manifest's source files, but in no shard")
