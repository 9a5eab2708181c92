"""Paths to checkpoints, and the one door through which all files are read.

A checkpoint lies in a folder of this machine (``Path``), or in a ``Store``, whose files are listed and read by ranges.
A ``StoredPath`` names a file or a folder of a store, and does what is needed of a ``Path``.

On this machine only regular files are read, up to a size that is sane for their kind: a pipe would wait for a writer,
and a device has no end. A link is followed to its file.
"""

from __future__ import annotations

import errno
import io
import os
import stat
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cached_property, lru_cache
from pathlib import Path, PurePosixPath
from typing import IO, BinaryIO, NamedTuple, Protocol, cast

from reshard.formats.errors import CheckpointError, redacted

NEAR = 1 << 14
"""The most bytes between two ranges that are read with them, because one more request would cost more."""

Range = tuple[int, int]
"""The first byte of a range, and the one behind its last."""

_KINDS = {
    stat.S_IFIFO: "a pipe",
    stat.S_IFDIR: "a folder",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFSOCK: "a socket",
}


class Stat(NamedTuple):
    """A stored file: its size in bytes, and a text that names its content.

    ``made_of`` names what it is computed from on this machine, and is equal nowhere else.
    """

    st_size: int
    version: str
    made_of: str | None = None


class Store(ABC):
    """Files that are listed, and read by byte ranges."""

    name: str
    """Its name in messages and outputs, without secrets."""
    location: str
    """The place of the files."""
    commit: str | None
    """The version of the whole, if it has one."""
    beside: tuple[str, ...] | None
    """The names of files there that do not belong to the checkpoint; None if they are not known."""
    folder: Path | None
    """The folder that has the files that are on this machine, if one has them."""

    @property
    @abstractmethod
    def stats(self) -> Mapping[str, Stat]:
        """The files, by their names in the store (with ``/``)."""

    @abstractmethod
    def local(self, file: str) -> Path | None:
        """Return the path of a file that is on this machine; None if the file is read by ranges."""

    @abstractmethod
    def read(self, ranges: Sequence[tuple[str, int, int]]) -> Sequence[bytes]:
        """Ranges of files, each with its first byte and the one behind its last. Raises CheckpointError."""

    @cached_property
    def folders(self) -> Mapping[str, Sequence[str]]:
        """The names in each folder; the top is the folder without a name."""
        names_of: dict[str, dict[str, None]] = {"": {}}
        for file in self.stats:
            parts = PurePosixPath(file).parts
            for depth, part in enumerate(parts):
                names_of.setdefault("/".join(parts[:depth]), {})[part] = None
        return {folder: sorted(names) for folder, names in names_of.items()}


@dataclass(frozen=True)
class StoredPath:
    """A file or a folder of a store; ``inner`` is its name there, empty for the whole."""

    store: Store
    inner: str = ""

    def __truediv__(self, name: str | PurePosixPath) -> StoredPath:
        """Return the path of a file or folder below this one; ``name`` may have several parts with ``/``."""
        joined = os.path.normpath(PurePosixPath(self.inner, name).as_posix())
        return StoredPath(self.store, "" if joined == "." else joined)

    def __str__(self) -> str:
        """Return the path as messages show it."""
        return f"{self.store.name}/{self.inner}" if self.inner else self.store.name

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: {redacted(str(self))}>"

    @property
    def name(self) -> str:
        """The last part of its name."""
        return PurePosixPath(self.inner or self.store.name).name

    @property
    def suffix(self) -> str:
        """The ending of its name, with the dot."""
        return PurePosixPath(self.inner).suffix

    @property
    def parent(self) -> StoredPath:
        """The folder that it lies in."""
        return StoredPath(self.store, self.inner.rpartition("/")[0])

    def is_file(self) -> bool:
        """Whether it is a file."""
        return self.inner in self.store.stats

    def is_dir(self) -> bool:
        """Whether it is a folder."""
        return self.inner in self.store.folders

    def exists(self) -> bool:
        """Whether it is there."""
        return self.is_file() or self.is_dir()

    def stat(self) -> Stat:
        """Size and version of a file. Raises FileNotFoundError."""
        if not self.is_file():
            raise FileNotFoundError(2, "No such file", str(self))
        return self.store.stats[self.inner]

    def iterdir(self) -> Iterator[StoredPath]:
        """Iterate over the files and folders in this folder."""
        return (self / name for name in self.store.folders.get(self.inner, ()))

    def glob(self, pattern: str) -> Iterator[StoredPath]:
        """The files and folders below this folder whose names are like ``pattern``, which has no ``**``."""
        folders = [self]
        *above, last = pattern.split("/")
        for part in above:
            folders = [inner for folder in folders for inner in folder.iterdir() if fnmatchcase(inner.name, part)]
        return (path for folder in folders for path in folder.iterdir() if fnmatchcase(path.name, last))


FilePath = Path | StoredPath


