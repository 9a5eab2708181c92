"""The check that all sets of weights in a folder are the same model: a sample of each tensor is compared."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from reshard.formats.errors import CheckpointError, ReshardError
from reshard.formats.files.checkpoint import open_checkpoint
from reshard.formats.files.safetensors import DTYPE_BITS, TensorInfo
from reshard.formats.store import FilePath, read_ranges
from reshard.model.binding import tied_twice
from reshard.model.model import FullTensor
from reshard.source.opening import open_source
from reshard.source.source import Source
from reshard.store.weight_sets import WeightSet, sets_in, view_of
from reshard.transforms.tensors import ARITHMETIC, Content, tensors_of

_TENSORS = 16
"""So many tensors of a remote set are compared: each is a request."""
_NUMBERS = 32
"""Elements of each tensor that are compared, from its middle."""
_ROUNDING = {"F64": 2.0**-53, "F32": 2.0**-24, "F16": 2.0**-11, "BF16": 2.0**-8}
"""The largest rounding of a number, relative to it."""
_SMALLEST = 2.0**-25
"""The largest rounding of F16's smallest numbers."""


class _Sampled(NamedTuple):
    """A tensor of which some bytes are read: from one number to another."""

    dtype: str
    shape: tuple[int, ...]
    read: Callable[[int, int], bytes]

    def sample(self) -> bytes:
        """The elements in the middle."""
        bits, count = DTYPE_BITS[self.dtype], int(np.prod(self.shape, dtype=object))
        first = max(0, (count - _NUMBERS) // 2) // 8 * 8
        return self.read(first * bits // 8, min(count, first + _NUMBERS) * bits // 8)


def check_agreement(source: Source, config: FilePath | None = None) -> None:
    """Raise CheckpointError if the folder of a checkpoint has another set of weights, of other tensors.

    A set that cannot be read as a model's gives no tensors, and is left behind like any other file. ``config`` is a
    folder with the config.json of both.
    """
    sets, names = sets_in(source.path), {file.name.partition("/")[0] for file in source.files.values()}
    own = next((each for each in sets if not names.isdisjoint(each.parts)), None)
    for other in (each for each in sets if own is not None and each is not own):
        why = _difference(source, other, config)
        if own is not None and why is not None:
            places = f"{source.path / own.name} or {source.path / other.name}"
            hint = f"give the one that is meant as the source: {places}"
            raise CheckpointError(
                f"{source.path} has two sets of weights that differ, {own.name}{own.date} and "
                f"{other.name}{other.date}: tensor {why}",
                hint if isinstance(source.path, Path) else f"{hint}, in a copy on this machine",
            )


def _difference(source: Source, other: WeightSet, config: FilePath | None) -> str | None:
    """The first tensor that another set has otherwise, in words; None if there is none."""
    own, rules = _of_source(source), source.model.architecture
    try:
        there = _of_files(other) if other.is_usual else _of_source(open_source(view_of(other), config=config))
    except ReshardError:
        return None
    full = [FullTensor(name, tensor.dtype, tensor.shape, other.name) for name, tensor in there.items()]
    tied = {*tied_twice(rules, source.model.config, full, lambda *_: False), *source.aliases}
    names = sorted({*own, *(name for name in there if rules.match(name) is not None)} - tied)
    sampled = {*names[:: max(1, len(names) // _TENSORS)]} if source.is_remote else {*names}
    for name in names:
        mine, its = own.get(name), there.get(name)
        if mine is None or its is None:
            return f"'{name}' is in one of them alone"
        if mine.shape != its.shape:
            return f"'{name}' has the shapes {list(mine.shape)} and {list(its.shape)}"
        if name in sampled and not _alike(mine, its):
            return f"'{name}' has another content"
    return None


def _of_source(source: Source) -> dict[str, _Sampled]:
    def read(content: Content, begin: int, end: int) -> bytes:
        return bytes(content.read(ARITHMETIC, begin, end))

    tensors = tensors_of(source).items()
    return {name: _Sampled(tensor.dtype, tensor.shape, partial(read, tensor.content)) for name, tensor in tensors}


def _of_files(weights: WeightSet) -> dict[str, _Sampled]:
    def read(info: TensorInfo, begin: int, end: int) -> bytes:
        return read_ranges([(info.file, info.offset + begin, info.offset + end)])[0]

    checkpoint = open_checkpoint(view_of(weights))
    second = {name: checkpoint.tensors[first] for name, first in checkpoint.aliases.items()}
    infos = {**checkpoint.tensors, **second}
    return {name: _Sampled(info.dtype, info.shape, partial(read, info)) for name, info in infos.items()}


def _alike(a: _Sampled, b: _Sampled) -> bool:
    """Whether the samples are the same bytes or, in two dtypes, may be roundings of the same numbers."""
    if a.dtype == b.dtype:
        return a.sample() == b.sample()
    if not {a.dtype, b.dtype} <= _ROUNDING.keys():
        return False
    one, two = _numbers(a), _numbers(b)
    most = np.abs(one) * _ROUNDING[a.dtype] + np.abs(two) * _ROUNDING[b.dtype] + _SMALLEST
    return bool((np.abs(one - two) <= most).all())


def _numbers(tensor: _Sampled) -> NDArray[np.float64]:
    data = np.frombuffer(tensor.sample(), {"F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "<u2"}[tensor.dtype])
    if tensor.dtype == "BF16":
        data = (data.astype("<u4") << np.uint32(16)).view("<f4")
    return data.astype(np.float64)
