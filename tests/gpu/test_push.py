"""Pushes between processes that share a GPU: NCCL refuses these."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from reshard.formats.errors import LiveError
from tests.live.processes import free_port, run
from tests.live.trainers import Weights
from tests.marks import of_ranks
from tests.store import checkpoint

pytestmark = of_ranks


def either(rank: int, _: int, folder: Path, port: int, device: str | None, dies: bool) -> Any:
    """A trainer of one rank, or a receiver of one, whose weights are zero first. The receiver may die on the way."""
    import reshard
    from reshard.live import pull, push
    from reshard.live.wire import Wire

    model = Weights({name: tensor.cuda() for name, tensor in reshard.load(folder).items()})
    ways: dict[str, Any] = {
        "store": f"tcp://127.0.0.1:{port}",
        "world": 1,
        "device": device,
        "timeout": 5.0,
        "bucket": 1 << 16,
    }
    if rank == 0:
        give = push(model, config=folder, to="fsdp2:1", rank=0, **ways)
        give.check()
        give(1)
        if not dies:
            give.close()
            return None
        with pytest.raises(LiveError) as error:
            give(2)
        return error.value.message
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    take = pull(model, rank=0, trainers=1, keep=False, **ways)
    take.check()
    assert take._wire is not None and take._wire._group is None  # all is shared memory
    assert take.device == (device or "cuda:0")
    take(1)
    if dies:
        Wire._receive = lambda *_: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[method-assign]
        take(2)
    take.close()
    weights = reshard.load(folder)
    return [name for name, parameter in model.named_parameters() if not torch.equal(parameter.cpu(), weights[name])]


@pytest.mark.parametrize("device", [None, "cpu"])
def test_a_push_on_one_gpu(device: str | None) -> None:
    """By CUDA's handles of memory, and through the host's."""
    assert run(either, 2, checkpoint("llama", "bfloat16"), free_port(), device, False, group=False) == [None, []]


def test_a_receiver_on_the_same_gpu_dies() -> None:
    with pytest.raises(RuntimeError, match=r"exit codes \[(0|None), -9\]"):
        run(either, 2, checkpoint("llama", "bfloat16"), free_port(), None, True, group=False)
