"""A push to look at: two processes train with FSDP2, three hold what vLLM has at tp 3, all on this machine.

They are forked from one that has imported torch.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import distributed
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from reshard.commands.load import LoadRequest, load, load_rank
from reshard.formats.errors import LiveError
from reshard.live.meshes import arranged, target_of
from reshard.live.process import pull, push
from reshard.source.opening import open_source

TRAINERS, RECEIVERS, TARGET = 2, 3, "vllm:tp3"
_RATE = 0.01


def run(folder: Path, store: str, *, timeout: float = 120.0) -> list[dict[str, Any]]:
    """What each of the five processes says of two pushes of the checkpoint in ``folder``. Raises LiveError."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    ranks = range(TRAINERS + RECEIVERS)
    with context.Pool(len(ranks), signal.signal, (signal.SIGINT, signal.SIG_IGN)) as pool:  # they end with us
        try:
            return pool.starmap_async(main, [(folder, rank, store) for rank in ranks], chunksize=1).get(timeout)
        except multiprocessing.TimeoutError:
            raise LiveError(f"the demo was not done within {timeout:g} s") from None
        except Exception as error:
            raise LiveError(f"a process of the demo failed: {error}") from None


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
    """A weight after a step of the demo's training, which makes all weights smaller."""
    return weight - weight * _RATE


def main(folder: Path, rank: int, store: str) -> dict[str, Any]:
    """One process: two pushes, a training step between them, and the same weights by a gather and a broadcast."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # torch's warnings
    torch.set_num_threads(1)
    world = TRAINERS + RECEIVERS
    distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/group", rank=rank, world_size=world, timeout=timedelta(seconds=60)
    )
    mesh = DeviceMesh("cpu", list(range(TRAINERS)))
    is_trainer = rank < TRAINERS
    report = _train(folder, rank, store, mesh) if is_trainer else _serve(folder, rank - TRAINERS, store)
    distributed.destroy_process_group()
    return report


def _train(folder: Path, rank: int, store: str, mesh: DeviceMesh) -> dict[str, Any]:
    weights = Weights(load(LoadRequest(folder)))
    fully_shard(weights, mesh=mesh)
    give = push(weights, config=folder, to=TARGET, store=store, rank=rank, world=TRAINERS)
    routes = give.check()
    seconds = []
    for version in (1, 2):
        if version == 2:
            with torch.no_grad():
                for parameter in weights.parameters():
                    parameter.copy_(stepped(parameter))
        seconds.append(give(version).seconds)
    begin, gathered = time.monotonic(), 0
    for parameter in weights.parameters():
        whole = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
        distributed.broadcast(whole.detach(), 0)
        gathered += whole.nbytes
    distributed.barrier()
    give.close()
    return {
        "sent": routes.sent[rank], "seconds": seconds, "steps": len(routes.ends),
        "gathered": gathered, "gather_seconds": time.monotonic() - begin,
    }  # fmt: skip


def _serve(folder: Path, rank: int, store: str) -> dict[str, Any]:
    take = pull(store=store, rank=rank, world=RECEIVERS, trainers=TRAINERS)
    source = open_source(folder)
    expected = load_rank(source, arranged(source.model, target_of(TARGET)), rank)
    routes, exact = take.check(), []
    for version in (1, 2):
        received = take.receive(version)
        take.commit(version)
        exact.append(all(torch.equal(tensor, expected[name]) for name, tensor in received.items()))
        expected = {name: stepped(tensor) for name, tensor in expected.items()}
    for tensor in load(LoadRequest(folder)).values():
        distributed.broadcast(torch.empty_like(tensor), 0)
    distributed.barrier()
    take.close()
    return {"received": routes.received[rank], "exact": exact}
