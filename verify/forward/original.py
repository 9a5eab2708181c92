"""The original's own run, on rank 0 only: the values to compare the shards with, and the noise of its rounding."""

from __future__ import annotations

import dataclasses
import gc
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers.pytorch_utils import Conv1D

from reshard.formats.errors import CheckpointError
from reshard.formats.store import local_folder
from reshard.mesh.plan import Plan
from reshard.verify.ending import temporary_folder
from reshard.verify.forward import adapters
from reshard.verify.forward.foreign import write_whole
from reshard.verify.forward.job import Job, Reference, Run, dtype_name
from reshard.verify.forward.noise import Noise, measure, noise_of, yardstick
from reshard.verify.rank.device import CPU, empty, free, has_float64, is_noisy
from reshard.verify.rank.gradients import gradients_on_disk, loss_of
from reshard.verify.rank.group import machine_fault, say
from reshard.verify.rank.loading import Loaded, compute_on, load_original, on_disk
from reshard.verify.rank.roles import Role, roles
from reshard.verify.rank.trace import Places, Trace, blocks_of, inputs_of, is_choice, random_ids, run
from reshard.verify.run_settings import BYTES_ALONE

Inputs = Mapping[str, torch.Tensor]
"""Arguments of a model's forward."""


def reference_of(job: Job, device: torch.device) -> Reference:
    """Run the original, and return its results. Raises CheckpointError if it cannot be run, or nothing can be
    compared.
    """
    with temporary_folder("reshard-original-", job.original.path) as written:
        folder = local_folder(job.original.path)
        if job.is_written:
            folder = write_whole(job.original, written / "original")
        reference = _run_original(job, device, folder)
    _free()
    return reference


def _run_original(job: Job, device: torch.device, folder: Path) -> Reference:
    (ids, inputs, exact, without), reason = _run_exactly(job, device, folder)
    say(f"original in {dtype_name(job.dtype)}, {job.options.draws + 1} times")
    noises: dict[str, list[Noise]] = defaultdict(list)
    first, again = Trace(), None
    for number, trace in enumerate(_draws(job, inputs, exact, device, folder)):
        _check_numbers(trace, job, job.dtype)
        first = first if number else trace
        again = trace if is_noisy(device) and number == 1 else again
        for name, x in (*exact.states.items(), *exact.gradients.items()):
            noises[name].append(noise_of(trace.states[name] if name in exact.states else trace.gradients[name], x))
        del trace  # or two runs would be in memory at once
        empty()
    of_vocabulary = (n for n, state in exact.states.items() if "logits" in n and state.shape[-1] in _rows(job))
    logits = next(of_vocabulary, None)
    states, gradients = (
        {n: yardstick(x, noises[n], job.dtype) for n, x in run.items()} for run in (exact.states, exact.gradients)
    )
    apart = {n: dataclasses.replace(states[n], exact=x) for n, x in first.states.items()}
    repeated = max(measure(x, apart[n]).ratio for n, x in again.states.items()) if again is not None else None
    what = Run(
        batch=ids.shape[0], seq=ids.shape[1], draws=job.options.draws, choices=exact.choices,
        own_overruled=first.overruled, reason=reason, repeated=repeated,
    )  # fmt: skip
    return Reference(
        run=what,
        ids=ids,
        inputs=inputs,
        states=states,
        logits=logits,
        own_logits=first.states[logits] if logits else None,
        chosen=exact.chosen,
        gradients=gradients,
        effects={name: measure(state, states[name]).ratio for name, state in without.items()},
        outputs=tuple(exact.outputs),
    )


def _draws(job: Job, inputs: Inputs, exact: Trace, device: torch.device, folder: Path) -> Iterator[Trace]:
    """Runs of the original in its own dtype: of each, the rounding is another sample.

    An accelerator does the first run twice. With an adapter, the last run has it in its weights, as PEFT adds it: the
    rounding of the sum is noise, too.
    """
    with _original(job, job.dtype, device, folder) as loaded, _refusing(job):
        for draw in (0, *((0,) if is_noisy(device) else ()), *range(1, job.options.draws + 1)):
            yield _run_whole(loaded, inputs, job, device, exact, draw)
    del loaded  # or both models would be in memory at once
    if job.adapter is not None:
        say("original with the adapter in its weights")
        with _original(job, job.stored, device, folder) as loaded, _refusing(job):
            adapters.merge(loaded.adapter)
            loaded.model.to(job.dtype)
            yield _run_whole(loaded, inputs, job, device, exact)


