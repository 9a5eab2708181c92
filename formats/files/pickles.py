"""Pickles as data: a machine that follows one on stand-ins, from a closed list of names, and a writer of the same.

A pickle is a program. Here it is never run: nothing that it names is imported or called. A name becomes a ``Global``,
an object of a listed class an ``Inert`` with its arguments and its state, and what a call of a name makes is looked up
in a table of functions of the reader's. Any other name, and any instruction that such data does not need, is refused.
The machine keeps a flat stack, hashes no nested key, and makes at most one thing for each instruction.

A tensor in a pickle of torch's becomes a ``PickledTensor``, which says in which record of an archive its bytes lie.

Source: ``Lib/pickle.py`` and ``Lib/pickletools.py`` of Python 3.13 (protocols 2 to 5);
``torch/serialization.py``, ``torch/_utils.py`` and ``torch/_weights_only_unpickler.py`` of PyTorch 2.4 to 2.13.
"""

from __future__ import annotations

import itertools
import pickletools
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from io import BytesIO
from typing import Any

from reshard.formats.documents import DEEPEST, LARGEST
from reshard.formats.errors import CheckpointError
from reshard.formats.files.safetensors import DAMAGED, MAX_DIMS, TORCH_NAMES

LARGEST_PICKLE = 256 << 20
"""Bytes of a pickle that is followed. What it makes takes at most some 60 times as many."""


@dataclass(frozen=True, slots=True)
class Global:
    """Stands for what a pickle refers to by name: ``module.name``."""

    path: str


@dataclass(eq=False, slots=True)
class Inert:
    """Stands for an object: the path of its class, the arguments that it is made with, and its state."""

    path: str
    arguments: tuple[Any, ...]
    state: Any = None


def attribute(value: object, *names: str) -> Any:
    """An attribute of what an ``Inert`` stands for, or of that attribute, and so on; None if no state says it.

    A state may be two: attributes and slots.
    """
    for name in names:
        state = value.state if isinstance(value, Inert) else None
        if isinstance(state, tuple) and len(state) == 2:
            state = next((each for each in reversed(state) if isinstance(each, dict) and name in each), None)
        value = state.get(name) if isinstance(state, dict) else None
    return value


@dataclass(frozen=True)
class Names:
    """The names that a pickle may use, each with a function that stands for a call of it (None: it may not be called).

    ``load`` turns a persistent id into an object; None refuses such ids.
    """

    makers: Mapping[str, Callable[..., object] | None]
    load: Callable[[object], object] | None = None

    def with_classes(self, *classes: str) -> Names:
        """The same with more classes, whose objects are ``Inert``."""
        return replace(self, makers={**self.makers, **{path: partial(_inert, path) for path in classes}})


def _inert(path: str, *arguments: object) -> Inert:
    return Inert(path, arguments)


@dataclass(frozen=True, slots=True)
class Persistent:
    """Stands for what is stored elsewhere, by its id; for writing only."""

    id: object


class RefusedError(Exception):
    """A name or an operation that a pickle asks for and may not have."""


def read_pickle(pickled: bytes, names: Names, where: object, may: str) -> object:
    """Follow a pickle; ``may`` says what is read, in a sentence that goes on with "only".

    Raises ``CheckpointError``, which begins with ``where``, for a pickle that is damaged or asks for more than data.
    """
    try:
        return follow(pickled, names)
    except RefusedError as error:
        raise CheckpointError(
            f"{where}: the pickle asks for {error}; only {may}, and no code is run",
            "if you trust its author, save the weights again with safetensors",
        ) from error
    except (ValueError, TypeError, LookupError, AttributeError, OverflowError, RecursionError, struct.error) as error:
        raise CheckpointError(f"{where}: the pickle is damaged: {error!s:.200}", DAMAGED) from error


