"""Compressed deltas: sizes, slime's folders, and frames that are damaged or hold too much."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from hashlib import sha256
from pathlib import Path

import numpy as np
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from reshard.api import diff, patch, split
from reshard.formats.errors import CheckpointError, MismatchError, ReshardError
from reshard.formats.files.compressed import OVERWRITE, XOR, Changes, Frame
from reshard.formats.files.safetensors import build_header, read_header
from tests import store, zoo
from tests.delta.test_patch import EMBED, NORM, ONE, signed, tuned
from tests.support import LLAMA, changed_json, command, contents, write_checkpoint


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("compressed") / "base", files=2)


@pytest.fixture(scope="module")
def after(base: Path) -> Path:
    return tuned(base, base.parent / "after", {EMBED: [(5, 1), (9, 2)], NORM: [(0, 3)]})


@pytest.fixture(scope="module")
def delta(base: Path, after: Path) -> Path:
    diff(base, after, out=base.parent / "weight_v000007", compress=True)
    return base.parent / "weight_v000007"


def bytes_of(folder: Path, name: str) -> bytes:
    for file in folder.glob("*.safetensors"):
        info = read_header(file).tensors.get(name)
        if info is not None:
            return file.read_bytes()[info.offset : info.offset + info.nbytes]
    raise KeyError(name)


def frame(content: bytes) -> bytes:
    return zstandard.ZstdCompressor(level=1).compress(content)


# ------------------------------------------------------------------------------------------------------------- laws


@given(st.binary(min_size=1, max_size=300), st.data())
def test_ranges_in_any_order(before: bytes, data: st.DataObject) -> None:
    """Whatever is read, in whatever order, it is what the whole has there."""
    old = np.frombuffer(before, np.uint8)
    new = np.frombuffer(data.draw(st.binary(min_size=len(before), max_size=len(before))), np.uint8)
    places = np.flatnonzero(old != new).astype("<u4")
    stored = {
        XOR: (old ^ new).tobytes(),
        OVERWRITE: np.array([places.size], "<u4").tobytes() + places.tobytes() + new[places].tobytes(),
    }[how := data.draw(st.sampled_from([XOR, OVERWRITE]))]
    file, changes = b"\0" * 3 + frame(stored), Changes()
    of = Frame("x", how, 3, len(file), old.size)
    for _ in range(data.draw(st.integers(1, 5))):
        begin, end = sorted((data.draw(st.integers(0, old.size)), data.draw(st.integers(0, old.size))))
        found = old[begin:end].copy()
        changes.change(0, of, lambda start, stop: file[start:stop], begin, found)
        assert (found == new[begin:end]).all()


# ------------------------------------------------------------------------------------------------------------ layout


def test_the_layout_is_slimes(base: Path, after: Path, delta: Path) -> None:
    """Without our own ``delta.json`` it is a folder of slime's: of the version that its name says."""
    index = json.loads((delta / "model.safetensors.index.json").read_text())
    assert index["metadata"] == {
        "version": "000007", "base_version": "000006", "delta_encoding": "xor", "compression_format": "zstd",
        "checksum_format": "adler32",
    }  # fmt: skip
    (name,) = {*index["weight_map"].values()}
    header = read_header(delta / name)
    assert header.tensors.keys() == index["weight_map"].keys() == {EMBED, NORM}
    assert all(info.dtype == "U8" and len(header.metadata[tensor]) == 8 for tensor, info in header.tensors.items())
    slimes = shutil.copytree(delta, base.parent / "slimes", ignore=shutil.ignore_patterns("delta.json"))
    patch(base, base.parent / "patched", delta=slimes, **ONE)
    assert contents(base.parent / "patched") == contents(after)


SLIME = Path(__file__).parents[1] / "oracles" / "slime"
"""What slime wrote, and the sums of what comes of it (``tests/engines/slime_delta.py``)."""


@pytest.mark.parametrize("version", [1, 2, 3])
def test_what_slime_wrote(base: Path, tmp_path: Path, version: int) -> None:
    """Version 2 is ``overwrite``; the checksums are xxh3-128, adler32 and blake3."""
    deltas = [SLIME / f"weight_v{number:06d}" for number in range(1, version + 1)]
    patch(base, tmp_path / "out", delta=deltas[0], patch=deltas[1:], **ONE)
    found = {name: sha256(data).hexdigest() for name, data in contents(tmp_path / "out").items()}
    assert found == json.loads((SLIME / "sums.json").read_text())[version - 1]
    with pytest.raises(MismatchError, match="its result has another checksum"):
        patch(tmp_path / "out", tmp_path / "twice", delta=deltas[0], **ONE)


