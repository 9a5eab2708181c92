"""The position of each byte of a tensor on each rank."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from formats.errors import PlanError
from formats.notation.axes import Run
from reshard.planning.plan import Layout

CHUNK = 2 << 20
"""Bytes of the original that are compared at a time: they fit into the cache, and Python's overhead is small."""

Array = npt.NDArray[Any]
Indices = npt.NDArray[np.intp]


@dataclass(frozen=True, slots=True)
class Piece:
    """Neighbouring indices of a dimension on a rank: from ``start`` in the full tensor, from ``local`` in its part."""

    start: int
    length: int
    local: int
    padding: bool

    @property
    def end(self) -> int:
        """The first index after it."""
        return self.start + self.length


@dataclass(frozen=True)
class Held:
    """A rank's part of a tensor: the pieces of each dimension, and the local shape."""

    pieces: tuple[tuple[Piece, ...], ...]
    shape: tuple[int, ...]


class View:
    """A layout in bytes: the last dimensions, if no rank splits them, are joined into an item of ``item`` bytes.

    ``full``, ``padded`` and each part's shape are in items. A rank without a part has a part without pieces. Chunks are
    cut along dimension ``axis``: the first dimension with at least one index in ``CHUNK`` bytes. Every piece begins and
    ends at a multiple of ``word`` bytes.
    """

    def __init__(self, layout: Layout, bits: int) -> None:
        dims = len(layout.full)
        item_bits = bits
        while dims and self._is_whole(layout, dims - 1) and item_bits * layout.full[dims - 1] <= CHUNK:
            dims -= 1
            item_bits *= layout.full[dims]
        shapes = [layout.full[:dims], layout.padded[:dims]]
        runs: list[tuple[tuple[Run, ...], ...]] = [
            layout.boxes[rank].dims[:dims] if rank in layout.boxes else ((),) * dims for rank in range(layout.ranks)
        ]
        if not dims:  # the tensor is replicated: one dimension of bytes
            whole = (Run(0, item_bits // 8),)
            shapes, runs = (
                [(item_bits // 8,)] * 2,
                [(whole if rank in layout.boxes else (),) for rank in range(layout.ranks)],
            )
            item_bits = 8
        elif item_bits % 8:  # several elements to a byte: the last dimension counts bytes
            shapes = [(*shape[:-1], _whole_bytes(shape[-1] * item_bits, layout)) for shape in shapes]
            scaled = [(*r[:-1], tuple(_scaled(run, item_bits, layout) for run in r[-1])) for r in runs]
            runs, item_bits = scaled, 8
        self.layout, self.bits, self.element, self.item = layout, bits, max(1, bits // 8), item_bits // 8
        self.full, self.padded = shapes
        self.parts = tuple(_part(dims_runs, self.full) for dims_runs in runs)
        _check_all_owned(self)
        self.inner = [self.item * math.prod(self.padded[i + 1 :]) for i in range(len(self.padded))]
        self.axis = next(i for i, nbytes in enumerate(self.inner) if nbytes <= CHUNK or i == len(self.inner) - 1)
        self.rows = max(1, CHUNK // self.inner[self.axis])
        if self.axis == len(self.padded) - 1:  # so that chunks begin at a word
            self.rows = max(8, self.rows // 8 * 8)
        last = [n for part in self.parts for piece in part.pieces[-1] for n in (piece.start, piece.length, piece.local)]
        last += [self.full[-1], *(part.shape[-1] for part in self.parts)]
        self.word = math.gcd(8, *(n * self.item for n in last))

    @staticmethod
    def _is_whole(layout: Layout, dim: int) -> bool:
        size = layout.full[dim]
        return layout.padded[dim] == size and all(box.dims[dim] == (Run(0, size),) for box in layout.boxes.values())

    def in_words(self, content: Array, rows: int, dims: Sequence[int]) -> Array:
        """Bytes as an array of words, in the shape ``(rows, *dims)``; flat if ``dims`` is empty."""
        shape = (rows, *dims[:-1], dims[-1] * self.item // self.word) if dims else (-1,)
        return content.view(f"u{self.word}").reshape(shape)

    def cut(self, spans: Sequence[tuple[int, int]]) -> tuple[slice, ...]:
        """The slices of an array of ``in_words``, given offset and length of each dimension after the rows."""
        if not spans:
            return ()
        *middle, (start, length) = spans
        last = slice(start * self.item // self.word, (start + length) * self.item // self.word)
        return (slice(None), *(slice(offset, offset + size) for offset, size in middle), last)

    @cached_property
    def original_words(self) -> tuple[Indices, ...]:
        """For each rank, the original's word number for each of its words; padding has the number after the last."""
        return tuple(self._original_words(part) for part in self.parts)

    def _original_words(self, part: Held) -> Indices:
        sizes, found = [*self.full[:-1], self.full[-1] * self.item // self.word], np.zeros(1, np.intp)
        inside = np.ones(1, bool)
        for i, (size, pieces) in enumerate(zip(sizes, part.pieces, strict=True)):
            scale = self.item if i == len(sizes) - 1 else self.word
            spans = [(p.start * scale // self.word, p.end * scale // self.word, p.padding) for p in pieces]
            indices = [np.arange(first, last) for first, last, _ in spans]
            known = [np.full(last - first, not padding) for first, last, padding in spans]
            empty = np.zeros(0, np.intp)
            found = (found[:, None] * size + np.concatenate([empty, *indices])).reshape(-1)
            inside = (inside[:, None] & np.concatenate([empty > 0, *known])).reshape(-1)
        return np.where(inside, found, math.prod(sizes))

    def zeroed(self, content: Array) -> Array:
        """The words of the original, with a zero word for padding behind them."""
        words = content.view(f"u{self.word}")
        return np.append(words, words.dtype.type(0))

    def position(self, coordinates: Sequence[int]) -> tuple[int, tuple[int, ...]]:
        """The byte and the index of an element in the padded tensor; the last coordinate counts bytes."""
        byte = 0
        for size, coordinate in zip((*self.padded[:-1], self.padded[-1] * self.item), coordinates, strict=True):
            byte = byte * size + coordinate
        return byte, tuple(int(i) for i in np.unravel_index(byte * 8 // self.bits, self.layout.padded))


def _whole_bytes(bits: int, layout: Layout) -> int:
    if bits % 8:
        raise PlanError(f"the rule '{layout.rule}' cuts through a byte of {layout.full}")
    return bits // 8


def _scaled(run: Run, bits: int, layout: Layout) -> Run:
    return Run(_whole_bytes(run.offset * bits, layout), _whole_bytes(run.length * bits, layout))


def _part(dims: Sequence[Sequence[Run]], full: Sequence[int]) -> Held:
    found = tuple(tuple(pieces(runs, size)) for runs, size in zip(dims, full, strict=True))
    return Held(found, tuple(sum(run.length for run in runs) for runs in dims))


def pieces(runs: Iterable[Run], full: int) -> Iterator[Piece]:
    """Pieces from runs, which are cut at the end of the unpadded dimension."""
    local = 0
    for run in runs:
        inside = max(0, min(run.length, full - run.offset))
        if inside:
            yield Piece(run.offset, inside, local, False)
        if run.length > inside:
            yield Piece(run.offset + inside, run.length - inside, local + inside, True)
        local += run.length


def _check_all_owned(view: View) -> None:
    """Raise PlanError if no rank holds some element: each cell of the grid of all cuts must have an owner."""
    cuts = [
        sorted({0, size, *(n for part in view.parts for piece in part.pieces[i] for n in (piece.start, piece.end))})
        for i, size in enumerate(view.padded)
    ]
    owned: Array = np.zeros([len(c) - 1 for c in cuts], bool)
    for part in view.parts:
        owns = [
            np.isin(c[:-1], [n for piece in pieces for n in c if piece.start <= n < piece.end])
            for c, pieces in zip(cuts, part.pieces, strict=True)
        ]
        owned[np.ix_(*owns)] = True
    if not owned.all():
        raise PlanError(f"no rank holds some elements of a tensor with the rule '{view.layout.rule}'")


def flat_index(indices: Sequence[int], sizes: Sequence[int]) -> int:
    """The row-major position of an index, over as many first dimensions as it has."""
    flat = 0
    for index, size in zip(indices, sizes, strict=False):
        flat = flat * size + index
    return flat
