"""A delta: the result byte for byte, the smallest way to store a change, and what is refused."""

from __future__ import annotations

import json
import shutil
import tempfile
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from reshard.api import diff, merge, patch, split
from reshard.formats.errors import CheckpointError, MismatchError, ReshardError
from reshard.formats.files.delta import digest
from reshard.formats.files.safetensors import build_header, read_header
from reshard.source.opening import open_source
from reshard.store.range_store import remote_of
from reshard.text import human_bytes
from reshard.transforms import patch as patching
from reshard.transforms.tensors import ComputedFile
from reshard.verify.api import verify
from tests import peft_adapters, store
from tests.marks import examples, one_of_each
from tests.support import LLAMA, change_tensor, command, contents, weights_of, write_checkpoint, write_tied_twice

EMBED, NORM = "model.embed_tokens.weight", "model.norm.weight"
ONE = {"workers": 1, "fsync": False}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("patch") / "base", files=2)


def changed(folder: Path, elements: dict[str, list[tuple[int, int]]]) -> None:
    """Write these codes (bfloat16) at these elements of tensors."""
    for file in folder.glob("*.safetensors"):
        content = bytearray(file.read_bytes())
        for name, info in read_header(file).tensors.items():
            for index, code in elements.get(name, ()):
                content[info.offset + 2 * index : info.offset + 2 * index + 2] = code.to_bytes(2, "little")
        file.write_bytes(content)


def tuned(base: Path, folder: Path, elements: dict[str, list[tuple[int, int]]]) -> Path:
    shutil.copytree(base, folder)
    changed(folder, elements)
    return folder


SPECIAL = st.sampled_from([0x0000, 0x8000, 0x7FC0, 0x7FC1, 0xFF80, 0x3F80])
"""0.0, -0.0, two NaNs, -inf, 1.0."""


@examples(8)
@given(
    st.fixed_dictionaries(
        {
            EMBED: st.lists(st.tuples(st.integers(0, 739), SPECIAL), max_size=800),
            NORM: st.lists(st.tuples(st.integers(0, 19), SPECIAL), max_size=40),
        }
    )
)
def test_a_patched_base_is_the_result(base: Path, elements: dict[str, list[tuple[int, int]]]) -> None:
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        after = tuned(base, folder / "after", elements)
        for number, compress in enumerate((False, True)):
            made, patched = folder / f"delta-{number}", folder / f"patched-{number}"
            diff(base, after, out=made, compress=compress)
            patch(base, patched, delta=made, **ONE)
            assert contents(patched) == contents(after)
            assert diff(after, patched).same


@pytest.mark.parametrize(("count", "ending"), [(246, ".delta_indices"), (247, "")])
def test_the_smallest_way(base: Path, tmp_path: Path, count: int, ending: str) -> None:
    """Of 740 elements: an index has 4 bytes, and a value 2."""
    after = tuned(base, tmp_path / "after", {EMBED: [(i, 0x1234) for i in range(count)]})
    diff(base, after, out=tmp_path / "delta")
    assert f"{EMBED}{ending}" in read_header(tmp_path / "delta" / "delta.safetensors").tensors
    patch(base, tmp_path / "patched", delta=tmp_path / "delta", **ONE)
    assert contents(tmp_path / "patched") == contents(after)


def signed(folder: Path, document: dict) -> None:
    """Write a ``delta.json`` that says what it is, as another program might make it."""
    named = {key: value for key, value in document.items() if key != "digest"}
    (folder / "delta.json").write_text(json.dumps(named | {"digest": digest(named)}))


FORMS = {"vllm": {"format": "vllm", "tp": 2}, "megatron": {"format": "megatron", "tp": 2}, "own": {"tp": 4}}


@pytest.mark.parametrize(
    ("a", "b"), one_of_each([(a, b) for a in ["", *FORMS] for b in FORMS], lambda pair: bool(pair[0]))
)
def test_a_delta_of_any_two_forms(base: Path, tmp_path: Path, a: str, b: str) -> None:
    """Its coordinates are Hugging Face's: the base in one form and the result in another give the same bytes."""
    after = tuned(base, tmp_path / "after", {EMBED: [(7, 1), (739, 2)], NORM: [(3, 4)]})
    before = base
    if a:
        before = tmp_path / "base"
        split(base, before, **FORMS[a], **ONE)
    split(after, tmp_path / "shards", **FORMS[b], **ONE)
    diff(before, tmp_path / "shards", out=tmp_path / "delta")
    patch(base, tmp_path / "patched", delta=tmp_path / "delta", **ONE)
    assert contents(tmp_path / "patched") == contents(after)


