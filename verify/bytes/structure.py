"""Compares all but the bytes of tensors: names, shapes, dtypes, files, configs."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from reshard.formats.documents import MAX_MANIFEST, json_object, read_config, read_document
from reshard.formats.errors import CheckpointError, IncompleteError, ReshardError
from reshard.formats.files.checkpoint import CONFIG, METADATA
from reshard.formats.files.chunks import Chunk
from reshard.formats.files.manifest import INTACT_FILE, MANIFEST, METADATA_KEY
from reshard.formats.notation.axes import Run
from reshard.formats.store import read_file
from reshard.placement.arrangement import Arrangement, arrangement_of
from reshard.placement.stored import Stored
from reshard.source.opening import open_source
from reshard.source.source import Source
from reshard.verify.bytes import folder
from reshard.verify.bytes.blocks import owners
from reshard.verify.bytes.exact_report import ConfigDifference, config_differences
from reshard.verify.bytes.sizes import sizes_of


@dataclass
class Structure:
    """The comparison without the content of tensors: names, shapes, dtypes, files, configs."""

    original: Source
    shards: Source
    arrangement: Arrangement
    """The original's, on the shards' mesh."""
    missing: list[str] = field(default_factory=list)
    extra: list[str] = field(default_factory=list)
    configs: list[ConfigDifference] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    comparable: dict[str, list[int]] = field(default_factory=dict)
    """For each stored tensor, the ranks (or files with chunks) whose part has the planned dtype and shape."""
    of_any_mesh: bool = False
    """Whether the files have no mesh."""
    not_compared: list[str] = field(default_factory=list)
    """Files that cannot be checked."""
    other_dtypes: set[str] = field(default_factory=set)
    """Dtypes that tensors have instead of planned ones."""
    sizes_of_split: set[str] = field(default_factory=set)
    """Settings of ranks that split alone knows."""

    @property
    def differences(self) -> dict[str, Any]:
        """The differences, as fields of an ``ExactReport``."""
        names = ("missing", "extra", "configs", "problems", "not_compared")
        return {name: tuple(getattr(self, name)) for name in names}

    def check(self) -> None:
        """Compare, and fill in all fields."""
        shards, plan = self.shards, self.arrangement.plan
        if shards.chunks is not None:
            self._check_chunks()
        else:
            for rank in range(len(shards.ranks)):
                self._check_rank(rank)
        self._check_intact()
        documents = folder.documents(self.original, shards, plan)
        self._check_documents(documents)
        compared = {CONFIG} if shards.stated is None else {difference.file for difference in self.configs}
        for name, content in self.original.read_side_files().items():
            path = shards.path / name
            if name not in compared and path.is_file() and read_file(path) != content:
                self.problems.append(f"{path}: is not the original's")
        expected = {*self.original.side_files, *documents, *(file.name for file in shards.files.values())}
        computed = {name for name, content in shards.side_files.items() if isinstance(content, bytes)}
        lacking = sorted(name for name in expected - computed if not (shards.path / name).is_file())
        extra = folder.extra_entries(shards, expected)
        if shards.checkpoint is not None or shards.format.plain or shards.manifest is not None:
            also = {*self.original.strays} if shards.checkpoint is not None else set[str]()  # a copy has them, too
            self.missing += lacking
            self.extra += [name for name in extra if name not in also]
            self.not_compared += [name for name in extra if name in also]
        else:
            own = {name for name, content in documents.items() if content is None and not name.endswith(METADATA)}
            self.not_compared += sorted(own - {*lacking})
            self.not_compared += [f"{name} (not there)" for name in lacking]
            self.not_compared += extra
        if shards.manifest is not None and folder.is_of_other_files(self.original, shards.manifest):
            self.not_compared.append(f"what {MANIFEST} says of its source's files: others, or of other names")
        self._check_identity()
        if not (self.missing or self.extra or self.problems):
            self.configs += folder.header_differences(self.original, shards, plan)
            self.problems += self._rules_problem()

    def _check_rank(self, rank: int) -> None:
        """The tensors of a rank."""
        where = f"rank {rank}" if not self.shards.format.plain else self.shards.path.name
        where = where if self.shards.stated is None else self.arrangement.plan.mesh.folder(rank)
        tensors, is_own, planned_names = self.shards.ranks[rank], self.arrangement.format.plain, list[str]()
        for stored, shape in self.arrangement.tensors_of(rank):
            name = stored.name if stored.naming is None else stored.name_on(rank)
            planned_names.append(name)
            info = tensors.get(name)
            if info is None:
                origin = "" if is_own else "".join(f", of '{atom.tensor}'" for atom in stored.atoms[:1])
                self.missing.append(f"{where}: {name}{origin}")
            elif info.dtype != stored.dtype or info.shape != shape:
                has, planned = f"{info.dtype} {list(info.shape)}", f"{stored.dtype} {list(shape)}"
                self.other_dtypes |= {info.dtype} - {stored.dtype}
                self.problems.append(f"{info.file}: tensor '{name}' is {has}, the original gives {planned}")
            else:
                self.comparable.setdefault(stored.name, []).append(rank)
        if unknown := tensors.keys() - planned_names:
            self.extra += [f"{where}: {name}" for name in tensors if name in unknown]

    def _check_documents(self, documents: Mapping[str, Any]) -> None:
        """Compare those of these documents that exist."""
        for name, should in documents.items():
            path = self.shards.path / name
            if should is None or not path.is_file():
                continue
            if isinstance(should, bytes):
                content = read_file(path)
                if content != should:
                    texts = (repr(each[:100]) for each in (should, content))
                    self.configs.append(ConfigDifference(name, "content", *texts))
                continue
            try:
                stored = read_config(path) if path.name == CONFIG else read_document(path, MAX_MANIFEST, json_object)[1]
            except CheckpointError as error:
                if isinstance(error.__context__, OSError):
                    raise
                self.problems.append(error.message)
            else:
                self.configs += config_differences(name, should, stored)
                if name.endswith(f"/{CONFIG}"):
                    self._check_sizes(name, stored)

    def _check_sizes(self, name: str, config: Mapping[str, Any]) -> None:
        """Compare the sizes in a rank's config.json with its tensors."""
        mesh, whole = self.arrangement.plan.mesh, self.original.ranks[0]
        rank = next(rank for rank in range(mesh.size) if name == f"{mesh.folder(rank)}/{CONFIG}")
        shapes = ({tensor: info.shape for tensor, info in infos.items()} for infos in (whole, self.shards.ranks[rank]))
        wrong, unknown = sizes_of(self.original.read_config(), config, *shapes)
        self.problems += [f"{self.shards.path / name}: {text}" for text in wrong]
        self.sizes_of_split |= unknown

    def _check_identity(self) -> None:
        """Compare source and sizes in the headers. (The plan may differ, if its result is the same.)"""
        expected, stated = self.original.identity(self.arrangement.plan), self.shards.stated
        if stated is None:
            return
        source = folder.expected_source(self.original, self.shards)
        if stated.source != source:
            has, should = stated.source[:12], source[:12]
            self.problems.append(
                f"{self.shards.path}: the shards say that they come from {has}, the original is {should}"
            )
        for axis in sorted(expected.sizes.keys() | stated.sizes.keys()):
            size, true = stated.sizes.get(axis), expected.sizes.get(axis)
            if size != true:
                self.problems.append(
                    f"{self.shards.path}: the axis '{axis}' is {size} by the headers, but {true} in the original"
                )

    def _check_intact(self) -> None:
        """The tensors whose own bits the format does not keep stand beside the shards, if reshard wrote them."""
        portions_of, dropped = self.arrangement.parts, self.arrangement.dropped
        changed = {kind for kind, portions in portions_of.items() if any(portion.function for portion in portions)}
        tensors = self.arrangement.plan.model.tensors
        expected = {tensor.name: tensor for tensor in tensors if tensor.kind in changed or tensor.name in dropped}
        intact = self.shards.intact
        if self.shards.manifest is not None:
            self.missing += [f"{INTACT_FILE}: {name}" for name in expected if name not in intact]
        self.extra += [f"{INTACT_FILE}: {name}" for name in intact if name not in expected]
        for name in sorted(expected.keys() & intact.keys()):
            if (intact[name].dtype, intact[name].shape) != (expected[name].dtype, expected[name].shape):
                self.problems.append(f"{intact[name].file}: tensor '{name}' is not of the original's dtype and shape")

    @cached_property
    def _planned(self) -> Arrangement:
        """The arrangement that should be stored; if files have chunks, with the chunks of the mesh."""
        chunks, format = self.shards.chunks, self.shards.format
        return self.shards.arrangement if chunks is None else arrangement_of(self.shards.plan, format)

    def _rules_problem(self) -> Iterator[str]:
        """Return the reason why a merge, which reads these shards by the rules in the manifest, would find something
        elsewhere.
        """
        manifest, rules = self.shards.manifest, self.original.rules
        if manifest is None or self.shards.format.plain or manifest.architecture == rules:
            return
        try:
            by_manifest = open_source(self.shards.path).plan
        except ReshardError as error:
            yield f"{MANIFEST}: by its rules, {error.message}"
            return
        for tensor in self.shards.plan.model.tensors:
            layout, laid = self.shards.plan.laid[tensor.kind], by_manifest.layouts.get(tensor.name)
            if laid is None or (layout.padded, layout.boxes) != (laid.padded, laid.boxes):
                yield f"{MANIFEST}: by its rules, ranks have other parts of '{tensor.name}'"
                return

    def _check_chunks(self) -> None:
        """The chunks: each is of the original's dtype and inside its tensor, and all have each element once.

        If reshard wrote the files, their headers say for which mesh, and each chunk must also be the one that this
        file has on that mesh.
        """
        shards, chunks, files = self.shards, self.arrangement.chunks, self.shards.rank_files
        assert chunks is not None
        self.of_any_mesh = not any(METADATA_KEY in file.metadata for file in shards.files.values())
        of_mesh = None if self.of_any_mesh else self._planned.chunks
        numbers, has_hole = {file.rank for file in files}, False
        expected = {number for planned in (of_mesh or {}).values() for number in planned}
        for name in sorted(chunks.keys() - {stored.name for stored in self.arrangement.stored}):
            self.extra += [f"{shards.ranks[number][name].file.name}: {name}" for number in sorted(chunks[name])]
        for stored in self.arrangement.stored:
            name, shape, wrong, lacking = stored.name, stored.whole_shape, dict[int, str](), list[str]()
            if not chunks[name]:
                origin = "".join(f", of '{atom.tensor}'" for atom in stored.atoms[:1])
                self.missing.append(f"{name}{origin}")
                continue
            planned = of_mesh[name] if of_mesh is not None else None  # by the numbers in the files' names
            for number, at in chunks[name].items():
                info = shards.ranks[number][name]
                if info.dtype != stored.dtype or len(at.shape) != len(shape):
                    has, should = f"{info.dtype} {list(info.shape)}", f"{stored.dtype} {list(shape)}"
                    self.other_dtypes |= {info.dtype} - {stored.dtype}
                    wrong[number] = f"{info.file}: tensor '{name}' is {has}, the original gives {should}"
                elif any(end > size for end, size in zip(at.end, shape, strict=True)):
                    wrong[number] = f"{info.file}: has {_range(at)} of '{name}', which is {list(shape)}"
                elif planned is not None and at != (chunk := planned.get(files[number].rank)):
                    gives = f"the mesh gives it {_range(chunk)}" if chunk else "the mesh gives it none"
                    wrong[number] = f"{info.file}: has {_range(at)} of '{name}', {gives}"
            present = {files[number].rank for number in chunks[name]} if planned is not None else set[int]()
            for number, at in (planned or {}).items():
                if number not in present:
                    names = (file.path.name for file in files if file.rank == number)
                    file = next(names, f"the file of shard {number + 1}")
                    lacking.append(f"{file}: {_range(at)} of '{name}'")
            self.problems += wrong.values()
            self.missing += lacking
            self.comparable[name] = [number for number in chunks[name] if number not in wrong]
            if not wrong and not lacking:
                ranges = [(shards.ranks[number][name].file.name, at) for number, at in chunks[name].items()]
                for is_hole, line in _not_once(stored, ranges):
                    has_hole |= is_hole
                    self.problems.append(line)
        if has_hole and of_mesh is None and not shards.format.files.is_distributed:
            expected = {*range(max(numbers))}  # a rank that has nothing may have no file
        if lost := expected - numbers:
            why = f"{shards.path}: the file of shard {min(lost) + 1} is missing"
            raise IncompleteError(why, "bring the files of all ranks together")


