"""Never half a checkpoint: kills, interrupts, full disks, concurrent runs, overwriting."""

from __future__ import annotations

import errno
import itertools
import json
import os
import random
import shutil
import signal
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from reshard.api import merge, split
from reshard.formats.errors import CheckpointError, MismatchError, PlanError
from reshard.move.jobs import Sizes
from reshard.publishing import staging as output
from reshard.publishing.staging import Staging
from reshard.source.opening import open_source
from tests.forked import Forked
from tests.marks import of_ranks, thorough
from tests.slow import Turns, be_slow
from tests.support import contents, without_sums, write_checkpoint


def slowly(command: str, source: Path, out: Path, *ranks: int, patience: float | None = None) -> None:
    """Split or merge, in small steps; with ``patience``, wait so many seconds for other runs."""
    be_slow()
    if patience is not None:
        output.PATIENCE = patience
    if command == "split":
        split(source, out, tp=4, max_shard_size=2500, ranks=list(ranks) or None)
    else:
        merge(source, out)


def start(
    command: str, source: Path, out: Path, *ranks: int, patience: float | None = None, turns: Turns | None = None
) -> Forked:
    run = partial(slowly, command, source, out, *ranks, patience=patience)
    return Forked((run, turns.environment if turns else os.environ), out.parent, out.parent)


@pytest.fixture
def turns(tmp_path: Path) -> Callable[[], Turns]:
    """Makes the turns of one process."""
    numbers = itertools.count()

    def new() -> Turns:
        return Turns(tmp_path / f"turns-{next(numbers)}")

    return new


def journals(out: Path) -> list[Path]:
    return list(out.parent.glob(f"{out.name}.partial/.reshard-journal-*"))


def noted(journal: Path) -> list[str]:
    """The names of the files that a journal says are finished."""
    try:
        lines = journal.read_text().splitlines()
        return [json.loads(line)["name"] for line in lines if line.startswith('{"name"') and line.endswith("}")]
    except FileNotFoundError:
        return []


def is_finished(folder: Path) -> bool:
    """Whether any command would take the folder for a finished checkpoint."""
    if not folder.is_dir():
        return False
    try:
        open_source(folder)
    except (CheckpointError, MismatchError, PlanError):
        return False
    return True


@pytest.mark.parametrize("command", ["split", "merge"])
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
@thorough
@of_ranks
def test_killed_at_random_moments(command, how, turns, tmp_path):
    source = write_checkpoint(tmp_path / "source", files=3)
    if command == "merge":
        split(source, tmp_path / "shards", tp=4)
        source = tmp_path / "shards"
    (all_turns := turns()).end()
    reference = start(command, source, tmp_path / "reference", turns=all_turns)
    assert reference.wait() == 0, reference.stderr
    expected, out = contents(tmp_path / "reference"), tmp_path / "out"
    moments = random.Random(f"{command}{how}")
    last = all_turns.number() - 1
    staged, kept = out.with_name("out.partial"), 0
    for attempt in range(4):
        own = turns()
        process = start(command, source, out, turns=own)
        if attempt % 2:  # at any moment, or else when a file has just been finished
            own.until(process, last=moments.randrange(last))
        else:
            own.until(process, lambda: any(map(noted, journals(out))), last)
        own.end(process, how)
        assert process.wait() != 0
        assert not is_finished(staged) and not out.exists()
        done = {p: p.stat().st_mtime_ns for p in staged.rglob("*.safetensors")} if staged.exists() else {}
        finished = [name for journal in journals(out) for name in noted(journal)]
        again = start(command, source, out)  # in this process, small tensors are smaller: steps would differ
        assert again.wait() == 0, again.stderr
        assert contents(out) == expected
        assert not staged.exists()
        for path, time_ns in done.items():
            name = path.relative_to(staged / "output").as_posix()
            if name in finished:
                kept += 1
                assert (out / name).stat().st_mtime_ns == time_ns, "a finished file is not written again"
        shutil.rmtree(out)
    assert kept or command == "merge"


@of_ranks
def test_ranks_written_alone_and_at_the_same_time_add_up(tmp_path):
    source = write_checkpoint(tmp_path / "source", files=3)
    split(source, tmp_path / "one", tp=4, max_shard_size=2500)
    processes = [start("split", source, tmp_path / "out", rank) for rank in range(4)]
    for process in processes:
        assert process.wait() == 0, process.stderr
    assert without_sums(tmp_path / "out") == without_sums(tmp_path / "one")
    assert not (tmp_path / "out.partial").exists()


