"""The algebra of places against indexing with numpy: atoms in any order, joined behind any factor, in any parts."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from reshard.formats.errors import PlanError
from reshard.formats.files.chunks import Chunk
from reshard.formats.notation.axes import Run, parse, product_boxes
from reshard.formats.notation.format import Line, Pattern
from reshard.mesh.plan import Box, Layout
from reshard.move.slabs import Region, Transfer, rows_of
from reshard.placement.geometry import Geometry, contiguous
from reshard.placement.pieces import Piece, Position, boxes
from reshard.placement.portions import Portion
from reshard.placement.stored import Location, Stored
from tests.marks import examples

# -- stored tensors ----------------------------------------------------------------------------------------------------


LINE = Line(Pattern("**"), (Pattern("**"),))


def runs_of(of: list[int]) -> tuple[Run, ...]:
    """Sorted indices as runs."""
    ends = [i for i, (a, b) in enumerate(itertools.pairwise(of), 1) if b != a + 1]
    return tuple(Run(of[a], of[b - 1] + 1 - of[a]) for a, b in itertools.pairwise([0, *ends, len(of)])) if of else ()


@st.composite
def ranks_of(draw: st.DrawFn, size: int, count: int) -> list[tuple[Run, ...]]:
    """What each rank has of a factor: any indices, each on at least one rank."""
    owners = [draw(st.sets(st.integers(0, count - 1), min_size=1)) for _ in range(size)]
    return [runs_of([i for i, of in enumerate(owners) if rank in of]) for rank in range(count)]


class Case:
    """A stored tensor that joins atoms of the same leading factors, and what each of its holders has of it.

    Each element of slot ``s`` of index ``i`` of the stack has a number of its own, and so has each of padding: none.
    """

    def __init__(self, geometry: Geometry, whole: list[list[np.ndarray]], slot: int) -> None:
        self.geometry, self.whole, self.slot = geometry, whole, slot

    def number(self, place: int) -> int:
        """The number of the atom that both tensors of a pair have, at a place of the stack."""
        return place * len(self.geometry.portions) + self.slot

    def placed(self, number: int) -> Location:
        return Location(Stored("t", "U32", self.geometry, ()), number)

    def full(self, number: int) -> np.ndarray:
        return self.whole[number // len(self.geometry.portions)][number % len(self.geometry.portions)]

    def tensor(self, holder: int) -> np.ndarray:
        """What a holder has, as the program stores it."""
        if self.geometry.parts is None:
            return self._on(holder)
        runs = self.geometry.parts[holder].runs
        return self._on(0)[np.ix_(*([i for run in dim for i in range(run.offset, run.end)] for dim in runs))]

    def _on(self, rank: int) -> np.ndarray:
        slots, found = len(self.geometry.portions), []
        for place, atoms in enumerate(self.whole):
            layouts = self.geometry.layouts[place * slots : (place + 1) * slots]
            if rank in layouts[0].boxes:
                found.append(joined(self.geometry.portions, layouts, atoms, rank))
        return np.stack(found) if self.geometry.is_stack else found[0]


def padded(atom: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    return np.pad(atom, [(0, n - m) for n, m in zip(shape, atom.shape, strict=True)])


def joined(
    portions: tuple[Portion, ...], layouts: tuple[Layout, ...], atoms: list[np.ndarray], rank: int
) -> np.ndarray:
    parts, first = [], portions[0]
    for portion, layout, atom in zip(portions, layouts, atoms, strict=True):
        own = padded(atom, layout.padded)
        for dim, runs in enumerate(layout.boxes[rank].dims):
            own = np.take(own, [i for run in runs for i in range(run.offset, run.end)], axis=dim)
        own = own.transpose(portion.order)
        ends = [*itertools.accumulate(portion.counts, initial=0)]
        shape = [math.prod(own.shape[a:b]) for a, b in itertools.pairwise(ends)]
        lead = math.prod(own.shape[ends[first.dim] : ends[first.dim] + first.lead])
        shape[first.dim : first.dim + 1] = [lead, shape[first.dim] // max(lead, 1) if lead else 0]
        parts.append(own.reshape(shape))
    whole = np.concatenate(parts, axis=first.dim + 1)
    lead, inner = whole.shape[first.dim : first.dim + 2]
    return whole.reshape(*whole.shape[: first.dim], lead * inner, *whole.shape[first.dim + 2 :])


@st.composite
def cases(draw: st.DrawFn, sizes: tuple[int, ...], others: tuple[tuple[int, ...], ...], lead: int, places: int) -> Case:
    """A stored tensor of an atom of ``sizes``, joined with others behind their first ``lead`` factors, which are equal.

    The same factors are stored in any order on any ranks, or in chunks that are cut anywhere, or in parts that have any
    indices of each dimension.
    """
    form = draw(st.sampled_from(["ranks", "ranks", "chunks", "parts"]))
    count = draw(st.integers(1, 3)) if form == "ranks" else 1
    order = draw(st.permutations(range(len(sizes))))
    if others:  # what is joined is one dimension, and what it is joined behind stands first in it
        order = [*range(lead), *(lead + f for f in draw(st.permutations(range(len(sizes) - lead))))]
    ends = sorted(draw(st.sets(st.integers(1, len(sizes) - 1)))) if len(sizes) > 1 and not others else []
    counts = tuple(b - a for a, b in itertools.pairwise([0, *ends, len(sizes)]))
    padding = tuple(n + (draw(st.integers(0, 2)) if not others else 0) for n in sizes)
    shapes, portions = (sizes, *others), []
    slot_at = draw(st.permutations(range(len(shapes))))
    for slot, number in enumerate(slot_at):
        one = tuple(order) if number == 0 else tuple(range(len(shapes[number])))
        of = counts if number == 0 else (len(shapes[number]),)
        portions.append(Portion(cast(Any, None), None, "x", slot, len(shapes), LINE, one, of, 0, lead if others else 0))
    layouts, whole, at = [], [], 1
    dealt = draw(st.integers(0, len(sizes) - 1))  # ranks divide one factor, and what is joined with it in its place
    shared = draw(ranks_of(padding[dealt], count))
    for _ in range(places):
        atoms = []
        for number in slot_at:
            shape = shapes[number]
            size = padding if number == 0 else shape
            own = min(dealt, len(shape) - 1)
            runs = [[(Run(0, n),)] * count for n in size]
            runs[own] = shared if number == 0 or dealt < lead else draw(ranks_of(size[own], count))
            boxes = {
                rank: Box(tuple(of[rank] for of in runs), tuple(sum(run.length for run in of[rank]) for of in runs))
                for rank in range(count)
            }
            layouts.append(Layout(parse(""), shape, size, boxes, count, shape, frozenset(), "whole"))
            atoms.append(np.arange(at, at + math.prod(shape), dtype=np.uint32).reshape(shape))
            at += math.prod(shape)
        whole.append(atoms)
    is_stack = places > 1
    if is_stack:  # all indices are alike on a rank
        layouts = [*layouts[: len(shapes)]] * places
    case = Case(Geometry(tuple(portions), tuple(layouts), is_stack), whole, slot_at.index(0))
    shape = case._on(0).shape
    if form == "parts":
        owners = [draw(st.lists(st.integers(0, 1), min_size=n, max_size=n)) for n in shape]
        dealt_to = [[[i for i, of in enumerate(dim) if of == owner] for owner in {*dim}] for dim in owners]
        runs_in = [[runs_of(own) for own in dim] for dim in dealt_to]
        case.geometry = case.geometry.in_parts(dict(enumerate(map(contiguous, itertools.product(*runs_in)))))
    if form == "chunks":
        cuts = [sorted({0, n, *draw(st.sets(st.integers(0, n), max_size=2))}) for n in shape]
        boxes = itertools.product(*(itertools.pairwise(of) for of in cuts))
        chunks = {i: Chunk(*zip(*((a, b - a) for a, b in box), strict=True)) for i, box in enumerate(boxes)}
        case.geometry = case.geometry.in_chunks(chunks)
    return case


@st.composite
def pairs(draw: st.DrawFn) -> tuple[Case, Case]:
    """The same atom in two stored tensors."""
    sizes = tuple(draw(st.lists(st.integers(1, 4), min_size=1, max_size=3)))
    found = []
    places = draw(st.sampled_from([1, 1, 3]))
    for _ in range(2):
        lead = draw(st.integers(0, len(sizes) - 1))
        count = draw(st.integers(0, 2))
        others = tuple(
            (*sizes[:lead], *draw(st.lists(st.integers(1, 3), min_size=1, max_size=2))) for _ in range(count)
        )
        found.append(draw(cases(sizes, others, lead if others else 0, places)))
    return found[0], found[1]


# -- laws --------------------------------------------------------------------------------------------------------------


@given(st.integers(0, 60), st.integers(0, 60), st.lists(st.integers(1, 4), min_size=1, max_size=4))
def test_a_range_of_a_product_is_few_boxes(begin: int, length: int, sizes: list[int]) -> None:
    total = math.prod(sizes)
    begin, length = min(begin, total), min(length, total - min(begin, total))
    boxes, numbers = [*product_boxes(begin, length, sizes)], np.arange(total).reshape(sizes)
    elements = [n for box in boxes for n in numbers[tuple(slice(run.offset, run.end) for run in box)].ravel().tolist()]
    assert elements == [*range(begin, begin + length)]
    assert len(boxes) <= 2 * len(sizes) - 1


def elements(piece: Piece) -> Iterator[tuple[tuple[int, ...], int]]:
    """Each element of a piece: its index in the atom, and its number in the holder's tensor."""
    indices = [[i for run in runs for i in range(run.offset, run.end)] for runs in piece.runs]
    for local in itertools.product(*(range(n) for n in piece.shape)):
        where = piece.base + sum(i * stride for i, stride in zip(local, piece.strides, strict=True))
        yield tuple(of[i] for of, i in zip(indices, local, strict=True)), where


