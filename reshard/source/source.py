"""A folder to open, and the source of a command: a full or a split checkpoint, both in one form."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from reshard.formats.documents import read_config
from reshard.formats.files.checkpoint import CONFIG, Checkpoint
from reshard.formats.files.checksum import Stamp, check_unchanged
from reshard.formats.files.fingerprint import fingerprint
from reshard.formats.files.manifest import Identity, Index, Manifest, SourceRecord, plan_digest
from reshard.formats.files.safetensors import TensorInfo
from reshard.formats.mesh import Mesh
from reshard.formats.notation.architecture import to_document
from reshard.formats.notation.format import MODULES, Format
from reshard.formats.notation.format_file import HUGGING_FACE
from reshard.formats.store import (
    FilePath,
    StoredPath,
    content_of,
    local_path,
    location_of,
    public_name,
)
from reshard.mesh.plan import Plan, make_plan
from reshard.model.model import Model
from reshard.placement.arrangement import Arrangement, arrangement_of
from reshard.placement.stored import Chunks

if TYPE_CHECKING:
    from reshard.source.training import Training
    from reshard.store.remote import Remote

UNSPLIT = Mesh((("tp", 1),))


@dataclass(frozen=True, eq=False)
class SourceFile:
    """A weight file to read from."""

    path: FilePath
    name: str
    """The name, relative to the source's folder."""
    size: int
    """Bytes."""
    header: bytes | None = None
    """The bytes of its header; None for a format without one."""
    expected: str | None = None
    """Its checksum, if a manifest states it."""
    rest: tuple[tuple[int, bytes], ...] = ()
    """Other bytes that belong to no tensor, with their offsets."""
    metadata: Mapping[str, str] = field(default_factory=dict)
    """The metadata in its header."""

    @cached_property
    def remote(self) -> Remote | None:
        """The ``Remote`` that reads its bytes, if it is not local."""
        if isinstance(self.path, Path):
            return None
        from reshard.store.range_store import remote_of

        return remote_of(self.path)

    @cached_property
    def is_elsewhere(self) -> bool:
        """Whether its bytes come over a network, or are computed from bytes that do."""
        return self.remote is not None and self.remote.over_network(self.size) > 0


class ProgramFile(NamedTuple):
    """A program's weight file: its rank and pipeline stage, and the number of all ranks if its name says that.

    ``inside`` is the entry of the file that has the rank's tensors, ``mesh`` what the names of all files say it is.
    """

    path: FilePath
    rank: int
    stage: int
    ranks: int | None
    inside: str | None = None
    mesh: Mesh | None = None


class SourcePlace(NamedTuple):
    """A tensor's file and the offset of its first byte in it."""

    file: SourceFile
    offset: int


class SourceTensors(NamedTuple):
    """The tensors in a source's files, by rank and name."""

    files: Mapping[FilePath, SourceFile]
    ranks: Sequence[Mapping[str, TensorInfo]]

    def place_of(self, name: str, rank: int) -> SourcePlace:
        """The place of a stored tensor in the files of a rank."""
        info = self.ranks[rank][name]
        return SourcePlace(self.files[info.file], info.offset)


class Cast(NamedTuple):
    """A cast: the dtype's name in ``--dtype``, the source without the cast, and a function that makes the record of a
    merge.
    """

    dtype: str
    source: Source
    record: Callable[[], SourceRecord]


