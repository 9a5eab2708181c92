"""The jobs that bring a source into the files of an output: one a tensor, or one an atom of it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import cached_property, partial

from formats.errors import PlanError
from formats.files.safetensors import DTYPE_BITS, tensor_bytes
from reshard.engine.jobs import Job, TargetPlace, place_in
from reshard.engine.transfer import Change, Transfer, Way
from reshard.engine.ways import way_between
from reshard.planning.arrangement import Arrangement, permuted
from reshard.planning.boxes import InBoxes
from reshard.planning.common_dimensions import in_common
from reshard.planning.geometry import Geometry
from reshard.planning.plan import Layout, Plan, make_plan
from reshard.planning.portions import Portion, stored_like, unchanged
from reshard.planning.stored import Atom, Placed
from reshard.storage.source import KEPT, UNSPLIT, Places, Source, SourcePlace, arrangements

KEPT_RANK = -1
"""The rank, so to speak, of the file with what a program does not keep."""


def tensor_jobs(source: Source, plan: Plan, places: Mapping[int, Mapping[str, TargetPlace]]) -> list[Job]:
    """One job a tensor, in the order in which the source stores them."""
    ways: dict[tuple[Layout, Layout, str, frozenset[int]], Way] = {}
    sizes = {kind: tensor_bytes(kind.name, kind.dtype, kind.shape) for kind in source.plan.model.kinds}
    jobs = []
    for (name, kind, _), (_, wanted, _) in zip(source.plan.model.tensors, plan.model.tensors, strict=True):
        ranks = frozenset([rank for rank, of_rank in places.items() if name in of_rank])
        if not ranks:
            continue
        before, after, held = source.plan.laid[kind], plan.laid[wanted], source.places(name)
        key = (before.layout, after.layout, before.dtype, ranks)
        way = ways.get(key)
        if way is None:
            way = way_between(before._replace(name=name), after, held, ranks)
            if before.stated is None:  # else the way has the places of this tensor
                ways[key] = way
        jobs.append(Job(name, way, held, partial(place_in, places, name), sizes[kind]))
    return jobs


def atom_jobs(
    source: Source, target: Plan | Arrangement, places: Mapping[int, Mapping[str, TargetPlace]]
) -> Iterator[Job]:
    """One job an atom, in the order in which the source stores them (see ``reshard.planning.arrangement``)."""
    here, there = arrangements(source, target)
    page = source.page if source.manifest is None else None
    ways = _Ways(zeros=page is None or not page.free_padding)
    kept = _Kept(source, there, places)
    ranks_of: dict[tuple[Geometry | InBoxes, int], frozenset[int]] = {}
    for atom in kept.atoms if here.dropped or there.dropped else here.placed:
        found, wanted = here.placed.get(atom), there.placed.get(atom)
        if found is None or found.portion.function is not None:
            held, sources = kept.source(atom)
        else:
            held, sources = found, partial(_atom_source, source, found)
        ranks = frozenset[int]()
        if wanted is not None:
            key = (wanted.stored.geometry, wanted.number)
            if key not in ranks_of:
                ranks_of[key] = _ranks_of(wanted, places)
            ranks = ranks_of[key]
        if wanted is not None and ranks:
            yield ways.job(atom, held, wanted, sources, partial(_atom_target, places, wanted), ranks)
        if wanted is None or wanted.portion.function is not None:
            yield ways.job(atom, held, kept.whole(atom), sources, kept.target(atom), frozenset({0}))
    for atom, wanted in there.copies:
        held = here.placed[atom]
        yield ways.job(
            atom, held, wanted, partial(_atom_source, source, held), partial(_atom_target, places, wanted),
            _ranks_of(wanted, places),
        )._replace(again=True)  # fmt: skip


def _ranks_of(placed: Placed, places: Mapping[int, Mapping[str, TargetPlace]]) -> frozenset[int]:
    """The ranks to which an atom is to be written: the same for all stored tensors of one geometry."""
    stored, geometry = placed.stored, placed.stored.geometry
    return frozenset(
        rank
        for rank, of_rank in places.items()
        if stored.name_on(rank) in of_rank
        and geometry.lies(rank, placed.number) is not None
        and not placed.is_zero(rank)
    )


class _Ways:
    """Makes the jobs of atoms; atoms that go the same way share it. With ``zeros`` the source has zeros as padding."""

    def __init__(self, *, zeros: bool) -> None:
        self._zeros = zeros
        self._ways: dict[tuple[object, ...], Way] = {}
        self._orders: dict[tuple[Portion, Portion], tuple[tuple[int, ...], tuple[int, ...]]] = {}
        self._layouts: dict[tuple[Layout, tuple[int, ...], frozenset[int]], Layout] = {}
        self._common: dict[tuple[object, ...], tuple[Layout, Layout, tuple[int, ...]]] = {}

    def job(
        self,
        atom: Atom,
        held: Placed,
        wanted: Placed,
        sources: Places,
        targets: Callable[[int], TargetPlace | None],
        ranks: frozenset[int],
    ) -> Job:
        """The job that moves an atom to these ranks."""
        before, after, order = self._between(held, wanted)
        dtype, change = held.stored.dtype, _change(atom.tensor, held, wanted)
        key = (before, after, dtype, order, change and (change.target, change.function), ranks)
        if key not in self._ways:
            bits, zeros = DTYPE_BITS[dtype], self._zeros
            self._ways[key] = Transfer(before, after, bits, ranks, zeros=zeros, order=order, change=change)
        nbytes = math.prod(before.full) * DTYPE_BITS[dtype] // 8
        return Job(atom.tensor, self._ways[key], sources, targets, nbytes, held.in_rows or wanted.in_rows)

    def _between(self, held: Placed, wanted: Placed) -> tuple[Layout, Layout, tuple[int, ...]]:
        """The layouts before and after with the same dimensions, and the order in which the target stores these."""
        portions = held.portion, wanted.portion
        if InBoxes not in {type(held.stored.geometry), type(wanted.stored.geometry)}:
            if portions not in self._orders:
                self._orders[portions] = _orders(*portions)
            stored, order = self._orders[portions]
            return self._layout(held, stored), self._layout(wanted, stored), order
        key = (held.layout, wanted.layout, *portions, held.zeros)
        if key not in self._common:
            before, after, order = in_common(held, wanted)
            kept = {rank: box for rank, box in before.boxes.items() if rank not in held.zeros}
            self._common[key] = replace(before, boxes=kept), after, order
        return self._common[key]

    def _layout(self, placed: Placed, order: tuple[int, ...]) -> Layout:
        """The layout of an atom in the source's order, without the ranks that have zeros in its place, or nothing."""
        layout, zeros = placed.layout, placed.zeros | placed.layout.empty
        if not order and not zeros:
            return layout
        key = (layout, order, zeros)
        if key not in self._layouts:
            kept = {rank: box for rank, box in layout.boxes.items() if rank not in zeros}
            layout = replace(layout, boxes=kept)
            self._layouts[key] = permuted(layout, order) if order else layout
        return self._layouts[key]


