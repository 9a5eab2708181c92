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
from reshard import __version__
from reshard.live.meshes import TRAINERS, Target, arranged, trainer_state
from reshard.live.sides import LiveState, Side, by_rules, live_side, whole
from reshard.model.model import Model
from reshard.move.moves import check_atoms, conversion
from reshard.placement.arrangement import align_atoms
from reshard.placement.pieces import Piece, Runs, Spread
from reshard.placement.stored import Atom, Location, blocks_of
from reshard.text import Result, align, human_bytes, human_time, plural

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

    ``src`` and ``dst`` have the number of the piece of each source and each target that has them. ``spans`` has the
    ranges of each dimension: all products of them are moved. ``numel`` is the number of elements.
    """

    sources: tuple[int, ...]
    src: tuple[int, ...]
    targets: tuple[int, ...]
    dst: tuple[int, ...]
    spans: tuple[tuple[Span, ...], ...]
    numel: int


@dataclass(frozen=True, eq=False)
class Link:
    """How an atom goes from one side to the other; atoms that lie alike share it.

    ``source`` and ``target`` are its spreads on both sides, with the same dimensions.
    """

    number: int
    source: Spread
    target: Spread
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
    src: Location
    dst: Location
    way: Link
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
        hashed_ways: set[int] = set()
        for move in self.moves:
            way = move.way
            if way.number not in hashed_ways:
                hashed_ways.add(way.number)
                hashed.update(json.dumps([way.number, [*way.blocks]]).encode())
            names = (move.src.stored.name, move.dst.stored.name, move.src.number, move.dst.number)
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
        nbytes: Counter[tuple[int, int]] = Counter()
        for move in self.moves:
            item = DTYPE_BITS[move.dtype] // 8
            for (block, target), sender in zip(move.way.wants, move.senders, strict=True):
                nbytes[sender // self.source.width, target // self.target.width] += block.numel * item
        return nbytes

    def parts(self, rank: int) -> Iterator[list[Part]]:
        """For each bucket what a rank sends or receives, in order, elements of more bytes first.

        Ranks of the target count on from the source's.
        """
        blocks_of: dict[int, list[tuple[int, Block, int]]] = {}
        width, begin = self.source.width, 0
        for end in self.ends:
            parts = []
            for move in self.moves[begin:end]:
                if move.way.number not in blocks_of:
                    blocks_of[move.way.number] = self._of(rank, move.way)
                for number, block, target in blocks_of[move.way.number]:
                    if rank in (move.senders[number] // width, self._receiver(target)):
                        parts.append(Part(move, block, move.senders[number], target))
            yield sorted(parts, key=lambda part: -DTYPE_BITS[part.move.dtype])
            begin = end

    def _of(self, rank: int, way: Link) -> list[tuple[int, Block, int]]:
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
        moves = [move for atom, dst in atoms for move in self._moves_of(atom, dst)]
        turns: Counter[int] = Counter()
        ordered = []
        for move in moves:
            first = move.way.blocks[0].sources[0] if move.way.blocks else 0
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

    def _ways_of(self, src: Location, dst: Location, item: int) -> tuple[Link, ...]:
        """The way of an atom; several, one for each part, if it is larger than a bucket."""
        blocks = blocks_of(src, dst)
        if blocks is None:
            raise PlanError(
                f"tensor '{src.stored.name}' is divided by blocks of scales, which live ranks cannot exchange",
                "push a model that is not quantized",
            )
        from_spread, to_spread = src.spread(blocks), dst.spread(blocks)
        key = (from_spread, to_spread, item)
        if key not in self._ways:
            total, count = math.prod(from_spread.full), 1
            while True:
                windows = _windows(from_spread.full, count)
                blocks_in = [tuple(_blocks(from_spread, to_spread, window)) for window in windows]
                most = max(map(_most, blocks_in), default=0) * item
                if most <= self._bucket or len(windows) < count:
                    break
                count = max(count + 1, -(-count * most // self._bucket))
            ways = []
            for window, common in zip(windows, blocks_in, strict=True):
                _check_covered(src, dst, common, to_spread, window)
                ways.append(Link(self._count, from_spread, to_spread, common))
                self._count += 1
            most = max((sum(math.prod(p.shape) for p in of) for of in from_spread.pieces.values()), default=0)
            each = max(1, -(-len(ways) * most // max(total, 1)))  # so many are of one holder: they come in turn
            ways = [way for first in range(each) for way in ways[first::each]]
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


def _most(blocks: Sequence[Block]) -> int:
    """The elements that one holder sends or receives at most."""
    sent, received = Counter[int](), Counter[int]()
    for block in blocks:
        sent[block.sources[0]] += block.numel * len(block.targets)
        received.update(dict.fromkeys(block.targets, block.numel))
    return max((*sent.values(), *received.values()), default=0)


def _blocks(from_spread: Spread, to_spread: Spread, window: _Window) -> Iterator[Block]:
    """What goes from where to where: for each piece that differs between holders, on both sides."""
    sources, targets = _alike(from_spread), _alike(to_spread)
    for src, holders in sources.items():
        for dst, wanting in targets.items():
            spans = tuple(map(spans_of, src, dst, window))
            if all(spans):
                numel = math.prod(sum(span.length for span in dim) for dim in spans)
                ends = [tuple(holder[i] for holder in of) for of in (holders, wanting) for i in (0, 1)]
                yield Block(ends[0], ends[1], ends[2], ends[3], spans, numel)


def _alike(spread: Spread) -> Mapping[tuple[Runs, ...], list[tuple[int, int]]]:
    """The holders of pieces with the same elements, each with the number of its piece."""
    holders: dict[tuple[Runs, ...], list[tuple[int, int]]] = {}
    for holder, pieces in spread.pieces.items():
        for number, piece in enumerate(pieces):
            holders.setdefault(piece.runs, []).append((holder, number))
    return holders


@lru_cache(maxsize=1 << 16)
def spans_of(src: tuple[Run, ...], dst: tuple[Run, ...], window: Run) -> tuple[Span, ...]:
    """The ranges of a dimension within a window that both sides have; neighbours on both sides are joined."""
    spans: list[Span] = []
    at = 0
    for run in src:
        to = 0
        for other in dst:
            begin, end = max(run.offset, other.offset, window.offset), min(run.end, other.end, window.end)
            if begin < end:
                span = Span(at + begin - run.offset, to + begin - other.offset, end - begin)
                last = spans[-1] if spans else None
                if last and last.source + last.length == span.source and last.target + last.length == span.target:
                    spans[-1] = last._replace(length=last.length + span.length)
                else:
                    spans.append(span)
            to += other.length
        at += run.length
    return tuple(spans)


def _check_covered(src: Location, dst: Location, blocks: Sequence[Block], to_spread: Spread, window: _Window) -> None:
    """Raise PlanError unless each target gets each of its elements once; what is padding, it has for itself."""
    got: dict[int, int] = {}
    for block in blocks:
        for target in block.targets:
            got[target] = got.get(target, 0) + block.numel
    for target, pieces in to_spread.pieces.items():
        should = sum(_inside(piece, window) for piece in pieces)
        if got.get(target, 0) != should:
            raise PlanError(
                f"tensor '{src.stored.name}': a target rank wants {should:,} elements of '{dst.stored.name}', and "
                f"gets {got.get(target, 0):,}"
            )


def _inside(piece: Piece, window: _Window) -> int:
    """The elements of a piece within a window, without padding."""
    return math.prod(
        sum(max(0, min(run.end, part.end) - max(run.offset, part.offset)) for run in runs)
        for runs, part in zip(piece.runs, window, strict=True)
    )
