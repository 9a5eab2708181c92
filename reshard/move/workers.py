"""Shares a task among forked processes. They inherit its memory, and end when the process that shares it ends.

In a process with threads (torch's, tqdm's, the caller's) a fork copies locks that another thread holds, and nobody in
the copy ever releases them: https://docs.python.org/3/library/os.html#os.fork. There, a fresh process with one thread
gets the task as a pickle, forks, and passes on what the forked processes report.
"""

from __future__ import annotations

import os
import pickle
import select
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from formats.errors import CheckpointError, ReshardError
from reshard.system import stop_with_parent

Report = Callable[[Any], None]
"""Sends an object that can be pickled to the process that shares the task."""

Work = Callable[[int, Report], None]

_LENGTH = 8
_CAUSES = {signal.SIGKILL: "the machine may be short of memory"}
_START = (
    "import signal, sys; signal.signal(signal.SIGINT, signal.SIG_IGN); sys.path[:] = {path!r}; "
    "from reshard.move.workers import serve; serve({reports}, {parent})"
)


def share(count: int, work: Work, take: Report) -> None:
    """Call ``work(number, report)`` for each number below ``count``, each in its own process.

    ``take`` is called in this process with every report. With a ``count`` of 1, ``work`` runs in this process. If the
    system allows fewer processes, the highest numbers are not run: ``work`` must do without them. If this process has
    threads, ``work`` is pickled. The first error in any process stops them all, and is raised when they have ended.
    Raises CheckpointError if a process was killed.
    """
    if count > 1 and has_threads():
        _share([partial(_start_fresh, count, work)], work, take)
    else:
        _share(_forks(count, work), work, take)


def has_threads() -> bool:
    """Whether this process has more than one thread, Python's or not."""
    try:
        return len(list(Path("/proc/self/task").iterdir())) > 1
    except OSError:
        return threading.active_count() > 1


Start = Callable[[int], int]
"""Starts a process that writes its reports to a pipe; returns its id. Raises OSError."""


def _share(starts: Sequence[Start], work: Work, take: Report) -> None:
    workers: list[_Worker] = []
    try:
        with _ctrl_c_held_back(), suppress(OSError):
            for start in starts:
                workers.append(_Worker(start))
        if workers:
            _listen(workers, take)
        else:
            work(0, take)
    finally:
        for worker in workers:
            worker.stop()


def _forks(count: int, work: Work) -> Sequence[Start]:
    return [partial(_fork, partial(work, number)) for number in range(count if count > 1 else 0)]


def _fork(work: Callable[[Report], None], reports: int) -> int:
    parent = os.getpid()
    pid = os.fork()
    if pid == 0:
        _run(work, reports, parent)
    return pid


def _start_fresh(count: int, work: Work, reports: int) -> int:
    """Start a fresh Python process, and send it the task."""
    task = pickle.dumps((count, work))
    requests, request = os.pipe()
    os.set_inheritable(reports, True)
    start = _START.format(path=sys.path, reports=reports, parent=os.getpid())
    environment = os.environ | {"OPENBLAS_NUM_THREADS": "1"}
    with suppress(BrokenPipeError), os.fdopen(request, "wb") as pipe:  # its status says why it has ended
        try:
            pid = os.posix_spawn(
                sys.executable, [sys.executable, "-c", start], environment,
                file_actions=[(os.POSIX_SPAWN_DUP2, requests, 0)],
            )  # fmt: skip
        finally:
            os.close(requests)
        pipe.write(task)
    return pid


def serve(reports: int, parent: int) -> NoReturn:
    """The whole life of the fresh process."""

    def fork_all(report: Report) -> None:
        count, work = pickle.load(sys.stdin.buffer)
        _share(_forks(count, work), work, report)

    _run(fork_all, reports, parent)


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
    """A process and the pipe of its reports."""

    def __init__(self, start: Start) -> None:
        self._status: int | None = None
        self.pipe, reports = os.pipe()
        try:
            self.pid = start(reports)
        except BaseException:
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


def _run(work: Callable[[Report], None], pipe: int, parent: int) -> NoReturn:
    """The whole life of a worker. It exits without Python's clean-up, which its parent does."""
    status = 1
    try:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the parent too, which stops this one
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        stop_with_parent(parent)
        try:
            work(lambda report: _send(pipe, pickle.dumps(report)))
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
        for pipe, _ in poll.poll(1000):  # not for ever, as a signal just before the wait would not end it
            report = speaking[pipe].receive()
            if report is None:
                poll.unregister(pipe)
                del speaking[pipe]
            elif isinstance(report, _Failure):
                report.raised()
            else:
                take(report)
