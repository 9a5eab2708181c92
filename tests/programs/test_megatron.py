"""Megatron-Core's checkpoints: what is written is what it holds itself, what it wrote is read, and the rest refused."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from formats.files.dcp import read_distributed
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