def test_ours_is_what_slime_writes(base: Path, tmp_path: Path) -> None:
    """The same files, names and bytes; slime's reader took both when they were recorded."""
    theirs, ours = SLIME / "weight_v000001", tmp_path / "weight_v000001"
    patch(base, tmp_path / "after", delta=theirs, **ONE)
    diff(base, tmp_path / "after", out=ours, compress=True)
    indices = [json.loads((folder / "model.safetensors.index.json").read_text()) for folder in (ours, theirs)]
    assert [index["metadata"].pop("checksum_format") for index in indices] == ["adler32", "xxh3-128"]
    assert indices[0] == indices[1]
    frames = [
        {name: unpacked(folder, name) for name in index["weight_map"]}
        for folder, index in zip((ours, theirs), indices, strict=True)
    ]
    assert frames[0] == frames[1]


def unpacked(folder: Path, name: str) -> bytes:
    return zstandard.ZstdDecompressor().decompress(bytes_of(folder, name))


def test_what_slime_has_no_place_for(base: Path, tmp_path: Path) -> None:
    """Tensors of another dtype, files in another number, and another tokenizer: ``delta.json`` has them."""
    other = write_checkpoint(tmp_path / "other", dtype="F32", files=1)
    (other / "tokenizer.json").write_text('{"tokens": [1]}')
    diff(base, other, out=tmp_path / "delta", compress=True)
    patch(base, tmp_path / "patched", delta=tmp_path / "delta", **ONE)
    assert contents(tmp_path / "patched") == contents(other)


def test_a_tensor_that_is_read_in_another_order(tmp_path: Path) -> None:
    """gpt-oss has gate and up row by row, Megatron one after the other: a change is stored as such, not the tensor."""
    before = zoo.save("gpt_oss", tmp_path / "before", settings={"num_hidden_layers": 1})
    (file,) = before.glob("*.safetensors")
    name = next(name for name in read_header(file).tensors if name.endswith("experts.gate_up_proj"))
    last = tuned(before, tmp_path / "after", {name: [(1, 1), (77, 2)]})
    for folder, source in (("a", before), ("b", last)):
        split(source, tmp_path / folder, format="megatron", tp=2, **ONE)
    for number, compress in enumerate((False, True)):
        made, patched = tmp_path / f"delta-{number}", tmp_path / f"patched-{number}"
        diff(tmp_path / "a", tmp_path / "b", out=made, compress=compress)
        assert sum(f.stat().st_size for f in made.glob("*.safetensors")) < 3000
        patch(before, patched, delta=made, **ONE)
        assert contents(patched) == contents(last)


def test_a_step_of_training_is_smaller_compressed(tmp_path: Path) -> None:
    """One of a hundred elements moves to a neighbour among the numbers of bfloat16."""
    config = {"hidden_size": 256, "intermediate_size": 512, "vocab_size": 512}
    before = write_checkpoint(tmp_path / "base", config=LLAMA | config)
    chance = np.random.default_rng(0)
    sizes = {}
    for share in (0.01, 0.1):
        last = shutil.copytree(before, tmp_path / f"after-{share}")
        for file in last.glob("*.safetensors"):
            content = np.fromfile(file, np.uint8)
            for info in read_header(file).tensors.values():
                codes = content[info.offset : info.offset + info.nbytes].view("<u2")
                codes[chance.random(codes.size) < share] ^= 1
            content.tofile(file)
        for compress in (False, True):
            out = tmp_path / f"delta-{share}-{compress}"
            diff(before, last, out=out, compress=compress)
            sizes[share, compress] = sum(path.stat().st_size for path in out.glob("*.safetensors"))
    assert sizes[0.01, True] < 0.5 * sizes[0.01, False] and sizes[0.1, True] < 0.6 * sizes[0.1, False], sizes


# ---------------------------------------------------------------------------------------------------------- refusals


def rewritten(delta: Path, folder: Path, frames: dict[str, bytes], **settings: str) -> Path:
    """A folder of slime's with these frames; those not given are as they were."""
    shutil.copytree(delta, folder)
    file = folder / "model-00000-of-00001.safetensors"
    header, content = read_header(file), file.read_bytes()
    kept = {n: frames.get(n, content[i.offset : i.offset + i.nbytes]) for n, i in header.tensors.items()}
    entries = [(name, "U8", (len(data),)) for name, data in kept.items()]
    file.write_bytes(build_header(entries, header.metadata) + b"".join(kept.values()))
    with changed_json(folder / "model.safetensors.index.json") as index:
        index["metadata"] |= settings
    return folder


def overwrite(places: list[int], values: int, count: int | None = None) -> bytes:
    number = len(places) if count is None else count
    return frame(np.array([number, *places], "<u4").tobytes() + bytes(values))


def far_looking(content: bytes) -> bytes:
    """A frame that asks for a window of 128 MB."""
    settings = zstandard.ZstdCompressionParameters(window_log=27, write_content_size=False)
    made = zstandard.ZstdCompressor(compression_params=settings).compressobj()
    return made.compress(content) + made.flush()


