"""In which pieces a tensor of the original is read and compared: chunk by chunk, with each holder's part of the chunk.

A *chunk* is a range of the tensor's elements as they are stored, padding included. A *holder* is a rank, or a file with
chunks. A *part* is the holder's elements of the tensor, in one of its own tensors. A chunk takes blocks (``atoms.py``)
of each part, which lie in one range of the holder's bytes. Each byte of the original is read once. Each byte of a
holder is read once too, if a chunk's elements fill their range; if they do not, as in a transposed matrix, several
chunks *share* the range.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from formats.notation.axes import Run
from reshard.placement.geometry import row_major
from verify.bytes.atoms import Block, dot, ranges_between, strided

CHUNK = 2 << 20
"""Bytes of the original that are compared at a time: they fit into the cache, and Python's overhead is small."""

WIDER = 8
"""So many times as many, if each chunk has some bytes of a long range of a holder."""

WINDOW = 4 << 20
"""So many bytes of such a range are compared at a time."""

Array = npt.NDArray[Any]


class Part(NamedTuple):
    """A holder's part of a tensor: its blocks, and what is stored in place of the original's elements.

    ``number`` is that of the stored tensor within the view, ``holder`` that of the rank or file. ``bits`` are those of
    a stored element. ``zero`` says that the holder has zeros there, ``stated`` which shape of a weight it states
    instead of the original's.
    """

    number: int
    holder: int
    blocks: tuple[Block, ...]
    bits: int
    zero: bool = False
    stated: tuple[int, ...] | None = None


class Read(NamedTuple):
    """What a chunk takes of a part: blocks within the elements ``begin`` to ``end`` of the holder's tensor.

    ``elements`` is the number of elements in the blocks. If it is less than ``end - begin``, other elements lie between
    them.
    """

    part: int
    begin: int
    end: int
    elements: int
    blocks: tuple[Block, ...]


