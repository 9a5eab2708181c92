"""The mesh of ranks that a checkpoint is dealt to, and the folder of each rank."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

from formats.errors import CheckpointError


@dataclass(frozen=True, slots=True)
class Mesh:
    """Named mesh dimensions with their degrees, slowest first; a full checkpoint is a mesh of one rank.

    With ``same_ranks`` all dimensions run over the same ranks, each with the whole degree: experts are dealt whole,
    and all else is cut (DeepSeek's inference layout, vLLM's ``--enable-expert-parallel``). ``uneven`` has the axes that
    are dealt over ``tp`` in units, of which the last ranks have fewer, with the indices of a unit (see ``Share``).
    """

    degrees: tuple[tuple[str, int], ...] = (("tp", 1),)
    same_ranks: bool = False
    uneven: tuple[tuple[str, int], ...] = ()

    @property
    def size(self) -> int:
        """The number of ranks."""
        if self.same_ranks:
            return self.degrees[0][1]
        return math.prod(degree for _, degree in self.degrees)

    def coordinates(self, rank: int) -> dict[str, int]:
        """The place of a rank along each dimension; the last dimension is fastest."""
        if self.same_ranks:
            return {name: rank for name, _ in self.degrees}
        found: dict[str, int] = {}
        for name, degree in reversed(self.degrees):
            found[name] = rank % degree
            rank //= degree
        return {name: found[name] for name, _ in self.degrees}

    @property
    def dimensions(self) -> tuple[str, ...]:
        """The dimensions along which ranks differ; where all run over the same ranks, the first stands for all."""
        names = tuple(name for name, degree in self.degrees if degree > 1)
        return names[:1] if self.same_ranks else names

    def peers(self, rank: int, along: AbstractSet[str]) -> tuple[int, ...]:
        """The ranks, this one among them, that differ from it along these ``dimensions`` alone."""
        fixed = [name for name in self.dimensions if name not in along]
        places = [[self.coordinates(other)[name] for name in fixed] for other in range(self.size)]
        return tuple(other for other in range(self.size) if places[other] == places[rank])

    def varying(self, held: Sequence[object]) -> frozenset[str]:
        """The ``dimensions`` along which ranks have different things; ``held`` is what each rank has."""
        found = set()
        for name in self.dimensions:
            first: dict[tuple[int, ...], object] = {}
            for rank, thing in enumerate(held):
                here = self.coordinates(rank)
                others = tuple(here[other] for other in self.dimensions if other != name)
                if first.setdefault(others, thing) != thing:
                    found.add(name)
        return frozenset(found)

    def unit(self, axis: str) -> int | None:
        """The indices of a unit of an axis that is dealt unevenly; None of any other."""
        return next((unit for name, unit in self.uneven if name == axis), None)

    def folder(self, rank: int) -> str:
        """``rank-02-of-04`` for tp alone, ``ep-00-of-02-tp-01-of-04`` for more than one dimension."""
        if len(self.degrees) == 1 or self.same_ranks:
            return f"rank-{rank:02d}-of-{self.size:02d}"
        here = self.coordinates(rank)
        return "-".join(f"{name}-{here[name]:02d}-of-{degree:02d}" for name, degree in self.degrees)

    def to_document(self) -> dict[str, int | bool | dict[str, int]]:
        """``{"tp": 4}``."""
        document: dict[str, int | bool | dict[str, int]] = {**dict(self.degrees)}
        document |= {"same_ranks": True} if self.same_ranks else {}
        return document | ({"uneven": dict(self.uneven)} if self.uneven else {})

    def __str__(self) -> str:
        text = (" = " if self.same_ranks else " x ").join(f"{name} {degree}" for name, degree in self.degrees)
        units = " and ".join(f"{axis} in units of {unit}" for axis, unit in self.uneven)
        return f"{text} with {units}" if units else text


RANK_FOLDER = re.compile(r"(?:rank-\d+-of-\d+|(?:(?:^|-)(?:ep|tp)-\d+-of-\d+)+)")


def mesh_from_document(document: Mapping[str, object], where: str) -> Mesh:
    """Read ``{"tp": 4}``. Raises CheckpointError that names ``where`` it stood."""
    degrees = []
    for name, degree in document.items():
        if name in {"same_ranks", "uneven"}:
            continue
        if name not in {"tp", "ep"} or not isinstance(degree, int) or not 1 <= degree <= 100_000:
            raise CheckpointError(f"{where}: '{name}: {degree}' is no mesh dimension")
        degrees.append((name, degree))
    if not degrees:
        raise CheckpointError(f"{where}: the mesh has no dimensions")
    same_ranks = document.get("same_ranks", False) is True
    if same_ranks and len({degree for _, degree in degrees}) > 1:
        raise CheckpointError(f"{where}: mesh dimensions over the same ranks have different degrees")
    return Mesh(tuple(degrees), same_ranks, _units(document.get("uneven", {}), where))


def _units(document: object, where: str) -> tuple[tuple[str, int], ...]:
    if not isinstance(document, dict) or not all(type(unit) is int and unit > 0 for unit in document.values()):
        raise CheckpointError(f"{where}: 'uneven: {document}' does not give the units of axes")
    return tuple(sorted(document.items()))