def local_path(path: FilePath) -> Path | None:
    """Return the path on this machine of a file, or of a whole store's folder; None if it is elsewhere."""
    if isinstance(path, Path):
        return path
    return path.store.local(path.inner) if path.inner else path.store.folder


def local_folder(path: FilePath) -> Path:
    """The folder of a checkpoint on this machine. Raises CheckpointError if there is none."""
    folder = local_path(path)
    if folder is None:
        raise CheckpointError(f"{path} is not a folder of this machine", "download it first, and give its folder")
    return folder


def name_in(path: FilePath, folder: FilePath) -> str:
    """The name of a file relative to a folder that it lies in, with ``/``."""
    if isinstance(path, StoredPath) and isinstance(folder, StoredPath):
        return PurePosixPath(path.inner).relative_to(folder.inner).as_posix()
    return cast(Path, path).relative_to(cast(Path, folder)).as_posix()


def is_in(path: FilePath, folder: FilePath) -> bool:
    """Whether a path is a folder, or lies below it."""
    if isinstance(path, StoredPath):
        at_store = isinstance(folder, StoredPath) and folder.store is path.store
        return at_store and PurePosixPath(path.inner).is_relative_to(cast(StoredPath, folder).inner)
    return isinstance(folder, Path) and path.is_relative_to(folder)


def sorted_paths(paths: Iterable[FilePath]) -> list[FilePath]:
    """Files and folders by name: what lies in a folder comes together."""
    return sorted(paths, key=lambda path: str(path).split("/"))


def glob(folder: FilePath, pattern: str) -> list[FilePath]:
    """Return the sorted paths below a folder that match ``pattern`` (``*.safetensors``, ``rank-*/*.json``)."""
    return sorted_paths([*folder.glob(pattern)])


def location_of(path: FilePath) -> str:
    """Return the location of a checkpoint: the Hub's id, a URL without secrets, or the path of a folder."""
    return path.store.location if isinstance(path, StoredPath) else os.path.realpath(path)


def public_name(path: FilePath) -> str:
    """Return the name of a checkpoint for outputs, which are published: its location or, as paths are private, only the
    name of its folder.
    """
    return str(path) if isinstance(path, StoredPath) else Path(os.path.realpath(path)).name


def walk(folder: FilePath) -> Iterator[tuple[FilePath, list[str], list[str]]]:
    """Each folder from this one downwards with its folders and files; those are walked that are left in the list."""
    if isinstance(folder, Path):
        yield from ((Path(root), folders, files) for root, folders, files in os.walk(folder))
        return
    inside = [*folder.iterdir()]
    folders = [path.name for path in inside if path.is_dir()]
    yield folder, folders, [path.name for path in inside if path.is_file()]
    for name in folders:
        yield from walk(folder / name)


