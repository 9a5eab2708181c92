"""Universal Checkpoints that are written: element for element those of DeepSpeed's own converter, and a way back."""

from __future__ import annotations

import os
import re
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp

from reshard.api import merge, split
from reshard.formats.errors import CheckpointError, MismatchError, SettingError
from reshard.formats.files.training import read_training
from reshard.publishing.staging import Staging
from reshard.source.opening import open_source
from reshard.verify.bytes.exact import verify_exact
from tests import store
from tests.golden import source
from tests.marks import one_of_each, thorough
from tests.oracles.torchfile import load_dcp, load_pt
from tests.programs.test_trainer_laws import save_zero
from tests.programs.test_trainers import CASES, config_of, fixtures, given, numbers, weights
from tests.stores.store_server import StoreServer
from tests.support import bytes_of, contents, ok, weights_of

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed")

AS = "deepspeed-universal"
STEP = "global_step_universal"
STATES = "mp_rank_00_model_states.pt"


def read(path: Path) -> Any:
    return load_pt(path.read_bytes())


def tensors_in(zero: Path) -> dict[str, np.ndarray]:
    """The files of tensors and states, by tensor and kind."""
    found = {}
    for path in sorted(zero.glob("*/*.pt")):
        value = read(path)
        found[f"{path.parent.name}/{path.stem}"] = value["param"] if isinstance(value, dict) else value
    return found


def kinds(value: Any) -> Any:
    """The types of a pickle's content."""
    if isinstance(value, dict):
        return {key: kinds(of) for key, of in value.items()}
    return [kinds(of) for of in value] if isinstance(value, (list, tuple)) else type(value).__name__


@pytest.mark.parametrize("case", ["zero2-qwen2-w3", "zero3-llama-w3"])
def test_it_is_what_deepspeeds_own_converter_writes(case: str, tmp_path: Path) -> None:
    split(given(case), tmp_path / "out", format=AS, config=config_of(case))
    ours, own = tmp_path / "out" / STEP, fixtures() / f"{case}-universal" / "global_step1_universal"
    assert (tmp_path / "out" / "latest_universal").read_text() == STEP
    found, expected = tensors_in(ours / "zero"), tensors_in(own / "zero")
    assert {name for name in found if not name.endswith("/step")} == {n for n in expected if not n.endswith("/step")}
    for name, value in expected.items():  # of ZeRO-3 it has no shapes, and no steps
        np.testing.assert_array_equal(found[name].reshape(value.shape), value, err_msg=name)
    assert {name for name in found if name.endswith("/step")} == {
        f"{name.removesuffix('/exp_avg')}/step" for name in expected if name.endswith("/exp_avg")
    }
    if case == "zero2-qwen2-w3":
        name = "zero/model.norm.weight"
        assert kinds(read(ours / name / "fp32.pt")) == kinds(read(own / name / "fp32.pt"))
        assert kinds(read(ours / name / "step.pt")) == kinds(read(own / name / "step.pt"))
    rest, own_rest = read(ours / "zero/optimizer_state.pt"), read(own / "zero/optimizer_state.pt")
    kept = {
        "loss_scaler",
        "dynamic_loss_scale",
        "overflow",
        "clip_grad",
        "ds_version",
        "param_groups",
    } & own_rest.keys()
    assert {key: kinds(rest[key]) for key in kept} == {key: kinds(own_rest[key]) for key in kept}
    assert repr(rest["param_groups"]) == repr(own_rest["param_groups"])
    inner = rest["optimizer_state_dict"]  # as ZeRO-3 reads it
    assert inner["state"][0]["step"] == 1 and inner["param_groups"] == rest["param_groups"]
    (file,) = own.glob("*mp_rank_00_model_states.pt") if case.startswith("zero2") else own.glob("*rank_0_mp*")
    for name in (STATES, f"zero_pp_rank_0_{STATES}"):
        state, own_state = read(ours / name), read(file)
        assert state.keys() == own_state.keys()
        left = {"module", "param_shapes", "shared_params", "buffer_names", "dp_world_size"}
        assert repr({k: state[k] for k in sorted(state.keys() - left)}) == repr(
            {k: own_state[k] for k in sorted(own_state.keys() - left)}
        )
        assert kinds({**state["param_shapes"][0]}) == kinds({**own_state["param_shapes"][0]})


WITH_OPTIMIZER = [case for case in CASES if not re.search("moe|w1$|bare|universal", case)]


@pytest.mark.parametrize("case", one_of_each(WITH_OPTIMIZER, kind=lambda case: case.partition("-")[0]))
def test_every_trainers_run_can_go_on(case: str, tmp_path: Path) -> None:
    """Weights, averages and steps of each program, in float32: also where a frozen weight has another dtype."""
    split(given(case), tmp_path / "out", format=AS, config=config_of(case))
    found = tensors_in(tmp_path / "out" / STEP / "zero")
    widened = {
        f"{name}/{kind.replace('weight', 'fp32')}": value
        if value.dtype == np.float32
        else (value.astype(np.uint32) << 16).view(np.float32)
        for key, value in numbers(case).items()
        for kind, _, name in [key.partition("|")]
    }
    assert {name for name in found if not name.endswith("/step")} == widened.keys()
    for name, value in widened.items():
        np.testing.assert_array_equal(found[name], value, err_msg=name)
    steps = {float(value) for name, value in found.items() if name.endswith("/step")}
    assert steps == {2.0 if case.startswith("megatron") else 1.0}


