"""torch's distributed checkpoints: what is read is held against what torch wrote, what is written against what torch
loads.
"""

from __future__ import annotations

import math
import pickle
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import metadata as torch_metadata
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from reshard.formats.errors import ReshardError
from reshard.formats.files.chunks import Chunk
from reshard.formats.files.dcp import METADATA, Blob, build_metadata, object_bytes, read_distributed
from reshard.formats.files.layout import Crc
from reshard.formats.files.torch_archive import build_chunks
from tests.formats.test_torch_archive import DTYPES, bytes_of, random_tensor

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed")


class Pieces(torch.Tensor):
    """A tensor that torch saves in several chunks, as it saves those of several ranks."""

    whole: torch.Tensor
    boxes: Sequence[Chunk]

    def __new__(cls, whole: torch.Tensor, boxes: Sequence[Chunk]) -> Pieces:
        self = whole.detach().as_subclass(cls)
        self.whole, self.boxes = whole, boxes
        return self

    def __create_write_items__(self, fqn: str, _: Any) -> list[WriteItem]:
        properties = torch_metadata.TensorProperties.create_from_tensor(self.whole)
        return [
            WriteItem(
                torch_metadata.MetadataIndex(fqn, at.offset, number),
                WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    torch_metadata.ChunkStorageMetadata(torch.Size(at.offset), torch.Size(at.shape)),
                    properties,
                    self.whole.size(),
                ),
            )
            for number, at in enumerate(self.boxes)
        ]

    def __create_chunk_list__(self) -> list[torch_metadata.ChunkStorageMetadata]:
        return [torch_metadata.ChunkStorageMetadata(torch.Size(at.offset), torch.Size(at.shape)) for at in self.boxes]

    def __get_tensor_shard__(self, index: torch_metadata.MetadataIndex) -> torch.Tensor:
        (at,) = [at for at in self.boxes if at.offset == tuple(index.offset or ())]
        return self.whole[tuple(slice(begin, end) for begin, end in zip(at.offset, at.end, strict=True))]


def save(folder: Path, state: Mapping[str, Any], threads: int = 1, **options: Any) -> Path:
    writer = dcp.FileSystemWriter(folder, thread_count=threads, **options)
    dcp.save(dict(state), storage_writer=writer, no_dist=True)
    return folder


