"""One rank's tensors in memory, read straight from a checkpoint."""

from __future__ import annotations

from pathlib import Path

import torch

from formats.errors import CheckpointError
from formats.files.safetensors import tensor_bytes
from formats.torch_dtypes import TORCH_DTYPES
from reshard.move.blocks import fill, room
from reshard.move.jobs import Job, Options, TargetFile, TargetPlace
from reshard.move.moves import jobs_of
from reshard.move.reading import Bytes, Reader, ranges
from reshard.placement.arrangement import Arrangement
from reshard.source.source import Source


def load_rank(source: Source, target: Arrangement, rank: int) -> dict[str, torch.Tensor]:
    """The tensors of ``rank`` by name, in its local shapes. Reads only the bytes that the rank owns."""
    held = {stored.name_on(rank): (stored.dtype, shape) for stored, shape in target.held(rank)}
    for name, (dtype, _) in held.items():
        if dtype not in TORCH_DTYPES:
            raise CheckpointError(f"tensor '{name}' is {dtype}, which torch does not have")
    rooms = {name: room(tensor_bytes(name, dtype, shape)) for name, (dtype, shape) in held.items()}
    memory = {TargetFile(Path(name), b"", data.size): data for name, data in rooms.items()}
    places = {rank: {file.path.as_posix(): TargetPlace(file, 0) for file in memory}}
    reader = Reader()
    try:
        for job in jobs_of(source, target, places, compare=False):
            place = job.target(rank)
            _load(source, job, reader, memory[place.file], place)
    finally:
        reader.close()
    return {name: _tensor(rooms[name], dtype, shape) for name, (dtype, shape) in held.items()}


def _tensor(data: Bytes, dtype: str, shape: tuple[int, ...]) -> torch.Tensor:
    if data.size == 0:
        return torch.empty(shape, dtype=TORCH_DTYPES[dtype])
    return torch.from_numpy(data).view(TORCH_DTYPES[dtype]).reshape(shape)


def _load(source: Source, job: Job, reader: Reader, data: Bytes, place: TargetPlace) -> None:
    """Read what a job brings into a tensor, of which it has the part at ``place``."""
    for slab in job.transfer.slabs(Options().sizes.step):
        if source.is_elsewhere:
            reader.request((job.source(region.rank), region) for region in slab.reads)
        if place.rows is None:
            begins = {r.rank: place.offset + r.offset for r in slab.writes}
            blocks = {r.rank: data[begins[r.rank] : begins[r.rank] + r.nbytes].reshape(r.shape) for r in slab.writes}
            fill(job, slab, reader, blocks)
        else:
            blocks = {r.rank: room(r.nbytes).reshape(r.shape) for r in slab.writes}
            fill(job, slab, reader, blocks)
            for region in slab.writes:
                flat = blocks[region.rank].reshape(-1)
                for offset, at, length in ranges(place, region.offset, region.nbytes):
                    data[offset : offset + length] = flat[at : at + length]
        if source.is_elsewhere:
            reader.ahead.done()
