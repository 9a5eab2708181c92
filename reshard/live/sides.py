"""The two sides of a push: where each atom of a model lies in the tensors of a side's ranks.

A side is live (what its ranks hold, ``Held``) or made by rules alone (the tensors of a program's ranks on a mesh). A
live tensor is taken as chunks of the stored tensor, as in a distributed checkpoint (``reshard.placement.chunks``): one
for each product of runs, with numbers of their own in place of file numbers.
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
from reshard.live.held import Held
from reshard.model.binding import bind
from reshard.model.model import Model
from reshard.placement.arrangement import Arrangement, on_mesh
from reshard.placement.chunks import InChunks, stored_dims
from reshard.placement.common_dimensions import Groups, blocks_of
from reshard.placement.geometry import Geometry
from reshard.placement.program_plan import program_plan
from reshard.placement.stored import Atom, Placed, Stored
from reshard.source.completeness import check_complete
from reshard.source.program_source import inferred_sizes, inferred_tensors, padding_of
from reshard.source.source import UNSPLIT

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
    for stack in format.rules.stacks:
        words = stack.name.match(name)
        if words is None or stack.of.match(name) is not None or lead >= len(held.shape):
            continue
        runs = held.runs[lead]
        if len(runs) != 1 or runs[0].length != 1:
            raise PlanError(f"tensor '{held.name}' has several indices of '{stack.index}' in one part")
        name, lead = stack.of.fill({**words, stack.index: str(runs[0].offset)}), lead + 1
    return name, lead


def by_rules(arrangement: Arrangement) -> Side:
    """The side that a program's ranks are, by rules alone."""
    return Side(arrangement, arrangement.stored, arrangement.plan.mesh.size)


def live_side(live: Live, own: Arrangement, other: Arrangement) -> Side:
    """The side that live ranks are. ``own`` is their arrangement, unsplit, ``other`` that of the other side.

    Both are taken apart into the same atoms. Where the other side stores factors in another order, chunks are cut so
    that each is a product of runs there, too. Raises MismatchError if ranks lack something or hold something else.
    """
    cuts = _Cuts(own, other)
    found: dict[str, list[tuple[int, int, Runs]]] = {}
    dtypes: dict[str, str] = {}
    for rank, held, name, lead in live.stored():
        found.setdefault(name, []).append((rank, lead, held.runs[lead:]))
        dtypes[name] = held.dtype
    alike = {name: (tuple(parts), cuts.of(name)) for name, parts in found.items()}
    known = {key: _by_rank(*key) for key in dict.fromkeys(alike.values())}
    width = max((len(pieces) for of in known.values() for pieces in of.values()), default=1)
    numbered = {
        key: {rank * width + i: each for rank, pieces in of.items() for i, each in enumerate(pieces)}
        for key, of in known.items()
    }
    chunks = {key: {holder: chunk for holder, (chunk, _) in of.items()} for key, of in numbered.items()}
    places = {key: {holder: piece for holder, (_, piece) in of.items()} for key, of in numbered.items()}
    stored = _in_chunks(own, {name: chunks[key] for name, key in alike.items()}, len(live.ranks) * width)
    pieces = {name: places[key] for name, key in alike.items()}
    return Side(own, tuple(stored.values()), len(live.ranks), width, pieces, dtypes, live)


def _by_rank(parts: Sequence[tuple[int, int, Runs]], cut: Sequence[_Cut]) -> dict[int, list[tuple[Chunk, Piece]]]:
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
        found.setdefault(rank, []).extend(_pieces(runs, numbers[rank], lead, edges, cut))
        numbers[rank] += 1
    return found


def _in_chunks(own: Arrangement, chunks: Mapping[str, Mapping[int, Chunk]], holders: int) -> dict[str, Stored]:
    """An arrangement's tensors as chunks on holders. Raises MismatchError."""
    found: dict[str, Stored] = {}
    known: dict[tuple[object, ...], InChunks] = {}
    for each in own.stored:
        if each.name not in chunks:
            continue
        at = chunks[each.name]
        assert each.geometry.chunks is None
        key = (each.geometry, id(at))
        if key not in known:
            whole = each.constant.shape if each.constant else each.geometry.shape(0) or ()
            check_tiling(each.name, dict(enumerate(dict.fromkeys(at.values()))), whole, _WHERE)
            known[key] = InChunks(each.geometry, at, holders)
        found[each.name] = each._replace(geometry=known[key])
    there = {atom for each in found.values() for atom in each.atoms}
    lacking = next((each.name for each in own.stored if not there.issuperset(each.atoms)), None)
    if lacking:
        raise MismatchError(f"one side lacks tensor '{lacking}', which the other has")
    strange = chunks.keys() - found.keys()
    if strange:
        raise MismatchError(f"tensor '{min(strange)}' is none of this model's")
    return found


def _pieces(
    held: Runs, part: int, lead: int, edges: Sequence[Sequence[int]], cut: Sequence[_Cut]
) -> Iterator[tuple[Chunk, Piece]]:
    """A part as chunks: all products of its runs, which are cut at ``edges``, and further where ``cut`` says."""
    dims = []
    for runs, of, where in itertools.zip_longest(held, edges, cut):
        at, found = 0, []
        for run in runs:
            inside = of[bisect_right(of, run.offset) : bisect_left(of, run.end)]
            ends = {run.offset, *inside, run.end}
            for a, b in itertools.pairwise(sorted(ends)) if where else ():
                ends |= {*where.ends(Run(a, b - a))}
            found += [(Run(a, b - a), at + a - run.offset) for a, b in itertools.pairwise(sorted(ends))]
            at += run.length
        dims.append(found)
    for product in itertools.product(*dims):
        chunk = Chunk(tuple(run.offset for run, _ in product), tuple(run.length for run, _ in product))
        if 0 not in chunk.shape:
            yield chunk, Piece(part, lead, tuple(local for _, local in product), chunk.shape)


