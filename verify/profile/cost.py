"""What a step should cost: floating-point operations, bytes and all-reduces from the plan's axes, and the rates of a
node as fitted to measurements. Pure arithmetic.

The time of a part's computation is modelled as ``a + flops / f + bytes / b``: a time for starting kernels, and the
rates of computing and of reading weights and cache. An all-reduce of ``n`` bytes over ``N`` ranks takes
``latency + 2 (N - 1) / N * n / bandwidth``, as in a ring, whose latency grows with ``N - 1``.

From what the ranks measured of one layer of each kind to the whole model: time, bytes and memory.

One degree is recommended for a node. It begins with the smallest that fits, and takes a larger one if it brings at
least half of what its ranks could: twice as many ranks must be 1.5 times as fast. Of several workloads, the geometric
mean counts, and all must fit.
"""

from __future__ import annotations

import itertools
import math
import re
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from formats.files.safetensors import DTYPE_BITS
from reshard.mesh.plan import Entry, Plan
from reshard.mesh.stages import is_layered
from reshard.mesh.totals import activation_bytes, all_reduces, is_summed, output_size, rows_of, totals_of
from reshard.model.model import Kind
from reshard.text import human_bytes
from verify.profile.job import OUTSIDE, LayerKind, RankResult, Span, Step, Workload

EMBEDDING, HEAD = OUTSIDE
_CHOSEN = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k", "top_k_experts", "num_selected_experts")
"""How config.json may call the number of experts that a token goes to."""


@dataclass(frozen=True)
class Work:
    """What one rank does in one part of a step: operations, bytes of weights and cache that it reads, the bytes that it
    puts into each all-reduce, and those that it puts into a gather.
    """

    flops: float = 0.0
    nbytes: float = 0.0
    reduced: tuple[int, ...] = ()
    gathered: int = 0

    def __add__(self, other: Work) -> Work:
        """The work of both."""
        return Work(
            self.flops + other.flops, self.nbytes + other.nbytes,
            self.reduced + other.reduced, self.gathered + other.gathered,
        )  # fmt: skip


# ------------------------------------------------------------------------------------------------ what is to be done


def works(plan: Plan, kinds: Sequence[LayerKind], workload: Workload) -> dict[str, Work]:
    """The work of each part of a step on the first rank of a plan.

    A multiplication by a weight counts 2 operations for each element and token, and twice as many in the backward pass.
    """
    work = {part: Work() for part in (EMBEDDING, *(kind.part for kind in kinds), HEAD)}
    for kind in plan.model.kinds:
        entry = plan.laid[kind]
        if not is_layered(plan.model, kind) or 0 not in entry.layout.boxes or len(entry.layout.full) < 2:
            continue
        if re.search(r"norm|bias", entry.template.rpartition(".layers.")[2]):  # of experts or heads: not multiplied
            continue
        for layer in kinds:
            if layer.first in kind.layers:
                work[layer.part] += _of_weight(plan, kind, entry, workload)
    for layer in kinds:
        work[layer.part] += _of_attention(plan, layer, workload)
        work[layer.part] += Work(reduced=_messages(plan, layer, workload))
    return _with_vocabulary(plan, work, workload)


def _passes(workload: Workload) -> int:
    return 3 if workload.phase == "train" else 1


def _of_weight(plan: Plan, kind: Kind, entry: Entry, workload: Workload) -> Work:
    numbers = math.prod(entry.layout.boxes[0].shape) * kind.count / len(kind.layers)
    passes, width = _passes(workload), DTYPE_BITS[entry.dtype] / 8
    flops = 2 * numbers * workload.tokens * passes
    used = _share_of_experts(plan, entry)
    if used is None:
        return Work(flops, numbers * width * passes)
    touched = 1 - (1 - used) ** workload.tokens  # experts that some token goes to, if all are as likely
    return Work(flops * used, numbers * width * passes * touched)


