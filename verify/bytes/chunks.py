"""Whether files with chunks have each element of each tensor once, in the files in which reshard puts it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt

from formats.files.chunks import Chunk
from reshard.placement.arrangement import Arrangement, arrangement_of
from reshard.placement.stored import Stored
from reshard.source.program_files import ProgramFile, check_belonging, program_files
from reshard.source.source import Source


def ranks_of(shards: Source) -> Sequence[int]:
    """The rank of each of ``shards.ranks``. With chunks, that of the file, if its name and the mesh tell it."""
    if shards.chunks is None or shards.format.files.is_distributed:  # the chunks of a number lie in any files
        return range(len(shards.ranks))
    size = shards.plan.mesh.size
    return [file.rank % size if size > 1 else file.rank for file in program_files(shards.format, shards.path)]


@dataclass
class ChunkCheck:
    """What is wrong with the chunks. ``comparable`` has the numbers of the files whose chunk of a tensor can be
    compared.

    Such a chunk is of the original's dtype and lies inside the original's tensor. If reshard wrote the files, their
    headers say for which mesh, and each chunk must also be the one that this file has on that mesh.
    """

    missing: list[str] = field(default_factory=list)
    extra: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    comparable: dict[str, list[int]] = field(default_factory=dict)
    is_ours: bool = False
    """Whether reshard wrote the files."""


def check_chunks(shards: Source, arrangement: Arrangement) -> ChunkCheck:
    """Compare the chunks in the headers of files with the original's tensors, and with the mesh of the split."""
    format, chunks, found = shards.format, arrangement.chunks, ChunkCheck()
    assert chunks is not None
    files = program_files(format, shards.path)
    found.is_ours = check_belonging(files) is not None
    planned = arrangement_of(shards.plan, format).chunks if found.is_ours else None
    for name in chunks.keys() - {stored.name for stored in arrangement.stored}:
        found.extra += [f"{shards.ranks[number][name].file.name}: {name}" for number in sorted(chunks[name])]
    for stored in arrangement.stored:
        of = _Chunks(shards, files, stored, chunks[stored.name], found)
        of.check(planned[stored.name] if planned is not None else None)
    return found


@dataclass(frozen=True)
class _Chunks:
    """The chunks of one tensor, by the numbers of their files."""

    shards: Source
    files: Sequence[ProgramFile]
    stored: Stored
    chunks: Mapping[int, Chunk]
    into: ChunkCheck

    def check(self, planned: Mapping[int, Chunk] | None) -> None:
        """Fill in what is wrong; ``planned`` has the chunks of the mesh, by the numbers in the files' names."""
        into, name = self.into, self.stored.name
        if not self.chunks:
            made = "".join(f", of '{atom.tensor}'" for atom in self.stored.atoms[:1])
            into.missing.append(f"{name}{made}")
            return
        wrong = {number: text for number, at in self.chunks.items() if (text := self._wrong(number, at))}
        lacking: list[str] = []
        if planned is not None:
            there = {self.files[number].rank for number in self.chunks}
            lacking = [self._lacking(number, at) for number, at in planned.items() if number not in there]
            for number, at in self.chunks.items():
                wanted = planned.get(self.files[number].rank)
                if number not in wrong and at != wanted:
                    should = f"the mesh gives it {_range(wanted)}" if wanted else "the mesh gives it none"
                    wrong[number] = f"{self._file(number)}: has {_range(at)} of '{name}', {should}"
        into.problems += wrong.values()
        into.missing += lacking
        into.comparable[name] = [number for number in self.chunks if number not in wrong]
        if not wrong and not lacking:
            into.problems += self._not_once()

    def _wrong(self, number: int, at: Chunk) -> str | None:
        """Why a chunk is none of the original's tensor, if it is not."""
        info, shape = self.shards.ranks[number][self.stored.name], self._shape
        if info.dtype != self.stored.dtype or len(at.shape) != len(shape):
            has, planned = f"{info.dtype} {list(info.shape)}", f"{self.stored.dtype} {list(shape)}"
            return f"{info.file}: tensor '{info.name}' is {has}, the original gives {planned}"
        if any(end > size for end, size in zip(at.end, shape, strict=True)):
            return f"{info.file}: has {_range(at)} of '{info.name}', which is {list(shape)}"
        return None

    @property
    def _shape(self) -> tuple[int, ...]:
        return self.stored.whole_shape

    def _file(self, number: int) -> str:
        return str(self.shards.ranks[number][self.stored.name].file)

    def _lacking(self, number: int, at: Chunk) -> str:
        files = [file.path.name for file in self.files if file.rank == number]
        return f"{files[0] if files else f'the file of shard {number + 1}'}: {_range(at)} of '{self.stored.name}'"

    def _not_once(self) -> Iterator[str]:
        """What the chunks have twice, or not at all: the first cell of the grid of all their ends."""
        shape, owners = self._shape, [*self.chunks.items()]
        ends = [
            sorted({0, size, *(end for _, at in owners for end in (at.offset[dim], at.end[dim]))})
            for dim, size in enumerate(shape)
        ]
        count: npt.NDArray[np.intp] = np.zeros([len(of_dim) - 1 for of_dim in ends], np.intp)
        for _, at in owners:
            count[tuple(slice(of.index(b), of.index(e)) for of, b, e in zip(ends, at.offset, at.end, strict=True))] += 1
        for what, cells in (("no file has", count == 0), ("several files have", count > 1)):
            found: list[list[int]] = np.argwhere(cells).tolist()
            if found:
                first = [of[i] for of, i in zip(ends, found[0], strict=True)]
                elements = sum(math.prod(of[i + 1] - of[i] for of, i in zip(ends, cell, strict=True)) for cell in found)
                names = [
                    Path(self._file(number)).name for number, at in owners
                    if all(begin <= i < end for i, begin, end in zip(first, at.offset, at.end, strict=True))
                ]  # fmt: skip
                listed = f" ({', '.join(names)})" if names else ""
                yield f"'{self.stored.name}': {what} {elements:,} of its elements, the first at {first}{listed}"


def _range(at: Chunk) -> str:
    """``[0:4, 8:16]``, as Python slices it."""
    return f"[{', '.join(f'{begin}:{end}' for begin, end in zip(at.offset, at.end, strict=True))}]"
