#!/usr/bin/env python3
"""Let vLLM build and load checkpoints of many model types, and save what each rank holds before any processing.

    VLLM_PYTHON observe.py FOLDER DUMPS [--tp 1,2,4] [--part K/N] [CASE ...]

FOLDER is that of `python -m tools.engine_names make`. As `dump_quantized.py`: no kernels, one process a rank, gloo in
between. DUMPS gets a folder for each case: `built.json`, the module that vLLM took and the dtype and shape of each of
its tensors in a bfloat16 model; `tp1`, `tp2`, `tp4`, the files of the ranks of a float32 model, in which what vLLM's
loader leaves untouched is NaN; `done`, what failed and how. What is done is not done again; cases that are named are.
`registry.json` has vLLM's version and its module for each class of Hugging Face's.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import re
import shutil
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

import dump_quantized  # sets the environment

LONGEST = 16
"""Tokens: some small models know no more positions."""
PATIENCE = 300.0
"""Seconds for one model on one mesh."""


class AnyPlatform:
    """In the place of the platform, where it is asked whether it has a kernel."""

    def __getattr__(self, name: str) -> object:
        from vllm.platforms import current_platform

        return (lambda *_: True) if name == "is_cuda_alike" else getattr(current_platform, name)


def prepare() -> None:
    """Replace what chooses kernels, and what asks for processors of images and sounds."""
    import torch

    if importlib.util.find_spec("torchvision"):  # its operators are not in a build for a GPU without one
        for name in ("nms", "qnms"):
            torch.library.define(f"torchvision::{name}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    dump_quantized.without_kernels()
    import vllm.config
    import vllm.model_executor.layers.fused_moe.layer
    import vllm.model_executor.layers.fused_moe.oracle.unquantized as oracle
    import vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method as method
    import vllm.model_executor.model_loader
    import vllm.model_executor.models.transformers  # noqa: F401  imported once, before the fork
    from vllm.config.model import ModelConfig

    def select(*_: object, **__: object) -> object:
        return oracle.UnquantizedMoeBackend.TRITON, dump_quantized.NoKernel

    import vllm.model_executor.layers.fused_moe.config as moe
    from vllm.platforms import current_platform
    from vllm.triton_utils import triton

    triton.set_allocator = lambda *_: None
    moe.current_platform = AnyPlatform()
    choose = type(current_platform).get_attn_backend_cls

    def choose_dense(_: object, selected_backend: object, attn_selector_config: Any, num_heads: object = None) -> str:
        return choose(selected_backend, attn_selector_config._replace(use_sparse=False), num_heads)

    type(current_platform).get_attn_backend_cls = classmethod(choose_dense)
    oracle.select_unquantized_moe_backend = method.select_unquantized_moe_backend = select
    supports = ModelConfig._supports_multimodal_inputs

    def supports_inputs(config: ModelConfig) -> bool:
        try:
            return supports(config)
        except Exception:  # the checkpoint has no processor
            return True

    ModelConfig._supports_multimodal_inputs = supports_inputs


def be_rank(rank: int, tp: int, case: Path, out: Path, dtype: str, rendezvous: str, load: bool) -> None:
    """Be one rank: build the model and, with ``load``, load and save this rank's part of it."""
    import torch
    from vllm.config import (CacheConfig, DeviceConfig, LoadConfig, ModelConfig, ParallelConfig, VllmConfig,
                             set_current_vllm_config)
    from vllm.distributed import init_distributed_environment, initialize_model_parallel
    from vllm.model_executor.model_loader import get_model_loader
    from vllm.model_executor.model_loader.sharded_state_loader import ShardedStateLoader
    from vllm.utils.torch_utils import set_default_torch_dtype

    torch.set_num_threads(1)
    model_config = ModelConfig(model=str(case), tokenizer=str(case), skip_tokenizer_init=True, dtype=dtype,
                               max_model_len=LONGEST, enforce_eager=True)
    parallel_config = ParallelConfig(tensor_parallel_size=tp, distributed_executor_backend="mp")
    parallel_config.rank = rank
    load_config = LoadConfig(load_format="safetensors", use_tqdm_on_load=False)
    vllm_config = VllmConfig(model_config=model_config, parallel_config=parallel_config, load_config=load_config,
                             device_config=DeviceConfig(device="cpu"), cache_config=CacheConfig(block_size=32))
    with set_current_vllm_config(vllm_config):
        init_distributed_environment(tp, rank, rendezvous, local_rank=rank, backend="gloo")
        initialize_model_parallel(tp, 1)
        loader = get_model_loader(load_config)
        with set_default_torch_dtype(model_config.dtype), torch.device("cpu"):
            model = loader.create_model(vllm_config=vllm_config, model_config=model_config)
        if not load:
            held = ShardedStateLoader._filter_subtensors(model.state_dict())
            tensors = {name: [str(t.dtype).removeprefix("torch."), list(t.shape)] for name, t in held.items()}
            module = f"{type(model).__module__.removeprefix('vllm.model_executor.models.')}:{type(model).__qualname__}"
            (out / "built.json").write_text(json.dumps({"module": module, "tensors": tensors}))
            return
        for parameter in model.parameters():
            if parameter.is_floating_point():
                parameter.data.fill_(float("nan"))
        loader.load_weights(model, model_config)
        ShardedStateLoader.save_model(model, str(out))
        torch.distributed.barrier()


