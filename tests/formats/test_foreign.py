"""Folders in other programs' forms, and models quantized by methods that are not known: named, with what to do."""

from __future__ import annotations

from pathlib import Path

import pytest

from reshard.api import inspect, plan, split
from reshard.formats.errors import CheckpointError, PlanError
from reshard.formats.files.checkpoint import refuse_foreign
from tests.support import LLAMA, write_checkpoint, write_folder


def folder(path: Path, *names: str) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    for name in names:
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_bytes(b"{}")
    return path


@pytest.mark.parametrize(
    ("names", "what", "hint"),
    [
        (["config.json", "pytorch_model-00001-of-00002.bin"], "pytorch_model.bin.index.json is missing", "fetch"),
        (["adapter_config.json", "adapter_model.safetensors"], "a PEFT adapter", "--into BASE"),
        (["adapter_config.json", "adapter_model.bin", "config.json"], "a PEFT adapter", "merge_and_unload"),
        (["model_index.json", "unet/diffusion_pytorch_model.safetensors"], "a diffusers pipeline", "text_encoder"),
        (["model-Q4_K_M.gguf", "config.json"], "GGUF, the format of llama.cpp", "safetensors checkpoint"),
        (["iter_0000100/mp_rank_00_001/model_rng.pt"], "an unfinished checkpoint of Megatron-LM", "earlier iteration"),
        (["common.pt"], "an unfinished checkpoint of Megatron-LM", "the rest of this one: .metadata"),
        (["iter_0000100/.metadata", "iter_0000100/common.pt"], "a folder of Megatron-LM's", "give the folder"),
        (["release/mp_rank_00/model_optim_rng.pt"], "and no latest_checkpointed_iteration.txt", "give the folder"),
        (["fsdp_0/.metadata", "fsdp_0/__0_0.distcp"], "distributed checkpoint", "that holds .metadata"),
        (["latest", "zero_to_fp32.py", "global_step9/mp_rank_00_model_states.pt"], "DeepSpeed", "the folder of one"),
        (["global_step9/bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt"], "DeepSpeed", "the one with 'latest'"),
        (["global_step_1/actor/model_world_size_8_rank_0.pt"], "a training checkpoint of FSDP", "the folder of these"),
        (["config.json", "tf_model.h5"], "TensorFlow or Flax", "from_tf"),
        (["delta.json", "delta.safetensors"], "a delta (delta.json)", "'reshard patch BASE DELTA OUT'"),
    ],
)  # fmt: skip
def test_it_is_named(tmp_path: Path, names: list[str], what: str, hint: str) -> None:
    path = folder(tmp_path / "model", *names)
    for command in (plan, inspect):
        if command is inspect and names[-1].endswith(("00002.bin", "adapter_model.safetensors")):
            report = inspect(path)
            assert report.kind == what.removeprefix("a ") or (what in report.problems[0] and hint in str(report.hint))
            continue
        with pytest.raises(CheckpointError) as error:
            command(path)
        assert f"{path} is" in error.value.message and what in error.value.message
        assert hint in str(error.value.hint)


def test_one_file_is_named(tmp_path: Path) -> None:
    folder(tmp_path, "model.gguf")
    for command in (plan, inspect):
        with pytest.raises(CheckpointError, match="is GGUF"):
            command(tmp_path / "model.gguf")


def test_a_checkpoint_beside_other_forms_is_read(tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "source")
    folder(source, "adapter_config.json", "adapter_model.safetensors", "model.gguf", "latest", "zero_to_fp32.py")
    split(source, tmp_path / "out", tp=2)


def test_what_is_of_no_known_kind() -> None:
    refuse_foreign("a folder", ["config.json", "weights.dat"])


def test_a_part_of_a_diffusers_pipeline(tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "source")
    (source / "config.json").write_text('{"_class_name": "UNet2DConditionModel", "_diffusers_version": "0.30.0"}')
    with pytest.raises(PlanError, match="a model of diffusers"):
        plan(source)


@pytest.mark.parametrize(
    ("settings", "tensor", "method"),
    [
        ({"quantization": {"group_size": 64, "bits": 4}}, ("scales", "BF16", (48, 1)), "MLX"),
        ({"quantization_config": {"group_size": 64, "bits": 4, "mode": "affine"}}, ("biases", "BF16", (48, 1)), "MLX"),
        ({"quantization": {"group_size": 64, "bits": 4}}, ("weight", "U32", (48, 3)), "MLX"),
        ({"quantization_config": {"quant_method": "quanto"}}, ("weight._data", "I8", (48, 20)), "'quanto'"),
        ({"quantization_config": {"quant_method": "hqq"}}, ("W_q", "U8", (24, 20)), "'hqq'"),
    ],
)
def test_a_method_that_is_not_known_is_named(tmp_path: Path, settings: dict, tensor: tuple, method: str) -> None:
    """To be advised to write a line of numbers would be wrong: each rank would have the whole of a part of a weight."""
    name, dtype, shape = tensor
    tensors = [(f"model.layers.0.self_attn.q_proj.{name}", dtype, shape)]
    source = write_folder(tmp_path / "source", LLAMA | settings, tensors)
    with pytest.raises(PlanError) as error:
        plan(source)
    said = f"{error.value.message} {error.value.hint}"
    assert f"quantized by {method}, a method that is not known here" in said
    assert "split the model as it was before it was quantized" in said and "add a line" not in said


def test_what_stands_beside_a_weight_is_not_advised_to_be_whole(tmp_path: Path) -> None:
    tensors = [("model.layers.0.self_attn.q_proj.unheard", "F32", (48, 1))]
    source = write_folder(tmp_path / "source", LLAMA, tensors)
    with pytest.raises(PlanError) as error:
        plan(source)
    assert (
        "if it belongs to 'model.layers.0.self_attn.q_proj.weight', write its shape in the axes of that weight"
        in str(error.value.hint)
    )
    assert '"48 1"' not in str(error.value.hint)
