"""Where split's own word is not enough: which weights --dtype and --quantize leave alone, and the sizes of ranks."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from reshard.api import merge, split
from reshard.formats.notation.architecture import Architecture
from reshard.formats.notation.architecture_files import find_architecture
from reshard.formats.quantization import fp8
from reshard.mesh import plan as plans
from reshard.model.binding import bind
from reshard.model.model import Model
from reshard.source.opening import open_source
from reshard.transforms import quantize
from reshard.verify.api import verify
from reshard.verify.bytes.kept import is_known, is_quantized, stays_float32
from tests import remote, store, zoo
from tests.marks import one_of_each, thorough
from tests.published import PUBLISHED, full_tensors

MODELS = one_of_each([*zoo.ZOO], kind=lambda name: name if name in ("deepseek_v3", "gpt_oss", "qwen3") else "")


@pytest.mark.parametrize("name", MODELS)
def test_both_lists_say_the_same(name: str) -> None:
    model = open_source(store.checkpoint(name)).model
    assert is_known(model.config)
    check_lists(model)


@thorough
@pytest.mark.parametrize("name", PUBLISHED)
def test_so_they_do_of_published_names(name: str) -> None:
    of = PUBLISHED[name]
    model = bind(find_architecture(of.config, Path()), of.config, full_tensors(of))
    if is_known(model.config):
        check_lists(model)


def check_lists(model: Model) -> None:
    for dtype in ("bf16", "fp16"):
        own = stays_float32(model.config, dtype)
        for tensor in model.tensors:
            theirs = model.architecture.stays_float32(tensor.name, model.sizes.settings, dtype)
            assert own(tensor.name) == theirs, (dtype, tensor.name)
    stay, types = fp8.what_stays()
    for tensor in model.tensors if model.config["model_type"] in types else ():
        if len(tensor.shape) == 2 and tensor.name.endswith(".weight"):
            assert is_quantized(tensor.name) != any(part in tensor.name for part in stay), tensor.name


@pytest.mark.parametrize("form", one_of_each([{"tp": 2}, {"tp": 2, "format": "vllm"}], kind=str), ids=str)
@pytest.mark.parametrize("wrong", ["all are cast", "norms stay, too"])
def test_a_wrong_list_of_float32_is_seen(
    wrong: str, form: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, right = store.checkpoint("deepseek_v3"), Architecture.stays_float32
    split(model, tmp_path / "right", dtype="bf16", **form)
    assert verify(model, tmp_path / "right", dtype="bf16", exact_only=True).verdict == "same"
    wrongly = {"all are cast": lambda *_: False, "norms stay, too": lambda *of: right(*of) or "norm" in of[1]}
    monkeypatch.setattr(Architecture, "stays_float32", wrongly[wrong])
    split(model, tmp_path / "out", dtype="bf16", **form)
    answer = verify(model, tmp_path / "out", dtype="bf16", exact_only=True)
    assert answer.verdict == "different"
    assert ("e_score_correction_bias" if wrong == "all are cast" else "layernorm.weight") in str(answer)


@pytest.mark.parametrize("change", ["routers are quantized", "projections stay"])
def test_a_wrong_list_of_8_bits_is_seen(change: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = store.checkpoint("deepseek_v3", "bfloat16")
    stay, types = fp8.what_stays()
    wrongly = {name: what for name, what in stay.items() if name != "mlp.gate."}
    wrongly |= {} if change == "routers are quantized" else {"mlp.gate.": "routers", "o_proj": "projections"}
    monkeypatch.setattr(quantize, "what_stays", lambda: (wrongly, types))
    merge(model, tmp_path / "out", quantize="fp8-block")
    answer = verify(model, tmp_path / "out", quantize="fp8-block", exact_only=True)
    assert answer.verdict == "different"
    assert ("mlp.gate.weight" if change == "routers are quantized" else "o_proj.weight") in str(answer)


def test_a_head_for_classes_stays(tmp_path: Path) -> None:
    """As the last module does in transformers' FineGrainedFP8Config."""
    model = store.checkpoint("llama-classifier", "bfloat16")
    merge(model, tmp_path / "out", quantize="fp8-block")
    tensors = {tensor.name: tensor.dtype for tensor in open_source(tmp_path / "out").model.tensors}
    assert tensors["score.weight"] == "BF16" and "F8_E4M3" in tensors.values()
    assert verify(model, tmp_path / "out", quantize="fp8-block", exact_only=True).verdict == "same"


def test_the_verdict_says_whose_list_it_is(tmp_path: Path) -> None:
    remote.save("bailing_moe", tmp_path / "bailing_moe")  # of a type of which transformers has no class
    for model, is_own in ((store.checkpoint("llama"), True), (tmp_path / "bailing_moe", False)):
        split(model, tmp_path / f"{is_own}", tp=2, dtype="bf16")
        answer = verify(model, tmp_path / f"{is_own}", dtype="bf16", exact_only=True)
        assert answer.verdict == "same"
        assert ("split's choice of the weights that 'dtype' leaves alone" in str(answer)) != is_own


@pytest.mark.parametrize("key", ["num_attention_heads", "num_key_value_heads", "intermediate_size", "vocab_size"])
def test_a_wrong_size_is_seen(key: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where split and verify compute the same wrong one."""
    model, right = store.checkpoint("llama"), plans.rank_config
    split(model, tmp_path / "right", tp=2)
    assert verify(model, tmp_path / "right", exact_only=True).verdict == "same"
    for module in ("reshard.writing.documents", "reshard.verify.bytes.folder", "reshard.verify.bytes.rules"):
        monkeypatch.setattr(import_module(module), "rank_config", lambda *of: right(*of) | {key: right(*of)[key] + 1})
    split(model, tmp_path / "out", tp=2)
    answer = verify(model, tmp_path / "out", exact_only=True)
    assert (
        answer.verdict == "different" and f"'{key}' is " in answer.in_words and "the rank's tensors have" in str(answer)
    )
