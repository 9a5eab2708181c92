"""The engine: moves tensors between files, in one pass, in bounded memory, in a few threads or processes.

It knows byte ranges only: no dtype, no model. A job is a tensor; jobs come in the order of the source. Each job is cut
into slabs (see ``reshard.move.slabs``), which threads read, check, rearrange and write: all of it releases Python's
lock. The calling thread opens and finishes the files, and adds up what the others report.

Bytes are written while the processor's cache still has them. Each thread has its own stretch of the jobs, so that two
threads seldom write to the same file. A thread that is done helps with the other stretches. Where bytes are computed,
processes take the place of threads: numpy's calls are short, and Python's lock is one for all threads.

``fill`` puts what a slab writes into memory: for one who wants the bytes and no file.
"""

from __future__ import annotations

import contextlib
import itertools
import mmap
import os
import time
from bisect import bisect_left
from collections import defaultdict, deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property, lru_cache, partial
from io import FileIO
from pathlib import Path
from typing import NamedTuple, TypeVar

import numpy as np
from isal.isal_zlib import crc32

from reshard.formats.errors import MismatchError
from reshard.formats.files.checksum import ColumnSums, PartialSum, sum_part
from reshard.formats.store import joined
from reshard.move.jobs import CrcRun, FilePlan, Job, Options, Sizes, add_run, parts_within, value_of
from reshard.move.reading import ByteArray, Reader, Sums, Targets, ranges_of
from reshard.move.slabs import Copy, Region, Route, Slab
from reshard.publishing.records import Finished, Moved, Read
from reshard.source.source import SourceFile
from reshard.store.processes import SharedByForks, can_fork, work_apart
from reshard.store.threads import Shared, StoppedError, work_together
from reshard.system import allow_open_files, disk_error, disk_errors, reserve


