"""Meta's ``consolidated.NN.pth`` and Mistral's ``consolidated.safetensors``: written, read, and refused."""

from __future__ import annotations

import itertools
import json
import shutil
import zipfile
from pathlib import Path
from typing import Any

import pytest

from reshard.api import merge, plan, split
from reshard.formats.errors import CheckpointError, MismatchError, PlanError
from reshard.formats.files.safetensors import read_header
from reshard.formats.files.torch_archive import build_archive, read_bin
from reshard.formats.notation.format_file import HUGGING_FACE
from reshard.source.opening import open_source
from reshard.store.hub import weight_files
from tests.programs.oracles import ORACLES, checkpoint, module, problem
from tests.support import LLAMA, change_json, contents, write_checkpoint

OWN_HEADS = {**LLAMA, "hidden_size": 64, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 8}
"""The sizes of a small Llama whose heads fill the width, as Meta's do."""
CASES = sorted(path.stem for path in (ORACLES / "meta").glob("*.npz"))


def _form(model: str) -> str:
    return "meta" if model.startswith("llama") else "mistral"


def _weights(folder: Path) -> dict[str, bytes]:
    headers = [read_header(file) for file in folder.glob("*.safetensors")]
    infos = [info for header in headers for info in header.tensors.values()]
    return {info.name: info.file.read_bytes()[info.offset : info.offset + info.nbytes] for info in infos}


def _params(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "params.json").read_text())
    return found


def _changed(model: str, path: Path, **settings: object) -> Path:
    """A copy of a fixture's checkpoint with other settings."""
    shutil.copytree(checkpoint("meta", model), path)
    change_json(path / "config.json", **settings)
    return path


def _golden(case: str, path: Path) -> Path:
    """What the oracle's own writer writes for a case, without a manifest and without config.json."""
    from unittest import mock

    with mock.patch("sys.argv", ["check.py", case, str(path), "--write"]):
        module("meta", "check").main()
    return path


# -------------------------------------------------------------------------------------------------- element for element


@pytest.mark.parametrize("case", CASES)
def test_what_is_written_is_the_golden_layout_and_comes_back(case: str, tmp_path: Path) -> None:
    model, _, ranks = case.rpartition("-mp")
    original = checkpoint("meta", model)
    split(original, tmp_path / "out", tp=int(ranks), format=_form(model))
    assert problem("meta", case, tmp_path / "out") is None
    merge(tmp_path / "out", tmp_path / "merged")
    assert contents(tmp_path / "merged") == contents(original)


@pytest.mark.parametrize("case", CASES)
def test_what_another_wrote_is_read(case: str, tmp_path: Path) -> None:
    """Without manifest and config.json: the config is made from params.json, but for the names of a tokenizer."""
    model, _, _ranks = case.rpartition("-mp")
    merge(_golden(case, tmp_path / "golden"), tmp_path / "merged")
    original = checkpoint("meta", model)
    assert _weights(tmp_path / "merged") == _weights(original)
    made, config = (json.loads((folder / "config.json").read_text()) for folder in (tmp_path / "merged", original))
    said = made.keys() & config.keys() - {"max_position_embeddings"}
    assert {key: made[key] for key in said} == {key: config[key] for key in said}
    assert {"intermediate_size", "vocab_size", "num_key_value_heads", "rope_theta", "torch_dtype"} <= said
    assert "sliding_window" in said or _form(model) == "meta"  # transformers' default for Mistral is not null


def test_from_one_mesh_and_form_to_another(tmp_path: Path) -> None:
    original = checkpoint("meta", "llama2")
    split(_golden("llama2-mp8", tmp_path / "golden"), tmp_path / "two", tp=2, format="meta")
    assert problem("meta", "llama2-mp2", tmp_path / "two") is None
    split(tmp_path / "two", tmp_path / "vllm", tp=4, format="vllm")
    split(tmp_path / "vllm", tmp_path / "four", tp=4, format="meta")
    assert problem("meta", "llama2-mp4", tmp_path / "four") is None
    merge(tmp_path / "four", tmp_path / "merged")
    assert _weights(tmp_path / "merged") == _weights(original)