class _Kept:
    """The tensors whose own bits a program does not keep: they stand in a file of reshard's, whole."""

    def __init__(self, source: Source, target: Arrangement, places: Mapping[int, Mapping[str, TargetPlace]]) -> None:
        self._source, self._target, self._places = source, target, places

    @cached_property
    def _whole(self) -> Arrangement:
        """All tensors as Hugging Face has them, on one rank, in the parts of the target's."""
        plan = make_plan(self._target.plan.model, UNSPLIT, padding={})
        own, other = unchanged(plan.model), self._target.taken
        return Arrangement(plan, {kind: stored_like(kind, own[kind], other[kind]) for kind in own})

    @property
    def atoms(self) -> Mapping[Atom, Placed]:
        """All atoms, in the order of the original."""
        return self._whole.placed

    def source(self, atom: Atom) -> tuple[Placed, Places]:
        """Where an atom lies in the source's file. Raises PlanError if there is none."""
        placed, info = self._whole.placed[atom], self._source.kept.get(atom.tensor)
        if info is None:
            raise PlanError(
                f"{self._source.path} does not have the bits of tensor '{atom.tensor}', which the format "
                f"'{self._source.page.name if self._source.page else ''}' does not store as they are",
                f"'reshard split' keeps them beside the shards, in {KEPT}; another program does not",
            )
        lies = placed.stored.geometry.lies(0, placed.number)
        assert lies is not None
        place = SourcePlace(self._source.files[info.file], info.offset + lies.base, lies.rows)
        return placed, lambda rank: place

    def whole(self, atom: Atom) -> Placed:
        """An atom as it stands in the file."""
        return self._whole.placed[atom]

    def target(self, atom: Atom) -> Callable[[int], TargetPlace | None]:
        """Where an atom is to lie in the target's file."""
        placed = self._whole.placed[atom]
        lies = placed.stored.geometry.lies(0, placed.number)
        place = self._places[KEPT_RANK][atom.tensor]
        assert lies is not None
        there = TargetPlace(place.file, place.offset + lies.base, lies.rows)
        return lambda rank: there


def _change(name: str, held: Placed, wanted: Placed) -> Change | None:
    """The change of an atom's elements, if it is stored in another dtype or by a function."""
    function = wanted.portion.function
    if held.stored.dtype == wanted.stored.dtype and function is None:
        return None
    return Change(name, held.stored.dtype, wanted.stored.dtype, function)


def _orders(source: Portion, target: Portion) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The factors of an atom as the source stores them, and the order of the target in terms of these; () if none."""
    stored = () if source.order == tuple(range(len(source.order))) else source.order
    order = tuple(source.order.index(place) for place in target.order)
    return stored, () if order == tuple(range(len(order))) else order


def _atom_source(source: Source, placed: Placed, rank: int) -> SourcePlace | None:
    info, lies = source.ranks[rank].get(placed.stored.name_on(rank)), placed.stored.geometry.lies(rank, placed.number)
    if info is None or lies is None:
        return None
    return SourcePlace(source.files[info.file], info.offset + lies.base, lies.rows)


def _atom_target(places: Mapping[int, Mapping[str, TargetPlace]], placed: Placed, rank: int) -> TargetPlace | None:
    place, lies = places[rank].get(placed.stored.name_on(rank)), placed.stored.geometry.lies(rank, placed.number)
    return TargetPlace(place.file, place.offset + lies.base, lies.rows) if place and lies else None
