"""Writes weight files, in the same way for split, re-split and merge."""

from __future__ import annotations

import contextlib
import os
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from formats.errors import MismatchError, PlanError
from formats.files.torch_zip import Crc
from reshard import __version__
from reshard.engine.jobs import Job, Options, TargetFile, TargetPlace
from reshard.engine.move import move
from reshard.engine.moves import jobs_of
from reshard.engine.reading import Sums
from reshard.engine.times import Times
from reshard.launcher import Share
from reshard.planning.arrangement import Arrangement
from reshard.storage.access import Access
from reshard.storage.journal import Finished, Read
from reshard.storage.marks import is_published, staging_of
from reshard.storage.output import PublishedError, Staging
from reshard.storage.parts import Dealt
from reshard.storage.permission import check_output
from reshard.storage.place import Bucket
from reshard.storage.retries import Traffic
from reshard.storage.source import Source, SourceFile
from reshard.storage.upload import Uploading
from reshard.system import check_space
from reshard.writing.progress import Count, Progress
from reshard.writing.shard_files import ShardFile

DEFAULT_SHARD_SIZE = 5_000_000_000


@dataclass(frozen=True, eq=False)
class NewFile:
    """A weight file to be written: its header, and tensors of one rank.

    ``name`` is relative to the output. ``part`` is the folder of the output to which it belongs (``""``: the root).
    ``size`` is in bytes, with the header. ``places`` gives the names of its tensors and their offsets in the file. The
    file must have the checksum ``expected``, if that is known. Without ``summed`` no checksum is computed.
    """

    name: str
    part: str
    rank: int
    header: bytes
    size: int
    places: Callable[[], Iterable[tuple[str, int]]]
    expected: str | None = None
    summed: bool = True
    fixed: tuple[tuple[int, bytes], ...] = ()
    """Other bytes that come from no source, with their offsets."""
    crcs: tuple[Crc, ...] = ()
    """What is known when all else is written."""


def noted(access: Access, source: Source) -> str | None:
    """What a reader of the output must know: that it was dequantized, what was changed in a given config.json."""
    notes = ["weights in fp8 were dequantized to BF16"] if access.dequantize else []
    return "; ".join([*notes, *([source.note] if source.note else [])]) or None


def new_file(shard: ShardFile, folder: str, rank: int, header: bytes, *, summed: bool = True) -> NewFile:
    """A shard file, to be written with this header into a folder of the output (``""``: the root)."""
    name = f"{folder}/{shard.name}" if folder else shard.name
    size, places = len(header) + shard.nbytes, partial(shard.places, len(header))
    return NewFile(name, folder, rank, header, size, places, summed=summed)


@dataclass(frozen=True)
class Written:
    """What this run wrote, in bytes, what it fetched from elsewhere, and the sums of what it read of each file."""

    nbytes: int
    traffic: Traffic
    sums: Sums
    files: Sequence[NewFile]
    """All files of the output, also those of other processes."""
    read: Sequence[SourceFile]
    """The files of the source that hold what was moved."""
    began: float
    """When it began (``time.monotonic``)."""
    moving: float
    """Seconds of moving bytes."""
    times: Times
    """What the processes did meanwhile."""


class Further(NamedTuple):
    """Files to be written of a target, and the source of what is in them."""

    source: Source
    target: Arrangement
    files: Sequence[NewFile]


def write_files(
    source: Source,
    target: Arrangement,
    files: Sequence[NewFile],
    staging: Staging,
    options: Options,
    progress: Progress,
    also: Sequence[Further] = (),
) -> Written:
    """Write the files of an arrangement into the staging folder, from a source of the same model.

    ``also`` has what else is written, into files of its own: its sources have the same files as ``source``. The files
    of other processes count as done. Raises CheckpointError if a file cannot be read or written. Raises MismatchError
    if replicas differ or padding is not zero; then what was built is removed.
    """
    parts = [Further(source, target, files), *also]
    files = [file for part in parts for file in part.files]
    targets = {
        TargetFile(staging.path(f.name), f.header, f.size, summed=f.summed, fixed=f.fixed, crcs=f.crcs): f
        for f in files
    }
    jobs = _jobs(parts, targets)
    began, moving, sums = time.monotonic(), 0.0, Sums(source.files.values())
    mine = {target: file for target, file in targets.items() if staging.writes(file.name)}
    total = sum(file.size for file in mine.values())
    todo = sum(file.size for file in mine.values() if file.name not in staging.finished)
    count = Count(jobs, total - todo, total, progress)

    def finished(target: TargetFile, checksum: str | None) -> None:
        number = numbers[target]
        reads = tuple(
            Read(of.name, frozenset(files[other].name for other in wanted), read.to_text())
            for of, wanted, read in sums.wanted_by(number)
        )
        staging.note_finished(files[number].part, files[number].name, Finished(target.size, checksum, reads))

    numbers = {each: number for number, each in enumerate(targets)}
    try:
        for batch in staging.batches([(file.name, file.size) for file in _side_by_side(files)]):
            sums = Sums(source.files.values())  # bytes that files of two batches want are read, and summed, twice
            for each, file in targets.items():
                each.done = file.name not in batch or file.name in staging.finished
            count.begin((each for each, file in mine.items() if file.name not in staging.finished), sums)
            start = time.monotonic()
            move(jobs, sums, [*targets], options, finished=finished, progress=count)
            moving += time.monotonic() - start
            count.end()
    except MismatchError:
        staging.clear()
        raise
    read = [job.name for job in jobs] if source.format is None else None
    return Written(todo, count.traffic, sums, files, source.files_of(read), began, moving, count.moved.times)


