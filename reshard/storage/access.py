"""Opens a source that a user names: a folder, or an id on the Hub."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from formats.errors import CheckpointError
from formats.files.sharded import METADATA_KEY
from formats.notation.architecture import Architecture
from reshard.storage.hub import fetch
from reshard.storage.source import Source, lines_of, open_source


@dataclass(frozen=True)
class Access:
    """How to open a source: Hub revision, token and cache, and the user's own plan file.

    ``config`` is a folder with the config.json of a model in another program's format.
    """

    revision: str | None = None
    token: str | None = None
    cache_dir: Path | None = None
    plan_file: Path | None = None
    quiet: bool = False
    config: Path | None = None


def open_any(source: str | Path, access: Access, *, headers_only: bool = False) -> Source:
    """Open a folder, or download a Hub id and open it. With ``headers_only`` no weights. Raises ReshardError."""
    fetched = fetch(
        str(source), revision=access.revision, token=access.token, cache_dir=access.cache_dir, quiet=access.quiet,
        headers_only=headers_only,
    )  # fmt: skip
    opened = open_source(
        fetched.path, location=fetched.repo, commit=fetched.commit, plan_file=access.plan_file, config=access.config
    )
    _refuse_one_rank(opened)
    return opened


def lines_of_any(source: str | Path, access: Access) -> Architecture:
    """The lines that cover the tensors of a folder or a Hub id, even if shapes do not fit. Raises ReshardError."""
    fetched = fetch(
        str(source), revision=access.revision, token=access.token, cache_dir=access.cache_dir, quiet=access.quiet,
        headers_only=True,
    )  # fmt: skip
    return lines_of(fetched.path, access.plan_file)


def _refuse_one_rank(source: Source) -> None:
    """Raise CheckpointError for a rank's folder: it looks like a full checkpoint, but file headers tell."""
    file = source.checkpoint.files[0] if source.checkpoint else None
    if file is not None and METADATA_KEY in file.metadata:
        raise CheckpointError(f"{source.path} is one rank of a split checkpoint", "give the folder of all ranks")
