"""Opening a folder in another program's format: which format and mesh it has, and where each tensor lies."""

from __future__ import annotations

import contextlib
import itertools
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from formats.documents import json_bytes
from formats.errors import CheckpointError, ReshardError
from formats.files.checkpoint import (
    CONFIG,
    read_weights,
)
from formats.files.chunks import Chunk
from formats.files.dcp import Distributed, read_distributed
from formats.files.safetensors import TensorInfo, read_header
from formats.files.sharded import (
    KEPT,
    MANIFEST,
    Identity,
    Manifest,
)
from formats.files.stamps import Stamp, stamps_of
from formats.mesh import Mesh
from formats.notation.architecture import Architecture
from formats.notation.architecture_document import architecture_from_document
from formats.notation.architecture_files import find_architecture, load_architecture
from formats.notation.format import Format
from formats.store import FilePath, name_in, open_file
from reshard.mesh.plan import Plan
from reshard.model.binding import bind
from reshard.model.model import FullTensor, Model
from reshard.model.sizes import FEW
from reshard.placement.arrangement import arrangement_of, on_mesh
from reshard.placement.program_plan import program_plan
from reshard.placement.stored import Chunks
from reshard.source.completeness import check_complete
from reshard.source.distributed_source import Affix, Training
from reshard.source.program_source import (
    ProgramFile,
    check_belonging,
    check_stored,
    chunks_of,
    config_of,
    full_tensors,
    inferred_sizes,
    inferred_tensors,
    kept_tensors,
    left_behind,
    likeliest,
    meshes,
    numbered_globally,
    origins_of,
    padding_of,
    read_chunked,
    read_ranks,
    readings,
    side_files_of,
    training_of,
    whole_tensors,
    without_files,
)
from reshard.source.source import UNSPLIT, Source, SourceFile
from reshard.source.stated_dtype import dtype_of, with_dtype


def states_of(source: Source) -> Iterator[tuple[Affix, Source]]:
    """The training states that have the shapes of the model's tensors, each kind as a source of its own.

    Its tensors have the names of the model's. Raises CheckpointError, MismatchError and PlanError.
    """
    training, format = source.training, source.format
    if training is None:
        return
    architecture, config = source.model.architecture, source.model.config
    for affix, names in training.parts.states.items():
        ranks, chunks = chunks_of(format, training.found, names)
        held = [whole_tensors(ranks, chunks)]
        full = inferred_tensors(format, architecture, config, held)
        model = bind(architecture, config, full, known=inferred_sizes(architecture, config, held, full))
        plan = program_plan(model, format, source.plan.mesh, padding=source.plan.padding or None)
        check_stored(arrangement_of(plan, format, chunks), ranks, source.path)
        yield affix, replace(source, plan=plan, unsplit=model, ranks=ranks, chunks=chunks, kept={})


@dataclass(frozen=True)
class Folder:
    """A folder to open, and what is known of it before its tensors are read.

    ``config`` is a folder with the config.json that belongs to it, ``plan_file`` the user's plan.
    """

    path: FilePath
    stamps: Mapping[FilePath, Stamp]
    manifest: Manifest | None
    config: Path | None = None
    plan_file: Path | None = None

    @property
    def mesh(self) -> Mesh | None:
        """The mesh in its manifest."""
        return self.manifest.identity.mesh if self.manifest else None

    def architecture(self, config: Mapping[str, Any]) -> Architecture:
        """The rules: the user's, those that it was split by, or those of its model type."""
        if self.plan_file is not None:
            return load_architecture(self.plan_file)
        if self.manifest is not None:
            return architecture_from_document(self.manifest.architecture, "manifest", str(self.path))
        return find_architecture(config, self.path)


@dataclass(frozen=True)
class _Stored:
    """The tensors in a folder's files, read as a format says: those of each rank, or the chunks in each file."""

    format: Format
    files: Sequence[ProgramFile]
    ranks: tuple[Mapping[str, TensorInfo], ...] = ()
    chunks: Chunks | None = None
    training: Training | None = None

    @property
    def held(self) -> Sequence[Mapping[str, TensorInfo]]:
        """The tensors of each rank; those in chunks as one rank would have them."""
        return self.ranks if self.chunks is None else [whole_tensors(self.ranks, self.chunks)]

    def meshes(self, model: Model) -> Iterator[Mesh]:
        """The meshes that so many ranks may be, if no file says which it is."""
        stages = 1 + max(file.stage for file in self.files)
        return meshes(len(self.held), stages, self.format, bool(model.expert_axes))

    def plan(self, model: Model, mesh: Mesh, *, is_known: bool) -> Plan:
        """A model's plan on a mesh, with the padding that the files have, if it is not known. Raises PlanError."""
        plan = program_plan(model, self.format, mesh)
        if is_known or not self.format.padding.free:
            return plan
        return program_plan(model, self.format, mesh, padding=padding_of(on_mesh(plan, self.format), self.held))


