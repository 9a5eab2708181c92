"""Ranks that compute together, as one of them sees it: threads of one process, or processes of torch.distributed.

Threads take turns: one runs, until it waits for others in a collective. So what is global to a process (much of what
torch and transformers change while they build a model) is in nobody's way, ranks do not fight for the interpreter's
lock, and a hang is seen at once: all wait, and none can go on.

:func:`world` is this rank's group of all ranks.
"""

from __future__ import annotations

import ctypes
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from reshard.formats.errors import ReshardError
from reshard.formats.torch_internals import collective_of
from reshard.verify.rank.device import use

_PATIENCE = timedelta(hours=24)  # for the original's run, in which the other ranks have nothing to do

_GRACE = 2.0  # seconds for a rank to end that is told so
_SLOW = "If that is only slow, allow a longer timeout."
_rank = threading.local()


def world() -> Group:
    """This rank's group of all ranks."""
    group: Group = _rank.group
    return group


def say(text: str) -> None:
    """Say, on rank 0, what is being done; the process that started the ranks hears it."""
    if world().rank == 0:
        _rank.listener(text)


@contextmanager
def being(group: Group, listener: Callable[[str], None] = lambda _: None) -> Iterator[None]:
    """Be a rank, in this thread: ``group`` is that of all ranks, and ``listener`` hears what rank 0 says."""
    _rank.group, _rank.listener = group, listener
    try:
        yield
    finally:
        del _rank.group, _rank.listener


# -------------------------------------------------------------------------------------------------------------- threads


class Over(BaseException):
    """The run is over: a rank failed, or had the answer."""


class RankError(ReshardError):
    """A rank failed: ``rank`` is its number."""

    def __init__(self, message: str, hint: str | None = None, *, rank: int = 0) -> None:
        super().__init__(message, hint)
        self.rank = rank


class RankAnswer(Exception):  # noqa: N818
    """A result of one rank that is the answer of the whole run, not a failure: ``value``, which can be pickled.

    Raised in a rank, it ends all ranks, and is raised again where they were started.
    """

    def __init__(self, value: Any) -> None:
        super().__init__("a rank knows the answer")
        self.value = value


class Wait(NamedTuple):
    """A rank's wait: the place where it waits, and the condition that ends it."""

    place: str
    until: Callable[[], bool]


