"""Journals of a staging folder: which process writes which files, which files and parts of files are finished, their
checksums, and the reads that they were made from.

Each share of the files has one. It begins with the task and the names of the files, and the process that writes the
share has it locked. Each line has a checksum: a damaged one counts as not written. The last line says that the process
has ended, and all of the share is finished.

A later run keeps a finished file if its state (size, time, inode) is unchanged. A restart of the machine may lose
written bytes; after one, the checksum must be right too. Of an unfinished file it keeps the parts whose checksums are
right: they are always read again.
"""

from __future__ import annotations

import contextlib
import fcntl
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from reshard.publishing.records import ShareRun
from reshard.store.staging_names import JOURNAL, SUFFIX, entries_in, not_begun


def journals_in(work: Path) -> list[Path]:
    """The journals of all shares, of any run."""
    return sorted(work.glob(f"{JOURNAL}*"))


def read_journal(path: Path, *kinds: str) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """The entries of a journal (see ``entries_in``); none without a file."""
    if path.is_file() and not path.is_symlink():
        with path.open(errors="replace") as lines:  # a lost block of a disk has any bytes
            yield from entries_in(lines, *kinds)


def runs_in(work: Path, mine: str | None = None) -> Iterator[ShareRun]:
    """The last run of each share, in the order of their names. Of the share ``mine``, no other process is at work."""
    for path in journals_in(work):
        label, lines = path.name.removeprefix(JOURNAL), [*read_journal(path, "task", "ended")]
        begin, last = lines[-1] if lines else ({}, {})
        yield ShareRun(label, begin, "ended" in last, label != mine and is_locked(path))


def unfinished_command(path: Path) -> str | None:
    """The command whose staging folder this is, "COMMAND" if no journal says it; None for any other path."""
    runs = [*runs_in(path)] if path.name.endswith(SUFFIX) else []
    tasks = (str(run.begin["task"]) for run in runs if run.begin)
    return next((task.rpartition("-")[0] for task in tasks), "COMMAND" if runs else None)


def unfinished_parts(work: Path) -> Iterator[str]:
    """Yield a line for each part of an output that has not ended; none if one process writes the output."""
    parts = [run for run in runs_in(work) if run.label.startswith("part-")]
    for run in parts:
        names = {entry["name"] for _, entry in read_journal(work / f"{JOURNAL}{run.label}", "name")}
        files = len(run.begin.get("files", ()))
        written = f"{len(names)} of {files} files are written" if files else "no file is written"
        if not run.has_ended:
            yield f"{run.label}: {written}, {'it is' if run.is_at_work else 'nobody is'} at work"
    yield from (f"{part}: no file is written, nobody is at work" for part in not_begun([run.label for run in parts]))


def is_locked(path: Path) -> bool:
    """Whether another process holds a lock. Two processes that ask at the same time do not notice each other."""
    with contextlib.suppress(OSError), path.open("r+") as lock:  # over NFS only what may be written can be locked
        try:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False
