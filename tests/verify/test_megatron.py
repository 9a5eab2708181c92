"""``verify`` of Megatron's formats: every byte, on all meshes of the fixtures, and the forward of each rank."""

from __future__ import annotations

from pathlib import Path

import pytest

from reshard.api import split
from reshard.storage.source import open_source
from tests.programs.oracles import checkpoint
from tests.programs.test_megatron import CASES, FORMS, mesh_of_case
from verify.bytes.exact import verify_exact


@pytest.mark.parametrize("case", CASES)
def test_legacy_is_the_same_with_and_without_a_manifest(case: str, tmp_path: Path) -> None:
    model, spec, _ = case.split("-", 2)
    original = open_source(checkpoint("megatron", model))
    split(original.path, tmp_path / "out", **mesh_of_case(case), form=FORMS[spec])
    found = verify_exact(original, tmp_path / "out")
    assert found.verdict == "same", found
    (tmp_path / "out" / "reshard.json").unlink()
    found = verify_exact(original, tmp_path / "out")
    assert found.verdict == "same", found
