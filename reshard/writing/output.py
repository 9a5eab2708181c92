"""The content of an output, in whatever format: its weight files, the small files beside them, and its manifest.

The format says how files are named and what they hold. reshard's own form also has small files of each rank, and ranks
can be added to it; one full Hugging Face checkpoint has no manifest, and is the original's files again if the source
knows them. ``rewrite.py`` writes an output.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from reshard.formats.documents import json_bytes
from reshard.formats.errors import CheckpointError, PlanError, brief
from reshard.formats.files.checkpoint import ADAPTER, ADAPTER_CONFIG, CONFIG, METADATA, MODEL
from reshard.formats.files.chunks import Chunk, chunks_metadata, whole_shape
from reshard.formats.files.containers import CHUNKS, SAFETENSORS, Around, container_of
from reshard.formats.files.layout import Layout, Tensor
from reshard.formats.files.manifest import INTACT_FILE, MANIFEST, Identity
from reshard.formats.files.safetensors import DTYPE_BITS, tensor_bytes
from reshard.formats.notation.architecture import without_numbers
from reshard.formats.notation.architecture_files import find_architecture
from reshard.formats.notation.format import MODULES, PUBLISHED, SOURCE_NAMES, Format, Settings
from reshard.formats.notation.format_file import HUGGING_FACE, OWN, in_modules
from reshard.formats.notation.spellings import Spellings
from reshard.formats.store import FilePath
from reshard.mesh.plan import Plan, rank_config
from reshard.model.model import Model, in_order
from reshard.move.jobs import FilePlan
from reshard.move.moves import INTACT_RANK
from reshard.placement.arrangement import arrangement_of
from reshard.placement.program_plan import made_config, program_config
from reshard.placement.stored import stacked
from reshard.source.completeness import check_stored
from reshard.source.source import Source

if TYPE_CHECKING:
    from reshard.formats.files.dcp import Blob
    from reshard.source.training import Affix

DEFAULT_SHARD_SIZE = 5_000_000_000


def _is_in_modules(model: Model, where: FilePath) -> bool:
    """Whether all tensors already have the names of transformers' modules, by all lines of the model's type."""
    with suppress(PlanError):
        spellings = Spellings(find_architecture(model.config, where), model.config)
        return all(spellings.in_modules(kind.name) == kind.name for kind in model.kinds)
    return False


def published_names(model: Model, where: FilePath) -> dict[str, str]:
    """The published names of tensors that have other ones, by all lines of the model's type. Raises CheckpointError for
    a tensor that is several in published checkpoints.
    """
    with suppress(PlanError):
        spellings = Spellings(find_architecture(model.config, where), model.config)
        if joined := next((kind.name for kind in model.kinds if spellings.is_joined(kind.name)), None):
            raise CheckpointError(
                f"'{joined}' is a tensor of transformers' modules, and not all names here can be read as theirs",
                "leave --names out: the names stay",
            )
        if not all(spellings.published(kind.name) in {kind.name, None} for kind in model.kinds):
            published = ((tensor.name, spellings.published(tensor.name)) for tensor in model.tensors)
            return {name: found for name, found in published if found is not None and found != name}
    return {}


class Output:
    """A source in a format, as it is written: an arrangement of its model, divided into files.

    ``ranks`` are those that are written. ``folders`` are the folders of ranks that are added to an output; none, if it
    is written as a whole. ``files`` are the weight files of the model, ``states`` the training states that are written
    with it, from sources of their own. ``documents`` are the small files besides those of the source and of ranks,
    without the manifest.
    """

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
        renamed = published_names(plan.model, source.path) if is_full and names == PUBLISHED else {}
        is_restored = is_full and max_shard_size is None and bool(record.files) and is_spelled_so and not renamed
        is_spelled = is_full and wanted == MODULES and not _is_in_modules(plan.model, source.path)
        spelled = in_modules(format) if is_spelled else format
        # a loader asks for each name that was saved
        is_run = source.checkpoint is None and names in {PUBLISHED, None}  # whose second names are the trainer's
        is_named = format.files.is_distributed and format.rules.keep and not is_run
        twice = source.twice if state is not None else source.aliases
        if not is_named:
            restored = {name for file in source.record.files for name in file.tensors} if is_restored else ()
            twice = {second: first for second, first in twice.items() if second in restored}
        self.arrangement = arrangement_of(plan, spelled, twice=twice, names=renamed)
        self.ranks = range(plan.mesh.size) if ranks is None else ranks
        self.max_shard_size, self.added_to = max_shard_size or DEFAULT_SHARD_SIZE, added_to
        self.folders = [plan.mesh.folder(rank) for rank in self.ranks] if added_to is not None else []
        self._adapter = source.read_side_file(ADAPTER_CONFIG) if format is OWN else None
        self._state, self._written = state, Counter[int]() if written is None else written
        is_same = (source.format.name, source.format.spelling) == (format.name, format.spelling)
        if not is_same and source.training is not None and source.training.parts.states and format.files.is_distributed:
            # a training program would find each tensor of the source under the same name, and its states
            ours, others = ({each.name for each in side.stored} for side in (self.arrangement, source.arrangement))
            is_same = ours == others
        self._training = source.training if is_same or format.files.is_single else None
        self._constants = source.constants if is_same and state is None else {}
        self.left_behind = (*self._not_carried(), *(source.strays if state is None else ()))
        evaluate, stacks = plan.model.sizes.evaluate, format.rules.stacks
        self._stacks = [stack for stack in stacks if stack.when is None or evaluate(stack.when, {})]
        self._chunks: dict[str, tuple[str, list[tuple[Chunk, Blob]]]] = {}
        self._objects: dict[str, Blob] = {}
        self.rank_files: dict[int, list[FilePlan]] = {rank: [] for rank in self.ranks}
        self._last = list[Tensor]()
        if is_restored:
            self.rank_files[0] = self._restored()
        for number in range(0 if is_restored else self.arrangement.ranks):
            if (rank := number % plan.mesh.size) in self.rank_files:
                self.rank_files[rank] += self._files_of(number)
        self.intact = list(self._intact_file())
        self.states: list[Output] = [*self._states()]
        masters = {file.name for state in self.states for file in state.files}  # which a loader takes for the weights
        self.rank_files = {rank: [f for f in files if f.name not in masters] for rank, files in self.rank_files.items()}
        self.files: list[FilePlan] = [file for files in (*self.rank_files.values(), self.intact) for file in files]
        self.all_files = [file for output in (self, *self.states) for file in output.files]
        """The weight files, also of states."""
        self.rank_documents = {rank: self._documents_of(rank) for rank in self.ranks} if format is OWN else {}
        self.documents: dict[str, bytes] = dict(self._documents(is_restored)) if state is None else {}

    @cached_property
    def identity(self) -> Identity:
        """The facts that all its shards share."""
        return self.source.identity(self.plan)

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
        stored_shapes = sorted(self.arrangement.tensors_of(rank), key=lambda stored: -DTYPE_BITS[stored[0].dtype])
        tensors = [Tensor(name := stored.name_on(rank), stored.dtype, shape, tensor_bytes(name, stored.dtype, shape))
                   for stored, shape in stored_shapes]  # fmt: skip
        if tensors == self._last:  # ranks that hold alike share the records: there may be a million
            tensors = self._last
        self._last = tensors
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
                if self._adapter is not None:
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
            return self._chunks_of(name, rank, tensors)
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
        """The positions of tensors among all tensors of the model."""
        return {name: place for place, (name, _, _) in enumerate(in_order(self.plan.model.tensors))}

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

        if self.format.files.is_single and self._training is not None:
            parts = self._training.parts
            states = {affix: names for affix, names in parts.states.items() if affix.kind is None}
            rest = tuple(name for name in parts.rest if not is_setting(name))
            return parts._replace(states=states, rest=rest).words()
        carried, of_constants = ({*map(without_numbers, part)} for part in (self._constants, self.source.constants))
        is_all = self._training is None
        return tuple(
            part for part in self.source.left_behind if part not in carried and (is_all or part in of_constants)
        )

    def _states(self) -> Iterator[Output]:
        """Yield the training states that are re-sharded with the model: an output for each kind, on the mesh of the
        model.
        """
        if self._training is None or self._state is not None:
            return
        from reshard.placement.program_plan import program_plan  # rarely needed
        from reshard.source.opening_programs import states_of

        for affix, state in states_of(self.source):
            if self.format.files.is_single and affix.kind is None:
                continue
            format = self.format if affix.kind in self.format.files.masters else self.format.of_states
            plan = program_plan(state.model, format, self.plan.mesh, padding=self.plan.padding or None)
            yield Output(state, plan, format, self.max_shard_size, ranks=self.ranks, state=affix, written=self._written)

    def _chunks_of(self, name: str, rank: int, tensors: Sequence[Tensor]) -> Layout:
        """The layout of a file of chunks; those of stacked tensors are chunks of one larger tensor."""
        from reshard.formats.files.dcp import Blob  # rarely needed

        training, state, chunks, contents = self._training, self._state, [], dict[str, bytes]()
        entries = list[tuple[str, str, Chunk | None]]()
        for tensor, dtype, _, nbytes in tensors:
            key, places = stacked(self._stacks, tensor)
            if training is not None and state is None:  # as it was, if it was there, with what is around it
                key = training.parts.model.get(key, key)
            elif training is not None and state is not None:
                key = training.parts.states[state].get(key, f"{state.prefix}{key}{state.suffix}")
            stored_chunk = (self.arrangement.chunks or {})[tensor][rank]
            at = Chunk((*places, *stored_chunk.offset), (*(1 for _ in places), *stored_chunk.shape))
            entries.append((key, dtype, at))
            chunks.append(Tensor(tensor, dtype, at.shape, nbytes))
        if not self._chunks and state is None:  # the first file has what is no tensor of the model's
            others: Iterable[tuple[str, Chunk | None, bytes]] = training.archives() if training is not None else ()
            for key, chunk, content in itertools.chain(self._extra_states(), others):
                dtype = training.saved.tensors[key].dtype if training is not None and chunk is not None else ""
                entries.append((key, dtype, chunk))
                contents[f"{len(contents)} {key}"] = content
        laid = CHUNKS.build(chunks, Around(objects=contents))
        for (key, dtype, chunk), place in zip(entries, laid.ranges.values(), strict=True):
            blob = Blob(Path(name.rpartition("/")[2]), *place)
            if chunk is None:
                self._objects[key] = blob
            else:
                self._chunks.setdefault(key, (dtype, []))[1].append((chunk, blob))
        return laid

    def _extra_states(self) -> Iterator[tuple[str, None, bytes]]:
        """Yield empty states of modules that expect one: a list of None for each module."""
        from reshard.formats.files.dcp import object_bytes  # rarely needed

        indices: dict[str, list[tuple[int, ...]]] = {}
        for stored in self.arrangement.stored:
            if any(pattern.match(stored.name) is not None for pattern in self.format.container.extra_state):
                key, places = stacked(self._stacks, stored.name)
                indices.setdefault(key.removesuffix("weight") + "_extra_state", []).append(places or (0,))
        for key, spots in indices.items():
            count = ".".join(str(max(numbers) + 1) for numbers in zip(*spots, strict=True))
            yield from ((f"{key}/shard_{'.'.join(map(str, at))}_{count}", None, object_bytes([None])) for at in spots)

    # ----------------------------------------------------------------------------------------------------- small files

    def _documents_of(self, rank: int) -> dict[str, bytes]:
        """A rank's config.json, the one of an adapter, and its index."""
        folder = self.plan.mesh.folder(rank)
        documents = {f"{folder}/{CONFIG}": json_bytes(rank_config(self.plan, rank)) + b"\n"}
        if self._adapter is not None:
            documents[f"{folder}/{ADAPTER_CONFIG}"] = self._adapter
        return documents | dict(self._index(self.rank_files[rank], folder))

    def _index(self, files: Sequence[FilePlan], folder: str = "") -> Iterator[tuple[str, bytes]]:
        """The index of several files, as transformers writes it."""
        name = self.format.files.index
        if name is None or len(files) < 2:
            return
        tensors = [(file, tensor) for file in files if file.rank != INTACT_RANK for tensor in file.tensors]
        weight_map = {tensor.name: file.name.rpartition("/")[2] for file, tensor in tensors}
        total = sum(tensor.nbytes for _, tensor in tensors)
        document = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
        yield name.format(folder=folder), (json.dumps(document, indent=2) + "\n").encode()

    def _documents(self, is_restored: bool) -> Iterator[tuple[str, bytes]]:
        """Yield the files that the program needs beside the weights and the source's own: its config file, an index."""
        files, settings, record = self.format.files, self.format.settings, self.source.record
        if is_restored:
            yield from [(record.index.name, record.index.content)] if record.index is not None else ()
            return
        if files.tracker is not None:
            yield files.tracker, str(files.folder).encode()
        if settings is not None:
            content = self.source.read_side_file(settings.file)
            if content is None:
                yield settings.file, json_bytes(program_config(settings, self.plan.model)) + b"\n"
            else:
                self._check_own(settings, content)
        if files.is_single:
            from reshard.formats.files.deepspeed import universal_documents  # rarely needed

            shapes = {stored.name: shape for stored, shape in self.arrangement.tensors_of(0)}
            states = {tensor.name for output in self.states for file in output.files for tensor in file.tensors}
            shared = {at.stored.name: self.arrangement.atoms[atom].stored.name for atom, at in self.arrangement.copies}
            saved = self._training.saved if self._training is not None else None
            for name, content in universal_documents(shapes, states, shared, saved):
                yield files.place + name, content
        else:
            for name, document in self.format.container.documents.items():
                from reshard.formats.files.dcp import object_bytes  # rarely needed

                content = object_bytes(document) if name.endswith(".pt") else json_bytes(document) + b"\n"
                yield files.place + name, content
        if self._chunks:
            from reshard.formats.files.dcp import build_metadata  # rarely needed

            tensors = {
                key: (dtype, whole_shape(at for at, _ in chunks), chunks)
                for part in (self, *self.states)
                for key, (dtype, chunks) in part._chunks.items()
            }
            # keys lead to a name in the dictionaries of a trainer's, as they were
            keys = self.source.training.saved.keys if self.source.training is not None else {}
            yield files.place + METADATA, build_metadata(tensors, self._objects, lambda name: keys.get(name, (name,)))
        if self.format is not OWN:
            yield from self._index(self.files)

    def _check_own(self, settings: Settings, content: bytes) -> None:
        """Raise PlanError if the source has a program's config file that describes another model."""
        stored = [(tensor.name, tensor.dtype, shape) for tensor, shape in self.arrangement.tensors_of(0)]
        planned, stated = (
            made_config(settings, document, stored, self.plan.mesh.size)
            for document in (program_config(settings, self.plan.model), json.loads(content))
        )
        for key in planned:
            if planned[key] != stated.get(key):
                raise PlanError(
                    f"{settings.file} of the source makes '{key}' {brief(stated.get(key))}, config.json "
                    f"{brief(planned[key])}",
                    f"remove {settings.file} from the source, and it is written anew",
                )


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
