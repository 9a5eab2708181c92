"""torchtitan's checkpoints against an independent description of its names and rows."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file

from reshard.api import merge, split
from reshard.formats.errors import PlanError
from reshard.verify.bytes.exact import verify_exact
from tests import store
from tests.formats.test_dcp import save
from tests.marks import one_of_each
from tests.programs.test_dcp import bits, merge_with_config, recorded
from tests.support import bytes_of

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed")

TABLES = {"model.embed_tokens": "tok_embeddings", "model.norm": "norm"}
MODULES = {
    "input_layernorm": "attention_norm", "post_attention_layernorm": "ffn_norm", "self_attn.o_proj": "attention.wo",
    "self_attn.q_norm": "attention.q_norm", "self_attn.k_norm": "attention.k_norm", "mlp.gate": "moe.router.gate",
    "mlp.gate_proj": "feed_forward.w1", "mlp.down_proj": "feed_forward.w2", "mlp.up_proj": "feed_forward.w3",
    "mlp.router": "moe.router.gate", "self_attn.q_a_proj": "attention.wq_a", "self_attn.q_b_proj": "attention.wq_b",
    "self_attn.q_a_layernorm": "attention.q_norm", "self_attn.kv_a_proj_with_mqa": "attention.wkv_a",
    "self_attn.kv_a_layernorm": "attention.kv_norm", "self_attn.kv_b_proj": "attention.wkv_b",
    "mlp.shared_experts.gate_proj": "moe.shared_experts.w1", "mlp.shared_experts.down_proj": "moe.shared_experts.w2",
    "mlp.shared_experts.up_proj": "moe.shared_experts.w3", "enorm": "enorm", "hnorm": "hnorm", "eh_proj": "eh_proj",
    "shared_head.norm": "mtp_norm",
}  # fmt: skip
EXPERTS = {"gate_proj": "w1_EFD", "down_proj": "w2_EDF", "up_proj": "w3_EFD"}
FUSED = {
    "gate_up_proj": "mlp1_weight_EGD", "gate_up_proj_bias": "mlp1_bias_EG", "down_proj": "mlp2_weight_EDF",
    "down_proj_bias": "mlp2_bias_ED",
}  # fmt: skip
BIAS = "expert_bias_E"


def in_pairs(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """Rows of each head, the two halves in turn, as Llama's own code rotates them."""
    rows, columns = weight.shape
    return weight.view(heads, 2, rows // heads // 2, columns).transpose(1, 2).reshape(rows, columns).contiguous()


def of_torchtitan(folder: Path, qkv: str, head: str) -> dict[str, torch.Tensor]:
    """What torchtitan holds of a checkpoint of Hugging Face's."""
    config = json.loads((folder / "config.json").read_text())
    heads = {"q": config["num_attention_heads"], "k": config["num_key_value_heads"]}
    found: dict[str, Any] = {}
    experts: dict[str, dict[int, torch.Tensor]] = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        module, leaf = name.rsplit(".", 1)
        if module in TABLES or module == "lm_head":
            found[f"{TABLES.get(module, head)}.weight"] = tensor
            continue
        _, _, number, rest = module.split(".", 3)
        if rest in {"embed_tokens", "shared_head.head"}:  # copies of the model's own
            continue
        ahead = int(number) - config["num_hidden_layers"]  # layers that predict further tokens
        at = f"layers.{number}" if ahead < 0 else f"mtp_layers.{ahead}"
        if leaf == "e_score_correction_bias":
            found[f"{at}.moe.{BIAS}"] = tensor.float()
        elif leaf == "sinks":
            found[f"{at}.attention.sinks"] = tensor
        elif rest in MODULES:
            found[f"{at}.{MODULES[rest]}.{leaf}"] = tensor
        elif rest == "mlp.experts":  # input first, with Hugging Face
            output_first = tensor.mT.contiguous() if tensor.dim() == 3 else tensor
            found[f"{at}.moe.routed_experts.inner_experts.{FUSED[leaf]}"] = output_first
        elif ".experts." in rest:
            expert, which = rest.split(".")[-2:]
            key = f"{at}.moe.routed_experts.inner_experts.{EXPERTS[which]}"
            experts.setdefault(key, {})[int(expert)] = tensor
        else:
            letter = rest.removeprefix("self_attn.")[0]
            is_rotated = config["model_type"] == "llama" and letter in heads
            rows = in_pairs(tensor, heads[letter]) if is_rotated else tensor
            found[f"{at}.attention.{qkv}w{letter}.{leaf}"] = rows
        if rest in {"mlp.gate", "mlp.router"} and leaf == "weight":
            found.setdefault(f"{at}.moe.{BIAS}", torch.zeros(tensor.shape[0]))
    if f"{head}.weight" not in found:
        found[f"{head}.weight"] = found["tok_embeddings.weight"]
    return found | {key: torch.stack([of[i] for i in range(len(of))]) for key, of in experts.items()}


@pytest.mark.parametrize(
    ("form", "name", "qkv", "head"),
    one_of_each([
        ("torchtitan", "llama", "qkv_linear.", "lm_head"),
        ("torchtitan", "qwen3", "qkv_linear.", "lm_head"),
        ("torchtitan", "qwen3_moe", "qkv_linear.", "lm_head"),
        ("torchtitan", "deepseek_v3", "", "lm_head"),
        ("torchtitan", "deepseek_v3-mtp", "", "lm_head"),
        ("torchtitan", "deepseek_v2-no-q-lora", "", "lm_head"),
        ("torchtitan", "gpt_oss", "qkv_linear.", "lm_head"),
        ("torchtitan-0.2", "llama", "", "output"),
    ], lambda case: (case[0], case[1].partition("_")[0])),
)  # fmt: skip
def test_it_is_what_torchtitan_holds(form: str, name: str, qkv: str, head: str, tmp_path: Path) -> None:
    original = recorded("fsdp_tp", tmp_path) / "hf" if name == "llama" else store.checkpoint(name)
    wanted = of_torchtitan(original, qkv, head)
    split(original, tmp_path / "out", tp=2, format=form)
    state: dict[str, Any] = {key: torch.zeros_like(each) for key, each in wanted.items()}
    dcp.load(state, checkpoint_id=tmp_path / "out", no_dist=True)
    assert bits(state) == bits(wanted)
    folder = save(tmp_path / "theirs", {"model": wanted, "train_state": {"step": 3}}, threads=2)
    merge_with_config(folder, tmp_path / "merged", original)
    merged, whole = bytes_of(tmp_path / "merged"), bytes_of(original)
    copies = {key for key in whole if ".layers." in key and key.endswith((".embed_tokens.weight", "_head.head.weight"))}
    assert {key: merged.get(key) for key in whole if key not in copies} == {
        key: of for key, of in whole.items() if key not in copies
    }


def test_a_bias_that_hugging_face_has_no_place_for_is_named(tmp_path: Path) -> None:
    original, config = store.checkpoint("qwen3_moe"), tmp_path / "config"
    wanted = of_torchtitan(original, "qkv_linear.", "lm_head")
    shutil.copytree(original, config, ignore=shutil.ignore_patterns("*.safetensors"))
    for folder, change in (("zero", 0.0), ("trained", 0.5)):
        state = {key: tensor + change if key.endswith(BIAS) else tensor for key, tensor in wanted.items()}
        saved = save(tmp_path / folder, {"model": state})
        summary = merge(saved, tmp_path / f"{folder}-merged", config=config)
        assert summary.left_behind == (("layers.*.moe.expert_bias_E",) if change else ())
    without = {key: tensor for key, tensor in wanted.items() if not key.endswith(BIAS)}  # load_balance_coeff = None
    saved = save(tmp_path / "without", {"model": without})
    assert merge(saved, tmp_path / "without-merged", config=config).left_behind == ()
    assert (
        bytes_of(tmp_path / "without-merged")
        == bytes_of(tmp_path / "trained-merged")
        == bytes_of(tmp_path / "zero-merged")
    )


@pytest.mark.parametrize("tp", [1, 2])
def test_a_trained_bias_stays_in_the_same_format(tp: int, tmp_path: Path) -> None:
    original = store.checkpoint("qwen3_moe")
    state: dict[str, Any] = of_torchtitan(original, "qkv_linear.", "lm_head")
    state |= {key: torch.rand(len(tensor)) for key, tensor in state.items() if key.endswith(BIAS)}
    saved = save(tmp_path / "trained", state)
    summary = split(saved, tmp_path / "again", tp=tp, format="torchtitan", config=original)
    assert summary.left_behind == ()
    found: dict[str, Any] = {key: torch.zeros_like(each) for key, each in state.items()}
    dcp.load(found, checkpoint_id=tmp_path / "again", no_dist=True)
    assert bits(found) == bits(state)
    assert merge(tmp_path / "again", tmp_path / "merged").left_behind == ("layers.*.moe.expert_bias_E",)


def test_verify_compares_the_bias(tmp_path: Path) -> None:
    original = store.checkpoint("qwen3_moe")
    state = of_torchtitan(original, "qkv_linear.", "lm_head")
    folder = save(tmp_path / "good", state)
    assert verify_exact(store.source("qwen3_moe"), folder).verdict == "same"
    changed = save(tmp_path / "bad", state | {f"layers.0.moe.{BIAS}": torch.ones(5)})
    report = verify_exact(store.source("qwen3_moe"), changed)
    assert report.first is not None and BIAS in str(report.first)


def test_other_models_are_refused(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="cannot be written as 'torchtitan'"):
        split(store.checkpoint("gpt2"), tmp_path / "out", format="torchtitan")
    original = store.checkpoint("llama")
    config = json.loads((original / "config.json").read_text()) | {"attention_bias": True}
    (tmp_path / "biased").mkdir()
    save_file(load_file(original / "model.safetensors"), tmp_path / "biased" / "model.safetensors", {"format": "pt"})
    (tmp_path / "biased" / "config.json").write_text(json.dumps(config))
    with pytest.raises(PlanError, match="torchtitan has no place for these biases"):
        split(tmp_path / "biased", tmp_path / "out", format="torchtitan")
