"""The engine: moves tensors between files, in one pass, in bounded memory, in a few threads.

It knows byte ranges only: no dtype, no model. A job is a tensor; jobs come in the order of the source. Each job is cut
into slabs (see ``reshard.move.slabs``), which threads read, check, rearrange and write (``reshard.move.mover``): all of
it releases Python's lock. The calling thread opens and finishes the files, and adds up what the others report.
"""

from __future__ import annotations

import contextlib
import itertools
import os
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from io import FileIO

import numpy as np
from isal.isal_zlib import crc32

from formats.files.checksum import PartialSum, sum_part
from reshard.move.jobs import Job, Options, TargetFile, joined
from reshard.move.mover import Account, Mover, Steps, stretches_of
from reshard.move.reading import Sums, TargetSet
from reshard.publishing.journal import Finished, Moved, Read
from reshard.source.source import SourceFile
from reshard.store.threads import Shared, work_together
from reshard.system import allow_open_files, disk_errors, reserve


def move(
    jobs: Sequence[Job],
    sums: Sums,
    targets: Sequence[TargetFile],
    options: Options,
    *,
    finished: Callable[[str, Finished], None],
    moved: Callable[[Moved], None] = lambda moved: None,
    earlier: Iterable[Moved] = (),
    progress: Callable[[int], None] = lambda nbytes: None,
) -> int:
    """Carry out jobs in order, from the files of ``sums`` to ``targets``. Adds what is read to ``sums``.

    ``finished`` is called with the name of each complete target file, ``moved`` with steps that are complete while
    their files may not be, ``progress`` with the bytes written since its last call. What ``earlier`` runs have moved is
    not moved again, if it is still there; returns the bytes of it. Raises CheckpointError if a file cannot be read or
    written; MismatchError if replicas differ or padding is not zero. Before any error or KeyboardInterrupt leaves this
    function, files are removed that a next run cannot use. A thread that waits for a remote answer ends with that, and
    writes no more.
    """
    allow_open_files(len(targets) + options.threads * len(sums.of) + 256)  # each thread opens what it reads
    files, busy, sizes = _Files(options, sums, targets, finished, progress), bytearray(len(targets)), options.sizes
    work = sum(job.work(sizes.small) for job in jobs)
    count = max(1, min(options.threads, work // sizes.step))  # at most one for each step
    steps, complete, taken_over = Steps(jobs, sizes), set[tuple[int, int]](), 0

    def mover(report: Callable[[Account], None]) -> Mover:
        return Mover(files.sources, targets, options, busy, report)

    def take_over(account: Account) -> None:
        nonlocal taken_over
        if complete.isdisjoint(account.steps):  # else two runs have done the same
            complete.update(account.steps)
            taken_over += account.nbytes
            files.take(account)

    def take(account: Account) -> None:
        if account.steps and options.checksum:
            moved(files.moved(account))
        files.take(account)

    try:
        first, before = mover(files.take), iter(earlier)
        is_resumed = [*itertools.islice(before, 1)]
        for target in targets:
            if not target.done:
                files.create(target, is_new=not is_resumed)
                for offset, content in ((0, target.header), *target.fixed):
                    first.write(target, offset, np.frombuffer(content, dtype=np.uint8))
        first.report()
        if is_resumed:
            records = Shared(itertools.chain(is_resumed, before))
            work_together(count, lambda _, report: mover(report).take_over(records, steps), take_over)
        stretches = [Shared(steps.left(part, complete)) for part in stretches_of(jobs, count, sizes.small)]
        work_together(
            count,
            lambda number, report: mover(report).carry_out([*stretches[number:], *stretches[:number]]),
            take,
        )
        return taken_over
    finally:
        files.close()


class _Files:
    """The files that are written, and the sums of what was read and written."""

    def __init__(
        self,
        options: Options,
        sums: Sums,
        targets: Sequence[TargetFile],
        finished: Callable[[str, Finished], None],
        progress: Callable[[int], None],
    ) -> None:
        self._options, self._sums, self._targets = options, sums, targets
        self.sources = list(sums.of)
        self._finished, self._progress = finished, progress
        self._begun = set[TargetFile]()
        """The files of which a step may be complete: a journal says so."""

    def create(self, target: TargetFile, *, is_new: bool) -> None:
        """Create a target file of full size, or open that of an earlier run of the same work."""
        with disk_errors(target.staged):
            if is_new:
                target.staged.unlink(missing_ok=True)
            elif not target.staged.exists() and target.path.is_file():  # it was touched, or is not noted as finished
                target.path.rename(target.staged)
            if target.staged.exists():
                self._begun.add(target)
            target.opened = FileIO(os.open(target.staged, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666), "r+")
            reserve(target.opened.fileno(), target.size)

    def moved(self, account: Account) -> Moved:
        """What a journal says of the steps in a report."""
        self._begun.update(self._targets[number] for number in account.written)
        written = {self._targets[number].name: part.digest() for number, part in account.written.items()}
        reads = ((self.sources[number], wanted, part) for (number, wanted), part in account.read.items())
        return Moved(tuple(account.steps), self._options.sizes.step, written, self._reads(reads))

    def _reads(self, reads: Iterable[tuple[SourceFile, TargetSet, PartialSum]]) -> tuple[Read, ...]:
        return tuple(
            Read(file.name, frozenset(self._targets[n].name for n in wanted), part.to_text())
            for file, wanted, part in reads
        )

    def take(self, account: Account) -> None:
        """Add a report to the sums, and finish the files that are complete."""
        self._sums.fetched += account.fetched
        for (number, targets), part in account.read.items():
            self._sums.add(self.sources[number], targets, part)
        for number, runs in account.runs.items():
            self._targets[number].runs += runs
        for number, part in account.written.items():
            self._targets[number].sum.merge(part)
        for number in account.written:
            file = self._targets[number]
            if file.sum.is_complete:
                self._write_crcs(file)
                self._finish(number)
        self._progress(account.nbytes)

    def _write_crcs(self, target: TargetFile) -> None:
        """Write the CRC-32s of a file's parts. A part that was written in small pieces is read once more for it."""
        target.runs.sort()
        piece, opened = self._options.sizes.piece, target.opened
        assert opened is not None
        begins = [run.begin for run in target.runs]
        with disk_errors(target.staged):
            for crc in target.crcs:
                runs = target.runs[bisect_left(begins, crc.begin) : bisect_left(begins, crc.end)]
                value = joined(crc, runs)
                if value is None:
                    value = 0
                    for begin in range(crc.begin, crc.end, piece):
                        value = crc32(os.pread(opened.fileno(), min(piece, crc.end - begin), begin), value)
                content = value.to_bytes(4, "little")
                for offset in crc.places:
                    os.pwrite(opened.fileno(), content, offset)
                    target.sum.add(offset, 0, sum_part(content, offset) if self._options.checksum else None)

    def _finish(self, number: int) -> None:
        target = self._targets[number]
        opened, target.opened = target.opened, None
        assert opened is not None
        with disk_errors(target.path):
            with opened:
                if self._options.fsync:
                    os.fsync(opened.fileno())
            target.staged.rename(target.path)
        checksum = target.sum.value() if self._options.checksum else None
        reads = self._reads(self._sums.read_for(number))
        self._finished(target.name, Finished(target.size, checksum, reads))

    def close(self) -> None:
        """Let go of all files, and remove those that are of no use to a next run: they may fill the disk."""
        for target in self._targets:
            if target.opened is not None:
                target.opened = None
                if target not in self._begun:
                    with contextlib.suppress(OSError):
                        target.staged.unlink()
