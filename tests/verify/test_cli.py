"""What a person sees of ``reshard verify``: alone, on a terminal, and under a launcher of their own."""

from __future__ import annotations

import itertools
import json
import multiprocessing
import os
import pty
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from io import RawIOBase
from multiprocessing import forkserver
from pathlib import Path

import pytest
import torch

from reshard.api import split
from reshard.formats.files.safetensors import read_header
from reshard.source.opening import open_source
from reshard.text import human_bytes
from reshard.verify import cli
from tests import zoo
from tests.marks import of_ranks, thorough
from tests.support import change_tensor, command
from tests.verify.by_hand import by_hand
from tests.verify.by_hand import command as by_hand_command
from tests.verify.faults import inject
from tests.verify.test_launch import session, wait_until

pytestmark = of_ranks

ROOT = Path(__file__).parents[2]
Done = subprocess.CompletedProcess[str]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with ``full``, the right ``shards`` of it, and ``wrong`` ones."""
    root = tmp_path_factory.mktemp("cli")
    zoo.save("llama", root / "full", torch.bfloat16)
    split(root / "full", root / "shards", tp=2)
    shutil.copytree(root / "shards", root / "wrong")
    assert inject("gate_and_up", root / "wrong", open_source(root / "full"))
    return root


def verify(*arguments: str | Path, launcher: tuple[str, ...] = (), **environment: str) -> Done:
    """Verify in a process of its own, if it is said how it is started."""
    if not launcher:
        return command("verify", *arguments, **environment)
    process = [sys.executable, *launcher, *map(str, arguments)]
    environment = {**os.environ, **environment}
    return subprocess.run(process, cwd=ROOT, capture_output=True, text=True, timeout=300, env=environment)


ALONE = ("-m", "verify")
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "verify")


PHASES = [
    "comparing bytes",
    "starting 2 ranks, cpu: 550.72 kB for the original, then 276.80 kB for the ranks",
    "original in float32",
    "original in bfloat16, 8 times",
    "shards on 2 ranks",
    "comparison",
]


def test_the_same(model: Path) -> None:
    done = verify(model / "full", model / "shards")
    assert done.returncode == 0, done.stderr
    assert done.stderr.splitlines() == PHASES
    lines = done.stdout.splitlines()
    assert lines[0].startswith("bytes: all equal, 276.80 kB in 30 tensors on 2 ranks, tp 2;")
    assert lines[1].startswith("forward: bfloat16 on 2 ranks (tp 2), cpu, threads; 2 x 32 tokens, seed 0;")
    assert lines[2].split() == ["layer", "error", "noise", "ratio"]
    places = [line.split() for line in lines[3 : lines.index("")]]
    assert [len(place) for place in places] == [4] * 11 and places[-1][0] == "logits"
    shards, own = (next(line for line in lines if line.startswith(name)) for name in ("shards ", "original's own "))
    assert shards.endswith("%") and len(shards.split()) == 5 and len(own.split()) == 6
    assert lines[-1].startswith("SAME: Every byte is the original's (276.80 kB in 30 tensors on 2 ranks, tp 2). The fo")


@pytest.mark.parametrize(
    ("more", "times", "runs"),
    [
        ((), 1, "10 runs of 64 tokens"),
        (("--backward", "--batch", "3"), 2, "10 runs of 96 tokens"),
        (("--compute-dtype", "float32"), 2, "10 runs of 64 tokens"),
        (("--streamed",), 1, "10 runs of 64 tokens"),
    ],
)
def test_what_it_takes_is_said_before(model: Path, more: tuple[str, ...], times: int, runs: str) -> None:
    """Of weights: of the original in higher precision, and of all ranks on this machine; streamed, of one block."""
    done = verify(model / "full", model / "shards", "--dry-run", *more)
    assert (done.returncode, done.stderr) == (0, "")
    blocks = Counter[tuple[Path, str]]()
    for file in sorted(model.glob("full/*.safetensors")) + sorted(model.glob("shards/*/*.safetensors")):
        for name, info in read_header(file).tensors.items():
            layer = re.match(r"model\.layers\.\d+", name)
            blocks[file, (layer[0] if layer else name) if "--streamed" in more else ""] += info.nbytes
    files = {file: max(size for (of, _), size in blocks.items() if of == file) for file, _ in blocks}
    original = 2 * times * files.pop(model / "full" / "model.safetensors")
    ranks = times * sum(files.values())
    amounts = f"{human_bytes(original)} for the original, then {human_bytes(ranks)} for the ranks; {runs}"
    assert done.stdout == f"forward: tp 2, cpu, threads: {amounts}\n"
    document = json.loads(verify(model / "full", model / "shards", "--dry-run", "--json", *more).stdout)["needs"]
    assert (document["original"], document["ranks"]) == (original, [ranks])


def test_what_cannot_run_is_said_before(model: Path) -> None:
    for more, text in ((("--exact-only",), "--exact-only runs none"), (("--device", "xpu"), "torch finds no accel")):
        done = verify(model / "full", model / "shards", "--dry-run", *more)
        assert done.returncode == 2 and text in done.stderr and not done.stdout
    assert verify(model / "full", model / "none", "--dry-run").returncode == 2


def test_different_names_tensor_and_layer(model: Path) -> None:
    done = verify(model / "full", model / "wrong")
    assert done.returncode == 1
    last = done.stdout.splitlines()[-1]
    tensor = "model.layers.1.mlp.gate_proj.weight"
    assert last.startswith(f"DIFFERENT: Bytes differ, first in tensor '{tensor}' at [0, 0] on rank 0")
    assert "'model.layers.1.mlp.down_proj'" in last
    assert "<- different, worst in token" in done.stdout


def test_what_the_forward_does_not_see_is_not_called_the_same_model(model: Path, tmp_path: Path) -> None:
    shards = shutil.copytree(model / "shards", tmp_path / "shards")
    change_tensor(shards / "rank-00-of-02/model.safetensors", "model.layers.1.mlp.gate_proj.weight", at=0, flip=1)
    (shards / "reshard.json").unlink()
    done = verify(model / "full", shards, "--report", tmp_path / "page.html")
    last, page = done.stdout.splitlines()[-1], (tmp_path / "page.html").read_text()
    assert done.returncode == 1 and last.startswith("DIFFERENT: Bytes differ, first in tensor")
    assert "The forward pass sees no difference: the worst place has" in last
    assert "same model" not in last and "same model" not in page


def test_bytes_alone(model: Path) -> None:
    for folder, code, word in (("shards", 0, "same"), ("wrong", 1, "different"), ("none", 2, "unchecked")):
        done = verify(model / "full", model / folder, "--exact-only", "--quiet")
        assert (done.returncode, done.stdout) == (code, f"{word}\n"), folder
        assert bool(done.stderr) == (code == 2)
        document = json.loads(verify(model / "full", model / folder, "--exact-only", "--json").stdout)
        assert (document["verdict"], document["forward"]) == (word, None)
    assert verify(model / "full", model / "none", "--exact-only").stdout == "UNCHECKED\n"


def test_what_could_not_be_run_is_no_difference(model: Path) -> None:
    done = verify(model / "full", model / "shards", "--prompt", "hello")
    assert done.returncode == 2
    assert done.stderr.startswith("Error: ")  # no byte was compared
    assert "\nHint: add one, or drop --prompt" in done.stderr
    assert done.stdout == "UNCHECKED\n"


def test_temporary_files_too_deep_for_a_socket(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    deep = tmp_path / "deep" / ("x" * 90)
    monkeypatch.setattr(tempfile, "tempdir", str(deep))
    monkeypatch.setitem(multiprocessing.current_process()._config, "tempdir", str(deep))  # type: ignore[attr-defined]
    monkeypatch.setattr(forkserver, "ensure_running", forkserver.ForkServer().ensure_running)  # none runs yet
    done = command("profile", model / "full", "--tp", "1")
    assert done.returncode == 2 and f"socket cannot be in {deep}" in done.stderr and "set TMPDIR" in done.stderr


def test_a_report_that_cannot_be_written(model: Path, tmp_path: Path) -> None:
    done = verify(model / "full", model / "shards", "--exact-only", "--report", tmp_path / "none" / "report.html")
    assert done.returncode == 2
    assert "report.html: there is no folder" in done.stderr and done.stdout == ""
    done = verify(model / "full", model / "shards", "--exact-only", "--report", "/proc/report.html")
    assert done.returncode == 2 and "SAME" in done.stdout, "the answer is known all the same"
    assert "Error: cannot write /proc/report.html: No such file or directory" in done.stderr


def test_hostile_names_do_not_reach_the_terminal(model: Path, tmp_path: Path) -> None:
    done = verify(model / "full", tmp_path / "\x1b[31mred", "--exact-only")
    assert done.returncode == 2 and "\x1b" not in done.stdout + done.stderr and "\\x1b[31mred" in done.stderr


def test_progress_on_a_terminal(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli, "_TICK", 0.02)
    ours, theirs = pty.openpty()
    with os.fdopen(ours, "rb", buffering=0) as screen, ThreadPoolExecutor() as reader:
        shown = reader.submit(_all_of, screen)
        with os.fdopen(theirs, "w") as terminal:
            done = command("verify", model / "full", model / "shards", "--backward", stderr=terminal, TERM="xterm")
        assert done.returncode == 0
        lines = shown.result().decode().split("\r\n")
    assert lines.pop() == ""
    at_the_end = [line.rpartition("\r")[2] for line in lines]
    phases = [re.sub(r": \d+ s\x1b\[K$", "", line) for line in at_the_end]
    phases[1] = PHASES[1]  # twice as much
    assert phases == [*PHASES, "gradients"]
    assert lines[3].count("\roriginal in bfloat16, 8 times: ") >= 3, (
        "it is drawn again while it lasts, not only as it begins and ends"
    )


def _all_of(screen: RawIOBase) -> bytes:
    """What is written to a terminal until its other side is closed."""
    shown = b""
    with suppress(OSError):  # all of the other side is closed
        while read := screen.read(65536):
            shown += read
    return shown


@pytest.fixture
def short() -> Iterator[Path]:
    """A folder whose name leaves room for that of a socket."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        yield Path(folder)


