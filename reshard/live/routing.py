"""The plan of a push: which rank sends which block of which atom to whom, in which order. No byte is moved."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from hashlib import sha256
from operator import itemgetter
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from reshard.formats.errors import PlanError, listed
from reshard.formats.files.safetensors import DTYPE_BITS
from reshard.live.meshes import TRAINERS, Target, arranged, headers_of, target_of, trainer_state
from reshard.live.sides import LiveState, PushSide, by_rules, live_side, whole
from reshard.model.model import Model
from reshard.move.changes import Change
from reshard.move.moves import check_atoms
from reshard.placement.arrangement import align_atoms
from reshard.placement.pieces import PieceBox, Position, boxes
from reshard.placement.stored import Atom, Location
from reshard.source.access import Place
from reshard.text import Result, align, human_bytes, human_time, plural
from reshard.version import __version__

BUCKET = 64 << 20
"""The bytes that a rank sends or receives at most in a step, by default."""
LINK = 50e9
"""Bytes a second that a rank sends or receives, if nobody says how many."""
MOST = 16
"""The most ranks of a side that are shown one by one. Of more, neighbours with equal traffic are shown as one line."""
_SMALLEST = 4096


@dataclass(frozen=True, eq=False)
class Link:
    """The boxes of an atom, or of a part of it, that go from one side to the other. Atoms that lie alike share a link.

    Any source of a box may send it; each of its targets receives it. ``has_choice``: a box has several sources.
    """

    number: int
    boxes: tuple[PieceBox, ...]
    has_choice: bool

    @cached_property
    def wants(self) -> tuple[tuple[PieceBox, Position], ...]:
        """All that is sent: each box to each of its targets."""
        return tuple((box, target) for box in self.boxes for target in box.targets)


class Move(NamedTuple):
    """An atom that goes a way. ``senders`` says from where each of the way's ``wants`` is sent."""

    atom: Atom
    src: Location
    dst: Location
    way: Link
    dtype: str
    """The dtype of the bytes that are sent."""
    senders: tuple[Position, ...] = ()


class MovedBox(NamedTuple):
    """A box of a move, from one position to another, and the processes that send and receive it. The target's processes
    are numbered after the source's.
    """

    move: Move
    box: PieceBox
    source: Position
    target: Position
    sender: int
    receiver: int

    @property
    def nbytes(self) -> int:
        """Bytes that are sent."""
        return self.box.numel * DTYPE_BITS[self.move.dtype] // 8

    @property
    def function(self) -> str | None:
        """The function that the target applies to each element; None if it stores the element itself."""
        return self.move.dst.portion.function


class View(NamedTuple):
    """A box in one of a rank's tensors: the tensor's name, its number among the rank's tensors of this name, and the
    box as if the tensor were contiguous. ``offset`` counts from the first element.
    """

    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    name: str = ""
    number: int = 0


def view_of(part: MovedBox, side: PushSide, *, sends: bool) -> View:
    """A part's box on one side."""
    (stored, number), at = (part.move.src, part.source) if sends else (part.move.dst, part.target)
    offset = stored.geometry.first(at.holder, number) + at.base
    which, rank = divmod(at.holder, side.ranks)
    return View(offset, part.box.shape, at.strides, stored.name_on(rank), which)


