"""The jobs that bring a source into the files of an output: the one place where jobs are made.

Source and target are arrangements of one model (``reshard.placement.arrangement``), taken apart into the same atoms. An
atom goes from one to the other as it is, or with a named change: its elements in another dtype or by a function
(``Change``), scales of scale blocks of another size (``Regrid``), a stated shape (``Restate``). Any other difference
between the two sides is refused here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache, partial
from typing import TypeVar

from formats.errors import PlanError
from formats.files.safetensors import DTYPE_BITS, tensor_bytes
from formats.files.sharded import KEPT
from formats.notation.format_file import HUGGING_FACE
from reshard.mesh.plan import make_plan
from reshard.move.changes import Regrid, Restate
from reshard.move.elements import Change
from reshard.move.jobs import Job, TargetPlace, place_in
from reshard.move.slabs import Transfer, Way
from reshard.placement.arrangement import Arrangement, arrangement_of, same_atoms
from reshard.placement.geometry import Geometry
from reshard.placement.pieces import Blocks
from reshard.placement.stored import Atom, Placed, blocks_of
from reshard.source.source import UNSPLIT, Places, Source, SourcePlace

KEPT_RANK = -1
"""Stands for a rank: the file with the tensors that a program does not store."""

Place = TypeVar("Place", SourcePlace, TargetPlace)
TargetPlaces = Mapping[int, Mapping[str, TargetPlace]]
"""The places of stored tensors in the target's files, by rank and name."""


def jobs_of(source: Source, target: Arrangement, places: TargetPlaces, *, compare: bool = True) -> Iterator[Job]:
    """One job for each atom, in the order in which the source stores them.

    ``target`` is an arrangement of the source's model; only what has a place in ``places`` is written. Without
    ``compare`` only one of several replicas is read. Raises PlanError if an atom cannot go from source to target.
    """
    here, there = same_atoms(source.arrangement, target)
    moves = _Moves(compare=compare, zeros=source.manifest is not None or not source.format.padding.free)
    check_atoms(here, there)
    origin, goal = source.places, partial(place_in, places)

    @cache
    def whole() -> Mapping[Atom, Placed]:
        """All atoms as Hugging Face has them, in its order: what a program does not store stands so in a file."""
        plan = make_plan(there.plan.model, UNSPLIT, padding={})
        return same_atoms(arrangement_of(plan, HUGGING_FACE), there)[0].placed

    ranks_of: dict[tuple[Geometry, int], frozenset[int]] = {}
    for atom in whole() if here.dropped or there.dropped else here.placed:
        held, wanted = here.placed.get(atom), there.placed.get(atom)
        if held is None or held.portion.function is not None:
            held = whole()[atom]
            sources: Places = partial(_same_on_all, _place_in_kept(source, held, atom.tensor))
        else:
            sources = _places(origin, held)
        ranks = frozenset[int]()
        if wanted is not None:
            key = (wanted.stored.geometry, wanted.number)
            if key not in ranks_of:
                ranks_of[key] = _ranks_of(wanted, places)
            ranks = ranks_of[key]
        if wanted is not None and ranks:
            yield moves.job(atom, held, wanted, sources, _places(goal, wanted), ranks)
        if (wanted is None or wanted.portion.function is not None) and KEPT_RANK in places:
            place = places[KEPT_RANK][atom.tensor]
            place = TargetPlace(place.file, place.offset + whole()[atom].first(0))
            yield moves.job(atom, held, whole()[atom], sources, partial(_same_on_all, place), frozenset({0}))
    for atom, wanted in there.copies:
        held, ranks = here.placed[atom], _ranks_of(wanted, places)
        if ranks:
            job = moves.job(atom, held, wanted, _places(origin, held), _places(goal, wanted), ranks)
            yield job._replace(again=True)


def _same_on_all(place: Place, rank: int) -> Place:
    return place


def check_atoms(here: Arrangement, there: Arrangement) -> None:
    """Raise PlanError for an atom that one side has, and that the other neither has nor leaves out by its format."""
    for atom in here.placed.keys() ^ there.placed.keys():
        lacking = there if atom in here.placed else here
        if atom.tensor not in lacking.dropped:
            raise PlanError(
                f"tensor '{atom.tensor}' cannot be brought from the one format into the other: they divide it in "
                "different ways",
                "write it as huggingface first",
            )


def _ranks_of(placed: Placed, places: TargetPlaces) -> frozenset[int]:
    """The ranks to which an atom is to be written: the same for all stored tensors of one geometry."""
    stored, geometry = placed.stored, placed.stored.geometry
    return frozenset(
        rank
        for rank, of_rank in places.items()
        if stored.name_on(rank) in of_rank and geometry.has(rank, placed.number) and not placed.is_zero(rank)
    )