def follow(pickled: bytes, names: Names) -> object:
    """Follow all instructions up to STOP and return what is then on the stack.

    Raises RefusedError, and ValueError, TypeError, LookupError, OverflowError or struct.error if it is damaged.
    """
    if len(pickled) > LARGEST_PICKLE:
        raise ValueError(f"it has {len(pickled):,} bytes, of which at most {LARGEST_PICKLE:,} are read")
    stack, marks, memo = list[Any](), list[int](), dict[int, Any]()
    push = stack.append

    def take(count: int | None = None) -> list[Any]:
        """Pop ``count`` items, or those above the last mark."""
        start = marks.pop() if count is None else len(stack) - count
        if start < (marks[-1] if marks else 0):
            raise ValueError("the stack is empty")
        items = stack[start:]
        del stack[start:]
        return items

    def put(index: int | None) -> None:
        memo[len(memo) if index is None else index] = stack[-1]

    def name(path: str) -> None:
        if path not in names.makers:
            raise RefusedError(repr(path) if len(path) < 100 else repr(path[:97] + "..."))
        push(Global(path))

    def name_from_stack(_: object) -> None:
        module, word = take(2)
        if type(module) is not str or type(word) is not str:
            raise ValueError("a name should be a text")
        name(f"{module}.{word}")

    def append(items: list[Any]) -> None:
        if type(stack[-1]) is not list:
            raise RefusedError("appending to something that is no list")
        stack[-1].extend(items)

    def assign(items: list[Any]) -> None:
        target = stack[-1]
        if type(target) is not dict or not all(map(_is_key, items[::2])):
            raise RefusedError("setting an item of something that is no dictionary, or under an unusual key")
        target.update(zip(items[::2], items[1::2], strict=True))

    def add(items: list[Any]) -> None:
        if type(stack[-1]) is not set or not all(map(_is_key, items)):
            raise RefusedError("adding to something that is no set, or something unusual to one")
        stack[-1].update(items)

    def load(_: object) -> None:
        if names.load is None:
            raise RefusedError("something that is stored elsewhere")
        push(names.load(stack.pop()))

    def call(_: object) -> None:
        """A call of a function, or the making of an object."""
        function, arguments = take(2)
        if type(function) is not Global or type(arguments) is not tuple:
            raise RefusedError(f"a call of {kind_of(function)}")
        if (construct := names.makers.get(function.path)) is None:
            raise RefusedError(f"a call of {function.path}")
        push(construct(*arguments))

    def call_with_keywords(_: object) -> None:
        if stack.pop() != {}:
            raise RefusedError("an object made with keywords")
        call(None)

    def build(_: object) -> None:
        """Set the state of an object; a dictionary's attributes are dropped."""
        (state,) = take(1)
        target = stack[-1]
        if type(target) is Inert:
            target.state = state
        elif type(target) is not dict:
            raise RefusedError(f"setting the state of a {kind_of(target)}")

    steps: dict[str, Callable[[Any], object]] = {  # what torch.save writes, and what the same takes in protocols 3 to 5
        **dict.fromkeys(("PROTO", "FRAME"), lambda _: None),
        **dict.fromkeys(_ARGUMENTS, push),
        "BYTEARRAY8": lambda content: push(bytes(content)),
        "NONE": lambda _: push(None),
        "NEWTRUE": lambda _: push(True),
        "NEWFALSE": lambda _: push(False),
        "EMPTY_TUPLE": lambda _: push(()),
        "EMPTY_LIST": lambda _: push([]),
        "EMPTY_DICT": lambda _: push({}),
        "EMPTY_SET": lambda _: push(set()),
        "MARK": lambda _: marks.append(len(stack)),
        "TUPLE": lambda _: push(tuple(take())),
        "TUPLE1": lambda _: push(tuple(take(1))),
        "TUPLE2": lambda _: push(tuple(take(2))),
        "TUPLE3": lambda _: push(tuple(take(3))),
        "APPEND": lambda _: append(take(1)),
        "APPENDS": lambda _: append(take()),
        "SETITEM": lambda _: assign(take(2)),
        "SETITEMS": lambda _: assign(take()),
        "ADDITEMS": lambda _: add(take()),
        **dict.fromkeys(("BINPUT", "LONG_BINPUT", "MEMOIZE"), put),
        **dict.fromkeys(("BINGET", "LONG_BINGET"), lambda index: push(memo[index])),
        "GLOBAL": name,
        "STACK_GLOBAL": name_from_stack,
        "BINPERSID": load,
        **dict.fromkeys(("REDUCE", "NEWOBJ"), call),
        "NEWOBJ_EX": call_with_keywords,
        "BUILD": build,
    }
    step_of = {code: (read, steps.get(word)) for code, (word, read) in _INSTRUCTIONS.items()}
    file = BytesIO(pickled)
    for code in iter(partial(file.read, 1), b"."):  # up to STOP
        read, step = step_of[code]
        if step is None:
            raise RefusedError(f"the instruction {_INSTRUCTIONS[code][0]}")
        step(read(file))
    return stack.pop()


