"""``verify`` of shards in another program's format: every byte, through the rewrites, and the forward of each rank."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from functools import cache
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from reshard.api import merge, split
from reshard.formats.errors import CheckpointError, ReshardError
from reshard.formats.files.manifest import INTACT_FILE
from reshard.formats.files.safetensors import build_header, read_header, tensor_bytes
from reshard.source.opening import open_source
from reshard.source.source import Source
from reshard.verify.bytes.exact import compare, open_shards, verify_exact
from reshard.verify.bytes.exact_report import ExactReport
from reshard.verify.forward.noise import LIMIT
from tests import store, zoo
from tests.marks import one_of_each, thorough
from tests.programs.oracles import ORACLES, checkpoint
from tests.support import LLAMA, change_json, change_tensor, changed_json, command, llama_tensors, write_checkpoint
from tests.verify.faults import read, sign
from tests.verify.program_faults import FAULTS, ProgramShards, inject
from tests.verify.test_exact import MEASURE
from tests.verify.test_forward import QUICK, run_all

VLLM = [
    path.stem
    for path in sorted((ORACLES / "vllm" / "models").glob("*.json"))
    if "tp2" in json.loads(path.read_text()).get("meshes", {})
]

ORACLE_OF = {"mistral": "meta", "sglang": "vllm", "vllm-0.23": "vllm"}
"""Formats whose fixtures lie in another format's folder, and those that have none of their own."""


@cache
def original(model: str, format: str = "vllm") -> Source:
    return open_source(checkpoint(ORACLE_OF.get(format, format), model))


def written(model: str, tp: int = 2, format: str = "vllm", **more: Any) -> Path:
    """A fixture in a format, split once for all tests."""
    key = "-".join([model, format, str(tp), *map(str, more.values())])
    return store.made(
        f"programs-{key}", lambda path: split(original(model, format).path, path, tp=tp, format=format, **more)
    )


def exact(folder: Path, model: str, format: str = "vllm") -> ExactReport:
    return verify_exact(original(model, format), folder)


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    return Path(shutil.copytree(written("llama"), tmp_path / "out"))


# ------------------------------------------------------------------------------------------------------------- bytes


@pytest.mark.parametrize("model", one_of_each(VLLM))
def test_correct_shards_are_the_same_with_and_without_a_manifest(model: str, tmp_path: Path) -> None:
    folder = shutil.copytree(written(model), tmp_path / "out")
    found = exact(folder, model)
    assert found.verdict == "same" and found.format == "vllm", found
    weights = [read_header(file) for file in folder.glob("*.safetensors")]
    assert found.nbytes == sum(info.nbytes for header in weights for info in header.tensors.values())
    (folder / "reshard.json").unlink()
    (folder / INTACT_FILE).unlink(missing_ok=True)
    assert exact(folder, model).verdict == "same"


@pytest.mark.parametrize(
    ("format", "model", "more"),
    [
        ("vllm", "llama_kv2", {"tp": 4}),
        ("vllm", "mamba2_g1", {"tp": 4}),
        ("vllm", "llama", {"tp": 2, "pp": 2}),
        ("vllm", "qwen3_moe", {"tp": 2, "pp": 2}),
        ("vllm", "deepseek_v3", {"tp": 2, "ep": 2, "same_ranks": True}),
        ("vllm", "gpt_oss", {"tp": 2, "ep": 2, "same_ranks": True}),
        ("deepseek", "deepseek_v3", {"tp": 4}),
        ("deepseek", "deepseek_v3_fp8", {"tp": 2}),
        ("meta", "llama2", {"tp": 1}),
        ("meta", "llama3", {"tp": 4}),
        ("mistral", "mixtral", {"tp": 1}),
        ("mistral", "mixtral", {"tp": 1, "max_shard_size": 100_000}),
        ("sglang", "qwen3_moe", {"tp": 2}),
        ("vllm-0.23", "qwen3_moe", {"tp": 2}),
    ],
)
@thorough
def test_other_meshes_and_formats(format: str, model: str, more: dict[str, Any], tmp_path: Path) -> None:
    folder = shutil.copytree(written(model, format=format, **more), tmp_path / "out")
    assert exact(folder, model, format).verdict == "same"
    (folder / "reshard.json").unlink()
    assert exact(folder, model, format).verdict == "same"