@pytest.mark.parametrize(
    ("phase", "seconds", "how"),
    [
        ("comparing bytes", 0, signal.SIGINT),
        ("comparing bytes", 1, signal.SIGINT),  # torch is being imported
        ("starting", 0, signal.SIGINT),
        ("starting", 1, signal.SIGTERM),  # what the ranks are forked from imports torch
        ("shards", 0, signal.SIGINT),
    ],
)
@thorough
def test_interrupted_at_any_moment(model: Path, short: Path, phase: str, seconds: float, how: signal.Signals) -> None:
    """One line, and nothing is left behind; the signal goes to all processes, as Ctrl-C in a terminal does."""
    process = subprocess.Popen(
        [sys.executable, "-m", "reshard", "verify", model / "full", model / "shards", "--streamed"],
        cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
        env={**os.environ, "TMPDIR": str(short)},
    )  # fmt: skip
    assert process.stderr is not None
    seen = [*itertools.takewhile(lambda line: not line.startswith(phase), iter(process.stderr.readline, ""))]
    assert process.poll() is None, seen
    time.sleep(seconds)
    os.killpg(process.pid, how)
    *before, last = process.stderr.readlines()
    assert (process.wait(60), process.stdout.read() if process.stdout else None) == (128 + how, "")
    assert last == "reshard: interrupted\n"
    assert {line.strip().partition(":")[0] for line in before} <= {phase.partition(":")[0] for phase in PHASES}
    wait_until(lambda: not session(process.pid), 10)
    assert not [path for path in short.iterdir() if not path.name.startswith("torchinductor_")]  # torch's own, empty


