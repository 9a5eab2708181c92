"""torch's distributed checkpoints: what torch wrote is merged, what is written is what torch loads."""

from __future__ import annotations

import itertools
import json
import math
import shutil
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file

from reshard.api import inspect, merge, split
from reshard.formats.errors import CheckpointError, MismatchError
from reshard.formats.files.checkpoint import METADATA
from reshard.formats.files.dcp import read_distributed
from reshard.formats.files.safetensors import read_header
from reshard.formats.notation.format_file import format_of
from reshard.placement import geometry
from reshard.profile.processes import run_processes
from reshard.source.training import Affix, parts_of
from tests import store
from tests.formats.test_dcp import Pieces, halves, save
from tests.marks import of_ranks, one_of_each
from tests.programs.oracles import ORACLES, checkpoint, module
from tests.routes import SOURCES
from tests.stores.store_server import StoreServer
from tests.support import bytes_of, change_json, command, contents, ok, weights_of, write_checkpoint

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed")


def recorded(case: str, folder: Path) -> Path:
    """What torch wrote on several ranks, ``dcp``, and the same whole, ``hf`` (see ``tests/oracles/dcp/record.py``)."""
    with zipfile.ZipFile(ORACLES / "dcp" / f"{case}.zip") as archive:
        archive.extractall(folder)
    return folder


def loaded(folder: Path, like: Path, prefix: str = "") -> dict[str, torch.Tensor]:
    """What torch loads of a folder, for the tensors of a checkpoint."""
    whole = weights_of(like)
    state: dict[str, Any] = {prefix + name: torch.zeros_like(each) for name, each in whole.items()}
    dcp.load(state, checkpoint_id=folder, no_dist=True)
    return {name.removeprefix(prefix): each for name, each in state.items()}


def bits(tensors: dict[str, torch.Tensor]) -> dict[str, bytes]:
    return {name: bytes(each.reshape(-1).view(torch.uint8).tolist()) for name, each in tensors.items()}


# -- what torch wrote ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", ["fsdp_adam", "fsdp_tp"])
def test_what_torch_wrote_on_several_ranks_is_merged(case: str, tmp_path: Path) -> None:
    folder = recorded(case, tmp_path)
    done = ok("merge", folder / "dcp", tmp_path / "merged", "--config", folder / "hf")
    assert bytes_of(tmp_path / "merged") == bytes_of(folder / "hf")
    assert (tmp_path / "merged" / "config.json").read_bytes() == (folder / "hf" / "config.json").read_bytes()
    said = "Left behind: optim, rng, step, which the output has no place for."
    assert (said in done.stdout) == (case == "fsdp_adam")


def test_what_is_left_behind_is_named(tmp_path: Path) -> None:
    folder = recorded("fsdp_adam", tmp_path)
    done = command("merge", folder / "dcp", tmp_path / "merged", "--config", folder / "hf", "--json")
    assert json.loads(done.stdout)["left_behind"] == ["optim", "rng", "step"]
    names = {*bytes_of(folder / "hf")}
    parts = parts_of(read_distributed(folder / "dcp"), {name: name for name in names}.get, lambda name: False)
    assert {*parts.states} == {Affix("optim.state.", ".exp_avg"), Affix("optim.state.", ".exp_avg_sq")}
    moments = parts.states[Affix("optim.state.", ".exp_avg")]
    assert moments == {name: f"optim.state.{name}.exp_avg" for name in parts.model}
    assert {"step", "rng", "optim.state.model.norm.weight.step"} <= {*parts.rest}
    assert parts.model["lm_head.weight"] == "model.lm_head.weight"


def test_a_step_from_training_to_an_engine(tmp_path: Path) -> None:
    folder = recorded("fsdp_tp", tmp_path)
    ok("split", folder / "dcp", tmp_path / "vllm", "--tp", "2", "--as", "vllm", "--config", folder / "hf")
    split(folder / "hf", tmp_path / "direct", tp=2, format="vllm")
    for file in (tmp_path / "direct").glob("*.safetensors"):
        assert read_header(tmp_path / "vllm" / file.name).tensors.keys() == read_header(file).tensors.keys()
    assert bytes_of(tmp_path / "vllm") == bytes_of(tmp_path / "direct")


