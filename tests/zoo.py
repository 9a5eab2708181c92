"""Tiny models of every supported architecture, made from their real config classes with random weights.

The numbers are awkward on purpose: no two axes of one model have the same size, the layers are odd in number, most
models share KV heads, many vocabularies do not divide by 8. Norms and biases are not at their initial ones and zeros,
so that a missing one shows.
"""

from __future__ import annotations

import json
import logging
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load_file, save_file

from formats.notation.architecture import built_in_architectures

if TYPE_CHECKING:
    from transformers import PreTrainedModel


DEGREES = (2, 3, 4, 6, 8, 12, 16)


@dataclass(frozen=True)
class Entry:
    """A tiny model, and what is true of it."""

    name: str
    build: Callable[..., PreTrainedModel]  # given a number of experts, with so many
    model_type: str
    degrees: tuple[int, ...]  # of DEGREES: those that every family of parallel axes divides
    loads_alone: bool  # a rank's folder loads with plain from_pretrained
    notes: str = ""
    # tensors that published checkpoints hold beside what the class saves: masks, frequencies, layers it ignores
    extra: Mapping[str, tuple[int, ...]] = field(default_factory=dict)


ZOO: dict[str, Entry] = {}


def save(
    name: str,
    folder: Path,
    dtype: torch.dtype = torch.float32,
    max_shard_size: str = "5GB",
    experts: int | None = None,
) -> Path:
    """Write the checkpoint of a model of the zoo into ``folder`` and return it; the same name gives the same bytes.

    ``experts``: so many of them, whatever the model of the zoo has.
    """
    logging.getLogger("transformers").setLevel(logging.ERROR)
    entry = ZOO[name]
    seed = zlib.crc32(name.encode())
    with torch.random.fork_rng(devices=[]):  # some classes draw their vectors at random
        torch.manual_seed(seed)
        model = entry.build(experts)
    randomize(model, seed)
    model.to(dtype).save_pretrained(folder, max_shard_size=max_shard_size)
    if entry.extra:
        generator = torch.Generator().manual_seed(seed + 1)
        _add_tensors(
            folder, {key: torch.randn(shape, generator=generator).to(dtype) for key, shape in entry.extra.items()}
        )
    return folder


@cache
def one_of_each() -> list[str]:
    """The first model of each architecture file, and those that are variants of another."""
    files: dict[str, str] = {}
    built_in = built_in_architectures()
    for name, entry in ZOO.items():
        files.setdefault(built_in[entry.model_type].name, name)
    return [name for name in ZOO if name in files.values() or "-" in name]


def class_of(name: str) -> Any:
    """The class of transformers of a model of the zoo."""
    with torch.device("meta"):
        return type(ZOO[name].build())


def loads(name: str, folder: Path) -> bool:
    """Whether plain ``from_pretrained`` fills a model of the zoo's class from a folder, a rank's for one."""
    try:
        _, info = class_of(name).from_pretrained(folder, output_loading_info=True)
    except Exception:  # a shape that config.json cannot say, or a config.json that transformers refuses
        return False
    return not info["missing_keys"]


