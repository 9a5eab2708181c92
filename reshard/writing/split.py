"""Splits a full checkpoint, or re-splits shards, into reshard's own form or into that of another program."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from formats.errors import PlanError
from formats.files.sharded import MANIFEST, read_manifest
from formats.mesh import Mesh, mesh_of
from formats.notation.adapters import SETTINGS
from formats.notation.format import Format
from formats.notation.format_file import format_of
from reshard.engine.jobs import Options
from reshard.launcher import Share
from reshard.planning.arrangement import arrangement_of, program_mesh
from reshard.planning.degrees import unevenly
from reshard.planning.finer_blocks import finer_blocks, with_blocks
from reshard.planning.kept_options import HUGGING_FACE, check_options
from reshard.planning.plan import Padding, Plan, make_plan
from reshard.planning.program_plan import plan_for
from reshard.storage.access import Access, open_any
from reshard.storage.place import place_of
from reshard.storage.source import Source
from reshard.writing.files import DEFAULT_SHARD_SIZE
from reshard.writing.merge import merge
from reshard.writing.outputs import Output
from reshard.writing.program import ProgramFiles
from reshard.writing.progress import Progress, no_progress
from reshard.writing.rank_folders import RankFolders
from reshard.writing.rewrite import begun, rewrite
from reshard.writing.summary import Summary


def split(
    source: str | Path,
    out: str | Path,
    tp: int = 1,
    *,
    ep: int = 1,
    pp: int = 1,
    pp_layers: Sequence[int] = (),
    same_ranks: bool = False,
    uneven: bool = False,
    ranks: Sequence[int] | Share | None = None,
    access: Access = Access(),
    padding: Padding = Padding(),
    options: Options | None = None,
    max_shard_size: int | None = None,
    refine_blocks: bool = False,
    overwrite: bool = False,
    dry_run: bool = False,
    form: str | None = None,
    part: Share | None = None,
    progress: Progress = no_progress,
) -> Summary:
    """Split a checkpoint (full or already split) into shards for ``pp`` x ``ep`` x ``tp`` ranks, as ``reshard split``
    does.

    ``pp_layers`` is the number of layers of each pipeline stage, by default as equal as possible.
    With ``uneven`` the last ranks may hold less of an axis that does not divide, or not without cutting a scale block.
    ``refine_blocks`` makes scale blocks smaller if a rank's boundary would cut one. With ``ranks`` only these are
    written; runs for other ranks into the same ``out`` complete it. With a ``Share`` these are the process's share of
    the ranks, but for those that are in ``out`` already. ``max_shard_size`` is in bytes, 5 GB by default. ``form`` is
    the name of another program's format (``"vllm"``), ``"huggingface"`` is one full checkpoint. With
    ``part`` this process writes its share of the files of all ranks, and the last of all processes publishes. Raises
    ReshardError; ``out`` has only complete ranks. It may be the URL of a place in a bucket.
    """
    format = format_of(form) if form and form != HUGGING_FACE else None
    asked = {
        "--tp": tp != 1, "--ep": ep != 1, "--pp": pp != 1, "--pp-layers": bool(pp_layers), "--same-ranks": same_ranks,
        "--rank": ranks is not None, "--uneven": uneven, "--pad-vocab-to": padding.to != 1,
        "--refine-blocks": refine_blocks, "--max-shard-size": max_shard_size is not None,
    }  # fmt: skip
    check_options(form, format, {option for option, is_given in asked.items() if is_given})
    if form == HUGGING_FACE:
        return merge(
            source, out, access=access, options=options, max_shard_size=max_shard_size, overwrite=overwrite,
            dry_run=dry_run, part=part, progress=progress,
        )  # fmt: skip
    if part is not None and ranks is not None:
        raise PlanError("--part and --rank are two ways to share the work", "give one of them")
    start, (folder, bucket), options = begun(), place_of(out, access.cache_dir), options or Options()
    max_shard_size = max_shard_size or DEFAULT_SHARD_SIZE
    opened = open_any(source, access)
    if format is None:
        mesh = mesh_of(tp, ep, same_ranks, pp, pp_layers)
    else:
        mesh = program_mesh(opened.model, format, tp, ep, same_ranks, pp, pp_layers)
    if format is None:
        plan = _own_plan(opened, mesh, padding, uneven, refine_blocks)
    else:
        plan = _program_plan(opened, format, mesh, padding)
    wanted, everyone = _wanted(ranks, plan.mesh, None if overwrite else folder), range(plan.mesh.size)
    new: Output
    if format is not None:
        new = ProgramFiles(opened, arrangement_of(plan, format), format, tuple(everyone), max_shard_size)
    elif wanted is None or bucket is not None:
        new = RankFolders(opened, plan, everyone, max_shard_size)
    else:
        new = RankFolders(opened, plan, wanted, max_shard_size, by_rank=True)
    return rewrite(
        new, (folder, bucket), start, access=access, options=options, overwrite=overwrite, dry_run=dry_run, part=part,
        progress=progress, ranks=wanted,
    )  # fmt: skip


def _wanted(ranks: Sequence[int] | Share | None, mesh: Mesh, out: Path | None) -> tuple[int, ...] | None:
    """The ranks that are asked for, if not all; a share of them without those that are in ``out`` already."""
    if ranks is None:
        return None
    if not isinstance(ranks, Share):
        return wanted_ranks(ranks, mesh)
    wanted = wanted_ranks(ranks.of(mesh.size), mesh)
    if out is None or not (out / MANIFEST).is_file():
        return wanted
    there = read_manifest(out / MANIFEST).ranks
    return tuple(rank for rank in wanted if rank not in there)


def _own_plan(source: Source, mesh: Mesh, padding: Padding, uneven: bool, refine_blocks: bool) -> Plan:
    """The plan of reshard's own form, with smaller scale blocks if they are wanted. Raises PlanError."""
    mesh = unevenly(source.model, mesh) if uneven else mesh
    finer = finer_blocks(source.model, mesh) if refine_blocks else None
    model = with_blocks(source.model, finer) if finer else source.model
    return make_plan(model, mesh, pad=padding.allowed, pad_to=padding.to)


def _program_plan(source: Source, format: Format, mesh: Mesh, padding: Padding) -> Plan:
    """The plan of a program's format. Raises PlanError for what has no place in it."""
    plan = plan_for(source.model, format, mesh, pad=padding.allowed)
    if not format.files.is_distributed and SETTINGS in plan.model.config:
        raise PlanError(f"an adapter has no place in the format '{format.name}'", "merge it into its base model first")
    return plan


def wanted_ranks(ranks: Sequence[int] | None, mesh: Mesh) -> tuple[int, ...]:
    """The ranks to write: ``ranks``, sorted, or all. Raises PlanError for a rank that the mesh does not have."""
    if ranks is None:
        return tuple(range(mesh.size))
    for rank in ranks:
        if not 0 <= rank < mesh.size:
            raise PlanError(f"--rank {rank} is not possible: the ranks of {mesh} are 0 to {mesh.size - 1}")
    return tuple(sorted(set(ranks)))
