"""Adapters of PEFT's own: read, split and merged back byte for byte, and merged into their base model."""

from __future__ import annotations

import json
import math
import shutil
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from reshard.api import merge, split
from reshard.formats.errors import CheckpointError, MismatchError, PlanError, ReshardError
from reshard.formats.files.checkpoint import ADAPTER
from reshard.formats.notation.adapters import adapter_architecture, settings_of
from reshard.formats.notation.architecture import SETTINGS
from reshard.formats.notation.architecture_files import find_architecture
from reshard.formats.numbers import CODES, as_float32, sums
from reshard.source.opening import open_source
from reshard.store.range_store import remote_of
from reshard.transforms.adapter import add_adapter
from reshard.verify.bytes import reading as proof
from tests import peft_adapters, store
from tests.marks import one_of_each
from tests.support import change_json, command, contents, weights_of
from tests.transforms.test_cast import TORCH, bits
from tests.transforms.test_dequantize import quantized

PREFIX = "base_model.model."
CASES = [
    ("mixtral", "experts"), ("mixtral", "linear"), ("llama", "embeddings"),
    ("mixtral", "down"), ("qwen3_moe", "experts"), ("qwen3_moe", "linear"), ("deepseek_v3", "experts"),
    ("gpt_oss", "experts"), ("gpt_oss", "down"), ("llama4_text", "experts"), ("nemotron_h", "up"),
    ("granitemoe", "experts"), ("qwen3_5_moe_text", "experts"), ("qwen2_moe", "linear"), ("glm4_moe", "linear"),
    ("gemma4_text-experts", "experts"), ("gpt2", "linear"), ("phi3", "linear"), ("bamba", "linear"),
    ("gpt2", "positions"), ("phi", "embeddings"), ("lfm2_moe", "experts"), ("minimax", "linear"), ("jamba", "linear"),
    ("laguna", "embeddings"), ("bailing_hybrid", "linear"), ("qwen3_vl_moe", "experts"), ("nomic_bert", "linear"),
    ("gemma3", "tower"), ("glm4v", "tower"),
]  # fmt: skip
"""Models of the zoo, and what of them is changed: modules with other names, stacks with either side first, a tower."""

TOLD = ("bamba", "glm4v", "gpt2", "jamba", "lfm2_moe")
"""Models of which a rank's config.json cannot say all sizes."""


@pytest.mark.parametrize(("name", "kind"), one_of_each(CASES, kind=lambda case: case[1]))
def test_it_is_split_merged_back_and_split_again(name: str, kind: str, tmp_path: Path) -> None:
    source, base = peft_adapters.made(name, kind), store.checkpoint(name)
    split(source, tmp_path / "out", tp=2, config=base)
    merge(tmp_path / "out", tmp_path / "merged")
    assert contents(tmp_path / "merged") == contents(source)
    split(tmp_path / "out", tmp_path / "one", tp=1)
    split(source, tmp_path / "direct", tp=1, config=base)
    assert contents(tmp_path / "one" / "rank-00-of-01") == contents(tmp_path / "direct" / "rank-00-of-01")


@pytest.mark.parametrize(("name", "kind"), one_of_each(CASES, kind=lambda case: case[1]))
def test_it_is_merged_as_peft_merges_it(name: str, kind: str, tmp_path: Path) -> None:
    """All sums of the products are exact, so that every order of summing gives the same bits."""
    source, base = peft_adapters.made(name, kind), store.checkpoint(name)
    merge(base, tmp_path / "out", adapter=source)
    found, wanted, before = (
        weights_of(folder) for folder in (tmp_path / "out", peft_adapters.merged(name, source, tmp_path / "peft"), base)
    )
    assert found.keys() == wanted.keys() | before.keys()
    assert all(torch.equal(found[key], wanted[key]) for key in wanted)
    assert sum(not torch.equal(found[key], before[key]) for key in found) > 1
    assert {file: data for file, data in contents(base).items() if file != "model.safetensors"} == {
        file: data for file, data in contents(tmp_path / "out").items() if file != "model.safetensors"
    }


