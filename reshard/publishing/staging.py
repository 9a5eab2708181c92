"""Builds an output beside its place, and commits it when it is complete: staging folder, journals, renames.

The staging folder ``OUT.partial`` has:

- the output, in a folder of its own;
- a journal for each share of the files (``journal.py``), which is also the lock of the share;
- the common lock;
- an older output, or an older rank, that is being replaced.

A folder ``OUT.partial`` without a journal was not made by reshard, and is refused.

A process writes a *share* of the files. Several may write at the same time if they have the same task, and no file in
common. It does not matter which process has written a file: any later run takes it. One rename commits a *unit*: all of
``OUT``, when each file is finished and is in a share that has ended, and no process is at work; or the folder of a rank
(``--rank``), when its process has finished it. The manifest comes last, and lists what is complete.

A process locks its share, and unlocks it, only while it has the common lock: nobody begins or ends at the same time as
another. docs/explanation/design.md has the states; tests/publishing/test_interleavings.py tries all orders of the steps
of this code, so a call that is added here may need its model there (``model_disk.py``).

Guarantees: POSIX rename is atomic. What a later run keeps, ``journal.py`` says. Published output survives a power loss
only with ``fsync``.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import platform
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from reshard.formats.documents import Record, document_of, items, reader_of, structure
from reshard.formats.errors import CheckpointError, MismatchError, ReshardError
from reshard.formats.files.checksum import Stamp, file_checksum
from reshard.publishing.existing import Existing, existing_in
from reshard.publishing.journal import journals_in, read_journal, runs_in
from reshard.publishing.locks import check_staging, is_folder, is_there, lock, open_new, remove_tree
from reshard.publishing.records import WHOLE, FileShare, Finished, Moved, Read, ShareRun, finished_entry, read_finished
from reshard.store.staging_names import BUILT, COMMON, JOURNAL, STATE, journal_line, staging_of, task_name
from reshard.system import boot_id, check_space, disk_errors

Check = Callable[[Existing], None]
MakeDocuments = Callable[[], Mapping[str, bytes]]
"""Makes the small files of an output, the manifest last, once no other process changes the output."""

_REPLACED = f"{STATE}replaced-"
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
        """The output's name in messages."""
        self.work = staging_of(out)
        self._built = self.work / BUILT
        self._name = task_name(task)
        self._inputs = tuple(inputs)
        self._journal_of_share = self.work / f"{JOURNAL}{share.label}"
        self._journal: IO[str] | None = None
        """The journal of this share, while it is locked."""
        self._common: IO[str] | None = None
        """The lock that each process takes to begin and to end, while it is held."""
        self._first_line = ""
        """The line with which this run began in the journal."""
        self._may_hold_others = share.has_others
        """Whether other processes build their files in this folder."""
        self._is_last = False
        """Whether all files are finished, by whichever process, so that this process commits the output."""
        self.finished: dict[str, Finished] = {}
        self._numbers: dict[Read, int] = {}
        """The journal's numbers for reads that several files share."""

    def __enter__(self) -> Staging:
        try:
            with disk_errors(self.work):
                self._lock_share()
                self._begin()
        except BaseException as error:
            self._end(error)
            raise
        return self

    def __exit__(self, *exception: object) -> None:
        self._end(exception[1])

    def _lock_share(self) -> None:
        """Lock this share, if what is there may be replaced or continued."""
        give_up = time.monotonic() + PATIENCE
        while True:
            self._hold()
            self._journal = lock(self._journal_of_share, wait=False)
            if self._journal is not None:
                break
            self._release()
            if time.monotonic() > give_up:
                raise self._busy(self.share.label, "wait for it, or stop it")
            time.sleep(0.01)
        for unit in ("", *self.share.folders):  # what a killed run had moved aside
            place = self.out / unit
            if self._aside(unit).exists() and not place.exists() and place.parent.is_dir():
                self._aside(unit).rename(place)
        self.check()
        self._adopt_or_clear()
        self._built.mkdir(exist_ok=True)
        begin = {
            "task": self._name, "inputs": document_of(self._inputs), "folders": bool(self.share.folders),
            "files": sorted(self.share.files), "planned": sorted(self.share.planned),
            "boot": boot_id(), "host": platform.node(),
        }  # fmt: skip
        self._first_line = journal_line(begin)
        with open_new(self._journal_of_share, "a") as journal:  # it is closed: over NFS, others see it from now on
            journal.write("\n" + self._first_line)  # the last line of a run that was killed may not have ended
        self._release()

    def _end(self, error: object) -> None:
        """Unlock this share; before that, remove what cannot be trusted, and a folder that nobody needs."""
        try:
            if self._journal is not None and is_there(self._journal):
                with disk_errors(self.work):
                    self._hold()
                    if isinstance(error, MismatchError):
                        self._clear()
                    if error is None and not (self._is_last or self.share.folders):  # others have yet to end
                        self._journal.write(journal_line({"ended": True}, self._first_line))
                    elif not self._is_built() and not any(run.is_at_work for run in self._runs()):
                        remove_tree(self.work)
        finally:
            self._release(self._journal)
            self._journal = None

    # -- what is there already

    def check(self) -> None:
        """Raise CheckpointError if what is there may not be replaced, or if the disk has no room for the output.

        Changes nothing.
        """
        self._check(existing_in(self.out))
        needed = sum(self.share.planned.values())
        for name in (name for planned in self.share.planned for name in (planned, f"{planned}.incomplete")):
            with contextlib.suppress(FileNotFoundError):  # others may remove what is built
                needed -= (self._built / name).lstat().st_blocks * 512
        check_space(self.out.parent, needed)

    # -- the folder

    def _aside(self, unit: str) -> Path:
        """Return the place of a rank, or of the output (``""``), while it is replaced."""
        return self.work / f"{_REPLACED}{unit or WHOLE}"

    def _is_built(self) -> bool:
        """Whether the folder has files of the output, finished or not."""
        return any(not is_folder(path) for path in self._built.rglob("*"))

    # -- locks

    def _hold(self) -> None:
        """Take the common lock, unless this process has it; the folder is made if it is not there."""
        while self._common is None:
            try:
                self.work.mkdir()
                is_new = True
            except FileExistsError:
                is_new = False
            with contextlib.suppress(FileNotFoundError):  # another process has just removed the folder
                if not is_new:
                    check_staging(self.out)
                self._common = lock(self.work / COMMON, wait=True)

    def _release(self, *files: IO[str] | None) -> None:
        """Unlock the common lock, after other files."""
        for file in (*files, self._common):
            if file is not None:
                file.close()
        self._common = None

    def _runs(self) -> list[ShareRun]:
        """The last run of each share; of those at work, other processes'."""
        return [*runs_in(self.work, self.share.label)]

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
        runs = [run for run in self._runs() if run.begin]
        for run in (run for run in runs if run.is_at_work):
            if run.begin.get("task") != self._name:
                raise self._written_else()
            if not self.share.goes_with(run):
                raise self._busy(run.label, "wait for it, or stop it")
        if all(run.begin.get("task") == self._name for run in runs):
            known = {self._built / f"{name}{end}" for name in self.share.planned for end in ("", ".incomplete")}
            units = tuple(f"{self._built / unit}/" for unit in self.share.folders or ("",))
            for entry in (self._built, *self._built.rglob("*")):
                is_own = entry not in known and str(entry).startswith(units)
                # reshard makes no links, and must not write through one; a file is of a task whose journal was damaged
                if entry.is_symlink() or (is_own and entry.is_file()):
                    entry.unlink()
            return
        if self._may_hold_others and self._is_built():
            raise self._begun_by_others(str(self.work))
        others = [path for path in journals_in(self.work) if path != self._journal_of_share]
        for entry in (self._built, *others):
            remove_tree(entry)

    def _begun_by_others(self, place: str) -> CheckpointError:
        return CheckpointError(
            f"{place} holds the unfinished output of another command, which one of several processes does not remove",
            "give all processes the same command, or remove what is there",
        )

    def _begin(self) -> None:
        """Keep this share's files that earlier runs have finished, and go on with the journal."""
        self.finished |= self._finished_files(self.share.files)
        self._note(*map(self._entry, self.finished))

    def _finished_files(self, names: Collection[str], *, is_last: bool = False) -> Iterator[tuple[str, Finished]]:
        """Yield those of the files ``names`` that were finished by runs with the same inputs and plan, and are
        unchanged.

        A file that was written before a restart of this machine must have its checksum. A restart of another machine
        cannot be seen: a process that ``is_last`` and writes none of these files trusts that machine's journal.
        """
        numbered, of = dict[int, Read](), None
        for begin, entry in self._earlier("name"):
            with contextlib.suppress(ValueError, KeyError, TypeError, AttributeError):
                numbered, of = (numbered if begin is of else {}), begin
                finished = read_finished(entry, numbered)
                if entry["name"] in names:
                    is_safe = begin["boot"] == boot_id() is not None or (is_last and begin["host"] != platform.node())
                    file = self._built / entry["name"]
                    is_untouched = file.is_file() and not file.is_symlink() and _state(file) == entry["state"]
                    if is_untouched and (is_safe or (finished.checksum and file_checksum(file) == finished.checksum)):
                        yield entry["name"], finished

    def moved(self, files: Collection[str]) -> Iterator[Moved]:
        """Yield the written ranges of unfinished files, from runs with the same inputs and plan. Journals are read on
        demand.
        """
        for _, entry in self._earlier("steps"):
            with contextlib.suppress(ValueError, KeyError, TypeError, AttributeError):
                if not entry["written"].keys().isdisjoint(files):
                    yield structure(Moved, Record(entry, ""))

    def _earlier(self, kind: str) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
        """Yield the entries of this kind by runs with the same inputs and plan, each with the line that its run began
        with.
        """
        for path in journals_in(self.work):
            for begin, entries in itertools.groupby(read_journal(path, kind), key=lambda each: each[0]):
                with contextlib.suppress(ValueError, KeyError, TypeError, AttributeError):
                    inputs = zip(items(reader_of(Stamp))(begin["inputs"], ""), self._inputs, strict=True)
                    are_same = all(  # what another machine saw, as far as can be told
                        one.closed_state == other.closed_state or (one.host != other.host and one.is_same(other))
                        for one, other in inputs
                    )
                    if are_same and (begin["task"], {*begin["planned"]}) == (self._name, {*self.share.planned}):
                        yield from entries

    def _entry(self, name: str) -> dict[str, Any]:
        """Return the journal's entry for a finished file."""
        entry = finished_entry(self.finished[name], self._numbers)
        return {"name": name, **entry, "state": _state(self._built / name)}

    def _note(self, *entries: Mapping[str, Any]) -> None:
        """Add lines to the journal."""
        assert self._journal is not None
        with disk_errors(self.work):
            self._journal.write("".join(journal_line(entry, self._first_line) for entry in entries))
            self._journal.flush()

    def _clear(self) -> None:
        """Remove what was built, because it cannot be trusted: this share, or all if it is the last of them."""
        if (self._is_last or not self.share.has_others) and not any(run.is_at_work for run in self._runs()):
            cleared = [self._built, *journals_in(self.work)]
        else:
            names = (*self.share.files, *self.share.folders)
            cleared = [*(self._built / name for name in names), self._journal_of_share]
        for path in cleared:
            remove_tree(path)

    # -- writing

    def batches(self, files: Iterable[tuple[str, int]]) -> Iterator[frozenset[str]]:
        """Yield the sets of files that are written together, given (name, size) in order: one set, all files of this
        process.
        """
        yield self.share.files.intersection(name for name, _ in files)

    def path(self, name: str) -> Path:
        """The path at which a file of the output is built; makes its folder."""
        path = self._built / name
        path.parent.mkdir(parents=True, exist_ok=True)
        return path

    def note_finished(self, name: str, finished: Finished) -> None:
        """Add a completed file to the journal."""
        self.finished[name] = finished
        self._note(self._entry(name))

    def note_moved(self, moved: Moved) -> None:
        """Add complete steps to the journal."""
        self._note(document_of(moved))

    # -- publishing

    def is_last(self) -> bool:
        """Return whether all planned files are finished, and all their writers have ended: then this process commits.

        If several processes write one unit, ``finished`` then has the files of all, and no process may begin until this
        one has left. A process that was killed after its last file has not ended: it would start again, and find the
        output there.
        """
        planned = self.share.planned.keys()
        if self.share.folders:
            return planned <= self.finished.keys()
        left, is_alone = planned - self.share.files, True
        if left or self.share.has_others:
            self._hold()
            self.finished |= self._finished_files(left, is_last=True)
            runs = self._runs()
            is_alone = not any(run.is_at_work for run in runs)
            left = left.difference(*(run.begin["files"] for run in runs if run.has_ended))
        self._is_last = is_alone and not left and planned <= self.finished.keys()
        return self._is_last

    def commit(self, documents: MakeDocuments) -> None:
        """Put what was built, and the documents of the output, under their final names.

        If the process is killed here, the final name of a unit is that of the old unit, of the new one, or of nothing.
        In the last case both are in the staging folder, and the next run with the same output renames the old one back.
        """
        with disk_errors(self.out):
            self._hold()
            units, files = self.share.folders or ("",), documents()
            beside = [name for name in files if self.share.folders and name.partition("/")[0] not in units]
            for name in (name for name in files if name not in beside):
                self._write(self._built / name, files[name])
            if self.share.folders:
                self.out.mkdir(exist_ok=True)
                self._sync(self.out.parent)
            for unit in units:
                self._move(unit)
                self._sync((self.out / unit).parent)
            for folder in self.share.folders:
                remove_tree(self._aside(folder))
            for name in beside:  # the manifest last
                self._write(self.out / name, files[name])

    def _move(self, unit: str) -> None:
        """Rename a unit to its final name; an older one is moved aside, if it may be replaced."""
        target, built = self.out / unit, self._built / unit
        if self._fsync:
            for folder, _, _ in os.walk(built):
                self._sync(Path(folder))
        if target.exists() and any(target.iterdir()):
            if not unit and not self._overwrite:
                raise _appeared(self.out)
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


def _state(path: Path) -> list[int]:
    status = path.stat()
    return [status.st_size, status.st_mtime_ns, status.st_ino]


def _appeared(out: Path) -> CheckpointError:
    return CheckpointError(
        f"{out} appeared while it was being built", "move it away or pass --overwrite, and run the same command again"
    )
