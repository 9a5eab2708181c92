"""A model with towers is towers around a language model of any type, whose rules, sizes and required tensors hold."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from reshard.api import merge, split
from reshard.formats.errors import PlanError
from reshard.formats.mesh import mesh_of
from reshard.formats.notation.architecture_files import built_in_architectures, find_architecture, language_model
from reshard.mesh.plan import make_plan, rank_config
from reshard.model.binding import bind
from reshard.model.model import FullTensor, Model
from reshard.source.completeness import missing
from reshard.source.opening import open_source
from reshard.source.source import Source
from reshard.verify.forward.compare import ForwardOptions
from tests import zoo
from tests.marks import thorough
from tests.support import contents
from tests.verify.forwards import run_forwards
from tools.required import built, written

# each model with towers, with the types of text that it is published with
pytestmark = thorough

PUBLISHED = {
    "llava": ["llama", "mistral", "qwen2", "phi3", "gemma", "glm4", "llama-mha"],
    "llava_next_video": ["llama", "mistral", "qwen2"],
    "llava_onevision": ["qwen2", "qwen3"],
    "video_llava": ["llama"],
    "paligemma": ["gemma", "gemma2", "gemma3_text"],
    "internvl": ["llama", "qwen2", "qwen3", "qwen3_moe", "gpt_oss"],
    "mistral3": ["mistral", "ministral3"],
    "idefics2": ["mistral"],
    "idefics3": ["llama"],
    "smolvlm": ["llama"],
    "aya_vision": ["cohere", "cohere2"],
    "cohere2_vision": ["cohere2"],
    "deepseek_vl": ["llama", "cohere"],
    "deepseek_vl_hybrid": ["llama"],
    "janus": ["llama"],
    "got_ocr2": ["qwen2"],
    "ovis2": ["qwen2"],
    "lighton_ocr": ["qwen3"],
    "qianfan_ocr": ["qwen3"],
    "video_llama_3": ["qwen2"],
    "exaone4_5": ["exaone4"],
    "hyperclovax_vision_v2": ["hyperclovax"],
    "granite_speech": ["granite", "granitemoehybrid"],
    "qwen2_audio": ["qwen2"],
    "voxtral": ["llama", "mistral"],
    "audioflamingo3": ["qwen2"],
    "glmasr": ["llama"],
    "vibevoice_asr": ["qwen2"],
}
PAIRS = [(towers, text) for towers, texts in PUBLISHED.items() for text in texts]


@dataclass(frozen=True)
class Saved:
    """What a checkpoint holds, without numbers."""

    config: dict[str, Any]
    tensors: tuple[FullTensor, ...]

    @property
    def model(self) -> Model:
        return bind(find_architecture(self.config, Path()), self.config, self.tensors)


def _settings(towers: str, text: str) -> tuple[str, str, dict[str, Any]]:
    kind, cls, settings = zoo.ZOO[towers].build.args
    inner, _, text_settings = zoo.ZOO[text].build.args
    return kind, cls, {**settings, "text_config": {**text_settings, "model_type": inner}}


@cache
def saved(towers: str, text: str) -> Saved:
    model = built(*_settings(towers, text))
    (found,) = written(model)
    return Saved({**found.config, "architectures": [type(model).__name__]}, found.tensors)


@pytest.mark.parametrize(("towers", "text"), PAIRS)
def test_the_rules_are_those_of_the_type_of_the_text(towers: str, text: str) -> None:
    found = saved(towers, text)
    model = found.model
    assert not [*missing(model)]
    inside = language_model(found.config)
    assert inside is not None and inside.model_type == zoo.ZOO[text].model_type
    plan = make_plan(model, mesh_of(2))
    own, whole = rank_config(plan, 1)["text_config"], found.config["text_config"]
    assert own["num_attention_heads"] * 2 == whole["num_attention_heads"]
    layers = [name for name in plan.layouts if ".layers.0." in name and "tower" not in name and "vision" not in name]
    assert any(plan.layouts[name].parallel_dims for name in layers)


@pytest.mark.parametrize(("towers", "text"), PAIRS)
def test_what_the_type_of_the_text_requires_is_missed(towers: str, text: str) -> None:
    found = saved(towers, text)
    model = found.model
    norms = [t for t in {k.template for k in model.kinds} if t.endswith("layernorm.weight") and "{layer}" in t]
    norms = [each for each in norms if "vision" not in each and "tower" not in each]
    assert norms or text.startswith("granitemoe")
    for template in norms:
        left = tuple(t for t in model.tensors if t.kind.template != template)
        kinds = tuple(kind for kind in model.kinds if kind.template != template)
        lacking = Model(model.architecture, model.config, model.sizes, left, kinds)
        assert [*missing(lacking)], template


def test_a_type_without_these_tensors_does_not_require_them() -> None:
    """The second PaliGemma has norms behind its MLPs, the first has none."""
    first, second = (saved("paligemma", text).model for text in ("gemma", "gemma2"))
    behind = "post_feedforward_layernorm"
    assert not any(behind in kind.name for kind in first.kinds)
    assert any(behind in kind.name for kind in second.kinds)
    kept = [tensor for tensor in saved("paligemma", "gemma2").tensors if behind not in tensor.name]
    assert any(behind in name for name in missing(Saved(saved("paligemma", "gemma2").config, tuple(kept)).model))


@pytest.mark.parametrize("text", ["phi3", "glm", "gpt2", "falcon-7b", "gpt_oss", "deepseek_v3"])
def test_any_type_of_text_is_read_within_llava(text: str) -> None:
    model = saved("llava", text).model
    assert not [*missing(model)]
    assert any(layout.parallel_dims for layout in make_plan(model, mesh_of(2)).layouts.values())


def _made(towers: str, text: str, folder: Path) -> tuple[Source, Source]:
    """A model with numbers, and its shards, which are merged to its bytes."""
    import torch
    import transformers

    kind, cls, settings = _settings(towers, text)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        model = getattr(transformers, cls).from_config(transformers.AutoConfig.for_model(kind, **settings))
    zoo.randomize(model, 1)
    model.save_pretrained(folder / "model")
    split(folder / "model", folder / "out", tp=2)
    merge(folder / "out", folder / "merged")
    assert contents(folder / "merged") == contents(folder / "model")
    return open_source(folder / "model"), open_source(folder / "out")


def test_shards_are_merged_to_the_original_and_compute_the_same(tmp_path: Path) -> None:
    pairs = [("llava", "phi3"), ("paligemma", "gemma"), ("deepseek_vl", "cohere"), ("internvl", "qwen3_moe")]
    found = [_made(*pair, tmp_path / "-".join(pair)) for pair in pairs]
    for pair, report in zip(pairs, run_forwards(found, ForwardOptions(seq=16)), strict=True):
        assert report.is_same, pair


def test_a_tensor_that_the_type_of_the_text_does_not_have_is_refused() -> None:
    found = saved("llava", "llama")
    more = FullTensor("language_model.model.layers.0.self_attn.qkv_proj.weight", "F32", (192, 80), "")
    with pytest.raises(PlanError, match="has no rule"):
        Saved(found.config, (*found.tensors, more)).model  # noqa: B018


def test_without_a_known_type_of_text_the_names_are_llamas() -> None:
    found = saved("llava", "llama")
    for text in ({"model_type": "unheard_of"}, {"model_type": None}):
        config = json.loads(json.dumps(found.config))
        config["text_config"] |= text
        assert language_model(config) is None
        assert bind(find_architecture(config, Path()), config, found.tensors).kinds
    assert language_model({"model_type": "llava_llama", "hidden_size": 3}) is None
    assert language_model({"model_type": "llama"}) is None
    assert built_in_architectures()["llava"].stem == "llava"
