"""Tiny checkpoints of architectures whose modelling code transformers does not have, or which it cannot run as a whole
(a thinker with its talker, an assistant without its model) or on tokens alone (a tower for sound that wants sound):
published names, random numbers.

The shapes are written down as numbers, independently of the rules. For packed tensors ``parts`` says which rows (or
columns, of a row-parallel one) the second of two ranks holds, since a wrong order of blocks has the same shape.
"""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Remote:
    """A config, its tensors (``[0-2]`` in a name stands for 0, 1 and 2), and what is true of them."""

    config: Mapping[str, Any]
    tensors: Mapping[str, Shape]
    degrees: tuple[int, ...] = (2, 4, 8)
    parts: Mapping[str, tuple[int, list[tuple[int, int]]]] = field(default_factory=dict)  # dimension, ranges


def shapes(remote: Remote) -> dict[str, Shape]:
    return {name: shape for key, shape in remote.tensors.items() for name in numbered(key)}


def numbered(key: str) -> Iterator[str]:
    """The names that ``[0-2]`` in a name stands for."""
    found = re.search(r"\[(\d+)-(\d+)\]", key)
    if not found:
        yield key
        return
    for number in range(int(found[1]), int(found[2]) + 1):
        yield from numbered(key[: found.start()] + str(number) + key[found.end() :])


def save(name: str, folder: Path) -> Path:
    """Write a checkpoint of REMOTE into ``folder`` and return it; the same name gives the same bytes."""
    folder.mkdir(parents=True, exist_ok=True)
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    remote = REMOTE[name]
    tensors = {key: torch.randn(shape, generator=generator) for key, shape in shapes(remote).items()}
    (folder / "config.json").write_text(json.dumps(remote.config, indent=2))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def _at(prefix: str, tensors: Mapping[str, Shape]) -> dict[str, Shape]:
    return {f"{prefix}.{name}": shape for name, shape in tensors.items()}


def _mlp(width: int, hidden: int = 80, names: str = "gate_proj up_proj down_proj") -> dict[str, Shape]:
    gate, up, down = names.split()
    return {f"{gate}.weight": (width, hidden), f"{up}.weight": (width, hidden), f"{down}.weight": (hidden, width)}


# 8 query heads of 12 on 4 KV heads, 3 layers, as in the zoo
_DENSE: dict[str, Any] = {
    "hidden_size": 80,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 12,
    "intermediate_size": 72,
    "vocab_size": 101,
    "num_hidden_layers": 3,
}
_NORMS: dict[str, Shape] = {"input_layernorm.weight": (80,), "post_attention_layernorm.weight": (80,)}
_ENDS: dict[str, Shape] = {
    "model.embed_tokens.weight": (101, 80),
    "model.norm.weight": (80,),
    "lm_head.weight": (101, 80),
}
_QKV: dict[str, Shape] = {
    "self_attn.q_proj.weight": (96, 80),
    "self_attn.k_proj.weight": (48, 80),
    "self_attn.v_proj.weight": (48, 80),
    "self_attn.o_proj.weight": (80, 96),
}
_QKV_BIAS: dict[str, Shape] = {f"self_attn.{n}_proj.bias": (w,) for n, w in {"q": 96, "k": 48, "v": 48}.items()}
_MORE: dict[str, Shape] = {"enorm.weight": (80,), "hnorm.weight": (80,), "eh_proj.weight": (80, 160)}
# of q, k and v in one matrix: the second half of each
_PACKED = (0, [(48, 96), (120, 144), (168, 192)])

REMOTE: dict[str, Remote] = {}

# ----------------------------------------------------------------------------------------------------- Ling and Ring

_LING: dict[str, Any] = {
    **_DENSE,
    "model_type": "bailing_moe_v2",
    "moe_intermediate_size": 24,
    "num_experts": 6,
    "num_shared_experts": 2,
    "first_k_dense_replace": 1,
}
_LING_ENDS = {key.replace("embed_tokens", "word_embeddings"): shape for key, shape in _ENDS.items()}
_LING_ATTENTION: dict[str, Shape] = {
    "attention.query_key_value.weight": (192, 80),
    "attention.dense.weight": (80, 96),
    "attention.query_layernorm.weight": (12,),
    "attention.key_layernorm.weight": (12,),
}
_LING_MOE: dict[str, Shape] = {
    "mlp.gate.weight": (6, 80),
    "mlp.gate.expert_bias": (6,),
    **_at("mlp.experts.[0-5]", _mlp(24)),
    **_at("mlp.shared_experts", _mlp(48)),
}
REMOTE["bailing_moe"] = Remote(
    {**_LING, "model_type": "bailing_moe", "use_qkv_bias": True},
    {
        **_LING_ENDS,
        **_at("model.layers.[0-2]", {**_NORMS, **_LING_ATTENTION, "attention.query_key_value.bias": (192,)}),
        **_at("model.layers.0.mlp", _mlp(72)),
        **_at("model.layers.[1-2]", _LING_MOE),
    },
    parts={"model.layers.1.attention.query_key_value.weight": _PACKED},
)
REMOTE["bailing_moe_v2"] = Remote(
    {**_LING, "num_nextn_predict_layers": 1, "moe_shared_expert_intermediate_size": 24},
    {
        **_LING_ENDS,
        **_at("model.layers.[0-3]", {**_NORMS, **_LING_ATTENTION}),
        **_at("model.layers.0.mlp", _mlp(72)),
        **_at("model.layers.[1-3]", _LING_MOE),
        **_at("model.layers.3", {**_MORE, "final_layernorm.weight": (80,)}),
    },
)
_RING: dict[str, Shape] = {
    "attention.query_key_value.weight": (288, 80),
    "attention.dense.weight": (80, 96),
    "attention.query_layernorm.weight": (12,),
    "attention.key_layernorm.weight": (12,),
    "attention.g_proj.weight": (96, 80),
    "attention.g_norm.weight": (96,),
}
REMOTE["bailing_moe_linear"] = Remote(
    {**_LING, "model_type": "bailing_moe_linear", "num_hidden_layers": 5, "layer_group_size": 2, "group_norm_size": 4},
    {
        **_LING_ENDS,
        **_at("model.layers.[0-4]", {**_NORMS, **_LING_MOE}),
        **{key: shape for i in (0, 2) for key, shape in _at(f"model.layers.{i}", _RING).items()},
        **{key: shape for i in (1, 3, 4) for key, shape in _at(f"model.layers.{i}", _LING_ATTENTION).items()},
    },
    parts={
        "model.layers.0.attention.query_key_value.weight": (0, [(48, 96), (144, 192), (240, 288)]),
        "model.layers.4.attention.query_key_value.weight": _PACKED,
    },
)
REMOTE["bailing_hybrid-2.5"] = Remote(
    {
        **_LING,
        "model_type": "bailing_hybrid",
        "layer_group_size": 3,
        "q_lora_rank": 28,
        "kv_lora_rank": 20,
        "qk_nope_head_dim": 14,
        "qk_rope_head_dim": 6,
        "v_head_dim": 10,
    },
    {
        **_LING_ENDS,
        **_at("model.layers.[0-2]", _NORMS),
        **_at("model.layers.0.mlp", _mlp(72)),
        **_at("model.layers.[1-2]", _LING_MOE),
        **_at("model.layers.[0-1]", _RING),
        **_at(
            "model.layers.2.attention",
            {
                "q_a_proj.weight": (28, 80),
                "q_a_layernorm.weight": (28,),
                "q_b_proj.weight": (160, 28),
                "kv_a_proj_with_mqa.weight": (26, 80),
                "kv_a_layernorm.weight": (20,),
                "kv_b_proj.weight": (192, 20),
                "dense.weight": (80, 80),
            },
        ),
    },
    parts={"model.layers.0.attention.query_key_value.weight": (0, [(48, 96), (144, 192), (240, 288)])},
)

# -------------------------------------------------------------------------------- sizes that differ from layer to layer


def _block(group: int | None, mult: float | None, attention: str = "", ffn: str = "") -> dict[str, Any]:
    return {
        "attention": {
            "n_heads_in_group": group,
            "no_op": attention == "none",
            "replace_with_linear": attention == "linear",
        },
        "ffn": {"ffn_mult": mult, "no_op": ffn == "none", "replace_with_linear": ffn == "linear"},
    }


REMOTE["nemotron-nas"] = Remote(
    {
        "model_type": "nemotron-nas",
        "hidden_size": 96,
        "num_attention_heads": 8,
        "num_key_value_heads": None,
        "intermediate_size": None,
        "vocab_size": 101,
        "num_hidden_layers": 4,
        "block_configs": [
            _block(2, 2.625),
            _block(1, 5.25),
            _block(None, 1.3125, attention="linear"),
            _block(None, None, attention="none", ffn="linear"),
        ],
    },
    {
        "model.embed_tokens.weight": (101, 96),
        "model.norm.weight": (96,),
        "lm_head.weight": (101, 96),
        **_at("model.layers.[0-2]", {"input_layernorm.weight": (96,)}),
        **_at("model.layers.[0-3]", {"post_attention_layernorm.weight": (96,)}),
        **_at("model.layers.0.self_attn", {"q_proj.weight": (96, 96), "o_proj.weight": (96, 96)}),
        **_at("model.layers.0.self_attn", {"k_proj.weight": (48, 96), "v_proj.weight": (48, 96)}),
        **_at("model.layers.1.self_attn", {"q_proj.weight": (96, 96), "o_proj.weight": (96, 96)}),
        **_at("model.layers.1.self_attn", {"k_proj.weight": (96, 96), "v_proj.weight": (96, 96)}),
        "model.layers.2.self_attn.linear_attn.weight": (96, 96),
        "model.layers.3.mlp.linear_mlp.weight": (96, 96),
        **_at("model.layers.0.mlp", _mlp(256, 96)),  # 2 * 2.625 * 96 / 3 = 168, in multiples of 256
        **_at("model.layers.1.mlp", _mlp(512, 96)),
        **_at("model.layers.2.mlp", _mlp(256, 96)),
    },
)
REMOTE["openelm"] = Remote(
    {
        "model_type": "openelm",
        "model_dim": 80,
        "head_dim": 12,
        "num_transformer_layers": 2,
        "num_query_heads": [8, 16],
        "num_kv_heads": [4, 8],
        "ffn_multipliers": [0.5, 1.25],
        "ffn_dim_divisor": 16,
        "vocab_size": 101,
    },
    {
        "transformer.token_embeddings.weight": (101, 80),
        "transformer.norm.weight": (80,),
        **_at(
            "transformer.layers.[0-1]",
            {
                "attn_norm.weight": (80,),
                "ffn_norm.weight": (80,),
                "attn.q_norm.weight": (12,),
                "attn.k_norm.weight": (12,),
            },
        ),
        "transformer.layers.0.attn.qkv_proj.weight": (192, 80),
        "transformer.layers.0.attn.out_proj.weight": (80, 96),
        "transformer.layers.1.attn.qkv_proj.weight": (384, 80),
        "transformer.layers.1.attn.out_proj.weight": (80, 192),
        "transformer.layers.0.ffn.proj_1.weight": (96, 80),  # 0.5 * 80 = 40: 48 to the nearest 16
        "transformer.layers.0.ffn.proj_2.weight": (80, 48),
        "transformer.layers.1.ffn.proj_1.weight": (192, 80),  # 100: 96
        "transformer.layers.1.ffn.proj_2.weight": (80, 96),
    },
    parts={
        "transformer.layers.0.attn.qkv_proj.weight": _PACKED,
        "transformer.layers.1.ffn.proj_1.weight": (0, [(48, 96), (144, 192)]),
    },
)

# ------------------------------------------------------------------------------------------------------------- Step

_STEP: dict[str, Any] = {
    **{key: value for key, value in _DENSE.items() if key != "num_key_value_heads"},
    "num_attention_groups": 4,
    "moe_num_experts": 3,
    "moe_intermediate_size": 24,
    "share_expert_dim": 40,
}
_STEP_MOE: dict[str, Shape] = {
    "moe.gate.weight": (3, 80),
    "moe.gate_proj.weight": (3, 24, 80),
    "moe.up_proj.weight": (3, 24, 80),
    "moe.down_proj.weight": (3, 80, 24),
    **_at("share_expert", _mlp(40)),
}
_STEP_SLIDING: dict[str, Shape] = {
    **_QKV,
    "self_attn.q_proj.weight": (192, 80),
    "self_attn.o_proj.weight": (80, 192),
    "self_attn.g_proj.weight": (16, 80),
}
REMOTE["step3p5"] = Remote(
    {
        **_STEP,
        "model_type": "step3p5",
        "num_nextn_predict_layers": 1,
        "layer_types": ["full_attention", "sliding_attention", "full_attention", "sliding_attention"],
        "attention_other_setting": {
            "attention_type": "sliding_attention",
            "num_attention_heads": 16,
            "num_attention_groups": 4,
            "head_dim": 12,
        },
    },
    {
        **_ENDS,
        **_at("model.layers.[0-3]", {**_NORMS, "self_attn.q_norm.weight": (12,), "self_attn.k_norm.weight": (12,)}),
        **{
            k: s
            for i in (0, 2)
            for k, s in _at(f"model.layers.{i}", {**_QKV, "self_attn.g_proj.weight": (8, 80)}).items()
        },
        **{k: s for i in (1, 3) for k, s in _at(f"model.layers.{i}", _STEP_SLIDING).items()},
        **_at("model.layers.0.mlp", _mlp(72)),
        **_at("model.layers.[1-2]", {**_STEP_MOE, "moe.router_bias": (3,)}),
        **_at("model.layers.3", {**_MORE, **_at("mlp", _mlp(72))}),
        **_at("model.layers.3.transformer.shared_head", {"norm.weight": (80,), "output.weight": (101, 80)}),
    },
)
REMOTE["step3_vl"] = Remote(
    {
        "model_type": "step3_vl",
        "text_config": {**_STEP, "model_type": "step3_text", "head_dim": 12, "share_q_dim": 28},
        "vision_config": {"hidden_size": 32},
    },
    {
        **_ENDS,
        **_at("model.layers.[0-2]", _NORMS),
        **_at("model.layers.[0-2].self_attn", {"q_proj.weight": (28, 80), "k_proj.weight": (12, 80)}),
        **_at("model.layers.[0-2].self_attn", {"v_proj.weight": (12, 80), "inter_norm.weight": (28,)}),
        **_at("model.layers.[0-2].self_attn", {"wq.weight": (96, 28), "o_proj.weight": (80, 96)}),
        **_at("model.layers.0.mlp", _mlp(72)),
        **_at("model.layers.[1-2]", _STEP_MOE),
        "vision_model.embeddings.patch_embedding.weight": (32, 3, 4, 4),
        "vit_downsampler.weight": (48, 32, 2, 2),
        "vit_downsampler2.bias": (96,),
        "vit_large_projector.weight": (80, 96),
    },
)

# ---------------------------------------------------------------------------------------------------- Kimi and LongCat

