"""The files of another program's format: all ranks in one folder, named as the program names them."""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence

from formats.documents import json_bytes
from formats.errors import PlanError, brief
from formats.files.checkpoint import METADATA
from formats.files.chunks import Chunk, chunks_metadata, whole_shape
from formats.files.dcp import NewChunk, build_chunks, build_metadata, object_bytes
from formats.files.dcp import Stored as Chunked
from formats.files.safetensors import DTYPE_BITS, build_header, tensor_bytes
from formats.files.sharded import KEPT, FileRecord
from formats.files.torch_zip import build_archive
from formats.notation.format import Format
from formats.notation.format_rules import Settings
from reshard.move.moves import KEPT_RANK
from reshard.placement.arrangement import Arrangement, arrangement_of
from reshard.placement.program_config import made_config, program_config
from reshard.placement.program_plan import program_plan
from reshard.placement.stacks import stacked
from reshard.placement.stored import Placed
from reshard.publishing.journal import Finished
from reshard.source.constants import in_general
from reshard.source.distributed_source import Affix, Training
from reshard.source.opening_programs import states_of
from reshard.source.program_source import DISTCP
from reshard.source.source import Source
from reshard.writing.outputs import Output
from reshard.writing.shard_files import NewFile, ShardFile, index_text, new_file, partition


