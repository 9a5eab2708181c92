"""Opening what is stored in another program's format: which format and which mesh it is, and what lies where."""

from __future__ import annotations

import dataclasses
import itertools
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple

from formats.errors import ReshardError
from formats.files.boxes import At
from formats.files.checkpoint import (
    read_weights,
)
from formats.files.dcp import read_distributed
from formats.files.safetensors import TensorInfo, read_header
from formats.files.sharded import (
    MANIFEST,
    Identity,
    Manifest,
    is_sharded,
    read_manifest,
)
from formats.files.stamps import Stamp, stamps_in, stamps_of
from formats.notation.architecture_document import architecture_from_document
from formats.notation.architecture_files import find_architecture, load_architecture
from formats.notation.rewrites import Page, page_of
from formats.regular_files import open_file
from reshard.planning.arrangement import arrangement_of, unboxed
from reshard.planning.binding import bind
from reshard.planning.completeness import check_complete
from reshard.planning.model import Model
from reshard.planning.plan import Plan
from reshard.planning.program_plan import program_plan
from reshard.planning.stored import Boxes
from reshard.storage.distributed_source import Affix, Training
from reshard.storage.program_source import (
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
    pages_for,
    read_boxed,
    read_ranks,
    readings,
    side_files_of,
    training_of,
    whole_tensors,
)
from reshard.storage.source import KEPT, UNSPLIT, Source, SourceFile


def states_of(source: Source) -> Iterator[tuple[Affix, Source]]:
    """The states of training that have the shapes of the model's tensors, each kind as a source of its own.

    Its tensors have the names of the model's. Raises CheckpointError, MismatchError and PlanError.
    """
    training, page = source.training, source.page
    if training is None or page is None:
        return
    architecture, config = source.model.architecture, source.model.config
    for affix, names in training.parts.states.items():
        ranks, boxes = chunks_of(page, training.found, names)
        held = [whole_tensors(ranks, boxes)]
        full = inferred_tensors(page, architecture, config, held)
        model = bind(architecture, config, full, known=inferred_sizes(architecture, config, held))
        plan = program_plan(model, page, source.plan.mesh, padding=source.plan.padding or None)
        check_stored(arrangement_of(plan, page, boxes), ranks, source.path)
        yield affix, dataclasses.replace(source, plan=plan, unsplit=model, ranks=ranks, boxes=boxes, kept={})


