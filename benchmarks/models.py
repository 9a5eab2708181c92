"""``python -m benchmarks.models`` writes docs/reference/models.md: open models at real sizes, without weights.

A model's config.json (a copy in ``benchmarks/configs``) gives its class in transformers; built without memory, on
torch's meta device, the class gives the names and shapes that it would save. What publishers add to them (layers that
predict further tokens, the scales of quantized weights) is put in by their published formats. Then the plan is made as
for a checkpoint on disk.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from reshard.formats.errors import ReshardError
from reshard.formats.mesh import mesh_of
from reshard.formats.notation.architecture_files import find_architecture
from reshard.mesh.degrees import refusal, valid_degrees
from reshard.mesh.plan import make_plan
from reshard.mesh.totals import rows_of, totals_of
from reshard.model.binding import bind
from reshard.model.model import FullTensor, Model
from reshard.source.completeness import check_complete
from reshard.text import human_bytes

CONFIGS = Path(__file__).parent / "configs"
PAGE = Path(__file__).parent.parent / "docs" / "reference" / "models.md"
DEGREE, LIMIT = 8, 64
WHERE = "model.safetensors"

Tensors = dict[str, tuple[str, tuple[int, ...]]]
"""Name -> dtype and shape."""


@dataclass(frozen=True)
class Listed:
    """A model of the table: the name of its config, how it is published, and where the config came from."""

    name: str
    config: str
    source: str
    exact: bool = True
    remote: Callable[[Mapping[str, Any]], Tensors] | None = None  # where transformers has no class for it
    more: Callable[[Tensors, Mapping[str, Any]], Tensors] | None = None
    stored: Callable[[Tensors, Mapping[str, Any]], Tensors] | None = None
    weights: str = ""
    note: str = ""


@dataclass(frozen=True)
class Row:
    """A line of the table."""

    model: str
    model_type: str
    parameters: str
    weights: str
    tp: str
    ep: str
    per_rank: str
    replicated: str
    source: str
    note: str

    def text(self) -> str:
        return "| " + " | ".join(vars(self).values()) + " |"


# ------------------------------------------------------------------------------------------------ names and shapes


def read_config(name: str) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((CONFIGS / f"{name}.json").read_text(encoding="utf-8"))
    return config


def saved_tensors(config: Mapping[str, Any]) -> Tensors:
    """What ``save_pretrained`` would write of the class that a config names, without making any of it."""
    import torch
    import transformers
    from transformers.core_model_loading import revert_weight_conversion

    transformers.utils.logging.set_verbosity_error()
    settings = _without_quantization(config)
    model_type = settings.pop("model_type")
    known = transformers.models.auto.configuration_auto.CONFIG_MAPPING
    built = known[model_type if model_type in known else "deepseek_v3"].from_dict(settings)
    dtype = _dtype(config)
    with torch.device("meta"):
        model = _class(config)._from_config(built)
    tied = set(model.all_tied_weights_keys)
    state = {key: tensor for key, tensor in model.state_dict().items() if key not in tied}
    written = revert_weight_conversion(model, state)
    return {key: (dtype, tuple(tensor.shape)) for key, tensor in written.items()}


def _class(config: Mapping[str, Any]) -> Any:
    """The class that config.json names, or the one that transformers has for the model type under another name."""
    import transformers
    from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES as IMAGES

    name = config["architectures"][0]
    return getattr(transformers, name if hasattr(transformers, name) else IMAGES[config["model_type"]])


def _without_quantization(config: Mapping[str, Any]) -> dict[str, Any]:
    kept = {key: value for key, value in config.items() if key != "quantization_config"}
    for section in ("text_config", "vision_config"):
        if isinstance(kept.get(section), dict):
            kept[section] = _without_quantization(kept[section])
            if kept[section].get("model_type") == "kimi_k2":
                kept[section]["model_type"] = "deepseek_v3"
    return kept


def _dtype(config: Mapping[str, Any]) -> str:
    named = config.get("dtype") or config.get("torch_dtype")
    return {"float32": "F32", "float16": "F16"}.get(str(named), "BF16")


def _settings(config: Mapping[str, Any]) -> Mapping[str, Any]:
    return {**config, **config.get("text_config", {})}


# ----------------------------------------------------------------------------- where transformers has no class


def _bf16(shapes: Mapping[str, tuple[int, ...]]) -> Tensors:
    return {name: ("BF16", shape) for name, shape in shapes.items()}


def _ends(prefix: str, head: str, config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    table = (config["vocab_size"], config["hidden_size"])
    return {f"{prefix}embed_tokens.weight": table, f"{prefix}norm.weight": table[1:], f"{head}lm_head.weight": table}


def nemotron_nas(config: Mapping[str, Any]) -> Tensors:
    """Llama with heads and widths by ``block_configs``, as vLLM and mlx-lm load it."""
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    found = _ends("model.", "", config)
    for number, block in enumerate(config["block_configs"]):
        layer, attention, ffn = f"model.layers.{number}.", block["attention"], block["ffn"]
        if not attention["no_op"]:
            found[f"{layer}input_layernorm.weight"] = (hidden,)
        if attention["replace_with_linear"]:
            found[f"{layer}self_attn.linear_attn.weight"] = (hidden, hidden)
        elif not attention["no_op"]:
            narrow = hidden // attention["n_heads_in_group"]
            rows = {"q": hidden, "k": narrow, "v": narrow, "o": hidden}
            found |= {f"{layer}self_attn.{name}_proj.weight": (size, hidden) for name, size in rows.items()}
        if not ffn["no_op"]:
            found[f"{layer}post_attention_layernorm.weight"] = (hidden,)
        if ffn["replace_with_linear"]:
            found[f"{layer}mlp.linear_mlp.weight"] = (hidden, hidden)
        elif not ffn["no_op"]:
            found |= _gated(f"{layer}mlp.", math.ceil(int(2 * ffn["ffn_mult"] * hidden / 3) / 256) * 256, hidden)
    assert hidden % heads == 0
    return _bf16(found)


def _gated(
    prefix: str, width: int, hidden: int, names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
) -> dict[str, tuple[int, ...]]:
    gate, up, down = (f"{prefix}{name}.weight" for name in names)
    return {gate: (width, hidden), up: (width, hidden), down: (hidden, width)}


def kimi_k3(config: Mapping[str, Any]) -> Tensors:
    """The text of Kimi K3, with the names and shapes that tpu-inference's tests list; its small tower is left out."""
    c = config["text_config"]
    hidden, heads, linear = c["hidden_size"], c["num_attention_heads"], c["linear_attn_config"]
    nope, rope, vdim, qrank, kvrank = (
        c[key] for key in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "q_lora_rank", "kv_lora_rank")
    )
    head, inner = linear["head_dim"], linear["num_heads"] * linear["head_dim"]
    latent, shared = c["routed_expert_hidden_size"], c["moe_intermediate_size"] * c["num_shared_experts"]
    delta: dict[str, tuple[int, ...]] = {
        **{f"{name}_proj.weight": (inner, hidden) for name in "qkvg"},
        **{f"{name}_conv1d.weight": (inner, 1, linear["short_conv_kernel_size"]) for name in "qkv"},
        "A_log": (head,), "dt_bias": (inner,), "f_a_proj.weight": (head, hidden), "f_b_proj.weight": (inner, head),
        "b_proj.weight": (linear["num_heads"], hidden), "o_norm.weight": (head,), "o_proj.weight": (hidden, inner),
    }  # fmt: skip
    latents: dict[str, tuple[int, ...]] = {
        "q_a_proj.weight": (qrank, hidden), "q_a_layernorm.weight": (qrank,),
        "q_b_proj.weight": (heads * (nope + rope), qrank),
        "kv_a_proj_with_mqa.weight": (kvrank + rope, hidden), "kv_a_layernorm.weight": (kvrank,),
        "kv_b_proj.weight": (heads * (nope + vdim), kvrank),
        "g_proj.weight": (heads * vdim, hidden), "o_proj.weight": (hidden, heads * vdim),
    }  # fmt: skip
    experts: dict[str, tuple[int, ...]] = {
        "gate.weight": (c["num_experts"], hidden), "gate.e_score_correction_bias": (c["num_experts"],),
        "routed_expert_down_proj.weight": (latent, hidden), "routed_expert_norm.weight": (latent,),
        "routed_expert_up_proj.weight": (hidden, latent),
        **_gated("shared_experts.", shared, hidden),
    }  # fmt: skip
    for number in range(c["num_experts"]):
        experts |= _gated(f"experts.{number}.", c["moe_intermediate_size"], latent, ("w1", "w3", "w2"))
    each: dict[str, tuple[int, ...]] = {
        **{f"{name}_layernorm.weight": (hidden,) for name in ("input", "post_attention")},
        **{f"{name}_res_norm.weight": (hidden,) for name in ("self_attention", "mlp")},
        **{f"{name}_res_proj.weight": (1, hidden) for name in ("self_attention", "mlp")},
    }
    model = "language_model.model."
    found = _ends(model, "language_model.", c)
    found |= {f"{model}output_attn_res_norm.weight": (hidden,), f"{model}output_attn_res_proj.weight": (1, hidden)}
    for number in range(c["num_hidden_layers"]):
        layer = f"{model}layers.{number}."
        attention = delta if number + 1 in linear["kda_layers"] else latents
        dense = number < c["first_k_dense_replace"]
        mlp = _gated("mlp.", c["intermediate_size"], hidden) if dense else experts
        found |= {layer + name: shape for name, shape in each.items()}
        found |= {f"{layer}self_attn.{name}": shape for name, shape in attention.items()}
        found |= {layer + ("" if dense else "block_sparse_moe.") + name: shape for name, shape in mlp.items()}
    return _bf16(found)