@pytest.mark.parametrize(("name", "kind"), one_of_each([case for case in CASES if case[0] not in TOLD]))
def test_a_ranks_adapter_merges_into_the_ranks_weights(name: str, kind: str, tmp_path: Path) -> None:
    """To merge and to split may change places: so A and B are cut as their weight is."""
    source, base = peft_adapters.made(name, kind), store.checkpoint(name)
    split(base, tmp_path / "out", tp=2, adapter=source)
    split(base, tmp_path / "base", tp=2)
    split(source, tmp_path / "adapter", tp=2, config=base)
    for rank in ("rank-00-of-02", "rank-01-of-02"):
        alone = tmp_path / f"alone-{rank}"
        shutil.copytree(tmp_path / "base" / rank, alone)
        save_file(weights_of(alone), alone / "model.safetensors", {"format": "pt"})
        merge(alone, tmp_path / f"merged-{rank}", adapter=tmp_path / "adapter" / rank)
        found, wanted = weights_of(tmp_path / f"merged-{rank}"), weights_of(tmp_path / "out" / rank)
        assert found.keys() == wanted.keys()
        assert all(torch.equal(found[key], wanted[key]) for key in wanted), rank


@pytest.mark.parametrize("name", one_of_each(["qwen3_moe", "gpt_oss", "mixtral"]))
def test_each_rank_has_the_columns_of_its_experts(name: str, tmp_path: Path) -> None:
    """The expert is the slowest of A's rows, and the fastest of B's columns."""
    source = peft_adapters.made(name, "experts")
    config = json.loads((store.checkpoint(name) / "config.json").read_text())
    experts = config["num_local_experts"]
    count = next(n for n in range(2, experts + 1) if experts % n == 0)
    split(source, tmp_path / "out", tp=1, ep=count, config=store.checkpoint(name))
    whole = weights_of(source)
    for rank in range(count):
        own = slice(rank * experts // count, (rank + 1) * experts // count)
        for key, found in weights_of(tmp_path / "out" / f"rank-{rank:02d}-of-{count:02d}").items():
            if "lora_A" in key:
                wanted = whole[key].reshape(experts, 3, -1)[own].flatten(0, 1)
            else:
                wanted = whole[key].reshape(-1, 3, experts)[:, :, own].flatten(1)
            assert torch.equal(found, wanted), key


def test_the_order_of_wrappers_is_not_that_of_lines() -> None:
    """What is wrapped last is what gives the module's output."""
    config = json.loads((store.checkpoint("qwen3_moe") / "config.json").read_text())
    adapter = peft_adapters.made("qwen3_moe", "experts") / "adapter_config.json"
    settings = {**config, SETTINGS: json.loads(adapter.read_text())}
    base = find_architecture(config, adapter)
    turned = replace(base, tensors=dict(reversed(base.tensors.items())))
    one, other = (adapter_architecture(each, settings, adapter).tensors for each in (base, turned))
    assert one == other


def by_definition(base: Path, adapter: Path, scale: dict[str, float]) -> dict[str, torch.Tensor]:
    """W + scale * (B A) for Mixtral's experts in float64, by loops over experts and the rank; ``scale`` by the end of a
    name.
    """
    found, low = weights_of(base), {name: each.numpy() for name, each in weights_of(adapter).items()}
    for layer in range(3):
        place = f"{PREFIX}model.layers.{layer}.mlp.experts."
        for nested, names in (("base_layer.", ("w1", "w3")), ("", ("w2",))):
            a, b = low[f"{place}{nested}lora_A.weight"], low[f"{place}{nested}lora_B.weight"]
            experts = 6
            r = len(a) // experts
            for expert in range(experts):
                delta, by = (
                    np.zeros((len(b), a.shape[1])),
                    np.float64(np.float32(scale["gate_up" if nested else "down"])),
                )
                for k in range(r):
                    delta += np.outer(b[:, k * experts + expert].astype(np.float64), a[expert * r + k] * by)
                for part, name in zip(np.split(delta, len(names)), names, strict=True):
                    key = f"model.layers.{layer}.block_sparse_moe.experts.{expert}.{name}.weight"
                    found[key] = (found[key].double() + torch.from_numpy(part)).float().to(found[key].dtype)
    return found


@pytest.mark.parametrize(
    ("dtype", "stabilised"),
    one_of_each(product(["float32", "bfloat16", "float16"], [False, True]), lambda case: case[1]),
)
def test_it_is_merged_as_defined(dtype: str, stabilised: bool, tmp_path: Path) -> None:
    """Bit for bit, with random numbers, a rank and an alpha of its own for gate_up."""
    settings = {
        "use_rslora": stabilised,
        "rank_pattern": {r".*\.gate_up_proj": 5},
        "alpha_pattern": {"gate_up_proj": 7},
    }
    adapter = tmp_path / "adapter"
    shutil.copytree(peft_adapters.made("mixtral", "experts", **settings), adapter)
    chance = torch.Generator().manual_seed(3)
    random = {name: torch.randn(each.shape, generator=chance) for name, each in weights_of(adapter).items()}
    save_file(random, adapter / "adapter_model.safetensors")
    base = store.checkpoint("mixtral", dtype)
    merge(base, tmp_path / "out", adapter=adapter)
    root = math.sqrt if stabilised else float
    wanted = by_definition(base, adapter, {"gate_up": 7 / root(5), "down": 6 / root(3)})
    found = weights_of(tmp_path / "out")
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


KINDS = ["normal", "cancelling", "ties", "sparse", "not finite", "large", "negative zeros"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", ["BF16", "F16", "F32"])
def test_no_bit_of_a_sum_depends_on_a_librarys_order(dtype: str, kind: str) -> None:
    """Numbers whose sum is another in most orders; and the proof has the same bits by another way."""
    chance = np.random.default_rng(KINDS.index(kind))
    for rank in (1, 3, 16, 33):
        left, right = (chance.standard_normal(shape).astype(np.float32) for shape in ((40, rank), (rank, 70)))
        weight = chance.standard_normal((40, 70)).astype(np.float32)
        if kind == "cancelling":
            left *= np.ldexp(1.0, chance.integers(-40, 40, left.shape)).astype(np.float32)
            right *= np.ldexp(1.0, chance.integers(-20, 20, right.shape)).astype(np.float32)
        elif kind == "ties":
            left, right, weight = np.rint(4 * left), np.ldexp(np.rint(right), -9), np.rint(8 * weight) / 8
        elif kind == "sparse":
            for each in (left[:20], right[:, 30:], weight):
                each[chance.random(each.shape) < 0.7] = 0
        elif kind == "not finite":
            weight[chance.random(weight.shape) < 0.1], left[3, 0], right[0, 5] = np.inf, np.nan, -np.inf
        elif kind == "large":
            left, right, weight = left * np.float32(2.0**70), right * np.float32(2.0**56), weight * np.float32(2.0**126)
        elif kind == "negative zeros":
            left, right, weight = (
                np.copysign(0, each) if each is not right else each for each in (left, right, weight)
            )
        scale = np.float64(np.float32(-0.7))
        codes = bits(torch.from_numpy(weight).to(TORCH[dtype])).view(CODES[dtype])
        left, right = left.astype(np.float64) * scale, right.astype(np.float64)
        found = sums(codes, dtype, left, right)
        assert np.array_equal(
            found.view(f"<u{found.itemsize}"), proof._sums(codes, dtype, left, right).view(f"<u{found.itemsize}")
        )
        with np.errstate(all="ignore"):
            total = sum((np.outer(left[:, k], right[k]) for k in range(rank)), np.zeros(weight.shape))
            total += torch.from_numpy(codes.view(f"<i{codes.itemsize}")).view(TORCH[dtype]).float().numpy()
            should = bits(torch.from_numpy(total).float().to(TORCH[dtype])).view(CODES[dtype])
        finite = np.isfinite(as_float32(should, dtype))
        assert (
            np.array_equal(found[finite], should[finite]) and not np.isfinite(as_float32(found, dtype)[~finite]).any()
        )


def test_no_bit_depends_on_the_range_that_is_read() -> None:
    base = store.checkpoint("mixtral", "bfloat16")
    added = add_adapter(open_source(base), peft_adapters.made("mixtral", "linear"))
    file = remote_of(added.path / "model.safetensors")
    assert file is not None
    read, chance = file.read, np.random.default_rng(0)
    whole = bytes(read(0, file.size))
    assert whole != (base / "model.safetensors").read_bytes() and file.size == len(whole)
    for _ in range(300):
        start, stop = sorted(int(n) for n in chance.integers(0, file.size + 1, 2))
        stop = min(stop, start + int(chance.integers(1, 20000)))
        assert bytes(read(start, stop)) == whole[start:stop]


def test_the_commands(tmp_path: Path) -> None:
    adapter, base = peft_adapters.made("mixtral", "experts"), store.checkpoint("mixtral", "bfloat16")
    done = command("merge", adapter, "--into", base, tmp_path / "out")
    assert done.returncode == 0 and "added to the weights, in float64, and rounded" in done.stdout, done.stderr
    done = command("split", base, tmp_path / "served", "--adapter", adapter, "--tp", "2", "--as", "vllm")
    assert done.returncode == 0, done.stderr
    split(tmp_path / "out", tmp_path / "two", tp=2, format="vllm")
    one, other = (weights_of(tmp_path / folder) for folder in ("served", "two"))
    assert one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)
    assert not torch.equal(weights_of(base)["lm_head.weight"], torch.zeros(1))


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "dora": ({"use_dora": True}, "an adapter with 'use_dora' is not merged, only plain LoRA"),
    "bias": ({"bias": "all"}, "an adapter with 'bias=all' is not merged"),
    "whole modules": ({"modules_to_save": ["lm_head"]}, "'modules_to_save' is not merged"),
    "pissa": ({"init_lora_weights": "pissa_niter_4"}, "'init_lora_weights=pissa_niter_4' is not merged"),
    "kind": ({"peft_type": "IA3"}, "the adapter is 'IA3'; only LORA is read"),
    "rank": ({"r": 4}, r"has shape \[18, 80\], but the rule '\(expert 4\) hidden'"),
    "pattern": ({"rank_pattern": {"(a+)+": 2}}, "has the pattern '.*', which is not read"),
    "alpha": ({"lora_alpha": "many"}, "lora_alpha should be a number"),
    "no alpha": ({"lora_alpha": None}, "has no lora_alpha"),
    "truth as alpha": ({"lora_alpha": True}, "lora_alpha should be a number"),
    "alpha is not a number": ({"lora_alpha": math.nan}, "lora_alpha should be a number that float32 can hold"),
    "infinite alpha": ({"lora_alpha": -math.inf}, "lora_alpha should be a number that float32 can hold"),
    "large alpha": ({"lora_alpha": 1e39}, "lora_alpha should be a number that float32 can hold"),
    "alpha of many digits": ({"lora_alpha": 2**1024 - 1}, "lora_alpha should be a number that float32 can hold"),
    "alpha of a pattern": ({"alpha_pattern": {"down_proj": 1e39}}, "alpha_pattern.down_proj should be a number"),
    "no rank": ({"r": 0}, "r should be a whole number from 1"),
    "rank of a pattern": ({"rank_pattern": {"down_proj": -1}}, "rank_pattern.down_proj should be a whole number"),
    "text as truth": ({"use_rslora": "false"}, "use_rslora should be true or false"),
    "list as bias": ({"bias": []}, "an adapter with 'bias=\\[\\]' is not merged"),
    "list as layout": ({"lora_B_layout": ["x"]}, "lora_B_layout should be a text"),
}


