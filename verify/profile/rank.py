"""What each rank of a degree does: it builds its blocks, and times them in each phase.

Its clocks say what a step spends in which part of the model, in computing and in collectives. On a CPU the ranks meet
before each collective, so that its time is that of the exchange and not of waiting for a slower rank. On a GPU events
are recorded around it on the stream, and nothing waits; there the rank that comes last says how long the exchange took.
"""

from __future__ import annotations

import inspect
import itertools
import statistics
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import StaticCache

from formats.errors import ReshardError
from formats.torch_internals import TorchDispatchMode, tree_leaves
from reshard.text import human_time
from verify.forward.launch import RankAnswer
from verify.profile.blocks import Blocks, build
from verify.profile.job import OUTSIDE, Job, Measured, Patience, RankResult, Span, Step, Workload
from verify.rank.collectives import Carrier, Groups, Sent, carried_by
from verify.rank.device import names, stream
from verify.rank.gradients import sum_where_ranks_part
from verify.rank.group import say, world
from verify.rank.loading import quiet_transformers
from verify.rank.roles import Rank
from verify.rank.trace import running


class Now:
    """A mark of time on a CPU, as ``torch.Event`` is one on a stream."""

    def record(self) -> None:
        """Note the time."""
        self._time = time.perf_counter()

    def elapsed_time(self, end: Now) -> float:
        """Milliseconds from this mark to a later one."""
        return (end._time - self._time) * 1e3


class Meter(Carrier):
    """Cuts a step into spans; every collective that goes through it is a span of its own.

    Tensors are summed in their own dtype, as engines do. ``mark`` makes a mark of time, and ``wait`` waits until the
    device has come to all of them; by default those of the device.
    """

    def __init__(
        self, device: torch.device, mark: Callable[[], Any] = Now, wait: Callable[[], None] = lambda: None
    ) -> None:
        self._mark, self._wait = stream(device.type) if device.type != "cpu" and mark is Now else (mark, wait)
        self._meets = device.type == "cpu" and dist.get_world_size() > 1
        self._labels: list[tuple[str, str, int]] = []
        self._marks: list[Any] = []
        self._part = ""

    def summed_as(self, dtype: torch.dtype) -> torch.dtype:
        """The same dtype."""
        return dtype

    def carry(self, what: str, nbytes: int, send: Callable[[], Sent]) -> Sent:
        """Do one collective, and note how long it took."""
        if self._meets:
            self._begin("wait")
            dist.barrier()
        self._begin(what, nbytes)
        sent = send()
        self._begin("compute")
        return sent

    def enter(self, part: str) -> None:
        """What follows belongs to this part of the model; of an empty name, to none."""
        self._part = part
        self._begin("compute")

    def step(self) -> Step:
        """The spans since the last step."""
        self._begin("")
        self._wait()
        seconds = (begin.elapsed_time(end) / 1e3 for begin, end in itertools.pairwise(self._marks))
        spans = tuple(Span(*label, time) for label, time in zip(self._labels[:-1], seconds, strict=True))
        self._labels, self._marks, self._part = [], [], ""
        return spans

    def _begin(self, what: str, nbytes: int = 0) -> None:
        self._labels.append((self._part, what, nbytes))
        self._marks.append(self._mark())
        self._marks[-1].record()


