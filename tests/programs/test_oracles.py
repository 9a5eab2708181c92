"""What is written for a program is what the program itself holds, and comes back to the byte."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp

from reshard.api import merge, split
from reshard.formats.errors import CheckpointError, MismatchError
from reshard.formats.files.safetensors import build_header, read_header
from reshard.formats.notation.format_file import all_formats, format_of
from reshard.source.opening import open_source
from reshard.verify.bytes.exact import verify_exact
from tests import store
from tests.marks import one_of_each
from tests.oracles.torchfile import load_dcp
from tests.programs.oracles import ORACLES, checkpoint, module, problem
from tests.programs.test_sglang import as_older, as_sglang
from tests.programs.test_torchtitan import bits, of_torchtitan
from tests.support import contents
from tests.wrong_rules import swapped
from tests.zoo import class_of

VLLM = [
    (path.stem, mesh)
    for path in sorted((ORACLES / "vllm" / "models").glob("*.json"))
    for mesh in json.loads(path.read_text()).get("meshes", {})
]
DEEPSEEK = sorted(path.stem for path in (ORACLES / "deepseek").glob("*.npz"))


def _weights(folder: Path) -> dict[str, bytes]:
    """The bytes of each tensor of a full checkpoint."""
    return tensors_of(folder.glob("*.safetensors"))


def tensors_of(files: Iterable[Path]) -> dict[str, bytes]:
    """The bytes of each tensor in files."""
    infos = [info for file in files for info in read_header(file).tensors.values()]
    return {info.name: info.file.read_bytes()[info.offset : info.offset + info.nbytes] for info in infos}


def with_predicting_layer(folder: Path, out: Path) -> Path:
    """A checkpoint with one layer more than ``num_hidden_layers``: the last layer again, with other values."""
    config = json.loads((folder / "config.json").read_text())
    last = config["num_hidden_layers"] - 1
    infos = [info for file in folder.glob("*.safetensors") for info in read_header(file).tensors.values()]
    found, data = tensors_of(folder.glob("*.safetensors")), b""
    tensors = []
    for info in infos:
        tensors.append((info.name, info.dtype, info.shape))
        data += found[info.name]
    for info in infos:
        if f".layers.{last}." in info.name:
            tensors.append((info.name.replace(f".layers.{last}.", f".layers.{last + 1}."), info.dtype, info.shape))
            data += bytes(byte ^ 1 for byte in found[info.name])
    out.mkdir()
    (out / "config.json").write_text(json.dumps({**config, "num_nextn_predict_layers": 1}))
    (out / "model.safetensors").write_bytes(build_header(tensors, {"format": "pt"}) + data)
    return out


def _degrees(mesh: str) -> dict[str, Any]:
    """The arguments of ``split`` for a mesh's name: ``pp2-tp2``, ``tp4-ep``."""
    found = {word[:2]: int(word[2:] or 0) for word in mesh.split("-")}
    degrees: dict[str, Any] = {"tp": found.get("tp", 1), "pp": found.get("pp", 1)}
    return degrees | ({"ep": degrees["tp"], "same_ranks": True} if "ep" in found else {})


@pytest.mark.parametrize(("model", "mesh"), one_of_each(VLLM, lambda case: case[0]))
def test_vllm_holds_what_is_written(model: str, mesh: str, tmp_path: Path) -> None:
    split(checkpoint("vllm", model), tmp_path / "out", **_degrees(mesh), format="vllm")
    assert module("vllm", "check").check(model, mesh, tmp_path / "out") == []


@pytest.mark.parametrize("case", one_of_each(DEEPSEEK, lambda case: case.partition("-")[0]))
def test_deepseek_holds_what_is_written(case: str, tmp_path: Path) -> None:
    model, _, ranks = case.rpartition("-mp")
    split(checkpoint("deepseek", model), tmp_path / "out", tp=int(ranks), format="deepseek")
    assert problem("deepseek", case, tmp_path / "out") is None


def _largest(model: str) -> str:
    return max((m for of, m in VLLM if of == model and m[2:].isdigit() and m[:2] == "tp"), key=lambda m: int(m[2:]))


