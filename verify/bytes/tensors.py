"""Compares the bytes of tensors: each byte of each shard with the byte of the original that it should be."""

from __future__ import annotations

import itertools
import math
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Generic, NamedTuple, TypeVar

import numpy as np

from formats.files.checksum import PartialSum, sum_part
from formats.files.safetensors import DTYPE_BITS, TensorInfo
from reshard.planning.model import Kind
from reshard.planning.plan import Layout, Plan
from reshard.storage.source import Source
from verify.bytes.exact_report import Damage, ExactReport, FirstDifference
from verify.bytes.reading import Files
from verify.bytes.views import CHUNK, Array, Piece, View, flat_index

SMALL = 1 << 14
"""A tensor of at most so many bytes is small: Python's overhead for it is more than the reading."""

TOGETHER = 128
"""So many small tensors are compared together."""

T = TypeVar("T")

Progress = Callable[[int, int], None]
"""Called from any thread with the compared bytes of the shards so far, and the total."""


def no_progress(done: int, total: int) -> None:
    """Show no progress."""


class _Tensor(NamedTuple):
    """A tensor to compare: its place in the original, and on each rank (None: not to be compared)."""

    number: int
    name: str
    view: View
    original: TensorInfo
    shards: tuple[TensorInfo | None, ...]


@dataclass(frozen=True)
class _Chunk:
    """The indices ``begin`` to ``end`` along the view's axis; ``outer`` has one index of each dimension before it."""

    tensor: _Tensor
    outer: tuple[int, ...]
    begin: int
    end: int


def compare_bytes(
    original: Source,
    shards: Source,
    plan: Plan,
    comparable: Mapping[str, Sequence[int]],
    progress: Progress,
    workers: int,
    files: Files,
    sums: Mapping[Path, PartialSum] = MappingProxyType({}),
) -> ExactReport:
    """Compare the bytes of the ``comparable`` ranks of each tensor; the report has only ``first`` and ``damages``.

    The sums of what is read are added to ``sums``, for the files in it. Raises CheckpointError if a file cannot be
    read.
    """
    tensors = _tensors(original, shards, plan, comparable)
    total = sum(info.nbytes for tensor in tensors for info in tensor.shards if info is not None)
    tally = _Tally(total, progress, sums, files)
    todo = Shared(_todo(tensors))
    stopped = threading.Event()

    def work() -> None:
        with _Worker(tally) as worker:
            for chunks in todo:
                if stopped.is_set():
                    return
                if isinstance(chunks, _Chunk):
                    worker.compare(chunks)
                else:
                    worker.compare_small(chunks)

    with ThreadPoolExecutor(workers) as pool:
        futures = [pool.submit(work) for _ in range(workers)]
        try:
            for future in futures:
                future.result()
        finally:
            stopped.set()
    if tally.done != total:  # a partial comparison must not pass
        raise RuntimeError(f"{tally.done} of the {total} bytes of the shards were compared")
    damages = tuple(Damage(t, r, *n) for (_, t, r), n in sorted(tally.damages.items()))
    first = tally.first[1] if tally.first else None
    return ExactReport(str(plan.mesh), plan.mesh.size, len(tensors), tally.done, first, damages)


def _tensors(original: Source, shards: Source, plan: Plan, comparable: Mapping[str, Sequence[int]]) -> list[_Tensor]:
    """The tensors to compare, in the order of the original's files."""
    views: dict[tuple[Layout, int], View] = {}
    view_of: dict[Kind, View] = {}
    for kind, entry in plan.laid.items():
        key = (entry.layout, DTYPE_BITS[kind.dtype])
        if math.prod(entry.layout.padded) and key not in views:
            views[key] = View(*key)
        if key in views:
            view_of[kind] = views[key]
    files = {file: number for number, file in enumerate(sorted({info.file for info in original.ranks[0].values()}))}
    held = [(original.ranks[0][name], kind) for name, kind, _ in plan.model.tensors if name in comparable]
    held.sort(key=lambda each: (files[each[0].file], each[0].offset))
    found, everywhere = [], len(shards.ranks)
    for number, (info, kind) in enumerate(held):
        if kind not in view_of:
            continue
        name, ranks = info.name, comparable[info.name]
        places = [tensors.get(name) for tensors in shards.ranks]
        if len(ranks) < everywhere:
            places = [place if rank in ranks else None for rank, place in enumerate(places)]
        found.append(_Tensor(number, name, view_of[kind], info, tuple(places)))
    return found


