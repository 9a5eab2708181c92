"""What a folder is: a full checkpoint, a split one in whatever format, one rank of it, or unfinished output; and
whether it is complete.

It needs no rules for the architecture, and accepts incomplete checkpoints: it says what is missing.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from formats.documents import read_config
from formats.errors import CheckpointError, PlanError, ReshardError, listed
from formats.files.checkpoint import ADAPTER, Checkpoint, has_adapter, open_adapter, open_checkpoint
from formats.files.dcp import is_distributed, read_distributed
from formats.files.foreign import is_adapter, refuse_foreign
from formats.files.safetensors import Header, TensorInfo, parse_header, read_header
from formats.files.sharded import (
    MANIFEST,
    METADATA_KEY,
    FileRecord,
    Identity,
    Manifest,
    ShardedCheckpoint,
    is_sharded,
    open_sharded,
    rank_folders,
    read_manifest,
    read_shard,
)
from formats.mesh import Mesh, mesh_of
from formats.notation.architecture_files import built_in_file
from formats.notation.format import Format
from formats.notation.format_file import format_of
from reshard.storage.marks import SUFFIX, staging_of, unfinished_command
from reshard.storage.parts import parts_of
from reshard.storage.program_source import formats_for, program_files, tensors_in, weights_folder, without_files


@dataclass
class Report:
    """What a path is.

    ``nbytes``: the size of the weight files. ``parameters`` and ``dtypes`` count the elements of the full model; with
    ``counts_ranks`` those of all ranks, because a split checkpoint does not say what the full model was. ``loaded_by``:
    the program whose format it is, ``load``: the command that loads it; ``has_manifest``: whether reshard wrote it. All
    three are None for reshard's own format. ``problems``: why it is not complete, or cannot be what it says it is.
    ``refused``: why split asks for more than the folder, though nothing is missing in it.
    """

    path: Path
    kind: str
    format: str = ""
    model_type: str | None = None
    architecture: str | None = None
    dtypes: dict[str, int] = field(default_factory=dict)
    tensors: int = 0
    counts_ranks: bool = False
    counts_all: bool = False
    """What is counted may be states of training, too: no config.json says what the model's tensors are."""
    any_mesh: bool = False
    """Any mesh loads it; ``mesh`` is the one that it was written on."""
    beside: tuple[str, ...] = ()
    """What is stored beside the model: states of training."""
    nbytes: int = 0
    files: int = 0
    mesh: Mesh | None = None
    rank: int | None = None
    ranks_present: tuple[int, ...] = ()
    ranks_missing: tuple[int, ...] = ()
    padding: dict[str, tuple[int, int]] = field(default_factory=dict)
    source: str | None = None
    commit: str | None = None
    loaded_by: str | None = None
    load: str | None = None
    has_manifest: bool | None = None
    problems: list[str] = field(default_factory=list)
    refused: str | None = None
    hint: str | None = None

    @property
    def parameters(self) -> int:
        """The number of elements."""
        return sum(self.dtypes.values())

    @property
    def complete(self) -> bool:
        """Whether nothing is missing or damaged, as far as headers and sizes tell."""
        return not self.problems


def inspect(path: Path) -> Report:
    """Describe a path. Raises CheckpointError only if it is not a checkpoint at all."""
    if not path.exists():
        staging = staging_of(path)
        unfinished = f"{staging} is there, its unfinished output: inspect that, or run the same command to finish it"
        hint = unfinished if staging.is_dir() else None
        raise CheckpointError(f"{path}: no such file or folder", hint)
    if path.is_file():
        return _file(path)
    command = unfinished_command(path)
    if command is not None:
        return _staging(path, command)
    formats = _formats(path)
    if formats:
        return _program(path, formats)
    if is_sharded(path):
        return _split(path)
    return _adapter(path) if has_adapter(path) else _full(path)


# ----------------------------------------------------------------------------------------------------- full, or a file