def _add_tensors(folder: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """Add tensors to a saved checkpoint: to its one file, or as one more file of its index."""
    whole, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if whole.exists():
        save_file({**load_file(whole), **tensors}, whole, metadata={"format": "pt"})
        return
    document = json.loads(index.read_text())
    document["weight_map"] |= dict.fromkeys(tensors, "model-extra.safetensors")
    document["metadata"]["total_size"] += sum(tensor.nbytes for tensor in tensors.values())
    index.write_text(json.dumps(document, indent=2, sort_keys=True) + "\n")
    save_file(dict(tensors), folder / "model-extra.safetensors", metadata={"format": "pt"})


@torch.no_grad()
def randomize(model: PreTrainedModel, seed: int) -> None:
    """Give matrices a trained model's scale, and move every vector (norms, biases, decay rates) off its start."""
    generator = torch.Generator().manual_seed(seed)
    saved = model.state_dict(keep_vars=True)
    for key, tensor in sorted({id(tensor): (key, tensor) for key, tensor in saved.items()}.values()):
        if not tensor.is_floating_point():
            continue
        noise = torch.randn(tensor.shape, generator=generator)
        if tensor.dim() < 2 or key.endswith("A_log"):
            tensor.add_(0.2 * noise)
        else:
            tensor.copy_(noise / tensor.shape[-1] ** 0.5)


def _add(
    name: str,
    degrees: tuple[int, ...],
    *,
    model_type: str | None = None,
    loads_alone: bool = True,
    model: str = "AutoModelForCausalLM",
    notes: str = "",
    extra: Mapping[str, tuple[int, ...]] | None = None,
    **settings: Any,
) -> None:
    kind = model_type or name

    def build(experts: int | None = None) -> PreTrainedModel:
        import transformers

        config = transformers.AutoConfig.for_model(kind, **(settings if experts is None else _of(settings, experts)))
        cls = getattr(transformers, model)
        return cls.from_config(config) if model.startswith("Auto") else cls(config)

    assert name not in ZOO, name
    ZOO[name] = Entry(name, build, kind, degrees, loads_alone, notes, extra or {})


_COUNTS = {"num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"}


def _of(settings: Mapping[str, Any], experts: int) -> dict[str, Any]:
    """The same settings, with another number of experts where they speak of it."""
    inner = {key: _of(value, experts) for key, value in settings.items() if isinstance(value, Mapping)}
    return {**settings, **inner, **dict.fromkeys(_COUNTS & settings.keys(), experts)}


# 8 query heads on 4 KV heads: degree 8 gives two ranks the same KV head
_TOKENS: dict[str, Any] = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_DENSE: dict[str, Any] = {
    **_TOKENS,
    "hidden_size": 80,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 12,
    "intermediate_size": 72,
    "vocab_size": 101,
    "num_hidden_layers": 3,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
}
# types that take the size of a head from hidden_size / num_attention_heads: 8 heads of 10
_PLAIN: dict[str, Any] = {key: value for key, value in _DENSE.items() if key != "head_dim"}
_EXPERTS: dict[str, Any] = {**_DENSE, "intermediate_size": 40, "num_experts_per_tok": 2}
_MOE: dict[str, Any] = {**_DENSE, "num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 24}


def _further(prefix: str, *others: str, width: int = 80) -> dict[str, tuple[int, ...]]:
    """The norms of a layer that predicts one token further, and the matrix that joins an embedding and a state."""
    return {
        **{f"{prefix}.{name}.weight": (width,) for name in ("enorm", "hnorm", *others)},
        f"{prefix}.eh_proj.weight": (width, 2 * width),
    }


def _layer(prefix: str, q: int, kv: int, out: int, mlp: Mapping[str, int], v: int | None = None) -> dict[str, Any]:
    """Attention with ``q``, ``kv`` and ``v`` rows of q, k and v and ``out`` inputs, and gated MLPs of these widths."""
    rows = {"q": q, "k": kv, "v": v or kv}
    return {
        **{f"{prefix}.self_attn.{name}_proj.weight": (size, 80) for name, size in rows.items()},
        f"{prefix}.self_attn.o_proj.weight": (80, out),
        **{
            f"{prefix}.{name}.{part}_proj.weight": (80, width) if part == "down" else (width, 80)
            for name, width in mlp.items()
            for part in ("gate", "up", "down")
        },
    }


# ---------------------------------------------------------------------------------------- the names of Llama

_add("llama", (2, 4, 8), **_DENSE)
_add(
    "llama-old",
    (2, 4, 8),
    model_type="llama",
    notes="with the rotary frequencies that old checkpoints carry",
    extra={f"model.layers.{layer}.self_attn.rotary_emb.inv_freq": (6,) for layer in range(3)},
    **_DENSE,
)
_add("llama-tied", (2, 4, 8), model_type="llama", **{**_DENSE, "tie_word_embeddings": True, "vocab_size": 120})
_add("llama-biases", (2, 4, 8), model_type="llama", attention_bias=True, mlp_bias=True, **_DENSE)
_add(
    "llama-6kv",
    (2, 3, 4, 6, 12),
    model_type="llama",
    notes="6 KV heads on 4 ranks: 3 each, and half of each one's query heads",
    **{**_DENSE, "hidden_size": 96, "num_attention_heads": 12, "num_key_value_heads": 6, "head_dim": 10},
)
_add(
    "llama-24-on-6",
    (2, 3, 4, 6, 8, 12),
    model_type="llama",
    **{
        **_DENSE,
        "hidden_size": 96,
        "num_attention_heads": 24,
        "num_key_value_heads": 6,
        "head_dim": 8,
        "vocab_size": 61,
    },
)
_add(
    "llama-classifier",
    (2, 4, 8),
    model_type="llama",
    model="LlamaForSequenceClassification",
    notes="a head of one row for each class, as reward models have",
    num_labels=5,
    **_DENSE,
)
_add(
    "qwen3-base",
    (2, 4, 8),
    model_type="qwen3",
    model="Qwen3Model",
    notes="names without a prefix and no head, as embedding models have",
    **_DENSE,
)
_add("llama-mha", (2, 4, 8), model_type="llama", **{**_DENSE, "num_key_value_heads": 8})
_add("llama-mqa", (2, 4, 8), model_type="llama", **{**_DENSE, "num_key_value_heads": 1})
for _name in ("mistral", "ministral", "ministral3", "qwen2", "qwen3", "seed_oss", "arcee", "cwm"):
    _add(_name, (2, 4, 8), **_DENSE)
_add("qwen2-tied", (2, 4, 8), model_type="qwen2", **{**_DENSE, "tie_word_embeddings": True})
_add("qwen3-tied", (2, 4, 8), model_type="qwen3", **{**_DENSE, "tie_word_embeddings": True, "vocab_size": 120})
_add("helium", (2, 4, 8), loads_alone=False, **{**_DENSE, "head_dim": 10})
for _name in ("gemma", "gemma2", "gemma3_text", "vaultgemma", "smollm3"):
    _add(_name, (2, 4, 8), **{**_DENSE, "tie_word_embeddings": True})
for _name in ("olmo", "olmo2", "olmo3", "granite", "cohere2", "exaone4", "nemotron"):
    _add(_name, (2, 4, 8), **_DENSE)
_add("cohere", (2, 4, 8), use_qk_norm=True, **{**_DENSE, "tie_word_embeddings": True})
_add("stablelm", (2, 4, 8), loads_alone=False, use_qkv_bias=True, **_PLAIN)
_add(
    "stablelm-norms",
    (2, 4, 8),
    model_type="stablelm",
    loads_alone=False,
    qk_layernorm=True,
    **{**_PLAIN, "vocab_size": 120},
)

# ------------------------------------------------------------------------------------- packed q, k, v; packed gate, up

_add("phi3", (2, 4, 8), **_DENSE)
_add("gpt_neox", (2, 4, 8), loads_alone=False, **{**_PLAIN, "num_key_value_heads": 8})
_add(
    "gpt_neox-old",
    (2, 4, 8),
    model_type="gpt_neox",
    loads_alone=False,
    extra={
        f"gpt_neox.layers.{layer}.attention.{key}": shape
        for layer in range(3)
        for key, shape in {"bias": (1, 1, 64, 64), "masked_bias": (), "rotary_emb.inv_freq": (2,)}.items()
    },
    **_PLAIN,
)
_add("gpt_neox-tied", (2, 4, 8), model_type="gpt_neox", loads_alone=False, **{**_PLAIN, "tie_word_embeddings": True})
_add(
    "bloom",
    (2, 4, 8),
    loads_alone=False,
    hidden_size=80,
    n_head=8,
    n_layer=3,
    vocab_size=101,
    tie_word_embeddings=True,
    **_TOKENS,
)
_FALCON: dict[str, Any] = {
    **_TOKENS,
    "hidden_size": 80,
    "num_attention_heads": 8,
    "num_hidden_layers": 3,
    "vocab_size": 101,
}
_add(
    "falcon-7b",
    (2, 4, 8),
    model_type="falcon",
    loads_alone=False,
    multi_query=True,
    parallel_attn=True,
    bias=False,
    **_FALCON,
)
_add(
    "falcon-40b",
    (2, 4, 8),
    model_type="falcon",
    loads_alone=False,
    new_decoder_architecture=True,
    num_kv_heads=4,
    bias=False,
    **{**_FALCON, "vocab_size": 120},
)
_add(
    "falcon-rw",
    (2, 4, 8),
    model_type="falcon",
    loads_alone=False,
    multi_query=False,
    alibi=True,
    parallel_attn=False,
    bias=True,
    ffn_hidden_size=152,
    **_FALCON,
)
_GPT2: dict[str, Any] = {**_TOKENS, "n_embd": 80, "n_head": 8, "n_layer": 3, "n_positions": 36, "vocab_size": 101}
_add("gpt2", (2, 4, 8), loads_alone=False, **_GPT2)
_add("gpt2-untied", (2, 4, 8), model_type="gpt2", loads_alone=False, n_inner=72, tie_word_embeddings=False, **_GPT2)
_add(
    "gpt2-base",
    (2, 4, 8),
    model_type="gpt2",
    loads_alone=False,
    model="GPT2Model",
    notes="as published: no prefix, and a causal mask in each layer",
    extra={
        f"h.{layer}.attn.{key}": shape
        for layer in range(3)
        for key, shape in {"bias": (1, 1, 36, 36), "masked_bias": ()}.items()
    },
    **_GPT2,
)
_add("gpt_bigcode", (2, 4, 8), loads_alone=False, multi_query=True, n_inner=72, **_GPT2)
_add("gpt_bigcode-mha", (2, 4, 8), model_type="gpt_bigcode", loads_alone=False, multi_query=False, **_GPT2)

_add("ernie4_5", (2, 4, 8), use_bias=True, **_DENSE)
_add("jais2", (2, 4, 8), **_DENSE)
_add("hyperclovax", (2, 4, 8), **_DENSE)
_add("granite_swa", (2, 4, 8), **_DENSE)
_add("glm", (2, 4, 8), attention_bias=True, **_DENSE)
_add("glm4", (2, 4, 8), attention_bias=True, **_DENSE)
_add("starcoder2", (2, 4, 8), **_DENSE)
_add("phi", (2, 4, 8), loads_alone=False, qk_layernorm=True, **{**_PLAIN, "hidden_size": 96})
_add("persimmon", (2, 4, 8), loads_alone=False, **{**_PLAIN, "hidden_size": 96})
_add("apertus", (2, 4, 8), **_DENSE)
_add("hunyuan_v1_dense", (2, 4, 8), **_DENSE)
_add("nanochat", (2, 4, 8), **_DENSE)
_add("bitnet", (2, 4, 8), loads_alone=False, **_PLAIN)
_add("diffllama", (2, 4), **_DENSE)
_add("gptj", (2, 4, 8), loads_alone=False, rotary_dim=4, n_inner=72, tie_word_embeddings=False, **_GPT2)
_add("codegen", (2, 4, 8), loads_alone=False, rotary_dim=4, n_inner=72, tie_word_embeddings=False, **_GPT2)
_add("openai-gpt", (2, 4, 8), loads_alone=False, **_GPT2)
_add(
    "gpt_neo",
    (2, 4, 8),
    loads_alone=False,
    hidden_size=80,
    num_layers=3,
    num_heads=8,
    intermediate_size=72,
    attention_types=[[["global", "local", "global"], 1]],
    vocab_size=101,
    max_position_embeddings=64,
    **_TOKENS,
)
_add("gpt_neox_japanese", (2, 4, 8), loads_alone=False, intermediate_multiple_size=2, **_PLAIN)
_OPT: dict[str, Any] = {**_PLAIN, "ffn_dim": 72, "tie_word_embeddings": True}
_add("opt", (2, 4, 8), loads_alone=False, word_embed_proj_dim=80, **_OPT)
_add(
    "opt-classifier",
    (2, 4, 8),
    model_type="opt",
    loads_alone=False,
    model="OPTForSequenceClassification",
    notes="a head that the architecture's own file does not name",
    num_labels=5,
    word_embed_proj_dim=80,
    **_OPT,
)
_add("opt-projected", (2, 4, 8), model_type="opt", loads_alone=False, word_embed_proj_dim=36, **_OPT)
_add(
    "xglm",
    (2, 4, 8),
    loads_alone=False,
    d_model=80,
    ffn_dim=72,
    num_layers=3,
    attention_heads=8,
    vocab_size=101,
    max_position_embeddings=64,
    **_TOKENS,
)
_add("biogpt", (2, 4, 8), loads_alone=False, **{**_PLAIN, "tie_word_embeddings": True})
_add(
    "mpt",
    (2, 4, 8),
    loads_alone=False,
    d_model=80,
    n_heads=8,
    n_layers=3,
    vocab_size=101,
    max_seq_len=64,
)

# ---------------------------------------------------------------------------------------------------------- experts

_add("mixtral", (2, 4, 8), num_local_experts=6, **_EXPERTS)
_add("mixtral-tied", (2, 4, 8), model_type="mixtral", num_local_experts=3, **{**_EXPERTS, "tie_word_embeddings": True})
_add("qwen3_moe", (2, 4, 8), mlp_only_layers=[1], **_MOE)
_add("qwen2_moe", (2, 4, 8), mlp_only_layers=[0], shared_expert_intermediate_size=40, **_MOE)
_add("olmoe", (2, 4, 8), loads_alone=False, num_experts=5, **{**_EXPERTS, "head_dim": 10})
_add("flex_olmo", (2, 4, 8), num_experts=5, **_EXPERTS)
_add("mellum", (2, 4, 8), **_MOE)
_add("gpt_oss", (2, 4, 8), num_local_experts=6, **_EXPERTS)
_MLA: dict[str, Any] = {
    **_TOKENS,
    "hidden_size": 80,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "q_lora_rank": 28,
    "kv_lora_rank": 20,
    "qk_nope_head_dim": 14,
    "qk_rope_head_dim": 6,
    "v_head_dim": 10,
    "intermediate_size": 72,
    "vocab_size": 101,
    "num_hidden_layers": 3,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
}
_MLA_MOE: dict[str, Any] = {
    **_MLA,
    "moe_intermediate_size": 24,
    "n_routed_experts": 6,
    "n_shared_experts": 2,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}
_add("deepseek_v3", (2, 4, 8), **_MLA_MOE)
_add(
    "deepseek_v3-mtp",
    (2, 4, 8),
    model_type="deepseek_v3",
    num_nextn_predict_layers=1,
    notes="with a layer that predicts one token further, as published; transformers ignores it",
    extra={
        f"model.layers.3.{key}": shape
        for key, shape in {
            "embed_tokens.weight": (101, 80),
            "enorm.weight": (80,),
            "hnorm.weight": (80,),
            "eh_proj.weight": (80, 160),
            "shared_head.norm.weight": (80,),
            "shared_head.head.weight": (101, 80),
            "input_layernorm.weight": (80,),
            "self_attn.q_a_proj.weight": (28, 80),
            "self_attn.q_a_layernorm.weight": (28,),
            "self_attn.q_b_proj.weight": (160, 28),
            "self_attn.kv_a_proj_with_mqa.weight": (26, 80),
            "self_attn.kv_a_layernorm.weight": (20,),
            "self_attn.kv_b_proj.weight": (192, 20),
            "self_attn.o_proj.weight": (80, 80),
            "post_attention_layernorm.weight": (80,),
            "mlp.gate.weight": (3, 80),
            "mlp.gate.e_score_correction_bias": (3,),
            **{
                f"mlp.{kind}.{proj}_proj.weight": (80, width) if proj == "down" else (width, 80)
                for kind, width in {"experts.0": 24, "experts.1": 24, "experts.2": 24, "shared_experts": 48}.items()
                for proj in ("gate", "up", "down")
            },
        }.items()
    },
    **{**_MLA_MOE, "n_routed_experts": 3, "n_group": 1, "topk_group": 1},
)
_add(
    "deepseek_v3-no-q-lora",
    (2, 4, 8),
    model_type="deepseek_v3",
    attention_bias=True,
    **{**_MLA_MOE, "q_lora_rank": None},
)
_add("deepseek_v2", (2, 4, 8), **_MLA_MOE)
_add("deepseek_v2-no-q-lora", (2, 4, 8), model_type="deepseek_v2", **{**_MLA_MOE, "q_lora_rank": None})

_add("glm4_moe_lite", (2, 4, 8), **_MLA_MOE)
_DSA: dict[str, Any] = {**_MLA_MOE, "index_n_heads": 3, "index_head_dim": 16, "index_topk": 8}
_add("deepseek_v32", (2, 4, 8), **_DSA)
_add("glm_moe_dsa", (2, 4, 8), **_DSA)
_add("minicpm3", (2, 4, 8), **_MLA)
_add("youtu", (2, 4, 8), **{**_MLA, "tie_word_embeddings": True, "pad_token_id": None})
_SHARED: dict[str, Any] = {
    **_DENSE,
    "moe_intermediate_size": 24,
    "n_routed_experts": 6,
    "num_experts": 6,
    "n_shared_experts": 2,
    "num_shared_experts": 2,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}
_add("glm4_moe", (2, 4, 8), use_qk_norm=True, attention_bias=True, **_SHARED)
_add("dots1", (2, 4, 8), layer_types=["full_attention"] * 3, **_SHARED)
_add("solar_open", (2, 4, 8), **_SHARED)
_MTP_NORMS = {"mtp.norm": 80, "mtp.pre_fc_norm_embedding": 80, "mtp.pre_fc_norm_hidden": 80}
_add(
    "exaone_moe",
    (2, 4, 8),
    is_moe_layer=[False, True, True],
    extra={
        "mtp.fc.weight": (80, 160),
        **{f"{name}.weight": (width,) for name, width in _MTP_NORMS.items()},
        **_layer("mtp.layers.0", 96, 48, 96, {"mlp": 72}),
        "mtp.layers.0.self_attn.q_norm.weight": (12,),
        "mtp.layers.0.self_attn.k_norm.weight": (12,),
        "mtp.layers.0.input_layernorm.weight": (80,),
        "mtp.layers.0.post_attention_layernorm.weight": (80,),
    },
    **_SHARED,
)
_add(
    "ernie4_5_moe",
    (2, 4, 8),
    use_bias=True,
    moe_num_experts=6,
    moe_num_shared_experts=2,
    moe_k=2,
    moe_intermediate_size=24,
    num_nextn_predict_layers=1,
    extra={
        **_layer("model.mtp_block.0", 96, 48, 96, {"mlp": 72}),
        "model.mtp_block.0.input_layernorm.weight": (80,),
        "model.mtp_block.0.post_attention_layernorm.weight": (80,),
        "model.mtp_emb_norm.0.weight": (80,),
        "model.mtp_hidden_norm.0.weight": (80,),
        "model.mtp_linear_proj.0.weight": (80, 160),
    },
    **{**_DENSE, "tie_word_embeddings": True},
)
_add("hunyuan_v1_moe", (2, 4, 8), num_experts=4, moe_topk=2, **_EXPERTS)
_add("phimoe", (2, 4, 8), num_local_experts=4, attention_bias=True, lm_head_bias=True, **_EXPERTS)
_add("minimax_m2", (2, 4, 8), num_local_experts=4, **_EXPERTS)
_add(
    "minimax",
    (2, 4, 8),
    num_local_experts=4,
    block_size=16,
    layer_types=["linear_attention", "full_attention", "linear_attention"],
    **_EXPERTS,
)
_add("granitemoe", (2, 4, 8), num_local_experts=5, attention_bias=True, **_EXPERTS)
_add("granitemoeshared", (2, 4, 8), num_local_experts=4, shared_intermediate_size=56, **_EXPERTS)
_add(
    "jetmoe",
    (2, 4, 8),
    hidden_size=80,
    num_hidden_layers=3,
    num_key_value_heads=8,
    kv_channels=12,
    intermediate_size=32,
    num_local_experts=3,
    num_experts_per_tok=2,
    vocab_size=101,
    max_position_embeddings=64,
    **_TOKENS,
)
_add(
    "dbrx",
    (2, 4, 8),
    loads_alone=False,
    d_model=80,
    n_heads=8,
    n_layers=3,
    attn_config={"kv_n_heads": 4, "clip_qkv": 8.0, "rope_theta": 10000.0},
    ffn_config={"ffn_hidden_size": 40, "moe_num_experts": 5, "moe_top_k": 2, "hidden_size": 80},
    vocab_size=101,
    max_seq_len=64,
)

_add(
    "afmoe",
    (2, 4, 8),
    num_dense_layers=1,
    layer_types=["sliding_attention", "full_attention", "sliding_attention"],
    **{**_SHARED, "num_experts": 3, "n_routed_experts": 3},
)
_add(
    "hy_v3",
    (2, 4, 8),
    num_nextn_predict_layers=1,
    extra={
        **_further("model.layers.3", "final_layernorm", "input_layernorm", "post_attention_layernorm"),
        **_layer("model.layers.3", 96, 48, 96, {"mlp.experts.0": 24, "mlp.experts.5": 24, "mlp.shared_mlp": 24}),
        "model.layers.3.mlp.router.gate.weight": (6, 80),
        "model.layers.3.mlp.expert_bias": (6,),
    },
    **{**_SHARED, "num_shared_experts": 1},
)
_add(
    "mimo_v2_flash",
    (2, 4, 8),
    v_head_dim=10,
    layer_types=["full_attention", "sliding_attention", "sliding_attention"],
    extra={
        **_further("model.mtp.layers.0", "final_layernorm", "input_layernorm", "pre_mlp_layernorm"),
        **_layer("model.mtp.layers.0", 192, 96, 160, {"mlp": 72}, v=80),
        "model.mtp.layers.0.self_attn.attention_sink_bias": (16,),
    },
    **{**_SHARED, "num_attention_heads": 16, "num_experts": 3, "n_routed_experts": 3, "n_group": 1},
)
_add(
    "laguna",
    (2, 4, 8),
    layer_types=["full_attention", "sliding_attention", "full_attention"],
    num_attention_heads_per_layer=[8, 16, 8],
    mlp_layer_types=["dense", "sparse", "sparse"],
    shared_expert_intermediate_size=40,
    **{**_SHARED, "num_experts": 4, "n_routed_experts": 4},
)
_add(
    "cohere2_moe",
    (2, 4, 8),
    num_experts=3,
    num_shared_experts=2,
    prefix_dense_intermediate_size=56,
    first_k_dense_replace=1,
    **{**_EXPERTS, "tie_word_embeddings": True},
)
_add(
    "kimi_linear",
    (2, 4, 8),
    linear_num_heads=8,
    linear_head_dim=11,
    linear_conv_kernel_dim=3,
    layer_types=["linear_attention", "full_attention", "linear_attention"],
    **{**_MLA_MOE, "q_lora_rank": None, "num_shared_experts": 2, "num_experts": 6},
)

_add(
    "bailing_hybrid",
    (2, 4, 8),
    notes="transformers reads back the size of a rotary head, whatever that of a linear one was",
    layer_group_size=3,
    short_conv_kernel_size=3,
    num_nextn_predict_layers=1,
    extra={
        **_further("model.layers.3", "final_layernorm", "input_layernorm", "post_attention_layernorm"),
        "model.layers.3.attention.q_proj.weight": (160, 80),
        "model.layers.3.attention.g_proj.weight": (8, 80),
        "model.layers.3.attention.dense.weight": (80, 80),
        "model.layers.3.mlp.shared_experts.up_proj.weight": (24, 80),
    },
    **{
        **{key: value for key, value in _MLA_MOE.items() if key not in {"n_routed_experts", "n_shared_experts"}},
        "q_lora_rank": None,
        "num_experts": 6,
        "n_shared_experts": 1,
        "head_dim": 6,
    },
)

_add(
    "axk2",
    (2, 4, 8),
    gated_norm_rank=9,
    mlp_layer_types=["dense", "sparse", "sparse"],
    **{key: value for key, value in _DSA.items() if key != "first_k_dense_replace"},
)
_add(
    "hy_v4",
    (2, 4, 8),
    hc_mult=2,
    indexer_types=["full", "full", "shared"],
    mlp_layer_types=["dense", "sparse", "sparse"],
    **{**_DSA, "n_group": 1},
)
_add(
    "kolibri1",
    (2, 4, 8),
    shared_expert_intermediate_size=40,
    sliding_window=9,
    layer_types=["sliding_attention", "full_attention", "sliding_attention"],
    **{key: value for key, value in _MOE.items() if key != "intermediate_size"},
)

_add(
    "zaya",
    (2, 3, 4, 6, 8, 12),
    notes="transformers sets the last of balancing_biases to -1 as it loads, whatever the checkpoint says",
    router_hidden_size=14,
    **{**_MOE, "num_experts_per_tok": 1, "tie_word_embeddings": True, "num_key_value_heads": 2},
)

_DOTS3: dict[str, Any] = {
    **_DSA,
    "head_dim": 12,
    "n_shared_experts": 1,
    "shared_experts_intermediate_size": 40,
    "layer_types": ["indexed_attention", "sliding_attention", "indexed_attention"],
    "sliding_window": 9,
    "swa_num_attention_heads": 16,
    "swa_num_key_value_heads": 16,
    "swa_q_lora_rank": 22,
    "swa_kv_lora_rank": 18,
    "swa_head_dim": 12,
    "swa_qk_nope_head_dim": 8,
    "swa_v_head_dim": 11,
}
_add("dots3_note_text", (2, 4, 8), **_DOTS3)

# ---------------------------------------------------------------------------------------------------------- hybrids

_DELTA: dict[str, Any] = {
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 6,
    "linear_value_head_dim": 7,
    "linear_conv_kernel_dim": 3,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
}
_DELTA_MOE: dict[str, Any] = {**_MOE, **_DELTA, "shared_expert_intermediate_size": 40}
_add(
    "qwen3_next",
    (2, 4, 8),
    attention_bias=True,
    extra={
        "mtp.fc.weight": (80, 160),
        **{f"{name}.weight": (width,) for name, width in _MTP_NORMS.items()},
        **_layer("mtp.layers.0", 192, 48, 96, {"mlp.experts.4": 24, "mlp.shared_expert": 40}),
        "mtp.layers.0.mlp.gate.weight": (5, 80),
        "mtp.layers.0.mlp.shared_expert_gate.weight": (1, 80),
    },
    **_DELTA_MOE,
)
_add("qwen3_next-dense-layer", (2, 4, 8), model_type="qwen3_next", mlp_only_layers=[1], **_DELTA_MOE)
_add("qwen3_5_text", (2, 4, 8), **_DENSE, **_DELTA)
_add("qwen3_5_moe_text", (2, 4, 8), **_DELTA_MOE)
_QWEN4: dict[str, Any] = {
    **{**_DELTA_MOE, "layer_types": ["linear_attention", "indexed_attention", "linear_attention"]},
    "hc_count": 3,
    "hc_lowrank": 9,
    "ple_layer_ids": [1, 3],
    "ple_embed_dim": 96,
    "ple_conv_kernel_size": 3,
    "heads_per_ngram": 2,
    "ngram_vocab_size_base": 23,
    "make_ngram_vocab_size_divisible_by": 12,
    "split_ngram_parts": 3,
    "indexer_n_heads": 3,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 16,
    "indexer_budget": 6,
    "indexer_compress_ratio": 2,
}
_add("qwen4_exp_text", (2, 4, 8), **_QWEN4)
_add("olmo_hybrid", (2, 4), **_DENSE, **{**_DELTA, "linear_num_value_heads": 4, "linear_key_head_dim": 7})
_CONV: dict[str, Any] = {"layer_types": ["conv", "full_attention", "conv"], "conv_bias": True}
_add("lfm2", (2, 4, 8), loads_alone=False, block_ff_dim=72, block_auto_adjust_ff_dim=False, **_DENSE, **_CONV)
_add("lfm2_moe", (2, 4, 8), loads_alone=False, num_dense_layers=1, **{**_MOE, "num_experts": 4}, **_CONV)
_LFM3 = {"sliding_window": 9, "conv_bias": True, "layer_types": ["conv", "full_attention", "sliding_attention"]}
_add("lfm3", (2, 4, 8), loads_alone=False, **_DENSE, **_LFM3)
_add(
    "mamba2",
    (2, 4, 8),
    loads_alone=False,
    hidden_size=48,
    num_heads=8,
    head_dim=12,
    n_groups=2,
    state_size=5,
    expand=2,
    num_hidden_layers=3,
    vocab_size=101,
    conv_kernel=3,
    tie_word_embeddings=False,
    **_TOKENS,
)
_INKLING: dict[str, Any] = {
    **_DENSE,
    "swa_num_attention_heads": 16,
    "swa_num_key_value_heads": 8,
    "swa_head_dim": 10,
    "sliding_window_size": 9,
    "d_rel": 6,
    "rel_extent": 11,
    "layer_types": ["hybrid_sliding", "hybrid", "hybrid_sliding"],
    "mlp_layer_types": ["dense", "sparse", "sparse"],
    "moe_intermediate_size": 24,
    "n_routed_experts": 5,
    "num_experts_per_tok": 2,
    "n_shared_experts": 2,
    "conv_kernel_size": 3,
}
_add("inkling_text", (2, 4, 8), **_INKLING)
_add("inkling2_text", (2, 4, 8), **_INKLING)
_add(
    "zamba",
    (2, 4, 8),
    loads_alone=False,
    layers_block_type=["mamba", "hybrid", "mamba", "hybrid"],
    n_mamba_heads=8,
    mamba_d_state=5,
    mamba_d_conv=3,
    mamba_dt_rank=6,
    attention_hidden_size=160,
    attention_head_dim=20,
    **{**_PLAIN, "num_hidden_layers": 4, "tie_word_embeddings": True},
)
for _name in ("mamba", "falcon_mamba"):
    _add(
        _name,
        (2, 3, 4, 6, 8, 12, 16),
        loads_alone=False,
        hidden_size=48,
        state_size=5,
        num_hidden_layers=3,
        vocab_size=101,
        conv_kernel=3,
        time_step_rank=7,
        use_mambapy=False,
        **_TOKENS,
    )
_MIXER: dict[str, Any] = {
    "mamba_n_heads": 8,
    "mamba_d_head": 20,
    "mamba_n_groups": 2,
    "mamba_d_state": 5,
    "mamba_expand": 2,
    "mamba_d_conv": 3,
}
_add("bamba", (2, 4, 8), loads_alone=False, attn_layer_indices=[1], **_DENSE, **_MIXER)
_GRANITE: dict[str, Any] = {"shared_intermediate_size": 56, "layer_types": ["mamba", "attention", "mamba"]}
_add(
    "granitemoehybrid",
    (2, 4, 8),
    loads_alone=False,
    num_local_experts=3,
    **{**_EXPERTS, **_MIXER, **_GRANITE, "mamba_n_groups": 1},
)
_add(
    "granitemoehybrid-dense",
    (2, 4, 8),
    model_type="granitemoehybrid",
    loads_alone=False,
    num_local_experts=0,
    **{**_DENSE, **_MIXER, **_GRANITE},
)
_add("falcon_h1", (2, 4, 8), mamba_d_ssm=88, **_DENSE, **{**_MIXER, "mamba_d_head": 11})
_NEMOTRON: dict[str, Any] = {
    **{key: value for key, value in _SHARED.items() if key != "num_hidden_layers"},
    "mamba_num_heads": 8,
    "mamba_head_dim": 9,
    "n_groups": 2,
    "ssm_state_size": 5,
    "conv_kernel": 3,
    "moe_shared_expert_intermediate_size": 40,
}
_add("nemotron_h", (2, 4, 8), layers_block_type=["mamba", "attention", "moe", "mlp"], **_NEMOTRON)
_LATENT: dict[str, Any] = {
    **_NEMOTRON,
    "layers_block_type": ["mamba", "attention", "moe"],
    "moe_latent_size": 36,
    "n_groups": 4,
}
_add("nemotron_h-latent", (2, 4, 8), model_type="nemotron_h", **_LATENT)
_add(
    "nemotron_h-mtp",
    (2, 4, 8),
    model_type="nemotron_h",
    num_nextn_predict_layers=1,
    mtp_layers_block_type=["attention", "moe"],
    extra={
        **_further("mtp.layers.0", "norm"),
        **{f"mtp.layers.0.mixer.{name}_proj.weight": (rows, 80) for name, rows in {"q": 96, "k": 48, "v": 48}.items()},
        "mtp.layers.0.mixer.o_proj.weight": (80, 96),
        "mtp.layers.1.norm.weight": (80,),
        "mtp.layers.1.final_layernorm.weight": (80,),
        "mtp.layers.1.mixer.gate.weight": (6, 80),
        "mtp.layers.1.mixer.gate.e_score_correction_bias": (6,),
        "mtp.layers.1.mixer.fc1_latent_proj.weight": (36, 80),
        "mtp.layers.1.mixer.fc2_latent_proj.weight": (80, 36),
        "mtp.layers.1.mixer.experts.5.up_proj.weight": (24, 36),
        "mtp.layers.1.mixer.experts.5.down_proj.weight": (36, 24),
        "mtp.layers.1.mixer.shared_experts.up_proj.weight": (40, 80),
        "mtp.layers.1.mixer.shared_experts.down_proj.weight": (80, 40),
    },
    **_LATENT,
)
_add(
    "jamba",
    (2, 4, 8),
    loads_alone=False,
    num_experts=3,
    attn_layer_period=3,
    attn_layer_offset=1,
    expert_layer_period=2,
    expert_layer_offset=1,
    mamba_d_state=5,
    mamba_dt_rank=7,
    mamba_d_conv=3,
    mamba_expand=2,
    use_mamba_kernels=False,
    **{key: value for key, value in _EXPERTS.items() if key != "head_dim"},
)

_add(
    "longcat_flash",
    (2, 4, 8),
    num_layers=1,
    head_dim=6,
    ffn_hidden_size=72,
    expert_ffn_hidden_size=24,
    zero_expert_num=0,
    moe_topk=2,
    **{key: value for key, value in _MLA_MOE.items() if key not in {"num_hidden_layers", "intermediate_size"}},
)
_add(
    "recurrent_gemma",
    (2, 4, 8),
    lru_width=64,
    conv1d_width=3,
    block_types=["recurrent", "attention", "recurrent"],
    **{**_DENSE, "num_key_value_heads": 1, "intermediate_size": 144, "tie_word_embeddings": True},
)
_add(
    "zamba2",
    (2, 4, 8),
    loads_alone=False,
    layers_block_type=["mamba", "hybrid", "mamba", "hybrid"],
    n_mamba_heads=8,
    mamba_d_state=5,
    mamba_ngroups=2,
    mamba_d_conv=3,
    mamba_expand=2,
    num_mem_blocks=1,
    adapter_rank=6,
    use_shared_attention_adapter=True,
    **{
        **_PLAIN,
        "hidden_size": 64,
        "num_key_value_heads": 8,
        "num_hidden_layers": 4,
        "tie_word_embeddings": True,
        "vocab_size": 61,
    },
)

_add("hrm_text", (2, 4, 8), H_cycles=2, L_cycles=2, **{**_DENSE, "num_key_value_heads": 8})
_add(
    "cpmant",
    (2, 4, 8),
    loads_alone=False,
    hidden_size=80,
    num_attention_heads=8,
    dim_head=12,
    dim_ff=72,
    num_hidden_layers=3,
    position_bias_num_buckets=14,
    position_bias_max_distance=20,
    prompt_types=3,
    prompt_length=5,
    segment_types=4,
    vocab_size=101,
    **_TOKENS,
)

# ----------------------------------------------------------------------------------------------- more than text

_add("llama4_text", (2, 4, 8), intermediate_size_mlp=88, interleave_moe_layer_step=2, num_local_experts=4, **_EXPERTS)
_PER_LAYER: dict[str, Any] = {
    **_DENSE,
    "num_hidden_layers": 4,
    "tie_word_embeddings": True,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "hidden_size_per_layer_input": 6,
    "vocab_size_per_layer_input": 88,
}
_add(
    "gemma3n_text",
    (2, 4, 8),
    num_kv_shared_layers=0,
    laurel_rank=5,
    altup_num_inputs=3,
    activation_sparsity_pattern=[0.0] * 4,
    **{**_PER_LAYER, "intermediate_size": [72] * 4},
)
_add(
    "gemma4_text",
    (2, 4, 8),
    global_head_dim=20,
    num_kv_shared_layers=2,
    use_double_wide_mlp=True,
    **{**_PER_LAYER, "vocab_size_per_layer_input": 101},
)
_add(
    "gemma4_text-experts",
    (2, 4, 8),
    model_type="gemma4_text",
    global_head_dim=20,
    attention_k_eq_v=True,
    num_global_key_value_heads=4,
    enable_moe_block=True,
    num_experts=2,
    top_k_experts=1,
    moe_intermediate_size=24,
    **{**_PER_LAYER, "hidden_size_per_layer_input": 0},
)
_IMAGES = "AutoModelForImageTextToText"
_SIGLIP: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 44,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "image_size": 20,
    "patch_size": 4,
}
_TOWER: dict[str, Any] = {
    "depth": 2,
    "hidden_size": 32,
    "num_heads": 4,
    "intermediate_size": 44,
    "patch_size": 4,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "in_channels": 3,
    "out_hidden_size": 80,
}
_QWEN_TOWER: dict[str, Any] = {**_TOWER, "num_position_embeddings": 16}
_GLM_TOWER: dict[str, Any] = {**_TOWER, "image_size": 16}
_DEEP = {**_QWEN_TOWER, "deepstack_visual_indexes": [0, 1]}
_WHISPER: dict[str, Any] = {
    "num_mel_bins": 8,
    "d_model": 28,
    "encoder_layers": 2,
    "encoder_attention_heads": 4,
    "encoder_ffn_dim": 44,
    "max_source_positions": 24,
    "output_dim": 80,
}
_add("gemma3", (2, 4, 8), model=_IMAGES, text_config=_DENSE, vision_config=_SIGLIP, mm_tokens_per_image=4)
_add(
    "mistral3",
    (2, 4, 8),
    model=_IMAGES,
    text_config={**_DENSE, "model_type": "mistral"},
    vision_config={**_SIGLIP, "model_type": "pixtral", "head_dim": 8},
)
_add(
    "llava",
    (2, 4, 8),
    model=_IMAGES,
    text_config={**_DENSE, "model_type": "llama"},
    vision_config={**_SIGLIP, "model_type": "clip_vision_model"},
)
_MROPE = {**_PLAIN, "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 2, 2]}}
_add(
    "qwen2_vl",
    (2, 4, 8),
    loads_alone=False,
    model=_IMAGES,
    text_config=_MROPE,
    vision_config={**_QWEN_TOWER, "embed_dim": 32, "hidden_size": 80},
)
_add(
    "qwen2_5_vl",
    (2, 4, 8),
    loads_alone=False,
    model=_IMAGES,
    text_config=_MROPE,
    vision_config={**_QWEN_TOWER, "fullatt_block_indexes": [1]},
)
_add("qwen3_vl", (2, 4, 8), model=_IMAGES, text_config=_DENSE, vision_config=_DEEP)
_add("qwen3_vl_moe", (2, 4, 8), model=_IMAGES, text_config={**_MOE, "num_experts": 3}, vision_config=_DEEP)
_add(
    "qwen3_vl-base",
    (2, 4, 8),
    model_type="qwen3_vl",
    model="Qwen3VLModel",
    notes="no head, and names without the first prefix, as models for embeddings have",
    text_config=_DENSE,
    vision_config=_DEEP,
)
_add("qwen3_5", (2, 4, 8), model=_IMAGES, text_config={**_DENSE, **_DELTA}, vision_config=_QWEN_TOWER)
_add("qwen3_5_moe", (2, 4, 8), model=_IMAGES, text_config={**_DELTA_MOE, "num_experts": 3}, vision_config=_QWEN_TOWER)
_add(
    "llama4",
    (2, 4, 8),
    model=_IMAGES,
    text_config={**_EXPERTS, "intermediate_size_mlp": 88, "interleave_moe_layer_step": 2, "num_local_experts": 4},
    vision_config={
        **_SIGLIP,
        "vision_output_dim": 36,
        "projector_input_dim": 40,
        "projector_output_dim": 36,
        "pixel_shuffle_ratio": 0.5,
    },
)

_add("glm4v", (2, 4, 8), model=_IMAGES, loads_alone=False, text_config=_MROPE, vision_config=_GLM_TOWER)
_add(
    "glm4v_moe",
    (2, 4, 8),
    model=_IMAGES,
    text_config={
        **_SHARED,
        "n_routed_experts": 4,
        "use_qk_norm": True,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000.0,
            "mrope_section": [1, 2, 3],
            "partial_rotary_factor": 1.0,
        },
    },
    vision_config=_GLM_TOWER,
)
_add(
    "nemotron_h_omni",
    (2, 4, 8),
    model=_IMAGES,
    text_config={
        "model_type": "nemotron_h",
        "layers_block_type": ["mamba", "attention", "mlp"],
        "mamba_num_heads": 8,
        "mamba_head_dim": 9,
        "n_groups": 2,
        "ssm_state_size": 5,
        "conv_kernel": 3,
        **{key: value for key, value in _DENSE.items() if key != "num_hidden_layers"},
    },
    vision_config={
        **{key: value for key, value in _SIGLIP.items() if key != "image_size"},
        "model_type": "radio",
        "max_img_size": 20,
        "image_size": 20,
        "video_temporal_patch_size": 2,
    },
    vision_hidden_size=32,
    projector_hidden_size=64,
)
_add(
    "step3p7",
    (2, 4, 8),
    model=_IMAGES,
    text_config={
        **_DENSE,
        "layer_types": ["full_attention", "sliding_attention", "full_attention"],
        "num_sliding_attention_heads": 16,
        "sliding_window": 16,
        "n_routed_experts": 3,
        "num_local_experts": 3,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "share_expert_dim": 40,
        "mlp_layer_types": ["dense", "sparse", "sparse"],
    },
    vision_config={
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "image_size": 32,
        "patch_size": 4,
    },
)
_add("internvl", (2, 4, 8), model=_IMAGES, text_config={**_DENSE, "model_type": "qwen2"}, vision_config=_SIGLIP)
_add(
    "gemma4",
    (2, 4, 8),
    model=_IMAGES,
    text_config={
        **_PER_LAYER,
        "global_head_dim": 20,
        "vocab_size": 61,
        "vocab_size_per_layer_input": 61,
        "num_hidden_layers": 3,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
    },
    vision_config={**_SIGLIP, "num_key_value_heads": 4, "head_dim": 8, "position_embedding_size": 30},
    audio_config={
        "hidden_size": 48,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "subsampling_conv_channels": [6, 4],
        "output_proj_dims": 28,
        "conv_kernel_size": 3,
    },
)
_UNIFIED: dict[str, Any] = {
    **_DENSE,
    "tie_word_embeddings": True,
    "global_head_dim": 20,
    "num_global_key_value_heads": 2,
    "attention_k_eq_v": True,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
}
_add(
    "gemma4_text-global-kv",
    (2, 4, 8),
    model_type="gemma4_text",
    notes="layers with full attention have other KV heads, which transformers writes as per_layer_config",
    hidden_size_per_layer_input=6,
    vocab_size_per_layer_input=61,
    **{**_UNIFIED, "vocab_size": 61},
)
_add("gemma4_unified_text", (2, 4, 8), **_UNIFIED)
_add(
    "gemma4_unified",
    (2, 4, 8),
    model=_IMAGES,
    text_config=_UNIFIED,
    vision_config={"patch_size": 4, "pooling_kernel_size": 2, "mm_embed_dim": 28, "mm_posemb_size": 9},
    audio_config={"audio_embed_dim": 36},
)
_add(
    "emu3",
    (2, 4, 8),
    model=_IMAGES,
    text_config=_PLAIN,
    vq_config={
        "codebook_size": 11,
        "embed_dim": 6,
        "base_channels": 32,
        "channel_multiplier": [1, 1],
        "num_res_blocks": 1,
        "attn_resolutions": [1],
        "hidden_size": 32,
    },
    vocabulary_map={"<image>": 99, **{f"<|visual token {i:06d}|>": 80 + i for i in range(11)}},
)
_add(
    "inkling_mm_model",
    (2, 4, 8),
    model="InklingForConditionalGeneration",
    text_config=_INKLING,
    # fewer layers than factors of the patch, and transformers would want scipy
    vision_config={"patch_size": 4, "temporal_patch_size": 2, "num_hidden_layers": 4, "hidden_size": 32},
    audio_config={"n_mel_bins": 3, "mel_vocab_size": 5},
)
_add(
    "inkling2",
    (2, 4, 8),
    model=_IMAGES,
    text_config=_INKLING,
    vision_config={
        **{key: value for key, value in _SIGLIP.items() if key != "image_size"},
        "posemb_grid_size": 5,
        "projection_hidden_dim": 36,
        "text_hidden_size": 80,
    },
)
_add(
    "lfm3_vl",
    (2, 4, 8),
    loads_alone=False,
    model=_IMAGES,
    text_config={**_DENSE, **_LFM3},
    vision_config={
        **{key: value for key, value in _SIGLIP.items() if key != "image_size"},
        "num_key_value_heads": 2,
        "layer_types": ["conv", "full_attention"],
    },
    projector_hidden_size=36,
)
_add(
    "dots3_note",
    (2, 4, 8),
    model=_IMAGES,
    text_config=_DOTS3,
    vision_config={
        **{key: value for key, value in _SIGLIP.items() if key != "image_size"},
        "moe_intermediate_size": 20,
        "mlp_layer_types": ["dense", "sparse"],
        "num_local_experts": 3,
        "adapter_in_dim": 32,
        "adapter_out_dim": 80,
    },
    audio_config={
        "hidden_size": 48,
        "intermediate_size": 52,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "feature_size": 16,
        "downsample_hidden_size": 6,
        "adapter_input_size": 48,
        "adapter_out_dim": 80,
    },
)
_add("qwen4_exp", (2, 4, 8), model=_IMAGES, text_config=_QWEN4, vision_config=_QWEN_TOWER)
# any tower beside the names of Llama
_COHERE: dict[str, Any] = {**_DENSE, "model_type": "cohere2", "tie_word_embeddings": True}
_add("aya_vision", (2, 4, 8), model=_IMAGES, text_config=_COHERE, vision_config=_SIGLIP, tie_word_embeddings=True)
_add(
    "cohere2_vision",
    (2, 4, 8),
    model=_IMAGES,
    text_config=_COHERE,
    vision_config=_SIGLIP,
    alignment_intermediate_size=36,
    tie_word_embeddings=True,
)
_COMPASS: dict[str, Any] = {
    **{key: value for key, value in _PLAIN.items() if key != "tie_word_embeddings"},
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
    "rope_parameters": {
        kind: {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 2, 1]}
        for kind in ("sliding_attention", "full_attention")
    },
}
_add("cohere_compass_text", (2, 4, 8), **_COMPASS)
_add(
    "cohere_compass",
    (2, 4, 8),
    model=_IMAGES,
    text_config=_COMPASS,
    vision_config={**_DEEP, "out_hidden_size": 80},
)
for _name in ("deepseek_vl", "llava_next_video", "llava_onevision", "video_llava", "idefics3", "smolvlm"):
    _add(
        _name,
        (2, 4, 8),
        model=_IMAGES,
        text_config={**_DENSE, "model_type": "qwen2" if _name == "llava_onevision" else "llama"},
        vision_config=_SIGLIP,
        tie_word_embeddings=False,
    )
