"""Publishes an output in a bucket: a few files at a time are built in a folder here, and uploaded.

The files that make a folder a checkpoint (``config.json``, the index, the manifest) come last, so that a reader never
takes a part of it for a checkpoint. While an upload is unfinished, an object ``.reshard-unfinished`` says so, and names
the task. A journal object for each process has the files that it has uploaded, with their etags: a stopped run can go
on, on any machine, and keeps the files that have not changed.

To replace a checkpoint, or another task's unfinished output, the place is first marked, then cleared.

Before and after each file, a process checks that the place is still its task's. A store has no locks: if a file arrives
after another task published, the process notices it afterwards, and marks the place as unfinished.
"""

from __future__ import annotations

import os
import shutil
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from contextlib import contextmanager
from dataclasses import replace
from threading import Lock
from typing import Any

from formats.documents import json_bytes
from formats.errors import CheckpointError, PlanError
from formats.files.stamps import Stamp
from reshard.publishing.bucket_place import Bucket, journals
from reshard.publishing.existing import LAST
from reshard.publishing.journal import Finished, read_finished
from reshard.publishing.shares import WHOLE, FileShare
from reshard.publishing.staging import Check, Documents, PublishedError, Staging
from reshard.store.staging_names import JOURNAL, PUBLISHED, STATE, UNFINISHED, document_of, remove_tree
from reshard.store.threads import Threads
from reshard.system import check_space

_FILES = 4
"""Files that are uploaded at the same time; each in several parts."""

_TRIES = 5

ROOM = 64 << 30
"""Bytes of files that are built at a time on this machine, if its disk has twice as much space."""


