"""``reshard plan --tp-plan``: transformers, given the plan, computes what it computes without."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from reshard.formats.errors import PlanError
from reshard.model.tp_plan import _USE, TransformersPlan, transformers_plan
from reshard.source.access import Access
from reshard.store.selection import Weights
from reshard.transforms.opening import open_any
from tests.marks import of_ranks, thorough
from tests.store import checkpoint
from tests.support import change_json, write_checkpoint
from tests.test_cli import document, refused, run

# by degree: models for which transformers has no plan, one that gathers more, one that fails, and some that are fine
NAMES = {
    2: (
        "phi3", "bloom", "falcon-7b", "falcon-40b", "gpt_neox", "gpt2", "opt", "olmo2", "cohere", "stablelm", "mpt",
        "llama", "qwen3", "mixtral", "llama-mqa", "mamba", "bert", "gpt_oss", "jamba", "qwen3_vl_moe",
    ),
    4: ("llama-6kv", "phi3", "bloom", "qwen2_moe"),
}  # fmt: skip
WHOLE = {"gpt2", "mamba", "gpt_oss", "qwen3_vl_moe"}
"""Those of which much stays whole on every rank."""


def plan_of(folder: Path, degree: int | None) -> TransformersPlan:
    return transformers_plan(open_any(folder, Access(), Weights.HEADERS).model, degree)


def logits(model: Any) -> torch.Tensor:
    tokens = (5 * torch.arange(14).reshape(2, 7)) % 60 + 3
    with torch.no_grad():
        found: torch.Tensor = model.eval()(input_ids=tokens, attention_mask=torch.ones_like(tokens))[0]
    return found


def load(folder: Path, **options: Any) -> Any:
    import transformers

    from reshard.formats.transformers_internals import model_class

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    cls = model_class(json.loads((folder / "config.json").read_text()))
    kernels = {"attn_implementation": "eager", "experts_implementation": "eager"}
    return cls.from_pretrained(folder, dtype=torch.float32, **kernels, **options)


def run_rank(jobs: list[tuple[Path, dict[str, str]]]) -> list[tuple[torch.Tensor, float]]:
    """Load each checkpoint by its plan; the logits, and the share of the parameters that this rank has."""
    from transformers.distributed.configuration_utils import DistributedConfig

    results = []
    for folder, plan in jobs:
        model = load(folder, distributed_config=DistributedConfig(tp_plan=plan, tp_size=int(os.environ["WORLD_SIZE"])))
        parameters = list(model.parameters())
        held = sum((p.to_local() if hasattr(p, "to_local") else p).numel() for p in parameters)
        results.append((logits(model), held / sum(p.numel() for p in parameters)))
    return results


@of_ranks
@pytest.mark.parametrize("degree", NAMES)
@thorough
def test_transformers_computes_the_same_with_the_plan(degree: int) -> None:
    from reshard.profile.processes import run_processes

    folders = [checkpoint(name) for name in NAMES[degree]]
    jobs = [(folder, dict(plan_of(folder, degree).styles)) for folder in folders]
    expected = [logits(load(folder)) for folder, _ in jobs]
    for rank in run_processes(run_rank, degree, jobs):
        for name, wanted, (found, held) in zip(NAMES[degree], expected, rank, strict=True):
            assert (found - wanted).abs().max() < 1e-5 * max(1.0, wanted.abs().max().item()), name
            assert name in WHOLE or held < 1 / degree + 0.13, (name, held)


def test_packed_halves_stay_on_their_ranks_and_packed_heads_do_not() -> None:
    plan = plan_of(checkpoint("phi3"), 2)
    assert plan.styles["model.layers.*.mlp.gate_up_proj"] == "packed_colwise"
    assert plan.styles["model.layers.*.mlp.down_proj"] == "rowwise"
    assert plan.styles["model.layers.*.self_attn.qkv_proj"] == "colwise_gather_output"
    assert plan.styles["model.layers.*.self_attn.o_proj"] == "rowwise_split_input"
    assert "packed" in plan.gathered["model.layers.*.self_attn.qkv_proj"]


def test_what_transformers_cannot_cut_is_whole_and_named() -> None:
    plan = plan_of(checkpoint("gpt2"), 2)
    assert set(plan.styles) == {"transformer.wte", "lm_head"}
    assert plan.whole["transformer.h.*.attn.c_attn"] == "no linear layer"


def test_a_weight_that_the_code_uses_itself_is_whole() -> None:
    """``self.dt_proj.weight @ x``: a style takes effect where a module is called; ``.weight.dtype`` is no use."""
    mixer = "backbone.layers.*.mixer"
    whole = plan_of(checkpoint("mamba"), 2).whole
    assert {whole.get(f"{mixer}.{name}") for name in ("dt_proj", "out_proj")} == {
        "the model's code uses its weight itself"
    }
    assert _USE.findall("x = self.a.b.weight @ x; y = self.c.weight.dtype; self.d.weight = z") == ["a.b"]


def test_heads_stay_on_their_ranks_while_each_has_kv_heads_of_its_own() -> None:
    folder = checkpoint("qwen3")
    attention = "model.layers.*.self_attn"
    assert plan_of(folder, None).degrees_of == (4,)
    assert plan_of(folder, 4).styles[f"{attention}.q_proj"] == "colwise"
    gathered = plan_of(folder, 8)
    assert gathered.styles[f"{attention}.q_proj"] == "colwise_gather_output"
    assert gathered.styles[f"{attention}.q_norm"] == "replicate"  # not transformers' own style, for its gradient
    assert gathered.gathered[f"{attention}.q_proj"] == "kv 4 is not divisible by 8"


def test_the_command_prints_the_dict_alone() -> None:
    done = run("plan", checkpoint("bloom"), "--tp-plan", "--tp", "2")
    assert done.returncode == 0, done.stderr
    styles = json.loads(done.stdout)
    assert styles["transformer.h.*.self_attention.query_key_value"] == "colwise_gather_output"
    assert "transformer.h.*.self_attention.dense: split, " in done.stderr
    named = document("plan", checkpoint("bloom"), "--tp-plan", "--tp", "2")
    assert named["tp_plan"] == styles and named["command"] == "plan"


def test_refusals(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "model")
    assert "--tp 3 is not possible" in refused("plan", folder, "--tp-plan", "--tp", "3")
    assert "goes with --tp alone" in run("plan", folder, "--tp-plan", "--ep", "2").stderr
    change_json(folder / "config.json", quantization_config={"quant_method": "fp8"})
    with pytest.raises(PlanError, match="quantized"):
        plan_of(folder, 2)