def _share_of_experts(plan: Plan, entry: Entry) -> float | None:
    """The share of the experts that a token goes to, for a weight of experts."""
    axes = {*plan.model.expert_axes, "expert"}
    if not any(axis in entry.layout.rule.axes or f"{{{axis}}}" in entry.template for axis in axes):
        return None
    sizes, settings = plan.model.sizes, plan.model.sizes.settings
    match = plan.model.architecture.match(entry.name)
    axis_sizes = sizes.of(match.indices if match else {})
    count = max((axis_sizes[axis] for axis in axes if axis in axis_sizes), default=0)
    chosen = next((settings[key] for key in _CHOSEN if isinstance(settings.get(key), int)), None)
    return min(1.0, chosen / count) if chosen and count else None


@dataclass(frozen=True)
class _Heads:
    """The heads of an attention on one rank: of queries, of keys and values, and how wide a key and a value are."""

    queries: int
    pairs: int
    key: int
    value: int


def _heads_of(plan: Plan, layer: LayerKind) -> _Heads | None:
    """The heads of a layer's attention: of the axes that formats/architectures call ``kv group head``, or ``heads``
    with ``nope rope vdim`` in latent attention; in front of them ``g`` or ``s`` where a layer of full or windowed
    attention has others.
    """
    sizes = plan.rank_sizes(0, plan.model.sizes.of({"layer": layer.first}))
    weights = [set(kind.axes) for kind in plan.model.kinds if layer.first in kind.layers]
    for begin in ("", "g", "s"):
        kv, group, head, heads, nope, rope, value = (
            begin + axis for axis in ("kv", "group", "head", "heads", "nope", "rope", "vdim")
        )
        if any({kv, head} <= axes for axes in weights):
            value_size = sizes[value] if any({kv, value} <= axes for axes in weights) else sizes[head]
            return _Heads(sizes[kv] * sizes.get(group, 1), sizes[kv], sizes[head], value_size)
        if any({heads, nope} <= axes for axes in weights):
            return _Heads(sizes[heads], sizes[heads], sizes[nope] + sizes.get(rope, 0), sizes[value])
    return None


def _of_attention(plan: Plan, layer: LayerKind, workload: Workload) -> Work:
    """Scores and values of the heads of one rank, over the tokens that a token sees, and the reading of the cache."""
    heads = _heads_of(plan, layer)
    if heads is None:
        return Work()
    seen = float(workload.seq)
    window, types = plan.model.sizes.settings.get("sliding_window"), plan.model.sizes.settings.get("layer_types")
    is_used = plan.model.sizes.settings.get("use_sliding_window") is not False
    if window and is_used and (types is None or "sliding" in str(types[layer.first])):
        seen = min(seen, window)
    width = heads.key + heads.value
    cache = workload.batch * seen * heads.pairs * width * activation_bytes(plan)
    if workload.phase == "decode":
        return Work(2.0 * workload.batch * seen * heads.queries * width, cache)
    # A token sees those before it: half of all, on average; with a window, half of it in the beginning, then all of it.
    pairs = workload.tokens * seen * (1 - seen / (2 * workload.seq))
    return Work(2.0 * pairs * heads.queries * width * _passes(workload), cache)


def _messages(plan: Plan, layer: LayerKind, workload: Workload) -> tuple[int, ...]:
    """The bytes of each all-reduce of a layer: one for each of its row-parallel weights, and as many backward."""
    rows: dict[str, int] = {}
    for kind in plan.model.kinds:
        entry = plan.laid[kind]
        is_here = layer.first in kind.layers and is_layered(plan.model, kind)
        if is_here and is_summed(entry, plan.model.architecture):
            rows[entry.template] = output_size(entry)
    sizes = tuple(size * activation_bytes(plan) * workload.tokens for size in rows.values())
    return sizes * (2 if workload.phase == "train" else 1)


