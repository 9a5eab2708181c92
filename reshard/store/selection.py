"""Decides by their names which files of a repository or a bucket belong to a checkpoint, and how much of it is read."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path

from reshard.formats.documents import MAX_INDEX
from reshard.formats.errors import CheckpointError
from reshard.formats.files.checkpoint import (
    ADAPTER_CONFIG,
    DELTA,
    METADATA,
    MODELOPT,
    TRACKERS,
    is_usable,
    refuse_foreign,
    step_of,
)
from reshard.formats.files.containers import is_read_by_ranges, is_weights
from reshard.formats.files.manifest import MANIFEST
from reshard.formats.files.side_files import NAMING, is_side_file, named_files
from reshard.formats.mesh import RANK_FOLDER
from reshard.formats.store import FilePath, read_file
from reshard.store.staging_names import json_of
from reshard.system import Taken, default

INDICES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
DOCUMENTS = (MANIFEST, *INDICES, *NAMING)
"""The files that name other files."""
_TO_OPEN = (*DOCUMENTS, *TRACKERS, DELTA, MODELOPT, "params.json", ADAPTER_CONFIG, "fsdp_config.json")
"""The small files that describe a checkpoint, and name its files."""

_URL = re.compile(r"(s3|gs|gcs|az|azure|abfss?|adl|https?)://.+")


class Weights(Enum):
    """The share of a remote source's weights that a command needs."""

    FILES = "files"
    RANGES = "ranges"
    """They are read where they are; files that a cache has are taken from it."""
    HEADERS = "headers"
    """Enough to plan; only the side files that are needed for this."""
    NONE = "none"
    """The side files are all that is needed, and weights need not be there."""


@dataclass(frozen=True, kw_only=True)
class HubAccess:
    """Settings of the access to the Hub.

    ``revision``: a branch, tag or commit.
    ``token``: the Hub's token, by default HF_TOKEN or that of ``hf auth login``.
    ``cache_dir``: the Hub's cache, by default HF_HUB_CACHE.
    ``quiet``: no progress of downloads on stderr.
    """

    revision: str | None = None
    token: str | None = field(default=None, repr=False)
    cache_dir: Taken[str | Path | None, Path | None] = default(None)
    quiet: bool = False


_FOR_HEADERS = ("config.json", "params.json", ".index.json", DELTA, METADATA, *TRACKERS)
"""The endings of small files that are enough to plan."""
_OF_RANKS = (".json", METADATA, *TRACKERS)
"""The endings of the small files of shards."""


def side_files(sizes: Mapping[str, int], read: Callable[[str], bytes | None]) -> list[str]:
    """Return the small files of a checkpoint's repository (sizes in bytes) that are read beside the weights. ``read``
    returns the content of a document.
    """
    names, is_split, indices = _belonging(sizes)
    named, ours = {*named_files(read)}, ({*_TO_OPEN} - {*INDICES}) | indices
    side = {name for name in sizes if is_side_file(name, named, sizes[name])} | (ours & {*names})
    if is_split:
        small = {*recorded(read)} | {name for name in names if name.endswith(_OF_RANKS)}
        side |= {name for name in names if name in small and not is_read_by_ranges(name)}
    return sorted(side)


def weight_files(listing: Iterable[str], folder: FilePath) -> list[str]:
    """Return the weight files of a repository: safetensors if there are any, else ``.bin``, else Meta's ``.pth``, else
    a training program's files of the step that its tracker names. Of torch's distributed checkpoints, all files.

    If there is an index, only the files that it names. ``folder`` has the side files. Copies of the weights under other
    names (``consolidated.safetensors``, a variant of another dtype) are left out. An unreadable index is ignored here:
    opening the checkpoint reports it.
    """
    names, is_split, indices = _belonging(listing)
    if is_split:
        return sorted(name for name in names if is_read_by_ranges(name))
    if METADATA in names:
        return _saved(names)
    tensors = [name for name in names if name.endswith(".safetensors")]

    def read(index: str) -> bytes | None:
        with suppress(CheckpointError):
            return read_file(folder / index, MAX_INDEX)
        return None

    named = {*weights_named(read, indices)}
    whole = {"model.safetensors", "pytorch_model.bin"} & set(tensors or names)
    if named or whole:
        return sorted(named | whole)
    bins = [name for name in names if re.fullmatch(r"pytorch_model.*\.bin", name)]
    usual = tensors or bins or [name for name in names if re.fullmatch(r"consolidated\.\d+\.pth", name)]
    if usual:
        return sorted(usual)
    # the first step that is there
    trackers = (name for name in TRACKERS if name in names)
    steps = [*(f"{step_of(tracker, read_file(folder / tracker, 1 << 10))}/" for tracker in trackers), ""]
    for step in steps:
        if saved := _saved(listing, step):
            return saved
    return []