class Turns:
    """The threads of a run, one for each of ``devices``, and which of them may go on.

    A rank that computes for ``timeout`` seconds while others wait for it has not come. ``listener`` hears what rank 0
    says. All but :meth:`run` is called by the rank whose turn it is.
    """

    def __init__(self, devices: Sequence[torch.device], timeout: float, listener: Callable[[str], None]) -> None:
        self._devices, self._timeout, self._listener = devices, timeout, listener
        self._everyone = tuple(range(len(devices)))
        self._go = [threading.Semaphore(0) for _ in devices]
        self._waiting: dict[int, Wait] = {rank: Wait("", lambda: True) for rank in self._everyone}
        self._running, self._since = 0, time.monotonic()
        self._is_over, self._all_ended = False, threading.Event()
        self.meetings: dict[tuple[int, ...], tuple[str, dict[int, Any]]] = {}
        self.messages: dict[tuple[int, int], deque[Any]] = {}
        self.is_alone = False  # what runs has no limit
        self._failure: tuple[int, BaseException] | None = None

    def run(self, work: Callable[[], Any]) -> list[Any]:
        """Let each rank do the work; what each returned. Raises what ended a rank, as :func:`explained` says it."""
        results: list[Any] = [None] * len(self._everyone)
        intra_op = torch.get_num_threads()  # new threads would not have what was set here

        def be(rank: int) -> None:
            self._go[rank].acquire()
            try:
                self.check()
                torch.set_num_threads(intra_op)
                use(self._devices[rank])
                group = ThreadGroup(self, self._everyone, rank, self._devices[rank])
                # A backward stays in its rank's thread: what two ranks do on one GPU would wait for each other.
                with being(group, self._listener), torch.autograd.set_multithreading_enabled(False):
                    results[rank] = work()
            except BaseException as error:
                self._end(rank, error)
            finally:
                self._pass_on()

        threads = [threading.Thread(target=be, args=(rank,), daemon=True) for rank in self._everyone]
        for thread in threads:
            thread.start()
        self._pass_on()
        try:
            while not self._all_ended.wait(min(1.0, self._timeout / 10)):
                rank, is_late = self._running, time.monotonic() - self._since > self._timeout
                if is_late and self._waiting and not self.is_alone:
                    was = f"was at {_line(sys._current_frames().get(threads[rank].ident or 0))}"
                    self._end(rank, self._hang([rank], f"waited {self._timeout:g} s", was, _SLOW))
                    break
        finally:
            self._is_over = True
            if not self._all_ended.is_set():  # Ctrl-C, or a rank that does not come: it ends where it is in Python
                ident, over = ctypes.c_ulong(threads[self._running].ident or 0), ctypes.py_object(Over)
                ctypes.pythonapi.PyThreadState_SetAsyncExc(ident, over)
                self._all_ended.wait(_GRACE)
        for thread in threads if self._all_ended.is_set() else ():
            thread.join()
        if self._failure is not None:
            rank, error = self._failure
            raise explained(error, rank, len(threads)) from error
        return results

    def check(self) -> None:
        """Raise Over if the run is over."""
        if self._is_over:
            raise Over

    def wait(self, rank: int, what: str, until: Callable[[], bool]) -> None:
        """Let others run until something holds."""
        self.check()
        if not until():
            self._waiting[rank] = Wait(f"{what} ({_line(sys._getframe())})", until)
            self._pass_on()
            self._go[rank].acquire()
            self.check()

    def _pass_on(self) -> None:
        """Give the turn to the rank that has waited longest of those that can go on; all can if the run is over."""
        able = [rank for rank, wait in self._waiting.items() if self._is_over or wait.until()]
        if self._waiting and not able:
            error = self._hang([rank for rank in self._everyone if rank not in self._waiting], "wait", "has ended")
            self._end(error.rank, error)
            able = [*self._waiting]
        if able:
            self._running, self._since = able[0], time.monotonic()
            del self._waiting[self._running]
            self._go[self._running].release()
        else:
            self._all_ended.set()

    def _end(self, rank: int, error: BaseException) -> None:
        """End the run: each rank that waits raises Over."""
        self._failure = self._failure or (rank, error)
        self._is_over = True

    def _hang(self, absent: Sequence[int], waited: str, instead: str, hint: str | None = None) -> RankError:
        places = {rank: wait.place for rank, wait in sorted(self._waiting.items()) if not wait.until()}
        first, place = next(iter(places.items()), (0, "its next collective"))
        if absent:
            waiting = places or [rank for rank in self._everyone if rank not in absent]
            message = f"{_named(absent)} did not come to {place}, where {_named(waiting)} {waited}"
            return RankError(f"{message}; rank {absent[0]} {instead}", hint, rank=absent[0])
        places_text = "; ".join(f"rank {rank} {place}" for rank, place in places.items())
        return RankError(f"the ranks wait for each other in different collectives: {places_text}", rank=first)


def _named(ranks: Iterable[int]) -> str:
    """``ranks 0, 2``."""
    numbers = [str(rank) for rank in ranks]
    return f"rank{'s' if len(numbers) > 1 else ''} {', '.join(numbers)}"


def _line(frame: FrameType | None) -> str:
    """The innermost line that is neither torch's nor of what carries values between ranks."""
    for outer, number in traceback.walk_stack(frame):
        module = outer.f_globals.get("__name__", "")
        if module.split(".")[0] != "torch" and module not in _CARRY:
            return f"{Path(outer.f_code.co_filename).name}:{number} in {outer.f_code.co_name}"
    return "an unknown line"


_CARRY = (__name__, "reshard.verify.rank.collectives", "reshard.verify.rank.layers")
_ALL, _SUM = -1, -2  # keys of what a meeting has beside each member's value: that all have come, and their sum


