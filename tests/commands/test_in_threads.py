"""The Python API in a process that has threads, as a notebook or a trainer: everything comes out as ever."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest

from reshard.api import merge, split
from reshard.formats.errors import MismatchError
from reshard.move.jobs import Sizes
from tests.publishing.test_output import journals, noted
from tests.slow import Turns
from tests.support import change_tensor, contents, write_checkpoint

FOUR = {"workers": 4, "sizes": Sizes(step=600, small=1000)}


@pytest.fixture
def threaded() -> Iterator[None]:
    """A thread beside this one."""
    end = threading.Event()
    thread = threading.Thread(target=end.wait)
    thread.start()
    yield
    end.set()
    thread.join()


def test_a_split_and_a_merge_beside_threads(tmp_path, threaded):
    source = write_checkpoint(tmp_path / "source", files=3)
    seen = []
    summary = split(source, tmp_path / "out", tp=4, **FOUR, progress=seen.append)
    split(source, tmp_path / "alone", tp=4, workers=1)
    assert contents(tmp_path / "out") == contents(tmp_path / "alone")
    last = seen[-1]
    assert last.written == last.to_write == summary.nbytes and seen == sorted(seen)
    split(tmp_path / "out", tmp_path / "out2", tp=2, **FOUR)
    merge(tmp_path / "out2", tmp_path / "merged", **FOUR)
    assert contents(tmp_path / "merged") == contents(source)


def test_an_error_there_is_the_same_error(tmp_path, threaded):
    source = write_checkpoint(tmp_path / "source", files=3)
    split(source, tmp_path / "out", tp=4, **FOUR)
    change_tensor(tmp_path / "out/rank-02-of-04/model.safetensors", "lm_head.weight")
    with pytest.raises(MismatchError, match=r"rank-02-of-04/model.safetensors has the checksum"):
        merge(tmp_path / "out", tmp_path / "merged", **FOUR)
    assert not list(tmp_path.glob("merged*"))


THREADED = """
import sys, threading
from reshard import split
from tests.slow import be_slow
be_slow()
threading.Thread(target=threading.Event().wait, daemon=True).start()
split(sys.argv[1], sys.argv[2], tp=4)
"""


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_ended_beside_threads(how, tmp_path):
    """The same call goes on."""
    source = write_checkpoint(tmp_path / "source", files=3)
    command = [sys.executable, "-c", THREADED, str(source), str(tmp_path / "out")]
    turns = Turns(tmp_path / "turns")
    process = subprocess.Popen(command, env=turns.environment, stderr=subprocess.PIPE, text=True)
    turns.until(process, lambda: any(tmp_path.glob("out.partial/**/*.incomplete")))
    turns.end(process, how)
    process.wait()
    assert all(noted(journal) is not None for journal in journals(tmp_path / "out"))
    split(source, tmp_path / "out", tp=4)
    split(source, tmp_path / "expected", tp=4)
    assert contents(tmp_path / "out") == contents(tmp_path / "expected")
