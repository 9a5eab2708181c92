"""The job that ranks are given, and their results."""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from reshard.mesh.plan import Box, Plan, make_plan
from reshard.model.model import Kind
from reshard.source.source import UNSPLIT, Source
from reshard.text import Result as Printed
from reshard.text import human_bytes
from reshard.verify.forward.noise import Distance, Yardstick
from reshard.verify.rank.device import backend, count, names
from reshard.verify.run_settings import RunSettings


@dataclass(frozen=True, kw_only=True)
class ForwardOptions(RunSettings):
    """Settings of a run. ``draws`` is the number of further samples of the original's rounding that are taken
    at first.
    """

    draws: int = 7


@dataclass(frozen=True)
class Job:
    """A comparison."""

    original: Source
    shards: Source
    plan: Plan
    """The plan of the ranks' models, whose weights are plain."""
    dtype: torch.dtype
    ids: Any
    options: ForwardOptions
    is_built_in: bool
    """Whether its rules are the built-in ones."""
    adapter: Path | None = None
    """The folder of an adapter that the original is run with."""
    stored: torch.dtype = torch.float32
    """The dtype of the original's weights, to which a sum with the adapter was rounded."""
    is_alone: bool = False
    """Whether the shards have the adapter alone."""
    is_written: bool = False
    """Whether the original's tensors are written into another folder: transformers would load others from its own."""
    has_equal_bytes: bool = False
    """Whether the bytes were compared, and are equal."""

    @property
    def exact_dtype(self) -> torch.dtype:
        """The dtype of the run that all others are measured against."""
        return torch.float64 if self.dtype == torch.float32 else torch.float32


def run_plan(shards: Source) -> Plan:
    """Return the plan for a run of shards: their own or, for chunks, which any mesh loads, that of the whole model."""
    return shards.plan if shards.chunks is None else make_plan(shards.plan.model, UNSPLIT)


def is_loaded(shards: Source) -> bool:
    """Whether transformers loads a rank's own folder; if not, a folder is written for it first."""
    return shards.format.plain and (shards.checkpoint is None or not shards.checkpoint.renamed)


@dataclass(frozen=True)
class Mismatch:
    """A position where the most likely token differs. ``margin`` is the reference's lead of the first over the second,
    in logits.
    """

    position: int
    expected: int
    found: int
    margin: float


@dataclass(frozen=True)
class Logits:
    """The shards' logits against the high-precision original's, beside the original's own in its dtype (``own_``)."""

    max_error: float
    own_max_error: float
    relative_error: float
    own_relative_error: float
    kl: float
    own_kl: float
    agreement: float
    own_agreement: float
    positions: int
    mismatches: tuple[Mismatch, ...]
    histogram: tuple[tuple[float, int, int], ...]


@dataclass(frozen=True)
class Failure:
    """A failure of the shards' model where the original's runs."""

    place: str
    """The module in which it failed; empty if that was while loading."""
    rank: int
    message: str
    tensor: str | None
    """The tensor whose rule does not fit there, if that is known."""
    rule: str | None
    is_gathered: bool
    """Whether the module's outputs must be gathered: no weight takes a rank's part of them."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """A run and its circumstances: first the findings of the original's run, then those of the shards'."""

    batch: int
    seq: int
    draws: int
    """The number of the original's runs in its own dtype."""
    choices: int
    """The number of experts that were chosen."""
    own_overruled: int
    """The choices that the original would have made otherwise in its own dtype."""
    reason: str | None = None
    """A note on what was not on a device, and why."""
    repeated: float | None = None
    """On an accelerator, the distance of the original's run from a repetition of it, over the noise."""
    overruled: int = 0
    """The choices that the shards would have made otherwise."""
    unused: tuple[str, ...] = ()
    """The tensors that the original's model does not use."""
    cut: tuple[str, ...] = ()
    """The parameters whose shape on a rank is not the one that its config.json gives."""
    backend: str = ""
    seconds: float = 0.0
    logits: Logits | None = None
    failure: Failure | None = None
    alarm: float | None = None
    """The ratio in the model's own dtype, if float32 decided."""


