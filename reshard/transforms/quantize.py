"""``--quantize fp8-block``: the weights of a checkpoint as 8-bit floats in blocks, with a scale for each block.

A row of blocks, all 128 rows of it, is computed at a time, when codes or scales in it are read. So nothing depends on
where a rank's part ends, and a weight is read twice: for its scales, which stand first in a file, and for its codes.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from reshard.formats.documents import json_bytes
from reshard.formats.errors import CheckpointError, MismatchError, PlanError, refused
from reshard.formats.files.checkpoint import CONFIG
from reshard.formats.files.safetensors import DTYPE_BITS
from reshard.formats.notation.architecture import SETTINGS as ADAPTER
from reshard.formats.numbers import CODES
from reshard.formats.quantization.fp8 import BLOCK, PACKED, SETTINGS, what_stays
from reshard.formats.store import public_name
from reshard.source.source import Source
from reshard.store.threads import ArrayCache
from reshard.text import plural
from reshard.transforms.tensors import Arithmetic, Content, Tensor, changed, computed, derived, is_quantized, tensors_of

NAME = "fp8-block"
"""The form's name, as in ``--quantize fp8-block``."""
_CODES = ArrayCache(8 << 20)
"""Rows of blocks in which the last ranges ended: the next one may begin there."""


def in_blocks(name: str, tensor: Tensor, lost: NDArray[np.float64]) -> tuple[Content, Content]:
    """A weight in 8-bit floats, and its scales.

    ``lost`` gets the sums of squares of what was lost and of the numbers, for each row of blocks that is read.
    """
    weight, dtype, (rows, columns) = tensor.content, tensor.dtype, tensor.shape
    unit = columns * DTYPE_BITS[dtype] // 8

    def row_of(arithmetic: Arithmetic, number: int) -> tuple[memoryview, NDArray[np.float32]]:
        """The numbers of a row of blocks, and its scales. Raises MismatchError if a number is not finite."""
        content = memoryview(weight.read(arithmetic, number * BLOCK * unit, min((number + 1) * BLOCK, rows) * unit))
        block_scales = arithmetic.block_scales(content, dtype, columns)
        if not np.isfinite(block_scales).all():
            why = f"tensor '{name}' has numbers that are not finite, or too large for float32"
            raise MismatchError(f"{why}: it has no scale", "the checkpoint is damaged, or its training diverged")
        return content, block_scales

    def scales(arithmetic: Arithmetic, begin: int, end: int) -> NDArray[Any]:
        return _of_rows(
            -(-columns // BLOCK) * 4, begin, end, lambda number: row_of(arithmetic, number)[1].view(np.uint8)
        )

    def codes(arithmetic: Arithmetic, begin: int, end: int) -> NDArray[Any]:
        def make(number: int) -> NDArray[np.uint8]:
            content, block_scales = row_of(arithmetic, number)
            row, lost[number] = arithmetic.codes(content, dtype, columns, block_scales)
            return row

        def row(number: int) -> NDArray[np.uint8]:
            if begin <= number * width and (number + 1) * width <= end:
                return make(number)
            return _CODES.get((arithmetic.codes, codes, number), partial(make, number))

        return _of_rows(width := columns * BLOCK, begin, end, row)

    what = name, dtype, rows, columns
    return computed(codes, (weight,), what), computed(scales, (weight,), what)


def _of_rows(width: int, begin: int, end: int, row: Callable[[int], NDArray[np.uint8]]) -> NDArray[np.uint8]:
    """Return bytes ``begin`` to ``end`` of rows of equal length."""
    content = np.empty(end - begin, np.uint8)
    for number in range(begin // width, -(-end // width)):
        at = number * width - begin  # where the row begins in the range
        content[max(at, 0) : at + width] = row(number)[max(-at, 0) : end - begin - at]
    return content


def _stays(name: str) -> str | None:
    """Return what a tensor is that stays as it is."""
    return next((what for part, what in what_stays()[0].items() if part in name), None)


def quantize(source: Source, name: str, stays: Callable[[str], str | None] = _stays) -> Source:
    """A checkpoint as if its weights were in fp8 blocks, all matrices but those of which ``stays`` says what they are.

    Its names are the published ones. Raises SettingError for another name than ``fp8-block``, CheckpointError if it is
    quantized already, and PlanError for a model of which it is not known what stays, and for experts in one tensor.
    """
    if name != NAME:
        raise refused("quantize", str(name), f"the form is {NAME}")
    if ADAPTER in source.model.config:
        raise refused("quantize", name, "an adapter keeps its dtypes", advice="give it as you merge the adapter")
    config = source.model.config
    if is_quantized(source):
        raise CheckpointError(f"{source.path} is quantized already", "--dequantize makes BF16 of fp8 first")
    shown_by = what_stays()[1].get(type_of := str(config.get("model_type")))
    if shown_by is None:
        raise PlanError(
            f"no published checkpoint says which weights of '{type_of}' stay as they are in {NAME}",
            f"the types are {', '.join(what_stays()[1])}",
        )
    contents, lost, modules = dict[str, Tensor](), dict[str, NDArray[np.float64]](), list[str]()
    stay, tensors, row = dict.fromkeys(what_stays()[0].values(), 0), tensors_of(source), 0
    rows = sum(-(-tensor.shape[0] // BLOCK) for tensor in tensors.values() if tensor.shape)
    lost_of_all = np.frombuffer(mmap.mmap(-1, 16 * (rows + 1))).reshape(-1, 2)  # also of the processes that compute
    for key, tensor in tensors.items():
        contents[key] = tensor
        if len(tensor.shape) < 2:
            continue
        if (kept := stays(key)) is not None:
            modules.append(key.removesuffix(".weight"))
            stay[kept] = stay.get(kept, 0) + 1
        elif len(tensor.shape) != 2 or not key.endswith(".weight") or tensor.dtype not in CODES:
            what = f"tensor '{key}' ({tensor.dtype}, {list(tensor.shape)})"
            why = "published fp8 checkpoints have a matrix for each expert" if len(tensor.shape) == 3 else "no weight"
            raise PlanError(f"{what} cannot be quantized to {NAME}: {why}")
        else:
            grid = tuple(-(-size // BLOCK) for size in tensor.shape)
            lost[key] = lost_of_all[row : (row := row + grid[0])]
            codes, scales = in_blocks(key, tensor, lost[key])
            contents |= {key: Tensor(PACKED, tensor.shape, codes), f"{key}_scale_inv": Tensor("F32", grid, scales)}
    listed_modules = dict.fromkeys([*modules, "lm_head"])  # a tied one, too
    document = {**config, "quantization_config": {**SETTINGS, "modules_to_not_convert": [*listed_modules]}}
    sides = {**source.side_files, CONFIG: json_bytes(document) + b"\n"}
    beside = {key: f"{key}_scale_inv" for key in lost}
    kept_text = ", ".join(f"{what} ({plural(count, 'tensor')})" for what, count in stay.items() if count)
    note = f"{plural(len(lost), 'weight')} were quantized to fp8 in blocks of {BLOCK} x {BLOCK}"
    note += f"; as in {shown_by}, these stay: {kept_text} and all vectors"

    def error() -> tuple[str, float] | None:
        sums = {name: rows.sum(axis=0) for name, rows in lost.items()}
        errors = [(math.sqrt(squares / total), name) for name, (squares, total) in sums.items() if total]
        return max(errors)[::-1] if errors else None

    store = changed(source, f"{public_name(source.path)} (in {NAME})", contents, sides, beside)
    opened = derived(source, store).noted(note, source.names_of and "names are the published ones")
    return replace(opened, error=error, was_named=None)
