"""A delta on disk: ``delta.safetensors`` has what changed, ``delta.json`` which base it is for, and what comes of it.

All is in Hugging Face's coordinates. A changed tensor NAME is stored in one of three ways, the smallest of them:
``NAME.delta_indices`` (I32, or I64 where needed: flat, ascending) and ``NAME.delta_values``; ``NAME.delta_bitmap`` (U8,
a bit for each element, lowest first) and ``NAME.delta_values``; or ``NAME``, the whole tensor. Where a byte has several
elements, bytes count. ``delta.json`` has a checksum for each tensor of base and result (``formats.files.checksum``).
"""

from __future__ import annotations

import base64
import binascii
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from formats.documents import (
    MAX_MANIFEST,
    Record,
    Unfit,
    file_name,
    items,
    mapping,
    optional,
    read_document,
    record,
    text,
)
from formats.documents import whole as integer
from formats.errors import CheckpointError
from formats.files.safetensors import DTYPE_BITS, TensorInfo, parse_header, read_header, tensor_bytes, unit_of
from formats.store import FilePath

DELTA, CONTENT = "delta.json", "delta.safetensors"
INDICES, BITMAP, VALUES = ".delta_indices", ".delta_bitmap", ".delta_values"
VERSION = 1
SAME, SPARSE, BITS, WHOLE, GONE = "same", "indices", "bitmap", "whole", "gone"
"""How a tensor of the result comes about; ``gone``: only the base has it."""


class Change(NamedTuple):
    """How a tensor comes about, and the checksums of its bytes before and after; None where there are none to check."""

    how: str
    base: str | None
    result: str | None


class Laid(NamedTuple):
    """A weight file of the result: its name, header and size."""

    name: str
    header: bytes
    size: int


@dataclass(frozen=True)
class Delta:
    """What changed from a base to a result. ``files`` and ``documents`` are those of the result, as a merge writes it;
    of ``sides``, the other small files, the content is None where it is the base's.
    """

    path: FilePath
    changes: Mapping[str, Change]
    files: tuple[Laid, ...]
    documents: Mapping[str, bytes]
    sides: Mapping[str, bytes | None]


def sparse_bytes(dtype: str, elements: int, changed: int) -> dict[str, int]:
    """The bytes of each way to store a changed tensor."""
    unit = unit_of(dtype)
    return {
        SPARSE: changed * ((4 if elements < 2**31 else 8) + unit),
        BITS: -(-elements // 8) + changed * unit,
        WHOLE: elements * unit,
    }


def stored_as(
    name: str, how: str, dtype: str, shape: tuple[int, ...], changed: int
) -> list[tuple[str, str, tuple[int, ...]]]:
    """The tensors (name, dtype, shape) by which a changed tensor is stored."""
    if how == WHOLE:
        return [(name, dtype, shape)]
    elements = tensor_bytes(name, dtype, shape) // unit_of(dtype)
    values = (name + VALUES, dtype if not DTYPE_BITS[dtype] % 8 else "U8", (changed,))
    if how == BITS:
        return [(name + BITMAP, "U8", (-(-elements // 8),)), values]
    return [(name + INDICES, "I32" if elements < 2**31 else "I64", (changed,)), values]


def delta_text(delta: Delta) -> bytes:
    """The content of ``delta.json``."""
    document = {
        "version": VERSION,
        "tensors": {name: {"how": c.how, "base": c.base, "result": c.result} for name, c in delta.changes.items()},
        "files": [{"name": f.name, "header": _packed(f.header), "size": f.size} for f in delta.files],
        "documents": {name: _packed(content) for name, content in delta.documents.items()},
        "sides": {name: None if content is None else _packed(content) for name, content in delta.sides.items()},
    }
    return json.dumps(document, indent=1).encode() + b"\n"


def _packed(content: bytes) -> str:
    return base64.b64encode(content).decode()


def _unpacked(value: object, where: str) -> bytes:
    try:
        return base64.b64decode(text(value, where), validate=True)
    except (binascii.Error, ValueError) as error:
        raise Unfit(f"{where} should be base64: {error}") from None


def _change(fields: Record) -> Change:
    how = fields.get("how", text)
    if how not in (SAME, SPARSE, BITS, WHOLE, GONE):
        raise Unfit(f"'{how}' is no way to store a change")
    found = Change(how, fields.get("base", optional(text)), fields.get("result", optional(text)))
    if (found.base is None and how not in (WHOLE, GONE)) or (found.result is None and how != GONE):
        raise Unfit(f"a tensor that is '{how}' has no checksum")
    return found


def _laid(fields: Record) -> Laid:
    return Laid(fields.get("name", file_name), fields.get("header", _unpacked), fields.get("size", integer(0)))


def _sides(value: object, where: str) -> dict[str, bytes | None]:
    found = mapping(optional(_unpacked))(value, where)
    for name in found:
        file_name(name, where)
    return found


def _documents(value: object, where: str) -> dict[str, bytes]:
    return {file_name(name, where): content for name, content in mapping(_unpacked)(value, where).items()}


def read_delta(path: FilePath) -> Delta:
    """Read ``delta.json``. Raises CheckpointError."""

    def read(fields: Record) -> Delta:
        fields.get("version", integer(VERSION, VERSION))
        return Delta(
            path, fields.get("tensors", mapping(record(_change))), fields.get("files", items(record(_laid))),
            fields.get("documents", _documents), fields.get("sides", _sides),
        )  # fmt: skip

    if not (path / DELTA).is_file():
        raise CheckpointError(f"{path} is no delta: it has no {DELTA}", "'reshard diff A B --out DELTA' writes one")
    return read_document(path / DELTA, MAX_MANIFEST, record(read), hint="write the delta again")[1]


def contents_of(delta: Delta) -> dict[str, tuple[TensorInfo, ...]]:
    """What is stored of each changed tensor, and the tensors of the result. Raises CheckpointError if they disagree."""
    stored = dict(read_header(delta.path / CONTENT).tensors)
    result = {n: i for f in delta.files for n, i in parse_header(f.header, delta.path / f.name, f.size).tensors.items()}
    lacking = {name for name, change in delta.changes.items() if change.how != GONE} ^ result.keys()
    if lacking:
        raise CheckpointError(f"{delta.path / DELTA}: tensor '{min(lacking)}' is not in both the files and the changes")
    found: dict[str, tuple[TensorInfo, ...]] = {}
    for name, change in delta.changes.items():
        if change.how in (SAME, GONE):
            continue
        dtype, shape, values = result[name].dtype, result[name].shape, stored.get(name + VALUES)
        changed = math.prod(values.shape) if values is not None else 0
        own = stored_as(name, change.how, dtype, shape, changed)
        for each in own:
            info = stored.pop(each[0], None)
            if info is None or (info.dtype, info.shape) != each[1:]:
                there = "is not there" if info is None else f"is {info.dtype} {list(info.shape)}"
                what = f"{each[1]} {list(each[2])}"
                raise CheckpointError(f"{delta.path / CONTENT}: tensor '{each[0]}' should be {what} and {there}")
            found[name] = (*found.get(name, ()), info)
    if stored:
        raise CheckpointError(f"{delta.path / CONTENT}: tensor '{min(stored)}' belongs to no change")
    return found