def _todo(tensors: Iterable[_Tensor]) -> Iterator[_Chunk | Sequence[_Tensor]]:
    """Units of work: a chunk of a tensor, or several small tensors."""
    for is_small, found in itertools.groupby(tensors, lambda tensor: tensor.original.nbytes <= SMALL):
        if not is_small:
            yield from (chunk for tensor in found for chunk in _chunks(tensor))
            continue
        while together := list(itertools.islice(found, TOGETHER)):
            yield together


def _chunks(tensor: _Tensor) -> Iterator[_Chunk]:
    view = tensor.view
    for outer in itertools.product(*map(range, view.padded[: view.axis])):
        for begin in range(0, view.padded[view.axis], view.rows):
            yield _Chunk(tensor, outer, begin, min(begin + view.rows, view.padded[view.axis]))


class Shared(Generic[T]):
    """An iterator that several threads can use."""

    def __init__(self, items: Iterator[T]) -> None:
        self._items, self._lock = items, threading.Lock()

    def __iter__(self) -> Iterator[T]:
        while True:
            with self._lock:
                item = next(self._items, None)
            if item is None:
                return
            yield item


class _Tally:
    """The results of all threads."""

    def __init__(self, total: int, progress: Progress, sums: Mapping[Path, PartialSum], files: Files) -> None:
        self.total, self.done, self.sums, self.files = total, 0, sums, files
        self.first: tuple[tuple[int, int, int], FirstDifference] | None = None
        self.damages: dict[tuple[int, str, int], tuple[int, int]] = {}
        self._progress, self._lock = progress, threading.Lock()

    def compared(self, nbytes: int) -> None:
        """Add to the number of compared bytes."""
        with self._lock:
            self.done += nbytes
            self._progress(self.done, self.total)

    def summed(self, sums: Mapping[Path, PartialSum]) -> None:
        """Add the sums of what a thread has read."""
        with self._lock:
            for path, part in sums.items():
                self.sums[path].merge(part)

    def differs(self, tensor: _Tensor, byte: int, nbytes: int, elements: int, first: FirstDifference) -> None:
        """Add the wrong bytes and elements of a part of a tensor; ``first`` is at ``byte`` of the tensor."""
        with self._lock:
            key = tensor.number, tensor.name, first.rank
            before = self.damages.get(key, (0, 0))
            self.damages[key] = before[0] + nbytes, before[1] + elements
            place = (tensor.number, byte, first.rank)
            if self.first is None or place < self.first[0]:
                self.first = place, first


@dataclass
class _Run:
    """Bytes ``begin`` to ``end`` of a file."""

    file: Path
    begin: int
    end: int
    data: Array = field(default_factory=lambda: np.empty(0, np.uint8))


class _Span(NamedTuple):
    """The bytes of a tensor: ``begin`` to ``end`` of a run."""

    run: _Run
    begin: int
    end: int

    @property
    def data(self) -> Array:
        """A view of the bytes."""
        return self.run.data[self.begin : self.end]


class _Runs:
    """Tensors to read; tensors that follow each other in a file are joined into one run."""

    def __init__(self) -> None:
        self.found: list[_Run] = []
        self._last: dict[Path, _Run] = {}

    def add(self, info: TensorInfo) -> _Span:
        """Add a tensor."""
        run = self._last.get(info.file)
        if run is None or run.end != info.offset:
            run = self._last[info.file] = _Run(info.file, info.offset, info.offset)
            self.found.append(run)
        run.end += info.nbytes
        return _Span(run, info.offset - run.begin, run.end - run.begin)


