"""``verify`` of transformers' distributed checkpoints: each element of each box, and whether boxes make the tensors."""

from __future__ import annotations

import itertools
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from reshard.api import split
from reshard.formats.errors import IncompleteError
from reshard.formats.files.safetensors import DTYPE_BITS, build_header, read_header
from reshard.source.opening import open_source
from reshard.source.source import Source
from reshard.verify.bytes import blocks
from reshard.verify.bytes.blocks import View, ranges_between
from reshard.verify.bytes.exact import open_shards, verify_exact
from reshard.verify.bytes.exact_report import ExactReport
from reshard.verify.report.answer import exact_summary
from tests import store
from tests.marks import one_of_each, thorough
from tests.support import change_tensor
from tests.verify.faults import sign
from tests.verify.test_forward import QUICK, run_all

KEY = "DCP_SHARDING_INFO"
GATE, UP = (f"model.layers.1.mlp.{name}_proj.weight" for name in ("gate", "up"))

MESHES: list[tuple[str, dict[str, int]]] = [
    ("llama", {"tp": 4}),
    ("gemma2", {"tp": 4}),
    ("phi3", {"tp": 4}),
    ("qwen3_moe", {"tp": 2}),
    ("deepseek_v3", {"tp": 2, "ep": 2}),
    ("gpt2", {"tp": 2}),
    ("falcon-7b", {"tp": 2}),
    ("gpt_oss", {"tp": 2}),
    ("t5", {"tp": 2}),
]
"""A vocabulary that does not divide, tied names, packed rows, joined and stacked experts, input before output."""


def written(name: str, **mesh: int) -> Path:
    key = "-".join(map(str, (name, "boxes", *mesh.values())))
    return store.made(key, lambda path: split(store.checkpoint(name), path, format="transformers", **mesh))


def exact(folder: Path, name: str) -> ExactReport:
    return verify_exact(store.source(name), folder)


Stored = dict[str, tuple[str, list[int], np.ndarray[Any, Any]]]
"""The dtype, the offset and the elements of each box of a file."""


def boxes_of(file: Path) -> Stored:
    header, content = read_header(file), file.read_bytes()
    info = json.loads(header.metadata[KEY])
    found = {}
    for name, tensor in header.tensors.items():
        raw = np.frombuffer(content, f"<u{DTYPE_BITS[tensor.dtype] // 8}", -1, tensor.offset)
        elements = raw[: int(np.prod(tensor.shape, dtype=int))].reshape(tensor.shape).copy()
        found[name] = tensor.dtype, info[name]["saved_offsets"], elements
    return found


def write_boxes(file: Path, boxes: Stored, metadata: dict[str, str] | None = None) -> None:
    """A file with these boxes, as torch writes it, or with more metadata."""
    info = {name: {"saved_offsets": offset} for name, (_, offset, _) in boxes.items()}
    said = {"format": "pt", "DCP_VERSION": "1.0", **(metadata or {}), KEY: json.dumps(info)}
    listed = [(name, dtype, elements.shape) for name, (dtype, _, elements) in boxes.items()]
    file.write_bytes(build_header(listed, said) + b"".join(e.tobytes() for _, _, e in boxes.values()))


def as_others_write(folder: Path) -> None:
    """Take away what reshard says of itself."""
    (folder / "reshard.json").unlink(missing_ok=True)
    for file in folder.glob("*.safetensors"):
        write_boxes(file, boxes_of(file))


