"""What is used of transformers that it does not document: a new release that moves any of it breaks this file alone.

Needs transformers. ``tests/formats/test_internals.py`` names every symbol.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from transformers.conversion_mapping import get_checkpoint_conversion_mapping, get_model_conversion_mapping
from transformers.core_model_loading import (
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
    revert_weight_conversion,
)

__all__ = [
    "WeightConverter",
    "WeightRenaming",
    "class_for",
    "dot_natural_key",
    "get_checkpoint_conversion_mapping",
    "get_model_conversion_mapping",
    "has_first_values",
    "is_auto",
    "not_saved",
    "rename_source_key",
    "revert_weight_conversion",
    "tied_weights",
]


def is_auto(cls: Any) -> bool:
    """Whether this is one of the ``AutoModel`` classes, which stand for the class of a config."""
    return hasattr(cls, "_model_mapping")


def class_for(auto: Any, settings: object) -> Any:
    """The class that an ``AutoModel`` class makes of a config."""
    return auto._model_mapping[type(settings)]


def tied_weights(model: object) -> Mapping[str, str]:
    """The names of a model's weights that are others under a second name, each with the name that is kept."""
    return getattr(model, "all_tied_weights_keys", None) or {}


def not_saved(model: object) -> tuple[str, ...]:
    """The patterns of the names that ``save_pretrained`` leaves out."""
    return tuple(getattr(model, "_keys_to_ignore_on_save", None) or ())


def has_first_values(of: Any) -> None:
    """Say of a module or a tensor that it needs no first values."""
    of._is_hf_initialized = True
