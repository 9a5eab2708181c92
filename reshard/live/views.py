"""Live tensors as messages: the blocks of each, and what has changed in them since the push before.

A push of what changed: of each message the words that are other than at the push before, and where they are. A word is
as wide as the smallest element of the message. What is sent: the sum of the message as it is to be (of its words of 64
bits), the places of the words that have changed (int32), and these words. Where that is not smaller the message is sent
whole, and where nothing changed none is sent.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import torch

from reshard.formats.errors import LiveError
from reshard.formats.torch_internals import TORCH_DTYPES, bytes_in
from reshard.live.routing import MovedBox, Routes, View, view_of
from reshard.move.changes import Change

TensorViews = Mapping[str, Sequence[torch.Tensor]]
"""A rank's tensors by the names of stored tensors; a live rank may have several parts of one."""

_SUM, _PLACE = 8, 4
"""Bytes of the sum, and of a place."""
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Parcel:
    """The blocks that go from one rank to another in a step, one after another, as one of the two has them.

    ``nbytes`` are all their bytes, ``word`` is the dtype of a word; None if the target stores something else than what
    is sent: then all is sent. Views of tensors are found once, and no tensor is kept. ``memory`` is for whole messages:
    all parcels of a rank use it, one after another.
    """

    def __init__(
        self, step: int, peer: int, parts: Sequence[MovedBox], routes: Routes, memory: dict[str, torch.Tensor], *,
        sends: bool,
    ) -> None:  # fmt: skip
        self.step, self.peer, self.nbytes = step, peer, sum(part.nbytes for part in parts)
        self._parts, self._sends, self._memory = parts, sends, memory
        self._side = routes.source if sends else routes.target
        self._views: list[tuple[MovedBox, View, int]] | None = None
        self._sent: torch.Tensor | None = None
        is_plain = all(part.move.dtype == part.move.dst.stored.dtype and not part.function for part in parts)
        self.word = _WORDS[min(TORCH_DTYPES[part.move.dtype].itemsize for part in parts)] if is_plain else None

    def size(self, tensors: TensorViews) -> int:
        """The number of bytes to send to a receiver that has the last push."""
        if self._sent is None or self.word is None:
            return self.nbytes
        count = int(torch.count_nonzero(self._compared(tensors)[1]))
        return min(_SUM + count * (_PLACE + self.word.itemsize), self.nbytes) if count else 0

    def pack(self, tensors: TensorViews, keep: bool, room: torch.Tensor) -> None:
        """Fill ``room`` (bytes) with all blocks, or with what has changed if it is smaller; ``keep`` a copy of all."""
        if len(room) == self.nbytes:
            for _, view, block in self._blocks(tensors, room):
                block.copy_(view)
            if not keep or self.word is None:
                self._sent = None
            else:
                self._sent = room.new_zeros(-(-self.nbytes // 8) * 8) if self._sent is None else self._sent
                self._sent[: self.nbytes] = room
            return
        assert self._sent is not None and self.word is not None
        new, differs = self._compared(tensors)
        places = torch.nonzero(differs).flatten()
        changes = (new.view(torch.int64).sum()[None], places.to(torch.int32), new.view(self.word)[places])
        content = torch.cat([part.view(torch.uint8) for part in changes])
        if len(room) != len(content):
            raise LiveError("the weights changed while they were pushed", "push again")
        room.copy_(content)
        self._sent.copy_(new)

    def unpack(self, tensors: TensorViews, room: torch.Tensor) -> None:
        """Copy the blocks from ``room`` (bytes) to their places. Blocks that are not in it keep their values.

        Raises LiveError if the result is not what was meant.
        """
        if len(room) < self.nbytes:
            assert self.word is not None
            begin = _SUM + (len(room) - _SUM) // (_PLACE + self.word.itemsize) * _PLACE
            places, new = room[_SUM:begin].view(torch.int32), self._whole(tensors)
            new.view(self.word)[places.to(torch.int64)] = room[begin:].clone().view(self.word)  # aligned anew
            if not new.view(torch.int64).sum().equal(room[:_SUM].view(torch.int64)[0]):
                raise LiveError("its weights are not those of the push before: a push of changes does not fit them")
            room = new
        for part, view, block in self._blocks(tensors, room):
            view.copy_(_converted(part, block, part.move.dst.stored.dtype))

    def _blocks(
        self, tensors: TensorViews, room: torch.Tensor
    ) -> Iterator[tuple[MovedBox, torch.Tensor, torch.Tensor]]:
        """Each block: as a view of the rank's tensor, which may have any strides, and of the message."""
        if self._views is None:
            self._views, begin = [], 0
            for part in self._parts:
                view = view_of(part, self._side, sends=self._sends)
                tensor, steps = tensors[view.name][view.number], zip(view.shape, view.stride, strict=True)
                strides = tuple(_moved(tensor, step) if size > 1 else 0 for size, step in steps)
                view = view._replace(stride=strides, offset=_moved(tensor, view.offset))
                self._views.append((part, view, begin * part.box.numel // max(part.nbytes, 1)))
                begin += part.nbytes
        dtype, typed = "", room
        for part, view, at in self._views:
            if part.move.dtype != dtype:
                dtype = part.move.dtype
                size = TORCH_DTYPES[dtype].itemsize
                typed = room[: len(room) // size * size].view(TORCH_DTYPES[dtype])
            tensor = tensors[view.name][view.number]
            there = tensor.as_strided(view.shape, view.stride, tensor.storage_offset() + view.offset)
            yield part, there, typed[at : at + part.box.numel].view(view.shape)

    def _compared(self, tensors: TensorViews) -> tuple[torch.Tensor, torch.Tensor]:
        """The whole message, and which of its words are other than before."""
        assert self._sent is not None and self.word is not None
        new = self._whole(tensors)
        out = self._room("differs", len(new) // self.word.itemsize, new.device).view(torch.bool)
        return new, torch.ne(new.view(self.word), self._sent.view(self.word), out=out)

    def _whole(self, tensors: TensorViews) -> torch.Tensor:
        """The whole message, and zeros up to a multiple of 8 bytes."""
        room = self._room("whole", -(-self.nbytes // 8) * 8, next(iter(tensors.values()))[0].device)
        room[self.nbytes :].zero_()
        for _, view, block in self._blocks(tensors, room[: self.nbytes]):
            block.copy_(view)
        return room

    def _room(self, use: str, nbytes: int, device: torch.device) -> torch.Tensor:
        if use not in self._memory or len(self._memory[use]) < nbytes:
            self._memory[use] = torch.empty(nbytes, dtype=torch.uint8, device=device)
        return self._memory[use][:nbytes]


def _moved(tensor: torch.Tensor, elements: int) -> int:
    """Return the distance in memory, in elements, from a tensor's first element to the element of this number."""
    index = np.unravel_index(elements, tensor.shape)
    return sum(int(place) * stride for place, stride in zip(index, tensor.stride(), strict=True))


def _converted(part: MovedBox, block: torch.Tensor, stored: str) -> torch.Tensor:
    """Convert a received block to the form in which the target stores it."""
    move, function = part.move, part.function
    if move.dtype == stored and function is None:
        return block
    edit = Change(move.atom.tensor, move.dtype, stored, function).elements()
    raw = bytes_in(block.contiguous()).view(*block.shape, block.itemsize).cpu().numpy()
    return torch.from_numpy(edit(raw)).view(TORCH_DTYPES[stored]).view(block.shape).to(block.device)
