"""Writes the weight files of an output into its staging folder."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest

from reshard.move.engine import Writing, move
from reshard.move.jobs import FilePlan, Job
from reshard.move.reading import Sums
from reshard.publishing.staging import Staging
from reshard.source.source import SourceFile
from reshard.store.remote import tried_again
from reshard.writing.output import Output
from reshard.writing.request import Start, State, WriteRequest


@dataclass(frozen=True)
class Written:
    """The bytes that this run wrote and fetched, and the sums of the bytes read of each file."""

    nbytes: int
    fetched: int
    sums: Sums | None
    """None if there was nothing to write."""
    read: Sequence[SourceFile]
    """The source's files from which bytes were moved."""
    began: float
    """The time at which it began (``time.monotonic``)."""
    moving: float
    """Seconds of moving bytes."""


def write_files(
    new: Output, jobs: Sequence[Job], staging: Staging, writing: dict[FilePlan, Writing], start: Start,
    request: WriteRequest,
) -> Written:  # fmt: skip
    """Write the weight files of an output into the staging folder. ``writing`` then has those of the last batch.

    The files of other processes count as done. Raises CheckpointError if a file cannot be read or written, and
    MismatchError if replicas differ or padding is not zero.
    """
    source, files = new.source, new.all_files
    began, moving, sums = time.monotonic(), 0.0, None
    sizes = {file.name: file.layout.size for file in files if file.name in staging.share.files}
    total, todo = sum(sizes.values()), sum(size for name, size in sizes.items() if name not in staging.finished)
    nbytes, fetched = total - todo, 0

    def moved(written: int) -> None:
        nonlocal nbytes
        nbytes += written
        request.progress(State(nbytes, total, tried_again() - start.tried_again))

    of_ranks = dict[int, list[FilePlan]]()
    for each in files:
        of_ranks.setdefault(each.rank, []).append(each)
    # the first file of each rank, then the second of each: neighbours are made of the same bytes
    side_by_side = [(each.name, each.layout.size) for row in zip_longest(*of_ranks.values()) for each in row if each]
    for batch in staging.batches(side_by_side):
        left = (file for file in files if file.name in batch and file.name not in staging.finished)
        writing.clear()
        writing.update((file, Writing(file, staging.path(file.name))) for file in left)
        at = time.monotonic()
        sums, taken_over = move(  # bytes that files of two batches want are read, and summed, twice
            jobs, source.files.values(), files, writing, request,
            finished=staging.note_finished, moved=staging.note_moved,
            earlier=staging.moved(batch - staging.finished.keys()), progress=moved,
        )  # fmt: skip
        moving += time.monotonic() - at
        todo, fetched = todo - taken_over, fetched + sums.fetched
    names = [job.name for job in jobs] if source.format.plain else None
    return Written(todo, fetched, sums, source.files_of(names), began, moving)
