"""Checks what was read and written, and publishes an output."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from formats.errors import MismatchError
from formats.files.checksum import Part, PartialSum
from reshard.move.jobs import Options
from reshard.move.reading import Reader, Sums, checksum_of
from reshard.placement.stored import Placed, Stored
from reshard.publishing.journal import Read
from reshard.publishing.staging import Staging
from reshard.source.source import Source, SourceFile
from reshard.writing.files import Written
from reshard.writing.outputs import Output
from reshard.writing.shard_files import NewFile


def publish(new: Output, written: Written, staging: Staging, options: Options) -> bool:
    """Commit an output, unless other processes have yet to write a part of it; returns whether it was committed.

    Raises CheckpointError. Raises MismatchError if a file of the source or of the output does not have its known
    checksum, or if a source file has changed since it was opened.
    """

    def documents() -> Mapping[str, bytes]:
        made = new.last_documents(staging.finished, sums)
        new.source.check_unchanged()
        return made

    if not staging.is_last():
        return False
    sums = _check_read(new, written, staging, options)
    staging.commit(documents)
    return True


def _check_read(new: Output, written: Written, staging: Staging, options: Options) -> Sums:
    """The sums of what was read of the source for all finished files, by whatever run or process."""
    sums, files = written.sums, new.all_files()
    if options.checksum:
        _add_others((read for entry in staging.finished.values() for read in entry.reads), sums, files)
        _sum_what_no_target_needs(new.source, sums)
        _check_sources(written.read, sums)
    _check_written(files, staging)
    return sums


def _add_others(reads: Iterable[Read], sums: Sums, files: Sequence[NewFile]) -> None:
    """Add the sums of what earlier runs and other processes read for their finished files to the sums of this run.

    Raises MismatchError if both have read the same bytes and the sums differ.
    """
    sources = {file.name: file for file in sums.of}
    numbers = {file.name: number for number, file in enumerate(files)}
    for read in reads:
        file, wanted = sources[read.source], frozenset(numbers[name] for name in read.targets)
        total = PartialSum.from_text(read.sum, file.size)
        if wanted not in sums.of[file]:
            sums.add(file, wanted, total)
        elif not sums.of[file][wanted].equals(total):
            raise MismatchError(f"{file.path} has changed since another run read a part of it")


def _sum_what_no_target_needs(source: Source, sums: Sums) -> None:
    """Add to the sums what a program stores beside the model's own bytes, so that no file is read again for them."""
    if source.format is None or not any(file.expected for file in source.files.values()):
        return

    def add(file: SourceFile, offset: int, length: int, part: Part) -> None:
        total = PartialSum(file.size)
        total.add(offset, length, part)
        sums.add(file, frozenset(), total)

    left = [
        (source.files[info.file], info)
        for rank, tensors in enumerate(source.ranks)
        for stored, _ in source.arrangement.held(rank)
        if (info := tensors.get(stored.name_on(rank))) is not None and _is_left(stored, rank)
    ]
    reader = Reader(add)
    try:
        if source.is_elsewhere:
            reader.ahead.request((file, [(info.offset, info.offset + info.nbytes)]) for file, info in left)
        for file, info in left:
            reader.fill(np.empty(info.nbytes, dtype=np.uint8), file, info.offset)
    finally:
        reader.close()


def _is_left(stored: Stored, rank: int) -> bool:
    """Whether no target needs what a rank stores: constants, zeros, what was computed from a tensor that is kept."""
    is_zero = bool(stored.atoms) and Placed(stored, 0).is_zero(rank)
    return stored.constant is not None or is_zero or any(part.function for part in stored.geometry.portions)


def _check_sources(files: Iterable[SourceFile], sums: Sums) -> None:
    """Raise MismatchError if a source file does not have the checksum in its manifest.

    Files of which only a part was read so far are read in full here.
    """
    for file in files:
        if file.expected is None:
            continue
        found = sums.checksum(file) or checksum_of(file)
        if found != file.expected:
            raise MismatchError(
                f"{file.path} has the checksum {found}, its manifest says {file.expected}",
                "the file is damaged: fetch or split it again",
            )


def _check_written(files: Iterable[NewFile], staging: Staging) -> None:
    for file in files:
        found = staging.finished[file.name].checksum
        if found is not None and file.expected not in (None, found):
            raise MismatchError(
                f"{file.name} would have the checksum {found}, the original's was {file.expected}",
                "the manifest or the shards are damaged: fetch or split them again",
            )
