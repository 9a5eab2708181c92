"""A description of a folder: a full checkpoint, a split one in whatever format, one rank of it, or unfinished output;
and whether it is complete.

It needs no rules for the architecture, and accepts incomplete checkpoints: it says what is missing.
"""

from __future__ import annotations

import math
import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from reshard.formats.documents import read_config
from reshard.formats.errors import CheckpointError, PlanError, ReshardError, listed, one_line
from reshard.formats.files.checkpoint import (
    CONFIG,
    DELTA,
    Checkpoint,
    is_adapter,
    open_adapter,
    open_checkpoint,
    refuse_foreign,
)
from reshard.formats.files.chunks import Sharded
from reshard.formats.files.containers import BIN, SAFETENSORS
from reshard.formats.files.manifest import MANIFEST, METADATA_KEY, Identity, read_shard
from reshard.formats.files.safetensors import Header, TensorInfo, read_header
from reshard.formats.files.training import find_training, read_training
from reshard.formats.mesh import Mesh, mesh_of
from reshard.formats.notation.architecture_files import built_in_file
from reshard.formats.notation.format import Format
from reshard.formats.notation.format_file import OWN
from reshard.formats.store import FilePath, StoredPath, glob
from reshard.model.model import Kind
from reshard.model.naming import LoraError
from reshard.publishing.journal import unfinished_command, unfinished_parts
from reshard.source.access import Place
from reshard.source.folder import Folder
from reshard.source.lora import find_lora, open_alone, open_base
from reshard.source.lora_side import LoraRun
from reshard.source.opening import find, open_folder
from reshard.source.program_files import readings, weights_folder
from reshard.source.recognition import recognise
from reshard.source.source import Source
from reshard.store.selection import HubAccess, Weights
from reshard.store.staging_names import SUFFIX, staging_of
from reshard.text import Result, human_bytes, plural


@dataclass(repr=False)
class Report(Result):
    """A description of a path. True if it is a complete checkpoint."""

    path: FilePath
    kind: str
    """A full, split or training checkpoint, an adapter, a file, or unfinished output."""
    format: str = ""
    model_type: str | None = None
    architecture: str | None = None
    dtypes: dict[str, int] = field(default_factory=dict)
    """Elements of each dtype; empty for shards that cannot be opened and have no manifest."""
    tensors: int = 0
    parameters_are_of: str = "model"
    """``model``, or ``everything``: then training states count, too."""
    any_mesh: bool = False
    """Whether any mesh loads it; ``mesh`` is the one on which it was written."""
    beside: tuple[str, ...] = ()
    """Training states, and files that are not read with it."""
    without: tuple[str, ...] = ()
    """The towers of the model type, if it is a language model alone."""
    lora: str | None = None
    """A sentence on the LoRA adapter in a training run."""
    holds: tuple[str, ...] = ()
    """Prefixes of names, if the model is not known."""
    nbytes: int = 0
    """The bytes of the weight files."""
    files: int = 0
    mesh: Mesh | None = None
    rank: int | None = None
    ranks_present: tuple[int, ...] = ()
    ranks_missing: tuple[int, ...] = ()
    padding: dict[str, tuple[int, int]] = field(default_factory=dict)
    """The size before and after, for each padded axis."""
    source: str | None = None
    commit: str | None = None
    loaded_by: str | None = None
    """The program whose format it is; None for reshard's own."""
    load: str | None = None
    has_manifest: bool | None = None
    """True if reshard wrote it."""
    problems: list[str] = field(default_factory=list)
    """Reasons why it is not complete, or not what it claims to be."""
    refused: str | None = None
    """The reason why split would refuse it, though nothing is missing."""
    hint: str | None = None
    """Advice on a problem or a refusal."""

    @property
    def parameters(self) -> int:
        """The number of elements."""
        return sum(self.dtypes.values())

    @property
    def complete(self) -> bool:
        """Whether nothing is missing or damaged, as far as headers and sizes tell."""
        return not self.problems

    def __bool__(self) -> bool:
        return self.complete

    @property
    def headline(self) -> str:
        """One line: its kind, format and mesh, and whether it is complete."""
        words = (self.kind, self.format, self.model_type, str(self.mesh or ""))
        state = "complete" if self.complete else "not complete"
        return f"{self.path}: {', '.join(filter(None, (*words, state)))}"

    def to_text(self, width: int | None = None) -> str:
        """The path, and a line for each thing that is known of it."""
        return "\n".join([str(self.path), *(f"  {label:<11} {one_line(text)}" for label, text in _pairs(self))])


