"""The small files of an output that are written last: those beside the weights, and the manifest.

The manifest of ranks that are added to an output lists those that are there already.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping
from itertools import starmap
from pathlib import Path

from reshard.formats.errors import CheckpointError
from reshard.formats.files.checkpoint import CONFIG
from reshard.formats.files.checksum import checksum
from reshard.formats.files.manifest import MANIFEST, FileRecord, Manifest, manifest_text
from reshard.formats.files.sharded import rank_folders, read_manifest
from reshard.formats.notation.architecture import SETTINGS
from reshard.formats.notation.format_file import HUGGING_FACE
from reshard.move.reading import Sums
from reshard.publishing.existing import Existing
from reshard.publishing.journal import journals_in
from reshard.publishing.records import Finished
from reshard.store.staging_names import staging_of
from reshard.writing.documents import Documents
from reshard.writing.output import Output


def last_documents(new: Output, documents: Documents, finished: Mapping[str, Finished], sums: Sums) -> dict[str, bytes]:
    """The small files that are written when all weight files are ``finished``, the manifest last.

    Raises CheckpointError if an output to which ranks are added is of another source, mesh, plan or file size.
    """
    side_files = new.source.read_side_files()
    last = {name: content for each in documents.of_ranks.values() for name, content in each.items()}
    last |= {**side_files, **documents.general}
    if new.format is HUGGING_FACE:
        if SETTINGS in json.loads(last.get(CONFIG, b"{}")):  # split made it of the model's, for an adapter
            del last[CONFIG]
        return last
    ranks = {rank: tuple(_records(new, documents.of_ranks.get(rank, {}), finished, rank)) for rank in new.ranks}
    manifest = _with_others(new, _manifest(new, ranks, side_files, sums))
    return last | {MANIFEST: manifest_text(manifest).encode()}


def _manifest(
    new: Output, ranks: Mapping[int, tuple[FileRecord, ...]], side_files: Mapping[str, bytes], sums: Sums | None = None
) -> Manifest:
    """The manifest that lists ``ranks``, with the checksums of the source files that were read in full."""
    source, record = new.source, new.source.record
    if sums is not None and source.format is HUGGING_FACE and source.cast is None:
        sums_of = {(file.name, file.header): sums.checksum(file) for file in sums.of}
        files = tuple(dataclasses.replace(f, checksum=sums_of.get((f.name, f.header))) for f in record.files)
        record = dataclasses.replace(record, files=files)
    return Manifest(
        new.identity, record, source.manifest_rules(new.format), new.max_shard_size,
        tuple(starmap(_record, side_files.items())), ranks, source.inputs,
        None if new.format.plain else new.format.name,
    )  # fmt: skip


def _records(
    new: Output, documents: Mapping[str, bytes], finished: Mapping[str, Finished], rank: int
) -> Iterator[FileRecord]:
    """The records of a rank's files, all of which are finished: its configs, its weight files, its index."""
    small = [*starmap(_record, documents.items())]
    configs = [record for record in small if not record.name.endswith(".index.json")]
    files = [file for part in (new, *new.states) for file in part.rank_files[rank]]
    if new.format.files.is_single:
        files.sort(key=lambda file: file.name)
    yield from configs
    yield from (finished[file.name].record(file.name) for file in files + (new.intact if rank == 0 else []))
    yield from small[len(configs) :]


def _record(name: str, content: bytes) -> FileRecord:
    return FileRecord(name, len(content), checksum([content]))


# -------------------------------------------------------------------------------------------- some ranks of an output


def _with_others(new: Output, manifest: Manifest) -> Manifest:
    """The manifest with the ranks that are in the output already."""
    out = new.added_to
    if out is None or not (out / MANIFEST).is_file():
        return manifest
    existing = read_manifest(out / MANIFEST)
    _check_same_run(existing, manifest, out)
    return dataclasses.replace(manifest, ranks=dict(existing.ranks) | dict(manifest.ranks))


def check_added(new: Output, out: Path, existing: Existing, *, overwrite: bool) -> None:
    """Raise CheckpointError unless the ranks of an output may be added to what is in the folder ``out``."""
    ranks = _with_others(new, _manifest(new, {}, new.source.read_side_files())).ranks
    present = [folder for rank, folder in zip(new.ranks, new.folders, strict=True) if rank in ranks]
    if present and not overwrite:
        raise CheckpointError(f"{out / present[0]} exists", "pass --overwrite to write it again")
    # a run may have been killed when it had added its first rank, and not written the manifest
    if existing.names and not ranks and not (journals_in(staging_of(out)) and rank_folders(out)):
        existing.check_replaceable(overwrite=overwrite)
        raise CheckpointError(
            f"{out} holds a checkpoint that is not in folders of ranks, and a rank does not replace it",
            "remove it, choose another folder, or leave out --rank: all ranks then replace it",
        )
    existing.refuse_unknown([name for name in existing.names if name.partition("/")[0] in new.folders])


def _check_same_run(existing: Manifest, planned: Manifest, out: Path) -> None:
    """Raise CheckpointError if an existing output is of another source, mesh, plan or file size."""
    if existing.format is not None:
        raise CheckpointError(f"{out} holds shards in the format '{existing.format}'", "choose another folder")
    if existing.identity != planned.identity or existing.max_shard_size != planned.max_shard_size:
        raise CheckpointError(f"{out} holds shards of another source, mesh or plan", "choose another folder")
    stamps = {stamp.name: stamp for stamp in existing.inputs}
    for stamp in planned.inputs:
        if stamp.name not in stamps or not stamp.is_same(stamps[stamp.name]):
            raise CheckpointError(
                f"{stamp.name} of the source is not the file that the ranks in {out} were split from: "
                f"size, time, inode or checksum differ",
                "split all ranks from the same files, or from copies that keep the times (cp -p, rsync -t)",
            )
    changed = set(existing.side_files) ^ set(planned.side_files)
    if changed:
        name = min(record.name for record in changed)
        raise CheckpointError(
            f"{name} of the source is not as it was when the ranks in {out} were split",
            "split all ranks from the same files",
        )
