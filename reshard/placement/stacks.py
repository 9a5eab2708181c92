"""Stored tensors that are one tensor in a program's files: an index in their names is a dimension there.

The arrangement has a tensor for each layer and each expert. If the files have all of them as chunks of one larger
tensor, a chunk in the arrangement is a chunk in the files with leading dimensions of length 1.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence

from formats.files.chunks import Chunk
from formats.files.safetensors import TensorInfo
from formats.notation.format_rules import Renaming

Piece = tuple[Chunk, TensorInfo]
"""A chunk of a tensor, and where it lies."""


def stacked(stacks: Iterable[Renaming], name: str) -> tuple[str, tuple[int, ...]]:
    """The name that a stored tensor has in the files, and its index along each leading dimension there."""
    places: list[int] = []
    for stack in stacks:
        words = stack.found.match(name)
        if words is not None:
            places.append(int(words[stack.index]))
            name = stack.new.fill(words)
    return name, tuple(places)


def unstacked(stacks: Sequence[Renaming], name: str, pieces: Iterable[Piece]) -> Iterator[tuple[str, list[Piece]]]:
    """The stored tensors within a tensor of the files, each with its chunks.

    A name that has a number in place of a stack's index is not a stack, but one of its tensors.
    """
    stack = stack_of(stacks, name)
    if stack is None:
        yield name, list(pieces)
        return
    apart: dict[str, list[Piece]] = defaultdict(list)
    for at, info in pieces:
        for number in range(at.shape[0]) if at.shape else ():
            new, nbytes = name_at(stack, name, at.offset[0] + number), info.nbytes // at.shape[0]
            offset, chunk = info.offset + number * nbytes, Chunk(at.offset[1:], at.shape[1:])
            apart[new].append((chunk, info._replace(name=new, shape=chunk.shape, offset=offset, nbytes=nbytes)))
    for new, of_index in apart.items():
        yield from unstacked(stacks, new, of_index)


def stack_of(stacks: Iterable[Renaming], name: str) -> Renaming | None:
    """The first stack that a tensor of the files is."""
    return next((each for each in stacks if each.new.match(name) is not None and each.found.match(name) is None), None)


def name_at(stack: Renaming, name: str, index: int) -> str:
    """The name of the tensor at an index of a stack of this name."""
    return stack.found.fill({**(stack.new.match(name) or {}), stack.index: str(index)})
