"""Compares what is stored with the original, element for element: in reshard's own form, and in every other.

All stored copies and parts of an original tensor are compared together, chunk by chunk (``views.py``), so that the
original is read once. Bytes are compared, so that NaN payloads and the sign of zero count. Memory does not grow with
the model. Files are not memory-mapped: a process that reads beyond the end of a file that has become shorter would be
killed.
"""

from __future__ import annotations

import math
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from formats.errors import PlanError
from formats.files.safetensors import DTYPE_BITS, TensorInfo
from formats.notation.axes import Run
from formats.store import FilePath, sorted_paths
from reshard.model.model import Kind
from reshard.placement.arrangement import Arrangement
from reshard.placement.portions import rule_of
from reshard.placement.stored import Stored
from reshard.source.source import Source
from reshard.store.threads import Shared, work_together
from verify.bytes.atoms import Block, Parts, check_all_owned, strided
from verify.bytes.exact_report import Damage, ExactReport, FirstDifference
from verify.bytes.reading import Files, cast, coarse, differing, expected, pattern, repeated, stating
from verify.bytes.structure import ranks_of
from verify.bytes.views import Array, Chunk, Part, View, array, flat_index, tiles

Progress = Callable[[int, int], None]
"""Called from any thread with the compared bytes of the shards so far, and the total."""


def no_progress(compared: int, total: int) -> None:
    """Show no progress."""


class _Use(NamedTuple):
    """A stored tensor that has a part of a tensor: by the number of its atom. None stands for one that is stored as in
    the original, ``info``: what is kept beside the shards, and what the original itself has under a second name.
    """

    stored: Stored | None
    number: int
    info: TensorInfo | None = None


class _Tensor(NamedTuple):
    """A tensor of the original, and for each part of its view the tensor that has it (None: not to be compared).

    A constant of a format has no original. ``dtype`` is that to which the original is cast, or its own.
    """

    number: int
    name: str
    dtype: str
    view: View
    original: TensorInfo | None
    uses: Sequence[_Use]
    stored: tuple[TensorInfo | None, ...]


