"""PyTorch's distributed checkpoints: a folder with ``.metadata`` and ``__{rank}_{n}.distcp``.

``.metadata`` is a pickle that says of each tensor its shape, its dtype and its chunks, and of each chunk (and each
object that is no tensor) which bytes of which file hold it. Each such range is a whole archive of torch.save. Reading
here follows the pickles on stand-ins (see ``formats.files.pickles``) and finds where the elements of each chunk lie; no
tensor data is read. Writing lays the archives of all chunks out before anything is written.

Source: ``torch/distributed/checkpoint/{metadata,filesystem,planner}.py`` of PyTorch 2.1 to 2.13, and
``megatron/core/dist_checkpointing/strategies/torch.py`` of Megatron-Core 0.16.
"""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, NamedTuple

from reshard.formats.documents import is_inside
from reshard.formats.errors import CheckpointError, IncompleteError, MismatchError
from reshard.formats.files.checkpoint import METADATA
from reshard.formats.files.chunks import Chunk, Sharded, check_tiling
from reshard.formats.files.pickles import (
    DTYPES,
    LARGEST_PICKLE,
    TENSORS,
    Global,
    Inert,
    Names,
    PickledTensor,
    are_sizes,
    attribute,
    empty_dict,
    is_plain,
    kind_of,
    quote,
    read_pickle,
    size_of,
    write_pickle,
)
from reshard.formats.files.safetensors import TORCH_NAMES, Header, TensorInfo, read_header
from reshard.formats.files.torch_archive import archive_of, open_archive
from reshard.formats.store import FilePath, open_file, prefetch, read_file, read_ranges, unreadable

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
_LAYOUT = "torch.serialization._get_layout"
_NAMES = Names({
    **dict.fromkeys(DTYPES), "torch.Size": size_of, _LAYOUT: lambda name: name, "collections.OrderedDict": empty_dict,
}).with_classes(
    _ROOT, _TENSOR, _BYTES, _CHUNK, _PROPERTIES, _INDEX, _ENCODING, _INFO, _OLD_PROPERTIES,
    *(f"{_OLD}.MEM_FORMAT_ENCODING", f"{_METADATA}.StorageMeta", f"{_FILESYSTEM}._StoragePrefix"),
    *(f"{_CHECKPOINT}.planner.{name}" for name in ("SavePlan", "WriteItem", "TensorWriteData", "WriteItemType")),
    *(f"{_MEGATRON}.{name}" for name in ("MCoreMetadata", "MCoreSavePlan")),
    *(f"{module}.{name}" for module in ("pathlib", "pathlib._local") for name in _PATHS),
)  # fmt: skip


class Blob(NamedTuple):
    """Bytes of a file: the archive of an object that is no tensor."""

    file: FilePath
    offset: int
    length: int


@dataclass(frozen=True)
class Distributed:
    """A distributed checkpoint as it lies on disk."""

    path: FilePath
    tensors: Mapping[str, Sharded]
    objects: Mapping[str, object]
    """The saved objects that are no tensors: where each lies, or plain data."""
    keys: Mapping[str, tuple[str | int, ...]]
    """For each name, the keys by which the saved dictionaries led to it."""
    files: Mapping[FilePath, int]
    """The bytes of all files that are referred to."""
    what: str | None = None
    """A few words on the program that left it in another form than torch's."""
    extras: Mapping[str, Mapping[str, object]] = field(default_factory=dict)
    """Further settings: those with the model, and those with its optimizer."""

    def object(self, name: str) -> object:
        """Return the saved object of this name, which is no tensor, as data. Raises CheckpointError if it names other
        classes than tensors.
        """
        if not isinstance(at := self.objects[name], Blob):
            return at
        with open_file(at.file) as file:
            return open_archive(at.file, file, at.offset, at.length).read(TENSORS, "plain settings are read")