class _MisfitError(Exception):
    """Why a folder is not in a format. Of several, that of the highest ``rank`` is told.

    It is 2 if the names are those of the format, and 0 if they are of no mesh.
    """

    def __init__(self, rank: int, error: ReshardError) -> None:
        super().__init__(str(error))
        self.rank, self.error = rank, error


@contextlib.contextmanager
def _misfit(rank: int) -> Iterator[None]:
    try:
        yield
    except ReshardError as error:
        raise _MisfitError(rank, error) from None


@dataclass(frozen=True)
class _Reading:
    """What a folder has, read as one format: the tensors, the model that they are of, and the meshes they may be of.

    ``made`` are side files that do not lie in the folder as they are, ``note`` what was changed in config.json.
    """

    stored: _Stored
    model: Model
    meshes: Sequence[Mesh]
    is_known: bool
    made: Mapping[str, bytes] = field(default_factory=dict)
    note: str | None = None


def open_program(folder: Folder, candidates: Sequence[Format], model: Model | None = None) -> Source:
    """Open a folder in a program's format: in the first of ``candidates``, and on the first mesh, that fits.

    With a ``model`` it is opened as shards of that model, whatever it holds: with the format and mesh that most of its
    tensors fit. Then side files may be missing. Raises CheckpointError, MismatchError and PlanError.
    """
    ways = [(format, files) for format in candidates for files in readings(format, folder.path, folder.mesh)]
    if not ways:
        raise without_files(candidates[0], folder.path)
    distributed = cache(lambda: read_distributed(ways[0][1][0].path.parent))
    if model is None and all(of.files.is_distributed for of, _ in ways) and len(ways) > 1:
        likely = likeliest([of for of, _ in ways], folder.path, distributed(), folder.config, folder.plan_file)
        ways = [way for way in ways if way[0] in likely]
    misfits: list[_MisfitError] = []
    unlike: list[_Unlike] = []
    for format, files in ways:
        split = check_belonging(files)
        try:
            if model is None:
                reading = _read_model(folder, format, files, distributed)
            else:
                with _misfit(1):
                    reading = _read_of(folder, model, format, files, split, distributed)
        except _MisfitError as misfit:
            misfits.append(misfit)
            continue
        for mesh in reading.meshes:
            try:
                plan = _plan(reading, mesh, 0 if files[0].mesh else 2)
                with _misfit(2):
                    check_stored(arrangement_of(plan, format, reading.stored.chunks), reading.stored.ranks, folder.path)
            except _MisfitError as misfit:
                misfits.append(misfit)
                if model is not None:
                    unlike += _unlike(reading, mesh)
                continue
            if model is None:
                check_complete(reading.model, folder.path)
            return _program_source(folder, reading, plan, lacking=model is not None)
    if unlike:
        best = min(unlike, key=lambda each: each.tensors)
        return _program_source(folder, best.reading, best.plan, lacking=True)
    raise max(misfits, key=lambda misfit: misfit.rank).error


def _plan(reading: _Reading, mesh: Mesh, rank: int) -> Plan:
    """The plan on a mesh, with the padding that the files have; ``rank`` is how much a mesh that is refused says."""
    with _misfit(rank):
        program_plan(reading.model, reading.stored.format, mesh)
    with _misfit(2):
        return reading.stored.plan(reading.model, mesh, is_known=reading.is_known)


def _read_model(
    folder: Folder, format: Format, files: Sequence[ProgramFile], distributed: Callable[[], Distributed]
) -> _Reading:
    """What the files have, with the model that the config.json beside them, or a given one, describes."""
    with _misfit(1):
        stored = _Stored(format, files) if format.files.is_distributed else _read(folder, format, files)
    config, made = config_of(format, folder.path, folder.config, stored.ranks)
    architecture = folder.architecture(config)
    mesh = folder.mesh or files[0].mesh
    has_mesh = all(name != "ep" or architecture.families.get(name) for name, _ in (mesh.degrees if mesh else ()))
    with _misfit(int(has_mesh)):
        if format.files.is_distributed:
            stored = _read_chunks(format, files, distributed(), architecture, config)
        held = stored.held
        config, made, note = _with_dtype(folder, architecture, config, made, held)
        if mesh is not None and format.rules.numbered:
            mesh, held = numbered_globally(format, mesh, stored.ranks)
        full = _full(folder, format, architecture, config, held)
    with _misfit(2 * has_mesh):
        model = _bound(folder, architecture, config, full, held)
    found = [mesh] if mesh else [*stored.meshes(model)]
    return _Reading(stored, model, found, folder.manifest is not None, made, note)


