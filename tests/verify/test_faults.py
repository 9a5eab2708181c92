"""The forward alone sees what is wrong with shards and where, and says nothing against correct ones.

A part of what ``python -m benchmarks.faults`` measures; docs/explanation/evidence.md has all of it.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.faults import ALL, check, damaged, largest, pair_of, place_of_row
from benchmarks.zoo_forward import result, to_markdown
from reshard.formats.errors import ReshardError
from reshard.verify.forward.compare import ForwardOptions
from reshard.verify.forward.noise import LIMIT
from tests.marks import one_of_each, thorough
from tests.verify.faults import FAULTS
from tests.verify.forwards import run_forwards
from tests.verify.test_exact import EXEMPT
from tests.verify.test_forward import QUICK

MODELS = ("llama", "gpt2", "mixtral")
CLEAR = 50.0  # what the faults measure at least, in float32: no one of them is seen by luck


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("power")


@pytest.mark.parametrize("model", one_of_each(MODELS))
def test_every_fault_is_seen_and_its_layer_named(model: str, root: Path) -> None:
    cases = damaged(root, model, 2, "float32", ALL)
    assert {case.fault for case in cases} & {*FAULTS} == {*FAULTS} - EXEMPT[model]
    for found in check(cases, QUICK):
        case = found.case
        assert found.refused is None, (case.fault, found.refused)
        assert found.is_named, (case.fault, case.place, found.named, found.ratio)
        assert found.ratio > CLEAR > LIMIT, (case.fault, found.ratio)


@thorough
def test_what_16_bits_hide_is_seen_in_float32(root: Path) -> None:
    """A weight rounded to fewer bits than bfloat16 has is near the noise of bfloat16, but not near that of float32."""
    cases = [
        case
        for model in MODELS
        for case in damaged(root, model, 2, "bfloat16", ["lower_precision", "lowest_exponent_bit"])
    ]
    assert len(cases) == 6
    for found in check(cases, replace(QUICK, compute_dtype="float32")):
        assert found.is_named and found.ratio > CLEAR, (found.case.model, found.case.fault, found.ratio)


@pytest.mark.parametrize("seed", one_of_each([1, 2]))
def test_correct_shards_raise_no_alarm(seed: int, root: Path) -> None:
    runs = [(model, dtype) for model in MODELS for dtype in ("float32", "bfloat16")]
    reports = run_forwards(
        [pair_of(root, model, 2, dtype) for model, dtype in runs], ForwardOptions(seed=seed, draws=3)
    )
    for run, report in zip(runs, reports, strict=True):
        assert report.is_same, (run, report.verdict)
        assert largest(report) <= LIMIT


def test_the_zoo_counts_what_is_special_about_a_run(root: Path) -> None:
    """What ``python -m benchmarks.zoo_forward`` puts into docs/explanation/evidence.md."""
    runs = [("llama-tied", 2, "float32"), ("llama", 8, "float32")]
    found = [result(run, pair_of(root, *run), ReshardError(f"{root}/x: not run")) for run in runs]
    assert [(r.verdict, r.first, r.tied, r.padded, r.shares) for r in found] == [
        ("refused", "x: not run", True, False, False),
        ("refused", "x: not run", False, True, True),
    ]
    same = [replace(r, verdict="same", ratio=1.25, first=None) for r in found]
    assert to_markdown(same).splitlines()[-2:] == [
        "| tp 2, float32 | 1 | 1 | 1.25 (llama-tied) | 1 | 0 | 0 |",
        "| tp 8, float32 | 1 | 1 | 1.25 (llama) | 0 | 1 | 1 |",
    ]
    assert to_markdown([*same, *found]).splitlines()[-2:] == [
        "- llama, float32, tp 8: refused: x: not run",
        "- llama-tied, float32, tp 2: refused: x: not run",
    ]


def test_places_of_rows() -> None:
    names = {
        "embedding": "embedding",
        "model.layers.1.self_attn.o_proj": "layer 1",
        "transformer.h.12": "layer 12",
        "model.layers.1.mlp.gate choice 1": "layer 1",
        "logits": "logits",
    }
    assert {name: place_of_row(name) for name in names} == names
