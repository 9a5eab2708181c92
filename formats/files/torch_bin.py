"""PyTorch's own file format (``.bin``, ``.pt``, ``.pth``): a zip archive of a pickle and the bytes of each storage.

A pickle is a program. Here it is never run: ``pickletools`` takes it apart, and the few instructions with which a state
dict is written are followed on stand-ins, so that what is learned of a tensor is where its bytes lie. The names that
may occur are a part of those that ``torch.load(..., weights_only=True)`` allows; any other is refused as it is there.
Neither torch is imported for it nor any tensor data read.

Source: ``torch/serialization.py``, ``torch/_utils.py`` and ``torch/_weights_only_unpickler.py`` of PyTorch 2.4 to 2.13.
"""

from __future__ import annotations

import math
import pickletools
import struct
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from formats.documents import LARGEST
from formats.errors import CheckpointError
from formats.files.safetensors import DTYPE_BITS, MAX_DIMS, TensorInfo
from formats.regular_files import open_file, unreadable

_DTYPES = {
    "torch.bool": "BOOL", "torch.uint8": "U8", "torch.int8": "I8", "torch.uint16": "U16", "torch.int16": "I16",
    "torch.uint32": "U32", "torch.int32": "I32", "torch.uint64": "U64", "torch.int64": "I64", "torch.float16": "F16",
    "torch.bfloat16": "BF16", "torch.float32": "F32", "torch.float64": "F64", "torch.complex64": "C64",
    "torch.float8_e4m3fn": "F8_E4M3", "torch.float8_e5m2": "F8_E5M2", "torch.float8_e4m3fnuz": "F8_E4M3FNUZ",
    "torch.float8_e5m2fnuz": "F8_E5M2FNUZ", "torch.float8_e8m0fnu": "F8_E8M0",
}  # fmt: skip
STORAGES = {
    "torch.BoolStorage": "BOOL", "torch.ByteStorage": "U8", "torch.CharStorage": "I8", "torch.ShortStorage": "I16",
    "torch.IntStorage": "I32", "torch.LongStorage": "I64", "torch.HalfStorage": "F16", "torch.BFloat16Storage": "BF16",
    "torch.FloatStorage": "F32", "torch.DoubleStorage": "F64", "torch.ComplexFloatStorage": "C64",
    "torch.storage.UntypedStorage": "U8",
}  # fmt: skip

_DAMAGED = "the file is damaged or still incomplete: fetch or copy it again"
_RESAVE = "load it with torch where you trust it, and save the state dict again with safetensors or torch.save"


@dataclass(frozen=True)
class _Global:
    """Stands for what a pickle refers to by name."""

    path: str


@dataclass(frozen=True)
class _Storage:
    """Stands for a storage: record ``data/<key>`` of the archive, ``numel`` elements of ``dtype``."""

    key: str
    dtype: str
    numel: int


@dataclass(frozen=True)
class _Tensor:
    """Stands for a tensor: a view of a storage. ``offset`` and ``strides`` count elements of ``dtype``."""

    storage: _Storage
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str


class _RefusedError(Exception):
    """What a pickle asks for and is not given."""


def read_bin(path: Path) -> tuple[dict[str, TensorInfo], dict[str, str]]:
    """Find where each tensor of a saved state dict lies in its file.

    Returns the tensors in increasing order of offset, and ``{alias: kept}``: of tensors that are the same bytes with
    the same shape and dtype (tied weights) the first of the state dict is kept. Entries that hold no tensor (numbers,
    strings, dtypes, and lists, tuples and dicts of these) are metadata, and left out.

    Raises ``CheckpointError`` for a pickle that names anything but plain tensors, for files older than PyTorch 1.6, and
    for tensors whose bytes are not contiguous, not little-endian or not in the file.
    """
    try:
        with open_file(path) as file:
            if file.read(2) != b"PK":
                _refuse_foreign(path, file)
            with zipfile.ZipFile(file) as archive:
                return _read_archive(path, file, archive)
    except OSError as error:
        raise unreadable(path, error) from error
    except (zipfile.BadZipFile, NotImplementedError, ValueError, struct.error, EOFError, OverflowError) as error:
        raise CheckpointError(f"{path}: not a readable zip archive: {error}", _DAMAGED) from error


