from __future__ import annotations

from pathlib import Path

import pytest

from reshard.formats.errors import PlanError
from reshard.formats.notation.architecture import architecture_from_document, to_document
from reshard.formats.notation.architecture_files import (
    built_in_architectures,
    find_architecture,
    load_architecture,
    to_toml,
)

FILE = """
model_types = ["tiny"]
prefixes = ["model.", ""]
[sizes]
hidden = "hidden_size"
ff = "ffs[layer]"
[parallel]
tp = [["ff"], ["vocab"]]
pad = ["vocab"]
[config]
intermediate_size = "ff"
[tensors]
"model.embed.weight" = "vocab hidden"
"model.layers.{layer}.up.weight" = [{ when = "kinds[layer] == 'a'", shape = "ff hidden" }, { shape = "hidden ff" }]
"model.layers.{layer}.0.weight" = "hidden"
"model.layers.{layer}.down.weight" = { shape = ["hidden ff", "ff -> hidden"] }
"model.layers.{layer}.{expert}.weight" = "1 hidden"
"head.weight" = "vocab hidden"
"tower.*" = "..."
"tower.layers.{layer}.weight" = "hidden"
"""


@pytest.fixture
def tiny(tmp_path: Path):
    path = tmp_path / "tiny.toml"
    path.write_text(FILE)
    return load_architecture(path)


def test_names_are_matched_whole_and_literals_win_over_indices(tiny):
    assert tiny.match("model.layers.11.up.weight").indices == {"layer": 11}
    assert tiny.match("layers.3.up.weight").template == "model.layers.{layer}.up.weight"
    assert tiny.match("model.layers.3.0.weight").template == "model.layers.{layer}.0.weight"
    assert tiny.match("model.layers.3.1.weight").indices == {"layer": 3, "expert": 1}
    assert tiny.match("model.head.weight").template == "head.weight"  # with the root or without
    for name in (
        "model.layers.3.up",
        "model.layers.x.up.weight",
        "model.layers.3.up.weight.more",
        "layers.3.up.weights",
        "",
    ):
        assert tiny.match(name) is None


def test_a_star_covers_what_no_other_line_does(tiny):
    assert tiny.match("tower.layers.3.weight").template == "tower.layers.{layer}.weight"
    assert tiny.match("tower.layers.3.weight").indices == {"layer": 3}
    for name in ("tower.weight", "tower.layers", "tower.layers.3", "tower.layers.x.weight", "tower.layers.3.weight.0"):
        assert tiny.match(name).template == "tower.*"
        assert tiny.match(name).indices == {}
    assert tiny.match("tower") is None and tiny.match("towers.weight") is None


def test_text_and_document_and_back(tiny, tmp_path):
    again = tmp_path / "again.toml"
    again.write_text(to_toml(tiny))
    assert to_document(load_architecture(again)) == to_document(tiny)
    assert to_document(architecture_from_document(to_document(tiny), "x", "x")) == to_document(tiny)


@pytest.mark.parametrize("path", sorted(set(built_in_architectures().values())), ids=lambda p: p.stem)
def test_built_in_files_are_read_and_written_back(path, tmp_path):
    architecture = load_architecture(path)
    (tmp_path / path.name).write_text(to_toml(architecture))
    again = load_architecture(tmp_path / path.name)
    assert to_document(again) == to_document(architecture)
    assert again.modules.keys() == architecture.modules.keys()
    for template, rules in again.modules.items():
        for found, rule in zip(rules, architecture.modules[template], strict=True):
            assert (found.split, found.alone, found.sums) == (rule.split, rule.alone, rule.sums)
            assert {key: e.text for key, e in found.attributes.items()} == {
                k: e.text for k, e in rule.attributes.items()
            }
    named = {axis for line in architecture.tensors.values() for rule in line for s in rule.shapes for axis in s.axes}
    dealt = {axis for families in architecture.families.values() for family in families for axis in family}
    assert dealt - {s[1:-1] for t in architecture.tensors for s in t.split(".") if s[0] == "{"} <= named, (
        "an axis is dealt that no tensor has"
    )
    assert set(architecture.pad) <= dealt


