"""Whether an engine computes the same from shards as from the original.

Three runs on the same tokens: the original in transformers, in float32 (the exact values); the original in the engine;
the shards in the engine, at their degree. The engine's *noise* is how far its run of the original is from the exact
values, the *error* how far its run of the shards is from its run of the original. Both are root mean squares over the
log-probabilities of all tokens at all positions. The error must be within ``LIMIT`` times the noise.

Megatron-Core loads no Hugging Face checkpoint, so transformers runs the original in its place: its run in the dtype of
the engine's stands for the engine's, and the exact values are those in the next wider dtype. What it
must be told of a model is in megatron_settings.toml.
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
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from formats.errors import CheckpointError, ReshardError, need_transformers, refused
from formats.mesh import Mesh
from formats.notation.expressions import read_expression
from formats.notation.format import Format
from formats.store import local_folder
from reshard.mesh.stages import with_stages
from reshard.model.model import Model
from reshard.source.source import Source
from verify.ending import temporary_folder
from verify.forward.noise import LIMIT

_DATA = Path(__file__).with_name("megatron_settings.toml")


def megatron_settings(model: Model, format: Format) -> dict[str, Any]:
    """The class of the model's settings in Megatron-Core, their values, the arguments of its model, and what a format
    of Megatron's means for the modules.

    Raises CheckpointError for a model that Megatron-Core cannot be told of.
    """
    data = tomllib.loads(_DATA.read_text(encoding="utf-8"))
    kind = format.types.name_of(model.config)
    if kind not in data["model_types"]:
        raise CheckpointError(f"how Megatron-Core runs a '{kind}' is not known: --engine megatron does not run it")

    def value(text: str, **indices: int) -> Any:
        return model.sizes.evaluate(read_expression(text), indices)

    for holds, why in data["demands"].items():
        if not value(holds):
            raise CheckpointError(f"--engine megatron does not run this '{kind}': {why}")
    layers = range(value(data["config"]["num_layers"]))
    config = {key: value(text) for key, text in data["config"].items()}
    config |= {key: [value(text, layer=layer) for layer in layers] for key, text in data["layers"].items()}
    further = 1 + max(_layers(model), default=-1) - len(layers)
    if further > 0:
        config["mtp_num_layers"] = further
    return {
        "class": next(name for holds, name in data["classes"].items() if value(holds)),
        "config": {key: found for key, found in config.items() if found is not None and found != [None] * len(layers)},
        "model": {key: value(text) for key, text in data["model"].items()},
        "form": data["forms"][format.name],
    }


def _layers(model: Model) -> Iterator[int]:
    """The layers that a model has tensors of; those that predict further tokens come behind the others."""
    axes = {kind: [*model.architecture.index_places(kind.name)] for kind in model.kinds}
    for tensor in model.tensors:
        at = dict(zip(axes[tensor.kind], tensor.at, strict=True))
        yield at.get(model.architecture.layers.text, -1)


@dataclass(frozen=True)
class Engine:
    """An engine: what people call it, the module that its environment must have, and the file that runs it there.

    ``loads_original``: it loads Hugging Face checkpoints too. ``any_mesh``: formats of its own (those with chunks) are
    loaded on any mesh, not only on that of their files. ``settings`` are what it must be told of a model.
    """

    title: str
    module: str
    runner: Path
    loads_original: bool
    any_mesh: bool = False
    settings: Callable[[Model, Format], dict[str, Any]] | None = None


_HERE = Path(__file__).parent
ENGINES = {
    "vllm": Engine("vLLM", "vllm", _HERE / "vllm_run.py", loads_original=True),
    "megatron": Engine(
        "Megatron-Core", "megatron", _HERE / "megatron_run.py", loads_original=False, any_mesh=True,
        settings=megatron_settings,
    ),
}  # fmt: skip
LARGEST_VOCABULARY = 300_000
LOUD = 0.1
"""Noise, as a part of the spread of the log-probabilities, from which an engine computes something else."""

Prompts = Sequence[Sequence[int]]


@dataclass(frozen=True)
class EngineOptions:
    """Which engine, in which Python, and what it runs: so many prompts of so many tokens.

    ``meshes`` are those on which it loads the shards; none: that of the shards. ``save``: a folder into which the
    engine saves what it has loaded (Megatron-Core).
    """

    name: str
    meshes: tuple[Mesh, ...] = ()
    python: str = sys.executable
    dtype: str = "float32"
    batch: int = 2
    seq: int = 16
    seed: int = 0
    timeout: float = 3600.0
    save: Path | None = None

    @property
    def engine(self) -> Engine:
        """What is known of the engine."""
        return ENGINES[self.name]


@dataclass(frozen=True)
class EngineReport:
    """What was measured, on each mesh or on one. ``noise`` and ``error`` are root mean squares of log-probabilities,
    ``worst`` is the largest single difference between the shards and the original, ``spread`` the standard deviation of
    the exact log-probabilities. ``runner`` ran the original.
    """

    engine: str
    runner: str
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
        return self.ratio <= LIMIT

    @property
    def verdict(self) -> str:
        """The answer in a sentence."""
        what = "the same" if self.is_same else "something else"
        is_own = self.runner == self.engine
        as_from = f"{'as' if self.is_same else 'than'} {'' if is_own else f'{self.runner} '}from the original"
        noise = "its own noise" if is_own else f"the noise of {self.runner}"
        return (
            f"{self.engine} computes {what} from the shards {as_from}: the error is {self.ratio:.3g} times {noise} "
            f"(the limit is {LIMIT:g})."
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
    """Run both in the engine and compare: of several meshes, the one with the largest error.

    Raises ReshardError if the engine cannot run, or computes something else.
    """
    _check_format(shards, options)
    baseline = run_original(original, options, progress)
    reports = [run_shards(baseline, shards, progress, mesh) for mesh in options.meshes or (shards.plan.mesh,)]
    worst = max(reports, key=lambda report: math.inf if math.isnan(report.error) else report.error)
    return replace(worst, mesh=f"{'; '.join(report.mesh for report in reports)}") if worst.is_same else worst


def _check_format(shards: Source, options: EngineOptions) -> None:
    format = shards.format
    if format.loading.engine != options.name:
        what = "reshard's own folders" if format.plain else f"the format '{format.name}'"
        raise CheckpointError(
            f"{shards.path} has {what}, which {options.name} does not load",
            f"'reshard split {shards.path} OUT --tp N --as {options.name}' writes what it loads",
        )
    if options.meshes and not (options.engine.any_mesh and format.container.chunks):
        why = f"{options.engine.title} loads the format '{format.name}' on its own mesh alone, {shards.plan.mesh}"
        raise refused("engine_mesh", None, why, advice="leave it out")


def run_original(
    original: Source, options: EngineOptions, progress: Callable[[str], None] = lambda _: None
) -> Baseline:
    """Run the original in transformers, and in the engine if that loads it.

    Raises ReshardError if one of them cannot run it, or the engine computes something else.
    """
    need_transformers("--engine")
    size = original.model.sizes.of({}).get("vocab")
    if size is None or size > LARGEST_VOCABULARY:
        raise CheckpointError(f"{original.path}: a vocabulary of {size} tokens is not run in an engine")
    prompts = random_prompts(size, options)
    progress("original in transformers")
    if not options.engine.loads_original:
        dtype = getattr(torch, options.dtype)
        exact = _in_transformers(original, prompts, torch.float64 if dtype == torch.float32 else torch.float32)
        whole = _in_transformers(original, prompts, dtype)
        _check_power(exact, whole, "transformers")
        return Baseline(options, size, prompts, exact, whole)
    exact = _in_transformers(original, prompts, torch.float32)
    with temporary_folder("reshard-engine-") as folder:
        progress(f"original in {options.name}")
        whole = _run(original, {"load_format": "auto"}, Mesh(), prompts, size, options, folder)
    _check_power(exact, whole, options.name)
    return Baseline(options, size, prompts, exact, whole)


def _check_power(exact: torch.Tensor, whole: torch.Tensor, runner: str) -> None:
    """Raise CheckpointError if the original itself differs so much that nothing can be seen of its shards."""
    spread, noise = float(exact.std()), _distance(whole, exact)
    if not noise <= LOUD * spread:
        raise CheckpointError(
            f"{runner} computes something else than transformers from the original itself: its log-probabilities "
            f"differ by {noise:.2g}, and they spread over {spread:.2g}",
            "give --compute-dtype float32; rounding, or a bug of one of them, hides whether the shards are right",
        )


def run_shards(
    baseline: Baseline, shards: Source, progress: Callable[[str], None] = lambda _: None, mesh: Mesh | None = None
) -> EngineReport:
    """Run shards in the engine, on their own mesh or another, and compare.

    Raises ReshardError if the engine cannot run them.
    """
    options, format, mesh = baseline.options, shards.format, with_stages(shards.model, mesh or shards.plan.mesh)
    _check_format(shards, options)
    further: dict[str, Any] = {"load_format": str(format.loading.engine_format)}
    if options.engine.settings is not None:
        further = {"settings": options.engine.settings(shards.model, format)}
    with temporary_folder("reshard-engine-") as folder:
        progress(f"shards in {options.name} on {mesh}")
        parts = _run(shards, further, mesh, baseline.prompts, baseline.size, options, folder)
    return EngineReport(
        options.name, options.name if options.engine.loads_original else "transformers", str(mesh), options.dtype,
        sum(map(len, baseline.prompts)), float(baseline.exact.std()), _distance(baseline.whole, baseline.exact),
        _distance(parts, baseline.whole), float((parts - baseline.whole).abs().max()),
    )  # fmt: skip


def _distance(one: torch.Tensor, other: torch.Tensor) -> float:
    """The root mean square of the differences."""
    return float((one - other).square().mean().sqrt())


def random_prompts(size: int, options: EngineOptions) -> list[list[int]]:
    """Prompts of random tokens."""
    draw = random.Random(options.seed)
    return [[draw.randrange(size) for _ in range(options.seq)] for _ in range(options.batch)]


def _in_transformers(original: Source, prompts: Prompts, dtype: torch.dtype) -> torch.Tensor:
    """The original's log-probabilities: ``[positions, tokens]``, those of the first token left out."""
    import transformers

    from verify.rank.loading import quiet_transformers
    from verify.rank.trace import NoLessThanFloat64

    wide = NoLessThanFloat64() if dtype == torch.float64 else contextlib.nullcontext()
    with quiet_transformers(), torch.no_grad(), wide:
        model = transformers.AutoModelForCausalLM.from_pretrained(
            original.path, dtype=dtype, attn_implementation="eager", experts_implementation="eager"
        )
        logits: torch.Tensor = model.eval()(input_ids=torch.tensor(prompts)).logits.double()
    return logits.log_softmax(-1)[:, :-1].flatten(0, 1)


