"""A base with a delta that reads like a checkpoint elsewhere: the bytes of its files are put together as they are read.

All is checked before anything is written: the delta's places, and the checksum of each tensor of base and result.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from formats.errors import CheckpointError, MismatchError
from formats.files.checkpoint import Checkpoint, open_checkpoint
from formats.files.checksum import PIECE, PartialSum, Stamp, check_unchanged, stamps_in, stamps_of, sum_part
from formats.files.compressed import OVERWRITE, XOR, Changes, Frame, hasher, need_zstd
from formats.files.delta import SAME, WHOLE, Delta, contents_of, read_delta
from formats.files.safetensors import TensorInfo, parse_header, unit_of
from formats.store import FilePath, StoredPath, location_of
from reshard.source.dequantized import local_file
from reshard.source.opening import recognise
from reshard.store.computed import ComputedFile
from reshard.store.range_store import Content, RangeStore, remote_of
from reshard.store.remote import Read, Remote
from reshard.store.threads import Threads

STRETCH = 1 << 20
"""So many elements are a stretch: where each begins among the places of a delta is kept."""

_WORKERS = 4


class Places(NamedTuple):
    """Where a delta has the changed elements of a tensor: the offsets of the places and of the values in its file.

    ``unit`` are the bytes of an element, ``wide`` those of an index. ``starts`` has the number of changed elements
    before each stretch, and that of all.
    """

    places: int
    values: int
    unit: int
    wide: int
    starts: tuple[int, ...]


class Piece(NamedTuple):
    """A tensor of a patched file, up to byte ``end`` there: from ``offset`` of file ``number`` on, with changes, which
    are in file number ``delta``.
    """

    begin: int
    end: int
    number: int
    offset: int
    changed: Places | Frame | None
    delta: int


@dataclass(frozen=True, eq=False)
class PatchedFile(ComputedFile):
    """A weight file of the result. ``files`` are those of the base, and behind them the delta's."""

    name: str
    header: bytes
    pieces: tuple[Piece, ...]
    files: tuple[Remote, ...]
    size: int

    @cached_property
    def identity(self) -> str:
        """A digest of the identities of the files, of the header, and of which bytes each tensor is made of."""
        return f"patched:{self.digest_of(self.pieces)}"

    @property
    def address(self) -> str:
        """The name, and what it is."""
        return f"{self.name} (patched)"

    def open(self) -> Read:
        """Open the files, each when it is needed."""
        file = self.opened()

        def content(piece: Piece, begin: int, end: int) -> memoryview:
            base, changed = file(piece.number), piece.changed
            if changed is None:
                return base(piece.offset + begin, piece.offset + end)
            if isinstance(changed, Places):
                return _patched(piece.offset, changed, begin, end, base, file(piece.delta))
            found = np.frombuffer(base(piece.offset + begin, piece.offset + end), np.uint8).copy()
            _CHANGES.change(self.files[piece.delta], changed, file(piece.delta), begin, found)
            return found.data

        return self.read_pieces(self.pieces, content)


_CHANGES = Changes()
"""What was decompressed last."""


def _patched(offset: int, changed: Places, begin: int, end: int, base: Read, delta: Read) -> memoryview:
    """Bytes ``begin`` to ``end`` of a tensor that is at ``offset`` of the base's file."""
    unit = changed.unit
    first, last = begin // unit, -(-end // unit)  # a range may begin or end within an element
    content = np.frombuffer(base(offset + first * unit, offset + last * unit), np.uint8).copy()
    low, high = first // STRETCH, -(-last // STRETCH)
    one, other = changed.starts[low], changed.starts[high]
    if other > one:
        raw = delta(changed.places + one * changed.wide, changed.places + other * changed.wide)
        places = np.frombuffer(raw, f"<i{changed.wide}").astype(np.int64)
        inside = (places >= first) & (places < last)
        values = np.frombuffer(delta(changed.values + one * unit, changed.values + other * unit), f"<u{unit}")
        content.view(f"<u{unit}")[places[inside] - first] = values[inside]
    return content.data[begin - first * unit :][: end - begin]


