"""What training programs leave: each fixture that the programs wrote is merged and converted, element for element."""

from __future__ import annotations

import json
import math
import shutil
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.numpy import load_file

from reshard.api import inspect, merge, split
from reshard.formats.errors import CheckpointError, MismatchError
from reshard.formats.files.dcp import Distributed
from reshard.formats.files.deepspeed import universal_documents
from reshard.formats.files.manifest import MANIFEST
from reshard.formats.files.pickles import Global, Inert
from reshard.formats.files.torch_archive import archive_of, pickled_tensor
from reshard.formats.files.training import read_training
from reshard.source.opening import open_source
from reshard.verify.bytes.exact import verify_exact
from tests import store
from tests.marks import one_of_each
from tests.oracles.torchfile import load_dcp
from tests.programs.oracles import ORACLES
from tests.stores.store_server import StoreServer, upload
from tests.support import bytes_of, command, contents, write_checkpoint

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed")

CASES = (
    "accelerate-fsdp2-full-qwen2-w2", "accelerate-fsdp2-llama-w2", "bare-fsdp1-shardedtensor-qwen2-w3",
    "megatron_fsdp-llama-w3", "trainer-fsdp2-qwen2-w2", "transformers-distributed-llama-w2", "verl-fsdp1-llama-w1",
    "verl-fsdp1-llama-w2", "verl-fsdp1-origparams-qwen2-w3", "verl-fsdp2-frozen-llama-w2", "verl-fsdp2-llama-w2",
    "verl-fsdp2-qwen2-w3", "verl-fsdp2-qwen3_moe-hsdp2x2", "zero1-frozen-llama-w2", "zero1-llama-w2",
    "zero2-groups-frozen-llama-w3", "zero2-qwen2-w3", "zero2-qwen2-w3-universal", "zero3-llama-w3",
    "zero3-llama-w3-universal", "zero3-qwen2-w2",
)  # fmt: skip
INNER = {"accelerate": "checkpoint-1", "trainer": "checkpoint-1", "transformers": "checkpoint-1",
         "megatron_fsdp": "iter_0000001", "verl": "global_step_1/actor"}  # fmt: skip
WITHOUT_OPTIMIZER = {"bare-fsdp1-shardedtensor-qwen2-w3", "verl-fsdp1-llama-w1", "verl-fsdp2-qwen3_moe-hsdp2x2"}
BY_PARAMETER = {"transformers-distributed-llama-w2"}  # each has settings of its own
EMBEDDING = "model.embed_tokens.weight"


def fixtures() -> Path:
    """All cases and their references."""

    def make(path: Path) -> None:
        with tarfile.open(ORACLES / "trainers" / "fixtures.tar.xz") as archive:
            archive.extractall(path, filter="data")

    return store.made("trainers", make)


def given(case: str) -> Path:
    """The folder of a case that a user gives."""
    return fixtures() / case / INNER.get(case.partition("-")[0], "")


def copied(case: str, tmp_path: Path) -> Path:
    """The same, to be changed."""
    shutil.copytree(fixtures() / case, tmp_path / case)
    return tmp_path / case / INNER.get(case.partition("-")[0], "")


def config_of(case: str) -> Path | None:
    """The config of a case that has none of its own: that of another of its model."""
    folder = given(case)
    if (folder / "config.json").exists() or (folder / "huggingface").exists():
        return None
    model = json.loads((fixtures() / case / "case.json").read_text())["model"]
    other = {"llama": "verl-fsdp2-llama-w2", "qwen2": "verl-fsdp2-qwen2-w3"}[model]
    return given(other) / "huggingface"


def bf16(values: np.ndarray) -> np.ndarray:
    """Rounded to nearest even, as bits."""
    bits = values.view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def numbers(case: str) -> dict[str, np.ndarray]:
    """What a case has, ``weight|NAME`` and so on: floats, or the bits of BF16."""
    about = json.loads((fixtures() / case / "case.json").read_text())
    found = load_file(fixtures() / f"reference-{about['model']}-{about['seed']}.safetensors")
    frozen = "frozen" in case or EMBEDDING in about.get("frozen", [])
    if frozen:
        found = {key: value for key, value in found.items() if key.startswith("weight") or EMBEDDING not in key}
    if about["model"] == "qwen2":
        found["weight|lm_head.weight"] = found[f"weight|{EMBEDDING}"]
    whole = about.get("dtype") == "bfloat16"
    rounded = {key for key in found if whole or (frozen and about.get("bf16") and EMBEDDING in key)}
    return {key: bf16(value) if key in rounded else value for key, value in found.items()}


