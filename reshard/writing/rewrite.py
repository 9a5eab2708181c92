"""Writes an output, in whatever format: checks its place, moves the bytes, checks both sides' sums, publishes the
complete output, and shows the progress.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple

from reshard.formats.errors import CheckpointError, MismatchError, listed
from reshard.formats.files.checksum import PartialSum, sum_part
from reshard.formats.files.sharded import MANIFEST, read_manifest
from reshard.move.engine import Writing, move
from reshard.move.jobs import FilePlan, Job, Options, TargetPlace, no_progress
from reshard.move.moves import INTACT_RANK, jobs_of
from reshard.move.reading import Sums, checksum_of, contents_of
from reshard.placement.program_plan import with_dtype
from reshard.placement.stored import Location
from reshard.publishing.existing import check_name, check_place
from reshard.publishing.journal import WHOLE, FileShare, Read
from reshard.publishing.staging import PublishedError, Staging
from reshard.source.completeness import towers_left_out
from reshard.source.opening import Access, Place
from reshard.source.source import Source, SourceFile
from reshard.store.remote import tried_again
from reshard.store.selection import HubAccess, is_url
from reshard.system import Share, Taken, default
from reshard.text import human_bytes, plural
from reshard.version import __version__
from reshard.writing.output import Output
from reshard.writing.summary import Spent, Summary


class State(NamedTuple):
    """The progress of a split or merge."""

    written: int
    """Bytes written to the weight files by this run and those before."""
    to_write: int
    """The size of all these files."""
    again: int
    """The requests that were made again."""


Progress = Callable[[State], None]


if TYPE_CHECKING:
    from reshard.store.bucket import Bucket


@dataclass(frozen=True)
class WriteRequest(Access, Options):
    """The output to write, and its place.

    ``source``: a checkpoint: a folder, a Hub id, a URL, or what ``reshard.state_dict`` gave.
    ``out``: a new folder, or the URL of a place in a bucket.
    ``max_shard_size``: the largest weight file, such as ``"5GB"``; by default 5 GB, for ``merge`` as in the original.
    ``names``: of a full checkpoint: as in the ``source``, as ``published``, or as in transformers' ``modules``.
    ``overwrite``: an existing output is replaced once the new one is complete (in a bucket: before).
    ``dry_run``: everything is checked and nothing written.
    ``part``: this process's share of the files, such as ``(0, 2)``; the last of all processes publishes.
    ``progress``: True shows a bar. A function is called with one value: the bytes ``written`` of ``to_write``, and the
        requests made ``again``.
    """

    source: Place = field(repr=False)  # a URL may have a password
    out: str | Path = field(repr=False)  # a URL may have a password
    _: KW_ONLY
    max_shard_size: Taken[int | str | None, int | None] = default(None)
    names: Literal["source", "published", "modules"] = "source"
    overwrite: bool = False
    dry_run: bool = False
    part: Taken[Share | tuple[int, int] | str | None, Share | None] = default(None)
    progress: Taken[Progress | bool, Progress] = default(no_progress)


class Start(NamedTuple):
    """The start of a write: the output's place, the time (``time.monotonic``), and the requests made again before."""

    folder: Path
    bucket: Bucket | None
    at: float
    tried_again: int


def start(request: WriteRequest) -> Start:
    """The place of an output, and now. Raises CheckpointError if there can be no output."""
    return Start(*place_of(request.out, request), time.monotonic(), tried_again())


def place_of(out: str | Path, access: HubAccess) -> tuple[Path, Bucket | None]:
    """The folder in which an output is built, and its place in a bucket, if ``out`` is a URL.

    Raises CheckpointError for a web server, and for a folder without a name of its own (``.``, ``..`` or ``/``).
    """
    if not isinstance(out, str) or "://" not in out:
        check_name(out)
        return Path(out), None
    if not is_url(out):
        from reshard.formats.hints import meaning, with_hint  # for an error alone

        hub = meaning("upload", ()) if out.startswith("hf://") else ""
        raise CheckpointError(f"{out}: no such kind of store", with_hint(hub, "give s3://, gs://, az:// or a folder"))
    if out.startswith("http"):
        raise CheckpointError(f"{out} is on a web server, which takes no files", "give a bucket's URL")
    from reshard.store.bucket import Bucket
    from reshard.store.hub import assets_folder

    folder = assets_folder(access.cache_dir) / "reshard" / "uploads"
    folder.mkdir(parents=True, exist_ok=True)
    built = folder / hashlib.sha256(out.rstrip("/").encode()).hexdigest()[:32]
    return built, Bucket(out)


