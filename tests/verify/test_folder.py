"""All that lies beside tensors: nothing of a folder of shards, and nothing that its manifest says, goes unproven."""

from __future__ import annotations

import copy
import json
import math
import os
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from reshard.api import merge, split
from reshard.cli.commands import main
from reshard.formats.errors import ReshardError
from reshard.formats.files.checksum import file_checksum
from reshard.formats.files.chunks import OFFSETS_KEY
from reshard.formats.files.safetensors import build_header, read_header
from reshard.source.opening import open_source
from reshard.verify.bytes import blocks, folder
from reshard.verify.bytes.exact import verify_exact
from reshard.verify.bytes.exact_report import ExactReport
from tests.marks import thorough
from tests.support import LLAMA, changed_json, write_checkpoint

RANK = "rank-01-of-02"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A checkpoint in two files with side files at two depths, and its shards in several files a rank."""
    root = tmp_path_factory.mktemp("folder")
    original = write_checkpoint(root / "original", files=2)
    (original / "modules.json").write_text('[{"path": ""}, {"path": "1_Pooling"}]')
    (original / "1_Pooling").mkdir()
    (original / "1_Pooling/config.json").write_text('{"mode": "mean"}')
    split(original, root / "shards", tp=2, max_shard_size=6000)
    return original, root / "shards"


@pytest.fixture
def pair(made: tuple[Path, Path], tmp_path: Path) -> tuple[Path, Path]:
    return made[0], Path(shutil.copytree(made[1], tmp_path / "shards"))


def report(original: Path, shards: Path) -> ExactReport:
    return verify_exact(open_source(original), shards)


def lines(found: ExactReport) -> list[str]:
    return [
        *found.problems,
        *found.missing,
        *found.extra,
        *map(str, found.configs),
        *([str(found.first)] if found.first else []),
    ]


# ------------------------------------------------------------------------------------------------------- the manifest

# What nothing reads but people, or no more once all ranks are there; and why another value is no fault of the shards.
UNPROVEN = {
    r"source\.location": "where the source was: it may lie elsewhere now, nothing reads it but inspect",
    r"source\.commit": "the Hub's name of the state the source was in; the id says what its weights are",
    r"inputs\[\d+\]\.\w+": "what was read then, perhaps other shards of the original; only a later run for another "
    "rank reads it, and refuses to go on",
    r"max_shard_size": "another number that gives the same files; one that does not is found",
    r"source\.files\[\d+\]\.checksum": "null alone: a run for one rank may not read it whole; merge compares none",
}


def leaves(document: Any, path: tuple[str | int, ...] = ()) -> Iterator[tuple[tuple[str | int, ...], Any]]:
    """Every value of a document that is no list or object, or an empty one."""
    pairs = (
        document.items() if isinstance(document, dict) else enumerate(document) if isinstance(document, list) else ()
    )
    inner = [leaf for key, value in pairs for leaf in leaves(value, (*path, key))]
    yield from inner or [(path, document)]


def spelled(path: tuple[str | int, ...]) -> str:
    return "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in path).removeprefix(".")


def others(value: Any) -> Iterator[Any]:
    """Values that are not this one: of its own kind, of another, and none."""
    if isinstance(value, str):
        half = len(value) // 2
        yield value[:half] + ("0" if value[half : half + 1] != "0" else "1") + value[half + 1 :]
        yield f"{value} "
    elif isinstance(value, bool):
        yield not value
    elif isinstance(value, int):
        yield from (value + 1, 0 if value else 2)
    elif isinstance(value, dict):
        yield {"x": 1}
    elif isinstance(value, list):
        yield ["x"]
    yield from (7, "x") if value is None else (None,)


def put(document: Any, path: tuple[str | int, ...], value: Any) -> Any:
    changed = copy.deepcopy(document)
    at = changed
    for key in path[:-1]:
        at = at[key]
    at[path[-1]] = value
    return changed


def verdict(original: Path, shards: Path) -> list[str]:
    """What is said of shards: an error's line, or what is different."""
    try:
        return lines(report(original, shards))
    except ReshardError as error:
        return [error.message]


