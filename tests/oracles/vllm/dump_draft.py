#!/usr/bin/env python3
"""Record what vLLM holds of draft models on each of two ranks, into drafts.json.

    VLLM_TARGET_DEVICE=cpu python dump_draft.py [NAME ...]

`drafts.json` has for each draft its `method`, the `config` and the shapes of the `tensors`, and the model that it drafts
for (`target`; none: the same folder). This script makes the folders, lets vLLM build and load the draft, and writes
`ranks`: for each parameter its shape and runs `[first, count]` of the checkpoint's elements. These are numbered from 1
on, through all tensors in the order of their names; 0 stands for zeros, -1 for what vLLM has not set. `d2t` has the
numbers 0, 1, ... in it, and its elements are recorded as these.

vLLM's own code creates the model and loads the weights, one process a rank, gloo in between; the model is never run.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import traceback
from pathlib import Path

SETTINGS = {
    "VLLM_TARGET_DEVICE": "cpu", "VLLM_LOGGING_LEVEL": "ERROR", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1",
    "GLOO_SOCKET_IFNAME": "lo", "VLLM_HOST_IP": "127.0.0.1", "OMP_NUM_THREADS": "1",
}  # fmt: skip
FIXTURE = Path(__file__).with_name("drafts.json")
RANKS = 2


def make(folder: Path, config: dict, shapes: dict) -> Path:
    """A checkpoint of which each element is a number of its own."""
    import torch
    from safetensors.torch import save_file

    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    tensors, first = {}, 1
    for name in sorted(shapes):
        count = torch.Size(shapes[name]).numel()
        if name in ("d2t", "t2d"):
            tensors[name] = torch.arange(count) if name == "d2t" else torch.arange(count) < shapes["d2t"][0]
        else:
            tensors[name] = torch.arange(first, first + count, dtype=torch.float32).view(shapes[name])
        first += count
    assert first < 1 << 24  # float32 has them exactly
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


def runs(tensor) -> list[list[int]]:
    """The elements in row-major order as runs of consecutive numbers, of zeros, or of what was not set."""
    found: list[list[int]] = []
    for value in tensor.double().nan_to_num(-1).flatten().long().tolist():
        if found and value == found[-1][0] + (found[-1][1] if found[-1][0] > 0 else 0):
            found[-1][1] += 1
        else:
            found.append([value, 1])
    return found


def dump_rank(rank: int, draft: dict, folder: Path, rendezvous: str) -> None:
    """Be one rank: build and load this rank's part of the draft, and write its parameters."""
    import torch
    from vllm.config import (CacheConfig, DeviceConfig, LoadConfig, ModelConfig, ParallelConfig, SpeculativeConfig,
                             VllmConfig, set_current_vllm_config)
    from vllm.distributed import init_distributed_environment, initialize_model_parallel
    from vllm.model_executor.model_loader import get_model_loader
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.utils.torch_utils import set_default_torch_dtype

    torch.set_num_threads(1)
    own, target = str(folder / "draft"), str(folder / ("target" if draft["target"] else "draft"))
    model_config = ModelConfig(model=target, tokenizer=target, skip_tokenizer_init=True, dtype="float32",
                               max_model_len=64, enforce_eager=True)
    parallel_config = ParallelConfig(tensor_parallel_size=RANKS, distributed_executor_backend="mp")
    parallel_config.rank = rank
    speculative = SpeculativeConfig(method=draft["method"], model=own, num_speculative_tokens=draft["guesses"],
                                    target_model_config=model_config, target_parallel_config=parallel_config,
                                    draft_tensor_parallel_size=RANKS)
    load_config = LoadConfig(load_format="safetensors", use_tqdm_on_load=False)
    vllm_config = VllmConfig(model_config=model_config, parallel_config=parallel_config, load_config=load_config,
                             device_config=DeviceConfig(device="cpu"), cache_config=CacheConfig(block_size=32),
                             speculative_config=speculative)
    with set_current_vllm_config(vllm_config):
        init_distributed_environment(RANKS, rank, rendezvous, local_rank=rank, backend="gloo")
        initialize_model_parallel(RANKS, 1)
        with set_default_torch_dtype(torch.float32), torch.device("cpu"):
            model = initialize_model(vllm_config=vllm_config, model_config=speculative.draft_model_config)
        for parameter in model.parameters():
            if parameter.is_floating_point():
                parameter.data.fill_(float("nan"))
        get_model_loader(load_config).load_weights(model, speculative.draft_model_config)
        held = {name: {"shape": list(each.shape), "runs": runs(each.detach())} for name, each in model.named_parameters()}
        (folder / f"{rank}.json").write_text(json.dumps(held))
        torch.distributed.barrier()


def record(draft: dict) -> list[dict] | None:
    """What each rank holds; None if vLLM failed."""
    with tempfile.TemporaryDirectory(prefix="vllm-draft-") as text:
        folder = Path(text)
        make(folder / "draft", draft["config"], draft["tensors"])
        if draft["target"]:
            make(folder / "target", draft["target"], {})
        children = []
        for rank in range(RANKS):
            child = os.fork()
            if child == 0:
                status = 1
                try:
                    dump_rank(rank, draft, folder, f"file://{folder}/meet")
                    status = 0
                except BaseException:
                    traceback.print_exc()
                sys.stderr.flush()
                os._exit(status)
            children.append(child)
        if any([os.waitpid(child, 0)[1] for child in children]):
            return None
        return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(RANKS)]


def main() -> None:
    os.environ.update(SETTINGS | os.environ)
    import vllm.config  # noqa: F401  imported once, before the fork
    import vllm.model_executor.model_loader  # noqa: F401

    drafts = json.loads(FIXTURE.read_text())
    for name in sys.argv[1:] or drafts:
        found = record(drafts[name])
        print(name, "failed" if found is None else "recorded", flush=True)
        if found is not None:
            drafts[name]["ranks"] = found
    lines = ",\n".join(f"{json.dumps(name)}: {json.dumps(draft, separators=(',', ':'))}" for name, draft in drafts.items())
    FIXTURE.write_text(f"{{\n{lines}\n}}\n")


if __name__ == "__main__":
    main()
