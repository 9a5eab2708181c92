"""What a model is given to run: tokens and what else its forward asks for, the same for the original and all ranks.

An encoder and a decoder take tokens of their own, a speech model takes sound, and a decoder whose encoder is another
model takes that one's states.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GenerationMixin


def running(model: Any) -> Any:
    """The part of a model that is run: of one that asks for an image, the part that generates."""
    if _asks_for(model) in {"input_ids", "input_features"}:
        return model
    return next((part for part in model.children() if isinstance(part, GenerationMixin)), model)


def random_ids(model: Any, batch: int, seq: int, seed: int, avoided: int | None = None) -> Tensor:
    """Tokens of the original's vocabulary, ``batch`` x ``seq`` or as many as the model has positions for.

    ``avoided`` is a token that is not among them.
    """
    rows = model.get_input_embeddings().weight.shape[0]
    known = (getattr(model.config, key, None) for key in ("max_position_embeddings", "max_target_positions"))
    limit = next((value for value in known if value), seq)
    longest = min(seq, limit) if limit > 0 else seq  # -1: there is no limit
    ids = torch.randint(rows, (batch, longest), generator=torch.Generator().manual_seed(seed))
    return _without(ids, avoided, rows)


def inputs_of(model: Any, ids: Tensor, dtype: torch.dtype, avoided: int | None = None) -> dict[str, Tensor]:
    """The arguments of the forward of ``running(model)``, a whole model, for these tokens.

    A decoder beside an encoder has the same tokens, as numbers of its own vocabulary. Sound and states are random
    numbers that ``dtype`` can hold, sound as long as the model's encoder takes it.
    """
    model = running(model)
    taken = inspect.signature(model.forward).parameters
    found = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    if _asks_for(model) == "input_features":
        found = {"input_features": _random((len(ids), *_sound(model)), dtype)}
    if "decoder_input_ids" in taken:
        rows = _decoder_rows(model)
        found["decoder_input_ids"] = _without(ids % rows, avoided, rows) if rows else ids
        return found
    # A type whose config does not say whether it attends to an encoder always does.
    for states in {"encoder_hidden_states", "encoder_outputs"} & taken.keys():
        if getattr(model.config, "add_cross_attention", True):
            width = getattr(model.config, "cross_attention_hidden_size", None) or model.config.hidden_size
            found[states] = _random((*ids.shape, width), dtype)
    return found


def _asks_for(model: Any) -> str:
    return str(getattr(model, "main_input_name", "input_ids"))


def _without(ids: Tensor, avoided: int | None, rows: int) -> Tensor:
    return ids if avoided is None else ids.where(ids != avoided, (avoided + 1) % rows)


def _decoder_rows(model: Any) -> int | None:
    """The vocabulary of the decoder beside an encoder, where it has a table of tokens."""
    table = getattr(model.get_decoder(), "embed_tokens", None)
    return table.weight.shape[0] if isinstance(table, nn.Embedding) else None


def _sound(model: Any) -> tuple[int, int]:
    """The bands of a sound and the places in time that a speech encoder takes."""
    strides = [layer.stride[0] for layer in model.get_encoder().children() if isinstance(layer, nn.Conv1d)]
    places = model.config.max_source_positions
    for stride in strides:
        places *= stride
    return model.config.num_mel_bins, places


def _random(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape))).to(dtype)
