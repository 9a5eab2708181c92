"""Compares what another program's format stores with the original, element for element, through the rewrites.

A block of a rank's tensor and the same elements of the original are two arrays with strides of their own over the
files' bytes. Both are read in tiles, for which a short piece of either file is enough, so that memory does not grow
with the model. The files are not mapped: a process that looks at a map of a file that has become shorter is killed.
"""

from __future__ import annotations

import itertools
import math
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from formats.errors import PlanError
from formats.files.boxes import At
from formats.files.checksum import PIECE, PartialSum, sum_part
from formats.files.safetensors import DTYPE_BITS, TensorInfo
from reshard.planning.arrangement import Arrangement
from reshard.planning.boxes import InBoxes
from reshard.planning.geometry import Geometry
from reshard.planning.model import Kind
from reshard.planning.stored import Atom, Stored
from reshard.storage.source import Source
from verify.bytes.atoms import Block, Part, part_in_box, part_of
from verify.bytes.boxes import ranks_of
from verify.bytes.exact_report import Damage, ExactReport, FirstDifference
from verify.bytes.reading import Files
from verify.bytes.tensors import Progress, Shared
from verify.bytes.views import Array

WINDOW = 4 << 20
"""Of a file, so many bytes are read at a time."""


class Parts:
    """What each rank has of each stored tensor; those of equal layouts are computed once."""

    def __init__(self, arrangement: Arrangement) -> None:
        self._arrangement = arrangement
        self._kinds = {tensor.name: tensor.kind for tensor in arrangement.plan.model.tensors}
        self._found: dict[tuple[Geometry, int | At], Part | None] = {}
        self._lock = threading.Lock()

    def of(self, stored: Stored, rank: int) -> Part | None:
        """What a rank, or a file with boxes, has of a stored tensor, or None."""
        geometry = stored.geometry
        if isinstance(geometry, InBoxes):
            at = geometry.boxes.get(rank)
            return self._part(geometry.whole, stored, at) if at is not None else None
        return self._part(geometry, stored, rank)

    def _part(self, geometry: Geometry, stored: Stored, place: int | At) -> Part | None:
        with self._lock:
            if (geometry, place) not in self._found:
                model = self._arrangement.plan.model
                kinds = [self._kinds[atom.tensor] for atom in stored.atoms[: len(geometry.portions)]]
                if isinstance(place, At):
                    self._found[geometry, place] = part_in_box(geometry, kinds, model, place)
                else:
                    self._found[geometry, place] = part_of(geometry, kinds, model, place)
            return self._found[geometry, place]

    def kind(self, atom: Atom) -> Kind:
        """The kind of an atom's tensor."""
        return self._kinds[atom.tensor]


class Strided(NamedTuple):
    """Elements of a file: the first byte, the number along each dimension, its steps and the size of one, in bytes."""

    begin: int
    shape: tuple[int, ...]
    steps: tuple[int, ...]
    item: int


def tile(files: Files, path: Path, of: Strided, cut: tuple[slice, ...]) -> Array:
    """Some of the elements, as unsigned integers. Raises CheckpointError."""
    shape = tuple(piece.stop - piece.start for piece in cut)
    begin = of.begin + sum(piece.start * step for piece, step in zip(cut, of.steps, strict=True))
    nbytes = sum((n - 1) * step for n, step in zip(shape, of.steps, strict=True)) + of.item
    data = files.read(path, begin, nbytes if math.prod(shape) else 0)
    return np.ndarray(shape, f"<u{of.item}", data.data, 0, of.steps)


class _Pair(NamedTuple):
    """A part of a rank's tensor, and of the original's tensor from which it comes (None: a constant)."""

    stored: str
    rank: int
    shard: TensorInfo
    dtype: str
    tensor: str
    number: int
    original: TensorInfo | None
    base: int
    at: int | None
    function: str | None
    constant: float = 0.0
    because: str = "padding"


