"""``reshard.tensors``: the full checkpoint of any source, tensor by tensor. ``reshard.load``: a rank's, at once."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import reshard
from reshard.api import load, rank_config, split, tensors
from reshard.formats.errors import MismatchError, ReshardError
from reshard.formats.torch_internals import TORCH_DTYPES
from reshard.move import jobs
from tests import peft_adapters, store, zoo
from tests.marks import one_of_each
from tests.programs.test_trainers import config_of, fixtures, weights
from tests.programs.test_trainers import given as run
from tests.support import change_tensor, changed_tensors, write_checkpoint

FORMS: list[dict[str, Any]] = [
    {"tp": 2, "pp": 3}, {"tp": 2, "format": "vllm"}, {"tp": 2, "format": "megatron"}, {"tp": 2}, {"format": "dcp"},
    {"tp": 2, "format": "transformers"},
]  # fmt: skip


@pytest.mark.parametrize("form", one_of_each(FORMS, lambda form: {None: 0, "vllm": 1}.get(form.get("format"))))
def test_any_form_gives_the_tensors_of_the_model(form: dict[str, Any], tmp_path: Path) -> None:
    model = store.made("tensors-of-deepseek_v3", lambda folder: zoo.save("deepseek_v3", folder) and None)
    split(model, tmp_path / "out", workers=1, **form)
    expected = load_file(model / "model.safetensors")
    for dtype in (None, "bf16"):
        found = dict(tensors(tmp_path / "out", dtype=dtype))
        assert found.keys() == expected.keys()
        for name, tensor in expected.items():
            wanted = tensor if dtype is None or "e_score" in name else tensor.to(torch.bfloat16)
            assert torch.equal(found[name], wanted), name


@pytest.mark.parametrize("case", ["zero3-llama-w3", "verl-fsdp2-qwen3_moe-hsdp2x2"])
def test_what_a_trainer_left(case: str) -> None:
    found = dict(reshard.tensors(run(case), config=config_of(case)))
    assert fixtures().is_dir() and {
        name: (tuple(t.shape), t.view(torch.uint8).numpy().tobytes()) for name, t in found.items()
    } == {name: (shape, content) for name, (_, shape, content) in weights(case).items()}


def test_it_goes_as_the_source_does_and_reads_as_it_is_asked(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "model", files=2)
    stream = tensors(tmp_path / "model")
    first, _ = next(stream)
    assert first == "model.embed_tokens.weight"
    change_tensor(tmp_path / "model/model-00002-of-00002.safetensors", "lm_head.weight")
    with pytest.raises(MismatchError, match="changed"):
        list(stream)


def test_a_name_is_no_path(tmp_path: Path) -> None:
    """Of a tower any name is taken, also one that is no path as Python writes it."""
    model, name = shutil.copytree(store.checkpoint("aria"), tmp_path / "model"), "model.vision_tower.a//./b/"
    tensor = torch.arange(4, dtype=torch.bfloat16)
    with changed_tensors(model / "model.safetensors") as held:
        held[name] = tensor
    assert torch.equal(dict(tensors(model))[name], tensor)
    assert torch.equal(load(model, tp=2, rank=1)[name], tensor)


def test_copies_that_differ_are_refused(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "model")
    split(tmp_path / "model", tmp_path / "out", tp=2, workers=1)
    change_tensor(tmp_path / "out/rank-01-of-02/model.safetensors", "model.norm.weight")
    with pytest.raises(MismatchError, match=r"tensor 'model.norm.weight' should be the same in"):
        list(tensors(tmp_path / "out"))


def test_other_names_are_refused_at_once(tmp_path: Path) -> None:
    with pytest.raises(ReshardError, match="the tensors are those of the full checkpoint"):
        tensors(tmp_path, format="vllm")


# ------------------------------------------------------------------------------------------------------------- a rank


def test_a_rank_in_many_steps_and_its_config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors are larger than steps, which several threads share."""
    monkeypatch.setattr(jobs, "DEFAULT", jobs.Sizes(step=1 << 8, small=1 << 4, together=1 << 6))
    model = store.checkpoint("phi3")
    split(model, tmp_path / "out", tp=2)
    calls = []
    for rank in range(2):
        folder = tmp_path / f"out/rank-0{rank}-of-02"
        loaded = load(model, tp=2, rank=rank, progress=lambda *call: calls.append(call))
        expected = load_file(folder / "model.safetensors")
        assert loaded.keys() == expected.keys()
        assert all(torch.equal(loaded[name], tensor) for name, tensor in expected.items())
        total = sum(tensor.nbytes for tensor in expected.values())
        assert calls[-1] == (total, total) and len(calls) == len(expected) and calls == sorted(calls)
        assert rank_config(model, tp=2, rank=rank) == json.loads((folder / "config.json").read_text())
        calls.clear()


