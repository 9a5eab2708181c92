"""An atom's layouts in source and target, in the same dimensions."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import NamedTuple

from formats.notation.axes import Run, product_runs
from reshard.mesh.plan import Box, Layout
from reshard.placement.chunks import in_two
from reshard.placement.stored import Placed

Groups = tuple[tuple[int, ...], ...]
"""The factors of an atom that are one dimension, for each dimension."""


class Between(NamedTuple):
    """An atom's layouts in source and target with the same dimensions, without ranks that have zeros or nothing.

    The dimensions are in the order of the source; ``order`` has them in the order of the target, () if it is the same.
    """

    before: Layout
    after: Layout
    order: tuple[int, ...]
    groups: Groups


def in_common(held: Placed, wanted: Placed) -> Between:
    """An atom's layouts in source and target with the same dimensions: its factors, or coarser ones if a side has
    chunks.

    Raises PlanError if a chunk cuts through what the other side stores in another order.
    """
    source, target = held.portion.order, wanted.portion.order
    if sorted(source) != sorted(target):
        return Between(held.layout, wanted.layout, (), ())
    coarse = [placed for placed in (held, wanted) if placed.stored.geometry.chunks is not None]
    starts = {group[0] for placed in coarse or [held] for group in placed.stored.geometry.groups(placed.number)}
    blocks = blocks_of(source, target, starts)
    after = {factor: place for place, factor in enumerate(target)}
    order = sorted(range(len(blocks)), key=lambda number: after[blocks[number][0]])
    same = tuple(order) == tuple(range(len(blocks)))
    return Between(over(held, blocks), over(wanted, blocks), () if same else tuple(order), blocks)


def blocks_of(source: Sequence[int], target: Sequence[int], starts: Collection[int]) -> Groups:
    """Factors that follow each other in both orders, together; each of ``starts`` begins a block of its own."""
    after = {factor: place for place, factor in enumerate(target)}
    blocks: list[tuple[int, ...]] = []
    for factor in source:
        is_next = blocks and after[blocks[-1][-1]] + 1 == after[factor]
        if is_next and factor not in starts:
            blocks[-1] += (factor,)
        else:
            blocks.append((factor,))
    return tuple(blocks)


def over(placed: Placed, blocks: Groups) -> Layout:
    """An atom's layout with a dimension for each block of factors. Raises PlanError (see ``in_common``)."""
    layout, geometry, gone = placed.layout, placed.stored.geometry, placed.zeros | placed.layout.empty
    if geometry.chunks is None and not gone and [*blocks] == [(factor,) for factor in range(len(layout.full))]:
        return layout
    sizes = geometry.whole.layouts[placed.number]
    full, padded = (
        tuple(math.prod(of[factor] for factor in block) for block in blocks) for of in (sizes.full, sizes.padded)
    )
    boxes = {}
    for holder, box in layout.boxes.items():
        if holder in gone:
            continue
        if geometry.chunks is None:
            dims = [tuple(product_runs([(box.dims[f], layout.padded[f]) for f in block])) for block in blocks]
        else:
            dims = _split_runs(box.dims, geometry.groups(placed.number), blocks, sizes.padded)
        boxes[holder] = Box(tuple(dims), tuple(sum(run.length for run in dim) for dim in dims))
    return replace(layout, full=full, padded=padded, boxes=boxes)


def _split_runs(
    dims: Sequence[Sequence[Run]], groups: Groups, blocks: Sequence[tuple[int, ...]], sizes: Sequence[int]
) -> list[tuple[Run, ...]]:
    """The run of each block, of which a dimension of chunks may have several."""
    found: dict[tuple[int, ...], tuple[Run, ...]] = {}
    for (run,), group in zip(dims, groups, strict=True):
        inside = sorted((block for block in blocks if block[0] in group), key=lambda block: group.index(block[0]))
        for number, block in enumerate(inside):
            inner = math.prod(sizes[factor] for later in inside[number + 1 :] for factor in later)
            outer, run = in_two(run, inner)
            found[block] = (outer,)
    return [found[block] for block in blocks]
