"""Stored tensors in chunks: files that say for each piece of a tensor at which offsets it begins.

A *chunk* is a contiguous range of each dimension. Such a program's files are numbered, and a file has at most one chunk
of a tensor. A rank whose part is not one chunk (a packed gate and up, heads that do not divide) has several files. Each
chunk is written once, by the first rank that has it. Any reader finds its part among the chunks, whatever its own mesh.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from formats.errors import PlanError
from formats.files.chunks import Chunk
from formats.notation.axes import Run, merge_runs, product_runs
from reshard.mesh.plan import Box, Layout
from reshard.placement.geometry import Geometry, Lies, Rows
from reshard.placement.portions import Portion


class _Part(NamedTuple):
    """An atom's part in a chunk: a run for each of the atom's groups of factors, and where it lies."""

    runs: tuple[Run, ...]
    lies: Lies


@dataclass(frozen=True, eq=False)
class InChunks:
    """Where the atoms of a stored tensor lie in its chunks: like ``Geometry``, with files instead of ranks.

    ``whole`` is the geometry of the whole tensor. ``chunks`` has the chunk of each file, ``files`` is their number.
    """

    whole: Geometry
    chunks: Mapping[int, Chunk]
    files: int

    @property
    def portions(self) -> tuple[Portion, ...]:
        """As of the whole tensor."""
        return self.whole.portions

    @property
    def is_stack(self) -> bool:
        """As of the whole tensor."""
        return self.whole.is_stack

    @property
    def holders(self) -> Iterable[int]:
        """The files that have a chunk."""
        return self.chunks

    def shape(self, file: int) -> tuple[int, ...] | None:
        """The shape of a file's chunk; None if it has none."""
        return self.chunks[file].shape if file in self.chunks else None

    def lies(self, file: int, number: int) -> Lies | None:
        """Where an atom lies in a file's chunk; None if it has no part of it."""
        part = self._parts[number].get(file)
        return part.lies if part else None

    @cached_property
    def layouts(self) -> tuple[Layout, ...]:
        """The layout of each atom over the files, with a dimension for each group of factors."""
        return tuple(self._layout(number, parts) for number, parts in enumerate(self._parts))

    def groups(self, number: int) -> tuple[tuple[int, ...], ...]:
        """The factors of an atom that are one dimension, in the stored order."""
        return stored_dims(self.portions, number)

    @cached_property
    def _parts(self) -> tuple[Mapping[int, _Part], ...]:
        found: tuple[dict[int, _Part], ...] = tuple({} for _ in self.whole.layouts)
        slots = len(self.portions)
        for file, at in self.chunks.items():
            # A chunk has a few places of a stack. Not to look at the others keeps the work linear: experts x chunks.
            places = range(at.offset[0], at.end[0]) if self.is_stack else range(1)
            for number in range(places.start * slots, places.stop * slots):
                part = self._part(at, number)
                if part is not None:
                    found[number][file] = part
        return found

    @cached_property
    def _known(self) -> dict[tuple[object, ...], Layout]:
        return {}

    def _layout(self, number: int, parts: Mapping[int, _Part]) -> Layout:
        of, runs = self.whole.layouts[number], tuple((file, part.runs) for file, part in parts.items())
        key = (of, self.portions[number % len(self.portions)], runs)
        if key not in self._known:
            groups = self.groups(number)
            full, padded = (
                tuple(math.prod(sizes[f] for f in group) for group in groups) for sizes in (of.full, of.padded)
            )
            boxes = {
                file: Box(tuple((run,) for run in found), tuple(run.length for run in found)) for file, found in runs
            }
            parallel = frozenset(range(len(full)))
            self._known[key] = Layout(of.rule, full, padded, boxes, self.files, of.stored, parallel, True)
        return self._known[key]

    def _part(self, at: Chunk, number: int) -> _Part | None:
        """An atom's part in a chunk that has its place of the stack."""
        place, slot = divmod(number, len(self.portions))
        offset, shape, before = at.offset, at.shape, 0
        if self.is_stack:
            before, offset, shape = place - offset[0], offset[1:], shape[1:]
        base, rows = before * math.prod(shape), None
        runs: list[Run] = []
        for dim in range(len(shape)):
            run = Run(offset[dim], shape[dim])
            if dim != self.portions[0].dim or len(self.portions) == 1:
                runs.append(run)
                continue
            portion, (begin, end, total) = self.portions[slot], self.extent(place, slot)
            lead, inner = in_two(run, total)
            first, last = max(inner.offset, begin), min(inner.end, end)
            if first >= last:
                return None
            runs += [lead] if portion.lead else []
            runs.append(Run(first - begin, last - first))
            behind = math.prod(shape[dim + 1 :])
            base += (first - inner.offset) * behind
            if math.prod(shape[:dim]) * lead.length > 1 and last - first < inner.length:
                rows = Rows(self.whole.nbytes((last - first) * behind), self.whole.nbytes(inner.length * behind))
        return _Part(tuple(runs), Lies(self.whole.nbytes(base), rows))

    def extent(self, place: int, slot: int) -> tuple[int, int, int]:
        """Where an atom begins and ends along the dimension in which atoms are joined, and the length of all."""
        layouts = self.whole.layouts[place * len(self.portions) :]
        ends = [0]
        for portion, layout in zip(self.portions, layouts, strict=False):
            own = _of_dim(portion, portion.dim)[portion.lead :]
            ends.append(ends[-1] + math.prod(layout.padded[factor] for factor in own))
        return ends[slot], ends[slot + 1], ends[-1]


