"""What the commands do, as functions: plan, split, merge, load, inspect."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from formats.documents import json_bytes
from formats.errors import CheckpointError, MismatchError, PlanError
from formats.files.checksum import PartialSum, checksum, file_checksum
from formats.files.safetensors import TensorInfo, build_header, tensor_bytes
from formats.files.sharded import (
    MANIFEST,
    METADATA_KEY,
    FileRecord,
    Manifest,
    ShardFile,
    index_text,
    manifest_text,
    partition,
    rank_folders,
    read_manifest,
)
from formats.mesh import Mesh
from reshard import __version__
from reshard.engine.move import Job, Options, TargetFile, TargetPlace, move, place_in
from reshard.engine.reading import SourceFile
from reshard.engine.transfer import Way
from reshard.engine.ways import way_between
from reshard.planning.finer_blocks import finer_blocks, with_blocks
from reshard.planning.plan import Layout, Model, Plan, in_order, make_plan, rank_config, unevenly
from reshard.storage.hub import fetch
from reshard.storage.output import (
    Finished,
    Read,
    Staging,
    check_output,
    check_space,
    staging_of,
    tidy,
    unfinished_command,
)
from reshard.storage.source import UNSPLIT, Source, lines_of, open_source

if TYPE_CHECKING:
    import torch

    from formats.notation.architecture import Architecture

DEFAULT_SHARD_SIZE = 5_000_000_000

Progress = Callable[[int, int], None]
"""Called with the bytes written so far and the bytes to write in all."""


def _no_progress(done: int, total: int) -> None:
    pass


@dataclass(frozen=True)
class Access:
    """How to get at a source: Hub revision, token and cache, and the user's own plan file."""

    revision: str | None = None
    token: str | None = None
    cache_dir: Path | None = None
    plan_file: Path | None = None
    quiet: bool = False


@dataclass(frozen=True)
class Padding:
    """What to do with a vocabulary that does not divide: pad it (to a multiple of ``to``, at least), or refuse."""

    allowed: bool = True
    to: int = 1


@dataclass(frozen=True)
class Summary:
    """What a split or merge did, or would do. Sizes in bytes; ``written`` leaves out files that an earlier run had
    finished.
    """

    command: str
    source: str
    out: Path
    source_mesh: Mesh
    mesh: Mesh
    tensors: int
    files: int
    nbytes: int
    written: int
    padding: Mapping[str, tuple[int, int]]
    ranks: tuple[int, ...]
    complete: bool
    dry_run: bool


def open_any(source: str | Path, access: Access, *, headers_only: bool = False) -> Source:
    """Open a folder or a Hub id (which is downloaded first). Raises ReshardError."""
    fetched = fetch(
        str(source), revision=access.revision, token=access.token, cache_dir=access.cache_dir, quiet=access.quiet,
        headers_only=headers_only,
    )  # fmt: skip
    opened = open_source(fetched.path, location=fetched.repo, commit=fetched.commit, plan_file=access.plan_file)
    _refuse_one_rank(opened)
    return opened


def lines_of_any(source: str | Path, access: Access) -> Architecture:
    """The lines that cover the tensors of a folder or a Hub id, whether or not they fit. Raises ReshardError."""
    fetched = fetch(
        str(source), revision=access.revision, token=access.token, cache_dir=access.cache_dir, quiet=access.quiet,
        headers_only=True,
    )  # fmt: skip
    return lines_of(fetched.path, access.plan_file)


def _refuse_one_rank(source: Source) -> None:
    """A rank's folder looks like a full checkpoint; its files' headers say what it is."""
    file = source.checkpoint.files[0] if source.checkpoint else None
    if file is not None and METADATA_KEY in file.metadata:
        raise CheckpointError(f"{source.path} is one rank of a split checkpoint", "give the folder of all ranks")


def plan(
    source: str | Path,
    tp: int = 1,
    *,
    ep: int = 1,
    same_ranks: bool = False,
    uneven: bool = False,
    access: Access = Access(),
    padding: Padding = Padding(),
) -> Plan:
    """What each rank of a mesh of ``ep`` x ``tp`` would hold of each tensor of a checkpoint. Reads headers only.

    ``uneven`` as for ``split``. Raises CheckpointError for a source that is none, PlanError for a degree that is not
    possible.
    """
    opened = open_any(source, access, headers_only=True)
    return plan_of(opened.model, mesh_of(tp, ep, same_ranks), uneven=uneven, padding=padding)