def _alike(placed: Placed) -> tuple[Geometry, int, str]:
    """What is equal for atoms that lie alike in stored tensors."""
    return placed.stored.geometry, placed.number, placed.stored.dtype


class _Moves:
    """Makes the jobs of atoms; atoms that go the same way share it. With ``zeros`` the source has zeros as padding."""

    def __init__(self, *, compare: bool, zeros: bool) -> None:
        self._compare, self._zeros = compare, zeros
        self._known: dict[tuple[object, ...], tuple[Way, int]] = {}
        self._ways: dict[tuple[object, ...], Way] = {}

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
        change = _change(atom.tensor, held, wanted)
        key = (*_alike(held), *_alike(wanted), change, ranks)
        if key not in self._known:
            nbytes = tensor_bytes(atom.tensor, held.stored.dtype, held.layout.full)
            self._known[key] = self._way(atom, held, wanted, change, ranks), nbytes
        way, nbytes = self._known[key]
        stated, states = held.stored.stated, wanted.stored.stated
        if stated is not None and states is not None:  # the values of this tensor count
            holders = sorted(held.spread(blocks_of(held, held) or ()).pieces)[: None if self._compare else 1]
            way = Restate(atom.tensor, held.stored.dtype, nbytes, holders, stated, states, sources, ranks)
        return Job(atom.tensor, way, sources, targets, nbytes)

    def _way(self, atom: Atom, held: Placed, wanted: Placed, change: Change | None, ranks: frozenset[int]) -> Way:
        blocks = blocks_of(held, wanted)
        if blocks is None:
            raise _shapes_differ(atom, held.layout.full, wanted.layout.full)
        before, after = held.spread(blocks), wanted.spread(blocks)
        key, bits = (before, after, held.stored.dtype, change, ranks), DTYPE_BITS[held.stored.dtype]
        if key in self._ways:
            return self._ways[key]
        if before.full == after.full:
            way: Way = Transfer(before, after, bits, ranks, compare=self._compare, zeros=self._zeros, change=change)
        else:
            steps = _steps(held, wanted, blocks)
            if change or steps is None:
                raise _shapes_differ(atom, before.full, after.full)
            way = Regrid(before, after, steps, bits, ranks)
        self._ways[key] = way
        return way


def _shapes_differ(atom: Atom, before: Sequence[int], after: Sequence[int]) -> PlanError:
    return PlanError(
        f"tensor '{atom.tensor}' has the shape {list(before)} in the one format and {list(after)} in the other, and "
        "cannot be brought from the one into the other",
        "write it as huggingface first",
    )


def _steps(held: Placed, wanted: Placed, blocks: Blocks) -> tuple[tuple[int, int], ...] | None:
    """How many indices of a weight a block of each dimension counts, before and after; None if the rules agree on it.

    A dimension is a block of factors, of which one that is counted in blocks has no other beside it.
    """
    own, other = held.portion.component.factors, wanted.portion.component.factors
    if len(own) != len(other):
        return None
    steps = tuple(
        (max(own[place].counted[0] for place in block), max(other[place].counted[0] for place in block))
        for block in blocks
    )
    return steps if any(before != after for before, after in steps) else None


def _place_in_kept(source: Source, placed: Placed, tensor: str) -> SourcePlace:
    """Where an atom lies in the source's file of tensors that its format does not store. Raises PlanError if it does
    not.
    """
    info = source.kept.get(tensor)
    if info is None:
        raise PlanError(
            f"{source.path} does not have the bits of tensor '{tensor}', which the format '{source.format.name}' does "
            "not store as they are",
            f"'reshard split' keeps them beside the shards, in {KEPT}; another program does not",
        )
    return SourcePlace(source.files[info.file], info.offset + placed.first(0))


def _change(name: str, held: Placed, wanted: Placed) -> Change | None:
    """The change of an atom's elements, if it is stored in another dtype or by a function."""
    function = wanted.portion.function
    if held.stored.dtype == wanted.stored.dtype and function is None:
        return None
    return Change(name, held.stored.dtype, wanted.stored.dtype, function)


def _places(of: Callable[[str, int], Place | None], placed: Placed) -> Callable[[int], Place | None]:
    """Where an atom lies on each rank; ``of`` has the places of stored tensors by name and rank. Jobs are pickled."""
    return partial(of, placed.stored.name) if placed.is_alone else partial(_place_within, of, placed)


def _place_within(of: Callable[[str, int], Place | None], placed: Placed, rank: int) -> Place | None:
    place = of(placed.stored.name_on(rank), rank)
    if place is None or not placed.stored.geometry.has(rank, placed.number):
        return None
    return place._replace(offset=place.offset + placed.first(rank))