def test_ranks_one_after_the_other(tmp_path):
    source = write_checkpoint(tmp_path / "source")
    split(source, tmp_path / "one", tp=4)
    out = tmp_path / "out"
    for ranks in ([2], [0, 3]):
        assert not split(source, out, tp=4, ranks=ranks).complete
        with pytest.raises(CheckpointError, match=r"the files of rank [01] of 4"):
            merge(out, tmp_path / "merged")
    with pytest.raises(CheckpointError, match="rank-03-of-04 exists"):
        split(source, out, tp=4, ranks=[3])
    with pytest.raises(CheckpointError, match="another source, mesh or plan"):
        split(source, out, tp=2, ranks=[1])
    with pytest.raises(PlanError, match="ranks=4 is not possible"):
        split(source, out, tp=4, ranks=[4])
    assert split(source, out, tp=4, ranks=[3], overwrite=True).complete is False
    assert split(source, out, tp=4, ranks=[1]).complete
    assert without_sums(out) == without_sums(tmp_path / "one")


@thorough
@of_ranks
def test_a_killed_rank_is_finished_by_the_same_command(tmp_path):
    source = write_checkpoint(tmp_path / "source", files=3)
    split(source, tmp_path / "one", tp=4, max_shard_size=2500)
    out, moments, expected = tmp_path / "out", random.Random(5), without_sums(tmp_path / "one")
    for rank in range(4):
        process = start("split", source, out, rank)
        time.sleep(moments.uniform(0.1, 0.4))
        process.send_signal(signal.SIGKILL)
        process.wait()
        assert not is_finished(out) or without_sums(out) == expected
    for rank in range(4):
        process = start("split", source, out, rank, patience=0.1)
        assert process.wait() == 0 or "exists" in process.stderr, process.stderr
    assert without_sums(out) == expected


@of_ranks
def test_two_runs_for_one_output(turns, tmp_path, monkeypatch):
    monkeypatch.setattr(output, "PATIENCE", 0)
    source = write_checkpoint(tmp_path / "source", files=3)
    other = write_checkpoint(tmp_path / "other", seed=9)
    own = turns()
    first = start("split", source, tmp_path / "out", turns=own)
    own.until(first, (tmp_path / "out.partial/output/rank-00-of-04").exists)
    with pytest.raises(CheckpointError, match="another run is writing"):
        split(source, tmp_path / "out", tp=4, max_shard_size=2500)
    with pytest.raises(CheckpointError, match="another run is writing"):
        split(other, tmp_path / "out", tp=8)
    own.end()
    assert first.wait() == 0, first.stderr
    assert is_finished(tmp_path / "out")


@of_ranks
def test_leftovers_of_another_task_are_not_mixed_in(turns, tmp_path):
    source, other = write_checkpoint(tmp_path / "source"), write_checkpoint(tmp_path / "other", seed=9)
    own = turns()
    process = start("split", source, tmp_path / "out", turns=own)
    own.until(process, lambda: any(tmp_path.glob("out.partial/**/*.safetensors")))
    own.end(process, signal.SIGKILL)
    assert process.wait() != 0
    split(other, tmp_path / "out", tp=4, max_shard_size=2500)
    split(other, tmp_path / "expected", tp=4, max_shard_size=2500)
    assert contents(tmp_path / "out") == contents(tmp_path / "expected")


@pytest.mark.parametrize("size", [2500, 10**6])
def test_a_full_disk_midway_and_then_room_again(size, tmp_path, monkeypatch):
    """What was written is kept: whole files, and the steps of those that are not."""
    source = write_checkpoint(tmp_path / "source", files=3)
    split(source, tmp_path / "expected", tp=4, max_shard_size=size)
    real, room = os.pwrite, [42_000]

    def write(descriptor, data, offset):
        room[0] -= len(data)
        if room[0] < 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(descriptor, data, offset)

    monkeypatch.setattr(os, "pwrite", write)
    with pytest.raises(CheckpointError, match="No space left on device") as error:
        split(source, tmp_path / "out", tp=4, max_shard_size=size, workers=1, sizes=Sizes(step=1200, small=100))
    assert "again" in str(error.value.hint)
    assert not (tmp_path / "out").exists()
    finished = {p: p.stat().st_mtime_ns for p in (tmp_path / "out.partial").rglob("*.safetensors")}
    room[0] = 10**9
    summary = split(source, tmp_path / "out", tp=4, max_shard_size=size, workers=1, sizes=Sizes(step=1200, small=100))
    assert summary.written < summary.nbytes * 0.7 and bool(finished) == (size == 2500)
    for path, time_ns in finished.items():
        assert (tmp_path / "out" / path.relative_to(tmp_path / "out.partial/output")).stat().st_mtime_ns == time_ns
    assert contents(tmp_path / "out") == contents(tmp_path / "expected")


