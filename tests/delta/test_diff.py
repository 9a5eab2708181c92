"""``diff``: what it says of two checkpoints, in whatever form they are."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from reshard.api import average, diff, merge, split
from reshard.delta.differences import SAME, Diff, TensorDiff, rows_of
from reshard.formats.errors import CheckpointError
from reshard.formats.files.safetensors import build_header, tensor_bytes
from reshard.pages.diff_page import diff_page
from tests import store
from tests.golden import source
from tests.marks import one_of_each
from tests.support import LLAMA, change_tensor, command, contents, llama_tensors, ok, refused, write_checkpoint

FORMS = {
    "vllm": {"format": "vllm", "tp": 2},
    "megatron": {"format": "megatron", "tp": 2},
    "own": {"tp": 4},
    "dcp": {"format": "dcp"},
    "stages": {"pp": 3},
}
DOWN = [f"model.layers.{i}.mlp.down_proj.weight" for i in range(3)]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("diff") / "base", files=2)


def test_another_config_is_said(base: Path, tmp_path: Path) -> None:
    """Of equal tensors, too, in any two forms; a long list differs at its end."""
    first, other = (Path(shutil.copytree(base, tmp_path / name)) for name in ("first", "other"))
    settings = {"rms_norm_eps": 1e-5, "tie_word_embeddings": None, "long": [0] * 99 + [1], "use_cache": True}
    (other / "config.json").write_text(json.dumps(LLAMA | settings))
    (first / "config.json").write_text(json.dumps(LLAMA | {"long": [0] * 100}))
    split(other, tmp_path / "served", tp=2, format="vllm")
    for form in ("other", "served"):
        done = command("diff", first, tmp_path / form, "--report", tmp_path / f"{form}.html")
        assert done.returncode == 0 and done.stdout.splitlines()[-1].startswith("SAME: 30 tensors")
        assert "config.json differs: long, rms_norm_eps, tie_word_embeddings, use_cache.\n" in done.stdout
        assert "rms_norm_eps" in (tmp_path / f"{form}.html").read_text()
        found = json.loads(command("diff", first, tmp_path / form, "--json").stdout)
        assert found["same"] and found["config"] == ["long", *sorted(settings.keys() - {"long"})]
    assert "config.json" not in command("diff", base, base).stdout


@pytest.fixture(scope="module")
def tuned(base: Path) -> Path:
    """The base, with another byte in two tensors of the last file."""
    folder = base.parent / "tuned"
    shutil.copytree(base, folder)
    for name in DOWN[1:]:
        change_tensor(folder / "model-00002-of-00002.safetensors", name, at=40)
    return folder


@pytest.fixture(scope="module")
def made(base: Path, tuned: Path) -> Callable[[str, str], Path]:
    """Either of them in a form, made once."""

    def make(which: str, form: str) -> Path:
        source = {"base": base, "tuned": tuned}[which]
        folder = base.parent / f"{which}-{form}"
        if form == "huggingface":
            return source
        if not folder.exists():
            split(source, folder, **FORMS[form])
        return folder

    return make


def differing(found: Diff) -> list[TensorDiff]:
    return [tensor for tensor in found.tensors if tensor.kind != "same"]


@pytest.mark.parametrize(
    ("a", "b"), one_of_each([(a, b) for a in ["huggingface", *FORMS] for b in FORMS], lambda pair: pair[0] == pair[1])
)
def test_any_two_forms(a: str, b: str, made: Callable[[str, str], Path]) -> None:
    """The same in another form is the same; what was changed is seen, once, through any two forms."""
    same = diff(made("base", a), made("base", b))
    assert same.same and len(same.tensors) == 30 and same.nbytes == sum(tensor_bytes(*t) for t in llama_tensors())
    for found in (diff(made("base", a), made("tuned", b)), diff(made("tuned", a), made("base", b))):
        assert [(t.name, t.kind, t.changed, t.elements) for t in differing(found)] == [
            (name, "changed", 1, 480) for name in DOWN[1:]
        ]


@pytest.mark.parametrize("model", ["phi3", "mixtral"])
def test_packed_and_fused_tensors(model: str, tmp_path: Path) -> None:
    """What is one tensor here and several there is taken apart alike."""
    made = source(model, tmp_path / "model")
    split(made, tmp_path / "vllm", format="vllm", tp=2)
    assert diff(made, tmp_path / "vllm").same and diff(tmp_path / "vllm", made).same


def bf16(*values: float) -> bytes:
    return b"".join((np.float32(value).view("<u4") >> 16).astype("<u2").tobytes() for value in values)


def write(folder: Path, changed: dict[str, tuple[str, tuple[int, ...], bytes]], lacking: str = "") -> Path:
    """A Llama of zeros, but for some tensors."""
    folder.mkdir()
    config = LLAMA | {"tie_word_embeddings": True} if lacking else LLAMA
    (folder / "config.json").write_text(json.dumps(config))
    tensors = {name: (dtype, shape, bytes(tensor_bytes(name, dtype, shape))) for name, dtype, shape in llama_tensors()}
    tensors |= {name: (d, s, c + bytes(tensor_bytes(name, d, s) - len(c))) for name, (d, s, c) in changed.items()}
    tensors.pop(lacking, None)
    header = build_header([(name, dtype, shape) for name, (dtype, shape, _) in tensors.items()], {"format": "pt"})
    (folder / "model.safetensors").write_bytes(header + b"".join(content for *_, content in tensors.values()))
    return folder


def test_how_much(tmp_path: Path) -> None:
    """Numbers that one can compute by hand; zeros of both signs differ, and no number is between them."""
    norm, nan = "model.norm.weight", float("nan")
    a = write(tmp_path / "a", {norm: ("BF16", (20,), bf16(1.0, 0.0, 2.0, 5.0, nan, 1.0))})
    b = write(tmp_path / "b", {norm: ("BF16", (20,), bf16(1.0078125, -0.0, 2.5, 5.0, 1.0, nan))})
    (found,) = differing(diff(a, b))
    assert (found.name, found.kind, found.elements, found.changed, found.other) == (norm, "changed", 20, 5, 2)
    assert (found.largest, found.ulps, found.share) == (0.5, 32, 0.25)
    assert found.rms == pytest.approx(((0.5**2 + 0.0078125**2) / 20) ** 0.5)
    done = command("diff", a, b)
    assert done.returncode == 1 and "changed (2 inf or NaN)" in done.stdout and "25 %" in done.stdout
    document = json.loads(command("diff", a, b, "--json").stdout)
    assert [t["ulps"] for t in document["tensors"] if t["kind"] == "changed"] == [32] and not document["same"]


def test_other_dtype_shape_and_tensors(tmp_path: Path) -> None:
    a = write(tmp_path / "a", {"model.norm.weight": ("F32", (20,), b"")})
    b = write(tmp_path / "b", {}, "lm_head.weight")
    assert [(t.name, t.kind) for t in differing(diff(a, b))] == [
        ("model.norm.weight", "other dtype"),
        ("lm_head.weight", "only here"),
    ]
    assert [(t.name, t.kind) for t in differing(diff(b, a))][-1] == ("lm_head.weight", "only there")
    config = LLAMA | {"vocab_size": 41}
    c = write_checkpoint(tmp_path / "c", config=config)
    found = [t for t in diff(a, c).tensors if t.kind == "other shape"]
    assert [t.shapes for t in found] == [((37, 20), (41, 20))] * 2
    done = command("diff", a, b)
    assert done.returncode == 1 and "other dtype F32 -> BF16" in done.stdout and "only here" in done.stdout


def test_exit_codes(base: Path, tuned: Path, made: Callable[[str, str], Path], tmp_path: Path) -> None:
    assert command("diff", base, made("base", "vllm"), "-q").stdout == "same\n"
    assert command("diff", base, tuned, "-q").stdout == "different\n"
    shown = command("diff", base, tuned)
    assert shown.returncode == 1 and "model.layers.{1,2}.mlp.down_proj.weight" in shown.stdout
    assert command("diff", base, tmp_path / "nothing").returncode == 2
    broken = shutil.copytree(made("base", "own"), tmp_path / "broken")  # a norm is on all ranks
    change_tensor(next(broken.glob("rank-02*/*.safetensors")), "model.norm.weight")
    assert "'model.norm.weight' should be the same" in refused("diff", base, broken)
    with pytest.raises(CheckpointError, match="should be the same"):
        diff(base, broken)


def test_nothing_is_written(base: Path, tuned: Path) -> None:
    before = contents(base.parent)
    diff(base, tuned)
    assert contents(base.parent) == before


def test_the_page(base: Path, tuned: Path, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    done = command("diff", base, tuned, "--report", "/proc/page.html")
    assert done.returncode == 2 and "cannot write /proc/page.html" in done.stderr and "DIFFERENT" in done.stdout
    assert refused("diff", base, tuned, "--report", page, code=1).endswith(f"Drew what differs: {page}\n")
    text = page.read_text()
    assert '<header class="different">' in text and "Different in 2 of 30 tensors</h1>" in text
    assert "<script" not in text and text.count("<figure>") == 2
    shown = dict(re.findall(r"<title>([^<:]+): ([^<]+)</title>", text))
    assert len(shown) == 30 and all(shown[name] == "0.21 % of the elements" for name in DOWN[1:])
    assert {shown[name] for name in shown.keys() - {*DOWN[1:]}} == {"same"}
    (row,) = re.findall(r'<th scope="row"><span class="name">(.*?)</span></th>', text)
    assert row == "model.layers.{1,2}.mlp.down_proj.weight"


def test_the_page_of_many_layers_and_kinds() -> None:
    """Layers are drawn in groups, the experts of one together, and what is not comparable stands out."""
    names = [f"layers.{i}.mlp.experts.{j}.<up>" for i in range(200) for j in range(2)]
    tensors = [TensorDiff(name, "changed", ("BF16", "BF16"), ((8,), (8,)), 8, i % 9) for i, name in enumerate(names)]
    tensors[-1] = TensorDiff(names[-1], "only here", ("BF16", None), ((8,), None))
    text = diff_page(Diff("a <b>", "b", tuple(tensors), 12))
    assert "<up>" not in text and "a <b>" not in text
    cells = re.findall(r"<title>(layers[^:]+experts[^:]+): ([^<]+)</title>", text)
    assert len(cells) == 2 * 67 and cells[0] == ("layers.0..2.mlp.experts.*.&lt;up&gt;", "31 % of the elements")
    assert cells[-1] == ("layers.198..199.mlp.experts.*.&lt;up&gt;", "only here, 12 % of the elements")


def test_a_row_for_a_kind() -> None:
    names = [f"model.layers.{i}.mlp.experts.{j}.up.weight" for i in (2, 3, 4, 9) for j in (0, 1)] + [
        "model.norm.weight"
    ]
    rows = rows_of([TensorDiff(name, "changed", ("BF16", "BF16"), ((1,), (1,))) for name in names])
    assert [row[:2] for row in rows] == [
        ("model.layers.{2..4,9}.mlp.experts.{0,1}.up.weight", "8"),
        ("model.norm.weight", "1"),
    ]


def distance(left: np.ndarray, right: np.ndarray, dtype: str) -> TensorDiff:
    """What lies between elements that differ."""
    return TensorDiff("", SAME, (dtype, dtype), (left.shape, right.shape), left.size).plus(left, right)


@given(st.lists(st.tuples(st.floats(width=32), st.floats(width=32)), min_size=1, max_size=20))
def test_differences_of_what_is_finite(pairs: list[tuple[float, float]]) -> None:
    left, right = (np.array(values, "<f4") for values in zip(*pairs, strict=True))
    found = distance(left.view("<u4"), right.view("<u4"), "F32")
    finite = np.isfinite(left) & np.isfinite(right)
    left, right = left.astype(float), right.astype(float)
    assert (found.changed, found.other) == (left.size, int((~finite).sum()))
    if finite.any():
        assert found.largest == np.abs(left[finite] - right[finite]).max()


@given(st.floats(width=32, min_value=-(2.0**127), max_value=2.0**127), st.integers(1, 50))
def test_ulps_count_the_numbers_between(number: float, steps: int) -> None:
    """``nextafter`` is the oracle: so many steps lead from one number to the other; through zero they mean nothing."""
    first = last = np.array([number], "<f4")
    for _ in range(steps):
        last = np.nextafter(last, np.float32(np.inf))
    assert distance(first.view("<u4"), last.view("<u4"), "F32").ulps == (None if first[0] < 0 < last[0] else steps)


def test_the_largest_differences_are_finite() -> None:
    """JSON has no infinity: neither one difference nor the sum of their squares, over several pieces, becomes one."""
    left = np.full(3, np.finfo("<f8").max).view("<u8")
    found = distance(left, left | np.uint64(1 << 63), "F64").plus(left, left | np.uint64(1 << 63))
    assert np.isfinite([found.largest, found.rms]).all()


@given(st.floats(-1, 0, width=32, exclude_max=True))
def test_ulps_leave_out_what_crosses_zero(number: float) -> None:
    left, right = np.array([number, 1], "<f4"), np.array([-number, np.nextafter(np.float32(1), np.float32(2))], "<f4")
    assert distance(left.view("<u4"), right.view("<u4"), "F32").ulps == 1
    assert distance(left[:1].view("<u4"), right[:1].view("<u4"), "F32").ulps is None


def test_ulps_that_mean_nothing_are_not_printed(tmp_path: Path) -> None:
    a, b = (write(tmp_path / n, {"model.norm.weight": ("BF16", (20,), bf16(x))}) for n, x in (("a", 1.0), ("b", -1.0)))
    found = diff(a, b)
    assert rows_of(differing(found))[0][4:] == ("2", "0.447", "")
    document = json.loads(command("diff", a, b, "--json").stdout)
    assert [t["ulps"] for t in document["tensors"] if t["kind"] == "changed"] == [None]


@pytest.mark.parametrize(("dtype", "codes"), [("F8_E4M3", (0x38, 0xB8)), ("F8_E5M2", (0x3C, 0xBC))])
def test_eight_bits(dtype: str, codes: tuple[int, int]) -> None:
    """1 and -1."""
    left, right = (np.array([code], np.uint8) for code in codes)
    assert distance(left, right, dtype).largest == 2.0
    assert distance(left, left + np.uint8(1), dtype).ulps == 1


@pytest.mark.parametrize("form", one_of_each(["dcp", "megatron", "vllm", "own"]))
def test_files_beside_another_checkpoint_have_their_own_dtypes(form: str, tmp_path: Path) -> None:
    """Where no config.json says them, too: what is beside is of one model, and may be rounded."""
    wide = store.checkpoint("llama")
    merge(wide, narrow := tmp_path / "narrow", dtype="bf16")
    split(wide, run := tmp_path / "run", **FORMS[form])
    for document in [*run.glob("*.json")] if form != "own" else ():
        document.unlink()
    average(narrow, tmp_path / "expected", others=[wide], dtype="fp32")
    average(narrow, tmp_path / "mean", others=[run], dtype="fp32")
    assert contents(tmp_path / "mean") == contents(tmp_path / "expected")
    assert ok("diff", run, wide).stdout.splitlines()[-1].startswith("SAME")
    rounded = json.loads(command("diff", run, narrow, "--json").stdout)
    expected = json.loads(command("diff", wide, narrow, "--json").stdout)
    assert rounded["tensors"] == expected["tensors"]


@pytest.mark.parametrize("form", one_of_each(["dcp", "megatron", "vllm"]))
def test_files_of_another_shape_are_not_read_as_the_model_beside(form: str, tmp_path: Path) -> None:
    model = write_checkpoint(tmp_path / "model")
    sizes = {"intermediate_size": 2 * LLAMA["intermediate_size"]}
    other = write_checkpoint(tmp_path / "other", config=LLAMA | sizes)
    split(other, run := tmp_path / "run", **FORMS[form])
    for document in run.glob("*.json"):
        document.unlink()
    for line in (["diff", model, run], ["average", model, run, tmp_path / "mean"]):
        done = command(*line)
        assert done.returncode != 0 and "mlp." in done.stderr and "given their config.json with --config" in done.stderr
    assert not (tmp_path / "mean").exists()
    told = command("diff", model, run, "--config", other / "config.json")
    assert told.returncode == 1 and "other shape" in told.stdout.splitlines()[-1], told
