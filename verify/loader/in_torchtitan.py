"""torchtitan, on a CPU: what its adapter makes of Hugging Face's tensors. Tried with 0.3.

``from_hf`` is a function of tensors: no model is built, and the settings that it asks are those of the original's
config.json. Both checkpoints are in memory at once.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from reshard.verify.loader.chunks import read
from reshard.verify.loader.program import ProgramRank, Request

_FAMILIES = {
    "llama": "llama3", "qwen3": "qwen3", "qwen3_moe": "qwen3",
    "deepseek_v2": "deepseek_v3", "deepseek_v3": "deepseek_v3",
}  # fmt: skip
"""The folder of torchtitan's models for each model type. Its gpt-oss has names in its adapter that its model lacks."""
_BALANCE = "moe.expert_bias_E"
"""A buffer in float32 of every layer with experts; its model begins with zeros."""
_EXPERTS = ("num_experts", "n_routed_experts", "num_local_experts")


def prepare(request: Request) -> str:
    """Say which torchtitan it is; its model is imported with its adapter."""
    return f"torchtitan {version('torchtitan')}"


def ranks(request: Request) -> Iterator[ProgramRank]:
    """The whole model: chunks of any mesh are those of its tensors."""
    config = json.loads((Path(request.original) / "config.json").read_text(encoding="utf-8"))
    kind = config.get("model_type")
    if kind not in _FAMILIES:
        raise ValueError(f"no adapter of torchtitan's is known for the type '{kind}'")
    files, _ = read(request.shards)
    state: dict[str, Tensor] = {}
    yield ProgramRank(
        "rank 0", lambda: state, files, lambda: state.update(_converted(request.original, kind, config, files))
    )


def _converted(original: str, kind: str, config: Mapping[str, Any], files: Mapping[str, Tensor]) -> dict[str, Tensor]:
    module = import_module(f"torchtitan.models.{_FAMILIES[kind]}.state_dict_adapter")
    (name,) = (each for each, of in vars(module).items() if getattr(of, "__module__", "") == module.__name__)
    adapter = getattr(module, name)(_settings(config), None)
    adapter._validate_hf_rope_config = lambda _: None  # of models that are built
    found: dict[str, Tensor] = {key: each.contiguous() for key, each in adapter.from_hf(read(original)[0]).items()}
    experts = {key.partition("moe.")[0] for key in found if ".moe." in key}
    lacking = {f"{layer}{_BALANCE}" for layer in experts} - found.keys()
    found |= {key: each.float() for key, each in found.items() if key.endswith(_BALANCE)}
    return found | {key: torch.zeros(files[key].shape) for key in lacking & files.keys()}


def _settings(config: Mapping[str, Any]) -> SimpleNamespace:
    """A model's settings as torchtitan's adapters read them."""
    experts = next((config[key] for key in _EXPERTS if config.get(key)), None)
    attention = SimpleNamespace(
        n_heads=config["num_attention_heads"], n_kv_heads=config.get("num_key_value_heads"), head_dim=None,
        q_lora_rank=config.get("q_lora_rank") or 0,
    )  # fmt: skip
    moe = SimpleNamespace(num_experts=experts) if experts else None
    return SimpleNamespace(
        layers=[SimpleNamespace(attention=attention, moe=moe)] * config["num_hidden_layers"], dim=config["hidden_size"],
        mtp_layers=[None] * (config.get("num_nextn_predict_layers") or 0),
        enable_weight_tying=config.get("tie_word_embeddings", False),
    )  # fmt: skip
