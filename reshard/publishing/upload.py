"""Publishes an output in a bucket: a few files at a time are built in a folder here, and uploaded.

The files that make a folder a checkpoint (``config.json``, the index, the manifest) come last, so that a reader never
takes a part of it for a checkpoint. The very last has the task in its metadata. Two kinds of objects say that a place
is unfinished. The mark ``.reshard-unfinished`` says whose it is: a store makes it only if there is none. A journal for
each process has the files that it has uploaded, with their etags: a stopped run can go on, on any machine, and keeps
the files that have not changed. No other process has a journal of this name, so it stays when somebody who comes late
removes a mark that is another's meanwhile.

A place with another task's mark, or journal, is refused. To replace a complete checkpoint, a process makes the mark,
puts its journal there, and then removes all that the new output does not have: the manifest, which knows what may be
removed, goes last.

Before and after each file, a process checks that the place is still its task's. A store has no locks: if a file arrives
after the task was published, and perhaps replaced since, the process notices it afterwards, and puts a journal there
that is nobody's.
docs/explanation/design.md has the states; tests/publishing/test_bucket_interleavings.py tries all orders of
the requests.
"""

from __future__ import annotations

import os
import shutil
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from contextlib import suppress
from pathlib import Path
from threading import Lock
from typing import Any, NamedTuple

from reshard.formats.errors import CheckpointError, PlanError, ReshardError
from reshard.formats.files.checksum import Stamp
from reshard.publishing.existing import LAST, Existing
from reshard.publishing.locks import remove_tree
from reshard.publishing.records import WHOLE, FileShare, Finished, Read, finished_entry, read_finished
from reshard.publishing.staging import Check, MakeDocuments, PublishedError, Staging
from reshard.store.bucket import Bucket
from reshard.store.staging_names import JOURNAL, STATE, UNFINISHED, journal_in, journal_line
from reshard.store.threads import WAKE, Threads
from reshard.system import check_space

_FILES = 4
"""Files that are uploaded at the same time; each in several parts."""

_TRIES = 5
_NOBODY = "nobody"
"""The task in the name of a journal that no task owns: files of several tasks may be there."""

ROOM = 64 << 30
"""Bytes of files that are built at a time on this machine, if its disk has twice as much space."""


def _nobodys(keys: Iterable[str]) -> set[str]:
    return {key for key in keys if f".{_NOBODY}." in key}


class Uploaded(NamedTuple):
    """A file in the bucket, and the etag that the store gave it."""

    etag: str | None
    finished: Finished


