"""PyTorch's own file format (``.bin``, ``.pt``, ``.pth``): a zip archive of a pickle and the bytes of each storage.

**Reading.** The pickle is not run (see ``formats.files.pickles``): what is learned of a tensor is where its bytes lie.
The names that may occur are a part of those that ``torch.load(..., weights_only=True)`` allows. No tensor data is read.

**Writing.** An archive is laid out before it is written. It has stored entries only: ``data.pkl``, ``byteorder``,
``version``, and one entry for the bytes of each tensor, which begin at a multiple of 64 bytes as torch's own writer
puts them. All bytes but the tensors' and the CRC-32 of their entries are known from names, dtypes and shapes:
``zipfile`` makes the headers. ``torch.load`` does not compare the CRC-32, ``zipfile`` and ``unzip`` do.

Neither torch nor pickle is needed for either. Source: ``torch/serialization.py`` and
``caffe2/serialize/inline_container.cc`` of PyTorch 2.4 to 2.13; PKWARE's APPNOTE.TXT 6.3.10, 4.3 to 4.5.
"""

from __future__ import annotations

import math
import re
import struct
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import IO, NamedTuple
from zipfile import ZIP_STORED, BadZipFile, ZipFile, ZipInfo

from reshard.formats.errors import CheckpointError, PlanError
from reshard.formats.files.layout import Crc, Layout
from reshard.formats.files.pickles import (
    LARGEST_PICKLE,
    STORAGES,
    TENSORS,
    Global,
    Inert,
    Names,
    Persistent,
    PickledTensor,
    Storage,
    kind_of,
    quote,
    read_pickle,
    write_pickle,
)  # fmt: skip
from reshard.formats.files.safetensors import DAMAGED, DTYPE_BITS, TORCH_NAMES, TensorInfo
from reshard.formats.store import FilePath, Range, RangeFile, open_file, prefetch, unreadable

_ALIGNMENT = 64
MAX_DIRECTORY = 64 << 20
"""Bytes of a zip archive's directory; an entry has some 70."""
_HEADER = 30
"""Bytes of what stands before an entry, without its name."""
_EDGE = 1 << 16
"""Bytes at both ends of a file elsewhere that are read first: most have the pickle and the directory there."""
_RESAVE = "load it with torch where you trust it, and save the state dict again with safetensors or torch.save"


def read_bin(path: FilePath) -> tuple[dict[str, TensorInfo], dict[str, str]]:
    """Find where each tensor of a saved state dict lies in its file.

    Returns the tensors in increasing order of offset, and ``{alias: kept}``: of tensors that are the same bytes with
    the same shape and dtype (tied weights) the first of the state dict is kept. Entries that hold no tensor (numbers,
    strings, dtypes, and lists, tuples and dicts of these) are metadata, and left out.

    Raises ``CheckpointError`` for a pickle that names anything but plain tensors, for files older than PyTorch 1.6, and
    for tensors whose bytes are not contiguous, not little-endian or not in the file.
    """
    with torch_file(path) as archive:
        state = archive.read(TENSORS, "plain tensors are read (weights_only)")
        return _locate(archive, state)


class Saved(NamedTuple):
    """The content of a file of a training program: the tensors of some entries (``states``), and the other entries.

    ``extras`` holds numbers and texts as they are; of anything else, its kind.
    """

    states: dict[str, tuple[dict[str, TensorInfo], dict[str, str]]]
    extras: dict[str, int | float | str]


def read_saved(path: FilePath, inside: str) -> Saved:
    """Find where the tensors of an entry of a saved dictionary lie in its file, and those of entries that have its name
    and a number (``model0``).

    What programs save beside tensors (settings, states of random generators) is not made. Raises ``CheckpointError``.
    """
    numbered = re.compile(re.escape(inside) + "[0-9]*")
    with torch_file(path) as archive:
        state = archive.read(TENSORS.with_classes(*BESIDE), "tensors and plain settings are read")
        if not isinstance(state, dict):
            raise CheckpointError(f"{path}: holds a {kind_of(state)}, not a dictionary", _RESAVE)
        entries = {str(name): value for name, value in state.items()}
        located = {name: _locate(archive, value) for name, value in entries.items() if numbered.fullmatch(name)}
    plain = {n: v if isinstance(v, (int, float, str)) else kind_of(v) for n, v in entries.items() if n not in located}
    return Saved(located, plain)


