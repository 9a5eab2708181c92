"""Laws of tensors that state a shape: any of the same length, and back to the byte."""

from __future__ import annotations

import json
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reshard.formats.errors import CheckpointError
from reshard.formats.quantization.companions import restated

lengths = st.integers(1, 10**6)
pairs = st.tuples(lengths, lengths).flatmap(
    lambda full: st.tuples(st.just(full), st.lists(st.tuples(*(st.integers(1, n) for n in full)), max_size=4))
)


def state(shape, **more) -> bytes:
    return json.dumps({"quant_type": "nf4", "blocksize": 64, "dtype": "bfloat16", "shape": shape} | more).encode()


def integers(shape, kind: str) -> bytes:
    return struct.pack(f"<2{kind}", *shape)


@given(pairs, st.sampled_from(["U8", "I32", "I64"]))
def test_by_whatever_way_it_is_the_same_and_it_comes_back(shapes, dtype):
    full, others = shapes
    data = state(full, nested_offset=0.25) if dtype == "U8" else integers(full, {"I32": "i", "I64": "q"}[dtype])
    before, now = full, data
    for shape in (*others, full):
        now, before = restated(now, dtype, before, shape), shape
        assert now == restated(data, dtype, full, shape) and len(now) == len(data)
        if dtype == "U8":
            assert json.loads(now) == json.loads(data) | {"shape": list(shape)}
        else:
            assert now == integers(shape, {"I32": "i", "I64": "q"}[dtype])
    assert now == data


def test_spaces_keep_the_length():
    assert restated(b'{"shape": [1024, 4096]}', "U8", (1024, 4096), (512, 64)) == b'{"shape": [512, 64   ]}'


@pytest.mark.parametrize(
    "data, found",
    [
        (b"", None),
        (b"{", None),
        (b"\xff\xfe", None),
        (b"[" * 10**5, None),
        (b"[8, 6]", None),
        (b'{"shapes": [8, 6]}', None),
        (state([8, 7]), [8, 7]),
        (state(None), None),
        (state("8, 6"), "8, 6"),
    ],
)
def test_what_states_no_such_shape_is_refused_though_it_would_stay_as_it_is(data, found):
    for shape in ((8, 6), (4, 6)):
        with pytest.raises(CheckpointError) as error:
            restated(data, "U8", (8, 6), shape)
        assert error.value.message == f"states the shape {found} for a weight of shape [8, 6]"


@pytest.mark.parametrize(
    "data",
    [
        state([8, 6]).replace(b", 6", b",6"),
        state([8, 6]).replace(b": [8", b":[8"),
        state([8, 6]).replace(b"[8, 6]", b"[ 8, 6]"),
        state([8, 6]).replace(b"shape", b"sh\\u0061pe"),
        state([8, 6], more={"shape": [8, 6]}),
        state([8, 6]).replace(b": [8", b" : [8")[:-1] + b', "more": {"shape": [8, 6]}}',
        state([8, 6]).replace(b"}", b', "shape": [8, 6]}'),
    ],
)
def test_what_could_not_be_put_back_is_refused_unless_it_stays(data):
    assert restated(data, "U8", (8, 6), (8, 6)) == data
    with pytest.raises(CheckpointError, match="cannot be put back to the byte") as error:
        restated(data, "U8", (8, 6), (4, 6))
    assert error.value.hint is not None


def test_a_shape_of_more_digits_is_refused():
    with pytest.raises(CheckpointError, match="cannot be put back"):
        restated(state([8, 6]), "U8", (8, 6), (16, 6))


@pytest.mark.parametrize("data", [b"", integers((8, 6), "q")[:8], integers((8, 6), "i"), integers((8, 7), "q")])
def test_integers_that_are_not_the_shape(data):
    with pytest.raises(CheckpointError, match="states the shape"):
        restated(data, "I64", (8, 6), (4, 6))
