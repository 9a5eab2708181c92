"""The staging folder on a disk: whose it is, the locks in it, and its removal."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
from pathlib import Path
from typing import IO, Any

from reshard.formats.errors import CheckpointError
from reshard.store.staging_names import COMMON, JOURNAL, STATE, staging_of


def check_staging(out: Path) -> None:
    """Raise CheckpointError if the staging path is in use by something else. Changes nothing, follows no link."""
    work, hint = staging_of(out), "move it away, or choose another output folder"
    if work.is_symlink():
        raise CheckpointError(f"{work} is a link, and {out.name} would be built there", hint)
    # A run puts its journal there before anything else, and removes it last. Other runs may do so now.
    with contextlib.suppress(FileNotFoundError):
        try:
            other = next((entry for entry in work.iterdir() if not entry.name.startswith(STATE)), None)
        except NotADirectoryError:
            raise CheckpointError(f"{work} is a file, and {out.name} would be built there", hint) from None
        if other is not None and not [*work.glob(f"{JOURNAL}*")] and os.path.lexists(other):
            raise CheckpointError(
                f"{work} holds '{other.name}' and was not made by reshard, and {out.name} would be built there", hint
            )


def is_folder(path: Path) -> bool:
    """Whether a path is a folder, and not a link to one."""
    return path.is_dir() and not path.is_symlink()


def remove_tree(path: Path) -> None:
    """Remove a file, a link or a folder.

    Of a staging folder the journals go last: if a run is killed here, the rest is still known as reshard's. Only the
    common lock goes after them: nobody begins in a folder that is being removed.
    """
    if not is_folder(path):
        path.unlink(missing_ok=True)
        return
    with contextlib.suppress(FileNotFoundError):
        for entry in sorted(path.iterdir(), key=lambda entry: (entry.name == COMMON, entry.name.startswith(JOURNAL))):
            if is_folder(entry):
                shutil.rmtree(entry, ignore_errors=True)
            else:
                entry.unlink(missing_ok=True)
        try:
            path.rmdir()
        except OSError as error:
            if error.errno not in {errno.ENOTEMPTY, errno.EEXIST}:  # another run begins there at this moment
                raise


def lock(path: Path, *, wait: bool) -> IO[str] | None:
    """Lock a file, which is made if it is not there. None if another process has locked or removed it.

    Raises OSError if its folder is not there.
    """
    with contextlib.ExitStack() as opened, contextlib.suppress(BlockingIOError):
        file = opened.enter_context(open_new(path, "a"))
        fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        if is_there(file):
            opened.pop_all()  # else, and after Ctrl-C, it is closed: this process waits for the lock again to end
            return file
    return None


def is_there(file: IO[str]) -> bool:
    """Whether an open file still has its name, so was neither removed nor replaced."""
    with contextlib.suppress(FileNotFoundError):
        return os.path.samestat(os.fstat(file.fileno()), Path(file.name).stat())
    return False


def open_new(path: Path, mode: str) -> IO[Any]:
    """Open a file for writing; raises OSError if it is a link."""
    return open(path, mode, opener=lambda name, flags: os.open(name, flags | os.O_NOFOLLOW, 0o666))
