"""Faults that happen when checkpoints are split, put into shards whose headers, shapes and configs stay right.

``FAULTS[name](shards)`` damages a split checkpoint as a buggy converter would; afterwards ``shards.damaged`` has the
tensor and rank of everything whose bytes are others now. A fault that does not apply to a model changes nothing. Faults
find their tensors by the plan's notation (a packed weight is a sum, a head-wise one has an axis of the first parallel
family), and by names only where the notation does not tell (k from v, gate from up, where each has its own tensor).
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from reshard.formats.files.checksum import file_checksum
from reshard.formats.files.manifest import MANIFEST
from reshard.formats.files.safetensors import DTYPE_BITS, TensorInfo
from reshard.formats.notation.axes import Dim
from reshard.mesh.plan import Layout
from reshard.source.opening import open_source
from reshard.source.source import Source

Array = np.ndarray[Any, Any]
LAYER = 1
"""The layer that most faults damage: neither the first nor the last."""


def read(info: TensorInfo) -> Array:
    """The elements of a tensor, as unsigned integers."""
    with info.file.open("rb") as file:
        file.seek(info.offset)
        return np.frombuffer(file.read(info.nbytes), f"<u{DTYPE_BITS[info.dtype] // 8}").reshape(info.shape)


def sign(folder: Path) -> None:
    """Let the manifest, if there is one, have the checksums of the files as they are."""
    path = folder / MANIFEST
    if path.exists():
        document = json.loads(path.read_text())
        for rank in document["ranks"]:
            for file in rank["files"]:
                file["checksum"] = file_checksum(folder / file["name"])
        path.write_text(json.dumps(document, indent=2, ensure_ascii=False) + "\n")


@dataclass
class Damaged:
    """Shards to be damaged, and the full checkpoint that they should be; the tensor and rank of what was."""

    folder: Path
    original: Source
    damaged: set[tuple[str, int]] = field(default_factory=set)

    @cached_property
    def source(self) -> Source:
        return open_source(self.folder)

    def local(self, name: str, rank: int) -> Array:
        """A rank's tensor as it is now."""
        return read(self.source.ranks[rank][name])

    def write(self, name: str, rank: int, array: Array) -> None:
        """Put other content in the place of a rank's tensor."""
        info, before = self.source.ranks[rank][name], self.local(name, rank)
        assert array.shape == before.shape and array.dtype == before.dtype, (name, array.shape, before.shape)
        if array.tobytes() == before.tobytes():
            return
        with info.file.open("r+b") as file:
            file.seek(info.offset)
            file.write(array.tobytes())
        self.damaged.add((name, rank))

    def sign(self) -> None:
        """Let the manifest have the checksums of the files as they are."""
        sign(self.folder)


class Entry(NamedTuple):
    """A tensor of a split checkpoint."""

    name: str
    dtype: str
    layout: Layout


