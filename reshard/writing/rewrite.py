"""Writes an output, whatever its form: checks its place, moves the bytes, and publishes it when it is complete."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Collection
from dataclasses import dataclass

from formats.files.sharded import MANIFEST, read_manifest
from reshard.engine.jobs import Options
from reshard.engine.moves import KEPT_RANK
from reshard.launcher import Share
from reshard.storage.access import Access
from reshard.storage.marks import tidy
from reshard.storage.output import PublishedError
from reshard.storage.parts import Dealt
from reshard.storage.place import Place
from reshard.storage.retries import tried_again
from reshard.writing.files import (
    Further,
    NewFile,
    check_place,
    deal,
    noted,
    staging_for,
    task_of,
    write_files,
)
from reshard.writing.outputs import Output
from reshard.writing.progress import Progress
from reshard.writing.publishing import publish_output
from reshard.writing.rank_folders import RankFolders, check_ranks, publish_ranks
from reshard.writing.summary import Summary, done, summed_up


@dataclass(frozen=True)
class Begun:
    """When a command began (``time.monotonic``), and how many requests had been made again before."""

    at: float
    tried_again: int


def begun() -> Begun:
    """Now."""
    return Begun(time.monotonic(), tried_again())


def rewrite(
    new: Output,
    place: Place,
    start: Begun,
    *,
    access: Access,
    options: Options,
    overwrite: bool,
    dry_run: bool,
    part: Share | None,
    progress: Progress,
    ranks: Collection[int] | None = None,
) -> Summary:
    """Write an output to a place: of all ranks or of ``ranks``, or with ``part`` this process's share of the files.

    Raises ReshardError; the place has only what is complete.
    """
    source, plan, (folder, bucket) = new.source, new.arrangement.plan, place
    files, where = new.all_files(), bucket.name if bucket else folder
    dealt = deal(files, part)
    if ranks is not None and not new.by_rank:
        dealt = _of_ranks(ranks, plan.mesh.size, files)
    full = source.model.sizes.of({})
    summary = Summary(
        command=new.command, source=source.location, out=where, source_mesh=source.plan.mesh, mesh=plan.mesh,
        tensors=len(plan.model.tensors), files=len(files), nbytes=sum(file.size for file in files), written=0,
        padding={axis: (full[axis], padded) for axis, padded in plan.padding.items()},
        ranks=tuple(new.ranks if ranks is None else ranks), complete=False, dry_run=dry_run,
        left_behind=tuple(new.left_behind), tried_again=tried_again() - start.tried_again,
        note=noted(access, source), load=new.load_command(where),
    )  # fmt: skip
    summary = summed_up(summary, files, part, dealt)
    task = new.task | task_of(source, options)
    source.check_names([*(file.name for file in files), *new.documents])

    def check() -> None:
        if isinstance(new, RankFolders) and new.by_rank:
            check_ranks(new, folder, overwrite=overwrite)
        else:
            check_place(bucket or folder, source, files, dealt, task, overwrite=overwrite)

    if not dry_run:
        tidy(folder)
    try:
        check()
        if dry_run:
            return summary
        if ranks is not None and not ranks:
            there = read_manifest(folder / MANIFEST).ranks if (folder / MANIFEST).is_file() else {}
            return dataclasses.replace(summary, complete=len(there) == plan.mesh.size)
        parts = new.folders if isinstance(new, RankFolders) and bucket is None and dealt is None else [""]
        with staging_for(folder, bucket, task, parts, source, files, dealt, options, check) as staging:
            also = [Further(state.source, state.arrangement, state.files) for state in new.states]
            written = write_files(source, new.arrangement, new.files, staging, options, progress, also)
            if isinstance(new, RankFolders) and new.by_rank:
                complete = publish_ranks(new, written, staging, options)
            else:
                complete = publish_output(
                    source, written, staging, options, lambda sums: new.last_documents(staging, sums),
                    overwrite=overwrite,
                )  # fmt: skip
    except PublishedError:
        return dataclasses.replace(summary, complete=True, ranks=summary.ranks if ranks is None else ())
    return done(summary, written, complete=complete, began=start.at)


def _of_ranks(ranks: Collection[int], count: int, files: Collection[NewFile]) -> Dealt:
    """The files of some ranks, and the first rank's also those of what a program does not keep."""
    mine = {*ranks, *([KEPT_RANK] if 0 in ranks else [])}
    label = f"rank-{'-'.join(map(str, [*ranks][:20]))}-of-{count}"
    return Dealt(label, count, frozenset(file.name for file in files if file.rank in mine))
