"""A split checkpoint on disk: ``reshard.json``, side files, and a folder of safetensors files a rank."""

from __future__ import annotations

from reshard.formats.documents import MAX_MANIFEST, read_document
from reshard.formats.files.manifest import MANIFEST, Manifest, manifest_of
from reshard.formats.mesh import RANK_FOLDER
from reshard.formats.store import FilePath, sorted_paths

_NOT_OURS = (
    "remove it: the shards say what they are, but a merge then loses the original's file names, order and checksums"
)


def read_manifest(path: FilePath) -> Manifest:
    """Read ``reshard.json``. Raises CheckpointError that names the file and what is wrong with it."""
    return read_document(path, MAX_MANIFEST, manifest_of, hint=_NOT_OURS)[1]


def rank_folders(path: FilePath) -> list[FilePath]:
    """The folders in ``path`` that are named like those of ranks."""
    return sorted_paths(p for p in path.iterdir() if p.is_dir() and RANK_FOLDER.fullmatch(p.name))


def is_sharded(path: FilePath) -> bool:
    """Whether a folder is a split checkpoint, complete or not."""
    return path.is_dir() and ((path / MANIFEST).is_file() or bool(rank_folders(path)))
