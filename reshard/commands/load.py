"""One rank's tensors in memory, or all of a checkpoint one after the other, read straight from it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import KW_ONLY, dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from reshard.formats.errors import CheckpointError, PlanError, ReshardError, SettingError, refused
from reshard.formats.files.layout import Layout
from reshard.formats.files.safetensors import tensor_bytes
from reshard.formats.notation.format import SOURCE_NAMES
from reshard.formats.notation.format_file import HUGGING_FACE, OWN, format_to_write
from reshard.mesh.plan import Degrees
from reshard.mesh.plan import rank_config as config_of
from reshard.move.engine import Steps, fill, requested
from reshard.move.jobs import ByteProgress, FilePlan, Job, Options, TargetPlace, no_progress
from reshard.move.moves import jobs_of
from reshard.move.reading import ByteArray, Reader
from reshard.move.slabs import LARGEST, Region, Slab, Slices
from reshard.placement.arrangement import Arrangement, arrangement_of
from reshard.placement.kept_fields import check_kept
from reshard.placement.program_plan import plan_for
from reshard.source.access import Access, Place
from reshard.source.source import Source
from reshard.source.written_names import rank_names
from reshard.store.selection import Weights
from reshard.store.threads import Shared, work_together
from reshard.system import Device, Taken, default
from reshard.transforms.opening import open_any
from reshard.transforms.tensors import ComputedFile

if TYPE_CHECKING:
    import torch


Tensors = Mapping[str, tuple[str, tuple[int, ...]]]
"""The dtypes and shapes of tensors, by name."""


def load_rank(
    source: Source,
    target: Arrangement,
    rank: int,
    device: str = "cpu",
    progress: ByteProgress = no_progress,
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


def _tensor(data: ByteArray, dtype: str, shape: tuple[int, ...]) -> torch.Tensor:
    import torch

    from reshard.formats.torch_internals import TORCH_DTYPES

    if data.size == 0:
        return torch.empty(shape, dtype=TORCH_DTYPES[dtype])
    return torch.from_numpy(data).view(TORCH_DTYPES[dtype]).reshape(shape)


def _load(source: Source, jobs: Iterable[Job], kinds: Tensors, take: Callable[[str, torch.Tensor], None]) -> None:
    """Load tensors, in a few threads; ``take`` is called with each when it is complete."""
    jobs, options = tuple(jobs), Options()
    memory = _memory({name: tensor_bytes(name, *kind) for name, kind in kinds.items()})
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


_TOGETHER = 64 << 20
"""Tensors of up to so many bytes share an array, which lives as long as one of them: numpy asks for huge pages only
from 4 MB on, and to clear small ones takes longer than to read what goes into them.
"""


def _memory(sizes: Mapping[str, int]) -> dict[str, ByteArray]:
    """Memory for tensors of these sizes, by name."""
    groups, nbytes = list[dict[str, slice]](), 0
    for name, size in sizes.items():
        if not groups or nbytes + size > _TOGETHER:
            groups.append({})
            nbytes = 0
        groups[-1][name] = slice(nbytes, nbytes + size)
        nbytes += -(-size // 64) * 64
    arrays = (np.empty(max(place.stop for place in group.values()), np.uint8) for group in groups)
    return {name: array[at] for array, group in zip(arrays, groups, strict=True) for name, at in group.items()}


def _fill(job: Job, slab: Slab, reader: Reader, memory: Mapping[str, ByteArray]) -> Iterator[tuple[str, int]]:
    """Fill the ranges of tensors that a slab writes, in place where they are contiguous; returns their names, and the
    bytes.
    """
    places, blocks = [job.target(region.rank) for region in slab.writes], list[ByteArray]()
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
class RankRequest(Access, Degrees):
    """A rank of a checkpoint.

    ``source``: a checkpoint, full or split to any degree: a folder, a Hub id, a URL, or a ``reshard.state_dict``.
    ``rank``: the number of a rank of ``pp`` x ``ep`` x ``tp``.
    ``format``: the format of the rank's names and shapes, as in ``split``.
    ``names``: without a ``format``, as in ``split``.
    """

    source: Place = field(repr=False)  # a URL may have a password
    _: KW_ONLY
    rank: int = 0
    format: str | None = None
    names: Literal["source", "published", "modules"] = "source"


@dataclass(frozen=True, kw_only=True)
class LoadRequest(RankRequest):
    """Arguments of ``load``.

    ``device``: torch's name of where the tensors go.
    ``progress``: True for a bar, or a function of the loaded bytes so far and the total.
    """

    device: Taken[Device, str] = default("cpu")
    progress: Taken[ByteProgress | bool, ByteProgress] = default(no_progress)


def load(request: LoadRequest) -> dict[str, torch.Tensor]:
    """The tensors of one rank of a checkpoint. Reads only the bytes that it owns.

    Returns tensors by name, in the rank's local shapes and the checkpoint's dtypes. Raises ReshardError.
    """
    device = _device(request.device)
    opened, target = _opened(request)
    tensors = load_rank(opened, target, request.rank, device, request.progress)
    opened.check_unchanged()
    return tensors


def _opened(request: RankRequest) -> tuple[Source, Arrangement]:
    """The source, and where the ranks have it. Raises ReshardError."""
    _check_rank(request)
    format = format_to_write(request.format)
    if format.files.is_distributed:
        raise refused("format", request.format, "its files are of no rank", advice="give the format of a rank's files")
    if format is not OWN and request.names != SOURCE_NAMES:
        raise refused("names", request.names, "it has names of its own", format=request.format)
    check_kept(request, format)
    opened = open_any(request.source, request)
    names = rank_names(opened, request.names).renamed if format is OWN else {}
    return opened, arrangement_of(plan_for(opened.model, format, request), format, names=names)


def _check_rank(request: RankRequest) -> None:
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


@dataclass(frozen=True, slots=True)
class Slice:
    """Bytes of a file that belong to a tensor of a rank: rows with equal distances. Distances are in bytes."""

    file: str | None
    """A path or an address; None for zeros, as of a padded vocabulary."""
    offset: int
    """The place of the first byte in the file."""
    size: int
    shape: tuple[int, ...]
    """The dimensions of these bytes; in the last one they are neighbours."""
    strides: tuple[int, ...]
    """The distances in the file."""
    name: str
    dtype: str
    """The tensor's, as safetensors names it."""
    tensor: tuple[int, ...]
    """The tensor's shape."""
    place: int
    """The place of the first byte in the tensor."""
    steps: tuple[int, ...]
    """The distances in the tensor."""


