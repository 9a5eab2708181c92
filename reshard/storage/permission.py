"""Whether an output may be written to a place."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from formats.errors import CheckpointError
from formats.files.sharded import MANIFEST
from formats.regular_files import read_file
from reshard.storage.marks import check_staging, staging_of
from reshard.storage.strangers import refuse_strangers


def check_output(
    out: Path, sources: Sequence[Path], same: Mapping[str, bytes] = {}, *, overwrite: bool, begun: bool = False
) -> None:
    """Raise CheckpointError if the output exists, or if it or its staging folder overlaps with what is read.

    ``sources`` are the folders and files of the source. An output may exist with ``overwrite``, or if an earlier run
    has ``begun`` it. It is not overwritten if it holds files that belong to no checkpoint, but for those that are
    written again with the ``same`` content. Changes nothing.
    """
    for place in (out, staging_of(out)):
        _check_apart(out, place, sources)
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
    check_no_strangers(out, same)


def check_no_strangers(out: Path, same: Mapping[str, bytes] = {}, folders: Collection[str] = ("",)) -> None:
    """Raise CheckpointError if folders of an output hold files that belong to no checkpoint: replacing removes them."""
    names = [name for name in _names(out) if "" in folders or name.partition("/")[0] in folders]
    refuse_strangers(str(out), names, lambda name: _content(out / name), same)


def _names(out: Path) -> Iterator[str]:
    """The files and links below a folder, relative to it."""
    for root, folders, files in os.walk(out):
        here = Path(root)
        links = (name for name in folders if (here / name).is_symlink())
        yield from ((here / name).relative_to(out).as_posix() for name in (*files, *links))


def _content(path: Path) -> bytes | None:
    return read_file(path) if path.is_file() else None


def _check_apart(out: Path, place: Path, sources: Sequence[Path]) -> None:
    """Raise CheckpointError if a place that is replaced is or holds something of the source, or lies in it.

    What is compared is what is there, as the file system numbers it: one folder may have several names, by links and
    by mounts.
    """
    target = Path(os.path.realpath(place))  # Path.resolve fails on a link to itself
    around, within = {*_numbers((target, *target.parents))}, {*_numbers(_below(target))}
    for source in sources:
        real = Path(os.path.realpath(source))
        mine = {*_numbers([real])}
        if not (mine | {*_numbers([real.parent])}) & within and not (mine & around and real.is_dir()):
            continue
        what = f"{out} and {source} are the same folder, or one lies in the other"
        if not real.is_dir():
            what = f"{source} is read, and lies in {out}, which would be replaced"
        if place != out:
            what = f"{out} would be built in {place}, which is the source {source}, or around or in it"
        raise CheckpointError(what, "choose another output folder")


def _below(folder: Path) -> Iterator[Path]:
    """A folder, and all folders and files in it."""
    for root, _, files in os.walk(folder):
        yield Path(root)
        yield from (Path(root, name) for name in files)


def _numbers(paths: Iterable[Path]) -> Iterator[tuple[int, int]]:
    """The device and inode of each folder that is there, and of each file that has no second name (a hard link)."""
    for path in paths:
        with contextlib.suppress(OSError):
            found = path.lstat()
            if path.is_dir() or found.st_nlink == 1:
                yield found.st_dev, found.st_ino
