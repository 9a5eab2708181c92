"""A program's own config file from ``config.json``, and the other way, by the expressions of its format.

The dtype of a given ``config.json`` is replaced by that of the weights that it is given for: a training run may hold a
model in another dtype than the published model. Loaders take the dtype of config.json, and would round the weights.
"""

from __future__ import annotations

import copy
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from formats.errors import NotationError, PlanError
from formats.files.safetensors import DTYPE_NAMES, TensorInfo
from formats.notation.expressions import Expression, Lookup
from formats.notation.format_rules import Settings
from reshard.model.model import Model


def program_config(settings: Settings, model: Model) -> dict[str, Any]:
    """The content of a program's config file for a model. Raises PlanError."""
    return _evaluated(settings.write, model.sizes.look_up, settings.file)


def made_config(
    settings: Settings, document: Mapping[str, Any], tensors: Iterable[tuple[str, str, tuple[int, ...]]], ranks: int
) -> dict[str, Any]:
    """The ``config.json`` of a model, made from a program's config file and the stored tensors' shapes and dtypes.

    Besides the file's entries, expressions may use ``shapes`` and ``dtypes``, which have those of the first rank's
    ``tensors`` by name, and ``ranks``, the number of ranks. Raises PlanError.
    """
    shapes, dtypes = dict[str, list[int]](), dict[str, str]()
    for name, dtype, shape in tensors:
        shapes[name], dtypes[name] = list(shape), dtype
    stored = {"shapes": shapes, "dtypes": dtypes, "ranks": ranks}
    config = _evaluated(settings.read, {**document, **stored}.get, "config.json")
    # transformers has defaults of its own for what is not there
    return {key: config.get(key) for key in settings.read if "." not in key} | config


def _evaluated(expressions: Mapping[str, Expression], look_up: Lookup, file: str) -> dict[str, Any]:
    document: dict[str, Any] = {}
    for key, expression in expressions.items():
        try:
            value = expression.evaluate(look_up)
        except NotationError as error:
            raise PlanError(f"{file}: '{key}' cannot be made: {error.message}", error.hint) from None
        if value is not None:
            *outer, last = key.split(".")
            inner = document
            for name in outer:
                inner = inner.setdefault(name, {})
            inner[last] = value
    return document


# ------------------------------------------------------------------------------------------------------ the dtype

_KEYS = ("dtype", "torch_dtype")


def dtype_of(held: Iterable[Mapping[str, TensorInfo]]) -> str | None:
    """The name in config.json for the dtype of most elements; None if they are quantized, or if there are none."""
    counts = Counter[str]()
    for tensors in held:
        for info in tensors.values():
            counts[info.dtype] += math.prod(info.shape)
    most = counts.most_common(1)
    return DTYPE_NAMES.get(most[0][0]) if most else None


def with_dtype(config: Mapping[str, Any], section: Iterable[str], dtype: str | None) -> tuple[dict[str, Any], set[str]]:
    """The config with this dtype wherever it has one, at its top and on the way to the language model's section.

    Also returns the old dtypes; none if it had the same, or no dtype.
    """
    found, others = copy.deepcopy(dict(config)), set[str]()
    for part in _parts(found, section):
        for key in _KEYS:
            if dtype is not None and part.get(key) in {*DTYPE_NAMES.values()} - {dtype}:
                others.add(part[key])
                part[key] = dtype
    return found, others


def _parts(config: dict[str, Any], section: Iterable[str]) -> Iterator[dict[str, Any]]:
    yield config
    for key in section:
        config = config[key]
        yield config