BESIDE = (
    "argparse.Namespace", "types.SimpleNamespace", "_io.BytesIO", "_codecs.encode", "pathlib.PosixPath",
    "signal.Signals", "numpy.ndarray", "numpy.dtype", "numpy.core.multiarray._reconstruct",
    "numpy._core.multiarray._reconstruct", "numpy.core.multiarray.scalar", "numpy._core.multiarray.scalar",
    "torch.nn.functional.silu", "torch.nn.functional.gelu", "torch._C._nn.gelu",
    "megatron.core.enums.ModelType", "megatron.core.transformer.enums.AttnBackend",
    "megatron.core.transformer.enums.AttnMaskType", "megatron.core.transformer.enums.LayerType",
    "megatron.core.transformer.enums.CudaGraphScope", "megatron.core.rerun_state_machine.RerunMode",
    "megatron.core.rerun_state_machine.RerunState", "megatron.core.rerun_state_machine.RerunDiagnostic",
    "megatron.core.optimizer.optimizer_config.OptimizerConfig",
)  # fmt: skip
"""Classes that training programs save beside tensors (Megatron-Core: core/safe_globals.py, and the types of its
fields).
"""


@dataclass(frozen=True)
class TorchArchive:
    """An archive that torch.save wrote: a whole file, or a range of one."""

    path: FilePath
    where: str
    """The beginning of messages about the archive."""
    file: IO[bytes]
    begin: int
    """The first byte in the file."""
    size: int
    entries: dict[str, ZipInfo]
    """The entries, without the name of the folder that torch puts them in."""

    def record(self, name: str) -> bytes:
        """The content of an entry; nothing if there is none."""
        if name not in self.entries:
            return b""
        offset, size = self._find(self.entries[name])
        if size > LARGEST_PICKLE:
            raise CheckpointError(f"{self.where}: its {name} has {size:,} bytes, at most {LARGEST_PICKLE:,} are read")
        self.file.seek(offset)
        return self.file.read(size)

    def read(self, names: Names, may: str) -> object:
        """Return the saved object, built of stand-ins (see ``formats.files.pickles``)."""
        return read_pickle(self.record("data.pkl"), names, self.where, may)

    def place(self, name: str, tensor: PickledTensor) -> TensorInfo:
        """The bytes of a tensor. Raises CheckpointError if they are not contiguous or not all there."""
        entry = self.entries.get(f"data/{tensor.storage.key}")
        if entry is None:
            key = f"{tensor.storage.key!r:.100}"
            raise CheckpointError(f"{self.where}: the data of storage {key} is missing from the archive", DAMAGED)
        base, size = self._find(entry)
        if not tensor.is_contiguous:
            raise CheckpointError(
                f"{self.path}: tensor {name!r} is not contiguous: shape {list(tensor.shape)}, strides "
                f"{list(tensor.strides)}",
                "save it again after .contiguous()",
            )
        bits, stored = DTYPE_BITS[tensor.dtype], tensor.storage.numel * DTYPE_BITS[tensor.storage.dtype] // 8
        begin, nbytes = tensor.offset * bits // 8, math.prod(tensor.shape) * bits // 8
        if stored > size or begin + nbytes > stored:
            raise CheckpointError(
                f"{self.path}: tensor {name!r} is said to be bytes {begin} to {begin + nbytes} of a storage of "
                f"{stored}, of which the file has {size}",
                DAMAGED,
            )
        return TensorInfo(name, tensor.dtype, tensor.shape, self.path, base + begin, nbytes)

    def _find(self, entry: ZipInfo) -> tuple[int, int]:
        if entry.compress_type != ZIP_STORED or entry.flag_bits & 1 or entry.compress_size != entry.file_size:
            raise self._refused(entry, "is compressed or encrypted", _RESAVE)
        header = b""
        if 0 <= entry.header_offset < self.size:
            self.file.seek(self.begin + entry.header_offset)
            header = self.file.read(_HEADER)
        if len(header) < _HEADER or header[:4] != b"PK\3\4":
            raise self._refused(entry, "does not begin where the archive says")
        offset = entry.header_offset + _HEADER + sum(struct.unpack("<HH", header[26:]))
        missing = offset + entry.file_size - self.size
        if missing > 0:
            raise self._refused(entry, f"is not all there: {missing} bytes are missing")
        return self.begin + offset, entry.file_size

    def _refused(self, entry: ZipInfo, why: str, hint: str = DAMAGED) -> CheckpointError:
        return CheckpointError(f"{self.where}: record {entry.filename!r:.100} {why}", hint)


