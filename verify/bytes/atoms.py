"""Where the elements of a stored tensor come from: blocks of elements, with their strides there and in the original.

The placement (``reshard.placement.geometry``) is taken as data: which pieces of an atom a rank or a chunk has, with a
stride along each factor. With the place of these factors in the original's tensor they are *blocks*: elements with one
stride along each factor on both sides. The engine that moved them is not asked.
"""

from __future__ import annotations

import itertools
import math
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from formats.errors import PlanError
from formats.notation.axes import Run
from formats.notation.components import components
from reshard.mesh.plan import Layout, Plan
from reshard.model.model import Kind, Model
from reshard.placement.arrangement import Arrangement
from reshard.placement.geometry import Geometry
from reshard.placement.pieces import Piece as Place
from reshard.placement.portions import Portion, rule_of
from reshard.placement.stored import Atom, Stored


@dataclass(frozen=True, slots=True)
class Piece:
    """Neighbouring indices of a factor on a rank: they begin at ``start`` in the full tensor, at ``local`` in the
    rank's part.
    """

    start: int
    length: int
    local: int
    padding: bool

    @property
    def end(self) -> int:
        """The first index after it."""
        return self.start + self.length


def pieces(runs: Iterable[Run], full: int) -> Iterator[Piece]:
    """Pieces from runs, cut at the end of the unpadded dimension."""
    local = 0
    for run in runs:
        inside = max(0, min(run.length, full - run.offset))
        if inside:
            yield Piece(run.offset, inside, local, False)
        if run.length > inside:
            yield Piece(run.offset + inside, run.length - inside, local + inside, True)
        local += run.length


@dataclass(frozen=True)
class Block:
    """Elements of an atom, a dimension for each of its factors in the order in which the program stores them.

    ``shard`` is the first element in the rank's tensor and ``shard_strides`` the steps there, ``original`` and
    ``original_strides`` those in the original's tensor; all count elements. If an atom is one index of a tensor's first
    dimension, they count from that index on. ``original`` is None for padding. ``first`` is the index of the first
    element in the padded tensor, and a step along a factor moves ``step`` along dimension ``dim`` there.
    """

    shape: tuple[int, ...]
    shard: int
    shard_strides: tuple[int, ...]
    original: int | None
    original_strides: tuple[int, ...]
    first: tuple[int, ...]
    along: tuple[tuple[int, int], ...]

    def of_index(self, index: int, elements: int) -> Block:
        """The same block, counted in the whole tensor: the atom is this index of its first dimension, of so many
        elements each.
        """
        original = None if self.original is None else self.original + index * elements
        return replace(self, original=original, first=(self.first[0] + index, *self.first[1:]))


@dataclass(frozen=True)
class Part:
    """What a rank has of a stored tensor: its shape, and the blocks of each atom (None: it has nothing of it)."""

    shape: tuple[int, ...]
    atoms: tuple[tuple[Block, ...] | None, ...]


@dataclass(frozen=True)
class Spread:
    """Where the factors of an atom lie in a tensor of this shape.

    ``along`` has, for each factor, its dimension and how far one step of the factor moves there. ``first`` says where
    the atom begins in each dimension.
    """

    shape: tuple[int, ...]
    along: tuple[tuple[int, int], ...]
    first: tuple[int, ...]


class Spreads(NamedTuple):
    """Where the factors of an atom lie in the original's tensor, and in the padded one."""

    full: Spread
    padded: Spread


def spreads_of(plan: Plan, kind: Kind, portion: Portion) -> Spreads:
    """Where the factors of a portion's atoms lie in tensors of a kind."""
    sizes = plan.model.sizes.of(dict(kind.indices))
    full = replace(_spread(plan.model, kind, portion, sizes), shape=kind.shape)
    padded = {axis: size for axis, size in plan.padding.items() if axis in sizes}
    return Spreads(full, _spread(plan.model, kind, portion, {**sizes, **padded}) if padded else full)


