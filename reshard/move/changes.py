"""Changes to a tensor that is not moved as it is: only named changes are possible, others are refused.

Scales of scale blocks of another size (``Regrid``), or a shape that a tensor states of its weight (``Restate``).
Changes of each element are in ``reshard.move.elements``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from formats.errors import CheckpointError, MismatchError
from formats.notation.axes import Run
from formats.quantization.stated_shapes import restated
from reshard.move.elements import Edit
from reshard.move.slabs import Check, Copy, Region, Rows, Slab, Slices, rows_of
from reshard.placement.pieces import Piece, Spread
from reshard.placement.stored import Stated
from reshard.source.source import Places

# ------------------------------------------------------------------------------------------------------- scale blocks

Indices = NDArray[np.int64]


class Regrid:
    """The way of the scales of a quantized weight to smaller scale blocks, and back.

    A scale for 128 rows means the same as two equal scales for 64 rows each. Where a rank's boundary would cut a scale
    block, all scale blocks are made smaller, and each scale is repeated for every part (``--refine-blocks``). On the
    way back, the repeated scales must be equal. These tensors are small, so a whole tensor is one slab.
    """

    def __init__(
        self, source: Spread, target: Spread, steps: Sequence[tuple[int, int]], item_bits: int, ranks: frozenset[int]
    ) -> None:
        """``source`` and ``target`` are spreads of the same scales; ``steps`` has the size of a scale block along each
        dimension, before and after; ``item_bits`` is the size of a scale in bits.
        """
        self._item, self._steps = item_bits // 8, steps
        sources = [(rank, piece) for rank, of in source.pieces.items() for piece in of]
        targets = [(rank, piece) for rank, of in target.pieces.items() if rank in ranks for piece in of]
        self._reads, self._writes = (tuple(self._region(*each) for each in of) for of in (sources, targets))
        self._sources, self._targets = ([_indices(piece.runs) for _, piece in of] for of in (sources, targets))

    @property
    def written(self) -> tuple[Rows, ...]:
        """The bytes that it writes of each piece of the target."""
        return tuple(region.rows for region in self._writes)

    @property
    def in_one_piece(self) -> bool:
        """Whether what it reads and writes of each rank lies in one piece."""
        return not any(region.rows.outer for region in (*self._reads, *self._writes))

    def slabs(self, budget: int) -> Iterator[Slab]:
        """One step for the whole tensor, whatever the budget."""
        copies = [copy for number in range(len(self._targets)) for copy in self._copies(number)]
        checks = [check for number in range(len(self._sources)) for check in self._checks(number)]
        yield Slab(self._reads, self._writes, tuple(copies), tuple(checks), is_flat=False)

    def _region(self, rank: int, piece: Piece) -> Region:
        rows = rows_of(piece, range(len(piece.shape)), self._item * 8)
        return Region(rank, 0, (*piece.shape, self._item), rows)

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
        """The source's pieces that together have the wanted indices.

        Each comes with the positions of its indices in ``wanted``, and their positions in the piece.
        """
        covered = np.zeros([len(indices) for indices in wanted], dtype=bool)
        for number, held in enumerate(self._sources):
            places = [np.flatnonzero(np.isin(indices, mine)) for indices, mine in zip(wanted, held, strict=True)]
            here = np.ix_(*places)
            if covered[here].all():
                continue
            covered[here] = True
            triples = zip(held, wanted, places, strict=True)
            local = [np.searchsorted(mine, indices[at]) for mine, indices, at in triples]
            yield number, here, np.ix_(*local)


def _first(blocks: Indices, step: int, other: int) -> Indices:
    """For each scale block of ``step`` indices, the first that begins in the same scale block of ``other`` indices."""
    if other <= step:
        return blocks
    begins_in = blocks * step // other
    return begins_in * other // step


def _indices(dims: Sequence[Sequence[Run]]) -> list[Indices]:
    return [np.concatenate([np.arange(run.offset, run.end) for run in runs]) for runs in dims]


# ------------------------------------------------------------------------------------------------------ stated shapes

_WHOLE = (slice(None),)


@dataclass(frozen=True, eq=False)
class Restate:
    """The way of a tensor whose values state the shape of a weight: each rank gets the shape that the weight has there.

    The rest of such a tensor is replicated (see ``formats.quantization.stated_shapes``). It has ``nbytes``, which is
    little, so all of it is one slab. It goes from the source ranks ``holders`` to the target ranks ``ranks``;
    ``before`` and ``after`` have the shape that it states on a rank, ``places`` its place in a source rank's files.
    """

    name: str
    dtype: str
    nbytes: int
    holders: Sequence[int]
    before: Stated
    after: Stated
    places: Places
    ranks: frozenset[int]

    in_one_piece: ClassVar[bool] = True

    @property
    def written(self) -> tuple[Rows, ...]:
        """The bytes of the tensor, on each target rank."""
        return (Rows(0, (), self.nbytes),) * len(self.ranks)

    def slabs(self, budget: int) -> Iterator[Slab]:
        """One step for the whole tensor, whatever the budget."""
        (first, *others), ranks = self.holders, sorted(self.ranks)
        copies = [
            Copy(0, _WHOLE, number, _WHOLE, self._edit(first, self.after(rank))) for number, rank in enumerate(ranks)
        ]
        checks = [
            Check(number, _WHOLE, 0, _WHOLE, self._edit(rank, self.before(first)))
            for number, rank in enumerate(others, 1)
        ]
        reads, writes = (
            tuple(Region(rank, 0, (self.nbytes,), Rows(0, (), self.nbytes)) for rank in of)
            for of in (self.holders, ranks)
        )
        yield Slab(reads, writes, tuple(copies), tuple(checks), is_flat=False)

    def _edit(self, source: int, shape: Sequence[int]) -> Edit:
        """Replaces the shape that a source rank must state by another; raises MismatchError if it states a third."""
        before, place = self.before(source), self.places(source)
        assert place is not None
        path = place.file.path

        def edit(block: NDArray[np.uint8]) -> NDArray[np.uint8]:
            try:
                new = restated(block.tobytes(), self.dtype, before, shape)
            except CheckpointError as error:
                raise MismatchError(f"{path}: tensor '{self.name}' {error.message}", error.hint) from None
            return np.frombuffer(new, dtype=np.uint8)

        return edit