def plan_of(model: Model, mesh: Mesh, *, uneven: bool = False, padding: Padding = Padding()) -> Plan:
    """A model on a mesh; ``uneven`` as for ``split``. Raises PlanError for a degree that is not possible."""
    mesh = unevenly(model, mesh) if uneven else mesh
    return make_plan(model, mesh, pad=padding.allowed, pad_to=padding.to)


def mesh_of(tp: int = 1, ep: int = 1, same_ranks: bool = False) -> Mesh:
    """The mesh of ``--tp`` and ``--ep``: experts over ``ep``, all else over ``tp``; with ``same_ranks`` both over the
    same ranks.

    Raises PlanError for a degree below 1, or two degrees over the same ranks that differ.
    """
    for name, degree in (("tp", tp), ("ep", ep)):
        if degree < 1:
            raise PlanError(f"--{name} {degree} is not possible: a degree is at least 1")
    if same_ranks:
        if tp != ep:
            raise PlanError(f"--tp {tp} and --ep {ep} cannot be over the same ranks: give both the same degree")
        return Mesh((("tp", tp), ("ep", ep)), same_ranks=True)
    if ep == 1:
        return Mesh((("tp", tp),))
    return Mesh((("ep", ep), ("tp", tp))) if tp > 1 else Mesh((("ep", ep),))


# ----------------------------------------------------------------------------------------------------------- split


def split(
    source: str | Path,
    out: str | Path,
    tp: int = 1,
    *,
    ep: int = 1,
    same_ranks: bool = False,
    uneven: bool = False,
    ranks: Sequence[int] | None = None,
    access: Access = Access(),
    padding: Padding = Padding(),
    options: Options | None = None,
    max_shard_size: int = DEFAULT_SHARD_SIZE,
    refine_blocks: bool = False,
    overwrite: bool = False,
    dry_run: bool = False,
    progress: Progress = _no_progress,
) -> Summary:
    """Split a checkpoint (full, or split already) into shards for ``ep`` x ``tp`` ranks. See ``reshard split
    --help``.

    ``uneven`` lets the last ranks have less of what has no equal parts, or none that leave blocks whole.
    ``refine_blocks`` lowers the block size of quantized weights where a rank's boundary would cut a block. ``ranks``
    writes only these; runs for other ranks into the same ``out`` add up to the whole. Raises ReshardError; nothing is
    left under the name ``out`` that is not complete.
    """
    out, mesh, options = Path(out), mesh_of(tp, ep, same_ranks), options or Options()
    wanted = _wanted_ranks(ranks, mesh)
    opened = open_any(source, access)
    mesh = unevenly(opened.model, mesh) if uneven else mesh
    finer = finer_blocks(opened.model, mesh) if refine_blocks else None
    model = with_blocks(opened.model, finer) if finer else opened.model
    target = make_plan(model, mesh, pad=padding.allowed, pad_to=padding.to)
    writer = _Split(opened, target, out, wanted, max_shard_size)

    def check() -> None:
        _check_target(writer, opened, out, ranks is not None, overwrite)

    if not dry_run:
        tidy(out)
    check()
    total = writer.nbytes
    if dry_run:
        return writer.summary(written=0, complete=False, dry_run=True)
    parts = [mesh.folder(rank) for rank in wanted]
    task = writer.task | _task_of(opened, options)
    with Staging(out, task, parts, opened.states, fsync=options.fsync, check=check) as staging:
        written = _move(opened, writer.targets(staging), staging, options, total, progress)
        records = {rank: writer.finish_rank(staging, rank) for rank in wanted}
        side_files = opened.read_side_files()
        manifest = writer.manifest(records, side_files)
        if ranks is None:
            for name, content in side_files.items():
                staging.write(name, content)
            staging.write(MANIFEST, manifest_text(manifest).encode())
            _check_unchanged(opened, staging)
            staging.publish_all(overwrite=overwrite)
            return writer.summary(written=written, complete=True, dry_run=False)
        _check_unchanged(opened, staging)
        complete = _publish_ranks(staging, manifest, side_files)
        return writer.summary(written=written, complete=complete, dry_run=False)


def _wanted_ranks(ranks: Sequence[int] | None, mesh: Mesh) -> tuple[int, ...]:
    if ranks is None:
        return tuple(range(mesh.size))
    for rank in ranks:
        if not 0 <= rank < mesh.size:
            raise PlanError(f"--rank {rank} is not possible: the ranks of {mesh} are 0 to {mesh.size - 1}")
    return tuple(sorted(set(ranks)))