# --------------------------------------------------------------------------------------------------- putting together


def patched(path: FilePath, delta: FilePath) -> RangeStore:
    """A base with a delta: a store around both. Reads all of the base, and what changed.

    Raises CheckpointError for a base that is no full checkpoint in safetensors and for a delta that is damaged,
    MismatchError if it is not for this base.
    """
    known, base = stamps_in(delta), _Base.of(path)
    found = read_delta(delta, base.checkpoint)
    own = stamps_of([delta / name for name in found.contents], delta, known)
    contents = {file: remote_of(file) or local_file(file, delta, stamp) for file, stamp in own.items()}
    stored, files = contents_of(found), (*base.files.values(), *contents.values())
    numbers = {file: number for number, file in enumerate([*base.files, *contents])}
    made = {}
    for laid in found.files:
        tensors = parse_header(laid.header, delta / laid.name, laid.size).tensors
        pieces = _pieces(base, found, stored, tensors, numbers, files)
        made[laid.name] = PatchedFile(laid.name, laid.header, tuple(pieces), files, laid.size)
    _check_sums(base, found, made)
    sides = {name: base.side(name, found) if kept is None else kept for name, kept in found.sides.items()}
    check_unchanged({**base.stamps, **known})
    location, commit = location_of(path), path.store.commit if isinstance(path, StoredPath) else None
    held: dict[str, Content] = {**made, **found.documents, **sides}
    store = RangeStore(f"{location} + {location_of(delta)}", held, location=location, commit=commit)
    store.keep({name: {0: file.header} for name, file in made.items()})
    return store


@dataclass(frozen=True)
class _Base:
    """The checkpoint that a delta is put on, and how its weight files are read."""

    checkpoint: Checkpoint
    files: Mapping[FilePath, Remote]
    stamps: Mapping[FilePath, Stamp]

    @classmethod
    def of(cls, path: FilePath) -> _Base:
        """Open it. Raises CheckpointError unless it is a full checkpoint in safetensors."""
        known, kind = stamps_in(path), recognise(path).kind
        checkpoint = open_checkpoint(path) if kind == "full" else None
        if checkpoint is None or any(file.header is None for file in checkpoint.files):
            way = f"split {path} FULL --as huggingface" if kind == "full" else f"merge {path} FULL"
            hint = "give the model that it belongs to" if kind == "adapter" else f"'reshard {way}' makes one"
            raise CheckpointError(f"{path}: a delta is put on a full checkpoint in safetensors", hint)
        stamps = stamps_of([*(file.path for file in checkpoint.files), *checkpoint.side_files], path, known)
        files = {f.path: remote_of(f.path) or local_file(f.path, path, stamps[f.path]) for f in checkpoint.files}
        return cls(checkpoint, files, stamps)

    def side(self, name: str, delta: Delta) -> FilePath:
        """A file beside the weights. Raises MismatchError."""
        found = self.checkpoint.path / name
        if found not in self.checkpoint.side_files:
            raise self.other(delta, f"it has no {name}")
        return found

    def other(self, delta: Delta, why: str) -> MismatchError:
        """The error for a delta of another base."""
        return MismatchError(
            f"{delta.path} is for another base than {self.checkpoint.path}: {why}", "give the base that it was made of"
        )


