"""Compares all but the bytes of tensors: names, shapes, dtypes, files, configs; and tensors that a split rewrites."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from formats.documents import read_config
from formats.errors import CheckpointError
from formats.files.safetensors import TensorInfo
from formats.files.sharded import MANIFEST
from reshard.planning.plan import Layout, Plan
from reshard.planning.rank_config import rank_config
from reshard.storage.source import Source
from verify.bytes import folder
from verify.bytes.exact_report import ConfigDifference
from verify.bytes.reading import Files
from verify.bytes.scales import differing, refined
from verify.bytes.stated_shapes import says
from verify.rules import flat, with_sound_config


@dataclass(frozen=True)
class Derived:
    """The result for tensors that a split rewrites: the problems, and for each tensor the compared ranks."""

    problems: tuple[str, ...]
    compared: Mapping[str, frozenset[int]]


def check_derived(
    original: Source, shards: Source, plan: Plan, comparable: Mapping[str, Sequence[int]], files: Files
) -> Derived:
    """Compare scales with smaller scale blocks, and tensors that state a weight's local shape."""
    problems: list[str] = []
    compared: dict[str, frozenset[int]] = {}
    for before, after in zip(original.plan.model.tensors, plan.model.tensors, strict=True):
        name, ranks = after.name, comparable.get(after.name, ())
        if not ranks:
            continue
        entry, coarse = plan.laid[after.kind], original.plan.laid[before.kind].layout
        if coarse.full != entry.layout.full:
            compared[name] = frozenset(ranks)
            expected = refined(original.ranks[0][name], coarse, entry.layout, files)
            for rank in ranks:
                problems += _wrong_scales(shards.ranks[rank][name], expected, entry.layout, rank, files)
        elif entry.stated is not None:
            stated, info = entry.stated, original.ranks[0][name]
            whole = _content(files, info)
            compared[name] = frozenset(rank for rank in ranks if stated.boxes[rank].shape != stated.stored)
            for rank in sorted(compared[name]):
                shard, shape = shards.ranks[rank][name], list(stated.boxes[rank].shape)
                if not says(_content(files, shard), whole, info.dtype, shape):
                    problems.append(f"{shard.file}: tensor '{name}' is not the original's with the shape {shape} in it")
    return Derived(tuple(problems), compared)


def _content(files: Files, info: TensorInfo) -> bytes:
    """All bytes of a tensor."""
    return files.read(info.file, info.offset, info.nbytes).tobytes()


def _wrong_scales(info: TensorInfo, expected: Any, layout: Layout, rank: int, files: Files) -> Iterator[str]:
    wrong = list(differing(info, expected, layout, rank, files))
    if wrong:
        place = list(map(int, wrong[0]))
        yield f"{info.file}: {len(wrong)} scales of '{info.name}' are not the original's, first at {place}"