def _full(path: Path) -> Report:
    report = Report(path, "full checkpoint")
    _take_config(report, path)
    try:
        checkpoint = open_checkpoint(path)
    except CheckpointError as error:
        if not _has_weights(path):
            raise
        return _damaged(report, error)
    report.files, report.nbytes = len(checkpoint.files), sum(file.size for file in checkpoint.files)
    report.format = "safetensors" if all(file.header for file in checkpoint.files) else "PyTorch .bin"
    _count(report, checkpoint.tensors.values())
    file = checkpoint.files[0]
    if file.header is not None and METADATA_KEY in file.metadata:
        _take_shard(report, parse_header(file.header, file.path, None), file.path)
    if report.rank is None:
        _check_whole(report, checkpoint)
    return report


def _adapter(path: Path) -> Report:
    """The report on a PEFT adapter, which is split by the config of the model that it changes."""
    report = Report(path, "PEFT adapter", "safetensors", files=1, nbytes=(path / ADAPTER).stat().st_size)
    try:
        _count(report, read_header(path / ADAPTER).tensors.values())
    except CheckpointError as error:
        report.problems, report.hint = [error.message], error.hint
        return report
    try:
        _take_type(report, open_adapter(path, None).config)
    except CheckpointError as error:  # nothing is missing in the folder
        report.refused, report.hint = error.message, error.hint
        return report
    _check_whole(report)
    return report


def _has_weights(path: Path) -> bool:
    endings = (".safetensors", ".safetensors.index.json", ".bin", ".bin.index.json")
    return any(file.name.endswith(endings) and not is_adapter(file.name) for file in path.iterdir())


def _damaged(report: Report, error: CheckpointError) -> Report:
    """An incomplete checkpoint: counts what is there."""
    report.problems.append(error.message)
    report.hint = error.hint
    files = sorted(report.path.glob("*.safetensors"))
    report.format = "safetensors" if files or list(report.path.glob("*.safetensors.index.json")) else "PyTorch .bin"
    found = files or sorted(report.path.glob("*.bin"))
    found = [file for file in found if file.is_file()]
    report.files, report.nbytes = len(found), sum(file.stat().st_size for file in found)
    for file in files:
        try:
            _count(report, read_header(file).tensors.values())
        except CheckpointError as other:
            if other.message not in report.problems:
                report.problems.append(other.message)
    return report


def _file(path: Path) -> Report:
    if path.suffix != ".safetensors":
        refuse_foreign(path, [path.name])
        hint = "give the folder that holds config.json and the weights"
        raise CheckpointError(f"{path}: not a folder and no .safetensors file", hint)
    report = Report(path, "one file", "safetensors", files=1, nbytes=path.stat().st_size)
    try:
        header = read_header(path)
    except CheckpointError as error:
        report.problems.append(error.message)
        report.hint = error.hint
        return report
    _count(report, header.tensors.values())
    _take_shard(report, header, path)
    return report


def _take_shard(report: Report, header: Header, file: Path) -> None:
    """Add to the report what a header says about its shard; any other header adds nothing."""
    if METADATA_KEY not in header.metadata:
        return
    try:
        shard = read_shard(header, file)
    except CheckpointError as error:
        report.problems.append(error.message)
        return
    part = "rank" if report.kind == "full checkpoint" else "file"
    report.kind = f"one {part} of a split checkpoint"
    report.rank = shard.rank
    _take_identity(report, shard.identity)


def _take_identity(report: Report, identity: Identity) -> None:
    report.mesh, report.padding = identity.mesh, _padding(identity.padding, identity.sizes)
    report.source = f"fingerprint {identity.source[:16]}"


# ----------------------------------------------------------------------------------------------------------- split


def _padding(padded: Mapping[str, int], sizes: Mapping[str, int]) -> dict[str, tuple[int, int]]:
    return {axis: (sizes[axis], size) for axis, size in padded.items()}


