"""The plan of a push: which rank sends which block of which atom to whom, in which order. Pure: no byte is moved."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from hashlib import sha256
from operator import itemgetter
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from formats.errors import PlanError, listed
from formats.files.safetensors import DTYPE_BITS
from reshard import __version__
from reshard.live.meshes import TRAINERS, Target, arranged, trainer_state
from reshard.live.sides import LiveState, Side, by_rules, live_side, whole
from reshard.model.model import Model
from reshard.move.moves import check_atoms, conversion
from reshard.placement.arrangement import align_atoms
from reshard.placement.pieces import Box, Position, boxes
from reshard.placement.stored import Atom, Location
from reshard.text import Result, align, human_bytes, human_time, plural

BUCKET = 64 << 20
"""The bytes that a rank sends or receives at most in a step, by default."""
LINK = 50e9
"""Bytes a second that a rank sends or receives, if nobody says how many."""
MOST = 16
"""Of more ranks on a side, neighbours that send or receive as much are shown as one line."""
_SMALLEST = 4096


@dataclass(frozen=True, eq=False)
class Link:
    """How an atom, or a part of it, goes from one side to the other; atoms that lie alike share it.

    Any source of a box may send it. It goes to each of its targets.
    """

    number: int
    boxes: tuple[Box, ...]

    @cached_property
    def wants(self) -> tuple[tuple[Box, Position], ...]:
        """All that is sent: each box to each of its targets."""
        return tuple((box, target) for box in self.boxes for target in box.targets)

    @cached_property
    def firsts(self) -> tuple[Position, ...]:
        """The first who may send, for all that is sent."""
        return tuple(box.sources[0] for box, _ in self.wants)

    @cached_property
    def has_choice(self) -> bool:
        """Whether a box may be sent by one of several."""
        return any(len(box.sources) > 1 for box in self.boxes)


class Move(NamedTuple):
    """An atom that goes a way. ``senders`` says from where each of the way's ``wants`` is sent."""

    atom: Atom
    src: Location
    dst: Location
    way: Link
    dtype: str
    """The dtype of what is sent."""
    senders: tuple[Position, ...]


class Part(NamedTuple):
    """A box of a move from one position to another."""

    move: Move
    box: Box
    source: Position
    target: Position

    @property
    def nbytes(self) -> int:
        """Bytes that are sent."""
        return self.box.numel * DTYPE_BITS[self.move.dtype] // 8


class View(NamedTuple):
    """A box in one of a rank's tensors: that of this name, and of this number among those of the name, as if it were
    contiguous. ``offset`` is from its first element on.
    """

    name: str
    number: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


def view_of(part: Part, side: Side, *, sends: bool) -> View:
    """A part's box on one side."""
    (stored, number), at = (part.move.src, part.source) if sends else (part.move.dst, part.target)
    offset = stored.geometry.first(at.holder, number) + at.base
    if side.parts is None:
        return View(stored.name_on(at.holder), 0, part.box.shape, at.strides, offset)
    return View(stored.name, side.parts[stored.name][at.holder], part.box.shape, at.strides, offset)


