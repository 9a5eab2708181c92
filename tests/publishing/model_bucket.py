"""A bucket in memory, on which the real code of ``Uploading`` is run one request at a time.

A step is a request to the store. A process is deterministic: where it is follows from the answers that it got, and its
next step is found by running its code again with these answers. The first request beyond them is made of the store; the
next one ends the run (``_Paused``). Two processes that got other answers and now have equal frames are at one place.

The folder on a machine's own disk, in which files are built, is not modelled: it is ``Staging``'s, and that has a model
of its own. The uploads of one process come one after the other.
"""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Callable, Collection, Iterable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, fields, is_dataclass
from functools import cached_property
from types import CodeType, FrameType, FunctionType, MethodType, SimpleNamespace
from typing import Any

import obstore
import pytest
from obstore.exceptions import AlreadyExistsError

from reshard.formats.errors import ReshardError
from reshard.publishing import upload
from reshard.publishing.records import Finished
from reshard.publishing.staging import Staging
from reshard.publishing.upload import Uploading
from reshard.store import bucket
from reshard.store.bucket import Bucket
from reshard.store.remote import explain

Answers = tuple[Any, ...]


class _Paused(BaseException):
    """Ends a run that has made its step. No later request of it has an effect, as after a kill."""


@dataclass(frozen=True)
class Object:
    """What is stored under a key; equal contents have equal etags, as in S3."""

    content: bytes
    attributes: tuple[tuple[str, str], ...] = ()

    @property
    def etag(self) -> str:
        return f'"{self.content.hex()}"'


@dataclass(frozen=True)
class Store:
    """The objects of a bucket. Each method is a request, and returns its answer and what is there then."""

    objects: Mapping[str, Object]

    @cached_property
    def key(self) -> object:
        """Equal for equal stores."""
        return frozenset(self.objects.items())

    def list(self) -> tuple[Answers, Store]:
        return tuple((key, of.etag) for key, of in sorted(self.objects.items())), self

    def get(self, key: str) -> tuple[Object | None, Store]:
        return self.objects.get(key), self

    head = get

    def put(self, key: str, new: Object, is_new: bool) -> tuple[bool, Store]:
        """The answer is whether it is done. ``is_new``: only if nothing is there."""
        if is_new and key in self.objects:
            return False, self
        return True, Store({**self.objects, key: new})

    def delete(self, key: str) -> tuple[None, Store]:
        return None, Store({name: of for name, of in self.objects.items() if name != key})


class Run:
    """A process that has got some answers: makes its next request of a store."""

    current: Run

    def __init__(self, process: int, answers: Answers, store: Store, quiet: Collection[str] = ()) -> None:
        """``quiet`` requests do not end the step before."""
        self.process, self.answers, self.store, self._quiet = process, list(answers), store, quiet
        self._at, self._has_stepped, self._names = 0, False, 0
        self.place: tuple[Any, ...] = ()

    def step(self, code: Callable[[], bool]) -> str | None:
        """What has come of the process: None while it goes on, else its result or error."""
        Run.current = self
        try:
            return "committed" if code() else "left to others"
        except _Paused:
            return None
        except ReshardError as error:
            return f"{type(error).__name__} {error}"

    def ask(self, name: str, key: str = "", *arguments: Any) -> Any:
        if self._at < 0:
            raise _Paused
        if self._at == len(self.answers):
            if self._has_stepped and name not in self._quiet:
                self.place, self._at = _place(), -1
                raise _Paused
            self._has_stepped = True
            answer, self.store = getattr(self.store, name)(*([key] if key else []), *arguments)
            self.answers.append(answer)
        self._at += 1
        return self.answers[self._at - 1]

    def is_in(self, *functions: str) -> bool:
        """Whether it is in one of these functions."""
        return any(code.co_name in functions for code, *_ in self.place[0])

    def new_name(self, _: int) -> bytes:
        """What no other process will draw."""
        self._names += 1
        return bytes([self.process + 1, self._names])


def _place() -> tuple[Any, ...]:
    """The frames of the process: where each is, and what it knows."""
    frame: FrameType | None = sys._getframe(2)
    frames = list[object]()
    while frame is not None and frame.f_code is not Run.step.__code__:
        known = {name: of for name, of in frame.f_locals.items() if not name.startswith("@")}
        frames.append((frame.f_code, frame.f_lasti, _known(known)))
        frame = frame.f_back
    return tuple(frames), repr(sys.exception())


