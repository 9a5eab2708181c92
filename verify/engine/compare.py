"""Does vLLM compute the same from shards as from the original? A comparison of log-probabilities.

Three runs on the same tokens: the original in transformers, in float32 (the exact values); the original in vLLM; the
shards in vLLM, at their degree. The engine's *noise* is how far its run of the original is from the exact values, the
*error* how far its run of the shards is from its run of the original. Both are root mean squares over the
log-probabilities of all tokens, at all positions and at each. The error must be within ``LIMIT`` times the noise: that
of all positions or, at one, its own if that is larger.
"""

from __future__ import annotations

import contextlib
import json
import math
import random
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from reshard.formats.errors import CheckpointError, ReshardError
from reshard.formats.mesh import Mesh
from reshard.formats.store import local_folder
from reshard.source.source import Source
from reshard.verify.ending import run_program, temporary_folder
from reshard.verify.forward.noise import LIMIT
from reshard.verify.loader.ask import python_of

RUNNER = Path(__file__).with_name("vllm_run.py")
LARGEST_VOCABULARY = 300_000
LOUD = 0.1
"""Noise, as a part of the spread of the log-probabilities, from which an engine computes something else."""

Prompts = Sequence[Sequence[int]]


@dataclass(frozen=True)
class EngineOptions:
    """In which Python the engine is, and what it runs: so many prompts of so many tokens."""

    python: str = sys.executable
    dtype: str = "float32"
    batch: int = 2
    seq: int = 16
    seed: int = 0
    timeout: float = 3600.0


@dataclass(frozen=True)
class EngineReport:
    """The measurements of an engine's runs, of log-probabilities."""

    engine: str
    mesh: str
    dtype: str
    tokens: int
    spread: float
    """The standard deviation of the exact ones."""
    noise: float
    """The root mean square of the engine's distance from transformers, for the original."""
    error: float
    """The root mean square of the shards' distance from the original, in the engine."""
    worst: float
    """The largest single difference between the shards and the original."""
    ratio: float
    """The largest error over noise."""
    place: str
    """The place of that ratio: all positions, or one."""

    @property
    def is_same(self) -> bool:
        """Whether the error is within the noise; False for NaN."""
        return self.ratio <= LIMIT

    @property
    def verdict(self) -> str:
        """The answer in a sentence."""
        if self.worst == 0:
            return f"{self.engine} computes the same from the shards as from the original, bit for bit."
        what = "the same from the shards as" if self.is_same else "something else from the shards than"
        return (
            f"{self.engine} computes {what} from the original: the error is {self.ratio:.3g} times its own noise at "
            f"{self.place} (the limit is {LIMIT:g})."
        )

    def __str__(self) -> str:
        return (
            f"{self.engine}: the shards ({self.mesh}) against the original, {self.tokens} tokens in {self.dtype}: log-"
            f"probabilities differ by {self.error:.2g} (noise {self.noise:.2g}, largest {self.worst:.2g}, spread "
            f"{self.spread:.2g})"
        )


@dataclass(frozen=True)
class Tokens:
    """The tokens of a run: prompts of random tokens from a vocabulary of this size."""

    options: EngineOptions
    vocabulary: int
    prompts: Prompts


@dataclass(frozen=True)
class Baseline:
    """Results of the original: the exact values (``[positions, tokens]``), and those that the engine computes."""

    tokens: Tokens
    exact: torch.Tensor
    whole: torch.Tensor

    def report(self, engine: str, mesh: Mesh, parts: torch.Tensor) -> EngineReport:
        """Compare with what the engine computes from shards."""
        noise, error = _distance(self.whole, self.exact), _distance(parts, self.whole)
        noises, errors = (apart.square().mean(1).sqrt() for apart in (self.whole - self.exact, parts - self.whole))
        ratios = {"all positions": _over(error, noise)}
        ratios |= {
            f"position {at}": _over(float(errors[at]), max(noise, float(noises[at]))) for at in range(len(errors))
        }
        place = max(ratios, key=lambda key: math.inf if math.isnan(ratios[key]) else ratios[key])
        return EngineReport(
            engine, str(mesh), self.tokens.options.dtype, sum(map(len, self.tokens.prompts)), float(self.exact.std()),
            noise, error, float((parts - self.whole).abs().max()), ratios[place], place,
        )  # fmt: skip


def run_engine(
    original: Source, shards: Source, options: EngineOptions, progress: Callable[[str], None] = lambda _: None
) -> EngineReport:
    """Run the original in transformers and in vLLM, the shards in vLLM on their own mesh, and compare.

    Raises ReshardError if one of them cannot run them (see ``check_run``, which runs nothing), or vLLM computes
    something else of the original itself.
    """
    return run_shards(run_original(original, options, progress), shards, progress)


def check_run(original: Source, shards: Source, options: EngineOptions) -> None:
    """Raise CheckpointError unless vLLM loads the shards' format, and the original's vocabulary can be run."""
    tokens_of(original, options)
    format = shards.format
    if format.loading.engine != "vllm":
        what = "reshard's own folders" if format.plain else f"the format '{format.name}'"
        raise CheckpointError(
            f"{shards.path} has {what}, which vllm does not load",
            f"'reshard split {shards.path} OUT --tp N --as vllm' writes what it loads",
        )


