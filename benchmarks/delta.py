"""The size of deltas of a simulated step of training, plain and compressed, and the time to make and apply them.

    python -m benchmarks.delta [--gigabytes 1] [--folder DIR]

A Llama in BF16 of normal weights (0.02), rounded from weights in float32; a step moves each of these by one amount, up
or down, so that 1, 3 or 10 % of the rounded ones change: mostly the small ones, by one unit in the last place. The
baseline is ``cp`` of the checkpoint. Needs six times its size.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
from pathlib import Path

import numpy as np

from benchmarks.checkpoints import write_llama
from benchmarks.verify_exact import Timing, run
from reshard.formats.files.safetensors import read_header

SHARES = (0.01, 0.03, 0.1)
STEP = 1 << 24


def rounded(values: np.ndarray) -> np.ndarray:
    bits = values.view("<u4")
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype("<u2")


def write_weights(folder: Path, gigabytes: float, moved: float) -> None:
    """The checkpoint after a step that moves each weight by ``moved``."""
    write_llama(folder, gigabytes)
    for number, file in enumerate(sorted(folder.glob("*.safetensors"))):
        chance, codes = np.random.default_rng(number), np.memmap(file, "<u2", "r+", len(read_header(file).raw))
        for begin in range(0, codes.size, STEP):
            count = min(STEP, codes.size - begin)
            before = chance.standard_normal(count, np.float32) * np.float32(0.02)
            up = chance.random(count, np.float32) < 0.5
            codes[begin : begin + count] = rounded(before + np.where(up, np.float32(moved), -np.float32(moved)))


PREPARE = """
import sys
from pathlib import Path
from benchmarks.delta import write_weights
write_weights(Path(sys.argv[1]), float(sys.argv[2]), float(sys.argv[3]))
"""


def prepare(folder: Path, gigabytes: float, moved: float) -> None:
    """The same in a process of its own: a child's peak is never less than its parent's size when it was started."""
    run([sys.executable, "-c", PREPARE, str(folder), str(gigabytes), str(moved)])


def amount(share: float) -> float:
    """By how much weights are moved so that this share of the rounded ones changes."""
    chance = np.random.default_rng(0)
    before = chance.standard_normal(1 << 20, np.float32) * np.float32(0.02)
    low, high = 0.0, 0.02
    for _ in range(40):
        middle = (low + high) / 2
        changed = (rounded(before) != rounded(before + np.float32(middle))).mean()
        low, high = (low, middle) if changed > share else (middle, high)
    return high


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=1)
    parser.add_argument("--folder", type=Path, help="where to put the files; they are removed again")
    arguments = parser.parse_args()
    root = Path(tempfile.mkdtemp(prefix="reshard-bench-", dir=arguments.folder))
    program = [sys.executable, "-m", "reshard"]
    moves = {share: amount(share) for share in SHARES}
    try:
        base = root / "base"
        prepare(base, arguments.gigabytes, 0.0)
        size = sum(file.stat().st_size for file in base.glob("*.safetensors"))
        shutil.copytree(base, root / "warm")
        show("cp", run(["cp", "-r", str(base), str(root / "copy")]), size, size)
        for share in SHARES:
            after = root / "after"
            prepare(after, arguments.gigabytes, moves[share])
            for name, options in (("plain", []), ("compressed", ["--compress"])):
                delta, out = root / "delta", root / "out"
                line = [*program, "diff", str(base), str(after), "--out", str(delta), *options, "-q"]
                made = run(["sh", "-c", f"{' '.join(line)} > /dev/null; test $? = 1"])
                stored = sum(path.stat().st_size for path in delta.iterdir())
                show(f"{share:.0%} {name}: diff --out", made, stored, size)
                show(
                    f"{share:.0%} {name}: patch",
                    run([*program, "patch", *map(str, (base, delta, out)), "-q"]),
                    size,
                    size,
                )
                run(["cmp", *(str(next(each.glob("*-00001-of-*.safetensors"))) for each in (after, out))])
                shutil.rmtree(delta)
                shutil.rmtree(out)
            shutil.rmtree(after)
    finally:
        shutil.rmtree(root)


def show(what: str, timing: Timing, nbytes: int, size: int) -> None:
    print(
        f"{what:28} {nbytes / 1e6:8.1f} MB {nbytes / size:7.2%}   {timing.wall:6.2f} s   "
        f"processor {timing.processor:6.2f} s   peak {timing.peak / 1e6:5.0f} MB",
        flush=True,
    )


if __name__ == "__main__":
    main()