@pytest.mark.parametrize(
    ("format", "model", "more"),
    one_of_each([
        ("vllm", "llama_kv2", {"tp": 4}),
        ("vllm", "llama", {"tp": 2, "pp": 2}),
        ("vllm", "falcon", {}),
        ("vllm", "llama4", {}),
        ("vllm", "gpt2", {}),
        ("vllm", "gpt_oss", {}),
        ("vllm", "mixtral", {"tp": 2, "ep": 2, "same_ranks": True}),
        ("vllm", "glm4_moe", {}),
        ("vllm", "mamba2", {}),
        ("deepseek", "deepseek_v3_fp8", {}),
        ("meta", "llama2", {}),
        ("mistral", "mistral", {"tp": 1}),
    ], lambda case: (case[0], case[1] in {"gpt_oss", "mamba2"})),
)  # fmt: skip
def test_one_bit_in_any_tensor_is_found_and_named(
    format: str, model: str, more: dict[str, Any], tmp_path: Path
) -> None:
    """One bit of each stored tensor on each rank is another, also in padding, constants, zeros and what is kept."""
    folder = shutil.copytree(written(model, format=format, **more), tmp_path / "out")
    shards = ProgramShards(folder, original(model, format))
    held = [(rank, info) for rank, tensors in enumerate(shards.source.ranks) for info in tensors.values()]
    held += [(0, info) for info in shards.source.intact.values()]
    random = np.random.default_rng(0)
    for _, info in held:  # the lowest byte but one of an element: more than a unit in the last place of F32
        item = info.nbytes // max(1, int(np.prod(info.shape)))
        at = int(random.integers(0, info.nbytes // item)) * item + min(1, item - 1)
        with info.file.open("r+b") as file:
            content = info.file.read_bytes()[info.offset + at]
            file.seek(info.offset + at)
            file.write(bytes([content ^ 4]))
    sign(folder)
    found = exact(folder, model, format)
    assert {(damage.stored, damage.rank) for damage in found.damages} == {(info.name, rank) for rank, info in held}
    assert all(damage.elements == 1 for damage in found.damages)
    assert not (found.problems or found.missing or found.extra or found.configs)


def test_the_first_difference_says_where(llama: Path) -> None:
    shards = ProgramShards(llama, original("llama"))
    stored = next(shards.stored("qkv_proj.weight"))
    q, k, _ = shards.rows(stored, 1)
    local = shards.local(stored.name, 1).copy()
    local[q + 3, 5] ^= 1  # row 3 of what rank 1 has of k
    shards.write(stored.name, 1, local)
    sign(llama)
    found = exact(llama, "llama")
    first, tensor = found.first, f"model.layers.{shards.layer}.self_attn.k_proj.weight"
    info = shards.original.ranks[0][tensor]
    assert first is not None and (first.tensor, first.stored, first.rank) == (tensor, stored.name, 1)
    assert first.index == (k + 3, 5)
    held = shards.source.ranks[1][stored.name]
    item = info.nbytes // int(np.prod(info.shape))
    assert first.offset == held.offset + ((q + 3) * held.shape[1] + 5) * item
    assert (first.original_file, first.original_offset) == (
        str(info.file), info.offset + ((k + 3) * info.shape[1] + 5) * item,
    )  # fmt: skip
    assert Path(first.file).read_bytes()[first.offset : first.offset + item] == first.found
    assert info.file.read_bytes()[first.original_offset :][:item] == first.expected
    assert f"in '{stored.name}'" in str(first)


def test_the_index_of_an_expert_that_is_stacked(tmp_path: Path) -> None:
    """Llama 4's experts are one tensor here and there, with gate and up joined in another order of dimensions."""
    folder = shutil.copytree(written("llama4"), tmp_path / "out")
    shards = ProgramShards(folder, original("llama4"))
    stored = next(shards.stored("w13_weight"))
    local = shards.local(stored.name, 1).copy()
    local[-1, 1, 2] ^= 1  # gate of the last expert: output 1 of rank 1, input 2
    shards.write(stored.name, 1, local)
    first = exact(folder, "llama4").first
    assert first is not None and first.original_offset is not None
    assert first.index == (len(local) - 1, 2, local.shape[1] // 2 + 1)
    assert Path(str(first.original_file)).read_bytes()[first.original_offset :][: local.itemsize] == first.expected


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("model", ["glm4_moe", "mamba2"])
def test_what_is_stored_in_a_wider_dtype_is_exact(model: str, dtype: str, tmp_path: Path) -> None:
    source = open_source(store.checkpoint(model, dtype))
    split(source.path, tmp_path / "out", tp=2, format="vllm")
    assert verify_exact(source, tmp_path / "out").verdict == "same"
    if model == "mamba2":
        return
    shards = ProgramShards(tmp_path / "out", source)
    stored = next(shards.stored("mlp.gate.weight"))
    assert stored.dtype == "F32"
    shards.write(stored.name, 1, shards.local(stored.name, 1) ^ 1)  # a bit that 16 bits do not have
    found = verify_exact(source, tmp_path / "out")
    assert {(damage.stored, damage.rank) for damage in found.damages} == {(stored.name, 1)}
    assert found.first is not None and len(found.first.expected) == 4


def test_padding_constants_and_zeros_say_what_they_are(tmp_path: Path) -> None:
    folder = shutil.copytree(written("gpt_oss"), tmp_path / "out")
    shards = ProgramShards(folder, original("gpt_oss"))
    scale = next(each for each in shards.arrangement.stored if each.constant)
    bias = next(shards.stored("w2_bias"))
    for name in (scale.name, bias.name):
        with_one = shutil.copytree(folder, tmp_path / name)
        one = ProgramShards(with_one, original("gpt_oss"))
        one.write(name, 1, one.local(name, 1) + np.array(1, one.local(name, 1).dtype))
        first = exact(with_one, "gpt_oss").first
        assert first is not None and first.stored == name and first.rank == 1 and first.original_file is None
        assert ("constant" if name == scale.name else "an earlier rank has it") in str(first)
    table = next(each for each in shards.arrangement.stored if "lm_head" in each.name)
    local = shards.local(table.name, 1).copy()
    local[-1, 2] = 1
    shards.write(table.name, 1, local)
    first = exact(folder, "gpt_oss").first
    assert first is not None and first.index[0] == len(local) * 2 - 1 and "(padding)" in str(first)


def test_a_function_may_be_one_unit_in_the_last_place_off_and_no_more(tmp_path: Path) -> None:
    folder = shutil.copytree(written("mamba2"), tmp_path / "out")
    (folder / "reshard.json").unlink()
    shards = ProgramShards(folder, original("mamba2"))
    stored = next(each for each in shards.arrangement.stored if each.name.endswith(".A"))
    before, found = shards.local(stored.name, 0), {}
    for off in (-2, -1, 1, 2):
        changed = before.copy().astype(np.int64)
        changed.reshape(-1)[0] += off
        shards.write(stored.name, 0, changed.astype(before.dtype))
        found[off] = exact(folder, "mamba2").verdict
        shards.write(stored.name, 0, before)
    assert found[-2] == found[2] == "different"
    assert "same" in (found[-1], found[1])  # the one between which and the nearest the exact value lies
    assert exact(folder, "mamba2").verdict == "same"


# ----------------------------------------------------------------------------------------------------- all but bytes


def rewritten(file: Path, change: Any) -> None:
    """Write a weight file anew with other tensors."""
    header = read_header(file)
    tensors = {name: (info.dtype, info.shape, read(info).tobytes()) for name, info in header.tensors.items()}
    change(tensors)
    listed = [(name, dtype, shape) for name, (dtype, shape, _) in tensors.items()]
    content = b"".join(data for _, _, data in tensors.values())
    file.write_bytes(build_header(listed, dict(header.metadata)) + content)


NAME = "model.layers.0.mlp.gate_up_proj.weight"


@pytest.mark.parametrize("has_manifest", [True, False])
@pytest.mark.parametrize(
    ("change", "where", "text"),
    [
        (lambda t: t.pop(NAME), "missing", f"rank 1: {NAME}, of 'model.layers.0.mlp.gate_proj.weight'"),
        (lambda t: t.update(more=("F32", (1,), bytes(4))), "extra", "rank 1: more"),
        (lambda t: t.update(more=("F32", (0,), b"")), "extra", "rank 1: more"),
        (lambda t: t.update({NAME: ("I32", *t[NAME][1:])}), "problems", "is I32 ["),
        (lambda t: t.update({NAME: (t[NAME][0], t[NAME][1][::-1], t[NAME][2])}), "problems", "the original gives"),
    ],
)
def test_tensors_that_are_missing_extra_or_of_another_kind(
    llama: Path, has_manifest: bool, change: Any, where: str, text: str
) -> None:
    rewritten(llama / "model-rank-1-part-0.safetensors", change)
    if has_manifest:
        sign(llama)
    else:
        (llama / "reshard.json").unlink()
    found = exact(llama, "llama")
    assert found.verdict == "different"
    assert any(text in line for line in getattr(found, where)), found


@pytest.mark.parametrize("has_manifest", [True, False])
@pytest.mark.parametrize("of", ["this split", "another", "no split"])
def test_a_file_of_a_third_rank(of: str, has_manifest: bool, llama: Path) -> None:
    """An older file that an engine of two ranks does not open."""
    third, source = llama / "model-rank-2-part-0.safetensors", written("llama", 4) if of == "another" else llama
    content = (source / f"model-rank-{2 if of == 'another' else 1}-part-0.safetensors").read_bytes()
    third.write_bytes(content)
    if of == "no split":
        header = read_header(third)
        tensors = [(info.name, info.dtype, info.shape) for info in header.tensors.values()]
        third.write_bytes(build_header(tensors, {}) + content[len(header.raw) :])
    if not has_manifest:
        (llama / "reshard.json").unlink()
    said = {"this split": "is a shard of rank 1", "another": "are of different splits", "no split": "files of rank 2,"}
    found = exact(llama, "llama")
    assert found.verdict == "different" and said[of] in str(found.problems)


@pytest.mark.parametrize("has_manifest", [True, False])
def test_what_the_headers_say(llama: Path, has_manifest: bool) -> None:
    files = sorted(llama.glob("*.safetensors"))
    for file in files:
        header = read_header(file)
        said = json.loads(header.metadata["reshard"])
        said["source"] = "0" * len(said["source"])
        tensors = [(info.name, info.dtype, info.shape) for info in header.tensors.values()]
        content = file.read_bytes()[len(header.raw) :]
        file.write_bytes(build_header(tensors, {**header.metadata, "reshard": json.dumps(said)}) + content)
    if has_manifest:
        sign(llama)
    else:
        (llama / "reshard.json").unlink()
    assert {file.name for file in files} <= {difference.file for difference in exact(llama, "llama").configs}


def test_the_config_file_of_the_program(tmp_path: Path) -> None:
    folder = shutil.copytree(written("llama3", format="meta"), tmp_path / "out")
    path = folder / "params.json"
    change_json(path, norm_eps=1.0)
    assert [(found.file, found.key) for found in exact(folder, "llama3", "meta").configs] == [
        ("params.json", "norm_eps")
    ]
    path.unlink()
    assert exact(folder, "llama3", "meta").missing == ("params.json",)


FORMS = ("vllm", "transformers", "dcp", "megatron", "sglang")


@pytest.mark.parametrize("has_manifest", [False, True])
@pytest.mark.parametrize("form", one_of_each(FORMS))
def test_a_missing_rank_is_no_difference(form: str, has_manifest: bool, tmp_path: Path) -> None:
    """Of each form whose files say how many there are, whichever rank it is."""
    model = store.checkpoint("llama")
    split(model, whole := tmp_path / "whole", tp=2, format=form)
    if not has_manifest:
        (whole / "reshard.json").unlink()
    assert verify_exact(open_source(model), whole).verdict == "same"
    files = [file.relative_to(whole) for file in whole.rglob("*") if file.suffix in {".distcp", ".safetensors"}]
    for file in (min(files), max(files)):
        shards = Path(shutil.copytree(whole, tmp_path / "shards", dirs_exist_ok=True))
        (shards / file).unlink()
        done = command("verify", model, shards, "--exact-only")
        assert (done.returncode, done.stdout) == (2, "INCOMPLETE\n")
        assert re.search(r"Error: .* (is|are) missing", done.stderr)
    answer = json.loads(command("verify", model, shards, "--exact-only", "--json").stdout)
    assert (answer["verdict"], answer["exact"]) == ("incomplete", None)
    assert answer["summary"].startswith("Not all files are there: ")


@pytest.mark.parametrize("has_index", [False, True])
def test_a_missing_file_of_a_merged_checkpoint_is_no_difference(has_index: bool, tmp_path: Path) -> None:
    model = store.checkpoint("llama")
    split(model, tmp_path / "shards", tp=2)
    merge(tmp_path / "shards", tmp_path / "merged", max_shard_size=100_000)
    min((tmp_path / "merged").glob("*.safetensors")).unlink()
    if not has_index:
        (tmp_path / "merged/model.safetensors.index.json").unlink()
    done = command("verify", model, tmp_path / "merged", "--exact-only")
    assert (done.returncode, done.stdout) == (2, "INCOMPLETE\n")


def test_constants_in_another_dtype_are_no_cast(tmp_path: Path) -> None:
    """vLLM's scales of the cache are in float32, whatever the model's dtype is."""
    model = write_checkpoint(tmp_path / "model")
    split(model, shards := tmp_path / "out", tp=2, format="vllm")
    assert {info.dtype for info in read_header(shards / "model-rank-1-part-0.safetensors").tensors.values()} == {
        "BF16", "F32",
    }  # fmt: skip
    change_tensor(shards / "model-rank-1-part-0.safetensors", "model.norm.weight", at=3)
    done = command("verify", model, shards, "--exact-only")
    assert done.returncode == 1 and "Bytes differ, first in tensor 'model.norm.weight'" in done.stdout
    assert "--dtype" not in done.stdout


def test_what_a_program_does_not_store_is_kept(tmp_path: Path) -> None:
    source = open_source(store.checkpoint("deepseek_v3-mtp"))
    split(source.path, tmp_path / "out", tp=2, format="vllm")
    assert verify_exact(source, tmp_path / "out").verdict == "same"
    kept = read_header(tmp_path / "out" / INTACT_FILE).tensors
    name = next(iter(kept))
    change_tensor(tmp_path / "out" / INTACT_FILE, name, at=1)
    sign(tmp_path / "out")
    found = verify_exact(source, tmp_path / "out")
    assert found.first is not None and found.first.tensor == name and found.first.file.endswith(INTACT_FILE)


def test_a_file_that_becomes_shorter_while_it_is_read(llama: Path) -> None:
    """It is an error of the command's, in one line: a map of such a file would end the process."""
    opened = original("llama")
    shards = open_shards(llama, opened)
    assert isinstance(shards, Source)

    def cut(done: int, total: int) -> None:
        for file in llama.glob("model-rank-*"):
            os.truncate(file, 4096)

    with pytest.raises(CheckpointError, match="became shorter while it was read"):
        compare(opened, shards, cut)


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the peak is read from /proc")
@thorough
def test_memory_does_not_grow_with_the_model(tmp_path: Path) -> None:
    """Two tables of 200 MB, as a sparse file, are mapped, compared and let go of."""
    config = {**LLAMA, "hidden_size": 1024, "vocab_size": 100_000}
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(config))
    tensors = llama_tensors(config)
    with (tmp_path / "model" / "model.safetensors").open("wb") as file:
        file.write(build_header(tensors, {"format": "pt"}))
        file.truncate(file.tell() + sum(tensor_bytes(*tensor) for tensor in tensors))
    split(tmp_path / "model", tmp_path / "out", tp=2, format="vllm")
    measure = [sys.executable, "-c", MEASURE, tmp_path / "model", tmp_path / "out"]
    done = subprocess.run(measure, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 200_000  # kB


# ----------------------------------------------------------------------------------------------------------- forward

KV2 = {"num_attention_heads": 8, "num_key_value_heads": 2, "hidden_size": 64, "intermediate_size": 256}


def _llama_kv2(folder: Path) -> None:
    """A Llama with two KV heads, which four ranks share."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(**KV2, num_hidden_layers=3, vocab_size=112, max_position_embeddings=128, bos_token_id=0)
    model = LlamaForCausalLM(config)
    zoo.randomize(model, 1)
    model.save_pretrained(folder)


def pair(name: str, format: str = "vllm", **mesh: Any) -> tuple[Source, Source]:
    """A model that can be run, and its shards in a format."""
    experts = 8 if "ep" in mesh else None
    source = store.made(name, _llama_kv2) if name == "llama_kv2" else store.checkpoint(name, experts=experts)
    key = "-".join(map(str, (source.name, format, *mesh.values())))
    folder = store.made(f"{key}-runs", lambda path: split(source, path, format=format, **mesh))
    opened = open_source(source)
    shards = open_shards(folder, opened)
    assert isinstance(shards, Source)
    return opened, shards


EXPERTS = {"tp": 2, "ep": 2, "same_ranks": True}
CORRECT: list[tuple[str, str, dict[str, Any]]] = [
    ("llama", "vllm", {"tp": 2}),
    ("falcon-40b", "vllm", {"tp": 2}),
    ("qwen3_moe", "vllm", EXPERTS),
    ("gpt_oss", "vllm", {"tp": 2}),
    ("mamba2", "vllm", {"tp": 2}),
    ("llama4_text", "vllm", {"tp": 2}),
    ("glm4_moe", "vllm", {"tp": 2}),
    ("deepseek_v3", "deepseek", {"tp": 2}),
    ("llama-tied", "vllm", {"tp": 1, "pp": 2}),
    ("deepseek_v3-mtp", "vllm", {"tp": 2}),
    ("llama_kv2", "vllm", {"tp": 4}),
    ("llama_kv2", "meta", {"tp": 2}),
    ("llama", "sglang", {"tp": 2}),
    ("llama", "vllm", {"tp": 2, "pp": 2}),
    ("llava", "vllm", {"tp": 2}),
    ("gemma3", "vllm", {"tp": 2}),
]
"""What is joined, stacked, transposed, widened, of a function, zero on all ranks but one, paired, replicated, under two
names, not stored, or dealt in stages; Meta's embedding, of which each rank has columns; and of a tower, from which vLLM
does not load all.
"""


@thorough
def test_correct_shards_compute_the_same() -> None:
    reports = run_all([pair(model, format, **mesh) for model, format, mesh in CORRECT], QUICK)
    for (model, format, _), report in zip(CORRECT, reports, strict=True):
        assert report.is_same, (model, format, report.verdict)


@thorough
def test_what_the_forward_pass_lacks_is_said_of_the_shards(tmp_path: Path) -> None:
    """The folder that transformers loads is a temporary one, which no one can look into afterwards."""
    opened, shards = pair("llava", "vllm", tp=2)
    folder = shutil.copytree(shards.path, tmp_path / "out")
    for name in ("reshard.json", INTACT_FILE):  # as vLLM itself saves it
        (folder / name).unlink()
    lacking = open_shards(folder, opened)
    assert isinstance(lacking, Source)
    with pytest.raises(ReshardError, match=rf"failed: {folder}: no tensor fills '.*'"):
        run_all([(opened, lacking)], QUICK)


def test_too_little_space_for_folders_of_the_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is said before anything runs."""
    shards = pair("llama", "vllm", tp=2)
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=100))
    with pytest.raises(CheckpointError, match=r"not enough space for the ranks' folders: [\d,]+ bytes") as error:
        run_all([shards], QUICK)
    assert error.value.hint == "free some space, or set TMPDIR to a folder of another disk"
    needed = int(error.value.message.rpartition(": ")[2].split()[0].replace(",", ""))
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=needed - 1))
    monkeypatch.setattr(import_module("reshard.verify.forward.compare"), "run_ranks", lambda *_, **__: 1 / 0)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")  # the other rank is on another machine
    with pytest.raises(ZeroDivisionError):
        run_all([shards], QUICK)