def test_a_convolution_in_a_tower_is_refused(tmp_path: Path) -> None:
    source = peft_adapters.made("glm4v", "tower", target_modules=["patch_embed.proj"])
    with pytest.raises(PlanError, match="it is no A or B of a matrix"):
        merge(store.checkpoint("glm4v"), tmp_path / "out", adapter=source)


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_refused(case: str, tmp_path: Path) -> None:
    settings, message = REFUSED[case]
    adapter = tmp_path / "adapter"
    shutil.copytree(peft_adapters.made("mixtral", "experts"), adapter)
    change_json(adapter / "adapter_config.json", **settings)
    with pytest.raises(ReshardError, match=message):
        merge(store.checkpoint("mixtral"), tmp_path / "out", adapter=adapter)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("dtype", "size"), [("float32", 1e30), ("bfloat16", 3.398e38), ("float16", 1e5), ("float32", math.nan)]
)
def test_a_sum_that_is_not_finite_is_refused(dtype: str, size: float, tmp_path: Path) -> None:
    """In the dtype of the weight: each sum but the first is finite in float32. What was not finite may stay so."""
    base, adapter = tmp_path / "base", tmp_path / "adapter"
    shutil.copytree(store.checkpoint("llama", dtype), base)
    shutil.copytree(peft_adapters.made("llama", "linear"), adapter)
    low = {name: torch.zeros_like(each) for name, each in weights_of(adapter).items()}
    place = "model.layers.1.mlp.up_proj"
    low[f"{PREFIX}{place}.lora_A.weight"][0, 5] = 1e30 if size == 1e30 else 0.5
    low[f"{PREFIX}{place}.lora_B.weight"][7, 0] = size
    save_file(low, adapter / "adapter_model.safetensors")
    with pytest.raises(MismatchError, match=rf"tensor '{place}\.weight' .* would not be with the adapter"):
        merge(base, tmp_path / "out", adapter=adapter)
    assert {path.name for path in tmp_path.iterdir()} == {"base", "adapter"}
    weights = weights_of(base)
    weights[f"{place}.weight"][7, 5] = math.inf
    if size != size:
        weights[f"{place}.weight"][7] = math.nan
    save_file(weights, base / "model.safetensors", {"format": "pt"})
    merge(base, tmp_path / "out", adapter=adapter)
    assert not weights_of(tmp_path / "out")[f"{place}.weight"][7, 5].isfinite()


