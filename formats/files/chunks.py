"""The chunks of tensors in safetensors files, as torch's distributed checkpoints state them in the files' headers.

``__metadata__`` has, for each tensor of a file, at which offsets of the whole tensor its piece begins. The whole
tensor's shape follows from all pieces. Source: torch/distributed/checkpoint/hf_storage.py, _hf_utils.py.
"""

from __future__ import annotations

import itertools
import json
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from reshard.formats.documents import Record, Unfit, items, mapping, size, strict_json
from reshard.formats.errors import CheckpointError, MismatchError
from reshard.formats.files.safetensors import TensorInfo
from reshard.formats.notation.axes import Run, product_boxes
from reshard.formats.store import FilePath

OFFSETS_KEY = "DCP_SHARDING_INFO"
"""The key of a header's metadata under which a file says where its chunks begin."""


class Chunk(NamedTuple):
    """A chunk of a tensor: its offset and its length in each dimension."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def end(self) -> tuple[int, ...]:
        """The first index after it in each dimension."""
        return tuple(map(sum, zip(self.offset, self.shape, strict=True)))


class Sharded(NamedTuple):
    """A tensor in chunks: its shape, and each chunk with the place of its bytes.

    Several files may have each element, all elements equally often: whoever moves it compares these copies.
    """

    shape: tuple[int, ...]
    chunks: Sequence[tuple[Chunk, TensorInfo]]

    @property
    def dtype(self) -> str:
        """The dtype of the tensor's chunks, of which there is at least one."""
        return self.chunks[0][1].dtype


def whole(info: TensorInfo) -> Sharded:
    """A tensor that is stored as it is."""
    return Sharded(info.shape, [(Chunk((0,) * len(info.shape), info.shape), info)])


def together(copies: Sequence[Sharded]) -> Sharded:
    """A tensor of which there are several copies, each in chunks of its own."""
    return Sharded(copies[0].shape, [chunk for copy in copies for chunk in copy.chunks])


def chunks_metadata(offsets: Mapping[str, Sequence[int]]) -> dict[str, str]:
    """The metadata of a file's header, for the offsets of its tensors."""
    info = {name: {"saved_offsets": list(offset)} for name, offset in offsets.items()}
    return {OFFSETS_KEY: json.dumps(info, separators=(",", ":")), "DCP_VERSION": "1.0", "format": "pt"}


def read_chunks(path: FilePath, metadata: Mapping[str, str], tensors: Mapping[str, TensorInfo]) -> dict[str, Chunk]:
    """The chunks of a file's tensors, by its header's metadata.

    A file without offsets has whole tensors. Raises CheckpointError that names the file.
    """
    try:
        offsets = _OFFSETS(strict_json(metadata[OFFSETS_KEY]), OFFSETS_KEY) if OFFSETS_KEY in metadata else {}
        at = {n: Chunk(offsets.get(n, (0,) * len(info.shape)), info.shape) for n, info in tensors.items()}
        for name, (offset, shape) in at.items():
            if len(offset) != len(shape) or (OFFSETS_KEY in metadata and name not in offsets):
                raise Unfit(f"{OFFSETS_KEY}.{name} should have {len(shape)} offsets")
    except ValueError as error:
        raise CheckpointError(f"{path}: {error}", "the file's header is damaged: fetch or write it again") from None
    return at


_OFFSETS = mapping(lambda value, where: Record(value, where).get("saved_offsets", items(size)))


def whole_shape(chunks: Iterable[Chunk]) -> tuple[int, ...]:
    """The shape of the tensor that chunks are of."""
    return tuple(map(max, zip(*(at.end for at in chunks), strict=True)))


def check_tiling(name: str, chunks: Mapping[int, Chunk], shape: tuple[int, ...], where: FilePath) -> None:
    """Raise MismatchError unless chunks have each element of a tensor of this shape once, or all equally often.

    Each chunk adds to each of its corners 1, or -1 at an odd number of ends. A sum over all chunks says at each place
    how often it is covered, so the sums are those of so many whole tensors if, and only if, all is covered so often.
    The time grows with the number of chunks alone. Dimensions that no chunk divides are left out.
    """
    parts = chunks.values()
    if (covered := whole_shape(parts)) != shape:
        raise MismatchError(f"{where}: the chunks of tensor '{name}' make {list(covered)}, it should be {list(shape)}")
    cut = [d for d, size in enumerate(shape) if any(at.shape[d] != size or at.offset[d] for at in parts)]
    if len(cut) > _MOST_CUT:
        raise MismatchError(f"{where}: tensor '{name}' is divided along {len(cut)} dimensions, more than {_MOST_CUT}")
    full, count = math.prod(shape), sum(math.prod(at.shape) for at in parts)
    copies, sums = max(1, count // max(full, 1)), Counter[tuple[int, ...]]()
    for at, sign in ((Chunk((0,) * len(shape), shape), -copies), *((at, 1) for at in parts)):
        ends = [((at.offset[dim], 1), (at.offset[dim] + at.shape[dim], -1)) for dim in cut]
        for corner in itertools.product(*ends):
            sums[tuple(place for place, _ in corner)] += sign * math.prod(part for _, part in corner)
    if not any(sums.values()):
        return
    if count >= full:
        raise MismatchError(f"{where}: chunks of tensor '{name}' overlap")
    raise MismatchError(f"{where}: {full - count:,} of {full:,} elements of tensor '{name}' are missing")


_MOST_CUT = 8


def flat_chunks(info: TensorInfo, shape: tuple[int, ...], begin: int) -> Iterator[tuple[Chunk, TensorInfo]]:
    """A list of elements as chunks of a tensor of ``shape``, of which it has those from number ``begin`` on, in order.

    A range of a tensor of n dimensions is at most 2n - 1 chunks.
    """
    count = math.prod(info.shape)
    return in_boxes(info, product_boxes(begin, count, shape) if count else ())


def in_boxes(info: TensorInfo, boxes: Iterable[Sequence[Run]]) -> Iterator[tuple[Chunk, TensorInfo]]:
    """The elements of a list, in order, as chunks of a tensor: each fills a box of it row by row."""
    begin = 0
    for box in boxes:
        at = Chunk(tuple(run.offset for run in box), tuple(run.length for run in box))
        yield at, list_range(info, begin, math.prod(at.shape))._replace(shape=at.shape)
        begin += math.prod(at.shape)


def list_range(info: TensorInfo, begin: int, count: int) -> TensorInfo:
    """``count`` elements of a list, from number ``begin`` on."""
    size = info.nbytes // max(math.prod(info.shape), 1)
    return info._replace(shape=(count,), offset=info.offset + begin * size, nbytes=count * size)


def from_list(shapes: Mapping[str, tuple[int, ...]], parts: Iterable[TensorInfo]) -> dict[str, Sharded]:
    """The tensors that lie end to end in a list, of which each rank has a part; ``parts`` are in order.

    What is behind the last tensor is padding. Raises CheckpointError if the list is too short.
    """
    pending, tensors = list(reversed([*parts])), dict[str, Sharded]()
    for name, shape in shapes.items():
        at, count, chunks = 0, math.prod(shape), list[tuple[Chunk, TensorInfo]]()
        while at < count:
            if not pending:
                raise CheckpointError(f"the list ends {count - at:,} elements before the end of '{name}'")
            info = pending.pop()
            taken, remaining = min(count - at, info.shape[0]), max(info.shape[0] - count + at, 0)
            chunks += flat_chunks(list_range(info, 0, taken), shape, at)
            pending += [list_range(info, taken, remaining)] if remaining else []
            at += taken
        tensors[name] = Sharded(shape, chunks)
    return tensors