def test_interrupted_before_it_begins(tmp_path: Path) -> None:
    """While the command line itself is imported."""
    (tmp_path / "click.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGINT)\n")
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}:{ROOT}"}
    command = [sys.executable, "-m", "reshard", "--help"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "reshard: interrupted\n")


# ------------------------------------------------------------------------------------------------------ under torchrun


@thorough
def test_under_torchrun_all_ranks_end_with_the_answer(model: Path, tmp_path: Path) -> None:
    report = tmp_path / "report.html"
    done = verify(
        model / "full", model / "wrong", "--json", "--report", report, launcher=TORCHRUN, TMPDIR=str(tmp_path)
    )
    assert not list(tmp_path.glob("reshard-*"))
    assert done.returncode == 1, done.stderr
    document = json.loads(done.stdout)  # once, that is
    assert (document["verdict"], document["forward"]["ranks"]) == ("different", 2)
    assert "exitcode  : 1" in done.stderr and "exitcode  : 2" not in done.stderr
    assert "Different" in report.read_text(encoding="utf-8")


def ranks_of(model: Path, shards: list[Path], *arguments: str) -> list[Done]:
    """What each rank ends with, started as by a launcher that is not torch's."""
    return by_hand([partial(by_hand_command, "verify", f"{model / 'full'}", str(path), *arguments) for path in shards])


