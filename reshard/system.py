"""The operating system: what Python's own library does not offer of it, and its refusals in one line."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import signal
import sys
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

from formats.errors import CheckpointError

_SET_PARENT_DEATH_SIGNAL = 1
_LIBRARY = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None


def reserve(descriptor: int, nbytes: int) -> None:
    """Give a new file its size, and its place on the disk if the file system can: what follows is faster, and cannot
    find the disk full. Raises OSError.
    """
    os.ftruncate(descriptor, nbytes)
    fallocate = getattr(_LIBRARY, "fallocate64", None)
    if fallocate is not None and nbytes:
        # not os.posix_fallocate, which writes to each block where the file system cannot
        failed = fallocate(descriptor, 0, ctypes.c_int64(0), ctypes.c_int64(nbytes))
        if failed and ctypes.get_errno() in {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO}:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def stop_with_parent(parent: int) -> None:
    """Have this process killed when the one that forked it dies, where the system can."""
    if _LIBRARY is not None:
        _LIBRARY.prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGKILL)
        if os.getppid() != parent:  # it is dead already
            os.kill(os.getpid(), signal.SIGKILL)


@lru_cache(maxsize=1)
def boot_id() -> str | None:
    """What is another after each start of the machine, None where the system does not say."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return None


@contextlib.contextmanager
def disk_errors(path: Path) -> Iterator[None]:
    """What cannot be written, as a CheckpointError that names the file."""
    try:
        yield
    except OSError as error:
        raise refused("write", path, error) from error


def refused(verb: str, path: Path, error: OSError) -> CheckpointError:
    """What the operating system refused, in one line, and what to do if the disk is full."""
    full = error.errno in {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
    hint = "free some space and run the same command again: it goes on where it stopped" if full else None
    return CheckpointError(f"cannot {verb} {path}: {error.strerror or error}", hint)
