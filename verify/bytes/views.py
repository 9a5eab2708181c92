"""In which pieces a tensor of the original is read and compared: chunk by chunk, with each holder's part of the chunk.

A *chunk* is a range of the tensor's elements, padding included. A *holder* is a rank, or a file with chunks. A *part*
is the holder's elements of the tensor, in one of its own tensors. A chunk takes blocks (``atoms.py``) of each part,
which lie in one range of the holder's bytes. Each byte of the original is read once. Each byte of a holder is read once
too, if a chunk's elements fill their range; if they do not, as in a transposed matrix, several chunks *share* the
range.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from formats.notation.axes import Run
from verify.bytes.atoms import Block, ranges_between, strided

CHUNK = 2 << 20
"""Bytes of the original that are compared at a time: they fit into the cache, and Python's overhead is small."""

WIDER = 8
"""So many times as many, if each chunk has some bytes of a long range of a holder."""

WINDOW = 4 << 20
"""So many bytes of such a range are compared at a time."""

Array = npt.NDArray[Any]
Indices = npt.NDArray[np.intp]


class Part(NamedTuple):
    """A holder's part of a tensor: its blocks, and what is stored in place of the original's elements.

    ``number`` is that of the stored tensor within the view, ``holder`` that of the rank or file. ``bits`` are those of
    a stored element; ``is_same`` says that it is the original's own. ``zero`` says that the holder has zeros there,
    ``stated`` which shape of a weight it states instead of the original's.
    """

    number: int
    holder: int
    blocks: tuple[Block, ...]
    bits: int
    is_same: bool = True
    zero: bool = False
    stated: tuple[int, ...] | None = None


class Chunk(NamedTuple):
    """The indices ``begin`` to ``end`` along the view's axis; ``outer`` has one index of each dimension before it."""

    outer: tuple[int, ...]
    begin: int
    end: int


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

    ``repeats`` says how often an index of each dimension is repeated, if the original has fewer elements. Chunks are
    cut along dimension ``axis``: the first of which at least one index has ``CHUNK`` bytes or less. ``shared`` are the
    parts in which several chunks have bytes of the same range.
    """

    def __init__(
        self, shape: tuple[int, ...], padded: tuple[int, ...], bits: int, parts: Sequence[Part],
        repeats: tuple[int, ...] | None = None,
    ) -> None:  # fmt: skip
        self.shape, self.bits, self.repeats = shape, bits, repeats
        ends = [np.array([*_ends(block)], np.intp) for part in parts for block in part.blocks]
        reached = np.max(ends, axis=0, initial=0).tolist() if ends and shape else [0] * len(shape)
        self.padded = tuple(max(sizes) for sizes in zip(shape, padded, reached, strict=True))
        self.parts = tuple(parts)
        inner = [math.prod(self.padded[dim + 1 :]) * bits for dim in range(len(shape))]
        small = (dim for dim, size in enumerate(inner) if size <= 8 * CHUNK)
        self.axis = next(small, len(shape) - 1) if shape else 0
        self.rows = max(1, 8 * CHUNK // inner[self.axis]) if shape and inner[self.axis] else 1
        if self.axis == len(shape) - 1:  # so that chunks begin at a word
            self.rows = max(8, self.rows // 8 * 8)
        if repeats is not None and shape:  # and at an element of the original
            self.rows = -(-self.rows // repeats[self.axis]) * repeats[self.axis]
        self._reads_of_all: list[Read] | None = None
        if len(few := [*itertools.islice(self.chunks(), 2)]) == 1:  # many tensors may be that small, and alike
            self._reads_of_all = [*self.reads(few[0])]
        all_reads = (read for chunk in self.chunks() for read in self.reads(chunk))
        self.shared = frozenset(read.part for read in all_reads if read.elements != read.end - read.begin)
        self.rows *= WIDER if self.shared else 1

    def chunks(self) -> Iterator[Chunk]:
        """All chunks, in the order of the tensor's elements."""
        if not self.shape:
            yield Chunk((), 0, 1)
            return
        for outer in itertools.product(*map(range, self.padded[: self.axis])):
            for begin in range(0, self.padded[self.axis], self.rows):
                yield Chunk(outer, begin, min(begin + self.rows, self.padded[self.axis]))

    def of_original(self, chunk: Chunk) -> Run:
        """The elements of the original in a chunk; none, if it is only padding."""
        if not self.shape:
            return Run(0, 1)
        end = min(chunk.end, self.shape[self.axis])
        if end <= chunk.begin or any(i >= n for i, n in zip(chunk.outer, self.shape, strict=False)):
            return Run(0, 0)
        row = math.prod(self.shape[self.axis + 1 :])
        begin = flat_index(chunk.outer, self.shape) * self.shape[self.axis] + chunk.begin
        return Run(begin * row, (end - chunk.begin) * row)

    def reads(self, chunk: Chunk) -> Iterator[Read]:
        """What a chunk takes of each part that has any of its elements."""
        if self._reads_of_all is not None:
            yield from self._reads_of_all
            return
        first = flat_index(chunk.outer, self.padded)
        if self.shape:
            inner = math.prod(self.padded[self.axis + 1 :])
            first = (first * self.padded[self.axis] + chunk.begin) * inner
            last = first + (chunk.end - chunk.begin) * inner
        else:
            last = first + 1
        for number, (part, (begins, ends)) in enumerate(zip(self.parts, self._reaches, strict=True)):
            near = np.flatnonzero((begins < last) & (ends > first)).tolist()
            blocks = tuple(block for i in near for block in self._within(part.blocks[i], chunk))
            if blocks:
                begin, end = min(block.shard for block in blocks), max(map(end_of, blocks))
                yield Read(number, begin, end, sum(math.prod(block.shape) for block in blocks), blocks)

    @cached_property
    def _reaches(self) -> list[tuple[Indices, Indices]]:
        """Between which positions in the padded tensor the blocks of each part lie."""
        return [
            (
                np.array([flat_index(block.first, self.padded) for block in part.blocks], np.intp),
                np.array([flat_index([end - 1 for end in _ends(block)], self.padded) + 1 for block in part.blocks]),
            )
            for part in self.parts
        ]

    def _within(self, block: Block, chunk: Chunk) -> Iterator[Block]:
        """The blocks that a chunk has of a block: a range of each factor."""
        options = []
        bounds = [*((i, i + 1) for i in chunk.outer), *([(chunk.begin, chunk.end)] if self.shape else [])]
        factors: list[int] = []
        for dim, (begin, end) in enumerate(bounds):
            in_dim = [factor for factor, (of, _) in enumerate(block.along) if of == dim]
            in_dim.sort(key=lambda factor: -block.along[factor][1])
            steps = [(block.shape[factor], block.along[factor][1]) for factor in in_dim]
            options.append([*ranges_between(steps, begin - block.first[dim], end - block.first[dim])])
            factors += in_dim
        for chosen in itertools.product(*options):
            runs = [Run(0, length) for length in block.shape]
            for factor, run in zip(factors, itertools.chain(*chosen), strict=True):
                runs[factor] = run
            yield _cut(block, runs)