def _check_target(writer: _Split, source: Source, out: Path, by_rank: bool, overwrite: bool) -> None:
    if by_rank and (out / MANIFEST).is_file():
        existing = read_manifest(out / MANIFEST)
        check_output(out, [source.path], overwrite=True)
        _check_same_run(existing, writer.manifest({}), out)
        present = [rank for rank in writer.ranks if rank in existing.ranks]
        if present and not overwrite:
            raise CheckpointError(
                f"{out / writer.plan.mesh.folder(present[0])} exists", "pass --overwrite to write it again"
            )
    else:
        begun = by_rank and _is_only_rank_folders(out)
        check_output(out, [source.path], overwrite=overwrite, begun=begun)
    check_space(out.parent, writer.nbytes - _already_staged(out))


def _check_same_run(existing: Manifest, mine: Manifest, out: Path) -> None:
    """Refuse to add ranks to an output of anything else."""
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
    """An output that another run is just beginning to publish, or was killed while doing so."""
    return out.is_dir() and unfinished_command(staging_of(out)) is not None and bool(rank_folders(out))


def _already_staged(out: Path) -> int:
    work = staging_of(out)
    return sum(p.stat().st_blocks * 512 for p in work.rglob("*") if p.is_file()) if work.is_dir() else 0


class _Split:
    """What a split writes: the files of each rank, their headers, and what goes beside them."""

    def __init__(self, source: Source, plan: Plan, out: Path, ranks: tuple[int, ...], max_shard_size: int) -> None:
        self.source, self.plan, self.out, self.ranks, self.max_shard_size = source, plan, out, ranks, max_shard_size
        self.identity = source.identity(plan)
        self._tensors = in_order(plan.model.tensors)
        self._place = {name: place for place, (name, _, _) in enumerate(self._tensors)}
        self._shards = {rank: partition(self._held(rank), max_shard_size) for rank in ranks}
        self._configs = {rank: json_bytes(rank_config(plan, rank)) + b"\n" for rank in ranks}
        self._headers = {
            (rank, shard.name): build_header(shard.tensors, self.identity.metadata(rank, self._places(rank, shard)))
            for rank, shards in self._shards.items()
            for shard in shards
        }

    def _places(self, rank: int, shard: ShardFile) -> list[int]:
        """Where a file's tensors stand among all, if others do not stand on this rank: else that would be lost."""
        if sum(len(each.tensors) for each in self._shards[rank]) == len(self._tensors):
            return []
        return [self._place[name] for name, _, _ in shard.tensors]

    def _held(self, rank: int) -> Iterator[tuple[str, str, tuple[int, ...], int]]:
        """The tensors of a rank: name, dtype, shape, bytes."""
        boxes = {kind: entry.layout.boxes[rank] for kind, entry in self.plan.laid.items()}
        held = {
            kind: (kind.dtype, box.shape, tensor_bytes(kind.name, kind.dtype, box.shape))
            for kind, box in boxes.items()
            if box is not None
        }
        return ((name, *held[kind]) for name, kind, _ in self._tensors if kind in held)

    @property
    def nbytes(self) -> int:
        """Bytes of all safetensors files to be written."""
        data = sum(shard.nbytes for shards in self._shards.values() for shard in shards)
        return data + sum(len(header) for header in self._headers.values())

    @property
    def task(self) -> dict[str, Any]:
        """What another run must have in common to go on with this one's files."""
        identity = self.identity
        return {
            "command": "split",
            "source": identity.source,
            "mesh": identity.mesh.to_document(),
            "padding": dict(identity.padding),
            "plan": identity.plan,
            "max_shard_size": self.max_shard_size,
        }

    def targets(self, staging: Staging) -> _Targets:
        """The files to write, and the place of each tensor in them."""
        found = _Targets(self.plan)
        for rank, shards in self._shards.items():
            folder = self.plan.mesh.folder(rank)
            for shard in shards:
                name, header = f"{folder}/{shard.name}", self._headers[rank, shard.name]
                file = _target(staging, name, header, len(header) + shard.nbytes)
                found.add(folder, name, rank, file, shard.places(len(header)))
        return found

    def finish_rank(self, staging: Staging, rank: int) -> tuple[FileRecord, ...]:
        """Write what stands beside a rank's shards; the records of all its files."""
        folder, shards = self.plan.mesh.folder(rank), self._shards[rank]
        records = [staging.write(f"{folder}/config.json", self._configs[rank])]
        for shard in shards:
            name = f"{folder}/{shard.name}"
            done = staging.finished[name]
            records.append(FileRecord(name, done.size, done.checksum))
        if len(shards) > 1:
            records.append(staging.write(f"{folder}/model.safetensors.index.json", index_text(shards).encode()))
        return tuple(records)

    def manifest(
        self, ranks: Mapping[int, tuple[FileRecord, ...]], side_files: Mapping[str, bytes] | None = None
    ) -> Manifest:
        """The manifest for the ranks that are complete; without ``side_files`` these are read."""
        contents = self.source.read_side_files() if side_files is None else side_files
        side = tuple(FileRecord(name, len(data), checksum(data)) for name, data in contents.items())
        record = self.source.record
        if self.source.checkpoint is not None:
            sums = {file.name: file.checksum() for file in self.source.files.values()}
            files = tuple(dataclasses.replace(file, checksum=sums[file.name]) for file in record.files)
            record = dataclasses.replace(record, files=files)
        return Manifest(self.identity, record, self.source.rules, self.max_shard_size, side, ranks, self.source.inputs)

    def summary(self, *, written: int, complete: bool, dry_run: bool) -> Summary:
        """What was done."""
        full = self.source.model.sizes.of({})
        return Summary(
            command="re-split" if self.source.sharded else "split",
            source=self.source.location,
            out=self.out,
            source_mesh=self.source.plan.mesh,
            mesh=self.plan.mesh,
            tensors=len(self._tensors),
            files=len(self._headers),
            nbytes=self.nbytes,
            written=written,
            padding={axis: (full[axis], padded) for axis, padded in self.plan.padding.items()},
            ranks=self.ranks,
            complete=complete,
            dry_run=dry_run,
        )


