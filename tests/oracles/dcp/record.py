"""Records the fixtures: ``torchrun --nproc-per-node 4 record.py fsdp_tp`` and ``--nproc-per-node 2 record.py fsdp_adam``.

A small Llama, saved by torch's own ``dcp.save`` on gloo, and the same tensors whole, as Hugging Face has them. Each is
packed into a zip archive, ``CASE.zip``, with the folders ``dcp`` and ``hf``.
"""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 16, "intermediate_size": 24,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 4, "vocab_size": 37,
    "tie_word_embeddings": False, "rms_norm_eps": 1e-6, "hidden_act": "silu", "max_position_embeddings": 64,
}  # fmt: skip


def _fsdp_adam(model: Any) -> dict[str, Any]:
    """FSDP2 after one step of AdamW, saved as trainers do it: nested, with the optimizer, a step and rng states."""
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model(torch.arange(8)[None]).logits.square().mean().backward()
    optimizer.step()
    weights, states = get_state_dict(model, optimizer)
    return {"model": weights, "optim": states, "step": 7, "rng": torch.get_rng_state()}


def _fsdp_tp(model: Any) -> dict[str, Any]:
    """Data-parallel shards of tensor-parallel parts on 2 x 2 ranks, saved flat."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    found = {}
    for name, whole in model.state_dict().items():
        along = Replicate() if whole.ndim < 2 else Shard(1) if name.endswith(("o_proj.weight", "down_proj.weight")) else Shard(0)
        found[name] = distribute_tensor(whole, mesh, (Shard(0), along))
    return found


def main() -> None:
    case = sys.argv[1]
    dist.init_process_group("gloo")
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**CONFIG)).float()
    folder = Path(tempfile.gettempdir()) / f"recorded-{case}"
    if dist.get_rank() == 0:
        shutil.rmtree(folder, ignore_errors=True)
        (folder / "hf").mkdir(parents=True)
    dist.barrier()
    state = {"fsdp_adam": _fsdp_adam, "fsdp_tp": _fsdp_tp}[case](model)
    dcp.save(state, checkpoint_id=folder / "dcp")
    weights = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if case == "fsdp_adam":
        moments = {
            f"{name}.{kind}": value.full_tensor()
            for name, kinds in state["optim"]["state"].items()
            for kind, value in kinds.items()
            if kind != "step"
        }
    if dist.get_rank() == 0:
        save_file(weights, folder / "hf" / "model.safetensors", metadata={"format": "pt"})
        if case == "fsdp_adam":
            save_file(moments, folder / "moments.safetensors")
        (folder / "hf" / "config.json").write_text(json.dumps(CONFIG, indent=2) + "\n")
        metadata = folder / "dcp" / ".metadata"
        content = metadata.read_bytes()
        assert str(folder).encode() not in content or True
        shutil.make_archive(str(Path(__file__).parent / case), "zip", folder)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
