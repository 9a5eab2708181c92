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
from typing import Any

from formats.files.chunks import Chunk
from formats.notation.axes import Run, merge_runs, product_boxes, product_runs
from reshard.mesh.plan import Layout
from reshard.placement.pieces import Blocks, Piece, Runs, Spread, over_blocks
from reshard.placement.portions import Portion


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
        cuts = [
            sorted({end for run in itertools.chain(*dim_runs) for end in (run.offset, run.end)})
            for dim_runs in zip(*owned.values(), strict=True)
        ]
        file_of, ranks = dict[Chunk, int](), self.layouts[0].ranks
        for rank, dims in owned.items():
            pieces = [[*itertools.chain(*(_cut(run, at) for run in runs))] for runs, at in zip(dims, cuts, strict=True)]
            for number, chunk in enumerate(itertools.product(*pieces)):
                at = Chunk(tuple(run.offset for run in chunk), tuple(run.length for run in chunk))
                file_of.setdefault(at, number * ranks + rank)
        return {file: at for at, file in file_of.items()}

    def numbers(self, holder: int) -> Iterator[int]:
        """The numbers of the atoms at the indices of the stack that a holder has."""
        slots = len(self.portions)
        return (place * slots + slot for place in self._places.get(holder, ()) for slot in range(slots))

    def has(self, holder: int, number: int) -> bool:
        """Whether a holder has elements of an atom."""
        return holder in self.spread(number, self.groups(number)).pieces

    def first(self, holder: int, number: int) -> int:
        """The number of the first element that a holder has of the stack's index in which an atom is."""
        if not self.is_stack:
            return 0
        shape = self.shape(holder)
        assert shape is not None
        stride = self.views[holder][1][0] if self.views is not None else math.prod(shape[1:])
        return self._places[holder][number // len(self.portions)] * stride

    def groups(self, number: int) -> Blocks:
        """The factors of an atom in the stored order, those together that are one dimension of what a holder has."""
        portion = self.portions[number % len(self.portions)]
        if self.chunks is None:
            return tuple((factor,) for factor in portion.order)
        return tuple(group for group in stored_dims(self.portions, number) if group)

    def starts(self, number: int) -> set[int]:
        """The factors that begin a block of their own: where atoms are joined, where a dimension of chunks begins, and
        what is padded.
        """
        portion, layout = self.portions[number % len(self.portions)], self.layouts[number]
        padded = {factor for factor, size in enumerate(layout.padded) if size != layout.full[factor]}
        if self.chunks is not None:
            return padded | {group[0] for group in self.groups(number)}
        return padded | {*(portion.order[portion.outer : portion.outer + 1] if len(self.portions) > 1 else ())}

    def spread(self, number: int, blocks: Blocks, without: Collection[int] = frozenset()) -> Spread:
        """How an atom is spread over the holders, but for those ``without``, with blocks of its factors as dimensions.

        Elements count from ``first`` on. Atoms that are spread alike share the spread.
        """
        place, slot = divmod(number, len(self.portions))
        layouts = self.layouts[place * len(self.portions) :][: len(self.portions)]
        key: tuple[Any, ...] = (slot, layouts, blocks, frozenset(without))
        if self.chunks is not None:
            views = self.views or {}
            key = (*key, tuple((file, *self._chunk(file), views.get(file)) for file in self._holders[place]))
        if key not in self._spreads:
            layout, groups, position = layouts[slot], self.groups(number), self.portions[slot].order.index
            pieces = {
                holder: tuple(new for piece in own_pieces for new in over_blocks(piece, groups, blocks, layout.padded))
                for holder in self._holders[place]
                if holder not in without and (own_pieces := [*self._pieces(holder, place, slot)])
            }
            full = tuple(math.prod(layout.full[f] for f in block) for block in blocks)
            order = tuple(sorted(range(len(blocks)), key=lambda block: position(blocks[block][0])))
            self._spreads[key] = Spread(full, order, pieces)
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

    def _pieces(self, holder: int, place: int, slot: int) -> Iterator[Piece]:
        """What a holder has of an atom, with its groups as dimensions."""
        if self.chunks is not None:
            yield from self._in_chunk(holder, place, slot)
            return
        layouts, runs = self.layouts[place * len(self.portions) :], list[tuple[Runs, ...]]()
        if holder in layouts[slot].empty:
            return
        for portion, layout in zip(self.portions, layouts, strict=False):
            dims = layout.boxes[holder].dims
            runs.append(tuple(dims[factor] for factor in portion.order))
        lengths = [[sum(run.length for run in dim) for dim in sizes] for sizes in runs]
        inner = [math.prod(sizes[spec.outer :]) for sizes, spec in zip(lengths, self.portions, strict=True)]
        sizes, outer = lengths[slot], self.portions[slot].outer
        strides = (*row_major(sizes[:outer], sum(inner)), *row_major(sizes[outer:], 1))
        yield Piece(runs[slot], strides, sum(inner[:slot]))

    def _chunk(self, file: int) -> Chunk:
        """The chunk of an index of the stack that a file has."""
        assert self.chunks is not None
        at = self.chunks[file]
        return Chunk(at.offset[1:], at.shape[1:]) if self.is_stack else at

    def _in_chunk(self, file: int, place: int, slot: int) -> Iterator[Piece]:
        """What a chunk has of an atom: chunks may begin and end anywhere."""
        portion, (offset, shape), is_joined = self.portions[slot], self._chunk(file), len(self.portions) > 1
        base, steps = (0, row_major(shape, 1)) if self.views is None else self.views[file]
        steps = steps[len(steps) - len(shape) :]
        if not portion.counts:
            if not shape or offset[0] <= slot < offset[0] + shape[0]:
                yield Piece((), (), base + ((slot - offset[0]) * steps[0] if shape else 0))
            return
        groups, layouts = stored_dims(self.portions, slot), self.layouts[place * len(self.portions) :]
        dims: list[list[tuple[int, list[tuple[Run, int]]]]] = []  # of each dimension: base, runs and strides of groups
        for dim, (begin, length, step) in enumerate(zip(offset, shape, steps, strict=True)):
            if dim != portion.dim or not is_joined:
                dims.append([(0, [(Run(begin, length), step)])] if length else [])
                continue
            ends = [0]  # where atoms end along the dimension in which they are joined
            for other, layout in zip(self.portions, layouts, strict=False):
                ends.append(ends[-1] + math.prod(layout.padded[f] for f in other.of_dim(dim)[other.lead :]))
            first, end, row = ends[slot], ends[slot + 1], ends[-1]
            leads, parts = math.prod(layouts[slot].padded[f] for f in groups[dim]) if portion.lead else 1, []
            for lead, inner in product_boxes(begin, length, (leads, row)):
                low, high = max(inner.offset, first), min(inner.end, end)
                if low < high:
                    factors = [(lead, row * step)] if portion.lead else []
                    at = (lead.offset * row + low - begin) * step
                    parts.append((at, [*factors, (Run(low - first, high - low), step)]))
            dims.append(parts)
        is_there = [bool(group) for group in groups]
        for chosen in itertools.product(*dims):
            runs = [*itertools.compress(itertools.chain(*(factors for _, factors in chosen)), is_there)]
            yield Piece(
                tuple((run,) for run, _ in runs), tuple(step for _, step in runs), base + sum(at for at, _ in chosen)
            )


def stored_dims(portions: Sequence[Portion], number: int) -> Blocks:
    """The factors of an atom in each stored dimension, in the stored order; those before what is joined are apart."""
    portion, blocks = portions[number % len(portions)], []
    for dim in range(len(portion.counts)):
        factors = portion.of_dim(dim)
        lead = portion.lead if dim == portion.dim and len(portions) > 1 else 0
        blocks += [factors[:lead]] if lead else []
        blocks.append(factors[lead:])
    return tuple(blocks)


def _cut(run: Run, cuts: Sequence[int]) -> Iterator[Run]:
    ends = [run.offset, *(cut for cut in cuts if run.offset < cut < run.end), run.end]
    return (Run(begin, end - begin) for begin, end in itertools.pairwise(ends))


def row_major(lengths: Sequence[int], last: int) -> tuple[int, ...]:
    """The strides of dimensions in row-major order, the last of which has a stride of ``last``."""
    return tuple(math.prod(lengths[place + 1 :]) * last for place in range(len(lengths)))
