"""Profiles a model on this node: starts the ranks of each degree, and puts together what they found."""

from __future__ import annotations

import math
import os
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from formats.errors import ReshardError, SettingError, redacted, refused, require_transformers
from formats.files.safetensors import DTYPE_BITS
from formats.mesh import mesh_of
from formats.store import FilePath
from reshard.mesh.degrees import check_degrees, refusal, valid_degrees
from reshard.mesh.plan import Plan, make_plan
from reshard.mesh.stages import is_layered
from reshard.mesh.totals import activation_bytes, all_reduces, rows_of, totals_of
from reshard.model.model import Model
from reshard.text import human_bytes
from verify.forward.launch import RankAnswer
from verify.profile.cost import (
    Link,
    Memory,
    NotRun,
    Part,
    Row,
    Time,
    Work,
    communication,
    counts_of,
    fit_link,
    fit_rates,
    memory_of,
    nearest,
    recommend,
    time_of,
    works,
)
from verify.profile.job import (
    Job,
    LayerKind,
    Patience,
    ProfileRequest,
    RankResult,
    Workload,
    layer_kinds,
    with_layers,
)
from verify.profile.processes import Node, run_processes
from verify.profile.words import Profile
from verify.rank.device import count, has_bfloat16, resolve
from verify.rank.group import MEMORY, RankError, machine_fault

_LESS = "give a smaller batch or seq, or another degree"


class _MemoryRanOut(Exception):  # noqa: N818
    """Memory ran out in a rank while a workload ran; None: before or after that."""

    def __init__(self, workload: Workload | None) -> None:
        super().__init__()
        self.workload = workload


def profile(folder: FilePath, request: ProfileRequest, progress: Callable[[str], None] = lambda _: None) -> Profile:
    """Profile the model of the config.json in a folder. Raises ReshardError."""
    require_transformers("profile")
    node = node_of(request)
    from verify.profile.blocks import skeleton

    model = skeleton(folder, request.dtype, request.plan_file)
    if model.config["dtype"] == "bfloat16" and not has_bfloat16(node.device):
        raise ReshardError("these GPUs do not compute in bfloat16, and would imitate it", "give the dtype float16")
    kinds = layer_kinds(model)
    degrees, impossible = _degrees(model, node, request)
    plans = {degree: make_plan(model, mesh_of(degree)) for degree in sorted({*degrees, *_predicted(model, request)})}
    results: dict[int, list[RankResult]] = {}
    not_run: dict[tuple[int, Workload], NotRun] = {}
    for degree in degrees:
        of_ranks, missing = _run_what_fits(plans[degree], kinds, node, request, progress)
        not_run |= {(degree, workload): why for workload, why in missing.items()}
        if of_ranks:
            results[degree] = of_ranks
    if degrees and not results:
        (degree, workload), obstacle = next(iter(not_run.items()))
        raise ReshardError(f"too little memory: tp {degree}, {workload}: {obstacle.why}", _LESS)
    return _put_together(model, kinds, node, request, plans, results, not_run, impossible)


# ------------------------------------------------------------------------------------------------- what can be run