def _split(path: Path) -> Report:
    report = Report(path, "split checkpoint", "safetensors")
    _take_config(report, path)
    try:
        sharded = open_sharded(path)
    except ReshardError as error:
        return _damaged_ranks(report, error)
    files = [file for rank in sharded.ranks for file in rank.files]
    report.files, report.nbytes = len(files), sum(file.size for file in files)
    if sharded.manifest:
        _take_manifest(report, sharded.manifest)
    else:
        _take_identity(report, sharded.identity)
    ranks = {rank.rank: [*rank.tensors.values()] for rank in sharded.ranks}
    _take_ranks(report, ranks)
    _count_full(report, sharded.manifest, ranks)
    _check_whole(report, sharded=sharded)
    return report


def _damaged_ranks(report: Report, error: ReshardError) -> Report:
    """An incomplete split checkpoint: counts what is there."""
    manifest = _manifest_of(report)
    ranks = _from_manifest(report, manifest) if manifest else _from_folders(report)
    _take_ranks(report, ranks)
    _count_full(report, manifest, ranks)
    if report.complete:
        report.problems, report.hint = [error.message], error.hint
    return report


def _manifest_of(report: Report) -> Manifest | None:
    """The manifest of a folder, if it has one that can be read."""
    try:
        return read_manifest(report.path / MANIFEST) if (report.path / MANIFEST).is_file() else None
    except ReshardError as error:
        report.problems.append(error.message)
        report.hint = error.hint
        return None


def _from_manifest(report: Report, manifest: Manifest) -> dict[int, list[TensorInfo]]:
    _take_manifest(report, manifest)
    found: dict[int, list[TensorInfo]] = {}
    for rank, records in manifest.ranks.items():
        problems: list[str] = []
        tensors = _recorded(report, records, problems)
        whole_folder = (report.path / manifest.identity.mesh.folder(rank)).is_dir()
        if whole_folder:
            report.problems += problems
            found[rank] = tensors
    return found


def _take_manifest(report: Report, manifest: Manifest) -> None:
    _take_identity(report, manifest.identity)
    report.source, report.commit = manifest.source.location, manifest.source.commit
    report.architecture = str(manifest.architecture.get("name", "")) or report.architecture


def _recorded(
    report: Report, records: Iterable[FileRecord], problems: list[str], format: Format | None = None
) -> list[TensorInfo]:
    """The tensors in the files of a rank that a manifest lists."""
    tensors: list[TensorInfo] = []
    for record in records:
        file = report.path / record.name
        if not file.is_file():
            problems.append(f"{file} is missing, {MANIFEST} lists it")
        elif file.stat().st_size != record.size:
            problems.append(f"{file} has {file.stat().st_size:,} bytes, {MANIFEST} says {record.size:,}")
        elif file.suffix in {".safetensors", ".pth", ".pt"}:
            tensors += _read(report, file, problems, format)
    return tensors


def _from_folders(report: Report) -> dict[int, list[TensorInfo]]:
    found: dict[int, list[TensorInfo]] = {}
    for folder in rank_folders(report.path):
        tensors: list[TensorInfo] = []
        for file in sorted(folder.glob("*.safetensors")):
            try:
                header = read_header(file)
                shard = read_shard(header, file)
            except CheckpointError as error:
                report.problems.append(error.message)
                continue
            if report.mesh is None:
                _take_identity(report, shard.identity)
            report.files += 1
            report.nbytes += file.stat().st_size
            tensors += header.tensors.values()
            found.setdefault(shard.rank, tensors)
    return found


def _read(report: Report, file: Path, problems: list[str], format: Format | None = None) -> Iterable[TensorInfo]:
    report.files += 1
    report.nbytes += file.stat().st_size
    try:
        return tensors_in(file, format.container.inside if format else None)
    except CheckpointError as error:
        problems.append(error.message)
        return ()


def _take_ranks(report: Report, ranks: Mapping[int, object]) -> None:
    if report.mesh is None:
        return
    report.ranks_present = tuple(sorted(ranks))
    report.ranks_missing = tuple(rank for rank in range(report.mesh.size) if rank not in ranks)
    if report.ranks_missing:
        missing = listed(report.ranks_missing)
        many = len(report.ranks_missing) > 1
        report.problems.append(
            f"rank{'s' if many else ''} {missing} of {report.mesh} {'are' if many else 'is'} missing"
        )
        report.hint = "write them with 'reshard split … --rank R', or bring the folders of all ranks together"