def test_deltas_chain_and_files_may_change(base: Path, tmp_path: Path) -> None:
    one = tuned(base, tmp_path / "one", {EMBED: [(1, 1)]})
    two = write_checkpoint(tmp_path / "two", files=1)  # other values, in one file
    (two / "tokenizer.json").write_text('{"tokens": [1]}')
    (two / "notes.txt").write_text("new")
    diff(base, one, out=tmp_path / "first")
    diff(one, two, out=tmp_path / "second")
    patch(base, tmp_path / "p1", delta=tmp_path / "first", **ONE)
    patch(tmp_path / "p1", tmp_path / "p2", delta=tmp_path / "second", **ONE)
    assert contents(tmp_path / "p2") == contents(two)
    with pytest.raises(MismatchError, match="another base"):
        patch(base, tmp_path / "p3", delta=tmp_path / "second", **ONE)
    assert not (tmp_path / "p3").exists()


def test_tensors_that_come_and_go(base: Path, tmp_path: Path) -> None:
    """Of another dtype, or only on one side."""
    after = write_checkpoint(tmp_path / "after", dtype="F32")
    diff(base, after, out=tmp_path / "delta")
    patch(base, tmp_path / "patched", delta=tmp_path / "delta", **ONE)
    assert contents(tmp_path / "patched") == contents(after)


def test_the_command(base: Path, tmp_path: Path) -> None:
    after = tuned(base, tmp_path / "after", {NORM: [(0, 1)]})
    delta, out = tmp_path / "delta", tmp_path / "out"
    done = command("diff", base, after, "--out", delta, "-q")
    size = human_bytes(sum(file.stat().st_size for file in delta.iterdir()))
    assert done.stdout == "different\n"
    assert done.stderr == f"Wrote what changed: {delta}, {size}, which 'reshard patch' puts on A\n"
    assert command("diff", base, after, "--out", delta).returncode == 2, "it is there"
    assert command("patch", base, delta, out, "-q").returncode == 0 and contents(out) == contents(after)
    done = command("patch", after, delta, tmp_path / "wrong")
    assert done.returncode == 1 and "another base" in done.stderr and not (tmp_path / "wrong").exists()
    assert command("patch", base, base, tmp_path / "wrong").returncode == 2


# ------------------------------------------------------------------------------------------------------- damaged ones


@pytest.fixture(scope="module")
def delta(base: Path) -> Path:
    """With indices."""
    after = tuned(base, base.parent / "tuned", {EMBED: [(5, 1), (9, 2)]})
    diff(base, after, out=base.parent / "delta")
    return base.parent / "delta"


def rewritten(delta: Path, folder: Path, tensors: dict[str, tuple[str, np.ndarray]]) -> Path:
    shutil.copytree(delta, folder)
    header = build_header([(name, dtype, content.shape) for name, (dtype, content) in tensors.items()], {})
    data = b"".join(content.tobytes() for _, content in tensors.values())
    (folder / "delta.safetensors").write_bytes(header + data)
    return folder


def sparse(indices: list[int], values: int = 2, wide: str = "I32", dtype: str = "BF16") -> dict:
    places = np.array(indices, {"I32": "<i4", "I64": "<i8"}[wide])
    return {f"{EMBED}.delta_indices": (wide, places), f"{EMBED}.delta_values": (dtype, np.ones(values, "<u2"))}


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        (sparse([5, 740]), "has an element 740 of 740"),
        (sparse([-1, 5]), "not in ascending order"),
        (sparse([9, 5]), "not in ascending order"),
        (sparse([5, 5]), "not in ascending order"),
        (sparse([5, 9], values=3), "should be I32 \\[3\\] and is I32 \\[2\\]"),
        (sparse([5, 9], wide="I64"), "should be I32"),
        (sparse([5, 9], dtype="F16"), "should be BF16"),
        (sparse([5, 9]), "its result has another checksum"),
        (sparse([5, 9]) | {"x": ("I32", np.zeros(1, "<i4"))}, "'x' belongs to no change"),
        ({}, "is not there"),
    ],
)
def test_damaged_changes_are_refused(base: Path, delta: Path, tmp_path: Path, tensors: dict, message: str) -> None:
    broken = rewritten(delta, tmp_path / "broken", tensors)
    with pytest.raises(ReshardError, match=message):
        patch(base, tmp_path / "out", delta=broken, **ONE)
    assert not (tmp_path / "out").exists()