def with_dtype(adapter: Path, folder: Path, dtype: torch.dtype) -> Path:
    """An adapter whose A and B have another dtype."""
    shutil.copytree(adapter, folder)
    save_file(
        {name: each.to(dtype) for name, each in weights_of(adapter).items()}, folder / "adapter_model.safetensors"
    )
    return folder


def test_which_dtypes_are_read(tmp_path: Path) -> None:
    base, adapter = store.checkpoint("mixtral"), peft_adapters.made("mixtral", "experts")
    merge(base, tmp_path / "wanted", adapter=adapter)
    wanted = contents(tmp_path / "wanted")
    double = with_dtype(adapter, tmp_path / "double", torch.float64)
    merge(base, tmp_path / "out", adapter=double)
    assert contents(tmp_path / "out") == wanted
    split(double, tmp_path / "converted", format="peft-per-expert", config=base)
    merge(base, tmp_path / "again", adapter=tmp_path / "converted")
    assert contents(tmp_path / "again") == wanted
    for dtype, name in [(torch.float8_e4m3fn, "F8_E4M3"), (torch.int32, "I32"), (torch.bool, "BOOL")]:
        other = with_dtype(adapter, tmp_path / name, dtype)
        for forms in ({"tp": 2}, {"format": "peft-per-expert"}):
            with pytest.raises(PlanError, match=rf"lora_A.weight' is {name}; A and B are read in BF16, F16, F32, F64"):
                split(other, tmp_path / "none", config=base, **forms)
        with pytest.raises(PlanError, match=rf"lora_A.weight' is {name}; A and B are read in BF16, F16, F32, F64"):
            merge(base, tmp_path / "none", adapter=other)