def open_program(
    path: Path,
    location: str,
    plan_file: Path | None,
    config_folder: Path | None,
    stamps: Mapping[Path, Stamp],
    manifest: Manifest | None,
    candidates: Sequence[Page],
) -> Source:
    """Open what is stored in a program's format: in the first of ``candidates``, and on the first mesh, that fits."""
    problems: list[tuple[int, ReshardError]] = []  # 2 if the names are those of the format, 0 if they are of no mesh
    mesh = manifest.identity.mesh if manifest else None
    ways = [(of, files) for of in candidates for files in readings(of, path, mesh)]
    distributed = cache(lambda: read_distributed(ways[0][1][0].path.parent))
    if all(of.is_distributed for of, _ in ways) and len(ways) > 1:
        likely = likeliest([of for of, _ in ways], path, distributed(), config_folder, plan_file)
        ways = [way for way in ways if way[0] in likely]
    for page, found in ways:
        check_belonging(found)
        ranks: tuple[Mapping[str, TensorInfo], ...] = ()
        boxes: Boxes | None = None
        training: Training | None = None
        try:
            if page.boxes and not page.is_distributed:
                ranks, boxes = read_boxed(found)
            elif not page.boxes:
                ranks = read_ranks(page, found, path)
        except ReshardError as error:
            problems.append((1, error))
            continue
        config, made = config_of(page, path, config_folder, ranks)
        architecture = load_architecture(plan_file) if plan_file else find_architecture(config, path)
        if manifest is not None and plan_file is None:
            architecture = architecture_from_document(manifest.architecture, "manifest", str(path))
        stages, named = 1 + max(file.stage for file in found), mesh or found[0].mesh
        try:
            if page.is_distributed:
                training = training_of(page, distributed(), origins_of(page, architecture, config))
                ranks, boxes = chunks_of(page, training.found, training.parts.model)
            held: Sequence[Mapping[str, TensorInfo]] = [whole_tensors(ranks, boxes)] if boxes is not None else ranks
            if named is not None and page.numbered:
                named, held = numbered_globally(page, named, ranks)
            full = full_tensors(manifest)
            if full is None:
                full = inferred_tensors(page, architecture, config, held)
                names = {tensor.name for tensor in full}
                full += [tensor for tensor in kept_tensors(path / KEPT) if tensor.name not in names]
            sizes = manifest.identity.sizes if manifest else inferred_sizes(architecture, config, held)
            model = bind(architecture, config, full, known=sizes)
        except ReshardError as error:
            degrees = named.degrees if named else ()
            has_mesh = all(name != "ep" or architecture.families.get(name) for name, _ in degrees)
            problems.append((int(has_mesh), error))
            continue
        for each in [named] if named else meshes(len(held), stages, page, bool(model.expert_axes)):
            try:
                plan = program_plan(model, page, each)
            except ReshardError as error:
                problems.append((0 if found[0].mesh else 2, error))
                continue
            try:
                if manifest is None and page.free_padding:
                    padding = padding_of(unboxed(plan, page), ranks if boxes is None else held)
                    plan = program_plan(model, page, each, padding=padding)
                check_stored(arrangement_of(plan, page, boxes), ranks, path)
            except ReshardError as error:
                problems.append((2, error))
                continue
            check_complete(model, path)
            return _program_source(
                path, location, stamps, manifest, page, plan, ranks, made, boxes, files=found, training=training
            )
    raise max(problems, key=lambda problem: problem[0])[1]


def is_of_programs(path: Path) -> bool:
    """Whether a folder is in the format of another program. Raises ReshardError for a damaged manifest."""
    if (path / MANIFEST).is_file():
        return read_manifest(path / MANIFEST).form is not None
    return path.is_dir() and not is_sharded(path) and bool(pages_for(path))


def open_as(path: Path, model: Model) -> Source:
    """Open a program's folder as shards of a model that is known, whatever is stored in it.

    Of the formats and meshes that it may have, that is taken which the most of its tensors fit. Raises ReshardError if
    files of a rank are missing or cannot be read, or if the model cannot have such shards.
    """
    stamps = stamps_in(path)
    manifest = read_manifest(path / MANIFEST) if (path / MANIFEST).is_file() else None
    candidates = [page_of(manifest.form)] if manifest and manifest.form else pages_for(path)
    found: list[_Candidate] = []
    problems: list[ReshardError] = []
    known = manifest.identity.mesh if manifest else None
    for page, files in [(of, found) for of in candidates for found in readings(of, path, known)]:
        split = check_belonging(files)
        if page.boxes:
            try:
                found.append(_boxed_as(model, page, files, manifest, split))
            except ReshardError as error:
                problems.append(error)
            continue
        try:
            ranks, stages = read_ranks(page, files, path), 1 + max(file.stage for file in files)
            named = known or files[0].mesh
            if named is not None and page.numbered:
                named, _ = numbered_globally(page, named, ranks)
        except ReshardError as error:
            problems.append(error)
            continue
        for mesh in [named] if named else meshes(len(ranks), stages, page, bool(model.expert_axes)):
            try:
                plan = program_plan(model, page, mesh)
                if manifest is None and page.free_padding:
                    plan = program_plan(model, page, mesh, padding=padding_of(unboxed(plan, page), ranks))
                arrangement = arrangement_of(plan, page)
                held = [
                    {each.name_on(rank): (each.dtype, shape) for each, shape in arrangement.held(rank)}
                    for rank in range(mesh.size)
                ]
            except ReshardError as error:
                problems.append(error)
                continue
            unlike = sum(
                held[rank].get(name) != (info.dtype, info.shape)
                for rank, tensors in enumerate(ranks)
                for name, info in tensors.items()
            )
            found.append(_Candidate(unlike, page, plan, ranks, files))
    if not found:
        raise problems[0]
    best = min(found, key=lambda each: each.unlike)
    return _program_source(
        path, os.path.realpath(path), stamps, manifest, best.page, best.plan, best.ranks, {}, best.boxes,
        files=best.files, lacking=True,
    )  # fmt: skip


