"""Standard streams that are closed, or files on a full disk: what has been done is done, and the exit code says so."""

from __future__ import annotations

import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.marks import thorough
from tests.support import contents, write_checkpoint

pytestmark = thorough


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("streams")
    write_checkpoint(folder / "model")
    assert shell("split model shards --tp 2", folder).returncode == 0
    return folder


def shell(line: str, folder: Path, redirected: str = "") -> subprocess.CompletedProcess[str]:
    text = f"{shlex.quote(sys.executable)} -m reshard {line} {redirected}"
    environment = {"PYTHONPATH": str(Path(__file__).parents[1]), "PATH": "/usr/bin:/bin"}
    return subprocess.run(["sh", "-c", text], cwd=folder, env=environment, capture_output=True, text=True)


CLOSED = ("<&-", ">&-", "2>&-", ">&- 2>&-", "<&- >&- 2>&-")


@pytest.mark.parametrize("redirected", [*CLOSED, "2>/dev/full"])
@pytest.mark.parametrize("line", ["split model {} --tp 2", "split model {} --tp 2 --as vllm --json", "merge shards {}"])
def test_an_output_is_made_without_a_stream(line: str, redirected: str, made: Path, tmp_path: Path) -> None:
    done = shell(line.format(tmp_path / "out"), made, redirected)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert shell(line.format(tmp_path / "plain"), made).returncode == 0
    assert {**contents(tmp_path / "out"), "reshard.json": b""} == {**contents(tmp_path / "plain"), "reshard.json": b""}


@pytest.mark.parametrize("line", ["split model {} --tp 2", "split model {} --tp 2 --json", "merge shards {} -q"])
def test_a_summary_that_cannot_be_printed_is_no_failure(line: str, made: Path, tmp_path: Path) -> None:
    done = shell(line.format(tmp_path / "out"), made, ">/dev/full")
    assert done.returncode == 0, done.stderr
    assert done.stderr == ("Warning: this has been done, but the result cannot be printed: No space left on device\n")
    assert (tmp_path / "out").is_dir() and not (tmp_path / "out.partial").exists()


@pytest.mark.parametrize("line", ["inspect shards", "plan model", "formats", "models --json", "--help", "plan --help"])
def test_a_result_that_cannot_be_printed_is_a_failure(line: str, made: Path) -> None:
    done = shell(line, made, ">/dev/full")
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1 and "No space left on device" in done.stderr, done.stderr


@pytest.mark.parametrize(
    ("line", "code"),
    [("inspect shards", 0), ("inspect none", 2), ("plan model", 0), ("verify model shards --exact-only", 0)],
)  # fmt: skip
@pytest.mark.parametrize("redirected", [*CLOSED, "2>/dev/full"])
def test_a_closed_stream_changes_no_exit_code(line: str, code: int, redirected: str, made: Path) -> None:
    done = shell(line, made, redirected)
    assert done.returncode == code and "Traceback" not in done.stderr
