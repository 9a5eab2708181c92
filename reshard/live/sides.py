"""The two sides of a push: where each atom of a model lies in the tensors of a side's ranks.

A side is live (what its ranks hold, ``Held``) or made by rules alone (the tensors of a program's ranks on a mesh). A
live tensor is taken as chunks of the stored tensor, as in a distributed checkpoint (``reshard.placement.geometry``):
one for each product of runs, with numbers of their own in place of file numbers.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from formats.errors import MismatchError, PlanError
from formats.files.chunks import Chunk, check_tiling
from formats.files.safetensors import TensorInfo
from formats.notation.architecture_files import find_architecture
from formats.notation.axes import Run
from formats.notation.format import Format
from reshard.model.binding import bind
from reshard.model.model import Model
from reshard.placement.arrangement import Arrangement, on_mesh
from reshard.placement.geometry import Geometry
from reshard.placement.program_plan import program_plan
from reshard.placement.stored import Atom, Placed, Stored, name_at, stack_of
from reshard.source.completeness import check_complete
from reshard.source.opening_programs import inferred_sizes, inferred_tensors, padding_of
from reshard.source.source import UNSPLIT


class Held(NamedTuple):
    """A part of a stored tensor that one rank holds.

    ``name`` is the name in the format, ``dtype`` a key of ``DTYPE_BITS``, ``shape`` that of the whole tensor. ``runs``
    has the indices of each dimension that the rank holds, in the order in which its own tensor has them: the local
    tensor has, in each dimension, all its runs one after another. A rank may hold several parts of one tensor.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    runs: tuple[tuple[Run, ...], ...]

    @property
    def local(self) -> tuple[int, ...]:
        """The shape of the local tensor."""
        return tuple(sum(run.length for run in dim) for dim in self.runs)

    @property
    def numel(self) -> int:
        """The number of elements that the rank holds."""
        return math.prod(self.local)


def to_document(parts: Sequence[Held]) -> dict[str, Any]:
    """Parts as JSON: each distinct dtype, shape and runs once, and the number of these for each name."""
    known: dict[Held, int] = {}
    names = [[part.name, known.setdefault(part._replace(name=""), len(known))] for part in parts]
    kinds = [
        [kind.dtype, kind.shape, [[[run.offset, run.length] for run in dim] for dim in kind.runs]] for kind in known
    ]
    return {"names": names, "kinds": kinds}


def from_document(document: Mapping[str, Any]) -> list[Held]:
    """The inverse of ``to_document``."""
    kinds = [
        (dtype, tuple(shape), tuple(tuple(Run(*run) for run in dim) for dim in runs))
        for dtype, shape, runs in document["kinds"]
    ]
    return [Held(name, *kinds[number]) for name, number in document["names"]]


Ranks = Sequence[Sequence[Held]]
"""What each rank of a live side holds."""

Runs = tuple[tuple[Run, ...], ...]
"""What a rank holds of each dimension."""

_WHERE = Path("the live model")


class Piece(NamedTuple):
    """A chunk of a stored tensor in a rank's tensor.

    ``part`` is the number of the part among those that the rank has of the stored tensor, ``lead`` the number of its
    first dimensions that are not the stored tensor's (they have one index), ``at`` where the chunk begins in the
    others, ``shape`` its shape.
    """

    part: int
    lead: int
    at: tuple[int, ...]
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Live:
    """What the ranks of a running program hold, by the names of a format."""

    format: Format
    ranks: Ranks

    def stored(self) -> Iterator[tuple[int, Held, str, int]]:
        """All parts: the rank, the part, the stored tensor's name, and how many of the part's dimensions are indices in
        that name.
        """
        known: dict[tuple[str, tuple[object, ...]], tuple[str, int]] = {}
        for rank, parts in enumerate(self.ranks):
            for held in parts:
                key = (held.name, held.runs if self.format.rules.stacks else ())
                if key not in known:
                    known[key] = _unstacked(self.format, held)
                yield rank, held, *known[key]


