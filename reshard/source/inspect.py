"""What a folder is: a full checkpoint, a split one in whatever format, one rank of it, or unfinished output; and
whether it is complete.

It needs no rules for the architecture, and accepts incomplete checkpoints: it says what is missing.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from formats.documents import read_config
from formats.errors import CheckpointError, PlanError, ReshardError, listed
from formats.files.checkpoint import DELTA, is_adapter, open_adapter, refuse_foreign
from formats.files.safetensors import Header, TensorInfo, parse_header, read_header
from formats.files.sharded import (
    MANIFEST,
    METADATA_KEY,
    Identity,
    rank_folders,
    read_shard,
)
from formats.files.training import find_training, read_training
from formats.mesh import Mesh, mesh_of
from formats.notation.architecture_files import built_in_file
from formats.notation.format import Format
from formats.store import FilePath, glob
from reshard.publishing.journal import unfinished_command, unfinished_parts
from reshard.source.opening import Kind, Recognised, open_source, recognise
from reshard.source.program_files import left_behind, program_files, readings, tensors_in, weights_folder
from reshard.source.source import Source
from reshard.store.staging_names import SUFFIX, staging_of
from reshard.text import Result, human_bytes, plural


@dataclass(repr=False)
class Report(Result):
    """What a path is.

    ``nbytes``: the size of the weight files. ``parameters`` and ``dtypes`` count the elements of the full model; with
    ``counts_ranks`` those of all ranks, because a split checkpoint does not say what the full model was. ``loaded_by``:
    the program whose format it is, ``load``: the command that loads it; ``has_manifest``: whether reshard wrote it. All
    three are None for reshard's own format. ``problems``: why it is not complete, or is not what it claims to be.
    ``refused``: why split would refuse the folder, though nothing is missing in it.
    """

    path: FilePath
    kind: str
    format: str = ""
    model_type: str | None = None
    architecture: str | None = None
    dtypes: dict[str, int] = field(default_factory=dict)
    tensors: int = 0
    counts_ranks: bool = False
    counts_all: bool = False
    """Training states may be counted too: no config.json says which tensors are the model's."""
    any_mesh: bool = False
    """Any mesh loads it; ``mesh`` is the one that it was written on."""
    beside: tuple[str, ...] = ()
    """What is stored besides the model: training states."""
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

    @property
    def headline(self) -> str:
        """What it is, its format and mesh, and whether it is complete."""
        words = (self.kind, self.format, self.model_type, str(self.mesh or ""))
        state = "complete" if self.complete else "not complete"
        return f"{self.path}: {', '.join(filter(None, (*words, state)))}"

    def to_text(self, width: int | None = None) -> str:
        """The path, and a line for each thing that is known of it."""
        return "\n".join([str(self.path), *(f"  {label:<11} {text}" for label, text in _pairs(self))])


def inspect(path: FilePath) -> Report:
    """Describe a path. Raises CheckpointError only if it is not a checkpoint at all."""
    if isinstance(path, Path):
        if not path.exists():
            staging = staging_of(path)
            unfinished = (
                f"{staging} is there, its unfinished output: inspect that, or run the same command to finish it"
            )
            raise CheckpointError(f"{path}: no such file or folder", unfinished if staging.is_dir() else None)
        if path.is_file():
            return _file(path)
        command = unfinished_command(path)
        if command is not None:
            return _staging(path, command)
    recognised = recognise(path)
    report = Report(path, _KINDS[recognised.kind], "safetensors")
    _take_config(report, path)
    if recognised.formats:
        report.format = " or ".join(format.name for format in recognised.formats)
        report.loaded_by = " or ".join(dict.fromkeys(format.loading.program for format in recognised.formats))
        report.has_manifest = (path / MANIFEST).is_file()
    if recognised.manifest is not None:
        _take_identity(report, recognised.manifest.identity)
        report.source, report.commit = recognised.manifest.source.location, recognised.manifest.source.commit
        report.architecture = str(recognised.manifest.architecture.get("name", "")) or report.architecture
    try:
        source = open_source(path, match=recognised)
    except ReshardError as error:
        _take_what_is_there(report, recognised, error)
    else:
        _take_source(report, source)
    return report


_KINDS: Mapping[Kind, str] = {
    "full": "full checkpoint",
    "adapter": "PEFT adapter",
    "split": "split checkpoint",
    "program": "split checkpoint",
}


# ----------------------------------------------------------------------------------------------- what can be opened


