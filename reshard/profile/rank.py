"""The work of each rank of a degree: it builds its blocks, and times them in each phase.

Its clocks say what a step spends in which part of the model, in computing and in collectives. On a CPU the ranks meet
before each collective, so that its time is that of the exchange and not of waiting for a slower rank. On a GPU events
are recorded around it on the stream, and nothing waits; there the rank that comes last says how long the exchange took.
"""

from __future__ import annotations

import inspect
import itertools
import math
import statistics
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.flop_counter import flop_registry, shape_wrapper
from transformers import StaticCache

from reshard.formats.errors import ReshardError
from reshard.formats.torch_internals import TorchDispatchMode, tree_leaves
from reshard.formats.transformers_internals import quiet_transformers
from reshard.profile.blocks import Blocks, build
from reshard.profile.job import OUTSIDE, Measured, ProfileJob, ProfileStep, RankResult, Span, Workload
from reshard.text import human_time
from reshard.verify.rank.collectives import Carrier, Groups, Sent, carried_by
from reshard.verify.rank.device import names, stream
from reshard.verify.rank.gradients import sum_where_ranks_part
from reshard.verify.rank.group import say, world
from reshard.verify.rank.roles import Rank
from reshard.verify.rank.trace import running


class Meter(Carrier):
    """Cuts a step into spans; every collective that goes through it is a span of its own.

    Tensors are summed in their own dtype, as engines do.
    """

    def __init__(self, device: torch.device) -> None:
        self._mark, self._wait = stream(device.type)
        self._meets = device.type == "cpu" and dist.get_world_size() > 1
        self._labels: list[tuple[str, str, int]] = []
        self._marks: list[Any] = []
        self.part = ""

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
        """Count the following work for this part of the model; for none if the name is empty."""
        self.part = part
        self._begin("compute")

    def step(self) -> ProfileStep:
        """The spans since the last step, without what this rank waited for others."""
        self._begin("")
        self._wait()
        seconds = (begin.elapsed_time(end) / 1e3 for begin, end in itertools.pairwise(self._marks))
        spans = zip(self._labels[:-1], seconds, strict=True)
        step = tuple(Span(*label, time) for label, time in spans if label[1] != "wait")
        self._labels, self._marks, self.part = [], [], ""
        return step

    def _begin(self, what: str, nbytes: int = 0) -> None:
        self._labels.append((self.part, what, nbytes))
        self._marks.append(self._mark())
        self._marks[-1].record()


_ATEN = torch.ops.aten
_FLASH = "_scaled_dot_product_flash_attention"
_GROUPED_MM = getattr(_ATEN, "_grouped_mm", None)  # from torch 2.8 on


def _grouped(x: Sequence[int], *_: Any, out_shape: Sequence[int], **__: Any) -> int:
    """The operations of the experts' multiplications, each of some rows of ``x``."""
    return 2 * math.prod(x) * out_shape[-1]


_FLOPS = {
    **flop_registry,
    _GROUPED_MM: shape_wrapper(_grouped),  # type: ignore[no-untyped-call]
    getattr(_ATEN, f"{_FLASH}_for_cpu"): flop_registry[getattr(_ATEN, _FLASH)],
    getattr(_ATEN, f"{_FLASH}_for_cpu_backward"): flop_registry[getattr(_ATEN, f"{_FLASH}_backward")],
}
"""The operations of each kind of multiplication, as torch counts them."""