@dataclass(frozen=True, eq=False, repr=False)
class Routes(Result):
    """All moves of a push, in order, in buckets: ``ends`` has the number of the move behind each bucket.

    ``beyond`` has the receivers' buffers that no checkpoint has: they are left alone.
    """

    source: Side
    target: Side
    moves: tuple[Move, ...]
    ends: tuple[int, ...]
    sent: tuple[int, ...]
    received: tuple[int, ...]
    beyond: tuple[str, ...] = ()

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
                nbytes[sender.holder // self.source.width, target.holder // self.target.width] += box.numel * item
        return nbytes

    def parts(self, rank: int) -> Iterator[list[Part]]:
        """For each bucket what a rank sends or receives, in order, elements of more bytes first.

        Ranks of the target count on from the source's.
        """
        boxes_of: dict[int, list[tuple[int, Box, Position]]] = {}
        width, begin = self.source.width, 0
        for end in self.ends:
            parts = []
            for move in self.moves[begin:end]:
                if move.way.number not in boxes_of:
                    boxes_of[move.way.number] = [
                        (number, box, target)
                        for number, (box, target) in enumerate(move.way.wants)
                        if rank == self._receiver(target) or any(rank == piece.holder // width for piece in box.sources)
                    ]
                for number, box, target in boxes_of[move.way.number]:
                    if rank in (move.senders[number].holder // width, self._receiver(target)):
                        parts.append(Part(move, box, move.senders[number], target))
            yield sorted(parts, key=lambda part: -DTYPE_BITS[part.move.dtype])
            begin = end

    def _receiver(self, at: Position) -> int:
        return self.source.ranks + at.holder // self.target.width


def _rows(role: str, counts: Sequence[int]) -> Iterator[tuple[str, int]]:
    """A line for each rank, or for neighbours with the same number of bytes."""
    first = 0
    for number in range(1, len(counts) + 1):
        if number == len(counts) or len(counts) <= MOST or counts[number] != counts[first]:
            name = f"{role} {first}" if number == first + 1 else f"{role}s {first} to {number - 1}, each"
            yield name, counts[first]
            first = number


def plan_push(
    model: Model, source: LiveState, target: LiveState | Target, *, bucket: int = BUCKET, hosts: Sequence[str] = ()
) -> Routes:
    """The plan of a push of a model from live ranks to others, or to those of a program by its rules. Raises PlanError,
    MismatchError.
    """
    if isinstance(target, Target) and (target.program in TRAINERS or target.fsdp * target.replicas > 1):
        target = trainer_state(model, target)
    goal = whole(model, target) if isinstance(target, LiveState) else arranged(model, target)
    origin, wanted_atoms = align_atoms(whole(model, source), goal)
    target_side = live_side(target, wanted_atoms) if isinstance(target, LiveState) else by_rules(wanted_atoms)
    return routes(live_side(source, origin), target_side, bucket=bucket, hosts=hosts)


def routes(source: Side, target: Side, *, bucket: int = BUCKET, hosts: Sequence[str] = ()) -> Routes:
    """The plan between two sides that are taken apart into the same atoms: each element once to each who lacks it.

    One of several replicas sends: of those on the receiver's host, if there are any, the one that sends least.
    ``hosts`` has the host of each rank, the target's behind the source's. Raises PlanError for what cannot be pushed.
    """
    if not isinstance(bucket, int) or bucket < _SMALLEST:
        raise PlanError(f"bucket={bucket!r} is no number of bytes from {_SMALLEST:,} on")
    check_atoms(source.arrangement, target.arrangement)
    planning = _Planning(source, target, bucket, hosts)
    layers = {tensor.name: tensor.at[0] if tensor.at else -1 for tensor in target.arrangement.plan.model.tensors}
    for _, atoms in itertools.groupby(
        sorted(target.atoms(), key=lambda entry: layers[entry[0].tensor]), lambda entry: layers[entry[0].tensor]
    ):
        planning.add(atoms)
    return planning.routes()


class _Planning:
    """Collects the moves of a push."""

    def __init__(self, source: Side, target: Side, bucket: int, hosts: Sequence[str]) -> None:
        self._source, self._target, self._bucket = source, target, bucket
        self._dtypes = {tensor.name: tensor.dtype for tensor in source.arrangement.plan.model.tensors}
        self._locations = dict(source.atoms())
        self._hosts = hosts or ["", *[""] * (source.ranks + target.ranks)]
        self._ways: dict[tuple[object, ...], tuple[Link, ...]] = {}
        self._costs: dict[tuple[int, str], NDArray[np.int64]] = {}
        ranks = source.ranks + target.ranks
        self._all, self._load = np.zeros(ranks, dtype=np.int64), np.zeros(ranks, dtype=np.int64)
        self._moves: list[Move] = []
        self._ends: list[int] = []
        self._count = 0

    def add(self, atoms: Iterable[tuple[Atom, Location]]) -> None:
        """Plan the atoms of a layer, in turns from each of their senders. Raises PlanError."""
        turns: Counter[int] = Counter()
        ordered = []
        for move in (move for atom, dst in atoms for move in self._moves_of(atom, dst)):
            first = move.way.boxes[0].sources[0].holder if move.way.boxes else 0
            ordered.append((turns[first], move))
            turns[first] += 1
        for _, move in sorted(ordered, key=itemgetter(0)):
            self._place(move)

    def _moves_of(self, atom: Atom, dst: Location) -> Iterator[Move]:
        src = self._locations.get(atom)
        if src is None or src.portion.function is not None:
            raise PlanError(f"no rank of the source holds tensor '{atom.tensor}', which the target wants")
        src_dtype, dst_dtype = self._source.dtype(src.stored), self._target.dtype(dst.stored)
        same = src_dtype == dst_dtype and dst.portion.function is None
        dtype = src_dtype if same else self._dtypes[atom.tensor]
        if not same and (dtype, dst.portion.function) != (dst_dtype, None):
            if dtype == "F32" != dst_dtype:
                raise PlanError(
                    f"tensor '{src.stored.name}' is F32 in the trainer, and {dst_dtype} in a receiver",
                    f"push(dtype='{dst_dtype}') rounds it",
                )
            conversion(atom.tensor, dtype, dst_dtype, dst.portion.function)  # raises, if there is none
        for way in self._ways_of(src, dst, DTYPE_BITS[dtype] // 8):
            yield Move(atom, src, dst, way, dtype, ())

    def _place(self, move: Move) -> None:
        way, key = move.way, (move.way.number, move.dtype)
        if way.has_choice:
            move, cost = self._chosen(move)
        else:
            move = move._replace(senders=way.firsts)
            if key not in self._costs:
                self._costs[key] = self._cost(move)
            cost = self._costs[key]
        if self._moves and int((self._load + cost).max()) > self._bucket:
            self._ends.append(len(self._moves))
            self._load[:] = 0
        self._load += cost
        self._all += cost
        self._moves.append(move)

    def _cost(self, move: Move) -> NDArray[np.int64]:
        """The bytes that each rank sends or receives for a move."""
        cost, first, item = np.zeros_like(self._all), self._source.ranks, DTYPE_BITS[move.dtype] // 8
        for (box, target), sender in zip(move.way.wants, move.senders, strict=True):
            cost[sender.holder // self._source.width] += box.numel * item
            cost[first + target.holder // self._target.width] += box.numel * item
        return cost

    def _chosen(self, move: Move) -> tuple[Move, NDArray[np.int64]]:
        """A move whose senders are those that send least so far."""
        width, first, item = self._source.width, self._source.ranks, DTYPE_BITS[move.dtype] // 8
        cost, senders = np.zeros_like(self._all), []
        for box, target in move.way.wants:
            receiver = first + target.holder // self._target.width
            near = [at for at in box.sources if self._hosts[at.holder // width] == self._hosts[receiver]]
            ranks = [(at.holder // width, at) for at in near or box.sources]
            rank, sender = min(ranks, key=lambda entry: (self._all[entry[0]] + cost[entry[0]], entry[1].holder))
            cost[rank] += box.numel * item
            cost[receiver] += box.numel * item
            senders.append(sender)
        return move._replace(senders=tuple(senders)), cost

    def _ways_of(self, src: Location, dst: Location, item: int) -> tuple[Link, ...]:
        """The way of an atom; several, one for each part, if it is larger than a bucket."""
        from_spread, to_spread = src.spread, dst.spread
        if len(from_spread.full) != len(to_spread.full):
            raise PlanError(
                f"tensor '{src.stored.name}' is divided by blocks of scales, which live ranks cannot exchange",
                "push a model that is not quantized",
            )
        key = (from_spread, to_spread, item)
        if key not in self._ways:
            common = tuple(boxes(from_spread, to_spread))
            if any(not box.sources for box in common):
                raise PlanError(
                    f"no rank of the source holds all of tensor '{src.stored.name}', which the target wants"
                )
            load = Counter[int]()
            for box in common:
                load[~box.sources[0].holder] += box.numel * len(box.targets)
                load.update({at.holder: box.numel for at in box.targets})
            ways = [common]
            if max(load.values(), default=0) * item > self._bucket:
                ways = [(part,) for box in common for part in _cut(box, self._bucket // item)]
            self._ways[key] = tuple(Link(number, way) for number, way in enumerate(ways, self._count))
            self._count += len(ways)
        return self._ways[key]

    def routes(self) -> Routes:
        """The plan."""
        ends, first = (*self._ends, *([len(self._moves)] if self._moves else [])), self._source.ranks
        sent, received = self._all[:first].tolist(), self._all[first:].tolist()
        return Routes(self._source, self._target, tuple(self._moves), ends, tuple(sent), tuple(received))


def _cut(box: Box, most: int) -> Iterator[Box]:
    """A box in parts of which at most so many elements are sent, if it is possible."""
    dim = max(range(len(box.shape)), key=lambda dim: box.shape[dim], default=0)
    sent = box.numel * len(box.targets)
    if sent <= most or box.numel == 1:
        yield box
        return
    size = box.shape[dim]
    each = max(1, size * most // sent)
    for begin in range(0, size, each):
        yield from _cut(box.within(dim, begin, min(each, size - begin)), most)