@dataclass(frozen=True, eq=False, repr=False)
class Routes(Result):
    """All moves of a push, in order, in buckets: ``ends`` has the number of the move behind each bucket."""

    source: PushSide
    target: PushSide
    moves: tuple[Move, ...]
    ends: tuple[int, ...]
    sent: tuple[int, ...]
    received: tuple[int, ...]

    @cached_property
    def digest(self) -> str:
        """The SHA-256 of all that two ranks must agree on."""
        hashed = sha256(json.dumps([__version__, self.source.ranks, self.target.ranks, self.ends]).encode())
        hashed_ways: set[int] = set()
        for move in self.moves:
            way = move.way
            if way.number not in hashed_ways:
                hashed_ways.add(way.number)
                hashed.update(json.dumps([way.number, way.boxes]).encode())
            names = (move.src.stored.name, move.dst.stored.name, move.src.number, move.dst.number)
            chosen = [at.holder for at in move.senders] if way.has_choice else []
            hashed.update(json.dumps([*move.atom, *names, way.number, move.dtype, chosen]).encode())
        return hashed.hexdigest()

    @property
    def beyond(self) -> tuple[str, ...]:
        """The receivers' buffers that no checkpoint has: they are left alone."""
        return self.target.live.beyond if self.target.live is not None else ()

    @property
    def nbytes(self) -> int:
        """All bytes that are sent."""
        return sum(self.sent)

    @property
    def headline(self) -> str:
        """The bytes, the ranks and the steps."""
        ranks = f"from {plural(len(self.sent), 'rank')} to {plural(len(self.received), 'rank')}"
        return f"{human_bytes(self.nbytes)} {ranks} in {plural(len(self.ends), 'step')}"

    def to_text(self, width: int | None = None, link: float = LINK) -> str:
        """Who sends and receives how much, and the least time at ``link`` bytes a second of a rank."""
        cells = [("", "sends", "receives")]
        cells += [(name, human_bytes(count), "") for name, count in _rows("trainer", self.sent)]
        cells += [(name, "", human_bytes(count)) for name, count in _rows("receiver", self.received)]
        most = "sends" if max(self.sent) > max(self.received) else "receives"
        least = f"At least {human_time(self.bound(link))}, by what the busiest {most} at {human_bytes(link)}/s."
        alone = [f"Left alone, as no checkpoint has them: {listed(self.beyond, 4)}."] if self.beyond else []
        return "\n".join([self.headline, "", *align(cells, right=(1, 2), width=width), "", least, *alone])

    def bound(self, link: float) -> float:
        """The seconds that a push takes at least, where each rank sends and receives ``link`` bytes a second."""
        return max([*self.sent, *self.received]) / link

    def pairs(self) -> Counter[tuple[int, int]]:
        """The bytes that each rank of the source sends to each of the target, by their numbers on their sides."""
        nbytes: Counter[tuple[int, int]] = Counter()
        for move in self.moves:
            item = DTYPE_BITS[move.dtype] // 8
            for (box, target), sender in zip(move.way.wants, move.senders, strict=True):
                pair = sender.holder % self.source.ranks, target.holder % self.target.ranks
                nbytes[pair] += box.numel * item
        return nbytes

    def parts(self, process: int) -> Iterator[list[MovedBox]]:
        """For each bucket, the parts that a process sends or receives, in order; dtypes of more bytes come first.

        Ranks of the target count on from the source's.
        """
        wants_of: dict[int, list[tuple[int, PieceBox, Position, int]]] = {}
        first, begin = self.source.ranks, 0
        for end in self.ends:
            parts = []
            for move in self.moves[begin:end]:
                if move.way.number not in wants_of:
                    wants_of[move.way.number] = [
                        (number, box, target, receiver)
                        for number, (box, target) in enumerate(move.way.wants)
                        for receiver in [first + target.holder % self.target.ranks]
                        if process == receiver or any(process == at.holder % first for at in box.sources)
                    ]
                for number, box, target, receiver in wants_of[move.way.number]:
                    sender = move.senders[number]
                    if process in (sender.holder % first, receiver):
                        parts.append(MovedBox(move, box, sender, target, sender.holder % first, receiver))
            yield sorted(parts, key=lambda part: -DTYPE_BITS[part.move.dtype])
            begin = end


def _rows(role: str, counts: Sequence[int]) -> Iterator[tuple[str, int]]:
    """A line for each rank, or for neighbours with the same number of bytes."""
    first = 0
    for number in range(1, len(counts) + 1):
        if number == len(counts) or len(counts) <= MOST or counts[number] != counts[first]:
            name = f"{role} {first}" if number == first + 1 else f"{role}s {first} to {number - 1}, each"
            yield name, counts[first]
            first = number