def assembled(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors, from the places that were found."""
    found = {}
    for name, whole in read_distributed(folder).tensors.items():
        dtype = next(key for key, value in DTYPES.items() if value == whole.dtype)
        tensor = torch.empty(whole.shape, dtype=dtype)
        for at, info in whole.chunks:
            content = info.file.read_bytes()[info.offset : info.offset + info.nbytes]
            part = torch.frombuffer(bytearray(content), dtype=dtype) if content else torch.empty(0, dtype=dtype)
            index = tuple(slice(begin, end) for begin, end in zip(at.offset, at.end, strict=True))
            tensor[index] = part.reshape(at.shape)
        found[name] = tensor
    return found


def equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    return (one.dtype, one.shape) == (other.dtype, other.shape) and bytes_of(one) == bytes_of(other)


def refusal(folder: Path) -> str:
    with pytest.raises(ReshardError) as caught:
        read_distributed(folder)
    assert str(folder) in caught.value.message
    assert "\n" not in caught.value.message + (caught.value.hint or "")
    return caught.value.message


# -- what torch wrote ------------------------------------------------------------------------------------------------


def test_every_dtype_that_torch_saves(tmp_path: Path) -> None:
    state = {f"layer.{dtype}": random_tensor((3, 5), dtype) for dtype in DTYPES}
    found = assembled(save(tmp_path / "out", state))
    assert found.keys() == state.keys()
    assert all(equal(found[name], state[name]) for name in state)


def test_nested_dictionaries_lists_and_objects(tmp_path: Path) -> None:
    state = {
        "model": {"a": random_tensor((4, 3)), "b": torch.tensor(2.0)},
        "optim": {"state": {"a": {"step": torch.tensor(3.0), "exp_avg": random_tensor((4, 3))}}, "lr": 0.1},
        "list": [random_tensor((2,)), 7],
        "step": 5,
    }
    found = read_distributed(save(tmp_path / "out", state))
    assert {*found.tensors} == {
        "model.a", "model.b", "optim.state.a.step", "optim.state.a.exp_avg", "list.0",
    }  # fmt: skip
    assert {*found.objects} == {"optim.lr", "list.1", "step"}
    assert found.keys["optim.state.a.exp_avg"] == ("optim", "state", "a", "exp_avg")
    assert found.keys["list.0"] == ("list", 0)
    assert found.tensors["model.b"].shape == ()


@pytest.mark.parametrize("threads", [1, 3])
def test_chunks_in_any_number_of_dimensions_and_files(tmp_path: Path, threads: int) -> None:
    cube = random_tensor((5, 6, 4))
    boxes = [Chunk((i, j, k), (min(2, 5 - i), 3, min(3, 4 - k))) for i in (0, 2, 4) for j in (0, 3) for k in (0, 3)]
    rows = random_tensor((7, 2))
    state = {"cube": Pieces(cube, boxes), "rows": Pieces(rows, [Chunk((0, 0), (4, 2)), Chunk((4, 0), (3, 2))])}
    folder = save(tmp_path / "out", state, threads)
    found = assembled(folder)
    assert equal(found["cube"], cube)
    assert equal(found["rows"], rows)
    assert len(read_distributed(folder).files) == threads


def test_empty_tensors_and_scalars(tmp_path: Path) -> None:
    state = {"e": torch.empty(0, 3), "s": torch.tensor(1.5), "n": torch.tensor(7)}
    found = assembled(save(tmp_path / "out", state))
    assert all(equal(found[name], state[name]) for name in state)


def test_no_tensor_data_is_read(tmp_path: Path) -> None:
    folder = save(tmp_path / "out", {"w": torch.ones(1 << 20), "x": torch.ones(2)})
    before = read_distributed(folder)
    ((_, info),) = before.tensors["w"].chunks
    with info.file.open("r+b") as file:
        file.seek(info.offset)
        file.write(b"\xff" * info.nbytes)
    assert read_distributed(folder) == before


# -- what is refused -------------------------------------------------------------------------------------------------


def changed(folder: Path, change: Callable[[Any], None]) -> str:
    """What is said of a folder whose metadata was changed."""
    metadata = pickle.loads((folder / METADATA).read_bytes())
    change(metadata)
    (folder / METADATA).write_bytes(pickle.dumps(metadata))
    return refusal(folder)


def small(tmp_path: Path) -> Path:
    rows = [Chunk((0, 0), (4, 2)), Chunk((4, 0), (3, 2))]
    return save(tmp_path / "out", {"w": Pieces(random_tensor((7, 2)), rows), "x": torch.ones(2), "step": 3})


def _entry(metadata: Any, name: str = "w", number: int = 0) -> Any:
    return [info for index, info in metadata.storage_data.items() if index.fqn == name][number]


class Elsewhere:
    """An object of a class that is not on the list."""


CHANGES: dict[str, tuple[Callable[[Any], None], str]] = {
    "version": (lambda m: setattr(m, "version", "2.0.0"), "is of version '2.0.0' of torch's distributed checkpoints"),
    "a hole": (lambda m: m.state_dict_metadata["w"].chunks.pop(), "the chunks of tensor 'w' make [4, 2]"),
    "overlap": (
        lambda m: setattr(m.state_dict_metadata["w"].chunks[1], "offsets", torch.Size((3, 0))),
        "the chunks of tensor 'w' make [6, 2], it should be [7, 2]",
    ),
    "twice": (
        lambda m: m.state_dict_metadata["w"].chunks.append(m.state_dict_metadata["w"].chunks[0]),
        "chunks of tensor 'w' overlap",
    ),
    "outside": (
        lambda m: setattr(m.state_dict_metadata["w"].chunks[1], "sizes", torch.Size((9, 2))),
        "a chunk of tensor 'w' ends at [13, 2], outside its shape [7, 2]",
    ),
    "sizes": (
        lambda m: setattr(m.state_dict_metadata["x"], "size", torch.Size((3,))),
        "the chunks of tensor 'x' make [2], it should be [3]",
    ),
    "both sizes": (
        lambda m: m.state_dict_metadata.__setitem__(
            "x",
            torch_metadata.TensorStorageMetadata(
                torch_metadata.TensorProperties(),
                torch.Size((3,)),
                [torch_metadata.ChunkStorageMetadata(torch.Size((0,)), torch.Size((3,)))],
            ),
        ),
        "a chunk of tensor 'x' is F32 [2], .metadata says F32 [3]",
    ),
    "dtype": (
        lambda m: setattr(m.state_dict_metadata["x"].properties, "dtype", torch.int32),
        "a chunk of tensor 'x' is F32 [2], .metadata says I32 [2]",
    ),
    "a number too long to be shown": (
        lambda m: m.state_dict_metadata.__setitem__(10**5000, 3),
        "its entry for a int is a int",
    ),
    "compressed": (
        lambda m: setattr(_entry(m), "transform_descriptors", ["zstd"]),
        "the data of 'w' went through an extension of torch's",
    ),
    "outside the folder": (
        lambda m: setattr(_entry(m), "relative_path", "../elsewhere"),
        "the file of 'w' is no name of a file in this folder",
    ),
    "a name that no file has": (
        lambda m: setattr(_entry(m), "relative_path", "x" * 256),
        "the file of 'w' is no name of a file in this folder",
    ),
    "no place": (lambda m: m.storage_data.clear(), "has no place in 'storage_data'"),
    "past the end": (lambda m: setattr(_entry(m), "length", 1 << 40), "'w' should be bytes"),
    "negative": (lambda m: setattr(_entry(m), "offset", -1), "the place of 'w' in '__0_0.distcp' is none"),
    "short": (lambda m: setattr(_entry(m), "length", 400), "not a readable zip archive"),
    "mixed up": (
        lambda m: setattr(_entry(m), "offset", _entry(m, "x").offset),
        "a chunk of tensor 'w' is F32 [2], .metadata says F32 [4, 2]",
    ),
    "another class": (
        lambda m: m.state_dict_metadata.__setitem__("y", Elsewhere()),
        "the pickle asks for 'tests.formats.test_dcp.Elsewhere'",
    ),
    "no dictionary": (lambda m: setattr(m, "storage_data", [1]), "its 'storage_data' is a list, not a dictionary"),
    "no metadata": (lambda m: m.state_dict_metadata.__setitem__("y", 3), "its entry for 'y' is a int"),
}  # fmt: skip


@pytest.mark.parametrize("change", CHANGES)
def test_metadata_that_lies(tmp_path: Path, change: str) -> None:
    how, said = CHANGES[change]
    assert said in changed(small(tmp_path), how)


def test_what_is_nested_too_deeply_to_be_shown(tmp_path: Path) -> None:
    """A list in 5000 lists in the place of a layout, which is the name behind the only call of this function."""
    folder = small(tmp_path)
    content, name = (folder / METADATA).read_bytes(), b"torch.strided"
    assert content.count(name) == 1
    begin = content.index(b"X\r\0\0\0" + name) if b"X\r\0\0\0" + name in content else content.index(b"\x8c\r" + name)
    end = content.index(name) + len(name)
    (folder / METADATA).write_bytes(content[:begin] + b"]" * 5000 + b"a" * 4999 + content[end:])
    assert "is not stored row by row (a list)" in refusal(folder)


def test_a_missing_file(tmp_path: Path) -> None:
    folder = small(tmp_path)
    (folder / "__0_0.distcp").unlink()
    assert "__0_0.distcp is missing: .metadata says that it holds" in refusal(folder)


def test_a_file_that_was_cut(tmp_path: Path) -> None:
    folder = small(tmp_path)
    content = (folder / "__0_0.distcp").read_bytes()
    (folder / "__0_0.distcp").write_bytes(content[:-1])
    assert "the file has" in refusal(folder)


# -- what is written -------------------------------------------------------------------------------------------------


def write(
    folder: Path, tensors: Mapping[str, tuple[torch.Tensor, Sequence[Chunk]]], objects: Mapping[str, bytes]
) -> None:
    """Write chunks, the first of each tensor into the first file and so on, as a split would."""
    folder.mkdir()
    stored: dict[str, list[tuple[Chunk, Blob]]] = {name: [] for name in tensors}
    kept: dict[str, Blob] = {}
    for number in range(max(len(boxes) for _, boxes in tensors.values())):
        file = f"__{number}_0.distcp"
        chosen = {name: (whole, boxes[number]) for name, (whole, boxes) in tensors.items() if number < len(boxes)}
        chunks = [
            (name, DTYPES[whole.dtype], at.shape, math.prod(at.shape) * whole.itemsize)
            for name, (whole, at) in chosen.items()
        ]
        layout = build_chunks(chunks, objects if number == 0 else {})
        content = bytearray(b"\xee" * layout.size)
        for offset, part in layout.fixed:
            content[offset : offset + len(part)] = part
        for name, offset in layout.places:
            whole, at = chosen[name]
            part = bytes_of(whole[tuple(slice(b, e) for b, e in zip(at.offset, at.end, strict=True))])
            content[offset : offset + len(part)] = part
        for crc in layout.crcs:
            put_crc(content, crc)
        (folder / file).write_bytes(content)
        for name, (_, at) in chosen.items():
            stored[name].append((at, Blob(Path(file), *layout.ranges[name])))
        if number == 0:
            kept = {name: Blob(Path(file), *layout.ranges[name]) for name in objects}
    kinds = {name: (DTYPES[whole.dtype], tuple(whole.shape), stored[name]) for name, (whole, _) in tensors.items()}
    (folder / METADATA).write_bytes(build_metadata(kinds, kept))


def put_crc(content: bytearray, crc: Crc) -> None:
    import zlib

    for place in crc.places:
        content[place : place + 4] = zlib.crc32(content[crc.begin : crc.end]).to_bytes(4, "little")


def halves(tensor: torch.Tensor) -> list[Chunk]:
    if not tensor.ndim or tensor.shape[0] < 2:
        return [Chunk((0,) * tensor.ndim, tuple(tensor.shape))]
    half, rest = -(-tensor.shape[0] // 2), tuple(tensor.shape[1:])
    return [
        Chunk((0, *(0,) * len(rest)), (half, *rest)),
        Chunk((half, *(0,) * len(rest)), (tensor.shape[0] - half, *rest)),
    ]


def test_torch_loads_what_is_written(tmp_path: Path) -> None:
    state = {f"layer.{dtype}": random_tensor((3, 5), dtype) for dtype in DTYPES}
    state |= {"scalar": torch.tensor(2.5), "empty": torch.empty(0, 4), "cube": random_tensor((4, 3, 2))}
    write(tmp_path / "out", {name: (each, halves(each)) for name, each in state.items()}, {"step": object_bytes(7)})
    loaded: dict[str, Any] = {name: torch.zeros_like(each) for name, each in state.items()} | {"step": 0}
    dcp.load(loaded, checkpoint_id=tmp_path / "out", no_dist=True)
    assert all(equal(loaded[name], state[name]) for name in state)
    assert loaded["step"] == 7
    found = assembled(tmp_path / "out")
    assert all(equal(found[name], state[name]) for name in state)


def test_torchs_own_tool_makes_a_file_of_it(tmp_path: Path) -> None:
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    state = {"a.b": random_tensor((3, 5)), "c": random_tensor((4,), torch.bfloat16)}
    write(tmp_path / "out", {name: (each, halves(each)) for name, each in state.items()}, {})
    dcp_to_torch_save(tmp_path / "out", tmp_path / "whole.pt")
    loaded = torch.load(tmp_path / "whole.pt", weights_only=True)
    assert all(equal(loaded[name], state[name]) for name in state)


def test_only_torchs_classes_are_named(tmp_path: Path) -> None:
    import pickletools

    write(tmp_path / "out", {"w": (torch.ones(4), halves(torch.ones(4)))}, {"step": object_bytes(7)})
    content = (tmp_path / "out" / METADATA).read_bytes()
    named = {str(argument) for op, argument, _ in pickletools.genops(content) if op.name == "GLOBAL"}
    assert all(name.startswith("torch") for name in named)
    assert str(tmp_path).encode() not in content


def test_objects_are_what_torch_loads(tmp_path: Path) -> None:
    value = {"a": [1, 2.5, None, True, -(1 << 40)], "b": ("text", {"c": 1 << 70})}
    path = tmp_path / "object.pt"
    path.write_bytes(object_bytes(value))
    assert torch.load(path, weights_only=True) == value
