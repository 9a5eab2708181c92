"""Whether shards compute what the original model computes: both run, on the same tokens.

The original runs whole, in its own dtype and in higher precision; the shards run in as many processes as there are
ranks, each of which loads only its own folder. Hidden states throughout the model and the outputs are compared; see
verify/noise.py for what counts as equal.
"""

from __future__ import annotations

import dataclasses
import math
import platform
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from importlib.metadata import version
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812

from formats.errors import CheckpointError, ReshardError
from formats.notation.architecture import Architecture
from reshard.engine.loading import TORCH_DTYPES
from reshard.planning.plan import Plan, dequantized
from reshard.storage.source import Source
from verify.ending import temporary_folder
from verify.forward.launch import RankAnswer, is_of_collective, rank_device, run_ranks, say, start_fork_server
from verify.forward.noise import FACTOR, FLOOR, SURE, Distance, Yardstick, measure, yardstick
from verify.rank.collectives import Groups
from verify.rules import own_rules

if TYPE_CHECKING:
    from verify.rank.model import Loaded
    from verify.rank.trace import Places, Trace

Progress = Callable[[str], None]
"""Called with what is being done."""

POOR = 0.25
"""The part of the values that a fault may change unseen, from which on the power of a run is called poor."""

_BYTES_ALONE = "--exact-only compares the bytes alone"
_MORE = 4  # times the draws of the rounding, when an alarm is looked at again
_PATIENCE = timedelta(hours=24)  # for the original's run, in which the other ranks have nothing to do


def _no_progress(message: str) -> None:
    pass


@dataclass(frozen=True)
class ForwardOptions:
    """What to run. ``dtype`` is ``float32``, ``bfloat16`` or ``float16``, by default that of the checkpoint.

    ``batch`` x ``seq`` random tokens from ``seed``, or those of ``prompt``. ``timeout`` is in seconds, of one
    collective. ``draws`` is how often the rounding of the original in its own dtype is drawn again, to begin with.
    """

    device: str = "auto"
    dtype: str | None = None
    batch: int = 2
    seq: int = 32
    seed: int = 0
    prompt: str | None = None
    backward: bool = False
    streamed: bool = False
    timeout: float = 300.0
    draws: int = 7


@dataclass(frozen=True)
class Row:
    """One place in the model, or the gradient of one weight: error beside noise, the worst of all ranks."""

    name: str
    error: float
    noise: float
    ratio: float
    worst: str
    rank: int
    is_same: bool


@dataclass(frozen=True)
class Mismatch:
    """A position where the most likely token differs. ``margin`` is the reference's from first to second, in logits."""

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
    """That the shards' model does not run where the original's does.

    ``place`` is the module in which it ended on ``rank``, empty while it was loaded; ``tensor`` the one whose ``rule``
    does not fit there, as far as that is known; ``is_gathered`` if no weight takes the part that a rank has of it.
    """

    place: str
    rank: int
    message: str
    tensor: str | None
    rule: str | None
    is_gathered: bool


@dataclass(frozen=True)
class Power:
    """How small a fault the run would have shown.

    ``noise`` is the largest of all places, at ``place``, relative to the values there; ``seen_from`` the part of the
    values that a fault has to change to be told from it. ``bias_ratio`` is the smallest that a bias of a row-parallel
    weight would have measured had it been added twice, at ``bias_place``; None where there is no such bias.
    ``is_poor`` if faults are hidden that change much of the values.
    """

    noise: float
    place: str
    seen_from: float
    bias_ratio: float | None
    bias_place: str | None
    is_poor: bool


@dataclass(frozen=True)
class ForwardReport:
    """The answer: ``is_same``, or ``first`` names the first place that leaves the noise, or in which the shards' model
    ended with a ``failure``; and what was run on what.

    ``unused`` are tensors that the original's model does not use; ``cut`` parameters that have not the shape on a rank
    that its config.json gives them.
    """

    is_same: bool
    verdict: str
    first: str | None
    failure: Failure | None
    power: Power | None
    factor: float
    layers: tuple[Row, ...]
    gradients: tuple[Row, ...]
    logits: Logits | None
    draws: int
    choices: int
    own_overruled: int
    overruled: int
    unused: tuple[str, ...]
    cut: tuple[str, ...]
    mesh: Mapping[str, Any]
    ranks: int
    dtype: str
    exact_dtype: str
    device: str
    backend: str
    batch: int
    seq: int
    seed: int
    seconds: float
    versions: Mapping[str, str]