class Comparison:
    """The comparison of all stored tensors; ``held`` has the ranks of each that have the planned dtype and shape."""

    def __init__(
        self,
        original: Source,
        shards: Source,
        arrangement: Arrangement,
        held: Mapping[str, Sequence[int]],
        progress: Progress,
        sums: Mapping[Path, PartialSum],
        files: Files,
    ) -> None:
        self._original, self._shards, self._arrangement, self._held = original, shards, arrangement, held
        self._parts, self._files, self._sums, self._progress = Parts(arrangement), files, sums, progress
        numbers = {file: n for n, file in enumerate(sorted({info.file for info in original.ranks[0].values()}))}
        ordered = sorted(original.ranks[0].values(), key=lambda info: (numbers[info.file], info.offset))
        self._numbers = {info.name: number for number, info in enumerate(ordered)}
        self._ranks = ranks_of(shards)
        self._lock = threading.Lock()
        self._summed: set[tuple[Path, int]] = set()
        self.first: tuple[tuple[int, int, int, str], FirstDifference] | None = None
        self.damaged: set[Path] = set()
        self.damages: dict[tuple[int, str, str, int], tuple[int, int]] = {}
        self.done, self.total = 0, self._total()

    def _total(self) -> int:
        kept = self._shards.kept.values()
        held = ((each, rank) for each in self._arrangement.stored for rank in self._held.get(each.name, ()))
        stored = sum(self._shards.ranks[rank][each.name_on(rank)].nbytes for each, rank in held)
        return stored + sum(info.nbytes for info in kept)

    def run(self, workers: int) -> ExactReport:
        """Compare; the report has only ``first`` and ``damages``. Raises CheckpointError if a file cannot be read."""
        todo, stopped = Shared(self._todo()), threading.Event()

        def work() -> None:
            for each in todo:
                if stopped.is_set():
                    return
                each()

        with ThreadPoolExecutor(workers) as pool:
            futures = [pool.submit(work) for _ in range(workers)]
            try:
                for future in futures:
                    future.result()
            finally:
                stopped.set()
        if self.done != self.total:  # a partial comparison must not pass
            raise RuntimeError(f"{self.done} of the {self.total} bytes of the shards were compared")
        damages = tuple(
            Damage(tensor, rank, *counts, stored) for (_, tensor, stored, rank), counts in sorted(self.damages.items())
        )
        mesh = self._arrangement.plan.mesh
        first = self.first[1] if self.first else None
        return ExactReport(str(mesh), mesh.size, len(self._held), self.done, first, damages)

    def _todo(self) -> Iterator[Callable[[], None]]:
        """Units of work, in the order of the original's files: a rank's part of a stored tensor."""
        for stored in sorted(self._arrangement.stored, key=self._place):
            for rank in self._held.get(stored.name, ()):
                yield partial(self._compare, stored, rank)
        for name, info in self._shards.kept.items():
            yield partial(self._compare_kept, name, info)

    def _place(self, stored: Stored) -> int:
        return self._numbers[stored.atoms[0].tensor] if stored.atoms else len(self._numbers)

    def _compare(self, stored: Stored, rank: int) -> None:
        name = stored.name_on(rank)
        info = self._shards.ranks[rank][name]
        self._sum(info)
        if stored.constant is not None:
            whole = _whole(math.prod(info.shape))
            place = len(self._numbers)
            pair = _Pair(
                name, self._ranks[rank], info, stored.dtype, name, place, None, 0, None, None, stored.constant.value,
                f"a constant of the format, {stored.constant.value}",
            )  # fmt: skip
            self._compare_block(pair, whole)
            return
        part = self._parts.of(stored, rank)
        assert part is not None
        portions = stored.geometry.portions
        for number, blocks in enumerate(part.atoms):
            if blocks is None:
                continue
            atom, portion = stored.atoms[number], portions[number % len(portions)]
            kind, original = self._parts.kind(atom), self._original.ranks[0][atom.tensor]
            self._sum(original)
            index = math.prod(kind.shape[1:]) * atom.at if atom.at is not None else 0
            zero = rank in self._arrangement.placed[atom].zeros
            pair = _Pair(
                name, self._ranks[rank], info, stored.dtype, atom.tensor, self._numbers[atom.tensor],
                None if zero else original, index, atom.at, portion.function, 0.0,
                "zero, as an earlier rank has it" if zero else "padding",
            )  # fmt: skip
            for block in blocks:
                self._compare_block(pair, block)

    def _compare_kept(self, name: str, info: TensorInfo) -> None:
        """A tensor whose own bits the format does not keep: it stands beside the shards, whole."""
        original = self._original.ranks[0].get(name)
        if original is not None and (original.dtype, original.shape) == (info.dtype, info.shape):
            self._sum(info)
            self._sum(original)
            pair = _Pair(name, 0, info, info.dtype, name, self._numbers[name], original, 0, None, None)
            self._compare_block(pair, _whole(math.prod(info.shape), info.shape))
        else:
            self._compared(info.nbytes)

    def _sum(self, info: TensorInfo) -> None:
        """Add a tensor's bytes to the sum of its file, once, if that is wanted; of a file elsewhere its blocks are."""
        if info.file not in self._sums or self._files.is_elsewhere(info.file):
            return
        with self._lock:
            if (info.file, info.offset) in self._summed:
                return
            self._summed.add((info.file, info.offset))
        end = info.offset + info.nbytes
        for begin in range(info.offset, end, PIECE):
            content = self._files.read(info.file, begin, min(PIECE, end - begin))
            found = sum_part(content, begin)
            with self._lock:
                self._sums[info.file].add(begin, content.size, found)

    def _compare_block(self, pair: _Pair, block: Block) -> None:
        bits = DTYPE_BITS[pair.dtype]
        theirs = strided(pair.shard.offset, block.shape, block.shard, block.shard_strides, bits)
        ours, source_bits = None, bits
        if pair.original is not None and block.original is not None:
            source_bits = DTYPE_BITS[pair.original.dtype]
            at = pair.base + block.original
            ours = strided(pair.original.offset, block.shape, at, block.original_strides, source_bits)
        pattern = _pattern(pair.constant, pair.dtype)
        done = 0
        for cut in _tiles(theirs.shape, [theirs.steps, *([ours.steps] if ours is not None else [])]):
            right = tile(self._files, pair.shard.file, theirs, cut)
            left = None
            if ours is not None and pair.original is not None:
                left = tile(self._files, pair.original.file, ours, cut)
            done += right.nbytes
            if left is None:
                differing = None if not (right != pattern).any() else right != pattern
            else:
                differing = _differing(left, right, pair, source_bits)
            if differing is not None:
                self._count(pair, block, cut, left, right, differing, pattern)
            if done >= PIECE:
                self._compared(done)
                done = 0
        self._compared(done)

    def _compared(self, nbytes: int) -> None:
        with self._lock:
            self.done += nbytes
            self._progress(self.done, self.total)

    def _count(
        self, pair: _Pair, block: Block, cut: tuple[slice, ...], left: Array | None, right: Array, differing: Array,
        pattern: int,
    ) -> None:  # fmt: skip
        """Count the wrong elements of a chunk, and find the first in the order of the original's elements."""
        kind_shape = pair.original.shape if pair.original is not None else None
        per_byte = max(1, 8 // DTYPE_BITS[pair.dtype])
        if not block.shape:  # a number
            differing, right = np.atleast_1d(differing), np.atleast_1d(right)
            left = None if left is None else np.atleast_1d(left)
        places = np.nonzero(differing)
        shape = kind_shape or pair.shard.shape
        coordinates = [np.full(places[0].size, start) for start in block.first] if block.first else []
        shard = np.full(places[0].size, block.shard // per_byte)
        for factor, (found, piece) in enumerate(zip(places, cut, strict=False)):
            steps = found + (piece.start or 0)
            dim, step = block.along[factor]
            last = per_byte if factor == len(places) - 1 else 1
            coordinates[dim] = coordinates[dim] + steps * step * last
            shard = shard + steps * (block.shard_strides[factor] * last // per_byte)
        if pair.at is not None:
            coordinates[0] = coordinates[0] + pair.at
        rank_order = np.lexsort(coordinates[::-1]) if coordinates else np.zeros(1, int)
        one = int(rank_order[0])
        index = tuple(int(each[one]) for each in coordinates)
        at = tuple(int(each[one]) for each in places)
        expected = _value(pair, left, at, pattern)
        theirs = np.ascontiguousarray(right[at]).reshape(1)
        wrong = int(places[0].size)
        nbytes = wrong * right.itemsize
        if left is not None and left.dtype == right.dtype and pair.function is None:
            changed = np.ascontiguousarray(left[places] ^ right[places])
            nbytes = int(np.count_nonzero(changed.view(np.uint8)))
        is_inside = pair.original is not None and left is not None
        flat = 0
        for size, i in zip(shape, index, strict=False):
            flat = flat * size + i
        difference = FirstDifference(
            pair.tensor, index, pair.rank, str(pair.shard.file),
            pair.shard.offset + int(shard[one]) * right.itemsize, expected, theirs.tobytes(),
            str(pair.original.file) if is_inside and pair.original else None,
            pair.original.offset + flat * DTYPE_BITS[pair.original.dtype] // 8 if is_inside and pair.original else None,
            pair.stored, pair.because,
        )  # fmt: skip
        with self._lock:
            key = (pair.number, pair.tensor, pair.stored, pair.rank)
            self.damaged.add(pair.shard.file)
            before = self.damages.get(key, (0, 0))
            self.damages[key] = before[0] + nbytes, before[1] + wrong * per_byte
            place = (pair.number, flat, pair.rank, pair.stored)
            if self.first is None or place < self.first[0]:
                self.first = place, difference


def _whole(elements: int, shape: tuple[int, ...] = ()) -> Block:
    """All elements of two tensors that are stored alike."""
    steps = [1]
    for length in reversed(shape[1:]):
        steps.insert(0, steps[0] * length)
    if not shape:
        return Block((elements,), 0, (1,), 0, (1,), (0,), ((0, 1),))
    strides = tuple(steps)
    return Block(shape, 0, strides, 0, strides, (0,) * len(shape), tuple((dim, 1) for dim in range(len(shape))))


def strided(offset: int, shape: tuple[int, ...], first: int, strides: Sequence[int], bits: int) -> Strided:
    """Where elements of a tensor at ``offset`` of a file are; of several in a byte, the bytes.

    Raises PlanError where elements that share a byte do not follow each other.
    """
    if not bits % 8:
        item = bits // 8
        return Strided(offset + first * item, shape, tuple(stride * item for stride in strides), item)
    count = 8 // bits
    if not strides or strides[-1] != 1 or any(n % count for n in (first, shape[-1], *strides[:-1])):
        raise PlanError(f"elements of {bits} bits would be cut within a byte")
    steps = (*(stride // count for stride in strides[:-1]), 1)
    return Strided(offset + first // count, (*shape[:-1], shape[-1] // count), steps, 1)


def _tiles(shape: tuple[int, ...], steps: Sequence[tuple[int, ...]]) -> Iterator[tuple[slice, ...]]:
    """The slices of an array of this shape, each of which lies within ``WINDOW`` bytes by all of the steps."""
    limits = [max(1, length) for length in shape]

    def extents(of: Sequence[int]) -> list[int]:
        return [(limit - 1) * step for limit, step in zip(limits, of, strict=True)]

    while sum(longest := max((extents(of) for of in steps), key=sum)) > WINDOW:
        dim = longest.index(max(longest))
        limits[dim] = -(-limits[dim] // 2)
    ranges = (range(0, length, limit) for length, limit in zip(shape, limits, strict=True))
    for begins in itertools.product(*ranges):
        yield tuple(slice(b, min(b + n, s)) for b, n, s in zip(begins, limits, shape, strict=True))


def _differing(left: Array, right: Array, pair: _Pair, bits: int) -> Array | None:
    """Which elements are not what they should be; None if all are."""
    assert pair.original is not None
    if pair.function is not None:
        wrong = ~_is_near(left, right, pair)
        return wrong if wrong.any() else None
    if pair.original.dtype != pair.dtype:
        left = _widened(left, pair)
    elif _in_words(left) and _in_words(right) and (left.view("<u8") == right.view("<u8")).all():
        return None
    differing = left != right
    return differing if differing.any() else None


def _in_words(array: Array) -> bool:
    """Whether the last dimension lies in one piece of whole words."""
    return bool(array.ndim and array.strides[-1] == array.itemsize and array.shape[-1] * array.itemsize % 8 == 0)


def _widened(left: Array, pair: _Pair) -> Array:
    """The original's elements in the wider dtype in which they are stored, exactly. Raises PlanError."""
    dtypes = pair.original.dtype if pair.original else "", pair.dtype
    if dtypes == ("BF16", "F32"):
        return left.astype("<u4") << np.uint32(16)
    if dtypes == ("F16", "F32"):
        return np.ascontiguousarray(left).view("<f2").astype("<f4").view("<u4")
    raise PlanError(f"'{pair.tensor}' is {dtypes[0]} and stored as {dtypes[1]}, which is not known to be exact")


def _is_near(left: Array, right: Array, pair: _Pair) -> Array:
    """Whether each F32 is the function of the original's element, as computed in float64, within one unit in the last
    place: the function itself need not be rounded correctly.
    """
    if pair.function != "-exp" or pair.dtype != "F32":
        raise PlanError(f"'{pair.stored}': '{pair.function}' in {pair.dtype} is not known")
    original = left if pair.original and pair.original.dtype == "F32" else _widened(left, pair)
    values = np.ascontiguousarray(original).view("<f4").astype(np.float64)
    with np.errstate(over="ignore"):
        exact = -np.exp(values)
        nearest = exact.astype("<f4")
    found = np.ascontiguousarray(right).view("<f4")
    with np.errstate(invalid="ignore"):
        close = np.abs(found.astype(np.float64) - exact) <= np.spacing(np.abs(nearest)).astype(np.float64)
    near: Array = close | (found == nearest) | (np.isnan(found) & np.isnan(nearest))
    return near


def _value(pair: _Pair, left: Array | None, at: tuple[int, ...], pattern: int) -> bytes:
    """The bytes that should be stored."""
    item = max(1, DTYPE_BITS[pair.dtype] // 8)
    if left is None:
        return pattern.to_bytes(item, "little")
    one = np.ascontiguousarray(left[at]).reshape(1)
    assert pair.original is not None
    if pair.function is not None:
        wide = one if pair.original.dtype == "F32" else _widened(one, pair)
        return bytes((-np.exp(wide.view("<f4").astype(np.float64))).astype("<f4").tobytes())
    return bytes((one if pair.original.dtype == pair.dtype else _widened(one, pair)).tobytes())


def _pattern(value: float, dtype: str) -> Any:
    """The bits of a number. Raises PlanError for a dtype in which the formats have no constants but zero."""
    if not value:
        return 0
    if dtype == "F16":
        return int(np.array(value, "<f2").view("<u2"))
    if dtype not in {"F32", "BF16"}:
        raise PlanError(f"a constant of dtype {dtype} is not known")
    bits = int(np.array(value, "<f4").view("<u4"))
    return bits if dtype == "F32" else bits >> 16
