"""The launcher: results come back, and whatever goes wrong on a rank ends all of them and is one error."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from formats.errors import CheckpointError, ReshardError
from tests.marks import of_ranks, thorough
from tests.verify.by_hand import by_hand
from verify.forward.launch import DEFAULT_TIMEOUT, RankTimeoutError, _explain, run_ranks
from verify.forward.worker import Environment, RankError, say

pytestmark = [thorough, of_ranks]


ROOT = Path(__file__).parents[2]


def total(x: torch.Tensor, name: str) -> dict[str, object]:
    y = x * (dist.get_rank() + 1)
    dist.all_reduce(y)
    return {"rank": dist.get_rank(), "sum": y, "env": os.environ.get(name), "cwd": str(Path.cwd())}


def test_results_come_back_in_rank_order_with_todays_environment(monkeypatch, tmp_path):
    x = torch.arange(3.0)
    for value in ("first", "second"):  # the fork server is older than the second
        monkeypatch.setenv("RESHARD_TEST", value)
        monkeypatch.chdir(tmp_path)
        results = run_ranks(total, 3, x, "RESHARD_TEST", timeout=20)
        assert [r["rank"] for r in results] == [0, 1, 2]
        assert all(torch.equal(r["sum"], x * 6) and r["env"] == value for r in results)
        assert {r["cwd"] for r in results} == {str(tmp_path)}
    assert torch.equal(x, torch.arange(3.0)), "arguments are copies"


def speaks() -> str:
    for text in ("one", "two"):
        say(f"{text} on rank {dist.get_rank()}")
    return tempfile.mkdtemp()


def test_rank_0_is_heard_and_temporary_files_of_ranks_are_gone():
    heard: list[str] = []
    made = run_ranks(speaks, 2, progress=heard.append)
    assert heard == ["one on rank 0", "two on rank 0"]
    assert len(set(made)) == 2 and not any(Path(folder).exists() for folder in made)


def test_signal_handlers_and_multiprocessing_are_left_alone():
    before = {s: signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)}
    run_ranks(os.getpid, 1)
    assert {s: signal.getsignal(s) for s in before} == before


def raises(culprit: int, error: Exception, pids: str) -> None:
    Path(pids, str(dist.get_rank())).write_text(str(os.getpid()))
    dist.barrier()
    if dist.get_rank() == culprit:
        raise error
    dist.all_reduce(torch.ones(1))


@pytest.mark.parametrize("culprit", [0, 2])
def test_a_rank_that_raises_is_the_one_reported(tmp_path, culprit):
    start = time.monotonic()
    with pytest.raises(RankError) as info:
        run_ranks(raises, 3, culprit, ValueError("layer 7\nhas no weight"), str(tmp_path))
    assert info.value.rank == culprit
    assert info.value.message.startswith(f"rank {culprit} of 3 failed: ValueError: layer 7")
    assert "in raises" in info.value.details
    assert time.monotonic() - start < DEFAULT_TIMEOUT  # at once, and not when the others have waited for it
    assert_gone(pids_in(tmp_path))


def test_an_error_in_our_own_words_keeps_them(tmp_path):
    with pytest.raises(RankError, match=r"^rank 1 of 2 failed: rank 1 has no folder$"):
        run_ranks(raises, 2, 1, CheckpointError("rank 1 has no folder"), str(tmp_path))


def is_killed(pids: str, how: int) -> None:
    Path(pids, str(dist.get_rank())).write_text(str(os.getpid()))
    for step in range(100):
        dist.all_reduce(torch.ones(1))
        if dist.get_rank() == 1 and step == 50:
            os.kill(os.getpid(), how)


def test_a_rank_that_nccl_ends_has_waited_too_long(tmp_path: Path) -> None:
    """Where collectives do not block, NCCL's own thread sees the time-out, and aborts the process."""
    of_gpu = Environment(str(tmp_path), "", {}, "", "cuda", 7.0)
    found = _explain(of_gpu, 1, -signal.SIGABRT, 2)
    assert isinstance(found, RankTimeoutError) and "has waited 7 s in a collective" in found.message
    of_cpu = _explain(replace(of_gpu, device="cpu"), 1, -signal.SIGABRT, 2)
    assert not isinstance(of_cpu, RankTimeoutError)


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSEGV])
def test_a_rank_killed_midway_is_the_one_reported(tmp_path, how):
    with pytest.raises(RankError) as info:
        run_ranks(is_killed, 3, str(tmp_path), int(how), timeout=60)
    assert info.value.rank == 1
    assert info.value.message == f"rank 1 of 3 was ended by {how.name}"
    assert_gone(pids_in(tmp_path))


def exits() -> None:
    sys.exit(3)


def test_a_rank_that_exits_has_failed():
    with pytest.raises(RankError, match="SystemExit: 3"):
        run_ranks(exits, 2)


def hangs(pids: str) -> None:
    Path(pids, str(dist.get_rank())).write_text(str(os.getpid()))
    dist.barrier()
    if dist.get_rank() == 1:
        sleeps_long()
    dist.all_reduce(torch.ones(1))