# ------------------------------------------------------------------------- layers that predict one token further


def next_token_layer(tensors: Tensors, config: Mapping[str, Any]) -> Tensors:
    """One more layer of the model's own kind, with an embedding and a head of its own (DeepSeek V3, GLM 4.5)."""
    settings = _settings(config)
    last, hidden, vocab = settings["num_hidden_layers"] - 1, settings["hidden_size"], settings["vocab_size"]
    here, there = f"model.layers.{last}.", f"model.layers.{last + 1}."
    layer = {there + key.removeprefix(here): value for key, value in tensors.items() if key.startswith(here)}
    own: dict[str, tuple[int, ...]] = {
        "embed_tokens.weight": (vocab, hidden),
        "enorm.weight": (hidden,),
        "hnorm.weight": (hidden,),
        "eh_proj.weight": (hidden, 2 * hidden),
        "shared_head.norm.weight": (hidden,),
        "shared_head.head.weight": (vocab, hidden),
    }
    return tensors | layer | {there + key: (_dtype(config), shape) for key, shape in own.items()}


def next_token_layer_without_head(tensors: Tensors, config: Mapping[str, Any]) -> Tensors:
    """One more layer that has the model's embedding and head (GLM 5)."""
    layer = next_token_layer(tensors, config)
    last = f"model.layers.{config['num_hidden_layers']}."
    without = {last + "embed_tokens.weight", last + "shared_head.head.weight"}
    return {key: value for key, value in layer.items() if key not in without}