class Shards(Damaged):
    """A split checkpoint to be damaged: what the notation says of its tensors."""

    @property
    def degree(self) -> int:
        return self.source.plan.mesh.size

    @cached_property
    def tensors(self) -> Mapping[str, Entry]:
        """All tensors, by their names."""
        laid = self.source.plan.laid
        return {t.name: Entry(t.name, t.dtype, laid[t.kind]) for t in self.source.plan.model.tensors}

    def entries(self) -> Iterator[Entry]:
        """The tensors of the layer that faults damage."""
        for entry in self.tensors.values():
            if self.indices(entry.name).get("layer") == LAYER:
                yield entry

    def indices(self, name: str) -> Mapping[str, int]:
        match = self.source.model.architecture.match(name)
        return match.indices if match else {}

    def experts(self, rank: int) -> list[int]:
        """The numbers of a rank's experts in that layer, if each has its own tensors."""
        held = [entry.name for entry in self.entries() if entry.name in self.source.ranks[rank]]
        return sorted({index for name in held if (index := self.indices(name).get("expert")) is not None})

    def sizes(self, name: str, rank: int) -> dict[str, int]:
        """The sizes of the axes of a tensor on a rank."""
        plan = self.source.plan
        return plan.rank_sizes(rank, plan.model.sizes.of(self.indices(name)))

    def full(self, name: str) -> Array:
        """The tensor as it should be, padded."""
        layout, array = self.tensors[name].layout, read(self.original.ranks[0][name])
        return np.pad(array, [(0, p - n) for p, n in zip(layout.padded, layout.full, strict=True)])

    # ------------------------------------------------------------------------------------- what the notation says

    def output(self, entry: Entry) -> int | None:
        """The dimension that a weight or bias has its outputs in."""
        rule = entry.layout.rule
        return rule.output_dim if len(rule.dims) > 1 else 0

    def is_row_parallel(self, entry: Entry) -> bool:
        parallel = entry.layout.parallel_dims
        return len(entry.layout.full) > 1 and bool(parallel) and self.output(entry) not in parallel

    @cached_property
    def head_axes(self) -> frozenset[str]:
        """The axes that count heads (KV heads, and query heads in a group)."""
        return frozenset(self.source.model.architecture.families["tp"][0])

    def projections(self, part: str) -> Iterator[tuple[Entry, int, frozenset[str] | None]]:
        """The weights that make q, k or v: with the dimension of the heads, and the labels to take, if it is packed."""
        for entry in self.entries():
            dim = self.output(entry)
            if len(entry.layout.full) < 2 or dim not in entry.layout.parallel_dims:
                continue
            tokens, labels = entry.layout.rule.dims[dim], _labels(entry.layout.rule.dims[dim])
            if part in labels:
                yield entry, dim, frozenset({part})
            elif not labels and tokens.axes & self.head_axes and re.search(rf"\.{part}(_b)?_proj\.", entry.name):
                yield entry, dim, None

    def permute(
        self, entry: Entry, dim: int, rank: int, *, axes: Mapping[str, Sequence[int]] | None = None,
        labels: frozenset[str] | None = None, turned: bool = False,
    ) -> None:  # fmt: skip
        """Reorder a dimension of a rank's part: along axes (in summands with these labels only), or whole summands."""
        order = _order(entry.layout.rule.dims[dim], self.sizes(entry.name, rank), axes or {}, labels, turned)
        self.write(entry.name, rank, self.local(entry.name, rank).take(order, dim))


def _labels(dim: Dim) -> frozenset[str]:
    """The labels of the summands of a dimension, nested ones too."""
    found = {summand.label for summand in dim.summands if summand.label}
    return frozenset(found).union(
        *(_labels(f) for summand in dim.summands for f in summand.factors if isinstance(f, Dim))
    )


@dataclass(frozen=True)
class _Place:
    """An index of a dimension, by its coordinates, slowest first: (axis, value), or of a sum (None, summand). They
    sort as the indices do. ``label`` is that of the innermost summand that has one.
    """

    coordinates: tuple[tuple[str | None, int], ...] = ()
    label: str | None = None


def _places(dim: Dim, sizes: Mapping[str, int]) -> list[_Place]:
    """All indices of a dimension, in order."""
    found = []
    for number, summand in enumerate(dim.summands):
        places = [_Place(((None, number),), summand.label)]
        for factor in summand.factors:
            if isinstance(factor, Dim):
                inner = _places(factor, sizes)
            else:
                size = factor if isinstance(factor, int) else sizes[factor]
                inner = [_Place(((str(factor), i),)) for i in range(size)]
            places = [_Place(a.coordinates + b.coordinates, b.label or a.label) for a in places for b in inner]
        found += places
    return found


def _order(
    dim: Dim, sizes: Mapping[str, int], axes: Mapping[str, Sequence[int]], labels: frozenset[str] | None,
    turned: bool,
) -> list[int]:  # fmt: skip
    """For each new index of a dimension the old one; with ``turned`` the summands of labelled sums turn by one."""
    places = _places(dim, sizes)
    counts = {len(d.summands) for d in _sums(dim)}

    def moved(place: _Place) -> list[int]:
        new = []
        for axis, value in place.coordinates:
            if axis is None:
                if turned and place.label and len(counts) == 1:
                    value = (value - 1) % max(counts)
            elif axis in axes and (labels is None or place.label in labels):
                value = list(axes[axis]).index(value)
            new.append(value)
        return new

    return sorted(range(len(places)), key=lambda i: moved(places[i]))