_MLA: dict[str, Any] = {
    "hidden_size": 80,
    "num_attention_heads": 8,
    "q_lora_rank": 28,
    "kv_lora_rank": 20,
    "qk_nope_head_dim": 14,
    "qk_rope_head_dim": 6,
    "v_head_dim": 10,
    "vocab_size": 101,
}
_MLA_TENSORS: dict[str, Shape] = {
    "q_a_proj.weight": (28, 80),
    "q_a_layernorm.weight": (28,),
    "q_b_proj.weight": (160, 28),
    "kv_a_proj_with_mqa.weight": (26, 80),
    "kv_a_layernorm.weight": (20,),
    "kv_b_proj.weight": (192, 20),
    "o_proj.weight": (80, 80),
}
_KDA: dict[str, Shape] = {
    **{f"{name}_proj.weight": (88, 80) for name in "qkvg"},
    **{f"{name}_conv1d.weight": (88, 1, 3) for name in "qkv"},
    "A_log": (11,),
    "dt_bias": (88,),
    "f_a_proj.weight": (11, 80),
    "f_b_proj.weight": (88, 11),
    "b_proj.weight": (8, 80),
    "o_norm.weight": (11,),
    "o_proj.weight": (80, 88),
}
REMOTE["kimi_k3"] = Remote(
    {
        "model_type": "kimi_k3",
        "text_config": {
            **_MLA,
            "model_type": "kimi_linear",
            "num_key_value_heads": 8,
            "intermediate_size": 72,
            "moe_intermediate_size": 24,
            "routed_expert_hidden_size": 36,
            "num_experts": 3,
            "num_shared_experts": 2,
            "num_hidden_layers": 3,
            "linear_attn_config": {
                "kda_layers": [1, 3],
                "full_attn_layers": [2],
                "num_heads": 8,
                "head_dim": 11,
                "short_conv_kernel_size": 3,
            },
        },
        "vision_config": {"vt_hidden_size": 32},
    },
    {
        **{f"language_model.{key}": shape for key, shape in _ENDS.items()},
        "language_model.model.output_attn_res_norm.weight": (80,),
        "language_model.model.output_attn_res_proj.weight": (1, 80),
        **_at(
            "language_model.model.layers.[0-2]",
            {
                **_NORMS,
                "self_attention_res_norm.weight": (80,),
                "self_attention_res_proj.weight": (1, 80),
                "mlp_res_norm.weight": (80,),
                "mlp_res_proj.weight": (1, 80),
            },
        ),
        **_at("language_model.model.layers.0.self_attn", _KDA),
        **_at("language_model.model.layers.1.self_attn", {**_MLA_TENSORS, "g_proj.weight": (80, 80)}),
        **_at("language_model.model.layers.2.self_attn", _KDA),
        **_at("language_model.model.layers.0.mlp", _mlp(72)),
        **_at(
            "language_model.model.layers.[1-2].block_sparse_moe",
            {
                "gate.weight": (3, 80),
                "gate.e_score_correction_bias": (3,),
                "routed_expert_down_proj.weight": (36, 80),
                "routed_expert_norm.weight": (36,),
                "routed_expert_up_proj.weight": (80, 36),
                **_at("experts.[0-2]", _mlp(24, 36, "w1 w3 w2")),
                **_at("shared_experts", _mlp(48)),
            },
        ),
        "vision_tower.encoder.blocks.0.wqkv.weight": (96, 32),
        "mm_projector.proj.0.weight": (64, 64),
    },
    parts={"language_model.model.layers.0.self_attn.A_log": (0, [(4, 8), (8, 11)])},
)
REMOTE["longcat_flash_ngram"] = Remote(
    {
        **_MLA,
        "model_type": "longcat_flash_ngram",
        "hidden_size": 96,
        "num_layers": 1,
        "ffn_hidden_size": 72,
        "expert_ffn_hidden_size": 24,
        "n_routed_experts": 3,
        "zero_expert_num": 2,
        "ngram_vocab_size_ratio": 2,
        "emb_neighbor_num": 3,
        "emb_split_num": 3,
    },
    {
        "model.embed_tokens.weight": (101, 96),
        "model.norm.weight": (96,),
        "lm_head.weight": (101, 96),
        **{f"model.ngram_embeddings.embedders.{i}.weight": (203 + 2 * i, 16) for i in range(6)},
        "model.ngram_embeddings.post_projs.[0-5].weight": (96, 16),
        "model.layers.0.input_layernorm.[0-1].weight": (96,),
        "model.layers.0.post_attention_layernorm.[0-1].weight": (96,),
        **_at("model.layers.0.mlps.[0-1]", _mlp(72, 96)),
        **_at("model.layers.0.mlp.experts.[0-2]", _mlp(24, 96)),
        "model.layers.0.mlp.router.classifier.weight": (5, 96),
        "model.layers.0.mlp.router.e_score_correction_bias": (5,),
        **{
            f"model.{place}.{name}": tuple(96 if size == 80 else size for size in shape[:1]) + shape[1:]
            for place in ("layers.0.self_attn.[0-1]", "mtp.layers.0.self_attn")
            for name, shape in {
                **{key: tuple(96 if size == 80 else size for size in shape) for key, shape in _MLA_TENSORS.items()},
                "o_proj.weight": (96, 80),
            }.items()
        },
        "model.mtp.embed_tokens.weight": (101, 96),
        "model.mtp.norm.weight": (96,),
        **_at("model.mtp.layers.0", {"enorm.m.weight": (96,), "hnorm.m.weight": (96,), "eh_proj.weight": (96, 192)}),
        **_at("model.mtp.layers.0", {"input_layernorm.weight": (96,), "post_attention_layernorm.weight": (96,)}),
        **_at("model.mtp.layers.0.transformer_layer.mlp", _mlp(72, 96)),
    },
    parts={"model.ngram_embeddings.post_projs.5.weight": (1, [(8, 16)])},
)

# ------------------------------------------------------------------------------------------------------------ others

REMOTE["mimo"] = Remote(
    {**_DENSE, "model_type": "mimo", "num_nextn_predict_layers": 1},
    {
        **_ENDS,
        **_at("model.layers.[0-2]", {**_NORMS, **_QKV, **_QKV_BIAS, **_at("mlp", _mlp(72))}),
        **_at("model.mtp_layers.0", {**_NORMS, **_QKV, **_QKV_BIAS, **_at("mlp", _mlp(72))}),
        **_at("model.mtp_layers.0", {"token_layernorm.weight": (80,), "hidden_layernorm.weight": (80,)}),
        **_at("model.mtp_layers.0", {"input_proj.weight": (80, 160), "final_layernorm.weight": (80,)}),
    },
)
REMOTE["telechat"] = Remote(
    {
        "model_type": "telechat",
        "hidden_size": 96,
        "n_head": 8,
        "num_key_value_heads": 4,
        "n_layer": 2,
        "ffn_hidden_size": 72,
        "vocab_size": 101,
    },
    {
        "transformer.word_embeddings.weight": (101, 96),
        "transformer.ln_f.weight": (96,),
        "lm_head.weight": (101, 96),
        **_at(
            "transformer.h.[0-1]",
            {
                "input_layernorm.weight": (96,),
                "post_attention_layernorm.weight": (96,),
                "self_attention.query.weight": (96, 96),
                "self_attention.key_value.weight": (96, 96),
                "self_attention.dense.weight": (96, 96),
                "self_attention.dense.bias": (96,),
                **_at("mlp", _mlp(72, 96)),
                "mlp.down_proj.bias": (96,),
            },
        ),
    },
    parts={"transformer.h.0.self_attention.key_value.weight": (0, [(48, 96)])},
)
REMOTE["arctic"] = Remote(
    {**_DENSE, "model_type": "arctic", "head_dim": None, "num_local_experts": 3, "num_hidden_layers": 2},
    {
        **_ENDS,
        **_at("model.layers.[0-1]", _NORMS),
        **_at("model.layers.[0-1].self_attn", {"q_proj.weight": (80, 80), "k_proj.weight": (40, 80)}),
        **_at("model.layers.[0-1].self_attn", {"v_proj.weight": (40, 80), "o_proj.weight": (80, 80)}),
        **_at("model.layers.0.block_sparse_moe.mlp", _mlp(72, 80, "w1 w3 w2")),
        "model.layers.1.block_sparse_moe.gate.weight": (3, 80),
        **_at("model.layers.1.block_sparse_moe.experts.[0-2]", _mlp(72, 80, "w1 w3 w2")),
        "model.layers.1.residual_layernorm.weight": (80,),
        **_at("model.layers.1.residual_mlp", _mlp(80, 80, "w1 w3 w2")),
    },
)
REMOTE["phi3small"] = Remote(
    {
        "model_type": "phi3small",
        "hidden_size": 96,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "ff_intermediate_size": 72,
        "vocab_size": 101,
        "num_hidden_layers": 2,
    },
    {
        "model.embed_tokens.weight": (101, 96),
        "model.final_layernorm.weight": (96,),
        "model.final_layernorm.bias": (96,),
        **_at(
            "model.layers.[0-1]",
            {
                **{
                    f"{name}.{part}": (96,)
                    for name in ("input_layernorm", "post_attention_layernorm")
                    for part in ("weight", "bias")
                },
                "self_attn.query_key_value.weight": (192, 96),
                "self_attn.query_key_value.bias": (192,),
                "self_attn.dense.weight": (96, 96),
                "self_attn.dense.bias": (96,),
                "mlp.up_proj.weight": (144, 96),
                "mlp.up_proj.bias": (144,),
                "mlp.down_proj.weight": (96, 72),
                "mlp.down_proj.bias": (96,),
            },
        ),
    },
    parts={
        "model.layers.0.self_attn.query_key_value.weight": (0, [(96, 192)]),
        "model.layers.0.mlp.up_proj.weight": (0, [(72, 144)]),
    },
)
REMOTE["plamo2"] = Remote(
    {
        "model_type": "plamo2",
        "hidden_size": 80,
        "hidden_size_per_head": 12,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "mamba_num_heads": 16,
        "mamba_d_state": 5,
        "mamba_d_conv": 3,
        "intermediate_size": 72,
        "vocab_size": 101,
        "num_hidden_layers": 2,
    },
    {
        "model.embed_tokens.weight": (101, 80),
        "model.norm.weight": (80,),
        **_at(
            "model.layers.layers.[0-1]",
            {
                **{f"{name}_norm.weight": (80,) for name in ("pre_mixer", "post_mixer", "pre_mlp", "post_mlp")},
                "mlp.gate_up_proj.weight": (144, 80),
                "mlp.down_proj.weight": (80, 72),
            },
        ),
        **_at(
            "model.layers.layers.0.mixer",
            {
                "in_proj.weight": (384, 80),
                "conv1d.weight": (192, 1, 3),
                "bcdt_proj.weight": (74, 192),
                "dt_proj.weight": (16, 64),
                "dt_bias": (16,),
                "A_log": (16,),
                "D": (16,),
                "dt_norm_weight": (64,),
                "B_norm_weight": (5,),
                "C_norm_weight": (5,),
                "out_proj.weight": (80, 192),
            },
        ),
        **_at(
            "model.layers.layers.1.mixer",
            {"qkv_proj.weight": (192, 80), "o_proj.weight": (80, 96), "q_weight": (8, 12), "k_weight": (4, 12)},
        ),
    },
    parts={
        "model.layers.layers.0.mixer.in_proj.weight": (0, [(192, 384)]),
        "model.layers.layers.0.mixer.bcdt_proj.weight": (1, [(96, 192)]),
        "model.layers.layers.1.mixer.qkv_proj.weight": _PACKED,
        "model.layers.layers.1.mixer.k_weight": (0, [(2, 4)]),
        "model.layers.layers.0.mlp.gate_up_proj.weight": (0, [(36, 72), (108, 144)]),
    },
)
REMOTE["deci"] = Remote(
    {**_DENSE, "model_type": "deci", "num_key_value_heads_per_layer": [4, 8], "num_hidden_layers": 2},
    {
        **_ENDS,
        **_at("model.layers.[0-1]", {**_NORMS, **_at("mlp", _mlp(72))}),
        **_at("model.layers.0", _QKV),
        **_at("model.layers.1", {**_QKV, "self_attn.k_proj.weight": (96, 80), "self_attn.v_proj.weight": (96, 80)}),
    },
)

# ----------------------------------------------------------------------------------------------- packed q, k and v

# 8 heads of 12, each with a key and a value of its own
_ALL = (0, [(48, 96), (144, 192), (240, 288)])
_WIDE: dict[str, Any] = {**_DENSE, "hidden_size": 96, "num_hidden_layers": 2}
REMOTE["baichuan"] = Remote(
    {**_WIDE, "model_type": "baichuan"},
    {
        "model.embed_tokens.weight": (101, 96),
        "model.norm.weight": (96,),
        "lm_head.weight": (101, 96),
        **_at("model.layers.[0-1]", {"input_layernorm.weight": (96,), "post_attention_layernorm.weight": (96,)}),
        **_at("model.layers.[0-1].self_attn", {"W_pack.weight": (288, 96), "o_proj.weight": (96, 96)}),
        **_at("model.layers.[0-1].mlp", _mlp(72, 96)),
    },
    parts={"model.layers.0.self_attn.W_pack.weight": _ALL},
)
REMOTE["qwen"] = Remote(
    {**_WIDE, "model_type": "qwen", "intermediate_size": 144},
    {
        "transformer.wte.weight": (101, 96),
        "transformer.ln_f.weight": (96,),
        "lm_head.weight": (101, 96),
        **_at("transformer.h.[0-1]", {"ln_1.weight": (96,), "ln_2.weight": (96,)}),
        **_at(
            "transformer.h.[0-1].attn", {"c_attn.weight": (288, 96), "c_attn.bias": (288,), "c_proj.weight": (96, 96)}
        ),
        **_at("transformer.h.[0-1].mlp", _mlp(72, 96, "w2 w1 c_proj")),
    },
    parts={"transformer.h.0.attn.c_attn.weight": _ALL, "transformer.h.0.attn.c_attn.bias": _ALL},
)
REMOTE["chatglm"] = Remote(
    {
        "model_type": "chatglm",
        "hidden_size": 80,
        "num_attention_heads": 8,
        "multi_query_attention": True,
        "multi_query_group_num": 4,
        "kv_channels": 12,
        "ffn_hidden_size": 72,
        "padded_vocab_size": 101,
        "num_layers": 2,
    },
    {
        "transformer.embedding.word_embeddings.weight": (101, 80),
        "transformer.rotary_pos_emb.inv_freq": (3,),
        "transformer.encoder.final_layernorm.weight": (80,),
        "transformer.output_layer.weight": (101, 80),
        **_at("transformer.encoder.layers.[0-1]", _NORMS),
        **_at(
            "transformer.encoder.layers.[0-1]",
            {
                "self_attention.query_key_value.weight": (192, 80),
                "self_attention.query_key_value.bias": (192,),
                "self_attention.dense.weight": (80, 96),
                "mlp.dense_h_to_4h.weight": (144, 80),
                "mlp.dense_4h_to_h.weight": (80, 72),
            },
        ),
    },
    parts={
        "transformer.encoder.layers.0.self_attention.query_key_value.weight": _PACKED,
        "transformer.encoder.layers.0.mlp.dense_h_to_4h.weight": (0, [(36, 72), (108, 144)]),
    },
)
REMOTE["internlm2"] = Remote(
    {**_DENSE, "model_type": "internlm2"},
    {
        "model.tok_embeddings.weight": (101, 80),
        "model.norm.weight": (80,),
        "output.weight": (101, 80),
        **_at("model.layers.[0-2]", {"attention_norm.weight": (80,), "ffn_norm.weight": (80,)}),
        **_at("model.layers.[0-2].attention", {"wqkv.weight": (192, 80), "wo.weight": (80, 96)}),
        **_at("model.layers.[0-2].feed_forward", _mlp(72, 80, "w1 w3 w2")),
    },
    parts={"model.layers.0.attention.wqkv.weight": (0, [(96, 192)])},
)
REMOTE["exaone"] = Remote(
    {**_WIDE, "model_type": "exaone", "num_layers": 2},
    {
        "transformer.wte.weight": (101, 96),
        "transformer.ln_f.weight": (96,),
        "lm_head.weight": (101, 96),
        **_at("transformer.h.[0-1]", {"ln_1.weight": (96,), "ln_2.weight": (96,)}),
        **_at("transformer.h.[0-1].attn.attention", {"q_proj.weight": (96, 96), "k_proj.weight": (48, 96)}),
        **_at("transformer.h.[0-1].attn.attention", {"v_proj.weight": (48, 96), "out_proj.weight": (96, 96)}),
        **_at("transformer.h.[0-1].mlp", _mlp(72, 96, "c_fc_0 c_fc_1 c_proj")),
    },
)

