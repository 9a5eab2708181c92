"""A folder in a bucket, or behind a URL: its requests, and a checkpoint there, listed and opened as a store."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from reshard.formats.documents import json_bytes
from reshard.formats.errors import CheckpointError, redacted
from reshard.formats.files.checkpoint import ADAPTER, ADAPTER_CONFIG, METADATA, MODELOPT, TRACKERS, step_of
from reshard.formats.files.side_files import named_files
from reshard.formats.store import StoredPath
from reshard.store.range_store import FileContent, RangeStore, with_headers
from reshard.store.remote import Remote, ask, check_version, etag_of, open_store, read_range
from reshard.store.selection import DOCUMENTS, INDICES, Weights, is_url, recorded, select, weights_named
from reshard.store.staging_names import JOURNAL, UNFINISHED, journal_in, json_of, not_begun
from reshard.store.threads import Threads
from reshard.store.weight_sets import sets_in
from reshard.system import check_space, disk_errors

if TYPE_CHECKING:
    from obstore.store import ObjectStore

T = TypeVar("T")

_SINGLE = 8 << 20
"""An object of at most so many bytes is written by one request."""
_SECOND = len("2026-01-01 00:00:00")
"""The length of a time to the second: HTTP headers have no fractions."""
TASK = "reshardtask"
"""The key of an object's metadata that names the task; Azure's have no hyphens."""


class Small(NamedTuple):
    """A small object: its content, and the task that was put with it."""

    content: bytes
    task: str


@dataclass(frozen=True)
class Bucket:
    """A folder of a bucket, or (to read) one behind a URL. Requests of it are repeated until they succeed."""

    url: str = field(repr=False)

    @property
    def name(self) -> str:
        """Its name in messages."""
        return redacted(self.url).rstrip("/")

    @cached_property
    def store(self) -> ObjectStore:
        """The client of the store. It makes each request once: ``ask`` repeats."""
        return open_store(self.url, once=True)

    def ask(self, key: str, request: Callable[[], T], doing: str = "reading", *, is_first: bool = False) -> T:
        """The result of a request for an object (without ``key``: for the place itself), repeated until it succeeds.

        The first contact is given up early, because the name may be wrong. Raises CheckpointError.
        """
        return ask(request, f"{self.name}/{key}" if key else self.name, doing, is_first=is_first)

    def listing(self, *, is_first: bool = False) -> list[Mapping[str, Any]]:
        """Return the description of each object, as ``obstore`` gives it. Raises CheckpointError."""
        from obstore import list as listed

        return self.ask("", lambda: [meta for metas in listed(self.store) for meta in metas], is_first=is_first)

    def small(self, key: str) -> Small | None:
        """A small object; None, if it is not there. Raises CheckpointError."""
        from obstore import get

        def request() -> Small | None:
            try:
                answer = get(self.store, key)
            except FileNotFoundError:
                return None
            return Small(bytes(answer.bytes()), answer.attributes.get(TASK, ""))

        return self.ask(key, request)

    def content(self, key: str) -> bytes | None:
        """The content of a small object; None, if it is not there. Raises CheckpointError."""
        return there.content if (there := self.small(key)) is not None else None

    def check_apart(self, location: str, remotes: Iterable[Remote]) -> None:
        """Raise CheckpointError if a source is or holds this place, or lies in it, by whatever URL.

        ``location`` is the source's, ``remotes`` the files that are read of it.
        """
        stored = [remote for remote in remotes if isinstance(remote, StoredFile)]
        keys = {(file.etag, file.modified[:_SECOND]): file.key for file in stored if file.etag is not None}
        is_copied = False  # an object of this place is one of the source's by etag and time, whichever URL names it
        for meta in self.listing() if keys else ():
            key = keys.get((etag_of(meta) or "", str(meta["last_modified"])[:_SECOND]))
            is_copied |= key is not None and f"/{meta['path']}".endswith(f"/{key}")
        for url in filter(is_url, {file.bucket.url for file in stored} or {location}):
            here, there = _parts(self.url), _parts(url)
            depth = min(len(here), len(there))
            if here[:depth] == there[:depth] or is_copied:
                raise CheckpointError(
                    f"{self.name} and {Bucket(url).name} are the same place, or one lies in the other",
                    "choose another place",
                )

    def objects(self, *, is_first: bool = False) -> dict[str, str | None]:
        """The objects below the place, with their etags. Raises CheckpointError."""
        return {meta["path"]: etag_of(meta) for meta in self.listing(is_first=is_first)}

    def task(self, key: str) -> str | None:
        """The task that the metadata of a small object name; None, if it is not there."""
        return there.task if (there := self.small(key)) is not None else None

    def put(self, key: str, content: bytes | Path, task: str = "") -> str | None:
        """Write an object, a large file in several parts; returns its etag. Raises CheckpointError.

        It may say of which ``task`` it is. Others may have replaced or removed it by the end.
        """
        from obstore import head

        def look() -> Mapping[str, Any] | None:
            with suppress(FileNotFoundError):
                return head(self.store, key)
            return None

        size = content.stat().st_size if isinstance(content, Path) else len(content)
        etag = etag_of(self.note(key, content, task, in_parts=size > _SINGLE))
        there = self.ask(key, look, "writing")
        if there is None or (etag is not None and etag_of(there) != etag):
            return etag
        if there["size"] != size:
            raise CheckpointError(f"{self.name}/{key} has {there['size']:,} bytes after {size:,} were written")
        return etag_of(there)

    def delete(self, key: str) -> None:
        """Remove an object, if it is there. Raises CheckpointError."""
        from obstore import delete

        def request() -> None:
            with suppress(FileNotFoundError):
                delete(self.store, key)

        self.ask(key, request, "removing")

    def note(self, key: str, content: bytes | Path, task: str = "", *, in_parts: bool = False) -> Mapping[str, Any]:
        """Write an object, which others may replace at any time. Raises CheckpointError."""
        from obstore import put

        store = open_store(self.url) if in_parts else self.store  # it sends a part that fails again, not all of them
        attributes = {TASK: task} if task else None
        return self.ask(key, lambda: put(store, key, content, attributes=attributes, use_multipart=in_parts), "writing")

    def begin(self, task: str) -> bool:
        """Mark the place as unfinished output of a task, if it has no mark; whether it is made by this request."""
        from obstore import put
        from obstore.exceptions import AlreadyExistsError, NotSupportedError

        says = "reshard writes here; the same command again finishes it"
        content = json_bytes({"task": task, "says": says})

        def request() -> bool:
            try:
                put(self.store, UNFINISHED, content, attributes={TASK: task}, mode="create")
            except AlreadyExistsError:
                return False
            except NotSupportedError:
                put(self.store, UNFINISHED, content, attributes={TASK: task})
            return True

        return self.ask(UNFINISHED, request, "writing")

    @property
    def removal(self) -> str:
        """The command that removes all that is there, as the end of a hint; empty without a usual client."""
        client = {"s3": "aws s3 rm --recursive", "gs": "gcloud storage rm --recursive"}.get(self.url.split(":")[0])
        return f": {client} {self.name}" if client else ""


@dataclass(frozen=True)
class StoredFile(Remote):
    """An object ``key`` of a store: ``s3://bucket/prefix``, ``gs://``, ``az://``, ``https://host/folder``."""

    bucket: Bucket
    key: str
    size: int
    etag: str | None
    modified: str

    @property
    def identity(self) -> str:
        """The etag, or else when it was written."""
        return self.etag or f"modified:{self.modified}"

    @property
    def address(self) -> str:
        """The URL, without a query, which may hold a signature."""
        return f"{self.bucket.name}/{self.key}"

    def read(self, start: int, stop: int) -> memoryview:
        """Bytes of it."""
        return read_range(self.bucket.store, self.key, start, stop, self.etag, self.address)


