"""Quantized checkpoints run forward with the weights that transformers makes of them as it loads."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from reshard.api import split
from reshard.formats.errors import ReshardError
from reshard.source.opening import open_source
from reshard.source.source import Source
from reshard.verify.forward.compare import ForwardOptions, dequantized, run_forward
from reshard.verify.rank.group import RankError
from reshard.verify.rank.loading import load_original
from tests import zoo
from tests.dequantize import METHODS, Stored
from tests.marks import thorough
from tests.source.test_quantized import names_of, read, write
from tests.support import change_tensor
from tests.verify.forwards import run_forwards
from tests.verify.test_forward import QUICK

pytestmark = thorough


SIZES: dict[str, Any] = {
    "hidden_size": 64, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 32, "intermediate_size": 256,
    "vocab_size": 101, "num_hidden_layers": 3, "max_position_embeddings": 64, "tie_word_embeddings": False,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "num_experts": 4, "num_local_experts": 4,
    "num_experts_per_tok": 2, "moe_intermediate_size": 128,
}  # fmt: skip


@dataclass(frozen=True)
class Case:
    model: str
    method: str
    mesh: dict[str, int]

    @property
    def name(self) -> str:
        return "-".join([self.model, self.method, *(f"{key}{degree}" for key, degree in self.mesh.items())])


CASES = [
    Case("llama", "fp8-block", {"tp": 4}),
    Case("phi3", "fp8-block", {"tp": 2}),
    Case("qwen3_moe", "fp8-block", {"tp": 2}),
    Case("qwen3_moe", "fp8-block", {"ep": 2}),
    Case("qwen3_moe", "fp8-block", {"ep": 2, "tp": 2}),
    Case("llama", "fp8-tensor", {"tp": 2}),
    Case("gpt_oss", "gpt-oss", {"tp": 2}),
    Case("gpt_oss", "gpt-oss", {"ep": 2}),
    Case("gpt_oss", "gpt-oss", {"ep": 2, "tp": 2}),
    Case("qwen3_moe", "fp8-block", {"pp": 2}),
]


def quantize(folder: Path, model_type: str, method_name: str) -> tuple[Path, dict[str, list[str]]]:
    """A model of random weights with its projections quantized, and the ends of the names of each one's tensors."""
    import transformers

    method, rng = METHODS[method_name], np.random.default_rng(0)
    model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(model_type, **SIZES))
    zoo.randomize(model, 0)
    plain = folder.with_name(folder.name + "-plain")
    model.to(torch.bfloat16).save_pretrained(plain)
    tensors, ends = {}, {}
    for name, tensor in read(plain).items():
        inner = name.endswith("_proj") if method.fused else name.endswith("_proj.weight")
        if not inner or ".layers." not in name:
            tensors[name] = tensor
            continue
        *lead, one, other = tensor.array.shape
        outputs, inputs = (other, one) if method.fused else (one, other)
        found = method.encode(rng, (*lead, outputs, inputs))
        found = {end: smaller(t, method.decode(found).std() * math.sqrt(inputs)) for end, t in found.items()}
        ends[name] = list(found)
        tensors |= {names_of(name, found)[end]: t for end, t in found.items()}
    config = json.loads((plain / "config.json").read_text()) | {"quantization_config": method.settings}
    return write(folder, config, tensors), ends


def smaller(tensor: Stored, by: float) -> Stored:
    """A scale made so much smaller that the weight is of the size of a trained one."""
    if tensor.dtype == "F32":
        return Stored("F32", tensor.array / np.float32(by))
    if tensor.dtype == "U8" and tensor.array.min() > 100:  # powers of two
        return Stored("U8", tensor.array - np.uint8(round(math.log2(by))))
    return tensor


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Case], tuple[Source, Source]]:
    root = tmp_path_factory.mktemp("quantized")

    def get(case: Case) -> tuple[Source, Source]:
        original, shards = root / f"{case.model}-{case.method}", root / case.name
        if not original.exists():
            quantize(original, case.model, case.method)
        if not shards.exists():
            split(original, shards, **case.mesh)
        return open_source(original), open_source(shards)

    return get


@pytest.mark.parametrize("ranks", [2, 4])
def test_correct_shards_are_the_same_model(ranks: int, pairs: Callable[[Case], tuple[Source, Source]]) -> None:
    cases = [case for case in CASES if math.prod(case.mesh.values()) == ranks]
    reports = run_forwards([pairs(case) for case in cases], QUICK)
    for case, report in zip(cases, reports, strict=True):
        assert report.is_same, (case, report.verdict)
        assert report.dtype == "bfloat16", case
        assert any(row.noise > 0 for row in report.layers), case