def run_forward(
    original: Source, shards: Source, options: ForwardOptions = ForwardOptions(), progress: Progress = _no_progress
) -> ForwardReport:
    """Run the original and its shards, and compare. Raises ReshardError if that cannot be done."""
    return run_forwards([(original, shards)], options, progress)[0]


IMPORTED = ("transformers.modeling_utils", "transformers.models.auto.modeling_auto", "verify.forward.compare")
"""What all ranks need, imported once for all."""


def run_forwards(
    pairs: Sequence[tuple[Source, Source]],
    options: ForwardOptions = ForwardOptions(),
    progress: Progress = _no_progress,
) -> list[ForwardReport]:
    """Compare several pairs of the same number of ranks in one launch of processes."""
    start_fork_server(*IMPORTED)
    jobs = [_job(original, shards, options) for original, shards in pairs]
    world = jobs[0].plan.mesh.size
    if any(job.plan.mesh.size != world for job in jobs):
        raise ValueError("all pairs need the same number of ranks")
    device = _device(options.device)
    progress(f"starting {world} ranks, {device}")
    try:
        results = run_ranks(_run_jobs, world, jobs, device, device=device, timeout=options.timeout, progress=progress)
    except RankAnswer as answer:
        if len(pairs) > 1:
            return [run_forwards([pair], options, progress)[0] for pair in pairs]
        return [_report(jobs[0], [answer.value], device)]
    return [_report(job, [ranks[i] for ranks in results], device) for i, job in enumerate(jobs)]


def _device(wanted: str) -> str:
    if wanted == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if wanted == "cuda" and not torch.cuda.is_available():
        raise ReshardError("--device cuda: torch finds no CUDA device", "use --device cpu")
    if wanted not in {"cpu", "cuda"}:
        raise ReshardError(f"--device {wanted} is not possible", "auto, cpu or cuda")
    return wanted


@dataclass(frozen=True)
class _Job:
    """A comparison, as it is sent to the ranks."""

    original: Path
    original_config: Mapping[str, Any]
    shards: Path
    plan: Plan
    modules: Architecture
    dtype: torch.dtype
    ids: Any
    options: ForwardOptions
    is_built_in: bool

    @property
    def exact_dtype(self) -> torch.dtype:
        return torch.float64 if self.dtype == torch.float32 else torch.float32

    @property
    def config(self) -> Mapping[str, Any]:
        return self.plan.model.config


def _job(original: Source, shards: Source, options: ForwardOptions) -> _Job:
    if original.checkpoint is None:
        raise CheckpointError(
            f"{original.path} is split: the forward needs the full checkpoint that it is compared with"
        )
    if shards.sharded is None:
        raise CheckpointError(
            f"{shards.path} is a full checkpoint, not shards", "give the folder that 'reshard split' wrote"
        )
    if options.streamed and options.backward:
        raise ReshardError("--streamed and --backward cannot be had together: gradients need the whole model at once")
    ids = _prompt(original.path, options.prompt) if options.prompt is not None else None
    config, plan = original.checkpoint.config, dequantized(shards.plan)
    if plan is not shards.plan:
        _check_dequantizing(original, config, options)
    return _Job(
        original.path,
        config,
        shards.path,
        plan,
        original.model.architecture,
        _dtype(original, plan, options),
        ids,
        options,
        own_rules(shards.plan, original.model.architecture) == (),
    )


def _check_dequantizing(original: Source, config: Mapping[str, Any], options: ForwardOptions) -> None:
    """Raise ReshardError unless transformers can load a quantized checkpoint with plain weights."""
    from verify.rank.model import dequantizing

    if options.backward:
        raise ReshardError(f"{original.path} is quantized: --backward needs weights that have gradients")
    try:
        can = dequantizing(config)
    except ReshardError as error:
        raise ReshardError(f"{original.path} is {error.message}", _BYTES_ALONE) from None
    if not can:
        raise ReshardError(f"{original.path} is quantized, and its config.json does not say how", _BYTES_ALONE)


