"""A disk in memory, on which the real code of ``Staging`` is run one step at a time.

A step is a call of the operating system. A process is deterministic: where it is follows from the answers that it got.
So a process is the tuple of its answers, and its next step is found by running its code again with these answers. The
first call beyond them is done on the disk; the next one ends the run (``_Paused``).
"""

from __future__ import annotations

import errno
import fcntl
import io
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property
from typing import Any

import pytest

from reshard.formats.errors import ReshardError
from reshard.publishing import locks, staging
from reshard.publishing.existing import Existing
from reshard.store import staging_names

OUT = "out"
WORK = f"{OUT}{staging_names.SUFFIX}"
Answers = tuple[Any, ...]
Opened = tuple[int, str]
"""A process, and the name by which it has opened a file."""


class _Paused(BaseException):
    """Ends a run that has made its step. No later call of it has an effect, as after a kill."""


class _Blocked(BaseException):
    """The step is to wait for a lock that another process has."""


@dataclass
class Disk:
    """Names and the numbers of what they are; what each number holds (None: a folder); open files and their locks."""

    names: dict[str, int] = field(default_factory=dict)
    held: dict[int, str | None] = field(default_factory=dict)
    opened: dict[Opened, tuple[int, int]] = field(default_factory=dict)
    """What was opened, and ``flock``'s flag of its lock or 0."""

    def copy(self) -> Disk:
        return Disk(dict(self.names), dict(self.held), dict(self.opened))

    @cached_property
    def key(self) -> object:
        """Equal for disks that no process can tell apart."""
        numbers: dict[int, int] = {}
        for number in [self.names[name] for name in sorted(self.names)]:
            numbers.setdefault(number, len(numbers))
        for _, (number, _) in sorted(self.opened.items()):
            numbers.setdefault(number, len(numbers))
        names = tuple((name, numbers[number], self.held[number]) for name, number in sorted(self.names.items()))
        opened = tuple((who, numbers[number], lock) for who, (number, lock) in sorted(self.opened.items()))
        return names, opened

    def without(self, process: int) -> Disk:
        """What the operating system makes of it when a process is gone."""
        opened = {who: of for who, of in self.opened.items() if who[0] != process}
        return Disk(dict(self.names), dict(self.held), opened)

    def below(self, folder: str) -> list[str]:
        return sorted(name for name in self.names if name.startswith(f"{folder}/"))

    def files(self, folder: str) -> dict[str, str]:
        """The files below a folder, by relative name."""
        found = ((name, self.held[self.names[name]]) for name in self.below(folder))
        return {name.removeprefix(f"{folder}/"): content for name, content in found if content is not None}

    # -- the steps; each returns its answer or raises OSError

    def kind(self, name: str) -> str | None:
        return None if name not in self.names else "folder" if self.held[self.names[name]] is None else "file"

    def mkdir(self, name: str) -> None:
        self._check(name not in self.names, errno.EEXIST)
        self._make(name, None)

    def list(self, name: str) -> tuple[str, ...]:
        self._check(name in self.names, errno.ENOENT)
        return tuple(each for each in self.below(name) if "/" not in each[len(name) + 1 :])

    def tree(self, name: str) -> tuple[tuple[str, str | None], ...]:
        return tuple((each, self.held[self.names[each]]) for each in self.below(name))

    def read(self, name: str) -> str:
        self._check(name in self.names, errno.ENOENT)
        return self.held[self.names[name]] or ""

    def write(self, name: str, content: str) -> None:
        if name not in self.names:
            self._make(name, content)
        self.held[self.names[name]] = content

    def unlink(self, name: str) -> None:
        self._check(name in self.names, errno.ENOENT)
        self._check(self.held[self.names[name]] is not None, errno.EISDIR)
        del self.names[name]

    def rmdir(self, name: str) -> None:
        self._check(name in self.names, errno.ENOENT)
        self._check(not self.below(name), errno.ENOTEMPTY)
        del self.names[name]

    def rmtree(self, name: str) -> None:
        for each in [*self.below(name), name]:
            self.names.pop(each, None)

    def rename(self, name: str, new: str) -> None:
        self._check(name in self.names, errno.ENOENT)
        self._check(not self.below(new), errno.ENOTEMPTY)
        for each in [name, *self.below(name)]:
            self.names[new + each.removeprefix(name)] = self.names.pop(each)

    def open(self, who: Opened, name: str, mode: str) -> None:
        if mode in ("a", "wb") and name not in self.names:
            self._make(name, "")
        self._check(name in self.names, errno.ENOENT)
        self.opened[who] = number, _ = self.names[name], 0
        if mode == "wb":
            self.held[number] = ""

    def append(self, who: Opened, content: str) -> None:
        number = self.opened[who][0]
        self.held[number] = (self.held[number] or "") + content

    def is_there(self, who: Opened, name: str) -> bool:
        return self.names.get(name) == self.opened[who][0]

    def flock(self, who: Opened, flags: int) -> bool:
        number, flag = self.opened[who][0], flags & ~fcntl.LOCK_NB
        locks = [lock for other, (of, lock) in self.opened.items() if of == number and other != who and lock]
        if fcntl.LOCK_EX in locks or (locks and flag == fcntl.LOCK_EX):
            if flags & fcntl.LOCK_NB:
                raise BlockingIOError(errno.EWOULDBLOCK, "")
            raise _Blocked
        self.opened[who] = number, flag
        return True

    def close(self, who: Opened) -> None:
        del self.opened[who]

    def _make(self, name: str, content: str | None) -> None:
        folder = name.rpartition("/")[0]
        self._check(not folder or self.kind(folder) == "folder", errno.ENOENT)
        self.names[name] = number = max(self.held, default=0) + 1
        self.held[number] = content

    @staticmethod
    def _check(holds: bool, error: int) -> None:
        if not holds:
            raise OSError(error, os.strerror(error))


