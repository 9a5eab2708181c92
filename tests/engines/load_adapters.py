"""Adapters that reshard converts, read by vLLM's own loader of LoRA adapters.

    .engines/vllm/bin/python -m tests.engines.load_adapters

For small models A and B are written for each expert, with numbers of their own, or for a dense model's modules. reshard
converts them to the form that vLLM has for the model. ``LoRAModel.from_local_checkpoint`` reads it, with the model's
own names, and ``pack_moe`` or ``_stack_moe_lora_weights`` puts the experts together. What vLLM then adds to each matrix
must be scale * (B A), bit for bit. No engine is started, and no kernel runs. Exit code 1: something differs.
"""

from __future__ import annotations

import importlib
import json
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import torch
from safetensors.torch import save_file
from vllm.lora.lora_model import LoRAModel
from vllm.lora.lora_weights import PackedLoRALayerWeights
from vllm.lora.model_manager import LoRAModelManager
from vllm.lora.peft_helper import PEFTHelper

from reshard.api import split
from tests import zoo

RANK, ALPHA = 3, 6


class Case(NamedTuple):
    """A model of the zoo, vLLM's class ("": importing it needs torchvision), a module and its experts (0: a dense MLP),
    its sizes, the names of gate, up and down in a checkpoint, and the form that vLLM takes.
    """

    name: str
    model: str
    place: str
    experts: int
    hidden: int
    ff: int
    names: tuple[str, ...] = ("gate_proj", "up_proj", "down_proj")
    format: str = "peft-per-expert"


_LAYER = "model.layers.1.mlp"
CASES = [
    Case("llama", "llama.LlamaForCausalLM", _LAYER, 0, 80, 72),
    Case("mixtral", "mixtral.MixtralForCausalLM", "model.layers.1.block_sparse_moe", 6, 80, 40, ("w1", "w3", "w2")),
    Case("qwen2_moe", "qwen2_moe.Qwen2MoeForCausalLM", _LAYER, 5, 80, 24),
    Case("qwen3_moe", "qwen3_moe.Qwen3MoeForCausalLM", "model.layers.2.mlp", 5, 80, 24),
    Case("deepseek_v2", "deepseek_v2.DeepseekV2ForCausalLM", _LAYER, 6, 80, 24),
    Case("deepseek_v3", "deepseek_v2.DeepseekV3ForCausalLM", _LAYER, 6, 80, 24),
    Case("glm4_moe", "glm4_moe.Glm4MoeForCausalLM", _LAYER, 6, 80, 24),
    Case(
        "nemotron_h", "nemotron_h.NemotronHForCausalLM", "backbone.layers.2.mixer", 6, 80, 24, ("up_proj", "down_proj")
    ),
    Case("gpt_oss", "gpt_oss.GptOssForCausalLM", _LAYER, 6, 80, 40, format="peft"),
    Case("qwen3_5_moe_text", "", _LAYER, 5, 80, 24, format="peft"),
]


def _write(case: Case, folder: Path) -> dict[str, torch.Tensor]:
    """Write an adapter with A and B for each matrix of each expert; what it adds, by expert and name."""
    chance, tensors, added = torch.Generator().manual_seed(0), dict[str, torch.Tensor](), dict[str, torch.Tensor]()
    for number in range(max(case.experts, 1)):
        for name in case.names:
            is_down = name == case.names[-1]
            out, inner = (case.hidden, case.ff) if is_down else (case.ff, case.hidden)
            a = torch.randint(-3, 4, (RANK, inner), generator=chance).float() / 4
            b = torch.randint(-3, 4, (out, RANK), generator=chance).float() / 4
            module = f"{case.place}.experts.{number}.{name}" if case.experts else f"{case.place}.{name}"
            tensors[f"base_model.model.{module}.lora_A.weight"] = a
            tensors[f"base_model.model.{module}.lora_B.weight"] = b
            added[f"{number} {name}"] = ALPHA / RANK * (b @ a)
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors", {"format": "pt"})
    settings = {"peft_type": "LORA", "r": RANK, "lora_alpha": ALPHA, "target_modules": [*case.names]}
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    return added


