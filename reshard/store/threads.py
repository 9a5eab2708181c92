"""Threads that share work, and threads that wait for remote answers. Unlike those of ``concurrent.futures``, the latter
do not keep the process from ending: after Ctrl-C nobody waits for an answer that may take a minute.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, wait
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

from numpy.typing import NDArray

T = TypeVar("T")
S = TypeVar("S")

_PATIENCE = 5.0

WAKE = 1.0
"""Seconds that the main thread waits at a time: a signal that comes between Python's last look for one and its wait for
a lock does not end the wait. So Ctrl-C takes this long at most.
"""


class Shared(Iterator[S]):
    """Items that threads share: each is taken by one of them."""

    def __init__(self, items: Iterable[S]) -> None:
        self._left, self._lock = iter(items), threading.Lock()

    def __next__(self) -> S:
        with self._lock:
            return next(self._left)


class StoppedError(Exception):
    """In a thread for whose work nobody waits any more."""


def work_together(
    count: int, work: Callable[[int, Callable[[T], None]], None], take: Callable[[T], None],
    stop: Callable[[], None] = lambda: None,
) -> None:  # fmt: skip
    """Call ``work(number, report)`` for each number below ``count``, each in its own thread.

    ``take`` is called in this thread with every report. If the system allows fewer threads, the highest numbers are
    not run: ``work`` must do without them. Raises the first error. Then, and after Ctrl-C, the threads get a
    StoppedError when they report, and are waited for, but not for long: ``stop`` ends what they wait for.
    """
    answers: SimpleQueue[tuple[T] | Future[None]] = SimpleQueue()
    stopped = threading.Event()

    def report(value: T) -> None:
        if stopped.is_set():
            raise StoppedError
        answers.put((value,))

    try:
        threads = Threads(count)
    except RuntimeError:  # the system allows none
        return work(0, take)
    try:
        for number in range(threads.count):
            threads.submit(work, number, report).add_done_callback(answers.put)
        running = threads.count
        while running:
            with suppress(Empty):
                answer = answers.get(timeout=WAKE)
                if isinstance(answer, Future):
                    answer.result()
                    running -= 1
                else:
                    take(*answer)
    finally:
        stopped.set()
        stop()
        threads.close(WAKE)


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
    """A few threads that call functions: ``count``, or as many as the system allows. Raises RuntimeError for none."""

    def __init__(self, count: int) -> None:
        self._threads: list[threading.Thread] = []
        self._calls: SimpleQueue[tuple[Future[Any], Callable[..., Any], tuple[Any, ...]] | None] = SimpleQueue()
        for _ in range(count):
            try:
                thread = threading.Thread(target=self._work, daemon=True)
                thread.start()
                self._threads.append(thread)
            except RuntimeError:
                if not self._threads:
                    raise
        self.count = len(self._threads)

    def submit(self, function: Callable[..., T], *arguments: Any) -> Future[T]:
        """Have a thread call ``function(*arguments)``; the future gets its result or its error."""
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

    def close(self, patience: float = 0.0) -> None:
        """End the threads, each after its current call, and wait for them, but no longer than so many seconds."""
        for _ in self._threads:
            self._calls.put(None)
        give_up = time.monotonic() + patience
        for thread in self._threads:
            thread.join(max(0.0, give_up - time.monotonic()))

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


class ArrayCache:
    """Arrays by their keys, those used last: at most ``limit`` bytes, or one."""

    def __init__(self, limit: int) -> None:
        self.limit, self.nbytes = limit, 0
        self._lock = threading.Lock()
        self._arrays: OrderedDict[object, Future[NDArray[Any]]] = OrderedDict()

    def get(self, key: object, make: Callable[[], NDArray[Any]]) -> NDArray[Any]:
        """The array of this key, made unless it is kept: who asks first makes it, the others wait."""
        own = Future[NDArray[Any]]()
        with self._lock:
            future = self._arrays.setdefault(key, own)
            self._arrays.move_to_end(key)
        if future is not own:
            return future.result()
        try:
            array = make()
        except BaseException as error:
            with self._lock:
                del self._arrays[key]
            own.set_exception(error)
            raise
        own.set_result(array)
        with self._lock:
            self.nbytes += array.nbytes
            while self.nbytes > self.limit and (oldest := next(iter(self._arrays))) != key:
                if self._arrays[oldest].done():
                    self.nbytes -= self._arrays.pop(oldest).result().nbytes
                else:  # another thread is making it
                    self._arrays.move_to_end(oldest)
        return array
