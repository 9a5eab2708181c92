"""The work of each rank: it runs its own shards on the original's tokens, and measures their distance from the
original.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeGuard

import torch
import torch.nn.functional as F  # noqa: N812

from reshard.formats.errors import CheckpointError, ReshardError
from reshard.formats.store import local_folder
from reshard.mesh.plan import Plan
from reshard.text import plural
from reshard.verify.ending import temporary_folder
from reshard.verify.forward.adapters import as_adapter, write_adapted_rank
from reshard.verify.forward.foreign import write_rank
from reshard.verify.forward.job import Failure, Job, Logits, Mismatch, Reference, Result, is_loaded, run_plan
from reshard.verify.forward.noise import LIMIT, SURE, Distance, Yardstick, measure
from reshard.verify.forward.original import places_of, reference_of
from reshard.verify.rank.collectives import Groups
from reshard.verify.rank.gradients import gradients_on_disk, loss_of, together
from reshard.verify.rank.group import RankAnswer, is_of_collective, machine_fault, say, world
from reshard.verify.rank.loading import Loaded, UnfitError
from reshard.verify.rank.model import load_rank
from reshard.verify.rank.roles import Rank, roles
from reshard.verify.rank.stages import Pipeline, plan_of_stage
from reshard.verify.rank.trace import Places, Trace, run

_MORE = 4  # times the draws of the rounding, when an alarm is looked at again


def run_job(job: Job) -> Result:
    """Run a comparison, and once more if it is an alarm that the tail of the rounding may have raised. Where bytes
    are equal and rules built in, float32 has the last word, which knows a fault from rounding.

    Returns this rank's result.
    """
    groups = Groups(job.plan.mesh)
    result, worst = _run_once(job, groups)
    if LIMIT < worst <= SURE:
        say("that is little more than rounding: once more, with more draws of it")
        options = dataclasses.replace(job.options, draws=_MORE * (job.options.draws + 1) - 1)
        result, worst = _run_once(dataclasses.replace(job, options=options), groups)
    has_equal_bytes = any(world().gather(job.has_equal_bytes))  # of a launcher's ranks, the first has compared them
    may_be_rounding = has_equal_bytes and job.is_built_in and job.adapter is None and job.dtype.itemsize == 2
    if not (may_be_rounding and LIMIT < worst < math.inf):
        return result
    say("every byte is equal: float32 decides")
    return dataclasses.replace(_run_once(dataclasses.replace(job, dtype=torch.float32), groups)[0], alarm=worst)


def _run_once(job: Job, groups: Groups) -> tuple[Result, float]:
    """This rank's result, and the largest ratio of all ranks."""
    started, gradients = time.monotonic(), dict[str, Yardstick]()

    def run_original() -> Reference:
        reference = reference_of(job, world().device)
        gradients.update(reference.gradients)  # they stay on the first rank, which alone compares them
        return dataclasses.replace(reference, gradients={})

    reference = dataclasses.replace(world().share(run_original), gradients=gradients)
    with temporary_folder("reshard-offload-", job.shards.path) as offload:
        result = _run_shards(job, groups, offload, reference, started)
    ratio = max((distance.ratio for _, distance in (*result.rows, *result.gradients)), default=0.0)
    return result, max(world().gather(ratio))


