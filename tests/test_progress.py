"""How far a long command is, as lines of text, and where the time went."""

from __future__ import annotations

import json
import os
import re
import time
from pathlib import Path
from typing import Any

import pytest

from reshard.api import merge, split
from reshard.cli import printing as progress
from reshard.cli.printing import progress_of
from reshard.move.jobs import Sizes
from reshard.system import Share
from reshard.writing import summary
from reshard.writing.request import State
from tests.support import command, write_checkpoint


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time, which stands still until a test changes it."""
    now = [100.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    return now


def test_a_line_a_minute_with_rate_and_time_left(clock: list[float], capsys: pytest.CaptureFixture[str]) -> None:
    with progress_of("split", how="log") as shown:
        for second in range(0, 151, 10):
            clock[0] = 100.0 + second
            shown(second * 10_000_000, 10_000_000_000)
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 2
    assert lines[0] == "split: 600.00 MB of 10.00 GB (6%), 10.00 MB/s, 16 min left"
    assert lines[1] == "split: 1.20 GB of 10.00 GB (12%), 10.00 MB/s, 15 min left"


def test_the_rate_is_that_of_this_run(clock: list[float], capsys: pytest.CaptureFixture[str]) -> None:
    """The run goes on with one that had written 4 GB."""
    with progress_of("split", how="log") as shown:
        for second in range(0, 61, 10):
            clock[0] = 100.0 + second
            shown(4_000_000_000 + second * 10_000_000, 10_000_000_000, second // 20)
    (line,) = capsys.readouterr().err.splitlines()
    assert line == "split: 4.60 GB of 10.00 GB (46%), 10.00 MB/s, 9 min left; 3 requests tried again"


def test_a_bar(capsys: pytest.CaptureFixture[str]) -> None:
    with progress_of("split", how="bar") as shown:
        shown(0, 10_000)
        time.sleep(0.11)  # it is drawn ten times a second
        shown(1_000, 10_000, 2)
        drawn = capsys.readouterr().err
    assert "split:  10%" in drawn and "tried again: 2" in drawn


def test_none_says_nothing(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(progress, "INTERVAL", 0.0)
    with progress_of("split", how="none") as shown:
        shown(1, 2)
        shown(2, 2)
    assert capsys.readouterr().err == ""


class _Stopped(Exception):
    pass


@pytest.mark.parametrize("form", [None, "vllm", "dcp"])
@pytest.mark.parametrize("small", [300, 1 << 16])
def test_all_that_is_to_be_written_is_written(form: str | None, small: int, tmp_path: Path) -> None:
    """Of a whole run, of the ranks of one process, and of a run that goes on with what another has finished."""
    options = {"workers": 1, "sizes": Sizes(step=5_000, small=small)}
    source = write_checkpoint(tmp_path / "source", files=2)
    seen: list[State] = []
    whole = split(source, tmp_path / "whole", tp=4, format=form, **options, progress=seen.append)
    assert seen == sorted(seen) and seen[-1] == (whole.nbytes, whole.nbytes, 0)
    assert 0 < seen[0].written < whole.nbytes, "headers are written first"

    def stop(state: State) -> None:
        if 2 * state.written > state.to_write:
            raise _Stopped

    with pytest.raises(_Stopped):
        split(source, tmp_path / "resumed", tp=4, format=form, **options, progress=stop)
    seen.clear()
    split(source, tmp_path / "resumed", tp=4, format=form, **options, progress=seen.append)
    assert seen == sorted(seen) and seen[-1] == (whole.nbytes, whole.nbytes, 0)
    seen.clear()
    split(source, tmp_path / "part", tp=4, format=form, **options, part=Share(0, 2), progress=seen.append)
    assert 0 < seen[-1].written == seen[-1].to_write < whole.nbytes
    if form is None:
        seen.clear()
        split(source, tmp_path / "one", tp=4, ranks=[1], **options, progress=seen.append)
        assert 0 < seen[-1].written == seen[-1].to_write < whole.nbytes
    seen.clear()
    merged = merge(tmp_path / "whole", tmp_path / "merged", **options, progress=seen.append)
    assert seen[-1].written == merged.nbytes


def test_where_the_time_went(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = write_checkpoint(tmp_path / "source")
    found = json.loads(command("split", source, tmp_path / "out", "--tp", "2", "--json").stdout)
    assert [*found["time"]] == ["opening", "moving", "publishing"]
    assert abs(sum(found["time"].values()) - found["seconds"]) < 0.1
    assert "Time: " not in command("merge", tmp_path / "out", tmp_path / "short").stdout
    monkeypatch.setattr(summary, "LONG", 0.0)
    done = command("merge", tmp_path / "out", tmp_path / "merged")
    assert re.fullmatch(
        r"Time: opening \d+\.\d s, moving \d+\.\d s, publishing \d+\.\d s\.", done.stdout.splitlines()[-1]
    )
    dry = command("split", source, tmp_path / "dry", "--tp", "2", "--dry-run", "--json")
    assert json.loads(dry.stdout)["time"] is None


def test_a_process_with_a_slow_source_reports_between_its_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step may take minutes, and the line a minute is made of what the processes report."""
    now, read, seen = [0.0], os.preadv, list[State]()

    def slow(*arguments: Any) -> int:
        now[0] += 6.0
        return read(*arguments)

    monkeypatch.setattr(os, "preadv", slow)
    monkeypatch.setattr("reshard.move.engine.time.monotonic", lambda: now[0])
    source = write_checkpoint(tmp_path / "source")
    split(source, tmp_path / "out", tp=2, workers=1, sizes=Sizes(small=0), progress=seen.append)
    assert len({state.written for state in seen}) > 30
    assert seen == sorted(seen) and seen[-1].written == seen[-1].to_write