@examples(150)
@given(pairs())
def test_each_element_lies_where_numpy_finds_it(pair: tuple[Case, Case]) -> None:
    for case in pair:
        for place in range(len(case.whole)):
            number = case.number(place)
            spread, geometry = case.placed(number).spread, case.geometry
            atom = padded(case.full(number), geometry.layouts[number].padded)
            seen = np.zeros(atom.shape, int)
            for holder, pieces in spread.pieces.items():
                tensor, first = case.tensor(holder).ravel(), geometry.first(holder, number)
                for index, where in (each for piece in pieces for each in elements(piece)):
                    assert tensor[first + where] == atom[index]
                    seen[index] += 1
            assert (seen >= 1).all() and (geometry.parts is None or (seen == 1).all())


@examples(200)
@given(pairs(), st.sampled_from([1, 8, 40, 1000]))
def test_slabs_bring_each_element_to_its_place(pair: tuple[Case, Case], budget: int) -> None:
    source, target = pair
    for place in range(len(source.whole)):
        number, there = source.number(place), target.number(place)
        before, after = source.placed(number).spread, target.placed(there).spread
        ranks = frozenset(after.pieces)
        values = target.full(there).ravel()
        other = {int(v): int(w) for v, w in zip(source.full(number).ravel(), values, strict=True)}
        held = {h: np.array([other.get(int(v), 0) for v in source.tensor(h).ravel()], np.uint32) for h in before.pieces}
        bytes_of = {h: values.view(np.uint8)[4 * source.geometry.first(h, number) :] for h, values in held.items()}
        written = {h: np.zeros(target.tensor(h).size * 4, np.uint8) for h in ranks}
        times = {h: np.zeros(target.tensor(h).size * 4, int) for h in ranks}
        for slab in Transfer(before, after, 32, ranks).slabs(budget):
            read = [taken(bytes_of[r.rank], r).reshape(r.shape) for r in slab.reads]
            for check in slab.checks:
                other = read[check.target][check.target_slices]
                assert np.array_equal(np.broadcast_to(check.block(read), other.shape), other)
            for i, region in enumerate(slab.writes):
                block, count = np.zeros(region.shape, np.uint8), np.zeros(region.shape, int)
                for copy in slab.copies_to[i]:
                    block[copy.target_slices] = copy.block(read)
                    count[copy.target_slices] += 1
                first = 4 * target.geometry.first(region.rank, there)
                for offset, at, length in region.ranges(0, region.nbytes):
                    inside = slice(first + offset, first + offset + length)
                    written[region.rank][inside] += block.ravel()[at : at + length]
                    times[region.rank][inside] += count.ravel()[at : at + length]
        for h in ranks:
            first, mine = target.geometry.first(h, there), np.zeros(target.tensor(h).size, bool)
            mine[[first + where for piece in after.pieces[h] for _, where in elements(piece)]] = True
            found = written[h].view(np.uint32)
            assert np.array_equal(found[mine], target.tensor(h).ravel()[mine])  # and zeros in the padding
            assert (times[h].reshape(-1, 4) == mine[:, None]).all()


