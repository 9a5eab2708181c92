"""Publishes an output whose files are complete: checks the sums of both sides, and commits it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from reshard.formats.errors import MismatchError
from reshard.formats.files.checksum import PartialSum, sum_part
from reshard.move.jobs import FilePlan, Options
from reshard.move.reading import Sums, checksum_of, contents_of
from reshard.placement.stored import Location
from reshard.publishing.records import Read
from reshard.publishing.staging import Staging
from reshard.source.source import Source
from reshard.writing.documents import Documents
from reshard.writing.manifest import last_documents
from reshard.writing.output import Output
from reshard.writing.weights import Written


def publish(new: Output, documents: Documents, written: Written, staging: Staging, options: Options) -> bool:
    """Commit an output, unless other processes have yet to write a part of it; returns whether it was committed.

    Raises CheckpointError. Raises MismatchError if a file of the source or of the output does not have its known
    checksum, or if a source file has changed since it was opened.
    """

    def last() -> Mapping[str, bytes]:
        files = last_documents(new, documents, staging.finished, sums)
        new.source.check_unchanged()
        return files

    if not staging.is_last():
        return False
    sums, files = written.sums or Sums(new.source.files.values()), new.all_files
    if options.checksum:
        reads = dict.fromkeys(part for entry in staging.finished.values() for part in entry.reads)
        _add_others(reads, sums, files)
        _sum_what_no_target_needs(new.source, sums)
        for file in (file for file in written.read if file.expected is not None):
            computed = sums.checksum(file) or checksum_of(file)  # of which only a part was read is read in full here
            if computed != file.expected:
                raise MismatchError(
                    f"{file.path} has the checksum {computed}, its manifest says {file.expected}",
                    "the file is damaged: fetch or split it again",
                )
    for new_file in files:
        checksum = staging.finished[new_file.name].checksum
        if checksum is not None and new_file.expected not in (None, checksum):
            raise MismatchError(
                f"{new_file.name} would have the checksum {checksum}, the original's was {new_file.expected}",
                "the manifest or the shards are damaged: fetch or split them again",
            )
    staging.commit(last)
    return True


def _add_others(reads: Iterable[Read], sums: Sums, files: Sequence[FilePlan]) -> None:
    """Add the sums of bytes that earlier runs and other processes read for their finished files to the sums of this
    run.

    Raises MismatchError if both have read the same bytes and the sums differ.
    """
    sources, targets_by_name = {file.name: file for file in sums.of}, {file.name: file for file in files}
    for part in reads:
        file, targets = sources[part.source], frozenset(targets_by_name[name] for name in part.targets)
        total = PartialSum.from_text(part.sum, file.size)
        if targets not in sums.of[file]:
            sums.add(file, targets, total)
        elif not sums.of[file][targets].equals(total):
            raise MismatchError(f"{file.path} has changed since another run read a part of it")


def _sum_what_no_target_needs(source: Source, sums: Sums) -> None:
    """Add bytes that a program stores beside the model's own to the sums, so that no file is read again for them."""
    if source.format.plain or not any(file.expected for file in source.files.values()):
        return
    unneeded = [
        info
        for rank, tensors in enumerate(source.ranks)
        for stored, _ in source.arrangement.tensors_of(rank)
        if (info := tensors.get(stored.name_on(rank))) is not None
        # constants, zeros, what was computed from a tensor that is kept
        and (
            stored.constant is not None
            or (bool(stored.atoms) and rank in Location(stored, 0).zeros)
            or any(part.function for part in stored.geometry.portions)
        )
    ]
    for info, data in zip(unneeded, contents_of(source, unneeded), strict=True):
        file = source.files[info.file]
        total = PartialSum(file.size)
        total.add(info.offset, info.nbytes, sum_part(data, info.offset))
        sums.add(file, frozenset(), total)
