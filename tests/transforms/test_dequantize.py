"""``--dequantize``: weights of 8-bit floats, taken as if the checkpoint were in bfloat16."""

from __future__ import annotations

import json
import math
import os
import shutil
import warnings
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from reshard.api import load, merge, split
from reshard.formats import store as storage_files
from reshard.formats.documents import document_of, json_bytes, reader_of
from reshard.formats.errors import MismatchError, ReshardError
from reshard.formats.files.checksum import Stamp
from reshard.formats.files.safetensors import build_header, read_header
from reshard.formats.notation.architecture_files import find_architecture
from reshard.formats.quantization.fp8 import Grid, dequantize, scaled_weights, scales_from
from reshard.formats.quantization.fp8 import Stored as Weight
from reshard.model import scaled
from reshard.model.model import AxisSizes
from reshard.source import opening
from reshard.source.access import Access
from reshard.source.source import Source
from reshard.transforms import dequantize as storage
from reshard.transforms.opening import open_any
from reshard.transforms.tensors import ComputedFile
from reshard.verify.bytes import reading as proof
from tests import store
from tests.dequantize import METHODS, Stored
from tests.marks import one_of_each, thorough
from tests.source.test_quantized import PACKINGS, checkpoint, read, write
from tests.source.test_quantized import dequantize as by_definition
from tests.stores.store_server import StoreServer
from tests.support import change_json, changed_json, changed_tensors, command, contents, weights_of

ONE = {"workers": 1}
BLOCK = 16, 32
PLAIN = ("embed_tokens.weight", "norm.weight", "lm_head.weight", "mlp.gate.weight", "eh_proj.weight")


