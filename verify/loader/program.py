"""The seam of this room: a request, and how a program's ranks are played in one process, without kernels or groups."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
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
    tp: int = 1
    pp: int = 1
    ep: int = 1


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


class Program(Protocol):
    """A file of this room that is named ``in_`` and the program: all that is known of it."""

    def prepare(self, request: Request) -> str:
        """Import the program, and replace its functions that ask for a device. Returns its name and version."""

    def ranks(self, request: Request) -> Iterator[ProgramRank]:
        """Each rank, built, while the process is that rank."""


def held(model: Any, loader: Any) -> Mapping[str, Tensor]:
    """The tensors of a model by the names that a loader of sharded states, vLLM's or SGLang's, has for them."""
    found: Mapping[str, Tensor] = loader._filter_subtensors(model.state_dict(keep_vars=True))
    return found
