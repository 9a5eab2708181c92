"""Moves tensors whose values state the shape of a weight: each rank gets the shape that the weight has there.

The rest of such a tensor is replicated (see ``formats.quantization.stated_shapes``). The tensors are small, so a whole
tensor is one slab.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from formats.errors import CheckpointError, MismatchError
from formats.quantization.stated_shapes import restated
from reshard.engine.transfer import Check, Copy, Edit, Region, Slab
from reshard.planning.stored import Stated
from reshard.storage.source import Places

_WHOLE = (slice(None),)


@dataclass(frozen=True, eq=False)
class Restate:
    """The way of such a tensor of ``nbytes`` from the source ranks ``holders`` to the target ranks ``ranks``.

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

    def slabs(self, budget: int) -> Iterator[Slab]:
        """One step for the whole tensor, whatever the budget."""
        first, *others = self.holders
        copies = [Copy(first, _WHOLE, rank, _WHOLE, self._edit(first, self.after(rank))) for rank in self.ranks]
        checks = [Check(rank, _WHOLE, first, _WHOLE, self._edit(rank, self.before(first))) for rank in others]
        reads, writes = (
            tuple(Region(rank, 0, (self.nbytes,)) for rank in ranks) for ranks in (self.holders, sorted(self.ranks))
        )
        yield Slab(reads, writes, tuple(copies), tuple(checks), is_flat=False)

    def _edit(self, source: int, shape: Sequence[int]) -> Edit:
        """Replaces the shape that a source rank must state by another; raises MismatchError if it states a third."""
        before, place = self.before(source), self.places(source)
        assert place is not None
        path = place.file.shown

        def edit(block: NDArray[np.uint8]) -> NDArray[np.uint8]:
            try:
                new = restated(block.tobytes(), self.dtype, before, shape)
            except CheckpointError as error:
                raise MismatchError(f"{path}: tensor '{self.name}' {error.message}", error.hint) from None
            return np.frombuffer(new, dtype=np.uint8)

        return edit
