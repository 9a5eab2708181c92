"""The end of an interrupted command: one line, and no process and no folder is left.

This uses no exception, because one that is raised while large libraries are imported, or in a destructor, is swallowed
or becomes a traceback. Instead a list keeps what must be undone. The signal handler undoes it and ends the process.

Threads of ranks go on meanwhile. So where there are folders, the process ends as ``rm``, which has no such threads.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from reshard.formats.errors import ReshardError

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

_to_undo: list[Callable[[], None]] = []
_folders: list[Path] = []
_late: list[list[int]] = []
"""For each program that is being started, the signals that came meanwhile: it cannot be ended yet."""


@contextmanager
def undone(undo: Callable[[], None]) -> Iterator[None]:
    """Call ``undo`` at the end of the block, however it ends; also if a signal ends the process, the latest first.

    It must work on things that are half made.
    """
    _to_undo.append(undo)
    try:
        yield
    finally:
        undo()
        _to_undo.remove(undo)


def run_program(command: Sequence[str], what: str, timeout: float, folder: Path) -> tuple[int, str]:
    """Run a command in a folder, and in a session of its own, so that all of its processes end with it.

    Returns the exit code and what it wrote. Raises ReshardError if it has not ended in time.
    """
    sessions, late = list[int](), list[int]()

    def kill() -> None:
        for leader in sessions:
            with suppress(ProcessLookupError):
                os.killpg(leader, signal.SIGKILL)

    try:
        with undone(kill):
            _late.append(late)
            try:
                process = subprocess.Popen(
                    command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, cwd=folder,
                    start_new_session=True, text=True, errors="replace",
                )  # fmt: skip
                sessions.append(process.pid)
            finally:
                _late.remove(late)
                for number in late:
                    signal.raise_signal(number)
            output, _ = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        process.wait()
        raise ReshardError(f"{what} has not ended after {timeout:.0f} s") from None
    return process.returncode, output


@contextmanager
def temporary_folder(prefix: str, source: object = None) -> Iterator[Path]:
    """A new folder that exists for the block. No signal but SIGKILL leaves it behind. Errors name the ``source`` that
    is written into it, and not the folder.
    """
    folder = Path(tempfile.gettempdir(), f"{prefix}{uuid.uuid4().hex[:12]}")
    _folders.append(folder)
    try:
        folder.mkdir(mode=0o700)
        yield folder
    except ReshardError as error:
        if source is not None:
            error.message = re.sub(rf"{re.escape(str(folder))}[^\s:]*", str(source), error.message)
            error.args = (error.message,)
        raise
    finally:
        _remove(folder)
        _folders.remove(folder)


def _remove(folder: Path) -> None:
    """Remove a folder, even if a rank is still writing into it."""
    for _ in range(100):
        shutil.rmtree(folder, ignore_errors=True)
        if not folder.exists():
            return
        time.sleep(0.02)


@contextmanager
def one_line_when_interrupted(line: Callable[[], str]) -> Iterator[None]:
    """End this process at once on SIGINT, SIGTERM or SIGHUP: undo, write ``line()`` to stderr, exit with 128 + signal.

    Only for the main thread: Python allows signal handlers nowhere else.
    """

    def end(number: int, _: object) -> None:
        if _late:
            _late[-1].append(number)
            return
        for caught in _SIGNALS:
            signal.signal(caught, signal.SIG_IGN)
        for undo in reversed(_to_undo):
            with suppress(Exception):
                undo()
        with suppress(OSError):  # not by sys.stderr, which may be in the middle of a line itself
            os.write(2, line().encode())
        # A rank's thread may make a folder, or one anew, at any moment: it ends when another program takes this process
        sys.setswitchinterval(60)
        if _folders:
            with suppress(OSError):
                remove = ["sh", "-c", f'rm -rf -- "$@"; exit {128 + number}', "sh", *map(str, _folders)]
                os.execv("/bin/sh", remove)
        os._exit(128 + number)

    handlers = {number: signal.signal(number, end) for number in _SIGNALS}
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
