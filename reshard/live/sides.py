"""The two sides of a push: where each atom of a model lies in the tensors of a side's ranks.

A side is live (what its ranks hold, ``HeldSlice``) or made by rules alone (the tensors of a program's ranks on a mesh).
A live tensor is a piece of the stored one, as a chunk of a distributed checkpoint is (``reshard.placement.geometry``).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from reshard.formats.errors import MismatchError, PlanError
from reshard.formats.files.safetensors import TensorInfo
from reshard.formats.notation.architecture_files import find_architecture
from reshard.formats.notation.axes import Run
from reshard.formats.notation.format import Format
from reshard.model.binding import bind
from reshard.model.model import Model
from reshard.placement.arrangement import Arrangement, on_mesh
from reshard.placement.geometry import Geometry, contiguous
from reshard.placement.inverse import NameInverse
from reshard.placement.pieces import Piece, Spread, boxes
from reshard.placement.program_plan import program_plan
from reshard.placement.stored import Atom, Location, Stored, name_at, stack_of
from reshard.source.completeness import check_complete
from reshard.source.opening_programs import inferred_sizes, inferred_tensors, padding_of
from reshard.source.source import UNSPLIT


class HeldSlice(NamedTuple):
    """A part of a stored tensor that one rank holds; it may hold several parts of one tensor."""

    name: str
    """The name in the format."""
    dtype: str
    """A key of ``DTYPE_BITS``."""
    shape: tuple[int, ...]
    """The shape of the whole tensor."""
    runs: tuple[tuple[Run, ...], ...]
    """The indices of each dimension that the rank holds, ascending: the local tensor has all runs of a dimension one
    after another.
    """
    is_buffer: bool = False
    """Whether it is a buffer that no checkpoint has: it is left alone."""

    @property
    def local(self) -> tuple[int, ...]:
        """The shape of the local tensor."""
        return tuple(sum(run.length for run in dim) for dim in self.runs)


def to_document(parts: Sequence[HeldSlice]) -> dict[str, Any]:
    """Parts as JSON: each distinct dtype, shape and runs once, and the number of these for each name."""
    numbers: dict[HeldSlice, int] = {}
    names = [[part.name, numbers.setdefault(part._replace(name=""), len(numbers))] for part in parts]
    kinds = [
        [kind.dtype, kind.shape, [[[run.offset, run.length] for run in dim] for dim in kind.runs], kind.is_buffer]
        for kind in numbers
    ]
    return {"names": names, "kinds": kinds}


def from_document(document: Mapping[str, Any]) -> list[HeldSlice]:
    """The inverse of ``to_document``."""
    kinds = [
        (dtype, tuple(shape), tuple(tuple(Run(*run) for run in dim) for dim in runs), is_buffer)
        for dtype, shape, runs, is_buffer in document["kinds"]
    ]
    return [HeldSlice(name, *kinds[number]) for name, number in document["names"]]


RankSlices = Sequence[Sequence[HeldSlice]]
"""The slices of each rank of a live side."""

_WHERE = Path("the live model")


class LiveState(NamedTuple):
    """The tensors of a running program's ranks: parts of a format's stored tensors, by their names.

    ``beyond`` are names of buffers that no checkpoint has; they are not among these, and are left alone.
    """

    format: Format
    ranks: RankSlices
    beyond: tuple[str, ...] = ()


def unstacked(format: Format, part: HeldSlice) -> HeldSlice:
    """The part of a stored tensor that a part is: an index in its name is no dimension of it. Raises PlanError."""
    while part.shape and (stack := stack_of(format.rules.stacks, part.name)) is not None:
        runs = part.runs[0]
        if len(runs) != 1 or runs[0].length != 1:
            raise PlanError(f"tensor '{part.name}' has several indices of '{stack.index}' in one part")
        name = name_at(stack, part.name, runs[0].offset)
        part = part._replace(name=name, shape=part.shape[1:], runs=part.runs[1:])
    return part


def of_checkpoints(live: LiveState, config: Mapping[str, Any]) -> LiveState:
    """Return the state without buffers that no checkpoint of the model has. Raises CheckpointError."""
    architecture = find_architecture(dict(config), _WHERE)
    origins = NameInverse(live.format, architecture, config)
    names = {part.name for parts in live.ranks for part in parts if part.is_buffer}
    beyond = {name for name in names if not origins.knows(name)}
    ranks = [[part for part in parts if part.name not in beyond] for parts in live.ranks]
    return LiveState(live.format, ranks, tuple(sorted(beyond)))


@dataclass(frozen=True, eq=False)
class PushSide:
    """One side of a push.

    ``stored`` has all tensors of its ranks, a tied one under each name under which a rank holds it. Holder ``h`` is
    what rank ``h % ranks`` has of a tensor; of several parts, that of number ``h // ranks``. ``live`` is what the ranks
    of a live side hold; None for a side that is made by rules.
    """

    arrangement: Arrangement
    stored: tuple[Stored, ...]
    ranks: int
    live: LiveState | None = None

    def atoms(self) -> Iterator[tuple[Atom, Location]]:
        """Each atom of each tensor, and its place there; constants have none."""
        return ((atom, Location(stored, number)) for stored in self.stored for number, atom in enumerate(stored.atoms))

    def tensors_of(self, rank: int) -> Iterator[tuple[str, str, tuple[int, ...]]]:
        """The name, the dtype and the shape of each tensor that a rank has."""
        if self.live is None:
            tensors = (entry for entry in self.arrangement.tensors_of(rank) if entry[0].constant is None)
            yield from ((stored.name_on(rank), stored.dtype, shape) for stored, shape in tensors)
        else:
            yield from ((part.name, part.dtype, part.local) for part in self.live.ranks[rank])


def bound(live: LiveState, config: Mapping[str, Any], *, dtype: str | None = None) -> Model:
    """Return the model that live ranks hold. ``dtype``: F32 tensors are taken as this dtype.

    Raises CheckpointError if it is not complete, PlanError, or MismatchError if ranks do not agree.
    """
    stored = _whole(live, dtype)
    architecture = find_architecture(dict(config), _WHERE)
    inverse = NameInverse(live.format, architecture, config)
    full = inferred_tensors(inverse, [stored])
    model = bind(architecture, config, full, axes=inferred_sizes(inverse, None, config, [stored], full))
    check_complete(model, _WHERE)
    return model


def whole(model: Model, live: LiveState) -> Arrangement:
    """A model's tensors in the format of live ranks, unsplit, with the padding that they have. Raises PlanError."""
    format = live.format
    plan = program_plan(model, format, UNSPLIT)
    if format.padding.free:
        padding = padding_of(on_mesh(plan, format), [_whole(live, None)])
        plan = program_plan(model, format, UNSPLIT, padding=padding)
    return on_mesh(plan, format)