class MemoryAccount(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the bytes of tensors that were made in its block and still live, now and at most; and the ``work`` of each
    part of the model: the operations of its multiplications, and the bytes that they read and write.

    It works on any device; scratch memory inside of a kernel is not seen. A tensor that is left out (:meth:`leave_out`)
    never counts, also not for the time before. ``part`` is the part of the model that runs.
    """

    def __init__(self, part: Callable[[], str] = str) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = 0
        self.work: dict[str, tuple[float, float]] = {}
        self._part = part
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
        tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        outputs = [x for x in tree_leaves(result) if isinstance(x, Tensor)]
        inputs = {_storage(x) for x in tensors}
        for x in outputs:
            if _storage(x) not in inputs and _storage(x) not in self._alive:
                self._add(x)
        count = _FLOPS.get(func.overloadpacket)
        if count is not None:
            flops, nbytes = self.work.get(self._part(), (0.0, 0.0))
            # Of experts that are multiplied together, no more are read than there are rows.
            used = min(1.0, len(args[0]) / len(args[1])) if func.overloadpacket is _GROUPED_MM else 1.0
            nbytes += sum(x.nbytes * (used if x is args[1] else 1.0) for x in (*tensors, *outputs))
            self.work[self._part()] = flops + count(*args, **(kwargs or {}), out_val=result), nbytes
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


def run_job(job: ProfileJob) -> RankResult:
    """Build this rank's blocks, and time them. Raises ReshardError where transformers cannot build or run them."""
    torch.set_num_threads(job.threads)
    device = world().device
    groups, meter = Groups(job.plan.mesh), Meter(device)
    rank = Rank(job.plan, dist.get_rank(), job.plan.model.architecture)
    longest = max(workload.seq for workload in job.workloads)
    with carried_by(meter), quiet_transformers():
        say(f"tp {job.plan.mesh.size}: building one layer of each kind")
        dtype = getattr(torch, job.plan.model.config["dtype"])
        runner = _Runner(build(rank, job.kinds, groups, dtype, device, longest), job, groups, meter)
        measured = {workload: runner.measure(workload) for workload in job.workloads}
        exchanges = dict(_exchanges(job, dtype, meter)) if job.plan.mesh.size > 1 else {}
    return RankResult(measured, exchanges, str(dist.get_backend()), names(device.type, 1))


_SPREAD, _LEAST, _MOST = 0.03, 5, 100
"""A run is repeated until the middle half of so many times or more lies together, or so often."""


def repeat(run: Callable[[], object], meter: Meter, seconds: float, warm_ups: int = 2) -> tuple[ProfileStep, ...]:
    """Run something again and again, all ranks together, for so many seconds at most: the spans of each run but those
    that only warm up. Rank 0 decides when it is enough.
    """
    steps: list[ProfileStep] = []
    for _ in range(warm_ups):
        started = time.monotonic()
        run()
        meter.step()
        if world().gather(time.monotonic() - started > seconds / 4)[0]:
            break
    started = time.monotonic()
    while not (steps and world().gather(is_enough(steps, time.monotonic() - started, seconds))[0]):
        dist.barrier()
        run()
        steps.append(meter.step())
    return tuple(steps)


def is_enough(steps: Sequence[ProfileStep], elapsed: float, seconds: float) -> bool:
    """Whether the runs so far are enough: ``seconds`` have passed, or their middle half varies little."""
    few = 2 if elapsed > seconds * len(steps) else 3  # runs that are long by themselves vary little
    if len(steps) >= _MOST or elapsed > seconds:
        return len(steps) >= few
    if len(steps) < _LEAST:
        return False
    low, middle, high = statistics.quantiles((sum(span.seconds for span in step) for step in steps), n=4)
    return high - low < _SPREAD * middle


class _Runner:
    """A rank's model, and what it takes to run a phase of it."""

    def __init__(self, blocks: Blocks, job: ProfileJob, groups: Groups, meter: Meter) -> None:
        self._blocks, self._job, self._groups, self._meter = blocks, job, groups, meter
        self._model, self._weights = running(blocks.loaded.model), [*blocks.loaded.model.parameters()]
        self._device = self._weights[0].device
        self._account: MemoryAccount | None = None
        self._saved: dict[str, int] = {}
        parameters = inspect.signature(self._model.forward).parameters
        self._last_logits = {"logits_to_keep": 1} if "logits_to_keep" in parameters else {}
        names = ("cache", "cache_params", "past_key_values")  # from transformers 5.24 on; of Mamba's classes, of others
        self._cache = next((name for name in names if name in parameters), "past_key_values")
        for parameter in self._weights:
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(self._leave_out_gradient)
        for number, (part, module) in enumerate(blocks.layers.items()):  # the meter hears which part runs
            module.register_forward_pre_hook(partial(self._entering, part, not number), with_kwargs=True)
            module.register_forward_hook(partial(self._after, part))
        blocks.last.register_forward_hook(lambda *_: meter.enter(HEAD))

    def measure(self, workload: Workload) -> Measured:
        """Time a workload on this rank, and see what memory and operations it takes."""
        doing, train = f"tp {self._job.plan.mesh.size}: {workload}", workload.phase == "train"
        say(doing)
        with torch.set_grad_enabled(train):
            run = {"decode": self._decode, "prefill": self._prefill, "train": self._train}[workload.phase](workload)
            self._saved = {}
            started = time.monotonic()
            with MemoryAccount(lambda: self._meter.part) as self._account:
                output = run()
            account, self._account = self._account, None
            self._meter.step()
            seconds = time.monotonic() - started
            is_long = world().gather(seconds > self._job.seconds)[0]
            if is_long:
                say(f"{doing}: a run takes {human_time(seconds)}, and two more follow")
            layers = getattr(output, "layers", None)
            cache = {kind.part: _nbytes(vars(layers[kind.first]).values()) for kind in self._job.kinds if layers}
            output = None
            inside = sum(cache.values()) if workload.phase == "prefill" else 0
            steps = repeat(run, self._meter, self._job.seconds, warm_ups=0 if is_long else 2)
        for parameter in self._weights:
            parameter.grad = None
        work = {part: account.work.get(part, (0.0, 0.0)) for part in (*OUTSIDE, *self._blocks.layers)}
        return Measured(steps, work, cache, max(0, account.peak - inside), self._saved if train else {})

    def _prefill(self, workload: Workload) -> Callable[[], Any]:
        ids = self._ids(workload.batch, workload.seq)
        return lambda: self._run(ids, None, **self._last_logits)

    def _decode(self, workload: Workload) -> Callable[[], Any]:
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
        lengths = [getattr(layer, "cumulative_length", None) for layer in cache.layers]
        numbers = [int(length) if isinstance(length, Tensor) else None for length in lengths]

        def run() -> Any:
            for layer, values, number in zip(cache.layers, state, numbers, strict=True):
                vars(layer).update(values)
                if number is not None:
                    layer.cumulative_length.fill_(number)
            return self._run(ids, cache)

        return run

    def _train(self, workload: Workload) -> Callable[[], None]:
        ids, meter = self._ids(workload.batch, workload.seq), self._meter

        def run() -> None:
            for parameter in self._weights:
                parameter.grad = None
            meter.enter(EMBEDDING)
            logits = self._model(input_ids=ids, use_cache=False)[0]
            meter.enter("")
            sum_where_ranks_part([logits], self._blocks.loaded.parts, self._groups)
            grad = torch.full_like(logits, 1 / logits.numel())
            meter.enter(HEAD)
            torch.autograd.backward([logits], [grad])

        return run

    def _run(self, ids: Tensor, cache: Any, **options: Any) -> Any:
        """Run the model; the cache that it leaves: the given one, or one of its own making. None if it keeps none."""
        cached = {} if cache is None else {self._cache: cache}
        self._meter.enter(EMBEDDING)
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
        if self._account is not None:
            self._saved[part] = -self._account.now
        self._meter.enter(part)

    def _after(self, part: str, _: nn.Module, __: Any, output: Any) -> None:
        first = output[0] if isinstance(output, (tuple, list)) else output
        if first.requires_grad:
            first.register_hook(lambda _: self._meter.enter(part))
        if self._account is not None:
            self._saved[part] += self._account.now
        self._meter.enter("")

    def _leave_out_gradient(self, parameter: Tensor) -> None:
        """Gradients are no activations: they are as large as the weights, whose account has them."""
        if self._account is not None and parameter.grad is not None:
            self._account.leave_out(parameter.grad)


def _nbytes(values: Any) -> int:
    """The bytes that a layer keeps for later tokens."""
    return sum(x.nbytes for x in tree_leaves(list(values)) if isinstance(x, Tensor) and x.dim() > 1)


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


def _exchanges(job: ProfileJob, dtype: torch.dtype, meter: Meter) -> Iterator[tuple[int, list[float]]]:
    """Time all-reduces of several sizes."""
    say(f"tp {job.plan.mesh.size}: all-reduces")
    for nbytes in _SIZES:
        x = torch.zeros(
            nbytes // dtype.itemsize, dtype=dtype, device=world().device
        )  # ones would grow until they are infinite
        send = partial(meter.carry, "all-reduce", x.nbytes, partial(dist.all_reduce, x))
        steps = repeat(send, meter, job.seconds / 4)
        yield x.nbytes, [span.seconds for step in steps for span in step if span.what == "all-reduce"]
