"""Checkpoint folders: how the weights are found, what is refused, and what else belongs to a model."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from reshard.formats.errors import CheckpointError
from reshard.formats.files.checkpoint import Checkpoint, open_checkpoint
from reshard.formats.files.fingerprint import fingerprint
from reshard.formats.files.safetensors import build_header
from reshard.formats.files.side_files import LARGEST, find_side_files

SAFE_INDEX, BIN_INDEX = "model.safetensors.index.json", "pytorch_model.bin.index.json"
ONE, TWO = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"


def tensor(start: int, *shape: int) -> torch.Tensor:
    return torch.arange(start, start + torch.Size(shape).numel(), dtype=torch.float32).reshape(shape)


A, B, C = tensor(0, 40), tensor(100, 4, 10), tensor(200, 3)


def folder_of(path: Path, config: object = None) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps({"model_type": "llama"} if config is None else config))
    return path


def single(path: Path, **tensors: torch.Tensor) -> Path:
    save_file(tensors or {"a": A, "b": B}, folder_of(path) / "model.safetensors")
    return path


def sharded(path: Path, weight_map: dict[str, Any] | None = None) -> Path:
    """Tensors b and c in the first file and a in the second one, with an index."""
    folder_of(path)
    save_file({"b": B, "c": C}, path / ONE)
    save_file({"a": A}, path / TWO)
    write_index(path, {"a": TWO, "b": ONE, "c": ONE} if weight_map is None else weight_map)
    return path


def write_index(path: Path, weight_map: object, name: str = SAFE_INDEX) -> None:
    (path / name).write_text(json.dumps({"metadata": {"total_size": 0}, "weight_map": weight_map}))


def refusal(path: Path, *said: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(path)
    for part in (str(path), *said):
        assert part in caught.value.message
    assert "\n" not in caught.value.message + (caught.value.hint or "")


def same_bytes(checkpoint: Checkpoint, expected: dict[str, torch.Tensor]) -> None:
    for name, value in expected.items():
        info = checkpoint.tensors[checkpoint.aliases.get(name, name)]
        content = info.file.read_bytes()[info.offset : info.offset + info.nbytes]
        assert content == bytes(value.contiguous().view(-1).view(torch.uint8).tolist())
        assert info.shape == tuple(value.shape)


# -- what is found ----------------------------------------------------------------------------------------------------


def test_a_single_file(tmp_path: Path) -> None:
    found = open_checkpoint(single(tmp_path))
    (file,) = found.files
    assert file == tmp_path / "model.safetensors"
    (record,) = found.records
    assert (record.name, record.size) == ("model.safetensors", file.stat().st_size)
    assert file.read_bytes().startswith(record.header)
    assert (found.index, found.index_name, found.aliases) == (None, None, {})
    assert found.config == {"model_type": "llama"}
    same_bytes(found, {"a": A, "b": B})


def test_sharded(tmp_path: Path) -> None:
    found = open_checkpoint(sharded(tmp_path))
    assert [file.name for file in found.files] == [ONE, TWO]
    assert list(found.tensors) == ["b", "c", "a"]  # file by file, by offset
    assert found.index_name == SAFE_INDEX
    assert found.index == tmp_path / SAFE_INDEX
    same_bytes(found, {"a": A, "b": B, "c": C})


def test_an_index_may_name_a_single_standard_file(tmp_path: Path) -> None:
    single(tmp_path)
    write_index(tmp_path, {"a": "model.safetensors", "b": "./model.safetensors"})
    found = open_checkpoint(tmp_path)
    assert [file.name for file in found.files] == ["model.safetensors"]
    assert found.index_name == SAFE_INDEX


def test_an_index_may_name_files_in_folders_below(tmp_path: Path) -> None:
    folder_of(tmp_path)
    (tmp_path / "parts").mkdir()
    save_file({"a": A}, tmp_path / "parts" / "1.safetensors")
    write_index(tmp_path, {"a": "parts/1.safetensors"})
    found = open_checkpoint(tmp_path)
    assert [record.name for record in found.records] == ["parts/1.safetensors"]
    same_bytes(found, {"a": A})


def test_a_single_file_of_another_name(tmp_path: Path) -> None:
    save_file({"a": A}, folder_of(tmp_path) / "weights.safetensors")
    assert [file.name for file in open_checkpoint(tmp_path).files] == ["weights.safetensors"]


def test_a_pickle(tmp_path: Path) -> None:
    torch.save({"a": A, "b": B, "tied": A}, folder_of(tmp_path) / "pytorch_model.bin")
    found = open_checkpoint(tmp_path)
    assert ([file.name for file in found.files], found.records) == (["pytorch_model.bin"], ())
    assert found.aliases == {"tied": "a"}
    same_bytes(found, {"a": A, "b": B, "tied": A})


def test_sharded_pickles_with_tied_weights(tmp_path: Path) -> None:
    torch.save({"a": A, "tied": A}, folder_of(tmp_path) / "pytorch_model-00001-of-00002.bin")
    torch.save({"b": B}, tmp_path / "pytorch_model-00002-of-00002.bin")
    files = ["pytorch_model-00001-of-00002.bin", "pytorch_model-00002-of-00002.bin"]
    write_index(tmp_path, {"a": files[0], "tied": files[0], "b": files[1]}, BIN_INDEX)
    found = open_checkpoint(tmp_path)
    assert [file.name for file in found.files] == files
    assert (found.index_name, found.aliases) == (BIN_INDEX, {"tied": "a"})
    same_bytes(found, {"a": A, "b": B, "tied": A})


def test_safetensors_come_before_pickles(tmp_path: Path) -> None:
    torch.save({"z": A}, single(tmp_path) / "pytorch_model.bin")
    write_index(tmp_path, {"z": "absent.bin"}, BIN_INDEX)
    save_file({"y": A}, tmp_path / "consolidated.safetensors")
    assert set(open_checkpoint(tmp_path).tensors) == {"a", "b"}


def test_files_may_be_links_out_of_the_folder(tmp_path: Path) -> None:
    """As in the Hub's cache, where a snapshot's files are links to blobs."""
    source, linked = sharded(tmp_path / "blobs"), tmp_path / "snapshot"
    linked.mkdir()
    for file in source.iterdir():
        (linked / file.name).symlink_to(file)
    found = open_checkpoint(linked)
    assert list(found.tensors) == ["b", "c", "a"]
    assert [*found.files] == [linked / ONE, linked / TWO]
    assert [record.size for record in found.records] == [(source / name).stat().st_size for name in (ONE, TWO)]


def test_a_config_needs_no_model_type(tmp_path: Path) -> None:
    single(tmp_path)
    (tmp_path / "config.json").write_text('{"limit": Infinity}')  # as some published configs have it
    assert open_checkpoint(tmp_path).config == {"limit": float("inf")}


# -- what is refused --------------------------------------------------------------------------------------------------


def test_no_folder(tmp_path: Path) -> None:
    refusal(tmp_path / "absent", "no such folder")
    (tmp_path / "file").write_text("")
    refusal(tmp_path / "file", "not a folder")


def test_no_weights(tmp_path: Path) -> None:
    refusal(folder_of(tmp_path), "no weights", "model.safetensors", "pytorch_model.bin")
    (tmp_path / "model.onnx").write_bytes(b"")
    refusal(tmp_path, "no weights", "found model.onnx")


def test_no_config(tmp_path: Path) -> None:
    (single(tmp_path) / "config.json").unlink()
    refusal(tmp_path, "config.json: missing")


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"{", "not valid JSON"),
        (b"", "not valid JSON"),
        (b"\xff\xfe\xfa", "not valid JSON"),
        (b"[" * 200_000, "not valid JSON"),
        (b"[1]", "should be a JSON object and is [1]"),
    ],
)
@pytest.mark.parametrize("name", ["config.json", SAFE_INDEX])
def test_damaged_json(tmp_path: Path, name: str, content: bytes, said: str) -> None:
    (sharded(tmp_path) / name).write_bytes(content)
    refusal(tmp_path, name, said)


def test_json_that_is_a_folder(tmp_path: Path) -> None:
    (sharded(tmp_path) / SAFE_INDEX).unlink()
    (tmp_path / SAFE_INDEX).mkdir()
    refusal(tmp_path, SAFE_INDEX, "cannot be read")


@pytest.mark.parametrize("content", [{}, {"weight_map": {}}, {"weight_map": []}, {"weight_map": None}])
def test_an_index_without_weight_map(tmp_path: Path, content: object) -> None:
    (sharded(tmp_path) / SAFE_INDEX).write_text(json.dumps(content))
    refusal(tmp_path, SAFE_INDEX, "no 'weight_map'")


def test_an_index_that_names_a_tensor_twice(tmp_path: Path) -> None:
    (sharded(tmp_path) / SAFE_INDEX).write_text(f'{{"weight_map": {{"a": "{ONE}", "a": "{TWO}"}}}}')
    refusal(tmp_path, SAFE_INDEX, "'a' appears twice")


@pytest.mark.parametrize("file", [None, 1, "", [], {}])
def test_an_index_that_names_no_file(tmp_path: Path, file: object) -> None:
    path = sharded(tmp_path, {"a": TWO, "b": file, "c": ONE})
    refusal(path, SAFE_INDEX, "tensor 'b' should be mapped to a file name")


@pytest.mark.parametrize(
    "file", ["../x.safetensors", "a/../../x.safetensors", "..", "a\\..\\x", "/etc/x.safetensors", "é" * 130]
)
def test_an_index_that_points_outside(tmp_path: Path, file: str) -> None:
    save_file({"c": C}, tmp_path / "x.safetensors")
    path = sharded(tmp_path / "model", {"a": TWO, "b": ONE, "c": file})
    refusal(path, SAFE_INDEX, "tensor 'c'", f"{file!r}, outside the folder")


def test_an_absolute_path_into_the_folder_is_still_refused(tmp_path: Path) -> None:
    refusal(sharded(tmp_path, {"a": TWO, "b": str(tmp_path / ONE), "c": ONE}), "tensor 'b'", "outside the folder")


def test_an_index_that_names_a_missing_file(tmp_path: Path) -> None:
    (sharded(tmp_path) / TWO).unlink()
    refusal(tmp_path, SAFE_INDEX, f"tensor 'a' is said to lie in '{TWO}', which does not exist")


def unnumbered(path: Path, weight_map: dict[str, Any]) -> Path:
    """The same in files whose names do not say how many there are."""
    folder = sharded(path, {tensor: file.replace(ONE, "x.safetensors") for tensor, file in weight_map.items()})
    (folder / ONE).rename(folder / "x.safetensors")
    return folder


def test_an_index_that_names_a_missing_tensor(tmp_path: Path) -> None:
    path = unnumbered(tmp_path, {"a": TWO, "b": ONE, "c": ONE, "d": TWO})
    refusal(path, f"tensor 'd' is said to lie in '{TWO}', which")


def test_an_index_that_lacks_a_tensor(tmp_path: Path) -> None:
    path = unnumbered(tmp_path, {"a": TWO, "b": ONE})
    refusal(path, "tensor 'c' lies in 'x.safetensors', but the index does not name it")


STALE = {
    "a missing tensor": {"a": TWO, "b": ONE, "c": ONE, "d": TWO},
    "a missing file": {"a": "model-00003-of-00003.safetensors", "b": ONE, "c": ONE},
    "without a tensor": {"a": TWO, "b": ONE},
    "without a file": {"b": ONE, "c": ONE},
    "the wrong file": {"a": TWO, "b": ONE, "c": TWO},
    "no index": None,
}


@pytest.mark.parametrize("case", STALE)
def test_numbered_files_that_are_all_there_need_no_index(tmp_path: Path, case: str) -> None:
    """Their numbers are complete, and no tensor is there twice; whether the model is complete, its rules say."""
    path, right = sharded(tmp_path), {"a": TWO, "b": ONE, "c": ONE}
    (path / SAFE_INDEX).unlink()
    if STALE[case] is not None:
        write_index(path, STALE[case])
    found = open_checkpoint(path)
    same_bytes(found, {"a": A, "b": B, "c": C})
    assert len(found.records) == 2 and found.index_name == SAFE_INDEX and SAFE_INDEX in str(found.note)
    assert isinstance(found.index, bytes) and json.loads(found.index) == {
        "metadata": {"total_size": 332},
        "weight_map": right,
    }


def test_numbered_pickles_need_no_index(tmp_path: Path) -> None:
    for number, state in enumerate(({"a": A, "tied": A}, {"b": B}), 1):
        torch.save(state, folder_of(tmp_path) / f"pytorch_model-0000{number}-of-00002.bin")
    same_bytes(open_checkpoint(tmp_path), {"a": A, "tied": A, "b": B})


def test_an_index_with_all_names_in_other_places_is_no_loss(tmp_path: Path) -> None:
    same_bytes(open_checkpoint(unnumbered(tmp_path, {"a": ONE, "b": TWO, "c": ONE})), {"a": A, "b": B, "c": C})


@pytest.mark.parametrize("stale", [ONE, TWO])
def test_of_a_tensor_in_two_files_the_index_chooses(tmp_path: Path, stale: str) -> None:
    """Neither the first nor the last file is right by its place, and what the index does not name is said."""
    folder_of(tmp_path)
    save_file({"b": B, "a": tensor(900, 40), "junk": C}, tmp_path / stale)
    other = TWO if stale == ONE else ONE
    save_file({"a": A, "c": C}, tmp_path / other)
    write_index(tmp_path, {"a": other, "b": stale, "c": other})
    found = open_checkpoint(tmp_path)
    same_bytes(found, {"a": A, "b": B, "c": C})
    assert found.tensors.keys() == {"a", "b", "c"} == {name for record in found.records for name in record.tensors}
    assert f"a in {stale}" in str(found.note) and f"junk in {stale}" in str(found.note)


def test_a_tensor_in_two_files_that_no_index_chooses(tmp_path: Path) -> None:
    save_file({"a": A, "c": C}, sharded(tmp_path) / TWO)
    write_index(tmp_path, {"a": ONE, "b": ONE, "c": ONE})  # which lacks a
    refusal(tmp_path, f"tensor 'a' is said to lie in '{ONE}' and lies in '{TWO}'")
    (tmp_path / SAFE_INDEX).unlink()
    refusal(tmp_path, f"{TWO}: tensor 'c' is also in '{ONE}'")


def test_a_tied_tensor_in_two_files(tmp_path: Path) -> None:
    torch.save({"a": A, "t": A}, folder_of(tmp_path) / "1.bin")
    torch.save({"t": tensor(900, 40)}, tmp_path / "2.bin")
    write_index(tmp_path, {"a": "1.bin", "t": "2.bin"}, BIN_INDEX)
    same_bytes(open_checkpoint(tmp_path), {"a": A, "t": tensor(900, 40)})
    torch.save({"a": tensor(900, 40)}, tmp_path / "2.bin")
    write_index(tmp_path, {"t": "1.bin", "a": "2.bin"}, BIN_INDEX)
    same_bytes(open_checkpoint(tmp_path), {"t": A, "a": tensor(900, 40)})


def test_several_files_without_an_index(tmp_path: Path) -> None:
    (unnumbered(tmp_path, {"a": TWO}) / SAFE_INDEX).unlink()
    (tmp_path / TWO).rename(tmp_path / "y.safetensors")
    refusal(tmp_path, "2 safetensors files", "x.safetensors", f"no {SAFE_INDEX}")


def test_one_file_of_several_without_an_index(tmp_path: Path) -> None:
    (sharded(tmp_path) / SAFE_INDEX).unlink()
    (tmp_path / TWO).unlink()
    refusal(tmp_path, "1 of 2 files", ONE)


def test_a_truncated_file_names_itself(tmp_path: Path) -> None:
    with (sharded(tmp_path) / TWO).open("r+b") as file:
        file.truncate(100)
    refusal(tmp_path, TWO, "bytes are missing")


def test_a_weight_file_that_is_a_folder(tmp_path: Path) -> None:
    (folder_of(tmp_path) / "model.safetensors").mkdir()
    refusal(tmp_path, "model.safetensors", "cannot be read")


# -- side files -------------------------------------------------------------------------------------------------------


SIDE_FILES = {
    "config.json", "generation_config.json", "hf_quant_config.json", "preprocessor_config.json", "config.yaml",
    "tokenizer.json", "tokenizer.model", "tokenizer.model.v3", "spiece.model", "sp.model", "source.spm",
    "qwen.tiktoken", "vocab.json", "merges.txt", "bpe.codes", "special_tokens_map.json", "added_tokens.json",
    "tekken.json", "params.json", "normalizer.json", "modules.json", "chat_template.jinja", "chat_template.json",
    "LICENSE", "LICENCE.txt", "USE_POLICY.md", "Notice", "README.md", "notes.txt", "figure.PNG", "modeling_x.py",
    "k.cu",
    "additional_chat_templates/tools.jinja", "qformer_tokenizer/tokenizer.json", "1_Pooling/config.json",
    "code/modeling_y.py", "code/helper.py", "ngrams.dat",
}  # fmt: skip
STRAYS = {
    "presharded/tp2/model-00000-rank-000.safetensor", "presharded/checksum.json", "READY",
    "checksum.json", "SHA256SUMS",
    "model.tensors", "model.nemo", "x.pt", "x.npz", "x.ckpt", "model.gguf", "x.weights", "tokenizer.bin", "old.model",
    "model.safetensors.1", "training_args.bin", "trainer_state.json", "optimizer.pt", ".gitattributes", ".cache/x.json",
    "original/params.json", "onnx/config.json", "1_Pooling/model.safetensors", "code/.hidden.py", "a/b/c.txt",
    "old.json", "model.fp16.safetensors.index.json", "latest_checkpointed_iteration.txt", "zero_to_fp32.py",
}  # fmt: skip


def with_beside(path: Path, names: Iterable[str]) -> Path:
    """A checkpoint with these files beside the weights, and documents that name some of them."""
    for name in names:
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_text("x")
    (path / "modules.json").write_text('[{"path": ""}, {"path": "1_Pooling"}, {"path": "../up"}, 1]')
    (path / "tokenizer_config.json").write_text('{"ngram_file": "ngrams.dat", "other_file": 1}')
    config = {
        "model_type": "llama",
        "auto_map": {"AutoModel": ["code/modeling_y.Y", None]},
        "weights_file": "model.nemo",
    }
    (path / "config.json").write_text(json.dumps(config))
    return path


def test_side_files_are_those_of_a_list(tmp_path: Path) -> None:
    """All that is not on it may be the weights before a change, under whatever name."""
    with_beside(sharded(tmp_path), SIDE_FILES | STRAYS)
    (tmp_path / "broken.txt").symlink_to(tmp_path / "absent")
    (tmp_path / "huge.txt").touch()
    os.truncate(tmp_path / "huge.txt", LARGEST + 1)
    found = {file.relative_to(tmp_path).as_posix() for file in find_side_files(tmp_path)}
    assert found == SIDE_FILES | {"tokenizer_config.json"}


# -- fingerprint ------------------------------------------------------------------------------------------------------


def test_a_fingerprint_does_not_depend_on_the_files(tmp_path: Path) -> None:
    state = {"a": A, "b": B, "c": C}
    one = fingerprint(open_checkpoint(single(tmp_path / "one", **state)))
    assert re.fullmatch("[0-9a-f]{64}", one)
    assert one == fingerprint(open_checkpoint(sharded(tmp_path / "many")))
    torch.save(dict(reversed(state.items())), folder_of(tmp_path / "bin") / "pytorch_model.bin")
    assert one == fingerprint(open_checkpoint(tmp_path / "bin"))


def test_a_fingerprint_depends_on_the_weights(tmp_path: Path) -> None:
    middle = B.clone()
    middle[2, 0] += 1
    variants = [
        {"a": A, "b": B}, {"a": A, "b": middle}, {"a": A, "b": B.reshape(10, 4)}, {"a": A, "c": B}, {"a": A},
        {"a": A, "b": B.view(torch.int32)}, {"a": A, "b": B, "e": torch.empty(0)},
        {"a": B.view(-1), "b": A.view(4, 10)},
    ]  # fmt: skip
    ids = [fingerprint(open_checkpoint(single(tmp_path / str(i), **state))) for i, state in enumerate(variants)]
    assert len(set(ids)) == len(ids)


def test_a_fingerprint_samples_the_middle_of_each_tensor(tmp_path: Path) -> None:
    """The 64 bytes from 468 on, of 1000; a golden id, since shards that exist are told by it."""

    def found(at: int) -> str:
        data = torch.arange(1000).to(torch.uint8)
        data[at] += 1
        return fingerprint(open_checkpoint(single(tmp_path / str(at), a=data)))

    elsewhere = {found(at) for at in (0, 467, 532, 999)}
    assert elsewhere == {"63cbdececd3f793ca13f9442ac256a389681cc7049e571fac191af0728184825"}
    assert len({found(468), found(531), *elsewhere}) == 3


def test_the_fingerprint_of_sparse_files(tmp_path: Path) -> None:
    header = build_header([("w", "BF16", (1 << 20, 1 << 14))], {})
    path = folder_of(tmp_path) / "model.safetensors"
    path.write_bytes(header)
    os.truncate(path, len(header) + (1 << 35))
    assert len(fingerprint(open_checkpoint(tmp_path))) == 64


def test_a_file_that_becomes_shorter_or_goes_away(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(single(tmp_path, w=A))
    path = tmp_path / "model.safetensors"
    os.truncate(path, path.stat().st_size - 100)
    with pytest.raises(CheckpointError, match="the file became shorter"):
        fingerprint(checkpoint)
    path.unlink()
    with pytest.raises(CheckpointError, match=r"model\.safetensors: cannot be read"):
        fingerprint(checkpoint)
