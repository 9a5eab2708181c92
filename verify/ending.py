"""The end of a command that is interrupted: one line, no process and no folder left.

It does not go by way of an exception: while large libraries are imported, or in a destructor, one is swallowed or
becomes a traceback. What is to be undone is kept in a list instead, which a signal works off before it ends the
process.
"""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

_to_undo: list[Callable[[], None]] = []


def undo_at_the_end(undo: Callable[[], None]) -> None:
    """Have this done if a signal ends the process, before what was asked for earlier. It may find half of it done."""
    if undo not in _to_undo:
        _to_undo.append(undo)


@contextmanager
def undone(undo: Callable[[], None]) -> Iterator[None]:
    """Have this done at the end of the block, however it ends."""
    undo_at_the_end(undo)
    try:
        yield
    finally:
        undo()
        _to_undo.remove(undo)


@contextmanager
def temporary_folder(prefix: str) -> Iterator[Path]:
    """A new folder that is there for as long as the block, and that no signal but SIGKILL leaves behind."""
    folder = Path(tempfile.gettempdir(), f"{prefix}{uuid.uuid4().hex[:12]}")
    with undone(lambda: remove(folder)):
        folder.mkdir(mode=0o700)
        yield folder


def remove(folder: Path) -> None:
    """Remove a folder, into which a process that was killed may be writing its last."""
    for _ in range(100):
        shutil.rmtree(folder, ignore_errors=True)
        if not folder.exists():
            return
        time.sleep(0.02)


@contextmanager
def one_line_when_interrupted(line: Callable[[], str]) -> Iterator[None]:
    """End this process at once at Ctrl-C and its like: undo, write ``line()`` to stderr, exit with 128 + the signal.

    In the main thread alone, as Python has it.
    """

    def end(number: int, _: object) -> None:
        for each in _SIGNALS:
            signal.signal(each, signal.SIG_IGN)
        for undo in reversed(_to_undo):
            with suppress(Exception):
                undo()
        with suppress(OSError):  # not by sys.stderr, which may be in the middle of a line itself
            os.write(2, line().encode())
        os._exit(128 + number)

    before = {number: signal.signal(number, end) for number in _SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
