"""vLLM's format for each model type: what vLLM itself holds, from its own observations, or a refusal with the reason.

``tests/oracles/vllm/zoo.json.xz`` has, for each model of the zoo that vLLM 0.32 loads and that is written, a hash of
what each rank holds (see ``tools/engine_names.py``).
"""

from __future__ import annotations

import json
import lzma
import shutil
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from safetensors.numpy import load_file, save_file

from reshard.api import diff, merge, split
from reshard.formats.errors import PlanError
from reshard.formats.notation.format_file import PROGRAMS, READ, format_of, read_format
from tests import store, zoo
from tests.marks import thorough
from tests.programs.oracles import checkpoint
from tests.support import change_json, changed_tensors, command, contents
from tools.engine_names import (
    DIGITS,
    FIXTURE,
    OBSERVED,
    REGISTRY,
    TEXT,
    UNCOMPARED,
    UNTIED,
    hashes_of,
    held_in,
    make,
    shown,
)

FORMAT = format_of("vllm")
OBSERVATIONS: dict[str, Any] = json.loads(OBSERVED.read_text())
HELD: dict[str, dict[str, list[str]]] = json.loads(lzma.decompress(FIXTURE.read_bytes()))


def _classes() -> dict[str, str]:
    """The first model of each set of lines, and of each architecture file: the tests' share of what was compared."""
    kinds, found = {*zoo.one_of_each()}, {}
    for name in HELD:
        entry = zoo.ZOO[DIGITS.sub("", name).removesuffix(UNTIED).partition(TEXT)[0]]
        if entry.model_type in FORMAT.types.meshes or name in kinds:
            found.setdefault(entry.model_type, name)
    return found


def _largest(name: str) -> int:
    return max(int(tp[2:]) for tp in HELD[name])


def _numbered(name: str) -> Path:
    return store.made(f"{name}-numbered", lambda folder: make(name, folder))


NARROWED = sorted(name for name in HELD if DIGITS.search(name))
"""Of models of which vLLM holds tensors in bfloat16 whatever the model's dtype: a digit of each number."""


WITHIN = sorted(name for name in HELD if TEXT in name)
"""With another language model within towers than the zoo's."""


@pytest.mark.parametrize("name", [*sorted({*_classes().values()} - {*NARROWED, *WITHIN}), *NARROWED, *WITHIN])
@thorough
def test_vllm_holds_what_is_written(name: str, tmp_path: Path) -> None:
    """Names, dtypes, shapes and each element on each rank, at the largest degree that vLLM loaded."""
    tp = _largest(name)
    split(_numbered(name), tmp_path / "out", tp=tp, format="vllm")
    assert hashes_of(held_in(tmp_path / "out"), tp) == HELD[name][f"tp{tp}"]


@pytest.mark.parametrize("name", ["gemma3", "llava"])
def test_a_tower_is_written_alike_under_published_names_and_those_that_transformers_saves(
    name: str, tmp_path: Path
) -> None:
    """LLaVA's last layer, of which it reads no output, is left out."""
    saved = tmp_path / "saved"
    saved.mkdir()
    (saved / "config.json").write_bytes((_numbered(name) / "config.json").read_bytes())
    tensors = {
        key.replace("vision_model.", ""): of for key, of in load_file(_numbered(name) / "model.safetensors").items()
    }
    save_file(tensors, saved / "model.safetensors")
    for source in (_numbered(name), saved):
        split(source, tmp_path / f"of-{source.name}", tp=2, format="vllm")
        merge(tmp_path / f"of-{source.name}", tmp_path / f"back-{source.name}")
        assert contents(tmp_path / f"back-{source.name}") == contents(source)
    one, other = (held_in(tmp_path / f"of-{source.name}") for source in (_numbered(name), saved))
    assert one == other and ("encoder.layers.1." not in str([*one]) or name != "llava")


WAYS_BACK = ("cohere2_moe", "bitnet", "flex_olmo", "qwen2_vl", "qwen2_5_vl", "mistral3", "glm", "cohere", "deepseek_v2")
"""Joined, stacked, renamed and cut in every way that lines have."""


@pytest.mark.parametrize("name", WAYS_BACK)
def test_the_way_back_restores_every_byte(name: str, tmp_path: Path) -> None:
    original = _numbered(name)
    split(original, tmp_path / "out", tp=2, format="vllm")
    merge(tmp_path / "out", tmp_path / "merged")
    assert contents(tmp_path / "merged") == contents(original)