_add(
    "deepseek_vl_hybrid",
    (2, 4, 8),
    model=_IMAGES,
    text_config={**_DENSE, "model_type": "llama"},
    vision_config=_SIGLIP,
    high_res_vision_config={
        **_SIGLIP,
        "output_channels": 12,
        "mlp_dim": 44,
        "global_attn_indexes": [1],
        "window_size": 2,
        "image_size": 64,
        "patch_size": 16,
    },
    tie_word_embeddings=False,
)
_add(
    "exaone4_5",
    (2, 4, 8),
    model=_IMAGES,
    text_config={**_DENSE, "model_type": "exaone4"},
    vision_config={**_QWEN_TOWER, "fullatt_block_indexes": [1], "num_key_value_heads": 2},
)
for _name in ("got_ocr2", "pp_chart2table"):
    _add(
        _name,
        (2, 4, 8),
        model=_IMAGES,
        text_config={**_PLAIN, "model_type": "qwen2", "tie_word_embeddings": True},
        vision_config={**_SIGLIP, "output_channels": 12, "mlp_dim": 44, "global_attn_indexes": [1], "window_size": 2},
        tie_word_embeddings=True,
    )
_add(
    "granite_docling",
    (2, 4, 8),
    model=_IMAGES,
    text_config=_DENSE,
    vision_config={
        **_SIGLIP,
        "image_size": 64,
        "patch_size": 8,
        "out_hidden_size": 80,
        "scale_factor": 2,
        "deepstack_visual_indexes": [0],
    },
)
_add(
    "hyperclovax_vision_v2",
    (2, 4, 8),
    model=_IMAGES,
    text_config=_DENSE,
    vision_config={**_QWEN_TOWER, "fullatt_block_indexes": [1]},
)
_add(
    "idefics2",
    (2, 4, 8),
    model=_IMAGES,
    text_config={**_DENSE, "model_type": "mistral"},
    vision_config=_SIGLIP,
    perceiver_config={
        "hidden_size": 80,
        "resampler_n_latents": 3,
        "resampler_depth": 2,
        "resampler_n_heads": 4,
        "resampler_head_dim": 6,
        "num_key_value_heads": 2,
    },
)
_add(
    "janus",
    (2, 4, 8),
    model=_IMAGES,
    text_config={**_DENSE, "model_type": "llama"},
    vision_config={**_SIGLIP, "projection_dim": 80, "depth": 2, "num_image_tokens": 9, "hidden_dropout_rate": 0.0},
    vq_config={
        "embed_dim": 6,
        "num_embeddings": 11,
        "base_channels": 32,
        "channel_multiplier": [1, 1],
        "num_res_blocks": 1,
        "image_token_embed_dim": 80,
        "num_patches": 4,
        "projection_dim": 80,
    },
)
_PIXTRAL: dict[str, Any] = {**_SIGLIP, "model_type": "pixtral", "head_dim": 8}
_add("lighton_ocr", (2, 4, 8), model=_IMAGES, text_config={**_DENSE, "model_type": "qwen3"}, vision_config=_PIXTRAL)
_add(
    "ovis2",
    (2, 4, 8),
    model=_IMAGES,
    text_config={**_DENSE, "model_type": "qwen2"},
    vision_config={**_SIGLIP, "vocab_size": 37},
    hidden_size=_DENSE["hidden_size"],
)
_SECTIONS = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 2, 3]}
_add(
    "paddleocr_vl",
    (2, 4, 8),
    model=_IMAGES,
    text_config={**_DENSE, "rope_parameters": _SECTIONS},
    vision_config=_SIGLIP,
)
_add(
    "paligemma",
    (2, 4, 8),
    model=_IMAGES,
    text_config={**_DENSE, "model_type": "gemma2", "tie_word_embeddings": True},
    vision_config={**_SIGLIP, "projection_dim": 80},
    projection_dim=80,
)
_add("qianfan_ocr", (2, 4, 8), model=_IMAGES, text_config={**_DENSE, "model_type": "qwen3"}, vision_config=_SIGLIP)
_add("video_llama_3", (2, 4, 8), model=_IMAGES, text_config={**_DENSE, "model_type": "qwen2"}, vision_config=_SIGLIP)