class ThreadGroup:
    """Some of the threads of a run, as number ``own`` sees them; ``members`` are their numbers among all.

    It is number ``rank`` of ``size``, on ``device``; ``backend`` is how they send. All members call a method at the
    same time, but for ``send`` and ``receive``.
    """

    backend = "threads"

    def __init__(self, turns: Turns, members: tuple[int, ...], member: int, device: torch.device) -> None:
        self._turns, self._members, self._member, self.device = turns, members, member, device
        self.rank, self.size = members.index(member), len(members)

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum of every rank's ``x``; ``x`` itself may be lost."""

        def add(values: dict[int, Any]) -> None:
            total = values[0].clone()
            for rank in range(1, self.size):
                total += values[rank].to(total.device)
            values[_SUM] = total

        total: Tensor = self._meet("all_reduce", x, add)[_SUM]
        return total.to(x.device, copy=True)

    def all_gather(self, x: Tensor) -> list[Tensor]:
        """Every rank's ``x``, all of one shape, to be read only."""
        values = self._meet("all_gather", x)
        return [values[rank].to(x.device) for rank in range(self.size)]

    def gather(self, value: Any) -> list[Any]:
        """Every rank's value, to be read only."""
        values = self._meet("gather", value)
        return [values[rank] for rank in range(self.size)]

    def share(self, make: Callable[[], Any]) -> Any:
        """Return the value that the first rank makes, to be read only. Ranks wait without a limit."""
        self._turns.is_alone = self.rank == 0
        value = make() if self.rank == 0 else None
        self._turns.is_alone = False
        return self.gather(value)[0]

    def collect(self, value: Any) -> list[Any]:
        """On the first rank, every rank's value, to be read only."""
        return self.gather(value)

    def send(self, value: Any, to: int) -> None:
        """Send a value to another rank, which may have to receive it first."""
        self._turns.check()
        self._turns.messages.setdefault((self._member, self._members[to]), deque()).append(value)

    def receive(self, sender: int) -> Any:
        """Wait for what another rank sends."""
        messages = self._turns.messages.setdefault((self._members[sender], self._member), deque())
        self._turns.wait(self._member, "receive", lambda: bool(messages))
        return messages.popleft()

    def some(self, members: Sequence[int]) -> ThreadGroup | None:
        """A group of some of these ranks, None on the others; all ranks make it, and at the same time."""
        ours = tuple(self._members[member] for member in members)
        return ThreadGroup(self._turns, ours, self._member, self.device) if self._member in ours else None

    def _meet(
        self, what: str, value: Any, at_last: Callable[[dict[int, Any]], None] = lambda _: None
    ) -> dict[int, Any]:
        """Every member's value, by rank, once all have come to the same; the last to come calls ``at_last`` with it."""
        purpose, values = self._turns.meetings.setdefault(self._members, (what, {}))
        if purpose == what:
            values[self.rank] = value
            if len(values) == self.size:
                del self._turns.meetings[self._members]
                at_last(values)
                values[_ALL] = None
        self._turns.wait(self._member, what, lambda: _ALL in values)
        return values


# ------------------------------------------------------------------------------------------------------------ processes


def is_of_collective(error: BaseException) -> bool:
    """Whether an error was raised in a collective of torch.distributed: another rank may be the cause of it."""
    return any(collective_of(frame) for frame, _ in traceback.walk_tb(error.__traceback__))


