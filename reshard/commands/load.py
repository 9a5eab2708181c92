"""One rank's tensors in memory, or all of a checkpoint one after the other, read straight from it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import KW_ONLY, dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from reshard.formats.errors import CheckpointError, ReshardError, SettingError, refused
from reshard.formats.files.layout import Layout
from reshard.formats.files.safetensors import tensor_bytes
from reshard.formats.notation.format_file import HUGGING_FACE, OWN, format_to_write
from reshard.mesh.plan import Degrees, make_plan
from reshard.mesh.plan import rank_config as config_of
from reshard.move.engine import Steps, fill, requested
from reshard.move.jobs import FilePlan, Job, Options, Progress, TargetPlace, no_progress
from reshard.move.moves import jobs_of
from reshard.move.reading import Bytes, Reader
from reshard.move.slabs import Slab
from reshard.placement.arrangement import Arrangement, arrangement_of
from reshard.placement.program_plan import check_kept, plan_for
from reshard.source.opening import Access, Place
from reshard.source.source import UNSPLIT, Source
from reshard.store.selection import Weights
from reshard.store.threads import Shared, work_together
from reshard.system import Device, Taken, default
from reshard.transforms.opening import open_any

if TYPE_CHECKING:
    import torch


Tensors = Mapping[str, tuple[str, tuple[int, ...]]]
"""The dtypes and shapes of tensors, by name."""


def load_rank(
    source: Source,
    target: Arrangement,
    rank: int,
    device: str = "cpu",
    progress: Progress = no_progress,
) -> dict[str, torch.Tensor]:
    """The tensors of ``rank`` by name, in its local shapes. Reads only the bytes that the rank owns."""
    loaded: dict[str, torch.Tensor] = {}
    kinds = _tensors_of(target, rank)
    sizes = {name: tensor_bytes(name, dtype, shape) for name, (dtype, shape) in kinds.items()}
    total, nbytes = sum(sizes.values()), 0

    def take(name: str, tensor: torch.Tensor) -> None:
        nonlocal nbytes
        loaded[name] = tensor.to(device)
        nbytes += sizes[name]
        progress(nbytes, total)

    fixed = target.fixed_of(rank, source.constants if source.format.name == target.format.name else {})
    for name, content in fixed.items():
        take(name, _tensor(np.frombuffer(bytearray(content), np.uint8), *kinds[name]))
    others = {name: kind for name, kind in kinds.items() if name not in fixed}
    _load(source, jobs_of(source, target, _places(kinds, rank), compare=False), others, take)
    return {name: loaded[name] for name in kinds}


def _tensors_of(target: Arrangement, rank: int) -> Tensors:
    """The dtypes and shapes of a rank's tensors, by name. Raises CheckpointError for a dtype that torch lacks."""
    from reshard.formats.torch_internals import TORCH_DTYPES

    tensors = {stored.name_on(rank): (stored.dtype, shape) for stored, shape in target.tensors_of(rank)}
    for name, (dtype, _) in tensors.items():
        if dtype not in TORCH_DTYPES:
            raise CheckpointError(f"tensor '{name}' is {dtype}, which torch does not have")
    return tensors


def _places(kinds: Tensors, rank: int) -> dict[int, dict[str, TargetPlace]]:
    """Each tensor as if it were a file of its own."""
    return {rank: {name: TargetPlace(FilePlan(name, rank, Layout(0)), 0) for name in kinds}}


def _tensor(data: Bytes, dtype: str, shape: tuple[int, ...]) -> torch.Tensor:
    import torch

    from reshard.formats.torch_internals import TORCH_DTYPES

    if data.size == 0:
        return torch.empty(shape, dtype=TORCH_DTYPES[dtype])
    return torch.from_numpy(data).view(TORCH_DTYPES[dtype]).reshape(shape)