def open_file(path: FilePath) -> BinaryIO:
    """Open a regular file for reading. Raises CheckpointError for anything else, and if it cannot be opened."""
    local = local_path(path)
    if local is None:
        stored = cast(StoredPath, path)
        if not stored.is_file():
            what = "it is a folder" if stored.is_dir() else "it is not there"
            raise CheckpointError(f"{path}: cannot be read: {what}")
        parts = RangeFile(lambda of: stored.store.read([(stored.inner, *each) for each in of]), stored.stat().st_size)
        return cast(BinaryIO, io.BufferedReader(parts, 8))
    try:
        _check_kind(path, local.stat().st_mode)  # before it is opened: to open a device may do something
        descriptor = os.open(local, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise unreadable(path, error) from None
    except ValueError as error:  # a zero byte in the name
        raise CheckpointError(f"{path}: no file can have this name: {error}") from None
    try:
        _check_kind(path, os.fstat(descriptor).st_mode)  # and after: it may have become something else
    except BaseException:
        os.close(descriptor)
        raise
    return os.fdopen(descriptor, "rb")


class Unchanging(Protocol):
    """A file of this machine in a state that it is to be in; equal for the same state."""

    @property
    def path(self) -> Path:
        """The path of the file."""

    def check_unchanged(self) -> None:
        """Raise MismatchError if it is in another."""


@lru_cache(maxsize=64)
def opened(file: Unchanging) -> BinaryIO:
    """The one table of files that stay open between reads. Raises CheckpointError, MismatchError."""
    file.check_unchanged()
    return open_file(file.path)


def prefetch(file: IO[bytes], ranges: Iterable[Range]) -> None:
    """Read ranges together that will soon be read one by one. Does nothing for a file on this machine."""
    if isinstance(raw := getattr(file, "raw", None), RangeFile):
        raw.prefetch(ranges)


def read_file(path: FilePath, limit: int | None = None) -> bytes:
    """The content of a regular file of at most ``limit`` bytes. Raises CheckpointError."""
    with open_file(path) as file:
        try:
            size = file.seek(0, 2)
            file.seek(0)
            if limit is not None and size > limit:
                raise CheckpointError(f"{path}: has {size:,} bytes; of such a file at most {limit:,} are read")
            return file.read() if limit is None else file.read(limit)
        except OSError as error:
            raise unreadable(path, error) from None


def content_of(file: FilePath | bytes | None) -> bytes | None:
    """The content of a file, or of one that is not stored as it is. Raises CheckpointError."""
    return file if file is None or isinstance(file, bytes) else read_file(file)


def read_ranges(ranges: Sequence[tuple[FilePath, int, int]]) -> list[bytes]:
    """Ranges of files, each with its first byte and the one behind its last; those of a store are read together.

    Raises CheckpointError, also for a file that ends before.
    """
    bytes_of: dict[tuple[FilePath, int, int], bytes] = {}
    local: dict[FilePath, list[tuple[int, int]]] = {}
    stored: dict[Store, list[tuple[str, int, int]]] = {}
    for path, begin, end in dict.fromkeys(ranges):
        if isinstance(path, Path) or local_path(path) is not None:
            local.setdefault(path, []).append((begin, end))
        else:
            stored.setdefault(path.store, []).append((path.inner, begin, end))
    for path, parts in local.items():
        with open_file(path) as file:
            for begin, end in parts:
                content = bytearray(end - begin)
                read_into(path, file.fileno(), begin, memoryview(content))
                bytes_of[path, begin, end] = bytes(content)
    for store, inner_ranges in stored.items():
        contents = zip(inner_ranges, store.read(inner_ranges), strict=True)
        bytes_of |= {(StoredPath(store, inner), begin, end): content for (inner, begin, end), content in contents}
    return [bytes_of[key] for key in ranges]


def joined(ranges: Iterable[Range], gap: int) -> Iterator[Range]:
    """Ranges in order; neighbours with at most ``gap`` bytes between them are joined."""
    last: Range | None = None
    for begin, end in sorted(ranges):
        if last is not None and begin <= last[1] + gap:
            last = last[0], max(last[1], end)
            continue
        if last is not None:
            yield last
        last = begin, end
    if last is not None:
        yield last


def read_into(path: FilePath, descriptor: int, begin: int, view: memoryview) -> None:
    """Fill a buffer with the bytes of an opened file from ``begin`` on. Raises CheckpointError, also at its end."""
    position = 0
    while position < len(view):
        try:
            count = os.preadv(descriptor, [view[position:]], begin + position)
        except OSError as error:
            raise unreadable(path, error) from error
        if not count:
            what = f"the file became shorter: it ends before byte {begin + len(view)}"
            raise CheckpointError(f"{path}: {what}", "do not change the files while they are read")
        position += count


def unreadable(path: FilePath, error: OSError) -> CheckpointError:
    """Return the error for a file that cannot be read, in the operating system's words."""
    return CheckpointError(f"{path}: cannot be read: {error.strerror or error}")


def _check_kind(path: FilePath, mode: int) -> None:
    if not stat.S_ISREG(mode):
        kind = _KINDS.get(stat.S_IFMT(mode), "something else")
        raise CheckpointError(f"{path}: cannot be read: it is {kind}, not a file")


class RangeFile(io.RawIOBase):
    """A file of ``size`` bytes; ``read_ranges`` gives the bytes of ranges of it."""

    def __init__(self, read_ranges: Callable[[Sequence[Range]], Sequence[bytes]], size: int) -> None:
        self._read_ranges, self._size, self._at = read_ranges, size, 0
        self._kept: list[tuple[Range, bytes]] = []

    def readable(self) -> bool:
        """It can be read."""
        return True

    def seekable(self) -> bool:
        """Any place of it can be read."""
        return True

    def seek(self, offset: int, whence: int = 0) -> int:
        """Go to a place, counted from the beginning, from here (1) or from the end (2). Raises OSError before it."""
        at = offset + (0, self._at, self._size)[whence]
        if at < 0:
            raise OSError(errno.EINVAL, "a place before the file")
        self._at = at
        return at

    def prefetch(self, ranges: Iterable[Range]) -> None:
        """Read those of the ranges that lie in the file, and keep them."""
        inside = ((max(0, begin), min(end, self._size)) for begin, end in ranges)
        new = [*joined((part for part in inside if part[0] < part[1] and self._find(*part) is None), NEAR)]
        self._kept = sorted([*self._kept, *zip(new, self._read_ranges(new), strict=True)])

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        """Fill a buffer as far as the file goes; returns the number of bytes."""
        begin, end = self._at, min(self._at + len(buffer), self._size)
        content = self._find(begin, end) if end > begin else b""
        content = self._read_ranges([(begin, end)])[0] if content is None else content
        buffer[: len(content)] = content
        self._at += len(content)
        return len(content)

    def _find(self, begin: int, end: int) -> bytes | None:
        number = bisect_right(self._kept, begin, key=lambda kept: kept[0][0]) - 1
        if number < 0 or end > self._kept[number][0][1]:
            return None
        (first, _), content = self._kept[number]
        return content[begin - first : end - first]
