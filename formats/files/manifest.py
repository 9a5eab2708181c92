"""The records of a split checkpoint: the manifest ``reshard.json``, and the metadata of each shard file.

Each shard file says in its header's metadata which rank of which mesh of which source it is, so that the manifest can
be rebuilt from the shards (all but the boundaries of the source's files).
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from reshard.formats.documents import (
    LARGEST,
    Reader,
    Record,
    Unfit,
    anything,
    document_of,
    file_name,
    items,
    json_bytes,
    json_object,
    mapping,
    reader_of,
    size,
    sound,
    strict_json,
    structure,
    text,
    utf8,
    whole,
)
from reshard.formats.errors import CheckpointError, brief
from reshard.formats.files.checksum import Stamp
from reshard.formats.files.safetensors import SourceFileRecord
from reshard.formats.mesh import Mesh, read_mesh
from reshard.formats.notation.axes import Run, merge_runs
from reshard.formats.store import FilePath

MANIFEST = "reshard.json"
INTACT_FILE = "reshard-kept.safetensors"
"""The file with the tensors whose own bits a program's format does not keep."""
VERSION = 1
METADATA_KEY = "reshard"
_MOST_TENSORS = 10_000_000
"""Tensors of one file; a header of the largest size has room for 1,500,000."""


@dataclass(frozen=True)
class FileRecord:
    """A file of the output: its name relative to the root, its size in bytes, its checksum (None: not taken)."""

    name: str = field(metadata={"read": file_name})
    size: int
    checksum: str | None


@dataclass(frozen=True)
class Index:
    """The ``*.index.json`` of the source's weights."""

    name: str = field(metadata={"read": file_name})
    content: bytes = field(metadata={"read": utf8, "write": bytes.decode})


@dataclass(frozen=True)
class SourceRecord:
    """The source of the shards."""

    id: str
    """The fingerprint of its weights."""
    location: str
    commit: str | None
    aliases: Mapping[str, str]
    """The first name of each tied tensor, by its second."""
    index: Index | None
    files: tuple[SourceFileRecord, ...]
    """Empty for a ``.bin`` source."""
    names: str | None = None
    """``modules`` if the files have the names of transformers' modules, None if they have the published ones."""

    @property
    def is_wrapped(self) -> bool:
        """Whether the source's names have a prefix or words of wrappers."""
        return any(file.beginning is not None for file in self.files)

    @property
    def twice(self) -> Mapping[str, str]:
        """The second names in the files, each with the first."""
        return {name: first for name, first in self.aliases.items() if any(name in file.tensors for file in self.files)}


@dataclass(frozen=True)
class Identity:
    """Facts that all shards of one run share: source, mesh, sizes of the axes, padded sizes, digest of the rules.

    ``names`` is the spelling of the names in a format that takes any, if it is not the published one: ``modules``.
    """

    source: str
    mesh: Mesh
    sizes: Mapping[str, int]
    padding: Mapping[str, int]
    plan: str
    names: str | None = None

    def metadata(self, rank: int, places: Sequence[int] = ()) -> dict[str, str]:
        """The metadata of a shard file's header.

        ``places`` are the positions of this rank's tensors among all tensors of the model; none if the rank holds all.
        """
        document = {
            "version": VERSION,
            "source": self.source,
            "mesh": self.mesh.to_document(),
            "rank": rank,
            "sizes": dict(sorted(self.sizes.items())),
            "padding": dict(sorted(self.padding.items())),
            "plan": self.plan,
        }
        document |= {"names": self.names} if self.names else {}
        document |= {"places": _runs(places)} if places else {}
        return {"format": "pt", METADATA_KEY: json.dumps(document, separators=(",", ":"))}


@dataclass(frozen=True)
class Manifest:
    """The content of ``reshard.json``."""

    identity: Identity
    source: SourceRecord
    architecture: Mapping[str, Any]
    """The document of the plan."""
    max_shard_size: int = field(metadata={"read": whole(1)})
    side_files: tuple[FileRecord, ...]
    """The files in the root."""
    ranks: Mapping[int, tuple[FileRecord, ...]]
    """The files of each rank that is complete."""
    inputs: tuple[Stamp, ...]
    """The weight files that were read, as they were."""
    format: str | None = field(default=None, metadata={"key": "layout"})
    """The name of another program's format (see ``formats.notation.format_file``); None is reshard's own."""


def is_fingerprint(source: str) -> bool:
    """Whether this text is the fingerprint of a source's weights. If the fingerprint was unknown, it is the source's
    place.
    """
    return re.fullmatch("[0-9a-f]{64}", source) is not None


