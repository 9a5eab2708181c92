"""Asks vLLM's own loaders where they put each element, on a CPU, without weights and without an engine.

    python -m reshard.live.vllm_check SOURCE CONFIG RANK MEETING vllm:tp2

is one rank. vLLM builds its model on each rank, so that each has its own part; nothing is loaded or run.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from reshard.formats.documents import json_bytes
from reshard.formats.errors import LiveError
from reshard.formats.files.checkpoint import CONFIG
from reshard.live.meshes import Target, arranged, target_of
from reshard.source.access import Access
from reshard.store.selection import Weights
from reshard.transforms.opening import open_any

if TYPE_CHECKING:
    import torch

SETTINGS = {
    "VLLM_TARGET_DEVICE": "cpu", "VLLM_LOGGING_LEVEL": "ERROR", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1",
    "GLOO_SOCKET_IFNAME": "lo", "VLLM_HOST_IP": "127.0.0.1", "OMP_NUM_THREADS": "1",
}  # fmt: skip
ANSWER = "reshard's answer: "
"""The mark before the line with a rank's result: vLLM prints lines of its own."""


def check(source: str | Path, target: Target, *, python: str = sys.executable, timeout: float = 600.0) -> list[str]:
    """Compare vLLM's loaders with our rules: one line for each tensor of a rank that differs, none if they agree.

    ``source`` is a checkpoint in Hugging Face's form, of which only headers are read; ``target`` has ranks of tp, and
    experts are divided over all of them or none. ``python`` has vLLM and reshard. Raises LiveError if a rank cannot
    build the model, or its loader cannot be followed; ReshardError.
    """
    opened = open_any(source, Access(), Weights.HEADERS)
    arranged(opened.model, target)  # refuses what the rules refuse
    with tempfile.TemporaryDirectory(prefix="reshard-check-") as folder:
        config = opened.path if isinstance(opened.path, Path) else Path(folder)
        if config == Path(folder):
            (config / CONFIG).write_bytes(json_bytes(opened.read_config()))
        place = str(config.resolve()) if isinstance(opened.path, Path) else str(source)
        command = [python, "-m", "reshard.live.vllm_check", place, str(config.resolve())]
        ident = f"reshard{os.getpid()}{Path(folder).name[-8:]}"  # of vLLM's shared memory
        further = [f"file://{folder}/meeting", str(target)]
        ranks = [
            subprocess.Popen(
                [*command, str(rank), *further], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                errors="replace", env={**os.environ, **SETTINGS, "VLLM_DIST_IDENT": ident},
            )
            for rank in range(target.tp)
        ]  # fmt: skip
        try:
            outputs = [rank.communicate(timeout=timeout)[0] for rank in ranks]
        except subprocess.TimeoutExpired:
            raise LiveError(f"vLLM has not built {source} within {timeout:.0f} s") from None
        finally:
            for rank in ranks:
                rank.kill()
                rank.wait()
            for leftover in Path("/dev/shm").glob(f"*{ident}*"):
                leftover.unlink(missing_ok=True)
    return [line for rank, text in enumerate(outputs) for line in _answer(rank, text)]


def _answer(rank: int, output: str) -> Sequence[str]:
    lines = output.strip().splitlines()
    for line in lines:
        if line.startswith(ANSWER):
            answer: list[str] = json.loads(line.removeprefix(ANSWER))
            return answer
    last = [line for line in lines if "Error" in line] or lines or ["it said nothing"]
    lacks = "No module named" in output
    hint = "give the Python of an environment that has vLLM and reshard with --engine-python" if lacks else None
    raise LiveError(f"rank {rank} of the check ended early: {last[-1]}", hint)


def built(path: str, rank: int, meeting: str, target: Target, dtype: torch.dtype) -> torch.nn.Module:
    """This rank's part of vLLM's model, before loading. The process is a rank of vLLM's from then on."""
    import torch
    from vllm.config import (
        CacheConfig,
        DeviceConfig,
        LoadConfig,
        ModelConfig,
        ParallelConfig,
        VllmConfig,
        set_current_vllm_config,
    )  # fmt: skip
    from vllm.distributed import init_distributed_environment, initialize_model_parallel
    from vllm.model_executor.model_loader import get_model_loader
    from vllm.utils.torch_utils import set_default_torch_dtype

    torch.set_num_threads(1)
    model_config = ModelConfig(
        model=path, tokenizer=path, skip_tokenizer_init=True, dtype=dtype, max_model_len=64, enforce_eager=True
    )
    parallel = ParallelConfig(
        tensor_parallel_size=target.tp, enable_expert_parallel=target.ep > 1, distributed_executor_backend="mp"
    )
    parallel.rank = rank
    load = LoadConfig(load_format="safetensors", use_tqdm_on_load=False)
    config = VllmConfig(
        model_config=model_config, parallel_config=parallel, load_config=load,
        device_config=DeviceConfig(device="cpu"), cache_config=CacheConfig(block_size=32),
    )  # fmt: skip
    with set_current_vllm_config(config):
        init_distributed_environment(target.tp, rank, meeting, local_rank=rank, backend="gloo")
        initialize_model_parallel(target.tp, 1)
        with set_default_torch_dtype(model_config.dtype), torch.device("cpu"):
            model: torch.nn.Module = get_model_loader(load).create_model(vllm_config=config, model_config=model_config)
    return model


def main() -> None:
    """Be one rank: print how vLLM's loader and our rules differ on it. The config.json is in the folder CONFIG."""
    from reshard.formats.files.safetensors import stated_dtype
    from reshard.formats.torch_internals import TORCH_DTYPES
    from reshard.live.witness import compare, probed, recorded, unlike

    source, config, number, meeting, goal = sys.argv[1:]
    rank, target = int(number), target_of(goal)
    arrangement = arranged(open_any(source, Access(), Weights.HEADERS).model, target)
    tensors = {tensor.name: (tensor.dtype, tensor.shape) for tensor in arrangement.plan.model.tensors}
    dtype = TORCH_DTYPES[stated_dtype(arrangement.plan.model.config) or "BF16"]  # vLLM would have BF16 in place of F32
    model: Any = built(config, rank, meeting, target, dtype)
    loaded = recorded(model, model.load_weights, tensors)
    lines = compare(arrangement, rank, model, loaded)
    for name in unlike(loaded, probed(model, model.load_weights, tensors)):
        lines.append(f"rank {rank}: '{name}': the index probe differs from the recorder")
    print(ANSWER + json.dumps(lines), flush=True)
    os._exit(0)  # vLLM's process groups need no orderly end


if __name__ == "__main__":
    main()
