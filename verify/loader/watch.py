"""Compares files with the values that a loader writes into a model, as it writes, and judges those that it leaves
alone.

The model lies in memory that was reserved and is never touched: what is copied into a large tensor is compared at once
with the same elements of the file, bit for bit, and not written. What a loader computes of the checkpoint is computed,
as ever. A small tensor is loaded for real and compared at the end, so that a loader may compute in it.

Imports torch and the standard library: it runs in the engine's environment, in which reshard need not be.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

SMALL = 1 << 20
"""Elements of a tensor that is loaded for real, at most."""

_ATEN = torch.ops.aten
_RESERVED = frozenset([_ATEN.empty.memory_format, _ATEN.empty_strided.default, _ATEN.new_empty.default,
                       _ATEN.empty_like.default])  # fmt: skip
_FILLS = frozenset([_ATEN.fill_.Scalar, _ATEN.fill_.Tensor])
_OUTSIDE = frozenset([Tensor.numpy, Tensor.__array__, Tensor.__dlpack__])
"""Functions that give memory away: torch does not see who writes there."""
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_UNTOUCHED, _EQUAL, _OTHER = 0, 1, 2


class NotFollowedError(Exception):
    """The loader does something with a model's tensor after which its content cannot be known."""


class Creation(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records memory that is reserved and not written while a model is built: its content is left to chance."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._reserved: dict[int, tuple[Tensor, bool]] = {}  # kept: no other memory gets their number

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in _RESERVED:
            self._reserved[memory(result)] = result, False
        for tensor in written(func, args, kwargs or {}):
            if (known := self._reserved.get(memory(tensor))) is not None:
                if tensor.nbytes == tensor.untyped_storage().nbytes():
                    del self._reserved[memory(tensor)]
                else:
                    self._reserved[memory(tensor)] = known[0], True
        return result

    def leaves_to_chance(self, name: str, tensor: Tensor) -> bool:
        """Whether a tensor was left unwritten. Raises NotFollowedError if a part of it was written."""
        _, is_written = self._reserved.get(memory(tensor), (None, None))
        if is_written:
            raise NotFollowedError(f"a part of '{name}' is filled when the model is built")
        return is_written is False


class Room:
    """A tensor of the model: the shards' elements for it, and which of them the loader accounts for."""

    def __init__(self, name: str, tensor: Tensor, stored: Tensor | None, small: int) -> None:
        if not tensor.is_contiguous() or tensor.nbytes != tensor.untyped_storage().nbytes():
            raise NotFollowedError(f"'{name}' does not have its memory alone, in order")
        self.name, self.tensor, self.is_real = name, tensor, tensor.numel() <= small
        self._flat = stored.reshape(-1) if stored is not None and not unfit(tensor, stored) else None
        self._marks: Tensor | None = None
        self._copied = 0

    def take(self, into: Tensor, value: Tensor | float | None) -> None:
        """A write of the loader into a part of the tensor: compare it, or (None) note it. Raises NotFollowedError."""
        if self._marks is None or self._marks.stride() == (0,):
            self._marks = self.marks().clone(memory_format=torch.contiguous_format)
        if into.element_size() != self.tensor.element_size():
            if not self.is_real:
                raise NotFollowedError(f"the loader writes '{self.name}' as {into.dtype}")
            into = self.tensor
        where = tuple(into.shape), into.stride(), into.storage_offset()
        marks = torch.as_strided(self._marks, *where)
        if value is None or self._flat is None:  # of the second: said of the whole tensor
            marks.fill_(_EQUAL)
        else:
            theirs = torch.empty(into.shape, dtype=into.dtype)
            theirs.copy_(value) if isinstance(value, Tensor) else theirs.fill_(value)
            marks.copy_(unlike(torch.as_strided(self._flat, *where), theirs).view(into.shape) + _EQUAL)
        self._copied += into.numel()
        if self._copied >= len(self._marks) and bool((self._marks == _EQUAL).all()):
            self._marks = torch.full((1,), _EQUAL, dtype=torch.uint8).expand(len(self._marks))  # of one byte

    def marks(self) -> Tensor:
        """For each element: untouched, equal to the shards', or another."""
        if self._marks is None:
            return torch.zeros(1, dtype=torch.uint8).expand(self.tensor.numel())
        return self._marks

    def differences(self, after: Tensor, leaves_to_chance: bool) -> Iterator[str]:
        """Yield the differences of the shards' tensor from the loaded model's, which has the same shape and dtype."""
        assert self._flat is not None
        marks, now = self.marks(), after.detach().reshape(-1)
        wrong, rest = marks == _OTHER, marks == _UNTOUCHED
        if self.is_real:
            wrong = unlike(self._flat, now) & ~rest
        if count := int(wrong.sum()):
            loaded = len(wrong) - int(rest.sum())
            yield f"{count:,} of {loaded:,} elements that it loads, first at {first(wrong, after.shape)}"
        count = int(rest.sum())
        if count and leaves_to_chance:
            yield f"{count:,} elements that it fills from nothing: what would be there is chance"
        elif count and (changed := int((unlike(self._flat[rest], now[rest])).sum())):
            yield f"{changed:,} of {count:,} elements that it leaves as the model is built"


class Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Catches a loader's writes into the rooms."""

    def __init__(self, rooms: Mapping[int, Room]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._rooms = rooms

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Compare a write, do all else. Raises NotFollowedError for what is not followed."""
        kwargs = kwargs or {}
        for each in [each for each in written(func, args, kwargs) if memory(each) in self._rooms]:
            if (room := self._rooms[memory(each)]).is_real:
                room.take(each, None)
            else:
                room.take(each, self._value(func, args, room))
                return each
        if not func.is_view and func not in _RESERVED:
            for each in tensors_in((args, kwargs)):
                room = self._rooms.get(memory(each))  # type: ignore[assignment]
                if room is not None and not room.is_real:
                    raise NotFollowedError(f"'{func}' reads '{room.name}', into which the loader writes")
        return func(*args, **kwargs)

    def _value(self, func: Any, args: Any, room: Room) -> Any:
        if func is _ATEN.zero_.default:
            return 0
        value = args[1] if func in _FILLS or func is _ATEN.copy_.default else None
        if value is None or (isinstance(value, Tensor) and memory(value) in self._rooms):
            raise NotFollowedError(f"the loader does '{func}' with '{room.name}'")
        return value.expand(args[0].shape) if isinstance(value, Tensor) else value


class KeptInside(TorchFunctionMode):
    """Refuses to give away the memory of a model's tensors, whose names are by their memory: raises
    NotFollowedError.
    """

    def __init__(self, names: Mapping[int, str]) -> None:
        super().__init__()
        self._names = names

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _OUTSIDE and memory(args[0]) in self._names:
            name = self._names[memory(args[0])]
            raise NotFollowedError(f"the loader takes '{func.__name__}' of '{name}': writes there are not followed")
        return func(*args, **(kwargs or {}))


@contextmanager
def followed(rooms: Mapping[int, Room]) -> Iterator[None]:
    """Follow a loader's operations in the block. Raises NotFollowedError there."""
    with KeptInside({number: room.name for number, room in rooms.items()}), Watch(rooms):
        yield


def unfit(tensor: Tensor, stored: Tensor) -> str | None:
    """Return the difference in shape or dtype between the shards' tensor and the model's; None if there is none."""
    own, theirs = ((str(each.dtype).removeprefix("torch."), [*each.shape]) for each in (stored, tensor))
    return None if own == theirs else f"{own[0]} {own[1]}, the engine has {theirs[0]} {theirs[1]}"


def unlike(one: Tensor, other: Tensor) -> Tensor:
    """Return a flat mask of the elements whose bits differ between two tensors of equal shape and dtype."""
    bits = _BITS[one.element_size()]
    a, b = (each.detach().reshape(-1).contiguous().view(bits) for each in (one, other))
    return a != b


def first(mask: Tensor, shape: Sequence[int]) -> list[int]:
    """The index of the first element of a flat mask that is set."""
    number, index = int(mask.to(torch.uint8).argmax()), list[int]()
    for at in range(len(shape)):
        step = math.prod(shape[at + 1 :])
        index.append(number // step)
        number %= step
    return index


def written(func: Any, args: Any, kwargs: Mapping[str, Any]) -> list[Tensor]:
    """The tensors that an operator changes, by its own schema."""
    found: list[Tensor] = []
    for at, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            found += tensors_in(args[at] if at < len(args) else kwargs.get(argument.name))
    return found


def tensors_in(tree: object) -> list[Tensor]:
    """The tensors in an operator's arguments."""
    return [each for each in tree_leaves(tree) if isinstance(each, Tensor)]


def memory(tensor: Tensor) -> int:
    """The number of the memory that a tensor lies in, while it lives."""
    return int(tensor.untyped_storage()._cdata)
