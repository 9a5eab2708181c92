"""The mesh of ranks that a checkpoint is dealt to, and the folder of each rank."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

from formats.documents import Unfit, json_object, mapping, whole
from formats.errors import PlanError, brief

MOST_RANKS = 100_000


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


def read_mesh(value: object, where: str) -> Mesh:
    """A mesh as ``Mesh.to_document`` says it: ``{"tp": 4}`` (a reader of ``formats.documents``)."""
    document = dict(json_object(value, where))
    same_ranks = document.pop("same_ranks", False) is True
    units = mapping(whole(1))(document.pop("uneven", {}), f"{where}.uneven")
    for name, degree in document.items():
        if name not in {"tp", "ep"} or type(degree) is not int or not 1 <= degree <= MOST_RANKS:
            raise Unfit(f"{where}: {brief(name)} of {brief(degree)} is no mesh dimension")
    if not document:
        raise Unfit(f"{where} has no dimensions")
    if same_ranks and len(set(document.values())) > 1:
        raise Unfit(f"{where}: mesh dimensions over the same ranks have different degrees")
    mesh = Mesh(tuple(document.items()), same_ranks, tuple(sorted(units.items())))
    if mesh.size > MOST_RANKS:
        raise Unfit(f"{where}: {mesh} are more than {MOST_RANKS:,} ranks")
    return mesh


def mesh_of(tp: int = 1, ep: int = 1, same_ranks: bool = False) -> Mesh:
    """The mesh of ``--tp`` and ``--ep``: experts over ``ep``, all else over ``tp``; with ``same_ranks`` both over the
    same ranks.

    Raises PlanError for a degree below 1, or two degrees over the same ranks that differ.
    """
    for name, degree in (("tp", tp), ("ep", ep)):
        if degree < 1:
            raise PlanError(f"--{name} {degree} is not possible: a degree is at least 1")
    if same_ranks:
        if tp != ep:
            raise PlanError(f"--tp {tp} and --ep {ep} cannot be over the same ranks: give both the same degree")
        return Mesh((("tp", tp), ("ep", ep)), same_ranks=True)
    if ep == 1:
        return Mesh((("tp", tp),))
    return Mesh((("ep", ep), ("tp", tp))) if tp > 1 else Mesh((("ep", ep),))
