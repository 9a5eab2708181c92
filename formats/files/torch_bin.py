"""PyTorch's own file format (``.bin``, ``.pt``, ``.pth``): a zip archive of a pickle and the bytes of each storage.

The pickle is not run (see ``formats.files.pickles``): what is learned of a tensor is where its bytes lie. The names
that may occur are a part of those that ``torch.load(..., weights_only=True)`` allows. Neither torch is imported for it
nor any tensor data read.

Source: ``torch/serialization.py`` of PyTorch 2.4 to 2.13.

The directory of a zip archive that is a range of a file is read without its data. Source: PKWARE's APPNOTE.TXT 6.3.10,
4.3 to 4.5.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import IO, NamedTuple

from formats.errors import CheckpointError
from formats.files.pickles import LARGEST_PICKLE, TENSORS, Names, Storage, Tensor, kind_of, quote, read_pickle
from formats.files.safetensors import TensorInfo
from formats.store import FilePath, open_file, unreadable

Read = Callable[[int, int], bytes]
"""Reads so many bytes of the archive from an offset on; fewer, where it ends."""

MAX_DIRECTORY = 256 << 20
"""Bytes of a directory; an entry has some 70."""
_END, _END_64, _LOCATOR_64, _CENTRAL, _LOCAL = b"PK\5\6", b"PK\6\6", b"PK\6\7", b"PK\1\2", b"PK\3\4"
_MOST_32, _MOST_16 = 0xFFFFFFFF, 0xFFFF


class Entry(NamedTuple):
    """An entry: the offset of its header in the archive, the bytes of its data, and whether these are as they are."""

    name: str
    at: int
    size: int
    is_plain: bool


def read_directory(read_range: Read, size: int) -> dict[str, Entry]:
    """The entries of an archive of ``size`` bytes, by name, in their order.

    Raises ValueError with the reason if there is none, or if it contradicts itself.
    """
    count, begin, length = _find_directory(read_range, size)
    if not 0 <= begin <= begin + length <= size or length > MAX_DIRECTORY:
        raise ValueError(f"its directory of {length:,} bytes from byte {begin:,} on is not in its {size:,} bytes")
    content, place = read_range(begin, length), 0
    entries: dict[str, Entry] = {}
    for _ in range(count):
        fixed = content[place : place + 46]
        if len(fixed) < 46 or fixed[:4] != _CENTRAL:
            raise ValueError("its directory ends before its last entry")
        flags, method = struct.unpack("<HH", fixed[8:12])
        packed, plain, name, extra, comment = struct.unpack("<IIHHH", fixed[20:34])
        (at,) = struct.unpack("<I", fixed[42:46])
        behind = place + 46 + name
        key = content[place + 46 : behind].decode("utf-8", "surrogateescape")
        if _MOST_32 in (packed, plain, at):
            plain, packed, at = _in_64_bits(content[behind : behind + extra], plain, packed, at)
        if key in entries:
            raise ValueError("a record of the zip archive appears twice")
        entries[key] = Entry(key, at, plain, method == 0 and not flags & 1 and packed == plain)
        place = behind + extra + comment
    if place > length:
        raise ValueError("its directory ends within an entry")
    return entries


def data_offset(read_range: Read, entry: Entry) -> int | None:
    """The offset of an entry's data in the archive; None if no entry begins where the directory says."""
    local = read_range(entry.at, 30)
    if len(local) < 30 or local[:4] != _LOCAL:
        return None
    name, extra = struct.unpack("<HH", local[26:30])
    return int(entry.at + 30 + name + extra)


def _find_directory(read_range: Read, size: int) -> tuple[int, int, int]:
    """The number of entries, and offset and length (bytes) of the directory."""
    end = size - 22
    tail = read_range(max(0, end), 22)
    if tail[:4] != _END or tail[20:] != b"\0\0":  # a comment may stand behind it
        start = max(0, size - 22 - _MOST_16)
        tail = read_range(start, size - start)
        place = tail.rfind(_END)
        if place < 0 or len(tail) < place + 22:
            raise ValueError("its directory is missing")
        end, tail = start + place, tail[place : place + 22]
    count, length, begin = struct.unpack("<HII", tail[10:20])
    locator = read_range(end - 20, 20) if end >= 20 else b""
    if locator[:4] != _LOCATOR_64:
        return count, begin, length
    (offset,) = struct.unpack("<Q", locator[8:16])
    record = read_range(min(offset, size), 56)
    if len(record) < 56 or record[:4] != _END_64:
        raise ValueError("its directory of 64 bits is missing")
    count, length, begin = struct.unpack("<QQQ", record[32:56])
    return count, begin, length


