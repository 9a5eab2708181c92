"""reshard's own form: a folder for each rank, which is an ordinary small checkpoint, and a manifest beside them."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from formats.documents import json_bytes
from formats.errors import CheckpointError
from formats.files.checkpoint import ADAPTER, ADAPTER_CONFIG, MODEL
from formats.files.safetensors import build_header, tensor_bytes
from formats.files.sharded import MANIFEST, FileRecord, Manifest, manifest_text, rank_folders, read_manifest
from reshard.engine.jobs import Options
from reshard.planning.arrangement import arrangement_of
from reshard.planning.model import in_order
from reshard.planning.plan import Plan
from reshard.planning.rank_config import rank_config
from reshard.storage.marks import staging_of, unfinished_command
from reshard.storage.output import PATIENCE, Staging
from reshard.storage.permission import check_no_strangers, check_output
from reshard.storage.source import Source
from reshard.system import check_space
from reshard.writing.files import NewFile, Written, already_staged, new_file
from reshard.writing.outputs import Output
from reshard.writing.publishing import check_read, check_unchanged
from reshard.writing.shard_files import ShardFile, index_text, partition


class RankFolders(Output):
    """The weight files of each rank, its config.json and its index."""

    def __init__(
        self, source: Source, plan: Plan, ranks: Sequence[int], max_shard_size: int, *, by_rank: bool = False
    ) -> None:
        """With ``by_rank`` the folders of ``ranks`` are added to those in the output."""
        self.source, self.ranks, self.max_shard_size = source, ranks, max_shard_size
        self.arrangement, self.by_rank, self.left_behind = arrangement_of(plan, None), by_rank, source.left_behind
        self._plan, self._identity, self._tensors = plan, source.identity(plan), in_order(plan.model.tensors)
        self._adapter = source.read_side_files().get(ADAPTER_CONFIG)
        single = ADAPTER if self._adapter is not None else MODEL
        self._shards = {rank: partition(self._held(rank), max_shard_size, single) for rank in ranks}
        self._configs = {rank: json_bytes(rank_config(plan, rank)) + b"\n" for rank in ranks}
        self._files = {rank: self._files_of(rank, shards) for rank, shards in self._shards.items()}
        self.files = [file for files in self._files.values() for file in files]
        self.documents: Mapping[str, bytes] = {}

    @property
    def folders(self) -> list[str]:
        """The folders of the ranks."""
        return [self._plan.mesh.folder(rank) for rank in self.ranks]

    def _held(self, rank: int) -> Iterator[tuple[str, str, tuple[int, ...], int]]:
        """The tensors of a rank: name, dtype, shape, bytes."""
        shapes = {kind: box.shape for kind, box in self._plan.boxes(rank).items()}
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
            metadata = self._identity.metadata(rank, [places[name] for name, _, _ in shard.tensors] if places else [])
            header = build_header(shard.tensors, metadata)
            files.append(new_file(shard, self._plan.mesh.folder(rank), rank, header))
        return files

    def finish(self, staging: Staging, rank: int) -> Iterator[FileRecord]:
        """Write a rank's config.json and index; yields the records of all its files."""
        folder, shards = self._plan.mesh.folder(rank), self._shards[rank]
        yield staging.write(f"{folder}/config.json", self._configs[rank])
        if self._adapter is not None:
            yield staging.write(f"{folder}/{ADAPTER_CONFIG}", self._adapter)
        for file in self._files[rank]:
            done = staging.finished[file.name]
            yield FileRecord(file.name, done.size, done.checksum)
        if len(shards) > 1:
            yield staging.write(f"{folder}/model.safetensors.index.json", index_text(shards).encode())


# ----------------------------------------------------------------------------------------- some ranks of an output


def check_ranks(new: RankFolders, out: Path, *, overwrite: bool) -> None:
    """Raise CheckpointError unless these ranks may be added to an output, and the disk has room for them."""
    give_up = time.monotonic() + PATIENCE
    while True:
        try:
            if (out / MANIFEST).is_file():
                _check_begun(new, out, overwrite)
            else:
                _check_first(new, out, overwrite)
            break
        except CheckpointError:
            if time.monotonic() > give_up:
                raise
            time.sleep(0.01)  # another run may be at publishing its first rank
    check_no_strangers(out, folders=new.folders)
    check_space(out.parent, sum(file.size for file in new.files) - already_staged(out, new.folders))


def _check_first(new: RankFolders, out: Path, overwrite: bool) -> None:
    """Raise CheckpointError unless the ranks of this run may be the first in an output."""
    begun = _is_only_rank_folders(out)
    check_output(out, new.source.read_from, overwrite=overwrite, begun=begun)
    if not begun and out.is_dir() and any(out.iterdir()):
        raise CheckpointError(
            f"{out} holds a checkpoint that is not in folders of ranks, and a rank does not replace it",
            "remove it, choose another folder, or leave --rank out to replace it by all ranks",
        )


def _check_begun(new: RankFolders, out: Path, overwrite: bool) -> None:
    """Raise CheckpointError unless the ranks of this run may be added to those in an output."""
    existing, source = read_manifest(out / MANIFEST), new.source
    check_output(out, source.read_from, overwrite=True, begun=True)
    _check_same_run(existing, new.manifest({}, source.read_side_files()), out)
    present = [folder for rank, folder in zip(new.ranks, new.folders, strict=True) if rank in existing.ranks]
    if present and not overwrite:
        raise CheckpointError(f"{out / present[0]} exists", "pass --overwrite to write it again")


def _check_same_run(existing: Manifest, mine: Manifest, out: Path) -> None:
    """Raise CheckpointError if an existing output is of another source, mesh, plan or file size."""
    if existing.form is not None:
        raise CheckpointError(f"{out} holds shards in the format '{existing.form}'", "choose another folder")
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


def publish_ranks(new: RankFolders, written: Written, staging: Staging, options: Options) -> bool:
    """Move finished ranks into the output and list them in its manifest; returns whether all ranks are there."""
    source = new.source
    sums, side_files = check_read(source, written, staging, options), source.read_side_files()
    manifest = new.manifest({rank: tuple(new.finish(staging, rank)) for rank in new.ranks}, side_files, sums)
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
        merged = replace(manifest, ranks=known | dict(manifest.ranks))
        staging.put(MANIFEST, manifest_text(merged).encode())
        complete = len(merged.ranks) == mesh.size
        if complete:
            staging.remove_if_last()
    return complete
