"""The second witness: where an engine's own loader puts each element of a checkpoint, compared with our rules.

The loader (``model.load_weights``) runs once on tensors without data, and what is copied of them is noted. The index
probe does the same with tensors that hold the number of each element: slower, and independent of views.

Both give, for each parameter, *ranges*: rows of (first element of the parameter, how many, number of the Hugging Face
tensor, first element of that tensor). They are as long as possible, so that equal maps have equal rows. What no range
covers is not loaded: padding, or a mistake.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from reshard.formats.errors import LiveError
from reshard.formats.notation.format_file import HUGGING_FACE
from reshard.formats.torch_internals import TORCH_DTYPES, TorchDispatchMode
from reshard.live import sides
from reshard.live.routing import View, routes_between, view_of
from reshard.mesh.plan import make_plan
from reshard.model.model import BoundTensor
from reshard.placement.arrangement import Arrangement, align_atoms, arrangement_of
from reshard.placement.stored import Stored
from reshard.source.source import UNSPLIT
from reshard.verify.loader.watch import KeptInside, NotFollowedError, memory, tensors_in, written

Ranges = NDArray[np.int64]
"""An array of shape ``[n, 4]``: see above."""
Shapes = Mapping[str, tuple[str, tuple[int, ...]]]
"""Dtype and shape of each tensor of the checkpoint, in the order of their numbers."""

_ATEN = torch.ops.aten
_ONE_BY_ONE = frozenset([_ATEN._to_copy.default, _ATEN.clone.default, _ATEN.exp.default, _ATEN.neg.default])
"""Operations that compute each element alone."""
_BITS = 40
"""The bits of an element's number within its tensor, in the index probe."""


class Copied(NamedTuple):
    """Elements of a parameter, and the checkpoint's elements that go there; both views have one shape."""

    into: View
    number: int
    of: View


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes what is copied from the tensors of a checkpoint, which are on the meta device: a view of one shares its
    storage, so its offset and strides say which elements it has. ``copies`` has each copy by the storage that it went
    to. What is written there later by other means would be unseen, and is refused.
    """

    def __init__(self, tensors: Shapes) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.tensors = {
            name: torch.empty(shape, dtype=TORCH_DTYPES[dtype], device="meta")
            for name, (dtype, shape) in tensors.items()
        }
        self._numbers = {memory(tensor): at for at, tensor in enumerate(self.tensors.values())}
        self._empty = set[int]()
        self.copies = defaultdict[int, list[Copied]](list)
        self._rooms: dict[int, torch.Tensor] = {}  # kept: no other storage gets their number

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Record a copy, or follow a view. Raises LiveError for an operation that cannot be followed."""
        numbers = [self._numbers.get(memory(tensor)) for tensor in tensors_in((args, kwargs))]
        followed = [number for number in numbers if number is not None]
        if not followed:
            self._refuse_changes(func, args, kwargs or {})
        if not followed or func.is_view:
            return func(*args, **(kwargs or {}))
        if func in _ONE_BY_ONE:
            return args[0]
        if func is _ATEN.zero_.default and args[0].numel() == [*self.tensors.values()][followed[0]].numel():
            self._empty.add(followed[0])  # from then on nothing of it is loaded
            return args[0]
        if func is not _ATEN.copy_.default or numbers[0] is not None:
            raise self._unfollowed(func, followed[0])
        into, origin = _view(args[0]), _view(args[1].expand(args[0].shape))
        if followed[0] not in self._empty:
            self.copies[memory(args[0])].append(Copied(into, followed[0], origin))
            self._rooms.setdefault(memory(args[0]), args[0])
        return args[0]

    def _refuse_changes(self, func: Any, args: Any, kwargs: Any) -> None:
        """Raise LiveError if an operator writes where a tensor of the checkpoint has been loaded."""
        for into in written(func, args, kwargs):
            if (room := self._rooms.get(memory(into))) is None:
                continue
            copies, view = self.copies[memory(into)], _view(into)
            try:
                ranges([Copied(view, -1, view), *copies])
                seen = into.element_size() == room.element_size()
            except LiveError:
                seen = False
            if not seen:
                raise self._unfollowed(func, copies[0].number, "what was loaded of ")

    def _unfollowed(self, func: Any, number: int, what: str = "") -> LiveError:
        name = [*self.tensors][number]
        return LiveError(f"the loader does '{func}' with {what}tensor '{name}', which is not followed here")


def _view(tensor: torch.Tensor) -> View:
    return View(int(tensor.storage_offset()), tuple(tensor.shape), tuple(tensor.stride()))


Load = Callable[[Iterable[tuple[str, torch.Tensor]]], object]
"""A model's ``load_weights``."""


