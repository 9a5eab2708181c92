"""What ``live_vllm`` adds to each of vLLM's workers: pushes that are files, faults, and the second witness.

vLLM imports this module in each worker (``worker_extension_cls``).
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from reshard.formats.errors import LiveError
from reshard.live import vllm_engine, vllm_reload, witness
from reshard.live.meshes import Target, arranged
from reshard.source.opening import open_source


class Files:
    """In the place of a trainer: a folder of shards for each version, as 'reshard split --as vllm' writes them.

    What a rank says of a version goes into a file beside it.
    """

    def __init__(self, root: Path, rank: int) -> None:
        self.root, self.rank = root, rank

    def check(self) -> None:
        pass

    def receive(self, version: int) -> Mapping[str, torch.Tensor]:
        found: dict[str, torch.Tensor] = {}
        for path in sorted((self.root / str(version)).glob(f"model-rank-{self.rank}-part-*.safetensors")):
            found |= load_file(path)
        if not found:
            raise LiveError(f"version {version} has no shards for rank {self.rank}")
        constants = ("_k_scale", "_v_scale", "_q_scale", "_prob_scale")
        return {name: tensor for name, tensor in found.items() if not name.endswith(constants)}

    def commit(self, version: int, error: str | None) -> None:
        part = self.root / f"part-{version}-{self.rank}"
        part.write_text(error or "committed", encoding="utf-8")
        part.rename(self.root / f"said-{version}-{self.rank}")


def connect(engine: vllm_engine.Engine, ticket: Mapping[str, Any]) -> Any:
    store = str(ticket["store"])
    if not store.startswith("file://"):
        return CONNECT(engine, ticket)
    return Files(Path(store.removeprefix("file://")), vllm_engine.get_world_group().rank_in_group)


torch.cpu._init_amx()  # vLLM 0.32 does not ask the system for tiles, and dies in attention of one rank
CONNECT = vllm_engine.Engine.connect
vllm_engine.Engine.connect = connect  # type: ignore[method-assign,assignment]
_RENEW = vllm_reload._renew


class Extension:
    """Methods of a worker, for ``collective_rpc``."""

    weight_transfer_engine: Any
    vllm_config: Any

    def break_commit(self, rank: int, after: int) -> None:
        """Have one rank fail in the middle of each commit, after so many layers; -1: no rank."""
        if vllm_engine.get_world_group().rank_in_group != rank:
            vllm_reload._renew = _RENEW
            return
        left = [after]

        def renew(layer: torch.nn.Module, own: Mapping[str, torch.Tensor]) -> None:
            left[0] -= 1
            if left[0] < 0:
                raise RuntimeError("no memory left")
            _RENEW(layer, own)

        vllm_reload._renew = renew

    def ask_loader(self, checkpoint: str, tp: int) -> dict[str, Any]:
        """How the running model's loader, the index probe and our rules differ, and the milliseconds of the first."""
        from vllm.config import set_current_vllm_config

        engine, rank = self.weight_transfer_engine, vllm_engine.get_world_group().rank_in_group
        arrangement = arranged(open_source(Path(checkpoint)).model, Target("vllm", tp=tp))
        start = time.perf_counter()
        found = vllm_engine.ask_loader(engine, arrangement, rank)
        seconds, model = time.perf_counter() - start, engine.model
        tensors = {tensor.name: (tensor.dtype, tensor.shape) for tensor in arrangement.plan.model.tensors}
        with set_current_vllm_config(self.vllm_config), vllm_reload.as_loaded(model):
            again = witness.probed(model, model.load_weights, tensors)
            found += witness.unlike(witness.recorded(model, model.load_weights, tensors), again)
        return {"differences": found, "milliseconds": 1000 * seconds}