@examples(60)
@given(st.data())
def test_whatever_is_changed_in_the_manifest_is_one_line(base: Path, delta: Path, data: st.DataObject) -> None:
    """A value of ``delta.json`` is replaced: it is refused, or means the same."""
    document = json.loads((delta / "delta.json").read_text())
    node, path = document, []
    while isinstance(node, dict | list) and node:
        key = data.draw(st.sampled_from([*node] if isinstance(node, dict) else [*range(len(node))]))
        path.append((node, key))
        node = node[key]
    at, key = path[data.draw(st.integers(0, len(path) - 1))]
    at[key] = data.draw(
        st.sampled_from([None, -1, 2**70, "", "../x", "AAAA", [], {}, {"how": "same"}, "xor", 1.5, True])
    )
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        shutil.copytree(delta, folder / "delta")
        signed(folder / "delta", document)
        try:
            patch(base, folder / "out", delta=folder / "delta", **ONE)
        except ReshardError as error:
            assert "\n" not in error.message
            assert not (folder / "out").exists()


def test_a_delta_says_what_it_is(base: Path, delta: Path, tmp_path: Path) -> None:
    """What it has of a tokenizer has no other checksum."""
    shutil.copytree(delta, tmp_path / "delta")
    document = json.loads((delta / "delta.json").read_text())
    document["sides"]["tokenizer.json"] = "e30="
    (tmp_path / "delta" / "delta.json").write_text(json.dumps(document))
    with pytest.raises(CheckpointError, match="its digest is another"):
        patch(base, tmp_path / "out", delta=tmp_path / "delta", **ONE)
    signed(tmp_path / "delta", document)
    patch(base, tmp_path / "out", delta=tmp_path / "delta", **ONE)
    assert (tmp_path / "out" / "tokenizer.json").read_text() == "{}"


def test_a_flipped_value_is_seen(base: Path, delta: Path, tmp_path: Path) -> None:
    shutil.copytree(delta, tmp_path / "delta")
    change_tensor(tmp_path / "delta" / "delta.safetensors", f"{EMBED}.delta_values")
    with pytest.raises(MismatchError, match="its result has another checksum"):
        patch(base, tmp_path / "out", delta=tmp_path / "delta", **ONE)


