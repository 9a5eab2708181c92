"""How ``tools/vllm_names.py`` compares what vLLM holds with what is written, where vLLM holds it in bfloat16."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from formats.files.safetensors import build_header
from reshard.api import split
from tests import store
from tools.vllm_names import (
    BITS,
    DIGIT,
    FIRST,
    PAGES,
    Case,
    _cast,
    _meshes,
    compare,
    digits_of,
    fixtures,
    held_in,
    make,
    places_of,
    read_page,
    to_document,
)
from tools.vllm_names import Verdict as Known

NARROW = ("alpha_n", "alpha_p")
"""Tensors of one element each, which vLLM holds in bfloat16."""


def test_digits_tell_all_numbers_apart_and_are_exact_in_bfloat16() -> None:
    numbers = FIRST + np.arange(0, 1 << 3 * BITS, 61, dtype="<u4")
    digits = [digits_of(numbers, place) for place in range(3)]
    assert (sum((digit - FIRST >> 16) << BITS * place for place, digit in enumerate(digits)) == numbers - FIRST).all()
    for digit in digits:
        assert (np.frombuffer(_cast(digit.tobytes()), "<u2").astype("<u4") << 16 == digit).all()
    assert len({*_cast(numbers.tobytes())}) < len(numbers), "of the numbers themselves it makes one"


def _observed(name: str, root: Path, swapped: bool) -> Case:
    """A case as if vLLM held, on one rank, what is written, with some tensors in bfloat16, and two of them swapped."""
    checkpoint = store.made(f"{name}-numbered", lambda folder: make(name, folder))
    (root / name / "tp1").mkdir(parents=True)
    split(checkpoint, root / name / "written", 1, form="vllm")
    held = {key: of for (_, key), of in held_in(root / name / "written").items()}
    if swapped:
        one, other = (next(key for key in held if key.endswith(end)) for end in NARROW)
        held[one], held[other] = held[other], held[one]
    found = {key: ("BF16", shape, _cast(data)) if key.endswith(NARROW) else (dtype, shape, data)
             for key, (dtype, shape, data) in held.items()}  # fmt: skip
    header = build_header([(key, dtype, shape) for key, (dtype, shape, _) in found.items()], {})
    (root / name / "tp1" / "model-rank-0-part-0.safetensors").write_bytes(
        header + b"".join(d for *_, d in found.values())
    )
    tensors = {key: ["float32" if key.endswith("_scale") else "bfloat16", shape] for key, (_, shape, _) in held.items()}
    (root / name / "built.json").write_text(json.dumps({"module": "apertus:Apertus", "tensors": tensors}))
    return Case(name, checkpoint, root / name, {"tp2": "not run", "tp4": "not run"})


@pytest.mark.parametrize("swapped", [False, True])
def test_an_order_that_bfloat16_hides_is_shown_by_the_digits(swapped: bool, tmp_path: Path) -> None:
    page = read_page(PAGES / "vllm.toml", to_document([], {}))
    plain = _observed("apertus", tmp_path, swapped)
    names = [f"apertus{DIGIT}{place}" for place in range(places_of(plain.checkpoint))]
    digits = tuple(_observed(name, tmp_path, swapped) for name in names)
    for too_few in ((), digits[:-1]):
        assert "not all of their digits were observed" in str(compare(replace(plain, digits=too_few), page))
    found = compare(replace(plain, digits=digits), page)
    assert found is None if not swapped else "has other elements in vLLM (tp 1)" in str(found)


def test_the_meshes_that_were_compared_are_those_of_both_fixtures() -> None:
    known = Known(["X", "x"], "", {"a": {"cut": 0}}, largest=2)
    assert _meshes(known, ()) == {"tp": 2}
    assert _meshes(known, ["tp4", "tp2-ep", "pp2-tp2"]) == {"tp": 4, "ep": 2, "pp": 2}
    assert _meshes(replace(known, lines={}, largest=4), ["tp2"]) == {"tp": None}
    assert sorted(fixtures()["lfm2"]) == ["tp1", "tp2", "tp4"]