def _take_source(report: Report, source: Source) -> None:
    """Add to the report what is said of a checkpoint that is complete."""
    sizes = [file.size for file in source.files.values()]
    if source.training is not None:  # what a program saves beside tensors counts, too
        sizes = [*source.training.saved.files.values()]
    report.files, report.nbytes = len(sizes), sum(sizes)
    recorded = source.manifest.source.files if source.manifest is not None and source.format.plain else ()
    if source.checkpoint is not None:
        report.format = "safetensors" if all(file.header for file in source.checkpoint.files) else "PyTorch .bin"
        _take_type(report, source.checkpoint.config)
        _count(report, source.checkpoint.tensors.values())
        return
    if recorded:
        for file in recorded:
            _count(report, parse_header(file.header, Path(file.name), file.size).tensors.values())
    else:
        report.tensors = len(source.model.tensors)
        dtypes: Counter[str] = Counter()
        for kind in source.model.kinds:
            dtypes[kind.dtype] += kind.count * math.prod(kind.shape)
        report.dtypes = dict(dtypes.most_common())
    plan = source.plan
    report.mesh, report.padding = plan.mesh, _padding(plan.padding, source.model.sizes.of({}))
    if source.stated is not None and source.manifest is None:
        _take_identity(report, source.stated)
    if source.training is None:
        report.ranks_present = tuple(range(len(source.ranks)))
    if not source.format.plain:
        report.format, report.loaded_by = source.format.name, source.format.loading.program
        report.any_mesh, report.beside = source.format.container.chunks, source.left_behind
        report.load = source.format.loading.command_of(report.path, plan.mesh)
    if source.training is not None:
        _take_trainer(report, source.training.saved.what)


# -------------------------------------------------------------------------------------------- what cannot be opened


def _take_what_is_there(report: Report, recognised: Recognised, error: ReshardError) -> None:
    """Add to the report what is there of a checkpoint that cannot be opened, and why it cannot.

    Raises ``error`` if there is no checkpoint at all.
    """
    if recognised.damage is not None:
        report.problems.append(recognised.damage.message)
    program = recognised.kind == "program"
    there = recognised.manifest is not None
    if any(
        format.files.is_distributed and (there or program_files(format, report.path)) for format in recognised.formats
    ):
        _take_distributed(report, recognised.formats, error)
    elif program or recognised.kind == "split":
        _take_ranks(report, _files_of_ranks(report, recognised), recognised)
    else:
        _take_full(report, error)
    if program and report.complete and report.files and not (report.path / "config.json").is_file():
        report.refused = "no config.json is there, which split and merge need"
        report.hint = "give them a folder that has the model's config.json, and its tokenizer, with --config DIR"
    if report.rank is None and report.complete and report.refused is None:
        if isinstance(error, PlanError) and report.architecture is None:
            report.refused = error.message  # nothing is missing, it needs --plan
        else:
            report.problems.append(error.message)
    report.hint = report.hint or (error.hint if report.rank is None else None)


def _take_full(report: Report, error: ReshardError) -> None:
    """Add what is there of a full checkpoint, or of an adapter."""
    files = glob(report.path, "*.safetensors") or glob(report.path, "*.bin") if report.path.is_dir() else []
    files = [file for file in files if report.kind == _KINDS["adapter"] or not is_adapter(file.name)]
    index = glob(report.path, "*.index.json") if report.path.is_dir() else []
    if (not files and not index) or (report.path / DELTA).is_file():
        raise error
    if any(file.name.endswith((".bin", ".bin.index.json")) for file in (*files, *index)):
        report.format = "PyTorch .bin"
    problems = _read(report, files)[1]
    if problems and report.rank is None:
        report.problems += dict.fromkeys([error.message, *problems])
    elif report.kind == _KINDS["adapter"]:
        try:
            _take_type(report, open_adapter(report.path, None).config)
        except CheckpointError as lacking:  # nothing is missing in the folder
            report.refused = lacking.message


def _take_distributed(report: Report, formats: Sequence[Format], why: ReshardError) -> None:
    """A distributed checkpoint of torch's, which needs no mesh: .metadata says what there is, training states too."""
    folder = next((at for format in formats if find_training(at := weights_folder(format, report.path))), report.path)
    matching = [format for format in formats if any((folder / name).is_file() for name in format.container.documents)]
    if matching:
        report.format = " or ".join(format.name for format in matching)
        report.loaded_by = " or ".join(dict.fromkeys(format.loading.program for format in matching))
    elif len(formats) > 1:
        report.format, report.loaded_by = "a distributed checkpoint of PyTorch", "torch.distributed.checkpoint"
    try:
        checkpoint = read_training(folder)
    except ReshardError:
        report.problems.append(why.message)
        training = find_training(folder)
        place = training.file.parent if training else folder
        files = [file for ends in ("distcp", "pt", "bin") for file in glob(place, f"*.{ends}") if file.is_file()]
        _take_trainer(report, training.what if training else None)
        report.files, report.nbytes = len(files), sum(file.stat().st_size for file in files)
        return
    report.files, report.nbytes = len(checkpoint.files), sum(checkpoint.files.values())
    _count(report, (TensorInfo(t.name, t.dtype, t.shape, report.path, 0, 0) for t in checkpoint.tensors.values()))
    report.counts_all, report.any_mesh = True, True
    _take_trainer(report, checkpoint.what)