def _dtype(original: Source, plan: Plan, options: ForwardOptions) -> torch.dtype:
    """The dtype asked for, or the one of most of the checkpoint's numbers, scales and packed ones aside."""
    known = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
    if options.dtype is not None:
        if options.dtype not in known:
            raise ReshardError(f"--dtype {options.dtype} is not possible", "float32, bfloat16 or float16")
        return known[options.dtype]
    count: dict[torch.dtype, int] = {}
    for name, tensor in original.ranks[0].items():
        dtype = TORCH_DTYPES.get(tensor.dtype) if name in plan.entries else None
        if dtype in known.values() and dtype is not None:
            count[dtype] = count.get(dtype, 0) + tensor.nbytes
    return max(count, key=lambda dtype: count[dtype], default=torch.float32)


def _prompt(folder: Path, text: str) -> Any:
    import transformers

    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{folder}: no tokenizer for --prompt: {' '.join(str(error).split())}") from None
    ids = tokenizer(text, return_tensors="pt")["input_ids"]
    if ids.numel() == 0:
        raise ReshardError("--prompt has no tokens")
    return ids


# In a rank


@dataclass(frozen=True)
class _Reference:
    """What the original did, as rank 0 sends it to all."""

    ids: torch.Tensor
    inputs: Mapping[str, torch.Tensor]
    states: Mapping[str, Yardstick]
    logits: str | None
    own_logits: torch.Tensor | None
    chosen: Sequence[torch.Tensor]
    choices: int
    overruled: int
    seconds: float
    gradients: Mapping[str, Yardstick] = field(default_factory=dict)


@dataclass(frozen=True)
class _Result:
    """What a rank found. ``logits`` and ``biases`` from rank 0 alone."""

    rank: int
    rows: tuple[tuple[str, Distance], ...]
    logits: Logits | None
    draws: int
    choices: int
    own_overruled: int
    overruled: int
    unused: tuple[str, ...]
    backend: str
    seq: int
    batch: int
    seconds: float
    gradients: tuple[tuple[str, Distance], ...] = field(default=())
    biases: tuple[tuple[str, float], ...] = field(default=())
    cut: tuple[str, ...] = ()
    failure: Failure | None = None


def _run_jobs(jobs: Sequence[_Job], device: str) -> list[_Result]:
    patient = dist.new_group(backend="gloo", timeout=_PATIENCE)
    timeout = timedelta(seconds=jobs[0].options.timeout)
    groups = {mesh: Groups(mesh, timeout) for mesh in dict.fromkeys(job.plan.mesh for job in jobs)}
    return [_run_job(job, rank_device(device), groups[job.plan.mesh], patient) for job in jobs]


def _run_job(job: _Job, device: torch.device, groups: Groups, patient: dist.ProcessGroup | None) -> _Result:
    """Run a comparison, and once more if it is an alarm that the tail of the rounding may have raised."""
    result, worst = _run_once(job, device, groups, patient)
    if not FACTOR < worst <= SURE:
        return result
    say("that is little more than rounding: once more, with more draws of it")
    options = dataclasses.replace(job.options, draws=_MORE * (job.options.draws + 1) - 1)
    return _run_once(dataclasses.replace(job, options=options), device, groups, patient)[0]


def _run_once(
    job: _Job, device: torch.device, groups: Groups, patient: dist.ProcessGroup | None
) -> tuple[_Result, float]:
    """What this rank found, and the largest ratio of all ranks."""
    with temporary_folder("reshard-offload-") as offload:
        result = _run_rank(job, device, groups, patient, offload)
    worst: list[Any] = [None] * dist.get_world_size()
    mine = max((distance.ratio for _, distance in (*result.rows, *result.gradients)), default=0.0)
    dist.all_gather_object(worst, mine, group=patient)
    return result, max(worst)


def _run_rank(
    job: _Job, device: torch.device, groups: Groups, patient: dist.ProcessGroup | None, offload: Path
) -> _Result:
    from verify.rank.model import quiet_transformers

    started = time.monotonic()
    with quiet_transformers():
        original = _run_original(job, device) if dist.get_rank() == 0 else None
        # The gradients are for rank 0 alone.
        reference = _shared(dataclasses.replace(original, gradients={}) if original else None, patient)
        return _run_shards(job, device, groups, patient, offload, original, reference, started)


