"""Megatron-Core's checkpoints: what is written is what it holds itself, what it wrote is read, and the rest refused."""

from __future__ import annotations

import itertools
import json
import re
import shutil
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from reshard.api import inspect, merge, split
from reshard.formats.errors import PlanError, ReshardError
from reshard.formats.files.chunks import Chunk
from reshard.formats.files.dcp import Blob, build_metadata, read_distributed
from reshard.formats.files.safetensors import read_header
from reshard.formats.files.torch_archive import build_chunks
from reshard.formats.notation.format_file import all_formats
from reshard.source.opening import open_source
from reshard.verify.bytes.exact import verify_exact
from tests import store
from tests.marks import one_of_each, thorough
from tests.programs.oracles import ORACLES, checkpoint, module, problem
from tests.programs.test_oracles import tensors_of
from tests.support import LLAMA, command, contents, ok, refused, write_checkpoint

CASES = sorted(path.stem for path in (ORACLES / "megatron").glob("*.npz"))
FORMS = {"te": "megatron-legacy", "teseq": "megatron-legacy-sequential", "local": "megatron-legacy-local"}
DENSE = {"llama", "llama_kv2", "qwen2", "qwen3"}
DISTRIBUTED = {"te": "megatron", "teseq": "megatron", "local": "megatron-local"}


def mesh_of_case(case: str) -> dict[str, Any]:
    """The arguments of ``split`` for a case's mesh."""
    found = {
        name: int(degree)
        for name, degree in re.findall(r"-(tp|pp|ep|etp)(\d+)", case.partition("-")[2].replace("-", "--"))
    }
    same = found.pop("etp", 0) == 1
    return {"tp": 1, **found, "same_ranks": same}


def _written(case: str) -> tuple[Any, ...]:
    """What torch_dist depends on: of the mesh, tp alone, which pads the vocabulary."""
    model, spec, _ = case.split("-", 2)
    return model, mesh_of_case(case)["tp"], DISTRIBUTED[spec], spec == "te"


DISTINCT = [*{_written(case): case for case in reversed(CASES)}.values()]
"""A case of each torch_dist checkpoint that is another."""


def _weights(folder: Path) -> dict[str, bytes]:
    return tensors_of(folder.glob("*.safetensors"))


def golden(case: str, path: Path, *options: str, model: Path | None = None) -> Path:
    """What Megatron-Core wrote for a case, from its golden layout; without a config.json."""
    model = model or checkpoint("megatron", case.split("-")[0])
    with mock.patch("sys.argv", ["write_minimal.py", case, str(model), str(path), *options]):
        module("megatron", "write_minimal").main()
    return path


@pytest.mark.parametrize("case", one_of_each(CASES, lambda case: case.split("-")[0] in DENSE))
def test_legacy_is_what_megatron_holds_and_comes_back(case: str, tmp_path: Path) -> None:
    model, spec, _ = case.split("-", 2)
    original = checkpoint("megatron", model)
    split(original, tmp_path / "out", **mesh_of_case(case), format=FORMS[spec])
    assert problem("megatron", case, tmp_path / "out") is None
    merge(tmp_path / "out", tmp_path / "merged")
    assert contents(tmp_path / "merged") == contents(original)
    (tmp_path / "out" / "reshard.json").unlink()
    merge(tmp_path / "out", tmp_path / "without")
    assert _weights(tmp_path / "without") == _weights(original)


@pytest.mark.parametrize("case", one_of_each(CASES, lambda case: case.split("-")[0]))
def test_legacy_that_megatron_wrote_is_read(case: str, tmp_path: Path) -> None:
    original = checkpoint("megatron", case.split("-")[0])
    golden(case, tmp_path / "golden", "--legacy")
    merge(tmp_path / "golden", tmp_path / "merged", config=original)
    assert _weights(tmp_path / "merged") == _weights(original)


