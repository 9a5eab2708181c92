"""Names of reshard's own folders and files, beside an output while it is built, by which it recognises them.

A folder ``OUT.partial`` with a journal was made by reshard; without one it is refused.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import shutil
from collections.abc import Collection, Iterable, Iterator, Mapping
from hashlib import blake2b
from pathlib import Path
from typing import IO, Any

from reshard.formats.errors import CheckpointError

STATE = ".reshard-"
"""The prefix of names that tell how far an output is."""
UNFINISHED = f"{STATE}unfinished"
"""The object that says that an output is still being uploaded."""
COMMON = f"{STATE}common"
"""The lock that each process takes to begin and to end."""
JOURNAL = f"{STATE}journal-"
"""The prefix of a journal's name: a locked file, or an object, that tells which files a process writes and has
written.
"""
BUILT = "output"
"""The folder in a staging folder that gets the name of the output."""
SUFFIX = ".partial"


def staging_of(out: Path) -> Path:
    """The folder in which an output is built."""
    return out.with_name(out.name + SUFFIX) if out.name else out / SUFFIX  # . and / have no name


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


def task_name(task: Mapping[str, Any]) -> str:
    """The name of a task, a JSON document: its command and its digest."""
    digest = blake2b(json.dumps(task, sort_keys=True).encode(), digest_size=16).hexdigest()
    return f"{task['command']}-{digest}"


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


def not_begun(labels: Collection[str]) -> list[str]:
    """The parts of an output (``part-0-of-4``) that have not begun, given those that have."""
    counts = {int(label.rpartition("-")[2]) for label in labels if label.startswith("part-")}
    all_of = (f"part-{index}-of-{count}" for count in sorted(counts) for index in range(count))
    return [label for label in all_of if label not in labels]


_CHECK = ', "check": '


def journal_line(entry: Mapping[str, Any], begin: str = "") -> str:
    """A line of a journal: JSON, with a checksum of the entry and of the line with which its run began."""
    text = json.dumps(entry)
    return f"{text[:-1]}{_CHECK}{_check_of(text, begin)}\n"


def _check_of(text: str, begin: str) -> str:
    return f'"{blake2b((begin + text).encode(), digest_size=8).hexdigest()}"}}'


def entries_in(lines: Iterable[str], *kinds: str) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """Yield the entries of a journal whose first key is one of ``kinds``, each with the line that its run began with.

    A run begins with an entry whose first key is ``task``. A line whose checksum is not right is none.
    """
    first, begin, wanted = "", dict[str, Any](), tuple(f'{{"{kind}"' for kind in kinds)
    for line in lines:
        is_begin = line.startswith('{"task"')
        if is_begin:
            first, begin = "", {}
        if is_begin or line.startswith(wanted):
            text, _, check = line.removesuffix("\n").rpartition(_CHECK)
            if check == _check_of(text + "}", first):
                entry = json.loads(text + "}")
                first, begin = (line, entry) if is_begin else (first, begin)
                if line.startswith(wanted):
                    yield begin, entry


def journal_in(content: bytes | None, *kinds: str) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """The entries of a journal in a bucket (see ``entries_in``)."""
    return entries_in((content or b"").decode(errors="replace").splitlines(keepends=True), *kinds)


def json_of(content: bytes | None) -> dict[str, Any]:
    """A JSON object; empty if the content is not one."""
    with contextlib.suppress(ValueError, RecursionError):
        document = json.loads(content or b"")
        return document if isinstance(document, dict) else {}
    return {}