def test_an_adapter_has_tensors_and_its_config_names_them(tmp_path: Path) -> None:
    base, empty = store.checkpoint("llama"), tmp_path / "empty"
    shutil.copytree(peft_adapters.made("llama", "linear"), empty)
    save_file({}, empty / "adapter_model.safetensors")
    other = tmp_path / "other"
    shutil.copytree(peft_adapters.made("llama", "linear"), other)
    config = json.loads((other / "adapter_config.json").read_text())
    pattern = shutil.copytree(other, tmp_path / "pattern")
    for folder, modules in ((other, ["down_proj", "proj"]), (pattern, r".*\.(down|up)_proj")):
        (folder / "adapter_config.json").write_text(json.dumps(config | {"target_modules": modules}))
    strange = r"gate_proj\.lora_A\.weight' is of a module that"
    for adapter, message in ((empty, "has no tensors"), (other, strange), (pattern, strange)):
        with pytest.raises(PlanError, match=message):
            merge(base, tmp_path / "out", adapter=adapter)
        for forms in ({"tp": 2}, {"format": "peft-per-expert"}):
            with pytest.raises(PlanError, match=message):
                split(adapter, tmp_path / "out", config=base, **forms)


NAMES: list[dict[str, Any]] = [
    {"target_modules": ["q_proj", "0.mlp.up_proj"]},
    {"target_modules": ["proj", "model.layers.1.mlp.up_proj", ""]},
    {"target_modules": ["q_proj"], "exclude_modules": ["0.self_attn.q_proj"]},
    {"target_modules": ["q_proj", "up_proj"], "layers_to_transform": [1]},
    {"target_modules": ["q_proj", "up_proj"], "layers_to_transform": 0},
    {"target_modules": ["q_proj", "model.layers.1.mlp.up_proj"], "layers_to_transform": [0]},
    {"target_modules": ["q_proj"], "layers_to_transform": [0], "layers_pattern": "layers"},
    {"target_modules": r".*\.(?:q|up)_proj"},
    {"target_modules": r"model\.layers\.\d+\.self_attn\.(q_proj|k_proj)"},
    {"target_modules": "q_proj|model.layers.1.mlp.up_proj"},
    {"target_modules": ["q_proj", "up_proj"], "exclude_modules": r".*\.1\..*"},
]


