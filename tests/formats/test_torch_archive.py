"""Where the bytes of a state dict lie is checked against what torch itself loads."""

from __future__ import annotations

import io
import os
import pickle
import random
import struct
import zipfile
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from reshard.formats.errors import CheckpointError
from reshard.formats.files.safetensors import TensorInfo
from reshard.formats.files.torch_archive import read_bin
from tests.marks import examples

DTYPES = {
    torch.bool: "BOOL", torch.uint8: "U8", torch.int8: "I8", torch.uint16: "U16", torch.int16: "I16",
    torch.uint32: "U32", torch.int32: "I32", torch.uint64: "U64", torch.int64: "I64", torch.float16: "F16",
    torch.bfloat16: "BF16", torch.float32: "F32", torch.float64: "F64", torch.complex64: "C64",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2", torch.float8_e4m3fnuz: "F8_E4M3FNUZ",
    torch.float8_e5m2fnuz: "F8_E5M2FNUZ", torch.float8_e8m0fnu: "F8_E8M0",
}  # fmt: skip


def saved(folder: Path, state: object, **options: Any) -> Path:
    path = folder / "pytorch_model.bin"
    torch.save(state, path, **options)
    return path


def random_tensor(shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    size = torch.empty(shape, dtype=dtype).nbytes
    data = torch.randint(0, 2 if dtype == torch.bool else 256, (size,), dtype=torch.uint8)
    return data.view(dtype).reshape(shape) if size else torch.empty(shape, dtype=dtype)


def bytes_of(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.detach().contiguous().view(-1).view(torch.uint8).tolist()) if tensor.nbytes else b""


def check(path: Path) -> tuple[dict[str, TensorInfo], dict[str, str]]:
    """Read a file, and hold what is found against torch.load: names, dtypes, shapes and bytes."""
    content = path.read_bytes()
    tensors, aliases = read_bin(path)
    loaded = torch.load(path, weights_only=True)
    expected = {name: tensor for name, tensor in loaded.items() if isinstance(tensor, torch.Tensor)}
    assert {*tensors, *aliases} == set(expected)
    for name, tensor in expected.items():
        info = tensors[aliases.get(name, name)]
        assert (info.dtype, info.shape, info.file) == (DTYPES[tensor.dtype], tuple(tensor.shape), path)
        assert content[info.offset : info.offset + info.nbytes] == bytes_of(tensor), name
    offsets = [info.offset for info in tensors.values()]
    assert offsets == sorted(offsets)
    return tensors, aliases


def refusal(path: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        read_bin(path)
    assert str(path) in caught.value.message
    assert "\n" not in caught.value.message + (caught.value.hint or "")
    return caught.value.message


# -- what is read -----------------------------------------------------------------------------------------------------


def test_every_dtype(tmp_path: Path) -> None:
    state = {f"layer.{dtype}": random_tensor((3, 5), dtype) for dtype in DTYPES}
    tensors, aliases = check(saved(tmp_path, state))
    assert len(tensors) == len(DTYPES)
    assert aliases == {}


def test_the_state_dict_of_a_module(tmp_path: Path) -> None:
    """With parameters, buffers, and the attribute _metadata."""
    module = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
    check(saved(tmp_path, module.state_dict()))
    check(saved(tmp_path, dict(module.named_parameters())))
    check(saved(tmp_path, OrderedDict(module.state_dict(keep_vars=True))))


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_pickle_protocols(tmp_path: Path, protocol: int) -> None:
    state = {f"w{i}": random_tensor((i, 2)) for i in range(300)}
    state["long " * 100] = random_tensor((2,))
    path = saved(tmp_path, state, pickle_protocol=protocol)
    if protocol == 2:
        check(path)
        return
    content, (tensors, _) = path.read_bytes(), read_bin(path)  # weights_only knows protocol 2 alone
    assert set(tensors) == set(state)
    for name, info in tensors.items():
        assert content[info.offset : info.offset + info.nbytes] == bytes_of(state[name])


def test_parameters_with_attributes(tmp_path: Path) -> None:
    weight = torch.nn.Parameter(random_tensor((2, 3)))
    weight.note = "kept by torch"  # type: ignore[attr-defined]
    tensor = random_tensor((4,))
    tensor.note = "also"  # type: ignore[attr-defined]
    check(saved(tmp_path, {"p": weight, "t": tensor}))


def test_tied_tensors_are_kept_once(tmp_path: Path) -> None:
    embedding = random_tensor((7, 3))
    state = {"embed": embedding, "other": random_tensor((7, 3)), "lm_head": embedding, "also": embedding[:]}
    tensors, aliases = check(saved(tmp_path, state))
    assert set(tensors) == {"embed", "other"}
    assert aliases == {"lm_head": "embed", "also": "embed"}


def test_the_first_name_is_kept_even_if_sorted_last(tmp_path: Path) -> None:
    weight = random_tensor((2,))
    assert check(saved(tmp_path, OrderedDict([("z", weight), ("a", weight)])))[1] == {"a": "z"}


def test_views_of_one_storage_are_tensors_of_their_own(tmp_path: Path) -> None:
    packed = random_tensor((6, 4))
    state = {"q": packed[:2], "k": packed[2:4], "v": packed[4:], "all": packed, "flat": packed.view(-1)}
    tensors, aliases = check(saved(tmp_path, state))
    assert aliases == {}
    assert tensors["k"].offset == tensors["q"].offset + 32
    assert tensors["flat"].offset == tensors["all"].offset


def test_equal_but_separate_tensors_are_not_tied(tmp_path: Path) -> None:
    tensors, aliases = check(saved(tmp_path, {"a": torch.ones(3), "b": torch.ones(3)}))
    assert len(tensors) == 2
    assert aliases == {}


def test_empty_tensors_and_scalars(tmp_path: Path) -> None:
    empty = torch.empty(0, 3)
    state = {"e": empty, "f": empty, "g": torch.empty(0, 3), "s": torch.tensor(1.5), "n": torch.tensor(7)}
    tensors, aliases = check(saved(tmp_path, state))
    assert len(tensors) == 5
    assert aliases == {}


def test_size_one_dimensions_have_any_stride(tmp_path: Path) -> None:
    check(saved(tmp_path, {"w": random_tensor((4, 1)).t(), "x": random_tensor((1, 5)).as_strided((1, 5), (99, 1))}))


def test_metadata_is_left_out(tmp_path: Path) -> None:
    state = {
        "w": random_tensor((2,)), "step": 3, "lr": 1e-3, "name": "é", "none": None, "flag": True, "big": 10**30,
        "nested": {"a": [1, (2, "x")], "dtype": torch.float16, "size": torch.Size([2]), "device": torch.device("cpu")},
    }  # fmt: skip
    tensors, _ = check(saved(tmp_path, state))
    assert list(tensors) == ["w"]


def test_an_empty_state_dict(tmp_path: Path) -> None:
    assert read_bin(saved(tmp_path, {})) == ({}, {})


@examples(30)
@given(state=st.dictionaries(
    st.text(st.characters(codec="utf-8"), max_size=12),
    st.tuples(st.sampled_from(sorted(DTYPES, key=str)), st.lists(st.integers(0, 9), max_size=3).map(tuple)),
    max_size=8,
))  # fmt: skip
def test_any_state_dict(
    tmp_path_factory: pytest.TempPathFactory, state: dict[str, tuple[torch.dtype, tuple[int, ...]]]
) -> None:
    tensors = {name: random_tensor(shape, dtype) for name, (dtype, shape) in state.items()}
    check(saved(tmp_path_factory.getbasetemp(), tensors))


def test_no_tensor_data_is_read(tmp_path: Path) -> None:
    """A file of which nothing but the archive's structure is there."""
    path = saved(tmp_path, {"w": torch.ones(1 << 20), "x": torch.ones(2)})
    before = read_bin(path)
    with path.open("r+b") as file:
        file.seek(before[0]["w"].offset)
        file.write(b"\xff" * before[0]["w"].nbytes)
    assert read_bin(path) == before


# -- what is refused --------------------------------------------------------------------------------------------------


class Call:
    """Pickles as a call of any function."""

    def __init__(self, function: Callable[..., object], *arguments: object) -> None:
        self.reduced = function, arguments

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        return self.reduced


@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
@pytest.mark.parametrize("protocol", [2, 4])
@pytest.mark.parametrize(
    ("function", "arguments", "name"),
    [
        (os.system, ("touch {}",), "system"),
        (eval, ("open('{}', 'w')",), "eval"),
        (exec, ("open('{}', 'w')",), "exec"),
        (os.mkdir, ("{}",), "mkdir"),
        (getattr, (os, "system"), "getattr"),
        (torch.load, ("{}",), "load"),
    ],
)
def test_code_is_never_run(
    tmp_path: Path, function: Callable[..., object], arguments: tuple[object, ...], name: str, protocol: int
) -> None:
    trace = tmp_path / "trace"
    filled = [str(a).format(trace) if isinstance(a, str) else 0 for a in arguments]
    path = saved(tmp_path, {"w": torch.ones(2), "x": Call(function, *filled)}, pickle_protocol=protocol)
    message = refusal(path)
    assert "the pickle asks for" in message
    assert name in message
    assert "no code is run" in message
    assert not trace.exists()
    with pytest.raises(pickle.UnpicklingError):
        torch.load(path, weights_only=True)


def test_objects_are_refused(tmp_path: Path) -> None:
    assert "Linear" in refusal(saved(tmp_path, torch.nn.Linear(2, 2)))
    assert "PosixPath" in refusal(saved(tmp_path, {"w": torch.ones(1), "p": tmp_path}))


@pytest.mark.parametrize(
    ("tensor", "name"),
    [
        (torch.eye(2).to_sparse(), "_rebuild_sparse_tensor"),
        (torch.zeros(2, dtype=torch.complex128), "ComplexDoubleStorage"),
        (torch.zeros(2, dtype=torch.complex64).conj(), "conjugated"),
        (torch.zeros(2, device="meta"), "_rebuild_meta_tensor_no_storage"),
    ],
)
def test_tensors_that_are_not_plain(tmp_path: Path, tensor: torch.Tensor, name: str) -> None:
    assert name in refusal(saved(tmp_path, {"w": tensor}))


@pytest.mark.filterwarnings("ignore")
def test_quantized_tensors_are_refused(tmp_path: Path) -> None:
    state = {"w": torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8)}
    assert "_rebuild_qtensor" in refusal(saved(tmp_path, state))


@pytest.mark.parametrize(
    ("tensor", "strides"),
    [
        (torch.ones(2, 3).t(), [1, 3]),
        (torch.ones(4, 4)[:, :2], [4, 1]),
        (torch.ones(4)[::2], [2]),
        (torch.ones(1).expand(3), [0]),
    ],
)
def test_not_contiguous(tmp_path: Path, tensor: torch.Tensor, strides: list[int]) -> None:
    message = refusal(saved(tmp_path, {"fine": torch.ones(1), "odd": tensor}))
    assert f"tensor 'odd' is not contiguous: shape {list(tensor.shape)}, strides {strides}" in message


@pytest.mark.parametrize(
    ("state", "said"),
    [
        ({"model": {"w": torch.ones(1)}, "step": 1}, "entry 'model' is a dict with tensors"),
        ({"moments": [(torch.ones(1),)]}, "entry 'moments' is a list with tensors"),
        ({3: torch.ones(1)}, "entry 3 is a tensor"),
        ([torch.ones(1)], "holds a list, not a dictionary"),
        (torch.ones(1), "holds a tensor, not a dictionary"),
        (None, "not a dictionary"),
    ],
)
def test_not_a_state_dict(tmp_path: Path, state: object, said: str) -> None:
    assert said in refusal(saved(tmp_path, state))


def test_legacy_files(tmp_path: Path) -> None:
    path = saved(tmp_path, {"w": torch.ones(2)}, _use_new_zipfile_serialization=False)
    assert "not a zip archive, as torch.save writes since PyTorch 1.6" in refusal(path)


def test_other_files(tmp_path: Path) -> None:
    path = tmp_path / "pytorch_model.bin"
    path.write_bytes(b"")
    assert "not a zip archive" in refusal(path)
    path.write_text("version https://git-lfs.github.com/spec/v1\n")
    assert "git-lfs pointer" in refusal(path)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("a.txt", "a")
    assert "has no data.pkl" in refusal(path)
    assert "cannot be read" in refusal(tmp_path / "absent.bin")


def test_torchscript(tmp_path: Path) -> None:
    path = tmp_path / "model.pt"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("model/data.pkl", pickle.dumps({}, 2))
        archive.writestr("model/constants.pkl", pickle.dumps((), 2))
    assert "TorchScript" in refusal(path)


def rewritten(path: Path, change: Callable[[str, bytes], bytes | None], compress: int = zipfile.ZIP_STORED) -> Path:
    """The same archive with its records changed, or dropped where ``change`` gives None."""
    with zipfile.ZipFile(path) as archive:
        records = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(path, "w", compress) as archive:
        for name, content in records.items():
            changed = change(name, content)
            if changed is not None:
                archive.writestr(name, changed)
    return path


def test_records_that_are_missing_short_or_compressed(tmp_path: Path) -> None:
    state = {"v": torch.ones(2), "w": torch.ones(4)}

    def drop(name: str, content: bytes) -> bytes | None:
        return None if name.endswith("data/1") else content

    def cut(name: str, content: bytes) -> bytes:
        return content[:10] if name.endswith("data/1") else content

    def turn(name: str, content: bytes) -> bytes:
        return b"big" if name.endswith("byteorder") else content

    assert "the data of storage '1' is missing" in refusal(rewritten(saved(tmp_path, state), drop))
    message = refusal(rewritten(saved(tmp_path, state), cut))
    assert "tensor 'w' is said to be bytes 0 to 16 of a storage of 16, of which the file has 10" in message
    assert "its bytes are in b'big' order" in refusal(rewritten(saved(tmp_path, state), turn))
    assert "compressed" in refusal(rewritten(saved(tmp_path, state), lambda _, c: c, zipfile.ZIP_DEFLATED))


def test_truncated(tmp_path: Path) -> None:
    content = saved(tmp_path, {"w": torch.ones(1000)}).read_bytes()
    path = tmp_path / "cut.bin"
    for length in (2, 100, 1000, len(content) - 1):
        path.write_bytes(content[:length])
        assert "not a readable zip archive" in refusal(path)


@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_directories_that_are_too_long_or_name_a_record_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = saved(tmp_path, {"w": torch.ones(2)})
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr(archive.namelist()[0], b"")
    assert "a record of the zip archive appears twice" in refusal(path)
    monkeypatch.setattr("reshard.formats.files.torch_archive.MAX_DIRECTORY", 100)
    assert "bytes is too long" in refusal(path)


def crafted(folder: Path, program: bytes) -> Path:
    """An archive around a pickle written by hand."""
    path = folder / "crafted.bin"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("m/data.pkl", program)
        archive.writestr("m/data/0", bytes(64))
    return path


def text(value: str) -> bytes:
    return b"X" + struct.pack("<I", len(value.encode())) + value.encode()


def storage(numel: bytes = b"K\x10", kind: str = "storage") -> bytes:
    return b"(" + text(kind) + b"ctorch\nFloatStorage\n" + text("0") + text("cpu") + numel + b"tQ"


def tensor(storage: bytes, offset: bytes = b"K\0", shape: bytes = b"K\x10\x85", strides: bytes = b"K\1\x85") -> bytes:
    return b"ctorch._utils\n_rebuild_tensor\n(" + storage + offset + shape + strides + b"tR"


def entry(value: bytes) -> bytes:
    return b"\x80\2}" + text("w") + value + b"s."


def test_crafted_pickles(tmp_path: Path) -> None:
    info = read_bin(crafted(tmp_path, entry(tensor(storage()))))[0]["w"]
    assert (info.nbytes, info.shape) == (64, (16,))
    minus = b"J\xff\xff\xff\xff"
    cases = {
        entry(tensor(storage(), offset=b"K\1")): "tensor 'w' is said to be bytes 4 to 68 of a storage of 64",
        entry(tensor(storage(b"K\x11"))): "storage of 68, of which the file has 64",
        entry(tensor(storage(), offset=minus)): "damaged",
        b"\x80\2}" + text("a\nb") + tensor(storage(), shape=b"K\x11\x85") + b"s.": r"tensor 'a\nb' is said to be",
        b"\x80\2}" + text("w") + b"\x8c\3a\nb\x8c\1c\x93s.": r"'a\nb.c'",
        entry(tensor(storage(), shape=minus + b"\x85")): "damaged",
        entry(tensor(storage(), shape=b"K\2K\2\x86")): "damaged",
        entry(tensor(storage(minus))): "damaged",
        entry(tensor(storage(kind="module"))): "a persistent 'module'",
        entry(tensor(b"N")): "damaged",
        entry(b"cposix\nsystem\n" + text("id") + b"\x85R"): "'posix.system'",
        entry(text("id") + text("id") + b"\x85R"): "a call of str",
        entry(b"ctorch\nFloatStorage\n)R"): "a call of torch.FloatStorage",
        entry(b"ccollections\nOrderedDict\n]\x81"): "a call of collections.OrderedDict",
        entry(b"ctorch\nfloat16\n)\x81"): "a call of torch.float16",
        entry(b"(ctorch\nfloat16\no"): "the instruction OBJ",
        entry(b"0"): "the instruction POP",
        entry(b"I1\n"): "the instruction INT",
        b"\x80\2}" + b"]" * 3 + text("w") + b"ss.": "setting an item of something that is no dictionary",
        b"\x80\2}" + b")" + b"\x85" * 200_000 + b"K\1s.": "unusual key",
        b"\x80\2}h\5.": "damaged",
        b"\x80\2.": "damaged",
        b"\x80\2}": "damaged",
        b"": "damaged",
        b"t.": "damaged",
    }
    for program, said in cases.items():
        assert said in refusal(crafted(tmp_path, program)), program[:80]


def test_deep_nesting_is_no_crash(tmp_path: Path) -> None:
    assert read_bin(crafted(tmp_path, entry(b"]" + b"\x85" * 300_000))) == ({}, {})


def test_mutations_raise_only_checkpoint_errors(tmp_path: Path) -> None:
    buffer = io.BytesIO()
    shared = torch.ones(3)
    torch.save(OrderedDict(a=shared, b=shared, c=torch.nn.Parameter(torch.ones(2, 2)), step=1), buffer)
    good, path, chance = buffer.getvalue(), tmp_path / "fuzzed.bin", random.Random(0)
    with zipfile.ZipFile(buffer) as archive:
        program = next(archive.read(name) for name in archive.namelist() if name.endswith("data.pkl"))
    start, refused = good.index(program), 0
    for turn in range(3000):
        content = bytearray(good)
        whole = turn % 2
        for _ in range(chance.randint(1, 4)):
            place = chance.randrange(2, len(good)) if whole else start + chance.randrange(len(program))
            content[place] = chance.randrange(256)
        path.write_bytes(content)
        try:
            tensors, _ = read_bin(path)
        except CheckpointError as error:
            assert str(path) in error.message
            assert "\n" not in error.message
            refused += 1
        else:
            assert all(30 <= info.offset <= len(good) - info.nbytes for info in tensors.values())
    assert refused > 500