def _read_of(
    folder: Folder, model: Model, format: Format, files: Sequence[ProgramFile], split: Identity | None,
    distributed: Callable[[], Distributed],
) -> _Reading:  # fmt: skip
    """What the files have, as shards of a model that is known; ``split`` is what their headers say, if anything."""
    if format.files.is_distributed:
        stored = _read_chunks(format, files, distributed(), model.architecture, model.config)
    else:
        stored = _read(folder, format, files)
    mesh = folder.mesh or files[0].mesh
    if format.container.chunks:
        mesh = folder.mesh or (split.mesh if split is not None else UNSPLIT)
    elif mesh is not None and format.rules.numbered:
        mesh, _ = numbered_globally(format, mesh, stored.ranks)
    is_known = folder.manifest is not None or (format.container.chunks and split is not None)
    return _Reading(stored, model, [mesh] if mesh else [*stored.meshes(model)], is_known)


class _Unlike(NamedTuple):
    """A reading on a mesh that does not fit: so many tensors are not as they should be."""

    tensors: int
    reading: _Reading
    plan: Plan


def _unlike(reading: _Reading, mesh: Mesh) -> Iterator[_Unlike]:
    """The reading with the number of tensors that differ from the plan on ``mesh``; nothing if there is no plan."""
    stored, model = reading.stored, reading.model
    try:
        plan = stored.plan(model, mesh, is_known=reading.is_known)
        arrangement = arrangement_of(plan, stored.format)
    except ReshardError:
        return
    if stored.chunks is not None:
        lacking = {each.name: dict[int, Chunk]() for each in arrangement.stored}
        whole = replace(stored, chunks={**lacking, **stored.chunks})
        yield _Unlike(len(lacking.keys() ^ stored.chunks.keys()), replace(reading, stored=whole), plan)
        return
    held = [
        {each.name_on(rank): (each.dtype, shape) for each, shape in arrangement.held(rank)} for rank in range(mesh.size)
    ]
    count = sum(
        held[rank].get(name) != (info.dtype, info.shape)
        for rank, tensors in enumerate(stored.ranks)
        for name, info in tensors.items()
    )
    yield _Unlike(count, reading, plan)


def _with_dtype(
    folder: Folder,
    architecture: Architecture,
    config: dict[str, Any],
    made: dict[str, bytes],
    held: Sequence[Mapping[str, TensorInfo]],
) -> tuple[dict[str, Any], dict[str, bytes], str | None]:
    """A config and the side files with it, which say the dtype of the weights if the config is given apart from them.

    Returns also what was changed, in words.
    """
    if folder.config is None:
        return config, made, None
    dtype = dtype_of(held)
    given = json.loads(made[CONFIG])
    own, others = with_dtype(given, architecture.section(given), dtype)
    if not others:
        return config, made, None
    config, _ = with_dtype(config, architecture.section(config), dtype)
    note = f"config.json says {dtype}, as the weights are; the one that was given says {' and '.join(sorted(others))}"
    return config, {**made, CONFIG: json_bytes(own) + b"\n"}, note


def _read(folder: Folder, format: Format, files: Sequence[ProgramFile]) -> _Stored:
    if not format.container.chunks:
        return _Stored(format, files, read_ranks(format, files, folder.path, folder.mesh))
    ranks, chunks = read_chunked(files)
    return _Stored(format, files, ranks, chunks)


def _read_chunks(
    format: Format,
    files: Sequence[ProgramFile],
    found: Distributed,
    architecture: Architecture,
    config: Mapping[str, Any],
) -> _Stored:
    training = training_of(format, found, origins_of(format, architecture, config))
    ranks, chunks = chunks_of(format, training.found, training.parts.model)
    return _Stored(format, files, ranks, chunks, training)


