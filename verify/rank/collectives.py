"""The four collectives of tensor parallelism that autograd can follow, each with its conjugate as its backward.

===================  =======================  =======================
function             forward                  backward
===================  =======================  =======================
copy_to_group        identity                 all-reduce (sum)
reduce_from_group    all-reduce (sum)         identity
gather_from_group    all-gather along dim     this rank's slice
scatter_to_group     this rank's slice        all-gather along dim
===================  =======================  =======================

They are f, g and their gather and scatter counterparts of Shoeybi et al. 2019, "Megatron-LM: Training Multi-Billion
Parameter Language Models Using Model Parallelism". The backwards hold under the convention of that paper: a tensor that
is the same on every rank has the same, complete gradient on every rank.

Slices are in rank order, and equal unless it is said how long they are.
16-bit tensors are summed in float32 and rounded once, so that the rounding does not grow with the number of ranks;
unless another carrier (:func:`carried_by`) sums them as they are, as an engine does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from contextlib import contextmanager
from itertools import chain, combinations
from typing import Any, TypeVar

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from reshard.formats.mesh import Mesh
from reshard.verify.rank.group import Group, world

Sent = TypeVar("Sent")
Change = Callable[[Tensor], Tensor]


class Carrier:
    """The transport of sums and gathers. A subclass may time them, or sum 16-bit tensors as they are."""

    def summed_as(self, dtype: torch.dtype) -> torch.dtype:
        """The dtype in which tensors of a dtype are sent and summed."""
        return torch.promote_types(dtype, torch.float32)

    def carry(self, what: str, nbytes: int, send: Callable[[], Sent]) -> Sent:
        """Do one collective, ``all-reduce`` or ``all-gather``, into which this rank puts ``nbytes``."""
        return send()


_carrier = Carrier()


@contextmanager
def carried_by(carrier: Carrier) -> Iterator[None]:
    """In this block, all collectives of this process go through ``carrier``."""
    global _carrier
    previous, _carrier = _carrier, carrier
    try:
        yield
    finally:
        _carrier = previous


def copy_to_group(x: Tensor, group: Group) -> Tensor:
    """Hand the same ``x`` to every rank's part of a computation; its gradient is the sum of what comes back."""
    return _collective(x, group, "part", lambda x: x.view_as(x), lambda grad: reduce_from_group(grad, group))


def reduce_from_group(x: Tensor, group: Group) -> Tensor:
    """Sum the ranks' partial results ``x``; every rank gets the sum, and each part the sum's gradient."""
    return _collective(x, group, "whole", lambda x: _all_reduce(x, group), lambda grad: copy_to_group(grad, group))


def gather_from_group(x: Tensor, group: Group, dim: int = -1, *, lengths: Sequence[int] | None = None) -> Tensor:
    """Concatenate the ranks' slices ``x`` along ``dim``; every rank gets the whole.

    ``lengths`` are those of the slices along ``dim`` where these are not all of one shape.
    """
    return _collective(
        x, group, "whole", lambda x: _all_gather(x, group, dim, lengths),
        lambda grad: scatter_to_group(grad, group, dim, lengths=lengths),
    )  # fmt: skip


def scatter_to_group(x: Tensor, group: Group, dim: int = -1, *, lengths: Sequence[int] | None = None) -> Tensor:
    """Take this rank's slice along ``dim`` of an ``x`` that all ranks have: of these ``lengths``, or of equal ones.

    Raises ``ValueError`` if equal slices are not possible.
    """
    return _collective(
        x, group, "part", lambda x: _own_slice(x, group, dim, lengths),
        lambda grad: gather_from_group(grad, group, dim, lengths=lengths),
    )  # fmt: skip


def places_among(parts: Iterable[Iterable[int]], length: int) -> Tensor:
    """Return the place of each of ``length`` indices in the joined parts of the ranks; of several places, the first."""
    places = {index: place for place, index in reversed([*enumerate(chain(*parts))])}
    return torch.tensor([places[index] for index in range(length)])