def stored_dims(portions: Sequence[Portion], number: int) -> tuple[tuple[int, ...], ...]:
    """The factors of an atom in each stored dimension, in the stored order; those before what is joined are apart."""
    portion, found, start = portions[number % len(portions)], [], 0
    for dim, count in enumerate(portion.counts):
        lead = portion.lead if dim == portion.dim and len(portions) > 1 else 0
        found += [portion.order[start : start + lead]] if lead else []
        found.append(portion.order[start + lead : start + count])
        start += count
    return tuple(found)


def in_two(run: Run, inner: int) -> tuple[Run, Run]:
    """A run as a product of two: a run of rows of ``inner`` indices, and a run within a row. Raises PlanError if the
    run is neither whole rows nor a part of one row.
    """
    if run.offset % inner == 0 and run.length % inner == 0:
        return Run(run.offset // inner, run.length // inner), Run(0, inner)
    if run.offset // inner == (run.end - 1) // inner:
        return Run(run.offset // inner, 1), Run(run.offset % inner, run.length)
    raise PlanError(
        f"indices {run.offset} to {run.end} of a stored dimension are neither whole blocks of {inner} nor a part of one"
    )


def _of_dim(portion: Portion, dim: int) -> tuple[int, ...]:
    """The factors of a stored dimension, in the stored order."""
    start = sum(portion.counts[:dim])
    return portion.order[start : start + portion.counts[dim]]


def chunks_on(geometry: Geometry) -> dict[int, Chunk]:
    """The chunks of a stored tensor on a mesh, by the number of their file: the rank, plus the number of ranks for each
    further chunk of it.

    All ranks' runs are cut wherever any rank's run begins or ends, so two chunks are equal or disjoint.
    """
    owned = {rank: dims for rank in geometry.holders if (dims := dims_of(geometry, rank)) is not None}
    ends = [
        {end for run in itertools.chain(*of) for end in (run.offset, run.end)}
        for of in zip(*owned.values(), strict=True)
    ]
    cuts = [sorted(of) for of in ends]
    found: dict[Chunk, int] = {}
    for rank, dims in owned.items():
        pieces = [[piece for run in runs for piece in _cut(run, at)] for runs, at in zip(dims, cuts, strict=True)]
        for number, chunk in enumerate(itertools.product(*pieces)):
            at = Chunk(tuple(run.offset for run in chunk), tuple(run.length for run in chunk))
            found.setdefault(at, number * len(geometry.holders) + rank)
    return {file: at for at, file in found.items()}


def _cut(run: Run, cuts: Sequence[int]) -> Iterator[Run]:
    ends = [run.offset, *(cut for cut in cuts if run.offset < cut < run.end), run.end]
    return (Run(begin, end - begin) for begin, end in itertools.pairwise(ends))


def dims_of(geometry: Geometry, rank: int) -> list[list[Run]] | None:
    """The runs of each stored dimension that a rank has; None if it has nothing of the tensor."""
    slots = len(geometry.portions)
    places = [i // slots for i in range(0, len(geometry.layouts), slots) if rank in geometry.layouts[i].boxes]
    if not places:
        return None
    dims = [list(merge_runs(Run(place, 1) for place in places))] if geometry.is_stack else []
    first = geometry.portions[0]
    for dim in range(len(first.counts)):
        runs, base = [], 0
        outer: list[tuple[tuple[Run, ...], int]] = []
        for slot in range(slots if dim == first.dim else 1):
            layout, factors = geometry.layouts[places[0] * slots + slot], _of_dim(geometry.portions[slot], dim)
            of = [(layout.boxes[rank].dims[factor], layout.padded[factor]) for factor in factors]
            lead = first.lead if dim == first.dim else 0
            outer = outer or of[:lead]
            runs += [Run(base + run.offset, run.length) for run in product_runs(of[lead:])]
            base += math.prod(size for _, size in of[lead:])
        dims.append(list(merge_runs(product_runs([*outer, (tuple(merge_runs(runs)), base)]))))
    return dims
