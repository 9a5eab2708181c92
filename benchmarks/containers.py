"""Distributed checkpoints against copying the files, against torch's and Megatron-Core's own ways, in one run.

    python -m benchmarks.containers [--gigabytes 2] [--rounds 3] [--folder DIR] [--megatron-python PATH] [--only WORD…]

Writes a Llama of random bytes. Splits it into reshard's own layout, torch's distributed checkpoint, Megatron-Core's and
transformers', merges these, and has torch and, with the python of an environment that has it, Megatron-Core do the
same: ``dcp.save`` and ``dist_checkpointing.save`` of the tensors in memory, ``dcp.load`` and a save of the tensors,
``dcp_to_torch_save``, ``consolidate_safetensors_files``. Each is timed in turn with ``cp -r``, the order reversed in
each round; the first round is not counted. Prints medians, the ratio to ``cp -r`` of what is read, the range of the
ratios in single rounds, seconds of processors, and the peak memory of a further run. The import of torch is counted, as
a user waits for it; the seconds in brackets are those of torch's call alone, without reading the source.
``--no-checksum`` still has the CRC-32s of the archives, which are the difference between the own layout and the others.
``--only`` takes the ways with one of these words in their names.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.checkpoints import write_llama
from benchmarks.speed import Took, compared, peak_memory, run, took

_LOAD = """
import sys, time, warnings
warnings.simplefilter("ignore")
from pathlib import Path
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
folder, out = sys.argv[1:]
def tensors():
    return {name: each for file in sorted(Path(folder).glob("*.safetensors")) for name, each in load_file(file).items()}
"""
DCP_SAVE = f"""{_LOAD}
state = tensors()
begin = time.perf_counter()
dcp.save(state, checkpoint_id=out, no_dist=True)
print(time.perf_counter() - begin)
"""
DCP_LOAD = f"""{_LOAD}
metadata = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata
state = {{name: torch.empty(each.size, dtype=each.properties.dtype) for name, each in metadata.items()}}
begin = time.perf_counter()
dcp.load(state, checkpoint_id=folder, no_dist=True)
print(time.perf_counter() - begin)
Path(out).mkdir()
save_file(state, Path(out) / "model.safetensors")
"""
DCP_TO_TORCH = f"""{_LOAD}
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
Path(out).mkdir()
begin = time.perf_counter()
dcp_to_torch_save(folder, Path(out) / "model.pt")
print(time.perf_counter() - begin)
"""
CONSOLIDATE = f"""{_LOAD}
from safetensors import safe_open
from torch.distributed.checkpoint._consolidate_hf_safetensors import consolidate_safetensors_files
names = {{name for file in Path(folder).glob("*.safetensors") for name in safe_open(file, "pt").keys()}}
Path(out).mkdir()
begin = time.perf_counter()
consolidate_safetensors_files(folder, out, dict.fromkeys(names, 1), num_threads=2)
print(time.perf_counter() - begin)
"""
MEGATRON_SAVE = f"""{_LOAD}
import logging, os
logging.disable(logging.WARNING)
os.environ |= {{"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29533", "RANK": "0", "WORLD_SIZE": "1"}}
torch.distributed.init_process_group("gloo")
torch.cuda.synchronize = lambda *_: None
torch.cuda.current_device = lambda: torch.device("cpu")
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing import ShardedTensor
parallel_state.initialize_model_parallel()
state = {{name: ShardedTensor.from_rank_offsets(name, each) for name, each in tensors().items()}}
Path(out).mkdir()
begin = time.perf_counter()
dist_checkpointing.save(state, out)
print(time.perf_counter() - begin)
"""


@dataclass
class Way:
    """A command that reads a folder and writes ``out``: what it took, and what ``cp -r`` did."""

    name: str
    source: Path
    command: list[str]
    runs: list[Took] = field(default_factory=list)
    copies: list[Took] = field(default_factory=list)

    def time(self, out: Path) -> None:
        """Run it once."""
        self.runs.append(took(self.command))
        shutil.rmtree(out)

    def copy(self, out: Path) -> None:
        """Copy what it reads."""
        self.copies.append(took(["cp", "-r", str(self.source), str(out)]))
        shutil.rmtree(out)

    def shown(self, peak: int) -> str:
        """What was measured, without the first round."""
        inside = ""
        if "-c" in self.command:
            inside = f" ({statistics.median(float(each.printed.split()[-1]) for each in self.runs[1:]):.2f} s)"
        return compared(self.name, self.runs, self.copies, peak, f"{inside:9}")


RESHARD = [sys.executable, "-m", "reshard"]
FORMS = {
    "dcp": ["--as", "dcp"],
    "megatron": ["--as", "megatron"],
    "transformers": ["--as", "transformers", "--tp", "4"],
}


def _ways(source: Path, shards: Mapping[str, Path], out: Path, megatron_python: str | None) -> Iterator[Way]:
    yield Way("split --tp 4", source, [*RESHARD, "split", str(source), str(out), "--tp", "4"])
    for name, form in FORMS.items():
        split = [*RESHARD, "split", str(source), str(out), *form]
        yield Way(f"split --as {name}", source, split)
        if name != "transformers":
            yield Way(f"split --as {name} --no-checksum", source, [*split, "--no-checksum"])
        yield Way(f"merge of {name}", shards[name], [*RESHARD, "merge", str(shards[name]), str(out)])

    def script(name: str, read: Path, python: str, code: str) -> Way:
        return Way(name, read, [python, "-c", code, str(read), str(out)])

    yield script("torch's dcp.save", source, sys.executable, DCP_SAVE)
    yield script("torch's dcp.load, save_file", shards["dcp"], sys.executable, DCP_LOAD)
    yield script("torch's dcp_to_torch_save", shards["dcp"], sys.executable, DCP_TO_TORCH)
    yield script("torch's consolidation", shards["transformers"], sys.executable, CONSOLIDATE)
    if megatron_python:
        yield script("Megatron-Core's save", source, megatron_python, MEGATRON_SAVE)


def _is_wanted(way: Way, words: Sequence[str]) -> bool:
    return not words or any(word in way.name for word in words)


def measure(ways: Sequence[Way], out: Path, rounds: int) -> None:
    """Time all in turn, in each round and once more to warm up, then their memory, and print a line for each."""
    for number in range(rounds + 1):
        for way in ways:
            for step in (way.copy, way.time) if number % 2 else (way.time, way.copy):
                step(out)
    for way in ways:
        peak = peak_memory(way.command)
        shutil.rmtree(out)
        print(way.shown(peak), flush=True)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=2.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()) / "reshard-benchmark")
    parser.add_argument("--megatron-python", help="the python of an environment with Megatron-Core")
    parser.add_argument("--only", nargs="*", default=[], help="words of the names of what is measured")
    arguments = parser.parse_args()
    folder: Path = arguments.folder
    source, out = write_llama(folder / f"llama-{arguments.gigabytes:g}gb", arguments.gigabytes), folder / "out"
    shutil.rmtree(out, ignore_errors=True)
    shards = {name: folder / name for name in FORMS}
    ways = [way for way in _ways(source, shards, out, arguments.megatron_python) if _is_wanted(way, arguments.only)]
    made = {name: place for name, place in shards.items() if any(way.source == place for way in ways)}
    for name, place in made.items():
        shutil.rmtree(place, ignore_errors=True)
        run([*RESHARD, "split", str(source), str(place), *FORMS[name]])
        (place / "reshard.json").unlink()  # as another program writes it
    measure(ways, out, arguments.rounds)
    for place in made.values():
        shutil.rmtree(place)


if __name__ == "__main__":
    main()