def _whole(live: LiveState, dtype: str | None) -> dict[str, TensorInfo]:
    """The whole stored tensors that ranks hold parts of."""
    infos: dict[str, TensorInfo] = {}
    for rank, parts in enumerate(live.ranks):
        for part in parts:
            kind = dtype if dtype and part.dtype == "F32" else part.dtype
            info = infos.setdefault(part.name, TensorInfo(part.name, kind, part.shape, _WHERE, 0, 0))
            if (info.shape, info.dtype) != (part.shape, kind):
                raise MismatchError(
                    f"tensor '{part.name}' is {kind} {list(part.shape)} on rank {rank}, and {info.dtype} "
                    f"{list(info.shape)} on a rank before it"
                )
    return infos


def by_rules(arrangement: Arrangement) -> PushSide:
    """The side that a program's ranks are, by rules alone."""
    return PushSide(arrangement, arrangement.stored, arrangement.plan.mesh.size)


def live_side(live: LiveState, arrangement: Arrangement) -> PushSide:
    """The side that live ranks are. ``arrangement`` is their arrangement, unsplit, in the atoms of the other side.

    Raises MismatchError if ranks lack something or hold something else.
    """
    infos, pieces_of, alike = _whole(live, None), dict[str, dict[int, Piece]](), dict[object, dict[int, Piece]]()
    piece_of = cache(contiguous)
    for rank, own in enumerate(live.ranks):
        numbers = Counter[str]()
        for part in own:
            pieces, number = pieces_of.setdefault(part.name, {}), numbers[part.name]
            if all(part.runs):
                pieces[number * len(live.ranks) + rank] = piece_of(part.runs)
            numbers[part.name] += 1
    stored: list[Stored] = []
    geometries: dict[tuple[Geometry, int], Geometry] = {}
    for tensor in arrangement.stored:
        if tensor.name not in pieces_of:
            continue
        pieces = alike.setdefault(tuple(pieces_of[tensor.name].items()), pieces_of[tensor.name])
        key = (tensor.geometry, id(pieces))
        if key not in geometries:
            whole = tensor.constant.shape if tensor.constant else tensor.geometry.shape(0) or ()
            _check_shape(tensor.name, infos[tensor.name].shape, whole, pieces)
            geometries[key] = tensor.geometry.in_parts(pieces)
        stored.append(tensor._replace(geometry=geometries[key], dtype=infos[tensor.name].dtype, naming=None))
    present = {atom for tensor in stored for atom in tensor.atoms}
    lacking = next((tensor.name for tensor in arrangement.stored if not present.issuperset(tensor.atoms)), None)
    if lacking:
        raise MismatchError(f"one side lacks tensor '{lacking}', which the other has")
    if strange := pieces_of.keys() - {tensor.name for tensor in stored}:
        raise MismatchError(f"tensor '{min(strange)}' does not belong to this model")
    return PushSide(arrangement, tuple(stored), len(live.ranks), live)


def _check_shape(name: str, shape: tuple[int, ...], expected: tuple[int, ...], pieces: Mapping[int, Piece]) -> None:
    """Raise MismatchError unless ranks together have all of a tensor, and nothing else."""
    if shape != expected:
        raise MismatchError(f"tensor '{name}' is {[*shape]} on live ranks, and should be {[*expected]}")
    order, whole = tuple(range(len(shape))), contiguous([(Run(0, size),) for size in shape])
    have = Spread(shape, order, {holder: (piece,) for holder, piece in pieces.items()})
    cells = boxes(have, Spread(shape, order, {0: (whole,)}))
    if missing := sum(box.numel for box in cells if not box.sources):
        raise MismatchError(f"{missing:,} of {math.prod(shape):,} elements of tensor '{name}' are on no rank")