def _cut(block: Block, runs: Sequence[Run]) -> Block:
    """A block of these ranges of a block's factors."""
    if all(run.length == length for run, length in zip(runs, block.shape, strict=True)):
        return block
    first, starts = [*block.first], [run.offset for run in runs]
    for start, (dim, step) in zip(starts, block.along, strict=True):
        first[dim] += start * step
    original = block.original
    if original is not None:
        original += sum(start * step for start, step in zip(starts, block.original_strides, strict=True))
    shard = block.shard + sum(start * step for start, step in zip(starts, block.shard_strides, strict=True))
    return replace(block, shape=tuple(run.length for run in runs), shard=shard, original=original, first=tuple(first))


def tiles(block: Block, bits: int) -> Iterator[Block]:
    """A block cut into blocks that each lie within ``WINDOW`` bytes of the holder's tensor."""
    limits = [*block.shape]
    while limits and max(of := [(n - 1) * step for n, step in zip(limits, block.shard_strides, strict=True)]) > 0:
        if sum(of) * bits <= 8 * WINDOW:
            break
        dim = of.index(max(of))
        limits[dim] = -(-limits[dim] // 2)
    ranges = (range(0, length, limit) for length, limit in zip(block.shape, limits, strict=True))
    for begins in itertools.product(*ranges):
        extents = zip(begins, limits, block.shape, strict=True)
        yield _cut(block, [Run(begin, min(limit, length - begin)) for begin, limit, length in extents])


def end_of(block: Block) -> int:
    """The element of the holder's tensor behind a block's last."""
    return 1 + block.shard + sum((n - 1) * step for n, step in zip(block.shape, block.shard_strides, strict=True))


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
    of = strided(0, shape, first, strides, bits)
    return np.ndarray(of.shape, f"<u{of.item}", data.data, of.begin - begin * bits // 8, of.steps)


def flat_index(indices: Sequence[int], sizes: Sequence[int]) -> int:
    """The row-major position of an index, over as many first dimensions as it has."""
    flat = 0
    for index, size in zip(indices, sizes, strict=False):
        flat = flat * size + index
    return flat
