"""Opening what is stored in another program's format: which format and which mesh it is, and what lies where."""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from formats.documents import json_bytes
from formats.errors import CheckpointError, ReshardError
from formats.files.boxes import At
from formats.files.checkpoint import (
    read_weights,
)
from formats.files.dcp import Distributed, read_distributed
from formats.files.safetensors import TensorInfo, read_header
from formats.files.sharded import (
    MANIFEST,
    Identity,
    Manifest,
    is_sharded,
    read_manifest,
)
from formats.files.stamps import Stamp, stamps_in, stamps_of
from formats.mesh import Mesh
from formats.notation.architecture import Architecture
from formats.notation.architecture_document import architecture_from_document
from formats.notation.architecture_files import find_architecture, load_architecture
from formats.notation.format import Format
from formats.notation.format_file import format_of
from formats.regular_files import open_file
from reshard.planning.arrangement import arrangement_of, unboxed
from reshard.planning.binding import bind
from reshard.planning.completeness import check_complete
from reshard.planning.model import FullTensor, Model
from reshard.planning.plan import Plan
from reshard.planning.program_plan import program_plan
from reshard.planning.sizes import FEW
from reshard.planning.stored import Boxes
from reshard.storage.distributed_source import Affix, Training
from reshard.storage.program_source import (
    CONFIG,
    ProgramFile,
    check_belonging,
    check_stored,
    chunks_of,
    config_of,
    formats_for,
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
    read_boxed,
    read_ranks,
    readings,
    side_files_of,
    training_of,
    whole_tensors,
    without_files,
)
from reshard.storage.source import KEPT, UNSPLIT, Source, SourceFile
from reshard.storage.stated_dtype import dtype_of, with_dtype


def states_of(source: Source) -> Iterator[tuple[Affix, Source]]:
    """The states of training that have the shapes of the model's tensors, each kind as a source of its own.

    Its tensors have the names of the model's. Raises CheckpointError, MismatchError and PlanError.
    """
    training, format = source.training, source.format
    if training is None or format is None:
        return
    architecture, config = source.model.architecture, source.model.config
    for affix, names in training.parts.states.items():
        ranks, boxes = chunks_of(format, training.found, names)
        held = [whole_tensors(ranks, boxes)]
        full = inferred_tensors(format, architecture, config, held)
        model = bind(architecture, config, full, known=inferred_sizes(architecture, config, held))
        plan = program_plan(model, format, source.plan.mesh, padding=source.plan.padding or None)
        check_stored(arrangement_of(plan, format, boxes), ranks, source.path)
        yield affix, replace(source, plan=plan, unsplit=model, ranks=ranks, boxes=boxes, kept={})


@dataclass(frozen=True)
class Folder:
    """What is to be opened, and what is known of it before its tensors are read.

    ``config`` is a folder with the config.json that belongs to it, ``plan_file`` the user's plan.
    """

    path: Path
    location: str
    stamps: Mapping[Path, Stamp]
    manifest: Manifest | None
    config: Path | None = None
    plan_file: Path | None = None

    @property
    def mesh(self) -> Mesh | None:
        """The mesh that its manifest says."""
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
    """The tensors in a folder's files, read as a format says: those of each rank, or the boxes in each file."""

    format: Format
    files: Sequence[ProgramFile]
    ranks: tuple[Mapping[str, TensorInfo], ...] = ()
    boxes: Boxes | None = None
    training: Training | None = None

    @property
    def held(self) -> Sequence[Mapping[str, TensorInfo]]:
        """The tensors of each rank; those in boxes as one rank would have them."""
        return self.ranks if self.boxes is None else [whole_tensors(self.ranks, self.boxes)]

    def meshes(self, model: Model) -> Iterator[Mesh]:
        """The meshes that so many ranks may be, if no file says which it is."""
        stages = 1 + max(file.stage for file in self.files)
        return meshes(len(self.held), stages, self.format, bool(model.expert_axes))

    def plan(self, model: Model, mesh: Mesh, *, is_known: bool) -> Plan:
        """A model's plan on a mesh, with the padding that the files have, if it is not known. Raises PlanError."""
        plan = program_plan(model, self.format, mesh)
        if is_known or not self.format.padding.free:
            return plan
        return program_plan(model, self.format, mesh, padding=padding_of(unboxed(plan, self.format), self.held))


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


def _told(misfits: Sequence[_MisfitError]) -> _MisfitError:
    return max(misfits, key=lambda misfit: misfit.rank)


