"""Opening a source: a full checkpoint, or shards in whatever format."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from formats.documents import json_bytes
from formats.errors import CheckpointError, MismatchError
from formats.files.checkpoint import (
    CONFIG,
    Checkpoint,
    open_adapter,
    open_checkpoint,
)
from formats.files.safetensors import TensorInfo
from formats.files.sharded import (
    MANIFEST,
    METADATA_KEY,
    ShardedCheckpoint,
    open_sharded,
    plan_digest,
)
from formats.files.stamps import Stamp, stamps_in, stamps_of
from formats.notation.adapters import SETTINGS, settings_of
from formats.notation.architecture import Architecture
from formats.notation.architecture_document import architecture_from_document
from formats.notation.architecture_files import find_architecture, load_architecture
from formats.notation.format import HUGGING_FACE, OWN
from formats.store import FilePath, name_in
from reshard.mesh.finer_blocks import with_blocks
from reshard.mesh.plan import Plan, make_plan
from reshard.model.binding import bind, lines_for
from reshard.model.model import FullTensor, Model
from reshard.model.sizes import AxisSizes
from reshard.source.completeness import check_complete
from reshard.source.low_rank import check_tensors
from reshard.source.recognise import Recognised, recognise
from reshard.source.source import UNSPLIT, Source, SourceFile
from reshard.store.staging_names import unfinished_command


def open_source(
    path: FilePath, *, plan_file: Path | None = None, config: Path | None = None, found: Recognised | None = None
) -> Source:
    """Open a full or a split checkpoint and bind it to its architecture, or to the user's plan file.

    ``config`` is a folder with the config.json and side files of a model in another program's format. ``found`` says
    what the folder is, if that is known. Raises CheckpointError, MismatchError and PlanError.
    """
    if isinstance(path, Path) and unfinished_command(path) is not None:
        raise CheckpointError(f"{path} is unfinished output", "run the command that wrote it again: it resumes")
    stamps = stamps_in(path)
    found = found or recognise(path)
    if found.damage is not None:
        raise found.damage
    if found.kind == "program":
        from reshard.source.opening_programs import Folder, open_program  # rarely needed

        return open_program(Folder(path, stamps, found.manifest, config, plan_file), found.formats)
    if found.kind == "split":
        return _open_sharded(open_sharded(path, found.manifest), plan_file, stamps)
    checkpoint = open_adapter(path, config) if found.kind == "adapter" else open_checkpoint(path)
    if METADATA_KEY in checkpoint.files[0].metadata:  # it looks like a full checkpoint, but file headers tell
        raise CheckpointError(f"{path} is one rank of a split checkpoint", "give the folder of all ranks")
    return _open_full(checkpoint, plan_file, stamps, is_adapter=found.kind == "adapter")


def _open_full(
    checkpoint: Checkpoint, plan_file: Path | None, stamps: Mapping[FilePath, Stamp], *, is_adapter: bool
) -> Source:
    path = checkpoint.path
    if is_adapter:
        check_tensors(settings_of(checkpoint.config[SETTINGS], path), checkpoint.tensors)
    architecture = load_architecture(plan_file) if plan_file else find_architecture(checkpoint.config, path)
    tensors = _with_aliases(checkpoint)
    full = _full_tensors(tensors)
    model = bind(architecture, checkpoint.config, full, every_rule=plan_file is not None)
    check_complete(model, path)
    files = {file.path: SourceFile(file.path, file.name, file.size, file.header) for file in checkpoint.files}
    plan = make_plan(model, UNSPLIT)
    used = [*files, *checkpoint.side_files, *([path / checkpoint.index_name] if checkpoint.index_name else [])]
    made: dict[str, FilePath | bytes] = {CONFIG: json_bytes(checkpoint.config) + b"\n"} if is_adapter else {}
    side_files = {name_in(file, path): file for file in checkpoint.side_files}
    return Source(
        path, plan, model, tuple(tensors), (tensors,), files, made | side_files | made, checkpoint, None,
        stamps_of(used, path, stamps), HUGGING_FACE,
    )  # fmt: skip


def open_shards_of(model: Model, path: FilePath, *, plan_file: Path | None = None) -> Source:
    """Open shards of a known model; shards in a program's format are opened as that model, whatever they hold.

    Raises ReshardError if they are inconsistent, or cannot be read.
    """
    stamps = stamps_in(path)
    found = recognise(path)
    if found.damage is not None or found.kind != "program":
        return open_source(path, plan_file=plan_file, found=found)
    from reshard.source.opening_programs import Folder, open_program

    return open_program(Folder(path, stamps, found.manifest), found.formats, model)


def lines_of(path: FilePath, plan_file: Path | None = None, config: Path | None = None) -> Architecture:
    """The lines that cover a checkpoint's tensors, even if shapes do not fit. Raises CheckpointError, PlanError."""
    found = recognise(path)
    if found.kind == "split":
        return _architecture(open_sharded(path, found.manifest), plan_file)
    checkpoint = open_adapter(path, config) if found.kind == "adapter" else open_checkpoint(path)
    architecture = load_architecture(plan_file) if plan_file else find_architecture(checkpoint.config, path)
    return lines_for(architecture, checkpoint.config, _full_tensors(_with_aliases(checkpoint)))


def _with_aliases(checkpoint: Checkpoint) -> dict[str, TensorInfo]:
    tensors = dict(checkpoint.tensors)
    if checkpoint.config.get("tie_word_embeddings") is False:
        tensors |= {alias: tensors[kept]._replace(name=alias) for alias, kept in checkpoint.aliases.items()}
    return tensors


def _full_tensors(tensors: Mapping[str, TensorInfo]) -> list[FullTensor]:
    return [FullTensor(t.name, t.dtype, t.shape, t.file.name) for t in tensors.values()]


def _open_sharded(sharded: ShardedCheckpoint, plan_file: Path | None, stamps: Mapping[FilePath, Stamp]) -> Source:
    path, identity, manifest = sharded.path, sharded.identity, sharded.manifest
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
    side_files = {name_in(file, path): file for file in sharded.side_files}
    source = Source(
        path, plan, model, names, ranks, files, side_files, None, sharded,
        stamps_of(used, path, stamps), OWN, manifest=manifest,
    )  # fmt: skip
    if plan_digest(source.rules) != identity.plan:
        raise MismatchError(
            f"{path}: the shards were split by another plan than '{architecture.name}'",
            "pass the plan file of the split with --plan",
        )
    return source


def _check_sizes(said: Mapping[str, int], split: Mapping[str, int], path: FilePath) -> None:
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
