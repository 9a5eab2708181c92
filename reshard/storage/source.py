"""The source of a command: a full or a split checkpoint, opened the same way."""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property, partial
from pathlib import Path
from typing import Any, NamedTuple

from formats.documents import json_bytes, read_config
from formats.errors import CheckpointError, MismatchError, ReshardError
from formats.files.boxes import At
from formats.files.checkpoint import (
    Checkpoint,
    fingerprint,
    has_adapter,
    has_usual_weights,
    open_adapter,
    open_checkpoint,
    read_weights,
)
from formats.files.dcp import read_distributed
from formats.files.safetensors import TensorInfo, read_header
from formats.files.sharded import (
    MANIFEST,
    Identity,
    Manifest,
    ShardedCheckpoint,
    SourceFileRecord,
    SourceRecord,
    is_sharded,
    open_sharded,
    plan_digest,
    read_manifest,
)
from formats.files.stamps import Stamp, stamp_of
from formats.mesh import Mesh
from formats.notation.architecture import Architecture
from formats.notation.architecture_document import architecture_from_document, to_document
from formats.notation.architecture_files import find_architecture, load_architecture
from formats.notation.rewrites import Page, page_of
from formats.quantization.scale_blocks import block_size
from formats.regular_files import open_file, read_file
from reshard.planning.arrangement import (
    Arrangement,
    Boxes,
    arrangement_of,
    stored_like,
    unboxed,
    unchanged,
    uses_of,
)
from reshard.planning.binding import bind, lines_for
from reshard.planning.completeness import check_complete
from reshard.planning.finer_blocks import with_blocks
from reshard.planning.model import FullTensor, Model
from reshard.planning.plan import Plan, make_plan
from reshard.planning.program_plan import program_plan
from reshard.planning.rows import Rows
from reshard.planning.sizes import AxisSizes
from reshard.storage.distributed_source import Affix, Training
from reshard.storage.output import unfinished_command
from reshard.storage.program_source import (
    CONFIG,
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
from reshard.storage.remote import Remote

UNSPLIT = Mesh((("tp", 1),))
KEPT = "reshard-kept.safetensors"
"""The file with the tensors whose own bits a program's format does not keep."""


@dataclass(frozen=True, eq=False)
class SourceFile:
    """A weight file to read from.

    ``name`` is relative to the source's folder, ``size`` in bytes. ``header`` has the bytes of its header, None for a
    format without one. ``expected`` is its checksum, if a manifest states it.
    """

    path: Path
    name: str
    size: int
    header: bytes | None = None
    expected: str | None = None
    rest: tuple[tuple[int, bytes], ...] = ()
    """Other bytes that belong to no tensor, with their offsets."""
    remote: Remote | None = None
    """Where its bytes are read, if not at ``path``, which then has the header alone."""

    @property
    def shown(self) -> str:
        """What messages call it."""
        return str(self.path) if self.remote is None else self.remote.address


class SourcePlace(NamedTuple):
    """A tensor's file and the offset of its first byte in it; ``rows`` if it does not lie in one piece."""

    file: SourceFile
    offset: int
    rows: Rows | None = None


Places = Callable[[int], SourcePlace | None]
"""A tensor's place in the files of a rank; None if the rank does not hold it."""


def _place_of(
    ranks: Sequence[Mapping[str, TensorInfo]], files: Mapping[Path, SourceFile], name: str, rank: int
) -> SourcePlace | None:
    """A tensor's place in the files of a rank, given the tensors of each rank; None if the rank does not hold it."""
    info = ranks[rank].get(name)
    return SourcePlace(files[info.file], info.offset) if info else None


@dataclass(frozen=True)
class Source:
    """A checkpoint to read from.

    ``plan`` is the plan on the source's own mesh (one rank, for a full checkpoint). ``unsplit`` is the model of the
    full checkpoint; its scale blocks may be larger than the plan's (see ``reshard.engine.regrid``). ``names`` has all
    tensors in the order of the original files, ``ranks`` the tensors of each rank by name, ``files`` the weight files
    by path. ``checkpoint`` is set for a full checkpoint, ``sharded`` for a split one. ``stamps`` has the state of each
    file before it was read.
    """

    path: Path
    location: str
    commit: str | None
    plan: Plan
    unsplit: Model
    names: tuple[str, ...]
    ranks: tuple[Mapping[str, TensorInfo], ...]
    files: Mapping[Path, SourceFile]
    side_files: tuple[Path, ...]
    checkpoint: Checkpoint | None
    sharded: ShardedCheckpoint | None
    stamps: Mapping[Path, Stamp]
    page: Page | None = None
    """The format, if another program's."""
    kept: Mapping[str, TensorInfo] = field(default_factory=dict)
    """The tensors in ``KEPT``."""
    manifest: Manifest | None = None
    """The manifest of a split checkpoint that has one."""
    made: Mapping[str, bytes] = field(default_factory=dict)
    """Side files that do not lie in its folder."""
    boxes: Boxes | None = None
    """The boxes of stored tensors, by the numbers of their files, which stand for ranks."""
    left_behind: tuple[str, ...] = ()
    """What its files have beside the model, in a few words."""
    training: Training | None = None
    """What a trainer saved beside the model, where it can be re-sharded with it."""

    @cached_property
    def arrangement(self) -> Arrangement | None:
        """What is stored, if the format is another program's."""
        return None if self.page is None else arrangement_of(self.plan, self.page, self.boxes)

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
        """The content of the side files, by their relative names. Raises CheckpointError."""
        found = {path.relative_to(self.path).as_posix(): read_file(path) for path in self.side_files}
        return dict(self.made) | {name: content for name, content in found.items() if name not in self.made}

    def read_config(self) -> dict[str, Any]:
        """The config.json that belongs to it. Raises CheckpointError."""
        return dict(json.loads(self.made[CONFIG])) if CONFIG in self.made else read_config(self.path / CONFIG)

    def check_unchanged(self) -> None:
        """Raise MismatchError if a file is no longer in the state in which it was opened."""
        for path, stamp in self.stamps.items():
            if not path.exists() or stamp_of(path, stamp.name).open_state != stamp.open_state:
                raise MismatchError(
                    f"{path} was changed while it was read", "run the command again when nobody writes there"
                )

    @property
    def model(self) -> Model:
        """The architecture bound to the tensors of the full checkpoint."""
        return self.unsplit

    @property
    def is_elsewhere(self) -> bool:
        """Whether weights are read from another machine."""
        return any(file.remote is not None for file in self.files.values())

    @property
    def is_split(self) -> bool:
        """Whether this is split over ranks already, in whatever format."""
        return self.checkpoint is None

    @cached_property
    def record(self) -> SourceRecord:
        """The record of the original checkpoint, as in a manifest. Reads samples of a full checkpoint's weights."""
        if self.checkpoint is not None:
            return _record_of(self.checkpoint, self.location, self.commit)
        if self.manifest is not None:
            return self.manifest.source
        known = self.sharded.identity.source if self.sharded else self.location
        return SourceRecord(known, self.location, None, (), None, None, {})

    @cached_property
    def rules(self) -> dict[str, Any]:
        """The plan file as a document, with only the rules that cover a tensor."""
        document = to_document(self.model.architecture)
        used = self.model.used_templates
        document["tensors"] = {name: rule for name, rule in document["tensors"].items() if name in used}
        return document

    def identity(self, plan: Plan) -> Identity:
        """The identity that all shards of a plan for this source share."""
        sizes = self.model.sizes.of({})
        blocks = block_size(plan.model.config)
        refined = blocks if blocks != block_size(self.model.config) else None
        return Identity(self.record.id, plan.mesh, sizes, plan.padding, plan_digest(self.rules), refined)

    def places(self, name: str) -> Places:
        """The places of a tensor, by rank."""
        return partial(_place_of, self.ranks, self.files, name)

    def files_of(self, names: Collection[str] | None) -> list[SourceFile]:
        """The files that hold any of these tensors; all files, without names."""
        if names is None:
            return [*self.files.values()]
        held = (tensors[name].file for tensors in self.ranks for name in names if name in tensors)
        return [self.files[path] for path in dict.fromkeys(held)]


def read_elsewhere(source: Source, remote: Mapping[str, Remote]) -> Source:
    """The source with weight files that are not on this machine, by their names relative to its folder.

    Their content is known by the etag.
    """
    found = {path: remote.get(path.relative_to(source.path).as_posix()) for path in source.files}
    files = {path: dataclasses.replace(file, remote=found[path]) for path, file in source.files.items()}
    stamps = {
        path: dataclasses.replace(stamp, content=f"etag:{there.identity}") if (there := found.get(path)) else stamp
        for path, stamp in source.stamps.items()
    }
    return dataclasses.replace(source, files=files, stamps=stamps)


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


def arrangements(source: Source, target: Plan | Arrangement) -> tuple[Arrangement, Arrangement]:
    """What a source stores and what a target is to store, taken apart into the same atoms."""
    model = source.plan.model
    own = uses_of(model, source.page) if source.page else unchanged(model)
    if isinstance(target, Plan):
        target = Arrangement(target, unchanged(target.model))
    plan, other = target.plan, target.taken
    pairs = dict.fromkeys(zip((t.kind for t in model.tensors), (t.kind for t in plan.model.tensors), strict=True))
    mine = {kind: stored_like(kind, own[kind], other[theirs]) for kind, theirs in pairs}
    there = {theirs: stored_like(theirs, other[theirs], own[kind]) for kind, theirs in pairs}
    return (
        Arrangement(source.plan, mine, source.page, source.boxes),
        Arrangement(plan, there, target.page, target.boxes),
    )


def open_source(
    path: Path,
    *,
    location: str | None = None,
    commit: str | None = None,
    plan_file: Path | None = None,
    config: Path | None = None,
) -> Source:
    """Open a full or a split checkpoint and bind it to its architecture, or to the user's plan file.

    ``config`` is a folder with the config.json of what another program stores, and what else belongs to it. Raises
    CheckpointError, MismatchError and PlanError.
    """
    where = location or os.path.realpath(path)
    if unfinished_command(path) is not None:
        raise CheckpointError(f"{path} is unfinished output", "run the command that wrote it again: it resumes")
    stamps = _stamps(path)
    manifest = read_manifest(path / MANIFEST) if (path / MANIFEST).is_file() else None
    if manifest is not None and manifest.form is not None:
        return _open_program(path, where, plan_file, config, stamps, manifest, [page_of(manifest.form)])
    if is_sharded(path):
        return _open_sharded(path, where, plan_file, stamps)
    if manifest is None and not has_usual_weights(path) and (found := pages_for(path)):
        return _open_program(path, where, plan_file, config, stamps, None, found)
    is_adapter = has_adapter(path)
    checkpoint = open_adapter(path, config) if is_adapter else open_checkpoint(path)
    architecture = load_architecture(plan_file) if plan_file else find_architecture(checkpoint.config, path)
    tensors = _with_aliases(checkpoint)
    full = _full_tensors(tensors)
    model = bind(architecture, checkpoint.config, full, every_rule=plan_file is not None)
    check_complete(model, path)
    files = {file.path: SourceFile(file.path, file.name, file.size, file.header) for file in checkpoint.files}
    plan = make_plan(model, UNSPLIT)
    used = [*files, *checkpoint.side_files, *([path / checkpoint.index_name] if checkpoint.index_name else [])]
    return Source(
        path, where, commit, plan, model, tuple(tensors), (tensors,), files, checkpoint.side_files, checkpoint, None,
        _of_used(stamps, used, path), made={CONFIG: json_bytes(checkpoint.config) + b"\n"} if is_adapter else {},
    )  # fmt: skip


def _stamps(path: Path) -> dict[Path, Stamp]:
    """The state of each file in a folder and its direct subfolders, taken before any is read."""
    found = (Path(root) / name for root, _, names in _two_levels(path) for name in names)
    return {file: stamp_of(file, file.relative_to(path).as_posix()) for file in found if file.is_file()}


def _two_levels(path: Path) -> Iterator[tuple[str, list[str], list[str]]]:
    for root, folders, names in os.walk(path):
        if root != str(path):
            folders.clear()
        folders[:] = [name for name in folders if not name.startswith(".")]
        yield root, folders, names


def _of_used(stamps: Mapping[Path, Stamp], used: Iterable[Path], root: Path) -> dict[Path, Stamp]:
    return {file: stamps.get(file) or stamp_of(file, file.relative_to(root).as_posix()) for file in used}


def lines_of(path: Path, plan_file: Path | None = None) -> Architecture:
    """The lines that cover a checkpoint's tensors, even if shapes do not fit. Raises CheckpointError, PlanError."""
    if is_sharded(path):
        return _architecture(open_sharded(path), plan_file)
    checkpoint = open_checkpoint(path)
    architecture = load_architecture(plan_file) if plan_file else find_architecture(checkpoint.config, path)
    return lines_for(architecture, checkpoint.config, _full_tensors(_with_aliases(checkpoint)))


def _with_aliases(checkpoint: Checkpoint) -> dict[str, TensorInfo]:
    tensors = dict(checkpoint.tensors)
    if checkpoint.config.get("tie_word_embeddings") is False:
        tensors |= {alias: tensors[kept]._replace(name=alias) for alias, kept in checkpoint.aliases.items()}
    return tensors


def _full_tensors(tensors: Mapping[str, TensorInfo]) -> list[FullTensor]:
    return [FullTensor(t.name, t.dtype, t.shape, t.file.name) for t in tensors.values()]


def _open_sharded(path: Path, location: str, plan_file: Path | None, stamps: Mapping[Path, Stamp]) -> Source:
    sharded = open_sharded(path)
    identity, manifest = sharded.identity, sharded.manifest
    architecture = _architecture(sharded, plan_file)
    _check_sizes(AxisSizes(architecture, sharded.config, {}).of({}), identity.sizes, path)
    holders = {name: info for rank in reversed(sharded.ranks) for name, info in rank.tensors.items()}
    names = _names(sharded)
    infos = [holders[name] for name in names]
    full = [FullTensor(t.name, t.dtype, None, t.file.name, held=t.shape) for t in infos]
    model = bind(architecture, sharded.config, full, known=identity.sizes, mesh=identity.mesh, padding=identity.padding)
    refined = with_blocks(model, identity.blocks) if identity.blocks else model
    plan = make_plan(refined, identity.mesh, padding=identity.padding)
    _check_shapes(sharded, plan)
    check_complete(model, path)
    expected = {path / f.name: f.checksum for files in manifest.ranks.values() for f in files} if manifest else {}
    found = [file for rank in sharded.ranks for file in rank.files]
    files = {f.path: SourceFile(f.path, f.name, f.size, f.header, expected.get(f.path)) for f in found}
    ranks = tuple(rank.tensors for rank in sharded.ranks)
    used = [*files, *sharded.side_files, *([path / MANIFEST] if manifest else [])]
    source = Source(
        path, location, None, plan, model, names, ranks, files, sharded.side_files, None, sharded,
        _of_used(stamps, used, path), manifest=manifest,
    )  # fmt: skip
    if plan_digest(source.rules) != identity.plan:
        raise MismatchError(
            f"{path}: the shards were split by another plan than '{architecture.name}'",
            "pass the plan file of the split with --plan",
        )
    return source


def _open_program(
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
                if manifest is None and page.pad_product:
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
    stamps = _stamps(path)
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
                if manifest is None and page.pad_product:
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
    if said is None and page.pad_product:
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
        side_files, None, None, _of_used(stamps, used, path), page,
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


def _check_sizes(said: Mapping[str, int], split: Mapping[str, int], path: Path) -> None:
    """Raise MismatchError if the sizes by config.json are not those of the split: ranks' parts would be misread."""
    for axis in sorted(said.keys() & split.keys()):
        if said[axis] != split[axis]:
            raise MismatchError(
                f"{path / 'config.json'}: '{axis}' is {said[axis]}, but was {split[axis]} when this was split",
                "put the config.json of the split there again",
            )


def _architecture(sharded: ShardedCheckpoint, plan_file: Path | None) -> Architecture:
    if plan_file is not None:
        return load_architecture(plan_file)
    if sharded.manifest is not None:
        return architecture_from_document(sharded.manifest.architecture, "manifest", str(sharded.path))
    return find_architecture(sharded.config, sharded.path)


def _names(sharded: ShardedCheckpoint) -> tuple[str, ...]:
    """The names of all tensors in the order of the original files.

    Without a manifest the order is that of the shards. Their headers state positions if no rank holds all tensors.
    """
    held = dict.fromkeys(name for rank in sharded.ranks for name in rank.tensors)
    if sharded.manifest is None:
        places = {name: place for rank in sharded.ranks for name, place in rank.places.items()}
        return tuple(sorted(held, key=lambda name: places.get(name, 0)))
    files = sharded.manifest.source.files
    order = [name for file in files for name in file.tensors if name in held]
    return tuple(dict.fromkeys([*order, *held]))


def _check_shapes(sharded: ShardedCheckpoint, plan: Plan) -> None:
    """Raise MismatchError unless each rank has exactly the planned tensors, dtypes and local shapes."""
    for rank in sharded.ranks:
        planned = {kind: (kind.dtype, box.shape) for kind, box in plan.boxes(rank.rank).items()}
        for name, kind, _ in plan.model.tensors:
            info, should = rank.tensors.get(name), planned.get(kind)
            if info is None and should is None:
                continue
            if info is None or should is None:
                what = "is missing in" if info is None else "does not belong in"
                raise MismatchError(f"{sharded.path}: tensor '{name}' {what} {rank.folder.name}")
            if info.shape != should[1]:
                raise MismatchError(
                    f"{info.file}: tensor '{name}' has shape {list(info.shape)}, rank {rank.rank} of {plan.mesh} "
                    f"has {list(should[1])} by the rule '{plan.laid[kind].layout.rule}'"
                )
            if info.dtype != should[0]:
                raise MismatchError(f"{info.file}: tensor '{name}' is {info.dtype}, but {should[0]} in another rank")


def _record_of(checkpoint: Checkpoint, location: str, commit: str | None) -> SourceRecord:
    files: Sequence[SourceFileRecord] = [
        SourceFileRecord(file.name, file.size, file.header) for file in checkpoint.files if file.header is not None
    ]
    is_safetensors = len(files) == len(checkpoint.files)
    return SourceRecord(
        id=fingerprint(checkpoint),
        location=location,
        commit=commit,
        files=tuple(files) if is_safetensors else (),
        index_name=checkpoint.index_name if is_safetensors else None,
        index=checkpoint.index if is_safetensors else None,
        aliases=checkpoint.aliases,
    )