def _run_shards(
    job: _Job,
    device: torch.device,
    groups: Groups,
    patient: dist.ProcessGroup | None,
    offload: Path,
    original: _Reference | None,
    reference: _Reference,
    started: float,
) -> _Result:
    """Run this rank's shards, and compare. ``original`` is the reference with its gradients, on rank 0."""
    from verify.rank.model import Rank, load_rank
    from verify.rank.trace import Trace, run

    rank, trace = Rank(job.plan, dist.get_rank(), job.modules, job.config, job.is_built_in), Trace()
    folder = job.shards / job.plan.mesh.folder(rank.rank)
    say(f"shards on {job.plan.mesh.size} ranks")
    inputs = {name: value.to(device) for name, value in reference.inputs.items()}
    tokens = reference.ids.shape[1]
    offload_to = offload if job.options.streamed else None
    with _answering(job, reference, trace, started):
        loaded = load_rank(folder, rank, job.dtype, device, groups, tokens=tokens, offload=offload_to)
    feed = {name: known.exact for name, known in reference.states.items()} if job.options.streamed else None
    places = _places(loaded, job.plan)
    with _answering(job, reference, trace, started, loaded.sources):
        run(loaded.model, inputs, places, reference.chosen, grad=job.options.backward, feed=feed, into=trace)
        say("comparison")
        _check_alike(trace.states, reference)
        gradients = _backward(loaded, trace, job, original, groups, patient) if job.options.backward else ()
    result, logits = _result(job, reference, trace, started), None
    if reference.logits is not None and reference.own_logits is not None and rank.rank == 0:
        exact = reference.states[reference.logits].exact
        logits = _logits(trace.states[reference.logits], reference.own_logits, exact)
    biases = _biases_twice(places, trace, reference) if rank.rank == 0 else ()
    seconds = time.monotonic() - started
    return dataclasses.replace(
        result, logits=logits, unused=loaded.unused, cut=loaded.cut, gradients=gradients, biases=biases, seconds=seconds
    )


def _result(job: _Job, reference: _Reference, trace: Trace, started: float) -> _Result:
    """What this rank found at all places that its run came to."""
    return _Result(
        rank=dist.get_rank(),
        rows=_compare(trace.states, reference),
        logits=None,
        draws=job.options.draws,
        choices=reference.choices,
        own_overruled=reference.overruled,
        overruled=trace.overruled,
        unused=(),
        backend=dist.get_backend(),
        batch=reference.ids.shape[0],
        seq=reference.ids.shape[1],
        seconds=time.monotonic() - started,
    )


def _biases_twice(places: Places, trace: Trace, reference: _Reference) -> tuple[tuple[str, float], ...]:
    """What each bias of a row-parallel weight would have measured if two ranks had added it."""
    found = []
    for name, module in places.others.items():
        bias, state = getattr(module, "bias", None), trace.states.get(name)
        if isinstance(bias, torch.Tensor) and state is not None and not bias.is_meta and bias.any():
            twice = state.double() + bias.detach().to("cpu", torch.float64)
            found.append((name, measure(twice, reference.states[name]).ratio))
    return tuple(found)


@contextmanager
def _answering(
    job: _Job,
    reference: _Reference,
    trace: Trace,
    started: float,
    sources: Mapping[str, tuple[str, ...]] = MappingProxyType({}),
) -> Iterator[None]:
    """Let it be the answer of the run, and no error, that the shards' model fails where the original's did not.

    Not so by the built-in rules: these are known to be right, and what fails then is more likely the run than they.
    """
    try:
        yield
    except Exception as error:
        if not _is_of_model(error):
            raise
        failure = _failure(error, job.plan, trace.path, sources)
        if job.is_built_in:
            if isinstance(error, ReshardError):
                raise
            where = f"'{failure.place}' fails, where the original's does not" if failure.place else "fails"
            raise CheckpointError(f"the shards' model: {where}: {failure.message}") from error
        raise RankAnswer(dataclasses.replace(_result(job, reference, trace, started), failure=failure)) from error


def _is_of_model(error: Exception) -> bool:
    """Whether an error says something of the model, and not of the machine or of another rank."""
    from verify.rank.model import UnfitError

    if isinstance(error, ReshardError):
        return isinstance(error, (UnfitError, _UnlikeError))
    if isinstance(error, (OSError, MemoryError, torch.OutOfMemoryError)) or "allocate memory" in str(error):
        return False
    return not is_of_collective(error)


