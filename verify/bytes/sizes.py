"""The sizes in a rank's config.json: verify's own word, by the shapes of the rank's tensors.

split computes them from the axes of an architecture. Here a setting is known by a tensor whose rows it counts, and goes
with the part of these that the rank has.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Shapes = Mapping[str, tuple[int, ...]]

_ROWS = {
    "num_attention_heads": ("self_attn.q_proj.weight",),
    "num_key_value_heads": ("self_attn.k_proj.weight",),
    "intermediate_size": (
        "mlp.up_proj.weight", "mlp.gate_up_proj.weight", "mlp.fc1.weight", "mlp.dense_h_to_4h.weight",
    ),
    "moe_intermediate_size": ("experts.0.up_proj.weight",),
    "shared_expert_intermediate_size": ("shared_expert.up_proj.weight",),
    "vocab_size": (
        "embed_tokens.weight", "embed_in.weight", "word_embeddings.weight", "wte.weight", "lm_head.weight",
        "embed_out.weight",
    ),
}  # fmt: skip
"""The ends of the names of tensors whose rows a setting counts, alone or in groups of one size."""


def sizes_of(
    original: Mapping[str, Any], config: Mapping[str, Any], whole: Shapes, part: Shapes
) -> tuple[list[str], set[str]]:
    """Return what is wrong with the sizes in a rank's config.json, and the settings of which nothing can be said.

    ``whole`` and ``part`` are the shapes of the original's tensors and of the rank's, by name. A setting that does not
    follow its tensor may be one that the type does not read.
    """
    wrong, unknown = list[str](), set[str]()
    size_of_head = original.get("hidden_size", 0) / (original.get("num_attention_heads") or 1)
    has_parts = any(isinstance(value, Mapping) and "model_type" in value for value in original.values())
    for key in dict.fromkeys((*original, *config)):
        before, after = original.get(key), config.get(key)
        found = {
            (whole[name][0], part[name][0]) for name in part.keys() & whole.keys() if name.endswith(_ROWS.get(key, ()))
        }
        if isinstance(before, int) and len(found) == 1 and not has_parts:  # else of which part, or of which layer?
            ((of_whole, of_part),) = found
            expected = of_part if key == "vocab_size" else before * of_part / of_whole
            if after != expected and after == before:
                unknown.add(key)
            elif after != expected:
                wrong.append(f"'{key}' is {after}, the rank's tensors have {expected:g}")
        elif after != before and not (key == "head_dim" and after == size_of_head):
            unknown.add(key)
    return wrong, {key for key in unknown if not key.endswith("_token_id")}
