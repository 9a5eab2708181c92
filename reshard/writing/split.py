"""Splits a full checkpoint, or re-splits shards, into one folder a rank."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from formats.documents import json_bytes
from formats.errors import CheckpointError, PlanError
from formats.files.checkpoint import ADAPTER, ADAPTER_CONFIG, MODEL
from formats.files.checksum import checksum
from formats.files.safetensors import build_header, tensor_bytes
from formats.files.sharded import MANIFEST, FileRecord, Manifest, manifest_text, rank_folders, read_manifest
from formats.mesh import Mesh, mesh_of
from formats.notation.adapters import SETTINGS
from formats.notation.rewrites import page_of
from reshard.engine.jobs import Options
from reshard.engine.moves import KEPT_RANK
from reshard.engine.reading import Sums
from reshard.launcher import Share
from reshard.planning.arrangement import arrangement_of, program_mesh
from reshard.planning.degrees import unevenly
from reshard.planning.finer_blocks import finer_blocks, with_blocks
from reshard.planning.kept_options import HUGGING_FACE, check_options
from reshard.planning.model import in_order
from reshard.planning.plan import Padding, Plan, make_plan
from reshard.planning.program_plan import plan_for
from reshard.planning.rank_config import rank_config
from reshard.storage.access import Access, open_any
from reshard.storage.marks import staging_of, tidy, unfinished_command
from reshard.storage.output import PATIENCE, PublishedError, Staging
from reshard.storage.parts import Dealt
from reshard.storage.permission import check_no_strangers, check_output, check_space
from reshard.storage.place import place_of
from reshard.storage.retries import tried_again
from reshard.storage.source import Source
from reshard.writing.files import (
    DEFAULT_SHARD_SIZE,
    Further,
    NewFile,
    Written,
    already_staged,
    check_place,
    deal,
    new_file,
    noted,
    staging_for,
    task_of,
    write_files,
)
from reshard.writing.merge import merge
from reshard.writing.program import ProgramFiles
from reshard.writing.progress import Progress, no_progress
from reshard.writing.publishing import check_read, check_unchanged, publish_output, record_with_sums
from reshard.writing.shard_files import ShardFile, index_text, partition
from reshard.writing.summary import Summary, done, summed_up


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
    page = page_of(form) if form and form != HUGGING_FACE else None
    asked = {
        "--tp": tp != 1, "--ep": ep != 1, "--pp": pp != 1, "--pp-layers": bool(pp_layers), "--same-ranks": same_ranks,
        "--rank": ranks is not None, "--uneven": uneven, "--pad-vocab-to": padding.to != 1,
        "--refine-blocks": refine_blocks, "--max-shard-size": max_shard_size is not None,
    }  # fmt: skip
    check_options(form, page, {option for option, is_given in asked.items() if is_given})
    if form == HUGGING_FACE:
        return merge(
            source, out, access=access, options=options, max_shard_size=max_shard_size, overwrite=overwrite,
            dry_run=dry_run, part=part, progress=progress,
        )  # fmt: skip
    if part is not None and ranks is not None:
        raise PlanError("--part and --rank are two ways to share the work", "give one of them")
    began = time.monotonic()
    (folder, bucket), options = place_of(out, access.cache_dir), options or Options()
    max_shard_size = max_shard_size or DEFAULT_SHARD_SIZE
    before = tried_again()
    opened = open_any(source, access)
    mesh = (
        program_mesh(opened.model, page, tp, ep, same_ranks, pp, pp_layers)
        if page
        else mesh_of(tp, ep, same_ranks, pp, pp_layers)
    )
    mesh = unevenly(opened.model, mesh) if uneven else mesh
    finer = finer_blocks(opened.model, mesh) if refine_blocks else None
    model = with_blocks(opened.model, finer) if finer else opened.model
    if page is None:
        target = make_plan(model, mesh, pad=padding.allowed, pad_to=padding.to)
    else:
        target = plan_for(model, page, mesh, pad=padding.allowed)
    mesh = target.mesh
    wanted = wanted_ranks(ranks.of(mesh.size) if isinstance(ranks, Share) else ranks, mesh)
    if isinstance(ranks, Share) and not overwrite and (folder / MANIFEST).is_file():
        there = read_manifest(folder / MANIFEST).ranks
        wanted = tuple(rank for rank in wanted if rank not in there)
    if page is not None and not page.is_distributed and SETTINGS in model.config:
        raise PlanError(f"an adapter has no place in the format '{page.name}'", "merge it into its base model first")
    new: _Ranks | ProgramFiles
    if page is None:
        new = _Ranks(opened, target, wanted if bucket is None else range(mesh.size), max_shard_size)
    else:
        arrangement, everyone = arrangement_of(target, page), tuple(range(mesh.size))
        new = ProgramFiles(opened, arrangement, page, everyone, max_shard_size)
    states = new.states if isinstance(new, ProgramFiles) else ()
    files = [file for of in (new, *states) for file in of.files]
    dealt = deal(files, part)
    is_one_output = bucket is not None or page is not None  # all ranks are published together
    if is_one_output and ranks is not None:
        mine = {*wanted, *([KEPT_RANK] if 0 in wanted else [])}
        dealt = Dealt(_label(wanted, mesh), mesh.size, frozenset(file.name for file in files if file.rank in mine))
    full = opened.model.sizes.of({})
    summary = Summary(
        command="re-split" if opened.is_split else "split", source=opened.location,
        out=bucket.name if bucket else folder,
        source_mesh=opened.plan.mesh, mesh=mesh, tensors=len(model.tensors), files=new.count, nbytes=new.nbytes,
        written=0, padding={axis: (full[axis], padded) for axis, padded in target.padding.items()}, ranks=wanted,
        complete=False, dry_run=dry_run, left_behind=new.left_behind,
        tried_again=tried_again() - before,
        note=noted(access, opened), load=page.load_command(bucket.name if bucket else folder, mesh) if page else None,
    )  # fmt: skip
    summary = summed_up(summary, files, part, dealt)
    task = new.task | task_of(opened, options)
    opened.check_names([*(file.name for file in files), *new.documents])

    def check() -> None:
        if ranks is not None and not is_one_output:
            _check_ranks(new, opened, folder, overwrite)
        else:
            check_place(bucket or folder, opened, files, dealt, task, overwrite=overwrite)

    def documents(sums: Sums) -> dict[str, bytes]:
        side_files = opened.read_side_files()
        manifest = new.manifest({rank: new.finish(staging, rank) for rank in new.ranks}, side_files, sums)
        return side_files | dict(new.documents) | {MANIFEST: manifest_text(manifest).encode()}

    if not dry_run:
        tidy(folder)
    try:
        check()
        if dry_run:
            return summary
        if ranks is not None and not wanted:
            there = read_manifest(folder / MANIFEST).ranks if (folder / MANIFEST).is_file() else {}
            return dataclasses.replace(summary, complete=len(there) == mesh.size)
        by_rank = not is_one_output and dealt is None
        parts = [mesh.folder(rank) for rank in wanted] if by_rank else [""]
        with staging_for(folder, bucket, task, parts, opened, files, dealt, options, check) as staging:
            to = new.arrangement
            also = [Further(state.source, state.arrangement, state.files) for state in states]
            written = write_files(opened, to, new.files, staging, options, progress, also)
            if is_one_output or ranks is None:
                complete = publish_output(opened, written, staging, options, documents, overwrite=overwrite)
            else:
                complete = _publish_ranks(new, opened, written, staging, options)
    except PublishedError:
        return dataclasses.replace(summary, complete=True, ranks=wanted if ranks is None else ())
    return done(summary, written, complete=complete, began=began)


def wanted_ranks(ranks: Sequence[int] | None, mesh: Mesh) -> tuple[int, ...]:
    """The ranks to write: ``ranks``, sorted, or all. Raises PlanError for a rank that the mesh does not have."""
    if ranks is None:
        return tuple(range(mesh.size))
    for rank in ranks:
        if not 0 <= rank < mesh.size:
            raise PlanError(f"--rank {rank} is not possible: the ranks of {mesh} are 0 to {mesh.size - 1}")
    return tuple(sorted(set(ranks)))


_PATIENCE = 0.2
"""Seconds in which another run publishes its first rank."""


def _label(ranks: Sequence[int], mesh: Mesh) -> str:
    """What the part of a process that writes these ranks is called."""
    return f"rank-{'-'.join(map(str, ranks[:20]))}-of-{mesh.size}"


def _check_ranks(new: _Ranks | ProgramFiles, source: Source, out: Path, overwrite: bool) -> None:
    """Raise CheckpointError unless these ranks may be added to an output, and the disk has room for them."""
    give_up = time.monotonic() + PATIENCE
    while True:
        try:
            if (out / MANIFEST).is_file():
                _check_begun(new, source, out, overwrite)
            else:
                check_output(out, source.read_from, overwrite=overwrite, begun=_is_only_rank_folders(out))
            break
        except CheckpointError:
            if time.monotonic() > give_up:
                raise
            time.sleep(0.01)  # another run may be at publishing its first rank
    folders = [new.plan.mesh.folder(rank) for rank in new.ranks]
    check_no_strangers(out, folders=folders)
    check_space(out.parent, new.nbytes - already_staged(out, folders))


def _check_begun(new: _Ranks | ProgramFiles, source: Source, out: Path, overwrite: bool) -> None:
    """Raise CheckpointError unless the ranks of this run may be added to those in an output."""
    existing = read_manifest(out / MANIFEST)
    check_output(out, source.read_from, overwrite=True, begun=True)
    _check_same_run(existing, new.manifest({}, source.read_side_files()), out)
    present = [rank for rank in new.ranks if rank in existing.ranks]
    if present and not overwrite:
        raise CheckpointError(f"{out / new.plan.mesh.folder(present[0])} exists", "pass --overwrite to write it again")


def _check_same_run(existing: Manifest, mine: Manifest, out: Path) -> None:
    """Raise CheckpointError if an existing output is of another source, mesh, plan or file size."""
    if existing.identity != mine.identity or existing.max_shard_size != mine.max_shard_size:
        raise CheckpointError(f"{out} holds shards of another source, mesh or plan", "choose another folder")
    others = {stamp.name: stamp for stamp in existing.inputs}
    for stamp in mine.inputs:
        if stamp.name not in others or not stamp.is_same(others[stamp.name]):
            raise CheckpointError(
                f"{stamp.name} of the source is not the file that the ranks in {out} were split from: "
                f"size, time, inode or checksum differ",
                "split all ranks from the same files, or from copies that keep the times (cp -p, rsync -t)",
            )
    changed = set(existing.side_files) ^ set(mine.side_files)
    if changed:
        name = min(record.name for record in changed)
        raise CheckpointError(
            f"{name} of the source is not as it was when the ranks in {out} were split",
            "split all ranks from the same files",
        )


def _is_only_rank_folders(out: Path) -> bool:
    """Whether another run has only begun to publish this output, or was killed while it did."""
    return out.is_dir() and unfinished_command(staging_of(out)) is not None and bool(rank_folders(out))


class _Ranks:
    """What a split writes: the weight files of each rank, config.json, index, manifest."""

    def __init__(self, source: Source, plan: Plan, ranks: Sequence[int], max_shard_size: int) -> None:
        self.source, self.plan, self.ranks, self.max_shard_size = source, plan, ranks, max_shard_size
        self.arrangement = arrangement_of(plan, None)
        self.identity = source.identity(plan)
        self._tensors = in_order(plan.model.tensors)
        self._adapter = source.read_side_files().get(ADAPTER_CONFIG)
        single = ADAPTER if self._adapter is not None else MODEL
        self._shards = {rank: partition(self._held(rank), max_shard_size, single) for rank in ranks}
        self._configs = {rank: json_bytes(rank_config(plan, rank)) + b"\n" for rank in ranks}
        self._files = {rank: self._files_of(rank, shards) for rank, shards in self._shards.items()}
        self.files = [file for files in self._files.values() for file in files]
        self.nbytes = sum(file.size for file in self.files)
        """Bytes of all safetensors files."""
        self.documents: Mapping[str, bytes] = {}
        self.count, self.left_behind = len(self.files), source.left_behind

    def _held(self, rank: int) -> Iterator[tuple[str, str, tuple[int, ...], int]]:
        """The tensors of a rank: name, dtype, shape, bytes."""
        shapes = {kind: box.shape for kind, box in self.plan.boxes(rank).items()}
        sizes = {kind: tensor_bytes(kind.name, kind.dtype, shape) for kind, shape in shapes.items()}
        held = ((name, kind) for name, kind, _ in self._tensors if kind in shapes)
        return ((name, kind.dtype, shapes[kind], sizes[kind]) for name, kind in held)

    def _files_of(self, rank: int, shards: Sequence[ShardFile]) -> list[NewFile]:
        """The weight files of a rank.

        If the rank does not hold all tensors, the headers have the positions of its tensors among all tensors of the
        model: without a manifest, merge orders the tensors by them.
        """
        places: Mapping[str, int] = {}
        if sum(len(shard.tensors) for shard in shards) < len(self._tensors):
            places = {name: place for place, (name, _, _) in enumerate(self._tensors)}
        files = []
        for shard in shards:
            metadata = self.identity.metadata(rank, [places[name] for name, _, _ in shard.tensors] if places else [])
            header = build_header(shard.tensors, metadata)
            files.append(new_file(shard, self.plan.mesh.folder(rank), rank, header))
        return files

    @property
    def task(self) -> dict[str, Any]:
        """The task: only a run with an equal one may use the finished files of this run."""
        identity = self.identity
        return {
            "command": "split",
            "source": identity.source,
            "mesh": identity.mesh.to_document(),
            "padding": dict(identity.padding),
            "plan": identity.plan,
            "max_shard_size": self.max_shard_size,
        }

    def finish(self, staging: Staging, rank: int) -> tuple[FileRecord, ...]:
        """Write a rank's config.json and index; returns the records of all its files."""
        folder, shards = self.plan.mesh.folder(rank), self._shards[rank]
        records = [staging.write(f"{folder}/config.json", self._configs[rank])]
        if self._adapter is not None:
            records.append(staging.write(f"{folder}/{ADAPTER_CONFIG}", self._adapter))
        for file in self._files[rank]:
            done = staging.finished[file.name]
            records.append(FileRecord(file.name, done.size, done.checksum))
        if len(shards) > 1:
            records.append(staging.write(f"{folder}/model.safetensors.index.json", index_text(shards).encode()))
        return tuple(records)

    def manifest(
        self, ranks: Mapping[int, tuple[FileRecord, ...]], side_files: Mapping[str, bytes], sums: Sums | None = None
    ) -> Manifest:
        """The manifest that lists ``ranks``, with the checksums of the source files that were read in full."""
        side = tuple(FileRecord(name, len(data), checksum(data)) for name, data in side_files.items())
        record = record_with_sums(self.source, sums)
        return Manifest(self.identity, record, self.source.rules, self.max_shard_size, side, ranks, self.source.inputs)


def _publish_ranks(
    new: _Ranks | ProgramFiles, source: Source, written: Written, staging: Staging, options: Options
) -> bool:
    """Move finished ranks into the output and list them in its manifest; returns whether all ranks are there."""
    sums, side_files = check_read(source, written, staging, options), source.read_side_files()
    manifest = new.manifest({rank: new.finish(staging, rank) for rank in new.ranks}, side_files, sums)
    check_unchanged(source, staging)
    mesh = manifest.identity.mesh
    with staging.publishing():
        path = staging.out / MANIFEST
        known: dict[int, tuple[FileRecord, ...]] = {}
        if path.is_file():
            existing = read_manifest(path)
            _check_same_run(existing, manifest, staging.out)
            known = dict(existing.ranks)
        for rank in manifest.ranks:
            staging.move_in(mesh.folder(rank))
        for name, content in side_files.items():
            staging.put(name, content)
        merged = dataclasses.replace(manifest, ranks=known | dict(manifest.ranks))
        staging.put(MANIFEST, manifest_text(merged).encode())
        complete = len(merged.ranks) == mesh.size
        if complete:
            staging.remove_if_last()
    return complete
