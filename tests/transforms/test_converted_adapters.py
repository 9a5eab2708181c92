"""Adapters of experts from one program's form to another's: the same bytes come back, and each adds the same."""

from __future__ import annotations

import json
import shutil
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from reshard.api import merge, split
from reshard.formats.errors import ReshardError, SettingError
from reshard.formats.notation.format_file import ExpertFactor, adapter_format, adapter_format_names
from reshard.transforms.low_rank import by_expert
from tests import peft_adapters, store, zoo
from tests.marks import one_of_each
from tests.support import command, ok, refused, weights_of

PREFIX = "base_model.model."
OTHERS = [name for name in adapter_format_names() if name != "peft"]
CASES = [
    ("mixtral", "experts"), ("gpt_oss", "experts"), ("nemotron_h", "up"), ("qwen2_moe", "experts"),
    ("qwen3_moe", "experts"), ("qwen3_5_moe_text", "experts"), ("deepseek_v2", "experts"), ("deepseek_v3", "experts"),
    ("glm4_moe", "experts"), ("gemma4_text-experts", "experts"), ("llama4_text", "experts"), ("lfm2_moe", "experts"),
    ("granitemoe", "experts"), ("qwen3_vl_moe", "experts"), ("mixtral", "down"),
]  # fmt: skip
"""Models with experts by name and in one tensor, either side first; gate and up apart, and index by index."""
CASES_ONCE = one_of_each(sorted(CASES, key=lambda case: case[0] != "gpt_oss"))


def same(one: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(each, other[name]) for name, each in one.items())


def weights(folder: Path) -> bytes:
    return (folder / "adapter_model.safetensors").read_bytes()


