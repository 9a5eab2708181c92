"""What a rank of a running program holds, without its data: parts of stored tensors, named as a format names them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from formats.notation.axes import Run


class Held(NamedTuple):
    """A part of a stored tensor that one rank holds.

    ``name`` is the name in the format, ``dtype`` a key of ``DTYPE_BITS``, ``shape`` that of the whole tensor. ``runs``
    has the indices of each dimension that the rank holds, in the order in which its own tensor has them: the local
    tensor has, in each dimension, all its runs one after another. A rank may hold several parts of one tensor.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    runs: tuple[tuple[Run, ...], ...]

    @property
    def local(self) -> tuple[int, ...]:
        """The shape of the local tensor."""
        return tuple(sum(run.length for run in dim) for dim in self.runs)

    @property
    def numel(self) -> int:
        """The number of elements that the rank holds."""
        return math.prod(self.local)


def to_document(parts: Sequence[Held]) -> dict[str, Any]:
    """Parts as JSON: each distinct dtype, shape and runs once, and the number of these for each name."""
    known: dict[Held, int] = {}
    names = [[part.name, known.setdefault(part._replace(name=""), len(known))] for part in parts]
    kinds = [
        [kind.dtype, kind.shape, [[[run.offset, run.length] for run in dim] for dim in kind.runs]] for kind in known
    ]
    return {"names": names, "kinds": kinds}


def from_document(document: Mapping[str, Any]) -> list[Held]:
    """The inverse of ``to_document``."""
    kinds = [
        (dtype, tuple(shape), tuple(tuple(Run(*run) for run in dim) for dim in runs))
        for dtype, shape, runs in document["kinds"]
    ]
    return [Held(name, *kinds[number]) for name, number in document["names"]]
