"""LoRA adapters: A and B follow the rule of their weight."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file
from safetensors.torch import load_file as load_torch

from reshard.api import inspect, merge, split
from reshard.formats.errors import CheckpointError, PlanError
from reshard.formats.files.safetensors import read_header
from reshard.formats.notation.architecture import SETTINGS
from reshard.formats.notation.architecture_files import find_architecture
from reshard.formats.notation.format_file import adapter_format_names
from reshard.source.opening import open_source
from reshard.verify.bytes.exact import verify_exact
from tests import store
from tests.support import LLAMA, command, contents, ok, write_checkpoint

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
        "target_modules": [*(module.rpartition(".")[2] for module in WEIGHTS), "embed_tokens"],
        "base_model_name_or_path": "nowhere/base",
    }  # fmt: skip
    (folder / "adapter_config.json").write_text(json.dumps(config | (settings or {})))
    (folder / "README.md").write_text("# an adapter\n")
    return folder


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_a_and_b_are_cut_with_their_weight(tp: int, tmp_path: Path) -> None:
    base, source = write_checkpoint(tmp_path / "base"), adapter(tmp_path / "adapter")
    split(base, tmp_path / "whole", tp=tp)
    split(source, tmp_path / "out", tp=tp, config=base)
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
    from reshard.formats.files.safetensors import read_header

    return {name: info.shape for name, info in read_header(path).tensors.items() if len(info.shape) == 2}


def test_it_is_merged_and_split_again(tmp_path: Path) -> None:
    base, source = write_checkpoint(tmp_path / "base"), adapter(tmp_path / "adapter")
    ok("split", source, tmp_path / "out", "--tp", "4", "--config", base)
    merge(tmp_path / "out", tmp_path / "merged")
    assert contents(tmp_path / "merged") == contents(source)
    split(tmp_path / "out", tmp_path / "two", tp=2)
    split(tmp_path / "merged", tmp_path / "direct", tp=2, config=base)
    for rank in range(2):
        file = f"{folder_of(rank, 2)}/adapter_model.safetensors"
        one, other = (load_file(tmp_path / way / file) for way in ("two", "direct"))
        assert all(np.array_equal(one[name], other[name]) for name in one) and one.keys() == other.keys()


def test_it_is_cast_as_other_weights_are(tmp_path: Path) -> None:
    base, source = write_checkpoint(tmp_path / "base"), adapter(tmp_path / "adapter")
    split(source, tmp_path / "out", tp=2, config=base, dtype="bf16")
    for way, place in (("out", {}), ("adapter", {"config": base, "dtype": "bf16"})):
        merge(tmp_path / way, tmp_path / f"merged-{way}", **place)
        found, stored = (load_torch(tmp_path / of / "adapter_model.safetensors") for of in (f"merged-{way}", "adapter"))
        assert found.keys() == stored.keys()
        assert all(torch.equal(tensor, stored[name].bfloat16()) for name, tensor in found.items())
        settings = "adapter_config.json"
        assert (tmp_path / f"merged-{way}" / settings).read_bytes() == (source / settings).read_bytes()
    assert verify_exact(open_source(tmp_path / "merged-adapter", config=base), tmp_path / "out").verdict == "same"


def test_it_is_verified(tmp_path: Path) -> None:
    base, source = write_checkpoint(tmp_path / "base"), adapter(tmp_path / "adapter")
    split(source, tmp_path / "out", tp=2, config=base)
    ok("verify", source, tmp_path / "out", "--exact-only", "--config", base)
    file = tmp_path / "out" / folder_of(1, 2) / "adapter_model.safetensors"
    content = bytearray(file.read_bytes())
    content[-5] ^= 1
    file.write_bytes(content)
    assert command("verify", source, tmp_path / "out", "--exact-only", "--config", base).returncode == 1


def test_a_config_of_its_own_is_restored(tmp_path: Path) -> None:
    base, source = write_checkpoint(tmp_path / "base"), adapter(tmp_path / "adapter")
    (source / "config.json").write_bytes((base / "config.json").read_bytes())
    split(source, tmp_path / "out", tp=2)
    merge(tmp_path / "out", tmp_path / "merged")
    assert contents(tmp_path / "merged") == contents(source)
    assert command("verify", source, tmp_path / "out", "--exact-only").returncode == 0


def test_a_program_without_adapters_refuses_it(tmp_path: Path) -> None:
    base, source = write_checkpoint(tmp_path / "base"), adapter(tmp_path / "adapter")
    with pytest.raises(PlanError, match="an adapter has no place in the format 'vllm'"):
        split(source, tmp_path / "out", tp=2, format="vllm", config=base)
    found = json.loads(command("formats", source, "--config", base, "--json").stdout)["formats"]
    assert found["dcp"]["possible"] and "an adapter has no place" in found["vllm"]["reason"]
    held = {"dcp", *adapter_format_names()}
    assert {name for name, each in found.items() if each["possible"]} <= held, found
    assert found["peft-per-expert"]["possible"] and "all modules" in found["sglang-lora"]["reason"]
    split(source, tmp_path / "dcp", tp=2, format="dcp", config=base)
    merge(tmp_path / "dcp", tmp_path / "merged")
    restored = contents(tmp_path / "merged")
    assert {name: restored[name] for name in contents(source)} == contents(source)


def test_what_is_refused(tmp_path: Path) -> None:
    base, source = write_checkpoint(tmp_path / "base"), adapter(tmp_path / "adapter")
    with pytest.raises(CheckpointError, match=r"there is no config\.json of the model that it changes"):
        split(source, tmp_path / "out", tp=2)
    other = adapter(tmp_path / "other", {"peft_type": "IA3"})
    with pytest.raises(PlanError, match="the adapter is 'IA3'; only LORA is read"):
        split(other, tmp_path / "out", tp=2, config=base)
    wrong = adapter(tmp_path / "wrong", {"r": 3})
    with pytest.raises(PlanError, match=r"has shape \[2, 37\], but the rule '3 vocab' gives \[3, 37\]"):
        split(wrong, tmp_path / "out", tp=2, config=base)
    local = adapter(tmp_path / "local", {"base_model_name_or_path": str(base)})
    split(local, tmp_path / "out", tp=2)


def test_a_number_of_the_model_that_an_adapter_saves_whole_has_a_rule() -> None:
    config = {"model_type": "apertus", SETTINGS: {"peft_type": "LORA", "r": 2}}
    match = find_architecture(config, Path()).match(f"{PREFIX}model.layers.3.mlp.act_fn.beta")
    assert match is not None and [str(shape) for rule in match.rules for shape in rule.shapes] == [""]


def test_inspect_says_what_split_would_say(tmp_path: Path) -> None:
    base, source = write_checkpoint(tmp_path / "base"), adapter(tmp_path / "adapter")
    done = command("inspect", source)
    assert done.returncode == 0 and "PEFT adapter" in done.stdout and "merge it into its base" not in done.stdout
    assert "there is no config.json of the model that it changes" in done.stdout and "--config DIR" in done.stdout
    assert "(null)" not in done.stdout
    local = adapter(tmp_path / "local", {"base_model_name_or_path": str(base)})
    found = inspect(local)
    assert (found.kind, found.model_type, found.refused, found.complete) == ("PEFT adapter", "llama", None, True)
    assert found.tensors == len(read_header(local / "adapter_model.safetensors").tensors)
    wrong = adapter(tmp_path / "wrong", {"r": 3, "base_model_name_or_path": str(base)})
    assert not inspect(wrong).complete
    (source / "adapter_model.safetensors").write_bytes(b"{}")
    assert not inspect(source).complete


@pytest.mark.parametrize("degrees", [{"tp": 2}, {"tp": 1, "ep": 2}, {"tp": 2, "ep": 2}])
@pytest.mark.parametrize("target", ["mlp.experts.{}", "layers.1.mlp.experts.{}"])
def test_a_and_b_of_experts_that_are_one_tensor(target: str, degrees: dict[str, int], tmp_path: Path) -> None:
    """A is the identity for each expert and B the weight, so that their product on a rank is the rank's weight."""
    base, source = store.checkpoint("gpt_oss"), tmp_path / "adapter"
    whole = load_all(base)
    r = max(whole["model.layers.0.mlp.experts.gate_up_proj"].shape[1:])
    tensors, names = dict[str, Any](), dict[str, str]()
    for layer in (1,) if "layers" in target else (0, 1):
        for nested, leaf in (("", "down_proj"), ("base_layer.", "gate_up_proj")):
            name = f"model.layers.{layer}.mlp.experts.{leaf}"
            experts, rows, _ = whole[name].shape
            module = f"{PREFIX}{name.rpartition('.')[0]}.{nested}"
            tensors[f"{module}lora_A.weight"] = np.tile(np.eye(r, rows, dtype=np.float32), (experts, 1))
            b = np.pad(whole[name].transpose(2, 1, 0), ((0, 0), (0, r - rows), (0, 0)))  # out, r, expert
            tensors[f"{module}lora_B.weight"], names[module] = b.reshape(len(b), -1), name
    source.mkdir()
    save_file(tensors, source / "adapter_model.safetensors", metadata={"format": "pt"})
    targets = [target.format(leaf) for leaf in ("gate_up_proj", "down_proj")]
    settings = {"peft_type": "LORA", "r": r, "target_parameters": targets}
    (source / "adapter_config.json").write_text(json.dumps(settings))
    split(base, tmp_path / "base", **degrees)
    split(source, tmp_path / "out", **degrees, config=base)
    folders = sorted(path.name for path in (tmp_path / "out").iterdir() if path.is_dir())
    assert len(folders) == degrees["tp"] * degrees.get("ep", 1)
    for folder in folders:
        found, wanted = load_all(tmp_path / "out" / folder), load_all(tmp_path / "base" / folder)
        for module, name in names.items():
            a, b = (found[f"{module}lora_{of}.weight"] for of in "AB")
            a, b = a.reshape(-1, r, a.shape[1]), b.reshape(b.shape[0], r, -1)
            assert np.array_equal(np.einsum("ore,eri->eio", b, a), wanted[name]), (folder, name)
    merge(tmp_path / "out", tmp_path / "merged")
    assert load_all(tmp_path / "merged").keys() == tensors.keys()
    assert all(np.array_equal(each, tensors[name]) for name, each in load_all(tmp_path / "merged").items())


