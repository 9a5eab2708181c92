"""Fills what a slab writes in memory: for one who wants the bytes and no file."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from reshard.move.jobs import Job
from reshard.move.mover import check_slab
from reshard.move.reading import Bytes, Reader
from reshard.move.slabs import Slab


def room(nbytes: int) -> Bytes:
    """A new buffer."""
    return np.empty(nbytes, dtype=np.uint8)


def fill(job: Job, slab: Slab, reader: Reader, blocks: Sequence[Bytes]) -> None:
    """Fill the regions that a slab writes. Raises CheckpointError, MismatchError."""
    if slab.is_flat and not slab.checks:
        _read_flat(job, slab, reader, blocks)
        return
    read = [reader.read(job.source(region.rank), region, room) for region in slab.reads]
    check_slab(job, slab, read)
    for copy in slab.copies:
        blocks[copy.target][copy.target_slices] = copy.block(read)


def _read_flat(job: Job, slab: Slab, reader: Reader, blocks: Sequence[Bytes]) -> None:
    """Read plain byte ranges directly into the memory."""
    for copy in slab.copies:
        block = blocks[copy.target][copy.target_slices]
        if copy.source is None:
            block[:] = 0
        else:
            region = slab.reads[copy.source]
            place = job.source(region.rank)
            for offset, at, length in region.ranges(copy.source_slices[0].start, block.size):
                reader.fill(block[at : at + length], place.file, place.offset + offset)