def rewrite(new: Output, start: Start, request: WriteRequest, ranks: Collection[int] | None = None) -> Summary:
    """Write an output to a place: of all ranks or of ``ranks``, or this process's share of the files.

    Raises ReshardError; the place never has an incomplete output.
    """
    share, folder = _share(new, request.part, ranks), start.folder
    summary = _summary(new, share, start, request, ranks)
    new.source.check_names([*share.planned, *new.documents])
    if request.part is not None and not share.files:
        return summary
    building = _staging(new, start, share, request)
    try:
        if request.dry_run:
            building.check()
            planned = [file for file in new.all_files if file.name in share.files]
            return replace(summary, planned=planned, moves=jobs_into(new, planned))
        if ranks is not None and not ranks:
            building.check()
            return replace(summary, complete=_has_all_ranks(folder))
        with building as staging:
            writing = dict[FilePlan, Writing]()
            try:
                jobs = jobs_into(new, new.all_files)
                written = write_files(new, jobs, staging, writing, request, request.progress)
                committed = publish(new, written, staging, request)
            except KeyboardInterrupt:
                raise KeyboardInterrupt(_kept(new.all_files, writing, staging)) from None
            complete = committed and (not share.folders or _has_all_ranks(folder))
    except PublishedError:
        return replace(summary, complete=True, ranks=summary.ranks if ranks is None else ())
    return replace(
        summary, written=written.nbytes, complete=complete, fetched=written.fetched,
        tried_again=tried_again() - start.tried_again, error=new.source.error and new.source.error(),
        spent=Spent(written.began - start.at, written.moving, time.monotonic() - written.began - written.moving),
    )  # fmt: skip


def _kept(files: Iterable[FilePlan], writing: Mapping[FilePlan, Writing], staging: Staging) -> str:
    """Return a clause on the bytes that an interrupted run leaves to the next."""
    mine = [file for file in files if file.name in staging.share.files]
    count = sum(file.layout.size for file in mine if file.name in staging.finished)
    left = (opened for file, opened in writing.items() if file.name not in staging.finished)
    count += sum(opened.sum.seen for opened in left if opened.staged.exists())
    if not count:
        return "nothing is kept"
    total = human_bytes(sum(file.layout.size for file in mine))
    return f"{human_bytes(count)} of {total} are kept: the same command goes on from there"


def _share(new: Output, part: Share | None, ranks: Collection[int] | None) -> FileShare:
    """The files that this process writes: of some ranks, of its part, or all."""
    sizes = {file.name: file.layout.size for file in new.all_files}
    label, files = WHOLE, frozenset(sizes)
    if part is not None:
        names, numbers = [*sizes], part.of_sizes([*sizes.values()])
        label, files = f"part-{part.index}-of-{part.count}", frozenset(names[number] for number in numbers)
    elif ranks is not None:
        with_intact = {*ranks} | ({INTACT_RANK} if 0 in ranks else set())
        label = f"rank-{'-'.join(map(str, [*ranks][:20]))}-of-{new.plan.mesh.size}"
        files = frozenset(file.name for file in new.all_files if file.rank in with_intact)
    return FileShare(label, files, sizes, tuple(new.folders))


def _staging(new: Output, start: Start, share: FileShare, request: WriteRequest) -> Staging:
    """Return the staging of an output: beside its place or, for a bucket, a few files at a time.

    Raises CheckpointError if the place overlaps with what is read. A new source or version is another task.
    """
    source, bucket = new.source, start.bucket
    inputs = [stamp.anywhere for stamp in source.inputs]
    task = new.task | {"inputs": inputs, "checksum": request.checksum, "version": __version__}
    check = partial(new.check_existing, overwrite=request.overwrite)
    if bucket is not None:
        from reshard.publishing.upload import Uploading  # rarely needed

        bucket.check_apart(source.location, (file.remote for file in source.files.values() if file.remote is not None))
        return Uploading(bucket, start.folder, task, share, source.states, overwrite=request.overwrite, check=check)
    check_place(start.folder, source.local_inputs)
    return Staging(
        start.folder, task, share, source.states, fsync=request.fsync, overwrite=request.overwrite, check=check
    )  # fmt: skip


def _summary(
    new: Output, share: FileShare, start: Start, request: WriteRequest, ranks: Collection[int] | None
) -> Summary:
    """Return the summary of a write before it begins."""
    source, plan = new.source, new.plan
    tensors = len(plan.model.tensors)
    if share.label != WHOLE:
        tensors = len({name for file in new.all_files if file.name in share.files for name, _ in file.layout.places})
    where = start.folder if start.bucket is None else start.bucket.name
    full, notes = source.model.sizes.of({}), list[str]()
    if request.averaged is not None:
        others, weights = request.averaged
        shown = ", ".join(f"{weight:g}" for weight in weights)
        notes.append(f"it is the mean with {plural(len(others), 'other')}, weights {shown}, in float32, rounded once")
    if request.deltas:
        notes.append(f"the delta{'s were' if len(request.deltas) > 1 else ' was'} put on the base")
    if request.dequantize:
        notes.append("weights in fp8 were dequantized to BF16")
    if request.adapter is not None:
        notes.append("the adapter was added to the weights, in float64, and rounded")
    notes += [source.note] if source.note else []
    config, given = source.model.config, source.given_dtype
    _, stated = with_dtype(config, source.model.architecture.section(config), given)  # in the end, after a cast
    if given is not None and stated:
        says = " and ".join(sorted(stated)) + (", as the weights are" if request.quantize is None else "")
        notes.append(f"config.json says {says}; the one that was given says {given}")
    if towers := towers_left_out(source.model):
        notes.append(f"it is the language model alone, without {listed(towers)}")
    for dtype, wider in new.format.rules.dtypes.items():
        if any(kind.dtype == dtype for kind in plan.model.kinds) and new.files:
            notes.append(f"weights in {dtype} were cast to {wider}")
    if request.dtype is not None and new.states:
        notes.append("states of training keep their dtypes")
    return Summary(
        command=new.command, source=source.location, out=where, source_mesh=source.plan.mesh, mesh=plan.mesh,
        tensors=tensors, files=len(share.files), written=0, complete=False, dry_run=request.dry_run,
        nbytes=sum(share.planned[name] for name in share.files),
        padding={axis: (full[axis], padded) for axis, padded in plan.padding.items()},
        ranks=tuple(new.ranks if ranks is None else ranks), left_behind=tuple(new.left_behind),
        part=request.part, tried_again=tried_again() - start.tried_again,
        note="; ".join(notes) or None,
        load=None if new.format.plain else new.format.loading.command_of(str(where), plan.mesh),
    )  # fmt: skip


