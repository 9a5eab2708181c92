"""Byte for byte: whether every byte of a split checkpoint is the byte of the original that it should be.

The proof reads files and plans, never the engine that wrote them. A plan for the shards' mesh is made from the
original, and from it follows what each rank should hold. The original is then read once, in chunks, and each chunk is
compared with the parts of it that the ranks hold, as bytes (so that NaN payloads and the sign of zero count). Memory
does not grow with the model.
"""

from __future__ import annotations

import itertools
import math
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from formats.documents import read_config
from formats.errors import CheckpointError, PlanError, ReshardError
from formats.files.checksum import PartialSum, sum_part
from formats.files.safetensors import DTYPE_BITS, TensorInfo
from formats.files.sharded import MANIFEST, is_sharded
from formats.notation.axes import Run
from reshard.planning.finer_blocks import with_blocks
from reshard.planning.model import Kind
from reshard.planning.plan import Layout, Plan, make_plan
from reshard.planning.rank_config import rank_config
from reshard.storage.source import Source, open_source
from verify.bytes import folder
from verify.bytes.scales import differing, refined
from verify.bytes.stated_shapes import Statements, says
from verify.rules import flat, with_sound_config

SMALL = 1 << 14
"""Bytes of a tensor up to which to compare it by itself takes longer than to read it."""

TOGETHER = 128
"""Small tensors that are compared at a time."""

CHUNK = 2 << 20
"""Bytes of the original that are compared at a time: few enough for the cache, enough for Python not to matter."""

Progress = Callable[[int, int], None]
"""Called with the bytes of the shards compared so far and in all, from any thread."""

Array = npt.NDArray[Any]
Indices = npt.NDArray[np.intp]


def _no_progress(done: int, total: int) -> None:
    pass


# ---------------------------------------------------------------------------------------------------------- report


@dataclass(frozen=True)
class FirstDifference:
    """The first element, in the order of the original's files, that is not as it should be.

    ``index`` counts in the full tensor (where it lies in the padding, in the padded one). ``offset`` and
    ``original_offset`` are where the element begins, in bytes of its file; the original is None in the padding, where
    zeros are expected.
    """

    tensor: str
    index: tuple[int, ...]
    rank: int
    file: str
    offset: int
    expected: bytes
    found: bytes
    original_file: str | None
    original_offset: int | None

    def __str__(self) -> str:
        place = "padding" if self.original_file is None else f"{self.original_file} byte {self.original_offset}"
        return (
            f"{self.tensor}{list(self.index)} on rank {self.rank}: {self.file} byte {self.offset} "
            f"has {self.found.hex(' ')}, expected {self.expected.hex(' ')} ({place})"
        )


@dataclass(frozen=True)
class Damage:
    """How much of a rank's part of a tensor is not as it should be."""

    tensor: str
    rank: int
    nbytes: int
    elements: int


@dataclass(frozen=True)
class ConfigDifference:
    """A setting of a config.json, or of another JSON file, that is not as planned, as JSON; None: not there."""

    file: str
    key: str
    expected: str | None
    found: str | None

    def __str__(self) -> str:
        expected, found = (value if value is not None else "nothing" for value in (self.expected, self.found))
        return f"{self.file}: '{self.key}' is {found}, expected {expected}"


@dataclass(frozen=True)
class ExactReport:
    """The result of a comparison. ``nbytes`` are the bytes of the shards' tensors that were compared.

    ``missing`` and ``extra`` name tensors and files; ``problems`` are other contradictions, one line each; ``first``
    and ``damages`` are about the content of tensors.
    """

    mesh: str
    ranks: int
    tensors: int
    nbytes: int
    first: FirstDifference | None = None
    damages: tuple[Damage, ...] = ()
    missing: tuple[str, ...] = ()
    extra: tuple[str, ...] = ()
    configs: tuple[ConfigDifference, ...] = ()
    problems: tuple[str, ...] = ()

    @property
    def verdict(self) -> Literal["same", "different"]:
        """Whether the shards are the original."""
        differs = self.first or self.damages or self.missing or self.extra or self.configs or self.problems
        return "different" if differs else "same"

    @property
    def comparable(self) -> bool:
        """Whether the shards hold the original's tensors in the planned shapes, whatever their content."""
        return not (self.missing or self.problems)

    def to_document(self) -> dict[str, Any]:
        """The report as it stands in ``--json``."""
        document = {"verdict": self.verdict, **asdict(self)}
        if self.first is not None:
            bytes_as_text = {"expected": self.first.expected.hex(), "found": self.first.found.hex()}
            document["first"] = {**asdict(self.first), **bytes_as_text}
        return document


