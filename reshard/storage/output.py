"""Publishes output under its final name only when it is complete: staging, journal, locks, atomic rename.

The output is built in the staging folder ``OUT.partial``, and renamed to ``OUT`` when it is complete. Files named
``.reshard-*`` in the staging folder are not part of the output:

- the task, an empty file; its name tells another run whether it may use the finished files;
- a journal for each part (a rank's folder, or a process's files), with the finished files, their checksums, and the
  sums of the source bytes read for them;
- the locks;
- an older output that is being replaced.

A folder ``OUT.partial`` without a task file was not made by reshard, and is refused. Ranks that are written alone
(``--rank``) are renamed into ``OUT`` one by one, and the manifest there lists the complete ones.

Several processes may deal the files of one output among them (``--part``). Each locks its part and has a journal of its
own; the one that finds all files finished, and no other process at work, publishes. Which process wrote a file does not
matter: so a part can be written again by any later run, of any number of processes. An empty file stays in such an
output, ``PUBLISHED`` and the name of the task: by it a process that comes late knows that nothing is left to do.

Guarantees: POSIX rename is atomic. A later run keeps a finished file if its state (size, time, inode) is unchanged. A
restart of the machine may lose written bytes; after one, the checksum must be right too. Published output survives a
power loss only with ``fsync``.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from formats.errors import CheckpointError, ReshardError
from formats.files.checksum import checksum
from formats.files.sharded import FileRecord
from formats.files.stamps import Stamp
from reshard.storage.journal import Finished, Journals
from reshard.storage.marks import (
    PUBLISHED,
    STATE,
    TASK,
    check_staging,
    markers,
    open_new,
    remove_state,
    remove_tree,
    staging_of,
    task_name,
)
from reshard.storage.parts import Dealt, is_locked
from reshard.system import disk_errors

_REPLACED_OUTPUT, _REPLACED_RANK = f"{STATE}replaced-output", f"{STATE}replaced-rank"
PATIENCE = 2.0
"""Seconds to wait for a lock: the processes of a killed run hold it until they have ended."""


class PublishedError(ReshardError):
    """The output is there already: other processes have finished what this one was to do."""


class Staging:
    """The folder in which one output is built. A context manager: the locks are held inside it.

    ``task`` is a JSON document that describes the output, with the ``command``: a run uses the finished files of an
    earlier run with an equal task. ``parts`` are the folders that this run writes (``""`` is the root). ``inputs`` are
    the states of the files that it reads. ``check`` is called once the locks are held; its error ends the run. With
    ``dealt`` this run writes some files of the whole output (``parts`` is the root), and other processes the others.
    """

    def __init__(
        self,
        out: Path,
        task: Mapping[str, Any],
        parts: Sequence[str],
        inputs: Sequence[Stamp] = (),
        *,
        fsync: bool,
        check: Callable[[], None] = lambda: None,
        dealt: Dealt | None = None,
    ) -> None:
        self.out, self.parts, self._fsync, self._check = out, tuple(parts), fsync, check
        self.shown = str(out)
        """What messages call the output."""
        self.work = staging_of(out)
        self._journal_files = Journals(self.work, tuple(inputs), self.parts)
        self._dealt = dealt
        self._name = task_name(task)
        # The name has the digest, and the file is empty: to remove a file with content takes 0.2 s on a busy disk.
        self._task = self.work / f"{TASK}{self._name}"
        self._locks: list[IO[str]] = []
        self._journals: dict[str, IO[str]] = {}
        self.finished: dict[str, Finished] = {}

    def __enter__(self) -> Staging:
        with disk_errors(self.work):
            self._claim()
            try:
                with self._all_locks():
                    self._restore_replaced()
                    try:
                        self._check()
                    except BaseException:
                        self._leave()
                        raise
                    self._adopt_or_clear()
                    for lock in self._locks:
                        lock.write(self._task.name)
                        lock.flush()
                for part in self.parts:
                    self._load_journal(part)
            except BaseException:
                self._unlock()
                raise
        return self

    def __exit__(self, *exception: object) -> None:
        self._unlock()

    # -- the folder

    def _claim(self) -> None:
        while True:
            try:
                self.work.mkdir()
                return
            except FileExistsError:
                with contextlib.suppress(FileNotFoundError):  # another process has just removed it
                    check_staging(self.out)
                    return

    def _restore_replaced(self) -> None:
        """Rename an output back that a killed run had moved aside."""
        if not self.out.exists():
            for aside in sorted(self.work.glob(f"{_REPLACED_OUTPUT}-*"))[:1]:
                aside.rename(self.out)

    def _leave(self) -> None:
        """Remove the staging folder, if nothing was built in it and no other run writes there."""
        if any(not entry.name.startswith(STATE) for entry in self.work.iterdir()):
            return
        with contextlib.suppress(CheckpointError):
            self._check_nobody_else_writes()
            remove_tree(self.work)

    # -- locks

    @contextlib.contextmanager
    def _all_locks(self) -> Iterator[None]:
        """Lock the parts of this run, and in the block what all runs share."""
        while True:
            self._lock_parts()
            shared = self._lock("lock-task", wait=True)
            assert shared is not None
            with shared:
                if all(self._is_there(lock) for lock in self._locks):
                    yield
                    return
            self._unlock()  # another run has removed the folder meanwhile, with the locks

    def _lock_parts(self) -> None:
        give_up = time.monotonic() + PATIENCE
        for part in self.parts:
            while (lock := self._lock(f"lock-{self._label(part)}", wait=False)) is None and time.monotonic() < give_up:
                time.sleep(0.01)
            if lock is None:
                what = f"{self._label(part)} of {self.shown}" if self._dealt else f"{self.out / part}"
                raise CheckpointError(f"another run is writing {what}", "wait for it, or stop it")
            lock.truncate(0)
            self._locks.append(lock)

    def _label(self, part: str) -> str:
        """What the lock and the journal of a part are called."""
        return part or (self._dealt.label if self._dealt else "root")

    @staticmethod
    def _is_there(lock: IO[str]) -> bool:
        """Whether a lock's file still has its name: otherwise others lock another one."""
        with contextlib.suppress(FileNotFoundError):
            return os.path.samestat(os.fstat(lock.fileno()), Path(lock.name).stat())
        return False

    def _lock(self, name: str, *, wait: bool) -> IO[str] | None:
        """Lock a file of the staging folder; None if it is locked and ``wait`` is False.

        Another process may remove the folder at the same time; then it is made again.
        """
        path = self.work / (STATE + name)
        while True:
            self._claim()
            try:
                lock = open_new(path, "a")
            except FileNotFoundError:  # the folder has been removed meanwhile
                continue
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
            except BlockingIOError:
                lock.close()
                return None
            if self._is_there(lock):
                return lock
            lock.close()

    def _unlock(self) -> None:
        for file in (*self._journals.values(), *self._locks):
            file.close()
        self._journals.clear()
        self._locks.clear()

    # -- resuming an earlier run

    def _adopt_or_clear(self) -> None:
        """Keep the files of an equal task; remove those of another task.

        Raises CheckpointError if the other task is still running, if the same is dealt in another way, or if there are
        files of another task and several processes write this one: they would be of two commands.
        """
        built = [entry for entry in self.work.iterdir() if not entry.name.startswith(STATE)]
        if self._task.exists():
            for other in self._at_work():
                if not self._goes_with(other):
                    raise CheckpointError(
                        f"another run is writing {other} of {self.shown}",
                        "wait for it, or start all processes with the same number of parts",
                    )
            for entry in (p for root in built for p in (root, *root.rglob("*")) if p.is_symlink()):
                entry.unlink()  # reshard makes no links, and must not write through one
            return
        for other in self._at_work():
            if _text_of(self.work / f"{STATE}lock-{other}") not in {
                "",
                self._task.name,
            }:  # without one, it waits for us
                raise self._written_else()
        if built:
            self._check_may_clear()
        for entry in (*built, *self._journal_files.all()):
            remove_tree(entry)
        self._task.touch()
        for marker in markers(self.work):
            if marker != self._task:
                marker.unlink()

    def _goes_with(self, label: str) -> bool:
        """Whether the run that writes another part deals the files of the output as this one does.

        Parts are of the same number (``part-0-of-4``), ranks of the same mesh with none in common (``rank-0-1-of-4``).
        """
        if self.parts != ("",):  # folders of ranks: only beside others of their kind
            return label != "root" and not label.startswith("part-")
        if self._dealt is None or label == "root":
            return False
        (kind, *numbers, _, count), (own, *mine, _, own_count) = label.split("-"), self._dealt.label.split("-")
        return (kind, count) == (own, own_count) and not {*numbers} & {*mine}

    def _at_work(self) -> Iterator[str]:
        """The parts that other runs are writing."""
        mine = {self._label(part) for part in self.parts}
        for path in self.work.glob(f"{STATE}lock-*"):
            label = path.name.removeprefix(f"{STATE}lock-")
            if label not in mine and label != "task" and is_locked(path):
                yield label

    def _check_nobody_else_writes(self) -> None:
        if any(self._at_work()):
            raise self._written_else()

    def _written_else(self) -> CheckpointError:
        return CheckpointError(
            f"another run is writing something else to {self.shown}", "wait for it, or choose another folder"
        )

    def _check_may_clear(self) -> None:
        if self._dealt is not None and self._dealt.count > 1:
            raise self._begun_by_others(str(self.work))

    def _begun_by_others(self, place: str) -> CheckpointError:
        return CheckpointError(
            f"{place} holds the unfinished output of another command, which one of several processes does not remove",
            "give all processes the same command, or remove what is there",
        )

    def writes(self, name: str) -> bool:
        """Whether this run writes a file of the output, and no other process does."""
        return self._dealt is None or name in self._dealt.files

    def _load_journal(self, part: str) -> None:
        """Keep the finished files of an earlier run with the same inputs and parts, and begin a new journal."""
        label, journals = self._label(part), self._journal_files
        for name, finished in journals.found([journals.path(label)] if part else journals.all(), self.writes):
            if self.writes(name):
                self.finished[name] = finished
        journal = self._journals[part] = journals.begin(label, len(self._dealt.files) if self._dealt else None)
        for name, finished in self.finished.items():
            if part in ("", name.partition("/")[0]):
                journals.note(journal, name, finished)
        journal.flush()

    def clear(self) -> None:
        """Remove what was built, because it cannot be trusted: all of it, or else the part of this process."""
        if self.parts != ("",):
            lock = self._lock("lock-task", wait=True)
            assert lock is not None
            with lock:
                mine = [self.work / name for part in self.parts for name in (self._journal_files.path(part).name, part)]
                for path in mine if any(self._at_work()) else [self.work]:
                    remove_tree(path)
            return
        if self._dealt is None or not self._journals:
            remove_tree(self.work)
            return
        for name in (self._journal_files.path(self._dealt.label).name, *self._dealt.files):
            (self.work / name).unlink(missing_ok=True)

    # -- writing

    def batches(self, files: Iterable[tuple[str, int]]) -> Iterator[frozenset[str]]:
        """Which files (given by name and size, in order) are written at a time: all that are this process's."""
        yield frozenset(name for name, _ in files if self.writes(name))

    def path(self, name: str) -> Path:
        """The path at which a file of the output is built; makes its folder."""
        path = self.work / name
        path.parent.mkdir(parents=True, exist_ok=True)
        return path

    def note_finished(self, part: str, name: str, finished: Finished) -> None:
        """Add a completed file to the journal."""
        self.finished[name] = finished
        journal = self._journals["" if self._dealt else part]
        self._journal_files.note(journal, name, finished)
        journal.flush()

    def write(self, name: str, content: bytes) -> FileRecord:
        """Write a small file, and return its record. Raises CheckpointError."""
        path = self.path(name)
        with disk_errors(path):
            with open_new(path, "wb") as file:
                file.write(content)
            self._sync(path)
        return FileRecord(name, len(content), checksum(content))

    # -- publishing

    def publish_all(self, *, overwrite: bool) -> None:
        """Rename the staging folder to the output's final name.

        If the process is killed here, the final name has the old output, the new output, or nothing. In the last case
        both are in the staging folder, and the next run with the same output renames the old one back.
        """
        with disk_errors(self.out):
            if self._dealt is not None:
                (self.work / f"{PUBLISHED}{self._name}").touch()
            self._sync_folders(self.work)
            if self.out.exists() and any(self.out.iterdir()):
                if not overwrite:
                    raise _appeared(self.out)
                self.out.rename(_free_name(self.work / _REPLACED_OUTPUT))
            try:
                self.work.rename(self.out)
            except OSError as error:
                if error.errno in {errno.ENOTEMPTY, errno.EEXIST}:
                    raise _appeared(self.out) from error
                raise
            self._unlock()
            remove_state(self.out)
            self._sync(self.out.parent)

    @contextlib.contextmanager
    def last(self) -> Iterator[bool]:
        """Whether all processes that share the output have finished; then this one publishes it, within the block.

        ``finished`` has the files of all processes then. This process's part is no longer locked.
        """
        if self._dealt is None:
            yield True
            return
        lock = self._lock("lock-task", wait=True)
        assert lock is not None
        with lock:
            self._unlock()  # whoever comes next must not wait for this process
            self.finished |= self._journal_files.found(self._journal_files.all(), self.writes, of_all=True)
            yield not any(self._at_work())

    @contextlib.contextmanager
    def publishing(self) -> Iterator[None]:
        """Hold the lock for renaming ranks into the output and listing them in its manifest."""
        lock = self._lock("lock-task", wait=True)
        assert lock is not None
        with lock, disk_errors(self.out):
            self.out.mkdir(exist_ok=True)
            self._sync(self.out.parent)
            yield

    def move_in(self, part: str) -> None:
        """Rename a finished rank's folder into the output; an older one of that name is replaced."""
        target, built = self.out / part, self.work / part
        self._sync_folders(built)
        if target.exists():
            target.rename(_free_name(self.work / _REPLACED_RANK))
        built.rename(target)
        self._sync(self.out)
        for replaced in self.work.glob(f"{_REPLACED_RANK}-*"):
            remove_tree(replaced)

    def put(self, name: str, content: bytes) -> None:
        """Write a small file directly into the output, atomically."""
        path = self.out / name
        path.parent.mkdir(parents=True, exist_ok=True)
        staged = path.with_name(".reshard.incomplete")  # a suffix could make the name too long
        with open_new(staged, "wb") as file:
            file.write(content)
        self._sync(staged)
        staged.replace(path)
        self._sync(path.parent)

    def remove_work(self) -> None:
        """Remove the staging folder; who waits for a lock in it sees that it is gone."""
        remove_tree(self.work)
        self._unlock()

    def remove_if_last(self) -> None:
        """Remove the staging folder, unless another run is writing there. To be called while ``publishing``."""
        self._unlock()
        if not any(self._at_work()):
            remove_tree(self.work)

    def _sync(self, path: Path) -> None:
        if not self._fsync:
            return
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def _sync_folders(self, root: Path) -> None:
        if self._fsync:
            for folder, _, _ in os.walk(root):
                self._sync(Path(folder))


def _appeared(out: Path) -> CheckpointError:
    return CheckpointError(
        f"{out} appeared while it was being built", "move it away or pass --overwrite, and run the same command again"
    )


def _text_of(path: Path) -> str:
    with contextlib.suppress(FileNotFoundError):
        return path.read_text()
    return ""


def _free_name(path: Path) -> Path:
    names = (path.with_name(f"{path.name}-{i}") for i in range(1_000_000))
    return next(name for name in names if not name.exists())
