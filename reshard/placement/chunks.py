"""The chunks of a stored tensor on a mesh: files that say for each piece of a tensor at which offsets it begins.

A *chunk* is a contiguous range of each dimension. Such a program's files are numbered, and a file has at most one chunk
of a tensor. A rank whose part is not one chunk (a packed gate and up, heads that do not divide) has several files. Each
chunk is written once, by the first rank that has it. Any reader finds its part among the chunks, whatever its own mesh.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence

from formats.files.chunks import Chunk
from formats.notation.axes import Run, merge_runs, product_runs
from reshard.placement.geometry import Geometry, of_dim


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
    found, ranks = dict[Chunk, int](), geometry.layouts[0].ranks
    for rank, dims in owned.items():
        pieces = [[piece for run in runs for piece in _cut(run, at)] for runs, at in zip(dims, cuts, strict=True)]
        for number, chunk in enumerate(itertools.product(*pieces)):
            at = Chunk(tuple(run.offset for run in chunk), tuple(run.length for run in chunk))
            found.setdefault(at, number * ranks + rank)
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
            layout, factors = geometry.layouts[places[0] * slots + slot], of_dim(geometry.portions[slot], dim)
            of = [(layout.boxes[rank].dims[factor], layout.padded[factor]) for factor in factors]
            lead = first.lead if dim == first.dim else 0
            outer = outer or of[:lead]
            runs += [Run(base + run.offset, run.length) for run in product_runs(of[lead:])]
            base += math.prod(size for _, size in of[lead:])
        dims.append(list(merge_runs(product_runs([*outer, (tuple(merge_runs(runs)), base)]))))
    return dims