@pytest.mark.parametrize("settings", NAMES)
def test_a_config_names_the_modules_that_peft_wraps(settings: dict[str, Any]) -> None:
    from peft import LoraConfig
    from peft.tuners.tuners_utils import check_target_module_exists

    config = LoraConfig(**settings)
    named = settings_of({"peft_type": "LORA", "r": 1, **settings}, "here")
    modules = {name.rpartition(".")[0] for name in weights_of(store.checkpoint("llama"))}
    wrapped = {module for module in modules if check_target_module_exists(config, module)}
    assert {module for module in modules if named.names(module)} == wrapped
    assert wrapped


def without(base: Path, folder: Path, part: str) -> Path:
    """A checkpoint without the tensors that have this in their names."""
    shutil.copytree(base, folder)
    kept = {name: each for name, each in weights_of(folder).items() if part not in name}
    save_file(kept, folder / "model.safetensors", {"format": "pt"})
    return folder


def test_what_an_adapter_has_of_tokens_is_named(tmp_path: Path) -> None:
    """Added tokens, trained tokens, and files that are not read: by the adapter's own tensors, on each way."""
    base, given = store.checkpoint("llama"), tmp_path / "adapter"
    tensors = load_file(peft_adapters.made("llama", "linear") / ADAPTER)
    rows, hidden = load_file(base / "model.safetensors")["model.embed_tokens.weight"].shape
    start = "base_model.model.model.embed_tokens"
    for name, shape, said in (
        (f"{start}.weight", (rows + 4, hidden), f"'{start}.weight' is for a vocabulary of {rows + 4}"),
        (f"{start}.token_adapter.trainable_tokens_delta", (2, hidden), "rows for single tokens"),
    ):
        shutil.copytree(peft_adapters.made("llama", "linear"), given)
        save_file({**tensors, name: torch.ones(shape)}, given / ADAPTER)
        for way in ({"adapter": given}, {}):
            with pytest.raises(PlanError, match=said) as error:
                split(base if way else given, tmp_path / "out", tp=2, **({} if way else {"config": base}), **way)
            assert "PEFT" in str(error.value.hint)
        shutil.rmtree(given)
    shutil.copytree(peft_adapters.made("llama", "linear"), given)
    torch.save(tensors, given / "adapter_model.bin")
    (given / ADAPTER).unlink()
    with pytest.raises(CheckpointError, match=f"is a PEFT adapter in adapter_model.bin, and {ADAPTER} is read"):
        split(base, tmp_path / "out", tp=2, adapter=given)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("name", "module"), one_of_each([("zamba", "shared_transf"), ("zamba2", "shared_transformer")])
)
@pytest.mark.parametrize("layer", [1, 3])
def test_an_adapter_to_one_of_the_layers_that_share_a_weight_is_refused(
    name: str, module: str, layer: int, tmp_path: Path
) -> None:
    """The checkpoint has the weight once, for all of them."""
    target = f"layers.{layer}.{module}.self_attn.q_proj"
    adapter = peft_adapters.made(name, "linear", target_modules=[target])
    with pytest.raises(PlanError, match=rf"{target}.lora_A.weight' changes in one layer a weight that others have"):
        merge(store.checkpoint(name), tmp_path / "out", adapter=adapter)
    assert not (tmp_path / "out").exists()