@pytest.mark.parametrize(
    ("finished", "arguments", "said"),
    [
        (0, {"tp": 2}, "nothing is kept"),
        (1, {"tp": 2}, "36.13 kB of 36.13 kB are kept: the same command goes on from there"),
        (3, {"tp": 4, "max_shard_size": 2500}, "47.46 kB of 47.46 kB are kept: the same command goes on from there"),
        (
            1,
            {"tp": 4, "max_shard_size": 2500, "ranks": [1]},
            "11.86 kB of 11.86 kB are kept: the same command goes on from there",
        ),
    ],
)
def test_ctrl_c_says_what_is_kept(
    finished: int, arguments: dict[str, Any], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, out = write_checkpoint(tmp_path / "source"), tmp_path / "out"
    note, noted = Staging.note_finished, list[str]()

    def stop(self: Staging, name: str, *of: Any) -> None:
        note(self, name, *of)
        noted.append(name)
        if len(noted) == finished:
            raise KeyboardInterrupt

    def stop_at_once(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt) as stopped:
        patch.setattr(Staging, "note_finished", stop)
        if not finished:
            patch.setattr("reshard.writing.weights.move", stop_at_once)
        split(source, out, **arguments, workers=1)
    assert str(stopped.value) == said
    assert out.with_name("out.partial").exists() == bool(finished)
    times = {name: (out.with_name("out.partial") / "output" / name).stat().st_mtime_ns for name in noted}
    split(source, out, **arguments)
    assert {name: (out / name).stat().st_mtime_ns for name in noted} == times


def test_an_error_in_one_process_ends_the_others(tmp_path, monkeypatch):
    source = write_checkpoint(tmp_path / "source")
    split(source, tmp_path / "shards", tp=4)
    real, calls = os.pwrite, itertools.count()

    def write(descriptor, data, offset):
        time.sleep(0.005)
        if next(calls) == 4:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return real(descriptor, data, offset)

    raised, options = [], {"workers": 4, "sizes": Sizes(step=400, small=1000)}

    def attempt():
        with pytest.raises(CheckpointError, match="Input/output error") as error:
            merge(tmp_path / "shards", tmp_path / "merged", **options)
        raised.append(error)

    monkeypatch.setattr(os, "pwrite", write)
    thread = threading.Thread(target=attempt, daemon=True)
    thread.start()
    thread.join(30)
    assert raised


@pytest.mark.parametrize("ranks", [None, [1]])
def test_fsync_reaches_every_file_and_folder(ranks, tmp_path, monkeypatch):
    """With --fsync all is on the disk before it has its name, and the name itself after that."""
    source = write_checkpoint(tmp_path / "source")
    real, synced = os.fsync, set()

    def fsync(descriptor):
        found = os.fstat(descriptor)
        synced.add((found.st_dev, found.st_ino))
        real(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    split(source, tmp_path / "fast", tp=2, ranks=ranks, fsync=False)
    assert not synced
    split(source, tmp_path / "out", tp=2, ranks=ranks, fsync=True)
    places = [tmp_path, tmp_path / "out", *(tmp_path / "out").rglob("*")]
    missing = [place for place in places if (place.stat().st_dev, place.stat().st_ino) not in synced]
    assert not missing


@pytest.mark.parametrize("code", [errno.EROFS, errno.ENOENT])
def test_what_may_not_be_written_is_not_a_full_disk(code, tmp_path, monkeypatch):
    """A folder that is read-only, or in which there is none (/proc): more room would not help, nor trying again."""
    source, calls = write_checkpoint(tmp_path / "source"), []

    def refuse(*_, **__):
        calls.append(code)
        assert len(calls) < 10
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(Path, "mkdir", refuse)
    with pytest.raises(CheckpointError, match=rf"cannot write .*out\.partial: {os.strerror(code)}") as error:
        split(source, tmp_path / "out", tp=4)
    assert error.value.hint is None


def test_free_space_is_checked_first(tmp_path, monkeypatch):
    source = write_checkpoint(tmp_path / "source")
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1000))
    with pytest.raises(CheckpointError, match=r"bytes are needed and 1,000 are free"):
        split(source, tmp_path / "out", tp=4)
    assert not list(tmp_path.glob("out*"))