@pytest.mark.parametrize("kind", ["llama", "bert", "gptj", "qwen3_asr"])
def test_heads_of_any_kind_are_whole_unless_a_file_names_them(kind, tmp_path):
    architecture = find_architecture({"model_type": kind}, tmp_path)
    own = load_architecture(built_in_architectures()[kind])
    for name in ("score.2.weight", "v_head.summary.bias", "classifier.norm.weight", "reward_transform_matrix"):
        assert own.match(name) is None
        assert architecture.match(name).rules[0].shapes[0].is_open, name
    for name in ("score.weight", "classifier.dense.weight"):
        if own.match(name):
            assert architecture.match(name) == own.match(name)
    assert architecture.match("model.layers.0.score.weight") is None


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (('"ff hidden"', '"ff hidden("'), "is not closed"),
        (('pad = ["vocab"]', "pad = 3"), "does not have the form"),
        (('pad = ["vocab"]', "ep = [[]]"), "a family under [parallel] has no axes"),
        (("[config]", "[confg]"), "unknown key 'confg'"),
        (('"hidden_size"', '"hidden_size +"'), "is not an expression"),
        (('"1 hidden"', "{ form = 1 }"), "tensor 'model.layers.{layer}.{expert}.weight' has no 'shape'"),
        (('"1 hidden"', "{ shape = '1', form = 1 }"), "unknown key 'form' (known: optional, shape, when)"),
        (('["hidden ff", "ff -> hidden"]', "[]"), "no shape"),
        (('"model.layers.{layer}.0.weight"', '"layers.{layer}.up.weight"'), "cover the same names"),
        (('"model.layers.{layer}.0.weight"', '"model.layers.{other}.0.weight"'), "is called '{layer}' elsewhere"),
        (('"head.weight" = "vocab hidden"', '"model.tower.*" = "..."'), "cover the same names"),
        (("[tensors]", "[tensors"), "cannot be read"),
    ],
)
def test_bad_files_are_refused(tmp_path, change, complaint):
    path = tmp_path / "bad.toml"
    assert change[0] in FILE
    path.write_text(FILE.replace(*change))
    with pytest.raises(PlanError) as error:
        load_architecture(path)
    assert complaint in error.value.message
    assert "bad.toml" in error.value.message
    assert "\n" not in error.value.message


def test_missing_file(tmp_path):
    with pytest.raises(PlanError, match="does not exist"):
        load_architecture(tmp_path / "none.toml")


def test_unknown_model_type_names_the_nearest(tmp_path):
    with pytest.raises(
        PlanError, match=r"unknown model_type 'lama' in .*config.json \(nearest known: .*llama"
    ) as error:
        find_architecture({"model_type": "lama"}, tmp_path)
    assert "plan_file=FILE" in str(error.value.hint)
    for config in ({}, {"architectures": ["SomeModel"]}, {"architectures": None}):
        with pytest.raises(PlanError, match="no model_type"):
            find_architecture(config, tmp_path)


def test_a_config_without_a_model_type_is_known_by_its_class(tmp_path):
    assert find_architecture({"architectures": ["CogAgentForCausalLM"]}, tmp_path).name == "cogvlm"
    with pytest.raises(PlanError, match="unknown model_type 'other'"):
        find_architecture({"model_type": "other", "architectures": ["CogAgentForCausalLM"]}, tmp_path)


def test_a_section_may_lie_deeper():
    architecture = architecture_from_document(
        {"section": ["thinker_config.text_config", "text_config"], "tensors": {"norm.weight": "hidden"}}, "omni", "omni"
    )
    deep = {"kind": "top", "depth": 1, "thinker_config": {"depth": 2, "text_config": {"hidden_size": 80}}}
    assert architecture.section(deep) == ("thinker_config", "text_config")
    settings = architecture.settings(deep)
    assert (settings["kind"], settings["depth"], settings["hidden_size"]) == ("top", 2, 80)
    assert architecture.section({"text_config": {"hidden_size": 80}}) == ("text_config",)
    assert architecture.section({"thinker_config": "none", "text_config": {"hidden_size": 80}}) == ("text_config",)
    assert architecture.section({"hidden_size": 80}) == ()
