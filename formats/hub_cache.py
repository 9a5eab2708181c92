"""The layout of ``huggingface_hub``'s files on the disk. It is not documented: a new layout breaks this file alone.

``tests/formats/test_internals.py`` makes both layouts, of the cache and of a download folder, with the library.
"""

from __future__ import annotations

import os
from pathlib import Path

from reshard.formats.errors import CheckpointError
from reshard.formats.store import read_file

_BLOBS = "blobs"
"""The folder of the cache in which each file is named after its content (its etag)."""
_DOWNLOADS = ".cache/huggingface/download"
"""The folder in which ``hf download --local-dir`` keeps each file's commit, etag and time (its _local_folder.py)."""
_MAX_METADATA = 10_000
"""Bytes of such a file."""


def etag_of(path: Path, name: str, mtime: float) -> str | None:
    """Return the etag of a file of the cache, or of a download folder if the file has not changed since; None if
    unknown.

    ``name`` is relative to the checkpoint's folder; ``mtime`` is when the file was last changed, in seconds.
    """
    target = Path(os.path.realpath(path)) if path.is_symlink() else path
    if target != path and target.parent.name == _BLOBS:
        return target.name
    folder = path.parents[name.count("/")]
    try:
        content = read_file(folder / _DOWNLOADS / f"{name}.metadata", _MAX_METADATA).decode()
        _, etag, time = content.splitlines()[:3]
        return etag if mtime - 1 <= float(time) else None
    except (CheckpointError, ValueError):
        return None


def begun_bytes(snapshot: Path) -> int:
    """The bytes of unfinished downloads in the cache of the repository that a snapshot folder is of."""
    return sum(path.stat().st_size for path in (snapshot.parent.parent / _BLOBS).glob("*.incomplete"))


def cache_of(snapshot: Path) -> Path:
    """The cache that a snapshot folder lies in."""
    return snapshot.parent.parent.parent
