"""The report of a comparison of shards with their original: measured at each place, and in words.

The limit is in ``noise.py``, with its reason. ``verify/report`` combines this report with that of the bytes.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version
from typing import Any

import torch

from reshard.text import plural
from reshard.verify.forward.job import Failure, Job, Result, Run, dtype_name
from reshard.verify.forward.noise import FLOOR, LIMIT, Distance
from reshard.verify.rank.device import count, names

POOR = 0.25
"""The power of a run is called poor if a fault may change this part of the values unseen."""


@dataclass(frozen=True)
class LayerRow:
    """One place in the model, or the gradient of one weight: error beside noise, the worst of all ranks.

    ``effect`` is the ratio that the base model would have there without the adapter that it is run with.
    """

    name: str
    error: float
    noise: float
    ratio: float
    worst: str
    rank: int
    is_same: bool
    effect: float | None = None


@dataclass(frozen=True)
class Effect:
    """The effect of an adapter."""

    ratio: float
    """The largest ratio that the outputs would have without it."""
    place: str
    """The place of that ratio."""
    is_seen: bool
    """Whether it is above the limit: shards without the adapter would be different."""


@dataclass(frozen=True)
class Power:
    """The smallest fault that the run would have shown."""

    noise: float
    """The largest noise of all places, relative to the values there."""
    place: str
    """The place of that noise."""
    seen_from: float
    """The share of the values that a fault must change there to be seen."""
    bias_ratio: float | None
    """The smallest ratio that a row-parallel bias would have if it were added twice; None if there is no such bias."""
    bias_place: str | None
    """The place of that ratio."""
    is_poor: bool
    """Whether large faults may be hidden."""


@dataclass(frozen=True, kw_only=True)
class ForwardReport(Run):
    """The answer: ``is_same``, or ``first``, the first place where the error exceeds the limit, or the ``failure`` of
    the shards' model; with the settings of the run, and its devices.
    """

    is_same: bool
    verdict: str
    first: str | None
    power: Power | None
    effect: Effect | None
    factor: float
    layers: tuple[LayerRow, ...]
    gradients: tuple[LayerRow, ...]
    mesh: Mapping[str, Any]
    ranks: int
    dtype: str
    exact_dtype: str
    device: str
    seed: int
    versions: Mapping[str, str]


def report_of(job: Job, results: Sequence[Result], device: str) -> ForwardReport:
    """Combine the ranks' results, in rank order, into a report. After a failure there is only the failed rank's
    result.
    """
    result, own = results[0], dtype_name(job.dtype)
    if result.alarm is not None:
        job = replace(job, dtype=torch.float32)
    firsts = results[:: max(len(results) // job.plan.mesh.pp, 1)]  # of each pipeline stage
    layers = _worst([result.rows for result in results], [result.rank for result in results])
    layers = tuple(replace(row, effect=result.effects.get(row.name)) for row in layers)
    gradients = _worst([result.gradients], [0])
    biases = [bias for first in firsts for bias in first.biases]
    first = next((row for row in (*layers, *gradients) if not row.is_same), None)
    power = _power(job, layers, biases) if layers and result.failure is None else None
    effect = _effect(result)
    place = first.name if first else result.failure.place if result.failure else None
    run = {name: getattr(result, name) for name in Run.__dataclass_fields__} | {
        "logits": firsts[-1].logits,
        "overruled": max(r.overruled for r in results),
        "unused": tuple(name for first in firsts for name in first.unused),
        "cut": tuple(name for first in firsts for name in first.cut),
        "reason": _reason(job, device, result),
        "seconds": max(r.seconds for r in results),
    }
    verdict = _verdict(layers, gradients, first, result.failure, effect)
    if result.alarm is not None and first is None and result.failure is None:
        verdict += f" In {own} they measured {result.alarm:.2f}, which this shows to be rounding."
    return ForwardReport(
        is_same=first is None and result.failure is None,
        verdict=verdict,
        first=place,
        power=power,
        effect=effect,
        factor=LIMIT,
        layers=layers,
        gradients=gradients,
        mesh=job.plan.mesh.to_document(),
        ranks=job.plan.mesh.size,
        dtype=dtype_name(job.dtype),
        exact_dtype=dtype_name(job.exact_dtype),
        device=names(device, job.plan.mesh.size),
        seed=job.options.seed,
        # To import transformers here would take longer than the ranks take.
        versions={
            "python": platform.python_version(),
            "torch": str(torch.__version__),
            "transformers": version("transformers"),
        },
        **run,
    )


def _reason(job: Job, device: str, result: Result) -> str | None:
    """Return the reason why something was not on a device: all, the run in higher precision, or the ranks' messages."""
    why = [result.reason] if result.reason else []
    if device != "cpu" and result.backend == "gloo":
        ranks = os.environ.get("LOCAL_WORLD_SIZE", job.plan.mesh.size)
        why.append(f"through the CPU: {ranks} ranks see {plural(count(device), 'GPU')}")
    return "; ".join(why) or None


