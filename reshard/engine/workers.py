"""Shares a task among forked processes. They inherit this process's memory, and end when it ends."""

from __future__ import annotations

import os
import pickle
import select
import signal
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, NoReturn

from formats.errors import CheckpointError, ReshardError
from reshard.system import stop_with_parent

Report = Callable[[Any], None]
"""Sends an object that can be pickled to the process that shares the task."""

_LENGTH = 8
_CAUSES = {signal.SIGKILL: "the machine may be short of memory"}


def share(count: int, work: Callable[[int, Report], None], take: Report) -> None:
    """Call ``work(number, report)`` for each number below ``count``, each in its own process.

    ``take`` is called in this process with every report. With a ``count`` of 1, ``work`` runs in this process. If the
    system allows fewer processes, the higher numbers are not run, and ``work`` must cope. The first error in any
    process stops them all, and is raised when they have ended. Raises CheckpointError if a process was killed.
    """
    workers: list[_Worker] = []
    try:
        with _ctrl_c_held_back(), suppress(OSError):
            for number in range(count if count > 1 else 0):
                workers.append(_Worker(work, number))
        if workers:
            _listen(workers, take)
        else:
            work(0, take)
    finally:
        for worker in workers:
            worker.stop()


@contextmanager
def _ctrl_c_held_back() -> Iterator[None]:
    """Delay KeyboardInterrupt to the end of the block, so that every started process is in the list."""
    if threading.current_thread() is not threading.main_thread():  # Python raises it only there
        yield
        return
    pressed: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, _: pressed.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        if pressed:
            signal.raise_signal(signal.SIGINT)


@dataclass(frozen=True)
class _Failure:
    """A worker's error and its traceback as text."""

    error: BaseException
    trace: str

    def raised(self) -> NoReturn:
        """Raise the error in this process."""
        if isinstance(self.error, ReshardError):
            raise self.error
        raise self.error from RuntimeError(self.trace)


class _Worker:
    """A forked process and the pipe of its reports."""

    def __init__(self, work: Callable[[int, Report], None], number: int) -> None:
        self._status: int | None = None
        parent = os.getpid()
        self.pipe, reports = os.pipe()
        try:
            self.pid = os.fork()
            if self.pid == 0:
                _run(work, number, reports, parent)
        except OSError:
            os.close(self.pipe)
            raise
        finally:
            os.close(reports)

    def receive(self) -> Any:
        """The next report, or None at the end. Raises CheckpointError if the process was killed."""
        length = int.from_bytes(self._read(_LENGTH), "little")
        content = self._read(length)
        if length and len(content) == length:
            return pickle.loads(content)
        self._status = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        if self._status:
            number = signal.Signals(-self._status) if self._status < 0 else None
            name = f"was ended by signal {number.name}" if number else f"ended with status {self._status}"
            raise CheckpointError(f"a worker process {name}", _CAUSES.get(number) if number else None)
        return None

    def _read(self, length: int) -> bytes:
        content = bytearray()
        while len(content) < length:
            part = os.read(self.pipe, length - len(content))
            if not part:
                break
            content += part
        return bytes(content)

    def stop(self) -> None:
        """Kill the process if it still runs, and wait for its end."""
        os.close(self.pipe)
        if self._status is None:
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)


def _run(work: Callable[[int, Report], None], number: int, pipe: int, parent: int) -> NoReturn:
    """The whole life of a worker. It exits without Python's clean-up, which its parent does."""
    status = 1
    try:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the parent too, which stops this one
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        stop_with_parent(parent)
        try:
            work(number, lambda report: _send(pipe, pickle.dumps(report)))
        except BaseException as error:
            _send(pipe, _pickled(_Failure(error, traceback.format_exc())))
        status = 0
    finally:
        os._exit(status)


def _pickled(failure: _Failure) -> bytes:
    try:
        return pickle.dumps(failure)
    except Exception:
        return pickle.dumps(_Failure(RuntimeError(repr(failure.error)), failure.trace))


def _send(pipe: int, content: bytes) -> None:
    rest = memoryview(len(content).to_bytes(_LENGTH, "little") + content)
    while rest:
        rest = rest[os.write(pipe, rest) :]


def _listen(workers: Sequence[_Worker], take: Report) -> None:
    """Pass reports to ``take`` until all workers have ended."""
    poll = select.poll()
    speaking = {worker.pipe: worker for worker in workers}
    for pipe in speaking:
        poll.register(pipe, select.POLLIN)
    while speaking:
        for pipe, _ in poll.poll():
            report = speaking[pipe].receive()
            if report is None:
                poll.unregister(pipe)
                del speaking[pipe]
            elif isinstance(report, _Failure):
                report.raised()
            else:
                take(report)