def test_the_folder_of_a_config_is_used(tmp_path: Path) -> None:
    original = checkpoint("meta", "llama3")
    split(original, tmp_path / "out", tp=2, format="meta")
    for name in ("reshard.json", "config.json", "params.json"):
        (tmp_path / "out" / name).unlink()
    with pytest.raises(CheckpointError) as error:
        merge(tmp_path / "out", tmp_path / "merged")
    assert "config.json" in error.value.message and "config=DIR" in str(error.value.hint)
    merge(tmp_path / "out", tmp_path / "merged", config=original)
    assert _weights(tmp_path / "merged") == _weights(original)
    assert (tmp_path / "merged" / "config.json").read_bytes() == (original / "config.json").read_bytes()
    assert plan(tmp_path / "out", tp=4, config=original).mesh.size == 4


def test_a_file_larger_than_the_limit_is_divided(tmp_path: Path) -> None:
    original = checkpoint("meta", "mixtral")
    split(original, tmp_path / "out", tp=1, format="mistral", max_shard_size=100_000)
    files = sorted(file.name for file in (tmp_path / "out").glob("*.safetensors"))
    assert files[0] == f"consolidated-00001-of-{len(files):05d}.safetensors" and len(files) > 2
    index = json.loads((tmp_path / "out" / "consolidated.safetensors.index.json").read_text())["weight_map"]
    assert set(index.values()) == set(files) and "layers.1.feed_forward.experts.3.w2.weight" in index
    (tmp_path / "out" / "reshard.json").unlink()
    merge(tmp_path / "out", tmp_path / "merged")
    assert _weights(tmp_path / "merged") == _weights(original)


# -------------------------------------------------------------------------------------------------------- the container


@pytest.mark.parametrize("workers", [1, 3])
def test_torch_and_unzip_read_the_file(workers: int, tmp_path: Path) -> None:
    import torch

    split(checkpoint("meta", "llama2"), tmp_path / "out", tp=2, format="meta", workers=workers)
    for file in sorted((tmp_path / "out").glob("*.pth")):
        with zipfile.ZipFile(file) as archive:
            assert archive.testzip() is None
        expected = module("meta", "check").torchfile.load_pt(file.read_bytes())
        for mapped in (False, True):
            found = torch.load(file, weights_only=True, mmap=mapped)
            assert type(found) is dict and found.keys() == expected.keys()
            assert all(torch.equal(found[name], torch.from_numpy(array.copy())) for name, array in expected.items())
        assert all(info.offset % 64 == 0 for info in read_bin(file)[0].values())


def test_the_layout_of_torch_s_own_writer_is_read_the_same(tmp_path: Path) -> None:
    import torch

    tensors = {"a": torch.arange(6, dtype=torch.bfloat16).reshape(2, 3), "b": torch.tensor(7), "c": torch.empty(0, 4)}
    torch.save(tensors, tmp_path / "theirs.pth")
    theirs = {name: (t.dtype, t.shape) for name, t in read_bin(tmp_path / "theirs.pth")[0].items()}
    kinds = [(name, *theirs[name]) for name in tensors]
    path = tmp_path / "ours.pth"
    data = {name: tensor.view(torch.uint8).numpy().tobytes() if tensor.numel() else b"" for name, tensor in [
        ("a", tensors["a"]), ("b", tensors["b"].reshape(1)), ("c", tensors["c"])
    ]}  # fmt: skip
    archive = build_archive([(name, dtype, shape, len(data[name])) for name, dtype, shape in kinds])
    _write(path, archive, data)
    found = torch.load(path, weights_only=True)
    assert all(torch.equal(found[name], tensors[name]) for name in tensors)
    assert all(
        found[name].dtype == tensors[name].dtype and found[name].shape == tensors[name].shape for name in tensors
    )


