"""What a report calls files: as they were given, or by what they stand in for."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from reshard.api import merge, split
from tests import store
from tests.marks import one_of_each
from tests.support import change_tensor, command

NORM = "model.norm.weight"


RUNS = ("dcp", "megatron", "transformers", "megatron-legacy", "vllm", "reshard")


@pytest.mark.parametrize("form", one_of_each(RUNS))
def test_an_original_that_is_split_is_compared_and_not_run(form: str, tmp_path: Path) -> None:
    """What a trainer saved, say: its tensors are the original's, whatever was made of them; one wrong bit is found."""
    full = store.checkpoint("llama")
    split(full, run := tmp_path / "run", tp=2, format=None if form == "reshard" else form)
    given: tuple[object, ...] = ()
    if form != "reshard":
        for name in ("config.json", "reshard.json"):
            (run / name).unlink()
        given = ("--config", full)
    config: dict[str, Any] = {"config": full} if given else {}
    split(run, tmp_path / "out", tp=4, **config)
    split(run, tmp_path / "cast", tp=2, format="vllm", dtype="bf16", **config)
    merge(run, tmp_path / "merged", **config)
    split(full, tmp_path / "straight", tp=2)  # its manifest is of files with the tensors in another order
    for out in ("out", "merged", "straight"):
        done = command("verify", "run", out, *given, cwd=tmp_path)
        assert done.returncode == 0 and "No forward pass was run: run is not a full checkpoint" in done.stdout, (
            done.stderr
        )
        last = done.stdout.splitlines()[-1]
        assert "the original, put together by reshard's merge" in last and "; no forward" in last
    done = command("verify", "run", "cast", "--dtype", "bf16", "--exact-only", *given, cwd=tmp_path)
    assert done.returncode == 0 and "after a cast to bf16" in done.stdout, done.stderr
    for more in (("--dry-run",), ("--exact-only", "--loader", sys.executable)):
        done = command("verify", "run", "merged", *more, *given, cwd=tmp_path)
        assert done.returncode == 2 and "Error: run is not a full checkpoint, and only one can run" in done.stderr
    change_tensor(tmp_path / "out/rank-01-of-04/model.safetensors", NORM)
    done = command("verify", "run", "out", *given, "-q", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (1, "different\n")