def plan_digest(architecture: Mapping[str, Any]) -> str:
    """A short id of a plan's rules."""
    return hashlib.sha256(json.dumps(architecture, sort_keys=True).encode()).hexdigest()[:16]


# ------------------------------------------------------------------------------------------------------- manifest


def manifest_text(manifest: Manifest) -> str:
    """The text of ``reshard.json``."""
    identity = manifest.identity
    document = {
        "format": "reshard",
        "version": VERSION,
        **({"layout": manifest.format} if manifest.format else {}),
        **({"names": identity.names} if identity.names else {}),
        "mesh": identity.mesh.to_document(),
        "sizes": dict(sorted(identity.sizes.items())),
        "padding": dict(sorted(identity.padding.items())),
        "max_shard_size": manifest.max_shard_size,
        "row_parallel_bias": "the same on every rank, to be added once, after the all-reduce",
        "checksum": "columns64",
        "ranks": [
            {"rank": rank, "folder": identity.mesh.folder(rank), "files": document_of(records)}
            for rank, records in sorted(manifest.ranks.items())
        ],
        "side_files": document_of(manifest.side_files),
        "plan": manifest.architecture,
        "source": document_of(manifest.source),
        "inputs": document_of(manifest.inputs),
    }
    return json_bytes(document).decode() + "\n"


def manifest_of(value: object, where: str) -> Manifest:
    """The manifest that a document is. Raises Unfit."""
    top = Record(value, where)
    if top.get("format", anything, None) != "reshard":
        raise Unfit("is not a manifest of reshard")
    if top.get("version", anything, None) != VERSION:
        raise Unfit(f"version {brief(top.get('version', anything, None))}, this reshard reads version {VERSION}")
    plan, source = top.get("plan", json_object), top.get("source", reader_of(SourceRecord))
    if len({file.name for file in source.files}) != len(source.files):
        raise Unfit("source.files should name each file once")
    identity = _identity_of(top, source.id, plan_digest(plan))
    ranks = top.get("ranks", items(_rank_files(identity.mesh)))
    if len(dict(ranks)) != len(ranks):
        raise Unfit("ranks should list each rank once")
    return structure(Manifest, top, identity=identity, source=source, architecture=plan, ranks=dict(ranks))


def _identity_of(top: Record, source: str, plan: str) -> Identity:
    """Read the entries that a manifest and a shard's metadata share."""
    sizes, padding = top.get("sizes", mapping(size)), top.get("padding", mapping(size))
    for axis, padded in padding.items():
        if padded < sizes.get(axis, LARGEST):
            raise Unfit(f"padding.{axis} should be the padded size of an axis and is {padded}")
    return Identity(source, top.get("mesh", read_mesh), sizes, padding, plan, top.get("names", text, None))


def _rank_files(mesh: Mesh) -> Reader[tuple[int, tuple[FileRecord, ...]]]:
    def read(value: object, where: str) -> tuple[int, tuple[FileRecord, ...]]:
        rank = Record(value, where)
        return rank.get("rank", whole(0, mesh.size - 1)), rank.get("files", items(reader_of(FileRecord)))

    return read


# ---------------------------------------------------------------------------------------------------------- shards


@dataclass(frozen=True)
class Shard:
    """The metadata of a shard file: what it is a shard of, its rank, and the positions of its tensors among all
    tensors.
    """

    identity: Identity
    rank: int
    places: tuple[int, ...]


def read_shard(metadata: Mapping[str, str], file: FilePath) -> Shard:
    """Read the metadata of a shard file. Raises CheckpointError if the file is not a shard."""
    what, hint = "its header does not say which rank of what it is", "it was not written by reshard split"
    if METADATA_KEY not in metadata:
        raise CheckpointError(f"{file}: {what}", hint)
    try:
        top = Record(sound(strict_json(metadata[METADATA_KEY])), "")
        identity = _identity_of(top, top.get("source", text), top.get("plan", text))
        return Shard(identity, top.get("rank", whole(0, identity.mesh.size - 1)), top.get("places", _places, ()))
    except ValueError as error:
        raise CheckpointError(f"{file}: {what}: {error}", hint) from None


def _places(value: object, where: str) -> tuple[int, ...]:
    """``[[3, 2]]`` for 3 and 4."""
    runs = items(items(whole(0, _MOST_TENSORS), 2))(value, where)
    if sum(length for _, length in runs) > _MOST_TENSORS:
        raise Unfit(f"{where} should be the places of the tensors of one file")
    return tuple(place for start, length in runs for place in range(start, start + length))


def _runs(places: Sequence[int]) -> list[list[int]]:
    """``[[3, 2]]`` for 3 and 4: where each run of consecutive numbers begins, and how long it is."""
    return [[run.offset, run.length] for run in merge_runs(Run(place, 1) for place in places)]
