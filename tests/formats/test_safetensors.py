"""The format is what it refuses: each malformed file is built here, and its message read."""

from __future__ import annotations

import json
import math
import random
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import deserialize
from safetensors.torch import save, save_file

from reshard.formats.documents import strict_json
from reshard.formats.errors import CheckpointError
from reshard.formats.files.safetensors import (
    DTYPE_BITS,
    Header,
    _read_any,
    _read_usual,
    build_header,
    parse_header,
    read_header,
    tensor_bytes,
)
from tests.marks import examples

F32 = {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]}


def raw(header: object, declared: int | None = None) -> bytes:
    """A header as bytes, with any JSON (or bytes) inside and any length in front."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if declared is None else declared) + text


def write(folder: Path, header: object, data: bytes = b"\0" * 16, declared: int | None = None) -> Path:
    path = folder / "model.safetensors"
    path.write_bytes(raw(header, declared) + data)
    return path


def refusal(path: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        read_header(path)
    for line in (caught.value.message, caught.value.hint or ""):
        assert "\n" not in line
    assert str(path) in caught.value.message
    return caught.value.message


def refused_by_the_library(path: Path) -> bool:
    try:
        deserialize(path.read_bytes())
    except Exception:
        return True
    return False


def entry(**changes: Any) -> dict[str, Any]:
    return {"w": {**F32, **changes}}


def test_a_valid_file(tmp_path: Path) -> None:
    path = write(tmp_path, {"__metadata__": {"format": "pt"}, "w": F32})
    header = read_header(path)
    (info,) = header.tensors.values()
    assert (info.name, info.dtype, info.shape, info.file, info.nbytes) == ("w", "F32", (2, 2), path, 16)
    assert info.offset == len(header.raw)
    assert header.metadata == {"format": "pt"}
    assert path.read_bytes().startswith(header.raw)
    assert parse_header(header.raw, path, None) == header


# what each file should say, beside its own name
REFUSED: dict[str, tuple[object, str]] = {
    "unknown dtype": (entry(dtype="F31"), "tensor 'w': unknown dtype 'F31'"),
    "dtype of another type": (entry(dtype=["F32"]), "tensor 'w': unknown dtype"),
    "negative size": (entry(shape=[-2, -2]), "tensor 'w': the shape should be a list of sizes and is [-2, -2]"),
    "fractional size": (entry(shape=[2.0, 2]), "tensor 'w': the shape"),
    "boolean size": (entry(shape=[True, 4]), "tensor 'w': the shape"),
    "shape no list": (entry(shape=4), "tensor 'w': the shape"),
    "size beyond 64 bits": (entry(shape=[0, 2**63]), "tensor 'w': the shape"),
    "offsets reversed": (entry(data_offsets=[16, 0]), "tensor 'w': data_offsets are reversed: [16, 0]"),
    "offsets negative": (entry(data_offsets=[-16, 0]), "tensor 'w': data_offsets should be [begin, end]"),
    "offsets fractional": (entry(data_offsets=[0, 16.0]), "tensor 'w': data_offsets should be"),
    "three offsets": (entry(data_offsets=[0, 8, 16]), "tensor 'w': data_offsets should be"),
    "offsets no list": (entry(data_offsets="ab"), "tensor 'w': data_offsets should be"),
    "too few bytes": (entry(data_offsets=[0, 12]), "shape [2, 2] has 16 bytes; its data_offsets [0, 12] span 12"),
    "too many bytes": (entry(data_offsets=[0, 20]), "shape [2, 2] has 16 bytes; its data_offsets [0, 20] span 20"),
    "not whole bytes": (entry(dtype="F4", shape=[3], data_offsets=[0, 2]), "1.5 bytes, not a whole number"),
    "hole at the start": (entry(data_offsets=[8, 24]), "tensor 'w' leaves a hole of 8 bytes"),
    "a name of two lines": ({"a\nb\x1b": {**F32, "shape": [5]}}, r"tensor 'a\nb\x1b': F32 of shape [5] has 20 bytes"),
    "a shape nested deeply": (
        json.dumps(entry(shape=0)).replace("0,", "[" * 900 + "]" * 900 + ",", 1).encode(),
        "tensor 'w': the shape",
    ),
    "no dtype": ({"w": {"shape": [4], "data_offsets": [0, 16]}}, "tensor 'w' has no 'dtype'"),
    "no shape": ({"w": {"dtype": "F32", "data_offsets": [0, 16]}}, "tensor 'w' has no 'shape'"),
    "no offsets": ({"w": {"dtype": "F32", "shape": [4]}}, "tensor 'w' has no 'data_offsets'"),
    "entry no object": ({"w": [1]}, "tensor 'w' should be an object"),
    "entry null": ({"w": None}, "tensor 'w' should be an object"),
    "overlap": ({"v": F32, "w": {**F32, "data_offsets": [8, 24]}}, "tensor 'w' overlaps what lies before it"),
    "same bytes twice": ({"v": F32, "w": F32}, "tensor 'w' overlaps what lies before it: it begins at byte 0"),
    "hole": ({"v": F32, "w": {**F32, "data_offsets": [20, 36]}}, "'w' leaves a hole of 4 bytes: it begins at byte 20"),
    "out of range": ({"w": {**F32, "shape": [2**40], "data_offsets": [0, 2**42]}}, "bytes are missing"),
    "metadata no strings": ({"__metadata__": {"a": 1}, "w": F32}, "should map strings to strings, but 'a' is 1"),
    "metadata no object": ({"__metadata__": ["a"], "w": F32}, "__metadata__ should map strings to strings and is"),
    "metadata null": ({"__metadata__": None, "w": F32}, "__metadata__ should map strings to strings and is null"),
    "not UTF-8": (b'{"\xff": 1}', "not UTF-8"),
    "not JSON": (b'{"w": ', "not valid JSON"),
    "no object": (b"[1, 2]", "should begin with '{' and begins with '['"),
    "a space in front": (b" " + json.dumps({"w": F32}).encode(), "should begin with '{'"),
    "a byte order mark": (b"\xef\xbb\xbf{}", "should begin with '{'"),
    "empty": (b"", "should begin with '{'"),
    "more than one object": (b"{}{}", "not valid JSON"),
    "NaN": (b'{"w": NaN}', "NaN is not JSON"),
    "tensor twice": (b'{"w": %s, "w": %s}' % ((json.dumps(F32).encode(),) * 2), "'w' appears twice"),
    "key twice": (b'{"w": {"dtype": "F32", "dtype": "I32", "shape": [4], "data_offsets": [0, 16]}}', "'dtype' appears"),
    "lone surrogate": (b'{"\\ud800": %s}' % json.dumps(F32).encode(), "not valid Unicode"),
    "nested without end": (b'{"w": ' + b"[" * 200_000 + b"]" * 200_000 + b"}", "nested too deeply"),
    "number without end": (b'{"w": ' + b"9" * 100_000 + b"}", "not valid JSON"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(tmp_path: Path, case: str) -> None:
    header, said = REFUSED[case]
    assert said in refusal(write(tmp_path, header))


def test_shorter_than_its_length(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(b"\1\2\3")
    assert "the file has 3 bytes" in refusal(path)


@pytest.mark.parametrize("declared", [100_000, 2**63, 2**64 - 1])
def test_header_longer_than_the_file(tmp_path: Path, declared: int) -> None:
    path = write(tmp_path, {"w": F32}, declared=declared)
    assert f"the header should have {declared} bytes, but only" in refusal(path)


def test_header_longer_than_safetensors_allows(tmp_path: Path) -> None:
    path = write(tmp_path, {"w": F32}, declared=100_000_001)
    with path.open("r+b") as file:
        file.truncate(200_000_000)
    assert "safetensors allows 100000000" in refusal(path)


def test_truncated_data_says_how_much_is_missing(tmp_path: Path) -> None:
    message = refusal(write(tmp_path, {"w": F32}, data=b"\0" * 11))
    assert "5 bytes are missing" in message
    assert "'w'" in message


def test_data_after_the_last_tensor(tmp_path: Path) -> None:
    assert "4 bytes too many at the end" in refusal(write(tmp_path, {"w": F32}, data=b"\0" * 20))


def test_git_lfs_pointer(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 12\n")
    assert "git-lfs pointer" in refusal(path)


def test_no_such_file_and_no_file(tmp_path: Path) -> None:
    assert "cannot be read" in refusal(tmp_path / "absent.safetensors")
    assert "cannot be read" in refusal(tmp_path)


def test_a_stored_header_must_be_whole(tmp_path: Path) -> None:
    header = raw({"w": F32})
    with pytest.raises(CheckpointError, match=f"should have {len(header) - 8} bytes and has {len(header) - 9}"):
        parse_header(header[:-1], tmp_path, None)


def test_stricter_than_the_library_only_where_it_guesses(tmp_path: Path) -> None:
    accepted = {case for case, (header, _) in REFUSED.items() if not refused_by_the_library(write(tmp_path, header))}
    assert accepted == {"a space in front", "metadata null", "tensor twice", "number without end"} & accepted
    assert {"a space in front", "tensor twice"} <= accepted


def test_zero_sized_and_scalar_tensors(tmp_path: Path) -> None:
    tensors = [("a", "F32", (0, 5)), ("b", "F32", ()), ("c", "I64", (3, 0)), ("d", "U8", (1,)), ("e", "F16", (0,))]
    path = tmp_path / "model.safetensors"
    path.write_bytes(build_header(tensors, {}) + b"\0" * 5)
    found = read_header(path).tensors
    assert [(info.name, info.nbytes) for info in found.values()] == [("a", 0), ("b", 4), ("c", 0), ("d", 1), ("e", 0)]
    assert not refused_by_the_library(path)


def test_tensors_come_in_order_of_offset(tmp_path: Path) -> None:
    path = write(tmp_path, {"second": {**F32, "data_offsets": [16, 32]}, "first": F32}, data=b"\0" * 32)
    assert list(read_header(path).tensors) == ["first", "second"]


# -- writing ----------------------------------------------------------------------------------------------------------

GOLDEN = (
    b"\xb0\x00\x00\x00\x00\x00\x00\x00"
    b'{"__metadata__":{"a":"\xc3\xa9","format":"pt"},'
    b'"x":{"dtype":"I64","shape":[3],"data_offsets":[0,24]},'
    b'"y\\n\\"\\u0001":{"dtype":"BF16","shape":[],"data_offsets":[24,26]}}'
)


def test_headers_share_what_is_alike(tmp_path: Path) -> None:
    """Of a million tensors on many ranks, each name, dtype and shape is in memory once."""
    raw = build_header([("a", "F32", (2, 300)), ("b", "F32", (2, 300))], {})
    one, other = (parse_header(raw, tmp_path / name, None).tensors for name in "xy")
    for here, there in zip(one.values(), other.values(), strict=True):
        assert here.name is there.name and here.dtype is one["a"].dtype and here.shape is one["a"].shape


def test_golden_bytes() -> None:
    built = build_header([("x", "I64", (3,)), ('y\n"\x01', "BF16", ())], {"format": "pt", "a": "é"})
    body = GOLDEN[8:]
    assert built == struct.pack("<Q", -(-len(body) // 8) * 8) + body + b" " * (-len(body) % 8)
    assert build_header([], {}) == b"\x08\0\0\0\0\0\0\0{}      "  # test_empty of the library


def test_the_same_bytes_as_the_library() -> None:
    tensors = {"b.é\x01\n": torch.zeros(3, dtype=torch.int64), "a": torch.zeros(2, 2), "c": torch.zeros(())}
    theirs = save({name: tensors[name] for name in ("c", "a", "b.é\x01\n")}, {"format": "pt"})
    ours = build_header([("b.é\x01\n", "I64", (3,)), ("a", "F32", (2, 2)), ("c", "F32", ())], {"format": "pt"})
    assert theirs == ours + b"\0" * 44


@pytest.mark.parametrize(
    ("tensors", "said"),
    [
        ([("w", "F32", (1,)), ("w", "F32", (1,))], "tensor 'w'.*already taken"),
        ([("__metadata__", "F32", (1,))], "tensor '__metadata__'.*already taken"),
        ([("w", "F31", (1,))], "tensor 'w': unknown dtype 'F31'"),
        ([("w", "F4", (3,))], "tensor 'w': F4 of shape .* not a whole number of bytes"),
        ([("\ud800", "F32", (1,))], "cannot be written"),
    ],
)
def test_what_cannot_be_written(tensors: list[tuple[str, str, tuple[int, ...]]], said: str) -> None:
    with pytest.raises(CheckpointError, match=said):
        build_header(tensors, {})


def test_a_header_too_long_to_read_is_not_written() -> None:
    with pytest.raises(CheckpointError, match="safetensors allows 100000000"):
        build_header([("w", "F32", (1,))], {"long": "x" * 100_000_000})


def test_every_dtype_of_the_library_is_known(tmp_path: Path) -> None:
    """The library names all its dtypes when it meets another one."""
    with pytest.raises(Exception, match="expected one of") as caught:
        deserialize(raw(entry(dtype="F31")) + b"\0" * 16)
    known = str(caught.value).split("expected one of")[1]
    assert all(f"`{dtype}`" in known for dtype in DTYPE_BITS)
    assert known.count("`") == 2 * len(DTYPE_BITS)
    for dtype in DTYPE_BITS:
        path = tmp_path / dtype
        path.write_bytes(build_header([("w", dtype, (3, 8))], {}) + b"\1" * 3 * DTYPE_BITS[dtype])
        assert read_header(path).tensors["w"].nbytes == 3 * DTYPE_BITS[dtype]
        assert not refused_by_the_library(path)


NAMES = st.text(st.characters(codec="utf-8"), max_size=8).filter(lambda name: name != "__metadata__")
SHAPES = st.lists(st.integers(0, 5), max_size=3).map(tuple)
TENSORS = st.lists(
    st.tuples(NAMES, st.sampled_from(sorted(DTYPE_BITS)), SHAPES).filter(
        lambda tensor: math.prod(tensor[2]) * DTYPE_BITS[tensor[1]] % 8 == 0
    ),
    max_size=6,
    unique_by=lambda tensor: tensor[0],
)


@given(tensors=TENSORS, metadata=st.dictionaries(NAMES, NAMES, max_size=3))
def test_what_is_built_is_read(
    tmp_path_factory: pytest.TempPathFactory, tensors: list[tuple[str, str, tuple[int, ...]]], metadata: dict[str, str]
) -> None:
    header = build_header(tensors, metadata)
    size = sum(tensor_bytes(*tensor) for tensor in tensors)
    assert len(header) % 8 == 0
    path = tmp_path_factory.getbasetemp() / "built.safetensors"
    path.write_bytes(header + bytes(i % 251 for i in range(size)))
    found = read_header(path)
    assert found.raw == header
    assert found.metadata == metadata
    assert sorted((i.name, i.dtype, i.shape) for i in found.tensors.values()) == sorted(tensors)
    content = path.read_bytes()
    theirs = {name: bytes(view["data"]) for name, view in deserialize(content)}
    assert theirs == {i.name: content[i.offset : i.offset + i.nbytes] for i in found.tensors.values()}


TORCH_DTYPES = [
    torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.bool, torch.float8_e4m3fn,
    torch.float8_e5m2, torch.float64, torch.int16, torch.uint16, torch.complex64,
]  # fmt: skip


@given(tensors=st.dictionaries(NAMES, st.tuples(st.sampled_from(TORCH_DTYPES), SHAPES), min_size=1, max_size=6))
def test_what_the_library_writes_is_read(
    tmp_path_factory: pytest.TempPathFactory, tensors: dict[str, tuple[torch.dtype, tuple[int, ...]]]
) -> None:
    state = {name: torch.randint(0, 2, shape).to(dtype) for name, (dtype, shape) in tensors.items()}
    path = tmp_path_factory.getbasetemp() / "theirs.safetensors"
    save_file(state, path, {"format": "pt"})
    content, header = path.read_bytes(), read_header(path)
    assert header.metadata == {"format": "pt"}
    assert {name: info.shape for name, info in header.tensors.items()} == {n: tuple(t.shape) for n, t in state.items()}
    for name, info in header.tensors.items():
        expected = state[name].contiguous().view(-1).view(torch.uint8) if info.nbytes else torch.zeros(0)
        assert list(content[info.offset : info.offset + info.nbytes]) == expected.tolist()
    ordered = [(info.name, info.dtype, info.shape) for info in header.tensors.values()]
    assert build_header(ordered, header.metadata) == header.raw


# -- anything at all --------------------------------------------------------------------------------------------------


def valid(content: bytes, path: Path) -> Header | None:
    """What is read from arbitrary bytes: a header, or None where they are refused. Nothing else may happen, and the
    usual headers are read as any others are.
    """
    path.write_bytes(content)
    header = content[: 8 + int.from_bytes(content[:8], "little")]
    if (usual := _read_usual(header, path)) is not None:
        other = _read_any(header, path)
        assert usual == other and [*usual[0]] == [*other[0]]
    try:
        return read_header(path)
    except CheckpointError as error:
        assert str(path) in error.message
        assert "\n" not in error.message
        return None


def test_mutated_headers_raise_only_checkpoint_errors(tmp_path: Path) -> None:
    tensors = [("model.norm.weight", "F32", (4,)), ("a", "BF16", (2, 3)), ("b", "F4", (2,)), ("z", "U8", (0,))]
    good = build_header(tensors, {"format": "pt", "a\\": '{"b":"c"}'})
    assert _read_usual(good, tmp_path) == _read_any(good, tmp_path)
    good += bytes(29)
    chance, refused = random.Random(0), 0
    for _ in range(3000):
        content = bytearray(good)
        for _ in range(chance.randint(1, 3)):
            place = chance.randrange(len(content))
            change = chance.randrange(4)
            if change == 0:
                content[place] = chance.randrange(256)
            elif change == 1:
                content[place] = chance.choice(b'0123456789-.,:[]{}"\\ntfu')
            elif change == 2:
                del content[place : place + chance.randint(1, 4)]
            else:
                content[place:place] = content[chance.randrange(len(content)) :][: chance.randint(1, 9)]
        header = valid(bytes(content), tmp_path / "fuzzed.safetensors")
        refused += header is None
        if header is not None:
            assert sum(info.nbytes for info in header.tensors.values()) + len(header.raw) == len(content)
            assert not refused_by_the_library(tmp_path / "fuzzed.safetensors")
    assert refused > 1000


@examples(200)
@given(body=st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(
        st.sampled_from(["w", "dtype", "shape", "data_offsets", "__metadata__"]), inner, max_size=4),
    max_leaves=12,
))  # fmt: skip
def test_any_json_raises_only_checkpoint_errors(tmp_path_factory: pytest.TempPathFactory, body: object) -> None:
    path = tmp_path_factory.getbasetemp() / "any.safetensors"
    valid(raw(body), path)
    valid(raw({"w": body}), path)


def test_strict_json() -> None:
    assert strict_json('{"a": [1, null]}') == {"a": [1, None]}
    for text in ('{"a": 1, "a": 1}', '{"a": {"b": 1, "b": 2}}', "[Infinity]", "[-Infinity]", "[NaN]", "", "[1,]"):
        with pytest.raises(ValueError):
            strict_json(text)


def test_no_heavy_import() -> None:
    code = (
        "import sys, formats.files.safetensors, formats.files.checkpoint, formats.files.torch_archive\n"
        "print([m for m in ('torch', 'numpy', 'safetensors', 'transformers') if m in sys.modules])"
    )
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