@pytest.mark.parametrize(("count", "compress"), [(60, False), (300, False), (300, True)])
def test_any_range_of_a_patched_file(
    base: Path, tmp_path: Path, count: int, compress: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranges begin and end within elements and stretches of places; those of a frame come in any order."""
    monkeypatch.setattr("reshard.formats.files.compressed.STEP", 100)
    monkeypatch.setattr("reshard.transforms.patch.STRETCH", 64)
    places = np.random.default_rng(0).permutation(740)[: count // 3]
    after = tuned(base, tmp_path / "after", {EMBED: [(int(i), 0x1234) for i in places]})
    diff(base, after, out=tmp_path / "delta", compress=compress)
    found = patching.patch(open_source(base), tmp_path / "delta")
    file = next(file for file in after.glob("*.safetensors") if EMBED in read_header(file).tensors)
    content, made = file.read_bytes(), remote_of(found.path / file.name)
    assert isinstance(made, ComputedFile)
    read, draw = made.read, np.random.default_rng(1)
    for _ in range(300):
        begin, end = sorted(draw.integers(0, min(3000, len(content)), 2).tolist())
        assert bytes(read(begin, end)) == content[begin:end], (begin, end)


# ---------------------------------------------------------------------------------------- a patched base in any form


def written(folder: Path) -> dict[str, bytes]:
    """What a split wrote, without the manifest, which names the source."""
    return {name: content for name, content in contents(folder).items() if name != "reshard.json"}


@pytest.mark.parametrize("form", [{"format": "vllm", "tp": 2}, {"tp": 4}, {"format": "dcp"}, {"format": "huggingface"}])
def test_a_patched_base_in_any_form(base: Path, delta: Path, tmp_path: Path, form: dict) -> None:
    """Byte for byte what the result itself gives; and ``verify`` proves it with the base and the delta alone."""
    split(base, tmp_path / "out", patch=delta, **form, **ONE)
    if form.get("format") == "huggingface":
        assert contents(tmp_path / "out") == contents(base.parent / "tuned")
        return
    split(base.parent / "tuned", tmp_path / "direct", **form, **ONE)
    assert written(tmp_path / "out") == written(tmp_path / "direct")
    assert verify(base, tmp_path / "out", patch=delta, exact_only=True).verdict == "same"
    assert verify(base.parent / "tuned", tmp_path / "out", exact_only=True).verdict == "same"
    assert verify(base, tmp_path / "out", exact_only=True).verdict == "different"


def test_deltas_are_put_on_in_their_order(base: Path, delta: Path, tmp_path: Path) -> None:
    last = tuned(base.parent / "tuned", tmp_path / "last", {NORM: [(1, 3)], EMBED: [(9, 7)]})
    diff(base.parent / "tuned", last, out=tmp_path / "second")
    options = ("--patch", delta, "--patch", tmp_path / "second", "--as", "huggingface", "--json")
    done = command("split", base, tmp_path / "out", *options)
    assert done.returncode == 0 and "the deltas were put on" in json.loads(done.stdout)["note"], done.stderr
    assert contents(tmp_path / "out") == contents(last)
    with pytest.raises(MismatchError, match="another base"):
        split(base, tmp_path / "wrong", patch=[tmp_path / "second", delta], tp=2, **ONE)
    assert not (tmp_path / "wrong").exists()


def test_an_adapter_is_added_to_a_patched_base(tmp_path: Path) -> None:
    adapter, before = peft_adapters.made("llama", "embeddings"), store.checkpoint("llama")
    after = shutil.copytree(before, tmp_path / "after")
    change_tensor(after / "model.safetensors", "model.norm.weight")
    diff(before, after, out=tmp_path / "delta")
    split(before, tmp_path / "out", patch=tmp_path / "delta", adapter=adapter, tp=2, **ONE)
    split(after, tmp_path / "direct", adapter=adapter, tp=2, **ONE)
    assert written(tmp_path / "out") == written(tmp_path / "direct")


@pytest.mark.parametrize("form", ["own", "vllm", "bin"])
def test_a_base_in_any_form(base: Path, delta: Path, tmp_path: Path, form: str) -> None:
    source = tmp_path / "source"
    if form == "bin":
        shutil.copytree(base, source, ignore=shutil.ignore_patterns("model*"))
        whole = weights_of(base)
        torch.save(whole, source / "pytorch_model.bin")
    else:
        split(base, source, **FORMS[form], **ONE)
    assert command("patch", source, delta, tmp_path / "out").returncode == 0
    assert contents(tmp_path / "out") == contents(base.parent / "tuned")


def test_what_a_delta_is_not_put_on(delta: Path, tmp_path: Path) -> None:
    done = command("patch", peft_adapters.made("llama", "embeddings"), delta, tmp_path / "out")
    assert done.returncode == 2 and done.stderr.count("\n") == 2, done.stderr
    assert "a delta is put on a full checkpoint in safetensors" in done.stderr and not (tmp_path / "out").exists()


@pytest.mark.parametrize("how", ["bin", "wrapped", "safetensors"])
def test_a_tied_model_stored_under_both_names(how: str, tmp_path: Path) -> None:
    """A merge leaves the second name out where the original's files are not written again."""
    folders = [write_tied_twice(tmp_path / name, LLAMA) for name in ("a", "b")]
    for number, folder in enumerate(folders):
        file = folder / "model.safetensors"
        tensors = load_file(file)
        for name in ("model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"):
            tensors[name] = tensors[name] + number
        file.unlink()
        if how == "bin":
            torch.save(tensors, folder / "pytorch_model.bin")
        else:
            names = {name: f"module.{name}" if how == "wrapped" else name for name in tensors}
            save_file({names[name]: tensor.clone() for name, tensor in tensors.items()}, file, {"format": "pt"})
    diff(*folders, out=tmp_path / "delta")
    patch(folders[0], tmp_path / "patched", delta=tmp_path / "delta")
    split(folders[1], tmp_path / "ranks", tp=2)
    merge(tmp_path / "ranks", tmp_path / "merged", names="published" if how == "wrapped" else "source")
    found, expected = (load_file(tmp_path / name / "model.safetensors") for name in ("patched", "merged"))
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name].view(torch.uint8), expected[name].view(torch.uint8)) for name in found)
