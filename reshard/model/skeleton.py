"""The model that a config.json alone describes: the tensors that a checkpoint of it would hold, with rules, without
weights. Quantized weights are taken as plain ones. Needs transformers.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers.initialization import no_init_weights

from reshard.formats.documents import read_config
from reshard.formats.errors import CheckpointError, ReshardError, refused
from reshard.formats.files.safetensors import DTYPE_NAMES, stated_dtype
from reshard.formats.notation.architecture_files import find_architecture, load_architecture
from reshard.formats.quantization.methods import without_quantization
from reshard.formats.store import FilePath
from reshard.formats.transformers_internals import (
    concrete_class,
    model_class,
    not_saved,
    quiet_transformers,
    revert_weight_conversion,
    settings_of,
    tied_weights,
)
from reshard.model.binding import bind
from reshard.model.model import AxisSizes, FullTensor, Model, check_members

DTYPES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}


def skeleton(folder: FilePath, dtype: str | None = None, plan_file: Path | None = None) -> Model:
    """Return the model that a folder's config.json describes, without values. Its weights have one dtype: the given
    one, or the one that the config states for the model or its language model, or bfloat16.

    Raises ReshardError if transformers has no class for it or no rules cover it, and for an encoder beside a decoder.
    """
    config = read_config(folder / "config.json")
    sections = [config, *(value for value in config.values() if isinstance(value, Mapping))]
    stated = next(filter(None, map(stated_dtype, sections)), "BF16")
    name = dtype or DTYPE_NAMES[stated]
    if name not in DTYPES:
        raise refused("dtype", name, f"the dtypes are {', '.join(DTYPES)}")
    plain = {**_with_dtype(without_quantization(config), name), "dtype": name}
    architecture = load_architecture(plan_file) if plan_file else find_architecture(plain, folder)
    if plain.get("is_encoder_decoder"):
        what = plain.get("model_type", "this model")
        raise ReshardError(f"profile runs one stack of layers: {what} has an encoder beside its decoder")
    for axis, count in AxisSizes(architecture, plain, {}).counts.items():
        check_members(axis, count, 0)  # transformers makes a module of each
    tensors = [FullTensor(key, DTYPES[name], shape, "config.json") for key, shape in _shapes(plain).items()]
    return bind(architecture, plain, tensors)


def _with_dtype(settings: Mapping[str, Any], dtype: str) -> dict[str, Any]:
    """The same settings, with one dtype wherever they state any."""
    nested = {key: _with_dtype(value, dtype) if isinstance(value, dict) else value for key, value in settings.items()}
    stated = {key for key in ("dtype", "torch_dtype") if isinstance(settings.get(key), str)}
    return nested | dict.fromkeys(stated, dtype)


def _shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Name on disk and shape of each tensor that transformers would save."""
    try:
        cls = concrete_class(model_class(config), config)
        with quiet_transformers(), torch.device("meta"), no_init_weights():
            model = cls(transformers.AutoConfig.for_model(**settings_of(config)))
        tied, ignored = tied_weights(model), not_saved(model)
        saved = ((key, tensor) for key, tensor in model.state_dict().items() if key not in tied)
        state = {key: tensor for key, tensor in saved if not any(re.search(pattern, key) for pattern in ignored)}
        return {key: tuple(tensor.shape) for key, tensor in revert_weight_conversion(model, state).items()}
    except Exception as error:  # whatever the constructors of transformers raise
        text = " ".join(str(error).split())
        raise CheckpointError(
            f"config.json: transformers builds no model of it: {type(error).__name__}: {text}"
        ) from error