def _publish_ranks(staging: Staging, manifest: Manifest, side_files: Mapping[str, bytes]) -> bool:
    """Put finished ranks into the output and list them in its manifest; whether all ranks are there now."""
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
        staging.remove_work()
    return complete


# ----------------------------------------------------------------------------------------------------------- merge


def merge(
    shards: str | Path,
    out: str | Path,
    *,
    access: Access = Access(),
    options: Options | None = None,
    max_shard_size: int | None = None,
    overwrite: bool = False,
    dry_run: bool = False,
    progress: Progress = _no_progress,
) -> Summary:
    """Merge shards into one full Hugging Face checkpoint: the source's own files, byte for byte, where these are
    known.

    With ``max_shard_size``, or where the manifest is lost or the source was no safetensors, new files of at most that
    size are written. Raises ReshardError; nothing is left under the name ``out`` that is not complete.
    """
    out, options = Path(out), options or Options()
    opened = open_any(shards, access)
    if opened.sharded is None:
        raise CheckpointError(
            f"{shards} is a full checkpoint, there is nothing to merge", "give the folder that 'reshard split' wrote"
        )
    target = make_plan(opened.model, UNSPLIT)
    files = _merged_files(opened, target, max_shard_size)
    total = sum(file.size for file in files.weights)

    def check() -> None:
        check_output(out, [opened.path], overwrite=overwrite)
        check_space(out.parent, total - _already_staged(out))

    if not dry_run:
        tidy(out)
    check()
    summary = Summary(
        command="merge", source=opened.location, out=out, source_mesh=opened.plan.mesh, mesh=UNSPLIT,
        tensors=len(target.model.tensors), files=len(files.weights), nbytes=total, written=0, padding={}, ranks=(0,),
        complete=False, dry_run=dry_run,
    )  # fmt: skip
    if dry_run:
        return summary
    task = {"command": "merge", "source": opened.record.id, "files": [[f.name, f.size] for f in files.weights]}
    task |= _task_of(opened, options)
    with Staging(out, task, [""], opened.states, fsync=options.fsync, check=check) as staging:
        found = _Targets(target)
        for file in files.weights:
            summed = file.checksum is not None
            found.add("", file.name, 0, _target(staging, file.name, file.header, file.size, summed=summed), file.places)
        written = _move(opened, found, staging, options, total, progress)
        _check_merged(files, staging)
        for name, content in files.others.items():
            staging.write(name, content)
        for name, content in opened.read_side_files().items():
            staging.write(name, content)
        _check_unchanged(opened, staging)
        staging.publish_all(overwrite=overwrite)
    return dataclasses.replace(summary, written=written, complete=True)