def kind_of(value: object) -> str:
    """Return the kind of a value in one word, for messages, which never show its content: that may be of any size."""
    kind = type(value).__name__.removeprefix("Pickled").strip("_").lower()
    return value.path if isinstance(value, (Global, Inert)) else kind


def quote(value: object) -> str:
    """A text in quotes, at most 100 characters of it, or a number of ordinary size; of anything else, what it is."""
    if isinstance(value, str):
        return repr(value[:100])
    return str(value) if isinstance(value, int) and abs(value) < 1 << 63 else f"a {kind_of(value)}"


_PLAIN = {str, int, bool, float, bytes, type(None)}


def _is_key(key: object) -> bool:
    """Whether a value may be used as a key of a dictionary.

    A key is hashed, and a crafted one (tuples, a million deep) would overflow the interpreter's own stack.
    """
    kind = type(key)
    return (
        kind in _PLAIN or kind in (Inert, Global) or (type(key) is tuple and all(type(item) in _PLAIN for item in key))
    )


def _path(file: BytesIO) -> str:
    """The two lines of a name; Python's own reader takes backslashes in them for escapes."""
    module, name = file.readline(), file.readline()
    if not name.endswith(b"\n"):
        raise ValueError("it ends within a name")
    return f"{module[:-1].decode()}.{name[:-1].decode()}"


_ARGUMENTS = (
    "BININT", "BININT1", "BININT2", "LONG1", "LONG4", "BINFLOAT", "BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8",
    "SHORT_BINSTRING", "BINSTRING", "BINBYTES", "SHORT_BINBYTES", "BINBYTES8",
)  # fmt: skip
"""Opcodes that push their argument."""
_INSTRUCTIONS: dict[bytes, tuple[str, Callable[[BytesIO], Any]]] = {
    **{bytes([code]): (f"0x{code:02x}", _path) for code in range(256)},
    **{op.code.encode("latin-1"): (op.name, op.arg.reader if op.arg else lambda _: None) for op in pickletools.opcodes},
    b"c": ("GLOBAL", _path),
}
"""For each instruction its name, and what reads its argument."""


# ------------------------------------------------------------------------------------------------------------ writing


def write_pickle(value: object) -> bytes:
    """The pickle (protocol 2) of plain data and stand-ins. Names and texts that come again are taken from the memo.

    An ``Inert`` with a state is made without its ``__init__`` and given the state; one without is a call. Raises
    TypeError for anything else.
    """
    parts, memo = [b"\x80\x02"], dict[str | Global, int]()
    put, number = parts.append, struct.Struct("<i").pack

    def write(value: Any) -> None:
        kind = type(value)
        if kind is int and -(1 << 31) <= value < 1 << 31:
            put(b"J" + number(value))
        elif kind is str or kind is Global:
            short, long, place = b"h", b"j", memo.get(value)
            if place is None:
                short, long, place = b"q", b"r", len(memo)
                memo[value] = place
                if kind is Global:
                    put("c{0}\n{2}\n".format(*value.path.rpartition(".")).encode())
                else:
                    content = value.encode("utf-8", "surrogatepass")
                    put(b"X" + struct.pack("<I", len(content)) + content)
            put(short + bytes([place]) if place < 256 else long + struct.pack("<I", place))
        elif kind is bool or value is None:
            put(b"N" if value is None else b"\x88" if value else b"\x89")
        elif kind is int:
            content = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
            put(b"\x8a" + bytes([len(content)]) + content)
        elif kind is float:
            put(b"G" + struct.pack(">d", value))
        elif kind in _WRITTEN:
            begin, end = _WRITTEN[kind]
            put(begin)
            for item in itertools.chain.from_iterable(value.items()) if kind is dict else value:
                write(item)
            put(end)
        elif kind is Persistent:
            write(value.id)
            put(b"Q")
        elif kind is Inert:
            write(Global(value.path))
            write(value.arguments)
            put(b"R" if value.state is None else b"\x81")
            if value.state is not None:
                write(value.state)
                put(b"b")
        else:
            raise TypeError(f"a {kind.__name__} is not written to a pickle")

    write(value)
    return b"".join((*parts, b"."))


