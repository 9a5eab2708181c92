"""Which tensors of two checkpoints differ, where and how much. Each byte is read once, and memory does not grow."""

from __future__ import annotations

import contextlib
import json
import math
import os
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from formats.errors import listed
from formats.files.safetensors import tensor_bytes, unit_of
from reshard.delta.numbers import Distance, codes_of, distance, has_numbers
from reshard.delta.streams import Jobs, Pair, Side, jobs_of_both, side_by_side
from reshard.model.model import BoundTensor
from reshard.move.reading import Bytes
from reshard.move.slabs import Rows
from reshard.source.source import Source
from reshard.store.threads import share
from reshard.text import Result, align, human_bytes, plural

SAME, CHANGED, DTYPE, SHAPE, HERE, THERE = "same", "changed", "other dtype", "other shape", "only here", "only there"
"""What can be said of a tensor: the kinds of ``TensorDiff``."""

_WORKERS, _WORKERS_ELSEWHERE = 4, 8


@dataclass(frozen=True)
class TensorDiff:
    """A tensor, by Hugging Face's name. ``kind``: same, changed, other dtype, other shape, only here, only there.

    ``dtypes`` and ``shapes`` are those of both sides. Of a changed tensor, ``changed`` of ``elements`` differ in a bit
    (bytes count as elements where a byte holds several); ``largest`` is the largest difference, ``rms`` the root mean
    square over all elements, ``ulps`` the largest in units of the dtype's last place of an element that does not cross
    zero; None without numbers. ``other`` changed elements are infinite or NaN on a side, and not in these.
    """

    name: str
    kind: str
    dtypes: tuple[str | None, str | None]
    shapes: tuple[tuple[int, ...] | None, tuple[int, ...] | None]
    elements: int = 0
    changed: int = 0
    largest: float | None = None
    rms: float | None = None
    ulps: int | None = None
    other: int = 0

    @property
    def share(self) -> float:
        """The share of elements that differ."""
        return self.changed / self.elements if self.elements else 0.0


@dataclass(frozen=True, repr=False)
class Diff(Result):
    """What differs between two checkpoints: all tensors, the first's in its order, then those of the second alone.

    ``nbytes`` were compared, of each side. ``config`` has the keys of config.json that differ.
    """

    a: str
    b: str
    tensors: tuple[TensorDiff, ...]
    nbytes: int
    config: tuple[str, ...] = ()

    @property
    def same(self) -> bool:
        """Whether no tensor differs."""
        return all(tensor.kind == SAME for tensor in self.tensors)

    def of(self, kind: str) -> tuple[TensorDiff, ...]:
        """The tensors of a kind."""
        return tuple(tensor for tensor in self.tensors if tensor.kind == kind)

    @property
    def headline(self) -> str:
        """The answer, and the number of tensors of each kind."""
        kinds = Counter(tensor.kind for tensor in self.tensors)
        counts = ", ".join(f"{count:,} {kind}" for kind, count in kinds.items())
        read = f"{plural(len(self.tensors), 'tensor')}: {counts}; {human_bytes(self.nbytes)} of each compared."
        return f"{'SAME' if self.same else 'DIFFERENT'}: {read}"

    def to_text(self, width: int | None = None) -> str:
        """A table of the tensors that differ, and the answer."""
        from reshard.delta.rows import HEAD, cells, rows_of

        rows = rows_of([tensor for tensor in self.tensors if tensor.kind != SAME])
        table = align([HEAD, *map(cells, rows)], right=(1, 3, 4, 5, 6), width=width, elastic=(0,))
        config = [f"config.json differs: {listed(self.config, 5)}."] if self.config else []
        return "\n".join([*(table if rows else []), *config, self.headline])


class Keeper(Protocol):
    """Keeps what is read, for a delta. It is called from several threads, for each tensor from one."""

    def compared(self, name: str, where: Rows, pair: Pair, *, same: bool) -> None:
        """Take in bytes of a tensor on both sides."""


Progress = Callable[[int, int], None]
"""Called with the compared bytes so far, and the total, from any thread."""


def no_progress(done: int, total: int) -> None:
    """Show no progress."""