def read_distributed(folder: FilePath) -> Distributed:
    """Read a distributed checkpoint: where the bytes of each chunk of each tensor lie.

    Raises CheckpointError for one that is damaged or incomplete, or asks for more than data, and MismatchError if the
    chunks of a tensor overlap or leave something out.
    """
    path = folder / METADATA
    if not path.is_file():
        raise IncompleteError(
            f"{folder}: {METADATA} is missing, which says what the .distcp files hold",
            "fetch it too: its name begins with a dot, so that many tools leave it out",
        )
    root = read_pickle(read_file(path, LARGEST_PICKLE), _NAMES, path, "metadata of tensors is read")
    if not isinstance(root, Inert) or root.path not in (_ROOT, f"{_MEGATRON}.MCoreMetadata"):
        raise _wrong(path, f"holds a {kind_of(root)}, not the metadata of a distributed checkpoint")
    if (version := attribute(root, "version")) not in (None, VERSION):
        raise CheckpointError(
            f"{path} is of version {quote(version)} of torch's distributed checkpoints, {VERSION!r} is read",
            "load it with the torch that wrote it, and save it again",
        )
    for key in ("state_dict_metadata", "storage_data"):
        if not isinstance(value := attribute(root, key), dict):
            raise _wrong(path, f"its '{key}' is a {kind_of(value)}, not a dictionary")
    places = dict(_places(path, attribute(root, "storage_data")))
    shapes, parts = dict[str, tuple[tuple[int, ...], list[Chunk]]](), list[Located]()
    for name, entry in attribute(root, "state_dict_metadata").items():
        if not isinstance(name, str) or not isinstance(entry, Inert) or entry.path not in (_TENSOR, _BYTES):
            raise _wrong(path, f"its entry for {quote(name)} is a {kind_of(entry)}")
        chunks: list[Any] = [None]
        if entry.path == _TENSOR:
            dtype, shape, chunks = _tensor(path, name, entry)
            shapes[name] = shape, chunks
            check_tiling(name, dict(enumerate(chunks)), shape, path)
        for number, at in enumerate(chunks):
            if (place := places.get((name, at and at.offset))) is None:
                what = f"the chunk of tensor '{name}' from {list(at.offset)} on" if at is not None else f"'{name}'"
                raise _wrong(path, f"{what} has no place in 'storage_data'")
            parts.append((place, name, number, at and (dtype, at.shape)))
    contents: dict[tuple[str, int], TensorInfo] = {}
    pickles: dict[bytes, object] = {}
    sizes: dict[FilePath, int] = {}
    in_order = sorted(parts, key=lambda part: (str(part[0].file), part[0].offset))
    for file, of_file in itertools.groupby(in_order, key=lambda part: part[0].file):
        sizes[file] = _look_into(file, [*of_file], contents, pickles)
    tensors = {
        name: Sharded(shape, [(at, contents[name, i]) for i, at in enumerate(chunks)])
        for name, (shape, chunks) in shapes.items()
    }
    objects = {name: blob for blob, name, _, kind in parts if kind is None}
    planned = attribute(root, "planner_data")
    keys = {
        name: keys
        for name, keys in (planned.items() if isinstance(planned, dict) else ())
        if isinstance(name, str) and isinstance(keys, tuple) and all(type(key) in (str, int) for key in keys)
    }
    return Distributed(folder, tensors, objects, keys, sizes)


def _wrong(path: FilePath, what: str) -> CheckpointError:
    return CheckpointError(f"{path}: {what}", _DAMAGED)


def _places(
    path: FilePath, stored: Mapping[object, object]
) -> Iterator[tuple[tuple[str, tuple[int, ...] | None], Blob]]:
    """For the name of an object, or the name and the offset of a chunk, where its bytes are."""
    seen, file_at = set[object](), cache(lambda file: path.parent / file)  # many chunks are in few files
    for index, info in stored.items():
        name, offset = attribute(index, "fqn"), attribute(index, "offset")
        if not isinstance(name, str):
            raise _wrong(path, "an entry of 'storage_data' has no name")
        if offset is not None and not are_sizes(offset):
            raise _wrong(path, f"an entry of tensor '{name}' has an offset that is no offset")
        if not isinstance(info, Inert) or info.path != _INFO:
            raise _wrong(path, f"the place of '{name}' is a {kind_of(info)}")
        if attribute(info, "transform_descriptors"):
            raise CheckpointError(
                f"{path}: the data of '{name}' went through an extension of torch's (compressed or encrypted)",
                "load the checkpoint with torch and that extension, and save it without",
            )
        file, *place = (attribute(info, key) for key in ("relative_path", "offset", "length"))
        if not isinstance(file, str) or not is_inside(file) or "\\" in file:
            raise _wrong(path, f"the file of '{name}' is no name of a file in this folder")
        if not are_sizes(tuple(place)):
            raise _wrong(path, f"the place of '{name}' in {file!r:.100} is none")
        if (name, offset) in seen:
            raise _wrong(path, f"the data of '{name}' from offset {offset} on has two places")
        seen.add((name, offset))
        yield (name, offset), Blob(file_at(file), *place)