@pytest.mark.parametrize("model", ["llama", "bart"])
@thorough
def test_a_vocabulary_that_is_padded_but_not_divided(model: str) -> None:
    """The logits have no padding, and neither has a bias that is added to them."""
    opened = open_source(store.checkpoint(model))
    folder = store.made(f"{model}-padded", lambda path: split(opened.path, path, tp=1, pad_vocab_to=64))
    assert open_source(folder).plan.padding
    assert run_all([(opened, open_source(folder))], QUICK)[0].is_same


FAULTY: dict[str, list[tuple[str, dict[str, Any]]]] = {
    "qkv_order": [("llama", {"tp": 2}), ("falcon-40b", {"tp": 2}), ("qwen3_moe", EXPERTS)],
    "gate_and_up": [("llama", {"tp": 2}), ("qwen3_moe", EXPERTS)],
    "neighbouring_experts": [("qwen3_moe", EXPERTS)],
    "rotary_halves": [("llama", {"tp": 2}), ("falcon-40b", {"tp": 2})],
    "kv_replica_of_wrong_head": [("llama_kv2", {"tp": 4})],
    "layers_by_one": [("llama", {"tp": 1, "pp": 2}), ("qwen3_moe", {"tp": 1, "pp": 2})],
    "padding_in_the_middle": [("llama", {"tp": 2}), ("falcon-40b", {"tp": 2})],
}
CASES = [(fault, model, mesh) for fault, found in FAULTY.items() for model, mesh in found]
CLEAR = 50.0


