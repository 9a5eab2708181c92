"""Scales of the KV cache, of queries and of probabilities, wherever an architecture keeps its attention."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from reshard.api import merge, split
from reshard.formats.errors import PlanError
from reshard.formats.mesh import Mesh
from reshard.formats.notation.architecture_files import BUILT_IN, find_architecture, load_architecture
from reshard.formats.quantization.companions import takes_heads
from reshard.mesh.plan import make_plan
from reshard.model.binding import bind
from reshard.model.model import FullTensor
from tests.dequantize import METHODS, Stored
from tests.source.test_quantized import FAST, PACKINGS, checkpoint, read, write
from tests.support import contents

# 8 query heads of 6 on 4 KV heads, on 8 ranks
LLAMA = {
    "hidden_size": 20, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 6, "intermediate_size": 24,
    "num_hidden_layers": 1, "vocab_size": 37, "max_position_embeddings": 64,
    "quantization_config": {"quant_method": "compressed-tensors", "format": "float-quantized", "config_groups": {}},
}  # fmt: skip
PLAIN = LLAMA | {"hidden_size": 48}
MHA = PLAIN | {"num_key_value_heads": 8}
GPT2 = MHA | {"n_embd": 48, "n_head": 8, "n_layer": 1, "n_positions": 64, "multi_query": False}
NEO = MHA | {"num_heads": 8, "num_layers": 1}
MAMBA = LLAMA | {"mamba_num_heads": 8, "mamba_head_dim": 4, "n_groups": 8, "layers_block_type": ["attention"]}

# model type, its config, the module that takes the heads in, and one that makes keys
ATTENTIONS = [
    ("llama", LLAMA, "model.layers.0.self_attn.o_proj", "model.layers.0.self_attn.k_proj"),
    ("phi", PLAIN, "model.layers.0.self_attn.dense", "model.layers.0.self_attn.k_proj"),
    ("internlm2", PLAIN, "model.layers.0.attention.wo", "model.layers.0.attention.wqkv"),
    ("gpt_neox", MHA, "gpt_neox.layers.0.attention.dense", "gpt_neox.layers.0.attention.query_key_value"),
    ("gpt2", GPT2, "transformer.h.0.attn.c_proj", "transformer.h.0.attn.c_attn"),
    ("gpt_neo", NEO, "transformer.h.0.attn.attention.out_proj", "transformer.h.0.attn.attention.k_proj"),
    ("bert", MHA, "bert.encoder.layer.0.attention.output.dense", "bert.encoder.layer.0.attention.self.key"),
    ("nemotron_h", MAMBA, "backbone.layers.0.mixer.o_proj", "backbone.layers.0.mixer.k_proj"),
]


@pytest.mark.parametrize("kind, config, output, keys", ATTENTIONS, ids=[kind for kind, *_ in ATTENTIONS])
def test_scales_of_heads_go_where_the_heads_go(kind, config, output, keys):
    config = config | {"model_type": kind}
    kv, hidden = config["num_key_value_heads"], config["hidden_size"]
    attention = output.rpartition(".")[0]
    scales = {
        f"{attention}.k_scale": (kv, 1, 1), f"{attention}.q_scale": (8, 1, 1), f"{attention}.v_scale": (1,),
        f"{keys}.k_scale": (kv, 1, 1), f"{keys}.v_zero_point": (), f"{attention}.prob_output_scale": (),
        f"{attention}.attn.v_scale": (kv, 1, 1), f"{attention}.attn.prob_scale": (1,), f"{attention}.kv_scale": (),
    }  # fmt: skip
    tensors = [FullTensor(name, "F32", shape, "here") for name, shape in scales.items()]
    tensors += [FullTensor(f"{output}.weight", "BF16", (hidden, 48), "here")]
    model = bind(find_architecture(config, Path()), config, tensors)
    plan = make_plan(model, Mesh((("tp", 8),)))
    for name, full in scales.items():
        runs = plan.layouts[name].boxes[5].dims
        if len(full) < 3:
            assert plan.layouts[name].is_replicated, name
        else:  # rank 5 has query head 5, which is of KV head 2 where two share one
            assert [(run.offset, run.length) for run in runs[0]] == [(5 * full[0] // 8, 1)], name


def test_every_attention_that_is_split_has_a_weight_that_takes_its_heads_in():
    architectures = [load_architecture(file) for file in sorted(BUILT_IN.glob("*.toml"))]
    for architecture, (name, rules) in ((each, line) for each in architectures for line in each.tensors.items()):
        dealt = {axis for family in architecture.families["tp"] for axis in family}
        attention, _, projection = name.removesuffix(".weight").rpartition(".")
        if projection in {"q_proj", "k_proj", "qkv_proj", "query_key_value"} and rules[0].shapes[0].axes & dealt:
            place = ".".join("0" if word.startswith("{") else word for word in attention.split("."))
            around = architecture.around(place)
            found = next(match.template for match in around if any(map(takes_heads, match.rules[0].shapes)))
            assert attention.startswith(found.removesuffix(".weight").rpartition(".")[0]), (architecture.name, name)


def test_a_scale_for_each_head_there_and_back(tmp_path):
    """On 4 ranks each has the scale of its own KV head, and the way back by 2 and by 1 gives the same bytes."""
    first, _, _ = checkpoint(tmp_path / "first", METHODS["packed-4"], PACKINGS[0])
    scales = {
        "model.layers.0.self_attn.k_scale": Stored("F32", np.arange(4, dtype=np.float32).reshape(4, 1, 1)),
        "model.layers.0.self_attn.q_scale": Stored("F32", np.arange(8, dtype=np.float32).reshape(8, 1, 1)),
        "model.layers.0.self_attn.v_scale": Stored("F32", np.ones(1, np.float32)),
    }
    source = write(tmp_path / "source", json.loads((first / "config.json").read_text()), read(first) | scales)
    split(source, tmp_path / "tp4", tp=4, **FAST)
    held = read(tmp_path / "tp4/rank-02-of-04")
    assert held["model.layers.0.self_attn.k_scale"].array.tolist() == [[[2.0]]]
    assert held["model.layers.0.self_attn.q_scale"].array.ravel().tolist() == [4.0, 5.0]
    assert held["model.layers.0.self_attn.v_scale"].array.tolist() == [1.0]
    split(tmp_path / "tp4", tmp_path / "tp2", tp=2, **FAST)
    (tmp_path / "tp2/reshard.json").unlink()
    merge(tmp_path / "tp2", tmp_path / "merged", **FAST)
    assert {name: t.array.tobytes() for name, t in read(tmp_path / "merged").items()} == {
        name: t.array.tobytes() for name, t in read(source).items()
    }
    assert contents(tmp_path / "merged").keys() == contents(source).keys()


SPELLINGS = [
    "k_scale", "q_scale", "kv_scale", "prob_scale", "prob_output_scale", "k_zero_point", "attn.v_scale",
    "k_proj.k_scale", "v_proj.v_scale", "qkv_proj.k_scale", "k_proj.output_scale", "v_proj.output_scale",
    "q_proj.output_scale",
]  # fmt: skip
"""Of one thing, in an attention: compressed-tensors, ModelOpt, AMD Quark and vLLM's own."""


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_a_scale_of_the_cache_is_kept_or_refused_by_name(spelling, tmp_path):
    first, _, _ = checkpoint(tmp_path / "first", METHODS["float8-channel"], PACKINGS[0])
    name = f"model.layers.0.self_attn.{spelling}"
    scale = {name: Stored("F32", np.array(1.75, np.float32))}
    source = write(tmp_path / "source", json.loads((first / "config.json").read_text()), read(first) | scale)
    for way in ({"tp": 2}, {"tp": 2, "format": "dcp"}):
        split(source, tmp_path / "out", **way, **FAST)
        merge(tmp_path / "out", tmp_path / "merged", **FAST)
        assert read(tmp_path / "merged")[name].array == np.float32(1.75)
        shutil.rmtree(tmp_path / "out")
        shutil.rmtree(tmp_path / "merged")
    for way in ({"format": "huggingface"}, {"tp": 2}, {"tp": 2, "format": "vllm"}, {"tp": 2, "format": "megatron"}):
        with pytest.raises(PlanError, match=f"'{name}' is a scale of the attention or of its KV cache"):
            split(source, tmp_path / "out", **way, dequantize=True, **FAST)
    with pytest.raises(PlanError, match=f"'{name}' has no place in the format 'vllm'"):
        split(source, tmp_path / "out", tp=2, format="vllm", **FAST)
    assert not (tmp_path / "out").exists()