def _has_all_ranks(out: Path) -> bool:
    """Whether a folder has a manifest that lists all ranks."""
    if not (out / MANIFEST).is_file():
        return False
    manifest = read_manifest(out / MANIFEST)
    return len(manifest.ranks) == manifest.identity.mesh.size


# ------------------------------------------------------------------------------------------------- weight files


@dataclass(frozen=True)
class Written:
    """The bytes that this run wrote and fetched, and the sums of the bytes read of each file."""

    nbytes: int
    fetched: int
    sums: Sums
    read: Sequence[SourceFile]
    """The source's files from which bytes were moved."""
    began: float
    """The time at which it began (``time.monotonic``)."""
    moving: float
    """Seconds of moving bytes."""


def jobs_into(new: Output, files: Collection[FilePlan]) -> list[Job]:
    """Return the jobs that fill some of the files of an output. Raises PlanError if a tensor cannot go into its
    file.
    """
    jobs, wanted = list[Job](), {*files}
    for part in (new, *new.states):
        places: dict[int, dict[str, TargetPlace]] = {}
        for file in part.files:
            if file in wanted:
                tensors = ((tensor, TargetPlace(file, offset)) for tensor, offset in file.layout.places)
                places.setdefault(file.rank, {}).update(tensors)
        jobs += jobs_of(part.source, part.arrangement, places)
    return jobs


def write_files(
    new: Output, jobs: Sequence[Job], staging: Staging, writing: dict[FilePlan, Writing], options: Options,
    progress: Progress,
) -> Written:  # fmt: skip
    """Write the weight files of an output into the staging folder. ``writing`` then has those of the last batch.

    The files of other processes count as done. Raises CheckpointError if a file cannot be read or written, and
    MismatchError if replicas differ or padding is not zero.
    """
    source, files = new.source, new.all_files
    began, moving, sums = time.monotonic(), 0.0, Sums(source.files.values())
    sizes = {file.name: file.layout.size for file in files if file.name in staging.share.files}
    total, todo = sum(sizes.values()), sum(size for name, size in sizes.items() if name not in staging.finished)
    nbytes, fetched, before = total - todo, 0, tried_again()

    def moved(written: int) -> None:
        nonlocal nbytes
        nbytes += written
        progress(State(nbytes, total, tried_again() - before))

    of_ranks = dict[int, list[FilePlan]]()
    for each in files:
        of_ranks.setdefault(each.rank, []).append(each)
    # the first file of each rank, then the second of each: neighbours are made of the same bytes
    side_by_side = [(each.name, each.layout.size) for row in zip_longest(*of_ranks.values()) for each in row if each]
    for batch in staging.batches(side_by_side):
        sums = Sums(source.files.values())  # bytes that files of two batches want are read, and summed, twice
        left = (file for file in files if file.name in batch and file.name not in staging.finished)
        writing.clear()
        writing.update((file, Writing(file, staging.path(file.name))) for file in left)
        start = time.monotonic()
        todo -= move(
            jobs, sums, files, writing, options, finished=staging.note_finished, moved=staging.note_moved,
            earlier=staging.moved(batch - staging.finished.keys()), progress=moved,
        )  # fmt: skip
        moving += time.monotonic() - start
        fetched += sums.fetched
    names = [job.name for job in jobs] if source.format.plain else None
    return Written(todo, fetched, sums, source.files_of(names), began, moving)


# --------------------------------------------------------------------------------------------------- publishing


def publish(new: Output, written: Written, staging: Staging, options: Options) -> bool:
    """Commit an output, unless other processes have yet to write a part of it; returns whether it was committed.

    Raises CheckpointError. Raises MismatchError if a file of the source or of the output does not have its known
    checksum, or if a source file has changed since it was opened.
    """

    def documents() -> Mapping[str, bytes]:
        last = new.last_documents(staging.finished, sums)
        new.source.check_unchanged()
        return last

    if not staging.is_last():
        return False
    sums, files = written.sums, new.all_files
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
    staging.commit(documents)
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