# ------------------------------------------------------------------------------- attention of another kind, or none

_add("doge", (2, 4), loads_alone=False, **_DENSE)
_add(
    "doge-experts",
    (2, 4),
    model_type="doge",
    loads_alone=False,
    is_moe=True,
    num_experts=9,
    num_experts_per_tok=2,
    **_DENSE,
)
_add(
    "rwkv",
    (2, 4, 8),
    hidden_size=80,
    intermediate_size=72,
    num_hidden_layers=3,
    vocab_size=101,
    context_length=64,
    rescale_every=2,
    **_TOKENS,
)
_add("ctrl", (2, 4, 8), loads_alone=False, dff=72, **_GPT2)
_XLSTM: dict[str, Any] = {
    **_TOKENS,
    "hidden_size": 128,  # its cache rounds to 64
    "num_heads": 8,
    "num_hidden_layers": 3,
    "qk_dim_factor": 0.5,
    "v_dim_factor": 1.0,
    "ffn_proj_factor": 1.5,
    "ffn_round_up_to_multiple_of": 8,
    "chunk_size": 8,
    "vocab_size": 101,
    "tie_word_embeddings": False,
}
_add("xlstm", (2, 4, 8), loads_alone=False, use_bias=True, **_XLSTM)
_add(
    "deepseek_v4",
    (2, 4, 8),
    loads_alone=False,
    hidden_size=80,
    num_attention_heads=16,
    num_key_value_heads=1,
    head_dim=12,
    q_lora_rank=28,
    qk_rope_head_dim=4,
    o_groups=8,
    o_lora_rank=10,
    moe_intermediate_size=24,
    n_routed_experts=5,
    num_experts_per_tok=2,
    num_hidden_layers=4,
    layer_types=[
        "sliding_attention",
        "compressed_sparse_attention",
        "heavily_compressed_attention",
        "compressed_sparse_attention",
    ],
    mlp_layer_types=["hash_moe", "moe", "moe", "moe"],
    compress_rates={"compressed_sparse_attention": 2, "heavily_compressed_attention": 6},
    index_n_heads=3,
    index_head_dim=14,
    index_topk=4,
    hc_mult=2,
    sliding_window=9,
    vocab_size=101,
    max_position_embeddings=64,
    **_TOKENS,
)
_M3: dict[str, Any] = {
    **_DENSE,
    "dense_intermediate_size": 72,
    "intermediate_size": 40,
    "shared_intermediate_size": 56,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "index_n_heads": 4,
    "index_head_dim": 6,
    "index_block_size": 4,
    "index_topk_blocks": 3,
    "index_local_blocks": 1,
    "layer_types": ["full_attention", "minimax_m3_sparse", "minimax_m3_sparse"],
    "mlp_layer_types": ["dense", "sparse", "sparse"],
}
_add("minimax_m3_vl_text", (2, 4, 8), **_M3)
_add(
    "minimax_m3_vl",
    (2, 4, 8),
    model=_IMAGES,
    text_config=_M3,
    vision_config={**_SIGLIP, "projection_dim": 80},
    projector_hidden_size=92,
)
_ARIA: dict[str, Any] = {**_DENSE, "intermediate_size": 24, "moe_num_experts": 4, "moe_topk": 2}
_add("aria_text", (2, 4, 8), **_ARIA)
_add(
    "aria",
    (2, 4, 8),
    model=_IMAGES,
    text_config=_ARIA,
    vision_config={**_SIGLIP, "model_type": "idefics3_vision"},
    projector_patch_to_query_dict={25: 6},
)
_add(
    "mllama",
    (2, 4, 8),
    loads_alone=False,
    model=_IMAGES,
    text_config={**_PLAIN, "cross_attention_layers": [1]},
    vision_config={
        "hidden_size": 32,
        "intermediate_size": 44,
        "num_hidden_layers": 2,
        "num_global_layers": 1,
        "attention_heads": 4,
        "image_size": 20,
        "patch_size": 4,
        "vision_output_dim": 64,
        "intermediate_layers_indices": [0],
    },
)
_add(
    "phi4_multimodal",
    (2, 4, 8),
    vision_config={**_SIGLIP, "crop_size": 20, "image_token_id": 99, "feature_layer": -2},
    audio_config={
        "hidden_size": 24,
        "intermediate_size": 36,
        "num_blocks": 2,
        "num_attention_heads": 4,
        "ext_pw_out_channel": 24,
        "depthwise_separable_out_channel": 24,
        "nemo_conv_channels": 24,
        "input_size": 16,
        "audio_token_id": 98,
    },
    **_DENSE,
)

