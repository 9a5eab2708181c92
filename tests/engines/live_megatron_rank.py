"""The ranks of ``tests.engines.live_megatron``, in the environment of Megatron-Core.

python -m tests.engines.live_megatron_rank FOLDER
"""

from __future__ import annotations

import json
import os
import sys
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import distributed as dist
from torch.distributed.tensor.debug import CommDebugMode
from torch.multiprocessing.spawn import start_processes

from reshard.live import pull, push
from reshard.live.parameters import slices_of_megatron
from reshard.live.sides import HeldSlice
from tests.engines import megatron_run

VERSIONS, FACTOR, BUCKET = (1, 2), -1.5, 1 << 16
"""What is pushed; by how much weights are multiplied in between; small buckets, so that a push has several."""


def chunks(request: dict[str, Any]) -> list[Any]:
    """This rank's chunks of the model, with the stored weights."""
    from megatron.core import dist_checkpointing, parallel_state
    from megatron.core.models import gpt
    from megatron.core.models.gpt import gpt_layer_specs

    count = max(1, len(request["stages"]) // request["pp"])
    padded = -(-request["vocabulary"] // (128 * request["tp"])) * 128 * request["tp"]
    made = []
    for at in range(count):
        with ExitStack() as stack:
            if count > 1:
                for where, name, further in (
                    (gpt, "GPTModel", {}), (gpt_layer_specs, "get_gpt_decoder_block_spec", {}),
                    (parallel_state, "is_pipeline_first_stage", {"ignore_virtual": False}),
                    (parallel_state, "is_pipeline_last_stage", {"ignore_virtual": False}),
                ):  # fmt: skip
                    stack.enter_context(
                        patch.object(where, name, partial(getattr(where, name), vp_stage=at, **further))
                    )
            made.append(megatron_run.build(request, padded))
    states = {str(at): megatron_run.sharded(chunk, request)["model"] for at, chunk in enumerate(made)}
    loaded = dist_checkpointing.load(states, str(Path(request["folder"]) / "release"), strict="log_all")
    for at, chunk in enumerate(made):
        missing, unused = chunk.load_state_dict(loaded[str(at)], strict=False)
        assert not [name for name in missing if "_extra_state" not in name] and not unused, (missing, unused)
    return made


@torch.enable_grad()
def wrapped(chunk: Any) -> Any:
    """The chunk as it is trained, with its parameters in one buffer."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

    chunk.requires_grad_(True)
    return DistributedDataParallel(chunk.config, DistributedDataParallelConfig(use_distributed_optimizer=True), chunk)


def indexed(tensor: torch.Tensor, own: HeldSlice) -> torch.Tensor:
    """The elements that a rank holds of a stored tensor; rows that it lacks are padding, of zeros."""
    for dim, runs in enumerate(own.runs):
        missing = own.shape[dim] - tensor.shape[dim]
        tensor = torch.cat([tensor, tensor.new_zeros((*tensor.shape[:dim], missing, *tensor.shape[dim + 1 :]))], dim)
        tensor = tensor.index_select(dim, torch.tensor([i for run in runs for i in range(run.offset, run.end)]))
    return tensor


@torch.no_grad()
def examine(request: dict[str, Any], whole: dict[str, torch.Tensor]) -> list[dict[str, Any]]:
    """What the rank holds. Raises AssertionError if any of it is not as stored, or not all of the model."""
    models = chunks(request)
    if request["ddp"]:
        models = [wrapped(chunk) for chunk in models]
    with CommDebugMode() as counted:
        found = slices_of_megatron(models if len(models) > 1 else models[0])
    assert counted.get_total_counts() == 0
    for own, tensor in found:
        assert own.local == tensor.shape, own
        assert torch.equal(tensor, indexed(whole[own.name], own)), own
    for _, tensor in found:
        tensor.fill_(12345)
    for chunk in models:
        for name, parameter in chunk.named_parameters():
            assert parameter.eq(12345).all(), name
    assert [own for own, _ in slices_of_megatron(models)] == [own for own, _ in found]
    return [
        {"name": own.name, "shape": own.shape, "runs": [[(run.offset, run.length) for run in dim] for dim in own.runs]}
        for own, _ in found
    ]


@torch.no_grad()
def give(request: dict[str, Any], rank: int, world: int) -> None:
    """Push the stored weights, and what they are after a change in place."""
    models = chunks(request)
    to = request["push"]
    pushed = push(models, program="megatron", config=request["config"], to=to["to"], store=to["store"], rank=rank,
                  world=world, bucket=BUCKET)  # fmt: skip
    with CommDebugMode() as counted:
        routes = pushed.check()
        for version in VERSIONS:
            for parameter in (each for chunk in models for each in chunk.parameters()):
                parameter.mul_(FACTOR if version > 1 else 1)
            stats = pushed(version=version)
            assert sum(stats.sent.values()) == routes.sent[rank]
    assert counted.get_total_counts() == 0
    pushed.close()


def take(request: dict[str, Any], rank: int, world: int, folder: Path) -> None:
    """Receive all pushes, and write down what came."""
    to = request["push"]
    taken = pull(store=to["store"], rank=rank, world=to["receivers"], trainers=world, bucket=BUCKET)
    for version in VERSIONS:
        found = taken.receive(version)
        taken.commit(version)
        torch.save(found, folder / f"received-{version}-{rank}")
    taken.close()


def run_rank(rank: int, world: int, folder: str) -> None:
    """One rank; those behind the model's are receivers."""
    from megatron.core import parallel_state
    from megatron.core.transformer.moe import experts

    torch.set_num_threads(1)
    request = json.loads((Path(folder) / "request").read_text())
    if rank >= world:
        take(request, rank - world, world, Path(folder))
        return
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=world)
    megatron_run.without_cuda()
    if hasattr(experts, "gg"):  # not in 0.19
        experts.gg.assert_grouped_gemm_is_available = lambda: None
    count = len(request["stages"]) // request["pp"]
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=request["tp"], pipeline_model_parallel_size=request["pp"],
        expert_model_parallel_size=request["ep"], expert_tensor_parallel_size=request["etp"],
        virtual_pipeline_model_parallel_size=count if count > 1 else None,
    )  # fmt: skip
    whole = torch.load(Path(folder) / "whole", weights_only=True)
    (Path(folder) / f"rank-{rank}").write_text(json.dumps(examine(request, whole)))
    if request["push"]:
        give(request, rank, world)
    dist.barrier()


def main() -> None:
    """All ranks."""
    folder = sys.argv[1]
    request = json.loads((Path(folder) / "request").read_text())
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    world = max(request["tp"], request["etp"] * request["ep"]) * request["pp"]
    receivers = request["push"]["receivers"] if request["push"] else 0
    start_processes(run_rank, (world, folder), nprocs=world + receivers, start_method="fork")


if __name__ == "__main__":
    from transformer_engine_on_cpu import install

    install()
    main()
