"""Output that is either complete under its final name, or not there: staging, journal, locks, atomic publication.

Everything is built in ``OUT.partial`` and renamed to ``OUT`` when complete. ``.reshard-*`` in it are the task (an empty
file whose name tells another run whether it may go on with the files), a journal of finished files with their
checksums, and the locks. Ranks that are written alone (``--rank``) are renamed into ``OUT`` one by one; the manifest
there lists those that are complete. Guarantees: POSIX rename is atomic; against power loss only with ``fsync``.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any, TextIO

from formats.errors import CheckpointError
from formats.sharded import MANIFEST, FileRecord
from reshard.checksum import checksum

STATE = ".reshard-"
"""How the names of what is not part of the output begin in a staging folder."""

TASK = f"{STATE}task-"
PATIENCE = 0.2
"""Seconds for the processes of a run that was killed to end, which hold its locks till then."""

SUFFIX = ".partial"


def staging_of(out: Path) -> Path:
    """The folder in which an output is built."""
    return out.with_name(out.name + SUFFIX)


def unfinished_command(path: Path) -> str | None:
    """The command that such a folder is the work of, None for any other path."""
    tasks = path.glob(f"{TASK}*-*") if path.name.endswith(SUFFIX) else ()
    return next((task.name.removeprefix(TASK).rpartition("-")[0] for task in tasks), None)


def _task_name(task: Mapping[str, Any]) -> str:
    # A name and not a content, which would lie on the disk: to remove that can take 0.2 s while the disk is busy.
    digest = blake2b(json.dumps(task, sort_keys=True).encode(), digest_size=16).hexdigest()
    return f"{TASK}{task['command']}-{digest}"


@dataclass(frozen=True)
class Finished:
    """A file that an earlier run (or this one) has completed."""

    size: int
    checksum: str | None


class Staging:
    """The place in which one output is built. A context manager: the locks are held inside it.

    ``task`` describes what is written, in JSON, with the ``command``: a run may go on with the files of another that
    had an equal task. ``parts`` are the folders that this run writes (``""`` is the root).
    """

    def __init__(self, out: Path, task: Mapping[str, Any], parts: Sequence[str], *, fsync: bool) -> None:
        self.out, self.parts, self._fsync = out, tuple(parts), fsync
        self.work = staging_of(out)
        self._task = self.work / _task_name(task)
        self._locks: list[TextIO] = []
        self._journals: dict[str, TextIO] = {}
        self.finished: dict[str, Finished] = {}

    def __enter__(self) -> Staging:
        with disk_errors(self.work):
            self.work.mkdir(exist_ok=True)
        try:
            self._lock_parts()
            self._adopt_or_clear()
            for part in self.parts:
                self._load_journal(part)
        except BaseException:
            self._unlock()
            raise
        return self

    def __exit__(self, *exception: object) -> None:
        self._unlock()

    # -- locks

    def _lock_parts(self) -> None:
        give_up = time.monotonic() + PATIENCE
        for part in self.parts:
            while (lock := self._lock(f"lock-{part or 'root'}", wait=False)) is None and time.monotonic() < give_up:
                time.sleep(0.01)
            if lock is None:
                raise CheckpointError(f"another run is writing {self.out / part}", "wait for it, or stop it")
            self._locks.append(lock)

    def _lock(self, name: str, *, wait: bool) -> TextIO | None:
        """Lock a file of the staging folder, which another process may remove at the same time."""
        path = self.work / (STATE + name)
        while True:
            self.work.mkdir(exist_ok=True)
            lock = path.open("a")
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
            except BlockingIOError:
                lock.close()
                return None
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(lock.fileno()), path.stat()):
                    return lock
            lock.close()

    def _unlock(self) -> None:
        for file in (*self._journals.values(), *self._locks):
            file.close()
        self._journals.clear()
        self._locks.clear()

    # -- going on with an earlier run

    def _adopt_or_clear(self) -> None:
        """Keep what an equal task has left; clear away what any other task has, unless it is still running."""
        lock = self._lock("lock-task", wait=True)
        assert lock is not None
        with lock:
            if self._task.exists():
                return
            built = [entry for entry in self.work.iterdir() if not entry.name.startswith(STATE)]
            if built:
                self._check_nobody_else_writes()
            for entry in (*built, *self.work.glob(f"{STATE}journal-*"), *self.work.glob(f"{TASK}*")):
                _remove(entry)
            self._task.touch()

    def _check_nobody_else_writes(self) -> None:
        mine = {f"lock-{part or 'root'}" for part in self.parts}
        for path in self.work.glob(f"{STATE}lock-*"):
            name = path.name.removeprefix(STATE)
            if name in mine or name == "lock-task":
                continue
            lock = self._lock(name, wait=False)
            if lock is None:
                raise CheckpointError(
                    f"another run is writing something else to {self.out}", "wait for it, or choose another folder"
                )
            lock.close()

    def _load_journal(self, part: str) -> None:
        path = self.work / f"{STATE}journal-{part or 'root'}"
        lines = path.read_text().splitlines() if path.exists() else []
        for line in lines:
            with contextlib.suppress(ValueError, KeyError):
                entry = json.loads(line)
                file = self.work / entry["name"]
                if file.is_file() and file.stat().st_size == entry["size"]:
                    self.finished[entry["name"]] = Finished(entry["size"], entry["checksum"])
        self._journals[part] = path.open("a")

    def clear(self) -> None:
        """Throw away what was built: it cannot be trusted."""
        shutil.rmtree(self.work, ignore_errors=True)

    # -- writing

    def path(self, name: str) -> Path:
        """Where a file of the output is built; its folder is made."""
        path = self.work / name
        path.parent.mkdir(parents=True, exist_ok=True)
        return path

    def note_finished(self, part: str, name: str, size: int, checksum: str | None) -> None:
        """Write a completed file into the journal."""
        journal = self._journals[part]
        journal.write(json.dumps({"name": name, "size": size, "checksum": checksum}) + "\n")
        journal.flush()
        self.finished[name] = Finished(size, checksum)

    def write(self, name: str, content: bytes) -> FileRecord:
        """Write a small file whole."""
        path = self.path(name)
        with disk_errors(path):
            path.write_bytes(content)
            self._sync(path)
        return FileRecord(name, len(content), checksum(content))

    # -- publishing

    def publish_all(self, *, overwrite: bool) -> None:
        """Give the whole output its final name, and remove the staging folder."""
        with disk_errors(self.out):
            self._sync_folders()
            replaced = _free_name(self.out.with_name(self.out.name + ".replaced"))
            if self.out.exists() and overwrite:
                self.out.rename(replaced)
            self.work.rename(self.out)
            self._unlock()
            for entry in self.out.glob(f"{STATE}*"):
                _remove(entry)  # a rank that was replaced by an earlier run is a folder
            self._sync(self.out.parent)
            shutil.rmtree(replaced, ignore_errors=True)

    @contextlib.contextmanager
    def publishing(self) -> Iterator[None]:
        """Hold the lock under which ranks are renamed into the output and listed in its manifest."""
        lock = self._lock("lock-task", wait=True)
        assert lock is not None
        with lock, disk_errors(self.out):
            self.out.mkdir(exist_ok=True)
            self._sync(self.out.parent)
            yield

    def move_in(self, part: str) -> None:
        """Rename a finished rank's folder into the output, in the place of an older one if there is one."""
        self._sync_folders()
        target, built = self.out / part, self.work / part
        if target.exists():
            target.rename(_free_name(self.work / f"{STATE}replaced"))
        built.rename(target)
        self._sync(self.out)

    def put(self, name: str, content: bytes) -> None:
        """Write a small file into the output at once, atomically."""
        path = self.out / name
        path.parent.mkdir(parents=True, exist_ok=True)
        staged = path.with_name(f".{path.name}.incomplete")
        staged.write_bytes(content)
        self._sync(staged)
        staged.replace(path)
        self._sync(path.parent)

    def remove_work(self) -> None:
        """Remove the staging folder."""
        self._unlock()
        shutil.rmtree(self.work, ignore_errors=True)

    def _sync(self, path: Path) -> None:
        if not self._fsync:
            return
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def _sync_folders(self) -> None:
        if self._fsync:
            for folder, _, _ in os.walk(self.work):
                self._sync(Path(folder))