INTERRUPT = "Ctrl-C"
"""An answer: the call was not made, because Ctrl-C came first."""


class Detail(Enum):
    """What is a step: all calls; not the reads under the common lock; or only what others may notice, without reads and
    without the files that belong to the process alone.
    """

    ALL, UNDISTURBED, NOTICED = range(3)


READS = {"kind", "list", "tree", "read"}


class Run:
    """A process that has got some answers: makes its next step on a disk, and those reads that nobody can disturb."""

    current: Run

    def __init__(self, process: int, answers: Answers, disk: Disk, detail: Detail = Detail.UNDISTURBED) -> None:
        self.process, self.answers, self.disk, self._detail = process, list(answers), disk, detail
        self._at, self.has_common, self._has_stepped, self._since, self._where = 0, False, False, 0, ""
        self.staging: staging.Staging | None = None
        self.handles = set[str]()
        """The names, each for one opening, of the files that it has open."""
        self.place: object = ()
        self.is_blocked = False
        """Whether the step is to wait for a lock that another process has."""

    def _is_step(self, name: str, of: str | Opened) -> bool:
        """Whether the step before ends before this call."""
        if self._detail is Detail.ALL:
            return True
        if name in READS:
            return self._detail is Detail.UNDISTURBED and not self.has_common
        path = of if isinstance(of, str) else of[1]
        return self._detail is Detail.UNDISTURBED or self.has_common or path in (WORK, f"{WORK}/{staging_names.COMMON}")

    def _place(self) -> object:
        """Where the process is, for what it does next: what its Staging knows, and the answers since it has changed.

        What it saw before it tried to take the common lock, or before it got it, is in no variable any more.
        """
        of, known = self.staging, None
        if of is not None:
            known = of._journal is not None, of._is_last, tuple(sorted(of.finished))
        return known, INTERRUPT in self.answers, self._where, tuple(self.answers[self._since :])

    def arrive(self, where: str) -> None:
        """What was answered so far makes no difference from here on."""
        if self._at >= 0:
            self._since, self._where = self._at, where

    def step(self, code: Callable[[], bool]) -> str | None:
        """What has come of the process: None while it goes on, else its result or error."""
        Run.current = self
        try:
            return "committed" if code() else "done"
        except _Paused:
            return None
        except (ReshardError, KeyboardInterrupt) as error:
            return f"{type(error).__name__} {error}".strip()

    def call(self, name: str, *arguments: Any) -> Any:
        if self._at == len(self.answers):
            if self._has_stepped and self._is_step(name, arguments[0]):
                self.place = self._place()
                self._at = -1  # from now on, nothing has an effect
                raise _Paused
            self._has_stepped = True
            try:
                self.answers.append(getattr(self.disk, name)(*arguments))
            except _Blocked:
                self.is_blocked, self._at = True, -1
                raise _Paused from None
            except OSError as error:
                self.answers.append(error.errno)
                self._at += 1
                raise
            self._at += 1
            return self.answers[-1]
        if self._at < 0:
            raise _Paused
        answer = self.answers[self._at]
        self._at += 1
        if isinstance(answer, str) and answer == INTERRUPT:
            raise KeyboardInterrupt
        if type(answer) is int:
            raise OSError(answer, os.strerror(answer))
        return answer


def _call(name: str, *arguments: Any) -> Any:
    return Run.current.call(name, *arguments)


