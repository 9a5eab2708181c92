"""What transformers does not document is named in one module, and is there."""

from __future__ import annotations

from pathlib import Path

import torch
import transformers

from formats import transformers_internals as internals

SMALL = {"hidden_size": 8, "num_hidden_layers": 1, "vocab_size": 9, "num_attention_heads": 2, "intermediate_size": 8}
ROOT = Path(__file__).parents[2]
PRIVATE = (
    "transformers.conversion_mapping", "transformers.core_model_loading", "_model_mapping", "_is_hf_initialized",
    "_keys_to_ignore_on_save",
)  # fmt: skip


def test_every_symbol_is_there() -> None:
    assert all(hasattr(internals, name) for name in internals.__all__)
    settings = transformers.LlamaConfig(**SMALL, tie_word_embeddings=True)
    auto = transformers.AutoModelForCausalLM
    assert internals.is_auto(auto) and not internals.is_auto(transformers.LlamaForCausalLM)
    assert internals.class_for(auto, settings) is transformers.LlamaForCausalLM
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(settings)
    assert internals.tied_weights(model) == {"lm_head.weight": "model.embed_tokens.weight"}
    assert hasattr(model, "_keys_to_ignore_on_save") and internals.not_saved(model) == ()
    assert isinstance(internals.get_model_conversion_mapping(model), list)


def test_a_module_that_has_first_values_keeps_them() -> None:
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SMALL))
    linear = model.model.layers[0].mlp.up_proj
    kept, made = model.lm_head.weight.detach().clone(), linear.weight.detach().clone()
    for part in (*model.modules(), *model.parameters()):
        part._is_hf_initialized = False
    internals.has_first_values(model.lm_head)
    internals.has_first_values(model.lm_head.weight)
    model.init_weights()
    assert torch.equal(model.lm_head.weight, kept)
    assert not torch.equal(linear.weight, made)


def test_nothing_else_names_them() -> None:
    files = [file for room in ("formats", "reshard", "verify") for file in (ROOT / room).rglob("*.py")]
    found = {f"{file.name}: {name}" for file in files for name in PRIVATE if name in file.read_text()}
    assert {each.partition(":")[0] for each in found} == {"transformers_internals.py"}, found
