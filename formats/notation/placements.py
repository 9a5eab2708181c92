"""The indices of each dimension that a rank holds of a tensor that torch has sharded, from its placements alone.

torch's own function (``compute_local_shape_and_global_offset``, torch 2.13) gives one box from the first offset, and is
silent where the rank's indices have holes. Here they are runs. A strided placement can be read in two ways, and torch
uses both: ``distribute_tensor`` makes the one, ``fully_shard`` of a module that is sharded already the other. They
differ only where sizes do not divide, and then the shape of the local tensor decides.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from reshard.formats.errors import PlanError
from reshard.formats.notation.axes import Run, merge_runs

Runs = tuple[Run, ...]


class ShardedDim(NamedTuple):
    """A mesh dimension cuts dimension ``dim`` of the tensor (``Shard``).

    With ``parts`` (``_StridedShard``) each of so many parts of it is cut, and a rank has its piece of every part.
    """

    dim: int
    parts: int = 1


Placements = Sequence[ShardedDim | None]
"""The cut along each dimension of the mesh; ``None``: its ranks hold the same."""


def cut(runs: Runs, pieces: int, index: int) -> Runs:
    """Piece ``index`` of the indices in ``runs``, as ``torch.chunk`` cuts: the last pieces may be short or empty."""
    total = sum(run.length for run in runs)
    length = -(-total // pieces)
    begin, end = min(total, index * length), min(total, (index + 1) * length)
    piece, at = [], 0
    for run in runs:
        low, high = max(begin - at, 0), min(end - at, run.length)
        if low < high:
            piece.append(Run(run.offset + low, high - low))
        at += run.length
    return tuple(piece)


def runs_of(
    shape: Sequence[int], sizes: Sequence[int], coordinate: Sequence[int], placements: Placements, local: Sequence[int]
) -> tuple[Runs, ...]:
    """The runs of each dimension that the rank at ``coordinate`` of a mesh of ``sizes`` holds of a tensor of ``shape``.

    ``local`` is the shape of the rank's own tensor. Where both readings fit it, what ``fully_shard`` makes is meant: if
    ``distribute_tensor`` made it, the runs of all ranks do not cover the tensor. Raises PlanError if no reading fits,
    or if both do and that would not show: where three dimensions of the mesh cut one of the tensor.
    """
    if not shape:
        return ()
    readings = (_sharded_last(shape, sizes, coordinate, placements), in_order(shape, sizes, coordinate, placements))
    sized = tuple(local)
    fitting = [cut for cut in readings if cut and tuple(sum(run.length for run in dim) for dim in cut) == sized]
    dims = [cut.dim for cut in placements if cut is not None]
    if fitting and (fitting[0] == fitting[-1] or max(map(dims.count, dims)) < 3):
        return fitting[0]
    raise PlanError(
        f"{'two readings' if fitting else 'no reading'} of {_shown(placements)} on a mesh {'x'.join(map(str, sizes))}"
        f" of a tensor {[*shape]} give the rank at {[*coordinate]} its part {[*local]}"
    )


def in_order(
    shape: Sequence[int], sizes: Sequence[int], coordinate: Sequence[int], placements: Placements
) -> tuple[Runs, ...]:
    """Return a rank's runs as ``distribute_tensor`` makes them: each dimension of the mesh cuts what earlier
    ones left.
    """
    dims = _whole(shape)
    for size, index, placement in zip(sizes, coordinate, placements, strict=True):
        if placement is not None:
            dim, parts = placement
            dims[dim] = tuple(
                run for part in range(parts) for run in cut(cut(dims[dim], parts, part), size, index)
            )  # fmt: skip
    return _joined(dims)


def _sharded_last(
    shape: Sequence[int], sizes: Sequence[int], coordinate: Sequence[int], placements: Placements
) -> tuple[Runs, ...] | None:
    """Return a rank's runs as ``fully_shard`` makes them of a tensor that was sharded over later dimensions of the
    mesh, whose cuts come first.

    ``None`` if the strided placements do not say exactly that.
    """
    dims, pieces = _whole(shape), [1] * len(shape)
    cuts = [(at, placement) for at, placement in enumerate(placements) if placement is not None]
    plain = [(at, placed) for at, placed in cuts if placed.parts == 1]
    for at, (dim, parts) in [*plain, *reversed([(at, placed) for at, placed in cuts if placed.parts > 1])]:
        later = math.prod(sizes[other] for other, placed in cuts if other > at and placed.dim == dim)
        if parts > 1 and not parts == later == pieces[dim]:
            return None
        dims[dim] = cut(dims[dim], sizes[at], coordinate[at])
        pieces[dim] *= sizes[at]
    return _joined(dims)


def _whole(shape: Sequence[int]) -> list[Runs]:
    return [(Run(0, size),) if size else () for size in shape]


def _joined(dims: Sequence[Runs]) -> tuple[Runs, ...]:
    return tuple(tuple(merge_runs(runs)) for runs in dims)


def _shown(placements: Placements) -> str:
    return f"[{', '.join('Replicate()' if placement is None else _named(placement) for placement in placements)}]"


def _named(cut: ShardedDim) -> str:
    return f"Shard({cut.dim})" if cut.parts == 1 else f"_StridedShard({cut.dim}, {cut.parts})"