def _write(path: Path, archive: Any, data: dict[str, bytes]) -> None:
    import zlib

    with path.open("wb") as file:
        file.truncate(archive.size)
        for offset, content in (*archive.fixed, *((offset, data[name]) for name, offset in archive.places)):
            file.seek(offset)
            file.write(content)
        for crc, (name, _) in zip(archive.crcs, archive.places, strict=True):
            for offset in crc.places:
                file.seek(offset)
                file.write(zlib.crc32(data[name]).to_bytes(4, "little"))


def test_every_byte_of_an_archive_is_said_once() -> None:
    archive = build_archive([("a", "F32", (3, 5), 60), ("b.c", "BF16", (), 2), ("d", "I64", (0,), 0)])
    sizes = {"a": 60, "b.c": 2, "d": 0}
    covered = [(offset, offset + len(content)) for offset, content in archive.fixed]
    covered += [(offset, offset + sizes[name]) for name, offset in archive.places]
    covered = sorted(part for part in covered if part[0] < part[1])
    assert covered[0][0] == 0 and covered[-1][1] == archive.size
    assert all(one[1] == other[0] for one, other in itertools.pairwise(covered))
    zeros = [part[place - at :][:4] for crc in archive.crcs for place in crc.places for at, part in archive.fixed
             if at <= place < at + len(part)]  # fmt: skip
    assert zeros == [bytes(4)] * 6


def test_more_than_four_gigabytes(tmp_path: Path) -> None:
    """Sizes and offsets take 64 bits where 32 do not hold them; the file is sparse."""
    import torch

    rows = (5 << 30) // 2048
    archive = build_archive([("large", "BF16", (rows, 1024), 5 << 30), ("behind", "F32", (2,), 8)])
    path = tmp_path / "large.pth"
    with path.open("wb") as file:
        file.truncate(archive.size)
        for offset, content in (*archive.fixed, (dict(archive.places)["behind"], b"\0\0\x80?\0\0\0@")):
            file.seek(offset)
            file.write(content)
    with zipfile.ZipFile(path) as opened:
        assert [info.file_size for info in opened.infolist()] == [
            len(opened.read("archive/data.pkl")),
            6,
            5 << 30,
            8,
            2,
        ]
    assert {name: info.offset for name, info in read_bin(path)[0].items()} == dict(archive.places)
    assert all(offset % 64 == 0 for _, offset in archive.places)
    found = torch.load(path, weights_only=True, mmap=True)
    assert found["large"].shape == (rows, 1024) and found["behind"].tolist() == [1, 2]


def test_a_dtype_without_a_storage_is_refused() -> None:
    with pytest.raises(PlanError, match=r"'x' is F4, which torch\.save does not write"):
        build_archive([("x", "F4", (2,), 1)])


def test_rope_freqs_are_ignored(tmp_path: Path) -> None:
    import torch

    folder = _golden("llama2-mp2", tmp_path / "golden")
    for file in folder.glob("*.pth"):
        torch.save(torch.load(file, weights_only=True) | {"rope.freqs": torch.ones(2)}, file)
    merge(folder, tmp_path / "merged")
    assert _weights(tmp_path / "merged") == _weights(checkpoint("meta", "llama2"))


def test_a_merge_reads_each_byte_once(tmp_path: Path) -> None:
    """What is in a file beside its tensors was read when it was opened, so its checksum needs no second pass."""
    split(checkpoint("meta", "llama2"), tmp_path / "out", tp=2, format="meta")
    source = open_source(tmp_path / "out")
    for path, file in source.files.items():
        tensors = sum(info.nbytes for info in read_bin(path)[0].values())
        assert tensors + sum(len(content) for _, content in file.rest) == file.size
        whole = path.read_bytes()
        assert all(whole[offset : offset + len(content)] == content for offset, content in file.rest)


def test_a_damaged_byte_is_seen(tmp_path: Path) -> None:
    split(checkpoint("meta", "llama2"), tmp_path / "out", tp=2, format="meta")
    path = tmp_path / "out" / "consolidated.01.pth"
    whole = path.read_bytes()
    tensors = read_bin(path)[0]
    for place in (tensors["norm.weight"].offset - 70, tensors["norm.weight"].offset, len(whole) - 30):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        with pytest.raises((CheckpointError, MismatchError)):
            merge(tmp_path / "out", tmp_path / "merged")
        assert not (tmp_path / "merged").exists()


