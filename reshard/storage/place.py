"""A place for an output in a bucket: what is there, and who may write there."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from formats.documents import json_bytes
from formats.errors import CheckpointError, redacted
from formats.files.sharded import MANIFEST
from reshard.storage.bucket import JOURNAL, UNFINISHED, is_url
from reshard.storage.marks import PUBLISHED, STATE, task_name
from reshard.storage.output import PublishedError
from reshard.storage.remote import ask, etag_of, open_store

if TYPE_CHECKING:
    from obstore.store import ObjectStore

LAST = ("config.json", "model.safetensors.index.json", MANIFEST)
"""What makes a folder a checkpoint: written last, removed first."""

NEW = f"{STATE}new-"
"""The names of objects that are to replace a checkpoint begin so, and then with their task's name."""

_SINGLE = 8 << 20
"""An object of at most so many bytes is written by one request."""
_COPIED = 5 << 30
"""S3 copies an object of at most so many bytes by one request."""

T = TypeVar("T")


class Owner(NamedTuple):
    """The task whose output is unfinished at a place (an empty text: nobody's), and the state of what says so."""

    task: str
    version: Mapping[str, str]


@dataclass(frozen=True)
class Bucket:
    """A place for an output in a bucket, and the folder in which it is built."""

    url: str
    folder: Path

    @property
    def name(self) -> str:
        """What messages call it."""
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
        return ask(self._store, self.url, key, request, doing)

    def check(self, task: Mapping[str, Any], *, overwrite: bool, is_shared: bool) -> None:
        """Raise CheckpointError if something is there that may not be replaced, or if the place cannot be read.

        Raises PublishedError if it is what this task makes, and several processes do (``is_shared``).
        """
        there = self.there(is_first=True)
        theirs = {key for key in there if not key.startswith(STATE)}
        if not theirs or UNFINISHED in there:
            return
        if not theirs & set(LAST):
            raise CheckpointError(
                f"{self.name} holds '{min(theirs)}' and is not a checkpoint, so it is not overwritten",
                "choose another place",
            )
        if is_shared and is_published(there, task_name(task)):
            raise PublishedError(f"{self.name} is complete")
        if not overwrite:
            raise CheckpointError(f"{self.name} exists", "remove it, choose another place, or pass --overwrite")

    def there(self, *, is_first: bool = False) -> dict[str, str | None]:
        """The objects below the place, with their etags. Raises CheckpointError."""
        from obstore import list as listing

        def request() -> dict[str, str | None]:
            return {meta["path"]: etag_of(meta) for metas in listing(self._store) for meta in metas}

        return ask(self._store, self.url, "", request, is_first=is_first)

    def read(self, key: str) -> dict[str, Any]:
        """A JSON object; empty, if it is not there (any more) or cannot be understood."""
        return _document(self._content(key))

    def _content(self, key: str) -> bytes | None:
        """The content of a small object; None, if it is not there."""
        from obstore import get

        def request() -> bytes | None:
            try:
                return bytes(get(self._store, key).bytes())
            except FileNotFoundError:
                return None

        return self._ask("reading", key, request)

    def put(self, key: str, content: bytes | Path) -> str | None:
        """Write an object, a large file in several parts; returns its etag. Raises CheckpointError."""
        from obstore import head, put

        size = content.stat().st_size if isinstance(content, Path) else len(content)
        if size > _SINGLE:  # a part that fails is sent again, not the whole file
            self._ask("writing", key, lambda: put(self._patient_store, key, content))
        else:
            self._ask("writing", key, lambda: put(self._store, key, content, use_multipart=False))
        meta = self._ask("writing", key, lambda: head(self._store, key))
        if meta["size"] != size:
            raise CheckpointError(f"{self.name}/{key} has {meta['size']:,} bytes after {size:,} were written")
        return etag_of(meta)

    def holds(self, key: str, content: bytes | Path) -> bool:
        """Whether a small object is there with this content."""
        return self._content(key) == (content.read_bytes() if isinstance(content, Path) else content)

    def copy(self, key: str, to: str) -> str | None:
        """Copy an object within the store, and return the copy's etag; of what S3 does not copy, the bytes pass
        through this machine.
        """
        from obstore import copy, get, head, put

        size = self._ask("reading", key, lambda: head(self._store, key))["size"]
        if size > _COPIED and self.url.startswith("s3"):
            self._ask("writing", to, lambda: put(self._patient_store, to, get(self._patient_store, key).stream()))
        else:
            self._ask("writing", to, lambda: copy(self._store, key, to))
        meta = self._ask("writing", to, lambda: head(self._store, to))
        if meta["size"] != size:
            raise CheckpointError(f"{self.name}/{to} has {meta['size']:,} bytes after {size:,} were copied")
        return etag_of(meta)

    def delete(self, key: str) -> None:
        """Remove an object, if it is there. Raises CheckpointError."""
        from obstore import delete

        def request() -> None:
            with suppress(FileNotFoundError):
                delete(self._store, key)

        self._ask("removing", key, request)

    def note(self, key: str, content: bytes) -> None:
        """Write a small object, which others may replace at any time. Raises CheckpointError."""
        from obstore import put

        self._ask("writing", key, lambda: put(self._store, key, content, use_multipart=False))

    # -- whose it is while it is unfinished

    def owner(self) -> Owner | None:
        """The task of those who write here, by the object that says that the place is unfinished; None without it."""
        from obstore import get

        def request() -> Owner | None:
            try:
                answer = get(self._store, UNFINISHED)
            except FileNotFoundError:
                return None
            content, meta = bytes(answer.bytes()), answer.meta
            version = {name: str(meta.get(name)) for name in ("e_tag", "version") if meta.get(name) is not None}
            return Owner(str(_document(content).get("task", "")), version)

        return self._ask("reading", UNFINISHED, request)

    def begin(self, task: str, over: Owner | None = None) -> bool:
        """Say that a task's output is unfinished here, if nobody says so, or still the owner ``over`` whom it replaces.

        Returns whether the place is the task's now.
        """
        from obstore import put
        from obstore.exceptions import AlreadyExistsError, NotSupportedError, PreconditionError

        says = "reshard writes here; the same command again finishes it"
        content = json_bytes({"task": task, "says": says})

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