# more types of files that are there
for _name in ("glm46v", "glmga"):
    _add(
        _name,
        (2, 4, 8),
        model=_IMAGES,
        loads_alone=False,
        text_config={**_MROPE, "model_type": "glm4v_text"},
        vision_config={**_GLM_TOWER, "model_type": "glm4v_vision"},
    )
_add(
    "glm_ocr",
    (2, 4, 8),
    model=_IMAGES,
    text_config={**_DENSE, "head_dim": 10, "rope_parameters": _MROPE["rope_parameters"]},
    vision_config=_GLM_TOWER,
)
for _name in ("minicpm_ocr", "minicpmv4_6", "minicpmv4_7"):
    _add(
        _name,
        (2, 4, 8),
        model=_IMAGES,
        text_config={**_DENSE, **_DELTA, "model_type": "qwen3_5_text"},
        vision_config={**_SIGLIP, "insert_layer_id": 0},
    )
_add(
    "lfm2_vl",
    (2, 4, 8),
    loads_alone=False,
    model=_IMAGES,
    text_config={**_DENSE, **_CONV, "model_type": "lfm2", "block_ff_dim": 72, "block_auto_adjust_ff_dim": False},
    vision_config={**_SIGLIP, "model_type": "siglip2_vision_model", "num_patches": 25},
    projector_hidden_size=36,
)
_add("granitemoe_swa", (2, 4, 8), num_local_experts=5, attention_bias=True, **_EXPERTS)
_add(
    "fuyu",
    (2, 4, 8),
    loads_alone=False,
    text_config={**_PLAIN, "hidden_size": 96, "model_type": "persimmon"},
    patch_size=4,
)
_add("axk1", (2, 4, 8), **_MLA_MOE)
_add("mistral4", (2, 4, 8), model=_IMAGES, **_MLA_MOE)
_add("beam", (2, 4, 8), mlp_layer_types=["dense", "sparse", "sparse"], **_SHARED)
_add(
    "flint",
    (2, 4, 8),
    mlp_layer_types=["dense", "sparse", "sparse"],
    shared_expert_intermediate_size=40,
    **_SHARED,
)