class Uploading(Staging):
    """An output that is built a few files at a time in a local folder; each file is uploaded, and then removed locally.

    A journal in the bucket lists the uploaded files. So another machine may go on, and the process that finds the files
    of all processes there publishes. If two find this at the same time, both do the same.
    """

    def __init__(
        self, bucket: Bucket, folder: Path, task: Mapping[str, Any], share: FileShare, inputs: Sequence[Stamp] = (), *,
        overwrite: bool = False, check: Check = lambda _: None,
    ) -> None:  # fmt: skip
        super().__init__(
            folder.with_name(f"{folder.name}-{share.label}"), task, share, inputs, overwrite=overwrite, check=check
        )
        self._bucket = bucket
        self._journal_key = self._new_key(self._name)
        """The key of this process's journal; another run of the same part may be at work, on another machine."""
        self.shown, self._may_hold_others = bucket.name, False
        self._threads = Threads(0)
        self._lock_journal = Lock()
        self._noted: dict[str, Uploaded] = {}
        """The files that this process has uploaded, or has seen in journals, which may be removed since."""
        self._uploads: list[Future[None]] = []

    def check(self) -> None:
        """Raise an error as ``Staging.check`` does, for a place in a bucket, and if the disk here has no room for the
        largest file.
        """
        if self.share.label != WHOLE and self._overwrite:
            raise PlanError(
                f"--overwrite is not possible where several processes write to {self.shown}",
                "remove what is there first",
            )
        existing = self._existing(self._bucket.objects(is_first=True))
        if (self.share.label != WHOLE or self._journal_key in existing.names) and self._is_published():
            raise PublishedError(f"{self.shown} is complete")
        owner = self._bucket.task(UNFINISHED)
        self._refuse_others(owner, existing.names)
        existing = self._existing(existing.names - {self._journal_key})
        if any(not name.startswith(STATE) for name in existing.names) and owner != self._name:
            self._check(existing)
        check_space(self.work.parent, max(self.share.planned.values(), default=0))

    def _existing(self, names: Iterable[str]) -> Existing:
        return Existing(self.shown, frozenset(names), self._bucket.content)

    def _begin(self) -> None:
        super()._begin()
        self._threads = Threads(_FILES)
        try:
            objects, local = self._claim_place(), set(self.finished)
        except ReshardError:
            self._bucket.delete(self._journal_key)  # nothing else was changed
            raise
        self._noted, foreign = self._uploaded(objects), self._journals_in(objects, of_task=False)
        # if all is uploaded, and by nobody else, other processes may be writing the small files
        if foreign or not self.share.planned.keys() <= self._noted.keys():
            self._remove_old(objects.keys() - self.share.planned.keys())
        self._threads.map(self._bucket.delete, sorted(foreign))
        for name, uploaded in self._noted.items():
            if name in self.share.files:
                self.finished[name] = uploaded.finished
                self.path(name).unlink(missing_ok=True)  # a run was killed before it did so, or while it wrote
        for name in local - self._noted.keys():
            self._uploads.append(self._threads.submit(self._upload, name))

    def _claim_place(self) -> dict[str, str | None]:
        """Claim the place for this task if no task owns it, and return the names that are there. Raises
        CheckpointError.
        """
        was_empty = False
        for _ in range(_TRIES):
            owner = self._bucket.task(UNFINISHED)
            objects = self._bucket.objects()  # after it: who has published since then is seen
            own, has_last = self._journals_in(objects), not objects.keys().isdisjoint(LAST)
            if owner == self._name and self._journal_key in own:
                if not (was_empty and has_last) or self.share.planned.keys() <= dict(self._entries(own)).keys():
                    return objects
                for key in (UNFINISHED, self._journal_key):  # another process published before the mark was made
                    self._bucket.delete(key)
                was_empty = False
                continue
            if owner is None and has_last:
                self.check()  # another process may have published meanwhile
            others = own - {self._journal_key}
            if owner is None and others and self._is_published(is_ending=True):  # or who published was killed
                self._noted |= self._entries(others)
                if self.share.planned.keys() - self._noted.keys():
                    self._threads.map(
                        self._bucket.delete, sorted(others)
                    )  # it has been looked at, and some are removed already
                    raise PublishedError(f"{self.shown} is complete")
            self._refuse_others(owner, objects)
            if owner is None:
                was_empty = not has_last
            if owner is not None or self._bucket.begin(self._name):
                self._put_journal()  # never beside another's mark
        raise self._written_else()

    def _refuse_others(self, owner: str | None, names: Iterable[str]) -> None:
        """Raise CheckpointError for a place that is another task's: by its mark, or, if none is there, by a journal.

        What is nobody's is not taken by one of several processes.
        """
        own, foreign = self._journals_in(names), self._journals_in(names, of_task=False)
        others = foreign if self.share.has_others else foreign - _nobodys(foreign)
        if owner not in {None, self._name} or (owner is None and others and not own):
            raise CheckpointError(
                f"{self.shown} holds the unfinished output of another command",
                f"finish it with that command, or remove it{self._bucket.removal}",
            )

    def _remove_old(self, names: Iterable[str]) -> None:
        """Remove the files of an earlier checkpoint; the manifest, which names them, goes last.

        Raises CheckpointError.
        """
        old = {name for name in names if not name.startswith(STATE)}
        if old:
            self._check(self._existing({*old, UNFINISHED}))
        for some in (old - {*LAST}, old & {*LAST}):
            self._threads.map(self._change, sorted(some))

    def _end(self, error: object) -> None:
        for upload in self._uploads:
            upload.cancel()
        self._threads.close()
        if isinstance(error, PublishedError):
            self._bucket.delete(self._journal_key)
        if error is None or isinstance(error, PublishedError):  # all is in the bucket
            self._hold()
            remove_tree(self.work)
        super()._end(error)

    # -- whose place it is

    def _check_ours(self) -> None:
        """Raise CheckpointError if the place is no longer this task's, PublishedError if others have finished it."""
        owner = self._bucket.task(UNFINISHED)
        if owner == self._name:
            return
        if owner is not None:
            raise self._written_else()
        if self._is_published(is_ending=True):
            raise PublishedError(f"{self.shown} is complete")
        self._refuse_others(owner, self._bucket.objects())
        raise CheckpointError(f"{self.shown} was published or removed by another run", "run it again")

    def _is_published(self, *, is_ending: bool = False) -> bool:
        """Whether this task's output is complete in the bucket, and this process's weight files are unchanged there.

        With ``is_ending``, the journals of the task's other processes may still be there.
        """
        objects = self._bucket.objects()
        seen = {name: self._noted[name].etag for name in (self.share.planned if self._is_last else ())}
        mine = self._journals_in(objects) if is_ending else {self._journal_key}
        is_unfinished = UNFINISHED in objects or {key for key in objects if key.startswith(JOURNAL)} - mine
        last = [name for name in LAST if name in objects]
        if not last or is_unfinished or seen.items() - objects.items():
            return False
        return self._bucket.task(last[-1]) == self._name

    def _change(self, name: str, content: bytes | Path | None = None, task: str = "") -> str | None:
        """Put a file of this content, or (None) remove it, if the place is this task's before and afterwards.

        Returns the etag of what was put. If the place was no longer this task's afterwards, a journal of nobody's says
        that it is unfinished.
        """
        self._check_ours()
        etag = self._bucket.put(name, content, task) if content is not None else None
        if content is None:
            self._bucket.delete(name)
        try:
            self._check_ours()
        except ReshardError as error:
            if content is not None and isinstance(error, PublishedError):  # the same bytes again
                raise
            self._bucket.note(self._new_key(_NOBODY), b"{}")  # no task takes it for its own, or has seen it before
            raise CheckpointError(
                f"{self.shown} was published or cleared while {name} was written or removed there, so it may hold "
                "files of two runs and is marked as unfinished",
                "run the command again whose output it is to be",
            ) from None
        return etag

    def _new_key(self, task: str) -> str:
        return f"{JOURNAL}{self.share.label}.{task}.{os.urandom(4).hex()}"

    def _journals_in(self, objects: Iterable[str], *, of_task: bool = True) -> set[str]:
        """The journals of this task, or of others."""
        return {key for key in objects if key.startswith(JOURNAL) and (f".{self._name}." in key) == of_task}

    # -- uploading

    def batches(self, files: Iterable[tuple[str, int]]) -> Iterator[frozenset[str]]:
        """Yield as many files at a time as fit on the local disk; each batch is uploaded before the next is written."""
        pending = deque((name, size) for name, size in files if name in self.share.files - self.finished.keys())
        while True:
            room = min(ROOM, shutil.disk_usage(self.work).free // 2)
            batch = set[str]()
            while pending and (not batch or pending[0][1] <= room):
                name, size = pending.popleft()
                batch.add(name)
                room -= size
            yield frozenset(batch)
            self._wait()
            if not pending:
                return

    def note_finished(self, name: str, finished: Finished) -> None:
        """Upload a completed file."""
        super().note_finished(name, finished)
        self._raise_failed()
        self._uploads.append(self._threads.submit(self._upload, name))

    def _upload(self, name: str) -> None:
        etag = self._change(name, self.path(name))
        with self._lock_journal:
            self._noted[name] = Uploaded(etag, self.finished[name])
            self._put_journal()
        self.path(name).unlink()

    def _put_journal(self) -> None:
        """Write the journal of this process: the files of its share that are uploaded."""
        numbers = dict[Read, int]()
        first = journal_line({"task": self._name, "files": len(self.share.files)})
        entries = (
            {"name": name, "etag": uploaded.etag} | finished_entry(uploaded.finished, numbers)
            for name, uploaded in self._noted.items()
            if name in self.share.files
        )
        lines = (journal_line(entry, first) for entry in entries)
        self._bucket.note(self._journal_key, "".join([first, *lines]).encode())

    def _wait(self) -> None:
        """Wait for all uploads. Raises the error of a failed one; uploads that have not begun by then are dropped."""
        while wait(self._uploads, WAKE, FIRST_EXCEPTION).not_done:
            self._raise_failed()
        self._raise_failed()
        self._uploads.clear()

    def _raise_failed(self) -> None:
        """Raise the error of an upload that has failed."""
        for upload in self._uploads:
            if upload.done():
                upload.result()

    def _entries(self, keys: Iterable[str]) -> Iterator[tuple[str, Uploaded]]:
        """Yield the entries of the journals among these keys that belong to this task."""
        for key in sorted(keys):
            numbered = dict[int, Read]()
            for begin, entry in journal_in(self._bucket.content(key), "name"):
                with suppress(KeyError):  # a line is damaged that says what was read for several files
                    if begin["task"] == self._name:
                        uploaded = Uploaded(entry["etag"], read_finished(entry, numbered))
                        yield entry["name"], uploaded

    def _uploaded(self, objects: Mapping[str, str | None]) -> dict[str, Uploaded]:
        """The files of this task that any process has uploaded, if they are still what it has uploaded."""
        entries = [*self._noted.items(), *self._entries(self._journals_in(objects))]
        return {name: uploaded for name, uploaded in entries if objects.get(name) == uploaded.etag}

    def _clear(self) -> None:
        """Remove what was built, and forget what was uploaded, because it cannot be trusted."""
        wait(self._uploads)
        all_of = self._journals_in(self._bucket.objects())
        of_share = [key for key in all_of if key.startswith(f"{JOURNAL}{self.share.label}.")]
        for key in all_of if self._is_last else of_share:
            self._bucket.delete(key)
        super()._clear()

    # -- publishing

    def is_last(self) -> bool:
        """Return whether the files of all processes are in the bucket, and take them over.

        Raises PublishedError if another process has published them, CheckpointError if some are no longer there.
        """
        self._wait()
        self._check_ours()
        uploaded = self._uploaded(self._bucket.objects())
        gone = self.finished.keys() - uploaded.keys()
        if gone:
            self._check_ours()
            raise self._replaced(min(gone))
        self.finished |= {name: each.finished for name, each in uploaded.items()}
        self._noted |= uploaded
        self._is_last = self.share.planned.keys() <= self.finished.keys()
        return self._is_last

    def _replaced(self, name: str) -> CheckpointError:
        return CheckpointError(
            f"{self.shown}/{name} was replaced or removed by another run",
            "run the same command again when nobody else writes there",
        )

    def commit(self, documents: MakeDocuments) -> None:
        """Upload the small files; those that make a folder a checkpoint come last, and the very last names the task."""
        files = documents()
        sides, (*early, last) = sorted(files.keys() - {*LAST}), [document for document in LAST if document in files]
        etags = self._threads.map(lambda name: self._change(name, files[name]), sides)
        etags += [self._change(name, files[name]) for name in early]
        etags.append(self._change(last, files[last], self._name))
        in_place = {name: uploaded.etag for name, uploaded in self._noted.items()}
        in_place |= zip((*sides, *early, last), etags, strict=True)
        self._bucket.delete(UNFINISHED)
        there = self._bucket.objects()  # whatever comes later is followed by a look that finds no mark
        if _nobodys(there):  # another task's may be there: it found this output complete
            raise self._written_else()
        for name, etag in sorted(in_place.items()):
            # another process of the task may have put a small file again: the same content, and perhaps another etag
            is_as_put = name in there and there[name] == etag
            if not is_as_put and not (name in files and self._bucket.content(name) == files[name]):
                raise self._replaced(name)
        self._threads.map(self._bucket.delete, sorted(self._journals_in(there)))