def test_streamed(pairs: Callable[[Case], tuple[Source, Source]]) -> None:
    cases = [case for case in CASES if case.mesh == {"ep": 2}]
    for case, report in zip(
        cases, run_forwards([pairs(case) for case in cases], ForwardOptions(draws=4, streamed=True)), strict=True
    ):
        assert report.is_same, (case, report.verdict)


@pytest.mark.parametrize("case", [CASES[0], CASES[2], CASES[6]], ids=lambda case: case.name)
def test_what_runs_is_what_the_numbers_mean(
    case: Case, pairs: Callable[[Case], tuple[Source, Source]], tmp_path: Path
) -> None:
    """Each weight of the model that is run is the one that the format's definition gives."""
    folder, ends = quantize(tmp_path / "model", case.model, case.method)
    source = open_source(folder)
    assert source.checkpoint is not None
    plan = dequantized(source.plan)
    loaded = load_original(folder, source.checkpoint.config, plan, torch.float32, {"device_map": {"": "cpu"}})
    held, parameters = read(folder), dict(loaded.model.named_parameters())
    method, compared = METHODS[case.method], 0
    for name, parameter in parameters.items():
        for weight in set(loaded.sources[name]) & ends.keys():
            whole = method.decode({end: held[tensor] for end, tensor in names_of(weight, ends[weight]).items()})
            whole = whole.swapaxes(-1, -2) if method.fused else whole
            assert plan.layouts[weight].full == whole.shape
            if len(loaded.sources[name]) == 1:
                np.testing.assert_allclose(parameter.detach().numpy(), whole, rtol=1e-6)
            else:  # one expert among the others
                rows = {row.tobytes() for row in parameter.detach().numpy().reshape(-1, parameter.shape[-1])}
                assert {row.tobytes() for row in whole} <= rows
            compared += 1
    assert compared == len(ends)


WRONG = [
    (CASES[2], "mlp.experts.1.up_proj.weight_scale_inv", "mlp.experts"),
    (CASES[2], "self_attn.o_proj.weight", "self_attn.o_proj"),
    (CASES[6], "mlp.experts.down_proj_scales", "mlp.experts"),
    (CASES[6], "mlp.experts.gate_up_proj_blocks", "mlp.experts"),
]


def test_a_wrong_scale_or_packed_number_is_seen_and_named(
    pairs: Callable[[Case], tuple[Source, Source]], tmp_path: Path
) -> None:
    found = []
    for number, (case, tensor, _) in enumerate(WRONG):
        original, shards = pairs(case)
        damaged = tmp_path / str(number)
        shutil.copytree(shards.path, damaged)
        name = f"model.layers.1.{tensor}"
        file = damaged / "rank-01-of-02/model.safetensors"
        for at in range(3, shards.ranks[1][name].nbytes, 4):  # the highest byte of each number, or one of four
            change_tensor(file, name, at=at, flip=1)
        found.append((original, open_source(damaged)))
    for (case, tensor, place), report in zip(WRONG, run_forwards(found, QUICK), strict=True):
        assert report.first == f"model.layers.1.{place}", (case, tensor, report.verdict)


def test_what_transformers_cannot_dequantize_is_refused(tmp_path: Path) -> None:
    refused = {
        "gptq": "is quantized by gptq, which transformers cannot load here: .*requires",
        "fbgemm": "is quantized by fbgemm_fp8, which transformers cannot load here: .*requires a GPU",
        "modelopt-nvfp4": "is quantized by modelopt, which transformers cannot load here: Unknown",
        "no-config-fp8": "is quantized, and its config.json does not say how",
    }
    for method, message in refused.items():
        source, _ = quantize(tmp_path / method, "llama", method)
        split(source, tmp_path / f"{method}-shards", tp=2)
        with pytest.raises(ReshardError, match=message) as error:
            run_forward(open_source(source), open_source(tmp_path / f"{method}-shards"))
        assert error.value.hint == "exact_only=True compares the bytes alone"


@pytest.mark.parametrize(("model", "method"), [("llama", "fp8-static"), ("gpt_oss", "fused-fp8-block")])
def test_scales_that_transformers_leaves_aside_are_no_comparison(model: str, method: str, tmp_path: Path) -> None:
    """It reads a module's ``weight_scale_inv``; without the scales the weights would be bare codes on every rank."""
    source, _ = quantize(tmp_path / "model", model, method)
    split(source, tmp_path / "shards", tp=2)
    with pytest.raises(
        RankError, match=r"transformers does not dequantize with 'model.layers.0.*_scale(_inv)?' \(\d+ such"
    ):
        run_forward(open_source(source), open_source(tmp_path / "shards"))


def test_packed_numbers_have_no_gradients(pairs: Callable[[Case], tuple[Source, Source]]) -> None:
    with pytest.raises(ReshardError, match=r"backward is not possible: .* is quantized, and such weights have"):
        run_forward(*pairs(CASES[2]), ForwardOptions(backward=True))
