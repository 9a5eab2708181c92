"""PyTorch's distributed checkpoints: a folder with ``.metadata`` and ``__{rank}_{n}.distcp``.

``.metadata`` is a pickle that says of each tensor its shape, its dtype and its chunks, and of each chunk (and each
object that is no tensor) which bytes of which file hold it. Each such range is a whole archive of torch.save. Reading
here follows the pickles on stand-ins (see ``formats.files.pickles``) and finds where the elements of each chunk lie; no
tensor data is read. Writing lays the archives of all chunks out before anything is written.

Source: ``torch/distributed/checkpoint/{metadata,filesystem,planner}.py`` of PyTorch 2.1 to 2.13, and
``megatron/core/dist_checkpointing/strategies/torch.py`` of Megatron-Core 0.16.
"""

from __future__ import annotations

import os
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from io import BytesIO
from typing import IO, NamedTuple

from formats.documents import is_inside
from formats.errors import CheckpointError
from formats.files.checkpoint import METADATA
from formats.files.checksum import Crc
from formats.files.chunks import Chunk, check_tiling
from formats.files.pickles import (
    DTYPES,
    LARGEST_PICKLE,
    TENSORS,
    Global,
    Inert,
    Names,
    Tensor,
    are_sizes,
    empty_dict,
    kind_of,
    quote,
    read_pickle,
    size_of,
    write_pickle,
)
from formats.files.safetensors import TORCH_NAMES, TensorInfo, read_header
from formats.files.torch_bin import open_archive, place_of
from formats.files.torch_zip import Archive, archive_of, tensor_archive
from formats.store import FilePath, open_file, read_file, unreadable

VERSION = "1.0.0"

_DAMAGED = "the file is damaged, or files of several checkpoints are mixed: fetch or copy the folder again"
_CHECKPOINT = "torch.distributed.checkpoint"
_METADATA, _FILESYSTEM = f"{_CHECKPOINT}.metadata", f"{_CHECKPOINT}.filesystem"
_TENSOR, _BYTES = f"{_METADATA}.TensorStorageMetadata", f"{_METADATA}.BytesStorageMetadata"
_CHUNK, _PROPERTIES = f"{_METADATA}.ChunkStorageMetadata", f"{_METADATA}.TensorProperties"
_INDEX, _ENCODING = f"{_METADATA}.MetadataIndex", f"{_METADATA}._MEM_FORMAT_ENCODING"
_INFO, _ROOT = f"{_FILESYSTEM}._StorageInfo", f"{_METADATA}.Metadata"
_OLD = "torch.distributed._shard.sharded_tensor.metadata"  # up to PyTorch 2.2
_OLD_PROPERTIES = f"{_OLD}.TensorProperties"
_MEGATRON = "megatron.core.dist_checkpointing.strategies.torch"
_PATHS = ("PosixPath", "WindowsPath", "PurePosixPath", "PureWindowsPath")
_CLASSES = frozenset(
    [
        *(_ROOT, _TENSOR, _BYTES, _CHUNK, _PROPERTIES, _INDEX, _ENCODING, _INFO),
        *(_OLD_PROPERTIES, f"{_OLD}.MEM_FORMAT_ENCODING", f"{_METADATA}.StorageMeta", f"{_FILESYSTEM}._StoragePrefix"),
        *(f"{_CHECKPOINT}.planner.{name}" for name in ("SavePlan", "WriteItem", "TensorWriteData", "WriteItemType")),
        *(f"{_MEGATRON}.{name}" for name in ("MCoreMetadata", "MCoreSavePlan")),
        *(f"{module}.{name}" for module in ("pathlib", "pathlib._local") for name in _PATHS),
    ]
)
_LAYOUT = "torch.serialization._get_layout"
_NAMES = Names(
    {"torch.Size": size_of, _LAYOUT: lambda name: name, "collections.OrderedDict": empty_dict},
    _CLASSES,
    frozenset(DTYPES),
)


class Blob(NamedTuple):
    """Bytes of a file: the archive of an object that is no tensor."""

    file: FilePath
    offset: int
    length: int


