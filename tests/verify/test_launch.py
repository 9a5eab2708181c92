"""Ranks as threads: results come back, and whatever goes wrong on a rank ends all of them and is one error.

And as processes, which ``profile`` times, and which another launcher starts.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from reshard.formats.errors import CheckpointError, ReshardError
from reshard.profile import processes
from reshard.profile.processes import run_processes
from reshard.verify.forward.launch import DEFAULT_TIMEOUT, run_ranks
from reshard.verify.rank.collectives import copy_to_group
from reshard.verify.rank.group import RankAnswer, RankError, say, world
from tests.marks import of_ranks, thorough
from tests.verify.by_hand import by_hand

ROOT = Path(__file__).parents[2]


def total(x: torch.Tensor) -> dict[str, object]:
    return {"rank": world().rank, "sum": world().all_reduce(x * (world().rank + 1)), "grad": torch.is_grad_enabled()}


def test_results_come_back_in_rank_order() -> None:
    x = torch.arange(3.0)
    with torch.no_grad():  # it is of the caller's thread
        results = run_ranks(total, 3, x)
    assert [r["rank"] for r in results] == [0, 1, 2]
    assert all(torch.equal(r["sum"], x * 6) and r["grad"] for r in results)
    assert torch.equal(x, torch.arange(3.0))
    with pytest.raises(ValueError, match="world_size"):
        run_ranks(total, 0, x)


def sum_is_its_own() -> float:
    mine = world().all_reduce(torch.ones(1))
    mine *= world().rank
    world().gather(None)
    return mine.item()


def test_what_a_rank_does_to_a_sum_is_no_other_ranks() -> None:
    assert run_ranks(sum_is_its_own, 3) == [0.0, 3.0, 6.0]


def one_at_a_time(log: list[int]) -> None:
    for _ in range(3):
        log.append(world().rank)
        time.sleep(0.01)
        log.append(world().rank)
        world().gather(None)


def test_ranks_take_turns() -> None:
    log: list[int] = []
    run_ranks(one_at_a_time, 3, log)
    assert log[::2] == log[1::2] and sorted(log) == [0] * 6 + [1] * 6 + [2] * 6


def speaks() -> None:
    for text in ("one", "two"):
        say(f"{text} on rank {world().rank}")
    print("not on standard output")


def test_rank_0_is_heard_and_standard_output_is_left_alone(capsys: pytest.CaptureFixture[str]) -> None:
    heard: list[str] = []
    run_ranks(speaks, 2, progress=heard.append)
    assert heard == ["one on rank 0", "two on rank 0"]
    assert capsys.readouterr().out == ""


def test_signal_handlers_and_threads_are_left_alone() -> None:
    before = {s: signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)}, threading.active_count()
    run_ranks(speaks, 2)
    assert ({s: signal.getsignal(s) for s in before[0]}, threading.active_count()) == before


def raises(culprit: int, error: BaseException, cleaned: list[int]) -> None:
    try:
        world().gather(None)
        if world().rank == culprit:
            raise error
        world().all_reduce(torch.ones(1))
    finally:
        cleaned.append(world().rank)


@pytest.mark.parametrize("culprit", [0, 2])
def test_a_rank_that_raises_is_the_one_reported_and_all_clean_up(culprit: int) -> None:
    start, cleaned, threads = time.monotonic(), list[int](), threading.active_count()
    with pytest.raises(RankError) as info:
        run_ranks(raises, 3, culprit, ValueError("layer 7\nhas no weight"), cleaned)
    assert info.value.rank == culprit
    assert info.value.message.startswith(f"rank {culprit} of 3 failed: ValueError: layer 7")
    assert "in raises" in "".join(traceback.format_exception(info.value))
    assert sorted(cleaned) == [0, 1, 2] and threading.active_count() == threads
    assert time.monotonic() - start < DEFAULT_TIMEOUT  # at once, and not when the others have waited for it


def test_an_error_in_our_own_words_keeps_them() -> None:
    with pytest.raises(RankError, match=r"^rank 1 of 2 failed: rank 1 has no folder$"):
        run_ranks(raises, 2, 1, CheckpointError("rank 1 has no folder"), [])


def test_a_rank_that_exits_has_failed() -> None:
    with pytest.raises(RankError, match="SystemExit: 3"):
        run_ranks(raises, 2, 1, SystemExit(3), [])


def test_an_answer_of_one_rank_is_the_answer() -> None:
    with pytest.raises(RankAnswer) as info:
        run_ranks(raises, 3, 1, RankAnswer({"known": 7}), [])
    assert info.value.value == {"known": 7}


def computes_long(how: Callable[[], None]) -> None:
    world().gather(None)
    if world().rank == 1:
        how()
    world().all_reduce(torch.ones(1))


def sleeps_long() -> None:
    time.sleep(20)


def test_a_rank_that_does_not_come_is_named() -> None:
    with pytest.raises(RankError) as info:
        run_ranks(computes_long, 3, sleeps_long, timeout=1.5)
    assert info.value.rank == 1
    assert info.value.message.startswith("rank 1 did not come to all_reduce (test_launch.py:")
    assert "in computes_long), where ranks 0, 2 waited 1.5 s; rank 1 was at test_launch.py:" in info.value.message
    assert info.value.message.endswith("in sleeps_long")


def waits_for_the_first() -> None:
    world().share(lambda: time.sleep(2.0))


def computes_for_ever() -> None:
    while world().rank == 0:
        torch.ones(9).sum()


def test_a_rank_that_has_its_turn_for_ever_is_named() -> None:
    """The others have not come as far as to wait in a collective. No thread is left."""
    before = threading.active_count()
    with pytest.raises(
        RankError, match=r"^rank 0 did not come to its next collective, where rank 1 waited 1\.5 s; rank 0 was at"
    ):
        run_ranks(computes_for_ever, 2, timeout=1.5)
    assert threading.active_count() == before


def test_a_wait_for_the_original_has_no_limit() -> None:
    run_ranks(waits_for_the_first, 2, timeout=1.5)


def misses_a_sum() -> None:
    if world().rank != 1:
        world().all_reduce(torch.ones(1))


def test_a_rank_that_ends_too_early_is_named_at_once() -> None:
    with pytest.raises(RankError) as info:
        run_ranks(misses_a_sum, 3)
    assert info.value.message.startswith("rank 1 did not come to all_reduce (test_launch.py:")
    assert info.value.message.endswith("in misses_a_sum), where ranks 0, 2 wait; rank 1 has ended")


def misses_a_sum_of_a_backward() -> None:
    x = torch.ones(1, 2, requires_grad=True)
    y = copy_to_group(x, world()).sum()
    if world().rank == 1:
        y.backward()


def test_a_hang_in_a_backward_is_named() -> None:
    with pytest.raises(RankError, match=r"^rank 0 did not come to all_reduce \(.* in misses_a_sum_of_a_back"):
        run_ranks(misses_a_sum_of_a_backward, 2)


def disagrees() -> None:
    if world().rank == 0:
        world().all_gather(torch.ones(1))
    else:
        world().receive(0)


def disagrees_in_one_group() -> None:
    if world().rank == 0:
        world().all_gather(torch.ones(1))
    else:
        world().all_reduce(torch.ones(1))


@pytest.mark.parametrize(("how", "other"), [(disagrees, "receive"), (disagrees_in_one_group, "all_reduce")])
def test_ranks_in_different_collectives_are_told_apart(how: Callable[[], None], other: str) -> None:
    with pytest.raises(RankError, match=rf"different collectives: rank 0 all_gather \(.*; rank 1 {other} \("):
        run_ranks(how, 2)


# ------------------------------------------------------------------------------------------------- interrupted


ANEW = """
import os, threading
from contextlib import suppress
from reshard.verify.ending import one_line_when_interrupted, temporary_folder

