"""A program's tensors, and where the atoms of each lie in them (see ``reshard.placement.arrangement``)."""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from formats.files.chunks import Chunk
from formats.notation.axes import Run
from reshard.mesh.plan import Layout
from reshard.placement.pieces import Blocks, Piece, Spread, over_blocks, product_boxes
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

    def in_chunks(self, chunks: Mapping[int, Chunk]) -> Geometry:
        """That of the same tensor in chunks, by the numbers of their files."""
        return replace(self, chunks=chunks, uncut=self)

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
        if self.chunks is not None:
            return self.chunks[holder].shape if holder in self.chunks else None
        places = self._places.get(holder)
        if places is None:
            return None
        shape = _stored_shape(self.portions, self._lengths(holder, next(iter(places))))
        return (len(places), *shape) if self.is_stack else shape

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
        return self._places[holder][number // len(self.portions)] * math.prod(shape[1:])

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
            key = (*key, tuple((file, *self._chunk(file)) for file in self._holders[place]))
        if key not in self._spreads:
            layout, groups, position = layouts[slot], self.groups(number), self.portions[slot].order.index
            pieces = {
                holder: tuple(new for own in of for new in over_blocks(own, groups, blocks, layout.padded))
                for holder in self._holders[place]
                if holder not in without and (of := [*self._pieces(holder, place, slot)])
            }
            full = tuple(math.prod(layout.full[f] for f in block) for block in blocks)
            order = tuple(sorted(range(len(blocks)), key=lambda block: position(blocks[block][0])))
            self._spreads[key] = Spread(full, order, pieces)
        return self._spreads[key]

    @cached_property
    def _spreads(self) -> dict[tuple[Any, ...], Spread]:
        return {}

    @cached_property
    def _places(self) -> Mapping[int, Mapping[int, int]]:
        """For each holder, which indices of the stack it has, and their numbers there."""
        slots, found = len(self.portions), dict[int, dict[int, int]]()
        if self.chunks is not None:
            for file, at in self.chunks.items():
                places = range(at.offset[0], at.end[0]) if self.is_stack else range(1)
                found[file] = {place: number for number, place in enumerate(places)}
            return found
        for place, layout in enumerate(self.layouts[::slots]):
            for rank in layout.boxes:
                own = found.setdefault(rank, {})
                own[place] = len(own)
        return found

    @cached_property
    def _holders(self) -> Mapping[int, Sequence[int]]:
        """The holders of each index of the stack."""
        found: dict[int, list[int]] = {place: [] for place in range(len(self.layouts) // len(self.portions))}
        for holder in sorted(self._places):
            for place in self._places[holder]:
                found[place].append(holder)
        return found

    def _lengths(self, rank: int, place: int) -> list[list[int]]:
        """The length of each factor on a rank, in the stored order, for all slots of an index of the stack."""
        layouts = self.layouts[place * len(self.portions) :]
        return [
            [sum(run.length for run in layout.boxes[rank].dims[factor]) for factor in portion.order]
            for portion, layout in zip(self.portions, layouts, strict=False)
        ]

    def _pieces(self, holder: int, place: int, slot: int) -> Iterator[Piece]:
        """What a holder has of an atom, with its groups as dimensions."""
        if self.chunks is not None:
            yield from self._in_chunk(holder, place, slot)
            return
        layout, portion = self.layouts[place * len(self.portions) + slot], self.portions[slot]
        if holder in layout.empty:
            return
        lengths = self._lengths(holder, place)
        inner = [math.prod(own[of.outer :]) for own, of in zip(lengths, self.portions, strict=True)]
        own, outer = lengths[slot], portion.outer
        strides = (*_row_major(own[:outer], sum(inner)), *_row_major(own[outer:], 1))
        dims = layout.boxes[holder].dims
        yield Piece(tuple(tuple(dims[factor]) for factor in portion.order), strides, sum(inner[:slot]))

    def _chunk(self, file: int) -> Chunk:
        """The chunk of an index of the stack that a file has."""
        assert self.chunks is not None
        at = self.chunks[file]
        return Chunk(at.offset[1:], at.shape[1:]) if self.is_stack else at

    def _in_chunk(self, file: int, place: int, slot: int) -> Iterator[Piece]:
        """What a chunk has of an atom: chunks may begin and end anywhere."""
        portion, (offset, shape) = self.portions[slot], self._chunk(file)
        is_joined, steps = len(self.portions) > 1, _row_major(shape, 1)
        if not portion.counts:
            if not shape or offset[0] <= slot < offset[0] + shape[0]:
                yield Piece((), (), slot - offset[0] if shape else 0)
            return
        groups = stored_dims(self.portions, slot)
        dims: list[list[tuple[int, list[tuple[Run, int]]]]] = []  # of each dimension: base, runs and strides of groups
        for dim, (begin, length, step) in enumerate(zip(offset, shape, steps, strict=True)):
            if dim != portion.dim or not is_joined:
                dims.append([(0, [(Run(begin, length), step)])] if length else [])
                continue
            first, end, row = self._extent(place, slot)
            leads, found = math.prod(self._padded(place, slot, groups[dim])) if portion.lead else 1, []
            for lead, inner in product_boxes(begin, length, (leads, row)):
                low, high = max(inner.offset, first), min(inner.end, end)
                if low < high:
                    of = [(lead, row * step)] if portion.lead else []
                    at = (lead.offset * row + low - begin) * step
                    found.append((at, [*of, (Run(low - first, high - low), step)]))
            dims.append(found)
        is_there = [bool(group) for group in groups]
        for chosen in itertools.product(*dims):
            runs = [*itertools.compress(itertools.chain(*(of for _, of in chosen)), is_there)]
            yield Piece(tuple((run,) for run, _ in runs), tuple(step for _, step in runs), sum(at for at, _ in chosen))

    def _padded(self, place: int, slot: int, factors: Sequence[int]) -> list[int]:
        padded = self.layouts[place * len(self.portions) + slot].padded
        return [padded[factor] for factor in factors]

    def _extent(self, place: int, slot: int) -> tuple[int, int, int]:
        """Where an atom begins and ends along the dimension in which atoms are joined, and the length of all."""
        ends = [0]
        for number, portion in enumerate(self.portions):
            own = of_dim(portion, portion.dim)[portion.lead :]
            ends.append(ends[-1] + math.prod(self._padded(place, number, own)))
        return ends[slot], ends[slot + 1], ends[-1]


def stored_dims(portions: Sequence[Portion], number: int) -> Blocks:
    """The factors of an atom in each stored dimension, in the stored order; those before what is joined are apart."""
    portion, found = portions[number % len(portions)], []
    for dim in range(len(portion.counts)):
        factors = of_dim(portion, dim)
        lead = portion.lead if dim == portion.dim and len(portions) > 1 else 0
        found += [factors[:lead]] if lead else []
        found.append(factors[lead:])
    return tuple(found)


def of_dim(portion: Portion, dim: int) -> tuple[int, ...]:
    """The factors of a stored dimension, in the stored order."""
    start = sum(portion.counts[:dim])
    return portion.order[start : start + portion.counts[dim]]


def _row_major(lengths: Sequence[int], last: int) -> tuple[int, ...]:
    """The strides of dimensions in row-major order, the last of which has a stride of ``last``."""
    return tuple(math.prod(lengths[place + 1 :]) * last for place in range(len(lengths)))


def _stored_shape(portions: Sequence[Portion], lengths: Sequence[Sequence[int]]) -> tuple[int, ...]:
    first, shape, start = portions[0], [], 0
    for dim, count in enumerate(first.counts):
        if dim == first.dim and len(portions) > 1:
            lead = math.prod(lengths[0][start : start + first.lead])
            own = [
                math.prod(found[start + portion.lead : start + portion.counts[dim]])
                for portion, found in zip(portions, lengths, strict=True)
            ]
            shape.append(lead * sum(own))
        else:
            shape.append(math.prod(lengths[0][start : start + count]))
        start += count
    if not first.counts and (len(portions) > 1 or first.vector):  # numbers, joined to a vector
        shape.append(len(portions))
    return tuple(shape)