def _parts(url: str) -> list[str]:
    """Return the parts of a URL, whatever its spelling: the kind of store, the bucket, and the parts of the key."""
    from obstore.store import HTTPStore

    store: Any = open_store(url)
    if isinstance(store, HTTPStore):
        return ["http", *redacted(url).split("/")]
    config = store.config
    account = config.get("account_name") or os.environ.get("AZURE_STORAGE_ACCOUNT_NAME", "")
    container = config.get("bucket") or f"{account}/{config.get('container_name')}"
    return [type(store).__name__, container, *(part for part in str(store.prefix or "").split("/") if part)]


# --- a checkpoint there -------------------------------------------------------------------------------------------

_LISTED_BY_NAME = (
    "config.json", "generation_config.json", *INDICES, "model.safetensors", "pytorch_model.bin", "reshard.json",
    "delta.json", "delta.safetensors", ADAPTER, ADAPTER_CONFIG, MODELOPT, METADATA, *TRACKERS,
    "params.json", "consolidated.safetensors", "consolidated.00.pth",
    "tokenizer.json", "tokenizer_config.json", "tokenizer.model", "special_tokens_map.json", "added_tokens.json",
    "vocab.json", "vocab.txt", "merges.txt", "chat_template.jinja", "preprocessor_config.json", "processor_config.json",
    "modules.json", "LICENSE", "README.md",
)  # fmt: skip
"""The names that are looked for behind a URL that cannot be listed."""
_OF_A_STEP = (
    METADATA, "common.pt", "metadata.json", "mp_rank_00/model_optim_rng.pt", "mp_rank_00_model_states.pt",
    "zero_pp_rank_0_mp_rank_00_model_states.pt", "zero/optimizer_state.pt",
)  # fmt: skip
"""The first files in the folder of a training program's step; a manifest names the others."""
_REQUESTS = 16
_NAME = re.compile(r"(?:(?!\.)[^/\0]+/){0,3}(?:\.metadata|(?!\.)[^/\0]+)")
"""Weights and side files lie at most three folders deep; no name leads out of the folder."""


