"""Megatron-Core's checkpoints: what is written is what it holds itself, what it wrote is read, and the rest refused."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest

from formats.files.boxes import At
from formats.files.dcp import Chunk, Stored, build_chunks, build_metadata, read_distributed
from reshard.api import Access, merge, split
from tests.programs.oracles import ORACLES, checkpoint, module, problem
from tests.programs.test_oracles import tensors_of
from tests.support import contents

CASES = sorted(path.stem for path in (ORACLES / "megatron").glob("*.npz"))
FORMS = {"te": "megatron-legacy", "teseq": "megatron-legacy-sequential", "local": "megatron-legacy-local"}
DISTRIBUTED = {"te": "megatron", "teseq": "megatron", "local": "megatron-local"}


def mesh_of_case(case: str) -> dict[str, Any]:
    """The arguments of ``split`` for a case's mesh."""
    found = {
        name: int(degree)
        for name, degree in re.findall(r"-(tp|pp|ep|etp)(\d+)", case.partition("-")[2].replace("-", "--"))
    }
    same = found.pop("etp", 0) == 1
    return {"tp": 1, **found, "same_ranks": same}


def _weights(folder: Path) -> dict[str, bytes]:
    return tensors_of(folder.glob("*.safetensors"))


def golden(case: str, path: Path, *options: str) -> Path:
    """What Megatron-Core wrote for a case, from its golden layout; without a config.json."""
    model = checkpoint("megatron", case.split("-")[0])
    with mock.patch("sys.argv", ["write_minimal.py", case, str(model), str(path), *options]):
        module("megatron", "write_minimal").main()
    return path


@pytest.mark.parametrize("case", CASES)
def test_legacy_is_what_megatron_holds_and_comes_back(case: str, tmp_path: Path) -> None:
    model, spec, _ = case.split("-", 2)
    original = checkpoint("megatron", model)
    split(original, tmp_path / "out", **mesh_of_case(case), form=FORMS[spec])
    assert problem("megatron", case, tmp_path / "out") is None
    merge(tmp_path / "out", tmp_path / "merged")
    assert contents(tmp_path / "merged") == contents(original)
    (tmp_path / "out" / "reshard.json").unlink()
    merge(tmp_path / "out", tmp_path / "without")
    assert _weights(tmp_path / "without") == _weights(original)


@pytest.mark.parametrize("case", CASES)
def test_legacy_that_megatron_wrote_is_read(case: str, tmp_path: Path) -> None:
    original = checkpoint("megatron", case.split("-")[0])
    golden(case, tmp_path / "golden", "--legacy")
    merge(tmp_path / "golden", tmp_path / "merged", access=Access(config=original))
    assert _weights(tmp_path / "merged") == _weights(original)


@pytest.mark.parametrize("case", CASES)
def test_torch_dist_is_what_megatron_holds_and_comes_back(case: str, tmp_path: Path) -> None:
    """The mesh says how the vocabulary is padded, and what chunks there are."""
    original, mesh = checkpoint("megatron", case.split("-")[0]), mesh_of_case(case)
    split(original, tmp_path / "out", mesh["tp"], form=DISTRIBUTED[case.split("-")[1]])
    assert problem("megatron", case, tmp_path / "out") is None
    merge(tmp_path / "out", tmp_path / "merged")
    assert contents(tmp_path / "merged") == contents(original)
    (tmp_path / "out" / "reshard.json").unlink()
    merge(tmp_path / "out", tmp_path / "without")
    assert _weights(tmp_path / "without") == _weights(original)


@pytest.mark.parametrize("case", CASES)
def test_torch_dist_that_megatron_wrote_is_read(case: str, tmp_path: Path) -> None:
    original = checkpoint("megatron", case.split("-")[0])
    golden(case, tmp_path / "golden")
    merge(tmp_path / "golden", tmp_path / "merged", access=Access(config=original))
    assert _weights(tmp_path / "merged") == _weights(original)


