"""A tiny Llama of random weights, the same bytes on every machine."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from reshard.formats.files.safetensors import build_header

if TYPE_CHECKING:
    import numpy as np

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 256,
    "intermediate_size": 704,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "hidden_act": "silu",
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-05,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "vocab_size": 1003,
    "dtype": "bfloat16",
}
"""4 KV heads, so that 8 ranks hold each of them twice; a vocabulary that no degree divides, so that it is padded."""


def write_model(folder: Path, config: dict[str, Any] = CONFIG) -> Path:
    """Write a Llama-shaped checkpoint of random bf16 weights, in two files with an index; always the same bytes."""
    folder.mkdir(parents=True)
    shapes = _shapes(config)
    names = list(shapes)
    half = len(names) // 2
    parts = {"model-00001-of-00002.safetensors": names[:half], "model-00002-of-00002.safetensors": names[half:]}
    from numpy.random import PCG64

    generator = PCG64(0)
    total = 0
    for file, part in parts.items():
        with (folder / file).open("wb") as stream:
            stream.write(build_header([(name, "BF16", shapes[name]) for name in part], {"format": "pt"}))
            for name in part:
                total += stream.write(_random_bf16(generator, shapes[name]))
    weight_map = {name: file for file, part in parts.items() for name in part}
    _write_json(folder / "model.safetensors.index.json", {"metadata": {"total_size": total}, "weight_map": weight_map})
    _write_json(folder / "config.json", config)
    _write_json(folder / "generation_config.json", {"bos_token_id": 1, "eos_token_id": 2})
    return folder


def _shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    hidden, ff, vocab = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    queries, keys = (config[key] * config["head_dim"] for key in ("num_attention_heads", "num_key_value_heads"))
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocab, hidden)}
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}"
        shapes |= {
            f"{prefix}.input_layernorm.weight": (hidden,),
            f"{prefix}.self_attn.q_proj.weight": (queries, hidden),
            f"{prefix}.self_attn.k_proj.weight": (keys, hidden),
            f"{prefix}.self_attn.v_proj.weight": (keys, hidden),
            f"{prefix}.self_attn.o_proj.weight": (hidden, queries),
            f"{prefix}.post_attention_layernorm.weight": (hidden,),
            f"{prefix}.mlp.gate_proj.weight": (ff, hidden),
            f"{prefix}.mlp.up_proj.weight": (ff, hidden),
            f"{prefix}.mlp.down_proj.weight": (hidden, ff),
        }
    return shapes | {"model.norm.weight": (hidden,), "lm_head.weight": (vocab, hidden)}


def _random_bf16(generator: np.random.PCG64, shape: tuple[int, ...]) -> bytes:
    """Values of a trained model's scale; bf16 is the upper half of float32. Norms lie around 1.

    Each is the sum of four random bytes, about its mean, in steps of 2 ** -13, and none is rounded: a normal
    distribution takes logarithms, whose last bit depends on the processor.
    """
    import numpy as np

    count = math.prod(shape)
    words = generator.random_raw(-(-count // 2)).astype("<u8")
    sums = words.view(np.uint8)[: 4 * count].reshape(count, 4).sum(axis=1, dtype=np.int32) - 510
    values = np.ldexp(sums.astype(np.float32), -13)
    if len(shape) == 1:
        values += np.float32(1)
    return bytes((values.view("<u4") >> 16).astype("<u2").data)


def _write_json(path: Path, document: dict[str, Any]) -> None:
    path.write_text(json.dumps(document, indent=2) + "\n")