_add(
    "qwen2_5_omni_thinker",
    (2, 4, 8),
    model=_IMAGES,
    text_config={**_MROPE, "tie_word_embeddings": False},
    vision_config={**_QWEN_TOWER, "fullatt_block_indexes": [1]},
    audio_config={**_WHISPER, "n_window": 4},
    vision_start_token_id=98,
)
_add(
    "qwen3_omni_moe_thinker",
    (2, 4, 8),
    model=_IMAGES,
    text_config={**_MOE, "num_experts": 3, "mlp_only_layers": [0]},
    vision_config=_DEEP,
    audio_config={**_WHISPER, "downsample_hidden_size": 6},
    vision_start_token_id=98,
)
_add(
    "ernie4_5_vl_moe",
    (2, 4, 8),
    model=_IMAGES,
    text_config={
        **_DENSE,
        "rope_parameters": {**_SECTIONS, "mrope_section": [2, 2, 2]},
        "moe_num_experts": 5,
        "moe_k": 2,
        "moe_num_shared_experts": 2,
        "moe_intermediate_size": [24, 16],
        "mlp_layer_types": ["dense", "sparse", "sparse"],
    },
    vision_config={**_TOWER, "temporal_merge_size": 2},
    tie_word_embeddings=False,
)
_add(
    "hunyuan_vl",
    (2, 4, 8),
    model=_IMAGES,
    text_config={**_DENSE, "rope_parameters": {**_SECTIONS, "mrope_section": [2, 2, 2]}},
    vision_config={**_SIGLIP, "text_hidden_size": 80, "out_hidden_size": 80, "max_image_size": 24},
    tie_word_embeddings=False,
)
_add(
    "molmo2",
    (2, 4, 8),
    model=_IMAGES,
    text_config={**_DENSE, "additional_vocab_size": 6},
    vision_config={**_SIGLIP, "num_key_value_heads": 4, "head_dim": 8, "image_size": [20, 20]},
    adapter_config={
        "vision_feature_layer": [-1, -2],
        "hidden_size": 32,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "head_dim": 8,
        "intermediate_size": 52,
        "text_hidden_size": 80,
    },
)
_add(
    "granite4_vision",
    (2, 4, 8),
    model=_IMAGES,
    text_config=_PLAIN,
    vision_config={**_SIGLIP, "hidden_size": 64, "model_type": "siglip_vision_model"},
    qformer_config={"num_hidden_layers": 1, "intermediate_size": 52, "max_position_embeddings": 16},
    downsample_rate="1/5",
    deepstack_layer_map=[[-1, 1]],
    spatial_target_layers=[0, 1, 2, 2],
)

_add(
    "mistral_large4",
    (2, 4, 8),
    model=_IMAGES,
    text_config={
        **{key: value for key, value in _DENSE.items() if key != "head_dim"},
        "num_key_value_heads": 8,
        "num_hidden_layers": 4,
        "kv_lora_rank": 20,
        "qk_nope_head_dim": 14,
        "qk_rope_head_dim": 6,
        "v_head_dim": 10,
        "moe_intermediate_size": 24,
        "n_routed_experts": 3,
        "num_experts_per_tok": 2,
        "index_n_heads": 3,
        "index_head_dim": 16,
        "index_topk": 6,
        "indexer_types": ["full", "full", "shared", "full"],
        "no_rope_layers": [1, 0, 1, 0],
        "kv_source_layers": [0, 1, 0, 3],
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    },
    vision_config=_PIXTRAL,
)
_add(
    "glm5_next",
    (2, 4, 8),
    model=_IMAGES,
    notes="with parts of the layer that predicts one token further, which transformers leaves aside",
    extra=_further("model.language_model.layers.3", "shared_head.norm"),
    text_config={
        **{key: value for key, value in _DENSE.items() if key != "head_dim"},
        "num_key_value_heads": 8,
        "q_lora_rank": 28,
        "kv_lora_rank": 20,
        "qk_nope_head_dim": 14,
        "v_head_dim": 10,
        "moe_intermediate_size": 24,
        "n_routed_experts": 3,
        "num_experts_per_tok": 2,
        "layer_types": ["linear_attention", "indexed_attention", "linear_attention"],
        "mlp_layer_types": ["dense", "sparse", "sparse"],
        "indexer_types": ["full", "full", "full"],
        "index_n_heads": 3,
        "index_head_dim": 16,
        "index_topk": 6,
        "index_kpool": 2,
        "linear_num_heads": 8,
        "linear_head_dim": 11,
        "hc_mult": 2,
        "num_nextn_predict_layers": 1,
    },
    vision_config={**_GLM_TOWER, "projection_intermediate_size": 52},
)

_MUSE_TOWER: dict[str, Any] = {**_SIGLIP, "pos_emb_height": 5, "pos_emb_width": 5, "max_position_embeddings": 25}
_add(
    "muse_glimmer",
    (2, 4, 8),
    model=_IMAGES,
    text_config={**_DENSE, "layer_types": ["sliding_attention", "full_attention", "full_attention"]},
    vision_config=_MUSE_TOWER,
    out_hidden_size=128,
    projector_hidden_size=36,
    tie_word_embeddings=False,
)
_add(
    "muse_spark",
    (2, 4, 8),
    model=_IMAGES,
    text_config={
        **_MOE,
        "num_local_experts": 5,
        "moe_hidden_size": 44,
        "mlp_layer_types": ["dense", "sparse", "sparse"],
        "layer_types": ["sliding_attention", "full_attention", "full_attention"],
    },
    vision_config=_MUSE_TOWER,
    audio_config={
        "patch_sizes": [4, 2],
        "hidden_sizes": [16, 20],
        "depths": [1, 1],
        "num_hidden_layers": 2,
        "out_hidden_size": 80,
    },
    out_hidden_size=128,
    projector_hidden_size=36,
    tie_word_embeddings=False,
)
_add(
    "cosmos3_edge",
    (2, 4, 8),
    model=_IMAGES,
    text_config={**_DENSE, "rope_parameters": {**_SECTIONS, "mrope_section": [2, 2, 2]}},
    vision_config={**_SIGLIP, "num_patches": 25},
    projector_hidden_size=36,
)
_SAM: dict[str, Any] = {
    **_SIGLIP,
    "output_channels": 12,
    "mlp_dim": 44,
    "global_attn_indexes": [1],
    "window_size": 2,
    "downsample_channels": [14, 16],
}
_OCR: dict[str, Any] = {
    **_PLAIN,
    "num_key_value_heads": 8,
    "moe_intermediate_size": 24,
    "n_routed_experts": 3,
    "num_experts_per_tok": 2,
    "mlp_layer_types": ["dense", "sparse", "sparse"],
}
_add(
    "deepseek_ocr2",
    (2, 4, 8),
    loads_alone=False,
    model=_IMAGES,
    text_config=_OCR,
    vision_config={"sam_config": _SAM, "encoder_config": {**_PLAIN, "hidden_size": 16, "num_hidden_layers": 2}},
    tie_word_embeddings=False,
)
_add(
    "unlimited_ocr",
    (2, 4, 8),
    loads_alone=False,
    model=_IMAGES,
    text_config=_OCR,
    vision_config={"sam_config": _SAM, "encoder_config": _SIGLIP},
    tie_word_embeddings=False,
)

# --------------------------------------------------------------------------------------------------------- encoders

_BERT: dict[str, Any] = {
    "pad_token_id": 0,
    "hidden_size": 80,
    "num_attention_heads": 8,
    "intermediate_size": 72,
    "vocab_size": 101,
    "num_hidden_layers": 3,
    "max_position_embeddings": 64,
    "type_vocab_size": 2,
}
_add("bert", (2, 4, 8), loads_alone=False, model="BertForMaskedLM", **_BERT)
_add("bert-pretraining", (2, 4, 8), model_type="bert", loads_alone=False, model="BertForPreTraining", **_BERT)
_add(
    "bert-base",
    (2, 4, 8),
    model_type="bert",
    loads_alone=False,
    model="BertModel",
    notes="names without a prefix",
    extra={"embeddings.position_ids": (1, 64)},
    **_BERT,
)
_add(
    "bert-classifier",
    (2, 4, 8),
    model_type="bert",
    loads_alone=False,
    model="BertForSequenceClassification",
    num_labels=5,
    **_BERT,
)

for _name in ("roberta", "xlm-roberta", "camembert"):
    _add(_name, (2, 4, 8), loads_alone=False, model="AutoModelForMaskedLM", **_BERT)
_add("electra", (2, 4, 8), loads_alone=False, model="ElectraForMaskedLM", embedding_size=28, **_BERT)
_add(
    "electra-discriminator",
    (2, 4, 8),
    model_type="electra",
    loads_alone=False,
    model="ElectraForPreTraining",
    embedding_size=28,
    **_BERT,
)
_add(
    "distilbert",
    (2, 4, 8),
    loads_alone=False,
    model="DistilBertForMaskedLM",
    dim=80,
    n_heads=8,
    n_layers=3,
    hidden_dim=72,
    vocab_size=101,
    max_position_embeddings=64,
    pad_token_id=0,
)
_MODERN = {**_BERT, "bos_token_id": 1, "eos_token_id": 2, "cls_token_id": 1, "sep_token_id": 2}
_add("modernbert", (2, 4, 8), loads_alone=False, model="AutoModelForMaskedLM", **_MODERN)
_add("modernbert-decoder", (2, 4, 8), loads_alone=False, **_MODERN)
_add("eurobert", (2, 4, 8), model="AutoModelForMaskedLM", **_DENSE)
_MASKED = "AutoModelForMaskedLM"
for _name in (
    "ernie",
    "megatron-bert",
    "roberta-prelayernorm",
    "data2vec-text",
    "xlm-roberta-xl",
    "roformer",
):
    _add(_name, (2, 4, 8), loads_alone=False, model=_MASKED, **_BERT)