def place_of(out: str | Path, cache_dir: Path | None) -> tuple[Path, Bucket | None]:
    """The folder in which an output is built, and its place in a bucket, if ``out`` is a URL.

    Raises CheckpointError for a web server.
    """
    if not isinstance(out, str) or "://" not in out:
        return Path(out), None
    if not is_url(out):
        raise CheckpointError(f"{out}: no such kind of store", "give s3://, gs://, az:// or a folder")
    if out.startswith("http"):
        raise CheckpointError(f"{out} is on a web server, which takes no files", "give a bucket's URL")
    from huggingface_hub import constants

    assets = cache_dir / "assets" if cache_dir else Path(constants.HF_ASSETS_CACHE)
    folder = assets / "reshard" / "uploads"
    folder.mkdir(parents=True, exist_ok=True)
    built = folder / hashlib.sha256(out.rstrip("/").encode()).hexdigest()[:32]
    return built, Bucket(out, built)


def _document(content: bytes | None) -> dict[str, Any]:
    """A JSON object; empty, if it is none."""
    with suppress(ValueError):
        document = json.loads(content or b"")
        return document if isinstance(document, dict) else {}
    return {}


def journals(there: Iterable[str], folder: str = "") -> list[str]:
    """The journals among the objects of a bucket."""
    return [key for key in there if key.startswith(f"{folder}{JOURNAL}")]


def is_published(there: Iterable[str], task: str) -> bool:
    """Whether what is there is a task's output: who publishes removes what says that it is another's.

    If both stand there, the other wrote it while it was overtaken.
    """
    return {key for key in there if key.startswith(PUBLISHED)} == {f"{PUBLISHED}{task}"}