@pytest.fixture(scope="module")
def damaged(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], ProgramShards]:
    """Shards with each of the faults."""
    found = {}
    for fault, model, mesh in CASES:
        opened, shards = pair(model, **mesh)
        folder = tmp_path_factory.mktemp("faults") / f"{fault}-{model}"
        shutil.copytree(shards.path, folder)
        found[fault, model] = inject(fault, folder, opened)
        assert found[fault, model].damaged, (fault, model)
    return found


def test_every_fault_has_a_model() -> None:
    assert {*FAULTY} == {*FAULTS}


@pytest.mark.parametrize(("fault", "model"), [case[:2] for case in CASES])
def test_the_bytes_name_what_a_fault_damaged(
    fault: str, model: str, damaged: dict[tuple[str, str], ProgramShards]
) -> None:
    shards = damaged[fault, model]
    done = command("verify", shards.original.path, shards.folder, "--exact-only", "--json")
    exact = json.loads(done.stdout)["exact"]
    assert done.returncode == 1 and not (exact["problems"] or exact["missing"] or exact["extra"] or exact["configs"])
    assert {(found["stored"], found["rank"]) for found in exact["damages"]} == shards.damaged
    atoms = {each.name: {atom.tensor for atom in each.atoms} for each in shards.arrangement.stored}
    for found in (exact["first"], *exact["damages"]):
        assert found["tensor"] in atoms[found["stored"]]


