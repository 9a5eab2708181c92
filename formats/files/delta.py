"""A delta on disk: ``delta.safetensors`` has what changed, ``delta.json`` which base it is for, and what comes of it.

All is in Hugging Face's coordinates. A changed tensor NAME is stored in the smaller of two ways: ``NAME.delta_indices``
(I32, or I64 where needed: flat, ascending) and ``NAME.delta_values``; or ``NAME``, the whole tensor. Where a byte has
several elements, bytes count. ``delta.json`` has a checksum for each tensor of base and result
(``formats.files.checksum``).

**Compressed**, a changed tensor is ``NAME`` (U8): one zstd frame of its bytes before XOR those after. The layout is
that of slime's folders ``weight_v000001`` (slime#2089), which its SGLang puts on a local checkpoint, with
``delta.json`` beside it: ``model.safetensors.index.json`` has the version, the base's, the encoding, the compression
and the kind of checksums; the checksum of each tensor's new bytes is in the metadata of the file. Folders of slime's
own (``xor`` and ``overwrite``) are read too. They know nothing of tensors that did not change, and of other files: a
base that differs there is not refused.

vLLM's ``SparseWeightPatch`` (vllm#50723, #53751) is a message in memory with these coordinates: name, I32 indices,
values, shape. Of floats that are not NaN, from ``tensors``, what changed as safetensors' ``load_file`` gives it, and
the ``shape`` in the base: ``SparseWeightPatch(name, tensors[f"{name}.delta_indices"], tensors[f"{name}.delta_values"],
shape)``. What vLLM 0.32's ``load_checkpoint_weight_patches`` made of them was the result, bit for bit.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import json
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from reshard.formats.documents import (
    MAX_INDEX,
    MAX_MANIFEST,
    WRITERS,
    Reader,
    Record,
    T,
    Unfit,
    document_of,
    file_name,
    items,
    json_object,
    mapping,
    optional,
    read_document,
    record,
    size,
    structure,
    text,
    whole,
)
from reshard.formats.errors import CheckpointError
from reshard.formats.files.checkpoint import DELTA
from reshard.formats.files.compressed import ADLER, BLAKE, OVERWRITE, XOR, XXH
from reshard.formats.files.safetensors import (
    DTYPE_BITS,
    SourceFileRecord,
    TensorInfo,
    read_header,
    tensor_bytes,
    unit_of,
)
from reshard.formats.store import FilePath

CONTENT = "delta.safetensors"
INDICES, VALUES = ".delta_indices", ".delta_values"
INDEX, COMPRESSED = "model.safetensors.index.json", "model-00000-of-00001.safetensors"
VERSION = 1
SAME, SPARSE, WHOLE, GONE = "same", "indices", "whole", "gone"
"""Ways in which the result gets a tensor, besides ``XOR`` and ``OVERWRITE``. ``gone``: only the base has the tensor."""


@dataclass(frozen=True)
class Change:
    """The way in which one tensor changes, and the checksums of its bytes before and after (None: nothing to check).

    A checksum in slime's files begins with its kind and a colon.
    """

    how: str
    base: str | None
    result: str | None


def _unpacked(value: object, where: str) -> bytes:
    try:
        return base64.b64decode(text(value, where), validate=True)
    except (binascii.Error, ValueError) as error:
        raise Unfit(f"{where} should be base64: {error}") from None


def _change(fields: Record) -> Change:
    change = structure(Change, fields)
    how = change.how
    if how not in (SAME, SPARSE, WHOLE, GONE, XOR):
        raise Unfit(f"'{how}' is not a way to store a change")
    if (change.base is None and how not in (WHOLE, GONE)) or (change.result is None and how != GONE):
        raise Unfit(f"a tensor that is '{how}' has no checksum")
    if how == SAME and change.base != change.result:
        raise Unfit(f"a tensor that is '{SAME}' has two checksums")
    return change


def _file(fields: Record) -> SourceFileRecord:
    name, nbytes, header = fields.get("name", file_name), fields.get("size", size), fields.get("header", _unpacked)
    return SourceFileRecord(name, nbytes, None, header)


def _by_name(reader: Reader[T]) -> Reader[dict[str, T]]:
    return lambda value, where: {file_name(name, where): item for name, item in mapping(reader)(value, where).items()}


def _header(file: SourceFileRecord) -> dict[str, object]:
    return {"name": file.name, "header": document_of(file.header), "size": file.size}


WRITERS[bytes] = lambda content: base64.b64encode(content).decode()


@dataclass(frozen=True)
class Delta:
    """The change from a base to a result, read from a folder."""

    path: FilePath = field(metadata={"key": None})
    contents: tuple[str, ...] = field(metadata={"key": None})
    """The files with the changed bytes."""
    changes: Mapping[str, Change] = field(metadata={"key": "tensors", "read": mapping(record(_change))})
    files: tuple[SourceFileRecord, ...] = field(
        metadata={"read": items(record(_file)), "write": lambda files: [*map(_header, files)]}
    )
    """The result's files, as a merge writes them."""
    documents: Mapping[str, bytes] = field(metadata={"read": _by_name(_unpacked)})
    """The result's documents, as a merge writes them."""
    sides: Mapping[str, bytes | None] = field(metadata={"read": _by_name(optional(_unpacked))})
    """The result's other small files; None stands for the base's content."""
    names: str | None = None
    """``modules`` if the result has the names of transformers' modules, None if it has the published ones."""