def test_overwriting(tmp_path):
    source, other = write_checkpoint(tmp_path / "source"), write_checkpoint(tmp_path / "other", seed=3)
    out = tmp_path / "out"
    split(source, out, tp=4)
    before = contents(out)
    with pytest.raises(CheckpointError, match="out exists"):
        split(other, out, tp=2)
    assert contents(out) == before
    split(other, out, tp=2, overwrite=True)
    split(other, tmp_path / "expected", tp=2)
    assert contents(out) == contents(tmp_path / "expected")
    assert not (tmp_path / "out.partial").exists()
    merge(out, tmp_path / "merged")
    merge(out, tmp_path / "merged", overwrite=True)


def test_what_is_no_checkpoint_is_never_overwritten(tmp_path):
    source = write_checkpoint(tmp_path / "source")
    home = tmp_path / "home"
    home.mkdir()
    (home / "thesis.txt").write_text("years")
    for overwrite in (True, False):  # --overwrite is not what one is told to try
        with pytest.raises(CheckpointError, match="is not a checkpoint, so it is not overwritten"):
            split(source, home, tp=4, overwrite=overwrite)
    (tmp_path / "folders" / "empty").mkdir(parents=True)
    with pytest.raises(CheckpointError, match="holds 'empty/' and is not a checkpoint"):
        split(source, tmp_path / "folders", tp=4)
    (tmp_path / "file").write_text("x")
    with pytest.raises(CheckpointError, match="is not a folder"):
        split(source, tmp_path / "file", tp=4, overwrite=True)
    (tmp_path / "empty").mkdir()
    assert split(source, tmp_path / "empty", tp=4).complete


def test_source_and_output_must_lie_apart(tmp_path):
    source = write_checkpoint(tmp_path / "source")
    for out in (source, source / "inside", tmp_path, tmp_path / "x/../source"):
        (tmp_path / "x").mkdir(exist_ok=True)
        with pytest.raises(CheckpointError, match="the same folder, or one lies in the other"):
            split(source, out, tp=4, overwrite=True)
    (tmp_path / "link").symlink_to(source)
    with pytest.raises(CheckpointError, match="the same folder"):
        split(source, tmp_path / "link/out", tp=4)
    with pytest.raises(CheckpointError, match="no such folder"):
        split(source, tmp_path / "none/out", tp=4)


def test_a_dry_run_writes_nothing_and_says_the_same(tmp_path):
    source = write_checkpoint(tmp_path / "source")
    dry = split(source, tmp_path / "out", tp=4, dry_run=True)
    assert not list(tmp_path.glob("out*"))
    wet = split(source, tmp_path / "out", tp=4)
    assert (dry.nbytes, dry.files, dry.tensors, dry.padding) == (wet.nbytes, wet.files, wet.tensors, wet.padding)
    assert wet.nbytes == sum(p.stat().st_size for p in (tmp_path / "out").rglob("*.safetensors"))
    with pytest.raises(CheckpointError, match="exists"):
        split(source, tmp_path / "out", tp=4, dry_run=True)
    merge(tmp_path / "out", tmp_path / "merged", dry_run=True)
    assert not list(tmp_path.glob("merged*"))


def test_a_source_that_shrinks_while_it_is_read(tmp_path, monkeypatch):
    source = write_checkpoint(tmp_path / "source")
    real = os.preadv
    monkeypatch.setattr(os, "preadv", lambda fd, buffers, offset: 0 if offset > 2500 else real(fd, buffers, offset))
    with pytest.raises(CheckpointError, match=r"model.safetensors: the file became shorter: it ends before byte"):
        split(source, tmp_path / "out", tp=4, workers=1)
    assert not (tmp_path / "out").exists()
