"""A push to look at: two processes train with FSDP2, two hold what vLLM has at tp 2, all on this machine.

reshard demo demo && python docs/how-to/push.py demo/model
"""

from __future__ import annotations

import socket
import sys
from collections.abc import Mapping

import torch
from torch import distributed, multiprocessing
from torch.distributed.fsdp import fully_shard

import reshard

TRAINERS, RECEIVERS, TARGET = 2, 2, "vllm:tp2"


class Weights(torch.nn.Module):
    """The tensors of a checkpoint as parameters of nested modules, under their names."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        super().__init__()
        for name, tensor in tensors.items():
            module: torch.nn.Module = self
            *path, leaf = name.split(".")
            for step in path:
                if not hasattr(module, step):
                    module.add_module(step, torch.nn.Module())
                module = module.get_submodule(step)
            module.register_parameter(leaf, torch.nn.Parameter(tensor))


def stepped(weight: torch.Tensor) -> torch.Tensor:
    """A weight after a step of this training, which makes all weights smaller."""
    return weight - weight * 0.01


def train(rank: int, folder: str, store: str, group: str) -> None:
    """One rank of the training: a push, a step, and a push."""
    distributed.init_process_group("gloo", init_method=group, rank=rank, world_size=TRAINERS)
    model = fully_shard(Weights(reshard.load(folder)))
    push = reshard.live.push(model, config=folder, to=TARGET, store=store, rank=rank, world=TRAINERS)
    print(f"trainer {rank} sends {push.check().sent[rank]:,} bytes")
    for version in (1, 2):
        seconds = push(version).seconds
        print(f"trainer {rank}: push {version} took {seconds:.3f} s")
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_(stepped(parameter))
    push.close()
    distributed.destroy_process_group()


def serve(rank: int, folder: str, store: str) -> None:
    """One rank of the engine: it takes both versions, and compares them with what it expects."""
    expected = reshard.load(folder, format="vllm", tp=RECEIVERS, rank=rank)
    pull = reshard.live.pull(store=store, rank=rank, world=RECEIVERS, trainers=TRAINERS)
    print(f"receiver {rank} receives {pull.check().received[rank]:,} bytes")
    for version in (1, 2):
        received = pull.receive(version)
        pull.commit(version)
        if wrong := [name for name, tensor in received.items() if not torch.equal(tensor, expected[name])]:
            sys.exit(f"receiver {rank}: version {version} has a wrong {wrong[0]}")
        print(f"receiver {rank}: version {version} is exact")
        expected = {name: stepped(tensor) for name, tensor in expected.items()}
    pull.close()


def main(number: int, folder: str, store: str, group: str) -> None:
    """One of the processes."""
    torch.set_num_threads(1)
    if number < TRAINERS:
        train(number, folder, store, group)
    else:
        serve(number - TRAINERS, folder, store)


if __name__ == "__main__":
    ports = [socket.create_server(("127.0.0.1", 0)) for _ in range(2)]  # that are free
    store, group = (f"tcp://127.0.0.1:{port.getsockname()[1]}" for port in ports)
    for port in ports:
        port.close()
    multiprocessing.spawn(main, (sys.argv[1], store, group), nprocs=TRAINERS + RECEIVERS)
