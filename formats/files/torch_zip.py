"""Where everything lies in a PyTorch file (``.pth``) of a state dict: a zip archive, laid out before it is written.

The archive has stored entries only: ``data.pkl``, a pickle of a dict of tensors, ``byteorder``, ``version``, and one
entry for the bytes of each tensor, which begin at a multiple of 64 bytes as torch's own writer puts them. All bytes but
the tensors' and the CRC-32 of their entries are known from names, dtypes and shapes: ``zipfile`` makes the headers.
Neither torch nor pickle is needed. ``torch.load`` does not compare the CRC-32, ``zipfile`` and ``unzip`` do.

Source: ``torch/serialization.py`` and ``caffe2/serialize/inline_container.cc`` of PyTorch 2.4 to 2.13; PKWARE's
APPNOTE.TXT 6.3.10, 4.3 to 4.5.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from zipfile import ZipFile, ZipInfo

from formats.errors import PlanError
from formats.files.checksum import Crc
from formats.files.pickles import STORAGES, Global, Inert, Persistent, write_pickle
from formats.files.safetensors import DTYPE_BITS, TORCH_NAMES

_ALIGNMENT = 64
_STORAGES = {dtype: path for path, dtype in STORAGES.items() if path != "torch.storage.UntypedStorage"}


@dataclass(frozen=True)
class Archive:
    """The layout of a file: its size in bytes, the offset of each tensor, what else is in it, and its CRC-32s.

    In ``fixed`` zeros stand for the CRC-32s, which are written over when all else is there. A ``.distcp`` file has an
    archive for each tensor and object: ``ranges`` has their offsets and lengths.
    """

    size: int
    places: tuple[tuple[str, int], ...]
    fixed: tuple[tuple[int, bytes], ...]
    crcs: tuple[Crc, ...]
    ranges: Mapping[str, tuple[int, int]] = field(default_factory=dict)


_LOCAL_CRC, _CENTRAL_CRC = 14, 16
"""Where the CRC-32 stands in the header of an entry, and in its header in the directory at the end."""


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
    places = tuple((name, crc.begin) for (name, _), crc in zip(storages, crcs, strict=True))
    return Archive(directory.end, places, tuple(fixed), crcs)


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
