"""SGLang's sharded state, the older names of vLLM's, and how a folder that says no format is recognised."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from reshard.api import merge, split
from reshard.formats.errors import MismatchError, PlanError
from reshard.formats.notation.format import Format
from reshard.formats.notation.format_file import format_of, read_format
from reshard.source.opening import open_source
from tests import store
from tests.marks import thorough
from tests.programs.oracles import checkpoint
from tests.support import change_json, changed_tensors

pytestmark = thorough

MODELS = [
    "llama",
    "llama_kv2",
    "mistral",
    "phi3",
    "qwen2",
    "qwen3",
    "olmo2",
    "mixtral",
    "qwen2_moe",
    "qwen3_moe",
    "glm4_moe",
]
MODELS += ["deepseek_v2", "deepseek_v3"]


def _ranks(folder: Path) -> list[dict[str, np.ndarray]]:
    found: dict[int, dict[str, np.ndarray]] = {}
    for file in sorted(folder.glob("model-rank-*-part-*.safetensors")):
        found.setdefault(int(file.name.split("-")[2]), {}).update(load_file(file))
    return [found[rank] for rank in sorted(found)]


def _same(model: str, path: Path, form: str, *, tp: int = 2, **options: Any) -> tuple[list[Any], list[Any]]:
    original = checkpoint("vllm", model)
    for name in (form, "vllm"):
        split(original, path / name, tp=tp, format=name, **options)
    return _ranks(path / form), _ranks(path / "vllm")


def as_sglang(name: str) -> str | None:
    """SGLang's name of a tensor of vLLM's; None if it has none."""
    if name.endswith("_scale"):
        return None
    shared = "shared_expert" if "_gate" in name or "qwen2" in name else "shared_experts"
    name = name.replace("experts._shared_experts._layer.expert_gate.", "shared_expert_gate.")
    name = name.replace("experts._shared_experts._layer.", f"{shared}.").replace(
        "experts.routed_experts.w", "experts.w"
    )
    name = name.replace("experts.routed_experts.e_score", "gate.e_score").replace("mlp.experts.gate.", "mlp.gate.")
    return name.replace("mla_attn.", "").replace("fused_qkv_a_proj.", "fused_qkv_a_proj_with_mqa.")


@pytest.mark.parametrize("model", MODELS)
def test_sglang_holds_the_same_elements_as_vllm_under_its_own_names(model: str, tmp_path: Path) -> None:
    ours, theirs = _same(model, tmp_path, "sglang")
    for own, other in zip(ours, theirs, strict=True):
        named = {as_sglang(name): array for name, array in other.items()}
        named.pop(None, None)
        if model == "qwen2_moe":
            named = {str(name).replace("shared_experts.", "shared_expert."): array for name, array in named.items()}
        assert own.keys() == named.keys()
        assert all(np.array_equal(own[name], named[name]) and own[name].dtype == named[name].dtype for name in own)


@pytest.mark.parametrize("model", ["mixtral", "olmo2", "qwen2_moe"])
def test_a_head_of_a_size_that_sglang_does_not_take(model: str, tmp_path: Path) -> None:
    """Its own loader stops at such a folder, or has other shapes: tests/engines/loader.py."""
    with pytest.raises(PlanError, match="SGLang takes the size of a head of this model type from hidden_size"):
        split(store.checkpoint(model), tmp_path / "out", tp=2, format="sglang")


@pytest.mark.parametrize(("model", "tp"), [("qwen3_moe", 2), ("deepseek_v3", 2)])
def test_sglang_with_experts_dealt_whole(model: str, tp: int, tmp_path: Path) -> None:
    ours, theirs = _same(model, tmp_path, "sglang", tp=tp, ep=tp, same_ranks=True)
    name = next(name for name in ours[1] if name.endswith("experts.w13_weight"))
    assert np.array_equal(ours[1][name], theirs[1][name.replace("w13", "routed_experts.w13")])


@pytest.mark.parametrize("model", MODELS)
def test_the_way_back(model: str, tmp_path: Path) -> None:
    original = checkpoint("vllm", model)
    split(original, tmp_path / "out", tp=2, format="sglang")
    merge(tmp_path / "out", tmp_path / "merged")
    assert (tmp_path / "merged" / "model.safetensors").read_bytes() == (original / "model.safetensors").read_bytes()
    (tmp_path / "out" / "reshard.json").unlink()
    merge(tmp_path / "out", tmp_path / "without")
    merged, source = (load_file(folder / "model.safetensors") for folder in (tmp_path / "without", original))
    assert merged.keys() == source.keys()
    assert all(np.array_equal(merged[name], source[name]) for name in merged)


RECOGNISED = [
    *((form, model) for form in ("vllm", "sglang") for model in ("llama", "qwen3_moe", "mixtral", "deepseek_v3")),
    *(("vllm-0.23", model) for model in ("qwen2_moe", "qwen3_moe", "mixtral")),
]


@pytest.mark.parametrize(("form", "model"), RECOGNISED)
def test_a_folder_is_recognised_as_what_it_is(form: str, model: str, tmp_path: Path) -> None:
    """vLLM and SGLang give their files the same names; what is stored tells."""
    split(checkpoint("vllm", model), tmp_path / "out", tp=2, format=form)
    (tmp_path / "out" / "reshard.json").unlink()
    format = open_source(tmp_path / "out").format
    assert format.name == form


def test_what_is_wrong_is_said_of_the_format_that_it_is(tmp_path: Path) -> None:
    split(checkpoint("vllm", "llama"), tmp_path / "out", tp=2, format="vllm")
    (tmp_path / "out" / "reshard.json").unlink()
    with changed_tensors(tmp_path / "out" / "model-rank-1-part-0.safetensors") as tensors:
        del tensors["model.norm.weight"]
    with pytest.raises(MismatchError, match=r"tensor 'model.norm.weight' is missing in the files of rank 1"):
        open_source(tmp_path / "out")


def test_from_sglang_to_vllm(tmp_path: Path) -> None:
    original = checkpoint("vllm", "deepseek_v3")
    split(original, tmp_path / "sglang", tp=4, format="sglang")
    split(tmp_path / "sglang", tmp_path / "one", tp=2, format="vllm")
    split(original, tmp_path / "two", tp=2, format="vllm")
    for one, two in zip(_ranks(tmp_path / "one"), _ranks(tmp_path / "two"), strict=True):
        assert one.keys() == two.keys() and all(np.array_equal(one[name], two[name]) for name in one)


def _padded(vocab: int, tp: int, path: Path) -> int:
    from tests.support import LLAMA, write_checkpoint

    config = {**LLAMA, "vocab_size": vocab, "num_attention_heads": 12, "num_key_value_heads": 12, "head_dim": 16}
    config["intermediate_size"] = 192
    write_checkpoint(path / "model", config=config)
    split(path / "model", path / "out", tp=tp, format="sglang")
    return tp * len(_ranks_raw(path / "out")[0]["model.embed_tokens.weight"])


def _ranks_raw(folder: Path) -> list[dict[str, list[int]]]:
    """The rows of each rank's tensors, by their headers (numpy has no bfloat16)."""
    from reshard.formats.files.safetensors import read_header

    headers = [read_header(file) for file in sorted(folder.glob("model-rank-*"))]
    return [{name: [0] * info.shape[0] for name, info in header.tensors.items()} for header in headers]