def run(case: Path, out: Path, tp: int, dtype: str, load: bool) -> str | None:
    """Run all ranks; the error of the first that failed."""
    out.mkdir(parents=True, exist_ok=True)
    rendezvous = "file://" + tempfile.mktemp(prefix="vllm-observe-")
    os.environ["VLLM_DIST_IDENT"] = f"{os.getpid()}{abs(hash(case.name)) % 10**8}{tp}"
    children = []
    for rank in range(tp):
        child = os.fork()
        if child == 0:
            log = os.open(out / f"log-{rank}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(log, 1)
            os.dup2(log, 2)
            status = 1
            try:
                be_rank(rank, tp, case, out, dtype, rendezvous, load)
                status = 0
            except BaseException:
                traceback.print_exc()
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)
        children.append(child)
    good, end = True, time.monotonic() + PATIENCE
    while children:
        child, status = os.waitpid(-1, os.WNOHANG)
        if child:
            children.remove(child)
        if (child and status and good) or (good and time.monotonic() > end):
            good = False
            for other in children:
                os.kill(other, 9)
        time.sleep(0.0 if child else 0.02)
    said = "\n".join((out / f"log-{rank}").read_text() for rank in range(tp))
    for rank in range(tp):
        (out / f"log-{rank}").unlink()
    if good:
        return None
    (out / "said").write_text(said)
    explained = re.findall(r"^\s+Value error, (.*?)(?: \[type=.*)?$", said, re.MULTILINE)
    errors = re.findall(r"^[\w.]*(?:Error|Exception)(?:: .*)?$", said, re.MULTILINE)
    return (explained or errors or ["no error was printed"])[0].partition(" Supported architectures")[0]


def observe(case: Path, out: Path, degrees: list[int]) -> dict[str, str]:
    """What failed, of building one model and loading it at each degree."""
    shutil.rmtree(out, ignore_errors=True)
    steps = [("built", 1, "bfloat16", False), *((f"tp{tp}", tp, "float32", True) for tp in degrees)]
    failed: dict[str, str] = {}
    for name, tp, dtype, load in steps:
        error = run(case, out / name if load else out, tp, dtype, load)
        if error is not None:
            failed[name] = error
            if name in {"built", "tp1"}:
                break
    return failed


def registry() -> dict[str, object]:
    """vLLM's version, and its module for each class of Hugging Face's."""
    import vllm
    from vllm.model_executor.models.registry import ModelRegistry

    modules = {
        name: f"{model.module_name.removeprefix('vllm.model_executor.models.')}:{model.class_name}"
        for name, model in ModelRegistry.models.items()
    }
    return {"version": vllm.__version__, "modules": modules}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("dumps", type=Path)
    parser.add_argument("--tp", default="1,2,4")
    parser.add_argument("--part", default="0/1", help="K/N: the cases K, K + N, K + 2 N, ...")
    parser.add_argument("cases", nargs="*")
    arguments = parser.parse_args()
    first, step = map(int, arguments.part.split("/"))
    degrees = [int(tp) for tp in arguments.tp.split(",")]
    prepare()
    arguments.dumps.mkdir(parents=True, exist_ok=True)
    (arguments.dumps / "registry.json").write_text(json.dumps(registry()))
    for case in sorted(path for path in arguments.folder.iterdir() if path.is_dir())[first::step]:
        out = arguments.dumps / case.name
        if (case.name not in arguments.cases) if arguments.cases else (out / "done").exists():
            continue
        started = time.monotonic()
        failed = observe(case, out, degrees)
        (out / "done").write_text(json.dumps(failed))
        print(f"{case.name} {time.monotonic() - started:.1f} s {failed or ''}".rstrip(), flush=True)


if __name__ == "__main__":
    main()
