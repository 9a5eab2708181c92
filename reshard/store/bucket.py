"""Opens a checkpoint in a bucket or behind a URL: lists it, and opens it as a store."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from formats.errors import CheckpointError, redacted
from formats.files.checkpoint import is_usable, refuse_foreign
from reshard.store.range_store import Content, RangeStore, make_once, with_headers
from reshard.store.remote import StoredFile, ask, content, etag_of, explain, listing, open_store
from reshard.store.selection import Weights, left_out, modules, needed_to_plan, side_files, weight_files
from reshard.store.staging_names import JOURNAL, UNFINISHED, document_of, not_begun
from reshard.store.threads import Threads
from reshard.system import check_space, disk_errors

if TYPE_CHECKING:
    from obstore.store import ObjectStore

_LISTED_BY_NAME = (
    "config.json", "generation_config.json", "model.safetensors.index.json", "model.safetensors", "reshard.json",
    "delta.json", "delta.safetensors",
    "tokenizer.json", "tokenizer_config.json", "tokenizer.model", "special_tokens_map.json", "added_tokens.json",
    "vocab.json", "vocab.txt", "merges.txt", "chat_template.jinja", "preprocessor_config.json", "processor_config.json",
    "LICENSE", "README.md",
)  # fmt: skip
"""The names that are looked for behind a URL that cannot be listed."""
_REQUESTS = 16
_NAME = re.compile(r"(?:(?!\.)[^/\0]+/){0,3}(?:\.metadata|(?!\.)[^/\0]+)")
"""Weights and side files lie at most three folders deep; no name leads out of the folder."""
_FILES = (".safetensors", ".json", ".model", ".txt", ".jinja", ".py")
_NAMING = {
    "model.safetensors.index.json", "reshard.json", "config.json", "tokenizer_config.json", "processor_config.json",
    "preprocessor_config.json",
}  # fmt: skip
"""The files that name other files: weights, shards, the modules of custom code."""


def fetch_stored(url: str, scope: Weights, cache: Path) -> RangeStore:
    """The checkpoint at a URL: its small files are copied to this machine, and with ``Weights.FILES`` its weights too.

    Copies are kept in ``cache``, one for each state of the checkpoint. Raises CheckpointError.
    """
    from obstore.store import HTTPStore

    store, name = open_store(url, once=True), redacted(url).rstrip("/")
    listed = _entries(store, url)
    entries = {
        file: entry for file, entry in listed.items() if file.startswith((UNFINISHED, JOURNAL)) or _NAME.fullmatch(file)
    }
    if any(file.startswith((UNFINISHED, JOURNAL)) for file in entries):
        raise CheckpointError(
            f"{name} is unfinished output{_progress(store, entries, url)}",
            "run the command that wrote it again: it goes on",
        )
    sizes = {file: entry.size for file, entry in entries.items()}
    side = side_files(sizes)
    if scope is Weights.HEADERS:
        side = needed_to_plan(side, sizes)
    states = json.dumps([url, *sorted((file, stat.size, stat.etag, stat.modified) for file, stat in entries.items())])
    folder = cache / "reshard" / scope.value / hashlib.sha256(states.encode()).hexdigest()[:32]
    with disk_errors(folder):
        sides = make_once(folder.with_name(f"{folder.name}-side"), lambda at: _copy(store, side, at, url))
        weights = [file for file in weight_files(sizes, sides) if file in sizes]
        if not any(is_usable(file, sizes) for file in weights):
            refuse_foreign(name, sizes)
        if not weights:
            raise CheckpointError(
                f"{name} holds no checkpoint: no .safetensors, pytorch_model*.bin or consolidated.*.pth at its top",
                "give the URL of a folder with a checkpoint",
            )
        others = None if isinstance(store, HTTPStore) else left_out(listed, side, weights)
        files: dict[str, Content] = {file: sides / file for file in side}
        if scope is not Weights.FILES and all(file.endswith(".safetensors") for file in weights):
            files |= {file: entries[file] for file in weights}
            found_there = RangeStore(name, files, others=others)
            return with_headers(found_there, folder, sampled=scope is Weights.RANGES)
        check_space(cache, sum(sizes[file] for file in weights), name, "give another place with --cache-dir")

        def fill(at: Path) -> None:
            shutil.copytree(sides, at, dirs_exist_ok=True)
            _copy(open_store(url), weights, at, url)

        make_once(folder, fill)
    return RangeStore(name, {file: folder / file for file in (*side, *weights)}, others=others, folder=folder)


def _entries(store: ObjectStore, url: str) -> Mapping[str, StoredFile]:
    """The files of a folder of a store. Raises CheckpointError."""
    from obstore.store import HTTPStore

    if isinstance(store, HTTPStore):
        return _probed(store, url)
    return {meta["path"]: _entry(url, meta["path"], meta) for meta in listing(store, url, is_first=True)}


def _progress(store: ObjectStore, entries: Iterable[str], url: str) -> str:
    """The progress of all writers, from their journals, as a suffix: ``: part-0-of-4 has 3 of its 8 files``."""
    counts: dict[str, tuple[set[str], int]] = {}
    owner = document_of(content(store, url, UNFINISHED)).get("task")
    for key in (key for key in entries if key.startswith(JOURNAL)):
        journal = document_of(content(store, url, key))
        if journal.get("task") != owner:
            continue
        with suppress(ValueError, KeyError, TypeError):
            label = key.removeprefix(JOURNAL).partition(".")[0]
            names = {str(entry["name"]) for entry in journal["entries"]} | counts.get(label, (set[str](), 0))[0]
            counts[label] = names, int(journal["files"])
    texts = [f"{label} has {len(names_of)} of its {whole} files" for label, (names_of, whole) in sorted(counts.items())]
    return ": " + ", ".join([*texts, *(f"{label} has none" for label in not_begun(counts))]) if texts else ""


def _probed(store: ObjectStore, url: str) -> Mapping[str, StoredFile]:
    """The files of a folder that cannot be listed: those that usually are there, and those that an index names."""
    heads = _heads(store, _LISTED_BY_NAME, url)

    def names_in(file: str) -> set[str]:
        try:
            return _named(json.loads(content(store, url, file) or b""))
        except ValueError as error:
            raise explain(error, f"{redacted(url).rstrip('/')}/{file}") from None

    with Threads(len(_NAMING)) as threads:
        named = set[str]().union(*threads.map(names_in, sorted(_NAMING & heads.keys())))
    return {**heads, **_heads(store, named - heads.keys(), url)}


def _named(document: object) -> set[str]:
    """The files that an index, or a manifest of shards, names."""
    names: set[str] = set()
    code = document.get("auto_map") if isinstance(document, dict) else None
    stack = [document, [f"{module}.py" for module in modules(code)]]
    while stack:
        value = stack.pop()
        if isinstance(value, dict):
            stack.extend(value.values())
        elif isinstance(value, list):
            stack.extend(value)
        elif isinstance(value, str) and value.endswith(_FILES) and _NAME.fullmatch(value):
            names.add(value)
    return names


def _heads(store: ObjectStore, names: Iterable[str], url: str) -> dict[str, StoredFile]:
    """Those of the files that are there."""
    from obstore import head

    def look(file: str) -> StoredFile | None:
        try:
            return _entry(url, file, head(store, file))
        except FileNotFoundError:
            return None

    with Threads(_REQUESTS) as threads:
        entries = threads.map(lambda file: ask(url, file, lambda: look(file), is_first=True), names)
        return {entry.key: entry for entry in entries if entry is not None}


def _entry(url: str, key: str, meta: Mapping[str, object]) -> StoredFile:
    return StoredFile(url, key, int(str(meta["size"])), etag_of(meta) or None, str(meta["last_modified"]))


def _copy(store: ObjectStore, names: Iterable[str], folder: Path, url: str) -> None:
    """Download files into a folder."""
    from obstore import get

    def copy(file: str) -> None:
        path = folder / file
        path.parent.mkdir(parents=True, exist_ok=True)

        def request() -> None:
            with path.open("wb") as opened:
                for chunk in get(store, file).stream():
                    opened.write(chunk)

        ask(url, file, request)

    with Threads(_REQUESTS) as threads:
        threads.map(copy, names)
