"""Large checkpoints of random bytes with real names and shapes, for benchmarks."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from reshard.formats.files.safetensors import build_header, read_header, tensor_bytes

Tensor = tuple[str, str, tuple[int, ...]]

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 3072,
    "intermediate_size": 8192,
    "num_attention_heads": 24,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 32000,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}


TINY = CONFIG | {
    "hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 2,
    "vocab_size": 100,
}  # fmt: skip


def llama_tensors(layers: int, config: Mapping[str, Any] = CONFIG) -> Iterator[Tensor]:
    """The tensors of a Llama-shaped model, in bfloat16: by ``CONFIG`` about 0.2 GB a layer, by ``TINY`` 3 kB."""
    hidden, ff, head, vocab = (config[key] for key in ("hidden_size", "intermediate_size", "head_dim", "vocab_size"))
    heads, kv = (config[f"num_{kind}_heads"] * head for kind in ("attention", "key_value"))
    yield "model.embed_tokens.weight", "BF16", (vocab, hidden)
    for i in range(layers):
        layer = f"model.layers.{i}"
        yield f"{layer}.input_layernorm.weight", "BF16", (hidden,)
        yield f"{layer}.mlp.down_proj.weight", "BF16", (hidden, ff)
        yield f"{layer}.mlp.gate_proj.weight", "BF16", (ff, hidden)
        yield f"{layer}.mlp.up_proj.weight", "BF16", (ff, hidden)
        yield f"{layer}.post_attention_layernorm.weight", "BF16", (hidden,)
        yield f"{layer}.self_attn.k_proj.weight", "BF16", (kv, hidden)
        yield f"{layer}.self_attn.o_proj.weight", "BF16", (hidden, heads)
        yield f"{layer}.self_attn.q_proj.weight", "BF16", (heads, hidden)
        yield f"{layer}.self_attn.v_proj.weight", "BF16", (kv, hidden)
    yield "model.norm.weight", "BF16", (hidden,)
    yield "lm_head.weight", "BF16", (vocab, hidden)


def write_llama(folder: Path, gigabytes: float, files: int = 3) -> Path:
    """Write a checkpoint of about ``gigabytes`` GB in ``files`` files; an existing one is taken as it is."""
    if (folder / "config.json").exists():
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    layers = max(1, round((gigabytes - 0.39) / 0.2013))
    tensors = list(llama_tensors(layers))
    total = sum(tensor_bytes(*t) for t in tensors)
    groups: list[list[Tensor]] = [[]]
    size = 0
    for tensor in tensors:
        if size >= total / files and len(groups) < files:
            groups.append([])
            size = 0
        groups[-1].append(tensor)
        size += tensor_bytes(*tensor)
    weight_map = {}
    for i, group in enumerate(groups, 1):
        name = f"model-{i:05d}-of-{len(groups):05d}.safetensors"
        write_random(folder / name, group)
        weight_map |= {tensor[0]: name for tensor in group}
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))
    (folder / "config.json").write_text(json.dumps(CONFIG | {"num_hidden_layers": layers}, indent=2))
    return folder


def write_normal(folder: Path, gigabytes: float) -> Path:
    """The same of normally distributed numbers."""
    if not (folder / "config.json").exists():
        chance = np.random.default_rng(0)
        for file in write_llama(folder, gigabytes).glob("*.safetensors"):
            first = min(info.offset for info in read_header(file).tensors.values())
            numbers = np.memmap(file, "<u2", "r+", first)
            for begin in range(0, numbers.size, 1 << 22):
                drawn = chance.standard_normal(min(1 << 22, numbers.size - begin), np.float32) * np.float32(0.02)
                numbers[begin : begin + drawn.size] = drawn.view("<u4") >> 16
    return folder


def write_adapter(folder: Path, model: Path, rank: int = 16) -> Path:
    """A LoRA adapter to all linear layers of a checkpoint that ``write_llama`` wrote."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors, chance = dict[str, np.ndarray[Any, Any]](), np.random.default_rng(1)
    for file in sorted(model.glob("*.safetensors")):
        for name, info in read_header(file).tensors.items():
            if "_proj" in name:
                for side, shape in (("A", (rank, info.shape[1])), ("B", (info.shape[0], rank))):
                    drawn = chance.standard_normal(shape, np.float32) * np.float32(0.01)
                    tensors[f"base_model.model.{name.removesuffix('weight')}lora_{side}.weight"] = drawn
    save_file(tensors, folder / "adapter_model.safetensors", {"format": "pt"})
    modules = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    settings = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "target_modules": modules, "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    return folder


def write_tiny(folder: Path, layers: int) -> int:
    """Write a Llama of so many layers of a few hundred bytes a tensor in one file; the number of its tensors."""
    tensors = list(llama_tensors(layers, TINY))
    folder.mkdir(parents=True, exist_ok=True)
    write_random(folder / "model.safetensors", tensors)
    (folder / "config.json").write_text(json.dumps(TINY | {"num_hidden_layers": layers}, indent=2))
    return len(tensors)


def write_random(path: Path, tensors: list[Tensor]) -> None:
    """A safetensors file of random bytes."""
    with path.open("wb") as file:
        file.write(build_header(tensors, {"format": "pt"}))
        left = sum(tensor_bytes(*t) for t in tensors)
        while left:
            file.write(os.urandom(min(left, 64 << 20)))
            left -= min(left, 64 << 20)


