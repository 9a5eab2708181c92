"""Writes an output, in whatever format: checks its place, plans the moves, and has them carried out and published."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any

from reshard.formats.errors import CheckpointError, listed
from reshard.formats.files.manifest import MANIFEST
from reshard.formats.files.sharded import read_manifest
from reshard.formats.notation.format_file import HUGGING_FACE
from reshard.model.config_dtype import with_dtype
from reshard.move.engine import Writing
from reshard.move.jobs import FilePlan, Job, PlacesOfRank
from reshard.move.moves import INTACT_RANK, jobs_of
from reshard.publishing.existing import Existing, check_place
from reshard.publishing.records import WHOLE, FileShare
from reshard.publishing.staging import PublishedError, Staging
from reshard.source.source import Source
from reshard.store.remote import tried_again
from reshard.system import Share
from reshard.text import human_bytes, plural
from reshard.version import __version__
from reshard.writing.documents import documents_of
from reshard.writing.manifest import check_added
from reshard.writing.output import Output
from reshard.writing.publish import publish
from reshard.writing.request import Start, WriteRequest
from reshard.writing.summary import Spent, Summary
from reshard.writing.weights import write_files


def rewrite(new: Output, start: Start, request: WriteRequest, ranks: Collection[int] | None = None) -> Summary:
    """Write an output to a place: of all ranks or of ``ranks``, or this process's share of the files.

    Raises ReshardError; the place never has an incomplete output.
    """
    share, folder = _share(new, request.part, ranks), start.folder
    summary = _summary(new, share, start, request, ranks)
    documents = documents_of(new)
    _check_names(new.source, [*share.planned, *documents.general])
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
                written = write_files(new, jobs, staging, writing, start, request)
                committed = publish(new, documents, written, staging, request)
            except KeyboardInterrupt as stop:
                raise type(stop)(_kept(new.all_files, writing, staging)) from None
            complete = committed and (not share.folders or _has_all_ranks(folder))
    except PublishedError:
        return replace(summary, complete=True, ranks=summary.ranks if ranks is None else ())
    return replace(
        summary, written=written.nbytes, complete=complete, fetched=written.fetched,
        tried_again=tried_again() - start.tried_again, error=new.source.error and new.source.error(),
        spent=Spent(written.began - start.at, written.moving, time.monotonic() - written.began - written.moving),
    )  # fmt: skip


def _check_names(source: Source, written: Collection[str]) -> None:
    """Raise CheckpointError if a side file has the name of a file or folder that will be ``written``.

    Files that begin with a dot, and weights that are not the model's, are not copied; such a name would mean
    something else in the output. (Files in Meta's and Mistral's formats on the Hub are the same model.)
    """
    names = {*written, *(parent.as_posix() for name in written for parent in PurePosixPath(name).parents)} - {"."}
    side = {*source.side_files}
    if source.checkpoint is not None:
        weights = {*(file.name for file in source.files.values()), source.checkpoint.index_name}
        present = {name for name in names if (source.path / name).exists() and not name.startswith("consolidated")}
        side |= present - weights
    clashes = sorted(name for name in side if name in names)
    if clashes:
        raise CheckpointError(
            f"{source.path}: '{clashes[0]}' has the name of what the format writes there",
            "rename it, or move it out of the source",
        )


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
    task = _task(new) | {"inputs": inputs, "checksum": request.checksum, "version": __version__}
    if new.added_to is None:
        check = partial(Existing.check_replaceable, overwrite=request.overwrite, again=source.read_side_file)
    else:
        check = partial(check_added, new, new.added_to, overwrite=request.overwrite)
    if bucket is not None:
        from reshard.publishing.upload import Uploading  # rarely needed

        bucket.check_apart(source.location, (file.remote for file in source.files.values() if file.remote is not None))
        return Uploading(bucket, start.folder, task, share, source.states, overwrite=request.overwrite, check=check)
    check_place(start.folder, source.local_inputs)
    return Staging(
        start.folder, task, share, source.states, fsync=request.fsync, overwrite=request.overwrite, check=check
    )  # fmt: skip


def _command(new: Output) -> str:
    """The command that writes an output, in words."""
    if new.format is HUGGING_FACE:
        return "merge" if new.source.is_split else "write"
    return "re-split" if new.source.is_split else "split"


def _task(new: Output) -> dict[str, Any]:
    """The task of an output: only a run with an equal one may use the finished files of this run."""
    if new.format is HUGGING_FACE:
        files = [[file.name, file.layout.size] for file in new.files]
        return {"command": "merge", "source": new.source.record.id, "files": files}
    identity = new.identity
    return {
        "command": "split",
        "source": identity.source,
        "mesh": identity.mesh.to_document(),
        "padding": dict(identity.padding),
        "plan": identity.plan,
        "format": None if new.format.plain else new.format.name,
        "names": identity.names,
        "max_shard_size": new.max_shard_size,
    }


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
    notes += filter(None, (source.note, new.note))
    config, given = source.model.config, source.given_dtype
    _, stated = with_dtype(config, source.model.architecture.section(config), given)  # in the end, after a cast
    if given is not None and stated:
        says = " and ".join(sorted(stated)) + (", as the weights are" if request.quantize is None else "")
        notes.append(f"the config.json says {says}; the one that was given says {given}")
    if source.without:
        notes.append(f"it is the language model alone, without {listed(source.without)}")
    for dtype, wider in new.format.rules.dtypes.items():
        if any(kind.dtype == dtype for kind in plan.model.kinds) and new.files:
            notes.append(f"weights in {dtype} were cast to {wider}")
    if request.dtype is not None and new.states:
        notes.append("states of training keep their dtypes")
    return Summary(
        command=_command(new), source=source.location, out=where, source_mesh=source.plan.mesh, mesh=plan.mesh,
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


def jobs_into(new: Output, files: Collection[FilePlan]) -> list[Job]:
    """Return the jobs that fill some of the files of an output. Raises PlanError if a tensor cannot go into its
    file.
    """
    jobs, wanted = list[Job](), {*files}
    for part in (new, *new.states):
        of_ranks: dict[int, list[FilePlan]] = {}
        for file in part.files:
            if file in wanted:
                of_ranks.setdefault(file.rank, []).append(file)
        places = {rank: PlacesOfRank(files) for rank, files in of_ranks.items()}
        jobs += jobs_of(part.source, part.arrangement, places)
    return jobs
