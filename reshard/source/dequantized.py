"""A quantized checkpoint that reads like a remote dequantized one: the bytes of its files are computed when they are
read.

Such a file (``DequantizedFile``) is read by ranges like one on the Hub, so the engine does not see a difference. The
store has such files, a ``config.json`` without the settings of quantization, and an index without the scales.
"""

from __future__ import annotations

import dataclasses
import json
import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property, lru_cache, partial
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
from numpy.typing import NDArray

from formats.documents import json_bytes
from formats.errors import CheckpointError, NotationError, PlanError
from formats.files.checkpoint import MODELOPT, Checkpoint, WeightFile, open_checkpoint
from formats.files.checksum import Stamp, check_unchanged, stamps_in, stamps_of, was_changed
from formats.files.safetensors import DTYPE_BITS, TensorInfo, build_header, tensor_bytes
from formats.files.sharded import is_sharded
from formats.notation.architecture import Architecture
from formats.notation.architecture_files import find_architecture, load_architecture
from formats.notation.axes import Shape
from formats.quantization.dequantizing import DTYPE, Grid, Scaled, Stored, dequantize, scaled_weights, scales_from
from formats.quantization.settings import without_quantization
from formats.store import FilePath, StoredPath, local_path, location_of, name_in, open_file, unreadable
from reshard.model.sizes import AxisSizes
from reshard.store.computed import ComputedFile
from reshard.store.range_store import Content, RangeStore, remote_of
from reshard.store.remote import Read, Remote

_KEPT = 64 << 20
"""So many bytes of scales, of all files together, are kept for the next ranges of their weights."""

_OPEN = 64
"""So many files of this machine are open at a time."""

_VERSION = 2
"""The version of the arithmetic: files that were computed with another version count as changed."""


@dataclasses.dataclass(frozen=True)
class LocalFile(Remote):
    """A file on this machine, in the state in which it was found."""

    path: Path
    root: Path
    size: int
    mtime_ns: int
    inode: int
    content: str | None

    @property
    def identity(self) -> str:
        """A text that identifies its content, or else its size and time: equal for copies on several machines."""
        return self.content or f"{self.size}:{self.mtime_ns}"

    @property
    def made_of(self) -> str | None:
        """The inode, if nothing identifies the content."""
        return None if self.content else str(self.inode)

    @property
    def address(self) -> str:
        """The path."""
        return str(self.path)

    @property
    def paths(self) -> tuple[Path, ...]:
        """The folder of the checkpoint, and the file."""
        return self.root, self.path

    def over_network(self, nbytes: int) -> int:
        """Nothing is fetched."""
        return 0

    def check_unchanged(self) -> None:
        """Raise MismatchError if the file has changed since it was found."""
        try:
            found = self.path.stat()
        except OSError as error:
            raise unreadable(self.path, error) from error
        if (found.st_size, found.st_mtime_ns, found.st_ino) != (self.size, self.mtime_ns, self.inode):
            raise was_changed(self.path)

    def open(self) -> Read:
        """Open the file; it may be closed and opened again between two reads."""
        self.check_unchanged()

        def read(start: int, stop: int) -> memoryview:
            file = _opened(self)  # it stays open until this read is done
            try:
                found = os.pread(file.fileno(), stop - start, start)
            except OSError as error:
                raise unreadable(self.path, error) from error
            if len(found) != stop - start:
                raise CheckpointError(f"{self.path} ended at byte {start + len(found)} while it was read")
            return memoryview(found)

        return read


@lru_cache(maxsize=_OPEN)
def _opened(file: LocalFile) -> BinaryIO:
    """The one table of open files, of all readers. Raises CheckpointError, and MismatchError for another content."""
    file.check_unchanged()
    return open_file(file.path)


class Scales(NamedTuple):
    """The scales of a weight: the number of their file, their offset in it, their dtype, and where they apply."""

    file: int
    begin: int
    end: int
    dtype: str
    grid: Grid


class Piece(NamedTuple):
    """A tensor of a dequantized file, up to byte ``end`` there; ``source`` is the quantized tensor's first byte."""

    begin: int
    end: int
    source: int
    scales: Scales | None