@thorough
def test_the_forward_alone_sees_every_fault(damaged: dict[tuple[str, str], ProgramShards]) -> None:
    pairs = [(damaged[fault, model].original, damaged[fault, model].source) for fault, model, _ in CASES]
    reports = run_all(pairs, QUICK)
    for (fault, model, _), report in zip(CASES, reports, strict=True):
        ratio = max(row.ratio for row in report.layers)
        layer = 2 if fault == "layers_by_one" else damaged[fault, model].layer
        place = "embedding" if fault == "padding_in_the_middle" else f".{layer}."
        assert not report.is_same and ratio > CLEAR > LIMIT, (fault, model, ratio)
        assert report.first is not None and place in f"{report.first}.", (fault, model, report.first)


@thorough
def test_the_command(damaged: dict[tuple[str, str], ProgramShards]) -> None:
    opened, shards = pair("llama", tp=2)
    done = command("verify", opened.path, shards.path, "--json")
    document = json.loads(done.stdout)
    assert done.returncode == 0 and document["verdict"] == "same" and document["forward"]["is_same"]
    assert document["exact"]["format"] == "vllm"
    wrong = damaged["gate_and_up", "llama"]
    done = command("verify", opened.path, wrong.folder)
    assert done.returncode == 1 and "in the format vllm" in done.stdout
    line = next(line for line in done.stdout.splitlines() if line.startswith("DIFFERENT"))
    assert f"mlp.gate_proj.weight' at [0, 0] on rank 0, in 'model.layers.{wrong.layer}.mlp.gate_up_proj.weight'" in line
    assert "<- different" in done.stdout


