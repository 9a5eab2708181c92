"""Layers that predict further tokens (multi-token prediction), as Megatron-Core has them.

The names are those of ``GPTModel`` with ``mtp_num_layers=1`` in Megatron-Core 0.16.1, in its state dict and in its
sharded state dict.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from reshard.api import merge, split
from reshard.formats.files.dcp import read_distributed
from reshard.formats.notation.format_file import format_of
from reshard.source.opening import open_source
from tests import store
from tests.engines.in_megatron import settings_for
from tests.marks import thorough
from tests.support import command

pytestmark = thorough

ONE = {"workers": 1}
LAYER = "mtp.layers.0.transformer_layer"
WITHIN = {
    "input_layernorm.weight", "self_attention.linear_proj.weight", "self_attention.linear_q_down_proj.weight",
    "self_attention.linear_q_up_proj.weight", "self_attention.linear_q_up_proj.layer_norm_weight",
    "self_attention.linear_kv_down_proj.weight", "self_attention.linear_kv_up_proj.weight",
    "self_attention.linear_kv_up_proj.layer_norm_weight", "pre_mlp_layernorm.weight", "mlp.router.weight",
    "mlp.router.expert_bias", "mlp.shared_experts.linear_fc1.weight", "mlp.shared_experts.linear_fc2.weight",
}  # fmt: skip
OUTER = {f"mtp.layers.0.{name}.weight" for name in ("enorm", "hnorm", "eh_proj", "final_layernorm")}
EXPERTS = {f"mlp.experts.experts.linear_fc{number}.weight" for number in (1, 2)}
SHARED = {"model.layers.3.embed_tokens.weight", "model.layers.3.shared_head.head.weight"}
"""The model's own table and head once more."""


@pytest.fixture(scope="module")
def original() -> Path:
    """DeepSeek V3 with a layer that predicts a further token, as it is published."""

    def make(folder: Path) -> None:
        shutil.copytree(store.checkpoint("deepseek_v3", "bfloat16"), folder)
        tensors, draw = load_file(folder / "model.safetensors"), torch.Generator().manual_seed(0)
        last, further = "model.layers.2.", "model.layers.3."
        norm, table = tensors["model.norm.weight"], tensors["model.embed_tokens.weight"]
        new = {further + name.removeprefix(last): tensor for name, tensor in tensors.items() if name.startswith(last)}
        new |= {further + name: norm for name in ("enorm.weight", "hnorm.weight", "shared_head.norm.weight")}
        new[f"{further}eh_proj.weight"] = torch.cat((norm.diag(), norm.diag()), 1)
        new = {name: torch.randn(tensor.shape, generator=draw).to(tensor.dtype) for name, tensor in new.items()}
        new |= {f"{further}embed_tokens.weight": table, f"{further}shared_head.head.weight": tensors["lm_head.weight"]}
        save_file(tensors | {name: tensor.clone() for name, tensor in new.items()}, folder / "model.safetensors")

    return store.made("deepseek_v3-further", make)


def in_one_folder(out: Path) -> set[str]:
    return {name for name in read_distributed(out / "release").tensors if name.startswith("mtp.")}


def test_names_of_torch_dist(original: Path, tmp_path: Path) -> None:
    split(original, tmp_path / "out", format="megatron", **ONE)
    assert in_one_folder(tmp_path / "out") == OUTER | {f"{LAYER}.{name}" for name in WITHIN | EXPERTS}
    found = read_distributed(tmp_path / "out/release")
    states = {name.partition("._extra_state")[0] for name in found.objects if name.startswith("mtp.")}
    assert {f"mtp.layers.0.{name}" for name in ("enorm", "hnorm", "eh_proj", "final_layernorm")} <= states
    assert f"{LAYER}.self_attention.core_attention" in states
    split(original, tmp_path / "apart", format="megatron-singleton", **ONE)
    apart = {f"mlp.shared_experts.linear_fc1.weight_{half}" for half in "wv"}
    assert {f"{LAYER}.{name}" for name in apart} <= in_one_folder(tmp_path / "apart")
    done = command("plan", original, "--as", "megatron")
    assert "mtp.layers.*.eh_proj.weight" in done.stdout and ".further." not in done.stdout


def test_ranks_of_the_older_form(original: Path, tmp_path: Path) -> None:
    """A rank counts experts from 0 there, too, and ``eh_proj`` is column-parallel."""
    split(original, tmp_path / "out", tp=2, ep=2, format="megatron-legacy", **ONE)
    whole = load_file(original / "model.safetensors")
    for tp in range(2):
        for ep in range(2):
            at = tmp_path / f"out/release/mp_rank_{tp:02d}_{ep:03d}/model_optim_rng.pt"
            held = torch.load(at, weights_only=True)["model"]
            names = {name for name in held if name.startswith("mtp.")}
            experts = {f"mlp.experts.linear_fc{number}.weight{i}" for number in (1, 2) for i in range(3)}
            assert names == OUTER | {f"{LAYER}.{name}" for name in WITHIN | experts}
            rows = whole["model.layers.3.eh_proj.weight"].chunk(2)[tp]
            assert torch.equal(held["mtp.layers.0.eh_proj.weight"], rows)
            down = whole[f"model.layers.3.mlp.experts.{3 * ep}.down_proj.weight"].chunk(2, 1)[tp]
            assert torch.equal(held[f"{LAYER}.mlp.experts.linear_fc2.weight0"], down)


@pytest.mark.parametrize("form, mesh", [("megatron", {}), ("megatron-legacy", {"tp": 2, "ep": 2})])
def test_it_comes_back(form: str, mesh: dict[str, int], original: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    split(original, out, **mesh, format=form, **ONE)
    merge(out, tmp_path / "merged", **ONE)
    assert (tmp_path / "merged/model.safetensors").read_bytes() == (original / "model.safetensors").read_bytes()
    assert command("verify", original, out, "--exact-only", "-q").stdout == "same\n"
    (out / "reshard.json").unlink()
    (out / "reshard-kept.safetensors").unlink()
    merge(out, tmp_path / "again", config=original, **ONE)
    found, should = load_file(tmp_path / "again/model.safetensors"), load_file(original / "model.safetensors")
    assert should.keys() - found.keys() == SHARED
    assert all(torch.equal(found[name], should[name]) for name in found)


def test_several_stages_of_the_older_form_are_refused(original: Path, tmp_path: Path) -> None:
    done = command("split", original, tmp_path / "out", "--pp", "2", "--as", "megatron-legacy")
    assert done.returncode == 2 and "has no place on several stages" in done.stderr
    assert not (tmp_path / "out").exists()


def test_the_engine_is_told(original: Path) -> None:
    settings = settings_for(open_source(original).model, format_of("megatron"))
    assert settings["config"]["mtp_num_layers"] == 1
    without = store.checkpoint("deepseek_v3", "bfloat16")  # its config.json names such a layer, and it has none
    assert json.loads((without / "config.json").read_text())["num_nextn_predict_layers"] == 1
    assert "mtp_num_layers" not in settings_for(open_source(without).model, format_of("megatron"))["config"]
