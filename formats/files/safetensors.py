"""The safetensors file format: a length, a JSON header, and the tensors' bytes end to end.

A file is 8 bytes (the header's length ``n``, little-endian, unsigned), ``n`` bytes of JSON that map each tensor's name
to its dtype, shape and ``data_offsets``, and the data itself. Reading here is stricter than a loader needs to be: what
one reader would forgive and another would not is refused, so that nothing is moved on a guess.

Source: https://github.com/huggingface/safetensors#format and ``safetensors/src/tensor.rs`` of release 0.8.
"""

from __future__ import annotations

import itertools
import json
import math
import re
import sys
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from json.encoder import encode_basestring
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from reshard.formats.documents import LARGEST, file_name, strict_json, utf8
from reshard.formats.errors import CheckpointError, brief
from reshard.formats.files.layout import Layout, Tensor
from reshard.formats.store import FilePath, open_file, read_ranges, unreadable
from reshard.formats.wrappers import without_wrappers

DTYPE_BITS = {"BOOL": 8} | {
    dtype: int(re.findall("[0-9]+", dtype)[0])
    for dtype in (
        "F4", "F6_E2M3", "F6_E3M2", "U8", "I8", "F8_E5M2", "F8_E4M3", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ", "I16",
        "U16", "F16", "BF16", "I32", "U32", "F32", "C64", "F64", "I64", "U64",
    )
}  # fmt: skip
"""Bits of one element, for every dtype of safetensors 0.8. ``F4`` and ``F6_*`` are packed, several to a byte."""
TORCH_NAMES = {
    "BOOL": "bool", "U8": "uint8", "I8": "int8", "U16": "uint16", "I16": "int16", "U32": "uint32", "I32": "int32",
    "U64": "uint64", "I64": "int64", "F16": "float16", "BF16": "bfloat16", "F32": "float32", "F64": "float64",
    "C64": "complex64", "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2", "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2FNUZ": "float8_e5m2fnuz", "F8_E8M0": "float8_e8m0fnu",
}  # fmt: skip
"""torch's names of the dtypes."""
DTYPE_NAMES = {dtype: TORCH_NAMES[dtype] for dtype in ("F64", "F32", "BF16", "F16")}
"""The dtypes of weights that are not quantized, as config.json calls them."""
CASTS = {"bf16": "BF16", "fp16": "F16", "fp32": "F32"}
"""The dtypes to which weights may be cast, by their names in ``--dtype``."""

#: Bytes; what the safetensors library accepts at most.
MAX_HEADER = 100_000_000

MAX_DIMS = 64
"""Dimensions of a tensor; torch and numpy allow no more, and the product of more sizes takes ever longer."""
DAMAGED = "the file is damaged or still incomplete: fetch or copy it again"
_FOREIGN = "the program that wrote this file did not follow the safetensors format: write it again with safetensors"


class TensorInfo(NamedTuple):  # made for every tensor of every file: a dataclass takes four times as long
    """A tensor in a file; the data is contiguous, row-major and little-endian."""

    name: str
    dtype: str
    """A key of ``DTYPE_BITS``."""
    shape: tuple[int, ...]
    file: FilePath
    offset: int
    """The first byte, counted from the file's start."""
    nbytes: int

    @property
    def where(self) -> str:
        """The name of its file."""
        return self.file.name

    @property
    def local(self) -> None:
        """No shape of a part, because that of the whole tensor is known."""


