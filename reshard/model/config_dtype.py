"""The dtype that a ``config.json`` states.

That of a given one is replaced by the dtype of the weights that it is given for: a training run may hold a model in
another dtype than the published model. Loaders take the dtype of config.json, and would round the weights.
"""

from __future__ import annotations

import copy
import itertools
import math
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from reshard.formats.files.safetensors import DTYPE_NAMES, TensorInfo

_KEYS = ("dtype", "torch_dtype")


def dtype_of(ranks: Iterable[Mapping[str, TensorInfo]]) -> str | None:
    """The name in config.json for the dtype of most elements; None if they are quantized, or if there are none."""
    counts = Counter[str]()
    for tensors in ranks:
        for info in tensors.values():
            counts[info.dtype] += math.prod(info.shape)
    most = counts.most_common(1)
    return DTYPE_NAMES.get(most[0][0]) if most else None


def with_dtype(config: Mapping[str, Any], section: Iterable[str], dtype: str | None) -> tuple[dict[str, Any], set[str]]:
    """The config with this dtype wherever it has one, at its top and on the way to the language model's section.

    Also returns the old dtypes; none if it had the same, or no dtype.
    """
    edited, old_dtypes = copy.deepcopy(dict(config)), set[str]()
    for part in itertools.accumulate(section, dict.__getitem__, initial=edited):
        for key in _KEYS:
            if dtype is not None and part.get(key) in {*DTYPE_NAMES.values()} - {dtype}:
                old_dtypes.add(part[key])
                part[key] = dtype
    return edited, old_dtypes
