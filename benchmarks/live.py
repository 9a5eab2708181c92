"""A push between running processes, against what trainers do today, all in one run.

    python -m benchmarks.live [--gigabytes 1] [--trainers 4] [--receivers 4] [--rounds 3]

Trainers hold a Llama under FSDP2; receivers hold what vLLM has at that tp. Each way gives every receiver its part:
the push (over shared memory; over gloo alone; and there of the 3 % of elements that changed); plain gloo sends of the
push's bytes between the same ranks, without packing; ``full_tensor()`` of each parameter on all trainers, a broadcast
to all receivers, which cut their parts; a gather to the trainer's rank 0 and the same broadcast; and a checkpoint on
tmpfs (torch's own, split by reshard, loaded). Prints seconds of the best round, and the memory that the first push
took on top (VmHWM).
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

from benchmarks.checkpoints import write_llama


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=1)
    parser.add_argument("--trainers", type=int, default=4)
    parser.add_argument("--receivers", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--rank", type=int)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--port", type=int)
    given = parser.parse_args()
    if given.rank is not None:
        print(json.dumps(rank(given)))
        return
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="live-") as folder, socket.create_server(("", 0)) as free:
        port = free.getsockname()[1]
        free.close()
        write_llama(Path(folder) / "model", given.gigabytes)
        command = [sys.executable, "-m", "benchmarks.live", *sys.argv[1:], "--folder", folder, "--port", str(port)]
        world = given.trainers + given.receivers
        ranks = [subprocess.Popen([*command, "--rank", str(i)], stdout=subprocess.PIPE) for i in range(world)]
        said = [json.loads(process.communicate()[0]) for process in ranks]
    best = {name: min(seconds) for name, seconds in said[0]["seconds"].items()}
    for name, seconds in best.items():
        print(f"{name:45} {seconds:7.3f} s  {seconds / best['push, shared memory']:5.2f} x the push")
    print(f"bytes of the push: {sum(each.get('sent', 0) for each in said):,}, as planned: {said[0]['planned']:,}")
    print(f"bytes of a push of what changed: {sum(each.get('changed', 0) for each in said):,}")
    extra = [max(each["extra"] for each in side) for side in (said[: given.trainers], said[given.trainers :])]
    print(f"plan: {said[0]['plan']:.3f} s; memory of the first push: {extra[0]:.0f} MB on a trainer")
    print(f"on a receiver {extra[1]:.0f} MB, with its copy of {max(each.get('copy', 0) for each in said):.0f} MB")


def rank(given: argparse.Namespace) -> dict[str, Any]:
    import torch
    from torch import distributed as dist

    torch.set_num_threads(1)
    os.environ |= {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    world = given.trainers + given.receivers
    method = f"file://{given.folder}/group"
    dist.init_process_group("gloo", init_method=method, rank=given.rank, world_size=world, timeout=timedelta(minutes=5))
    process = (Trainer if given.rank < given.trainers else Receiver)(given)
    seconds: dict[str, list[float]] = {}
    for number in range(given.rounds + 1):
        for name, way in process.ways():
            process.change()
            dist.barrier()
            begin = time.monotonic()
            way(number)
            dist.barrier()
            if number:  # the first warms up
                seconds.setdefault(name, []).append(time.monotonic() - begin)
    return {"seconds": seconds, **process.said}


def extra(work: Callable[[], object]) -> float:
    """The peak of resident memory in some work over what it was before, in MB."""
    Path("/proc/self/clear_refs").write_text("5")
    before = _status("VmRSS")
    work()
    return _status("VmHWM") - before


def _status(key: str) -> float:
    return int(Path("/proc/self/status").read_text().partition(f"{key}:")[2].split()[0]) / 1024


class Process:
    """What both sides have."""

    def __init__(self, given: argparse.Namespace, end: Any, other: Any, third: Any) -> None:
        from torch.distributed.device_mesh import DeviceMesh

        self.given, self.end, self.other, self.third, self.said = given, end, other, third, dict[str, Any]()
        begin = time.monotonic()
        self.routes = end.check()
        self.said |= {"plan": time.monotonic() - begin, "planned": self.routes.nbytes}
        self.other.check()
        self.third.check()
        self.mesh = DeviceMesh

    def ways(self) -> Iterator[tuple[str, Callable[[int], None]]]:
        yield "push, shared memory", self.push
        yield "push, gloo alone", self.push_gloo
        yield "push of what changed, gloo alone", self.push_changes
        yield "plain gloo sends of the same bytes", self.plain
        yield "full_tensor() and broadcast", self.full
        yield "gather to rank 0 and broadcast", self.gathered
        yield "a checkpoint on tmpfs", self.by_disk

    def change(self) -> None:
        """Nothing, on a receiver."""

    def plain(self, number: int) -> None:
        """The messages of the push, from and into memory that is there."""
        import torch
        from torch import distributed as dist

        room = torch.ones(self.end.meeting.bucket, dtype=torch.uint8)
        works = []
        for step in self.end._steps(self.tensors()):
            for message in step.sends:
                works.append(dist.isend(room[: message.nbytes], message.peer))
            for message in step.receives:
                dist.recv(room[: message.nbytes], message.peer)
            if len(works) > 8:
                for work in works:
                    work.wait()
                works = []
        for work in works:
            work.wait()


class Trainer(Process):
    def __init__(self, given: argparse.Namespace) -> None:
        from torch.distributed.device_mesh import DeviceMesh
        from torch.distributed.fsdp import fully_shard

        from reshard.api import load
        from reshard.live.process import push
        from tests.live.trainers import Weights

        self.weights = Weights(load(given.folder / "model"))
        self.group = DeviceMesh("cpu", list(range(given.trainers)))
        for layer in self.weights.model.layers.children():
            fully_shard(layer, mesh=self.group)
        fully_shard(self.weights, mesh=self.group)
        about = {"config": given.folder / "model", "to": f"vllm:tp{given.receivers}", "rank": given.rank}
        ends = [
            push(
                self.weights,
                world=given.trainers,
                store=f"tcp://127.0.0.1:{given.port + i}",
                timeout=60,
                shared=not i,
                **about,
            )
            for i in range(3)
        ]
        super().__init__(given, *ends)

    def tensors(self) -> Any:
        return self.end._tensors()["tensors"]

    def push(self, number: int) -> None:
        if number:
            self.end(number + 1)
            return
        stats: list[Any] = []
        self.said["extra"] = extra(lambda: stats.append(self.end(1)))
        self.said["sent"] = sum(stats[0].sent.values())

    def push_gloo(self, number: int) -> None:
        self.other(number + 1)

    def push_changes(self, number: int) -> None:
        self.said["changed"] = sum(self.third(number + 1, delta=True).sent.values())

    def change(self) -> None:
        """Change every 33rd element."""
        for (local,) in self.tensors().values():
            local.view(-1)[::33] += 1

    def full(self, number: int) -> None:
        from torch import distributed as dist

        for parameter in self.weights.parameters():
            dist.broadcast(parameter.full_tensor().detach(), 0)

    def gathered(self, number: int) -> None:
        import torch
        from torch import distributed as dist

        group, first = self.group.get_group(), self.given.rank == 0
        for parameter in self.weights.parameters():
            local = parameter.to_local().detach()
            rows = -(-parameter.shape[0] // self.given.trainers)
            padded = torch.zeros(rows, *parameter.shape[1:], dtype=local.dtype)
            padded[: len(local)] = local
            parts = [torch.empty_like(padded) for _ in range(self.given.trainers)] if first else None
            dist.gather(padded, parts, 0, group)
            whole = torch.cat(parts)[: len(parameter)] if parts else torch.empty(parameter.shape, dtype=local.dtype)
            dist.broadcast(whole, 0)

    def by_disk(self, number: int) -> None:
        import torch.distributed.checkpoint as dcp
        from torch import distributed as dist

        from reshard.api import split

        saved, out = self.given.folder / "saved", self.given.folder / "out"
        dcp.save(self.weights.state_dict(), checkpoint_id=saved, process_group=self.group.get_group())
        if self.given.rank == 0:
            split(saved, out, format="vllm", tp=self.given.receivers, config=self.given.folder / "model")
        dist.barrier()
        dist.barrier()
        if self.given.rank == 0:
            shutil.rmtree(saved)
            shutil.rmtree(out)


class Receiver(Process):
    def __init__(self, given: argparse.Namespace) -> None:
        from torch.distributed.device_mesh import DeviceMesh

        from reshard.api import load
        from reshard.live.process import pull

        DeviceMesh("cpu", list(range(given.trainers)))
        self.shapes = {name: (tensor.shape, tensor.dtype) for name, tensor in load(given.folder / "model").items()}
        number = given.rank - given.trainers
        ends = [
            pull(
                store=f"tcp://127.0.0.1:{given.port + i}",
                rank=number,
                world=given.receivers,
                trainers=given.trainers,
                timeout=60,
                shared=not i,
            )
            for i in range(3)
        ]
        super().__init__(given, *ends)

    def tensors(self) -> Any:
        return self.end._rooms(self.routes, None)

    def push(self, number: int) -> None:
        if number:
            self.end(number + 1)
            return
        self.said["extra"] = extra(lambda: self.end(1))
        self.said["copy"] = sum(tensor.nbytes for of in self.tensors().values() for tensor in of) / 1e6

    def push_gloo(self, number: int) -> None:
        self.other(number + 1)

    def push_changes(self, number: int) -> None:
        self.third(number + 1)

    def full(self, number: int) -> None:
        import torch
        from torch import distributed as dist

        kept = []
        for shape, dtype in self.shapes.values():
            whole = torch.empty(shape, dtype=dtype)
            dist.broadcast(whole, 0)
            kept.append(whole[: shape[0] // self.given.receivers].clone())

    gathered = full

    def by_disk(self, number: int) -> None:
        from safetensors.torch import load_file
        from torch import distributed as dist

        dist.barrier()
        rank = self.given.rank - self.given.trainers
        for file in (self.given.folder / "out").glob(f"model-rank-{rank}-*.safetensors"):
            for tensor in load_file(file).values():
                tensor.clone()
        dist.barrier()


if __name__ == "__main__":
    main()
