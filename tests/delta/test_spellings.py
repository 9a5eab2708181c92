"""A delta between checkpoints whose names are spelled differently, put on a base in another spelling."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from reshard.api import diff, split
from tests import peft_adapters
from tests.marks import one_of_each
from tests.support import changed_tensors, command, ok
from tests.verify.test_spellings import SPELLINGS, spelled

OF_MODULES = "of modules"
QUICK = {
    (OF_MODULES, OF_MODULES, "without the root"), ("without the root", "published", OF_MODULES),
    ("published", "without the root", "below a beginning"),
}  # fmt: skip


def tuned(name: str, spelling: str, folder: Path) -> Path:
    """The same model after some training: one number of each tensor is another."""
    with changed_tensors(spelled(name, spelling, folder) / "model.safetensors") as state:
        for tensor in state.values():
            tensor.view(-1)[0] += 1
    return folder


@pytest.mark.parametrize(
    ("compressed", "a", "b", "base"),
    one_of_each(
        [(flag, *case) for flag in (False, True) for case in itertools.product(SPELLINGS, repeat=3)],
        lambda case: case if case[1:] in QUICK else None,
    ),
)
def test_a_delta_is_put_on_a_base_in_another_spelling(
    compressed: bool, a: str, b: str, base: str, tmp_path: Path
) -> None:
    one, other = spelled("qwen3_moe", a, tmp_path / "a"), tuned("qwen3_moe", b, tmp_path / "b")
    done = command("diff", one, other, "--out", tmp_path / "delta", *(["--compress"] if compressed else []))
    assert done.returncode in (0, 1) and "only " not in done.stdout, done.stdout + done.stderr
    stated = json.loads((tmp_path / "delta" / "delta.json").read_text())
    assert stated.get("names") == ("modules" if b == OF_MODULES or b.startswith("wrapped") else None)
    assert not [name for name, change in stated["tensors"].items() if change["how"] in ("gone", "whole")]
    ok("patch", spelled("qwen3_moe", base, tmp_path / "base"), tmp_path / "delta", tmp_path / "out")
    assert ok("diff", other, tmp_path / "out").stdout.startswith("SAME")
    if b in ("published", OF_MODULES, "without the root"):
        theirs, ours = (load_file(folder / "model.safetensors").keys() for folder in (other, tmp_path / "out"))
        assert ours == theirs


def test_the_names_of_a_delta_stay_with_an_adapter_on_its_result(tmp_path: Path) -> None:
    one, other = spelled("qwen3_moe", "published", tmp_path / "a"), tuned("qwen3_moe", OF_MODULES, tmp_path / "b")
    adapter = peft_adapters.made("qwen3_moe", "linear")
    diff(one, other, out=tmp_path / "delta")
    split(one, tmp_path / "at-once", patch=tmp_path / "delta", adapter=adapter, format="huggingface")
    split(other, tmp_path / "after", adapter=adapter, format="huggingface")
    found, should = (load_file(tmp_path / name / "model.safetensors") for name in ("at-once", "after"))
    assert found.keys() == should.keys() == load_file(other / "model.safetensors").keys()
    assert all(torch.equal(found[name], should[name]) for name in found)