def mtp_block(tensors: Tensors, config: Mapping[str, Any]) -> Tensors:
    """One more layer of full attention under ``mtp.``, sharing embedding and head (Qwen3-Next, Qwen3.5)."""
    hidden = _settings(config)["hidden_size"]
    query = next(key for key in tensors if key.endswith(".self_attn.q_proj.weight") and ".visual." not in key)
    here = query.removesuffix("self_attn.q_proj.weight")
    layer = {"mtp.layers.0." + key.removeprefix(here): value for key, value in tensors.items() if key.startswith(here)}
    own: dict[str, tuple[int, ...]] = {
        "mtp.fc.weight": (hidden, 2 * hidden),
        "mtp.norm.weight": (hidden,),
        "mtp.pre_fc_norm_embedding.weight": (hidden,),
        "mtp.pre_fc_norm_hidden.weight": (hidden,),
    }
    return tensors | layer | {key: (_dtype(config), shape) for key, shape in own.items()}


def nemotron_mtp(tensors: Tensors, config: Mapping[str, Any]) -> Tensors:
    """A layer of attention and one of experts under ``mtp.`` (Nemotron 3, ``mtp_hybrid_override_pattern`` "*E")."""
    hidden = config["hidden_size"]
    found: Tensors = {}
    for place, mark in ((0, ".mixer.q_proj.weight"), (1, ".mixer.gate.weight")):
        here = next(key for key in tensors if key.endswith(mark)).removesuffix(mark) + "."
        found |= {
            f"mtp.layers.{place}." + key.removeprefix(here): value
            for key, value in tensors.items()
            if key.startswith(here)
        }
    own: dict[str, tuple[int, ...]] = {
        "mtp.layers.0.enorm.weight": (hidden,),
        "mtp.layers.0.hnorm.weight": (hidden,),
        "mtp.layers.0.eh_proj.weight": (hidden, 2 * hidden),
        "mtp.layers.1.final_layernorm.weight": (hidden,),
    }
    return tensors | found | {key: (_dtype(config), shape) for key, shape in own.items()}