def test_to_hugging_face(tmp_path: Path) -> None:
    folder = recorded("fsdp_tp", tmp_path)
    ok("split", folder / "dcp", tmp_path / "hf2", "--as", "huggingface", "--config", folder / "hf")
    assert bytes_of(tmp_path / "hf2") == bytes_of(folder / "hf")
    done = command("split", folder / "dcp", tmp_path / "hf3", "--as", "huggingface", "--tp", "2")
    assert "'huggingface': it is one full checkpoint" in done.stderr


def test_without_a_config_the_hint_says_what_to_give(tmp_path: Path) -> None:
    folder = recorded("fsdp_tp", tmp_path)
    done = command("merge", folder / "dcp", tmp_path / "merged")
    assert done.returncode == 2
    assert "with --config DIR" in done.stderr


PREFIXES = ["", "model.", "state_dict.", "state_dict.model.", "app.model.", "module.", "model.module."]


@pytest.mark.parametrize(
    ("prefix", "wrapper"),
    one_of_each(itertools.product(PREFIXES, ["", "_orig_mod."]), lambda case: (case[0].count("."), case[1])),
)
def test_keys_of_trainers(prefix: str, wrapper: str, tmp_path: Path) -> None:
    original = write_checkpoint(tmp_path / "original")
    state: dict[str, Any] = {}
    for name, each in load_file(original / "model.safetensors").items():
        key = prefix + wrapper + name.replace("layers.1.", f"layers.1.{wrapper}")
        state[key] = Pieces(each, halves(each))
        state[f"optim.state.{name}.exp_avg"] = torch.zeros(each.shape)
    state |= {"optim.step": torch.tensor(3.0), "scheduler": {"last": 1}, "global_step": 3}
    folder = save(tmp_path / "dcp", state, threads=2)
    merge_with_config(folder, tmp_path / "merged", original)
    assert bytes_of(tmp_path / "merged") == bytes_of(original)


def merge_with_config(folder: Path, out: Path, config: Path) -> None:
    ok("merge", folder, out, "--config", config)


def test_what_another_format_would_call_a_tensor_is_no_second_reading(tmp_path: Path) -> None:
    """torchtitan calls a head output.weight, and has no other tensor here."""
    original = write_checkpoint(tmp_path / "original")
    state: dict[str, Any] = load_file(original / "model.safetensors")
    folder = save(tmp_path / "dcp", state | {"probe.output.weight": torch.ones(2)})
    assert "probe" in ok("merge", folder, tmp_path / "merged", "--config", original).stdout
    assert contents(tmp_path / "merged")["model.safetensors"] == (original / "model.safetensors").read_bytes()


def test_two_models_in_the_names_of_two_formats_are_refused(tmp_path: Path) -> None:
    original = store.checkpoint("qwen3")
    split(original, tmp_path / "titan", format="torchtitan")
    other = {f"other.{name}": each for name, each in everything(tmp_path / "titan").items()}
    folder = save(tmp_path / "dcp", load_file(original / "model.safetensors") | other)
    done = command("merge", folder, tmp_path / "merged", "--config", original)
    assert done.returncode == 2 and "names of two formats: 'model.layers.*.input_layernorm.weight' of" in done.stderr
    assert "'other.layers.*.attention.k_norm.weight' of 'torchtitan'" in done.stderr


def test_a_tensor_of_the_model_that_no_rule_knows_is_refused(tmp_path: Path) -> None:
    original = write_checkpoint(tmp_path / "original")
    state: dict[str, Any] = {"model." + name: each for name, each in load_file(original / "model.safetensors").items()}
    folder = save(tmp_path / "dcp", state | {"model.model.layers.1.self_attn.extra.weight": torch.ones(2)})
    done = command("merge", folder, tmp_path / "merged", "--config", original)
    assert "tensor 'model.layers.1.self_attn.extra.weight' is none that the format 'dcp' has" in done.stderr
    assert not (tmp_path / "merged").exists()