# ------------------------------------------------------------------------------------------------------------- chunks


def ranks_of(shards: Source) -> Sequence[int]:
    """The rank of each of ``shards.ranks``. With chunks, that of the file, if its name and the mesh tell it."""
    if shards.chunks is None or shards.format.files.is_distributed:  # the chunks of a number lie in any files
        return range(len(shards.ranks))
    size = shards.plan.mesh.size
    return [file.rank % size if size > 1 else file.rank for file in shards.rank_files]


def _not_once(stored: Stored, chunks: Sequence[tuple[str, Chunk]]) -> Iterator[tuple[bool, str]]:
    """Find elements that no chunk in these files has (True), or that more chunks have than the rest: the first cell of
    the grid of all their ends.
    """
    runs = ([[Run(begin, end - begin)] for begin, end in zip(at.offset, at.end, strict=True)] for _, at in chunks)
    ends, count = owners(stored.whole_shape, [*runs])
    for what, cells in (("no file has", count == 0), ("several files have", count > max(1, count.min()))):
        bad: list[list[int]] = np.argwhere(cells).tolist()
        if bad:
            first = [dim[i] for dim, i in zip(ends, bad[0], strict=True)]
            elements = sum(math.prod(dim[i + 1] - dim[i] for dim, i in zip(ends, cell, strict=True)) for cell in bad)
            names = [
                name for name, at in chunks
                if all(begin <= i < end for i, begin, end in zip(first, at.offset, at.end, strict=True))
            ]  # fmt: skip
            listed = f" ({', '.join(names)})" if names else ""
            yield not names, f"'{stored.name}': {what} {elements:,} of its elements, the first at {first}{listed}"


def _range(at: Chunk) -> str:
    """``[0:4, 8:16]``, as Python slices it."""
    return f"[{', '.join(f'{begin}:{end}' for begin, end in zip(at.offset, at.end, strict=True))}]"
