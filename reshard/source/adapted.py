"""A base model that reads like the one into which an adapter was merged: its weights are computed when they are read.

The files have the headers of the base model's: only bytes of the weights that the adapter changes differ. Each element
is ``W + scale * (B A)`` in float32, rounded once to the dtype of the weight, to nearest, ties to even. The products are
summed in the order of the rank, one after the other, so no bit depends on which range is read, or on a library.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from formats.documents import read_config
from formats.errors import CheckpointError, MismatchError
from formats.files.checkpoint import ADAPTER, ADAPTER_CONFIG, Checkpoint, has_adapter, open_checkpoint
from formats.files.checksum import check_unchanged, stamps_in, stamps_of
from formats.files.safetensors import TensorInfo, read_header
from formats.files.sharded import is_sharded
from formats.notation.architecture_files import find_architecture, load_architecture
from formats.notation.format_file import Factor
from formats.store import FilePath, StoredPath, location_of, name_in
from reshard.model.binding import bind
from reshard.model.model import FullTensor
from reshard.source.dequantized import Kept, local_file
from reshard.source.low_rank import Changes, Product, Term, changes_of
from reshard.store.computed import ComputedFile
from reshard.store.range_store import Content, RangeStore, remote_of
from reshard.store.remote import Read, Remote

_VERSION = 1
"""The version of the arithmetic: files that were computed with another version count as changed."""
_TILE = 1 << 16
"""So many elements are computed at a time: they stay in a core's cache."""

Floats = NDArray[np.float32]
T = TypeVar("T", bound=np.generic)


class Piece(NamedTuple):
    """A tensor of a file, up to byte ``end`` there, from byte ``source`` on of file number ``number``.

    ``terms`` are added to its matrices of ``rows`` times ``columns`` elements of ``dtype``. ``name`` is the tensor's.
    """

    name: str
    begin: int
    end: int
    number: int
    source: int
    dtype: str
    rows: int
    columns: int
    terms: tuple[Term, ...]


@dataclasses.dataclass(frozen=True, eq=False)
class AdaptedFile(ComputedFile):
    """A weight file that is computed from file number ``number`` of ``files``, and from the adapter's, the last."""

    header: bytes
    pieces: tuple[Piece, ...]
    files: tuple[Remote, ...]
    number: int
    size: int

    @property
    def used(self) -> tuple[Remote, Remote]:
        """The files that it is made of."""
        return self.files[self.number], self.files[-1]

    @cached_property
    def identity(self) -> str:
        """A digest of the identities of the files that it is made of, and of which bytes each tensor is made of."""
        pieces = [[*piece[:-1], [_plain(term) for term in piece.terms]] for piece in self.pieces]
        return f"adapted:{self.digest_of([_VERSION, pieces])}"

    def open(self) -> Read:
        """Open the files that it is made of, each when it is needed."""
        file, last_file = self.opened(), len(self.files) - 1

        def adapter(info: TensorInfo) -> Floats:
            begin, end = info.offset, info.offset + info.nbytes
            key = self.files[last_file], begin
            return _FACTORS.get(key, lambda: _floats(file(last_file)(begin, end), info.dtype, info.shape))

        def content(piece: Piece, begin: int, end: int) -> memoryview | bytes:
            size = _SIZES[piece.dtype] if piece.terms else 1
            first, last = begin // size, -(-end // size)  # a range may begin or end within an element
            own = file(piece.number)(piece.source + first * size, piece.source + last * size)
            return _added(own, piece, first, adapter)[begin - first * size :][: end - begin] if piece.terms else own

        return self.read_pieces(self.pieces, content)


_FACTORS = Kept(256 << 20)
"""A and B of the modules used last, in float32."""


def _plain(term: Term) -> list[Any]:
    product = term.product
    infos = [[info.offset, info.dtype, info.shape] for info in (product.a, product.b)]
    return [*infos, product.form.a.axes, product.form.b.axes, *product[3:], *term[1:]]