def fetch_stored(url: str, scope: Weights, cache: Path) -> RangeStore:
    """The checkpoint at a URL: its small files are copied to this machine, and with ``Weights.FILES`` its weights too.

    Copies are kept in ``cache``, one for each state of the checkpoint. Raises CheckpointError.
    """
    from obstore.store import HTTPStore

    bucket = Bucket(url)
    name, is_listed = bucket.name, not isinstance(bucket.store, HTTPStore)
    if is_listed:
        listed = {meta["path"]: _entry(bucket, meta["path"], meta) for meta in bucket.listing(is_first=True)}
    else:
        listed = _probed(bucket)
    entries = {
        file: entry for file, entry in listed.items() if file.startswith((UNFINISHED, JOURNAL)) or _NAME.fullmatch(file)
    }
    if any(file.startswith((UNFINISHED, JOURNAL)) for file in entries):
        raise CheckpointError(
            f"{name} is unfinished output{_progress(bucket, entries)}",
            "run the command that wrote it again: it goes on",
        )
    states = json.dumps([url, *sorted((file, stat.size, stat.etag, stat.modified) for file, stat in entries.items())])
    folder = cache / "reshard" / scope.value / hashlib.sha256(states.encode()).hexdigest()[:32]
    sizes = {file: entry.size for file, entry in entries.items()}

    def copy(side: list[str]) -> Path:
        _copy(bucket, bucket.store, [entries[file] for file in side], folder)
        return folder

    with disk_errors(folder):
        hint = "give the URL of a folder with a checkpoint"
        _, side, weights, by_ranges = select(name, sizes, scope, copy, hint)
        others = tuple(sorted(listed.keys() - {*side, *weights})) if is_listed else None
        files: dict[str, FileContent] = {file: folder / file for file in side}
        if by_ranges:
            if scope is Weights.RANGES:  # other sets of weights are compared with those that are read
                sets = sets_in(StoredPath(RangeStore(name, {**entries, **files})))
                parts = {part for each in sets for part in each.parts} if len(sets) > 1 else set[str]()
                beside = entries.keys() - {*side, *weights}
                weights += sorted(file for file in beside if file.partition("/")[0] in parts)
            store = RangeStore(name, files | {file: entries[file] for file in weights}, others=others)
            return with_headers(store, folder.with_name(f"{folder.name}-headers"), sampled=scope is Weights.RANGES)
        missing = [entries[file] for file in weights if not (folder / file).exists()]
        check_space(cache, sum(entry.size for entry in missing), name, "give another place with --cache-dir")
        _copy(bucket, open_store(url), missing, folder)
    return RangeStore(name, files | {file: folder / file for file in weights}, others=others, folder=folder)


