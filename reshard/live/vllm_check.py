"""Asks vLLM's own loader where it puts each element, on a CPU, without weights and without an engine.

    python -m reshard.live.vllm_check SOURCE CONFIG vllm:tp2

is one process of vLLM's Python, which is each rank in turn. vLLM builds its model as that rank, so that it has the
rank's part; nothing is loaded or run.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from reshard.formats.documents import json_bytes
from reshard.formats.errors import LiveError
from reshard.formats.files.checkpoint import CONFIG
from reshard.formats.files.safetensors import DTYPE_NAMES, stated_dtype
from reshard.live.meshes import Target, arranged, target_of
from reshard.source.access import Access
from reshard.store.selection import Weights
from reshard.transforms.opening import open_any
from reshard.verify.ending import run_program, temporary_folder
from reshard.verify.loader.ask import python_of

ANSWER = "reshard's answer: "
"""The mark before the line with the result: vLLM prints lines of its own."""


def check(source: str | Path, target: Target, *, python: str = sys.executable, timeout: float = 600.0) -> list[str]:
    """Compare vLLM's loader with our rules: one line for each tensor of a rank that differs, none if they agree.

    ``source`` is a checkpoint in Hugging Face's form, of which only headers are read; ``target`` has ranks of tp, and
    experts are divided over all of them or none. ``python`` has vLLM and reshard. Raises LiveError if vLLM cannot build
    the model, or its loader cannot be followed; ReshardError.
    """
    opened = open_any(source, Access(), Weights.HEADERS)
    arranged(opened.model, target)  # refuses what the rules refuse
    with temporary_folder("reshard-check-") as folder:
        place, config = str(source), folder
        if isinstance(opened.path, Path):
            place = str(config := opened.path.resolve())
        else:
            (config / CONFIG).write_bytes(json_bytes(opened.read_config()))
        command = [python_of(python), "-m", "reshard.live.vllm_check", place, str(config), str(target)]
        return _answer(run_program(command, "vLLM's loader", timeout, folder)[1])


def _answer(output: str) -> list[str]:
    lines = output.strip().splitlines()
    said = next((line.removeprefix(ANSWER) for line in lines if line.startswith(ANSWER)), None)
    if said is not None:
        ranks, stopped = json.loads(said)
    else:
        stopped = f"the check ended early: {([line for line in lines if 'Error' in line] or lines or ['no word'])[-1]}"
    if stopped is not None:
        hint = "give the Python of an environment that has vLLM and reshard with --engine-python"
        raise LiveError(stopped, hint if "No module named" in stopped else None)
    return [line for lines in ranks for line in lines]


def main() -> None:
    """Print how vLLM's loader and our rules differ, as each rank. The config.json is in the folder CONFIG."""
    from reshard.live.witness import compare, probed, recorded, unlike
    from reshard.verify.loader.program import ProgramRank, Request
    from reshard.verify.loader.witness import answer

    source, config, goal = sys.argv[1:]
    target, own = target_of(goal), str(Path.cwd())
    arrangement = arranged(open_any(source, Access(), Weights.HEADERS).model, target)
    tensors = {tensor.name: (tensor.dtype, tensor.shape) for tensor in arrangement.plan.model.tensors}
    dtype = DTYPE_NAMES[stated_dtype(arrangement.plan.model.config) or "BF16"]  # vLLM would have BF16 in place of F32

    def ask(rank: ProgramRank) -> list[str]:
        number, model = int(rank.name.removeprefix("rank ")), rank.model
        loaded = recorded(model, model.load_weights, tensors)
        again = unlike(loaded, probed(model, model.load_weights, tensors))
        lines = [f"rank {number}: '{name}': the index probe differs from the recorder" for name in again]
        return [*compare(arrangement, number, model, loaded), *lines]

    found = answer(Request("vllm", config, own, own, dtype, tp=target.tp, ep=target.ep), ask)
    print(ANSWER + json.dumps([found["ranks"], found["stopped"]]), flush=True)


if __name__ == "__main__":
    main()
