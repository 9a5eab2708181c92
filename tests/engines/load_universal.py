"""Runs of DeepSpeed and FSDP2 go on from what reshard wrote, on another number of ranks and in another program.

    python -m tests.engines.load_universal      (in an environment with DeepSpeed: tests/engines/deepspeed.txt)

A small model is trained for two steps and saved, and two steps more. ``--as deepspeed-universal`` or ``--as dcp
--names modules`` of what it saved is loaded by the other program, which goes on for the same two steps. The losses of
the first must be those of the unbroken run, bit for bit, sequence by sequence; those of the second, which depend on the
optimizer's states, must be as near as sums in another order are. Where DeepSpeed's own converter takes it, the run that
goes on from that must have the same losses, bit for bit. Prints a line for each. Exit code 1: something differs.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
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
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from reshard.api import split
from tests import zoo
from tests.support import form_of

os.environ.update(DS_ACCELERATOR="cpu", DS_IGNORE_CUDA_DETECTION="1", OMP_NUM_THREADS="1")
RUNS: Sequence[tuple[str, str, int, str, int]] = (
    ("llama-tied", "zero-2", 2, "zero-2", 3),
    ("llama-tied", "zero-1 bf16", 3, "zero-1 bf16", 1),
    ("llama", "zero-3", 3, "zero-3", 2),
    ("qwen3_moe", "zero-2", 2, "zero-3", 3),
    ("qwen3_moe", "fsdp2", 2, "zero-2", 3),
    ("llama-tied", "zero-3", 3, "fsdp2", 2),
    ("llama", "weights", 2, "zero-2", 2),
    ("llama", "weights", 2, "zero-3", 2),
)
"""The model; the program that saves, and its ranks; the program that goes on, and its ranks. Of weights alone, the run
that begins with them is the unbroken one."""
BATCH, LENGTH, STEPS = 6, 12, 2
NOISE = 1e-5
"""The largest difference of losses of two runs in F32 that add gradients in another order; a step without the
optimizer's states differs by more than a hundred times as much."""
SETTINGS: dict[str, Any] = {"lr": 1e-2, "betas": (0.8, 0.9)}


class Run:
    """A model in training, on one of several ranks."""

    def __init__(self, kind: str, model: Path, world: int, *, is_one_group: bool, is_resumed: bool) -> None:
        """``is_one_group``: ZeRO-3 gives all groups the settings of the first, and one tensor of steps, to which each
        group adds.
        """
        from transformers import AutoModelForCausalLM

        self._is_bf16, self._world = kind.endswith("bf16"), world
        net = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, attn_implementation="eager")
        if is_resumed:
            with torch.no_grad():
                for parameter in net.parameters():
                    parameter.normal_()
        self._net, self._engine = net, None  # what DeepSpeed makes of it
        names = [
            [name for name, p in net.named_parameters() if is_one_group or p.dim() > 1],
            [name for name, p in net.named_parameters() if not is_one_group and p.dim() == 1],
        ]
        if kind == "fsdp2":
            mesh = init_device_mesh("cpu", (world,))
            for layer in net.model.layers:
                fully_shard(layer, mesh=mesh)
            fully_shard(net, mesh=mesh)
        parameters = dict(net.named_parameters())
        self._optimizer = torch.optim.AdamW(
            [
                {"params": [parameters[name] for name in group], "weight_decay": decay}
                for group, decay in zip(names, (0.1, 0.0), strict=True)
                if group
            ],
            **SETTINGS,
        )
        if kind == "fsdp2":
            return
        import deepspeed
        import deepspeed.ops

        deepspeed.ops.__compatible_ops__.update(dict.fromkeys(deepspeed.ops.__compatible_ops__, False))  # compile none
        settings = {
            "train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": BATCH // world,
            "zero_optimization": {"stage": int(kind[5]), "stage3_param_persistence_threshold": 0},
            "bf16": {"enabled": self._is_bf16}, "gradient_clipping": 0.0, "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False, "checkpoint": {"load_universal": True},
        }  # fmt: skip
        self._engine, *_ = deepspeed.initialize(model=net, optimizer=self._optimizer, config=settings)

    def save(self, folder: Path) -> None:
        if self._engine is not None:
            self._engine.save_checkpoint(str(folder), tag="global_step2", client_state={"seen": [1, 2.5, "text"]})
            return
        model, optimizer = get_state_dict(self._net, self._optimizer)
        dcp.save({"model": model, "optimizer": optimizer}, checkpoint_id=folder)

    def load(self, folder: Path) -> None:
        if self._engine is not None:
            is_alone = self._engine.zero_optimization_stage() == 3 and not any(folder.rglob("exp_avg.pt"))
            _, state = self._engine.load_checkpoint(str(folder), load_module_only=is_alone)
            assert state.get("seen", [1, 2.5, "text"]) == [1, 2.5, "text"], state
            return
        model, optimizer = get_state_dict(self._net, self._optimizer)
        dcp.load({"model": model, "optimizer": optimizer}, checkpoint_id=folder)
        set_state_dict(self._net, self._optimizer, model_state_dict=model, optim_state_dict=optimizer)

    def step(self, number: int, rank: int) -> list[float]:
        """One step with a batch of sequences of its own; returns the loss of each sequence of this rank."""
        batch = torch.randint(0, 60, (BATCH, LENGTH), generator=torch.Generator().manual_seed(number))
        losses, share = [], BATCH // self._world
        for ids in batch[rank * share : (rank + 1) * share].unsqueeze(1):
            loss = (self._engine or self._net)(input_ids=ids, labels=ids).loss
            losses.append(float(loss))
            if self._engine is not None:
                self._engine.backward(loss)
                self._engine.step()
            else:
                (loss / share).backward()
        if self._engine is None:
            self._optimizer.step()
            self._optimizer.zero_grad()
        return losses