@contextmanager
def torch_file(path: FilePath) -> Iterator[TorchArchive]:
    """A whole file of torch.save, open. Raises CheckpointError if it is none, or not readable."""
    try:
        with open_file(path) as file:
            size = file.seek(0, 2)
            prefetch(file, ((0, _EDGE), (size - _EDGE, size)))
            file.seek(0)
            begin = file.read(8)
            if begin == b"version ":
                raise CheckpointError(f"{path}: this is not a PyTorch file but a git-lfs pointer", "run 'git lfs pull'")
            if begin[:2] != b"PK":
                raise CheckpointError(f"{path}: not a zip archive, as torch.save writes since PyTorch 1.6", _RESAVE)
            yield open_archive(path, file, 0, size)
    except OSError as error:
        raise unreadable(path, error) from error


def open_archive(path: FilePath, file: IO[bytes], begin: int, size: int, where: str | None = None) -> TorchArchive:
    """An archive of torch.save in ``size`` bytes of a file. Raises CheckpointError if it is none, or not readable."""

    def read(ranges: Sequence[Range]) -> Sequence[bytes]:
        ((first, last),) = ranges
        if last - first > MAX_DIRECTORY:
            raise ValueError(f"its directory of {last - first:,} bytes is too long")
        file.seek(begin + first)
        return [file.read(last - first)]

    where = str(path) if where is None else where
    try:
        infos = ZipFile(RangeFile(read, size)).infolist()
        directory = {info.filename: info for info in infos}
        if len(directory) < len(infos):
            raise ValueError("a record of the zip archive appears twice")
    except (BadZipFile, ValueError, NotImplementedError, struct.error) as error:
        raise CheckpointError(f"{where}: not a readable zip archive: {error}", DAMAGED) from error
    pickles = [name for name in directory if name.count("/") == 1 and name.endswith("/data.pkl")]
    if len(pickles) != 1:
        raise CheckpointError(f"{where}: a zip archive, but not one of torch.save: it has no data.pkl", _RESAVE)
    prefetch(file, ((begin + info.header_offset, begin + info.header_offset + _HEADER) for info in infos))
    root = pickles[0].removesuffix("data.pkl")
    entries = {name.removeprefix(root): entry for name, entry in directory.items() if name.startswith(root)}
    if "constants.pkl" in entries:
        raise CheckpointError(f"{where}: a TorchScript program, which is code, not a state dict", _RESAVE)
    archive = TorchArchive(path, where, file, begin, size, entries)
    order = archive.record("byteorder") or b"little"
    if order != b"little":
        raise CheckpointError(f"{where}: its bytes are in {order[:20]!r} order, not little-endian", _RESAVE)
    return archive


def _holds_tensor(value: object) -> bool:
    todo, seen = [value], set()
    while todo:
        item = todo.pop()
        if isinstance(item, (PickledTensor, Storage)):
            return True
        if id(item) not in seen and isinstance(item, (dict, list, tuple)):
            seen.add(id(item))
            todo.extend(item.values() if isinstance(item, dict) else item)
    return False