class _Exact(NamedTuple):
    """The run that all others are measured against: its tokens, all that its forward takes, and the states of the base
    model without an adapter.
    """

    ids: torch.Tensor
    inputs: Inputs
    trace: Trace
    without: Mapping[str, torch.Tensor]


def _run_exactly(job: Job, device: torch.device, folder: Path) -> tuple[_Exact, str | None]:
    """Run the original in higher precision: on the device, or else on the CPU, and why."""
    name, reason = dtype_name(job.exact_dtype), None
    if job.exact_dtype == torch.float64 and not has_float64(device):
        reason = f"{name} on the CPU: {device.type} does not compute in it"
    elif device != CPU:
        try:
            return _run_exactly_on(job, device, folder), None
        except (RuntimeError, TypeError) as error:  # kernels beside transformers take some dtypes alone
            if machine_fault(error):
                raise
            reason = f"{name} on the CPU: the kernels that run this model on {device.type} do not take it"
    return _run_exactly_on(job, CPU, folder), reason


def _run_exactly_on(job: Job, device: torch.device, folder: Path) -> _Exact:
    say(f"original in {dtype_name(job.exact_dtype)}")
    options, avoided = job.options, _avoided(job)
    with _original(job, job.exact_dtype, device, folder) as loaded:
        model, ids = loaded.model, job.ids
        ids = random_ids(model, options.batch, options.seq, options.seed, avoided) if ids is None else ids
        inputs, without = inputs_of(model, ids, job.dtype, avoided), dict[str, torch.Tensor]()
        trace = _run_whole(loaded, inputs, job, device)
        _check_numbers(trace, job, job.exact_dtype)
        if job.adapter is not None:
            with loaded.adapter.disable_adapter():
                without = _run_whole(loaded, inputs, job, device, trace).states
        return _Exact(ids, inputs, trace, without)


def _run_whole(
    loaded: Loaded, inputs: Inputs, job: Job, device: torch.device, exact: Trace | None = None, draw: int = 0
) -> Trace:
    """Run the original, and its loss backward if that is asked for. ``exact`` is the run whose choices are taken."""
    inputs = {name: value.to(device) for name, value in inputs.items()}
    chosen = exact.chosen if exact else None
    feed = exact.states if exact and job.options.streamed else None
    places = places_of(loaded, job.plan)
    trace = run(loaded.model, inputs, places, chosen, draw=draw, grad=job.options.backward, feed=feed)
    if job.adapter is not None:
        trace.states = adapters.named_as_unwrapped(trace.states)
    if job.options.backward:
        loaded.model.zero_grad()
        loss_of(trace.outputs).backward()  # type: ignore[no-untyped-call]
        trace.outputs = {name: output.detach() for name, output in trace.outputs.items()}  # their graph has the model
        trace.gradients = gradients_on_disk(loaded.model, loaded.sources)
    return trace


def _avoided(job: Job) -> int | None:
    """The token of padding, with gradients: its row takes none in some models, and a rank's config.json cannot always
    say which row it is.
    """
    padding = job.plan.model.sizes.settings.get("pad_token_id")
    return padding if job.options.backward and isinstance(padding, int) else None


def places_of(loaded: Loaded, plan: Plan) -> Places:
    """The blocks, and the modules whose outputs are summed over the ranks: there, values are whole again."""
    kinds = plan.model.kind_of
    layered = [  # {dlayer} of a decoder, too
        name for name, sources in loaded.sources.items() if any("layer}" in kinds[s].template for s in sources)
    ]
    of_modules = {
        name.rpartition(".")[0]: role for name, role in roles(plan, loaded.sources).items() if _is_summed(role)
    }
    summed = {name: loaded.model.get_submodule(name) for name in of_modules}
    parts = {name: parts for name, role in of_modules.items() if (parts := _parts(summed[name], role))}
    return Places(blocks_of(loaded.model, layered), summed, parts)


