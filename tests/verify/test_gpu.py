"""What verify decides on a node with GPUs, by a fake device and injected errors: no GPU is needed, and none is used."""

from __future__ import annotations

import gc
import json
import math
import weakref
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import transformers
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import reshard
from reshard.api import split
from reshard.formats.errors import CheckpointError, ReshardError
from reshard.formats.hints import in_python
from reshard.formats.transformers_internals import quiet_transformers
from reshard.verify.forward import compare, original, shards
from reshard.verify.forward.compare import ForwardOptions, run_forward
from reshard.verify.forward.job import Result, needs_of
from reshard.verify.forward.launch import join_group, rank_device, run_ranks
from reshard.verify.forward.report import report_of
from reshard.verify.forward.shards import is_of_model
from reshard.verify.rank import layers
from reshard.verify.rank.collectives import Groups
from reshard.verify.rank.device import has_float64, names, resolve
from reshard.verify.rank.gradients import loss_of
from reshard.verify.rank.group import GPU, MEMORY, RankError, being, machine_fault, world
from reshard.verify.rank.loading import compute_on, from_pretrained, on_disk
from reshard.verify.rank.model import load_rank
from reshard.verify.rank.roles import Rank
from reshard.verify.rank.trace import inputs_of, random_ids
from reshard.verify.rank.trace import run as trace_run
from reshard.verify.report.answer import forward_summary
from reshard.verify.run_settings import Unmerged
from tests import peft_adapters, store
from tests.marks import of_ranks, one_of_each, thorough
from tests.support import command
from tests.verify.by_hand import by_hand
from tests.verify.conftest import Gpus