@dataclass
class Structure:
    """The comparison without the content of tensors: names, shapes, dtypes, files, configs.

    ``comparable`` has, for each tensor, the ranks whose part has the planned dtype and shape.
    """

    original: Source
    shards: Source
    plan: Plan
    missing: list[str] = field(default_factory=list)
    extra: list[str] = field(default_factory=list)
    configs: list[ConfigDifference] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    comparable: dict[str, list[int]] = field(default_factory=dict)

    def check(self) -> None:
        """Compare, and fill in all fields."""
        for rank, tensors in enumerate(self.shards.ranks):
            self._check_tensors(rank, tensors)
        config = "config.json"
        self._check_config(config, self.original.read_config(), self.shards.path / config)
        self._check_side_files()
        if self.shards.sharded is not None:
            self._check_files()
            self._check_identity()
            self._check_documents()
            planned = with_sound_config(self.plan)
            for rank in range(self.plan.mesh.size):
                name = f"{self.plan.mesh.folder(rank)}/config.json"
                self._check_config(name, rank_config(planned, rank), self.shards.path / name)

    def _check_tensors(self, rank: int, tensors: Mapping[str, TensorInfo]) -> None:
        where = self.plan.mesh.folder(rank) if self.shards.sharded else self.shards.path.name
        boxes = self.plan.boxes(rank)
        for name, kind, _ in self.plan.model.tensors:
            info, box = tensors.get(name), boxes.get(kind)
            if box is None or info is None:
                if box is not None:
                    self.missing.append(f"{where}: {name}")
                elif info is not None:
                    self.extra.append(f"{where}: {name}")
            elif info.dtype != kind.dtype or info.shape != box.shape:
                has, planned = f"{info.dtype} {list(info.shape)}", f"{kind.dtype} {list(box.shape)}"
                self.problems.append(f"{info.file}: tensor '{name}' is {has}, the original gives {planned}")
            else:
                self.comparable.setdefault(name, []).append(rank)
        known = {tensor.name for tensor in self.plan.model.tensors}
        self.extra += [f"{where}: {name}" for name in tensors if name not in known]

    def _check_identity(self) -> None:
        """Compare source and sizes in the headers. (The plan may differ, if its result is the same.)"""
        assert self.shards.sharded is not None
        expected, found = self.original.identity(self.plan), self.shards.sharded.identity
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

    def _check_files(self) -> None:
        root = self.shards.path
        expected = folder.expected_files(self.original, self.shards, self.plan)
        files = [name for names in expected.values() for name in names]
        self.missing += sorted(name for name in files if not (root / name).is_file())
        self.extra += folder.extra_entries(self.shards, files)

    def _check_documents(self) -> None:
        """Compare the manifest, and the headers and indexes of the ranks."""
        self._take(MANIFEST, folder.manifest_changes(self.original, self.shards, self.plan))
        agree = not (self.missing or self.extra or self.problems)
        order = folder.stored_order(self.shards, self.plan) if agree else ()
        for rank in range(self.plan.mesh.size):
            self._take(
                f"{self.plan.mesh.folder(rank)}/{folder.INDEX}", folder.index_changes(self.shards, self.plan, rank)
            )
            if agree:
                for file, change in folder.header_changes(self.original, self.shards, self.plan, rank, order):
                    self._take(file, [change])
                problem = folder.boundary_problem(self.shards, self.plan, rank, order)
                self.problems += [problem] if problem else []

    def _take(self, file: str, changes: Iterable[folder.Change]) -> None:
        for key, should, found in changes:
            difference = ConfigDifference(file, key, folder.shown(should, found), folder.shown(found, should))
            self.configs.append(difference)

    def _check_config(self, name: str, expected: Mapping[str, Any], path: Path) -> None:
        found = config_differences(name, expected, path)
        if found is not None:
            self.configs += found
        elif path.exists():
            self.problems.append(f"{path}: is not a JSON object")
        elif name not in self.missing:
            self.missing.append(name)

    def _check_side_files(self) -> None:
        """Compare side files (a tokenizer) byte for byte; config.json too, unless it differs as JSON already."""
        root = self.shards.path
        if self.shards.sharded is None:
            names = {file.relative_to(self.original.path).as_posix() for file in self.original.side_files}
            names |= self.original.made.keys()
            present = {file.relative_to(root).as_posix() for file in self.shards.side_files}
            self.missing += sorted(names - present)
            self.extra += sorted(present - names)
        told = {difference.file for difference in self.configs}
        for file in folder.changed_side_files(self.original, self.shards):
            if file.relative_to(root).as_posix() not in told:
                self.problems.append(f"{file}: is not the original's")


def config_differences(name: str, expected: Mapping[str, Any], path: Path) -> list[ConfigDifference] | None:
    """The settings of a file that are not as expected; None if it has no JSON object."""
    found = _read_json(path)
    if found is None:
        return None
    has, should = dict(flat(found)), dict(flat(expected))
    return [
        ConfigDifference(name, key, should.get(key), has.get(key))
        for key in sorted(has.keys() | should.keys())
        if has.get(key) != should.get(key)
    ]


def _read_json(path: Path) -> dict[str, Any] | None:
    """The JSON object in a file; None if there is none."""
    try:
        return read_config(path)
    except CheckpointError:
        return None
