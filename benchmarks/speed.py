"""Split, merge and re-split against ``cp -r`` of the same bytes, in one run, on the same files.

    python -m benchmarks.speed [--gigabytes 4] [--rounds 5] [--folder DIR] [--script] [--as vllm]

Prints for each operation the median of the seconds, the ratio to ``cp -r`` (timed alternately), the seconds of
processors, which say more where others use the machine, too, and the peak resident memory (of a further run on Linux:
the sum of the peaks of all its processes, in which pages that they share count several times). Outputs are removed
after each round; the page cache is warm. ``--as`` is for another program's format. ``--script`` also times the script
that everybody writes, with ``safe_open`` and ``save_file``. ``--only computed`` times what computes weights, of normal
numbers.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

from benchmarks.checkpoints import write_adapter, write_llama, write_normal

os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # a program that is installed is compiled once, not at each start

NAIVE = """
import sys, torch
from pathlib import Path
from safetensors import safe_open
from safetensors.torch import save_file
source, out, tp = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
for rank in range(tp):
    shard = {}
    for file in sorted(source.glob('*.safetensors')):
        with safe_open(file, 'pt') as f:
            for name in f.keys():
                t = f.get_slice(name)
                shape = t.get_shape()
                if len(shape) == 1:
                    shard[name] = f.get_tensor(name)
                elif 'o_proj' in name or 'down_proj' in name:
                    n = shape[1] // tp
                    shard[name] = t[:, rank * n:(rank + 1) * n].contiguous()
                else:
                    n = shape[0] // tp
                    shard[name] = t[rank * n:(rank + 1) * n].contiguous()
    out.mkdir(exist_ok=True)
    save_file(shard, out / f'rank{rank}.safetensors')
"""


class Took(NamedTuple):
    """Seconds of wall time, seconds of all processors, and what the command printed."""

    seconds: float
    processors: float
    printed: str


def took(command: list[str]) -> Took:
    """Run a command to its end."""
    begin, before = time.perf_counter(), _of_processors()
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{' '.join(command)[:500]}: exit status {done.returncode}: {done.stderr[-2000:]}")
    return Took(time.perf_counter() - begin, _of_processors() - before, done.stdout)


def _of_processors() -> float:
    """Seconds of processors that all processes used that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def run(command: list[str]) -> float:
    """Run a command to its end; the seconds of wall time that it took."""
    return took(command).seconds


def peak_memory(command: list[str]) -> int:
    """Run a command to its end; the sum of the largest resident sets of its processes in bytes, 0 if not on Linux."""
    peaks: dict[str, int] = {}
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    while process.poll() is None:
        main = Path(f"/proc/{process.pid}")
        with contextlib.suppress(OSError):
            for pid in (main.name, *(main / "task" / main.name / "children").read_text().split()):
                found = re.search(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
                if found:  # not ended meanwhile
                    peaks[pid] = 1024 * int(found[1])
        time.sleep(0.005)
    return sum(peaks.values())


def remove(made: Path) -> None:
    """Remove a folder or a file."""
    shutil.rmtree(made) if made.is_dir() else made.unlink()


def compare(name: str, source: Path, command: list[str], out: Path, rounds: int) -> None:
    """Time a command and ``cp -r`` of its source, alternately, and print both."""
    copy = out.with_name("copy")
    ours, theirs = list[Took](), list[Took]()
    both = [(theirs, ["cp", "-r", str(source), str(copy)], copy), (ours, command, out)]
    for _ in range(rounds + 1):
        for of, timed, made in both:
            of.append(took(timed))
            remove(made)
        both.reverse()  # each takes the memory that the one before it has given back
    peak = peak_memory(command)
    remove(out)
    print(compared(name, ours, theirs, peak), flush=True)


def compared(name: str, ours: list[Took], theirs: list[Took], peak: int, beside: str = "") -> str:
    """A line: a command, and copying the same bytes. The first round is left out, as it warms the page cache."""
    ratios = sorted(a.seconds / b.seconds for a, b in zip(ours[1:], theirs[1:], strict=True))
    mine, base = (statistics.median(each.seconds for each in of[1:]) for of in (ours, theirs))
    processors, copying = (statistics.median(each.processors for each in of[1:]) for of in (ours, theirs))
    return (
        f"{name:32} {mine:6.2f} s{beside}   cp -r {base:5.2f} s   ratio {mine / base:5.2f}   (per round "
        f"{ratios[0]:.2f} to {ratios[-1]:.2f})   processors {processors:.2f} s, cp -r {copying:.2f} s   "
        f"peak {peak / 1e6:5.0f} MB"
    )


def compare_computed(folder: Path, gigabytes: float, rounds: int) -> None:
    """Time a cast, both ways of fp8, a sum with an adapter of rank 16 and a mean of two."""
    reshard, out, quantized = [sys.executable, "-m", "reshard"], folder / "out", folder / "fp8-block"
    model = write_normal(folder / f"normal-{gigabytes:g}gb", gigabytes)
    adapter = write_adapter(folder / f"adapter-{gigabytes:g}gb", model)
    for leftover in (out, quantized, folder / "copy"):
        shutil.rmtree(leftover, ignore_errors=True)
    run([*reshard, "split", str(model), str(quantized), "--as", "huggingface", "--quantize", "fp8-block"])
    for source, name, *value in (
        (model, "--dtype", "fp16"), (model, "--quantize", "fp8-block"), (quantized, "--dequantize"),
        (model, "--adapter", str(adapter)),
    ):  # fmt: skip
        command = [*reshard, "split", str(source), str(out), "--as", "huggingface", name, *value]
        compare(name, source, command, out, rounds)
    compare("average of two", model, [*reshard, "average", str(model), str(model), str(out)], out, rounds)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--gigabytes", type=float, default=4.0)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()) / "reshard-benchmark")
    parser.add_argument("--script", action="store_true")
    parser.add_argument("--as", dest="form")
    parser.add_argument("--only", nargs="*", default=["split", "merge", "re-split"])
    arguments = parser.parse_args()
    folder: Path = arguments.folder
    if "computed" in arguments.only:
        compare_computed(folder, arguments.gigabytes, arguments.rounds)
        return
    source = write_llama(folder / f"llama-{arguments.gigabytes:g}gb", arguments.gigabytes)
    shards, out = folder / "shards-4", folder / "out"
    for leftover in (shards, out, folder / "copy"):
        shutil.rmtree(leftover, ignore_errors=True)
    reshard = [sys.executable, "-m", "reshard"]
    form = ["--as", arguments.form] if arguments.form else []

    def split(before: Path, after: Path, tp: int) -> list[str]:
        return [*reshard, "split", str(before), str(after), "--tp", str(tp), *form]

    if "split" in arguments.only:
        compare("split --tp 4", source, split(source, out, 4), out, arguments.rounds)
    run(split(source, shards, 4))
    if "merge" in arguments.only:
        compare("merge of 4", shards, [*reshard, "merge", str(shards), str(out)], out, arguments.rounds)
    if "re-split" in arguments.only:
        compare("re-split 4 -> 8", shards, split(shards, out, 8), out, arguments.rounds)
    shutil.rmtree(shards)
    if arguments.script:
        naive = [sys.executable, "-c", NAIVE, str(source), str(out), "4"]
        compare("safe_open script", source, naive, out, arguments.rounds)


if __name__ == "__main__":
    main()