# ----------------------------------------------------------------------------------------------------- the comparison


def verify_exact(
    original: Source, path: Path, *, plan_file: Path | None = None, progress: Progress = _no_progress
) -> ExactReport:
    """Compare a folder of shards with their original; shards that contradict themselves are different.

    Raises ReshardError where nothing can be said: the folder is no checkpoint, or cannot be read.
    """
    shards = open_shards(path, plan_file=plan_file)
    return shards if isinstance(shards, ExactReport) else compare(original, shards, progress)


def open_shards(path: Path, *, plan_file: Path | None = None) -> Source | ExactReport:
    """Open shards, or say in a report why they are not what they claim to be.

    Raises ReshardError where nothing can be said.
    """
    try:
        return open_source(path, plan_file=plan_file)
    except ReshardError as error:
        reason = error.__context__
        unreadable = isinstance(reason, OSError) and not isinstance(reason, FileNotFoundError)
        if unreadable or not is_sharded(path):
            raise
        text = f"{error.message} ({error.hint})" if error.hint else error.message
        return ExactReport("unknown", 0, 0, 0, problems=(text,))


def compare(
    original: Source, shards: Source, progress: Progress = _no_progress, *, workers: int | None = None
) -> ExactReport:
    """Compare every byte of every shard with the byte of the original that it should be.

    ``shards`` may also be a full checkpoint (a merged one). Raises CheckpointError for an ``original`` that is split
    itself and for files that cannot be read.
    """
    if original.sharded is not None:
        raise CheckpointError(f"{original.path} is split itself", "give the full checkpoint first, then the shards")
    ranks = len(shards.ranks)
    try:
        plan = _planned(original, shards)
    except ReshardError as error:
        return ExactReport(str(shards.plan.mesh), ranks, 0, 0, problems=(error.message,))
    found = _Structure(original, shards, plan)
    found.check()
    found.problems += _check_refined(original, shards, plan, found.comparable)
    found.problems += _check_statements(original, shards, plan, found.comparable)
    workers = workers or min(4, os.cpu_count() or 1)
    sums = folder.begun_sums(original, shards)
    bytes_found = _compare_bytes(original, shards, plan, found.comparable, progress, workers, sums)
    damaged = {shards.ranks[damage.rank][damage.tensor].file for damage in bytes_found.damages}
    found.problems += folder.wrong_checksums(original, shards, sums, damaged)
    return replace(
        bytes_found,
        missing=tuple(found.missing),
        extra=tuple(found.extra),
        configs=tuple(found.configs),
        problems=tuple(found.problems),
    )


def _check_refined(original: Source, shards: Source, plan: Plan, comparable: dict[str, list[int]]) -> Iterator[str]:
    """Compare the scales whose blocks were made smaller, and take them from what is compared byte for byte."""
    for before, after in zip(original.plan.model.tensors, plan.model.tensors, strict=True):
        name = after.name
        coarse, finer = original.plan.laid[before.kind].layout, plan.laid[after.kind].layout
        if coarse.full == finer.full or name not in comparable:
            continue
        expected = refined(original.ranks[0][name], coarse, finer)
        for rank in comparable.pop(name):
            info = shards.ranks[rank][name]
            wrong = list(differing(info, expected, finer, rank))
            if wrong:
                place = list(map(int, wrong[0]))
                yield f"{info.file}: {len(wrong)} scales of '{name}' are not the original's, first at {place}"