@pytest.mark.parametrize(("shards", "code", "answer"), [("shards", 0, "same\n"), ("wrong", 1, "different\n")])
@thorough
def test_ranks_of_another_launcher_end_with_one_code(model: Path, shards: str, code: int, answer: str) -> None:
    ranks = ranks_of(model, [model / shards] * 2, "--quiet")
    assert [rank.returncode for rank in ranks] == [code, code], ranks
    assert [rank.stdout for rank in ranks] == [answer, ""]


@thorough
def test_the_error_of_any_rank_is_told_once_and_soon(model: Path, tmp_path: Path) -> None:
    """As on a node where the shards cannot be read, while the first rank waits in a collective for it."""
    shutil.copytree(model / "shards", tmp_path / "shards")
    (tmp_path / "shards" / "rank-01-of-02" / "config.json").unlink()
    start = time.monotonic()
    ranks = ranks_of(model, [model / "shards", tmp_path / "shards"], "--json", "--timeout", "100")
    assert time.monotonic() - start < 90
    assert [rank.returncode for rank in ranks] == [2, 2]
    assert json.loads(ranks[0].stdout)["verdict"] == "unchecked" and ranks[1].stdout == ""
    assert "config.json" in ranks[0].stderr and "Error" not in ranks[1].stderr


@thorough
def test_an_answer_that_cannot_be_printed_ends_all_ranks_soon(model: Path, tmp_path: Path) -> None:
    """As on a full disk, while the first rank waits in a collective for one that has failed."""
    shutil.copytree(model / "shards", tmp_path / "shards")
    (tmp_path / "shards" / "rank-01-of-02" / "config.json").unlink()
    start = time.monotonic()
    ranks = by_hand([
        partial(by_hand_command, "verify", f"{model / 'full'}", str(path), "--json", "--timeout", "100", stdout=out)
        for path, out in ((model / "shards", "/dev/full"), (tmp_path / "shards", None))
    ])  # fmt: skip
    assert time.monotonic() - start < 90
    assert [rank.returncode for rank in ranks] == [2, 2]
    assert "the result cannot be printed: No space left on device" in ranks[0].stderr


@thorough
def test_the_wrong_number_of_ranks(model: Path) -> None:
    ranks = ranks_of(model, [model / "shards"])
    assert ranks[0].returncode == 2 and "the launcher started 1 ranks, but 2 are needed" in ranks[0].stderr
