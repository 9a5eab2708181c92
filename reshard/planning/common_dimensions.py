"""An atom's layouts on two sides with the same dimensions, where a side stores boxes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from formats.notation.axes import Run, product_runs
from reshard.planning.boxes import InBoxes, in_two
from reshard.planning.plan import Box, Layout
from reshard.planning.stored import Placed

Groups = tuple[tuple[int, ...], ...]
"""The factors of an atom that are one dimension, for each dimension."""


class Between(NamedTuple):
    """An atom's layouts here and there with the same dimensions.

    The dimensions are in the order of the source; ``order`` has them in the order of the target, () if it is the same.
    """

    before: Layout
    after: Layout
    order: tuple[int, ...]
    groups: Groups


def in_common(held: Placed, wanted: Placed) -> Between:
    """An atom's layouts here and there with the same dimensions, of which a side in boxes knows no finer ones.

    Raises PlanError if a box cuts through what the other side stores in another order.
    """
    source, target = held.portion.order, wanted.portion.order
    after = {factor: place for place, factor in enumerate(target)}
    starts = {group[0] for placed in (held, wanted) for group in _groups(placed)}
    blocks: list[tuple[int, ...]] = []
    for factor in source:
        is_next = blocks and after[blocks[-1][-1]] + 1 == after[factor]
        if is_next and factor not in starts:
            blocks[-1] += (factor,)
        else:
            blocks.append((factor,))
    order = sorted(range(len(blocks)), key=lambda number: after[blocks[number][0]])
    same = tuple(order) == tuple(range(len(blocks)))
    return Between(_over(held, blocks), _over(wanted, blocks), () if same else tuple(order), tuple(blocks))


def _groups(placed: Placed) -> tuple[tuple[int, ...], ...]:
    geometry = placed.stored.geometry
    return geometry.groups(placed.number) if isinstance(geometry, InBoxes) else ()


def _over(placed: Placed, blocks: Sequence[tuple[int, ...]]) -> Layout:
    """An atom's layout with a dimension for each block of factors."""
    layout, geometry = placed.layout, placed.stored.geometry
    if isinstance(geometry, InBoxes):
        whole = geometry.whole.layouts[placed.number]
        places = [(place, group) for place, group in enumerate(geometry.groups(placed.number))]
        split = [
            (place, sorted((block for block in blocks if block[0] in group), key=lambda block: group.index(block[0])))
            for place, group in places
        ]
        dims = {file: _split_runs(box.dims, split, whole.padded) for file, box in layout.boxes.items()}
        full, padded = (
            tuple(math.prod(of[factor] for factor in block) for block in blocks) for of in (whole.full, whole.padded)
        )
        runs = {file: tuple(found[block] for block in blocks) for file, found in dims.items()}
    else:
        full, padded = (
            tuple(math.prod(of[factor] for factor in block) for block in blocks) for of in (layout.full, layout.padded)
        )
        runs = {
            rank: tuple(tuple(product_runs([(box.dims[f], layout.padded[f]) for f in block])) for block in blocks)
            for rank, box in layout.boxes.items()
        }
    boxes = {rank: Box(found, tuple(sum(run.length for run in dim) for dim in found)) for rank, found in runs.items()}
    return replace(layout, full=full, padded=padded, boxes=boxes)


def _split_runs(
    dims: Sequence[Sequence[Run]],
    split: Sequence[tuple[int, Sequence[tuple[int, ...]]]],
    sizes: Sequence[int],
) -> dict[tuple[int, ...], tuple[Run, ...]]:
    """The run of each block, of which a dimension may have several."""
    found: dict[tuple[int, ...], tuple[Run, ...]] = {}
    for place, blocks in split:
        (run,) = dims[place]
        for number, block in enumerate(blocks):
            inner = math.prod(sizes[factor] for later in blocks[number + 1 :] for factor in later)
            outer, run = in_two(run, inner)
            found[block] = (outer,)
    return found