def test_half_a_model_is_refused(tmp_path: Path) -> None:
    original = write_checkpoint(tmp_path / "original")
    state = load_file(original / "model.safetensors")
    state.pop("model.layers.1.self_attn.o_proj.weight")
    done = command("merge", save(tmp_path / "dcp", state), tmp_path / "merged", "--config", original)
    assert done.returncode == 2
    assert "self_attn.o_proj.weight" in done.stderr


# -- states of training -----------------------------------------------------------------------------------------------


def test_states_of_training_are_no_parameters(tmp_path: Path) -> None:
    folder, out = recorded("fsdp_adam", tmp_path), tmp_path / "out"
    assert command("split", folder / "dcp", out, "--as", "dcp", "--tp", "2", "--config", folder / "hf").returncode == 0
    with_config, without = (json.loads(command("inspect", at, "--json").stdout) for at in (out, folder / "dcp"))
    model = load_file(folder / "hf/model.safetensors")
    assert with_config["parameters"] == sum(each.numel() for each in model.values())
    assert (with_config["tensors"], with_config["parameters_are_of"]) == (len(model), "model")
    assert with_config["beside"] == ["optim", "rng", "step"] and with_config["any_mesh"]
    assert without["parameters"] > 2 * with_config["parameters"] and without["parameters_are_of"] == "everything"
    text = command("inspect", out).stdout
    assert "any number of ranks can load it" in text and "optim, rng, step: not of the model, and not counted" in text
    assert "(all that is stored, states of training too)" in command("inspect", folder / "dcp").stdout


def everything(folder: Path) -> dict[str, Any]:
    """All that torch loads of a folder, nested as it was saved."""
    from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
    from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

    found: dict[str, Any] = {}
    _load_state_dict(
        found, storage_reader=dcp.FileSystemReader(folder), planner=_EmptyStateDictLoadPlanner(), no_dist=True
    )
    return found


def same(one: Any, other: Any) -> bool:
    """Whether nested dictionaries and lists have equal tensors and values."""
    if isinstance(one, torch.Tensor):
        return isinstance(other, torch.Tensor) and one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict):
        return isinstance(other, dict) and one.keys() == other.keys() and all(same(one[k], other[k]) for k in one)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


@pytest.mark.parametrize("tp", [1, 2])
def test_states_of_training_are_re_sharded_with_the_model(tp: int, tmp_path: Path) -> None:
    folder = recorded("fsdp_adam", tmp_path)
    words = ("split", folder / "dcp", tmp_path / "out", "--as", "dcp", "--tp", str(tp), "--config", folder / "hf")
    done = ok(*words)
    assert "Left behind" not in done.stdout
    before, after = everything(folder / "dcp"), everything(tmp_path / "out")
    assert before["optim"]["param_groups"] and before["step"] == 7 and "rng" in before
    assert same(before, after)
    found = read_distributed(tmp_path / "out")
    q = "model.layers.0.self_attn.q_proj.weight"
    boxes = {name: [at for at, _ in found.tensors[name].chunks] for name in (f"model.{q}", f"optim.state.{q}.exp_avg")}
    assert len({tuple(at) for at in boxes.values()}) == 1 and len(boxes[f"model.{q}"]) == tp
    moments = load_file(folder / "moments.safetensors")
    assert same(after["optim"]["state"][q]["exp_avg"], moments[f"{q}.exp_avg"])