def _refuse_foreign(path: Path, file: IO[bytes]) -> None:
    file.seek(0)
    if file.read(8) == b"version ":
        raise CheckpointError(f"{path}: this is not a PyTorch file but a git-lfs pointer", "run 'git lfs pull'")
    raise CheckpointError(f"{path}: not a zip archive, as torch.save writes since PyTorch 1.6", _RESAVE)


def _read_archive(
    path: Path, file: IO[bytes], archive: zipfile.ZipFile
) -> tuple[dict[str, TensorInfo], dict[str, str]]:
    records = {info.filename: info for info in archive.infolist()}
    if len(records) != len(archive.infolist()):
        raise CheckpointError(f"{path}: a record of the zip archive appears twice", _DAMAGED)
    pickles = [name for name in records if name.count("/") == 1 and name.endswith("/data.pkl")]
    if len(pickles) != 1:
        raise CheckpointError(f"{path}: a zip archive, but not one of torch.save: it has no data.pkl", _RESAVE)
    root = pickles[0].removesuffix("data.pkl")
    if root + "constants.pkl" in records:
        raise CheckpointError(f"{path}: a TorchScript program, which is code, not a state dict", _RESAVE)
    order = _read_record(path, file, records.get(root + "byteorder")) or b"little"
    if order != b"little":
        raise CheckpointError(f"{path}: its bytes are in {order[:20]!r} order, not little-endian", _RESAVE)
    state = _interpret(path, _read_record(path, file, records[pickles[0]]))
    return _locate(path, _state_dict(path, state), lambda key: _find(path, file, records.get(f"{root}data/{key}"), key))


def _read_record(path: Path, file: IO[bytes], info: zipfile.ZipInfo | None) -> bytes:
    if info is None:
        return b""
    offset, size = _find(path, file, info, info.filename)
    file.seek(offset)
    return file.read(size)


def _find(path: Path, file: IO[bytes], info: zipfile.ZipInfo | None, key: str) -> tuple[int, int]:
    """Offset and size (bytes) of a record's data in the file; torch stores it as it is, not compressed."""
    if info is None:
        raise CheckpointError(f"{path}: the data of storage {key!r} is missing from the archive", _DAMAGED)
    if info.compress_type != zipfile.ZIP_STORED or info.flag_bits & 1:
        raise CheckpointError(f"{path}: record {info.filename!r} is compressed or encrypted", _RESAVE)
    file.seek(info.header_offset)
    local = file.read(30)
    if len(local) < 30 or local[:4] != b"PK\3\4":
        raise CheckpointError(f"{path}: record {info.filename!r} does not begin where the archive says", _DAMAGED)
    offset = info.header_offset + 30 + int.from_bytes(local[26:28], "little") + int.from_bytes(local[28:30], "little")
    missing = offset + info.file_size - file.seek(0, 2)
    if missing > 0:
        raise CheckpointError(f"{path}: {missing} bytes of record {info.filename!r} are missing", _DAMAGED)
    return offset, info.file_size


def _state_dict(path: Path, state: object) -> dict[str, _Tensor]:
    """The tensors of a state dict; what holds no tensor is left out."""
    if not isinstance(state, dict):
        raise CheckpointError(f"{path}: holds a {_kind(state)}, not a dictionary of tensors", _RESAVE)
    found: dict[str, _Tensor] = {}
    for name, value in state.items():
        if isinstance(value, _Tensor) and isinstance(name, str):
            found[name] = value
        elif _holds_tensor(value):
            raise CheckpointError(
                f"{path}: entry {name!r:.100} is a {_kind(value)} with tensors; a state dict maps names to tensors",
                "save the state dict alone",
            )
    return found