def _with_vocabulary(plan: Plan, work: dict[str, Work], workload: Workload) -> dict[str, Work]:
    """With the lookup of the tokens and the logits, which inference computes of the last tokens alone."""
    tables = [
        entry for kind, entry in plan.laid.items()
        if not is_layered(plan.model, kind) and len(entry.layout.full) == 2 and 0 in entry.layout.boxes
        and entry.layout.rule.axes & {"vocab", *plan.model.architecture.pad}
    ]  # fmt: skip
    if not tables:
        return work
    tables = [entry for entry in tables if "hidden" in entry.layout.rule.axes] or tables  # others are beside them
    first, last, width = tables[0], tables[-1], activation_bytes(plan)
    hidden = min(first.layout.full)
    looked_up = hidden * width * workload.tokens
    is_split = bool(first.layout.parallel_dims)
    work[EMBEDDING] += Work(0, looked_up, (looked_up,) if is_split else ())
    logits = workload.tokens if workload.phase == "train" else workload.batch
    numbers, passes = math.prod(last.layout.boxes[0].shape), _passes(workload)
    rows = numbers // hidden
    is_gathered = bool(last.layout.parallel_dims)
    work[HEAD] += Work(
        2.0 * numbers * logits * passes,
        numbers * DTYPE_BITS[last.dtype] / 8 * passes,
        (looked_up,) if is_gathered and workload.phase == "train" else (),
        rows * logits * width if is_gathered and workload.phase != "train" else 0,
    )
    return work


# ------------------------------------------------------------------------------------------------------- the rates


@dataclass(frozen=True)
class Rates:
    """How fast a rank computes: seconds to start a part, seconds for an operation, seconds for a byte."""

    start: float
    per_flop: float
    per_byte: float

    def seconds(self, work: Work) -> float:
        """The time of a part's computation."""
        return self.start + work.flops * self.per_flop + work.nbytes * self.per_byte


def fit_rates(points: Sequence[tuple[Work, float]]) -> Rates | None:
    """The rates for which the relative errors of these times are least; None without points.

    No rate is negative, and there are no more of them than points: of as good fits, the one with the fewest rates.
    """
    timed = [(work, seconds) for work, seconds in points if seconds > 0]
    if not timed:
        return None
    columns = np.array([[1.0, work.flops, work.nbytes] for work, _ in timed])
    times = np.array([seconds for _, seconds in timed])
    relative = columns / times[:, None]
    best, least = np.zeros(3), math.inf
    for count in range(1, min(3, len(timed)) + 1):
        for chosen in itertools.combinations(range(3), count):
            part = relative[:, chosen]
            scale = np.abs(part).max(axis=0)
            if not scale.all():
                continue
            solved = np.linalg.lstsq(part / scale, np.ones(len(timed)), rcond=None)[0] / scale
            error = float(np.square(part @ solved - 1).sum())
            if (solved >= 0).all() and error < 0.9 * least:
                least = error
                best = np.zeros(3)
                best[list(chosen)] = solved
    return Rates(*map(float, best))


@dataclass(frozen=True)
class Link:
    """What an all-reduce costs over some ranks: seconds before the first byte, and bytes per second of each rank.

    ``measured`` are those that it was fitted to: bytes and seconds of each.
    """

    ranks: int
    latency: float
    bandwidth: float
    measured: tuple[tuple[int, float], ...] = ()

    def all_reduce(self, nbytes: int) -> float:
        """The time of an all-reduce into which each rank puts ``nbytes``."""
        return self.latency + 2 * (self.ranks - 1) / self.ranks * nbytes / self.bandwidth

    def all_gather(self, nbytes: int) -> float:
        """The time of gathering ``nbytes`` of each rank."""
        return self.latency / 2 + (self.ranks - 1) * nbytes / self.bandwidth

    def over(self, ranks: int, bandwidth: float | None = None) -> Link:
        """The same for another number of ranks: the latency grows with the steps of a ring."""
        steps = (ranks - 1) / (self.ranks - 1)
        return Link(ranks, self.latency * steps, bandwidth or self.bandwidth)


def fit_link(ranks: int, times: Iterable[tuple[int, float]]) -> Link:
    """Latency and bandwidth for which the relative errors of these all-reduces are least: bytes and seconds of each."""
    measured = tuple(times)
    timed = [(nbytes, seconds) for nbytes, seconds in measured if seconds > 0]
    moved = 2 * (ranks - 1) / ranks
    columns = np.array([[1.0, moved * nbytes] for nbytes, _ in timed]) / np.array([[s] for _, s in timed])
    scale = columns.max(axis=0)
    latency, per_byte = np.linalg.lstsq(columns / scale, np.ones(len(timed)), rcond=None)[0] / scale
    least = min(seconds for _, seconds in timed)
    rate = max(per_byte, 1e-15)
    return Link(ranks, float(max(latency, 0.0) or least / 10), float(1 / rate), measured)


