"""Calls of the operating system that Python's library lacks, and its errors in one line."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import shutil
import signal
import sys
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

from formats.errors import CheckpointError

_SET_PARENT_DEATH_SIGNAL = 1
_LIBRARY = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None


def reserve(descriptor: int, nbytes: int) -> None:
    """Set the size of a new file in bytes, and reserve its space on the disk if the file system can.

    Later writes are faster, and cannot find the disk full. Raises OSError.
    """
    os.ftruncate(descriptor, nbytes)
    fallocate = getattr(_LIBRARY, "fallocate64", None)
    if fallocate is not None and nbytes:
        # not os.posix_fallocate: it writes to every block if the file system cannot reserve
        failed = fallocate(descriptor, 0, ctypes.c_int64(0), ctypes.c_int64(nbytes))
        if failed and ctypes.get_errno() in {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO}:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def check_space(folder: Path, needed: int, what: str = "", hint: str = "write to another disk") -> None:
    """Raise CheckpointError if the disk has less free space than ``needed`` bytes. It says for ``what``."""
    free = shutil.disk_usage(next(path for path in (folder, *folder.parents) if path.exists())).free
    if needed > free:
        place = f"{folder}: not enough space for {what}" if what else str(folder)
        raise CheckpointError(
            f"{place}: {needed:,} bytes are needed and {free:,} are free", f"free some space, or {hint}"
        )


def stop_with_parent(parent: int) -> None:
    """Have this process killed when its parent ends (Linux only)."""
    if _LIBRARY is not None:
        _LIBRARY.prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGKILL)
        if os.getppid() != parent:  # the parent has ended already
            os.kill(os.getpid(), signal.SIGKILL)


@lru_cache(maxsize=1)
def boot_id() -> str | None:
    """An id that changes with each start of the machine; None if the system has none."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return None


@contextlib.contextmanager
def disk_errors(path: Path) -> Iterator[None]:
    """Turn an OSError in the block into a CheckpointError that names ``path``."""
    try:
        yield
    except OSError as error:
        raise disk_error("write", path, error) from error


def disk_error(verb: str, path: Path, error: OSError) -> CheckpointError:
    """The CheckpointError for an OSError, with a hint if the disk is full; ``verb`` is ``read`` or ``write``."""
    full = error.errno in {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
    hint = "free some space and run the same command again" if full else None
    return CheckpointError(f"cannot {verb} {path}: {error.strerror or error}", hint)