def _count_full(report: Report, manifest: Manifest | None, ranks: Mapping[int, list[TensorInfo]]) -> None:
    """Count the full model's tensors if the manifest keeps the source's headers, otherwise those of the ranks."""
    files = manifest.source.files if manifest else ()
    if files:
        for file in files:
            _count(report, parse_header(file.header, Path(file.name), file.size).tensors.values())
        return
    report.counts_ranks = True
    for tensors in ranks.values():
        _count(report, tensors)
    report.tensors = max((len(tensors) for tensors in ranks.values()), default=0)


def _check_whole(
    report: Report, checkpoint: Checkpoint | None = None, sharded: ShardedCheckpoint | None = None
) -> None:
    """Make the checks that a split or a merge makes before it moves a byte.

    A full ``checkpoint`` or a split one that is open already is not read a second time.
    """
    from reshard.storage.opening import open_source

    try:
        source = open_source(report.path, checkpoint=checkpoint, sharded=sharded)
    except ReshardError as error:
        needs_rules = isinstance(error, PlanError) and report.architecture is None
        report.refused = error.message if needs_rules else None  # nothing is missing, it needs --plan
        report.problems += [] if needs_rules else [error.message]
        report.hint = error.hint
        return
    if report.counts_ranks or source.format is not None:
        report.counts_ranks, report.counts_all, report.tensors = False, False, len(source.model.tensors)
        dtypes: Counter[str] = Counter()
        for kind in source.model.kinds:
            dtypes[kind.dtype] += kind.count * math.prod(kind.shape)
        report.dtypes = dict(dtypes.most_common())
    if source.format is not None:
        format, plan = source.format, source.plan
        report.format, report.loaded_by, report.mesh = format.name, format.loading.program, plan.mesh
        report.any_mesh, report.beside = format.container.boxes, source.left_behind
        report.load = format.loading.command_of(report.path, plan.mesh)
        report.padding = _padding(plan.padding, source.model.sizes.of({}))


# ---------------------------------------------------------------------------------------- the format of another program


def _formats(path: Path) -> list[Format]:
    """The formats of other programs that a folder may have: by the manifest, else by the names of its files."""
    if not (path / MANIFEST).is_file():
        return [] if is_sharded(path) else formats_for(path)
    try:
        form = read_manifest(path / MANIFEST).form
        return [format_of(form)] if form is not None else []
    except ReshardError:
        return formats_for(path)


def _program(path: Path, formats: Sequence[Format]) -> Report:
    report = Report(path, "split checkpoint", " or ".join(format.name for format in formats))
    report.loaded_by, report.has_manifest = (
        " or ".join(format.loading.program for format in formats),
        (path / MANIFEST).is_file(),
    )
    _take_config(report, path)
    manifest = _manifest_of(report)
    if not any(program_files(format, path) for format in formats):
        lacking = without_files(formats[0], path)
        report.problems, report.hint = [*report.problems, lacking.message], lacking.hint
        return report
    if any(format.files.is_distributed for format in formats):
        return _distributed(report, manifest, formats)
    ranks = _from_records(report, manifest) if manifest else _from_names(report, formats[0])
    _take_ranks(report, ranks)
    if report.ranks_missing:
        report.hint = "bring the files of all ranks together, or write them again"
    _count_full(report, manifest, ranks)
    if report.complete:
        _check_whole(report)
    return report


