"""A request to write an output, its place, and the progress of it."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple

from reshard.formats.errors import CheckpointError
from reshard.move.jobs import Options, no_progress
from reshard.source.access import Access, Place
from reshard.store.remote import tried_again
from reshard.store.selection import HubAccess, is_url
from reshard.store.staging_names import check_name
from reshard.system import Share, Taken, default

if TYPE_CHECKING:
    from reshard.store.bucket import Bucket


class State(NamedTuple):
    """The progress of a split or merge."""

    written: int
    """Bytes written to the weight files by this run and those before."""
    to_write: int
    """The size of all these files."""
    again: int
    """The requests that were made again."""


Progress = Callable[[State], None]


@dataclass(frozen=True)
class WriteRequest(Access, Options):
    """The output to write, and its place.

    ``source``: a folder, a Hub id, a URL, or what ``reshard.state_dict`` gave.
    ``out``: a new folder, or the URL of a place in a bucket.
    ``max_shard_size``: the largest weight file, such as ``"5GB"``; by default 5 GB, for ``merge`` as in the original.
    ``names``: as in the ``source``, as ``published``, or as in transformers' ``modules``.
    ``overwrite``: an existing output is replaced once the new one is complete (in a bucket: before).
    ``dry_run``: everything is checked and nothing written.
    ``part``: this process's share of the files, such as ``(0, 2)``; the last of all processes publishes.
    ``progress``: True shows a bar. A function is called with one value: the bytes ``written`` of ``to_write``, and the
        requests made ``again``.
    """

    source: Place = field(repr=False)  # a URL may have a password
    out: str | Path = field(repr=False)  # a URL may have a password
    _: KW_ONLY
    max_shard_size: Taken[int | str | None, int | None] = default(None)
    names: Literal["source", "published", "modules"] = "source"
    overwrite: bool = False
    dry_run: bool = False
    part: Taken[Share | tuple[int, int] | str | None, Share | None] = default(None)
    progress: Taken[Progress | bool, Progress] = default(no_progress)


class Start(NamedTuple):
    """The start of a write: the output's place, the time (``time.monotonic``), and the requests made again before."""

    folder: Path
    bucket: Bucket | None
    at: float
    tried_again: int


def start(request: WriteRequest) -> Start:
    """The place of an output, and now. Raises CheckpointError if there can be no output."""
    return Start(*place_of(request.out, request), time.monotonic(), tried_again())


def place_of(out: str | Path, access: HubAccess) -> tuple[Path, Bucket | None]:
    """The folder in which an output is built, and its place in a bucket, if ``out`` is a URL.

    Raises CheckpointError for a web server, and for a folder without a name of its own (``.``, ``..`` or ``/``).
    """
    if not isinstance(out, str) or "://" not in out:
        check_name(out)
        return Path(out), None
    if not is_url(out):
        from reshard.formats.hints import meaning, with_hint  # for an error alone

        hub = meaning("upload", ()) if out.startswith("hf://") else ""
        raise CheckpointError(f"{out}: no such kind of store", with_hint(hub, "give s3://, gs://, az:// or a folder"))
    if out.startswith("http"):
        raise CheckpointError(f"{out} is on a web server, which takes no files", "give a bucket's URL")
    from reshard.store.bucket import Bucket
    from reshard.store.hub import assets_folder

    folder = assets_folder(access.cache_dir) / "reshard" / "uploads"
    folder.mkdir(parents=True, exist_ok=True)
    built = folder / hashlib.sha256(out.rstrip("/").encode()).hexdigest()[:32]
    return built, Bucket(out)
