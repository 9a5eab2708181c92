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
    """One rank of a program, built and not loaded.

    ``held`` gives the tensors that the program's own files of this rank would have, by their names there; after
    ``load``, which loads the original, too. ``files`` are the tensors of the shards. ``reserved`` knows what of memory
    nobody wrote as the model was built. ``ignored`` are names that the program takes from neither folder. ``model`` is
    the module, if there is one.
    """

    name: str
    held: Callable[[], Mapping[str, Tensor]]
    files: Mapping[str, Tensor]
    load: Callable[[], object]
    reserved: Creation | None = None
    ignored: Sequence[str] = ()
    model: Any = None


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