def _saved(listing: Iterable[str], step: str = "") -> list[str]:
    """Return the names that a training program gives its files, in the folder of a step."""
    from reshard.formats.files.training import SAVED  # rarely needed

    return sorted(name for name in listing if name.startswith(step) and SAVED.fullmatch(name, len(step)))


def _belonging(listing: Iterable[str]) -> tuple[list[str], bool, set[str]]:
    """The files that are part of a checkpoint, not a copy for another program (``original/``, ``onnx/``), whether they
    are shards that ``reshard split`` wrote, and the index files of the weights that are used.
    """
    names = [*listing]
    is_split = any(name == MANIFEST or RANK_FOLDER.fullmatch(name.partition("/")[0]) for name in names)
    if is_split:
        names = [name for name in names if not name.startswith(".") or name == METADATA]
        return names, True, {name for name in names if name.endswith(".safetensors.index.json")}
    names = [name for name in names if name == METADATA or (not name.startswith(".") and "/" not in name)]
    has_safetensors = any(name.endswith(".safetensors") and "/" not in name for name in names)
    index = INDICES[0] if has_safetensors else INDICES[1]
    return names, False, {index} & {*names}


def weights_named(read: Callable[[str], bytes | None], indices: Iterable[str] = INDICES) -> Iterator[str]:
    """The weight files that indices name. One that is damaged names none."""
    for index in indices:
        weights = json_of(read(index)).get("weight_map")
        yield from (name for name in (weights.values() if isinstance(weights, dict) else ()) if isinstance(name, str))


def recorded(read: Callable[[str], bytes | None]) -> Iterator[str]:
    """The files that a manifest records. One that is damaged records none."""
    document = json_of(read(MANIFEST))
    with suppress(KeyError, TypeError):
        files = [*(file for rank in document["ranks"] for file in rank["files"]), *document["side_files"]]
        yield from (file["name"] for file in files if isinstance(file["name"], str))


def select(
    name: str, sizes: Mapping[str, int], scope: Weights, copy: Callable[[list[str]], Path], hint: str
) -> tuple[Path, list[str], list[str], bool]:
    """Choose among the files of a repository or a bucket (sizes in bytes); ``copy`` brings the small ones here.

    Returns the folder that it gives, the names of the small files and of the weights, and whether ranges of the weights
    are enough. Raises CheckpointError if there is no checkpoint.
    """
    names, is_split, indices = _belonging(sizes)
    documents = [name for name in names if name in ({*DOCUMENTS} - {*INDICES}) | indices]
    folder = copy(documents)

    def read(document: str) -> bytes | None:
        with suppress(CheckpointError):
            return read_file(folder / document, MAX_INDEX) if document in documents else None
        return None

    side = side_files(sizes, read)
    if scope is Weights.HEADERS and not is_split:  # of shards all, because the manifest is compared with them
        side = [file for file in side if file.endswith(_FOR_HEADERS)]
    if {*side} - {*documents}:
        copy(side)
    if scope is Weights.NONE:
        return folder, side, [], False
    weights = [file for file in weight_files(sizes, folder) if file in sizes]
    if not any(is_usable(file, sizes) for file in weights):
        refuse_foreign(name, sizes)
    if not weights:
        what = "no .safetensors, pytorch_model*.bin or consolidated.*.pth at its top"
        raise CheckpointError(f"{name} holds no checkpoint: {what}", hint)
    ranged = [file for file in weights if is_read_by_ranges(file)]
    small = [file for file in weights if not is_weights(file)]  # such as .metadata
    if scope is Weights.FILES or not ranged or len(ranged) + len(small) < len(weights):
        return folder, side, weights, False
    if small:
        copy(small)
    return folder, [*side, *small], ranged, True


def is_url(source: str) -> bool:
    """Whether a source is the URL of a bucket's folder, or of a folder on a web server."""
    return _URL.fullmatch(source) is not None