REMOTE["baichuan_m1"] = Remote(
    {
        **_WIDE,
        "model_type": "baichuan_m1",
        "sliding_window_layers": [1],
        "num_swa_attention_heads": 16,
        "num_swa_key_value_heads": 8,
        "conv_window": 2,
    },
    {
        "model.embed_tokens.weight": (101, 96),
        "model.norm.weight": (96,),
        "lm_head.weight": (101, 96),
        **_at("model.layers.[0-1]", {"input_layernorm.weight": (96,), "post_attention_layernorm.weight": (96,)}),
        **_at("model.layers.[0-1].self_attn", {"W_pack.weight": (192, 96), "o_proj.weight": (96, 96)}),
        **_at("model.layers.0.self_attn", {"conv_k": (1, 1, 4, 1, 2), "conv_v": (1, 1, 4, 1, 2)}),
        **_at("model.layers.1.self_attn", {"conv_k": (1, 1, 8, 1, 2), "conv_v": (1, 1, 8, 1, 2)}),
        **_at("model.layers.[0-1].mlp", _mlp(72, 96)),
    },
    parts={
        "model.layers.0.self_attn.W_pack.weight": _PACKED,
        "model.layers.1.self_attn.W_pack.weight": _PACKED,
        "model.layers.1.self_attn.conv_v": (2, [(4, 8)]),
    },
)
REMOTE["hunyuan"] = Remote(
    {
        **_DENSE,
        "model_type": "hunyuan",
        "num_experts": 3,
        "num_shared_expert": 1,
        "use_cla": True,
        "cla_share_factor": 2,
    },
    {
        **_ENDS,
        **_at("model.layers.[0-2]", {**_NORMS, "self_attn.query_layernorm.weight": (12,)}),
        **_at("model.layers.0", {**_QKV, "self_attn.key_layernorm.weight": (12,)}),
        **_at("model.layers.1", {"self_attn.q_proj.weight": (96, 80), "self_attn.o_proj.weight": (80, 96)}),
        **_at("model.layers.2.self_attn", {"qkv_proj.weight": (192, 80), "o_proj.weight": (80, 96)}),
        **_at("model.layers.[0-1].mlp.experts.[0-2]", _mlp(72)),
        **_at("model.layers.[0-1].mlp.shared_mlp", _mlp(72)),
        "model.layers.[0-1].mlp.gate.wg.weight": (3, 80),
        "model.layers.2.mlp.gate_and_up_proj.weight": (144, 80),
        "model.layers.2.mlp.down_proj.weight": (80, 72),
    },
    parts={
        "model.layers.2.self_attn.qkv_proj.weight": (0, [(96, 192)]),
        "model.layers.2.mlp.gate_and_up_proj.weight": (0, [(36, 72), (108, 144)]),
    },
)

# -------------------------------------------------------------------------------------------------- the names of Llama

REMOTE["telechat3"] = Remote(
    {**_DENSE, "model_type": "telechat3"},
    {**_ENDS, **_at("model.layers.[0-2]", {**_NORMS, **_QKV, **_at("mlp", _mlp(72))})},
)
REMOTE["iquestloopcoder"] = Remote(
    {**_DENSE, "model_type": "iquestloopcoder", "loop_num": 2},
    {
        **_ENDS,
        **_at("model.layers.[0-2]", {**_NORMS, **_QKV, **_at("mlp", _mlp(72))}),
        **_at("model.gate_projections.[0-2]", {"weight": (8, 12), "bias": (8,)}),
    },
    parts={"model.gate_projections.2.weight": (0, [(4, 8)])},
)
REMOTE["Klear"] = Remote(
    {
        **_DENSE,
        "model_type": "Klear",
        "num_experts": 3,
        "n_shared_experts": 2,
        "moe_intermediate_size": 24,
        "mlp_only_layers": [0],
    },
    {
        **_ENDS,
        **_at("model.layers.[0-2]", {**_NORMS, **_QKV}),
        **_at("model.layers.[0-2].self_attn", {"q_norm.weight": (12,), "k_norm.weight": (12,)}),
        **_at("model.layers.0.mlp", _mlp(72)),
        **_at("model.layers.[1-2].mlp", {"gate.weight": (3, 80), "expert_bias": (3,)}),
        **_at("model.layers.[1-2].mlp", {"coefficient.weight": (2, 80), "coefficient.bias": (2,)}),
        **_at("model.layers.[1-2].mlp.experts.[0-2]", _mlp(24)),
        **_at("model.layers.[1-2].mlp.shared_experts", _mlp(48)),
    },
)
REMOTE["NemotronH_Nano_VL_V2"] = Remote(
    {
        "model_type": "NemotronH_Nano_VL_V2",
        "llm_config": {**_DENSE, "model_type": "nemotron_h", "num_hidden_layers": 2, "hybrid_override_pattern": "*-"},
        "vision_config": {"hidden_size": 32},
    },
    {
        "language_model.backbone.embeddings.weight": (101, 80),
        "language_model.backbone.norm_f.weight": (80,),
        "language_model.lm_head.weight": (101, 80),
        "language_model.backbone.layers.[0-1].norm.weight": (80,),
        **_at(
            "language_model.backbone.layers.0.mixer",
            {key.removeprefix("self_attn."): shape for key, shape in _QKV.items()},
        ),
        **_at("language_model.backbone.layers.1.mixer", {"up_proj.weight": (72, 80), "down_proj.weight": (80, 72)}),
        "vision_model.radio_model.model.blocks.0.attn.qkv.weight": (96, 32),
        "mlp1.1.weight": (64, 128),
    },
)

# ------------------------------------------------------- towers and voices around a language model, names from memory

_QK_NORMS: dict[str, Shape] = {"self_attn.q_norm.weight": (12,), "self_attn.k_norm.weight": (12,)}
_THINKER: dict[str, Shape] = {
    **{f"thinker.{name}": shape for name, shape in _ENDS.items()},
    **_at("thinker.model.layers.[0-2]", {**_NORMS, **_QKV}),
    "thinker.visual.patch_embed.proj.weight": (32, 3, 2, 4, 4),
    "thinker.audio_tower.ln_post.weight": (28,),
}
REMOTE["qwen2_5_omni"] = Remote(
    {
        "model_type": "qwen2_5_omni",
        "thinker_config": {
            "model_type": "qwen2_5_omni_thinker",
            "text_config": {**_DENSE, "model_type": "qwen2_5_omni_text"},
            "vision_config": {"hidden_size": 32},
        },
        "talker_config": {"hidden_size": 28, "num_attention_heads": 3, "vocab_size": 19},
    },
    {
        **_THINKER,
        **_at("thinker.model.layers.[0-2]", {**_QKV_BIAS, **_at("mlp", _mlp(72))}),
        **_at("talker.model.layers.0.self_attn", {"q_proj.weight": (33, 28), "q_proj.bias": (33,)}),
        "talker.codec_head.weight": (19, 28),
        "talker.thinker_to_talker_proj.weight": (28, 80),
        "token2wav.code2wav_dit_model.transformer_blocks.0.attn.to_q.weight": (22, 22),
    },
)
REMOTE["qwen3_omni_moe"] = Remote(
    {
        "model_type": "qwen3_omni_moe",
        "thinker_config": {
            "model_type": "qwen3_omni_moe_thinker",
            "text_config": {
                **_DENSE,
                "model_type": "qwen3_omni_moe_text",
                "num_experts": 3,
                "moe_intermediate_size": 24,
            },
        },
        "talker_config": {"text_config": {"hidden_size": 28, "num_experts": 5}},
    },
    {
        **_THINKER,
        **_at("thinker.model.layers.[0-2]", _QK_NORMS),
        **_at("thinker.model.layers.[0-2].mlp.experts.[0-2]", _mlp(24)),
        "thinker.model.layers.[0-2].mlp.gate.weight": (3, 80),
        "talker.model.layers.0.mlp.experts.4.gate_proj.weight": (10, 28),
        "talker.code_predictor.lm_head.0.weight": (19, 28),
        "code2wav.code_embedding.weight": (19, 28),
    },
)
_INTERN_TOWER: dict[str, Shape] = {
    "vision_model.embeddings.class_embedding": (1, 1, 32),
    "vision_model.encoder.layers.[0-1].attn.qkv.weight": (96, 32),
    "mlp1.1.weight": (80, 128),
    "mlp1.1.bias": (80,),
}
REMOTE["internvl_chat-internlm2"] = Remote(
    {"model_type": "internvl_chat", "llm_config": {**_DENSE, "model_type": "internlm2"}, "vision_config": {}},
    {**_INTERN_TOWER, **_at("language_model", REMOTE["internlm2"].tensors)},
    parts={"language_model.model.layers.0.attention.wqkv.weight": (0, [(96, 192)])},
)
REMOTE["internvl_chat-qwen2"] = Remote(
    {"model_type": "internvl_chat", "llm_config": {**_DENSE, "model_type": "qwen2"}, "vision_config": {}},
    {
        **_INTERN_TOWER,
        **_at("language_model", _ENDS),
        **_at("language_model.model.layers.[0-2]", {**_NORMS, **_QKV, **_QKV_BIAS, **_at("mlp", _mlp(72))}),
    },
)
REMOTE["internvl_chat-qwen3_moe"] = Remote(
    {
        "model_type": "internvl_chat",
        "llm_config": {**_DENSE, "model_type": "qwen3_moe", "num_experts": 3, "moe_intermediate_size": 24},
        "vision_config": {},
    },
    {
        **_INTERN_TOWER,
        **_at("language_model", _ENDS),
        **_at("language_model.model.layers.[0-2]", {**_NORMS, **_QKV, **_QK_NORMS, "mlp.gate.weight": (3, 80)}),
        **_at("language_model.model.layers.[0-2].mlp.experts.[0-2]", _mlp(24)),
    },
)
REMOTE["internvl_chat-gpt_oss"] = Remote(
    {
        "model_type": "internvl_chat",
        "llm_config": {**_DENSE, "model_type": "gpt_oss", "intermediate_size": 40, "num_local_experts": 3},
        "vision_config": {},
    },
    {
        **_INTERN_TOWER,
        **_at("language_model", _ENDS),
        **_at("language_model.model.layers.[0-2]", {**_NORMS, **_QKV, **_QKV_BIAS}),
        **_at("language_model.model.layers.[0-2].self_attn", {"o_proj.bias": (80,), "sinks": (8,)}),
        **_at("language_model.model.layers.[0-2].mlp.router", {"weight": (3, 80), "bias": (3,)}),
        **_at(
            "language_model.model.layers.[0-2].mlp.experts",
            {
                "gate_up_proj": (3, 80, 80),
                "gate_up_proj_bias": (3, 80),
                "down_proj": (3, 40, 80),
                "down_proj_bias": (3, 80),
            },
        ),
    },
    parts={
        "language_model.model.layers.1.mlp.experts.gate_up_proj": (2, [(40, 80)]),
        "language_model.model.layers.1.mlp.experts.down_proj": (1, [(20, 40)]),
    },
)
# 8 heads of 14 + 6 for q and k and of 10 for v, experts behind a dense layer
_DEEPSEEK: dict[str, Any] = {
    **{key: value for key, value in _DENSE.items() if key != "head_dim"},
    "num_key_value_heads": 8,
    "q_lora_rank": None,
    "kv_lora_rank": 20,
    "qk_nope_head_dim": 14,
    "qk_rope_head_dim": 6,
    "v_head_dim": 10,
    "moe_intermediate_size": 24,
    "n_routed_experts": 3,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
}
_LATENT: dict[str, Shape] = {
    "self_attn.q_proj.weight": (160, 80),
    "self_attn.kv_a_proj_with_mqa.weight": (26, 80),
    "self_attn.kv_a_layernorm.weight": (20,),
    "self_attn.kv_b_proj.weight": (192, 20),
    "self_attn.o_proj.weight": (80, 80),
}
_DEEPSEEK_MLPS: dict[str, Shape] = {
    **_at("0.mlp", _mlp(72)),
    "[1-2].mlp.gate.weight": (3, 80),
    "[1-2].mlp.gate.e_score_correction_bias": (3,),
    **_at("[1-2].mlp.experts.[0-2]", _mlp(24)),
    **_at("[1-2].mlp.shared_experts", _mlp(48)),
}
REMOTE["kimi_vl"] = Remote(
    {"model_type": "kimi_vl", "text_config": {**_DEEPSEEK, "model_type": "deepseek_v3"}, "vision_config": {}},
    {
        **_at("language_model", _ENDS),
        **_at("language_model.model.layers", {**_at("[0-2]", {**_NORMS, **_LATENT}), **_DEEPSEEK_MLPS}),
        "multi_modal_projector.pre_norm.weight": (32,),
        "multi_modal_projector.linear_1.weight": (128, 128),
        "multi_modal_projector.linear_2.weight": (80, 128),
        "vision_tower.patch_embed.proj.weight": (32, 3, 4, 4),
        "vision_tower.patch_embed.pos_emb.weight": (5, 6, 32),
        "vision_tower.encoder.blocks.[0-1].wqkv.weight": (96, 32),
        "vision_tower.encoder.blocks.[0-1].mlp.fc0.weight": (44, 32),
    },
    parts={"language_model.model.layers.2.self_attn.kv_b_proj.weight": (0, [(96, 192)])},
)
REMOTE["deepseek_vl_v2"] = Remote(
    {"model_type": "deepseek_vl_v2", "language_config": {**_DEEPSEEK, "model_type": "deepseek_v2"}},
    {
        **_at("language", _ENDS),
        **_at("language.model.layers", {**_at("[0-2]", {**_NORMS, **_LATENT}), **_DEEPSEEK_MLPS}),
        "vision.blocks.[0-1].attn.qkv.weight": (96, 32),
        "projector.layers.0.weight": (80, 128),
        "image_newline": (80,),
        "view_seperator": (80,),
    },
)
REMOTE["deepseek_vl_v2-ocr"] = Remote(
    {
        "model_type": "deepseek_vl_v2",
        "language_config": {**_DEEPSEEK, "model_type": "deepseek_v2", "kv_lora_rank": None, "use_mla": False}
        | dict.fromkeys(("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"), 0),
    },
    {
        **_ENDS,
        **_at("model.layers", {**_at("[0-2]", _NORMS), **_DEEPSEEK_MLPS}),
        **_at("model.layers.[0-2].self_attn", {f"{name}_proj.weight": (80, 80) for name in "qkvo"}),
        "model.sam_model.blocks.[0-1].attn.qkv.weight": (96, 32),
        "model.vision_model.transformer.layers.0.self_attn.qkv_proj.weight": (96, 32),
        "model.projector.layers.weight": (80, 64),
        "model.image_newline": (80,),
        "model.view_seperator": (80,),
    },
)

# ------------------------------------------------------------------------------------------ towers for sound, and text