class Whole(NamedTuple):
    """A tensor of a distributed checkpoint, and its chunks: where each begins and ends, and where its bytes lie."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    chunks: tuple[tuple[Chunk, TensorInfo], ...]


@dataclass(frozen=True)
class Distributed:
    """A distributed checkpoint as it lies on disk.

    ``keys`` has, for each name, the keys by which the saved dictionaries led to it. ``files`` has the sizes in bytes of
    all files that are referred to. ``objects`` are what is no tensor: where it lies, or what torch.save writes of it.
    ``what`` says, in a few words, which program left it in another form than torch's. ``extras`` are settings that it
    has besides: those with the model, and those with its optimizer.
    """

    path: FilePath
    tensors: Mapping[str, Whole]
    objects: Mapping[str, Blob | bytes]
    keys: Mapping[str, tuple[str | int, ...]]
    files: Mapping[FilePath, int]
    what: str | None = None
    extras: Mapping[str, Mapping[str, object]] = field(default_factory=dict)


def read_distributed(folder: FilePath) -> Distributed:
    """Read a distributed checkpoint: where the bytes of each chunk of each tensor lie.

    Raises CheckpointError for one that is damaged or incomplete, or asks for more than data, and MismatchError if the
    chunks of a tensor overlap or leave something out.
    """
    path = folder / METADATA
    if not path.is_file():
        raise CheckpointError(
            f"{folder}: {METADATA} is missing, which says what the .distcp files hold",
            "fetch it too: its name begins with a dot, so that many tools leave it out",
        )
    pickled = read_file(path, LARGEST_PICKLE)
    metadata = _Metadata(path, read_pickle(pickled, _NAMES, path, "metadata of tensors is read"))
    shapes = dict(metadata.tensors())
    requests_of: dict[str, list[_Request]] = defaultdict(list)
    for name, (dtype, shape, chunks) in shapes.items():
        check_tiling(name, dict(enumerate(chunks)), shape, path)
        for number, at in enumerate(chunks):
            file, begin, length = metadata.range_of(name, at.offset)
            requests_of[file].append(_Request(begin, length, name, number, dtype, at))
    for name in metadata.objects():
        file, begin, length = metadata.range_of(name, None)
        requests_of[file].append(_Request(begin, length, name, None, "", None))
    contents: dict[tuple[str, int | None], TensorInfo | Blob] = {}
    pickles: dict[bytes, object] = {}
    sizes: dict[FilePath, int] = {}
    for file, requests in sorted(requests_of.items()):
        sizes[folder / file] = _look_into(folder / file, sorted(requests, key=lambda r: r[:2]), contents, pickles)
    tensors = {
        name: Whole(name, dtype, shape, tuple((at, contents[name, i]) for i, at in enumerate(chunks)))  # type: ignore[misc]
        for name, (dtype, shape, chunks) in shapes.items()
    }
    objects = {name: contents[name, None] for name in metadata.objects()}
    return Distributed(folder, tensors, objects, metadata.keys(), sizes)  # type: ignore[arg-type]


# ---------------------------------------------------------------------------------------------------------- .metadata


class _Metadata:
    """What ``.metadata`` says, checked as far as it can be without the files."""

    def __init__(self, path: FilePath, root: object) -> None:
        self._path = path
        if not isinstance(root, Inert) or root.path not in (_ROOT, f"{_MEGATRON}.MCoreMetadata"):
            raise self._wrong(f"holds a {kind_of(root)}, not the metadata of a distributed checkpoint")
        version = root.get("version")
        if version not in (None, VERSION):
            raise CheckpointError(
                f"{path} is of version {quote(version)} of torch's distributed checkpoints, {VERSION!r} is read",
                "load it with the torch that wrote it, and save it again",
            )
        self._root = root
        self._named = self._dictionary("state_dict_metadata")
        self._ranges: dict[tuple[str, tuple[int, ...] | None], tuple[str, int, int]] = {}
        for index, info in self._dictionary("storage_data").items():
            self._add_range(index, info)

    def _wrong(self, what: str) -> CheckpointError:
        return CheckpointError(f"{self._path}: {what}", _DAMAGED)

    def _dictionary(self, key: str) -> dict[object, object]:
        value = self._root.get(key)
        if not isinstance(value, dict):
            raise self._wrong(f"its '{key}' is a {kind_of(value)}, not a dictionary")
        return value

    def _add_range(self, index: object, info: object) -> None:
        state = index.state if isinstance(index, Inert) and isinstance(index.state, dict) else {}
        name, offset = state.get("fqn"), state.get("offset")
        if not isinstance(name, str):
            raise self._wrong("an entry of 'storage_data' has no name")
        if offset is not None and not are_sizes(offset):
            raise self._wrong(f"an entry of tensor '{name}' has an offset that is no offset")
        if not isinstance(info, Inert) or info.path != _INFO:
            raise self._wrong(f"the place of '{name}' is a {kind_of(info)}")
        if info.get("transform_descriptors"):
            raise CheckpointError(
                f"{self._path}: the data of '{name}' went through an extension of torch's (compressed or encrypted)",
                "load the checkpoint with torch and that extension, and save it without",
            )
        file, place = info.get("relative_path"), (info.get("offset"), info.get("length"))
        if not isinstance(file, str) or not is_inside(file) or "\\" in file:
            raise self._wrong(f"the file of '{name}' is no name of a file in this folder")
        if not are_sizes(place):
            raise self._wrong(f"the place of '{name}' in {file!r:.100} is none")
        if (name, offset) in self._ranges:
            raise self._wrong(f"the data of '{name}' from offset {offset} on has two places")
        self._ranges[name, offset] = (file, *place)

    def range_of(self, name: str, offset: tuple[int, ...] | None) -> tuple[str, int, int]:
        """The file of a chunk, by its offset, or of an object, and the offset and length of its bytes there."""
        stored = self._ranges.get((name, offset))
        if stored is None:
            what = f"the chunk of tensor '{name}' from {list(offset)} on" if offset is not None else f"'{name}'"
            raise self._wrong(f"{what} has no place in 'storage_data'")
        return stored

    def tensors(self) -> Iterator[tuple[str, tuple[str, tuple[int, ...], list[Chunk]]]]:
        """The name, dtype, shape and chunks of each tensor."""
        for name, entry in self._entries(_TENSOR):
            shape, chunks, properties = entry.get("size"), entry.get("chunks"), entry.get("properties")
            if not are_sizes(shape) or not isinstance(chunks, list):
                raise self._wrong(f"tensor '{name}' has no shape, or no chunks")
            boxes = [self._chunk(name, chunk, shape) for chunk in chunks]
            if not boxes:
                raise self._wrong(f"tensor '{name}' has no chunks")
            is_empty = 0 in shape
            yield (
                name,
                (
                    self._dtype(name, properties),
                    shape,
                    boxes[:1] if is_empty else [at for at in boxes if 0 not in at.shape],
                ),
            )

    def _dtype(self, name: str, properties: object) -> str:
        state = (
            properties.state
            if isinstance(properties, Inert) and properties.path in (_PROPERTIES, _OLD_PROPERTIES)
            else None
        )
        fields = [*state.values()] if isinstance(state, dict) else state
        if not isinstance(fields, (list, tuple)) or len(fields) < 2 or not isinstance(fields[0], Global):
            raise self._wrong(f"tensor '{name}' has no dtype")
        if fields[1] != "torch.strided":
            raise self._wrong(f"tensor '{name}' is not stored row by row ({quote(fields[1])})")
        dtype = DTYPES.get(fields[0].path)
        if dtype is None:
            raise self._wrong(f"tensor '{name}' is {fields[0].path}, which is not read here")
        return dtype

    def _chunk(self, name: str, chunk: object, shape: tuple[int, ...]) -> Chunk:
        extent = (chunk.get("offsets"), chunk.get("sizes")) if isinstance(chunk, Inert) and chunk.path == _CHUNK else ()
        if len(extent) != 2 or not all(are_sizes(sizes) and len(sizes) == len(shape) for sizes in extent):
            raise self._wrong(f"tensor '{name}' of shape {list(shape)} has a chunk that is none of it")
        at = Chunk(*extent)
        if any(end > length for end, length in zip(at.end, shape, strict=True)):
            raise self._wrong(f"a chunk of tensor '{name}' ends at {list(at.end)}, outside its shape {list(shape)}")
        return at

    def objects(self) -> Iterator[str]:
        """The names of what is no tensor."""
        return (name for name, _ in self._entries(_BYTES))

    def _entries(self, path: str) -> Iterator[tuple[str, Inert]]:
        for name, entry in self._named.items():
            if not isinstance(name, str) or not isinstance(entry, Inert) or entry.path not in (_TENSOR, _BYTES):
                raise self._wrong(f"its entry for {quote(name)} is a {kind_of(entry)}")
            if entry.path == path:
                yield name, entry

    def keys(self) -> dict[str, tuple[str | int, ...]]:
        """The keys that led to each name, where the planner says them."""
        planned = self._root.get("planner_data")
        entries = planned.items() if isinstance(planned, dict) else ()
        return {
            name: keys
            for name, keys in entries
            if isinstance(name, str) and isinstance(keys, tuple) and all(type(key) in (str, int) for key in keys)
        }


# -------------------------------------------------------------------------------------------------------- the files


class _Request(NamedTuple):
    """A range of a file, and what should be in it: a chunk of a tensor, or an object (``at`` is None)."""

    offset: int
    length: int
    name: str
    number: int | None
    dtype: str
    at: Chunk | None


def _look_into(
    path: FilePath,
    requests: Sequence[_Request],
    contents: dict[tuple[str, int | None], TensorInfo | Blob],
    pickles: dict[bytes, object],
) -> int:
    """Find what lies in a file, by name and number; returns its size in bytes. ``pickles`` are those read before.

    Raises CheckpointError.
    """
    if not path.is_file():
        raise CheckpointError(
            f"{path} is missing: {METADATA} says that it holds '{requests[0].name}'",
            "bring the files of all ranks into one folder",
        )
    try:
        with open_file(path) as file:
            size = file.seek(0, 2)
            for request in requests:
                begin, end = request.offset, request.offset + request.length
                if end > size:
                    raise CheckpointError(
                        f"{path}: '{request.name}' should be bytes {begin:,} to {end:,}, the file has {size:,}",
                        "the file is still incomplete, or of another checkpoint: fetch or copy it again",
                    )
                key = (request.name, request.number)
                if request.at is None:
                    contents[key] = Blob(path, request.offset, request.length)
                elif os.pread(file.fileno(), 2, request.offset) == b"PK":
                    contents[key] = _of_archive(path, file, request, pickles)
                else:
                    contents[key] = _of_safetensors(path, request)
            return size
    except OSError as error:
        raise unreadable(path, error) from error


def _of_archive(path: FilePath, file: IO[bytes], request: _Request, pickles: dict[bytes, object]) -> TensorInfo:
    """Where the elements of a chunk lie in its archive. Raises CheckpointError if it is not what .metadata says."""
    archive = open_archive(f"{path}: tensor '{request.name}'", file, request.offset, request.length)
    pickled = archive.record("data.pkl")
    if pickled not in pickles:  # chunks of one shape have equal pickles
        pickles[pickled] = archive.read(TENSORS, "plain tensors are read")
    saved = pickles[pickled]
    if not isinstance(saved, Tensor):
        raise CheckpointError(f"{path}: tensor '{request.name}' is stored as a {kind_of(saved)}", _DAMAGED)
    _check(path, request, saved.dtype, saved.shape)
    return place_of(path, path, request.name, saved, *archive.locate(saved.storage))


def _of_safetensors(path: FilePath, request: _Request) -> TensorInfo:
    """A chunk in a file that torch wrote as safetensors: .metadata's ranges say nothing of it."""
    info = read_header(path).tensors.get(request.name)
    if info is None:
        raise CheckpointError(f"{path}: tensor '{request.name}' is not in this file", _DAMAGED)
    _check(path, request, info.dtype, info.shape)
    return info


