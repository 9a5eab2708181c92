"""The byte comparison finds every fault, names tensor and rank, and has nothing to say about correct shards."""

from __future__ import annotations

import json
import math
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from reshard.api import split
from reshard.cli.commands import main
from reshard.formats.errors import CheckpointError, PlanError
from reshard.formats.files.safetensors import build_header, parse_header, read_header
from reshard.formats.mesh import Mesh
from reshard.formats.notation.architecture import architecture_from_document
from reshard.formats.notation.axes import Run
from reshard.formats.notation.format_file import HUGGING_FACE, OWN
from reshard.mesh.plan import Box, Layout, Plan, make_plan
from reshard.model.binding import bind
from reshard.model.model import FullTensor
from reshard.placement.arrangement import arrangement_of
from reshard.source.opening import open_source
from reshard.verify.bytes import blocks, exact_report
from reshard.verify.bytes.blocks import check_all_owned
from reshard.verify.bytes.comparison import Comparison
from reshard.verify.bytes.exact import verify_exact
from reshard.verify.bytes.exact_report import ExactReport
from reshard.verify.bytes.reading import Files
from tests import store
from tests.marks import examples, one_of_each, thorough
from tests.verify.faults import FAULTS, inject

MODELS = ("llama", "phi3", "gpt_neox", "gpt2", "mixtral", "gpt_oss", "deepseek_v3")

# what does not apply: nothing packed in blocks, no gated MLP, no bias, not square, learned positions, no experts
EXEMPT = {
    "llama": {"packed_by_plain_chunks", "row_bias_on_every_rank", "row_split_by_columns", "transposed_square",
              "one_expert", "router"},
    "phi3": {"row_bias_on_every_rank", "row_split_by_columns", "transposed_square", "one_expert", "router"},
    "gpt_neox": {"packed_by_plain_chunks", "gate_and_up", "one_expert", "router"},
    "gpt2": {"gate_and_up", "rotary_halves", "one_expert", "router"},
    "mixtral": {"packed_by_plain_chunks", "row_bias_on_every_rank", "row_split_by_columns", "transposed_square"},
    "gpt_oss": {"packed_by_plain_chunks", "row_split_by_columns", "transposed_square"},
    "deepseek_v3": {"packed_by_plain_chunks", "row_bias_on_every_rank"},
}  # fmt: skip


@dataclass(frozen=True)
class Pair:
    original: Path
    shards: Path


@pytest.fixture(scope="module")
def pairs() -> Callable[..., Pair]:
    """A checkpoint of the zoo and its shards, made once."""

    def get(name: str, tp: int, dtype: str = "float32") -> Pair:
        return Pair(store.checkpoint(name, dtype), store.shards(name, dtype, tp=tp))

    return get


@pytest.fixture
def llama(pairs: Callable[..., Pair], tmp_path: Path) -> Pair:
    """Llama in float32 on four ranks, to be damaged."""
    pair = pairs("llama", 4)
    return Pair(pair.original, Path(shutil.copytree(pair.shards, tmp_path / "shards")))


def check(pair: Pair) -> ExactReport:
    return verify_exact(open_source(pair.original), pair.shards)


# ------------------------------------------------------------------------------------------------------ the right ones


@pytest.mark.parametrize(("name", "tp", "ep"), [("mixtral", 2, 3), ("gpt_oss", 2, 3), ("deepseek_v3", 2, 3)])
def test_experts_dealt_to_ranks(name: str, tp: int, ep: int, pairs: Callable[..., Pair], tmp_path: Path) -> None:
    """Ranks that hold nothing of a tensor (another rank's expert), and tensors that two mesh dimensions split."""
    original = pairs(name, 2).original
    split(original, tmp_path / "out", tp=tp, ep=ep)
    pair = Pair(original, tmp_path / "out")
    report = check(pair)
    assert (report.verdict, report.ranks) == ("same", tp * ep), report
    last = open_source(pair.shards).ranks[-1]
    info = next(info for name, info in last.items() if "experts" in name)
    put(info.file, info.name, 7, b"abcd")
    found = check(pair)
    assert [(d.tensor, d.rank, d.elements) for d in found.damages] == [(info.name, tp * ep - 1, 1)]
    assert found.first is not None and found.first.offset == info.offset + 7 * 4