@pytest.mark.parametrize("model", one_of_each(["phi3", "mixtral", "llama-tied", "bamba"]))
@pytest.mark.parametrize("stage", one_of_each([2, 3]))
def test_the_way_over_it_is_the_straight_one(stage: int, model: str, tmp_path: Path) -> None:
    original = store.checkpoint(model)
    save_zero(tmp_path / "run", weights_of(original), stage, 3, 2, 0)
    merge(tmp_path / "run", tmp_path / "straight", config=original)
    split(tmp_path / "run", tmp_path / "out", format=AS, config=original)
    merge(tmp_path / "out", tmp_path / "merged")
    assert bytes_of(tmp_path / "merged") == bytes_of(tmp_path / "straight")
    assert verify_exact(open_source(tmp_path / "straight"), tmp_path / "out").verdict == "same"
    split(tmp_path / "out", tmp_path / "again", format=AS)  # and resumed, saved, and so on
    before, after = contents(tmp_path / "out" / STEP), contents(tmp_path / "again" / STEP)
    assert before == after
    (tmp_path / "out" / "reshard.json").unlink()
    split(tmp_path / "out", tmp_path / "bare", format=AS)
    assert contents(tmp_path / "bare" / STEP) == before


def test_its_states_go_back_into_a_distributed_checkpoint(tmp_path: Path) -> None:
    case = "zero2-qwen2-w3"
    split(given(case), tmp_path / "straight", format="dcp", names="modules", config=config_of(case))
    split(given(case), tmp_path / "out", format=AS, config=config_of(case))
    split(tmp_path / "out", tmp_path / "back", format="dcp", names="modules")
    there, back = load_dcp(tmp_path / "straight"), load_dcp(tmp_path / "back")
    assert there.tensors.keys() == back.tensors.keys() and there.objects.keys() == back.objects.keys()
    for name, value in there.tensors.items():
        np.testing.assert_array_equal(value, back.tensors[name], err_msg=name)


def test_weights_alone_are_cast_up_and_said_so(tmp_path: Path) -> None:
    """A run keeps its own settings: there are as many empty groups as it can have."""
    original = source("mixtral", tmp_path / "original")
    summary = split(original, tmp_path / "out", format=AS)
    assert "Weights in BF16 were cast to F32" in str(summary)
    found = read(tmp_path / "out" / STEP / "zero/model.layers.0.mlp.experts.down_proj/fp32.pt")
    assert found["param"].dtype == np.float32 and found["param"].ndim == 3
    rest = read(tmp_path / "out" / STEP / "zero/optimizer_state.pt")
    assert not any(rest["param_groups"]) and len(rest["param_groups"]) == len([*(tmp_path / "out").rglob("fp32.pt")])
    assert not [*(tmp_path / "out").rglob("step.pt")]
    merge(tmp_path / "out", tmp_path / "merged")
    merge(tmp_path / "out", tmp_path / "named", config=original)  # it says the dtype of what is restored
    assert contents(tmp_path / "merged") == contents(tmp_path / "named") == contents(original)
    assert verify_exact(open_source(original), tmp_path / "out").verdict == "same"


def test_a_changed_tensor_is_seen(tmp_path: Path) -> None:
    original = source("llama", tmp_path / "original")
    split(original, tmp_path / "out", format=AS)
    path = tmp_path / "out" / STEP / "zero/model.norm.weight/fp32.pt"
    data = bytearray(path.read_bytes())
    begin = data.index(read(path)["param"].tobytes())
    data[begin] ^= 1
    path.write_bytes(data)
    report = verify_exact(open_source(original), tmp_path / "out")
    assert report.verdict == "different" and "model.norm.weight" in str(report)


def _saved(folder: Path, tensors: dict[str, torch.Tensor], steps: Callable[[int], Any], kind: str = "") -> None:
    """What a training program saves with torch, with a step for each parameter and perhaps a master copy."""
    states: dict[str, Any] = {
        name: {"step": steps(at), "exp_avg": weight.float() / 2, "exp_avg_sq": weight.float() / 4}
        | ({kind: weight.float() + 2**-20} if kind else {})
        for at, (name, weight) in enumerate(tensors.items())
    }
    dcp.save({"model": tensors, "optimizer": {"state": states}}, checkpoint_id=folder, no_dist=True)


def test_the_masters_are_the_weights(tmp_path: Path) -> None:
    original = store.checkpoint("llama-tied")
    tensors = {name: weight.to(torch.bfloat16) for name, weight in weights_of(original).items()}
    _saved(tmp_path / "run", tensors, lambda at: 7, "fp32_param")
    split(tmp_path / "run", tmp_path / "out", format=AS, config=original)
    found = tensors_in(tmp_path / "out" / STEP / "zero")
    for name, weight in tensors.items():
        np.testing.assert_array_equal(found[f"{name}/fp32"], (weight.float() + 2**-20).numpy(), err_msg=name)
    step = read(tmp_path / "out" / STEP / "zero/model.norm.weight/step.pt")
    assert type(step) is int and step == 7
    merge(tmp_path / "out", tmp_path / "merged")