def _distributed(report: Report, manifest: Manifest | None, formats: Sequence[Format]) -> Report:
    """A distributed checkpoint of torch's, which needs no mesh: .metadata says what there is, training states too."""
    folder = next((at for format in formats if is_distributed(at := weights_folder(format, report.path))), report.path)
    if len(formats) > 1:
        report.format, report.loaded_by = "a distributed checkpoint of PyTorch", "torch.distributed.checkpoint"
    if manifest is not None:
        _take_manifest(report, manifest)
    try:
        found = read_distributed(folder)
    except ReshardError as error:
        report.problems.append(error.message)
        report.hint = error.hint
        files = [file for file in folder.glob("*.distcp") if file.is_file()]
        report.files, report.nbytes = len(files), sum(file.stat().st_size for file in files)
        return report
    report.files, report.nbytes = len(found.files), sum(found.files.values())
    _count(report, (TensorInfo(of.name, of.dtype, of.shape, report.path, 0, 0) for of in found.tensors.values()))
    report.counts_all, report.any_mesh = True, True
    if not (report.path / "config.json").is_file():
        report.refused = "no config.json is there, which split and merge need"
        report.hint = "give them a folder that has the model's config.json, and its tokenizer, with --config DIR"
    else:
        _check_whole(report)
    return report


def _from_records(report: Report, manifest: Manifest) -> dict[int, list[TensorInfo]]:
    """The tensors of the ranks of which any file is there."""
    _take_manifest(report, manifest)
    found: dict[int, list[TensorInfo]] = {}
    for rank, records in manifest.ranks.items():
        problems: list[str] = []
        tensors = _recorded(report, records, problems, format_of(manifest.form) if manifest.form else None)
        if any((report.path / record.name).is_file() for record in records):
            found[rank] = tensors
            report.problems += problems
    return found


def _from_names(report: Report, format: Format) -> dict[int, list[TensorInfo]]:
    """The same without a manifest: the names of the files say how many ranks there are, and which parts of each."""
    found: dict[int, list[TensorInfo]] = {}
    files = program_files(format, report.path)
    for file in files:
        problems: list[str] = []
        found.setdefault(file.rank, []).extend(_read(report, file.path, problems, format))
        report.problems += problems
    count, stages = max(file.ranks or file.rank + 1 for file in files), 1 + max(file.stage for file in files)
    report.mesh = files[0].mesh or mesh_of(-(-count // stages), pp=stages)
    for rank in found if "{part}" in format.files.name else ():
        there = {file.path.name for file in files if file.rank == rank}
        names = (format.files.name_of(report.mesh, rank, part) for part in range(len(there)))
        report.problems += [f"{report.path / name} is missing" for name in names if name not in there]
    return found


# --------------------------------------------------------------------------------------------------------- staging


def _staging(path: Path, command: str) -> Report:
    """The report on a folder in which a command builds an output."""
    report = Report(path, f"unfinished output of {command}", "safetensors")
    _take_config(report, path)
    finished = [file for file in path.rglob("*.safetensors") if file.is_file()]
    begun = [file for file in path.rglob("*.incomplete") if file.is_file()]
    report.files, report.nbytes = len(finished), sum(file.stat().st_size for file in finished)
    out = path.with_name(path.name.removesuffix(SUFFIX))
    report.problems.append(f"it is not finished: {len(finished)} weight files are written, {len(begun)} are begun")
    for part in parts_of(path):
        if part.running or not part.files or part.finished < part.files:
            written = f"{part.finished} of {part.files} files are written" if part.files else "no file is written"
            report.problems.append(f"{part.part}: {written}, {'it is' if part.running else 'nobody is'} at work")
    report.hint = f"'reshard {command}' to {out} is running or was stopped; the same command goes on where it stopped"
    return report


# --------------------------------------------------------------------------------------------------------- common


def _take_config(report: Report, folder: Path) -> None:
    try:
        config = read_config(folder / "config.json")
    except CheckpointError:  # whoever opens the checkpoint says so
        config = {}
    _take_type(report, config)


def _take_type(report: Report, config: Mapping[str, Any]) -> None:
    model_type = config.get("model_type")
    report.model_type = model_type if isinstance(model_type, str) else None
    known = built_in_file(config)
    report.architecture = known.stem if known else None


def _count(report: Report, tensors: Iterable[TensorInfo]) -> None:
    dtypes: Counter[str] = Counter(report.dtypes)
    for tensor in tensors:
        dtypes[tensor.dtype] += math.prod(tensor.shape)
        report.tensors += 1
    report.dtypes = dict(dtypes.most_common())