def work():
    while True:
        with suppress(OSError), temporary_folder("reshard-of-a-rank-") as folder:
            print("begun", flush=True)
            for _ in range(200):
                os.makedirs(folder / "weights", exist_ok=True)

with one_line_when_interrupted(lambda: "reshard: interrupted\\n"):
    threading.Thread(target=work, daemon=True).start()
    threading.Event().wait()
"""


def test_a_thread_that_makes_folders_anew_leaves_none_behind(tmp_path: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", ANEW], cwd=ROOT, env={**os.environ, "TMPDIR": str(tmp_path)}, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stdout is not None and process.stdout.readline() == "begun\n"
    process.terminate()
    assert (process.communicate(timeout=60)[1], process.returncode) == ("reshard: interrupted\n", 128 + signal.SIGTERM)
    assert not [*tmp_path.iterdir()]


SCRIPT = """
import sys, time
from reshard.verify.ending import temporary_folder
from reshard.verify.forward.launch import run_ranks
from reshard.verify.rank.group import world

def work():
    with temporary_folder("reshard-of-a-rank-"):
        world().gather(None)
        if world().rank == 1:
            print("begun", flush=True)
            time.sleep(3600)
        world().gather(None)

if __name__ == "__main__":
    run_ranks(work, 2, timeout=100)