def smallest(dtype: str, elements: int, changed: int) -> str:
    """The smaller way to store a changed tensor."""
    unit, wide = unit_of(dtype), 4 if elements < 2**31 else 8
    return SPARSE if changed * (wide + unit) < elements * unit else WHOLE


def stored_as(
    name: str, dtype: str, shape: tuple[int, ...], how: str, changed: int
) -> list[tuple[str, str, tuple[int, ...]]]:
    """The tensors (name, dtype, shape) by which a changed tensor is stored; of a frame, ``changed`` are its bytes."""
    if how in (XOR, OVERWRITE):
        return [(name, "U8", (changed,))]
    if how == WHOLE:
        return [(name, dtype, shape)]
    elements = tensor_bytes(name, dtype, shape) // unit_of(dtype)
    values = (name + VALUES, dtype if not DTYPE_BITS[dtype] % 8 else "U8", (changed,))
    return [(name + INDICES, "I32" if elements < 2**31 else "I64", (changed,)), values]


def delta_text(delta: Delta) -> bytes:
    """The content of ``delta.json``."""
    document = {"version": VERSION, **document_of(delta)}
    return json.dumps(document | {"digest": digest(document)}, indent=1).encode() + b"\n"


def digest(document: Mapping[str, object]) -> str:
    """A digest of all that ``delta.json`` says: what it has of files beside the weights has no other checksum."""
    return hashlib.sha256(json.dumps(document, sort_keys=True).encode()).hexdigest()[:32]


def index_text(version: int, names: Iterable[str]) -> bytes:
    """The index of a compressed delta, as slime's engines read it."""
    metadata = {
        "version": f"{version:06d}", "base_version": f"{version - 1:06d}", "delta_encoding": XOR,
        "compression_format": "zstd", "checksum_format": ADLER,
    }  # fmt: skip
    return json.dumps({"metadata": metadata, "weight_map": dict.fromkeys(names, COMPRESSED)}, indent=1).encode() + b"\n"


def version_of(name: str) -> int:
    """The version of a folder ``weight_v000007``; 1 for another name."""
    match = re.fullmatch(r"weight_v(\d{6})", name)
    return max(1, int(match[1])) if match else 1