def open_program(folder: Folder, candidates: Sequence[Format]) -> Source:
    """Open what is stored in a program's format: in the first of ``candidates``, and on the first mesh, that fits.

    Raises CheckpointError, MismatchError and PlanError.
    """
    ways = _ways(folder, candidates)
    distributed = cache(lambda: read_distributed(ways[0][1][0].path.parent))
    if all(of.files.is_distributed for of, _ in ways) and len(ways) > 1:
        likely = likeliest([of for of, _ in ways], folder.path, distributed(), folder.config, folder.plan_file)
        ways = [way for way in ways if way[0] in likely]
    misfits: list[_MisfitError] = []
    for format, files in ways:
        check_belonging(files)
        try:
            return _open_as_format(folder, format, files, distributed)
        except _MisfitError as misfit:
            misfits.append(misfit)
    raise _told(misfits).error


def _ways(folder: Folder, candidates: Sequence[Format]) -> list[tuple[Format, list[ProgramFile]]]:
    """The formats that a folder may have, each with its weight files. Raises CheckpointError if it has none."""
    ways = [(format, files) for format in candidates for files in readings(format, folder.path, folder.mesh)]
    if not ways:
        raise without_files(candidates[0], folder.path)
    return ways


def _open_as_format(
    folder: Folder, format: Format, files: Sequence[ProgramFile], distributed: Callable[[], Distributed]
) -> Source:
    with _misfit(1):
        stored = _Stored(format, files) if format.files.is_distributed else _read(format, files, folder.path)
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
    misfits: list[_MisfitError] = []
    for each in [mesh] if mesh else stored.meshes(model):
        try:
            with _misfit(0 if files[0].mesh else 2):
                program_plan(model, format, each)
            with _misfit(2):
                plan = stored.plan(model, each, is_known=folder.manifest is not None)
                check_stored(arrangement_of(plan, format, stored.boxes), stored.ranks, folder.path)
        except _MisfitError as misfit:
            misfits.append(misfit)
            continue
        check_complete(model, folder.path)
        return replace(_program_source(folder, stored, plan, made), note=note)
    raise _told(misfits)


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


def _read(format: Format, files: Sequence[ProgramFile], path: Path) -> _Stored:
    if not format.container.boxes:
        return _Stored(format, files, read_ranks(format, files, path))
    ranks, boxes = read_boxed(files)
    return _Stored(format, files, ranks, boxes)


def _read_chunks(
    format: Format,
    files: Sequence[ProgramFile],
    found: Distributed,
    architecture: Architecture,
    config: Mapping[str, Any],
) -> _Stored:
    training = training_of(format, found, origins_of(format, architecture, config))
    ranks, boxes = chunks_of(format, training.found, training.parts.model)
    return _Stored(format, files, ranks, boxes, training)


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
    known = folder.manifest.identity.sizes if folder.manifest else inferred_sizes(architecture, config, held)
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
"""A program may store so many numbers of a tensor in one: several bits of an integer."""


def is_of_programs(path: Path) -> bool:
    """Whether a folder is in the format of another program. Raises ReshardError for a damaged manifest."""
    if (path / MANIFEST).is_file():
        return read_manifest(path / MANIFEST).form is not None
    return path.is_dir() and not is_sharded(path) and bool(formats_for(path))


def open_as(path: Path, model: Model) -> Source:
    """Open a program's folder as shards of a model that is known, whatever is stored in it.

    Of the formats and meshes that it may have, that is taken which the most of its tensors fit. Raises ReshardError if
    files of a rank are missing or cannot be read, or if the model cannot have such shards.
    """
    manifest = read_manifest(path / MANIFEST) if (path / MANIFEST).is_file() else None
    folder = Folder(path, os.path.realpath(path), stamps_in(path), manifest)
    candidates = [format_of(manifest.form)] if manifest and manifest.form else formats_for(path)
    found: list[_Candidate] = []
    problems: list[ReshardError] = []
    for format, files in _ways(folder, candidates):
        split = check_belonging(files)
        is_known = manifest is not None or (format.container.boxes and split is not None)
        try:
            stored, known = _read_of(folder, model, format, files, split)
        except ReshardError as error:
            problems.append(error)
            continue
        for mesh in [known] if known else stored.meshes(model):
            try:
                found.append(_candidate(stored, model, mesh, is_known=is_known))
            except ReshardError as error:
                problems.append(error)
    if not found:
        raise problems[0]
    best = min(found, key=lambda each: each.unlike)
    return _program_source(folder, best.stored, best.plan, {}, lacking=True)


