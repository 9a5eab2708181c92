"""``reshard verify --exact-only`` against ``cmp`` over the same bytes, in one run, warm page cache.

    python -m benchmarks.verify_exact [--gigabytes 4] [--rounds 5] [--folder DIR]

Splits a Llama-shaped checkpoint in three files to four ranks and proves the shards. The baseline is ``cmp`` of each of
the three files with a copy of it: it reads the same bytes of the original, and as many others as the shards have. Both
are run alternately. Prints the medians, the ratio, and the peak resident memory. Needs three times the checkpoint's
size on the disk.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

PREPARE = """
import sys
from pathlib import Path
from benchmarks.verify_exact import prepare
prepare(Path(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3]))
"""

MEASURE = """
import sys
from pathlib import Path
from reshard.source.opening import open_source
from reshard.verify.bytes.exact import verify_exact
report = verify_exact(open_source(Path(sys.argv[1])), Path(sys.argv[2]))
sys.exit(report.verdict != 'same')
"""


@dataclass(frozen=True)
class Timing:
    """Seconds of wall and processor time, and peak resident bytes, of one or more runs."""

    wall: float
    processor: float
    peak: int


def run(*commands: list[str]) -> Timing:
    """Run commands one after the other; each must end with 0."""
    begin, processor, peak = time.perf_counter(), 0.0, 0
    for command in commands:
        process = subprocess.Popen(command)
        _, status, usage = os.wait4(process.pid, 0)
        if status:
            sys.exit(f"{' '.join(command)}: exit status {status}")
        processor += usage.ru_utime + usage.ru_stime
        peak = max(peak, usage.ru_maxrss * (1 if sys.platform == "darwin" else 1024))
    return Timing(time.perf_counter() - begin, processor, peak)


def places(folder: Path, gigabytes: float, tp: int) -> tuple[Path, Path, Path]:
    """The folders of the checkpoint, a copy of it, and its shards."""
    name = f"llama-{gigabytes:g}"
    return folder / name, folder / f"{name}-copy", folder / f"{name}-tp{tp}"


def prepare(folder: Path, gigabytes: float, tp: int) -> None:
    """Write the checkpoint, a copy of it, and its shards, unless they are there."""
    from benchmarks.checkpoints import write_llama
    from reshard.api import split

    source, copy, shards = places(folder, gigabytes, tp)
    write_llama(source, gigabytes)
    if not copy.exists():
        shutil.copytree(source, copy)
    if not shards.exists():
        split(source, shards, tp=tp)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=4)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tp", type=int, default=4)
    parser.add_argument("--folder", type=Path, help="where to put the files, and leave them")
    arguments = parser.parse_args()
    folder = arguments.folder or Path(tempfile.mkdtemp(prefix="reshard-bench-"))
    try:
        # in a process of its own: a child's peak is never less than its parent's size when it was started
        run([sys.executable, "-c", PREPARE, str(folder), str(arguments.gigabytes), str(arguments.tp)])
        source, copy, shards = places(folder, arguments.gigabytes, arguments.tp)
        files = sorted(source.glob("*.safetensors"))
        cmp = [["cmp", str(file), str(copy / file.name)] for file in files]
        ours = [sys.executable, "-c", MEASURE, str(source), str(shards)]
        total = sum(file.stat().st_size for file in files)
        pairs = [(run(*cmp), run(ours)) for _ in range(arguments.rounds + 1)][1:]  # the first round warms the cache
    finally:
        if arguments.folder is None:
            shutil.rmtree(folder)
    for name, timings in (("cmp", [a for a, _ in pairs]), ("verify --exact-only", [b for _, b in pairs])):
        wall, processor = (statistics.median(getattr(t, kind) for t in timings) for kind in ("wall", "processor"))
        peak = max(t.peak for t in timings) / 1e6
        print(f"{name:20} {wall:6.2f} s   processor {processor:6.2f} s   peak {peak:4.0f} MB")
    ratios = sorted(b.wall / a.wall for a, b in pairs)
    spread = f"median of {len(ratios)}, {ratios[0]:.2f} to {ratios[-1]:.2f}"
    print(f"ratio {statistics.median(ratios):.2f} ({spread}; {total / 1e9:.1f} GB, tp {arguments.tp})")


if __name__ == "__main__":
    main()