def _kind(value: object) -> str:
    return type(value).__name__.strip("_").lower()


def _holds_tensor(value: object) -> bool:
    todo, seen = [value], set()
    while todo:
        item = todo.pop()
        if isinstance(item, (_Tensor, _Storage)):
            return True
        if id(item) not in seen and isinstance(item, (dict, list, tuple)):
            seen.add(id(item))
            todo.extend(item.values() if isinstance(item, dict) else item)
    return False


def _locate(
    path: Path, state: dict[str, _Tensor], find: Callable[[str], tuple[int, int]]
) -> tuple[dict[str, TensorInfo], dict[str, str]]:
    """Bytes of each tensor. ``find`` gives offset and size (bytes) of a storage by its key."""
    kept: dict[tuple[int, str, tuple[int, ...]], TensorInfo] = {}
    aliases: dict[str, str] = {}
    places: dict[str, tuple[int, int]] = {}
    for name, tensor in state.items():
        key = tensor.storage.key
        if key not in places:
            places[key] = find(key)
        info = _place(path, name, tensor, *places[key])
        same = info.offset if info.nbytes else -len(kept)  # empty tensors are never tied
        first = kept.setdefault((same, info.dtype, info.shape), info)
        if first is not info:
            aliases[name] = first.name
    return {info.name: info for info in sorted(kept.values(), key=lambda info: info.offset)}, aliases


def _place(path: Path, name: str, tensor: _Tensor, base: int, size: int) -> TensorInfo:
    """The bytes of a tensor whose storage is said to be the ``size`` bytes from byte ``base`` of the file."""
    if not _contiguous(tensor):
        raise CheckpointError(
            f"{path}: tensor {name!r} is not contiguous: shape {list(tensor.shape)}, strides {list(tensor.strides)}",
            "save it again after .contiguous()",
        )
    item = DTYPE_BITS[tensor.dtype] // 8
    begin, nbytes = tensor.offset * item, math.prod(tensor.shape) * item
    stored = tensor.storage.numel * DTYPE_BITS[tensor.storage.dtype] // 8
    if stored > size or begin + nbytes > stored:
        raise CheckpointError(
            f"{path}: tensor {name!r} is said to be bytes {begin} to {begin + nbytes} of a storage of {stored}, "
            f"of which the file has {size}",
            _DAMAGED,
        )
    return TensorInfo(name, tensor.dtype, tensor.shape, path, base + begin, nbytes)


def _contiguous(tensor: _Tensor) -> bool:
    """Whether the elements lie row-major without gaps; the strides of dimensions of size 1 say nothing."""
    expected = 1
    for size, stride in zip(reversed(tensor.shape), reversed(tensor.strides), strict=True):
        if size != 1 and stride != expected:
            return 0 in tensor.shape
        expected *= size
    return True


def _interpret(path: Path, pickled: bytes) -> object:
    """Follow a pickle on stand-ins; raises ``CheckpointError`` for one that is damaged or asks for more than data."""
    try:
        return _Machine().follow(pickled)
    except _RefusedError as error:
        raise CheckpointError(
            f"{path}: the pickle asks for {error}; only plain tensors are read (weights_only), and no code is run",
            "if you trust its author, save the weights again with safetensors",
        ) from error
    except (ValueError, TypeError, LookupError, AttributeError, OverflowError, RecursionError) as error:
        raise CheckpointError(f"{path}: the pickle is damaged: {error!s:.200}", _DAMAGED) from error