@dataclasses.dataclass(frozen=True, eq=False)
class DequantizedFile(ComputedFile):
    """A weight file that is computed from file number ``number`` of ``files``, and from scales in any of them."""

    header: bytes
    pieces: tuple[Piece, ...]
    files: tuple[Remote, ...]
    number: int
    size: int

    @cached_property
    def used(self) -> tuple[Remote, ...]:
        """The files that it is made of."""
        scales = {piece.scales.file for piece in self.pieces if piece.scales} - {self.number}
        return tuple(self.files[number] for number in (self.number, *sorted(scales)))

    @cached_property
    def identity(self) -> str:
        """A digest of the identities of the files that it is made of, of its header, and of which bytes each tensor is
        made of.
        """
        return f"dequantized:{self.digest_of([_VERSION, self.pieces])}"

    def over_network(self, nbytes: int) -> int:
        """About half, if the quantized file is remote: it has one byte for an element that has two here."""
        return self.files[self.number].over_network(nbytes // 2)

    def open(self) -> Read:
        """Open the files that it is made of, each when it is needed."""
        return self.read_with(scales_from, dequantize)

    def read_with(
        self, read_scales: Callable[[memoryview, str, Grid], NDArray[Any]],
        compute: Callable[[NDArray[np.uint8], int, Grid, NDArray[Any]], NDArray[np.uint16]],
    ) -> Read:  # fmt: skip
        """The same file with another function in place of ``dequantize``: verify has its own."""
        file = self.opened()

        def scales_of(of: Scales) -> NDArray[Any]:
            key = read_scales, self.files[of.file], of
            return _SCALES.get(key, lambda: read_scales(file(of.file)(of.begin, of.end), of.dtype, of.grid))

        def content(piece: Piece, begin: int, end: int) -> memoryview:
            if piece.scales is None:
                return file(self.number)(piece.source + begin, piece.source + end)
            first, last = begin // 2, -(-end // 2)  # a range may begin or end within an element
            codes = np.frombuffer(file(self.number)(piece.source + first, piece.source + last), np.uint8)
            numbers = compute(codes, first, piece.scales.grid, scales_of(piece.scales))
            return numbers.astype("<u2", copy=False).view(np.uint8).data[begin - 2 * first :][: end - begin]

        return self.read_pieces(self.pieces, content)


class Kept:
    """Arrays by their keys, those used last: at most ``limit`` bytes, or one."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._lock = threading.Lock()
        self._arrays: OrderedDict[object, NDArray[Any]] = OrderedDict()
        self.nbytes = 0

    def get(self, key: object, make: Callable[[], NDArray[Any]]) -> NDArray[Any]:
        """The array of this key, made unless it is kept."""
        with self._lock:
            if key in self._arrays:
                self._arrays.move_to_end(key)
                return self._arrays[key]
        made = make()
        with self._lock:
            if key not in self._arrays:  # another thread may have made the same
                self._arrays[key] = made
                self.nbytes += made.nbytes
            while len(self._arrays) > 1 and self.nbytes > self.limit:
                self.nbytes -= self._arrays.popitem(last=False)[1].nbytes
        return made


_SCALES = Kept(_KEPT)


def dequantized(path: FilePath, plan_file: Path | None = None) -> RangeStore:
    """A checkpoint as if its weights were in bfloat16: a store around it.

    Raises CheckpointError if it is not a full checkpoint in safetensors, or not quantized; PlanError for a tensor that
    cannot be dequantized; MismatchError if a file changes meanwhile.
    """
    if is_sharded(path):
        raise CheckpointError(f"{path} is split: only a full checkpoint is dequantized", "merge it first")
    known = stamps_in(path)
    checkpoint = open_checkpoint(path)
    if any(file.header is None for file in checkpoint.files):
        raise CheckpointError(f"{path}: only safetensors are dequantized")
    read = [*(file.path for file in checkpoint.files), *_sides(checkpoint)]
    stamps = stamps_of(read, path, known)
    kinds = {name: Stored(info.dtype, info.shape) for name, info in checkpoint.tensors.items()}
    rules = load_architecture(plan_file) if plan_file else find_architecture(checkpoint.config, path)
    sizes = AxisSizes(rules, checkpoint.config, {})
    scaled, gone = scaled_weights(checkpoint.config, kinds, partial(_input_first, rules, sizes))
    if not scaled:
        raise CheckpointError(f"{path} has no weights of 8-bit floats", "leave --dequantize out")
    _refuse_float16(checkpoint, sizes.settings, scaled, gone)
    files = [remote_of(file.path) or local_file(file.path, path, stamps[file.path]) for file in checkpoint.files]
    made = dict(_files(checkpoint, scaled, gone, files))
    contents: dict[str, Content] = {**made, **dict(_side_files(checkpoint, made))}
    check_unchanged(stamps)
    commit = path.store.commit if isinstance(path, StoredPath) else None
    location = location_of(path)
    store = RangeStore(f"{location} (dequantized)", contents, location=location, commit=commit)
    store.keep({name: {0: file.header} for name, file in made.items()})
    return store


def _sides(checkpoint: Checkpoint) -> list[FilePath]:
    """The files beside those of weights: config.json, the index, and others."""
    return [*checkpoint.side_files, *([checkpoint.path / checkpoint.index_name] if checkpoint.index_name else [])]


def local_file(path: FilePath, root: FilePath, stamp: Stamp) -> LocalFile:
    """A file of a folder on this machine, in the state that its stamp says."""
    here, folder = local_path(path), local_path(root)
    assert here is not None and folder is not None
    return LocalFile(here, folder, stamp.size, stamp.mtime_ns, stamp.inode, stamp.content)


def _input_first(architecture: Architecture, sizes: AxisSizes, weight: str, shape: tuple[int, ...]) -> set[bool]:
    """Whether the rule of a weight has its input first; both, if none of its layouts is told by the shape."""
    match = architecture.match(weight)
    rule = sizes.holds(match) if match else None
    if match is None or rule is None:
        return {False, True}
    found = sizes.of(match.indices)
    return {layout.arrow is not None for layout in rule.shapes if _may_be(layout, found, shape)}


def _may_be(layout: Shape, sizes: Mapping[str, int], shape: tuple[int, ...]) -> bool:
    try:
        return layout.sizes(sizes) == shape
    except NotationError:  # a size that is measured
        return True


def _refuse_float16(
    checkpoint: Checkpoint, settings: Mapping[str, Any], scaled: Mapping[str, Scaled], gone: set[str]
) -> None:
    """Raise PlanError for a model in float16: its weights would be in bfloat16 beside float16."""
    others = (info for info in checkpoint.tensors.values() if info.name not in scaled and info.name not in gone)
    found = next((f"tensor '{info.name}' is F16" for info in others if info.dtype == "F16"), None)
    if found is None and "float16" in {settings.get("dtype"), settings.get("torch_dtype")}:
        found = "config.json says float16"
    if found is not None:
        raise PlanError(
            f"{found}, but dequantized weights would be {DTYPE}: not one dtype",
            f"--dequantize is for models of which the other weights are {DTYPE} or F32",
        )


def _files(
    checkpoint: Checkpoint, scaled: Mapping[str, Scaled], gone: set[str], files: Sequence[Remote]
) -> Iterator[tuple[str, DequantizedFile]]:
    """The dequantized files, by the names of those that they are made of; a file of nothing but scales is none."""
    numbers = {file.path: number for number, file in enumerate(checkpoint.files)}
    held: dict[FilePath, list[TensorInfo]] = {file.path: [] for file in checkpoint.files}
    for info in checkpoint.tensors.values():
        if info.name not in gone:
            held[info.file].append(info)
    for file in checkpoint.files:
        if held[file.path]:
            scales = {
                info.name: _scales(checkpoint, scaled[info.name], numbers)
                for info in held[file.path]
                if info.name in scaled
            }
            yield file.name, _file(file, held[file.path], scales, files, numbers[file.path])


def _scales(checkpoint: Checkpoint, of: Scaled, numbers: Mapping[FilePath, int]) -> Scales:
    info = checkpoint.tensors[of.scale]
    return Scales(numbers[info.file], info.offset, info.offset + info.nbytes, info.dtype, of.grid)


def _file(
    file: WeightFile, tensors: Sequence[TensorInfo], scales: Mapping[str, Scales], files: Sequence[Remote], number: int
) -> DequantizedFile:
    """A dequantized file: its tensors by descending size of an element, as they are to be aligned."""
    kinds = [(DTYPE if info.name in scales else info.dtype, info) for info in tensors]
    kinds.sort(key=lambda kind: -DTYPE_BITS[kind[0]])
    header = build_header([(info.name, dtype, info.shape) for dtype, info in kinds], file.metadata)
    pieces, begin = list[Piece](), len(header)
    for dtype, info in kinds:
        end = begin + tensor_bytes(info.name, dtype, info.shape)
        if end > begin:
            pieces.append(Piece(begin, end, info.offset, scales.get(info.name)))
        begin = end
    return DequantizedFile(header, tuple(pieces), tuple(files), number, begin)


def _side_files(checkpoint: Checkpoint, made: Mapping[str, DequantizedFile]) -> Iterator[tuple[str, FilePath | bytes]]:
    """The files beside the weights, with another config.json and index."""
    for path in checkpoint.side_files:
        if path.name != MODELOPT:
            yield name_in(path, checkpoint.path), path
    yield "config.json", json_bytes(without_quantization(checkpoint.config)) + b"\n"
    if checkpoint.index_name is not None:
        yield checkpoint.index_name, _index(checkpoint, made)


def _index(checkpoint: Checkpoint, made: Mapping[str, DequantizedFile]) -> bytes:
    """The index without what is gone."""
    there = {name for file in made.values() for name in json.loads(file.header[8:]) if name != "__metadata__"}
    document: dict[str, Any] = json.loads(checkpoint.index or b"{}")
    weight_map = {name: file for name, file in document["weight_map"].items() if name in there}
    total = sum(file.size - len(file.header) for file in made.values())
    return json_bytes({"metadata": {"total_size": total}, "weight_map": weight_map}) + b"\n"
