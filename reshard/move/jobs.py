"""Jobs of a move, the files and places of their targets, and its options.

CRC-32s of parts of a file are made of those of its pieces, in whatever order and by whichever process they are written.
isal computes them: it takes a third of zlib's time (13.2 against 3.9 GB/s on one core), and can join two.
"""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Generic, NamedTuple, Protocol, TypeVar

from isal.isal_zlib import crc32, crc32_combine

from reshard.formats.files.checksum import PIECE
from reshard.formats.files.layout import Crc, Layout, Tensor
from reshard.move.slabs import Route
from reshard.placement.stored import Location
from reshard.source.source import SourcePlace
from reshard.system import cpu_count

ByteProgress = Callable[[int, int], None]
"""Called with the bytes that were moved or compared so far, and the total."""


def no_progress(*progress: object) -> None:
    """Show no progress."""


SMALLEST = 1 << 14
"""The least bytes with a CRC-32 of their own. Smaller writes are read once more instead."""


class CrcRun(NamedTuple):
    """The CRC-32 of bytes ``begin`` to ``end`` of a file."""

    begin: int
    end: int
    value: int


def parts_within(crcs: Sequence[Crc], offset: int, size: int) -> Iterator[tuple[int, int, bool]]:
    """Yield the parts of ``size`` bytes from ``offset`` on that lie within one of ``crcs``: begin, end, and whether
    they fill it.
    """
    first = bisect_right(crcs, offset, key=lambda crc: crc.begin) - 1
    for number in range(max(first, 0), len(crcs)):
        begin, end = max(crcs[number].begin, offset), min(crcs[number].end, offset + size)
        if crcs[number].begin >= offset + size:
            return
        if begin < end:
            yield begin, end, (begin, end) == crcs[number][:2]


def add_run(runs: list[CrcRun], begin: int, data: memoryview, *, is_whole: bool) -> None:
    """Add the CRC-32 of a piece to the last of the runs, if it goes on, or else as one more, if it is not too small."""
    last = runs[-1] if runs else None
    if last is not None and last.end == begin:
        runs[-1] = CrcRun(last.begin, begin + len(data), crc32(data, last.value))
    elif is_whole or len(data) >= SMALLEST:
        runs.append(CrcRun(begin, begin + len(data), crc32(data)))


def value_of(crc: Crc, runs: Iterable[CrcRun]) -> int | None:
    """The CRC-32 of a part, from the runs in it, in order; None if they are not all of it."""
    value, end = 0, crc.begin
    for run in runs:
        if run.begin != end:
            return None
        value, end = crc32_combine(value, run.value, run.end - run.begin), run.end
    return value if end == crc.end else None


@dataclass(frozen=True, eq=False)
class FilePlan:
    """A weight file that is to be written: its name in the output, and where it has which tensors of one rank."""

    name: str
    rank: int
    layout: Layout
    expected: str | None = None
    """The checksum that it must have, if that is known."""
    tensors: Sequence[Tensor] = ()


class TargetPlace(NamedTuple):
    """A tensor's file and the offset of its first byte in it."""

    file: FilePlan
    offset: int


class PlacesOfRank(Mapping[str, TargetPlace]):
    """The places of tensors in the files of a rank, each made when it is asked for: there may be a million."""

    def __init__(self, files: Sequence[FilePlan]) -> None:
        self._files = files
        self._firsts = [0, *itertools.accumulate(len(file.layout.names) for file in files)]
        self._numbers = _numbered(tuple(name for file in files for name in file.layout.names))

    def __getitem__(self, name: str) -> TargetPlace:
        number = self._numbers[name]
        file = bisect_right(self._firsts, number) - 1
        return TargetPlace(self._files[file], self._files[file].layout.offsets[number - self._firsts[file]])

    def __contains__(self, name: object) -> bool:
        return name in self._numbers

    def __iter__(self) -> Iterator[str]:
        return iter(self._numbers)

    def __len__(self) -> int:
        return len(self._numbers)


@lru_cache(maxsize=1)
def _numbered(names: tuple[str, ...]) -> Mapping[str, int]:
    """Names with their numbers: ranks that hold the same tensors share them."""
    return {name: number for number, name in enumerate(names)}