def changed(folder: Path, adapter: Path, **settings: Any) -> Path:
    """A copy of an adapter with other settings."""
    shutil.copytree(adapter, folder)
    config = json.loads((adapter / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps(config | settings))
    return folder


def of_each_expert(name: str, kind: str, folder: Path, dtype: str = "float32") -> Path:
    """An adapter with numbers of its own for each matrix of each expert."""
    split(peft_adapters.made(name, kind), folder, format="peft-per-expert", config=store.checkpoint(name))
    chance = torch.Generator().manual_seed(3)
    own = {
        key: torch.randint(-3, 4, each.shape, generator=chance).to(getattr(torch, dtype)) / 4
        for key, each in weights_of(folder).items()
    }
    save_file(own, folder / "adapter_model.safetensors", {"format": "pt"})
    return folder


@pytest.mark.parametrize(("name", "kind"), CASES_ONCE)
def test_it_comes_back_and_adds_the_same(name: str, kind: str, tmp_path: Path) -> None:
    source, base = peft_adapters.made(name, kind), store.checkpoint(name)
    merge(base, tmp_path / "wanted", adapter=source)
    wanted = weights_of(tmp_path / "wanted")
    for form in OTHERS:
        split(source, tmp_path / form, format=form, config=base)
        merge(base, tmp_path / f"{form}-merged", adapter=tmp_path / form)
        assert same(weights_of(tmp_path / f"{form}-merged"), wanted), form
        split(tmp_path / form, tmp_path / f"{form}-back", format="peft", config=base)
        assert weights(tmp_path / f"{form}-back") == weights(source), form


@pytest.mark.parametrize("name", one_of_each(["gpt_oss", "qwen3_moe", "qwen3_vl_moe"]))
def test_a_way_over_another_form_is_the_direct_way(name: str, tmp_path: Path) -> None:
    source, base = peft_adapters.made(name, "experts"), store.checkpoint(name)
    for form in OTHERS:
        split(source, tmp_path / form, format=form, config=base)
    for number, form in enumerate(OTHERS):
        after = OTHERS[(number + 1) % len(OTHERS)]
        split(tmp_path / form, tmp_path / f"{form}-{after}", format=after, config=base)
        assert weights(tmp_path / f"{form}-{after}") == weights(tmp_path / after), (form, after)


@pytest.mark.parametrize(("name", "kind"), one_of_each(CASES))
def test_different_as_lie_side_by_side(name: str, kind: str, tmp_path: Path) -> None:
    """PEFT loads what is written, with every key, and merges it to the same bits."""
    from peft import PeftModel, get_peft_model_state_dict

    base, own = store.checkpoint(name), of_each_expert(name, kind, tmp_path / "own")
    split(own, tmp_path / "fused", format="peft", config=base)
    for way in ("own", "fused"):
        merge(base, tmp_path / f"{way}-merged", adapter=tmp_path / way)
    wanted = weights_of(tmp_path / "own-merged")
    assert same(weights_of(tmp_path / "fused-merged"), wanted)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        warnings.filterwarnings("error", message="Found missing adapter keys")
        model = PeftModel.from_pretrained(
            zoo.class_of(base).from_pretrained(base, dtype=torch.float32), tmp_path / "fused"
        )
        assert same(get_peft_model_state_dict(model), weights_of(tmp_path / "fused"))
        model.merge_and_unload().save_pretrained(tmp_path / "peft")
    merged = weights_of(tmp_path / "peft")
    assert all(torch.equal(each, wanted[key]) for key, each in merged.items())


def added(form: str, of: dict[str, np.ndarray], place: str, experts: int) -> dict[str, np.ndarray]:
    """B A of each expert's gate_up and down, ``out in``, by the programs' own words: loops over experts."""
    found: dict[str, np.ndarray] = {}
    for leaf, nested, word in (("gate_up_proj", "base_layer.", "gate_and_up"), ("down_proj", "", "down")):
        made = []
        for e in range(experts):
            if form == "sglang-lora":
                a, b = of[f"{place}.{leaf}.lora_A.weight"][e], of[f"{place}.{leaf}.lora_B.weight"][e]
            elif form == "automodel-lora":
                a, b = of[f"{place}.lora_{word}_A"][e].T, of[f"{place}.lora_{word}_B"][e].T
            elif form == "peft-per-expert":
                names = ("gate_proj", "up_proj") if nested else ("down_proj",)
                pairs = [[of[f"{place}.{e}.{name}.lora_{x}.weight"] for x in "AB"] for name in names]
                made.append(np.concatenate([b @ a for a, b in pairs]))
                continue
            else:
                a, b = of[f"{place}.{nested}lora_A.weight"], of[f"{place}.{nested}lora_B.weight"]
                r = len(a) // experts
                a, b = a[e * r : (e + 1) * r], b[:, e::experts]
                if form in {"peft-0.18", "peft-0.19.0"}:  # these take the output of a module of Qwen's as the input
                    a, b = b.T, a.T
            made.append(b @ a)
        found[leaf] = np.stack(made)
    return found


@pytest.mark.parametrize("form", adapter_format_names())
def test_a_form_is_what_its_program_says(form: str, tmp_path: Path) -> None:
    """Against loops over experts, as the programs' sources have them."""
    source, base = peft_adapters.made("qwen3_moe", "experts"), store.checkpoint("qwen3_moe")
    place = f"{PREFIX}model.layers.2.mlp.experts"
    wanted = added("peft", {key: each.numpy() for key, each in weights_of(source).items()}, place, 5)
    split(source, tmp_path / "out", format=form, config=base)
    found = added(form, {key: each.numpy() for key, each in weights_of(tmp_path / "out").items()}, place, 5)
    assert all(np.array_equal(found[leaf], wanted[leaf]) and wanted[leaf].any() for leaf in wanted)


def test_gate_and_up_of_gpt_oss_lie_one_after_the_other_in_sglang(tmp_path: Path) -> None:
    """Everywhere else they interleave."""
    source, base = peft_adapters.made("gpt_oss", "experts"), store.checkpoint("gpt_oss")
    for form in ("sglang-lora", "peft-per-expert"):
        split(source, tmp_path / form, format=form, config=base)
    place = f"{PREFIX}model.layers.2.mlp.experts"
    b = weights_of(source)[f"{place}.base_layer.lora_B.weight"].reshape(80, 3, 6)
    stacked, apart = (weights_of(tmp_path / form) for form in ("sglang-lora", "peft-per-expert"))
    for e in range(6):
        halves = stacked[f"{place}.gate_up_proj.lora_B.weight"][e]
        assert torch.equal(halves, torch.cat([b[0::2, :, e], b[1::2, :, e]]))
        assert torch.equal(apart[f"{place}.{e}.up_proj.lora_B.weight"], b[1::2, :, e])


@pytest.mark.parametrize("form", OTHERS)
def test_any_form_is_split_and_merged_back(form: str, tmp_path: Path) -> None:
    source, base = peft_adapters.made("qwen3_moe", "experts"), store.checkpoint("qwen3_moe")
    split(source, tmp_path / "form", format=form, config=base)
    split(tmp_path / "form", tmp_path / "out", tp=2, config=base)
    split(tmp_path / "out", tmp_path / "one", tp=1)
    merge(tmp_path / "one", tmp_path / "merged")
    assert weights(tmp_path / "merged") == weights(tmp_path / "form")


@given(st.permutations(["expert", "rank", "in"]), st.integers(0, 3), st.tuples(*[st.integers(1, 4)] * 3))
def test_the_axes_of_a_factor_say_where_each_element_is(
    order: list[str], joined: int, lengths: tuple[int, ...]
) -> None:
    sizes = dict(zip(("expert", "rank", "in"), lengths, strict=True))
    axes = " ".join(order)
    shape = [sizes[axis] for axis in order]
    if joined in {1, 2}:
        first = joined - 1
        axes = " ".join([*order[:first], f"({order[first]} {order[first + 1]})", *order[first + 2 :]])
        shape[first : first + 2] = [shape[first] * shape[first + 1]]
    stored = np.arange(np.prod(shape)).reshape(shape)
    found = by_expert(stored, ExpertFactor("A", axes), sizes)
    for at in np.ndindex(*lengths):
        index = dict(zip(("expert", "rank", "in"), at, strict=True))
        flat = np.ravel_multi_index([index[axis] for axis in order], [sizes[axis] for axis in order])
        assert found[index["expert"], index["in"], index["rank"]] == flat


def test_peft_0_19_0_asked_the_modules_and_turned_the_answer_around(tmp_path: Path) -> None:
    for name, other in (("gpt_oss", None), ("mixtral", "peft-0.18")):
        source, base = peft_adapters.made(name, "experts"), store.checkpoint(name)
        for form in ("peft-0.18", "peft-0.19.0"):
            split(source, tmp_path / f"{name}-{form}", format=form, config=base)
        is_same = weights(tmp_path / f"{name}-peft-0.19.0") == weights(tmp_path / f"{name}-peft-0.18")
        assert is_same == (other is not None)
        assert weights(tmp_path / f"{name}-peft-0.19.0") != weights(source)


def test_columns_that_are_grouped_by_expert(tmp_path: Path) -> None:
    """As Unsloth packed B until September 2026, and notes it since."""
    source, base = peft_adapters.made("qwen3_moe", "experts"), store.checkpoint("qwen3_moe")
    adapter = changed(tmp_path / "adapter", source, lora_B_layout="grouped_by_expert")
    own = {
        key: each.reshape(len(each), 3, 5).transpose(1, 2).reshape(len(each), -1).contiguous() if "_B" in key else each
        for key, each in weights_of(source).items()
    }
    save_file(own, adapter / "adapter_model.safetensors", {"format": "pt"})
    for way, folder in (("one", source), ("other", adapter)):
        merge(base, tmp_path / way, adapter=folder)
    assert same(weights_of(tmp_path / "one"), weights_of(tmp_path / "other"))
    split(adapter, tmp_path / "peft", format="peft", config=base)
    assert weights(tmp_path / "peft") == weights(source) != weights(adapter)
    assert json.loads((tmp_path / "peft" / "adapter_config.json").read_text())["lora_B_layout"] is None
    merge(base, tmp_path / "third", adapter=changed(tmp_path / "plain", source, lora_B_layout="rank_major"))
    assert same(weights_of(tmp_path / "one"), weights_of(tmp_path / "third"))
    with pytest.raises(ReshardError, match="lora_B_layout is 'mixed', which is not known"):
        merge(base, tmp_path / "no", adapter=changed(tmp_path / "unknown", source, lora_B_layout="mixed"))


def test_sides_of_equal_size_need_a_version(tmp_path: Path) -> None:
    """Mixtral's gate_up of the zoo is 80 by 80, Qwen's 48 by 80."""
    for name in ("mixtral", "qwen3_moe"):
        adapter = changed(tmp_path / name, peft_adapters.made(name, "experts"), peft_version=None)
        if name == "mixtral":
            with pytest.raises(ReshardError, match="which side is the input cannot be told without peft_version"):
                merge(store.checkpoint(name), tmp_path / "out", adapter=adapter)
        else:
            merge(store.checkpoint(name), tmp_path / "out", adapter=adapter)
            merge(store.checkpoint(name), tmp_path / "wanted", adapter=peft_adapters.made(name, "experts"))
            assert same(weights_of(tmp_path / "out"), weights_of(tmp_path / "wanted"))


def test_what_no_form_holds(tmp_path: Path) -> None:
    base, own = store.checkpoint("qwen3_moe"), of_each_expert("qwen3_moe", "experts", tmp_path / "own")
    with pytest.raises(ReshardError, match="'sglang-lora' has one rank and one alpha for all modules"):
        split(own, tmp_path / "out", format="sglang-lora", config=base)
    halved = changed(tmp_path / "halved", own, alpha_pattern={r"experts\.\d+\.up_proj": 3})
    with pytest.raises(ReshardError, match=r"experts\.gate_up_proj' are scaled by 1\.0 and by 2\.0"):
        split(halved, tmp_path / "out", format="peft", config=base)
    split(halved, tmp_path / "each", format="peft-per-expert", config=base)
    assert json.loads((tmp_path / "each" / "adapter_config.json").read_text())["alpha_pattern"] == {
        r"model.layers.\d+.mlp.experts.\d+.up_proj": 3
    }
    mixed = changed(tmp_path / "mixed", own)
    dtypes = {key: each.half() if ".up_proj" in key else each for key, each in weights_of(own).items()}
    save_file(dtypes, mixed / "adapter_model.safetensors")
    with pytest.raises(ReshardError, match=r"experts\.gate_up_proj' have different dtypes, F16 and F32"):
        split(mixed, tmp_path / "out", format="peft", config=base)
    with pytest.raises(ReshardError, match="is not an adapter, and 'peft' is a format of adapters"):
        split(base, tmp_path / "out", format="peft")
    for settings in ({"dequantize": True}, {"adapter": own}, {"max_shard_size": 1 << 20}, {"tp": 2}):
        with pytest.raises(SettingError):
            split(own, tmp_path / "out", format="peft", config=base, **settings)
    assert not (tmp_path / "out").exists()


def test_the_command(tmp_path: Path) -> None:
    adapter, base = peft_adapters.made("mixtral", "experts"), store.checkpoint("mixtral")
    ok("split", adapter, tmp_path / "out", "--as", "peft-per-expert", "--config", base)
    assert f"{PREFIX}model.layers.0.block_sparse_moe.experts.5.w3.lora_B.weight" in weights_of(tmp_path / "out")
    assert "with the format 'peft-per-expert': it is one full" in refused(
        "split", adapter, tmp_path / "two", "--as", "peft-per-expert", "--tp", "2", "--config", base
    )
    done = command("merge", adapter, tmp_path / "two", "--config", base)
    assert done.returncode == 2 and "is a whole adapter" in done.stderr and "--into BASE" in done.stderr, done.stderr
    assert "'peft-0.18' is a format of adapters" in refused("plan", base, "--as", "peft-0.18", "--tp", "2")
    found = json.loads(command("formats", base, "--json").stdout)["formats"]
    assert found["peft"] == {"possible": False, "reason": "it is for adapters"}


def test_one_expert_alone_is_zero_elsewhere(tmp_path: Path) -> None:
    base, own = store.checkpoint("mixtral"), of_each_expert("mixtral", "experts", tmp_path / "own")
    kept = {key: each for key, each in weights_of(own).items() if ".1.block_sparse_moe.experts.4.w1" in key}
    save_file(kept, own / "adapter_model.safetensors")
    split(own, tmp_path / "fused", format="peft", config=base)
    found = weights_of(tmp_path / "fused")
    assert {key.removeprefix(f"{PREFIX}model.layers.1.mlp.experts.") for key in found} == {
        "lora_A.weight", "lora_B.weight",
    }  # fmt: skip
    for way in ("own", "fused"):
        merge(base, tmp_path / f"{way}-merged", adapter=tmp_path / way)
    assert same(weights_of(tmp_path / "own-merged"), weights_of(tmp_path / "fused-merged"))
    assert len(kept) == 2 and adapter_format("peft").factors is not None


def test_a_bias_of_the_base_keeps_its_name(tmp_path: Path) -> None:
    base, adapter = store.checkpoint("gpt_oss"), tmp_path / "adapter"
    shutil.copytree(peft_adapters.made("gpt_oss", "experts"), adapter)
    bias = weights_of(base)["model.layers.0.self_attn.q_proj.bias"]
    name = f"{PREFIX}model.layers.0.self_attn.q_proj.base_layer.bias"
    save_file(weights_of(adapter) | {name: bias}, adapter / "adapter_model.safetensors", {"format": "pt"})
    split(adapter, tmp_path / "out", format="peft-per-expert", config=base)
    assert torch.equal(weights_of(tmp_path / "out")[name], bias)
