"""A pickle a rank, as verl, SkyRL and accelerate save what FSDP holds: DTensors or ShardedTensors, and an optimizer.

Which part of a tensor a rank has is read from the placements and the mesh in its pickle, as data, and never guessed
from values. An optimizer's file has numbers in place of names: they are those of ``model.parameters()``, whose order is
that of the model's file without tied repeats, if it was given them all in one group. With FSDP1's flat parameters a
number is a wrapped unit: first what no layer has, then each layer.

Source: files that verl 0.9.1 and accelerate 1.15 wrote with torch 2.13; ``torch/distributed/tensor`` of torch 2.4 to
2.13; ``skyrl/backends/skyrl_train/distributed/fsdp_strategy.py``.
"""

from __future__ import annotations

import itertools
import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

from reshard.formats.errors import CheckpointError, MismatchError, PlanError
from reshard.formats.files.chunks import Chunk, Sharded, from_list, in_boxes, together, whole
from reshard.formats.files.dcp import STATE, TOGETHER, Distributed, Entries, check_steps, gathered, group_settings
from reshard.formats.files.pickles import (
    DTENSORS,
    SHARDED_TENSOR,
    SHARDS,
    Inert,
    PickledTensor,
    are_sizes,
    attribute,
    kind_of,
    quote,
)
from reshard.formats.files.safetensors import TensorInfo
from reshard.formats.files.torch_archive import BESIDE, TorchArchive, torch_file
from reshard.formats.mesh import MOST_RANKS
from reshard.formats.notation.placements import ShardedDim, runs_of
from reshard.formats.store import FilePath

_NAMES = SHARDS.with_classes(*BESIDE)


class RankChunks(NamedTuple):
    """The chunks that one rank has of a tensor."""

    tensor: Sharded
    place: tuple[int, ...] | None = None
    """The rank's coordinate in the mesh; None for a plain tensor."""
    copy: frozenset[tuple[int, int]] = frozenset()
    """A dimension of the mesh and the rank's coordinate there, for each dimension along which all ranks have the same
    chunks.
    """
    mesh: str = ""


@dataclass
class _Rank:
    """The content of a rank's files. ``states`` has the tensors of each kind, by the number or name of a parameter."""

    path: FilePath
    parts: dict[str, RankChunks]
    states: dict[Any, dict[str, RankChunks]] = field(default_factory=dict)
    groups: Any = None

    @property
    def copy(self) -> frozenset[tuple[int, int]]:
        """Equal for the ranks that together have one copy of all parameters."""
        copies = [part.copy for part in self.parts.values() if part.place is not None]
        return copies[0].intersection(*copies) if copies else frozenset()


def read_fsdp(folder: FilePath, files: Sequence[tuple[FilePath, FilePath | None]], what: str) -> Distributed:
    """The files of all ranks, in order: each has the model, and may have an optimizer beside it.

    Raises CheckpointError and MismatchError if files are missing, or are not of one save.
    """
    ranks = [_read(number, len(files), *paths) for number, paths in enumerate(files)]
    first, entries = ranks[0], Entries()
    for rank in ranks:
        lacking = next(iter(first.parts.keys() ^ rank.parts.keys()), None)
        if lacking is not None:
            raise MismatchError(f"{rank.path} and {first.path}: only one of them has '{lacking:.200}'", TOGETHER)
    for name, part in first.parts.items():
        shape, chunks = part.tensor.shape, [*part.tensor.chunks]
        for rank in ranks[1:]:
            other = rank.parts[name]
            if other.tensor.shape != shape and other.place is None:
                raise MismatchError(
                    f"{rank.path}: '{name}' is a plain tensor {list(other.tensor.shape)}, and {list(shape)} "
                    f"in {first.path.name}: nothing says which part it is",
                    "save with FSDP's sharded state dict (DTensor)",
                )
            if other.tensor.shape != shape:
                what = f"is of a tensor {list(other.tensor.shape)} here, and of another in {first.path}"
                raise MismatchError(f"{rank.path}: 'model.{name}' {what}")
            chunks += other.tensor.chunks
        entries["model", name] = Sharded(shape, chunks)
    if first.groups is not None:
        entries |= _states(ranks)
    meshes = dict.fromkeys(part.mesh for part in first.parts.values() if part.place is not None)
    form = f"{len(ranks)} ranks{''.join(f', mesh {mesh}' for mesh in meshes if mesh)}"
    paths = [file for of_rank in files for file in of_rank if file is not None]
    return gathered(folder, entries, f"{what}: FSDP, {form}", paths)


