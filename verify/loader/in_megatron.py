"""Megatron-Core, on a CPU: what its own ``sharded_state_dict`` asks of a distributed checkpoint. Tried with 0.16.1.

It loads no file of Hugging Face's. It is told of the model by config.json, and says names, dtypes, shapes and offsets,
no values. A rank is one of torch's fake process groups; the model has no memory.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.filesystem import FileSystemReader

from reshard.verify.loader.program import Layout, ProgramLayout, Request
from reshard.verify.loader.transformer_engine import stand_in

_FAMILIES = {
    "qkv": ("qwen2", "qwen2_moe"), "norms": ("qwen3", "qwen3_moe"), "sigmoid": ("deepseek_v3", "kimi_k2", "glm4_moe"),
    "": ("llama", "mistral", "mixtral", "deepseek_v2"),
}  # fmt: skip
"""Model types, by what is true of them and not in config.json: biases of q, k and v, norms of q and k, a router with
biases.
"""


def prepare(request: Request) -> str:
    """Import Megatron-Core, with stand-ins for the modules of Transformer Engine if that is not installed."""
    logging.disable(logging.WARNING)
    is_stand_in = stand_in()
    import megatron.core as core  # type: ignore[import-not-found]

    return f"Megatron-Core {core.__version__}{' with stand-ins for Transformer Engine' if is_stand_in else ''}"


def layout(request: Request) -> ProgramLayout:
    """The layout of the newest step, as Megatron-LM finds it."""
    from megatron.core import dist_checkpointing

    folder = Path(request.shards)
    if (tracker := folder / "latest_checkpointed_iteration.txt").exists():
        step = tracker.read_text(encoding="utf-8").strip()
        folder /= step if step == "release" else f"iter_{int(step):07d}"
    content = dist_checkpointing.load_content_metadata(str(folder)) or {}
    size, asked = request.pp * max(request.tp, request.ep * request.etp), dict[str, Layout]()
    for rank in range(size):
        for part in _parts(request, rank, size, content):
            if not hasattr(part, "local_shape"):
                asked[part.unique_key] = Layout(boxes={()})
                continue
            shape, name = tuple(part.global_shape), part.key
            rows = _config(request)["vocab_size"] if part.allow_shape_mismatch else None
            known = asked.setdefault(name, Layout(_name(part.dtype), shape, rows=rows))
            if (known.dtype, known.shape) != (_name(part.dtype), shape):
                raise ValueError(f"the ranks do not agree on the shape of '{name}'")
            sizes = (1,) * part.prepend_axis_num + tuple(part.local_shape)
            known.boxes.add(_box(part.global_offset, sizes))
    stored: Mapping[str, Any] = FileSystemReader(folder).read_metadata().state_dict_metadata
    return ProgramLayout(size, asked, {name: _stored(each) for name, each in stored.items()})


def _stored(entry: Any) -> Layout:
    if not hasattr(entry, "chunks"):
        return Layout(boxes={()})
    boxes = {_box(chunk.offsets, chunk.sizes) for chunk in entry.chunks}
    return Layout(_name(entry.properties.dtype), tuple(entry.size), boxes)


def _box(offsets: Any, sizes: Any) -> tuple[tuple[int, int], ...]:
    return tuple((begin, begin + size) for begin, size in zip(offsets, sizes, strict=True))


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _parts(request: Request, rank: int, size: int, content: Mapping[str, Any]) -> Iterator[Any]:
    """The parts of tensors, and the objects, that a rank asks for, while the process is that rank."""
    from megatron.core import parallel_state
    from megatron.core.dist_checkpointing.dict_utils import nested_values  # type: ignore[import-not-found]
    from megatron.core.dist_checkpointing.mapping import apply_factories  # type: ignore[import-not-found]
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
    parallel_state.initialize_model_parallel(
        request.tp, request.pp, expert_model_parallel_size=request.ep, expert_tensor_parallel_size=request.etp,
        create_gloo_process_groups=False,
    )  # fmt: skip
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    state = _model(request).sharded_state_dict(metadata={**content, "dp_cp_group": group})
    apply_factories(state)
    yield from nested_values(state)
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()


def _model(request: Request) -> Any:
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel  # type: ignore[import-not-found]
    from megatron.core.models.gpt import gpt_layer_specs as specs
    from megatron.core.transformer import transformer_config  # type: ignore[import-not-found]
    from megatron.core.transformer.module import Float16Module  # type: ignore[import-not-found]

    config, dtype = _config(request), getattr(torch, request.dtype or "float32")
    is_fused, multiple = request.form != "local", 128 * request.tp
    name = "MLATransformerConfig" if config.get("kv_lora_rank") else "TransformerConfig"
    torch.Tensor.cuda = lambda self, *_, **__: self  # type: ignore[method-assign]
    torch.cuda.current_device = lambda: torch.device("meta")  # type: ignore[assignment, return-value]
    settings = getattr(transformer_config, name)(
        **_settings(request, config), params_dtype=dtype, pipeline_dtype=dtype,
        bf16=dtype == torch.bfloat16, fp16=dtype == torch.float16,
        perform_initialization=False, init_model_with_meta_device=True, moe_grouped_gemm=is_fused,
        tensor_model_parallel_size=request.tp, pipeline_model_parallel_size=request.pp,
        expert_model_parallel_size=request.ep, expert_tensor_parallel_size=request.etp,
    )  # fmt: skip
    with torch.device("meta"):
        layers = specs.get_gpt_decoder_block_spec(settings, is_fused)
        further = specs.get_gpt_mtp_block_spec(settings, layers, is_fused) if settings.mtp_num_layers else None
        model = GPTModel(
            settings, layers, -(-config["vocab_size"] // multiple) * multiple, max_sequence_length=1,
            mtp_block_spec=further, position_embedding_type="rope",
            share_embeddings_and_output_weights=config.get("tie_word_embeddings", False),
            pre_process=parallel_state.is_pipeline_first_stage(), post_process=parallel_state.is_pipeline_last_stage(),
        )  # fmt: skip
        return Float16Module(settings, model) if dtype != torch.float32 else model


def _config(request: Request) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((Path(request.original) / "config.json").read_text(encoding="utf-8"))
    return config


def _settings(request: Request, config: dict[str, Any]) -> dict[str, Any]:
    """Megatron-Core's settings of the model that config.json describes, as far as they change what it stores."""
    kind, get = config.get("model_type"), config.get
    family = next((name for name, kinds in _FAMILIES.items() if kind in kinds), None)
    if family is None:
        raise ValueError(f"Megatron-Core's settings of the type '{kind}' are not known")
    if get("attention_bias") and not get("mlp_bias") and kind in _FAMILIES[""]:
        raise ValueError("it has biases of all matrices, or of q, k and v alone")
    layers, heads, mla = config["num_hidden_layers"], config["num_attention_heads"], get("kv_lora_rank") is not None
    found = {
        "num_layers": layers, "hidden_size": config["hidden_size"], "num_attention_heads": heads,
        "num_query_groups": get("num_key_value_heads") or heads, "ffn_hidden_size": config["intermediate_size"],
        "kv_channels": get("head_dim") or config["hidden_size"] // heads, "normalization": "RMSNorm",
        "gated_linear_unit": True, "activation_func": torch.nn.functional.silu,
        "add_bias_linear": bool(get("mlp_bias")), "add_qkv_bias": family == "qkv" or bool(get("attention_bias")),
        "qk_layernorm": family == "norms" or bool(get("use_qk_norm")) or mla,
    }  # fmt: skip
    if experts := get("num_local_experts") or get("num_experts") or get("n_routed_experts"):
        width, step = get("moe_intermediate_size") or config["intermediate_size"], get("decoder_sparse_step") or 1
        have = [
            layer >= (get("first_k_dense_replace") or 0) and layer not in (get("mlp_only_layers") or ())
            and (layer + 1) % step == 0 for layer in range(layers)
        ]  # fmt: skip
        shared = get("shared_expert_intermediate_size") or width * (get("n_shared_experts") or 0)
        found |= {
            "num_moe_experts": experts, "moe_router_topk": config["num_experts_per_tok"], "moe_ffn_hidden_size": width,
            "moe_token_dispatcher_type": "allgather", "moe_router_enable_expert_bias": family == "sigmoid",
            "moe_router_score_function": "sigmoid" if family == "sigmoid" else "softmax",
            "moe_shared_expert_intermediate_size": shared or None,
            "moe_shared_expert_gate": bool(get("shared_expert_intermediate_size")),
            "moe_layer_freq": 1 if all(have) and not mla else [int(each) for each in have],
        }  # fmt: skip
    if mla:
        found |= {"q_lora_rank": get("q_lora_rank"), "kv_lora_rank": config["kv_lora_rank"],
                  "qk_head_dim": config["qk_nope_head_dim"], "qk_pos_emb_head_dim": config["qk_rope_head_dim"],
                  "v_head_dim": config["v_head_dim"], "rope_type": "rope", "multi_latent_attention": True}  # fmt: skip
    further = max(map(int, re.findall(r'"model\.layers\.(\d+)\.', _names(request))), default=0) + 1 - layers
    return found | ({"mtp_num_layers": further} if further > 0 else {})


def _names(request: Request) -> str:
    """The headers of the original's files, which have the names of its tensors: it may lack layers of config.json."""
    found = []
    for path in Path(request.original).glob("*.safetensors"):
        with path.open("rb") as file:
            found.append(file.read(int.from_bytes(file.read(8), "little")).decode())
    return "".join(found)