def _spread(model: Model, kind: Kind, portion: Portion, sizes: Mapping[str, int]) -> Spread:
    component, shift = portion.component, int(portion.component.index is not None)
    rule = rule_of(model, kind)
    lengths = component.shape.sizes(sizes)
    first = [0] * (len(component.counts) + shift)
    joined = 1
    if component.label is not None:
        parts = components(rule)
        number = [part.label for part in parts].index(component.label)
        extents = [math.prod(part.shape.sizes(sizes)[p] for p in part.of_dim(part.dim)[part.lead :]) for part in parts]
        joined, first[component.dim + shift] = sum(extents), sum(extents[:number])
    along = [(0, 0)] * len(lengths)
    for dim in range(len(component.counts)):
        step, places = 1, component.of_dim(dim)
        for number, place in reversed([*enumerate(places)]):
            if component.label is not None and dim == component.dim and number == component.lead - 1:
                step = joined
            along[place] = dim + shift, step
            step *= lengths[place]
    return Spread(rule.sizes(sizes), tuple(along), tuple(first))


class Parts:
    """What each rank has of each stored tensor; those of equal layouts are computed once."""

    def __init__(self, arrangement: Arrangement) -> None:
        self._plan = arrangement.plan
        self._kinds = {tensor.name: tensor.kind for tensor in arrangement.plan.model.tensors}
        self._cache: dict[tuple[Geometry, int], Part | None] = {}
        self._lock = threading.Lock()

    def of(self, stored: Stored, holder: int) -> Part | None:
        """What a rank, or a file with chunks, has of a stored tensor, or None.

        Raises PlanError where an atom has other dimensions than factors.
        """
        key = stored.geometry, holder
        with self._lock:
            if key not in self._cache:
                self._cache[key] = self._part(stored, holder)
            return self._cache[key]

    def _part(self, stored: Stored, holder: int) -> Part | None:
        geometry = stored.geometry
        shape = geometry.shape(holder)
        if shape is None:
            return None
        kinds = [self._kinds[atom.tensor] for atom in stored.atoms[: len(geometry.portions)]]
        of = [(p, spreads_of(self._plan, kind, p)) for kind, p in zip(kinds, geometry.portions, strict=True)]
        atoms: list[tuple[Block, ...] | None] = [None] * len(geometry.layouts)
        for number in geometry.numbers(holder):
            layout, (portion, spreads) = geometry.layouts[number], of[number % len(of)]
            if len(layout.full) != len(portion.order):
                raise PlanError(f"'{layout.rule}' has other dimensions than factors")
            factors = tuple((factor,) for factor in range(len(layout.full)))
            pieces, first = geometry.spread(number, factors).pieces.get(holder), geometry.first(holder, number)
            blocks = (block for p in pieces or () for block in _blocks(p, first, layout, portion, spreads))
            atoms[number] = tuple(blocks) if pieces else None
        return Part(shape, tuple(atoms))

    def kind(self, atom: Atom) -> Kind:
        """The kind of an atom's tensor."""
        return self._kinds[atom.tensor]


def check_all_owned(layout: Layout) -> None:
    """Raise PlanError if no rank holds some element: each cell of the grid of all cuts must have an owner."""
    boxes = (zip(box.dims, layout.full, strict=True) for box in layout.boxes.values())
    owned = [[list(pieces(runs, size)) for runs, size in dims] for dims in boxes]
    cuts = [
        sorted({0, size, *(n for dims in owned for piece in dims[i] for n in (piece.start, piece.end))})
        for i, size in enumerate(layout.full)
    ]
    covered: NDArray[np.bool_] = np.zeros([len(of) - 1 for of in cuts], bool)
    for dims in owned:
        owns = [
            np.isin(of[:-1], [n for piece in owned_pieces for n in of if piece.start <= n < piece.end])
            for of, owned_pieces in zip(cuts, dims, strict=True)
        ]
        covered[np.ix_(*owns)] = True
    inside = tuple(slice(0, of.index(size)) for of, size in zip(cuts, layout.full, strict=True))
    if not covered[inside].all():
        raise PlanError(f"no rank holds some elements of a tensor with the rule '{layout.rule}'")