# -------------------------------------------------------------------------------------------------------- the files


def _read(number: int, world: int, path: FilePath, optimizer: FilePath | None) -> _Rank:
    with torch_file(path) as archive:
        state = archive.read(_NAMES, "tensors and their placements are read")
        if not isinstance(state, dict) or not all(isinstance(name, str) for name in state):
            raise CheckpointError(f"{path}: holds a {kind_of(state)}, not a dictionary of tensors")
        rank = _Rank(path, dict(_parts(archive, state, number, world)))
    if optimizer is None:
        return rank
    with torch_file(optimizer) as archive:
        saved = archive.read(_NAMES, "tensors and their placements are read")
        state_of = saved.get("state") if isinstance(saved, dict) else None
        if not isinstance(state_of, dict) or not isinstance(saved, dict):
            raise CheckpointError(f"{optimizer}: holds a {kind_of(saved)}, not the state of an optimizer")
        rank.groups = saved.get("param_groups")
        for key, entry in state_of.items():
            kinds = entry if isinstance(entry, dict) else {}
            rank.states[key] = {str(kind): part for kind, part in _parts(archive, kinds, number, world, key)}
    return rank


def _parts(
    archive: TorchArchive, state: Mapping[Any, object], number: int, world: int, parameter: object = None
) -> Iterator[tuple[Any, RankChunks]]:
    """Yield each tensor of a state dict, or of the state of a ``parameter``, with its name, as the part that it is."""
    for name, value in state.items():
        place = partial(archive.place, str(name))
        if isinstance(value, PickledTensor):
            yield name, RankChunks(whole(place(value)))
        elif isinstance(value, Inert) and value.path in (*DTENSORS, SHARDED_TENSOR):
            shape: Any = value.arguments[2] if len(value.arguments) > 2 else None
            try:
                if not are_sizes(shape):
                    raise ValueError("it has no shape")
                read = _of_dtensor if value.path in DTENSORS else _of_shards
                yield name, read(value, shape, number, world, place)
            except (PlanError, ValueError, TypeError) as error:
                tensor = quote(name if parameter is None else parameter)
                raise MismatchError(f"{archive.path}: tensor {tensor}: {error!s:.300}", TOGETHER) from None


Place = Callable[[PickledTensor], TensorInfo]


def _of_dtensor(value: Inert, shape: tuple[int, ...], number: int, world: int, place_of: Place) -> RankChunks:
    local, mesh = attribute(value, "_local_tensor"), attribute(value, "_spec", "mesh")
    if not isinstance(local, PickledTensor) or not isinstance(mesh, Inert):
        raise ValueError("it has no local tensor, or no mesh")
    sizes, place = _mesh_shape(mesh), tuple(attribute(mesh, "_coordinate_on_dim") or ())
    stated_rank, placed = attribute(mesh, "_rank"), attribute(value, "_spec", "placements")
    placements = [_placement(placement, len(shape)) for placement in placed]
    if not (len(sizes) == len(place) == len(placements)) or any(map(int.__ge__, place, sizes)):
        raise ValueError(f"the rank is at {list(place)} of a mesh {list(sizes)} with {len(placements)} placements")
    if math.prod(sizes) > world:
        raise ValueError(f"it is on a mesh of {math.prod(sizes)} ranks, and there are files of {world}")
    if stated_rank not in (None, number):
        raise ValueError(f"the file is of rank {stated_rank}, its name says rank {number}")
    runs = runs_of(shape, sizes, place, placements, local.shape)
    split = max((dim for dim, dim_runs in enumerate(runs) if len(dim_runs) > 1), default=0)
    if math.prod(local.shape[:split]) > 1:
        raise ValueError("its placements give the rank parts that do not lie end to end")
    copy = frozenset((dim, place[dim]) for dim, placement in enumerate(placements) if placement is None)
    names = attribute(mesh, "_mesh_dim_names") or attribute(mesh, "mesh_dim_names") or ("",) * len(sizes)
    shown_mesh = " x ".join(f"{name} {size}".strip() for name, size in zip(names, sizes, strict=False))
    tensor = Sharded(shape, [*in_boxes(place_of(local), itertools.product(*runs))])
    return RankChunks(tensor, place, copy, shown_mesh)