class View:
    """The parts of a tensor of this shape, padded shape and bits of an element; tensors that are alike share a view.

    ``repeats`` says how often an index of each dimension is repeated, if the original has fewer elements. ``shared``
    are the parts in which several chunks have bytes of the same range.
    """

    def __init__(
        self, shape: tuple[int, ...], padded: tuple[int, ...], bits: int, parts: Sequence[Part],
        repeats: tuple[int, ...] | None = None,
    ) -> None:  # fmt: skip
        self.shape, self.parts, self.repeats = shape, tuple(parts), repeats
        ends = (_ends(block) for part in parts for block in part.blocks)
        self.padded = tuple(max(sizes) for sizes in zip(shape, padded, *ends, strict=True))
        self._rows, self._size = row_major(self.padded, 1), math.prod(self.padded)
        self._reaches = [[*map(self._reach, part.blocks)] for part in parts]
        # Chunks are whole rows of the first dimension of which a row is small enough, and end with that dimension: the
        # next element may lie elsewhere. They begin at a word if rows are short. What is repeated is small: one chunk.
        most = 8 * CHUNK // bits
        rows = ((row, n * row) for row, n in zip(self._rows, self.padded, strict=True) if 0 < row <= most)
        row, self._whole = next(rows, (1, math.prod(self.padded[-1:])))
        self._step = max(8, row, most // max(8, row) * max(8, row))
        if repeats is not None:
            self._whole = self._step = self._size
        self._reads_of_all: list[Read] | None = None
        if len(few := [*itertools.islice(self.chunks(), 2)]) == 1:  # many tensors may be that small, and alike
            self._reads_of_all = [*self.reads(few[0])]
        all_reads = (read for chunk in self.chunks() for read in self.reads(chunk))
        self.shared = frozenset(read.part for read in all_reads if read.elements != read.end - read.begin)
        self._step *= WIDER if self.shared else 1

    def chunks(self) -> Iterator[Run]:
        """All chunks, as ranges of the positions in the padded tensor."""
        for first in range(0, self._size, self._whole or 1):
            for begin in range(first, first + self._whole, self._step):
                yield Run(begin, min(self._step, first + self._whole - begin))

    def of_original(self, chunk: Run) -> Run:
        """The elements of the original in a chunk; none, if it is only padding."""
        begin, end = self._without_padding(chunk.offset), self._without_padding(chunk.end)
        return Run(begin, end - begin)

    def _without_padding(self, position: int) -> int:
        """The number of the original's elements before a position in the padded tensor."""
        count = 0
        for size, row, own_row in zip(self.shape, self._rows, row_major(self.shape, 1), strict=True):
            index, position = divmod(position, row)
            if index >= size:
                return count + size * own_row
            count += index * own_row
        return count + position

    def reads(self, chunk: Run) -> Iterator[Read]:
        """What a chunk takes of each part that has any of its elements."""
        if self._reads_of_all is not None:
            yield from self._reads_of_all
            return
        for number, (part, reaches) in enumerate(zip(self.parts, self._reaches, strict=True)):
            near = (block for block, (begin, end) in zip(part.blocks, reaches, strict=True)
                    if begin < chunk.end and end > chunk.offset)  # fmt: skip
            blocks = tuple(inside for block in near for inside in self._within(block, chunk))
            if blocks:
                begin, end = min(block.shard for block in blocks), max(map(end_of, blocks))
                yield Read(number, begin, end, sum(math.prod(block.shape) for block in blocks), blocks)

    def positions(self, block: Block) -> tuple[int, tuple[int, ...]]:
        """The position of a block's first element in the padded tensor, and the steps along its factors there."""
        return dot(block.first, self._rows), tuple(step * self._rows[dim] for dim, step in block.along)

    def _reach(self, block: Block) -> tuple[int, int]:
        """Between which positions a block lies."""
        first, steps = self.positions(block)
        return first, first + dot((n - 1 for n in block.shape), steps) + 1

    def _within(self, block: Block, chunk: Run) -> Iterator[Block]:
        """The blocks that a chunk has of a block: a range of each factor."""
        first, steps = self.positions(block)
        order = sorted(range(len(steps)), key=lambda factor: -steps[factor])
        factors = [(block.shape[factor], steps[factor]) for factor in order]
        for chosen in ranges_between(factors, chunk.offset - first, chunk.end - first):
            runs = dict(zip(order, chosen, strict=True))
            yield _cut(block, [runs[factor] for factor in range(len(steps))])


def _cut(block: Block, runs: Sequence[Run]) -> Block:
    """A block of these ranges of a block's factors."""
    if all(run.length == length for run, length in zip(runs, block.shape, strict=True)):
        return block
    first, starts = [*block.first], [run.offset for run in runs]
    for start, (dim, step) in zip(starts, block.along, strict=True):
        first[dim] += start * step
    original = None if block.original is None else block.original + dot(starts, block.original_strides)
    shard, shape = block.shard + dot(starts, block.shard_strides), tuple(run.length for run in runs)
    return replace(block, shape=shape, shard=shard, original=original, first=tuple(first))


def tiles(block: Block, bits: int) -> Iterator[Block]:
    """A block cut into blocks that each lie within ``WINDOW`` bytes of the holder's tensor."""
    limits = [*block.shape]
    while limits and max(spans := [(n - 1) * step for n, step in zip(limits, block.shard_strides, strict=True)]) > 0:
        if sum(spans) * bits <= 8 * WINDOW:
            break
        dim = spans.index(max(spans))
        limits[dim] = -(-limits[dim] // 2)
    ranges = (range(0, length, limit) for length, limit in zip(block.shape, limits, strict=True))
    for begins in itertools.product(*ranges):
        extents = zip(begins, limits, block.shape, strict=True)
        yield _cut(block, [Run(begin, min(limit, length - begin)) for begin, limit, length in extents])


def end_of(block: Block) -> int:
    """The element of the holder's tensor behind a block's last."""
    return 1 + block.shard + dot((n - 1 for n in block.shape), block.shard_strides)


def _ends(block: Block) -> list[int]:
    """The index behind a block's last element, along each dimension of the padded tensor."""
    ends = [start + 1 for start in block.first]
    for length, (dim, step) in zip(block.shape, block.along, strict=True):
        ends[dim] += (length - 1) * step
    return ends


def array(data: Array, begin: int, shape: tuple[int, ...], first: int, strides: Sequence[int], bits: int) -> Array:
    """Elements as unsigned integers, from bytes that begin with the element ``begin``; whole bytes if a byte has
    several elements.
    """
    view = strided(0, shape, first, strides, bits)
    return np.ndarray(view.shape, f"<u{view.item}", data.data, view.begin - begin * bits // 8, view.steps)