def slices(request: RankRequest) -> list[Slice]:
    """The bytes that a rank owns, in the order of the files, for programs that read by themselves. Reads no weights.

    A slice has at most 8 MB. Constants that a program's format adds are left out. Raises ReshardError, also if a tensor
    is computed.
    """
    opened, target = _opened(request)
    kinds, found = _tensors_of(target, request.rank), list[Slice]()
    for job in jobs_of(opened, target, _places(kinds, request.rank), compare=False):
        own, start = job.target(request.rank)
        for slab in job.route.slabs(LARGEST):
            for copy in slab.copies:
                blocks, file, base = [_block(slab.writes[copy.target], copy.target_slices)], None, 0
                if copy.source is not None:
                    blocks.append(_block(slab.reads[copy.source], copy.source_slices))
                    origin, base = job.source(slab.reads[copy.source].rank)
                    file, remote = str(origin.path), origin.remote
                    if remote is not None:
                        file = remote.address if origin.is_elsewhere and not isinstance(remote, ComputedFile) else ""
                if file == "" or copy.edit is not None:
                    raise PlanError(
                        f"tensor '{job.name}' is in no file as the rank has it",
                        "'reshard.load' gives it, and 'reshard split' writes it",
                    )
                for shape, (to, steps), *read in _even(blocks):
                    at, strides = read[0] if read else (0, ())
                    of = own.name, *kinds[own.name], start + to, steps
                    found.append(Slice(file, base + at, math.prod(shape), shape, strides, *of))
    return sorted(found, key=lambda each: (each.file or "", each.offset))


RegionRows = tuple[Region, Sequence[range]]


def _block(region: Region, slices: Slices) -> RegionRows:
    return region, [range(n)[of] for n, of in zip(region.shape, slices, strict=True)]


def _even(blocks: Sequence[RegionRows]) -> Iterator[tuple[Any, ...]]:
    """Cut a block that several regions have into parts of rows with equal distances in each of them.

    Yields the shape of a part, and for each region where the first byte is, and the distances.
    """
    shape, lies = tuple(map(len, blocks[0][1])), list[tuple[int, tuple[int, ...]]]()
    for region, spans in blocks:
        (offset, outer, inner), last = region.rows, len(shape) - 1
        flat = np.ravel_multi_index(np.ix_(*spans[:-1], spans[-1][:1]), region.shape) + region.offset
        row, at = np.divmod(flat, inner) if outer else (flat, flat)
        room = int((inner - at).min()) if outer else shape[-1]
        for size, stride in outer:
            row, index = np.divmod(row, size)
            at = at + index * stride
        first = int(at.flat[0])
        steps = [int(np.diff(at[(0,) * d], axis=0).flat[0]) if n > 1 else 0 for d, n in enumerate(shape[:-1])]
        even = first + sum(i * step for i, step in zip(np.ix_(*map(range, (*shape[:-1], 1))), (*steps, 1), strict=True))
        if room < shape[-1] or (at != even).any():
            d, cut = (last, room) if room < shape[-1] else next((d, n // 2) for d, n in enumerate(shape) if n > 1)
            for part in (slice(cut), slice(cut, None)):
                yield from _even([(region, [*spans[:d], spans[d][part], *spans[d + 1 :]]) for region, spans in blocks])
            return
        lies.append((offset + first, (*steps, 1)))
    yield shape, *lies


def rank_config(request: RankRequest) -> dict[str, Any]:
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
    ``format``: the format of the names and shapes.
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
    target = arrangement_of(opened.whole, HUGGING_FACE)
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