def v4_mtp(written: Tensors, config: Mapping[str, Any]) -> Tensors:
    """The published names, and one more layer under ``mtp.`` with an embedding and a head of its own (DeepSeek V4).

    It has no compressor. A layer behind those that look up a token's experts in a table is like it in the rest.
    """
    tensors = {_v4_name(name): value for name, value in written.items()}
    here, hidden, vocab = f"layers.{config['num_hash_layers']}.", config["hidden_size"], config["vocab_size"]
    layer = {
        "mtp.0." + key.removeprefix(here): value
        for key, value in tensors.items()
        if key.startswith(here) and ".compressor." not in key and ".indexer." not in key
    }
    own: dict[str, tuple[int, ...]] = {
        **{f"mtp.0.{norm}.weight": (hidden,) for norm in ("enorm", "hnorm", "norm")},
        **{f"mtp.0.{name}_proj.weight": (hidden, hidden) for name in "eh"},
        **{f"mtp.0.{name}.weight": (vocab, hidden) for name in ("emb.tok_emb", "head")},
        **{f"mtp.0.{name}": tensors[name][1] for name in tensors if name.startswith("hc_head")},
    }
    return tensors | layer | {key: (_dtype(config), shape) for key, shape in own.items()}


def _v4_name(name: str) -> str:
    """The name that DeepSeek gave to what transformers writes."""
    for written, published in (
        ("model.embed_tokens", "embed"), ("model.hc_head.hc_", "hc_head_"), ("model.", ""),
        (".attn.norm.", ".attn.kv_norm."),
    ):  # fmt: skip
        name = name.replace(written, published)
    return name


def mimo_mtp(tensors: Tensors, config: Mapping[str, Any]) -> Tensors:
    """Three dense layers with sliding attention under ``model.mtp.`` (MiMo V2)."""
    hidden, layer = config["hidden_size"], config["hybrid_layer_pattern"].index(1)
    attention, mlp = f"model.layers.{layer}.self_attn.", "model.layers.0.mlp."
    norms = ("enorm", "hnorm", "input_layernorm", "pre_mlp_layernorm", "final_layernorm")
    found: dict[str, tuple[str, tuple[int, ...]]] = {}
    for here, there in ((attention, "self_attn."), (mlp, "mlp.")):
        found |= {there + key.removeprefix(here): value for key, value in tensors.items() if key.startswith(here)}
    found |= {f"{norm}.weight": (_dtype(config), (hidden,)) for norm in norms}
    found["eh_proj.weight"] = (_dtype(config), (hidden, 2 * hidden))
    return tensors | {f"model.mtp.layers.{i}.{key}": value for i in range(3) for key, value in found.items()}


# -------------------------------------------------------------------------------------------- as the weights are stored


def experts_input_first(tensors: Tensors, config: Mapping[str, Any]) -> Tensors:
    """Qwen3-VL: the published experts are fused with the input first, transformers 5 writes them output first."""
    return {
        name: (dtype, (shape[0], shape[2], shape[1]) if ".mlp.experts." in name else shape)
        for name, (dtype, shape) in tensors.items()
    }


def fp8_blocks(tensors: Tensors, config: Mapping[str, Any]) -> Tensors:
    """fp8 with an fp32 scale for each block of 128 x 128; what routes, embeds and normalises stays as it is."""
    kept = ("*embed_tokens*", "*lm_head*", "*shared_head*", "*.gate.weight", "*eh_proj*", "*weights_proj*", "*norm*")
    rows, columns = config["quantization_config"]["weight_block_size"]
    found: Tensors = {}
    for name, (dtype, shape) in tensors.items():
        if len(shape) != 2 or not name.endswith(".weight") or any(fnmatch.fnmatch(name, mark) for mark in kept):
            found[name] = ("F32" if name.endswith("e_score_correction_bias") else dtype, shape)
            continue
        found[name] = ("F8_E4M3", shape)
        found[f"{name}_scale_inv"] = ("F32", (math.ceil(shape[0] / rows), math.ceil(shape[1] / columns)))
    return found