def _in_64_bits(extra: bytes, *values: int) -> tuple[int, ...]:
    """The values, of which those that 32 bits do not hold stand in an extra field."""
    place = 0
    while place + 4 <= len(extra):
        kind, length = struct.unpack("<HH", extra[place : place + 4])
        if kind == 1:
            numbers = iter(struct.unpack(f"<{length // 8}Q", extra[place + 4 : place + 4 + length // 8 * 8]))
            return tuple(next(numbers, value) if value == _MOST_32 else value for value in values)
        place += 4 + length
    return values


_DAMAGED = "the file is damaged or still incomplete: fetch or copy it again"
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
        return _locate(path, _state_dict(path, state), archive.locate)


class Saved(NamedTuple):
    """What a training program saved in a file: where the tensors of some entries lie, and what the others are.

    ``aliases`` are as those of ``read_bin``, for each entry. ``extras`` has numbers and texts, and of anything else its
    kind.
    """

    tensors: dict[str, dict[str, TensorInfo]]
    aliases: dict[str, dict[str, str]]
    extras: dict[str, int | float | str]


def read_saved(path: FilePath, is_wanted: Callable[[str], bool]) -> Saved:
    """Find where the tensors of the ``is_wanted`` entries of a saved dictionary lie in its file.

    What programs save beside tensors (settings, states of random generators) is not made. Raises ``CheckpointError``.
    """
    with torch_file(path) as archive:
        state = archive.read(TENSORS.with_classes(*BESIDE), "tensors and plain settings are read")
        if not isinstance(state, dict):
            raise CheckpointError(f"{path}: holds a {kind_of(state)}, not a dictionary", _RESAVE)
        entries = {str(name): value for name, value in state.items()}
        located = {n: _locate(path, _state_dict(path, of), archive.locate) for n, of in entries.items() if is_wanted(n)}
    plain = {n: v if isinstance(v, (int, float, str)) else kind_of(v) for n, v in entries.items() if n not in located}
    return Saved({n: of[0] for n, of in located.items()}, {n: of[1] for n, of in located.items()}, plain)


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
"""What training programs save beside tensors (Megatron-Core, core/safe_globals.py, and what its fields are of)."""


def _refuse_foreign(path: FilePath, file: IO[bytes]) -> None:
    file.seek(0)
    if file.read(8) == b"version ":
        raise CheckpointError(f"{path}: this is not a PyTorch file but a git-lfs pointer", "run 'git lfs pull'")
    raise CheckpointError(f"{path}: not a zip archive, as torch.save writes since PyTorch 1.6", _RESAVE)


@dataclass(frozen=True)
class TorchArchive:
    """An archive that torch.save wrote: a whole file, or a range of one, from byte ``begin`` on.

    ``where`` is what messages begin with. ``entries`` are without the name of the folder that torch puts them in.
    """

    where: str
    file: IO[bytes]
    begin: int
    size: int
    entries: dict[str, Entry]

    def content(self, offset: int, length: int) -> bytes:
        """Bytes of the archive."""
        return _content(self.file, self.begin, self.size, offset, length)

    def record(self, name: str) -> bytes:
        """The content of an entry; nothing if there is none."""
        if name not in self.entries:
            return b""
        offset, size = self._find(self.entries[name])
        if size > LARGEST_PICKLE:
            raise CheckpointError(f"{self.where}: its {name} has {size:,} bytes, at most {LARGEST_PICKLE:,} are read")
        return self.content(offset - self.begin, size)

    def read(self, names: Names, may: str) -> object:
        """What was saved, on stand-ins (see ``formats.files.pickles``)."""
        return read_pickle(self.record("data.pkl"), names, self.where, may)

    def locate(self, storage: Storage) -> tuple[int, int]:
        """Offset in the file and size (bytes) of a storage's data."""
        entry = self.entries.get(f"data/{storage.key}")
        if entry is None:
            key = f"{storage.key!r:.100}"
            raise CheckpointError(f"{self.where}: the data of storage {key} is missing from the archive", _DAMAGED)
        return self._find(entry)

    def _find(self, entry: Entry) -> tuple[int, int]:
        if not entry.is_plain:
            raise CheckpointError(f"{self.where}: record {entry.name!r:.100} is compressed or encrypted", _RESAVE)
        offset = data_offset(self.content, entry)
        if offset is None:
            raise CheckpointError(
                f"{self.where}: record {entry.name!r:.100} does not begin where the archive says", _DAMAGED
            )
        missing = offset + entry.size - self.size
        if missing > 0:
            raise CheckpointError(f"{self.where}: {missing} bytes of record {entry.name!r:.100} are missing", _DAMAGED)
        return self.begin + offset, entry.size


@contextmanager
def torch_file(path: FilePath) -> Iterator[TorchArchive]:
    """A whole file of torch.save, open. Raises CheckpointError if it is none, or not readable."""
    try:
        with open_file(path) as file:
            if file.read(2) != b"PK":
                _refuse_foreign(path, file)
            yield open_archive(path, file, 0, file.seek(0, 2))
    except OSError as error:
        raise unreadable(path, error) from error


def open_archive(where: FilePath | str, file: IO[bytes], begin: int, size: int) -> TorchArchive:
    """An archive of torch.save in ``size`` bytes of a file. Raises CheckpointError if it is none, or not readable."""

    try:
        directory = read_directory(partial(_content, file, begin, size), size)
    except ValueError as error:
        raise CheckpointError(f"{where}: not a readable zip archive: {error}", _DAMAGED) from error
    pickles = [name for name in directory if name.count("/") == 1 and name.endswith("/data.pkl")]
    if len(pickles) != 1:
        raise CheckpointError(f"{where}: a zip archive, but not one of torch.save: it has no data.pkl", _RESAVE)
    root = pickles[0].removesuffix("data.pkl")
    entries = {name.removeprefix(root): entry for name, entry in directory.items() if name.startswith(root)}
    if "constants.pkl" in entries:
        raise CheckpointError(f"{where}: a TorchScript program, which is code, not a state dict", _RESAVE)
    archive = TorchArchive(str(where), file, begin, size, entries)
    order = archive.record("byteorder") or b"little"
    if order != b"little":
        raise CheckpointError(f"{where}: its bytes are in {order[:20]!r} order, not little-endian", _RESAVE)
    return archive


def _content(file: IO[bytes], begin: int, size: int, offset: int, length: int) -> bytes:
    """Bytes of the ``size`` bytes from byte ``begin`` of a file, as far as they are there."""
    if not 0 <= offset < size:
        return b""
    file.seek(begin + offset)
    return file.read(min(length, size - offset))


def _state_dict(path: FilePath, state: object) -> dict[str, Tensor]:
    """The tensors of a state dict; what holds no tensor is left out."""
    if not isinstance(state, dict):
        raise CheckpointError(f"{path}: holds a {kind_of(state)}, not a dictionary of tensors", _RESAVE)
    tensors: dict[str, Tensor] = {}
    for name, value in state.items():
        if isinstance(value, Tensor) and isinstance(name, str):
            tensors[name] = value
        elif _holds_tensor(value):
            what = "a tensor" if isinstance(value, Tensor) else f"a {kind_of(value)} with tensors"
            raise CheckpointError(
                f"{path}: entry {quote(name)} is {what}; a state dict maps names to tensors",
                "save the state dict alone",
            )
    return tensors


def _holds_tensor(value: object) -> bool:
    todo, seen = [value], set()
    while todo:
        item = todo.pop()
        if isinstance(item, (Tensor, Storage)):
            return True
        if id(item) not in seen and isinstance(item, (dict, list, tuple)):
            seen.add(id(item))
            todo.extend(item.values() if isinstance(item, dict) else item)
    return False


def _locate(
    path: FilePath, state: dict[str, Tensor], find: Callable[[Storage], tuple[int, int]]
) -> tuple[dict[str, TensorInfo], dict[str, str]]:
    """Bytes of each tensor. ``find`` gives offset and size (bytes) of a storage."""
    first_of: dict[tuple[int, str, tuple[int, ...]], TensorInfo] = {}
    aliases: dict[str, str] = {}
    places: dict[str, tuple[int, int]] = {}
    for name, tensor in state.items():
        key = tensor.storage.key
        if key not in places:
            places[key] = find(tensor.storage)
        info = place_of(path, path, name, tensor, *places[key])
        same = info.offset if info.nbytes else -len(first_of)  # empty tensors are never tied
        first = first_of.setdefault((same, info.dtype, info.shape), info)
        if first is not info:
            aliases[name] = first.name
    return {info.name: info for info in sorted(first_of.values(), key=lambda info: info.offset)}, aliases


def place_of(where: FilePath | str, file: FilePath, name: str, tensor: Tensor, base: int, size: int) -> TensorInfo:
    """The bytes of a tensor whose storage is said to be the ``size`` bytes from byte ``base`` of ``file``.

    Raises CheckpointError, which begins with ``where``, if they are not contiguous or not all there.
    """
    if not tensor.is_contiguous:
        raise CheckpointError(
            f"{where}: tensor {name!r} is not contiguous: shape {list(tensor.shape)}, strides {list(tensor.strides)}",
            "save it again after .contiguous()",
        )
    begin, nbytes, stored = tensor.begin, tensor.nbytes, tensor.storage.nbytes
    if stored > size or begin + nbytes > stored:
        raise CheckpointError(
            f"{where}: tensor {name!r} is said to be bytes {begin} to {begin + nbytes} of a storage of {stored}, "
            f"of which the file has {size}",
            _DAMAGED,
        )
    return TensorInfo(name, tensor.dtype, tensor.shape, file, base + begin, nbytes)