def rooms_of(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """A model's parameters and stored buffers, each under all of its names."""
    rooms: dict[str, torch.Tensor] = dict(model.named_parameters(remove_duplicate=False))
    return rooms | {name: tensor for name, tensor in model.state_dict(keep_vars=True).items() if name not in rooms}


def recorded(model: torch.nn.Module, load: Load, tensors: Shapes) -> dict[str, Sequence[Copied]]:
    """Run a loader, and return the copies that it makes into each parameter, by each of its names.

    Parameters have their load-time shapes. Raises LiveError if the loader does something with a tensor that is not
    followed.
    """
    recorder, names = Recorder(tensors), {memory(room): name for name, room in rooms_of(model).items()}
    try:
        with KeptInside(names), recorder:
            load(recorder.tensors.items())
    except NotFollowedError as error:
        raise LiveError(str(error)) from None
    return {name: recorder.copies.get(memory(room), ()) for name, room in rooms_of(model).items()}


def probed(model: torch.nn.Module, load: Load, tensors: Shapes) -> dict[str, Ranges]:
    """The ranges by the index probe, 8 bytes an element: the loader copies the numbers of elements.

    Meanwhile a model's tensors have 64 bits for each element, and -1 where nothing was loaded.
    """
    rooms, saved = rooms_of(model), dict[int, tuple[torch.Tensor, torch.Tensor, bool]]()
    try:
        for room in rooms.values():
            if id(room) not in saved:
                saved[id(room)] = room, room.data, room.requires_grad
                room.requires_grad_(False)
                room.data = torch.full(room.shape, -1, dtype=torch.int64)
        load(
            (name, (torch.arange(math.prod(shape)) + ((number + 1) << _BITS)).view(shape))
            for number, (name, (_, shape)) in enumerate(tensors.items())
        )
        result = dict[str, Ranges]()
        for name, room in rooms.items():
            values = room.detach().reshape(-1).numpy()
            at = np.flatnonzero(values > 0)  # -1 is not loaded, 0 is padding
            elements = (at, np.ones_like(at), (values[at] >> _BITS) - 1, values[at] & ((1 << _BITS) - 1))
            result[name] = joined(np.stack(elements, 1))
        return result
    finally:
        for room, data, grad in saved.values():
            room.data = data
            room.requires_grad_(grad)


def ranges(copies: Iterable[Copied]) -> Ranges:
    """The ranges of copies into one parameter. Raises LiveError if an element is loaded twice."""
    return joined(np.concatenate([np.empty((0, 4), np.int64), *map(_rows, copies)]))


def joined(rows: Ranges) -> Ranges:
    """The same ranges in order, each as long as possible. Raises LiveError if two overlap."""
    if not len(rows):
        return rows
    rows = rows[np.argsort(rows[:, 0], kind="stable")]
    ends, starts = rows[:-1, 0] + rows[:-1, 1], rows[1:, 0]
    if (ends > starts).any():
        raise LiveError(f"element {starts[ends > starts][0]} of a parameter is loaded twice")
    goes_on = (ends == starts) & (rows[:-1, 2] == rows[1:, 2]) & (rows[:-1, 3] + rows[:-1, 1] == rows[1:, 3])
    first = np.flatnonzero(np.concatenate([[True], ~goes_on]))
    return np.stack([rows[first, 0], np.add.reduceat(rows[:, 1], first), rows[first, 2], rows[first, 3]], 1)


def _rows(copied: Copied) -> Ranges:
    """A copy as ranges that may be joined: its last dimensions as far as they are in one piece on both sides."""
    shape, strides = copied.into.shape, list(zip(copied.into.stride, copied.of.stride, strict=True))
    if 0 in shape:
        return np.empty((0, 4), np.int64)
    length, outer = 1, len(shape)
    while outer and (shape[outer - 1] == 1 or strides[outer - 1] == (length, length)):
        outer -= 1
        length *= shape[outer]
    starts = [np.array([view.offset]) for view in (copied.into, copied.of)]
    for size, steps in zip(shape[:outer], strides[:outer], strict=True):
        starts = [np.add.outer(at, np.arange(size) * step).ravel() for at, step in zip(starts, steps, strict=True)]
    into, origin = starts
    return np.stack([into, np.full_like(into, length), np.full_like(into, copied.number), origin], 1)


def by_rules(arrangement: Arrangement, rank: int) -> Iterator[tuple[Stored, Ranges]]:
    """Yield each tensor of a rank with the ranges that a push of the whole checkpoint puts into it; no constants.
    Raises PlanError.
    """
    model, copies = arrangement.plan.model, defaultdict[str, list[Copied]](list)
    numbers = {tensor.name: number for number, tensor in enumerate(model.tensors)}
    whole = arrangement_of(make_plan(model, UNSPLIT, padding={}), HUGGING_FACE)
    source, target = (sides.by_rules(side) for side in align_atoms(whole, arrangement))
    plan = routes_between(source, target, bucket=1 << 62)
    for part in itertools.chain(*plan.parts(source.ranks + rank)):
        into, origin = view_of(part, target, sends=False), view_of(part, source, sends=True)
        copies[into.name].append(Copied(into, numbers[origin.name], origin))
    for stored, _ in arrangement.tensors_of(rank):
        if stored.constant is None:
            yield stored, ranges(copies[stored.name_on(rank)])


def unlike(loaded: Mapping[str, Sequence[Copied]], probed_ranges: Mapping[str, Ranges]) -> list[str]:
    """The parameters of which the recorder and the probe do not say the same: none, if both are right."""
    return [name for name in loaded if not np.array_equal(ranges(loaded[name]), probed_ranges[name])]


def compare(
    arrangement: Arrangement, rank: int, model: torch.nn.Module, loaded: Mapping[str, Sequence[Copied]]
) -> list[str]:
    """Compare an engine's loader with our rules on a rank: one line for each tensor that differs, none if they agree.

    ``model`` has its load-time shapes, ``loaded`` the copies that the loader makes into each of its tensors. A tensor
    of several names is known by any of them. Constants are left out, and so are buffers that neither side fills.
    """
    rooms, lines, seen = rooms_of(model), list[str](), set[int]()
    shapes = {stored.name: shape for stored, shape in arrangement.tensors_of(rank)}
    for stored, expected in by_rules(arrangement, rank):
        name, line = stored.name_on(rank), ""
        if name not in rooms:
            lines.append(f"rank {rank}: '{name}' is in our rules, and not in the engine's model")
            continue
        room = rooms[name]
        seen.add(id(room))
        if tuple(room.shape) != shapes[stored.name]:
            line = f" has shape {[*shapes[stored.name]]} by our rules, and {[*room.shape]} in the engine"
        elif room.dtype != TORCH_DTYPES[stored.dtype]:
            line = (
                f" is {stored.dtype} by our rules, and {room.dtype} in the engine: push(dtype=) rounds F32, and the "
                "engine's own dtype is what it was started with"
            )
        elif not np.array_equal(expected, rows := ranges(loaded[name])):
            line = _difference(room.shape, arrangement.plan.model.tensors, expected, rows)
        lines += [f"rank {rank}: '{name}'{line}"] if line else []
    for name, room in rooms.items():
        if id(room) not in seen and (isinstance(room, torch.nn.Parameter) or len(loaded[name])):
            seen.add(id(room))
            lines.append(f"rank {rank}: '{name}' is in the engine's model, and our rules say nothing of it")
    return lines


def _difference(shape: Sequence[int], tensors: Sequence[BoundTensor], expected: Ranges, loaded: Ranges) -> str:
    """The first elements of a parameter of which two witnesses say something else, and how many they are."""
    size = math.prod(shape)
    ends = [edge for rows in (expected, loaded) for edge in (rows[:, 0], rows[:, 0] + rows[:, 1])]
    edges = np.unique(np.concatenate([np.array([0, size]), *ends]))
    rows_at = [_at(rows, edges[:-1]) for rows in (expected, loaded)]
    differ = (rows_at[0] != rows_at[1]).any(1)
    lengths, first = np.diff(edges), int(np.flatnonzero(differ)[0])
    at, length = int(edges[first]), int(lengths[first])
    ours, theirs = (
        f"'{tensors[number].name}'{_box(start, length, tensors[number].shape)}" if number >= 0 else "nothing"
        for number, start in (rows[first].tolist() for rows in rows_at)
    )
    return (
        f"{_box(at, length, shape)} is {ours} by our rules, and {theirs} by the engine's loader "
        f"({int(lengths[differ].sum()):,} of {size:,} elements differ)"
    )


def _at(rows: Ranges, elements: NDArray[np.int64]) -> NDArray[np.int64]:
    """Tensor and element at each of these elements of a parameter; -1 where nothing is loaded."""
    if not len(rows):
        return np.full((len(elements), 2), -1, np.int64)
    row = rows[np.maximum(np.searchsorted(rows[:, 0], elements, side="right") - 1, 0)]
    inside = (row[:, 0] <= elements) & (elements < row[:, 0] + row[:, 1])
    return np.where(inside[:, None], np.stack([row[:, 2], row[:, 3] + elements - row[:, 0]], 1), -1)


def _box(first: int, length: int, shape: Sequence[int]) -> str:
    """The box of so many elements, as an index: ``[0:2, 3:4]``."""
    if not shape:
        return ""
    low, high = (np.unravel_index(element, tuple(shape)) for element in (first, first + length - 1))
    return f"[{', '.join(f'{min(a, b)}:{max(a, b) + 1}' for a, b in zip(low, high, strict=True))}]"
