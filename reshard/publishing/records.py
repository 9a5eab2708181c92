"""Records of the work on an output: the files that a process writes, those that are finished, and what was read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from reshard.formats.documents import Record, document_of, structure
from reshard.formats.files.manifest import FileRecord


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
    """Steps of the work that are complete."""

    steps: tuple[tuple[int, int], ...]
    """The numbers of each step's job and slab."""
    size: int
    """The bytes of a step, because the slabs depend on it."""
    written: Mapping[str, str]
    """For each file the ``PartialSum.digest`` of the bytes that were written to it."""
    reads: tuple[Read, ...] = ()


WHOLE = "output"
"""The label of a share that is the whole output."""


@dataclass(frozen=True)
class FileShare:
    """The files of an output that one process writes: all, those of some ranks, or a part of about equal size."""

    label: str
    """Its name in messages, locks and journals (``part-0-of-4``)."""
    files: frozenset[str]
    planned: Mapping[str, int]
    """The bytes of the files that all processes write, as far as this one knows: the output is committed when they are
    finished.
    """
    folders: tuple[str, ...] = ()
    """The folders (of ranks) that are added to the output when this share is finished."""

    @property
    def has_others(self) -> bool:
        """Whether other processes write the rest of the output."""
        return bool(self.folders) or not (self.label == WHOLE or self.label.endswith("-of-1"))

    def goes_with(self, run: ShareRun) -> bool:
        """Whether another process may write its share at the same time: no file is in both, and neither is the whole
        output.
        """
        is_like = WHOLE not in (self.label, run.label) and run.begin["folders"] == bool(self.folders)
        return is_like and self.files.isdisjoint(run.begin["files"])


@dataclass(frozen=True)
class ShareRun:
    """The last run of a share: the line it began with (empty if it has not begun), whether all of the share is
    finished, and whether its process is at work.
    """

    label: str
    begin: Mapping[str, Any]
    has_ended: bool
    is_at_work: bool
