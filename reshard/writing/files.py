"""Writes weight files, in the same way for split, re-split and merge."""

from __future__ import annotations

import contextlib
import math
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from formats.errors import CheckpointError, MismatchError, PlanError
from formats.files.checksum import Part, PartialSum
from formats.files.safetensors import DTYPE_BITS, tensor_bytes
from formats.files.sharded import SourceRecord
from formats.files.torch_zip import Crc
from formats.mesh import Mesh
from reshard import __version__
from reshard.engine.jobs import Job, Options, TargetFile, TargetPlace, place_in
from reshard.engine.move import move
from reshard.engine.reading import Reader, Sums, checksum_of
from reshard.engine.transfer import Change, Transfer, Way
from reshard.engine.ways import way_between
from reshard.launcher import Share
from reshard.planning.arrangement import Arrangement, permuted
from reshard.planning.boxes import InBoxes
from reshard.planning.common_dimensions import in_common
from reshard.planning.geometry import Geometry
from reshard.planning.plan import Layout, Plan, make_plan
from reshard.planning.portions import Portion, stored_like, unchanged
from reshard.planning.stored import Atom, Placed, Stored
from reshard.storage.access import Access
from reshard.storage.output import (
    Dealt,
    Finished,
    PublishedError,
    Read,
    Staging,
    check_output,
    check_space,
    is_published,
    staging_of,
)
from reshard.storage.place import Bucket
from reshard.storage.remote import without_query
from reshard.storage.retries import Traffic
from reshard.storage.source import KEPT, UNSPLIT, Places, Source, SourceFile, SourcePlace, arrangements
from reshard.storage.upload import Uploading
from reshard.writing.shard_files import ShardFile

DEFAULT_SHARD_SIZE = 5_000_000_000
KEPT_RANK = -1
"""The rank, so to speak, of the file with what a program does not keep."""

Progress = Callable[[int, int, int], None]
"""Called with the bytes written so far, the total of bytes, and the number of requests that were made again."""


def no_progress(done: int, total: int, again: int) -> None:
    """Show no progress."""


@dataclass(frozen=True)
class Summary:
    """What a split or merge did, or would do with ``dry_run``.

    ``nbytes`` is the size of all weight files in bytes, ``written`` the part that this run wrote. ``padding`` has the
    size before and after for each padded axis. ``left_behind`` names what the source has beside the model,
    ``note`` what a reader of the output must know.
    """

    command: str
    source: str
    out: Path | str
    source_mesh: Mesh
    mesh: Mesh
    tensors: int
    files: int
    nbytes: int
    written: int
    padding: Mapping[str, tuple[int, int]]
    ranks: tuple[int, ...]
    complete: bool
    dry_run: bool
    part: Share | None = None
    """Which part of the files this is, where several processes deal them among them; ``files`` and ``nbytes`` are its.
    """
    fetched: int = 0
    """Bytes of weights that were fetched from elsewhere."""
    tried_again: int = 0
    """The requests for weights and headers that were made again because an earlier one had failed."""
    left_behind: tuple[str, ...] = ()
    note: str | None = None


@dataclass(frozen=True, eq=False)
class NewFile:
    """A weight file to be written: its header, and tensors of one rank.

    ``name`` is relative to the output. ``part`` is the folder of the output to which it belongs (``""``: the root).
    ``size`` is in bytes, with the header. ``places`` gives the names of its tensors and their offsets in the file. The
    file must have the checksum ``expected``, if that is known. Without ``summed`` no checksum is computed.
    """

    name: str
    part: str
    rank: int
    header: bytes
    size: int
    places: Callable[[], Iterable[tuple[str, int]]]
    expected: str | None = None
    summed: bool = True
    fixed: tuple[tuple[int, bytes], ...] = ()
    """Other bytes that come from no source, with their offsets."""
    crcs: tuple[Crc, ...] = ()
    """What is known when all else is written."""