WAYS_BACK = [
    *(("vllm", model, mesh) for model, mesh in VLLM if mesh == _largest(model) or mesh.endswith("-ep") or "pp" in mesh),
    ("deepseek", "deepseek_v3", "tp4"),
    ("deepseek", "deepseek_v3_fp8", "tp2"),
]  # fmt: skip


@pytest.mark.parametrize(("form", "model", "mesh"), one_of_each(WAYS_BACK, lambda case: case[0]))
def test_the_way_back_restores_every_byte(form: str, model: str, mesh: str, tmp_path: Path) -> None:
    original = checkpoint(form, model)
    split(original, tmp_path / "out", **_degrees(mesh), format=form)
    merge(tmp_path / "out", tmp_path / "merged")
    assert contents(tmp_path / "merged") == contents(original)
    (tmp_path / "out" / "reshard.json").unlink()
    merge(tmp_path / "out", tmp_path / "without")
    assert _weights(tmp_path / "without") == _weights(original)


Judge = Callable[[str, Path, Path], bool]
"""Says of an oracle's case, its original and a folder whether the folder is what the program holds."""


def _of(oracle: str) -> Judge:
    return lambda case, _, folder: problem(oracle, case, folder) is None


def _of_vllm(case: str, _: Path, folder: Path) -> bool:
    return module("vllm", "check").check(*case.split("-"), folder) == []


def _as_vllm(named: Callable[[str], str | None]) -> Judge:
    """Whether each rank has vLLM's tensors, which have other names there."""

    def judge(_: str, original: Path, folder: Path) -> bool:
        split(original, theirs := folder.with_name(f"{folder.name}-vllm"), tp=2, format="vllm")
        files = sorted(file.name for file in theirs.glob("model-rank-*"))
        pairs = [[tensors_of([each / file]) for each in (folder, theirs)] for file in files]
        return all(ours == {named(name): of for name, of in held.items() if named(name)} for ours, held in pairs)

    return judge


def _of_torchtitan(head: str, qkv: str | None) -> Judge:
    """By an independent description of its names; of projections that are one (None), the rest is looked at."""

    def judge(_: str, original: Path, folder: Path) -> bool:
        wanted = of_torchtitan(original, qkv or "", head)
        wanted = {key: of for key, of in wanted.items() if qkv is not None or ".attention.w" not in key}
        found: dict[str, Any] = {key: torch.zeros_like(each) for key, each in wanted.items()}
        dcp.load(found, checkpoint_id=folder, no_dist=True)
        return bits(found) == bits(wanted)

    return judge


def _of_transformers(_: str, original: Path, folder: Path) -> bool:
    """By the class itself, of a folder that it loads or of DeepSpeed's files of its parameters."""
    wanted, zero = class_of(original).from_pretrained(original).state_dict(), folder / "global_step_universal/zero"
    if zero.exists():
        found = {name: torch.load(zero / name / "fp32.pt")["param"].reshape(of.shape) for name, of in wanted.items()}
    else:
        found = class_of(folder).from_pretrained(folder).state_dict()
    return all(torch.equal(found[name], wanted[name]) for name in wanted)


def _apart(case: str, _: Path, folder: Path) -> bool:
    """Whether gate and up of each layer are the halves of what Megatron-Core joins."""
    found = load_dcp(folder / "release").tensors
    joined = module("megatron", "check").golden(case, "dist")["decoder.layers.mlp.linear_fc1.weight"]
    names = [[f"decoder.layers.{layer}.mlp.linear_fc1.weight_{half}" for half in "wv"] for layer in range(len(joined))]
    return all((np.concatenate([found[name] for name in of]) == joined[layer]).all() for layer, of in enumerate(names))


class Exchange(NamedTuple):
    """Two sources of one shape in a file of a format's data, and who knows which is which in an oracle's case; without
    an oracle, of a model of the zoo.
    """

    data: str
    one: str
    other: str
    oracle: str | None
    case: str
    is_right: Judge
    tp: int = 2


