"""What commands print: results on stdout, as text or as one JSON document; notes on stderr.

How far a long command is goes to stderr, too: as a bar on a terminal, elsewhere as a plain line every minute.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

from formats.errors import printable, redacted
from formats.mesh import Mesh
from reshard.cli.errors import print_result, say
from reshard.system import disk_errors
from reshard.text import human_bytes, human_seconds, plural

SCHEMA_VERSION = 1


def print_lines(*lines: str) -> None:
    """Print lines of the result; what a terminal would obey in a name that was read is escaped."""
    print_result("\n".join(printable(line) for text in lines for line in text.split("\n")))


def print_pairs(pairs: Iterable[tuple[str, str]], width: int) -> None:
    """Print ``label  text`` lines, indented by two, the labels ``width`` characters wide."""
    for label, text in pairs:
        print_lines(f"  {label:<{width}} {text}")


def print_path(path: os.PathLike[str] | str) -> None:
    """Print a path byte for byte, whatever its encoding; a URL without its secrets."""
    print_result(os.fsencode(redacted(path) if isinstance(path, str) else path))


def print_note(text: str) -> None:
    """Print one line on stderr: it is not part of the result."""
    say(text)


def write_report(file: Path, text: str) -> None:
    """Write a page. Raises CheckpointError."""
    from reshard.pages.markup import write_page

    with disk_errors(file):
        write_page(file, text)


def print_json(document: Mapping[str, Any]) -> None:
    """Print the one document of ``--json``, with its ``schema_version`` first."""
    plain = _plain({"schema_version": SCHEMA_VERSION, **document})
    print_result(json.dumps(plain, indent=2, ensure_ascii=False, allow_nan=False))


def _plain(value: Any) -> Any:
    """The same document in JSON's types, its texts without secrets."""
    if isinstance(value, str | Path):
        return redacted(str(value))
    if isinstance(value, Mesh):
        return value.to_document()
    if isinstance(value, Mapping):
        return {_plain(key): _plain(item) for key, item in value.items()}
    return [*map(_plain, value)] if isinstance(value, list | tuple) else value


def fields_of(result: Any, **keys: str) -> dict[str, Any]:
    """The fields of a dataclass for a document, by their names or by these keys; those with an empty one are left out.

    ``padding`` has the ``size`` and the ``padded`` size of each axis.
    """
    named = {keys.get(name, name): value for name, value in vars(result).items()}
    named.pop("", None)
    if "padding" in named:
        named["padding"] = {axis: {"size": size, "padded": to} for axis, (size, to) in named["padding"].items()}
    return named


def terminal_width() -> int | None:
    """Columns of the terminal that stdout is; None if it is not one."""
    return (os.get_terminal_size(sys.stdout.fileno()).columns or None) if sys.stdout.isatty() else None


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

    def __call__(self, moved: int, total: int, again: int = 0) -> None:
        """Show that ``moved`` of ``total`` bytes are done, and that ``again`` requests were made a second time."""
        if self._quiet:
            return
        with self._lock:
            now = time.monotonic()
            if self._began is None:
                self._began, self._last = (now, moved), now
            if self._has_bar:
                with suppress(OSError):  # a terminal that has gone ends no work
                    self._draw(moved, total, again)
            elif now - self._last >= INTERVAL:
                self._last = now
                started, first = self._began
                rate = (moved - first) / max(now - started, 1e-9)
                text = f"{self._title}: {human_bytes(moved)} of {human_bytes(total)} "
                text += f"({moved / total if total else 1.0:.0%}), {human_bytes(rate)}/s"
                text += f", {human_seconds((total - moved) / rate)} left" if rate > 0 else ""
                print_note(text + (f"; {plural(again, 'request')} tried again" if again else ""))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.leave = False
            self._bar.close()

    def _draw(self, moved: int, total: int, again: int) -> None:
        if self._bar is None:
            from tqdm import tqdm

            tqdm.monitor_interval = 0  # it would start a thread, for nothing
            self._bar = tqdm(
                desc=self._title,
                total=total,
                initial=moved,
                unit="B",
                unit_scale=True,
                dynamic_ncols=True,
                file=sys.stderr,
            )
        if again:
            self._bar.set_postfix_str(f"tried again: {again:,}", refresh=False)
        self._bar.total = total
        self._bar.update(max(0, moved - self._bar.n))
