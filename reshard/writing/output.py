"""The content of an output, in whatever format: its weight files, the small files beside them, and its manifest.

The format says how files are named and what they hold. reshard's own form also has small files of each rank, and ranks
can be added to it; one full Hugging Face checkpoint has no manifest, and is the original's files again if the source
knows them. ``rewrite.py`` writes an output.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from reshard.formats.files.checkpoint import ADAPTER, ADAPTER_CONFIG, MODEL
from reshard.formats.files.chunks import chunks_metadata
from reshard.formats.files.containers import CHUNKS, SAFETENSORS, Around, container_of
from reshard.formats.files.layout import Layout, Tensor
from reshard.formats.files.manifest import INTACT_FILE, MANIFEST, Identity
from reshard.formats.files.safetensors import DTYPE_BITS, tensor_bytes
from reshard.formats.notation.architecture import without_numbers
from reshard.formats.notation.format import MODULES, PUBLISHED, SOURCE_NAMES, Format
from reshard.formats.notation.format_file import HUGGING_FACE, OWN, in_modules
from reshard.mesh.plan import Plan
from reshard.model.model import in_order
from reshard.move.jobs import FilePlan
from reshard.move.moves import INTACT_RANK
from reshard.placement.arrangement import arrangement_of
from reshard.source.completeness import check_stored
from reshard.source.source import Source
from reshard.source.written_names import published_names, rank_names
from reshard.writing.chunks import ChunkFiles

if TYPE_CHECKING:
    from reshard.source.training import Affix

DEFAULT_SHARD_SIZE = 5_000_000_000


class Output:
    """A source in a format, as it is written: an arrangement of its model, divided into files."""

    def __init__(
        self,
        source: Source,
        plan: Plan,
        format: Format,
        max_shard_size: int | None = None,
        *,
        ranks: Sequence[int] | None = None,
        added_to: Path | None = None,
        names: str | None = SOURCE_NAMES,
        state: Affix | None = None,
        written: Counter[int] | None = None,
    ) -> None:
        """The folders of ``ranks`` are all of an output, or are ``added_to`` those in a folder.

        Without ``max_shard_size`` a full checkpoint is the original's files again, if the source knows them and they
        have the ``names`` that are asked for: ``source``, ``published`` or ``modules``; with None, the model's own.
        ``state`` is the kind of states that are written, of which ``written`` files of each rank are there.
        """
        self.source, self.plan, self.format = source, plan, format
        record, is_full = source.record, format is HUGGING_FACE
        wanted = (record.names or PUBLISHED) if names == SOURCE_NAMES else names or PUBLISHED
        is_spelled_so = (record.names or PUBLISHED) == wanted and not (
            record.is_wrapped and (source.checkpoint is not None or names != SOURCE_NAMES)
        )
        renamed = published_names(source) if is_full and names == PUBLISHED else {}
        self.names = format.spelling
        """The spelling of its names, if it is not the published one."""
        self.note: str | None = None
        """A sentence on its names, if they are not those of its source."""
        if format is OWN:
            renamed, self.names, self.note = rank_names(source, names)
        self.is_restored = is_full and max_shard_size is None and bool(record.files) and is_spelled_so and not renamed
        spelled = in_modules(format) if is_full and wanted == MODULES else format
        # a loader asks for each name that was saved
        is_run = source.checkpoint is None and names in {PUBLISHED, None}  # whose second names are the trainer's
        is_named = format.files.is_distributed and format.rules.keep and not is_run
        twice = source.twice if state is not None else source.aliases
        if not is_named:
            restored = {name for file in source.record.files for name in file.tensors} if self.is_restored else ()
            twice = {second: first for second, first in twice.items() if second in restored}
        self.arrangement = arrangement_of(plan, spelled, twice=twice, names=renamed)
        self.ranks = range(plan.mesh.size) if ranks is None else ranks
        """The ranks that are written."""
        self.max_shard_size, self.added_to = max_shard_size or DEFAULT_SHARD_SIZE, added_to
        self.folders = [plan.mesh.folder(rank) for rank in self.ranks] if added_to is not None else []
        """The folders of ranks that are added to an output; none, if it is written as a whole."""
        self.adapter = source.read_side_file(ADAPTER_CONFIG) if format is OWN else None
        self._state, self._written = state, Counter[int]() if written is None else written
        is_same = (source.format.name, source.format.spelling) == (format.name, format.spelling)
        if not is_same and source.training is not None and source.training.parts.states and format.files.is_distributed:
            # a training program would find each tensor of the source under the same name, and its states
            ours, others = ({each.name for each in side.stored} for side in (self.arrangement, source.arrangement))
            is_same = ours == others
        self.training = source.training if is_same or format.files.is_single else None
        self._constants = source.constants if is_same and state is None else {}
        self.left_behind = (*self._not_carried(), *(source.strays if state is None else ()))
        self.chunks = ChunkFiles(self.arrangement, format, self.training, state)
        self.rank_files: dict[int, list[FilePlan]] = {rank: [] for rank in self.ranks}
        self._tensors, self._alike = list[Tensor](), tuple[object, ...]()
        if self.is_restored:
            self.rank_files[0] = self._restored()
        for number in range(0 if self.is_restored else self.arrangement.ranks):
            if (rank := number % plan.mesh.size) in self.rank_files:
                self.rank_files[rank] += self._files_of(number)
        self.intact = list(self._intact_file())
        self.states: list[Output] = [*self._states()]
        """The training states that are written with the model, from sources of their own."""
        masters = {file.name for state in self.states for file in state.files}  # which a loader takes for the weights
        self.rank_files = {rank: [f for f in files if f.name not in masters] for rank, files in self.rank_files.items()}
        self.files: list[FilePlan] = [file for files in (*self.rank_files.values(), self.intact) for file in files]
        """The weight files of the model."""
        self.all_files = [file for output in (self, *self.states) for file in output.files]
        """The weight files, also of states."""

    @cached_property
    def identity(self) -> Identity:
        """The facts that all its shards share."""
        return dataclasses.replace(self.source.identity(self.plan), names=self.names)

    # ---------------------------------------------------------------------------------------------------- weight files

    def _restored(self) -> list[FilePlan]:
        """The original's files. Raises MismatchError unless their headers have exactly the tensors of the shards."""
        files = self.source.record.files
        infos = {name: info for file in files for name, info in file.tensors.items()}
        check_stored(self.arrangement, [infos], self.source.path / MANIFEST)
        tensors = ([Tensor(t.name, t.dtype, t.shape, t.nbytes) for t in file.tensors.values()] for file in files)
        return [FilePlan(f.name, 0, f.layout, f.checksum, own) for f, own in zip(files, tensors, strict=True)]

    def _files_of(self, rank: int) -> Iterator[FilePlan]:
        """The files of a rank, or those with a number of chunks."""
        alike = self.arrangement.alike(rank)
        if alike != self._alike:  # else they share the records: there may be a million
            stored_shapes = sorted(self.arrangement.tensors_of(rank), key=lambda each: -DTYPE_BITS[each[0].dtype])
            self._tensors = [
                Tensor(name := stored.name_on(rank), stored.dtype, shape, tensor_bytes(name, stored.dtype, shape))
                for stored, shape in stored_shapes
            ]
        self._alike, tensors = alike, self._tensors
        constants = self.arrangement.fixed_of(rank, self._constants)
        files, kind = self.format.files, self._state.kind if self._state is not None else None
        if kind is None or kind in files.masters:
            kind = files.weights
        largest = -1 if files.is_single else self.max_shard_size if files.has_parts else 1 << 62
        parts = partition(tensors, largest)
        for number, part in enumerate(parts):
            if part or self.format.plain:
                index = self._written[rank] if files.is_distributed else number
                tensor_name = part[0].name if part else ""
                name = files.name_of(self.plan.mesh, rank, index, len(parts), tensor=tensor_name, kind=kind)
                self._written[rank] += 1
                if self.adapter is not None:
                    name = name.replace(MODEL, ADAPTER)
                layout = self._layout(name, rank, part)
                if constants:
                    fixed = ((offset, constants[tensor]) for tensor, offset in layout.places if tensor in constants)
                    layout = dataclasses.replace(layout, fixed=(*layout.fixed, *fixed))
                yield FilePlan(name, rank, layout, tensors=part)

    def _layout(self, name: str, rank: int, tensors: Sequence[Tensor]) -> Layout:
        """The layout of a file of these tensors, in the container that its name tells."""
        container, of = container_of(name), self.format.container
        if container is CHUNKS:
            return self.chunks.layout(name, rank, tensors)
        metadata = self._metadata(rank, tensors) if container is SAFETENSORS else {}
        return container.build(tensors, Around(metadata, of.inside, of.entries, self.format.files.is_single))

    def _metadata(self, rank: int, tensors: Sequence[Tensor]) -> dict[str, str]:
        if self.format is HUGGING_FACE:
            return {"format": "pt"}
        places: Mapping[str, int] = {}
        if self.format is OWN and len(self.plan.boxes(rank)) < len(self.plan.laid):
            places = self._places  # without a manifest, merge orders the tensors by them
        facts = self.identity.metadata(rank % self.plan.mesh.size, [places[name] for name, *_ in tensors if places])
        chunks = self.arrangement.chunks
        return facts if chunks is None else facts | chunks_metadata({n: chunks[n][rank].offset for n, *_ in tensors})

    @cached_property
    def _places(self) -> Mapping[str, int]:
        """The positions of stored tensors among all tensors of the model."""
        places = {name: place for place, (name, _, _) in enumerate(in_order(self.plan.model.tensors))}
        return {stored.name: places[stored.atoms[0].tensor] for stored in self.arrangement.stored}

    def _intact_file(self) -> Iterator[FilePlan]:
        """The file with the tensors that the program does not store as they are, if there are any."""
        changed = {kind for kind, portions in self.arrangement.parts.items() if any(part.function for part in portions)}
        tensors = [
            Tensor(name, kind.dtype, kind.shape, tensor_bytes(name, kind.dtype, kind.shape))
            for name, kind, _ in self.plan.model.tensors
            if kind in changed or name in self.arrangement.dropped
        ]
        if tensors:
            layout = SAFETENSORS.build(tensors, Around({"format": "pt"}))
            yield FilePlan(INTACT_FILE, INTACT_RANK, layout, tensors=tensors)

    # ------------------------------------------------------------------------------- a training program's checkpoint

    def _not_carried(self) -> tuple[str, ...]:
        """Return the names of things that the source has besides the model and this output lacks."""
        if not self.source.left_behind:
            return ()
        from reshard.formats.files.deepspeed import is_setting  # rarely needed

        if self.format.files.is_single and self.training is not None:
            parts = self.training.parts
            states = {affix: names for affix, names in parts.states.items() if affix.kind is None}
            rest = tuple(name for name in parts.rest if not is_setting(name))
            return parts._replace(states=states, rest=rest).words()
        carried, of_constants = ({*map(without_numbers, part)} for part in (self._constants, self.source.constants))
        is_all = self.training is None
        return tuple(
            part for part in self.source.left_behind if part not in carried and (is_all or part in of_constants)
        )

    def _states(self) -> Iterator[Output]:
        """Yield the training states that are re-sharded with the model: an output for each kind, on the mesh of the
        model.
        """
        if self.training is None or self._state is not None:
            return
        from reshard.placement.program_plan import program_plan  # rarely needed
        from reshard.source.opening_programs import states_of

        for affix, state in states_of(self.source):
            if self.format.files.is_single and affix.kind is None:
                continue
            format = self.format if affix.kind in self.format.files.masters else self.format.of_states
            plan = program_plan(state.model, format, self.plan.mesh, padding=self.plan.padding or None)
            yield Output(state, plan, format, self.max_shard_size, ranks=self.ranks, state=affix, written=self._written)


def partition(tensors: Iterable[Tensor], max_size: int) -> list[list[Tensor]]:
    """Divide tensors, in order, into files of at most ``max_size`` bytes of data, or of one tensor that is larger."""
    files, room = list[list[Tensor]]([[]]), max_size
    for tensor in tensors:
        if files[-1] and tensor.nbytes > room:
            files.append([])
            room = max_size
        files[-1].append(tensor)
        room -= tensor.nbytes
    return files