@dataclass(frozen=True)
class _Cut:
    """Where runs of a stored dimension are cut, so that pieces are products of runs of its blocks.

    ``row`` is the length of what lies behind the first factors, if they are apart. ``slots`` has, for what is joined
    there, where it begins, where it ends, and the lengths of the blocks behind each of its blocks but the last.
    """

    row: int
    slots: tuple[tuple[int, int, tuple[int, ...]], ...]

    def ends(self, run: Run) -> Iterator[int]:
        """The indices at which a run is cut."""
        yield from _ends(run, (self.row,))
        for begin in range(run.offset // self.row * self.row, run.end, self.row):
            for first, last, inner in self.slots:
                a, b = max(run.offset - begin, first), min(run.end - begin, last)
                if a < b and inner:
                    yield from (begin + first + end for end in _ends(Run(a - first, b - a), inner))


def _ends(run: Run, inner: Sequence[int]) -> Iterator[int]:
    """Where a run is cut, so that each piece is a product of runs of factors; ``inner`` has the lengths behind them."""
    if not inner or not run.length:
        return
    first, last = -(-run.offset // inner[0]) * inner[0], run.end // inner[0] * inner[0]
    if first > last:
        base = last
        yield from (base + end for end in _ends(Run(run.offset - base, run.length), inner[1:]))
        return
    yield from (first, last)
    yield from (
        first - inner[0] + end for end in _ends(Run(run.offset - first + inner[0], first - run.offset), inner[1:])
    )
    yield from (last + end for end in _ends(Run(0, run.end - last), inner[1:]))


class _Cuts:
    """Where the live tensors of an arrangement are cut further, given the other side's arrangement."""

    def __init__(self, own: Arrangement, other: Arrangement) -> None:
        self._stored = {each.name: each for each in own.stored}
        self._other = other
        self._known: dict[tuple[object, ...], tuple[_Cut, ...]] = {}

    def of(self, name: str) -> tuple[_Cut, ...]:
        """For each dimension of a stored tensor."""
        stored = self._stored.get(name)
        if stored is None or stored.constant is not None or not stored.atoms:
            return ()
        geometry = stored.geometry
        assert geometry.chunks is None
        slots = len(geometry.portions)
        wanted = [self._other.placed.get(atom) for atom in stored.atoms[:slots]]
        key = (geometry, *(each and each.portion for each in wanted))
        if key not in self._known:
            self._known[key] = tuple(self._cuts(geometry, wanted))
        return self._known[key]

    @staticmethod
    def _cuts(geometry: Geometry, wanted: Sequence[Placed | None]) -> Iterator[_Cut]:
        portions, whole = geometry.portions, InChunks(geometry, {}, 0)
        inner = [_inner(geometry, slot, other) for slot, other in enumerate(wanted)]
        if geometry.is_stack:
            yield _Cut(1, ())
        for dim in range(len(portions[0].counts)):
            if dim == portions[0].dim and len(portions) > 1:
                extents = [whole.extent(0, slot) for slot in range(len(portions))]
                found = [(begin, end, of[dim]) for (begin, end, _), of in zip(extents, inner, strict=True)]
                yield _Cut(extents[0][2], tuple(found))
            else:
                size = (geometry.shape(0) or ())[dim + geometry.is_stack]
                yield _Cut(max(size, 1), tuple((0, size, of[dim]) for of in inner))


def _inner(geometry: Geometry, slot: int, wanted: Placed | None) -> list[tuple[int, ...]]:
    """For each stored dimension, the lengths of what lies behind each of an atom's blocks there but the last."""
    portion, layout = geometry.portions[slot], geometry.layouts[slot]
    dims = [*stored_dims(geometry.portions, slot)]
    if wanted is None or sorted(wanted.portion.order) != sorted(portion.order):
        return [()] * len(portion.counts)
    blocks = blocks_between(Placed(Stored("", "", geometry, ()), slot), wanted)
    if len(dims) > len(portion.counts):  # what is before the joined factors
        del dims[portion.dim]
    found = []
    for factors in dims:
        lengths = [math.prod(layout.padded[factor] for factor in block) for block in blocks if block[0] in factors]
        found.append(tuple(math.prod(lengths[place:]) for place in range(1, len(lengths))))
    return found


def blocks_between(held: Placed, wanted: Placed) -> Groups:
    """The blocks of an atom's factors that are together on both sides. Raises PlanError if the sides do not fit."""
    source, target = held.portion.order, wanted.portion.order
    if sorted(source) != sorted(target):
        raise PlanError(
            f"tensor '{held.stored.name}' is divided by blocks of scales, which live ranks cannot exchange",
            "push a model that is not quantized",
        )
    starts = {dim[0] for side in (held, wanted) for dim in _stored_dims(side) if dim}
    return blocks_of(source, target, starts)


def _stored_dims(placed: Placed) -> Groups:
    return stored_dims(placed.stored.geometry.portions, placed.number)