def by_expert(weights: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The names of the Hub: an expert's gate and up are the halves of its rows of gate_up_proj."""
    found: dict[str, np.ndarray] = {}
    for key, value in weights.items():
        stem = key.rpartition(".")[0]
        if key.endswith(".experts.gate_up_proj"):
            for number, both in enumerate(value):
                for part, half in zip(("gate", "up"), np.split(both, 2), strict=True):
                    found[f"{stem}.{number}.{part}_proj.weight"] = half
        elif key.endswith(".experts.down_proj"):
            found |= {f"{stem}.{number}.down_proj.weight": down for number, down in enumerate(value)}
        else:
            found[key] = value
    return found


def weights(case: str) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    """The Hugging Face checkpoint of a case: a tied table comes once."""
    found = {key[7:]: value for key, value in numbers(case).items() if key.startswith("weight|")}
    found.pop("lm_head.weight" if "qwen2" in case else "", None)
    dtypes = {np.dtype(np.uint16): "BF16", np.dtype(np.float32): "F32"}
    return {name: (dtypes[of.dtype], of.shape, of.tobytes()) for name, of in by_expert(found).items()}


# -- what the programs wrote -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", one_of_each(CASES, kind=lambda case: case.partition("-")[0]))
def test_it_is_merged(case: str, tmp_path: Path) -> None:
    merge(given(case), tmp_path / "merged", config=config_of(case))
    assert bytes_of(tmp_path / "merged") == weights(case)
    assert {path.name for path in (tmp_path / "merged").iterdir()} <= {
        "config.json", "generation_config.json", "model.safetensors",
    }  # fmt: skip


@pytest.mark.parametrize("case", one_of_each(CASES, kind=lambda case: case[:4]))
def test_the_optimizer_goes_with_it_by_name(case: str, tmp_path: Path) -> None:
    split(
        given(case),
        tmp_path / "out",
        tp=2,
        format=open_source(given(case), config=config_of(case)).format.name,
        config=config_of(case),
    )
    found = load_dcp(tmp_path / "out")
    expected = {
        (f"model.{name}" if kind == "weight" else f"optimizer.state.{name}.{kind}"): value
        for key, value in numbers(case).items()
        for kind, _, name in [key.partition("|")]
    }
    if case in WITHOUT_OPTIMIZER:
        expected = {name: value for name, value in expected.items() if name.startswith("model.")}
    assert {name for name in found.tensors if not name.endswith(".step")} == expected.keys()
    for name, value in expected.items():
        np.testing.assert_array_equal(found.tensors[name], value.astype(np.float64), err_msg=name)
    assert ("optimizer.param_groups.0.lr" in found.objects) == (case not in WITHOUT_OPTIMIZER | BY_PARAMETER)


def test_the_optimizer_is_not_cast(tmp_path: Path) -> None:
    case = "zero2-qwen2-w3"
    summary = split(given(case), tmp_path / "out", format="dcp", config=config_of(case), dtype="bf16")
    assert "states of training keep their dtypes" in str(summary)
    found, values = load_dcp(tmp_path / "out"), numbers(case)
    for key, value in values.items():
        kind, _, name = key.partition("|")
        stored = found.tensors[f"model.{name}" if kind == "weight" else f"optimizer.state.{name}.{kind}"]
        rounded = bf16(value) if kind == "weight" else value  # as bits
        np.testing.assert_array_equal(stored, rounded.astype(np.float64), err_msg=key)


@pytest.mark.parametrize("case", one_of_each(CASES, kind=lambda case: case[:4] == "zero"))
def test_it_is_cast_as_it_is_read(case: str, tmp_path: Path) -> None:
    """Without a step in between: what verl's own merger does unasked."""
    merge(given(case), tmp_path / "merged", config=config_of(case))
    merge(tmp_path / "merged", tmp_path / "narrow", dtype="bf16")
    merge(given(case), tmp_path / "direct", config=config_of(case), dtype="bf16")
    assert bytes_of(tmp_path / "direct") == bytes_of(tmp_path / "narrow")
    assert json.loads((tmp_path / "direct/config.json").read_text())["dtype"] == "bfloat16"


def test_torch_loads_the_state_of_a_run(tmp_path: Path) -> None:
    split(given("zero3-llama-w3"), tmp_path / "out", tp=2, format="dcp", config=config_of("zero3-llama-w3"))
    found = load_file(fixtures() / "reference-llama-1.safetensors")
    names = [key[7:] for key in found if key.startswith("weight|")]
    zeros: Callable[[str], Any] = lambda key: torch.zeros(found[key].shape)  # noqa: E731
    state: dict[str, Any] = {
        "model": {name: zeros(f"weight|{name}") for name in names},
        "optimizer": {
            "state": {
                name: {
                    "step": torch.tensor(0.0),
                    "exp_avg": zeros(f"exp_avg|{name}"),
                    "exp_avg_sq": zeros(f"exp_avg_sq|{name}"),
                }
                for name in names
            },
            "param_groups": [{"lr": 1.0, "betas": (0.0, 0.0), "params": []}],
        },
    }
    dcp.load(state, checkpoint_id=tmp_path / "out", no_dist=True)
    for name in names:
        assert torch.equal(state["model"][name], torch.from_numpy(found[f"weight|{name}"]))
        for kind in ("exp_avg", "exp_avg_sq"):
            assert torch.equal(state["optimizer"]["state"][name][kind], torch.from_numpy(found[f"{kind}|{name}"]))
        assert state["optimizer"]["state"][name]["step"] == 1
    (group,) = state["optimizer"]["param_groups"]
    assert group["betas"] == (0.9, 0.999) and sorted(group["params"]) == sorted(names)


@pytest.mark.parametrize("case", one_of_each(CASES))
def test_from_a_training_run_to_an_engine(case: str, tmp_path: Path) -> None:
    merge(given(case), tmp_path / "merged", config=config_of(case))
    split(given(case), tmp_path / "served", tp=2, format="vllm", config=config_of(case))
    split(tmp_path / "merged", tmp_path / "direct", tp=2, format="vllm")
    assert bytes_of(tmp_path / "served") == bytes_of(tmp_path / "direct")
    assert verify_exact(open_source(tmp_path / "merged"), tmp_path / "served").verdict == "same"


@pytest.mark.parametrize("case", one_of_each([*CASES, "dcp", "megatron", "megatron/release", "megatron-legacy"]))
def test_it_is_read_from_a_bucket_as_from_the_disk(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, config = tmp_path / case, write_checkpoint(tmp_path / "llama")
    if case in CASES:
        folder, config = given(case), config_of(case)
    else:
        run, format = folder if "/" not in case else folder.parent, case.partition("/")[0]
        split(config, run, tp=2 if format == "megatron-legacy" else 1, format=format)
        (run / MANIFEST).unlink()
        (run / "iter_0000009").mkdir()
        (run / "iter_0000009" / "__0_0.distcp").write_bytes(b"of another step")
    merge(folder, tmp_path / "of the disk", config=config)
    (tmp_path / "bucket").mkdir()
    with StoreServer(tmp_path / "bucket") as server:
        for name, value in server.environment.items():
            monkeypatch.setenv(name, value)
        merge(upload(folder, server, "run"), tmp_path / "of the bucket", config=config, cache_dir=tmp_path / "cache")
    assert contents(tmp_path / "of the bucket") == contents(tmp_path / "of the disk")
    downloaded = {path.name for path in (tmp_path / "cache").rglob("*")} - {"common.pt"}
    assert not [name for name in downloaded if name.endswith((".distcp", ".pt"))], "all are read by ranges"


@pytest.mark.parametrize(
    ("names", "wrong"),
    [
        ("../x", "'../x' is neither a number nor 'release'"),
        (
            "7",
            r"a folder of Megatron-LM's checkpoints \(iter_0000009/.metadata\), and no latest_checkpointed_iteration",
        ),
    ],
)
def test_a_bucket_s_tracker_that_names_no_step_is_refused(
    names: str, wrong: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = tmp_path / "bucket" / "run"
    (place / "iter_0000009").mkdir(parents=True)
    (place / "iter_0000009" / ".metadata").write_bytes(b"?")
    (place / "latest_checkpointed_iteration.txt").write_text(names)
    with StoreServer(tmp_path / "bucket") as server:
        for name, value in server.environment.items():
            monkeypatch.setenv(name, value)
        with pytest.raises(CheckpointError, match=wrong):
            merge("s3://bucket/run", tmp_path / "out", cache_dir=tmp_path / "cache")


def test_a_trainers_folder_is_verified_as_it_is(tmp_path: Path) -> None:
    case = "verl-fsdp2-qwen3_moe-hsdp2x2"
    merge(given(case), tmp_path / "merged")
    assert verify_exact(open_source(tmp_path / "merged"), given(case)).verdict == "same"


@pytest.mark.parametrize(
    ("case", "what"),
    [
        ("accelerate-fsdp2-llama-w2", "saved by accelerate or Trainer"),
        ("verl-fsdp2-qwen3_moe-hsdp2x2", "saved by verl or SkyRL: FSDP, 4 ranks, mesh ddp 2 x fsdp 2"),
        ("zero2-qwen2-w3", "saved by DeepSpeed: ZeRO-2, 3 ranks, step 1"),
        ("zero3-llama-w3-universal", "saved by DeepSpeed: Universal Checkpoint, step 1"),
        ("transformers-distributed-llama-w2", "saved by transformers"),
    ],
)
def test_inspect_says_whose_it_is(case: str, what: str) -> None:
    report = inspect(given(case))
    assert (report.kind, report.format, report.load, report.problems) == ("training checkpoint", what, None, [])
    assert (report.hint is None) == (config_of(case) is None)


def test_inspect_says_what_is_missing(tmp_path: Path) -> None:
    folder = copied("verl-fsdp2-qwen2-w3", tmp_path)
    (folder / "model_world_size_3_rank_1.pt").unlink()
    report = inspect(folder)
    assert (report.kind, report.format, report.complete) == ("training checkpoint", "saved from FSDP", False)
    assert report.problems == [f"{folder}: the model's file of rank 1 of 3 is missing"] and report.files == 8


def test_accelerates_files_of_ranks(tmp_path: Path) -> None:
    """Without a distributed checkpoint accelerate saves what verl does, under other names."""
    folder = copied("verl-fsdp2-qwen2-w3", tmp_path)
    (folder / "fsdp_config.json").unlink()
    for number in range(3):
        (folder / f"model_world_size_3_rank_{number}.pt").rename(folder / f"pytorch_model_fsdp_0_rank{number}.bin")
        (folder / f"optim_world_size_3_rank_{number}.pt").rename(folder / f"optimizer_0_rank{number}.bin")
    merge(folder, tmp_path / "merged")
    assert bytes_of(tmp_path / "merged") == weights("verl-fsdp2-qwen2-w3")
    for number in (0, 1, 2):
        (folder / f"optimizer_0_rank{number}.bin").unlink()
    (folder / "pytorch_model_fsdp_0_rank2.bin").unlink()
    with pytest.raises(MismatchError, match="a mesh of 3 ranks, and there are files of 2"):
        merge(folder, tmp_path / "again")


def write_rank(folder: Path, rank: int, rows: Any, module: str, placement: Inert) -> None:
    """The file of one of two ranks, which has these rows of a tensor of 5 x 3, as torch 2.4 or a later one saves it."""
    old = module.endswith("_tensor")
    spec = f"{module}.placement_types" if old else f"{module}._dtensor_spec"
    local, ranks = pickled_tensor(0, "a", "F32", rows.shape), pickled_tensor(1, "mesh", "I32", (2,))
    mesh = Inert("torch.distributed.device_mesh.DeviceMesh", (), {
        "device_type": "cuda", "mesh": ranks, "mesh_dim_names": ("fsdp",), "_coordinate_on_dim": [rank],
    })  # fmt: skip
    kind = Global(f"{module}.api.DTensor" if old else f"{module}.DTensor")
    placed = Inert(f"{spec}.DTensorSpec", (), {"mesh": mesh, "placements": (placement,)})
    state = ({}, {"_local_tensor": local, "_spec": placed})
    arguments = (Global("torch._utils._rebuild_wrapper_subclass"), kind, (kind, None, (5, 3), (3, 1)), state)
    laid = archive_of({"a": Inert("torch._tensor._rebuild_from_type_v2", arguments)}, [("a", rows.nbytes), ("mesh", 8)])
    content = bytearray(laid.size)
    for offset, part in (*laid.fixed, (dict(laid.places)["a"], rows.tobytes())):
        content[offset : offset + len(part)] = part
    (folder / f"model_world_size_2_rank_{rank}.pt").write_bytes(content)


@pytest.mark.parametrize("module", ["torch.distributed._tensor", "torch.distributed.tensor"])
def test_meshes_of_older_versions_of_torch(module: str, tmp_path: Path) -> None:
    """torch 2.4 has other names of its classes; up to 2.8 a mesh is the array of its ranks."""
    numbers = np.arange(5 * 3, dtype=np.float32).reshape(5, 3)
    for rank, rows in enumerate((numbers[:3], numbers[3:])):
        write_rank(tmp_path, rank, rows, module, Inert(f"{module}.placement_types.Shard", (), {"dim": 0}))
    whole = read_training(tmp_path).tensors["model.a"]
    assert (whole.shape, whole.dtype) == ((5, 3), "F32")
    for at, info in whole.chunks:
        rows = np.frombuffer(info.file.read_bytes()[info.offset :][: info.nbytes], np.float32).reshape(at.shape)
        np.testing.assert_array_equal(rows, numbers[at.offset[0] : at.end[0]])
    assert [at.offset for at, _ in whole.chunks] == [(0, 0), (3, 0)]


# -- where the config lies -------------------------------------------------------------------------------------------


def test_a_config_above_is_taken_without_what_else_lies_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = copied("trainer-fsdp2-qwen2-w2", tmp_path)
    shutil.copy(given("verl-fsdp2-qwen2-w3") / "huggingface" / "config.json", folder.parent)
    (folder.parent / "runs").mkdir()
    (folder.parent / "runs" / "log.txt").write_text("a log")
    (folder.parent / "tokenizer.json").write_text("{}")
    (folder.parent / "case.json").unlink()
    merge(folder, tmp_path / "merged")
    assert {path.name for path in (tmp_path / "merged").iterdir()} == {
        "config.json",
        "tokenizer.json",
        "model.safetensors",
    }
    monkeypatch.chdir(folder)
    merge(".", tmp_path / "from-within")
    assert contents(tmp_path / "from-within") == contents(tmp_path / "merged")


def test_without_a_config_it_is_asked_for(tmp_path: Path) -> None:
    done = command("merge", copied("zero3-llama-w3", tmp_path), tmp_path / "merged")
    assert done.returncode in (1, 2) and "config.json" in done.stderr and "--config DIR" in done.stderr
    assert not (tmp_path / "merged").exists()


# -- what does not belong together -----------------------------------------------------------------------------------

VERL, FLAT, ZERO = "verl-fsdp2-llama-w2", "verl-fsdp1-llama-w2", "zero2-qwen2-w3"
OPTIM = "global_step1/zero_pp_rank_{}_mp_rank_00_optim_states.pt"


def rename(old: str, new: str) -> Callable[[Path], object]:
    return lambda folder: (folder / old).rename(folder / new)


def copy(old: str, new: str, source: str | None = None) -> Callable[[Path], object]:
    return lambda folder: shutil.copy((given(source) if source else folder) / old, folder / new)


def remove(*names: str) -> Callable[[Path], object]:
    def change(folder: Path) -> None:
        for name in names:
            shutil.rmtree(folder / name) if (folder / name).is_dir() else (folder / name).unlink()

    return change


def replaced(name: str, old: bytes, new: bytes) -> Callable[[Path], object]:
    """Change bytes of a file, as many as there were."""

    def change(folder: Path) -> None:
        content = (folder / name).read_bytes()
        assert old in content and len(old) == len(new)
        (folder / name).write_bytes(content.replace(old, new))

    return change


def of_another_world(folder: Path) -> None:
    """Two of the files of three ranks, named as if they were all."""
    for number in range(3):
        (folder / f"optim_world_size_3_rank_{number}.pt").unlink()
        (folder / f"model_world_size_3_rank_{number}.pt").rename(folder / MODEL.format(number))
    remove(MODEL.format(2), "fsdp_config.json")(folder)


def endless(folder: Path) -> None:
    """One file, whose name says that there are billions."""
    for file in folder.glob("*.pt"):
        file.unlink()
    (folder / "model_world_size_4000000000_rank_7.pt").write_bytes(b"")


MODEL, STATES = "model_world_size_2_rank_{}.pt", "global_step1/mp_rank_00_model_states.pt"
ALONE = "an optimizer, and no model"
SHARD = "the pickle asks for 'torch.distributed.tensor.placement_types.shard'"
OF_ZERO_3 = "global_step1/bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt"
WRONG = {
    "a rank's file is missing": (VERL, remove(MODEL.format(0)), "the model's file of rank 0 of 2 is missing"),
    "an optimizer's file is missing": (VERL, remove("optim_world_size_2_rank_1.pt"), "optimizer's file of rank 1 of 2"),
    "a rank's file is there twice": (VERL, copy(MODEL.format(0), MODEL.format(1)), "the file is of rank 0, its name"),
    "a file of another world": (VERL, copy(MODEL.format(0), "model_world_size_3_rank_0.pt"), "different numbers of"),
    "other settings": (VERL, replaced("fsdp_config.json", b'size": 2', b'size": 4'), "different numbers of ranks"),
    "settings without a rank": (VERL, replaced("fsdp_config.json", b'size": 2', b'size":-1'), "world_size should be"),
    "a file of a world without end": ("bare-fsdp1-shardedtensor-qwen2-w3", endless, "rank 0 of 4000000000 is missing"),
    "another world inside": ("verl-fsdp2-qwen2-w3", of_another_world, "a mesh of 3 ranks, and there are files of 2"),
    "ranks of another world, sharded": ("bare-fsdp1-shardedtensor-qwen2-w3", copy(
        "model_world_size_3_rank_0.pt", "model_world_size_3_rank_1.pt"), "the file is of rank 0 of 3, its name says"),
    "a name that is not known": (VERL, replaced(MODEL.format(1), b"Shard", b"shard"), SHARD),
    "an optimizer without its model": (VERL, remove(MODEL.format(0), MODEL.format(1)), ALONE),
    "accelerate's optimizer alone": ("accelerate-fsdp2-llama-w2", remove("pytorch_model_fsdp_0"), ALONE),
    "its whole file alone": ("accelerate-fsdp2-full-qwen2-w2", remove("pytorch_model_fsdp.bin"), ALONE),
    "DeepSpeed's optimizer alone": (ZERO, remove(STATES), ALONE),
    "a partition is missing": (ZERO, remove(OPTIM.format(1)), "the file of rank 1 is missing"),
    "the last partition is missing": (ZERO, remove(OPTIM.format(2)), "it is one of 3 ranks, and there are files of 2"),
    "a partition is there twice": (ZERO, copy(OPTIM.format(0), OPTIM.format(2)), "goes on in the list of rank 2, and"),
    "a partition of another stage": (ZERO, copy(OF_ZERO_3, OPTIM.format(1), "zero3-llama-w3"), "of different stages"),
}  # fmt: skip


@pytest.mark.parametrize("what", WRONG)
def test_it_is_refused_in_one_line(what: str, tmp_path: Path) -> None:
    case, change, said = WRONG[what]
    folder = copied(case, tmp_path)
    change(folder)
    done = command("merge", folder, tmp_path / "merged", *(("--config", config_of(case)) if config_of(case) else ()))
    assert done.returncode in (1, 2) and said in done.stderr, done.stderr
    assert done.stderr.count("Error:") == 1 and len(done.stderr.strip().splitlines()) <= 2
    assert {path.name for path in tmp_path.iterdir()} == {case}


@pytest.mark.parametrize("parts", [0, 1 << 40, 2.0, None])
def test_a_placement_in_endless_parts_is_refused(parts: object, tmp_path: Path) -> None:
    numbers, module = np.zeros((5, 3), np.float32), "torch.distributed.tensor"
    for rank, rows in enumerate((numbers[:3], numbers[3:])):
        strided = Inert(f"{module}.placement_types._StridedShard", (), {"dim": 0, "split_factor": parts})
        write_rank(tmp_path, rank, rows, module, strided)
    with pytest.raises(MismatchError, match="the placement _StridedShard does not say which elements the rank holds"):
        read_training(tmp_path)


def test_a_shape_of_thousands_of_dimensions_is_refused(tmp_path: Path) -> None:
    shapes, parts = {"w": (1,) * 3000}, {"w": torch.ones(1)}
    state = {"module": {}, "frozen_param_shapes": shapes, "frozen_param_fragments": parts}
    torch.save(state, tmp_path / "mp_rank_00_model_states.pt")
    with pytest.raises(CheckpointError, match="its param_shapes are no shapes"):
        read_training(tmp_path)


@pytest.mark.parametrize("ranks", [math.inf, math.nan, "two", [2]])
def test_a_number_of_ranks_that_is_none_is_refused(ranks: object, tmp_path: Path) -> None:
    torch.save({"module": {"w": torch.ones(1)}, "mp_world_size": ranks}, tmp_path / "mp_rank_00_model_states.pt")
    with pytest.raises(CheckpointError, match="what its files hold is not as the program saves it"):
        read_training(tmp_path)


@pytest.mark.parametrize("step", [math.inf, math.nan])
def test_a_step_that_is_no_number_is_refused(step: float, tmp_path: Path) -> None:
    saved = Distributed(tmp_path, {}, {"optimizer.state.w.step": step}, {}, {})
    with pytest.raises(MismatchError, match="its parameters have done"):
        dict(universal_documents({"w": (1,)}, ["w"], {}, saved))


def unfolding(depth: int, kind: type = list) -> Any:
    """A list of two lists, which are one, and so on."""
    value = kind([1])
    for _ in range(depth):
        value = kind([value, value])
    return value


@pytest.mark.parametrize("kind", ["doubled", "endless", "deep", "broad"])
def test_settings_that_unfold_without_end_are_left_behind(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A few kB of a pickle may be a list of terabytes, of lists that come again."""
    monkeypatch.setattr("reshard.formats.files.pickles._MOST_PLAIN", 1000)
    value: list[Any] = unfolding(40) if kind == "doubled" else [1]
    for _ in range({"deep": 200, "broad": 6}.get(kind, 0)):
        value = [value] * (500 if kind == "broad" else 1)
    if kind == "endless":
        value.append(value)
    if kind == "broad":
        torch.save({"module": {"w": torch.ones(3)}, "further": value}, tmp_path / "mp_rank_00_model_states.pt")
    else:
        group = {"lr": 0.5, "params": [0], "further": value}
        torch.save({"w": torch.ones(3)}, tmp_path / "pytorch_model_fsdp.bin")
        torch.save({"state": {}, "param_groups": [group]}, tmp_path / "optimizer.bin")
    saved = read_training(tmp_path)
    kept = [] if kind == "broad" else [f"optimizer.param_groups.0.{key}" for key in ("lr", "params")]
    assert ([*saved.tensors], [*saved.objects]) == (["model.w"], kept)


def test_what_unfolds_without_end_is_not_compared(tmp_path: Path) -> None:
    """Neither as the number of a parameter nor as the number of steps."""
    (ranks := tmp_path / "ranks").mkdir()
    group = {"lr": 0.5, "params": [unfolding(40, tuple)]}
    torch.save({"w": torch.ones(3)}, ranks / "pytorch_model_fsdp.bin")
    torch.save({"state": {0: {"exp_avg": torch.ones(3)}}, "param_groups": [group]}, ranks / "optimizer.bin")
    assert [*read_training(ranks).tensors] == ["model.w", "optimizer.state.0.exp_avg"]
    for rank in range(2):
        file = tmp_path / f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt"
        torch.save({"module": {"w": torch.ones(3)}, "global_steps": unfolding(40)}, file)
    assert [*read_training(tmp_path).tensors] == ["model.w"]