def noted(access: Access, note: str | None = None) -> str | None:
    """What a reader of the output must know: that it was dequantized, and ``note``."""
    notes = ["weights in fp8 were dequantized to BF16"] if access.dequantize else []
    return "; ".join([*notes, *([note] if note else [])]) or None


def new_file(shard: ShardFile, folder: str, rank: int, header: bytes, *, summed: bool = True) -> NewFile:
    """A shard file, to be written with this header into a folder of the output (``""``: the root)."""
    name = f"{folder}/{shard.name}" if folder else shard.name
    size, places = len(header) + shard.nbytes, partial(shard.places, len(header))
    return NewFile(name, folder, rank, header, size, places, summed=summed)


@dataclass(frozen=True)
class Written:
    """What this run wrote, in bytes, what it fetched from elsewhere, and the sums of what it read of each file."""

    nbytes: int
    traffic: Traffic
    sums: Sums
    files: Sequence[NewFile]
    """All files of the output, also those of other processes."""
    read: Sequence[SourceFile]
    """The files of the source that hold what was moved."""


class Further(NamedTuple):
    """Files to be written of a target, and the source of what is in them."""

    source: Source
    target: Plan | Arrangement
    files: Sequence[NewFile]


def write_files(
    source: Source,
    target: Plan | Arrangement,
    files: Sequence[NewFile],
    staging: Staging,
    options: Options,
    progress: Progress,
    also: Sequence[Further] = (),
) -> Written:
    """Write the files of a plan or of a program's arrangement into the staging folder, from a source of the same model.

    ``also`` has what else is written, into files of its own: its sources have the same files as ``source``. The files
    of other processes count as done. Raises CheckpointError if a file cannot be read or written. Raises MismatchError
    if replicas differ or padding is not zero; then what was built is removed.
    """
    parts = [Further(source, target, files), *also]
    files = [file for part in parts for file in part.files]
    names = [file.name for file in files]
    targets = [
        TargetFile(staging.path(f.name), f.header, f.size, summed=f.summed, fixed=f.fixed, crcs=f.crcs) for f in files
    ]
    jobs = list[Job]()
    to = iter(targets)
    for part in parts:
        places: dict[int, dict[str, TargetPlace]] = {}
        for file in part.files:
            found, place = places.setdefault(file.rank, {}), next(to)
            found.update((tensor, TargetPlace(place, offset)) for tensor, offset in file.places())
        if isinstance(part.target, Plan) and part.source.arrangement is None:
            jobs += _jobs(part.source, part.target, places)
        else:
            jobs += _atom_jobs(part.source, part.target, places)
    total = sum(file.size for file in files if staging.writes(file.name))
    todo = sum(f.size for f in files if staging.writes(f.name) and f.name not in staging.finished)
    done, traffic, sums = total - todo, Traffic(), Sums(source.files.values())

    def count(nbytes: int) -> None:
        nonlocal done
        done += nbytes
        progress(done, total, traffic.again + sums.traffic.again)

    def finished(target: TargetFile, checksum: str | None) -> None:
        number = targets.index(target)
        reads = tuple(
            Read(of.name, frozenset(names[other] for other in wanted), read.to_text())
            for of, wanted, read in sums.wanted_by(number)
        )
        staging.note_finished(files[number].part, names[number], Finished(target.size, checksum, reads))

    try:
        for batch in staging.batches([(file.name, file.size) for file in _side_by_side(files)]):
            sums = Sums(source.files.values())  # bytes that files of two batches want are read, and summed, twice
            for each, name in zip(targets, names, strict=True):
                each.done = name not in batch or name in staging.finished
            move(jobs, sums, targets, options, finished=finished, progress=count)
            traffic = traffic.plus(sums.traffic)
    except MismatchError:
        staging.clear()
        raise
    read = [job.name for job in jobs] if source.arrangement is None else None
    return Written(todo, traffic, sums, files, source.files_of(read))


