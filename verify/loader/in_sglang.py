"""SGLang, on a CPU: its model of a rank, and its own loaders. Tried with 0.5.23, whose wheel for GPUs serves.

A rank is one of torch's fake process groups, which reach nobody: all ranks are played in this process, one after the
other. The kernels that SGLang imports are not there, and not asked for while it builds and loads a model.
"""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Iterator
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch

from reshard.verify.loader.absent import Absent
from reshard.verify.loader.chunks import mapped
from reshard.verify.loader.program import ProgramRank, Request, held
from reshard.verify.loader.watch import Creation

_SETTINGS = {
    "SGLANG_USE_CPU_ENGINE": "1", "SGLANG_USE_MESSAGE_QUEUE_BROADCASTER": "0", "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
}  # fmt: skip
_KERNELS = ("sgl_kernel", "flashinfer")
_RANKS = {"tp": ("tp_rank", "attn_tp_rank", "moe_tp_rank"),
          "one": ("pp_rank", "attn_cp_rank", "attn_dp_rank", "moe_ep_rank", "moe_dp_rank")}  # fmt: skip
"""SGLang's names of a rank's places, by the degree of their groups."""


class _Nothing:
    """In the place of whatever a package of kernels has."""

    def __call__(self, *_: Any, **__: Any) -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Nothing()


def prepare(request: Request) -> str:
    """Import SGLang, without its kernels where they are not installed."""
    for name, value in _SETTINGS.items():
        os.environ.setdefault(name, value)
    if any(find_spec(name) is None for name in _KERNELS):
        sys.meta_path.append(Absent(lambda name: name.partition(".")[0] in _KERNELS, lambda *_: _Nothing()))
    import sglang

    return f"SGLang {sglang.__version__}"


def ranks(request: Request) -> Iterator[ProgramRank]:
    """Each rank, in the order of its files."""
    from sglang.srt.configs.load_config import LoadConfig
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.model_loader import loader as loaders

    if request.pp > 1 or request.ep > 1:
        raise ValueError("pipeline stages and expert parallelism are not played here")
    torch.set_num_threads(1)
    for rank in range(request.tp):
        arguments, reserved = _be(rank, request), Creation()
        config, load_config = ModelConfig.from_server_args(arguments), LoadConfig(load_format="safetensors")
        before = torch.get_default_dtype()
        torch.set_default_dtype(config.dtype)
        try:
            with torch.device("cpu"), reserved:
                model: Any = loaders._initialize_model(config, load_config)
        finally:
            torch.set_default_dtype(before)
        read = partial(loaders.DefaultModelLoader(load_config)._get_all_weights, config, model)
        load = partial(lambda model, read: model.load_weights(read()), model, read)
        files = mapped(request.shards, loaders.ShardedStateLoader.DEFAULT_PATTERN.format(rank=rank, part="*"))
        yield ProgramRank(
            f"rank {rank}", partial(held, model, loaders.ShardedStateLoader), files, load, reserved, model=model
        )
        del model, load, read
        gc.collect()


def _be(rank: int, request: Request) -> Any:
    """Make this process a rank of SGLang's; returns the arguments of its server."""
    import torch.distributed as dist
    from sglang.srt import server_args
    from sglang.srt.distributed import parallel_state
    from sglang.srt.runtime_context import get_parallel
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if dist.is_initialized():
        parallel_state.destroy_model_parallel()
        parallel_state.destroy_distributed_environment()
    arguments = server_args.ServerArgs(
        model_path=request.original, device="cpu", tp_size=request.tp, skip_tokenizer_init=True,
        dtype=request.dtype or "auto", disable_cuda_graph=True, attention_backend="torch_native",
    )  # fmt: skip
    server_args.set_global_server_args_for_scheduler(arguments)
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=request.tp)
    new = dist.new_group
    dist.new_group = lambda members=None, *_, **__: new(members, backend="fake")  # gloo would wait for the others
    try:
        parallel_state.init_distributed_environment(request.tp, rank, local_rank=rank, backend="fake")
        get_parallel().override_permanently(**dict.fromkeys(_RANKS["one"], 0), **dict.fromkeys(_RANKS["tp"], rank))
        parallel_state.initialize_model_parallel()
    finally:
        dist.new_group = new
    return arguments
