"""The door through which files are read: regular files alone, of a size that is sane for what they should be.

A pipe would wait for a writer, a device has no end, and a folder is no file; a link is followed to what it leads to.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import BinaryIO

from formats.errors import CheckpointError

_KINDS = {
    stat.S_IFIFO: "a pipe",
    stat.S_IFDIR: "a folder",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFSOCK: "a socket",
}


def open_file(path: Path) -> BinaryIO:
    """Open a regular file for reading. Raises CheckpointError for what is none, and for what cannot be opened."""
    try:
        _check_kind(path, path.stat().st_mode)  # before it is opened: to open a device may do something
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
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


def read_file(path: Path, limit: int | None = None) -> bytes:
    """The content of a regular file of at most ``limit`` bytes. Raises CheckpointError."""
    with open_file(path) as file:
        try:
            size = os.fstat(file.fileno()).st_size
            if limit is not None and size > limit:
                raise CheckpointError(f"{path}: has {size:,} bytes; of such a file at most {limit:,} are read")
            return file.read() if limit is None else file.read(limit)
        except OSError as error:
            raise unreadable(path, error) from None


def unreadable(path: Path, error: OSError) -> CheckpointError:
    """What the operating system says of a file that cannot be read."""
    return CheckpointError(f"{path}: cannot be read: {error.strerror or error}")


def _check_kind(path: Path, mode: int) -> None:
    if not stat.S_ISREG(mode):
        kind = _KINDS.get(stat.S_IFMT(mode), "something else")
        raise CheckpointError(f"{path}: cannot be read: it is {kind}, not a file")
