"""vLLM, on a CPU: its model of a rank, and its own loaders. Tried with 0.32.

A rank is a few numbers in vLLM's groups, which here have nobody to talk to. Its model is built where memory is reserved
and not touched. Which kernel would run does not matter to what is allocated and loaded, so what chooses one is replaced
where this machine has none: the choice of experts' backends and of quantized layers' kernels.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from importlib import import_module
from typing import Any

import torch

from reshard.verify.loader.chunks import mapped
from reshard.verify.loader.program import ProgramRank, Request, held
from reshard.verify.loader.watch import Creation

_SETTINGS = {
    "VLLM_TARGET_DEVICE": "cpu", "VLLM_LOGGING_LEVEL": "ERROR", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1",
    "VLLM_HOST_IP": "127.0.0.1", "OMP_NUM_THREADS": "1",
}  # fmt: skip
_GROUPS = {
    "tp": ("_WORLD", "_TP", "_ETP", "_EP", "_EPLB"), "pp": ("_PP",), "one": ("_DP", "_DCP", "_PCP", "_INNER_DP_WORLD"),
}  # fmt: skip
"""vLLM's groups, by the degree that they have."""


class _NoKernel:
    """In the place of a kernel."""

    input_dtype = None

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def input_quant_key(self) -> None:
        pass


class _Nobody:
    """In the place of a process group: it knows how many there are, and reaches none."""

    def __init__(self, index: int, size: int) -> None:
        self.rank, self.size = lambda: index, lambda: size


def prepare(request: Request) -> str:
    """Import vLLM, and replace its functions that choose kernels."""
    for name, value in _SETTINGS.items():
        os.environ.setdefault(name, value)
    os.environ["VLLM_CACHE_ROOT"] = request.scratch  # answers of another version may be in the user's own
    import vllm

    _replace("models.registry", "_run_in_subprocess", lambda function: function())
    _replace("kernels.linear", "init_fp8_linear_kernel", _NoKernel)
    _replace("kernels.linear", "init_int8_linear_kernel", _NoKernel)
    _replace("kernels.linear", "choose_mp_linear_kernel", lambda *_, **__: _NoKernel)
    for kind, backends, backend in (
        ("unquantized", "UnquantizedMoeBackend", "TRITON"), ("fp8", "Fp8MoeBackend", "TRITON"),
        ("int8", "Int8MoeBackend", "TRITON"), ("int_wna16", "WNA16MoEBackend", "MARLIN"),
    ):  # fmt: skip
        with suppress(ImportError, AttributeError):
            oracle = import_module(f"vllm.model_executor.layers.fused_moe.oracle.{kind}")
            chosen = getattr(getattr(oracle, backends), backend), _NoKernel
            name = f"select_{kind.removeprefix('int_')}_moe_backend"
            _replace(f"layers.fused_moe.oracle.{kind}", name, lambda *_, chosen=chosen, **__: chosen)
            _replace(f"layers.fused_moe.{kind}_fused_moe_method", name, lambda *_, chosen=chosen, **__: chosen)
    marlin = "layers.quantization.utils.marlin_utils"
    for name in ("supported", "supports_layer"):
        _replace(marlin, f"check_marlin_{name}", lambda *_, **__: True)
    for name in ("supports_layer", "supports_config"):
        _replace(marlin, f"check_moe_marlin_{name}", lambda *_, **__: True)
    _replace(marlin, "verify_marlin_supported", lambda *_, **__: None)
    return f"vLLM {vllm.__version__}"


def _replace(module: str, name: str, value: Any) -> None:
    """Replace a name of a module of vLLM's, if this version has both: without it vLLM says what it lacks."""
    with suppress(ImportError):
        found = import_module(f"vllm.model_executor.{module}")
        if hasattr(found, name):
            setattr(found, name, value)


def ranks(request: Request) -> Iterator[ProgramRank]:
    """Each rank of each stage, in the order of its files."""
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader import get_model_loader
    from vllm.model_executor.model_loader.sharded_state_loader import ShardedStateLoader
    from vllm.utils.torch_utils import set_default_torch_dtype

    torch.set_num_threads(1)
    for stage in range(request.pp):
        for rank in range(request.tp):
            _be(rank, request.tp, stage, request.pp)
            config = _config(request, rank, stage)
            loader, model_config, reserved = get_model_loader(config.load_config), config.model_config, Creation()
            with set_current_vllm_config(config):
                with set_default_torch_dtype(model_config.dtype), torch.device("cpu"), reserved:
                    model: Any = loader.create_model(vllm_config=config, model_config=model_config)
                name = f"rank {rank}" if request.pp == 1 else f"rank {rank} of stage {stage}"
                load = partial(loader.load_weights, model, model_config)
                files = mapped(request.shards, ShardedStateLoader._render_default_pattern(part="*"))
                yield ProgramRank(name, partial(held, model, ShardedStateLoader), files, load, reserved, model=model)
            del model, load, loader, reserved, config  # modules refer to each other: two ranks would be in memory
            gc.collect()


def _config(request: Request, rank: int, stage: int) -> Any:
    from vllm.config import CacheConfig, DeviceConfig, LoadConfig, ModelConfig, ParallelConfig, VllmConfig

    parallel = ParallelConfig(
        tensor_parallel_size=request.tp, pipeline_parallel_size=request.pp, enable_expert_parallel=request.ep > 1,
        distributed_executor_backend="mp",
    )  # fmt: skip
    parallel.rank = stage * request.tp + rank
    model = ModelConfig(
        model=request.original, tokenizer=request.original, skip_tokenizer_init=True, dtype=request.dtype or "auto",
        max_model_len=16, enforce_eager=True,
    )  # fmt: skip
    return VllmConfig(
        model_config=model, parallel_config=parallel, device_config=DeviceConfig(device="cpu"),
        load_config=LoadConfig(load_format="safetensors", use_tqdm_on_load=False),
        cache_config=CacheConfig(block_size=32),
    )  # fmt: skip


def _be(rank: int, tp: int, stage: int, pp: int) -> None:
    """Make this process a rank of vLLM's."""
    import vllm.distributed.parallel_state as state

    def group(index: int, size: int) -> Any:
        found = object.__new__(state.GroupCoordinator)
        vars(found).update(
            rank=index, rank_in_group=index, local_rank=index, device_index=index, world_size=size,
            ranks=[*range(size)], cpu_group=_Nobody(index, size), device_group=_Nobody(index, size),
            device=torch.device("cpu"), device_communicator=None, unique_name="none", use_device_communicator=False,
            mq_broadcaster=None, use_custom_op_call=False, use_cpu_custom_send_recv=False, group_ranks=[[*range(size)]],
            torch_distributed_backend="gloo",
        )  # fmt: skip
        return found

    for degree, (index, size) in {"tp": (rank, tp), "pp": (stage, pp), "one": (0, 1)}.items():
        for name in _GROUPS[degree]:
            setattr(state, name, group(index, size))
    state._NODE_COUNT = 1
