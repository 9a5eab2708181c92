"""The algebra of places: where the elements of an atom lie in the tensors of its holders. Pure: only numbers.

An *atom* is an array of factors. A holder (a rank, a chunk, a live tensor) has of each factor some indices, and each
factor has a stride in the holder's tensor. Joined and interleaved parts, other orders, stacks and views are only other
numbers. A range of a row-major product of n factors (a chunk that ends within a head) is at most 2n - 1 such pieces.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from operator import mul
from typing import NamedTuple

from reshard.formats.notation.axes import Run, segments

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
    """The pieces of an atom on its holders."""

    full: tuple[int, ...]
    """The sizes of the atom's dimensions; indices of a piece beyond them are padding."""
    order: tuple[int, ...]
    """The dimensions as all holders store them, slowest first."""
    pieces: Mapping[int, tuple[Piece, ...]]
    """One or several pieces of each holder."""

    @cached_property
    def value(self) -> tuple[object, ...]:
        """Equal for spreads that are alike, as of the experts of a layer."""
        return self.full, self.order, frozenset(self.pieces.items())


class Position(NamedTuple):
    """The place of a box in a holder's tensor: element ``base`` is the box's first, counted as for pieces. ``strides``
    has one for each dimension of the box.
    """

    holder: int
    base: int
    strides: tuple[int, ...]


class PieceBox(NamedTuple):
    """Elements of an atom, a range of each dimension, that the same pieces have: in ``shape``, at each position."""

    shape: tuple[int, ...]
    sources: tuple[Position, ...]
    targets: tuple[Position, ...]

    @property
    def numel(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)

    def within(self, dim: int, begin: int, length: int) -> PieceBox:
        """A range of a dimension of it."""
        ends = (
            tuple(at._replace(base=at.base + begin * at.strides[dim]) for at in places)
            for places in (self.sources, self.targets)
        )
        return PieceBox((*self.shape[:dim], length, *self.shape[dim + 1 :]), *ends)


class Segment(NamedTuple):
    """A segment of a dimension: indices that lie in the same pieces of both sides, among the pieces chosen so far.

    ``is_data`` is False for padding: zeros that the atom does not have.
    """

    offset: int
    length: int
    sources: frozenset[int]
    targets: frozenset[int]
    is_data: bool = True


class Cuts:
    """The dimensions of an atom, cut wherever a piece of either side begins or ends.

    ``sizes`` has the size of each, ``sources`` and ``targets`` the runs that each piece has of each.
    """

    def __init__(
        self, sizes: Sequence[int], sources: Sequence[Sequence[Runs]], targets: Sequence[Sequence[Runs]]
    ) -> None:
        self._sizes, self._runs = sizes, dict(enumerate(sources)) | {~i: runs for i, runs in enumerate(targets)}
        self._cache: dict[tuple[int, frozenset[int], frozenset[int], bool], tuple[Segment, ...]] = {}
        self.all = Segment(0, 1, frozenset(range(len(sources))), frozenset(range(len(targets))))

    def segments(self, dim: int, within: Segment) -> tuple[Segment, ...]:
        """The segments of a dimension, of the pieces that have a segment of the one before it."""
        key = dim, within.sources, within.targets, within.is_data
        if key not in self._cache:
            size, ids = self._sizes[dim], (*within.sources, *(~i for i in within.targets))
            self._cache[key] = tuple(
                Segment(
                    run.offset, run.length, frozenset(i for i in pieces if i >= 0),
                    frozenset(~i for i in pieces if i < 0), within.is_data and run.offset < size,
                )
                for run, pieces in segments({i: self._runs[i][dim] for i in ids}, (0, size))
            )  # fmt: skip
        return self._cache[key]

    def cells(self, dim: int, within: Segment) -> Iterator[tuple[Segment, ...]]:
        """All boxes of which the same pieces have all elements: a segment of each dimension from ``dim`` on.

        Those that are no padding, and that no target has, are left out.
        """
        if dim == len(self._sizes):
            yield ()
            return
        for segment in self.segments(dim, within):
            if segment.targets or not segment.is_data:
                yield from ((segment, *following) for following in self.cells(dim + 1, segment))


def boxes(source: Spread, target: Spread) -> Iterator[PieceBox]:
    """Cut the target's elements of an atom, without padding, into boxes, in the order of the dimensions.

    All elements of a box lie in the same pieces of the source and in the same pieces of the target. A box without
    sources is nowhere in the source.
    """
    sides = [[(at, piece) for at, pieces in side.pieces.items() for piece in pieces] for side in (source, target)]
    cuts = Cuts(source.full, *([piece.runs for _, piece in pieces] for pieces in sides))
    for cell in cuts.cells(0, cuts.all):
        last = (cuts.all, *cell)[-1]
        if last.is_data and last.targets:
            have, want = (
                tuple(_position(*pieces[i], cell) for i in sorted(ids))
                for pieces, ids in zip(sides, (last.sources, last.targets), strict=True)
            )
            yield PieceBox(tuple(segment.length for segment in cell), have, want)


def _position(holder: int, piece: Piece, cell: Sequence[Segment]) -> Position:
    """Return the place of a box in the tensor of a holder, by one of the holder's pieces."""
    local = (local_index(runs, segment.offset) for runs, segment in zip(piece.runs, cell, strict=True))
    return Position(holder, piece.base + sum(map(mul, local, piece.strides)), piece.strides)


def local_index(runs: Runs, index: int) -> int:
    """The number of indices of runs before an index."""
    return sum(min(max(index - run.offset, 0), run.length) for run in runs)