def check_output(out: Path, sources: Sequence[Path], *, overwrite: bool) -> None:
    """Refuse an output that exists, or that lies inside a source or around one. Touches nothing."""
    target = out.resolve()
    for source in sources:
        other = source.resolve()
        if target == other or target in other.parents or other in target.parents:
            raise CheckpointError(
                f"{out} and {source} are the same folder, or one lies in the other", "choose another output folder"
            )
    if not out.parent.is_dir():
        raise CheckpointError(f"{out.parent}: no such folder", "make it first")
    if out.is_symlink() or (out.exists() and not out.is_dir()):
        raise CheckpointError(f"{out} exists and is not a folder")
    if not out.exists() or not any(out.iterdir()):
        return
    if not any((out / name).exists() for name in (MANIFEST, "config.json")):
        raise CheckpointError(
            f"{out} exists and holds no checkpoint, it will not be overwritten", "choose another folder"
        )
    if not overwrite:
        raise CheckpointError(f"{out} exists", "remove it, choose another folder, or pass --overwrite")


def check_space(folder: Path, needed: int) -> None:
    """Refuse to begin where the disk has less free space than is needed (bytes)."""
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise CheckpointError(
            f"{folder}: {needed:,} bytes are needed and {free:,} are free", "free some space, or write to another disk"
        )


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink()


def _free_name(path: Path) -> Path:
    names = (path.with_name(f"{path.name}-{i}") for i in range(1_000_000))
    return next(name for name in names if not name.exists())


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
