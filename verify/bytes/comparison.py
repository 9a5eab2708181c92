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
from reshard.placement.geometry import row_major
from reshard.placement.portions import rule_of
from reshard.placement.stored import Stored
from reshard.source.source import Source
from reshard.store.threads import Shared, work_together
from verify.bytes.atoms import Block, Parts, check_all_owned, dot, strided
from verify.bytes.exact_report import Damage, ExactReport, FirstDifference
from verify.bytes.reading import Files, cast, differing, expected, pattern, repeated, stating
from verify.bytes.structure import ranks_of
from verify.bytes.views import Array, Part, View, array, tiles

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


class _Copy(NamedTuple):
    """What a holder has of a tensor.

    ``stored`` is its name there, if it is another. ``dtypes`` are the original's, after any cast, and that in which it
    is stored, as a ``function`` of the original if there is one. ``pattern`` are the bits that stand where nothing of
    the original does, ``because`` says why.
    """

    info: TensorInfo
    rank: int
    stored: str | None
    dtypes: tuple[str, str]
    function: str | None
    pattern: int
    because: str


class _Tensor(NamedTuple):
    """A tensor of the original, and the copy for each part of its view (None: not to be compared).

    A constant of a format has no original.
    """

    number: int
    name: str
    view: View
    original: TensorInfo | None
    copies: Sequence[_Copy | None]

    def place(self, block: Block, element: Sequence[int]) -> tuple[str | None, int | None]:
        """The original's file, and the byte there from which an element of a block comes; None for padding."""
        info, view = self.original, self.view
        if info is None or block.original is None:
            return None, None
        flat = block.original + dot(element, block.original_strides)
        if view.repeats is not None:
            index = np.unravel_index(flat, view.shape)
            few = (int(i) // times for i, times in zip(index, view.repeats, strict=True))
            flat = dot(few, row_major(info.shape, 1))
        return str(info.file), info.offset + flat * DTYPE_BITS[info.dtype] // 8


class Comparison:
    """The comparison of all tensors. ``holders_of`` has, for each stored tensor, the ranks or files that have it in the
    planned dtype and shape. ``damaged`` gets the files with wrong bytes.
    """

    def __init__(
        self, original: Source, shards: Source, arrangement: Arrangement, holders_of: Mapping[str, Sequence[int]],
        progress: Progress, files: Files,
    ) -> None:  # fmt: skip
        self._mesh, self._holders, self._progress = arrangement.plan.mesh, holders_of, progress
        self._files, self._lock = files, threading.Lock()
        self._tensors = _Tensors(original, shards, arrangement, holders_of)
        self._total = sum(info.nbytes for _, info in self._tensors.whole())
        for stored in arrangement.stored:
            for holder in holders_of.get(stored.name, ()):
                self._total += shards.ranks[holder][stored.name_on(holder)].nbytes
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
        first = self._first[1] if self._first else None
        return ExactReport(str(self._mesh), self._mesh.size, len(self._holders), self._nbytes, first, tuple(damages))

    def _compare(self, tensor: _Tensor, chunk: Run) -> None:
        """Compare a chunk of the original with what each holder has of it."""
        view, nbytes = tensor.view, 0
        run = view.of_original(chunk)
        original = self._original(tensor, run) if tensor.original is not None and run.length else None
        for reading in view.reads(chunk):
            part, copy = view.parts[reading.part], tensor.copies[reading.part]
            if copy is None:
                continue
            info, ours = copy.info, None if part.zero else original
            if part.stated is not None and ours is not None and tensor.original is not None:
                item = DTYPE_BITS[tensor.original.dtype] // 8
                ours = stating(self._files, tensor.original, part.stated)[run.offset * item : run.end * item]
            if reading.part in view.shared:
                for block in (tile for whole_block in reading.blocks for tile in tiles(whole_block, part.bits)):
                    strides = strided(0, block.shape, block.shard, block.shard_strides, part.bits)
                    theirs = self._files.read_shared(info, strides.begin, strides.nbytes)
                    self._compare_block(tensor, copy, block, (ours, run.offset), (theirs, block.shard))
            else:
                begin, end = reading.begin * part.bits // 8, reading.end * part.bits // 8
                theirs = self._files.read_once(info.file, info.offset + begin, end - begin)
                for block in reading.blocks:
                    self._compare_block(tensor, copy, block, (ours, run.offset), (theirs, reading.begin))
            nbytes += reading.elements * part.bits // 8
        with self._lock:
            self._nbytes += nbytes
            self._progress(self._nbytes, self._total)

    def _original(self, tensor: _Tensor, run: Run) -> Array:
        """The bytes of these elements of the original."""
        info, view = tensor.original, tensor.view
        assert info is not None
        if view.repeats is not None:
            content = self._files.read_once(info.file, info.offset, info.nbytes)
            return repeated(content, info.shape, view.repeats, view.shape)
        bits = DTYPE_BITS[info.dtype]
        return self._files.read_once(info.file, info.offset + run.offset * bits // 8, run.length * bits // 8)

    def _compare_block(
        self, tensor: _Tensor, copy: _Copy, block: Block, ours: tuple[Array | None, int], theirs: tuple[Array, int]
    ) -> None:
        """Compare a block; of both sides the bytes, and the element with which they begin."""
        left, info = None, tensor.original
        if info is not None and ours[0] is not None and block.original is not None:
            bits = DTYPE_BITS[info.dtype]
            left = array(ours[0], ours[1], block.shape, block.original, block.original_strides, bits)
            left = cast(left, info.dtype, copy.dtypes[0])
        right = array(theirs[0], theirs[1], block.shape, block.shard, block.shard_strides, DTYPE_BITS[copy.dtypes[1]])
        if left is not None:
            wrong = differing(left, right, copy.dtypes, copy.function)
        else:
            wrong = right != copy.pattern if (right != copy.pattern).any() else None
        if wrong is not None:
            self._count(tensor, copy, block, left, right, wrong)

    def _count(
        self, tensor: _Tensor, copy: _Copy, block: Block, left: Array | None, right: Array, wrong: Array
    ) -> None:
        """Count the wrong elements of a block, and find the first in the order of the original's elements."""
        bits = DTYPE_BITS[copy.dtypes[1]]
        per_byte = max(1, 8 // bits)
        if not block.shape:  # a number
            wrong, right = np.atleast_1d(wrong), np.atleast_1d(right)
            left = None if left is None else np.atleast_1d(left)
        places = np.nonzero(wrong)
        scale = [per_byte if factor == len(places) - 1 else 1 for factor in range(len(block.shape))]
        first, steps = tensor.view.positions(block)
        positions = np.full(places[0].size, first)
        for indices, step, times in zip(places, steps, scale, strict=False):
            positions += indices * (step * times)
        one = int(np.argmin(positions))
        index = tuple(map(int, np.unravel_index(int(positions[one]), tensor.view.padded)))
        at = tuple(int(indices[one]) for indices in places)
        element = [i * times for i, times in zip(at, scale, strict=False)]
        nbytes = right.itemsize * int(places[0].size)
        if left is None or (left.dtype == right.dtype and copy.function is None):
            changed = right[places] ^ (right.dtype.type(copy.pattern) if left is None else left[places])
            nbytes = int(np.count_nonzero(np.ascontiguousarray(changed).view(np.uint8)))
        should = copy.pattern.to_bytes(right.itemsize, "little")
        if left is not None:
            should = expected(np.ascontiguousarray(left[at]).reshape(1), copy.dtypes, copy.function)
        byte = copy.info.offset + (block.shard + dot(element, block.shard_strides)) * bits // 8
        file, original = tensor.place(block, element) if left is not None else (None, None)
        difference = FirstDifference(
            tensor.name, index, copy.rank, str(copy.info.file), byte, should,
            np.ascontiguousarray(right[at]).reshape(1).tobytes(), file, original, copy.stored, copy.because,
        )  # fmt: skip
        place = tensor.number, int(positions[one]), copy.rank, copy.stored or ""
        key = tensor.number, tensor.name, copy.stored or "", copy.rank
        with self._lock:
            self.damaged.add(copy.info.file)
            earlier = self._damages.get(key, (0, 0, None))
            count = earlier[1] + int(places[0].size) * per_byte
            self._damages[key] = earlier[0] + nbytes, count, copy.stored
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
        pairs = zip(arrangement.plan.model.tensors, original.plan.model.tensors, strict=True)
        self._kinds_of_original = {planned.kind: own.kind for planned, own in pairs}
        self._ranks = ranks_of(shards)
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
            view = self._view(kind, uses[info.name])
            copies = [self._copy(info.name, kind.dtype, part, uses[info.name][part.number]) for part in view.parts]
            yield _Tensor(number, info.name, view, info, copies)
        yield from self._constants(len(ordered))

    def _copy(self, name: str, dtype: str, part: Part, use: _Use) -> _Copy | None:
        """What the holder of a part has of a tensor that is cast to this dtype."""
        stored, number, info = use
        if stored is None:
            assert info is not None
            return _Copy(info, 0, self._other_name(name, info), (info.dtype, info.dtype), None, 0, "padding")
        if part.holder not in self._holders.get(stored.name, ()):
            return None
        info = self._shards.ranks[part.holder][stored.name_on(part.holder)]
        function, value, because = None, 0.0, "zero, as an earlier rank has it" if part.zero else "padding"
        if stored.constant is not None:
            value, because = stored.constant.value, f"a constant of the format, {stored.constant.value}"
        else:
            function = stored.geometry.portions[number % len(stored.geometry.portions)].function
        return _Copy(
            info, self._ranks[part.holder], self._other_name(name, info), (dtype, info.dtype), function,
            pattern(value, info.dtype), because,
        )  # fmt: skip

    def _other_name(self, name: str, info: TensorInfo) -> str | None:
        return None if self._arrangement.format.plain and info.name == name else info.name

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
        stored = use.stored
        if stored is None:
            assert use.info is not None
            yield Part(number, 0, (_whole(kind.shape),), DTYPE_BITS[use.info.dtype])
            return
        atom, bits = stored.atoms[use.number], DTYPE_BITS[stored.dtype]
        zeros, sizes = self._arrangement.atoms[atom].zeros, self._arrangement.plan.model.sizes.of(dict(kind.indices))
        whole = kind.stated.sizes(sizes) if kind.stated is not None else None
        for holder in stored.geometry.holders:
            if blocks := self._parts.of(stored, holder, use.number):
                if atom.at is not None:
                    blocks = tuple(block.of_index(atom.at, math.prod(kind.shape[1:])) for block in blocks)
                stated = stored.stated(holder) if stored.stated is not None else whole
                stated = stated if stated != whole else None
                yield Part(number, holder, blocks, bits, holder in zeros, stated)

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
                name = stored.name_on(holder)
                info = self._shards.ranks[holder][name]
                shape, bits = (math.prod(info.shape),), DTYPE_BITS[info.dtype]
                part = Part(0, holder, (_whole(shape),), bits)
                copy = self._copy(name, info.dtype, part, _Use(stored, 0))
                yield _Tensor(begin, name, View(shape, shape, bits, [part]), None, [copy])


def _whole(shape: tuple[int, ...]) -> Block:
    """All elements of two tensors that are stored alike."""
    strides = row_major(shape, 1)
    return Block(shape, 0, strides, 0, strides, (0,) * len(shape), tuple((dim, 1) for dim in range(len(shape))))