def _tensor(path: FilePath, name: str, entry: Inert) -> tuple[str, tuple[int, ...], list[Chunk]]:
    """The dtype, shape and chunks of a tensor; of one without elements, one chunk."""
    shape, chunks, properties = (attribute(entry, key) for key in ("size", "chunks", "properties"))
    if not are_sizes(shape) or not isinstance(chunks, list):
        raise _wrong(path, f"tensor '{name}' has no shape, or no chunks")
    boxes = list[Chunk]()
    for chunk in chunks:
        extent = attribute(chunk, "offsets"), attribute(chunk, "sizes")
        if not all(are_sizes(sizes) and len(sizes or ()) == len(shape) for sizes in extent):
            raise _wrong(path, f"tensor '{name}' of shape {list(shape)} has a chunk that is none of it")
        boxes.append(at := Chunk(*extent))
        if any(end > length for end, length in zip(at.end, shape, strict=True)):
            raise _wrong(path, f"a chunk of tensor '{name}' ends at {list(at.end)}, outside its shape {list(shape)}")
    if not boxes:
        raise _wrong(path, f"tensor '{name}' has no chunks")
    is_known = isinstance(properties, Inert) and properties.path in (_PROPERTIES, _OLD_PROPERTIES)
    state = properties.state if is_known else None
    fields = [*state.values()] if isinstance(state, dict) else state
    if not isinstance(fields, (list, tuple)) or len(fields) < 2 or not isinstance(fields[0], Global):
        raise _wrong(path, f"tensor '{name}' has no dtype")
    if fields[1] != "torch.strided":
        raise _wrong(path, f"tensor '{name}' is not stored row by row ({quote(fields[1])})")
    if (dtype := DTYPES.get(fields[0].path)) is None:
        raise _wrong(path, f"tensor '{name}' is {fields[0].path}, which is not read here")
    return dtype, shape, boxes[:1] if 0 in shape else [at for at in boxes if 0 not in at.shape]


Located = tuple[Blob, str, int, tuple[str, tuple[int, ...]] | None]
"""Bytes of a file, and what should be in them: an object (None), or a chunk with its number, dtype and shape."""


_EDGE = 2048
"""Bytes before and behind the elements of a chunk in its archive: most have fewer."""


def _look_into(
    path: FilePath, parts: Sequence[Located], contents: dict[tuple[str, int], TensorInfo], pickles: dict[bytes, object]
) -> int:
    """Find what lies in a file, by name and number; returns its size in bytes. ``pickles`` are those read before.

    Raises CheckpointError.
    """
    if not path.is_file():
        raise IncompleteError(
            f"{path} is missing: {METADATA} says that it holds '{parts[0][1]}'",
            "bring the files of all ranks into one folder",
        )
    header: Header | None = None
    try:
        with open_file(path) as file:
            size = file.seek(0, 2)
            ends = [(at.offset, at.offset + at.length) for at, _, _, kind in parts if kind is not None]
            prefetch(file, (part for begin, end in ends for part in ((begin, begin + _EDGE), (end - _EDGE, end))))
            for (_, begin, length), name, number, kind in parts:
                if begin + length > size:
                    raise CheckpointError(
                        f"{path}: '{name}' should be bytes {begin:,} to {begin + length:,}, the file has {size:,}",
                        "the file is still incomplete, or of another checkpoint: fetch or copy it again",
                    )
                if kind is None:
                    continue
                file.seek(begin)
                if file.read(2) == b"PK":
                    archive = open_archive(path, file, begin, length, f"{path}: tensor '{name}'")
                    pickled = archive.record("data.pkl")
                    if pickled not in pickles:  # chunks of one shape have equal pickles
                        pickles[pickled] = archive.read(TENSORS, "plain tensors are read")
                    saved = pickles[pickled]
                    if not isinstance(saved, PickledTensor):
                        raise _wrong(path, f"tensor '{name}' is stored as a {kind_of(saved)}")
                    info = archive.place(name, saved)
                else:  # a file that torch wrote as safetensors: .metadata's ranges say nothing of it
                    header = header or read_header(path)
                    if name not in header.tensors:
                        raise _wrong(path, f"tensor '{name}' is not in this file")
                    info = header.tensors[name]
                if (info.dtype, info.shape) != kind:
                    what = f"{info.dtype} {list(info.shape)}, {METADATA} says {kind[0]} {list(kind[1])}"
                    raise _wrong(path, f"a chunk of tensor '{name}' is {what}")
                contents[name, number] = info
            return size
    except OSError as error:
        raise unreadable(path, error) from error


# ---------------------------------------------------------------------------------------------- from other programs

Keys = tuple[str | int, ...]
STATE: Keys = ("optimizer", "state")
TOGETHER = "bring all files of one save together"

Entries = dict[Keys, object]
"""The entries of a saved state, by the keys that lead to them: a tensor is ``Sharded``, anything else is data."""


def group_settings(groups: object, names: Sequence[Sequence[str]]) -> Entries:
    """The settings of an optimizer, with the ``names`` of the parameters of each group."""
    tables = enumerate(zip(groups if isinstance(groups, list) else (), names, strict=False))
    return {
        ("optimizer", "param_groups", number, key): [*members] if key == "params" else value
        for number, (group, members) in tables
        for key, value in (group.items() if isinstance(group, dict) else ())
    }


