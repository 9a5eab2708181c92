"""What a source that a user names turned out to be on this machine."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path

from formats.errors import ReshardError
from reshard.storage.remote import Remote


class Weights(Enum):
    """What is needed of the weights of a source that is not on this machine."""

    FILES = "files"
    RANGES = "ranges"
    """They are read where they are; files that a cache has are taken from it."""
    HEADERS = "headers"
    """Enough to plan; only the side files that are needed for this."""


@dataclass(frozen=True)
class Fetched:
    """The folder of a source on this machine, and its Hub id (or URL) and commit if it lies elsewhere."""

    path: Path
    repo: str | None = None
    commit: str | None = None
    headers_only: bool = False
    """The safetensors files are sparse, with true headers and sizes but no data."""
    remote: Mapping[str, Remote] = field(default_factory=dict)
    """Where the data of such files is, by their names."""
    beside: tuple[str, ...] | None = ()
    """The names of files that lie beside it elsewhere and not in its folder here; None where files are not listed."""
    shown: str | None = None
    """What messages call it, if not by ``repo``."""

    def named(self) -> AbstractContextManager[None]:
        """A block whose errors call the source by its name, not by the folder that stands in for it."""
        return told_as(self.path, self.shown or self.repo)


@contextmanager
def told_as(folder: Path, name: str | None) -> Iterator[None]:
    """A block whose errors say ``name`` instead of ``folder``; they say the folder, where there is no name."""
    try:
        yield
    except ReshardError as error:
        if name is not None:
            error.message = error.message.replace(str(folder), name)
            error.hint = error.hint and error.hint.replace(str(folder), name)
            error.args = (error.message,)
        raise