class ProcessGroup:
    """The same for processes, a group of torch.distributed.

    Where gloo serves GPUs (more ranks than GPUs), tensors travel through the CPU.
    """

    def __init__(
        self, device: torch.device, timeout: float, group: dist.ProcessGroup | None = None, *, is_all: bool = True
    ) -> None:
        self.rank, self.size, self.backend = dist.get_rank(group), dist.get_world_size(group), dist.get_backend(group)
        self.device, self._timeout, self._group = device, timedelta(seconds=timeout), group
        self._sends_on = torch.device("cpu") if self.backend == "gloo" else device
        if is_all:
            self._patient = dist.new_group(backend="gloo", timeout=_PATIENCE)
            self._messages = dist.new_group(backend="gloo", timeout=self._timeout)

    def all_reduce(self, x: Tensor) -> Tensor:
        """Return the sum over all ranks (see ``ThreadGroup``)."""
        total = x.to(self._sends_on)
        dist.all_reduce(total, group=self._group)
        return total.to(x.device)

    def all_gather(self, x: Tensor) -> list[Tensor]:
        """Return the tensors of all ranks (see ``ThreadGroup``)."""
        sent = x.to(self._sends_on)
        parts = [torch.empty_like(sent) for _ in range(self.size)]
        dist.all_gather(parts, sent, group=self._group)
        return [part.to(x.device) for part in parts]

    def gather(self, value: Any) -> list[Any]:
        """Return the values of all ranks (see ``ThreadGroup``)."""
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self._patient)
        return values

    def share(self, make: Callable[[], Any]) -> Any:
        """Return the value that the first rank makes (see ``ThreadGroup``)."""
        values = [make() if self.rank == 0 else None]
        dist.broadcast_object_list(values, src=0, group=self._patient)
        return values[0]

    def collect(self, value: Any) -> list[Any]:
        """Return the values of all ranks on the first rank (see ``ThreadGroup``)."""
        values: list[Any] = [None] * self.size
        dist.gather_object(value, values if self.rank == 0 else None, dst=0, group=self._patient)
        return values

    def send(self, value: Any, to: int) -> None:
        """Send a value to another rank (see ``ThreadGroup``)."""
        dist.send_object_list([value], dst=to, group=self._messages)

    def receive(self, sender: int) -> Any:
        """Receive a value from another rank (see ``ThreadGroup``)."""
        values: list[Any] = [None]
        dist.recv_object_list(values, src=sender, group=self._messages)
        return values[0]

    def some(self, members: Sequence[int]) -> ProcessGroup | None:
        """Return the group of some of the ranks; None on all others (see ``ThreadGroup``)."""
        group = dist.new_group([*members], timeout=self._timeout)
        seconds = self._timeout.total_seconds()
        return ProcessGroup(self.device, seconds, group, is_all=False) if self.rank in members else None


Group = ThreadGroup | ProcessGroup


# ------------------------------------------------------------------------------------------------- the machine's faults


MEMORY = "memory ran out on that rank, which says nothing of the model"
GPU = "the GPU or a library of it failed, which says nothing of the model; --device cpu runs without it"

_SIGNS = {
    MEMORY: ("SIGKILL", "out of memory", "ALLOC_FAILED", "MemoryError", "allocate memory"),
    GPU: ("AcceleratorError", "CUDA error", "CUDA driver error", "HIP error", "CUBLAS_STATUS_", "CUDNN_STATUS_",
          "CUSOLVER_STATUS_", "no kernel image"),
}  # fmt: skip
"""Words of torch, CUDA and the kernel: most of these errors have no class of their own."""


def machine_fault(error: BaseException | str) -> str | None:
    """Return ``MEMORY`` or ``GPU`` if an error, or the text of one, says that this failed in the machine; else None."""
    text = error if isinstance(error, str) else f"{type(error).__name__}: {error}"
    return next((fault for fault, signs in _SIGNS.items() if any(sign in text for sign in signs)), None)


def explained(error: BaseException, rank: int, world_size: int) -> RankAnswer | RankError:
    """Return the error of a rank in words for the process that started it."""
    if isinstance(error, (RankAnswer, RankError)):
        return error
    fault = machine_fault(error)
    if isinstance(error, ReshardError):
        message, hint = error.message, error.hint
    else:
        message, hint = traceback.format_exception_only(error)[-1].strip(), fault
    message = message.splitlines()[0] if fault else message  # CUDA's next lines are advice for developers
    return RankError(f"rank {rank} of {world_size} failed: {message}", hint, rank=rank)
