"""Live tensors as the blocks that are sent: views, without copies; and packing them into messages."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import torch

from formats.notation.axes import Run
from formats.torch_dtypes import TORCH_DTYPES
from reshard.live.routing import Part
from reshard.live.sides import Side
from reshard.mesh.plan import Layout
from reshard.move.elements import conversion
from reshard.placement.chunks import InChunks, in_two, stored_dims
from reshard.placement.common_dimensions import Groups
from reshard.placement.geometry import Geometry
from reshard.placement.stored import Placed

Tensors = Mapping[str, Sequence[torch.Tensor]]
"""A rank's tensors by the names of stored tensors; a live rank may have several parts of one."""


class _View(NamedTuple):
    """A block as a view of a tensor, in elements; ``room`` and ``packed`` are its offset and strides in a message."""

    part: Part
    name: str
    number: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    room: int
    packed: tuple[int, ...]


class Blocks:
    """The blocks of a message on one side, one after another. Views are found once, and no tensor is kept."""

    def __init__(self, parts: Sequence[Part], side: Side, *, sends: bool) -> None:
        self._parts, self._side, self._sends = parts, side, sends
        self._views: list[_View] | None = None

    def alike(self) -> Blocks:
        """The same for tensors with other strides."""
        return Blocks(self._parts, self._side, sends=self._sends)

    def pack(self, tensors: Tensors, room: torch.Tensor) -> None:
        """Fill ``room`` (bytes) with the blocks."""
        for _, view, block in self._on(tensors, room):
            block.copy_(view)

    def unpack(self, tensors: Tensors, room: torch.Tensor) -> None:
        """Copy the blocks from ``room`` (bytes) to where they belong."""
        for part, view, block in self._on(tensors, room):
            view.copy_(_converted(part, block, self._side.dtype(part.move.wanted.stored)))

    def _on(self, tensors: Tensors, room: torch.Tensor) -> Iterator[tuple[Part, torch.Tensor, torch.Tensor]]:
        """Each block: as a view of the rank's tensor, and of the message."""
        if self._views is None:
            self._views = list(self._found(tensors))
        dtype, typed = "", room
        for part, name, number, shape, stride, offset, at, packed in self._views:
            if part.move.dtype != dtype:
                dtype = part.move.dtype
                size = TORCH_DTYPES[dtype].itemsize
                typed = room[: len(room) // size * size].view(TORCH_DTYPES[dtype])
            own = tensors[name][number]
            view = own.as_strided(shape, stride, own.storage_offset() + offset)
            yield part, view, typed.as_strided(shape, packed, typed.storage_offset() + at)

    def _found(self, tensors: Tensors) -> Iterator[_View]:
        at = 0
        for part in self._parts:
            size = TORCH_DTYPES[part.move.dtype].itemsize
            placed, holder = (part.move.held, part.source) if self._sends else (part.move.wanted, part.target)
            name, number = base_of(self._side, placed, holder)
            first = tensors[name][number].storage_offset()
            for view in block_views(part, self._side, tensors, sends=self._sends):
                shape = tuple(view.shape)
                packed = tuple(math.prod(shape[place + 1 :]) for place in range(len(shape)))
                yield _View(
                    part,
                    name,
                    number,
                    shape,
                    view.stride(),
                    int(view.storage_offset()) - int(first),
                    at // size,
                    packed,
                )
                at += view.numel() * size


def block_views(part: Part, side: Side, tensors: Tensors, *, sends: bool) -> Iterator[torch.Tensor]:
    """The blocks of a part on one side, as views of the rank's own tensors: alike in number and shape on both sides."""
    move, way = part.move, part.move.way
    if sends:
        view = atom_view(side, move.held, part.source, tensors, way.groups, way.before)
        ranges = [[(span.source, span.length) for span in dim] for dim in part.block.spans]
    else:
        view = atom_view(side, move.wanted, part.target, tensors, way.groups, way.after)
        ranges = [[(span.target, span.length) for span in dim] for dim in part.block.spans]
    for product in itertools.product(*ranges):
        block = view
        for dim, (begin, length) in enumerate(product):
            if length != block.shape[dim]:
                block = block.narrow(dim, begin, length)
        yield block


def _converted(part: Part, block: torch.Tensor, stored: str) -> torch.Tensor:
    """What arrived, as the target stores it."""
    move, function = part.move, part.move.wanted.portion.function
    if move.dtype == stored and function is None:
        return block
    edit = conversion(move.atom.tensor, move.dtype, stored, function)
    raw = block.contiguous().view(torch.uint8).view(*block.shape, block.itemsize).cpu().numpy()
    return torch.from_numpy(edit(raw)).view(TORCH_DTYPES[stored]).view(block.shape).to(block.device)


def atom_view(
    side: Side, placed: Placed, holder: int, tensors: Tensors, groups: Groups, layout: Layout
) -> torch.Tensor:
    """An atom's part on a holder, as a view of the rank's own tensor, with a dimension for each of ``groups``."""
    geometry, (place, slot) = placed.stored.geometry, divmod(placed.number, len(placed.stored.geometry.portions))
    tensor = chunk_view(side, placed, holder, tensors)
    lengths = dict(zip(groups, layout.boxes[holder].shape, strict=True))
    if geometry.chunks is None:
        stack, lead, begin, own = _in_geometry(geometry, holder, place, slot)
    else:
        stack, lead, begin, own = _in_chunk(geometry, holder, place, slot)
    portion = geometry.portions[slot]
    if stack is not None:
        tensor = tensor.select(0, stack)
    if len(geometry.portions) > 1 and portion.counts:
        if portion.lead:
            tensor = _split(tensor, portion.dim, (lead, tensor.shape[portion.dim] // max(lead, 1)))
        tensor = tensor.narrow(portion.dim + bool(portion.lead), begin, own)
    elif len(geometry.portions) > 1:  # numbers, joined to a vector
        tensor = tensor.narrow(0, slot, 1).squeeze(0)
    order: list[tuple[int, ...]] = []
    at = 0
    for factors in stored_dims(geometry.portions, placed.number):
        blocks = [block for block in _in_stored_order(groups, portion.order) if block[0] in factors]
        order += blocks
        if len(blocks) == 1:
            at += 1
        elif blocks:
            tensor = _split(tensor, at, [lengths[block] for block in blocks])
            at += len(blocks)
        else:
            tensor = tensor.squeeze(at)
    if not portion.counts and tensor.dim() > len(order):  # a scalar with shape [1]
        tensor = tensor.reshape(())
    return tensor.permute([order.index(block) for block in groups])


def _split(tensor: torch.Tensor, dim: int, lengths: Sequence[int]) -> torch.Tensor:
    """A view with several dimensions in place of one."""
    return tensor.view(*tensor.shape[:dim], *lengths, *tensor.shape[dim + 1 :])


def _in_stored_order(groups: Groups, order: Sequence[int]) -> Groups:
    return tuple(sorted(groups, key=lambda block: order.index(block[0])))


def base_of(side: Side, placed: Placed, holder: int) -> tuple[str, int]:
    """The tensor of a holder's rank that has an atom: its name, and its number among those of this name."""
    if side.pieces is None:
        return placed.stored.name_on(holder), 0
    return placed.stored.name, side.pieces[placed.stored.name][holder].part


def chunk_view(side: Side, placed: Placed, holder: int, tensors: Tensors) -> torch.Tensor:
    """A stored tensor on a holder: all that its rank has, or, on a live side, the holder's chunk."""
    name, number = base_of(side, placed, holder)
    tensor = tensors[name][number]
    if side.pieces is None:
        return tensor
    piece = side.pieces[name][holder]
    for _ in range(piece.lead):
        tensor = tensor.select(0, 0)
    for dim, (begin, length) in enumerate(zip(piece.at, piece.shape, strict=True)):
        if length != tensor.shape[dim]:
            tensor = tensor.narrow(dim, begin, length)
    return tensor


def _in_geometry(geometry: Geometry, rank: int, place: int, slot: int) -> tuple[int | None, int, int, int]:
    """An atom's index in the rank's stack; of what is joined, the length before it, and its begin and length there."""
    slots, portions = len(geometry.portions), geometry.portions
    stack = sum(rank in geometry.layouts[i * slots].boxes for i in range(place)) if geometry.is_stack else None
    inner, lead = [], 1
    for number, portion in enumerate(portions):
        factors = stored_dims(portions, number)
        box = geometry.layouts[place * slots + number].boxes[rank]
        found = [math.prod(sum(run.length for run in box.dims[f]) for f in factors[d]) for d in range(len(factors))]
        if portion.lead and slots > 1:
            lead = found[portion.dim]
        inner.append(found[portion.dim + bool(portion.lead and slots > 1)] if found else 1)
    return stack, lead, sum(inner[:slot]), inner[slot]


def _in_chunk(geometry: InChunks, holder: int, place: int, slot: int) -> tuple[int | None, int, int, int]:
    """The same in a chunk."""
    chunk, portion = geometry.chunks[holder], geometry.portions[slot]
    stack = place - chunk.offset[0] if geometry.is_stack else None
    if len(geometry.portions) == 1 or not portion.counts:
        return stack, 1, 0, 1
    dim = portion.dim + geometry.is_stack
    begin, end, total = geometry.extent(place, slot)
    lead, inner = in_two(Run(chunk.offset[dim], chunk.shape[dim]), total)
    first = max(inner.offset, begin)
    return stack, lead.length, first - inner.offset, min(inner.end, end) - first