def communication(work: Work, link: Link | None) -> float:
    """The time of a part's collectives; none of one rank."""
    if link is None:
        return 0.0
    return sum(map(link.all_reduce, work.reduced)) + (link.all_gather(work.gathered) if work.gathered else 0.0)


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


def time_of(ranks: Sequence[RankResult], workload: Workload, kinds: Sequence[LayerKind]) -> Time:
    """The time of a workload, from what all ranks found.

    A trainer computes the loss from each rank's part of the logits: in training, gathering them does not count.
    """
    spans, spread = joined([rank.measured[workload].steps for rank in ranks])
    counts = counts_of(kinds)
    parts: dict[str, Part] = {}
    for name in counts:
        spans_of = [span for span in spans if span.part == name]
        left_out = "all-gather" if workload.phase == "train" and name == OUTSIDE[1] else None
        sent = [span for span in spans_of if span.what.startswith("all-") and span.what != left_out]
        parts[name] = Part(
            compute=sum(span.seconds for span in spans_of if span.what == "compute"),
            collectives=sum(span.seconds for span in sent),
            reduced=sum(span.nbytes for span in spans_of if span.what == "all-reduce"),
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


def memory_of(weights: int, ranks: Sequence[RankResult], workload: Workload, kinds: Sequence[LayerKind]) -> Memory:
    """What the rank that needs most holds of a whole model whose weights on a rank have so many bytes."""
    counts = counts_of(kinds)
    measured = [rank.measured[workload] for rank in ranks]
    if workload.phase != "train":
        cache = max(sum(nbytes * counts[part] for part, nbytes in run.cache.items()) for run in measured)
        return Memory(weights, cache, max(run.activations for run in measured))
    # A whole model keeps those of all its layers, and one layer of each kind was run.
    activations = max(
        run.activations + sum(saved * (counts[part] - 1) for part, saved in run.saved.items()) for run in measured
    )
    return Memory(weights, 0, activations, gradients=weights)


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


def whole_model(
    plans: Mapping[int, Plan], kinds: Sequence[LayerKind], workloads: Sequence[Workload],
    results: Mapping[int, Sequence[RankResult]], not_run: Mapping[tuple[int, Workload], NotRun],
    capacity: Mapping[int, int], bandwidth: float | None,
) -> tuple[list[Row], list[Link]]:  # fmt: skip
    """The row of each degree and workload, from the ``results`` of the degrees that ran, and the links among these.

    ``capacity`` is a rank's memory in bytes, ``bandwidth`` that of the links of degrees that did not run.
    """
    links = {degree: fit_link(degree, _exchanges(ranks)) for degree, ranks in results.items() if degree > 1}
    times = {
        (degree, workload): time_of(ranks, workload, kinds)
        for degree, ranks in results.items()
        for workload in ranks[0].measured
    }
    needs = {(degree, work): works(plan, kinds, work) for degree, plan in plans.items() for work in workloads}
    rows = []
    for degree, plan in plans.items():
        weights, (forward, backward) = totals_of(plan, rows_of(plan)).bytes_per_rank, all_reduces(plan)
        link = _link(links, degree, bandwidth)
        for workload in workloads:
            measured = times.get((degree, workload))
            predicted = _predict(degree, workload, needs, times, counts_of(kinds), link)
            if measured is not None:
                memory = memory_of(weights, results[degree], workload, kinds)
            else:
                memory = _memory_like(degree, plans, workload, weights, results, kinds)
            stated = forward.nbytes + (backward.nbytes if workload.phase == "train" else 0) if degree > 1 else 0
            why = not_run.get((degree, workload))
            of_step = stated * workload.tokens
            rows.append(Row(degree, workload, measured, predicted, memory, capacity[degree], of_step, why))
    return rows, [*links.values()]


def _exchanges(ranks: Sequence[RankResult]) -> Iterator[tuple[int, float]]:
    """The bytes of each all-reduce that was timed by itself, and the median of its time."""
    for nbytes in ranks[0].exchanges:
        of_ranks = zip(*(rank.exchanges[nbytes] for rank in ranks), strict=True)
        yield nbytes, statistics.median(map(min, of_ranks))  # the last to come says how long it took


def _link(links: Mapping[int, Link], degree: int, bandwidth: float | None) -> Link | None:
    """The link of a degree: measured, or as over the most ranks that were measured, no more than these if possible."""
    if degree == 1 or degree in links:
        return links.get(degree)
    if not links:
        return Link(degree, 0.0, bandwidth) if bandwidth else None
    below = [ranks for ranks in links if ranks <= degree]
    return links[max(below) if below else min(links)].over(degree, bandwidth)


def _predict(
    degree: int, workload: Workload, needs: dict[tuple[int, Workload], dict[str, Work]],
    times: dict[tuple[int, Workload], Time], counts: dict[str, int], link: Link | None,
) -> Time | None:  # fmt: skip
    """The time of a step by the rates of all other degrees that ran the phase; None if there is none."""
    points = [
        (needs[key][part], of_part.compute)
        for key, time in times.items()
        if key[0] != degree and key[1].phase == workload.phase
        for part, of_part in time.parts.items()
    ]
    rates = fit_rates(points)
    if rates is None or (degree > 1 and link is None):
        return None
    parts = {
        part: Part(rates.seconds(work), communication(work, link), sum(work.reduced))
        for part, work in needs[degree, workload].items()
    }
    return Time(parts, counts)


def _memory_like(
    degree: int, plans: Mapping[int, Plan], workload: Workload, weights: int,
    results: Mapping[int, Sequence[RankResult]], kinds: Sequence[LayerKind],
) -> Memory:  # fmt: skip
    """What a rank would hold at a degree that was not run: the cache by its KV heads, activations as at the nearest."""
    ran = [(other, run) for other, ranks in results.items() for run in ranks[0].measured if run.phase == workload.phase]
    if not ran:
        return Memory(weights, 0, 0, weights if workload.phase == "train" else 0)
    other, measured = min(ran, key=lambda at: (at[1] != workload, abs(at[0] - degree), -at[1].batch * at[1].seq))
    like = memory_of(weights, results[other], measured, kinds)
    factor = max(1.0, workload.batch * workload.seq / (measured.batch * measured.seq))
    layer, plans_of = {"layer": kinds[0].first}, (plans[degree], plans[other])
    heads = [plan.rank_sizes(0, plan.model.sizes.of(layer)).get("kv", 1) for plan in plans_of]
    cache = int(like.cache * factor * heads[0] / heads[1])
    return replace(like, cache=cache, activations=int(like.activations * factor))


# ------------------------------------------------------------------------------------------------------- recommendation


WORTH = 0.5
"""The part of the ideal gain that a larger degree must bring."""


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
    smaller, larger = ([d for d in among if d < best], [d for d in fitting if d > best])
    if smaller:
        reasons.append(f"{_gain(of[smaller[-1]], of[best]):.2f} times as fast as tp {smaller[-1]}")
    if larger:
        reasons.append(_larger(larger[0], of[best], of[larger[0]]))
    alone = ((rows[0].workload, _best(among, dict(zip(of, ([row] for row in rows), strict=True))))
            for rows in zip(*of.values(), strict=True))  # fmt: skip
    return Recommendation(best, "; ".join(reasons), tuple((work, degree) for work, degree in alone if degree != best))


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
    need, capacity = human_bytes(worst.memory.total), human_bytes(worst.capacity)
    needs = f"needs {need} a rank{_left_out([worst])}, and {capacity} are there"
    return f"no degree fits: {worst.workload} at tp {worst.tp} {needs}"


def _left_out(rows: Sequence[Row]) -> str:
    """What a rank holds in training and these bytes do not have."""
    return " without optimizer states" if any(row.workload.phase == "train" for row in rows) else ""