def fp8_and_fp4(tensors: Tensors, config: Mapping[str, Any]) -> Tensors:
    """DeepSeek V4: routed experts of 4 bits, two to an int8, with a scale for each 32; blocks as in V3.

    What mixes the streams, sinks and biases of routers stay in 32 bits.
    """
    kept = ("*embed*", "*tok_emb*", "*head*", "*.gate.weight", "*compressor*", "*weights_proj*", "*norm*")
    single = ("*hc_*", "*.attn_sink", "*.gate.bias", "*.ape")
    rows, columns = config["quantization_config"]["weight_block_size"]
    found: Tensors = {}
    for name, (dtype, shape) in tensors.items():
        module = name.removesuffix(".weight")
        if any(fnmatch.fnmatch(name, mark) for mark in single):
            found[name] = ("F32", shape)
        elif name.endswith(".tid2eid"):
            found[name] = ("I64", shape)
        elif len(shape) != 2 or module == name or any(fnmatch.fnmatch(name, mark) for mark in kept):
            found[name] = (dtype, shape)
        elif ".experts." in name:
            found[name] = ("I8", (shape[0], shape[1] // 2))
            found[f"{module}.scale"] = ("F8_E8M0", (shape[0], shape[1] // 32))
        else:
            found[name] = ("F8_E4M3", shape)
            found[f"{module}.scale"] = ("F8_E8M0", (math.ceil(shape[0] / rows), math.ceil(shape[1] / columns)))
    return found


def scales_of_each_key_head(tensors: Tensors, config: Mapping[str, Any]) -> Tensors:
    """fp8 blocks, of MiMo V2: each of four KV heads of a layer with full attention has its own, 1.5 rounded up."""
    found, head = fp8_blocks(tensors, config), config["head_dim"]
    for layer, sliding in enumerate(config["hybrid_layer_pattern"]):
        if not sliding:
            name = f"model.layers.{layer}.self_attn.k_proj.weight_scale_inv"
            dtype, (_, columns) = found[name]
            found[name] = (dtype, (config["num_key_value_heads"] * math.ceil(head / 128), columns))
    return found


def with_frequencies(tensors: Tensors, config: Mapping[str, Any]) -> Tensors:
    """Kimi K2: each layer has its rotary frequencies, of a head as wide as hidden_size / num_attention_heads."""
    half = config["hidden_size"] // config["num_attention_heads"] // 2
    found = fp8_blocks(tensors, config)
    layers = range(config["num_hidden_layers"])
    return found | {f"model.layers.{layer}.self_attn.rotary_emb.inv_freq": ("BF16", (half,)) for layer in layers}


def mxfp4(tensors: Tensors, config: Mapping[str, Any]) -> Tensors:
    """gpt-oss: experts in blocks of 32 values along the input (16 bytes and a scale), output first."""
    found: Tensors = {}
    for name, (dtype, shape) in tensors.items():
        if name.endswith(("gate_up_proj", "down_proj")):
            experts, inputs, outputs = shape
            found[f"{name}_blocks"] = ("U8", (experts, outputs, inputs // 32, 16))
            found[f"{name}_scales"] = ("U8", (experts, outputs, inputs // 32))
        else:
            found[name] = (dtype, shape)
    return found


def packed_mxfp4(tensors: Tensors, config: Mapping[str, Any]) -> Tensors:
    """compressed-tensors: experts by name of 4 bits, two to a byte, and a scale for each 32 along the input."""
    found: Tensors = {}
    for name, (dtype, shape) in tensors.items():
        module = name.removesuffix(".weight")
        if ".experts." not in name:
            found[name] = (dtype, shape)
            continue
        found[f"{module}.weight_packed"] = ("U8", (shape[0], shape[1] // 2))
        found[f"{module}.weight_scale"] = ("U8", (shape[0], shape[1] // 32))
    return found


def kimi_names(tensors: Tensors, config: Mapping[str, Any]) -> Tensors:
    """The published names where transformers 5 writes others: text layers as blocks, parts of the tower elsewhere."""
    others = {
        "language_model.model.blocks.": "language_model.model.layers.",
        "model.mm_projector.": "mm_projector.",
        "vision_tower.encoder.patch_embed.": "vision_tower.patch_embed.",
    }
    found: Tensors = {}
    for name, value in tensors.items():
        written = next((prefix for prefix in others if name.startswith(prefix)), "")
        found[others.get(written, "") + name.removeprefix(written)] = value
    return found


def packed_int4(tensors: Tensors, config: Mapping[str, Any]) -> Tensors:
    """compressed-tensors: experts of 4 bits, eight to an integer, and a scale for each group along the input."""
    settings = _settings(config)["quantization_config"]["config_groups"]["group_0"]["weights"]
    found: Tensors = {}
    for name, (dtype, shape) in tensors.items():
        module = name.removesuffix(".weight")
        if ".mlp.experts." not in name:
            found[name] = (dtype, shape)
            continue
        found[f"{module}.weight_packed"] = ("I32", (shape[0], shape[1] // 8))
        found[f"{module}.weight_scale"] = (dtype, (shape[0], shape[1] // settings["group_size"]))
        found[f"{module}.weight_shape"] = ("I32", (2,))
    return found


# ------------------------------------------------------------------------------------------------------ the table


_AIC = "[aiconfigurator](https://github.com/ai-dynamo/aiconfigurator)"
_MLC = "[mlc-llm](https://github.com/mlc-ai/mlc-llm)"
_INFER = "[InferSim](https://github.com/alibaba/InferSim)"
_HUB = "the Hub's page of "
_DEFAULTS = "transformers' defaults"
_NO_MTP = "without the layer that predicts a further token"

MODELS = (
    Listed("Llama 3.1 8B", "llama-3.1-8b", _AIC),
    Listed("Llama 3.2 3B", "llama-3.2-3b", _MLC),
    Listed("Llama 3.3 70B", "llama-3.3-70b", f"{_AIC}, that of 3.1"),
    Listed("Llama 3.1 405B", "llama-3.1-405b", _AIC),
    Listed("Llama 4 Scout", "llama-4-scout", f"{_AIC}; vision tower unchecked", exact=False),
    Listed("Llama 4 Maverick", "llama-4-maverick", f"{_AIC}; vision tower unchecked", exact=False),
    Listed("Qwen2.5 72B", "qwen2.5-72b", f"{_HUB}a fine-tune, m8than/banana-2-b-72b"),
    Listed("Qwen3 8B", "qwen3-8b", _AIC),
    Listed("Qwen3 32B", "qwen3-32b", _AIC),
    Listed("Qwen3 30B-A3B", "qwen3-30b-a3b", _AIC),
    Listed("Qwen3 235B-A22B", "qwen3-235b-a22b", _AIC),
    Listed("Qwen3 Coder 480B-A35B", "qwen3-coder-480b", _AIC),
    Listed("Qwen3-Next 80B-A3B", "qwen3-next-80b", _INFER, more=mtp_block),
    Listed("Qwen3.5 27B", "qwen3.5-27b", _AIC, more=mtp_block),
    Listed("Qwen3.5 35B-A3B", "qwen3.5-35b-a3b", _AIC, more=mtp_block),
    Listed("Qwen3.5 122B-A10B", "qwen3.5-122b-a10b", _AIC, more=mtp_block),
    Listed("Qwen3.5 397B-A17B", "qwen3.5-397b-a17b", _AIC, more=mtp_block),
    Listed("Qwen3-VL 32B", "qwen3-vl-32b", _AIC),
    Listed("Qwen3-VL 30B-A3B", "qwen3-vl-30b-a3b", _AIC, more=experts_input_first),
    Listed("Qwen3-VL 235B-A22B", "qwen3-vl-235b-a22b", _AIC, more=experts_input_first),
    Listed("DeepSeek V3, R1", "deepseek-v3", _AIC, more=next_token_layer, stored=fp8_blocks, weights="fp8 blocks"),
    Listed("DeepSeek V3.2", "deepseek-v3.2", _AIC, more=next_token_layer, stored=fp8_blocks, weights="fp8 blocks"),
    Listed(
        "DeepSeek V4 Flash",
        "deepseek-v4-flash",
        _AIC,
        more=v4_mtp,
        stored=fp8_and_fp4,
        weights="fp8 blocks, fp4 experts",
    ),
    Listed("Kimi K2", "kimi-k2", _AIC, stored=with_frequencies, weights="fp8 blocks"),
    Listed("Kimi K2.5", "kimi-k2.5", _AIC, more=kimi_names, stored=packed_int4, weights="int4 experts"),
    Listed(
        "Kimi K3",
        "kimi-k3",
        f"{_AIC}; vision tower left out",
        exact=False,
        remote=kimi_k3,
        stored=packed_mxfp4,
        weights="MXFP4 experts",
    ),
    Listed("GLM 4.5 Air", "glm-4.5-air", f"{_HUB}a fine-tune, PrimeIntellect/INTELLECT-3-Base", more=next_token_layer),
    Listed("GLM 4.5, 4.6, 4.7", "glm-4.6", f"{_HUB}zai-org/GLM-4.7", more=next_token_layer),
    Listed("GLM 5", "glm-5", _AIC, more=next_token_layer_without_head),
    Listed("GLM 5.2", "glm-5.2", _AIC, more=next_token_layer_without_head),
    Listed("gpt-oss 20B", "gpt-oss-20b", _AIC, stored=mxfp4, weights="MXFP4 experts"),
    Listed("gpt-oss 120B", "gpt-oss-120b", _AIC, stored=mxfp4, weights="MXFP4 experts"),
    Listed("Mistral Small 3.2 24B", "mistral-small-3.2", f"{_HUB}the text model of 2501, tower unchecked", exact=False),
    Listed("Mistral Large 2411 123B", "mistral-large-2411", f"{_HUB}a fine-tune, NarrativAI/Cakrawala-123B"),
    Listed("Devstral Small 1.1 24B", "devstral-small", "that of Mistral Small 2501", exact=False),
    Listed("Mixtral 8x7B", "mixtral-8x7b", _AIC),
    Listed("Mixtral 8x22B", "mixtral-8x22b", _AIC),
    Listed("Gemma 2 27B", "gemma-2-27b", _MLC),
    Listed("Gemma 3 27B", "gemma-3-27b", f"{_HUB}a 4-bit copy, Abc7347/copytext27binstructgmn"),
    Listed("Gemma 4 26B-A4B", "gemma-4-26b-a4b", _AIC),
    Listed("Gemma 4 31B", "gemma-4-31b", f"{_AIC}, that of the NVFP4 copy"),
    Listed("Phi-4 14B", "phi-4", "quoted in a GitHub repository"),
    Listed("MiniMax M2.5 (M2)", "minimax-m2.5", _AIC, stored=fp8_blocks, weights="fp8 blocks"),
    Listed("Granite 4.0 H Small", "granite-4.0-h-small", "put together from a page that quotes it", exact=False),
    Listed("Nemotron Super 49B", "nemotron-super-49b", _AIC, remote=nemotron_nas),
    Listed("Nemotron-H 56B", "nemotron-h-56b", _AIC),
    Listed("Nemotron Nano 9B v2", "nemotron-nano-9b-v2", "put together from a repository's tests", exact=False),
    Listed("Nemotron 3 Nano 30B-A3B", "nemotron-3-nano-30b", _AIC),
    Listed("Nemotron 3 Super 120B-A12B", "nemotron-3-super-120b", f"{_AIC}, that of the fp8 copy", more=nemotron_mtp),
    Listed("Nemotron 3 Ultra 550B-A55B", "nemotron-3-ultra-550b", _AIC, more=nemotron_mtp),
    Listed("MiMo V2 Flash", "mimo-v2-flash", _AIC, more=mimo_mtp, stored=scales_of_each_key_head, weights="fp8 blocks"),
    Listed("OLMo 2 32B", "olmo-2-32b", f"{_HUB}allenai/OLMo-2-0325-32B"),
    Listed("OLMo 3 32B", "olmo-3-32b", "that of OLMo 2 with the layers of 3", exact=False),
    Listed("Command R 08-2024 35B", "command-r-08-2024", f"{_HUB}a copy, unsloth/c4ai-command-r-08-2024"),
    Listed("Command A 111B", "command-a", "put together from tests of TensorRT-LLM", exact=False),
    Listed("Falcon-H1 34B", "falcon-h1-34b", "table in transformers' documentation, rest unchecked", exact=False),
    Listed("SmolLM3 3B", "smollm3-3b", _DEFAULTS),
    Listed("ERNIE 4.5 21B-A3B", "ernie-4.5-21b-a3b", "quoted in a GitHub repository's tests", note=_NO_MTP),
    Listed("Hunyuan A13B", "hunyuan-a13b", "quoted in a GitHub repository's tests"),
)


def published_tensors(listed: Listed, config: Mapping[str, Any]) -> tuple[Tensors, int]:
    """The tensors as they are published, and the number of parameters they stand for."""
    tensors = listed.remote(config) if listed.remote else saved_tensors(config)
    if listed.more:
        tensors = listed.more(tensors, config)
    parameters = sum(math.prod(shape) for _, shape in tensors.values())
    return (listed.stored(tensors, config) if listed.stored else tensors), parameters


def bound_model(config: Mapping[str, Any], tensors: Tensors) -> Model:
    architecture = find_architecture(config, Path())
    model = bind(architecture, config, [FullTensor(name, *value, WHERE) for name, value in tensors.items()])
    check_complete(model, Path(WHERE))
    return model


def row(listed: Listed) -> Row:
    """Plan a model and say what comes of it. Raises ReshardError where the rules do not fit."""
    config = read_config(listed.config)
    tensors, parameters = published_tensors(listed, config)
    model = bound_model(config, tensors)
    degrees = valid_degrees(model, limit=LIMIT)
    degree = max(found for found in degrees if found <= DEGREE)
    plan = make_plan(model, mesh_of(degree))
    totals = totals_of(plan, rows_of(plan))
    return Row(
        model=listed.name,
        model_type=config["model_type"],
        parameters=f"{parameters / 1e9:,.2f} B",
        weights=listed.weights or _dtype(config).lower(),
        tp=_numbers(degrees),
        ep=_numbers(valid_degrees(model, "ep", limit=LIMIT)),
        per_rank=human_bytes(totals.bytes_per_rank) + (f" (tp {degree})" if degree != DEGREE else ""),
        replicated=f"{totals.share_replicated:.1%}",
        source=listed.source if listed.exact else f"{listed.source} *",
        note="; ".join(_notes(listed, model, degree, plan.padding)),
    )


def _numbers(degrees: Sequence[int]) -> str:
    return ", ".join(str(degree) for degree in degrees if degree > 1) or "–"


def _notes(listed: Listed, model: Model, degree: int, padding: Mapping[str, int]) -> Iterator[str]:
    if degree != DEGREE:
        why = refusal(model, mesh_of(DEGREE))
        assert why is not None
        if why.tensor is None:
            yield f"not {DEGREE}: {why.why}"
        else:
            yield f"not {DEGREE}: the cut would fall within a quantization block"
            yield from _dealt_whole(model)
    for axis, size in padding.items():
        yield f"{axis} padded to {size:,}"
    if listed.note:
        yield listed.note


def _dealt_whole(model: Model) -> Iterator[str]:
    """What a rank holds if experts are dealt whole to the ranks over which the rest is cut."""
    try:
        plan = make_plan(model, mesh_of(DEGREE, DEGREE, same_ranks=True))
    except ReshardError:
        return
    nbytes = totals_of(plan, rows_of(plan)).bytes_per_rank
    yield f"with experts dealt whole (`--tp {DEGREE} --ep {DEGREE}` over the same ranks) {human_bytes(nbytes)}"


_HEAD = """\
# Popular models, planned at their real sizes

Written by `python -m benchmarks.models`, from each model's config.json alone: no weights were read. The names and
shapes are those that transformers writes for the model. If transformers has no class for it, they are those that other
loaders read. What publishers add (layers that predict further tokens, scales of quantized weights) follows their
published formats. Vision towers are included, and are the same on every rank.

- **tp**, **ep**: the valid degrees of tensor and expert parallelism above 1, up to 64. A vocabulary that does not
  divide is padded.
- **rank at tp 8**: the bytes of the weights that a rank holds. If 8 is not valid, at the next smaller valid degree.
- **replicated**: the part of these bytes that other ranks hold too (norms, routers, latents, KV heads, vision towers).
- **config from**: where the config.json came from. The Hub was not at hand, so these are copies in public repositories.
  A star marks one that is not a copy of the file: its numbers can be wrong. They are in `benchmarks/configs`.
"""

_COLUMNS = (
    "model", "model_type", "parameters", "weights", "tp", "ep", "rank at tp 8", "replicated", "config from", "notes"
)  # fmt: skip


def page(rows: Sequence[Row], refused: Mapping[str, str]) -> str:
    """The text of docs/reference/models.md."""
    lines = [
        _HEAD,
        "| " + " | ".join(_COLUMNS) + " |",
        "| --- | --- | ---: | --- | --- | --- | ---: | ---: | --- | --- |",
    ]
    lines += [found.text() for found in rows]
    if refused:
        lines += ["", "Refused today:", "", *(f"- {name}: {why}" for name, why in refused.items())]
    return "\n".join([*lines, ""])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("only", nargs="*", help="print the rows of these configs and write nothing")
    only = parser.parse_args().only
    rows: list[Row] = []
    refused: dict[str, str] = {}
    for listed in MODELS:
        if only and listed.config not in only:
            continue
        try:
            rows.append(row(listed))
            print(rows[-1].text(), flush=True)
        except ReshardError as error:
            refused[listed.name] = error.message.removeprefix(f"{WHERE}: ")
            print(f"{listed.name}: {refused[listed.name]}", flush=True)
    if not only:
        PAGE.write_text(page(rows, refused), encoding="utf-8")
        print(f"{len(rows)} models in {PAGE}")


if __name__ == "__main__":
    main()