def _with(folder: Path, out: Path, **settings: Any) -> Path:
    """A checkpoint with other entries in config.json."""
    shutil.copytree(folder, out)
    change_json(out / "config.json", **settings)
    return out


def test_a_class_that_runs_in_a_module_that_was_compared_is_written(tmp_path: Path) -> None:
    """Kimi K2 has a model type of its own and runs in the module of DeepSeek V3."""
    plain = checkpoint("vllm", "deepseek_v3")
    assert "DeepseekV3ForCausalLM" in FORMAT.types.compared and "kimi_k2" not in FORMAT.types.compared
    source = _with(plain, tmp_path / "source", model_type="kimi_k2")
    for folder in (plain, source):
        split(folder, tmp_path / f"{folder.name}-out", tp=2, format="vllm")
    one, other = (held_in(tmp_path / f"{folder.name}-out") for folder in (plain, source))
    assert one == other


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"model_type": "kimi_k2", "architectures": ["OtherForCausalLM"]}, "was not compared"),
        ({"model_type": "kimi_k2", "architectures": ["ChatGLMModel"]}, "was not compared"),
    ],
)
def test_a_class_that_vllm_has_not_or_that_was_not_compared_is_refused(
    settings: dict[str, Any], why: str, tmp_path: Path
) -> None:
    source = _with(checkpoint("vllm", "deepseek_v3"), tmp_path / "source", **settings)
    with pytest.raises(PlanError, match=f"'kimi_k2' has no place in the format 'vllm': .*{why}"):
        split(source, tmp_path / "out", tp=2, format="vllm")
    assert not (tmp_path / "out").exists()


def test_what_was_not_compared_with_vllm_is_refused_with_what_was_seen(tmp_path: Path) -> None:
    done = command("split", store.checkpoint("albert"), tmp_path / "out", "--tp", "2", "--as", "vllm")
    assert done.returncode == 2
    why = "not compared with vLLM yet: vLLM 0.33.0 has no class for it, and our small model did not load in vLLM 0.32.0"
    assert f"Error: 'AlbertForPreTraining' has no place in the format 'vllm': {why}" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "why"), [({"tp": 8}, "was compared up to tp 4"), ({"tp": 2, "pp": 2}, "was compared with tp alone")]
)
def test_a_mesh_that_was_not_compared_is_refused(arguments: dict[str, int], why: str, tmp_path: Path) -> None:
    with pytest.raises(PlanError, match=why):
        split(store.checkpoint("mistral3"), tmp_path / "out", **arguments, format="vllm")


def test_a_degree_that_was_not_compared_is_refused() -> None:
    """At one rank nothing shows how vLLM splits what lines describe."""
    for kind, name in _classes().items():
        if kind in FORMAT.types.meshes and _largest(name) < 4:
            assert FORMAT.types.meshes[kind] == {"tp": _largest(name)}, kind


def test_a_tensor_that_no_compared_model_had_is_refused(tmp_path: Path) -> None:
    """A bias beside a weight: vLLM may have a place for it, or not."""
    source = shutil.copytree(_numbered("bitnet"), tmp_path / "source")
    with changed_tensors(source / "model.safetensors") as tensors:
        norm = tensors["model.norm.weight"]
        tensors |= {f"model.layers.{layer}.self_attn.o_proj.bias": norm.clone() for layer in range(3)}
    change_json(source / "config.json", attention_bias=True)
    with pytest.raises(PlanError, match=r"o_proj.bias' has no place in the format 'vllm': no model that was compared"):
        split(source, tmp_path / "out", tp=2, format="vllm")


@pytest.mark.parametrize("name", ["mistral3", "mistral3+untied"])
def test_a_table_that_is_tied_or_not(name: str, tmp_path: Path) -> None:
    """A line for a tied table does not hold where there is a head."""
    split(_numbered(name), tmp_path / "out", tp=2, format="vllm")
    names = {stored for _, stored in held_in(tmp_path / "out")}
    both = {"language_model.model.embed_tokens.weight", "language_model.lm_head.weight"}
    assert names & both == (both if name.endswith(UNTIED) else {"language_model.lm_head.weight"})


def test_queries_and_keys_of_unequal_size_are_not_cut_and_joined(tmp_path: Path) -> None:
    """With fewer heads of keys than ranks vLLM holds each of them on several: more than a range of them."""
    names = [f"model.layers.{{layer}}.self_attn.{letter}_proj.weight" for letter in "qkv"]
    line = {"model.layers.{layer}.self_attn.qkv_proj.weight": {"from": names, "cut": 0}}
    format = read_format(
        PROGRAMS / "vllm.toml", {"meshes": {"llama": {"tp": None}}, "lines": [{"types": ["llama"], "tensors": line}]}
    )
    with (
        mock.patch.dict(READ, {"vllm": format}),
        pytest.raises(PlanError, match=r"joined from tensors of sizes .* and"),
    ):
        split(checkpoint("vllm", "llama_kv2"), tmp_path / "out", tp=2, format="vllm")