def _run_shards(job: Job, groups: Groups, offload: Path, reference: Reference, started: float) -> Result:
    """Run this rank's shards, and compare.

    Raises RankAnswer where the shards' model fails and the original's did not. With built-in rules, which are known to
    be right, such a failure is an error of the run, not a difference.
    """
    mesh, number, trace, sources = job.plan.mesh, world().rank, Trace(), dict[str, tuple[str, ...]]()
    stage, pipeline = mesh.stage(number), Pipeline(job.plan)
    plan = plan_of_stage(job.plan, stage)
    rank = Rank(plan, number % plan.mesh.size, job.original.model.architecture, job.is_built_in)
    folder = _folder_of(job, number, offload)
    say(f"shards on {plural(mesh.size, 'rank')}")
    inputs = {name: value.to(world().device) for name, value in reference.inputs.items()}
    feed = {name: expected.exact for name, expected in reference.states.items()} if job.options.streamed else None
    try:
        loaded = load_rank(
            folder, rank, job.dtype, world().device, groups, tokens=reference.ids.shape[1],
            offload=offload if job.options.streamed else None, pipeline=pipeline if mesh.pp > 1 else None,
        )  # fmt: skip
        sources |= loaded.sources
        places = places_of(loaded, plan)
        pipeline.receive(grad=job.options.backward)
        pipeline.connect(loaded, groups, trace, reference.chosen)
        run(
            loaded.model, inputs, places, reference.chosen,
            grad=job.options.backward, feed=feed, into=trace, continued=pipeline.continued,
        )  # fmt: skip
        say("comparison")
        _check_alike(trace.states, reference)
        gradients = _backward(loaded, trace, job, reference, groups, pipeline) if job.options.backward else ()
    except Exception as error:
        if not is_of_model(error):
            raise
        failure = failure_of(error, plan, trace.path, sources)
        if not job.is_built_in:
            raise RankAnswer(_result(reference, trace, started, failure=failure)) from error
        if isinstance(error, ReshardError):
            raise
        where = f"'{failure.place}' fails, where the original's does not" if failure.place else "fails"
        raise CheckpointError(f"the shards' model: {where}: {failure.message}") from error
    logits = None
    if reference.logits is not None and reference.own_logits is not None and pipeline.is_last and rank.rank == 0:
        exact = reference.states[reference.logits].exact
        logits = compare_logits(trace.states[reference.logits], reference.own_logits, exact)
    biases = _biases_twice(places, trace, reference) if rank.rank == 0 else ()
    more = {"logits": logits, "unused": loaded.unused, "cut": loaded.cut, "gradients": gradients, "biases": biases}
    return _result(reference, trace, started, **more)


def _folder_of(job: Job, rank: int, offload: Path) -> Path:
    """The folder that transformers loads a rank from; one within ``offload`` if it must be written first."""
    shards, is_plain = job.shards, is_loaded(job.shards)
    folder = local_folder(shards.path)
    if not is_plain:
        folder = write_rank(shards, run_plan(shards), rank, offload / "rank")
    elif shards.checkpoint is None:
        folder /= job.plan.mesh.folder(rank)
    if not job.is_alone:
        return folder
    adapter = folder if is_plain else as_adapter(folder)
    return write_adapted_rank(job.original, job.plan, rank, adapter, offload / "adapted")


def _result(reference: Reference, trace: Trace, started: float, **more: Any) -> Result:
    """Return the findings of this rank, with the distance at each place that its run came to."""
    states = {name: (trace.states.get(name), expected) for name, expected in reference.states.items()}
    rows = tuple((name, measure(state, at)) for name, (state, at) in states.items() if _is_alike(state, at))
    ours = {"overruled": trace.overruled, "backend": world().backend, "seconds": time.monotonic() - started, **more}
    return Result(
        rank=world().rank, rows=rows, effects=reference.effects, outputs=reference.outputs,
        **(vars(reference.run) | ours),
    )  # fmt: skip


def _biases_twice(places: Places, trace: Trace, reference: Reference) -> tuple[tuple[str, float], ...]:
    """Return the ratio for each bias of a row-parallel weight if two ranks had added it."""
    ratios = []
    for name, module in places.others.items():
        bias, state = getattr(module, "bias", None), trace.states.get(name)
        if isinstance(bias, torch.Tensor) and state is not None and not bias.is_meta and bias.any():
            twice = state.double() + bias.detach().to("cpu", torch.float64)
            ratios.append((name, measure(twice, reference.states[name]).ratio))
    return tuple(ratios)


def _backward(
    loaded: Loaded, trace: Trace, job: Job, reference: Reference, groups: Groups, pipeline: Pipeline
) -> tuple[tuple[str, Distance], ...]:
    """The gradients of all ranks, put together and compared on rank 0."""
    say("gradients")
    pipeline.backward(loss_of(trace.outputs) if pipeline.is_last else None)
    along = {id(tensor): dimensions for tensor, dimensions in loaded.parts}
    for parameter in loaded.model.parameters():
        if not groups.is_first(along.get(id(parameter), frozenset())):
            parameter.grad = None  # the same as another rank's
    gradients = gradients_on_disk(loaded.model, loaded.sources, loaded.experts)
    rows: list[tuple[str, Distance]] = []
    for name in sorted(job.plan.layouts):
        parts = world().collect(gradients.get(name))
        if name in reference.gradients:
            layout = job.plan.layouts[name]
            zero = torch.zeros(layout.full, dtype=job.dtype)
            gradient = together(layout, parts) if any(part is not None for part in parts) else zero
            rows.append((name, measure(gradient, reference.gradients[name])))
    return tuple(rows)