def _sums(dim: Dim) -> Iterator[Dim]:
    """A dimension and those in it, if they have more than one summand."""
    if len(dim.summands) > 1:
        yield dim
    for summand in dim.summands:
        for factor in summand.factors:
            if isinstance(factor, Dim):
                yield from _sums(factor)


# ----------------------------------------------------------------------------------------------------------- the faults

Fault = Callable[[Shards], None]


def packed_by_plain_chunks(shards: Shards) -> None:
    """Packed weights cut into equal pieces of the whole, as ``chunk`` does."""
    for entry in shards.entries():
        for dim in entry.layout.parallel_dims:
            if not _is_packed(entry.layout.rule.dims[dim]):
                continue
            for rank, whole in enumerate(np.array_split(shards.full(entry.name), shards.degree, dim)):
                if whole.shape == entry.layout.boxes[rank].shape:
                    shards.write(entry.name, rank, np.ascontiguousarray(whole))


def _is_packed(dim: Dim) -> bool:
    return next(_sums(dim), None) is not None


def qkv_order(shards: Shards) -> None:
    """q, k and v in another order: packed ones turned by one, separate k and v exchanged."""
    for entry in shards.entries():
        for dim in entry.layout.parallel_dims:
            if _labels(entry.layout.rule.dims[dim]) & {"k"} and len(entry.layout.full) > 1:
                for rank in range(shards.degree):
                    shards.permute(entry, dim, rank, turned=True)
    if not shards.damaged:
        _exchange_by_name(shards, "k_proj", "v_proj")


def gate_and_up(shards: Shards) -> None:
    """The two factors of a gated MLP exchanged."""
    for entry in shards.entries():
        for dim in entry.layout.parallel_dims:
            tokens = entry.layout.rule.dims[dim]
            is_interleaved = any(summand.factors[-1:] == (2,) for summand in tokens.summands)
            for rank in range(shards.degree):
                if _labels(tokens) == {"gate", "up"}:
                    shards.permute(entry, dim, rank, turned=True)
                elif is_interleaved:
                    shards.permute(entry, dim, rank, axes={"2": [1, 0]})
    if not shards.damaged:
        _exchange_by_name(shards, "gate_proj", "up_proj")
        _exchange_by_name(shards, "w1", "w3")


def _exchange_by_name(shards: Shards, one: str, other: str) -> None:
    for entry in shards.entries():
        twin = entry.name.replace(f".{one}.", f".{other}.")
        if twin != entry.name and twin in shards.tensors:
            for rank in range(shards.degree):
                first, second = shards.local(entry.name, rank), shards.local(twin, rank)
                shards.write(entry.name, rank, second)
                shards.write(twin, rank, first)


def two_heads(shards: Shards) -> None:
    """Two query heads of the last rank exchanged, in the weight that makes them only."""
    rank = shards.degree - 1
    for entry, dim, labels in shards.projections("q"):
        sizes = shards.sizes(entry.name, rank)
        within = entry.layout.rule.dims[dim].axes & shards.head_axes
        axis = next((a for a in sorted(within) if sizes[a] > 1), None)
        if axis is not None:
            shards.permute(entry, dim, rank, axes={axis: [1, 0, *range(2, sizes[axis])]}, labels=labels)
            return
    for entry, dim, labels in shards.projections("k"):  # where q is not told from k (MLA): the heads of k
        axis = next((a for a in sorted(shards.head_axes) if shards.sizes(entry.name, rank)[a] > 1), None)
        if axis is not None:
            size = shards.sizes(entry.name, rank)[axis]
            shards.permute(entry, dim, rank, axes={axis: [1, 0, *range(2, size)]}, labels=labels)
            return


