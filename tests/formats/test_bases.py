"""Architecture files that build on others."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from reshard.formats.errors import PlanError
from reshard.formats.notation.architecture import Architecture
from reshard.formats.notation.architecture_files import BASES, BUILT_IN, load_architecture, to_toml

LLAMA = load_architecture(BUILT_IN / "llama.toml")


def load(folder: Path, text: str) -> Architecture:
    (folder / "own.toml").write_text(text)
    return load_architecture(folder / "own.toml")


def test_a_file_has_what_its_base_has(tmp_path: Path) -> None:
    own = load(tmp_path, 'base = ["llama"]\n')
    for part in ("prefixes", "sections", "sizes", "families", "pad", "config", "tensors", "modules"):
        assert getattr(own, part) == getattr(LLAMA, part)
    assert (own.name, own.model_types) == ("own", ())
    assert own.match("layers.2.mlp.up_proj.weight") == LLAMA.match("layers.2.mlp.up_proj.weight")


def test_a_file_wins_over_its_base_key_by_key(tmp_path: Path) -> None:
    own = load(tmp_path, 'base = ["llama"]\n[sizes]\nff = "ffn_dim"\nmore = "3"\n[tensors]\n"lm_head.bias" = "1"\n')
    assert {k: v.text for k, v in own.sizes.items()} == {
        **{k: v.text for k, v in LLAMA.sizes.items()},
        "ff": "ffn_dim",
        "more": "3",
    }
    assert own.tensors.keys() == LLAMA.tensors.keys()
    assert [name for name in own.tensors if own.tensors[name] != LLAMA.tensors[name]] == ["lm_head.bias"]


def test_the_later_base_wins(tmp_path: Path) -> None:
    gpt2 = load_architecture(BUILT_IN / "gpt2.toml")
    assert load(tmp_path, 'base = ["llama", "gpt2"]').sizes["hidden"] == gpt2.sizes["hidden"]
    assert load(tmp_path, 'base = ["gpt2", "llama"]').sizes["hidden"] == LLAMA.sizes["hidden"]
    assert gpt2.sizes["hidden"] != LLAMA.sizes["hidden"]


def test_false_takes_away_what_a_base_has(tmp_path: Path) -> None:
    own = load(tmp_path, 'base = ["llama"]\n[config]\nhead_dim = false\n[tensors]\n"lm_head.bias" = false\n')
    assert LLAMA.tensors.keys() - own.tensors.keys() == {"lm_head.bias"}
    assert LLAMA.config.keys() - own.config.keys() == {"head_dim"}
    assert own.match("lm_head.bias") is None


def test_lines_of_a_base_need_not_cover_anything(tmp_path: Path) -> None:
    own = load(tmp_path, 'base = ["llama"]\n[tensors]\n"lm_head.bias" = "vocab"\n"extra" = "1"\n')
    assert own.inherited == own.tensors.keys() - {"lm_head.bias", "extra"}
    assert not load(tmp_path, '[tensors]\n"extra" = "1"\n').inherited


def test_what_is_written_stands_alone(tmp_path: Path) -> None:
    text = to_toml(load(tmp_path, 'name = "own"\nbase = ["llama"]\n[config]\nhead_dim = false\n'))
    assert "base" not in tomllib.loads(text) and "head_dim" not in tomllib.loads(text)["config"]
    assert load(tmp_path, text).tensors == LLAMA.tensors


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('base = ["lama"]', "there is no base 'lama'"),
        ('base = ["../llama"]', "there is no base '../llama'"),
        ('base = "llama"', "'base' is a list of names, such as [\"llama\"], not 'llama'"),
        ("base = [1]", "'base' is a list of names"),
        ('base = ["llama"]\n[tensors]\n"lm_hed.bias" = false', "removes nothing: no base has it"),
        ('base = ["llama"]\ntensors = 3', "tensors"),
        ('base = ["llama"]\n[sizes]\nff = "a +"', "'a +' is not an expression"),
    ],
)
def test_a_wrong_base_is_one_clear_error(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(PlanError) as error:
        load(tmp_path, text)
    assert message in error.value.message and "own.toml" in error.value.message
    assert "\n" not in error.value.message


def test_bases_in_a_circle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = {name: tmp_path / f"{name}.toml" for name in ("one", "two")}
    monkeypatch.setattr("reshard.formats.notation.architecture_files._base_files", lambda: files)
    files["one"].write_text('base = ["two"]')
    files["two"].write_text('base = ["one"]')
    with pytest.raises(PlanError, match="circle: one -> two -> one"):
        load(tmp_path, 'base = ["one"]')


def test_no_name_stands_for_two_files() -> None:
    assert not {path.stem for path in BASES.glob("*.toml")} & {path.stem for path in BUILT_IN.glob("*.toml")}


def test_names_of_a_base_take_the_prefix_of_the_file(tmp_path: Path) -> None:
    own = load(tmp_path, 'base = ["llama"]\nprefixes = ["text.model.", ""]\n[tensors]\n"text.model.more" = "1"\n')
    assert "model.norm.weight" not in own.tensors
    assert own.tensors["text.model.norm.weight"] == LLAMA.tensors["model.norm.weight"]
    assert own.tensors["lm_head.weight"] == LLAMA.tensors["lm_head.weight"]
    assert "text.model.layers.{layer}.self_attn" in own.modules