@dataclass(frozen=True)
class InspectRequest(HubAccess):
    """Arguments of ``inspect``.

    ``source``: a folder, a file, a Hub id, a URL, or what ``reshard.state_dict`` gave.
    """

    source: Place = field(repr=False)  # a URL may have a password


def inspect(request: InspectRequest) -> Report:
    """Describe a path: format, model type, dtypes, parameters, mesh, complete or not. Reads headers only.

    Raises ReshardError if it is not a checkpoint at all.
    """
    path: FilePath = request.source if isinstance(request.source, StoredPath) else Path(request.source)
    if isinstance(path, Path) and (
        request.revision or not request.source or not any(map(os.path.exists, (path, staging_of(path))))
    ):
        path = find(request.source, request, Weights.HEADERS)
    if isinstance(path, Path):
        if not path.exists():
            hint = f"{staging_of(path)} is its unfinished output: inspect that, or run the same command to finish it"
            raise CheckpointError(f"{path}: no such file or folder", hint)
        if path.is_file():
            return _file(path)
        command = unfinished_command(path)
        if command is not None:
            return _staging(path, command)
    folder = recognise(Folder(path))
    kinds = {"full": "full checkpoint", "adapter": "PEFT adapter"}
    report = Report(path, kinds.get(folder.kind, "split checkpoint"), "safetensors")
    _take_config(report, path)
    if folder.formats:
        _take_formats(report, folder.formats)
        report.has_manifest = (path / MANIFEST).is_file()
    if folder.manifest is not None:
        _take_identity(report, folder.manifest.identity)
        report.source, report.commit = folder.manifest.source.location, folder.manifest.source.commit
        report.architecture = str(folder.manifest.architecture.get("name", "")) or report.architecture
        for file in folder.manifest.source.files:
            _count(report, file.tensors.values())
    run: LoraRun | None = None
    try:
        try:
            source = open_folder(folder)
        except LoraError:
            run = find_lora(folder)
            if run is None:
                raise
            source = open_base(folder, run) if run.has_base else open_alone(folder, run)
    except ReshardError as error:
        _take_what_is_there(report, folder, error)
        with suppress(ReshardError):
            run = run or (find_lora(folder) if folder.manifest is None and folder.kind != "adapter" else None)
    else:
        _take_source(report, source)
    if run is not None:
        _take_lora(report, run)
    return report


def _take_lora(report: Report, run: LoraRun) -> None:
    """Report a LoRA adapter among the weights, and the reason why it cannot be merged into them."""
    report.kind = f"{report.kind} with a LoRA adapter" if run.has_base else "LoRA adapter of a training run"
    report.lora = run.text
    if not run.has_base and report.problems == [f"{report.path / CONFIG}: missing"]:  # it needs that of its base
        report.problems.clear()
    try:
        run.check_one()
        run.check_base()
        run.check_alpha()
    except CheckpointError as error:
        if not report.problems and (report.refused is None or not run.has_base):
            report.refused, report.hint = error.message, error.hint


# ----------------------------------------------------------------------------------------------- what can be opened


def _take_source(report: Report, source: Source) -> None:
    """Report a complete checkpoint."""
    plan, training, checkpoint = source.plan, source.training, source.checkpoint
    report.without = source.without
    # what a program saves beside tensors counts, too
    sizes = training.saved.files.values() if training is not None else [file.size for file in source.files.values()]
    report.files, report.nbytes = len(sizes), sum(sizes)
    report.beside = (*source.left_behind, *source.strays)
    if checkpoint is not None:
        _take_checkpoint(report, checkpoint)
        return
    for kind in source.model.kinds if not report.tensors else ():  # no manifest has counted them
        _count(report, [kind], kind.count)
    report.mesh, report.padding = plan.mesh, _padding(plan.padding, source.model.sizes.of({}))
    if source.stated is not None and source.manifest is None:
        _take_identity(report, source.stated)
    if not source.format.plain:
        _take_formats(report, [source.format])
        report.any_mesh = source.format.container.chunks
        report.load = source.format.loading.command_of(report.path, plan.mesh)
    if training is None:
        report.ranks_present = tuple(range(len(source.ranks)))
    else:
        _take_trainer(report, training.saved.what)


def _take_checkpoint(report: Report, checkpoint: Checkpoint) -> None:
    report.format = "PyTorch .bin" if BIN.holds(checkpoint.files[0].name) else "safetensors"
    _take_type(report, checkpoint.config)
    _count(report, checkpoint.tensors.values())