def _work(
    rank: int,
    world: int,
    port: int,
    kind: str,
    is_one_group: bool,
    model: Path,
    source: Path | None,
    out: Path | None,
    losses: Path,
) -> None:
    """As one rank: go on from ``source``, or train and save to ``out``, then train; the losses of the last steps."""
    warnings.simplefilter("ignore")
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world), MASTER_ADDR="127.0.0.1",
                      MASTER_PORT=str(port))  # fmt: skip
    torch.set_num_threads(1)
    if kind == "fsdp2":
        dist.init_process_group("gloo")
    else:
        import deepspeed

        deepspeed.init_distributed(dist_backend="gloo")
    run = Run(kind, model, world, is_one_group=is_one_group, is_resumed=source is not None)
    if source is not None:
        run.load(source)
    elif out is not None:
        for number in range(STEPS):
            run.step(number, rank)
        run.save(out)
    last = [run.step(number, rank) for number in range(STEPS, 2 * STEPS)]
    losses.with_suffix(f".{rank}").write_text(json.dumps(last))
    dist.barrier()
    dist.destroy_process_group()


def _train(
    kind: str, world: int, is_one_group: bool, model: Path, losses: Path, source: Path | None, out: Path | None
) -> torch.Tensor:
    """The losses of each sequence in the last steps."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    arguments = world, port, kind, is_one_group, model, source, out, losses
    torch.multiprocessing.spawn(_work, arguments, world)  # raises for any
    parts = [json.loads(losses.with_suffix(f".{rank}").read_text()) for rank in range(world)]
    return torch.cat([torch.tensor(part, dtype=torch.float64) for part in parts], dim=1)


def _convert(saved: Path, out: Path, stage: int) -> None:
    """Run DeepSpeed's own converter."""
    code = "import deepspeed.checkpoint.ds_to_universal as own; own.main(own.parse_arguments())"
    flags = ["--inject_missing_state"] if stage < 3 else []
    command = [sys.executable, "-c", code, "--input_folder", str(saved), "--output_folder", str(out), *flags]
    subprocess.run(command, check=True, capture_output=True)


def main() -> None:
    """Run all of them."""
    wrong = 0
    with tempfile.TemporaryDirectory(prefix="reshard-universal-") as temporary:
        for number, (name, before, ranks, after, others) in enumerate(RUNS):
            root = Path(temporary) / str(number)
            model, is_one_group = zoo.save(name, root / "model"), after == "zero-3"
            is_alone = before == "weights"
            first_kind, saved = (after, model) if is_alone else (before, root / "saved")
            out = None if is_alone else saved
            unbroken = _train(first_kind, ranks, is_one_group, model, root / "unbroken", None, out)
            form = form_of("dcp modules" if after == "fsdp2" else "deepspeed-universal")
            split(saved, root / "ours", **form, config=None if is_alone else model)
            resumed = _train(after, others, is_one_group, model, root / "resumed", root / "ours", None)
            first, second = (resumed - unbroken).abs().max(dim=1).values.tolist()
            is_same = first == 0 and (second < NOISE or after.endswith("bf16"))
            own = ""
            if before == after != "fsdp2":
                _convert(root / "saved" / "global_step2", root / "own" / "global_step2_universal", int(before[5]))
                theirs = _train(after, others, is_one_group, model, root / "theirs", root / "own", None)
                own = f", {'as' if torch.equal(theirs, resumed) else 'NOT as'} from DeepSpeed's own converter"
                is_same = is_same and torch.equal(theirs, resumed)
            verdict = "goes on as if unbroken" if is_same else "goes on as another run"
            print(
                f"{name}: {before} on {ranks}, then {after} on {others}: {verdict} "
                f"(the next loss differs by {first:.1e}, the second by {second:.1e}{own})",
                flush=True,
            )
            wrong += not is_same
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
