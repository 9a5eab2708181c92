"""Tensors in the pickles of torch: stand-ins that say in which record of an archive the bytes of a tensor lie.

Source: ``torch/serialization.py``, ``torch/_utils.py`` and ``torch/_weights_only_unpickler.py`` of PyTorch 2.4 to 2.13.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from formats.documents import LARGEST
from formats.files.pickles import Global, Names, RefusedError, kind_of, shown
from formats.files.safetensors import DTYPE_BITS, MAX_DIMS

DTYPES: Mapping[str, str] = {
    "torch.bool": "BOOL", "torch.uint8": "U8", "torch.int8": "I8", "torch.uint16": "U16", "torch.int16": "I16",
    "torch.uint32": "U32", "torch.int32": "I32", "torch.uint64": "U64", "torch.int64": "I64", "torch.float16": "F16",
    "torch.bfloat16": "BF16", "torch.float32": "F32", "torch.float64": "F64", "torch.complex64": "C64",
    "torch.float8_e4m3fn": "F8_E4M3", "torch.float8_e5m2": "F8_E5M2", "torch.float8_e4m3fnuz": "F8_E4M3FNUZ",
    "torch.float8_e5m2fnuz": "F8_E5M2FNUZ", "torch.float8_e8m0fnu": "F8_E8M0",
}  # fmt: skip
STORAGES: Mapping[str, str] = {
    "torch.BoolStorage": "BOOL", "torch.ByteStorage": "U8", "torch.CharStorage": "I8", "torch.ShortStorage": "I16",
    "torch.IntStorage": "I32", "torch.LongStorage": "I64", "torch.HalfStorage": "F16", "torch.BFloat16Storage": "BF16",
    "torch.FloatStorage": "F32", "torch.DoubleStorage": "F64", "torch.ComplexFloatStorage": "C64",
    "torch.storage.UntypedStorage": "U8",
}  # fmt: skip


@dataclass(frozen=True)
class Storage:
    """Stands for a storage: record ``data/<key>`` of the archive, ``numel`` elements of ``dtype``."""

    key: str
    dtype: str
    numel: int

    @property
    def nbytes(self) -> int:
        """Its size in bytes."""
        return self.numel * DTYPE_BITS[self.dtype] // 8


@dataclass(frozen=True)
class Tensor:
    """Stands for a tensor: a view of a storage. ``offset`` and ``strides`` count elements of ``dtype``."""

    storage: Storage
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str

    @property
    def begin(self) -> int:
        """The offset in bytes of its first element in the storage."""
        return self.offset * DTYPE_BITS[self.dtype] // 8

    @property
    def nbytes(self) -> int:
        """Its size in bytes."""
        return math.prod(self.shape) * DTYPE_BITS[self.dtype] // 8

    @property
    def is_contiguous(self) -> bool:
        """Whether the elements lie row-major without gaps; the strides of dimensions of size 1 say nothing."""
        expected = 1
        for size, stride in zip(reversed(self.shape), reversed(self.strides), strict=True):
            if size != 1 and stride != expected:
                return 0 in self.shape
            expected *= size
        return True


def are_sizes(values: object) -> bool:
    """Whether this is a tuple of sizes, not too many."""
    return (
        isinstance(values, tuple)
        and len(values) <= MAX_DIMS
        and all(type(value) is int and 0 <= value <= LARGEST for value in values)
    )


def _load(persistent: Any) -> Storage:
    """What the persistent id of a storage stands for."""
    if type(persistent) is not tuple or len(persistent) != 5:
        raise ValueError("a storage should be described by five values")
    kind, storage, key, _, numel = persistent
    if kind != "storage" or not isinstance(storage, Global) or storage.path not in STORAGES:
        raise RefusedError(f"a persistent {shown(kind)}")
    if not isinstance(key, str) or not are_sizes((numel,)):
        raise ValueError("a storage should have a name and a size")
    return Storage(key, STORAGES[storage.path], numel)


def _tensor(storage: object, offset: Any, shape: Any, strides: Any, dtype: str | None, metadata: object) -> Tensor:
    if not isinstance(storage, Storage):
        raise ValueError("a tensor without a storage")
    if not (are_sizes((offset,)) and are_sizes(shape) and are_sizes(strides) and len(shape) == len(strides)):
        raise ValueError("a tensor's offset, shape and strides should be sizes")
    if metadata:
        raise RefusedError("a tensor that is stored conjugated, negated or quantized")
    return Tensor(storage, offset, shape, strides, dtype or storage.dtype)


def _rebuild_v2(
    storage: object, offset: object, shape: object, strides: object, _grad: object = None, _hooks: object = None,
    metadata: object = None,
) -> Tensor:  # fmt: skip
    return _tensor(storage, offset, shape, strides, None, metadata)


def _rebuild_v3(
    storage: object, offset: object, shape: object, strides: object, _grad: object, _hooks: object, dtype: object,
    metadata: object = None,
) -> Tensor:  # fmt: skip
    if not isinstance(dtype, Global) or dtype.path not in DTYPES:
        raise RefusedError(f"a tensor of dtype {kind_of(dtype)}")
    return _tensor(storage, offset, shape, strides, DTYPES[dtype.path], metadata)


def _rebuild_parameter(data: object, *_: object) -> object:
    return data


def _rebuild_from_type(function: object, kind: object, arguments: Any, _state: object) -> object:
    """A plain tensor or parameter that carries Python attributes; they are dropped."""
    path = getattr(function, "path", "")
    if not path.startswith("torch._utils._rebuild_") or getattr(kind, "path", "") not in _CLASSES:
        raise RefusedError(f"a tensor of type {kind_of(kind)}")
    return _CALLS[path](*arguments)


def empty_dict(*arguments: object) -> dict[object, object]:
    """An OrderedDict, which is filled later. Raises RefusedError for one that is made from something."""
    if arguments:
        raise RefusedError("a dictionary made from a list")
    return {}


def size_of(sizes: object) -> tuple[int, ...]:
    """A ``torch.Size``. Raises ValueError for anything but sizes."""
    found = tuple(sizes) if isinstance(sizes, (list, tuple)) else None
    if found is None or not are_sizes(found):
        raise ValueError("a torch.Size should be of sizes")
    return found


_CALLS: dict[str, Callable[..., object]] = {
    "torch._utils._rebuild_tensor": _rebuild_v2,
    "torch._utils._rebuild_tensor_v2": _rebuild_v2,
    "torch._utils._rebuild_tensor_v3": _rebuild_v3,
    "torch._utils._rebuild_parameter": _rebuild_parameter,
    "torch._utils._rebuild_parameter_with_state": _rebuild_parameter,
    "torch._tensor._rebuild_from_type_v2": _rebuild_from_type,
    "collections.OrderedDict": empty_dict,
    "torch.Size": size_of,
    "torch.device": lambda *names: names,
}
_CLASSES = ("torch.Tensor", "torch.nn.parameter.Parameter")

TENSORS = Names(_CALLS, others=frozenset([*DTYPES, *STORAGES, *_CLASSES]), load=_load)
"""What a state dict names: a part of what ``torch.load(..., weights_only=True)`` allows."""