def sleeps_long() -> None:
    time.sleep(3600)


def test_a_hang_names_rank_and_collective(tmp_path):
    with pytest.raises(RankTimeoutError) as info:
        run_ranks(hangs, 3, str(tmp_path), timeout=3)
    assert info.value.rank == 1
    assert info.value.message.startswith("rank 1 did not come to all_reduce (test_launch.py:")
    assert "in hangs), where ranks 0, 2 waited 3 s; rank 1 was at test_launch.py:" in info.value.message
    assert info.value.message.endswith("in sleeps_long")
    assert_gone(pids_in(tmp_path))


def hangs_in_backward() -> None:
    from verify.rank.layers import ColumnParallelLinear

    layer = ColumnParallelLinear(2, 2, group=None)
    x = torch.ones(1, 2, requires_grad=True)
    y = layer(x).sum()
    if dist.get_rank() == 0:
        sleeps_long()
    y.backward()


def test_a_hang_in_a_backward_is_named(tmp_path):
    with pytest.raises(RankTimeoutError, match=r"^rank 0 did not come to all_reduce \(.* in hangs_in_backward\)"):
        run_ranks(hangs_in_backward, 2, timeout=3)


def hangs_last() -> None:
    if dist.get_rank() == 0:
        sleeps_long()


def test_a_hang_after_the_last_collective_ends_too():
    with pytest.raises(RankTimeoutError, match="rank 0 did not come to the end of the run"):
        run_ranks(hangs_last, 2, timeout=3)


def disagrees() -> None:
    if dist.get_rank() == 0:
        dist.broadcast(torch.ones(1), 1)
    else:
        dist.recv(torch.ones(1), 0)


def test_ranks_in_different_collectives_are_told_apart():
    with pytest.raises(RankTimeoutError, match=r"different collectives: rank 0 broadcast \(.*; rank 1 recv \("):
        run_ranks(disagrees, 2, timeout=3)


def test_no_function_to_import_no_ranks():
    with pytest.raises(Exception, match=r"pickle|local"):
        run_ranks(lambda: None, 1)
    with pytest.raises(ValueError, match="world_size"):
        run_ranks(os.getpid, 0)


# In another process: interruption, and other launchers


WORK = """
import os, time
from pathlib import Path
import torch, torch.distributed as dist

def work(folder):
    Path(folder, str(dist.get_rank())).write_text(str(os.getpid()))
    dist.barrier()
    if dist.get_rank() == 1:
        time.sleep(3600)
    dist.all_reduce(torch.ones(1))
"""
SCRIPT = """
import sys
from verify.forward.launch import run_ranks
from work_of_a_rank import work

run_ranks(work, 2, sys.argv[1], timeout=100)
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    (tmp_path / "work_of_a_rank.py").write_text(WORK)
    return path


@pytest.mark.parametrize(
    ("how", "group", "code"),
    [
        (signal.SIGINT, True, -signal.SIGINT),  # Ctrl-C in a terminal reaches all processes
        (signal.SIGTERM, False, -signal.SIGTERM),
        (signal.SIGKILL, False, -signal.SIGKILL),
    ],
)
def test_no_process_outlives_the_command(tmp_path, script, how, group, code):
    folder = tmp_path / "pids"
    folder.mkdir()
    temporary = Path(tempfile.mkdtemp(prefix="r"))  # short: a socket's path has room for about 100 characters
    process = subprocess.Popen(
        [sys.executable, script, folder],
        env={**environment(), "TMPDIR": str(temporary)},
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
    assert process.returncode == code, stderr
    assert_gone(pids_in(folder))
    wait_until(lambda: not session(process.pid), 10)  # the fork server too
    temporary.rmdir()  # it is empty


def prints_results() -> None:
    print(run_ranks(takes_part, 2, timeout=20))


def takes_part() -> tuple[int, float]:
    x = torch.ones(1)
    dist.all_reduce(x)
    return dist.get_rank(), x.item()


def test_under_another_launcher_every_rank_gets_all_results():
    """Under torchrun itself: test_cli.py."""
    for rank in by_hand([prints_results] * 2):
        assert (rank.returncode, rank.stdout) == (0, "[(0, 2.0), (1, 2.0)]\n"), rank.stderr


def fails() -> None:
    if dist.get_rank() == 1:
        raise ValueError("no such layer")
    dist.barrier()


def runs_what_fails() -> None:
    run_ranks(fails, 2, timeout=20)


def test_under_another_launcher_errors_name_the_rank():
    ranks = by_hand([runs_what_fails] * 2)
    assert ranks[1].returncode == 1
    assert "verify.forward.worker.RankError: rank 1 of 2 failed: ValueError: no such layer" in ranks[1].stderr


def test_under_torchrun_another_number_of_ranks_is_refused(monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ReshardError, match="started 2 ranks, but 4 are needed"):
        run_ranks(os.getpid, 4)


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT)}


def pids_in(folder: Path) -> list[int]:
    return [int(text) for file in folder.iterdir() if (text := file.read_text())]


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