def _failure(error: Exception, plan: Plan, path: Sequence[str], sources: Mapping[str, tuple[str, ...]]) -> Failure:
    """Where the shards' model failed, and which tensor's rule does not fit there."""
    from verify.rank.model import UnfitError

    place, tensor, is_gathered = path[-1] if path else "", None, False
    if isinstance(error, UnfitError):
        place = error.parameter.rpartition(".")[0]
        tensor = next((name for name in plan.entries if name.endswith(error.parameter)), None) if place else None
    elif isinstance(error, _UnlikeError):
        place = error.place
    if tensor is None:
        tensor, is_gathered = _unfitting(place, plan, sources)
    rule = str(plan.entries[tensor].layout.rule) if tensor else None
    message = error.message if isinstance(error, ReshardError) else " ".join(f"{type(error).__name__}: {error}".split())
    return Failure(place, dist.get_rank(), message, tensor, rule, is_gathered)


def _unfitting(place: str, plan: Plan, sources: Mapping[str, tuple[str, ...]]) -> tuple[str | None, bool]:
    """The tensor to look at if a module fails: the nearest in its block of which nothing takes a part, or its own."""
    from verify.rank.model import Kind, roles

    found = roles(plan, sources)
    around = place
    while around and (around == place or any(segment.isdigit() for segment in around.split("."))):
        for name, role in found.items():
            if name.startswith(f"{around}.") and role.is_gathered and role.kind is Kind.COLUMN:
                return role.entry.name, True
        around = around.rpartition(".")[0]
    own = (role.entry.name for name, role in found.items() if name.rpartition(".")[0] == place and role.along)
    return next(own, None), False


def _backward(
    loaded: Loaded,
    trace: Trace,
    job: _Job,
    original: _Reference | None,
    groups: Groups,
    patient: dist.ProcessGroup | None,
) -> tuple[tuple[str, Distance], ...]:
    """The gradients of all ranks, put together and compared on rank 0."""
    from verify.rank.gradients import gradients_on_disk, loss_of, sum_where_ranks_part, together

    say("gradients")
    loss = loss_of(trace.outputs)
    sum_where_ranks_part(loss, loaded.parts, groups)
    loss.backward()  # type: ignore[no-untyped-call]
    along = {id(tensor): dimensions for tensor, dimensions in loaded.parts}
    for parameter in loaded.model.parameters():
        if not groups.is_first(along.get(id(parameter), frozenset())):
            parameter.grad = None  # the same as another rank's
    mine = gradients_on_disk(loaded.model, loaded.sources, loaded.experts)
    rows = []
    for name in sorted(job.plan.entries):
        of_ranks: list[Any] | None = [None] * dist.get_world_size() if original else None
        dist.gather_object(mine.get(name), of_ranks, dst=0, group=patient)
        if original and of_ranks and name in original.gradients:
            layout = job.plan.entries[name].layout
            zero = torch.zeros(layout.full, dtype=job.dtype)
            found = together(layout, of_ranks) if any(x is not None for x in of_ranks) else zero
            rows.append((name, measure(found, original.gradients[name])))
    return tuple(rows)


def _shared(reference: _Reference | None, patient: dist.ProcessGroup | None) -> _Reference:
    found = [reference]
    dist.broadcast_object_list(found, src=0, group=patient)
    assert found[0] is not None
    return found[0]


def _places(loaded: Loaded, plan: Plan) -> Places:
    """The blocks, and the modules whose outputs are summed over the ranks: there, values are whole again."""
    from verify.rank.model import Kind, roles
    from verify.rank.trace import Places, blocks_of

    layered = [
        name
        for name, sources in loaded.sources.items()
        if any("layer}" in plan.entries[source].template for source in sources)  # {dlayer} of a decoder, too
    ]
    summed = {
        name.rpartition(".")[0]: loaded.model.get_submodule(name.rpartition(".")[0])
        for name, role in roles(plan, loaded.sources).items()
        if role.kind is Kind.ROW or (role.experts_along and role.kind is Kind.WHOLE)
    }
    return Places(blocks_of(loaded.model, layered), summed)