def test_states_of_training_go_on_and_on(tmp_path: Path) -> None:
    """Re-sharded again, with and without a manifest; and a merge leaves them behind."""
    folder = recorded("fsdp_adam", tmp_path)
    before = everything(folder / "dcp")
    ok("split", folder / "dcp", tmp_path / "a", "--as", "dcp", "--tp", "2", "--config", folder / "hf")
    split(tmp_path / "a", tmp_path / "b", tp=1, format="dcp", max_shard_size=4000)
    assert same(before, everything(tmp_path / "b"))
    (tmp_path / "b" / "reshard.json").unlink()
    split(tmp_path / "b", tmp_path / "c", tp=2, format="dcp")
    assert same(before, everything(tmp_path / "c"))
    found = merge(tmp_path / "a", tmp_path / "merged")
    assert found.left_behind == ("optim", "rng", "step")
    assert bytes_of(tmp_path / "merged") == bytes_of(folder / "hf")
    ((_, info), *_) = read_distributed(tmp_path / "a").tensors["optim.state.lm_head.weight.exp_avg"].chunks
    with info.file.open("r+b") as file:
        file.seek(info.offset)
        file.write(b"\x7f\x7f\x7f")
    with pytest.raises(MismatchError, match="has the checksum"):
        split(tmp_path / "a", tmp_path / "d", tp=2, format="dcp")


def test_states_of_megatron_are_re_sharded_too(tmp_path: Path) -> None:
    """Its states have the parameter's name at their end, and layers are stacked in them as in the parameters."""
    original, torchfile = checkpoint("megatron", "llama"), module("megatron", "check").torchfile
    split(original, tmp_path / "first", tp=2, format="megatron")
    found = torchfile.load_dcp(tmp_path / "first" / "release")
    states = {
        f"optimizer.state.{kind}.{name}": (sign * tensor).astype(np.float32)
        for kind, sign in (("exp_avg", 3), ("fp32_param", 2))
        for name, tensor in found.tensors.items()
    }
    tensors = {name: tensor.astype(np.float32) for name, tensor in found.tensors.items()} | states
    objects = found.objects | {"rng_state/shard_0_1": torchfile.dump_pt([{"cuda": 1}])}
    shutil.copytree(tmp_path / "first", tmp_path / "run")
    (tmp_path / "run" / "reshard.json").unlink()
    shutil.rmtree(tmp_path / "run" / "release")
    torchfile.dump_dcp(tmp_path / "run" / "release", tensors, objects)
    split(tmp_path / "run", tmp_path / "out", tp=2, format="megatron")
    after = torchfile.load_dcp(tmp_path / "out" / "release")
    assert after.tensors.keys() == tensors.keys()
    assert [name for name in tensors if not np.array_equal(after.tensors[name], tensors[name])] == []
    assert after.objects["rng_state/shard_0_1"] == objects["rng_state/shard_0_1"]


def test_another_format_leaves_the_states_behind(tmp_path: Path) -> None:
    folder = recorded("fsdp_adam", tmp_path)
    done = command("split", folder / "dcp", tmp_path / "out", "--as", "vllm", "--tp", "2", "--config", folder / "hf")
    assert "Left behind: optim, rng, step" in done.stdout, done.stderr


# -- what is written -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "mesh"),
    one_of_each([
        ("llama", {}),
        ("llama", {"tp": 2}),
        ("phi3", {"tp": 4}),
        ("deepseek_v3", {"tp": 2, "ep": 2}),
        ("gpt2", {"tp": 2}),
        ("falcon-7b", {"tp": 2}),
        ("gpt_oss", {"tp": 2}),
    ], lambda case: (case[0] == "llama", bool(case[1]))),
)  # fmt: skip
def test_torch_loads_it_and_the_way_back_restores_every_byte(name: str, mesh: dict[str, int], tmp_path: Path) -> None:
    original = store.checkpoint(name)
    split(original, tmp_path / "out", format="dcp", **mesh)
    whole = weights_of(original)
    assert bits(loaded(tmp_path / "out", original)) == bits(whole)
    merge(tmp_path / "out", tmp_path / "merged")
    assert contents(tmp_path / "merged") == contents(original)
    (tmp_path / "out" / "reshard.json").unlink()
    merge(tmp_path / "out", tmp_path / "without")
    assert bytes_of(tmp_path / "without") == bytes_of(original)


