"""An engine that writes slowly and in small steps, so that there is time to interrupt it.

A machine may be too busy to interrupt it in time. In a process that a test started with ``Turns``, each step waits for
its turn, and the test stops the process exactly where it is to be stopped. ``python -m tests.slow`` is such a
``reshard``.
"""

from __future__ import annotations

import itertools
import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from reshard.__main__ import main
from reshard.move import jobs

_VARIABLE = "RESHARD_TEST_TURNS"
_ALL = "all"


class _Process(Protocol):
    def poll(self) -> int | None: ...

    def send_signal(self, how: int, /) -> None: ...


class Turns:
    """The steps of one process, each of which asks by a file in a new ``folder`` and waits for another file there."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        self._folder = folder
        self.environment = os.environ | {_VARIABLE: str(folder)}

    def until(
        self, process: _Process, condition: Callable[[], object] = lambda: False, last: int | None = None
    ) -> None:
        """Let it work until the condition holds, or until this step, for which it then waits."""
        for number in itertools.count():
            while not (self._folder / f"{number} asks").exists():
                assert process.poll() is None, f"it has ended before: {process.poll()}"
                time.sleep(0.001)
            if number == last or condition():
                return
            (self._folder / f"{number} goes").touch()

    def end(self, process: _Process | None = None, how: int = 0) -> None:
        """Let it go on alone, after this signal if there is one."""
        if process:
            process.send_signal(how)
        (self._folder / _ALL).touch()

    def number(self) -> int:
        """How many steps have asked so far."""
        return len([*self._folder.glob("* asks")])


def be_slow() -> None:
    """In this process, from now on; a step is a write, a new folder or a new name."""
    real, numbers, one_at_a_time = os.pwrite, itertools.count(), threading.Lock()
    folder = Path(os.environ[_VARIABLE]) if _VARIABLE in os.environ else None

    def step() -> None:
        time.sleep(0.002)
        with one_at_a_time:
            number, waited = next(numbers), False
            if folder:
                (folder / f"{number} asks").touch()
                while not any((folder / name).exists() for name in (f"{number} goes", _ALL)):
                    waited = time.sleep(0.001) is None
            if folder and waited and (folder / _ALL).exists():
                time.sleep(0.3)  # the main thread hears the signal meanwhile

    def write(*arguments: Any) -> int:
        step()
        return real(*arguments)

    os.pwrite = write
    sys.addaudithook(lambda event, _: step() if event in ("os.mkdir", "os.rename") else None)
    jobs.DEFAULT = jobs.Sizes(step=1200, small=100, piece=600)  # most tensors go the way of large ones


if __name__ == "__main__":
    be_slow()
    main()
