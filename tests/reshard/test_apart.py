"""The Python API in a process that has threads: nothing forks there, and everything comes out as ever."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from formats.errors import CheckpointError, MismatchError
from reshard.api import merge, split
from reshard.engine import apart
from reshard.engine.jobs import Options
from tests.reshard.test_output import journals, noted
from tests.support import change_tensor, contents, write_checkpoint

FOUR = Options(workers=4)


@pytest.fixture
def threaded(monkeypatch):
    """A thread beside this one; work for several processes, in a fresh one that has the same small steps."""
    end = threading.Event()
    thread = threading.Thread(target=end.wait)
    thread.start()
    monkeypatch.setattr("reshard.engine.move.STEP", 600)
    small = "; import reshard.engine.move; reshard.engine.move.STEP = 600; serve("
    monkeypatch.setattr(apart, "_START", apart._START.replace("; serve(", small))

    def fork():
        raise AssertionError("a process with threads forks")

    monkeypatch.setattr(os, "fork", fork)
    yield
    end.set()
    thread.join()


def test_a_split_and_a_merge_beside_threads(tmp_path, threaded):
    source = write_checkpoint(tmp_path / "source", files=3)
    seen = []
    summary = split(source, tmp_path / "out", 4, options=FOUR, progress=seen.append)
    split(source, tmp_path / "alone", 4, options=Options(workers=1))
    assert contents(tmp_path / "out") == contents(tmp_path / "alone")
    last = seen[-1]
    assert last.written == last.to_write == summary.nbytes and last.read == last.to_read and seen == sorted(seen)
    assert summary.spent.processes.reading > 0 and summary.spent.processes.writing > 0
    split(tmp_path / "out", tmp_path / "out2", 2, options=FOUR)
    merge(tmp_path / "out2", tmp_path / "merged", options=FOUR)
    assert contents(tmp_path / "merged") == contents(source)


def test_an_error_there_is_the_same_error(tmp_path, threaded):
    source = write_checkpoint(tmp_path / "source", files=3)
    split(source, tmp_path / "out", 4, options=FOUR)
    change_tensor(tmp_path / "out/rank-02-of-04/model.safetensors", "lm_head.weight")
    with pytest.raises(MismatchError, match=r"rank-02-of-04/model.safetensors has the checksum"):
        merge(tmp_path / "out", tmp_path / "merged", options=FOUR)
    assert not list(tmp_path.glob("merged*"))


def test_a_process_that_is_killed(tmp_path, threaded, monkeypatch):
    source = write_checkpoint(tmp_path / "source")
    monkeypatch.setattr(apart, "_START", "import os; os.kill(os.getpid(), 9) # {path} {parent} {requests} {reports}")
    with pytest.raises(CheckpointError, match="the process that moves the bytes ended with status -9"):
        split(source, tmp_path / "out", 4, options=FOUR)
    assert not (tmp_path / "out").exists()


THREADED = """
import sys, threading
import tests.slow
from reshard import split
from reshard.engine import apart
apart._START = apart._START.replace("; serve(", "; import tests.slow; serve(")
threading.Thread(target=threading.Event().wait, daemon=True).start()
split(sys.argv[1], sys.argv[2], 4)
"""


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_ended_beside_threads(how, tmp_path):
    """No process is left behind, and the same call goes on."""
    source = write_checkpoint(tmp_path / "source", files=3)
    command = [sys.executable, "-c", THREADED, str(source), str(tmp_path / "out")]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    while process.poll() is None and not list(tmp_path.glob("out.partial/**/*.incomplete")):
        time.sleep(0.005)
    assert process.poll() is None
    process.send_signal(how)
    process.wait()
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline and _serving(source):
        time.sleep(0.02)
    assert not _serving(source)
    assert all(noted(journal) is not None for journal in journals(tmp_path / "out"))
    split(source, tmp_path / "out", 4)
    split(source, tmp_path / "expected", 4)
    assert contents(tmp_path / "out") == contents(tmp_path / "expected")


def _serving(source: Path) -> list[str]:
    """The files beside the source that processes have open."""
    links = []
    for link in Path("/proc").glob("[0-9]*/fd/*"):
        with contextlib.suppress(OSError):
            links.append(str(link.readlink()))
    return [link for link in links if str(source.parent) in link]


def test_a_process_that_was_started_before_is_taken_and_one_that_is_not_needed_ends(tmp_path, threaded):
    source = write_checkpoint(tmp_path / "source", files=3)
    with apart.prepared(wanted=True):
        (process,) = apart._ready
        split(source, tmp_path / "out", 4, options=FOUR)
        assert apart._ready == [] and process._child.returncode == 0
    with pytest.raises(CheckpointError), apart.prepared(wanted=True):
        (process,) = apart._ready
        split(tmp_path / "nothing", tmp_path / "other", 4)
    assert apart._ready == [] and process._child.returncode is not None
    with apart.prepared(wanted=False):
        assert apart._ready == []