@pytest.mark.parametrize(("heads", "kv", "tp"), [(4, 1, 4), (8, 2, 4), (16, 2, 8)])
def test_more_ranks_than_kv_heads_have_equal_ranges_wherever_these_end(
    heads: int, kv: int, tp: int, tmp_path: Path
) -> None:
    """Ranges of the rows of ``linear_qkv``: of q, k and v of each group in turn, whole heads and parts of heads."""
    config = {**LLAMA, "num_attention_heads": heads, "num_key_value_heads": kv, "vocab_size": 1024}
    original = write_checkpoint(tmp_path / "model", config=config)
    split(original, tmp_path / "out", tp=tp, format="megatron-legacy")
    torchfile = module("megatron", "check").torchfile
    files = [tmp_path / "out" / "release" / f"mp_rank_{rank:02d}" / "model_optim_rng.pt" for rank in range(tp)]
    name = "decoder.layers.1.self_attention.linear_qkv.weight"
    ranks = [np.asarray(torchfile.load_pt(file.read_bytes())["model"][name]) for file in files]
    q, k, v = (load_file(original / "model.safetensors")[f"model.layers.1.self_attn.{x}_proj.weight"] for x in "qkv")
    groups = [each.reshape(kv, -1, config["hidden_size"]) for each in (q, k, v)]
    joined = torch.cat(groups, dim=1).reshape(-1, config["hidden_size"])
    assert {each.shape for each in ranks} == {(len(joined) // tp, config["hidden_size"])}
    assert np.concatenate(ranks).tobytes() == joined.view(torch.int16).numpy().tobytes()
    split(original, tmp_path / "stages", tp=tp, pp=2, format="megatron-legacy")
    for folder in (tmp_path / "out", tmp_path / "stages"):
        assert verify_exact(open_source(original), folder).verdict == "same"
        (folder / "reshard.json").unlink()
        merge(folder, tmp_path / f"{folder.name}-merged")
        assert _weights(tmp_path / f"{folder.name}-merged") == _weights(original)


@pytest.mark.parametrize("case", one_of_each(CASES, lambda case: case.split("-")[0]))
def test_torch_dist_is_what_megatron_holds_and_comes_back(case: str, tmp_path: Path) -> None:
    """The mesh says how the vocabulary is padded, and what chunks there are."""
    original, mesh = checkpoint("megatron", case.split("-")[0]), mesh_of_case(case)
    split(original, tmp_path / "out", tp=mesh["tp"], format=DISTRIBUTED[case.split("-")[1]])
    assert problem("megatron", case, tmp_path / "out") is None
    if case not in DISTINCT:
        return
    merge(tmp_path / "out", tmp_path / "merged")
    assert contents(tmp_path / "merged") == contents(original)
    (tmp_path / "out" / "reshard.json").unlink()
    merge(tmp_path / "out", tmp_path / "without")
    assert _weights(tmp_path / "without") == _weights(original)


@pytest.mark.parametrize("case", one_of_each(CASES, lambda case: case.split("-")[0]))
def test_torch_dist_that_megatron_wrote_is_read(case: str, tmp_path: Path) -> None:
    original = checkpoint("megatron", case.split("-")[0])
    golden(case, tmp_path / "golden")
    merge(tmp_path / "golden", tmp_path / "merged", config=original)
    assert _weights(tmp_path / "merged") == _weights(original)


@pytest.mark.parametrize("case", [case for case in CASES if case.endswith(("te-tp1", "local-tp2"))])
def test_every_module_that_asks_for_a_state_has_one(case: str, tmp_path: Path) -> None:
    """And none has that Megatron-Core does not ask for: so its default strictness loads the folder."""
    cases = json.loads((ORACLES / "megatron" / "cases.json").read_text())
    form = "megatron-local" if "-local-" in case else "megatron"
    split(checkpoint("megatron", case.split("-")[0]), tmp_path / "out", tp=1, format=form)
    found = read_distributed(tmp_path / "out" / "release").objects
    wanted = set(cases[case]["dist_objects"])
    assert found.keys() == wanted


def in_chunks(case: str, path: Path) -> Path:
    """What Megatron-Core wrote for a case, in its own chunks: those of equal number lie in one file."""
    check, cases = module("megatron", "check"), json.loads((ORACLES / "megatron" / "cases.json").read_text())
    flat = np.concatenate([np.zeros(1, np.float32), *_numbers(case)])
    files: dict[int, list[tuple[str, Chunk, bytes]]] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    for key, ids in check.golden(case, "dist").items():
        shapes[key] = ids.shape
        for number, (offset, shape) in enumerate(cases[case]["dist_chunks"][key]):
            box = tuple(slice(o, o + n) for o, n in zip(offset, shape, strict=True))
            data = flat[ids[box]].tobytes()
            files.setdefault(number, []).append((key, Chunk(tuple(offset), tuple(shape)), data))
    tensors = {key: ("F32", shape, list[tuple[Chunk, Blob]]()) for key, shape in shapes.items()}
    folder = path / "iter_0000007"
    folder.mkdir(parents=True)
    for number, chunks in files.items():
        laid, name = build_chunks([(key, "F32", at.shape, len(d)) for key, at, d in chunks]), f"__{number}_0.distcp"
        content = bytearray(laid.size)
        for offset, part in laid.fixed:
            content[offset : offset + len(part)] = part
        for (_, offset), (key, at, data) in zip(laid.places, chunks, strict=True):
            content[offset : offset + len(data)] = data
            tensors[key][2].append((at, Blob(Path(name), *laid.ranges[key])))
        (folder / name).write_bytes(content)
    (folder / ".metadata").write_bytes(build_metadata(tensors))
    (path / "latest_checkpointed_iteration.txt").write_text("7")
    return path


def _numbers(case: str) -> list[Any]:
    """The elements of the case's checkpoint, in the order of their numbers."""
    shapes = json.loads((ORACLES / "megatron" / "models.json").read_text())[case.split("-")[0]]["tensors"]
    return [values.ravel() for values in module("megatron", "make_checkpoint").id_tensors(shapes).values()]


@pytest.mark.parametrize("case", one_of_each(CASES, lambda case: case.split("-")[0] in DENSE))
def test_the_chunks_that_megatron_wrote_are_read(case: str, tmp_path: Path) -> None:
    original = checkpoint("megatron", case.split("-")[0])
    merge(in_chunks(case, tmp_path / "chunks"), tmp_path / "merged", config=original)
    assert _weights(tmp_path / "merged") == _weights(original)


@pytest.mark.parametrize("model", ["llama", "mixtral", "deepseek_v3"])
def test_a_tensor_for_each_layer_and_expert(model: str, tmp_path: Path) -> None:
    original = checkpoint("megatron", model)
    split(original, tmp_path / "out", tp=2, format="megatron-singleton")
    found = read_distributed(tmp_path / "out" / "release")
    names, modules = found.tensors, {name.rpartition(".")[0] for name in found.tensors if ".linear_" in name}
    assert modules and {f"{module}._extra_state/shard_0_1" for module in modules} <= found.objects.keys()
    assert "decoder.layers.0.mlp.linear_fc1.weight_w" in names or model == "mixtral"
    assert "decoder.layers.1.mlp.experts.experts.3.linear_fc1.weight_v" in names or model == "llama"
    (tmp_path / "out" / "reshard.json").unlink()
    merge(tmp_path / "out", tmp_path / "merged")
    assert _weights(tmp_path / "merged") == _weights(original)


def test_no_strictness_but_the_default_is_advised(tmp_path: Path) -> None:
    """With another, Megatron loads a folder that lacks tensors of the model, and says nothing."""
    original, texts = checkpoint("megatron", "llama"), [format.loading.command for format in all_formats().values()]
    for form in ("megatron", "megatron-local", "megatron-singleton"):
        found = ok("split", original, tmp_path / form, "--as", form)
        texts += [found.stdout, command("inspect", tmp_path / form).stdout]
    texts += [path.read_text() for path in (Path(__file__).parents[2] / "docs").rglob("*.md")]
    assert not any("strictness log_all" in text for text in texts)


# ------------------------------------------------------------------------------------------------ training checkpoints


def trained(path: Path, entries: dict[str, Any], model: str = "llama") -> Path:
    """A folder of the older form, of tp 2, with further entries in each file, as a training program saves them."""
    golden(f"{model}-te-tp2", path, "--legacy")
    for file in path.rglob("*.pt"):
        state = module("megatron", "check").torchfile.load_pt(file.read_bytes())
        file.write_bytes(module("megatron", "check").torchfile.dump_pt({**state, **entries}))
    return path


TRAINING = {"args": {"seed": 1}, "optimizer": {"state": np.ones(3, np.float32)}, "rng_state": [1, 2]}


def test_what_belongs_to_training_is_named_as_left_behind(tmp_path: Path) -> None:
    original, source = checkpoint("megatron", "llama"), trained(tmp_path / "run", TRAINING)
    said = command("merge", source, tmp_path / "merged", "--config", original)
    assert "left behind: args, optimizer, rng_state" in said.stdout.lower(), said
    assert _weights(tmp_path / "merged") == _weights(original)
    found = split(source, tmp_path / "vllm", tp=2, format="vllm", config=original)
    assert found.left_behind == ("args", "optimizer", "rng_state")


def test_the_optimizer_of_torch_dist_is_left_behind_too(tmp_path: Path) -> None:
    original, run = checkpoint("megatron", "llama"), tmp_path / "run"
    flat = {f"optimizer.state.exp_avg.{name}": np.ones(4, np.float32) for name in ("a", "b")}
    golden("llama-te-tp1", tmp_path / "golden")
    torchfile = module("megatron", "check").torchfile
    tensors = torchfile.load_dcp(tmp_path / "golden" / "iter_0000001").tensors
    objects = {
        "rng_state/shard_0_1": torchfile.dump_pt([1]),
        "common_state/shard_0_1": torchfile.dump_pt([{"iteration": 1}]),
    }
    torchfile.dump_dcp(run / "iter_0000001", {k: v.astype(np.float32) for k, v in tensors.items()} | flat, objects)
    found = merge(run / "iter_0000001", tmp_path / "merged", config=original)
    assert found.left_behind == ("optimizer", "rng_state")
    assert _weights(tmp_path / "merged") == _weights(original)


def test_from_a_step_of_training_to_what_serves_it(tmp_path: Path) -> None:
    """The folder of one step, without what names the last one; the same shards as from the original."""
    original = checkpoint("megatron", "qwen3_moe")
    golden("qwen3_moe-te-tp4", tmp_path / "old", "--legacy")
    in_chunks("qwen3_moe-te-tp4", tmp_path / "new")
    split(original, tmp_path / "expected", tp=2, format="vllm")
    for source in (tmp_path / "old" / "iter_0000001", tmp_path / "new" / "iter_0000007"):
        ok("split", source, tmp_path / "out", "--tp", 2, "--as", "vllm", "--config", original, "--overwrite")
        for file in (tmp_path / "expected").glob("*.safetensors"):
            assert tensors_of([tmp_path / "out" / file.name]) == tensors_of([file])


def test_virtual_stages(tmp_path: Path) -> None:
    """A file has the layers of several stages, each in an entry of its own, counted from 0."""
    original, torchfile = checkpoint("megatron", "llama"), module("megatron", "check").torchfile
    split(original, tmp_path / "four", tp=2, pp=4, format="megatron-legacy")
    for tensor, stage in itertools.product(range(2), range(2)):
        states = [
            tmp_path / "four" / "release" / f"mp_rank_{tensor:02d}_{s:03d}" / "model_optim_rng.pt"
            for s in (stage, stage + 2)
        ]
        models = [torchfile.load_pt(file.read_bytes())["model"] for file in states]
        folder = tmp_path / "run" / f"mp_rank_{tensor:02d}_{stage:03d}"
        folder.mkdir(parents=True)
        content = {"iteration": 3, "model0": models[0], "model1": models[1]}
        (folder / "model_optim_rng.pt").write_bytes(torchfile.dump_pt(content))
    merge(tmp_path / "run", tmp_path / "merged", config=original)
    assert _weights(tmp_path / "merged") == _weights(original)


@pytest.mark.parametrize(("tensors", "experts"), [(2, 4), (4, 2)])
@pytest.mark.parametrize("stages", [1, 2])
@thorough
def test_experts_that_are_not_divided_over_more_or_fewer_ranks(
    tensors: int, experts: int, stages: int, tmp_path: Path
) -> None:
    """With --expert-tensor-parallel-size 1, rank r of a stage has the experts of r modulo ep, and all else of r modulo
    tp: the names of its file say both.
    """
    original, torchfile = checkpoint("megatron", "mixtral"), module("megatron", "check").torchfile
    split(original, tmp_path / "tp", tp=tensors, pp=stages, format="megatron-legacy")
    split(original, tmp_path / "ep", tp=experts, ep=experts, same_ranks=True, pp=stages, format="megatron-legacy")
    run = tmp_path / "run" / "iter_0000002"
    for stage, rank in itertools.product(range(stages), range(4)):
        at, of = f"_{stage:03d}" * (stages > 1), rank % experts
        names = f"tp/release/mp_rank_{rank % tensors:02d}{at}", f"ep/release/mp_rank_{of:02d}{at}_{of:03d}"
        dense, sparse = (
            torchfile.load_pt((tmp_path / name / "model_optim_rng.pt").read_bytes())["model"] for name in names
        )
        folder = run / f"mp_rank_{rank % tensors:02d}{at}_{of:03d}"
        folder.mkdir(parents=True)
        model = {name: value for name, value in dense.items() if ".experts." not in name}
        model |= {name: value for name, value in sparse.items() if ".experts." in name}
        (folder / "model_optim_rng.pt").write_bytes(torchfile.dump_pt({"iteration": 2, "model": model}))
    merge(run, tmp_path / "merged", config=original)
    assert _weights(tmp_path / "merged") == _weights(original)
    assert verify_exact(open_source(original), run).verdict == "same"
    assert "experts are divided over more or fewer ranks than the rest" in refused("verify", original, run)


def test_stages_of_other_lengths_and_both_degrees(tmp_path: Path) -> None:
    original = checkpoint("megatron", "deepseek_v3")
    split(original, tmp_path / "out", tp=2, ep=2, pp=2, pp_layers=(1, 2), format="megatron-legacy")
    assert len([*(tmp_path / "out" / "release").glob("mp_rank_0?_00?_00?")]) == 8
    (tmp_path / "out" / "reshard.json").unlink()
    split(tmp_path / "out", tmp_path / "again", tp=4, format="megatron-legacy")
    assert problem("megatron", "deepseek_v3-te-tp4", tmp_path / "again") is None


# ------------------------------------------------------------------------------------------------------------ bad input


def _refused(source: Path, out: Path, config: Path, text: str) -> None:
    with pytest.raises(ReshardError, match=text):
        merge(source, out, config=config)
    assert not out.exists() and not out.with_name(out.name + ".partial").exists()


@pytest.mark.parametrize(("model", "mesh"), [("llama", {"pp": 2}), ("mixtral", {"ep": 2})])
def test_the_name_of_one_of_several_ranks_says_that_others_are_missing(
    model: str, mesh: dict[str, int], tmp_path: Path
) -> None:
    split(checkpoint("megatron", model), tmp_path / "out", tp=1, **mesh, format="megatron-legacy")
    (tmp_path / "out" / "reshard.json").unlink()
    shutil.rmtree(tmp_path / "out" / "release" / "mp_rank_00_001")
    with pytest.raises(ReshardError, match=r"the files of rank 1 of 2 are missing \(release/mp_rank_00_001/"):
        open_source(tmp_path / "out")
    assert inspect(tmp_path / "out").ranks_missing == (1,)


def test_bad_input_is_one_line(tmp_path: Path) -> None:
    original, torchfile = checkpoint("megatron", "llama"), module("megatron", "check").torchfile
    run = golden("llama-te-tp2-pp2", tmp_path / "run", "--legacy")
    step, out = run / "iter_0000001", tmp_path / "out"
    tracker = run / "latest_checkpointed_iteration.txt"
    tracker.write_text("5")
    _refused(run, out, original, "names iter_0000005, and there is no such folder")
    tracker.write_text("../run")
    _refused(run, out, original, "is neither a number nor 'release'")
    tracker.write_text("1")
    _refused(run, out, tmp_path, "config.json")
    shutil.move(step / "mp_rank_01_001", tmp_path / "aside")
    _refused(run, out, original, r"rank 3 of 4 are missing \(.*mp_rank_01_001/model_optim_rng.pt\)")
    shutil.move(tmp_path / "aside", step / "mp_rank_01_001")
    file = step / "mp_rank_01_001" / "model_optim_rng.pt"
    state = torchfile.load_pt(file.read_bytes())
    file.write_bytes(torchfile.dump_pt({**state, "iteration": 9}))
    _refused(run, out, original, "is of iteration 9, .* of iteration 1")
    name = "decoder.layers.1.mlp.linear_fc2.weight"
    file.write_bytes(torchfile.dump_pt({**state, "model": {**state["model"], name: np.ones((64, 41), np.float32)}}))
    _refused(run, out, original, rf"{name}' is F32 \[64, 41\], rank 3 of pp 2 x tp 2 has F32 \[64, 40\]")
    file.write_bytes(
        torchfile.dump_pt({**state, "model": {**state["model"], "decoder.what.weight": np.ones(3, np.float32)}})
    )
    _refused(run, out, original, "decoder.what.weight' is none")
    file.write_bytes(
        torchfile.dump_pt({**state, "model": {k: v for k, v in state["model"].items() if "layers.1" not in k}})
    )
    _refused(run, out, original, "the ranks of stage 1 have 1 and 2 layers")
    file.write_bytes(torchfile.dump_pt({"iteration": 1}))
    _refused(run, out, original, "has no entry 'model'")
    _refused(run, out, checkpoint("megatron", "mixtral"), "has no entry 'model'")


def test_a_model_that_no_line_reaches_is_refused(tmp_path: Path) -> None:
    gemma = write_checkpoint(tmp_path / "gemma", config={**LLAMA, "model_type": "gemma"})
    with pytest.raises(PlanError, match="'gemma' cannot be written as 'megatron'"):
        split(gemma, tmp_path / "out", tp=1, format="megatron")
    assert not (tmp_path / "out").exists()


def test_biases_that_megatron_has_no_place_for_are_refused(tmp_path: Path) -> None:
    original = store.checkpoint("deepseek_v3-no-q-lora")
    with pytest.raises(PlanError, match="Megatron-Core has no biases in multi-head latent attention"):
        split(original, tmp_path / "out", tp=1, format="megatron")


# ------------------------------------------------------------------------------------------------------- other models


OTHERS = ["gpt_oss", "glm4_moe", "nemotron_h", "mamba2", "qwen2_moe", "mistral", "deepseek_v2"]


FORMS_OF = [
    *itertools.product(OTHERS, ["megatron", "megatron-legacy"]),
    # what these have otherwise: experts one by one, and of the first each layer, and gate and up
    *itertools.product(["gpt_oss", "qwen2_moe", "nemotron_h"], ["megatron-singleton"]),
    *itertools.product(["gpt_oss", "qwen2_moe"], ["megatron-legacy-sequential"]),
]


@pytest.mark.parametrize(("model", "form"), FORMS_OF)
@thorough
def test_other_models_come_back(model: str, form: str, tmp_path: Path) -> None:
    original = checkpoint("vllm", model)
    split(original, tmp_path / "out", tp=2, format=form)
    merge(tmp_path / "out", tmp_path / "merged")
    assert contents(tmp_path / "merged") == contents(original)
    (tmp_path / "out" / "reshard.json").unlink()
    (tmp_path / "out" / "reshard-kept.safetensors").unlink(missing_ok=True)
    merge(tmp_path / "out", tmp_path / "without")
    assert _weights(tmp_path / "without").items() <= _weights(original).items()


def _values(folder: Path) -> dict[str, Any]:
    """The tensors of a full checkpoint."""
    infos = [info for file in folder.glob("*.safetensors") for info in read_header(file).tensors.values()]
    return {
        info.name: np.frombuffer(info.file.read_bytes(), np.float32, info.nbytes // 4, info.offset).reshape(info.shape)
        for info in infos
    }


def _stored(model: str, out: Path) -> dict[str, Any]:
    """What torch_dist has of a model, assembled from its chunks by other code."""
    split(checkpoint("vllm", model), out, tp=2, format="megatron")
    tensors: dict[str, Any] = module("megatron", "check").torchfile.load_dcp(out / "release").tensors
    return tensors


def test_experts_whose_gate_and_up_lie_in_turn(tmp_path: Path) -> None:
    """gpt-oss stores them input first; Megatron has all of gate, then all of up, output first, with biases."""
    stored, of = _stored("gpt_oss", tmp_path / "out"), _values(checkpoint("vllm", "gpt_oss"))
    for layer, expert in ((0, 0), (1, 3)):
        place, experts = f"model.layers.{layer}", f"model.layers.{layer}.mlp.experts"
        gate_up, bias = of[f"{experts}.gate_up_proj"][expert].T, of[f"{experts}.gate_up_proj_bias"][expert]
        here = "decoder.layers.mlp.experts.experts"
        wanted = {
            f"{here}.linear_fc1.weight": np.concatenate([gate_up[::2], gate_up[1::2]]),
            f"{here}.linear_fc1.bias": np.concatenate([bias[::2], bias[1::2]]),
            f"{here}.linear_fc2.weight": of[f"{experts}.down_proj"][expert].T,
            f"{here}.linear_fc2.bias": of[f"{experts}.down_proj_bias"][expert],
        }
        for name, values in wanted.items():
            assert np.array_equal(stored[name][layer, expert], values), name
        sinks = stored["decoder.layers.self_attention.core_attention.softmax_offset"][layer]
        assert np.array_equal(sinks, of[f"{place}.self_attn.sinks"])
        assert np.array_equal(stored["decoder.layers.mlp.router.bias"][layer], of[f"{place}.mlp.router.bias"])


def test_what_mambas_projection_makes_is_apart(tmp_path: Path) -> None:
    """z, x, B, C and dt have names of their own, as do x, B and C of the convolution; layers are numbered."""
    stored, of = _stored("nemotron_h", tmp_path / "out"), _values(checkpoint("vllm", "nemotron_h"))
    config = json.loads((checkpoint("vllm", "nemotron_h") / "config.json").read_text())
    heads, groups = config["mamba_num_heads"], config["n_groups"] * config["ssm_state_size"]
    inner, seen = heads * config["mamba_head_dim"], 0
    for layer in range(len(config["layers_block_type"])):
        place, here = f"backbone.layers.{layer}", f"decoder.layers.{layer}"
        if f"{place}.mixer.in_proj.weight" not in of:
            continue
        seen += 1
        for key, sizes in (("in_proj.weight", {"z": inner, "x": inner, "B": groups, "C": groups, "dt": heads}),
                           ("conv1d.weight", {"x": inner, "B": groups, "C": groups}),
                           ("conv1d.bias", {"x": inner, "B": groups, "C": groups})):  # fmt: skip
            parts = np.split(of[f"{place}.mixer.{key}"], np.cumsum([*sizes.values()])[:-1])
            for part, values in zip(sizes, parts, strict=True):
                assert np.array_equal(stored[f"{here}.mixer.{key}.{part}"], values), (layer, key, part)
        norm = stored[f"{here}.mixer.in_proj.layer_norm_weight"]
        assert np.array_equal(norm, of[f"{place}.norm.weight"])
    assert seen and "decoder.final_norm.weight" in stored


def _with_trained_padding(case: str) -> Any:
    """The golden layouts of a case, with another number than 0 in each padded element: training changes them too."""
    check = module("megatron", "check")
    real = check.golden

    def golden_of(of: str, kind: str) -> dict[str, Any]:
        return {name: np.where(ids == 0, 7, ids) for name, ids in real(of, kind).items()}

    return mock.patch.object(check, "golden", golden_of)


@pytest.mark.parametrize("case", ["llama-te-tp2-pp2", "qwen2-te-tp4"])
def test_the_padding_of_a_trained_vocabulary_is_anything(case: str, tmp_path: Path) -> None:
    original, out = checkpoint("megatron", case.split("-")[0]), tmp_path / "out"
    with _with_trained_padding(case):
        in_chunks(case, tmp_path / "new")
    torchfile = module("megatron", "check").torchfile
    for file in golden(case, tmp_path / "old", "--legacy").rglob("*.pt"):
        state = torchfile.load_pt(file.read_bytes())
        tables = [name for name in state["model"] if "word_embeddings" in name or "output_layer" in name]
        state["model"] |= {name: np.where(state["model"][name] == 0, 7, state["model"][name]) for name in tables}
        state["model"] |= {name: state["model"][name].astype(np.float32) for name in tables}
        file.write_bytes(torchfile.dump_pt(state))
    for source in (tmp_path / "new", tmp_path / "old"):
        merge(source, tmp_path / "merged", config=original, overwrite=True)
        assert _weights(tmp_path / "merged") == _weights(original)
        split(source, out, tp=1, format="megatron", config=original, overwrite=True)
        assert problem("megatron", f"{case.split('-')[0]}-te-tp1", out) is None


SHAPES = json.loads((ORACLES / "megatron" / "shapes.json").read_text())


@pytest.mark.parametrize("model", sorted(SHAPES))
def test_names_and_shapes_are_those_of_megatrons_own_model(model: str, tmp_path: Path) -> None:
    split(checkpoint("vllm", model), tmp_path / "out", tp=1, format=SHAPES[model]["form"])
    found = {name: list(of.shape) for name, of in read_distributed(tmp_path / "out" / "release").tensors.items()}
    assert found == SHAPES[model]["tensors"]


@pytest.mark.parametrize("same_ranks", [False, True])
@pytest.mark.parametrize("model", ["gpt_oss", "qwen2_moe"])
@thorough
def test_experts_that_lie_in_one_tensor_are_numbered_by_rank(model: str, same_ranks: bool, tmp_path: Path) -> None:
    original = checkpoint("vllm", model)
    split(original, tmp_path / "out", tp=2, ep=2, same_ranks=same_ranks, format="megatron-legacy")
    folders = sorted(path.name for path in (tmp_path / "out" / "release").iterdir())
    diagonal = ["mp_rank_00_000", "mp_rank_01_001"]
    assert folders == (diagonal if same_ranks else sorted([*diagonal, "mp_rank_00_001", "mp_rank_01_000"]))
    torchfile = module("megatron", "check").torchfile
    of = _values(original)
    _, count, _ = SHAPES[model]["tensors"]["decoder.layers.mlp.router.weight"]
    state = torchfile.load_pt((tmp_path / "out" / "release" / "mp_rank_01_001" / "model_optim_rng.pt").read_bytes())
    name, second = "decoder.layers.0.mlp.experts.linear_fc2.weight0", count // 2
    fused, single = "model.layers.0.mlp.experts.down_proj", f"model.layers.0.mlp.experts.{second}.down_proj.weight"
    whole = of[fused][second].T if fused in of else of[single]
    half = whole.shape[1] // 2
    assert np.array_equal(state["model"][name], whole if same_ranks else whole[:, half:])
    (tmp_path / "out" / "reshard.json").unlink()
    merge(tmp_path / "out", tmp_path / "merged")
    assert _weights(tmp_path / "merged") == _weights(original)


@pytest.mark.parametrize("form", ["megatron", "megatron-legacy"])
def test_inspect_says_what_there_is(form: str, tmp_path: Path) -> None:
    original = checkpoint("megatron", "llama")
    split(original, tmp_path / "out", tp=2, format=form)
    weights = [*(tmp_path / "out").rglob("__*.distcp"), *(tmp_path / "out").rglob("model_optim_rng.pt")]
    for _ in range(2):
        found = json.loads(command("inspect", tmp_path / "out", "--json").stdout)
        assert found["complete"] and found["format"] == form and found["files"] == len(weights), found
        assert not found["problems"] and found["bytes"] > 500_000
        (tmp_path / "out" / "reshard.json").unlink(missing_ok=True)


def test_experts_of_another_degree_are_refused(tmp_path: Path) -> None:
    """tp 4, ep 2, experts over 2 ranks each (``etp``): rank r has the experts of r // 2, and a half of each of them.

    Megatron-Core 0.16.1 names the files of such a run so: 00_000, 01_000, 02_001, 03_001.
    """
    import torch

    original, out = checkpoint("megatron", "mixtral"), tmp_path / "out"
    split(original, tmp_path / "dense", tp=4, ep=2, format="megatron-legacy")
    split(original, tmp_path / "experts", tp=2, ep=2, format="megatron-legacy")
    out.mkdir()
    shutil.copyfile(original / "config.json", out / "config.json")
    (out / "latest_checkpointed_iteration.txt").write_text("release")
    for rank in range(4):
        files = [
            tmp_path / of / f"release/mp_rank_{tp:02d}_{rank // 2:03d}/model_optim_rng.pt"
            for of, tp in (("dense", rank), ("experts", rank % 2))
        ]
        dense, experts = (torch.load(file, weights_only=True) for file in files)
        dense["model"] |= {name: part for name, part in experts["model"].items() if ".experts." in name}
        target = out / f"release/mp_rank_{rank:02d}_{rank // 2:03d}"
        target.mkdir(parents=True)
        torch.save(dense, target / "model_optim_rng.pt")
    done = command("merge", out, tmp_path / "merged")
    assert done.returncode == 2 and "the files of rank 2 of 8 are missing" in done.stderr
    assert "--expert-tensor-parallel-size" in done.stderr and "--ckpt-format torch_dist" in done.stderr
    for tp in range(4):  # a full grid of such files
        here, there = (out / f"release/mp_rank_{tp:02d}_{ep:03d}" for ep in (tp // 2, 1 - tp // 2))
        shutil.copytree(here, there)
    assert "linear_fc1.weight0' is F32 [56, 64], rank 0 of ep 2 x tp 4 has" in refused(
        "merge", out, tmp_path / "merged", code=1
    )
    assert not (tmp_path / "merged").exists()
