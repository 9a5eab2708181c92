"""Architectures whose modelling code transformers does not have: every route, every byte, and where packed rows go."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file

from reshard.api import merge, split
from reshard.planning.degrees import valid_degrees
from reshard.storage.source import open_source
from tests import remote, zoo
from tests.support import contents, without_manifest


@pytest.mark.parametrize("name", remote.REMOTE)
def test_every_route_gives_the_same_bytes(name, tmp_path):
    entry = remote.REMOTE[name]
    original = remote.save(name, tmp_path / "original")
    before = contents(original)
    model = open_source(original).plan.model
    assert tuple(degree for degree in valid_degrees(model) if degree in zoo.DEGREES) == entry.degrees
    low, high = entry.degrees[0], entry.degrees[-1]
    for tp in {low, high}:
        split(original, tmp_path / f"tp{tp}", tp)
    split(tmp_path / f"tp{low}", tmp_path / "again", high)
    assert without_manifest(tmp_path / "again") == without_manifest(tmp_path / f"tp{high}")
    merge(tmp_path / "again", tmp_path / "merged")
    assert contents(tmp_path / "merged") == before


@pytest.mark.parametrize("name", [name for name, entry in remote.REMOTE.items() if entry.parts])
def test_packed_tensors_are_taken_apart_as_the_model_does(name, tmp_path):
    original = remote.save(name, tmp_path / "original")
    split(original, tmp_path / "tp2", 2)
    full = load_file(original / "model.safetensors")
    held = load_file(tmp_path / "tp2/rank-01-of-02/model.safetensors")
    for key, (dim, ranges) in remote.REMOTE[name].parts.items():
        wanted = torch.cat([full[key].narrow(dim, begin, end - begin) for begin, end in ranges], dim)
        assert torch.equal(held[key], wanted), key


def test_a_ranks_config_says_its_own_numbers_where_the_source_keeps_them(tmp_path):
    kimi = remote.save("kimi_k3", tmp_path / "kimi")
    split(kimi, tmp_path / "kimi2", 2)
    full, held = (
        json.loads((tmp_path / place / "config.json").read_text()) for place in ("kimi", "kimi2/rank-00-of-02")
    )
    full["text_config"]["linear_attn_config"]["num_heads"] = 4
    full["text_config"] |= {"num_attention_heads": 4, "num_key_value_heads": 4, "vocab_size": 51}
    full["text_config"] |= {"intermediate_size": 36, "moe_intermediate_size": 12}
    assert held == full
    step = remote.save("step3p5", tmp_path / "step")
    split(step, tmp_path / "step8", 8)
    held = json.loads((tmp_path / "step8/rank-07-of-08/config.json").read_text())
    assert held["attention_other_setting"] == {
        "attention_type": "sliding_attention", "num_attention_heads": 2, "num_attention_groups": 1, "head_dim": 12
    }  # fmt: skip
    assert (held["num_attention_heads"], held["num_attention_groups"]) == (1, 1)
    assert "per_layer_config" not in held


def test_a_ranks_config_says_its_own_numbers_in_a_section_that_lies_deeper(tmp_path):
    omni = remote.save("qwen2_5_omni", tmp_path / "omni")
    split(omni, tmp_path / "omni2", 2)
    full, held = (
        json.loads((tmp_path / place / "config.json").read_text()) for place in ("omni", "omni2/rank-01-of-02")
    )
    full["thinker_config"]["text_config"] |= {"num_attention_heads": 4, "num_key_value_heads": 2}
    full["thinker_config"]["text_config"] |= {"intermediate_size": 36, "vocab_size": 51}
    assert held == full