@dataclass(frozen=True, eq=False)
class Side:
    """One side of a push.

    ``stored`` has all tensors of its ranks, a tied one under each name under which a rank holds it. Holders stand for
    ranks: holder ``h`` is on rank ``h // width``. ``pieces`` has the chunk that each holder of a stored tensor has;
    None for a side that is made by rules. ``dtypes`` has the dtypes of a live side's tensors, where they are not the
    model's, ``live`` what its ranks hold.
    """

    arrangement: Arrangement
    stored: tuple[Stored, ...]
    ranks: int
    width: int = 1
    pieces: Mapping[str, Mapping[int, Piece]] | None = None
    dtypes: Mapping[str, str] | None = None
    live: Live | None = None

    def placed(self) -> Iterator[tuple[Atom, Placed]]:
        """Each atom of each tensor, and its place there; constants have none."""
        return ((atom, Placed(each, number)) for each in self.stored for number, atom in enumerate(each.atoms))

    def held(self, rank: int) -> Iterator[tuple[str, str, tuple[int, ...]]]:
        """The name, the dtype and the shape of each tensor that a rank has."""
        if self.live is None:
            tensors = (each for each in self.arrangement.held(rank) if each[0].constant is None)
            yield from ((stored.name_on(rank), stored.dtype, shape) for stored, shape in tensors)
        else:
            yield from ((name, held.dtype, held.local) for of, held, name, _ in self.live.stored() if of == rank)

    def dtype(self, stored: Stored) -> str:
        """The dtype in which a stored tensor is there."""
        return (self.dtypes or {}).get(stored.name, stored.dtype)


def bound(live: Live, config: Mapping[str, Any], *, dtype: str | None = None) -> Model:
    """The model that live ranks hold. ``dtype``: what is F32 there is taken as of this dtype.

    Raises CheckpointError if it is not complete, PlanError, or MismatchError if ranks do not agree.
    """
    stored = _whole(live, dtype)
    architecture = find_architecture(dict(config), _WHERE)
    full = inferred_tensors(live.format, architecture, config, [stored])
    model = bind(architecture, config, full, known=inferred_sizes(architecture, config, [stored], full))
    check_complete(model, _WHERE)
    return model


def whole(model: Model, live: Live) -> Arrangement:
    """A model's tensors in the format of live ranks, unsplit, with the padding that they have. Raises PlanError."""
    format = live.format
    plan = program_plan(model, format, UNSPLIT)
    if format.padding.free:
        padding = padding_of(on_mesh(plan, format), [_whole(live, None)])
        plan = program_plan(model, format, UNSPLIT, padding=padding)
    return on_mesh(plan, format)


def _whole(live: Live, dtype: str | None) -> dict[str, TensorInfo]:
    """The whole stored tensors that ranks hold parts of."""
    found: dict[str, TensorInfo] = {}
    for rank, held, name, lead in live.stored():
        shape, kind = held.shape[lead:], dtype if dtype and held.dtype == "F32" else held.dtype
        info = found.setdefault(name, TensorInfo(name, kind, shape, _WHERE, 0, 0))
        if (info.shape, info.dtype) != (shape, kind):
            raise MismatchError(
                f"tensor '{name}' is {kind} {list(shape)} on rank {rank}, and {info.dtype} {list(info.shape)} on a "
                "rank before it"
            )
    return found


def _unstacked(format: Format, held: Held) -> tuple[str, int]:
    """The name of the stored tensor that a part is of, and how many of its dimensions are indices of that name."""
    name, lead = held.name, 0
    while lead < len(held.shape) and (stack := stack_of(format.rules.stacks, name)) is not None:
        runs = held.runs[lead]
        if len(runs) != 1 or runs[0].length != 1:
            raise PlanError(f"tensor '{held.name}' has several indices of '{stack.index}' in one part")
        name, lead = name_at(stack, name, runs[0].offset), lead + 1
    return name, lead


def by_rules(arrangement: Arrangement) -> Side:
    """The side that a program's ranks are, by rules alone."""
    return Side(arrangement, arrangement.stored, arrangement.plan.mesh.size)