LAYER, MLP = "model.layers.{layer}.", "model.layers.{layer}.mlp."
EXPERT = f"{MLP}experts.{{expert}}."
VLLM_LINE, WEIGHTS = ("**.gate_proj.*", "**.up_proj.*"), (f"{MLP}gate_proj.weight", f"{MLP}up_proj.weight")
MEGATRON = ("megatron.toml", f"{MLP}gate_proj.*", f"{MLP}up_proj.*", "megatron")
TRANSFORMERS = (
    "transformers.json", f"{EXPERT}gate_proj.weight", f"{EXPERT}up_proj.weight", None, "qwen3_moe", _of_transformers,
)  # fmt: skip
EXCHANGED: dict[str, Exchange | str] = {
    "vllm": Exchange("vllm.toml", *VLLM_LINE, "vllm", "llama-tp2", _of_vllm),
    "vllm-0.23": Exchange("vllm.toml", *VLLM_LINE, "vllm", "llama-tp2", _as_vllm(as_older)),
    "sglang": Exchange("sglang.toml", *VLLM_LINE, "vllm", "llama-tp2", _as_vllm(as_sglang)),
    "meta": Exchange("meta.toml", *WEIGHTS, "meta", "llama3-mp2", _of("meta")),
    "mistral": Exchange("mistral.toml", *WEIGHTS, "meta", "mistral-mp1", _of("meta"), tp=1),
    "deepseek": Exchange(
        "deepseek.toml", f"{EXPERT}gate_proj.*", f"{EXPERT}up_proj.*", "deepseek", "deepseek_v3-mp2", _of("deepseek")
    ),
    "megatron": Exchange(*MEGATRON, "llama-te-tp2", _of("megatron")),
    "megatron-local": Exchange(*MEGATRON, "llama-local-tp2", _of("megatron")),
    "megatron-legacy": Exchange(*MEGATRON, "llama-te-tp2", _of("megatron")),
    "megatron-legacy-local": Exchange(*MEGATRON, "llama-local-tp2", _of("megatron")),
    "megatron-legacy-sequential": Exchange(
        "megatron.toml", f"{LAYER}block_sparse_moe.experts.{{expert}}.w1.weight",
        f"{LAYER}block_sparse_moe.experts.{{expert}}.w3.weight", "megatron", "mixtral-teseq-tp2", _of("megatron"),
    ),
    "megatron-singleton": Exchange("megatron-singleton.toml", *MEGATRON[1:], "llama-te-tp2", _apart),
    "torchtitan": Exchange("torchtitan.toml", *WEIGHTS, None, "qwen3", _of_torchtitan("lm_head", "qkv_linear.")),
    "torchtitan-live": Exchange("torchtitan.toml", *WEIGHTS, None, "qwen3", _of_torchtitan("lm_head", None)),
    "torchtitan-0.2": Exchange(
        "torchtitan-0.2.toml", f"{LAYER}self_attn.k_proj.weight", f"{LAYER}self_attn.v_proj.weight", "meta",
        "llama3-mp2", _of_torchtitan("output", ""),
    ),
    "transformers": Exchange(*TRANSFORMERS),
    "deepspeed-universal": Exchange(*TRANSFORMERS, tp=1),
    "dcp": "it has no line: all names are the checkpoint's own",
}  # fmt: skip
"""Of each format what is exchanged in its data, or why there is nothing."""


@pytest.mark.parametrize("form", one_of_each(all_formats(), lambda form: form.partition("-")[0]))
def test_two_sources_that_are_exchanged_are_seen(form: str, tmp_path: Path) -> None:
    """By what the program itself holds. The bytes are mapped back by the same lines, and are the original's."""
    exchange = EXCHANGED[form]
    if isinstance(exchange, str):
        assert not format_of(form).rules.lines
        return
    data, *sources, oracle, case, is_right, tp = exchange
    original = checkpoint(oracle, case.partition("-")[0]) if oracle is not None else store.checkpoint(case)
    with swapped(tmp_path, data, *sources):
        split(original, tmp_path / "wrong", tp=tp, format=form)
        assert verify_exact(open_source(original), tmp_path / "wrong").verdict == "same"
    split(original, tmp_path / "right", tp=tp, format=form)
    assert [is_right(case, original, tmp_path / out) for out in ("right", "wrong")] == [True, False]


