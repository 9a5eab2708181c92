"""A distributed checkpoint as a trainer saved it: the model, the states of its tensors, and the rest.

States are recognised by names and shapes. Each kind (such as ``exp_avg``) has the model's rules.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from reshard.formats.errors import CheckpointError, MismatchError
from reshard.formats.files.chunks import Chunk
from reshard.formats.files.dcp import Blob, Distributed, object_bytes
from reshard.formats.files.safetensors import TensorInfo
from reshard.formats.files.torch_archive import pickled_tensor
from reshard.formats.store import read_ranges
from reshard.formats.wrappers import without_wrappers
from reshard.model.naming import Spell, name_all


class Affix(NamedTuple):
    """The prefix and suffix that a training state's name has around its parameter's name."""

    prefix: str
    suffix: str

    @property
    def kind(self) -> str | None:
        """The name of an optimizer's state; None if the affix belongs to something else."""
        of_optimizer = re.search(r"(?:^|\.)state\.(\w*)", self.prefix)
        return (self.suffix[1:] or of_optimizer[1]) if of_optimizer is not None else None


class SavedParts(NamedTuple):
    """The parts of a training checkpoint, by stored names."""

    model: dict[str, str]
    """The stored name of each name of the format."""
    states: dict[Affix, dict[str, str]]
    """For each kind of state, the stored name of the state of each model tensor; it has the tensor's shape."""
    rest: tuple[str, ...]
    """All other tensors and objects."""

    def words(self) -> tuple[str, ...]:
        """The parts besides the model, in a few words."""
        tops = {stored.partition(".")[0] for stored in self.model.values()}
        words = [prefix.partition(".")[0] or f"*{behind}" for prefix, behind in self.states]
        words += [name if (first := re.split("[./]", name)[0]) in tops else first for name in self.rest]
        return tuple(dict.fromkeys(words))


@dataclass(frozen=True)
class Training:
    """A distributed checkpoint as a trainer saved it, and the parts of it."""

    saved: Distributed
    parts: SavedParts
    chosen: str | None = None
    """The prefix of the model's names, if the user said it."""

    def chunks(self) -> Iterator[TensorInfo]:
        """Yield the chunks of all tensors that do not belong to the model."""
        model = {*self.parts.model.values()}
        for name, whole in self.saved.tensors.items():
            yield from (info for _, info in whole.chunks if name not in model)

    def archives(self) -> Iterator[tuple[str, Chunk | None, bytes]]:
        """Each chunk and each object that is neither a tensor of the model nor a state of one, as torch.save writes it.

        Raises CheckpointError if a file cannot be read, or for more than ``LARGEST`` bytes of it.
        """
        total = 0
        for name in self.parts.rest:
            value, whole = self.saved.objects.get(name), self.saved.tensors.get(name)
            chunks = whole.chunks if whole is not None else ()
            ranges = [(info.file, info.offset, info.offset + info.nbytes) for _, info in chunks]
            if isinstance(value, Blob):
                ranges.append((value.file, value.offset, value.offset + value.length))
            total += sum(end - begin for _, begin, end in ranges)
            if total > LARGEST:
                raise CheckpointError(
                    f"{self.saved.path} has more than {LARGEST >> 20} MB beside the model's tensors and their states, "
                    f"up to '{name}'",
                    "merge it, or split it into another program's format: both leave this behind",
                )
            contents = read_ranges(ranges)
            seen = dict[Chunk, tuple[TensorInfo, bytes]]()
            for (at, info), content in zip(chunks, contents, strict=False):
                first, expected = seen.setdefault(at, (info, content))
                if content != expected:
                    raise MismatchError(f"'{name}' should be the same in {first.file} and {info.file}, but differs")
                if first is info:
                    yield name, at, object_bytes(pickled_tensor(0, name, info.dtype, at.shape), content)
            if whole is None:
                yield name, None, contents[-1] if isinstance(value, Blob) else object_bytes(value)


LARGEST = 256 << 20
"""The most bytes that are copied unchanged."""


def parts_of(
    checkpoint: Distributed, spell: Spell, ignores: Callable[[str], bool], weights: str | None = None
) -> SavedParts:
    """Tell the parts apart. ``ignores`` says whether a name can be ignored.

    ``spell`` gives the name of a tensor, ``weights`` chooses among several models (see ``name_all``). Raises
    CheckpointError.
    """
    names = {stored: name for stored in checkpoint.tensors if not ignores(name := without_wrappers(stored))}
    naming = name_all(checkpoint.path, names, spell, weights)
    prefix, model = naming.beginning, dict(naming.known)
    plain_name = {stored: name for name, stored in model.items()}
    of_name = {name: stored for stored in plain_name for name in (names[stored].removeprefix(prefix), names[stored])}
    tops = {names[stored].removeprefix(prefix).partition(".")[0] for stored in plain_name}
    states: dict[Affix, dict[str, str]] = defaultdict(dict)
    rest_names = list[str]()
    for stored, name in names.items():
        if stored in plain_name:
            continue
        affix, weight = _state_of(name, of_name)
        is_inside = name.startswith(prefix) and not naming.is_other(stored)
        if affix is not None and checkpoint.tensors[stored].shape == checkpoint.tensors[weight].shape:
            states[affix][plain_name[weight]] = stored
        elif affix is None and is_inside and name.removeprefix(prefix).partition(".")[0] in tops:
            model[name.removeprefix(prefix)] = stored  # of the model, and unknown: whoever opens it says so
        else:
            rest_names.append(stored)
    return SavedParts(model, dict(states), (*rest_names, *(name for name in checkpoint.objects if not ignores(name))))


def _state_of(name: str, of_name: Mapping[str, str]) -> tuple[Affix | None, str]:
    """Find the longest name of a model's tensor within a name; return the text around it, and that tensor's stored
    name.
    """
    segments = name.split(".")
    for length in range(len(segments) - 1, 0, -1):
        for start in range(len(segments) - length + 1):
            stored = of_name.get(".".join(segments[start : start + length]))
            if stored is not None:
                prefix, behind = segments[:start], segments[start + length :]
                return Affix("".join(f"{part}." for part in prefix), "".join(f".{part}" for part in behind)), stored
    return None, ""
