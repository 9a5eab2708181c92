"""What a report calls files: as they were given, or by what they stand in for."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from reshard.api import split
from tests import store
from tests.support import change_tensor, command, write_checkpoint
from verify.bytes.exact_report import ExactReport, FirstDifference

NORM = "model.norm.weight"


def test_files_of_this_machine_are_called_as_they_were_given(tmp_path: Path) -> None:
    """Also where the folder's name is a part of other names: of files and of tensors."""
    split(write_checkpoint(tmp_path / "model"), tmp_path / "out", 2)
    shard = "out/rank-01-of-02/model.safetensors"
    change_tensor(tmp_path / shard, NORM)
    (tmp_path / "out/model.txt").write_text("extra")
    done = command("verify", "model", "out", "--exact-only", "--json", cwd=tmp_path)
    found = json.loads(done.stdout)["exact"]
    assert (found["first"]["tensor"], found["first"]["file"]) == (NORM, shard)
    assert found["first"]["original_file"] == "model/model.safetensors"
    assert found["extra"] == ["model.txt"]


def test_only_whole_folders_are_renamed() -> None:
    files = "in/model/a.safetensors", "model/b.safetensors"
    first = FirstDifference("model", (0,), 0, files[0], 0, b"", b"", files[1], 0)
    problems = "model/c and 'model.d' and model-2/e", "the checksum of model/f is x", "model is split"
    report = ExactReport("tp 1", 1, 1, 1, first, problems=problems, extra=("rank 0: model.x",))
    found = report.calling({"model": r"s3://\1"})
    assert found.first is not None
    assert (found.first.file, found.first.original_file) == (files[0], r"s3://\1/b.safetensors")
    assert found.problems[1:] == (r"the checksum of s3://\1/f is x", r"s3://\1 is split")
    assert found.problems[0] == r"s3://\1/c and 'model.d' and model-2/e" and found.extra == report.extra


@pytest.mark.parametrize(("form", "told"), [("vllm", "is in the format vllm"), (None, "is split itself")])
def test_an_original_that_is_none_is_refused(form: str | None, told: str, tmp_path: Path) -> None:
    full = store.checkpoint("llama")
    split(full, tmp_path / "shards", 2, form=form)
    done = command("verify", "shards", full, "--exact-only", cwd=tmp_path)
    assert done.returncode == 2 and done.stderr.splitlines()[-2:] == [
        f"Error: shards {told}: it cannot be the original",
        "Hint: give the full checkpoint first, then the shards; 'reshard merge shards OUT' makes one",
    ]
