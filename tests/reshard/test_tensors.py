"""``reshard.tensors``: the full checkpoint of any source, tensor by tensor."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import reshard
from formats.errors import MismatchError, ReshardError
from reshard.api import split, tensors
from tests import store, zoo
from tests.marks import one_of_each
from tests.programs.test_trainers import config_of, fixtures, weights
from tests.programs.test_trainers import given as run
from tests.support import change_tensor, write_checkpoint

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


def test_copies_that_differ_are_refused(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "model")
    split(tmp_path / "model", tmp_path / "out", tp=2, workers=1)
    change_tensor(tmp_path / "out/rank-01-of-02/model.safetensors", "model.norm.weight")
    with pytest.raises(MismatchError, match=r"tensor 'model.norm.weight' should be the same in"):
        list(tensors(tmp_path / "out"))


def test_other_names_are_refused_at_once(tmp_path: Path) -> None:
    with pytest.raises(ReshardError, match="the tensors are those of the full checkpoint"):
        tensors(tmp_path, format="vllm")