# -------------------------------------------------------------------------------------------- what cannot be opened


def _take_what_is_there(report: Report, folder: Folder, error: ReshardError) -> None:
    """Report the files of a checkpoint that cannot be opened, by their names, and the error of opening it.

    Raises ``error`` if there is no checkpoint at all.
    """
    if any(format.files.is_distributed for format in folder.formats):
        is_whole = _take_distributed(report, folder)
    elif folder.kind in ("program", "split"):
        is_whole = _take_ranks(report, folder)
    else:
        is_whole = _take_full(report, folder, error)
    if report.rank is not None and is_whole:  # one rank can only be opened with the others
        return
    report.hint = report.hint or error.hint
    if is_whole and folder.formats and folder.damage is None and not (report.path / CONFIG).is_file():
        report.refused = "no config.json is there, which split and merge need"
        report.hint = "give them a folder that has the model's config.json, and its tokenizer, with --config DIR"
    elif is_whole and report.architecture is None and (isinstance(error, PlanError) or folder.kind == "adapter"):
        report.refused = error.message  # it needs --plan, or --config
    elif folder.damage is not None or not report.problems:
        report.problems.insert(0, error.message)


def _take_full(report: Report, folder: Folder, error: ReshardError) -> bool:
    """Report a full checkpoint, one rank, or an adapter, as far as it is there; and whether all its files can
    be read.
    """
    path, is_adapters = report.path, folder.kind == "adapter"
    files = glob(path, "*.safetensors") or glob(path, "*.bin") if path.is_dir() else []
    files = [file for file in files if is_adapters or not is_adapter(file.name)]
    index = glob(path, "*.index.json") if path.is_dir() else []
    if (not files and not index) or (path / DELTA).is_file():
        raise error
    if any(file.name.endswith((".bin", ".bin.index.json")) for file in (*files, *index)):
        report.format = "PyTorch .bin"
    _take_files(report, files)
    with suppress(CheckpointError):
        header = folder.weights(files[0])[2] if files else None
        if is_adapters and header is not None:
            _count(report, header.tensors.values())
            with suppress(CheckpointError):  # the config.json of the model that it changes is not there
                _take_type(report, open_adapter(path, None).config)
            return True
        if header is not None:
            _take_shard(report, header, files[0])
        _take_checkpoint(report, open_checkpoint(path, folder.weights))
        return True
    return False


def _take_distributed(report: Report, folder: Folder) -> bool:
    """A distributed checkpoint of torch's, which needs no mesh: .metadata says what there is, training states too.

    Returns whether it can be read.
    """
    formats = folder.formats
    places = (weights_folder(format, report.path) for format in formats)
    place = next((place for place in places if folder.once(find_training, place)), report.path)
    matching = [format for format in formats if any((place / name).is_file() for name in format.container.documents)]
    if matching:
        _take_formats(report, matching)
    elif len(formats) > 1:
        report.format, report.loaded_by = "a distributed checkpoint of PyTorch", "torch.distributed.checkpoint"
    training = folder.once(find_training, place)
    _take_trainer(report, training.what if training else None)
    try:
        saved = folder.once(read_training, place)
    except ReshardError:
        at = training.file.parent if training else place
        _take_files(report, [file for end in ("distcp", "pt", "bin") for file in glob(at, f"*.{end}")])
        return False
    report.files, report.nbytes = len(saved.files), sum(saved.files.values())
    _count(report, saved.tensors.values())
    report.parameters_are_of, report.any_mesh = "everything", True
    report.holds = tuple(dict.fromkeys(re.split(r"[./]", name)[0] for name in (*saved.tensors, *saved.objects)))
    _take_trainer(report, saved.what)
    return True


def _take_trainer(report: Report, what: str | None) -> None:
    """Report a training program's own form; nothing else loads it."""
    if what is not None:
        report.kind, report.format = "training checkpoint", what
        report.loaded_by = report.load = report.has_manifest = None


