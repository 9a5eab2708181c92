"""What the tests of verify share."""

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

Gpus = Callable[..., SimpleNamespace]


@pytest.fixture
def one_rank() -> Iterator[None]:
    """This process is the only rank."""
    import torch
    import torch.distributed as dist

    from reshard.verify.rank.group import ProcessGroup, being

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    with being(ProcessGroup(torch.device("cpu"), 60.0)):
        yield
    dist.destroy_process_group()


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> Gpus:
    """A fake node with so many devices of a kind, behind verify/rank/device.py: ``used`` are those that were set.

    It shows what verify decides there, and not that torch behaves so.
    """

    import torch

    def see(count: int, kind: str = "cuda", *names: str, **more: Any) -> SimpleNamespace:
        used: list[torch.device] = []
        module = SimpleNamespace(
            device_count=lambda: count, get_device_name=lambda i: (names or ("Fake GPU",) * count)[i],
            set_device=used.append, used=used, empty_cache=lambda: None, **more,
        )  # fmt: skip
        monkeypatch.setattr("torch.accelerator.is_available", lambda: True)
        monkeypatch.setattr("torch.accelerator.current_accelerator", lambda: torch.device(kind))
        monkeypatch.setattr("torch.get_device_module", lambda _: module)
        return module

    return see
