"""Opening a source: a full checkpoint, or shards in whatever format."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from formats.documents import json_bytes
from formats.errors import CheckpointError, MismatchError
from formats.files.checkpoint import (
    Checkpoint,
    has_adapter,
    has_usual_weights,
    open_adapter,
    open_checkpoint,
)
from formats.files.safetensors import TensorInfo
from formats.files.sharded import (
    MANIFEST,
    ShardedCheckpoint,
    is_sharded,
    open_sharded,
    plan_digest,
    read_manifest,
)
from formats.files.stamps import Stamp, stamps_in, stamps_of
from formats.notation.architecture import Architecture
from formats.notation.architecture_document import architecture_from_document
from formats.notation.architecture_files import find_architecture, load_architecture
from formats.notation.format_file import format_of
from reshard.planning.binding import bind, lines_for
from reshard.planning.completeness import check_complete
from reshard.planning.finer_blocks import with_blocks
from reshard.planning.model import FullTensor
from reshard.planning.plan import Plan, make_plan
from reshard.planning.sizes import AxisSizes
from reshard.storage.marks import unfinished_command
from reshard.storage.opening_programs import Folder, open_program
from reshard.storage.program_source import (
    CONFIG,
    formats_for,
)
from reshard.storage.source import UNSPLIT, Source, SourceFile


def open_source(
    path: Path,
    *,
    location: str | None = None,
    commit: str | None = None,
    plan_file: Path | None = None,
    config: Path | None = None,
    checkpoint: Checkpoint | None = None,
    sharded: ShardedCheckpoint | None = None,
) -> Source:
    """Open a full or a split checkpoint and bind it to its architecture, or to the user's plan file.

    ``config`` is a folder with the config.json of what another program stores, and what else belongs to it;
    ``checkpoint`` or ``sharded`` the full or the split checkpoint, if it is open already. Raises CheckpointError,
    MismatchError and PlanError.
    """
    where = location or os.path.realpath(path)
    if unfinished_command(path) is not None:
        raise CheckpointError(f"{path} is unfinished output", "run the command that wrote it again: it resumes")
    stamps = stamps_in(path)
    manifest = read_manifest(path / MANIFEST) if (path / MANIFEST).is_file() else None
    if manifest is not None and manifest.form is not None:
        return open_program(Folder(path, where, stamps, manifest, config, plan_file), [format_of(manifest.form)])
    if is_sharded(path):
        return _open_sharded(sharded or open_sharded(path), where, plan_file, stamps)
    if manifest is None and not has_usual_weights(path) and (found := formats_for(path)):
        return open_program(Folder(path, where, stamps, None, config, plan_file), found)
    is_adapter = has_adapter(path)
    if checkpoint is None:
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
        stamps_of(used, path, stamps), made={CONFIG: json_bytes(checkpoint.config) + b"\n"} if is_adapter else {},
    )  # fmt: skip


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


def _open_sharded(
    sharded: ShardedCheckpoint, location: str, plan_file: Path | None, stamps: Mapping[Path, Stamp]
) -> Source:
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
    source = Source(
        path, location, None, plan, model, names, ranks, files, sharded.side_files, None, sharded,
        stamps_of(used, path, stamps), manifest=manifest,
    )  # fmt: skip
    if plan_digest(source.rules) != identity.plan:
        raise MismatchError(
            f"{path}: the shards were split by another plan than '{architecture.name}'",
            "pass the plan file of the split with --plan",
        )
    return source


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
