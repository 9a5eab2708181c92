"""Merging what a program stores reads each byte once, and checks each byte."""

from __future__ import annotations

from pathlib import Path

import pytest

from formats.errors import MismatchError
from formats.files.safetensors import read_header
from reshard.api import merge, split
from tests import store
from tests.support import change_tensor


@pytest.mark.parametrize("model", ["llama", "gpt_oss", "mamba2", "mixtral"])
def test_no_file_is_read_again_for_its_checksum(model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def again(file: object) -> str:
        raise AssertionError(f"{file} is read a second time")

    monkeypatch.setattr("reshard.writing.publishing.checksum_of", again)
    split(store.checkpoint(model), tmp_path / "shards", 2, form="vllm")
    merge(tmp_path / "shards", tmp_path / "merged")


@pytest.mark.parametrize(("model", "name"), [("llama", "k_scale"), ("gpt_oss", "w2_bias"), ("mamba2", ".A")])
def test_what_merge_does_not_need_is_checked_too(model: str, name: str, tmp_path: Path) -> None:
    split(store.checkpoint(model), tmp_path / "shards", 2, form="vllm")
    shard = max((tmp_path / "shards").glob("model-rank-1*.safetensors"))
    found = next(each for each in read_header(shard).tensors if name in each)
    change_tensor(shard, found)
    with pytest.raises(MismatchError, match=f"{shard.name} has the checksum"):
        merge(tmp_path / "shards", tmp_path / "merged")
    assert not (tmp_path / "merged").exists()
