"""Architectures whose modelling code transformers does not have: every route, every byte, and where packed rows go."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from reshard.api import merge, split
from reshard.formats.mesh import Mesh
from reshard.formats.notation.architecture_files import built_in_architectures, built_in_file
from reshard.mesh.degrees import valid_degrees
from reshard.mesh.plan import make_plan
from reshard.source.opening import open_source
from tests import remote, store, zoo
from tests.marks import one_of_each, thorough
from tests.support import assert_boxes_make_up_the_tensors, contents, without_manifest

PACKED = re.compile(
    "qkv|query_key_value|key_value|kv_b_proj|W_pack|c_attn|att_proj|in_proj|attn.kv|gate_up|up_gate|gate_and_up"
    "|gated_layers|h_to_4h|w12"
)


def files() -> dict[str, str]:
    """The first entry of each architecture file that no model of the zoo is for."""
    built_in = built_in_architectures()
    of_zoo = {built_in[zoo.ZOO[name].model_type].stem for name in zoo.one_of_each()}
    found: dict[str, str] = {}
    for name, entry in remote.REMOTE.items():
        if entry.file not in of_zoo:
            found.setdefault(entry.file, name)
    return found


def saved(name: str) -> Path:
    """A checkpoint of REMOTE, in the store."""
    return store.made(f"remote-{name}", lambda folder: remote.save(name, folder))


def test_a_checkpoint_is_in_the_file_of_its_architecture():
    for name, entry in remote.REMOTE.items():
        assert built_in_file(entry.config).stem == entry.file, name


@pytest.mark.parametrize("name", one_of_each(remote.REMOTE, lambda name: remote.REMOTE[name].degrees))
def test_every_degree_is_right_and_no_other_is_possible(name):
    model = open_source(saved(name)).plan.model
    assert tuple(degree for degree in valid_degrees(model) if degree in zoo.DEGREES) == remote.REMOTE[name].degrees
    for tp in remote.REMOTE[name].degrees:
        assert_boxes_make_up_the_tensors(make_plan(model, Mesh((("tp", tp),))))


@pytest.mark.parametrize("name", files().values())
@thorough
def test_every_route_gives_the_same_bytes(name, tmp_path):
    """One model of each architecture file; test_slabs.py is for what moves between any boxes."""
    original, degrees = saved(name), remote.REMOTE[name].degrees
    split(original, tmp_path / "low", tp=degrees[0])
    split(original, tmp_path / "high", tp=degrees[-1])
    split(tmp_path / "low", tmp_path / "again", tp=degrees[-1])
    assert without_manifest(tmp_path / "again") == without_manifest(tmp_path / "high")
    merge(tmp_path / "again", tmp_path / "merged")
    assert contents(tmp_path / "merged") == contents(original)


@pytest.mark.parametrize(
    "name",
    one_of_each([name for name, entry in remote.REMOTE.items() if entry.parts], lambda name: remote.REMOTE[name].file),
)
def test_packed_tensors_are_taken_apart_as_the_model_does(name, tmp_path):
    split(saved(name), tmp_path / "tp2", tp=2)
    full = load_file(saved(name) / "model.safetensors")
    held = load_file(tmp_path / "tp2/rank-01-of-02/model.safetensors")
    for key, (dim, ranges) in remote.REMOTE[name].parts.items():
        wanted = torch.cat([full[key].narrow(dim, begin, end - begin) for begin, end in ranges], dim)
        assert torch.equal(held[key], wanted), key


@pytest.mark.parametrize("name", one_of_each(remote.REMOTE, lambda name: remote.REMOTE[name].degrees))
def test_packed_tensors_that_are_split_state_their_parts(name):
    """Those that their names or their rules call packed. A weight and its bias state them each."""
    model = open_source(saved(name)).plan.model
    layouts = make_plan(model, Mesh((("tp", 2),))).layouts
    found: dict[tuple[str, str], set[str]] = {}
    for tensor in model.tensors:
        layout = layouts[tensor.name]
        split_up = any(box.shape != layout.padded for box in layout.boxes.values())
        if split_up and (PACKED.search(tensor.name) or "+" in str(tensor.kind.rule)):
            found.setdefault((tensor.template, str(tensor.kind.rule)), set()).add(tensor.name)
    assert [sorted(names) for names in found.values() if not names & remote.REMOTE[name].parts.keys()] == []


def test_a_ranks_config_says_its_own_numbers_where_the_source_keeps_them(tmp_path):
    kimi = remote.save("kimi_k3", tmp_path / "kimi")
    split(kimi, tmp_path / "kimi2", tp=2)
    full, held = (
        json.loads((tmp_path / place / "config.json").read_text()) for place in ("kimi", "kimi2/rank-00-of-02")
    )
    full["text_config"]["linear_attn_config"]["num_heads"] = 4
    full["text_config"] |= {"num_attention_heads": 4, "num_key_value_heads": 4, "vocab_size": 51}
    full["text_config"] |= {"intermediate_size": 36, "moe_intermediate_size": 12}
    assert held == full
    step = remote.save("step3p5", tmp_path / "step")
    split(step, tmp_path / "step8", tp=8)
    held = json.loads((tmp_path / "step8/rank-07-of-08/config.json").read_text())
    assert held["attention_other_setting"] == {
        "attention_type": "sliding_attention", "num_attention_heads": 2, "num_attention_groups": 1, "head_dim": 12
    }  # fmt: skip
    assert (held["num_attention_heads"], held["num_attention_groups"]) == (1, 1)
    assert "per_layer_config" not in held


def test_a_ranks_config_says_its_own_numbers_in_a_section_that_lies_deeper(tmp_path):
    omni = remote.save("qwen2_5_omni", tmp_path / "omni")
    split(omni, tmp_path / "omni2", tp=2)
    full, held = (
        json.loads((tmp_path / place / "config.json").read_text()) for place in ("omni", "omni2/rank-01-of-02")
    )
    full["thinker_config"]["text_config"] |= {"num_attention_heads": 4, "num_key_value_heads": 2}
    full["thinker_config"]["text_config"] |= {"intermediate_size": 36, "vocab_size": 51}
    assert held == full