def test_from_one_program_to_another(tmp_path: Path) -> None:
    original = checkpoint("deepseek", "deepseek_v3")
    split(original, tmp_path / "vllm", tp=4, format="vllm")
    (tmp_path / "vllm" / "reshard.json").unlink()
    split(tmp_path / "vllm", tmp_path / "deepseek", tp=2, format="deepseek")
    split(tmp_path / "deepseek", tmp_path / "own", tp=8)
    split(tmp_path / "own", tmp_path / "last", tp=2, ep=2, same_ranks=True, format="vllm")
    merge(tmp_path / "last", tmp_path / "merged")
    assert _weights(tmp_path / "merged") == _weights(original)


def test_what_a_program_does_not_store_is_kept_for_the_way_back(tmp_path: Path) -> None:
    """DeepSeek's code and vLLM leave out the layer that predicts a further token; merge restores it."""
    plain = checkpoint("deepseek", "deepseek_v3")
    original = with_predicting_layer(plain, tmp_path / "original")
    for form in ("deepseek", "vllm"):
        for source, out in ((plain, "plain"), (original, form)):
            split(source, tmp_path / out, tp=2, format=form, overwrite=True)
        for file in (tmp_path / "plain").glob("model*.safetensors"):
            assert tensors_of([tmp_path / form / file.name]) == tensors_of([file])
        merge(tmp_path / form, tmp_path / "merged", overwrite=True)
        assert contents(tmp_path / "merged") == contents(original)
        (tmp_path / form / "reshard.json").unlink()
        (tmp_path / form / "reshard-kept.safetensors").unlink()
        merge(tmp_path / form, tmp_path / "merged", overwrite=True)
        assert _weights(tmp_path / "merged") == _weights(plain)
        shutil.rmtree(tmp_path / "merged")


@pytest.mark.parametrize(
    "model",
    one_of_each(["mamba2", "mamba", "falcon_mamba", "falcon_h1", "nemotron_h"], lambda model: model.endswith("_h")),
)
def test_what_is_kept_has_the_originals_dtype(model: str, tmp_path: Path) -> None:
    """vLLM holds -exp(A_log) in F32, whatever A_log is in; without the manifest, the file beside the shards says it."""
    original = store.checkpoint(model, "bfloat16")
    split(original, tmp_path / "vllm", tp=2, format="vllm")
    (tmp_path / "vllm" / "reshard.json").unlink()
    split(tmp_path / "vllm", tmp_path / "own", tp=2)
    for shards in ("vllm", "own"):
        merge(tmp_path / shards, tmp_path / "merged", overwrite=True)
        assert _weights(tmp_path / "merged") == _weights(original)


def test_files_of_another_rank_or_another_split_are_refused(tmp_path: Path) -> None:
    for model in ("llama", "llama_kv2"):
        split(checkpoint("vllm", model), tmp_path / model, tp=2, format="vllm")
        (tmp_path / model / "reshard.json").unlink()
    names = [f"model-rank-{rank}-part-0.safetensors" for rank in range(2)]
    shutil.copytree(tmp_path / "llama", tmp_path / "twice")
    shutil.copy(tmp_path / "llama" / names[0], tmp_path / "twice" / names[1])
    with pytest.raises(MismatchError, match="is a shard of rank 0, its name says rank 1"):
        merge(tmp_path / "twice", tmp_path / "merged")
    shutil.copy(tmp_path / "llama_kv2" / names[1], tmp_path / "twice" / names[1])
    with pytest.raises(MismatchError, match="are of different splits"):
        merge(tmp_path / "twice", tmp_path / "merged")
    (tmp_path / "twice" / names[0]).unlink()
    with pytest.raises(CheckpointError, match="rank 0 of 2 are missing"):
        merge(tmp_path / "twice", tmp_path / "merged")
    assert not (tmp_path / "merged").exists()
