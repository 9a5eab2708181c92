"""From what ranks measured of one layer of each kind to the whole model: time, memory, and one recommended degree.

A degree's time is predicted from the others. The computation of a part is modelled as ``a + flops / f + bytes / b``: a
time to start kernels, and the rates of multiplying and of reading what is multiplied. An all-reduce of ``n`` bytes over
``N`` ranks takes ``latency + 2 (N - 1) / N * n / bandwidth``, as in a ring, whose latency grows with ``N - 1``.

The recommendation begins with the smallest degree that fits, and takes a larger one if it brings at least half of what
its ranks could: twice as many ranks must be 1.5 times as fast. Of several workloads, the geometric mean counts, and all
must fit.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from reshard.mesh.plan import Plan
from reshard.mesh.totals import activation_bytes, all_reduces, rows_of, totals_of
from reshard.profile.job import OUTSIDE, LayerKind, Measured, ProfileStep, RankResult, Workload
from reshard.text import human_bytes

# ------------------------------------------------------------------------------------------------- what was measured


@dataclass(frozen=True)
class StepPart:
    """A part of a step: how often it occurs, and each time the seconds of computing and in collectives."""

    count: int
    compute: float
    collectives: float


@dataclass(frozen=True)
class Time:
    """One step of the whole model, in seconds."""

    compute: float
    collectives: float
    spread: float = 0.0
    """If measured, half of the middle half of the times, relative."""
    reduced: int = 0
    """If measured, the bytes that a rank put into all-reduces."""
    parts: Mapping[str, StepPart] = field(default_factory=dict)
    """If measured, the time of each part."""

    @property
    def seconds(self) -> float:
        """Seconds of a step."""
        return self.compute + self.collectives

    @property
    def share(self) -> float:
        """The part of the time that is spent in collectives, 0 to 1."""
        return self.collectives / self.seconds if self.seconds else 0.0


@dataclass(frozen=True)
class Memory:
    """The memory that a rank needs, in bytes. In training it has ``gradients`` too, and the values that the forward
    pass leaves for the backward pass count as activations.
    """

    weights: int
    cache: int
    activations: int
    gradients: int

    @property
    def total(self) -> int:
        """All of it."""
        return self.weights + self.cache + self.activations + self.gradients


def joined(of_ranks: Sequence[Sequence[ProfileStep]]) -> tuple[ProfileStep, float]:
    """One step from the repeated steps of all ranks, and the spread of its time: half of the middle half, relative.

    Ranks compute side by side, so the slowest counts. A collective lasts from when the last rank comes, so the shortest
    counts. Of the repetitions, each span has the median.
    """
    spans = of_ranks[0][0]
    seconds = np.array([[[span.seconds for span in step] for step in steps] for steps in of_ranks])
    together = np.where([span.what == "compute" for span in spans], seconds.max(axis=0), seconds.min(axis=0))
    low, middle, high = np.quantile(together.sum(axis=1), (0.25, 0.5, 0.75))
    medians = zip(spans, np.median(together, axis=0).tolist(), strict=True)
    return tuple(replace(span, seconds=time) for span, time in medians), float((high - low) / 2 / (middle or 1))


def time_of(measured: Sequence[Measured], workload: Workload, counts: Mapping[str, int]) -> Time:
    """The time of a workload, from what all ranks measured of it.

    A trainer computes the loss from each rank's part of the logits: in training, gathering them does not count.
    """
    spans, spread = joined([run.steps for run in measured])
    left_out = (OUTSIDE[1], "all-gather") if workload.phase == "train" else None
    seconds = dict.fromkeys(itertools.product(counts, (True, False)), 0.0)
    reduced = 0
    for span in spans:
        if span.part in counts and (span.part, span.what) != left_out:
            seconds[span.part, span.what == "compute"] += span.seconds
            reduced += counts[span.part] * span.nbytes * (span.what == "all-reduce")
    compute, collectives = (sum(seconds[part, which] * counts[part] for part in counts) for which in (True, False))
    parts = {part: StepPart(counts[part], seconds[part, True], seconds[part, False]) for part in counts}
    return Time(compute, collectives, spread, reduced, parts)


def memory_of(weights: int, measured: Sequence[Measured], workload: Workload, counts: Mapping[str, int]) -> Memory:
    """Return the memory of the rank that needs most, for a whole model with ``weights`` bytes of weights on a rank."""
    cache = max(sum(nbytes * counts[part] for part, nbytes in run.cache.items()) for run in measured)
    # A whole model keeps what its forward pass saved of all its layers, and one layer of each kind was run.
    saved = (run.activations + sum(n * (counts[part] - 1) for part, n in run.saved.items()) for run in measured)
    return Memory(weights, cache, max(saved), weights if workload.phase == "train" else 0)


# ------------------------------------------------------------------------------------------------------- the rates


def fit(columns: Sequence[Sequence[float]], times: Sequence[float]) -> list[float]:
    """A factor for each column, with which they make these times; the relative errors are the least possible.

    No factor is negative, and there are no more of them than times: of as good fits, the one with the fewest.
    """
    relative = np.array(columns, dtype=float) / np.array(times)[:, None]
    width, best, least = relative.shape[1], np.zeros(relative.shape[1]), math.inf
    for chosen in (some for n in range(1, width + 1) for some in itertools.combinations(range(width), n)):
        part = relative[:, chosen]
        scale = np.abs(part).max(axis=0)
        if len(chosen) > len(times) or not scale.all():
            continue
        solved = np.linalg.lstsq(part / scale, np.ones(len(times)), rcond=None)[0] / scale
        error = float(np.square(part @ solved - 1).sum())
        if (solved >= 0).all() and error < 0.9 * least:
            least, best = error, np.zeros(width)
            best[list(chosen)] = solved
    return [float(factor) for factor in best]


@dataclass(frozen=True)
class LinkRate:
    """The cost of an all-reduce over some ranks."""

    ranks: int
    latency: float
    """The seconds before the first byte."""
    bandwidth: float
    """The bytes per second of each rank."""
    measured: tuple[tuple[int, float], ...] = ()
    """The bytes and seconds of the all-reduces to which it was fitted."""

    def over(self, ranks: int, bandwidth: float | None = None) -> LinkRate:
        """The same for another number of ranks: the latency grows with the steps of a ring."""
        return LinkRate(ranks, self.latency * (ranks - 1) / (self.ranks - 1), bandwidth or self.bandwidth)


def fit_link(ranks: int, times: Iterable[tuple[int, float]]) -> LinkRate:
    """The link of these all-reduces: bytes and seconds of each."""
    timed = tuple((nbytes, seconds) for nbytes, seconds in times if seconds > 0)
    moved = 2 * (ranks - 1) / ranks
    latency, per_byte = fit([(1.0, moved * nbytes) for nbytes, _ in timed], [seconds for _, seconds in timed])
    return LinkRate(ranks, latency, 1 / max(per_byte, 1e-15), timed)


def _link(links: Mapping[int, LinkRate], degree: int, bandwidth: float | None) -> LinkRate | None:
    """The link of a degree: measured, or as over the most ranks that were measured, no more than these if possible."""
    if not links or degree in links:
        return links.get(degree) or (LinkRate(degree, 0.0, bandwidth) if bandwidth else None)
    return links[max((n for n in links if n <= degree), default=min(links))].over(degree, bandwidth)


def communication(plan: Plan, workload: Workload, link: LinkRate) -> float:
    """The time of a step's collectives by the plan; the logits of inference are gathered."""
    train, ranks = workload.phase == "train", link.ranks
    passes = all_reduces(plan)[: 2 if train else 1]
    nbytes = sum(each.nbytes for each in passes) * workload.tokens
    seconds = link.latency * sum(each.count for each in passes) + 2 * (ranks - 1) / ranks * nbytes / link.bandwidth
    whole = plan.model.sizes.of({})
    logits = plan.rank_sizes(0, whole).get("vocab", 0) * workload.batch * activation_bytes(plan)
    is_gathered = not train and 0 < logits < whole.get("vocab", 0) * workload.batch * activation_bytes(plan)
    return seconds + (link.latency / 2 + (ranks - 1) * logits / link.bandwidth if is_gathered else 0.0)