def test_the_file_says_of_each_class_one_thing() -> None:
    known = {*FORMAT.types.compared, *FORMAT.types.refused}
    assert FORMAT.types.classes <= known
    assert not FORMAT.types.compared & {*FORMAT.types.refused} and {*FORMAT.types.meshes} <= FORMAT.types.compared
    modules = OBSERVATIONS["modules"]
    assert not any(module.startswith("transformers:") for module in modules), "its classes are of all types"
    same = {name for name, module in OBSERVATIONS["builds"].items() if module in modules}
    assert same - {*FORMAT.types.refused} <= FORMAT.types.compared
    uncompared = {name for name, why in FORMAT.types.refused.items() if why.startswith(UNCOMPARED)}
    assert {*OBSERVATIONS["errors"]} == uncompared


def test_only_what_vllm_has_no_class_for_is_said_of_vllm() -> None:
    """A small model that did not load in a comparison says nothing of the program."""
    classes = {*json.loads(REGISTRY.read_text())["classes"]}
    assert {"DeepseekV4ForCausalLM", "KimiLinearForCausalLM"} <= classes
    for name, why in FORMAT.types.refused.items():
        assert "does not load" not in why
        if why.startswith(UNCOMPARED):
            assert OBSERVATIONS["errors"][name] in why
            assert name not in classes or "has no class" not in why, name
    assert "vLLM 0.33.0 has no class for it" in FORMAT.types.refused["albert"]
    assert "has no class" not in FORMAT.types.refused["deepseek_v4"]


def test_the_docs_have_the_counts() -> None:
    text = (Path(__file__).parents[2] / "docs" / "reference" / "formats.md").read_text()
    assert shown() in text


def test_a_packed_weight_whose_plan_does_not_say_how_is_refused(tmp_path: Path) -> None:
    """vLLM has q, then k, then v: stored as it is, it would have the right shape."""
    model = store.checkpoint("bloom")
    assert command("plan", model, "--save", tmp_path / "plan.toml").returncode == 0
    text = (tmp_path / "plan.toml").read_text()
    (tmp_path / "plan.toml").write_text(text.replace("(kv (q: group + k: 1 + v: 1) head)", "(kv group 3 head)"))
    with pytest.raises(PlanError, match=r"'\(kv group 3 head\)' does not have the parts q, k, v"):
        split(model, tmp_path / "out", tp=1, format="vllm", plan_file=tmp_path / "plan.toml")


@pytest.mark.parametrize("name", ["mixtral-tied", "gemma2", "gpt2-untied", "bloom", "gptj", "opt-projected"])
def test_where_vllm_divides_the_layers_alone_every_stage_has_all_else(name: str, tmp_path: Path) -> None:
    split(store.checkpoint(name), tmp_path / "out", format="vllm", pp=2)
    first, last = (_around(tmp_path / "out", stage) for stage in range(2))
    assert first == last != set()
    (tmp_path / "out" / "reshard.json").unlink()
    assert diff(store.checkpoint(name), tmp_path / "out").same


def test_where_vllm_divides_more_the_last_stage_has_the_table_under_another_name(tmp_path: Path) -> None:
    split(store.checkpoint("gpt_neox-tied"), tmp_path / "out", format="vllm", pp=2)
    assert _around(tmp_path / "out", 0) == {"model.embed_in.weight"}
    norm = {"model.final_layer_norm.weight", "model.final_layer_norm.bias"}
    assert _around(tmp_path / "out", 1) == {"lm_head.weight", *norm}


def _around(folder: Path, stage: int) -> set[str]:
    """The names of a stage's tensors that belong to no layer."""
    (file,) = folder.glob(f"model-pp-{stage}-*.safetensors")
    return {name for name in load_file(file) if not any(word.isdigit() for word in name.split("."))}


def test_stages_of_a_model_of_which_vllm_has_positions_on_all_are_refused(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="on every stage of a pipeline"):
        split(store.checkpoint("gpt_bigcode"), tmp_path / "out", format="vllm", pp=2)
    split(store.checkpoint("gpt_bigcode"), tmp_path / "out", format="vllm", tp=2)
