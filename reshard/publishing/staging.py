"""Builds an output beside its place, and commits it when it is complete: staging folder, journal, locks, renames.

The output is built in the staging folder ``OUT.partial``. Files named ``.reshard-*`` there are not part of the output:

- the task, an empty file; its name tells another run whether it may use the finished files;
- a journal for each share of the files, with those that are finished, and the parts of the others that are, their
  checksums, and the sums of the source bytes read for them;
- a lock for each share, which says what it writes or that it has ended, and the common lock;
- an older output, or an older rank, that is being replaced.

A folder ``OUT.partial`` without a task file was not made by reshard, and is refused.

A process writes a *share* of the files (``journal.py``). Several may write at the same time if they have the same task,
and no file in common. It does not matter which process has written a file: any later run takes it. One rename commits a
*unit*: all of ``OUT``, by the process that finds all files finished and no other process at work; or the folder of a
rank (``--rank``), when its process has finished it. The manifest comes last, and lists what is complete.

A process takes its share's lock, and gives it back, only while it has the common lock: nobody begins or ends at the
same time as another. docs/explanation/design.md has the states; tests/reshard/test_interleavings.py tries all orders of
the steps of this code, so a call that is added here may need its model there (``model_disk.py``).

An empty file, named ``PUBLISHED`` and the task, stays in an output if a process may come late: it tells that process
that nothing is left to do.

Guarantees: POSIX rename is atomic. What a later run keeps, ``journal.py`` says. Published output survives a power loss
only with ``fsync``.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from formats.errors import CheckpointError, MismatchError, ReshardError
from formats.files.checksum import Stamp
from reshard.publishing.existing import Existing, existing_in
from reshard.publishing.journal import LOCK, WHOLE, FileShare, Finished, Journals, Moved, is_locked
from reshard.store.staging_names import (
    COMMON,
    PUBLISHED,
    STATE,
    TASK,
    check_staging,
    clear_leftovers,
    document_of,
    is_folder,
    is_there,
    lock,
    markers,
    not_begun,
    open_new,
    remove_state,
    remove_tree,
    staging_of,
    task_name,
)
from reshard.system import check_space, disk_errors

Check = Callable[[Existing], None]
Documents = Callable[[], Mapping[str, bytes]]
"""Makes the small files of an output, the manifest last, once no other process changes the output."""

_REPLACED = f"{STATE}replaced-"
_ENDED = "ended"
"""What the lock of a share says when its process has done all it had to do."""
PATIENCE = 2.0
"""Seconds to wait for a lock: the processes of a killed run hold it until they have ended."""


class PublishedError(ReshardError):
    """The output is already there: other processes have finished this one's task."""


