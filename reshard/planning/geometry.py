"""A program's tensors, and where the atoms of each lie in it (see ``reshard.planning.arrangement``)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from formats.errors import PlanError
from formats.files.boxes import At
from formats.notation.rewrites import Constant
from reshard.planning.boxes import InBoxes, Lies
from reshard.planning.plan import Layout
from reshard.planning.portions import Portion
from reshard.planning.rows import Rows


class Atom(NamedTuple):
    """A tensor of Hugging Face's, or a part of it: a component (by its label), or an index of the first dimension."""

    tensor: str
    label: str | None = None
    at: int | None = None


Boxes = Mapping[str, Mapping[int, At]]
"""The boxes of stored tensors, by the tensor's name and the number of a file."""


@dataclass(frozen=True, eq=False)
class Naming:
    """The name of a stored tensor where it is not the same on all ranks.

    ``targets`` has the program's name on each rank, with indices as in ``{layer}``; ``at`` the numbers of these, and
    ``firsts`` for each rank the number from which it counts them.
    """

    targets: Sequence[str]
    at: Mapping[str, int]
    firsts: Sequence[Mapping[str, int]]

    def on(self, rank: int) -> str:
        """The name on a rank."""
        name, firsts = self.targets[rank], self.firsts[rank]
        return filled(name, {axis: number - firsts.get(axis, 0) for axis, number in self.at.items()})


class Stored(NamedTuple):
    """A tensor of a program's. ``atoms`` are in the order of the stack, then of the slots.

    ``naming`` has its name on each rank, if it is not the same on all.
    """

    name: str
    dtype: str
    geometry: Geometry | InBoxes
    atoms: tuple[Atom, ...]
    constant: Constant | None = None
    naming: Naming | None = None

    def name_on(self, rank: int) -> str:
        """Its name on a rank."""
        return self.naming.on(rank) if self.naming else self.name


@dataclass(frozen=True, eq=False)
class Geometry:
    """Where the atoms of a stored tensor lie in it, on every rank. Stored tensors of equal layouts share it.

    ``portions`` are its slots, ``layouts`` the layouts of its atoms: those of the first index of the stack, and so on.
    """

    portions: tuple[Portion, ...]
    layouts: tuple[Layout, ...]
    is_stack: bool
    bits: int

    @cached_property
    def ranks(self) -> int:
        """The number of all ranks."""
        return self.layouts[0].ranks

    def shape(self, rank: int) -> tuple[int, ...] | None:
        """The shape on a rank; None if it has no part of the tensor."""
        return self._on(rank)[0]

    def lies(self, rank: int, number: int) -> Lies | None:
        """Where an atom lies on a rank; None if it has no part of it."""
        return self._on(rank)[1][number]

    def _on(self, rank: int) -> tuple[tuple[int, ...] | None, list[Lies | None]]:
        if rank not in self._found:
            self._found[rank] = self._compute(rank)
        return self._found[rank]

    @cached_property
    def _found(self) -> dict[int, tuple[tuple[int, ...] | None, list[Lies | None]]]:
        return {}

    def _compute(self, rank: int) -> tuple[tuple[int, ...] | None, list[Lies | None]]:
        slots = len(self.portions)
        lies: list[Lies | None] = [None] * len(self.layouts)
        shape: tuple[int, ...] | None = None
        count, size = 0, 0
        for start in range(0, len(self.layouts), slots):
            if rank not in self.layouts[start].boxes:
                continue
            if shape is None or not self.is_stack:
                shape, found, size = self._one(rank, start)
            first = count * size
            for slot, (base, rows) in enumerate(found):
                if rank not in self.layouts[start + slot].empty:
                    lies[start + slot] = Lies(first + base, rows)
            count += 1
        if shape is None:
            return None, lies
        return ((count, *shape) if self.is_stack else shape), lies

    def _one(self, rank: int, start: int) -> tuple[tuple[int, ...], list[Lies], int]:
        """The shape of one index of the stack, where its atoms lie in it, and its size in bytes."""
        portions = self.portions
        lengths = [_lengths(self.layouts[start + slot], rank, portions[slot].order) for slot in range(len(portions))]
        first, outer = portions[0], math.prod(lengths[0][: portions[0].outer])
        inner = [
            self._bytes(math.prod(found[portion.outer :])) for portion, found in zip(portions, lengths, strict=True)
        ]
        stride, base, lies = sum(inner), 0, []
        for nbytes in inner:
            lies.append(Lies(base, Rows(nbytes, stride) if outer > 1 and nbytes < stride else None))
            base += nbytes
        return _stored_shape(portions, lengths, first), lies, outer * stride

    def _bytes(self, elements: int) -> int:
        nbytes, rest = divmod(elements * self.bits, 8)
        if rest:
            raise PlanError(f"elements of {self.bits} bits would be cut within a byte")
        return nbytes


def _lengths(layout: Layout, rank: int, order: Sequence[int]) -> list[int]:
    """The local length of each factor, in the stored order."""
    dims = layout.boxes[rank].dims
    return [sum(run.length for run in dims[place]) for place in order]


def _stored_shape(portions: Sequence[Portion], lengths: Sequence[Sequence[int]], first: Portion) -> tuple[int, ...]:
    shape, start = [], 0
    for dim, count in enumerate(first.counts):
        if dim == first.dim and len(portions) > 1:
            lead = math.prod(lengths[0][start : start + first.lead])
            own = [
                math.prod(found[start + portion.lead : start + portion.counts[dim]])
                for portion, found in zip(portions, lengths, strict=True)
            ]
            shape.append(lead * sum(own))
        else:
            shape.append(math.prod(lengths[0][start : start + count]))
        start += count
    if not first.counts and (len(portions) > 1 or first.vector):  # numbers, joined to a vector
        shape.append(len(portions))
    return tuple(shape)


class Placed(NamedTuple):
    """An atom's stored tensor, and its number there."""

    stored: Stored
    number: int

    @property
    def portion(self) -> Portion:
        """What the program makes of it."""
        portions = self.stored.geometry.portions
        return portions[self.number % len(portions)]

    @property
    def layout(self) -> Layout:
        """Its layout on the mesh, with a dimension for each of its factors."""
        return self.stored.geometry.layouts[self.number]

    def is_zero(self, rank: int) -> bool:
        """Whether a rank has zeros in its place, because a rank before it has the same part."""
        if self.portion.line is None or not self.portion.line.first_rank:
            return False
        boxes = self.layout.boxes
        return any(boxes[other].dims == boxes[rank].dims for other in boxes if other < rank)

    @property
    def zeros(self) -> frozenset[int]:
        """The ranks that have zeros in its place."""
        if self.portion.line is None or not self.portion.line.first_rank:
            return frozenset()
        return frozenset(rank for rank in self.layout.boxes if self.is_zero(rank))

    @property
    def in_rows(self) -> bool:
        """Whether it does not lie in one piece on some rank."""
        geometry = self.stored.geometry
        lies = (geometry.lies(rank, self.number) for rank in range(geometry.ranks))
        return any(found is not None and found.rows is not None for found in lies)


def filled(name: str, at: Mapping[str, int]) -> str:
    """A name with numbers in place of ``{layer}`` and its like."""
    if "{" in name:
        for axis, number in at.items():
            name = name.replace(f"{{{axis}}}", str(number))
    return name
