"""Cuts jobs into steps, and hands the steps to processes. Nothing is read or written here."""

from __future__ import annotations

import itertools
import os
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

from reshard.move.jobs import Job, Sizes
from reshard.move.slabs import Copy, Slab, Way


@dataclass(frozen=True, slots=True)
class Window:
    """Bytes ``begin`` to ``end`` of a source's region, and the copies that want all of them."""

    begin: int
    end: int
    copies: Sequence[Copy]


def windows(copies: Sequence[Copy], size: int) -> Iterator[Window]:
    """The wanted parts of a source's region, of at most ``size`` bytes each."""
    held = [copy.source_slices[0] for copy in copies]
    bounds = sorted({bound for part in held for bound in (part.start, part.stop)})
    wanted: list[list[Copy]] = [[] for _ in bounds]
    for copy, part in zip(copies, held, strict=True):
        for i in range(bisect_left(bounds, part.start), bisect_left(bounds, part.stop)):
            wanted[i].append(copy)
    for (first, last), found in zip(itertools.pairwise(bounds), wanted, strict=False):
        if found:
            for begin in range(first, last, size):
                yield Window(begin, min(begin + size, last), found)


class Stretch:
    """Neighbouring jobs, from which processes draw steps. A pipe holds the number of the next step."""

    _LENGTH = 8
    _FEW = 256 << 20
    """The steps of a tensor of at most so many bytes are kept for the next tensor that moves in the same way."""

    def __init__(self, jobs: Sequence[Job], sizes: Sizes) -> None:
        self._jobs, self._sizes = jobs, sizes
        self._kept: Callable[[Way], Sequence[Slab]] = lru_cache(maxsize=32)(lambda way: tuple(way.slabs(sizes.step)))
        self._reads, self._writes = os.pipe()
        self._put(0)

    def draw(self) -> Iterator[Sequence[tuple[Job, Slab]]]:
        """The steps that this process takes; no other process takes them. Small tensors share a step."""
        drawn = self._next()
        for number, steps in enumerate(self._steps()):
            if number == drawn:
                yield list(steps)
                drawn = self._next()

    def _steps(self) -> Iterator[Iterable[tuple[Job, Slab]]]:
        for is_small, jobs in itertools.groupby(self._jobs, lambda job: job.is_small(self._sizes.small)):
            for together in _together(jobs, self._sizes.together) if is_small else ([job] for job in jobs):
                steps = ((job, slab) for job in together for slab in self._slabs(job))
                yield from [steps] if is_small else ([step] for step in steps)

    def _slabs(self, job: Job) -> Iterable[Slab]:
        return self._kept(job.transfer) if job.nbytes <= self._FEW else job.transfer.slabs(self._sizes.step)

    def _next(self) -> int:
        number = int.from_bytes(os.read(self._reads, self._LENGTH), "little")
        self._put(number + 1)
        return number

    def _put(self, number: int) -> None:
        os.write(self._writes, number.to_bytes(self._LENGTH, "little"))

    def close(self) -> None:
        """Close the pipe."""
        os.close(self._reads)
        os.close(self._writes)


def stretches_of(jobs: Sequence[Job], count: int, small: int) -> Iterator[Sequence[Job]]:
    """Cut a sequence of jobs into ``count`` parts of about equal work."""
    ends = list(itertools.accumulate(job.work(small) for job in jobs))
    total = ends[-1] if ends else 0
    cuts = [bisect_left(ends, total * i // count) for i in range(count)] + [len(jobs)]
    return (jobs[first:last] for first, last in itertools.pairwise(cuts))


def _together(jobs: Iterable[Job], most: int) -> Iterator[Sequence[Job]]:
    """Groups of small tensors that are moved together."""
    found: list[Job] = []
    room = most
    for job in jobs:
        found.append(job)
        room -= job.nbytes
        if room <= 0:
            yield found
            found, room = [], most
    if found:
        yield found
