"""The elements of a checkpoint in Hugging Face's order, piece by piece, in whatever form it is stored.

The jobs are those of a merge (``reshard.move.moves``). Here their bytes are handed on and not written. Two checkpoints
are taken apart into the same atoms, so that the pieces of one stand beside those of the other.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np

from formats.notation.format_file import HUGGING_FACE
from reshard.mesh.plan import make_plan
from reshard.move.jobs import Job, TargetFile, TargetPlace
from reshard.move.mover import fill, room
from reshard.move.moves import jobs_of
from reshard.move.reading import Bytes, Reader
from reshard.move.slabs import Rows, Slab
from reshard.placement.arrangement import arrangement_of
from reshard.placement.portions import Taken
from reshard.source.source import UNSPLIT, Source

PIECE = 1 << 19
"""Bytes of each side that are compared at a time: both stay in a processor's cache."""

_STEP = 8 << 20


Jobs = Mapping[str, Mapping[Rows, Job]]
"""The jobs that bring each of Hugging Face's tensors into memory, by what they bring of it."""


def jobs_of_both(a: Source, b: Source) -> tuple[Jobs, Jobs]:
    """The jobs of two checkpoints, whose tensors of equal names and shapes are taken apart alike.

    Raises PlanError if a format's order cannot be expressed in the parts of the other's.
    """
    own, other = _taken(a), _taken(b)
    return _jobs(a, [own, other]), _jobs(b, [other, own])


def _taken(source: Source) -> Mapping[str, tuple[tuple[int, ...], Taken]]:
    """How a checkpoint takes each tensor apart, by the name, with the tensor's shape."""
    pairs = zip(source.unsplit.tensors, source.plan.model.tensors, strict=True)
    taken = source.arrangement.taken
    return {full.name: (full.kind.shape, taken[held.kind]) for full, held in pairs}


def _jobs(source: Source, wanted: Iterable[Mapping[str, tuple[tuple[int, ...], Taken]]]) -> Jobs:
    target, nothing = arrangement_of(make_plan(source.unsplit, UNSPLIT, padding={}), HUGGING_FACE), ((), ())
    for taken in wanted:
        alike = ((tensor.kind, taken.get(tensor.name, nothing)) for tensor in target.plan.model.tensors)
        target = target.refined((kind, parts) for kind, (shape, parts) in alike if shape == kind.shape)
    places = {tensor.name: TargetPlace(TargetFile(Path(tensor.name), b"", 0), 0) for tensor in source.unsplit.tensors}
    found: dict[str, dict[Rows, Job]] = {name: {} for name in places}
    for job in jobs_of(source, target, {0: places}):
        (rows,) = job.transfer.written
        found[job.name][rows._replace(offset=job.target(0).offset + rows.offset)] = job
    return found


class Side:
    """Reads the pieces of a checkpoint's tensors, in one thread."""

    def __init__(self, source: Source) -> None:
        self._is_elsewhere, self._reader, self._buffer = source.is_elsewhere, Reader(), room(PIECE)

    def close(self) -> None:
        """Close the files."""
        self._reader.close()

    def pieces(self, job: Job) -> Iterator[Bytes]:
        """The bytes of an atom in Hugging Face's order; each piece is valid until the next is asked for."""
        at = 0
        for slab in job.transfer.slabs(_STEP):
            if not slab.writes:
                continue
            if slab.writes[0].offset != at:
                raise RuntimeError(f"tensor '{job.name}' does not come in order")
            at += slab.writes[0].nbytes
            if self._is_elsewhere:
                self._reader.request((job.source(region.rank), region) for region in slab.reads)
            yield from self._flat(job, slab) if slab.is_flat and not slab.checks else self._block(job, slab)
            if self._is_elsewhere:
                self._reader.ahead.done()

    def _flat(self, job: Job, slab: Slab) -> Iterator[Bytes]:
        at = 0
        for copy in slab.copies:
            part = copy.target_slices[0]
            if part.start != at:
                raise RuntimeError(f"tensor '{job.name}' does not come in order")
            at = part.stop
            for begin in range(0, part.stop - part.start, PIECE):
                data = self._buffer[: min(PIECE, part.stop - part.start - begin)]
                if copy.source is None:
                    data[:] = 0
                else:
                    region = slab.reads[copy.source]
                    place = job.source(region.rank)
                    for offset, first, length in region.ranges(copy.source_slices[0].start + begin, data.size):
                        self._reader.fill(data[first : first + length], place.file, place.offset + offset)
                yield data

    def _block(self, job: Job, slab: Slab) -> Iterator[Bytes]:
        (region,) = slab.writes
        block: Bytes = np.empty(region.shape, np.uint8)
        fill(job, slab, self._reader, [block])
        yield block.reshape(-1)


class Pair(NamedTuple):
    """The same bytes of a tensor on both sides, from byte ``begin`` of an atom on."""

    begin: int
    left: Bytes
    right: Bytes


def side_by_side(a: Iterator[Bytes], b: Iterator[Bytes]) -> Iterator[Pair]:
    """The pieces of an atom on both sides, cut alike."""
    left = right = room(0)
    begin = 0
    while True:
        left, right = left if left.size else next(a, left), right if right.size else next(b, right)
        count = min(left.size, right.size)
        if not count:
            if left.size or right.size:
                raise RuntimeError("one side of a tensor is shorter")
            return
        yield Pair(begin, left[:count], right[:count])
        left, right, begin = left[count:], right[count:], begin + count