@pytest.mark.parametrize("name", ["llama", "qwen3_moe", "gemma2"])
def test_a_model_of_transformers_loads_its_own_names(name: str, tmp_path: Path) -> None:
    """Experts are one tensor in its modules, and what is tied has both names; what it saves so is read."""
    import transformers

    original = store.checkpoint(name)
    cls = getattr(transformers, json.loads((original / "config.json").read_text())["architectures"][0])
    wanted = cls.from_pretrained(original, dtype=torch.float32).state_dict()
    split(original, tmp_path / "out", tp=2, format="dcp", names="modules")
    state = {key: torch.zeros_like(each) for key, each in wanted.items()}
    dcp.load(state, checkpoint_id=tmp_path / "out", no_dist=True)
    assert same(state, dict(wanted))
    folder = save(tmp_path / "saved", {"model": dict(wanted), "step": 3})
    merge_with_config(folder, tmp_path / "merged", original)
    merged, whole = bytes_of(tmp_path / "merged"), bytes_of(original)
    assert {key: merged[key] for key in whole} == whole


def test_no_degree_is_needed_and_files_have_a_largest_size(tmp_path: Path) -> None:
    original = store.checkpoint("llama")
    ok("split", original, tmp_path / "out", "--as", "dcp", "--max-shard-size", "20KB")
    files = sorted(tmp_path.glob("out/*.distcp"), key=lambda file: int(file.stem.split("_")[-1]))
    assert [file.name for file in files] == [f"__0_{i}.distcp" for i in range(len(files))]
    assert len(files) > 2
    whole = weights_of(original)
    assert bits(loaded(tmp_path / "out", original)) == bits(whole)


def test_a_matrix_that_is_stored_flat_is_one_range_on_each_rank(tmp_path: Path) -> None:
    """bitsandbytes' 4 bits: a rank's columns would be a chunk for each row, and each chunk of a tensor has a file."""
    source = SOURCES["bnb"](tmp_path / "source")
    split(source, tmp_path / "out", tp=4, format="dcp")
    assert len([*(tmp_path / "out").glob("*.distcp")]) == 4
    merge(tmp_path / "out", tmp_path / "merged")
    assert (tmp_path / "merged/model.safetensors").read_bytes() == (source / "model.safetensors").read_bytes()


def test_each_archive_is_a_zip_whose_checksums_are_right(tmp_path: Path) -> None:
    import io

    split(store.checkpoint("llama"), tmp_path / "out", tp=2, format="dcp")
    found = read_distributed(tmp_path / "out")
    metadata = torch.distributed.checkpoint.FileSystemReader(tmp_path / "out").read_metadata()
    assert len(metadata.storage_data) == sum(len(whole.chunks) for whole in found.tensors.values())
    for info in metadata.storage_data.values():
        assert info.offset % 64 == 0
        content = (tmp_path / "out" / info.relative_path).read_bytes()[info.offset : info.offset + info.length]
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            assert archive.testzip() is None


def test_each_element_is_written_once_at_any_mesh(tmp_path: Path) -> None:
    original = store.checkpoint("qwen3_moe")
    split(original, tmp_path / "out", tp=2, format="dcp")
    found = read_distributed(tmp_path / "out")
    written = sum(info.nbytes for whole in found.tensors.values() for _, info in whole.chunks)
    assert written == sum(len(content) for _, _, content in bytes_of(original).values())
    assert {whole.shape for whole in found.tensors.values()} == {shape for _, shape, _ in bytes_of(original).values()}


def test_a_run_that_was_stopped_goes_on(tmp_path: Path) -> None:
    original = write_checkpoint(tmp_path / "original")
    split(original, tmp_path / "one", tp=2, format="dcp", max_shard_size=3000)
    split(original, tmp_path / "two", tp=2, format="dcp", max_shard_size=3000)
    assert contents(tmp_path / "one").keys() == contents(tmp_path / "two").keys()
    assert (tmp_path / "one" / METADATA).read_bytes() == (tmp_path / "two" / METADATA).read_bytes()


# -- bad input -------------------------------------------------------------------------------------------------------


