"""Live tensors as the blocks that are sent: views, without copies; packing them into messages, whole or what changed.

A push of what changed: of each message the words that are other than at the push before, and where they are. A word is
as wide as the smallest element of the message. What is sent: two numbers of 64 bits, the sum of the message as it is to
be (of its 64-bit words) and how many words have changed; these, padded to 8 bytes; their places (int32). Where that is
not smaller the message is sent whole, and where nothing changed none is sent.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch

from formats.errors import LiveError
from formats.torch_internals import TORCH_DTYPES
from reshard.live.routing import Part, View, view_of
from reshard.live.sides import Side
from reshard.move.moves import conversion

Tensors = Mapping[str, Sequence[torch.Tensor]]
"""A rank's tensors by the names of stored tensors; a live rank may have several parts of one."""


class Blocks:
    """The blocks of a message on one side, one after another. Views are found once, and no tensor is kept."""

    def __init__(self, parts: Sequence[Part], side: Side, *, sends: bool) -> None:
        self._parts, self._side, self._sends = parts, side, sends
        self._views: list[tuple[Part, View, int]] | None = None

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
            view.copy_(_converted(part, block, self._side.dtype(part.move.dst.stored)))

    def _on(self, tensors: Tensors, room: torch.Tensor) -> Iterator[tuple[Part, torch.Tensor, torch.Tensor]]:
        """Each block: as a view of the rank's tensor, and of the message."""
        if self._views is None:
            self._views = list(self._located(tensors))
        dtype, typed = "", room
        for part, view, at in self._views:
            if part.move.dtype != dtype:
                dtype = part.move.dtype
                size = TORCH_DTYPES[dtype].itemsize
                typed = room[: len(room) // size * size].view(TORCH_DTYPES[dtype])
            tensor = tensors[view.name][view.number]
            there = tensor.as_strided(view.shape, view.stride, tensor.storage_offset() + view.offset)
            yield part, there, typed[at : at + part.box.numel].view(view.shape)

    def _located(self, tensors: Tensors) -> Iterator[tuple[Part, View, int]]:
        """Each part, its view of tensors that may have any strides, and its first element in the message."""
        begin = 0
        for part in self._parts:
            view = view_of(part, self._side, sends=self._sends)
            tensor = tensors[view.name][view.number]
            strides = (
                _moved(tensor, step) if size > 1 else 0 for size, step in zip(view.shape, view.stride, strict=True)
            )
            view = view._replace(stride=tuple(strides), offset=_moved(tensor, view.offset))
            yield part, view, begin * part.box.numel // max(part.nbytes, 1)
            begin += part.nbytes


def _moved(tensor: torch.Tensor, elements: int) -> int:
    """How far it is in memory from a tensor's first element to that of a number, in elements."""
    distance = 0
    for size, stride in zip(reversed(tensor.shape), reversed(tensor.stride()), strict=True):
        elements, index = divmod(elements, size)
        distance += index * stride
    return distance


def _converted(part: Part, block: torch.Tensor, stored: str) -> torch.Tensor:
    """What arrived, as the target stores it."""
    move, function = part.move, part.move.dst.portion.function
    if move.dtype == stored and function is None:
        return block
    edit = conversion(move.atom.tensor, move.dtype, stored, function)
    raw = block.contiguous().view(torch.uint8).view(*block.shape, block.itemsize).cpu().numpy()
    return torch.from_numpy(edit(raw)).view(TORCH_DTYPES[stored]).view(block.shape).to(block.device)


_HEAD = 16
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def word_size(parts: Sequence[Part], target: Side) -> int | None:
    """The bytes of a word; None if the target stores something else than what is sent: then all is sent."""
    plain = all(
        part.move.dtype == target.dtype(part.move.dst.stored) and part.move.dst.portion.function is None
        for part in parts
    )
    return min(TORCH_DTYPES[part.move.dtype].itemsize for part in parts) if plain else None


class Memory:
    """Memory for whole messages, which is used again for each."""

    def __init__(self) -> None:
        self._rooms: dict[str, torch.Tensor] = {}

    def room(self, use: str, nbytes: int, device: torch.device) -> torch.Tensor:
        """``nbytes`` bytes, and zeros up to a multiple of 8."""
        size = -(-nbytes // 8) * 8
        if use not in self._rooms or len(self._rooms[use]) < size:
            self._rooms[use] = torch.empty(size, dtype=torch.uint8, device=device)
        room = self._rooms[use][:size]
        room[nbytes:].zero_()
        return room


class Changes:
    """What changes in one message of ``nbytes`` (``blocks`` on this side, in words of ``word`` bytes)."""

    def __init__(self, blocks: Blocks, nbytes: int, word: int, memory: Memory) -> None:
        self._blocks, self._nbytes, self._word, self._dtype = blocks, nbytes, word, _WORDS[word]
        self._memory = memory
        self._previous = blocks.alike()

    def size(self, tensors: Tensors, previous: Tensors) -> int:
        """The bytes to send, given what this rank had at the push before."""
        count = int(torch.count_nonzero(self._compared(tensors, previous)[1]))
        return min(self._places(count) + 4 * count, self._nbytes) if count else 0

    def pack(self, tensors: Tensors, previous: Tensors, room: torch.Tensor) -> None:
        """Fill ``room``, which has the bytes of ``size``."""
        new, wrong = self._compared(tensors, previous)
        places = torch.nonzero(wrong).flatten()
        count, begin = len(places), self._places(len(places))
        if len(room) != begin + 4 * count:
            raise LiveError("the weights changed while they were pushed", "push again")
        room[:begin].zero_()
        room[:_HEAD].view(torch.int64).copy_(torch.stack([_sum(new), places.new_tensor(count)]))
        room[_HEAD : _HEAD + self._word * count].view(self._dtype).copy_(new.view(self._dtype)[places])
        room[begin:].view(torch.int32).copy_(places)

    def unpack(self, tensors: Tensors, room: torch.Tensor) -> None:
        """Change ``tensors`` as ``room`` says. Raises LiveError if the result is not what was meant."""
        total, count = room[:_HEAD].view(torch.int64).tolist()
        begin, new = self._places(count), self._packed(tensors, self._blocks, "new")
        values = room[_HEAD : _HEAD + self._word * count].view(self._dtype)
        new.view(self._dtype)[room[begin : begin + 4 * count].view(torch.int32).to(torch.int64)] = values
        if int(_sum(new)) != total:
            raise LiveError("its weights are not those of the push before: a push of what changed does not fit them")
        self._blocks.unpack(tensors, new)

    def _compared(self, tensors: Tensors, previous: Tensors) -> tuple[torch.Tensor, torch.Tensor]:
        """The whole message, and which of its words are other than before."""
        new, old = self._packed(tensors, self._blocks, "new"), self._packed(previous, self._previous, "old")
        out = self._memory.room("wrong", len(new) // self._word, new.device)[: len(new) // self._word].view(torch.bool)
        return new, torch.ne(new.view(self._dtype), old.view(self._dtype), out=out)

    def _packed(self, tensors: Tensors, blocks: Blocks, use: str) -> torch.Tensor:
        """The whole message, and zeros up to a multiple of 8 bytes."""
        room = self._memory.room(use, self._nbytes, next(iter(tensors.values()))[0].device)
        blocks.pack(tensors, room[: self._nbytes])
        return room

    def _places(self, count: int) -> int:
        """Where the places begin, behind so many words."""
        return _HEAD + -(-count * self._word // 8) * 8


def _sum(words: torch.Tensor) -> torch.Tensor:
    return words.view(torch.int64).sum()
