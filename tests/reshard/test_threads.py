"""Work that threads share."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from reshard.store.threads import share


@pytest.mark.parametrize("count", [1, 4])
def test_each_item_is_taken_once(count: int) -> None:
    found: list[int | None] = []
    items = [None, *range(100)]
    share(items, count, found.extend)
    assert sorted(found, key=str) == sorted(items, key=str)


def test_the_first_error_ends_the_others() -> None:
    taken: list[int] = []

    def work(numbers: Iterator[int]) -> None:
        for number in numbers:
            taken.append(number)
            if number == 3:
                raise ValueError("three")
            time.sleep(0.002)

    with pytest.raises(ValueError, match="three"):
        share(range(10_000), 4, work)
    assert len(taken) < 200


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
    ],
)
def test_ctrl_c_that_comes_just_before_a_wait_ends_it(imported: str, call: str) -> None:
    program = INTERRUPTED.format(imported=imported, call=call)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert float(done.stdout) < 10
