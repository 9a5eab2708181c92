"""What a report calls files: as they were given, or by what they stand in for."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from reshard.api import split
from tests import store
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


@pytest.mark.parametrize(("form", "told"), [("vllm", "is in the format vllm"), (None, "is split itself")])
def test_an_original_that_is_none_is_refused(form: str | None, told: str, tmp_path: Path) -> None:
    full = store.checkpoint("llama")
    split(full, tmp_path / "shards", tp=2, format=form)
    done = command("verify", "shards", full, "--exact-only", cwd=tmp_path)
    assert done.returncode == 2 and done.stderr.splitlines()[-2:] == [
        f"Error: shards {told}: it cannot be the original",
        f"Hint: give the full checkpoint first; 'reshard diff shards {full}' compares any two forms, tensor by tensor",
    ]
    hint = re.search("'reshard (.*)'", done.stderr)
    assert hint is not None and command(*hint[1].split(), cwd=tmp_path).stdout.startswith("SAME")


def test_a_training_run_is_compared_as_the_hint_says(tmp_path: Path) -> None:
    full = store.checkpoint("llama")
    split(full, tmp_path / "run", format="dcp")
    for name in ("config.json", "reshard.json"):
        (tmp_path / "run" / name).unlink()
    split(tmp_path / "run", tmp_path / "out", tp=2, config=full, dtype="bf16")
    for more in ((), ("--dry-run",), ("--exact-only", "--dtype", "bf16")):
        done = command("verify", "run", "out", "--config", full, *more, cwd=tmp_path)
        hint = re.search("'reshard (diff run out --config .*)'", done.stderr)
        assert done.returncode == 2 and hint is not None, done.stderr
    assert command(*hint[1].split(), cwd=tmp_path).stdout.startswith("SAME")
