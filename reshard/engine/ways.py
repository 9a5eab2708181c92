"""Chooses how a tensor goes from one plan to another."""

from __future__ import annotations

from collections.abc import Sequence

from formats.files.safetensors import DTYPE_BITS
from reshard.engine.regrid import Regrid
from reshard.engine.restate import Restate
from reshard.engine.transfer import Transfer, Way
from reshard.planning.plan import Entry
from reshard.storage.source import Places


def way_between(
    before: Entry,
    after: Entry,
    places: Places,
    ranks: frozenset[int],
    *,
    compare: bool = True,
    order: Sequence[int] = (),
) -> Way:
    """The way of a tensor to the target ranks ``ranks``.

    ``places`` gives its place in a source rank's files. Without ``compare`` only one of several replicas is read.
    ``order`` has the dimensions in the order in which the target stores them, if that is another.
    """
    if before.stated is not None and after.stated is not None:
        return Restate(before, before.stated, after.stated, places, ranks, compare=compare)
    bits = DTYPE_BITS[before.dtype]
    if before.layout.full != after.layout.full:
        return Regrid(before.layout, after.layout, bits, ranks)
    return Transfer(before.layout, after.layout, bits, ranks, compare=compare, order=order)
