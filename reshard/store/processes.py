"""Processes that share work: forks of this one, which have in memory all that it has, and report to it.

Threads that compute in many short calls wait for Python's lock most of the time, and so burn a processor.
"""

from __future__ import annotations

import gc
import os
import pickle
import signal
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from io import BytesIO, FileIO
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO, NoReturn, TypeVar

from reshard.formats.errors import ReshardError
from reshard.store.threads import work_together
from reshard.system import end_with_parent

T = TypeVar("T")
S = TypeVar("S")
SharedWork = Callable[[int, Callable[[T], None]], None]

_HELD_BACK = {signal.SIGINT, signal.SIGTERM}


def can_fork() -> bool:
    """Whether a copy of this process could work: it has no thread but this one, whose locks nobody would release there,
    and no torch, which starts some unseen; and it hears how a copy ends. macOS's own libraries forbid a copy.
    """
    if sys.platform != "linux" or "torch" in sys.modules or signal.getsignal(signal.SIGCHLD) is not signal.SIG_DFL:
        return False
    return len([*Path("/proc/self/task").iterdir()]) == 1


class SharedByForks(Iterator[S]):
    """Items that processes share: each has all of them from before the fork, and takes those that no other has taken.

    A process that is killed as it takes one makes the others wait forever.
    """

    def __init__(self, items: Iterable[S]) -> None:
        self._left, self._passed = iter(items), 0
        self._next = FileIO(os.eventfd(1), "r+")  # the number of the next item, plus one; who reads it has it alone

    def __next__(self) -> S:
        number = int.from_bytes(self._next.read(8), sys.byteorder)
        self._next.write((number + 1).to_bytes(8, sys.byteorder))
        skipped, self._passed = number - 1 - self._passed, number
        return next(islice(self._left, skipped, None))


def work_apart(count: int, work: SharedWork[T], take: Callable[[T], None], known: Iterable[object]) -> None:
    """Do as ``work_together``, each number in a process of its own, which is killed after an error and Ctrl-C.

    Reports are pickled, but for the objects that are ``known`` from before. Raises ReshardError if a process was
    killed.
    """
    objects, workers = {id(each): each for each in known}, list[_Worker]()

    def kill() -> None:
        for worker in workers:
            worker.kill()

    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, _HELD_BACK)  # until each process is in the list
    try:
        try:
            for number in range(count):
                workers.append(_Worker(number, work, objects))
        except OSError:  # the system allows no more
            if not workers:
                return work(0, take)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        work_together(len(workers), lambda number, report: workers[number].listen(report), take, kill)
    finally:
        kill()
        for worker in workers:
            worker.close()


class _Pickler(pickle.Pickler):
    known: Mapping[int, object]

    def persistent_id(self, value: object) -> int | None:
        """The number of a known object, which is the same in both processes."""
        return id(value) if id(value) in self.known else None


class _Unpickler(pickle.Unpickler):
    known: Mapping[int, object]

    def persistent_load(self, number: int) -> object:
        """A known object."""
        return self.known[number]


class _Worker:
    """A process, and the pipe of its reports."""

    def __init__(self, number: int, work: SharedWork[Any], known: Mapping[int, object]) -> None:
        self._known, parent = known, os.getpid()
        reads, writes = os.pipe()
        self._reports = os.fdopen(reads, "rb")
        with os.fdopen(writes, "wb") as pipe:
            try:
                self._pid = os.fork()
            except OSError:
                self._reports.close()
                raise
            if not self._pid:
                self._run(number, work, pipe, parent)

    def _run(self, number: int, work: SharedWork[Any], pipe: BinaryIO, parent: int) -> NoReturn:
        """Do the work in the new process, which ends without Python's clean-up: the other one has the same to do."""

        def send(report: object) -> None:
            pickler = _Pickler(content := BytesIO())
            pickler.known = self._known
            pickler.dump(report)
            pipe.write(content.getbuffer())
            pipe.flush()

        try:
            for each in _HELD_BACK:  # they reach the parent, too
                signal.signal(each, signal.SIG_IGN)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, _HELD_BACK)
            end_with_parent(parent)
            gc.freeze()  # a search would copy all of the parent's memory
            try:
                work(number, lambda report: send((report,)))
                send(None)
            except BaseException as error:
                if not isinstance(error, ReshardError):
                    error.add_note(traceback.format_exc())
                try:
                    send(error)
                except Exception:  # an error that cannot be pickled
                    send(RuntimeError(repr(error)))
        finally:
            os._exit(0)

    def listen(self, report: Callable[[Any], None]) -> None:
        """Pass reports on until the work is done. Raises its error, or ReshardError if the process was killed."""
        while True:
            unpickler = _Unpickler(self._reports)
            unpickler.known = self._known
            try:
                value = unpickler.load()
            except (EOFError, pickle.UnpicklingError):
                status = os.waitid(os.P_PID, self._pid, os.WEXITED | os.WNOWAIT)
                name = signal.Signals(status.si_status).name if status and status.si_code != os.CLD_EXITED else "itself"
                raise ReshardError(
                    f"a worker process was ended by {name}", "the machine may be short of memory: give fewer --workers"
                ) from None
            if value is None:
                return
            if isinstance(value, BaseException):
                raise value
            report(*value)

    def kill(self) -> None:
        """Kill the process, if it has not ended."""
        os.kill(self._pid, signal.SIGKILL)

    def close(self) -> None:
        """Wait for the end of the process."""
        os.waitpid(self._pid, 0)
        self._reports.close()