def kv_head_of_wrong_group(shards: Shards) -> None:
    """Each rank has the k of the next rank's KV heads."""
    for entry, dim, labels in shards.projections("k"):
        parts = [shards.local(entry.name, rank) for rank in range(shards.degree)]
        for rank in range(shards.degree):
            places = _places(entry.layout.rule.dims[dim], shards.sizes(entry.name, rank))
            index = [i for i, place in enumerate(places) if labels is None or place.label in labels]
            new = np.moveaxis(parts[rank].copy(), dim, 0)
            new[index] = np.moveaxis(parts[(rank + 1) % shards.degree], dim, 0)[index]
            shards.write(entry.name, rank, np.ascontiguousarray(np.moveaxis(new, 0, dim)))
        return


def another_ranks_file(shards: Shards) -> None:
    """The content of rank 1 stands in rank 0 too."""
    for name in shards.tensors:
        shards.write(name, 0, shards.local(name, 1))


def row_bias_on_every_rank(shards: Shards) -> None:
    """The biases of row-parallel weights are added by every rank, as if they were that many times as large."""
    for entry in shards.entries():
        for tail in (".weight", ""):
            bias = entry.name.removesuffix(".weight") + (".bias" if tail else "_bias")
            if entry.name.endswith(tail) and bias in shards.tensors and shards.is_row_parallel(entry):
                for rank in range(shards.degree):
                    local = shards.local(bias, rank)
                    shards.write(bias, rank, _from_float(_to_float(local, entry.dtype) * shards.degree, entry.dtype))


def row_split_by_columns(shards: Shards) -> None:
    """A square row-parallel weight cut along its other dimension."""
    for entry in shards.entries():
        if shards.is_row_parallel(entry) and _is_square(entry):
            pieces = np.array_split(shards.full(entry.name), shards.degree, shards.output(entry) or 0)
            for rank, piece in enumerate(pieces):
                shards.write(entry.name, rank, piece.reshape(entry.layout.boxes[rank].shape))
            return


def transposed_square(shards: Shards) -> None:
    """A square weight transposed before it was split."""
    for entry in shards.entries():
        if _is_square(entry):
            for rank in range(shards.degree):
                box = entry.layout.boxes[rank]
                index = [np.concatenate([np.arange(run.offset, run.end) for run in dim]) for dim in box.dims]
                shards.write(entry.name, rank, np.ascontiguousarray(shards.full(entry.name).T[np.ix_(*index)]))
            return


def _is_square(entry: Entry) -> bool:
    full = entry.layout.full
    return len(full) == 2 and full[0] == full[1]


def rotary_halves(shards: Shards) -> None:
    """q and k with the two halves of each head interleaved, as for the other way of rotating."""
    settings = shards.source.model.sizes.settings
    if not any("rope" in key or "rotary" in key for key in settings):
        return
    has_part = any("rope" in entry.layout.rule.axes for entry in shards.entries())
    for entry in shards.entries():
        for dim, tokens in enumerate(entry.layout.rule.dims):
            axis = "rope" if has_part else "head"
            named = any(part in entry.name for part in ("q_proj", "k_proj"))
            labels = frozenset({"q", "k"}) if _labels(tokens) & {"q"} else None
            chosen = has_part or (dim == shards.output(entry) and (named or labels))
            if axis in tokens.axes and chosen and len(entry.layout.full) > 1:
                for rank in range(shards.degree):
                    size = shards.sizes(entry.name, rank)[axis]
                    order = np.arange(size).reshape(2, -1).T.reshape(-1).tolist()
                    shards.permute(entry, dim, rank, axes={axis: order}, labels=labels)


def one_expert(shards: Shards) -> None:
    """On the last rank two experts have changed places."""
    rank = shards.degree - 1
    for entry in shards.entries():
        numbers = shards.experts(rank)
        if numbers and shards.indices(entry.name).get("expert") == numbers[0]:
            other = entry.name.replace(f".experts.{numbers[0]}.", f".experts.{numbers[1]}.")
            first, second = shards.local(entry.name, rank), shards.local(other, rank)
            shards.write(entry.name, rank, second)
            shards.write(other, rank, first)
        elif "expert" in entry.layout.rule.axes:
            dim = next(i for i, tokens in enumerate(entry.layout.rule.dims) if "expert" in tokens.axes)
            size = shards.sizes(entry.name, rank)["expert"]
            shards.permute(entry, dim, rank, axes={"expert": [1, 0, *range(2, size)]})


