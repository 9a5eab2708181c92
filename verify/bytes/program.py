"""Compares all but the bytes of tensors in another program's format: tensors, files, headers, manifest."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import cached_property

from formats.errors import ReshardError
from formats.files.checkpoint import METADATA
from formats.files.safetensors import DTYPE_BITS
from formats.files.sharded import KEPT, MANIFEST
from reshard.placement.arrangement import Arrangement, arrangement_of
from reshard.source.opening import open_source
from reshard.source.program_source import program_files, weights_folder
from verify.bytes import folder
from verify.bytes.chunks import check_chunks
from verify.bytes.folder import boundary_problem
from verify.bytes.structure import Structure


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
        changes = [*folder.program_header_changes(self.original, self.shards, plan)]
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
        assert format is not None
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
        expected = {
            *self.original.side_files,
            *documents,
            MANIFEST,
            *(file.name for file in self.shards.files.values()),
        }
        self._check_present(expected)
        if self.missing or self.extra or self.problems:
            return
        for number in range(self._planned.ranks):
            self.problems += self._boundary_problem(number)
        self.problems += self._rules_problem()

    @cached_property
    def _planned(self) -> Arrangement:
        """What is stored, with the chunks of the mesh if there are chunks."""
        format = self.shards.format
        assert format is not None
        return self.arrangement if self.shards.chunks is None else arrangement_of(self.shards.plan, format)

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
