"""Clocks on one rank: what a step spends in which part of the model, in computing and in collectives.

On a CPU the ranks meet before each collective, so that its time is that of the exchange and not of waiting for a slower
rank. On a GPU events are recorded around it on the stream, and nothing waits; there the rank that comes last says how
long the exchange took.
"""

from __future__ import annotations

import itertools
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist

from formats.torch_internals import TorchDispatchMode, tree_leaves
from verify.profile.job import Span, Step
from verify.rank.collectives import Carrier, Sent
from verify.rank.device import stream


class Clock(Protocol):
    """Marks points of time, and says afterwards how far they are apart."""

    def mark(self) -> Any:
        """A point of time: now, or when the device comes to it."""

    def seconds(self, marks: Sequence[Any]) -> list[float]:
        """The time from each mark to the next."""


class WallClock:
    """The clock of a CPU."""

    def mark(self) -> float:
        """Now."""
        return time.perf_counter()

    def seconds(self, marks: Sequence[float]) -> list[float]:
        """The time from each mark to the next."""
        return [end - begin for begin, end in itertools.pairwise(marks)]


class Event(Protocol):
    """A mark of time on a stream, as torch has it."""

    def record(self) -> None:
        """Let the current stream note the time when it comes to here."""

    def elapsed_time(self, end: Any) -> float:
        """Milliseconds from this event to a later one; both must have happened."""


@dataclass(frozen=True)
class StreamClock:
    """The clock of a GPU's current stream: ``event`` makes a mark, ``wait`` waits until the GPU has done all."""

    event: Callable[[], Event]
    wait: Callable[[], None]

    def mark(self) -> Event:
        """An event, which the device records when it comes to it."""
        event = self.event()
        event.record()
        return event

    def seconds(self, marks: Sequence[Event]) -> list[float]:
        """The time from each mark to the next, once the device has come to the last."""
        self.wait()
        return [begin.elapsed_time(end) / 1e3 for begin, end in itertools.pairwise(marks)]


class Meter(Carrier):
    """Cuts a step into spans; every collective that goes through it is a span of its own.

    Tensors are summed in their own dtype, as engines do.
    """

    def __init__(self, device: torch.device, clock: Clock | None = None) -> None:
        self._clock: Clock = clock or (WallClock() if device.type == "cpu" else StreamClock(*stream(device.type)))
        self._meets = device.type == "cpu" and dist.get_world_size() > 1
        self._labels: list[tuple[str, str, int]] = []
        self._marks: list[Any] = []
        self._part = ""

    def summed_as(self, dtype: torch.dtype) -> torch.dtype:
        """The same dtype."""
        return dtype

    def carry(self, what: str, nbytes: int, send: Callable[[], Sent]) -> Sent:
        """Do one collective, and note how long it took."""
        if self._meets:
            self._begin("wait")
            dist.barrier()
        self._begin(what, nbytes)
        sent = send()
        self._begin("compute")
        return sent

    def enter(self, part: str) -> None:
        """What follows belongs to this part of the model; of an empty name, to none."""
        self._part = part
        self._begin("compute")

    def step(self) -> Step:
        """The spans since the last step."""
        seconds = self._clock.seconds([*self._marks, self._clock.mark()])
        found = tuple(Span(*label, time) for label, time in zip(self._labels, seconds, strict=True))
        self._labels, self._marks, self._part = [], [], ""
        return found

    def _begin(self, what: str, nbytes: int = 0) -> None:
        self._labels.append((self._part, what, nbytes))
        self._marks.append(self._clock.mark())


class Living(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """How many bytes the tensors have that were made in its block and still live: now, and at most.

    Whatever the device; scratch memory inside of a kernel is not seen. What is left out (:meth:`leave_out`) counts at
    no time, also not before that was said.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = 0
        self._changes: list[tuple[int, int]] = []  # the number of a storage, and the bytes that come or go with it
        self._known: dict[int, tuple[int, int]] = {}  # of each storage that lives, its number and its bytes
        self._left_out: set[int] = set()

    @property
    def peak(self) -> int:
        """The most bytes that lived at once."""
        counted = (change for number, change in self._changes if number not in self._left_out)
        return max(itertools.accumulate(counted), default=0)

    def leave_out(self, x: torch.Tensor) -> None:
        """Do not count a tensor: another account has it."""
        number, size = self._known.pop(_storage(x), (0, 0))
        if number:
            self._left_out.add(number)
            self.now -= size

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given = {_storage(x) for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)}
        for x in tree_leaves(result):
            if isinstance(x, torch.Tensor) and _storage(x) not in given and _storage(x) not in self._known:
                self._add(x)
        return result

    def _add(self, x: torch.Tensor) -> None:
        storage, key, number = x.untyped_storage(), _storage(x), len(self._changes) + 1
        size = storage.nbytes()
        self._known[key] = number, size
        self._changes.append((number, size))
        self.now += size
        weakref.finalize(storage, self._remove, key, number, size)

    def _remove(self, key: int, number: int, size: int) -> None:
        self._changes.append((number, -size))
        if self._known.get(key) == (number, size):
            del self._known[key]
            self.now -= size


def _storage(x: torch.Tensor) -> int:
    return int(x.untyped_storage()._cdata)