def routes(
    checkpoint: Place, *, source: Target | str, target: Target | str, bucket: int = BUCKET, **access: Any
) -> Routes:
    """The plan of a push of a checkpoint's model between ranks that need not run, such as ``fsdp2:8`` and ``vllm:tp4``.

    ``access`` are the fields of ``reshard.source.access.Access``. Reads headers only. Raises ReshardError.
    """
    model = headers_of(checkpoint, access).model
    return plan_push(model, trainer_state(model, target_of(source)), target_of(target), bucket=bucket)


def document(plan: Routes) -> Iterator[dict[str, Any]]:
    """The blocks of a plan as JSON objects: rank by rank of the source, in the order in which each sends.

    A block goes from rank ``from`` of the source to rank ``to`` of the target, in step ``step``: on each side a view of
    the rank's own contiguous tensor, with ``offset``, ``shape`` and ``stride`` in elements. Both views have one shape.
    """
    for sender in range(plan.source.ranks):
        for step, parts in enumerate(plan.parts(sender)):
            for part in parts:
                sent, received = view_of(part, plan.source, sends=True), view_of(part, plan.target, sends=False)
                yield {
                    "step": step, "from": sender, "to": part.receiver - plan.source.ranks,
                    "tensor": part.move.atom.tensor, "dtype": part.move.dtype, "shape": [*sent.shape],
                    "source": {"tensor": sent.name, "offset": sent.offset, "stride": [*sent.stride]},
                    "target": {"tensor": received.name, "offset": received.offset, "stride": [*received.stride]},
                }  # fmt: skip


def plan_push(
    model: Model, source: LiveState, target: LiveState | Target, *, bucket: int = BUCKET, hosts: Sequence[str] = ()
) -> Routes:
    """Plan a push of a model from live ranks to others, or to the ranks of a program by its rules. Raises PlanError,
    MismatchError.
    """
    if isinstance(target, Target) and (target.program in TRAINERS or target.fsdp * target.replicas > 1):
        target = trainer_state(model, target)
    goal = whole(model, target) if isinstance(target, LiveState) else arranged(model, target)
    origin, wanted_atoms = align_atoms(whole(model, source), goal)
    target_side = live_side(target, wanted_atoms) if isinstance(target, LiveState) else by_rules(wanted_atoms)
    return routes_between(live_side(source, origin), target_side, bucket=bucket, hosts=hosts)


