"""What a tensor costs where it is its number that counts: microseconds for each tensor of the largest checkpoints.

    python -m benchmarks.planning [--only DeepSeek-R1] [--tp 8] [--rounds 3] [--folder DIR]

The headers of DeepSeek-R1 (91,991 tensors) and of Kimi K3 (497,052) are planned from sparse files: true headers, no
data. DeepSeek-V3 and Kimi K2 in BF16 are laid out as Megatron-Core's distributed checkpoint, from the same: which bytes
of which file hold which box, and the .metadata that says so. A Llama of 11,000 tiny layers (99,003 tensors in 30 MB) is
split, verified and merged. Each command runs in a
process of its own, from the start of Python to its end. Prints for each the smallest processor time of the rounds for
each tensor (of all its processes; it does not count the time that others take from it), the wall time of that round,
and the peak resident memory of the largest process. First comes ``--help``: what a command costs before it begins.
Promised are 0.2 s for ``--help``, and 10 s and 1 GB for the plan of DeepSeek-R1.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.checkpoints import DEEPSEEK_V3, deepseek_v3_tensors, in_bf16, write_sparse, write_tiny
from benchmarks.models import kimi_k3, packed_mxfp4, read_config

LAYERS = 11_000


@dataclass(frozen=True)
class Timing:
    """Seconds of wall and of processor time of a command, and the peak resident bytes of its largest process."""

    wall: float
    processor: float
    peak: int


def run(command: Sequence[str]) -> Timing:
    """Run a command to its end, which must be a good one."""
    begin = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    wall = time.perf_counter() - begin
    if status:
        sys.exit(f"{' '.join(command)}: exit status {status}")
    unit = 1 if sys.platform == "darwin" else 1024
    return Timing(wall, usage.ru_utime + usage.ru_stime, usage.ru_maxrss * unit)


def measure(what: str, tensors: int, command: Sequence[str], out: Path | None, rounds: int) -> None:
    """Time a command several times, each time without its output ``out``, and print the best."""
    found = []
    for _ in range(rounds):
        if out is not None:
            shutil.rmtree(out, ignore_errors=True)
        own = command[0] != "-c"
        found.append(run([sys.executable, *(["-m", "reshard"] if own else []), *command]))
    best = min(found, key=lambda timing: timing.processor)
    peak = max(timing.peak for timing in found) / 1e6
    each = f"{best.processor / tensors * 1e6:6.1f} us a tensor"
    print(f"{what:32} {each}   {best.processor:6.2f} s ({best.wall:6.2f} s of wall)   peak {peak:5.0f} MB", flush=True)


def deepseek_r1(folder: Path) -> int:
    """Write the headers of DeepSeek-R1; the number of its tensors."""
    tensors = list(deepseek_v3_tensors())
    write_sparse(folder, DEEPSEEK_V3, tensors, files=163)
    return len(tensors)


def kimi(folder: Path) -> int:
    """Write the headers of Kimi K3's language model, under its own names; the number of its tensors."""
    config = {key: value for key, value in read_config("kimi-k3").items() if key != "vision_config"}
    config["architectures"] = ["KimiK3ForCausalLM"]
    tensors = [(name, *value) for name, value in packed_mxfp4(kimi_k3(config), config).items()]
    write_sparse(folder, config, tensors, files=96)
    return len(tensors)


def bf16(config: dict[str, Any]) -> Callable[[Path], int]:
    """What writes the headers of a model of DeepSeek-V3's names in BF16; it returns the number of its tensors."""

    def write(folder: Path) -> int:
        plain = {key: value for key, value in config.items() if key != "quantization_config"}
        tensors = list(in_bf16(deepseek_v3_tensors(config)))
        write_sparse(folder, plain, tensors, files=163)
        return len(tensors)

    return write


LAID_OUT = {"DeepSeek-V3": bf16(DEEPSEEK_V3), "Kimi-K2": bf16(read_config("kimi-k2"))}
LAYOUT = """
import sys
from pathlib import Path
from typing import Any
from reshard.formats.notation.format_file import format_of
from reshard.mesh.plan import Degrees
from reshard.placement.program_plan import plan_for
from reshard.source.opening import open_source
from reshard.writing.documents import documents_of
from reshard.writing.output import Output
source, format = open_source(Path(sys.argv[1])), format_of("megatron")
files = Output(source, plan_for(source.model, format, Degrees()), format, 5 << 30)
assert any(name.endswith(".metadata") for name in documents_of(files).general)
"""
SPARSE: dict[str, Callable[[Path], int]] = {"DeepSeek-R1": deepseek_r1, "Kimi-K3": kimi}
TINY = "tiny"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", choices=[*SPARSE, *LAID_OUT, TINY], default=[*SPARSE, *LAID_OUT, TINY])
    parser.add_argument("--tp", default="8")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", type=Path, help="where to put the files, and leave them")
    arguments = parser.parse_args()
    folder = arguments.folder or Path(tempfile.mkdtemp(prefix="reshard-planning-"))
    tp, rounds = ["--tp", arguments.tp], arguments.rounds
    try:
        measure("--help", 1, ["--help"], None, rounds)
        for name, write in SPARSE.items():
            if name in arguments.only:
                source = folder / name
                count = write(source)
                measure(f"{name}: plan {' '.join(tp)}", count, ["plan", str(source), *tp], None, rounds)
                measure(f"{name}: list of degrees", count, ["plan", str(source)], None, rounds)
        for name, write in LAID_OUT.items():
            if name in arguments.only:
                source = folder / f"{name}-bf16"
                count = write(source)
                measure(f"{name}: layout as megatron", count, ["-c", LAYOUT, str(source)], None, rounds)
        if TINY in arguments.only:
            source, shards, merged = (folder / name for name in (TINY, "shards", "merged"))
            count = write_tiny(source, LAYERS)
            measure(f"tiny: split {' '.join(tp)}", count, ["split", str(source), str(shards), *tp], shards, rounds)
            verify = ["verify", str(source), str(shards), "--exact-only"]
            measure(f"tiny: verify of {arguments.tp}", count, verify, None, rounds)
            measure(f"tiny: merge of {arguments.tp}", count, ["merge", str(shards), str(merged)], merged, rounds)
    finally:
        if arguments.folder is None:
            shutil.rmtree(folder)


if __name__ == "__main__":
    main()