def test_experts_that_the_checkpoint_has_by_name_are_one_tensor_in_the_adapter(tmp_path: Path) -> None:
    base, source = store.checkpoint("qwen3_moe"), tmp_path / "adapter"
    config = json.loads((base / "config.json").read_text())
    experts, ff, hidden = (config[key] for key in ("num_local_experts", "moe_intermediate_size", "hidden_size"))
    module, chance = f"{PREFIX}model.layers.1.mlp.experts.", np.random.default_rng(0)
    a, b = chance.standard_normal((experts * 2, 2 * ff)), chance.standard_normal((hidden, 2 * experts))
    tensors = {f"{module}lora_A.weight": a.astype(np.float32), f"{module}lora_B.weight": b.astype(np.float32)}
    source.mkdir()
    save_file(tensors, source / "adapter_model.safetensors")
    settings = {"peft_type": "LORA", "r": 2, "target_parameters": ["experts.gate_up_proj"]}
    (source / "adapter_config.json").write_text(json.dumps(settings))
    split(source, tmp_path / "out", tp=2, config=base)
    for rank, gate in enumerate(np.split(np.arange(ff), 2)):
        found = load_one(tmp_path / "out", rank, 2, "adapter_model.safetensors")
        assert np.array_equal(
            found[f"{module}lora_A.weight"], tensors[f"{module}lora_A.weight"][:, [*gate, *(gate + ff)]]
        )
        assert np.array_equal(found[f"{module}lora_B.weight"], tensors[f"{module}lora_B.weight"])


def load_all(folder: Path) -> dict[str, Any]:
    return {name: each for file in folder.glob("*.safetensors") for name, each in load_file(file).items()}