def test_what_is_missing_is_said_and_nothing_is_written(tmp_path: Path) -> None:
    split(store.checkpoint("llama"), tmp_path / "out", tp=2, format="dcp")
    for name, said in [(METADATA, ".metadata is missing"), ("__1_0.distcp", "the files of rank 1 of 2 are missing")]:
        shutil.copytree(tmp_path / "out", tmp_path / "bad")
        (tmp_path / "bad" / name).unlink()
        with pytest.raises(CheckpointError, match=said):
            merge(tmp_path / "bad", tmp_path / "merged")
        assert not (tmp_path / "merged").exists()
        report = inspect(tmp_path / "bad")
        assert any(said in problem for problem in report.problems), report.problems
        shutil.rmtree(tmp_path / "bad")


def test_a_tensor_of_another_number_of_dimensions_is_refused(tmp_path: Path) -> None:
    tensors = load_file(next(store.checkpoint("llama").glob("*.safetensors")))
    for name, shape in (("model.layers.0.mlp.up_proj.weight", (-1,)), ("model.norm.weight", (-1, 1))):
        changed = {**tensors, name: tensors[name].reshape(shape)}
        dcp.save(changed, checkpoint_id=tmp_path / "changed", no_dist=True)
        with pytest.raises(MismatchError, match=f"the chunks of tensor '{name}' make"):
            merge(tmp_path / "changed", tmp_path / "merged", config=store.checkpoint("llama"))
        shutil.rmtree(tmp_path / "changed")


def test_a_changed_byte_is_seen(tmp_path: Path) -> None:
    split(store.checkpoint("llama"), tmp_path / "out", tp=2, format="dcp")
    ((_, info), *_) = read_distributed(tmp_path / "out").tensors["model.norm.weight"].chunks
    with info.file.open("r+b") as file:
        file.seek(info.offset)
        file.write(b"\x7f\x7f")
    with pytest.raises(MismatchError, match="has the checksum"):
        merge(tmp_path / "out", tmp_path / "merged")
    assert not (tmp_path / "merged").exists()


def test_another_config_is_refused(tmp_path: Path) -> None:
    folder = recorded("fsdp_tp", tmp_path)
    change_json(folder / "hf" / "config.json", num_key_value_heads=1)
    done = command("merge", folder / "dcp", tmp_path / "merged", "--config", folder / "hf")
    assert done.returncode == 1 and not (tmp_path / "merged").exists()


# -- inspect and plan ------------------------------------------------------------------------------------------------


def test_inspect_says_what_it_is(tmp_path: Path) -> None:
    folder = recorded("fsdp_adam", tmp_path)
    done = ok("inspect", folder / "dcp")
    assert "a distributed checkpoint of PyTorch" in done.stdout
    original = store.checkpoint("llama")
    split(original, tmp_path / "out", tp=2, format="dcp")
    report = inspect(tmp_path / "out")
    assert report.complete and report.format == "dcp"
    assert report.parameters == sum(math.prod(shape) for _, shape, _ in bytes_of(original).values())


def test_inspect_finds_the_folder_that_megatron_names(tmp_path: Path) -> None:
    split(checkpoint("megatron", "llama"), tmp_path / "out", tp=2, format="megatron")
    for _ in range(2):
        report = inspect(tmp_path / "out")
        assert report.complete and report.format == "megatron" and report.files > 1, report.problems
        (tmp_path / "out" / "reshard.json").unlink(missing_ok=True)


@pytest.mark.parametrize(
    ("form", "file"), [("dcp", "__0_0.distcp"), ("deepspeed-universal", "global_step_universal/zero/{tensor}/fp32.pt")]
)
def test_plan_shows_what_would_be_written(form: str, file: str) -> None:
    done = ok("plan", store.checkpoint("llama"), "--as", form)
    assert "model.norm.weight" in done.stdout and done.stdout.endswith(f"files: {file}\n")


def test_the_format_is_one_of_any_mesh() -> None:
    assert format_of("dcp").files.is_distributed and format_of("dcp").container.chunks


# -- torch itself, on several ranks ----------------------------------------------------------------------------------