@pytest.fixture(params=["ours", "others"])
def llama(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A Llama on four ranks, as reshard and as another program writes it."""
    folder = Path(shutil.copytree(written("llama", tp=4), tmp_path / "out"))
    if request.param == "others":
        as_others_write(folder)
    return folder


@pytest.mark.parametrize(
    ("name", "mesh"), one_of_each(MESHES, lambda case: case[0] if case[0] in {"gpt_oss", "t5"} else None)
)
def test_correct_boxes_are_the_same(name: str, mesh: dict[str, int], tmp_path: Path) -> None:
    folder = Path(shutil.copytree(written(name, **mesh), tmp_path / "out"))
    weights = [read_header(file) for file in folder.glob("*.safetensors")]
    found = exact(folder, name)
    assert (found.verdict, found.format) == ("same", "transformers"), found
    assert found.nbytes == sum(info.nbytes for header in weights for info in header.tensors.values())
    (folder / "reshard.json").unlink()
    assert exact(folder, name).verdict == "same"
    as_others_write(folder)
    assert exact(folder, name).verdict == "same"


@pytest.mark.parametrize(("name", "mesh"), one_of_each(MESHES, lambda case: case[0]))
def test_one_bit_in_any_box_is_found_and_named(name: str, mesh: dict[str, int], tmp_path: Path) -> None:
    folder = Path(shutil.copytree(written(name, **mesh), tmp_path / "out"))
    random, wanted = np.random.default_rng(0), set()
    files = sorted(folder.glob("*.safetensors"))
    ranks = int(np.prod([*mesh.values()]))
    for file in files:
        for stored, info in read_header(file).tensors.items():
            change_tensor(file, stored, at=int(random.integers(info.nbytes)))
            wanted.add((stored, (int(file.name[6:11]) - 1) % ranks))
    sign(folder)
    found = exact(folder, name)
    assert {(damage.stored, damage.rank) for damage in found.damages} == wanted
    assert sum(damage.elements for damage in found.damages) == sum(len(read_header(f).tensors) for f in files)
    assert not (found.problems or found.missing or found.extra or found.configs)


@given(st.data())
def test_the_indices_between_two_places(data: st.DataObject) -> None:
    """Also where the place of a factor is followed by a gap, in which the atoms of others lie."""
    lengths = data.draw(st.lists(st.integers(1, 4), max_size=3))
    steps, extent = [], 1
    for length in reversed(lengths):
        steps.insert(0, extent + data.draw(st.integers(0, 3)))
        extent = steps[0] * (length - 1) + extent
    begin = data.draw(st.integers(-2, extent + 1))
    end = data.draw(st.integers(begin, extent + 3))
    found = [
        index
        for runs in ranges_between([*zip(lengths, steps, strict=True)], begin, end)
        for index in itertools.product(*(range(run.offset, run.end) for run in runs))
    ]
    every = itertools.product(*map(range, lengths))
    assert sorted(found) == [i for i in every if begin <= sum(a * b for a, b in zip(i, steps, strict=True)) < end]


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 2)), max_size=3), st.sampled_from([1, 8, 40, 1 << 20]))
def test_chunks_have_each_element_once(sizes: list[tuple[int, int]], most: int) -> None:
    """In the padded tensor, and of the original those before which as many of its elements lie."""
    shape, padded = tuple(size for size, _ in sizes), tuple(map(sum, sizes))
    is_inside = np.zeros(padded, bool)
    is_inside[tuple(map(slice, shape))] = True
    before = np.concatenate([[0], np.cumsum(is_inside)]).tolist()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(blocks, "CHUNK", most)
        view = View(shape, padded, 16, [])
        chunks = [*view.chunks()]
    assert [i for chunk in chunks for i in range(chunk.offset, chunk.end)] == [*range(is_inside.size)]
    for chunk in chunks:
        own = view.of_original(chunk)
        assert (own.offset, own.end) == (before[chunk.offset], before[chunk.end])


@pytest.mark.parametrize("shape", [(), (1 << 20,), (1 << 20, 1), (1 << 10, 1 << 10), (1 << 7, 1 << 10, 1 << 3)])
def test_what_is_small_is_one_chunk(shape: tuple[int, ...]) -> None:
    assert len([*View(shape, shape, 16, []).chunks()]) == 1


def test_a_checksum_of_a_damaged_file_is_not_told_again(tmp_path: Path) -> None:
    """Also where a rank has several files; then the forward can still be run."""
    folder = Path(shutil.copytree(written("phi3", tp=4), tmp_path / "out"))
    for file in folder.glob("*.safetensors"):
        change_tensor(file, max(read_header(file).tensors))
    found = exact(folder, "phi3")
    assert len(found.damages) >= 4 and found.comparable and not found.problems


def test_the_first_file_of_others_is_missing(tmp_path: Path) -> None:
    folder = Path(shutil.copytree(written("llama", tp=4), tmp_path / "out"))
    as_others_write(folder)
    change_tensor(folder / "shard-00004-model-00001-of-00001.safetensors", GATE)
    found = exact(folder, "llama")
    assert {(damage.stored, damage.rank) for damage in found.damages} == {(GATE, 3)}
    assert (found.mesh, found.ranks) == ("of no stated mesh", None)
    assert " tensors, of no stated mesh, in the format transformers" in exact_summary(found)
    (folder / "shard-00001-model-00001-of-00001.safetensors").unlink()
    with pytest.raises(IncompleteError, match="the file of shard 1 is missing"):
        exact(folder, "llama")


@pytest.mark.parametrize("name", ["phi3", "qwen3_moe", "gpt_oss", "falcon-7b", "gpt2"])
@thorough
def test_boxes_may_begin_and_end_anywhere(name: str, tmp_path: Path) -> None:
    """Also in the middle of a head, and across gate and up."""
    folder = Path(shutil.copytree(written(name, tp=1), tmp_path / "out"))
    (file,) = folder.glob("*.safetensors")
    random, parts = np.random.default_rng(1), [Stored() for _ in range(9)]
    for stored, (dtype, _, elements) in boxes_of(file).items():
        cuts = [sorted({0, n, *random.integers(1, max(2, n), 2).tolist()} - {0} | {0}) for n in elements.shape]
        cuts = [[cut for cut in of if cut <= n] for of, n in zip(cuts, elements.shape, strict=True)]
        cells = np.ndindex(*(len(of) - 1 for of in cuts))
        boxes = [[(of[i], of[i + 1]) for of, i in zip(cuts, cell, strict=True)] for cell in cells]
        boxes = boxes if len(boxes) <= len(parts) else [[(0, n) for n in elements.shape]]
        for part, box in zip(parts, boxes, strict=False):
            part[stored] = dtype, [begin for begin, _ in box], elements[tuple(slice(b, e) for b, e in box)]
    file.unlink()
    (folder / "reshard.json").unlink()
    for number, part in enumerate(parts):
        write_boxes(folder / f"shard-{number + 1:05d}-model-00001-of-00001.safetensors", part)
    assert exact(folder, name).verdict == "same"
    for number, part in enumerate(parts):
        path = folder / f"shard-{number + 1:05d}-model-00001-of-00001.safetensors"
        for stored, (_, _, elements) in part.items():
            if elements.size:
                change_tensor(path, stored, at=int(random.integers(elements.nbytes)))
    found = exact(folder, name)
    assert sum(damage.elements for damage in found.damages) == sum(e.size > 0 for p in parts for _, _, e in p.values())
    first = found.first
    assert first is not None and first.original_file is not None and first.original_offset is not None
    size = len(first.expected)
    assert Path(first.original_file).read_bytes()[first.original_offset :][:size] == first.expected
    assert Path(first.file).read_bytes()[first.offset :][:size] == first.found
    info = store.source(name).ranks[0][first.tensor]
    assert first.original_offset == info.offset + int(np.ravel_multi_index(first.index, info.shape)) * size


# ----------------------------------------------------------------------------------------------------------- faults

Change = Callable[[list[Stored]], None]


def changed(folder: Path, change: Change) -> ExactReport:
    """The report of a folder with other boxes, whose checksums fit."""
    files = sorted(folder.glob("*.safetensors"))
    boxes = [boxes_of(file) for file in files]
    change(boxes)
    for file, found in zip(files, boxes, strict=True):
        write_boxes(file, found, dict(read_header(file).metadata))
    if (folder / "reshard.json").exists():
        sign(folder)
        document = json.loads((folder / "reshard.json").read_text())
        for rank in document["ranks"]:
            for record in rank["files"]:
                record["size"] = (folder / record["name"]).stat().st_size
        (folder / "reshard.json").write_text(json.dumps(document, indent=2, ensure_ascii=False) + "\n")
    return exact(folder, "llama")


def _moved(boxes: list[Stored], name: str, file: int, by: int) -> None:
    dtype, offset, elements = boxes[file][name]
    boxes[file][name] = dtype, [offset[0] + by, *offset[1:]], elements


def _exchange(boxes: list[Stored], one: tuple[int, str], other: tuple[int, str], *, which: int) -> None:
    """Exchange the offsets (1) or the elements (2) of two boxes."""
    first, second = list(boxes[one[0]][one[1]]), list(boxes[other[0]][other[1]])
    first[which], second[which] = second[which], first[which]
    boxes[one[0]][one[1]], boxes[other[0]][other[1]] = tuple(first), tuple(second)  # type: ignore[assignment]


def _twice(boxes: list[Stored]) -> None:
    boxes[3][GATE] = boxes[2][GATE]


def _typed(boxes: list[Stored]) -> None:
    _, offset, elements = boxes[1][GATE]
    boxes[1][GATE] = "I32", offset, elements


SAID: list[tuple[str, Change, str, dict[str, str]]] = [
    (
        "missing",
        lambda boxes: boxes[1].pop(GATE) and None,
        "missing",
        {"ours": f"shard-00002-model-00001-of-00001.safetensors: [{{1}}:{{2}}, 0:{{w}}] of '{GATE}'"},
    ),
    (
        "hole",
        lambda boxes: boxes[1].pop(GATE) and None,
        "problems",
        {"others": f"'{GATE}': no file has {{part}} of its elements, the first at [{{1}}, 0]"},
    ),
    (
        "overlap",
        _twice,
        "problems",
        {
            "ours": f"has [{{2}}:{{3}}, 0:{{w}}] of '{GATE}', the mesh gives it [{{3}}:{{4}}, 0:{{w}}]",
            "others": f"'{GATE}': several files have {{part}} of its elements, the first at [{{2}}, 0] (shard-00003",
        },
    ),
    (
        "moved",
        lambda boxes: _moved(boxes, GATE, 1, 1),
        "problems",
        {
            "ours": f"of '{GATE}', the mesh gives it [{{1}}:{{2}}, 0:{{w}}]",
            "others": f"'{GATE}': several files have {{w}} of its elements, the first at [{{2}}, 0] (shard-00002",
        },
    ),
    (
        "beyond",
        lambda boxes: _moved(boxes, GATE, 3, 1),
        "problems",
        {"ours": f"of '{GATE}', which is [{{4}}, {{w}}]", "others": f"of '{GATE}', which is [{{4}}, {{w}}]"},
    ),
    ("typed", _typed, "problems", {"ours": f"tensor '{GATE}' is I32 [", "others": f"tensor '{GATE}' is I32 ["}),
    (
        "offsets",
        lambda boxes: _exchange(boxes, (0, GATE), (2, GATE), which=1),
        "problems",
        {"ours": f"has [{{2}}:{{3}}, 0:{{w}}] of '{GATE}', the mesh gives it [0:{{1}}, 0:{{w}}]"},
    ),
    (
        "unknown",
        lambda boxes: boxes[2].update(more=("F32", [0], np.zeros(1, "u4"))),
        "extra",
        dict.fromkeys(("ours", "others"), "shard-00003-model-00001-of-00001.safetensors: more"),
    ),
]


@pytest.mark.parametrize(("change", "where", "said"), [case[1:] for case in SAID], ids=[case[0] for case in SAID])
@thorough
def test_boxes_that_do_not_make_the_tensors(
    llama: Path, change: Change, where: str, said: dict[str, str], request: pytest.FixtureRequest
) -> None:
    form = request.node.callspec.params["llama"]
    height, width = store.source("llama").ranks[0][GATE].shape
    numbers = {str(i): height * i // 4 for i in range(1, 5)} | {"w": width, "part": f"{height // 4 * width:,}"}
    found = changed(llama, change)
    assert found.verdict == "different"
    text = said.get(form)
    for key, value in numbers.items():
        text = text.replace(f"{{{key}}}", str(value)) if text else None
    assert text is None or any(text in line for line in getattr(found, where)), (text, found)


def _only_these_differ(found: ExactReport, *places: tuple[int, str]) -> None:
    assert {(damage.rank, damage.stored) for damage in found.damages} == {*places}
    assert not (found.problems or found.missing or found.extra or found.configs)


@pytest.mark.parametrize("other", [(0, UP), (2, GATE)], ids=["tensors", "ranks"])
def test_exchanged_boxes_are_named(llama: Path, other: tuple[int, str]) -> None:
    _only_these_differ(changed(llama, lambda boxes: _exchange(boxes, (0, GATE), other, which=2)), (0, GATE), other)


def test_exchanged_offsets_of_a_program_that_says_no_mesh(tmp_path: Path) -> None:
    """The boxes make the tensor, but with other elements."""
    folder = Path(shutil.copytree(written("llama", tp=4), tmp_path / "out"))
    as_others_write(folder)
    one, other = (0, GATE), (2, GATE)
    _only_these_differ(changed(folder, lambda boxes: _exchange(boxes, one, other, which=1)), one, other)


def test_every_box_of_a_tensor_is_missing(llama: Path) -> None:
    found = changed(llama, lambda boxes: [of.pop(GATE, None) for of in boxes] and None)
    assert f"{GATE}, of '{GATE}'" in found.missing


def test_files_of_several_parts(tmp_path: Path) -> None:
    split(store.checkpoint("phi3"), tmp_path / "out", tp=4, format="transformers", max_shard_size=20_000)
    assert len([*(tmp_path / "out").glob("shard-00001-*.safetensors")]) > 1
    assert exact(tmp_path / "out", "phi3").verdict == "same"


# ---------------------------------------------------------------------------------------------------------- forward


def _pair(name: str, folder: Path) -> tuple[Source, Source]:
    original = open_source(store.checkpoint(name))
    shards = open_shards(folder, original)
    assert isinstance(shards, Source)
    return original, shards


@thorough
def test_correct_boxes_compute_the_same() -> None:
    meshes = [(name, mesh) for name, mesh in MESHES if name != "falcon-7b"]
    pairs = [_pair(name, written(name, **mesh)) for name, mesh in meshes]
    for (name, _), report in zip(meshes, run_all(pairs, QUICK), strict=True):
        assert report.is_same, (name, report.verdict)


FORWARD: dict[str, tuple[Change, str]] = {
    "boxes of two tensors": (lambda boxes: _exchange(boxes, (0, GATE), (0, UP), which=2), ".1."),
    "boxes of two ranks": (lambda boxes: _exchange(boxes, (1, GATE), (2, GATE), which=2), ".1."),
    "two layers": (lambda boxes: _exchange(boxes, (3, GATE), (3, GATE.replace(".1.", ".2.")), which=2), ".1."),
    "rows of the vocabulary": (
        lambda boxes: _exchange(boxes, (0, "model.embed_tokens.weight"), (1, "model.embed_tokens.weight"), which=2),
        "embedding",
    ),
}


@thorough
def test_the_forward_alone_sees_exchanged_boxes(tmp_path: Path) -> None:
    pairs = []
    for number, (change, _) in enumerate(FORWARD.values()):
        folder = Path(shutil.copytree(written("llama", tp=4), tmp_path / str(number)))
        changed(folder, change)
        pairs.append(_pair("llama", folder))
    for (fault, (_, place)), report in zip(FORWARD.items(), run_all(pairs, QUICK), strict=True):
        ratio = max(row.ratio for row in report.layers)
        assert not report.is_same and ratio > 1000, (fault, ratio)
        assert place in f"{report.first}.", (fault, report.first)
