"""A remote checkpoint as a store: its small files are on this machine, its weights are read by ranges.

The headers of the weight files, and the few bytes that tell checkpoints apart, are kept in a folder, once for each
state of the checkpoint.
"""

from __future__ import annotations

import hashlib
import json
import tempfile
from base64 import b64decode, b64encode
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from pathlib import Path

from reshard.formats.errors import CheckpointError
from reshard.formats.files.checkpoint import has_usual_weights, open_checkpoint
from reshard.formats.files.containers import SAFETENSORS
from reshard.formats.files.fingerprint import samples
from reshard.formats.files.safetensors import MAX_HEADER
from reshard.formats.files.sharded import is_sharded
from reshard.formats.store import FilePath, Stat, Store, StoredPath, local_path, read_ranges
from reshard.store.remote import Remote
from reshard.store.threads import Threads

_FIRST_READ = 100_000  # bytes; most safetensors headers are shorter
_REQUESTS = 16

FileContent = FilePath | Remote | bytes
"""The content of a store's file: a local file, a file of another store, a file that is read by ranges, or bytes in
memory.
"""


class RangeStore(Store):
    """A store. ``files`` has the content of each file, ``kept`` ranges of remote files that were already read."""

    def __init__(
        self, name: str, files: Mapping[str, FileContent], *, location: str | None = None, commit: str | None = None,
        others: tuple[str, ...] | None = (), folder: Path | None = None,
    ) -> None:  # fmt: skip
        self.name, self.location, self.commit, self.beside, self.folder = name, location or name, commit, others, folder
        self.files = files
        self.cached: dict[str, dict[int, bytes]] = {}

    @cached_property
    def stats(self) -> Mapping[str, Stat]:
        """The files, by their names."""
        return {name: _stat(content) for name, content in self.files.items()}

    def local(self, file: str) -> Path | None:
        """The path of a file, if it is on this machine."""
        content = self.files.get(file)
        return local_path(content) if isinstance(content, FilePath) else None

    def read(self, ranges: Sequence[tuple[str, int, int]]) -> Sequence[bytes]:
        """Ranges of files; remote ones are requested at the same time."""
        local = [self._local(*part) for part in ranges]
        missing = [part for part, content in zip(ranges, local, strict=True) if content is None]
        if len(missing) > 1:
            with Threads(min(_REQUESTS, len(missing))) as threads:
                fetched = iter(threads.map(lambda part: self._fetch(*part), missing))
        else:
            fetched = iter([self._fetch(*part) for part in missing])
        return [next(fetched) if content is None else content for content in local]

    def keep(self, contents: Mapping[str, Mapping[int, bytes]]) -> None:
        """Answer with these ranges, by file and first byte, instead of reading them."""
        for file, ranges in contents.items():
            self.cached.setdefault(file, {}).update(ranges)

    def _local(self, file: str, begin: int, end: int) -> bytes | None:
        """A range, if it need not be requested."""
        if begin == end:  # of a tensor without elements
            return b""
        content = self.files[file]
        if isinstance(content, bytes):
            return content[begin:end]
        if isinstance(content, FilePath):
            return read_ranges([(content, begin, end)])[0]
        if not content.over_network(content.size):  # threads that compute would wait for each other
            return self._fetch(file, begin, end)
        ranges = self.cached.get(file, {})
        first = begin if begin in ranges else 0
        whole = ranges.get(first, b"")
        return whole[begin - first : end - first] if end - first <= len(whole) else None

    def _fetch(self, file: str, begin: int, end: int) -> bytes:
        remote = self.files[file]
        assert isinstance(remote, Remote)
        return bytes(remote.read(begin, end))


def remote_of(path: FilePath) -> Remote | None:
    """The ``Remote`` that reads a file, if it is not local."""
    if not isinstance(path, StoredPath) or not isinstance(path.store, RangeStore):
        return None
    content = path.store.files[path.inner]
    if isinstance(content, StoredPath):
        return remote_of(content)
    return content if isinstance(content, Remote) else None


def _stat(content: FileContent) -> Stat:
    if isinstance(content, bytes):
        return Stat(len(content), f"sha256:{hashlib.sha256(content).hexdigest()}")
    if isinstance(content, Remote):
        return Stat(content.size, content.identity, content.made_of)
    status = content.stat()
    return status if isinstance(status, Stat) else Stat(status.st_size, str(status.st_mtime_ns))


def with_headers(store: RangeStore, folder: Path, *, sampled: bool) -> RangeStore:
    """The store, with the bytes of each remote file that are needed before tensors are moved: they are kept in
    ``folder``, and read once.

    These are the header and, with ``sampled``, the few bytes that tell checkpoints apart. Raises CheckpointError.
    """
    remotes = {
        name: content
        for name, content in store.files.items()
        if isinstance(content, Remote) and SAFETENSORS.holds(name)
    }
    if not remotes:
        return store
    contents = kept_in(folder)
    if remotes.keys() <= contents.keys():
        store.keep({name: ranges for name, (_, ranges) in contents.items()})
        return store
    # none are kept, or they are damaged, or a cache had some of the files then
    with Threads(_REQUESTS) as threads:
        headers = threads.map(lambda remote: {0: _header(remote)}, remotes.values())
    store.keep(dict(zip(remotes, headers, strict=True)))
    if sampled:
        store.keep(_sampled(store))
    kept = {
        name: [remote.size, {begin: b64encode(content).decode() for begin, content in store.cached[name].items()}]
        for name, remote in remotes.items()
    }
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder, ignore_cleanup_errors=True) as scratch:
        (Path(scratch) / _KEPT).write_text(json.dumps(kept))
        (Path(scratch) / _KEPT).replace(folder / _KEPT)
    return store


_KEPT = "kept.json"
"""For each file its size, and ranges of it: from which byte on, and the bytes, in base64."""


def kept_in(folder: Path) -> dict[str, tuple[int, dict[int, bytes]]]:
    """The size of each file that ``with_headers`` has kept bytes of in a folder, and these, by the first byte.

    Nothing, if the file is not there or damaged: it is read again where it is needed.
    """
    with suppress(OSError, ValueError, TypeError, AttributeError, RecursionError):
        return {
            name: (int(size), {int(begin): b64decode(content, validate=True) for begin, content in ranges.items()})
            for name, (size, ranges) in json.loads((folder / _KEPT).read_bytes()).items()
        }
    return {}


def _header(file: Remote) -> bytes:
    """The header of a safetensors file."""
    data = bytes(file.read(0, min(_FIRST_READ, file.size))) if file.size else b""
    end = 8 + int.from_bytes(data[:8], "little")
    if not 8 < end <= min(file.size, MAX_HEADER):
        raise CheckpointError(
            f"{file.address} is not a safetensors file, or is cut off: the header does not fit",
            "ask its owner to upload it again",
        )
    return data[:end] + bytes(file.read(len(data), end) if end > len(data) else b"")


def _sampled(store: RangeStore) -> dict[str, dict[int, bytes]]:
    root = StoredPath(store)
    if is_sharded(root) or not has_usual_weights(root):
        return {}
    ranges = [(file, begin, end) for file, begin, end in samples(open_checkpoint(root)) if end > begin]
    contents: dict[str, dict[int, bytes]] = {}
    for (file, begin, _), content in zip(ranges, read_ranges(ranges), strict=True):
        if isinstance(file, StoredPath):
            contents.setdefault(file.inner, {})[begin] = content
    return contents