def live_side(live: Live, own: Arrangement) -> Side:
    """The side that live ranks are. ``own`` is their arrangement, unsplit, in the atoms of the other side.

    Raises MismatchError if ranks lack something or hold something else.
    """
    found: dict[str, list[tuple[int, int, Runs]]] = {}
    dtypes: dict[str, str] = {}
    for rank, held, name, lead in live.stored():
        found.setdefault(name, []).append((rank, lead, held.runs[lead:]))
        dtypes[name] = held.dtype
    alike = {name: tuple(parts) for name, parts in found.items()}
    known = {key: _by_rank(key) for key in dict.fromkeys(alike.values())}
    width = max((len(pieces) for of in known.values() for pieces in of.values()), default=1)
    numbered = {
        key: {rank * width + i: each for rank, pieces in of.items() for i, each in enumerate(pieces)}
        for key, of in known.items()
    }
    chunks = {key: {holder: chunk for holder, (chunk, _) in of.items()} for key, of in numbered.items()}
    places = {key: {holder: piece for holder, (_, piece) in of.items()} for key, of in numbered.items()}
    stored = _in_chunks(own, {name: chunks[key] for name, key in alike.items()})
    pieces = {name: places[key] for name, key in alike.items()}
    return Side(own, tuple(stored.values()), len(live.ranks), width, pieces, dtypes, live)


def _by_rank(parts: Sequence[tuple[int, int, Runs]]) -> dict[int, list[tuple[Chunk, Piece]]]:
    """The chunks of a stored tensor that each rank has, given the parts of all ranks.

    All are cut wherever one of them begins or ends, so that two chunks are equal or have nothing in common.
    """
    found: dict[int, list[tuple[Chunk, Piece]]] = {}
    numbers: Counter[int] = Counter()
    edges = [
        sorted({edge for runs in {*of} for run in runs for edge in (run.offset, run.end)})
        for of in zip(*(runs for _, _, runs in parts), strict=True)
    ]
    for rank, lead, runs in parts:
        found.setdefault(rank, []).extend(_pieces(runs, numbers[rank], lead, edges))
        numbers[rank] += 1
    return found


def _in_chunks(own: Arrangement, chunks: Mapping[str, Mapping[int, Chunk]]) -> dict[str, Stored]:
    """An arrangement's tensors as chunks on holders. Raises MismatchError."""
    found: dict[str, Stored] = {}
    known: dict[tuple[object, ...], Geometry] = {}
    for each in own.stored:
        if each.name not in chunks:
            continue
        at = chunks[each.name]
        assert each.geometry.chunks is None
        key = (each.geometry, id(at))
        if key not in known:
            whole = each.constant.shape if each.constant else each.geometry.shape(0) or ()
            check_tiling(each.name, dict(enumerate(dict.fromkeys(at.values()))), whole, _WHERE)
            known[key] = each.geometry.in_chunks(at)
        found[each.name] = each._replace(geometry=known[key])
    there = {atom for each in found.values() for atom in each.atoms}
    lacking = next((each.name for each in own.stored if not there.issuperset(each.atoms)), None)
    if lacking:
        raise MismatchError(f"one side lacks tensor '{lacking}', which the other has")
    strange = chunks.keys() - found.keys()
    if strange:
        raise MismatchError(f"tensor '{min(strange)}' is none of this model's")
    return found


def _pieces(held: Runs, part: int, lead: int, edges: Sequence[Sequence[int]]) -> Iterator[tuple[Chunk, Piece]]:
    """A part as chunks: all products of its runs, which are cut at ``edges``."""
    dims = []
    for runs, of in zip(held, edges, strict=True):
        at, found = 0, []
        for run in runs:
            inside = of[bisect_right(of, run.offset) : bisect_left(of, run.end)]
            ends = sorted({run.offset, *inside, run.end})
            found += [(Run(a, b - a), at + a - run.offset) for a, b in itertools.pairwise(ends)]
            at += run.length
        dims.append(found)
    for product in itertools.product(*dims):
        chunk = Chunk(tuple(run.offset for run, _ in product), tuple(run.length for run, _ in product))
        if 0 not in chunk.shape:
            yield chunk, Piece(part, lead, tuple(local for _, local in product), chunk.shape)
