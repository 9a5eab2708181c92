"""A source as named tensors of the full checkpoint, whatever form it has, and a checkpoint of computed tensors.

A transform (``dequantize``, ``patch``, ``add_adapter``, ``convert``) takes the tensors of a source and gives others:
each a ``Content``, which computes a range of bytes from ranges of other tensors when it is read. ``changed`` is a
store of files that have them, ``derived`` the source that it is, so that transforms chain.
"""

from __future__ import annotations

import hashlib
import json
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import cached_property, lru_cache, partial
from itertools import accumulate
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from reshard.formats.documents import json_bytes
from reshard.formats.files.checksum import Stamp, check_unchanged
from reshard.formats.files.layout import Layout
from reshard.formats.files.safetensors import (
    DTYPE_BITS,
    SourceFileRecord,
    TensorInfo,
    build_header,
    parse_header,
    tensor_bytes,
)
from reshard.formats.notation.format_file import HUGGING_FACE
from reshard.formats.numbers import sums
from reshard.formats.quantization.fp8 import Error, Grid, codes_of, dequantize, scales_from, scales_of
from reshard.formats.quantization.methods import quantization_settings
from reshard.formats.store import FilePath, StoredPath, content_of, local_path, opened, read_into
from reshard.move.changes import Change
from reshard.move.engine import fill
from reshard.move.jobs import FilePlan, Job, TargetPlace
from reshard.move.moves import jobs_of
from reshard.move.slabs import Region, Route, Slab
from reshard.placement.arrangement import arrangement_of
from reshard.source.folder import Folder
from reshard.source.opening import open_folder
from reshard.source.recognition import recognise
from reshard.source.source import Source, SourceFile
from reshard.store import range_store
from reshard.store.remote import Remote
from reshard.store.threads import ArrayCache
from reshard.writing.documents import documents_of
from reshard.writing.output import Output

_VERSION = 4
"""The version of all arithmetic: files that were computed with another version count as changed."""
_KEPT = 8 << 20
"""Bytes that are allocated and freed at the start: after that, the C library of Linux keeps twice as many for the next
arrays, where it would give each back, and the system would clear its pages again.
"""
_STEP = 1 << 20
"""Bytes of a tensor of a split source that are put together at a time."""

Buffer = bytes | memoryview


@dataclass(frozen=True)
class LocalFile(Remote):
    """A file on this machine, in the state that its stamp says, of the checkpoint in ``root``."""

    path: Path
    root: Path
    stamp: Stamp
    size: int

    @property
    def identity(self) -> str:
        """A text that identifies its content, or else its size and time: equal for copies on several machines."""
        return self.stamp.content or f"{self.size}:{self.stamp.mtime_ns}"

    @property
    def made_of(self) -> str | None:
        """The inode, if nothing identifies the content."""
        return None if self.stamp.content else str(self.stamp.inode)

    @property
    def address(self) -> str:
        """The path."""
        return str(self.path)

    @property
    def paths(self) -> tuple[Path, ...]:
        """The folder of the checkpoint, and the file."""
        return self.root, self.path

    def check_unchanged(self) -> None:
        """Raise MismatchError if the file has changed since it was found."""
        check_unchanged({self.path: self.stamp})

    def read(self, start: int, stop: int) -> memoryview:
        """Bytes of the file, which may be closed and opened again between two reads."""
        view = np.empty(stop - start, np.uint8).data
        self.fill(start, view)
        return view

    def fill(self, start: int, view: memoryview) -> None:
        """Read bytes from ``start`` on into a buffer. Raises CheckpointError, MismatchError."""
        file = opened(self)  # it stays open until this read is done
        read_into(self.path, file.fileno(), start, view)


def file_of(path: FilePath, root: FilePath, stamp: Stamp) -> Remote:
    """A file of a checkpoint, wherever it lies; of one on this machine, in the state that its stamp says."""
    local, folder = local_path(path), local_path(root)
    if remote := range_store.remote_of(path):
        return remote
    assert local is not None and folder is not None
    return LocalFile(local, folder, stamp, stamp.size)


# -------------------------------------------------------------------------------------------------- contents of tensors


