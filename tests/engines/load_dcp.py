"""What ``--as dcp`` writes, loaded by torch into DTensors on two and four processes, saved by torch, and merged again.

    python -m tests.engines.load_dcp

A small Llama is split for two ranks. ``dcp.load`` puts it into tensors that are sharded as FSDP has them (along the
first dimension), as tensor parallelism has them, and as both. Each process compares its part with the original's.
``dcp.save`` writes them again, and a merge of that must have every tensor of the original, bit for bit. Prints a line
for each. Exit code 1: something differs.
"""

from __future__ import annotations

import math
import sys
import tempfile
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing
from safetensors.torch import load_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Placement, Replicate, Shard, distribute_tensor

from reshard.api import merge, split
from tests import zoo

LAYOUTS: Sequence[tuple[str, tuple[int, ...], tuple[str, ...]]] = (
    ("FSDP", (2,), ("fsdp",)),
    ("FSDP", (4,), ("fsdp",)),
    ("tensor parallelism", (2,), ("tp",)),
    ("tensor parallelism", (4,), ("tp",)),
    ("FSDP x tensor parallelism", (2, 2), ("fsdp", "tp")),
)


def _placement(name: str, kind: str) -> Placement:
    """How FSDP and tensor parallelism place a tensor of a Llama's."""
    if kind == "fsdp":
        return Shard(0)
    if "norm" in name:
        return Replicate()
    return Shard(1) if name.endswith(("o_proj.weight", "down_proj.weight")) else Shard(0)


def _load(rank: int, folder: Path, original: Path, out: Path, sizes: Sequence[int], kinds: Sequence[str]) -> None:
    """As one rank: load, compare and save. Prints the names of the tensors that differ, and fails if there are any."""
    warnings.simplefilter("ignore")
    meeting = f"file://{out.with_suffix('.meeting')}"
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=math.prod(sizes))
    mesh = init_device_mesh("cpu", tuple(sizes), mesh_dim_names=tuple(kinds))
    whole = load_file(original)
    wanted = {
        name: distribute_tensor(each, mesh, [_placement(name, kind) for kind in kinds]) for name, each in whole.items()
    }
    state: dict[str, Any] = {
        name: distribute_tensor(torch.full_like(whole[name], torch.nan), mesh, each.placements)
        for name, each in wanted.items()
    }
    dcp.load(state, checkpoint_id=folder)
    dcp.save(state, checkpoint_id=out)
    differ = [name for name, each in wanted.items() if not torch.equal(state[name].to_local(), each.to_local())]
    dist.destroy_process_group()
    if differ:
        raise SystemExit(f"rank {rank}: {differ}")


def main() -> None:
    """Run all layouts."""
    wrong = 0
    with tempfile.TemporaryDirectory(prefix="reshard-dcp-") as temporary:
        root = Path(temporary)
        zoo.save("llama", root / "original")
        original = root / "original" / "model.safetensors"
        split(root / "original", root / "dcp", tp=2, format="dcp")
        for number, (name, sizes, kinds) in enumerate(LAYOUTS):
            again, ranks = root / f"saved-{number}", math.prod(sizes)
            torch.multiprocessing.spawn(_load, (root / "dcp", original, again, sizes, kinds), ranks)  # raises for any
            merge(again, root / "merged", config=root / "original", overwrite=True)
            before, after = load_file(original), load_file(root / "merged" / "model.safetensors")
            is_same = before.keys() == after.keys() and all(torch.equal(before[key], after[key]) for key in before)
            verdict = "every part and every tensor is right" if is_same else "another merge"
            print(f"{name} on {ranks} processes: {verdict}")
            wrong += not is_same
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
