"""Compares scales with smaller scale blocks (``--refine-blocks``) with the original's scales."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from formats.files.safetensors import DTYPE_BITS, TensorInfo
from reshard.planning.plan import Layout
from verify.bytes.reading import Files


def refined(info: TensorInfo, original: Layout, finer: Layout, files: Files) -> NDArray[np.uint8]:
    """The original's scales, each repeated for every smaller scale block in it.

    Returns ``finer.full`` scales, with the bytes of a scale as the last dimension.
    """
    item = DTYPE_BITS[info.dtype] // 8
    scales = files.read(info.file, info.offset, info.nbytes).reshape(*info.shape, item)
    for axis, (old, new) in enumerate(zip(original.rule.dims, finer.rule.dims, strict=True)):
        scales = np.repeat(scales, old.step // new.step, axis=axis)
    return scales[tuple(slice(0, size) for size in finer.full)]


def differing(
    info: TensorInfo, expected: NDArray[np.uint8], finer: Layout, rank: int, files: Files
) -> Iterator[tuple[int, ...]]:
    """The index of each wrong scale of a shard, in the rank's own part."""
    runs = finer.boxes[rank].dims
    owned = [np.concatenate([np.arange(run.offset, run.end) for run in dim]) for dim in runs]
    wanted = expected[np.ix_(*owned)]
    found = files.read(info.file, info.offset, info.nbytes).reshape(wanted.shape)
    yield from map(tuple, np.argwhere((found != wanted).any(axis=-1)))