def _run_original(job: _Job, device: torch.device) -> _Reference:
    started = time.monotonic()
    say(f"original in {_name(job.exact_dtype)}")
    with _original(job, job.exact_dtype, device) as loaded:
        ids, inputs = _inputs(loaded.model, job)
        given = {name: value.to(device) for name, value in inputs.items()}
        exact, exact_grads = _run_whole(loaded, given, job, None, 0)
        _check_numbers(exact, exact_grads, job, job.exact_dtype)
    say(f"original in {_name(job.dtype)}, {job.options.draws + 1} times")
    with _original(job, job.dtype, device) as loaded, _refusing(job):
        draws = [_run_whole(loaded, given, job, exact, draw) for draw in range(job.options.draws + 1)]
        for run, grads in draws:
            _check_numbers(run, grads, job, job.dtype)
    own = draws[0][0]
    logits = _vocabulary_output(exact.states, job)
    return _Reference(
        ids=ids,
        inputs=inputs,
        states={n: yardstick(x, [run.states[n] for run, _ in draws], job.dtype) for n, x in exact.states.items()},
        logits=logits,
        own_logits=own.states[logits] if logits else None,
        chosen=exact.chosen,
        choices=exact.choices,
        overruled=own.overruled,
        seconds=time.monotonic() - started,
        gradients={n: yardstick(x, [grads[n] for _, grads in draws], job.dtype) for n, x in exact_grads.items()},
    )


def _check_numbers(trace: Trace, gradients: Mapping[str, torch.Tensor], job: _Job, dtype: torch.dtype) -> None:
    """Raise CheckpointError for an original with which nothing can be compared, as it computes NaN or infinity.

    What must or may not be chosen has infinite scores, and what may not be said has a logit of minus infinity.
    """
    from verify.rank.trace import is_choice

    for name, state in trace.states.items():
        wrong = state.isnan()
        if not is_choice(name):
            wrong |= state.isposinf() if name in trace.outputs else state.isinf()
        if wrong.any():
            raise _no_numbers(job, f"output is not a number from '{name}' on", dtype)
    for name, gradient in gradients.items():
        if not gradient.isfinite().all():
            raise _no_numbers(job, f"gradient of '{name}' is not a number", dtype)


def _no_numbers(job: _Job, what: str, dtype: torch.dtype) -> CheckpointError:
    hint = "--dtype float32 has a wider range" if dtype == torch.float16 else _BYTES_ALONE
    return CheckpointError(f"{job.original}: the original's own {what}, in {_name(dtype)}", hint)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


@contextmanager
def _original(job: _Job, dtype: torch.dtype, device: torch.device) -> Iterator[Loaded]:
    """The whole model: on one device if it fits, else over all and the CPU; streamed, its weights stay on disk."""
    from verify.rank.model import load_original, on_disk

    with temporary_folder("reshard-offload-") as folder:
        more: dict[str, Any] = {"device_map": {"": device}}
        if job.options.streamed:
            more = on_disk(folder)
        elif device.type == "cuda" and not _fits(job, dtype, device):
            more = {"device_map": "auto", "offload_folder": folder}
        yield load_original(job.original, job.original_config, job.plan, dtype, more)
        if device.type == "cuda":
            torch.cuda.empty_cache()


@contextmanager
def _refusing(job: _Job) -> Iterator[None]:
    """Say so where transformers' code of a model, which ran in higher precision, does not run in the job's dtype."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        raise CheckpointError(
            f"{job.original}: transformers runs the original in {_name(job.exact_dtype)}, but not in "
            f"{_name(job.dtype)}: {' '.join(str(error).split())}",
            "--dtype float32 compares the models in float32" if job.dtype != torch.float32 else None,
        ) from error


def _fits(job: _Job, dtype: torch.dtype, device: torch.device) -> bool:
    numbers = sum(math.prod(entry.layout.full) for entry in job.plan.entries.values())
    return numbers * dtype.itemsize * 1.2 < torch.cuda.mem_get_info(device)[0]


def _run_whole(
    loaded: Loaded, inputs: Mapping[str, torch.Tensor], job: _Job, exact: Trace | None, draw: int
) -> tuple[Trace, dict[str, torch.Tensor]]:
    """Run the original, and its loss backward if that is asked for. ``exact`` is the run whose choices are taken."""
    from verify.rank.gradients import gradients_on_disk, loss_of
    from verify.rank.trace import run

    chosen = exact.chosen if exact else None
    feed = exact.states if exact and job.options.streamed else None
    grad = job.options.backward
    trace = run(loaded.model, inputs, _places(loaded, job.plan), chosen, draw=draw, grad=grad, feed=feed)
    if not job.options.backward:
        return trace, {}
    loaded.model.zero_grad()
    loss_of(trace.outputs).backward()  # type: ignore[no-untyped-call]
    return trace, gradients_on_disk(loaded.model, loaded.sources)


def _inputs(model: Any, job: _Job) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The tokens of the original's run, and all that its forward takes."""
    from verify.forward.inputs import inputs_of, random_ids

    options = job.options
    padding = job.plan.model.sizes.settings.get("pad_token_id")
    # The row of padding takes no gradient in some models, and a rank's config cannot always say which it is.
    avoided = padding if options.backward and isinstance(padding, int) else None
    ids = random_ids(model, options.batch, options.seq, options.seed, avoided) if job.ids is None else job.ids
    return ids, inputs_of(model, ids, job.dtype, avoided)


