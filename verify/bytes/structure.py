"""Compares all but the bytes of tensors: names, shapes, dtypes, files, configs."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from formats.documents import read_config
from formats.errors import CheckpointError, ReshardError
from formats.files.checkpoint import METADATA
from formats.files.safetensors import DTYPE_BITS
from formats.files.sharded import KEPT, MANIFEST
from formats.store import FilePath, name_in
from reshard.mesh.plan import rank_config
from reshard.placement.arrangement import Arrangement, arrangement_of
from reshard.placement.geometry import Geometry
from reshard.placement.stored import Stored
from reshard.source.opening import open_source
from reshard.source.program_files import program_files, weights_folder
from reshard.source.source import Source
from verify.bytes import folder
from verify.bytes.atoms import Parts
from verify.bytes.chunks import check_chunks
from verify.bytes.exact_report import ConfigDifference
from verify.bytes.folder import boundary_problem
from verify.rules import flat, with_sound_config


@dataclass
class Structure:
    """The comparison without the content of tensors: names, shapes, dtypes, files, configs.

    ``arrangement`` is the original's on the shards' mesh. ``comparable`` has, for each stored tensor, the ranks (or
    files with chunks) whose part has the planned dtype and shape. ``not_compared`` has files that cannot be checked,
    ``of_any_mesh`` says that the files have no mesh.
    """

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
        raise NotImplementedError

    def _check_rank(self, rank: int, where: str) -> None:
        """The tensors of a rank, which messages call ``where``."""
        tensors, is_own, known = self.shards.ranks[rank], self.arrangement.format.plain, list[str]()
        shapes: dict[Geometry, tuple[int, ...] | None] = {}
        for stored in self.arrangement.stored:
            geometry = stored.geometry
            if geometry not in shapes:
                shapes[geometry] = self._shape(stored, rank)
            shape = shapes[geometry]
            if shape is None:
                continue
            shape = shape if stored.constant is None else stored.constant.shape
            name = stored.name if stored.naming is None else stored.name_on(rank)
            known.append(name)
            info = tensors.get(name)
            if info is None:
                made = "" if is_own else "".join(f", of '{atom.tensor}'" for atom in stored.atoms[:1])
                self.missing.append(f"{where}: {name}{made}")
            elif info.dtype != stored.dtype or info.shape != shape:
                has, planned = f"{info.dtype} {list(info.shape)}", f"{stored.dtype} {list(shape)}"
                self.problems.append(f"{info.file}: tensor '{name}' is {has}, the original gives {planned}")
            else:
                self.comparable.setdefault(stored.name, []).append(rank)
        if unknown := tensors.keys() - known:
            self.extra += [f"{where}: {name}" for name in tensors if name in unknown]

    def _shape(self, stored: Stored, rank: int) -> tuple[int, ...] | None:
        if stored.constant is not None:
            return stored.geometry.shape(rank)
        part = self._parts.of(stored, rank)
        return part.shape if part is not None else None

    @cached_property
    def _parts(self) -> Parts:
        return Parts(self.arrangement)

    def _take(self, file: str, changes: Iterable[folder.Change]) -> None:
        for key, should, found in changes:
            difference = ConfigDifference(file, key, folder.shown(should, found), folder.shown(found, should))
            self.configs.append(difference)

    def _check_present(self, expected: Collection[str]) -> None:
        """Whether exactly these files are there."""
        self.missing += sorted(name for name in expected if not (self.shards.path / name).is_file())
        self.extra += folder.extra_entries(self.shards, expected)

    def _check_config(self, name: str, expected: Mapping[str, Any], path: FilePath) -> None:
        """Compare the settings of a file with those that are expected."""
        try:
            has, should = dict(flat(read_config(path))), dict(flat(expected))
        except CheckpointError:
            if path.exists():
                self.problems.append(f"{path}: is not a JSON object")
            elif name not in self.missing:
                self.missing.append(name)
            return
        self.configs += [
            ConfigDifference(name, key, should.get(key), has.get(key))
            for key in sorted(has.keys() | should.keys())
            if has.get(key) != should.get(key)
        ]

    def _check_side_files(self) -> None:
        """Compare side files (a tokenizer) byte for byte; config.json too, unless it differs as JSON already."""
        told = {difference.file for difference in self.configs}
        for file in folder.changed_side_files(self.original, self.shards):
            if name_in(file, self.shards.path) not in told:
                self.problems.append(f"{file}: is not the original's")


class OwnStructure(Structure):
    """The structure of folders of ranks, or of a full checkpoint."""

    def check(self) -> None:
        """Compare, and fill in all fields."""
        root, mesh, plan = self.shards.path, self.arrangement.plan.mesh, self.arrangement.plan
        for rank in range(len(self.shards.ranks)):
            self._check_rank(rank, mesh.folder(rank) if self.shards.stated else root.name)
        config = "config.json"
        self._check_config(config, self.original.read_config(), root / config)
        if self.shards.stated is None:
            self._check_names()
        self._check_side_files()
        if self.shards.stated is not None:
            expected = folder.expected_files(self.original, self.shards, plan).values()
            self._check_present([name for names in expected for name in names])
            self._check_identity()
            self._check_documents()
            planned = with_sound_config(plan)
            for rank in range(mesh.size):
                name = f"{mesh.folder(rank)}/{config}"
                self._check_config(name, rank_config(planned, rank), root / name)

    def _check_names(self) -> None:
        """Whether a full checkpoint has the original's side files."""
        names, present = {*self.original.side_files}, {*self.shards.side_files}
        self.missing += sorted(names - present)
        self.extra += sorted(present - names)

    def _check_identity(self) -> None:
        """Compare source and sizes in the headers. (The plan may differ, if its result is the same.)"""
        assert self.shards.stated is not None
        expected, found = self.original.identity(self.arrangement.plan), self.shards.stated
        source = folder.expected_source(self.original, self.shards)
        if found.source != source:
            has, should = found.source[:12], source[:12]
            self.problems.append(
                f"{self.shards.path}: the shards say that they come from {has}, the original is {should}"
            )
        for axis in sorted(expected.sizes.keys() | found.sizes.keys()):
            said, true = found.sizes.get(axis), expected.sizes.get(axis)
            if said != true:
                self.problems.append(
                    f"{self.shards.path}: the axis '{axis}' is {said} by the headers, but {true} in the original"
                )

    def _check_documents(self) -> None:
        """Compare the manifest, and the headers and indexes of the ranks."""
        plan = self.arrangement.plan
        self._take(MANIFEST, folder.manifest_changes(self.original, self.shards, plan))
        agree = not (self.missing or self.extra or self.problems)
        order = folder.stored_order(self.shards, plan) if agree else ()
        for rank in range(plan.mesh.size):
            self._take(f"{plan.mesh.folder(rank)}/{folder.INDEX}", folder.index_changes(self.shards, plan, rank))
            if agree:
                for file, change in folder.header_changes(self.original, self.shards, plan, [rank], order):
                    self._take(file, [change])
                problem = folder.files_problem(self.shards, plan, rank, order)
                self.problems += [problem] if problem else []


