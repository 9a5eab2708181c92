"""All sets of weights in a folder: trainers and engines leave theirs beside each other, of one model or of several.

A set is known by the names of its files. A user chooses one by naming its file or folder as the source.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path, PurePosixPath

from reshard.formats.documents import MAX_INDEX
from reshard.formats.errors import CheckpointError
from reshard.formats.files.checkpoint import METADATA, MODEL, TRACKERS, is_adapter, step_of, whole_series
from reshard.formats.store import FilePath, StoredPath, local_path, location_of, name_in, public_name, read_file, walk
from reshard.store.range_store import RangeStore
from reshard.store.selection import INDICES, weights_named

_BIN = "pytorch_model.bin"
_OF_PROGRAMS = [
    re.compile(pattern)
    for pattern in (
        r"pytorch_model_fsdp(_\d+)?(_rank\d+)?(\.bin)?",
        rf"{re.escape(METADATA)}|__\d+_\d+\.distcp|shard-\d+-.*\.safetensors",
        r"model_world_size_\d+_rank_\d+\.pt",
        r"mp_rank_[\d_]+|.*mp_rank_\d+_model_states\.pt|zero_pp_rank_\d+_.*_states\.pt",
        r"consolidated\.\d+\.pth",
        r"consolidated(-\d+-of-\d+)?\.safetensors",
        r"model-(rank-\d+|pp-\d+-tp-\d+)-part-\d+\.safetensors",
    )
]
"""Names that other programs use at the top of a folder."""
_STEP = re.compile(r"iter_\d{7,}|release|global_step\d+(_universal)?")


@dataclass(frozen=True)
class WeightSet:
    """A set of weights: the word by which a user chooses it, and the names of its files and folders."""

    folder: FilePath
    name: str
    parts: frozenset[str]
    is_usual: bool
    """Whether transformers looks for it."""

    @property
    def date(self) -> str:
        """The time of the last write to its files, for messages; "" if unknown."""
        paths = [local_path(self.folder / name) for name in self.parts]
        times = [path.stat().st_mtime for path in paths if path is not None and path.exists()]
        return f" ({datetime.fromtimestamp(max(times)):%Y-%m-%d %H:%M:%S})" if times else ""


def sets_in(folder: FilePath) -> list[WeightSet]:
    """The sets of weights in a folder, in the order in which they are looked for."""
    if not folder.is_dir():
        return []
    names = sorted(path.name for path in folder.iterdir())
    series, sets = whole_series(names), list[WeightSet]()

    def add(name: str, parts: Collection[str], *, is_usual: bool = False) -> None:
        sets.append(WeightSet(folder, name, frozenset(parts), is_usual))

    for single, index in ((MODEL, INDICES[0]), (_BIN, INDICES[1])):
        of_kind = {name for name in names if name.endswith(PurePosixPath(single).suffix)}
        named = set[str]()
        if index in names:  # that of one whole series need not be read: it may have 500,000 names
            named = next(({*files} for files in series if {*files} == of_kind), named)
            named = named or {*weights_named(lambda name: _content(folder / name), [index])}
        if single in names:
            add(single, named | {single, index} if single in named else {single}, is_usual=True)
        if named and single not in named and all((folder / name).is_file() for name in named):
            add(index, {*named, index}, is_usual=True)
        for files in series:
            if files[0].endswith(PurePosixPath(single).suffix) and not {*files} & named and not _is_programs(files[0]):
                add(files[0], files, is_usual=True)
    for pattern in _OF_PROGRAMS:
        if found := [name for name in names if pattern.fullmatch(name)]:
            add(found[0], found)
    steps = [name for name in names if _STEP.fullmatch(name) and (folder / name).is_dir()]
    for tracker in (name for name in TRACKERS if name in names):
        with suppress(CheckpointError):
            step = step_of(tracker, _content(folder / tracker) or b"")
            add(step, {*steps, *(name for name in names if name in TRACKERS), step.partition("/")[0]})
            return sets
    if steps:
        add(max(steps, key=lambda name: (name != "release", len(name), name)), steps)
    return sets


def view_of(chosen: WeightSet) -> StoredPath:
    """The folder as if it had no other set."""
    folder = chosen.folder
    others = {name for other in sets_in(folder) for name in other.parts} - chosen.parts
    files = dict[str, FilePath]()
    for root, folders, names in walk(folder):
        below = "" if root == folder else f"{name_in(root, folder)}/"
        folders[:] = [name for name in folders if not name.startswith(".") and below + name not in others]
        files |= {below + name: root / name for name in names if below + name not in others and (root / name).is_file()}
    name, beside = f"{public_name(folder)}/{chosen.name}", tuple(sorted(others))
    return StoredPath(RangeStore(name, files, location=location_of(folder), others=beside, folder=local_path(folder)))


def chosen(path: Path) -> StoredPath | None:
    """The folder of a file that a user names, with no other weights than the set that the file belongs to."""
    sets = sets_in(path.parent) if not is_adapter(path.name) else []
    return next((view_of(each) for each in sets if path.name in each.parts), None)


def _is_programs(name: str) -> bool:
    return any(pattern.fullmatch(name) for pattern in _OF_PROGRAMS)


def _content(path: FilePath) -> bytes | None:
    with suppress(CheckpointError):
        return read_file(path, MAX_INDEX) if path.is_file() else None
    return None
