"""Tied models in formats that store a tied table under both names: the copy comes and goes with the format."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from reshard.api import merge, split
from reshard.formats.errors import MismatchError
from reshard.verify.bytes.exact import verify_exact
from tests import store
from tests.marks import thorough
from tests.support import change_tensor, contents, without_manifest

pytestmark = thorough

TIED = ["llama-tied", "qwen3-tied", "gemma", "bloom", "falcon-7b", "cohere", "gpt2", "gpt_bigcode", "mamba"]
MODULES = {"format": "dcp", "names": "modules"}
COPIED = [(name, MODULES) for name in TIED] + [("qwen3-tied", {"format": "torchtitan"})]


def _tied(name: str) -> Path:
    original = store.checkpoint(name)
    assert "lm_head.weight" not in load_file(original / "model.safetensors")
    return original


@pytest.mark.parametrize(("name", "form"), COPIED)
def test_what_is_written_can_be_merged_and_split_again(name: str, form: dict[str, Any], tmp_path: Path) -> None:
    original = _tied(name)
    split(original, tmp_path / "out", tp=2, **form)
    source = json.loads((tmp_path / "out" / "reshard.json").read_text())["source"]
    assert all(file["checksum"] for file in source["files"])
    merge(tmp_path / "out", tmp_path / "merged")
    assert contents(tmp_path / "merged") == contents(original)
    split(tmp_path / "out", tmp_path / "own", tp=4)
    split(original, tmp_path / "direct", tp=4)
    assert without_manifest(tmp_path / "own") == without_manifest(tmp_path / "direct")


@pytest.mark.parametrize(("name", "form"), COPIED)
def test_an_undamaged_source_in_boxes_is_not_called_damaged(name: str, form: dict[str, Any], tmp_path: Path) -> None:
    original = _tied(name)
    split(original, tmp_path / "boxes", tp=2, format="transformers")
    split(tmp_path / "boxes", tmp_path / "out", tp=2, **form)
    split(original, tmp_path / "direct", tp=2, **form)
    assert without_manifest(tmp_path / "out") == without_manifest(tmp_path / "direct")
    merge(tmp_path / "out", tmp_path / "merged")
    assert contents(tmp_path / "merged") == contents(original)


def test_a_damaged_source_of_a_copy_is_still_seen(tmp_path: Path) -> None:
    split(_tied("qwen3-tied"), tmp_path / "boxes", tp=2, format="transformers")
    file = min((tmp_path / "boxes").glob("*.safetensors"))
    change_tensor(file, "model.embed_tokens.weight")
    with pytest.raises(MismatchError, match=r"should be .model.embed_tokens.weight. once more"):
        split(tmp_path / "boxes", tmp_path / "out", tp=2, **MODULES)
    assert not (tmp_path / "out").exists()


def test_verify_compares_the_copy(tmp_path: Path) -> None:
    original = _tied("qwen3-tied")
    split(original, tmp_path / "out", tp=1, **MODULES)
    assert verify_exact(store.source("qwen3-tied"), tmp_path / "out").verdict == "same"
    (file,) = (tmp_path / "out").glob("*.distcp")
    table = load_file(original / "model.safetensors")["model.embed_tokens.weight"].numpy().tobytes()
    data = file.read_bytes()
    assert data.count(table) == 2
    at = data.rfind(table)
    file.write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
    report = verify_exact(store.source("qwen3-tied"), tmp_path / "out")
    assert report.verdict == "different"
