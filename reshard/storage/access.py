"""Opens a source that a user names: a folder, or an id on the Hub."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path

from formats.errors import CheckpointError
from formats.files.sharded import METADATA_KEY
from formats.notation.adapters import SETTINGS
from formats.notation.architecture import Architecture
from reshard.storage.constants import with_unlike_constants
from reshard.storage.fetched import Weights
from reshard.storage.hub import assets_folder, fetch
from reshard.storage.opening import lines_of, open_source
from reshard.storage.source import Source, read_elsewhere


@dataclass(frozen=True)
class Access:
    """How to open a source: Hub revision, token and cache, and the user's own plan file.

    ``config`` is a folder with the config.json of a model in another program's format. With ``download`` the weights of
    a Hub id are downloaded into the cache, not read where they are. With ``dequantize`` weights of 8-bit floats are
    read as if they were in bfloat16.
    """

    revision: str | None = None
    token: str | None = field(default=None, repr=False)
    cache_dir: Path | None = None
    plan_file: Path | None = None
    quiet: bool = False
    config: Path | None = None
    download: bool = False
    dequantize: bool = False


def open_any(source: str | Path, access: Access, weights: Weights = Weights.RANGES) -> Source:
    """Open a folder, or a Hub id of which so much of the weights is needed. Raises ReshardError."""
    fetched = fetch(
        str(source), revision=access.revision, token=access.token, cache_dir=access.cache_dir, quiet=access.quiet,
        weights=Weights.FILES if access.download and weights is Weights.RANGES else weights,
    )  # fmt: skip
    if access.dequantize:
        from reshard.storage.dequantized import dequantized  # numpy

        fetched = dequantized(fetched, weights, assets_folder(access.cache_dir), access.plan_file)
    with fetched.named():
        opened = open_source(
            fetched.path, location=fetched.repo, commit=fetched.commit, plan_file=access.plan_file, config=access.config
        )
        _refuse_one_rank(opened)
        if access.config is not None and opened.format is None and SETTINGS not in opened.model.config:
            raise CheckpointError(f"{opened.path} has a config.json of its own", "leave --config out")
    opened = read_elsewhere(opened, fetched.remote) if fetched.remote else opened
    opened = replace(opened, shown=fetched.shown)
    return opened if weights is Weights.HEADERS else with_unlike_constants(opened)


def lines_of_any(source: str | Path, access: Access) -> Architecture:
    """The lines that cover the tensors of a folder or a Hub id, even if shapes do not fit. Raises ReshardError."""
    fetched = fetch(
        str(source), revision=access.revision, token=access.token, cache_dir=access.cache_dir, quiet=access.quiet,
        weights=Weights.HEADERS,
    )  # fmt: skip
    with fetched.named():
        return lines_of(fetched.path, access.plan_file)


def _refuse_one_rank(source: Source) -> None:
    """Raise CheckpointError for a rank's folder: it looks like a full checkpoint, but file headers tell."""
    file = source.checkpoint.files[0] if source.checkpoint else None
    if file is not None and METADATA_KEY in file.metadata:
        raise CheckpointError(f"{source.path} is one rank of a split checkpoint", "give the folder of all ranks")
