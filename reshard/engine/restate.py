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
from formats.files.safetensors import tensor_bytes
from formats.quantization.stated_shapes import restated
from reshard.engine.transfer import Check, Copy, Edit, Region, Slab
from reshard.planning.plan import Entry, Layout
from reshard.storage.source import Places

_WHOLE = (slice(None),)


@dataclass(frozen=True, eq=False)
class Restate:
    """The way of such a tensor from the source ranks to the target ranks.

    ``before`` and ``after`` are the layouts of the weight. Without ``compare`` only one source rank is read.
    """

    entry: Entry
    before: Layout
    after: Layout
    places: Places
    ranks: frozenset[int]
    compare: bool = True

    def slabs(self, budget: int) -> Iterator[Slab]:
        """One step for the whole tensor, whatever the budget."""
        nbytes = tensor_bytes(self.entry.name, self.entry.dtype, self.entry.layout.stored)
        held = [rank for rank in range(self.before.ranks) if self.places(rank) is not None]
        first, *others = held if self.compare else held[:1]
        copies = [
            Copy(first, _WHOLE, rank, _WHOLE, self._edit(first, self.after.boxes[rank].shape)) for rank in self.ranks
        ]
        shape = self.before.boxes[first].shape
        checks = [Check(rank, _WHOLE, first, _WHOLE, self._edit(rank, shape)) for rank in others]
        reads, writes = (
            tuple(Region(rank, 0, (nbytes,)) for rank in ranks) for ranks in ([first, *others], sorted(self.ranks))
        )
        yield Slab(reads, writes, tuple(copies), tuple(checks), is_flat=False)

    def _edit(self, source: int, shape: Sequence[int]) -> Edit:
        """Replaces the shape that a source rank must state by another; raises MismatchError if it states a third."""
        before = self.before.boxes[source].shape
        place = self.places(source)
        assert place is not None
        path = place.file.shown

        def edit(block: NDArray[np.uint8]) -> NDArray[np.uint8]:
            try:
                new = restated(block.tobytes(), self.entry.dtype, before, shape)
            except CheckpointError as error:
                raise MismatchError(f"{path}: tensor '{self.entry.name}' {error.message}", error.hint) from None
            return np.frombuffer(new, dtype=np.uint8)

        return edit
