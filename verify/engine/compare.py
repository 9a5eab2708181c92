"""Whether an engine computes the same from shards as from the original.

Three runs on the same tokens: the original in transformers, in float32 (the exact values); the original in the engine;
the shards in the engine, at their degree. The engine's *noise* is how far its run of the original is from the exact
values, the *error* how far its run of the shards is from its run of the original. Both are root mean squares over the
log-probabilities of all tokens at all positions. The error must be within ``FACTOR`` times the noise.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from formats.errors import CheckpointError, ReshardError
from formats.mesh import Mesh
from reshard.storage.source import Source
from verify.ending import temporary_folder
from verify.forward.noise import FACTOR

RUNNERS = {"vllm": Path(__file__).with_name("vllm_run.py")}
LARGEST_VOCABULARY = 300_000
LOUD = 0.1
"""Noise, as a part of the spread of the log-probabilities, from which an engine computes something else."""

Prompts = Sequence[Sequence[int]]


@dataclass(frozen=True)
class EngineOptions:
    """Which engine, in which Python, and what it runs: so many prompts of so many tokens."""

    name: str
    python: str = sys.executable
    dtype: str = "float32"
    batch: int = 2
    seq: int = 16
    seed: int = 0
    timeout: float = 3600.0


@dataclass(frozen=True)
class EngineReport:
    """What was measured. ``noise`` and ``error`` are root mean squares of log-probabilities, ``worst`` is the largest
    single difference between the shards and the original in the engine, ``spread`` the standard deviation of the exact
    log-probabilities.
    """

    engine: str
    mesh: str
    dtype: str
    tokens: int
    spread: float
    noise: float
    error: float
    worst: float

    @property
    def ratio(self) -> float:
        """Error over noise."""
        return self.error / self.noise if self.noise else (0.0 if self.error == 0 else math.inf)

    @property
    def is_same(self) -> bool:
        """Whether the error is within the noise. Not so of NaN."""
        return self.ratio <= FACTOR

    @property
    def verdict(self) -> str:
        """The answer in a sentence."""
        what = "the same" if self.is_same else "something else"
        return (
            f"{self.engine} computes {what} from the shards as from the original: the error is {self.ratio:.3g} times "
            f"its own noise (the limit is {FACTOR:g})."
        )

    def __str__(self) -> str:
        return (
            f"{self.engine}: the shards ({self.mesh}) against the original, {self.tokens} tokens in {self.dtype}: log-"
            f"probabilities differ by {self.error:.2g} (noise {self.noise:.2g}, largest {self.worst:.2g}, spread "
            f"{self.spread:.2g})"
        )


@dataclass(frozen=True)
class Baseline:
    """What the original gives: the exact values (``[positions, tokens]``), and those that the engine computes."""

    options: EngineOptions
    size: int
    prompts: Prompts
    exact: torch.Tensor
    whole: torch.Tensor


def run_engine(
    original: Source, shards: Source, options: EngineOptions, progress: Callable[[str], None] = lambda _: None
) -> EngineReport:
    """Run both in the engine and compare. Raises ReshardError if the engine cannot run, or computes something else."""
    _check_format(shards, options)
    return run_shards(run_original(original, options, progress), shards, progress)


def _check_format(shards: Source, options: EngineOptions) -> None:
    page = shards.page
    if page is None or page.engine != options.name:
        what = f"the format '{page.name}'" if page else "reshard's own folders"
        raise CheckpointError(
            f"{shards.path} has {what}, which {options.name} does not load",
            f"'reshard split {shards.path} OUT --tp N --as {options.name}' writes what it loads",
        )


def run_original(
    original: Source, options: EngineOptions, progress: Callable[[str], None] = lambda _: None
) -> Baseline:
    """Run the original in transformers and in the engine.

    Raises ReshardError if one of them cannot run it, or the engine computes something else.
    """
    size = original.model.sizes.of({}).get("vocab")
    if size is None or size > LARGEST_VOCABULARY:
        raise CheckpointError(f"{original.path}: a vocabulary of {size} tokens is not run in an engine")
    prompts = random_prompts(size, options)
    progress("original in transformers")
    exact = _exact(original, prompts)
    with temporary_folder("reshard-engine-") as folder:
        progress(f"original in {options.name}")
        whole = _run(original.path, "auto", Mesh(), prompts, size, options, folder)
    spread, noise = float(exact.std()), _distance(whole, exact)
    if not noise <= LOUD * spread:
        raise CheckpointError(
            f"{options.name} computes something else than transformers from the original itself: its log-probabilities "
            f"differ by {noise:.2g}, and they spread over {spread:.2g}",
            "give --dtype float32; a bug of the engine's, or of transformers', hides whether the shards are right",
        )
    return Baseline(options, size, prompts, exact, whole)


def run_shards(baseline: Baseline, shards: Source, progress: Callable[[str], None] = lambda _: None) -> EngineReport:
    """Run shards in the engine, and compare. Raises ReshardError if the engine cannot run them."""
    options, page = baseline.options, shards.page
    _check_format(shards, options)
    assert page is not None
    with temporary_folder("reshard-engine-") as folder:
        progress(f"shards in {options.name} on {shards.plan.mesh.size} ranks")
        parts = _run(
            shards.path, str(page.load_format), shards.plan.mesh, baseline.prompts, baseline.size, options, folder
        )
    return EngineReport(
        options.name, str(shards.plan.mesh), options.dtype, sum(map(len, baseline.prompts)),
        float(baseline.exact.std()), _distance(baseline.whole, baseline.exact), _distance(parts, baseline.whole),
        float((parts - baseline.whole).abs().max()),
    )  # fmt: skip


def _distance(one: torch.Tensor, other: torch.Tensor) -> float:
    """The root mean square of the differences."""
    return float((one - other).square().mean().sqrt())


def random_prompts(size: int, options: EngineOptions) -> list[list[int]]:
    """Prompts of random tokens."""
    draw = random.Random(options.seed)
    return [[draw.randrange(size) for _ in range(options.seq)] for _ in range(options.batch)]


def _exact(original: Source, prompts: Prompts) -> torch.Tensor:
    """The original's log-probabilities in float32: ``[positions, tokens]``, those of the first token left out."""
    import transformers

    from verify.rank.loading import quiet_transformers

    with quiet_transformers(), torch.no_grad():
        model = transformers.AutoModelForCausalLM.from_pretrained(original.path, dtype=torch.float32)
        logits: torch.Tensor = model.eval()(input_ids=torch.tensor(prompts)).logits.double()
    return logits.log_softmax(-1)[:, :-1].flatten(0, 1)


