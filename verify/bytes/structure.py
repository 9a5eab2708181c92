"""Compares all but the bytes of tensors: names, shapes, dtypes, files, configs."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from formats.documents import read_config
from formats.errors import CheckpointError
from formats.files.sharded import MANIFEST
from formats.store import FilePath, name_in
from reshard.mesh.rank_config import rank_config
from reshard.placement.arrangement import Arrangement
from reshard.placement.geometry import Geometry
from reshard.placement.stored import Stored
from reshard.source.source import Source
from verify.bytes import folder
from verify.bytes.atoms import Parts
from verify.bytes.exact_report import ConfigDifference
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
        tensors, is_own, known = self.shards.ranks[rank], self.arrangement.format is None, list[str]()
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
            self._check_rank(rank, mesh.folder(rank) if self.shards.sharded else root.name)
        config = "config.json"
        self._check_config(config, self.original.read_config(), root / config)
        if self.shards.sharded is None:
            self._check_names()
        self._check_side_files()
        if self.shards.sharded is not None:
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
        assert self.shards.sharded is not None
        expected, found = self.original.identity(self.arrangement.plan), self.shards.sharded.identity
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
                for file, change in folder.header_changes(self.original, self.shards, plan, rank, order):
                    self._take(file, [change])
                problem = folder.files_problem(self.shards, plan, rank, order)
                self.problems += [problem] if problem else []