class Comparison:
    """The comparison of all tensors. ``holders_of`` has, for each stored tensor, the ranks or files that have it in the
    planned dtype and shape. ``damaged`` gets the files with wrong bytes.
    """

    def __init__(
        self, original: Source, shards: Source, arrangement: Arrangement, holders_of: Mapping[str, Sequence[int]],
        progress: Progress, files: Files,
    ) -> None:  # fmt: skip
        self._arrangement, self._holders, self._progress = arrangement, holders_of, progress
        self._files, self._lock = files, threading.Lock()
        self._tensors = _Tensors(original, shards, arrangement, holders_of)
        self._ranks = ranks_of(shards)
        self._total = sum(info.nbytes for _, info in self._tensors.whole())
        for stored in arrangement.stored:
            for holder in holders_of.get(stored.name, ()):
                name = stored.name if stored.naming is None else stored.name_on(holder)
                self._total += shards.ranks[holder][name].nbytes
        self._nbytes = 0
        self._first: tuple[tuple[int, int, int, str], FirstDifference] | None = None
        self._damages: dict[tuple[int, str, str, int], tuple[int, int, str | None]] = {}
        self.damaged: set[FilePath] = set()

    def run(self, workers: int) -> ExactReport:
        """Compare; the report has only ``first`` and ``damages``. Raises CheckpointError if a file cannot be read."""
        chunks = Shared((tensor, chunk) for tensor in self._tensors.all() for chunk in tensor.view.chunks())

        def work(_: int, report: Callable[[None], None]) -> None:
            for tensor, chunk in chunks:
                report(None)
                self._compare(tensor, chunk)

        work_together(workers, work, lambda _: None)
        if self._nbytes != self._total:  # a partial comparison must not pass
            raise RuntimeError(f"{self._nbytes} of the {self._total} bytes of the shards were compared")
        damages = (
            Damage(tensor, rank, nbytes, elements, stored)
            for (_, tensor, _, rank), (nbytes, elements, stored) in sorted(self._damages.items())
        )
        mesh, first = self._arrangement.plan.mesh, self._first[1] if self._first else None
        return ExactReport(str(mesh), mesh.size, len(self._holders), self._nbytes, first, tuple(damages))

    def _compare(self, tensor: _Tensor, chunk: Chunk) -> None:
        """Compare a chunk of the original with what each holder has of it."""
        view, nbytes = tensor.view, 0
        run = view.of_original(chunk)
        original = self._original(tensor, chunk, run) if tensor.original is not None and run.length else None
        for reading in view.reads(chunk):
            part, info = view.parts[reading.part], tensor.stored[reading.part]
            if info is None:
                continue
            ours = original
            if part.stated is not None and ours is not None and tensor.original is not None:
                item = view.bits // 8
                ours = stating(self._files, tensor.original, part.stated)[run.offset * item : run.end * item]
            pair = self._pair(tensor, part, info)
            if reading.part in view.shared:
                for block in (tile for whole_block in reading.blocks for tile in tiles(whole_block, part.bits)):
                    of = strided(0, block.shape, block.shard, block.shard_strides, part.bits)
                    theirs = self._files.read_shared(info, of.begin, of.nbytes)
                    self._compare_block(pair, block, (ours, run.offset), (theirs, block.shard))
            else:
                begin, end = reading.begin * part.bits // 8, reading.end * part.bits // 8
                theirs = self._files.read_once(info.file, info.offset + begin, end - begin)
                for block in reading.blocks:
                    self._compare_block(pair, block, (ours, run.offset), (theirs, reading.begin))
            nbytes += reading.elements * part.bits // 8
        with self._lock:
            self._nbytes += nbytes
            self._progress(self._nbytes, self._total)

    def _pair(self, tensor: _Tensor, part: Part, info: TensorInfo) -> _Pair:
        """The tensor, and what a holder has of it."""
        stored, number, _ = tensor.uses[part.number]
        function, value, because = None, 0.0, "zero, as an earlier rank has it" if part.zero else "padding"
        if stored is not None and stored.constant is not None:
            value, because = stored.constant.value, f"a constant of the format, {stored.constant.value}"
        elif stored is not None:
            function = stored.geometry.portions[number % len(stored.geometry.portions)].function
        is_named_so = self._arrangement.format.plain and info.name == tensor.name
        return _Pair(
            tensor, info, self._ranks[part.holder] if stored is not None else 0, None if is_named_so else info.name,
            (info.dtype if stored is None else tensor.dtype, info.dtype), function, part.zero,
            pattern(value, info.dtype), because,
        )  # fmt: skip

    def _original(self, tensor: _Tensor, chunk: Chunk, run: Run) -> Array:
        """A chunk of the original's bytes."""
        view, info = tensor.view, tensor.original
        assert info is not None
        if view.repeats is not None:
            _, few = coarse(view, chunk)
            item = view.bits // 8
            data = self._files.read_once(info.file, info.offset + few.offset * item, few.length * item)
            return repeated(view, chunk, data, run.length)
        return self._files.read_once(info.file, info.offset + run.offset * view.bits // 8, run.length * view.bits // 8)

    def _compare_block(
        self, pair: _Pair, block: Block, ours: tuple[Array | None, int], theirs: tuple[Array, int]
    ) -> None:
        """Compare a block; of both sides the bytes, and the element with which they begin."""
        left_part, info = None, pair.tensor.original
        if info is not None and ours[0] is not None and block.original is not None and not pair.zero:
            bits = DTYPE_BITS[info.dtype]
            left_part = array(ours[0], ours[1], block.shape, block.original, block.original_strides, bits)
            left_part = cast(left_part, info.dtype, pair.dtypes[0])
        right = array(theirs[0], theirs[1], block.shape, block.shard, block.shard_strides, DTYPE_BITS[pair.dtypes[1]])
        if left_part is not None:
            wrong = differing(left_part, right, pair.dtypes, pair.function)
        else:
            wrong = right != pair.pattern if (right != pair.pattern).any() else None
        if wrong is not None:
            self._count(pair, block, left_part, right, wrong)

    def _count(self, pair: _Pair, block: Block, left: Array | None, right: Array, wrong: Array) -> None:
        """Count the wrong elements of a block, and find the first in the order of the original's elements."""
        tensor, bits = pair.tensor, DTYPE_BITS[pair.dtypes[1]]
        per_byte = max(1, 8 // bits)
        if not block.shape:  # a number
            wrong, right = np.atleast_1d(wrong), np.atleast_1d(right)
            left = None if left is None else np.atleast_1d(left)
        places = np.nonzero(wrong)
        coordinates = [np.full(places[0].size, start) for start in block.first]
        for factor, indices in enumerate(places[: len(block.shape)]):
            dim, step = block.along[factor]
            coordinates[dim] = coordinates[dim] + indices * (step * (per_byte if factor == len(places) - 1 else 1))
        one = int(np.lexsort(coordinates[::-1])[0]) if coordinates else 0
        index, at = tuple(int(numbers[one]) for numbers in coordinates), tuple(int(numbers[one]) for numbers in places)
        elements = [i * (per_byte if factor == len(places) - 1 else 1) for factor, i in enumerate(at)]
        moved = sum(i * step for i, step in zip(elements, block.shard_strides, strict=False))
        nbytes = right.itemsize * int(places[0].size)
        if left is not None and left.dtype == right.dtype and pair.function is None:
            changed = np.ascontiguousarray(left[places] ^ right[places])
            nbytes = int(np.count_nonzero(changed.view(np.uint8)))
        elif left is None:
            changed = np.ascontiguousarray(right[places] ^ right.dtype.type(pair.pattern))
            nbytes = int(np.count_nonzero(changed.view(np.uint8)))
        should = pair.pattern.to_bytes(right.itemsize, "little")
        if left is not None:
            should = expected(np.ascontiguousarray(left[at]).reshape(1), pair.dtypes, pair.function)
        byte = pair.info.offset + (block.shard + moved) * bits // 8
        file, original = pair.place(block, elements) if left is not None else (None, None)
        difference = FirstDifference(
            tensor.name, index, pair.rank, str(pair.info.file), byte, should,
            np.ascontiguousarray(right[at]).reshape(1).tobytes(), file, original, pair.stored, pair.because,
        )  # fmt: skip
        place = tensor.number, flat_index(index, tensor.view.padded), pair.rank, pair.stored or ""
        key = tensor.number, tensor.name, pair.stored or "", pair.rank
        with self._lock:
            self.damaged.add(pair.info.file)
            earlier = self._damages.get(key, (0, 0, None))
            count = earlier[1] + int(places[0].size) * per_byte
            self._damages[key] = earlier[0] + nbytes, count, pair.stored
            if self._first is None or place < self._first[0]:
                self._first = place, difference


# ------------------------------------------------------------------------------------------------ what is compared


class _Tensors:
    """The tensors of the original, each with all that is stored of it."""

    def __init__(
        self, original: Source, shards: Source, arrangement: Arrangement, holders_of: Mapping[str, Sequence[int]]
    ) -> None:
        self._original, self._shards, self._arrangement, self._holders = original, shards, arrangement, holders_of
        self._parts = Parts(arrangement)
        self._kinds_of_original = dict(
            zip(
                (t.kind for t in arrangement.plan.model.tensors),
                (t.kind for t in original.plan.model.tensors),
                strict=True,
            )
        )
        self._views: dict[tuple[object, ...], View] = {}

    def whole(self) -> Iterator[tuple[str, TensorInfo]]:
        """Tensors of the original, and what should equal each: what is kept of it, and its copies in the original."""
        there = self._original.ranks[0]
        for name, kept in self._shards.intact.items():
            if name in there and (kept.dtype, kept.shape) == (self._parts.kinds[name].dtype, there[name].shape):
                yield name, kept
        yield from ((first, there[second]) for second, first in self._original.twice.items())

    def all(self) -> Iterator[_Tensor]:
        """All tensors, in the order of the original's files, and the constants of a format."""
        uses: dict[str, list[_Use]] = defaultdict(list)
        names = set[str]()
        for stored in self._arrangement.stored:
            for number, atom in enumerate(stored.atoms):
                uses[atom.tensor].append(_Use(stored, number))
            names.update(atom.tensor for atom in stored.atoms if stored.name in self._holders)
        for name, info in self.whole():
            uses[name].append(_Use(None, 0, info))
            names.add(name)
        infos = self._original.ranks[0]
        files = {file: number for number, file in enumerate(sorted_paths({info.file for info in infos.values()}))}
        kinds = ((infos[name], kind) for name, kind, _ in self._arrangement.plan.model.tensors if name in names)
        ordered = sorted(kinds, key=lambda entry: (files[entry[0].file], entry[0].offset))
        for number, (info, kind) in enumerate(ordered):
            uses_of = uses[info.name]
            view = self._view(kind, uses_of)
            yield _Tensor(number, info.name, kind.dtype, view, info, uses_of, tuple(self._infos(view, uses_of)))
        yield from self._constants(len(ordered))

    def _infos(self, view: View, uses: Sequence[_Use]) -> Iterator[TensorInfo | None]:
        ranks = self._shards.ranks
        holders = [self._holders.get(use.stored.name, ()) if use.stored is not None else () for use in uses]
        for number, holder, *_ in view.parts:
            stored = uses[number].stored
            if stored is None:
                yield uses[number].info
            elif holder in holders[number]:
                yield ranks[holder][stored.name if stored.naming is None else stored.name_on(holder)]
            else:
                yield None

    def _view(self, kind: Kind, uses: Sequence[_Use]) -> View:
        key = (kind, *(part for use in uses for part in self._alike(use)))
        if key not in self._views:
            original, plan = self._kinds_of_original[kind], self._arrangement.plan
            repeats = None
            if original.shape != kind.shape:
                steps = zip(original.rule.dims, kind.rule.dims, strict=True)
                repeats = tuple(old.step // new.step for old, new in steps)
            sizes = plan.model.sizes.of(dict(kind.indices))
            padded = rule_of(plan.model, kind).sizes(
                {axis: max(size, plan.padding.get(axis, 0)) for axis, size in sizes.items()}
            )
            self._check(kind, uses)
            parts = [part for number, use in enumerate(uses) for part in self._parts_of(kind, number, use)]
            self._views[key] = View(kind.shape, padded, DTYPE_BITS[original.dtype], parts, repeats)
        return self._views[key]

    def _alike(self, use: _Use) -> Iterator[object]:
        """What is equal for stored tensors that have equal parts."""
        if use.stored is not None:
            yield from (use.stored.geometry, use.number, use.stored.dtype, use.stored.atoms[use.number][1:])
        else:
            yield use.info and use.info.dtype

    def _parts_of(self, kind: Kind, number: int, use: _Use) -> Iterator[Part]:
        """The parts that the holders of a stored tensor have."""
        stored, is_own = use.stored, kind.dtype == self._kinds_of_original[kind].dtype
        if stored is None:
            assert use.info is not None
            dtype = use.info.dtype
            yield Part(
                number, 0, (_whole(kind.shape),), DTYPE_BITS[dtype], dtype == self._kinds_of_original[kind].dtype
            )
            return
        atom, portions = stored.atoms[use.number], stored.geometry.portions
        function = portions[use.number % len(portions)].function
        is_same, bits = is_own and stored.dtype == kind.dtype and function is None, DTYPE_BITS[stored.dtype]
        zeros, sizes = self._arrangement.atoms[atom].zeros, self._arrangement.plan.model.sizes.of(dict(kind.indices))
        whole = kind.stated.sizes(sizes) if kind.stated is not None else None
        for holder in stored.geometry.holders:
            if blocks := self._parts.of(stored, holder, use.number):
                if atom.at is not None:
                    blocks = tuple(block.of_index(atom.at, math.prod(kind.shape[1:])) for block in blocks)
                stated = stored.stated(holder) if stored.stated is not None else None
                stated = stated if stated != whole else None
                yield Part(number, holder, blocks, bits, is_same and stated is None, holder in zeros, stated)

    def _check(self, kind: Kind, uses: Sequence[_Use]) -> None:
        """Raise PlanError if what is stored has not each element of a tensor."""
        elements: dict[tuple[object, ...], int] = {}
        for stored, number, _ in uses:
            if stored is not None:
                geometry = stored.geometry
                layout = geometry.whole.layouts[number]
                check_all_owned(layout)
                elements[stored.atoms[number]] = math.prod(layout.full)
        if elements and sum(elements.values()) != math.prod(kind.shape):
            raise PlanError(f"the format has {sum(elements.values())} elements of '{kind.name}' {list(kind.shape)}")

    def _constants(self, begin: int) -> Iterator[_Tensor]:
        """What a format stores that comes from no tensor."""
        for stored in self._arrangement.stored:
            for holder in self._holders.get(stored.name, ()) if stored.constant is not None else ():
                info = self._shards.ranks[holder][stored.name_on(holder)]
                shape, bits = (math.prod(info.shape),), DTYPE_BITS[info.dtype]
                view = View(shape, shape, bits, [Part(0, holder, (_whole(shape),), bits)])
                yield _Tensor(begin, stored.name_on(holder), info.dtype, view, None, [_Use(stored, 0)], (info,))


def _whole(shape: tuple[int, ...]) -> Block:
    """All elements of two tensors that are stored alike."""
    steps = [1]
    for length in reversed(shape[1:]):
        steps.insert(0, steps[0] * length)
    strides = tuple(steps[: len(shape)])
    return Block(shape, 0, strides, 0, strides, (0,) * len(shape), tuple((dim, 1) for dim in range(len(shape))))


class _Pair(NamedTuple):
    """A tensor and a part of it, as a report calls them.

    ``dtypes`` are the original's, after any cast, and that in which it is stored. ``pattern`` are the bits that stand
    where nothing of the original does, ``because`` says why.
    """

    tensor: _Tensor
    info: TensorInfo
    rank: int
    stored: str | None
    dtypes: tuple[str, str]
    function: str | None
    zero: bool
    pattern: int
    because: str

    def place(self, block: Block, element: Sequence[int]) -> tuple[str, int]:
        """The original's file, and the byte there from which an element of a block comes."""
        info, view = self.tensor.original, self.tensor.view
        assert info is not None and block.original is not None
        flat = block.original + sum(i * step for i, step in zip(element, block.original_strides, strict=False))
        if view.repeats is not None:
            index = np.unravel_index(flat, view.shape)
            flat = flat_index([int(i) // times for i, times in zip(index, view.repeats, strict=True)], info.shape)
        return str(info.file), info.offset + flat * DTYPE_BITS[info.dtype] // 8