class _Machine:
    """The part of the pickle machine that a state dict needs, on stand-ins.

    Dictionaries are plain, attributes (``BUILD``) are dropped, and what would be called is looked up in ``_CALLS``.
    """

    def __init__(self) -> None:
        self.stack: list[Any] = []
        self.marks: list[int] = []
        self.memo: dict[int, Any] = {}

    def follow(self, pickled: bytes) -> object:
        """Follow all instructions up to STOP and return what is then on the stack."""
        for opcode, argument, _ in pickletools.genops(pickled):
            if opcode.name == "STOP":
                break
            if opcode.name in _CONSTANTS:
                self.stack.append(_CONSTANTS[opcode.name]())
            elif opcode.name in _LITERALS:
                self.stack.append(argument)
            elif opcode.name in _STEPS:
                _STEPS[opcode.name](self, argument)
            elif opcode.name not in ("PROTO", "FRAME"):
                raise _RefusedError(f"the instruction {opcode.name}")
        return self.stack.pop()

    def take(self, count: int | None = None) -> list[Any]:
        """Pop ``count`` items, or those above the last mark."""
        start = self.marks.pop() if count is None else len(self.stack) - count
        if start < 0:
            raise ValueError("the stack is empty")
        items = self.stack[start:]
        del self.stack[start:]
        return items

    def put(self, index: int | None) -> None:
        self.memo[len(self.memo) if index is None else index] = self.stack[-1]

    def name(self, path: str) -> None:
        if path not in _CALLS and path not in _DTYPES and path not in STORAGES and path not in _CLASSES:
            raise _RefusedError(repr(path) if len(path) < 100 else repr(path[:97] + "..."))
        self.stack.append(_Global(path))

    def extend(self, items: list[Any]) -> None:
        if not isinstance(self.stack[-1], list):
            raise _RefusedError("appending to something that is no list")
        self.stack[-1].extend(items)

    def set(self, items: list[Any]) -> None:
        target = self.stack[-1]
        # A key is hashed, and a crafted one (tuples, a million deep) would overflow the interpreter's own stack.
        if not isinstance(target, dict) or not all(isinstance(key, (str, int, bytes)) for key in items[::2]):
            raise _RefusedError("setting an item of something that is no dictionary, or under an unusual key")
        target.update(zip(items[::2], items[1::2], strict=True))

    def load(self) -> None:
        kind, storage, key, _, numel = self.stack.pop()
        if kind != "storage" or not isinstance(storage, _Global) or storage.path not in STORAGES:
            raise _RefusedError(f"a persistent {kind!r:.40}")
        if not isinstance(key, str) or not _are_sizes((numel,)):
            raise ValueError("a storage should have a name and a size")
        self.stack.append(_Storage(key, STORAGES[storage.path], numel))

    def call(self) -> None:
        function, arguments = self.take(2)
        if not isinstance(function, _Global) or function.path not in _CALLS:
            raise _RefusedError(f"a call of {getattr(function, 'path', _kind(function))}")
        self.stack.append(_CALLS[function.path](*arguments))

    def build(self) -> None:
        self.stack.pop()
        if not isinstance(self.stack[-1], dict):
            raise _RefusedError(f"setting the state of a {_kind(self.stack[-1])}")


def _are_sizes(values: object) -> bool:
    return (
        isinstance(values, tuple)
        and len(values) <= MAX_DIMS
        and all(type(value) is int and 0 <= value <= LARGEST for value in values)
    )


def _tensor(storage: object, offset: Any, shape: Any, strides: Any, dtype: str | None, metadata: object) -> _Tensor:
    if not isinstance(storage, _Storage):
        raise ValueError("a tensor without a storage")
    if not (_are_sizes((offset,)) and _are_sizes(shape) and _are_sizes(strides) and len(shape) == len(strides)):
        raise ValueError("a tensor's offset, shape and strides should be sizes")
    if metadata:
        raise _RefusedError("a tensor that is stored conjugated, negated or quantized")
    return _Tensor(storage, offset, shape, strides, dtype or storage.dtype)


def _rebuild_v2(
    storage: object, offset: object, shape: object, strides: object, _grad: object = None, _hooks: object = None,
    metadata: object = None,
) -> _Tensor:  # fmt: skip
    return _tensor(storage, offset, shape, strides, None, metadata)


