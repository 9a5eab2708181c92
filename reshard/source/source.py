"""A folder to open, and the source of a command: a full or a split checkpoint, both in one form."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeVar

from reshard.formats.documents import read_config
from reshard.formats.errors import CheckpointError, ReshardError
from reshard.formats.files.checkpoint import (
    ADAPTER_CONFIG,
    CONFIG,
    METADATA,
    Checkpoint,
    Weights,
    fingerprint,
    has_adapter,
    has_usual_weights,
    read_weights,
)
from reshard.formats.files.checksum import Stamp, check_unchanged, stamps_in, stamps_of
from reshard.formats.files.safetensors import TensorInfo
from reshard.formats.files.sharded import (
    INTACT_FILE,
    MANIFEST,
    Identity,
    Index,
    Manifest,
    SourceRecord,
    is_sharded,
    plan_digest,
    read_manifest,
)
from reshard.formats.files.side_files import find_side_files, is_side_file
from reshard.formats.mesh import RANK_FOLDER, Mesh
from reshard.formats.notation.architecture import Architecture, architecture_from_document, to_document
from reshard.formats.notation.architecture_files import find_architecture, load_architecture
from reshard.formats.notation.format import MODULES, SOURCE_NAMES, Format
from reshard.formats.notation.format_file import HUGGING_FACE, all_formats, format_of, with_names
from reshard.formats.store import (
    FilePath,
    StoredPath,
    is_in,
    joined,
    local_path,
    location_of,
    name_in,
    public_name,
    read_file,
    read_ranges,
)
from reshard.mesh.plan import Plan
from reshard.model.model import Model
from reshard.placement.arrangement import Arrangement, arrangement_of
from reshard.placement.stored import Chunks

if TYPE_CHECKING:
    from reshard.source.lora import Side
    from reshard.source.program_files import ProgramFile, Training
    from reshard.store.remote import Remote

UNSPLIT = Mesh((("tp", 1),))


@dataclass(frozen=True, eq=False)
class SourceFile:
    """A weight file to read from.

    ``name`` is relative to the source's folder, ``size`` in bytes. ``header`` has the bytes of its header, None for a
    format without one. ``expected`` is its checksum, if a manifest states it.
    """

    path: FilePath
    name: str
    size: int
    header: bytes | None = None
    expected: str | None = None
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
    """A checkpoint to read from.

    ``plan`` is the plan on the source's own mesh (one rank, for a full checkpoint). ``model`` is that of the full
    checkpoint. ``names`` has all tensors in the order of the original files, ``ranks`` the tensors of each rank by
    name, ``files`` the weight files by path. ``checkpoint`` is set for a full checkpoint. ``stamps`` has the state of
    each file before it was read.
    """

    path: FilePath
    plan: Plan
    model: Model
    names: tuple[str, ...]
    ranks: tuple[Mapping[str, TensorInfo], ...]
    files: Mapping[FilePath, SourceFile]
    side_files: Mapping[str, FilePath | bytes]
    """The side files, by name: their paths, or the content of a file that is not stored as it is."""
    stamps: Mapping[FilePath, Stamp]
    format: Format
    checkpoint: Checkpoint | None = None
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
        content = self.side_files.get(name)
        return content if content is None or isinstance(content, bytes) else read_file(content)

    def check_names(self, written: Collection[str]) -> None:
        """Raise CheckpointError if a side file has the name of a file or folder that will be ``written``.

        Files that begin with a dot, and weights that are not the model's, are not copied; such a name would mean
        something else in the output. (Files in Meta's and Mistral's formats on the Hub are the same model.)
        """
        names = {*written, *(parent.as_posix() for name in written for parent in PurePosixPath(name).parents)} - {"."}
        side = {*self.side_files}
        if self.checkpoint is not None:
            weights = {*(file.name for file in self.files.values()), self.checkpoint.index_name}
            present = {name for name in names if (self.path / name).exists() and not name.startswith("consolidated")}
            side |= present - weights
        clashes = sorted(name for name in side if name in names)
        if clashes:
            raise CheckpointError(
                f"{self.path}: '{clashes[0]}' has the name of what the format writes there",
                "rename it, or move it out of the source",
            )

    def read_config(self) -> dict[str, Any]:
        """The config.json that belongs to it. Raises CheckpointError."""
        content = self.side_files.get(CONFIG)
        return dict(json.loads(content)) if isinstance(content, bytes) else read_config(self.path / CONFIG)

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
            unknown = SourceRecord(name, public_name(self.path), None, {}, None, ())
            return self.manifest.source if self.manifest is not None else unknown
        files = checkpoint.records if self.was_named is None else ()  # a merge writes others
        index = checkpoint.index if files else None
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


T = TypeVar("T")


def other_entries(path: FilePath, known: Collection[str]) -> list[str]:
    """The files and folders below a folder that are not ``known``; for a folder without a known file only its own name.

    A link counts as its target. Of a store, also what is there and not part of the checkpoint.
    """
    files, folders = {*known}, {parent.as_posix() for name in known for parent in PurePosixPath(name).parents}

    def called(folder: str) -> str:
        return folder if RANK_FOLDER.fullmatch(folder) else f"{folder}/"

    def inside(folder: str) -> Iterator[str]:
        for entry in (path / folder).iterdir():
            name = name_in(entry, path)
            if name in folders and entry.is_dir():
                yield from inside(name)
            elif name not in files or not entry.is_file():
                yield called(name) if entry.is_dir() else name

    def outermost(name: str) -> str:
        outer = [parent.as_posix() for parent in PurePosixPath(name).parents]
        return next((called(folder) for folder in reversed(outer) if folder not in folders), name)

    beside = (path.store.beside if isinstance(path, StoredPath) and not path.inner else None) or ()
    others = (outermost(name) for name in beside if name not in files | folders)  # a folder may be an empty object
    return sorted({*inside(""), *others})


class Folder:
    """A folder to open, with everything that was read of it. Each file is read once.

    It is a full checkpoint, a PEFT adapter, shards in reshard's own form, or in a program's format (``kind``). Any
    other folder counts as a full checkpoint: opening it says what is missing. ``formats`` are those that its files may
    be in: only one if a manifest names it. ``damage`` is why the manifest cannot be read.

    ``config`` is a folder with the config.json that belongs to it, ``plan_file`` the user's plan, ``base`` the manifest
    of the shards that it is computed from, ``beginning`` what the names of the chosen one of several models begin with.
    Raises CheckpointError if a program's file names a folder of weights that is not there.
    """

    def __init__(
        self,
        path: FilePath,
        *,
        config: FilePath | None = None,
        plan_file: Path | None = None,
        base: Manifest | None = None,
        beginning: str | None = None,
    ) -> None:
        self.path, self.config, self.plan_file, self.base, self.beginning = path, config, plan_file, base, beginning
        self.stamps = stamps_in(path)
        self._contents: dict[Hashable, Any] = {}
        self.lora: Side | None = None  # as which side of a run with an adapter it is opened
        self.manifest: Manifest | None = None
        self.damage: ReshardError | None = None
        self.formats: tuple[Format, ...] = ()
        try:
            if (path / MANIFEST).is_file():
                self.manifest = read_manifest(path / MANIFEST)
                if self.manifest.format is not None:
                    self.formats = (with_names(format_of(self.manifest.format), SOURCE_NAMES, self.manifest.names),)
        except CheckpointError as error:
            self.damage = error
        except ReshardError as error:  # it names a format that is not known here
            self.damage = CheckpointError(f"{path / MANIFEST}: {error.message}", error.hint)
        is_split = is_sharded(path)
        if not self.formats and not has_usual_weights(path) and (self.damage is not None or not is_split):
            from reshard.source.program_files import readings  # rarely needed

            self.formats = tuple(format for format in all_formats().values() if readings(self, format))
        self.kind: Literal["full", "adapter", "split", "program"] = "full"
        if self.formats:
            self.kind = "program"
        elif is_split:
            self.kind = "split"
        elif has_adapter(path):
            self.kind = "adapter"

    def once(self, read: Callable[..., T], *args: Hashable) -> T:
        """Return the result of ``read`` for these arguments; it is read only once."""
        key = (read, *args)
        if key not in self._contents:
            self._contents[key] = read(*args)
        content: T = self._contents[key]
        return content

    def weights(self, file: FilePath) -> Weights:
        """Return the header of a weight file (see ``read_weights``). Raises CheckpointError."""
        return self.once(read_weights, file)

    @property
    def mesh(self) -> Mesh | None:
        """The mesh in its manifest."""
        return self.manifest.identity.mesh if self.manifest else None

    def file(self, path: FilePath, tensors: Iterable[TensorInfo] = ()) -> SourceFile:
        """Return one of its weight files. If the checksum is known and there is no header, bytes of no tensor count,
        too.
        """
        header = self.weights(path)[2] if path.suffix == ".safetensors" else None
        name, size, expected = name_in(path, self.path), path.stat().st_size, self.checksums.get(path)
        if header is not None or expected is None:
            of_header = (header.raw, header.metadata) if header is not None else (None, {})
            return SourceFile(path, name, size, of_header[0], expected, metadata=of_header[1])
        ends = [*joined(((info.offset, info.offset + info.nbytes) for info in tensors), 0), (size, size)]
        gaps = [(end, begin) for (_, end), (begin, _) in pairwise([(0, 0), *ends]) if begin > end]
        contents = read_ranges([(path, *gap) for gap in gaps])
        return SourceFile(path, name, size, None, expected, tuple(zip((end for end, _ in gaps), contents, strict=True)))

    def side_files(self) -> dict[str, FilePath]:
        """The files beside the weights: those that its manifest lists, there or not, or those that are there."""
        if self.manifest is not None:
            return {record.name: self.path / record.name for record in self.manifest.side_files}
        files = {name_in(file, self.path): file for file in find_side_files(self.path) if file.is_file()}
        if self.kind in ("full", "program"):  # with it, transformers would look for an adapter that is not copied
            files.pop(ADAPTER_CONFIG, None)
        return files

    @cached_property
    def checksums(self) -> Mapping[FilePath, str | None]:
        """The checksums in its manifest."""
        files = self.manifest.ranks.values() if self.manifest else ()
        return {self.path / record.name: record.checksum for records in files for record in records}

    def architecture(self, config: Mapping[str, Any]) -> Architecture:
        """The rules: the user's, those that it was split by, or those of its model type."""
        if self.lora is not None and (of_adapter := self.lora.architecture(config)) is not None:
            return of_adapter
        if self.plan_file is not None:
            return load_architecture(self.plan_file)
        if manifest := self.manifest or self.base:
            return architecture_from_document(manifest.architecture, "manifest", str(self.path))
        return find_architecture(config, self.path)

    def source(
        self,
        format: Format,
        plan: Plan,
        model: Model,
        names: Iterable[str],
        ranks: Iterable[Mapping[str, TensorInfo]],
        files: Iterable[SourceFile],
        side_files: Mapping[str, FilePath],
        *,
        computed: Mapping[str, bytes] = {},
        index: FilePath | None = None,
        **fields: Any,
    ) -> Source:
        """Return a source of what was read. ``computed`` are side files with another content than in the folder."""
        weights = {file.path: file for file in files}
        documents = [*([self.path / MANIFEST] if self.manifest else []), *([index] if index is not None else [])]
        stamps = stamps_of([*weights, *side_files.values(), *documents], self.path, self.stamps)
        known = {name_in(path, self.path) for path in stamps if is_in(path, self.path)} | {*computed}
        return Source(
            self.path, plan, model, tuple(names), tuple(ranks), weights, {**computed, **side_files, **computed}, stamps,
            format, manifest=self.manifest, strays=self._strays(format, known), **fields,
        )  # fmt: skip

    def _strays(self, format: Format, known: set[str]) -> tuple[str, ...]:
        """Return the files in the folder that are not ``known``, nor in the manifest, nor the format's own."""
        records = (*self.manifest.ranks.values(), self.manifest.side_files) if self.manifest is not None else ()
        known |= {record.name for part in records for record in part}
        places = {"", *(f"{name.rpartition('/')[0]}/" for name in known if "/" in name)}
        own = {METADATA, INTACT_FILE, format.files.tracker, *format.container.documents}
        own |= {format.settings.file} if format.settings is not None else set()
        known |= {f"{place}{name}" for place in places for name in own} if not format.plain else set()
        others = other_entries(self.path, known)
        if isinstance(self.path, StoredPath):  # for a plan alone, not all side files are fetched
            others = [name for name in others if not is_side_file(name, ())]
        return tuple(others)