def _take_trainer(report: Report, what: str | None) -> None:
    """What a training program saved in a form of its own; nothing else loads it."""
    if what is not None:
        report.kind, report.format = "training checkpoint", what
        report.loaded_by = report.load = report.has_manifest = None


Files = Mapping[int, Sequence[FilePath]]
"""The files that are there of each rank of which any is."""


def _files_of_ranks(report: Report, recognised: Recognised) -> Files:
    """The files that a manifest lists, those in the folders of ranks, or those that are named as a format says."""
    path, files = report.path, defaultdict[int, list[FilePath]](list)
    if recognised.manifest is not None:
        for rank, records in recognised.manifest.ranks.items():
            weights = (
                path / record.name for record in records if record.name.endswith((".safetensors", ".pth", ".pt"))
            )
            there = [file for file in weights if file.is_file()]
            files |= {rank: there} if there else {}
    elif recognised.kind == "split":
        for file in (file for folder in rank_folders(path) for file in glob(folder, "*.safetensors")):
            with suppress(CheckpointError):  # whoever opens it says so
                shard = read_shard(read_header(file).metadata, file)
                files[shard.rank].append(file)
                if report.mesh is None:
                    _take_identity(report, shard.identity)
    elif ways := readings(recognised.formats[0], path):
        of_stages = [way for way in ways if way[0].mesh is not None and "ep" not in dict(way[0].mesh.degrees)]
        with suppress(CheckpointError):  # mp_rank_00_001 may be a stage, or a rank of experts
            infos = tensors_in(ways[0][0].path, recognised.formats[0].container.inside)
            ways = ways if any(".experts." in info.name for info in infos) else of_stages or ways
        for program_file in ways[0]:
            files[program_file.rank].append(program_file.path)
        report.beside = tuple(left_behind(ways[0]))
        count, stages = (
            1 + max(numbers) for numbers in zip(*((entry.rank, entry.stage) for entry in ways[0]), strict=True)
        )
        count = max([count, *(entry.ranks or 0 for entry in ways[0])])
        report.mesh = ways[0][0].mesh or mesh_of(-(-count // stages), pp=stages)
    return files


def _read(report: Report, files: Iterable[FilePath], inside: str | None = None) -> tuple[list[TensorInfo], list[str]]:
    """The tensors in files, and what is wrong with some of them; a header may say that they are of a rank."""
    tensors, problems = list[TensorInfo](), list[str]()
    for file in (file for file in files if file.is_file()):
        report.files += 1
        report.nbytes += file.stat().st_size
        try:
            tensors += tensors_in(file, inside)
            if file.suffix == ".safetensors" and report.kind == _KINDS["full"]:
                _take_shard(report, read_header(file), file)
        except CheckpointError as error:
            problems.append(error.message)
    _count(report, tensors)
    return tensors, problems


def _take_ranks(report: Report, files: Files, recognised: Recognised) -> None:
    """Add which ranks are there, and count the full model's tensors if a manifest has them, else those of the ranks."""
    manifest, program = recognised.manifest, recognised.kind == "program"
    inside = recognised.formats[0].container.inside if program else None
    largest = max((len(_read(report, entry, inside)[0]) for entry in files.values()), default=0)
    if report.mesh is not None:
        report.ranks_present = tuple(sorted(files))
        report.ranks_missing = tuple(rank for rank in range(report.mesh.size) if rank not in files)
    if report.ranks_missing:
        missing, many = listed(report.ranks_missing), len(report.ranks_missing) > 1
        report.problems.append(
            f"rank{'s' if many else ''} {missing} of {report.mesh} {'are' if many else 'is'} missing"
        )
        how = "write them again" if program else "write them with 'reshard split … --rank R'"
        report.hint = f"bring the files of all ranks together, or {how}"
    report.counts_ranks, report.tensors = not (manifest and manifest.source.files), largest
    if manifest is not None and manifest.source.files:
        report.dtypes, report.tensors = {}, 0
        for file in manifest.source.files:
            _count(report, file.tensors.values())


# ------------------------------------------------------------------------------------------ a file, unfinished output


def _file(path: FilePath) -> Report:
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


def _take_shard(report: Report, header: Header, file: FilePath) -> None:
    """Add to the report what a header says about its shard; any other header adds nothing."""
    if METADATA_KEY not in header.metadata:
        return
    try:
        shard = read_shard(header.metadata, file)
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


def _staging(path: Path, command: str) -> Report:
    """The report on a folder in which a command builds an output."""
    report = Report(path, f"unfinished output of {command}", "safetensors")
    _take_config(report, path)
    finished = [file for file in path.rglob("*.safetensors") if file.is_file()]
    begun = [file for file in path.rglob("*.incomplete") if file.is_file()]
    report.files, report.nbytes = len(finished), sum(file.stat().st_size for file in finished)
    out = path.with_name(path.name.removesuffix(SUFFIX))
    report.problems.append(f"it is not finished; weight files: {len(finished)} written, {len(begun)} begun")
    report.problems += unfinished_parts(path)
    report.hint = f"'reshard {command}' to {out} is running or was stopped; the same command writes what is missing"
    return report


# --------------------------------------------------------------------------------------------------------- common


def _padding(padded: Mapping[str, int], sizes: Mapping[str, int]) -> dict[str, tuple[int, int]]:
    return {axis: (sizes[axis], size) for axis, size in padded.items()}


def _take_config(report: Report, folder: FilePath) -> None:
    try:
        config = read_config(folder / "config.json")
    except CheckpointError:  # whoever opens the checkpoint says so
        config = {}
    _take_type(report, config)


def _take_type(report: Report, config: Mapping[str, Any]) -> None:
    model_type = config.get("model_type")
    report.model_type = model_type if isinstance(model_type, str) else None
    rules_file = built_in_file(config)
    report.architecture = rules_file.stem if rules_file else None


def _count(report: Report, tensors: Iterable[TensorInfo]) -> None:
    dtypes: Counter[str] = Counter(report.dtypes)
    for tensor in tensors:
        dtypes[tensor.dtype] += math.prod(tensor.shape)
        report.tensors += 1
    report.dtypes = dict(dtypes.most_common())


# ------------------------------------------------------------------------------------------------------------ the text


def _pairs(report: Report) -> list[tuple[str, str]]:
    pairs = [("what", report.kind), ("format", report.format)]
    if report.loaded_by is not None:
        pairs.append(("loaded by", report.loaded_by))
        pairs.append(("written by", "reshard" if report.has_manifest else "not known (there is no reshard.json)"))
    if report.model_type is not None or report.kind == "full checkpoint":
        rules = f"rules: {report.architecture}" if report.architecture else "no rules for it: see 'reshard plan --help'"
        pairs.append(("model type", f"{report.model_type or 'unknown'} ({rules})"))
    if report.mesh is not None or report.any_mesh:
        rank = f", rank {report.rank}" if report.rank is not None else ""
        pairs.append(("mesh", "any: its files have chunks" if report.any_mesh else f"{report.mesh}{rank}"))
    if report.ranks_missing:
        pairs.append(("ranks here", listed(report.ranks_present) or "none"))
        pairs.append(("missing", listed(report.ranks_missing)))
    if report.dtypes:
        of_ranks = " (all ranks here together)" if report.counts_ranks else ""
        of_ranks = " (all that is stored, states of training too)" if report.counts_all else of_ranks
        kinds = ", ".join(f"{dtype} {count:,}" for dtype, count in report.dtypes.items())
        pairs += [
            ("parameters", f"{report.parameters:,}{of_ranks}"),
            ("dtypes", kinds),
            ("tensors", f"{report.tensors:,}"),
        ]
    if report.beside:
        pairs.append(("beside", f"{listed(report.beside, 5)}: not of the model, and not counted"))
    if report.load is not None:
        pairs.append(("load it", report.load))
    size = f"{human_bytes(report.nbytes)} ({report.nbytes:,} bytes) in {plural(report.files, 'file')}"
    pairs.append(("weights", size))
    pairs += [("padding", f"{axis} {full:,} -> {padded:,}") for axis, (full, padded) in report.padding.items()]
    if report.source:
        pairs.append(("source", report.source + (f" at {report.commit}" if report.commit else "")))
    pairs.append(("complete", "yes" if report.complete else "no"))
    pairs += [("problem", problem) for problem in report.problems]
    pairs += [("refused", report.refused)] if report.refused else []
    if report.hint and (report.refused or not report.complete):
        pairs.append(("hint", report.hint))
    return pairs
