"""Reads and writes many small tensors with one call: they are mostly neighbours in source and target files."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np

from reshard.engine.reading import Bytes
from reshard.engine.transfer import Region

TOGETHER = 1 << 20
"""Small tensors are moved together up to so many bytes."""

K = TypeVar("K", bound=Hashable)


@dataclass
class Run(Generic[K]):
    """Bytes ``begin`` to ``end`` of the file that ``key`` stands for; ``data`` is empty until ``Runs.make_room``."""

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
        """A view of the run's bytes, in the region's shape."""
        return self.run.data[self.begin : self.end].reshape(self.shape)


class Runs(Generic[K]):
    """Ranges of files; ranges that follow each other are joined into one run."""

    def __init__(self) -> None:
        self._runs: list[Run[K]] = []
        self._last: dict[K, Run[K]] = {}

    def add(self, key: K, offset: int, region: Region) -> Span:
        """Add a region of the tensor that begins at ``offset`` (bytes) of a file."""
        begin, run = offset + region.offset, self._last.get(key)
        if run is None or run.end != begin:
            run = self._last[key] = Run(key, begin, begin)
            self._runs.append(run)
        run.end = begin + region.nbytes
        return Span(run, begin - run.begin, run.end - run.begin, region.shape)

    def make_room(self) -> Sequence[Run[K]]:
        """Allocate a buffer for each run, and return the runs."""
        for run in self._runs:
            run.data = np.empty(run.end - run.begin, dtype=np.uint8)
        return self._runs
