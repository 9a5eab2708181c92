"""Publishes an output in a bucket: it is built in a folder here, and then uploaded.

The files that make a folder a checkpoint (``config.json``, the index, the manifest) come last, so that a reader never
takes a part of it for a checkpoint. While an upload is unfinished, an object ``.reshard-unfinished`` says so, and says
whose it is. A run that was stopped goes on: what was uploaded, and has not changed since, stays.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from formats.errors import CheckpointError
from formats.files.sharded import MANIFEST
from reshard.storage.bucket import UNFINISHED, is_url
from reshard.storage.output import STATE, Staging
from reshard.storage.remote import explain, open_store, without_query
from reshard.storage.threads import Threads

if TYPE_CHECKING:
    from obstore.store import ObjectStore

_LAST = ("config.json", "model.safetensors.index.json", MANIFEST)
_FILES = 4
"""Files that are uploaded at the same time; each in several parts."""


@dataclass(frozen=True)
class Bucket:
    """A place for an output in a bucket, and the folder in which it is built."""

    url: str
    folder: Path

    @property
    def name(self) -> str:
        """What messages call it."""
        return without_query(self.url).rstrip("/")

    @cached_property
    def _store(self) -> ObjectStore:
        return open_store(self.url)

    def check(self, *, overwrite: bool) -> None:
        """Raise CheckpointError if something is there that may not be replaced, or if the place cannot be read."""
        there = self._there()
        if not there or UNFINISHED in there:
            return
        if not there.keys() & set(_LAST):
            raise CheckpointError(
                f"{self.name} holds '{min(there)}' and is not a checkpoint, so it is not overwritten",
                "choose another place",
            )
        if not overwrite:
            raise CheckpointError(f"{self.name} exists", "remove it, choose another place, or pass --overwrite")

    def publish(self, staging: Staging) -> None:
        """Upload what was built, then remove it here.

        Raises CheckpointError if the store refuses; then the same command goes on.
        """
        files = {path.relative_to(staging.work).as_posix(): path for path in _files(staging.work)}
        before = self._there()
        self._put(UNFINISHED, b"reshard writes here; the same command again finishes it")
        for name in before.keys() & set(_LAST):
            self._delete(name)
        journal = staging.work / f"{STATE}uploaded"
        done = _read_journal(journal)
        with journal.open("a") as notes, Threads(_FILES) as threads:

            def upload(name: str) -> None:
                path = files[name]
                state = _state(path)
                if name not in before or done.get(name) != [state, before[name]]:
                    etag = self._put(name, path)
                    notes.write(json.dumps([name, state, etag]) + "\n")
                    notes.flush()

            threads.map(upload, sorted(files.keys() - set(_LAST)))
            for name in (each for each in _LAST if each in files):
                upload(name)
        for name in before.keys() - files.keys() - {UNFINISHED}:
            self._delete(name)
        self._delete(UNFINISHED)
        staging.remove_work()

    def _there(self) -> dict[str, str | None]:
        """The objects below the place, with their etags."""
        from obstore import list as listing

        try:
            return {meta["path"]: meta.get("e_tag") for metas in listing(self._store) for meta in metas}
        except Exception as error:
            raise explain(error, self.name) from None

    def _put(self, key: str, content: bytes | Path) -> str | None:
        from obstore import head, put

        try:
            put(self._store, key, content)
            meta = head(self._store, key)
        except Exception as error:
            raise explain(error, f"{self.name}/{key}", "writing") from None
        size = content.stat().st_size if isinstance(content, Path) else len(content)
        if meta["size"] != size:
            raise CheckpointError(f"{self.name}/{key} has {meta['size']:,} bytes after {size:,} were written")
        return meta.get("e_tag")

    def _delete(self, key: str) -> None:
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
    return built, Bucket(out, built)


def publish(staging: Staging, bucket: Bucket | None, *, overwrite: bool) -> None:
    """Publish what was built under its final name, or in a bucket. Raises CheckpointError."""
    if bucket is None:
        staging.publish_all(overwrite=overwrite)
    else:
        bucket.publish(staging)


def _files(work: Path) -> Iterator[Path]:
    found = (path for path in work.rglob("*") if path.is_file())
    return (path for path in found if not path.relative_to(work).parts[0].startswith(STATE))


def _state(path: Path) -> list[int]:
    found = path.stat()
    return [found.st_size, found.st_mtime_ns, found.st_ino]


def _read_journal(path: Path) -> dict[str, Any]:
    """What was uploaded: for each file its state here and its etag there."""
    done: dict[str, Any] = {}
    if path.is_file():
        for line in path.read_text().splitlines():
            with suppress(ValueError):
                name, state, etag = json.loads(line)
                done[name] = [state, etag]
    return done
