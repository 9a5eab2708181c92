"""From what the ranks measured of one layer of each kind to the whole model: time, bytes and memory. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from verify.profile.job import OUTSIDE, Found, LayerKind, Span, Step, Workload


@dataclass(frozen=True)
class Part:
    """The time of one part of a step, in seconds, and the bytes of its all-reduces that a rank puts in."""

    compute: float
    collectives: float
    reduced: int


@dataclass(frozen=True)
class Memory:
    """What a rank holds, in bytes: in training, ``gradients`` too, and what the forward pass leaves for the backward
    one is among the activations.
    """

    weights: int
    cache: int
    activations: int
    gradients: int = 0

    @property
    def total(self) -> int:
        """All of it."""
        return self.weights + self.cache + self.activations + self.gradients


@dataclass(frozen=True)
class Time:
    """One step of the whole model: by part, with the number of times that the part occurs."""

    parts: Mapping[str, Part]
    counts: Mapping[str, int]
    spread: float = 0.0

    @property
    def compute(self) -> float:
        """Seconds that the ranks compute."""
        return sum(part.compute * self.counts[name] for name, part in self.parts.items())

    @property
    def collectives(self) -> float:
        """Seconds in collectives."""
        return sum(part.collectives * self.counts[name] for name, part in self.parts.items())

    @property
    def seconds(self) -> float:
        """Seconds of a step."""
        return self.compute + self.collectives

    @property
    def share(self) -> float:
        """The part of the time that is spent in collectives, 0 to 1."""
        return self.collectives / self.seconds if self.seconds else 0.0

    @property
    def reduced(self) -> int:
        """Bytes that a rank puts into all-reduces."""
        return sum(part.reduced * self.counts[name] for name, part in self.parts.items())


def counts_of(kinds: Sequence[LayerKind]) -> dict[str, int]:
    """How often each part occurs in the model."""
    return {**dict.fromkeys(OUTSIDE, 1), **{kind.part: kind.count for kind in kinds}}


def time_of(found: Sequence[Found], number: int, workload: Workload, kinds: Sequence[LayerKind]) -> Time:
    """The time of a workload, the ``number``-th, from what all ranks found.

    A trainer computes the loss from each rank's part of the logits: in training, gathering them does not count.
    """
    spans, spread = joined([rank.measured[number].steps for rank in found])
    counts = counts_of(kinds)
    parts: dict[str, Part] = {}
    for name in counts:
        own = [span for span in spans if span.part == name]
        left_out = "all-gather" if workload.phase == "train" and name == OUTSIDE[1] else None
        sent = [span for span in own if span.what.startswith("all-") and span.what != left_out]
        parts[name] = Part(
            compute=sum(span.seconds for span in own if span.what == "compute"),
            collectives=sum(span.seconds for span in sent),
            reduced=sum(span.nbytes for span in own if span.what == "all-reduce"),
        )
    return Time(parts, counts, spread)


def joined(of_ranks: Sequence[Sequence[Step]]) -> tuple[Step, float]:
    """One step from the repeated steps of all ranks, and the spread of its time: half of the middle half, relative.

    Ranks compute side by side, so the slowest counts. A collective lasts from when the last rank comes, so the shortest
    counts. Waiting is left out. Of the repetitions, each span has the median.
    """
    repetitions: list[list[Span]] = []
    for steps in zip(*of_ranks, strict=True):
        together = []
        for spans in zip(*steps, strict=True):
            first = spans[0]
            seconds = [span.seconds for span in spans]
            if first.what != "wait":
                value = max(seconds) if first.what == "compute" else min(seconds)
                together.append(Span(first.part, first.what, first.nbytes, value))
        repetitions.append(together)
    totals = [sum(span.seconds for span in step) for step in repetitions]
    medians = tuple(
        Span(spans[0].part, spans[0].what, spans[0].nbytes, statistics.median(span.seconds for span in spans))
        for spans in zip(*repetitions, strict=True)
    )
    if len(totals) < 2:
        return medians, 0.0
    low, middle, high = statistics.quantiles(totals, n=4)
    return medians, (high - low) / 2 / middle if middle else 0.0


def memory_of(
    weights: int, found: Sequence[Found], number: int, workload: Workload, kinds: Sequence[LayerKind]
) -> Memory:
    """What the rank that needs most holds of a whole model whose weights on a rank have so many bytes."""
    counts = counts_of(kinds)
    measured = [rank.measured[number] for rank in found]
    if workload.phase != "train":
        cache = max(sum(nbytes * counts[part] for part, nbytes in each.cache.items()) for each in measured)
        return Memory(weights, cache, max(each.activations for each in measured))
    # A whole model keeps those of all its layers, and one layer of each kind was run.
    activations = max(
        each.activations + sum(saved * (counts[part] - 1) for part, saved in each.saved.items()) for each in measured
    )
    return Memory(weights, 0, activations, gradients=weights)