_add(
    "roc_bert",
    (2, 4, 8),
    loads_alone=False,
    model=_MASKED,
    pronunciation_vocab_size=31,
    pronunciation_embed_dim=12,
    shape_vocab_size=33,
    shape_embed_dim=20,
    **_BERT,
)
_add("bert-generation", (2, 4, 8), loads_alone=False, is_decoder=True, **{**_BERT, "eos_token_id": 2})
_add("big_bird", (2, 4, 8), loads_alone=False, model="BigBirdForPreTraining", attention_type="original_full", **_BERT)
_add("rembert", (2, 4, 8), loads_alone=False, model=_MASKED, input_embedding_size=28, output_embedding_size=36, **_BERT)
_add("xmod", (2, 4, 8), loads_alone=False, model=_MASKED, default_language="en_XX", adapter_layer_norm=True, **_BERT)
_RELATIVE: dict[str, Any] = {**_BERT, "relative_attention": True, "pos_att_type": ["c2p", "p2c"]}
_add("deberta", (2, 4, 8), loads_alone=False, model=_MASKED, **_RELATIVE)
_add(
    "deberta-v2",
    (2, 4, 8),
    loads_alone=False,
    model=_MASKED,
    position_buckets=8,
    norm_rel_ebd="layer_norm",
    conv_kernel_size=3,
    **_RELATIVE,
)
_add(
    "deberta-v3",
    (2, 4, 8),
    model_type="deberta-v2",
    loads_alone=False,
    model=_MASKED,
    share_att_key=True,
    position_buckets=8,
    norm_rel_ebd="layer_norm",
    notes="with the head of published checkpoints, which transformers leaves aside",
    extra={
        "lm_predictions.lm_head.dense.weight": (80, 80),
        "lm_predictions.lm_head.dense.bias": (80,),
        "lm_predictions.lm_head.LayerNorm.weight": (80,),
        "lm_predictions.lm_head.LayerNorm.bias": (80,),
        "lm_predictions.lm_head.bias": (101,),
    },
    **_RELATIVE,
)

# ------------------------------------------------------------------------------------------ towers for sound, and text

_add(
    "qwen2_audio",
    (2, 4, 8),
    model="Qwen2AudioForConditionalGeneration",
    text_config={**_DENSE, "model_type": "qwen2"},
    audio_config={key: value for key, value in _WHISPER.items() if key != "output_dim"},
    audio_token_index=99,
    tie_word_embeddings=False,
)
for _name in ("audioflamingo3", "musicflamingo"):
    _add(
        _name,
        (2, 4, 8),
        model=f"{'AudioFlamingo3' if _name == 'audioflamingo3' else 'MusicFlamingo'}ForConditionalGeneration",
        text_config={**_DENSE, "model_type": "qwen2"},
        audio_config={
            "model_type": "audioflamingo3_encoder",
            "num_mel_bins": 8,
            "hidden_size": 28,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "intermediate_size": 44,
            "max_source_positions": 24,
        },
        audio_token_id=99,
        tie_word_embeddings=False,
    )
_SOUND: dict[str, Any] = {
    "num_mel_bins": 8,
    "hidden_size": 28,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_source_positions": 24,
}
_add(
    "voxtral",
    (2, 4, 8),
    model="VoxtralForConditionalGeneration",
    text_config={**_DENSE, "model_type": "llama"},
    audio_config={**_SOUND, "intermediate_size": 112, "vocab_size": 61},  # four states are projected as one
    audio_token_id=99,
    tie_word_embeddings=False,
)
_GRANITE: dict[str, Any] = {
    "text_config": {**_PLAIN, "model_type": "granite"},
    "encoder_config": {
        "input_dim": 14,
        "num_layers": 2,
        "hidden_dim": 28,
        "num_heads": 2,
        "feedforward_mult": 3,
        "output_dim": 11,
        "context_size": 9,
        "max_pos_emb": 16,
        "conv_kernel_size": 3,
    },
    "projector_config": {
        "model_type": "blip_2_qformer",
        "hidden_size": 36,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "intermediate_size": 52,
        "encoder_hidden_size": 28,
    },
    "audio_token_index": 99,
    "has_lora_adapter": False,
    "tie_word_embeddings": False,
}
_add("granite_speech", (2, 4, 8), model="GraniteSpeechForConditionalGeneration", **_GRANITE)
_QWEN3_ASR: dict[str, Any] = {
    "text_config": {**_DENSE, "model_type": "qwen3", "tie_word_embeddings": True},
    "audio_config": {
        **{key: value for key, value in _WHISPER.items() if key != "max_source_positions"},
        "n_window": 4,
        "n_window_infer": 16,
        "downsample_hidden_size": 6,
        "max_position_embeddings": 13,
    },
    "audio_token_id": 99,
    "timestamp_token_id": 98,
    "pad_token_id": 0,
    "eos_token_id": 2,
}
_add("qwen3_asr", (2, 4, 8), model="Qwen3ASRForConditionalGeneration", **_QWEN3_ASR)
_add(
    "qwen3_asr-aligner",
    (2, 4, 8),
    model_type="qwen3_asr",
    model="Qwen3ASRForTokenClassification",
    num_labels=5,
    token_classification_bias=True,
    **_QWEN3_ASR,
)
_add(
    "glmasr",
    (2, 4, 8),
    model="GlmAsrForConditionalGeneration",
    text_config={**_DENSE, "model_type": "llama"},
    audio_config={**_SOUND, "intermediate_size": 112},
    audio_token_id=99,
    tie_word_embeddings=False,
)
_CODES: dict[str, Any] = {"num_filters": 6, "downsampling_ratios": [2, 3], "depths": [1, 1, 1], "kernel_size": 3}
_add(
    "vibevoice_asr",
    (2, 4, 8),
    model="VibeVoiceAsrForConditionalGeneration",
    text_config={**_DENSE, "model_type": "qwen2"},
    acoustic_tokenizer_encoder_config={**_CODES, "hidden_size": 10},
    semantic_tokenizer_encoder_config={**_CODES, "hidden_size": 14},
    acoustic_tokenizer_chunk_size=36,
    audio_token_id=99,
    audio_bos_token_id=97,
    audio_eos_token_id=98,
)
_add(
    "granite_speech_plus",
    (2, 4, 8),
    model="GraniteSpeechPlusForConditionalGeneration",
    **{
        **_GRANITE,
        "encoder_config": {**_GRANITE["encoder_config"], "cat_hidden_layers": [0]},
        "projector_config": {**_GRANITE["projector_config"], "encoder_hidden_size": 56},
    },
)
_add(
    "fun_asr_nano",
    (2, 4, 8),
    model="FunAsrNanoForConditionalGeneration",
    text_config={**_DENSE, "model_type": "qwen3", "tie_word_embeddings": True},
    audio_config={
        "num_mel_bins": 8,
        "hidden_size": 28,
        "num_attention_heads": 2,
        "intermediate_size": 44,
        "num_hidden_layers": 2,
        "num_stacked_frames": 3,
        "num_timestamp_prediction_layers": 1,
        "fsmn_kernel_size": 3,
        "max_position_embeddings": 25,
    },
    adaptor_config={
        "hidden_size": 80,
        "num_attention_heads": 4,
        "intermediate_size": 20,
        "num_hidden_layers": 1,
        "projector_hidden_size": 36,
    },
    audio_token_id=99,
)
_add(
    "moss_transcribe_diarize",
    (2, 4, 8),
    model="MossTranscribeDiarizeForConditionalGeneration",
    text_config={**_DENSE, "model_type": "qwen3", "tie_word_embeddings": True},
    audio_config={**_SOUND, "intermediate_size": 44},
    audio_token_id=99,
    audio_merge_size=2,
)
_FRAMES: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 44,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_mel_bins": 6,
    "subsampling_factor": 2,
    "max_position_embeddings": 24,
}
_add(
    "nemo_speechlm",
    (2, 4, 8),
    model="Nemotron3_5TranscribeForConditionalGeneration",
    notes="with tensors of NeMo that transformers leaves aside",
    extra={
        "llm.mtp.layers.0.eh_proj.weight": (80, 160),
        "llm.model.layers.0.mixer.in_proj._extra_state": (5,),
        "ctc_timestamp.decoder.residual_scale": (),
    },
    text_config={"model_type": "nemotron_h", "layers_block_type": ["mamba", "attention", "moe", "mlp"], **_NEMOTRON},
    audio_config={
        "asr_config": _FRAMES,
        "diarization_config": {
            "audio_config": {**_FRAMES, "hidden_size": 28},
            "head_config": {"hidden_size": 10, "num_speakers": 3, "audio_hidden_size": 28, "subsampling_factor": 2},
            "streaming_config": {"num_speakers": 3, "subsampling_factor": 2, "speaker_cache_length": 7},
            "chunk_length": 14,
            "chunk_left_context": 1,
            "chunk_right_context": 4,
        },
    },
    word_timestamp_config={
        "hidden_size": 32,
        "intermediate_size": 20,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "vocab_size": 13,
        "blank_token_id": 11,
    },
    audio_token_id=101,
)

# ---------------------------------------------------------------------------------- older models of images and text

_add(
    "chameleon",
    (2, 4, 8),
    loads_alone=False,
    model=_IMAGES,
    vq_config={
        "embed_dim": 12,
        "num_embeddings": 9,
        "latent_channels": 14,
        "resolution": 8,
        "base_channels": 32,
        "channel_multiplier": [1, 1],
        "num_res_blocks": 1,
    },
    vocabulary_map={"<image>": 99},
    **_PLAIN,
)
_add(
    "git",
    (2, 4, 8),
    loads_alone=False,
    vision_config=_SIGLIP,
    num_image_with_embedding=2,
    **{**_BERT, "bos_token_id": 1, "eos_token_id": 2},
)
_QFORMER: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 24,
    "num_attention_heads": 4,
    "intermediate_size": 28,
    "num_hidden_layers": 2,
    "max_position_embeddings": 16,
}
_BLIP: dict[str, Any] = {
    "vision_config": _SIGLIP,
    "qformer_config": _QFORMER,
    "num_query_tokens": 5,
    "image_token_index": 99,
}
_BLIP_OPT: dict[str, Any] = {
    "loads_alone": False,
    "text_config": {**_OPT, "model_type": "opt", "word_embed_proj_dim": 80},
    **_BLIP,
}
_VICUNA: dict[str, Any] = {**_DENSE, "model_type": "llama"}
_add("blip-2", (2, 4, 8), model="Blip2ForConditionalGeneration", **_BLIP_OPT)
_add("instructblip", (2, 4, 8), model="InstructBlipForConditionalGeneration", text_config=_VICUNA, **_BLIP)
_add("instructblipvideo", (2, 4, 8), model="InstructBlipVideoForConditionalGeneration", text_config=_VICUNA, **_BLIP)
_KOSMOS: dict[str, Any] = {
    "pad_token_id": 1,
    "bos_token_id": 0,
    "eos_token_id": 2,
    "vocab_size": 101,
    "max_position_embeddings": 64,
    "embed_dim": 80,
    "layers": 3,
    "ffn_dim": 72,
    "attention_heads": 8,
}
_add(
    "kosmos-2",
    (2, 4, 8),
    loads_alone=False,
    model="Kosmos2ForConditionalGeneration",
    text_config=_KOSMOS,
    vision_config=_SIGLIP,
    latent_query_num=5,
)
_add(
    "kosmos-2.5",
    (2, 4, 8),
    loads_alone=False,
    model="Kosmos2_5ForConditionalGeneration",
    text_config=_KOSMOS,
    vision_config={
        "hidden_size": 32,
        "patch_embed_hidden_size": 20,
        "intermediate_size": 44,
        "head_dim": 8,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "max_num_patches": 18,
    },
    latent_query_num=5,
)
_add(
    "evolla",
    (2, 4, 8),
    model="EvollaForProteinText2Text",
    protein_encoder_config={
        "vocab_size": 31,
        "hidden_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 28,
        "max_position_embeddings": 18,
    },
    aligner_num_add_layers=1,
    aligner_ffn_mult=2,
    resampler_depth=1,
    resampler_dim_head=6,
    resampler_heads=2,
    resampler_num_latents=5,
    resampler_ff_mult=2,
    **_DENSE,
)
_add(
    "cosmos3_omni",
    (2, 4, 8),
    model=_IMAGES,
    notes="with weights of the second set, which makes images and is left aside by transformers",
    extra={
        "layers.0.self_attn.add_q_proj.weight": (96, 80),
        "layers.0.self_attn.add_k_proj.weight": (48, 80),
        "layers.0.self_attn.add_v_proj.weight": (48, 80),
        "layers.0.self_attn.to_add_out.weight": (80, 96),
        "layers.0.self_attn.norm_added_q.weight": (12,),
        "layers.0.self_attn.norm_added_k.weight": (12,),
        "layers.0.input_layernorm_moe_gen.weight": (80,),
        "layers.0.mlp_moe_gen.gate_proj.weight": (72, 80),
        "layers.0.mlp_moe_gen.up_proj.weight": (72, 80),
        "layers.0.mlp_moe_gen.down_proj.weight": (80, 72),
        "norm_moe_gen.weight": (80,),
        "proj_in.weight": (80, 17),
    },
    text_config=_DENSE,
    vision_config=_DEEP,
)
_add(
    "internvl-gpt_oss",
    (2, 4, 8),
    model_type="internvl",
    model=_IMAGES,
    text_config={**_EXPERTS, "model_type": "gpt_oss", "num_local_experts": 6},
    vision_config=_SIGLIP,
)
_add(
    "diffusion_gemma",
    (2, 4, 8),
    model="DiffusionGemmaForBlockDiffusion",
    text_config={
        **_EXPERTS,
        "tie_word_embeddings": True,
        "num_experts": 5,
        "top_k_experts": 2,
        "moe_intermediate_size": 24,
        "global_head_dim": 20,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
    },
    vision_config={
        **_SIGLIP,
        "model_type": "gemma4_vision",
        "head_dim": 8,
        "num_key_value_heads": 4,
        "position_embedding_size": 25,
    },
    canvas_length=12,
)
_add(
    "florence2",
    (2, 4, 8),
    loads_alone=False,
    model="Florence2ForConditionalGeneration",
    text_config={
        **_TOKENS,
        "model_type": "bart",
        "d_model": 80,
        "encoder_layers": 3,
        "decoder_layers": 3,
        "encoder_attention_heads": 8,
        "decoder_attention_heads": 8,
        "encoder_ffn_dim": 72,
        "decoder_ffn_dim": 88,
        "vocab_size": 101,
        "max_position_embeddings": 64,
    },
    vision_config={
        "embed_dim": [8, 12],
        "depths": [1, 1],
        "num_heads": [2, 3],
        "num_groups": [2, 3],
        "patch_size": [3, 2],
        "patch_stride": [2, 2],
        "patch_padding": [1, 1],
        "patch_prenorm": [False, True],
        "window_size": 3,
        "projection_dim": 80,
    },
)

