"""The scales of quantized weights on a finer grid of blocks, and back: the way of a tensor between grids.

A scale for 128 rows says the same as two equal scales for 64 rows each. Where a rank's boundary falls inside a block,
all blocks are made smaller, and each scale stands once for every part (``--refine-blocks``). On the way back, scales
that were one must be equal. These tensors are small, so that a whole one is a single slab.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from formats.axes import Run, owned
from formats.blocks import block_size, with_block_size
from formats.mesh import Mesh
from reshard.plan import FullTensor, Layout, Model, bind, shares_of
from reshard.transfer import Check, Copy, Region, Slab, Slices


def finer_blocks(model: Model, mesh: Mesh) -> tuple[int, int] | None:
    """The largest block size of which every rank's boundaries are multiples; None if that is the model's own."""
    block = block_size(model.config)
    if block is None:
        return None
    common = list(block)
    for tensor in model.in_blocks:
        sizes = model.sizes.of(dict(tensor.indices))
        for place, dim in zip((-2, -1), tensor.rule.dims[-2:], strict=True):
            whole = replace(dim, step=1)
            for rank in range(mesh.size):
                runs = owned(whole, sizes, shares_of(model, mesh, rank, sizes, tensor.axes))
                edges = {edge for run in runs for edge in (run.offset, run.end)} - {whole.size(sizes)}
                common[place] = math.gcd(common[place], *edges)
    return None if tuple(common) == block else (common[0], common[1])


def with_blocks(model: Model, block: tuple[int, int]) -> Model:
    """The same model with scales for blocks of another size."""
    blocked = {tensor.name for tensor in model.tensors if any(dim.step > 1 for dim in tensor.rule.dims)}
    tensors = [FullTensor(t.name, t.dtype, None if t.name in blocked else t.shape, "") for t in model.tensors]
    return bind(model.architecture, with_block_size(model.config, block), tensors, known=model.sizes.measured)


Indices = NDArray[np.int64]


class Regrid:
    """The way of a tensor between two layouts whose dimensions are counted in blocks of different sizes."""

    def __init__(self, source: Layout, target: Layout, item_bits: int, ranks: frozenset[int]) -> None:
        """Layouts of the same scales; ``item_bits`` is the size of a scale."""
        self._item = item_bits // 8
        self._steps = [(a.step, b.step) for a, b in zip(source.rule.dims, target.rule.dims, strict=True)]
        self._sources = {rank: _indices(box.dims) for rank, box in enumerate(source.boxes) if box}
        self._targets = {rank: _indices(box.dims) for rank, box in enumerate(target.boxes) if box and rank in ranks}

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
        """Each scale of a target comes from the first of the source's blocks that lie in its own."""
        held = self._targets[target]
        firsts = [found * b // a for found, (a, b) in zip(held, self._steps, strict=True)]
        for source, here, there in self._holders(firsts):
            yield Copy(source, there, target, here)

    def _checks(self, source: int) -> Iterator[Check]:
        """Each scale of a source equals the first of those that were one."""
        held = self._sources[source]
        firsts = [found * a // max(a, b) * max(a, b) // a for found, (a, b) in zip(held, self._steps, strict=True)]
        for other, here, there in self._holders(firsts):
            yield Check(source, here, other, there)

    def _holders(self, wanted: Sequence[Indices]) -> Iterator[tuple[int, Slices, Slices]]:
        """The source ranks that together hold the wanted indices, with the places in the request and in the rank."""
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


def _indices(dims: Sequence[Sequence[Run]]) -> list[Indices]:
    return [np.concatenate([np.arange(run.offset, run.end) for run in runs]) for runs in dims]
