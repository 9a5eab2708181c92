"""Moves the scales of quantized weights to smaller scale blocks, and back.

A scale for 128 rows means the same as two equal scales for 64 rows each. Where a rank's boundary would cut a scale
block, all scale blocks are made smaller, and each scale is repeated for every part (``--refine-blocks``). On the way
back, the repeated scales must be equal. These tensors are small, so a whole tensor is one slab.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from formats.notation.axes import Run
from reshard.engine.transfer import Check, Copy, Region, Slab, Slices
from reshard.planning.plan import Layout

Indices = NDArray[np.int64]


class Regrid:
    """The way of a tensor between two layouts with scale blocks of different sizes."""

    def __init__(
        self, source: Layout, target: Layout, steps: Sequence[tuple[int, int]], item_bits: int, ranks: frozenset[int]
    ) -> None:
        """``source`` and ``target`` are layouts of the same scales; ``steps`` has the size of a scale block along each
        dimension, before and after; ``item_bits`` is the size of a scale in bits.
        """
        self._item, self._steps = item_bits // 8, steps
        self._sources = {rank: _indices(box.dims) for rank, box in source.boxes.items()}
        self._targets = {rank: _indices(box.dims) for rank, box in target.boxes.items() if rank in ranks}

    def slabs(self, budget: int) -> Iterator[Slab]:
        """One step for the whole tensor, whatever the budget."""
        reads = tuple(self._region(rank, held) for rank, held in self._sources.items())
        writes = tuple(self._region(rank, held) for rank, held in self._targets.items())
        copies = [copy for rank in self._targets for copy in self._copies(rank)]
        checks = [check for rank in self._sources for check in self._checks(rank)]
        yield Slab(reads, writes, tuple(copies), tuple(checks), is_flat=False)

    def _region(self, rank: int, indices: Sequence[Indices]) -> Region:
        return Region(rank, 0, (*(len(found) for found in indices), self._item))

    def _copies(self, target: int) -> Iterator[Copy]:
        """Each scale of a target comes from the source's scale block at the same indices: the first, if several."""
        held = self._targets[target]
        firsts = [found * b // a for found, (a, b) in zip(held, self._steps, strict=True)]
        for source, here, there in self._holders(firsts):
            yield Copy(source, there, target, here)

    def _checks(self, source: int) -> Iterator[Check]:
        """Each scale of a source must equal the first scale of the target's larger scale block."""
        held = self._sources[source]
        firsts = [_first(found, here, there) for found, (here, there) in zip(held, self._steps, strict=True)]
        for other, here, there in self._holders(firsts):
            yield Check(source, here, other, there)

    def _holders(self, wanted: Sequence[Indices]) -> Iterator[tuple[int, Slices, Slices]]:
        """The source ranks that together hold the wanted indices.

        Each comes with the positions of its indices in ``wanted``, and their positions in the rank's own tensor.
        """
        covered = np.zeros([len(indices) for indices in wanted], dtype=bool)
        for rank, held in self._sources.items():
            places = [np.flatnonzero(np.isin(indices, mine)) for indices, mine in zip(wanted, held, strict=True)]
            here = np.ix_(*places)
            if covered[here].all():
                continue
            covered[here] = True
            triples = zip(held, wanted, places, strict=True)
            local = [np.searchsorted(mine, indices[at]) for mine, indices, at in triples]
            yield rank, here, np.ix_(*local)


def _first(blocks: Indices, step: int, other: int) -> Indices:
    """For each scale block of ``step`` indices, the first that begins in the same scale block of ``other`` indices."""
    if other <= step:
        return blocks
    begins_in = blocks * step // other
    return begins_in * other // step


def _indices(dims: Sequence[Sequence[Run]]) -> list[Indices]:
    return [np.concatenate([np.arange(run.offset, run.end) for run in runs]) for runs in dims]