"""


@thorough
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_an_interrupted_run_ends_at_once(tmp_path: Path, how: int) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    process = subprocess.Popen(
        [sys.executable, tmp_path / "script.py"], env=environment() | {"TMPDIR": str(tmp_path)}, text=True,
        stderr=subprocess.PIPE, start_new_session=True,
    )  # fmt: skip
    assert process.stderr is not None and process.stderr.readline() == "begun\n"
    start = time.monotonic()
    process.send_signal(how)
    stderr = process.communicate(timeout=20)[1]
    assert process.returncode == -how, stderr
    assert time.monotonic() - start < 10 and not session(process.pid)


# ------------------------------------------------------------------------------------------------- as processes


@of_ranks
@thorough
def test_processes_too_report_the_rank_that_fails(tmp_path: Path) -> None:
    def run(fn: Callable[..., object], *args: object) -> None:
        run_processes(fn, 3, *args)

    with pytest.raises(RankError, match=r"^rank 2 of 3 failed: ValueError: no$"):
        run(raises, 2, ValueError("no"), [])
    with pytest.raises(RankAnswer) as info:
        run(raises, 1, RankAnswer({"known": 7}), [])
    assert info.value.value == {"known": 7}
    for how in (signal.SIGKILL, signal.SIGSEGV):
        with pytest.raises(RankError) as killed:
            run(is_killed, str(tmp_path), int(how))
        assert killed.value.rank == 1 and killed.value.message == f"rank 1 of 3 was ended by {how.name}"
        assert_gone(pids_in(tmp_path))


def test_a_rank_that_is_killed_is_named_even_if_others_report_first() -> None:
    """They may see its connections closed before the process that started it sees its pipe closed."""
    pipes, ends = zip(*(multiprocessing.Pipe(duplex=False) for _ in range(3)), strict=True)
    ends[2].send(("failed", (True, RankError("rank 2 of 3 failed: connection closed", rank=2))))
    killer = threading.Timer(0.3, ends[1].close)
    killer.start()
    ranks = [SimpleNamespace(join=lambda: None, exitcode=-signal.SIGKILL)] * 3
    with pytest.raises(RankError, match=r"^rank 1 of 3 was ended by SIGKILL\n"):
        processes._follow(pipes, ranks, lambda _: None)
    killer.join()


def is_killed(pids: str, how: int) -> None:
    Path(pids, str(world().rank)).write_text(str(os.getpid()))
    for step in range(100):
        dist.all_reduce(torch.ones(1))
        if world().rank == 1 and step == 50:
            os.kill(os.getpid(), how)


WORK = """
import os, time
from pathlib import Path
import torch.distributed as dist

def work(folder):
    Path(folder, str(dist.get_rank())).write_text(str(os.getpid()))
    dist.barrier()
    time.sleep(3600)
"""
OF_PROCESSES = """
import sys
from reshard.profile.processes import run_processes
from work_of_a_rank import work

