"""Compares what is stored with the original, element for element: in reshard's own form, and in every other.

All stored copies and parts of an original tensor are compared together, chunk by chunk (``blocks.py``), so that the
original is read once. Bytes are compared, so that NaN payloads and the sign of zero count. Memory does not grow with
the model. Files are not memory-mapped: a process that reads beyond the end of a file that has become shorter would be
killed.
"""

from __future__ import annotations

import math
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache, lru_cache
from typing import NamedTuple

import numpy as np

from reshard.formats.errors import PlanError
from reshard.formats.files.safetensors import DTYPE_BITS, TensorInfo
from reshard.formats.notation.axes import Run
from reshard.formats.store import FilePath, sorted_paths
from reshard.model.model import Kind
from reshard.placement.arrangement import Arrangement
from reshard.placement.stored import Atom, Location, Stored
from reshard.source.source import Source
from reshard.store.threads import Shared, work_together
from reshard.verify.bytes.blocks import (
    Array,
    Block,
    HolderPart,
    View,
    blocks_of,
    check_all_owned,
    line_of,
    tiles,
    whole,
)
from reshard.verify.bytes.exact_report import Damage, ExactReport, FirstDifference
from reshard.verify.bytes.reading import Files, cast, differing, expected, pattern, stating, widened
from reshard.verify.bytes.structure import ranks_of

ByteProgress = Callable[[int, int], None]
"""Called from any thread with the compared bytes of the shards so far, and the total."""


def no_progress(compared: int, total: int) -> None:
    """Show no progress."""


Use = Location | TensorInfo
"""A place of a tensor's elements: an atom of a stored tensor, or a tensor that is stored as in the original, such as
those that are kept beside the shards, and those that the original has under a second name.
"""


class _Copy(NamedTuple):
    """One holder's copy of a tensor."""

    part: HolderPart
    """The place of the copy in the tensor's view."""
    info: TensorInfo
    dtype: str
    """The original's, after any cast."""
    rank: int
    name: str | None
    """Its stored name, if it differs."""
    constant: int
    """The expected bits of elements that the original does not have."""
    because: str
    """The reason why these are expected."""


class _Tensor(NamedTuple):
    """A tensor of the original, and what is there of it for each part of its view: None where that is not compared. A
    constant of a format has no original.
    """

    number: int
    name: str
    view: View
    original: TensorInfo | None
    copies: Sequence[_Copy | None]


