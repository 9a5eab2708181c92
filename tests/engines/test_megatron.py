"""Shards in Megatron-Core, with a stand-in for Megatron-Core: it merges what it is given and runs that."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from reshard.api import split
from reshard.formats.errors import CheckpointError
from reshard.formats.mesh import mesh_of
from reshard.formats.notation.format_file import format_of
from reshard.source.opening import open_source
from reshard.verify.engine.compare import EngineOptions
from tests import store
from tests.engines import in_megatron
from tests.engines.in_megatron import run_original, run_shards, settings_for
from tests.marks import thorough
from tests.programs.oracles import checkpoint
from tests.verify.test_engine import STAND_IN

RUNNER = (
    STAND_IN
    + """
import sys
request = json.loads(Path(sys.argv[1]).read_text())
with open("asked.jsonl", "a") as file:
    print(json.dumps({key: request[key] for key in ("tp", "pp", "ep", "etp", "stages", "settings")}), file=file)
engine = LLM(request["folder"], "sharded_state", request["dtype"], 2)
steps = list(engine.generate([{"prompt_token_ids": prompt} for prompt in request["prompts"]], None))
found = [[[step[token].logprob for token in sorted(step)] for step in each.prompt_logprobs[1:]] for each in steps]
Path(request["out"]).write_text(json.dumps(found))
"""
)


@pytest.fixture
def asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file with what the stand-in was asked for."""
    runner = tmp_path / "runner.py"
    runner.write_text(
        f"import sys\nsys.path.insert(0, {str(Path(__file__).parents[2])!r})\n"
        + RUNNER.replace("asked.jsonl", f"{tmp_path}/asked.jsonl")
    )
    monkeypatch.setattr(in_megatron, "RUNNER", runner)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("STAND_IN", "exact")
    return tmp_path / "asked.jsonl"


@thorough
def test_one_folder_is_run_on_several_meshes(asked: Path, tmp_path: Path) -> None:
    original, out = store.checkpoint("llama"), tmp_path / "out"
    split(original, out, tp=1, format="megatron")
    baseline = run_original(open_source(original), EngineOptions())
    for mesh in (mesh_of(2), mesh_of(2, pp=2)):
        assert run_shards(baseline, open_source(out), mesh).is_same
    first, second = map(json.loads, asked.read_text().splitlines())
    assert [first[key] for key in ("tp", "pp", "ep", "etp", "stages")] == [2, 1, 1, 2, []]
    assert [second[key] for key in ("tp", "pp", "ep", "etp", "stages")] == [2, 2, 1, 2, [2, 1]]
    assert first["settings"]["form"]["is_distributed"] and first["settings"]["config"]["num_layers"] == 3


def test_a_wrong_folder_is_seen(asked: Path, tmp_path: Path) -> None:
    """The bytes alone would see it, too; here only the engine looks."""
    original, out = store.checkpoint("llama"), tmp_path / "out"
    split(original, out, tp=1, format="megatron-legacy")
    (out / "reshard.json").unlink()
    shards = open_source(out)
    info = shards.ranks[0]["decoder.layers.0.self_attention.linear_qkv.weight"]
    with info.file.open("r+b") as file:
        for at in range(info.offset + 3, info.offset + 256, 4):
            file.seek(at)
            byte = file.read(1)[0]
            file.seek(at)
            file.write(bytes([byte ^ 0x80]))
    report = run_shards(run_original(open_source(original), EngineOptions()), open_source(out))
    assert not report.is_same and report.ratio > 100


def _settings(model: str, **changes: Any) -> dict[str, Any]:
    source = open_source(checkpoint("megatron", model))
    source.model.sizes.settings |= changes
    return settings_for(source.model, format_of("megatron"))


def test_what_megatron_is_told_of_a_model() -> None:
    llama = _settings("llama")
    assert llama["class"] == "TransformerConfig" and llama["config"]["num_query_groups"] == 4
    assert not {"num_moe_experts", "moe_layer_freq", "kv_lora_rank"} & llama["config"].keys()
    assert not llama["config"]["add_qkv_bias"] and not llama["config"]["qk_layernorm"]
    assert llama["model"]["rotary_base"] == 10000 and not llama["model"]["share_embeddings_and_output_weights"]
    qwen2 = _settings("qwen2")
    assert qwen2["config"]["add_qkv_bias"] and qwen2["model"]["share_embeddings_and_output_weights"]
    assert _settings("qwen3")["config"]["qk_layernorm"]
    mixtral = _settings("mixtral")["config"]
    assert (mixtral["num_moe_experts"], mixtral["moe_router_topk"], mixtral["moe_ffn_hidden_size"]) == (4, 2, 56)
    assert not mixtral["moe_router_pre_softmax"] and "moe_layer_freq" not in mixtral
    deepseek = _settings("deepseek_v3")
    assert deepseek["class"] == "MLATransformerConfig" and deepseek["config"]["moe_layer_freq"] == [0, 1, 1]
    assert deepseek["config"]["moe_shared_expert_intermediate_size"] == 16
    assert deepseek["config"]["moe_router_score_function"] == "sigmoid"


@pytest.mark.parametrize(
    ("model", "changes", "why"),
    [
        ("llama", {"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "its positions are scaled"),
        ("llama", {"hidden_act": "gelu"}, "its activation is not silu"),
        ("llama", {"attention_bias": True}, "biases of all matrices"),
        ("deepseek_v3", {"norm_topk_prob": False}, "sum to 1"),
    ],
)
def test_a_model_that_it_cannot_be_told_of_is_not_run(model: str, changes: dict[str, Any], why: str) -> None:
    with pytest.raises(CheckpointError, match=why):
        _settings(model, **changes)
