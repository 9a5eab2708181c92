"""A push of what changed: of each message the words that are other than at the push before, and where they are.

A word is as wide as the smallest element of the message. What is sent: two numbers of 64 bits, the sum of all words
that the whole message is to have and how many have changed; these, padded to 8 bytes; their places (int32). Where that
is not smaller the message is sent whole, and where nothing changed none is sent.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from formats.errors import LiveError
from formats.torch_dtypes import TORCH_DTYPES
from reshard.live.routing import Part
from reshard.live.sides import Side
from reshard.live.views import Blocks, Tensors

_HEAD = 16
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def word_of(parts: Sequence[Part], target: Side) -> int | None:
    """The bytes of a word; None if the target stores something else than what is sent: then all is sent."""
    plain = all(
        part.move.dtype == target.dtype(part.move.wanted.stored) and part.move.wanted.portion.function is None
        for part in parts
    )
    return min(TORCH_DTYPES[part.move.dtype].itemsize for part in parts) if plain else None


class Changes:
    """What changes in one message of ``nbytes`` (``blocks`` on this side, in words of ``word`` bytes)."""

    def __init__(self, blocks: Blocks, nbytes: int, word: int) -> None:
        self._blocks, self._nbytes, self._word, self._dtype = blocks, nbytes, word, _WORDS[word]
        self._before = blocks.alike()

    def size(self, tensors: Tensors, before: Tensors) -> int:
        """The bytes to send, given what this rank had at the push before."""
        count = int((self._packed(tensors, self._blocks) != self._packed(before, self._before)).sum())
        return min(self._places(count) + 4 * count, self._nbytes) if count else 0

    def pack(self, tensors: Tensors, before: Tensors, room: torch.Tensor) -> None:
        """Fill ``room``, which has the bytes of ``size``."""
        new = self._packed(tensors, self._blocks)
        places = torch.nonzero(new != self._packed(before, self._before)).flatten()
        count, begin = len(places), self._places(len(places))
        if len(room) != begin + 4 * count:
            raise LiveError("the weights changed while they were pushed", "push again")
        room[:begin].zero_()
        room[:_HEAD].view(torch.int64).copy_(torch.stack([new.sum(dtype=torch.int64), places.new_tensor(count)]))
        room[_HEAD : _HEAD + self._word * count].view(self._dtype).copy_(new[places])
        room[begin:].view(torch.int32).copy_(places)

    def unpack(self, tensors: Tensors, room: torch.Tensor) -> None:
        """Change ``tensors`` as ``room`` says. Raises LiveError if the result is not what was meant."""
        total, count = room[:_HEAD].view(torch.int64).tolist()
        begin, words = self._places(count), self._packed(tensors, self._blocks)
        values = room[_HEAD : _HEAD + self._word * count].view(self._dtype)
        words[room[begin : begin + 4 * count].view(torch.int32).to(torch.int64)] = values
        if int(words.sum(dtype=torch.int64)) != total:
            raise LiveError("its weights are not those of the push before: a push of what changed does not fit them")
        self._blocks.unpack(tensors, words.view(torch.uint8))

    def _packed(self, tensors: Tensors, blocks: Blocks) -> torch.Tensor:
        """The words of the whole message."""
        device = next(iter(tensors.values()))[0].device
        room = torch.empty(self._nbytes, dtype=torch.uint8, device=device)
        blocks.pack(tensors, room)
        return room.view(self._dtype)

    def _places(self, count: int) -> int:
        """Where the places begin, behind so many words."""
        return _HEAD + -(-count * self._word // 8) * 8