def _full(
    folder: Folder,
    format: Format,
    architecture: Architecture,
    config: dict[str, Any],
    held: Sequence[Mapping[str, TensorInfo]],
) -> Sequence[FullTensor]:
    """The model's tensors: those that the manifest says, or that the names in the files stand for."""
    full = full_tensors(folder.manifest)
    if full is not None:
        return full
    kept = {tensor.name: tensor for tensor in kept_tensors(folder.path / KEPT)}
    inferred = inferred_tensors(format, architecture, config, held)
    # What is kept has the dtype of the original; what a program computes from it may have another.
    return [kept.pop(tensor.name, tensor) for tensor in inferred] + [*kept.values()]


def _bound(
    folder: Folder,
    architecture: Architecture,
    config: dict[str, Any],
    full: Sequence[FullTensor],
    held: Sequence[Mapping[str, TensorInfo]],
) -> Model:
    known = folder.manifest.identity.sizes if folder.manifest else inferred_sizes(architecture, config, held, full)
    model = bind(architecture, config, full, known=known)
    _check_extent(model, held)
    return model


def _check_extent(model: Model, held: Sequence[Mapping[str, TensorInfo]]) -> None:
    """Raise CheckpointError if config.json makes much more of a tensor than all that is stored."""
    stored = sum(math.prod(info.shape) for rank in held for info in rank.values())
    for kind in model.kinds:
        if math.prod(kind.shape) > _MARGIN * stored + FEW:
            raise CheckpointError(
                f"config.json: '{kind.name}' has the shape {list(kind.shape)} by it, and {stored:,} numbers are stored",
                "it is not the config.json of these tensors, or is damaged",
            )


_MARGIN = 64
"""A program may pack at most so many numbers of a tensor into one integer."""


def _program_source(folder: Folder, reading: _Reading, plan: Plan, *, lacking: bool) -> Source:
    """What is stored in a program's format, as a source; with ``lacking``, side files may be missing."""
    stored, made = reading.stored, reading.made
    path, manifest, format, training = folder.path, folder.manifest, stored.format, stored.training
    expected = {path / f.name: f.checksum for files in manifest.ranks.values() for f in files} if manifest else {}
    kept = {path / KEPT: read_weights(path / KEPT)} if (path / KEPT).is_file() else {}
    infos: dict[FilePath, list[TensorInfo]] = {file.path: [] for file in stored.files}
    held = (*stored.ranks, *(of[0] for of in kept.values()))
    beside = training.chunks() if training else ()
    for info in itertools.chain(*(tensors.values() for tensors in held), beside):
        infos.setdefault(info.file, []).append(info)
    weights = {file: _program_file(path, file, held, expected.get(file)) for file, held in infos.items()}
    if manifest is not None:
        found = {record.name: path / record.name for record in manifest.side_files}
    elif folder.config is not None and format.files.tracker is not None:
        found = {}  # a trainer's own files: it saves none of the model's
    else:
        found = dict(side_files_of(format, path))
    if lacking or manifest is None:
        found = {name: file for name, file in found.items() if file.is_file()}
    side_files: dict[str, FilePath | bytes] = {**made, **found, **made}
    used = [*weights, *found.values(), *([path / MANIFEST] if manifest else [])]
    names = tuple(tensor.name for tensor in plan.model.tensors)
    return Source(
        path, plan, plan.model, names, stored.ranks, weights, side_files, None, None,
        stamps_of(used, path, folder.stamps), format,
        {name: info for of in kept.values() for name, info in of[0].items()}, manifest, stored.chunks,
        training.parts.words() if training else tuple(left_behind(stored.files)), training, note=reading.note,
    )  # fmt: skip


def _program_file(folder: FilePath, path: FilePath, tensors: Sequence[TensorInfo], expected: str | None) -> SourceFile:
    size, name = path.stat().st_size, name_in(path, folder)
    if path.suffix == ".safetensors":
        return SourceFile(path, name, size, read_header(path).raw, expected)
    rest = _between(path, sorted(tensors, key=lambda info: info.offset), size) if expected is not None else ()
    return SourceFile(path, name, size, None, expected, tuple(rest))


def _between(path: FilePath, tensors: Iterable[TensorInfo], size: int) -> Iterator[tuple[int, bytes]]:
    """The bytes of a file that belong to no tensor, with their offsets; ``tensors`` come as they lie in it."""
    end = 0
    with open_file(path) as file:
        for begin, behind in [*((info.offset, info.offset + info.nbytes) for info in tensors), (size, size)]:
            if begin > end:
                file.seek(end)
                yield end, file.read(begin - end)
            end = max(end, behind)
