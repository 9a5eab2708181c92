"""``--patch``: a base with a delta on it. The bytes of its tensors are put together when they are read.

All is checked before anything is written: the delta's places, and the checksum of each tensor of base and result.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from reshard.formats.errors import CheckpointError, MismatchError
from reshard.formats.files.checksum import PIECE, check_unchanged, checksum, stamps_in, stamps_of
from reshard.formats.files.compressed import OVERWRITE, XOR, Changes, Frame, checksum_of, require_zstd
from reshard.formats.files.delta import GONE, SAME, WHOLE, Change, Delta, contents_of, read_delta
from reshard.formats.files.safetensors import TensorInfo, tensor_bytes, unit_of
from reshard.formats.notation.architecture import SETTINGS
from reshard.formats.notation.spellings import Spellings
from reshard.formats.store import FilePath, public_name
from reshard.model.naming import respelled
from reshard.source.source import Source
from reshard.store.remote import Remote
from reshard.store.threads import Threads
from reshard.transforms.tensors import (
    ARITHMETIC,
    Arithmetic,
    Content,
    computed,
    derived,
    file_of,
    part,
    store_of,
    tensors_of,
    whole_of,
)

STRETCH = 1 << 20
"""So many elements are a stretch: where each begins among the places of a delta is kept."""

_WORKERS = 4


class ChangedPlaces(NamedTuple):
    """The changed elements of a tensor in a delta: the offsets of the places and of the values in its file.

    ``wide`` is the number of bytes of an index. ``starts`` has the number of changed elements before each stretch, and
    the number of all.
    """

    places: int
    values: int
    wide: int
    starts: tuple[int, ...]


def _sparse(base: Content, delta: Content, places: ChangedPlaces, unit: int) -> Content:
    """A tensor of the base with other elements, of ``unit`` bytes, which the delta has at places."""

    def compute(arithmetic: Arithmetic, first: int, last: int) -> NDArray[Any]:
        content = np.frombuffer(base.read(arithmetic, first * unit, last * unit), np.uint8).copy()
        one, other = places.starts[first // STRETCH], places.starts[-(-last // STRETCH)]
        if other > one:
            raw = delta.read(arithmetic, places.places + one * places.wide, places.places + other * places.wide)
            indices = np.frombuffer(raw, f"<i{places.wide}").astype(np.int64)
            inside = (indices >= first) & (indices < last)
            raw = delta.read(arithmetic, places.values + one * unit, places.values + other * unit)
            content.view(f"<u{unit}")[indices[inside] - first] = np.frombuffer(raw, f"<u{unit}")[inside]
        return content

    return computed(compute, (base, delta), places, unit)


def _framed(base: Content, delta: Content, frame: Frame) -> Content:
    """A tensor of the base with changed bytes, which are a compressed frame in the delta."""

    def compute(arithmetic: Arithmetic, begin: int, end: int) -> NDArray[Any]:
        content = np.frombuffer(base.read(arithmetic, begin, end), np.uint8).copy()
        _CHANGES.change(delta, frame, partial(delta.read, arithmetic), begin, content)
        return content

    return computed(compute, (base, delta), frame)


_CHANGES = Changes()
"""The last decompressed changes."""


# --------------------------------------------------------------------------------------------------- putting together


def patch(source: Source, path: FilePath) -> Source:
    """The base with the delta on it. Reads all of the base, whose names may have another spelling, and the changes.

    Raises CheckpointError for a base that is an adapter and for a delta that is damaged, MismatchError if it is not for
    this base.
    """
    states, contents = stamps_in(path), dict[str, Content]()
    if SETTINGS in source.model.config:
        what = f"{source.path}: a delta is put on a full checkpoint in safetensors"
        raise CheckpointError(what, "give the model that it belongs to")
    tensors, (whole, index) = tensors_of(source), whole_of(source)
    same = dict.fromkeys(tensors, Change(SAME, None, None))
    sides = dict.fromkeys(source.side_files)
    delta = read_delta(path, Delta(source.path, (), same, tuple(whole), index, sides, source.names_of))
    base_names = [name for name, change in delta.changes.items() if change.base is not None or change.how == GONE]
    spelled = respelled(base_names, tensors, Spellings(source.model.architecture, source.model.config))
    tensors = {spelled.get(name, name): tensor for name, tensor in tensors.items()}
    stamps = stamps_of([path / name for name in delta.contents], path, states)
    stored = contents_of(delta)

    def other(why: str) -> MismatchError:
        what = f"{path} is for another base than {source.path}: {why}"
        return MismatchError(what, "give the base that it was made of")

    infos = [info for file in delta.files for info in file.tensors.values()]
    for info in infos:
        name, parts, tensor = info.name, stored.get(info.name, ()), tensors.get(info.name)
        file, how = file_of(parts[0].file, path, stamps[parts[0].file]) if parts else None, delta.changes[name].how
        if file is not None and how == WHOLE:
            contents[name] = part(file, parts[0].offset)
            continue
        if tensor is None or (tensor.dtype, tensor.shape) != (info.dtype, info.shape):
            raise other(f"tensor '{name}' is {'not there' if tensor is None else 'of another dtype or shape'}")
        contents[name] = tensor.content
        if file is not None and how in (XOR, OVERWRITE):
            require_zstd()
            frame = Frame(name, how, parts[0].offset, parts[0].offset + parts[0].nbytes, info.nbytes)
            contents[name] = _framed(tensor.content, part(file, 0), frame)
        elif file is not None:
            places = _checked(info, parts, file)
            contents[name] = _sparse(tensor.content, part(file, 0), places, unit_of(info.dtype))
    if extra := tensors.keys() - delta.changes.keys():
        raise other(f"the delta does not know its tensor '{min(extra)}'")
    checks: list[tuple[Content, int, str, MismatchError]] = []
    for name, change in delta.changes.items():
        if change.base is not None:
            if name not in tensors:
                raise other(f"tensor '{name}' is not there")
            nbytes = tensor_bytes(name, tensors[name].dtype, tensors[name].shape)
            error = other(f"tensor '{name}' has another content")
            checks.append((tensors[name].content, nbytes, change.base, error))
    for info in infos:
        change = delta.changes[info.name]
        if change.how != SAME and change.result is not None:
            error = MismatchError(f"{path}: tensor '{info.name}' is damaged: its result has another checksum")
            checks.append((contents[info.name], info.nbytes, change.result, error))

    def check(job: tuple[Content, int, str, MismatchError]) -> None:
        content, nbytes, expected, error = job
        pieces = (content.read(ARITHMETIC, begin, min(begin + PIECE, nbytes)) for begin in range(0, nbytes, PIECE))
        kind, is_slimes, _ = expected.partition(":")
        if (f"{kind}:{checksum_of(kind, pieces)}" if is_slimes else checksum(pieces)) != expected:
            raise error

    with Threads(_WORKERS) as threads:
        threads.map(check, checks)
    for name in delta.sides:
        if delta.sides[name] is None and name not in source.side_files:
            raise other(f"it has no {name}")
    own = {name: source.side_files[name] if content is None else content for name, content in delta.sides.items()}
    check_unchanged(states)
    name_of = f"{public_name(source.path)} + {public_name(path)}"
    store = store_of(source, name_of, delta.files, contents, {**delta.documents, **own})
    return replace(derived(source, store), was_named=delta.names)


def _checked(info: TensorInfo, infos: Sequence[TensorInfo], file: Remote) -> ChangedPlaces:
    """The places of a tensor's changes. Raises CheckpointError unless they are in order, and in the tensor."""
    places, values = infos
    unit = unit_of(info.dtype)
    elements, count = info.nbytes // unit, values.nbytes // unit
    wide = places.nbytes // count if count else 4
    counts = np.zeros(-(-elements // STRETCH) + 1, np.int64)

    def refuse(why: str) -> CheckpointError:
        return CheckpointError(f"{places.file}: tensor '{places.name}' {why}", "write the delta again")

    last = -1
    for begin in range(0, places.nbytes, PIECE):
        raw = file.read(places.offset + begin, places.offset + min(begin + PIECE, places.nbytes))
        indices = np.frombuffer(raw, f"<i{wide}").astype(np.int64)
        if indices[0] <= last or (np.diff(indices) <= 0).any():
            raise refuse("is not in ascending order")
        last = int(indices[-1])
        if indices[0] < 0 or last >= elements:
            raise refuse(f"has an element {max(last, -int(indices[0]))} of {elements}")
        counts[1:] += np.bincount(indices // STRETCH, minlength=counts.size - 1)
    return ChangedPlaces(places.offset, values.offset, wide, tuple(np.cumsum(counts).tolist()))