def _check_alike(states: Mapping[str, torch.Tensor], reference: Reference) -> None:
    """Raise UnfitError unless each place has a state like the original's, on this rank or on other stages' ranks."""
    elsewhere = {name for names in world().gather([*states]) for name in names} - states.keys()
    for name, expected in reference.states.items():
        if name not in elsewhere and not _is_alike(states.get(name), expected):
            shape = list(states[name].shape) if name in states else "nothing"
            message = f"the shards' model has {shape} at '{name}', the original {list(expected.exact.shape)}"
            raise UnfitError(message, place=name)


def _is_alike(state: torch.Tensor | None, expected: Yardstick) -> TypeGuard[torch.Tensor]:
    return state is not None and state.shape == expected.exact.shape


def compare_logits(sharded: torch.Tensor, plain: torch.Tensor, exact: torch.Tensor) -> Logits:
    """The shards' logits and the original's own against the high-precision ones; ``[..., vocabulary]`` each."""
    sharded, plain, exact = (x.double().flatten(0, -2) for x in (sharded, plain, exact))
    expected, chosen = exact.argmax(-1), sharded.argmax(-1)
    two = exact.topk(2, -1).values
    mismatches = [
        Mismatch(int(i), int(expected[i]), int(chosen[i]), float(two[i, 0] - two[i, 1]))
        for i in (expected != chosen).nonzero().flatten().tolist()
    ]
    log = F.log_softmax(exact, -1)
    scale = float(exact.square().mean().sqrt()) or 1.0

    def distances(x: torch.Tensor, prefix: str = "") -> dict[str, Any]:
        return {
            f"{prefix}max_error": float((x - exact).abs().max()),
            f"{prefix}relative_error": float((x - exact).square().mean().sqrt()) / scale,
            f"{prefix}kl": float(F.kl_div(F.log_softmax(x, -1), log, log_target=True, reduction="batchmean")),
            f"{prefix}agreement": float((x.argmax(-1) == expected).double().mean()),
        }

    return Logits(
        **distances(sharded),
        **distances(plain, "own_"),
        positions=len(expected),
        mismatches=tuple(mismatches),
        histogram=_histogram(sharded - exact, plain - exact),
    )


def _histogram(error: torch.Tensor, noise: torch.Tensor, bins: int = 41) -> tuple[tuple[float, int, int], ...]:
    """The differences of the logits, shards' and original's own: each bin's centre, and how many of each it has."""
    reach = float(torch.maximum(error.abs().max(), noise.abs().max())) or 1.0
    if not reach < float("inf"):
        return ()
    counts = [torch.histc(x, bins, -reach, reach).to(torch.int64).tolist() for x in (error, noise)]
    step = 2 * reach / bins
    return tuple((-reach + step * (i + 0.5), *pair) for i, pair in enumerate(zip(*counts, strict=True)))


# ------------------------------------------------------------------------------------------------------------- failures


def is_of_model(error: Exception) -> bool:
    """Whether the model caused an error, and not the machine or another rank."""
    if isinstance(error, ReshardError):
        return isinstance(error, UnfitError)
    return not (isinstance(error, OSError) or machine_fault(error) or is_of_collective(error))


def failure_of(error: Exception, plan: Plan, path: Sequence[str], sources: Mapping[str, tuple[str, ...]]) -> Failure:
    """Return the place at which the shards' model failed, and the tensor whose rule does not fit there."""
    place, tensor, is_gathered = path[-1] if path else "", None, False
    if isinstance(error, UnfitError):
        place, parameter = error.place, error.parameter
        tensor = next((name for name in plan.layouts if name.endswith(parameter)), None) if "." in parameter else None
    if tensor is None:
        tensor, is_gathered = _unfitting(place, plan, sources)
    rule = str(plan.layouts[tensor].rule) if tensor else None
    message = error.message if isinstance(error, ReshardError) else " ".join(f"{type(error).__name__}: {error}".split())
    return Failure(place, world().rank, message, tensor, rule, is_gathered)


def _unfitting(place: str, plan: Plan, sources: Mapping[str, tuple[str, ...]]) -> tuple[str | None, bool]:
    """The tensor to look at if a module fails: the nearest in its block of which nothing takes a part, or its own."""
    role_of = roles(plan, sources)
    around = place
    while around and (around == place or any(segment.isdigit() for segment in around.split("."))):
        for name, role in role_of.items():
            if name.startswith(f"{around}.") and role.is_gathered and role.split == "column":
                return role.tensor, True
        around = around.rpartition(".")[0]
    entries = (role.tensor for name, role in role_of.items() if name.rpartition(".")[0] == place and role.along)
    return next(entries, None), False
