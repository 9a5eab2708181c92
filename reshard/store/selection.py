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
    DELTA,
    METADATA,
    TRACKERS,
    WEIGHT_SUFFIXES,
    is_usable,
    refuse_foreign,
    step_of,
)
from reshard.formats.files.sharded import MANIFEST
from reshard.formats.mesh import RANK_FOLDER
from reshard.formats.store import FilePath, read_file
from reshard.store.staging_names import json_of
from reshard.system import Taken, default

INDICES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
NAMING = (
    MANIFEST, *INDICES, "config.json", "tokenizer_config.json", "preprocessor_config.json", "processor_config.json",
)  # fmt: skip
"""The files that name other files."""

_URL = re.compile(r"(s3|gs|gcs|az|azure|abfss?|adl|https?)://.+")


class Weights(Enum):
    """How much of a remote source's weights is needed."""

    FILES = "files"
    RANGES = "ranges"
    """They are read where they are; files that a cache has are taken from it."""
    HEADERS = "headers"
    """Enough to plan; only the side files that are needed for this."""


@dataclass(frozen=True, kw_only=True)
class HubAccess:
    """How the Hub is reached.

    ``revision``: a branch, tag or commit.
    ``token``: the Hub's token, by default HF_TOKEN or that of ``hf auth login``.
    ``cache_dir``: the Hub's cache, by default HF_HUB_CACHE.
    ``quiet``: no progress of downloads on stderr.
    """

    revision: str | None = None
    token: str | None = field(default=None, repr=False)
    cache_dir: Taken[str | Path | None, Path | None] = default(None)
    quiet: bool = False


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


_BY_RANGES = (".safetensors", ".distcp", ".pt", ".pth")
"""The files that are read by ranges: they say at their ends where tensors lie, or ``.metadata`` does."""
_FOR_HEADERS = ("config.json", "params.json", ".index.json", DELTA, METADATA, *TRACKERS)
"""The side files that say what a checkpoint is."""


def side_files(listing: Iterable[str]) -> list[str]:
    """The files of a checkpoint's repository that are not weights: config, tokenizer, index, licence."""
    names, is_split, indices = _belonging(listing)
    excluded = WEIGHT_SUFFIXES if is_split else _NOT_SIDE_FILES  # of shards, the manifest lists the others
    side = (name for name in names if not name.lower().endswith(excluded))
    return sorted(name for name in side if not name.endswith(".index.json") or name in indices)


def weight_files(listing: Iterable[str], folder: FilePath) -> list[str]:
    """The weight files of a repository: safetensors if there are any, else ``.bin``, else Meta's ``.pth``, else what a
    training program saved, in the step that its tracker names. Of a distributed checkpoint of torch's, all of it.

    If there is an index, only the files that it names. ``folder`` has the side files. Copies of the weights under other
    names (``consolidated.safetensors``, a variant of another dtype) are left out. An unreadable index is ignored here:
    opening the checkpoint reports it.
    """
    names, is_split, indices = _belonging(listing)
    if is_split:
        return sorted(name for name in names if name.endswith((".safetensors", ".distcp", ".pt", ".pth")))
    if METADATA in names:
        return _saved(names)
    tensors = [name for name in names if name.endswith(".safetensors")]

    def read(index: str) -> bytes | None:
        with suppress(CheckpointError):
            return read_file(folder / index, MAX_INDEX)
        return None

    named = {*named_files(read, indices)}
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
    """What a training program saved in the folder of a step."""
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
    names = [
        name
        for name in names
        if name == METADATA
        or (not name.startswith(".") and ("/" not in name or name.startswith("additional_chat_templates/")))
    ]
    has_safetensors = any(name.endswith(".safetensors") and "/" not in name for name in names)
    index = INDICES[0] if has_safetensors else INDICES[1]
    return names, False, {index} & {*names}


def named_files(read: Callable[[str], bytes | None], documents: Iterable[str] = NAMING) -> Iterator[str]:
    """The files that a place's documents name: weights, shards, and the modules of custom code.

    ``read`` gives the content of a file; None, if it is not there. What is damaged names none.
    """
    for document in map(json_of, map(read, documents)):
        names: list[object] = []
        with suppress(KeyError, TypeError):
            names += [file["name"] for rank in document["ranks"] for file in rank["files"]]
            names += [file["name"] for file in document["side_files"]]
        weights, code = document.get("weight_map"), document.get("auto_map")
        names += weights.values() if isinstance(weights, dict) else ()
        names += (value for key, value in document.items() if key.endswith("_file"))  # of a tokenizer
        for value in code.values() if isinstance(code, dict) else ():
            for module in value if isinstance(value, list) else [value]:
                if isinstance(module, str) and "." in module and "--" not in module:  # else in another repository
                    names.append(f"{module.partition('.')[0]}.py")
        yield from (name for name in names if isinstance(name, str))


def select(
    name: str, sizes: Mapping[str, int], scope: Weights, copy: Callable[[list[str]], Path], hint: str
) -> tuple[Path, list[str], list[str], bool]:
    """Choose among the files of a repository or a bucket (sizes in bytes); ``copy`` brings the small ones here.

    Returns the folder that it gives, the names of the small files and of the weights, and whether ranges of the weights
    are enough. Raises CheckpointError if there is no checkpoint.
    """
    side, (_, is_split, _) = side_files(sizes), _belonging(sizes)
    if scope is Weights.HEADERS and not is_split:  # of shards all, because the manifest is compared with them
        side = [file for file in side if file.endswith(_FOR_HEADERS)]
    folder = copy(side)
    weights = [file for file in weight_files(sizes, folder) if file in sizes]
    if not any(is_usable(file, sizes) for file in weights):
        refuse_foreign(name, sizes)
    if not weights:
        what = "no .safetensors, pytorch_model*.bin or consolidated.*.pth at its top"
        raise CheckpointError(f"{name} holds no checkpoint: {what}", hint)
    ranged = [file for file in weights if file.endswith(_BY_RANGES)]
    small = [file for file in weights if not file.endswith((*_BY_RANGES, ".bin"))]  # such as .metadata
    if scope is Weights.FILES or not ranged or len(ranged) + len(small) < len(weights):
        return folder, side, weights, False
    if small:
        copy(small)
    return folder, [*side, *small], ranged, True


def is_url(source: str) -> bool:
    """Whether a source is the URL of a bucket's folder, or of a folder on a web server."""
    return _URL.fullmatch(source) is not None
