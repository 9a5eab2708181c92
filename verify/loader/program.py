"""The seam of this room: a request, and how a program's ranks are played in one process, without kernels or groups."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor

from reshard.verify.loader.watch import Creation


@dataclass(frozen=True)
class Request:
    """The original, and shards for a mesh of so many ranks; ``dtype`` is torch's name of the model's, if it is known.

    ``scratch`` is a folder that is removed.
    """

    program: str
    original: str
    shards: str
    scratch: str
    dtype: str | None = None
    form: str | None = None
    """The program's own name of the shards' format."""
    tp: int = 1
    pp: int = 1
    ep: int = 1
    etp: int = 1
    """The number of ranks over which an expert is divided."""


@dataclass(frozen=True)
class ProgramRank:
    """One rank of a program, built and not loaded."""

    name: str
    held: Callable[[], Mapping[str, Tensor]]
    """Returns the tensors that the program's own files of this rank would have, by their names there; also after
    ``load``.
    """
    files: Mapping[str, Tensor]
    """The tensors of the shards."""
    load: Callable[[], object]
    """Loads the original."""
    reserved: Creation | None = None
    """Memory that nobody wrote as the model was built."""
    ignored: Sequence[str] = ()
    """Names that the program takes from neither folder."""
    model: Any = None
    """The module, if there is one."""


Box = tuple[tuple[int, int], ...]
"""A part of a tensor: on each axis its first index, and the one behind its last."""


@dataclass
class Layout:
    """A tensor of a distributed checkpoint, without values: the program's, with the boxes that its ranks ask for, or
    the shards', with the boxes of their chunks. An object, as a state beside weights, has no shape.
    """

    dtype: str | None = None
    shape: tuple[int, ...] = ()
    boxes: set[Box] = field(default_factory=set)
    rows: int | None = None
    """The least number of rows, if the program takes a table that is padded to any number from there."""

    def __str__(self) -> str:
        return f"{self.dtype} {[*self.shape]}" if self.dtype else "an object"


@dataclass(frozen=True)
class ProgramLayout:
    """The tensors and objects that a program asks of a distributed checkpoint on so many ranks, by their keys there,
    and those of the shards.
    """

    ranks: int
    asked: Mapping[str, Layout]
    stored: Mapping[str, Layout]


class Program(Protocol):
    """A file of this room that is named ``in_`` and the program: all that is known of it. It has ``ranks`` if the
    program loads the original, else ``layout``.
    """

    def prepare(self, request: Request) -> str:
        """Import the program, and replace its functions that ask for a device. Returns its name and version."""

    def ranks(self, request: Request) -> Iterator[ProgramRank]:
        """Each rank, built, while the process is that rank."""

    def layout(self, request: Request) -> ProgramLayout:
        """The layout on all ranks."""


def held(model: Any, loader: Any) -> Mapping[str, Tensor]:
    """The tensors of a model by the names that a loader of sharded states, vLLM's or SGLang's, has for them."""
    found: Mapping[str, Tensor] = loader._filter_subtensors(model.state_dict(keep_vars=True))
    return found