def _blocks(piece: Place, first: int, layout: Layout, portion: Portion, spreads: Spreads) -> Iterator[Block]:
    """The blocks of a piece, which counts from element ``first`` on: one for each run of each factor, without and with
    padding.
    """
    full, padded = spreads
    steps = [math.prod(full.shape[place + 1 :]) for place in range(len(full.shape))]
    along, along_padded = ([spread.along[place] for place in portion.order] for spread in spreads)
    strides = tuple(piece.strides[factor] for factor in portion.order)
    owned = [[*pieces(piece.runs[factor], layout.full[factor])] for factor in portion.order]
    for chosen in itertools.product(*owned):
        at, index = [*full.first], [*padded.first]
        for part, (dim, step), (dim_padded, step_padded) in zip(chosen, along, along_padded, strict=True):
            at[dim] += part.start * step
            index[dim_padded] += part.start * step_padded
        is_padding = any(part.padding for part in chosen)
        yield Block(
            shape=tuple(part.length for part in chosen),
            shard=first + piece.base + sum(part.local * stride for part, stride in zip(chosen, strides, strict=True)),
            shard_strides=strides,
            original=None if is_padding else sum(i * step for i, step in zip(at, steps, strict=True)),
            original_strides=tuple(steps[dim] * step for dim, step in along),
            first=tuple(index),
            along=tuple(along_padded),
        )


class Strided(NamedTuple):
    """The bytes of elements: the first byte, the number of elements along each dimension, the steps and the element
    size, in bytes.
    """

    begin: int
    shape: tuple[int, ...]
    steps: tuple[int, ...]
    item: int

    @property
    def nbytes(self) -> int:
        """The bytes from the first to the last element."""
        return sum((n - 1) * step for n, step in zip(self.shape, self.steps, strict=True)) + self.item


def strided(offset: int, shape: tuple[int, ...], first: int, strides: Sequence[int], bits: int) -> Strided:
    """Where elements of a tensor at ``offset`` are. If a byte has several elements, the bytes count as elements.

    Raises PlanError where elements that share a byte do not follow each other.
    """
    if not bits % 8:
        item = bits // 8
        return Strided(offset + first * item, shape, tuple(stride * item for stride in strides), item)
    count = 8 // bits
    if not strides or strides[-1] != 1 or any(n % count for n in (first, shape[-1], *strides[:-1])):
        raise PlanError(f"elements of {bits} bits would be cut within a byte")
    steps = (*(stride // count for stride in strides[:-1]), 1)
    return Strided(offset + first // count, (*shape[:-1], shape[-1] // count), steps, 1)


Factors = Sequence[tuple[int, int]]
"""The length of each factor of a dimension, and how far one step of it moves along the dimension."""


def ranges_between(factors: Factors, begin: int, end: int) -> Iterator[tuple[Run, ...]]:
    """The indices of factors whose positions (the sums of index times step) are from ``begin`` to ``end``.

    They come as products of one range for each factor; these products are disjoint.
    """
    if not factors:
        if begin <= 0 < end:
            yield ()
        return
    (length, step), *inner = factors
    extent = 1 + sum((n - 1) * inner_step for n, inner_step in inner)
    first, last = max(0, -(-begin // step)), min(length, (end - extent) // step + 1)
    if first < last:
        yield (Run(first, last - first), *(Run(0, n) for n, _ in inner))
    touched = range(max(0, (begin - extent) // step + 1), min(length, -(-end // step)))
    for index in touched:
        if not first <= index < last:
            yield from (
                (Run(index, 1), *runs) for runs in ranges_between(inner, begin - index * step, end - index * step)
            )
