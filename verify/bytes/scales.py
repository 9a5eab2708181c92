"""Compares scales with smaller scale blocks (``--refine-blocks``) with the original's scales."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from formats.files.safetensors import DTYPE_BITS, TensorInfo
from reshard.planning.plan import Layout
from verify.bytes.stated_shapes import Statements


def refined(info: TensorInfo, original: Layout, finer: Layout) -> NDArray[np.uint8]:
    """The original's scales, each repeated for every smaller scale block in it.

    Returns ``finer.full`` scales, with the bytes of a scale as the last dimension.
    """
    item = DTYPE_BITS[info.dtype] // 8
    scales = _read(info).reshape(*info.shape, item)
    for axis, (old, new) in enumerate(zip(original.rule.dims, finer.rule.dims, strict=True)):
        scales = np.repeat(scales, old.step // new.step, axis=axis)
    return scales[tuple(slice(0, size) for size in finer.full)]


def differing(info: TensorInfo, expected: NDArray[np.uint8], finer: Layout, rank: int) -> Iterator[tuple[int, ...]]:
    """The index of each wrong scale of a shard, in the rank's own part."""
    runs = finer.boxes[rank].dims
    owned = [np.concatenate([np.arange(run.offset, run.end) for run in dim]) for dim in runs]
    wanted = expected[np.ix_(*owned)]
    found = _read(info).reshape(wanted.shape)
    yield from map(tuple, np.argwhere((found != wanted).any(axis=-1)))


def _read(info: TensorInfo) -> NDArray[np.uint8]:
    """All bytes of a tensor. Raises CheckpointError if the file cannot be read."""
    with Statements() as statements:
        return np.frombuffer(statements.read(info), dtype=np.uint8)
