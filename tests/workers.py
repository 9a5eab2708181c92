"""``pytest --jobs 4``: the tests run in processes that are forked from one, which has imported and collected them all.

Processes that begin for themselves, as those of pytest-xdist, spend eight seconds of a processor each on that.
"""

from __future__ import annotations

import multiprocessing
import traceback
from collections import deque
from itertools import pairwise
from multiprocessing.connection import Connection, wait
from typing import Any

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--jobs", type=int, default=1, help="so many processes run the tests")


def pytest_runtestloop(session: pytest.Session) -> bool | None:
    """Runs the tests, each process a part of the list, and reports here what becomes of them."""
    jobs = min(session.config.getoption("jobs"), len(session.items))
    if jobs < 2 or session.config.option.collectonly or session.testsfailed:
        return None
    session.config._tmp_path_factory.getbasetemp()  # type: ignore[attr-defined]  # one for all processes
    parts = pairwise(len(session.items) * i // jobs for i in range(jobs + 1))
    workers = [_Worker(session, range(*part)) for part in parts]
    try:
        while running := {worker.connection: worker for worker in workers if not worker.connection.closed}:
            for connection in wait([*running]):
                running[connection].hear(workers)
                if session.shouldfail:
                    raise session.Failed(session.shouldfail)
    except BaseException:
        for worker in workers:
            worker.process.terminate()
        raise
    if any(worker.part for worker in workers):
        raise session.Interrupted("no process is left for the other tests")
    return True


class _Worker:
    """A process that runs tests: numbers in the list of all."""

    def __init__(self, session: pytest.Session, part: range) -> None:
        self.part = deque(part)  # those that nobody has begun
        self._given = deque[int]()  # the one that runs, and the next, whose fixtures stay
        self._session = session
        self.connection, other = multiprocessing.Pipe()
        self.process = multiprocessing.get_context("fork").Process(target=_run, args=(session, other))
        self.process.start()
        other.close()

    def hear(self, workers: list[_Worker]) -> None:
        """It asks for a test, has something to report, or has ended."""
        try:
            hook, arguments = self.connection.recv()
        except EOFError:
            self.connection.close()
            self.process.join()
            if self._given:
                item = self._session.items[self._given.popleft()]
                self.part.extend(self._given)
                text = f"the process of this test ended: {self.process.exitcode}"
                report = pytest.TestReport(item.nodeid, item.location, {}, "failed", text, "call")
                item.ihook.pytest_runtest_logreport(report=report)
            return
        if hook == "next":
            longest = max((worker.part for worker in workers), key=len)
            if not self.part:  # half of another's
                self.part.extend(reversed([longest.pop() for _ in range((len(longest) + 1) // 2)]))
            self._given.extend(following := [self.part.popleft()] if self.part else [])
            self.connection.send(*(following or [None]))
            return
        caller = getattr(self._session.config.hook, hook)
        caller.call_historic(kwargs=arguments) if caller.is_historic() else caller(**arguments)
        if hook == "pytest_runtest_logfinish":
            self._given.popleft()


def _run(session: pytest.Session, connection: Connection) -> None:
    """In a process of its own."""
    plugins = session.config.pluginmanager
    plugins.unregister(name="terminalreporter")
    capture: Any = plugins.getplugin("capturemanager")
    capture.stop_global_capturing()
    capture.start_global_capturing()  # into files of its own
    plugins.register(_Reports(connection))

    def following() -> pytest.Item | None:
        connection.send(("next", {}))
        number = connection.recv()
        return None if number is None else session.items[number]

    try:
        item = following()
        while item:
            after = following()
            session.config.hook.pytest_runtest_protocol(item=item, nextitem=after)
            item = after
    except Exception:
        connection.send(("pytest_internalerror", {"excrepr": traceback.format_exc(), "excinfo": None}))
    except KeyboardInterrupt:
        pass  # the first process hears it, too


class _Reports:
    """What a process has to report is sent."""

    def __init__(self, connection: Connection) -> None:
        self._send = connection.send

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._send(("pytest_runtest_logreport", {"report": report}))

    def pytest_runtest_logfinish(self, nodeid: str, location: tuple[str, int | None, str]) -> None:
        self._send(("pytest_runtest_logfinish", {"nodeid": nodeid, "location": location}))

    def pytest_warning_recorded(self, warning_message: Any, when: str, nodeid: str, location: object) -> None:
        warning_message.source = None  # an open file, which cannot be sent
        arguments = {"warning_message": warning_message, "when": when, "nodeid": nodeid, "location": location}
        self._send(("pytest_warning_recorded", arguments))
