"""The algebra of places: where the elements of an atom lie in the tensors of its holders. Pure: only numbers.

An *atom* is an array of factors. A holder (a rank, a chunk, a live tensor) has of each factor some indices, and each
factor has a stride in the holder's tensor. Joined and interleaved parts, other orders, stacks and views are only other
numbers. A range of a row-major product of n factors (a chunk that ends within a head) is at most 2n - 1 such pieces.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from typing import NamedTuple

from formats.notation.axes import Run, segments

Runs = tuple[Run, ...]


class Piece(NamedTuple):
    """A part of an atom in a holder's tensor.

    ``runs`` has the indices of each dimension. The piece counts them from 0: of the runs 2 to 4 and 8 to 9 it has 0, 1
    and 2. The element at these local indices ``i`` is number ``base + sum(i * strides)`` of the holder's tensor.
    """

    runs: tuple[Runs, ...]
    strides: tuple[int, ...]
    base: int

    @property
    def shape(self) -> tuple[int, ...]:
        """The number of indices of each dimension."""
        return tuple(sum(run.length for run in runs) for runs in self.runs)


@dataclass(frozen=True, eq=False)
class Spread:
    """How an atom is spread over holders.

    It has ``full`` indices of each dimension; what pieces have behind them is padding. ``order`` has the dimensions as
    they are stored, slowest first; it is the same for all holders. ``pieces`` has what each holder has: one or several.
    """

    full: tuple[int, ...]
    order: tuple[int, ...]
    pieces: Mapping[int, tuple[Piece, ...]]

    @cached_property
    def value(self) -> tuple[object, ...]:
        """Equal for spreads that are alike, as of the experts of a layer."""
        return self.full, self.order, frozenset(self.pieces.items())


class Position(NamedTuple):
    """Where a holder has the elements of a box: the first is number ``base`` of its tensor, in counting from where
    pieces do; of each dimension of the box the stride.
    """

    holder: int
    base: int
    strides: tuple[int, ...]


class Box(NamedTuple):
    """Elements of an atom, a range of each dimension, that the same pieces have: in ``shape``, at each position."""

    shape: tuple[int, ...]
    sources: tuple[Position, ...]
    targets: tuple[Position, ...]

    @property
    def numel(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)

    def within(self, dim: int, begin: int, length: int) -> Box:
        """A range of a dimension of it."""
        ends = (
            tuple(at._replace(base=at.base + begin * at.strides[dim]) for at in places)
            for places in (self.sources, self.targets)
        )
        return Box((*self.shape[:dim], length, *self.shape[dim + 1 :]), *ends)


def boxes(source: Spread, target: Spread) -> Iterator[Box]:
    """What the target's pieces have of an atom, but for padding, in boxes of which the same pieces of both sides have
    all elements, in the order of its dimensions. A box without sources is nowhere in the source.
    """
    sides = [
        [(holder, piece) for holder, pieces in side.pieces.items() for piece in pieces] for side in (source, target)
    ]
    pieces, first = [*sides[0], *sides[1]], len(sides[0])

    @cache
    def ranges(dim: int, within: frozenset[int]) -> list[tuple[Run, frozenset[int]]]:
        cut = segments({i: pieces[i][1].runs[dim] for i in within}, (0, source.full[dim]))
        return [(run, ids) for run, ids in cut if run.offset < source.full[dim] and max(ids, default=-1) >= first]

    def products(within: frozenset[int], *runs: Run) -> Iterator[tuple[tuple[Run, ...], frozenset[int]]]:
        if len(runs) == len(source.full):
            yield runs, within
            return
        for run, ids in ranges(len(runs), within):
            yield from products(ids, *runs, run)

    def position(number: int, runs: tuple[Run, ...]) -> Position:
        holder, piece = pieces[number]
        local = (_local(dim, run.offset) for dim, run in zip(piece.runs, runs, strict=True))
        base = piece.base + sum(at * stride for at, stride in zip(local, piece.strides, strict=True))
        return Position(holder, base, piece.strides)

    for runs, within in products(frozenset(range(len(pieces)))) if sides[1] else ():
        have, want = (
            tuple(position(i, runs) for i in sorted(within) if (i < first) == is_source) for is_source in (True, False)
        )
        yield Box(tuple(run.length for run in runs), have, want)


def _local(runs: Runs, index: int) -> int:
    """The number of indices of runs before an index."""
    return sum(min(max(index - run.offset, 0), run.length) for run in runs)
