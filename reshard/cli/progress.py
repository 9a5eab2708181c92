"""Shows on stderr how far a long command is: a bar on a terminal, elsewhere a plain line every minute."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple

from reshard.cli.printing import print_note
from reshard.text import human_bytes, human_seconds, plural

if TYPE_CHECKING:
    from reshard.writing.summary import State

INTERVAL = 60.0
"""Seconds between two plain lines."""


def bars_are_wanted() -> bool:
    """Whether stderr is a terminal that can redraw a line, and the environment does not switch bars off."""
    if os.environ.get("HF_HUB_DISABLE_PROGRESS_BARS", "").upper() in {"1", "ON", "YES", "TRUE"}:
        return False
    return sys.stderr.isatty() and os.environ.get("TERM", "dumb") != "dumb"


class Measure(NamedTuple):
    """How many bytes of how many are done, and what is done with them; ``""`` where there is one measure alone."""

    what: str
    done: int
    total: int


class Progress:
    """A context manager that any thread calls with how far it is.

    ``how`` is ``bar``, ``log`` (plain lines), ``none``, or ``auto``: a bar where stderr is a terminal, else lines.
    """

    def __init__(self, title: str, *, how: str) -> None:
        self._title, self._quiet = title, how == "none"
        self._has_bar = how == "bar" or (how == "auto" and bars_are_wanted())
        self._lock = threading.Lock()
        self._bars: dict[str, Any] = {}
        self._began: dict[str, tuple[float, int]] = {}
        self._last = time.monotonic()

    def __enter__(self) -> Progress:
        return self

    def __call__(self, done: int, total: int) -> None:
        """Show that ``done`` of ``total`` bytes are done."""
        self.show([Measure("", done, total)])

    def moving(self, state: State) -> None:
        """Show how far a split or merge is: reading and writing, each by itself."""
        reading, writing = Measure("reading", state.read, state.to_read), Measure("writing", *state[2:4])
        self.show([reading, writing] if state.to_read else [], state.again)

    def show(self, measures: Sequence[Measure], again: int = 0) -> None:
        """Show how far each of these is, and that ``again`` requests were made a second time."""
        if self._quiet:
            return
        with self._lock:
            for measure in measures:
                if measure.what not in self._began:
                    self._begin(measure)
            if self._has_bar:
                with suppress(OSError):  # a terminal that has gone ends no work
                    self._draw(measures, again)
            elif measures and time.monotonic() - self._last >= INTERVAL:
                self._last = time.monotonic()
                text = f"{self._title}: {'; '.join(map(self._text, measures))}"
                text += f"; {plural(again, 'request')} tried again" if again else ""
                print_note(text)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for bar in reversed(self._bars.values()):
            bar.leave = False
            bar.close()

    def _begin(self, measure: Measure) -> None:
        if not self._began:
            self._last = time.monotonic()
        self._began[measure.what] = (time.monotonic(), measure.done)
        if self._has_bar:
            from tqdm import tqdm

            tqdm.monitor_interval = 0  # it would start a thread, in a process that forks
            self._bars[measure.what] = tqdm(
                desc=f"{self._title}, {measure.what}" if measure.what else self._title,
                total=measure.total,
                initial=measure.done,
                position=len(self._bars),
                unit="B",
                unit_scale=True,
                dynamic_ncols=True,
                file=sys.stderr,
            )

    def _draw(self, measures: Sequence[Measure], again: int) -> None:
        for measure in measures:
            bar = self._bars[measure.what]
            if again and measure is measures[0]:
                bar.set_postfix_str(f"tried again: {again:,}", refresh=False)
            bar.total = measure.total
            bar.update(max(0, measure.done - bar.n))

    def _text(self, measure: Measure) -> str:
        what, done, total = measure
        started, first = self._began[what]
        rate = (done - first) / max(time.monotonic() - started, 1e-9)
        share = done / total if total else 1.0
        text = f"{what} {human_bytes(done)}" if what else human_bytes(done)
        text += f" of {human_bytes(total)} ({share:.0%}), {human_bytes(rate)}/s"
        return f"{text}, {human_seconds((total - done) / rate)} left" if rate > 0 else text