@thorough
def test_every_value_of_the_manifest_is_proven(pair: tuple[Path, Path]) -> None:
    original, shards = pair
    manifest = shards / "reshard.json"
    document = json.loads(manifest.read_text())
    assert lines(report(original, shards)) == []
    passed: dict[str, list[Any]] = {}
    source = open_source(original)
    for path, value in leaves(document):
        for other in others(value):
            manifest.write_text(json.dumps(put(document, path, other)))
            try:
                found = lines(verify_exact(source, shards))
            except ReshardError as error:
                found = [error.message]
            if not found:
                passed.setdefault(spelled(path), []).append(other)
            else:
                assert all("\n" not in line and "Traceback" not in line for line in found)
    unexplained = {name: kept for name, kept in passed.items() if not any(re.fullmatch(key, name) for key in UNPROVEN)}
    assert unexplained == {}
    assert all(values == [None] for name, values in passed.items() if name.endswith("checksum"))
    assert {key for key in UNPROVEN if any(re.fullmatch(key, name) for name in passed)} == set(UNPROVEN)


@pytest.mark.parametrize("kind", ["removed", "added"])
@thorough
def test_nothing_is_left_out_of_the_manifest_or_put_in(pair: tuple[Path, Path], kind: str) -> None:
    """Each entry of each list and object: without it, or with one more."""
    original, shards = pair
    manifest = shards / "reshard.json"
    document = json.loads(manifest.read_text())
    source, passed = open_source(original), []

    def inner(at: Any, path: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
        for key, value in at.items() if isinstance(at, dict) else enumerate(at) if isinstance(at, list) else ():
            yield (*path, key)
            yield from inner(value, (*path, key))

    for path in inner(document):
        changed = copy.deepcopy(document)
        at = changed
        for key in path[:-1]:
            at = at[key]
        if kind == "removed":
            del at[path[-1]]
        elif isinstance(at[path[-1]], dict):
            at[path[-1]]["more"] = 1
        elif isinstance(at[path[-1]], list):
            at[path[-1]].append(copy.deepcopy(at[path[-1]][-1]) if at[path[-1]] else 1)
        else:
            continue
        manifest.write_text(json.dumps(changed))
        try:
            found = lines(verify_exact(source, shards))
        except ReshardError as error:
            found = [error.message]
        if not found:
            passed.append(spelled(path))
    assert passed == [path for path in passed if re.fullmatch(r"inputs(\[\d+\]\.content|\[\d+\])?", path)]


def test_aliases_of_tied_weights(tmp_path: Path) -> None:
    """A .bin whose head is its embedding: what merge would give both names."""
    original = tmp_path / "original"
    original.mkdir()
    (original / "config.json").write_text(json.dumps(LLAMA | {"num_hidden_layers": 0, "tie_word_embeddings": True}))
    table = torch.arange(37 * 20, dtype=torch.float32).reshape(37, 20)
    tensors = {"model.embed_tokens.weight": table, "lm_head.weight": table, "model.norm.weight": torch.ones(20)}
    torch.save(tensors, original / "pytorch_model.bin")
    split(original, tmp_path / "shards", tp=2)
    assert lines(report(original, tmp_path / "shards")) == []
    manifest = tmp_path / "shards/reshard.json"
    with changed_json(manifest) as document:
        assert document["source"]["aliases"]
        document["source"]["aliases"] = {}
    (line,) = lines(report(original, tmp_path / "shards"))
    assert line.startswith("reshard.json: 'source.aliases")


def test_routes_and_options_that_are_the_same(made: tuple[Path, Path], tmp_path: Path) -> None:
    """Without checksums, without a manifest, from shards without a manifest, from shards with one: nothing to say."""
    original, shards = made
    split(original, tmp_path / "plain", tp=2, checksum=False)
    assert lines(report(original, tmp_path / "plain")) == []
    split(shards, tmp_path / "again", tp=4)
    assert lines(report(original, tmp_path / "again")) == []
    lost = Path(shutil.copytree(shards, tmp_path / "lost"))
    (lost / "reshard.json").unlink()
    assert lines(report(original, lost)) == []
    split(lost, tmp_path / "after", tp=4)
    assert lines(report(original, tmp_path / "after")) == []
    merge(shards, tmp_path / "merged")
    assert lines(report(original, tmp_path / "merged")) == []
    for rank in (1, 0):
        split(original, tmp_path / "by-rank", tp=2, ranks=[rank])
    assert lines(report(original, tmp_path / "by-rank")) == []


def test_a_source_file_that_is_no_longer_what_merge_expects(made: tuple[Path, Path], tmp_path: Path) -> None:
    """A checksum in the manifest, of a file of the source and of a shard, each on its own."""
    original, shards = made
    for place in ("source", "ranks"):
        copied = Path(shutil.copytree(shards, tmp_path / place))
        with changed_json(copied / "reshard.json") as document:
            files = document["source"]["files"] if place == "source" else document["ranks"][1]["files"]
            entry = next(file for file in files if file["name"].endswith(".safetensors"))
            entry["checksum"] = "0123456789abcdef"
        (line,) = lines(report(original, copied))
        assert (
            line.startswith("reshard.json: the checksum of ") and entry["name"] in line and "0123456789abcdef" in line
        )


def test_checksums_are_taken_of_what_is_read_anyway(
    made: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No file of weights is read twice, however it is cut, as long as all is right."""
    original, shards = made
    split(original, tmp_path / "padded", tp=4, pad_vocab_to=64)

    def read_again(path: Path, _: object) -> str:
        assert path.suffix != ".safetensors", path
        return file_checksum(path)

    monkeypatch.setattr(folder, "_summed", read_again)
    for size in (blocks.CHUNK, 100):
        monkeypatch.setattr(blocks, "CHUNK", size)
        assert lines(report(original, shards)) == [] == lines(report(original, tmp_path / "padded"))


# --------------------------------------------------------------------------------------------------------- the folder


def write(path: Path, text: str = "?") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def exchanged(shards: Path, *, whole: bool) -> None:
    """Exchange the folders of two ranks, or the tensors of their files, whose headers stay."""
    one, other = ranks = sorted(shards.glob("rank-*"))
    if whole:
        one.rename(shards / "between")
        other.rename(one)
        (shards / "between").rename(other)
        return
    for name in [file.name for file in one.glob("*.safetensors")]:
        headers = [read_header(rank / name).raw for rank in ranks]
        data = [(rank / name).read_bytes()[len(raw) :] for rank, raw in zip(ranks, headers, strict=True)]
        for rank, raw, of in zip(ranks, headers, reversed(data), strict=True):
            (rank / name).write_bytes(raw + of)


CHANGES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "ranks' folders are exchanged": (lambda p: exchanged(p, whole=True), "is a shard of rank"),
    "ranks' tensors are exchanged": (lambda p: exchanged(p, whole=False), "on rank 0"),
    "a side file is gone": (lambda p: (p / "tokenizer.json").unlink(), "tokenizer.json"),
    "a side file is changed": (lambda p: write(p / "tokenizer.json", '{"tokens": [] }'), "tokenizer.json"),
    "a deeper side file is gone": (lambda p: (p / "1_Pooling/config.json").unlink(), "1_Pooling/config.json"),
    "a deeper side file is changed": (lambda p: write(p / "1_Pooling/config.json", "{}"), "1_Pooling/config.json"),
    "a side file is added": (lambda p: write(p / "more.json"), "more.json"),
    "a deeper file is added": (lambda p: write(p / "1_Pooling/more.json"), "1_Pooling/more.json"),
    "the config is written otherwise": (
        lambda p: write(p / "config.json", json.dumps(json.loads((p / "config.json").read_text()))), "config.json",
    ),
    "an empty folder": (lambda p: (p / "more").mkdir(), "more/"),
    "a folder": (lambda p: write(p / "more/file"), "more/"),
    "an empty folder of a rank": (lambda p: (p / RANK / "more").mkdir(), f"{RANK}/more/"),
    "a folder of a rank": (lambda p: write(p / RANK / "more/file"), f"{RANK}/more/"),
    "a file of a rank": (lambda p: write(p / RANK / "more"), f"{RANK}/more"),
    "a hidden file of a rank": (lambda p: write(p / RANK / ".more"), f"{RANK}/.more"),
    "an empty rank of another mesh": (lambda p: (p / "rank-02-of-03").mkdir(), "rank-02-of-03"),
    "what a run has left": (lambda p: write(p / ".reshard-lock-root"), ".reshard-lock-root"),
    "a broken link": (lambda p: (p / "link").symlink_to("nowhere"), "link"),
    "a broken link in a rank": (lambda p: (p / RANK / "link").symlink_to("nowhere"), f"{RANK}/link"),
    "a link to a folder": (lambda p: (p / "link").symlink_to(p / RANK, target_is_directory=True), "link/"),
    "a link in a rank to it": (lambda p: (p / RANK / "link").symlink_to(p / RANK), f"{RANK}/link/"),
    "a pipe": (lambda p: os.mkfifo(p / "pipe"), "pipe"),
    "weights": (
        lambda p: shutil.copy(p / RANK / "model-00001-of-00003.safetensors", p / "x.safetensors"), "x.safetensors",
    ),
    "a rank's config": (
        lambda p: write(p / RANK / "config.json", (p / RANK / "config.json").read_text().replace('": 4', '": 3')),
        f"{RANK}/config.json",
    ),
    "a rank's config is written otherwise": (
        lambda p: write(p / RANK / "config.json", (p / RANK / "config.json").read_text().replace("\n  ", "\n\t ")),
        f"{RANK}/config.json",
    ),
    "a rank's config is gone": (lambda p: (p / RANK / "config.json").unlink(), f"{RANK}/config.json"),
    "a rank's index": (
        lambda p: write(
            p / RANK / "model.safetensors.index.json",
            (p / RANK / "model.safetensors.index.json").read_text().replace("00002-of", "00001-of"),
        ),
        f"{RANK}/model.safetensors.index.json",
    ),
    "a rank's index is gone": (
        lambda p: (p / RANK / "model.safetensors.index.json").unlink(), f"{RANK}/model.safetensors.index.json",
    ),
}  # fmt: skip


@pytest.mark.parametrize("manifest", [True, False], ids=["manifest", "no-manifest"])
@pytest.mark.parametrize("change", CHANGES)
def test_whatever_is_changed_in_the_folder_is_named(change: str, manifest: bool, pair: tuple[Path, Path]) -> None:
    original, shards = pair
    if not manifest:
        if change == "a rank's config is written otherwise":
            return  # nothing but the manifest says how a rank's config is written
        (shards / "reshard.json").unlink()
    do, name = CHANGES[change]
    do(shards)
    found = verdict(original, shards)
    assert any(name in line for line in found), found


def test_the_command_says_so(pair: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    original, shards = pair
    (shards / RANK / "more").mkdir()
    (shards / "tokenizer.json").write_text("[]")
    with pytest.raises(SystemExit) as stop:
        main(["verify", str(original), str(shards), "--exact-only"])
    out = capsys.readouterr().out
    assert stop.value.code == 1
    assert (
        f"extra: {RANK}/more/" in out and "tokenizer.json: is not the original's" in out and "nothing extra" not in out
    )


def test_what_tools_keep_for_themselves_is_no_part(pair: tuple[Path, Path]) -> None:
    """What the Hub's client and git leave beside a download, and links in the place of files and folders."""
    original, shards = pair
    write(shards / ".cache/huggingface/download/x.metadata")
    write(shards / ".gitattributes")
    shutil.move(shards / RANK, shards.parent / "elsewhere")
    (shards / RANK).symlink_to(shards.parent / "elsewhere", target_is_directory=True)
    shutil.move(shards / "tokenizer.json", shards.parent / "blob")
    (shards / "tokenizer.json").symlink_to(shards.parent / "blob")
    assert lines(report(original, shards)) == []


def test_numbers_that_json_lacks_are_no_difference(made: tuple[Path, Path], tmp_path: Path) -> None:
    """Python's own writer puts them into a config.json: ``time_step_limit`` of Mamba 2, say."""
    original = Path(shutil.copytree(made[0], tmp_path / "original"))
    config = json.loads((original / "config.json").read_text())
    config |= {"time_step_limit": [0.0, math.inf], "never": math.nan}
    (original / "config.json").write_text(json.dumps(config))
    split(original, tmp_path / "shards", tp=2)
    merge(tmp_path / "shards", tmp_path / "merged")
    assert lines(report(original, tmp_path / "shards")) == [] == lines(report(original, tmp_path / "merged"))
    (tmp_path / "merged/config.json").write_text(json.dumps(config | {"time_step_limit": [-math.inf, math.inf]}))
    (line,) = lines(report(original, tmp_path / "merged"))
    assert line == "config.json: 'time_step_limit[0]' is -Infinity, expected 0.0"


def test_a_document_that_is_none_says_why(pair: tuple[Path, Path]) -> None:
    original, shards = pair
    (shards / "reshard.json").unlink()
    (shards / RANK / "config.json").write_text('{"hidden_size": 20')
    (shards / RANK / "model.safetensors.index.json").write_text("[]")
    first, second = lines(report(original, shards))
    assert f"{RANK}/config.json: not valid JSON: Expecting ',' delimiter" in first
    assert second.endswith(f"{RANK}/model.safetensors.index.json: should be a JSON object and is []")


@pytest.mark.skipif(not Path("/proc/self/mem").is_file(), reason="a file whose first bytes cannot be read")
def test_a_document_that_cannot_be_read_is_no_difference(pair: tuple[Path, Path]) -> None:
    original, shards = pair
    (shards / "reshard.json").unlink()
    (shards / RANK / "config.json").unlink()
    (shards / RANK / "config.json").symlink_to("/proc/self/mem")
    with pytest.raises(ReshardError, match="cannot be read"):
        report(original, shards)


def renamed(folder: Path, old: str, new: str, name: str = "model.safetensors.index.json") -> None:
    text = (folder / name).read_text()
    assert old in text
    (folder / name).write_text(text.replace(old, new, 1))


def with_format(folder: Path, metadata: dict[str, str]) -> None:
    """Write a file of weights with other metadata in its header."""
    file = folder / PART
    raw, header = file.read_bytes(), read_header(file)
    tensors = [(info.name, info.dtype, info.shape) for info in header.tensors.values()]
    file.write_bytes(build_header(tensors, metadata) + raw[len(header.raw) :])


PART = "model-00001-of-00003.safetensors"
OF_MERGED: dict[str, tuple[Callable[[Path], Any], str]] = {
    "a side file is gone": (lambda p: (p / "tokenizer.json").unlink(), "tokenizer.json"),
    "a side file is added": (lambda p: write(p / "notes.txt"), "notes.txt"),
    "any file": (lambda p: write(p / "notes.bak"), "notes.bak"),
    "older weights": (lambda p: shutil.copy(p / PART, p / "model-old.safetensors"), "model-old.safetensors"),
    "a file of another series": (
        lambda p: shutil.copy(p / PART, p / "model-00001-of-00001.safetensors"), "model-00001-of-00001.safetensors",
    ),
    "torch's weights": (lambda p: torch.save({}, p / "pytorch_model.bin"), "pytorch_model.bin"),
    "weights in a folder": (lambda p: write(p / "sub/model.safetensors"), "sub/"),
    "Meta's folder": (lambda p: write(p / "original/consolidated.00.pth"), "original/"),
    "another index": (lambda p: write(p / "pytorch_model.bin.index.json"), "pytorch_model.bin.index.json"),
    "the index is gone": (lambda p: (p / "model.safetensors.index.json").unlink(), "model.safetensors.index.json"),
    "the index has another size": (lambda p: renamed(p, '_size": ', '_size": 5'), "metadata.total_size"),
    "the index names another file": (lambda p: renamed(p, "00002-of", "00001-of"), "weight_map"),
    "the index names another tensor": (lambda p: renamed(p, '"model.norm', '"model.more'), "weight_map"),
    "a header without a format": (lambda p: with_format(p, {}), f"{PART}: 'format' is nothing"),
    "a header of another format": (lambda p: with_format(p, {"format": "tf"}), f"{PART}: 'format' is \"tf\""),
}  # fmt: skip


@pytest.mark.parametrize("change", OF_MERGED)
def test_whatever_is_changed_in_a_merged_folder_is_named(change: str, made: tuple[Path, Path], tmp_path: Path) -> None:
    """A program that finds no index there, or does not look for one, loads each file of weights."""
    original, shards = made
    merge(shards, merged := tmp_path / "merged", max_shard_size=15_000)
    assert (merged / PART).is_file() and lines(report(original, merged)) == []
    do, name = OF_MERGED[change]
    do(merged)
    found = verdict(original, merged)
    assert any(name in line for line in found), found


def test_weights_beside_a_single_file(made: tuple[Path, Path], tmp_path: Path) -> None:
    """Beside ``model.safetensors``, an index that nothing asks for, and weights that no index leaves out."""
    original, shards = made
    merge(shards, merged := tmp_path / "merged", max_shard_size="1GB")
    assert lines(report(original, merged)) == []
    shutil.copy(merged / "model.safetensors", merged / "model-old.safetensors")
    write(merged / "model.safetensors.index.json", '{"weight_map": {"w": "x.safetensors"}}')
    found = report(original, merged)
    assert found.extra == ("model-old.safetensors",)
    assert str(found.configs[0]).startswith("model.safetensors.index.json: 'weight_map.")


def test_a_copy_may_have_what_lies_beside_the_original(made: tuple[Path, Path], tmp_path: Path) -> None:
    """It is named as not compared; the index has the size 0, as the original's has of the same files."""
    original = Path(shutil.copytree(made[0], tmp_path / "original"))
    write(original / "original/consolidated.00.pth")
    copied = Path(shutil.copytree(original, tmp_path / "copied"))
    found = report(original, copied)
    assert (lines(found), found.not_compared) == ([], ("original/",))


# ------------------------------------------------------------------------------------------------------------ headers


def rewrite(file: Path, change: Callable[[dict[str, Any], dict[str, str]], None]) -> None:
    """Write a shard file with other metadata."""
    raw, header = file.read_bytes(), read_header(file)
    document = json.loads(header.metadata["reshard"])
    metadata = dict(header.metadata)
    change(document, metadata)
    metadata["reshard"] = json.dumps(document)
    tensors = [(info.name, info.dtype, info.shape) for info in header.tensors.values()]
    file.write_bytes(build_header(tensors, metadata) + raw[len(header.raw) :])


@pytest.mark.parametrize(
    "key", ["version", "source", "mesh", "rank", "sizes", "padding", "plan", "format", "more", OFFSETS_KEY]
)
def test_what_a_header_says_of_its_file(key: str, pair: tuple[Path, Path]) -> None:
    """Of all files alike and without a manifest, so that only the original can tell."""
    original, shards = pair
    (shards / "reshard.json").unlink()
    values = {
        "version": 2, "source": "0" * 64, "mesh": {"dims": [["tp", 3]]}, "rank": 0, "plan": "0" * 16,
        "padding": {}, "sizes": {"hidden": 21},
    }  # fmt: skip

    def change(document: dict[str, Any], metadata: dict[str, str]) -> None:
        if key in ("format", "more", OFFSETS_KEY):
            metadata[key] = "tf"
        else:
            document[key] = document[key] | values[key] if key == "sizes" else values[key]

    for file in shards.glob("rank-*/*.safetensors"):
        rewrite(file, change)
    assert verdict(original, shards) != []
