"""Loads a folder with Megatron-Core on a CPU and writes the log-probabilities of all next tokens.

    python megatron_run.py REQUEST.json

This file runs in the engine's own environment: it imports Megatron-Core, torch and the standard library, and nothing of
reshard. One process is one rank. The request has ``folder``, ``tp``, ``pp``, ``ep``, ``etp`` (over how many ranks an
expert is divided), ``stages`` (the layers of each pipeline stage; empty: equal), ``vocabulary``, ``prompts`` (lists of
token ids of one length), ``settings`` (see megatron_settings.toml), ``save``: where the model is saved again, or null,
and ``out``: where the answer goes. It has, for each prompt and each of its positions but the first, a list with the
log-probability of each token.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist
from torch.multiprocessing.spawn import start_processes

warnings.filterwarnings("ignore")
logging.disable(logging.WARNING)
sys.path.insert(0, str(Path(__file__).parent))

ON_A_CPU = {
    "use_cpu_initialization": True, "apply_rope_fusion": False, "bias_activation_fusion": False,
    "bias_dropout_fusion": False, "gradient_accumulation_fusion": False, "masked_softmax_fusion": False,
    "persist_layer_norm": False, "hidden_dropout": 0.0, "attention_dropout": 0.0,
}  # fmt: skip
"""No kernels that need a GPU, and nothing random."""


def without_cuda() -> None:
    """Replace the places where building and running a model asks for a GPU."""
    from megatron.core.tensor_parallel.random import CudaRNGStatesTracker  # type: ignore[import-not-found]

    torch.Tensor.cuda = lambda self, *_, **__: self  # type: ignore[method-assign]
    torch.cuda.current_device = lambda: torch.device("cpu")  # type: ignore[assignment, return-value]
    torch.cuda.synchronize = lambda *_: None
    CudaRNGStatesTracker.fork = lambda self, *_, **__: contextlib.nullcontext()


def build(request: dict[str, Any], padded: int) -> Any:
    """This rank's part of the model, for a vocabulary padded to so many rows."""
    from megatron.core import parallel_state  # type: ignore[import-not-found]
    from megatron.core.models.gpt import GPTModel  # type: ignore[import-not-found]
    from megatron.core.models.gpt.gpt_layer_specs import (  # type: ignore[import-not-found]
        get_gpt_decoder_block_spec,
        get_gpt_mtp_block_spec,
    )
    from megatron.core.transformer import transformer_config  # type: ignore[import-not-found]

    settings = request["settings"]
    given, dtype = dict(settings["config"]), getattr(torch, request["dtype"])
    given["activation_func"] = getattr(torch.nn.functional, given["activation_func"])
    config = getattr(transformer_config, settings["class"])(
        **ON_A_CPU, **given, **_layout(request["stages"], given.get("mtp_num_layers", 0)),
        params_dtype=dtype, pipeline_dtype=dtype,
        bf16=dtype == torch.bfloat16, tensor_model_parallel_size=request["tp"],
        pipeline_model_parallel_size=request["pp"], expert_model_parallel_size=request["ep"],
        expert_tensor_parallel_size=request["etp"], moe_grouped_gemm=settings["form"]["grouped"],
    )  # fmt: skip
    is_te = settings["form"]["transformer_engine"]
    layers = get_gpt_decoder_block_spec(config, is_te)
    further = get_gpt_mtp_block_spec(config, layers, is_te) if config.mtp_num_layers else None
    model = GPTModel(
        config=config,
        transformer_layer_spec=layers,
        mtp_block_spec=further,
        vocab_size=padded,
        max_sequence_length=len(request["prompts"][0]),
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        parallel_output=False,
        **settings["model"],
    ).eval()
    for parameter in model.parameters():
        parameter.fill_(float("nan"))  # what is not loaded shows
    return model


def _layout(stages: list[int], further: int) -> dict[str, Any]:
    """How Megatron-Core is told the layers of stages that are not of one length."""
    if len({*stages}) < 2:
        return {}
    layout = [["decoder"] * count for count in stages]
    layout[0].insert(0, "embedding")
    layout[-1] += ["mtp"] * further + ["loss"]
    return {"pipeline_model_parallel_layout": layout}