class _UnlikeError(CheckpointError):
    """The shards' model does not return at ``place`` what the original's does, whatever its values."""

    def __init__(self, message: str, place: str) -> None:
        super().__init__(message)
        self.place = place


def _check_alike(states: Mapping[str, torch.Tensor], reference: _Reference) -> None:
    for name, known in reference.states.items():
        if not _is_alike(states.get(name), known):
            found = list(states[name].shape) if name in states else "nothing"
            message = f"the shards' model has {found} at '{name}', the original {list(known.exact.shape)}"
            raise _UnlikeError(message, name)


def _is_alike(state: torch.Tensor | None, known: Yardstick) -> bool:
    return state is not None and state.shape == known.exact.shape


def _compare(states: Mapping[str, torch.Tensor], reference: _Reference) -> tuple[tuple[str, Distance], ...]:
    """The distance at each place that both have."""
    known = reference.states.items()
    return tuple((name, measure(states[name], place)) for name, place in known if _is_alike(states.get(name), place))


def _vocabulary_output(states: Mapping[str, torch.Tensor], job: _Job) -> str | None:
    sizes, vocabularies = job.plan.model.sizes.of({}), job.plan.model.architecture.pad
    known = {sizes[axis] for axis in vocabularies if axis in sizes}
    return next((name for name, state in states.items() if "logits" in name and state.shape[-1] in known), None)


def _logits(sharded: torch.Tensor, own: torch.Tensor, exact: torch.Tensor) -> Logits:
    sharded, own, exact = (x.double().flatten(0, -2) for x in (sharded, own, exact))
    expected, found = exact.argmax(-1), sharded.argmax(-1)
    two = exact.topk(2, -1).values
    mismatches = [
        Mismatch(int(i), int(expected[i]), int(found[i]), float(two[i, 0] - two[i, 1]))
        for i in (expected != found).nonzero().flatten().tolist()
    ]
    log = F.log_softmax(exact, -1)
    scale = float(exact.square().mean().sqrt()) or 1.0

    def kl(x: torch.Tensor) -> float:
        return float(F.kl_div(F.log_softmax(x, -1), log, log_target=True, reduction="batchmean"))

    def rms(x: torch.Tensor) -> float:
        return float((x - exact).square().mean().sqrt()) / scale

    return Logits(
        max_error=float((sharded - exact).abs().max()),
        own_max_error=float((own - exact).abs().max()),
        relative_error=rms(sharded),
        own_relative_error=rms(own),
        kl=kl(sharded),
        own_kl=kl(own),
        agreement=float((found == expected).double().mean()),
        own_agreement=float((own.argmax(-1) == expected).double().mean()),
        positions=len(expected),
        mismatches=tuple(mismatches),
        histogram=_histogram(sharded - exact, own - exact),
    )


def _histogram(error: torch.Tensor, noise: torch.Tensor, bins: int = 41) -> tuple[tuple[float, int, int], ...]:
    """The differences of the logits, shards' and original's own: each bin's centre, and how many of each it has."""
    reach = float(torch.maximum(error.abs().max(), noise.abs().max())) or 1.0
    if not reach < float("inf"):
        return ()
    counts = [torch.histc(x, bins, -reach, reach).to(torch.int64).tolist() for x in (error, noise)]
    step = 2 * reach / bins
    return tuple((-reach + step * (i + 0.5), *pair) for i, pair in enumerate(zip(*counts, strict=True)))


