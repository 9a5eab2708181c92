"""``reshard merge`` of transformers' distributed checkpoint against torch's own consolidation, in one run.

    python -m benchmarks.consolidate [--gigabytes 2] [--rounds 3] [--folder DIR] [--threads 2]

Writes a Llama of random bytes as ``--as transformers`` for four ranks, and joins it by both, alternately. Torch's
consolidation imports torch first, which is counted, as a user waits for it; the seconds in brackets are without it.
Without our manifest and with as many checksums as torch takes, none, so that both do the same work.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.checkpoints import write_llama
from benchmarks.speed import peak_memory, run

TORCH = """
import sys, time
from pathlib import Path
from torch.distributed.checkpoint._consolidate_hf_safetensors import consolidate_safetensors_files
from safetensors import safe_open
folder, out, threads = sys.argv[1:]
begin = time.perf_counter()
names = {name for file in Path(folder).glob("*.safetensors") for name in safe_open(file, "pt").keys()}
Path(out).mkdir()
consolidate_safetensors_files(folder, out, dict.fromkeys(names, 1), num_threads=int(threads))
print(time.perf_counter() - begin)
"""


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--gigabytes", type=float, default=2.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()) / "reshard-benchmark")
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    folder: Path = arguments.folder
    source = write_llama(folder / f"llama-{arguments.gigabytes:g}gb", arguments.gigabytes)
    shards, out = folder / "boxes-4", folder / "joined"
    for leftover in (shards, out):
        shutil.rmtree(leftover, ignore_errors=True)
    reshard = [sys.executable, "-m", "reshard"]
    run([*reshard, "split", str(source), str(shards), "--tp", "4", "--as", "transformers"])
    (shards / "reshard.json").unlink()
    ours = [*reshard, "merge", str(shards), str(out), "--max-shard-size", "100GB", "--no-checksum"]
    theirs = [sys.executable, "-c", TORCH, str(shards), str(out), str(arguments.threads)]
    mine, base, inside = list[float](), list[float](), list[float]()
    for number in range(arguments.rounds + 1):
        for command, seconds in ((ours, mine), (theirs, base)):
            begin = time.perf_counter()
            done = subprocess.run(command, capture_output=True, text=True, check=True)
            if number:  # the first round warms the page cache
                seconds.append(time.perf_counter() - begin)
                inside += [float(done.stdout.split()[-1])] if command is theirs else []
            shutil.rmtree(out)
    peaks = []
    for command in (ours, theirs):
        peaks.append(peak_memory(command))
        shutil.rmtree(out)
    shutil.rmtree(shards)
    first, second, pure = statistics.median(mine), statistics.median(base), statistics.median(inside)
    print(f"reshard merge                  {first:6.2f} s                   peak {peaks[0] / 1e6:6.0f} MB")
    print(f"consolidate_safetensors_files  {second:6.2f} s ({pure:.2f} s)   peak {peaks[1] / 1e6:6.0f} MB")
    print(f"{second / first:.1f} times as fast ({pure / first:.1f} times without the import of torch)")


if __name__ == "__main__":
    main()