def _mesh_shape(mesh: Inert) -> tuple[int, ...]:
    """The sizes of a mesh: those of the array of its ranks or, since torch 2.10, of its layout."""
    ranks, axes = attribute(mesh, "mesh"), attribute(mesh, "_layout", "axes")
    if isinstance(ranks, PickledTensor):
        return ranks.shape
    of_axes = [attribute(axis, "shape") for axis in axes] if axes is not None else None
    lengths = attribute(mesh, "_layout", "shape") if of_axes is None else of_axes
    sizes = tuple(math.prod(length) if isinstance(length, tuple) else length for length in lengths or ())
    if not sizes or not are_sizes(sizes):
        raise ValueError("its mesh has no shape")
    return sizes


def _placement(placement: Inert, dims: int) -> ShardedDim | None:
    """A placement as data. Raises ValueError for one that is no part of a tensor."""
    kind, dim = placement.path.rpartition(".")[2], attribute(placement, "dim")
    if kind == "Replicate":
        return None
    parts = {"Shard": 1, "_StridedShard": attribute(placement, "split_factor")}.get(kind)
    if type(dim) is not int or not -dims <= dim < dims or type(parts) is not int or not 0 < parts <= MOST_RANKS:
        raise ValueError(f"the placement {kind} does not say which elements the rank holds")
    return ShardedDim(dim % dims, parts)


def _of_shards(value: Inert, shape: tuple[int, ...], number: int, world: int, place_of: Place) -> RankChunks:
    """A ShardedTensor, which states the offsets of its parts."""
    shards, _, group, *_ = value.state
    rank, size = attribute(group, "global_rank"), attribute(group, "global_world_size")
    if (rank, size) != (number, world):
        raise ValueError(f"the file is of rank {quote(rank)} of {quote(size)}, its name says rank {number} of {world}")
    chunks = list[tuple[Chunk, TensorInfo]]()
    for shard in shards:
        tensor = attribute(shard, "tensor")
        chunk = Chunk(*(tuple(attribute(shard, "metadata", key)) for key in ("shard_offsets", "shard_sizes")))
        if not all(map(are_sizes, chunk)) or tensor.shape != chunk.shape or len(chunk.offset) != len(shape):
            raise ValueError(f"the part {list(tensor.shape)} is said to be {list(chunk.shape)}")
        chunks.append((chunk, place_of(tensor)))
    return RankChunks(Sharded(shape, chunks), (number,))


# ---------------------------------------------------------------------------------------------------- the optimizer


