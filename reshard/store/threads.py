"""Threads that share work, and threads that wait for remote answers. Unlike those of ``concurrent.futures``, the latter
do not keep the process from ending: after Ctrl-C nobody waits for an answer that may take a minute.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, as_completed, wait
from itertools import islice
from queue import SimpleQueue
from typing import Any, TypeVar

T = TypeVar("T")
S = TypeVar("S")

_PATIENCE = 5.0

WAKE = 1.0
"""Seconds that the main thread waits at a time: a signal that comes between Python's last look for one and its wait for
a lock does not end the wait. So Ctrl-C takes this long at most.
"""


def share(items: Iterable[S], count: int, work: Callable[[Iterator[S]], None]) -> None:
    """Have ``count`` threads call ``work``, each with an iterator that takes the next of the items that all share.

    Raises the first error; then the other threads get no more items, and are waited for.
    """
    left, lock, stopped = iter(items), threading.Lock(), threading.Event()

    def own() -> Iterator[S]:
        while not stopped.is_set():
            with lock:
                found = [*islice(left, 1)]
            if not found:
                return
            yield found[0]

    with ThreadPoolExecutor(count) as pool:
        futures = [pool.submit(work, own()) for _ in range(count)]
        try:
            for future in as_completed(futures):
                future.result()
        finally:
            stopped.set()


def result(future: Future[T]) -> T:
    """The result of a call, or its error. Unlike ``future.result()`` it always ends at Ctrl-C."""
    while not future.done():
        wait([future], WAKE)
    return future.result()


def interruptible(function: Callable[[], T]) -> T:
    """``function()``, which may not look for signals while it waits: in the main thread Ctrl-C ends it."""
    if threading.current_thread() is not threading.main_thread():
        return function()
    with Threads(1) as threads:
        return result(threads.submit(function))


class Threads:
    """A few threads that call functions."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._calls: SimpleQueue[tuple[Future[Any], Callable[..., Any], tuple[Any, ...]] | None] = SimpleQueue()
        for _ in range(count):
            threading.Thread(target=self._work, daemon=True).start()

    def submit(self, function: Callable[..., T], *arguments: Any) -> Future[T]:
        """Have a thread call ``function(*arguments)``; its result or its error is that of the future."""
        future: Future[T] = Future()
        self._calls.put((future, function, arguments))
        return future

    def map(self, function: Callable[[S], T], values: Iterable[S]) -> list[T]:
        """The results for all values. Raises the first error; then calls that have not begun are not made.

        Calls that have begun are waited for, but not for long, and not after Ctrl-C.
        """
        futures = [self.submit(function, value) for value in values]
        try:
            return [result(future) for future in futures]
        except Exception:
            wait([future for future in futures if not future.cancel()], _PATIENCE)
            raise
        finally:
            for future in futures:
                future.cancel()

    def close(self) -> None:
        """End the threads, each after its current call."""
        for _ in range(self._count):
            self._calls.put(None)

    def __enter__(self) -> Threads:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _work(self) -> None:
        while (call := self._calls.get()) is not None:
            future, function, arguments = call
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(function(*arguments))
            except BaseException as error:
                future.set_exception(error)
            del call, future, function, arguments