def routes_between(source: PushSide, target: PushSide, *, bucket: int = BUCKET, hosts: Sequence[str] = ()) -> Routes:
    """The plan between two sides that are taken apart into the same atoms: each element once to each who lacks it.

    One of several replicas sends: of those on the receiver's host, if there are any, the one that sends least.
    ``hosts`` has the host of each rank, the target's behind the source's. Raises PlanError for what cannot be pushed.
    """
    if not isinstance(bucket, int) or bucket < _SMALLEST:
        raise PlanError(f"bucket={bucket!r} should be a number of bytes, at least {_SMALLEST:,}")
    check_atoms(source.arrangement, target.arrangement)
    first, locations = source.ranks, dict(source.atoms())
    tensors = {tensor.name: tensor.dtype for tensor in source.arrangement.plan.model.tensors}
    hosts = hosts or [""] * (first + target.ranks)
    links: dict[tuple[object, ...], list[Link]] = {}
    costs: dict[tuple[int, str], tuple[tuple[Position, ...], NDArray[np.int64]]] = {}
    total = np.zeros(first + target.ranks, dtype=np.int64)
    count, load, moves, ends = itertools.count(), np.zeros_like(total), list[Move](), list[int]()

    def moves_of(atom: Atom, dst: Location) -> Iterator[Move]:
        """An atom's move; several, one for each part, if it is larger than a bucket. Raises PlanError."""
        src = locations.get(atom)
        if src is None or src.portion.function is not None:
            raise PlanError(f"no rank of the source holds tensor '{atom.tensor}', which the target wants")
        same = src.stored.dtype == dst.stored.dtype and dst.portion.function is None
        dtype, stored = src.stored.dtype if same else tensors[atom.tensor], (dst.stored.dtype, dst.portion.function)
        if not same and (dtype, None) != stored:
            if dtype == "F32" != dst.stored.dtype:
                raise PlanError(
                    f"tensor '{src.stored.name}' is F32 in the trainer, and {dst.stored.dtype} in a receiver",
                    f"push(dtype='{dst.stored.dtype}') rounds it",
                )
            Change(atom.tensor, dtype, *stored).elements()  # raises, if there is none
        origin, goal, item = src.spread, dst.spread, DTYPE_BITS[dtype] // 8
        if len(origin.full) != len(goal.full):
            raise PlanError(
                f"tensor '{src.stored.name}' is divided by blocks of scales, which live ranks cannot exchange",
                "push a model that is not quantized",
            )
        key = origin, goal, item
        if key not in links:
            common = tuple(boxes(origin, goal))
            if any(not box.sources for box in common):
                raise PlanError(
                    f"no rank of the source holds all of tensor '{src.stored.name}', which the target wants"
                )
            most = Counter[int]()
            for box in common:
                most[box.sources[0].holder % first] += box.numel * len(box.targets)
                most.update({first + at.holder % target.ranks: box.numel for at in box.targets})
            ways = [common]
            if max(most.values(), default=0) * item > bucket:
                ways = [(part,) for box in common for part in _cut(box, bucket // item)]
            links[key] = [Link(next(count), way, any(len(box.sources) > 1 for box in way)) for way in ways]
        return (Move(atom, src, dst, way, dtype) for way in links[key])

    def chosen(move: Move) -> tuple[tuple[Position, ...], NDArray[np.int64]]:
        """Choose the sender of each box of a move: the process that has sent least so far. Returns the bytes that each
        sends or receives for it.
        """
        item, cost, senders = DTYPE_BITS[move.dtype] // 8, np.zeros_like(total), list[Position]()
        for box, want in move.way.wants:
            receiver = first + want.holder % target.ranks
            near = [at for at in box.sources if hosts[at.holder % first] == hosts[receiver]]
            ranks = [
                (total[at.holder % first] + cost[at.holder % first], at.holder % first, at)
                for at in near or box.sources
            ]
            senders.append(min(ranks)[2])
            cost[senders[-1].holder % first] += box.numel * item
            cost[receiver] += box.numel * item
        return tuple(senders), cost

    layers = {tensor.name: tensor.at[0] if tensor.at else -1 for tensor in target.arrangement.plan.model.tensors}
    atoms = sorted(target.atoms(), key=lambda entry: layers[entry[0].tensor])
    for _, of_layer in itertools.groupby(atoms, lambda entry: layers[entry[0].tensor]):
        turns, ordered = Counter[int](), list[tuple[int, Move]]()
        for move in itertools.chain.from_iterable(itertools.starmap(moves_of, of_layer)):
            sender = move.way.boxes[0].sources[0].holder % first if move.way.boxes else 0
            ordered.append((turns[sender], move))
            turns[sender] += 1
        for _, move in sorted(ordered, key=itemgetter(0)):  # in turns from each of the layer's senders
            key = move.way.number, move.dtype
            if move.way.has_choice or key not in costs:
                costs[key] = chosen(move)
            senders, cost = costs[key]
            if moves and int((load + cost).max()) > bucket:
                ends.append(len(moves))
                load[:] = 0
            load += cost
            total += cost
            moves.append(move._replace(senders=senders))
    if moves:
        ends.append(len(moves))
    sent, received = total[:first].tolist(), total[first:].tolist()
    return Routes(source, target, tuple(moves), tuple(ends), tuple(sent), tuple(received))


def _cut(box: PieceBox, most: int) -> Iterator[PieceBox]:
    """Cut a box into parts of at most so many elements, if possible."""
    dim = max(range(len(box.shape)), key=lambda dim: box.shape[dim], default=0)
    sent = box.numel * len(box.targets)
    if sent <= most or box.numel == 1:
        yield box
        return
    size = box.shape[dim]
    each = max(1, size * most // sent)
    for begin in range(0, size, each):
        yield from _cut(box.within(dim, begin, min(each, size - begin)), most)
