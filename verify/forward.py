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
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812

from formats.architecture import Architecture
from formats.errors import CheckpointError, ReshardError
from reshard.loading import TORCH_DTYPES
from reshard.plan import Plan, dequantized
from reshard.source import Source
from verify.collectives import Groups
from verify.ending import temporary_folder
from verify.launch import rank_device, run_ranks, say, start_fork_server
from verify.noise import FACTOR, SURE, Distance, Yardstick, measure, yardstick

if TYPE_CHECKING:
    from verify.model import Loaded
    from verify.trace import Places, Trace

Progress = Callable[[str], None]
"""Called with what is being done."""

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
class ForwardReport:
    """The answer: ``is_same``, or ``first`` names the first place that leaves the noise; and what was run on what."""

    is_same: bool
    verdict: str
    first: str | None
    factor: float
    layers: tuple[Row, ...]
    gradients: tuple[Row, ...]
    logits: Logits | None
    draws: int
    choices: int
    own_overruled: int
    overruled: int
    unused: tuple[str, ...]
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


IMPORTED = ("transformers.modeling_utils", "transformers.models.auto.modeling_auto", "verify.forward")
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
    results = run_ranks(_run_jobs, world, jobs, device, device=device, timeout=options.timeout, progress=progress)
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
    )


def _check_dequantizing(original: Source, config: Mapping[str, Any], options: ForwardOptions) -> None:
    """Raise ReshardError unless transformers can load a quantized checkpoint with plain weights."""
    from verify.model import dequantizing

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
    """What a rank found. ``logits`` from rank 0 alone."""

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
    from verify.model import Rank, load_rank
    from verify.trace import run

    started = time.monotonic()
    original = _run_original(job, device) if dist.get_rank() == 0 else None
    # The gradients are for rank 0 alone.
    reference = _shared(dataclasses.replace(original, gradients={}) if original else None, patient)
    rank = Rank(job.plan, dist.get_rank(), job.modules, job.config)
    folder = job.shards / job.plan.mesh.folder(rank.rank)
    say(f"shards on {job.plan.mesh.size} ranks")
    loaded = load_rank(folder, rank, job.dtype, device, groups, offload=offload if job.options.streamed else None)
    ids = reference.ids.to(device)
    feed = {name: known.exact for name, known in reference.states.items()} if job.options.streamed else None
    trace = run(loaded.model, ids, _places(loaded, job.plan), reference.chosen, grad=job.options.backward, feed=feed)
    say("comparison")
    rows = _compare(trace.states, reference)
    gradients = _backward(loaded, trace, ids, job, original, groups, patient) if job.options.backward else ()
    logits = None
    if reference.logits is not None and reference.own_logits is not None and rank.rank == 0:
        exact = reference.states[reference.logits].exact
        logits = _logits(trace.states[reference.logits], reference.own_logits, exact)
    return _Result(
        rows=rows,
        logits=logits,
        draws=job.options.draws,
        choices=reference.choices,
        own_overruled=reference.overruled,
        overruled=trace.overruled,
        unused=loaded.unused,
        backend=dist.get_backend(),
        batch=reference.ids.shape[0],
        seq=reference.ids.shape[1],
        seconds=time.monotonic() - started,
        gradients=gradients,
    )


def _backward(
    loaded: Loaded,
    trace: Trace,
    ids: torch.Tensor,
    job: _Job,
    original: _Reference | None,
    groups: Groups,
    patient: dist.ProcessGroup | None,
) -> tuple[tuple[str, Distance], ...]:
    """The gradients of all ranks, put together and compared on rank 0."""
    from verify.gradients import gradients_on_disk, loss_of, sum_where_ranks_part, together

    say("gradients")
    loss = loss_of(trace.outputs, ids)
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
    from verify.model import Kind, roles
    from verify.trace import Places, blocks_of

    layered = [
        name
        for name, sources in loaded.sources.items()
        if any("{layer}" in plan.entries[source].template for source in sources)
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
        ids = _random_ids(loaded.model, job) if job.ids is None else job.ids
        exact, exact_grads = _run_whole(loaded, ids.to(device), job, None, 0)
    say(f"original in {_name(job.dtype)}, {job.options.draws + 1} times")
    with _original(job, job.dtype, device) as loaded, _refusing(job):
        draws = [_run_whole(loaded, ids.to(device), job, exact, draw) for draw in range(job.options.draws + 1)]
    own = draws[0][0]
    logits = _vocabulary_output(exact.states, job)
    return _Reference(
        ids=ids,
        states={n: yardstick(x, [run.states[n] for run, _ in draws], job.dtype) for n, x in exact.states.items()},
        logits=logits,
        own_logits=own.states[logits] if logits else None,
        chosen=exact.chosen,
        choices=exact.choices,
        overruled=own.overruled,
        seconds=time.monotonic() - started,
        gradients={n: yardstick(x, [grads[n] for _, grads in draws], job.dtype) for n, x in exact_grads.items()},
    )


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


@contextmanager
def _original(job: _Job, dtype: torch.dtype, device: torch.device) -> Iterator[Loaded]:
    """The whole model: on one device if it fits, else over all and the CPU; streamed, its weights stay on disk."""
    from verify.model import load_original, on_disk

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
    loaded: Loaded, ids: torch.Tensor, job: _Job, exact: Trace | None, draw: int
) -> tuple[Trace, dict[str, torch.Tensor]]:
    """Run the original, and its loss backward if that is asked for. ``exact`` is the run whose choices are taken."""
    from verify.gradients import gradients_on_disk, loss_of
    from verify.trace import run

    chosen = exact.chosen if exact else None
    feed = exact.states if exact and job.options.streamed else None
    grad = job.options.backward
    trace = run(loaded.model, ids, _places(loaded, job.plan), chosen, draw=draw, grad=grad, feed=feed)
    if not job.options.backward:
        return trace, {}
    loaded.model.zero_grad()
    loss_of(trace.outputs, ids).backward()  # type: ignore[no-untyped-call]
    return trace, gradients_on_disk(loaded.model, loaded.sources)