class ProgramFiles(Output):
    """The weight files of each rank, and the small files that the program reads beside them."""

    def __init__(
        self,
        source: Source,
        arrangement: Arrangement,
        format: Format,
        ranks: tuple[int, ...],
        max_shard_size: int,
        *,
        state: Affix | None = None,
        written: Counter[int] | None = None,
    ) -> None:
        """``state`` is the kind of states that are written, of which ``written`` files of each rank are there."""
        self._state, self._written = state, Counter[int]() if written is None else written
        is_same = source.format is not None and source.format.name == format.name
        training = source.training if is_same else None
        self._constants = source.constants if is_same and state is None else {}
        carried, of_constants = {*map(in_general, self._constants)}, {*map(in_general, source.constants)}
        self.left_behind = tuple(
            each for each in source.left_behind if each not in carried and (training is None or each in of_constants)
        )
        self._names = self._stored_names(training)
        self._others = list(training.archives()) if training is not None and state is None else []
        evaluate, stacks = arrangement.plan.model.sizes.evaluate, format.rules.stacks
        self._stacks = [stack for stack in stacks if stack.when is None or evaluate(stack.when, {})]
        self._chunks: dict[str, tuple[str, list[Chunked]]] = {}
        self._objects: dict[str, Chunked] = {}
        self.source, self.plan, self.arrangement = source, arrangement.plan, arrangement
        self.format: Format = format
        self.is_cut_by_size = format.files.has_parts
        self.ranks, self.max_shard_size = ranks, max_shard_size
        self.identity = source.identity(self.plan)
        self._shards: list[ShardFile] = []
        self._files: dict[int, list[NewFile]] = {rank: [] for rank in ranks}
        for number in range(arrangement.ranks):
            self._files[number % self.plan.mesh.size] += self._files_of(number)
        self._kept = list(self._kept_file())
        self.files = [file for files in (*self._files.values(), self._kept) for file in files]
        self.states: list[ProgramFiles] = [
            ProgramFiles(of, self._arranged(of), format, ranks, max_shard_size, state=affix, written=self._written)
            for affix, of in (states_of(source) if training is not None and state is None else ())
        ]
        """What is re-sharded with the model: states of training, each kind on its own."""
        self.documents = dict(self._documents(source.read_side_files())) if state is None else {}
        """What the program needs beside the weights and the source's own files: its config file, an index."""

    def _stored_names(self, training: Training | None) -> Callable[[str], str]:
        """The name in the files of a tensor of the format's: as it was, if it was there, with what is around it."""
        if training is None:
            return lambda name: name
        parts, state = training.parts, self._state
        if state is None:
            return lambda name: parts.model.get(name, name)
        return lambda name: parts.states[state].get(name, f"{state.before}{name}{state.behind}")

    def _arranged(self, source: Source) -> Arrangement:
        """States as they are stored on the mesh of the model."""
        padding = self.plan.padding or None
        return arrangement_of(program_plan(source.model, self.format, self.plan.mesh, padding=padding), self.format)

    def _files_of(self, rank: int) -> Iterator[NewFile]:
        """The files of a rank, or those with a number of chunks."""
        held = sorted(self.arrangement.held(rank), key=lambda found: -DTYPE_BITS[found[0].dtype])
        tensors = [
            (each.name_on(rank), each.dtype, shape, tensor_bytes(each.name, each.dtype, shape)) for each, shape in held
        ]
        constants = {
            each.name_on(rank): self._constants.get(each.name) or each.constant_bytes(shape)
            for each, shape in held
            if each.constant
        }
        zeros = {each.name for each, _ in held if each.atoms and Placed(each, 0).is_zero(rank)}
        constants |= {name: bytes(size) for name, _, _, size in tensors if name in zeros}
        shards: Sequence[ShardFile] = partition(
            tensors, self.max_shard_size if self.format.files.has_parts else 1 << 62
        )
        for part, shard in enumerate(shards):
            if not shard.tensors:
                continue
            number = self._written[rank] if self.format.files.is_distributed else part
            self._written[rank] += 1
            file = self._file(self.format.files.name_of(self.plan.mesh, rank, number, len(shards)), rank, shard)
            fixed = tuple((offset, constants[tensor]) for tensor, offset in file.places() if tensor in constants)
            yield dataclasses.replace(file, fixed=(*file.fixed, *fixed))

    def _file(self, name: str, rank: int, shard: ShardFile) -> NewFile:
        """A file of these tensors, in the container that its name tells."""
        named = dataclasses.replace(shard, name=name)
        self._shards.append(named)
        if name.endswith(DISTCP):
            return self._chunk_file(name, rank, shard)
        if not name.endswith((".pth", ".pt")):
            header = build_header(shard.tensors, self._metadata(rank, shard))
            return new_file(named, "", rank, header)
        tensors = [(*tensor, size) for tensor, size in zip(shard.tensors, shard.sizes, strict=True)]
        archive = build_archive(tensors, self.format.container.inside, self.format.container.entries)
        return NewFile(name, rank, b"", archive.size, lambda: archive.places, fixed=archive.fixed, crcs=archive.crcs)

    def _chunk_file(self, name: str, rank: int, shard: ShardFile) -> NewFile:
        """A file of chunks; those of stacked tensors are chunks of one larger tensor."""
        places_of, keys, chunks = self.arrangement.chunks or {}, {}, []
        for (tensor, dtype, _), nbytes in zip(shard.tensors, shard.sizes, strict=True):
            key, places = stacked(self._stacks, tensor)
            own = places_of[tensor][rank]
            at = Chunk((*places, *own.offset), (*(1 for _ in places), *own.shape))
            keys[tensor] = self._names(key), dtype, at
            chunks.append(NewChunk(tensor, dtype, at, nbytes))
        objects = {} if self._objects or self._state is not None else self._extra_states()
        others, self._others = self._others, []
        carried = {f"{number} {key}": content for number, (key, _, content) in enumerate(others)}
        laid = build_chunks(chunks, objects | carried)
        file = name.rpartition("/")[2]
        for tensor, (key, dtype, at) in keys.items():
            self._chunks.setdefault(key, (dtype, []))[1].append(Chunked(at, file, *laid.ranges[tensor]))
        self._objects |= {key: Chunked(None, file, *laid.ranges[key]) for key in objects}
        for number, (key, chunk, _) in enumerate(others):
            place = Chunked(chunk, file, *laid.ranges[f"{number} {key}"])
            if chunk is None:
                self._objects[key] = place
            else:
                self._chunks.setdefault(key, (self._dtype_of(key), []))[1].append(place)
        return NewFile(name, rank, b"", laid.size, lambda: laid.places, fixed=laid.fixed, crcs=laid.crcs)

    def _extra_states(self) -> dict[str, bytes]:
        """What stands for the states of modules that have none: a list of None for each module."""
        found: dict[str, list[tuple[int, ...]]] = {}
        for stored in self.arrangement.stored:
            if any(pattern.match(stored.name) is not None for pattern in self.format.container.extra_state):
                key, places = stacked(self._stacks, stored.name)
                found.setdefault(key.removesuffix("weight") + "_extra_state", []).append(places or (0,))
        nothing = object_bytes([None])
        counts = {key: ".".join(str(max(of) + 1) for of in zip(*at, strict=True)) for key, at in found.items()}
        return {
            f"{key}/shard_{'.'.join(map(str, at))}_{counts[key]}": nothing for key, of in found.items() for at in of
        }

    def _saved(self) -> Iterator[tuple[str, bytes]]:
        """The files beside the weights that are the same for all models, and what says where the chunks lie."""
        folder = self.format.files.place
        for name, content in self.format.container.documents.items():
            yield folder + name, object_bytes(content) if name.endswith(".pt") else json_bytes(content) + b"\n"
        if self._chunks:
            tensors = {
                key: (dtype, whole_shape(at for at, *_ in chunks if at is not None), chunks)
                for part in (self, *self.states)
                for key, (dtype, chunks) in part._chunks.items()
            }
            yield folder + METADATA, build_metadata(tensors, self._objects, self._keys_of)

    def _keys_of(self, name: str) -> tuple[str | int, ...]:
        """The keys that lead to a name in the dictionaries of a trainer's, as they were."""
        training = self.source.training
        return training.found.keys.get(name, (name,)) if training is not None else (name,)

    def _dtype_of(self, name: str) -> str:
        training = self.source.training
        assert training is not None
        return training.found.tensors[name].dtype

    def _documents(self, side_files: Mapping[str, bytes]) -> Iterator[tuple[str, bytes]]:
        settings, index = self.format.settings, self.format.files.index
        if self.format.files.tracker is not None:
            yield self.format.files.tracker, str(self.format.files.folder).encode()
        if settings is not None and settings.file in side_files:
            self._check_own(settings, side_files[settings.file])
        elif settings is not None:
            yield settings.file, json_bytes(program_config(settings, self.plan.model)) + b"\n"
        yield from self._saved()
        if index is not None and len(self._shards) > 1:
            yield index, index_text(self._shards).encode()

    def _check_own(self, settings: Settings, content: bytes) -> None:
        """Raise PlanError if a program's config file that the source has is not that of this model."""
        stored = [(each.name, each.dtype, shape) for each, shape in self.arrangement.held(0)]
        mine, theirs = (
            made_config(settings, document, stored, self.plan.mesh.size)
            for document in (program_config(settings, self.plan.model), json.loads(content))
        )
        for key in mine:
            if mine[key] != theirs.get(key):
                raise PlanError(
                    f"{settings.file} of the source makes '{key}' {brief(theirs.get(key))}, config.json "
                    f"{brief(mine[key])}",
                    f"remove {settings.file} from the source, and it is written anew",
                )

    def _metadata(self, rank: int, shard: ShardFile) -> dict[str, str]:
        own, chunks = self.identity.metadata(rank % self.plan.mesh.size), self.arrangement.chunks
        if chunks is None:
            return own
        return own | chunks_metadata({name: chunks[name][rank].offset for name, _, _ in shard.tensors})

    def _kept_file(self) -> Iterator[NewFile]:
        """The file with the tensors that the program does not store as they are, if there are any."""
        changed = {kind for kind, taken in self.arrangement.taken.items() if any(part.function for part in taken)}
        tensors = [
            (name, kind.dtype, kind.shape, tensor_bytes(name, kind.dtype, kind.shape))
            for name, kind, _ in self.plan.model.tensors
            if kind in changed or name in self.arrangement.dropped
        ]
        if tensors:
            (shard,) = partition(tensors, 1 << 62)
            header = build_header(shard.tensors, {"format": "pt"})
            yield new_file(dataclasses.replace(shard, name=KEPT), "", KEPT_RANK, header)

    def records(self, finished: Mapping[str, Finished], rank: int) -> Sequence[FileRecord]:
        """The records of a rank's files, all of which are finished."""
        files = [file for part in (self, *self.states) for file in part._files[rank]]
        return [finished[file.name].record(file.name) for file in files + (self._kept if rank == 0 else [])]

    def load_command(self, out: object) -> str | None:
        """The command by which the program loads the output ``out``."""
        return self.format.loading.command_of(str(out), self.plan.mesh)