def _check_statements(original: Source, shards: Source, plan: Plan, comparable: dict[str, list[int]]) -> Iterator[str]:
    """Compare the tensors that state a shape, of which a rank's is not the original's byte for byte, and take them
    from what is.
    """
    with Statements() as statements:
        for name, kind, _ in plan.model.tensors:
            stated = plan.laid[kind].stated
            if stated is None or name not in comparable:
                continue
            ranks, info = comparable[name], original.ranks[0][name]
            whole = statements.read(info)
            comparable[name] = [rank for rank in ranks if stated.box(rank).shape == stated.stored]
            for rank in sorted(set(ranks) - set(comparable[name])):
                shard, shape = shards.ranks[rank][name], list(stated.box(rank).shape)
                if not says(statements.read(shard), whole, info.dtype, shape):
                    yield f"{shard.file}: tensor '{name}' is not the original's with the shape {shape} in it"


def _planned(original: Source, shards: Source) -> Plan:
    """What the ranks should hold, by the original's own plan; of the shards only mesh and padding are taken."""
    sizes, padding = original.model.sizes.of({}), shards.plan.padding
    for axis, padded in padding.items():
        if axis not in original.model.architecture.pad or padded < sizes.get(axis, 0):
            raise PlanError(f"{shards.path}: the axis '{axis}' of size {sizes.get(axis)} cannot be padded to {padded}")
    blocks = shards.sharded.identity.blocks if shards.sharded else None
    model = with_blocks(original.model, blocks) if blocks else original.model
    return make_plan(model, shards.plan.mesh, padding=padding)


# ---------------------------------------------------------------------------------------------- all but the bytes


@dataclass
class _Structure:
    """What can be seen without reading tensors: names, shapes, dtypes, files, configs.

    ``comparable`` has for each tensor the ranks whose part has the planned dtype and shape.
    """

    original: Source
    shards: Source
    plan: Plan
    missing: list[str] = field(default_factory=list)
    extra: list[str] = field(default_factory=list)
    configs: list[ConfigDifference] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    comparable: dict[str, list[int]] = field(default_factory=dict)

    def check(self) -> None:
        """Fill in everything."""
        for rank, tensors in enumerate(self.shards.ranks):
            self._check_tensors(rank, tensors)
        config = "config.json"
        self._check_config(config, read_config(self.original.path / config), self.shards.path / config)
        self._check_side_files()
        if self.shards.sharded is not None:
            self._check_files()
            self._check_identity()
            self._check_documents()
            planned = with_sound_config(self.plan)
            for rank in range(self.plan.mesh.size):
                name = f"{self.plan.mesh.folder(rank)}/config.json"
                self._check_config(name, rank_config(planned, rank), self.shards.path / name)

    def _check_tensors(self, rank: int, tensors: Mapping[str, TensorInfo]) -> None:
        where = self.plan.mesh.folder(rank) if self.shards.sharded else self.shards.path.name
        boxes = {kind: entry.layout.boxes[rank] for kind, entry in self.plan.laid.items()}
        for name, kind, _ in self.plan.model.tensors:
            info, box = tensors.get(name), boxes[kind]
            if box is None or info is None:
                if box is not None:
                    self.missing.append(f"{where}: {name}")
                elif info is not None:
                    self.extra.append(f"{where}: {name}")
            elif info.dtype != kind.dtype or info.shape != box.shape:
                has, planned = f"{info.dtype} {list(info.shape)}", f"{kind.dtype} {list(box.shape)}"
                self.problems.append(f"{info.file}: tensor '{name}' is {has}, the original gives {planned}")
            else:
                self.comparable.setdefault(name, []).append(rank)
        known = {tensor.name for tensor in self.plan.model.tensors}
        self.extra += [f"{where}: {name}" for name in tensors if name not in known]

    def _check_identity(self) -> None:
        """What the headers say of where they come from. (Another plan with the same result is no difference.)"""
        assert self.shards.sharded is not None
        expected, found = self.original.identity(self.plan), self.shards.sharded.identity
        if found.source != expected.source:
            has, should = found.source[:12], expected.source[:12]
            self.problems.append(
                f"{self.shards.path}: the shards say that they come from {has}, the original is {should}"
            )
        for axis in sorted(expected.sizes.keys() | found.sizes.keys()):
            said, true = found.sizes.get(axis), expected.sizes.get(axis)
            if said != true:
                self.problems.append(
                    f"{self.shards.path}: the axis '{axis}' is said to have {said}, the original has {true}"
                )

    def _check_files(self) -> None:
        root = self.shards.path
        expected = folder.expected_files(self.original, self.shards, self.plan)
        files = [name for names in expected.values() for name in names]
        self.missing += sorted(name for name in files if not (root / name).is_file())
        self.extra += folder.extra_entries(root, files)

    def _check_documents(self) -> None:
        """The manifest, and what headers and indexes of the ranks say."""
        self._take(MANIFEST, folder.manifest_changes(self.original, self.shards, self.plan))
        agree = not (self.missing or self.extra or self.problems)
        order = folder.stored_order(self.shards, self.plan) if agree else ()
        for rank in range(self.plan.mesh.size):
            self._take(
                f"{self.plan.mesh.folder(rank)}/{folder.INDEX}", folder.index_changes(self.shards, self.plan, rank)
            )
            if agree:
                for file, change in folder.header_changes(self.original, self.shards, self.plan, rank, order):
                    self._take(file, [change])
                problem = folder.boundary_problem(self.shards, self.plan, rank, order)
                self.problems += [problem] if problem else []

    def _take(self, file: str, changes: Iterable[folder.Change]) -> None:
        for key, should, found in changes:
            difference = ConfigDifference(file, key, folder.shown(should, found), folder.shown(found, should))
            self.configs.append(difference)

    def _check_config(self, name: str, expected: Mapping[str, Any], path: Path) -> None:
        found = _read_json(path)
        if found is None:
            if path.exists():
                self.problems.append(f"{path}: is not a JSON object")
            elif name not in self.missing:
                self.missing.append(name)
            return
        has, should = dict(flat(found)), dict(flat(expected))
        for key in sorted(has.keys() | should.keys()):
            if has.get(key) != should.get(key):
                self.configs.append(ConfigDifference(name, key, should.get(key), has.get(key)))

    def _check_side_files(self) -> None:
        """Side files (a tokenizer) are all there and the original's; of a config, compared as JSON, all bytes, too."""
        root = self.shards.path
        if self.shards.sharded is None:
            names = {file.relative_to(self.original.path).as_posix() for file in self.original.side_files}
            present = {file.relative_to(root).as_posix() for file in self.shards.side_files}
            self.missing += sorted(names - present)
            self.extra += sorted(present - names)
        told = {difference.file for difference in self.configs}
        for file in folder.changed_side_files(self.original, self.shards):
            if file.relative_to(root).as_posix() not in told:
                self.problems.append(f"{file}: is not the original's")


