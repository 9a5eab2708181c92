"""Publishes an output in a bucket: a few files at a time are built in a folder here, and uploaded.

A ``Bucket`` is the place and what is there, ``Uploading`` a process that writes to it.

The files that make a folder a checkpoint (``config.json``, the index, the manifest) come last, so that a reader never
takes a part of it for a checkpoint. The very last has the task in its metadata. Two kinds of objects say that a place
is unfinished. The mark ``.reshard-unfinished`` says whose it is: a store makes or replaces it only if it is what the
process has seen. A journal for each process has the files that it has uploaded, with their etags: a stopped run can go
on, on any machine, and keeps the files that have not changed. No other process has a journal of this name, so it stays
when somebody who comes late removes a mark that is another's meanwhile.

To replace a checkpoint, or another task's unfinished output, a process puts its journal there, makes the mark its own,
and then removes all that the new output does not have: the manifest, which knows what may be removed, goes last.

Before and after each file, a process checks that the place is still its task's. A store has no locks: if a file arrives
after another task took the place, the process notices it afterwards, and puts a journal there that is nobody's.
docs/explanation/design.md has the states; tests/reshard/test_bucket_interleavings.py tries all orders of the requests.
"""

from __future__ import annotations

import os
import shutil
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any, TypeVar

from formats.documents import json_bytes
from formats.errors import CheckpointError, PlanError, ReshardError, redacted
from formats.files.checksum import Stamp
from reshard.publishing.existing import LAST, Existing
from reshard.publishing.journal import WHOLE, FileShare, Finished, read_finished
from reshard.publishing.staging import Check, Documents, PublishedError, Staging
from reshard.store.remote import Remote, Small, StoredFile, ask, content, etag_of, listing, open_store, small
from reshard.store.selection import is_url
from reshard.store.staging_names import JOURNAL, STATE, UNFINISHED, document_of, remove_tree
from reshard.store.threads import WAKE, Threads
from reshard.system import check_space

if TYPE_CHECKING:
    from obstore.store import ObjectStore


_SINGLE = 8 << 20
"""An object of at most so many bytes is written by one request."""
_SECOND = len("2026-01-01 00:00:00")
"""The length of a time to the second: HTTP headers have no fractions."""
TASK = "reshardtask"
"""The key of an object's metadata that names the task; Azure's have no hyphens."""

T = TypeVar("T")