# --------------------------------------------------------------------------------------------------- the whole model


@dataclass(frozen=True)
class NotRun:
    """The reason why a workload was not run at a degree. ``ran_out``: the ranks lack the memory even for a part
    of it.
    """

    why: str
    ran_out: bool


@dataclass(frozen=True)
class DegreeRow:
    """A degree and a workload."""

    tp: int
    workload: Workload
    measured: Time | None
    predicted: Time | None
    """The time of a step, predicted from the other degrees."""
    memory: Memory
    """The bytes that a rank holds."""
    capacity: int
    """The bytes of memory that a rank has."""
    stated: int
    """The bytes of a step's all-reduces by the plan."""
    not_run: NotRun | None = None

    @property
    def time(self) -> Time | None:
        """The measurement, or else the prediction."""
        return self.measured or self.predicted

    @property
    def fits(self) -> bool:
        """Whether a rank has enough memory."""
        return self.memory.total <= self.capacity and not (self.not_run and self.not_run.ran_out)

    @property
    def sequences(self) -> int | None:
        """The sequences of this length whose cache fits beside weights and activations; None without a cache."""
        memory, left = self.memory, self.capacity - self.memory.total + self.memory.cache
        return max(0, left * self.workload.batch // memory.cache) if memory.cache else None

    @property
    def rate(self) -> float:
        """Tokens per second of the whole model; 0 if there is no time."""
        return self.workload.tokens / self.time.seconds if self.time and self.time.seconds else 0.0

    @property
    def error(self) -> float | None:
        """The error of the prediction, relative to the measurement."""
        if self.measured is None or self.predicted is None or not self.measured.seconds:
            return None
        return self.predicted.seconds / self.measured.seconds - 1


def whole_model(
    plans: Mapping[int, Plan], kinds: Sequence[LayerKind], workloads: Sequence[Workload],
    results: Mapping[int, Sequence[RankResult]], not_run: Mapping[tuple[int, Workload], NotRun],
    capacity: Mapping[int, int], bandwidth: float | None,
) -> tuple[list[DegreeRow], list[LinkRate]]:  # fmt: skip
    """The row of each degree and workload, from the ``results`` of the degrees that ran, and the links among these.

    ``capacity`` is a rank's memory in bytes, ``bandwidth`` that of the links of degrees that did not run. What did not
    run takes memory and operations in proportion to the run that is nearest to it.
    """
    counts = {**dict.fromkeys(OUTSIDE, 1), **{kind.part: kind.count for kind in kinds}}
    ran = {(degree, phase): [rank.measured[phase] for rank in ranks] for degree, ranks in results.items()
           for phase in ranks[0].measured}  # fmt: skip
    times = {at: time_of(measured, at[1], counts) for at, measured in ran.items()}
    links = {degree: fit_link(degree, _exchanges(ranks)) for degree, ranks in results.items() if degree > 1}
    weights = {degree: totals_of(plan, rows_of(plan)).bytes_per_rank for degree, plan in plans.items()}
    rows = []
    for (degree, plan), workload in itertools.product(plans.items(), workloads):
        train, link = workload.phase == "train", _link(links, degree, bandwidth)
        predicted, memory = None, Memory(weights[degree], 0, 0, weights[degree] if train else 0)
        near = sorted(
            (at for at in ran if at[1].phase == workload.phase),
            key=lambda at: (at[1] != workload, abs(at[0] - degree), -at[1].batch * at[1].seq),
        )
        if near:
            other, like = near[0]
            more = max(1.0, workload.batch * workload.seq / (like.batch * like.seq))
            heads = [plans[n].rank_sizes(0, plan.model.sizes.of({"layer": kinds[0].first})).get("kv", 1)
                     for n in (degree, other)]  # fmt: skip
            memory = memory_of(weights[degree], ran[near[0]], workload, counts)
            cache = int(memory.cache * more * heads[0] / heads[1])
            memory = replace(memory, cache=cache, activations=int(memory.activations * more))
            points = [(ran[at][0].work[name], part.compute) for at in near if at[0] != degree
                      for name, part in times[at].parts.items() if part.compute > 0]  # fmt: skip
            if points and (degree == 1 or link is not None):
                start, per_flop, per_byte = fit([(1.0, *work) for work, _ in points], [time for _, time in points])
                share, tokens = weights[degree] / weights[other], workload.tokens / like.tokens
                compute = sum(
                    count * (start + flops * share * tokens * per_flop + nbytes * share * per_byte)
                    for part, count in counts.items()
                    for flops, nbytes in [ran[near[0]][0].work[part]]
                )
                predicted = Time(compute, communication(plan, workload, link) if degree > 1 and link else 0.0)
        stated = sum(each.nbytes for each in all_reduces(plan)[: 2 if train else 1]) if degree > 1 else 0
        measured, missing = times.get((degree, workload)), not_run.get((degree, workload))
        of_step = stated * workload.tokens
        rows.append(DegreeRow(degree, workload, measured, predicted, memory, capacity[degree], of_step, missing))
    return rows, [*links.values()]


def _exchanges(ranks: Sequence[RankResult]) -> Iterable[tuple[int, float]]:
    """The bytes of each all-reduce that was timed by itself, and the median of its time."""
    for nbytes in ranks[0].exchanges:
        of_ranks = zip(*(rank.exchanges[nbytes] for rank in ranks), strict=True)
        yield nbytes, statistics.median(map(min, of_ranks))  # the last to come says how long it took


# ------------------------------------------------------------------------------------------------------- recommendation


WORTH = 0.5
"""The part of the ideal gain that a larger degree must bring."""


@dataclass(frozen=True)
class Recommendation:
    """A degree, and why this one."""

    tp: int | None
    """None if no degree fits."""
    reason: str
    alone: tuple[tuple[Workload, int], ...] = ()
    """The workloads that by themselves ask for another degree."""


def recommend(rows: Sequence[DegreeRow]) -> Recommendation:
    """The degree to use for all workloads of these rows: of those that ran; of others only if none of these fits."""
    rows_of = {degree: [row for row in rows if row.tp == degree] for degree in sorted({row.tp for row in rows})}
    fitting = [degree for degree in rows_of if all(row.fits and row.rate for row in rows_of[degree])]
    ran = [degree for degree in fitting if all(row.measured for row in rows_of[degree])]
    if not fitting:
        return Recommendation(None, _none_fits(rows_of[max(rows_of)]))
    among = ran or fitting
    best = _best(among, rows_of)
    capacity = human_bytes(max(row.capacity for row in rows_of[best]))
    fits_below = [all(row.fits for row in rows_of[degree]) for degree in rows_of if degree < best]
    if fits_below and not any(fits_below):
        reason = f"the smallest that fits {capacity} a rank"
    else:
        reason = f"it needs {human_bytes(max(row.memory.total for row in rows_of[best]))} of {capacity} a rank"
    reasons = [reason + _left_out(rows_of[best]) + ("" if best in ran else ", by prediction alone")]
    smaller, larger = ([d for d in among if d < best], [d for d in fitting if d > best])
    if smaller:
        reasons.append(f"{_gain(rows_of[smaller[-1]], rows_of[best]):.2f} times as fast as tp {smaller[-1]}")
    if larger:
        reasons.append(_larger(rows_of[best], rows_of[larger[0]]) + _more_room(rows_of[best], rows_of[larger[0]]))
    alone = []
    for number, row in enumerate(rows_of[best]):
        degree = _best(among, {d: [rows_of[d][number]] for d in among})
        alone += [(row.workload, degree)] if degree != best else []
    return Recommendation(best, "; ".join(reasons), tuple(alone))


def _best(degrees: Sequence[int], rows_of: Mapping[int, Sequence[DegreeRow]]) -> int:
    """The smallest of these degrees, in increasing order, unless a larger one is worth its ranks."""
    best = degrees[0]
    for degree in degrees[1:]:
        if _gain(rows_of[best], rows_of[degree]) >= 1 + WORTH * (degree / best - 1):
            best = degree
    return best


def _gain(few: Sequence[DegreeRow], many: Sequence[DegreeRow]) -> float:
    """Return the speed of a degree as a multiple of another's, over all workloads."""
    return statistics.geometric_mean(b.rate / a.rate for a, b in zip(few, many, strict=True))


def _larger(few: Sequence[DegreeRow], many: Sequence[DegreeRow]) -> str:
    """Return a clause on the gain of a larger degree."""
    share, gain = max(row.time.share for row in many if row.time), _gain(few, many) - 1
    spends, gains, is_slower = ("spends", "gains", "is") if all(row.measured for row in many) else (
        "is predicted to spend", "gain", "be")  # fmt: skip
    change = f"{gains} {gain:.0%} of a possible {many[0].tp / few[0].tp - 1:.0%}"
    change = change if gain >= 0 else f"{is_slower} {-gain:.0%} slower"
    return f"tp {many[0].tp} {spends} {'up to ' if len(many) > 1 else ''}{share:.0%} in collectives and {change}"


def _more_room(few: Sequence[DegreeRow], many: Sequence[DegreeRow]) -> str:
    """Return a clause on the sequences for which a larger degree makes room; "" if these are no more for each rank."""
    rooms = [(a.sequences, b.sequences) for a, b in zip(few, many, strict=True) if a.sequences and b.sequences]
    gain = min((after / before for before, after in rooms), default=0.0)
    return f", with room for {gain:.1f} times as many sequences" if gain > 1.05 * many[0].tp / few[0].tp else ""


def _none_fits(rows: Sequence[DegreeRow]) -> str:
    if all(row.fits for row in rows):
        return "no degree could be run, or predicted, for all that was asked"
    worst = max(rows, key=lambda row: row.memory.total - row.capacity)
    if worst.memory.total <= worst.capacity:  # by the account of the whole all fit, and yet memory ran out
        why = next(row.not_run.why for row in rows if row.not_run and row.not_run.ran_out)
        return f"no degree fits: at tp {worst.tp} {why}"
    need, capacity = human_bytes(worst.memory.total), human_bytes(worst.capacity)
    needs = f"needs {need} a rank{_left_out([worst])}, and {capacity} are there"
    return f"no degree fits: {worst.workload} at tp {worst.tp} {needs}"


def _left_out(rows: Sequence[DegreeRow]) -> str:
    """Return a note on what ranks hold in training besides these bytes; "" if nothing."""
    return " without optimizer states" if any(row.workload.phase == "train" for row in rows) else ""
