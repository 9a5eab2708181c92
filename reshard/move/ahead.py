"""Requests ranges of remote files before they are read: many at a time, for a few steps ahead.

Ranges that lie close are joined into one request, and long ones are cut into several.

``download_of`` says how much a rank's shards take of a source that lies elsewhere.
"""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from formats.store import NEAR, Range, joined
from reshard.move.jobs import Job, Options, TargetFile, TargetPlace
from reshard.move.moves import jobs_of
from reshard.move.reading import ranges_of
from reshard.move.slabs import Route
from reshard.placement.arrangement import Arrangement
from reshard.source.source import Source, SourceFile
from reshard.store.remote import Read
from reshard.store.threads import Threads, result

REQUESTS = 16
"""Requests that a process has under way at a time."""

PART = 4 << 20
"""Bytes of the longest request."""

GAP = 1 << 20
"""Up to so many bytes between two ranges of a tensor are read with them, because one more request would cost as much.
"""


@dataclass(frozen=True)
class Part:
    """Bytes ``begin`` to ``end`` of a file, on their way."""

    begin: int
    end: int
    content: Future[memoryview]


class Ahead:
    """The ranges of remote files that are under way. The first step requested is the first to be read."""

    def __init__(self) -> None:
        self._threads = Threads(REQUESTS)
        self._open: dict[SourceFile, Read] = {}
        self._steps: list[dict[SourceFile, Sequence[Part]]] = []
        """The parts that were requested for each step of the work, by file, in order."""
        self.fetched = 0
        """Bytes that were requested so far."""

    def request(self, tensors: Iterable[tuple[SourceFile, Sequence[Range]]]) -> None:
        """Request the ranges of a step; each entry has those of one tensor. Ranges of local files are left out."""
        wanted: dict[SourceFile, list[Range]] = {}
        for file, ranges in tensors:
            if file.is_elsewhere:
                wanted.setdefault(file, []).extend(joined(ranges, GAP))
        self._steps.append({
            file: [self._part(file, *part) for part in _cut(ranges)] for file, ranges in wanted.items()
        })  # fmt: skip

    @property
    def nbytes(self) -> int:
        """The bytes of all steps that are not done."""
        return sum(part.end - part.begin for step in self._steps for parts in step.values() for part in parts)

    def end_step(self) -> None:
        """Forget the first step."""
        self._steps.pop(0)

    def fill(self, file: SourceFile, offset: int, view: memoryview) -> None:
        """Fill ``view`` with bytes of a remote file from ``offset`` on. Raises CheckpointError, MismatchError."""
        position, end, into = 0, len(view), np.frombuffer(view, np.uint8)  # numpy copies without Python's lock
        while position < end:
            part = self._find(file, offset + position)
            if part is None:  # it was not asked for: fetch it by itself
                part = self._part(file, offset + position, min(offset + end, offset + position + PART))
            skip = offset + position - part.begin
            content = result(part.content)[skip : skip + end - position]
            into[position : position + len(content)] = np.frombuffer(content, np.uint8)
            position += len(content)

    def close(self) -> None:
        """Cancel requests that have not begun."""
        for part in (part for step in self._steps for parts in step.values() for part in parts):
            part.content.cancel()
        self._threads.close()

    def _find(self, file: SourceFile, offset: int) -> Part | None:
        for step in self._steps:
            parts = step.get(file, ())
            number = bisect_right(parts, offset, key=lambda part: part.begin) - 1
            if number >= 0 and offset < parts[number].end:
                return parts[number]
        return None

    def _part(self, file: SourceFile, begin: int, end: int) -> Part:
        assert file.remote is not None
        if file not in self._open:
            self._open[file] = file.remote.open()
        self.fetched += file.remote.over_network(end - begin)
        return Part(begin, end, self._threads.submit(self._open[file], begin, end))


def _cut(ranges: Iterable[Range]) -> Iterator[Range]:
    """The requests for the ranges of a file: about equal parts of each joined range."""
    for begin, end in joined(ranges, NEAR):
        count = max(1, -(-(end - begin) // PART))
        bounds = [begin + (end - begin) * i // count for i in range(count + 1)]
        yield from itertools.pairwise(bounds)


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
    fetched: dict[SourceFile, list[tuple[int, int]]] = {}
    for region in (region for slab in job.transfer(Options().sizes.step) for region in slab.reads):
        place = job.sources(region.rank)
        if place is not None and place.file.remote is not None:
            fetched.setdefault(place.file, []).extend(
                joined([(at, at + n) for at, _, n in ranges_of(place, region)], GAP)
            )
    return sum(
        file.remote.over_network(end - begin)
        for file, ranges in fetched.items()
        for begin, end in joined(ranges, 0)
        if file.remote is not None
    )
