"""What predicts further tokens for a model, published apart from it: split, merged and compared; its holes are seen."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from reshard.api import merge, split
from reshard.formats.errors import CheckpointError
from reshard.source.opening import open_source
from reshard.verify.bytes.exact import verify_exact
from tests import remote, store
from tests.support import changed_tensors, contents

Rename = Callable[[str], str | None]
NEXTN = {"num_hidden_layers": 1, "architectures": ["DeepseekV3ForCausalLMNextN"]}


def apart(name: str, folder: Path, kept: Rename, **settings: Any) -> Path:
    """The tensors of a small model that have a name in a checkpoint of their own, with its config.json."""
    whole = store.made(f"remote-{name}", lambda to: remote.save(name, to)) if name in remote.REMOTE else None
    whole = whole or store.checkpoint(name)
    found = {kept(key): tensor for key, tensor in load_file(whole / "model.safetensors").items()}
    folder.mkdir()
    config = json.loads((whole / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | settings))
    save_file({key: tensor for key, tensor in found.items() if key}, folder / "model.safetensors", {"format": "pt"})
    return folder


def layer_of_deepseek(key: str) -> str | None:
    return key if key.startswith("model.layers.3.") else None


def nextn_of_deepseek(key: str) -> str | None:
    """As SGLang's script exports it: its embedding and head are those of the model."""
    is_shared = "embed_tokens" in key or "shared_head.head" in key
    return key.replace("layers.3.", "layers.0.") if layer_of_deepseek(key) and not is_shared else None


def mtp(key: str) -> str | None:
    return key if "mtp" in key else None


CASES: dict[str, tuple[str, Rename, dict[str, Any]]] = {
    "deepseek": ("deepseek_v3-mtp", layer_of_deepseek, {}),
    "nextn": ("deepseek_v3-mtp", nextn_of_deepseek, NEXTN),
    "mimo": ("mimo", mtp, {}),
}


@pytest.mark.parametrize("case", CASES)
def test_mtp_layers_apart_are_split_merged_and_compared(case: str, tmp_path: Path) -> None:
    name, kept, settings = CASES[case]
    draft = apart(name, tmp_path / "draft", kept, **settings)
    split(draft, tmp_path / "out", tp=2)
    assert verify_exact(open_source(draft), tmp_path / "out").verdict == "same"
    rank = load_file(tmp_path / "out" / "rank-01-of-02" / "model.safetensors")
    assert any(tensor.shape != load_file(draft / "model.safetensors")[key].shape for key, tensor in rank.items())
    merge(tmp_path / "out", tmp_path / "merged")
    assert contents(tmp_path / "merged") == contents(draft)


@pytest.mark.parametrize(
    ("case", "hole"), [("deepseek", "o_proj"), ("deepseek", "experts.1."), ("nextn", "o_proj"), ("mimo", "up_proj")]
)
def test_a_hole_in_a_draft_is_seen(case: str, hole: str, tmp_path: Path) -> None:
    name, kept, settings = CASES[case]
    draft = apart(name, tmp_path / "draft", lambda key: None if hole in key else kept(key), **settings)
    with pytest.raises(CheckpointError, match="is missing"):
        open_source(draft)


def test_a_model_without_its_layers_is_no_draft(tmp_path: Path) -> None:
    ends = apart("deepseek_v3-mtp", tmp_path / "ends", lambda key: None if "layers" in key else key)
    with pytest.raises(CheckpointError, match=r"'model\.layers\.0\..* is missing"):
        open_source(ends)


@pytest.mark.parametrize("name", ["speculators_eagle3", "eagle_config", "llama-eagle3", "medusa"])
def test_a_draft_whose_ends_are_the_models_is_whole(name: str, tmp_path: Path) -> None:
    """The embedding and the head may be those of the model for which it drafts; a layer's tensors are not."""
    shared = {"eagle_config": "lm_head", "medusa": "token_map"}.get(name, "embed_tokens")
    draft = apart(name, tmp_path / "draft", lambda key: None if shared in key else key)
    split(draft, tmp_path / "out", tp=2)
    assert verify_exact(open_source(draft), tmp_path / "out").verdict == "same"
    merge(tmp_path / "out", tmp_path / "merged")
    assert contents(tmp_path / "merged") == contents(draft)
    if name not in {"medusa", "llama-eagle3"}:  # they have no numbered layers
        hole = apart(name, tmp_path / "hole", lambda key: None if "v_proj" in key else key)
        with pytest.raises(CheckpointError, match=r"v_proj\.weight' is missing"):
            open_source(hole)


def test_the_tokens_of_a_draft_are_the_same_on_every_rank(tmp_path: Path) -> None:
    """What has whole numbers and truth values in it is kept as it is, and the head's rows are dealt."""
    draft = apart("speculators_eagle3", tmp_path / "draft", lambda key: key)
    with changed_tensors(draft / "model.safetensors") as tensors:
        tensors["d2t"] = torch.arange(38) * 2
        tensors["t2d"] = torch.arange(101) % 3 == 0
    split(draft, tmp_path / "out", tp=4)
    parts = [load_file(tmp_path / "out" / f"rank-{rank:02d}-of-04" / "model.safetensors") for rank in range(4)]
    assert all(torch.equal(part[key], tensors[key]) for part in parts for key in ("d2t", "t2d"))
    assert torch.equal(torch.cat([part["lm_head.weight"] for part in parts])[:38], tensors["lm_head.weight"])
    assert verify_exact(open_source(draft), tmp_path / "out").verdict == "same"