class _Worker:
    """One thread's buffers and sums."""

    def __init__(self, tally: _Tally, *, sums: bool = True) -> None:
        self._tally, self._summed = tally, tally.sums if sums else {}
        self._buffers: dict[str, Array] = {}
        self._sums: dict[Path, PartialSum] = {}

    def __enter__(self) -> _Worker:
        return self

    def __exit__(self, *_: object) -> None:
        self._tally.summed(self._sums)

    def _read(self, use: str, info: TensorInfo, offset: int, nbytes: int) -> Array:
        """``nbytes`` of a tensor from its byte ``offset``, in the buffer of this name."""
        if use not in self._buffers or self._buffers[use].size < nbytes:
            self._buffers[use] = np.empty(max(nbytes, CHUNK), np.uint8)
        buffer = self._buffers[use][:nbytes]
        self._fill(info.file, info.offset + offset, buffer)
        return buffer

    def _fill(self, path: Path, offset: int, buffer: Array) -> None:
        """Fill the buffer from ``offset`` of a file, and add to the file's sum, if it is wanted and not done there."""
        self._tally.files.fill(path, offset, buffer)
        if path in self._summed and not self._tally.files.is_elsewhere(path):
            if path not in self._sums:
                self._sums[path] = PartialSum(self._summed[path].size)
            self._sums[path].add(offset, buffer.size, sum_part(buffer, offset))

    def compare_small(self, tensors: Sequence[_Tensor]) -> None:
        """Compare small tensors; neighbours in a file are read with one call.

        A tensor that differs is compared again, chunk by chunk, to find the place.
        """
        runs = _Runs()
        spans = []
        for tensor in tensors:
            shards = [(rank, runs.add(info)) for rank, info in enumerate(tensor.shards) if info is not None]
            spans.append((tensor, runs.add(tensor.original), shards))
        for run in runs.found:
            run.data = np.empty(run.end - run.begin, np.uint8)
            self._fill(run.file, run.begin, run.data)
        done = 0
        for tensor, original, shards in spans:
            expected = tensor.view.zeroed(original.data)
            same = all(
                np.array_equal(expected.take(words), found.data.view(expected.dtype))
                for words, found in ((tensor.view.original_words[rank], span) for rank, span in shards)
            )
            if same:
                done += sum(found.end - found.begin for _, found in shards)
                continue
            with _Worker(self._tally, sums=False) as again:
                for chunk in _chunks(tensor):
                    again.compare(chunk)
        self._tally.compared(done)

    def compare(self, chunk: _Chunk) -> None:
        """Compare a chunk of the original with each rank's part of it."""
        view, info = chunk.tensor.view, chunk.tensor.original
        axis, row = view.axis, view.item * math.prod(view.full[view.axis + 1 :])
        end = min(chunk.end, view.full[axis])
        original: Array | None = None
        if end > chunk.begin and all(i < n for i, n in zip(chunk.outer, view.full, strict=False)):
            begin = flat_index(chunk.outer, view.full) * view.full[axis] + chunk.begin
            original = self._read("original", info, begin * row, (end - chunk.begin) * row)
        done = 0
        for rank, part in enumerate(view.parts):
            shard = chunk.tensor.shards[rank]
            outer = [_local(pieces, i) for pieces, i in zip(part.pieces, chunk.outer, strict=False)]
            if shard is None or None in outer:
                continue
            base = flat_index([i for i in outer if i is not None], part.shape) * part.shape[axis]
            local_row = view.item * math.prod(part.shape[axis + 1 :])
            for piece in part.pieces[axis]:
                start, stop = max(piece.start, chunk.begin), min(piece.end, chunk.end)
                if start >= stop:
                    continue
                local = base + piece.local + start - piece.start
                found = self._read("shard", shard, local * local_row, (stop - start) * local_row)
                done += found.size
                expected = None
                if original is not None and not piece.padding:
                    expected = original[(start - chunk.begin) * row : (stop - chunk.begin) * row]
                self._compare_rows(chunk, rank, (start, local), expected, found)
        self._tally.compared(done)

    def _compare_rows(
        self, chunk: _Chunk, rank: int, rows: tuple[int, int], expected: Array | None, found: Array
    ) -> None:
        """Compare rows of the chunk with rows of a rank, piece by piece of the dimensions after the axis.

        ``rows`` has the first row's index along the tensor's axis, and its number among all rows of the rank's part.
        """
        view = chunk.tensor.view
        part, after = view.parts[rank], view.axis + 1
        count = found.size // (view.item * math.prod(part.shape[after:]))
        theirs = view.in_words(found, count, part.shape[after:])
        ours = None if expected is None else view.in_words(expected, count, view.full[after:])
        for pieces in itertools.product(*part.pieces[after:]):
            right = theirs[view.cut([(p.local, p.length) for p in pieces])]
            is_padding = ours is None or any(piece.padding for piece in pieces)
            left = None if ours is None or is_padding else ours[view.cut([(p.start, p.length) for p in pieces])]
            same = not right.any() if left is None else np.array_equal(left, right)
            if not same:
                self._count(chunk, rank, rows, pieces, left, right)

    def _count(
        self,
        chunk: _Chunk,
        rank: int,
        rows: tuple[int, int],
        pieces: Sequence[Piece],
        left: Array | None,
        right: Array,
    ) -> None:
        """Count the wrong elements of a rank's piece, and find the first; ``left`` is the original (None: zeros)."""
        tensor, view = chunk.tensor, chunk.tensor.view
        theirs = np.ascontiguousarray(right).view(np.uint8)
        ours = np.zeros_like(theirs) if left is None else np.ascontiguousarray(left).view(np.uint8)
        shape = (*theirs.shape[:-1], theirs.shape[-1] // view.element, view.element)
        theirs, ours = theirs.reshape(shape), ours.reshape(shape)
        differing = theirs != ours
        elements = differing.any(-1)
        first = tuple(int(i) for i in np.unravel_index(int(elements.argmax()), elements.shape))
        # the place in the tensor, in the rank's part, and in the original; the last coordinate counts bytes
        steps = [*first[:-1], first[-1] * view.element]
        at = [(p.start, p.local) for p in pieces]
        if pieces:
            at[-1] = (at[-1][0] * view.item, at[-1][1] * view.item)
            row, inner = steps[0], [(start + s, local + s) for (start, local), s in zip(at, steps[1:], strict=True)]
            coordinates = [*chunk.outer, rows[0] + row, *(start for start, _ in inner)]
            local = _fold(rows[1] + row, view.parts[rank].shape[view.axis + 1 :], [n for _, n in inner], view.item)
        else:
            coordinates = [*chunk.outer, rows[0] * view.item + steps[0]]
            local = rows[1] * view.item + steps[0]
        byte, index = view.position(coordinates)
        info = tensor.shards[rank]
        assert info is not None
        before = None if left is None else tensor.original.offset + _fold(0, view.full, coordinates, view.item)
        found = FirstDifference(
            tensor.name, index, rank, str(info.file), info.offset + local, ours[first].tobytes(),
            theirs[first].tobytes(), None if before is None else str(tensor.original.file), before,
        )  # fmt: skip
        self._tally.differs(tensor, byte, int(differing.sum()), int(elements.sum()), found)


def _local(pieces: Sequence[Piece], index: int) -> int | None:
    """The rank's own index for an index of the full tensor; None if the rank does not hold it."""
    return next((p.local + index - p.start for p in pieces if p.start <= index < p.end), None)


def _fold(leading: int, sizes: Sequence[int], coordinates: Sequence[int], item: int) -> int:
    """The byte offset of coordinates, the last in bytes, at index ``leading`` of the joined outer dimensions."""
    return flat_index([leading, *coordinates], [1, *sizes[:-1], sizes[-1] * item])