@dataclass(frozen=True)
class Arithmetic:
    """The functions that compute weights. verify has its own."""

    scales: Callable[[memoryview, str, Grid], NDArray[Any]] = scales_from
    """Dequantizes, with ``numbers``."""
    numbers: Callable[[NDArray[np.uint8], int, Grid, NDArray[Any]], NDArray[np.uint16]] = dequantize
    block_scales: Callable[[memoryview, str, int], NDArray[np.float32]] = scales_of
    """Quantizes, with ``codes``."""
    codes: Callable[[memoryview, str, int, NDArray[np.float32]], tuple[NDArray[np.uint8], Error]] = codes_of
    sums: Callable[[NDArray[Any], str, NDArray[np.float64], NDArray[np.float64]], NDArray[Any]] = sums
    """Adds an adapter."""

    def read(self, file: Remote, begin: int, end: int) -> memoryview:
        """Bytes of a file, which may be computed. Raises CheckpointError, MismatchError."""
        return file.read(begin, end, self) if isinstance(file, ComputedFile) else file.read(begin, end)

    def fill(self, data: NDArray[np.uint8], file: Remote, offset: int) -> None:
        """Fill ``data`` from ``offset`` of a file, from any thread. Raises CheckpointError."""
        if isinstance(file, LocalFile):
            file.fill(offset, data.data)
        elif data.size:
            data[:] = np.frombuffer(self.read(file, offset, offset + data.size), np.uint8)  # without Python's lock


ARITHMETIC = Arithmetic()


@dataclass(frozen=True, eq=False)
class Content:
    """The origin of a tensor's bytes."""

    read: Callable[[Arithmetic, int, int], Buffer]
    """Returns the bytes from one offset to another; raises ReshardError."""
    files: Sequence[Remote]
    """The files that are read; the tensor stands in the place of the first."""
    plain: object
    """Everything else that the bytes follow from, as JSON."""


def part(file: Remote, offset: int) -> Content:
    """Bytes of a file from ``offset`` on, as they are."""
    place = file.identity, offset
    return Content(lambda by, begin, end: by.read(file, offset + begin, offset + end), (file,), place)


Compute = Callable[[Arithmetic, int, int], NDArray[Any]]