def _unlike(folder: Path, original: Path) -> list[str]:
    """The tensors that a rank of a device mesh loads otherwise than they are in the original, in any placement."""
    import torch.distributed as dist
    from torch.distributed.tensor import Replicate, Shard, zeros

    mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
    whole, state = load_file(original), dict[str, Any]()
    for number, (name, tensor) in enumerate(whole.items()):
        places = [Shard(number % tensor.dim()) if tensor.dim() > 1 else Replicate() if number % 2 else Shard(0)]
        state[name] = zeros(*tensor.shape, dtype=tensor.dtype, device_mesh=mesh, placements=places)
    dcp.load(state, checkpoint_id=folder)
    return [name for name, tensor in whole.items() if not torch.equal(state[name].full_tensor(), tensor)]


@of_ranks
def test_two_ranks_load_into_dtensors_what_is_for_four(tmp_path: Path) -> None:
    original = store.checkpoint("llama")
    split(original, tmp_path / "out", tp=4, format="dcp")
    assert run_processes(_unlike, 2, tmp_path / "out", original / "model.safetensors") == [[], []]


def test_it_is_verified_chunk_for_chunk(tmp_path: Path) -> None:
    original = store.checkpoint("llama")
    split(original, tmp_path / "out", tp=2, format="dcp")
    assert command("verify", original, tmp_path / "out", "--exact-only").returncode == 0
    (tmp_path / "out" / "reshard.json").unlink()
    assert command("verify", original, tmp_path / "out", "--exact-only").returncode == 0
    (*_, (_, info)) = read_distributed(tmp_path / "out").tensors["model.layers.0.mlp.down_proj.weight"].chunks
    with info.file.open("r+b") as file:
        file.seek(info.offset + 4)
        file.write(b"\x7f\x7f")
    done = command("verify", original, tmp_path / "out", "--exact-only")
    assert done.returncode == 1 and "model.layers.0.mlp.down_proj.weight" in done.stdout


def test_an_expert_is_looked_for_in_the_chunks_that_have_it_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the work grows with experts times chunks, of which a large run has thousands."""
    split(store.checkpoint("mixtral"), tmp_path / "out", tp=1, ep=2, format="dcp", names="modules")
    asked, real = list[bool](), geometry._within

    def counted(*arguments: Any) -> Any:
        pieces = [*real(*arguments)]
        asked.append(bool(pieces))
        return pieces

    monkeypatch.setattr(geometry, "_within", counted)
    merge(tmp_path / "out", tmp_path / "merged")
    assert len(asked) > 10 and all(asked)


def test_it_is_read_from_a_bucket(tmp_path: Path) -> None:
    """Without what reshard writes beside it, as a trainer uploads it; it is downloaded as a whole."""
    original = store.checkpoint("llama")
    (tmp_path / "bucket" / "run").mkdir(parents=True)
    split(original, tmp_path / "bucket" / "run" / "step-5", tp=2, format="dcp")
    for file in (tmp_path / "bucket" / "run" / "step-5").iterdir():
        if file.suffix != ".distcp" and file.name != METADATA:
            file.unlink()
    with StoreServer(tmp_path / "bucket") as server:
        done = command(
            "merge", "s3://bucket/run/step-5", tmp_path / "merged", "--config", original,
            "--cache-dir", tmp_path / "cache", **server.environment,
        )  # fmt: skip
    assert done.returncode == 0, done
    assert bytes_of(tmp_path / "merged") == bytes_of(original)


@pytest.mark.parametrize("form", ["dcp", "megatron", "megatron-legacy"])
def test_what_is_written_is_read_from_a_bucket(form: str, tmp_path: Path) -> None:
    original = store.checkpoint("llama")
    (tmp_path / "bucket" / "run").mkdir(parents=True)
    split(original, tmp_path / "bucket" / "run" / "out", tp=2, format=form)
    with StoreServer(tmp_path / "bucket") as server:
        done = command(
            "merge", "s3://bucket/run/out", tmp_path / "merged", "--cache-dir", tmp_path / "cache", **server.environment
        )
    assert done.returncode == 0, done
    assert contents(tmp_path / "merged") == contents(original)