def _random_ids(model: Any, job: _Job) -> torch.Tensor:
    options = job.options
    generator = torch.Generator().manual_seed(options.seed)
    vocabulary = model.get_input_embeddings().weight.shape[0]
    limit = getattr(model.config, "max_position_embeddings", None) or options.seq
    longest = min(options.seq, limit) if limit > 0 else options.seq  # -1: there is no limit
    ids = torch.randint(vocabulary, (options.batch, longest), generator=generator)
    padding = job.plan.model.sizes.settings.get("pad_token_id")
    if options.backward and isinstance(padding, int):
        # The row of padding takes no gradient in some models, and a rank's config cannot always say which it is.
        ids = ids.where(ids != padding, (padding + 1) % vocabulary)
    return ids


def _compare(states: Mapping[str, torch.Tensor], reference: _Reference) -> tuple[tuple[str, Distance], ...]:
    for name, known in reference.states.items():
        if name not in states or states[name].shape != known.exact.shape:
            found = list(states[name].shape) if name in states else "nothing"
            raise CheckpointError(f"the shards' model has {found} at '{name}', the original {list(known.exact.shape)}")
    return tuple((name, measure(states[name], known)) for name, known in reference.states.items())


def _vocabulary_output(states: Mapping[str, torch.Tensor], job: _Job) -> str | None:
    size = job.plan.model.sizes.of({}).get("vocab")
    return next((name for name, state in states.items() if "logits" in name and state.shape[-1] == size), None)


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
    layers = _worst([result.rows for result in results])
    gradients = _worst([results[0].gradients])
    first = next((row for row in layers if not row.is_same), None) or next(
        (r for r in gradients if not r.is_same), None
    )
    result = results[0]
    return ForwardReport(
        is_same=first is None,
        verdict=_verdict(layers, gradients, first),
        first=first.name if first else None,
        factor=FACTOR,
        layers=layers,
        gradients=gradients,
        logits=result.logits,
        draws=result.draws,
        choices=result.choices,
        own_overruled=result.own_overruled,
        overruled=max(r.overruled for r in results),
        unused=result.unused,
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


def _worst(ranks: Sequence[Sequence[tuple[str, Distance]]]) -> tuple[Row, ...]:
    """The worst of all ranks at each place: what should be the same on all is looked at on all."""
    rows = []
    for i, (name, _) in enumerate(ranks[0]):
        rank = max(range(len(ranks)), key=lambda r: ranks[r][i][1].ratio)
        found = ranks[rank][i][1]
        rows.append(Row(name, found.error, found.noise, found.ratio, found.worst, rank, found.is_same))
    return tuple(rows)


def _verdict(layers: Sequence[Row], gradients: Sequence[Row], first: Row | None) -> str:
    if first is None:
        largest = max((row.ratio for row in (*layers, *gradients)), default=0.0)
        return f"The shards are the same model: no error exceeds {largest:.2f} times the original's own rounding noise."
    what = "gradient of" if first in gradients else "error at"
    return (
        f"The shards are not the same model: the {what} '{first.name}' is {first.ratio:.3g} times the original's own "
        f"rounding noise (at most {FACTOR:g} is rounding), worst in {first.worst} on rank {first.rank}."
    )


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version(), "torch": str(torch.__version__)}
    return {**found, "transformers": version("transformers")}  # to import it here would take longer than the ranks take
