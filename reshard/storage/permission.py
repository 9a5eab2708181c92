"""Whether an output may be written to a place."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from pathlib import Path

from formats.errors import CheckpointError
from formats.files.sharded import MANIFEST
from reshard.storage.marks import check_staging, staging_of


def check_output(out: Path, sources: Sequence[Path], *, overwrite: bool, begun: bool = False) -> None:
    """Raise CheckpointError if the output exists, or if it or its staging folder overlaps with a source folder.

    An output may exist with ``overwrite``, or if an earlier run has ``begun`` it. Changes nothing.
    """
    for place in (out, staging_of(out)):
        target = Path(os.path.realpath(place))  # Path.resolve fails on a link to itself
        for source in sources:
            other = Path(os.path.realpath(source))
            if target == other or target in other.parents or other in target.parents:
                what = f"{out} and {source} are the same folder, or one lies in the other"
                if place != out:
                    what = f"{out} would be built in {place}, which is the source {source}, or around or in it"
                raise CheckpointError(what, "choose another output folder")
    if not out.parent.is_dir():
        raise CheckpointError(f"{out.parent}: no such folder", "make it first")
    if out.is_symlink() or (out.exists() and not out.is_dir()):
        raise CheckpointError(f"{out} exists and is not a folder")
    if out.is_mount():
        raise CheckpointError(
            f"{out} is the root of a file system, which cannot be replaced", f"give a folder in it, as {out / 'model'}"
        )
    check_staging(out)
    if begun or not out.exists() or not any(out.iterdir()):
        return
    if not any((out / name).exists() for name in (MANIFEST, "config.json")):
        raise CheckpointError(
            f"{out} exists but is not a checkpoint, so it is not overwritten", "choose another folder"
        )
    if not overwrite:
        raise CheckpointError(f"{out} exists", "remove it, choose another folder, or pass --overwrite")


def check_space(folder: Path, needed: int) -> None:
    """Raise CheckpointError if the disk has less free space than ``needed`` bytes."""
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise CheckpointError(
            f"{folder}: {needed:,} bytes are needed and {free:,} are free", "free some space, or write to another disk"
        )
