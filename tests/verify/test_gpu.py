"""What verify decides on a node with GPUs, by a fake device and injected errors: no GPU is needed, and none is used."""

from __future__ import annotations

import gc
import json
import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

import reshard
from formats.errors import CheckpointError, ReshardError
from reshard.api import split
from tests import peft_adapters, store
from tests.marks import of_ranks, thorough
from tests.support import command
from tests.verify.by_hand import by_hand
from verify.forward import compare, original, shards
from verify.forward.compare import ForwardOptions, run_forward
from verify.forward.job import Result
from verify.forward.launch import join_group, rank_device, run_ranks
from verify.forward.report import report_of
from verify.forward.shards import is_of_model
from verify.rank.group import GPU, MEMORY, RankError, machine_fault, world
from verify.rank.loading import from_pretrained
from verify.report.words import forward_summary
from verify.run_settings import Unmerged

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


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """What torch says of a node with so many GPUs."""

    def see(count: int) -> None:
        monkeypatch.setattr("torch.cuda.is_available", lambda: True)
        monkeypatch.setattr("torch.cuda.device_count", lambda: count)
        monkeypatch.setattr("torch.cuda.get_device_name", lambda: "Fake GPU")

    return see


# -------------------------------------------------------------------------------------------------- the machine's fault


@pytest.mark.parametrize("error", OF_GPUS + OF_MEMORY, ids=str)
def test_what_a_gpu_cannot_do_is_no_difference_and_no_fault_of_transformers(error: Exception) -> None:
    assert machine_fault(error) == (MEMORY if error in OF_MEMORY else GPU)
    assert not is_of_model(error)
    job = SimpleNamespace(original="m", exact_dtype=torch.float32, dtype=torch.bfloat16)
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
    job = SimpleNamespace(original="m", exact_dtype=torch.float32, dtype=torch.bfloat16)
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
        assert done.stdout.strip() == GPU


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
        run_ranks(original.reference_of, 1, job, torch.device("cpu"), {})
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


def test_an_environment_that_forces_tf32_is_refused_on_gpus(
    gpus: Callable[[int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    gpus(1)
    monkeypatch.setenv("NVIDIA_TF32_OVERRIDE", "1")
    with pytest.raises(ReshardError, match="NVIDIA_TF32_OVERRIDE is set") as info:
        run_forward(*store.pair("llama", tp=2), replace(QUICK, dtype="float32"))
    assert info.value.hint == "unset it, or give --device cpu"
    assert compare._device(replace(QUICK, device="cpu")) == "cpu"
    monkeypatch.setenv("NVIDIA_TF32_OVERRIDE", "0")
    assert compare._device(QUICK) == "cuda"


# ------------------------------------------------------------------------------------------- which device, and how sent


def test_streamed_is_refused_on_gpus(gpus: Callable[[int], None]) -> None:
    gpus(2)
    done = command("verify", "m", "o", "--streamed", "--device", "cuda")
    expected = "--streamed is not possible with --device cuda: it works with --device cpu only so far"
    assert (done.returncode, expected in done.stderr) == (2, True)
    with pytest.raises(reshard.SettingError):
        reshard.verify("m", "o", streamed=True, device="cuda")


@thorough
def test_streamed_runs_on_the_cpu_beside_gpus_and_says_so(gpus: Callable[[int], None]) -> None:
    gpus(2)
    report = run_forward(*store.pair("llama", tp=2), replace(QUICK, streamed=True))
    assert report.is_same
    assert "(tp 2), cpu, threads (--streamed works with --device cpu only so far); 2 x 8" in forward_summary(report)


def test_the_report_says_why_ranks_send_through_the_cpu(
    gpus: Callable[[int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    job = compare._job(*store.pair("llama", tp=4), QUICK)
    result = Result(0, (), None, draws=1, choices=0, own_overruled=0, overruled=0, unused=(), backend="gloo", seq=8,
                    batch=2, seconds=1.0)  # fmt: skip
    gpus(1)
    report = report_of(job, [result] * 4, "cuda")
    assert "4 ranks (tp 4), Fake GPU, gloo (through the CPU: 4 ranks see 1 GPU); 2 x 8" in forward_summary(report)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")
    gpus(2)
    assert report_of(job, [result] * 4, "cuda").reason == "through the CPU: 3 ranks see 2 GPUs"
    assert report_of(job, [replace(result, backend="nccl")] * 4, "cuda").reason is None
    assert report_of(job, [result] * 4, "cpu").reason is None


def test_threads_have_a_gpu_each_or_share_them(gpus: Callable[[int], None], monkeypatch: pytest.MonkeyPatch) -> None:
    gpus(2)
    current: list[torch.device] = []
    monkeypatch.setattr("torch.cuda.set_device", current.append)
    devices = [torch.device("cuda", number) for number in (0, 1, 0)]
    assert run_ranks(lambda: world().device, 3, device="cuda") == devices == current


@pytest.mark.parametrize(
    ("count", "variables", "device", "backend"),
    [
        (4, {"LOCAL_RANK": "3", "LOCAL_WORLD_SIZE": "4"}, "cuda:3", "nccl"),
        (4, {}, "cuda:3", "nccl"),  # a launcher that gives no LOCAL_RANK: not all on the first GPU
        (2, {}, "cuda:1", "gloo"),
        (1, {"LOCAL_RANK": "3", "LOCAL_WORLD_SIZE": "4"}, "cuda:0", "gloo"),  # one visible GPU each
    ],
)
def test_each_rank_has_its_gpu(
    count: int, variables: dict[str, str], device: str, backend: str, gpus: Callable[[int], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    gpus(count)
    for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {"RANK": "3", "WORLD_SIZE": "4", "OMP_NUM_THREADS": "1", **variables}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("TORCH_NCCL_BLOCKING_WAIT", "1")
    joined: list[Any] = []
    monkeypatch.setattr("torch.cuda.set_device", joined.append)
    monkeypatch.setattr("torch.distributed.init_process_group", lambda name, **_: joined.append(name))
    join_group("cuda", 1.0)
    assert joined == [torch.device(device), backend] and rank_device("cuda") == torch.device(device)
