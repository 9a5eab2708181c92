"""What one rank of ``reshard profile`` measures, run in this process: its memory and its clocks."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from formats.mesh import mesh_of
from reshard.planning.plan import plan_of
from tests.support import LLAMA
from verify.profile.compose import memory_of
from verify.profile.job import Job, Patience, Workload
from verify.profile.layers import layer_kinds, with_layers
from verify.profile.meter import Living
from verify.profile.rank import run_job
from verify.profile.skeleton import skeleton


@pytest.fixture
def one_rank() -> Iterator[None]:
    """This process is the only rank."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def job_of(folder: Path, config: dict[str, Any], *workloads: Workload) -> Job:
    (folder / "config.json").write_text(json.dumps(config))
    plan = plan_of(skeleton(folder), mesh_of(1))
    kinds = layer_kinds(plan.model)
    dtype = str(plan.model.config["dtype"])
    return Job(with_layers(plan, kinds), kinds, True, workloads, dtype, "cpu", 1, Patience(0.001, 0.5, 1, 1))


# ----------------------------------------------------------------------------------------------------------- memory


def test_living_tensors_are_counted_at_their_most() -> None:
    with Living() as living:
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
    with Living() as living:
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
        with Living() as living:
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
    memory = memory_of(12345, [found], 0, job.workloads[0], job.kinds)
    assert memory.gradients == 12345
    logits = tokens * vocab * width
    saved = sum(found.measured[0].saved.values())
    assert 0 < memory.activations - saved - 2 * logits < 8 * (tokens * 24 * width)
