"""What a report calls files: as they were given, or by what they stand in for."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from reshard.api import merge, split
from tests import store
from tests.marks import one_of_each
from tests.support import change_tensor, command, write_checkpoint

NORM = "model.norm.weight"


def test_files_of_this_machine_are_called_as_they_were_given(tmp_path: Path) -> None:
    """Also where the folder's name is a part of other names: of files and of tensors."""
    split(write_checkpoint(tmp_path / "model"), tmp_path / "out", tp=2)
    shard = "out/rank-01-of-02/model.safetensors"
    change_tensor(tmp_path / shard, NORM)
    (tmp_path / "out/model.txt").write_text("extra")
    done = command("verify", "model", "out", "--exact-only", "--json", cwd=tmp_path)
    found = json.loads(done.stdout)["exact"]
    assert (found["first"]["tensor"], found["first"]["file"]) == (NORM, shard)
    assert found["first"]["original_file"] == "model/model.safetensors"
    assert found["extra"] == ["model.txt"]


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
