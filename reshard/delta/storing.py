"""Writes a delta: first both checkpoints are compared, then what changed is read again and stored."""

from __future__ import annotations

import dataclasses
import secrets
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, NamedTuple

import numpy as np

from formats.errors import CheckpointError
from formats.files.checkpoint import DELTA
from formats.files.checksum import PartialSum, sum_part
from formats.files.compressed import STEP, XOR, Adler32, compressor, require_zstd
from formats.files.delta import (
    COMPRESSED,
    CONTENT,
    GONE,
    INDEX,
    SAME,
    WHOLE,
    Change,
    Delta,
    delta_text,
    index_text,
    smallest,
    stored_as,
    version_of,
)
from formats.files.safetensors import DTYPE_BITS, TensorInfo, build_header, parse_header, tensor_bytes, unit_of
from formats.files.sharded import SourceFileRecord
from formats.notation.format_file import HUGGING_FACE
from reshard.delta.differences import (
    CHANGED,
    HERE,
    PIECE,
    Diff,
    Pair,
    TensorDiff,
    codes_of,
    differences,
    pairs,
)
from reshard.delta.differences import SAME as UNCHANGED
from reshard.mesh.plan import make_plan
from reshard.move.jobs import Progress, no_progress
from reshard.publishing.existing import check_place
from reshard.source.source import UNSPLIT, Source
from reshard.system import disk_errors, reserve
from reshard.transforms.tensors import Opened, Tensor, tensors_of
from reshard.writing.output import Output


class _Sums:
    """The checksums of each tensor on both sides."""

    def __init__(self, sizes: Mapping[str, int]) -> None:
        self._sizes, self._open = sizes, dict[str, tuple[PartialSum, PartialSum]]()
        self.values: dict[str, tuple[str, str]] = {}

    def compared(self, name: str, pair: Pair, same: bool) -> None:
        """Add bytes of both sides."""
        if name not in self._open:
            self._open[name] = PartialSum(self._sizes[name]), PartialSum(self._sizes[name])
        sum_a, sum_b = self._open[name]
        part, size = sum_part(pair.left, pair.begin), pair.left.size
        sum_a.add(pair.begin, size, part)
        sum_b.add(pair.begin, size, part if same else sum_part(pair.right, pair.begin))
        if sum_a.is_complete:
            self.values[name] = sum_a.value(), sum_b.value()
            del self._open[name]

    def of(self, name: str) -> tuple[str, str]:
        """Both checksums of a tensor."""
        empty = PartialSum(0).value()
        return self.values.get(name, (empty, empty))


def write_delta(
    a: Source, b: Source, out: Path, progress: Progress = no_progress, *, is_compressed: bool = False
) -> Diff:
    """Compare two checkpoints, and write what turns the first into the second as a merge writes it.

    Raises ReshardError; ``out`` exists only if it is complete.
    """
    check_place(out, [*a.local_inputs, *b.local_inputs])
    if out.exists():
        raise CheckpointError(f"{out} is already there", "give another name, or remove it")
    if is_compressed:
        require_zstd()
    new = Output(b, make_plan(b.model, UNSPLIT), HUGGING_FACE)
    right = tensors_of(b)
    sums = _Sums({name: tensor_bytes(name, tensor.dtype, tensor.shape) for name, tensor in right.items()})
    diff = differences(a, b, sums.compared, progress, aliases=True)
    temporary = out.parent / f".{out.name}.{secrets.token_hex(4)}"  # named first: Ctrl-C may come when it is made
    building = temporary / "delta"
    try:
        with disk_errors(out):
            temporary.mkdir(mode=0o700)
            building.mkdir()
        changed = _Changed(diff, sums, tensors_of(a), right, Opened())
        written = (_write_frames if is_compressed else _write_smallest)(changed, building)
        files_a, files_b = a.read_side_files(), b.read_side_files()
        sides = {name: None if files_a.get(name) == content else content for name, content in files_b.items()}
        files = tuple(SourceFileRecord(file.name, file.size, None, file.header) for file in new.files)
        delta = Delta(building, (written.file,), written.changes, files, dict(new.documents), sides)
        with disk_errors(building):
            (building / DELTA).write_bytes(delta_text(delta))
            if is_compressed:
                (building / INDEX).write_bytes(index_text(version_of(out.name), written.stored))
        a.check_unchanged()
        b.check_unchanged()
        with disk_errors(out):
            building.rename(out)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    again = a.aliases.keys() | b.aliases.keys()
    return dataclasses.replace(diff, tensors=tuple(tensor for tensor in diff.tensors if tensor.name not in again))


Entry = tuple[str, str, tuple[int, ...]]
"""A stored tensor: name, dtype and shape."""


class _Written(NamedTuple):
    """The file that was written, what it has, and how each tensor of the result comes about."""

    file: str
    stored: Sequence[str]
    changes: Mapping[str, Change]