def _check_merged(files: _MergedFiles, staging: Staging) -> None:
    """Compare the checksum of each merged file with that of the original, where both are known."""
    for file in files.weights:
        found = staging.finished[file.name].checksum
        if found is not None and file.checksum not in (None, found):
            staging.clear()
            raise MismatchError(
                f"{file.name} would have the checksum {found}, the original's was {file.checksum}",
                "the manifest or the shards are damaged: fetch or split them again",
            )


@dataclass(frozen=True)
class _MergedFile:
    name: str
    header: bytes
    size: int
    places: Iterable[tuple[str, int]]
    checksum: str | None = None


@dataclass(frozen=True)
class _MergedFiles:
    weights: tuple[_MergedFile, ...]
    others: Mapping[str, bytes]


def _merged_files(source: Source, plan: Plan, max_shard_size: int | None) -> _MergedFiles:
    """The files of the full checkpoint: as the manifest says they were, or new ones."""
    record = source.record
    if record.files and max_shard_size is None:
        _check_restorable(source, plan)
        index = {record.index_name: record.index} if record.index_name and record.index is not None else {}
        originals = tuple(_MergedFile(f.name, f.header, f.size, f.places(), f.checksum) for f in record.files)
        return _MergedFiles(originals, index)
    sizes = {kind: tensor_bytes(kind.name, kind.dtype, kind.shape) for kind in plan.model.kinds}
    tensors = ((name, kind.dtype, kind.shape, sizes[kind]) for name, kind, _ in in_order(plan.model.tensors))
    shards = partition(tensors, max_shard_size or DEFAULT_SHARD_SIZE)
    weights = []
    for shard in shards:
        header = build_header(shard.tensors, {"format": "pt"})
        size = len(header) + shard.nbytes
        weights.append(_MergedFile(shard.name, header, size, shard.places(len(header))))
    others = {"model.safetensors.index.json": index_text(shards).encode()} if len(shards) > 1 else {}
    return _MergedFiles(tuple(weights), others)


def _check_restorable(source: Source, plan: Plan) -> None:
    """The headers kept in the manifest speak of the very tensors that the shards hold."""
    kept: dict[str, TensorInfo] = {}
    for file in source.record.files:
        kept.update(file.tensors)
    for name, kind, _ in plan.model.tensors:
        info = kept.pop(name, None)
        if info is None or info.shape != kind.shape or info.dtype != kind.dtype:
            raise MismatchError(
                f"{source.path / MANIFEST}: its source files do not hold tensor '{name}' as the shards do"
            )
    if kept:
        raise MismatchError(
            f"{source.path}: tensor '{min(kept)}' stands in the manifest's source files and in no shard"
        )


# ----------------------------------------------------------------------------------------------------------- moving


@dataclass
class _Targets:
    """Files to write, and for each rank the place of each tensor in them."""

    plan: Plan
    files: list[TargetFile] = field(default_factory=list)
    parts: dict[TargetFile, tuple[str, str]] = field(default_factory=dict)
    places: dict[int, dict[str, TargetPlace]] = field(default_factory=dict)

    def add(self, part: str, name: str, rank: int, file: TargetFile, places: Iterable[tuple[str, int]]) -> None:
        """Take in a file of a rank; ``places`` are the offsets of its tensors."""
        self.files.append(file)
        self.parts[file] = (part, name)
        self.places.setdefault(rank, {}).update((tensor, TargetPlace(file, offset)) for tensor, offset in places)

    def name(self, number: int) -> str:
        """The name of a file, by its number."""
        return self.parts[self.files[number]][1]


def _target(staging: Staging, name: str, header: bytes, size: int, *, summed: bool = True) -> TargetFile:
    return TargetFile(staging.path(name), header, size, name in staging.finished, summed)


def _task_of(source: Source, options: Options) -> dict[str, Any]:
    """What any task depends on: another state of the source, or another version, begins anew."""
    inputs = [stamp.anywhere for stamp in source.inputs]
    return {"inputs": inputs, "checksum": options.checksum, "version": __version__}


def _check_unchanged(source: Source, staging: Staging) -> None:
    try:
        source.check_unchanged()
    except MismatchError:
        staging.clear()
        raise


