"""The plan of a push: which rank sends which block of which atom to whom, in which order. Pure: no byte is moved."""

from __future__ import annotations

import itertools
import json
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from hashlib import sha256
from operator import itemgetter
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from formats.errors import PlanError
from formats.files.safetensors import DTYPE_BITS
from formats.notation.axes import Run
from reshard.live.meshes import TRAINERS, Target, arranged, held_on
from reshard.live.sides import Live, Side, by_rules, live_side, whole
from reshard.model.model import Model
from reshard.move.moves import check_atoms, conversion
from reshard.placement.arrangement import same_atoms
from reshard.placement.pieces import Piece, Runs, Spread
from reshard.placement.stored import Atom, Placed, blocks_of
from reshard.text import Result, align, human_bytes, human_time, plural
from reshard.version import __version__

BUCKET = 64 << 20
"""The bytes that a rank sends or receives at most in a step, by default."""
LINK = 50e9
"""Bytes a second that a rank sends or receives, if nobody says how many."""
MOST = 16
"""Of more ranks on a side, neighbours that send or receive as much are shown as one line."""
_SMALLEST = 4096


class Span(NamedTuple):
    """A range of a dimension: where it begins in the source's part and in the target's, and its length."""

    source: int
    target: int
    length: int


class Block(NamedTuple):
    """Elements of an atom that some holders have, any of which may send them, and others want.

    ``held`` and ``wanted`` have the number of the piece of each source and each target that has them. ``spans`` has the
    ranges of each dimension: all products of them are moved. ``numel`` is the number of elements.
    """

    sources: tuple[int, ...]
    held: tuple[int, ...]
    targets: tuple[int, ...]
    wanted: tuple[int, ...]
    spans: tuple[tuple[Span, ...], ...]
    numel: int


@dataclass(frozen=True, eq=False)
class Way:
    """How an atom goes from one side to the other; atoms that lie alike share it.

    ``before`` and ``after`` are its spreads on both sides, with the same dimensions.
    """

    number: int
    before: Spread
    after: Spread
    blocks: tuple[Block, ...]

    @cached_property
    def wants(self) -> tuple[tuple[Block, int], ...]:
        """All that is sent: each block to each of its targets."""
        return tuple((block, target) for block in self.blocks for target in block.targets)

    @cached_property
    def firsts(self) -> tuple[int, ...]:
        """The first holder that may send, for all that is sent."""
        return tuple(block.sources[0] for block, _ in self.wants)

    @cached_property
    def has_choice(self) -> bool:
        """Whether a block may be sent by one of several."""
        return any(len(block.sources) > 1 for block in self.blocks)


class Move(NamedTuple):
    """An atom that goes a way. ``senders`` has the holder that sends each of the way's ``wants``."""

    atom: Atom
    held: Placed
    wanted: Placed
    way: Way
    dtype: str
    """The dtype of what is sent."""
    senders: tuple[int, ...]


class Part(NamedTuple):
    """A block of a move from a holder of the source to one of the target."""

    move: Move
    block: Block
    source: int
    target: int

    @property
    def nbytes(self) -> int:
        """Bytes that are sent."""
        return self.block.numel * DTYPE_BITS[self.move.dtype] // 8


