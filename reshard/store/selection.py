"""Decides by their names which files of a repository or a bucket belong to a checkpoint."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from enum import Enum

from formats.documents import MAX_INDEX, json_object, read_document
from formats.errors import CheckpointError
from formats.files.checkpoint import METADATA, WEIGHT_SUFFIXES
from formats.mesh import RANK_FOLDER
from formats.store import FilePath

_URL = re.compile(r"(s3|gs|gcs|az|azure|abfss?|adl|https?)://.+")


class Weights(Enum):
    """How much of a remote source's weights is needed."""

    FILES = "files"
    RANGES = "ranges"
    """They are read where they are; files that a cache has are taken from it."""
    HEADERS = "headers"
    """Enough to plan; only the side files that are needed for this."""


# Weights of other frameworks or in other formats, archives and pictures. All other files are small and may be needed
# (tokenizers, chat templates, licences, custom code), and their names cannot be listed in advance.
# fmt: off
_NOT_SIDE_FILES = (
    ".safetensors", ".distcp", ".bin", ".pt", ".pth", ".ckpt", ".h5", ".msgpack", ".onnx", ".onnx_data", ".gguf",
    ".ggml", ".tflite", ".ot", ".mlmodel", ".nemo", ".engine", ".pkl", ".pickle", ".npy", ".npz", ".parquet", ".arrow",
    ".zip", ".tar", ".gz", ".tgz", ".zst", ".7z", ".png", ".jpg", ".jpeg", ".gif", ".webp", ".svg", ".bmp", ".mp4",
    ".mov", ".webm", ".wav", ".mp3", ".flac", ".pdf",
)
# fmt: on


def side_files(listing: Iterable[str]) -> list[str]:
    """The files of a checkpoint's repository that are not weights: config, tokenizer, index, licence."""
    listing = list(listing)
    excluded = WEIGHT_SUFFIXES if _is_split(listing) else _NOT_SIDE_FILES  # of shards, the manifest lists the others
    return sorted(
        name
        for name in listing
        if _belongs(name, listing)
        and not name.lower().endswith(excluded)
        and (not name.endswith(".index.json") or name in _indices(listing))
    )


def weight_files(listing: Iterable[str], folder: FilePath) -> list[str]:
    """The weight files of a repository: safetensors if there are any, else ``.bin``, else Meta's ``.pth``; of a
    distributed checkpoint of torch's, ``.distcp``.

    If there is an index, only the files that it names. ``folder`` has the side files. Copies of the weights under other
    names (``consolidated.safetensors``, a variant of another dtype) are left out. An unreadable index is ignored here:
    opening the checkpoint reports it.
    """
    listing = [name for name in listing if _belongs(name, listing)]
    indices = _indices(listing)
    tensors = [name for name in listing if name.endswith(".safetensors")]
    if _is_split(listing):
        return sorted(name for name in listing if name.endswith((".safetensors", ".distcp", ".pt", ".pth")))
    if METADATA in listing:
        return sorted(name for name in listing if name.endswith(".distcp"))
    named = {file for index in indices for file in _named_by_index(folder / index)}
    whole = {"model.safetensors", "pytorch_model.bin"} & set(tensors or listing)
    if named or whole:
        return sorted(named | whole)
    bins = [name for name in listing if re.fullmatch(r"pytorch_model.*\.bin", name)]
    return sorted(tensors or bins or [name for name in listing if re.fullmatch(r"consolidated\.\d+\.pth", name)])


def _belongs(name: str, listing: Iterable[str]) -> bool:
    """Whether a file is part of the checkpoint, not a copy for another program (``original/``, ``onnx/``)."""
    if name.startswith("."):
        return name == METADATA
    return "/" not in name or name.startswith("additional_chat_templates/") or _is_split(listing)


def _is_split(listing: Iterable[str]) -> bool:
    """Whether a repository has shards that ``reshard split`` wrote."""
    return any(name == "reshard.json" or RANK_FOLDER.fullmatch(name.partition("/")[0]) for name in listing)


def _indices(listing: Iterable[str]) -> list[str]:
    """The index files of the weights that are used."""
    listing = list(listing)
    if _is_split(listing):
        return [name for name in listing if name.endswith(".safetensors.index.json")]
    has_safetensors = any(name.endswith(".safetensors") and "/" not in name for name in listing)
    index = "model.safetensors.index.json" if has_safetensors else "pytorch_model.bin.index.json"
    return [index] if index in listing else []


def _named_by_index(index: FilePath) -> set[str]:
    try:
        _, content = read_document(index, MAX_INDEX, json_object)
    except CheckpointError:
        return set()
    file_of = content.get("weight_map")
    return {name for name in file_of.values() if isinstance(name, str)} if isinstance(file_of, dict) else set()


def modules(auto_map: object) -> Iterator[str]:
    """The modules of custom code that a config names: ``modeling_x.XModel``, or several in a list."""
    for value in auto_map.values() if isinstance(auto_map, dict) else ():
        for name in value if isinstance(value, list) else [value]:
            if isinstance(name, str) and "." in name and "--" not in name:  # else it is in another repository
                yield name.partition(".")[0]


def left_out(listing: Iterable[str], *selected: Iterable[str]) -> tuple[str, ...]:
    """The files of a repository or a bucket of which a folder here has none, sorted."""
    return tuple(sorted(set(listing).difference(*selected)))


def needed_to_plan(side: Iterable[str], listing: Iterable[str]) -> list[str]:
    """The side files that are needed to plan. For shards that is all of them, because the manifest is compared with
    them.
    """
    ends = ("config.json", ".index.json", "reshard.json", METADATA)
    return [name for name in side if _is_split(listing) or name.endswith(ends)]


def is_url(source: str) -> bool:
    """Whether a source is the URL of a bucket's folder, or of a folder on a web server."""
    return _URL.fullmatch(source) is not None
