"""LoRA adapters: A and B follow the rule of their weight."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from formats.errors import CheckpointError, PlanError
from reshard.api import Access, merge, split
from tests.support import LLAMA, command, contents, write_checkpoint

PREFIX = "base_model.model."
WEIGHTS = {
    "self_attn.q_proj": (48, 20), "self_attn.v_proj": (24, 20), "self_attn.o_proj": (20, 48),
    "mlp.up_proj": (24, 20), "mlp.down_proj": (20, 24),
}  # fmt: skip


def adapter(folder: Path, settings: dict[str, Any] | None = None, rank: int = 2) -> Path:
    """A LoRA adapter as PEFT saves it."""
    folder.mkdir()
    chance, tensors = np.random.default_rng(0), {}
    for layer in range(LLAMA["num_hidden_layers"]):
        for module, (out, inner) in WEIGHTS.items():
            r = 4 if module == "mlp.up_proj" else rank
            name = f"{PREFIX}model.layers.{layer}.{module}"
            tensors[f"{name}.lora_A.weight"] = chance.standard_normal((r, inner)).astype(np.float32)
            tensors[f"{name}.lora_B.weight"] = chance.standard_normal((out, r)).astype(np.float32)
    tensors[f"{PREFIX}model.embed_tokens.lora_embedding_A"] = chance.standard_normal((rank, 37)).astype(np.float32)
    tensors[f"{PREFIX}model.embed_tokens.lora_embedding_B"] = chance.standard_normal((20, rank)).astype(np.float32)
    tensors[f"{PREFIX}lm_head.weight"] = chance.standard_normal((37, 20)).astype(np.float32)
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    config = {
        "peft_type": "LORA", "r": rank, "lora_alpha": 4, "rank_pattern": {"up_proj": 4}, "modules_to_save": ["lm_head"],
        "target_modules": [module.rpartition(".")[2] for module in WEIGHTS], "base_model_name_or_path": "nowhere/base",
    }  # fmt: skip
    (folder / "adapter_config.json").write_text(json.dumps(config | (settings or {})))
    (folder / "README.md").write_text("# an adapter\n")
    return folder


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_a_and_b_are_cut_with_their_weight(tp: int, tmp_path: Path) -> None:
    base, source = write_checkpoint(tmp_path / "base"), adapter(tmp_path / "adapter")
    split(base, tmp_path / "whole", tp)
    split(source, tmp_path / "out", tp, access=Access(config=base))
    tensors = load_file(source / "adapter_model.safetensors")
    weights = [load_one(tmp_path / "whole", rank, tp, "model.safetensors") for rank in range(tp)]
    for rank in range(tp):
        found = load_one(tmp_path / "out", rank, tp, "adapter_model.safetensors")
        assert found.keys() == tensors.keys()
        for layer in range(LLAMA["num_hidden_layers"]):
            for module, (out, inner) in WEIGHTS.items():
                name = f"model.layers.{layer}.{module}"
                rows, columns = weights[rank][f"{name}.weight"]
                a, b = (found[f"{PREFIX}{name}.lora_{of}.weight"] for of in "AB")
                whole_a, whole_b = (tensors[f"{PREFIX}{name}.lora_{of}.weight"] for of in "AB")
                assert (b.shape[0], a.shape[1]) == (rows, columns)
                assert (a.shape[0], b.shape[1]) == (whole_a.shape[0], whole_b.shape[1])
                first_row, first_column = (rank * n if n < of else 0 for n, of in ((rows, out), (columns, inner)))
                assert np.array_equal(b, whole_b[first_row : first_row + rows])
                assert np.array_equal(a, whole_a[:, first_column : first_column + columns])
        assert (tmp_path / "out" / folder_of(rank, tp) / "adapter_config.json").is_file()


def folder_of(rank: int, tp: int) -> str:
    return f"rank-{rank:02d}-of-{tp:02d}"


def load_one(folder: Path, rank: int, tp: int, file: str) -> dict[str, Any]:
    """The tensors of a rank; those of a model, which are BF16, by their shapes."""
    path = folder / folder_of(rank, tp) / file
    if file.startswith("adapter"):
        return load_file(path)
    from formats.files.safetensors import read_header

    return {name: info.shape for name, info in read_header(path).tensors.items() if len(info.shape) == 2}


def test_it_is_merged_and_split_again(tmp_path: Path) -> None:
    base, source = write_checkpoint(tmp_path / "base"), adapter(tmp_path / "adapter")
    done = command("split", source, tmp_path / "out", "--tp", "4", "--config", base)
    assert done.returncode == 0, done.stderr
    merge(tmp_path / "out", tmp_path / "merged")
    restored = contents(tmp_path / "merged")
    assert {name: restored[name] for name in contents(source)} == contents(source)
    assert restored.keys() - contents(source).keys() == {"config.json"}
    split(tmp_path / "out", tmp_path / "two", 2)
    split(tmp_path / "merged", tmp_path / "direct", 2)
    for rank in range(2):
        file = f"{folder_of(rank, 2)}/adapter_model.safetensors"
        one, other = (load_file(tmp_path / way / file) for way in ("two", "direct"))
        assert all(np.array_equal(one[name], other[name]) for name in one) and one.keys() == other.keys()


def test_it_is_verified(tmp_path: Path) -> None:
    base, source = write_checkpoint(tmp_path / "base"), adapter(tmp_path / "adapter")
    split(source, tmp_path / "out", 2, access=Access(config=base))
    (source / "config.json").write_bytes((base / "config.json").read_bytes())
    done = command("verify", source, tmp_path / "out", "--exact-only")
    assert done.returncode == 0, done.stdout + done.stderr
    file = tmp_path / "out" / folder_of(1, 2) / "adapter_model.safetensors"
    content = bytearray(file.read_bytes())
    content[-5] ^= 1
    file.write_bytes(content)
    assert command("verify", source, tmp_path / "out", "--exact-only").returncode == 1


def test_a_program_without_adapters_refuses_it(tmp_path: Path) -> None:
    base, source = write_checkpoint(tmp_path / "base"), adapter(tmp_path / "adapter")
    with pytest.raises(PlanError, match="an adapter has no place in the format 'vllm'"):
        split(source, tmp_path / "out", 2, form="vllm", access=Access(config=base))
    split(source, tmp_path / "dcp", 2, form="dcp", access=Access(config=base))
    merge(tmp_path / "dcp", tmp_path / "merged")
    restored = contents(tmp_path / "merged")
    assert {name: restored[name] for name in contents(source)} == contents(source)


def test_what_is_refused(tmp_path: Path) -> None:
    base, source = write_checkpoint(tmp_path / "base"), adapter(tmp_path / "adapter")
    with pytest.raises(CheckpointError, match=r"there is no config\.json of the model that it changes"):
        split(source, tmp_path / "out", 2)
    other = adapter(tmp_path / "other", {"peft_type": "IA3"})
    with pytest.raises(PlanError, match="the adapter is 'IA3'; only LORA is read"):
        split(other, tmp_path / "out", 2, access=Access(config=base))
    wrong = adapter(tmp_path / "wrong", {"r": 3})
    with pytest.raises(PlanError, match=r"has shape \[2, 37\], and the rule gives '3 vocab' \[3, 37\]"):
        split(wrong, tmp_path / "out", 2, access=Access(config=base))
    local = adapter(tmp_path / "local", {"base_model_name_or_path": str(base)})
    split(local, tmp_path / "out", 2)