def _read_json(path: Path) -> dict[str, Any] | None:
    """The object that a file holds; None if it holds none."""
    try:
        return read_config(path)
    except CheckpointError:
        return None


# ----------------------------------------------------------------------------------------------------- what lies where


@dataclass(frozen=True, slots=True)
class _Piece:
    """Consecutive indices of a dimension that a rank holds, from ``start`` in the full tensor, ``local`` in its own."""

    start: int
    length: int
    local: int
    padding: bool

    @property
    def end(self) -> int:
        return self.start + self.length


@dataclass(frozen=True)
class _Part:
    """What a rank holds: the pieces of each dimension, and its local shape."""

    pieces: tuple[tuple[_Piece, ...], ...]
    shape: tuple[int, ...]


class _View:
    """A layout in bytes: the last dimensions, if nobody splits them, are folded into an item of ``item`` bytes.

    ``full``, ``padded`` and each part's shape are in items; a rank that holds nothing has a part without pieces. Chunks
    are cut along dimension ``axis``, the first one of whose indices a chunk holds at least one. ``word`` divides, in
    bytes, every place at which something begins or ends.
    """

    def __init__(self, layout: Layout, bits: int) -> None:
        dims = len(layout.full)
        item_bits = bits
        while dims and self._is_whole(layout, dims - 1) and item_bits * layout.full[dims - 1] <= CHUNK:
            dims -= 1
            item_bits *= layout.full[dims]
        shapes = [layout.full[:dims], layout.padded[:dims]]
        runs: list[tuple[tuple[Run, ...], ...]] = [box.dims[:dims] if box else ((),) * dims for box in layout.boxes]
        if not dims:  # everyone holds all: one dimension of bytes
            whole = (Run(0, item_bits // 8),)
            shapes, runs = [(item_bits // 8,)] * 2, [(whole if box else (),) for box in layout.boxes]
            item_bits = 8
        elif item_bits % 8:  # several elements to a byte: the last dimension counts bytes
            shapes = [(*shape[:-1], _whole_bytes(shape[-1] * item_bits, layout)) for shape in shapes]
            scaled = [(*r[:-1], tuple(_scaled(run, item_bits, layout) for run in r[-1])) for r in runs]
            runs, item_bits = scaled, 8
        self.layout, self.bits, self.element, self.item = layout, bits, max(1, bits // 8), item_bits // 8
        self.full, self.padded = shapes
        self.parts = tuple(_part(dims_runs, self.full) for dims_runs in runs)
        _check_all_owned(self)
        self.inner = [self.item * math.prod(self.padded[i + 1 :]) for i in range(len(self.padded))]
        self.axis = next(i for i, nbytes in enumerate(self.inner) if nbytes <= CHUNK or i == len(self.inner) - 1)
        self.rows = max(1, CHUNK // self.inner[self.axis])
        if self.axis == len(self.padded) - 1:  # so that chunks begin at a word
            self.rows = max(8, self.rows // 8 * 8)
        last = [n for part in self.parts for piece in part.pieces[-1] for n in (piece.start, piece.length, piece.local)]
        last += [self.full[-1], *(part.shape[-1] for part in self.parts)]
        self.word = math.gcd(8, *(n * self.item for n in last))

    @staticmethod
    def _is_whole(layout: Layout, dim: int) -> bool:
        size = layout.full[dim]
        return layout.padded[dim] == size and all(box.dims[dim] == (Run(0, size),) for box in layout.boxes if box)

    def in_words(self, content: Array, rows: int, dims: Sequence[int]) -> Array:
        """Bytes of rows with these dimensions, as an array of words (of rows alone, flat)."""
        shape = (rows, *dims[:-1], dims[-1] * self.item // self.word) if dims else (-1,)
        return content.view(f"u{self.word}").reshape(shape)

    def cut(self, spans: Sequence[tuple[int, int]]) -> tuple[slice, ...]:
        """The slices of an array of ``in_words`` with the given offset and length of each dimension after the rows."""
        if not spans:
            return ()
        *middle, (start, length) = spans
        last = slice(start * self.item // self.word, (start + length) * self.item // self.word)
        return (slice(None), *(slice(offset, offset + size) for offset, size in middle), last)

    @cached_property
    def places(self) -> tuple[Indices, ...]:
        """Which of the original's words each word of a rank is, in the rank's order; one past the last: zeros."""
        return tuple(self._places(part) for part in self.parts)

    def _places(self, part: _Part) -> Indices:
        sizes, found = [*self.full[:-1], self.full[-1] * self.item // self.word], np.zeros(1, np.intp)
        inside = np.ones(1, bool)
        for i, (size, pieces) in enumerate(zip(sizes, part.pieces, strict=True)):
            scale = self.item if i == len(sizes) - 1 else self.word
            spans = [(p.start * scale // self.word, p.end * scale // self.word, p.padding) for p in pieces]
            indices = [np.arange(first, last) for first, last, _ in spans]
            known = [np.full(last - first, not padding) for first, last, padding in spans]
            empty = np.zeros(0, np.intp)
            found = (found[:, None] * size + np.concatenate([empty, *indices])).reshape(-1)
            inside = (inside[:, None] & np.concatenate([empty > 0, *known])).reshape(-1)
        return np.where(inside, found, math.prod(sizes))

    def zeroed(self, content: Array) -> Array:
        """The words of the original, and a zero after the last."""
        words = content.view(f"u{self.word}")
        return np.append(words, words.dtype.type(0))

    def position(self, coordinates: Sequence[int]) -> tuple[int, tuple[int, ...]]:
        """The byte in the padded tensor of an element, and its index; the last coordinate counts bytes."""
        byte = 0
        for size, coordinate in zip((*self.padded[:-1], self.padded[-1] * self.item), coordinates, strict=True):
            byte = byte * size + coordinate
        return byte, tuple(int(i) for i in np.unravel_index(byte * 8 // self.bits, self.layout.padded))


def _whole_bytes(bits: int, layout: Layout) -> int:
    if bits % 8:
        raise PlanError(f"the rule '{layout.rule}' cuts through a byte of {layout.full}")
    return bits // 8


def _scaled(run: Run, bits: int, layout: Layout) -> Run:
    return Run(_whole_bytes(run.offset * bits, layout), _whole_bytes(run.length * bits, layout))


def _part(dims: Sequence[Sequence[Run]], full: Sequence[int]) -> _Part:
    pieces = tuple(tuple(_pieces(runs, size)) for runs, size in zip(dims, full, strict=True))
    return _Part(pieces, tuple(sum(run.length for run in runs) for runs in dims))


def _pieces(runs: Iterable[Run], full: int) -> Iterator[_Piece]:
    """Runs, cut at the end of the unpadded dimension."""
    local = 0
    for run in runs:
        inside = max(0, min(run.length, full - run.offset))
        if inside:
            yield _Piece(run.offset, inside, local, False)
        if run.length > inside:
            yield _Piece(run.offset + inside, run.length - inside, local + inside, True)
        local += run.length


def _check_all_owned(view: _View) -> None:
    """No element of the original is held by nobody: on the grid of all cuts, each cell has an owner."""
    cuts = [
        sorted({0, size, *(n for part in view.parts for piece in part.pieces[i] for n in (piece.start, piece.end))})
        for i, size in enumerate(view.padded)
    ]
    owned: Array = np.zeros([len(c) - 1 for c in cuts], bool)
    for part in view.parts:
        owns = [
            np.isin(c[:-1], [n for piece in pieces for n in c if piece.start <= n < piece.end])
            for c, pieces in zip(cuts, part.pieces, strict=True)
        ]
        owned[np.ix_(*owns)] = True
    if not owned.all():
        raise PlanError(f"no rank holds some elements of a tensor with the rule '{view.layout.rule}'")


# ---------------------------------------------------------------------------------------------------- comparing bytes


class _Tensor(NamedTuple):
    """A tensor to compare: where it lies in the original, and on each rank that has it."""

    number: int
    name: str
    view: _View
    original: TensorInfo
    shards: tuple[TensorInfo | None, ...]


@dataclass(frozen=True)
class _Chunk:
    """The indices ``begin`` to ``end`` of the view's axis, at one index of each dimension before it."""

    tensor: _Tensor
    outer: tuple[int, ...]
    begin: int
    end: int


def _compare_bytes(
    original: Source,
    shards: Source,
    plan: Plan,
    comparable: Mapping[str, Sequence[int]],
    progress: Progress,
    workers: int,
    sums: Mapping[Path, PartialSum] = MappingProxyType({}),
) -> ExactReport:
    """What differs; to ``sums`` is added what is read of their files."""
    tensors = _tensors(original, shards, plan, comparable)
    total = sum(info.nbytes for tensor in tensors for info in tensor.shards if info is not None)
    tally = _Tally(total, progress, sums)
    todo = _Shared(_todo(tensors))
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
    if tally.done != total:  # a proof of a part proves nothing
        raise RuntimeError(f"{tally.done} of the {total} bytes of the shards were compared")
    damages = tuple(Damage(t, r, *n) for (_, t, r), n in sorted(tally.damages.items()))
    first = tally.first[1] if tally.first else None
    return ExactReport(str(plan.mesh), plan.mesh.size, len(tensors), tally.done, first, damages)


def _tensors(original: Source, shards: Source, plan: Plan, comparable: Mapping[str, Sequence[int]]) -> list[_Tensor]:
    """The tensors to compare, as they lie in the original."""
    views: dict[tuple[Layout, int], _View] = {}
    view_of: dict[Kind, _View] = {}
    for kind, entry in plan.laid.items():
        key = (entry.layout, DTYPE_BITS[kind.dtype])
        if math.prod(entry.layout.padded) and key not in views:
            views[key] = _View(*key)
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
    """What is compared at a time: a chunk, or several small tensors whole."""
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


class _Shared:
    """An iterator that several threads take from."""

    def __init__(self, items: Iterator[_Chunk | Sequence[_Tensor]]) -> None:
        self._items, self._lock = items, threading.Lock()

    def __iter__(self) -> Iterator[_Chunk | Sequence[_Tensor]]:
        while True:
            with self._lock:
                item = next(self._items, None)
            if item is None:
                return
            yield item


class _Tally:
    """What the threads have found so far."""

    def __init__(self, total: int, progress: Progress, sums: Mapping[Path, PartialSum]) -> None:
        self.total, self.done, self.sums = total, 0, sums
        self.first: tuple[tuple[int, int, int], FirstDifference] | None = None
        self.damages: dict[tuple[int, str, int], list[int]] = {}
        self._progress, self._lock = progress, threading.Lock()

    def compared(self, nbytes: int) -> None:
        """Count bytes that were compared."""
        with self._lock:
            self.done += nbytes
            self._progress(self.done, self.total)

    def summed(self, sums: Mapping[Path, PartialSum]) -> None:
        """Add what one thread has read of files."""
        with self._lock:
            for path, part in sums.items():
                self.sums[path].merge(part)

    def differs(self, tensor: _Tensor, byte: int, nbytes: int, elements: int, first: FirstDifference) -> None:
        """Count what differs in a part of a tensor; ``first`` is the first of it, at this byte of the tensor."""
        with self._lock:
            counts = self.damages.setdefault((tensor.number, tensor.name, first.rank), [0, 0])
            counts[0] += nbytes
            counts[1] += elements
            place = (tensor.number, byte, first.rank)
            if self.first is None or place < self.first[0]:
                self.first = place, first


@dataclass
class _Run:
    """Neighbouring bytes of a file."""

    file: Path
    begin: int
    end: int
    data: Array = field(default_factory=lambda: np.empty(0, np.uint8))


class _Span(NamedTuple):
    """Bytes ``begin`` to ``end`` of a run: a tensor."""

    run: _Run
    begin: int
    end: int

    @property
    def data(self) -> Array:
        """The bytes."""
        return self.run.data[self.begin : self.end]


class _Runs:
    """Tensors that are to be read: those that follow each other in a file are one run."""

    def __init__(self) -> None:
        self.found: list[_Run] = []
        self._last: dict[Path, _Run] = {}

    def add(self, info: TensorInfo) -> _Span:
        """Take in a tensor."""
        run = self._last.get(info.file)
        if run is None or run.end != info.offset:
            run = self._last[info.file] = _Run(info.file, info.offset, info.offset)
            self.found.append(run)
        run.end += info.nbytes
        return _Span(run, info.offset - run.begin, run.end - run.begin)


class _Worker:
    """One thread's buffers and open files."""

    def __init__(self, tally: _Tally, *, sums: bool = True) -> None:
        self._tally, self._summed = tally, tally.sums if sums else {}
        self._buffers: dict[str, Array] = {}
        self._files: dict[Path, Any] = {}
        self._sums: dict[Path, PartialSum] = {}

    def __enter__(self) -> _Worker:
        return self

    def __exit__(self, *_: object) -> None:
        self._close()
        self._tally.summed(self._sums)

    def _close(self) -> None:
        for file in self._files.values():
            file.close()
        self._files.clear()

    def _read(self, use: str, info: TensorInfo, offset: int, nbytes: int) -> Array:
        """Bytes of a tensor from ``offset`` in it, in the buffer for this use."""
        if use not in self._buffers or self._buffers[use].size < nbytes:
            self._buffers[use] = np.empty(max(nbytes, CHUNK), np.uint8)
        buffer = self._buffers[use][:nbytes]
        self._fill(info.file, info.offset + offset, buffer)
        return buffer

    def _fill(self, path: Path, offset: int, buffer: Array) -> None:
        """Read a part of a file, and sum it where that is wanted."""
        try:
            if path not in self._files:
                if len(self._files) >= 64:
                    self._close()
                self._files[path] = path.open("rb", buffering=0)
            file = self._files[path]
            file.seek(offset)
            view, done = buffer.data, 0
            while done < buffer.size:
                count = file.readinto(view[done:])
                if not count:
                    raise CheckpointError(f"{path} became shorter while it was read")
                done += count
        except OSError as error:
            raise CheckpointError(f"{path}: cannot be read: {error.strerror or error}") from error
        if path in self._summed:
            if path not in self._sums:
                self._sums[path] = PartialSum(self._summed[path].size)
            self._sums[path].add(offset, buffer.size, sum_part(buffer, offset))

    def compare_small(self, tensors: Sequence[_Tensor]) -> None:
        """Compare tensors whole, of which what follows each other in a file is read at once.

        A tensor that differs is compared again, chunk by chunk, to say where.
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
                np.array_equal(expected.take(places), found.data.view(expected.dtype))
                for places, found in ((tensor.view.places[rank], span) for rank, span in shards)
            )
            if same:
                done += sum(found.end - found.begin for _, found in shards)
                continue
            with _Worker(self._tally, sums=False) as again:
                for chunk in _chunks(tensor):
                    again.compare(chunk)
        self._tally.compared(done)

    def compare(self, chunk: _Chunk) -> None:
        """Compare a chunk of the original with what each rank holds of it."""
        view, info = chunk.tensor.view, chunk.tensor.original
        axis, row = view.axis, view.item * math.prod(view.full[view.axis + 1 :])
        end = min(chunk.end, view.full[axis])
        original: Array | None = None
        if end > chunk.begin and all(i < n for i, n in zip(chunk.outer, view.full, strict=False)):
            begin = _flat_index(chunk.outer, view.full) * view.full[axis] + chunk.begin
            original = self._read("original", info, begin * row, (end - chunk.begin) * row)
        done = 0
        for rank, part in enumerate(view.parts):
            shard = chunk.tensor.shards[rank]
            outer = [_local(pieces, i) for pieces, i in zip(part.pieces, chunk.outer, strict=False)]
            if shard is None or None in outer:
                continue
            base = _flat_index([i for i in outer if i is not None], part.shape) * part.shape[axis]
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
        """Compare rows of the chunk with those of a rank, piece by piece of the dimensions after the axis.

        ``rows`` are the first one's index in the tensor's axis and, counted over all outer dimensions, in the rank's.
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
        pieces: Sequence[_Piece],
        left: Array | None,
        right: Array,
    ) -> None:
        """Count what differs between a piece of the original (None: zeros) and of a rank, and find the first of it."""
        tensor, view = chunk.tensor, chunk.tensor.view
        theirs = np.ascontiguousarray(right).view(np.uint8)
        ours = np.zeros_like(theirs) if left is None else np.ascontiguousarray(left).view(np.uint8)
        shape = (*theirs.shape[:-1], theirs.shape[-1] // view.element, view.element)
        theirs, ours = theirs.reshape(shape), ours.reshape(shape)
        differing = theirs != ours
        elements = differing.any(-1)
        first = tuple(int(i) for i in np.unravel_index(int(elements.argmax()), elements.shape))
        # where it is in the tensor, in the rank's part, and in the original; the last coordinate counts bytes
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


def _local(pieces: Sequence[_Piece], index: int) -> int | None:
    """The rank's own index of an index of the full tensor, if it holds it."""
    return next((p.local + index - p.start for p in pieces if p.start <= index < p.end), None)


def _flat_index(indices: Sequence[int], sizes: Sequence[int]) -> int:
    """The number of an index in row-major order, over the first dimensions."""
    flat = 0
    for index, size in zip(indices, sizes, strict=False):
        flat = flat * size + index
    return flat


def _fold(leading: int, sizes: Sequence[int], coordinates: Sequence[int], item: int) -> int:
    """The byte of coordinates whose last one counts bytes, after ``leading`` indices of the dimensions before."""
    return _flat_index([leading, *coordinates], [1, *sizes[:-1], sizes[-1] * item])
