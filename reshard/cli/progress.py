"""Shows on stderr how far a long command is: a bar on a terminal, elsewhere a plain line every minute."""

from __future__ import annotations

import os
import sys
import threading
import time
from contextlib import suppress
from types import TracebackType
from typing import Any

from reshard.cli.printing import print_note
from reshard.text import human_bytes, human_seconds, plural

INTERVAL = 60.0
"""Seconds between two plain lines."""


def bars_are_wanted() -> bool:
    """Whether stderr is a terminal that can redraw a line, and the environment does not switch bars off."""
    if os.environ.get("HF_HUB_DISABLE_PROGRESS_BARS", "").upper() in {"1", "ON", "YES", "TRUE"}:
        return False
    return sys.stderr.isatty() and os.environ.get("TERM", "dumb") != "dumb"


class Progress:
    """A context manager that any thread calls with how far it is.

    ``how`` is ``bar``, ``log`` (plain lines), ``none``, or ``auto``: a bar where stderr is a terminal, else lines.
    """

    def __init__(self, title: str, *, how: str) -> None:
        self._title, self._quiet = title, how == "none"
        self._has_bar = how == "bar" or (how == "auto" and bars_are_wanted())
        self._lock = threading.Lock()
        self._bar: Any = None
        self._began: tuple[float, int] | None = None
        self._last = 0.0

    def __enter__(self) -> Progress:
        return self

    def __call__(self, done: int, total: int, again: int = 0) -> None:
        """Show that ``done`` of ``total`` bytes are done, and that ``again`` requests were made a second time."""
        if self._quiet:
            return
        with self._lock:
            now = time.monotonic()
            if self._began is None:
                self._began, self._last = (now, done), now
            if self._has_bar:
                with suppress(OSError):  # a terminal that has gone ends no work
                    self._draw(done, total, again)
            elif now - self._last >= INTERVAL:
                self._last = now
                started, first = self._began
                rate = (done - first) / max(now - started, 1e-9)
                text = f"{self._title}: {human_bytes(done)} of {human_bytes(total)} "
                text += f"({done / total if total else 1.0:.0%}), {human_bytes(rate)}/s"
                text += f", {human_seconds((total - done) / rate)} left" if rate > 0 else ""
                print_note(text + (f"; {plural(again, 'request')} tried again" if again else ""))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.leave = False
            self._bar.close()

    def _draw(self, done: int, total: int, again: int) -> None:
        if self._bar is None:
            from tqdm import tqdm

            tqdm.monitor_interval = 0  # it would start a thread, in a process that forks
            self._bar = tqdm(
                desc=self._title,
                total=total,
                initial=done,
                unit="B",
                unit_scale=True,
                dynamic_ncols=True,
                file=sys.stderr,
            )
        if again:
            self._bar.set_postfix_str(f"tried again: {again:,}", refresh=False)
        self._bar.total = total
        self._bar.update(max(0, done - self._bar.n))