@dataclass(frozen=True)
class _Changed:
    """What differs, to be read once more."""

    diff: Diff
    sums: _Sums
    left: Mapping[str, Tensor]
    right: Mapping[str, Tensor]
    opened: Opened

    @property
    def tensors(self) -> list[TensorDiff]:
        """The tensors of which something is stored."""
        return [tensor for tensor in self.diff.tensors if tensor.kind not in (UNCHANGED, HERE)]

    def unchanged(self) -> dict[str, Change]:
        """How the other tensors come about."""
        return {
            tensor.name: Change(GONE, None, None) if tensor.kind == HERE else Change(SAME, *self.sums.of(tensor.name))
            for tensor in self.diff.tensors
            if tensor.kind in (UNCHANGED, HERE)
        }

    def pairs(self, tensor: TensorDiff) -> Iterator[Pair]:
        """The bytes of a tensor on both sides, in the order of its elements."""
        sides = [side[tensor.name].content for side in (self.left, self.right)]
        return pairs(sides, tensor_bytes(*_kind(tensor)), self.opened)

    def write_whole(self, tensor: TensorDiff, stream: BinaryIO) -> Change:
        """Write a tensor of the second checkpoint."""
        content, nbytes = self.right[tensor.name].content, tensor_bytes(*_kind(tensor))
        total = PartialSum(nbytes)
        for begin in range(0, nbytes, PIECE):
            part = content.read(self.opened, begin, min(begin + PIECE, nbytes))
            total.add(begin, len(part), sum_part(part, begin))
            stream.write(part)
        return Change(WHOLE, self.sums.of(tensor.name)[0] if tensor.kind == CHANGED else None, total.value())


def _kind(tensor: TensorDiff) -> Entry:
    """A tensor as the second checkpoint has it."""
    return tensor.name, str(tensor.dtypes[1]), tensor.shapes[1] or ()


# --------------------------------------------------------------------------------------------------- the smallest way


def _way(tensor: TensorDiff) -> str:
    """The smallest way to store a tensor."""
    return smallest(str(tensor.dtypes[1]), tensor.elements, tensor.changed) if tensor.kind == CHANGED else WHOLE


def _write_smallest(delta: _Changed, folder: Path) -> _Written:
    """Write each tensor the smallest way."""
    entries = {tensor.name: stored_as(*_kind(tensor), _way(tensor), tensor.changed) for tensor in delta.tensors}
    ordered = sorted((part for parts in entries.values() for part in parts), key=lambda entry: -DTYPE_BITS[entry[1]])
    header, changes = build_header(ordered, {"format": "delta"}), delta.unchanged()
    infos = parse_header(header, folder / CONTENT, None).tensors
    with disk_errors(folder), (folder / CONTENT).open("xb") as stream:
        reserve(stream.fileno(), len(header) + sum(info.nbytes for info in infos.values()))
        stream.write(header)
        for tensor in delta.tensors:
            parts = [infos[name] for name, *_ in entries[tensor.name]]
            if _way(tensor) == WHOLE:
                stream.seek(parts[0].offset)
                changes[tensor.name] = delta.write_whole(tensor, stream)
            else:
                _write_sparse(tensor, delta.pairs(tensor), parts, stream)
                changes[tensor.name] = Change(_way(tensor), *delta.sums.of(tensor.name))
    return _Written(CONTENT, [*infos], changes)


def _write_sparse(tensor: TensorDiff, pairs: Iterator[Pair], infos: Sequence[TensorInfo], stream: BinaryIO) -> None:
    """Write places and values, in the order of the elements."""
    dtype, unit, at = str(tensor.dtypes[1]), unit_of(str(tensor.dtypes[1])), 0
    places, values = infos
    wide = "<i4" if places.dtype == "I32" else "<i8"
    for begin, a, b in pairs:
        other = codes_of(b, dtype)
        changed = np.flatnonzero(codes_of(a, dtype) != other)
        stream.seek(values.offset + at * unit)
        stream.write(other[changed].data)
        indices = (changed + begin // unit).astype(wide)
        stream.seek(places.offset + at * indices.itemsize)
        stream.write(indices.data)
        at += changed.size
    if at != tensor.changed:
        raise CheckpointError(f"tensor '{tensor.name}' changed while it was read")


# -------------------------------------------------------------------------------------------------------- compressed


def _write_frames(delta: _Changed, folder: Path) -> _Written:
    """Write each tensor as a frame, or whole if the base has none of its shape.

    The header, of which the length depends on the frames', is written last, where there was room for the longest.
    """
    checks = {tensor.name: "0" * 8 for tensor in delta.tensors if tensor.kind == CHANGED}
    most = [
        (tensor.name, "U8", (2 * tensor_bytes(*_kind(tensor)) + STEP,)) if tensor.name in checks else _kind(tensor)
        for tensor in delta.tensors
    ]
    room = len(build_header(most, {"format": "delta"} | checks))
    changes, entries = delta.unchanged(), list[Entry]()
    with disk_errors(folder), (folder / COMPRESSED).open("xb") as stream:
        stream.seek(room)
        for tensor in delta.tensors:
            if tensor.name in checks:
                begin, nbytes = stream.tell(), tensor_bytes(*_kind(tensor))
                checks[tensor.name] = _write_frame(delta.pairs(tensor), nbytes, stream)
                changes[tensor.name] = Change(XOR, *delta.sums.of(tensor.name))
                entries.append((tensor.name, "U8", (stream.tell() - begin,)))
            else:
                changes[tensor.name] = delta.write_whole(tensor, stream)
                entries.append(_kind(tensor))
        header = build_header(entries, {"format": "delta"} | checks)[8:].ljust(room - 8)
        stream.seek(0)
        stream.write((room - 8).to_bytes(8, "little") + header)
    return _Written(COMPRESSED, [name for name, *_ in entries], changes)


def _write_frame(pairs: Iterator[Pair], nbytes: int, stream: BinaryIO) -> str:
    """Write a tensor's change; returns the new bytes' checksum."""
    check, frame = Adler32(), compressor(nbytes)
    for _, a, b in pairs:
        check.update(b.data)
        stream.write(frame.compress((a ^ b).data))
    stream.write(frame.flush())
    return check.hexdigest()