def _progress(bucket: Bucket, entries: Iterable[str]) -> str:
    """The progress of all writers, from their journals, as a suffix: ``: part-0-of-4 has 3 of its 8 files``."""
    counts: dict[str, tuple[set[str], int]] = {}
    owner = json_of(bucket.content(UNFINISHED)).get("task")
    for key in (key for key in entries if key.startswith(JOURNAL)):
        label = key.removeprefix(JOURNAL).partition(".")[0]
        for begin, entry in journal_in(bucket.content(key), "task", "name"):
            if begin.get("task") == owner:
                names, _ = counts.setdefault(label, (set[str](), int(begin["files"])))
                names.update({entry["name"]} if "name" in entry else ())
    texts = [f"{label} has {len(names_of)} of its {whole} files" for label, (names_of, whole) in sorted(counts.items())]
    return ": " + ", ".join([*texts, *(f"{label} has none" for label in not_begun(counts))]) if texts else ""


def _probed(bucket: Bucket) -> dict[str, StoredFile]:
    """The files of a folder that cannot be listed: those that usually are there, and those that an index names."""
    heads = _heads(bucket, _LISTED_BY_NAME)
    with Threads(_REQUESTS) as threads:
        documents = [name for name in DOCUMENTS if name in heads]
        contents = dict(zip(documents, threads.map(bucket.content, documents), strict=True))
    steps = [step_of(name, bucket.content(name) or b"") for name in TRACKERS if name in heads]
    names = (*named_files(contents.get), *weights_named(contents.get), *recorded(contents.get))
    named = {name for name in names if _NAME.fullmatch(name)}
    named |= {f"{step}/{name}" for step in steps for name in _OF_A_STEP}
    return heads | _heads(bucket, named - heads.keys())


def _heads(bucket: Bucket, names: Iterable[str]) -> dict[str, StoredFile]:
    """Return an entry for each of the files that exist."""
    from obstore import head

    def look(file: str) -> StoredFile | None:
        try:
            return _entry(bucket, file, head(bucket.store, file))
        except FileNotFoundError:
            return None

    with Threads(_REQUESTS) as threads:
        entries = threads.map(lambda file: bucket.ask(file, lambda: look(file), is_first=True), names)
        return {entry.key: entry for entry in entries if entry is not None}


def _entry(bucket: Bucket, key: str, meta: Mapping[str, object]) -> StoredFile:
    return StoredFile(bucket, key, int(str(meta["size"])), etag_of(meta) or None, str(meta["last_modified"]))


def _copy(bucket: Bucket, store: ObjectStore, entries: Iterable[StoredFile], folder: Path) -> None:
    """Download files into a folder, unless they are there: each appears complete or not at all.

    Raises MismatchError for one that is no longer what it was, CheckpointError.
    """
    from obstore import get

    folder.mkdir(parents=True, exist_ok=True)
    scratch = TemporaryDirectory(dir=folder.parent, prefix=f"{folder.name}.", ignore_cleanup_errors=True)
    with scratch as building, Threads(_REQUESTS) as threads:

        def copy(entry: StoredFile) -> None:
            new, path = Path(building, entry.key), folder / entry.key
            for place in (new, path):
                place.parent.mkdir(parents=True, exist_ok=True)

            def request() -> str | None:
                answer = get(store, entry.key)
                with new.open("wb") as opened:
                    for chunk in answer.stream():
                        opened.write(chunk)
                return etag_of(answer.meta)

            check_version(entry.etag, bucket.ask(entry.key, request), entry.address)
            new.replace(path)

        threads.map(copy, [entry for entry in entries if not (folder / entry.key).exists()])