# as published: the 32 heads, that there are as many of keys, the 32 layers (and the width of 4096) are nowhere said
REMOTE["qwen2_audio"] = Remote(
    {
        "model_type": "qwen2_audio",
        "audio_config": {"model_type": "qwen2_audio_encoder", "d_model": 28},
        "text_config": {"model_type": "qwen2", "hidden_size": 64, "intermediate_size": 80, "vocab_size": 101},
        "vocab_size": 101,
    },
    {
        "language_model.model.embed_tokens.weight": (101, 64),
        "language_model.model.norm.weight": (64,),
        "language_model.lm_head.weight": (101, 64),
        **_at(
            "language_model.model.layers.[0-31]",
            {
                "input_layernorm.weight": (64,),
                "post_attention_layernorm.weight": (64,),
                **{f"self_attn.{name}_proj.weight": (64, 64) for name in "qkv"},
                **{f"self_attn.{name}_proj.bias": (64,) for name in "qkv"},
                "self_attn.o_proj.weight": (64, 64),
                **_at("mlp", _mlp(80, 64)),
            },
        ),
        "audio_tower.conv1.weight": (28, 8, 3),
        "audio_tower.layers.[0-1].self_attn.q_proj.weight": (28, 28),
        "multi_modal_projector.linear.weight": (64, 28),
    },
    degrees=(2, 4, 8, 16),
)
_QWEN3_ASR: dict[str, Shape] = {
    "thinker.model.embed_tokens.weight": (101, 80),
    **_at("thinker.model.layers.[0-2]", {**_NORMS, **_QKV, **_at("mlp", _mlp(72))}),
    "thinker.model.layers.[0-2].self_attn.q_norm.weight": (12,),
    "thinker.model.layers.[0-2].self_attn.k_norm.weight": (12,),
    "thinker.model.norm.weight": (80,),
    "thinker.audio_tower.conv2d1.weight": (6, 1, 3, 3),
    "thinker.audio_tower.layers.[0-1].self_attn.q_proj.weight": (28, 28),
    "thinker.audio_tower.layers.[0-1].fc1.weight": (44, 28),
    "thinker.audio_tower.proj2.weight": (80, 28),
}
REMOTE["qwen3_asr"] = Remote(
    {"model_type": "qwen3_asr", "thinker_config": {"text_config": _DENSE, "audio_config": {}}},
    {**_QWEN3_ASR, "thinker.lm_head.weight": (101, 80)},
)
REMOTE["qwen3_asr-aligner"] = Remote(
    {
        "model_type": "qwen3_asr",
        "thinker_config": {
            "model_type": "qwen3_forced_aligner",
            "classify_num": 50,
            "text_config": _DENSE,
            "audio_config": {},
        },
    },
    {**_QWEN3_ASR, "thinker.lm_head.weight": (50, 80)},
)
REMOTE["voxtral_realtime"] = Remote(
    {"model_type": "voxtral_realtime", "text_config": _DENSE, "audio_config": {}, "tie_word_embeddings": True},
    {
        "language_model.model.embed_tokens.weight": (101, 80),
        "language_model.model.norm.weight": (80,),
        **_at("language_model.model.layers.[0-2]", {**_NORMS, **_QKV, **_at("mlp", _mlp(72))}),
        "language_model.model.layers.[0-2].ada_rms_norm.linear1.weight": (32, 80),
        "language_model.model.layers.[0-2].ada_rms_norm.linear2.weight": (80, 32),
        "audio_tower.embedder.conv1.weight": (28, 8, 3),
        "audio_tower.layers.[0-1].self_attn.q_proj.weight": (20, 28),
        "audio_tower.layers.[0-1].mlp.gate_proj.weight": (44, 28),
        "multi_modal_projector.linear_1.weight": (80, 112),
        "multi_modal_projector.linear_2.weight": (80, 80),
    },
)
REMOTE["kyutai_speech_to_text"] = Remote(
    {
        **{key: value for key, value in _DENSE.items() if key != "intermediate_size"},
        "model_type": "kyutai_speech_to_text",
        "ffn_dim": 144,
        "num_codebooks": 5,
        "codebook_vocab_size": 11,
    },
    {
        "model.embed_tokens.embed_tokens.weight": (157, 80),
        "model.norm.weight": (80,),
        "lm_head.weight": (101, 80),
        **_at("model.layers.[0-2]", _NORMS),
        **{f"model.layers.[0-2].{key.replace('_proj', '_proj.linear')}": shape for key, shape in _QKV.items()},
        "model.layers.[0-2].mlp.fc1.weight": (144, 80),
        "model.layers.[0-2].mlp.fc2.weight": (80, 72),
        "codec_model.encoder.layers.0.conv.weight": (4, 1, 7),
        "codec_model.quantizer.acoustic_residual_vector_quantizer.layers.[0-1].codebook.initialized": (1,),
    },
    parts={"model.layers.2.mlp.fc1.weight": (0, [(36, 72), (108, 144)])},
)
REMOTE["nemo_speechlm"] = Remote(
    {
        "model_type": "nemo_speechlm",
        "text_config": {
            **_DENSE,
            "model_type": "nemotron_h",
            "num_hidden_layers": 2,
            "layers_block_type": ["attention", "moe"],
            "moe_intermediate_size": 24,
            "moe_shared_expert_intermediate_size": 40,
            "n_routed_experts": 5,
        },
    },
    {
        "llm.model.embed_tokens.weight": (101, 80),
        "llm.model.layers.[0-1].norm.weight": (80,),
        **{f"llm.model.layers.0.mixer.{key.split('.', 1)[1]}": shape for key, shape in _QKV.items()},
        "llm.model.layers.0.mixer.q_proj._extra_state": (0,),
        "llm.model.layers.1.mixer.gate.weight": (5, 80),
        "llm.model.layers.1.mixer.gate.e_score_correction_bias": (5,),
        "llm.model.layers.1.mixer.experts.gate_and_up_projs": (5, 80, 24),
        "llm.model.layers.1.mixer.experts.down_projs": (5, 24, 80),
        "llm.model.layers.1.mixer.shared_experts.up_proj.weight": (40, 80),
        "llm.model.layers.1.mixer.shared_experts.down_proj.weight": (80, 40),
        "llm.model.norm.weight": (80,),
        "llm.lm_head.weight": (101, 80),
        "llm.mtp.layers.0.eh_proj.weight": (80, 160),
        "perception.encoder.asr_encoder.layers.0.attn.w_qkv.weight": (96, 32),
        "perception.proj.weight": (80, 32),
        "ctc_timestamp.decoder.residual_scale": (),
    },
    parts={
        "llm.model.layers.1.mixer.experts.gate_and_up_projs": (2, [(12, 24)]),
        "llm.model.layers.1.mixer.experts.down_projs": (1, [(12, 24)]),
    },
)

# the published names of Florence-2, and IDEFICS, whose forward asks for an image
_BART: dict[str, Shape] = {
    **{f"self_attn.{name}_proj.weight": (80, 80) for name in ("q", "k", "v", "out")},
    **{f"self_attn.{name}_proj.bias": (80,) for name in ("q", "k", "v", "out")},
    **dict.fromkeys(("self_attn_layer_norm.weight", "self_attn_layer_norm.bias"), (80,)),
    **dict.fromkeys(("final_layer_norm.weight", "final_layer_norm.bias", "fc2.bias"), (80,)),
}
_BART_ENDS: dict[str, Shape] = {
    "embed_tokens.weight": (101, 80),
    "embed_positions.weight": (66, 80),
    "layernorm_embedding.weight": (80,),
    "layernorm_embedding.bias": (80,),
}
REMOTE["florence2-published"] = Remote(
    {
        "model_type": "florence2",
        "text_config": {
            "model_type": "florence2_language",
            "d_model": 80,
            "encoder_layers": 2,
            "decoder_layers": 3,
            "encoder_attention_heads": 8,
            "decoder_attention_heads": 16,
            "encoder_ffn_dim": 72,
            "decoder_ffn_dim": 88,
            "vocab_size": 101,
            "max_position_embeddings": 64,
        },
        "vision_config": {},
    },
    {
        "language_model.final_logits_bias": (1, 101),
        "language_model.lm_head.weight": (101, 80),
        "language_model.model.shared.weight": (101, 80),
        **_at("language_model.model.encoder", _BART_ENDS),
        **_at("language_model.model.decoder", _BART_ENDS),
        **_at(
            "language_model.model.encoder.layers.[0-1]",
            {**_BART, "fc1.weight": (72, 80), "fc1.bias": (72,), "fc2.weight": (80, 72)},
        ),
        **_at(
            "language_model.model.decoder.layers.[0-2]",
            {
                **_BART,
                **{name.replace("self", "encoder"): shape for name, shape in _BART.items() if "self" in name},
                "fc1.weight": (88, 80),
                "fc1.bias": (88,),
                "fc2.weight": (80, 88),
            },
        ),
        "vision_tower.blocks.0.0.spatial_block.window_attn.fn.qkv.weight": (24, 8),
        "image_projection": (12, 80),
        "image_proj_norm.weight": (80,),
        "image_pos_embed.row_embeddings.weight": (50, 6),
        "visual_temporal_embed.pos_idx_to_embed": (100, 12),
    },
)
REMOTE["idefics"] = Remote(
    {
        **{key: value for key, value in _DENSE.items() if key not in ("head_dim", "num_key_value_heads")},
        "model_type": "idefics",
        "additional_vocab_size": 2,
        "cross_layer_interval": 2,
        "vision_config": {"embed_dim": 32},
    },
    {
        **_ENDS,
        "model.embed_tokens.additional_embedding.weight": (2, 80),
        "lm_head.additional_fc.weight": (2, 80),
        **_at("model.layers.[0-2]", {**_NORMS, **_at("mlp", _mlp(72))}),
        **_at("model.layers.[0-2].self_attn", {f"{name}_proj.weight": (80, 80) for name in "qkvo"}),
        "model.layers.[0-2].self_attn.rotary_emb.inv_freq": (5,),
        **_at(
            "model.gated_cross_attn_layers.0",
            {
                **_NORMS,
                **_at("mlp", _mlp(72)),
                **_at("cross_attn", {f"{name}_proj.weight": (80, 80) for name in "qo"}),
                **_at("cross_attn", {f"{name}_proj.weight": (80, 32) for name in "kv"}),
                **_at("cross_attn", {"q_layer_norm.weight": (10,), "k_layer_norm.weight": (10,)}),
                "alpha_cross_attn": (1, 1, 80),
                "alpha_dense": (1, 1, 80),
            },
        ),
        "model.vision_model.embeddings.class_embedding": (32,),
        "model.perceiver_resampler.latents": (5, 32),
    },
)

# --------------------- remote code around a language model: MiniCPM, Ovis, Phi, Molmo, MiniMax, names from public code

_UNDER_LLM: dict[str, Shape] = {f"llm.{name}": shape for name, shape in _ENDS.items()}
_MINICPM_TOWER: dict[str, Shape] = {
    "vpm.embeddings.patch_embedding.weight": (32, 3, 4, 4),
    "vpm.encoder.layers.[0-1].self_attn.q_proj.weight": (32, 32),
    "resampler.query": (5, 80),
    "resampler.kv_proj.weight": (80, 32),
    "resampler.attn.in_proj_weight": (240, 80),
}
REMOTE["minicpmv-2.6"] = Remote(
    {**_DENSE, "model_type": "minicpmv", "vision_config": {"hidden_size": 32}, "query_num": 5},
    {
        **_UNDER_LLM,
        **_MINICPM_TOWER,
        **_at("llm.model.layers.[0-2]", {**_NORMS, **_QKV, **_QKV_BIAS, **_at("mlp", _mlp(72))}),
    },
)
REMOTE["minicpmv-4.5"] = Remote(
    {**_DENSE, "model_type": "minicpmv", "version": 4.5, "vision_config": {"hidden_size": 32}},
    {
        **_UNDER_LLM,
        **_MINICPM_TOWER,
        **_at("llm.model.layers.[0-2]", {**_NORMS, **_QKV, **_QK_NORMS, **_at("mlp", _mlp(72))}),
    },
)
REMOTE["minicpmo"] = Remote(
    {
        **_DENSE,
        "model_type": "minicpmo",
        "vision_config": {"hidden_size": 32},
        "audio_config": {"d_model": 28},
        "tts_config": {"hidden_size": 44, "num_attention_heads": 11, "num_text_tokens": 23},
    },
    {
        **_UNDER_LLM,
        **_MINICPM_TOWER,
        **_at("llm.model.layers.[0-2]", {**_NORMS, **_QKV, **_QKV_BIAS, **_at("mlp", _mlp(72))}),
        "apm.conv1.weight": (28, 8, 3),
        "apm.layers.[0-1].self_attn.out_proj.weight": (28, 28),
        "audio_projection_layer.linear1.weight": (80, 28),
        "tts.emb_text.weight": (23, 44),
        "tts.model.layers.0.self_attn.q_proj.weight": (44, 44),
        "tts.head_code.0.parametrizations.weight.original0": (9, 1),
        "tts.dvae.coef": (1, 10, 1),
    },
)
_OVIS: dict[str, Shape] = {
    **_UNDER_LLM,
    "visual_tokenizer.head.0.weight": (59, 128),
    "visual_tokenizer.head.1.weight": (59,),
    "vte.weight": (64, 80),
}
REMOTE["ovis-qwen2"] = Remote(
    {"model_type": "ovis", "llm_config": {**_DENSE, "model_type": "qwen2"}, "visual_tokenizer_config": {}},
    {
        **_OVIS,
        **_at("llm.model.layers.[0-2]", {**_NORMS, **_QKV, **_QKV_BIAS, **_at("mlp", _mlp(72))}),
        "visual_tokenizer.backbone.trunk.blocks.0.attn.qkv.weight": (96, 32),
    },
)
REMOTE["ovis-gemma2"] = Remote(
    {"model_type": "ovis", "llm_config": {**_DENSE, "model_type": "gemma2"}, "visual_tokenizer_config": {}},
    {
        **{name: shape for name, shape in _OVIS.items() if "lm_head" not in name},
        **_at("llm.model.layers.[0-2]", {**_NORMS, **_QKV, **_at("mlp", _mlp(72))}),
        **{f"llm.model.layers.[0-2].{side}_feedforward_layernorm.weight": (80,) for side in ("pre", "post")},
        "visual_tokenizer.backbone.vision_model.embeddings.position_embedding.weight": (9, 32),
    },
)
REMOTE["ovis2_5"] = Remote(
    {"model_type": "ovis2_5", "llm_config": {**_DENSE, "model_type": "qwen3"}, "vit_config": {"hidden_size": 32}},
    {
        **_OVIS,
        **_at("llm.model.layers.[0-2]", {**_NORMS, **_QKV, **_QK_NORMS, **_at("mlp", _mlp(72))}),
        "visual_tokenizer.vit.vision_model.encoder.layers.[0-1].self_attn.q_proj.weight": (32, 32),
    },
)
_HALVES = (0, [(36, 72), (108, 144)])  # of gate and up in one matrix
REMOTE["phi3_v"] = Remote(
    {**_DENSE, "model_type": "phi3_v", "img_processor": {"image_dim_out": 32}, "embd_layer": {}},
    {
        **_ENDS,
        **_at(
            "model.layers.[0-2]",
            {
                **_NORMS,
                "self_attn.qkv_proj.weight": (192, 80),
                "self_attn.o_proj.weight": (80, 96),
                "mlp.gate_up_proj.weight": (144, 80),
                "mlp.down_proj.weight": (80, 72),
            },
        ),
        "model.vision_embed_tokens.wte.weight": (101, 80),
        "model.vision_embed_tokens.glb_GN": (1, 1, 128),
        "model.vision_embed_tokens.sub_GN": (1, 1, 1, 128),
        "model.vision_embed_tokens.img_processor.vision_model.encoder.layers.0.self_attn.q_proj.weight": (32, 32),
        "model.vision_embed_tokens.img_projection.0.weight": (80, 128),
    },
    parts={
        "model.layers.2.self_attn.qkv_proj.weight": _PACKED,
        "model.layers.2.mlp.gate_up_proj.weight": _HALVES,
    },
)
REMOTE["phi4mm"] = Remote(
    {
        **_DENSE,
        "model_type": "phi4mm",
        "tie_word_embeddings": True,
        "vision_lora": {"r": 14, "lora_alpha": 28},
        "speech_lora": {"r": 22, "lora_alpha": 44},
    },
    {
        "model.embed_tokens.weight": (101, 80),
        "model.norm.weight": (80,),
        **_at("model.layers.[0-2]", _NORMS),
        **_at(
            "model.layers.[0-2]",
            {
                f"{name}.{key}.weight": shape
                for name, rows, columns in (
                    ("self_attn.qkv_proj", 192, 80),
                    ("self_attn.o_proj", 80, 96),
                    ("mlp.gate_up_proj", 144, 80),
                    ("mlp.down_proj", 80, 72),
                )
                for key, shape in {
                    "base_layer": (rows, columns),
                    "lora_A.vision": (14, columns),
                    "lora_B.vision": (rows, 14),
                    "lora_A.speech": (22, columns),
                    "lora_B.speech": (rows, 22),
                }.items()
            },
        ),
        "model.embed_tokens_extend.image_embed.glb_GN": (1, 1, 32),
        "model.embed_tokens_extend.image_embed.img_projection.0.weight": (80, 32),
        "model.embed_tokens_extend.audio_embed.encoder.encoders.0.self_attn.linear_q.weight": (28, 28),
        "model.embed_tokens_extend.audio_embed.audio_projection.speech.0.weight": (80, 28),
    },
    parts={
        "model.layers.0.self_attn.qkv_proj.base_layer.weight": _PACKED,
        "model.layers.0.self_attn.qkv_proj.lora_A.vision.weight": (0, [(0, 14)]),
        "model.layers.0.self_attn.qkv_proj.lora_B.vision.weight": _PACKED,
        "model.layers.0.self_attn.qkv_proj.lora_B.speech.weight": _PACKED,
        "model.layers.0.self_attn.o_proj.lora_A.vision.weight": (1, [(48, 96)]),
        "model.layers.0.self_attn.o_proj.lora_B.vision.weight": (0, [(0, 80)]),
        "model.layers.0.mlp.gate_up_proj.base_layer.weight": _HALVES,
        "model.layers.0.mlp.gate_up_proj.lora_B.speech.weight": _HALVES,
        "model.layers.0.mlp.down_proj.lora_A.speech.weight": (1, [(36, 72)]),
        "model.layers.0.mlp.down_proj.lora_B.speech.weight": (0, [(0, 80)]),
    },
)
# 8 heads of 12 in a width of 96, from which the type takes the size of a head; both tables have a row more than tokens
_MOLMO: dict[str, Any] = {
    "model_type": "molmo",
    "hidden_size": 96,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "intermediate_size": 144,
    "vocab_size": 100,
    "embedding_size": 101,
    "num_hidden_layers": 2,
}
_MOLMO_TENSORS: dict[str, Shape] = {
    "model.transformer.wte.embedding": (101, 96),
    "model.transformer.wte.new_embedding": (6, 96),
    "model.transformer.ln_f.weight": (96,),
    "model.transformer.ff_out.weight": (101, 96),
    **_at(
        "model.transformer.blocks.[0-1]",
        {
            "attn_norm.weight": (96,),
            "att_proj.weight": (192, 96),
            "attn_out.weight": (96, 96),
            "ff_norm.weight": (96,),
            "ff_proj.weight": (144, 96),
            "ff_out.weight": (96, 72),
        },
    ),
    "model.vision_backbone.pad_embed": (2, 64),
    "model.vision_backbone.image_pooling_2d.wq.weight": (32, 64),
    "model.vision_backbone.image_projector.w1.weight": (72, 32),
    "model.vision_backbone.image_vit.transformer.resblocks.[0-1].attention.wk.weight": (32, 32),
}
_MOLMO_PARTS: dict[str, tuple[int, list[tuple[int, int]]]] = {
    "model.transformer.wte.embedding": (0, [(0, 101)]),
    "model.transformer.blocks.1.att_proj.weight": _PACKED,
    "model.transformer.blocks.1.ff_proj.weight": _HALVES,
}
REMOTE["molmo"] = Remote(
    {**_MOLMO, "qkv_bias": True, "attention_layer_norm": False},
    {**_MOLMO_TENSORS, "model.transformer.blocks.[0-1].att_proj.bias": (192,)},
    parts={**_MOLMO_PARTS, "model.transformer.blocks.1.att_proj.bias": _PACKED},
)
REMOTE["molmo-norms"] = Remote(
    {**_MOLMO, "qkv_bias": False, "attention_layer_norm": True, "norm_after": True},
    {
        **_MOLMO_TENSORS,
        "model.transformer.blocks.[0-1].q_norm.weight": (96,),
        "model.transformer.blocks.[0-1].k_norm.weight": (48,),
    },
    parts={**_MOLMO_PARTS, "model.transformer.blocks.0.k_norm.weight": (0, [(24, 48)])},
)
_MINIMAX: dict[str, Any] = {**_DENSE, "num_local_experts": 3, "attn_type_list": [0, 1, 0]}
_MINIMAX_LAYERS: dict[str, Shape] = {
    **_at("model.layers.[0-2]", _NORMS),
    **_at("model.layers.1", _QKV),
    **{
        f"model.layers.{layer}.self_attn.{name}.weight": shape
        for layer in (0, 2)
        for name, shape in {
            "qkv_proj": (288, 80),
            "output_gate": (96, 80),
            "norm": (96,),
            "out_proj": (80, 96),
        }.items()
    },
    "model.layers.[0-2].block_sparse_moe.gate.weight": (3, 80),
    **_at("model.layers.[0-2].block_sparse_moe.experts.[0-2]", _mlp(72, 80, "w1 w3 w2")),
}
for _name in ("minimax_text_01", "minimax_m1"):
    REMOTE[_name] = Remote(
        {**_MINIMAX, "model_type": _name},
        {**_ENDS, **_MINIMAX_LAYERS},
        parts={
            "model.layers.2.self_attn.qkv_proj.weight": (0, [(144, 288)]),
            "model.layers.2.self_attn.norm.weight": (0, [(48, 96)]),
        },
    )
