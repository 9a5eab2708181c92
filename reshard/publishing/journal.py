"""Journals of a staging folder: which process writes which files, which files and parts of files are finished, their
checksums, and the reads that they were made from.

Each share of the files has one. It begins with the task and the names of the files, and the process that writes the
share has it locked. Each line has a checksum: a damaged one counts as not written. The last line says that the process
has ended, and all of the share is finished.

A later run keeps a finished file if its state (size, time, inode) is unchanged. A restart of the machine may lose
written bytes; after one, the checksum must be right too. Of an unfinished file it keeps the parts whose checksums are
right: they are always read again.

A ``FileShare`` has the files of an output that one process writes.
"""

from __future__ import annotations

import contextlib
import fcntl
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from reshard.formats.documents import Record, document_of, structure
from reshard.formats.files.sharded import FileRecord
from reshard.store.staging_names import JOURNAL, SUFFIX, entries_in, not_begun


@dataclass(frozen=True)
class Read:
    """The sum (see ``PartialSum.to_text``) of the bytes of a source file that were read for exactly these targets.

    Files are named relative to the source and to the output.
    """

    source: str
    targets: frozenset[str]
    sum: str


@dataclass(frozen=True)
class Finished:
    """A file that this run or an earlier one has completed: its size in bytes, its checksum, its source bytes."""

    size: int
    checksum: str | None
    reads: tuple[Read, ...] = ()

    def record(self, name: str) -> FileRecord:
        """The record of the file of this name in a manifest."""
        return FileRecord(name, self.size, self.checksum)


def finished_entry(finished: Finished, numbers: dict[Read, int]) -> dict[str, Any]:
    """Return the journal's entry for a finished file. A read that served several files gets a number, and is written
    once.
    """
    reads = list[Any]()
    for read in finished.reads:
        is_new, number = read not in numbers, numbers.setdefault(read, len(numbers))
        reads.append({**document_of(read), "number": number} if is_new else number)
    return {**document_of(replace(finished, reads=())), "reads": reads}


def read_finished(entry: Mapping[str, Any], numbered: dict[int, Read]) -> Finished:
    """A finished file from its entry, after the entries before it in its journal, whose reads are ``numbered``.

    Raises ValueError and KeyError.
    """
    reads = list[Read]()
    for read in entry["reads"]:
        if not isinstance(read, int):
            numbered[read["number"]] = structure(Read, Record(read, ""))
        reads.append(numbered[read if isinstance(read, int) else read["number"]])
    return structure(Finished, Record(entry, ""), reads=tuple(reads))


@dataclass(frozen=True)
class Moved:
    """Steps of the work that are complete, each by the numbers of its job and of its slab.

    ``size`` is that of a step in bytes, because the slabs depend on it. ``written`` has for each file the
    ``PartialSum.digest`` of the bytes that were written to it.
    """

    steps: tuple[tuple[int, int], ...]
    size: int
    written: Mapping[str, str]
    reads: tuple[Read, ...] = ()


def journals_in(work: Path) -> list[Path]:
    """The journals of all shares, of any run."""
    return sorted(work.glob(f"{JOURNAL}*"))


def read_journal(path: Path, *kinds: str) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """The entries of a journal (see ``entries_in``); none without a file."""
    if path.is_file() and not path.is_symlink():
        with path.open(errors="replace") as lines:  # a lost block of a disk has any bytes
            yield from entries_in(lines, *kinds)


WHOLE = "output"
"""The label of a share that is the whole output."""


@dataclass(frozen=True)
class FileShare:
    """The files of an output that one process writes: all, those of some ranks, or a part of about equal size.

    ``label`` is its name in messages, locks and journals (``part-0-of-4``). ``planned`` has the sizes in bytes of the
    files that all processes write, as far as this one knows: the output is committed when they are finished. With
    ``folders`` (of ranks), these folders are added to the output when this share is finished.
    """

    label: str
    files: frozenset[str]
    planned: Mapping[str, int]
    folders: tuple[str, ...] = ()

    @property
    def has_others(self) -> bool:
        """Whether other processes write the rest of the output."""
        return bool(self.folders) or not (self.label == WHOLE or self.label.endswith("-of-1"))

    def goes_with(self, run: Run) -> bool:
        """Whether another process may write its share at the same time: no file is in both, and neither is the whole
        output.
        """
        is_like = WHOLE not in (self.label, run.label) and run.begin["folders"] == bool(self.folders)
        return is_like and self.files.isdisjoint(run.begin["files"])


@dataclass(frozen=True)
class Run:
    """The last run of a share: the line it began with (empty if it has not begun), whether all of the share is
    finished, and whether its process is at work.
    """

    label: str
    begin: Mapping[str, Any]
    has_ended: bool
    is_at_work: bool


def runs_in(work: Path, mine: str | None = None) -> Iterator[Run]:
    """The last run of each share, in the order of their names. Of the share ``mine``, no other process is at work."""
    for path in journals_in(work):
        label, lines = path.name.removeprefix(JOURNAL), [*read_journal(path, "task", "ended")]
        begin, last = lines[-1] if lines else ({}, {})
        yield Run(label, begin, "ended" in last, label != mine and is_locked(path))


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