def look_alike(one: TensorInfo, other: TensorInfo) -> bool:
    """Whether two tensors have the same bytes, as far as their first, middle and last few tell."""
    length = min(one.nbytes, other.nbytes, 1 << 12)
    starts = [0, (one.nbytes - length) // 2, one.nbytes - length]
    mine, its = (
        read_ranges([(t.file, t.offset + start, t.offset + start + length) for start in starts]) for t in (one, other)
    )
    return one.nbytes == other.nbytes and mine == its


@dataclass(frozen=True)
class Header:
    """A file's header: its tensors in increasing order of offset, its metadata, and its bytes as they are on disk.

    ``raw`` is the 8 length bytes and the JSON with its padding, so that the data begins at ``len(raw)``.
    """

    tensors: dict[str, TensorInfo]
    metadata: dict[str, str]
    raw: bytes


def _header(value: object, where: str) -> bytes:
    content = utf8(value, where)
    return len(content).to_bytes(8, "little") + content


@dataclass(frozen=True)
class SourceFileRecord:
    """A safetensors file of the source: enough to write it again byte for byte, given its tensors.

    ``checksum`` is that of the whole file; None where not all of it was read. ``beginning`` is what stands before the
    names of the model in its header, where wrappers have words in them, too; None, if they are the model's own.
    """

    name: str = field(metadata={"read": file_name})
    size: int
    checksum: str | None
    header: bytes = field(metadata={"read": _header, "write": lambda raw: raw[8:].decode()})
    beginning: str | None = None

    @cached_property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """The tensors in it, by their names in the model. Raises CheckpointError for a header that is damaged or of
        another size.
        """
        stored = parse_header(self.header, Path(self.name), self.size).tensors
        if self.beginning is None:
            return stored
        names = {name: without_wrappers(name).removeprefix(self.beginning) for name in stored}
        return {names[name]: info._replace(name=names[name]) for name, info in stored.items()}

    @property
    def layout(self) -> Layout:
        """The places of all tensors in the file."""
        return Layout(self.size, [*self.tensors], [info.offset for info in self.tensors.values()], [self.header])


def read_header(path: FilePath) -> Header:
    """Read and check the header of a safetensors file; the data is not touched.

    Raises ``CheckpointError`` for a file that cannot be read, a header that is not as the format says, and a file
    that is shorter or longer than its header says.
    """
    try:
        with open_file(path) as file:
            size = file.seek(0, 2)
            file.seek(0)
            prefix = file.read(8)
            length = _check_length(prefix, size, path)
            raw = prefix + file.read(length)
    except OSError as error:
        raise unreadable(path, error) from error
    return parse_header(raw, path, size)


def stated_dtype(config: Mapping[str, Any]) -> str | None:
    """The dtype that a config.json states, as a header calls it; None if it states none of ``DTYPE_NAMES``."""
    stated = str(config.get("dtype") or config.get("torch_dtype")).removeprefix("torch.")
    return next((dtype for dtype, name in DTYPE_NAMES.items() if name == stated), None)


def parse_header(raw: bytes, path: FilePath, file_size: int | None) -> Header:
    """Check a header given as bytes: the 8 length bytes and the JSON with its padding.

    ``path`` is the file that the tensors are said to lie in. ``file_size`` (bytes) is the whole file's size; with
    ``None`` the header alone is checked. Raises ``CheckpointError``.
    """
    length = _check_length(raw[:8], None, path)
    if length != len(raw) - 8:
        raise CheckpointError(f"{path}: the header should have {length} bytes and has {len(raw) - 8}", DAMAGED)
    tensors, metadata, end = _read_usual(raw, path) or _read_any(raw, path)
    if file_size is not None and end != file_size:
        _refuse_size(file_size, end, next(reversed(tensors), None), path)
    return Header(tensors, metadata, raw)


def build_header(tensors: Sequence[tuple[str, str, tuple[int, ...]]], metadata: Mapping[str, str]) -> bytes:
    """Write the header of a file that holds ``tensors``, (name, dtype, shape) each, in the given order without holes.

    Returns the 8 length bytes and the JSON, padded with spaces so that the data begins at a multiple of 8. For the
    tensors to be aligned too, as the safetensors library aligns them, the caller orders them by descending size of an
    element. Equal arguments give equal bytes; metadata is sorted by key. Raises ``CheckpointError`` for a name given
    twice, reserved or not valid Unicode, an unknown dtype, and a size that is not whole bytes.
    """
    return b"".join(_header_parts(tensors, metadata))


_Entry = tuple[str, str, tuple[int, ...]] | Tensor


def _header_parts(tensors: Sequence[_Entry], metadata: Mapping[str, str]) -> tuple[bytes, bytes, bytes]:
    """The parts of a header: all before the entries of tensors, these, and the rest."""
    opening = _utf8(f'{{"__metadata__":{_compact(dict(sorted(metadata.items())))}' if metadata else "{")
    entries = _entries(tuple(tensors))
    opening += b"," if metadata and entries else b""
    length = len(opening) + len(entries) + 1
    padding = -length % 8
    if length + padding > MAX_HEADER:
        raise CheckpointError(
            f"the header of {len(tensors)} tensors has {length + padding} bytes; safetensors allows {MAX_HEADER}",
            "write smaller files, with fewer tensors each",
        )
    return (length + padding).to_bytes(8, "little") + opening, entries, b"}" + b" " * padding


@lru_cache(maxsize=1)
def _entries(tensors: tuple[_Entry, ...]) -> bytes:
    """The entries of tensors in a header: one object in memory for all ranks that have the same tensors."""
    entries, names, offset = bytearray(), {"__metadata__"}, 0
    alike: dict[tuple[str, tuple[int, ...]], tuple[int, str]] = {}  # there are few dtypes and shapes
    for name, dtype, shape, *_ in tensors:
        if name in names:
            raise CheckpointError(f"tensor {name!r} cannot be written: the name is already taken in this file")
        names.add(name)
        if (dtype, shape) not in alike:
            nbytes = tensor_bytes(name, dtype, shape)
            alike[dtype, shape] = nbytes, _compact({"dtype": dtype, "shape": shape}).removesuffix("}")
        nbytes, entry = alike[dtype, shape]
        entries += _utf8(f'{encode_basestring(name)}:{entry},"data_offsets":[{offset},{offset + nbytes}]}},')
        offset += nbytes
    return bytes(memoryview(entries)[:-1])


def _utf8(text: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        near = error.object[max(0, error.start - 30) : error.end]
        raise CheckpointError(f"a name is not valid Unicode and cannot be written: …{near!r}") from error


def build_safetensors(tensors: Sequence[Tensor], metadata: Mapping[str, str]) -> Layout:
    """The layout of a file of these tensors, one behind the other."""
    head = _header_parts(tensors, metadata)
    *offsets, size = itertools.accumulate((tensor.nbytes for tensor in tensors), initial=sum(map(len, head)))
    return Layout(size, [tensor.name for tensor in tensors], array("Q", offsets), head)


def _compact(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def tensor_bytes(name: str, dtype: str, shape: tuple[int, ...]) -> int:
    """Size in bytes of a tensor; ``name`` is for the message of the ``CheckpointError`` if it has none."""
    bits = DTYPE_BITS.get(dtype)
    if bits is None:
        raise CheckpointError(f"tensor {name!r}: {_unknown_dtype(dtype)}")
    nbytes, remainder = divmod(math.prod(shape) * bits, 8)
    if remainder:
        raise CheckpointError(f"tensor {name!r}: {dtype} of shape {list(shape)} is not a whole number of bytes")
    return nbytes


def unit_of(dtype: str) -> int:
    """The bytes that are compared as one: an element, or a byte if that holds several."""
    return max(1, DTYPE_BITS[dtype] // 8)


def _check_length(prefix: bytes, file_size: int | None, path: FilePath) -> int:
    """Bytes of JSON that the first 8 bytes announce, if a file of ``file_size`` bytes can have them."""
    if len(prefix) < 8:
        raise CheckpointError(
            f"{path}: the file has {len(prefix)} bytes; a safetensors file begins with 8 bytes of header length",
            DAMAGED,
        )
    if prefix == b"version ":
        raise CheckpointError(f"{path}: this is not a safetensors file but a git-lfs pointer", "run 'git lfs pull'")
    length = int.from_bytes(prefix, "little")
    if file_size is not None and length > file_size - 8:
        raise CheckpointError(
            f"{path}: the header should have {length} bytes, but only {file_size - 8} follow its length "
            f"(the file has {file_size})",
            DAMAGED + ", or it is not a safetensors file",
        )
    if length > MAX_HEADER:
        raise CheckpointError(
            f"{path}: the header should have {length} bytes; safetensors allows {MAX_HEADER}", _FOREIGN
        )
    return length


_Content = tuple[dict[str, TensorInfo], dict[str, str], int]
"""The tensors of a header in order of offset, its metadata, and the byte at which the file should end."""

_STRING = rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"'
_METADATA = re.compile(rb'\{(?:"__metadata__":(\{(?:%b:%b,?)*+\}),)?' % (_STRING, _STRING))
_ENTRY = re.compile(
    rb'"((?!__metadata__")[^"\\\x00-\x1f]++)":(\{"dtype":"\w+","shape":\[[\d,]*+\]),'
    rb'"data_offsets":\[(\d++),(\d++)\]\}(?:,(?=")|\} *\Z)'
)


def _read_usual(raw: bytes, path: FilePath) -> _Content | None:
    """The content of a sound header in the spelling of the safetensors library, tensors in order of offset: without
    an object for each entry, of which there may be half a million. None for any other header.
    """
    begin, at = _METADATA.match(raw, 8), len(raw)
    count, end, place, tensors = 0, b"0", begin.end() if begin else 0, dict[str, TensorInfo]()
    alike: dict[bytes, tuple[str, tuple[int, ...], int]] = {}  # there are few dtypes and shapes
    try:
        metadata = strict_json(begin[1].decode()) if begin and begin[1] else {}
        for entry in _ENTRY.finditer(raw, place):
            name, like, first, last = entry.groups()
            if like not in alike:
                stated = strict_json(like.decode() + "}")
                dtype, shape = stated["dtype"], tuple(stated["shape"])
                if len(shape) > MAX_DIMS or not _sizes([*shape]):
                    return None
                alike[like] = dtype, shape, tensor_bytes("", dtype, shape)
            dtype, shape, nbytes = alike[like]
            # one name in memory for all ranks that have it
            info = TensorInfo(sys.intern(name.decode()), dtype, shape, path, at, nbytes)
            at += nbytes
            if first != end or last != (end := b"%d" % (at - len(raw))) or entry.start() != place:
                return None
            count, place, tensors[info.name] = count + 1, entry.end(), info
    except (ValueError, CheckpointError):
        return None
    return (tensors, metadata, at) if place == len(raw) and len(tensors) == count else None


def _read_any(raw: bytes, path: FilePath) -> _Content:
    """The content of any header. Raises CheckpointError that says what is wrong with it."""
    entries = _decode(raw, path)
    metadata: Any = entries.pop("__metadata__", {})
    if not isinstance(metadata, dict):
        raise CheckpointError(f"{path}: __metadata__ should map strings to strings and is {brief(metadata)}", _FOREIGN)
    for key, value in metadata.items():
        if not isinstance(value, str):
            raise CheckpointError(
                f"{path}: __metadata__ should map strings to strings, but {key!r} is {brief(value)}", _FOREIGN
            )
    tensors, end = _read_entries(entries, path, len(raw))
    return tensors, metadata, end


def _decode(raw: bytes, path: FilePath) -> dict[str, Any]:
    """The header's JSON object, with tensors not yet checked."""
    try:
        text = raw[8:].decode()
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{path}: the header is not UTF-8 (byte {8 + error.start})", DAMAGED) from error
    if text[:1] != "{":
        raise CheckpointError(f"{path}: the header should begin with '{{' and begins with {text[:1]!r}", DAMAGED)
    try:
        entries: dict[str, Any] = strict_json(text)
        "".join(entries).encode()
    except UnicodeEncodeError as error:
        raise CheckpointError(f"{path}: the name of a tensor is not valid Unicode", _FOREIGN) from error
    except ValueError as error:
        raise CheckpointError(f"{path}: the header is not valid JSON: {error}", DAMAGED) from error
    return entries


def _read_entries(entries: dict[str, Any], path: FilePath, base: int) -> tuple[dict[str, TensorInfo], int]:
    """The tensors in order of offset, and the byte at which the file should end; data begins at byte ``base``."""
    infos: list[TensorInfo] = []
    alike: dict[tuple[str, tuple[int, ...]], tuple[str, tuple[int, ...], int]] = {}  # there are few dtypes and shapes
    for name, entry in entries.items():
        try:
            dtype, (begin, end), sizes = entry["dtype"], entry["data_offsets"], entry["shape"]
            sound = type(sizes) is list and {*map(type, (begin, end, *sizes))} == {int} and 0 <= begin <= end
            shape = tuple(sizes)
            known = alike.get((dtype, shape)) if sound else None
            if sound and known is None and len(shape) <= MAX_DIMS and _sizes(sizes):
                known = alike[dtype, shape] = dtype, shape, math.prod(shape) * DTYPE_BITS[dtype]
            sound = known is not None and known[2] == (end - begin) * 8
        except (TypeError, KeyError, ValueError):
            sound = False
        if not sound or known is None:
            _refuse_entry(name, entry, path)
        # one name, dtype and shape in memory for all ranks that have it: there may be a million tensors
        infos.append(TensorInfo(sys.intern(name), known[0], known[1], path, base + begin, known[2] // 8))
    infos.sort(key=attrgetter("offset", "nbytes"))
    expected = base
    for i, info in enumerate(infos):
        if info.offset != expected:
            _refuse_gap(info.name, info.offset - base, expected - base, infos[i - 1].name if i else None, path)
        expected += info.nbytes
    return {info.name: info for info in infos}, expected


def _refuse_entry(name: str, entry: Any, path: FilePath) -> NoReturn:
    """Say what is wrong with a tensor's entry, which is known to be wrong."""
    where = f"{path}: tensor {name!r}"
    if not isinstance(entry, dict):
        raise CheckpointError(f"{where} should be an object with dtype, shape and data_offsets, not {brief(entry)}",
                              _FOREIGN)  # fmt: skip
    for key in ("dtype", "shape", "data_offsets"):
        if key not in entry:
            raise CheckpointError(f"{where} has no {key!r}", _FOREIGN)
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPE_BITS:
        raise CheckpointError(f"{where}: {_unknown_dtype(dtype)}", "a newer reshard may know it")
    if not _sizes(shape):
        raise CheckpointError(f"{where}: the shape should be a list of sizes and is {brief(shape)}", _FOREIGN)
    if not _sizes(offsets) or len(offsets) != 2:
        raise CheckpointError(
            f"{where}: data_offsets should be [begin, end] in bytes and is {brief(offsets)}", _FOREIGN
        )
    if len(shape) > MAX_DIMS:
        raise CheckpointError(f"{where} has {len(shape)} dimensions; at most {MAX_DIMS} are read", _FOREIGN)
    begin, end = offsets
    if begin > end:
        raise CheckpointError(f"{where}: data_offsets are reversed: [{begin}, {end}]", _FOREIGN)
    whole, odd_bits = divmod(math.prod(shape) * DTYPE_BITS[dtype], 8)
    size = f"{brief(whole)}{f'{odd_bits / 8:g}'[1:]} bytes, not a whole number" if odd_bits else f"{brief(whole)} bytes"
    raise CheckpointError(
        f"{where}: {dtype} of shape {brief(shape)} has {size}; its data_offsets [{begin}, {end}] span {end - begin}",
        _FOREIGN,
    )


def _refuse_gap(name: str, begin: int, expected: int, previous_name: str | None, path: FilePath) -> NoReturn:
    previous = f"{previous_name!r} ends" if previous_name is not None else "the data begins"
    what = "overlaps what lies before it" if begin < expected else f"leaves a hole of {begin - expected} bytes"
    raise CheckpointError(
        f"{path}: tensor {name!r} {what}: it begins at byte {begin} of the data, where {previous} at byte {expected}",
        _FOREIGN,
    )


def _refuse_size(size: int, expected: int, last: str | None, path: FilePath) -> NoReturn:
    sizes = f"the file has {size} bytes and should have {expected}" + (f" (up to tensor {last!r})" if last else "")
    if size < expected:
        raise CheckpointError(f"{path}: {expected - size} bytes are missing: {sizes}", DAMAGED)
    raise CheckpointError(f"{path}: {size - expected} bytes too many at the end: {sizes}", _FOREIGN)


def _sizes(value: Any) -> bool:
    return isinstance(value, list) and all(type(n) is int and 0 <= n <= LARGEST for n in value)


def _unknown_dtype(dtype: object) -> str:
    return f"unknown dtype {brief(dtype)}; known are {', '.join(sorted(DTYPE_BITS))}"