# The report


def _report(job: _Job, results: Sequence[_Result], device: str) -> ForwardReport:
    result = results[0]
    layers = _worst([result.rows for result in results], [result.rank for result in results])
    gradients = _worst([result.gradients], [0])
    first = next((row for row in (*layers, *gradients) if not row.is_same), None)
    power = _power(job, layers, result.biases) if layers and result.failure is None else None
    place = first.name if first else result.failure.place if result.failure else None
    return ForwardReport(
        is_same=first is None and result.failure is None,
        verdict=_verdict(layers, gradients, first, result.failure, power),
        first=place,
        failure=result.failure,
        power=power,
        factor=FACTOR,
        layers=layers,
        gradients=gradients,
        logits=result.logits,
        draws=result.draws,
        choices=result.choices,
        own_overruled=result.own_overruled,
        overruled=max(r.overruled for r in results),
        unused=result.unused,
        cut=result.cut,
        mesh=job.plan.mesh.to_document(),
        ranks=job.plan.mesh.size,
        dtype=_name(job.dtype),
        exact_dtype=_name(job.exact_dtype),
        device=torch.cuda.get_device_name() if device == "cuda" else "cpu",
        backend=result.backend,
        batch=result.batch,
        seq=result.seq,
        seed=job.options.seed,
        seconds=max(r.seconds for r in results),
        versions=_versions(),
    )


def _worst(found: Sequence[Sequence[tuple[str, Distance]]], ranks: Sequence[int]) -> tuple[Row, ...]:
    """The worst of these ranks at each place: what should be the same on all is looked at on all."""
    rows = []
    for i, (name, _) in enumerate(found[0]):
        worst = max(range(len(found)), key=lambda r: found[r][i][1].ratio)
        at = found[worst][i][1]
        rows.append(Row(name, at.error, at.noise, at.ratio, at.worst, ranks[worst], at.is_same))
    return tuple(rows)


def _power(job: _Job, layers: Sequence[Row], biases: Sequence[tuple[str, float]]) -> Power:
    noisiest = max(layers, key=lambda row: row.noise)
    least = min(biases, key=lambda found: found[1], default=None)
    seen_from = FACTOR * max(noisiest.noise, FLOOR * torch.finfo(job.dtype).eps)
    is_poor = seen_from > POOR or (least is not None and least[1] <= FACTOR)
    return Power(
        noise=noisiest.noise,
        place=noisiest.name,
        seen_from=seen_from,
        bias_ratio=least[1] if least else None,
        bias_place=least[0] if least else None,
        is_poor=is_poor,
    )


def _verdict(
    layers: Sequence[Row], gradients: Sequence[Row], first: Row | None, failure: Failure | None, power: Power | None
) -> str:
    if first is None and failure is None:
        largest = max((row.ratio for row in (*layers, *gradients)), default=0.0)
        return f"The shards are the same model: no error exceeds {largest:.2f} times the original's own rounding noise."
    parts = []
    if first is not None:
        what = "gradient of" if first in gradients else "error at"
        parts.append(
            f"the {what} '{first.name}' is {first.ratio:.3g} times the original's own rounding noise (at most "
            f"{FACTOR:g} is rounding), worst in {first.worst} on rank {first.rank}."
        )
    if failure is not None:
        parts.append(_failure_in_words(failure))
    return f"The shards are not the same model: {' Then '.join(parts)}"


def _failure_in_words(failure: Failure) -> str:
    where = f"in '{failure.place}', " if failure.place else ""
    text = f"rank {failure.rank} fails {where}where the original does not ({failure.message})."
    if failure.tensor and failure.is_gathered:
        text += f" No weight takes as its input what the rule '{failure.rule}' deals of '{failure.tensor}'."
    elif failure.tensor:
        text += (
            f" The rule '{failure.rule}' of '{failure.tensor}' does not go with the sizes that [config] and [modules] "
            "give this rank."
        )
    return text


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version(), "torch": str(torch.__version__)}
    return {**found, "transformers": version("transformers")}  # to import it here would take longer than the ranks take