# ------------------------------------------------------------------------------------------------------ what is refused


@pytest.mark.parametrize(
    ("model", "form", "tp", "settings", "why"),
    [
        ("mistral", "mistral", 2, {}, "one checkpoint for all ranks"),
        ("llama2", "mistral", 1, {}, "the model type 'llama' cannot be written as 'mistral'"),
        ("mistral", "meta", 1, {}, "the model type 'mistral' cannot be written as 'meta'"),
        ("llama2", "meta", 16, {}, "must divide the number of KV heads"),
        ("llama2", "meta", 1, {"tie_word_embeddings": True}, "two tensors"),
        ("llama3", "meta", 1, {"rope_scaling": {"rope_type": "linear", "factor": 8.0}}, "scaled in another way"),
        ("mistral", "mistral", 1, {"rope_parameters": {"rope_type": "yarn", "factor": 4.0}}, "positions of this model"),
    ],
)
def test_it_is_refused(model: str, form: str, tp: int, settings: dict[str, Any], why: str, tmp_path: Path) -> None:
    with pytest.raises(PlanError) as error:
        split(_changed(model, tmp_path / "model", **settings), tmp_path / "out", tp=tp, format=form)
    assert why in error.value.message and f"'{form}'" in error.value.message and error.value.hint
    assert not (tmp_path / "out").exists()


def test_a_vocabulary_that_does_not_divide_is_not_padded(tmp_path: Path) -> None:
    """Neither of the readers would strip what is padded."""
    path = write_checkpoint(tmp_path / "model", config={**OWN_HEADS, "vocab_size": 137})
    with pytest.raises(PlanError, match="137"):
        split(path, tmp_path / "out", tp=2, format="meta")


def test_what_is_refused_is_said_beforehand(capsys: pytest.CaptureFixture[str]) -> None:
    from reshard.cli.commands import main

    with pytest.raises(SystemExit, match="0"):
        main(["formats", str(checkpoint("meta", "mixtral")), "--json"])
    found = json.loads(capsys.readouterr().out)["formats"]
    assert found["mistral"]["possible"] and not found["meta"]["possible"]
    assert "cannot be written as 'meta'" in found["meta"]["reason"]
    with pytest.raises(SystemExit, match="2"):
        main(["plan", str(checkpoint("meta", "llama2")), "--tp", "16", "--as", "meta"])
    assert "number of KV heads" in capsys.readouterr().err


def test_the_files_of_a_repository(tmp_path: Path) -> None:
    files = ["consolidated.00.pth", "consolidated.01.pth", "params.json", "tokenizer.model"]
    assert weight_files(files, tmp_path) == files[:2]
    assert weight_files([*files, "model.safetensors"], tmp_path) == ["model.safetensors"]


@pytest.mark.parametrize(
    ("vocab", "theta", "shape"),
    [
        (128_256, 8e6, (64_128, 64)),
        (400, 500_000.0, (200, 64)),
        (32_016, 1e6, (32_016, 32)),
        (32_000, None, (32_000, 32)),
    ],
)
def test_which_dimension_of_the_embedding_is_divided(
    vocab: int, theta: float | None, shape: tuple[int, int], tmp_path: Path
) -> None:
    """Of Llama 3 and its descendants the vocabulary, of Llama 1 and 2 and CodeLlama the width."""
    config = {**OWN_HEADS, "vocab_size": vocab, "rope_theta": theta, "num_hidden_layers": 1}
    split(write_checkpoint(tmp_path / "model", config=config), tmp_path / "out", tp=2, format="meta")
    for file in sorted((tmp_path / "out").glob("*.pth")):
        assert read_bin(file)[0]["tok_embeddings.weight"].shape == shape


def test_the_sizes_of_heads_that_are_not_of_the_width_are_refused(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path / "model", config={**LLAMA, "head_dim": 32})
    with pytest.raises(PlanError, match="from dim / n_heads"):
        split(path, tmp_path / "out", tp=1, format="meta")


