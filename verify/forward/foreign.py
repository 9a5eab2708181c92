"""A rank's tensors under Hugging Face's names, from the files of another program's format.

The model that ``verify`` runs is transformers', whose code loads a folder. So a rank writes a temporary folder of its
own, with the part of each Hugging Face tensor that its files in the other format hold, and nothing else. Bytes are not
compared here: a fault in the files becomes a fault in the folder.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from formats.errors import CheckpointError
from formats.files.checkpoint import CONFIG, MODEL
from formats.files.safetensors import DTYPE_BITS, TensorInfo, build_header
from formats.notation.format import Format
from formats.torch_internals import TORCH_DTYPES
from reshard.mesh.plan import Box, Plan, rank_config
from reshard.placement.arrangement import Arrangement, arrangement_of
from reshard.placement.stored import Chunks, Location
from verify.bytes.atoms import Block, Parts, strided
from verify.bytes.reading import Files
from verify.bytes.views import array
from verify.rules import with_sound_config

_NONE = np.zeros(0, np.intp)


@dataclass(frozen=True)
class Foreign:
    """Shards in another program's format: the plan with all stored tensors, and each rank's tensors.

    With ``chunks``, files stand in the place of ranks, and the plan is that of one rank.
    """

    format: Format
    plan: Plan
    ranks: tuple[Mapping[str, TensorInfo], ...]
    chunks: Chunks | None = None


def write_rank(foreign: Foreign, rank: int, folder: Path, plan: Plan | None = None) -> Path:
    """Write a folder like the one that ``reshard split`` writes for a rank of ``plan``, and return it.

    Without a plan, that of the shards.

    Raises CheckpointError where the rank lacks elements that it would have there.
    """
    arrangement = arrangement_of(foreign.plan, foreign.format, foreign.chunks)
    elements, plan = _Elements(foreign, arrangement), foreign.plan if plan is None else plan
    boxes = plan.boxes(rank)
    stored = (tensor for tensor in plan.model.tensors if tensor.name not in arrangement.dropped)
    names = [(name, kind.dtype, boxes[kind]) for name, kind, _ in stored if kind in boxes]
    names.sort(key=lambda entry: -DTYPE_BITS[entry[1]])
    folder.mkdir(parents=True)
    (folder / CONFIG).write_text(json.dumps(rank_config(with_sound_config(plan), rank)), encoding="utf-8")
    with (folder / MODEL).open("wb") as file:
        file.write(build_header([(name, dtype, box.shape) for name, dtype, box in names], {"format": "pt"}))
        for name, _, box in names:
            file.write(elements.local(name, box, rank).data)
    return folder


class _Elements:
    """What ranks hold of Hugging Face's tensors."""

    def __init__(self, foreign: Foreign, arrangement: Arrangement) -> None:
        self._ranks, self._parts, self._files = foreign.ranks, Parts(arrangement), Files()
        self._shapes = {tensor.name: tensor.kind.shape for tensor in arrangement.plan.model.tensors}
        self._locations: dict[str, list[tuple[int | None, Location]]] = defaultdict(list)
        for atom, location in arrangement.atoms.items():
            self._locations[atom.tensor].append((atom.at, location))

    def local(self, name: str, box: Box, rank: int) -> NDArray[Any]:
        """A rank's part of a tensor, as unsigned integers.

        What the rank itself does not have of it, because the program deals the tensor along another axis, other ranks
        have; of files with chunks, any. Padding that no rank has is zero. Raises CheckpointError where other
        elements are lacking.
        """
        owned = [np.concatenate([_NONE, *(np.arange(run.offset, run.end) for run in dim)]) for dim in box.dims]
        values_of: NDArray[Any] | None = None
        filled = np.zeros(box.shape, bool)
        for holder in sorted(range(len(self._ranks)), key=lambda other: other != rank):
            for at, location in self._locations[name] if not filled.all() else ():
                dtype = self._parts.kinds[location.stored.atoms[location.number].tensor].dtype
                for block in self._parts.of(location.stored, holder, location.number):
                    values = self._values(location, holder, block, dtype)
                    if values_of is None:
                        values_of = np.zeros(box.shape, values.dtype)
                    _put(values_of, filled, owned, block, at, values)
        inside = (np.flatnonzero(of < size) for of, size in zip(owned, self._shapes[name], strict=True))
        if values_of is None or not filled[np.ix_(*inside)].all():
            raise CheckpointError(f"rank {rank} does not hold all of its part of '{name}'")
        return values_of

    def _values(self, location: Location, rank: int, block: Block, dtype: str) -> NDArray[Any]:
        """The elements of a block in the dtype of Hugging Face's tensor.

        Of equal parts that the ranks add up, all but one of which are zeros, the sum.
        """
        raw = self._read(location, rank, block)
        portion, stored = location.portion, location.stored
        if stored.dtype == dtype and portion.function is None and not location.zeros:
            return raw
        values = _decoded(raw, stored.dtype)
        if location.zeros:
            for other, part in location.layout.boxes.items():
                if other != rank and part.dims == location.layout.boxes[rank].dims:
                    values = values + _decoded(self._read(location, other, block), stored.dtype)
        if portion.function == "-exp":
            values = torch.log(-values)
        result = values.to(TORCH_DTYPES[dtype]).contiguous()
        return result.reshape(-1).view(torch.uint8).numpy().view(f"<u{result.itemsize}").reshape(tuple(result.shape))

    def _read(self, location: Location, rank: int, block: Block) -> NDArray[Any]:
        info = self._ranks[rank][location.stored.name_on(rank)]
        bits = 8 * info.nbytes // max(1, math.prod(info.shape))
        of = strided(info.offset, block.shape, block.shard, block.shard_strides, bits)
        data = self._files.read(info.file, of.begin, of.nbytes)
        return array(data, block.shard, block.shape, block.shard, block.shard_strides, bits)


def _put(
    into: NDArray[Any], filled: NDArray[Any], owned: Sequence[NDArray[Any]], block: Block, at: int | None,
    values: NDArray[Any],
) -> None:  # fmt: skip
    """Put the elements of a block where the rank has them among the indices that it owns; others are left out."""
    first = [start + (at or 0) * (dim == 0) for dim, start in enumerate(block.first)]
    order = sorted(range(len(block.shape)), key=lambda factor: (block.along[factor][0], -block.along[factor][1]))
    indices = [np.full(1, start) for start in first]
    for factor in order:
        dim, step = block.along[factor]
        indices[dim] = (indices[dim][:, None] + np.arange(block.shape[factor]) * step).reshape(-1)
    moved = values.transpose(order).reshape([len(wanted_indices) for wanted_indices in indices])
    places = [np.searchsorted(mine, wanted_indices) for mine, wanted_indices in zip(owned, indices, strict=True)]
    owned_here = [
        np.flatnonzero(mine[np.minimum(place, len(mine) - 1)] == wanted_indices) if len(mine) else np.zeros(0, np.intp)
        for mine, place, wanted_indices in zip(owned, places, indices, strict=True)
    ]
    target = np.ix_(*(place[inside] for place, inside in zip(places, owned_here, strict=True)))
    is_new = ~filled[target]
    into[target] = np.where(is_new, moved[np.ix_(*owned_here)], into[target])
    filled[target] = True


def _decoded(raw: NDArray[Any], dtype: str) -> torch.Tensor:
    return torch.from_numpy(np.array(raw, order="C")).view(TORCH_DTYPES[dtype]).double()
