"""An original and its shards whose names are spelled differently: tensors are compared, not names."""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests import store
from tests.marks import one_of_each
from tests.model.test_spellings import State, below, distributed, modules_of, plain, root_changed, wrapped
from tests.support import change_tensor, command, ok

SPELLINGS: dict[str, Callable[[State], State]] = {
    "published": lambda state: state, "of modules": lambda state: state, "without the root": root_changed,
    "below a beginning": below("module."), "wrapped, of modules": lambda state: wrapped(below("module.")(state)),
}  # fmt: skip
SHARDS = {
    "full": (), "ranks": ("--tp", "2"), "vllm": ("--tp", "2", "--as", "vllm"), "dcp": ("--as", "dcp"), "torch's": (),
}  # fmt: skip


def spelled(name: str, spelling: str, folder: Path) -> Path:
    """A model of the zoo with names in a spelling, and all files beside."""
    model = store.checkpoint(name)
    state = modules_of(name) if spelling.endswith("of modules") else load_file(model / "model.safetensors")
    plain({key: value.clone() for key, value in SPELLINGS[spelling](state).items()}, folder, model)
    shutil.copy(model / "generation_config.json", folder)
    return folder


def shards_of(kind: str, source: Path, folder: Path) -> Path:
    if kind == "full":
        return source
    if kind == "torch's":
        distributed(load_file(source / "model.safetensors"), folder, source)
    else:
        ok("split", source, folder, *SHARDS[kind])
    return folder


@pytest.mark.parametrize(
    ("name", "kind", "one", "other"),
    one_of_each(
        [
            case for case in itertools.product(["qwen3_moe", "mixtral", "llama"], SHARDS, SPELLINGS, SPELLINGS)
            if case[2] != case[3] or case[2].endswith("of modules")
        ],
        lambda case: (case[1], case[2].endswith("of modules")),
    ),
)  # fmt: skip
def test_tensors_are_compared_and_not_names(name: str, kind: str, one: str, other: str, tmp_path: Path) -> None:
    original, source = spelled(name, one, tmp_path / "original"), spelled(name, other, tmp_path / "source")
    shards = shards_of(kind, source, tmp_path / "shards")
    done = ok("verify", original, shards, "--exact-only")
    if kind in ("ranks", "vllm", "dcp"):
        names = [load_file(folder / "model.safetensors").keys() for folder in (original, source)]
        assert ("or of other names" in done.stdout) == (names[0] != names[1]), done.stdout


@pytest.mark.parametrize("one", one_of_each(SPELLINGS, lambda one: one.endswith("of modules")))
def test_a_wrong_element_is_found_under_another_name(one: str, tmp_path: Path) -> None:
    original = spelled("qwen3_moe", one, tmp_path / "original")
    changed, name = tmp_path / "changed", "model.layers.2.mlp.experts.3.up_proj.weight"
    shutil.copytree(store.checkpoint("qwen3_moe"), changed)
    columns = load_file(changed / "model.safetensors")[name].shape[1]
    change_tensor(changed / "model.safetensors", name, at=4 * (2 * columns + 1))
    for side in ((original, changed), (changed, original)):
        done = command("verify", *side, "--exact-only")
        assert done.returncode == 1 and "1 different element" in done.stdout, done.stdout + done.stderr
        assert "layers.2.mlp.experts.3.up_proj.weight[2, 1]" in done.stdout, done.stdout


@pytest.mark.parametrize("one", one_of_each(SPELLINGS, lambda one: one.endswith("of modules")))
def test_a_tensor_that_lacks_or_is_too_many_is_named(one: str, tmp_path: Path) -> None:
    original, changed = spelled("qwen3_moe", one, tmp_path / "original"), tmp_path / "changed"
    state = load_file(store.checkpoint("qwen3_moe") / "model.safetensors")
    state["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(3)
    plain(state, changed, store.checkpoint("qwen3_moe"))
    shutil.copy(original / "generation_config.json", changed)
    for sides, said in (((original, changed), "extra"), ((changed, original), "missing")):
        done = command("verify", *sides, "--exact-only")
        assert done.returncode == 1 and f"{said}: " in done.stdout, done.stdout + done.stderr
        assert "rotary_emb.inv_freq" in done.stdout and "1 different" not in done.stdout, done.stdout


@pytest.mark.parametrize(
    ("one", "other"),
    one_of_each(
        [case for case in itertools.product(SPELLINGS, repeat=2) if case != ("published", "published")],
        lambda case: case == ("wrapped, of modules", "below a beginning"),
    ),
)
def test_the_forward_runs_whatever_the_names(one: str, other: str, tmp_path: Path) -> None:
    original, shards = spelled("qwen3_moe", one, tmp_path / "original"), spelled("qwen3_moe", other, tmp_path / "out")
    assert "The forward pass sees no difference" in ok("verify", original, shards, "--seq", "8").stdout
