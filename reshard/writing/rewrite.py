"""Writes an output, whatever its form: checks its place, moves the bytes, and publishes it when it is complete."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Collection
from dataclasses import KW_ONLY, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from formats.errors import CheckpointError
from formats.files.sharded import MANIFEST, read_manifest
from formats.hints import meaning, with_hint
from reshard.launcher import Share
from reshard.move.jobs import Options
from reshard.move.moves import KEPT_RANK
from reshard.publishing.existing import check_place
from reshard.publishing.shares import WHOLE, FileShare
from reshard.publishing.staging import PublishedError, Staging
from reshard.source.access import Access
from reshard.store.retries import tried_again
from reshard.store.selection import is_url
from reshard.store.staging_names import tidy
from reshard.text import human_bytes, plural
from reshard.version import __version__
from reshard.writing.files import Progress, no_progress, write_files
from reshard.writing.outputs import Output
from reshard.writing.publishing import publish
from reshard.writing.summary import Summary, done

if TYPE_CHECKING:
    from reshard.publishing.bucket_place import Bucket


@dataclass(frozen=True)
class WriteRequest(Access, Options):
    """What ``merge`` takes; ``split`` takes more.

    ``out`` may be the URL of a place in a bucket. ``max_shard_size`` is the size of the largest weight file, in bytes:
    by default 5 GB, and for ``merge`` as in the original. ``overwrite``: an existing output is replaced once the new
    one is complete (in a bucket: before). ``dry_run``: everything is checked and nothing written. ``part``: this
    process writes its share of the files, and the last of all processes publishes. ``progress`` is called with the
    bytes read and written so far.
    """

    source: str | Path = field(repr=False)  # a URL may have a password
    out: str | Path = field(repr=False)  # a URL may have a password
    _: KW_ONLY
    max_shard_size: int | None = None
    overwrite: bool = False
    dry_run: bool = False
    part: Share | None = None
    progress: Progress = no_progress

    @property
    def options(self) -> Options:
        """Only how bytes are moved: this is sent to other processes."""
        return Options(workers=self.workers, checksum=self.checksum, fsync=self.fsync, sizes=self.sizes)


@dataclass(frozen=True)
class Begun:
    """When a command began (``time.monotonic``), and how many requests had been made again before."""

    at: float
    tried_again: int


def begun() -> Begun:
    """Now."""
    return Begun(time.monotonic(), tried_again())


Place = tuple[Path, "Bucket | None"]
"""The folder in which an output is built, and its place in a bucket, if it goes into one."""


def place_of(out: str | Path, cache_dir: Path | None) -> Place:
    """The folder in which an output is built, and its place in a bucket, if ``out`` is a URL.

    Raises CheckpointError for a web server, and for a folder without a name of its own (``.``, ``..`` or ``/``).
    """
    if not isinstance(out, str) or "://" not in out:
        if Path(out).name in {"", ".."}:
            raise CheckpointError(f"'{out}' is no name for a new folder", "give the name of one that is to be made")
        return Path(out), None
    if not is_url(out):
        hub = meaning("upload", ()) if out.startswith("hf://") else ""
        raise CheckpointError(f"{out}: no such kind of store", with_hint(hub, "give s3://, gs://, az:// or a folder"))
    if out.startswith("http"):
        raise CheckpointError(f"{out} is on a web server, which takes no files", "give a bucket's URL")
    from reshard.publishing.bucket_place import Bucket
    from reshard.store.hub import assets_folder

    folder = assets_folder(cache_dir) / "reshard" / "uploads"
    folder.mkdir(parents=True, exist_ok=True)
    built = folder / hashlib.sha256(out.rstrip("/").encode()).hexdigest()[:32]
    return built, Bucket(out, built)


def rewrite(
    new: Output, place: Place, start: Begun, request: WriteRequest, ranks: Collection[int] | None = None
) -> Summary:
    """Write an output to a place: of all ranks or of ``ranks``, or this process's share of the files.

    Raises ReshardError; the place never has an incomplete output.
    """
    share, (folder, bucket) = _share(new, request.part, ranks), place
    summary = _summary(new, share, bucket.name if bucket else folder, request, ranks)
    summary = replace(summary, part=request.part, tried_again=tried_again() - start.tried_again)
    new.source.check_names([*share.planned, *new.documents])
    building = _staging(new, place, share, request)
    try:
        if request.dry_run:
            building.check()
            return summary
        tidy(folder)
        if ranks is not None and not ranks:
            building.check()
            return replace(summary, complete=_has_all_ranks(folder))
        with building as staging:
            try:
                written = write_files(new, staging, request.options, request.progress)
                committed = publish(new, written, staging, request.options)
            except KeyboardInterrupt:
                raise KeyboardInterrupt(_kept(new, staging)) from None
            complete = committed and (not share.folders or _has_all_ranks(folder))
    except PublishedError:
        return replace(summary, complete=True, ranks=summary.ranks if ranks is None else ())
    return done(summary, written, complete=complete, began=start.at)


def _kept(new: Output, staging: Staging) -> str:
    """What an interrupted run leaves to the next: whole files."""
    files, sizes = staging.share.files, staging.share.planned
    kept, of = len(files & staging.finished.keys()), plural(len(files), "file")
    if kept:
        return f"{kept} of {of} {'is' if kept == 1 else 'are'} kept: the same command goes on from there"
    text = f"0 of {of} were finished: nothing is kept"
    if not files or not new.is_cut_by_size:
        return text
    smaller = human_bytes(10 ** (len(str(max(sizes[name] for name in files) // 4)) - 1))
    return f"{text}; --max-shard-size {smaller.replace('.00', '').replace(' ', '')} makes smaller steps"


def _share(new: Output, part: Share | None, ranks: Collection[int] | None) -> FileShare:
    """The files that this process writes: of some ranks, of its part, or all."""
    sizes = {file.name: file.size for file in new.all_files()}
    label, files = WHOLE, frozenset(sizes)
    if part is not None:
        names, mine = [*sizes], part.of_sizes([*sizes.values()])
        label, files = f"part-{part.index}-of-{part.count}", frozenset(names[number] for number in mine)
    elif ranks is not None:
        held = {*ranks, *([KEPT_RANK] if 0 in ranks else [])}  # the first rank's also: what a program does not keep
        label = f"rank-{'-'.join(map(str, [*ranks][:20]))}-of-{new.arrangement.plan.mesh.size}"
        files = frozenset(file.name for file in new.all_files() if file.rank in held)
    return FileShare(label, files, sizes, tuple(new.folders))


def _staging(new: Output, place: Place, share: FileShare, request: WriteRequest) -> Staging:
    """Where an output is built: beside its place, or for a bucket a few files at a time.

    Raises CheckpointError if the place overlaps with what is read. A new source or version is another task.
    """
    source, (folder, bucket) = new.source, place
    inputs = [stamp.anywhere for stamp in source.inputs]
    task = new.task | {"inputs": inputs, "checksum": request.checksum, "version": __version__}
    check = partial(new.check_existing, overwrite=request.overwrite)
    if bucket is not None:
        from reshard.publishing.upload import Uploading  # rarely needed

        bucket.check_apart(source.location, (file.remote for file in source.files.values() if file.remote is not None))
        return Uploading(bucket, task, share, source.states, overwrite=request.overwrite, check=check)
    check_place(folder, source.read_from)
    return Staging(
        folder, task, share, source.states, fsync=request.fsync, overwrite=request.overwrite, check=check
    )  # fmt: skip


def _summary(
    new: Output, share: FileShare, where: Path | str, request: WriteRequest, ranks: Collection[int] | None
) -> Summary:
    """What is to be done, before it is."""
    source, plan = new.source, new.arrangement.plan
    full = source.model.sizes.of({})
    notes = [f"the delta{'s were' if len(request.deltas) > 1 else ' was'} put on the base"] if request.deltas else []
    if request.dequantize:
        notes.append("weights in fp8 were dequantized to BF16")
    if request.adapter is not None:
        notes.append("the adapter was added to the weights, in float32, rounded once")
    return Summary(
        command=new.command, source=source.location, out=where, source_mesh=source.plan.mesh, mesh=plan.mesh,
        tensors=_tensors(new, share), files=len(share.files), written=0, complete=False, dry_run=request.dry_run,
        nbytes=sum(share.planned[name] for name in share.files),
        padding={axis: (full[axis], padded) for axis, padded in plan.padding.items()},
        ranks=tuple(new.ranks if ranks is None else ranks), left_behind=tuple(new.left_behind),
        note="; ".join([*notes, *([source.note] if source.note else [])]) or None, load=new.load_command(where),
    )  # fmt: skip


def _tensors(new: Output, share: FileShare) -> int:
    """The number of the model's tensors, or of those in this process's files."""
    if share.label == WHOLE:
        return len(new.arrangement.plan.model.tensors)
    return len({name for file in new.all_files() if file.name in share.files for name, _ in file.places()})


def _has_all_ranks(out: Path) -> bool:
    """Whether the manifest in a folder lists all ranks."""
    if not (out / MANIFEST).is_file():
        return False
    manifest = read_manifest(out / MANIFEST)
    return len(manifest.ranks) == manifest.identity.mesh.size