@dataclass(frozen=True, kw_only=True)
class Reference:
    """The results of the original's run, as rank 0 sends them to all."""

    run: Run
    ids: torch.Tensor
    inputs: Mapping[str, torch.Tensor]
    states: Mapping[str, Yardstick]
    logits: str | None
    own_logits: torch.Tensor | None
    chosen: Sequence[torch.Tensor]
    gradients: Mapping[str, Yardstick]
    effects: Mapping[str, float]
    """For an adapter: the ratio of error to noise that the base model without it would have, at each place."""
    outputs: tuple[str, ...]
    """The places at which a model's outputs are."""


@dataclass(frozen=True, kw_only=True)
class Result(Run):
    """The results of one rank. Only rank 0 has ``logits`` and ``biases``."""

    rank: int
    rows: tuple[tuple[str, Distance], ...]
    gradients: tuple[tuple[str, Distance], ...] = ()
    biases: tuple[tuple[str, float], ...] = ()
    effects: Mapping[str, float]
    outputs: tuple[str, ...]


@dataclass(frozen=True, repr=False)
class Needs(Printed):
    """The memory that a comparison needs, for weights (and their gradients, if these are compared)."""

    mesh: str
    device: str
    backend: str
    original: int
    """Bytes on the first device, in one dtype after the other."""
    ranks: tuple[int, ...]
    """Bytes on each device, after that."""
    files: int
    """Bytes that are written into a temporary folder."""
    runs: int
    tokens: int

    @property
    def headline(self) -> str:
        """The bytes."""
        per_device = " on each device" if len(self.ranks) > 1 else ""
        ranks = f"{human_bytes(max(self.ranks))} for the ranks{per_device}"
        return f"{human_bytes(self.original)} for the original, then {ranks}"

    def to_text(self, width: int | None = None) -> str:
        """All of it, in one line."""
        files = f", {human_bytes(self.files)} of temporary files" if self.files else ""
        what = f"{self.mesh}, {self.device}, {self.backend}: {self.headline}{files}"
        return f"forward: {what}; {self.runs} runs of {self.tokens} tokens"


def needs_of(job: Job, kind: str) -> Needs:
    """Return the memory that a comparison needs on devices of a kind, without activations and torch's own."""
    plan, options = job.plan, job.options
    copies, size = 1 + options.backward, plan.mesh.size

    def numbers(parts: Mapping[Kind, Kind | Box]) -> int:
        """Return the number of elements of all weights or, if one block is loaded at a time, of the largest block."""
        counts = Counter[object]()
        for name, kind, at in plan.model.tensors:
            if kind in parts:
                counts[(at[:1] or name) if options.streamed else None] += math.prod(parts[kind].shape)
        return max(counts.values(), default=0)

    of_ranks = [numbers(plan.boxes(rank)) * job.dtype.itemsize for rank in range(size)]
    devices, launched = 1 if kind == "cpu" else min(size, count(kind)), os.environ.get("LOCAL_WORLD_SIZE")
    return Needs(
        mesh=str(plan.mesh),
        device=names(kind, size),
        backend=backend(kind, int(launched)) if launched else "threads",
        original=numbers({kind: kind for kind in plan.laid}) * job.exact_dtype.itemsize * copies,
        ranks=tuple(sum(of_ranks[device::devices]) * copies for device in range(devices)),
        files=(sum(of_ranks) if job.is_alone or not is_loaded(job.shards) else 0)
        + (sum(file.size for file in job.original.files.values()) if job.is_written else 0),
        runs=options.draws + 3,
        tokens=options.batch * options.seq if job.ids is None else job.ids.numel(),
    )


def dtype_name(dtype: torch.dtype) -> str:
    """``bfloat16`` of ``torch.bfloat16``."""
    return str(dtype).removeprefix("torch.")
