"""Work that processes share: what they report, and how they end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from reshard.formats.errors import MismatchError, ReshardError
from reshard.store.processes import SharedByForks, work_apart

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="elsewhere threads do the work")


def children() -> set[str]:
    """The processes that this one has started and not waited for."""
    found: set[str] = set()
    for file in Path("/proc/self/task").glob("*/children"):
        with suppress(FileNotFoundError):  # a thread that has ended meanwhile
            found.update(file.read_text().split())
    return found


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    before, files = children(), {*Path("/proc/self/fd").iterdir()}
    yield
    assert children() <= before and len({*Path("/proc/self/fd").iterdir()}) <= len(files)


@pytest.mark.parametrize("count", [1, 2, 5])
def test_all_that_is_reported_arrives_in_order(count: int) -> None:
    known, taken = object(), list[tuple[int, int, int, bytes, object]]()

    def work(number: int, report: Callable[[tuple[int, int, int, bytes, object]], None]) -> None:
        for i in range(50):
            report((number, i, os.getpid(), bytes(100_000), known))

    work_apart(count, work, taken.append, [known])
    for number in range(count):
        assert [i for n, i, _, content, _ in taken if n == number and len(content) == 100_000] == list(range(50))
    assert len({pid for _, _, pid, *_ in taken} - {os.getpid()}) == count
    assert all(each is known for *_, each in taken), "it is not copied"


@pytest.mark.parametrize("count", [1, 2, 5])
def test_each_item_is_taken_once(count: int) -> None:
    drawn, found = [SharedByForks(range(first, first + 100)) for first in (0, 100)], list[int]()

    def work(number: int, report: Callable[[int], None]) -> None:
        for items in drawn if number else reversed(drawn):
            for item in items:
                report(item)

    work_apart(count, work, found.append, ())
    assert sorted(found) == [*range(200)]


class Unspeakable(Exception):
    def __init__(self) -> None:
        super().__init__(lambda: None)


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (MismatchError("it differs", "look again"), MismatchError),
        (KeyError("x"), KeyError),
        (Unspeakable(), RuntimeError),
    ],
)
def test_an_error_is_raised_here_and_stops_all(count: int, error: Exception, kind: type[Exception]) -> None:
    def work(number: int, report: Callable[[str], None]) -> None:
        if number == count - 1:
            report("before")
            raise error
        time.sleep(60)

    taken, begun = list[str](), time.monotonic()
    with pytest.raises(kind) as raised:
        work_apart(count, work, taken.append, ())
    assert taken == ["before"] and time.monotonic() - begun < 30
    if isinstance(raised.value, MismatchError):
        assert (raised.value.message, raised.value.hint) == ("it differs", "look again")
        assert raised.value.__notes__ == ["Hint: look again"]
    elif kind is KeyError:
        assert "in work" in raised.value.__notes__[0], "the traceback of the process"


def test_an_error_of_the_one_who_takes_stops_all() -> None:
    def take(report: str) -> None:
        raise RuntimeError(report)

    def work(_: int, report: Callable[[str], None]) -> None:
        report("one")
        time.sleep(60)

    with pytest.raises(RuntimeError, match="one"):
        work_apart(2, work, take, ())


@pytest.mark.parametrize("last", [b"", bytes(100_000)])
def test_a_process_that_is_killed(last: bytes) -> None:
    def work(number: int, report: Callable[[object], None]) -> None:
        if number:
            report(last)
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(60)

    with pytest.raises(ReshardError, match="a worker process was ended by SIGKILL") as error:
        work_apart(2, work, lambda report: None, ())
    assert "memory" in str(error.value.hint)


@pytest.mark.parametrize("allowed", [0, 1])
def test_where_the_system_allows_fewer_processes(monkeypatch: pytest.MonkeyPatch, allowed: int) -> None:
    real, forks = os.fork, list[None]()

    def fork() -> int:
        forks.append(None)
        if len(forks) > allowed:
            raise BlockingIOError
        return real()

    monkeypatch.setattr(os, "fork", fork)
    taken = list[tuple[int, int]]()
    work_apart(3, lambda number, report: report((number, os.getpid())), taken.append, ())
    assert [number for number, _ in taken] == [0]
    assert (taken[0][1] == os.getpid()) == (allowed == 0)


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM])
def test_what_reaches_all_processes_is_for_the_first_to_hear(how: int) -> None:
    def work(_: int, report: Callable[[str], None]) -> None:
        os.kill(os.getpid(), how)
        report("still here")

    taken = list[str]()
    work_apart(2, work, taken.append, ())
    assert taken == ["still here"] * 2


def test_ctrl_c_while_they_start(monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.fork

    def fork() -> int:
        signal.raise_signal(signal.SIGINT)
        return real()

    monkeypatch.setattr(os, "fork", fork)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            work_apart(2, lambda number, report: time.sleep(60), print, ())
    finally:
        signal.signal(signal.SIGINT, before)
    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, ())


def test_a_process_with_threads_or_torch_is_not_copied() -> None:
    """As a notebook or a trainer, nor one that hears of no child's end."""
    program = """
import signal, sys, threading
from reshard.store.processes import can_fork
print(can_fork())
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
print(can_fork())
signal.signal(signal.SIGCHLD, signal.SIG_DFL)
sys.modules["torch"] = sys
print(can_fork())
del sys.modules["torch"]
threading.Thread(target=threading.Event().wait, daemon=True).start()
print(can_fork())
"""
    environment, command = os.environ | {"OPENBLAS_NUM_THREADS": "1"}, [sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    assert done.stdout.split() == ["True", "False", "False", "False"]


SCRIPT = """
import os, time
from reshard.store.processes import work_apart
work_apart(2, lambda number, report: (report(os.getpid()), time.sleep(600)), lambda pid: print(pid, flush=True), ())
"""


def test_they_end_with_the_process_that_started_them() -> None:
    process = subprocess.Popen([sys.executable, "-c", SCRIPT], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    pids = [int(process.stdout.readline()) for _ in range(2)]
    process.kill()
    process.wait()
    process.stdout.close()
    deadline = time.monotonic() + 20
    while any(is_running(pid) for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not [pid for pid in pids if is_running(pid)]


def is_running(pid: int) -> bool:
    try:
        return ") Z " not in Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
