"""The containers: kinds of files that hold tensors, told by the ends of their names.

Each says which tensors a file has and where they lie, and lays a file of tensors out before it is written. A package
adds one by an entry point of the group ``reshard.containers`` (``reshard.testing.ContainerTests``: what it must do).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import NamedTuple

from reshard.formats.errors import CheckpointError
from reshard.formats.files.layout import Layout, Tensor
from reshard.formats.files.safetensors import Header, TensorInfo, build_safetensors, read_header
from reshard.formats.plugins import plugins
from reshard.formats.store import FilePath


class Weights(NamedTuple):
    """The content of a weight file, without the bytes of its tensors."""

    tensors: dict[str, TensorInfo]
    """In increasing order of their offsets."""
    tied: dict[str, str] = {}  # noqa: RUF012
    """The second names of tensors, each with the first."""
    header: Header | None = None
    """The header, for safetensors."""


@dataclass(frozen=True)
class Around:
    """Contents of a file besides its tensors. A container takes those that it has a place for."""

    metadata: Mapping[str, str] = field(default_factory=dict)
    """The metadata of a header."""
    inside: str | None = None
    """The entry of the file that has the tensors."""
    entries: Mapping[str, int | float] = field(default_factory=dict)
    """Other entries."""
    is_single: bool = False
    """Whether the file is its only tensor."""
    objects: Mapping[str, bytes] = field(default_factory=dict)
    """Objects of a trainer's, as torch.save writes each."""


@dataclass(frozen=True)
class Container:
    """A kind of weight file.

    ``read`` gives the tensors in a file, as parts of it: no byte of a tensor is read. It raises CheckpointError for a
    file that is damaged or cut off. ``build`` gives the layout of a file of tensors, in their order, and raises
    PlanError for a dtype that it does not store.
    """

    ends: tuple[str, ...]
    read: Callable[[FilePath], Weights]
    build: Callable[[Sequence[Tensor], Around], Layout]
    is_read_by_ranges: bool = True
    """Whether a remote file is read by ranges, and not as a whole."""

    def holds(self, name: str) -> bool:
        """Whether a file of this name is one."""
        return name.endswith(self.ends)


def _read_safetensors(file: FilePath) -> Weights:
    header = read_header(file)
    return Weights(header.tensors, {}, header)


def _build_safetensors(tensors: Sequence[Tensor], around: Around) -> Layout:
    return build_safetensors(tensors, around.metadata)


def _read_archive(file: FilePath) -> Weights:
    from reshard.formats.files.torch_archive import read_bin  # rarely needed

    return Weights(*read_bin(file))


def _build_archive(tensors: Sequence[Tensor], around: Around) -> Layout:
    from reshard.formats.files.torch_archive import build_archive  # rarely needed

    return build_archive(tensors, around.inside, around.entries, is_single=around.is_single)


def _build_chunks(tensors: Sequence[Tensor], around: Around) -> Layout:
    from reshard.formats.files.torch_archive import build_chunks  # rarely needed

    return build_chunks(tensors, around.objects)


SAFETENSORS = Container((".safetensors",), _read_safetensors, _build_safetensors)
ARCHIVE = Container((".pth", ".pt"), _read_archive, _build_archive)
BIN = Container((".bin",), _read_archive, _build_archive, is_read_by_ranges=False)
CHUNKS = Container((".distcp",), _read_archive, _build_chunks)
"""Chunks of tensors, each an archive; ``.metadata`` beside the files says which."""
BUILT_IN = (SAFETENSORS, ARCHIVE, BIN, CHUNKS)


def containers() -> Iterator[Container]:
    """The containers: the built-in ones first, then those of packages."""
    yield from BUILT_IN
    yield from plugins("containers").values()


def container_of(name: str) -> Container:
    """The container of a file by its name. Raises CheckpointError if none has such names, or if two packages have."""
    found = [container for container in BUILT_IN if container.holds(name)]
    found = found or [container for container in plugins("containers").values() if container.holds(name)]
    if len(found) != 1:
        how = "containers of two packages are" if found else "no container of weights is"
        raise CheckpointError(f"{PurePosixPath(name).name}: {how} called so")
    return found[0]


def is_weights(name: str) -> bool:
    """Whether a file's name is that of a weight file."""
    return any(container.holds(name) for container in containers())


def is_read_by_ranges(name: str) -> bool:
    """Whether a remote weight file of this name is read by ranges: it says where tensors lie, or ``.metadata`` does."""
    return any(container.holds(name) for container in containers() if container.is_read_by_ranges)