def _locate(archive: TorchArchive, state: object) -> tuple[dict[str, TensorInfo], dict[str, str]]:
    """Return the tensors of a state dict, and the names of tied tensors, each with the first name of the same bytes.
    Entries without tensors are left out.
    """
    if not isinstance(state, dict):
        raise CheckpointError(f"{archive.path}: holds a {kind_of(state)}, not a dictionary of tensors", _RESAVE)
    first_of: dict[tuple[int, str, tuple[int, ...]], TensorInfo] = {}
    aliases: dict[str, str] = {}
    for name, value in state.items():
        if isinstance(value, PickledTensor) and isinstance(name, str):
            info = archive.place(name, value)
            same = info.offset if info.nbytes else -len(first_of)  # empty tensors are never tied
            first = first_of.setdefault((same, info.dtype, info.shape), info)
            if first is not info:
                aliases[name] = first.name
        elif _holds_tensor(value):
            what = "a tensor" if isinstance(value, PickledTensor) else f"a {kind_of(value)} with tensors"
            raise CheckpointError(
                f"{archive.path}: entry {quote(name)} is {what}; a state dict maps names to tensors",
                "save the state dict alone",
            )
    return {info.name: info for info in sorted(first_of.values(), key=lambda info: info.offset)}, aliases


# ------------------------------------------------------------------------------------------------------------- writing

_ALIGNMENT = 64
_STORAGES = {dtype: path for path, dtype in STORAGES.items() if path != "torch.storage.UntypedStorage"}


_LOCAL_CRC, _CENTRAL_CRC = 14, 16
"""Offsets of the CRC-32 in the header of an entry, and in its header in the directory at the end."""


def build_archive(
    tensors: Sequence[tuple[str, str, tuple[int, ...], int]],
    inside: str | None = None,
    entries: Mapping[str, int | float] = {},
    *,
    is_single: bool = False,
) -> Layout:
    """The layout of a file of tensors (name, dtype, shape, bytes); with ``inside`` they are that entry, beside others.

    With ``is_single`` it is the only tensor itself.

    Raises PlanError for a dtype that torch has not.
    """
    state = {name: pickled_tensor(i, name, dtype, shape) for i, (name, dtype, shape, _) in enumerate(tensors)}
    saved = state if inside is None else {**entries, inside: next(iter(state.values())) if is_single else state}
    return archive_of(saved, [(name, nbytes) for name, _, _, nbytes in tensors])


@lru_cache(maxsize=4096)
def tensor_archive(dtype: str, shape: tuple[int, ...], nbytes: int) -> Layout:
    """The layout of what torch.save writes of a tensor that is not in a dictionary; its name there is ``""``."""
    return archive_of(pickled_tensor(0, "", dtype, shape), [("", nbytes)])


