"""Writes a delta: first both checkpoints are compared, then the changes are read again and stored."""

from __future__ import annotations

import dataclasses
import secrets
import shutil
import zlib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import BinaryIO

import numpy as np

from reshard.delta.differences import CHANGED, HERE, PIECE, THERE, Diff, Pair, TensorDiff, codes_of, differences, pairs
from reshard.delta.differences import SAME as UNCHANGED
from reshard.formats.errors import CheckpointError
from reshard.formats.files.checkpoint import DELTA
from reshard.formats.files.checksum import PartialSum, sum_part
from reshard.formats.files.compressed import STEP, XOR, compressor, require_zstd
from reshard.formats.files.delta import (
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
from reshard.formats.files.safetensors import (
    DTYPE_BITS,
    SourceFileRecord,
    TensorInfo,
    build_header,
    parse_header,
    tensor_bytes,
    unit_of,
)
from reshard.formats.notation.format_file import HUGGING_FACE
from reshard.model.naming import spelled_alike
from reshard.move.jobs import ByteProgress, no_progress
from reshard.publishing.existing import check_place
from reshard.source.source import Source
from reshard.system import disk_errors, reserve
from reshard.transforms.tensors import ARITHMETIC, tensors_of
from reshard.writing.documents import documents_of
from reshard.writing.output import Output

TensorSums = dict[str, tuple[str, str]]
"""The checksums of each tensor that was compared, on both sides."""


def write_delta(
    a: Source, b: Source, out: Path, progress: ByteProgress = no_progress, *, is_compressed: bool = False
) -> Diff:
    """Compare two checkpoints, and write the delta that turns the first into the second, as a merge writes it.

    Raises ReshardError; ``out`` exists only if it is complete.
    """
    check_place(out, [*a.local_inputs, *b.local_inputs])
    if out.exists():
        raise CheckpointError(f"{out} is already there", "give another name, or remove it")
    if is_compressed:
        require_zstd()
    new = Output(b, b.whole, HUGGING_FACE, names=None)
    sums, begun = TensorSums(), dict[str, tuple[PartialSum, PartialSum]]()
    sizes = {tensor.name: tensor_bytes(tensor.name, tensor.dtype, tensor.shape) for tensor in b.model.tensors}
    sizes |= {second: sizes[first] for second, first in b.aliases.items()}

    def add(name: str, pair: Pair, same: bool) -> None:
        if name not in begun:
            begun[name] = PartialSum(sizes[name]), PartialSum(sizes[name])
        sum_a, sum_b = begun[name]
        part, size = sum_part(pair.left, pair.begin), pair.left.size
        sum_a.add(pair.begin, size, part)
        sum_b.add(pair.begin, size, part if same else sum_part(pair.right, pair.begin))
        if sum_a.is_complete:
            sums[name] = sum_a.value(), sum_b.value()
            del begun[name]

    temporary = out.parent / f".{out.name}.{secrets.token_hex(4)}"  # named first: Ctrl-C may come when it is made
    building = temporary / "delta"
    try:
        with disk_errors(out):
            temporary.mkdir(mode=0o700)
            building.mkdir()
        diff = differences(a, b, add, progress, aliases=True)
        lacking = b.aliases.keys() - {tensor.name for file in new.files for tensor in file.tensors}
        diff = dataclasses.replace(diff, tensors=tuple(_without(lacking, diff.tensors)))
        file, stored, changes = _write(a, b, diff, sums, building, is_compressed=is_compressed)
        files_a, files_b = a.read_side_files(), b.read_side_files()
        sides = {name: None if files_a.get(name) == content else content for name, content in files_b.items()}
        files = tuple(SourceFileRecord(file.name, file.layout.size, None, file.layout.header) for file in new.files)
        delta = Delta(building, (file,), changes, files, dict(documents_of(new).general), sides, b.names_of)
        with disk_errors(building):
            (building / DELTA).write_bytes(delta_text(delta))
            if is_compressed:
                (building / INDEX).write_bytes(index_text(version_of(out.name), stored))
        a.check_unchanged()
        b.check_unchanged()
        with disk_errors(out):
            building.rename(out)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    spelled = spelled_alike(b.model, a.model)
    again = {spelled.get(name, name) for name in a.aliases} | b.aliases.keys()
    return dataclasses.replace(diff, tensors=tuple(tensor for tensor in diff.tensors if tensor.name not in again))


def _without(names: Collection[str], tensors: Iterable[TensorDiff]) -> Iterator[TensorDiff]:
    """The differences as if the second checkpoint did not have some names."""
    for tensor in tensors:
        if tensor.name not in names:
            yield tensor
        elif tensor.kind != THERE:
            yield dataclasses.replace(tensor, kind=HERE)


def _write(
    a: Source, b: Source, diff: Diff, sums: TensorSums, folder: Path, *, is_compressed: bool
) -> tuple[str, list[str], Mapping[str, Change]]:
    """Write the changes: each tensor in its smallest form, or compressed as a frame; whole, if the base has none like
    it.

    Returns the file, the tensors that it has, and how each tensor of the result comes about. The header of frames, of
    which the length depends on theirs, is written last, where there was room for the longest.
    """
    spelled, right = spelled_alike(b.model, a.model), tensors_of(b)
    left = {spelled.get(name, name): tensor for name, tensor in tensors_of(a).items()}
    changes, ways, parts, checks = dict[str, Change](), dict[str, str](), dict[str, list[Entry]](), dict[str, str]()
    empty = (PartialSum(0).value(),) * 2
    for tensor in diff.tensors:
        name, dtype, way, count = tensor.name, str(tensor.dtypes[1]), WHOLE, tensor.changed
        if tensor.kind == HERE:
            changes[name] = Change(GONE, None, None)
            continue
        if tensor.kind == UNCHANGED:
            changes[name] = Change(SAME, *sums.get(name, empty))
            continue
        if tensor.kind == CHANGED and is_compressed:
            way, checks[name], count = XOR, "0" * 8, 2 * tensor_bytes(name, dtype, right[name].shape) + STEP
        elif tensor.kind == CHANGED:
            way = smallest(dtype, tensor.elements, tensor.changed)
        ways[name], parts[name] = way, stored_as(name, dtype, right[name].shape, way, count)
    entries = [part for named in parts.values() for part in named]
    if not is_compressed:
        entries.sort(key=lambda entry: -DTYPE_BITS[entry[1]])
    file, header = COMPRESSED if is_compressed else CONTENT, build_header(entries, {"format": "delta"} | checks)
    infos = parse_header(header, folder / file, None).tensors
    with disk_errors(folder), (folder / file).open("xb") as stream:
        if not is_compressed:
            reserve(stream.fileno(), len(header) + sum(info.nbytes for info in infos.values()))
        stream.seek(len(header))
        for tensor in (tensor for tensor in diff.tensors if tensor.name in ways):
            name, nbytes = tensor.name, tensor_bytes(tensor.name, right[tensor.name].dtype, right[tensor.name].shape)
            if not is_compressed:
                stream.seek(infos[parts[name][0][0]].offset)
            if ways[name] == WHOLE:
                total = PartialSum(nbytes)
                for begin in range(0, nbytes, PIECE):
                    content = right[name].content.read(ARITHMETIC, begin, min(begin + PIECE, nbytes))
                    total.add(begin, len(content), sum_part(content, begin))
                    stream.write(content)
                changes[name] = Change(WHOLE, sums[name][0] if tensor.kind == CHANGED else None, total.value())
                continue
            changes[name] = Change(ways[name], *sums[name])
            both = pairs([left[name].content, right[name].content], nbytes)
            if ways[name] == XOR:
                begin, check, frame = stream.tell(), 1, compressor(nbytes)
                for _, old, new in both:
                    check = zlib.adler32(new.data, check)
                    stream.write(frame.compress((old ^ new).data))
                stream.write(frame.flush())
                checks[name], parts[name] = f"{check:08x}", [(name, "U8", (stream.tell() - begin,))]
            else:
                _write_sparse(tensor, both, [infos[part] for part, *_ in parts[name]], stream)
        stream.seek(0)
        if is_compressed:
            entries = [part for named in parts.values() for part in named]
            text = build_header(entries, {"format": "delta"} | checks)[8:].ljust(len(header) - 8)
            header = (len(text)).to_bytes(8, "little") + text
        stream.write(header)
    return file, [name for name, *_ in entries], changes


Entry = tuple[str, str, tuple[int, ...]]
"""A stored tensor: name, dtype and shape."""


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
