"""The jobs that bring a source into the files of an output: the one place where jobs are made.

Source and target are arrangements of one model (``reshard.placement.arrangement``), taken apart into the same atoms. An
atom goes from one to the other as it is, or with a named change: its elements in another dtype (rounded, if that was
asked for) or by a function (``Change``), a stated shape (``restate``). Any other difference between the two sides is
refused here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache

import numpy as np

from reshard.formats.errors import CheckpointError, MismatchError, PlanError
from reshard.formats.files.layout import Layout
from reshard.formats.files.manifest import INTACT_FILE
from reshard.formats.files.safetensors import DTYPE_BITS, tensor_bytes
from reshard.formats.notation.architecture import without_numbers
from reshard.formats.notation.format_file import HUGGING_FACE
from reshard.formats.quantization.companions import restated
from reshard.formats.store import FilePath, Range, joined
from reshard.mesh.plan import make_plan
from reshard.move.changes import Block, Change, Edit
from reshard.move.jobs import FilePlan, Job, Options, Places, TargetPlace, TargetTensors
from reshard.move.reading import GAP, ranges_of
from reshard.move.slabs import Copy, Region, Route, Rows, Slab, Transfer
from reshard.placement.arrangement import Arrangement, align_atoms, arrangement_of
from reshard.placement.geometry import Geometry
from reshard.placement.stored import Atom, Location
from reshard.source.source import UNSPLIT, Source, SourceFile, SourcePlace, SourceTensors

# ------------------------------------------------------------------------------------------------------ stated shapes

_WHOLE = (slice(None),)


@dataclass(frozen=True, eq=False)
class Restating(Route):
    """The way of a tensor whose values state a weight's shape: each rank gets the shape that the weight has there.

    The rest of such a tensor is replicated (see ``formats.quantization.companions``).
    """

    name: str
    dtype: str
    nbytes: int
    sources: Mapping[int, tuple[FilePath, tuple[int, ...]]]
    """The source's ranks, each with its file and the shape that is stated there."""
    targets: Mapping[int, tuple[int, ...]]
    """The target's ranks, each with the shape that is to be stated there."""

    def slabs(self, budget: int) -> Iterator[Slab]:
        """One step, whatever the budget."""
        (first, *replicas), (_, shape) = self.sources, next(iter(self.sources.values()))
        copies = (Copy(0, _WHOLE, i, _WHOLE, self._edit(first, to)) for i, to in enumerate(self.targets.values()))
        checks = (Copy(i, _WHOLE, 0, _WHOLE, self._edit(rank, shape)) for i, rank in enumerate(replicas, 1))
        reads, writes = (
            tuple(Region(rank, 0, (self.nbytes,), Rows(0, (), self.nbytes)) for rank in side)
            for side in (self.sources, self.targets)
        )
        yield Slab(reads, writes, tuple(copies), tuple(checks), is_flat=False)

    def _edit(self, rank: int, shape: tuple[int, ...]) -> Edit:
        """Replaces the shape that a source rank must state by another; raises MismatchError if it states a third."""
        path, before = self.sources[rank]

        def change(block: Block) -> Block:
            try:
                new = restated(block.tobytes(), self.dtype, before, shape)
            except CheckpointError as error:
                raise MismatchError(f"{path}: tensor '{self.name}' {error.message}", error.hint) from None
            return np.frombuffer(new, dtype=np.uint8)

        return change


INTACT_RANK = -1
"""Stands for a rank: the file with the tensors that a program does not store."""

TargetPlaces = Mapping[int, Mapping[str, TargetPlace]]
"""The places of stored tensors in the target's files, by rank and name."""