def test_parameters_at_different_steps_are_refused(tmp_path: Path) -> None:
    original = store.checkpoint("llama-tied")
    _saved(tmp_path / "run", weights_of(original), lambda at: torch.tensor(float(3 + at % 2)))
    with pytest.raises(MismatchError, match="have done 3 to 4 steps, and DeepSpeed has one number for all"):
        split(tmp_path / "run", tmp_path / "out", format=AS, config=original)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("field", ["tp", "ep", "pp", "max_shard_size"])
def test_it_has_no_ranks(field: str, tmp_path: Path) -> None:
    with pytest.raises(SettingError, match="each tensor has one file, which any number of ranks loads"):
        split(store.checkpoint("mixtral"), tmp_path / "out", format=AS, **{field: 2})


def test_it_replaces_only_its_own(tmp_path: Path) -> None:
    original = store.checkpoint("llama-tied")
    split(original, tmp_path / "out", format=AS)
    split(original, tmp_path / "out", format=AS, overwrite=True)
    (tmp_path / "out" / "reshard.json").unlink()
    split(original, tmp_path / "out", format=AS, overwrite=True)
    (tmp_path / "out" / STEP / "zero" / "mine.txt").write_text("mine")
    with pytest.raises(CheckpointError, match=r"mine\.txt"):
        split(original, tmp_path / "out", format=AS, overwrite=True)


def test_several_processes_share_the_files(tmp_path: Path) -> None:
    case = "zero3-llama-w3"
    split(given(case), tmp_path / "whole", format=AS, config=config_of(case))
    for part in ("1/2", "0/2"):
        ok("split", given(case), tmp_path / "out", "--as", AS, "--part", part, "--config", str(config_of(case)))
    assert contents(tmp_path / "out" / STEP) == contents(tmp_path / "whole" / STEP)


def test_many_files_are_open_at_once(tmp_path: Path) -> None:
    """More than a process may have by default, beside others: the limit is raised as far as the system lets it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    others = [os.dup(0) for _ in range(300)]
    open_now = len([*Path("/dev/fd").iterdir()])
    resource.setrlimit(resource.RLIMIT_NOFILE, (open_now + 20, hard))
    try:
        split(store.checkpoint("llama-tied"), tmp_path / "out", format=AS)
        merge(tmp_path / "out", tmp_path / "merged")
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for other in others:
            os.close(other)
    assert bytes_of(tmp_path / "merged") == bytes_of(store.checkpoint("llama-tied"))


def test_a_run_that_was_stopped_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    case, noted = "zero3-llama-w3", Staging.note_finished
    split(given(case), tmp_path / "whole", format=AS, config=config_of(case))
    names: list[str] = []

    def stop(self: Staging, name: str, finished: Any) -> None:
        noted(self, name, finished)
        names.append(name)
        if len(names) == 20:
            raise KeyboardInterrupt

    monkeypatch.setattr(Staging, "note_finished", stop)
    with pytest.raises(KeyboardInterrupt, match="are kept"):
        split(given(case), tmp_path / "out", format=AS, config=config_of(case))
    assert not (tmp_path / "out").exists()
    split(given(case), tmp_path / "out", format=AS, config=config_of(case))
    assert len({*names}) == len(names)
    assert contents(tmp_path / "out" / STEP) == contents(tmp_path / "whole" / STEP)


@thorough
def test_it_is_written_into_a_bucket_and_read_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    case = "zero2-qwen2-w3"
    split(given(case), tmp_path / "local", format=AS, config=config_of(case))
    (tmp_path / "bucket").mkdir()
    with StoreServer(tmp_path / "bucket") as server:
        for name, value in server.environment.items():
            monkeypatch.setenv(name, value)
        split(given(case), "s3://bucket/out", format=AS, config=config_of(case), cache_dir=tmp_path / "cache")
        merge("s3://bucket/out", tmp_path / "merged", cache_dir=tmp_path / "cache")
    assert contents(tmp_path / "bucket" / "out" / STEP) == contents(tmp_path / "local" / STEP)
    assert bytes_of(tmp_path / "merged") == weights(case)


def test_its_own_files_come_before_what_the_model_s_file_has(tmp_path: Path) -> None:
    """Also of a parameter that ``param_shapes`` lack."""
    split(given(WITH_OPTIMIZER[0]), tmp_path / "out", format=AS, config=config_of(WITH_OPTIMIZER[0]))
    folder, name = tmp_path / "out" / STEP, "model.layers.0.mlp.down_proj.weight"
    whole = read_training(folder)
    for file in folder.glob("*model_states.pt"):
        state = torch.load(file, weights_only=False)
        for shapes in state["param_shapes"]:
            del shapes[name]
        torch.save(state | {"module": {**state["module"], name: torch.zeros(2)}}, file)
    assert f"model.{name}" in whole.tensors and read_training(folder).tensors == whole.tensors