def test_scaled_positions_come_back(tmp_path: Path) -> None:
    scaling = {"rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    scaling |= {"original_max_position_embeddings": 8192}
    model = _changed("llama3", tmp_path / "model", rope_theta=None, rope_parameters=scaling | {"rope_theta": 500000.0})
    split(model, tmp_path / "out", tp=2, format="meta")
    assert problem("meta", "llama3-mp2", tmp_path / "out") is None
    assert _params(tmp_path / "out")["use_scaled_rope"] is True
    for name in ("reshard.json", "config.json"):
        (tmp_path / "out" / name).unlink()
    config = open_source(tmp_path / "out").model.config
    assert config["rope_scaling"] == scaling


@pytest.mark.parametrize("form", ["meta", "mistral"])
@pytest.mark.parametrize(
    "settings",
    [
        {"rope_theta": 10000.0, "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0}},
        {"rope_theta": 500000.0, "rope_parameters": {"rope_type": "default"}},
        {"rope_scaling": {"rope_type": "default", "rope_theta": 500000.0}, "rope_parameters": {"rope_theta": 10000.0}},
    ],
)
def test_of_two_spellings_of_a_setting_that_of_transformers_counts(settings: dict[str, Any], form: str) -> None:
    from transformers import LlamaConfig

    from reshard.formats.notation.format_file import format_of

    rules = format_of(form).settings
    assert rules is not None

    def look_up(name: str) -> Any:
        first, *inner = name.split(".")
        value = settings.get(first)
        return value if not inner or value is None else value.get(inner[0])

    written = rules.write["rope_theta"].evaluate(look_up)
    assert written == LlamaConfig.from_dict(dict(settings)).rope_parameters["rope_theta"] == 500000.0


@pytest.mark.parametrize(
    ("hidden", "ff"), [(4096, 11008), (5120, 13824), (4096, 14336), (8192, 28672), (64, 80), (96, 31)]
)
def test_readers_compute_the_width_of_the_mlp(hidden: int, ff: int) -> None:
    from reshard.formats.notation.format_file import format_of

    settings = format_of("meta").settings
    assert settings is not None
    names = {"hidden": hidden, "ff": ff}
    said = {key: settings.write[key].evaluate(names.get) for key in ("multiple_of", "ffn_dim_multiplier")}
    width = int(8 * hidden / 3)
    if said["ffn_dim_multiplier"] is not None:
        width = int(said["ffn_dim_multiplier"] * width)
    assert said["multiple_of"] * ((width + said["multiple_of"] - 1) // said["multiple_of"]) == ff


# ----------------------------------------------------------------------------------------------- a program's own config


def test_params_of_the_source_are_kept_and_must_be_the_model_s(tmp_path: Path) -> None:
    merge(_golden("llama2-mp2", tmp_path / "golden"), tmp_path / "model")
    own = (tmp_path / "golden" / "params.json").read_bytes()
    assert (tmp_path / "model" / "params.json").read_bytes() == own
    split(tmp_path / "model", tmp_path / "out", tp=4, format="meta")
    assert (tmp_path / "out" / "params.json").read_bytes() == own
    (tmp_path / "model" / "params.json").write_text(json.dumps(json.loads(own) | {"n_kv_heads": 4}))
    with pytest.raises(PlanError, match=r"params.json of the source makes 'num_key_value_heads' 4, config.json 8"):
        split(tmp_path / "model", tmp_path / "other", tp=4, format="meta")


def test_a_checkpoint_with_both_forms_is_hugging_face_s(tmp_path: Path) -> None:
    """As many of Mistral's repositories are."""
    model = _changed("mistral", tmp_path / "model")
    split(model, tmp_path / "out", tp=1, format="mistral")
    shutil.copy(tmp_path / "out" / "consolidated.safetensors", model)
    shutil.copy(tmp_path / "out" / "params.json", model)
    assert open_source(model).format is HUGGING_FACE
    (model / "model.safetensors").unlink()
    assert open_source(model).format.name == "mistral"
