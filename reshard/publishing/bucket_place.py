"""A place for an output in a bucket: what is there, and who may write there."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from formats.documents import json_bytes
from formats.errors import CheckpointError, redacted
from reshard.publishing.existing import Existing
from reshard.store.remote import Remote, StoredFile, ask, etag_of, open_store
from reshard.store.selection import is_url
from reshard.store.staging_names import JOURNAL, UNFINISHED, document_of

if TYPE_CHECKING:
    from obstore.store import ObjectStore

_SINGLE = 8 << 20
"""An object of at most so many bytes is written by one request."""
_SECOND = len("2026-01-01 00:00:00")
"""The length of a time to the second: HTTP headers have no fractions."""

T = TypeVar("T")


class Owner(NamedTuple):
    """The task whose output is unfinished at a place (an empty text: no task's), and the state of the object that says
    so.

    ``clears`` has the files that were there before, which it removes.
    """

    task: str
    clears: Collection[str]
    version: Mapping[str, str]


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

    @cached_property
    def _patient_store(self) -> ObjectStore:
        """A store that tries the parts of a large object again by itself."""
        return open_store(self.url)

    def _ask(self, doing: str, key: str, request: Callable[[], T]) -> T:
        """The result of a request for an object. Raises CheckpointError."""
        return ask(self.url, key, request, doing)

    def check_apart(self, location: str, remotes: Iterable[Remote]) -> None:
        """Raise CheckpointError if a source is or holds this place, or lies in it, by whatever URL.

        ``location`` is the source's, ``remotes`` the files that are read of it.
        """
        stored = [remote for remote in remotes if isinstance(remote, StoredFile)]
        for url in {file.store for file in stored} or {location}:
            if is_url(url) and (_are_nested(self.url, url) or any(self._held(stored))):
                raise CheckpointError(
                    f"{self.name} and {redacted(url).rstrip('/')} are the same place, or one lies in the other",
                    "choose another place",
                )

    def _held(self, stored: Iterable[StoredFile]) -> Iterator[str]:
        """The keys of source files that are stored in this bucket, by etag and time, whichever URL names them."""
        keys = {(file.etag, file.modified[:_SECOND]): file.key for file in stored if file.etag is not None}
        for meta in self._listing() if keys else ():
            key = keys.get((etag_of(meta) or "", str(meta["last_modified"])[:_SECOND]))
            if key is not None and f"/{meta['path']}".endswith(f"/{key}"):
                yield key

    def existing(self, *, is_first: bool = False) -> Existing:
        """What is there. Raises CheckpointError."""
        return Existing(self.name, frozenset(self.there(is_first=is_first)), self.content)

    def there(self, *, is_first: bool = False) -> dict[str, str | None]:
        """The objects below the place, with their etags. Raises CheckpointError."""
        return {meta["path"]: etag_of(meta) for meta in self._listing(is_first=is_first)}

    def _listing(self, *, is_first: bool = False) -> list[Mapping[str, Any]]:
        from obstore import list as listing

        def request() -> list[Mapping[str, Any]]:
            return [meta for metas in listing(self._store) for meta in metas]

        return ask(self.url, "", request, is_first=is_first)

    def content(self, key: str) -> bytes | None:
        """The content of a small object; None, if it is not there."""
        found = self._get(key)
        return found[0] if found is not None else None

    def _get(self, key: str) -> tuple[bytes, Mapping[str, Any]] | None:
        """The content and the state of a small object; None, if it is not there."""
        from obstore import get

        def request() -> tuple[bytes, Mapping[str, Any]] | None:
            try:
                answer = get(self._store, key)
            except FileNotFoundError:
                return None
            return bytes(answer.bytes()), answer.meta

        return self._ask("reading", key, request)

    def put(self, key: str, content: bytes | Path) -> str | None:
        """Write an object, a large file in several parts; returns its etag. Raises CheckpointError."""
        from obstore import head, put

        size = content.stat().st_size if isinstance(content, Path) else len(content)
        if size > _SINGLE:  # a part that fails is sent again, not the whole file
            self._ask("writing", key, lambda: put(self._patient_store, key, content))
        else:
            self.note(key, content)
        meta = self._ask("writing", key, lambda: head(self._store, key))
        if meta["size"] != size:
            raise CheckpointError(f"{self.name}/{key} has {meta['size']:,} bytes after {size:,} were written")
        return etag_of(meta)

    def delete(self, key: str) -> None:
        """Remove an object, if it is there. Raises CheckpointError."""
        from obstore import delete

        def request() -> None:
            with suppress(FileNotFoundError):
                delete(self._store, key)

        self._ask("removing", key, request)

    def note(self, key: str, content: bytes | Path) -> None:
        """Write a small object, which others may replace at any time. Raises CheckpointError."""
        from obstore import put

        self._ask("writing", key, lambda: put(self._store, key, content, use_multipart=False))

    # -- whose it is while it is unfinished

    def owner(self) -> Owner | None:
        """The task of the processes that write here, from the object that marks the place as unfinished; None without
        it.
        """
        found = self._get(UNFINISHED)
        if found is None:
            return None
        says, meta = document_of(found[0]), found[1]
        version = {name: str(meta.get(name)) for name in ("e_tag", "version") if meta.get(name) is not None}
        clears = says.get("clears")
        return Owner(str(says.get("task", "")), {*clears} if isinstance(clears, list) else (), version)

    def begin(self, task: str, over: Owner | None = None, clears: Collection[str] = ()) -> bool:
        """Mark the place as unfinished output of a task, if it has no mark, or still that of the owner ``over``, whom
        it replaces.

        ``clears`` are the files that it will remove. Returns whether the place is the task's now.
        """
        from obstore import put
        from obstore.exceptions import AlreadyExistsError, NotSupportedError, PreconditionError

        says = "reshard writes here; the same command again finishes it"
        content = json_bytes({"task": task, "says": says, "clears": sorted(clears)})

        def request() -> None:
            mode: Any = "create" if over is None else dict(over.version)
            try:
                put(self._store, UNFINISHED, content, mode=mode)
            except (AlreadyExistsError, PreconditionError, FileNotFoundError):
                return
            except NotSupportedError:
                put(self._store, UNFINISHED, content)

        self._ask("writing", UNFINISHED, request)
        owner = self.owner()
        return owner is not None and owner.task == task


def journals(there: Iterable[str]) -> list[str]:
    """The journals among the objects of a bucket."""
    return [key for key in there if key.startswith(JOURNAL)]


def _are_nested(one: str, other: str) -> bool:
    """Whether two URLs are of the same place, or one of a place in the other."""
    (store, bucket, *mine), (kind, container, *theirs) = _parts(one), _parts(other)
    shorter = min(len(mine), len(theirs))
    return (store, bucket) == (kind, container) and mine[:shorter] == theirs[:shorter]


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