@pytest.mark.parametrize("case", [case for case in CASES if case.endswith("te-tp1")])
def test_extra_states_are_written_on_request(case: str, tmp_path: Path) -> None:
    """Every module that Megatron-Core asks for a state has one, and none has that it does not ask for."""
    cases = json.loads((ORACLES / "megatron" / "cases.json").read_text())
    split(checkpoint("megatron", case.split("-")[0]), tmp_path / "out", 1, form="megatron", extra_state=True)
    found = read_distributed(tmp_path / "out" / "release").objects
    wanted = set(cases[case]["dist_objects"])
    assert found.keys() == wanted


def in_chunks(case: str, path: Path) -> Path:
    """What Megatron-Core wrote for a case, in its own chunks: those of equal number lie in one file."""
    check, cases = module("megatron", "check"), json.loads((ORACLES / "megatron" / "cases.json").read_text())
    flat = np.concatenate([np.zeros(1, np.float32), *_numbers(case)])
    files: dict[int, list[tuple[Chunk, bytes]]] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    for key, ids in check.golden(case, "dist").items():
        shapes[key] = ids.shape
        for number, (offset, shape) in enumerate(cases[case]["dist_chunks"][key]):
            box = tuple(slice(o, o + n) for o, n in zip(offset, shape, strict=True))
            data = flat[ids[box]].tobytes()
            files.setdefault(number, []).append((Chunk(key, "F32", At(tuple(offset), tuple(shape)), len(data)), data))
    tensors: dict[str, tuple[str, tuple[int, ...], list[Stored]]] = {k: ("F32", s, []) for k, s in shapes.items()}
    folder = path / "iter_0000007"
    folder.mkdir(parents=True)
    for number, chunks in files.items():
        laid, name = build_chunks([chunk for chunk, _ in chunks]), f"__{number}_0.distcp"
        content = bytearray(laid.size)
        for offset, part in laid.fixed:
            content[offset : offset + len(part)] = part
        for (_, offset), (chunk, data) in zip(laid.places, chunks, strict=True):
            content[offset : offset + len(data)] = data
            tensors[chunk.name][2].append(Stored(chunk.at, name, *laid.ranges[chunk.name]))
        (folder / name).write_bytes(content)
    (folder / ".metadata").write_bytes(build_metadata(tensors))
    (path / "latest_checkpointed_iteration.txt").write_text("7")
    return path


def _numbers(case: str) -> list[Any]:
    """The elements of the case's checkpoint, in the order of their numbers."""
    shapes = json.loads((ORACLES / "megatron" / "models.json").read_text())[case.split("-")[0]]["tensors"]
    return [values.ravel() for values in module("megatron", "make_checkpoint").id_tensors(shapes).values()]


@pytest.mark.parametrize("case", CASES)
def test_the_chunks_that_megatron_wrote_are_read(case: str, tmp_path: Path) -> None:
    original = checkpoint("megatron", case.split("-")[0])
    merge(in_chunks(case, tmp_path / "chunks"), tmp_path / "merged", access=Access(config=original))
    assert _weights(tmp_path / "merged") == _weights(original)


@pytest.mark.parametrize("model", ["llama", "mixtral", "deepseek_v3"])
def test_a_tensor_for_each_layer_and_expert(model: str, tmp_path: Path) -> None:
    original = checkpoint("megatron", model)
    split(original, tmp_path / "out", 2, form="megatron-singleton")
    names = read_distributed(tmp_path / "out" / "release").tensors
    assert "decoder.layers.0.mlp.linear_fc1.weight_w" in names or model == "mixtral"
    assert "decoder.layers.1.mlp.experts.experts.3.linear_fc1.weight_v" in names or model == "llama"
    (tmp_path / "out" / "reshard.json").unlink()
    merge(tmp_path / "out", tmp_path / "merged")
    assert _weights(tmp_path / "merged") == _weights(original)
