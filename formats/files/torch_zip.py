"""Where everything lies in a PyTorch file (``.pth``) of a state dict: a zip archive, laid out before it is written.

The archive has stored entries only: ``data.pkl``, a pickle of a dict of tensors, ``byteorder``, ``version``, and one
entry for the bytes of each tensor, which begin at a multiple of 64 bytes as torch's own writer puts them. All bytes but
the tensors' and the CRC-32 of their entries are known from names, dtypes and shapes. Neither torch nor pickle is
needed. ``torch.load`` does not compare the CRC-32, ``zipfile`` and ``unzip`` do.

Source: ``torch/serialization.py`` and ``caffe2/serialize/inline_container.cc`` of PyTorch 2.4 to 2.13; PKWARE's
APPNOTE.TXT 6.3.10, 4.3 to 4.5.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from formats.errors import PlanError
from formats.files.checksum import Crc
from formats.files.pickles import STORAGES, Global, Inert, Persistent, write_pickle
from formats.files.safetensors import DTYPE_BITS, TORCH_NAMES

_ROOT = "archive"
_ALIGNMENT = 64
_STORAGES = {dtype: path for path, dtype in STORAGES.items() if path != "torch.storage.UntypedStorage"}
_MOST_32, _MOST_16 = 0xFFFFFFFF, 0xFFFF


@dataclass(frozen=True)
class Archive:
    """The layout of a file: its size in bytes, the offset of each tensor, what else is in it, and its CRC-32s."""

    size: int
    places: tuple[tuple[str, int], ...]
    fixed: tuple[tuple[int, bytes], ...]
    crcs: tuple[Crc, ...]


@dataclass(frozen=True)
class _Entry:
    """An entry; ``content`` is None for the bytes of a tensor. ``at`` is the offset of its header."""

    name: bytes
    size: int
    content: bytes | None
    at: int

    @property
    def crc(self) -> int:
        return 0 if self.content is None else zlib.crc32(self.content)

    @property
    def is_large(self) -> bool:
        return self.size >= _MOST_32

    @property
    def local(self) -> bytes:
        """The header before the data, with as much padding as the data needs to be aligned."""
        large = struct.pack("<HHQQ", 1, 16, self.size, self.size) if self.is_large else b""
        begin = self.at + 30 + len(self.name) + len(large) + 4
        padding = -begin % _ALIGNMENT
        extra = large + struct.pack("<2sH", b"FB", padding) + b"Z" * padding
        return self._fields(b"PK\3\4", b"", extra, b"", self.at) + self.name + extra

    @property
    def central(self) -> bytes:
        """The header in the directory at the end."""
        numbers = [self.size, self.size] if self.is_large else []
        numbers += [self.at] if self.at >= _MOST_32 else []
        extra = struct.pack(f"<HH{len(numbers)}Q", 1, 8 * len(numbers), *numbers) if numbers else b""
        behind = struct.pack("<HHHII", 0, 0, 0, 0, min(self.at, _MOST_32))
        return self._fields(b"PK\1\2", b"\x2d\0", extra, behind, self.at) + self.name + extra

    def _fields(self, signature: bytes, made_by: bytes, extra: bytes, behind: bytes, at: int) -> bytes:
        version = 45 if self.is_large or (behind and at >= _MOST_32) else 20
        size, day = min(self.size, _MOST_32), 0x21  # 1 January 1980: nothing depends on when it was written
        sizes = struct.pack("<IIIHH", self.crc, size, size, len(self.name), len(extra))
        return signature + made_by + struct.pack("<HHHHH", version, 0, 0, 0, day) + sizes + behind


_LOCAL_CRC, _CENTRAL_CRC = 14, 16
"""Where the CRC-32 stands in either header."""


def build_archive(
    tensors: Sequence[tuple[str, str, tuple[int, ...], int]],
    inside: str | None = None,
    entries: Mapping[str, int | float] = {},
    *,
    is_single: bool = False,
) -> Archive:
    """The layout of a file of tensors (name, dtype, shape, bytes); with ``inside`` they are that entry, beside others.

    With ``is_single`` it is the only tensor itself.

    Raises PlanError for a dtype that torch has not.
    """
    state = {name: pickled_tensor(i, name, dtype, shape) for i, (name, dtype, shape, _) in enumerate(tensors)}
    saved = state if inside is None else {**entries, inside: next(iter(state.values())) if is_single else state}
    return archive_of(saved, [(name, nbytes) for name, _, _, nbytes in tensors])


@lru_cache(maxsize=4096)
def tensor_archive(dtype: str, shape: tuple[int, ...], nbytes: int) -> Archive:
    """The layout of what torch.save writes of a tensor that is not in a dictionary; its name there is ``""``."""
    return archive_of(pickled_tensor(0, "", dtype, shape), [("", nbytes)])


def archive_of(saved: object, storages: Sequence[tuple[str, int]] = ()) -> Archive:
    """The layout of what torch.save writes: a pickle of ``saved``, and storages (name, bytes) with keys from 0 on."""
    records = [("data.pkl", write_pickle(saved)), ("byteorder", b"little")]
    entries: list[_Entry] = []
    offset = 0
    for name, content, size in [
        *((name, content, len(content)) for name, content in records),
        *((f"data/{i}", None, nbytes) for i, (_, nbytes) in enumerate(storages)),
        ("version", b"3\n", 2),
    ]:
        entries.append(_Entry(f"{_ROOT}/{name}".encode(), size, content, offset))
        offset += len(entries[-1].local) + size
    return _layout([name for name, _ in storages], entries, offset)


def _layout(names: Sequence[str], entries: Sequence[_Entry], directory: int) -> Archive:
    fixed: list[tuple[int, bytes]] = []
    crcs: list[Crc] = []
    places: list[tuple[str, int]] = []
    offset = directory
    for entry in entries:
        local, central = entry.local, entry.central
        begin = entry.at + len(local)
        if entry.content is None:
            fixed += [*_around(entry.at, local, _LOCAL_CRC), *_around(offset, central, _CENTRAL_CRC)]
            crcs.append(Crc(begin, begin + entry.size, (entry.at + _LOCAL_CRC, offset + _CENTRAL_CRC)))
            places.append((names[len(places)], begin))
        else:
            fixed += [(entry.at, local + entry.content), (offset, central)]
        offset += len(central)
    end = _end(len(entries), offset - directory, directory, offset)
    return Archive(offset + len(end), tuple(places), tuple(_joined([*sorted(fixed), (offset, end)])), tuple(crcs))


def _joined(fixed: Sequence[tuple[int, bytes]]) -> Iterator[tuple[int, bytes]]:
    """The same bytes, with those that lie end to end in one piece."""
    parts: list[bytes] = []
    begin = end = 0
    for offset, content in fixed:
        if parts and offset != end:
            yield begin, b"".join(parts)
            parts = []
        begin = begin if parts else offset
        parts.append(content)
        end = offset + len(content)
    if parts:
        yield begin, b"".join(parts)


def _around(offset: int, header: bytes, hole: int) -> Iterator[tuple[int, bytes]]:
    """A header without its CRC-32."""
    yield offset, header[:hole]
    yield offset + hole + 4, header[hole + 4 :]


def _end(count: int, size: int, directory: int, end: int) -> bytes:
    """The end of the archive: its directory's place, in 64 bits too if 32 do not hold it."""
    large = b""
    if count >= _MOST_16 or directory >= _MOST_32:
        large = b"PK\6\6" + struct.pack("<QHHIIQQQQ", 44, 45, 45, 0, 0, count, count, size, directory)
        large += b"PK\6\7" + struct.pack("<IQI", 0, end, 1)
    few, begin = min(count, _MOST_16), min(directory, _MOST_32)
    return large + b"PK\5\6" + struct.pack("<HHHHIIH", 0, 0, few, few, size, begin, 0)


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