run_processes(work, 2, sys.argv[1])
"""


@thorough
@pytest.mark.parametrize(("how", "group"), [(signal.SIGINT, True), (signal.SIGTERM, False), (signal.SIGKILL, False)])
def test_no_process_outlives_the_command(tmp_path: Path, how: int, group: bool) -> None:
    """Ctrl-C in a terminal reaches all processes."""
    (tmp_path / "script.py").write_text(OF_PROCESSES)
    (tmp_path / "work_of_a_rank.py").write_text(WORK)
    folder = tmp_path / "pids"
    folder.mkdir()
    process = subprocess.Popen(
        [sys.executable, tmp_path / "script.py", folder],
        env=environment(),
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        wait_until(lambda: len(pids_in(folder)) == 2, 60)
        time.sleep(0.5)
        if group:
            os.killpg(process.pid, how)
        else:
            process.send_signal(how)
        stderr = process.communicate(timeout=20)[1]
    finally:
        process.kill()
    assert process.returncode == -how, stderr
    assert_gone(pids_in(folder))
    wait_until(lambda: not session(process.pid), 10)  # the fork server too


# ------------------------------------------------------------------------------------------ under another launcher


def prints_results() -> None:
    print(run_ranks(takes_part, 2, timeout=20))


def takes_part() -> tuple[int, float]:
    return world().rank, world().all_reduce(torch.ones(1)).item()


@of_ranks
@thorough
def test_under_another_launcher_every_rank_gets_all_results():
    """Under torchrun itself: test_cli.py."""
    for rank in by_hand([prints_results] * 2):
        assert (rank.returncode, rank.stdout) == (0, "[(0, 2.0), (1, 2.0)]\n"), rank.stderr


def fails() -> None:
    if world().rank == 1:
        raise ValueError("no such layer")
    world().gather(None)


def runs_what_fails() -> None:
    run_ranks(fails, 2, timeout=20)


@of_ranks
@thorough
def test_under_another_launcher_errors_name_the_rank():
    ranks = by_hand([runs_what_fails] * 2)
    assert ranks[1].returncode == 1
    assert "verify.rank.group.RankError: rank 1 of 2 failed: ValueError: no such layer" in ranks[1].stderr


def test_under_torchrun_another_number_of_ranks_is_refused(monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ReshardError, match="started 2 ranks, but 4 are needed"):
        run_ranks(prints_results, 4)


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT)}


def pids_in(folder: Path) -> list[int]:
    return [int(text) for file in folder.iterdir() if (text := file.read_text())]


STARTING = """
import os, signal, subprocess
from pathlib import Path
from reshard.verify.ending import one_line_when_interrupted, run_program

class Interrupted(subprocess.Popen):
    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        print(self.pid, flush=True)
        signal.raise_signal(signal.SIGTERM)

subprocess.Popen = Interrupted
with one_line_when_interrupted(lambda: "reshard: interrupted\\n"):
    run_program(["sleep", "600"], "it", 60, Path("."))
"""


def test_a_program_that_is_being_started_is_ended_too() -> None:
    done = subprocess.run([sys.executable, "-c", STARTING], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (done.stderr, done.returncode) == ("reshard: interrupted\n", 128 + signal.SIGTERM)
    assert_gone([int(done.stdout)])


def session(leader: int) -> list[str]:
    listing = subprocess.run(["ps", "-A", "-o", "sid=,pid=,stat=,args="], capture_output=True, text=True).stdout
    rows = [line.split(None, 3) for line in listing.splitlines()]
    return [" ".join(row) for row in rows if row[0] == str(leader) and not row[2].startswith("Z")]


def assert_gone(pids: list[int]) -> None:
    assert pids
    wait_until(lambda: not any(is_running(pid) for pid in pids), 10)


def is_running(pid: int) -> bool:
    state = subprocess.run(["ps", "-o", "stat=", "-p", str(pid)], capture_output=True, text=True).stdout
    return bool(state.strip()) and not state.startswith("Z")


def wait_until(condition, seconds: float) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "took too long"
        time.sleep(0.05)