def _rebuild_v3(
    storage: object, offset: object, shape: object, strides: object, _grad: object, _hooks: object, dtype: object,
    metadata: object = None,
) -> _Tensor:  # fmt: skip
    if not isinstance(dtype, _Global) or dtype.path not in _DTYPES:
        raise _RefusedError(f"a tensor of dtype {getattr(dtype, 'path', dtype)!r:.40}")
    return _tensor(storage, offset, shape, strides, _DTYPES[dtype.path], metadata)


def _rebuild_parameter(data: object, *_: object) -> object:
    return data


def _rebuild_from_type(function: object, kind: object, arguments: Any, _state: object) -> object:
    """A plain tensor or parameter that carries Python attributes; they are dropped."""
    path = getattr(function, "path", "")
    if not path.startswith("torch._utils._rebuild_") or getattr(kind, "path", "") not in _CLASSES:
        raise _RefusedError(f"a tensor of type {getattr(kind, 'path', kind)!r:.40}")
    return _CALLS[path](*arguments)


def _empty_dict(*arguments: object) -> dict[object, object]:
    if arguments:
        raise _RefusedError("a dictionary made from a list")
    return {}


_CALLS: dict[str, Callable[..., object]] = {
    "torch._utils._rebuild_tensor": _rebuild_v2,
    "torch._utils._rebuild_tensor_v2": _rebuild_v2,
    "torch._utils._rebuild_tensor_v3": _rebuild_v3,
    "torch._utils._rebuild_parameter": _rebuild_parameter,
    "torch._utils._rebuild_parameter_with_state": _rebuild_parameter,
    "torch._tensor._rebuild_from_type_v2": _rebuild_from_type,
    "collections.OrderedDict": _empty_dict,
    "torch.Size": lambda sizes: sizes,
    "torch.device": lambda *names: names,
}
_CLASSES = ("torch.Tensor", "torch.nn.parameter.Parameter")

# What torch.save writes (protocol 2), and what the same state dict takes in protocols 3 to 5.
_CONSTANTS: dict[str, Callable[[], object]] = {
    "NONE": lambda: None, "NEWTRUE": lambda: True, "NEWFALSE": lambda: False,
    "EMPTY_TUPLE": tuple, "EMPTY_LIST": list, "EMPTY_DICT": dict,
}  # fmt: skip
_LITERALS = {
    "BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT", "BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8",
    "SHORT_BINSTRING", "BINBYTES", "SHORT_BINBYTES", "BINBYTES8",
}  # fmt: skip
_STEPS: dict[str, Callable[[_Machine, Any], None]] = {
    "MARK": lambda machine, _: machine.marks.append(len(machine.stack)),
    "TUPLE": lambda machine, _: machine.stack.append(tuple(machine.take())),
    "TUPLE1": lambda machine, _: machine.stack.append(tuple(machine.take(1))),
    "TUPLE2": lambda machine, _: machine.stack.append(tuple(machine.take(2))),
    "TUPLE3": lambda machine, _: machine.stack.append(tuple(machine.take(3))),
    "APPEND": lambda machine, _: machine.extend(machine.take(1)),
    "APPENDS": lambda machine, _: machine.extend(machine.take()),
    "SETITEM": lambda machine, _: machine.set(machine.take(2)),
    "SETITEMS": lambda machine, _: machine.set(machine.take()),
    "BINPUT": lambda machine, index: machine.put(index),
    "LONG_BINPUT": lambda machine, index: machine.put(index),
    "MEMOIZE": lambda machine, _: machine.put(None),
    "BINGET": lambda machine, index: machine.stack.append(machine.memo[index]),
    "LONG_BINGET": lambda machine, index: machine.stack.append(machine.memo[index]),
    "GLOBAL": lambda machine, path: machine.name(path.replace(" ", ".", 1)),
    "STACK_GLOBAL": lambda machine, _: machine.name(".".join(machine.take(2))),
    "BINPERSID": lambda machine, _: machine.load(),
    "REDUCE": lambda machine, _: machine.call(),
    "BUILD": lambda machine, _: machine.build(),
}
