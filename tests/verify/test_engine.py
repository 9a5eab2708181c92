"""verify --engine, with a stand-in for vLLM: it merges what it is given and runs that."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from reshard.api import split
from reshard.formats.mesh import Mesh
from reshard.verify.engine.compare import Baseline, EngineOptions, Tokens, check_power
from tests import store
from tests.marks import thorough
from tests.support import change_tensor, command, python_with
from tests.verify.test_launch import assert_gone

STAND_IN = '''
"""A Llama in numpy, which a process imports in a tenth of the time that transformers takes."""
import json, os, tempfile, time
from pathlib import Path
from types import SimpleNamespace
import numpy as np
from safetensors.numpy import load_file

class SamplingParams:
    def __init__(self, **settings): pass

def normed(x, weight, eps):
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * weight

def turned(x, theta):
    """Rotary positions, [position, head, channel]: the second half of the channels beside the first."""
    half = x.shape[-1] // 2
    angles = np.arange(len(x))[:, None] / theta ** (np.arange(half) / half)
    cos, sin = np.cos(angles)[:, None], np.sin(angles)[:, None]
    a, b = x[..., :half], x[..., half:]
    return np.concatenate([a * cos - b * sin, b * cos + a * sin], -1)

def attended(q, k, v):
    scores = np.einsum("qhd,khd->hqk", q, k.repeat(q.shape[1] // k.shape[1], 1)) / q.shape[-1] ** 0.5
    scores = np.exp(np.where(np.tri(len(q), dtype=bool), scores, -np.inf))
    weights = scores / scores.sum(-1, keepdims=True)
    return np.einsum("hqk,khd->qhd", weights, v.repeat(q.shape[1] // v.shape[1], 1)).reshape(len(q), -1)

class LLM:
    def __init__(self, model, load_format, dtype, tensor_parallel_size, **settings):
        if os.environ.get("STAND_IN", "").startswith("waits"):
            Path(os.environ["STAND_IN"].removeprefix("waits ")).write_text(str(os.getpid()))
            time.sleep(600)
        if os.environ.get("STAND_IN") == "refuses":
            raise KeyError("model.layers.0.self_attn.qkv_proj.weight")
        if load_format == "sharded_state":
            assert tensor_parallel_size == 2
            from reshard import merge
            self.scratch = tempfile.TemporaryDirectory()
            folder = Path(self.scratch.name) / "merged"
            merge(model, folder)
            model = folder
        assert dtype == "float32"
        self.config = json.loads((Path(model) / "config.json").read_text())
        self.tensors = load_file(Path(model) / "model.safetensors")

    def logits(self, ids):
        tensors, config = self.tensors, self.config
        head, eps, theta = config["head_dim"], config["rms_norm_eps"], config["rope_parameters"]["rope_theta"]
        x = tensors["model.embed_tokens.weight"][ids]
        for layer in range(config["num_hidden_layers"]):
            w = {name: tensors[f"model.layers.{layer}.{name}.weight"] for name in NAMES}
            y = normed(x, w["input_layernorm"], eps)
            q, k, v = ((y @ w[f"self_attn.{name}_proj"].T).reshape(len(y), -1, head) for name in "qkv")
            x = x + attended(turned(q, theta), turned(k, theta), v) @ w["self_attn.o_proj"].T
            y = normed(x, w["post_attention_layernorm"], eps)
            gate = y @ w["mlp.gate_proj"].T
            x = x + gate / (1 + np.exp(-gate)) * (y @ w["mlp.up_proj"].T) @ w["mlp.down_proj"].T
        return normed(x, tensors["model.norm.weight"], eps) @ tensors["lm_head.weight"].T

    def generate(self, prompts, sampling):
        for prompt in prompts:
            found = self.logits(prompt["prompt_token_ids"])
            found = found - np.log(np.exp(found).sum(-1, keepdims=True))
            found = found * (1 + 1e-6) if os.environ.get("STAND_IN") != "exact" else found
            found = -found if os.environ.get("STAND_IN") == "wrong" else found
            steps = [{i: SimpleNamespace(logprob=float(x)) for i, x in enumerate(step)} for step in found[:-1]]
            yield SimpleNamespace(prompt_logprobs=[None, *steps])

NAMES = ["input_layernorm", "post_attention_layernorm"]
NAMES += [f"self_attn.{name}_proj" for name in "qkvo"] + [f"mlp.{name}_proj" for name in ("gate", "up", "down")]
'''


@pytest.fixture
def engine(tmp_path: Path) -> Path:
    """A Python in which ``vllm`` is the stand-in."""
    (tmp_path / "vllm.py").write_text(STAND_IN)
    return python_with(tmp_path / "python", tmp_path, Path(__file__).parents[2])


def _shards(folder: Path) -> tuple[Path, Path]:
    original = store.checkpoint("llama")
    done = command("split", original, folder / "out", "--tp", "2", "--as", "vllm")
    assert done.returncode == 0, done.stderr
    return original, folder / "out"


def _verify(*arguments: object) -> tuple[int, str, str]:
    done = command("verify", *arguments, "--engine", "vllm")
    return done.returncode, done.stdout, done.stderr


def test_the_engine_runs_both(engine: Path, tmp_path: Path) -> None:
    original, out = _shards(tmp_path)
    code, said, _ = _verify(original, out, "--exact-only", "--engine-python", engine)
    assert code == 0 and "vllm: the shards (tp 2) against the original" in said
    assert "vllm computes the same from the shards as from the original, bit for bit." in said


def test_what_the_engine_cannot_load_is_one_line(engine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original, shards = _shards(tmp_path)
    monkeypatch.setenv("STAND_IN", "refuses")
    code, answer, said = _verify(original, shards, "--exact-only", "--engine-python", engine)
    assert code == 2 and "Error: vllm ended with status 1: KeyError: 'model.layers.0.self_attn.qkv_proj.weight'" in said
    assert "The engine's run could not be checked: vllm ended" in answer


def test_an_engine_that_computes_something_else_proves_nothing(
    engine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original, out = _shards(tmp_path)
    monkeypatch.setenv("STAND_IN", "wrong")
    code, _, said = _verify(original, out, "--exact-only", "--engine-python", engine)
    assert code == 2 and "vllm and transformers compute different log-probabilities" in said


@thorough
def test_an_interrupted_command_leaves_no_engine_behind(engine: Path, tmp_path: Path) -> None:
    original, out = _shards(tmp_path)
    begun, words = tmp_path / "begun", ["--exact-only", "--engine", "vllm", "--engine-python", str(engine)]
    process = subprocess.Popen(
        [sys.executable, "-m", "reshard", "verify", original, out, *words], cwd=Path(__file__).parents[2],
        env={**os.environ, "STAND_IN": f"waits {begun}"}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    while process.poll() is None and not (begun.exists() and begun.read_text()):
        time.sleep(0.05)
    pid = int(begun.read_text())
    process.send_signal(signal.SIGINT)
    assert process.communicate(timeout=60)[1].endswith("reshard: interrupted\n")
    assert_gone([pid])


def test_without_the_engine(tmp_path: Path) -> None:
    original, out = _shards(tmp_path)
    code, _, said = _verify(original, out, "--exact-only", "--engine-python", tmp_path / "none")
    assert (
        code == 2 and f"Error: --engine-python {tmp_path / 'none'} is not possible: No such file or directory" in said
    )
    code, _, said = _verify(original, out, "--exact-only")
    assert code == 2 and "has no vLLM" in said


def test_only_what_the_engine_loads(engine: Path, tmp_path: Path) -> None:
    original, own = store.checkpoint("llama"), store.shards("llama", tp=2)
    code, _, said = _verify(original, own, "--exact-only", "--engine-python", engine)
    assert code == 2 and "which vllm does not load" in said
    split(original, tmp_path / "legacy", tp=2, format="megatron-legacy")
    code, _, said = _verify(original, tmp_path / "legacy", "--exact-only", "--engine-python", engine)
    assert code == 2 and "has the format 'megatron-legacy', which vllm does not load" in said
    done = command("verify", original, own, "--exact-only", "--engine-python", sys.executable)
    assert done.returncode == 2 and "--engine-python is not possible: no engine is asked for" in done.stderr


def test_wrong_shards_are_seen(engine: Path, tmp_path: Path) -> None:
    """The bytes alone would see it, too; here only the engine looks."""
    from reshard.source.opening import open_source
    from reshard.verify.engine.compare import run_engine

    original, out = _shards(tmp_path)
    (out / "reshard.json").unlink()
    file = out / "model-rank-1-part-0.safetensors"
    for at in range(3, 64, 4):
        change_tensor(file, "model.layers.0.self_attn.qkv_proj.weight", at=at, flip=0x80)
    report = run_engine(open_source(original), open_source(out), EngineOptions(str(engine)))
    assert not report.is_same and report.ratio > 100
    assert "vllm computes something else from the shards" in report.verdict


@pytest.mark.parametrize("noise", [1e-6, 0.05, 0.099])
@pytest.mark.parametrize("garbage", [True, False])
def test_garbage_at_one_position_is_seen(garbage: bool, noise: float) -> None:
    """However much the engine rounds; and what it rounds otherwise, with a position that rounds more, is the same."""
    draw = torch.Generator().manual_seed(0)

    def values(scale: torch.Tensor | float = 1.0) -> torch.Tensor:
        return torch.randn(30, 1000, generator=draw, dtype=torch.float64) * scale

    exact, scales = values(), torch.full((30, 1), noise, dtype=torch.float64)
    scales[7] *= 6
    scales *= noise / scales.square().mean().sqrt() / 1.01
    whole, parts = (exact + values(scales) for _ in range(2))
    if garbage:
        parts[17] = values()[17]
    check_power(exact, whole, "vllm")
    report = Baseline(Tokens(EngineOptions(), 1000, [[0] * 31]), exact, whole).report("vllm", Mesh(), parts)
    assert report.is_same is not garbage
    assert not garbage or (report.place == "position 17" and report.place in report.verdict)
