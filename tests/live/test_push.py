"""Pushes between processes: what receivers have is what the path over the disk writes."""

from __future__ import annotations

import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests import zoo
from tests.live.processes import run
from tests.marks import one_of_each, thorough


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def trainer(
    rank: int, folder: Path, source: Mapping[str, int], port: int, target: str, options: Mapping[str, Any]
) -> Any:
    """A rank of a trainer with FSDP2, tensor parallelism, or both."""
    from reshard.live.push import push
    from tests.live.trainers import sharded

    model = sharded(rank, folder, source)
    give = push(
        model, config=folder, to=target, store=f"tcp://127.0.0.1:{port}", rank=rank, world=_size(source), **options
    )
    routes = give.check()
    stats = [give(version=1), give(version=2)]
    give.close()
    return routes.digest, routes.sent[rank], [sum(each.sent.values()) for each in stats]


def receiver(
    rank: int, folder: Path, trainers: int, world: int, port: int, target: str, options: Mapping[str, Any]
) -> Any:
    """A rank of a receiver by rules; compares what it has with what is loaded from disk."""
    import torch

    from reshard.commands.rank_tensors import load_rank
    from reshard.live.meshes import arranged, target_of
    from reshard.live.push import pull
    from reshard.source.opening import open_source

    take = pull(store=f"tcp://127.0.0.1:{port}", rank=rank, world=world, trainers=trainers, **options)
    routes = take.check()
    for version in (1, 2):
        found = take.receive(version)
        take.commit(version)
    take.close()
    source = open_source(folder)
    arrangement = arranged(source.model, target_of(target))
    wanted = load_rank(source, arrangement, rank)
    constant = {each.name_on(rank) for each in arrangement.stored if each.constant is not None}
    assert found.keys() == wanted.keys() - constant
    wrong = [name for name in found if not torch.equal(found[name], wanted[name])]
    return routes.digest, routes.received[rank], wrong


def either(
    rank: int, world: int, folder: Path, source: Mapping[str, int], port: int, target: str, options: Mapping[str, Any]
) -> Any:
    """A rank of the trainer, or behind these of the receiver."""
    trainers = _size(source)
    if rank < trainers:
        return trainer(rank, folder, source, port, target, options)
    return receiver(rank - trainers, folder, trainers, world - trainers, port, target, options)


def _size(source: Mapping[str, int]) -> int:
    return source.get("fsdp", 1) * source.get("tp", 1)


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize(
    ("source", "target", "ranks"),
    one_of_each([({"fsdp": 2}, "vllm:tp2", 2), ({"fsdp": 3}, "vllm:tp2", 2), ({"fsdp": 2}, "vllm:tp4", 4)]),
)
@thorough
def test_push(tmp_path: Path, source: dict[str, int], target: str, ranks: int, shared: bool) -> None:
    import torch

    folder = zoo.save("llama", tmp_path / "model", dtype=torch.bfloat16)
    trainers = _size(source)
    said = run(
        either,
        trainers + ranks,
        folder,
        source,
        free_port(),
        target,
        {"shared": shared, "bucket": 1 << 16},
        group=False,
    )
    assert len({each[0] for each in said}) == 1
    for _, planned, sent in said[:trainers]:
        assert sent == [planned, planned]
    assert not [wrong for _, _, wrong in said[trainers:] if wrong]