# -------------------------------------------------------------------------------------------- another program's format


class ProgramStructure(Structure):
    """The structure of a folder in another program's format."""

    def check(self) -> None:
        """Compare, and fill in all fields."""
        if self.shards.chunks is not None:
            self._check_chunks()
        else:
            for rank in range(len(self.shards.ranks)):
                self._check_rank(rank, f"rank {rank}")
        self._check_kept()
        plan = self.shards.plan
        changes = [*folder.header_changes(self.original, self.shards, plan, range(plan.mesh.size))]
        if self.shards.manifest is not None:
            documents = folder.program_documents(self.original, self.shards)
            self._check_files(documents)
            changes += folder.document_changes(self.shards, documents)
            changes += [(MANIFEST, change) for change in folder.manifest_changes(self.original, self.shards, plan)]
        for file, change in changes:
            self._take(file, [change])
        path = self.shards.path / "config.json"
        if path.is_file():  # a program may leave it out
            self._check_config("config.json", self.original.read_config(), path)
        self._check_side_files()
        if self.shards.manifest is None:
            self.not_compared += self._beside()

    def _beside(self) -> Iterator[str]:
        """The files beside the weights that cannot be compared without a manifest: nobody says who wrote them.

        Those that the format has, those of the original that are not there, and what else lies there.
        """
        root, format = self.shards.path, self.shards.format
        side = {*self.original.side_files}
        own = {name for name in folder.documents_of(format, weights_folder(format, root), root) if name not in side}
        weights = {file.name for file in self.shards.files.values()}
        known = {*side, *own, *weights, f"{weights_folder(format, root).name}/{METADATA}", METADATA, KEPT}
        yield from (name if (root / name).is_file() else f"{name} (not there)" for name in sorted(own))
        yield from (f"{name} (not there)" for name in sorted(side) if not (root / name).is_file())
        yield from folder.extra_entries(self.shards, known)

    def _check_chunks(self) -> None:
        found = check_chunks(self.shards, self.arrangement)
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
        side = [*self.original.side_files]
        self._check_present({*side, *documents, MANIFEST, *(file.name for file in self.shards.files.values())})
        if self.missing or self.extra or self.problems:
            return
        for number in range(self._planned.ranks):
            self.problems += self._boundary_problem(number)
        self.problems += self._rules_problem()

    @cached_property
    def _planned(self) -> Arrangement:
        """What is stored, with the chunks of the mesh if there are chunks."""
        chunks, format = self.shards.chunks, self.shards.format
        return self.arrangement if chunks is None else arrangement_of(self.shards.plan, format)

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
        assert manifest is not None
        if not format.files.has_parts or format.files.is_distributed:  # .metadata says where its chunks lie
            return
        order = {stored.name_on(rank): DTYPE_BITS[stored.dtype] for stored, _ in self._planned.held(rank)}
        names = sorted(order, key=lambda name: -order[name])
        if not manifest.source.files:  # then the order is that of what was read
            names = [name for name in self.shards.ranks[rank] if name in order]
        files = program_files(format, self.shards.path, self.shards.plan.mesh)
        infos = (info for tensors in self.shards.ranks for info in tensors.values())
        own = [file.path for file in files if file.rank == rank]
        problem = boundary_problem(names, infos, own, manifest.max_shard_size, f"for rank {rank}, which")
        if problem is not None:
            yield problem
