#!/usr/bin/env python3
"""Let vLLM allocate and load quantized checkpoints on two ranks, and save what each rank holds before any processing.

    VLLM_PYTHON dump_quantized.py FOLDER DUMPS [--shards] [CASE ...]

FOLDER has a folder for each case (tests/programs/quantized.py). As `dump.py`, for many checkpoints, and without kernels: a
CPU build has none for most methods. Which kernel would run does not matter to what `create_weights` allocates, so the
functions that choose one are replaced by ones that choose nothing. For the same reason the checks of group sizes that
belong to one kernel (Marlin) are left out: the checkpoints are small. DUMPS gets a folder for each case: the files,
`source` as in FOLDER, `unset` with the names of what the loader never sets, or `refused` with the error. With
`--shards`, FOLDER has shards for two ranks, and `load_format` is `sharded_state`.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
import tempfile
import traceback
from pathlib import Path
from typing import Any

DEFAULTS = {
    "VLLM_TARGET_DEVICE": "cpu", "VLLM_LOGGING_LEVEL": "ERROR", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1",
    "GLOO_SOCKET_IFNAME": "lo", "VLLM_HOST_IP": "127.0.0.1", "OMP_NUM_THREADS": "1",
}
for _name, _value in DEFAULTS.items():
    os.environ.setdefault(_name, _value)
RANKS = 2


class NoKernel:
    """In the place of a kernel."""

    input_dtype = None

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def input_quant_key(self) -> None:
        pass


def without_kernels() -> None:
    """Replace what chooses kernels, before the modules that use it are imported."""
    import vllm.model_executor.kernels.linear as linear
    import vllm.model_executor.models.registry as registry

    registry._run_in_subprocess = lambda function: function()
    for name in ("init_fp8_linear_kernel", "init_int8_linear_kernel"):
        setattr(linear, name, NoKernel)
    linear.choose_mp_linear_kernel = lambda *_, **__: NoKernel
    import vllm.model_executor.layers.fused_moe.oracle.fp8 as fp8
    import vllm.model_executor.layers.fused_moe.oracle.int8 as int8
    import vllm.model_executor.layers.fused_moe.oracle.int_wna16 as wna16

    fp8.select_fp8_moe_backend = lambda *_, **__: (fp8.Fp8MoeBackend.TRITON, NoKernel)
    int8.select_int8_moe_backend = lambda *_, **__: (int8.Int8MoeBackend.TRITON, NoKernel)
    wna16.select_wna16_moe_backend = lambda *_, **__: (wna16.WNA16MoEBackend.MARLIN, NoKernel)
    import vllm.model_executor.layers.quantization.utils.marlin_utils as marlin

    for name in ("check_marlin_supported", "check_marlin_supports_layer", "check_moe_marlin_supports_layer",
                 "check_moe_marlin_supports_config"):
        setattr(marlin, name, lambda *_, **__: True)
    marlin.verify_marlin_supported = lambda *_, **__: None


def dump_rank(rank: int, case: Path, out: Path, dtype: str, rendezvous: str, form: str) -> None:
    """Be one rank: build, load and save this rank's part of the model."""
    import torch
    from vllm.config import (CacheConfig, DeviceConfig, LoadConfig, ModelConfig, ParallelConfig, VllmConfig,
                             set_current_vllm_config)
    from vllm.distributed import init_distributed_environment, initialize_model_parallel
    from vllm.model_executor.model_loader import get_model_loader
    from vllm.model_executor.model_loader.sharded_state_loader import ShardedStateLoader
    from vllm.utils.torch_utils import set_default_torch_dtype

    torch.set_num_threads(1)
    model_config = ModelConfig(model=str(case), tokenizer=str(case), skip_tokenizer_init=True, dtype=dtype,
                               max_model_len=64, enforce_eager=True)
    parallel_config = ParallelConfig(tensor_parallel_size=RANKS, distributed_executor_backend="mp")
    parallel_config.rank = rank
    load_config = LoadConfig(load_format=form, use_tqdm_on_load=False)
    vllm_config = VllmConfig(model_config=model_config, parallel_config=parallel_config, load_config=load_config,
                             device_config=DeviceConfig(device="cpu"), cache_config=CacheConfig(block_size=32))
    with set_current_vllm_config(vllm_config):
        init_distributed_environment(RANKS, rank, rendezvous, local_rank=rank, backend="gloo")
        initialize_model_parallel(RANKS, 1)
        loader = get_model_loader(load_config)
        with set_default_torch_dtype(model_config.dtype), torch.device("cpu"):
            model = loader.create_model(vllm_config=vllm_config, model_config=model_config)
        untouched = {}
        for name, parameter in model.named_parameters():
            if parameter.numel() > 8:
                parameter.data.view(torch.uint8).fill_(0x7F) if parameter.dim() else None
                untouched[name] = parameter.data.clone()
        loader.load_weights(model, model_config)
        after = dict(model.named_parameters())
        unset = [name for name, before in untouched.items() if name in after and after[name].shape == before.shape
                 and bytes(before.view(torch.uint8).numpy()) == bytes(after[name].data.view(torch.uint8).numpy())]
        if rank == 0:
            (out / "unset").write_text("\n".join(unset))
        ShardedStateLoader.save_model(model, str(out))
        torch.distributed.barrier()


def dump(case: Path, out: Path, form: str) -> str | None:
    """Run all ranks; the error of the first that failed."""
    import json

    out.mkdir(parents=True)
    dtype = json.loads((case / "config.json").read_text())["dtype"]
    rendezvous = "file://" + tempfile.mktemp(prefix="vllm-dump-")
    os.environ["VLLM_DIST_IDENT"] = f"{os.getpid()}{abs(hash(case.name)) % 10**8}"
    children = []
    for rank in range(RANKS):
        child = os.fork()
        if child == 0:
            log = os.open(out / f"log-{rank}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(log, 1)
            os.dup2(log, 2)
            status = 1
            try:
                dump_rank(rank, case, out, dtype, rendezvous, form)
                status = 0
            except BaseException:
                traceback.print_exc()
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)
        children.append(child)
    good = True
    while children:
        child, status = os.wait()
        children.remove(child)
        if status and good:
            good = False
            for other in children:
                os.kill(other, 9)
    said = "\n".join((out / f"log-{rank}").read_text() for rank in range(RANKS))
    for rank in range(RANKS):
        (out / f"log-{rank}").unlink()
    if good:
        return None
    errors = re.findall(r"^\w[\w.]*(?:Error|Exception)(?:: .*)?$", said, re.MULTILINE)
    return errors[0] if errors else said[-500:]


def main() -> None:
    folder, dumps, *cases = sys.argv[1:]
    form = "sharded_state" if "--shards" in cases else "safetensors"
    cases = [case for case in cases if case != "--shards"]
    without_kernels()
    import vllm.config  # noqa: F401  imported once, before the fork
    import vllm.model_executor.model_loader  # noqa: F401

    for case in sorted(Path(folder).iterdir()):
        out = Path(dumps) / case.name
        if (cases and case.name not in cases) or (not cases and (out / "source").exists()):
            continue
        shutil.rmtree(out, ignore_errors=True)
        error = dump(case, out, form)
        if error is not None:
            for file in out.glob("*.safetensors"):
                file.unlink()
            (out / "refused").write_text(error + "\n")
        (out / "source").write_text((case / "source").read_text() if (case / "source").exists() else "")
        print(case.name, error or "", flush=True)


if __name__ == "__main__":
    main()