def _states(ranks: Sequence[_Rank]) -> Entries:
    """The states of the optimizer, by name if the order of the parameters is known, else by number, and its groups."""
    first = next((key for rank in ranks for key in rank.states), None)
    steps = [rank.states[first]["step"].tensor for rank in ranks if "step" in rank.states.get(first, ())]
    check_steps((info.file, info) for step in steps if not step.shape for _, info in step.chunks)
    groups = [
        group
        for group in ranks[0].groups or ()
        if isinstance(group, dict) and isinstance(of := group.get("params"), list) and {*map(type, of)} <= {int, str}
    ]
    numbers = [group["params"] for group in groups]
    stored = {
        (key, kind): _stored(ranks, key, kind) for rank in ranks for key, of in rank.states.items() for kind in of
    }
    shapes = {name: part.tensor.shape for name, part in ranks[0].parts.items()}
    ways: list[dict[Any, list[str]]] = [{key: [key] for key, _ in stored if isinstance(key, str)}]
    if not ways[0]:
        ways = [dict(zip(*numbers, way, strict=True)) for way in _ways(ranks[0]) if [*map(len, numbers)] == [len(way)]]
    for names in ways:  # the first that fits
        named = {at: _named(copies, names.get(at[0], []), shapes, len(ranks)) for at, copies in stored.items()}
        if all(named.values()):
            break
    else:
        names, named = {}, {at: {at[0]: together(copies)} for at, copies in stored.items()}
    entries: Entries = {(*STATE, name, at[1]): state for at, of in named.items() for name, state in of.items()}
    members = [[name for number in rows for name in names.get(number, [number])] for rows in numbers]
    return entries | group_settings(groups, members)


def _stored(ranks: Sequence[_Rank], key: object, kind: str) -> list[Sharded]:
    """The copies of a kind of state as it is stored; what the ranks of a copy have a plain list of is one list."""
    parts = [(rank.copy, rank.states[key][kind]) for rank in ranks if kind in rank.states.get(key, ())]
    if parts[0][1].place is not None or len(parts[0][1].tensor.shape) != 1:
        return [part.tensor for _, part in parts]
    lists = defaultdict[object, list[TensorInfo]](list)
    for copy, part in parts:
        lists[copy] += (info for _, info in part.tensor.chunks)
    return [from_list({"": (sum(math.prod(info.shape) for info in infos),)}, infos)[""] for infos in lists.values()]


def _named(
    copies: Sequence[Sharded], names: Sequence[str], shapes: Mapping[str, tuple[int, ...]], ranks: int
) -> Mapping[Any, Sharded]:
    """The state of one parameter, or of all those of a unit, each with its name; nothing if it does not fit them."""
    shape, sizes = copies[0].shape, {name: shapes.get(name, ()) for name in names}
    if not shape or [*sizes.values()] == [shape]:
        return dict.fromkeys(names, together(copies))
    if names and len(shape) == 1 and 0 <= shape[0] - sum(map(math.prod, sizes.values())) < ranks:
        of_copies = [from_list(sizes, [info for _, info in copy.chunks]) for copy in copies]
        return {name: together([of_copy[name] for of_copy in of_copies]) for name in names}
    return {}


def _ways(rank: _Rank) -> Iterator[list[list[str]]]:
    """Yield the possible meanings of an optimizer's numbers: one for each parameter, or one for each unit of FSDP.

    A tied tensor comes once. Tied tensors share a storage or, with FSDP1's original parameters, one of them is the
    vocabulary's head. Buffers are whole where parameters are sharded.
    """
    firsts: dict[object, str] = {}
    is_sharded = any(part.place is not None for part in rank.parts.values())
    for name, part in rank.parts.items():
        if part.place is not None or not is_sharded:
            offset = next((info.offset for _, info in part.tensor.chunks if info.nbytes), None)
            firsts.setdefault(name if offset is None else offset, name)
    for names in ([*firsts.values()], [name for name in firsts.values() if not name.endswith("lm_head.weight")]):
        yield [[name] for name in names]
        yield _units(names)


def _units(names: Sequence[str]) -> list[list[str]]:
    """The parameters of each unit that FSDP1 wraps: those outside of layers, then those of each layer."""
    units: dict[str, list[str]] = defaultdict(list, {"": []})
    for name in names:
        layer = re.match(r".*?\.\d+(?=\.)", name)
        units[layer[0] if layer else ""].append(name)
    return [*units.values()]