class Living(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """How many bytes the tensors have that were made in its block and still live: now, and at most.

    Whatever the device; scratch memory inside of a kernel is not seen. What is left out (:meth:`leave_out`) counts at
    no time, also not before that was said.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = 0
        self._changes: list[tuple[int, int]] = []  # the number of a storage, and the bytes that come or go with it
        self._alive: dict[int, tuple[int, int]] = {}  # of each storage that lives, its number and its bytes
        self._left_out: set[int] = set()

    @property
    def peak(self) -> int:
        """The most bytes that lived at once."""
        counted = (change for number, change in self._changes if number not in self._left_out)
        return max(itertools.accumulate(counted), default=0)

    def leave_out(self, x: torch.Tensor) -> None:
        """Do not count a tensor: another account has it."""
        number, size = self._alive.pop(_storage(x), (0, 0))
        if number:
            self._left_out.add(number)
            self.now -= size

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        inputs = {_storage(x) for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)}
        for x in tree_leaves(result):
            if isinstance(x, torch.Tensor) and _storage(x) not in inputs and _storage(x) not in self._alive:
                self._add(x)
        return result

    def _add(self, x: torch.Tensor) -> None:
        storage, key, number = x.untyped_storage(), _storage(x), len(self._changes) + 1
        size = storage.nbytes()
        self._alive[key] = number, size
        self._changes.append((number, size))
        self.now += size
        weakref.finalize(storage, self._remove, key, number, size)

    def _remove(self, key: int, number: int, size: int) -> None:
        self._changes.append((number, -size))
        if self._alive.get(key) == (number, size):
            del self._alive[key]
            self.now -= size


def _storage(x: torch.Tensor) -> int:
    return int(x.untyped_storage()._cdata)


# ----------------------------------------------------------------------------------------------------- what a rank does


_SIZES = tuple(1 << power for power in range(10, 26, 2))
"""Bytes of the all-reduces that are timed by themselves: 1 KiB to 16 MiB."""

EMBEDDING, HEAD = OUTSIDE


def answer_job(job: Job) -> RankResult:
    """As ``run_job``; what a model cannot do is no failure of a rank: raises RankAnswer with the ReshardError."""
    try:
        return run_job(job)
    except ReshardError as error:
        raise RankAnswer(error) from error


def run_job(job: Job) -> RankResult:
    """Build this rank's blocks, and time them. Raises ReshardError where transformers cannot build or run them."""
    torch.set_num_threads(job.threads)
    device = world().device
    groups, meter = Groups(job.plan.mesh), Meter(device)
    rank = Rank(job.plan, dist.get_rank(), job.plan.model.architecture, job.plan.model.config, job.is_built_in)
    longest = max(workload.seq for workload in job.workloads)
    with carried_by(meter), quiet_transformers():
        say(f"tp {job.plan.mesh.size}: building one layer of each kind")
        runner = _Runner(build(rank, job.kinds, groups, getattr(torch, job.dtype), device, longest), job, groups, meter)
        measured = {workload: runner.measure(workload) for workload in job.workloads}
        exchanges = dict(_exchanges(job, device, meter)) if job.plan.mesh.size > 1 else {}
    return RankResult(measured, exchanges, str(dist.get_backend()), names(device.type, 1))


def repeat(run: Callable[[], None], meter: Meter, patience: Patience, warm_ups: int = 2) -> tuple[Step, ...]:
    """Run something again and again, all ranks together: the spans of each run but those that only warm up.

    Rank 0 decides when it is enough: the middle half of its times lies close together, or patience is over.
    """
    steps: list[Step] = []
    for _ in range(warm_ups):
        started = time.monotonic()
        run()
        meter.step()
        if _agreed(time.monotonic() - started > patience.seconds / 4):
            break
    started = time.monotonic()
    while True:
        dist.barrier()
        run()
        steps.append(meter.step())
        if _agreed(is_enough(steps, time.monotonic() - started, patience)):
            return tuple(steps)


def is_enough(steps: Sequence[Step], seconds: float, patience: Patience) -> bool:
    """Whether runs that took so long in all are enough: patience is over, or the middle half of them lies together."""
    few = 2 if seconds > patience.seconds * len(steps) else 3  # runs that are long by themselves vary little
    if len(steps) >= patience.most or (len(steps) >= min(few, patience.least) and seconds > patience.seconds):
        return True
    if len(steps) < max(2, patience.least):
        return False
    times = [sum(span.seconds for span in step if span.what != "wait") for step in steps]
    low, middle, high = statistics.quantiles(times, n=4)
    return high - low < patience.spread * middle


def _agreed(answer: bool) -> bool:
    """What rank 0 says."""
    return bool(world().all_gather(torch.tensor([answer], device=world().device))[0].item())


class _Runner:
    """A rank's model, and what it takes to run a phase of it."""

    def __init__(self, blocks: Blocks, job: Job, groups: Groups, meter: Meter) -> None:
        self._blocks, self._job, self._groups, self._meter = blocks, job, groups, meter
        self._model = running(blocks.model)
        self._device = next(blocks.model.parameters()).device
        self._living: Living | None = None
        for parameter in blocks.model.parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(self._leave_out_gradient)
        self._saved: dict[str, int] = {}
        parameters = inspect.signature(self._model.forward).parameters
        self._last_logits = {"logits_to_keep": 1} if "logits_to_keep" in parameters else {}
        self._cache = "cache_params" if "cache_params" in parameters else "past_key_values"  # of Mamba's classes
        for number, (part, module) in enumerate(blocks.layers.items()):  # the meter hears which part runs
            module.register_forward_pre_hook(partial(self._entering, part, not number), with_kwargs=True)
            module.register_forward_hook(partial(self._after, part))
        blocks.last.register_forward_hook(lambda *_: meter.enter(HEAD))

    def measure(self, workload: Workload) -> Measured:
        """Time a workload on this rank, and see what memory it takes."""
        doing, patience = f"tp {self._job.plan.mesh.size}: {workload}", self._job.patience
        say(doing)
        grad = workload.phase == "train"
        with torch.set_grad_enabled(grad):
            prepare = {"decode": self._decode, "prefill": self._prefill, "train": self._train}[workload.phase]
            run, cache_of = prepare(workload)
            self._saved = {}
            started = time.monotonic()
            with Living() as self._living:
                run()
            living, self._living = self._living, None
            self._meter.step()
            seconds = time.monotonic() - started
            is_long = _agreed(seconds > patience.seconds)
            if is_long:
                say(f"{doing}: a run takes {human_time(seconds)}, and two more follow")
            cache = self._cache_bytes(cache_of())
            inside = sum(cache.values()) if workload.phase == "prefill" else 0
            steps = repeat(run, self._meter, patience, warm_ups=0 if is_long else 2)
        for parameter in self._blocks.model.parameters():
            parameter.grad = None
        return Measured(steps, cache, max(0, living.peak - inside), self._saved if grad else {})

    # ------------------------------------------------------------------------------------------------------ phases

    def _prefill(self, workload: Workload) -> tuple[Callable[[], None], Callable[[], Any]]:
        ids, caches = self._ids(workload.batch, workload.seq), [None]

        def run() -> None:
            self._meter.enter(EMBEDDING)
            caches[0] = self._run(ids, None, **self._last_logits)

        return run, lambda: caches[0]

    def _decode(self, workload: Workload) -> tuple[Callable[[], None], Callable[[], Any]]:
        ids = self._ids(workload.batch, 1)
        if getattr(self._model, "_can_compile_fullgraph", False):  # it can do with a cache that has its place
            cache: Any = StaticCache(config=self._model.config, max_cache_len=workload.seq + 1)
            self._run(ids, cache)
        else:
            cache = self._run(ids, None)
        if not hasattr(cache, "layers"):
            what = type(self._model).__name__
            raise ReshardError(f"decode is not possible: {what} keeps no keys and values by layers", "--phase prefill")
        self._meter.step()
        _age(cache, workload.seq)
        state = [dict(vars(layer)) for layer in cache.layers]
        lengths = [_length(layer) for layer in cache.layers]

        def run() -> None:
            for layer, saved, length in zip(cache.layers, state, lengths, strict=True):
                vars(layer).update(saved)
                if length is not None:
                    layer.cumulative_length.fill_(length)
            self._meter.enter(EMBEDDING)
            self._run(ids, cache)

        return run, lambda: cache

    def _train(self, workload: Workload) -> tuple[Callable[[], None], Callable[[], Any]]:
        ids, model, meter = self._ids(workload.batch, workload.seq), self._model, self._meter

        def run() -> None:
            for parameter in self._blocks.model.parameters():
                parameter.grad = None
            meter.enter(EMBEDDING)
            logits = model(input_ids=ids, use_cache=False)[0]
            meter.enter("")
            sum_where_ranks_part([logits], self._blocks.loaded.parts, self._groups)
            grad = torch.full_like(logits, 1 / logits.numel())
            meter.enter(HEAD)
            torch.autograd.backward([logits], [grad])

        return run, lambda: None

    def _run(self, ids: Tensor, cache: Any, **options: Any) -> Any:
        """Run the model; the cache that it leaves: the given one, or one of its own making. None if it keeps none."""
        cached = {} if cache is None else {self._cache: cache}
        return getattr(self._model(input_ids=ids, use_cache=True, **cached, **options), self._cache, None)

    def _ids(self, batch: int, seq: int) -> Tensor:
        rows = self._job.plan.model.sizes.of({}).get("vocab") or self._model.config.get_text_config().vocab_size
        return torch.randint(rows, (batch, seq), generator=torch.Generator().manual_seed(0)).to(self._device)

    # ----------------------------------------------------------------------------------------------- parts, memory

    def _entering(
        self, part: str, is_first: bool, _: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> None:
        hidden = args[0] if args else kwargs["hidden_states"]
        if is_first and hidden.requires_grad:
            hidden.register_hook(lambda _: self._meter.enter(EMBEDDING))
        if self._living is not None:
            self._saved[part] = -self._living.now
        self._meter.enter(part)

    def _after(self, part: str, _: nn.Module, __: Any, output: Any) -> None:
        first = output[0] if isinstance(output, (tuple, list)) else output
        if first.requires_grad:
            first.register_hook(lambda _: self._meter.enter(part))
        if self._living is not None:
            self._saved[part] += self._living.now
        self._meter.enter("")

    def _leave_out_gradient(self, parameter: Tensor) -> None:
        """Gradients are no activations: they are as large as the weights, whose account has them."""
        if self._living is not None and parameter.grad is not None:
            self._living.leave_out(parameter.grad)

    def _cache_bytes(self, cache: Any) -> dict[str, int]:
        """The bytes that each kind of layer keeps for later tokens."""
        if not hasattr(cache, "layers"):
            return {}
        return {kind.part: _nbytes(vars(cache.layers[kind.first]).values()) for kind in self._job.kinds}


def _nbytes(values: Any) -> int:
    nbytes = 0
    for value in values:
        if isinstance(value, Tensor):
            nbytes += value.nbytes if value.dim() > 1 else 0
        elif isinstance(value, (dict, list, tuple)):
            nbytes += _nbytes(value.values() if isinstance(value, dict) else value)
    return nbytes


def _age(cache: Any, tokens: int) -> None:
    """Let a cache that has seen one token have so many: zeros cost what other keys and values cost."""
    for layer in cache.layers:
        keys = getattr(layer, "keys", None)
        if not isinstance(keys, Tensor) or keys.dim() != 4:
            continue
        if isinstance(getattr(layer, "cumulative_length", None), Tensor):
            layer.cumulative_length.fill_(tokens)
            if hasattr(layer, "cumulative_length_int"):
                layer.cumulative_length_int = tokens
            continue
        window = getattr(layer, "sliding_window", None)
        length = min(tokens, window - 1) if window else tokens
        for name in ("keys", "values"):
            old = getattr(layer, name)
            setattr(layer, name, old.new_zeros(*old.shape[:2], length, old.shape[3]))
        if hasattr(layer, "cumulative_length"):
            layer.cumulative_length = tokens


def _length(layer: Any) -> int | None:
    length = getattr(layer, "cumulative_length", None)
    return int(length) if isinstance(length, Tensor) else None


def _exchanges(job: Job, device: torch.device, meter: Meter) -> Iterator[tuple[int, list[float]]]:
    """Time all-reduces of several sizes."""
    say(f"tp {job.plan.mesh.size}: all-reduces")
    dtype, patience = getattr(torch, job.dtype), replace(job.patience, seconds=job.patience.seconds / 4)
    for nbytes in _SIZES:
        x = torch.zeros(nbytes // dtype.itemsize, dtype=dtype, device=device)  # ones would grow until they are infinite
        send = partial(meter.carry, "all-reduce", x.nbytes, partial(dist.all_reduce, x))
        steps = repeat(send, meter, patience)
        yield x.nbytes, [span.seconds for step in steps for span in step if span.what == "all-reduce"]
