"""How far a long command is, as lines of text, and where the time went."""

from __future__ import annotations

import json
import os
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from formats.mesh import Mesh
from reshard.api import merge, split
from reshard.cli import progress
from reshard.cli.progress import Progress
from reshard.launcher import Share
from reshard.move.engine import _Files, move
from reshard.move.jobs import Sizes, TargetFile
from reshard.move.reading import Sums
from reshard.move.slabs import Copy
from reshard.move.times import Moved, Times
from reshard.store.retries import Traffic
from reshard.writing import summary
from reshard.writing.summary import Count, Spent, State, Summary
from tests.support import command, contents, write_checkpoint


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time, which stands still until a test changes it."""
    now = [100.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    return now


def test_a_line_a_minute_with_rate_and_time_left(clock: list[float], capsys: pytest.CaptureFixture[str]) -> None:
    with Progress("split", how="log") as shown:
        for second in range(0, 151, 10):
            clock[0] = 100.0 + second
            shown(second * 10_000_000, 10_000_000_000)
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 2
    assert lines[0] == "split: 600.00 MB of 10.00 GB (6%), 10.00 MB/s, 16 min left"
    assert lines[1] == "split: 1.20 GB of 10.00 GB (12%), 10.00 MB/s, 15 min left"


def test_reading_and_writing_have_their_own_rates(clock: list[float], capsys: pytest.CaptureFixture[str]) -> None:
    """The run goes on with one that had written 4 GB, and reads what the rest is made of."""
    with Progress("split", how="log") as shown:
        shown.moving(State(0, 0, 4_000_000_000, 10_000_000_000, 0))  # headers: nothing is read yet
        assert not capsys.readouterr().err
        for second in range(0, 61, 10):
            clock[0] = 100.0 + second
            read, written = second * 20_000_000, 4_000_000_000 + second * 10_000_000
            shown.moving(State(read, 9_000_000_000, written, 10_000_000_000, second // 20))
    (line,) = capsys.readouterr().err.splitlines()
    assert line == (
        "split: reading 1.20 GB of 9.00 GB (13%), 20.00 MB/s, 6 min left; "
        "writing 4.60 GB of 10.00 GB (46%), 10.00 MB/s, 9 min left; 3 requests tried again"
    )


def test_a_bar_for_reading_and_one_for_writing(capsys: pytest.CaptureFixture[str]) -> None:
    with Progress("split", how="bar") as shown:
        shown.moving(State(0, 9_000, 0, 10_000, 0))
        shown.moving(State(4_500, 9_000, 1_000, 10_000, 2))
        for bar in shown._bars.values():
            bar.refresh()
        drawn = capsys.readouterr().err
    assert "split, reading:  50%" in drawn and "split, writing:  10%" in drawn and "tried again: 2" in drawn


def test_none_says_nothing(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(progress, "INTERVAL", 0.0)
    with Progress("split", how="none") as shown:
        shown(1, 2)
        shown(2, 2)
    assert capsys.readouterr().err == ""


class _Stopped(Exception):
    pass


@pytest.mark.parametrize("form", [None, "vllm", "dcp"])
@pytest.mark.parametrize("small", [300, 1 << 16])
def test_all_that_is_to_be_read_is_read(
    form: str | None, small: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a whole run, of the ranks of one process, and of a run that goes on with what another has finished."""
    options = {"workers": 1, "sizes": Sizes(step=5_000, small=small)}
    source = write_checkpoint(tmp_path / "source", files=2)
    size = sum(len(content) for name, content in contents(source).items() if name.endswith(".safetensors"))
    seen: list[State] = []
    whole = split(source, tmp_path / "whole", tp=4, format=form, **options, progress=seen.append)
    assert seen == sorted(seen) and seen[-1][2:] == (whole.nbytes, whole.nbytes, 0)
    assert seen[0][:2] == (0, 0) and seen[0].written > 0, "headers are written first"
    assert 0.9 * size < seen[-1].to_read == seen[-1].read < size, "each byte but the headers once"

    def stop(state: State) -> None:
        if 2 * state.written > state.to_write:
            raise _Stopped

    with pytest.raises(_Stopped):
        split(source, tmp_path / "resumed", tp=4, format=form, **options, progress=stop)
    before = seen[-1].read
    seen.clear()
    split(source, tmp_path / "resumed", tp=4, format=form, **options, progress=seen.append)
    assert seen[-1].read == seen[-1].to_read <= before and seen[-1].written == whole.nbytes
    assert seen[0].to_write == whole.nbytes
    seen.clear()
    mine = Share(0, 2)
    split(source, tmp_path / "part", tp=4, format=form, **options, part=mine, progress=seen.append)
    assert seen[-1].written == seen[-1].to_write and 0 < seen[-1].read == seen[-1].to_read <= before
    if form is None:
        seen.clear()
        split(source, tmp_path / "one", tp=4, ranks=[1], **options, progress=seen.append)
        assert seen[-1].written == seen[-1].to_write and 0 < seen[-1].read == seen[-1].to_read < before
    seen.clear()
    merged = merge(tmp_path / "whole", tmp_path / "merged", **options, progress=seen.append)
    assert seen[-1].read == seen[-1].to_read > 0 and seen[-1].written == merged.nbytes


