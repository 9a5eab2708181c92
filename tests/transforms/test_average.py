"""``average``: each element as numpy computes it in float32, of checkpoints in any form; what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

import reshard
from reshard.api import average, merge, split
from reshard.formats.errors import ReshardError
from reshard.formats.notation.adapters import SETTINGS
from reshard.source.opening import open_source
from reshard.transforms.average import average as mean
from reshard.transforms.average import mean_of
from reshard.transforms.tensors import ARITHMETIC, Content, Tensor
from tests import store
from tests.marks import one_of_each
from tests.support import LLAMA, command, contents, weights_of, write_checkpoint, write_tied_twice

ONE = {"workers": 1}
WEIGHTS = (0.5, 0.3, 0.2)


def model(seed: int, dtype: torch.dtype = torch.bfloat16) -> Path:
    def make(folder: Path) -> None:
        write_checkpoint(folder, files=2, config=LLAMA | {"dtype": str(dtype)[6:]})
        generator = torch.Generator().manual_seed(seed)
        for file in folder.glob("*.safetensors"):
            shapes = {name: tensor.shape for name, tensor in load_file(file).items()}
            tensors = {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in shapes.items()}
            save_file(tensors, file, {"format": "pt"})

    return store.made(f"to-average-{seed}-{dtype}", make)


def by_numpy(folders: list[Path], weights: tuple[float, ...], dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """The mean in float32: products and sums one after the other. Checked against that in float64."""
    tables, found = [weights_of(folder) for folder in folders], dict[str, torch.Tensor]()
    for name in tables[0]:
        values = [table[name].float().numpy() for table in tables]
        total = values[0] * np.float32(weights[0])
        for value, weight in zip(values[1:], weights[1:], strict=True):
            total = total + value * np.float32(weight)
        exact = sum(value.astype(np.float64) * weight for value, weight in zip(values, weights, strict=True))
        assert np.allclose(total, exact, rtol=1e-5, atol=1e-6)
        found[name] = torch.from_numpy(total).to(dtype)
    return found


def assert_equal(found: dict[str, torch.Tensor], should: dict[str, torch.Tensor]) -> None:
    assert found.keys() == should.keys()
    for name, tensor in should.items():
        assert found[name].dtype == tensor.dtype and torch.equal(found[name], tensor), name


# ---------------------------------------------------------------------------------------------------------- arithmetic


def held(values: np.ndarray) -> Content:
    return Content(lambda _, begin, end: values.tobytes()[begin:end], (), None)


@given(st.data())
def test_any_numbers_and_any_range(data: st.DataObject) -> None:
    """No fused multiplication and addition, and no other order."""
    count = data.draw(st.integers(1, 9))
    floats = st.floats(width=32, allow_nan=False, allow_infinity=False, min_value=-(2.0**100), max_value=2.0**100)
    values = [np.array(data.draw(st.lists(floats, min_size=5, max_size=5)), np.float32) for _ in range(count)]
    weights = tuple(data.draw(st.lists(st.floats(-2, 2), min_size=count, max_size=count)))
    total = values[0] * np.float32(weights[0])
    for value, weight in zip(values[1:], weights[1:], strict=True):
        total += value * np.float32(weight)
    begin, end = sorted(data.draw(st.lists(st.integers(0, 20), min_size=2, max_size=2)))
    inputs = [Tensor("F32", (5,), held(each)) for each in values]
    rounded = torch.from_numpy(total).bfloat16().view(torch.int16).numpy()
    for dtype, should in (("F32", total), ("BF16", rounded)):
        low, high = (min(edge, should.nbytes) for edge in (begin, end))
        found = mean_of("w", inputs, weights, dtype).read(ARITHMETIC, low, high)
        assert bytes(found) == should.tobytes()[low:high]


# -------------------------------------------------------------------------------------------------------------- routes


FORMS: list[list[dict[str, Any]]] = [
    [{"tp": 2}, {"format": "dcp"}], [{"tp": 4}, {"tp": 2, "pp": 3}], [{"tp": 2, "format": "megatron"}, {"tp": 2}],
]  # fmt: skip


@pytest.mark.parametrize("forms", one_of_each(FORMS, kind=len), ids=str)
def test_checkpoints_in_any_form(forms: list[dict[str, Any]], tmp_path: Path) -> None:
    """Files of a program are read as the model of the first."""
    for seed, form in enumerate(forms, 1):
        split(model(seed), tmp_path / f"in-{seed}", **form, **ONE)
    done = command("average", model(0), "in-1", "in-2", "mean", "--weights", "0.5,0.3,0.2", cwd=tmp_path)
    assert "It is the mean with 2 others, weights 0.5, 0.3, 0.2, in float32, rounded once" in done.stdout, done.stderr
    should = by_numpy([model(seed) for seed in range(3)], WEIGHTS, torch.bfloat16)
    assert_equal(weights_of(tmp_path / "mean"), should)
    index = "model.safetensors.index.json"
    assert (tmp_path / "mean" / index).read_bytes() == (model(0) / index).read_bytes()
    average(tmp_path / "in-1", tmp_path / "other", others=[model(0), tmp_path / "in-2"], weights=(0.3, 0.5, 0.2), **ONE)
    assert_equal(
        weights_of(tmp_path / "other"), by_numpy([model(s) for s in (1, 0, 2)], (0.3, 0.5, 0.2), torch.bfloat16)
    )


@pytest.mark.parametrize(
    "form", one_of_each([{"tp": 2}, {"tp": 2, "format": "vllm"}, {"format": "dcp"}], kind=len), ids=str
)
def test_it_goes_with_every_route(form: dict[str, Any], tmp_path: Path) -> None:
    others = {"others": [model(1), model(2)], "weights": WEIGHTS}
    reshard.average(model(0), tmp_path / "mean", **others, **ONE)
    average(model(0), tmp_path / "out", **others, **form, **ONE)
    split(tmp_path / "mean", tmp_path / "should", **form, **ONE)
    found, should = contents(tmp_path / "out"), contents(tmp_path / "should")
    for of in (found, should):
        of.pop("reshard.json", None)
    assert found == should


@pytest.mark.parametrize("dtype", ["fp16", "fp32"])
def test_it_is_rounded_once(dtype: str, tmp_path: Path) -> None:
    """Of three dtypes, to a fourth or to that of the first; by default all weights are equal."""
    target = {"fp16": torch.float16, "fp32": torch.float32}[dtype]
    folders = [model(0), model(1, torch.float32), model(2, torch.float16)]
    equal = (1 / 3,) * 3
    average(folders[0], tmp_path / "cast", others=folders[1:], dtype=dtype, **ONE)
    assert_equal(weights_of(tmp_path / "cast"), by_numpy(folders, equal, target))
    assert json.loads((tmp_path / "cast/config.json").read_text())["dtype"] == str(target)[6:]
    average(folders[0], tmp_path / "out", others=folders[1:], **ONE)
    assert_equal(weights_of(tmp_path / "out"), by_numpy(folders, equal, torch.bfloat16))


def test_tied_tables(tmp_path: Path) -> None:
    """One has the second name in its files, the other has not."""
    tied = LLAMA | {"tie_word_embeddings": True}
    write_tied_twice(tmp_path / "twice", LLAMA)
    tensors = {n: torch.randn(t.shape).bfloat16() for n, t in load_file(tmp_path / "twice/model.safetensors").items()}
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, tmp_path / "twice/model.safetensors", {"format": "pt"})
    write_checkpoint(tmp_path / "once", config=tied)
    once = {name: torch.randn(t.shape).bfloat16() for name, t in tensors.items() if name != "lm_head.weight"}
    save_file(once, tmp_path / "once/model.safetensors", {"format": "pt"})
    average(tmp_path / "twice", tmp_path / "out", others=[tmp_path / "once"], weights=(0.25, 0.75), **ONE)
    found = weights_of(tmp_path / "out")
    assert found.keys() == tensors.keys()
    assert torch.equal(found["lm_head.weight"], found["model.embed_tokens.weight"])
    name = "model.embed_tokens.weight"
    assert torch.equal(found[name], (tensors[name].float() * 0.25 + once[name].float() * 0.75).bfloat16())


# --------------------------------------------------------------------------------------------------- what is refused


def changed(folder: Path, name: str, tensor: torch.Tensor | None) -> Path:
    """The second model with another tensor, or without it."""
    tensors = weights_of(model(1))
    tensors.pop(name)
    if tensor is not None:
        tensors[name] = tensor
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_bytes((model(1) / "config.json").read_bytes())
    return folder


def refused(folder: Path, other: Path, message: str, **more: Any) -> None:
    with pytest.raises(ReshardError, match=message):
        average(model(0), folder / "out", others=[other], **more, **ONE)
    assert not (folder / "out").exists()


@pytest.mark.parametrize("weights", ["0.5,0.3", "0.5,0.3,0.3", "0.5,0.3,nan", "1,2", "a,b,c"])
def test_weights_that_are_none(weights: str, tmp_path: Path) -> None:
    done = command("average", model(0), model(1), model(2), tmp_path / "out", "--weights", weights)
    assert done.returncode == 2 and not (tmp_path / "out").exists()
    whys = (
        "there are 3 checkpoints: give one for each",
        "they do not sum to 1",
        "is no list of numbers such as 0.5,0.3,0.2",
    )
    assert any(why in done.stderr for why in whys)


def test_one_checkpoint_has_no_mean(tmp_path: Path) -> None:
    done = command("average", model(0), tmp_path / "out")
    assert done.returncode == 2 and "Error: give two checkpoints or more, and OUT" in done.stderr


def test_other_tensors_shapes_and_dtypes(tmp_path: Path) -> None:
    norm, bias = "model.norm.weight", "model.norm.bias"
    integers = changed(tmp_path / "integers", norm, torch.ones(20, dtype=torch.int32))
    refused(tmp_path, integers, r"BF16 \[20\] in .* and I32")
    wide = changed(tmp_path / "wide", norm, torch.ones(20, dtype=torch.float64))
    refused(tmp_path, wide, r"'model.norm.weight' is BF16 \[20\] in .* and F64 \[20\] in .*wide")
    with pytest.raises(ReshardError, match="is F64: a mean is computed in float32"):
        average(wide, tmp_path / "out", others=[wide], **ONE)
    write_checkpoint(tmp_path / "large", config=LLAMA | {"intermediate_size": 48})
    refused(tmp_path, tmp_path / "large", r"down_proj.weight' is BF16 \[20, 24\] in .* and BF16 \[20, 48\] in .*large")
    more = changed(tmp_path / "more", norm, torch.ones(20).bfloat16())
    tensors = weights_of(more) | {bias: torch.ones(20).bfloat16()}
    save_file(tensors, more / "model.safetensors", {"format": "pt"})
    refused(tmp_path, more, rf"more has tensor '{bias}', and .*to-average-0.* does not: not one model")


def test_integers_must_be_the_same(tmp_path: Path) -> None:
    folders = [tmp_path / name for name in "abc"]
    for folder, value in zip(folders, (1, 1, 2), strict=True):
        changed(folder, "model.norm.weight", torch.full((20,), value, dtype=torch.int32))
    average(folders[0], tmp_path / "out", others=[folders[1]], **ONE)
    assert torch.equal(weights_of(tmp_path / "out")["model.norm.weight"], torch.ones(20, dtype=torch.int32))
    with pytest.raises(ReshardError, match=r"'model.norm.weight' \(I32\) differs, and only floats have a mean"):
        average(folders[0], tmp_path / "out2", others=[folders[2]], **ONE)


def test_integers_are_no_floats_of_the_same_bytes(tmp_path: Path) -> None:
    folders = [tmp_path / name for name in "ab"]
    for folder, dtype in zip(folders, (torch.int32, torch.float32), strict=True):
        changed(folder, "model.norm.weight", torch.zeros(20, dtype=dtype))
    with pytest.raises(ReshardError, match=r"'model.norm.weight' is I32 \[20\] in .* and F32 \[20\] in"):
        average(folders[0], tmp_path / "out", others=[folders[1]], **ONE)


def test_a_mean_that_is_not_finite(tmp_path: Path) -> None:
    infinite = changed(tmp_path / "infinite", "model.norm.weight", torch.full((20,), float("inf")).bfloat16())
    refused(tmp_path, infinite, "the mean of tensor 'model.norm.weight' is not finite")
    large = changed(tmp_path / "large", "model.norm.weight", torch.full((20,), 1e6).bfloat16())
    refused(tmp_path, large, "'model.norm.weight' has values that are beyond float16", dtype="fp16")


def test_quantized_checkpoints(tmp_path: Path) -> None:
    merge(model(1), tmp_path / "fp8", quantize="fp8-block", **ONE)
    refused(tmp_path, tmp_path / "fp8", "fp8 is quantized")


def test_adapters() -> None:
    source = open_source(model(0))
    object.__setattr__(source.model, "config", {**source.model.config, SETTINGS: {}})
    with pytest.raises(ReshardError, match="is an adapter: the mean of its factors is not that of their products"):
        mean([source, source], (0.5, 0.5), wide=False)
