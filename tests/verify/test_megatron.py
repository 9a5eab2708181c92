"""``verify`` of Megatron's formats: every byte, on all meshes of the fixtures, and the forward of each rank."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from reshard.api import split
from reshard.source.opening import open_source
from reshard.verify.bytes.exact import open_shards, verify_exact
from tests.marks import one_of_each
from tests.programs.oracles import checkpoint
from tests.programs.test_megatron import CASES, DISTINCT, DISTRIBUTED, FORMS, golden, in_chunks, mesh_of_case


@pytest.mark.parametrize("case", one_of_each(CASES, lambda case: case.split("-")[1]))
def test_legacy_is_the_same_with_and_without_a_manifest(case: str, tmp_path: Path) -> None:
    model, spec, _ = case.split("-", 2)
    original = open_source(checkpoint("megatron", model))
    split(original.path, tmp_path / "out", **mesh_of_case(case), format=FORMS[spec])
    found = verify_exact(original, tmp_path / "out")
    assert found.verdict == "same", found
    (tmp_path / "out" / "reshard.json").unlink()
    found = verify_exact(original, tmp_path / "out")
    assert found.verdict == "same", found


@pytest.mark.parametrize("case", one_of_each(DISTINCT, lambda case: case.split("-")[1]))
def test_torch_dist_is_the_same_with_and_without_a_manifest(case: str, tmp_path: Path) -> None:
    model, spec, _ = case.split("-", 2)
    original = open_source(checkpoint("megatron", model))
    split(original.path, tmp_path / "out", tp=mesh_of_case(case)["tp"], format=DISTRIBUTED[spec])
    found = verify_exact(original, tmp_path / "out")
    assert found.verdict == "same", found
    (tmp_path / "out" / "reshard.json").unlink()
    found = verify_exact(original, tmp_path / "out")
    assert found.verdict == "same", found


@pytest.mark.parametrize("case", one_of_each(["deepseek_v3-te-tp2-ep2", "llama_kv2-te-tp4", "mixtral-local-tp2"]))
def test_what_megatron_wrote_is_compared(case: str, tmp_path: Path) -> None:
    original = open_source(checkpoint("megatron", case.split("-")[0]))
    for folder in (in_chunks(case, tmp_path / "chunks"), golden(case, tmp_path / "golden", "--legacy")):
        found = verify_exact(original, folder)
        assert found.verdict == "same", found


@pytest.mark.parametrize("form", ["megatron", "megatron-legacy"])
def test_one_bit_in_any_tensor_is_found_and_named(form: str, tmp_path: Path) -> None:
    """One bit of each stored tensor on each rank (or of each chunk) is another, also in padding."""
    original = open_source(checkpoint("megatron", "mixtral"))
    split(original.path, tmp_path / "out", tp=2, format=form)
    (tmp_path / "out" / "reshard.json").unlink()
    shards = open_shards(tmp_path / "out", original)
    held = [(rank, name, info) for rank, tensors in enumerate(shards.ranks) for name, info in tensors.items()]
    random = np.random.default_rng(0)
    for _, _, info in held:  # the lowest byte but one of an element
        at = info.offset + int(random.integers(0, info.nbytes // 4)) * 4 + 1
        with info.file.open("r+b") as file:
            file.seek(at)
            content = file.read(1)[0]
            file.seek(at)
            file.write(bytes([content ^ 4]))
    found = verify_exact(original, tmp_path / "out")
    assert {(damage.stored, damage.rank) for damage in found.damages} == {(name, rank) for rank, name, _ in held}
    assert all(damage.elements == 1 for damage in found.damages)
