"""The mesh of ranks that a checkpoint is dealt to, and the folder of each rank."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, replace
from typing import Any

from reshard.formats.documents import Record, Unfit, document_of, items, json_object, mapping, structure, whole
from reshard.formats.errors import brief, refused

MOST_RANKS = 100_000


def _units(value: object, where: str) -> tuple[tuple[str, int], ...]:
    return tuple(sorted(mapping(whole(1))(value, where).items()))


@dataclass(frozen=True, slots=True)
class Mesh:
    """Named mesh dimensions with their degrees; a full checkpoint is a mesh of one rank."""

    degrees: tuple[tuple[str, int], ...] = field(default=(("tp", 1),), metadata={"key": None})
    """The slowest first: ``pp``, which deals the layers in stages, before all others."""
    same_ranks: bool = False
    """Whether all dimensions but ``pp`` run over the same ranks: experts are dealt whole, and all else is cut
    (DeepSeek's inference layout, vLLM's ``--enable-expert-parallel``). A dimension of a smaller degree, which divides
    the largest, has the same again after so many ranks (Megatron-Core's ``--expert-tensor-parallel-size 1``).
    """
    uneven: tuple[tuple[str, int], ...] = field(default=(), metadata={"read": _units, "write": dict})
    """The axes that are dealt over ``tp`` in units, of which the last ranks have fewer, with the indices of a unit (see
    ``Share``).
    """
    stages: tuple[int, ...] = field(default=(), metadata={"read": items(whole(1))})
    """The number of layers of each stage; empty where the model is not known."""

    @property
    def _axes(self) -> tuple[tuple[tuple[str, ...], int], ...]:
        """The dimensions with their degrees, slowest first; those that run over the same ranks are one, of the largest
        degree and named after its dimension first.
        """
        if not self.same_ranks:
            return tuple(((name,), degree) for name, degree in self.degrees)
        stages = tuple(((name,), degree) for name, degree in self.degrees if name == "pp")
        dimensions = [(name, degree) for name, degree in self.degrees if name != "pp"]
        largest = sorted(dimensions, key=lambda dimension: -dimension[1])  # stable: of equal degrees, tp is first
        return (*stages, (tuple(name for name, _ in largest), largest[0][1]))

    @property
    def size(self) -> int:
        """The number of ranks."""
        return math.prod(degree for _, degree in self._axes)

    @property
    def pp(self) -> int:
        """The number of pipeline stages."""
        return dict(self.degrees).get("pp", 1)

    @property
    def of_a_stage(self) -> Mesh:
        """The mesh of the ranks of one pipeline stage."""
        inner = tuple((name, degree) for name, degree in self.degrees if name != "pp")
        return replace(self, degrees=inner or (("tp", 1),), stages=())

    def stage(self, rank: int) -> int:
        """The pipeline stage of a rank."""
        return rank // (self.size // self.pp)

    def coordinates(self, rank: int) -> dict[str, int]:
        """The place of a rank along each dimension; the last dimension is fastest."""
        degrees, place = dict(self.degrees), dict[str, int]()
        for names, degree in reversed(self._axes):
            place |= {name: rank % degrees[name] for name in names}
            rank //= degree
        return {name: place[name] for name, _ in self.degrees}

    @property
    def dimensions(self) -> tuple[str, ...]:
        """The dimensions along which ranks differ; of those over the same ranks, the first stands for all."""
        return tuple(names[0] for names, degree in self._axes if degree > 1)

    def peers(self, rank: int, along: AbstractSet[str]) -> tuple[int, ...]:
        """The ranks, this one among them, that differ from it along these ``dimensions`` alone."""
        fixed = [name for name in self.dimensions if name not in along]
        places = [[self.coordinates(other)[name] for name in fixed] for other in range(self.size)]
        return tuple(other for other in range(self.size) if places[other] == places[rank])

    def varying(self, contents: Sequence[object]) -> frozenset[str]:
        """Return the dimensions along which ranks have different ``contents`` (one for each rank)."""
        dimensions = set()
        for name in self.dimensions:
            first: dict[tuple[int, ...], object] = {}
            for rank, thing in enumerate(contents):
                place = self.coordinates(rank)
                remaining = tuple(place[other] for other in self.dimensions if other != name)
                if first.setdefault(remaining, thing) != thing:
                    dimensions.add(name)
        return frozenset(dimensions)

    def unit(self, axis: str) -> int | None:
        """The indices of a unit of an axis that is dealt unevenly; None of any other."""
        return next((unit for name, unit in self.uneven if name == axis), None)

    def check_ranks(self, ranks: Iterable[int], field: str = "rank") -> tuple[int, ...]:
        """The ranks, sorted. Raises SettingError, of this field of a request, for one that the mesh does not have."""
        valid = tuple(sorted({*ranks}))
        for rank in valid:
            if not 0 <= rank < self.size:
                raise refused(field, rank, f"the ranks of {self} are 0 to {self.size - 1}")
        return valid

    def folder(self, rank: int) -> str:
        """``rank-02-of-04`` for tp alone, ``pp-00-of-02-tp-01-of-04`` for more than one dimension."""
        if len(self._axes) == 1:
            return f"rank-{rank:02d}-of-{self.size:02d}"
        place = self.coordinates(rank)
        return "-".join(f"{names[0]}-{place[names[0]]:02d}-of-{degree:02d}" for names, degree in self._axes)

    def to_document(self) -> dict[str, Any]:
        """``{"tp": 4}``."""
        return {**dict(self.degrees), **document_of(self)}

    def __str__(self) -> str:
        degrees = dict(self.degrees)
        text = " x ".join(" = ".join(f"{name} {degrees[name]}" for name in names) for names, _ in self._axes)
        parts = [f"{axis} in units of {unit}" for axis, unit in self.uneven]
        parts += [f"stages of {', '.join(map(str, self.stages))} layers"] if len({*self.stages}) > 1 else []
        return f"{text} with {' and '.join(parts)}" if parts else text


RANK_FOLDER = re.compile(r"(?:rank-\d+-of-\d+|(?:(?:^|-)(?:pp|ep|tp)-\d+-of-\d+)+)")


def read_mesh(value: object, where: str) -> Mesh:
    """A mesh as ``Mesh.to_document`` says it: ``{"tp": 4}`` (a reader of ``formats.documents``)."""
    table = Record(value, where)
    mesh = structure(Mesh, table)
    document = table.others(json_object)
    for name, degree in document.items():
        if name not in {"pp", "tp", "ep"} or type(degree) is not int or not 1 <= degree <= MOST_RANKS:
            raise Unfit(f"{where}: {brief(name)} of {brief(degree)} is not a mesh dimension")
    inner = {name: degree for name, degree in document.items() if name != "pp"}
    if not (inner if mesh.same_ranks else document):
        raise Unfit(f"{where} has no dimensions{' over the same ranks' if mesh.same_ranks else ''}")
    if "pp" in document and next(iter(document)) != "pp":
        raise Unfit(f"{where}: pp is not its first dimension")
    if mesh.same_ranks and any(max(inner.values()) % degree for degree in inner.values()):
        raise Unfit(f"{where}: mesh dimensions over the same ranks have degrees that do not divide each other")
    if mesh.stages and len(mesh.stages) != document.get("pp", 1):
        raise Unfit(f"{where}.stages should have the number of layers of each stage")
    mesh = replace(mesh, degrees=tuple(document.items()))
    if mesh.size > MOST_RANKS:
        raise Unfit(f"{where}: {mesh} are more than {MOST_RANKS:,} ranks")
    return mesh


def mesh_of(tp: int = 1, ep: int = 1, same_ranks: bool = False, pp: int = 1, pp_layers: Sequence[int] = ()) -> Mesh:
    """The mesh of these degrees: layers over ``pp``, experts over ``ep``, all else over ``tp``.

    With ``same_ranks``, ``ep`` and ``tp`` are over the same ranks. ``pp_layers`` is the number of layers of each stage.
    Raises SettingError for a degree below 1, two degrees over the same ranks that differ, or another number of stages.
    """
    for name, degree in (("tp", tp), ("ep", ep), ("pp", pp)):
        if degree < 1:
            raise refused(name, degree, "a degree is at least 1")
    if pp_layers and len(pp_layers) != pp:
        raise refused("pp_layers", tuple(pp_layers), "give the layers of each stage", beside={"pp": pp})
    if min(pp_layers, default=1) < 1:
        raise refused("pp_layers", tuple(pp_layers), "a stage has at least one layer")
    if same_ranks and tp != ep:
        together = {"same_ranks": True, "ep": ep}
        raise refused("tp", tp, "over the same ranks both have the same degree", beside=together)
    dimensions = [("tp", tp), ("ep", ep)] if same_ranks else [("ep", ep), ("tp", tp)]
    inner = [dimension for dimension in dimensions if dimension[1] > 1 or same_ranks]
    stages = [("pp", pp)] if pp > 1 else []
    return Mesh((*stages, *inner) or (("tp", 1),), same_ranks, stages=tuple(pp_layers) if pp > 1 else ())
