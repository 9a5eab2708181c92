"""What one rank of ``reshard profile`` measures, run in this process: its memory and its clocks."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

from reshard.formats.errors import ReshardError
from reshard.formats.mesh import mesh_of
from reshard.mesh.plan import make_plan
from reshard.model.skeleton import skeleton
from reshard.profile.cost import memory_of
from reshard.profile.job import ProfileJob, Span, Workload, layer_kinds, with_layers
from reshard.profile.rank import MemoryAccount, Meter, is_enough, run_job
from tests import zoo
from tests.support import LLAMA


def job_of(folder: Path, config: dict[str, Any], *workloads: Workload) -> ProfileJob:
    (folder / "config.json").write_text(json.dumps(config))
    plan = make_plan(skeleton(folder), mesh_of(1))
    kinds = layer_kinds(plan.model)
    return ProfileJob(with_layers(plan, kinds), kinds, workloads, 1, 0.001)


def job_of_zoo(name: str, folder: Path, *workloads: Workload, dtype: str = "float32", **more: Any) -> ProfileJob:
    with torch.device("meta"):
        model = zoo.ZOO[name].build(None, {}, None)
    config = json.loads(model.config.to_json_string())
    return job_of(folder, {**config, "architectures": [type(model).__name__], "dtype": dtype, **more}, *workloads)


# ------------------------------------------------------------------------------------------------------------ models


@pytest.mark.parametrize("name", ["bert-pretraining", "gpt2-base", "zamba2", "bart-causal"])
def test_models_of_other_kinds(name: str, tmp_path: Path, one_rank: None) -> None:
    """Without a cache, without logits, with layers that share weights, with layers that are called otherwise."""
    job = job_of_zoo(name, tmp_path, Workload("prefill", 2, 4), Workload("train", 2, 4))
    prefill, train = run_job(job).measured.values()
    assert bool(sum(prefill.cache.values())) == (name != "bert-pretraining")
    assert prefill.activations > 0 and set(train.saved) == {kind.part for kind in job.kinds}


def test_weights_that_stay_in_float32(tmp_path: Path, one_rank: None) -> None:
    """Inkling 2 routes in float32, whatever the dtype of the model."""
    run_job(job_of_zoo("inkling2_text", tmp_path, Workload("prefill", 1, 4), dtype="bfloat16"))


def test_decode_without_a_cache(tmp_path: Path, one_rank: None) -> None:
    with pytest.raises(ReshardError, match="decode is not possible: BertForMaskedLM keeps no keys and values"):
        run_job(job_of_zoo("bert", tmp_path, Workload("decode", 1, 4)))


def test_the_cache_has_its_newer_name_where_a_model_takes_it(
    tmp_path: Path, one_rank: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As transformers 5.24 has it, where ``past_key_values`` is deprecated."""
    whole = transformers.LlamaForCausalLM.forward

    def forward(self: Any, input_ids: Any = None, cache: Any = None, use_cache: bool = True, **more: Any) -> Any:
        assert "past_key_values" not in more
        output = whole(self, input_ids, past_key_values=cache, use_cache=use_cache, **more)
        return SimpleNamespace(cache=output.past_key_values, logits=output.logits)

    monkeypatch.setattr(transformers.LlamaForCausalLM, "forward", forward)
    runs = run_job(
        job_of(
            tmp_path,
            {**LLAMA, "hidden_size": 24, "dtype": "float32"},
            Workload("decode", 1, 4),
            Workload("prefill", 1, 4),
        )
    )
    assert all(sum(measured.cache.values()) > 0 for measured in runs.measured.values())