def _parts(module: torch.nn.Module, role: Role) -> list[torch.Tensor]:
    """The inputs of a linear layer that each rank multiplies; none if ranks sum anything else."""
    layout, inputs = role.layout, [*role.layout.rule.input_dims]
    if role.split != "row" or not isinstance(module, (torch.nn.Linear, Conv1D)) or len(layout.full) != 2:
        return []
    owned = dict.fromkeys(box.dims[inputs[0]] for box in layout.boxes.values())
    length = layout.full[inputs[0]]  # what is behind it is padding
    inside = ([torch.arange(run.offset, min(run.end, length)) for run in runs if run.offset < length] for runs in owned)
    return [torch.cat(numbers) for numbers in inside if numbers]


def _is_summed(role: Role) -> bool:
    return role.split == "row" or (bool(role.experts_along) and role.split == "whole")


def _check_numbers(trace: Trace, job: Job, dtype: torch.dtype) -> None:
    """Raise CheckpointError for an original with which nothing can be compared, as it computes NaN or infinity.

    What must or may not be chosen has infinite scores, and what may not be said has a logit of minus infinity.
    """
    wrong: list[str] = []
    for name, state in trace.states.items():
        is_wrong = state.isnan()
        if not is_choice(name):
            is_wrong |= state.isposinf() if name in trace.outputs else state.isinf()
        wrong += [f"output is not a number from '{name}' on"] if is_wrong.any() else []
    wrong += [f"gradient of '{name}' is not a number" for name, x in trace.gradients.items() if not x.isfinite().all()]
    if wrong:
        hint = "--compute-dtype float32 has a wider range" if dtype == torch.float16 else BYTES_ALONE
        raise CheckpointError(f"{job.original.path}: the original's own {wrong[0]}, in {dtype_name(dtype)}", hint)


@contextmanager
def _original(job: Job, dtype: torch.dtype, device: torch.device, folder: Path) -> Iterator[Loaded]:
    """The whole model: on one device if it fits, else over all and the CPU; streamed, its weights stay on disk."""
    _free()
    with temporary_folder("reshard-offload-") as offload:
        options: dict[str, Any] = {"device_map": {"": device}}
        if job.options.streamed:
            options = on_disk(offload)
        elif device.type != "cpu" and not _fits(job, dtype, device):
            options = {"device_map": "auto", "offload_folder": offload}
        loaded = load_original(folder, job.original.model.config, job.plan, dtype, options)
        if job.options.streamed:
            compute_on(loaded.model, device)
        if job.adapter is not None:
            loaded = dataclasses.replace(loaded, adapter=adapters.apply(loaded.model, job.adapter, dtype))
        yield loaded


def _free() -> None:
    """Free the memory of a model that nobody needs: accelerate's hooks refer to it in cycles."""
    gc.collect()
    empty()


@contextmanager
def _refusing(job: Job) -> Iterator[None]:
    """Say so where transformers' code of a model, which ran in higher precision, does not run in the job's dtype."""
    try:
        yield
    except RuntimeError as error:
        if machine_fault(error):
            raise
        raise CheckpointError(
            f"{job.original.path}: transformers runs the original in {dtype_name(job.exact_dtype)}, but not in "
            f"{dtype_name(job.dtype)}: {' '.join(str(error).split())}",
            "--compute-dtype float32 compares the models in float32" if job.dtype != torch.float32 else None,
        ) from error


def _fits(job: Job, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether the model fits into the free memory, with its gradients if they are wanted, and a fifth more for
    activations.
    """
    numbers = sum(math.prod(layout.full) for layout in job.plan.layouts.values())
    return numbers * dtype.itemsize * (2.2 if job.options.backward else 1.2) < free(device)


def _rows(job: Job) -> list[int]:
    """The sizes of the vocabularies."""
    sizes = job.plan.model.sizes.of({})
    return sorted(sizes[axis] for axis in job.plan.model.architecture.pad if axis in sizes)