def read_object(blob: Blob | bytes) -> object:
    """An object that is no tensor, on stand-ins. Raises CheckpointError for one that names more than tensors."""
    if isinstance(blob, bytes):
        return open_archive("", BytesIO(blob), 0, len(blob)).read(TENSORS, "plain settings are read")
    with open_file(blob.file) as file:
        return open_archive(blob.file, file, blob.offset, blob.length).read(TENSORS, "plain settings are read")


def _check(path: FilePath, request: _Request, dtype: str, shape: tuple[int, ...]) -> None:
    if request.at is not None and (dtype, shape) != (request.dtype, request.at.shape):
        raise CheckpointError(
            f"{path}: a chunk of tensor '{request.name}' is {dtype} {list(shape)}, {METADATA} says {request.dtype} "
            f"{list(request.at.shape)}",
            _DAMAGED,
        )


# ------------------------------------------------------------------------------------------------------------ writing


class NewChunk(NamedTuple):
    """A chunk to be written: ``nbytes`` bytes from ``at.offset`` of a tensor on."""

    name: str
    dtype: str
    at: Chunk
    nbytes: int


@dataclass(frozen=True)
class ChunkFile(Archive):
    """The layout of a ``.distcp`` file. ``ranges`` has offset and length of the archive of each tensor and object."""

    ranges: Mapping[str, tuple[int, int]]


