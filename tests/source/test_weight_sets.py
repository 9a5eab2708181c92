"""Several sets of weights in one folder: equal ones are no matter, others are refused, and a user can name one."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file

from tests import store
from tests.marks import one_of_each, thorough
from tests.stores.store_server import StoreServer, upload
from tests.support import command, ok, weights_of

State = dict[str, torch.Tensor]
ONE, TWO = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"


def in_two(folder: Path, state: State, ending: str = "safetensors") -> dict[str, str]:
    half = [*state][: len(state) // 2]
    files = [name.replace("model", "pytorch_model" if ending == "bin" else "model") for name in (ONE, TWO)]
    files = [name.replace("safetensors", ending) for name in files]
    for file, names in zip(files, (half, [name for name in state if name not in half]), strict=True):
        part = {name: state[name] for name in names}
        save_file(part, folder / file, {"format": "pt"}) if ending == "safetensors" else torch.save(part, folder / file)
    return {name: files[name not in half] for name in state}


def indexed(folder: Path, state: State, ending: str = "safetensors") -> None:
    index = "model.safetensors.index.json" if ending == "safetensors" else "pytorch_model.bin.index.json"
    (folder / index).write_text(json.dumps({"metadata": {}, "weight_map": in_two(folder, state, ending)}))


def written(form: str, *options: str) -> Callable[[Path, State], None]:
    """What reshard writes in a program's form, without its manifest and side files."""

    def write(folder: Path, state: State) -> None:
        model, out = folder / "tmp-model", folder / "tmp-out"
        shutil.copytree(store.checkpoint("llama"), model)
        save_file(state, model / "model.safetensors", {"format": "pt"})
        ok("split", model, out, "--as", form, *options)
        for path in out.iterdir():
            if path.name not in {"reshard.json", "config.json"} and not (folder / path.name).exists():
                path.rename(folder / path.name)
        shutil.rmtree(model), shutil.rmtree(out)

    return write


def saved(place: str) -> Callable[[Path, State], None]:
    return lambda folder, state: dcp.save({"model": state}, checkpoint_id=folder / place, no_dist=True)


SETS: dict[str, tuple[str, Callable[[Path, State], object]]] = {
    "bin": ("pytorch_model.bin", lambda folder, state: torch.save(state, folder / "pytorch_model.bin")),
    "index": ("model.safetensors.index.json", indexed),
    "series": (ONE, in_two),
    "bin index": ("pytorch_model.bin.index.json", lambda folder, state: indexed(folder, state, "bin")),
    "fsdp": ("pytorch_model_fsdp_0", saved("pytorch_model_fsdp_0")),
    "fsdp.bin": ("pytorch_model_fsdp.bin", lambda folder, state: torch.save(state, folder / "pytorch_model_fsdp.bin")),
    "dcp": (".metadata", saved(".")),
    "vllm": ("model-rank-0-part-0.safetensors", written("vllm", "--tp", "2")),
    "megatron": ("release", written("megatron", "--tp", "2")),
    "deepspeed": ("global_step_universal", written("deepspeed-universal", "--tp", "1")),
}


def model_with(folder: Path, case: str, change: float, dtype: torch.dtype = torch.float32) -> tuple[Path, State, State]:
    """A checkpoint in a dtype beside another set of its weights, in float32, which may be changed."""
    shutil.copytree(store.checkpoint("llama"), folder)
    state = load_file(folder / "model.safetensors")
    SETS[case][1](folder, {name: tensor + change for name, tensor in state.items()})
    own = {name: tensor.to(dtype) for name, tensor in state.items()}
    save_file(own, folder / "model.safetensors", {"format": "pt"})
    return folder, own, {name: tensor + change for name, tensor in state.items()}


@pytest.mark.parametrize("case", one_of_each(SETS, lambda case: len(case) > 4))
def test_another_model_beside_the_weights_is_refused_until_one_is_named(case: str, tmp_path: Path) -> None:
    folder, state, other = model_with(tmp_path / "model", case, 1.0)
    said = command("split", folder, tmp_path / "out", "--tp", "2")
    assert said.returncode == 2 and not (tmp_path / "out").exists()
    assert re.search(r"two sets of weights that differ, .* \(2\d+-\d\d-.* and .* \(2\d+-", said.stderr), said.stderr
    first, second = said.stderr.split("as the source: ")[1].strip().split(" or ")
    assert {Path(first).name, Path(second).name} == {"model.safetensors", SETS[case][0]}
    for source in (first, second):
        is_other = Path(source).name != "model.safetensors"
        out = tmp_path / f"out{is_other}"
        ok("merge", source, out)
        found, wanted = weights_of(out), other if is_other else state
        assert found.keys() == state.keys() and all(torch.equal(found[name], wanted[name]) for name in found)


@pytest.mark.parametrize("case", one_of_each(SETS, lambda case: len(case) > 4))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_same_model_beside_the_weights_is_left_behind(case: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """Masters in float32 are the same numbers as the weights that were rounded from them."""
    folder, state, _ = model_with(tmp_path / "model", case, 0.0, dtype)
    done = ok("split", folder, tmp_path / "out", "--tp", "2", "--json")
    left = json.loads(done.stdout)["left_behind"]
    assert SETS[case][0] in {name.strip("/") for name in left}, left
    command("merge", tmp_path / "out", tmp_path / "merged")
    found = weights_of(tmp_path / "merged")
    assert all(torch.equal(found[name], state[name]) for name in state)


def test_tensors_of_another_name_or_shape_are_another_model(tmp_path: Path) -> None:
    folder, state, _ = model_with(tmp_path / "model", "bin", 0.0)
    name = "model.norm.weight"
    for changed in ({**state, name: state[name][:-1]}, {key: value for key, value in state.items() if key != name}):
        torch.save(changed, folder / "pytorch_model.bin")
        assert f"tensor '{name}'" in command("split", folder, tmp_path / "out", "--tp", "2").stderr
    torch.save({**state, "rotary.inv_freq": torch.ones(3)}, folder / "pytorch_model.bin")  # a buffer, of no rule
    assert command("split", folder, tmp_path / "out", "--tp", "2").returncode == 0
    (folder / "pytorch_model.bin").write_bytes(b"half written")  # it is no set of weights, and is left behind
    assert "pytorch_model.bin" in command("split", folder, tmp_path / "out2", "--tp", "2").stdout


def test_weights_that_transformers_would_not_load_are_run(tmp_path: Path) -> None:
    folder, _, _ = model_with(tmp_path / "model", "bin", 1.0)
    command("split", folder / "pytorch_model.bin", tmp_path / "out", "--tp", "2")
    assert (
        "The forward pass sees no difference"
        in ok("verify", folder / "pytorch_model.bin", tmp_path / "out", "--seq", "8").stdout
    )


@thorough
@pytest.mark.parametrize("change", [0.0, 1.0])
@pytest.mark.parametrize("case", ["bin", "index", "fsdp", "megatron"])
def test_sets_in_a_bucket_are_compared_too(case: str, change: float, tmp_path: Path) -> None:
    folder, _, _ = model_with(tmp_path / "model", case, change)
    (tmp_path / "bucket").mkdir()
    with StoreServer(tmp_path / "bucket") as server:
        url, options = upload(folder, server, "model"), ("--tp", "2", "--cache-dir", tmp_path / "cache")
        done = command("split", url, tmp_path / "out", *options, **server.environment)
    said = done.stdout + done.stderr
    assert ("two sets of weights that differ" in said and "in a copy on this machine" in said) == bool(change), said
    assert SETS[case][0] in said and (tmp_path / "out").exists() == (not change)