class Uploading(Staging):
    """An output that is built a few files at a time in a local folder; each file is uploaded, and then removed locally.

    A journal in the bucket lists the uploaded files. So another machine may go on, and the process that finds the files
    of all processes there publishes. If two find this at the same time, both do the same.
    """

    def __init__(
        self, bucket: Bucket, task: Mapping[str, Any], share: FileShare, inputs: Sequence[Stamp] = (), *,
        overwrite: bool = False, check: Check = lambda _: None,
    ) -> None:  # fmt: skip
        folder = bucket.folder.with_name(f"{bucket.folder.name}-{share.label}")
        super().__init__(folder, task, share, inputs, overwrite=overwrite, check=check)
        self._bucket, self._number = bucket, os.urandom(4).hex()
        self.shown, self._may_hold_others = bucket.name, False
        self._threads: Threads | None = None
        self._entries: dict[str, dict[str, Any]] = {}
        self._lock_entries = Lock()
        self._in_place: dict[str, str | None] = {}
        """The etags of what stands at its final name."""
        self._uploads: list[Future[None]] = []

    def check(self) -> None:
        """As ``Staging.check``, for a place in a bucket, and for the disk on which a few files are built at a time."""
        if self.share.label != WHOLE and self._overwrite:
            raise PlanError(
                f"--overwrite is not possible where several processes write to {self.shown}",
                "remove what is there first",
            )
        there = self._bucket.existing(is_first=True)
        owner = self._bucket.owner() if UNFINISHED in there.names else None
        if any(not name.startswith(STATE) for name in there.names) and (owner is None or owner.task != self._name):
            self._check_existing(replace(there, names=there.names.difference(owner.clears if owner else ())))
        check_space(self.work.parent, max(self.share.planned.values(), default=0))

    def _begin(self) -> None:
        super()._begin()
        self._threads = Threads(_FILES)
        there, local = self._claim_place(), set(self.finished)
        for name, entry in self._uploaded(there):
            if name in self.share.files:
                self._entries[name] = entry
                self.finished[name] = read_finished(entry)
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
                self.check()  # another process may have published meanwhile
            old = there.keys() - {UNFINISHED}
            if old and self.share.has_others:
                raise self._begun_by_others(self.shown)
            if self._bucket.begin(self._name, owner, old):
                self._remove_all_old(old)
                return {}
        raise self._written_else()

    def _remove_all_old(self, old: Iterable[str]) -> None:
        """Remove what was there before; first what makes it a checkpoint."""
        old = {*old}
        for some in (old & {*LAST}, old - {*LAST}):
            self._all(self._remove_old, some)

    def _end(self, error: object) -> None:
        for upload in self._uploads:
            upload.cancel()
        if self._threads is not None:
            self._threads.close()
        if isinstance(error, PublishedError):
            self._remove_here()
        super()._end(error)

    def _remove_here(self) -> None:
        """Remove the local folder: all is in the bucket."""
        self._hold()
        remove_tree(self.work)

    # -- whose place it is

    def _check_ours(self) -> None:
        """Raise CheckpointError if the place is no longer this task's, PublishedError if others have finished it."""
        owner = self._bucket.owner()
        if owner is not None and owner.task == self._name:
            return
        if owner is not None:
            raise self._written_else()
        self.check()
        raise CheckpointError(f"{self.shown} was published or removed by another run", "run it again")

    @contextmanager
    def _while_ours(self, name: str) -> Iterator[None]:
        """Check it before a file is written or removed in the block, and afterwards.

        Marks the place as unfinished if another task has published it meanwhile.
        """
        self._check_ours()
        yield
        try:
            self._check_ours()
        except CheckpointError:
            there = self._bucket.existing()
            if UNFINISHED in there.names or there.is_published(self._name) or there.names.isdisjoint(LAST):
                raise
            self._bucket.begin("")
            raise CheckpointError(
                f"another run published {self.shown} while {name} was written or removed there, so it may hold "
                f"files of both and is marked as unfinished",
                "run the command again whose output it is to be",
            ) from None

    # -- uploading

    def batches(self, files: Iterable[tuple[str, int]]) -> Iterator[frozenset[str]]:
        """As many files at a time as the local disk has room for; each batch is uploaded before the next is written."""
        left = deque((name, size) for name, size in files if name in self.share.files - self.finished.keys())
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

    def note_finished(self, name: str, finished: Finished) -> None:
        """Upload a completed file."""
        super().note_finished(name, finished)
        self._raise_failed()
        self._upload_soon(name)

    def _upload_soon(self, name: str) -> None:
        assert self._threads is not None
        self._uploads.append(self._threads.submit(self._upload, name))

    def _upload(self, name: str) -> None:
        with self._while_ours(name):
            etag = self._bucket.put(name, self.work / name)
        entry = self.finished[name].to_document(name) | {"etag": etag}
        with self._lock_entries:
            self._entries[name] = entry
            self._put_journal()
        (self.work / name).unlink()

    def _put_journal(self) -> None:
        document = {"task": self._name, "files": len(self.share.files), "entries": [*self._entries.values()]}
        self._bucket.note(self._journal_key, json_bytes(document))

    @property
    def _journal_key(self) -> str:
        """The key of this process's journal; another run of the same part may be at work, on another machine."""
        return f"{JOURNAL}{self.share.label}.{self._number}"

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
        for journal in (document_of(self._bucket.content(key)) for key in journals(there)):
            for entry in journal["entries"] if journal.get("task") == self._name else ():
                if there.get(entry["name"]) == entry["etag"]:
                    yield entry["name"], entry

    def _clear(self) -> None:
        """Remove what was built, and forget what was uploaded, because it cannot be trusted."""
        wait(self._uploads)
        all_of = journals(self._bucket.there())
        mine = [key for key in all_of if key.startswith(f"{JOURNAL}{self.share.label}.")]
        for key in all_of if self._is_last else mine:
            self._bucket.delete(key)
        super()._clear()

    # -- publishing

    def is_last(self) -> bool:
        """Whether the files of all processes are in the bucket; takes them over.

        Raises PublishedError if another process has published them, CheckpointError if some are no longer there.
        """
        self._wait()
        self._check_ours()
        uploaded = dict(self._uploaded(self._bucket.there()))
        gone = (self._entries.keys() | self.finished.keys()) - uploaded.keys()
        if gone:
            self._check_ours()
            raise self._replaced(min(gone))
        self.finished |= {name: read_finished(entry) for name, entry in uploaded.items()}
        self._in_place |= {name: entry["etag"] for name, entry in uploaded.items()}
        self._is_last = self.share.planned.keys() <= self.finished.keys()
        return self._is_last

    def _check_in_place(self, files: Mapping[str, bytes]) -> None:
        """Raise CheckpointError if what was put at its final name is not there any more.

        Another process of the task may have put a small file there again: that has the same content, and perhaps
        another etag.
        """
        there = self._bucket.there()
        for name, etag in sorted(self._in_place.items()):
            is_as_put = name in there and there[name] == etag
            if not is_as_put and not (name in files and self._bucket.content(name) == files[name]):
                raise self._replaced(name)

    def _replaced(self, name: str) -> CheckpointError:
        return CheckpointError(
            f"{self.shown}/{name} was replaced or removed by another run",
            "run the same command again when nobody else writes there",
        )

    def commit(self, documents: Documents) -> None:
        """Upload the small files; those that make a folder a checkpoint come last.

        Before that, it removes what a stopped run should have cleared and did not.
        """
        published = f"{PUBLISHED}{self._name}"
        files = {**documents(), published: b""}
        owner, there = self._bucket.owner(), self._bucket.there()
        self._remove_all_old(there.keys() & {*(owner.clears if owner else ())} - files.keys() - self.finished.keys())
        self._all(lambda name: self._put_in(name, files[name]), files.keys() - {*LAST, published})
        for name in (each for each in (*LAST, published) if each in files):
            self._put_in(name, files[name])
        self._check_in_place(files)
        self._bucket.delete(UNFINISHED)
        self._all(self._bucket.delete, journals(there))
        self._remove_here()

    def _all(self, function: Callable[[str], object], names: Iterable[str]) -> None:
        """Call a function for all names, a few at a time."""
        assert self._threads is not None
        self._threads.map(function, sorted(names))

    def _remove_old(self, name: str) -> None:
        with self._while_ours(name):  # else it may be of those who have taken over
            self._bucket.delete(name)

    def _put_in(self, name: str, content: bytes) -> None:
        with self._while_ours(name):
            self._in_place[name] = self._bucket.put(name, content)
