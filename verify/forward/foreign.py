"""A rank's tensors under Hugging Face's names, from the files of another program's format.

The model that ``verify`` runs is transformers', whose code loads a folder. So a rank writes a temporary folder of its
own, with the part of each Hugging Face tensor that its files in the other format hold, and nothing else. Bytes are not
compared here: a fault in the files becomes a fault in the folder.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from reshard.formats.errors import CheckpointError
from reshard.formats.files.checkpoint import CONFIG, MODEL
from reshard.formats.files.safetensors import DTYPE_BITS, TensorInfo, build_header
from reshard.formats.notation.format_file import HUGGING_FACE
from reshard.formats.torch_internals import TORCH_DTYPES, bytes_in
from reshard.mesh.plan import Plan, rank_config
from reshard.placement.arrangement import align_atoms, arrangement_of
from reshard.placement.pieces import PieceBox, Position, boxes
from reshard.placement.stored import Location
from reshard.source.source import Source
from reshard.verify.bytes.blocks import Line
from reshard.verify.bytes.reading import Files
from reshard.verify.bytes.rules import with_sound_config

Holders = Sequence[Mapping[str, TensorInfo]]
"""The tensors of each holder, by name."""


def write_rank(source: Source, plan: Plan, rank: int, folder: Path) -> Path:
    """Write a folder like the one that ``reshard split`` writes for a rank of ``plan``, and return it.

    What the rank itself does not have of its part in the source's files, because the program deals the tensor along
    another axis, other ranks have; of files with chunks, any. Tensors that the program does not load stand beside the
    shards. Padding that no rank has is zero. Raises CheckpointError where other elements are lacking.
    """
    theirs, ours = align_atoms(source.arrangement, arrangement_of(plan, HUGGING_FACE))
    places: dict[str, list[tuple[Holders, Location, Location]]] = defaultdict(list)
    for atom, place in theirs.atoms.items():
        places[atom.tensor].append((source.ranks, place, ours.atoms[atom]))
    whole = arrangement_of(source.whole, HUGGING_FACE).atoms if theirs.dropped else {}
    for atom in (atom for atom in whole if atom.tensor in theirs.dropped and atom.tensor in source.intact):
        places[atom.tensor].append(([source.intact], whole[atom], ours.atoms[atom]))
    parts, files = plan.boxes(rank), Files()
    of_rank = [tensor for tensor in plan.model.tensors if tensor.kind in parts and tensor.name in places]
    of_rank.sort(key=lambda tensor: -DTYPE_BITS[tensor.dtype])
    folder.mkdir(parents=True)
    (folder / CONFIG).write_text(json.dumps(rank_config(with_sound_config(plan), rank)), encoding="utf-8")
    with (folder / MODEL).open("wb") as file:
        entries = [(tensor.name, tensor.dtype, parts[tensor.kind].shape) for tensor in of_rank]
        file.write(build_header(entries, {"format": "pt"}))
        for name, dtype, shape in entries:
            part = np.zeros(shape, f"<u{DTYPE_BITS[dtype] // 8}")
            for holders, place, own in places[name]:
                target = own.spread
                pieces = {rank: rank_pieces} if (rank_pieces := target.pieces.get(rank)) else {}
                for box in boxes(place.stored.geometry.spread(place.number), replace(target, pieces=pieces)):
                    if not box.sources:
                        raise CheckpointError(f"rank {rank} does not hold all of its part of '{name}'")
                    values = _values(holders, files, place, box, rank, dtype)
                    for at in box.targets:
                        _elements(part, own, at, box)[...] = values
            file.write(part.data)
    return folder


def write_whole(source: Source, folder: Path) -> Path:
    """Write a full checkpoint into a folder from which transformers loads it, and return that."""
    write_rank(source, source.whole, 0, folder)
    (folder / CONFIG).write_text(json.dumps(source.read_config()), encoding="utf-8")
    return folder


def _elements(data: NDArray[Any], place: Location, at: Position, box: PieceBox) -> NDArray[Any]:
    """The elements of a box in a holder's tensor."""
    first = place.stored.geometry.first(at.holder, place.number) + at.base
    return Line(first, at.strides).array(data, 0, box.shape, 8 * data.itemsize)


def _values(holders: Holders, files: Files, place: Location, box: PieceBox, rank: int, dtype: str) -> NDArray[Any]:
    """The elements of a box in the dtype of Hugging Face's tensor: those that the rank itself has, if it has them.

    Of equal parts that the ranks add up, all but one of which are zeros, the sum.
    """
    stored, function = place.stored, place.portion.function
    raw = []
    for at in sorted(box.sources, key=lambda at: at.holder != rank)[: None if place.zeros else 1]:
        info = holders[at.holder][stored.name_on(at.holder)]
        first = stored.geometry.first(at.holder, place.number) + at.base
        line, bits = Line(first, at.strides), DTYPE_BITS[stored.dtype]
        begin, nbytes = line.extent(box.shape, bits)
        raw.append(line.array(files.read(info.file, info.offset + begin, nbytes), first, box.shape, bits))
    if stored.dtype == dtype and function is None and not place.zeros:
        return raw[0]
    tensors = (torch.from_numpy(np.array(x, order="C")).view(TORCH_DTYPES[stored.dtype]).double() for x in raw)
    values = sum(tensors, torch.zeros(()))
    if function == "-exp":
        values = torch.log(-values)
    result = values.to(TORCH_DTYPES[dtype]).contiguous()
    return bytes_in(result).numpy().view(f"<u{result.itemsize}").reshape(tuple(result.shape))
