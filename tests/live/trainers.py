"""Models as programs hold them: of transformers, sharded by torch in a process group of their own."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor


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


def sharded(folder: Path, group: str, rank: int, world: int, *, empty: bool = False) -> torch.nn.Module:
    """A model of transformers under FSDP2 on so many ranks; ``empty``: with other weights than the checkpoint's."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", init_method=f"file://{folder}/{group}", rank=rank, world_size=world)
    if empty:
        config = AutoConfig.from_pretrained(folder)
        model = AutoModelForCausalLM.from_config(config, dtype=config.dtype)
    else:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
    mesh = init_device_mesh("cpu", (world,))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


@contextmanager
def without_gathers() -> Iterator[None]:
    """Whoever gathers a tensor meanwhile, fails."""

    def refuse(*_: Any, **__: Any) -> Any:
        raise AssertionError("a push gathers")

    kept = {name: getattr(dist, name) for name in ("all_gather", "all_gather_into_tensor", "gather", "broadcast")}
    whole = DTensor.full_tensor
    try:
        for name in kept:
            setattr(dist, name, refuse)
        DTensor.full_tensor = refuse  # type: ignore[method-assign]
        yield
    finally:
        for name, function in kept.items():
            setattr(dist, name, function)
        DTensor.full_tensor = whole  # type: ignore[method-assign]
