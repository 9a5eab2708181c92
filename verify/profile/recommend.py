"""One degree for a node, and the reason for it. Pure.

It begins with the smallest degree that fits, and takes a larger one if it brings at least half of what its ranks could:
twice as many ranks must be 1.5 times as fast. Of several workloads, the geometric mean counts, and all must fit.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from reshard.text import human_bytes
from verify.profile.cost import Memory, Time
from verify.profile.job import Workload

WORTH = 0.5
"""The part of the ideal gain that a larger degree must bring."""


@dataclass(frozen=True)
class NotRun:
    """Why a workload was not run at a degree; ``ran_out``: the ranks have not the memory even for a part of it."""

    why: str
    ran_out: bool


@dataclass(frozen=True)
class Row:
    """A degree and a workload: the time as measured and as the model of the cost has it, and what a rank holds.

    ``capacity`` is the memory that a rank has, ``stated`` the bytes of a step's all-reduces by the plan.
    """

    tp: int
    workload: Workload
    measured: Time | None
    predicted: Time | None
    memory: Memory
    capacity: int
    stated: int
    not_run: NotRun | None = None

    @property
    def time(self) -> Time | None:
        """The measurement, or else the prediction."""
        return self.measured or self.predicted

    @property
    def fits(self) -> bool:
        """Whether a rank has the memory."""
        return self.memory.total <= self.capacity and not (self.not_run and self.not_run.ran_out)

    @property
    def rate(self) -> float:
        """Tokens per second of the whole model; 0 if there is no time."""
        return self.workload.tokens / self.time.seconds if self.time and self.time.seconds else 0.0

    @property
    def error(self) -> float | None:
        """How far the prediction is from the measurement, relative to that."""
        if self.measured is None or self.predicted is None or not self.measured.seconds:
            return None
        return self.predicted.seconds / self.measured.seconds - 1


@dataclass(frozen=True)
class Recommendation:
    """A degree (None: none fits), and why this one; ``alone``: workloads that by themselves ask for another."""

    tp: int | None
    reason: str
    alone: tuple[tuple[Workload, int], ...] = ()


def recommend(rows: Sequence[Row]) -> Recommendation:
    """The degree to use for all workloads of these rows: of those that ran; of others only if none of these fits."""
    of: dict[int, list[Row]] = {}
    for row in rows:
        of.setdefault(row.tp, []).append(row)
    fitting = [degree for degree in sorted(of) if all(row.fits and row.rate for row in of[degree])]
    ran = [degree for degree in fitting if all(row.measured for row in of[degree])]
    if not fitting:
        return Recommendation(None, _none_fits(of[max(of)]))
    among = ran or fitting
    best = _best(among, of)
    reasons = [_memory(best, sorted(of), of)]
    less, more = ([d for d in among if d < best], [d for d in fitting if d > best])
    if less:
        reasons.append(f"{_gain(of[less[-1]], of[best]):.2f} times as fast as tp {less[-1]}")
    if more:
        reasons.append(_larger(more[0], of[best], of[more[0]]))
    each = ((rows[0].workload, _best(among, dict(zip(of, ([row] for row in rows), strict=True))))
            for rows in zip(*of.values(), strict=True))  # fmt: skip
    return Recommendation(best, "; ".join(reasons), tuple((work, degree) for work, degree in each if degree != best))


def _best(degrees: Sequence[int], of: Mapping[int, Sequence[Row]]) -> int:
    """The smallest of these degrees, in increasing order, unless a larger one is worth its ranks."""
    best = degrees[0]
    for degree in degrees[1:]:
        if _gain(of[best], of[degree]) >= 1 + WORTH * (degree / best - 1):
            best = degree
    return best


def _gain(few: Sequence[Row], many: Sequence[Row]) -> float:
    """How many times as fast a degree is as another, over all workloads."""
    ratios = [b.rate / a.rate for a, b in zip(few, many, strict=True)]
    return math.exp(sum(map(math.log, ratios)) / len(ratios))


def _memory(best: int, degrees: Sequence[int], of: dict[int, list[Row]]) -> str:
    """Why no smaller degree: it does not fit. Else what the rank needs; how it was found, unless it was measured."""
    is_measured = all(row.measured for row in of[best])
    capacity = human_bytes(max(row.capacity for row in of[best]))
    smaller = [all(row.fits for row in of[degree]) for degree in degrees if degree < best]
    if smaller and not any(smaller):
        text = f"the smallest that fits {capacity} a rank"
    else:
        text = f"it needs {human_bytes(max(row.memory.total for row in of[best]))} of {capacity} a rank"
    text += _left_out(of[best])
    return text if is_measured else f"{text}, by prediction alone"


def _larger(degree: int, few: Sequence[Row], many: Sequence[Row]) -> str:
    share, gain = max(row.time.share for row in many if row.time), _gain(few, many)
    possible = degree / few[0].tp - 1
    change = f"gains {gain - 1:.0%} of a possible {possible:.0%}" if gain >= 1 else f"is {1 - gain:.0%} slower"
    how = "spends" if all(row.measured for row in many) else "is predicted to spend"
    most = "up to " if len(many) > 1 else ""
    change = change if how == "spends" else change.replace("gains", "gain").replace("is ", "be ")
    return f"tp {degree} {how} {most}{share:.0%} in collectives and {change}"


def _none_fits(rows: Sequence[Row]) -> str:
    if all(row.fits for row in rows):
        return "no degree could be run, or predicted, for all that was asked"
    worst = max(rows, key=lambda row: row.memory.total - row.capacity)
    if worst.memory.total <= worst.capacity:  # by the account of the whole all fit, and yet memory ran out
        why = next(row.not_run.why for row in rows if row.not_run and row.not_run.ran_out)
        return f"no degree fits: at tp {worst.tp} {why}"
    need, there = human_bytes(worst.memory.total), human_bytes(worst.capacity)
    needs = f"needs {need} a rank{_left_out([worst])}, and {there} are there"
    return f"no degree fits: {worst.workload} at tp {worst.tp} {needs}"


def _left_out(rows: Sequence[Row]) -> str:
    """What a rank holds in training and these bytes do not have."""
    return " without optimizer states" if any(row.workload.phase == "train" for row in rows) else ""