def _side_by_side(files: Iterable[NewFile]) -> list[NewFile]:
    """The first file of each rank, then the second of each, and so on: neighbours are made of the same bytes."""
    numbers = Counter[int]()
    order = []
    for file in files:
        order.append((numbers[file.rank], file))
        numbers[file.rank] += 1
    return [file for _, file in sorted(order, key=lambda each: each[0])]


def check_read(source: Source, written: Written, staging: Staging, options: Options) -> Sums:
    """The sums of what was read of the source for all finished files, by whatever run or process.

    Raises MismatchError if a file of the source or of the output does not have its known checksum; then the staging
    folder is removed.
    """
    sums = written.sums
    try:
        if options.checksum:
            _add_others((read for entry in staging.finished.values() for read in entry.reads), sums, written.files)
            _sum_what_no_target_needs(source, sums)
            _check_sources(written.read, sums)
        _check_written(written.files, staging)
    except MismatchError:
        staging.clear()
        raise
    return sums


def publish_output(
    source: Source,
    written: Written,
    staging: Staging,
    options: Options,
    documents: Callable[[Sums], Mapping[str, bytes]],
    *,
    overwrite: bool,
) -> bool:
    """Publish an output with these small files, unless other processes are still to write a part of it.

    Returns whether it is complete. Raises MismatchError and CheckpointError.
    """
    with staging.last() as is_last:
        if not is_last or any(file.name not in staging.finished for file in written.files):
            return False
        sums = check_read(source, written, staging, options)
        for name, content in documents(sums).items():
            staging.write(name, content)
        check_unchanged(source, staging)
        staging.publish_all(overwrite=overwrite)
    return True


def _jobs(source: Source, plan: Plan, places: Mapping[int, Mapping[str, TargetPlace]]) -> list[Job]:
    """One job a tensor, in the order in which the source stores them."""
    ways: dict[tuple[Layout, Layout, str, frozenset[int]], Way] = {}
    sizes = {kind: tensor_bytes(kind.name, kind.dtype, kind.shape) for kind in source.plan.model.kinds}
    jobs = []
    for (name, kind, _), (_, wanted, _) in zip(source.plan.model.tensors, plan.model.tensors, strict=True):
        ranks = frozenset([rank for rank, of_rank in places.items() if name in of_rank])
        if not ranks:
            continue
        before, after, held = source.plan.laid[kind], plan.laid[wanted], source.places(name)
        key = (before.layout, after.layout, before.dtype, ranks)
        way = ways.get(key)
        if way is None:
            way = way_between(before._replace(name=name), after, held, ranks)
            if before.stated is None:  # else the way has the places of this tensor
                ways[key] = way
        jobs.append(Job(name, way, held, partial(place_in, places, name), sizes[kind]))
    return jobs


def _atom_jobs(
    source: Source, target: Plan | Arrangement, places: Mapping[int, Mapping[str, TargetPlace]]
) -> Iterator[Job]:
    """One job an atom, in the order in which the source stores them (see ``reshard.planning.arrangement``)."""
    here, there = arrangements(source, target)
    page = source.page if source.manifest is None else None
    ways = _Ways(zeros=page is None or not page.free_padding)
    kept = _Kept(source, there, places)
    ranks_of: dict[tuple[Geometry | InBoxes, int], frozenset[int]] = {}
    for atom in kept.atoms if here.dropped or there.dropped else here.placed:
        found, wanted = here.placed.get(atom), there.placed.get(atom)
        if found is None or found.portion.function is not None:
            held, sources = kept.source(atom)
        else:
            held, sources = found, partial(_atom_source, source, found)
        ranks = frozenset[int]()
        if wanted is not None:
            key = (wanted.stored.geometry, wanted.number)
            if key not in ranks_of:
                ranks_of[key] = _ranks_of(wanted, places)
            ranks = ranks_of[key]
        if wanted is not None and ranks:
            yield ways.job(atom, held, wanted, sources, partial(_atom_target, places, wanted), ranks)
        if wanted is None or wanted.portion.function is not None:
            yield ways.job(atom, held, kept.whole(atom), sources, kept.target(atom), frozenset({0}))
    for atom, wanted in there.copies:
        held = here.placed[atom]
        yield ways.job(
            atom, held, wanted, partial(_atom_source, source, held), partial(_atom_target, places, wanted),
            _ranks_of(wanted, places),
        )  # fmt: skip


