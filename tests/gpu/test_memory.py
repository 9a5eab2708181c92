"""Tensors in a GPU's memory: a rank is loaded into it, and a module in it is a source."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

import reshard
from tests.store import checkpoint


def test_a_rank_is_loaded() -> None:
    on_gpu, on_cpu = (reshard.load(checkpoint("phi3"), tp=2, rank=1, device=device) for device in ("cuda", "cpu"))
    assert {tensor.device.type for tensor in on_gpu.values()} == {"cuda"} and on_gpu.keys() == on_cpu.keys()
    assert all(torch.equal(tensor.cpu(), on_cpu[name]) for name, tensor in on_gpu.items())


def test_a_module_is_a_source(tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(checkpoint("mixtral"), dtype="auto").cuda()
    reshard.merge(reshard.state_dict(model), tmp_path / "out")
    merged, expected = (
        load_file(tmp_path / "out/model.safetensors"),
        load_file(checkpoint("mixtral") / "model.safetensors"),
    )
    assert merged.keys() == expected.keys()
    assert all(torch.equal(merged[name], tensor) for name, tensor in expected.items())
