"""How ``tools/engine_names.py`` compares what vLLM holds with what is written, where vLLM holds it in bfloat16."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from unittest import mock

import numpy as np
import pytest

from reshard.api import merge, split
from reshard.formats.errors import PlanError
from reshard.formats.files.safetensors import build_header
from reshard.formats.notation.format_file import READ
from reshard.source.opening import open_source
from reshard.verify.bytes.exact import verify_exact
from tests import store
from tests.support import contents
from tools.engine_names import (
    BITS,
    DIGIT,
    FIRST,
    PROGRAMS,
    Case,
    _cast,
    _meshes,
    _ones,
    compare,
    digits_of,
    fixtures,
    held_in,
    make,
    places_of,
    read_format,
    to_documents,
)
from tools.engine_names import Verdict as Known

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
    split(checkpoint, root / name / "written", tp=1, format="vllm")
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
    format = read_format(PROGRAMS / "vllm.toml", to_documents([], {"modules": {}, "version": ""})[0])
    plain = _observed("apertus", tmp_path, swapped)
    names = [f"apertus{DIGIT}{place}" for place in range(places_of(plain.checkpoint))]
    digits = tuple(_observed(name, tmp_path, swapped) for name in names)
    for too_few in ((), digits[:-1]):
        assert "not all of their digits were observed" in str(compare(replace(plain, digits=too_few), format))
    found = compare(replace(plain, digits=digits), format)
    assert found is None if not swapped else "has other elements in vLLM (tp 1)" in str(found)


def test_the_meshes_that_were_compared_are_those_of_both_fixtures() -> None:
    known = Known(["X", "x"], "", {"a": {"cut": 0}}, largest=2)
    assert _meshes(known, ()) == {"tp": 2}
    assert _meshes(known, ["tp4", "tp2-ep", "pp2-tp2"]) == {"tp": 4, "ep": 2, "pp": 2}
    assert _meshes(replace(known, lines={}, largest=4), ["tp2"]) == {"tp": None}
    assert sorted(fixtures()["lfm2"]) == ["tp1", "tp2", "tp4"]


ONES = [((), (6, 4)), ((0,), (1, 6, 4)), ((1,), (6, 1, 4)), ((0, 3), (1, 6, 4, 1))]


@pytest.mark.parametrize(("ones", "shape"), ONES)
@pytest.mark.parametrize("before", ["1 (kv group) head", "(kv group) 1 head", "(kv group) head 1", "(kv group) head"])
def test_a_dimension_of_length_1_comes_and_goes(
    before: str, ones: tuple[int, ...], shape: tuple[int, ...], tmp_path: Path
) -> None:
    """What is written has it where the line says, on every rank, and the way back restores the original's."""
    model, lengths = tmp_path / "model", {"heads": 6, "head": 4, "1": 1}
    whole = [lengths[word] for word in before.replace("(kv group)", "heads").split()]
    model.mkdir()
    (model / "config.json").write_text(json.dumps({"model_type": "toy", "kv": 3, "group": 2, "head": 4}))
    data = np.arange(24, dtype="<f4")
    (model / "model.safetensors").write_bytes(build_header([("w.weight", "F32", tuple(whole))], {}) + data.tobytes())
    plan = tmp_path / "toy.toml"
    plan.write_text(
        'model_types = ["toy"]\npartial = true\n[sizes]\nkv = "kv"\ngroup = "group"\nhead = "head"\n'
        f'[parallel]\ntp = [["kv", "group"]]\n[tensors]\n"w.weight" = "{before}"\n'
    )
    line = {"types": ["toy"], "tensors": {"v.weight": {"from": "w.weight", "ones": [*ones]}}}
    format = read_format(PROGRAMS / "vllm.toml", {"lines": [line], "meshes": {"toy": {"tp": None}}})
    with mock.patch.dict(READ, {"vllm": format}):
        for tp in (1, 3):
            out = tmp_path / f"out{tp}"
            split(model, out, tp=tp, format="vllm", plan_file=plan)
            held = held_in(out)
            place = shape.index(6)
            assert {of[1] for of in held.values()} == {(*shape[:place], 6 // tp, *shape[place + 1 :])}
            joined = b"".join(held[rank, "v.weight"][2] for rank in range(tp))
            assert joined == data.tobytes()
            assert verify_exact(open_source(model, plan_file=plan), out).verdict == "same"
            merge(out, tmp_path / f"merged{tp}", plan_file=plan)
            assert contents(tmp_path / f"merged{tp}") == contents(model)


def test_ones_are_found_where_shapes_differ_in_them_alone() -> None:
    assert _ones((6,), (1, 6)) == {"ones": []}
    assert _ones((1, 6), (6,)) == {"ones": [0]}
    assert _ones((6, 1, 4), (1, 6, 4)) == {"ones": [1]}
    assert _ones((6, 4), (6, 4)) == {} == _ones((4, 6), (6, 4)) == _ones((24,), (6, 4))


def test_ones_are_for_what_is_made_of_one_tensor() -> None:
    line = {"types": ["toy"], "tensors": {"v": {"from": ["a", "b"], "ones": []}}}
    with pytest.raises(PlanError, match="'ones' is for what is made of one tensor"):
        read_format(PROGRAMS / "vllm.toml", {"lines": [line]})
