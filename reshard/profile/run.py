"""Profiles a model on this node: starts the ranks of each degree."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

from reshard.formats.errors import ReshardError, SettingError, redacted, refused
from reshard.formats.files.safetensors import DTYPE_BITS
from reshard.formats.mesh import mesh_of
from reshard.formats.store import FilePath
from reshard.mesh.degrees import check_degrees, refusal, valid_degrees
from reshard.mesh.plan import Plan, make_plan
from reshard.mesh.totals import activation_bytes, rows_of, totals_of
from reshard.model.model import Model
from reshard.profile.cost import NotRun, recommend, whole_model
from reshard.profile.job import LayerKind, ProfileJob, ProfileRequest, RankResult, Workload, layer_kinds, with_layers
from reshard.profile.processes import Node, run_processes
from reshard.profile.words import Profile
from reshard.system import cpu_count
from reshard.text import human_bytes, plural
from reshard.verify.rank.device import count, has_bfloat16, resolve
from reshard.verify.rank.group import MEMORY, RankError, machine_fault
from reshard.verify.rank.roles import positions_of

_LESS = "give a smaller batch or seq, or another degree"


def profile(folder: FilePath, node: Node, request: ProfileRequest, progress: Callable[[str], None]) -> Profile:
    """Profile the model of the config.json in a folder on a node. Raises ReshardError."""
    from reshard.model.skeleton import skeleton

    model = skeleton(folder, request.dtype, request.plan_file)
    if model.config["dtype"] == "bfloat16" and not has_bfloat16(node.device):
        raise ReshardError("these GPUs do not compute in bfloat16, and would imitate it", "give the dtype float16")
    kinds, limit = layer_kinds(model), positions_of(model)
    for workload in request.workloads:
        further = int(workload.phase == "decode")
        if limit is not None and workload.seq + further > limit:
            why = f"{workload.phase} takes {workload.seq + further:,} positions, and the model has a table of {limit:,}"
            raise refused("seq", workload.seq, why, instead=({"seq": limit - further},))
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
    capacity = {degree: request.memory or node.memory(degree) for degree in plans}
    rows, links = whole_model(plans, kinds, request.workloads, results, not_run, capacity, request.link)
    backend, name = (results[min(results)][0].backend, results[min(results)][0].device) if results else ("", "")
    parameters = totals_of(plans[min(plans)], rows_of(plans[min(plans)])).parameters
    return Profile(
        redacted(str(request.source)), model, kinds, node, str(model.config["dtype"]), backend, name, parameters,
        tuple(rows), impossible, tuple(links), recommend(rows),
    )  # fmt: skip


# ------------------------------------------------------------------------------------------------- what can be run


def node_of(request: ProfileRequest) -> Node:
    """The node that the ranks run on. Raises ReshardError for a GPU that is not there."""
    device = resolve(request.device)
    cores = cpu_count()
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
        impossible = [(n, refusal(model, mesh_of(n))) for n in range(1, node.ranks + 1) if n not in valid]
        return valid, tuple((degree, why.why) for degree, why in impossible if why is not None)
    for degree in request.tp:
        check_degrees(model, mesh_of(degree))
        if degree > node.ranks:
            why = f"this node has {plural(node.ranks, 'rank' if node.device == 'cpu' else 'GPU')}"
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
    boxes, tensors = plan.boxes(0), with_layers(plan, kinds).model.tensors
    here = [kind for _, kind, _ in tensors if kind in boxes]
    weights = sum(math.prod(boxes[kind].shape) * DTYPE_BITS[kind.dtype] // 8 for kind in here)
    sizes, train = plan.rank_sizes(0, plan.model.sizes.of({})), workload.phase == "train"
    hidden = sizes.get("hidden", 0)
    activations = workload.tokens * (sizes.get("ff", 0) * 3 + hidden * 8) * (4 * len(kinds) if train else 1)
    logits = (workload.tokens if train else workload.batch) * sizes.get("vocab", 0) * plan.mesh.size * 2
    pairs = sizes["kv"] * sizes["head"] if {"kv", "head"} <= sizes.keys() else hidden
    cache = workload.batch * workload.seq * 2 * pairs * len(kinds) if workload.phase == "decode" else 0
    return weights * (2 if train else 1) + (activations + logits + cache) * activation_bytes(plan)


def _run_what_fits(
    plan: Plan, kinds: tuple[LayerKind, ...], node: Node, request: ProfileRequest, progress: Callable[[str], None]
) -> tuple[list[RankResult], dict[Workload, NotRun]]:
    """Run the ranks of one degree with what there is memory for, and say of the other workloads why they did not run.

    Where memory runs out nevertheless, all ranks end. The others are then run again, without what takes as much.
    """
    from reshard.profile.rank import run_job

    degree, missing = plan.mesh.size, dict[Workload, NotRun]()
    for workload in request.workloads:
        need, free = _needed_here(plan, kinds, workload), node.free(degree)
        if need > free:
            why = f"needs {human_bytes(need)} a rank to be run, {human_bytes(free)} are free"
            missing[workload] = NotRun(why, ran_out=False)
    doing = ""

    def note(text: str) -> None:
        nonlocal doing
        doing = text
        progress(text)

    while runs := tuple(workload for workload in request.workloads if workload not in missing):
        job = ProfileJob(with_layers(plan, kinds), kinds, runs, node.threads, request.seconds)
        try:
            run = run_processes(run_job, degree, job, device=node.device, timeout=request.timeout, progress=note)
            return run, missing
        except RankError as error:
            if machine_fault(error.message) != MEMORY:
                raise
        last = next((run for run in runs if f"{doing}: ".startswith(f"tp {degree}: {run}: ")), None)
        why = "memory ran out" if last is None else f"memory ran out at {last}"
        gone = runs if last is None else [run for run in runs if run.takes_as_much_as(last)]
        missing |= dict.fromkeys(gone, NotRun(why, ran_out=request.memory is None))
    return [], missing
