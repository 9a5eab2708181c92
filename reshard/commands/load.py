"""One rank's tensors in memory, or all of a checkpoint one after the other, read straight from it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from formats.errors import CheckpointError, refused
from formats.files.safetensors import tensor_bytes
from formats.notation.format_file import HUGGING_FACE, OWN
from reshard.mesh.plan import Degrees, make_plan
from reshard.move.jobs import Job, Options, TargetFile, TargetPlace
from reshard.move.mover import allocate, fill
from reshard.move.moves import jobs_of
from reshard.move.reading import Bytes, Reader
from reshard.move.slabs import Region
from reshard.placement.arrangement import Arrangement, arrangement_of
from reshard.placement.program_plan import plan_for
from reshard.source.opening import Access
from reshard.source.source import UNSPLIT, Source
from reshard.transforms.opening import open_any

if TYPE_CHECKING:
    import torch


def load_rank(source: Source, target: Arrangement, rank: int) -> dict[str, torch.Tensor]:
    """The tensors of ``rank`` by name, in its local shapes. Reads only the bytes that the rank owns."""
    tensors = _held(target, rank)
    rooms = {name: allocate(tensor_bytes(name, dtype, shape)) for name, (dtype, shape) in tensors.items()}
    memory = {TargetFile(Path(name), b"", data.size): data for name, data in rooms.items()}
    places = {rank: {file.path.as_posix(): TargetPlace(file, 0) for file in memory}}
    reader = Reader()
    try:
        for job in jobs_of(source, target, places, compare=False):
            place = job.target(rank)
            _load(source, job, reader, memory[place.file][place.offset :])
    finally:
        reader.close()
    return {name: _tensor(rooms[name], dtype, shape) for name, (dtype, shape) in tensors.items()}


def _held(target: Arrangement, rank: int) -> dict[str, tuple[str, tuple[int, ...]]]:
    """The dtypes and shapes of a rank's tensors, by name. Raises CheckpointError for a dtype that torch lacks."""
    from formats.torch_internals import TORCH_DTYPES

    tensors = {stored.name_on(rank): (stored.dtype, shape) for stored, shape in target.tensors_of(rank)}
    for name, (dtype, _) in tensors.items():
        if dtype not in TORCH_DTYPES:
            raise CheckpointError(f"tensor '{name}' is {dtype}, which torch does not have")
    return tensors


def _tensor(data: Bytes, dtype: str, shape: tuple[int, ...]) -> torch.Tensor:
    import torch

    from formats.torch_internals import TORCH_DTYPES

    if data.size == 0:
        return torch.empty(shape, dtype=TORCH_DTYPES[dtype])
    return torch.from_numpy(data).view(TORCH_DTYPES[dtype]).reshape(shape)


def _load(source: Source, job: Job, reader: Reader, data: Bytes) -> None:
    """Read what a job brings into a tensor."""
    for slab in job.transfer.slabs(Options().sizes.step):
        if source.is_remote:
            reader.request((job.source(region.rank), region) for region in slab.reads)
        blocks = [_memory(data, region) for region in slab.writes]
        fill(job, slab, reader, blocks)
        for region, block in zip(slab.writes, blocks, strict=True):
            for offset, at, length in region.ranges(0, region.nbytes) if region.rows.outer else ():
                data[offset : offset + length] = block.reshape(-1)[at : at + length]
        if source.is_remote:
            reader.ahead.end_step()


def _memory(data: Bytes, region: Region) -> Bytes:
    """The memory of a region: of the tensor ``data``, if it lies there in one piece."""
    if region.rows.outer:
        return allocate(region.nbytes).reshape(region.shape)
    begin = region.rows.offset + region.offset
    return data[begin : begin + region.nbytes].reshape(region.shape)


@dataclass(frozen=True)
class LoadRequest(Access, Degrees):
    """What ``load`` takes: a full checkpoint or one that is split to any degree, and the number of a rank."""

    source: str | Path = field(repr=False)  # a URL may have a password
    _: KW_ONLY
    rank: int = 0


def load(request: LoadRequest) -> dict[str, torch.Tensor]:
    """The tensors of one rank of a checkpoint. Reads only the bytes that it owns.

    Returns CPU tensors by name, in the rank's local shapes and the checkpoint's dtypes. Raises ReshardError.
    """
    request.mesh.check_ranks([request.rank])
    opened = open_any(request.source, request)
    tensors = load_rank(opened, arrangement_of(plan_for(opened.model, OWN, request), OWN), request.rank)
    opened.check_unchanged()
    return tensors


@dataclass(frozen=True)
class TensorsRequest(Access):
    """What ``tensors`` takes: a checkpoint in any form. ``format`` is that of the names and shapes."""

    source: str | Path = field(repr=False)  # a URL may have a password
    _: KW_ONLY
    format: str = HUGGING_FACE.name


def tensors(request: TensorsRequest) -> Iterator[tuple[str, torch.Tensor]]:
    """The names and tensors of the full checkpoint, one after the other, in the order in which the source has them.

    One tensor is in memory at a time, if the caller keeps none. Raises ReshardError, also while it goes on: copies on
    several ranks are compared, and a source must not change meanwhile.
    """
    if request.format != HUGGING_FACE.name:
        why, advice = "the tensors are those of the full checkpoint", "'reshard.load' gives one rank's"
        raise refused("format", request.format, why, advice=advice)
    opened = open_any(request.source, request)
    target = arrangement_of(make_plan(opened.model, UNSPLIT), HUGGING_FACE)
    kinds, nowhere = _held(target, 0), TargetPlace(TargetFile(Path(), b"", 0), 0)
    jobs = dict[str, list[Job]]()
    for job in jobs_of(opened, target, {0: dict.fromkeys(kinds, nowhere)}):
        jobs.setdefault(job.name, []).append(job)

    def stream() -> Iterator[tuple[str, torch.Tensor]]:
        reader = Reader()
        try:
            for name, parts in jobs.items():
                data = allocate(tensor_bytes(name, *kinds[name]))
                for job in parts:
                    _load(opened, job, reader, data[job.target(0).offset :])
                yield name, _tensor(data, *kinds[name])
        finally:
            reader.close()
        opened.check_unchanged()

    return stream()