def read_delta(path: FilePath, base: Delta) -> Delta:
    """Read a delta, ours or slime's; ``base`` leaves the checkpoint as it is. Raises CheckpointError."""
    if not (path / DELTA).is_file():
        return _read_slime(path, base)
    contents = (COMPRESSED,) if (path / COMPRESSED).is_file() else (CONTENT,)

    def read(fields: Record) -> Delta:
        fields.get("version", whole(VERSION, VERSION))
        fields.get("digest", text)
        return structure(Delta, fields, path=path, contents=contents)

    def checked(value: object, where: str) -> Delta:
        document = json_object(value, where)
        if digest({key: item for key, item in document.items() if key != "digest"}) != document.get("digest"):
            raise Unfit("it was changed: its digest is another")
        return record(read)(document, where)

    return read_document(path / DELTA, MAX_MANIFEST, checked, hint="write the delta again")[1]


def _read_slime(path: FilePath, base: Delta) -> Delta:
    """A folder of slime's: all that it does not name is as in the base."""

    def read(value: object, where: str) -> tuple[dict[str, str], set[str]] | None:
        index = json_object(value, where)
        settings = index.get("metadata")
        if not isinstance(settings, dict) or "delta_encoding" not in settings:
            return None
        for key, values in {
            "delta_encoding": (XOR, OVERWRITE), "compression_format": ("zstd",), "checksum_format": (XXH, BLAKE, ADLER),
        }.items():  # fmt: skip
            if settings.get(key) not in values:
                raise Unfit(f"{key} should be one of {', '.join(values)}")
        named = mapping(file_name)(index.get("weight_map"), "weight_map")
        return settings, {*named.values()}

    index = read_document(path / INDEX, MAX_INDEX, read)[1] if (path / INDEX).is_file() else None
    if index is None:
        hint = "'reshard diff A B --out DELTA' writes one"
        raise CheckpointError(f"{path} is not a delta: it has no {DELTA}, and no {INDEX} of slime's", hint)
    settings, names = index
    changes = dict(base.changes)
    for name in names:
        header = read_header(path / name)
        for tensor in header.tensors:
            if tensor not in header.metadata:
                raise CheckpointError(f"{path / name}: tensor '{tensor}' has no checksum")
            changes[tensor] = Change(
                settings["delta_encoding"], None, f"{settings['checksum_format']}:{header.metadata[tensor]}"
            )
    return replace(base, path=path, contents=tuple(sorted(names)), changes=changes)


def contents_of(delta: Delta) -> dict[str, tuple[TensorInfo, ...]]:
    """Return the stored tensors of each changed tensor. Raises CheckpointError if they disagree with the result's
    headers.
    """
    stored: dict[str, TensorInfo] = {}
    for file in delta.contents:
        stored |= read_header(delta.path / file).tensors
    result = {name: info for file in delta.files for name, info in file.tensors.items()}
    lacking = {name for name, change in delta.changes.items() if change.how != GONE} ^ result.keys()
    if lacking:
        raise CheckpointError(f"{delta.path}: tensor '{min(lacking)}' is not in both the files and the changes")
    contents: dict[str, tuple[TensorInfo, ...]] = {}
    for name, change in delta.changes.items():
        if change.how in (SAME, GONE):
            continue
        dtype, shape = result[name].dtype, result[name].shape
        values = stored.get(name if change.how in (XOR, OVERWRITE) else name + VALUES)
        changed = math.prod(values.shape) if values is not None else 0
        expected = stored_as(name, dtype, shape, change.how, changed)
        for entry in expected:
            info = stored.pop(entry[0], None)
            if info is None or (info.dtype, info.shape) != entry[1:]:
                state = "is not there" if info is None else f"is {info.dtype} {list(info.shape)}"
                what = f"{entry[1]} {list(entry[2])}"
                raise CheckpointError(f"{delta.path}: tensor '{entry[0]}' should be {what} and {state}")
            contents[name] = (*contents.get(name, ()), info)
    if stored:
        raise CheckpointError(f"{delta.path}: tensor '{min(stored)}' belongs to no change")
    return contents