REMOTE["minimax_vl_01"] = Remote(
    {
        "model_type": "minimax_vl_01",
        "text_config": {**_MINIMAX, "model_type": "minimax_text_01"},
        "vision_config": {"model_type": "clip_vision_model", "hidden_size": 32},
    },
    {
        **{f"language_model.{name}": shape for name, shape in {**_ENDS, **_MINIMAX_LAYERS}.items()},
        "vision_tower.vision_model.encoder.layers.[0-1].self_attn.q_proj.weight": (32, 32),
        "multi_modal_projector.linear_1.weight": (80, 32),
        "multi_modal_projector.linear_2.bias": (80,),
        "image_newline": (80,),
    },
    parts={"language_model.model.layers.0.self_attn.qkv_proj.weight": (0, [(144, 288)])},
)

# ------------------------------------------------------------------------------------- assistants, without k and v

for _name in ("gemma4_assistant", "gemma4_unified_assistant"):
    REMOTE[_name] = Remote(
        {
            "model_type": _name,
            "backbone_hidden_size": 52,
            "use_ordered_embeddings": True,
            "num_centroids": 7,
            "text_config": {
                **_DENSE,
                "model_type": _name.replace("assistant", "text"),
                "global_head_dim": 20,
                "num_global_key_value_heads": 2,
                "num_kv_shared_layers": 3,
                "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
            },
        },
        {
            "model.embed_tokens.weight": (101, 80),
            "model.norm.weight": (80,),
            **_at("model.layers.[0-2]", _NORMS),
            **{f"model.layers.[0-2].{side}_feedforward_layernorm.weight": (80,) for side in ("pre", "post")},
            **_at("model.layers.[0-2].mlp", _mlp(72)),
            "model.layers.[0-2].layer_scalar": (1,),
            "model.layers.[0-1].self_attn.q_proj.weight": (96, 80),
            "model.layers.[0-1].self_attn.q_norm.weight": (12,),
            "model.layers.[0-1].self_attn.o_proj.weight": (80, 96),
            "model.layers.2.self_attn.q_proj.weight": (160, 80),
            "model.layers.2.self_attn.q_norm.weight": (20,),
            "model.layers.2.self_attn.o_proj.weight": (80, 160),
            "pre_projection.weight": (80, 104),
            "post_projection.weight": (52, 80),
            "masked_embedding.centroids.weight": (7, 80),
            "masked_embedding.token_ordering": (101,),
        },
        parts={
            "model.layers.2.self_attn.q_proj.weight": (0, [(80, 160)]),
            "model.layers.0.self_attn.o_proj.weight": (1, [(48, 96)]),
        },
    )

# ------------------------------------------- remote code: Qwen2, Qwen3 and Llama beside images or under another name

_FLAT_VL: dict[str, Any] = {**_DENSE, "vision_config": {"embed_dim": 32, "hidden_size": 36, "num_hidden_layers": 2}}
REMOTE["dots_ocr"] = Remote(
    {**_FLAT_VL, "model_type": "dots_ocr"},
    {
        **_ENDS,
        **_at("model.layers.[0-2]", {**_NORMS, **_QKV, **_QKV_BIAS, **_at("mlp", _mlp(72))}),
        "vision_tower.patch_embed.patchifier.proj.weight": (32, 3, 4, 4),
        "vision_tower.blocks.[0-1].attn.qkv.weight": (96, 32),
        "vision_tower.blocks.[0-1].mlp.fc13.weight": (56, 32),
        "vision_tower.merger.mlp.2.weight": (80, 128),
        "vision_tower.merger.mlp.2.bias": (80,),
    },
    parts={"model.layers.0.self_attn.o_proj.weight": (1, [(48, 96)])},
)
for _name in ("Keye", "KeyeVL1_5"):
    REMOTE[_name] = Remote(
        {**_FLAT_VL, "model_type": _name},
        {
            **_ENDS,
            **_at("model.layers.[0-2]", {**_NORMS, **_QKV, **_QK_NORMS, **_at("mlp", _mlp(72))}),
            "visual.vision_model.embeddings.position_embedding.weight": (30, 32),
            "visual.vision_model.encoder.layers.[0-1].self_attn.q_proj.weight": (32, 32),
            "visual.vision_model.encoder.layers.[0-1].mlp.fc1.weight": (44, 32),
            "mlp_AR.pre_norm.weight": (32,),
            "mlp_AR.linear_1.weight": (128, 128),
            "mlp_AR.linear_2.weight": (80, 128),
        },
        parts={"model.layers.0.mlp.gate_proj.weight": (0, [(36, 72)])},
    )
REMOTE["NVLM_D"] = Remote(
    {"model_type": "NVLM_D", "llm_config": {**_DENSE, "model_type": "qwen2"}, "vision_config": {}},
    {
        **_INTERN_TOWER,
        "mlp1.1.weight": (72, 128),
        "mlp1.3.weight": (80, 72),
        **_at("language_model", _ENDS),
        **_at("language_model.model.layers.[0-2]", {**_NORMS, **_QKV, **_QKV_BIAS, **_at("mlp", _mlp(72))}),
    },
    parts={"language_model.model.layers.2.self_attn.k_proj.bias": (0, [(24, 48)])},
)
REMOTE["h2ovl_chat"] = Remote(
    {"model_type": "h2ovl_chat", "llm_config": {**_DENSE, "model_type": "mistral"}, "vision_config": {}},
    {
        **_INTERN_TOWER,
        **_at("language_model", _ENDS),
        **_at("language_model.model.layers.[0-2]", {**_NORMS, **_QKV, **_at("mlp", _mlp(72))}),
    },
)
_S1: dict[str, Shape] = {
    **{key.replace("model.", "model.language_model."): shape for key, shape in _ENDS.items()},
    **_at("model.language_model.layers.[0-2]", {**_NORMS, **_QKV, **_QK_NORMS}),
    "model.vision_tower.embeddings.cls_token": (1, 1, 32),
    "model.vision_tower.encoder.layer.[0-1].attention.q_proj.weight": (32, 32),
    "model.multi_modal_projector.linear_1.weight": (80, 128),
}
REMOTE["interns1"] = Remote(
    {
        "model_type": "interns1",
        "text_config": {**_DENSE, "model_type": "qwen3_moe", "num_experts": 3, "moe_intermediate_size": 24},
        "vision_config": {},
    },
    {
        **_S1,
        "model.language_model.layers.[0-2].mlp.gate.weight": (3, 80),
        **_at("model.language_model.layers.[0-2].mlp.experts.[0-2]", _mlp(24)),
    },
    parts={"model.language_model.layers.1.mlp.experts.2.down_proj.weight": (1, [(12, 24)])},
)
REMOTE["interns1-mini"] = Remote(
    {"model_type": "interns1", "text_config": {**_DENSE, "model_type": "qwen3"}, "vision_config": {}},
    {**_S1, **_at("model.language_model.layers.[0-2].mlp", _mlp(72))},
)

_DENSE_MLP = _at("mlp", _mlp(72))
_BARE: dict[str, Any] = {key: value for key, value in _DENSE.items() if key != "head_dim"}  # heads of 80 / 8
_QKV_BARE: dict[str, Shape] = {
    "self_attn.q_proj.weight": (80, 80),
    "self_attn.k_proj.weight": (40, 80),
    "self_attn.v_proj.weight": (40, 80),
    "self_attn.o_proj.weight": (80, 80),
}
_QKV_BARE_BIAS: dict[str, Shape] = {f"self_attn.{n}_proj.bias": (w,) for n, w in {"q": 80, "k": 40, "v": 40}.items()}
_BARE_PARTS = {
    "model.layers.1.self_attn.v_proj.weight": (0, [(20, 40)]),
    "model.layers.1.mlp.up_proj.weight": (0, [(36, 72)]),
}
for _name in ("stablelm_epoch", "skywork", "TeleFLM"):
    REMOTE[_name] = Remote(
        {**_BARE, "model_type": _name},
        {
            **_ENDS,
            **_at("model.layers.[0-2]", {**_NORMS, **_QKV_BARE, **_DENSE_MLP}),
            **({"model.norm.bias": (80,)} if _name == "stablelm_epoch" else {}),
            **(
                {f"model.layers.[0-2].{n.replace('weight', 'bias')}": s for n, s in _NORMS.items()}
                if _name == "stablelm_epoch"
                else {}
            ),
        },
        parts=_BARE_PARTS,
    )
for _name in ("Dream", "PanguEmbedded"):
    REMOTE[_name] = Remote(
        {**_BARE, "model_type": _name},
        {
            **_ENDS,
            **_at("model.layers.[0-2]", {**_NORMS, **_QKV_BARE, **_QKV_BARE_BIAS, **_DENSE_MLP}),
            **({"model.layers.[0-2].self_attn.o_proj.bias": (80,)} if _name == "PanguEmbedded" else {}),
        },
        parts={**_BARE_PARTS, "model.layers.0.self_attn.q_proj.bias": (0, [(40, 80)])},
    )
REMOTE["sdar"] = Remote(
    {**_DENSE, "model_type": "sdar"},
    {**_ENDS, **_at("model.layers.[0-2]", {**_NORMS, **_QKV, **_QK_NORMS, **_DENSE_MLP})},
)
REMOTE["sdar_moe"] = Remote(
    {**_DENSE, "model_type": "sdar_moe", "num_experts": 3, "moe_intermediate_size": 24},
    {
        **_ENDS,
        **_at("model.layers.[0-2]", {**_NORMS, **_QKV, **_QK_NORMS, "mlp.gate.weight": (3, 80)}),
        **_at("model.layers.[0-2].mlp.experts.[0-2]", _mlp(24)),
    },
)
REMOTE["ouro"] = Remote(
    {**_DENSE, "model_type": "ouro", "total_ut_steps": 4},
    {
        **_ENDS,
        **_at("model.layers.[0-2]", {**_NORMS, **_QKV, **_DENSE_MLP}),
        **{f"model.layers.[0-2].{name.replace('.weight', '_2.weight')}": shape for name, shape in _NORMS.items()},
        "model.early_exit_gate.weight": (1, 80),
        "model.early_exit_gate.bias": (1,),
    },
)