class _Candidate(NamedTuple):
    """A format and a mesh as which a folder may be opened, with the number of tensors that do not fit."""

    unlike: int
    page: Page
    plan: Plan
    ranks: tuple[Mapping[str, TensorInfo], ...]
    files: Sequence[ProgramFile]
    boxes: Boxes | None = None


def _boxed_as(
    model: Model, page: Page, files: Sequence[ProgramFile], manifest: Manifest | None, split: Identity | None
) -> _Candidate:
    """As ``open_as``, of files with boxes: for the mesh that they say if reshard wrote them, else for one rank."""
    said = manifest.identity if manifest is not None else split
    plan = program_plan(model, page, said.mesh if said is not None else UNSPLIT)
    if page.is_distributed:
        found = read_distributed(files[0].path.parent)
        training = training_of(page, found, origins_of(page, model.architecture, model.config))
        ranks, boxes = chunks_of(page, training.found, training.parts.model)
    else:
        ranks, boxes = read_boxed(files)
    if said is None and page.free_padding:
        held = [whole_tensors(ranks, boxes)]
        plan = program_plan(model, page, UNSPLIT, padding=padding_of(unboxed(plan, page), held))
    lacking = {stored.name: dict[int, At]() for stored in arrangement_of(plan, page).stored}
    return _Candidate(len(lacking.keys() ^ boxes.keys()), page, plan, ranks, files, lacking | boxes)


def _program_source(
    path: Path,
    location: str,
    stamps: Mapping[Path, Stamp],
    manifest: Manifest | None,
    page: Page,
    plan: Plan,
    ranks: tuple[Mapping[str, TensorInfo], ...],
    made: Mapping[str, bytes],
    boxes: Boxes | None,
    *,
    files: Sequence[ProgramFile],
    training: Training | None = None,
    lacking: bool = False,
) -> Source:
    """What is stored in a program's format, as a source; with ``lacking``, side files may be missing."""
    expected = {path / f.name: f.checksum for files in manifest.ranks.values() for f in files} if manifest else {}
    kept = {path / KEPT: read_weights(path / KEPT)} if (path / KEPT).is_file() else {}
    infos: dict[Path, list[TensorInfo]] = {file.path: [] for file in files}
    held = (*ranks, *(of[0] for of in kept.values()))
    beside = training.chunks() if training else ()
    for info in itertools.chain(*(tensors.values() for tensors in held), beside):
        infos.setdefault(info.file, []).append(info)
    weights = {file: _program_file(path, file, held, expected.get(file)) for file, held in infos.items()}
    side_files = (
        tuple(path / record.name for record in manifest.side_files)
        if manifest
        else tuple(file for file in side_files_of(page, path) if file.name not in {MANIFEST, KEPT} and file.is_file())
    )
    side_files = tuple(file for file in side_files if file.is_file()) if lacking else side_files
    used = [*weights, *side_files, *([path / MANIFEST] if manifest else [])]
    return Source(
        path, location, None, plan, plan.model, tuple(tensor.name for tensor in plan.model.tensors), ranks, weights,
        side_files, None, None, stamps_of(used, path, stamps), page,
        {name: info for of in kept.values() for name, info in of[0].items()}, manifest, made, boxes,
        training.parts.words() if training else tuple(left_behind(files)), training,
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