class Comparison:
    """The comparison of all tensors. ``holders_of`` has, for each stored tensor, the ranks or files that have it in the
    planned dtype and shape. ``damaged`` gets the files with wrong bytes.
    """

    def __init__(
        self, original: Source, shards: Source, arrangement: Arrangement, holders_of: Mapping[str, Sequence[int]],
        progress: ByteProgress, files: Files,
    ) -> None:  # fmt: skip
        self._original, self._shards, self._arrangement, self._holders = original, shards, arrangement, holders_of
        self._progress, self._files, self._lock = progress, files, threading.Lock()
        pairs = zip(arrangement.plan.model.tensors, original.plan.model.tensors, strict=True)
        self._kinds = {planned.name: (planned.kind, own.kind) for planned, own in pairs}
        self._joined = _Joined(original, files)
        self._infos = {**original.ranks[0], **self._joined.infos}
        self._ranks, self._views = ranks_of(shards), dict[tuple[object, ...], View]()
        self._total = sum(info.nbytes for _, info in self._twins())
        for stored in arrangement.stored:
            for holder in holders_of.get(stored.name, ()):
                self._total += shards.ranks[holder][stored.name_on(holder)].nbytes
        self._nbytes = 0
        self._first: tuple[tuple[int, int, int, str], FirstDifference] | None = None
        self._damages: dict[tuple[int, str, str, int], tuple[int, int, str | None]] = {}
        self.damaged: set[FilePath] = set()

    def run(self, workers: int) -> ExactReport:
        """Compare; the report has only ``first`` and ``damages``. Raises CheckpointError if a file cannot be read."""
        chunks = Shared((tensor, chunk) for tensor in self._tensors() for chunk in tensor.view.chunks())

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
        first, mesh = self._first[1] if self._first else None, self._arrangement.plan.mesh
        return ExactReport(str(mesh), mesh.size, len(self._holders), self._nbytes, first, tuple(damages))

    # ------------------------------------------------------------------------------------------------ a chunk

    def _compare(self, tensor: _Tensor, chunk: Run) -> None:
        """Compare a chunk of the original with what each holder has of it."""
        view, nbytes, original = tensor.view, 0, tensor.original
        run, content = view.of_original(chunk), None
        if original is not None and run.length:
            begin, end = (n * DTYPE_BITS[original.dtype] // 8 for n in (run.offset, run.end))
            if original.name in self._joined.infos:
                content = self._joined.read(original, run)
            else:
                content = self._files.read_once(original.file, original.offset + begin, end - begin)
        for reading in view.reads(chunk):
            part, copy = view.parts[reading.part], tensor.copies[reading.part]
            if copy is None:
                continue
            info, ours = copy.info, None if part.zero else content
            if part.stated is not None and ours is not None and original is not None:
                ours = stating(self._files, original, part.stated)[begin:end]
            if reading.part in view.shared:
                for block in (tile for whole_block in reading.blocks for tile in tiles(whole_block, part.bits)):
                    theirs = self._files.read_shared(info, *block.stored.extent(block.shape, part.bits))
                    self._compare_block(tensor, copy, block, (ours, run.offset), (theirs, block.stored.first))
            else:
                at, behind = reading.begin * part.bits // 8, reading.end * part.bits // 8
                theirs = self._files.read_once(info.file, info.offset + at, behind - at)
                for block in reading.blocks:
                    self._compare_block(tensor, copy, block, (ours, run.offset), (theirs, reading.begin))
            nbytes += reading.elements * part.bits // 8
        with self._lock:
            self._nbytes += nbytes
            self._progress(self._nbytes, self._total)

    def _compare_block(
        self, tensor: _Tensor, copy: _Copy, block: Block, ours: tuple[Array | None, int], theirs: tuple[Array, int]
    ) -> None:
        """Compare a block, of both sides the bytes and the element with which they begin. Count its wrong elements, and
        find the first in the order of the original's elements.
        """
        (part, info, dtype, rank, name, constant, because), original = copy, tensor.original
        right, function, in_original = block.stored.array(*theirs, block.shape, part.bits), None, None
        left = np.broadcast_to(right.dtype.type(constant), right.shape)
        if original is not None and ours[0] is not None and block.original is not None:
            in_original, function = block.original, part.function
            left = in_original.array(ours[0], ours[1], block.shape, DTYPE_BITS[original.dtype])
            left = widened(cast(left, original.dtype, dtype), dtype, info.dtype)
        wrong = differing(left, right, info.dtype, function)
        if wrong is None:
            return
        wrong, left, right = map(np.atleast_1d, (wrong, left, right))  # a number has no dimension
        places = np.nonzero(wrong)
        elements = [*places[: len(block.shape)]]  # of several that share a byte the first
        count = int(places[0].size)
        nbytes = count * right.itemsize
        if part.bits < 8:
            elements[-1] = elements[-1] * 8 // part.bits
            count = -(-count * 8 // part.bits)
        if function is None:
            nbytes = int(np.count_nonzero(np.ascontiguousarray(right[places] ^ left[places]).view(np.uint8)))
        positions = np.full(places[0].size, block.padded.first)
        for indices, step in zip(elements, block.padded.steps, strict=True):
            positions += indices * step
        one = int(np.argmin(positions))
        position, at = int(positions[one]), tuple(int(indices[one]) for indices in places)
        element, file, byte = [int(indices[one]) for indices in elements], None, None
        if original is not None and in_original is not None:
            number = in_original.at(element)
            file, byte = str(original.file), original.offset + (number * DTYPE_BITS[original.dtype] + 7) // 8
        difference = FirstDifference(
            tensor.name, tuple(map(int, np.unravel_index(position, tensor.view.padded))), rank, str(info.file),
            info.offset + (block.stored.at(element) * part.bits + 7) // 8, expected(left[at], info.dtype, function),
            right[at].tobytes(), file, byte, name, because,
        )  # fmt: skip
        place = tensor.number, position, rank, name or ""
        key = tensor.number, tensor.name, name or "", rank
        with self._lock:
            self.damaged.add(info.file)
            earlier = self._damages.get(key, (0, 0, None))
            self._damages[key] = earlier[0] + nbytes, earlier[1] + count, name
            if self._first is None or place < self._first[0]:
                self._first = place, difference

    def _copy(self, tensor: str, dtype: str, use: Use, part: HolderPart) -> _Copy | None:
        """Return the copy of a tensor that the holder of a part has; None if it is not to be compared."""
        rank, value, because = 0, 0.0, "padding"
        if isinstance(use, TensorInfo):
            info, dtype = use, use.dtype
        else:
            stored = use.stored
            if part.holder not in self._holders.get(stored.name, ()):
                return None
            info, rank = self._shards.ranks[part.holder][stored.name_on(part.holder)], self._ranks[part.holder]
            if stored.constant is not None:
                value, because = stored.constant.value, f"a constant of the format, {stored.constant.value}"
            elif part.zero:
                because = "zero, as an earlier rank has it"
        name = None if self._arrangement.format.plain and info.name == tensor else info.name
        return _Copy(part, info, dtype, rank, name, pattern(value, info.dtype), because)

    # ----------------------------------------------------------------------------------------- what is compared

    def _twins(self) -> Iterator[tuple[str, TensorInfo]]:
        """Tensors of the original, each with its copies: kept beside the shards, or under a second name in the
        original.
        """
        there = self._infos
        for name, kept in self._shards.intact.items():
            if name in there and (kept.dtype, kept.shape) == (self._kinds[name][0].dtype, there[name].shape):
                yield name, kept
        yield from ((first, there[second]) for second, first in self._original.twice.items())

    def _tensors(self) -> Iterator[_Tensor]:
        """All tensors, in the order of the original's files, and the constants of a format."""
        uses: dict[str, list[Use]] = defaultdict(list)
        names, constants = set[str](), list[Stored]()
        for stored in self._arrangement.stored:
            for number, atom in enumerate(stored.atoms):
                uses[atom.tensor].append(Location(stored, number))
            names.update(atom.tensor for atom in stored.atoms if stored.name in self._holders)
            constants += [stored] if stored.constant is not None else []
        for name, info in self._twins():
            uses[name].append(info)
            names.add(name)
        infos = self._infos
        files = {file: number for number, file in enumerate(sorted_paths({info.file for info in infos.values()}))}
        ordered = sorted((infos[name] for name in names), key=lambda info: (files[info.file], info.offset))
        for number, info in enumerate(ordered):
            (kind, own), uses_of = self._kinds[info.name], uses[info.name]
            view = self._view(kind, own, uses_of)
            copies = [self._copy(info.name, kind.dtype, uses_of[part.use], part) for part in view.parts]
            yield _Tensor(number, info.name, view, info, copies)
        for stored in constants:
            for holder in self._holders.get(stored.name, ()):
                name = stored.name_on(holder)
                shape, bits = (math.prod(self._shards.ranks[holder][name].shape),), DTYPE_BITS[stored.dtype]
                part = HolderPart(0, holder, (whole(shape),), bits)
                copies = [self._copy(name, stored.dtype, Location(stored, 0), part)]
                yield _Tensor(len(ordered), name, View(shape, shape, bits, [part]), None, copies)

    def _view(self, kind: Kind, own: Kind, uses: Sequence[Use]) -> View:
        """The view of a tensor of a kind, in the original of the kind ``own``; tensors of equal parts share it."""
        alike = (
            use.dtype if isinstance(use, TensorInfo)
            else (use.stored.geometry, use.number, use.stored.dtype, *use.stored.atoms[use.number][1:])
            for use in uses
        )  # fmt: skip
        key = (kind, *alike)
        if key not in self._views:
            plan = self._arrangement.plan
            sizes, rule = kind.sizes, kind.rule_in_rows
            padded_to = {axis: max(size, plan.padding.get(axis, 0)) for axis, size in sizes.items()}
            padded = rule.sizes(padded_to)
            parts = _parts(self._arrangement, kind, uses, ((sizes, kind.shape), (padded_to, padded)))
            self._views[key] = View(kind.shape, padded, DTYPE_BITS[own.dtype], parts)
        return self._views[key]


_AT_ONCE = 16
"""So many tensors are read at about the same time."""


class _Joined:
    """The tensors of an original that are parts of those which it stores, as transformers' modules have them."""

    def __init__(self, original: Source, files: Files) -> None:
        self._original, self._stored, self._files = original, original.ranks[0], files
        self._uses, self._kinds = defaultdict[str, list[Location]](list), original.plan.model.kind_of
        self._view = lru_cache(_AT_ONCE)(self._view_of)
        for atom, place in original.arrangement.atoms.items() if not original.format.plain else ():
            self._uses[atom.tensor].append(place)
        self.infos = {name: self._info(name) for name in self._uses}
        """Each in the file of its first part."""

    def _info(self, name: str) -> TensorInfo:
        kind, first = self._kinds[name], self._stored[self._uses[name][0].stored.name]
        return first._replace(name=name, dtype=kind.dtype, shape=kind.shape)

    def read(self, info: TensorInfo, run: Run) -> Array:
        """The bytes of a range of a tensor's elements."""
        name, view, bits = info.name, self._view(info.name), DTYPE_BITS[info.dtype]
        content, count = np.empty(run.length * bits // 8, np.uint8), 0
        for reading in view.reads(run):
            stored = self._stored[self._uses[name][view.parts[reading.part].use].stored.name]
            for block in (tile for whole_block in reading.blocks for tile in tiles(whole_block, bits)):
                assert block.original is not None
                theirs = self._files.read_shared(stored, *block.stored.extent(block.shape, bits))
                own = block.original.array(content, run.offset, block.shape, bits)
                own[...] = block.stored.array(theirs, block.stored.first, block.shape, bits)
            count += reading.elements
        if count != run.length:
            raise PlanError(f"{count} of {run.length} elements of '{name}' are stored")
        return content

    def _view_of(self, name: str) -> View:
        kind = self._kinds[name]
        parts = _parts(self._original.arrangement, kind, self._uses[name], ((kind.sizes, kind.shape),) * 2)
        return View(kind.shape, kind.shape, DTYPE_BITS[kind.dtype], parts)


def _parts(
    arrangement: Arrangement, kind: Kind, uses: Sequence[Use],
    tensors: Sequence[tuple[Mapping[str, int], tuple[int, ...]]],
) -> Iterator[HolderPart]:  # fmt: skip
    """The parts that all holders have of tensors of a kind; of the original and of the padded one, ``tensors`` has
    the sizes of axes and the shape.

    Raises PlanError if what is stored has not each element.
    """
    counts = dict[Atom, int]()
    blocks_at = cache(lambda *key: tuple(blocks_of(*key)))  # the same for all experts of a layer
    for number, use in enumerate(uses):
        if isinstance(use, TensorInfo):
            yield HolderPart(number, 0, (whole(kind.shape),), DTYPE_BITS[use.dtype])
            continue
        stored, slot = use
        geometry, atom, portion = stored.geometry, stored.atoms[slot], use.portion
        layout = geometry.whole.layouts[slot]
        check_all_owned(layout)
        counts[atom] = math.prod(layout.full)
        lines = [line_of(kind.rule_in_rows, portion, sizes, shape) for sizes, shape in tensors]
        zeros = arrangement.atoms[atom].zeros
        says = kind.stated.sizes(tensors[0][0]) if kind.stated is not None else None
        for holder in geometry.holders:
            if blocks := blocks_at(geometry, holder, slot, *lines):
                if atom.at is not None:
                    elements = [atom.at * math.prod(shape[1:]) for _, shape in tensors]
                    blocks = tuple(block.further(*elements) for block in blocks)
                stated = stored.stated.on(holder) if stored.stated is not None else says
                stated = stated if stated != says else None
                is_zero = holder in zeros
                yield HolderPart(number, holder, blocks, DTYPE_BITS[stored.dtype], portion.function, is_zero, stated)
    if counts and sum(counts.values()) != math.prod(kind.shape):
        raise PlanError(f"the format has {sum(counts.values())} elements of '{kind.name}' {list(kind.shape)}")