@dataclass(frozen=True)
class Bucket:
    """A place for an output in a bucket, and the folder in which it is built."""

    url: str = field(repr=False)
    folder: Path

    @property
    def name(self) -> str:
        """Its name in messages."""
        return redacted(self.url).rstrip("/")

    @cached_property
    def _store(self) -> ObjectStore:
        return open_store(self.url, once=True)

    def _ask(self, doing: str, key: str, request: Callable[[], T]) -> T:
        """The result of a request for an object. Raises CheckpointError."""
        return ask(self.url, key, request, doing)

    def check_apart(self, location: str, remotes: Iterable[Remote]) -> None:
        """Raise CheckpointError if a source is or holds this place, or lies in it, by whatever URL.

        ``location`` is the source's, ``remotes`` the files that are read of it.
        """
        stored = [remote for remote in remotes if isinstance(remote, StoredFile)]
        for url in {file.store for file in stored} or {location}:
            if is_url(url) and (_are_nested(self.url, url) or any(self._source_keys(stored))):
                raise CheckpointError(
                    f"{self.name} and {redacted(url).rstrip('/')} are the same place, or one lies in the other",
                    "choose another place",
                )

    def _source_keys(self, stored: Iterable[StoredFile]) -> Iterator[str]:
        """The keys of source files that are stored in this bucket, by etag and time, whichever URL names them."""
        keys = {(file.etag, file.modified[:_SECOND]): file.key for file in stored if file.etag is not None}
        for meta in listing(self._store, self.url) if keys else ():
            key = keys.get((etag_of(meta) or "", str(meta["last_modified"])[:_SECOND]))
            if key is not None and f"/{meta['path']}".endswith(f"/{key}"):
                yield key

    def existing(self, *, is_first: bool = False) -> Existing:
        """What is there. Raises CheckpointError."""
        return Existing(self.name, frozenset(self.objects(is_first=is_first)), self.content)

    def objects(self, *, is_first: bool = False) -> dict[str, str | None]:
        """The objects below the place, with their etags. Raises CheckpointError."""
        return {meta["path"]: etag_of(meta) for meta in listing(self._store, self.url, is_first=is_first)}

    def content(self, key: str) -> bytes | None:
        """The content of a small object; None, if it is not there."""
        return content(self._store, self.url, key)

    def small(self, key: str) -> Small | None:
        """A small object; None, if it is not there."""
        return small(self._store, self.url, key)

    def task(self, key: str) -> str | None:
        """The task that the metadata of a small object name; None, if it is not there."""
        there = self.small(key)
        return None if there is None else there.attributes.get(TASK, "")

    def put(self, key: str, content: bytes | Path, task: str = "") -> str | None:
        """Write an object, a large file in several parts; returns its etag. Raises CheckpointError.

        A small one may say of which ``task`` it is.
        """
        from obstore import head, put

        size = content.stat().st_size if isinstance(content, Path) else len(content)
        if size > _SINGLE:  # the store itself sends a part that fails again, not the whole file
            store = open_store(self.url)
            answer: Mapping[str, Any] = self._ask("writing", key, lambda: put(store, key, content))
        else:
            answer = self.note(key, content, task)
        meta = self._ask("writing", key, lambda: head(self._store, key))
        if meta["size"] != size:
            raise CheckpointError(f"{self.name}/{key} has {meta['size']:,} bytes after {size:,} were written")
        return etag_of(answer) or etag_of(meta)  # what is there may be another's by now

    def delete(self, key: str) -> None:
        """Remove an object, if it is there. Raises CheckpointError."""
        from obstore import delete

        def request() -> None:
            with suppress(FileNotFoundError):
                delete(self._store, key)

        self._ask("removing", key, request)

    def note(self, key: str, content: bytes | Path, task: str = "") -> Mapping[str, Any]:
        """Write a small object, which others may replace at any time. Raises CheckpointError."""
        from obstore import put

        attributes = {TASK: task} if task else None
        return self._ask(
            "writing", key, lambda: put(self._store, key, content, attributes=attributes, use_multipart=False)
        )

    def begin(self, task: str, over: Small | None = None) -> None:
        """Mark the place as unfinished output of a task, if it has no mark, or still the mark ``over``, which it
        replaces.
        """
        from obstore import put
        from obstore.exceptions import AlreadyExistsError, NotSupportedError, PreconditionError

        says = "reshard writes here; the same command again finishes it"
        content = json_bytes({"task": task, "says": says})

        def request() -> None:
            mode: Any = "create" if over is None else dict(over.version)
            try:
                put(self._store, UNFINISHED, content, attributes={TASK: task}, mode=mode)
            except (AlreadyExistsError, PreconditionError, FileNotFoundError):
                return
            except NotSupportedError:
                put(self._store, UNFINISHED, content, attributes={TASK: task})

        self._ask("writing", UNFINISHED, request)


def journals(objects: Iterable[str]) -> list[str]:
    """The journals among the objects of a bucket."""
    return [key for key in objects if key.startswith(JOURNAL)]


def _are_nested(one: str, other: str) -> bool:
    """Whether two URLs are of the same place, or one of a place in the other."""
    (store, bucket, *path), (kind, container, *other_path) = _parts(one), _parts(other)
    shorter = min(len(path), len(other_path))
    return (store, bucket) == (kind, container) and path[:shorter] == other_path[:shorter]