def _load(source: Source, jobs: Iterable[Job], kinds: Tensors, take: Callable[[str, torch.Tensor], None]) -> None:
    """Load tensors, in a few threads; ``take`` is called with each when it is complete."""
    jobs, options = tuple(jobs), Options()
    memory = {name: np.empty(tensor_bytes(name, *kind), np.uint8) for name, kind in kinds.items()}
    missing = {name: data.size for name, data in memory.items()}
    steps = Steps(jobs, options.sizes)
    drawn = Shared(group for group in steps.left(range(len(jobs)), lambda step: True))

    def carry_out(_: int, report: Callable[[Iterable[tuple[str, int]]], None]) -> None:
        reader = Reader()
        try:
            for group in requested(drawn, reader) if source.is_remote else drawn:
                report([part for job, slab, _ in group for part in _fill(job, slab, reader, memory)])
        finally:
            reader.close()

    def add(parts: Iterable[tuple[str, int]]) -> None:
        for name, nbytes in parts:
            missing[name] -= nbytes
            if not missing[name]:
                take(name, _tensor(memory.pop(name), *kinds[name]))

    add([(name, 0) for name, size in missing.items() if size == 0])
    work_together(max(1, min(options.threads, sum(missing.values()) // options.sizes.step)), carry_out, add)


def _fill(job: Job, slab: Slab, reader: Reader, memory: Mapping[str, Bytes]) -> Iterator[tuple[str, int]]:
    """Fill the ranges of tensors that a slab writes, in place where they are contiguous; returns their names, and the
    bytes.
    """
    places, blocks = [job.target(region.rank) for region in slab.writes], list[Bytes]()
    data = [memory[place.file.name][place.offset :] for place in places]
    for tensor, region in zip(data, slab.writes, strict=True):
        begin = region.rows.offset + region.offset
        block = np.empty(region.nbytes, np.uint8) if region.rows.outer else tensor[begin : begin + region.nbytes]
        blocks.append(block.reshape(region.shape))
    fill(job, slab, reader.fill, blocks)
    for place, tensor, region, block in zip(places, data, slab.writes, blocks, strict=True):
        for offset, at, length in region.ranges(0, region.nbytes) if region.rows.outer else ():
            tensor[offset : offset + length] = block.reshape(-1)[at : at + length]
        yield place.file.name, region.nbytes


def _device(name: str) -> str:
    """The name of a device that torch has. Raises SettingError."""
    import torch

    try:
        torch.empty(0, device=name)
    except (RuntimeError, AssertionError) as error:
        raise refused("device", name, str(error).splitlines()[0]) from None
    return name


@dataclass(frozen=True)
class LoadRequest(Access, Degrees):
    """Arguments of ``load``.

    ``source``: a checkpoint, full or split to any degree: a folder, a Hub id, a URL, or a ``reshard.state_dict``.
    ``rank``: the number of a rank of ``pp`` x ``ep`` x ``tp``.
    ``format``: that of the rank's names and shapes, as in ``split``.
    ``device``: torch's name of where the tensors go.
    ``progress``: True shows a bar. A function is called with the loaded bytes so far, and the total.
    """

    source: Place = field(repr=False)  # a URL may have a password
    _: KW_ONLY
    rank: int = 0
    format: str | None = None
    device: Taken[Device, str] = default("cpu")
    progress: Taken[Progress | bool, Progress] = default(no_progress)


def load(request: LoadRequest) -> dict[str, torch.Tensor]:
    """The tensors of one rank of a checkpoint. Reads only the bytes that it owns.

    Returns tensors by name, in the rank's local shapes and the checkpoint's dtypes. Raises ReshardError.
    """
    _check_rank(request)
    device, format = _device(request.device), format_to_write(request.format)
    if format.files.is_distributed:
        raise refused("format", request.format, "its files are of no rank", advice="give the format of a rank's files")
    check_kept(request, format)
    opened = open_any(request.source, request)
    target = arrangement_of(plan_for(opened.model, format, request), format)
    tensors = load_rank(opened, target, request.rank, device, request.progress)
    opened.check_unchanged()
    return tensors


def _check_rank(request: LoadRequest) -> None:
    """Raise SettingError for a rank that the mesh does not have, with the degrees of the source if it has that rank."""
    try:
        request.mesh.check_ranks([request.rank])
    except SettingError as error:
        with suppress(ReshardError):  # this is about the rank
            mesh = open_any(request.source, request, Weights.HEADERS).plan.mesh
            if 0 <= request.rank < mesh.size:
                same = {"same_ranks": True} if mesh.same_ranks else {}
                ways = (dict(mesh.degrees) | same,)
                error = SettingError(replace(error.refusal, instead=ways, advice="the source is split so"))
        raise error from None


def rank_config(request: LoadRequest) -> dict[str, Any]:
    """Return the ``config.json`` of one rank: the checkpoint's, with the sizes of the tensors that ``load`` returns.

    Reads no weights. Raises ReshardError.
    """
    _check_rank(request)
    if request.format is not None:
        raise refused("format", request.format, "ranks of programs read the config.json of the whole model")
    return config_of(plan_for(open_any(request.source, request).model, OWN, request), request.rank)


@dataclass(frozen=True)
class TensorsRequest(Access):
    """Arguments of ``tensors``.

    ``source``: a checkpoint in any form: a folder, a Hub id, a URL, or what ``reshard.state_dict`` gave.
    ``format``: that of the names and shapes.
    """

    source: Place = field(repr=False)  # a URL may have a password
    _: KW_ONLY
    format: str = HUGGING_FACE.name


def tensors(request: TensorsRequest) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the names and tensors of the full checkpoint, one after the other, in the source's order.

    One tensor is in memory at a time, if the caller keeps none. Raises ReshardError, also while it goes on: copies on
    several ranks are compared, and a source must not change meanwhile.
    """
    if request.format != HUGGING_FACE.name:
        why, advice = "the tensors are those of the full checkpoint", "'reshard.load' gives one rank's"
        raise refused("format", request.format, why, advice=advice)
    opened = open_any(request.source, request)
    target = arrangement_of(make_plan(opened.model, UNSPLIT), HUGGING_FACE)
    kinds, jobs = _tensors_of(target, 0), dict[str, list[Job]]()
    for job in jobs_of(opened, target, _places(kinds, 0)):
        jobs.setdefault(job.name, []).append(job)

    def stream() -> Iterator[tuple[str, torch.Tensor]]:
        loaded: list[tuple[str, torch.Tensor]] = []
        for name, parts in jobs.items():
            _load(opened, parts, {name: kinds[name]}, lambda *tensor: loaded.append(tensor))
            yield loaded.pop()
        opened.check_unchanged()

    return stream()