def computed(compute: Compute, inputs: Sequence[Content], what: object, unit: int = 1) -> Content:
    """Return a content whose elements ``compute`` makes, from one number to another, out of ``inputs`` and ``what``, on
    which alone they depend. It stands in place of the first input.

    ``unit`` are the bytes of an element: a range that begins or ends within one is cut out of whole ones.
    """

    def read(arithmetic: Arithmetic, begin: int, end: int) -> Buffer:
        first = begin // unit
        elements = compute(arithmetic, first, -(-end // unit))
        return elements.reshape(-1).view(np.uint8).data[begin - first * unit :][: end - begin]

    files = (*dict.fromkeys(file for content in inputs for file in content.files),)
    return Content(read, files, (compute.__qualname__, [content.plain for content in inputs], what))


Filling = Callable[[NDArray[np.uint8], SourceFile, int], None]
"""Fills an array from an offset of a file."""


def gathered(name: str, jobs: Sequence[Job], files: Mapping[FilePath, Remote]) -> Content:
    """A tensor of a source in another form: ``jobs`` bring its parts, as a merge would, and compare replicas."""

    def read(arithmetic: Arithmetic, begin: int, end: int) -> Buffer:
        def fill_from(data: NDArray[np.uint8], file: SourceFile, offset: int) -> None:
            arithmetic.fill(data, files[file.path], offset)

        buffer, count = np.empty(end - begin, np.uint8), 0
        for number, job in enumerate(jobs):
            base, steps = job.target(0).offset, _steps_of(job.route)
            for low, high, slab in steps[bisect_right(steps, begin - base, key=lambda step: step[1]) :]:
                if low + base >= end:
                    break
                if slab.is_flat and not slab.checks:
                    count += _stream(job, slab, fill_from, buffer, begin - base)
                else:
                    block = _BLOCKS.get((read, number, high), partial(_block, job, slab, fill_from))
                    count += _take(slab, block, buffer, begin - base)
        if count != buffer.size:  # what no part has must not pass
            raise RuntimeError(f"{count} of {buffer.size} bytes of tensor '{name}' were put together")
        return buffer.data

    return Content(read, (*files.values(),), name)


_BLOCKS = ArrayCache(8 << 20)
"""The blocks that were put together last: the next range may begin within one."""


@lru_cache(maxsize=64)
def _steps_of(route: Route) -> Sequence[tuple[int, int, Slab]]:
    """The steps of a way in the order of the tensor, and between which bytes each writes, from a part's first on."""
    steps = []
    for slab in route.slabs(_STEP):
        at = [at for region in slab.writes for edge in (0, region.nbytes - 1) for at, _, _ in region.ranges(edge, 1)]
        if at:
            steps.append((min(at), max(at) + 1, slab))
    return sorted(steps, key=lambda step: step[1])


def _block(job: Job, slab: Slab, read: Filling) -> NDArray[np.uint8]:
    """All that a slab writes, one region after the other."""
    buffer = np.empty(sum(region.nbytes for region in slab.writes), np.uint8)
    ends = [*accumulate(region.nbytes for region in slab.writes)]
    parts = zip(slab.writes, np.split(buffer, ends[:-1]), strict=True)
    fill(job, slab, read, [part.reshape(region.shape) for region, part in parts])
    return buffer


def _take(slab: Slab, block: NDArray[np.uint8], buffer: NDArray[np.uint8], first: int) -> int:
    """Put what a slab writes of the bytes from ``first`` on into ``buffer``. Returns their number."""
    nbytes = at = 0
    for region in slab.writes:
        for into, skip in _within(region, 0, region.nbytes, buffer, first):
            into[:] = block[at + skip : at + skip + into.size]
            nbytes += into.size
        at += region.nbytes
    return nbytes


def _stream(job: Job, slab: Slab, read: Filling, buffer: NDArray[np.uint8], first: int) -> int:
    """Read what a flat slab writes of the bytes from ``first`` on into ``buffer``. Returns their number."""
    nbytes = 0
    for copy in slab.copies:
        written = copy.target_slices[0]
        for into, skip in _within(slab.writes[copy.target], written.start, written.stop, buffer, first):
            nbytes += into.size
            if copy.source is None:
                into[:] = 0
                continue
            region, begin = slab.reads[copy.source], copy.source_slices[0].start + skip
            place = job.source(region.rank)
            for offset, position, count in region.ranges(begin, into.size):
                read(into[position : position + count], place.file, place.offset + offset)
    return nbytes


def _within(
    region: Region, begin: int, end: int, into: NDArray[np.uint8], first: int
) -> Iterator[tuple[NDArray[np.uint8], int]]:
    """The parts of ``into`` that bytes ``begin`` to ``end`` of a region go to, and where these begin in the region."""
    for at, skip, length in region.ranges(begin, end - begin):
        low, high = max(at, first), min(at + length, first + into.size)
        if low < high:
            yield into[low - first : high - first], skip + low - at


# --------------------------------------------------------------------------------------------------------- checkpoints


class Tensor(NamedTuple):
    """A tensor of a full checkpoint."""

    dtype: str
    shape: tuple[int, ...]
    content: Content


def tensors_of(source: Source) -> dict[str, Tensor]:
    """The tensors of the full checkpoint by name, also by second names. Raises PlanError if one cannot be put together.

    A tied tensor that is there twice is compared as it is read.
    """
    if source.cast is not None:
        before = tensors_of(source.cast.source)
        tensors = {name: rounded(name, before[name], kind.dtype) for name, kind, _ in source.model.tensors}
        return tensors | {second: tensors[first] for second, first in source.aliases.items()}
    files = {path: file_of(path, source.path, source.stamps[path]) for path in source.files}
    tensors, others = dict[str, Tensor](), {tensor.name: tensor for tensor in source.model.tensors}
    if source.format is HUGGING_FACE:
        infos: Iterable[TensorInfo] = (source.ranks[0][name] for name in source.names)
        tensors = {info.name: Tensor(info.dtype, info.shape, part(files[info.file], info.offset)) for info in infos}
        others = {name: others[name] for name in source.twice.values()}
    jobs, nowhere = defaultdict[str, list[Job]](list), TargetPlace(FilePlan("", 0, Layout(0)), 0)
    if others:
        target = arrangement_of(source.whole, HUGGING_FACE)
        for job in jobs_of(source, target, {0: dict.fromkeys(others, nowhere)}):
            jobs[job.name].append(job)
    for name, tensor in others.items():
        tensors[name] = Tensor(tensor.dtype, tensor.shape, gathered(name, jobs[name], files))
    return tensors | {second: tensors[first] for second, first in source.aliases.items()}


def is_quantized(source: Source) -> bool:
    """Whether config.json has quantization settings, or some tensor is the companion of a quantized weight."""
    dtypes, scheme = {tensor.name: tensor.dtype for tensor in source.model.tensors}, source.model.sizes.scheme
    settings = quantization_settings(source.model.config)
    return bool(settings) or any(scheme.companion(*entry, dtypes) for entry in dtypes.items())


def rounded(name: str, tensor: Tensor, dtype: str) -> Tensor:
    """A tensor that is cast."""
    if tensor.dtype == dtype:
        return tensor
    content, change = tensor.content, Change(name, tensor.dtype, dtype, None, dtype)

    def compute(arithmetic: Arithmetic, first: int, last: int) -> NDArray[Any]:
        raw = np.frombuffer(content.read(arithmetic, first * change.before, last * change.before), np.uint8)
        return change.elements()(raw.reshape(-1, change.before))

    return Tensor(dtype, tensor.shape, computed(compute, (content,), change, change.after))


def whole_of(source: Source) -> tuple[list[SourceFileRecord], Mapping[str, bytes]]:
    """The weight files of the full checkpoint that a source is, or that a merge of it writes, and the index of them."""
    checkpoint = source.checkpoint
    if checkpoint is not None and checkpoint.records and not checkpoint.renamed and not source.format.modules:
        index = content_of(checkpoint.index)
        return [*checkpoint.records], {str(checkpoint.index_name): index} if index is not None else {}
    merged = Output(source, source.whole, HUGGING_FACE, names=None)
    return [
        SourceFileRecord(file.name, file.layout.size, None, file.layout.header) for file in merged.files
    ], documents_of(merged).general


def changed(
    source: Source,
    title: str,
    tensors: Mapping[str, Tensor],
    sides: Mapping[str, FilePath | bytes] | None = None,
    beside: Mapping[str, str] = MappingProxyType({}),
) -> StoredPath:
    """Return a store: the source with these tensors in place of those of the same names, and with these side files, if
    given.

    A file whose tensors have the dtypes that they had is laid out as it was, in others the largest elements come first;
    a file of none of them is none. ``beside`` has new tensors by the names of those whose file they are in. Raises
    MismatchError if a file of the source was changed meanwhile.
    """
    (whole, index), files = whole_of(source), list[SourceFileRecord]()
    for file in whole:
        before = parse_header(file.header, Path(file.name), None)
        names = [name for old in before.tensors for name in (old, beside.get(old)) if name in tensors]
        kinds = [(name, tensors[name].dtype, tensors[name].shape) for name in names if name is not None]
        record = file
        if kinds != [(info.name, info.dtype, info.shape) for info in before.tensors.values()]:
            kinds.sort(key=lambda kind: -DTYPE_BITS[kind[1]])
            header = build_header(kinds, before.metadata)
            record = SourceFileRecord(file.name, len(header) + sum(tensor_bytes(*kind) for kind in kinds), None, header)
        if kinds:
            files.append(record)
    documents = dict(index)
    if [file.header for file in files] != [file.header for file in whole]:
        there = {name for file in files for name in file.tensors}
        total = sum(file.size - len(file.header) for file in files)
        for name, content in index.items():
            weight_map: dict[str, str] = json.loads(content)["weight_map"]
            kept = {name: file for old, file in weight_map.items() for name in (old, beside.get(old)) if name in there}
            documents[name] = json_bytes({"metadata": {"total_size": total}, "weight_map": kept}) + b"\n"
    contents = {name: tensor.content for name, tensor in tensors.items()}
    return store_of(source, title, files, contents, {**(source.side_files if sides is None else sides), **documents})


class ComputedBytes(NamedTuple):
    """Bytes ``begin`` to ``end`` of a computed file."""

    begin: int
    end: int
    content: Content


@dataclass(frozen=True, eq=False)
class ComputedFile(Remote):
    """A weight file that is on no disk: its header, and tensors that are computed when they are read."""

    name: str
    header: bytes
    pieces: tuple[ComputedBytes, ...]
    size: int

    @cached_property
    def files(self) -> Sequence[Remote]:
        """The files that it is made of, that in whose place it stands first."""
        return (*dict.fromkeys(file for piece in self.pieces for file in piece.content.files),)

    @property
    def address(self) -> str:
        """The address of the file in whose place it stands."""
        return self.files[0].address if self.files else self.name

    @property
    def paths(self) -> tuple[Path, ...]:
        """The paths of all files that it is made of."""
        return tuple(dict.fromkeys(path for file in self.files for path in file.paths))

    def over_network(self, nbytes: int) -> int:
        """The same share of the file in whose place it stands."""
        return max((file.over_network(nbytes * file.size // self.size) for file in self.files), default=0)

    @cached_property
    def identity(self) -> str:
        """A digest of the identities of its source files, of its header, and of the origin of each tensor."""
        pieces = [[*piece[:2], piece.content.plain] for piece in self.pieces]
        digest = hashlib.sha256(self.header)
        digest.update(json.dumps([_VERSION, [file.identity for file in self.files], pieces], default=_plain).encode())
        return f"computed:{digest.hexdigest()[:32]}"

    @property
    def made_of(self) -> str | None:
        """A digest of the inodes."""
        digests = [file.made_of for file in self.files]
        return hashlib.sha256(json.dumps(digests).encode()).hexdigest()[:32] if any(digests) else None

    def check_unchanged(self) -> None:
        """Raise MismatchError if a file that it is made of has changed."""
        for file in self.files:
            file.check_unchanged()

    def read(self, start: int, stop: int, arithmetic: Arithmetic = ARITHMETIC) -> memoryview:
        """Bytes of it, which are computed now."""
        parts: list[Buffer] = [self.header[start:stop]] if start < len(self.header) else []
        for begin, end, content in self.pieces[bisect_right(self.pieces, start, key=lambda piece: piece.end) :]:
            if begin >= stop:
                break
            parts.append(content.read(arithmetic, max(start, begin) - begin, min(stop, end) - begin))
        if len(parts) == 1:  # most often
            return memoryview(parts[0])
        arrays = (np.frombuffer(part, np.uint8) for part in parts)
        return np.concatenate([np.empty(0, np.uint8), *arrays]).data  # without Python's lock


def _plain(value: Any) -> object:
    """A content, a range, or a dataclass as JSON; a path says nothing of a content."""
    if isinstance(value, Content):
        return value.plain
    if isinstance(value, range):
        return value.start, value.stop, value.step
    return [getattr(value, each.name) for each in fields(value)] if is_dataclass(value) else None


def store_of(
    source: Source, title: str, files: Sequence[SourceFileRecord], contents: Mapping[str, Content],
    documents: Mapping[str, FilePath | bytes],
) -> StoredPath:  # fmt: skip
    """A store of computed weight files with these contents of their tensors, and the files beside them.

    Raises MismatchError if a file of the source was changed meanwhile.
    """
    np.empty(_KEPT, np.uint8)
    named = dict[str, range_store.FileContent](documents)
    for file in files:
        infos = (info for info in file.tensors.values() if info.nbytes)
        pieces = (ComputedBytes(info.offset, info.offset + info.nbytes, contents[info.name]) for info in infos)
        named[file.name] = ComputedFile(file.name, file.header, tuple(pieces), file.size)
    source.check_unchanged()
    return StoredPath(range_store.RangeStore(title, named, location=source.location, commit=source.commit))


def derived(source: Source, store: StoredPath, *, own_rules: bool = True, is_part: bool = False) -> Source:
    """The source that a store of tensors computed from another one is, with all that is known of the other.

    Without ``own_rules`` its rules are those of its model type. It may be a part of a model (``is_part``).
    """
    rules = source.model.architecture if own_rules else None
    opened = open_folder(recognise(Folder(store, rules=rules)), is_part=is_part)
    return replace(
        opened, left_behind=source.left_behind, strays=source.strays, note=source.note, given_dtype=source.given_dtype,
        was_adapted=source.was_adapted, was_split=source.is_split, was_named=source.names_of,
    )  # fmt: skip


def merged(source: Source) -> Source:
    """The full checkpoint that a merge of a split source would write, put together as it is read."""
    store = changed(source, source.display_name, tensors_of(source))
    return replace(derived(source, store), manifest=source.manifest)
