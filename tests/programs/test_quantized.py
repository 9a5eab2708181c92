"""Quantized checkpoints in vLLM's format: what vLLM itself allocates and loads, tensor for tensor, or a refusal."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from reshard.api import merge, split
from reshard.formats.errors import PlanError
from reshard.formats.files.manifest import INTACT_FILE
from reshard.formats.files.safetensors import TensorInfo, read_header
from reshard.source.opening import open_source
from reshard.verify.api import verify
from reshard.verify.bytes.exact import verify_exact
from tests.marks import one_of_each, thorough
from tests.programs.quantized import CASES, METHODS, MODELS, described, make, recorded, source_hash
from tests.support import change_json, changed_json, command, contents
from tests.verify.faults import sign

RECORDED = recorded()
EXPERTS = ("mixtral", "qwen2_moe", "qwen3_moe", "deepseek_v2", "deepseek_v3", "glm4_moe", "minimax_m2")
REFUSED = {
    **{("phi3", method): "has such a number once for" for method in METHODS if method in {
        "fp8-tensor", "fp8-static", "float8-tensor", "float8-static"}},
    **{(model, method): "one number for the inputs of" for model in EXPERTS
       for method in ("fp8-static", "int8-static")},
    **{(model, "int8-static"): "one number for the inputs of all that is joined" for model in MODELS
       if model not in EXPERTS},
    **{(model, method): "has biases beside it" for model in EXPERTS for method in METHODS if method.startswith("gptq")},
    **{(model, method): "takes no such numbers as scales of experts" for model in EXPERTS
       for method in ("float8-tensor", "float8-static")},
    **{(model, method): "shapes of experts' weights" for model in EXPERTS for method in METHODS
       if method.startswith("packed")},
}  # fmt: skip
"""What is refused, and why."""
NOT_IN_VLLM = {("stablelm", method): "not compared with vLLM yet" for method in METHODS if method.startswith("gptq")}
REFUSED |= NOT_IN_VLLM


def test_of_every_method_and_model_it_is_known_what_vllm_does() -> None:
    assert RECORDED.keys() == {f"{model} {method}" for model, method in CASES}


@pytest.mark.parametrize(
    ("model", "method"), one_of_each([case for case in CASES if case not in REFUSED], lambda case: case[1])
)
def test_what_is_written_is_what_vllm_loads(model: str, method: str, tmp_path: Path) -> None:
    source, wanted = make(tmp_path / "source", model, method), RECORDED[f"{model} {method}"]
    assert source_hash(source) == wanted["source"], "another checkpoint than the one of which the fixture was recorded"
    split(source, tmp_path / "out", tp=2, format="vllm")
    assert described(tmp_path / "out") == wanted["files"]


@pytest.mark.parametrize("form", [None, "vllm", "dcp"])
def test_what_cuts_scale_blocks_goes_without_them(form: str | None, tmp_path: Path) -> None:
    source = make(tmp_path / "source", "llama", "fp8-block")
    with pytest.raises(PlanError, match="12 blocks of 8, which do not divide by 8") as refused:
        split(source, tmp_path / "out", tp=8, format=form)
    assert not (tmp_path / "out").exists()
    assert str(refused.value.hint).startswith("valid degrees: 1, 2, 4, or ")
    assert str(refused.value.hint).endswith("dequantize=True")
    split(source, tmp_path / "out", tp=8, format=form, dequantize=True)
    report = verify(source, tmp_path / "out", exact_only=True, dequantize=True)
    assert report.verdict == "same", report.problems


@pytest.mark.parametrize(("model", "method"), one_of_each(REFUSED, REFUSED.__getitem__))
def test_what_vllm_has_otherwise_is_refused(model: str, method: str, tmp_path: Path) -> None:
    source = make(tmp_path / "source", model, method)
    why = rf"tensor '\S+' has no place in the format 'vllm': .*{REFUSED[model, method]}"
    with pytest.raises(PlanError, match=NOT_IN_VLLM.get((model, method), why)):
        split(source, tmp_path / "out", tp=2, format="vllm")
    assert not (tmp_path / "out").exists()


ONE_OF_EACH = [
    ("llama", "gptq"),
    ("llama", "packed-4-zeros"),
    ("gemma2", "fp8-tensor"),
    ("qwen3_moe", "awq"),
    ("deepseek_v3", "fp8-block"),
    ("llama", "float8-static"),
    ("mixtral", "float8-channel"),
    ("phi3", "int8-channel"),
]


@pytest.mark.parametrize(("model", "method"), ONE_OF_EACH)
@thorough
def test_the_way_back_and_the_proof(model: str, method: str, tmp_path: Path) -> None:
    source = make(tmp_path / "source", model, method)
    split(source, tmp_path / "out", tp=2, format="vllm")
    original = open_source(source)
    assert verify_exact(original, tmp_path / "out").verdict == "same"
    merge(tmp_path / "out", tmp_path / "merged")
    assert contents(tmp_path / "merged") == contents(source)
    changed = Path(shutil.copytree(tmp_path / "out", tmp_path / "changed"))
    held = [(rank, info) for rank, tensors in enumerate(_ranks(changed)) for info in tensors]
    for _, info in held:
        with info.file.open("r+b") as file:
            file.seek(info.offset + info.nbytes - 1)
            last = file.read(1)[0]
            file.seek(info.offset + info.nbytes - 1)
            file.write(bytes([last ^ 4]))
    sign(changed)
    found = verify_exact(original, changed)
    assert {(damage.stored, damage.rank) for damage in found.damages} == {(info.name, rank) for rank, info in held}
    (tmp_path / "out" / "reshard.json").unlink()
    merge(tmp_path / "out", tmp_path / "without")
    merged, whole = (
        {info.name: info.nbytes for info in read_header(tmp_path / folder / "model.safetensors").tensors.values()}
        for folder in ("without", "source")
    )
    assert merged.keys() == whole.keys()


def _ranks(folder: Path) -> list[list[TensorInfo]]:
    return [list(read_header(file).tensors.values()) for file in sorted(folder.glob("model-rank-*.safetensors"))]


def test_what_is_dropped_is_kept(tmp_path: Path) -> None:
    """vLLM knows which modules GPTQ has quantized by the names of these, too."""
    source = make(tmp_path / "source", "llama", "gptq")
    split(source, tmp_path / "out", tp=2, format="vllm")
    names = read_header(tmp_path / "out" / INTACT_FILE).tensors
    assert names and all(name.endswith(".g_idx") for name in names)


@pytest.mark.parametrize(
    ("method", "settings", "why"),
    [
        (
            "fp8-tensor",
            {"quant_method": "modelopt", "quant_algo": "FP8"},
            "fp8, GPTQ, AWQ and compressed-tensors alone",
        ),
        ("gptq", {"desc_act": True}, "symmetric and without act-order"),
        ("gptq", {"sym": False}, "symmetric and without act-order"),
        ("packed-4", {"format": "naive-quantized"}, "pack-quantized, int-quantized and float-quantized alone"),
        ("packed-4", {"kv_cache_scheme": {"num_bits": 8}}, "scales of the cache are not written"),
        ("fp8-block", {"store_dtype": "mxfp4"}, "MXFP4"),
    ],
)
def test_other_settings_are_refused(method: str, settings: dict[str, object], why: str, tmp_path: Path) -> None:
    source = make(tmp_path / "source", "llama", method)
    with changed_json(source / "config.json") as config:
        config["quantization_config"] |= settings
    done = command("split", source, tmp_path / "out", "--tp", "2", "--as", "vllm")
    assert done.returncode == 2 and why in done.stderr, done.stderr


def test_a_model_type_that_was_not_compared(tmp_path: Path) -> None:
    source = make(tmp_path / "source", "qwen3", "fp8-block")
    change_json(source / "config.json", model_type="exaone4")
    with pytest.raises(PlanError, match="was not compared for this model type"):
        split(source, tmp_path / "out", tp=2, format="vllm")


@pytest.mark.parametrize("form", ["vllm-0.23", "sglang"])
def test_other_engines_have_no_quantized_checkpoints(form: str, tmp_path: Path) -> None:
    source = make(tmp_path / "source", "llama", "fp8-block")
    with pytest.raises(PlanError, match="quantized weights"):
        split(source, tmp_path / "out", tp=2, format=form)