# ------------------------------------------------------------------------------------------------- further encoders

_add("mpnet", (2, 4, 8), loads_alone=False, model=_MASKED, **{**_BERT, "pad_token_id": 1})
_add(
    "esm",
    (2, 4, 8),
    loads_alone=False,
    model=_MASKED,
    position_embedding_type="rotary",
    mask_token_id=33,
    token_dropout=True,
    notes="with the frequencies of each layer that published checkpoints carry",
    extra={f"esm.encoder.layer.{layer}.attention.self.rotary_embeddings.inv_freq": (5,) for layer in range(3)},
    **_BERT,
)
_add("esm-absolute", (2, 4, 8), model_type="esm", loads_alone=False, model=_MASKED, emb_layer_norm_before=True, **_BERT)
_ALBERT: dict[str, Any] = {**_BERT, "embedding_size": 28}
_add("albert", (2, 4, 8), loads_alone=False, model="AlbertForPreTraining", **_ALBERT)
_add(
    "albert-groups",
    (2, 4, 8),
    model_type="albert",
    loads_alone=False,
    model=_MASKED,
    num_hidden_groups=2,
    inner_group_num=2,
    **_ALBERT,
)
_add("nomic_bert", (2, 4, 8), model=_MASKED, **_BERT)
_add("gte", (2, 4, 8), model=_MASKED, **_BERT)
_add("jina_embeddings_v3", (2, 4, 8), model=_MASKED, **_BERT)
_XLM: dict[str, Any] = {"emb_dim": 80, "n_heads": 8, "n_layers": 3, "vocab_size": 101, "max_position_embeddings": 64}
_add("xlm", (2, 4, 8), loads_alone=False, model="XLMWithLMHeadModel", n_langs=3, **_XLM)
_add("xlm-causal", (2, 4, 8), model_type="xlm", loads_alone=False, model="XLMWithLMHeadModel", causal=True, **_XLM)
_add("flaubert", (2, 4, 8), loads_alone=False, model="FlaubertWithLMHeadModel", **_XLM)

# ------------------------------------------------------------------------------------ bytes, hashes, permutations

_HEADS: dict[str, Any] = {"num_attention_heads": 8, "num_key_value_heads": 4, "num_hidden_layers": 3}
_add(
    "blt",
    (2, 4, 8),
    loads_alone=False,
    patcher_config={
        "vocab_size": 101,
        "hidden_size": 24,
        "num_attention_heads": 3,
        "intermediate_size": 36,
        "num_hidden_layers": 1,
    },
    encoder_config={**_HEADS, "vocab_size": 101, "hidden_size": 48, "intermediate_size": 56, "hidden_size_global": 80},
    decoder_config={**_HEADS, "vocab_size": 101, "hidden_size": 48, "intermediate_size": 72, "hidden_size_global": 80},
    global_config={**_HEADS, "hidden_size": 80, "intermediate_size": 88},
    encoder_hash_byte_group_size=[3, 5],
    encoder_hash_byte_group_vocab=37,
    patching_threshold=4.1,
    max_patch_length=6,
    vocab_size=101,
    use_cache=False,  # transformers' own cache asks for a setting that the type has not
    **_TOKENS,
)
_add(
    "reformer",
    (2, 4, 8),
    model="ReformerModelWithLMHead",
    hidden_size=80,
    num_attention_heads=8,
    attention_head_size=12,
    feed_forward_size=72,
    attn_layers=["local", "lsh", "local"],
    axial_pos_shape=[8, 8],
    axial_pos_embds_dim=[28, 52],
    lsh_attn_chunk_length=32,
    local_attn_chunk_length=32,
    max_position_embeddings=64,
    is_decoder=True,
    vocab_size=101,
    notes="with many more tokens than a chunk has, keys are chosen by random numbers",
    **_TOKENS,
)
_add(
    "xlnet",
    (2, 4, 8),
    loads_alone=False,
    model="XLNetLMHeadModel",
    d_model=80,
    n_head=8,
    d_inner=72,
    n_layer=3,
    vocab_size=101,
    pad_token_id=5,
)

# EmbeddingGemma 2, whose layers with full attention have heads of 20 on one KV head
_EMBEDDING: dict[str, Any] = {
    **_DENSE,
    "hidden_size_per_layer_input": 6,
    "embedding_dim": 36,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
    "sliding_window": 8,
    "global_head_dim": 20,
    "num_global_key_value_heads": 1,
}
_add("embedding_gemma2_text", (2, 4, 8), model="EmbeddingGemma2TextModel", **_EMBEDDING)
_add(
    "embedding_gemma2",
    (2, 4, 8),
    model="EmbeddingGemma2Model",
    text_config={**_EMBEDDING, "model_type": "embedding_gemma2_text"},
    vision_config=None,
    audio_config=None,
)
# an encoder and a decoder: 3 layers and 2, 8 heads of 12
_T5: dict[str, Any] = {
    "pad_token_id": 0,
    "eos_token_id": 1,
    "decoder_start_token_id": 0,
    "vocab_size": 101,
    "d_model": 80,
    "d_kv": 12,
    "num_heads": 8,
    "d_ff": 72,
    "num_layers": 3,
    "num_decoder_layers": 2,
    "relative_attention_num_buckets": 10,
    "relative_attention_max_distance": 20,
}
_CROSS_BIAS = {"decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight": (10, 8)}
_add("t5", (2, 4, 8), model="T5ForConditionalGeneration", extra=_CROSS_BIAS, **_T5)
_add("t5-encoder", (2, 4, 8), model_type="t5", model="T5EncoderModel", feed_forward_proj="gated-gelu", **_T5)
_add("t5-classes", (2, 4, 8), model_type="t5", model="T5ForTokenClassification", num_labels=3, **_T5)
_add(
    "mt5",
    (2, 4, 8),
    model="MT5ForConditionalGeneration",
    notes="the head is its own",
    extra={"lm_head.weight": (101, 80)},
    feed_forward_proj="gated-gelu",
    tie_word_embeddings=False,
    **_T5,
)
_add("umt5", (2, 4, 8), model="UMT5ForConditionalGeneration", **_T5)
_add("umt5-encoder", (2, 4, 8), model_type="umt5", model="UMT5EncoderModel", **_T5)
_add("longt5", (2, 4, 8), model="LongT5ForConditionalGeneration", local_radius=5, **_T5)
_add(
    "longt5-global",
    (2, 4, 8),
    model_type="longt5",
    model="LongT5ForConditionalGeneration",
    encoder_attention_type="transient-global",
    local_radius=5,
    global_block_size=4,
    **_T5,
)
_BART: dict[str, Any] = {
    **_TOKENS,
    "vocab_size": 101,
    "d_model": 80,
    "encoder_layers": 3,
    "decoder_layers": 2,
    "encoder_attention_heads": 8,
    "decoder_attention_heads": 16,
    "encoder_ffn_dim": 72,
    "decoder_ffn_dim": 88,
    "decoder_start_token_id": 2,
}
_FAIRSEQ = {"model.encoder.version": (1,), "model.decoder.version": (1,)}
_bart = partial(_add, degrees=(2, 4, 8), loads_alone=False, max_position_embeddings=64, **_BART)
_bart("bart", model="BartForConditionalGeneration", extra=_FAIRSEQ)
_bart("bart-base", model_type="bart", model="BartModel")
_bart("bart-causal", model_type="bart")
_bart("mbart", model="MBartForConditionalGeneration", extra={"lm_head.weight": (101, 80)})
_bart("mbart-causal", model_type="mbart")
_SINES = {"model.encoder.embed_positions.weight": (64, 80), "model.decoder.embed_positions.weight": (64, 80)}
_bart("marian", model="MarianMTModel", extra=_SINES)
_bart(
    "marian-two-vocabularies",
    model_type="marian",
    model="MarianMTModel",
    decoder_vocab_size=93,
    share_encoder_decoder_embeddings=False,
)
_bart("marian-causal", model_type="marian")
_bart("pegasus", model="PegasusForConditionalGeneration")
_bart("pegasus-causal", model_type="pegasus")
_bart("blenderbot", model="BlenderbotForConditionalGeneration")
_bart("blenderbot-small", model="BlenderbotSmallForConditionalGeneration")
_bart("plbart", model="PLBartForConditionalGeneration")
_bart("mvp", model="MvpForConditionalGeneration")
_bart(
    "m2m_100",
    model="M2M100ForConditionalGeneration",
    extra={"model.encoder.embed_positions.weights": (66, 80), "model.decoder.embed_positions.weights": (66, 80)},
)
_bart("trocr", cross_attention_hidden_size=36)
_WHISPERS: dict[str, Any] = {**_BART, "num_mel_bins": 6, "max_source_positions": 13, "max_target_positions": 64}
_add("whisper", (2, 4, 8), loads_alone=False, model="WhisperForConditionalGeneration", **_WHISPERS)
_add("whisper-causal", (2, 4, 8), loads_alone=False, model_type="whisper", model="WhisperForCausalLM", **_WHISPERS)
_T5GEMMA: dict[str, Any] = {
    **_DENSE,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    "sliding_window": 8,
}
_T5GEMMA_DECODER: dict[str, Any] = {
    **_T5GEMMA,
    "num_hidden_layers": 2,
    "layer_types": ["sliding_attention", "full_attention"],
    "num_key_value_heads": 2,
    "intermediate_size": 88,
}
_add(
    "t5gemma",
    (2, 4, 8),
    model="T5GemmaForConditionalGeneration",
    encoder=_T5GEMMA,
    decoder={**_T5GEMMA_DECODER, "hidden_size": 96, "head_dim": 20},
    vocab_size=101,
)
_add(
    "t5gemma-encoder",
    (2, 4, 8),
    model_type="t5gemma",
    model="T5GemmaEncoderModel",
    encoder=_T5GEMMA,
    decoder=_T5GEMMA_DECODER,
    vocab_size=101,
    is_encoder_decoder=False,
)
_add(
    "t5gemma2",
    (2, 4, 8),
    model="T5Gemma2ForConditionalGeneration",
    encoder={
        "text_config": _T5GEMMA,
        "vision_config": _SIGLIP,
        "mm_tokens_per_image": 4,
        "eoi_token_index": 70,
        "image_token_index": 99,
    },
    decoder=_T5GEMMA_DECODER,
    image_token_index=99,
)
