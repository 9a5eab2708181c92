"""The engine in a process of its own, for a caller that has threads.

The engine forks. In a process with threads (torch's, tqdm's, the caller's) a fork copies locks that another thread
holds, and nobody in the copy ever releases them: https://docs.python.org/3/library/os.html#os.fork. So a fresh process
with one thread takes the jobs, forks, and passes on the engine's reports.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from formats.errors import CheckpointError
from formats.files.checksum import PartialSum
from reshard.engine.reading import Sums, Wanted
from reshard.engine.times import Moved
from reshard.storage.retries import Traffic
from reshard.system import stop_with_parent

_START = (
    "import signal, sys; signal.signal(signal.SIGINT, signal.SIG_IGN); sys.path[:] = {path!r}; "
    "from reshard.engine.apart import serve; serve({parent}, {requests}, {reports})"
)


def has_threads() -> bool:
    """Whether this process has more than one thread, Python's or not."""
    try:
        return len(list(Path("/proc/self/task").iterdir())) > 1
    except OSError:
        return threading.active_count() > 1


Read = list[tuple[int, Wanted, PartialSum]]
"""For each source file (by number) and each set of targets: the sum of the bytes read for them."""


@dataclass(frozen=True)
class _Finished:
    """A target file (by number) is complete; with its checksum, and the sums of what was read for it."""

    number: int
    checksum: str | None
    read: Read


@dataclass(frozen=True)
class _Progress:
    """What was moved since the last report, and what was fetched so far."""

    moved: Moved
    traffic: Traffic


@dataclass(frozen=True)
class _Done:
    """The last report: the sums of all that was read, and what was fetched."""

    read: Read
    traffic: Traffic


def move_apart(
    jobs: Sequence[Any],
    sums: Sums,
    targets: Sequence[Any],
    options: Any,
    *,
    finished: Callable[[Any, str | None], None],
    progress: Callable[[Moved], None],
) -> None:
    """Run ``reshard.engine.move.move`` in another process, with the same arguments and the same errors."""

    files = list(sums.of)

    def take(read: Read) -> None:
        for number, wanted, total in read:
            sums.of[files[number]][wanted] = total

    with _ready.pop() if _ready else _Process() as process:
        process.send((jobs, sums, targets, options))
        while not isinstance(report := process.receive(), _Done):
            if isinstance(report, BaseException):
                raise report
            if isinstance(report, _Progress):
                sums.traffic = report.traffic
                progress(report.moved)
            else:
                take(report.read)
                finished(targets[report.number], report.checksum)
        take(report.read)
        sums.traffic = report.traffic


class _Process:
    """A fresh Python process that serves one request. A context manager: leaving it ends the process."""

    def __init__(self) -> None:
        requests, self._requests = os.pipe()
        self._reports, reports = os.pipe()
        start = _START.format(path=sys.path, parent=os.getpid(), requests=requests, reports=reports)
        environment = os.environ | {"OPENBLAS_NUM_THREADS": "1"}
        try:
            self._child = subprocess.Popen(
                [sys.executable, "-c", start], pass_fds=(requests, reports), env=environment, stdin=subprocess.DEVNULL
            )
        finally:
            os.close(requests)
            os.close(reports)
        self._input = os.fdopen(self._reports, "rb")

    def __enter__(self) -> _Process:
        return self

    def send(self, request: Any) -> None:
        """Send the one request."""
        with (
            contextlib.suppress(BrokenPipeError),
            os.fdopen(self._requests, "wb") as pipe,
        ):  # ``receive`` says why it ended
            pickle.dump(request, pipe)

    def receive(self) -> Any:
        """The next report. Raises CheckpointError if the process has ended without one."""
        try:
            return pickle.load(self._input)
        except (EOFError, pickle.UnpicklingError):
            status = self._child.wait()
            raise CheckpointError(f"the process that moves the bytes ended with status {status}") from None

    def end(self) -> None:
        """End a process that has served nothing."""
        self._child.kill()
        os.close(self._requests)
        self.__exit__(None)

    def __exit__(self, *exception: object) -> None:
        self._input.close()
        if exception[0] is not None:
            self._child.terminate()
        self._child.wait()


_ready: list[_Process] = []
"""A process that was started before it is needed."""


@contextlib.contextmanager
def prepared(*, wanted: bool) -> Iterator[None]:
    """A block in which ``move_apart`` finds its process started, where that is ``wanted``: it imports meanwhile."""
    if wanted:
        _ready.append(_Process())
    try:
        yield
    finally:
        while _ready:
            _ready.pop().end()


def serve(parent: int, requests: int, reports: int) -> None:
    """Run in the fresh process: read the request from one pipe, move, send reports into the other."""
    from reshard.engine.move import move

    signal.signal(signal.SIGTERM, _stop)  # Ctrl-C is ignored: it reaches the parent too, which stops this one
    stop_with_parent(parent)
    with os.fdopen(requests, "rb") as pipe:
        try:
            jobs, sums, targets, options = pickle.load(pipe)
        except EOFError:  # the parent has ended
            return
    numbers = {file: number for number, file in enumerate(sums.of)}
    with os.fdopen(reports, "wb") as output:

        def send(report: Any) -> None:
            pickle.dump(report, output)
            output.flush()

        def finished(target: Any, checksum: str | None) -> None:
            number = targets.index(target)
            found = [(numbers[file], wanted, total) for file, wanted, total in sums.wanted_by(number)]
            send(_Finished(number, checksum, found))

        try:
            move(
                jobs, sums, targets, options, finished=finished,
                progress=lambda moved: send(_Progress(moved, sums.traffic)),
            )  # fmt: skip
            send(
                _Done(
                    [(numbers[f], wanted, total) for f, of in sums.of.items() for wanted, total in of.items()],
                    sums.traffic,
                )
            )
        except SystemExit as stop:  # the parent has stopped this one, and listens no more
            os._exit(int(stop.code or 0))
        except BaseException as error:
            send(error)


def _stop(number: int, frame: object) -> None:
    """On SIGTERM: raise, so that workers are stopped and unfinished files removed."""
    raise SystemExit(128 + number)