def jobs_of(source: Source, target: Arrangement, places: TargetPlaces, *, compare: bool = True) -> Iterator[Job]:
    """One job for each atom, in the order in which the source stores them.

    ``target`` is an arrangement of the source's model; only what has a place in ``places`` is written. Without
    ``compare`` only one of several replicas is read. Raises PlanError if an atom cannot go from source to target.
    """
    source_side, target_side = align_atoms(source.arrangement, target)
    own = {tensor.name: tensor.dtype for tensor in source.plan.model.tensors} if source.cast else {}
    casts = {t.name: t.dtype for t in target.plan.model.tensors if own.get(t.name, t.dtype) != t.dtype}
    check_atoms(source_side, target_side)
    origin, goal = SourceTensors(source.files, source.ranks), TargetTensors(places)
    intact, apart = SourceTensors(source.files, [source.intact]), TargetTensors({0: places.get(INTACT_RANK, {})})
    again = dict[Atom, list[Location]]()
    for atom, placed in source_side.copies:
        again.setdefault(atom, []).append(placed)
    holders, is_compared = source_side.ranks, compare or bool(source_side.copies)
    has_zeros = source.manifest is not None or not source.format.padding.free  # as padding
    # atoms that lie alike in stored tensors, and those that are spread alike, go the same way
    routes, of_kinds = dict[tuple[object, ...], Route](), dict[tuple[object, ...], tuple[Route, int]]()

    @cache
    def whole() -> Mapping[Atom, Location]:
        """All atoms in Hugging Face's form and order. Tensors that a program does not store lie in a file in
        this form.
        """
        plan = make_plan(target_side.plan.model, UNSPLIT, padding={})
        return align_atoms(arrangement_of(plan, HUGGING_FACE), target_side)[0].atoms

    def route(
        atom: Atom, src: Location, dst: Location, change: Change | None, ranks: frozenset[int],
        copies: Sequence[Location],
    ) -> Route:  # fmt: skip
        spread, goal, dtype = src.spread, dst.spread, src.stored.dtype
        for number, placed in enumerate(copies, 1):
            more = {number * holders + rank: pieces for rank, pieces in placed.spread.pieces.items()}
            spread = replace(spread, pieces={**spread.pieces, **more})
        key = (spread.value, goal.value, dtype, change, ranks)
        if key not in routes:
            if spread.full != goal.full:
                raise PlanError(
                    f"tensor '{atom.tensor}' has the shape {list(spread.full)} in the source's format and "
                    f"{list(goal.full)} in the output's, and cannot be converted",
                    "write it as huggingface first",
                )
            routes[key] = Transfer(
                spread, goal, DTYPE_BITS[dtype], ranks, compare=is_compared, zeros=has_zeros, change=change
            )
        return routes[key]

    def job(
        atom: Atom,
        src: Location,
        dst: Location,
        sources: Places[SourcePlace],
        targets: Places[TargetPlace],
        ranks: frozenset[int],
        copies: Sequence[Location] = (),
    ) -> Job:
        """The job that moves an atom to these ranks, and compares it with its ``copies`` in the source."""
        name, dtype, function, cast = atom.tensor, src.stored.dtype, dst.portion.function, casts.get(atom.tensor)
        change = None
        if cast is not None or function is not None or dtype != dst.stored.dtype:
            of_all = name if cast is None else without_numbers(name)
            change = Change(of_all, dtype, dst.stored.dtype, function, cast)
        key = (*_alike(src), *_alike(dst), change, ranks, *map(_alike, copies))
        if key not in of_kinds:
            nbytes = tensor_bytes(name, dtype, src.layout.full)
            of_kinds[key] = route(atom, src, dst, change, ranks, copies), nbytes
        way, nbytes = of_kinds[key]
        stated, states = src.stored.stated, dst.stored.stated
        if stated is not None and states is not None:  # the values of this tensor count
            holds = sorted(src.spread.pieces)[: None if is_compared else 1]
            origins = {rank: (sources.on(rank).file.path, stated.on(rank)) for rank in holds}
            way = Restating(name, dtype, nbytes, origins, {rank: states.on(rank) for rank in sorted(ranks)})
        return Job(name, way, (sources, *(Places(origin, at) for at in copies)), targets, nbytes, ranks, holders)

    ranks_of: dict[tuple[Geometry, int], frozenset[int]] = {}
    for atom in whole() if source_side.dropped or target_side.dropped else source_side.atoms:
        src, dst = source_side.atoms.get(atom), target_side.atoms.get(atom)
        if src is None or src.portion.function is not None:
            src = whole()[atom]
            src = src._replace(stored=src.stored._replace(dtype=own.get(atom.tensor, src.stored.dtype)))
            _check_intact(source, atom.tensor)
            sources = Places(intact, src)
        else:
            sources = Places(origin, src)
        ranks = frozenset[int]()
        if dst is not None:
            key = (dst.stored.geometry, dst.number)
            if key not in ranks_of:
                ranks_of[key] = _ranks_of(dst, places)
            ranks = ranks_of[key]
        if dst is not None and ranks:
            yield job(atom, src, dst, sources, Places(goal, dst), ranks, again.get(atom, ()))
        if (dst is None or dst.portion.function is not None) and INTACT_RANK in places:
            yield job(atom, src, whole()[atom], sources, Places(apart, whole()[atom]), frozenset({0}))
    for atom, dst in target_side.copies:
        src, ranks = source_side.atoms[atom], _ranks_of(dst, places)
        if ranks:
            yield job(atom, src, dst, Places(origin, src), Places(goal, dst), ranks)._replace(again=True)


