"""Small tensors, many to a call: they mostly follow each other in their files, on both sides."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np

from reshard.engine.reading import Bytes
from reshard.engine.transfer import Region

SMALL = 1 << 16
"""Bytes of a tensor up to which a call for each of its parts costs more than to move them."""

TOGETHER = 1 << 20
"""Bytes of small tensors that are moved together."""

K = TypeVar("K", bound=Hashable)


@dataclass
class Run(Generic[K]):
    """Neighbouring bytes of the file that ``key`` stands for, and what they are once there is room for them."""

    key: K
    begin: int
    end: int
    data: Bytes = field(default_factory=lambda: _NONE)


_NONE: Bytes = np.empty(0, dtype=np.uint8)


class Span(NamedTuple):
    """Bytes ``begin`` to ``end`` of a run, in the shape of a region."""

    run: Run[Any]
    begin: int
    end: int
    shape: tuple[int, ...]

    @property
    def data(self) -> Bytes:
        """The bytes, as a part of the run's."""
        return self.run.data[self.begin : self.end].reshape(self.shape)


class Runs(Generic[K]):
    """Ranges of files, of which those that follow each other are one run."""

    def __init__(self) -> None:
        self._runs: list[Run[K]] = []
        self._last: dict[K, Run[K]] = {}

    def add(self, key: K, offset: int, region: Region) -> Span:
        """Take in a region of a tensor that lies at an offset of a file."""
        begin, run = offset + region.offset, self._last.get(key)
        if run is None or run.end != begin:
            run = self._last[key] = Run(key, begin, begin)
            self._runs.append(run)
        run.end = begin + region.nbytes
        return Span(run, begin - run.begin, run.end - run.begin, region.shape)

    def make_room(self) -> Sequence[Run[K]]:
        """The runs, with room for their bytes."""
        for run in self._runs:
            run.data = np.empty(run.end - run.begin, dtype=np.uint8)
        return self._runs