def test_operations_and_bytes_of_a_llama(tmp_path: Path, one_rank: None) -> None:
    """By hand: hidden 24, 8 heads of 6 on 4 KV heads, an MLP of 24, a vocabulary of 37, in float32. Torch counts the
    scores of all pairs of tokens. Backward, each multiplication is two; the embedding is looked up, not multiplied.
    """
    config = {**LLAMA, "hidden_size": 24, "head_dim": 6, "vocab_size": 37, "dtype": "float32"}
    workloads = [Workload(phase, 2, 16) for phase in ("decode", "prefill", "train")]
    decode, prefill, train = (found.work for found in run_job(job_of(tmp_path, config, *workloads)).measured.values())
    weights, pairs = 24 * 48 + 2 * 24 * 24 + 48 * 24 + 3 * 24 * 24, 4 * 8 * 6  # operations of a query and a key
    assert decode["layer 0"][0] == 2 * (2 * weights + 17 * pairs)
    assert decode["layer 0"][1] > 4 * (weights + 2 * 2 * 17 * 4 * 6)  # weights, keys and values are read
    assert decode["head"] == (2 * 2 * 37 * 24, 4 * (37 * 24 + 2 * (37 + 24)))
    assert prefill["layer 0"][0] == 32 * (2 * weights + 16 * pairs) and prefill["head"][0] == decode["head"][0]
    assert train["head"][0] == 3 * 2 * 32 * 37 * 24
    assert train["layer 0"][0] >= 3 * prefill["layer 0"][0]  # the scores are computed again
    assert decode["embedding"] == prefill["embedding"] == (0, 0)


@pytest.mark.parametrize("name", ["mixtral", "gpt_oss"])
def test_a_token_goes_to_some_experts(name: str, tmp_path: Path, one_rank: None) -> None:
    """Operations and bytes of those that it goes to, whether they are multiplied one by one or together."""
    few, many = (Workload("decode", batch, 1) for batch in (1, 64))
    job = job_of_zoo(name, tmp_path, few, many)
    measured = run_job(job).measured
    sizes, settings = job.plan.model.sizes.of({}), job.plan.model.sizes.settings
    hidden, kv, head = sizes["hidden"], sizes["kv"], sizes["head"]
    part, chosen, experts = job.kinds[0].part, settings["num_experts_per_tok"], settings["num_local_experts"]
    queries, expert = kv * sizes["group"], 3 * hidden * sizes["ff"]
    rest = hidden * (2 * (queries + kv) * head + experts)  # attention and router
    (flops, nbytes), (more_flops, more_nbytes) = (measured[work].work[part] for work in (few, many))
    assert chosen < experts
    assert flops == 2 * (rest + chosen * expert) + 4 * 2 * queries * head  # of two keys
    assert more_flops == 64 * flops
    assert 4 * (rest + chosen * expert) < nbytes < 4 * experts * expert < more_nbytes < 8 * nbytes


# ----------------------------------------------------------------------------------------------------------- clocks


@dataclass
class FakeGpu:
    """A device that does what it is told later, in order: kernels take their time, events note it."""

    now: float = 0.0
    queue: list[Callable[[], None]] = field(default_factory=list)

    def kernel(self, milliseconds: float) -> None:
        def do() -> None:
            self.now += milliseconds

        self.queue.append(do)

    def wait(self) -> None:
        for do in self.queue:
            do()
        self.queue.clear()

    def event(self) -> FakeEvent:
        return FakeEvent(self)


class FakeEvent:
    """As torch.cuda.Event: a time that is known only once the device has come to it."""

    def __init__(self, gpu: FakeGpu) -> None:
        self.gpu = gpu
        self.time: float | None = None

    def record(self) -> None:
        def do() -> None:
            self.time = self.gpu.now

        self.gpu.queue.append(do)

    def elapsed_time(self, end: FakeEvent) -> float:
        assert self.time is not None and end.time is not None, "asked before the device has come to it"
        return end.time - self.time