def node_of(request: ProfileRequest) -> Node:
    """The node that the ranks run on. Raises ReshardError for a GPU that is not there."""
    device = resolve(request.device)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if device != "cpu":
        gpus = count(device)
        if request.ranks is not None and request.ranks > gpus:
            why, advice = f"this node has {gpus} GPUs", "a rank has a GPU of its own"
            raise refused("ranks", request.ranks, why, advice=advice)
        return Node(device, request.ranks or gpus, max(1, cores // gpus), cores)
    ranks = request.ranks or max([cores, *(request.tp or ())])
    return Node(device, ranks, max(1, cores // ranks), cores)


def _degrees(model: Model, node: Node, request: ProfileRequest) -> tuple[list[int], tuple[tuple[int, str], ...]]:
    """The degrees to run, and those that are not possible, with the reason that ``plan`` gives."""
    if request.tp is None:
        valid = valid_degrees(model, limit=node.ranks)
        impossible = [(n, refusal(model, "tp", n)) for n in range(1, node.ranks + 1) if n not in valid]
        return valid, tuple((degree, why.why) for degree, why in impossible if why is not None)
    for degree in request.tp:
        check_degrees(model, mesh_of(degree))
        if degree > node.ranks:
            why = f"this node has {node.ranks} {'ranks' if node.device == 'cpu' else 'GPUs'}"
            ways = [{"predict_tp": degree}, *([{"ranks": degree}] if node.device == "cpu" else [])]
            raise refused("tp", degree, why, instead=tuple(ways))
    return sorted(set(request.tp)), ()


def _predicted(model: Model, request: ProfileRequest) -> tuple[int, ...]:
    for degree in request.predict_tp:
        try:
            check_degrees(model, mesh_of(degree))
        except SettingError as error:
            raise SettingError(replace(error.refusal, name="predict_tp")) from error
    return request.predict_tp


def _needed_here(plan: Plan, kinds: Sequence[LayerKind], workload: Workload) -> int:
    """About how many bytes one rank takes to run a workload with one layer of each kind."""
    outside = sum(row.bytes_per_rank for row in rows_of(plan) if "{" not in row.name)
    weights = outside + sum(
        math.prod(entry.layout.boxes[0].shape) * kind.count // len(kind.layers) * DTYPE_BITS[entry.dtype] // 8
        for kind, entry in plan.laid.items()
        for layer in kinds
        if 0 in entry.layout.boxes and layer.first in kind.layers and is_layered(plan.model, kind)
    )
    cost = works(plan, kinds, workload)
    sizes, width = plan.rank_sizes(0, plan.model.sizes.of({})), activation_bytes(plan)
    widest = sizes.get("ff", 0) * 3 + sizes.get("hidden", 0) * 8
    train = workload.phase == "train"
    logits = (workload.tokens if train else workload.batch) * sizes.get("vocab", 0) * plan.mesh.size * width * 2
    activations = workload.tokens * widest * width * (4 * len(kinds) if train else 1)
    cache = sum(int(cost[kind.part].nbytes) for kind in kinds) if workload.phase == "decode" else 0
    return weights * (2 if train else 1) + activations + logits + cache


def _run_what_fits(
    plan: Plan, kinds: tuple[LayerKind, ...], node: Node, request: ProfileRequest, progress: Callable[[str], None]
) -> tuple[list[RankResult], dict[Workload, NotRun]]:
    """Run at one degree what there is memory for, and say of the other workloads why they did not run.

    Where memory runs out nevertheless, all ranks end. The others are then run again, without what takes as much.
    """
    missing: dict[Workload, NotRun] = {}
    for workload in request.workloads:
        need, free = _needed_here(plan, kinds, workload), node.free(plan.mesh.size)
        if need > free:
            why = f"needs {human_bytes(need)} a rank to be run, {human_bytes(free)} are free"
            missing[workload] = NotRun(why, ran_out=False)
    while runs := [workload for workload in request.workloads if workload not in missing]:
        try:
            return _run(plan, kinds, runs, node, request, progress), missing
        except _MemoryRanOut as error:
            last = error.workload
            why = "memory ran out" if last is None else f"memory ran out at {last}"
            gone = runs if last is None else [run for run in runs if run.takes_as_much_as(last)]
            missing |= dict.fromkeys(gone, NotRun(why, ran_out=request.memory is None))
    return [], missing


def _run(
    plan: Plan, kinds: tuple[LayerKind, ...], workloads: Sequence[Workload], node: Node, request: ProfileRequest,
    progress: Callable[[str], None],
) -> list[RankResult]:  # fmt: skip
    """Run the ranks of one degree. Raises ReshardError, and _MemoryRanOut with the workload at which memory ran out."""
    from verify.profile.rank import answer_job

    dtype, degree = str(plan.model.config["dtype"]), plan.mesh.size
    is_built_in = request.plan_file is None
    job = Job(
        with_layers(plan, kinds), kinds, is_built_in, tuple(workloads), dtype, node.device, node.threads,
        Patience(request.seconds),
    )  # fmt: skip
    last = [f"tp {degree}"]

    def note(text: str) -> None:
        last[0] = text
        progress(text)

    try:
        return run_processes(answer_job, degree, job, device=node.device, timeout=request.timeout, progress=note)
    except RankAnswer as answer:
        raise answer.value from None
    except RankError as error:
        if machine_fault(error.message) != MEMORY:
            raise
        _, _, doing = last[0].partition(": ")
        workload = next((run for run in workloads if doing.partition(": ")[0] == str(run)), None)
        raise _MemoryRanOut(workload) from error


# --------------------------------------------------------------------------------------------------- the whole model


def _put_together(
    model: Model, kinds: tuple[LayerKind, ...], node: Node, request: ProfileRequest, plans: dict[int, Plan],
    results: dict[int, list[RankResult]], not_run: dict[tuple[int, Workload], NotRun],
    refused: tuple[tuple[int, str], ...],
) -> Profile:  # fmt: skip
    links = {degree: fit_link(degree, _exchanges(ranks)) for degree, ranks in results.items() if degree > 1}
    times = {
        (degree, workload): time_of(ranks, workload, kinds)
        for degree, ranks in results.items()
        for workload in ranks[0].measured
    }
    needs = {(degree, workload): works(plan, kinds, workload)
             for degree, plan in plans.items() for workload in request.workloads}  # fmt: skip
    of_links = {degree: _link(links, degree, request.link if degree not in results else None) for degree in plans}
    rows = []
    for degree, plan in plans.items():
        totals = totals_of(plan, rows_of(plan))
        forward, backward = all_reduces(plan)
        for workload in request.workloads:
            measured = times.get((degree, workload))
            predicted = _predict(degree, workload, needs, times, counts_of(kinds), of_links[degree])
            weights = totals.bytes_per_rank
            if measured is not None:
                memory = memory_of(weights, results[degree], workload, kinds)
            else:
                memory = _memory_like(degree, plan, plans, workload, weights, results, kinds)
            stated = forward.nbytes + (backward.nbytes if workload.phase == "train" else 0) if degree > 1 else 0
            rows.append(
                Row(
                    degree, workload, measured, predicted, memory, request.memory or node.memory(degree),
                    stated * workload.tokens, not_run.get((degree, workload)),
                )
            )  # fmt: skip
    first = next(iter(results.values()), None)
    totals = totals_of(plans[min(plans)], rows_of(plans[min(plans)]))
    return Profile(
        redacted(str(request.source)), model, kinds, node, str(model.config["dtype"]),
        first[0].backend if first else "", first[0].device if first else "", totals.parameters,
        tuple(rows), refused, tuple(links.values()), recommend(rows),
    )  # fmt: skip


def _exchanges(ranks: Sequence[RankResult]) -> Iterator[tuple[int, float]]:
    """The bytes of each all-reduce that was timed by itself, and the median of its time."""
    for nbytes in ranks[0].exchanges:
        of_ranks = zip(*(rank.exchanges[nbytes] for rank in ranks), strict=True)
        yield nbytes, statistics.median(map(min, of_ranks))  # the last to come says how long it took


def _link(links: dict[int, Link], degree: int, bandwidth: float | None) -> Link | None:
    if degree == 1:
        return None
    if degree in links:
        return links[degree]
    nearest_link = nearest(links, degree)
    if nearest_link is None:
        return Link(degree, 0.0, bandwidth) if bandwidth else None
    return nearest_link.over(degree, bandwidth)


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
    degree: int, plan: Plan, plans: dict[int, Plan], workload: Workload, weights: int,
    results: dict[int, list[RankResult]], kinds: Sequence[LayerKind],
) -> Memory:  # fmt: skip
    """What a rank would hold at a degree that was not run: the cache by its KV heads, activations as at the nearest."""
    ran = [(other, run) for other, ranks in results.items() for run in ranks[0].measured if run.phase == workload.phase]
    if not ran:
        return Memory(weights, 0, 0, weights if workload.phase == "train" else 0)
    other, measured = min(ran, key=lambda at: (at[1] != workload, abs(at[0] - degree), -at[1].batch * at[1].seq))
    like = memory_of(weights, results[other], measured, kinds)
    factor = max(1.0, workload.batch * workload.seq / (measured.batch * measured.seq))
    heads = [
        plans[run].rank_sizes(0, plan.model.sizes.of({"layer": kinds[0].first})).get("kv", 1) for run in (degree, other)
    ]
    cache = int(like.cache * factor * heads[0] / heads[1])
    return replace(like, cache=cache, activations=int(like.activations * factor))