def _ranks_of(placed: Placed, places: Mapping[int, Mapping[str, TargetPlace]]) -> frozenset[int]:
    """The ranks to which an atom is to be written: the same for all stored tensors of one geometry."""
    stored, geometry = placed.stored, placed.stored.geometry
    return frozenset(
        rank
        for rank, of_rank in places.items()
        if stored.name_on(rank) in of_rank
        and geometry.lies(rank, placed.number) is not None
        and not placed.is_zero(rank)
    )


class _Ways:
    """Makes the jobs of atoms; atoms that go the same way share it. With ``zeros`` the source has zeros as padding."""

    def __init__(self, *, zeros: bool) -> None:
        self._zeros = zeros
        self._ways: dict[tuple[object, ...], Way] = {}
        self._orders: dict[tuple[Portion, Portion], tuple[tuple[int, ...], tuple[int, ...]]] = {}
        self._layouts: dict[tuple[Layout, tuple[int, ...], frozenset[int]], Layout] = {}
        self._common: dict[tuple[object, ...], tuple[Layout, Layout, tuple[int, ...]]] = {}

    def job(
        self,
        atom: Atom,
        held: Placed,
        wanted: Placed,
        sources: Places,
        targets: Callable[[int], TargetPlace | None],
        ranks: frozenset[int],
    ) -> Job:
        """The job that moves an atom to these ranks."""
        before, after, order = self._between(held, wanted)
        dtype, change = held.stored.dtype, _change(atom.tensor, held, wanted)
        key = (before, after, dtype, order, change and (change.target, change.function), ranks)
        if key not in self._ways:
            bits, zeros = DTYPE_BITS[dtype], self._zeros
            self._ways[key] = Transfer(before, after, bits, ranks, zeros=zeros, order=order, change=change)
        nbytes = math.prod(before.full) * DTYPE_BITS[dtype] // 8
        return Job(atom.tensor, self._ways[key], sources, targets, nbytes, held.in_rows or wanted.in_rows)

    def _between(self, held: Placed, wanted: Placed) -> tuple[Layout, Layout, tuple[int, ...]]:
        """The layouts before and after with the same dimensions, and the order in which the target stores these."""
        portions = held.portion, wanted.portion
        if InBoxes not in {type(held.stored.geometry), type(wanted.stored.geometry)}:
            if portions not in self._orders:
                self._orders[portions] = _orders(*portions)
            stored, order = self._orders[portions]
            return self._layout(held, stored), self._layout(wanted, stored), order
        key = (held.layout, wanted.layout, *portions, held.zeros)
        if key not in self._common:
            before, after, order = in_common(held, wanted)
            kept = {rank: box for rank, box in before.boxes.items() if rank not in held.zeros}
            self._common[key] = replace(before, boxes=kept), after, order
        return self._common[key]

    def _layout(self, placed: Placed, order: tuple[int, ...]) -> Layout:
        """The layout of an atom in the source's order, without the ranks that have zeros in its place, or nothing."""
        layout, zeros = placed.layout, placed.zeros | placed.layout.empty
        if not order and not zeros:
            return layout
        key = (layout, order, zeros)
        if key not in self._layouts:
            kept = {rank: box for rank, box in layout.boxes.items() if rank not in zeros}
            layout = replace(layout, boxes=kept)
            self._layouts[key] = permuted(layout, order) if order else layout
        return self._layouts[key]


