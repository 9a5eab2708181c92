"""A program's tensors, and where the atoms of each lie in them (see ``reshard.placement.arrangement``).

A *chunk* is a contiguous range of each dimension. Files of chunks are numbered, and a file has at most one chunk of a
tensor. A rank whose part is not one chunk (a packed gate and up, heads that do not divide) has several files. Any
reader finds its part among the chunks, whatever its own mesh.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, TypeVar

from reshard.formats.files.chunks import Chunk
from reshard.formats.notation.axes import Run, merge_runs, product_boxes, product_runs, segments
from reshard.mesh.plan import Layout
from reshard.placement.pieces import Piece, Runs, Spread, local_index
from reshard.placement.portions import Portion

_T = TypeVar("_T")

_MOST_CHUNKS = 64
"""The most chunks of a tensor on a rank, and so the most files for each rank."""


@dataclass(frozen=True, eq=False)
class Geometry:
    """The places of a stored tensor's atoms in the tensors of its holders. Stored tensors of equal layouts share it.

    ``portions`` are the tensor's slots. ``layouts`` are the layouts of its atoms on the mesh: first those at index 0 of
    the stack, and so on. Holders are ranks. If the tensor is in ``parts``, holders are files or live tensors, each with
    one part: then ``layouts`` are those of the whole tensor, on one rank.
    """

    portions: tuple[Portion, ...]
    layouts: tuple[Layout, ...]
    is_stack: bool
    parts: Mapping[int, Piece] | None = None
    uncut: Geometry | None = None
    """For a tensor in parts: the geometry of the mesh, without parts."""
    _shapes: dict[int, tuple[int, ...] | None] = field(init=False, repr=False, default_factory=dict)
    _spreads: dict[tuple[Any, ...], Spread] = field(init=False, repr=False, default_factory=dict)

    def in_parts(self, parts: Mapping[int, Piece]) -> Geometry:
        """Return the geometry of the same tensor in these parts, by the number of their holder."""
        return replace(self, parts=parts, uncut=self)

    def in_chunks(self, chunks: Mapping[int, Chunk]) -> Geometry:
        """Return the geometry of the same tensor in these chunks, by the number of their file."""
        return self.in_parts(
            {file: contiguous([(Run(*run),) for run in zip(*chunks[file], strict=True)]) for file in chunks}
        )

    @property
    def whole(self) -> Geometry:
        """The geometry of the mesh: this one or, for a tensor in parts, the one without them."""
        return self.uncut or self

    @property
    def holders(self) -> Iterable[int]:
        """All ranks, or those that have a part."""
        return range(self.layouts[0].ranks) if self.parts is None else self.parts

    def shape(self, holder: int) -> tuple[int, ...] | None:
        """Return the shape of a holder's tensor; None if it has no part of the stored tensor."""
        if holder not in self._shapes:
            dims = self.dims(holder)
            self._shapes[holder] = None if dims is None else tuple(sum(run.length for run in runs) for runs in dims)
        return self._shapes[holder]

    def dims(self, holder: int) -> tuple[Runs, ...] | None:
        """The runs of each stored dimension that a holder has; None if it has nothing of the tensor."""
        if self.parts is not None:
            return self.parts[holder].runs if holder in self.parts else None
        places, slots, first = self._places.get(holder), len(self.portions), self.portions[0]
        if places is None:
            return None
        dims = [tuple(merge_runs(Run(place, 1) for place in places))] if self.is_stack else []
        layouts = self.layouts[next(iter(places)) * slots :][:slots]
        for dim in range(len(first.counts)):
            lead, runs, base = first.lead if dim == first.dim else 0, list[Run](), 0
            outer: list[tuple[tuple[Run, ...], int]] = []
            for layout, portion in zip(layouts if dim == first.dim else layouts[:1], self.portions, strict=False):
                factors = [(layout.boxes[holder].dims[f], layout.padded[f]) for f in portion.of_dim(dim)]
                outer = outer or factors[:lead]
                runs += [Run(base + run.offset, run.length) for run in product_runs(factors[lead:])]
                base += math.prod(size for _, size in factors[lead:])
            dims.append(tuple(merge_runs(product_runs([*outer, (tuple(merge_runs(runs)), base)]))))
        return (*dims,) if first.counts or slots == 1 else (*dims, (Run(0, slots),))  # numbers, joined to a vector

    def chunks_of_ranks(self) -> dict[int, Chunk]:
        """Return the ranks' chunks by the number of their file: the rank, plus the number of ranks for each further
        chunk of it. A chunk is written once, by the first rank that has it.

        All ranks' runs are cut wherever any rank's run begins or ends, so two chunks are equal or disjoint. If there
        are many (each row of a matrix that is stored flat), each rank has one range instead.
        """
        owned = {rank: dims for rank in self.holders if (dims := self.dims(rank)) is not None}
        cut = [[*segments(dict(zip(owned, runs, strict=True)))] for runs in zip(*owned.values(), strict=True)]
        file_of, ranks = dict[Chunk, int](), self.layouts[0].ranks
        pieces_of = {rank: [[run for run, holders in parts if rank in holders] for parts in cut] for rank in owned}
        if max((math.prod(map(len, pieces)) for pieces in pieces_of.values()), default=0) > _MOST_CHUNKS:
            sizes = [parts[-1][0].end for parts in cut]
            dim = max(range(len(cut)), key=lambda dim: len(cut[dim]))
            for number, rank in enumerate(owned):
                begin, end = (sizes[dim] * at // len(owned) for at in (number, number + 1))
                whole = [[Run(0, size)] for size in sizes]
                pieces_of[rank] = [*whole[:dim], [Run(begin, end - begin)] if begin < end else [], *whole[dim + 1 :]]
        for rank, pieces in pieces_of.items():
            for number, chunk in enumerate(itertools.product(*pieces)):
                at = Chunk(tuple(run.offset for run in chunk), tuple(run.length for run in chunk))
                file_of.setdefault(at, number * ranks + rank)
        return {file: at for at, file in file_of.items()}

    def has(self, holder: int, number: int) -> bool:
        """Whether a holder has elements of an atom."""
        return holder in self.spread(number).pieces

    def first(self, holder: int, number: int) -> int:
        """Return the number of a holder's first element at the index of the stack at which an atom lies."""
        if not self.is_stack:
            return 0
        shape = self.shape(holder)
        assert shape is not None
        stride = self.parts[holder].strides[0] if self.parts is not None else math.prod(shape[1:])
        return self._places[holder][number // len(self.portions)] * stride

    def spread(self, number: int, without: Collection[int] = frozenset()) -> Spread:
        """Return an atom's pieces on all holders except those in ``without``. The spread's factors are the atom's
        dimensions.

        Elements count from ``first`` on. Atoms that are spread alike share the spread.
        """
        place, slot = divmod(number, len(self.portions))
        layouts = self.layouts[place * len(self.portions) :][: len(self.portions)]
        key = slot, layouts, frozenset(without), () if self.parts is None else self._holders[place]
        if key not in self._spreads:
            holders = (holder for holder in self._holders[place] if holder not in without)
            pieces = {holder: own for holder in holders if (own := tuple(self._pieces(holder, slot, layouts)))}
            self._spreads[key] = Spread(layouts[slot].full, self.portions[slot].order, pieces)
        return self._spreads[key]

    @cached_property
    def _places(self) -> Mapping[int, Mapping[int, int]]:
        """For each holder, which indices of the stack it has, and their numbers there."""
        slots, places_of = len(self.portions), dict[int, dict[int, int]]()
        if self.parts is not None:
            for holder, part in self.parts.items():
                places = (
                    [place for run in part.runs[0] for place in range(run.offset, run.end)] if self.is_stack else [0]
                )
                places_of[holder] = {place: number for number, place in enumerate(places)}
            return places_of
        for place, layout in enumerate(self.layouts[::slots]):
            for rank in layout.boxes:
                numbers = places_of.setdefault(rank, {})
                numbers[place] = len(numbers)
        return places_of

    @cached_property
    def _holders(self) -> Mapping[int, tuple[int, ...]]:
        """The holders of each index of the stack."""
        holders: dict[int, list[int]] = {place: [] for place in range(len(self.layouts) // len(self.portions))}
        for holder in sorted(self._places):
            for place in self._places[holder]:
                holders[place].append(holder)
        return {place: tuple(own) for place, own in holders.items()}

    def _pieces(self, holder: int, slot: int, layouts: Sequence[Layout]) -> Iterator[Piece]:
        """Yield a holder's pieces of an atom. ``layouts`` are those of the atoms at the same index of the stack."""
        if self.parts is not None:
            yield from _within(self._part(holder), self.portions, slot, layouts)
            return
        if holder in layouts[slot].empty:
            return
        lengths = [[sum(run.length for run in dim) for dim in layout.boxes[holder].dims] for layout in layouts]
        sizes = [[own[f] for f in portion.order] for own, portion in zip(lengths, self.portions, strict=True)]
        inner = [math.prod(own[portion.outer :]) for own, portion in zip(sizes, self.portions, strict=True)]
        order, outer = self.portions[slot].order, self.portions[slot].outer
        strides = (*row_major(sizes[slot][:outer], sum(inner)), *row_major(sizes[slot][outer:], 1))
        yield Piece(layouts[slot].boxes[holder].dims, _by_factor(order, strides), sum(inner[:slot]))

    def _part(self, holder: int) -> Piece:
        """Return a holder's part at one index of the stack. Its elements count from that index on."""
        assert self.parts is not None
        part = self.parts[holder]
        return Piece(part.runs[1:], part.strides[1:], part.base) if self.is_stack else part


def _within(part: Piece, portions: Sequence[Portion], slot: int, layouts: Sequence[Layout]) -> Iterator[Piece]:
    """Yield the pieces of an atom that lie in a part of a stored tensor, whose runs may begin and end anywhere."""
    portion, sizes = portions[slot], layouts[slot].padded
    if not portion.counts:
        if not part.runs:
            yield Piece((), (), part.base)
        elif any(run.offset <= slot < run.end for run in part.runs[0]):
            yield Piece((), (), part.base + local_index(part.runs[0], slot) * part.strides[0])
        return
    strides, dims = list[int](), list[list[tuple[int, tuple[Run, ...]]]]()  # of each dimension: base, and runs
    for dim, (own, step) in enumerate(zip(part.runs, part.strides, strict=True)):
        joined, number, lead = [(portion, layouts[slot])], 0, 0
        if dim == portion.dim:
            joined, number, lead = [*zip(portions, layouts, strict=True)], slot, portion.lead
        extents = [math.prod(of.padded[f] for f in each.of_dim(dim)[lead:]) for each, of in joined]
        first, row = sum(extents[:number]), sum(extents)
        end = first + extents[number]
        factors = [sizes[f] for f in portion.of_dim(dim)]
        own_strides, places = (*row_major(factors[:lead], row * step), *row_major(factors[lead:], step)), []
        for run in own:
            before = run.offset - local_index(own, run.offset)
            for *leads, inner in product_boxes(run.offset, run.length, (*factors[:lead], row)):
                low, high = max(inner.offset, first), min(inner.end, end)
                for box in product_boxes(low - first, high - low, factors[lead:]) if low < high else ():
                    runs = (*leads, *box)
                    at = sum(inside.offset * stride for inside, stride in zip(runs, own_strides, strict=True))
                    places.append((at + (first - before) * step, runs))
        strides += own_strides
        dims.append(places)
    for chosen in itertools.product(*dims):
        own_runs = tuple((run,) for _, runs in chosen for run in runs)
        order, at = portion.order, part.base + sum(at for at, _ in chosen)
        yield Piece(_by_factor(order, own_runs), _by_factor(order, strides), at)


def _by_factor(order: Sequence[int], stored: Sequence[_T]) -> tuple[_T, ...]:
    """Reorder values from the stored order of factors to the factors' own order."""
    return tuple(each for _, each in sorted(zip(order, stored, strict=True), key=lambda pair: pair[0]))


def contiguous(runs: Sequence[Runs]) -> Piece:
    """Return the piece of a contiguous tensor that holds these indices of each dimension."""
    return Piece((*runs,), row_major([sum(run.length for run in dim) for dim in runs], 1), 0)


def row_major(lengths: Sequence[int], last: int) -> tuple[int, ...]:
    """The strides of dimensions in row-major order, the last of which has a stride of ``last``."""
    return tuple(math.prod(lengths[place + 1 :]) * last for place in range(len(lengths)))