def check_atoms(source: Arrangement, target: Arrangement) -> None:
    """Raise PlanError for an atom that one side has, and that the other neither has nor leaves out by its format."""
    for atom in source.atoms.keys() ^ target.atoms.keys():
        lacking = target if atom in source.atoms else source
        if atom.tensor not in lacking.dropped:
            raise PlanError(
                f"tensor '{atom.tensor}' cannot be converted: the two formats divide it in different ways",
                "write it as huggingface first",
            )


def _ranks_of(location: Location, places: TargetPlaces) -> frozenset[int]:
    """The ranks to which an atom is to be written: the same for all stored tensors of one geometry."""
    stored, geometry = location.stored, location.stored.geometry
    return frozenset(
        rank
        for rank, of_rank in places.items()
        if stored.name_on(rank) in of_rank and geometry.has(rank, location.number) and rank not in location.zeros
    )


def _alike(location: Location) -> tuple[Geometry, int, str]:
    """Return a key that atoms share if they lie alike in stored tensors."""
    return location.stored.geometry, location.number, location.stored.dtype


def _check_intact(source: Source, tensor: str) -> None:
    """Raise PlanError if a tensor is not in the source's file of those that its format does not store."""
    if tensor not in source.intact:
        raise PlanError(
            f"{source.path} does not have the bits of tensor '{tensor}', which the format '{source.format.name}' does "
            "not store as they are",
            f"'reshard split' keeps them beside the shards, in {INTACT_FILE}; another program does not",
        )


# ------------------------------------------------------------------------------------------------------------ downloads


def download_of(source: Source, target: Arrangement, rank: int) -> int:
    """The bytes of weights that are fetched if this rank alone is written, of files that are not on this machine.

    Of a row-parallel weight these are more than the rank holds: where its parts of the rows lie close together, what
    lies between them is fetched with them.
    """
    nowhere, nbytes_of = TargetPlace(FilePlan("", rank, Layout(0)), 0), dict[Route, int]()
    names, total = (stored.name_on(rank) for stored, _ in target.tensors_of(rank)), 0
    for job in jobs_of(source, target, {rank: dict.fromkeys(names, nowhere)}, compare=False):
        if job.route not in nbytes_of:
            fetched: dict[SourceFile, list[Range]] = {}
            for region in (region for slab in job.route.slabs(Options().sizes.step) for region in slab.reads):
                place = job.source(region.rank)
                parts = [(at, at + n) for at, _, n in ranges_of(place, region)] if place.file.remote is not None else []
                fetched.setdefault(place.file, []).extend(joined(parts, GAP))
            nbytes_of[job.route] = sum(
                file.remote.over_network(end - begin)
                for file, ranges in fetched.items()
                for begin, end in joined(ranges, 0)
                if file.remote is not None
            )
        total += nbytes_of[job.route]
    return total
