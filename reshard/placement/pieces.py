"""The algebra of places: where the elements of an atom lie in the tensors of its holders. Pure: only numbers.

An *atom* is an array of factors. A holder (a rank, a chunk, a live tensor) has of each factor some indices, and each
factor has a stride in the holder's tensor. Joined and interleaved parts, other orders, stacks and views are only other
numbers. A range of a row-major product of n factors (a chunk that ends within a head) is at most 2n - 1 such pieces.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import NamedTuple

from formats.notation.axes import Run, product_boxes, product_runs, segments

Runs = tuple[Run, ...]

Blocks = tuple[tuple[int, ...], ...]
"""Factors of an atom, by their numbers; those of one block are one dimension, slowest first."""


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


def common_blocks(source: Sequence[int], target: Sequence[int], starts: Collection[int]) -> Blocks:
    """Factors that follow each other in both orders, together; each of ``starts`` begins a block of its own."""
    after = {factor: place for place, factor in enumerate(target)}
    blocks: list[tuple[int, ...]] = []
    for factor in source:
        is_next = blocks and after[blocks[-1][-1]] + 1 == after[factor]
        if is_next and factor not in starts:
            blocks[-1] += (factor,)
        else:
            blocks.append((factor,))
    return tuple(blocks)


def over_blocks(piece: Piece, groups: Blocks, blocks: Blocks, sizes: Sequence[int]) -> Iterator[Piece]:
    """A piece whose dimensions are ``groups`` of factors, with ``blocks`` of them as dimensions: one piece, or several.

    A group has several blocks, or a block several groups, which then lie in one row-major piece. ``groups`` are in the
    stored order; ``sizes`` has the padded size of each factor.
    """
    number = {block[0]: place for place, block in enumerate(blocks)}
    position = {factor: place for place, factor in enumerate(itertools.chain(*groups))}
    waiting = sorted(blocks, key=lambda block: position[block[0]])
    parts: list[list[tuple[int, list[tuple[int, Runs, int]]]]] = []  # of each step: base, and what each block has
    place = 0
    while place < len(groups):
        first, block = place, waiting.pop(0)
        place += 1
        if len(block) >= len(groups[first]):
            while sum(map(len, groups[first:place])) < len(block):
                place += 1
            factors = [(piece.runs[i], math.prod(sizes[f] for f in groups[i])) for i in range(first, place)]
            runs = tuple(product_runs(factors)) if place - first > 1 else piece.runs[first]
            parts.append([(0, [(number[block[0]], runs, piece.strides[place - 1])])])
            continue
        inside = [block]
        while sum(map(len, inside)) < len(groups[first]):
            inside.append(waiting.pop(0))
        lengths, stride, (run,) = (
            [math.prod(sizes[f] for f in factors) for factors in inside],
            piece.strides[first],
            piece.runs[first],
        )
        inner = [math.prod(lengths[i + 1 :]) * stride for i in range(len(lengths))]
        parts.append([
            (
                sum(one.offset * step for one, step in zip(box, inner, strict=True)) - run.offset * stride,
                [(number[factors[0]], (one,), step) for factors, one, step in zip(inside, box, inner, strict=True)],
            )
            for box in product_boxes(run.offset, run.length, lengths)
        ])  # fmt: skip
    for chosen in itertools.product(*parts):
        dims = sorted(itertools.chain(*(dims for _, dims in chosen)))
        base = piece.base + sum(base for base, _ in chosen)
        yield Piece(tuple(runs for _, runs, _ in dims), tuple(stride for _, _, stride in dims), base)
