"""Merging what a program stores reads each byte once, and checks each byte."""

from __future__ import annotations

import os
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from reshard.api import merge, split
from reshard.formats.errors import CheckpointError, MismatchError
from reshard.formats.files.safetensors import read_header
from reshard.source.opening import open_source
from tests import store
from tests.support import change_tensor


@pytest.mark.parametrize("model", ["llama", "gpt_oss", "mamba2", "mixtral"])
def test_no_file_is_read_again_for_its_checksum(model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def again(file: object) -> str:
        raise AssertionError(f"{file} is read a second time")

    monkeypatch.setattr("reshard.writing.publish.checksum_of", again)
    split(store.checkpoint(model), tmp_path / "shards", tp=2, format="vllm")
    merge(tmp_path / "shards", tmp_path / "merged")


@pytest.mark.parametrize("form", ["megatron-legacy", "dcp"])
def test_a_folder_that_does_not_say_its_format_is_opened_with_each_file_read_once(
    form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    split(store.checkpoint("llama"), tmp_path / "out", tp=2, format=form)
    (tmp_path / "out" / "reshard.json").unlink()
    reads, own = Counter[str](), os.open

    def counted(path: Any, *args: Any, **options: Any) -> int:
        reads[str(path)] += 1
        return own(path, *args, **options)

    monkeypatch.setattr(os, "open", counted)
    open_source(tmp_path / "out")
    documents = ("checkpointed_iteration.txt", "config.json")  # this also names files beside the weights
    several = {path for path, count in reads.items() if count > 1 and not path.endswith(documents)}
    assert str(tmp_path / "out" / "config.json") in reads and not several


@pytest.mark.parametrize(("model", "name"), [("llama", "k_scale"), ("gpt_oss", "w2_bias"), ("mamba2", ".A")])
def test_what_merge_does_not_need_is_checked_too(model: str, name: str, tmp_path: Path) -> None:
    split(store.checkpoint(model), tmp_path / "shards", tp=2, format="vllm")
    shard = max((tmp_path / "shards").glob("model-rank-1*.safetensors"))
    found = next(each for each in read_header(shard).tensors if name in each)
    change_tensor(shard, found)
    with pytest.raises(MismatchError, match=f"{shard.name} has the checksum"):
        merge(tmp_path / "shards", tmp_path / "merged")
    assert not (tmp_path / "merged").exists()


@pytest.mark.parametrize(
    ("form", "name"),
    [
        ("megatron", "release"),
        ("megatron", "latest_checkpointed_iteration.txt"),
        ("megatron", "release/metadata.json"),
        ("dcp", ".metadata"),
        ("vllm", "model-rank-0-part-0.safetensors"),
        ("vllm", "reshard-kept.safetensors"),
        (None, "rank-00-of-02"),
    ],
)
def test_a_file_of_the_source_with_the_name_of_one_of_the_format(form: str | None, name: str, tmp_path: Path) -> None:
    """It would be lost, or stand in the place of the format's own."""
    model = "mamba2" if "kept" in name else "llama"
    source = Path(shutil.copytree(store.checkpoint(model), tmp_path / "source"))
    (source / name).parent.mkdir(exist_ok=True)
    (source / name).write_text("of another")
    with pytest.raises(CheckpointError, match=f"'{name.partition('/')[0]}.*' has the name of what the format writes"):
        split(source, tmp_path / "out", tp=2, format=form)
    assert not list(tmp_path.glob("out*"))
    (source / name).rename(tmp_path / "moved")
    if "/" in name:
        (source / name).parent.rmdir()
    assert split(source, tmp_path / "out", tp=2, format=form).complete