def _run(
    folder: Path, load_format: str, mesh: Mesh, prompts: Prompts, size: int, options: EngineOptions, work: Path
) -> torch.Tensor:
    """The engine's log-probabilities, as ``_exact`` has them."""
    degrees, out = dict(mesh.degrees), work / "answer.json"
    request = {
        "folder": str(folder.resolve()), "load_format": load_format, "tp": degrees.get("tp", 1),
        "pp": degrees.get("pp", 1), "ep": mesh.same_ranks, "dtype": options.dtype, "vocabulary": size,
        "prompts": prompts, "out": str(out),
    }  # fmt: skip
    (work / "request.json").write_text(json.dumps(request), encoding="utf-8")
    _call([options.python, str(RUNNERS[options.name]), str(work / "request.json")], options, out)
    found: list[Any] = json.loads(out.read_text(encoding="utf-8"))
    out.unlink()
    return torch.tensor(found, dtype=torch.float64).flatten(0, 1)


def _call(command: Sequence[str], options: EngineOptions, out: Path) -> None:
    """Run the engine in a session of its own, so that all of its processes end with it."""
    started = time.monotonic()
    try:
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, start_new_session=True,
            text=True, errors="replace",
        )  # fmt: skip
    except OSError as error:
        raise CheckpointError(
            f"--engine-python {command[0]}: {error.strerror or error}", "give the python of an environment with vLLM"
        ) from None
    try:
        said, _ = process.communicate(timeout=options.timeout)
    except subprocess.TimeoutExpired:
        raise ReshardError(
            f"{options.name} has not ended after {time.monotonic() - started:.0f} s", "give a longer --timeout"
        ) from None
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    if process.returncode or not out.exists():
        raise ReshardError(
            f"{options.name} ended with status {process.returncode}: {_reason(said)}", _hint(said, command)
        )


def _reason(said: str) -> str:
    """What an engine's output says went wrong: its first exception that is not of the engine's own processes."""
    errors = _EXCEPTION.findall(said)
    root = next((error for error in errors if "engine" not in error.lower()), None)
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    return root or (errors or lines or ["it said nothing"])[-1]


_EXCEPTION = re.compile(r"(?<![\w.])([\w.]*(?:Error|Exception)(?:: .+)?)$", re.MULTILINE)


def _hint(said: str, command: Sequence[str]) -> str | None:
    if "No module named 'vllm'" in said:
        return f"{command[0]} has no vLLM: give the python of an environment that has it with --engine-python"
    return None