def _take_ranks(report: Report, folder: Folder) -> bool:
    """Add which ranks are there, by their files; whether all are."""
    try:
        entries = next(iter(readings(folder, folder.formats[0] if folder.formats else OWN)), [])
    except ReshardError:  # of a file that should say of which rank it is
        return False
    _take_files(report, [entry.path for entry in entries])
    if entries and folder.manifest is None:
        stages = 1 + max(entry.stage for entry in entries)
        count = max(max(entry.rank + 1, entry.ranks or 0) for entry in entries)
        report.mesh = entries[0].mesh or mesh_of(-(-count // stages), pp=stages)
    if report.mesh is not None:
        report.ranks_present = tuple(sorted({entry.rank for entry in entries}))
        report.ranks_missing = tuple(sorted({*range(report.mesh.size)} - {*report.ranks_present}))
    if report.ranks_missing and entries:  # if there are none, opening says why
        missing, many = listed(report.ranks_missing), len(report.ranks_missing) > 1
        report.problems.append(
            f"rank{'s' if many else ''} {missing} of {report.mesh} {'are' if many else 'is'} missing"
        )
        how = "write them again" if folder.formats else "write them with 'reshard split … --rank R'"
        report.hint = f"bring the files of all ranks together, or {how}"
    return bool(entries) and not report.ranks_missing


def _take_files(report: Report, files: Iterable[FilePath]) -> None:
    sizes = [file.stat().st_size for file in files if file.is_file()]
    report.files, report.nbytes = len(sizes), sum(sizes)


# ------------------------------------------------------------------------------------------ a file, unfinished output


def _file(path: FilePath) -> Report:
    if not SAFETENSORS.holds(path.name):
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
    """Report a shard by its header; any other header adds nothing."""
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
        config = read_config(folder / CONFIG)
    except CheckpointError:  # whoever opens the checkpoint says so
        config = {}
    _take_type(report, config)


def _take_type(report: Report, config: Mapping[str, Any]) -> None:
    model_type = config.get("model_type")
    report.model_type = model_type if isinstance(model_type, str) else None
    rules_file = built_in_file(config)
    report.architecture = rules_file.stem if rules_file else None


def _take_formats(report: Report, formats: Sequence[Format]) -> None:
    report.format = " or ".join(format.name for format in formats)
    report.loaded_by = " or ".join(dict.fromkeys(format.loading.program for format in formats))


def _count(report: Report, tensors: Iterable[TensorInfo | Sharded | Kind], times: int = 1) -> None:
    dtypes = Counter(report.dtypes)
    for tensor in tensors:
        dtypes[tensor.dtype] += times * math.prod(tensor.shape)
        report.tensors += times
    report.dtypes = dict(dtypes.most_common())


# ------------------------------------------------------------------------------------------------------------ the text


def _pairs(report: Report) -> Iterator[tuple[str, str]]:
    rules = f"rules: {report.architecture}" if report.architecture else "no rules for it: see 'reshard plan --help'"
    has_type = report.model_type is not None or report.kind == "full checkpoint"
    is_known = "reshard" if report.has_manifest else "not known (there is no reshard.json)"
    mesh = f"{report.mesh}{f', rank {report.rank}' if report.rank is not None else ''}" if report.mesh else None
    also = " (all that is stored, states of training too)" if report.parameters_are_of == "everything" else ""
    weights = f"{human_bytes(report.nbytes)} ({report.nbytes:,} bytes) in {plural(report.files, 'file')}"
    pairs = (
        ("what", report.kind),
        ("format", report.format),
        ("loaded by", report.loaded_by),
        ("written by", is_known if report.loaded_by is not None else None),
        ("model type", f"{report.model_type or 'unknown'} ({rules})" if has_type else None),
        ("mesh", "any number of ranks can load it" if report.any_mesh else mesh),
        ("ranks here", (listed(report.ranks_present) or "none") if report.ranks_missing else None),
        ("missing", listed(report.ranks_missing)),
        ("parameters", f"{report.parameters:,}{also}" if report.dtypes else None),
        ("dtypes", ", ".join(f"{dtype} {count:,}" for dtype, count in report.dtypes.items())),
        ("tensors", f"{report.tensors:,}" if report.dtypes else None),
        ("holds", listed(report.holds, 8) if report.holds else None),
        ("LoRA", report.lora),
        ("beside", f"{listed(report.beside, 5)}: not of the model, and not counted" if report.beside else None),
        ("without", f"{listed(report.without)}: it is the language model alone" if report.without else None),
        ("load it", report.load),
        ("weights", weights if report.files else None),
        *(("padding", f"{axis} {full:,} -> {padded:,}") for axis, (full, padded) in report.padding.items()),
        ("source", f"{report.source}{f' at {report.commit}' if report.commit else ''}" if report.source else None),
        ("complete", "yes" if report.complete else "no"),
        *(("problem", problem) for problem in report.problems),
        ("refused", report.refused),
        ("hint", report.hint if report.refused or not report.complete else None),
    )
    return ((label, text) for label, text in pairs if text)