class _Kept:
    """The tensors whose own bits a program does not keep: they stand in a file of reshard's, whole."""

    def __init__(self, source: Source, target: Arrangement, places: Mapping[int, Mapping[str, TargetPlace]]) -> None:
        self._source, self._target, self._places = source, target, places

    @cached_property
    def _whole(self) -> Arrangement:
        """All tensors as Hugging Face has them, on one rank, in the parts of the target's."""
        plan = make_plan(self._target.plan.model, UNSPLIT, padding={})
        own, other = unchanged(plan.model), self._target.taken
        return Arrangement(plan, {kind: stored_like(kind, own[kind], other[kind]) for kind in own})

    @property
    def atoms(self) -> Mapping[Atom, Placed]:
        """All atoms, in the order of the original."""
        return self._whole.placed

    def source(self, atom: Atom) -> tuple[Placed, Places]:
        """Where an atom lies in the source's file. Raises PlanError if there is none."""
        placed, info = self._whole.placed[atom], self._source.kept.get(atom.tensor)
        if info is None:
            raise PlanError(
                f"{self._source.path} does not have the bits of tensor '{atom.tensor}', which the format "
                f"'{self._source.page.name if self._source.page else ''}' does not store as they are",
                f"'reshard split' keeps them beside the shards, in {KEPT}; another program does not",
            )
        lies = placed.stored.geometry.lies(0, placed.number)
        assert lies is not None
        place = SourcePlace(self._source.files[info.file], info.offset + lies.base, lies.rows)
        return placed, lambda rank: place

    def whole(self, atom: Atom) -> Placed:
        """An atom as it stands in the file."""
        return self._whole.placed[atom]

    def target(self, atom: Atom) -> Callable[[int], TargetPlace | None]:
        """Where an atom is to lie in the target's file."""
        placed = self._whole.placed[atom]
        lies = placed.stored.geometry.lies(0, placed.number)
        place = self._places[KEPT_RANK][atom.tensor]
        assert lies is not None
        there = TargetPlace(place.file, place.offset + lies.base, lies.rows)
        return lambda rank: there


def _change(name: str, held: Placed, wanted: Placed) -> Change | None:
    """The change of an atom's elements, if it is stored in another dtype or by a function."""
    function = wanted.portion.function
    if held.stored.dtype == wanted.stored.dtype and function is None:
        return None
    return Change(name, held.stored.dtype, wanted.stored.dtype, function)


def _orders(source: Portion, target: Portion) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The factors of an atom as the source stores them, and the order of the target in terms of these; () if none."""
    stored = () if source.order == tuple(range(len(source.order))) else source.order
    order = tuple(source.order.index(place) for place in target.order)
    return stored, () if order == tuple(range(len(order))) else order


def _atom_source(source: Source, placed: Placed, rank: int) -> SourcePlace | None:
    info, lies = source.ranks[rank].get(placed.stored.name_on(rank)), placed.stored.geometry.lies(rank, placed.number)
    if info is None or lies is None:
        return None
    return SourcePlace(source.files[info.file], info.offset + lies.base, lies.rows)


def _atom_target(places: Mapping[int, Mapping[str, TargetPlace]], placed: Placed, rank: int) -> TargetPlace | None:
    place, lies = places[rank].get(placed.stored.name_on(rank)), placed.stored.geometry.lies(rank, placed.number)
    return TargetPlace(place.file, place.offset + lies.base, lies.rows) if place and lies else None


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
            raise MismatchError(f"{file.shown} has changed since another run read a part of it")


def _sum_what_no_target_needs(source: Source, sums: Sums) -> None:
    """Add to the sums what a program stores beside the model's own bytes, so that no file is read again for them."""
    if source.arrangement is None or not any(file.expected for file in source.files.values()):
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
                f"{file.shown} has the checksum {found}, its manifest says {file.expected}",
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


# ------------------------------------------------------------------------------------- common to split and merge


def deal(files: Sequence[NewFile], part: Share | None) -> Dealt | None:
    """The files that one of several processes writes; None if one process writes all."""
    if part is None:
        return None
    mine = part.of_sizes([file.size for file in files])
    label = f"part-{part.index}-of-{part.count}"
    return Dealt(label, part.count, frozenset(files[number].name for number in mine))