def _parts(url: str) -> list[str]:
    """What a URL stands for, however it is spelled: the kind of store, the bucket, and the parts of the key."""
    from obstore.store import HTTPStore

    store: Any = open_store(url)
    if isinstance(store, HTTPStore):
        return ["http", *redacted(url).split("/")]
    config = store.config
    account = config.get("account_name") or os.environ.get("AZURE_STORAGE_ACCOUNT_NAME", "")
    container = config.get("bucket") or f"{account}/{config.get('container_name')}"
    return [type(store).__name__, container, *(part for part in str(store.prefix or "").split("/") if part)]


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
        self._bucket = bucket
        self._journal_key = self._new_key(self._name)
        """The key of this process's journal; another run of the same part may be at work, on another machine."""
        self.shown, self._may_hold_others = bucket.name, False
        self._threads: Threads | None = None
        self._lock_journal = Lock()
        self._in_place: dict[str, str | None] = {}
        """The etags of what stands at its final name."""
        self._known: dict[str, dict[str, Any]] = {}
        """The files of any share that were uploaded when this process began: their journals may be removed by then."""
        self._uploads: list[Future[None]] = []

    def check(self) -> None:
        """As ``Staging.check``, for a place in a bucket, and for the disk on which a few files are built at a time."""
        if self.share.label != WHOLE and self._overwrite:
            raise PlanError(
                f"--overwrite is not possible where several processes write to {self.shown}",
                "remove what is there first",
            )
        existing = self._bucket.existing(is_first=True)
        if (self.share.label != WHOLE or self._journal_key in existing.names) and self._is_published():
            raise PublishedError(f"{self.shown} is complete")
        existing = replace(existing, names=existing.names - {self._journal_key})
        if any(not name.startswith(STATE) for name in existing.names) and self._bucket.task(UNFINISHED) != self._name:
            self._check(existing)
        check_space(self.work.parent, max(self.share.planned.values(), default=0))

    def _begin(self) -> None:
        super()._begin()
        self._threads = Threads(_FILES)
        try:
            objects, local = self._claim_place(), set(self.finished)
        except ReshardError:
            self._bucket.delete(self._journal_key)  # nothing else was changed
            raise
        self._known, foreign = self._uploaded(objects), {*journals(objects)} - self._of_task(objects)
        # if all is uploaded, and by nobody else, other processes may be writing the small files
        if foreign or not self.share.planned.keys() <= self._known.keys():
            self._remove_old(objects.keys() - self.share.planned.keys())
        self._all(self._bucket.delete, foreign)
        for name, entry in self._known.items():
            if name in self.share.files:
                self._in_place[name] = entry["etag"]
                self.finished[name] = read_finished(entry)
                self.path(name).unlink(missing_ok=True)  # a run was killed before it did so, or while it wrote
        for name in local - self._in_place.keys():
            self._upload_soon(name)

    def _claim_place(self) -> dict[str, str | None]:
        """Make the place this task's; returns what is there."""
        was_empty = False
        for _ in range(_TRIES):
            mark = self._bucket.small(UNFINISHED)
            objects = self._bucket.objects()  # after it: who has published since then is seen
            is_ours, of_task = mark is not None and mark.attributes.get(TASK) == self._name, self._of_task(objects)
            has_last = not objects.keys().isdisjoint(LAST)
            if is_ours and self._journal_key in objects:
                noted = (entry["name"] for entry in self._entries(of_task))
                if not (was_empty and has_last) or self.share.planned.keys() <= {*noted}:
                    return objects
                for key in (UNFINISHED, self._journal_key):  # another process published before the mark was made
                    self._bucket.delete(key)
                was_empty = False
                continue
            if mark is None and has_last:
                self.check()  # another process may have published meanwhile
            others = of_task - {self._journal_key}
            if mark is None and others and self._is_published(is_ending=True):  # or who published was killed
                self._known |= {entry["name"]: entry for entry in self._entries(others)}
                if self.share.planned.keys() - self._known.keys():
                    self._all(self._bucket.delete, others)  # it has been looked at, and some are removed already
                    raise PublishedError(f"{self.shown} is complete")
            goes_on = is_ours or (mark is None and bool(others))
            if self.share.has_others and not goes_on and objects.keys() - of_task - {UNFINISHED}:
                raise self._begun_by_others(self.shown)
            self._note()
            if not is_ours:
                was_empty = mark is None and not has_last
                self._bucket.begin(self._name, mark)
        raise self._written_else()

    def _remove_old(self, names: Iterable[str]) -> None:
        """Remove what was there before, if it is of a checkpoint; what knows that goes last.

        Raises CheckpointError.
        """
        old = {name for name in names if not name.startswith(STATE)}
        if old:
            self._check(replace(self._bucket.existing(), names=frozenset({*old, UNFINISHED})))
        for some in (old - {*LAST}, old & {*LAST}):
            self._all(self._remove, some)

    def _end(self, error: object) -> None:
        for upload in self._uploads:
            upload.cancel()
        if self._threads is not None:
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
        self.check()
        raise CheckpointError(f"{self.shown} was published or removed by another run", "run it again")

    def _is_published(self, *, is_ending: bool = False) -> bool:
        """Whether the output of this task is complete there, with the weight files that this process has seen there.

        ``is_ending``: also while its other processes remove their journals.
        """
        objects = self._bucket.objects()
        seen = {name: self._in_place[name] for name in (self.share.planned if self._is_last else ())}
        mine = self._of_task(objects) if is_ending else {self._journal_key}
        is_unfinished = UNFINISHED in objects or {*journals(objects)} - mine
        last = [name for name in LAST if name in objects]
        if not last or is_unfinished or seen.items() - objects.items():
            return False
        return self._bucket.task(last[-1]) == self._name

    @contextmanager
    def _while_ours(self, name: str, *, is_put: bool) -> Iterator[None]:
        """Check it before a file is put or removed in the block, and afterwards.

        If another task has taken it meanwhile, a journal of nobody's says that it is unfinished.
        """
        self._check_ours()
        yield
        try:
            self._check_ours()
        except ReshardError as error:
            if is_put and isinstance(error, PublishedError):  # the same bytes again
                raise
            self._bucket.note(self._new_key("nobody"), b"{}")  # no task takes it for its own, or has seen it before
            raise CheckpointError(
                f"another run took {self.shown} while {name} was written or removed there, so it may hold files of "
                f"both and is marked as unfinished",
                "run the command again whose output it is to be",
            ) from None

    def _new_key(self, task: str) -> str:
        return f"{JOURNAL}{self.share.label}.{task}.{os.urandom(4).hex()}"

    def _of_task(self, objects: Iterable[str]) -> set[str]:
        """The journals of this task."""
        return {key for key in journals(objects) if f".{self._name}." in key}

    # -- uploading

    def batches(self, files: Iterable[tuple[str, int]]) -> Iterator[frozenset[str]]:
        """As many files at a time as the local disk has room for; each batch is uploaded before the next is written."""
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
        self._upload_soon(name)

    def _upload_soon(self, name: str) -> None:
        assert self._threads is not None
        self._uploads.append(self._threads.submit(self._upload, name))

    def _upload(self, name: str) -> None:
        with self._while_ours(name, is_put=True):
            etag = self._bucket.put(name, self.path(name))
        with self._lock_journal:
            self._in_place[name] = etag
            self._note()
        self.path(name).unlink()

    def _note(self) -> None:
        """Write the journal of this process."""
        document = {"task": self._name, "files": len(self.share.files), "entries": self._own_entries()}
        self._bucket.note(self._journal_key, json_bytes(document))

    def _own_entries(self) -> list[dict[str, Any]]:
        """The files of this process's share that are uploaded, with their etags."""
        etags = {name: etag for name, etag in self._in_place.items() if name in self.share.files}
        return [self.finished[name].to_document(name) | {"etag": etag} for name, etag in etags.items()]

    def _wait(self) -> None:
        """Wait for all uploads. Raises the error of one that failed; what has not begun by then is not uploaded."""
        while wait(self._uploads, WAKE, FIRST_EXCEPTION).not_done:
            self._raise_failed()
        self._raise_failed()
        self._uploads.clear()

    def _raise_failed(self) -> None:
        """Raise the error of an upload that has failed."""
        for upload in self._uploads:
            if upload.done():
                upload.result()

    def _entries(self, keys: Iterable[str]) -> Iterator[dict[str, Any]]:
        """What the journals of this task among these have."""
        for journal in (document_of(self._bucket.content(key)) for key in sorted(keys)):
            yield from journal["entries"] if journal.get("task") == self._name else ()

    def _uploaded(self, objects: Mapping[str, str | None]) -> dict[str, dict[str, Any]]:
        """The files of this task that any process has uploaded, if they are still what it has uploaded."""
        entries = [*self._known.values(), *self._own_entries(), *self._entries(self._of_task(objects))]
        return {entry["name"]: entry for entry in entries if objects.get(entry["name"]) == entry["etag"]}

    def _clear(self) -> None:
        """Remove what was built, and forget what was uploaded, because it cannot be trusted."""
        wait(self._uploads)
        all_of = self._of_task(self._bucket.objects())
        of_share = [key for key in all_of if key.startswith(f"{JOURNAL}{self.share.label}.")]
        for key in all_of if self._is_last else of_share:
            self._bucket.delete(key)
        super()._clear()

    # -- publishing

    def is_last(self) -> bool:
        """Whether the files of all processes are in the bucket; takes them over.

        Raises PublishedError if another process has published them, CheckpointError if some are no longer there.
        """
        self._wait()
        self._check_ours()
        uploaded = self._uploaded(self._bucket.objects())
        gone = self.finished.keys() - uploaded.keys()
        if gone:
            self._check_ours()
            raise self._replaced(min(gone))
        self.finished |= {name: read_finished(entry) for name, entry in uploaded.items()}
        self._in_place |= {name: entry["etag"] for name, entry in uploaded.items()}
        self._is_last = self.share.planned.keys() <= self.finished.keys()
        return self._is_last

    def _replaced(self, name: str) -> CheckpointError:
        return CheckpointError(
            f"{self.shown}/{name} was replaced or removed by another run",
            "run the same command again when nobody else writes there",
        )

    def commit(self, documents: Documents) -> None:
        """Upload the small files; those that make a folder a checkpoint come last, and the very last names the task."""
        files = documents()
        self._all(lambda name: self._put_in(name, files[name]), files.keys() - {*LAST})
        *early, last = (document for document in LAST if document in files)
        for name in early:
            self._put_in(name, files[name])
        self._put_in(last, files[last], self._name)
        self._bucket.delete(UNFINISHED)
        there = self._bucket.objects()  # whatever comes later is followed by a look that finds no mark
        if {*journals(there)} - self._of_task(there):
            raise self._written_else()
        for name, etag in sorted(self._in_place.items()):
            # another process of the task may have put a small file again: the same content, and perhaps another etag
            is_as_put = name in there and there[name] == etag
            if not is_as_put and not (name in files and self._bucket.content(name) == files[name]):
                raise self._replaced(name)
        self._all(self._bucket.delete, self._of_task(there))

    def _all(self, function: Callable[[str], object], names: Iterable[str]) -> None:
        """Call a function for all names, a few at a time."""
        assert self._threads is not None
        self._threads.map(function, sorted(names))

    def _remove(self, name: str) -> None:
        with self._while_ours(name, is_put=False):  # else it may be of those who have taken over
            self._bucket.delete(name)

    def _put_in(self, name: str, content: bytes, task: str = "") -> None:
        with self._while_ours(name, is_put=True):
            self._in_place[name] = self._bucket.put(name, content, task)
