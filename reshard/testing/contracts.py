"""The promises of each kind of addition, as tests."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

import reshard
from reshard.formats.errors import CheckpointError, PlanError, ReshardError
from reshard.formats.files.containers import Around, Container, container_of
from reshard.formats.files.layout import Layout, Tensor
from reshard.formats.files.safetensors import DTYPE_BITS, tensor_bytes
from reshard.store.remote import Remote
from reshard.tiny_model import write_model

_SHAPES = {"a": (3, 5), "a.scalar": (), "b.none": (0, 4), "b": (7,), "c.weight": (2, 3, 4)}


def _contents(folder: Path) -> dict[str, bytes]:
    """The content of each file below a folder, by its name there."""
    return {file.relative_to(folder).as_posix(): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


def _filled(layout: Layout, values: Mapping[str, bytes]) -> bytes:
    """The bytes of a file with this layout and these tensors."""
    content = bytearray(layout.size)
    for offset, part in ((0, layout.header), *layout.fixed, *((at, values[name]) for name, at in layout.places)):
        content[offset : offset + len(part)] = part
    for crc in layout.crcs:
        for place in crc.places:
            content[place : place + 4] = zlib.crc32(content[crc.begin : crc.end]).to_bytes(4, "little")
    return bytes(content)


class ContainerTests:
    """A container: what it lays out, it reads again, and nothing else."""

    container: Container
    dtypes: Sequence[str] = ("F32", "BF16", "F16", "I64", "U8")
    """The dtypes that it stores, as safetensors calls them."""
    shapes: Mapping[str, tuple[int, ...]] = _SHAPES
    """The shapes of tensors of a file, by their names: a scalar and one without elements are among them."""

    def write(self, folder: Path, dtype: str) -> tuple[Path, dict[str, bytes]]:
        """Write a file of tensors of a dtype; also the bytes of each."""
        sizes = {name: tensor_bytes(name, dtype, shape) for name, shape in self.shapes.items()}
        values = {name: bytes((i + n) % 251 for i in range(size)) for n, (name, size) in enumerate(sizes.items())}
        tensors = [Tensor(name, dtype, shape, sizes[name]) for name, shape in self.shapes.items()]
        file = folder / f"weights{self.container.ends[0]}"
        file.write_bytes(_filled(self.container.build(tensors, Around()), values))
        return file, values

    def test_it_reads_what_it_lays_out(self, tmp_path: Path) -> None:
        for dtype in self.dtypes:
            file, values = self.write(tmp_path, dtype)
            content, found = file.read_bytes(), self.container.read(file).tensors
            assert {name: (info.dtype, info.shape) for name, info in found.items()} == {
                name: (dtype, shape) for name, shape in self.shapes.items()
            }
            for name, info in found.items():
                assert info.name == name and info.file == file
                assert content[info.offset : info.offset + info.nbytes] == values[name], name

    def test_a_file_that_is_cut_off_is_refused(self, tmp_path: Path) -> None:
        file, _ = self.write(tmp_path, self.dtypes[0])
        content = file.read_bytes()
        for length in {0, 1, len(content) // 2, len(content) - 1}:
            file.write_bytes(content[:length])
            with pytest.raises(CheckpointError):
                self.container.read(file)

    def test_any_other_dtype_has_room_or_is_refused(self) -> None:
        for dtype in DTYPE_BITS.keys() - {*self.dtypes}:
            nbytes = tensor_bytes("a", dtype, (8,))
            with suppress(PlanError):
                assert self.container.build([Tensor("a", dtype, (8,), nbytes)], Around()).size >= nbytes

    def test_it_is_found_by_its_names(self) -> None:
        for end in self.container.ends:
            assert container_of(f"weights{end}") is self.container


class FormatTests:
    """A format: it holds all of a model on any mesh that it takes, and gives the same bytes back."""

    format: str
    """Its name."""
    meshes: Sequence[Mapping[str, Any]] = ({"tp": 1}, {"tp": 2})
    """Degrees that it takes for the model."""

    @pytest.fixture
    def model(self, tmp_path: Path) -> Path:
        """A checkpoint of a model that it takes: by default a tiny Llama."""
        return write_model(tmp_path / "model")

    def test_a_merge_gives_the_original_files(self, model: Path, tmp_path: Path) -> None:
        for number, mesh in enumerate(self.meshes):
            out, full = tmp_path / f"out-{number}", tmp_path / f"full-{number}"
            reshard.split(model, out, format=self.format, **mesh)
            reshard.merge(out, full)
            assert _contents(full) == _contents(model), mesh

    def test_it_is_recognised_without_the_manifest(self, model: Path, tmp_path: Path) -> None:
        for number, mesh in enumerate(self.meshes):
            out = tmp_path / f"out-{number}"
            reshard.split(model, out, format=self.format, **mesh)
            (out / "reshard.json").unlink()
            assert reshard.diff(out, model, config=None if (out / "config.json").is_file() else model), mesh

    def test_another_mesh_is_reached_without_a_full_checkpoint(self, model: Path, tmp_path: Path) -> None:
        first, *others = self.meshes
        reshard.split(model, tmp_path / "first", format=self.format, **first)
        for number, mesh in enumerate(others):
            at_once, by_way = tmp_path / f"at-once-{number}", tmp_path / f"by-way-{number}"
            reshard.split(model, at_once, format=self.format, **mesh)
            reshard.split(tmp_path / "first", by_way, format=self.format, **mesh)
            expected, found = (_contents(folder) for folder in (at_once, by_way))
            assert expected.keys() == found.keys()
            assert {name for name in found if found[name] != expected[name]} <= {"reshard.json"}, mesh

    def test_bytes_that_are_lost_are_noticed(self, model: Path, tmp_path: Path) -> None:
        reshard.split(model, tmp_path / "out", format=self.format, **self.meshes[-1])
        largest = max(
            (file for file in (tmp_path / "out").rglob("*") if file.is_file()), key=lambda f: f.stat().st_size
        )
        largest.write_bytes(largest.read_bytes()[:-64])
        with pytest.raises(ReshardError):
            reshard.merge(tmp_path / "out", tmp_path / "full")
        assert not (tmp_path / "full").exists()


class StoreTests:
    """A store: what is read from it by ranges is what lies there."""

    @pytest.fixture
    def model(self, tmp_path: Path) -> Path:
        """A tiny model, which ``url`` is to offer."""
        return write_model(tmp_path / "model")

    @pytest.fixture
    def url(self, model: Path) -> str:
        """The URL at which the store has the files of ``model``."""
        raise NotImplementedError

    def files(self, url: str) -> Mapping[str, Any]:
        """The files of the store at a URL, by name."""
        raise NotImplementedError

    def test_all_files_are_there(self, model: Path, url: str) -> None:
        expected = _contents(model)
        assert self.files(url).keys() == expected.keys()
        for name, content in self.files(url).items():
            if isinstance(content, Remote):
                assert content.size == len(expected[name]), name

    def test_ranges_are_those_of_the_file(self, model: Path, url: str) -> None:
        for name, content in self.files(url).items():
            expected = (model / name).read_bytes()
            for start, stop in ((0, 1), (0, len(expected)), (len(expected) // 3, len(expected) // 2)):
                if isinstance(content, Remote) and stop > start:
                    assert bytes(content.read(start, stop)) == expected[start:stop], (name, start, stop)

    def test_a_split_is_that_of_the_folder(self, model: Path, url: str, tmp_path: Path) -> None:
        reshard.split(model, tmp_path / "expected", tp=2)
        reshard.split(url, tmp_path / "out", tp=2)
        expected, found = (_contents(tmp_path / name) for name in ("expected", "out"))
        assert {name for name in found if found[name] != expected.get(name)} <= {"reshard.json"}

    def test_another_content_has_another_identity(self, model: Path, url: str) -> None:
        name = "model-00001-of-00002.safetensors"
        before = getattr(self.files(url)[name], "identity", "local")
        (model / name).write_bytes((model / name).read_bytes()[::-1])
        assert before == "local" or self.files(url)[name].identity != before


class QuantizationTests:
    """A quantization: its tensors go with the weights that they belong to, whatever the mesh."""

    degrees: Sequence[int] = (1, 2)

    @pytest.fixture
    def model(self, tmp_path: Path) -> Path:
        """A quantized checkpoint, of which config.json names the method."""
        raise NotImplementedError

    def test_a_merge_gives_the_original_files(self, model: Path, tmp_path: Path) -> None:
        for tp in self.degrees:
            reshard.split(model, tmp_path / f"out-{tp}", tp=tp)
            reshard.merge(tmp_path / f"out-{tp}", tmp_path / f"full-{tp}")
            assert _contents(tmp_path / f"full-{tp}") == _contents(model), tp

    def test_ranks_hold_less_than_all(self, model: Path, tmp_path: Path) -> None:
        tp = max(self.degrees)
        reshard.split(model, tmp_path / "out", tp=tp)
        largest = max(sum(map(len, _contents(folder).values())) for folder in (tmp_path / "out").glob("rank-*"))
        assert largest < sum(map(len, _contents(model).values()))