@dataclass(frozen=True, eq=False, repr=False)
class Routes(Result):
    """All moves of a push, in order, in buckets: ``ends`` has the number of the move behind each bucket."""

    source: Side
    target: Side
    moves: tuple[Move, ...]
    ends: tuple[int, ...]
    sent: tuple[int, ...]
    received: tuple[int, ...]

    @cached_property
    def digest(self) -> str:
        """The SHA-256 of all that two ranks must agree on."""
        hashed = sha256(json.dumps([__version__, self.source.ranks, self.target.ranks, self.ends]).encode())
        told: set[int] = set()
        for move in self.moves:
            way = move.way
            if way.number not in told:
                told.add(way.number)
                hashed.update(json.dumps([way.number, [*way.blocks]]).encode())
            names = (move.held.stored.name, move.wanted.stored.name, move.held.number, move.wanted.number)
            hashed.update(json.dumps([*move.atom, *names, way.number, move.dtype, move.senders]).encode())
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
        return "\n".join([self.headline, "", *align(cells, right=(1, 2), width=width), "", least])

    def bound(self, link: float) -> float:
        """The seconds that a push takes at least, where each rank sends and receives ``link`` bytes a second."""
        return max([*self.sent, *self.received]) / link

    def pairs(self) -> Counter[tuple[int, int]]:
        """The bytes that each rank of the source sends to each of the target, by their numbers on their sides."""
        found: Counter[tuple[int, int]] = Counter()
        for move in self.moves:
            item = DTYPE_BITS[move.dtype] // 8
            for (block, target), sender in zip(move.way.wants, move.senders, strict=True):
                found[sender // self.source.width, target // self.target.width] += block.numel * item
        return found

    def parts(self, rank: int) -> Iterator[list[Part]]:
        """For each bucket what a rank sends or receives, in order, elements of more bytes first.

        Ranks of the target count on from the source's.
        """
        known: dict[int, list[tuple[int, Block, int]]] = {}
        width, begin = self.source.width, 0
        for end in self.ends:
            parts = []
            for move in self.moves[begin:end]:
                if move.way.number not in known:
                    known[move.way.number] = self._of(rank, move.way)
                for number, block, target in known[move.way.number]:
                    if rank in (move.senders[number] // width, self._receiver(target)):
                        parts.append(Part(move, block, move.senders[number], target))
            yield sorted(parts, key=lambda part: -DTYPE_BITS[part.move.dtype])
            begin = end

    def _of(self, rank: int, way: Way) -> list[tuple[int, Block, int]]:
        """What a rank may send or receive of a way: the number of each of its ``wants``, the block, and the target."""
        return [
            (number, block, target)
            for number, (block, target) in enumerate(way.wants)
            if rank == self._receiver(target) or any(rank == holder // self.source.width for holder in block.sources)
        ]

    def _receiver(self, holder: int) -> int:
        return self.source.ranks + holder // self.target.width


def _rows(role: str, counts: Sequence[int]) -> Iterator[tuple[str, int]]:
    """A line for each rank, or for neighbours with the same number of bytes."""
    first = 0
    for number in range(1, len(counts) + 1):
        if number == len(counts) or len(counts) <= MOST or counts[number] != counts[first]:
            name = f"{role} {first}" if number == first + 1 else f"{role}s {first} to {number - 1}, each"
            yield name, counts[first]
            first = number


def between(
    model: Model, source: Live, target: Live | Target, *, bucket: int = BUCKET, hosts: Sequence[str] = ()
) -> Routes:
    """The plan of a push of a model from live ranks to others, or to those of a program by its rules. Raises PlanError,
    MismatchError.
    """
    if isinstance(target, Target) and (target.program in TRAINERS or target.fsdp * target.replicas > 1):
        target = held_on(model, target)
    there = whole(model, target) if isinstance(target, Live) else arranged(model, target)
    own, other = same_atoms(whole(model, source), there)
    wanted = live_side(target, other) if isinstance(target, Live) else by_rules(other)
    return routes(live_side(source, own), wanted, bucket=bucket, hosts=hosts)


def routes(source: Side, target: Side, *, bucket: int = BUCKET, hosts: Sequence[str] = ()) -> Routes:
    """The plan between two sides that are taken apart into the same atoms: each element once to each who lacks it.

    One of several replicas sends: of those on the receiver's host, if there are any, the one that sends least.
    ``hosts`` has the host of each rank, the target's behind the source's. Raises PlanError for what cannot be pushed.
    """
    if not isinstance(bucket, int) or bucket < _SMALLEST:
        raise PlanError(f"bucket={bucket!r} is no number of bytes from {_SMALLEST:,} on")
    check_atoms(source.arrangement, target.arrangement)
    found = _Planning(source, target, bucket, hosts)
    layers = {tensor.name: tensor.at[0] if tensor.at else -1 for tensor in target.arrangement.plan.model.tensors}
    for _, atoms in itertools.groupby(
        sorted(target.placed(), key=lambda each: layers[each[0].tensor]), lambda each: layers[each[0].tensor]
    ):
        found.add(atoms)
    return found.routes()


class _Planning:
    """Collects the moves of a push."""

    def __init__(self, source: Side, target: Side, bucket: int, hosts: Sequence[str]) -> None:
        self._source, self._target, self._bucket = source, target, bucket
        self._dtypes = {tensor.name: tensor.dtype for tensor in source.arrangement.plan.model.tensors}
        self._held = dict(source.placed())
        self._hosts = hosts or ["", *[""] * (source.ranks + target.ranks)]
        self._ways: dict[tuple[object, ...], tuple[Way, ...]] = {}
        self._costs: dict[tuple[int, str], NDArray[np.int64]] = {}
        ranks = source.ranks + target.ranks
        self._all, self._here = np.zeros(ranks, dtype=np.int64), np.zeros(ranks, dtype=np.int64)
        self._moves: list[Move] = []
        self._ends: list[int] = []
        self._count = 0

    def add(self, atoms: Iterable[tuple[Atom, Placed]]) -> None:
        """Plan the atoms of a layer, in turns from each of their senders. Raises PlanError."""
        moves = [move for atom, wanted in atoms for move in self._moves_of(atom, wanted)]
        turns: Counter[int] = Counter()
        ordered = []
        for move in moves:
            first = move.way.blocks[0].sources[0] if move.way.blocks else 0
            ordered.append((turns[first], move))
            turns[first] += 1
        for _, move in sorted(ordered, key=itemgetter(0)):
            self._place(move)

    def _moves_of(self, atom: Atom, wanted: Placed) -> Iterator[Move]:
        held = self._held.get(atom)
        if held is None or held.portion.function is not None:
            raise PlanError(f"no rank of the source holds tensor '{atom.tensor}', which the target wants")
        own, stored = self._source.dtype(held.stored), self._target.dtype(wanted.stored)
        same = own == stored and wanted.portion.function is None
        dtype = own if same else self._dtypes[atom.tensor]
        if not same and (dtype, wanted.portion.function) != (stored, None):
            if dtype == "F32" != stored:
                raise PlanError(
                    f"tensor '{held.stored.name}' is F32 in the trainer, and {stored} in a receiver",
                    f"push(dtype='{stored}') rounds it",
                )
            conversion(atom.tensor, dtype, stored, wanted.portion.function)  # raises, if there is none
        for way in self._ways_of(held, wanted, DTYPE_BITS[dtype] // 8):
            yield Move(atom, held, wanted, way, dtype, ())

    def _place(self, move: Move) -> None:
        way, key = move.way, (move.way.number, move.dtype)
        if way.has_choice:
            move, cost = self._chosen(move)
        else:
            move = move._replace(senders=way.firsts)
            if key not in self._costs:
                self._costs[key] = self._cost(move)
            cost = self._costs[key]
        if self._moves and int((self._here + cost).max()) > self._bucket:
            self._ends.append(len(self._moves))
            self._here[:] = 0
        self._here += cost
        self._all += cost
        self._moves.append(move)

    def _cost(self, move: Move) -> NDArray[np.int64]:
        """The bytes that each rank sends or receives for a move."""
        cost, first, item = np.zeros_like(self._all), self._source.ranks, DTYPE_BITS[move.dtype] // 8
        for (block, wanting), sender in zip(move.way.wants, move.senders, strict=True):
            cost[sender // self._source.width] += block.numel * item
            cost[first + wanting // self._target.width] += block.numel * item
        return cost

    def _chosen(self, move: Move) -> tuple[Move, NDArray[np.int64]]:
        """A move whose senders are those that send least so far."""
        width, first, item = self._source.width, self._source.ranks, DTYPE_BITS[move.dtype] // 8
        cost, senders = np.zeros_like(self._all), []
        for block, wanting in move.way.wants:
            receiver = first + wanting // self._target.width
            near = [s for s in block.sources if self._hosts[s // width] == self._hosts[receiver]] or block.sources
            sender = min(near, key=lambda holder: (self._all[holder // width] + cost[holder // width], holder))
            cost[sender // width] += block.numel * item
            cost[receiver] += block.numel * item
            senders.append(sender)
        return move._replace(senders=tuple(senders)), cost

    def _ways_of(self, held: Placed, wanted: Placed, item: int) -> tuple[Way, ...]:
        """The way of an atom; several, one for each part, if it is larger than a bucket."""
        blocks = blocks_of(held, wanted)
        if blocks is None:
            raise PlanError(
                f"tensor '{held.stored.name}' is divided by blocks of scales, which live ranks cannot exchange",
                "push a model that is not quantized",
            )
        before, after = held.spread(blocks), wanted.spread(blocks)
        key = (before, after, item)
        if key not in self._ways:
            shapes = (piece.shape for side in (before, after) for of in side.pieces.values() for piece in of)
            largest = max(map(math.prod, shapes), default=0)
            windows = _windows(before.full, -(-largest * item // self._bucket))
            ways = []
            for window in windows:
                common = tuple(_blocks(before, after, window))
                _check_covered(held, wanted, common, after, window)
                ways.append(Way(self._count, before, after, common))
                self._count += 1
            self._ways[key] = tuple(ways)
        return self._ways[key]

    def routes(self) -> Routes:
        """The plan."""
        ends, first = (*self._ends, *([len(self._moves)] if self._moves else [])), self._source.ranks
        sent, received = self._all[:first].tolist(), self._all[first:].tolist()
        return Routes(self._source, self._target, tuple(self._moves), ends, tuple(sent), tuple(received))


_Window = tuple[Run, ...]


def _windows(full: Sequence[int], count: int) -> Sequence[_Window]:
    """An atom's dimensions as a whole, or in so many parts along the longest of them."""
    whole = tuple(Run(0, size) for size in full)
    if count <= 1 or not full:
        return [whole]
    dim = max(range(len(full)), key=lambda place: full[place])
    ends = [full[dim] * i // count for i in range(count + 1)]
    parts = (Run(a, b - a) for a, b in itertools.pairwise(ends) if a < b)
    return [(*whole[:dim], part, *whole[dim + 1 :]) for part in parts]


def _blocks(before: Spread, after: Spread, window: _Window) -> Iterator[Block]:
    """What goes from where to where: for each piece that differs between holders, on both sides."""
    sources, targets = _alike(before), _alike(after)
    for held, holders in sources.items():
        for wanted, wanting in targets.items():
            spans = tuple(map(spans_of, held, wanted, window))
            if all(spans):
                numel = math.prod(sum(span.length for span in dim) for dim in spans)
                ends = [tuple(each[i] for each in of) for of in (holders, wanting) for i in (0, 1)]
                yield Block(ends[0], ends[1], ends[2], ends[3], spans, numel)


def _alike(spread: Spread) -> Mapping[tuple[Runs, ...], list[tuple[int, int]]]:
    """The holders of pieces with the same elements, each with the number of its piece."""
    found: dict[tuple[Runs, ...], list[tuple[int, int]]] = {}
    for holder, pieces in spread.pieces.items():
        for number, piece in enumerate(pieces):
            found.setdefault(piece.runs, []).append((holder, number))
    return found


@lru_cache(maxsize=1 << 16)
def spans_of(held: tuple[Run, ...], wanted: tuple[Run, ...], window: Run) -> tuple[Span, ...]:
    """The ranges of a dimension within a window that both sides have; neighbours on both sides are joined."""
    found: list[Span] = []
    at = 0
    for run in held:
        to = 0
        for other in wanted:
            begin, end = max(run.offset, other.offset, window.offset), min(run.end, other.end, window.end)
            if begin < end:
                span = Span(at + begin - run.offset, to + begin - other.offset, end - begin)
                last = found[-1] if found else None
                if last and last.source + last.length == span.source and last.target + last.length == span.target:
                    found[-1] = last._replace(length=last.length + span.length)
                else:
                    found.append(span)
            to += other.length
        at += run.length
    return tuple(found)


def _check_covered(held: Placed, wanted: Placed, blocks: Sequence[Block], after: Spread, window: _Window) -> None:
    """Raise PlanError unless each target gets each of its elements once; what is padding, it has for itself."""
    got: dict[int, int] = {}
    for block in blocks:
        for target in block.targets:
            got[target] = got.get(target, 0) + block.numel
    for target, pieces in after.pieces.items():
        should = sum(_inside(piece, window) for piece in pieces)
        if got.get(target, 0) != should:
            raise PlanError(
                f"tensor '{held.stored.name}': a target rank wants {should:,} elements of '{wanted.stored.name}', and "
                f"gets {got.get(target, 0):,}"
            )


def _inside(piece: Piece, window: _Window) -> int:
    """The elements of a piece within a window, without padding."""
    return math.prod(
        sum(max(0, min(run.end, part.end) - max(run.offset, part.offset)) for run in runs)
        for runs, part in zip(piece.runs, window, strict=True)
    )
