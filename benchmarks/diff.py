"""``reshard diff`` against ``cmp`` over the same bytes, in one run, warm page cache.

    python -m benchmarks.diff [--gigabytes 4] [--rounds 5] [--folder DIR]

Compares a Llama-shaped checkpoint in three files with a copy of it, and with its four ranks; the baseline is ``cmp`` of
the three files with the copy. All are run alternately. Prints the medians, the ratios, and the peak resident memory.
Needs three times the checkpoint's size on the disk.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import sys
import tempfile
from pathlib import Path

from benchmarks.verify_exact import PREPARE, places, run

MEASURE = """
import sys
from pathlib import Path
from reshard.api import diff
sys.exit(not diff(Path(sys.argv[1]), Path(sys.argv[2])).same)
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=4)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", type=Path, help="where to put the files, and leave them")
    arguments = parser.parse_args()
    folder = arguments.folder or Path(tempfile.mkdtemp(prefix="reshard-bench-"))
    try:
        run([sys.executable, "-c", PREPARE, str(folder), str(arguments.gigabytes), "4"])
        source, copy, shards = places(folder, arguments.gigabytes, 4)
        files = sorted(source.glob("*.safetensors"))
        ours = [[sys.executable, "-c", MEASURE, str(source), str(other)] for other in (copy, shards)]
        commands = {
            "cmp": [["cmp", str(file), str(copy / file.name)] for file in files],
            "diff, a copy": ours[:1],
            "diff, 4 ranks": ours[1:],
        }
        rounds = [[run(*command) for command in commands.values()] for _ in range(arguments.rounds + 1)][1:]
        total = sum(file.stat().st_size for file in files)
    finally:
        if arguments.folder is None:
            shutil.rmtree(folder)
    for number, name in enumerate(commands):
        timings = [each[number] for each in rounds]
        wall, processor = (statistics.median(getattr(t, kind) for t in timings) for kind in ("wall", "processor"))
        peak = max(each.peak for each in timings) / 1e6
        ratios = sorted(each[number].wall / each[0].wall for each in rounds)
        print(
            f"{name:14} {wall:6.2f} s   processor {processor:6.2f} s   peak {peak:4.0f} MB"
            f"   ratio {statistics.median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})"
        )
    print(f"median of {len(rounds)}; {total / 1e9:.1f} GB")


if __name__ == "__main__":
    main()