def _move(source: Source, targets: _Targets, staging: Staging, options: Options, total: int, progress: Progress) -> int:
    """Move all bytes into the target files; the number of bytes written. Nothing built is kept if it cannot be
    trusted.
    """
    jobs = _jobs(source, targets)
    todo = sum(file.size for file in targets.files if not file.done)
    done = total - todo

    def count(nbytes: int) -> None:
        nonlocal done
        done += nbytes
        progress(done, total)

    def finished(file: TargetFile, checksum: str | None) -> None:
        part, name = targets.parts[file]
        number = targets.files.index(file)
        reads = tuple(
            Read(source_file.name, frozenset(map(targets.name, wanted)), total.to_text())
            for source_file in source.files.values()
            for wanted, total in source_file.sums.items()
            if number in wanted
        )
        staging.note_finished(part, name, Finished(file.size, checksum, reads))

    earlier = [read for entry in staging.finished.values() for read in entry.reads]
    try:
        move(jobs, [*source.files.values()], targets.files, options, finished=finished, progress=count)
        if options.checksum:
            _add_earlier(earlier, source, targets)
            _check_sources(source.files_of([job.name for job in jobs]))
    except MismatchError:
        staging.clear()
        raise
    return todo


def _add_earlier(reads: Sequence[Read], source: Source, targets: _Targets) -> None:
    """Add what earlier runs have read for the files that they finished to what this one has read for the others.

    What both have read must be equal. Raises MismatchError.
    """
    files = {file.name: file for file in source.files.values()}
    numbers = {name: number for number, (_, name) in enumerate(targets.parts.values())}
    for read in reads:
        file, wanted = files[read.source], frozenset(numbers[name] for name in read.targets)
        total = PartialSum.from_text(read.sum, file.size)
        if wanted not in file.sums:
            file.add(wanted, total)
        elif not file.sums[wanted].equals(total):
            raise MismatchError(f"{file.path} is not what it was when a part of it was read by an earlier run")


def _jobs(source: Source, targets: _Targets) -> list[Job]:
    """One job a tensor, in the order in which the source stores them."""
    ways: dict[tuple[Layout, Layout, str, frozenset[int]], Way] = {}
    sizes = {kind: tensor_bytes(kind.name, kind.dtype, kind.shape) for kind in source.plan.model.kinds}
    jobs = []
    for (name, kind, _), (_, wanted, _) in zip(source.plan.model.tensors, targets.plan.model.tensors, strict=True):
        ranks = frozenset([rank for rank, places in targets.places.items() if name in places])
        if not ranks:
            continue
        before, after, held = source.plan.laid[kind], targets.plan.laid[wanted], source.places(name)
        key = (before.layout, after.layout, before.dtype, ranks)
        way = ways.get(key)
        if way is None:
            way = way_between(before._replace(name=name), after, held, ranks)
            if before.stated is None:  # else it is of these places
                ways[key] = way
        jobs.append(Job(name, way, held, partial(place_in, targets.places, name), sizes[kind]))
    return jobs


def _check_sources(files: Iterable[SourceFile]) -> None:
    """Compare the checksum of each file that the output depends on with the one in its manifest; what was not summed in
    passing is read now.
    """
    for file in files:
        if file.expected is None:
            continue
        found = file.checksum() or file_checksum(file.path)
        if found != file.expected:
            raise MismatchError(
                f"{file.path} has the checksum {found}, its manifest says {file.expected}",
                "the file is damaged: fetch or split it again",
            )


# ------------------------------------------------------------------------------------------------------------ load


def load(
    source: str | Path,
    tp: int = 1,
    rank: int = 0,
    *,
    ep: int = 1,
    same_ranks: bool = False,
    uneven: bool = False,
    access: Access = Access(),
    padding: Padding = Padding(),
) -> dict[str, torch.Tensor]:
    """The tensors of one rank, read straight from a checkpoint (full, or split to any degree): only the bytes that it
    owns.

    ``uneven`` as for ``split``. Returns a dict of CPU tensors of the rank's local shapes, in the checkpoint's dtypes.
    Raises ReshardError.
    """
    from reshard.engine.loading import load_rank

    mesh = mesh_of(tp, ep, same_ranks)
    _wanted_ranks([rank], mesh)
    opened = open_any(source, access)
    target = plan_of(opened.model, mesh, uneven=uneven, padding=padding)
    tensors = load_rank(opened, target, rank)
    opened.check_unchanged()
    return tensors