@pytest.mark.parametrize("kept", [True, False], ids=["its manifest", "no manifest"])
@pytest.mark.parametrize("to", [None, "vllm", "megatron"])
@pytest.mark.parametrize("of", ["vllm", "dcp", "megatron", None])
@thorough
def test_shards_that_were_made_of_other_shards(of: str | None, to: str | None, kept: bool, tmp_path: Path) -> None:
    """What was read is no property of the result; what is said of the original still is."""
    model, between, out = store.checkpoint("llama"), tmp_path / "between", tmp_path / "out"
    split(model, between, tp=2, format=of)
    if not kept:
        (between / "reshard.json").unlink()
    split(between, out, tp=4, format=to)
    source = open_source(model)
    assert verify_exact(source, out).verdict == "same"
    manifest = out / "reshard.json"
    with changed_json(manifest) as document:
        document["sizes"]["vocab"] += 1
    assert verify_exact(source, out).verdict == "different"


def test_shards_of_another_model_say_so_by_any_route(tmp_path: Path) -> None:
    """A model that differs where it is compared, and where only the fingerprint looks."""
    split(store.checkpoint("llama"), tmp_path / "vllm", tp=2, format="vllm")
    split(tmp_path / "vllm", tmp_path / "out", tp=2)
    manifest = tmp_path / "out/reshard.json"
    text = manifest.read_text()
    known = json.loads(text)["source"]["id"]
    manifest.write_text(text.replace(known, "0" * 64))
    assert verify_exact(open_source(store.checkpoint("llama")), tmp_path / "out").verdict == "different"


