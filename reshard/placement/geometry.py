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

from formats.files.chunks import Chunk
from formats.notation.axes import Run, merge_runs, product_boxes, product_runs, segments
from reshard.mesh.plan import Layout
from reshard.placement.pieces import Piece, Spread
from reshard.placement.portions import Portion

_T = TypeVar("_T")


@dataclass(frozen=True, eq=False)
class Geometry:
    """Where the atoms of a stored tensor lie in what each holder has of it. Stored tensors of equal layouts share it.

    ``portions`` are its slots. ``layouts`` are the layouts of its atoms on the mesh: first those of the first index of
    the stack, and so on. Holders are ranks or, of a tensor in ``chunks``, files: then ``layouts`` are those of the
    whole tensor, on one rank.
    """

    portions: tuple[Portion, ...]
    layouts: tuple[Layout, ...]
    is_stack: bool
    chunks: Mapping[int, Chunk] | None = None
    uncut: Geometry | None = None
    """That of all chunks together."""
    views: Mapping[int, tuple[int, tuple[int, ...]]] | None = None
    """Of chunks that are views of larger tensors: the number of the first element there, and the strides."""
    _shapes: dict[int, tuple[int, ...] | None] = field(init=False, repr=False, default_factory=dict)
    _spreads: dict[tuple[Any, ...], Spread] = field(init=False, repr=False, default_factory=dict)

    def in_chunks(
        self, chunks: Mapping[int, Chunk], views: Mapping[int, tuple[int, tuple[int, ...]]] | None = None
    ) -> Geometry:
        """That of the same tensor in chunks, by the numbers of their files."""
        return replace(self, chunks=chunks, uncut=self, views=views)

    @property
    def whole(self) -> Geometry:
        """That of the mesh: this one, or that of all chunks together."""
        return self.uncut or self

    @property
    def holders(self) -> Iterable[int]:
        """All ranks, or the files that have a chunk."""
        return range(self.layouts[0].ranks) if self.chunks is None else self.chunks

    def shape(self, holder: int) -> tuple[int, ...] | None:
        """The shape of what a holder has; None if it has no part of the tensor."""
        if holder not in self._shapes:
            dims = self.dims(holder)
            self._shapes[holder] = None if dims is None else tuple(sum(run.length for run in runs) for runs in dims)
        return self._shapes[holder]

    def dims(self, holder: int) -> list[list[Run]] | None:
        """The runs of each stored dimension that a holder has; None if it has nothing of the tensor."""
        if self.chunks is not None:
            at = self.chunks.get(holder)
            return [[Run(*run)] for run in zip(*at, strict=True)] if at is not None else None
        places, slots, first = self._places.get(holder), len(self.portions), self.portions[0]
        if places is None:
            return None
        dims = [list(merge_runs(Run(place, 1) for place in places))] if self.is_stack else []
        layouts = self.layouts[next(iter(places)) * slots :][:slots]
        for dim in range(len(first.counts)):
            lead, runs, base = first.lead if dim == first.dim else 0, list[Run](), 0
            outer: list[tuple[tuple[Run, ...], int]] = []
            for layout, portion in zip(layouts if dim == first.dim else layouts[:1], self.portions, strict=False):
                factors = [(layout.boxes[holder].dims[f], layout.padded[f]) for f in portion.of_dim(dim)]
                outer = outer or factors[:lead]
                runs += [Run(base + run.offset, run.length) for run in product_runs(factors[lead:])]
                base += math.prod(size for _, size in factors[lead:])
            dims.append(list(merge_runs(product_runs([*outer, (tuple(merge_runs(runs)), base)]))))
        return dims if first.counts or slots == 1 else [*dims, [Run(0, slots)]]  # numbers, joined to a vector

    def chunks_of_ranks(self) -> dict[int, Chunk]:
        """What ranks have as chunks, by the number of their file: the rank, plus the number of ranks for each further
        chunk of it. Each is written once, by the first rank that has it.

        All ranks' runs are cut wherever any rank's run begins or ends, so two chunks are equal or disjoint.
        """
        owned = {rank: dims for rank in self.holders if (dims := self.dims(rank)) is not None}
        cut = [[*segments(dict(zip(owned, runs, strict=True)))] for runs in zip(*owned.values(), strict=True)]
        file_of, ranks = dict[Chunk, int](), self.layouts[0].ranks
        for rank in owned:
            pieces = [[run for run, holders in parts if rank in holders] for parts in cut]
            for number, chunk in enumerate(itertools.product(*pieces)):
                at = Chunk(tuple(run.offset for run in chunk), tuple(run.length for run in chunk))
                file_of.setdefault(at, number * ranks + rank)
        return {file: at for at, file in file_of.items()}

    def has(self, holder: int, number: int) -> bool:
        """Whether a holder has elements of an atom."""
        return holder in self.spread(number).pieces

    def first(self, holder: int, number: int) -> int:
        """The number of the first element that a holder has of the stack's index in which an atom is."""
        if not self.is_stack:
            return 0
        shape = self.shape(holder)
        assert shape is not None
        stride = self.views[holder][1][0] if self.views is not None else math.prod(shape[1:])
        return self._places[holder][number // len(self.portions)] * stride

    def spread(self, number: int, without: Collection[int] = frozenset()) -> Spread:
        """How an atom is spread over the holders, but for those ``without``; its factors are the dimensions.

        Elements count from ``first`` on. Atoms that are spread alike share the spread.
        """
        place, slot = divmod(number, len(self.portions))
        layouts = self.layouts[place * len(self.portions) :][: len(self.portions)]
        key: tuple[Any, ...] = (slot, layouts, frozenset(without))
        if self.chunks is not None:
            views = self.views or {}
            key = (*key, tuple((file, *self._chunk(file), views.get(file)) for file in self._holders[place]))
        if key not in self._spreads:
            holders = (holder for holder in self._holders[place] if holder not in without)
            pieces = {holder: own for holder in holders if (own := tuple(self._pieces(holder, slot, layouts)))}
            self._spreads[key] = Spread(layouts[slot].full, self.portions[slot].order, pieces)
        return self._spreads[key]

    @cached_property
    def _places(self) -> Mapping[int, Mapping[int, int]]:
        """For each holder, which indices of the stack it has, and their numbers there."""
        slots, places_of = len(self.portions), dict[int, dict[int, int]]()
        if self.chunks is not None:
            for file, at in self.chunks.items():
                places = range(at.offset[0], at.end[0]) if self.is_stack else range(1)
                places_of[file] = {place: number for number, place in enumerate(places)}
            return places_of
        for place, layout in enumerate(self.layouts[::slots]):
            for rank in layout.boxes:
                numbers = places_of.setdefault(rank, {})
                numbers[place] = len(numbers)
        return places_of

    @cached_property
    def _holders(self) -> Mapping[int, Sequence[int]]:
        """The holders of each index of the stack."""
        holders: dict[int, list[int]] = {place: [] for place in range(len(self.layouts) // len(self.portions))}
        for holder in sorted(self._places):
            for place in self._places[holder]:
                holders[place].append(holder)
        return holders

    def _pieces(self, holder: int, slot: int, layouts: Sequence[Layout]) -> Iterator[Piece]:
        """What a holder has of an atom; ``layouts`` are those at its index of the stack."""
        if self.chunks is not None:
            yield from self._in_chunk(holder, slot, layouts)
            return
        if holder in layouts[slot].empty:
            return
        lengths = [[sum(run.length for run in dim) for dim in layout.boxes[holder].dims] for layout in layouts]
        sizes = [[own[f] for f in portion.order] for own, portion in zip(lengths, self.portions, strict=True)]
        inner = [math.prod(own[portion.outer :]) for own, portion in zip(sizes, self.portions, strict=True)]
        order, outer = self.portions[slot].order, self.portions[slot].outer
        strides = (*row_major(sizes[slot][:outer], sum(inner)), *row_major(sizes[slot][outer:], 1))
        yield Piece(layouts[slot].boxes[holder].dims, _by_factor(order, strides), sum(inner[:slot]))

    def _chunk(self, file: int) -> Chunk:
        """The chunk of an index of the stack that a file has."""
        assert self.chunks is not None
        at = self.chunks[file]
        return Chunk(at.offset[1:], at.shape[1:]) if self.is_stack else at

    def _in_chunk(self, file: int, slot: int, layouts: Sequence[Layout]) -> Iterator[Piece]:
        """What a chunk has of an atom: chunks may begin and end anywhere."""
        portion, (offset, shape), sizes = self.portions[slot], self._chunk(file), layouts[slot].padded
        base, steps = (0, row_major(shape, 1)) if self.views is None else self.views[file]
        steps = steps[len(steps) - len(shape) :]
        if not portion.counts:
            if not shape or offset[0] <= slot < offset[0] + shape[0]:
                yield Piece((), (), base + ((slot - offset[0]) * steps[0] if shape else 0))
            return
        strides, dims = list[int](), list[list[tuple[int, tuple[Run, ...]]]]()  # of each dimension: base, and runs
        for dim, (begin, length, step) in enumerate(zip(offset, shape, steps, strict=True)):
            joined, number, lead = [(portion, layouts[slot])], 0, 0
            if dim == portion.dim:
                joined, number, lead = [*zip(self.portions, layouts, strict=True)], slot, portion.lead
            extents = [math.prod(of.padded[f] for f in each.of_dim(dim)[lead:]) for each, of in joined]
            first, row = sum(extents[:number]), sum(extents)
            end = first + extents[number]
            factors = [sizes[f] for f in portion.of_dim(dim)]
            own_strides, parts = (*row_major(factors[:lead], row * step), *row_major(factors[lead:], step)), []
            for *leads, within in product_boxes(begin, length, (*factors[:lead], row)):
                low, high = max(within.offset, first), min(within.end, end)
                for box in product_boxes(low - first, high - low, factors[lead:]) if low < high else ():
                    runs = (*leads, *box)
                    at = sum(run.offset * stride for run, stride in zip(runs, own_strides, strict=True))
                    parts.append((at + (first - begin) * step, runs))
            strides += own_strides
            dims.append(parts)
        for chosen in itertools.product(*dims):
            own_runs = tuple((run,) for _, runs in chosen for run in runs)
            order, at = portion.order, base + sum(at for at, _ in chosen)
            yield Piece(_by_factor(order, own_runs), _by_factor(order, strides), at)


def _by_factor(order: Sequence[int], stored: Sequence[_T]) -> tuple[_T, ...]:
    """What each factor has, given it in the stored order."""
    return tuple(each for _, each in sorted(zip(order, stored, strict=True), key=lambda pair: pair[0]))


def row_major(lengths: Sequence[int], last: int) -> tuple[int, ...]:
    """The strides of dimensions in row-major order, the last of which has a stride of ``last``."""
    return tuple(math.prod(lengths[place + 1 :]) * last for place in range(len(lengths)))