@pytest.mark.parametrize(
    ("how", "content", "message"),
    [
        ("xor", b"", "too few bytes"),
        ("xor", b"no frame", "cannot be decompressed"),
        ("xor", frame(bytes(39)), "too few bytes"),
        ("xor", frame(bytes(40))[:-1], "cannot be decompressed|too few bytes"),
        ("xor", frame(bytes(41)), "more bytes than its tensor"),
        ("xor", frame(bytes(1 << 24)), "more bytes than its tensor"),
        ("xor", far_looking(bytes(40)), "cannot be decompressed"),
        ("xor", frame(bytes(40)), "its result has another checksum"),
        ("overwrite", overwrite([40], 1), "a place behind its 40 bytes"),
        ("overwrite", overwrite([3, 3], 2), "ascending"),
        ("overwrite", overwrite([4, 3], 2), "ascending"),
        ("overwrite", overwrite([3], 2), "more bytes than its tensor"),
        ("overwrite", overwrite([3], 0), "too few bytes"),
        ("overwrite", overwrite([], 1 << 20, count=41), "41 places for 40 bytes"),
        ("overwrite", b"", "too few bytes"),
        ("overwrite", overwrite([3], 1), "its result has another checksum"),
    ],
    ids=lambda value: "" if isinstance(value, bytes) else str(value),
)
def test_damaged_frames(
    base: Path, after: Path, delta: Path, tmp_path: Path, how: str, content: bytes, message: str
) -> None:
    """In slime's folders, and in our own, which have no ``overwrite``."""
    frames = {NORM: content}
    if how == "overwrite":  # of the other tensor what is right
        old, new = (np.frombuffer(bytes_of(folder, EMBED), np.uint8) for folder in (base, after))
        places = np.flatnonzero(old != new).astype("<u4")
        head = np.array([places.size], "<u4").tobytes()
        frames[EMBED] = frame(head + places.tobytes() + new[places].tobytes())
    broken = rewritten(delta, tmp_path / "broken", frames, delta_encoding=how)
    for is_ours in (True, False) if how == "xor" else (False,):
        if not is_ours:
            (broken / "delta.json").unlink()
        with pytest.raises(ReshardError, match=message) as error:
            patch(base, tmp_path / "out", delta=broken, **ONE)
        assert "\n" not in error.value.message and not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"delta_encoding": "sparse"}, "delta_encoding should be one of xor, overwrite"),
        ({"compression_format": "gzip"}, "compression_format should be one of zstd"),
        ({"checksum_format": "md5"}, "checksum_format should be one of xxh3-128, blake3, adler32"),
    ],
)
def test_other_layouts_of_slimes(
    base: Path, delta: Path, tmp_path: Path, settings: dict[str, str], message: str
) -> None:
    broken = rewritten(delta, tmp_path / "broken", {}, **settings)
    (broken / "delta.json").unlink()
    with pytest.raises(CheckpointError, match=message):
        patch(base, tmp_path / "out", delta=broken, **ONE)


def test_a_folder_of_slimes_for_another_model(delta: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(delta, tmp_path / "delta", ignore=shutil.ignore_patterns("delta.json"))
    with pytest.raises(CheckpointError, match=r"tensor .model\.embed_tokens\.weight. is not in both"):
        patch(store.checkpoint("gpt2"), tmp_path / "out", delta=folder, **ONE)


@pytest.mark.parametrize("how", ["same", "indices", "whole", "gone"])
def test_a_frame_is_not_taken_for_something_else(base: Path, delta: Path, tmp_path: Path, how: str) -> None:
    shutil.copytree(delta, tmp_path / "delta")
    document = json.loads((delta / "delta.json").read_text())
    document["tensors"][NORM]["how"] = how
    signed(tmp_path / "delta", document)
    with pytest.raises(CheckpointError):
        patch(base, tmp_path / "out", delta=tmp_path / "delta", **ONE)


def test_without_the_package(base: Path, after: Path, delta: Path, tmp_path: Path) -> None:
    """One line that says what to install, before anything is compared or written."""
    (tmp_path / "hide.py").write_text(
        "import importlib.util, sys\nreal = importlib.util.find_spec\n"
        "importlib.util.find_spec = lambda name, *more: None if name == 'zstandard' else real(name, *more)\n"
        "from reshard.__main__ import main\nmain()\n"
    )

    for line in (
        ["diff", base, after, "--out", tmp_path / "out", "--compress"],
        ["patch", base, delta, tmp_path / "out"],
    ):
        done = subprocess.run([sys.executable, tmp_path / "hide.py", *map(str, line)], capture_output=True, text=True)
        assert done.returncode == 2 and "Hint: pip install zstandard" in done.stderr, done.stderr
        assert not (tmp_path / "out").exists()


def test_the_option(base: Path, after: Path, tmp_path: Path) -> None:
    assert command("diff", base, after, "--compress").returncode == 2
    assert command("diff", base, after, "--compress", "--out", tmp_path / "delta").returncode == 1
    assert command("patch", base, tmp_path / "delta", tmp_path / "out").returncode == 0
    assert contents(tmp_path / "out") == contents(after)
