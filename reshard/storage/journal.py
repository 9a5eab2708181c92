"""The journals of a staging folder: which files are finished, their checksums, and what they were made from.

A later run keeps a finished file if its state (size, time, inode) is unchanged. A restart of the machine may lose
written bytes; after one, the checksum must be right too.
"""

from __future__ import annotations

import contextlib
import json
import platform
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from formats.files.checksum import file_checksum
from formats.files.stamps import Stamp, read_stamp
from reshard.storage.marks import STATE, open_new
from reshard.system import boot_id

_JOURNAL = f"{STATE}journal-"


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


@dataclass(frozen=True)
class Journals:
    """The journals in a staging folder.

    ``inputs`` are the states of the files that a run reads, ``parts`` the folders that it writes: a finished file is
    taken only from a run that had the same.
    """

    work: Path
    inputs: Sequence[Stamp]
    parts: Sequence[str]

    def path(self, label: str) -> Path:
        """The journal of a part."""
        return self.work / f"{_JOURNAL}{label}"

    def all(self) -> list[Path]:
        """The journals of all parts, of any run."""
        return sorted(self.work.glob(f"{_JOURNAL}*"))

    def begin(self, label: str, files: int | None) -> IO[str]:
        """A new journal of a part, of so many files if other processes write the rest."""
        path = self.path(label)
        path.unlink(missing_ok=True)
        journal = open_new(path, "a")
        begin: dict[str, Any] = {"inputs": [stamp.to_document() for stamp in self.inputs], "parts": [*self.parts]}
        begin |= {"boot": boot_id(), "host": _host()} | ({"files": files} if files is not None else {})
        journal.write(json.dumps(begin) + "\n")
        return journal

    def note(self, journal: IO[str], name: str, finished: Finished) -> None:
        """Add a finished file to a journal."""
        entry = {"name": name, "size": finished.size, "checksum": finished.checksum, "state": _state(self.work / name)}
        entry["reads"] = [[read.source, sorted(read.targets), read.sum] for read in finished.reads]
        journal.write(json.dumps(entry) + "\n")

    def found(
        self, journals: Iterable[Path], is_mine: Callable[[str], bool], *, of_all: bool = False
    ) -> Iterator[tuple[str, Finished]]:
        """The finished files in journals of runs with the same inputs and parts, if they are as they were.

        What was written before a restart of the machine must have its checksum; it is summed for the files of this
        process (``is_mine``). With ``of_all``, those that other processes write are among them, and what another
        machine has written is taken as it says.
        """
        for path in journals:
            with contextlib.suppress(ValueError, KeyError, TypeError, AttributeError):
                begin, *entries = read_journal(path)
                inputs = [read_stamp(document, "") for document in begin["inputs"]]
                if begin["parts"] != list(self.parts) or not _are_same(inputs, self.inputs):
                    continue
                is_safe = begin["boot"] == boot_id() is not None or (of_all and begin["host"] != _host())
                for entry in entries:
                    checked = is_safe or ((of_all or is_mine(entry["name"])) and self._has_checksum(entry))
                    if _is_untouched(self.work / entry["name"], entry) and checked:
                        reads = tuple(Read(of, frozenset(targets), total) for of, targets, total in entry["reads"])
                        yield entry["name"], Finished(entry["size"], entry["checksum"], reads)

    def _has_checksum(self, entry: Mapping[str, Any]) -> bool:
        path = self.work / entry["name"]
        is_there = entry["checksum"] is not None and _is_untouched(path, entry)
        return is_there and file_checksum(path) == entry["checksum"]


def read_journal(path: Path) -> list[Any]:
    """The lines of a journal; none, if there is no such file."""
    lines = path.read_text().splitlines() if path.is_file() and not path.is_symlink() else []
    return [json.loads(line) for line in lines if line.endswith("}")]


def _is_untouched(path: Path, entry: Mapping[str, Any]) -> bool:
    return path.is_file() and not path.is_symlink() and _state(path) == entry["state"]


def _state(path: Path) -> list[int]:
    found = path.stat()
    return [found.st_size, found.st_mtime_ns, found.st_ino]


def _are_same(before: Sequence[Stamp], now: Sequence[Stamp]) -> bool:
    """Whether files are the same; those that another machine saw, as far as can be told."""
    return len(before) == len(now) and all(
        one.closed_state == other.closed_state or (one.host != other.host and one.is_same(other))
        for one, other in zip(before, now, strict=True)
    )


def _host() -> str:
    return platform.node()