_GPT: dict[str, Any] = {"n_embd": 96, "n_head": 8, "n_layer": 2, "vocab_size": 101}
REMOTE["jais"] = Remote(
    {**_GPT, "model_type": "jais", "n_inner": 72, "n_positions": 30},
    {
        "transformer.wte.weight": (101, 96),
        "transformer.relative_pe.slopes": (8, 1),
        "transformer.ln_f.weight": (96,),
        "transformer.ln_f.bias": (96,),
        **_at(
            "transformer.h.[0-1]",
            {
                **{f"ln_{i}.{part}": (96,) for i in (1, 2) for part in ("weight", "bias")},
                "attn.bias": (1, 1, 30, 30),
                "attn.c_attn.weight": (96, 288),
                "attn.c_attn.bias": (288,),
                "attn.c_proj.weight": (96, 96),
                "attn.c_proj.bias": (96,),
                "mlp.c_fc.weight": (96, 72),
                "mlp.c_fc.bias": (72,),
                "mlp.c_fc2.weight": (96, 72),
                "mlp.c_fc2.bias": (72,),
                "mlp.c_proj.weight": (72, 96),
                "mlp.c_proj.bias": (96,),
            },
        ),
    },
    parts={
        "transformer.relative_pe.slopes": (0, [(4, 8)]),
        "transformer.h.0.attn.c_attn.weight": (1, _ALL[1]),
        "transformer.h.0.attn.c_attn.bias": _ALL,
        "transformer.h.1.attn.c_proj.weight": (0, [(48, 96)]),
        "transformer.h.1.mlp.c_fc2.weight": (1, [(36, 72)]),
        "transformer.h.1.mlp.c_proj.weight": (0, [(36, 72)]),
    },
)
_PHI: dict[str, Shape] = {
    "transformer.embd.wte.weight": (101, 96),
    **dict.fromkeys(("lm_head.ln.weight", "lm_head.ln.bias"), (96,)),
    "lm_head.linear.weight": (101, 96),
    "lm_head.linear.bias": (101,),
    **{f"transformer.h.[0-1].{name}": (96,) for name in ("ln.weight", "ln.bias", "mixer.out_proj.bias")},
    "transformer.h.[0-1].mixer.out_proj.weight": (96, 96),
}
_FC: dict[str, Shape] = {"fc1.weight": (384, 96), "fc1.bias": (384,), "fc2.weight": (96, 384), "fc2.bias": (96,)}
REMOTE["phi-msft"] = Remote(
    {**_GPT, "model_type": "phi-msft", "n_inner": None, "n_head_kv": None},
    {
        **_PHI,
        **_at("transformer.h.[0-1].mixer.Wqkv", {"weight": (288, 96), "bias": (288,)}),
        **_at("transformer.h.[0-1].mlp", _FC),
    },
    parts={
        "transformer.h.0.mixer.Wqkv.weight": _ALL,
        "transformer.h.1.mixer.Wqkv.bias": _ALL,
        "transformer.h.1.mlp.fc2.weight": (1, [(192, 384)]),
    },
)
REMOTE["phi-msft-phixtral"] = Remote(
    {**_GPT, "model_type": "phi-msft", "n_inner": None, "n_head_kv": 4, "num_local_experts": 3},
    {
        **_PHI,
        **_at("transformer.h.[0-1].mixer.Wqkv", {"weight": (192, 96), "bias": (192,)}),
        "transformer.h.[0-1].moe.gate.weight": (3, 96),
        **_at("transformer.h.[0-1].moe.mlp.[0-2]", _FC),
    },
    parts={
        "transformer.h.0.mixer.Wqkv.weight": _PACKED,
        "transformer.h.1.mixer.Wqkv.bias": _PACKED,
        "transformer.h.1.moe.mlp.2.fc1.bias": (0, [(192, 384)]),
    },
)
REMOTE["llada"] = Remote(
    {
        "model_type": "llada",
        "d_model": 96,
        "n_heads": 8,
        "n_kv_heads": 4,
        "n_layers": 2,
        "mlp_hidden_size": 72,
        "embedding_size": 101,
        "vocab_size": 101,
    },
    {
        "model.transformer.wte.weight": (101, 96),
        "model.transformer.ln_f.weight": (96,),
        "model.transformer.ff_out.weight": (101, 96),
        **_at(
            "model.transformer.blocks.[0-1]",
            {
                "attn_norm.weight": (96,),
                "q_proj.weight": (96, 96),
                "k_proj.weight": (48, 96),
                "v_proj.weight": (48, 96),
                "attn_out.weight": (96, 96),
                "ff_norm.weight": (96,),
                **_mlp(72, 96, "ff_proj up_proj ff_out"),
            },
        ),
    },
    parts={
        "model.transformer.blocks.0.attn_out.weight": (1, [(48, 96)]),
        "model.transformer.blocks.1.ff_out.weight": (1, [(36, 72)]),
    },
)
for _name, _type in {"llada-moe": "llada", "llada_moe": "llada_moe", "lladamoe": "lladamoe"}.items():
    REMOTE[_name] = Remote(
        {
            **_BARE,
            "model_type": _type,
            "intermediate_size": None,
            "dense_intermediate_size": 72,
            "expert_intermediate_size": 24,
            "num_experts": 3,
        },
        {
            **_ENDS,
            **_at("model.layers.[0-2]", {**_NORMS, **_QKV_BARE}),
            **_at("model.layers.[0-2].self_attn", {"q_norm.weight": (10,), "k_norm.weight": (10,)}),
            **_at("model.layers.0.mlp", _mlp(72)),
            "model.layers.[1-2].mlp.gate.weight": (3, 80),
            **_at("model.layers.[1-2].mlp.experts.[0-2]", _mlp(24)),
        },
        parts={"model.layers.1.mlp.experts.2.down_proj.weight": (1, [(12, 24)])},
    )
REMOTE["grok-1"] = Remote(
    {**_BARE, "model_type": "grok-1", "num_experts": 3, "num_experts_per_tok": 2},
    {
        "model.embed_tokens.weight": (101, 80),
        "model.norm.scale": (80,),
        "lm_head.weight": (101, 80),
        **{
            f"model.layers.[0-2].{side}_{what}_norm.scale": (80,)
            for side in ("pre", "post")
            for what in ("attn", "moe")
        },
        **{f"model.layers.[0-2].{name.replace('self_attn', 'attn')}": shape for name, shape in _QKV_BARE.items()},
        "model.layers.[0-2].moe_block.gate.weight": (3, 80),
        **_at("model.layers.[0-2].moe_block.experts.[0-2]", _mlp(72, 80, "linear linear_v linear_1")),
    },
    parts={
        "model.layers.2.attn.o_proj.weight": (1, [(40, 80)]),
        "model.layers.2.moe_block.experts.1.linear_1.weight": (1, [(36, 72)]),
    },
)
for _name, _kv, _rows in (("cogvlm", None, 288), ("cogvlm2", 4, 192)):
    REMOTE[_name] = Remote(
        {
            **{key: value for key, value in _WIDE.items() if key not in ("head_dim", "num_key_value_heads")},
            "model_type": _name,
            "num_multi_query_heads": _kv,
            "vision_config": {"hidden_size": 32},
        },
        {
            "model.embed_tokens.weight": (101, 96),
            "model.norm.weight": (96,),
            "lm_head.weight": (101, 96),
            **_at("model.layers.[0-1]", {"input_layernorm.weight": (96,), "post_attention_layernorm.weight": (96,)}),
            "model.layers.[0-1].self_attn.rotary_emb.inv_freq": (6,),
            **{
                f"model.layers.[0-1].self_attn.{what}_expert_{name}.weight": shape
                for what in ("language", "vision")
                for name, shape in {"query_key_value": (_rows, 96), "dense": (96, 96)}.items()
            },
            **({"model.layers.[0-1].self_attn.vision_expert_query_key_value.bias": (192,)} if _kv else {}),
            **_at("model.layers.[0-1].mlp.language_mlp", _mlp(72, 96)),
            **_at("model.layers.[0-1].mlp.vision_mlp", _mlp(72, 96)),
            "model.vision.boi": (1, 1, 96),
            "model.vision.conv.weight": (32, 32, 2, 2),
            "model.vision.linear_proj.gate_proj.weight": (72, 96),
            "model.vision.transformer.layers.[0-1].attention.query_key_value.weight": (96, 32),
        },
        parts={
            "model.layers.0.self_attn.language_expert_query_key_value.weight": _PACKED if _kv else _ALL,
            "model.layers.1.self_attn.vision_expert_query_key_value.weight": _PACKED if _kv else _ALL,
            "model.layers.1.mlp.vision_mlp.down_proj.weight": (1, [(36, 72)]),
        },
    )


def _motif(head: int, q: int, kv: int, o: int) -> dict[str, Shape]:
    attention: dict[str, Shape] = {
        **{f"lambda_{name}": (head,) for name in ("q1", "k1", "q2", "k2")},
        "q_proj.weight": (q, 80),
        "k_proj.weight": (kv, 80),
        "v_proj.weight": (kv, 80),
        "o_proj.weight": (80, o),
        "subln.weight": (2 * head,),
    }
    mlp: dict[str, Shape] = {**_mlp(72), "act_fn.weight": (3,), "act_fn.bias": (1,)}
    return {
        **_ENDS,
        **_at("model.layers.[0-2]", {**_NORMS, **_at("self_attn", attention), **_at("mlp", mlp)}),
    }


# 8 pairs of query heads of 5 on 4 pairs of KV heads; 8 groups of 2 signal heads and one for noise, of 7, on the same
REMOTE["Motif"] = Remote(
    {**_BARE, "model_type": "Motif", "num_attention_heads": 16, "num_key_value_heads": 8},
    _motif(5, 80, 40, 80),
    parts={
        "model.layers.0.self_attn.q_proj.weight": (0, [(40, 80)]),
        "model.layers.0.self_attn.k_proj.weight": (0, [(20, 40)]),
    },
)
REMOTE["Motif-grouped"] = Remote(
    {
        **_BARE,
        "model_type": "Motif",
        "num_attention_heads": 24,
        "num_key_value_heads": 8,
        "num_noise_heads": 8,
        "k_ratio": 1,
        "head_dim": 7,
    },
    _motif(7, 168, 56, 224),
    parts={
        "model.layers.0.self_attn.q_proj.weight": (0, [(84, 168)]),
        "model.layers.0.self_attn.v_proj.weight": (0, [(28, 56)]),
        "model.layers.0.self_attn.o_proj.weight": (1, [(112, 224)]),
    },
)


# --------------------------------------------------------------------------------------------------- heads of any kind

_BODY: dict[str, Shape] = {"embed_tokens.weight": (101, 80), "norm.weight": (80,)}
_LAYERS = _at("layers.[0-1]", {**_NORMS, **_QKV, **_at("mlp", _mlp(72))})
_TWO = {**_DENSE, "num_hidden_layers": 2}
_HEADS: dict[str, tuple[str, str, dict[str, Shape]]] = {
    "qwen2-process-reward": (
        "qwen2",
        "model.",
        {"lm_head.weight": (101, 80), "score.0.weight": (80, 80), "score.0.bias": (80,), "score.2.weight": (2, 80)},
    ),
    "llama-value-head": ("llama", "model.", {"v_head.summary.weight": (1, 80), "v_head.summary.bias": (1,)}),
    "mistral-regression": ("mistral", "model.", {"regression_head.weight": (1, 80)}),
    "llama-armo": (
        "llama",
        "model.",
        {
            "regression_layer.weight": (19, 80),
            "reward_transform_matrix": (19, 19),
            "gating.logit_scale": (1,),
            "gating.layers.[0-1].weight": (24, 24),
        },
    ),
    "gemma2-tokens": ("gemma2", "model.", {"score.weight": (7, 80), "score.bias": (7,)}),
    "mistral-embedding": ("mistral", "", {}),
    "llama-answers": ("llama", "transformer.", {"qa_outputs.weight": (2, 80), "qa_outputs.bias": (2,)}),
}
_OF_TYPE: dict[str, dict[str, Shape]] = {
    "qwen2": _QKV_BIAS,
    "gemma2": {"pre_feedforward_layernorm.weight": (80,), "post_feedforward_layernorm.weight": (80,)},
}
for _name, (_type, _prefix, _head) in _HEADS.items():
    _all = _BODY | _LAYERS | _at("layers.[0-1]", _OF_TYPE.get(_type, {}))
    REMOTE[_name] = Remote(
        {**_TWO, "model_type": _type}, {**{_prefix + key: shape for key, shape in _all.items()}, **_head}
    )

# ----------------------------------------------------------------------------------------------- encoders of publishers

_ENCODER: dict[str, Any] = {**_WIDE, "type_vocab_size": 2, "max_position_embeddings": 64}
_NORM2: dict[str, Shape] = {"weight": (96,), "bias": (96,)}
_LINEAR = {"weight": (96, 96), "bias": (96,)}
_EMBEDDED: dict[str, Shape] = {
    "embeddings.word_embeddings.weight": (101, 96),
    "embeddings.token_type_embeddings.weight": (2, 96),
}
_FLASH: dict[str, Shape] = {
    **_at("emb_ln", _NORM2),
    **{f"encoder.layers.[0-1].norm{number}.{what}": shape for number in (1, 2) for what, shape in _NORM2.items()},
}
# 3 experts of 20 in layer 1; the second of two ranks has the second half of each
_OF_EACH = [(10, 20), (30, 40), (50, 60)]
REMOTE["nomic_bert-moe"] = Remote(
    {
        "model_type": "nomic_bert",
        "n_embd": 96,
        "n_head": 8,
        "n_inner": 20,
        "n_layer": 2,
        "vocab_size": 101,
        "type_vocab_size": 2,
        "num_experts": 3,
        "moe_every_n_layers": 2,
    },
    {
        **_EMBEDDED,
        **_FLASH,
        **_at("encoder.layers.[0-1].attn", {"Wqkv.weight": (288, 96), "Wqkv.bias": (288,), **_at("out_proj", _LINEAR)}),
        "encoder.layers.0.mlp.fc1.weight": (20, 96),
        "encoder.layers.0.mlp.fc1.bias": (20,),
        "encoder.layers.0.mlp.fc2.weight": (96, 20),
        "encoder.layers.0.mlp.fc2.bias": (96,),
        "encoder.layers.1.mlp.router.layer.weight": (3, 96),
        "encoder.layers.1.mlp.experts.mlp.w1": (60, 96),
        "encoder.layers.1.mlp.experts.mlp.w2": (60, 96),
        "encoder.layers.1.mlp.experts.bias": (96,),
    },
    degrees=(2, 4),
    parts={
        "encoder.layers.1.mlp.experts.mlp.w1": (0, _OF_EACH),
        "encoder.layers.1.mlp.experts.mlp.w2": (0, _OF_EACH),
    },
)
REMOTE["new"] = Remote(
    {**_ENCODER, "model_type": "new"},
    {
        **_at("new", _EMBEDDED),
        **_at("new.embeddings.LayerNorm", _NORM2),
        **_at("new.encoder.layer.[0-1].attention", {"qkv_proj.weight": (288, 96), "qkv_proj.bias": (288,)}),
        **_at("new.encoder.layer.[0-1].attention.o_proj", _LINEAR),
        **_at("new.encoder.layer.[0-1].attn_ln", _NORM2),
        **_at("new.encoder.layer.[0-1].mlp_ln", _NORM2),
        "new.encoder.layer.[0-1].mlp.up_gate_proj.weight": (144, 96),
        "new.encoder.layer.[0-1].mlp.down_proj.weight": (96, 72),
        "new.encoder.layer.[0-1].mlp.down_proj.bias": (96,),
        **_at("new.pooler.dense", _LINEAR),
        "classifier.weight": (1, 96),
        "classifier.bias": (1,),
    },
    parts={"new.encoder.layer.1.mlp.up_gate_proj.weight": (0, [(36, 72), (108, 144)])},
)


def _adapted(name: str, out: int, width: int, embedding: bool = False) -> dict[str, Shape]:
    """A matrix with adapters of rank 4 for 5 tasks, as torch's parametrizations name them."""
    a, b = (5, 4, width), (5, out, 4)
    first, second = ((5, out, 4), (5, 4, width)) if embedding else (a, b)
    at = f"{name}.parametrizations.weight"
    return {
        f"{at}.original": (out, width),
        f"{at}.0.lora_A": first,
        f"{at}.0.lora_B": second,
        **({} if embedding else {f"{name}.bias": (out,)}),
    }