def differences(a: Source, b: Source, keeper: Keeper | None = None, progress: Progress = no_progress) -> Diff:
    """Compare two checkpoints of one model. Raises ReshardError."""
    left, right = ({tensor.name: tensor for tensor in side.unsplit.tensors} for side in (a, b))
    alike = {name: known for name, tensor in left.items() if (known := _known(tensor, right.get(name))).kind == SAME}
    sizes = {name: tensor_bytes(name, left[name].dtype, left[name].shape) for name in alike}
    comparing = _Comparing(a, b, jobs_of_both(a, b) if alike else ({}, {}), keeper, progress, sum(sizes.values()))
    found = comparing.run({name: left[name].dtype for name in alike}, sizes)
    tensors = [
        _measured(alike[name], sizes[name], found[name]) if name in alike else _known(tensor, right.get(name))
        for name, tensor in left.items()
    ]
    tensors += [TensorDiff(n, THERE, (None, t.dtype), (None, t.shape)) for n, t in right.items() if n not in left]
    a.check_unchanged()
    b.check_unchanged()
    own, other = ({key: json.dumps(value) for key, value in side.unsplit.config.items()} for side in (a, b))
    config = tuple(sorted({key for key, _ in own.items() ^ other.items()}))
    return Diff(a.shown, b.shown, tuple(tensors), comparing.total, config)


def _known(tensor: BoundTensor, other: BoundTensor | None) -> TensorDiff:
    """What is known of a tensor without its bytes."""
    if other is None:
        return TensorDiff(tensor.name, HERE, (tensor.dtype, None), (tensor.shape, None))
    kind = DTYPE if tensor.dtype != other.dtype else SHAPE if tensor.shape != other.shape else SAME
    return TensorDiff(tensor.name, kind, (tensor.dtype, other.dtype), (tensor.shape, other.shape))


def _measured(known: TensorDiff, nbytes: int, found: Distance) -> TensorDiff:
    dtype = str(known.dtypes[0])
    elements, numbers = nbytes // unit_of(dtype), bool(found.changed) and has_numbers(dtype)
    return TensorDiff(
        known.name, CHANGED if found.changed else SAME, known.dtypes, known.shapes, elements, found.changed,
        found.largest if numbers else None, math.sqrt(found.squares / elements) if numbers else None,
        found.ulps, found.other,
    )  # fmt: skip


class _Comparing:
    """Compares tensors in a few threads: each takes the next one."""

    def __init__(
        self, a: Source, b: Source, jobs: tuple[Jobs, Jobs], keeper: Keeper | None, progress: Progress, total: int
    ) -> None:
        self._sources, self._jobs, self._keeper, self._progress = (a, b), jobs, keeper, progress
        self.total, self._done, self._lock = total, 0, threading.Lock()

    def run(self, dtypes: Mapping[str, str], sizes: Mapping[str, int]) -> Mapping[str, Distance]:
        """The distance of each tensor."""
        elsewhere = any(source.is_elsewhere for source in self._sources)
        workers = _WORKERS_ELSEWHERE if elsewhere else min(_WORKERS, os.cpu_count() or 1)
        found: dict[str, Distance] = {}

        def work(names: Iterator[str]) -> None:
            with (
                contextlib.closing(Side(self._sources[0])) as left,
                contextlib.closing(Side(self._sources[1])) as right,
            ):
                for name in names:
                    found[name] = self._tensor(name, dtypes[name], sizes[name], left, right)

        share(dtypes, workers, work)
        return found

    def _tensor(self, name: str, dtype: str, nbytes: int, left: Side, right: Side) -> Distance:
        found, seen = Distance(), 0
        own, other = (jobs[name] for jobs in self._jobs)
        if own.keys() != other.keys():
            raise RuntimeError(f"tensor '{name}' is taken apart in two ways")
        for where, job in own.items():
            for pair in side_by_side(left.pieces(job), right.pieces(other[where])):
                seen += pair.left.size
                same = _equal(pair.left, pair.right)
                if self._keeper is not None:
                    self._keeper.compared(name, where, pair, same=same)
                if not same:
                    left_codes, right_codes = codes_of(pair.left, dtype), codes_of(pair.right, dtype)
                    wrong = left_codes != right_codes
                    found = found.plus(distance(left_codes[wrong], right_codes[wrong], dtype))
                with self._lock:
                    self._done += pair.left.size
                    self._progress(self._done, self.total)
        if seen != nbytes:  # a partial comparison must not pass
            raise RuntimeError(f"{seen} of the {nbytes} bytes of tensor '{name}' were compared")
        return found


def _equal(left: Bytes, right: Bytes) -> bool:
    whole = left.size // 8 * 8
    if not np.array_equal(left[:whole].view("<u8"), right[:whole].view("<u8")):
        return False
    return whole == left.size or bool((left[whole:] == right[whole:]).all())
