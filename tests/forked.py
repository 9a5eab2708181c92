"""Processes that start at once: they are forked from the fork server of the tests' ranks.

A process that imports torch and transformers, or the Hub's client, for itself takes up to ten seconds.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import cache
from multiprocessing import forkserver
from pathlib import Path
from subprocess import CompletedProcess

Work = tuple[Callable[[], None], Mapping[str, str]]
"""A function, importable by name, and the whole environment that it is called in."""

_PATIENCE = 200  # seconds


@cache
def begin_fork_server() -> None:
    """All processes that tests fork come from one server, which has imported what most of them need.

    The tests are marked ``of_ranks``, so that few of pytest's processes need a server.
    """
    preloaded = (
        "hypothesis",
        "pytest",
        "torch.distributed.device_mesh",
        "reshard.verify.forward.shards",
        "reshard.profile.rank",
    )
    multiprocessing.set_forkserver_preload([*preloaded])
    forkserver.ensure_running()
    process = multiprocessing.get_context("forkserver").Process(target=int)  # begins when all is imported
    process.start()
    process.join()


class Forked:
    """A process that calls a function; it begins as this is made. What it prints goes into files in ``folder``."""

    def __init__(self, work: Work, cwd: Path, folder: Path) -> None:
        self._out, self._err = (Path(tempfile.mkstemp(prefix=kind, dir=folder)[1]) for kind in ("out-", "err-"))
        begin_fork_server()
        context = multiprocessing.get_context("forkserver")
        function, environment = work
        self._process = context.Process(target=_be, args=(function, dict(environment), cwd, self._out, self._err))
        self._process.start()

    def poll(self) -> int | None:
        """The exit code, once it has ended; of one that a signal ended, the signal's number, negative."""
        return self._process.exitcode

    def wait(self) -> int | None:
        """The exit code; a process that does not end is ended."""
        self._process.join(_PATIENCE)
        self._process.kill()
        self._process.join()
        return self._process.exitcode

    def send_signal(self, how: int) -> None:
        assert self._process.pid is not None
        with suppress(ProcessLookupError):  # it has ended
            os.kill(self._process.pid, how)

    @property
    def stderr(self) -> str:
        """What it has printed there so far."""
        return self._err.read_text()

    def completed(self) -> CompletedProcess[str]:
        """How it ended, with what it printed."""
        return CompletedProcess([], self.wait(), self._out.read_text(), self.stderr)


def forked(works: Sequence[Work], cwd: Path) -> list[CompletedProcess[str]]:
    """Call each function in a process of its own, all at the same time; exit codes, and what they printed."""
    with tempfile.TemporaryDirectory() as folder:
        return [process.completed() for process in [Forked(work, cwd, Path(folder)) for work in works]]


def _be(work: Callable[[], None], environment: Mapping[str, str], cwd: Path, out: Path, err: Path) -> None:
    # the fork server starts with Ctrl-C blocked and ignored
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(cwd)
    for path, descriptor in ((out, 1), (err, 2)):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT), descriptor)
    work()
