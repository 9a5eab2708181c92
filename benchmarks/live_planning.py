"""How long the plan of a push takes for the largest models, on one core and without a process to push.

    python -m benchmarks.live_planning [--from fsdp2:256] [--to vllm:tp32]

DeepSeek V3 and Kimi K2 in BF16, by their published names and shapes. As each process of a push does: the model is bound
to what all trainers say that they hold, the blocks are found, and the digest, and this rank's part of them. Prints the
processor time and the peak memory. Promised are 10 s and 1 GB.
"""

from __future__ import annotations

import argparse
import multiprocessing
import resource
import time
from pathlib import Path

from benchmarks.checkpoints import DEEPSEEK_V3, deepseek_v3_tensors, in_bf16
from benchmarks.models import read_config


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--from", dest="source", default="fsdp2:256")
    parser.add_argument("--to", dest="target", default="vllm:tp32")
    given = parser.parse_args()
    for name in ("deepseek-v3", "kimi-k2"):
        process = multiprocessing.get_context("spawn").Process(target=measure, args=(name, given.source, given.target))
        process.start()
        process.join()


def measure(name: str, source: str, target: str) -> None:
    from reshard.formats.notation.architecture_files import find_architecture
    from reshard.live.meshes import target_of, trainer_state
    from reshard.live.routing import plan_push
    from reshard.live.sides import bound
    from reshard.model.binding import bind
    from reshard.model.model import FullTensor

    config = dict(DEEPSEEK_V3) if name == "deepseek-v3" else read_config(name)
    config.pop("quantization_config", None)
    tensors = [FullTensor(*tensor, name) for tensor in in_bf16(deepseek_v3_tensors(config))]
    live = trainer_state(bind(find_architecture(config, Path(name)), config, tensors), target_of(source))
    begin = time.process_time()
    plan = plan_push(bound(live, config), live, target_of(target))
    digest, parts = plan.digest, sum(map(len, plan.parts(0)))
    seconds = time.process_time() - begin
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(
        f"{name}, {source} -> {target}: {seconds:.1f} s of processor time, peak {peak:.0f} MB; {len(plan.moves):,} "
        f"atoms in {len(plan.ends):,} steps, {plan.nbytes / 1e9:,.0f} GB, {parts:,} blocks of rank 0, {digest[:8]}"
    )


if __name__ == "__main__":
    main()
