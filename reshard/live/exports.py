"""The plan of a push for those who move the bytes themselves: as objects and JSON, and as placements of DTensors."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from formats.errors import PlanError
from formats.notation.axes import Run
from formats.notation.placements import Cut, in_order
from reshard.live.meshes import Target, arranged, target_of, trainer_state
from reshard.live.routing import BUCKET, Routes, plan_push, view_of
from reshard.source.opening import Access, Place
from reshard.store.selection import Weights
from reshard.transforms.opening import open_any


def routes(
    checkpoint: Place, *, source: Target | str, target: Target | str, bucket: int = BUCKET, **access: Any
) -> Routes:
    """The plan of a push of a checkpoint's model between ranks that need not run, such as ``fsdp2:8`` and ``vllm:tp4``.

    ``access`` are the fields of ``reshard.source.opening.Access``. Reads headers only. Raises ReshardError.
    """
    opened = open_any(checkpoint, Access(**access), Weights.HEADERS)
    trainer, other = (target_of(end) if isinstance(end, str) else end for end in (source, target))
    return plan_push(opened.model, trainer_state(opened.model, trainer), other, bucket=bucket)


def document(plan: Routes) -> Iterator[dict[str, Any]]:
    """The blocks of a plan as JSON objects: rank by rank of the source, in the order in which each sends.

    A block goes from rank ``from`` of the source to rank ``to`` of the target, in step ``step``: on each side a view of
    the rank's own contiguous tensor, with ``offset``, ``shape`` and ``stride`` in elements. Both views have one shape.
    """
    for sender in range(plan.source.ranks):
        for step, parts in enumerate(plan.parts(sender)):
            for part in parts:
                sent, received = view_of(part, plan.source, sends=True), view_of(part, plan.target, sends=False)
                yield {
                    "step": step, "from": sender, "to": part.receiver - plan.source.ranks,
                    "tensor": part.move.atom.tensor, "dtype": part.move.dtype, "shape": [*sent.shape],
                    "source": {"tensor": sent.name, "offset": sent.offset, "stride": [*sent.stride]},
                    "target": {"tensor": received.name, "offset": received.offset, "stride": [*received.stride]},
                }  # fmt: skip


def placements(checkpoint: str | Path, target: Target | str, **access: Any) -> dict[str, str | None]:
    """How a DTensor on the target's ranks would say which part a rank has, for each tensor of the target.

    ``Replicate()``, ``Shard(0)``, or ``_StridedShard(0, split_factor=2)`` for a packed one; None where no placement
    says it, as for heads that several ranks have. Only for ranks of one dimension (tp). Raises ReshardError.
    """
    goal = target_of(target) if isinstance(target, str) else target
    arrangement = arranged(open_any(checkpoint, Access(**access), Weights.HEADERS).model, goal)
    mesh, stored = arrangement.plan.mesh, (each for each in arrangement.stored if each.constant is None)
    if len([degree for _, degree in mesh.degrees if degree > 1]) > 1 and not goal.degrees.same_ranks:
        raise PlanError(f"'{goal}' has ranks along several dimensions, and placements are of one")
    return {each.name: _placement([each.geometry.dims(rank) for rank in range(mesh.size)]) for each in stored}


def _placement(ranks: Sequence[Sequence[Sequence[Run]] | None]) -> str | None:
    if any(dims is None for dims in ranks):
        return None
    runs_of = [tuple(tuple(runs) for runs in dims) for dims in ranks if dims is not None]
    if all(dims == runs_of[0] for dims in runs_of):
        return "Replicate()"
    shape = [max(run.end for dims in runs_of for run in dims[dim]) for dim in range(len(runs_of[0]))]
    for dim in range(len(shape)):
        for parts in {1, len(runs_of[0][dim])}:
            cuts = [in_order(shape, [len(runs_of)], [rank], [Cut(dim, parts)]) for rank in range(len(runs_of))]
            if cuts == runs_of:
                return f"Shard({dim})" if parts == 1 else f"_StridedShard({dim}, split_factor={parts})"
    return None
