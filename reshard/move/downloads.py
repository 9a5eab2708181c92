"""What a rank's shards take of a source that lies elsewhere."""

from __future__ import annotations

from pathlib import Path

from reshard.move.ahead import GAP
from reshard.move.jobs import Job, Options, TargetFile, TargetPlace
from reshard.move.moves import jobs_of
from reshard.move.reading import needed
from reshard.move.slabs import Route
from reshard.placement.arrangement import Arrangement
from reshard.source.source import Source, SourceFile
from reshard.store.remote import joined


def download_of(source: Source, target: Arrangement, rank: int) -> int:
    """The bytes of weights that are fetched if this rank alone is written, of files that are not on this machine.

    Of a row-parallel weight these are more than the rank holds: where its parts of the rows lie close together, what
    lies between them is fetched with them.
    """
    nowhere = TargetPlace(TargetFile(Path(), b"", 0), 0)
    places = {rank: {stored.name_on(rank): nowhere for stored, _ in target.tensors_of(rank)}}
    nbytes_of: dict[Route, int] = {}
    total = 0
    for job in jobs_of(source, target, places, compare=False):
        if job.transfer not in nbytes_of:
            nbytes_of[job.transfer] = _fetched(job)
        total += nbytes_of[job.transfer]
    return total


def _fetched(job: Job) -> int:
    """The bytes that are fetched for one job."""
    ranges_of: dict[SourceFile, list[tuple[int, int]]] = {}
    for region in (region for slab in job.transfer.slabs(Options().sizes.step) for region in slab.reads):
        place = job.sources(region.rank)
        if place is not None and place.file.remote is not None:
            ranges_of.setdefault(place.file, []).extend(joined(needed(place, region), GAP))
    return sum(
        file.remote.over_network(end - begin)
        for file, ranges in ranges_of.items()
        for begin, end in joined(ranges, 0)
        if file.remote is not None
    )
