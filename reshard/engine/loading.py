"""One rank's tensors in memory, read straight from a checkpoint."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
import torch
from safetensors.torch import _TYPES

from formats.files.safetensors import DTYPE_BITS
from reshard.engine.jobs import STEP, Job
from reshard.engine.move import check_slab
from reshard.engine.reading import Bytes, Reader
from reshard.engine.transfer import Slab
from reshard.engine.ways import way_between
from reshard.planning.plan import Plan
from reshard.storage.source import Source

TORCH_DTYPES: Mapping[str, torch.dtype] = _TYPES


def load_rank(source: Source, target: Plan, rank: int) -> dict[str, torch.Tensor]:
    """The tensors of ``rank`` by name, in its local shapes. Reads only the bytes that the rank owns."""
    reader = Reader()
    try:
        held = [name for name in source.names if rank in target.entries[name].layout.boxes]
        return {name: _load(source, target, rank, name, reader) for name in held}
    finally:
        reader.close()


def _room(nbytes: int) -> Bytes:
    return np.empty(nbytes, dtype=np.uint8)


def _load(source: Source, target: Plan, rank: int, name: str, reader: Reader) -> torch.Tensor:
    before, after = source.plan.entries[name], target.entries[name]
    shape = after.layout.boxes[rank].shape
    bits = DTYPE_BITS[before.dtype]
    data = np.empty(math.prod(shape) * bits // 8, dtype=np.uint8)
    places = source.places(name)
    way = way_between(before, after, places, frozenset({rank}), compare=False)
    job = Job(name, way, places, lambda _: None, data.size)
    for slab in way.slabs(STEP):
        if source.is_elsewhere:
            reader.request((job.source(region.rank), region) for region in slab.reads)
        blocks = {r.rank: data[r.offset : r.offset + r.nbytes].reshape(r.shape) for r in slab.writes}
        if slab.is_flat and not slab.checks:
            _read_flat(job, slab, reader, blocks)
        else:
            read = {r.rank: reader.read(job.source(r.rank), r, _room) for r in slab.reads}
            check_slab(job, slab, read)
            for copy in slab.copies:
                blocks[copy.target][copy.target_slices] = copy.block(read)
        if source.is_elsewhere:
            reader.ahead.done()
    dtype = TORCH_DTYPES[before.dtype]
    if data.size == 0:
        return torch.empty(shape, dtype=dtype)
    return torch.from_numpy(data).view(dtype).reshape(shape)


def _read_flat(job: Job, slab: Slab, reader: Reader, blocks: Mapping[int, Bytes]) -> None:
    """Read plain byte ranges directly into the tensor's memory."""
    starts = {region.rank: region.offset for region in slab.reads}
    for copy in slab.copies:
        block = blocks[copy.target][copy.target_slices]
        if copy.source is None:
            block[:] = 0
        else:
            place = job.source(copy.source)
            reader.fill_from(place, starts[copy.source] + copy.source_slices[0].start, block)