def factors(product: Product, expert: int, a: Floats, b: Floats) -> tuple[Floats, Floats]:
    """The two matrices whose product is that of an expert, as the weight has it."""
    sizes = product.sizes
    both = ((product.form.a, a), (product.form.b, b))
    sides = {factor.side: by_expert(found, factor, sizes)[expert] for factor, found in both}
    return (sides["in"], sides["out"].T) if product.crossed else (sides["out"], sides["in"].T)


def by_expert(found: NDArray[T], factor: Factor, sizes: Mapping[str, int]) -> NDArray[T]:
    """A or B with the dimensions expert, side, rank."""
    axes = [axis for dim in factor.dims for axis in dim]
    apart = found.reshape([sizes[axis] for axis in axes])
    if "expert" not in axes:
        axes, apart = ["expert", *axes], apart[None]
    return apart.transpose([axes.index(axis) for axis in ("expert", factor.side, "rank")])


def _added(own: memoryview, piece: Piece, first: int, adapter: Callable[[TensorInfo], Floats]) -> memoryview:
    """Elements of a tensor from number ``first`` on, with what the terms add to them."""
    size, (rows, columns) = _SIZES[piece.dtype], (piece.rows, piece.columns)
    count = len(own) // size
    top, bottom = first // columns, -(-(first + count) // columns)
    padded = np.zeros((bottom - top) * columns, f"<u{size}")  # whole rows: what lies around the range is cut off again
    padded[first - top * columns :][:count] = np.frombuffer(own, padded.dtype)
    lines = padded.reshape(-1, columns)
    for term in piece.terms:
        start = term.matrix * rows
        if start >= bottom or start + rows <= top:
            continue
        left, right = factors(term.product, term.expert, adapter(term.product.a), adapter(term.product.b))
        of = slice(term.at, term.at + term.length)
        left, right = (left, right[:, of]) if term.along else (left[of], right)
        along = term.along
        if term.product.turned:
            left, right, along = right.T, left.T, 1 - along
        column, row = (term.begin, start) if along else (0, start + term.begin)
        across, down = (term.step, 1) if along else (1, term.step)
        right = np.ascontiguousarray(right)
        low, high = (min(max(-((row - end) // down), 0), len(left)) for end in (top, bottom))
        step = max(1, _TILE // right.shape[1])
        for at in range(low, high, step):
            until = min(at + step, high)
            rows_of = slice(row + at * down - top, row + (until - 1) * down + 1 - top, down)
            block = lines[rows_of, column : column + (right.shape[1] - 1) * across + 1 : across]
            block[:] = _sum(block, piece, left[at:until], right, term.product.scale)
    return padded[first - top * columns :][:count].view(np.uint8).data


@np.errstate(over="ignore", invalid="ignore")
def _sum(block: NDArray[Any], piece: Piece, left: Floats, right: Floats, scale: float) -> NDArray[Any]:
    """``W + scale * (left right)`` as numbers of the weight's dtype, given those of W. Raises MismatchError."""
    weight = _widened(block, piece.dtype)
    total, term = left[:, :1] * right[0], np.empty((len(left), right.shape[1]), np.float32)
    for k in range(1, len(right)):
        np.multiply(left[:, k : k + 1], right[k], out=term)
        total += term
    total *= np.float32(scale)
    total += weight
    rounded = _rounded(total, piece.dtype)
    lost = ~np.isfinite(_widened(rounded, piece.dtype))
    if lost.any() and np.isfinite(weight[lost]).any():
        raise MismatchError(
            f"tensor '{piece.name}' of the base model is finite and would not be with the adapter in it: numbers of A "
            f"or B are not finite, or their sum is too large for {piece.dtype}",
            "give an adapter that was trained on this base model",
        )
    return rounded


def _widened(numbers: NDArray[Any], dtype: str) -> Floats:
    if dtype == "BF16":
        return (numbers.astype("<u4") << 16).view("<f4")
    return np.ascontiguousarray(numbers).view("<f2" if dtype == "F16" else "<f4").astype("<f4")


def _rounded(values: Floats, dtype: str) -> NDArray[Any]:
    """The nearest numbers of a dtype, ties to even."""
    bits = values.view("<u4")
    if dtype == "F32":
        return bits
    if dtype == "F16":
        return values.astype("<f2").view("<u2")
    even = (bits + (0x7FFF + ((bits >> 16) & 1))) >> 16
    return np.where(np.isnan(values), (bits >> 16) | 0x40, even).astype("<u2")


_SIZES = {"BF16": 2, "F16": 2, "F32": 4}


def _floats(content: memoryview, dtype: str, shape: tuple[int, ...]) -> Floats:
    if dtype == "F64":
        with np.errstate(over="ignore"):  # the sum is checked
            return np.frombuffer(content, "<f8").astype("<f4").reshape(shape)
    return _widened(np.frombuffer(content, f"<u{_SIZES[dtype]}"), dtype).reshape(shape)


def adapted(path: FilePath, adapter: FilePath, plan_file: Path | None = None) -> RangeStore:
    """A base model as if an adapter had been merged into it: a store around it.

    Raises CheckpointError if either is not what it should be, PlanError for an adapter that is not plain LoRA, and
    MismatchError for one of another base model.
    """
    if is_sharded(path):
        raise CheckpointError(f"{path} is split: an adapter is merged into a full checkpoint", "merge the ranks first")
    if not has_adapter(adapter):
        raise CheckpointError(f"{adapter} is no PEFT adapter: it needs {ADAPTER} and {ADAPTER_CONFIG}, and no model")
    known = stamps_in(path)
    checkpoint = open_checkpoint(path)
    if any(file.header is None for file in checkpoint.files):
        raise CheckpointError(f"{path}: an adapter is merged only into safetensors")
    sides = [*checkpoint.side_files, *([path / checkpoint.index_name] if checkpoint.index_name else [])]
    stamps = stamps_of([*(file.path for file in checkpoint.files), *sides], path, known)
    own = stamps_of([adapter / ADAPTER, adapter / ADAPTER_CONFIG], adapter, stamps_in(adapter))
    tensors = read_header(adapter / ADAPTER).tensors
    base = load_architecture(plan_file) if plan_file else find_architecture(checkpoint.config, path)
    full = [FullTensor(info.name, info.dtype, info.shape, info.file.name) for info in checkpoint.tensors.values()]
    base = bind(base, checkpoint.config, full).architecture  # of several layouts, that of these files
    changes = changes_of(base, checkpoint, read_config(adapter / ADAPTER_CONFIG), tensors)
    files = [remote_of(file.path) or local_file(file.path, path, stamps[file.path]) for file in checkpoint.files]
    added = remote_of(adapter / ADAPTER) or local_file(adapter / ADAPTER, adapter, own[adapter / ADAPTER])
    made = dict(_files(checkpoint, changes, [*files, added]))
    contents: dict[str, Content] = {**{name_in(side, path): side for side in sides}, **made}
    check_unchanged({**stamps, **own})
    commit = path.store.commit if isinstance(path, StoredPath) else None
    location = location_of(path)
    store = RangeStore(f"{location} + {location_of(adapter)}", contents, location=location, commit=commit)
    store.keep({name: {0: file.header} for name, file in made.items()})
    return store


def _files(checkpoint: Checkpoint, changes: Changes, files: Sequence[Remote]) -> Iterator[tuple[str, AdaptedFile]]:
    held: dict[FilePath, list[TensorInfo]] = {file.path: [] for file in checkpoint.files}
    for info in checkpoint.tensors.values():
        held[info.file].append(info)
    for number, file in enumerate(checkpoint.files):
        pieces = (_piece(info, changes, number, len(files) - 1) for info in held[file.path] if info.nbytes)
        assert file.header is not None
        ordered = tuple(sorted(pieces, key=lambda piece: piece.begin))
        yield file.name, AdaptedFile(file.header, ordered, tuple(files), number, file.size)


def _piece(info: TensorInfo, changes: Changes, number: int, last: int) -> Piece:
    other, terms = changes.replaced.get(info.name), tuple(changes.terms.get(info.name, ()))
    rows, columns = info.shape[-2:] if terms else (1, 1)
    source = (number, info.offset) if other is None else (last, other.offset)
    return Piece(info.name, info.offset, info.offset + info.nbytes, *source, info.dtype, rows, columns, terms)
