"""Each rank's part of a draft has the elements that vLLM 0.32 holds there (tests/oracles/vllm/dump_draft.py)."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from reshard.api import split
from tests.oracles.vllm import dump_draft

DRAFTS: Mapping[str, Any] = json.loads(dump_draft.FIXTURE.read_text())
TYPES = {"mimo-mtp": {"model_type": "mimo"}}
"""vLLM has no config of MiMo's own, and was given that of Qwen 2."""
JOINED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}


def held(parameter: Mapping[str, Any]) -> torch.Tensor:
    """The numbers of the elements that a rank of vLLM has."""
    pieces = [torch.arange(count) * (first > 0) + first for first, count in parameter["runs"]]
    return torch.cat(pieces).view(parameter["shape"])


def names_of(parameter: str) -> list[str]:
    """The tensors that a parameter of vLLM's is made of."""
    name = parameter.replace("mtp_block.", "").replace("mtp_layers.3.", "mtp_layers.0.")
    name = {"draft_id_to_target_id": "d2t"}.get(name, name)
    for joined, parts in JOINED.items():
        if joined in name:
            return [name.replace(joined, part) for part in parts]
    return [name]


@pytest.mark.parametrize("name", DRAFTS)
def test_a_rank_has_what_vllm_has(name: str, tmp_path: Path) -> None:
    draft = DRAFTS[name]
    dump_draft.make(tmp_path / "draft", draft["config"] | TYPES.get(name, {}), draft["tensors"])
    split(tmp_path / "draft", tmp_path / "out", tp=2, pad_vocab_to=64)
    for rank, theirs in enumerate(draft["ranks"]):
        ours = load_file(tmp_path / "out" / f"rank-{rank:02d}-of-02" / "model.safetensors")
        plain = {re.sub(r"^model\.", "", key).replace("midlayer.", "layers.0."): part for key, part in ours.items()}
        compared = set()
        for parameter, found in theirs.items():
            names = names_of(parameter.removeprefix("model."))
            wanted = torch.cat([plain[each] for each in names])
            assert torch.equal(held(found).double(), wanted.double()), (rank, parameter)
            compared |= {*names}
        left = plain.keys() - compared
        assert all("t2d" in key or (name == "mimo-mtp" and not key.startswith("mtp_layers")) for key in left), left