_ALIGNMENT = 64


def build_chunks(chunks: Sequence[NewChunk], objects: Mapping[str, bytes] = {}) -> ChunkFile:
    """The layout of a file of chunks, at most one of each tensor, and of objects: archives of torch.save.

    Archives begin at multiples of 64 bytes. Raises PlanError for a dtype that torch.save does not write.
    """
    places, fixed, crcs = list[tuple[str, int]](), list[tuple[int, bytes]](), list[Crc]()
    ranges: dict[str, tuple[int, int]] = {}
    end = 0
    for name, archive in (
        *((name, tensor_archive(dtype, at.shape, nbytes)) for name, dtype, at, nbytes in chunks),
        *((name, Archive(len(content), (), ((0, content),), ())) for name, content in objects.items()),
    ):
        begin = -(-end // _ALIGNMENT) * _ALIGNMENT
        if begin > end:
            fixed.append((end, bytes(begin - end)))
        ranges[name] = (begin, archive.size)
        places += [(name, begin + place) for _, place in archive.places]
        fixed += [(begin + offset, content) for offset, content in archive.fixed]
        crcs += [
            Crc(begin + crc.begin, begin + crc.end, tuple(begin + each for each in crc.places)) for crc in archive.crcs
        ]
        end = begin + archive.size
    return ChunkFile(end, tuple(places), tuple(fixed), tuple(crcs), ranges)


def object_bytes(value: object) -> bytes:
    """What torch.save writes of plain data and stand-ins (see ``formats.files.pickles.write_pickle``)."""
    return filled(archive_of(value), b"")


def tensor_bytes(dtype: str, shape: tuple[int, ...], content: bytes) -> bytes:
    """What torch.save writes of a tensor of these bytes."""
    return filled(tensor_archive(dtype, shape, len(content)), content)


def filled(archive: Archive, content: bytes) -> bytes:
    """The bytes of an archive with at most one tensor."""
    data = bytearray(archive.size)
    for offset, part in (*archive.fixed, *((offset, content) for _, offset in archive.places)):
        data[offset : offset + len(part)] = part
    for crc in archive.crcs:
        for offset in crc.places:
            data[offset : offset + 4] = zlib.crc32(content).to_bytes(4, "little")
    return bytes(data)


class Stored(NamedTuple):
    """A chunk or an object in a file, as ``.metadata`` lists it; ``at`` is None for an object."""

    at: Chunk | None
    file: str
    offset: int
    length: int


def build_metadata(
    tensors: Mapping[str, tuple[str, tuple[int, ...], Sequence[Stored]]],
    objects: Mapping[str, Stored] = {},
    keys: Callable[[str], tuple[str | int, ...]] = lambda name: (name,),
) -> bytes:
    """The ``.metadata`` of tensors (dtype, shape, chunks) and objects; ``keys`` lead to them in nested dictionaries.

    It names classes of torch's alone, and nothing of the machine it was written on.
    """
    named: dict[str, Inert] = {}
    ranges: dict[Inert, Inert] = {}

    def sizes(values: tuple[int, ...]) -> Inert:
        return Inert("torch.Size", (values,))

    def put(name: str, stored: Stored, number: int | None) -> None:
        index = {"fqn": name} if stored.at is None else {"fqn": name, "offset": sizes(stored.at.offset)}
        info = {"relative_path": stored.file, "offset": stored.offset, "length": stored.length}
        ranges[Inert(_INDEX, (), {**index, "index": number})] = Inert(_INFO, (), info)

    for name, (dtype, shape, chunks) in tensors.items():
        layout, memory = Inert(_LAYOUT, ("torch.strided",)), Inert(_ENCODING, (0,))
        properties = Inert(_PROPERTIES, (), (Global(f"torch.{TORCH_NAMES[dtype]}"), layout, False, memory, False))
        boxes = [
            Inert(_CHUNK, (), {"offsets": sizes(stored.at.offset), "sizes": sizes(stored.at.shape)})
            for stored in chunks
            if stored.at is not None
        ]
        named[name] = Inert(_TENSOR, (), {"properties": properties, "size": sizes(shape), "chunks": boxes})
        for number, stored in enumerate(chunks):
            put(name, stored, number)
    for name, stored in objects.items():
        named[name] = Inert(_BYTES, (), {})
        put(name, stored, None)
    content = {
        "state_dict_metadata": named,
        "planner_data": {name: keys(name) for name in named},
        "storage_data": ranges,
        "storage_meta": None,
        "version": VERSION,
    }
    return write_pickle(Inert(_ROOT, (), content))