def build_chunks(chunks: Sequence[tuple[str, str, tuple[int, ...], int]], objects: Mapping[str, bytes] = {}) -> Layout:
    """The layout of a file of chunks (name, dtype, shape, bytes), at most one of each tensor, and of objects: archives
    of torch.save.

    Archives begin at multiples of 64 bytes. Raises PlanError for a dtype that torch.save does not write.
    """
    offsets, fixed, crcs = list[int](), list[tuple[int, bytes]](), list[Crc]()
    ranges: dict[str, tuple[int, int]] = {}
    end = 0
    for name, archive in (
        *((name, tensor_archive(dtype, shape, nbytes)) for name, dtype, shape, nbytes in chunks),
        *((name, Layout(len(content), fixed=((0, content),))) for name, content in objects.items()),
    ):
        begin = -(-end // _ALIGNMENT) * _ALIGNMENT
        if begin > end:
            fixed.append((end, bytes(begin - end)))
        ranges[name] = (begin, archive.size)
        offsets += [begin + offset for offset in archive.offsets]
        fixed += [(begin + offset, content) for offset, content in archive.fixed]
        crcs += [
            Crc(begin + crc.begin, begin + crc.end, tuple(begin + each for each in crc.places)) for crc in archive.crcs
        ]
        end = begin + archive.size
    names = [name for name, *_ in chunks]
    return Layout(end, names, offsets, fixed=tuple(fixed), crcs=tuple(crcs), ranges=ranges)


def archive_of(saved: object, storages: Sequence[tuple[str, int]] = ()) -> Layout:
    """The layout of what torch.save writes: a pickle of ``saved``, and storages (name, bytes) with keys from 0 on."""
    infos, begins, fixed, end = list[ZipInfo](), list[int](), [(0, b"")], 0
    records: dict[str, bytes | int] = {"data.pkl": write_pickle(saved), "byteorder": b"little"}
    records |= {f"data/{i}": nbytes for i, (_, nbytes) in enumerate(storages)} | {"version": b"3\n"}
    for name, content in records.items():
        info = ZipInfo(f"archive/{name}")  # of 1 January 1980: nothing depends on when it was written
        info.create_system, info.create_version, info.header_offset = 0, 45, end
        data, hole = (b"", content) if isinstance(content, int) else (content, 0)
        info.CRC = zlib.crc32(data)
        info.file_size = info.compress_size = len(data) + hole
        padding = -(end + len(info.FileHeader()) + 4) % _ALIGNMENT
        info.extra = struct.pack("<2sH", b"FB", padding) + b"Z" * padding
        header, info.extra = info.FileHeader(), b""
        infos.append(info)
        begins.append(end + len(header))
        end = begins[-1] + info.file_size
        fixed[-1] = fixed[-1][0], fixed[-1][1] + header + data
        fixed += [(end, b"")] if hole else []
    directory = _Directory(end)
    with ZipFile(directory, "w") as archive:  # type: ignore[call-overload]
        archive.filelist += infos
    central = (at for at, part in directory.parts if part.startswith(b"PK\1\2"))
    fixed[-1] = fixed[-1][0], fixed[-1][1] + b"".join(part for _, part in directory.parts)
    crcs = tuple(
        Crc(begin, begin + content, (info.header_offset + _LOCAL_CRC, at + _CENTRAL_CRC))
        for content, info, begin, at in zip(records.values(), infos, begins, central, strict=True)
        if isinstance(content, int)
    )
    names, offsets = [name for name, _ in storages], [crc.begin for crc in crcs]
    return Layout(directory.end, names, offsets, fixed=tuple(fixed), crcs=crcs)


class _Directory:
    """Takes what ``zipfile`` writes behind the entries, from byte ``end`` on: parts, each with its offset."""

    def __init__(self, end: int) -> None:
        self.end, self.parts = end, list[tuple[int, bytes]]()

    def tell(self) -> int:
        return self.end

    def write(self, content: bytes) -> None:
        if content:
            self.parts.append((self.end, content))
            self.end += len(content)

    def flush(self) -> None:
        pass


# ------------------------------------------------------------------------------------------------------- the pickle


def pickled_tensor(key: int, name: str, dtype: str, shape: tuple[int, ...]) -> Inert:
    """A tensor in a storage of its own, as torch pickles it: what no kind of storage is for has one of bytes."""
    strides: list[int] = []
    count = 1
    for size in reversed(shape):
        strides.insert(0, count)
        count *= size
    bare = dtype not in _STORAGES
    if bare and dtype not in TORCH_NAMES:
        raise PlanError(f"tensor '{name}' is {dtype}, which torch.save does not write")
    storage = "torch.storage.UntypedStorage" if bare else _STORAGES[dtype]
    numel = count * DTYPE_BITS[dtype] // 8 if bare else count
    persistent = Persistent(("storage", Global(storage), str(key), "cpu", numel))
    arguments = (persistent, 0, shape, tuple(strides), False, Inert("collections.OrderedDict", ()))
    if bare:
        return Inert("torch._utils._rebuild_tensor_v3", (*arguments, Global(f"torch.{TORCH_NAMES[dtype]}")))
    return Inert("torch._utils._rebuild_tensor_v2", arguments)
