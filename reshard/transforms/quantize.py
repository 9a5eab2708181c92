"""``--quantize fp8-block``: the weights of a checkpoint as 8-bit floats in blocks, with a scale for each block.

A row of blocks, all 128 rows of it, is computed at a time, when codes or scales in it are read. So nothing depends on
where a rank's part ends, and a weight is read twice: for its scales, which stand first in a file, and for its codes.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from formats.documents import json_bytes
from formats.errors import CheckpointError, MismatchError, PlanError, refused
from formats.files.checkpoint import CONFIG
from formats.files.numbers import CODES
from formats.files.safetensors import DTYPE_BITS
from formats.notation.adapters import SETTINGS as ADAPTER
from formats.quantization.dequantizing import PACKED
from formats.quantization.quantizing import BLOCK, SETTINGS, what_stays
from formats.quantization.settings import method_of, quantization_settings
from reshard.source.source import Source
from reshard.store.range_store import RangeStore
from reshard.text import plural
from reshard.transforms.tensors import (
    ArrayCache,
    Bytes,
    Computed,
    Opened,
    Tensor,
    laid_anew,
    store_of,
    tensors_of,
    whole_of,
)

NAME = "fp8-block"
"""What ``--quantize`` calls it."""
_CODES = ArrayCache(32 << 20)
"""Rows of blocks that were computed last: the next range may begin within one."""


class Scales(Computed):
    """The scales of a weight: ``what`` has its name, its dtype and its numbers of rows and columns."""

    def read(self, opened: Opened, begin: int, end: int) -> Bytes:
        """Compute them."""
        width = -(-self.what[3] // BLOCK) * 4
        return _range(begin, end, width, lambda band: self.band(opened, band)[1].view(np.uint8))

    def band(self, opened: Opened, number: int) -> tuple[memoryview, NDArray[np.float32]]:
        """The bytes of the weight in a row of blocks, and its scales. Raises MismatchError if they are not finite."""
        (weight,), (name, dtype, rows, columns) = self.inputs, self.what
        unit = columns * DTYPE_BITS[dtype] // 8
        first, last = number * BLOCK * unit, min((number + 1) * BLOCK, rows) * unit
        content = memoryview(weight.read(opened, first, last))
        scales = opened.block_scales(content, dtype, columns)
        if not np.isfinite(scales).all():
            why = f"tensor '{name}' has numbers that are not finite, or too large for float32"
            raise MismatchError(f"{why}: it has no scale", "the checkpoint is damaged, or its training diverged")
        return content, scales


class Codes(Computed):
    """A weight in 8-bit floats: ``what`` has the ``Scales``'. ``errors`` gets what is lost in each row of blocks."""

    def __init__(self, scales: Scales) -> None:
        super().__init__(scales.inputs, scales.what)
        self.__dict__.update(scales=scales, errors=np.zeros((-(-self.what[2] // BLOCK), 2)))

    scales: Scales
    errors: NDArray[np.float64]

    def read(self, opened: Opened, begin: int, end: int) -> Bytes:
        """Compute them."""

        def compute(number: int) -> NDArray[np.uint8]:
            content, scales = self.scales.band(opened, number)
            codes, self.errors[number] = opened.codes(content, self.what[1], self.what[3], scales)
            return codes

        def band(number: int) -> NDArray[np.uint8]:
            return _CODES.get((opened.codes, self, number), lambda: compute(number))

        return _range(begin, end, BLOCK * self.what[3], band)


def _range(begin: int, end: int, width: int, band: Callable[[int], NDArray[np.uint8]]) -> Bytes:
    """Bytes ``begin`` to ``end`` of a tensor whose rows of blocks have ``width`` bytes."""
    first = begin // width
    parts = [band(number) for number in range(first, -(-end // width))]
    return np.concatenate([np.empty(0, np.uint8), *parts]).data[begin - first * width : end - first * width]


class Quantized(NamedTuple):
    """A checkpoint of 8-bit floats, what its reader must know, and what was lost of the weights read so far."""

    store: RangeStore
    note: str
    error: Callable[[], tuple[str, float] | None]


def quantize(source: Source, name: str) -> Quantized:
    """A checkpoint as if its weights were in fp8 blocks.

    Raises SettingError for another name than ``fp8-block``, CheckpointError if it is quantized already, and PlanError
    for a model of which it is not known what stays, and for experts in one tensor.
    """
    if name != NAME:
        raise refused("quantize", str(name), f"the form is {NAME}")
    if ADAPTER in source.model.config:
        raise refused("quantize", name, "an adapter keeps its dtypes", advice="give it as you merge the adapter")
    config, stays, dtypes = source.model.config, what_stays()[0], {t.name: t.dtype for t in source.model.tensors}
    settings, scheme = quantization_settings(config), source.model.sizes.scheme
    if settings or any(scheme.companion(*entry, dtypes) for entry in dtypes.items()):
        method = f" ({method_of(settings)})" if settings else ""
        raise CheckpointError(f"{source.path} is quantized already{method}", "--dequantize makes BF16 of fp8 first")
    shown_by = what_stays()[1].get(type_of := str(config.get("model_type")).removesuffix("_text"))
    if shown_by is None:
        raise PlanError(
            f"no published checkpoint says which weights of '{type_of}' stay as they are in {NAME}",
            f"the types are {', '.join(what_stays()[1])}",
        )
    contents, codes, modules, stay = (
        dict[str, Tensor](),
        dict[str, Codes](),
        list[str](),
        dict.fromkeys(stays.values(), 0),
    )
    for key, tensor in tensors_of(source).items():
        contents[key] = tensor
        if len(tensor.shape) < 2:
            continue
        kept = next((what for part, what in stays.items() if part in key), None)
        if kept is not None:
            modules.append(key.removesuffix(".weight"))
            stay[kept] += 1
        elif len(tensor.shape) != 2 or not key.endswith(".weight") or tensor.dtype not in CODES:
            what = f"tensor '{key}' ({tensor.dtype}, {list(tensor.shape)})"
            why = "published fp8 checkpoints have a matrix for each expert" if len(tensor.shape) == 3 else "no weight"
            raise PlanError(f"{what} cannot be quantized to {NAME}: {why}")
        else:
            scales = Scales((tensor.content,), (key, tensor.dtype, *tensor.shape))
            grid = tuple(-(-size // BLOCK) for size in tensor.shape)
            codes[key] = Codes(scales)
            contents[key] = Tensor(PACKED, tensor.shape, codes[key])
            contents[f"{key}_scale_inv"] = Tensor("F32", grid, scales)
    listed_modules = dict.fromkeys([*modules, "lm_head"])  # a tied one, too
    document = {**config, "quantization_config": {**SETTINGS, "modules_to_not_convert": [*listed_modules]}}
    whole = whole_of(source)
    files, index = laid_anew(whole, contents, {key: f"{key}_scale_inv" for key in codes})
    sides = {**whole.sides, CONFIG: json_bytes(document) + b"\n"}
    store = store_of(source, f"{source.location} (in {NAME})", files, {**sides, **index})
    kept_text = ", ".join(f"{what} ({plural(count, 'tensor')})" for what, count in stay.items() if count)
    note = f"{plural(len(codes), 'weight')} were quantized to fp8 in blocks of {BLOCK} x {BLOCK}"
    note += f"; as in {shown_by}, these stay: {kept_text} and all vectors"
    return Quantized(store, note, lambda: _largest(codes))


def _largest(codes: dict[str, Codes]) -> tuple[str, float] | None:
    """The weight with the largest root mean square of what was lost, relative to that of its numbers; None: unread."""
    sums = {name: content.errors.sum(axis=0) for name, content in codes.items()}
    errors = [(math.sqrt(lost / total), name) for name, (lost, total) in sums.items() if total]
    return max(errors)[::-1] if errors else None