def test_a_step_on_a_gpu(one_rank: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Spans are cut where the device comes to the marks; nothing waits before the step is over."""
    gpu = FakeGpu()
    monkeypatch.setattr(import_module("reshard.profile.rank"), "stream", lambda kind: (gpu.event, gpu.wait))
    meter = Meter(torch.device("cuda"))
    for _ in range(2):
        meter.enter("embedding")
        gpu.kernel(3)
        meter.carry("all-reduce", 64, lambda: gpu.kernel(2))
        gpu.kernel(1)
        meter.enter("layer 0")
        gpu.kernel(5)
        assert len(gpu.queue) == 4 + 4 and gpu.now in {0, 11}
        assert meter.step() == (
            Span("embedding", "compute", 0, pytest.approx(3e-3)),
            Span("embedding", "all-reduce", 64, pytest.approx(2e-3)),
            Span("embedding", "compute", 0, pytest.approx(1e-3)),
            Span("layer 0", "compute", 0, pytest.approx(5e-3)),
        )


def test_waiting_for_others_is_no_time_of_a_step(one_rank: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU the ranks meet before a collective."""
    monkeypatch.setattr("torch.distributed.get_world_size", lambda: 2)
    meter, met = Meter(torch.device("cpu")), list[str]()
    monkeypatch.setattr("torch.distributed.barrier", lambda: met.append("all"))
    meter.enter("head")
    meter.carry("all-reduce", 64, lambda: None)
    assert [(span.part, span.what) for span in meter.step()] == [
        ("head", "compute"), ("head", "all-reduce"), ("head", "compute")
    ] and met == ["all"]  # fmt: skip


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [([4.0] * 9, 2), ([2.0] * 9, 3), ([0.1, 0.9] * 9, 7), ([0.1] * 9, 5), ([0.01, 0.02] * 100, 100)],
    ids=["longer than the patience of 3 s", "most of it", "spread", "alike", "many"],
)
def test_how_often_a_run_is_timed(seconds: list[float], expected: int) -> None:
    steps = [(Span("head", "compute", 0, time),) for time in seconds]
    counts = range(1, len(steps) + 1)
    assert next(n for n in counts if is_enough(steps[:n], sum(seconds[:n]), 3.0)) == expected


# ----------------------------------------------------------------------------------------------------------- memory


def test_living_tensors_are_counted_at_their_most() -> None:
    with MemoryAccount() as living:
        a = torch.zeros(100)  # 400 bytes
        b = a + 1  # 800
        view = b[:10]  # no more
        del a, b  # 400, as the view lives
        c = view + 1  # 440
        assert living.now == 440
    assert living.peak == 800
    del c, view
    assert (living.now, living.peak) == (0, 800)


def test_what_is_left_out_never_counted() -> None:
    """Also not before it was known that it is to be left out; twice is as once, and its end is no news."""
    with MemoryAccount() as living:
        a = torch.zeros(100)
        b = torch.zeros(50)
        living.leave_out(a)
        living.leave_out(a)
        assert living.now == 200
        del a
        assert living.now == 200
        living.leave_out(torch.zeros(3)[:1])
    del b
    assert (living.now, living.peak) == (0, 200)


@pytest.mark.parametrize("tokens", [5, 3])
def test_the_peak_of_a_training_step_by_hand(tokens: int) -> None:
    """Two linear layers of 8 x 8 with a ReLU between, in float32; gradients of weights do not count."""
    model = nn.Sequential(nn.Linear(8, 8, bias=False), nn.ReLU(), nn.Linear(8, 8, bias=False))
    x = torch.ones(tokens, 8)

    def peak() -> int:
        with MemoryAccount() as living:
            hooks = [
                weight.register_post_accumulate_grad_hook(lambda weight: living.leave_out(weight.grad))
                for weight in model.parameters()
            ]
            hidden: Tensor = model[0](x)
            y = model[2](model[1](hidden))
            torch.autograd.backward([y], [torch.ones_like(y)])
        for hook in hooks:
            hook.remove()
        assert living.now == 2 * row  # hidden and y
        return living.peak

    # At most: hidden, its ReLU, y, y's gradient, the ReLU's gradient and hidden's gradient.
    row = tokens * 8 * 4
    assert peak() == 6 * row


def test_the_peak_of_training_a_model_by_hand(tmp_path: Path, one_rank: None) -> None:
    """A vocabulary so large that the most lives when the head begins its backward pass: what the layer has saved, the
    logits and their gradient, and a few hidden states. The gradient of the head, 96 KB, is none of it.
    """
    vocab, tokens, width = 1_000, 16, 4
    config = {**LLAMA, "hidden_size": 24, "vocab_size": vocab, "dtype": "float32", "num_hidden_layers": 1}
    found = run_job(job := job_of(tmp_path, config, Workload("train", 2, 8)))
    memory = memory_of(12345, [found.measured[job.workloads[0]]], job.workloads[0], {job.kinds[0].part: 1})
    assert memory.gradients == 12345
    logits = tokens * vocab * width
    saved = sum(found.measured[job.workloads[0]].saved.values())
    assert 0 < memory.activations - saved - 2 * logits < 8 * (tokens * 24 * width)
