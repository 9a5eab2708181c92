"""What a rank sends and receives in one step of a push."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import torch


class Message(NamedTuple):
    """Bytes for another rank, or from it.

    ``peer`` is its number among all processes: those of the trainer first, then those of the receiver. ``work`` is
    called with a one-dimensional tensor of ``nbytes`` bytes (``torch.uint8``): to fill it, or with what came.
    """

    peer: int
    nbytes: int
    work: Callable[[torch.Tensor], None]


class Step(NamedTuple):
    """A bucket: what a rank sends in it and receives in it, in this order."""

    sends: Sequence[Message]
    receives: Sequence[Message]