def _read(case: Case, folder: Path) -> LoRAModel:
    """What vLLM's loader reads."""
    module, _, name = case.model.rpartition(".")
    model = getattr(importlib.import_module(f"vllm.model_executor.models.{module}"), name) if name else None
    expected = {f"experts.{number}.{each}" for number in range(case.experts) for each in case.names}
    helper = PEFTHelper.from_local_dir(str(folder), max_position_embeddings=None)
    mapper = getattr(model, "hf_to_vllm_mapper", None)
    return LoRAModel.from_local_checkpoint(
        str(folder), expected | {*case.names, "experts"}, helper, lora_model_id=1, device="cpu",
        weights_mapper=mapper.get_rename_mapper() if mapper else None,
    )  # fmt: skip


def _apart(case: Case, lora: LoRAModel) -> dict[str, torch.Tensor]:
    """What vLLM adds to each matrix, by expert and name."""
    if not case.experts:
        return {
            f"0 {name.split('.')[-1]}": each.scaling * (each.lora_b @ each.lora_a) for name, each in lora.loras.items()
        }
    experts = next(name.partition(".experts")[0] for name in lora.loras) + ".experts"
    gate_up, down = case.names[:-1], case.names[-1]
    if case.format == "peft":
        manager = SimpleNamespace(_is_3d_moe_model=True, _get_lora_layer_weights=lambda of, name: of.get_lora(name))
        module = SimpleNamespace(
            w13_lora_a_stacked=[torch.zeros(1, case.experts)], global_num_experts=case.experts, ep_rank=0
        )
        scales = [lora.loras[f"{experts}.base_layer"].scaling, lora.loras[experts].scaling]
        LoRAModelManager._stack_moe_lora_weights(manager, lora, module, experts)
        both = lora.loras[experts]
        w13, w2 = (scale * (b @ a) for scale, a, b in zip(scales, both.lora_a, both.lora_b, strict=True))
        halves = (w13[:, 0::2], w13[:, 1::2]) if case.name == "gpt_oss" else (w13[:, : case.ff], w13[:, case.ff :])
        joined = [halves[0], w2, halves[1]]
    else:
        each_own = [
            [lora.loras.get(f"{experts}.{number}.{name}") for name in (gate_up[0], down, *gate_up[1:])]
            for number in range(case.experts)
        ]
        listed = [each for of in each_own for each in (*of, *([None] if len(of) == 2 else []))]
        packed = PackedLoRALayerWeights.pack_moe(listed, experts, is_non_gated_moe=len(gate_up) == 1)
        joined = [scale * (b @ a) for scale, a, b in zip(packed.scaling, packed.lora_a, packed.lora_b, strict=True)]
    found = dict(zip((gate_up[0], down, *gate_up[1:]), joined, strict=False))
    return {f"{number} {name}": each[number] for name, each in found.items() for number in range(case.experts)}


def main() -> int:
    """Compare all; 1 if something differs."""
    failed = 0
    for case in CASES:
        with tempfile.TemporaryDirectory() as work:
            base = zoo.save(case.name, Path(work, "base"))
            wanted = _write(case, Path(work, "own"))
            way = ["peft", case.format] if case.format == "peft-per-expert" else [case.format]
            source = Path(work, "own")
            for number, form in enumerate(way):
                split(source, Path(work, str(number)), format=form, config=base)
                source = Path(work, str(number))
            found = _apart(case, _read(case, source))
        same = found.keys() == wanted.keys() and all(torch.equal(found[name], wanted[name]) for name in wanted)
        failed += not same
        print(f"{case.name}: {len(wanted)} matrices as {case.format}: {'same' if same else 'DIFFERENT'}", flush=True)
    return min(failed, 1)


if __name__ == "__main__":
    sys.exit(main())