def _run(
    source: Source, further: Mapping[str, Any], mesh: Mesh, prompts: Prompts, size: int, options: EngineOptions,
    work: Path,
) -> torch.Tensor:  # fmt: skip
    """The engine's log-probabilities, as ``_in_transformers`` has them."""
    degrees, out = dict(mesh.degrees), work / "answer.json"
    tp = degrees.get("tp", 1)
    request = {
        "folder": str(local_folder(source.path).resolve()), "tp": tp, "pp": degrees.get("pp", 1), "stages": mesh.stages,
        "ep": degrees.get("ep", 1), "etp": 1 if mesh.same_ranks else tp, "dtype": options.dtype, "vocabulary": size,
        "prompts": prompts, "out": str(out), "save": str(options.save) if options.save else None, **further,
    }  # fmt: skip
    (work / "request.json").write_text(json.dumps(request), encoding="utf-8")
    _call([options.python, str(options.engine.runner), str(work / "request.json")], options, out)
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
        advice = f"give the python of an environment with {options.engine.title}"
        raise refused("engine_python", command[0], error.strerror or str(error), advice=advice) from None
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
            f"{options.name} ended with status {process.returncode}: {reason_of(said)}",
            _hint(said, command, options.engine),
        )


def reason_of(said: str) -> str:
    """What an engine's output says went wrong: its first exception that is not of the engine's own processes."""
    errors = _EXCEPTION.findall(said)
    root = next((error for error in errors if "engine" not in error.lower()), None)
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    return root or (errors or lines or ["it said nothing"])[-1]


_EXCEPTION = re.compile(r"(?<![\w.])([\w.]*(?:Error|Exception)(?:: .+)?)$", re.MULTILINE)


def _hint(said: str, command: Sequence[str], engine: Engine) -> str | None:
    if f"No module named '{engine.module}" in said:
        return f"{command[0]} has no {engine.title}: give the python of an environment that has it with --engine-python"
    return None