def is_plain(value: object) -> bool:
    """Whether a value is plain data: not nested too deeply, and not too large if everything repeated in it is written
    out.
    """
    level = [value]
    for _ in range(DEEPEST):
        below = list[object]()
        for item in level:
            kind = type(item)
            if isinstance(item, (dict, tuple, list)) and kind in _WRITTEN:
                below += itertools.chain.from_iterable(item.items()) if isinstance(item, dict) else item
            elif isinstance(item, Inert):
                below += (item.arguments, item.state)
            elif kind is bytes or kind not in (*_PLAIN, Global) or (isinstance(item, int) and item.bit_length() > 2000):
                return False
            if len(below) > _MOST_PLAIN:
                return False
        if not below:
            return True
        level = below
    return False


_MOST_PLAIN = 1 << 20


_WRITTEN: dict[Any, tuple[bytes, bytes]] = {tuple: (b"(", b"t"), list: (b"](", b"e"), dict: (b"}(", b"u")}
"""For each container type: the opcodes before and after its items."""


DTYPES: Mapping[str, str] = {f"torch.{name}": dtype for dtype, name in TORCH_NAMES.items()}
STORAGES: Mapping[str, str] = {
    "torch.BoolStorage": "BOOL", "torch.ByteStorage": "U8", "torch.CharStorage": "I8", "torch.ShortStorage": "I16",
    "torch.IntStorage": "I32", "torch.LongStorage": "I64", "torch.HalfStorage": "F16", "torch.BFloat16Storage": "BF16",
    "torch.FloatStorage": "F32", "torch.DoubleStorage": "F64", "torch.ComplexFloatStorage": "C64",
    "torch.storage.UntypedStorage": "U8",
}  # fmt: skip


@dataclass(slots=True)  # made for every tensor: a frozen one takes three times as long
class Storage:
    """Stands for a storage: record ``data/<key>`` of the archive, ``numel`` elements of ``dtype``."""

    key: str
    dtype: str
    numel: int


@dataclass(slots=True)
class PickledTensor:
    """Stands for a tensor: a view of a storage. ``offset`` and ``strides`` count elements of ``dtype``."""

    storage: Storage
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str

    @property
    def is_contiguous(self) -> bool:
        """Whether the elements lie row-major without gaps. Strides of dimensions of size 1 do not matter."""
        expected = 1
        for size, stride in zip(reversed(self.shape), reversed(self.strides), strict=True):
            if size != 1 and stride != expected:
                return 0 in self.shape
            expected *= size
        return True


def are_sizes(values: object) -> bool:
    """Whether a value is a tuple of at most ``MAX_DIMS`` sizes."""
    return (
        isinstance(values, tuple)
        and len(values) <= MAX_DIMS
        and all(type(value) is int and 0 <= value <= LARGEST for value in values)
    )


def _load(persistent: Any) -> Storage:
    """Return the storage that a persistent id describes."""
    if type(persistent) is not tuple or len(persistent) != 5:
        raise ValueError("a storage should be described by five values")
    kind, storage, key, _, numel = persistent
    if kind != "storage" or not isinstance(storage, Global) or storage.path not in STORAGES:
        raise RefusedError(f"a persistent {quote(kind)}")
    if not isinstance(key, str) or not are_sizes((numel,)):
        raise ValueError("a storage should have a name and a size")
    return Storage(key, STORAGES[storage.path], numel)


def _rebuild_v2(
    storage: object, offset: Any, shape: Any, strides: Any, _grad: object = None, _hooks: object = None,
    metadata: object = None, *, dtype: str | None = None,
) -> PickledTensor:  # fmt: skip
    if not isinstance(storage, Storage):
        raise ValueError("a tensor without a storage")
    if not (are_sizes((offset,)) and are_sizes(shape) and are_sizes(strides) and len(shape) == len(strides)):
        raise ValueError("a tensor's offset, shape and strides should be sizes")
    if metadata:
        raise RefusedError("a tensor that is stored conjugated, negated or quantized")
    return PickledTensor(storage, offset, shape, strides, dtype or storage.dtype)


def _rebuild_v3(
    storage: object, offset: object, shape: object, strides: object, grad: object, hooks: object, dtype: object,
    metadata: object = None,
) -> PickledTensor:  # fmt: skip
    if not isinstance(dtype, Global) or dtype.path not in DTYPES:
        raise RefusedError(f"a tensor of dtype {kind_of(dtype)}")
    return _rebuild_v2(storage, offset, shape, strides, grad, hooks, metadata, dtype=DTYPES[dtype.path])


