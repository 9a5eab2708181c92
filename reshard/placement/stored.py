"""A program's tensors, and the atoms in each (see ``reshard.placement.arrangement``).

The arrangement has a tensor for each layer and each expert. If the files have all of them as chunks of one larger
tensor, the index in their names is a dimension there: a chunk in the arrangement is a chunk in the files with
leading dimensions of length 1.
"""

from __future__ import annotations

import math
import struct
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from reshard.formats.files.chunks import Chunk
from reshard.formats.files.safetensors import DTYPE_BITS, TensorInfo
from reshard.formats.mesh import Mesh
from reshard.formats.notation.architecture import filled
from reshard.formats.notation.format import Constant, Renaming
from reshard.mesh.plan import Layout
from reshard.placement.geometry import Geometry
from reshard.placement.pieces import Spread
from reshard.placement.portions import Portion


class Atom(NamedTuple):
    """A Hugging Face tensor, or a part of it: a component (by its label), or one index of the first dimension."""

    tensor: str
    label: str | None = None
    at: int | None = None


Chunks = Mapping[str, Mapping[int, Chunk]]
"""The chunks of stored tensors, by the tensor's name and the number of a file."""


@dataclass(frozen=True, eq=False)
class Stated:
    """The shape that a tensor states of its weight: the whole, or that of each rank's part."""

    whole: tuple[int, ...]
    of_ranks: Layout | None

    def on(self, holder: int) -> tuple[int, ...]:
        """The shape that the tensor states on a rank, or in a file."""
        return self.whole if self.of_ranks is None else self.of_ranks.boxes[holder].shape


@dataclass(frozen=True, eq=False)
class RankNames:
    """The names of a stored tensor, where ranks count layers and experts from their own first ones."""

    mesh: Mesh
    target: str
    stages: Mapping[int, str]
    """The names on pipeline stages that have another one."""
    numbers: Mapping[str, int]
    """The model's own numbers in the name, by axis."""
    firsts: Sequence[Mapping[str, int]]
    """The numbers from which each rank counts; none if names have the model's own."""

    def on(self, rank: int) -> str:
        """The name on a rank."""
        first = self.firsts[rank] if self.firsts else {}
        numbers = {axis: number - first.get(axis, 0) for axis, number in self.numbers.items()}
        return filled(self.stages.get(self.mesh.stage(rank), self.target), numbers)


class Stored(NamedTuple):
    """A tensor of a program."""

    name: str
    dtype: str
    geometry: Geometry
    atoms: tuple[Atom, ...]
    """The atoms in the order of the stack, then of the slots."""
    constant: Constant | None = None
    naming: RankNames | None = None
    """Its name on a rank, if that is not the same on all."""
    stated: Stated | None = None
    """Set if its values state the shape of a weight."""

    def name_on(self, rank: int) -> str:
        """Its name on a rank."""
        return self.naming.on(rank) if self.naming else self.name

    def constant_bytes(self, shape: tuple[int, ...] | None = None) -> bytes:
        """The content of a constant, or, with a shape, of a part of it."""
        assert self.constant is not None
        shape = self.constant.shape if shape is None else shape
        one = {
            "F32": struct.pack("<f", self.constant.value),
            "F16": struct.pack("<e", self.constant.value),
            "BF16": struct.pack("<f", self.constant.value)[2:],  # of a short number, such as 1
        }[self.dtype]
        return one * math.prod(shape)

    @property
    def whole_shape(self) -> tuple[int, ...]:
        """The shape of the whole tensor, if it is stored in chunks."""
        assert self.geometry.parts is not None
        return self.constant.shape if self.constant else self.geometry.whole.shape(0) or ()


class Location(NamedTuple):
    """An atom's stored tensor, and its number there."""

    stored: Stored
    number: int

    @property
    def portion(self) -> Portion:
        """The portion of the program's tensor that the atom is."""
        portions = self.stored.geometry.portions
        return portions[self.number % len(portions)]

    @property
    def layout(self) -> Layout:
        """Its layout on the mesh, with a dimension for each of its factors."""
        return self.stored.geometry.layouts[self.number]

    @property
    def spread(self) -> Spread:
        """The atom's pieces on the holders, except on those that have zeros in its place."""
        return self.stored.geometry.spread(self.number, self.zeros)

    def first(self, holder: int) -> int:
        """The byte of a holder's tensor from which on ``spread`` counts."""
        return self.stored.geometry.first(holder, self.number) * DTYPE_BITS[self.stored.dtype] // 8

    @property
    def zeros(self) -> frozenset[int]:
        """The ranks that store zeros in its place, because an earlier rank has the same part."""
        if self.portion.line.on != "first rank":
            return frozenset()
        first: dict[object, int] = {}
        boxes = self.layout.boxes
        return frozenset(rank for rank in sorted(boxes) if first.setdefault(boxes[rank].dims, rank) != rank)


StoredChunk = tuple[Chunk, TensorInfo]
"""A chunk of a tensor, and where it lies."""


def stacked(stacks: Iterable[Renaming], name: str) -> tuple[str, tuple[int, ...]]:
    """The name that a stored tensor has in the files, and its index along each leading dimension there."""
    places: list[int] = []
    for stack in stacks:
        words = stack.old.match(name)
        if words is not None:
            places.append(int(words[stack.index]))
            name = stack.new.fill(words)
    return name, tuple(places)


def unstacked(
    stacks: Sequence[Renaming], name: str, pieces: Iterable[StoredChunk]
) -> Iterator[tuple[str, list[StoredChunk]]]:
    """The stored tensors within a tensor of the files, each with its chunks.

    A name that has a number in place of a stack's index is not a stack, but one of its tensors.
    """
    stack = stack_of(stacks, name)
    if stack is None:
        yield name, list(pieces)
        return
    apart: dict[str, list[StoredChunk]] = defaultdict(list)
    for at, info in pieces:
        for number in range(at.shape[0]) if at.shape else ():
            new, nbytes = name_at(stack, name, at.offset[0] + number), info.nbytes // at.shape[0]
            offset, chunk = info.offset + number * nbytes, Chunk(at.offset[1:], at.shape[1:])
            apart[new].append((chunk, info._replace(name=new, shape=chunk.shape, offset=offset, nbytes=nbytes)))
    for new, of_index in apart.items():
        yield from unstacked(stacks, new, of_index)


def stack_of(stacks: Iterable[Renaming], name: str) -> Renaming | None:
    """The first stack that a tensor of the files is."""
    return next((each for each in stacks if each.new.match(name) is not None and each.old.match(name) is None), None)


def name_at(stack: Renaming, name: str, index: int) -> str:
    """The name of the tensor at an index of a stack of this name."""
    return stack.old.fill({**(stack.new.match(name) or {}), stack.index: str(index)})
