"""The files of chunks of a distributed checkpoint, and ``.metadata``, which lists the chunks of each tensor."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from reshard.formats.files.chunks import Chunk, whole_shape
from reshard.formats.files.containers import CHUNKS, Around
from reshard.formats.files.layout import Layout, Tensor
from reshard.formats.notation.format import Format, Pattern
from reshard.placement.arrangement import Arrangement
from reshard.placement.stored import stacked

if TYPE_CHECKING:
    from reshard.formats.files.dcp import Blob
    from reshard.source.training import Affix, Training


class ChunkFiles:
    """The files of chunks of a model, or of a ``state`` of its tensors, and the list of what lies where in them.

    ``training`` is the trainer's checkpoint whose names the tensors keep, if there is one.
    """

    def __init__(
        self, arrangement: Arrangement, format: Format, training: Training | None, state: Affix | None
    ) -> None:
        self.arrangement, self.format, self.training, self.state = arrangement, format, training, state
        evaluate = arrangement.plan.model.sizes.evaluate
        self.stacks = [each for each in format.rules.stacks if each.when is None or evaluate(each.when, {})]
        self.chunks: dict[str, tuple[str, list[tuple[Chunk, Blob]]]] = {}
        """The dtype of each tensor, and its chunks."""
        self.objects: dict[str, Blob] = {}

    def layout(self, name: str, rank: int, tensors: Sequence[Tensor]) -> Layout:
        """The layout of a file of chunks; those of stacked tensors are chunks of one larger tensor."""
        from reshard.formats.files.dcp import Blob  # rarely needed

        training, state, chunks, contents = self.training, self.state, [], dict[str, bytes]()
        entries = list[tuple[str, str, Chunk | None]]()
        for tensor, dtype, _, nbytes in tensors:
            key, places = stacked(self.stacks, tensor)
            if training is not None and state is None:  # as it was, if it was there, with what is around it
                key = training.parts.model.get(key, key)
            elif training is not None and state is not None:
                key = training.parts.states[state].get(key, f"{state.prefix}{key}{state.suffix}")
            stored_chunk = (self.arrangement.chunks or {})[tensor][rank]
            at = Chunk((*places, *stored_chunk.offset), (*(1 for _ in places), *stored_chunk.shape))
            entries.append((key, dtype, at))
            chunks.append(Tensor(tensor, dtype, at.shape, nbytes))
        if not self.chunks and state is None:  # the first file has what is no tensor of the model's
            others: Iterable[tuple[str, Chunk | None, bytes]] = training.archives() if training is not None else ()
            for key, chunk, content in itertools.chain(self._extra_states(), others):
                dtype = training.saved.tensors[key].dtype if training is not None and chunk is not None else ""
                entries.append((key, dtype, chunk))
                contents[f"{len(contents)} {key}"] = content
        laid = CHUNKS.build(chunks, Around(objects=contents))
        for (key, dtype, chunk), place in zip(entries, laid.ranges.values(), strict=True):
            blob = Blob(Path(name.rpartition("/")[2]), *place)
            if chunk is None:
                self.objects[key] = blob
            else:
                self.chunks.setdefault(key, (dtype, []))[1].append((chunk, blob))
        return laid

    def _extra_states(self) -> Iterator[tuple[str, None, bytes]]:
        """Yield empty states of modules that expect one: a list of None for each module."""
        from reshard.formats.files.dcp import object_bytes  # rarely needed

        indices: dict[str, list[tuple[int, ...]]] = {}
        modules = [(Pattern(old), Pattern(new)) for old, new in self.format.container.extra_state.items()]
        for stored, (old, new) in itertools.product(self.arrangement.stored, modules):
            if (words := old.match(stored.name)) is not None:
                key, places = stacked(self.stacks, f"{new.fill(words)}._extra_state")
                indices.setdefault(key, []).append(places or (0,))
        for key, spots in indices.items():
            count = ".".join(str(max(numbers) + 1) for numbers in zip(*spots, strict=True))
            yield from ((f"{key}/shard_{'.'.join(map(str, at))}_{count}", None, object_bytes([None])) for at in spots)


def chunk_metadata(parts: Sequence[ChunkFiles], keys: Mapping[str, tuple[str | int, ...]]) -> bytes:
    """The content of ``.metadata`` for the files of a model and of its states. ``keys`` lead to a name in the
    dictionaries of a trainer's, as they were.
    """
    from reshard.formats.files.dcp import build_metadata  # rarely needed

    tensors = {
        key: (dtype, whole_shape(at for at, _ in chunks), chunks)
        for part in parts
        for key, (dtype, chunks) in part.chunks.items()
    }
    return build_metadata(tensors, parts[0].objects, lambda name: keys.get(name, (name,)))
