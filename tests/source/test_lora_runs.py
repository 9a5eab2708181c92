"""LoRA adapters in training runs: what a trainer saves of PEFT's modules is the base model, and the adapter."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from reshard.api import inspect, merge, split
from reshard.formats.errors import CheckpointError, MismatchError, PlanError, ReshardError
from reshard.formats.files.checkpoint import ADAPTER, ADAPTER_CONFIG
from reshard.formats.wrappers import WRAPPERS
from reshard.source.lora import apart
from reshard.source.lora_side import META
from tests import peft_adapters, store, zoo
from tests.marks import examples, one_of_each
from tests.programs.test_trainer_laws import save_fsdp, save_zero
from tests.support import change_json, command, weights_of

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed")

State = dict[str, torch.Tensor]


def state_of(name: str, adapter: Path) -> State:
    """The state dict of a model with an adapter in it: the base first, then A and B."""
    from peft import PeftModel

    model = zoo.class_of(base := store.checkpoint(name)).from_pretrained(base, dtype=torch.float32)
    state = PeftModel.from_pretrained(model, adapter).state_dict()
    tensors = {key: tensor.detach().clone().contiguous() for key, tensor in state.items()}
    return {key: tensors[key] for key in sorted(tensors, key=lambda key: ".lora_" in key)}


def equal(one: State, other: State) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)


def as_zero(folder: Path, state: State, stage: int) -> None:
    save_zero(folder, state, stage, 3, frozen=sum(".lora_" not in name for name in state))


def as_dcp(folder: Path, state: dict[str, State]) -> None:
    dcp.save(state, checkpoint_id=folder, no_dist=True)


CONTAINERS: dict[str, Callable[[Path, State], object]] = {
    "dcp": lambda folder, state: as_dcp(folder / "pytorch_model_fsdp_0", {"model": state}),
    "verl": lambda folder, state: save_fsdp(folder, state, (3,), ("fsdp",)),
    "zero-2": lambda folder, state: as_zero(folder, state, 2),
    "zero-3": lambda folder, state: as_zero(folder, state, 3),
    "safetensors": lambda folder, state: save_file(state, folder / "model.safetensors", {"format": "pt"}),
    "bin": lambda folder, state: torch.save(state, folder / "pytorch_model.bin"),
}  # fmt: skip
PLAIN = ("safetensors", "bin")


def run_of(container: str, folder: Path, state: State, name: str, settings: Path | None) -> tuple[Path, dict[str, Any]]:
    """A folder of a trainer with this state and its adapter's settings, and the arguments with which it is opened."""
    if container != "verl":
        folder.mkdir(parents=True)
    CONTAINERS[container](folder, state)
    if settings is not None:
        shutil.copy(settings / ADAPTER_CONFIG, folder)
    if container not in PLAIN:
        return folder, {"config": store.checkpoint(name)}
    shutil.copy(store.checkpoint(name) / "config.json", folder)
    return folder, {}