class _Candidate(NamedTuple):
    """A format and a mesh as which a folder may be opened, with the number of tensors that do not fit."""

    unlike: int
    stored: _Stored
    plan: Plan


def _read_of(
    folder: Folder, model: Model, format: Format, files: Sequence[ProgramFile], split: Identity | None
) -> tuple[_Stored, Mesh | None]:
    """The tensors in a folder's files, and the mesh of the shards of this model that they are, if it is said."""
    if format.files.is_distributed:
        found = read_distributed(files[0].path.parent)
        stored = _read_chunks(format, files, found, model.architecture, model.config)
    else:
        stored = _read(format, files, folder.path)
    mesh = folder.mesh or files[0].mesh
    if format.container.boxes:
        return stored, folder.mesh or (split.mesh if split is not None else UNSPLIT)
    return stored, numbered_globally(format, mesh, stored.ranks)[
        0
    ] if mesh is not None and format.rules.numbered else mesh


def _candidate(stored: _Stored, model: Model, mesh: Mesh, *, is_known: bool) -> _Candidate:
    plan, boxes = stored.plan(model, mesh, is_known=is_known), stored.boxes
    arrangement = arrangement_of(plan, stored.format)
    if boxes is not None:
        lacking = {each.name: dict[int, At]() for each in arrangement.stored}
        return _Candidate(len(lacking.keys() ^ boxes.keys()), replace(stored, boxes={**lacking, **boxes}), plan)
    held = [
        {each.name_on(rank): (each.dtype, shape) for each, shape in arrangement.held(rank)} for rank in range(mesh.size)
    ]
    unlike = sum(
        held[rank].get(name) != (info.dtype, info.shape)
        for rank, tensors in enumerate(stored.ranks)
        for name, info in tensors.items()
    )
    return _Candidate(unlike, stored, plan)


def _program_source(
    folder: Folder, stored: _Stored, plan: Plan, made: Mapping[str, bytes], *, lacking: bool = False
) -> Source:
    """What is stored in a program's format, as a source; with ``lacking``, side files may be missing."""
    path, manifest, format, training = folder.path, folder.manifest, stored.format, stored.training
    expected = {path / f.name: f.checksum for files in manifest.ranks.values() for f in files} if manifest else {}
    kept = {path / KEPT: read_weights(path / KEPT)} if (path / KEPT).is_file() else {}
    infos: dict[Path, list[TensorInfo]] = {file.path: [] for file in stored.files}
    held = (*stored.ranks, *(of[0] for of in kept.values()))
    beside = training.chunks() if training else ()
    for info in itertools.chain(*(tensors.values() for tensors in held), beside):
        infos.setdefault(info.file, []).append(info)
    weights = {file: _program_file(path, file, held, expected.get(file)) for file, held in infos.items()}
    side_files = (
        tuple(path / record.name for record in manifest.side_files)
        if manifest
        else tuple(file for file in side_files_of(format, path) if file.name not in {MANIFEST, KEPT} and file.is_file())
    )
    side_files = tuple(file for file in side_files if file.is_file()) if lacking else side_files
    used = [*weights, *side_files, *([path / MANIFEST] if manifest else [])]
    names = tuple(tensor.name for tensor in plan.model.tensors)
    return Source(
        path, folder.location, None, plan, plan.model, names, stored.ranks, weights, side_files, None, None,
        stamps_of(used, path, folder.stamps), format,
        {name: info for of in kept.values() for name, info in of[0].items()}, manifest, made, stored.boxes,
        training.parts.words() if training else tuple(left_behind(stored.files)), training,
    )  # fmt: skip


def _program_file(folder: Path, path: Path, tensors: Sequence[TensorInfo], expected: str | None) -> SourceFile:
    size, name = path.stat().st_size, path.relative_to(folder).as_posix()
    if path.suffix == ".safetensors":
        return SourceFile(path, name, size, read_header(path).raw, expected)
    rest = _between(path, sorted(tensors, key=lambda info: info.offset), size) if expected is not None else ()
    return SourceFile(path, name, size, None, expected, tuple(rest))


def _between(path: Path, tensors: Iterable[TensorInfo], size: int) -> Iterator[tuple[int, bytes]]:
    """The bytes of a file that belong to no tensor, with their offsets; ``tensors`` come as they lie in it."""
    end = 0
    with open_file(path) as file:
        for begin, behind in [*((info.offset, info.offset + info.nbytes) for info in tensors), (size, size)]:
            if begin > end:
                file.seek(end)
                yield end, file.read(begin - end)
            end = max(end, behind)