# ------------------------------------------------------------------------------------ DeepSeek-V3, its real layout

DEEPSEEK_V3: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "hidden_size": 7168,
    "intermediate_size": 18432, "moe_intermediate_size": 2048, "num_hidden_layers": 61, "num_nextn_predict_layers":
    1, "first_k_dense_replace": 3,
    "n_routed_experts": 256, "n_shared_experts": 1, "num_experts_per_tok": 8, "num_attention_heads": 128,
    "num_key_value_heads": 128, "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64, "v_head_dim": 128, "vocab_size": 129280, "tie_word_embeddings": False, "torch_dtype":
    "bfloat16",
    "quantization_config": {
        "activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "weight_block_size": [128, 128],
    },
}  # fmt: skip


def deepseek_v3_tensors(config: Mapping[str, Any] | None = None) -> Iterator[Tensor]:
    """The tensors of the published DeepSeek-V3: fp8 in 128 x 128 blocks, 256 experts by name, one MTP layer.

    ``config`` is that of another model of the same names.
    """
    config = config or DEEPSEEK_V3
    hidden, vocab, layers = config["hidden_size"], config["vocab_size"], config["num_hidden_layers"]
    yield "model.embed_tokens.weight", "BF16", (vocab, hidden)
    for i in range(layers + config["num_nextn_predict_layers"]):
        yield from _deepseek_layer(f"model.layers.{i}", config, dense=i < config["first_k_dense_replace"])
    for i in range(layers, layers + config["num_nextn_predict_layers"]):
        mtp = f"model.layers.{i}"
        yield f"{mtp}.embed_tokens.weight", "BF16", (vocab, hidden)
        yield f"{mtp}.enorm.weight", "BF16", (hidden,)
        yield f"{mtp}.hnorm.weight", "BF16", (hidden,)
        yield f"{mtp}.eh_proj.weight", "BF16", (hidden, 2 * hidden)
        yield f"{mtp}.shared_head.norm.weight", "BF16", (hidden,)
        yield f"{mtp}.shared_head.head.weight", "BF16", (vocab, hidden)
    yield "model.norm.weight", "BF16", (hidden,)
    yield "lm_head.weight", "BF16", (vocab, hidden)


def in_bf16(tensors: Iterable[Tensor]) -> Iterator[Tensor]:
    """The same model in BF16: without the scales of what was fp8."""
    for name, dtype, shape in tensors:
        if not name.endswith("_scale_inv"):
            yield name, "BF16" if dtype.startswith("F8") else dtype, shape


def _deepseek_layer(layer: str, config: Mapping[str, Any], *, dense: bool) -> Iterator[Tensor]:
    hidden, heads, experts = config["hidden_size"], config["num_attention_heads"], config["n_routed_experts"]
    yield f"{layer}.input_layernorm.weight", "BF16", (hidden,)
    yield f"{layer}.post_attention_layernorm.weight", "BF16", (hidden,)
    yield f"{layer}.self_attn.q_a_layernorm.weight", "BF16", (1536,)
    yield f"{layer}.self_attn.kv_a_layernorm.weight", "BF16", (512,)
    yield from _fp8(f"{layer}.self_attn.q_a_proj", 1536, hidden)
    yield from _fp8(f"{layer}.self_attn.q_b_proj", heads * 192, 1536)
    yield from _fp8(f"{layer}.self_attn.kv_a_proj_with_mqa", 576, hidden)
    yield from _fp8(f"{layer}.self_attn.kv_b_proj", heads * 256, 512)
    yield from _fp8(f"{layer}.self_attn.o_proj", hidden, heads * 128)
    if dense:
        yield from _mlp(f"{layer}.mlp", 18432)
        return
    yield f"{layer}.mlp.gate.weight", "BF16", (experts, hidden)
    yield f"{layer}.mlp.gate.e_score_correction_bias", "F32", (experts,)
    yield from _mlp(f"{layer}.mlp.shared_experts", 2048)
    for expert in range(experts):
        yield from _mlp(f"{layer}.mlp.experts.{expert}", 2048)


def _mlp(name: str, ff: int) -> Iterator[Tensor]:
    yield from _fp8(f"{name}.gate_proj", ff, 7168)
    yield from _fp8(f"{name}.up_proj", ff, 7168)
    yield from _fp8(f"{name}.down_proj", 7168, ff)


def _fp8(name: str, rows: int, columns: int) -> Iterator[Tensor]:
    yield f"{name}.weight", "F8_E4M3", (rows, columns)
    yield f"{name}.weight_scale_inv", "F32", (-(-rows // 128), -(-columns // 128))


def write_sparse(folder: Path, config: dict[str, object], tensors: list[Tensor], files: int) -> Path:
    """A checkpoint of sparse files: true headers and true sizes, no data."""
    folder.mkdir(parents=True, exist_ok=True)
    weight_map = {}
    for i in range(files):
        name = f"model-{i + 1:05d}-of-{files:06d}.safetensors"
        group = tensors[len(tensors) * i // files : len(tensors) * (i + 1) // files]
        header = build_header(group, {"format": "pt"})
        with (folder / name).open("wb") as file:
            file.write(header)
            file.truncate(len(header) + sum(tensor_bytes(*t) for t in group))
        weight_map |= {tensor[0]: name for tensor in group}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    (folder / "config.json").write_text(json.dumps(config))
    return folder
