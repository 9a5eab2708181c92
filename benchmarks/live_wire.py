"""How long a push's bytes take on the way, against plain gloo sends of the same bytes, all in one run.

    python -m benchmarks.live_wire --gigabytes 1 --senders 4 --receivers 4 --bucket 64

Each sender fills each bucket with an equal part for each receiver. Plain gloo sends from, and receives into, the
tensors themselves; the second way copies them into a bucket and out of one, as tensors of which a peer has a part need.
The wire packs, sums, sends, compares and unpacks. Each way runs once to warm up, then in turns with the others.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import socket
import statistics
import time
from collections.abc import Callable
from datetime import timedelta

WAYS = ("gloo", "gloo, from and into a bucket", "the wire over gloo", "the wire over shared memory")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=1)
    parser.add_argument("--senders", type=int, default=4)
    parser.add_argument("--receivers", type=int, default=4)
    parser.add_argument("--bucket", type=int, default=64, help="megabytes")
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    context = multiprocessing.get_context("spawn")
    ranks = [
        context.Process(target=rank, args=(options, number, port), daemon=True)
        for number in range(options.senders + options.receivers)
    ]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join()


def rank(options: argparse.Namespace, number: int, port: int) -> None:
    import torch
    from torch.distributed import PrefixStore, ProcessGroupGloo, TCPStore

    from reshard.live.fence import Fence
    from reshard.live.wire import Message, Wire

    torch.set_num_threads(1)
    senders, receivers, bucket = options.senders, options.receivers, options.bucket << 20
    steps = round(options.gigabytes * 1e9 / senders / bucket)
    sends = number < senders
    peers = range(senders, senders + receivers) if sends else range(senders)
    share = bucket // receivers // 8 * 8
    held = torch.full((steps, len(peers), share), number, dtype=torch.uint8)

    names = [f"rank {r}" for r in range(senders + receivers)]
    fence = Fence(f"tcp://127.0.0.1:{port}", number, names, timeout=60)
    wires = [Wire(fence, number, bucket=bucket, shared=shared) for shared in (False, True)]
    gloo = ProcessGroupGloo._Options()
    gloo._timeout = timedelta(seconds=60)
    gloo._devices = [ProcessGroupGloo.create_device(hostname="127.0.0.1")]
    listener = socket.create_server(("127.0.0.1", 0))
    place = fence.gather("plain", listener.getsockname()[1])[0]
    descriptor = listener.detach() if number == 0 else None
    store = TCPStore(
        "127.0.0.1", place, len(names), number == 0, timedelta(seconds=60), False, master_listen_fd=descriptor
    )
    group = ProcessGroupGloo(PrefixStore("plain", store), number, len(names), gloo)

    def plain(_: int) -> None:
        for step in range(steps):
            turns = [(number + turn) % len(peers) for turn in range(len(peers))]
            way = group.send if sends else group.recv
            for work in [way([held[step, turn]], peers[turn], 0) for turn in turns]:
                work.wait()

    memory = torch.empty(2, len(peers), share, dtype=torch.uint8)

    def packed(_: int) -> None:
        works: list[list[tuple[int, object]]] = []
        for step in range(steps + 1):
            if step < steps:
                turns = [(number + turn) % len(peers) for turn in range(len(peers))]
                for turn in turns:
                    if sends:
                        memory[step % 2, turn].copy_(held[step, turn])
                way = group.send if sends else group.recv
                works.append([(turn, way([memory[step % 2, turn]], peers[turn], 0)) for turn in turns])
            for turn, work in works[step - 1] if step else ():
                work.wait()
                if not sends:
                    held[step - 1, turn].copy_(memory[(step - 1) % 2, turn])

    def over(wire: Wire) -> Callable[[int], None]:
        def message(step: int, turn: int) -> Message:
            mine = held[step, turn]

            def work(part: torch.Tensor) -> None:
                if sends:
                    part.copy_(mine)
                else:
                    mine.copy_(part)

            return Message(step, peers[turn], share, work, sends)

        todo = [message(step, turn) for step in range(steps) for turn in range(len(peers))]
        return lambda version: (wire.exchange(todo, version), None)[1]

    ways = dict(zip(WAYS, (plain, packed, over(wires[0]), over(wires[1])), strict=True))
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    processor: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(options.rounds + 1):
        for name, run in ways.items():
            fence.gather("begin", "")
            start, used = time.monotonic(), time.process_time()
            run(turn)
            spent = fence.gather("end", time.process_time() - used)
            if turn:
                seconds[name].append(time.monotonic() - start)
                processor[name].append(sum(map(float, spent)))
    if not sends:
        assert all(int(held[0, peer, 0]) == peer for peer in peers)
    if number == 0:
        sent = steps * senders * receivers * share
        for name, times in seconds.items():
            best, middle = min(times), statistics.median(times)
            ratios = statistics.median(mine / gloo for mine, gloo in zip(times, seconds[WAYS[0]], strict=True))
            row = {"way": name, "GB": round(sent / 1e9, 3), "best_s": round(best, 3), "median_s": round(middle, 3)}
            row["processor_s"] = round(statistics.median(processor[name]), 3)
            print(json.dumps(row | {"GB/s": round(sent / 1e9 / middle, 2), "of_gloo": round(ratios, 2)}), flush=True)
    fence.gather("over", "")


if __name__ == "__main__":
    main()
