"""Work that threads share."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np
import pytest

from reshard.formats.errors import MismatchError
from reshard.store.threads import ArrayCache, Shared, StoppedError, work_together


@pytest.mark.parametrize("count", [1, 4])
def test_each_item_is_taken_once(count: int) -> None:
    found: list[int | None] = []
    items = [None, *range(100)]
    shared = Shared(items)
    work_together(count, lambda number, report: [*map(report, shared)], found.append)
    assert sorted(found, key=str) == sorted(items, key=str)


def test_the_first_error_ends_the_others() -> None:
    taken, shared = list[int](), Shared(range(10_000))

    def work(_: int, report: Callable[[int], None]) -> None:
        for number in shared:
            report(number)
            if number == 3:
                raise ValueError("three")
            time.sleep(0.002)

    with pytest.raises(ValueError, match="three"):
        work_together(4, work, taken.append)
    assert len(taken) < 200


@pytest.mark.parametrize("count", [1, 2, 5])
def test_all_that_is_reported_arrives_in_order(count: int) -> None:
    def work(number: int, report: Callable[[tuple[int, int, int]], None]) -> None:
        for i in range(50):
            report((number, i, threading.get_ident()))

    taken = list[tuple[int, int, int]]()
    work_together(count, work, taken.append)
    for number in range(count):
        assert [i for n, i, _ in taken if n == number] == list(range(50))
    assert len({n for n, _, _ in taken}) == count
    assert threading.get_ident() not in {thread for _, _, thread in taken}


@pytest.mark.parametrize("error", [MismatchError("it differs", "look again"), KeyError("x"), KeyboardInterrupt()])
@pytest.mark.parametrize("count", [1, 3])
def test_an_error_is_raised_here_and_stops_all(count: int, error: BaseException) -> None:
    stopped = list[int]()

    def work(number: int, report: Callable[[str], None]) -> None:
        if number == count - 1:
            report("before")
            raise error
        try:
            while True:
                time.sleep(0.01)
                report("again")
        except StoppedError:
            stopped.append(number)
            raise

    taken = list[str]()
    with pytest.raises(type(error)) as raised:
        work_together(count, work, taken.append)
    assert raised.value is error and "before" in taken
    assert sorted(stopped) == [*range(count - 1)], "they have ended"


def test_an_error_of_the_one_who_takes_stops_all() -> None:
    def take(report: str) -> None:
        raise RuntimeError(report)

    ended = threading.Event()

    def work(_: int, report: Callable[[str], None]) -> None:
        try:
            while True:
                report("one")
        finally:
            ended.set()

    with pytest.raises(RuntimeError, match="one"):
        work_together(2, work, take)
    assert ended.wait(10)


def test_a_thread_that_waits_for_long_is_left_alone() -> None:
    def work(number: int, report: Callable[[str], None]) -> None:
        if number:
            raise KeyError
        time.sleep(60)

    begun = time.monotonic()
    with pytest.raises(KeyError):
        work_together(2, work, print)
    assert time.monotonic() - begun < 30


@pytest.mark.parametrize("allowed", [0, 1])
def test_where_the_system_allows_fewer_threads(monkeypatch: pytest.MonkeyPatch, allowed: int) -> None:
    real, started = threading.Thread.start, list[threading.Thread]()

    def start(thread: threading.Thread) -> None:
        started.append(thread)
        if len(started) > allowed:
            raise RuntimeError("can't start new thread")
        real(thread)

    monkeypatch.setattr(threading.Thread, "start", start)
    taken = list[tuple[int, int]]()
    work_together(3, lambda number, report: report((number, threading.get_ident())), taken.append)
    assert [number for number, _ in taken] == [0]
    assert (taken[0][1] == threading.get_ident()) == (allowed == 0)


INTERRUPTED = """
import signal, threading, time
from reshard.store.threads import {imported}

def press():  # as if the signal had come just before the main thread's wait: it goes to a thread that does not wait
    time.sleep(0.2)
    signal.pthread_kill(threading.get_ident(), signal.SIGINT)

signal.signal(signal.SIGINT, signal.default_int_handler)
threading.Thread(target=press, daemon=True).start()
begun = time.monotonic()
try:
    {call}
except KeyboardInterrupt:
    print(time.monotonic() - begun)
"""


@pytest.mark.parametrize(
    ("imported", "call"),
    [
        ("Threads, result", "result(Threads(1).submit(time.sleep, 30))"),
        ("Threads", "Threads(1).map(time.sleep, [30])"),
        ("interruptible", "interruptible(lambda: time.sleep(30))"),
        ("work_together", "work_together(2, lambda number, report: time.sleep(30), print)"),
    ],
)
def test_ctrl_c_that_comes_just_before_a_wait_ends_it(imported: str, call: str) -> None:
    program = INTERRUPTED.format(imported=imported, call=call)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert float(done.stdout) < 10


def test_a_cache_makes_an_array_once_and_keeps_those_used_last() -> None:
    cache, made, slow, begun = ArrayCache(limit=24), list[str](), threading.Event(), threading.Event()

    def make(name: str, wait: threading.Event | None = None) -> np.ndarray:
        begun.set()
        assert wait is None or wait.wait(10)
        made.append(name)
        return np.full(8, ord(name), np.uint8)

    with ThreadPoolExecutor(2) as threads:
        both = [threads.submit(cache.get, "s", lambda: make("s", slow)) for _ in range(2)]
        assert begun.wait(10)
        for name in "abacd":  # while the oldest is being made
            assert cache.get(name, partial(make, name))[0] == ord(name)
        slow.set()
        assert both[0].result() is both[1].result()
    for name in "cb":  # of a to d and s, the last three were kept
        cache.get(name, partial(make, name))
    assert made == [*"abcdsb"] and cache.nbytes == 24


def test_what_a_cache_cannot_make_is_made_again() -> None:
    cache = ArrayCache(limit=24)
    with pytest.raises(ZeroDivisionError):
        cache.get("a", lambda: np.empty(1 // 0))
    assert cache.get("a", lambda: np.zeros(8, np.uint8)).sum() == 0 and cache.nbytes == 8