P = TypeVar("P", SourcePlace, TargetPlace)
P_co = TypeVar("P_co", covariant=True)


class Side(Protocol[P_co]):
    """The tensors of the source, or of the target, in files."""

    def place_of(self, name: str, rank: int) -> P_co:
        """The place of a stored tensor in the files of a rank that has it."""


class TargetTensors(NamedTuple):
    """The places of an output's tensors in its files, by rank and name."""

    ranks: Mapping[int, Mapping[str, TargetPlace]]

    def place_of(self, name: str, rank: int) -> TargetPlace:
        """The place of a stored tensor in the files of a rank."""
        return self.ranks[rank][name]


@dataclass(slots=True, frozen=True, eq=False)  # there are two for each tensor
class Places(Generic[P]):
    """The places of an atom on the ranks of one side, the source or the target."""

    side: Side[P]
    location: Location

    def on(self, rank: int) -> P:
        """The place of its first byte on a rank that has it."""
        stored = self.location.stored
        place = self.side.place_of(stored.name_on(rank), rank)
        if not stored.geometry.is_stack:
            return place
        return place._replace(offset=place.offset + self.location.first(rank))


class Job(NamedTuple):
    """An atom to move: from which places to which, and by which steps."""

    name: str
    """The name of its Hugging Face tensor."""
    route: Route
    sources: tuple[Places[SourcePlace], ...]
    """Its places in the source, then those of its copies under other names (tied)."""
    targets: Places[TargetPlace]
    nbytes: int
    """Bytes of the full tensor."""
    ranks: frozenset[int]
    """The ranks of the target to which it goes."""
    holders: int
    """The number of the source's ranks. In steps, the ranks of the first copy are numbered after them, and so on."""
    again: bool = False
    """Whether another job reads the same bytes, so that they count only once in the source's checksum."""

    def source(self, number: int) -> SourcePlace:
        """Return its place on a rank of the source; higher numbers are ranks with a copy."""
        copy, rank = divmod(number, self.holders)
        return self.sources[copy].on(rank)

    def target(self, rank: int) -> TargetPlace:
        """Return its place on a rank of the target."""
        return self.targets.on(rank)

    def is_small(self, small: int) -> bool:
        """Whether it is small enough, at most ``small`` bytes, to be moved together with others."""
        return self.nbytes <= small

    def work(self, small: int) -> int:
        """A measure of the work: bytes plus a constant, because even a small tensor takes time."""
        return self.nbytes + small


@dataclass(frozen=True)
class Sizes:
    """The sizes of the pieces in which bytes are moved. The output does not depend on them."""

    step: int = 32 << 20
    """The bytes of one step of a thread, about, after which it reports. They do not depend on the number of threads, so
    that a resumed run cuts its work into the same steps.
    """
    small: int = 1 << 16
    """The most bytes of a small tensor, for which a system call costs more than its bytes."""
    together: int = 1 << 20
    """The most bytes of small tensors that are moved together."""
    piece: int = PIECE
    """Bytes that are read, summed and written at a time, while they are in a processor's cache."""
    write: int = 1 << 16
    """The most bytes of a writing system call, which ends at a multiple of this in the file. Larger calls take larger
    pages of memory, which a virtual machine may first have to get from its host: up to four times slower as measured.
    """


DEFAULT = Sizes()
"""The default sizes."""

MOST = 32
"""The most processes by default: what they report costs the one that adds it up 1 s for 27 to 50 GB, and each computes
up to 1 GB in a second.
"""


@dataclass(frozen=True, kw_only=True)
class Options:
    """Settings of a move.

    ``workers``: the number of threads, by default one a core, two to eight; or of processes that compute, one a core.
    ``checksum``: checksums are recorded, and compared with recorded ones.
    ``fsync``: the output is flushed to the disk before it gets its name.
    ``sizes``: how much is moved at a time.
    """

    workers: int | None = None
    checksum: bool = True
    fsync: bool = False
    sizes: Sizes = field(default_factory=lambda: DEFAULT)

    @property
    def threads(self) -> int:
        """The number of threads."""
        return self.workers or max(2, min(8, cpu_count()))

    @property
    def processes(self) -> int:
        """The number of processes."""
        return self.workers or min(MOST, cpu_count())
