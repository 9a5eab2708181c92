"""The engine: moves tensors between files, in one pass, in bounded memory, in a few threads.

It knows byte ranges only: no dtype, no model. A job is a tensor; jobs come in the order of the source. Each job is cut
into slabs (see ``reshard.move.slabs``), which threads read, check, rearrange and write (``reshard.move.mover``): all of
it releases Python's lock. The calling thread opens and finishes the files, and adds up what the others report.
"""

from __future__ import annotations

import contextlib
import os
from bisect import bisect_left
from collections.abc import Callable, Sequence
from io import FileIO

import numpy as np
from isal.isal_zlib import crc32

from formats.files.checksum import sum_part
from reshard.move.jobs import Job, Options, TargetFile, joined
from reshard.move.mover import Account, Mover, steps_of, stretches_of
from reshard.move.reading import Sums
from reshard.store.threads import Shared, work_together
from reshard.system import disk_errors, reserve

_FLAGS = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW


def move(
    jobs: Sequence[Job],
    sums: Sums,
    targets: Sequence[TargetFile],
    options: Options,
    *,
    finished: Callable[[TargetFile, str | None], None],
    progress: Callable[[int], None] = lambda nbytes: None,
) -> None:
    """Carry out jobs in order, from the files of ``sums`` to ``targets``. Adds what is read to ``sums``.

    ``finished`` is called with each complete target file and its checksum, ``progress`` with the bytes written since
    its last call. Raises CheckpointError if a file cannot be read or written; MismatchError if replicas differ or
    padding is not zero. Before any error or KeyboardInterrupt leaves this function, unfinished files are removed. No
    thread writes any more then; one that waits for a remote answer ends with that.
    """
    files, busy, sizes = _Files(options, sums, targets, finished, progress), bytearray(len(targets)), options.sizes
    work = sum(job.work(sizes.small) for job in jobs)
    count = max(1, min(options.threads, work // sizes.step))  # at most one for each step
    stretches = [Shared(steps_of(part, sizes)) for part in stretches_of(jobs, count, sizes.small)]

    def carry_out(number: int, report: Callable[[Account], None]) -> None:
        Mover(files.sources, targets, options, busy, report).carry_out([*stretches[number:], *stretches[:number]])

    try:
        first = Mover(files.sources, targets, options, busy, files.take)
        for target in targets:
            if not target.done:
                files.create(target)
                for offset, content in ((0, target.header), *target.fixed):
                    first.write(target, offset, np.frombuffer(content, dtype=np.uint8))
        first.report()
        work_together(count, carry_out, files.take)
    finally:
        files.close()


class _Files:
    """The files that are written, and the sums of what was read and written."""

    def __init__(
        self,
        options: Options,
        sums: Sums,
        targets: Sequence[TargetFile],
        finished: Callable[[TargetFile, str | None], None],
        progress: Callable[[int], None],
    ) -> None:
        self._options, self._sums, self._targets = options, sums, targets
        self.sources = list(sums.of)
        self._finished, self._progress = finished, progress

    def create(self, target: TargetFile) -> None:
        """Create a target file of full size."""
        with disk_errors(target.staged):
            target.staged.unlink(missing_ok=True)  # a run that was killed may still be writing to it
            target.opened = FileIO(os.open(target.staged, _FLAGS, 0o666), "r+")
            reserve(target.opened.fileno(), target.size)

    def take(self, account: Account) -> None:
        """Add a report to the sums, and finish the files that are complete."""
        self._sums.traffic = self._sums.traffic.plus(account.traffic)
        for (number, wanted), part in account.read.items():
            self._sums.add(self.sources[number], wanted, part)
        for number, runs in account.runs.items():
            self._targets[number].runs += runs
        for number, part in account.written.items():
            file = self._targets[number]
            file.sum.merge(part)
            if file.crcs and file.sum.seen == file.size - file.late:
                self._write_crcs(file)
            if file.sum.is_complete:
                self._finish(file)
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
                    target.sum.add(offset, 4, sum_part(content, offset) if self._options.sums(target) else None)
        self._progress(target.late)

    def _finish(self, target: TargetFile) -> None:
        opened, target.opened = target.opened, None
        assert opened is not None
        with disk_errors(target.path):
            with opened:
                if self._options.fsync:
                    os.fsync(opened.fileno())
            target.staged.rename(target.path)
        self._finished(target, target.sum.value() if self._options.sums(target) else None)

    def close(self) -> None:
        """Let go of all files, and remove unfinished ones: a next run cannot use them, and they may fill the disk."""
        for target in self._targets:
            if target.opened is not None:
                target.opened = None
                with contextlib.suppress(OSError):
                    target.staged.unlink()