CASES = [
    *((each, "llama", "linear") for each in CONTAINERS), ("verl", "mixtral", "experts"), ("dcp", "mixtral", "experts"),
    ("dcp", "qwen3_moe", "experts"), ("zero-2", "qwen3_moe", "linear"), ("dcp", "llama", "embeddings"),
    ("bin", "phi3", "linear"), ("dcp", "gpt2", "linear"), ("safetensors", "mixtral", "experts"),
    ("bin", "qwen3_moe", "linear"), ("bin", "mixtral", "experts"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("container", "name", "kind"), one_of_each(CASES, lambda case: (case[0], case[:2] == ("safetensors", "mixtral")))
)
def test_a_run_is_the_base_with_the_adapter_in_it(container: str, name: str, kind: str, tmp_path: Path) -> None:
    base, adapter = store.checkpoint(name), peft_adapters.made(name, kind)
    run, given = run_of(container, tmp_path / "run", state_of(name, adapter), name, adapter)
    merge(base, tmp_path / "wanted", adapter=adapter)
    done = merge(run, tmp_path / "merged", names="published", **given)
    wanted = weights_of(tmp_path / "wanted")
    assert equal(weights_of(tmp_path / "merged"), wanted) and not equal(wanted, weights_of(base))
    assert "the LoRA adapter in it (rank 3" in str(done.note) and "alpha 6) was added" in str(done.note)
    split(run, tmp_path / "out", tp=2, **given)
    assert command("diff", tmp_path / "out", tmp_path / "wanted").stdout.startswith("SAME")
    merge(base, tmp_path / "into", adapter=run)
    assert equal(weights_of(tmp_path / "into"), wanted)
    split(run, tmp_path / "alone", format="peft", **given)
    merge(base, tmp_path / "again", adapter=tmp_path / "alone")
    assert equal(weights_of(tmp_path / "again"), wanted)
    if kind == "linear":
        assert equal(weights_of(tmp_path / "alone"), weights_of(adapter))


@pytest.mark.parametrize("container", CONTAINERS)
def test_a_run_may_have_the_adapter_alone(container: str, tmp_path: Path) -> None:
    base, adapter = store.checkpoint("llama"), peft_adapters.made("llama", "linear")
    state = {name: each for name, each in state_of("llama", adapter).items() if ".lora_" in name}
    run, given = run_of(container, tmp_path / "run", state, "llama", adapter)
    with pytest.raises(CheckpointError, match="not the weights of its base model") as caught:
        merge(run, tmp_path / "no", **given)
    assert "into" in str(caught.value.hint) and not (tmp_path / "no").exists()
    split(run, tmp_path / "alone", format="peft", config=base)
    assert equal(weights_of(tmp_path / "alone"), weights_of(adapter))
    wanted = merge(base, tmp_path / "wanted", adapter=adapter)
    merge(base, tmp_path / "into", adapter=run)
    assert wanted.complete and equal(weights_of(tmp_path / "into"), weights_of(tmp_path / "wanted"))
    report = inspect(run)
    assert report.kind == "LoRA adapter of a training run" and "without its base model" in str(report.lora)
    assert report.complete and "not the weights of its base model" in str(report.refused)


NAMES = ["model.layers.0.self_attn.q_proj", "model.layers.1.mlp.down_proj", "lm_head"]


@given(
    st.sampled_from(["", "model.", "state.model.", "actor.module."]),
    st.sampled_from(["", *(f"{word}." for word in WRAPPERS)]),
    st.sampled_from(["", ".default", ".tuned"]),
    st.booleans(),
)
@examples(100)
def test_neither_wrapper_nor_adapters_name_changes_a_name(beginning: str, wrapper: str, who: str, stack: bool) -> None:
    nested = "base_layer." if stack else ""
    base, factors = dict[str, str](), dict[str, str]()
    for name in NAMES:
        at, plain = f"{beginning}{wrapper}base_model.model.{name}", f"{beginning}base_model.model.{name}"
        base |= {f"{at}.{nested}base_layer.weight": f"{plain}.weight", f"{at}.base_layer.bias": f"{plain}.bias"}
        for kind in ("lora_A", "lora_B"):
            factors[f"{at}.{nested}{kind}{who}.weight"] = f"{plain}.{nested}{kind}.weight"
            factors[f"{at}.lora_embedding_{kind[-1]}{who}"] = f"{plain}.lora_embedding_{kind[-1]}"
        if who:
            factors[f"{at}.lora_magnitude_vector{who}.weight"] = f"{plain}.lora_magnitude_vector"
    states = {f"optim.state.{name}.exp_avg": "" for name in factors if name.endswith("weight") and "magn" not in name}
    strangers = {"rng": "rng", "optim.param_groups.lr": "optim.param_groups.lr"}
    found = apart("run", [*states, *base, *factors, *strangers])
    assert found == (base | strangers, factors, (who[1:],) if who else ())


def test_what_a_models_type_has_itself_is_no_adapter() -> None:
    own = {"lora_A.vision.weight"}.__contains__
    names = ["model.q_proj.lora_A.vision.weight", "model.q_proj.lora_A.vision.weight.exp_avg"]
    assert apart("run", names, own)[1] == {} and [*apart("run", names, own)[0]] == names
    assert [*apart("run", names)[1]] == names[:1]
    with pytest.raises(CheckpointError, match="two tensors of one name"):
        apart("run", ["x.base_layer.weight", "x.weight"])


# -------------------------------------------------------------------------------------------------------- its settings


def copied(adapter: Path, place: Path) -> None:
    place.mkdir(exist_ok=True)
    shutil.copy(adapter / ADAPTER_CONFIG, place)


PLACES: dict[str, Callable[[Path, Path], object]] = {
    "beside": lambda run, adapter: copied(adapter, run),
    "above": lambda run, adapter: copied(adapter, run.parent),
    "within": lambda run, adapter: copied(adapter, run / "lora_adapter"),
    "verl": lambda run, adapter: (run / META).write_text('{"r": 3, "lora_alpha": 6, "task_type": "CAUSAL_LM"}'),
}


@pytest.mark.parametrize("place", PLACES)
def test_where_alpha_is_said(place: str, tmp_path: Path) -> None:
    base, adapter = store.checkpoint("llama"), peft_adapters.made("llama", "linear")
    run, given = run_of("dcp", tmp_path / "above" / "run", state_of("llama", adapter), "llama", None)
    with pytest.raises(CheckpointError, match="and no alpha"):
        merge(run, tmp_path / "no", **given)
    PLACES[place](run, adapter)
    merge(run, tmp_path / "out", **given)
    merge(base, tmp_path / "wanted", adapter=adapter)
    assert equal(weights_of(tmp_path / "out"), weights_of(tmp_path / "wanted"))
    split(run, tmp_path / "alone", format="peft", **given)
    assert json.loads((tmp_path / "alone" / ADAPTER_CONFIG).read_text())["lora_alpha"] == 6


def test_an_alpha_that_is_not_there_is_never_guessed(tmp_path: Path) -> None:
    """The hints work: the file of the training is put there, or the adapter is written, and alpha into it."""
    base, adapter = store.checkpoint("llama"), peft_adapters.made("llama", "linear", rank_pattern={"q_proj": 5})
    run, given = run_of("dcp", tmp_path / "run", state_of("llama", adapter), "llama", None)
    merge(base, tmp_path / "wanted", adapter=adapter)
    for arguments in ((run, tmp_path / "no"), (base, tmp_path / "no")):
        with pytest.raises(CheckpointError, match="and no alpha") as caught:
            merge(*arguments, **(given if arguments[0] == run else {"adapter": run}))
        assert "adapter_config.json" in str(caught.value.hint) and "peft" in str(caught.value.hint)
    done = split(run, tmp_path / "alone", format="peft", **given)
    assert "no file says lora_alpha" in str(done.note)
    settings = json.loads((tmp_path / "alone" / ADAPTER_CONFIG).read_text())
    assert settings["lora_alpha"] is None and settings["r"] == 3 and {*settings["rank_pattern"].values()} == {5}
    with pytest.raises(PlanError, match="has no lora_alpha"):
        merge(base, tmp_path / "no", adapter=tmp_path / "alone")
    (tmp_path / "alone" / ADAPTER_CONFIG).write_text(json.dumps(settings | {"lora_alpha": 6}))
    merge(base, tmp_path / "again", adapter=tmp_path / "alone")
    assert equal(weights_of(tmp_path / "again"), weights_of(tmp_path / "wanted"))
    merge(run, tmp_path / "given", adapter=tmp_path / "alone", **given)  # in place of its own
    assert equal(weights_of(tmp_path / "given"), weights_of(tmp_path / "wanted"))
    (run / META).write_text('{"r": 3, "lora_alpha": 0}')
    with pytest.raises(CheckpointError, match="lora_alpha is 0"):
        merge(run, tmp_path / "no", **given)
    (run / META).write_text('{"r": 3, "lora_alpha": 6}')  # q_proj has rank 5
    with pytest.raises(MismatchError, match=r"has rank 5, and .*says 3"):
        merge(run, tmp_path / "no", **given)
    assert not (tmp_path / "no").exists()


@pytest.mark.parametrize(
    ("settings", "said"),
    [({"use_dora": True}, "'use_dora' is not merged"), ({"modules_to_save": ["lm_head"]}, "'modules_to_save'")],
)
def test_what_adapter_refuses_is_refused(settings: dict[str, Any], said: str, tmp_path: Path) -> None:
    adapter = peft_adapters.made("llama", "linear", target_modules=["q_proj"], **settings)
    run, given = run_of("dcp", tmp_path / "run", state_of("llama", adapter), "llama", adapter)
    for source, arguments in ((run, given), (store.checkpoint("llama"), {"adapter": adapter})):
        with pytest.raises(PlanError, match=said):
            merge(source, tmp_path / "no", **arguments)
    split(run, tmp_path / "alone", format="peft", **given)
    assert equal(weights_of(tmp_path / "alone"), weights_of(adapter))


def test_experts_need_the_settings(tmp_path: Path) -> None:
    adapter = peft_adapters.made("mixtral", "experts")
    run, given = run_of("dcp", tmp_path / "run", state_of("mixtral", adapter), "mixtral", None)
    (run / META).write_text('{"r": 3, "lora_alpha": 6}')  # it does not say which parameters
    for format in (None, "peft"):
        with pytest.raises(CheckpointError, match="has A and B of experts") as caught:
            split(run, tmp_path / "no", format=format, **given)
    assert "copy the adapter_config.json" in str(caught.value.hint)


def test_a_rank_stabilised_adapter_is_scaled_by_its_root(tmp_path: Path) -> None:
    adapter = peft_adapters.made("llama", "linear", use_rslora=True)
    run, given = run_of("dcp", tmp_path / "run", state_of("llama", adapter), "llama", adapter)
    merge(run, tmp_path / "out", **given)
    merge(store.checkpoint("llama"), tmp_path / "wanted", adapter=adapter)
    assert equal(weights_of(tmp_path / "out"), weights_of(tmp_path / "wanted"))


def test_two_adapters_or_two_runs_are_said(tmp_path: Path) -> None:
    adapter = peft_adapters.made("llama", "linear")
    state = state_of("llama", adapter)
    two = state | {name.replace(".default.", ".ref."): each for name, each in state.items() if ".default." in name}
    run, given = run_of("dcp", tmp_path / "two", two, "llama", adapter)
    for format in (None, "peft"):
        with pytest.raises(CheckpointError, match="has 2 LoRA adapters, default, ref"):
            split(run, tmp_path / "no", format=format, **given)
    both = {f"actor.{name}": each for name, each in state.items()} | {f"ref.{n}": each + 1 for n, each in state.items()}
    run, given = run_of("dcp", tmp_path / "both", both, "llama", adapter)
    with pytest.raises(CheckpointError, match="has two models") as caught:
        merge(run, tmp_path / "no", **given)
    assert "model.actor.base_model.model" in str(caught.value.hint)
    merge(run, tmp_path / "out", weights="model.actor.base_model.model", **given)
    split(run, tmp_path / "alone", format="peft", weights="model.actor.base_model.model", **given)
    merge(store.checkpoint("llama"), tmp_path / "wanted", adapter=adapter)
    assert equal(weights_of(tmp_path / "out"), weights_of(tmp_path / "wanted"))
    assert equal(weights_of(tmp_path / "alone"), weights_of(adapter))


def test_inspect_and_verify_call_it_by_its_name(tmp_path: Path) -> None:
    adapter = peft_adapters.made("llama", "linear")
    run, given = run_of("safetensors", tmp_path / "run", state_of("llama", adapter), "llama", adapter)
    report = inspect(run)
    assert report.kind == "full checkpoint with a LoRA adapter" and report.complete and report.refused is None
    assert str(report.lora).startswith("default, rank 3, alpha 6 by adapter_config.json, on down_proj, gate_proj")
    (run / ADAPTER_CONFIG).unlink()
    assert "and no alpha" in str(inspect(run).refused)
    shutil.copy(adapter / ADAPTER_CONFIG, run)
    merge(run, tmp_path / "merged", **given)
    assert command("verify", run, tmp_path / "merged", "--exact-only", "-q").stdout == "same\n"
    done = command("verify", tmp_path / "merged", run, "--exact-only", "-q")
    assert done.returncode == 2 and "has a LoRA adapter among its weights" in done.stderr
    assert done.stdout != "different\n"
    assert not (tmp_path / "merged" / ADAPTER).exists() and not (tmp_path / "merged" / ADAPTER_CONFIG).exists()


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"lora_alpha": None}, "no alpha: .*adapter_config.json lacks it"), ({"r": [3]}, "r should be"),
        ({"peft_type": "LOHA"}, "only LORA is read"), ({"rank_pattern": []}, "rank_pattern should be"),
        ({"r": 4}, "has rank 3, and .*adapter_config.json says 4"),
    ],
)  # fmt: skip
def test_settings_that_are_wrong_are_named(changed: dict[str, Any], said: str, tmp_path: Path) -> None:
    adapter = peft_adapters.made("llama", "linear")
    run, given = run_of("dcp", tmp_path / "run", state_of("llama", adapter), "llama", adapter)
    change_json(run / ADAPTER_CONFIG, **changed)
    with pytest.raises(ReshardError, match=said):
        merge(run, tmp_path / "no", **given)
    assert command("inspect", run).returncode == 0 and not (tmp_path / "no").exists()