class File:
    """An open file."""

    def __init__(self, name: Name, mode: str) -> None:
        self.run = Run.current
        self.name, self._text = name, ""
        self._handle = next(each for each in (str(name), f"{name}, again") if each not in self.run.handles)
        self._who = self.run.process, self._handle
        _call("open", self._who, str(name), mode)
        self.run.handles.add(self._handle)

    def flock(self, flags: int) -> None:
        _call("flock", self._who, flags)

    def is_there(self) -> bool:
        there = _call("is_there", self._who, str(self.name))
        if there and self.name.name == staging_names.COMMON:
            self.run.has_common = True
            self.run.arrive("held")
        return bool(there)

    def write(self, content: str | bytes) -> None:
        self._text += content if isinstance(content, str) else content.decode()

    def flush(self) -> None:
        if self._text:
            if self.name.name.startswith(staging_names.JOURNAL) and not self.run.has_common:
                self.run.arrive("writing")
            _call("append", self._who, self._text)
            self._text = ""

    def close(self) -> None:
        self.flush()
        self.run.handles.discard(self._handle)
        _call("close", self._who)
        if self.name.name == staging_names.COMMON:
            self.run.has_common = False
            self.run.arrive("released")

    def __enter__(self) -> File:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@dataclass(frozen=True, order=True)
class Name:
    """What stands for a Path."""

    text: str

    def __truediv__(self, other: str) -> Name:
        return Name(f"{self.text}/{other}" if other else self.text)

    def __str__(self) -> str:
        return self.text

    @property
    def name(self) -> str:
        return self.text.rpartition("/")[2]

    @property
    def parent(self) -> Name:
        return Name(self.text.rpartition("/")[0])

    def with_name(self, name: str) -> Name:
        return self.parent / name if "/" in self.text else Name(name)

    def exists(self) -> bool:
        return self.text == "" or _call("kind", self.text) is not None

    def is_dir(self) -> bool:
        return self.text == "" or bool(_call("kind", self.text) == "folder")

    def is_file(self) -> bool:
        return bool(_call("kind", self.text) == "file")

    def is_symlink(self) -> bool:
        return False

    def iterdir(self) -> Iterator[Name]:
        return map(Name, _call("list", self.text))

    def glob(self, pattern: str) -> list[Name]:
        prefix, _, rest = pattern.partition("*")
        assert not rest
        try:
            return [each for each in self.iterdir() if each.name.startswith(prefix)]
        except FileNotFoundError:
            return []

    def rglob(self, _: str) -> list[Name]:
        return [Name(name) for name, _ in _call("tree", self.text)]

    def mkdir(self, *, parents: bool = False, exist_ok: bool = False) -> None:
        assert self.text
        if not (exist_ok and self.is_dir()):
            if self.text == WORK:
                Run.current.arrive("begin")
            _call("mkdir", self.text)

    def read_text(self) -> str:
        return str(_call("read", self.text))

    def read_bytes(self) -> bytes:
        return self.read_text().encode()

    def write_text(self, content: str) -> None:
        _call("write", self.text, content)

    def touch(self) -> None:
        _call("write", self.text, "")

    def unlink(self, *, missing_ok: bool = False) -> None:
        try:
            _call("unlink", self.text)
        except FileNotFoundError:
            if not missing_ok:
                raise

    def rmdir(self) -> None:
        _call("rmdir", self.text)

    def rename(self, new: Name) -> None:
        _call("rename", self.text, new.text)

    replace = rename

    def stat(self) -> os.stat_result:
        if not self.exists():
            raise FileNotFoundError(self.text)
        return os.stat_result((0,) * 10)

    def lstat(self) -> os.stat_result:
        raise FileNotFoundError(self.text)  # only asked for the size of what is there

    def open(self, mode: str = "r", errors: str = "") -> File | io.StringIO:
        return io.StringIO(self.read_text()) if mode == "r" else File(self, mode)


def existing(out: Name) -> Existing:
    """What is in the output."""
    tree = dict(_call("tree", out.text))
    files = {name.removeprefix(f"{out}/"): content for name, content in tree.items() if content is not None}
    return Existing(str(out), frozenset(files), lambda name: files[name].encode() if name in files else None, True)


def install(patch: pytest.MonkeyPatch) -> None:
    """Have the code that publishes an output run on a disk of this kind."""
    for module in (staging, locks):
        patch.setattr(module, "open_new", File)
    for module in (staging, locks):
        patch.setattr(module, "is_there", File.is_there)
    patch.setattr(staging, "Path", lambda name: name)
    patch.setattr(staging, "existing_in", existing)
    patch.setattr(staging, "check_space", lambda *_: None)
    patch.setattr(staging, "PATIENCE", -1)
    patch.setattr(staging.time, "sleep", lambda _: None)
    patch.setattr(fcntl, "flock", File.flock)
    patch.setattr(shutil, "rmtree", lambda name, **_: _call("rmtree", name.text))
    patch.setattr(os.path, "lexists", lambda name: name.exists())
