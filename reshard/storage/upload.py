"""Publishes an output in a bucket: a few files at a time are built in a folder here, and uploaded.

The files that make a folder a checkpoint (``config.json``, the index, the manifest) come last, so that a reader never
takes a part of it for a checkpoint. While an upload is unfinished, an object ``.reshard-unfinished`` says so. A journal
object for each process has the files that it has uploaded, with their etags: a run that was stopped goes on, on any
machine, and what has not changed since stays.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any

from formats.documents import json_bytes
from formats.errors import CheckpointError
from formats.files.sharded import MANIFEST
from formats.files.stamps import Stamp
from reshard.storage.bucket import JOURNAL, UNFINISHED, is_url
from reshard.storage.output import STATE, Dealt, Finished, PublishedError, Read, Staging, remove_tree
from reshard.storage.remote import etag_of, explain, open_store, without_query
from reshard.storage.threads import Threads

if TYPE_CHECKING:
    from obstore.store import ObjectStore

_LAST = ("config.json", "model.safetensors.index.json", MANIFEST)
_FILES = 4
"""Files that are uploaded at the same time; each in several parts."""

ROOM = 64 << 30
"""Bytes of files that are built here at a time, if the disk has twice as much left."""


@dataclass(frozen=True)
class Bucket:
    """A place for an output in a bucket, and the folder in which it is built."""

    url: str
    folder: Path
    cache: Path
    """Where what is read of a bucket is kept."""

    @property
    def name(self) -> str:
        """What messages call it."""
        return without_query(self.url).rstrip("/")

    def read_journal(self, key: str) -> dict[str, Any]:
        """A journal; empty, if it is not there any more or cannot be understood."""
        from obstore import get

        try:
            document = json.loads(bytes(get(self._store, key).bytes()))
        except (FileNotFoundError, ValueError):
            return {}
        except Exception as error:
            raise explain(error, f"{self.name}/{key}") from None
        return document if isinstance(document, dict) else {}

    @cached_property
    def _store(self) -> ObjectStore:
        return open_store(self.url)

    def check(self, *, overwrite: bool) -> None:
        """Raise CheckpointError if something is there that may not be replaced, or if the place cannot be read."""
        there = self.there()
        if not there or UNFINISHED in there:
            return
        if not there.keys() & set(_LAST):
            raise CheckpointError(
                f"{self.name} holds '{min(there)}' and is not a checkpoint, so it is not overwritten",
                "choose another place",
            )
        if not overwrite:
            raise CheckpointError(f"{self.name} exists", "remove it, choose another place, or pass --overwrite")

    def there(self) -> dict[str, str | None]:
        """The objects below the place, with their etags."""
        from obstore import list as listing

        try:
            return {meta["path"]: etag_of(meta) for metas in listing(self._store) for meta in metas}
        except Exception as error:
            raise explain(error, self.name) from None

    def put(self, key: str, content: bytes | Path) -> str | None:
        """Write an object, a large file in several parts; returns its etag. Raises CheckpointError."""
        from obstore import head, put

        try:
            put(self._store, key, content)
            meta = head(self._store, key)
        except Exception as error:
            raise explain(error, f"{self.name}/{key}", "writing") from None
        size = content.stat().st_size if isinstance(content, Path) else len(content)
        if meta["size"] != size:
            raise CheckpointError(f"{self.name}/{key} has {meta['size']:,} bytes after {size:,} were written")
        return etag_of(meta)

    def delete(self, key: str) -> None:
        """Remove an object, if it is there. Raises CheckpointError."""
        from obstore import delete

        with suppress(FileNotFoundError):
            try:
                delete(self._store, key)
            except FileNotFoundError:
                raise
            except Exception as error:
                raise explain(error, f"{self.name}/{key}", "removing") from None


def place_of(out: str | Path, cache_dir: Path | None) -> tuple[Path, Bucket | None]:
    """The folder in which an output is built, and its place in a bucket, if ``out`` is a URL.

    Raises CheckpointError for a web server.
    """
    if not isinstance(out, str) or "://" not in out:
        return Path(out), None
    if not is_url(out):
        raise CheckpointError(f"{without_query(out)}: no such kind of store", "give s3://, gs://, az:// or a folder")
    if out.startswith("http"):
        raise CheckpointError(f"{without_query(out)} is on a web server, which takes no files", "give a bucket's URL")
    from huggingface_hub import constants

    assets = cache_dir / "assets" if cache_dir else Path(constants.HF_ASSETS_CACHE)
    folder = assets / "reshard" / "uploads"
    folder.mkdir(parents=True, exist_ok=True)
    built = folder / hashlib.sha256(out.rstrip("/").encode()).hexdigest()[:32]
    return built, Bucket(out, built, assets)


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
        self._bucket, self._mine = bucket, dealt
        self._digest = self._task.name.removeprefix(STATE)
        self._threads = Threads(_FILES)
        self._entries: dict[str, dict[str, Any]] = {}
        self._lock_entries = Lock()
        self._uploads: list[Future[None]] = []

    def __enter__(self) -> Uploading:
        super().__enter__()
        there = self._bucket.there()
        if UNFINISHED not in there:
            if there.keys() & set(_LAST):
                self._check()  # another process may have published meanwhile
            self._bucket.put(UNFINISHED, b"reshard writes here; the same command again finishes it")
            for name in there.keys() & set(_LAST):
                self._bucket.delete(name)
        local = set(self.finished)
        for name, entry in self._uploaded(there):
            if self.writes(name):
                self._entries[name] = entry
                self.finished[name] = _finished(entry)
        for name in local - self._entries.keys():
            self._upload_soon(name)
        return self

    def __exit__(self, *exception: object) -> None:
        for upload in self._uploads:
            upload.cancel()
        self._threads.close()
        super().__exit__(*exception)

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
        self._upload_soon(name)

    def _upload_soon(self, name: str) -> None:
        self._uploads.append(self._threads.submit(self._upload, name))

    def _upload(self, name: str) -> None:
        etag = self._bucket.put(name, self.work / name)
        entry = _entry(name, self.finished[name], etag)
        with self._lock_entries:
            self._entries[name] = entry
            self._put_journal()
        (self.work / name).unlink()

    def _put_journal(self) -> None:
        document = {"task": self._digest, "files": len(self._mine.files), "entries": [*self._entries.values()]}
        self._bucket.put(f"{JOURNAL}{self._mine.label}", json_bytes(document))

    def _wait(self) -> None:
        """Wait for all uploads. Raises the error of one that failed."""
        begun, self._uploads = self._uploads, []
        wait(begun)
        for upload in begun:
            upload.result()

    def _uploaded(self, there: Mapping[str, str | None]) -> Iterator[tuple[str, dict[str, Any]]]:
        """The files of this task that any process has uploaded, if they are still what it has uploaded."""
        for journal in map(self._bucket.read_journal, _journals(there)):
            if journal.get("task") == self._digest:
                entries = (entry for entry in journal["entries"] if there.get(entry["name"]) == entry["etag"])
                yield from ((entry["name"], entry) for entry in entries)

    def clear(self) -> None:
        """Remove what was built, and forget what was uploaded, because it cannot be trusted."""
        wait(self._uploads)
        mine = [f"{JOURNAL}{self._mine.label}"]
        for key in mine if self._journals else _journals(self._bucket.there()):
            self._bucket.delete(key)
        remove_tree(self.work)

    @contextmanager
    def last(self) -> Iterator[bool]:
        """Whether the files of all processes are in the bucket. Raises PublishedError if another has published them."""
        self._wait()
        there = self._bucket.there()
        self.finished |= ((name, _finished(entry)) for name, entry in self._uploaded(there))
        if UNFINISHED not in there:
            try:
                self._check()
            except PublishedError:
                self.remove_work()
                raise
            raise CheckpointError(f"{self._bucket.name} was published or removed by another run", "run it again")
        self._unlock()
        yield True

    def publish_all(self, *, overwrite: bool) -> None:
        """Upload the small files; those that make a folder a checkpoint come last."""
        files = {path.relative_to(self.work).as_posix(): path for path in _files(self.work)}
        there = self._bucket.there()
        self._threads.map(lambda name: self._bucket.put(name, files[name]), sorted(files.keys() - set(_LAST)))
        journals = _journals(there)
        for name in there.keys() - files.keys() - self.finished.keys() - {UNFINISHED, *journals}:
            self._bucket.delete(name)
        for name in (each for each in _LAST if each in files):
            self._bucket.put(name, files[name])
        for name in (UNFINISHED, *journals):
            self._bucket.delete(name)
        self.remove_work()


def _journals(there: Iterable[str]) -> list[str]:
    """The journals among the objects of a bucket."""
    return [key for key in there if key.startswith(JOURNAL)]


def _entry(name: str, finished: Finished, etag: str | None) -> dict[str, Any]:
    reads = [[read.source, sorted(read.targets), read.sum] for read in finished.reads]
    return {"name": name, "size": finished.size, "checksum": finished.checksum, "etag": etag, "reads": reads}


def _finished(entry: Mapping[str, Any]) -> Finished:
    reads = tuple(Read(source, frozenset(targets), total) for source, targets, total in entry["reads"])
    return Finished(entry["size"], entry["checksum"], reads)


def _files(work: Path) -> Iterator[Path]:
    found = (path for path in work.rglob("*") if path.is_file())
    return (path for path in found if not path.relative_to(work).parts[0].startswith(STATE))
