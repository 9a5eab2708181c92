"""Two trainers that send to two receivers: processes, of which one may fail at some moment; then all begin anew."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

from tests.forked import begin_fork_server

NAMES = ("trainer 0", "trainer 1", "receiver 0", "receiver 1")
BUCKET = 4 << 20
TIMEOUT, JOIN = 4.0, 6.0
"""Seconds that a rank may let the others wait, and that it may take to come. A busy machine stops all for two."""
PATIENCE = 30.0
"""Seconds that a process may take to start: many do, at the same time."""
LATE = 10.0
"""Seconds by which a busy machine may be late; who waits for the wrong limit is later."""


@dataclass(frozen=True)
class Plot:
    """What happens: at this moment, this rank stops, or calls ``trick`` and goes on."""

    rank: int = -1
    moment: str = ""
    trick: Callable[[], None] | None = None
    shared: bool = True

    def join(self, rank: int, pipe: Connection) -> None:
        """If one is not to join, no process waits for it before all have started, which takes as long as it takes."""
        if self.is_about_joining:
            pipe.send("here")
            pipe.recv()
        self.at(rank, "join", pipe)

    @property
    def is_about_joining(self) -> bool:
        return self.moment == "join" and self.rank >= 0

    def at(self, rank: int, moment: str, pipe: Connection) -> None:
        if (rank, moment) != (self.rank, self.moment):
            return
        if self.trick is not None:
            self.trick()
        else:
            pipe.send(("stopped", time.time()))
            os.kill(os.getpid(), signal.SIGSTOP)


@dataclass
class Told:
    """What a rank reported of a run: its error, or none; when; what it has then."""

    error: str | None
    when: float
    state: Any = None


class Ranks:
    """The four processes. Those that are left when the test ends are killed.

    ``be`` is what a process does: it is called with its rank, the store, the plot and a pipe.
    """

    def __init__(self, store: str, plot: Plot, be: Callable[..., None] | None = None) -> None:
        self._store, self.plot, self._be = store, plot, be or _be
        begin_fork_server()
        self._context = multiprocessing.get_context("forkserver")
        self._processes: dict[int, Any] = {}
        self._pipes: dict[int, Connection] = {}

    def __enter__(self) -> Ranks:
        for rank in range(len(NAMES)):
            self.start(rank)
        if self.plot.is_about_joining:
            assert [self.hear(rank) for rank in range(len(NAMES))] == ["here"] * len(NAMES)
            self.again()
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes.values():
            process.kill()
            process.join()

    def start(self, rank: int, plot: Plot | None = None) -> None:
        self._pipes[rank], theirs = self._context.Pipe()
        process = self._context.Process(target=self._be, args=(rank, self._store, plot or self.plot, theirs))
        process.start()
        theirs.close()
        self._processes[rank] = process

    def send_signal(self, rank: int, how: int) -> None:
        with suppress(ProcessLookupError):
            os.kill(self._processes[rank].pid, how)
        if how == signal.SIGKILL:
            self._processes[rank].join()

    def hear(self, rank: int) -> Any:
        """The next thing that this rank reports."""
        assert self._pipes[rank].poll(PATIENCE), f"{NAMES[rank]} says nothing"
        return self._pipes[rank].recv()

    def told(self, *without: int) -> dict[int, Told]:
        """How this run ended for each rank."""
        return {r: Told(*self.hear(r)) for r in range(len(NAMES)) if r not in without}

    def again(self, *ranks: int) -> None:
        """Let these ranks run once more, without a fault."""
        for rank in ranks or range(len(NAMES)):
            self._pipes[rank].send(None)


def stop_with_parent(parent: int) -> None:
    """Have this process killed when its parent ends (Linux only)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)
        if os.getppid() != parent:  # the parent has ended already
            os.kill(os.getpid(), signal.SIGKILL)


def _be(rank: int, store: str, plot: Plot, pipe: Connection) -> None:
    import torch

    from reshard.formats.errors import LiveError

    stop_with_parent(os.getppid())  # the fork server, which ends with the tests
    torch.set_num_threads(1)
    while True:
        try:
            _run(rank, store, plot, pipe)
            pipe.send((None, time.time()))
        except LiveError as error:
            pipe.send((error.message, time.time()))
        try:
            pipe.recv()
        except EOFError:
            return
        plot = Plot(shared=plot.shared)


def _run(rank: int, store: str, plot: Plot, pipe: Connection) -> None:
    from reshard.live.fence import Fence
    from reshard.live.wire import Wire

    plot.join(rank, pipe)
    fence = Fence(store, rank, NAMES, timeout=TIMEOUT, join=JOIN if plot.moment == "join" else PATIENCE)
    try:
        wire = Wire(fence, rank, bucket=BUCKET, shared=plot.shared)
        plot.at(rank, "gather", pipe)
        fence.gather("plan", "")
        for version in (1, 2):
            plot.at(rank, "exchange", pipe)
            wire.exchange(_steps(rank, version, lambda: plot.at(rank, "message", pipe)), version)
        plot.at(rank, "end", pipe)
        fence.gather("commit", "")
        wire.close()
    finally:
        fence.close()


def _steps(rank: int, version: int, hook: Callable[[], None]) -> list[Any]:
    """Three steps, in each of which each trainer sends each receiver a large message and a small one."""
    import torch

    from reshard.live.wire import Message

    def message(step: int, peer: int, nbytes: int) -> Message:
        trainer, receiver = sorted((rank, peer))
        value = 64 * (version % 2) + 16 * step + 4 * trainer + receiver

        def work(part: torch.Tensor) -> None:
            if step == 1:
                hook()
            if rank < 2:
                part.fill_(value)
            else:
                assert part.dtype == torch.uint8 and part.shape == (nbytes,)
                assert bool((part == value).all()), "another message's bytes"

        return Message(step, peer, nbytes, work, rank < 2)

    peers = (2, 3) if rank < 2 else (0, 1)
    return [message(step, peer, size) for step in range(3) for peer in peers for size in (BUCKET - 5, 1001)]