def gathered(folder: FilePath, entries: Entries, what: str, files: Collection[FilePath]) -> Distributed:
    """Combine the entries of a folder's files into one checkpoint. Objects that are not plain data are dropped.

    Raises MismatchError if a tensor has two dtypes, or if its chunks do not cover it exactly once. Empty chunks are
    ignored.
    """
    tensors, objects, keys_of = dict[str, Sharded](), dict[str, object](), dict[str, Keys]()
    for keys, entry in entries.items():
        keys_of[name := ".".join(map(str, keys))] = keys
        if not isinstance(entry, Sharded):
            objects |= {name: entry} if is_plain(entry) else {}
            continue
        shape = entry.shape
        parts = [(at, info) for at, info in entry.chunks if 0 not in at.shape or 0 in shape]
        dtypes = dict.fromkeys(info.dtype for _, info in parts)
        if len(dtypes) > 1:
            raise MismatchError(f"{folder}: '{name}' is {' and '.join(dtypes)} in different files")
        if not parts:
            raise MismatchError(f"{folder}: no file has any of '{name}', a tensor {list(shape)}")
        parts = parts[:1] if 0 in shape else parts
        check_tiling(name, dict(enumerate(at for at, _ in parts)), shape, folder)
        tensors[name] = Sharded(shape, parts)
    return Distributed(folder, tensors, objects, keys_of, {file: file.stat().st_size for file in files}, what)


def check_steps(steps: Iterable[tuple[FilePath, object]]) -> None:
    """Raise MismatchError if the steps that files state, as numbers or as tensors, differ."""
    first: tuple[FilePath, object] | None = None
    for file, step in steps:
        if isinstance(step, TensorInfo):
            (step,) = read_ranges([(step.file, step.offset, step.offset + step.nbytes)])
        step = step if isinstance(step, bytes | int | float) else quote(step)  # lists that unfold are not compared
        first = first or (file, step)
        if step != first[1]:
            raise MismatchError(f"{file} and {first[0]} are of different steps", TOGETHER)


# ------------------------------------------------------------------------------------------------------------ writing


def object_bytes(value: object, content: bytes | None = None) -> bytes:
    """Return the bytes that torch.save writes for plain data and stand-ins (see
    ``formats.files.pickles.write_pickle``). A tensor among them, of key 0, has this ``content``.
    """
    archive = archive_of(value, [("", len(content))] if content is not None else [])
    data = bytearray(archive.size)
    for offset, part in (*archive.fixed, *((offset, content or b"") for _, offset in archive.places)):
        data[offset : offset + len(part)] = part
    for offset in (offset for crc in archive.crcs for offset in crc.places):
        data[offset : offset + 4] = zlib.crc32(content or b"").to_bytes(4, "little")
    return bytes(data)


def build_metadata(
    tensors: Mapping[str, tuple[str, tuple[int, ...], Sequence[tuple[Chunk, Blob]]]],
    objects: Mapping[str, Blob] = {},
    keys: Callable[[str], tuple[str | int, ...]] = lambda name: (name,),
) -> bytes:
    """The ``.metadata`` of tensors (dtype, shape, chunks) and objects, whose files are relative; ``keys`` lead to them
    in nested dictionaries.

    It names classes of torch's alone, and nothing of the machine it was written on.
    """
    named: dict[str, Inert] = {}
    ranges: dict[Inert, Inert] = {}

    def sizes(values: tuple[int, ...]) -> Inert:
        return Inert("torch.Size", (values,))

    def put(blob: Blob, **index: object) -> None:
        info = {"relative_path": str(blob.file), "offset": blob.offset, "length": blob.length}
        ranges[Inert(_INDEX, (), index)] = Inert(_INFO, (), info)

    for name, (dtype, shape, chunks) in tensors.items():
        layout, memory = Inert(_LAYOUT, ("torch.strided",)), Inert(_ENCODING, (0,))
        properties = Inert(_PROPERTIES, (), (Global(f"torch.{TORCH_NAMES[dtype]}"), layout, False, memory, False))
        boxes = [Inert(_CHUNK, (), {"offsets": sizes(at.offset), "sizes": sizes(at.shape)}) for at, _ in chunks]
        named[name] = Inert(_TENSOR, (), {"properties": properties, "size": sizes(shape), "chunks": boxes})
        for number, (at, blob) in enumerate(chunks):
            put(blob, fqn=name, offset=sizes(at.offset), index=number)
    for name, blob in objects.items():
        named[name] = Inert(_BYTES, (), {})
        put(blob, fqn=name, index=None)
    content = {
        "state_dict_metadata": named,
        "planner_data": {name: keys(name) for name in named},
        "storage_data": ranges,
        "storage_meta": None,
        "version": VERSION,
    }
    return write_pickle(Inert(_ROOT, (), content))
