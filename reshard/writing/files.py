"""Writes weight files, in the same way for split, re-split and merge."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from reshard.move.engine import move
from reshard.move.jobs import Job, Options, TargetFile, TargetPlace
from reshard.move.moves import jobs_of
from reshard.move.reading import Sums
from reshard.publishing.journal import Finished, Read
from reshard.publishing.staging import Staging
from reshard.source.source import SourceFile
from reshard.store.retries import Traffic
from reshard.writing.outputs import Output
from reshard.writing.shard_files import NewFile

DEFAULT_SHARD_SIZE = 5_000_000_000


class State(NamedTuple):
    """How far a split or merge is."""

    written: int
    """Bytes written to the weight files by this run and those before."""
    to_write: int
    """The size of all these files."""
    again: int
    """The requests that were made again."""


Progress = Callable[[State], None]


def no_progress(state: State) -> None:
    """Show no progress."""


@dataclass(frozen=True)
class Written:
    """The bytes that this run wrote and fetched, and the sums of what it read of each file."""

    nbytes: int
    traffic: Traffic
    sums: Sums
    read: Sequence[SourceFile]
    """The files of the source that hold what was moved."""
    began: float
    """When it began (``time.monotonic``)."""
    moving: float
    """Seconds of moving bytes."""


def write_files(new: Output, staging: Staging, options: Options, progress: Progress) -> Written:
    """Write the weight files of an output into the staging folder.

    The files of other processes count as done. Raises CheckpointError if a file cannot be read or written, and
    MismatchError if replicas differ or padding is not zero.
    """
    source, files = new.source, new.all_files()
    targets = {
        TargetFile(staging.path(f.name), f.header, f.size, summed=f.summed, fixed=f.fixed, crcs=f.crcs): f
        for f in files
    }
    jobs = _jobs(new, targets)
    began, moving, sums = time.monotonic(), 0.0, Sums(source.files.values())
    mine = {target: file for target, file in targets.items() if file.name in staging.share.files}
    total = sum(file.size for file in mine.values())
    todo = sum(file.size for file in mine.values() if file.name not in staging.finished)
    written, traffic = total - todo, Traffic()

    def moved(nbytes: int) -> None:
        nonlocal written
        written += nbytes
        progress(State(written, total, traffic.again + sums.traffic.again))

    def finished(target: TargetFile, checksum: str | None) -> None:
        number = numbers[target]
        reads = tuple(
            Read(of.name, frozenset(files[other].name for other in wanted), read.to_text())
            for of, wanted, read in sums.wanted_by(number)
        )
        staging.note_finished(files[number].name, Finished(target.size, checksum, reads))

    numbers = {each: number for number, each in enumerate(targets)}
    for batch in staging.batches([(file.name, file.size) for file in _side_by_side(files)]):
        sums = Sums(source.files.values())  # bytes that files of two batches want are read, and summed, twice
        for each, file in targets.items():
            each.done = file.name not in batch or file.name in staging.finished
        start = time.monotonic()
        move(jobs, sums, [*targets], options, finished=finished, progress=moved)
        moving += time.monotonic() - start
        traffic = traffic.plus(sums.traffic)
    read = [job.name for job in jobs] if source.format is None else None
    return Written(todo, traffic, sums, source.files_of(read), began, moving)


def _jobs(new: Output, targets: Iterable[TargetFile]) -> list[Job]:
    """The jobs that write the files of an output, which are given in its order."""
    jobs = list[Job]()
    to = iter(targets)
    for part in (new, *new.states):
        places: dict[int, dict[str, TargetPlace]] = {}
        for file in part.files:
            found, place = places.setdefault(file.rank, {}), next(to)
            found.update((tensor, TargetPlace(place, offset)) for tensor, offset in file.places())
        jobs += jobs_of(part.source, part.arrangement, places)
    return jobs


def _side_by_side(files: Iterable[NewFile]) -> list[NewFile]:
    """The first file of each rank, then the second of each, and so on: neighbours are made of the same bytes."""
    numbers = Counter[int]()
    order = []
    for file in files:
        order.append((numbers[file.rank], file))
        numbers[file.rank] += 1
    return [file for _, file in sorted(order, key=lambda each: each[0])]
