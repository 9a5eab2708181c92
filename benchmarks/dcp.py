"""``--as dcp`` and ``merge`` of it against copying the files, and against torch's own ways, in one run.

    python -m benchmarks.dcp [--gigabytes 2] [--rounds 3] [--folder DIR]

Writes a Llama of random bytes and makes a distributed checkpoint of it, and of that a checkpoint again, in turn with
``cp -r``, with torch's ``dcp.save`` of the tensors loaded by safetensors, and with torch's ``dcp.load`` and a save of
the tensors by safetensors. The import of torch is counted, as a user waits for it; the seconds in brackets are without.
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

SAVE = """
import sys, time, warnings
warnings.simplefilter("ignore")
from pathlib import Path
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
folder, out = sys.argv[1:]
begin = time.perf_counter()
state = {name: each for file in sorted(Path(folder).glob("*.safetensors")) for name, each in load_file(file).items()}
dcp.save(state, checkpoint_id=out, no_dist=True)
print(time.perf_counter() - begin)
"""
LOAD = """
import sys, time, warnings
warnings.simplefilter("ignore")
from pathlib import Path
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
folder, out = sys.argv[1:]
begin = time.perf_counter()
metadata = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata
state = {name: torch.empty(each.size, dtype=each.properties.dtype) for name, each in metadata.items()}
dcp.load(state, checkpoint_id=folder, no_dist=True)
Path(out).mkdir()
save_file(state, Path(out) / "model.safetensors")
print(time.perf_counter() - begin)
"""


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gigabytes", type=float, default=2.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()) / "reshard-benchmark")
    arguments = parser.parse_args()
    folder: Path = arguments.folder
    source = write_llama(folder / f"llama-{arguments.gigabytes:g}gb", arguments.gigabytes)
    shards, out = folder / "dcp", folder / "out"
    for leftover in (shards, out):
        shutil.rmtree(leftover, ignore_errors=True)
    reshard = [sys.executable, "-m", "reshard"]
    run([*reshard, "split", str(source), str(shards), "--as", "dcp"])
    (shards / "reshard.json").unlink()
    ways = {
        "cp -r": ["cp", "-r", str(source), str(out)],
        "reshard split --as dcp": [*reshard, "split", str(source), str(out), "--as", "dcp"],
        "reshard split --as dcp --no-checksum": [
            *reshard,
            "split",
            str(source),
            str(out),
            "--as",
            "dcp",
            "--no-checksum",
        ],
        "torch dcp.save": [sys.executable, "-c", SAVE, str(source), str(out)],
        "reshard merge": [*reshard, "merge", str(shards), str(out)],
        "torch dcp.load, save_file": [sys.executable, "-c", LOAD, str(shards), str(out)],
    }
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    inside: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(arguments.rounds + 1):
        for name, command in ways.items():
            begin = time.perf_counter()
            done = subprocess.run(command, capture_output=True, text=True, check=True)
            if number:  # the first round warms the page cache
                seconds[name].append(time.perf_counter() - begin)
                inside[name] += [float(done.stdout.split()[-1])] if name.startswith("torch") else []
            shutil.rmtree(out)
    base = statistics.median(seconds["cp -r"])
    for name, command in ways.items():
        peak = peak_memory(command)
        shutil.rmtree(out)
        found = statistics.median(seconds[name])
        pure = f" ({statistics.median(inside[name]):.2f} s)" if inside[name] else ""
        print(f"{name:40s} {found:6.2f} s{pure:10s} {found / base:5.2f} x cp   peak {peak / 1e6:6.0f} MB")
    shutil.rmtree(shards)


if __name__ == "__main__":
    main()