def staging_for(
    folder: Path,
    bucket: Bucket | None,
    task: Mapping[str, Any],
    parts: Sequence[str],
    source: Source,
    files: Sequence[NewFile],
    dealt: Dealt | None,
    options: Options,
    check: Callable[[], None],
) -> Staging:
    """Where an output is built: beside its place, or for a bucket a few files at a time."""
    if bucket is None:
        return Staging(folder, task, parts, source.states, fsync=options.fsync, check=check, dealt=dealt)
    everything = Dealt("part-0-of-1", 1, frozenset(file.name for file in files))
    return Uploading(bucket, task, source.states, dealt or everything, check=check)


def check_place(
    out: Path | Bucket,
    source: Source,
    files: Sequence[NewFile],
    dealt: Dealt | None,
    task: Mapping[str, Any],
    *,
    overwrite: bool,
) -> None:
    """Check that the files can be written to an output, and that the disk has room.

    Raises CheckpointError; PublishedError if other processes have finished this ``task``.
    """
    if isinstance(out, Path):
        if dealt is not None and not overwrite and is_published(out, task):
            raise PublishedError(f"{out} is complete")
        check_output(out, source.folders, overwrite=overwrite)
        check_space(out.parent, sum(file.size for file in files) - already_staged(out))
        return
    if dealt is not None and overwrite:
        raise PlanError(
            f"--overwrite is not possible where several processes write to {out.name}", "remove what is there first"
        )
    here, there = f"{out.name}/", f"{without_query(source.location).rstrip('/')}/"
    if "://" in there and (here.startswith(there) or there.startswith(here)):
        raise CheckpointError(
            f"{out.name} and {there[:-1]} are the same place, or one lies in the other", "choose another place"
        )
    out.check(task, overwrite=overwrite, is_shared=dealt is not None)
    check_space(out.folder.parent, max((file.size for file in files), default=0))


def done(summary: Summary, written: Written, *, complete: bool) -> Summary:
    """The summary of a run that has ended."""
    traffic = written.traffic
    again = summary.tried_again + traffic.again
    return replace(summary, written=written.nbytes, complete=complete, fetched=traffic.fetched, tried_again=again)


def summed_up(summary: Summary, files: Sequence[NewFile], part: Share | None, dealt: Dealt | None) -> Summary:
    """The summary of a process that writes a part of an output."""
    if dealt is None:
        return summary
    mine = [file for file in files if file.name in dealt.files]
    return replace(summary, part=part, files=len(mine), nbytes=sum(file.size for file in mine))


def task_of(source: Source, options: Options) -> dict[str, Any]:
    """The part of a task that is common to split and merge: a change of the source or of the version starts anew."""
    inputs = [stamp.anywhere for stamp in source.inputs]
    return {"inputs": inputs, "checksum": options.checksum, "version": __version__}


def record_with_sums(source: Source, sums: Sums | None) -> SourceRecord:
    """The record of the original, with the checksums of the files of a full checkpoint that were read in full."""
    record = source.record
    if source.checkpoint is None or sums is None:
        return record
    found = {file.name: sums.checksum(file) for file in sums.of}
    return replace(record, files=tuple(replace(file, checksum=found[file.name]) for file in record.files))


def check_unchanged(source: Source, staging: Staging) -> None:
    """Raise MismatchError if a source file has changed since it was opened; then the staging folder is removed."""
    try:
        source.check_unchanged()
    except MismatchError:
        staging.clear()
        raise


def already_staged(out: Path, parts: Iterable[str] = ("",)) -> int:
    """The bytes on the disk that an earlier run has built of these folders of an output.

    Other runs may move or remove files meanwhile.
    """
    paths = (Path(root, name) for part in parts for root, _, names in os.walk(staging_of(out) / part) for name in names)
    total = 0
    for path in paths:
        with contextlib.suppress(FileNotFoundError):
            total += path.lstat().st_blocks * 512
    return total