@examples(150)
@given(pairs(), st.randoms())
def test_boxes_bring_each_element_to_its_place(pair: tuple[Case, Case], random: Any) -> None:
    """From any of their sources, to each of their targets, whole or in parts; what is in none is padding."""
    source, target = pair
    for place in range(len(source.whole)):
        number, there = source.number(place), target.number(place)
        before, after = source.placed(number).spread, target.placed(there).spread
        matching = dict(zip(source.full(number).ravel().tolist(), target.full(there).ravel().tolist(), strict=True))
        times = {h: np.zeros(target.tensor(h).size, int) for h in after.pieces}
        for box in boxes(before, after):
            dim = random.randrange(len(box.shape)) if box.shape else 0
            ends = sorted({0, *(random.randint(0, n) for n in box.shape[dim : dim + 1]), *box.shape[dim : dim + 1]})
            for part in (box.within(dim, a, b - a) for a, b in itertools.pairwise(ends)) if box.shape else [box]:
                for local in itertools.product(*map(range, part.shape)):

                    def where(at: Position, case: Case, of: int, local: tuple[int, ...] = local) -> int:
                        first = case.geometry.first(at.holder, of) + at.base
                        return first + sum(i * stride for i, stride in zip(local, at.strides, strict=True))

                    values = {
                        matching[int(source.tensor(at.holder).ravel()[where(at, source, number)])]
                        for at in part.sources
                    }
                    for at in part.targets:
                        times[at.holder][where(at, target, there)] += 1
                        assert values == {int(target.tensor(at.holder).ravel()[where(at, target, there)])}
        for h, pieces in after.pieces.items():
            first, expected = target.geometry.first(h, there), np.zeros(len(times[h]), int)
            for index, at in (each for piece in pieces for each in elements(piece)):
                expected[first + at] += all(i < n for i, n in zip(index, after.full, strict=True))
            assert np.array_equal(times[h], expected)