def move(
    jobs: Sequence[Job],
    sources: Iterable[SourceFile],
    files: Sequence[FilePlan],
    writing: Mapping[FilePlan, Writing],
    options: Options,
    *,
    finished: Callable[[str, Finished], None],
    moved: Callable[[Moved], None] = lambda moved: None,
    earlier: Iterable[Moved] = (),
    progress: Callable[[int], None] = lambda nbytes: None,
) -> tuple[Sums, int]:
    """Carry out jobs in order, from the files of ``sources`` to those of ``files`` that are in ``writing``.

    ``finished`` is called with the name of each complete target file, ``moved`` with steps that are complete while
    their files may not be, ``progress`` with the bytes written since its last call. What ``earlier`` runs have
    moved is not moved again, if it is still there. Returns the sums of what was read, and those bytes. Raises
    CheckpointError if a file cannot be read or written; MismatchError if replicas differ or padding is not zero.
    Before any error or KeyboardInterrupt leaves this function, files are removed that a next run cannot use. A
    thread that waits for a remote answer ends with that, and writes no more.
    """
    sums = Sums(sources)
    sizes, steps, busy = options.sizes, Steps(jobs, options.sizes), set[FilePlan | None]()
    is_remote = any(file.is_elsewhere for file in sums.of)
    is_computed = any(job.route.change is not None for job in jobs) or any(file.remote is not None for file in sums.of)
    is_apart = is_computed and not is_remote and can_fork()
    work, workers = sum(job.work(sizes.small) for job in jobs), options.processes if is_apart else options.threads
    count = max(1, min(workers, work // sizes.step))  # at most one for each step
    allow_open_files(len(writing) + count * len(sums.of) + 256)  # each thread opens what it reads
    complete, taken_over, shared = set[tuple[int, int]](), 0, dict[Read, Read]()

    @cache
    def names(targets: Targets) -> frozenset[str]:
        return frozenset(target.name for target in targets)

    def reads_of(reads: Iterable[tuple[SourceFile, Targets, PartialSum]]) -> tuple[Read, ...]:
        own = (Read(file.name, names(of), part.to_text()) for file, of, part in reads)
        return tuple(shared.setdefault(read, read) for read in own)  # files that have the same reads share them

    def take(account: Account) -> None:
        """Add a report to the sums, and finish the files that are complete."""
        sums.fetched += account.fetched
        for (file, targets), part in account.read.items():
            sums.add(file, targets, part)
        for target, runs in account.runs.items():
            writing[target].runs += runs
        for target, part in account.written.items():
            writing[target].sum.merge(part)
        for target in (target for target in account.written if writing[target].sum.is_complete):
            writing[target].finish(options)
            checksum = writing[target].sum.value() if options.checksum else None
            finished(target.name, Finished(target.layout.size, checksum, reads_of(sums.read_for(target))))
        progress(account.nbytes)

    def note(account: Account) -> None:
        """Take a report, of which the journal notes the steps."""
        if account.steps and options.checksum:
            for target in account.written:
                writing[target].has_steps = True
            written = {target.name: part.digest() for target, part in account.written.items()}
            reads = reads_of((*key, part) for key, part in account.read.items())
            moved(Moved(tuple(account.steps), sizes.step, written, reads))
        take(account)

    def take_over(account: Account) -> None:
        nonlocal taken_over
        if complete.isdisjoint(account.steps):  # else two runs have done the same
            complete.update(account.steps)
            taken_over += account.nbytes
            take(account)

    def is_left(step: Step) -> bool:
        """Whether a step is to be carried out, and checks something or writes to a file that is not complete."""
        writes, job = step.slab.writes, step.job
        return step.number not in complete and (
            is_all or not writes or any(job.target(region.rank).file in writing for region in writes)
        )

    try:
        first, before, is_all = Mover(writing, options, busy, take), iter(earlier), len(writing) == len(files)
        is_resumed = [*itertools.islice(before, 1)]
        for target, opened in writing.items():
            opened.create(is_new=not is_resumed)
            for offset, content in ((0, target.layout.header), *target.layout.fixed):
                first.write(target, offset, np.frombuffer(content, dtype=np.uint8))
        first.report()
        if is_resumed:
            records = Shared(itertools.chain(is_resumed, before))
            work_together(
                count,
                lambda _, report: Mover(writing, options, busy, report).take_over(records, steps, sums.of, files),
                take_over,
            )
        together = partial(work_apart, known=[*files, *sums.of]) if is_apart and count > 1 else work_together
        share = Shared if together is work_together else SharedByForks
        stretches = [share(steps.left(part, is_left)) for part in stretches_of(jobs, count, sizes.small)]
        together(
            count,
            lambda number, report: Mover(writing, options, busy, report).carry_out(
                itertools.chain(*stretches[number:], *stretches[:number]), is_remote=is_remote
            ),
            note,
        )
        return sums, taken_over
    finally:
        for opened in writing.values():
            opened.close()


@dataclass(eq=False)
class Writing:
    """A weight file while it is written: how far it is."""

    plan: FilePlan
    path: Path
    """Its path when it is complete."""
    has_steps: bool = False
    """Whether a journal says that steps of it are complete."""
    runs: list[CrcRun] = field(default_factory=list)
    """The CRC-32s of pieces that were written."""
    file: FileIO | None = None
    """The open file; it is closed when the last thread that writes to it lets go of it."""

    @cached_property
    def sum(self) -> PartialSum:
        """The sum of the written bytes."""
        return PartialSum(self.plan.layout.size)

    @property
    def staged(self) -> Path:
        """The path of the file until it is complete."""
        return self.path.with_name(self.path.name + ".incomplete")

    def create(self, *, is_new: bool) -> None:
        """Create the file in its full size, or open that of an earlier run of the same work."""
        with disk_errors(self.staged):
            if is_new:
                self.staged.unlink(missing_ok=True)
            elif not self.staged.exists() and self.path.is_file():  # it was touched, or is not noted as finished
                self.path.rename(self.staged)
            self.has_steps = self.staged.exists()
            self.file = FileIO(os.open(self.staged, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666), "r+")
            reserve(self.file.fileno(), self.plan.layout.size)

    def finish(self, options: Options) -> None:
        """Write the CRC-32s of the file's parts, and give it its name.

        A part that was written in small pieces is read once more for its CRC-32.
        """
        self.runs.sort()
        begins, piece, opened = [run.begin for run in self.runs], options.sizes.piece, self.file
        assert opened is not None
        with disk_errors(self.path):
            for crc in self.plan.layout.crcs:
                value = value_of(crc, self.runs[bisect_left(begins, crc.begin) : bisect_left(begins, crc.end)])
                if value is None:
                    value = 0
                    for begin in range(crc.begin, crc.end, piece):
                        value = crc32(os.pread(opened.fileno(), min(piece, crc.end - begin), begin), value)
                content = value.to_bytes(4, "little")
                for offset in crc.places:
                    os.pwrite(opened.fileno(), content, offset)
                    self.sum.add(offset, 0, sum_part(content, offset) if options.checksum else None)
            self.file = None
            with opened:
                if options.fsync:
                    os.fsync(opened.fileno())
            self.staged.rename(self.path)

    def close(self) -> None:
        """Let go of the file if it is not complete, and remove it if a next run cannot use it."""
        if self.file is not None:
            self.file = None
            if not self.has_steps:  # it may fill the disk
                with contextlib.suppress(OSError):
                    self.staged.unlink()


_FEW = 256 << 20
"""The most bytes of a tensor whose slabs are kept for the next tensor that moves in the same way."""


class Step(NamedTuple):
    """A slab of a job; ``number`` has those of the job and of the slab."""

    job: Job
    slab: Slab
    number: tuple[int, int]


class Steps:
    """The steps of all jobs."""

    def __init__(self, jobs: Sequence[Job], sizes: Sizes) -> None:
        self._jobs, self._sizes = jobs, sizes
        self._kept: Callable[[Route], Sequence[Slab]] = lru_cache(maxsize=32)(
            lambda route: tuple(route.slabs(sizes.step))
        )

    def of(self, number: int, first: int = 0, last: int | None = None) -> Iterator[Step]:
        """The steps of a job, from ``first`` to before ``last``."""
        job = self._jobs[number]
        slabs = self._kept(job.route) if job.nbytes <= _FEW else job.route.slabs(self._sizes.step)
        return (Step(job, slab, (number, i)) for i, slab in enumerate(itertools.islice(slabs, first, last), first))

    def left(self, numbers: Iterable[int], is_left: Callable[[Step], bool]) -> Iterator[Sequence[Step]]:
        """The steps of some jobs that are left, a few at a time: of small tensors, or of one other."""
        for is_small, alike in itertools.groupby(
            numbers, lambda number: self._jobs[number].is_small(self._sizes.small)
        ):
            most = self._sizes.together if is_small else self._sizes.step
            for together in [alike] if is_small else ([number] for number in alike):
                group, room = list[Step](), most
                for step in (step for number in together for step in self.of(number)):
                    if is_left(step):
                        group.append(step)
                        room -= step.job.nbytes if is_small else step.slab.nbytes
                    if room <= 0:
                        yield group
                        group, room = [], most
                if group:
                    yield group


def stretches_of(jobs: Sequence[Job], count: int, small: int) -> Iterator[range]:
    """Cut a sequence of jobs into ``count`` parts of about equal work: the numbers of the jobs of each."""
    ends = list(itertools.accumulate(job.work(small) for job in jobs))
    total = ends[-1] if ends else 0
    cuts = [bisect_left(ends, total * i // count) for i in range(count)] + [len(jobs)]
    return itertools.starmap(range, itertools.pairwise(cuts))


SECONDS = 5.0
"""A thread whose source is slow reports after as many seconds, or when it has read the next piece."""

AHEAD = 64 << 20
"""The bytes of remote files, about, that are requested before the steps that read them are carried out."""

K = TypeVar("K", bound=FilePlan | None)
T = TypeVar("T")
H = TypeVar("H", bound=Hashable)


@dataclass
class Account:
    """A thread's moves since its last report."""

    steps: list[tuple[int, int]] = field(default_factory=list)
    """The steps that are complete: all that was read and written is of these."""
    read: dict[tuple[SourceFile, Targets], PartialSum] = field(default_factory=dict)
    """Sums of bytes read, by the source's file and the targets that wanted them."""
    written: dict[FilePlan, PartialSum] = field(default_factory=dict)
    """Sums of bytes written."""
    nbytes: int = 0
    """Bytes written."""
    fetched: int = 0
    """Bytes requested of remote files."""
    runs: dict[FilePlan, list[CrcRun]] = field(default_factory=dict)
    """CRC-32s of bytes written, as far as they are needed."""


def requested(drawn: Iterable[Sequence[Step]], reader: Reader) -> Iterator[Sequence[Step]]:
    """Yield the drawn steps, each after the remote bytes of it and of the next ones were requested."""
    waiting = deque[Sequence[Step]]()
    for steps in drawn:
        reads = ((job.source(region.rank), region) for job, slab, _ in steps for region in slab.reads)
        reader.request(
            (place.file, [(place.offset + at, place.offset + at + n) for at, _, n in ranges_of(place, region)])
            for place, region in reads
            if place.file.is_elsewhere
        )
        waiting.append(steps)
        while reader.requested > AHEAD:
            yield waiting.popleft()
            reader.end_step()
    for steps in waiting:
        yield steps
        reader.end_step()


class Mover:
    """The work of a thread: it draws steps, and carries them out.

    ``writing`` has the files that are not complete, ``busy`` those that a thread is writing to. ``send`` takes its
    reports.
    """

    def __init__(
        self, writing: Mapping[FilePlan, Writing], options: Options, busy: set[FilePlan | None],
        send: Callable[[Account], None],
    ) -> None:  # fmt: skip
        self._writing, self._options, self._sizes, self._busy, self._send = writing, options, options.sizes, busy, send
        self._reader, self._arena, self._account = Reader(), _Arena(self._sizes.piece), Account()
        self._reported = time.monotonic()

    def carry_out(self, drawn: Iterable[Sequence[Step]], *, is_remote: bool) -> None:
        """Carry out the steps that this thread draws."""
        try:
            for group in requested(drawn, self._reader) if is_remote else drawn:
                if group[0].job.is_small(self._sizes.small):
                    self._carry_out(group)
                    continue
                firsts = (next((s.job.target(region.rank).file for region in s.slab.writes), None) for s in group)
                for _, step in self._free_first(zip(firsts, group, strict=True)):
                    self._carry_out([step])
            self.report()
        finally:
            self._reader.close()

    def report(self) -> None:
        """Report the moves since the last report."""
        account, self._account = self._account, Account()
        account.fetched, self._reader.fetched = self._reader.fetched, 0
        self._send(account)
        self._reported = time.monotonic()

    def _free_first(self, items: Iterable[tuple[K, T]]) -> Iterator[tuple[K, T]]:
        """Return items, each with a target, in an order in which those of files that another thread is writing to come
        last.
        """
        waiting = deque(items)
        while waiting:
            for _ in range(len(waiting)):
                if waiting[0][0] not in self._busy:
                    break
                waiting.rotate(-1)
            item = waiting.popleft()
            self._busy.add(item[0])
            yield item
            self._busy.discard(item[0])

    def _carry_out(self, steps: Sequence[Step]) -> None:
        """Read the bytes that steps need, check them, and write the result; neighbours in a file with one call."""
        reads: dict[tuple[SourceFile, Targets | None], _RegionRun] = defaultdict(_RegionRun)
        writes: dict[FilePlan, _RegionRun] = defaultdict(_RegionRun)
        ready = list[tuple[Job, Slab, list[_RunPlace], list[ByteArray]]]()
        for job, slab, _ in steps:
            places = [job.target(region.rank) for region in slab.writes]
            read_for = frozenset([place.file for place in places])
            origins, blocks = list[_RunPlace](), list[ByteArray]()
            for region in slab.reads:
                origin = job.source(region.rank)
                run = reads[origin.file, None if job.again or region.needed is not None else read_for]
                origins.append((run, run.add(region, ranges_of(origin, region), origin.offset), region))
            for region, place, copies in zip(slab.writes, places, slab.copies_to, strict=True):
                if place.file in self._writing:
                    run = writes[place.file]
                    begin = run.add(region, region.ranges(0, region.nbytes), place.offset)
                    run.made_of.append((begin, region, copies, origins, blocks))
            ready.append((job, slab, origins, blocks))
        self._arena.clear()
        for (file, targets), run in reads.items():
            run.data = self._arena.take(run.size)
            for offset, data in run.pieces(self._sizes.piece):
                self._reader.fill(data, file, offset)
                if targets is not None and self._options.checksum:
                    part = sum_part(data, offset)
                    _sum_of(self._account.read, (file, targets), file.size).add(offset, data.size, part)
                    run.part = part if data.size == run.size else None
        for job, slab, origins, blocks in ready:
            blocks += [run.view(begin, region) for run, begin, region in origins]
            check_slab(job, slab, blocks)
        used = self._arena.used
        for target, run in self._free_first(writes.items()):
            self._arena.clear(used)
            self._put_together(run)
            for offset, data in run.pieces(self._sizes.piece):
                self.write(target, offset, data, run.part if data.size == run.size else None)
        self._account.steps += [step.number for step in steps]
        if self._account.nbytes >= self._sizes.step or time.monotonic() - self._reported >= SECONDS:
            self.report()

    def _put_together(self, run: _RegionRun) -> None:
        """Make the bytes to write. Bytes that go as they were read are not copied, and their sum is known."""
        (_, _, copies, origins, blocks), is_alone = run.made_of[0], len(run.made_of) == 1
        if is_alone and len(copies) == 1 and (source := copies[0].source) is not None and copies[0].edit is None:
            block, (origin, *_) = blocks[source][copies[0].source_slices], origins[source]
            if block.size == run.size and block.flags.c_contiguous:
                is_all = block.size == origin.size and np.may_share_memory(block, origin.data)  # no array of indices
                run.data, run.part = block.reshape(-1), origin.part if is_all else None
                return
        run.data = self._arena.take(run.size, run.ranges[0][0] if run.ranges else 0)
        for begin, region, copies, _, blocks in run.made_of:
            block = run.view(begin, region)
            for copy in copies:
                block[copy.target_slices] = copy.block(blocks)

    def write(self, target: FilePlan, offset: int, data: ByteArray, part: ColumnSums | None = None) -> None:
        """Write at ``offset`` of a file; ``part`` is the sum of the data, if known."""
        if not self._options.checksum:
            part = None
        elif part is None or not part.fits(offset):
            part = sum_part(data, offset)
        position, size, view, most, opened = 0, data.size, data.data, self._sizes.write, self._writing[target].file
        if opened is None:
            raise StoppedError
        try:
            while position < size:
                end = position + most - (offset + position) % most
                position += os.pwrite(opened.fileno(), view[position:end], offset + position)
        except OSError as error:
            raise disk_error(self._writing[target].path, error) from error
        self._add_written(target, offset, data, part)

    def _add_written(self, target: FilePlan, offset: int, data: ByteArray, part: ColumnSums | None) -> None:
        """Add the bytes that a file has from ``offset`` on, and their sum, to the account."""
        for begin, end, is_whole in parts_within(target.layout.crcs, offset, data.size) if target.layout.crcs else ():
            runs = self._account.runs.setdefault(target, [])
            add_run(runs, begin, data.data[begin - offset : end - offset], is_whole=is_whole)
        self._account.nbytes += data.size
        _sum_of(self._account.written, target, target.layout.size).add(offset, data.size, part)

    # -- what earlier runs have moved

    def take_over(
        self, earlier: Iterable[Moved], steps: Steps, sources: Iterable[SourceFile], targets: Iterable[FilePlan]
    ) -> None:
        """Report the moves of earlier runs, as far as the files still have them."""
        files, to = {file.name: file for file in sources}, {target.name: target for target in targets}
        for moved in earlier:
            known = moved.steps if moved.size == self._sizes.step else ()
            mine = [step for job, slab in known for step in steps.of(job, slab, slab + 1)]
            self._add_again(mine)
            sums = self._account.written
            if not sums or any(moved.written.get(target.name) != part.digest() for target, part in sums.items()):
                self._account = Account()
                continue
            for read in moved.reads:
                targets, file = frozenset(to[name] for name in read.targets), files[read.source]
                if not targets or not targets.isdisjoint(self._writing):  # else a finished file has these sums
                    self._account.read[file, targets] = PartialSum.from_text(read.sum, file.size)
            self._account.steps = [step.number for step in mine]
            self.report()

    def _add_again(self, steps: Iterable[Step]) -> None:
        """Add the bytes that unfinished files have at the places of steps to the account."""
        ranges: dict[FilePlan, list[tuple[int, int]]] = {}
        for job, slab, _ in steps:
            for region in slab.writes:
                file, first = job.target(region.rank)
                if file in self._writing:
                    parts = ranges.setdefault(file, [])
                    parts += ((first + at, first + at + n) for at, _, n in region.ranges(0, region.nbytes))
        for target, parts in ranges.items():
            for begin, end in joined(parts, 0):
                for offset in range(begin, end, self._sizes.piece):
                    self._arena.clear()
                    data = self._arena.take(min(self._sizes.piece, end - offset), offset)
                    opened = self._writing[target].file
                    assert opened is not None
                    with contextlib.suppress(OSError):  # what cannot be read is written again
                        data = data[: os.preadv(opened.fileno(), [data.data], offset)]
                        self._add_written(target, offset, data, sum_part(data, offset))


def _sum_of(sums: dict[H, PartialSum], key: H, size: int) -> PartialSum:
    """The sum under a key, a new one of a file of ``size`` bytes if there is none: too large to be made in vain."""
    total = sums.get(key)
    if total is None:
        total = sums[key] = PartialSum(size)
    return total


class _Arena:
    """Hands out buffers of one memory, one after the other, and takes them back all at once."""

    def __init__(self, smallest: int) -> None:
        self._memory: ByteArray = np.empty(0, dtype=np.uint8)
        self._smallest = smallest
        self.used = 0

    def take(self, nbytes: int, offset: int = 0) -> ByteArray:
        """A buffer of arbitrary content, aligned to a page of memory as ``offset`` is to a page of the file.

        Some processors copy several times slower between addresses whose alignment differs by a few bytes.
        """
        first = -(-self.used // mmap.PAGESIZE) * mmap.PAGESIZE + offset % mmap.PAGESIZE
        self.used = first + nbytes
        if self._memory.size < self.used:
            # earlier buffers keep the old memory alive while they are used
            self._memory = np.frombuffer(mmap.mmap(-1, max(self.used, self._smallest)), dtype=np.uint8)
        return self._memory[first : self.used]

    def clear(self, used: int = 0) -> None:
        """Take back all buffers behind the first ``used`` bytes."""
        self.used = used


def check_slab(job: Job, slab: Slab, blocks: Sequence[ByteArray]) -> None:
    """Check that replicas are equal and padding is zero. Raises MismatchError with the tensor and the files."""
    for check in slab.checks:
        block, other = blocks[check.target][check.target_slices], job.source(slab.reads[check.target].rank)
        if check.source is None:
            if block.any():
                raise MismatchError(f"{other.file.path}: the padding of tensor '{job.name}' is not zero")
        elif not np.array_equal(check.block(blocks), block):
            rank = slab.reads[check.source].rank
            place = job.source(rank)
            if rank >= job.holders:
                copy = job.sources[rank // job.holders].location.stored.name
                raise MismatchError(
                    f"tensor '{copy}' in {place.file.path} should be '{job.name}' once "
                    "more, because the two are tied, but differs",
                    'if the model has a head of its own, say so in config.json: "tie_word_embeddings": false',
                )
            raise MismatchError(
                f"tensor '{job.name}' should be the same in {other.file.path} and {place.file.path}, but differs",
                "the shards are damaged, or come from different runs",
            )


_NONE: ByteArray = np.empty(0, dtype=np.uint8)


@dataclass(eq=False)
class _RegionRun:
    """Regions of a file, one behind the other in memory: they are read, or written, together."""

    size: int = 0
    ranges: list[tuple[int, int, int]] = field(default_factory=list)
    """For each range: its offset in the file, its position in memory, and its length."""
    made_of: list[tuple[int, Region, Sequence[Copy], Sequence[_RunPlace], list[ByteArray]]] = field(
        default_factory=list
    )
    """Yield each written region, its position in memory, the copies into it, and the regions that these are copied
    from.
    """
    data: ByteArray = field(default_factory=lambda: _NONE)
    part: ColumnSums | None = None
    """The sum of all of it, if it is known."""

    def add(self, region: Region, ranges: Iterable[tuple[int, int, int]], base: int = 0) -> int:
        """Add a region, given its ranges from byte ``base`` of a file on; returns its position in memory."""
        begin, self.size = self.size, self.size + region.nbytes
        for offset, at, length in ranges:
            first, position, before = self.ranges[-1] if self.ranges else (-1, -1, 0)
            if first + before == base + offset and position + before == begin + at:
                self.ranges[-1] = first, position, before + length
            elif length:
                self.ranges.append((base + offset, begin + at, length))
        return begin

    def view(self, begin: int, region: Region) -> ByteArray:
        """The bytes of a region that begins at byte ``begin``, in its shape."""
        return self.data[begin : begin + region.nbytes].reshape(region.shape)

    def pieces(self, size: int) -> Iterator[tuple[int, ByteArray]]:
        """The ranges, in pieces of at most ``size`` bytes: the offset of each in the file, and its memory."""
        for offset, position, length in self.ranges:
            for at in range(0, length, size):
                yield offset + at, self.data[position + at : position + min(at + size, length)]


_RunPlace = tuple[_RegionRun, int, Region]
"""A region in a run, from a byte of it on."""


def fill(job: Job, slab: Slab, read: Callable[[ByteArray, SourceFile, int], None], blocks: Sequence[ByteArray]) -> None:
    """Fill the regions that a slab writes. Raises CheckpointError, MismatchError."""
    is_direct = slab.is_flat and not slab.checks  # plain byte ranges are read into their places
    sources: list[ByteArray] = []
    for region in () if is_direct else slab.reads:
        place, data = job.source(region.rank), np.empty(region.nbytes, np.uint8)
        for offset, at, length in ranges_of(place, region):
            read(data[at : at + length], place.file, place.offset + offset)
        sources.append(data.reshape(region.shape))
    check_slab(job, slab, sources)
    for copy in slab.copies:
        block = blocks[copy.target][copy.target_slices]
        if copy.source is None or not is_direct:
            block[...] = copy.block(sources)
            continue
        region = slab.reads[copy.source]
        place = job.source(region.rank)
        for offset, at, length in region.ranges(copy.source_slices[0].start, block.size):
            read(block[at : at + length], place.file, place.offset + offset)
