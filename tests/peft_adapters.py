"""Adapters as PEFT itself makes them, to models of the zoo."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch

from tests import store, zoo

KINDS: dict[str, dict[str, Any]] = {
    "linear": {"target_modules": "all-linear"},
    "tower": {"target_modules": ["fc1", "attn.proj", "q_proj", "multi_modal_projector.mm_input_projection"]},
    "embeddings": {"target_modules": ["embed_tokens", "lm_head"]},
    "positions": {"target_modules": ["wpe", "c_attn"]},
    "experts": {"target_modules": [], "target_parameters": ["experts.gate_up_proj", "experts.down_proj"]},
    "up": {"target_modules": [], "target_parameters": ["experts.up_proj", "experts.down_proj"]},
    "down": {"target_modules": [], "target_parameters": ["experts.down_proj"]},
}
"""What of a model is changed, as the arguments of LoraConfig."""


def made(name: str, kind: str, dtype: str = "float32", **settings: Any) -> Path:
    """An adapter to a checkpoint of the store."""
    key = "-".join(f"{setting}-{value}" for setting, value in settings.items() if not isinstance(value, dict))
    return store.made(
        f"{name}-{dtype}-adapter-{kind}{key}{len(settings)}",
        lambda folder: save(store.checkpoint(name, dtype), folder, kind, dtype, **settings),
    )


def save(base: Path, folder: Path, kind: str, dtype: str = "float32", **settings: Any) -> None:
    """An adapter to a checkpoint: A and B are small multiples of 1/4, so that sums of them are exact."""
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(**{"r": 3, "lora_alpha": 6, "lora_dropout": 0.0, **KINDS[kind], **settings})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = get_peft_model(zoo.class_of(base).from_pretrained(base, dtype=getattr(torch, dtype)), config)
        generator = torch.Generator().manual_seed(1)
        for key, tensor in model.named_parameters():
            if "lora_" in key:
                tensor.data = torch.randint(-3, 4, tensor.shape, generator=generator).to(tensor.dtype) / 4
        model.save_pretrained(folder)


def merged(name: str, adapter: Path, folder: Path, dtype: str = "float32") -> Path:
    """The checkpoint that PEFT makes of a model and an adapter."""
    from peft import PeftModel

    base = store.checkpoint(name, dtype)
    model = zoo.class_of(base).from_pretrained(base, dtype=getattr(torch, dtype))
    PeftModel.from_pretrained(model, adapter).merge_and_unload().save_pretrained(folder)
    return folder