_JINA_PARTS = {
    "roberta.encoder.layers.0.mixer.Wqkv.parametrizations.weight.original": _ALL,
    "roberta.encoder.layers.0.mixer.Wqkv.parametrizations.weight.0.lora_B": (1, _ALL[1]),
    "roberta.encoder.layers.0.mixer.out_proj.parametrizations.weight.0.lora_A": (2, [(48, 96)]),
}
REMOTE["xlm-roberta-adapters"] = Remote(
    {**_ENCODER, "model_type": "xlm-roberta", "lora_rank": 4, "position_embedding_type": "rotary"},
    {
        **_at("roberta", _FLASH),
        **_adapted("roberta.embeddings.word_embeddings", 101, 96, embedding=True),
        **_adapted("roberta.embeddings.token_type_embeddings", 2, 96, embedding=True),
        **_adapted("roberta.encoder.layers.[0-1].mixer.Wqkv", 288, 96),
        **_adapted("roberta.encoder.layers.[0-1].mixer.out_proj", 96, 96),
        **_adapted("roberta.encoder.layers.[0-1].mlp.fc1", 72, 96),
        **_adapted("roberta.encoder.layers.[0-1].mlp.fc2", 96, 72),
        **_adapted("roberta.pooler.dense", 96, 96),
    },
    parts=_JINA_PARTS,
)
REMOTE["xlm-roberta-rotary"] = Remote(
    {**_ENCODER, "model_type": "xlm-roberta", "position_embedding_type": "rotary"},
    {
        **_EMBEDDED,
        **_FLASH,
        **_at(
            "encoder.layers.[0-1].mixer", {"Wqkv.weight": (288, 96), "Wqkv.bias": (288,), **_at("out_proj", _LINEAR)}
        ),
        "encoder.layers.[0-1].mlp.fc1.weight": (72, 96),
        "encoder.layers.[0-1].mlp.fc1.bias": (72,),
        "encoder.layers.[0-1].mlp.fc2.weight": (96, 72),
        "encoder.layers.[0-1].mlp.fc2.bias": (96,),
        "linear.weight": (24, 96),
    },
)
_BERT_HEADS: dict[str, Shape] = {
    f"attention.self.{name}.{what}": shape for name in ("query", "key", "value") for what, shape in _LINEAR.items()
}
for _name, _gated, _down, _rest in (
    ("bert-jina", "gated_layers", "wo", {**_at("mlp.layernorm", _NORM2), **_at("attention.output.LayerNorm", _NORM2)}),
    (
        "bert-jina-code",
        "up_gated_layer",
        "down_layer",
        {
            key: shape
            for part in ("layer_norm_1", "layer_norm_2", "attention.self.layer_norm_q", "attention.self.layer_norm_k")
            for key, shape in _at(part, _NORM2).items()
        },
    ),
):
    REMOTE[_name] = Remote(
        {**_ENCODER, "model_type": "bert"},
        {
            **_EMBEDDED,
            **_at("embeddings.LayerNorm", _NORM2),
            **_at("encoder.layer.[0-1]", {**_BERT_HEADS, **_at("attention.output.dense", _LINEAR), **_rest}),
            f"encoder.layer.[0-1].mlp.{_gated}.weight": (144, 96),
            f"encoder.layer.[0-1].mlp.{_down}.weight": (96, 72),
            f"encoder.layer.[0-1].mlp.{_down}.bias": (96,),
        },
        parts={f"encoder.layer.1.mlp.{_gated}.weight": (0, [(36, 72), (108, 144)])},
    )

# ------------------------------------------------------------------------------ further types that serving engines know

REMOTE["solar"] = Remote(
    {**_BARE, "model_type": "solar", "bskcn_1": [1], "bskcn_tv": [0.9, 0.8]},
    {**_ENDS, **_at("model.layers.[0-2]", {**_NORMS, **_QKV_BARE, **_at("mlp", _mlp(72))})},
    parts=_BARE_PARTS,
)
_QK_NORMS: dict[str, Shape] = {"self_attn.q_norm.weight": (12,), "self_attn.k_norm.weight": (12,)}
REMOTE["rnd1"] = Remote(
    {**_DENSE, "model_type": "rnd1", "moe_intermediate_size": 24, "num_experts": 3},
    {
        **_ENDS,
        **_at("model.layers.[0-2]", {**_NORMS, **_QKV, **_QK_NORMS, "mlp.gate.weight": (3, 80)}),
        **_at("model.layers.[0-2].mlp.experts.[0-2]", _mlp(24)),
    },
)
for _name, _more in (("llada2_moe", {"num_key_value_heads": 4}), ("sarvam_moe", {"num_shared_experts": 1})):
    REMOTE[_name] = Remote(
        {**_LING, **_more, "model_type": _name},
        {
            **_LING_ENDS,
            **_at("model.layers.[0-2]", {**_NORMS, **_LING_ATTENTION}),
            **_at("model.layers.0.mlp", _mlp(72)),
            **_at("model.layers.[1-2].mlp", {"gate.weight": (6, 80), "gate.expert_bias": (6,)}),
            **_at("model.layers.[1-2].mlp.experts.[0-5]", _mlp(24)),
            **_at("model.layers.[1-2].mlp.shared_experts", _mlp(24 if _name == "sarvam_moe" else 48)),
        },
        parts={"model.layers.1.attention.query_key_value.weight": _PACKED},
    )
# 8 heads of 6 and 4 for q and k, of 10 for v
_LATENT: dict[str, Any] = {
    **_BARE,
    "num_key_value_heads": 8,
    "qk_nope_head_dim": 6,
    "qk_rope_head_dim": 4,
    "v_head_dim": 10,
    "kv_lora_rank": 28,
}
_LATENT_ATTENTION: dict[str, Shape] = {
    "self_attn.kv_a_proj_with_mqa.weight": (32, 80),
    "self_attn.kv_a_layernorm.weight": (28,),
    "self_attn.kv_b_proj.weight": (128, 28),
    "self_attn.o_proj.weight": (80, 80),
}
for _name in ("plm", "youtu_llm", "joyai_llm_flash", "sarvam_mla"):
    _experts = _name in ("joyai_llm_flash", "sarvam_mla")
    _keys = ("num_experts", "num_shared_experts") if _name == "sarvam_mla" else ("n_routed_experts", "n_shared_experts")
    _rank: dict[str, Shape] = {
        "self_attn.q_a_proj.weight": (36, 80),
        "self_attn.q_a_layernorm.weight": (36,),
        "self_attn.q_b_proj.weight": (80, 36),
    }
    _whole: dict[str, Shape] = {"self_attn.q_proj.weight": (80, 80)}
    REMOTE[_name] = Remote(
        {
            **_LATENT,
            "model_type": _name,
            **({"q_lora_rank": 36} if _name == "youtu_llm" else {}),
            **({"moe_intermediate_size": 24, "first_k_dense_replace": 1} if _experts else {}),
            **(dict(zip(_keys, (3, 1), strict=True)) if _experts else {}),
        },
        {
            **_ENDS,
            **_at("model.layers.[0-2]", {**_NORMS, **_LATENT_ATTENTION, **(_rank if _name == "youtu_llm" else _whole)}),
            **{
                f"model.layers.[0-{0 if _experts else 2}].mlp.{key}": shape
                for key, shape in _mlp(72).items()
                if _name != "plm" or "gate" not in key
            },
            **(
                {
                    "model.layers.[1-2].mlp.gate.weight": (3, 80),
                    "model.layers.[1-2].mlp.gate.e_score_correction_bias": (3,),
                    **_at("model.layers.[1-2].mlp.experts.[0-2]", _mlp(24)),
                    **_at("model.layers.[1-2].mlp.shared_experts", _mlp(24)),
                }
                if _experts
                else {}
            ),
        },
        parts={"model.layers.1.self_attn.kv_b_proj.weight": (0, [(64, 128)])},
    )
REMOTE["smallthinker"] = Remote(
    {
        **{key: value for key, value in _DENSE.items() if key != "intermediate_size"},
        "model_type": "smallthinker",
        "moe_ffn_hidden_size": 24,
        "moe_num_primary_experts": 3,
    },
    {
        **_ENDS,
        **_at("model.layers.[0-2]", {**_NORMS, **_QKV, "block_sparse_moe.primary_router.weight": (3, 80)}),
        **_at("model.layers.[0-2].block_sparse_moe.experts.[0-2]", _mlp(24, 80, "gate up down")),
    },
    parts={"model.layers.2.block_sparse_moe.experts.1.down.weight": (1, [(12, 24)])},
)
REMOTE["plamo3"] = Remote(
    {**_DENSE, "model_type": "plamo3"},
    {
        **_ENDS,
        **{
            f"model.layers.layers.[0-2].{when}_{what}_norm.weight": (80,)
            for when in ("pre", "post")
            for what in ("mixer", "mlp")
        },
        "model.layers.layers.[0-2].mixer.qkv_proj.weight": (192, 80),
        "model.layers.layers.[0-2].mixer.o_proj.weight": (80, 96),
        "model.layers.layers.[0-2].mixer.q_norm.weight": (12,),
        "model.layers.layers.[0-2].mixer.k_norm.weight": (12,),
        "model.layers.layers.[0-2].mlp.gate_up_proj.weight": (144, 80),
        "model.layers.layers.[0-2].mlp.down_proj.weight": (80, 72),
    },
    parts={"model.layers.layers.0.mixer.qkv_proj.weight": _PACKED},
)
_CODE_NORMS: dict[str, Shape] = {f"ln_{n}.{what}": (96,) for n in (1, 2) for what in ("weight", "bias")}
REMOTE["codeshell"] = Remote(
    {
        "model_type": "codeshell",
        "n_embd": 96,
        "n_head": 8,
        "num_query_groups": 4,
        "n_inner": 72,
        "n_layer": 2,
        "vocab_size": 101,
    },
    {
        "transformer.wte.weight": (101, 96),
        "transformer.ln_f.weight": (96,),
        "transformer.ln_f.bias": (96,),
        "lm_head.weight": (101, 96),
        **_at(
            "transformer.h.[0-1]",
            {
                **_CODE_NORMS,
                "attn.c_attn.weight": (192, 96),
                "attn.c_attn.bias": (192,),
                **_at("attn.c_proj", _LINEAR),
                "mlp.c_fc.weight": (72, 96),
                "mlp.c_fc.bias": (72,),
                "mlp.c_proj.weight": (96, 72),
                "mlp.c_proj.bias": (96,),
            },
        ),
    },
    parts={"transformer.h.1.attn.c_attn.weight": _PACKED},
)
REMOTE["hf_olmo"] = Remote(
    {
        "model_type": "hf_olmo",
        "d_model": 96,
        "n_heads": 8,
        "n_layers": 2,
        "mlp_hidden_size": 144,
        "vocab_size": 97,
        "embedding_size": 101,
    },
    {
        "model.transformer.wte.weight": (101, 96),
        "model.transformer.ff_out.weight": (101, 96),
        **_at(
            "model.transformer.blocks.[0-1]",
            {
                "att_proj.weight": (288, 96),
                "attn_out.weight": (96, 96),
                "ff_proj.weight": (144, 96),
                "ff_out.weight": (96, 72),
            },
        ),
    },
    parts={
        "model.transformer.blocks.0.att_proj.weight": _ALL,
        "model.transformer.blocks.1.ff_proj.weight": (0, [(36, 72), (108, 144)]),
    },
)

# Language models under the names of Llama beside a tower for images, as their authors published them
_TEXT: dict[str, Shape] = {**_BODY, **_LAYERS}
_TALL: dict[str, Shape] = {"patch.weight": (32, 12), "blocks.[0-1].qkv.weight": (96, 32)}


_TEXT_OF: dict[str, dict[str, Shape]] = {
    "qwen2": {**_TEXT, **_at("layers.[0-1]", _QKV_BIAS)},
    "qwen2_vl_text": {**_TEXT, **_at("layers.[0-1]", {**_QKV_BARE, **_QKV_BARE_BIAS})},
}


def _images(
    config: dict[str, Any], body: str, head: str, towers: Mapping[str, Shape], text: str | None = None
) -> Remote:
    """A language model of the type ``text`` between towers."""
    tensors = _TEXT_OF.get(text or "", _TEXT)
    return Remote(config, {**{body + key: shape for key, shape in tensors.items()}, head: (101, 80), **towers})


_PROJECTOR: dict[str, Shape] = {
    "model.mm_projector.0.weight": (80, 32),
    "model.mm_projector.2.weight": (80, 80),
    "model.image_newline": (80,),
    **_at("model.vision_tower.vision_tower", _TALL),
}
for _name, _type in (("llava-own", "llava"), *((_t, _t) for _t in ("llava_llama", "llava_mistral", "llava_qwen"))):
    REMOTE[_name] = _images({**_TWO, "model_type": _type, "mm_hidden_size": 32}, "model.", "lm_head.weight", _PROJECTOR)
for _type in ("skywork_chat", "Llama_Nemotron_Nano_VL", "eagle_2_5_vl", "locateanything"):
    _section = "text_config" if _type in {"eagle_2_5_vl", "locateanything"} else "llm_config"
    REMOTE[_type] = _images(
        {"model_type": _type, _section: {**_TWO, "model_type": "qwen2"}, "vision_config": {}},
        "language_model.model.",
        "language_model.lm_head.weight",
        {**_at("vision_model", _TALL), "mlp1.0.weight": (32,), "mlp1.1.weight": (80, 32)},
        "qwen2",
    )
REMOTE["sarashina2_vision"] = _images(
    {"model_type": "sarashina2_vision", "text_config": {**_TWO, "model_type": "llama"}},
    "llm.model.",
    "llm.lm_head.weight",
    {**_at("visual", _TALL), "norm.weight": (80,), "norm.bias": (80,)},
)
REMOTE["openvla"] = _images(
    {"model_type": "openvla", "text_config": {**_TWO, "model_type": "llama"}},
    "language_model.model.",
    "language_model.lm_head.weight",
    {**_at("vision_backbone.featurizer", _TALL), "projector.fc1.weight": (80, 32), "projector.fc1.bias": (80,)},
)
REMOTE["opencua"] = _images(
    {"model_type": "opencua", "text_config": {**_TWO, "model_type": "qwen2"}},
    "language_model.model.",
    "language_model.lm_head.weight",
    _at("vision_tower", _TALL),
    "qwen2",
)
REMOTE["isaac"] = _images(
    {**_TWO, "model_type": "isaac", "vision_config": {}},
    "model.",
    "lm_head.weight",
    _at("model.vision_embedding.0", _TALL),
)
REMOTE["hyperclovax_vlm"] = _images(
    {"model_type": "hyperclovax_vlm", "text_config": {**_TWO, "model_type": "llama"}},
    "language_model.model.",
    "language_model.lm_head.weight",
    {**_at("vision_model", _TALL), "mm_projector.proj.weight": (80, 32), "image_newline": (80,)},
)
REMOTE["qwen-images"] = Remote(
    {**REMOTE["qwen"].config, "visual": {"width": 32}},
    {**REMOTE["qwen"].tensors, **_at("transformer.visual.transformer", _TALL)},
)
REMOTE["chatglm-images"] = Remote(
    {**REMOTE["chatglm"].config, "vision_config": {"hidden_size": 32}},
    {**REMOTE["chatglm"].tensors, **_at("transformer.vision.transformer", _TALL), "transformer.vision.boi": (1, 1, 80)},
)
_COG = REMOTE["cogvlm"]
REMOTE["cogagent"] = Remote(
    {
        **{key: value for key, value in _COG.config.items() if key != "model_type"},
        "architectures": ["CogAgentForCausalLM"],
        "cross_hidden_size": 28,
        "cross_compute_hidden_size": 40,
    },
    {
        **_COG.tensors,
        "model.layers.[0-1].cross_attn.query.weight": (40, 96),
        "model.layers.[0-1].cross_attn.key_value.weight": (80, 28),
        "model.layers.[0-1].cross_attn.dense.weight": (96, 40),
        "model.layers.[0-1].post_cross_attention_layernorm.weight": (96,),
        **_at("model.cross_vision.vit", _TALL),
    },
    parts={"model.layers.1.cross_attn.key_value.weight": (0, [(20, 40), (60, 80)])},
)

# ------------------------------------------------------------------------------- further types with names of their own