def quantized(original: Path, folder: Path, files: int = 2) -> Path:
    """The same model with weights of 8-bit floats in blocks, in several files, the scales not beside their weights."""
    tensors, found = load_file(original / "model.safetensors"), {}
    rng = np.random.default_rng(1)
    for name, tensor in tensors.items():
        if tensor.dim() != 2 or name.endswith(PLAIN):
            found[name] = tensor
            continue
        grid = tuple(-(-size // block) for size, block in zip(tensor.shape, BLOCK, strict=True))
        scale = torch.from_numpy(rng.uniform(0.001, 0.01, grid).astype(np.float32))
        wide = scale.repeat_interleave(BLOCK[0], 0).repeat_interleave(BLOCK[1], 1)[: len(tensor), : tensor.shape[1]]
        found[name] = (tensor.float() / wide).clamp(-448, 448).to(torch.float8_e4m3fn)
        found[f"{name}_scale_inv"] = scale
    folder.mkdir()
    names = sorted(found, key=lambda name: (name.endswith("_scale_inv"), name))
    weight_map = {}
    for i in range(files):
        part = names[len(names) * i // files : len(names) * (i + 1) // files]
        file = f"model-{i + 1:05d}-of-{files:05d}.safetensors"
        save_file({name: found[name].contiguous() for name in part}, folder / file, {"format": "pt"})
        weight_map |= dict.fromkeys(part, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    config = json.loads((original / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [*BLOCK]}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text("{}")
    return folder


def by_torch(folder: Path) -> dict[str, torch.Tensor]:
    """What DeepSeek's script makes of a checkpoint: number times scale in float32, stored as bfloat16."""
    tensors = weights_of(folder)
    found = {}
    for name, tensor in tensors.items():
        if name.endswith("_scale_inv"):
            continue
        scale = tensors.get(f"{name}_scale_inv")
        if scale is not None:
            wide = scale.repeat_interleave(BLOCK[0], 0).repeat_interleave(BLOCK[1], 1)
            tensor = (tensor.float() * wide[: len(tensor), : tensor.shape[1]]).to(torch.bfloat16)
        found[name] = tensor
    return found


@pytest.fixture(scope="module")
def source() -> Path:
    return store.made("deepseek_v3-fp8", lambda at: quantized(store.checkpoint("deepseek_v3", "bfloat16"), at))


@pytest.fixture(scope="module")
def plain(source: Path) -> Path:
    """The same, dequantized by torch, in the same files."""

    def make(folder: Path) -> None:
        folder.mkdir()
        found, weight_map = by_torch(source), {}
        for file in sorted(source.glob("*.safetensors")):
            part = {name: found[name] for name in read_header(file).tensors if name in found}
            kinds = [(name, {2: "BF16", 4: "F32"}[of.element_size()], tuple(of.shape)) for name, of in part.items()]
            kinds.sort(key=lambda kind: kind[1] != "F32")
            data = b"".join(part[name].view(torch.uint8).numpy().tobytes() for name, *_ in kinds)
            (folder / file.name).write_bytes(build_header(kinds, {"format": "pt"}) + data)
            weight_map |= dict.fromkeys(part, file.name)
        (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
        config = json.loads((source / "config.json").read_text())
        del config["quantization_config"]
        (folder / "config.json").write_bytes(json_bytes(config) + b"\n")
        (folder / "tokenizer.json").write_text("{}")

    return store.made("deepseek_v3-dequantized", make)


def access(folder: Path) -> dict[str, Any]:
    return {"cache_dir": folder / "cache", "dequantize": True}


def dequantized(source: Path, folder: Path) -> Source:
    return open_any(source, Access(**access(folder)))


# ------------------------------------------------------------------------------------------------------- arithmetic


@pytest.mark.parametrize("begin", [0, 1, 69, 70, 1399])
def test_each_element_is_that_of_torch(begin: int) -> None:
    """All 256 numbers, scales of all sizes and ties, from any element on."""
    rows, columns = 40, 70
    rng = np.random.default_rng(begin)
    codes = rng.integers(0, 256, (rows, columns), np.uint8)
    scale = (2.0 ** rng.uniform(-140, 128, (3, 3))).astype(np.float32)
    scale[0] = np.float32(1) + np.float32(2.0**-8) * np.array([1, 3, 5])  # products halfway between two bfloat16s
    wide = torch.from_numpy(scale).repeat_interleave(16, 0).repeat_interleave(32, 1)[:rows, :columns]
    should = (torch.from_numpy(codes).view(torch.float8_e4m3fn).float() * wide).to(torch.bfloat16)
    grid = Grid(rows, columns, 16, 32)
    found = dequantize(
        codes.reshape(-1)[begin:1400], begin, grid, scales_from(memoryview(scale.tobytes()), "F32", grid)
    )
    words, nan = should.view(torch.int16).numpy().view(np.uint16).reshape(-1)[begin:1400], found & 0x7FFF > 0x7F80
    assert np.array_equal(nan, should.isnan().numpy().reshape(-1)[begin:1400])
    assert np.array_equal(found[~nan], words[~nan])


# -------------------------------------------------------------------------------------------------------- checkpoints


def test_one_full_checkpoint_is_what_torch_makes(source: Path, plain: Path, tmp_path: Path) -> None:
    split(source, tmp_path / "out", format="huggingface", **access(tmp_path), **ONE)
    found, should = contents(tmp_path / "out"), contents(plain)
    mine, theirs = (json.loads(of.pop("model.safetensors.index.json")) for of in (found, should))
    assert found == should
    assert mine["weight_map"] == theirs["weight_map"]


def test_what_was_no_split_one_is_not_merged(source: Path, tmp_path: Path) -> None:
    given = ("--as", "huggingface", "--dequantize", "--cache-dir", tmp_path, "--dry-run")
    done = command("split", source, tmp_path / "out", *given)
    assert done.stdout.startswith(f"Would write one checkpoint from {source}: "), done.stderr
    assert json.loads(command("split", source, tmp_path / "out", *given, "--json").stdout)["command"] == "write"


@pytest.mark.parametrize(
    "how",
    one_of_each([
        {"tp": 2},
        {"format": "megatron"},
        {"tp": 2, "format": "megatron-legacy"},
        {"tp": 2, "ep": 2, "format": "vllm", "same_ranks": True},
    ], lambda how: "format" in how),
)  # fmt: skip
def test_shards_are_those_of_the_dequantized_checkpoint(how: dict, source: Path, plain: Path, tmp_path: Path) -> None:
    split(source, tmp_path / "out", **how, **access(tmp_path), workers=2)
    split(plain, tmp_path / "should", **how, **ONE)
    found, should = contents(tmp_path / "out"), contents(tmp_path / "should")
    mine, theirs = (json.loads(of.pop("reshard.json")) for of in (found, should))
    assert found == should
    assert (mine["ranks"], mine["source"]["id"]) == (theirs["ranks"], theirs["source"]["id"])
    merge(tmp_path / "out", tmp_path / "merged", **ONE)
    for name in ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"):
        assert (tmp_path / "merged" / name).read_bytes() == (plain / name).read_bytes()


def test_a_rank_without_files(source: Path, plain: Path, tmp_path: Path) -> None:
    found, should = load(source, tp=2, rank=1, **access(tmp_path)), load(plain, tp=2, rank=1)
    assert found.keys() == should.keys()
    assert all(torch.equal(found[name], should[name]) for name in should)


def test_verify_computes_the_original_anew(source: Path, tmp_path: Path) -> None:
    given = "--cache-dir", tmp_path / "cache", "--dequantize"
    for form in ([], ["--as", "megatron-legacy"]):
        out = tmp_path / f"out{len(form)}"
        done = command("split", source, out, "--tp", "2", *form, *given)
        assert "Weights in fp8 were dequantized to BF16" in done.stdout
        assert command("verify", source, out, "--exact-only", "-q", *given).stdout == "same\n"
        file = next(iter(sorted(out.rglob("*.safetensors" if not form else "*.pt"))))
        data = bytearray(file.read_bytes())
        data[len(data) // 2] ^= 1
        file.write_bytes(data)
        assert command("verify", source, out, "--exact-only", "-q", *given).stdout == "different\n"
        without = command("verify", source, out, "--exact-only")
        assert without.returncode == 1
        assert "If they were split with --dequantize, give it here, too." in without.stdout
    refused = command("verify", source, tmp_path / "out0", *given)
    assert refused.returncode == 2
    assert "--dequantize is not possible: with it, only bytes can be compared" in refused.stderr


def test_the_arithmetic_of_the_proof_is_its_own() -> None:
    """Both kinds of arithmetic say the same of all numbers, dtypes of scales and kinds of grids, and from any element
    on; and that of the proof sees a fault."""
    rng = np.random.default_rng(3)
    for dtype, width in (("F32", 4), ("BF16", 2), ("F16", 2), ("F8_E8M0", 1)):
        for rows, *block in ((40, 16, 32), (20, 16, 32), (40, 1, 70), (40, 40, 1), (40, 40, 70)):
            grid = Grid(rows, 70, *block)
            codes = rng.integers(0, 256, 2800, np.uint8)
            count = math.prod(grid.shape) * (40 // grid.rows)
            content = memoryview(rng.integers(0, 256, count * width, np.uint8).tobytes())
            begin = int(rng.integers(0, 2000))
            found = dequantize(codes[begin:], begin, grid, scales_from(content, dtype, grid))
            should = proof._bits(codes[begin:], begin, grid, proof._scales(content, dtype, grid))
            assert np.array_equal(found, should), (dtype, grid)


@pytest.mark.parametrize("scale", [1.0, -3.5, 2.0**-130, 2.0**-149, 2.0**120, math.inf, math.nan, 0.0, 64.0, 0.0123])
def test_all_numbers_of_e4m3(scale: float) -> None:
    """By their bits, also the subnormals, both zeros and both NaNs: their value times the scale, rounded once."""
    codes, grid, by = np.arange(256, dtype=np.uint8), Grid(16, 16, 16, 16), np.full((1, 1), scale, np.float32)
    values = torch.from_numpy(codes).view(torch.float8_e4m3fn).float() * torch.tensor(scale)
    should = values.bfloat16().view(torch.int16).numpy().view(np.uint16)
    found = dequantize(codes, 0, grid, by)
    nan = values.isnan().numpy()
    assert np.array_equal(found[~nan], should[~nan]) and (found[nan] == 0x7FC0).all()
    assert np.array_equal(found, proof._bits(codes, 0, grid, by.astype(np.float64)))


SINGLE = {
    "float8-tensor", "float8-channel", "float8-block", "fp8-block", "fp8-block-scale", "w8a8-fp8", "mxfp8",
    "fp8-tensor", "fp8-static", "fbgemm", "modelopt-fp8", "modelopt-fp8-channel", "no-config-fp8", "quark-fp8",
    "fused-fp8-block", "fused-fp8-expert", "fused-modelopt-fp8", "fused-fbgemm",
}  # fmt: skip


@pytest.mark.parametrize("name", [*METHODS])
def test_each_method_is_dequantized_or_refused(name: str, tmp_path: Path) -> None:
    """What the independent description of a method says, in float32, rounded to bfloat16 by torch."""
    method = METHODS[name]
    source, ends, _ = checkpoint(tmp_path / "source", method, PACKINGS[3] if method.fused else PACKINGS[0])
    if name not in SINGLE:
        with pytest.raises(ReshardError, match=r"cannot be dequantized|no weights of 8-bit floats") as error:
            dequantized(source, tmp_path)
        assert error.value.hint
        return
    should = by_definition(source, method, ends, method.fused)
    found = load(source, **access(tmp_path))
    plain = load(source)
    for weight, values in should.items():
        expected = torch.from_numpy(np.ascontiguousarray(values))
        assert torch.equal(found[weight], expected.to(torch.bfloat16)), weight
    others = plain.keys() - should.keys()
    assert all(torch.equal(found[n].view(torch.int16), plain[n].view(torch.int16)) for n in others & found.keys())
    gone = {suffix for suffixes in ends.values() for suffix in suffixes}
    assert all(name.endswith(tuple(gone)) for name in others - found.keys())


@pytest.mark.parametrize("shape", ["1 out", "out 1", "out"])
def test_square_experts_that_are_stored_input_first(shape: str, tmp_path: Path) -> None:
    """Their shapes do not tell outputs from inputs: the weight's rule does."""
    method = METHODS["fused-fbgemm"]
    first, ends, config = checkpoint(tmp_path / "first", method, PACKINGS[3], blocks=2)
    tensors = read(first)
    down = next(name for name in tensors if name.endswith("down_proj"))
    experts, rows, columns = tensors[down].array.shape
    assert rows == columns
    found = {"1 out": (experts, 1, rows), "out 1": (experts, rows, 1), "out": (experts, rows)}[shape]
    tensors[f"{down}_scale"] = replace(tensors[f"{down}_scale"], array=tensors[f"{down}_scale"].array.reshape(found))
    settings = {"quant_method": "fp8"} if shape == "out" else method.settings
    source = write(tmp_path / "source", config | {"quantization_config": settings}, tensors)
    should = by_definition(source, method, ends, method.fused)
    assert torch.equal(load(source, **access(tmp_path))[down], torch.from_numpy(should[down].copy()).bfloat16())


def test_a_scale_of_a_shape_that_no_pattern_has_is_refused(tmp_path: Path) -> None:
    """One for each input, of experts that are stored input first."""
    method = METHODS["fused-fbgemm"]
    first, _, config = checkpoint(tmp_path / "first", method, PACKINGS[3])
    tensors = read(first)
    down = next(name for name in tensors if name.endswith("down_proj"))
    experts, rows, _ = tensors[down].array.shape
    tensors[f"{down}_scale"] = Stored("F32", np.ones((experts, rows, 1), np.float32))
    source = write(tmp_path / "source", config | {"quantization_config": method.settings}, tensors)
    with pytest.raises(ReshardError, match=rf"'{down}_scale' has shape .*, but the rule 'expert hidden 1'"):
        dequantized(source, tmp_path)


def test_layouts_of_a_rule_are_told_by_the_shape_or_refused() -> None:
    """Qwen3-VL's experts are stored in either way."""
    config: dict = {"hidden_size": 64, "moe_intermediate_size": 32, "num_experts": 4, "num_hidden_layers": 1}
    config = {"model_type": "qwen3_vl_moe", "text_config": {"model_type": "qwen3_vl_moe_text", **config}}
    rules = find_architecture(config, Path())
    down = "model.layers.0.mlp.experts.down_proj"
    told = [scaled._input_first(rules, AxisSizes(rules, config, {}), down, of) for of in ((4, 32, 64), (4, 64, 32))]
    assert told == [{True}, {False}]
    config["text_config"]["moe_intermediate_size"] = 64
    tell = partial(scaled._input_first, rules, AxisSizes(rules, config, {}))
    config["quantization_config"] = {"quant_method": "fp8"}
    tensors = {down: Weight("F8_E4M3", (4, 64, 64)), f"{down}_scale": Weight("F32", (4, 64))}
    with pytest.raises(ReshardError, match="cannot be dequantized"):
        scaled_weights(config, tensors, tell, lambda _: False)
    tensors[f"{down}_scale"] = Weight("F32", (4,))
    assert scaled_weights(config, tensors, tell, lambda _: False)[0][down].grid == Grid(64, 64, 64, 64)


# ------------------------------------------------------------------------------------------------------------- refused


def test_it_is_said_how(source: Path, tmp_path: Path) -> None:
    done = command("split", source, tmp_path / "out", "--as", "megatron")
    assert done.returncode == 2
    assert done.stderr.count("\n") == 2
    assert "with --dequantize, weights in fp8 are taken as BF16" in done.stderr


@pytest.mark.parametrize("what", ["plain", "bin"])
def test_what_cannot_be_dequantized(what: str, source: Path, tmp_path: Path) -> None:
    given = tmp_path / "given"
    if what == "plain":
        given = store.checkpoint("deepseek_v3", "bfloat16")
    else:
        given.mkdir()
        torch.save({"model.norm.weight": torch.ones(2)}, given / "pytorch_model.bin")
        shutil.copyfile(source / "config.json", given / "config.json")
    done = command("split", given, tmp_path / "out", "--as", "megatron", "--dequantize", "--cache-dir", tmp_path)
    assert done.returncode == 2
    assert done.stderr.startswith("Error: ")
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "out").exists()


def test_the_source_is_not_written_over(source: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(source, tmp_path / "copy")
    for out in (copy, copy / "out"):
        done = command(
            "split", copy, out, "--tp", "2", "--dequantize", "--overwrite", "--cache-dir", tmp_path / "cache"
        )
        assert "are the same folder, or one lies in the other" in done.stderr
    assert contents(copy) == contents(source)


def test_a_source_that_changes_is_seen(source: Path, tmp_path: Path) -> None:
    """While it is read, and between two runs: then another folder stands in for it."""
    copy = shutil.copytree(source, tmp_path / "copy")
    opened = dequantized(copy, tmp_path)
    before = opened.record.id
    file = next(iter(copy.glob("*.safetensors")))
    data = file.read_bytes()
    file.write_bytes(data[:-4] + bytes(4))
    os.utime(file, (1, 1))
    with pytest.raises(MismatchError, match="was changed while it was read"):
        opened.check_unchanged()
    remote = next(of.remote for of in opened.files.values() if of.remote and of.remote.address == str(file))
    storage_files.opened.cache_clear()  # it may be open still: then only the look at the end sees it
    with pytest.raises(MismatchError, match="was changed while it was read"):
        remote.read(0, 1 << 20)
    again = dequantized(copy, tmp_path)
    again.check_unchanged()
    assert (again.path != opened.path, again.record.id != "", before != "") == (True, True, True)


def test_what_changes_while_it_is_opened_is_not_kept(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The headers and the config.json of before, with the states of after, would be taken for the checkpoint later."""
    copy = shutil.copytree(source, tmp_path / "copy")
    plain = opening.open_checkpoint

    def racing(path: Path, *read: object) -> object:
        found = plain(path, *read)
        change_json(copy / "config.json", rope_theta=5e5)
        return found

    with monkeypatch.context() as patched:
        patched.setattr(opening, "open_checkpoint", racing)
        with pytest.raises(MismatchError, match="was changed while it was read"):
            dequantized(copy, tmp_path)
    assert dequantized(copy, tmp_path).read_config()["rope_theta"] == 5e5


def test_the_identity_of_a_computed_file(source: Path, tmp_path: Path) -> None:
    """It has all that the bytes follow from, and is the same for copies, which have other inodes."""
    copy = shutil.copytree(source, tmp_path / "copy")  # with the times
    mine, other = ([of.remote for of in dequantized(at, tmp_path).files.values()] for at in (source, copy))
    assert [of.identity for of in mine if of] == [of.identity for of in other if of]
    opened = [dequantized(at, tmp_path) for at in (source, copy)]
    here, there = (source.inputs[0] for source in opened)
    assert here.anywhere == there.anywhere
    assert not here.is_same(there), "on one machine it is another file"
    assert here.is_same(replace(there, host="another"))
    assert here.closed_state != replace(here, made_of=there.made_of).closed_state
    assert reader_of(Stamp)(document_of(here), "here") == here
    file = mine[0]
    assert isinstance(file, ComputedFile)
    plains = [piece.content.plain for piece in file.pieces]
    number, (name, inputs, (*what, grid)) = next(found for found in enumerate(plains) if "_dequantized" in str(found))
    piece = file.pieces[number]
    other = replace(piece.content, plain=(name, inputs, (*what, grid._replace(block_rows=1))))
    pieces = tuple(each._replace(content=other) if each is piece else each for each in file.pieces)
    found = {of.identity for of in (file, replace(file, header=file.header + b" "), replace(file, pieces=pieces))}
    assert len(found) == 3


def test_what_readers_keep_is_bounded(
    source: Path, plain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Open files and scales, over all readers."""
    monkeypatch.setattr(storage._SCALES, "limit", 3000)
    copy = quantized(store.checkpoint("deepseek_v3", "bfloat16"), tmp_path / "many", 40)
    files = [of.remote for of in dequantized(copy, tmp_path).files.values() if of.remote]
    storage_files.opened.cache_clear()
    file = files[0]
    assert isinstance(file, ComputedFile)
    every = {at: of for other in files if isinstance(other, ComputedFile) for of in other.files for at in of.paths[1:]}
    others = [of for of in every.values() if of not in file.files]
    assert others
    before = len([*Path("/proc/self/fd").iterdir()])
    reads = 3 * files
    for of in reads:
        of.read(0, of.size)
    assert len([*Path("/proc/self/fd").iterdir()]) <= before + 40 < before + len(reads)
    assert 0 < storage._SCALES.nbytes <= 3000
    os.utime(others[0].address, (1, 1))
    file.check_unchanged()  # it has nothing of that one
    os.utime(file.files[-1].address, (1, 1))
    with pytest.raises(MismatchError, match="was changed while it was read"):
        file.check_unchanged()


def test_weights_in_a_folder_within(source: Path, tmp_path: Path) -> None:
    """No output lies in the checkpoint."""
    copy = tmp_path / "copy"
    shutil.copytree(source, copy / "within")
    for name in ("config.json", "tokenizer.json", "model.safetensors.index.json"):
        (copy / "within" / name).rename(copy / name)
    with changed_json(copy / "model.safetensors.index.json") as index:
        index["weight_map"] = {name: f"within/{file}" for name, file in index["weight_map"].items()}
    done = command("split", copy, copy / "out", "--tp", "2", "--dequantize", "--cache-dir", tmp_path / "cache")
    assert "are the same folder, or one lies in the other" in done.stderr


@pytest.mark.parametrize("what", ["a tensor", "config.json"])
def test_a_model_in_float16_is_refused(what: str, source: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(source, tmp_path / "copy")
    if what == "a tensor":
        file = next(at for at in copy.glob("*.safetensors") if "model.norm.weight" in read_header(at).tensors)
        with changed_tensors(file) as tensors:
            tensors["model.norm.weight"] = tensors["model.norm.weight"].half()
    else:
        change_json(copy / "config.json", dtype="float16")
    with pytest.raises(ReshardError, match=r"F16, but|says float16, but") as error:
        dequantized(copy, tmp_path)
    assert error.value.hint


def test_the_proof_is_silent_about_a_nan() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = proof._scales(memoryview(np.array([0x7FA00000], "<u4").tobytes()), "F32", Grid(1, 1, 1, 1))
    assert np.isnan(found).all()


def test_odd_ranges_of_a_file(source: Path, plain: Path, tmp_path: Path) -> None:
    """The engine asks for any bytes, also for half an element."""
    opened = dequantized(source, tmp_path)
    (file,) = [of for of in opened.files.values() if of.name.startswith("model-00001")]
    data = (plain / file.name).read_bytes()
    assert file.remote is not None
    read = file.remote.read
    rng = np.random.default_rng(0)
    for begin in (0, 1, *rng.integers(0, len(data) - 1, 40).tolist()):
        end = int(rng.integers(begin + 1, min(begin + 20000, len(data)) + 1))
        assert bytes(read(begin, end)) == data[begin:end]


@thorough
def test_a_checkpoint_in_a_bucket(source: Path, plain: Path, tmp_path: Path) -> None:
    """Ranges of the quantized files are fetched, about half as many bytes as are written."""
    shutil.copytree(source, tmp_path / "store/model")
    with StoreServer(tmp_path / "store") as server:
        given = "--tp", "2", "--dequantize", "--cache-dir", tmp_path / "cache", "--json"
        done = command("split", "s3://bucket/model", tmp_path / "out", *given, **server.environment)
        given = "--as", "huggingface", "--overwrite", *given[2:]
        own = [
            command("split", "s3://bucket/model", out, *given, **server.environment)
            for out in ("s3://bucket/model", "s3://bucket/model/within")
        ]
    assert done.returncode == 0, done.stderr
    assert all("are the same place, or one lies in the other" in each.stderr for each in own)
    assert contents(tmp_path / "store/model") == contents(source)
    split(plain, tmp_path / "should", tp=2, **ONE)
    found, should = contents(tmp_path / "out"), contents(tmp_path / "should")
    mine, theirs = (json.loads(of.pop("reshard.json")) for of in (found, should))
    assert found == should and mine["ranks"] == theirs["ranks"]
    assert mine["source"]["location"] == "s3://bucket/model (dequantized)"
    report = json.loads(done.stdout)
    assert report["bytes"] // 4 < report["bytes_fetched"] < report["bytes"]
