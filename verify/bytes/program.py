"""Compares a folder in another program's format with its original: tensors, files, headers, manifest."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path

from formats.errors import ReshardError
from formats.files.dcp import METADATA
from formats.files.safetensors import DTYPE_BITS, tensor_bytes
from formats.files.sharded import MANIFEST
from reshard.planning.arrangement import Arrangement, arrangement_of
from reshard.planning.stored import Stored
from reshard.storage.opening import open_source
from reshard.storage.program_source import program_files, weights_folder
from reshard.storage.source import KEPT, Source
from reshard.writing.shard_files import partition
from verify.bytes import folder
from verify.bytes.boxes import check_boxes
from verify.bytes.exact_report import ConfigDifference, ExactReport
from verify.bytes.reading import Files
from verify.bytes.stored import Comparison, Parts
from verify.bytes.structure import config_differences
from verify.bytes.tensors import Progress


def compare_program(original: Source, shards: Source, progress: Progress, workers: int | None) -> ExactReport:
    """Compare every byte that a program's files have with what follows from the original.

    The plan of ``shards`` is that of the original. Raises CheckpointError if a file cannot be read.
    """
    assert shards.format is not None
    try:
        arrangement = shards.arrangement
        found = _Structure(original, shards, arrangement)
        found.check()
    except ReshardError as error:
        return ExactReport(str(shards.plan.mesh), len(shards.ranks), 0, 0, problems=(error.message,))
    sums = folder.begun_sums(original, shards)
    files = Files(original, shards, sums=sums)
    comparison = Comparison(original, shards, arrangement, found.comparable, progress, sums, files)
    report = comparison.run(workers or files.workers)
    found.problems += folder.wrong_checksums(original, shards, sums, comparison.damaged, files)
    if shards.boxes is not None and found.of_any_mesh:
        report = replace(report, mesh="of no stated mesh", ranks=None)
    return replace(
        report,
        form=shards.format.name,
        is_listed=shards.beside is not None,
        missing=tuple(found.missing),
        extra=tuple(found.extra),
        configs=tuple(found.configs),
        problems=tuple(found.problems),
        not_compared=tuple(found.not_compared),
    )


@dataclass
class _Structure:
    """All but the content of tensors; ``comparable`` has the ranks whose part has the planned dtype and shape."""

    original: Source
    shards: Source
    arrangement: Arrangement
    missing: list[str] = field(default_factory=list)
    extra: list[str] = field(default_factory=list)
    configs: list[ConfigDifference] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    comparable: dict[str, list[int]] = field(default_factory=dict)
    of_any_mesh: bool = False
    not_compared: list[str] = field(default_factory=list)

    def check(self) -> None:
        """Compare, and fill in all fields."""
        if self.shards.boxes is not None:
            self._check_boxes()
        else:
            for rank in range(len(self.shards.ranks)):
                self._check_rank(rank)
        self._check_kept()
        plan = self.shards.plan
        changes = [*folder.program_header_changes(self.original, self.shards, plan)]
        if self.shards.manifest is not None:
            documents = folder.program_documents(self.original, self.shards)
            self._check_files(documents)
            changes += folder.document_changes(self.shards, documents)
            changes += [(MANIFEST, change) for change in folder.manifest_changes(self.original, self.shards, plan)]
        for file, (key, should, found) in changes:
            self.configs.append(ConfigDifference(file, key, folder.shown(should, found), folder.shown(found, should)))
        self._check_side_files()
        if self.shards.manifest is None:
            self.not_compared += self._beside()

    def _beside(self) -> Iterator[str]:
        """The files beside the weights that cannot be compared without a manifest: nobody says who wrote them.

        Those that the format has, those of the original that are not there, and what else lies there.
        """
        root, format = self.shards.path, self.shards.format
        assert format is not None
        side = {file.relative_to(self.original.path).as_posix() for file in self.original.side_files}
        own = {name for name in folder.documents_of(format, weights_folder(format, root), root) if name not in side}
        weights = {file.name for file in self.shards.files.values()}
        known = {*side, *own, *weights, f"{weights_folder(format, root).name}/{METADATA}", METADATA, KEPT}
        yield from (name if (root / name).is_file() else f"{name} (not there)" for name in sorted(own))
        yield from (f"{name} (not there)" for name in sorted(side) if not (root / name).is_file())
        yield from folder.extra_entries(self.shards, known)

    def _shape(self, stored: Stored, rank: int, parts: Parts) -> tuple[int, ...] | None:
        if stored.constant is not None:
            return stored.constant.shape
        part = parts.of(stored, rank)
        return part.shape if part is not None else None

    def _check_rank(self, rank: int) -> None:
        tensors, where, parts = dict(self.shards.ranks[rank]), f"rank {rank}", Parts(self.arrangement)
        for stored, _ in self.arrangement.held(rank):
            shape, info = self._shape(stored, rank, parts), tensors.pop(stored.name_on(rank), None)
            if info is None:
                made = "".join(f", of '{atom.tensor}'" for atom in stored.atoms[:1])
                self.missing.append(f"{where}: {stored.name_on(rank)}{made}")
            elif info.dtype != stored.dtype or info.shape != shape:
                has, planned = f"{info.dtype} {list(info.shape)}", f"{stored.dtype} {list(shape or ())}"
                self.problems.append(f"{info.file}: tensor '{info.name}' is {has}, the original gives {planned}")
            else:
                self.comparable.setdefault(stored.name, []).append(rank)
        self.extra += [f"{where}: {name}" for name in tensors]

    def _check_boxes(self) -> None:
        found = check_boxes(self.shards, self.arrangement)
        self.missing += found.missing
        self.extra += found.extra
        self.problems += found.problems
        self.comparable, self.of_any_mesh = found.comparable, not found.is_ours

    def _check_kept(self) -> None:
        """The tensors whose own bits the format does not keep stand beside the shards, if reshard wrote them."""
        taken, dropped = self.arrangement.taken, self.arrangement.dropped
        changed = {kind for kind, portions in taken.items() if any(portion.function for portion in portions)}
        tensors = self.arrangement.plan.model.tensors
        wanted = {tensor.name: tensor for tensor in tensors if tensor.kind in changed or tensor.name in dropped}
        kept = self.shards.kept
        if self.shards.manifest is not None:
            self.missing += [f"{KEPT}: {name}" for name in wanted if name not in kept]
        self.extra += [f"{KEPT}: {name}" for name in kept if name not in wanted]
        for name in wanted.keys() & kept.keys():
            if (kept[name].dtype, kept[name].shape) != (wanted[name].dtype, wanted[name].shape):
                self.problems.append(f"{kept[name].file}: tensor '{name}' is not of the original's dtype and shape")

    def _check_files(self, documents: Iterable[str]) -> None:
        """The files, and in which of them the tensors of each rank stand."""
        root = self.shards.path
        side = [file.relative_to(self.original.path).as_posix() for file in self.original.side_files]
        expected = {*side, *documents, MANIFEST, *(file.name for file in self.shards.files.values())}
        self.missing += sorted(name for name in expected if not (root / name).is_file())
        self.extra += folder.extra_entries(self.shards, expected)
        if self.missing or self.extra or self.problems:
            return
        for number in range(self._planned.ranks):
            self.problems += self._boundary_problem(number)
        self.problems += self._rules_problem()

    @cached_property
    def _planned(self) -> Arrangement:
        """What is stored, with the boxes of the mesh if there are boxes."""
        format = self.shards.format
        assert format is not None
        return self.arrangement if self.shards.boxes is None else arrangement_of(self.shards.plan, format)

    def _rules_problem(self) -> Iterator[str]:
        """Why by the rules in the manifest, which a merge reads these shards by, something lies elsewhere.

        Rules of another version may have other words.
        """
        manifest, rules = self.shards.manifest, self.original.rules
        assert manifest is not None
        if manifest.architecture == rules:
            return
        try:
            theirs = open_source(self.shards.path).plan
        except ReshardError as error:
            yield f"{MANIFEST}: by its rules, {error.message}"
            return
        for tensor in self.shards.plan.model.tensors:
            own, laid = self.shards.plan.laid[tensor.kind].layout, theirs.entries.get(tensor.name)
            if laid is None or (own.padded, own.boxes) != (laid.layout.padded, laid.layout.boxes):
                yield f"{MANIFEST}: by its rules, ranks have other parts of '{tensor.name}'"
                return

    def _boundary_problem(self, rank: int) -> Iterator[str]:
        format, manifest = self.shards.format, self.shards.manifest
        assert format is not None and manifest is not None
        if not format.files.has_parts or format.files.is_distributed:  # .metadata says where its chunks lie
            return
        held = sorted(self._planned.held(rank), key=lambda found: -DTYPE_BITS[found[0].dtype])
        if not manifest.source.files:  # then the order is that of what was read
            order = {name: number for number, name in enumerate(self.shards.ranks[rank])}
            held.sort(key=lambda found: order.get(found[0].name_on(rank), 0))
        tensors = [(s.name_on(rank), s.dtype, shape, tensor_bytes(s.name, s.dtype, shape)) for s, shape in held]
        should = [[tensor[0] for tensor in shard.tensors] for shard in partition(tensors, manifest.max_shard_size)]
        names: dict[Path, list[str]] = {}
        for info in (info for tensors in self.shards.ranks for info in tensors.values()):
            names.setdefault(info.file, []).append(info.name)
        found = [
            names.get(file.path, [])
            for file in program_files(format, self.shards.path, self.shards.plan.mesh)
            if file.rank == rank
        ]
        if should != found:
            what = f"{len(should)} files" if len(should) != len(found) else "tensors in another order"
            yield (
                f"{MANIFEST}: 'max_shard_size' {manifest.max_shard_size} gives {what} for rank {rank}, "
                f"which has {len(found)}"
            )

    def _check_side_files(self) -> None:
        """Compare config.json as JSON, and the other side files byte for byte; a program may leave some out."""
        path = self.shards.path / "config.json"
        if path.is_file():
            expected = self.original.read_config()
            found = config_differences("config.json", expected, path)
            self.configs += found if found is not None else ()
            self.problems += [] if found is not None else [f"{path}: is not a JSON object"]
        told = {difference.file for difference in self.configs}
        for file in folder.changed_side_files(self.original, self.shards):
            if file.relative_to(self.shards.path).as_posix() not in told:
                self.problems.append(f"{file}: is not the original's")
