"""Publishes an output in a bucket: a few files at a time are built in a folder here, and uploaded.

The files that make a folder a checkpoint (``config.json``, the index, the manifest) come last, so that a reader never
takes a part of it for a checkpoint. While an upload is unfinished, an object ``.reshard-unfinished`` says so, and whose
task it is. A journal object for each process has the files that it has uploaded, with their etags: a run that was
stopped goes on, on any machine, and what has not changed since stays.

Where a checkpoint is to be replaced, or another task's unfinished output, the place is marked first, and cleared.

Who uploads asks before and after each file whether the place is still its task's. A store has no lock: a file that was
on its way when another task published is seen afterwards, and the place is then marked as unfinished.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from contextlib import contextmanager
from pathlib import Path
from threading import Lock
from typing import Any

from formats.documents import json_bytes
from formats.errors import CheckpointError
from formats.files.stamps import Stamp
from reshard.storage.bucket import JOURNAL, UNFINISHED
from reshard.storage.journal import Finished, Read
from reshard.storage.marks import PUBLISHED, STATE, remove_tree
from reshard.storage.output import PublishedError, Staging
from reshard.storage.parts import Dealt
from reshard.storage.place import LAST, Bucket, is_published, journals
from reshard.storage.threads import Threads

_FILES = 4
"""Files that are uploaded at the same time; each in several parts."""

_TRIES = 5

ROOM = 64 << 30
"""Bytes of files that are built here at a time, if the disk has twice as much left."""


class Uploading(Staging):
    """An output that is built a few files at a time in a folder here; each is uploaded, and then removed here.

    What is uploaded stands in a journal in the bucket: so another machine may go on, and the process that finds the
    files of all processes there publishes. Two that find this at the same time do the same.
    """

    def __init__(
        self, bucket: Bucket, task: Mapping[str, Any], inputs: Sequence[Stamp], dealt: Dealt, *,
        check: Callable[[], None],
    ) -> None:  # fmt: skip
        folder = bucket.folder.with_name(f"{bucket.folder.name}-{dealt.label}")
        super().__init__(folder, task, [""], inputs, fsync=False, check=check, dealt=dealt)
        self._bucket, self._mine, self._number = bucket, dealt, os.urandom(4).hex()
        self.shown = bucket.name
        self._threads: Threads | None = None
        self._entries: dict[str, dict[str, Any]] = {}
        self._lock_entries = Lock()
        self._in_place: dict[str, str | None] = {}
        """The etags of what stands at its final name."""
        self._uploads: list[Future[None]] = []

    def __enter__(self) -> Uploading:
        super().__enter__()
        try:
            self._begin()
        except BaseException:
            self.__exit__(*sys.exc_info())
            raise
        return self

    def _begin(self) -> None:
        self._threads = Threads(_FILES)
        there, local = self._claim_place(), set(self.finished)
        for name, entry in self._uploaded(there):
            if self.writes(name):
                self._entries[name] = entry
                self.finished[name] = _finished(entry)
                (self.work / name).unlink(missing_ok=True)  # a run was killed before it did so, or while it wrote
        for name in local - self._entries.keys():
            self._upload_soon(name)

    def _claim_place(self) -> dict[str, str | None]:
        """Make the place this task's, and clear it of what another has made; returns what is there of this task."""
        for _ in range(_TRIES):
            owner = self._bucket.owner()
            there = self._bucket.there()  # after it: who has published since then is seen
            if owner is not None and owner.task == self._name:
                return there
            if owner is None and not there.keys().isdisjoint(LAST):
                self._check()  # another process may have published meanwhile
            old = there.keys() - {UNFINISHED}
            if old and self._mine.count > 1:
                raise self._begun_by_others(self._bucket.name)
            if self._bucket.begin(self._name, owner, old):
                self._clear(old)
                return {}
        raise self._written_by_others()

    def _check_may_clear(self) -> None:
        """What is built here is of one part, whose lock is held: the place says whose it is (``_claim_place``)."""

    def _clear(self, old: Iterable[str]) -> None:
        """Remove what was there before; first what makes it a checkpoint."""
        old = {*old}
        for some in (old & {*LAST}, old - {*LAST}):
            self._all(self._remove_old, some)

    def _written_by_others(self) -> CheckpointError:
        return CheckpointError(
            f"another run is writing something else to {self._bucket.name}", "wait for it, or choose another place"
        )

    def __exit__(self, *exception: object) -> None:
        for upload in self._uploads:
            upload.cancel()
        if self._threads is not None:
            self._threads.close()
        if isinstance(exception[1], PublishedError):
            self.remove_work()
        super().__exit__(*exception)

    # -- whose place it is

    def _check_ours(self) -> None:
        """Raise CheckpointError if the place is no longer this task's, PublishedError if others have finished it."""
        owner = self._bucket.owner()
        if owner is not None and owner.task == self._name:
            return
        if owner is not None:
            raise self._written_by_others()
        self._check()
        raise CheckpointError(f"{self._bucket.name} was published or removed by another run", "run it again")

    def _check_still_ours(self, name: str) -> None:
        """The same after a file was written or removed; marks the place as unfinished if another task has published."""
        try:
            self._check_ours()
        except CheckpointError:
            there = self._bucket.there()
            if UNFINISHED in there or is_published(there, self._name) or there.keys().isdisjoint(LAST):
                raise
            self._bucket.begin("")
            raise CheckpointError(
                f"another run published {self._bucket.name} while {name} was written or removed there, so it may hold "
                f"files of both and is marked as unfinished",
                "run the command again whose output it is to be",
            ) from None

    # -- uploading

    def batches(self, files: Iterable[tuple[str, int]]) -> Iterator[frozenset[str]]:
        """As many files at a time as there is room for here; each batch is uploaded before the next is written."""
        left = deque((name, size) for name, size in files if self.writes(name) and name not in self.finished)
        while True:
            room = min(ROOM, shutil.disk_usage(self.work).free // 2)
            batch = set[str]()
            while left and (not batch or left[0][1] <= room):
                name, size = left.popleft()
                batch.add(name)
                room -= size
            yield frozenset(batch)
            self._wait()
            if not left:
                return

    def note_finished(self, part: str, name: str, finished: Finished) -> None:
        """Upload a completed file."""
        super().note_finished(part, name, finished)
        self._raise_failed()
        self._upload_soon(name)

    def _upload_soon(self, name: str) -> None:
        assert self._threads is not None
        self._uploads.append(self._threads.submit(self._upload, name))

    def _upload(self, name: str) -> None:
        self._check_ours()
        etag = self._bucket.put(name, self.work / name)
        self._check_still_ours(name)
        entry = _entry(name, self.finished[name], etag)
        with self._lock_entries:
            self._entries[name] = entry
            self._put_journal()
        (self.work / name).unlink()

    def _put_journal(self) -> None:
        document = {"task": self._name, "files": len(self._mine.files), "entries": [*self._entries.values()]}
        self._bucket.note(self._journal, json_bytes(document))

    @property
    def _journal(self) -> str:
        """The key of this process's journal; another run of the same part may be at work, on another machine."""
        return f"{JOURNAL}{self._mine.label}.{self._number}"

    def _wait(self) -> None:
        """Wait for all uploads. Raises the error of one that failed; what has not begun by then is not uploaded."""
        wait(self._uploads, return_when=FIRST_EXCEPTION)
        self._raise_failed()
        self._uploads.clear()

    def _raise_failed(self) -> None:
        """Raise the error of an upload that has failed."""
        for upload in self._uploads:
            if upload.done():
                upload.result()

    def _uploaded(self, there: Mapping[str, str | None]) -> Iterator[tuple[str, dict[str, Any]]]:
        """The files of this task that any process has uploaded, if they are still what it has uploaded."""
        for journal in map(self._bucket.read, journals(there)):
            entries = journal["entries"] if journal.get("task") == self._name else ()
            for entry in entries:
                if there.get(entry["name"]) == entry["etag"]:
                    yield entry["name"], entry

    def clear(self) -> None:
        """Remove what was built, and forget what was uploaded, because it cannot be trusted."""
        wait(self._uploads)
        all_of = journals(self._bucket.there())
        mine = [key for key in all_of if key.startswith(f"{JOURNAL}{self._mine.label}.")]
        for key in mine if self._journals else all_of:
            self._bucket.delete(key)
        remove_tree(self.work)

    # -- publishing

    @contextmanager
    def last(self) -> Iterator[bool]:
        """Whether the files of all processes are in the bucket. Raises PublishedError if another has published them."""
        self._wait()
        self._check_ours()
        self._check_uploaded()
        yield True

    def _check_uploaded(self) -> None:
        """Take over what all processes have uploaded. Raises CheckpointError if some of it is not there any more."""
        uploaded = dict(self._uploaded(self._bucket.there()))
        gone = (self._entries.keys() | self.finished.keys()) - uploaded.keys()
        if gone:
            self._check_ours()
            raise self._replaced(min(gone))
        self.finished |= {name: _finished(entry) for name, entry in uploaded.items()}
        self._in_place |= {name: entry["etag"] for name, entry in uploaded.items()}

    def _check_in_place(self, files: Mapping[str, bytes | Path]) -> None:
        """Raise CheckpointError if what was put at its final name is not there any more.

        Another process of the task may have put a small file there again: that has the same content, and perhaps
        another etag.
        """
        there = self._bucket.there()
        for name, etag in sorted(self._in_place.items()):
            is_as_put = name in there and there[name] == etag
            if not is_as_put and not (name in files and self._bucket.holds(name, files[name])):
                raise self._replaced(name)

    def _replaced(self, name: str) -> CheckpointError:
        return CheckpointError(
            f"{self._bucket.name}/{name} was replaced or removed by another run",
            "run the same command again when nobody else writes there",
        )

    def publish_all(self, *, overwrite: bool) -> None:
        """Upload the small files; those that make a folder a checkpoint come last.

        What a run that was stopped has not cleared is removed before.
        """
        published = f"{PUBLISHED}{self._name}"
        files: dict[str, bytes | Path] = {path.relative_to(self.work).as_posix(): path for path in _files(self.work)}
        files[published] = b""
        owner, there = self._bucket.owner(), self._bucket.there()
        self._clear(there.keys() & {*(owner.clears if owner else ())} - files.keys() - self.finished.keys())
        self._all(lambda name: self._put_in(name, files[name]), files.keys() - {*LAST, published})
        for name in (each for each in (*LAST, published) if each in files):
            self._put_in(name, files[name])
        self._check_in_place(files)
        self._bucket.delete(UNFINISHED)
        self._all(self._bucket.delete, journals(there))
        self.remove_work()

    def _all(self, function: Callable[[str], object], names: Iterable[str]) -> None:
        """Call a function for all names, a few at a time."""
        assert self._threads is not None
        self._threads.map(function, sorted(names))

    def _remove_old(self, name: str) -> None:
        self._check_ours()  # else it may be of those who have taken over
        self._bucket.delete(name)
        self._check_still_ours(name)

    def _put_in(self, name: str, content: bytes | Path) -> None:
        self._check_ours()
        self._in_place[name] = self._bucket.put(name, content)
        self._check_still_ours(name)


def _entry(name: str, finished: Finished, etag: str | None) -> dict[str, Any]:
    reads = [[read.source, sorted(read.targets), read.sum] for read in finished.reads]
    return {"name": name, "size": finished.size, "checksum": finished.checksum, "etag": etag, "reads": reads}


def _finished(entry: Mapping[str, Any]) -> Finished:
    reads = tuple(Read(source, frozenset(targets), total) for source, targets, total in entry["reads"])
    return Finished(entry["size"], entry["checksum"], reads)


def _files(work: Path) -> Iterator[Path]:
    found = (path for path in work.rglob("*") if path.is_file())
    return (path for path in found if not path.relative_to(work).parts[0].startswith(STATE))