def lengths_in_group(x: Tensor, group: Group, dim: int = -1) -> list[int]:
    """Return the length of each rank's slice ``x`` along ``dim``, in rank order."""
    return [int(length) for length in group.all_gather(torch.tensor([x.shape[dim]], device=x.device))]


class Groups:
    """The groups of ranks of a mesh: for each choice of its dimensions, the ranks that differ along these alone.

    Of a mesh with pipeline stages, these are the groups of each stage. All ranks must make them, and at the same time.
    """

    def __init__(self, mesh: Mesh) -> None:
        inner, every = mesh.of_a_stage, world()
        self._mesh, self._first = inner, mesh.stage(every.rank) * inner.size
        self._groups: dict[frozenset[str], Group] = {}
        for first in range(0, mesh.size, inner.size):
            for count in range(1, len(inner.dimensions) + 1):
                for along in map(frozenset, combinations(inner.dimensions, count)):
                    for ranks in dict.fromkeys(inner.peers(rank, along) for rank in range(inner.size)):
                        members = [first + rank for rank in ranks]
                        group = every if len(ranks) == mesh.size else every.some(members)
                        if group is not None:
                            self._groups[along] = group

    def along(self, dimensions: AbstractSet[str]) -> Group:
        """This rank's group along some of the mesh's dimensions, at least one."""
        return self._groups[frozenset(dimensions)]

    def dimensions(self, group: Group) -> frozenset[str]:
        """The dimensions along which the ranks of a group differ."""
        return next(along for along, other in self._groups.items() if other is group)

    def is_first(self, dimensions: AbstractSet[str]) -> bool:
        """Whether this rank is the first of those that hold the same part, if parts differ along ``dimensions``
        only.
        """
        rank = world().rank - self._first
        return self._mesh.peers(rank, frozenset(self._mesh.dimensions) - dimensions)[0] == rank


class _Collective(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group, makes: str, there: Change, back: Change) -> Tensor:
        ctx.group, ctx.makes, ctx.back = group, makes, back
        return there(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None, None]:
        return ctx.back(grads[0]), None, None, None, None


def _collective(x: Tensor, group: Group, makes: str, there: Change, back: Change) -> Tensor:
    """A collective and its conjugate; its node in the graph tells the ``group``, and whether it ``makes`` a ``part`` or
    a ``whole`` value.
    """
    out: Tensor = _Collective.apply(x, group, makes, there, back)  # type: ignore[no-untyped-call]
    return out


def _all_reduce(x: Tensor, group: Group) -> Tensor:
    wide = x.detach().to(dtype=_carrier.summed_as(x.dtype), copy=True).contiguous()
    return _carrier.carry("all-reduce", wide.nbytes, lambda: group.all_reduce(wide)).to(x.dtype)


def _all_gather(x: Tensor, group: Group, dim: int, lengths: Sequence[int] | None) -> Tensor:
    local = x.detach().contiguous()
    lengths = lengths or [local.shape[dim]] * group.size
    missing = max(lengths) - local.shape[dim]
    if missing:  # all_gather takes tensors of one shape
        local = F.pad(local, (0, 0) * (local.dim() - 1 - dim % local.dim()) + (0, missing))
    parts = _carrier.carry("all-gather", local.nbytes, lambda: group.all_gather(local))
    return torch.cat([part.narrow(dim, 0, length) for part, length in zip(parts, lengths, strict=True)], dim)


def _own_slice(x: Tensor, group: Group, dim: int, lengths: Sequence[int] | None) -> Tensor:
    ranks, size, rank = group.size, x.shape[dim], group.rank
    if lengths is None and size % ranks:
        raise ValueError(f"dimension {dim} of shape {list(x.shape)} has no {ranks} equal slices, one for each rank")
    lengths = lengths or [size // ranks] * ranks
    # A copy: autograd does not let a custom function return a view whose base it does not know.
    return x.detach().narrow(dim, sum(lengths[:rank]), lengths[rank]).clone()
