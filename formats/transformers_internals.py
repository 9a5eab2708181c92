"""Undocumented parts of transformers that are used: a release that moves any of them breaks this file alone.

Its conversion rules say which tensors and settings of a checkpoint its own modules have. Needs transformers.
``tests/formats/test_internals.py`` names every symbol.
"""

from __future__ import annotations

import copy
import json
import logging
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from transformers.conversion_mapping import get_checkpoint_conversion_mapping, get_model_conversion_mapping
from transformers.core_model_loading import (
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
    revert_weight_conversion,
)

__all__ = [
    "WeightConverter", "WeightRenaming", "dot_natural_key", "get_checkpoint_conversion_mapping",
    "get_model_conversion_mapping", "rename_source_key", "revert_weight_conversion",
]  # fmt: skip


def is_auto(cls: Any) -> bool:
    """Whether a class is one of the ``AutoModel`` classes, which choose a class by the config."""
    return hasattr(cls, "_model_mapping")


def tied_weights(model: object) -> Mapping[str, str]:
    """The names of a model's weights that are others under a second name, each with the name that is kept."""
    return getattr(model, "all_tied_weights_keys", None) or {}


def not_saved(model: object) -> tuple[str, ...]:
    """The patterns of the names that ``save_pretrained`` leaves out."""
    return tuple(getattr(model, "_keys_to_ignore_on_save", None) or ())


def has_first_values(parameter: Any) -> None:
    """Say of a module or a tensor that it needs no first values."""
    parameter._is_hf_initialized = True


def model_class(config: Mapping[str, Any]) -> Any:
    """The class of transformers that a checkpoint was saved from, or else the one for causal language models."""
    for name in config.get("architectures") or ():
        cls = getattr(transformers, str(name), None)
        if cls is not None:
            return cls
    return transformers.AutoModelForCausalLM


def concrete_class(cls: Any, config: Mapping[str, Any]) -> Any:
    """The class of the model itself, where ``cls`` is one of transformers' ``AutoModel`` classes."""
    if not is_auto(cls):
        return cls
    return cls._model_mapping[type(transformers.AutoConfig.for_model(**settings_of(config)))]


def settings_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a config.json as ``AutoConfig.for_model`` takes them."""
    plain = {key: value for key, value in config.items() if key not in {"transformers_version", "architectures"}}
    settings: dict[str, Any] = json.loads(json.dumps(plain), object_hook=_special_float)
    return settings


def _special_float(value: dict[str, Any]) -> Any:
    """transformers writes infinity as ``{"__float__": "Infinity"}``."""
    return float(value["__float__"]) if value.keys() == {"__float__"} else value


@dataclass(frozen=True)
class ModelTensor:
    """A parameter or buffer: the shape it is given, and the tensors on disk that it is made of."""

    shape: tuple[int, ...]
    sources: tuple[str, ...]


def placements(model: Any, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, ModelTensor]:
    """Return the model's tensors, each with the stored tensors of these shapes that transformers' conversion makes it
    from.
    """
    state = model.state_dict()
    mapping = get_model_conversion_mapping(model)
    renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
    by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    collected: dict[str, Any] = {}
    sources: dict[str, list[str]] = defaultdict(list)
    for name in sorted(shapes, key=dot_natural_key):
        target, pattern = rename_source_key(name, renamings, converters, model.base_model_prefix, state)
        if target not in state and name in state:
            target, pattern = rename_source_key(name, [], [], model.base_model_prefix, state)
        if target not in state:
            continue
        new = WeightRenaming(name, target) if pattern is None else copy.deepcopy(by_pattern[pattern])
        entry = collected.setdefault(target, new)
        entry.add_tensor(target, name, pattern or name, torch.empty(shapes[name], device="meta"))
        sources[target].append(name)
    tensors: dict[str, ModelTensor] = {}
    for target, entry in collected.items():
        for key, value in entry.convert(target, model=model, config=model.config).items():
            tensor = value[0] if isinstance(value, list) else value
            tensors[key] = ModelTensor(tuple(tensor.shape), tuple(sources[target]))
    return tensors


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Keep transformers' reports and progress bars of loading to ourselves: what matters becomes an error."""
    level, accelerate = transformers.logging.get_verbosity(), logging.getLogger("accelerate.big_modeling")
    transformers.logging.set_verbosity(logging.CRITICAL)
    transformers.logging.disable_progress_bar()
    accelerate_level = accelerate.level
    accelerate.setLevel(logging.ERROR)
    try:
        yield
    finally:
        transformers.logging.set_verbosity(level)
        accelerate.setLevel(accelerate_level)
