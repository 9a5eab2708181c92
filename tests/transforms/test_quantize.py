"""``--quantize fp8-block``: the numbers and scales of torch, on every route; what stays, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from reshard.api import diff, load, merge, split
from reshard.formats.errors import ReshardError
from reshard.formats.notation.adapters import SETTINGS
from reshard.formats.quantization.fp8 import codes_of, scales_of, what_stays
from reshard.source.access import Access
from reshard.source.opening import open_source
from reshard.store import range_store
from reshard.store.threads import ArrayCache
from reshard.transforms.opening import open_any
from reshard.transforms.quantize import quantize
from reshard.verify.api import verify
from reshard.verify.bytes import reading as proof
from tests import store
from tests.marks import one_of_each, thorough
from tests.published import PUBLISHED, full_tensors
from tests.support import LLAMA, change_tensor, command, contents, write_checkpoint

ONE = {"workers": 1}
FP8 = {"quantize": "fp8-block", **ONE}
TORCH = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32, "F64": torch.float64}
CONFIG = LLAMA | {
    "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 1, "num_attention_heads": 4,
    "num_key_value_heads": 4, "head_dim": 64, "vocab_size": 200,
}  # fmt: skip


def by_torch(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The numbers and the scales of a weight, as slime's convert_hf_to_fp8.py has them."""
    rows, columns = weight.shape
    down, across = -(-rows // 128), -(-columns // 128)
    padded = torch.zeros(down * 128, across * 128)
    padded[:rows, :columns] = weight.float()
    blocks = padded.view(down, 128, across, 128)
    scale = blocks.abs().amax((1, 3)) / 448
    scale[scale == 0] = 1
    codes = (blocks / scale[:, None, :, None]).to(torch.float8_e4m3fn).view(padded.shape)
    return codes[:rows, :columns].contiguous(), scale


def raw(tensor: torch.Tensor) -> memoryview:
    return memoryview(tensor.contiguous().view(torch.uint8).numpy().tobytes())


# ---------------------------------------------------------------------------------------------------------- arithmetic


@pytest.mark.parametrize("dtype", TORCH)
def test_each_number_is_that_of_torch(dtype: str) -> None:
    """Rows of blocks with ragged ends, of zeros, of sizes from the smallest to the largest; in the proof, too."""
    torch.manual_seed(1)
    weight = (torch.randn(300, 200) * torch.exp(4 * torch.randn(300, 200))).clamp(-6e4, 6e4).to(TORCH[dtype])
    weight[:128, :128] = 0
    weight[130:140, 150] = -0.0
    codes, scales = by_torch(weight)
    for number in range(3):
        rows = slice(number * 128, (number + 1) * 128)
        found = scales_of(raw(weight[rows]), dtype, 200)
        assert np.array_equal(found, scales[number].numpy())
        assert np.array_equal(proof._block_scales(raw(weight[rows]), dtype, 200), found)
        numbers, error = codes_of(raw(weight[rows]), dtype, 200, found)
        assert np.array_equal(numbers, codes[rows].view(torch.uint8).numpy().reshape(-1))
        assert np.array_equal(proof._codes(raw(weight[rows]), dtype, 200, found)[0], numbers)
        wide = scales[number].repeat_interleave(128)[:200]
        lost = (codes[rows].double() * wide - weight[rows].double()).square().sum()
        assert np.allclose(error, (lost, weight[rows].double().square().sum()), rtol=1e-3)


@pytest.mark.parametrize("low", [0, 1])
def test_all_upper_bits_of_a_float32(low: int) -> None:
    """Also what is halfway between two numbers of E4M3, and just above it."""
    every = torch.from_numpy((np.arange(1 << 14, dtype=np.uint32) << 18 | low).view(np.float32))
    for numbers in (every[every.abs() < 448], torch.nextafter(every, torch.zeros(1))[every.abs() <= 448]):
        content, scale = raw(numbers), np.ones(-(-len(numbers) // 128), np.float32)
        should = numbers.to(torch.float8_e4m3fn).view(torch.uint8).numpy()
        assert np.array_equal(codes_of(content, "F32", len(numbers), scale)[0], should)
        assert np.array_equal(proof._codes(content, "F32", len(numbers), scale)[0], should)


def test_the_smallest_numbers_keep_their_bits() -> None:
    """Their scale would be no normal float32."""
    weight = torch.full((2, 3), 1e-40)
    scales = scales_of(raw(weight), "F32", 3)
    codes, _ = codes_of(raw(weight), "F32", 3, scales)
    assert scales == np.float32(2.0**-126) == proof._block_scales(raw(weight), "F32", 3)
    assert torch.from_numpy(codes).view(torch.float8_e4m3fn).float().unique() == torch.tensor([2.0**-7])


# -------------------------------------------------------------------------------------------------------------- routes


def model(dtype: torch.dtype = torch.bfloat16) -> Path:
    def make(folder: Path) -> None:
        write_checkpoint(folder, config=CONFIG)
        torch.manual_seed(0)
        shapes = {name: tensor.shape for name, tensor in load_file(folder / "model.safetensors").items()}
        tensors = {name: torch.randn(shape).to(dtype) for name, shape in shapes.items()}
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})

    return store.made(f"to-quantize-{dtype}", make)


def full() -> Path:
    return store.made("quantized", lambda folder: merge(model(), folder, **FP8))


def test_one_full_checkpoint(tmp_path: Path) -> None:
    done = command("merge", model(), tmp_path / "out", "--quantize", "fp8-block", "--json")
    assert done.returncode == 0, done.stderr
    before, after = (load_file(folder / "model.safetensors") for folder in (model(), tmp_path / "out"))
    should, errors = dict[str, torch.Tensor](), dict[str, float]()
    for name, tensor in before.items():
        should[name] = tensor
        if tensor.dim() == 2 and name not in ("model.embed_tokens.weight", "lm_head.weight"):
            should[name], scale = should[name], should[f"{name}_scale_inv"] = by_torch(tensor)
            wide = scale.repeat_interleave(128, 0).repeat_interleave(128, 1)
            errors[name] = float((should[name].float() * wide - tensor.float()).norm() / tensor.float().norm())
    assert after.keys() == should.keys() and len(errors) == 7
    assert all(after[n].dtype == t.dtype and torch.equal(after[n].float(), t.float()) for n, t in should.items())
    document = json.loads(done.stdout)
    worst = document["quantization_error"]
    assert worst["relative"] == pytest.approx(errors[worst["weight"]], rel=1e-4)
    assert worst["relative"] == pytest.approx(max(errors.values()), rel=1e-4)
    assert document["note"] == (
        "7 weights were quantized to fp8 in blocks of 128 x 128; as in transformers' FineGrainedFP8Config, these stay: "
        "embeddings (1 tensor), the output head (1 tensor) and all vectors"
    )
    assert json.loads((tmp_path / "out/config.json").read_text())["quantization_config"] == {
        "quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128],
        "modules_to_not_convert": ["lm_head", "model.embed_tokens"],
    }  # fmt: skip
    assert command("split", model(), tmp_path / "text", "--tp", "2", "--quantize", "fp8-block").stdout.count(
        f"The largest relative error of a weight is {worst['relative']:.2%} (root mean square, {worst['weight']})."
    )


def test_ragged_blocks_of_a_mixture_of_experts(tmp_path: Path) -> None:
    """No weight has a whole number of blocks, and some have several."""
    source = store.checkpoint("deepseek_v3", "bfloat16")
    merge(source, tmp_path / "out", **FP8)
    before, after = (load_file(folder / "model.safetensors") for folder in (source, tmp_path / "out"))
    weights = [name for name in before if f"{name}_scale_inv" in after]
    assert len(weights) > 10 and any(after[f"{name}_scale_inv"].numel() > 1 for name in weights)
    for name in weights:
        codes, scale = by_torch(before[name])
        assert torch.equal(after[name].view(torch.uint8), codes.view(torch.uint8)), name
        assert torch.equal(after[f"{name}_scale_inv"], scale)
    assert verify(source, tmp_path / "out", quantize="fp8-block", exact_only=True).verdict == "same"


FORMS: list[dict[str, Any]] = [
    {"tp": 2}, {"tp": 2, "format": "vllm"}, {"format": "dcp"}
]  # fmt: skip


@pytest.mark.parametrize("form", one_of_each(FORMS, kind=lambda form: form.get("format", "")), ids=str)
def test_shards_are_those_of_the_quantized_checkpoint(form: dict[str, Any], tmp_path: Path) -> None:
    split(model(), tmp_path / "out", **form, **FP8)
    split(full(), tmp_path / "should", **form, **ONE)
    found, should = contents(tmp_path / "out"), contents(tmp_path / "should")
    for of in (found, should):
        of.pop("reshard.json", None)
    assert found == should
    assert verify(model(), tmp_path / "out", quantize="fp8-block", exact_only=True).verdict == "same"


@pytest.mark.parametrize("form", one_of_each([{"tp": 4}, {"format": "dcp"}, {"tp": 2, "pp": 1}], kind=len), ids=str)
def test_shards_whose_cuts_fall_into_blocks_are_quantized_as_a_whole(form: dict[str, Any], tmp_path: Path) -> None:
    split(model(), tmp_path / "shards", **form, **ONE)
    merge(tmp_path / "shards", tmp_path / "out", **FP8)
    assert contents(tmp_path / "out") == contents(full())


def test_dequantized_again_it_is_what_torch_computes(tmp_path: Path) -> None:
    split(full(), tmp_path / "out", format="huggingface", dequantize=True, **ONE)
    found = load_file(tmp_path / "out/model.safetensors")
    for name, tensor in load_file(full() / "model.safetensors").items():
        if tensor.dtype == torch.float8_e4m3fn:
            _, scale = by_torch(load_file(model() / "model.safetensors")[name])
            wide = scale.repeat_interleave(128, 0).repeat_interleave(128, 1)
            tensor = (tensor.float() * wide[: len(tensor), : tensor.shape[1]]).bfloat16()
        assert name.endswith("_scale_inv") or torch.equal(found[name], tensor), name
    assert "quantization_config" not in json.loads((tmp_path / "out/config.json").read_text())
    split(model(), tmp_path / "both", format="huggingface", quantize="fp8-block", dequantize=False, **ONE)
    assert contents(tmp_path / "both") == contents(full())


def test_one_rank_in_memory() -> None:
    found, should = load(model(), tp=2, rank=1, quantize="fp8-block"), load(full(), tp=2, rank=1)
    assert found.keys() == should.keys()
    assert all(torch.equal(found[name].view(torch.uint8), should[name].view(torch.uint8)) for name in should)


def test_memory_is_for_what_is_computed_next(monkeypatch: pytest.MonkeyPatch) -> None:
    """No threads compute the samples that identify it, and only rows of blocks that a range cuts are kept."""
    kept = ArrayCache(1 << 20)
    monkeypatch.setattr(range_store, "Threads", None)
    monkeypatch.setattr("reshard.transforms.quantize._CODES", kept)
    source = open_any(model(), Access(quantize="fp8-block"))
    assert source.record.id
    kept._arrays.clear()
    whole = [file.remote.read(0, file.size) for file in source.files.values() if file.remote is not None]
    assert whole and not kept._arrays


def test_a_cast_is_of_what_stays(tmp_path: Path) -> None:
    """The weights are quantized from their own dtype."""
    wide = model(torch.float32)
    note = merge(wide, tmp_path / "out", dtype="bf16", **FP8).note
    assert note is not None and "7 weights were quantized" in note and "weights were cast to bf16" in note
    before, after = (load_file(folder / "model.safetensors") for folder in (wide, tmp_path / "out"))
    for name, tensor in before.items():
        if f"{name}_scale_inv" in after:
            assert torch.equal(after[name].view(torch.uint8), by_torch(tensor)[0].view(torch.uint8))
        else:
            assert torch.equal(after[name], tensor.bfloat16())
    answer = verify(wide, tmp_path / "out", dtype="bf16", quantize="fp8-block", exact_only=True)
    assert answer.verdict == "same"


def test_verify_computes_the_original_anew(tmp_path: Path) -> None:
    split(model(), tmp_path / "out", tp=2, **FP8)
    without = verify(model(), tmp_path / "out", exact_only=True)
    assert without.verdict == "different"
    assert "the original is not. If they were split with --quantize fp8-block, give it here, too." in str(without)
    assert "--dtype" not in str(without)
    file = next((tmp_path / "out").rglob("*.safetensors"))
    change_tensor(file, "model.layers.0.mlp.up_proj.weight", at=5)
    assert verify(model(), tmp_path / "out", quantize="fp8-block", exact_only=True).verdict == "different"
    done = command("verify", model(), tmp_path / "out", "--quantize", "fp8-block")
    assert done.returncode == 2 and "--quantize is not possible: with it, only bytes can be compared" in done.stderr


def test_it_comes_after_a_delta(tmp_path: Path) -> None:
    merge(model(torch.float32), tmp_path / "tuned", dtype="bf16", **ONE)
    change_tensor(tmp_path / "tuned/model.safetensors", "model.layers.0.mlp.up_proj.weight", at=5)
    merge(model(torch.float32), tmp_path / "base", dtype="bf16", **ONE)
    diff(tmp_path / "base", tmp_path / "tuned", out=tmp_path / "delta")
    merge(tmp_path / "base", tmp_path / "one", patch=tmp_path / "delta", **FP8)
    merge(tmp_path / "tuned", tmp_path / "two", **FP8)
    assert contents(tmp_path / "one") == contents(tmp_path / "two")


# ---------------------------------------------------------------------------------------------------------- what stays


def test_a_tied_head_is_named(tmp_path: Path) -> None:
    """An engine makes it from the embeddings, and must not ask for its scales."""
    write_checkpoint(tmp_path / "model", config=CONFIG | {"tie_word_embeddings": True})
    tensors = load_file(model() / "model.safetensors")
    del tensors["lm_head.weight"]
    save_file(tensors, tmp_path / "model/model.safetensors", {"format": "pt"})
    config = open_any(tmp_path / "model", Access(quantize="fp8-block")).read_config()
    assert config["quantization_config"]["modules_to_not_convert"] == ["model.embed_tokens", "lm_head"]


SAME = [name for name, of in PUBLISHED.items() if of.config.get("model_type") in what_stays()[1]]


@pytest.mark.parametrize("name", SAME)
def test_what_stays_is_what_is_not_quantized_in_a_published_checkpoint(name: str) -> None:
    for tensor in full_tensors(PUBLISHED[name]):
        stays = any(part in tensor.name for part in what_stays()[0])
        if len(tensor.shape) == 2 and tensor.name.endswith(".weight"):
            assert stays == (tensor.dtype != "F8_E4M3"), tensor.name


@pytest.mark.parametrize("name", ["deepseek_v3-mtp", "qwen3_5_moe", pytest.param("qwen3_next", marks=thorough)])
def test_routers_and_heads_stay(name: str) -> None:
    found = open_any(store.checkpoint(name), Access(quantize="fp8-block"))
    dtypes = {tensor.name: tensor.dtype for tensor in found.model.tensors if len(tensor.shape) > 1}
    ends = ("embed_tokens", "lm_head", "mlp.gate", "_expert_gate", "eh_proj", "head.head", "conv1d", "_ba", "mtp.fc")
    ends += ("in_proj_a", "in_proj_b")
    for key, dtype in dtypes.items():
        stays = ".visual." in key or key.removesuffix(".weight").endswith((*ends, "_scale_inv"))
        expected = "F32" if stays else "F8_E4M3"
        assert dtype == expected, key


# --------------------------------------------------------------------------------------------------- what is refused


def refused(folder: Path, message: str, **access: Any) -> None:
    with pytest.raises(ReshardError, match=message):
        open_any(folder, Access(quantize="fp8-block", **access))


def test_a_name_that_is_no_form(tmp_path: Path) -> None:
    done = command("split", model(), tmp_path / "out", "--tp", "2", "--quantize", "int4")
    assert done.returncode == 2 and not (tmp_path / "out").exists()
    assert done.stderr.splitlines()[0] == "Error: --quantize int4 is not possible: the form is fp8-block"


def test_what_is_quantized_already() -> None:
    refused(full(), "is quantized already")
    assert open_any(full(), Access(quantize="fp8-block", dequantize=True)).error is not None


def test_a_type_of_which_no_checkpoint_says_what_stays() -> None:
    refused(store.checkpoint("mamba"), "no published checkpoint says which weights of 'mamba' stay as they are")


def test_experts_in_one_tensor() -> None:
    refused(
        store.checkpoint("qwen3_vl_moe"),
        r"experts.*cannot be quantized to fp8-block: published fp8 checkpoints have a matrix for each",
    )


def test_an_adapter() -> None:
    source = open_source(model())
    object.__setattr__(source.model, "config", {**source.model.config, SETTINGS: {}})
    with pytest.raises(ReshardError, match="an adapter keeps its dtypes"):
        quantize(source, "fp8-block")


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_weight_that_is_not_finite(value: float, tmp_path: Path) -> None:
    """It has no scale, and nothing is written."""
    write_checkpoint(tmp_path / "model", config=CONFIG)
    tensors = load_file(model() / "model.safetensors")
    tensors["model.layers.0.mlp.up_proj.weight"][300, 5] = value
    save_file(tensors, tmp_path / "model/model.safetensors", {"format": "pt"})
    done = command("split", "model", "out", "--tp", "2", "--quantize", "fp8-block", cwd=tmp_path)
    assert done.returncode == 1 and not (tmp_path / "out").exists()
    assert "Error: tensor 'model.layers.0.mlp.up_proj.weight' has numbers that are not finite" in done.stderr


def test_a_cut_within_a_block_and_a_format_without_scales(tmp_path: Path) -> None:
    for more in (["--tp", "4"], ["--tp", "2", "--as", "megatron"], ["--tp", "2", "--as", "sglang"]):
        done = command("split", model(), tmp_path / "out", "--quantize", "fp8-block", *more)
        assert done.returncode == 2 and not (tmp_path / "out").exists()
        assert done.stderr.count("\n") == 2
        whys = (
            "blocks of 128, which do not divide by 4",
            "no quantized weights",
            "quantized weights in forms of their own",
        )
        assert any(why in done.stderr for why in whys)