def _jobs(parts: Iterable[Further], targets: Iterable[TargetFile]) -> list[Job]:
    """The jobs that write files, which are given in the same order."""
    jobs = list[Job]()
    to = iter(targets)
    for part in parts:
        places: dict[int, dict[str, TargetPlace]] = {}
        for file in part.files:
            found, place = places.setdefault(file.rank, {}), next(to)
            found.update((tensor, TargetPlace(place, offset)) for tensor, offset in file.places())
        jobs += jobs_of(part.source, part.target, places)
    return jobs


def _side_by_side(files: Iterable[NewFile]) -> list[NewFile]:
    """The first file of each rank, then the second of each, and so on: neighbours are made of the same bytes."""
    numbers = Counter[int]()
    order = []
    for file in files:
        order.append((numbers[file.rank], file))
        numbers[file.rank] += 1
    return [file for _, file in sorted(order, key=lambda each: each[0])]


# ------------------------------------------------------------------------------------- common to split and merge


def deal(files: Sequence[NewFile], part: Share | None) -> Dealt | None:
    """The files that one of several processes writes; None if one process writes all."""
    if part is None:
        return None
    mine = part.of_sizes([file.size for file in files])
    label = f"part-{part.index}-of-{part.count}"
    return Dealt(label, part.count, frozenset(files[number].name for number in mine))


def staging_for(
    folder: Path,
    bucket: Bucket | None,
    task: Mapping[str, Any],
    parts: Sequence[str],
    source: Source,
    files: Sequence[NewFile],
    dealt: Dealt | None,
    options: Options,
    check: Callable[[], None],
) -> Staging:
    """Where an output is built: beside its place, or for a bucket a few files at a time."""
    if bucket is None:
        return Staging(folder, task, parts, source.states, fsync=options.fsync, check=check, dealt=dealt)
    everything = Dealt("part-0-of-1", 1, frozenset(file.name for file in files))
    return Uploading(bucket, task, source.states, dealt or everything, check=check)


def check_place(
    out: Path | Bucket,
    source: Source,
    files: Sequence[NewFile],
    dealt: Dealt | None,
    task: Mapping[str, Any],
    *,
    overwrite: bool,
) -> None:
    """Check that the files can be written to an output, and that the disk has room.

    Raises CheckpointError; PublishedError if other processes have finished this ``task``.
    """
    if isinstance(out, Path):
        if dealt is not None and not overwrite and is_published(out, task):
            raise PublishedError(f"{out} is complete")
        check_output(out, source.read_from, source.read_side_files(), overwrite=overwrite)
        check_space(out.parent, sum(file.size for file in files) - already_staged(out))
        return
    if dealt is not None and overwrite:
        raise PlanError(
            f"--overwrite is not possible where several processes write to {out.name}", "remove what is there first"
        )
    out.check_apart(source.location, (file.remote for file in source.files.values() if file.remote is not None))
    out.check(task, source.read_side_files(), overwrite=overwrite, is_shared=dealt is not None)
    check_space(out.folder.parent, max((file.size for file in files), default=0))


def task_of(source: Source, options: Options) -> dict[str, Any]:
    """The part of a task that is common to split and merge: a change of the source or of the version starts anew."""
    inputs = [stamp.anywhere for stamp in source.inputs]
    return {"inputs": inputs, "checksum": options.checksum, "version": __version__}


def already_staged(out: Path, parts: Iterable[str] = ("",)) -> int:
    """The bytes on the disk that an earlier run has built of these folders of an output.

    Other runs may move or remove files meanwhile.
    """
    paths = (Path(root, name) for part in parts for root, _, names in os.walk(staging_of(out) / part) for name in names)
    total = 0
    for path in paths:
        with contextlib.suppress(FileNotFoundError):
            total += path.lstat().st_blocks * 512
    return total
