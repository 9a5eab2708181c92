"""A folder to open: its form, its manifest, and each of its files, read once."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping
from functools import cached_property
from itertools import pairwise
from pathlib import Path, PurePosixPath
from typing import Any, Literal, TypeVar

from reshard.formats.errors import CheckpointError, ReshardError
from reshard.formats.files.checkpoint import (
    ADAPTER_CONFIG,
    METADATA,
    read_weights,
)
from reshard.formats.files.checksum import stamps_in, stamps_of
from reshard.formats.files.containers import SAFETENSORS, Weights
from reshard.formats.files.manifest import INTACT_FILE, MANIFEST, Manifest
from reshard.formats.files.safetensors import TensorInfo
from reshard.formats.files.sharded import read_manifest
from reshard.formats.files.side_files import find_side_files, is_side_file
from reshard.formats.mesh import RANK_FOLDER, Mesh
from reshard.formats.notation.architecture import Architecture, architecture_from_document
from reshard.formats.notation.architecture_files import find_architecture, load_architecture
from reshard.formats.notation.format import SOURCE_NAMES, Format
from reshard.formats.notation.format_file import format_of, with_names
from reshard.formats.store import FilePath, StoredPath, is_in, joined, name_in, read_ranges
from reshard.mesh.plan import Plan
from reshard.model.model import Model
from reshard.source.lora_side import LoraSide
from reshard.source.source import Source, SourceFile

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
    """A folder to open, with everything that was read of it. Each file is read once. ``recognise`` says what it is.

    It is a full checkpoint, a PEFT adapter, shards in reshard's own form, or in a program's format (``kind``). Any
    other folder counts as a full checkpoint: opening it says what is missing. ``formats`` are those that its files may
    be in: only one if a manifest names it. ``damage`` is why the manifest cannot be read.

    ``config`` is a folder with the config.json that belongs to it, ``plan_file`` the user's plan, ``rules`` those of
    what it is computed from, ``beginning`` what the names of the chosen one of several models begin with.
    """

    def __init__(
        self,
        path: FilePath,
        *,
        config: FilePath | None = None,
        plan_file: Path | None = None,
        rules: Architecture | None = None,
        beginning: str | None = None,
    ) -> None:
        self.path, self.config, self.plan_file, self.rules, self.beginning = path, config, plan_file, rules, beginning
        self.stamps = stamps_in(path)
        self._contents: dict[Hashable, Any] = {}
        self.lora: LoraSide | None = None  # as which side of a run with an adapter it is opened
        self.manifest: Manifest | None = None
        self.damage: ReshardError | None = None
        self.formats: tuple[Format, ...] = ()
        try:
            if (path / MANIFEST).is_file():
                self.manifest = read_manifest(path / MANIFEST)
                if (format := self.manifest.format) is not None:
                    self.formats = (with_names(format_of(format), SOURCE_NAMES, self.manifest.identity.names),)
        except CheckpointError as error:
            self.damage = error
        except ReshardError as error:  # it names a format that is not known here
            self.damage = CheckpointError(f"{path / MANIFEST}: {error.message}", error.hint)
        self.kind: Literal["full", "adapter", "split", "program"] = "full"

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
        header = self.weights(path).header if SAFETENSORS.holds(path.name) else None
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
        """The rules: the user's, those that it was split by or is computed by, or those of its model type."""
        if self.lora is not None and (of_adapter := self.lora.architecture(config)) is not None:
            return of_adapter
        if self.plan_file is not None:
            return load_architecture(self.plan_file)
        if self.manifest is not None:
            return architecture_from_document(self.manifest.architecture, "manifest", str(self.path))
        return self.rules or find_architecture(config, self.path)

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