def router(shards: Shards) -> None:
    """The router of the last rank has its rows turned by one."""
    for entry in shards.entries():
        if "routes" in entry.layout.rule.axes and len(entry.layout.full) > 1:
            rank = shards.degree - 1
            shards.write(entry.name, rank, np.roll(shards.local(entry.name, rank), 1, 0))


def vocabulary_by_one(shards: Shards) -> None:
    """Each rank's rows of the vocabulary begin one too late."""
    for entry in shards.tensors.values():
        dims = entry.layout.rule.dims
        if len(dims) == 2 and dims[0].axis == "vocab":
            shifted = np.roll(shards.full(entry.name), -1, 0)
            for rank in range(shards.degree):
                box = entry.layout.boxes[rank]
                (run,) = box.dims[0]
                shards.write(entry.name, rank, np.ascontiguousarray(shifted[run.offset : run.end]))
            return


def norm_of_neighbour(shards: Shards) -> None:
    """A norm's weight is that of the next layer."""
    for entry in shards.entries():
        neighbour = entry.name.replace(f".{LAYER}.", f".{LAYER + 1}.")
        is_vector = len(entry.layout.full) == 1 and entry.layout.is_replicated and entry.name.endswith(".weight")
        if is_vector and neighbour in shards.tensors:
            for rank in range(shards.degree):
                shards.write(entry.name, rank, shards.local(neighbour, rank))
            return


def lower_precision(shards: Shards) -> None:
    """One weight has been through a type of fewer bits: float32 through bfloat16, 16 bits through 8."""
    entry = _some_weight(shards)
    bits = {"F32": 16, "BF16": 4, "F16": 7}[entry.dtype]
    for rank in range(shards.degree):
        local = shards.local(entry.name, rank)
        wide = local.astype(np.uint64) + (1 << (bits - 1))
        shards.write(entry.name, rank, (wide >> bits << bits).astype(local.dtype))


def exponent_bit(shards: Shards, bit: int = 7) -> None:
    """In one element of the last rank a bit of the exponent is another (7: the highest of eight)."""
    entry, rank = _some_weight(shards), shards.degree - 1
    local = shards.local(entry.name, rank).copy()
    mantissa = {"F32": 23, "BF16": 7, "F16": 10}[entry.dtype]
    local.reshape(-1)[local.size // 2] ^= local.dtype.type(1 << (mantissa + bit))
    shards.write(entry.name, rank, local)


def _some_weight(shards: Shards) -> Entry:
    """A row-parallel weight."""
    return next(entry for entry in shards.entries() if shards.is_row_parallel(entry))


def _to_float(raw: Array, dtype: str) -> Array:
    if dtype == "BF16":
        return (raw.astype(np.uint32) << 16).view(np.float32)
    return raw.view({"F32": np.float32, "F16": np.float16}[dtype])


def _from_float(values: Array, dtype: str) -> Array:
    if dtype == "BF16":
        wide = values.astype(np.float32).view(np.uint32)
        return ((wide + 0x7FFF + (wide >> 16 & 1)) >> 16).astype(np.uint16)
    return values.astype({"F32": np.float32, "F16": np.float16}[dtype]).view(f"u{DTYPE_BITS[dtype] // 8}")


FAULTS: dict[str, Fault] = {
    fault.__name__: fault
    for fault in (
        packed_by_plain_chunks, qkv_order, gate_and_up, two_heads, kv_head_of_wrong_group, another_ranks_file,
        row_bias_on_every_rank, row_split_by_columns, transposed_square, rotary_halves, one_expert, router,
        vocabulary_by_one, norm_of_neighbour, lower_precision, exponent_bit,
    )
}  # fmt: skip


def inject(name: str, folder: Path, original: Source) -> set[tuple[str, int]]:
    """Put a fault into the shards in ``folder``: the tensors and ranks that it damaged, none if it does not apply."""
    shards = Shards(folder, original)
    FAULTS[name](shards)
    shards.sign()
    return shards.damaged
