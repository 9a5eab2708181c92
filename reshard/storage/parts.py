"""The parts of an output that several processes write: who writes what, and how far they are."""

from __future__ import annotations

import contextlib
import fcntl
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from reshard.storage.journal import read_journal
from reshard.storage.marks import STATE


@dataclass(frozen=True)
class Dealt:
    """The files of an output that one of several processes writes.

    ``label`` is what messages, locks and journals call this part (``part-0-of-4``); ``count`` is the number of parts.
    """

    label: str
    count: int
    files: frozenset[str]


@dataclass(frozen=True)
class Progress:
    """How far a process is with its part of an output: files finished, of how many, and whether it is at work."""

    part: str
    finished: int
    files: int
    running: bool


def parts_of(work: Path) -> list[Progress]:
    """The parts of an unfinished output that several processes write; none, if one process writes it."""
    found = dict[str, Progress]()
    for path in sorted(work.glob(f"{STATE}lock-part-*")):
        label = path.name.removeprefix(f"{STATE}lock-")
        begin: dict[str, Any] = {}
        entries: list[Any] = []
        with contextlib.suppress(ValueError):
            begin, *entries = read_journal(work / f"{STATE}journal-{label}")
        found[label] = Progress(label, len(entries), int(begin.get("files", 0)), is_locked(path))
    return [*found.values(), *(Progress(label, 0, 0, running=False) for label in not_begun(found))]


def not_begun(labels: Collection[str]) -> list[str]:
    """The parts of an output (``part-0-of-4``) that are missing, given those of which something is known."""
    counts = {int(label.rpartition("-")[2]) for label in labels if label.startswith("part-")}
    all_of = (f"part-{index}-of-{count}" for count in sorted(counts) for index in range(count))
    return [label for label in all_of if label not in labels]


def is_locked(path: Path) -> bool:
    """Whether another process holds a lock. Two that ask at the same time do not see each other."""
    with contextlib.suppress(OSError), path.open("r+") as lock:  # over NFS only what may be written can be locked
        try:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False
