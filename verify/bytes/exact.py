"""Compares shards with their original, byte for byte.

The proof reads files and plans, and does not use the engine that wrote them. The original gives a plan for the shards'
mesh, which says what each rank must hold. The original is then read once, in chunks. Each chunk is compared with the
ranks' parts of it, as bytes, so that NaN payloads and the sign of zero count. Memory does not grow with the model.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from reshard.formats.errors import IncompleteError, PlanError, ReshardError
from reshard.formats.notation.format_file import OWN
from reshard.formats.store import FilePath
from reshard.mesh.plan import Plan, make_plan
from reshard.model.naming import LoraError, spelled_alike
from reshard.placement.arrangement import arrangement_of
from reshard.source.folder import Folder
from reshard.source.opening import open_source
from reshard.source.recognition import recognise
from reshard.source.source import Source
from reshard.verify.bytes import folder
from reshard.verify.bytes.comparison import ByteProgress, Comparison, no_progress
from reshard.verify.bytes.exact_report import ExactReport
from reshard.verify.bytes.reading import Files
from reshard.verify.bytes.structure import Structure


def verify_exact(
    original: Source, path: FilePath, *, plan_file: Path | None = None, progress: ByteProgress = no_progress
) -> ExactReport:
    """Compare a folder of shards with their original; the report is ``different`` for inconsistent shards too.

    Raises ReshardError if there is nothing to compare: the folder is not a checkpoint, or cannot be read.
    """
    shards = open_shards(path, original, plan_file=plan_file)
    return shards if isinstance(shards, ExactReport) else compare(original, shards, progress)


def open_shards(path: FilePath, original: Source, *, plan_file: Path | None = None) -> Source | ExactReport:
    """Open shards; if they are inconsistent, return a report with the reason instead.

    A folder that another program wrote is opened as shards of ``original``, whatever model it holds. Raises
    ReshardError if the folder has no shards, or cannot be read.
    """
    try:
        return _spelled_as(original, open_source(path, plan_file=plan_file, model=original.model))
    except ReshardError as error:
        if (
            _is_unreadable(error)
            or isinstance(error, LoraError)
            or recognise(Folder(path)).kind not in {"split", "program"}
        ):
            raise
        text = f"{error.message} ({error.hint})" if error.hint else error.message
        return ExactReport("unknown", 0, 0, 0, problems=(text,))


def compare(
    original: Source, shards: Source, progress: ByteProgress = no_progress, *, workers: int | None = None
) -> ExactReport:
    """Compare every byte of every shard with the byte of the original that it should be.

    ``shards`` may also be a full checkpoint (a merged one), ``original`` must be one. Raises CheckpointError if a file
    cannot be read.
    """
    structure = structure_of(original, shards)
    return structure if isinstance(structure, ExactReport) else compare_bytes(structure, progress, workers)


def structure_of(original: Source, shards: Source) -> Structure | ExactReport:
    """Compare all but the bytes of tensors; a report with the reason if the shards contradict themselves.

    Raises CheckpointError if a file cannot be read.
    """
    try:
        arrangement = shards.arrangement
        if shards.format.plain:
            arrangement = arrangement_of(_planned(original, shards), OWN, twice=shards.twice)
        structure = Structure(original, shards, arrangement)
        structure.check()
    except ReshardError as error:
        return _report_of(error, shards)
    return structure


def compare_bytes(
    structure: Structure, progress: ByteProgress = no_progress, workers: int | None = None
) -> ExactReport:
    """Compare the bytes too. Raises CheckpointError if a file cannot be read."""
    original, shards = structure.original, structure.shards
    try:
        sums = folder.begun_sums(original, shards)
        files = Files(original, shards, sums=sums)
        comparison = Comparison(original, shards, structure.arrangement, structure.comparable, progress, files)
    except ReshardError as error:
        return _report_of(error, shards)
    report = comparison.run(workers or files.workers)
    structure.problems += folder.wrong_checksums(original, shards, sums, comparison.damaged, files)
    mesh, ranks = ("of no stated mesh", None) if structure.of_any_mesh else (report.mesh, report.ranks)
    return replace(
        report,
        mesh=mesh,
        ranks=ranks,
        format=None if shards.format.plain else shards.format.name,
        is_listed=shards.other_files is not None,
        cast=original.cast.dtype if original.cast is not None else None,
        **structure.differences,
    )


def _report_of(error: ReshardError, shards: Source) -> ExactReport:
    """The report on shards that contradict themselves. Raises the error, if it is of a file that cannot be read."""
    if _is_unreadable(error):
        raise error
    return ExactReport(str(shards.plan.mesh), len(shards.ranks), 0, 0, problems=(error.message,))


def _is_unreadable(error: ReshardError) -> bool:
    """Whether a file is missing or cannot be read: that says nothing about its content."""
    return isinstance(error, IncompleteError) or isinstance(error.__context__, OSError)


def _spelled_as(original: Source, shards: Source) -> Source:
    """Plain shards with their tensors by the original's names, if they spell them differently."""
    names = spelled_alike(original.model, shards.model) if shards.format.plain else {}
    if not names:
        return shards

    def spelled(name: str) -> str:
        return names.get(name, name)

    plan = shards.plan
    model = replace(plan.model, tensors=tuple(t._replace(name=spelled(t.name)) for t in plan.model.tensors))
    ranks = tuple({spelled(name): info for name, info in infos.items()} for infos in shards.ranks)
    twice = {spelled(second): spelled(first) for second, first in shards.twice.items()}
    return replace(shards, plan=replace(plan, model=model), model=model, ranks=ranks, twice=twice)


def _planned(original: Source, shards: Source) -> Plan:
    """The plan of the original on the shards' mesh; only mesh and padding come from the shards."""
    sizes, padding = original.model.sizes.of({}), shards.plan.padding
    for axis, padded in padding.items():
        if axis not in original.model.architecture.pad or padded < sizes.get(axis, 0):
            raise PlanError(f"{shards.path}: the axis '{axis}' of size {sizes.get(axis)} cannot be padded to {padded}")
    return make_plan(original.model, shards.plan.mesh, padding=padding)