# ------------------------------------------------------------------------------------------- files beside the weights


@pytest.mark.parametrize("format", ["megatron", "meta", "vllm"])
def test_without_a_manifest_what_was_not_compared_is_said(format: str, tmp_path: Path) -> None:
    """Nobody says what a program's own files should be; those that are gone may never have been there."""
    source = Path(shutil.copytree(checkpoint("meta", "llama3"), tmp_path / "model"))
    (source / "notes.md").write_text("beside the weights")
    out = tmp_path / "out"
    split(source, out, tp=2, format=format)
    (out / "reshard.json").unlink()
    own = {"megatron": "release/common.pt", "meta": "params.json", "vllm": None}[format]
    whole = verify_exact(open_source(source), out)
    assert whole.verdict == "same" and (own in whole.not_compared if own else not whole.not_compared)
    if own:
        (out / own).unlink()
    (out / "notes.md").unlink()
    (out / "more").mkdir()
    (out / "more" / "x.txt").write_text("of another")
    found = verify_exact(open_source(source), out)
    assert found.verdict == "same"
    said = {"notes.md (not there)", "more/"} | ({f"{own} (not there)"} if own else set())
    assert said <= {*found.not_compared}
    done = command("verify", source, out, "--exact-only")
    assert done.returncode == 0 and "nothing missing" not in done.stdout and "nothing extra" not in done.stdout
    assert done.stdout.count("ot compared, as there is no reshard.json: ") == 2


@pytest.mark.parametrize("format", ["megatron", "megatron-legacy", "vllm"])
def test_a_folder_without_the_weights_that_its_manifest_says(format: str, tmp_path: Path) -> None:
    out = tmp_path / "out"
    split(store.checkpoint("llama"), out, tp=2, format=format)
    for file in [*out.glob("latest_*"), *out.glob("model-rank-*")]:
        file.unlink()
    lost = ["the files of rank 0 of 2 are missing", "ranks 0, 1 of tp 2 are missing", "no weight files of the format"]
    said = ["latest_checkpointed_iteration.txt is missing"] if "megatron" in format else lost
    for words in (["merge", out, tmp_path / "merged"], ["plan", out], ["verify", store.checkpoint("llama"), out]):
        done = command(*words, *(["--exact-only"] if words[0] == "verify" else []))
        assert done.returncode in (1, 2) and any(why in done.stdout + done.stderr for why in said), done.stderr
        assert "internal error" not in done.stderr
    done = command("inspect", out)
    assert done.returncode == 1 and any(why in done.stdout for why in said)