def test_where_the_time_went(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = write_checkpoint(tmp_path / "source")
    found = json.loads(command("split", source, tmp_path / "out", "--tp", "2", "--json").stdout)
    spent = found["time"]
    assert [*spent] == ["opening", "moving", "publishing", "processes"]
    assert abs(sum([*spent.values()][:3]) - found["seconds"]) < 0.1
    assert [*spent["processes"]] == ["reading", "checking", "arranging", "writing"]
    assert 0 < sum(spent["processes"].values()) <= 2 * spent["moving"] + 0.01
    assert "Time: " not in command("merge", tmp_path / "out", tmp_path / "short").stdout
    monkeypatch.setattr(summary, "LONG", 0.0)
    done = command("merge", tmp_path / "out", tmp_path / "merged")
    assert done.stdout.splitlines()[-1].startswith("Time: opening 0.")
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
    monkeypatch.setattr("reshard.move.times.perf_counter", lambda: now[0])
    source = write_checkpoint(tmp_path / "source")
    split(source, tmp_path / "out", tp=2, workers=1, sizes=Sizes(small=0), progress=seen.append)
    assert len({state.read for state in seen}) > 0.9 * now[0] / 6.0 > 30
    assert seen == sorted(seen) and seen[-1].read == seen[-1].to_read


def test_the_line_says_what_the_processes_waited_for() -> None:
    def line(fetched: int, times: Times) -> str:
        spent = Spent(0.44, 12.3, 1.0, times)
        done = Summary(
            "split", "s", "out", Mesh(), Mesh(), 1, 1, 1, 1, {}, (0,), True, False, fetched=fetched, spent=spent
        )
        return summary.time_text(done)

    assert line(0, Times(12.0, 2.0, 0.0, 6.0)) == (
        "Time: opening 0.4 s, moving 12.3 s (reading 60%, checking 10%, arranging 0%, writing 30%), publishing 1.0 s."
    )
    assert "(waiting for the source 80%, checking 0%," in line(5, Times(16.0, 0.0, 0.0, 4.0))
    assert line(0, Times()) == "Time: opening 0.4 s, moving 12.3 s, publishing 1.0 s."


def test_batches_of_files_read_what_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is uploaded is written a few files at a time, and what two batches need is read twice."""
    monkeypatch.setattr("reshard.writing.summary.bytes_to_read", lambda jobs, left, sizes: 7)
    seen: list[State] = []
    count = Count([], Sizes(), 10, 30, seen.append)
    for again in (1, 2):
        count.begin([], sums := Sums([]))
        sums.traffic = Traffic(again=again)
        count(Moved(read=5, written=10, times=Times(reading=1.0)))
        count.end()
    assert seen == [State(5, 7, 20, 30, 1), State(10, 12, 30, 30, 3)]
    assert count.moved == Moved(10, 20, Times(reading=2.0)) and count.traffic.again == 3


@pytest.mark.parametrize("form", [None, "vllm", "dcp"])
@pytest.mark.parametrize("small", [300, 1 << 16])
def test_each_second_counts_for_what_it_was_needed_for(
    form: str | None, small: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a clock that goes on only when something is done, and by another time for each."""
    seconds, now = dict.fromkeys(Times._fields, 0.0), [0.0]
    monkeypatch.setattr("reshard.move.times.perf_counter", lambda: now[0])

    def takes(place: str, what: str, length: float) -> None:
        module, _, name = place.rpartition(".")
        owner = import_module(module) if module else Copy
        real = getattr(owner, name)

        def slower(*arguments: Any, **named: Any) -> Any:
            now[0] += length
            seconds["writing" if at_the_end else what] += length
            return real(*arguments, **named)

        monkeypatch.setattr(owner, name, slower)

    def move_files(*arguments: Any, **named: Any) -> None:
        seconds.update(dict.fromkeys(seconds, 0.0))  # the headers were summed before
        move(*arguments, **named)

    def write_crcs(files: _Files, target: TargetFile) -> None:
        at_the_end.append(target)
        write(files, target)
        at_the_end.clear()

    at_the_end, write = list[TargetFile](), _Files._write_crcs
    monkeypatch.setattr("reshard.writing.rewrite.move", move_files)
    monkeypatch.setattr(_Files, "_write_crcs", write_crcs)

    takes("os.preadv", "reading", 1.0)
    takes("os.pwrite", "writing", 100.0)
    takes("reshard.move.reading.sum_part", "checking", 1e4)
    takes("reshard.move.mover.sum_part", "checking", 1e4)
    takes("reshard.move.mover.check_slab", "checking", 1e6)
    takes("reshard.move.mover.add_run", "checking", 1e8)
    takes("block", "arranging", 1e10)
    source = write_checkpoint(tmp_path / "source", files=2)
    ranks = [1] if form is None else None  # of row-parallel weights, it reads parts of rows
    done = split(source, tmp_path / "out", tp=2, format=form, ranks=ranks, workers=1, sizes=Sizes(small=small))
    assert done.spent is not None and done.spent.processes._asdict() == seconds
    assert all(seconds.values())