def _worst(distances: Sequence[Sequence[tuple[str, Distance]]], ranks: Sequence[int]) -> tuple[LayerRow, ...]:
    """The worst of these ranks at each place: what should be the same on several is looked at on all of them."""
    by_place: dict[str, list[tuple[int, Distance]]] = {}
    for rank, rows in zip(ranks, distances, strict=True):
        for name, distance in rows:
            by_place.setdefault(name, []).append((rank, distance))
    worst = {name: max(pairs, key=lambda pair: pair[1].ratio) for name, pairs in by_place.items()}
    return tuple(
        LayerRow(name, at.error, at.noise, at.ratio, at.worst, rank, at.is_same) for name, (rank, at) in worst.items()
    )


def _effect(result: Result) -> Effect | None:
    """Return the effect of the adapter on the outputs; None if the original is run without one."""
    if not result.effects:
        return None
    place = max(result.outputs, key=lambda name: result.effects[name])
    return Effect(result.effects[place], place, result.effects[place] > LIMIT)


def _power(job: Job, layers: Sequence[LayerRow], biases: Sequence[tuple[str, float]]) -> Power:
    noisiest = max(layers, key=lambda row: row.noise)
    least = min(biases, key=lambda bias: bias[1], default=None)
    seen_from = LIMIT * max(noisiest.noise, FLOOR * torch.finfo(job.dtype).eps)
    is_poor = seen_from > POOR or (least is not None and least[1] <= LIMIT)
    return Power(
        noise=noisiest.noise,
        place=noisiest.name,
        seen_from=seen_from,
        bias_ratio=least[1] if least else None,
        bias_place=least[0] if least else None,
        is_poor=is_poor,
    )


def _verdict(
    layers: Sequence[LayerRow],
    gradients: Sequence[LayerRow],
    first: LayerRow | None,
    failure: Failure | None,
    effect: Effect | None,
) -> str:
    if first is None and failure is None:
        largest = max((row.ratio for row in (*layers, *gradients)), default=0.0)
        text = f"The forward pass sees no difference: the worst place has {largest:.2f} times the original's own "
        text += f"rounding noise; the limit is {LIMIT:g}."
        return f"{text} {_effect_in_words(effect)}" if effect is not None else text
    parts = []
    if first is not None:
        what = "gradient of" if first in gradients else "error at"
        parts.append(
            f"the {what} '{first.name}' is {first.ratio:.3g} times the original's own rounding noise (at most "
            f"{LIMIT:g} is rounding), worst in {first.worst} on rank {first.rank}."
        )
    if failure is not None:
        parts.append(_failure_in_words(failure))
    return f"The shards are not the same model: {' Then '.join(parts)}"


def _effect_in_words(effect: Effect) -> str:
    without = f"without it '{effect.place}' measures {effect.ratio:.3g}"
    if effect.is_seen:
        return f"The adapter is seen: {without}."
    return f"But the adapter has no effect that is more than rounding ({without}): nothing shows that it is there."


def _failure_in_words(failure: Failure) -> str:
    where = f"in '{failure.place}', " if failure.place else ""
    text = f"rank {failure.rank} fails {where}where the original does not ({failure.message})."
    if failure.tensor and failure.is_gathered:
        text += f" No weight takes as its input the part of '{failure.tensor}' that '{failure.rule}' gives a rank."
    elif failure.tensor:
        text += (
            f" The rule '{failure.rule}' of '{failure.tensor}' does not go with the sizes that [config] and [modules] "
            "give this rank."
        )
    return text