@pytest.mark.parametrize(
    ("vocab", "tp", "padded"),
    [(1000, 2, 1024), (1024, 1, 1024), (1000, 3, 1152), (960, 3, 960), (1000, 6, 1152), (2, 6, 384)],
)
def test_the_vocabulary_is_padded_as_sglang_pads_it(vocab: int, tp: int, padded: int, tmp_path: Path) -> None:
    assert _padded(vocab, tp, tmp_path) == padded


@pytest.mark.parametrize(
    ("model", "settings", "why"),
    [
        ("gemma2", {}, "cannot be written as"),
        ("gpt_oss", {}, "cannot be written as"),
        (
            "llama",
            {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}},
            "forms of their own",
        ),
        ("qwen3_moe", {"tie_word_embeddings": True}, "two tensors"),
    ],
)
def test_it_is_refused(model: str, settings: dict[str, Any], why: str, tmp_path: Path) -> None:
    import shutil

    shutil.copytree(checkpoint("vllm", model), tmp_path / "model")
    change_json(tmp_path / "model" / "config.json", **settings)
    with pytest.raises(PlanError, match=why):
        split(tmp_path / "model", tmp_path / "out", tp=2, format="sglang")


def test_uneven_parts_are_refused(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="uneven is not possible with the format 'vllm'"):
        split(checkpoint("vllm", "llama"), tmp_path / "out", tp=2, format="vllm", uneven=True)


# ------------------------------------------------------------------------------------------------------- the notation


def _format(path: Path, text: str) -> Format:
    path.write_text(text)
    return read_format(path)


def test_a_format_builds_on_another(tmp_path: Path) -> None:
    format = _format(
        tmp_path / "mine.toml",
        'base = "vllm"\nload = "x"\nconstants = []\ntypes = false\n[tensors]\n"**.qkv_proj.*" = false\n"a.*" = "b.*"\n'
        '[models]\n"opt, gptj" = false\n"lfm2, lfm2_moe" = false\n',
    )
    base = format_of("vllm")
    assert (format.name, format.loading.command, format.loading.program, format.rules.constants) == (
        "mine",
        "x",
        base.loading.program,
        (),
    )
    at = [line.target.text for line in format.rules.lines].index("a.*")
    assert at and all("model_type" in str(line.when) for line in format.rules.lines[:at])  # these go first
    gone = {"**.qkv_proj.*", "**.short_conv.*.*"}
    below = [line for line in base.rules.lines if line.types is None and line.target.text not in gone]
    of_types = [line for line in format.rules.lines[:at] if line.target.text not in gone]
    assert of_types == below[: len(of_types)] and [*format.rules.lines[at + 1 :]] == below[len(of_types) :]


def test_what_no_base_has_cannot_be_taken_away(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match=r"'nothing = false' under \[tensors\] removes nothing: no base has it"):
        _format(tmp_path / "mine.toml", 'base = "vllm"\n[tensors]\nnothing = false\n')


# ------------------------------------------------------------------------------------------------- older names of vLLM


@pytest.mark.parametrize("model", ["llama", "mixtral", "qwen2_moe", "qwen3_moe"])
def test_the_older_names_of_vllm(model: str, tmp_path: Path) -> None:
    """The same tensors as today's."""
    ours, theirs = _same(model, tmp_path, "vllm-0.23")
    for own, other in zip(ours, theirs, strict=True):
        named = {as_older(name): array for name, array in other.items()}
        assert own.keys() == named.keys() and all(np.array_equal(own[name], named[name]) for name in own)


def as_older(name: str) -> str:
    name = name.replace("experts.routed_experts.", "experts.").replace("mlp.experts.gate.", "mlp.experts.runner.gate.")
    return name.replace("mlp.experts._shared_experts._layer.", "mlp.shared_expert.")


def test_older_names_that_are_not_known_are_refused(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="cannot be written as"):
        split(checkpoint("vllm", "deepseek_v3"), tmp_path / "out", tp=2, format="vllm-0.23")
