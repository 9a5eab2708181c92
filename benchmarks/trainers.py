"""What trainers leave, made a Hugging Face checkpoint: by reshard and by the programs' own converters, in one run.

    python -m benchmarks.trainers [--gigabytes 2] [--rounds 2] [--folder DIR] [--deepspeed-python PATH]
        [--verl-python PATH]

A Llama of so many GB in float32, as ZeRO-3 and ZeRO-1 leave it on four ranks (by the tests' rule, with both averages:
three times as large), as pickled DTensors of FSDP2 (verl), and as torch's distributed checkpoint (Trainer, accelerate).
Each way is timed in turn with ``cp -r`` of what comes out, and measured once more for its memory. DeepSpeed's
``zero_to_fp32`` and verl's merger run in the pythons of environments that have them.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
from pathlib import Path

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from benchmarks.checkpoints import CONFIG, llama_tensors
from benchmarks.containers import RESHARD, Way, measure
from benchmarks.speed import run
from tests.programs.test_trainer_laws import save_fsdp, save_zero

RANKS = 4
TIMED = """
import sys, time
from {module} import {function}
begin = time.perf_counter()
{function}(*sys.argv[1:], {options})
print(time.perf_counter() - begin)
"""
ACCELERATE = TIMED.format(module="accelerate.utils", function="merge_fsdp_weights", options="")
ZERO = TIMED.format(
    module="deepspeed.utils.zero_to_fp32", function="convert_zero_checkpoint_to_fp32_state_dict",
    options="safe_serialization=True",
)  # fmt: skip


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=2.0)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()) / "reshard-benchmark-trainers")
    parser.add_argument("--deepspeed-python", help="the python of an environment with DeepSpeed")
    parser.add_argument("--verl-python", help="the python of an environment with verl")
    arguments = parser.parse_args()
    folder, out = arguments.folder, arguments.folder / "out"
    layers, config = max(1, round((arguments.gigabytes / 2 - 0.39) / 0.2013)), folder / "config"
    shutil.rmtree(folder, ignore_errors=True)
    config.mkdir(parents=True)
    (config / "config.json").write_text(json.dumps(CONFIG | {"num_hidden_layers": layers}))
    generator = torch.Generator().manual_seed(0)
    tensors = {name: torch.rand(shape, generator=generator) for name, _, shape in llama_tensors(layers)}
    save_zero(folder / "zero3", tensors, 3, RANKS)
    save_zero(folder / "zero1", tensors, 1, RANKS)
    save_fsdp(folder / "verl", tensors, (RANKS,), ("fsdp",))
    del tensors
    (folder / "verl" / "fsdp_config.json").write_text(json.dumps({"FSDP_version": 2, "world_size": RANKS}))
    words = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel({"a": 0}, unk_token="a")))
    words.save_pretrained(shutil.copytree(config, folder / "verl" / "huggingface"))  # verl's merger needs one
    merged, dcp = folder / "merged", folder / "dcp"
    run([*RESHARD, "merge", str(folder / "verl"), str(merged), "--config", str(config)])
    run([*RESHARD, "split", str(merged), str(dcp), "--as", "dcp"])
    ways = [
        Way(
            f"reshard merge, {name}", merged, [*RESHARD, "merge", str(folder / name), str(out), "--config", str(config)]
        )
        for name in ("zero3", "zero1", "verl", "dcp")
    ]
    ways.append(Way("accelerate's merge, dcp", merged, [sys.executable, "-c", ACCELERATE, str(dcp), str(out)]))
    if arguments.deepspeed_python:
        ways += [
            Way(f"zero_to_fp32, {name}", merged, [arguments.deepspeed_python, "-c", ZERO, str(folder / name), str(out)])
            for name in ("zero3", "zero1")
        ]
    if arguments.verl_python:
        merger = [arguments.verl_python, "-m", "verl.model_merger", "merge", "--backend", "fsdp"]
        ways.append(
            Way("verl's merger", merged, [*merger, "--local_dir", str(folder / "verl"), "--target_dir", str(out)])
        )
    measure(ways, out, arguments.rounds)
    shutil.rmtree(folder)


if __name__ == "__main__":
    main()
