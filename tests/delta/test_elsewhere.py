"""Deltas in a bucket and behind a URL, of another model, interrupted, and on a full disk."""

from __future__ import annotations

import json
import resource
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from reshard.api import diff, split
from reshard.delta import storing
from reshard.formats.errors import CheckpointError
from tests import store
from tests.marks import thorough
from tests.slow import Turns
from tests.stores.store_server import StoreServer, upload
from tests.support import change_tensor, command, contents, write_checkpoint

NORM, ROOT = "model.norm.weight", Path(__file__).parents[2]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("elsewhere") / "base", files=2)


@pytest.fixture(scope="module")
def tuned(base: Path) -> Path:
    folder = shutil.copytree(base, base.parent / "tuned")
    change_tensor(folder / "model-00002-of-00002.safetensors", NORM)
    return folder


@pytest.fixture(scope="module")
def delta(base: Path, tuned: Path) -> Path:
    diff(base, tuned, out=base.parent / "delta")
    return base.parent / "delta"


@pytest.fixture
def server(base: Path, delta: Path, tmp_path: Path) -> Iterator[StoreServer]:
    (tmp_path / "bucket").mkdir()
    with StoreServer(tmp_path / "bucket") as server:
        upload(base, server, "base")
        upload(delta, server, "delta")
        yield server


@thorough
def test_a_bucket_and_a_web_server(server: StoreServer, tuned: Path, tmp_path: Path) -> None:
    cold = ("--cache-dir", tmp_path / "cache")
    for number, place in enumerate(("s3://bucket", f"{server.url}/bucket")):
        patched, out = tmp_path / f"patched-{number}", tmp_path / f"out-{number}"
        done = command("patch", f"{place}/base", f"{place}/delta", patched, *cold, **server.environment)
        assert done.returncode == 0 and contents(patched) == contents(tuned), done.stderr
        line = ("split", f"{place}/base", out, "--patch", f"{place}/delta", "--tp", "2", *cold)
        assert command(*line, "--dry-run", **server.environment).returncode == 0 and not out.exists()
        assert command(*line, **server.environment).returncode == 0
        proof = ("verify", f"{place}/base", out, "--patch", f"{place}/delta", "--exact-only", "-q", *cold)
        assert command(*proof, **server.environment).stdout == "same\n"
    line = ("split", "s3://bucket/base", "s3://bucket/out", "--patch", "s3://bucket/delta", "--tp", "2", *cold)
    assert command(*line, **server.environment).returncode == 0
    done = command("verify", tuned, "s3://bucket/out", "--exact-only", "-q", *cold, **server.environment)
    assert done.stdout == "same\n"


def test_a_delta_that_is_replaced_meanwhile(server: StoreServer, base: Path, tmp_path: Path) -> None:
    """What is in the cache is of one state; another state is another copy."""
    cold = ("--cache-dir", tmp_path / "cache")
    line = ("patch", base, "s3://bucket/delta", tmp_path / "out", *cold)
    assert command(*line, "--dry-run", **server.environment).returncode == 0
    change_tensor(server.root / "delta" / "delta.safetensors", f"{NORM}.delta_values")
    done = command(*line, **server.environment)
    assert done.returncode == 1 and "its result has another checksum" in done.stderr


def test_a_delta_is_not_written_to_a_bucket(base: Path, tuned: Path, tmp_path: Path) -> None:
    done = command("diff", base, tuned, "--out", "s3://bucket/delta", cwd=tmp_path)
    assert done.returncode == 2 and "a folder of this machine" in done.stderr and not list(tmp_path.iterdir())


@pytest.mark.parametrize("model", ["qwen3", "mixtral"])
def test_a_delta_of_another_model(delta: Path, tmp_path: Path, model: str) -> None:
    for line in (
        ("patch", store.checkpoint(model), delta, tmp_path / "out"),
        ("patch", store.checkpoint(model), delta, tmp_path / "out", "--dry-run"),
        ("split", store.checkpoint(model), tmp_path / "out", "--patch", delta, "--tp", "1"),
    ):
        done = command(*line)
        assert done.returncode == 1 and "is for another base" in done.stderr and not (tmp_path / "out").exists()
        assert done.stderr.count("\n") == 2 and len(done.stderr) < 600


def test_a_wrong_base_is_found_before_anything_is_written_also_in_a_trial(
    tuned: Path, delta: Path, tmp_path: Path
) -> None:
    for options in ((), ("--dry-run",)):
        done = command("split", tuned, tmp_path / "out", "--patch", delta, "--tp", "2", *options)
        assert done.returncode == 1 and f"tensor '{NORM}' has another content" in done.stderr
        assert not list(tmp_path.iterdir())


def test_a_full_disk(base: Path, tuned: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """When the file is made as long as it will be, or as it grows: nothing is left, and with room the same works."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    for is_reserved in (True, False):
        with monkeypatch.context() as patch, pytest.raises(CheckpointError, match="File too large"):
            if not is_reserved:
                patch.setattr(storing, "reserve", lambda *_: None)
            resource.setrlimit(resource.RLIMIT_FSIZE, (64, hard))
            try:
                diff(base, tuned, out=tmp_path / "delta")
            finally:
                resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert not list(tmp_path.iterdir())
    diff(base, tuned, out=tmp_path / "delta")


@pytest.mark.parametrize("line", ["diff BASE TUNED --out OUT", "split BASE OUT --patch DELTA --tp 2 --workers 1"])
def test_interrupted(
    base: Path, tuned: Path, delta: Path, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, line: str
) -> None:
    """At any moment: nothing is there under the name of the output, and the same command then makes it."""
    names = {"BASE": base, "TUNED": tuned, "DELTA": delta, "OUT": tmp_path / "out"}
    words = [str(names.get(word, word)) for word in line.split()]
    slowly = [sys.executable, "-m", "tests.slow", *words]
    turns, pipe = Turns(tmp_path_factory.mktemp("turns") / "of"), subprocess.PIPE
    process = subprocess.Popen(slowly, cwd=ROOT, env=turns.environment, stdout=pipe, stderr=pipe, text=True)
    turns.until(process, lambda: any(tmp_path.iterdir()))
    turns.end(process, signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130 and "reshard: interrupted" in errors, errors
    assert not (tmp_path / "out").exists()
    if line.startswith("diff"):
        assert not list(tmp_path.iterdir())
    assert command(*words).returncode in (0, 1)
    if line.startswith("diff"):
        assert json.loads((tmp_path / "out" / "delta.json").read_text())
    else:
        split(tuned, tmp_path / "direct", tp=2)
        assert [*contents(tmp_path / "out")] == [*contents(tmp_path / "direct")]