class Staging:
    """The folder in which one output is built. A context manager: this share's lock is held inside it.

    After a MismatchError inside it, what was built is removed.

    ``task`` is a JSON document that describes the output, with the ``command``: a run uses the finished files of an
    earlier run with an equal task. ``share`` are the files that this run writes, ``inputs`` the states of the files
    that it reads. ``check`` raises an error if this output may not replace what is at its place.
    """

    def __init__(
        self,
        out: Path,
        task: Mapping[str, Any],
        share: FileShare,
        inputs: Sequence[Stamp] = (),
        *,
        fsync: bool = False,
        overwrite: bool = False,
        check: Check = lambda _: None,
    ) -> None:
        self.out, self.share, self._fsync, self._overwrite, self._check = out, share, fsync, overwrite, check
        self.shown = str(out)
        """What messages call the output."""
        self.work = staging_of(out)
        self._journals = Journals(self.work, tuple(inputs), frozenset(share.planned))
        self._name = task_name(task)
        # The name has the digest, and the file is empty: to remove a file with content takes 0.2 s on a busy disk.
        self._task = self.work / f"{TASK}{self._name}"
        self._lock_of_share: IO[str] | None = None
        """The lock of this share, while it is held."""
        self._common: IO[str] | None = None
        """The lock that each process takes to begin and to end, while it is held."""
        self._journal: IO[str] | None = None
        self._may_hold_others = share.has_others
        """Whether other processes build their files in this folder."""
        self._is_last = False
        """Whether this process has taken over what the others have finished."""
        self.finished: dict[str, Finished] = {}

    def __enter__(self) -> Staging:
        try:
            with disk_errors(self.work):
                self._enter()
                self._begin()
        except BaseException as error:
            self._end(error)
            raise
        return self

    def __exit__(self, *exception: object) -> None:
        self._end(exception[1])

    def _enter(self) -> None:
        """Lock this share, if what is there may be replaced or continued."""
        give_up = time.monotonic() + PATIENCE
        while True:
            self._hold()
            self._lock_of_share = lock(self.work / f"{LOCK}{self.share.label}", wait=False)
            if self._lock_of_share is not None:
                break
            self._release()
            if time.monotonic() > give_up:
                raise self._busy(self.share.label, "wait for it, or stop it")
            time.sleep(0.01)
        self._restore_replaced()
        self.check()
        self._adopt_or_clear()
        # opened again and closed: over NFS, others see then what is in it
        Path(self._lock_of_share.name).write_text(json.dumps({"task": self._name} | self.share.to_document()))
        self._release()

    def _end(self, error: object) -> None:
        """Unlock this share; before that, remove what cannot be trusted, and a folder that nobody needs."""
        try:
            if self._lock_of_share is not None and is_there(self._lock_of_share):
                with disk_errors(self.work):
                    self._hold()
                    if isinstance(error, MismatchError):
                        self._clear()
                    if error is None and not self.share.folders:  # others have yet to write their files
                        Path(self._lock_of_share.name).write_text(_ENDED)
                    elif not self._is_built() and not any(self._other_processes()):
                        remove_tree(self.work)
        finally:
            self._release(self._journal, self._lock_of_share)
            self._journal = self._lock_of_share = None

    # -- what is there already

    def check(self) -> None:
        """Raise CheckpointError if what is there may not be replaced, or if the disk has no room for the output.

        Raises PublishedError if other processes have finished this task. Changes nothing.
        """
        self._check_existing(existing_in(self.out))
        needed = sum(self.share.planned.values())
        for name in (name for planned in self.share.planned for name in (planned, f"{planned}.incomplete")):
            with contextlib.suppress(FileNotFoundError):  # others may remove what is built
                needed -= (self.work / name).lstat().st_blocks * 512
        check_space(self.out.parent, needed)

    def _check_existing(self, existing: Existing) -> None:
        is_part = self.share.label != WHOLE and not self.share.folders
        if is_part and not self._overwrite and existing.is_published(self._name):
            raise PublishedError(f"{self.shown} is complete")
        self._check(existing)

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
        """Rename back what a killed run had moved aside."""
        for unit in ("", *self.share.folders):
            place = self.out / unit
            if self._aside(unit).exists() and not place.exists() and place.parent.is_dir():
                self._aside(unit).rename(place)

    def _aside(self, unit: str) -> Path:
        """Where a rank, or the output (``""``), is while it is replaced."""
        return self.work / f"{_REPLACED}{unit or WHOLE}"

    def _top(self) -> list[Path]:
        return [entry for entry in self.work.iterdir() if not entry.name.startswith(STATE)]

    def _is_built(self) -> bool:
        """Whether the folder has a file of the output, finished or not."""
        return any(not is_folder(path) for entry in self._top() for path in (entry, *entry.rglob("*")))

    # -- locks

    def _hold(self) -> None:
        """Take the common lock, unless this process has it; the folder is made if it is not there."""
        while self._common is None:
            self._claim()
            with contextlib.suppress(FileNotFoundError):  # another process has just removed the folder
                self._common = lock(self.work / COMMON, wait=True)

    def _release(self, *files: IO[str] | None) -> None:
        """Unlock the common lock, after other files."""
        for file in (*files, self._common):
            if file is not None:
                file.close()
        self._common = None

    def _other_processes(self) -> Iterator[tuple[str, Mapping[str, Any]]]:
        """The labels of the shares that other runs are writing, and what their locks say of them."""
        for path in self.work.glob(f"{LOCK}*"):
            label = path.name.removeprefix(LOCK)
            if label != self.share.label and is_locked(path):
                yield label, document_of(path.read_bytes())

    def _busy(self, label: str, hint: str) -> CheckpointError:
        what = self.shown if label == WHOLE else f"{label} of {self.shown}"
        return CheckpointError(f"another run is writing {what}", hint)

    def _written_else(self) -> CheckpointError:
        return CheckpointError(
            f"another run is writing something else to {self.shown}", "wait for it, or choose another place"
        )

    # -- resuming an earlier run

    def _adopt_or_clear(self) -> None:
        """Keep the files of an equal task; remove those of another task.

        Raises CheckpointError if another run writes another task here, or files of this share, or if there are files of
        another task and several processes write this one: they would be of two commands.
        """
        for label, share in self._other_processes():
            if share.get("task") != self._name:
                raise self._written_else()
            if WHOLE in (label, self.share.label) or not self.share.goes_with(share):
                raise self._busy(label, "wait for it, or stop it")
        if self._task.exists():
            for entry in (p for root in self._top() for p in (root, *root.rglob("*")) if p.is_symlink()):
                entry.unlink()  # reshard makes no links, and must not write through one
            return
        if self._may_hold_others and self._is_built():
            raise self._begun_by_others(str(self.work))
        for entry in (*self._top(), *self._journals.all(), *self.work.glob(f"{PUBLISHED}*")):
            remove_tree(entry)
        self._task.touch()
        for marker in markers(self.work):
            if marker != self._task:
                marker.unlink()

    def _begun_by_others(self, place: str) -> CheckpointError:
        return CheckpointError(
            f"{place} holds the unfinished output of another command, which one of several processes does not remove",
            "give all processes the same command, or remove what is there",
        )

    def _begin(self) -> None:
        """Keep this share's files that earlier runs have finished, and go on with the journal."""
        self.finished |= self._journals.finished_files(self.share.files)
        self._journal = self._journals.begin(self.share.label, len(self.share.files))
        for name, finished in self.finished.items():
            self._journals.note(self._journal, name, finished)
        self._journal.flush()

    def _clear(self) -> None:
        """Remove what was built, because it cannot be trusted: this share, or all if it is the last of them."""
        if (self._is_last or not self.share.has_others) and not any(self._other_processes()):
            cleared = [*self._top(), *self._journals.all()]
        else:
            names = (self._journals.path(self.share.label).name, *self.share.files, *self.share.folders)
            cleared = [self.work / name for name in names]
        for path in cleared:
            remove_tree(path)

    # -- writing

    def batches(self, files: Iterable[tuple[str, int]]) -> Iterator[frozenset[str]]:
        """Which files (given by name and size, in order) are written together: all files of this process."""
        yield self.share.files.intersection(name for name, _ in files)

    def path(self, name: str) -> Path:
        """The path at which a file of the output is built; makes its folder."""
        path = self.work / name
        path.parent.mkdir(parents=True, exist_ok=True)
        return path

    def note_finished(self, name: str, finished: Finished) -> None:
        """Add a completed file to the journal."""
        assert self._journal is not None
        self.finished[name] = finished
        with disk_errors(self.work):
            self._journals.note(self._journal, name, finished)
            self._journal.flush()

    def note_moved(self, moved: Moved) -> None:
        """Add complete steps to the journal."""
        assert self._journal is not None
        with disk_errors(self.work):
            self._journals.note_moved(self._journal, moved)
            self._journal.flush()

    def moved(self, files: Collection[str]) -> Iterator[Moved]:
        """What earlier runs have written of unfinished files, as far as these still have it."""
        return self._journals.moved(files)

    # -- publishing

    def is_last(self) -> bool:
        """Whether all planned files are finished and no other process is at work: then this process commits.

        If several processes write one unit, ``finished`` then has the files of all, and none begins until this process
        has left.
        """
        planned = self.share.planned.keys()
        if self.share.label == WHOLE or self.share.folders:
            return planned <= self.finished.keys()
        self._hold()
        self.finished |= self._journals.finished_files(planned - self.share.files, is_last=True)
        self._is_last = planned <= self.finished.keys() and not any(self._other_processes())
        return self._is_last

    def commit(self, documents: Documents) -> None:
        """Put what was built, and the documents of the output, under their final names.

        If the process is killed here, the final name of a unit is that of the old unit, of the new one, or of nothing.
        In the last case both are in the staging folder, and the next run with the same output renames the old one back.
        """
        with disk_errors(self.out):
            self._hold()
            if self.share.folders:
                self._commit_folders(documents())
            else:
                self._commit_all(documents())

    def _commit_all(self, documents: Mapping[str, bytes]) -> None:
        for name, content in documents.items():
            self._write(self.work / name, content)
        mark, is_kept = f"{PUBLISHED}{self._name}", self._may_come_late()
        if is_kept or self.share.label != WHOLE:
            (self.work / mark).touch()
        self._move("")
        remove_state(self.out, None if is_kept else mark)
        self._sync(self.out.parent)

    def _may_come_late(self) -> bool:
        """Whether a part has not begun, or its process was killed: it finds the output complete when it comes."""
        states = {path.name.removeprefix(LOCK): path.read_text() for path in self.work.glob(f"{LOCK}*")}
        states[self.share.label] = _ENDED
        return {*states.values()} != {_ENDED} or bool(not_begun(states))

    def _commit_folders(self, documents: Mapping[str, bytes]) -> None:
        self.out.mkdir(exist_ok=True)
        self._sync(self.out.parent)
        inside = {name for name in documents if name.partition("/")[0] in self.share.folders}
        for name in inside:
            self._write(self.work / name, documents[name])
        for folder in self.share.folders:
            self._move(folder)
            self._sync(self.out)
        for folder in self.share.folders:
            remove_tree(self._aside(folder))
        for name in (name for name in documents if name not in inside):
            self._write(self.out / name, documents[name])

    def _move(self, unit: str) -> None:
        """Rename a unit to its final name; an older one is moved aside, if it may be replaced."""
        target, built = self.out / unit, self.work / unit
        if self._fsync:
            for folder, _, _ in os.walk(built):
                self._sync(Path(folder))
        if target.exists() and any(target.iterdir()):
            if not unit and not self._overwrite:
                raise _appeared(self.out)
            if not unit:
                clear_leftovers(target, wait=True)  # the run that has published it may not have ended
            remove_tree(self._aside(unit))
            target.rename(self._aside(unit))
        try:
            built.rename(target)
        except OSError as error:
            if error.errno in {errno.ENOTEMPTY, errno.EEXIST}:
                raise _appeared(self.out) from error
            raise

    def _write(self, path: Path, content: bytes) -> None:
        """Write a small file at once, or not at all."""
        path.parent.mkdir(parents=True, exist_ok=True)
        new = path.with_name(f"{STATE}incomplete")  # a suffix could make the name too long
        with open_new(new, "wb") as file:
            file.write(content)
        self._sync(new)
        new.replace(path)
        self._sync(path.parent)

    def _sync(self, path: Path) -> None:
        if not self._fsync:
            return
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _appeared(out: Path) -> CheckpointError:
    return CheckpointError(
        f"{out} appeared while it was being built", "move it away or pass --overwrite, and run the same command again"
    )