def _pieces(
    base: _Base, delta: Delta, stored: Mapping[str, Sequence[TensorInfo]], result: Mapping[str, TensorInfo],
    numbers: Mapping[FilePath, int], files: Sequence[Remote],
) -> Iterator[Piece]:  # fmt: skip
    """What each tensor of a file is made of."""
    there = base.checkpoint.tensors
    for name, info in result.items():
        change, end = delta.changes[name], info.offset + info.nbytes
        kept = stored.get(name, ())
        number = numbers[kept[0].file] if kept else 0
        if change.how == WHOLE:
            yield Piece(info.offset, end, number, kept[0].offset, None, 0)
            continue
        own = there.get(name)
        if own is None or (own.dtype, own.shape) != (info.dtype, info.shape):
            raise base.other(delta, f"tensor '{name}' is {'not there' if own is None else 'of another dtype or shape'}")
        changed: Places | Frame | None = None
        if change.how in (XOR, OVERWRITE):
            need_zstd()
            changed = Frame(name, change.how, kept[0].offset, kept[0].offset + kept[0].nbytes, info.nbytes)
        elif change.how != SAME:
            changed = _checked(info, kept, files[number].open())
        yield Piece(info.offset, end, numbers[own.file], own.offset, changed, number)


def _checked(info: TensorInfo, own: Sequence[TensorInfo], read: Read) -> Places:
    """The places of a tensor's changes. Raises CheckpointError unless they are in order, and in the tensor."""
    places, values = own
    unit = unit_of(info.dtype)
    elements, count = info.nbytes // unit, values.nbytes // unit
    wide = places.nbytes // count if count else 4
    counts = np.zeros(-(-elements // STRETCH) + 1, np.int64)

    def refuse(why: str) -> CheckpointError:
        return CheckpointError(f"{places.file}: tensor '{places.name}' {why}", "write the delta again")

    last = -1
    for begin in range(0, places.nbytes, PIECE):
        raw = read(places.offset + begin, places.offset + min(begin + PIECE, places.nbytes))
        found = np.frombuffer(raw, f"<i{wide}").astype(np.int64)
        if found[0] <= last or (np.diff(found) <= 0).any():
            raise refuse("is not in ascending order")
        last = int(found[-1])
        if found[0] < 0 or last >= elements:
            raise refuse(f"has an element {max(last, -int(found[0]))} of {elements}")
        counts[1:] += np.bincount(found // STRETCH, minlength=counts.size - 1)
    return Places(places.offset, values.offset, unit, wide, tuple(np.cumsum(counts).tolist()))


def _check_sums(base: _Base, delta: Delta, made: Mapping[str, PatchedFile]) -> None:
    """Raise MismatchError unless each tensor has the checksum of the base, and that of the result."""
    there = base.checkpoint.tensors
    extra = there.keys() - delta.changes.keys()
    if extra:
        raise base.other(delta, f"the delta does not know its tensor '{min(extra)}'")
    opened = {file: remote.open() for file, remote in base.files.items()}
    checks: list[tuple[Read, TensorInfo, str, MismatchError]] = []
    for name, change in delta.changes.items():
        if change.base is not None:
            error = base.other(delta, f"tensor '{name}' has another content")
            checks.append((opened[there[name].file], there[name], change.base, error))
    for file in made.values():
        read = file.open()
        for name, info in parse_header(file.header, delta.path / file.name, file.size).tensors.items():
            change = delta.changes[name]
            if change.how != SAME and change.result is not None:
                error = MismatchError(f"{delta.path}: tensor '{name}' is damaged: its result has another checksum")
                checks.append((read, info, change.result, error))

    def check(each: tuple[Read, TensorInfo, str, MismatchError]) -> None:
        read, info, wanted, error = each
        if _sum(read, info, wanted) != wanted:
            raise error

    with Threads(_WORKERS) as threads:
        threads.map(check, checks)


def _sum(read: Read, info: TensorInfo, wanted: str) -> str:
    """The checksum of a tensor, of the kind that is wanted."""
    kind, is_slimes, _ = wanted.partition(":")
    total, own = PartialSum(info.nbytes), hasher(kind) if is_slimes else None
    for begin in range(0, info.nbytes, PIECE):
        content = read(info.offset + begin, info.offset + min(begin + PIECE, info.nbytes))
        if own is not None:
            own.update(content)
        else:
            total.add(begin, len(content), sum_part(content, begin))
    return f"{kind}:{own.hexdigest()}" if own is not None else total.value()