def load(request: dict[str, Any]) -> Any:
    """The model with the weights of the folder. Raises RuntimeError if any is missing, or not used."""
    from megatron.core import dist_checkpointing

    folder, form = step_folder(Path(request["folder"])), request["settings"]["form"]
    if form["is_distributed"]:
        multiple = 128 * request["tp"]
        model = build(request, -(-request["vocabulary"] // multiple) * multiple)
        state = dist_checkpointing.load(sharded(model, request), str(folder), strict="log_all")["model"]
    else:
        state = torch.load(folder / rank_file(request), map_location="cpu", weights_only=True)["model"]
        tables = (state.get(name) for name in ("embedding.word_embeddings.weight", "output_layer.weight"))
        rows = next((len(table) for table in tables if table is not None), 128)
        model = build(request, rows * request["tp"])
    missing, unused = model.load_state_dict(state, strict=False)
    missing = [name for name in missing if not name.endswith("_extra_state")]
    if missing or unused:
        raise RuntimeError(f"missing from the folder: {missing[:3]}, of no use: {unused[:3]}")
    return model


def sharded(model: Any, request: dict[str, Any]) -> dict[str, Any]:
    """What Megatron-Core asks of a distributed checkpoint, and saves in one."""
    from megatron.core import parallel_state

    metadata = {
        "singleton_local_shards": request["settings"]["form"]["singleton"],
        "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True),
    }
    return {"model": model.sharded_state_dict(metadata=metadata)}


def save(model: Any, request: dict[str, Any]) -> None:
    """Save the model as Megatron-LM does, as iteration 1."""
    from megatron.core import dist_checkpointing

    folder = Path(request["save"]) / "iter_0000001"
    folder.mkdir(parents=True, exist_ok=True)
    dist_checkpointing.save({**sharded(model, request), "checkpoint_version": 3.0, "iteration": 1}, str(folder))
    (folder.parent / "latest_checkpointed_iteration.txt").write_text("1", encoding="utf-8")


def step_folder(folder: Path) -> Path:
    """The folder of the newest iteration, as Megatron-LM finds it."""
    step = (folder / "latest_checkpointed_iteration.txt").read_text(encoding="utf-8").strip()
    return folder / (step if step == "release" else f"iter_{int(step):07d}")


def rank_file(request: dict[str, Any]) -> str:
    """The file of this rank in Megatron-LM's older form."""
    from megatron.core import parallel_state

    name = f"mp_rank_{parallel_state.get_tensor_model_parallel_rank():02d}"
    if request["pp"] > 1:
        name += f"_{parallel_state.get_pipeline_model_parallel_rank():03d}"
    if request["ep"] > 1:
        name += f"_{parallel_state.get_expert_model_parallel_rank():03d}"
    return f"{name}/model_optim_rng.pt"


def forward(model: Any, request: dict[str, Any]) -> Tensor | None:
    """The logits, ``[prompts, positions, tokens]``; None on a stage that does not end in them."""
    from megatron.core import parallel_state

    tokens = torch.tensor(request["prompts"])
    batch, length = tokens.shape
    stride = dist.get_world_size() // request["pp"]
    if not parallel_state.is_pipeline_first_stage():
        hidden = torch.zeros(length, batch, model.config.hidden_size, dtype=model.config.params_dtype)
        dist.recv(hidden, dist.get_rank() - stride)
        model.set_input_tensor(hidden)
    mask = torch.ones(1, 1, length, length).triu(1).bool()
    model.mtp_process, model.config.mtp_num_layers = False, None  # without labels, Megatron-Core does not run them
    out: Tensor = model(tokens, torch.arange(length).expand(batch, length), mask)
    if not parallel_state.is_pipeline_last_stage():
        dist.send(out.contiguous(), dist.get_rank() + stride)
        return None
    return out


@torch.no_grad()
def run_rank(rank: int, world: int, request: dict[str, Any], rendezvous: str) -> None:
    """One rank: load, run, and, if it is the first that has logits, write the answer."""
    from megatron.core import parallel_state

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=world)
    without_cuda()
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=request["tp"], pipeline_model_parallel_size=request["pp"],
        expert_model_parallel_size=request["ep"], expert_tensor_parallel_size=request["etp"],
    )  # fmt: skip
    model = load(request)
    if request["save"] is not None:
        save(model, request)
    logits = forward(model, request)
    if logits is not None and rank % (world // request["pp"]) == 0:
        found = logits[:, :-1, : request["vocabulary"]].double().log_softmax(-1)
        Path(request["out"]).write_text(json.dumps(found.tolist()), encoding="utf-8")
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    """Read the request, and run its ranks."""
    import megatron.core  # type: ignore[import-not-found]  # noqa: F401  # before the ranks: its absence is one line

    request = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    world = max(request["tp"], request["etp"] * request["ep"]) * request["pp"]
    with tempfile.TemporaryDirectory() as folder:
        start_processes(  # type: ignore[no-untyped-call]
            run_rank, (world, request, f"{folder}/rendezvous"), nprocs=world, start_method="fork"
        )


if __name__ == "__main__":
    from transformer_engine_on_cpu import install  # type: ignore[import-not-found]  # the file beside this one

    install()
    main()