def test_an_adapter_for_another_base_is_refused(tmp_path: Path) -> None:
    experts = peft_adapters.made("mixtral", "experts")
    with pytest.raises(PlanError, match=r"has shape \[18, 80\], but the rule '\(expert 3\) hidden' gives \[15, 80\]"):
        merge(store.checkpoint("qwen3_moe"), tmp_path / "out", adapter=experts)
    with pytest.raises(PlanError, match="has no rule in plan 'llama'"):
        merge(store.checkpoint("llama"), tmp_path / "out", adapter=experts)
    embeddings = peft_adapters.made("llama", "embeddings")
    tied = without(store.checkpoint("llama"), tmp_path / "tied", "nothing")
    change_json(tied / "config.json", tie_word_embeddings=True)
    alone = shutil.copytree(embeddings, tmp_path / "alone")
    kept = {
        name: each for name, each in load_file(alone / "adapter_model.safetensors").items() if "lm_head" not in name
    }
    save_file(kept, alone / "adapter_model.safetensors")
    with pytest.raises(PlanError, match=r"changes an embedding that is the head, too"):
        merge(tied, tmp_path / "out", adapter=alone)
    headless = without(store.checkpoint("llama"), tmp_path / "headless", "lm_head")
    with pytest.raises(MismatchError, match=r"changes 'lm_head.weight', which the base model lacks"):
        merge(headless, tmp_path / "out", adapter=embeddings)
    short = without(store.checkpoint("mixtral"), tmp_path / "short", ".experts.5.")
    with pytest.raises(MismatchError, match=r"do not fit 'model\.layers"):
        merge(short, tmp_path / "out", adapter=experts)
    packed = tmp_path / "packed"
    shutil.copytree(store.checkpoint("llama"), packed)
    ints = {name: each.to(torch.int8) if "q_proj" in name else each for name, each in weights_of(packed).items()}
    save_file(ints, packed / "model.safetensors", {"format": "pt"})
    with pytest.raises(MismatchError, match="is I8: an adapter is merged into BF16, F16, F32 alone"):
        merge(packed, tmp_path / "out", adapter=peft_adapters.made("llama", "linear"))


def test_an_adapter_to_a_quantized_model(tmp_path: Path) -> None:
    """Dequantized first, then added to: as one step, and as two."""
    base = quantized(store.checkpoint("deepseek_v3", "bfloat16"), tmp_path / "fp8")
    adapter = peft_adapters.made("deepseek_v3", "experts")
    with pytest.raises(MismatchError, match="is F8_E4M3: an adapter is merged into BF16, F16, F32 alone"):
        merge(base, tmp_path / "out", adapter=adapter)
    merge(base, tmp_path / "one", adapter=adapter, dequantize=True, cache_dir=tmp_path / "cache")
    merge(base, tmp_path / "plain", dequantize=True, cache_dir=tmp_path / "cache")
    merge(tmp_path / "plain", tmp_path / "two", adapter=adapter)
    one, two, plain = (weights_of(tmp_path / folder) for folder in ("one", "two", "plain"))
    assert one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)
    assert any(not torch.equal(one[name], plain[name]) for name in one)