def _rebuild_from_type(function: object, kind: object, arguments: Any, state: object) -> object:
    """A plain tensor or parameter that carries Python attributes; they are dropped. A sharded one is an ``Inert``."""
    path, class_path = getattr(function, "path", ""), getattr(kind, "path", "")
    if path == _WRAPPER and class_path in (*DTENSORS, SHARDED_TENSOR):
        return Inert(class_path, arguments, state)
    if not path.startswith("torch._utils._rebuild_") or class_path not in _CLASSES:
        raise RefusedError(f"a tensor of type {kind_of(kind)}")
    return _CALLS[path](*arguments)


def _getattr(owner: object, name: object) -> Global:
    """The one class that torch's own pickles look up in another."""
    if (getattr(owner, "path", ""), name) != (SHARDED_TENSOR, "ProcessGroupState"):
        raise RefusedError("an attribute")
    return Global(_GROUP)


def empty_dict(*arguments: object) -> dict[object, object]:
    """An OrderedDict, which is filled later. Raises RefusedError for one that is made from something."""
    if arguments:
        raise RefusedError("a dictionary made from a list")
    return {}


def size_of(sizes: object) -> tuple[int, ...]:
    """A ``torch.Size``. Raises ValueError for anything but sizes."""
    size = tuple(sizes) if isinstance(sizes, (list, tuple)) else None
    if size is None or not are_sizes(size):
        raise ValueError("a torch.Size should be of sizes")
    return size


_CALLS: dict[str, Callable[..., object]] = {
    "torch._utils._rebuild_tensor": _rebuild_v2,
    "torch._utils._rebuild_tensor_v2": _rebuild_v2,
    "torch._utils._rebuild_tensor_v3": _rebuild_v3,
    "torch._utils._rebuild_parameter": lambda data, *_: data,
    "torch._utils._rebuild_parameter_with_state": lambda data, *_: data,
    "torch._tensor._rebuild_from_type_v2": _rebuild_from_type,
    "collections.OrderedDict": empty_dict,
    "torch.Size": size_of,
    "torch.device": lambda *names: names,
}
_CLASSES = ("torch.Tensor", "torch.nn.parameter.Parameter")

DTENSORS = ("torch.distributed.tensor.DTensor", "torch.distributed._tensor.api.DTensor")
SHARDED_TENSOR = "torch.distributed._shard.sharded_tensor.api.ShardedTensor"
_GROUP = f"{SHARDED_TENSOR}.ProcessGroupState"
_WRAPPER = "torch._utils._rebuild_wrapper_subclass"
_SHARD = "torch.distributed._shard"
_PLACEMENTS = ("Shard", "Replicate", "_StridedShard", "Partial")
_SPEC = ("DTensorSpec", "TensorMeta")

TENSORS = Names(dict.fromkeys((*DTYPES, *STORAGES, *_CLASSES)) | _CALLS, _load)
"""Names in a state dict: a subset of those that ``torch.load(..., weights_only=True)`` allows."""

SHARDS = Names(
    {**dict.fromkeys((*DTENSORS, SHARDED_TENSOR, _WRAPPER)), **TENSORS.makers, "__builtin__.getattr": _getattr}, _load
).with_classes(
    *(f"torch.distributed.tensor.placement_types.{name}" for name in _PLACEMENTS),
    *(f"torch.distributed._tensor.placement_types.{name}" for name in (*_PLACEMENTS, *_SPEC)),
    *(f"torch.distributed.tensor._dtensor_spec.{name}" for name in (*_SPEC, "ShardOrderEntry")),
    *(f"torch.distributed._mesh_layout.{name}" for name in ("_MeshLayout", "_FlatLayout")),
    *("torch.distributed.device_mesh.DeviceMesh", _GROUP),
    *("torch.serialization._get_layout", "torch.distributed.remote_device._remote_device"),
    *(f"{_SHARD}.metadata.ShardMetadata", f"{_SHARD}.sharded_tensor.shard.Shard"),
    *(f"{_SHARD}.sharded_tensor.metadata.{name}" for name in ("ShardedTensorMetadata", "TensorProperties")),
    f"{_SHARD}.sharded_tensor.metadata.MEM_FORMAT_ENCODING",
    f"{_SHARD}.sharding_spec.chunk_sharding_spec.ChunkShardingSpec",
)
"""Names in a rank's state dict of sharded tensors: also placements and meshes, as data."""