@dataclass(frozen=True)
class Source:
    """A checkpoint to read from."""

    path: FilePath
    plan: Plan
    """The plan on its own mesh: one rank, for a full checkpoint."""
    model: Model
    """The model of the full checkpoint."""
    names: tuple[str, ...]
    """All tensors, in the order of the original files."""
    ranks: tuple[Mapping[str, TensorInfo], ...]
    """The stored tensors of each rank, by name."""
    files: Mapping[FilePath, SourceFile]
    """The weight files, by path."""
    side_files: Mapping[str, FilePath | bytes]
    """The side files, by name: their paths, or the content of a file that is not stored as it is."""
    stamps: Mapping[FilePath, Stamp]
    """The state of each file before it was read."""
    format: Format
    checkpoint: Checkpoint | None = None
    """The checkpoint, if it is a full one."""
    stated: Identity | None = None
    """The split that the headers of shards in reshard's own form name."""
    intact: Mapping[str, TensorInfo] = field(default_factory=dict)
    """The tensors in ``INTACT_FILE``."""
    manifest: Manifest | None = None
    """The manifest of a split checkpoint that has one."""
    chunks: Chunks | None = None
    """The chunks of stored tensors, by the numbers of their files, which stand for ranks."""
    left_behind: tuple[str, ...] = ()
    """Contents of its files besides the model, in a few words."""
    strays: tuple[str, ...] = ()
    """The files and folders beside it that are neither its weights nor read with them."""
    without: tuple[str, ...] = ()
    """The towers of its type that a language model alone does not have."""
    training: Training | None = None
    """A trainer's states besides the model, if they can be re-sharded with it."""
    constants: Mapping[str, bytes] = field(default_factory=dict)
    """The stored values of its format's constants, where they differ from the constant."""
    was_adapted: bool = False
    """Whether it is computed: an adapter beside its weights is merged into them."""
    was_split: bool = False
    """Whether it is computed from a split checkpoint."""
    was_named: str | None = None
    """The kind of names in the checkpoint that it is computed from, if not the published ones: transformers'
    ``modules``.
    """
    note: str | None = None
    """A sentence on computed tensors that a reader of an output must know, such as a cast."""
    given_dtype: str | None = None
    """The dtype in a given config.json, if the weights have another, which ``model.config`` then states."""
    twice: Mapping[str, str] = field(default_factory=dict)
    """The second names of tied tensors in its files, each with the first."""
    error: Callable[[], tuple[str, float] | None] | None = None
    """For weights that are quantized as they are read: the one with the largest relative error so far, and the
    error.
    """
    rank_files: Sequence[ProgramFile] = ()
    """The weight files of a program's format, with the ranks that their names say."""
    cast: Cast | None = None
    """The cast to another dtype. Then ``model`` has the dtypes to which those of ``plan`` are cast."""

    @cached_property
    def arrangement(self) -> Arrangement:
        """The stored tensors, and where each of the model's elements lies in them."""
        return arrangement_of(self.plan, self.format, self.chunks, self.twice)

    @cached_property
    def whole(self) -> Plan:
        """The plan of the full checkpoint, on one rank."""
        return make_plan(self.model, UNSPLIT)

    @property
    def aliases(self) -> Mapping[str, str]:
        """The second names of tied tensors in its files, and in those that its manifest describes."""
        return {**(self.manifest.source.twice if self.manifest else {}), **self.twice}

    @property
    def states(self) -> tuple[Stamp, ...]:
        """The state of each weight file."""
        return tuple(self.stamps[path] for path in self.files)

    @property
    def inputs(self) -> tuple[Stamp, ...]:
        """The states, with the checksum of a manifest as the content (it is compared when the file is read)."""
        files = zip(self.states, self.files.values(), strict=True)
        return tuple(dataclasses.replace(stamp, content=file.expected or stamp.content) for stamp, file in files)

    def read_side_files(self) -> dict[str, bytes]:
        """The content of the side files, by their names. Raises CheckpointError."""
        return {name: content for name in self.side_files if (content := self.read_side_file(name)) is not None}

    def read_side_file(self, name: str) -> bytes | None:
        """The content of one of them, if it is there."""
        return content_of(self.side_files.get(name))

    def read_config(self) -> dict[str, Any]:
        """The config.json that belongs to it. Raises CheckpointError."""
        content = self.side_files.get(CONFIG)
        return dict(json.loads(content)) if isinstance(content, bytes) else read_config(self.path / CONFIG)

    def noted(self, *notes: str | None) -> Source:
        """The source with more sentences in its note."""
        return dataclasses.replace(self, note="; ".join(filter(None, (self.note, *notes))) or None)

    @property
    def location(self) -> str:
        """Its location: the Hub's id, a URL without secrets, or the path of a folder."""
        return location_of(self.path)

    @property
    def commit(self) -> str | None:
        """The commit of a repository on the Hub."""
        return self.path.store.commit if isinstance(self.path, StoredPath) else None

    @property
    def other_files(self) -> tuple[str, ...] | None:
        """The names of remote files beside it that are not part of it; None if they cannot be listed."""
        return self.path.store.beside if isinstance(self.path, StoredPath) else ()

    @property
    def display_name(self) -> str:
        """The location and, if the source is computed, the origin and the kind of computation."""
        return str(self.path) if isinstance(self.path, StoredPath) else self.location

    @property
    def local_inputs(self) -> list[Path]:
        """The local folders and files that it is read from: no output may replace them."""
        remotes = (file.remote for file in self.files.values())
        local = dict.fromkeys(path for remote in remotes if remote for path in remote.paths)
        folders = (local_path(path) for path in (self.path, *self.stamps))
        return [*local, *(path for path in folders if path is not None)]

    def check_unchanged(self) -> None:
        """Raise MismatchError if a file has changed since it was opened."""
        for file in self.files.values():
            if file.remote is not None:
                file.remote.check_unchanged()
        check_unchanged(self.stamps)

    @property
    def is_remote(self) -> bool:
        """Whether weights are read from another machine."""
        return any(file.is_elsewhere for file in self.files.values())

    @property
    def is_split(self) -> bool:
        """Whether it is split over ranks in whatever format, or is computed from a checkpoint that is."""
        return self.was_split or (self.format is not HUGGING_FACE and self.checkpoint is None)

    @property
    def spelling(self) -> str | None:
        """The kind of names that it gets in a format that takes any: the original's, or its own if nothing says
        these.
        """
        return self.names_of or (MODULES if self.format.modules and self.manifest is None else None)

    @cached_property
    def record(self) -> SourceRecord:
        """The record of the original checkpoint, as in a manifest. Reads samples of a full checkpoint's weights."""
        if self.cast is not None:
            return self.cast.record()
        checkpoint = self.checkpoint
        if checkpoint is None:
            place = hashlib.sha256(self.location.encode()).hexdigest()[:32]  # the path itself is private
            name = self.stated.source if self.stated else f"unknown:{place}"
            if self.training is not None and self.training.chosen is not None:
                name += f" ({self.training.chosen})"
            unknown = SourceRecord(name, public_name(self.path), None, {}, None, (), self.names_of)
            return self.manifest.source if self.manifest is not None else unknown
        files = checkpoint.records if self.was_named is None else ()  # a merge writes others
        index = content_of(checkpoint.index) if files else None
        return SourceRecord(
            id=fingerprint(checkpoint),
            location=public_name(self.path),
            commit=self.commit,
            aliases={**checkpoint.aliases, **self.twice},
            index=Index(str(checkpoint.index_name), index) if index is not None else None,
            files=files,
            names=self.names_of,
        )

    @property
    def names_of(self) -> str | None:
        """The kind of names in its files or, if it is split, in those of the original: see ``SourceRecord``."""
        if self.manifest is not None and self.checkpoint is None:
            return self.manifest.source.names
        return self.was_named or (MODULES if self.format.modules and self.checkpoint is not None else None)

    @cached_property
    def rules(self) -> dict[str, Any]:
        """The plan file as a document, with only the rules that cover a tensor."""
        document = to_document(self.model.architecture)
        used = self.model.used_templates
        document["tensors"] = {name: rule for name, rule in document["tensors"].items() if name in used}
        kept = {part: when for part, when in document.pop("float32", {}).items() if any(part in name for name in used)}
        return document | ({"float32": kept} if kept else {})

    def manifest_rules(self, format: Format) -> dict[str, Any]:
        """The rules as in a manifest of a format: all of them, if names there do not say which tensor each is of."""
        if self.record.files or format.plain:
            return self.rules
        document, derived = to_document(self.model.architecture), self.model.architecture.derived
        return document | {"tensors": {name: rule for name, rule in document["tensors"].items() if name not in derived}}

    def identity(self, plan: Plan) -> Identity:
        """The identity that all shards of a plan for this source share."""
        sizes = self.model.sizes.of({})
        return Identity(self.record.id, plan.mesh, sizes, plan.padding, plan_digest(self.rules))

    def files_of(self, names: Collection[str] | None) -> list[SourceFile]:
        """The files that hold any of these tensors; all files, without names."""
        if names is None:
            return [*self.files.values()]
        paths = (tensors[name].file for tensors in self.ranks for name in names if name in tensors)
        return [self.files[path] for path in dict.fromkeys(paths)]