# 10 heads of 8 on 5 KV heads, which are not dealt; Mamba of twice the width
_HYMBA: dict[str, Shape] = {
    "input_layernorm.weight": (80,),
    "pre_moe_layernorm.weight": (80,),
    "mamba.conv1d.weight": (160, 1, 3),
    "mamba.conv1d.bias": (160,),
    "mamba.x_proj.0.weight": (15, 160),
    "mamba.dt_proj.0.weight": (160, 5),
    "mamba.dt_proj.0.bias": (160,),
    "mamba.A_log.0": (160, 5),
    "mamba.D.0": (160,),
    "mamba.dt_layernorm.weight": (5,),
    "mamba.B_layernorm.weight": (5,),
    "mamba.C_layernorm.weight": (5,),
    "mamba.pre_avg_layernorm1.weight": (160,),
    "mamba.pre_avg_layernorm2.weight": (160,),
    "mamba.out_proj.weight": (80, 160),
    **_at("moe.experts.0", _mlp(72)),
}
REMOTE["hymba"] = Remote(
    {
        **_BARE,
        "model_type": "hymba",
        "num_attention_heads": 10,
        "num_key_value_heads": 5,
        "mamba_expand": 2,
        "mamba_d_conv": 3,
        "mamba_d_state": 5,
        "mamba_dt_rank": 5,
        "num_memory_tokens": 7,
        "kv_reuse_group": [[1, 2]],
    },
    {
        "model.embed_tokens.weight": (101, 80),
        "model.memory_tokens": (7, 80),
        "model.final_layernorm.weight": (80,),
        "lm_head.weight": (101, 80),
        **_at("model.layers.[0-2]", _HYMBA),
        "model.layers.[0-1].mamba.in_proj.weight": (520, 80),
        "model.layers.2.mamba.in_proj.weight": (400, 80),
    },
    parts={
        "model.layers.1.mamba.in_proj.weight": (0, [(0, 200), (280, 360), (440, 520)]),
        "model.layers.2.mamba.in_proj.weight": (0, [(0, 80), (160, 240), (320, 400)]),
        "model.layers.2.mamba.x_proj.0.weight": (1, [(80, 160)]),
    },
)
# 8 query heads of 10 on 2 KV heads in turn: a rank of two has one KV head and every other query head
REMOTE["plamo"] = Remote(
    {
        **{key: value for key, value in _BARE.items() if "key_value" not in key},
        "model_type": "plamo",
        "n_shared_head": 4,
    },
    {
        **_ENDS,
        "model.layers.layers.[0-2].norm.weight": (80,),
        "model.layers.layers.[0-2].self_attn.q_proj.weight": (80, 80),
        "model.layers.layers.[0-2].self_attn.k_proj.weight": (20, 80),
        "model.layers.layers.[0-2].self_attn.v_proj.weight": (20, 80),
        "model.layers.layers.[0-2].self_attn.o_proj.weight": (80, 80),
        **_at("model.layers.layers.[0-2].mlp", _mlp(72)),
    },
    parts={
        "model.layers.layers.1.self_attn.q_proj.weight": (0, [(10, 20), (30, 40), (50, 60), (70, 80)]),
        "model.layers.layers.1.self_attn.o_proj.weight": (1, [(10, 20), (30, 40), (50, 60), (70, 80)]),
        "model.layers.layers.1.self_attn.k_proj.weight": (0, [(10, 20)]),
    },
)
REMOTE["gpt_refact"] = Remote(
    {"model_type": "gpt_refact", "n_embd": 80, "n_head": 8, "n_layer": 2, "vocab_size": 101},
    {
        "transformer.wte.weight": (101, 80),
        "transformer.ln_f.weight": (80,),
        "lm_head.weight": (101, 80),
        **_at(
            "transformer.h.[0-1]",
            {
                "ln_1.weight": (80,),
                "ln_2.weight": (80,),
                "attn.q.weight": (80, 80),
                "attn.kv.weight": (20, 80),
                "attn.c_proj.weight": (80, 80),
                "mlp.gate_up_proj.weight": (512, 80),
                "mlp.c_proj.weight": (80, 256),
            },
        ),
    },
    parts={
        "transformer.h.0.attn.kv.weight": (0, [(0, 20)]),
        "transformer.h.1.mlp.gate_up_proj.weight": (0, [(128, 256), (384, 512)]),
    },
)
_MIXED: dict[str, Shape] = {
    **{f"{name}.{what}": (80,) for name in ("attn_norm", "ffn_norm", "attn.g_norm") for what in ("weight", "bias")},
    **{f"attn.x_{name}": (1, 1, 80) for name in "rwkvag"},
    **{f"attn.{name}_proj.weight": (80, 80) for name in "rkvo"},
    **{f"attn.{name}_lora.lora.0.weight": (rank, 80) for name, rank in zip("wag", (6, 7, 9), strict=True)},
    **{f"attn.{name}_lora.lora.2.weight": (80, rank) for name, rank in zip("wag", (6, 7, 9), strict=True)},
    "attn.w_lora.lora.2.bias": (80,),
    "attn.a_lora.lora.2.bias": (80,),
    "attn.k_k": (80,),
    "attn.k_a": (80,),
    "attn.r_k": (8, 10),
    "ffn.x_k": (80,),
    "ffn.key.weight": (72, 80),
    "ffn.value.weight": (80, 72),
}
REMOTE["rwkv7"] = Remote(
    {
        "model_type": "rwkv7",
        "hidden_size": 80,
        "head_dim": 10,
        "intermediate_size": 72,
        "num_hidden_layers": 2,
        "vocab_size": 101,
        "decay_low_rank_dim": 6,
        "a_low_rank_dim": 7,
        "v_low_rank_dim": 5,
        "gate_low_rank_dim": 9,
    },
    {
        "model.embeddings.weight": (101, 80),
        **{f"model.{name}.{what}": (80,) for name in ("norm", "layers.0.pre_norm") for what in ("weight", "bias")},
        "lm_head.weight": (101, 80),
        **_at("model.layers.[0-1]", _MIXED),
        "model.layers.1.attn.v_lora.lora.0.weight": (5, 80),
        "model.layers.1.attn.v_lora.lora.2.weight": (80, 5),
        "model.layers.1.attn.v_lora.lora.2.bias": (80,),
    },
    parts={"model.layers.1.attn.r_k": (0, [(4, 8)]), "model.layers.1.attn.o_proj.weight": (1, [(40, 80)])},
)
REMOTE["kormo"] = Remote(
    {**_DENSE, "model_type": "kormo"},
    {
        **_ENDS,
        "model.layers.[0-2].pre_attention_layernorm.weight": (80,),
        "model.layers.[0-2].pre_mlp_layernorm.weight": (80,),
        **_at("model.layers.[0-2]", {**_QKV, **_at("mlp", _mlp(72))}),
    },
)
# 8 heads of 12, the q, k and v of each together; 2 / 3 of 105 is 70, of which 72 are made
REMOTE["neobert"] = Remote(
    {**_WIDE, "model_type": "neobert", "intermediate_size": 105},
    {
        "model.encoder.weight": (101, 96),
        "model.layer_norm.weight": (96,),
        "decoder.weight": (101, 96),
        "decoder.bias": (101,),
        **_at(
            "model.transformer_encoder.[0-1]",
            {
                "attention_norm.weight": (96,),
                "ffn_norm.weight": (96,),
                "qkv.weight": (288, 96),
                "wo.weight": (96, 96),
                "ffn.w12.weight": (144, 96),
                "ffn.w3.weight": (96, 72),
            },
        ),
    },
    parts={
        "model.transformer_encoder.0.qkv.weight": (0, [(144, 288)]),
        "model.transformer_encoder.0.ffn.w12.weight": (0, [(36, 72), (108, 144)]),
    },
)
REMOTE["molmo-experts"] = Remote(
    {**_MOLMO, "moe_num_experts": 3, "attention_layer_norm": True},
    {
        **{key: shape for key, shape in _MOLMO_TENSORS.items() if ".blocks." not in key or "vision" in key},
        **_at(
            "model.transformer.blocks.[0-1].attn",
            {
                "attn_norm.weight": (96,),
                "att_proj.weight": (192, 96),
                "q_norm.weight": (96,),
                "k_norm.weight": (48,),
                "attn_out.weight": (96, 96),
            },
        ),
        "model.transformer.blocks.[0-1].mlp.ff_norm.weight": (96,),
        "model.transformer.blocks.[0-1].mlp.gate.weight": (3, 96),
        **_at("model.transformer.blocks.[0-1].mlp.experts.[0-2]", _mlp(72, 96)),
    },
    parts={"model.transformer.blocks.0.attn.att_proj.weight": _PACKED},
)
_RETRIEVAL: dict[str, Shape] = {"embedding_proj_layer.weight": (36, 80), "embedding_proj_layer.bias": (36,)}
for _name, _model, _body, _head in (
    ("colpali", "gemma", "vlm.language_model.model.", "vlm.language_model.lm_head.weight"),
    ("colqwen2", "qwen2_vl_text", "vlm.language_model.", "vlm.lm_head.weight"),
):
    REMOTE[_name] = _images(
        {"model_type": _name, "vlm_config": {"text_config": {**_TWO, "model_type": _model}}, "embedding_dim": 36},
        _body,
        _head,
        {**_RETRIEVAL, **_at("vlm.vision_tower" if _name == "colpali" else "vlm.visual.merger", _TALL)},
        _model,
    )
# Layers 0 and 2 with 4 KV heads of 8 query heads, layer 1 with 8; v of 10. Four chunks of q, k and v in each: in layer
# 1 a chunk is a whole number of blocks of 4 rows, so that its scales cannot tell chunks from all q, all k, all v. Those
# of the other layers do.
_MIMO: dict[str, Any] = {
    **_DENSE,
    "model_type": "mimo_v2",
    "v_head_dim": 10,
    "swa_num_key_value_heads": 8,
    "hybrid_layer_pattern": [0, 1, 0],
    "attention_projection_layout": "fused_qkv",
    "n_routed_experts": 3,
    "moe_intermediate_size": 24,
    "quantization_config": {"quant_method": "fp8", "weight_block_size": [4, 8]},
}


def _mimo(scales: int) -> dict[str, Shape]:
    """With so many rows of scales for the 184 rows of a layer with full attention."""
    return {
        **_ENDS,
        **_at("model.layers.[0-2]", _NORMS),
        "model.layers.[0-2].self_attn.o_proj.weight": (80, 80),
        "model.layers.[0-2].self_attn.attention_sink_bias": (8,),
        **{f"model.layers.{layer}.self_attn.qkv_proj.weight": (184, 80) for layer in (0, 2)},
        **{f"model.layers.{layer}.self_attn.qkv_proj.weight_scale_inv": (scales, 10) for layer in (0, 2)},
        "model.layers.1.self_attn.qkv_proj.weight": (272, 80),
        "model.layers.1.self_attn.qkv_proj.weight_scale_inv": (68, 10),
        "model.mtp.layers.0.self_attn.qkv_proj.weight": (272, 80),
        "model.mtp.layers.0.self_attn.qkv_proj.weight_scale_inv": (68, 10),
        **_at("model.layers.0.mlp", _mlp(72)),
        "model.layers.[1-2].mlp.gate.weight": (3, 80),
        "model.layers.[1-2].mlp.gate.e_score_correction_bias": (3,),
        **_at("model.layers.[1-2].mlp.experts.[0-2]", _mlp(24)),
        "speech_embeddings.0.weight": (20, 16),
        "visual.merger.mlp.0.weight": (32, 24),
    }


REMOTE["mimo_v2"] = Remote(
    _MIMO,
    _mimo(48),
    degrees=(2, 4),
    parts={
        "model.layers.0.self_attn.qkv_proj.weight": (0, [(92, 184)]),
        "model.layers.0.self_attn.qkv_proj.weight_scale_inv": (0, [(24, 48)]),
        "model.layers.1.self_attn.qkv_proj.weight": (0, [(136, 272)]),
        "model.mtp.layers.0.self_attn.qkv_proj.weight_scale_inv": (0, [(34, 68)]),
        "model.layers.1.self_attn.o_proj.weight": (1, [(40, 80)]),
    },
)
REMOTE["mimo_v2-reexported"] = Remote(
    _MIMO,
    _mimo(46),
    degrees=(2,),
    parts={
        "model.layers.0.self_attn.qkv_proj.weight": (0, [(48, 96), (120, 144), (164, 184)]),
        "model.layers.0.self_attn.qkv_proj.weight_scale_inv": (0, [(12, 24), (30, 36), (41, 46)]),
        "model.layers.1.self_attn.qkv_proj.weight": (0, [(48, 96), (144, 192), (232, 272)]),
        "model.mtp.layers.0.self_attn.qkv_proj.weight_scale_inv": (0, [(12, 24), (36, 48), (58, 68)]),
    },
)
REMOTE["llama_bidirec"] = Remote({**_TWO, "model_type": "llama_bidirec"}, _TEXT)
REMOTE["nvembed"] = Remote(
    {"model_type": "nvembed", "text_config": {**_TWO, "model_type": "bidir_mistral"}, "latent_attention_config": {}},
    {
        **{f"embedding_model.{key}": shape for key, shape in _TEXT.items()},
        "latent_attention_model.latents": (16, 80),
        "latent_attention_model.cross_attend_blocks.0.fn.to_q.weight": (96, 80),
        "latent_attention_model.cross_attend_blocks.1.fn.net.0.bias": (160,),
    },
)
REMOTE["llama-eagle"] = Remote(
    {**_DENSE, "model_type": "llama", "num_hidden_layers": 1},
    {
        "embed_tokens.weight": (101, 80),
        "fc.weight": (80, 160),
        "fc.bias": (80,),
        **_at("layers.0", {"post_attention_layernorm.weight": (80,), **_QKV, **_at("mlp", _mlp(72))}),
    },
)
REMOTE["llama-eagle3"] = Remote(
    {**_DENSE, "model_type": "llama", "num_hidden_layers": 1, "draft_vocab_size": 37},
    {
        "embed_tokens.weight": (101, 80),
        "norm.weight": (80,),
        "lm_head.weight": (37, 80),
        "d2t": (37,),
        "t2d": (101,),
        "fc.weight": (80, 240),
        **_at("midlayer", {**_NORMS, "hidden_norm.weight": (80,), **_at("mlp", _mlp(72))}),
        "midlayer.self_attn.q_proj.weight": (96, 160),
        "midlayer.self_attn.k_proj.weight": (48, 160),
        "midlayer.self_attn.v_proj.weight": (48, 160),
        "midlayer.self_attn.o_proj.weight": (80, 96),
    },
    parts={"midlayer.self_attn.v_proj.weight": (0, [(24, 48)]), "lm_head.weight": (0, [(0, 37)])},
)
REMOTE["videollama3_qwen2"] = Remote(
    {**_DENSE, "model_type": "videollama3_qwen2", "vision_encoder_config": {"hidden_size": 32}},
    {
        **_ENDS,
        **_at("model.layers.[0-2]", {**_NORMS, **_QKV, **_QKV_BIAS, **_at("mlp", _mlp(72))}),
        "model.vision_encoder.embeddings.patch_embedding.weight": (32, 3, 4, 4),
        **_at("model.vision_encoder.encoder.layers.[0-1].self_attn.q_proj", {"weight": (32, 32), "bias": (32,)}),
        **_at("model.mm_projector.readout.0", {"weight": (80, 32), "bias": (80,)}),
    },
)
_BLOCK: dict[str, Shape] = {
    **_at("ln", {"weight": (96,), "bias": (96,)}),
    **_at("mixer.Wqkv", {"weight": (288, 96), "bias": (288,)}),
    **_at("mixer.out_proj", {"weight": (96, 96), "bias": (96,)}),
    "mixer.rotary_emb.inv_freq": (4,),
    **_at("mlp", _FC),
}
REMOTE["mixformer-sequential"] = Remote(
    {**_GPT, "model_type": "mixformer-sequential", "n_inner": None},
    {
        "layers.0.wte.weight": (101, 96),
        **_at("layers.[1-2]", _BLOCK),
        **_at("layers.3", {"ln.weight": (96,), "ln.bias": (96,), "linear.weight": (101, 96), "linear.bias": (101,)}),
    },
    parts={
        "layers.1.mixer.Wqkv.weight": _ALL,
        "layers.2.mixer.Wqkv.bias": _ALL,
        "layers.2.mlp.fc2.weight": (1, [(192, 384)]),
    },
)