@pytest.mark.parametrize(("model", "form"), [("llama", "vllm"), ("phi3", "sglang")])
def test_a_rank_in_another_format(model: str, form: str, tmp_path: Path) -> None:
    """Constants too."""
    split(store.checkpoint(model), tmp_path / "out", tp=2, format=form)
    for rank in range(2):
        loaded = load(store.checkpoint(model), tp=2, rank=rank, format=form)
        files = sorted((tmp_path / "out").glob(f"model-rank-{rank}-*"))
        expected = {name: tensor for file in files for name, tensor in load_file(file).items()}
        assert loaded.keys() == expected.keys()
        assert all(torch.equal(loaded[name], tensor) for name, tensor in expected.items())
    with pytest.raises(reshard.SettingError, match="its files are of no rank"):
        load(store.checkpoint(model), tp=2, format="dcp")


def test_a_device(tmp_path: Path) -> None:
    model = store.checkpoint("llama")
    assert {tensor.device.type for tensor in load(model, tp=2, device="meta").values()} == {"meta"}
    for device in ("cuda", "gpu"):
        with pytest.raises(reshard.SettingError, match=f"device={device} is not possible"):
            load(tmp_path / "none", device=device)


SLICED: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("llama", {}, {"tp": 4}), ("mixtral", {"tp": 2, "format": "vllm"}, {"tp": 1}), ("gpt_neox", {}, {"tp": 4}),
    ("qwen3_moe", {"format": "dcp"}, {"tp": 2, "format": "vllm"}), ("phi3", {"tp": 2}, {"tp": 4}),
    ("llama", {"tp": 2, "format": "megatron"}, {"tp": 2, "pp": 3}), ("deepseek_v3", {}, {"tp": 2, "ep": 2}),
]  # fmt: skip


@pytest.mark.parametrize(("name", "form", "mesh"), one_of_each(SLICED, lambda case: bool(case[1])))
def test_slices_are_the_bytes_that_load_reads(name: str, form: dict, mesh: dict, tmp_path: Path) -> None:
    """Each byte of a rank once, in the order of the files; zeros are padding. As many are read as the rank owns."""
    source = store.checkpoint(name)
    if form:
        split(source, tmp_path / "out", workers=1, **form)
        source = tmp_path / "out"
    for rank in range(math.prod(size for size in mesh.values() if isinstance(size, int))):
        found = reshard.slices(source, rank=rank, **mesh)
        named = {each.name for each in found}
        wanted = {name: tensor for name, tensor in load(source, rank=rank, **mesh).items() if name in named}
        memory = {name: np.zeros((2, tensor.nbytes), np.uint8) for name, tensor in wanted.items()}
        read = 0
        for each in found:
            content, count = (np.ndarray(each.shape, np.uint8, of, each.place, each.steps) for of in memory[each.name])
            count += 1
            if each.file is not None:
                file = np.fromfile(each.file, np.uint8)
                content[...] = np.ndarray(each.shape, np.uint8, file, each.offset, each.strides)
                read += each.size
            assert (each.dtype, each.tensor) == (each.dtype, tuple(wanted[each.name].shape))
            assert TORCH_DTYPES[each.dtype] == wanted[each.name].dtype
        for name, (content, count) in memory.items():
            assert (count == 1).all() and np.array_equal(content, wanted[name].view(torch.uint8).numpy().reshape(-1)), (
                name
            )
        owned = sum(tensor.nbytes for tensor in wanted.values())
        assert read == owned - sum(each.size for each in found if each.file is None) <= owned
        assert [(each.file or "", each.offset) for each in found] == sorted(
            (each.file or "", each.offset) for each in found
        )


def test_bytes_that_are_in_no_file_have_no_slices() -> None:
    for more in ({"dtype": "bf16"}, {"quantize": "fp8-block"}, {"adapter": peft_adapters.made("llama", "linear")}):
        with pytest.raises(ReshardError, match=r"tensor '.*' is in no file as the rank has it") as error:
            reshard.slices(store.checkpoint("llama"), **more)
        assert error.value.hint
