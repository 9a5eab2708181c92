"""Writes a delta: first both checkpoints are compared, then what changed is read again and stored."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import closing
from pathlib import Path

import numpy as np

from formats.errors import CheckpointError
from formats.files.checksum import PartialSum, sum_part
from formats.files.delta import (
    BITS,
    CONTENT,
    DELTA,
    GONE,
    SAME,
    SPARSE,
    WHOLE,
    Change,
    Delta,
    Laid,
    delta_text,
    sparse_bytes,
    stored_as,
)
from formats.files.safetensors import DTYPE_BITS, TensorInfo, build_header, parse_header, tensor_bytes, unit_of
from reshard.delta.differences import CHANGED, HERE, Diff, Progress, TensorDiff, differences, no_progress
from reshard.delta.differences import SAME as UNCHANGED
from reshard.delta.numbers import codes_of
from reshard.delta.streams import Jobs, Pair, Side, Where, jobs_of_both, side_by_side
from reshard.move.reading import Bytes
from reshard.publishing.existing import check_place
from reshard.source.source import Source
from reshard.system import disk_errors, reserve
from reshard.writing.full_checkpoint import FullCheckpoint


class _Sums:
    """The checksums of each tensor on both sides."""

    def __init__(self, sizes: Mapping[str, int]) -> None:
        self._sizes, self._open = sizes, dict[str, tuple[PartialSum, PartialSum]]()
        self.found: dict[str, tuple[str, str]] = {}

    def compared(self, name: str, where: Where, pair: Pair, *, same: bool) -> None:
        """Add bytes of both sides."""
        if name not in self._open:
            self._open[name] = PartialSum(self._sizes[name]), PartialSum(self._sizes[name])
        own, other = self._open[name]
        for offset, at, length in _ranges(where, pair.begin, pair.left.size):
            part = sum_part(pair.left[at : at + length], offset)
            own.add(offset, length, part)
            other.add(offset, length, part if same else sum_part(pair.right[at : at + length], offset))
        if own.is_complete:
            self.found[name] = own.value(), other.value()
            del self._open[name]

    def of(self, name: str) -> tuple[str, str]:
        """Both checksums of a tensor."""
        empty = PartialSum(0).value()
        return self.found.get(name, (empty, empty))


def _ranges(where: Where, begin: int, length: int) -> Iterator[tuple[int, int, int]]:
    if where.rows is None:
        yield where.offset + begin, 0, length
    else:
        yield from where.rows.ranges(where.offset, begin, length)


def write_delta(a: Source, b: Source, out: Path, progress: Progress = no_progress) -> Diff:
    """Compare two checkpoints, and write what turns the first into the second as a merge writes it.

    Raises ReshardError; ``out`` exists only if it is complete.
    """
    check_place(out, [*a.read_from, *b.read_from])
    if out.exists():
        raise CheckpointError(f"{out} is already there", "give another name, or remove it")
    new = FullCheckpoint(b, None)
    sums = _Sums({t.name: tensor_bytes(t.name, t.dtype, t.shape) for t in b.unsplit.tensors})
    diff = differences(a, b, sums, progress)
    with disk_errors(out):
        temporary = Path(tempfile.mkdtemp(prefix=f".{out.name}.", dir=out.parent))
        building = temporary / "delta"
        building.mkdir()
    try:
        changes = _Storing(a, b, diff, sums).write(building / CONTENT)
        own, other = a.read_side_files(), b.read_side_files()
        sides = {name: None if own.get(name) == content else content for name, content in other.items()}
        files = tuple(Laid(file.name, file.header, file.size) for file in new.files)
        with disk_errors(building):
            (building / DELTA).write_bytes(delta_text(Delta(building, changes, files, dict(new.documents), sides)))
        a.check_unchanged()
        b.check_unchanged()
        with disk_errors(out):
            building.rename(out)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return diff


class _Storing:
    """Reads the changed tensors once more, and writes what is stored of them."""

    def __init__(self, a: Source, b: Source, diff: Diff, sums: _Sums) -> None:
        self._sources, self._jobs, self._diff, self._sums = (a, b), jobs_of_both(a, b), diff, sums
        self._ways = {t.name: self._way(t) for t in diff.tensors if t.kind not in (UNCHANGED, HERE)}

    def _way(self, tensor: TensorDiff) -> str:
        """The smallest way to store a tensor; whole, if it does not come in the order of its elements."""
        if tensor.kind != CHANGED or any(where.rows for jobs in self._jobs for where in jobs[tensor.name]):
            return WHOLE
        sizes = sparse_bytes(str(tensor.dtypes[1]), tensor.elements, tensor.changed)
        return min(sizes, key=lambda how: sizes[how])

    def write(self, file: Path) -> dict[str, Change]:
        """Write all that is stored; returns how each tensor comes about."""
        found: dict[str, Change] = {}
        entries = []
        for tensor in self._diff.tensors:
            if tensor.name in self._ways:
                dtype, shape = tensor.dtypes[1], tensor.shapes[1]
                assert dtype is not None and shape is not None
                entries += stored_as(tensor.name, self._ways[tensor.name], dtype, shape, tensor.changed)
        header = build_header(sorted(entries, key=lambda entry: -DTYPE_BITS[entry[1]]), {"format": "delta"})
        infos = parse_header(header, file, None).tensors
        with (
            disk_errors(file), file.open("xb") as opened,
            closing(Side(self._sources[0])) as left, closing(Side(self._sources[1])) as right,
        ):  # fmt: skip
            reserve(opened.fileno(), len(header) + sum(info.nbytes for info in infos.values()))
            _put(opened.fileno(), 0, np.frombuffer(header, np.uint8))
            for tensor in self._diff.tensors:
                found[tensor.name] = self._store(tensor, infos, opened.fileno(), left, right)
        return found

    def _store(self, tensor: TensorDiff, infos: Mapping[str, TensorInfo], file: int, left: Side, right: Side) -> Change:
        name, how = tensor.name, self._ways.get(tensor.name)
        base, result = self._sums.of(name)
        if how is None:
            return Change(GONE, None, None) if tensor.kind == HERE else Change(SAME, base, result)
        own = [infos[entry[0]] for entry in self._stored(tensor, how)]
        if how == WHOLE:
            total = _write_whole(name, own[0], self._jobs[1], file, right)
            return Change(WHOLE, base if tensor.kind == CHANGED else None, total)
        self._write_sparse(tensor, how, own, file, left, right)
        return Change(how, base, result)

    def _stored(self, tensor: TensorDiff, how: str) -> list[tuple[str, str, tuple[int, ...]]]:
        return stored_as(tensor.name, how, str(tensor.dtypes[1]), tensor.shapes[1] or (), tensor.changed)

    def _write_sparse(
        self, tensor: TensorDiff, how: str, own: list[TensorInfo], file: int, left: Side, right: Side
    ) -> None:
        """Write places and values, in the order of the elements."""
        dtype, unit, at = str(tensor.dtypes[1]), unit_of(str(tensor.dtypes[1])), 0
        places, values = own
        wide = "<i4" if places.dtype == "I32" else "<i8"
        rest = np.zeros(0, np.bool_)  # elements of a byte of the bitmap that is not full
        done = 0
        for pair, begin in self._pairs(tensor.name, left, right):
            other = codes_of(pair.right, dtype)
            wrong = codes_of(pair.left, dtype) != other
            found = np.flatnonzero(wrong)
            _put(file, values.offset + at * unit, other[found].view(np.uint8))
            if how == SPARSE:
                step = np.dtype(wide).itemsize
                _put(file, places.offset + at * step, (found + begin // unit).astype(wide).view(np.uint8))
            else:
                bits = np.concatenate([rest, wrong])
                full = bits.size // 8 * 8
                _put(file, places.offset + done // 8, np.packbits(bits[:full], bitorder="little"))
                rest, done = bits[full:], done + full
            at += found.size
        if how == BITS and rest.size:
            _put(file, places.offset + done // 8, np.packbits(rest, bitorder="little"))
        if at != tensor.changed:
            raise CheckpointError(f"tensor '{tensor.name}' changed while it was read")

    def _pairs(self, name: str, left: Side, right: Side) -> Iterator[tuple[Pair, int]]:
        """The pieces of a tensor, each with its first byte."""
        own, other = (jobs[name] for jobs in self._jobs)
        for where in sorted(own, key=lambda where: where.offset):
            for pair in side_by_side(left.pieces(own[where]), right.pieces(other[where])):
                yield pair, where.offset + pair.begin


def _write_whole(name: str, info: TensorInfo, jobs: Jobs, file: int, side: Side) -> str:
    """Write a tensor of the second checkpoint; returns its checksum."""
    total = PartialSum(info.nbytes)
    for where, job in jobs[name].items():
        begin = 0
        for piece in side.pieces(job):
            for offset, at, length in _ranges(where, begin, piece.size):
                part = piece[at : at + length]
                total.add(offset, length, sum_part(part, offset))
                _put(file, info.offset + offset, part)
            begin += piece.size
    return total.value()


def _put(file: int, offset: int, content: Bytes) -> None:
    view = np.ascontiguousarray(content).data
    while view:
        count = os.pwrite(file, view, offset)
        view, offset = view[count:], offset + count