QUICK = ForwardOptions(seq=8, draws=1)
OF_GPUS = [
    torch.AcceleratorError("CUDA error: an illegal memory access was encountered\nCUDA kernel errors might be late"),
    RuntimeError("CUDA error: no kernel image is available for execution on the device"),
    RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasGemmEx(handle)`"),
    RuntimeError("cuDNN error: CUDNN_STATUS_MAPPING_ERROR"),
    RuntimeError("CUDA error: an illegal memory access was encountered"),  # as torch said it before AcceleratorError
    RuntimeError("CUDA driver error: device not ready"),
    RuntimeError("HIP error: invalid device function"),
    RuntimeError("cusolver error: CUSOLVER_STATUS_INTERNAL_ERROR, when calling `cusolverDnCreate(handle)`"),
]
OF_MEMORY = [
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
    RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    RuntimeError("[enforce fail at alloc_cpu.cpp:124] DefaultCPUAllocator: can't allocate memory"),
    MemoryError(),
]


# -------------------------------------------------------------------------------------------------- the machine's fault


@pytest.mark.parametrize("error", OF_GPUS + OF_MEMORY, ids=str)
def test_what_a_gpu_cannot_do_is_no_difference_and_no_fault_of_transformers(error: Exception) -> None:
    assert machine_fault(error) == (MEMORY if error in OF_MEMORY else GPU)
    assert not is_of_model(error)
    job = SimpleNamespace(original=SimpleNamespace(path="m"), exact_dtype=torch.float32, dtype=torch.bfloat16)
    with pytest.raises(type(error)) as info, original._refusing(job):
        raise error
    assert info.value is error
    if not isinstance(error, MemoryError):
        cls = SimpleNamespace(from_pretrained=mock.Mock(side_effect=error))
        with pytest.raises(type(error)) as info:
            from_pretrained(cls, Path("m"), torch.bfloat16, {})
        assert info.value is error


@pytest.mark.parametrize("error", [RuntimeError("shapes cannot be multiplied"), IndexError("index out of range")])
def test_what_a_model_cannot_do_is_its_own(error: Exception) -> None:
    assert machine_fault(error) is None and is_of_model(error)
    job = SimpleNamespace(original=SimpleNamespace(path="m"), exact_dtype=torch.float32, dtype=torch.bfloat16)
    if isinstance(error, RuntimeError):
        with pytest.raises(CheckpointError, match="not in bfloat16"), original._refusing(job):
            raise error


def _break_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second rank has a model that does not run on its GPU."""
    load_rank = shards.load_rank

    def load(*args: Any, **more: Any) -> Any:
        loaded = load_rank(*args, **more)
        if world().rank == 1:
            loaded.model.register_forward_pre_hook(_fail)
        return loaded

    monkeypatch.setattr(shards, "load_rank", load)


def _break_the_original(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first rank cannot run the original in 16 bits."""
    load_original = original.load_original

    def load(folder: Path, config: Any, plan: Any, dtype: torch.dtype, more: Any) -> Any:
        loaded = load_original(folder, config, plan, dtype, more)
        if dtype == torch.bfloat16:
            loaded.model.register_forward_pre_hook(_fail)
        return loaded

    monkeypatch.setattr(original, "load_original", load)


def _fail(*_: Any) -> None:
    raise OF_GPUS[0]


def _fail_together() -> None:
    """Fail once all ranks have joined: the store where they meet ends with the first of them."""
    world().gather(None)
    _fail()


@pytest.mark.parametrize(("rank", "break_it"), [(1, _break_the_model), (0, _break_the_original)])
def test_a_broken_gpu_of_one_rank_is_exit_code_2_whatever_the_plan(
    rank: int, break_it: Callable[[pytest.MonkeyPatch], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a plan of the user's, too, where a failure of the model would be the answer DIFFERENT."""
    whole, plan = store.pair("llama", "bfloat16", tp=2)[0].path, tmp_path / "plan.toml"
    assert command("plan", whole, "--save", plan).returncode == 0
    plan.write_text(plan.read_text().replace('"vocab hidden"', '"words hidden"'))
    split(whole, tmp_path / "shards", tp=2, plan_file=plan)
    break_it(monkeypatch)
    done = command("verify", whole, tmp_path / "shards", "--plan", plan, "--json")
    document = json.loads(done.stdout)
    assert (done.returncode, document["verdict"], document["forward"]) == (2, "unchecked", None)
    assert done.stderr.splitlines()[-2:] == [
        f"Error: rank {rank} of 2 failed: torch.AcceleratorError: CUDA error: an illegal memory access was encountered",
        f"Hint: {GPU}",
    ]


@of_ranks
@thorough
def test_under_another_launcher_too() -> None:
    first, second = by_hand([_be_a_broken_rank] * 2)
    for done in (first, second):
        assert done.returncode == 0, done.stderr
        assert done.stdout.strip() == in_python(GPU)


def _be_a_broken_rank() -> None:
    with pytest.raises(RankError) as info:
        run_ranks(_fail_together, 2)
    assert info.value.message.partition("failed: ")[2] == f"torch.AcceleratorError: {str(OF_GPUS[0]).splitlines()[0]}"
    print(info.value.hint)


# ------------------------------------------------------------------------------------------------------------- memory


@pytest.mark.parametrize(("backward", "adapter"), [(False, False), (True, False), (False, True)])
def test_one_model_of_the_original_is_in_memory_at_a_time(
    backward: bool, adapter: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And none is when the rank's own is loaded. What is kept of a run keeps no model, not even by its graph."""
    whole, parts = store.pair("llama", "bfloat16", tp=2)
    beside = Unmerged(whole, peft_adapters.made("llama", "linear", "bfloat16"), is_alone=False) if adapter else whole
    job = compare._job(beside, parts, replace(QUICK, backward=backward))
    weights: list[weakref.ref[Any]] = []
    left: list[int] = []
    load_original = original.load_original

    def load(*args: Any) -> Any:
        left.append(sum(weight() is not None for weight in weights))
        loaded = load_original(*args)
        loaded.model.a_cycle = [loaded.model]  # as the hooks of accelerate make one
        weights.extend(weakref.ref(each) for each in (loaded.model, *loaded.model.parameters()))
        return loaded

    monkeypatch.setattr(original, "load_original", load)
    gc.disable()  # a rank's own collections are far between
    try:
        run_ranks(original.reference_of, 1, job, torch.device("cpu"))
        left.append(sum(weight() is not None for weight in weights))
    finally:
        gc.enable()
    assert left == [0] * (4 if adapter else 3)


# --------------------------------------------------------------------------------------------------------------- TF32


def test_float32_is_no_tf32_for_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    backends, seen = torch.backends, []
    precision = torch.get_float32_matmul_precision()

    def look(*_: Any) -> None:
        seen.append((backends.cuda.matmul.allow_tf32, backends.cudnn.allow_tf32))

    monkeypatch.setattr(shards, "run_job", look)
    monkeypatch.setattr(compare, "report_of", lambda *_: None)
    torch.set_float32_matmul_precision("high")
    try:
        run_forward(*store.pair("llama", tp=1), QUICK)
        assert (backends.cuda.matmul.allow_tf32, backends.cudnn.allow_tf32) == (True, True)
    finally:
        torch.set_float32_matmul_precision(precision)
    assert seen == [(False, False)]


def test_an_environment_that_forces_tf32_is_refused_on_gpus(gpus: Gpus, monkeypatch: pytest.MonkeyPatch) -> None:
    gpus(1)
    monkeypatch.setenv("NVIDIA_TF32_OVERRIDE", "1")
    with pytest.raises(ReshardError, match="NVIDIA_TF32_OVERRIDE is set") as info:
        run_forward(*store.pair("llama", tp=2), replace(QUICK, compute_dtype="float32"))
    assert info.value.hint == 'unset it, or give device="cpu"'
    assert compare.device_of(replace(QUICK, device="cpu")) == "cpu"
    monkeypatch.setenv("NVIDIA_TF32_OVERRIDE", "0")
    assert compare.device_of(QUICK) == "cuda"


# ------------------------------------------------------------------------------------------- which device, and how sent


def test_streamed_modules_compute_on_the_device(tmp_path: Path) -> None:
    """What accelerate's hooks are told; the run on a GPU is in tests/gpu."""
    model = from_pretrained(
        transformers.LlamaForCausalLM, store.checkpoint("llama"), torch.float32, on_disk(tmp_path)
    ).model
    compute_on(model, torch.device("meta"))
    hooks = [module._hf_hook for module in model.modules() if hasattr(module, "_hf_hook")]
    devices = {each.execution_device for hook in hooks for each in getattr(hook, "hooks", (hook,))}
    assert len(hooks) > 10 and devices == {torch.device("meta")}


def test_the_report_says_why_ranks_send_through_the_cpu(gpus: Gpus, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    job = compare._job(*store.pair("llama", tp=4), QUICK)
    result = Result(rank=0, rows=(), draws=1, choices=0, own_overruled=0, backend="gloo", seq=8, batch=2, seconds=1.0,
                    effects={}, outputs=())  # fmt: skip
    gpus(1)
    report = report_of(job, [result] * 4, "cuda")
    assert "4 ranks (tp 4), Fake GPU, gloo (through the CPU: 4 ranks see 1 GPU); 2 x 8" in forward_summary(report)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")
    gpus(2)
    assert report_of(job, [result] * 4, "cuda").reason == "through the CPU: 3 ranks see 2 GPUs"
    assert report_of(job, [replace(result, backend="nccl")] * 4, "cuda").reason is None
    assert report_of(job, [result] * 4, "cpu").reason is None


@pytest.mark.parametrize("kind", ["cuda", "xpu"])
def test_threads_have_a_gpu_each_or_share_them(kind: str, gpus: Gpus) -> None:
    fake = gpus(2, kind)
    devices = [torch.device(kind, number) for number in (0, 1, 0)]
    assert run_ranks(lambda: world().device, 3, device=kind) == devices == fake.used


@pytest.mark.parametrize(
    ("count", "variables", "device", "backend"),
    [
        (4, {"LOCAL_RANK": "3", "LOCAL_WORLD_SIZE": "4"}, "cuda:3", "nccl"),
        (4, {"LOCAL_RANK": "3", "LOCAL_WORLD_SIZE": "4"}, "xpu:3", "xccl"),
        (4, {}, "cuda:3", "nccl"),  # a launcher that gives no LOCAL_RANK: not all on the first GPU
        (2, {}, "cuda:1", "gloo"),
        (1, {"LOCAL_RANK": "3", "LOCAL_WORLD_SIZE": "4"}, "cuda:0", "gloo"),  # one visible GPU each
    ],
)
def test_each_rank_has_its_gpu(
    count: int, variables: dict[str, str], device: str, backend: str, gpus: Gpus,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    fake = gpus(count, torch.device(device).type)
    for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {"RANK": "3", "WORLD_SIZE": "4", "OMP_NUM_THREADS": "1", **variables}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("TORCH_NCCL_BLOCKING_WAIT", "1")
    joined: list[Any] = []
    monkeypatch.setattr("torch.distributed.init_process_group", lambda name, **more: joined.extend([name, more]))
    kind, own = torch.device(device).type, torch.device(device)
    join_group(kind, 1.0)
    assert joined[0] == backend and joined[1]["device_id"] == (None if backend == "gloo" else own)
    assert fake.used == [own] and rank_device(kind) == own


@pytest.mark.parametrize("kind", ["cuda", "xpu"])
def test_a_device_is_asked_for_by_torchs_name(kind: str, gpus: Gpus) -> None:
    """And without one that torch finds, the CPU alone is possible; Apple's MPS counts as none."""
    assert [resolve(name) for name in ("auto", "cpu")] == ["cpu", "cpu"]
    with pytest.raises(reshard.SettingError, match="torch finds no accelerator"):
        resolve(kind)
    gpus(1, kind)
    assert [resolve(name) for name in ("auto", "cpu", kind)] == [kind, "cpu", kind]
    with pytest.raises(reshard.SettingError, match=f"torch finds no device but '{kind}'"):
        resolve("npu")
    gpus(1, "mps")
    assert resolve("auto") == "cpu"


def test_all_devices_that_ranks_use_are_named(gpus: Gpus) -> None:
    gpus(3, "cuda", "A", "A", "B")
    assert [names("cuda", ranks) for ranks in (1, 2, 3, 8)] == ["A", "A", "A, B", "A, B"]


# ------------------------------------------------------------------------------- what an accelerator may do differently


@pytest.mark.parametrize(("backward", "free", "fits"), [(False, 1.3, True), (True, 1.3, False), (True, 2.3, True)])
def test_the_original_is_on_one_device_if_its_gradients_fit_too(
    backward: bool, free: float, fits: bool, gpus: Gpus
) -> None:
    """What this process has and does not use is free, too. It does not show that a fifth more is enough."""
    job = compare._job(*store.pair("llama", tp=2), replace(QUICK, backward=backward))
    size = 4 * sum(math.prod(layout.full) for layout in job.plan.layouts.values())
    unused = int(free * size)
    gpus(1, mem_get_info=lambda _: (1000, 0), memory_reserved=lambda _: unused, memory_allocated=lambda _: 1000)
    assert original._fits(job, torch.float32, torch.device("cuda", 0)) is fits


def test_what_each_device_takes_is_said_before(gpus: Gpus, monkeypatch: pytest.MonkeyPatch) -> None:
    job = compare._job(*store.pair("llama", "bfloat16", tp=4), QUICK)
    (all_ranks,) = needs_of(job, "cpu").ranks
    gpus(3, "xpu")
    shared = needs_of(job, "xpu")
    assert shared.ranks == (all_ranks // 2, all_ranks // 4, all_ranks // 4) and shared.headline.endswith(
        " on each device"
    )
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert needs_of(job, "xpu").backend == "gloo"
    gpus(4, "xpu")
    assert needs_of(job, "xpu").backend == "xccl" and len(needs_of(job, "xpu").ranks) == 4


@pytest.mark.parametrize("computes", ["float32", "nothing", "float64"])
def test_a_device_is_asked_whether_it_computes_in_float64(computes: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some refuse it, some compute in float32 and say nothing. (What a real one does was not seen.)"""
    if computes != "float64":
        monkeypatch.setattr("torch.ones", partial(_ones, computes))
    assert has_float64(torch.device("cpu")) is (computes == "float64")


_ONES = torch.ones


def _ones(computes: str, *shape: int, **_: Any) -> torch.Tensor:
    if computes == "nothing":
        raise TypeError("Cannot convert a tensor to float64")
    return _ONES(*shape, dtype=torch.float32)


@pytest.mark.parametrize(
    "why", ["xpu does not compute in it", "the kernels that run this model on meta do not take it"]
)
def test_what_a_device_cannot_compute_in_float64_is_computed_on_the_cpu(
    why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The device meta stands for one: what was run there cannot be read."""
    kind = why.split()[0] if why.startswith("xpu") else "meta"
    monkeypatch.setattr(original, "has_float64", lambda device: device.type == "meta")
    job = compare._job(*store.pair("llama", "float32", tp=2), replace(QUICK, compute_dtype="float32"))
    folder = store.checkpoint("llama")
    ((found, reason),) = run_ranks(original._run_exactly, 1, job, torch.device(kind), folder)
    assert found.trace.states["logits"].dtype == torch.float64 and reason == f"float64 on the CPU: {why}"


def test_the_machines_fault_is_no_reason_to_go_to_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(original, "has_float64", lambda _: True)
    monkeypatch.setattr(original, "_run_exactly_on", mock.Mock(side_effect=OF_GPUS[0]))
    job = compare._job(*store.pair("llama", tp=2), QUICK)
    with pytest.raises(torch.AcceleratorError):
        original._run_exactly(job, torch.device("cuda", 0), store.checkpoint("llama"))


def test_the_noise_of_repeated_runs_is_printed_where_sums_have_no_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """It does not show how large it is on a GPU: that is to be measured there, and this is where it is printed."""
    pair = store.pair("llama", "bfloat16", tp=2)
    assert run_forward(*pair, QUICK).repeated is None
    monkeypatch.setattr(original, "is_noisy", lambda _: True)
    report = run_forward(*pair, QUICK)
    assert report.is_same and report.repeated == 0
    assert "The original's own run, done again, differs by 0 times the noise." in forward_summary(report)
    run_whole = original._run_whole

    def run(*arguments: Any) -> Any:
        trace = run_whole(*arguments)
        trace.states["logits"] += 1e-3 * torch.randn_like(trace.states["logits"])
        return trace

    monkeypatch.setattr(original, "_run_whole", run)
    repeated = run_forward(*pair, QUICK).repeated
    assert repeated is not None and repeated > 0


# ------------------------------------------------------------------------------------ operations that mix two devices

KINDS = ["llama", "gpt2", "bloom", "phi3", "mixtral", "gpt_oss", "deepseek_v3", "mamba2", "qwen3_next", "t5"]


class Alone:
    """A group of ranks as one of them sees it, if what the others have is like its own."""

    backend = "none"

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size, self.device = rank, size, torch.device("cpu")

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    def all_gather(self, x: torch.Tensor) -> list[torch.Tensor]:
        return [x.clone() for _ in range(self.size)]

    def some(self, members: Sequence[int]) -> Any:
        return Alone([*members].index(self.rank), len(members)) if self.rank in members else None


def run_on_a_fake_device(name: str, change: Callable[[Any], None] = lambda _: None) -> None:
    """A rank's forward and backward with all weights and inputs on a device where nothing has a value.

    Torch calls it ``meta``: with ``cuda:0`` a backward aborts where torch is built for the CPU. What needs a value does
    not run (tokens are not looked at, experts are run together).
    """
    job = compare._job(*store.pair(name, "bfloat16", tp=2), replace(QUICK, backward=True))
    with being(Alone(0, 2), print), quiet_transformers(), ExitStack() as stack:  # type: ignore[arg-type]
        rank = Rank(job.plan, 0, job.original.model.architecture, job.is_built_in)
        folder = job.shards.path / job.plan.mesh.folder(0)
        loaded = load_rank(folder, rank, job.dtype, torch.device("cpu"), Groups(job.plan.mesh), tokens=8)
        ids, model = random_ids(loaded.model, 2, 8, 0, None), loaded.model
        inputs, moved = inputs_of(model, ids, job.dtype, None), dict[int, tuple[Any, Any]]()
        change(model)
        if hasattr(model, "set_experts_implementation"):
            model.set_experts_implementation("batched_mm")
        stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        for tensors in (of for module in model.modules() for of in (module._parameters, module._buffers)):
            for key, x in tensors.items():
                if x is not None:
                    new = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")
                    new = nn.Parameter(new, x.requires_grad) if isinstance(x, nn.Parameter) else new
                    tensors[key], _ = moved.setdefault(id(x), (new, x))
        given = {key: torch.empty(x.shape, dtype=x.dtype, device="meta") for key, x in inputs.items()}
        stack.enter_context(mock.patch.object(torch.Tensor, "__int__", lambda _: 0))
        stack.enter_context(mock.patch.object(layers, "lengths_in_group", lambda x, group: [x.shape[-1]] * group.size))
        trace = trace_run(model, given, original.places_of(loaded, job.plan), grad=True)
        assert {x.device.type for x in trace.states.values()} == {"cpu"}
        loss_of(trace.outputs).backward()  # type: ignore[no-untyped-call]
        assert {x.grad.device.type for x in model.parameters() if x.grad is not None} == {"meta"}


@pytest.mark.parametrize("name", one_of_each(KINDS, lambda name: name if name in {"mixtral", "mamba2"} else None))
def test_no_operation_of_a_rank_mixes_devices(name: str) -> None:
    """Forward and backward at tp 2. It shows neither numbers nor memory, streams, kernels or collectives of a GPU."""
    run_on_a_fake_device(name)


@pytest.mark.parametrize("grad", [False, True])
def test_an_operation_that_mixes_devices_is_found(grad: bool) -> None:
    def change(model: Any) -> None:
        def hook(_: Any, __: Any, output: torch.Tensor) -> torch.Tensor | None:
            if grad:
                output.register_hook(lambda x: x * torch.ones(x.shape))
                return None
            return output + torch.ones(output.shape)

        model.model.layers[0].mlp.register_forward_hook(hook)

    with pytest.raises(RuntimeError, match="Expected all tensors to be on the same device"):
        run_on_a_fake_device("llama", change)