def _known(value: object) -> Any:
    """A value as far as it makes a difference, hashable."""
    match value:
        case None | bool() | int() | float() | str() | bytes() | CodeType():
            return value
        case Uploading():
            return _known({name: of for name, of in vars(value).items() if name not in _UNCHANGED})
        case Mapping():
            return frozenset((key, _known(of)) for key, of in value.items())
        case set() | frozenset():
            return frozenset(map(_known, value))
        case list() | tuple():
            return tuple(map(_known, value))
        case Future():
            return value.done() and repr(value.exception())
        case MethodType():
            return value.__func__.__code__
        case FunctionType():
            cells = [
                cell.cell_contents for cell in value.__closure__ or () if not inspect.isfunction(cell.cell_contents)
            ]
            return value.__code__, _known(cells)
        case _ if is_dataclass(value) and not isinstance(value, Bucket | type):
            return tuple(_known(getattr(value, field.name)) for field in fields(value))
        case _:
            return type(value)


_UNCHANGED = {
    "out",
    "share",
    "work",
    "shown",
    "_bucket",
    "_built",
    "_check",
    "_inputs",
    "_journal_of_share",
    "_name",
    "_threads",
}


@dataclass(frozen=True)
class File:
    """What stands for the path of a file that is built on this machine."""

    content: bytes

    def stat(self) -> os.stat_result:
        return os.stat_result((0, 0, 0, 0, 0, 0, len(self.content), 0, 0, 0))

    def unlink(self, *, missing_ok: bool = False) -> None:
        pass


class _Threads:
    """Calls are made at once."""

    def __init__(self, _: int) -> None:
        pass

    def submit(self, function: Callable[..., Any], *arguments: Any) -> Future[Any]:
        future: Future[Any] = Future()
        try:
            future.set_result(function(*arguments))
        except Exception as error:
            future.set_exception(error)
        return future

    def map(self, function: Callable[[Any], Any], values: Iterable[Any]) -> list[Any]:
        return [function(value) for value in values]

    def close(self) -> None:
        pass


def _ask(_: Bucket, key: str, request: Callable[[], Any], doing: str = "reading", **__: object) -> Any:
    try:
        return request()
    except FileNotFoundError as error:
        raise explain(error, key, doing) from None


def _meta(key: str, etag: str, size: int = 0) -> dict[str, Any]:
    return {"path": key, "e_tag": etag, "size": size}


def _get(_: object, key: str) -> Any:
    there = Run.current.ask("get", key)
    if there is None:
        raise FileNotFoundError(key)
    attributes = dict(there.attributes)
    return SimpleNamespace(meta=_meta(key, there.etag), bytes=lambda: there.content, attributes=attributes)


def _head(_: object, key: str) -> Any:
    there = Run.current.ask("head", key)
    if there is None:
        raise FileNotFoundError(key)
    return _meta(key, there.etag, len(there.content))


def _put(
    _: object, key: str, content: bytes | File, *, attributes: Mapping[str, str] | None = None, mode: Any = None,
    **__: object,
) -> dict[str, Any]:  # fmt: skip
    new = Object(content.content if isinstance(content, File) else content, tuple((attributes or {}).items()))
    assert mode in (None, "create")
    if not Run.current.ask("put", key, new, mode == "create"):
        raise AlreadyExistsError(key)
    return {"e_tag": new.etag}


def install(patch: pytest.MonkeyPatch) -> None:
    """Have the code that publishes an output in a bucket run on a bucket of this kind, without a disk."""
    patch.setattr(obstore, "get", _get)
    patch.setattr(obstore, "head", _head)
    patch.setattr(obstore, "put", _put)
    patch.setattr(obstore, "delete", lambda _, key: Run.current.ask("delete", key))
    patch.setattr(obstore, "list", lambda _: [[_meta(key, etag) for key, etag in Run.current.ask("list")]])
    patch.setattr(Bucket, "store", None)
    patch.setattr(Bucket, "ask", _ask)
    patch.setattr(upload, "os", SimpleNamespace(urandom=lambda count: Run.current.new_name(count)))
    patch.setattr(upload, "Threads", _Threads)
    patch.setattr(bucket, "Path", File)
    patch.setattr(upload, "check_space", lambda *_: None)
    patch.setattr(upload, "remove_tree", lambda _: None)
    patch.setattr(Staging, "_lock_share", lambda self: self.check())
    patch.setattr(Staging, "_begin", lambda self: None)
    patch.setattr(Staging, "_end", lambda self, error: None)
    patch.setattr(Staging, "_hold", lambda self: None)
    patch.setattr(Staging, "_clear", lambda self: None)
    patch.setattr(Staging, "path", lambda self, name: File(self._name.encode()))
    patch.setattr(Staging, "note_finished", _note_finished)


def _note_finished(self: Staging, name: str, finished: Finished) -> None:
    self.finished[name] = finished