@given(
    st.lists(st.tuples(st.integers(1, 3), st.integers(0, 20)), min_size=1, max_size=4),
    st.integers(0, 5),
    st.sampled_from([8, 16]),
    st.randoms(),
)
def test_rows_are_the_bytes_of_a_piece_in_order(dims: list[tuple[int, int]], base: int, bits: int, random) -> None:
    piece = Piece(tuple((Run(0, n),) for n, _ in dims), tuple(stride for _, stride in dims), base)
    order = random.sample(range(len(dims)), len(dims))
    local = itertools.product(*(range(dims[d][0]) for d in order))
    numbers = [base + sum(i * dims[d][1] for i, d in zip(index, order, strict=True)) for index in local]
    expected = [number * bits // 8 + byte for number in numbers for byte in range(bits // 8)]
    begin = random.randrange(len(expected))
    length = random.randint(1, len(expected) - begin)
    places = [offset + i for offset, _, n in rows_of(piece, order, bits).ranges(begin, length) for i in range(n)]
    assert places == expected[begin : begin + length]


def taken(data: np.ndarray, region: Region) -> np.ndarray:
    found = np.zeros(region.nbytes, np.uint8)
    for offset, at, length in region.ranges(0, region.nbytes):
        found[at : at + length] = data[offset : offset + length]
    return found


@given(st.integers(0, 7), st.integers(1, 8))
def test_elements_of_half_a_byte_are_moved_in_whole_bytes_or_refused(begin: int, length: int) -> None:
    length = min(length, 8 - begin)
    portion = Portion(cast(Any, None), None, None, 0, 1, LINE, (0,), (1,), 0, 0)
    layout = Layout(parse(""), (8,), (8,), {0: Box(((Run(0, 8),),), (8,))}, 1, (8,), frozenset(), "whole")
    part = replace(layout, boxes={0: Box(((Run(begin, length),),), (length,))})
    before, after = (Geometry((portion,), (of,), False).spread(0) for of in (layout, part))
    if begin % 2 or length % 2:
        with pytest.raises(PlanError, match="cut within a byte"):
            Transfer(before, after, 4, frozenset({0}))
        return
    (slab,) = Transfer(before, after, 4, frozenset({0})).slabs(1000)
    assert [(r.offset, r.nbytes) for r in slab.writes] == [(0, length // 2)]
    (block,) = slab.copies[0].source_slices
    first = slab.reads[0].offset + slab.reads[0].rows.offset
    assert (first + block.start, first + block.stop) == (begin // 2, (begin + length) // 2)
