"""What the tests of verify share."""

from collections.abc import Iterator

import pytest


@pytest.fixture
def one_rank() -> Iterator[None]:
    """This process is the only rank."""
    import torch
    import torch.distributed as dist

    from verify.rank.group import ProcessGroup, being

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    with being(ProcessGroup(torch.device("cpu"), 60.0)):
        yield
    dist.destroy_process_group()
