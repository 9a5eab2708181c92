"""Models as trainers hold them: sharded by torch, loaded from a checkpoint."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard


def sharded(rank: int, folder: Path, source: Mapping[str, int]) -> torch.nn.Module:
    """A model of transformers under FSDP2 in a process group of the trainer's own."""
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    world = source["fsdp"]
    dist.init_process_group("gloo", init_method=f"file://{folder}/trainer", rank=rank, world_size=world)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
    mesh = init_device_mesh("cpu", (world,))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model