def run_original(
    original: Source, options: EngineOptions, progress: Callable[[str], None] = lambda _: None
) -> Baseline:
    """Run the original in transformers and in vLLM. Raises ReshardError."""
    tokens = tokens_of(original, options)
    progress("original in transformers")
    exact = in_transformers(original, tokens, torch.float32)
    progress("original in vllm")
    whole = in_engine("vllm", RUNNER, {"load_format": "auto"}, original, Mesh(), tokens)
    check_power(exact, whole, "vllm")
    return Baseline(tokens, exact, whole)


def check_power(exact: torch.Tensor, whole: torch.Tensor, runner: str) -> None:
    """Raise CheckpointError if the original itself differs so much that nothing can be seen of its shards."""
    spread, noise = float(exact.std()), _distance(whole, exact)
    if not noise <= LOUD * spread:
        raise CheckpointError(
            f"{runner} and transformers compute different log-probabilities from the original itself: these "
            f"differ by {noise:.2g}, and they spread over {spread:.2g}",
            "give --compute-dtype float32; rounding, or a bug of one of them, hides whether the shards are right",
        )


def run_shards(baseline: Baseline, shards: Source, progress: Callable[[str], None] = lambda _: None) -> EngineReport:
    """Run shards of a format that vLLM loads. Raises ReshardError."""
    mesh, load_format = shards.plan.mesh, shards.format.loading.engine_format
    progress(f"shards in vllm on {mesh}")
    parts = in_engine("vllm", RUNNER, {"load_format": load_format}, shards, mesh, baseline.tokens)
    return baseline.report("vllm", mesh, parts)


def _over(error: float, noise: float) -> float:
    return error / noise if noise else (0.0 if error == 0 else math.inf)


def _distance(one: torch.Tensor, other: torch.Tensor) -> float:
    """The root mean square of the differences."""
    return float((one - other).square().mean().sqrt())


def tokens_of(original: Source, options: EngineOptions) -> Tokens:
    """Random tokens of a model's vocabulary. Raises CheckpointError if it is too large."""
    size = original.model.sizes.of({}).get("vocab")
    if size is None or size > LARGEST_VOCABULARY:
        raise CheckpointError(f"{original.path}: a vocabulary of {size} tokens is not run in an engine")
    draw = random.Random(options.seed)
    return Tokens(options, size, [[draw.randrange(size) for _ in range(options.seq)] for _ in range(options.batch)])


def in_transformers(original: Source, tokens: Tokens, dtype: torch.dtype) -> torch.Tensor:
    """The original's log-probabilities: ``[positions, tokens]``, those of the first token left out."""
    from transformers import AutoModelForCausalLM

    from reshard.verify.rank.loading import from_pretrained
    from reshard.verify.rank.trace import NoLessThanFloat64

    with torch.no_grad(), NoLessThanFloat64() if dtype == torch.float64 else contextlib.nullcontext():
        model = from_pretrained(AutoModelForCausalLM, local_folder(original.path), dtype, {}).model
        logits: torch.Tensor = model(input_ids=torch.tensor(tokens.prompts)).logits.double()
    return logits.log_softmax(-1)[:, :-1].flatten(0, 1)


def in_engine(
    name: str, runner: Path, further: Mapping[str, Any], source: Source, mesh: Mesh, tokens: Tokens
) -> torch.Tensor:
    """An engine's log-probabilities, as ``in_transformers`` has them: ``runner`` runs in the engine's environment."""
    degrees, tp, options = dict(mesh.degrees), dict(mesh.degrees).get("tp", 1), tokens.options
    with temporary_folder("reshard-engine-") as work:
        out = work / "answer.json"
        request = {
            "folder": str(local_folder(source.path).resolve()), "tp": tp, "pp": degrees.get("pp", 1),
            "ep": degrees.get("ep", 1), "etp": 1 if mesh.same_ranks else tp, "dtype": options.dtype,
            "vocabulary": tokens.vocabulary, "prompts": tokens.prompts, "out": str(out), **further,
        }  # fmt: skip
        (work / "request.json").write_text(json.dumps(request), encoding="utf-8")
        command = [python_of(options.python), str(runner), str(work / "request.json")]
        status, output = run_program(command, name, options.timeout, work)
        if status or not out.exists():
            raise ReshardError(f"{name} ended with status {status}: {reason_of(output)}")
        answer: list[Any] = json.loads(out.read_text(encoding="utf-8"))
    return torch.tensor(answer, dtype=torch.float64).flatten(0, 1)


def reason_of(output: str) -> str:
    """Return the first exception in an engine's output that is not of the engine's own processes; else its last
    words.
    """
    errors = _EXCEPTION.findall(output)
    root = next((error for error in errors if "engine" not in error.lower()), None)
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    return root or (errors or lines or ["it said nothing"])[-1]


_EXCEPTION = re.compile(r"(?<![\w.])([\w.]*(?:Error|Exception)(?:: .+)?)$", re.MULTILINE)