@thorough
def test_small_chunks_find_the_same(
    pairs: Callable[..., Pair], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the size of a chunk: correct shards pass, and the same difference is found."""
    for name, tp in [("llama", 2), ("gpt2", 2), ("gpt_oss", 2)]:
        pair = pairs(name, tp)
        damaged = Pair(pair.original, Path(shutil.copytree(pair.shards, tmp_path / name)))
        inject("another_ranks_file", damaged.shards, open_source(pair.original))
        expected = check(damaged)
        for size in (300, 8192, 1 << 20):
            monkeypatch.setattr(blocks, "CHUNK", size)
            assert check(pair).verdict == "same"
            assert check(damaged) == expected
        monkeypatch.undo()


def test_several_files_and_more_padding_and_no_manifest(pairs: Callable[..., Pair], tmp_path: Path) -> None:
    original = pairs("llama", 4).original
    split(original, tmp_path / "out", tp=4, max_shard_size=60_000, pad_vocab_to=64)
    (tmp_path / "out" / "reshard.json").unlink()
    report = check(Pair(original, tmp_path / "out"))
    assert report.verdict == "same", report


def test_nan_payloads_and_signs_of_zero(llama: Pair, tmp_path: Path) -> None:
    original = Path(shutil.copytree(llama.original, tmp_path / "nan"))
    name = "model.norm.weight"
    put(original / "model.safetensors", name, 3, b"\x01\x00\xc0\x7f")
    put(original / "model.safetensors", name, 4, b"\x00\x00\x00\x80")
    split(original, tmp_path / "out", tp=4)
    pair = Pair(original, tmp_path / "out")
    assert check(pair).verdict == "same"
    file = "rank-02-of-04/model.safetensors"
    put(pair.shards / file, name, 3, b"\x02\x00\xc0\x7f")
    put(pair.shards / file, name, 4, b"\x00\x00\x00\x00")
    report = check(pair)
    assert [(d.tensor, d.rank, d.nbytes, d.elements) for d in report.damages] == [(name, 2, 2, 2)]
    assert report.first is not None and report.first.index == (3,)


def put(file: Path, tensor: str, element: int, content: bytes) -> int:
    """Overwrite one element; the byte of the file at which it begins."""
    offset = read_header(file).tensors[tensor].offset + element * len(content)
    with file.open("r+b") as opened:
        opened.seek(offset)
        opened.write(content)
    return offset


# ---------------------------------------------------------------------------------------------------------- the faults


@pytest.mark.parametrize(
    ("name", "tp", "dtype"),
    one_of_each(
        [*((name, 4, "float32") for name in MODELS), *((name, 2, "bfloat16") for name in ("phi3", "gpt_oss"))],
        kind=lambda case: case[2],
    ),
)
def test_every_fault_is_found(name: str, tp: int, dtype: str, pairs: Callable[..., Pair], tmp_path: Path) -> None:
    pair = pairs(name, tp, dtype)
    original = open_source(pair.original)
    found = set()
    for fault in FAULTS:
        folder = tmp_path / fault
        shutil.copytree(pair.shards, folder)
        damaged = inject(fault, folder, original)
        report = verify_exact(original, folder)
        assert {(d.tensor, d.rank) for d in report.damages} == damaged, fault
        assert report.comparable and not report.extra and not report.configs, fault
        if damaged:
            found.add(fault)
            assert report.verdict == "different", fault
            assert report.first is not None and (report.first.tensor, report.first.rank) in damaged, fault
        else:
            assert report.verdict == "same", fault
        shutil.rmtree(folder)
    assert set(FAULTS) - found == EXEMPT[name]


def test_first_difference_and_counts(llama: Pair) -> None:
    """Two elements of a row-parallel weight, on rank 2 of 4, of 96 columns: [5, 48 + 7] and [9, 48 + 0]."""
    name, file = "model.layers.1.self_attn.o_proj.weight", llama.shards / "rank-02-of-04/model.safetensors"
    before = file.read_bytes()
    offset = put(file, name, 5 * 24 + 7, b"\x01\x02\x03\x04")
    put(file, name, 9 * 24, b"\x05\x06\x07\x08")
    report = check(llama)
    info = open_source(llama.original).ranks[0][name]
    full = np.fromfile(info.file, np.uint8, info.nbytes, offset=info.offset).reshape(80, 96, 4)
    assert report.first == exact_report.FirstDifference(
        name, (5, 55), 2, str(file), offset, full[5, 55].tobytes(), b"\x01\x02\x03\x04", str(info.file),
        info.offset + (5 * 96 + 55) * 4,
    )  # fmt: skip
    assert full[5, 55].tobytes() == before[offset : offset + 4]
    changed = sum(a != b for a, b in zip(before, file.read_bytes(), strict=True))
    assert report.damages == (exact_report.Damage(name, 2, changed, 2),)


def test_replica_that_differs(llama: Pair) -> None:
    put(llama.shards / "rank-03-of-04/model.safetensors", "model.norm.weight", 79, b"abcd")
    report = check(llama)
    assert report.first is not None
    assert (report.first.rank, report.first.index, report.first.found) == (3, (79,), b"abcd")


def test_padding_is_zero(llama: Pair) -> None:
    """Vocabulary 101 on 4 ranks is padded to 104: rank 3 has rows 78 to 103, of which three are zeros."""
    offset = put(llama.shards / "rank-03-of-04/model.safetensors", "lm_head.weight", 24 * 80 + 5, b"\0\0\0\x80")
    report = check(llama)
    first = report.first
    assert first is not None
    assert (first.index, first.offset, first.expected, first.original_file) == ((102, 5), offset, b"\0\0\0\0", None)
    assert "(padding)" in str(first)
    assert [(d.nbytes, d.elements) for d in report.damages] == [(1, 1)]


# --------------------------------------------------------------------------------------------------- all but the bytes


def rewrite(file: Path, change: Callable[[list[Any], dict[str, Any]], bytes]) -> None:
    """Write a shard file with a changed header; ``change`` gets tensors and metadata, and returns what to append."""
    raw = file.read_bytes()
    header = parse_header(read_header(file).raw, file, len(raw))
    tensors: list[Any] = [[t.name, t.dtype, t.shape] for t in header.tensors.values()]
    more = change(tensors, header.metadata)
    file.write_bytes(build_header([tuple(t) for t in tensors], header.metadata) + raw[len(header.raw) :] + more)


def test_extra_and_missing_files(llama: Pair) -> None:
    rank = llama.shards / "rank-00-of-04"
    shutil.copyfile(rank / "model.safetensors", rank / "old.safetensors")
    shutil.copytree(rank, llama.shards / "rank-00-of-02")
    shutil.copyfile(rank / "model.safetensors", llama.shards / "model.safetensors")
    (rank / "notes.txt").write_text("?")
    assert check(llama).extra == (
        "model.safetensors", "rank-00-of-02", "rank-00-of-04/notes.txt", "rank-00-of-04/old.safetensors"
    )  # fmt: skip


def test_missing_and_extra_tensors(llama: Pair) -> None:
    """In all ranks alike, so that the shards agree with one another."""
    (llama.shards / "reshard.json").unlink()

    def rename(tensors: list[Any], _: dict[str, Any]) -> bytes:
        next(t for t in tensors if t[0] == "model.layers.2.mlp.up_proj.weight")[0] = "model.layers.3.mlp.up_proj.weight"
        return b""

    def add(tensors: list[Any], _: dict[str, Any]) -> bytes:
        tensors.append(["model.norm.bias", "F32", (80,)])
        return bytes(320)

    for change in (add, rename):
        for rank in range(4):
            rewrite(llama.shards / f"rank-{rank:02d}-of-04/model.safetensors", change)
        report = check(llama)
        assert report.verdict == "different", change
    assert not report.comparable


def test_extra_tensor_is_named(llama: Pair, tmp_path: Path) -> None:
    """The shards of a model with one tensor more than the original."""
    more = Path(shutil.copytree(llama.original, tmp_path / "more"))

    def add(tensors: list[Any], _: dict[str, Any]) -> bytes:
        tensors.append(["model.norm.bias", "F32", (80,)])
        return bytes(320)

    rewrite(more / "model.safetensors", add)
    split(more, tmp_path / "out", tp=2)
    report = check(Pair(llama.original, tmp_path / "out"))
    assert report.extra == ("rank-00-of-02: model.norm.bias", "rank-01-of-02: model.norm.bias")
    assert not report.damages
    reverse = check(Pair(more, llama.shards))
    assert reverse.missing == tuple(f"rank-0{rank}-of-04: model.norm.bias" for rank in range(4))
    assert not reverse.damages


def test_dtype_and_shape(llama: Pair) -> None:
    def other_dtype(tensors: list[Any], _: dict[str, Any]) -> bytes:
        next(t for t in tensors if t[0] == "model.norm.weight")[1] = "I32"
        return b""

    for rank in range(4):
        rewrite(llama.shards / f"rank-{rank:02d}-of-04/model.safetensors", other_dtype)
    (llama.shards / "reshard.json").unlink()
    report = check(llama)
    assert len(report.problems) == 4 and "model.norm.weight" in report.problems[0] and "I32 [80]" in report.problems[0]
    assert not report.damages

    def other_shape(tensors: list[Any], _: dict[str, Any]) -> bytes:
        next(t for t in tensors if t[0] == "model.layers.0.self_attn.q_proj.weight")[2] = (80, 24)
        return b""

    rewrite(llama.shards / "rank-00-of-04/model.safetensors", other_shape)
    assert "q_proj.weight' is F32 [80, 24], rank 0 of tp 4 has" in check(llama).problems[0]


def test_rank_config(llama: Pair) -> None:
    path = llama.shards / "rank-02-of-04/config.json"
    config = json.loads(path.read_text())
    config |= {"num_attention_heads": 8, "extra": 1}
    del config["rms_norm_eps"]
    path.write_text(json.dumps(config))
    assert f"{path} has" in check(llama).problems[0]  # already its size is not the manifest's
    (llama.shards / "reshard.json").unlink()
    found = {(c.file, c.key, c.expected, c.found) for c in check(llama).configs}
    name = "rank-02-of-04/config.json"
    assert found == {
        (name, "num_attention_heads", "2", "8"), (name, "extra", None, "1"), (name, "rms_norm_eps", "1e-06", None)
    }  # fmt: skip


def test_another_model(pairs: Callable[..., Pair]) -> None:
    report = check(Pair(pairs("phi3", 2).original, pairs("llama", 2).shards))
    assert report.verdict == "different"
    assert any(c.key == "model_type" for c in report.configs)


@pytest.mark.parametrize("names", [["model.layers.1.mlp.up_proj.weight"], None], ids=["one", "all"])
def test_another_run_of_the_same_shapes(names: list[str] | None, llama: Pair, tmp_path: Path) -> None:
    """The tensors of a fine-tune are other ones, and so is the source that the shards say they come from."""
    tuned = Path(shutil.copytree(llama.original, tmp_path / "tuned"))
    tensors = load_file(tuned / "model.safetensors")
    changed = {*(names or tensors)}
    of_tuned = {name: tensor * 1.01 if name in changed else tensor for name, tensor in tensors.items()}
    save_file(of_tuned, tuned / "model.safetensors", metadata={"format": "pt"})
    split(tuned, tmp_path / "out", tp=4)
    report = check(Pair(llama.original, tmp_path / "out"))
    assert {damage.tensor for damage in report.damages} == changed
    assert "the shards say that they come from " in str(report.problems)


def test_truncated_file(llama: Pair) -> None:
    path = llama.shards / "rank-00-of-04/model.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    assert str(path) in check(llama).problems[0]


def test_what_cannot_be_checked(llama: Pair, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no such folder"):
        verify_exact(open_source(llama.original), tmp_path / "nothing")


# ------------------------------------------------------------------------------------------------------------ the laws


@examples(100)
@given(data=st.data())
@thorough
def test_any_layout_and_any_byte(data: st.DataObject, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Splits of any one dimension, with any chunk: the right shards pass, and one wrong byte is found where it is."""
    rule = data.draw(st.sampled_from([
        "(p a) b", "b (p a)", "(p a + p b) c", "c (p a + p b) d", "c d (b p a)", "(b (p + p) a) 3", "(p 2)", "v a",
        "a v",
        "a b -> (p 2)", "(a p b) c d",
    ]))  # fmt: skip
    sizes = {axis: data.draw(st.integers(1, 5)) for axis in "abcd"} | {"p": 4, "v": 4 * data.draw(st.integers(1, 4))}
    sizes["v"] = max(1, sizes["v"] - data.draw(st.integers(0, 3)))
    document = {"parallel": {"tp": [["p"], ["v"]], "pad": ["v"]}, "sizes": {k: str(n) for k, n in sizes.items()},
                "tensors": {"w": rule, "x": "p"}}  # fmt: skip
    architecture = architecture_from_document(document, "any", "any")
    (shape,) = (s.sizes(sizes) for r in architecture.tensors["w"] for s in r.shapes)
    dtype = data.draw(st.sampled_from(["U8", "BF16", "F32", "F64"]))
    model = bind(architecture, {}, [FullTensor("w", dtype, shape, "here"), FullTensor("x", "U8", (4,), "here")])
    plan = make_plan(model, Mesh((("tp", data.draw(st.sampled_from([2, 4]))),)))
    folder = tmp_path_factory.mktemp("law")
    layout, item = plan.layouts["w"], {"U8": 1, "BF16": 2, "F32": 4, "F64": 8}[dtype]
    full = np.random.default_rng(0).integers(1, 256, (*shape, item), np.uint8)
    padded = np.pad(full, [*((0, p - n) for p, n in zip(layout.padded, shape, strict=True)), (0, 0)])
    one = _saved(folder / "full.safetensors", dtype, full)
    parts = []
    for rank in range(len(layout.boxes)):
        index = [np.concatenate([np.arange(run.offset, run.end) for run in dim]) for dim in layout.boxes[rank].dims]
        parts.append(_saved(folder / f"{rank}.safetensors", dtype, padded[np.ix_(*index, np.arange(item))]))
    wrong = data.draw(st.integers(0, len(parts) - 1))
    at = data.draw(st.integers(0, parts[wrong]["w"].nbytes - 1))
    before, blocks.CHUNK = blocks.CHUNK, data.draw(st.sampled_from([1, 8, 40, 1000, 1 << 20]))
    try:
        one_source: Any = _Tensors((one,), model)
        sources: Any = _Tensors(tuple(parts), model)
        assert _compared(one_source, sources, plan).damages == ()
        info = parts[wrong]["w"]
        content = bytearray(info.file.read_bytes())
        content[info.offset + at] ^= 255
        info.file.write_bytes(content)
        report = _compared(one_source, sources, plan)
    finally:
        blocks.CHUNK = before
    assert report.damages == (exact_report.Damage("w", wrong, 1, 1),)
    first = report.first
    assert first is not None and first.offset == info.offset + at // item * item
    assert padded[first.index].tobytes() == first.expected
    assert layout.boxes[wrong].shape and _index_of(layout.boxes[wrong], at // item) == first.index


@pytest.mark.parametrize(("dtype", "bits", "element"), [("F4", 4, 14), ("F6_E2M3", 6, 9)])
def test_elements_that_share_bytes(dtype: str, bits: int, element: int, tmp_path: Path) -> None:
    """Of a wrong byte, the first element that has bits in it is named."""
    document = {"parallel": {"tp": [["p"]]}, "sizes": {"p": "4", "a": "2"}, "tensors": {"w": "(p a) 16"}}
    model = bind(architecture_from_document(document, "any", "any"), {}, [FullTensor("w", dtype, (8, 16), "here")])
    full = np.random.default_rng(0).integers(1, 256, (8, 16 * bits // 8), np.uint8)

    def saved(name: str, content: np.ndarray[Any, Any]) -> Any:
        path = tmp_path / name
        path.write_bytes(build_header([("w", dtype, (len(content), 16))], {}) + content.tobytes())
        return read_header(path).tensors

    parts = full[:4], full[4:].copy()
    one, plan = saved("full", full), make_plan(model, Mesh((("tp", 2),)))
    assert _compared(_Tensors((one,), model), _Tensors((saved("0", parts[0]), saved("1", parts[1])), model), plan) == (
        ExactReport("tp 2", 2, 1, full.size)
    )
    parts[1][2, 7] ^= 255
    ranks = saved("0", parts[0]), saved("1", parts[1])
    report = _compared(_Tensors((one,), model), _Tensors(ranks, model), plan)
    first, at = report.first, 2 * full.shape[1] + 7
    assert first is not None and (first.rank, first.index) == (1, (6, element))
    assert (first.offset, first.expected) == (ranks[1]["w"].offset + at, full[6, 7:8].tobytes())
    assert first.original_offset == one["w"].offset + 6 * full.shape[1] + 7
    assert report.damages == (exact_report.Damage("w", 1, 1, 2),)


@dataclass(frozen=True)
class _Tensors:
    """The part of a source that the byte comparison looks at."""

    ranks: tuple[Any, ...]
    model: Any
    files: ClassVar[dict[Path, Any]] = {}
    intact: ClassVar[dict[str, Any]] = {}
    twice: ClassVar[dict[str, str]] = {}
    chunks: ClassVar[None] = None
    format: ClassVar[Any] = HUGGING_FACE

    @property
    def plan(self) -> Any:
        return self


def _compared(original: Any, shards: Any, plan: Plan) -> ExactReport:
    held = {"w": range(len(shards.ranks))}
    arrangement = arrangement_of(plan, OWN)
    return Comparison(original, shards, arrangement, held, lambda *_: None, Files()).run(2)


def _saved(path: Path, dtype: str, content: np.ndarray[Any, Any]) -> Any:
    path.write_bytes(build_header([("w", dtype, content.shape[:-1])], {}) + content.tobytes())
    return read_header(path).tensors


def _index_of(box: Box, element: int) -> tuple[int, ...]:
    local = np.unravel_index(element, box.shape)
    owned = [[i for run in dim for i in range(run.offset, run.end)] for dim in box.dims]
    return tuple(indices[n] for indices, n in zip(owned, local, strict=True))


def test_elements_that_nobody_owns(llama: Pair) -> None:
    """A plan that leaves a hole is an error, not a proof."""
    rule = open_source(llama.original).plan.layouts["lm_head.weight"].rule
    boxes = {rank: Box(((Run(3 * rank, 2),), (Run(0, 4),)), (2, 4)) for rank in range(2)}
    with pytest.raises(PlanError, match="no rank holds"):
        check_all_owned(Layout(rule, (5, 4), (5, 4), boxes, 2, (5, 4), frozenset({"vocab"}), "column"))


# --------------------------------------------------------------------------------------------------------- the command


def test_command(llama: Pair, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def run(original: Path, shards: Path, *options: str) -> tuple[Any, str, str]:
        with pytest.raises(SystemExit) as stop:
            main(["verify", str(original), str(shards), *options, "--exact-only"])
        return stop.value.code, *capsys.readouterr()

    code, out, _ = run(llama.original, llama.shards)
    assert code == 0 and "SAME" in out
    assert run(llama.original, llama.shards, "-q")[:2] == (0, "same\n")
    put(llama.shards / "rank-03-of-04/model.safetensors", "model.norm.weight", 79, b"abcd")
    code, out, _ = run(llama.original, llama.shards)
    assert code == 1 and "model.norm.weight[79] on rank 3" in out
    code, out, _ = run(llama.original, llama.shards, "--json")
    document = json.loads(out)
    assert code == 1 and document["schema_version"] == 1 and document["verdict"] == "different"
    assert document["exact"]["first"]["found"] == b"abcd".hex()
    code, out, err = run(llama.original, tmp_path / "nothing")
    assert code == 2 and out == "UNCHECKED\n" and err.startswith("Error: ") and "Traceback" not in err


MEASURE = """
import resource, sys
from pathlib import Path
from reshard.source.opening import open_source
from reshard.verify.bytes.exact import verify_exact
assert verify_exact(open_source(Path(sys.argv[1])), Path(sys.argv[2])).verdict == 'same'
assert 'torch' not in sys.modules
status = Path('/proc/self/status')
print([int(l.split()[1]) for l in status.read_text().splitlines() if l.startswith('VmHWM')][0])
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the peak is read from /proc")
@thorough
def test_memory_is_bounded_and_torch_is_not_imported(tmp_path: Path) -> None:
    """A tensor larger than all memory allowed, as a sparse file: 400 MB and its four parts."""
    original = tmp_path / "original"
    original.mkdir()
    rows, hidden = 50_000, 4096
    config = {"model_type": "llama", "hidden_size": hidden, "num_attention_heads": 32, "vocab_size": rows,
              "intermediate_size": 64, "num_hidden_layers": 1}  # fmt: skip
    (original / "config.json").write_text(json.dumps(config))
    shapes = {f"self_attn.{name}_proj": (hidden, hidden) for name in "qkvo"}
    shapes |= {"mlp.gate_proj": (64, hidden), "mlp.up_proj": (64, hidden), "mlp.down_proj": (hidden, 64)}
    shapes |= dict.fromkeys(("input_layernorm", "post_attention_layernorm"), (hidden,))
    names = {"model.embed_tokens.weight": (rows, hidden), "model.norm.weight": (hidden,)}
    names |= {f"model.layers.0.{name}.weight": shape for name, shape in shapes.items()}
    tensors = [(name, "BF16", shape) for name, shape in names.items()]
    with (original / "model.safetensors").open("wb") as file:
        header = build_header(tensors, {"format": "pt"})
        file.write(header)
        file.truncate(len(header) + 2 * sum(math.prod(shape) for shape in names.values()))
    split(original, tmp_path / "out", tp=4)
    command = [sys.executable, "-c", MEASURE, str(original), str(tmp_path / "out")]
    root = Path(__file__).parents[2]
    result = subprocess.run(command, capture_output=True, text=True, cwd=root, check=False)
    assert result.returncode == 0, result.stderr
    assert int(result.stdout) * 1024 <= 300e6
