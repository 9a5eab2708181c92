"""``reshard merge``."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING

import click

from reshard.cli.errors import work_is_done
from reshard.cli.options import (
    NewFolder,
    Place,
    Size,
    access_of,
    config_option,
    download_option,
    hub_options,
    output_options,
    part_option,
    plan_option,
    progress_option,
    write_options,
)
from reshard.cli.summary import import_numpy, interruptible, print_summary

if TYPE_CHECKING:
    from reshard.launcher import Share


@click.command("merge")
@click.argument("shards", type=Place())
@click.argument("out", type=NewFolder())
@click.option("--max-shard-size", type=Size(), help="Write new files of at most this size; default: the source's own.")
@part_option
@plan_option
@config_option
@hub_options
@download_option
@write_options
@progress_option
@output_options
def merge_command(
    shards: str, out: Path | str, max_shard_size: int | None, part: Share | None, plan_file: Path | None,
    config_folder: Path | None, revision: str | None,
    token: str | None, cache_dir: Path | None, download: bool, overwrite: bool, fsync: bool,
    no_checksum: bool, workers: int | None,
    dry_run: bool, progress: str, as_json: bool, quiet: bool,
) -> None:  # fmt: skip
    """Merge the ranks in SHARDS into one full Hugging Face checkpoint, OUT.

    What was split from safetensors comes back file by file: same names, same bytes, same sha256. Padding is removed,
    and replicated tensors are compared across the ranks.

    With --part, several processes share the files; the last of them makes the output complete.
    """
    import_numpy()
    from reshard.api import merge
    from reshard.cli.progress import Progress
    from reshard.engine.apart import prepared
    from reshard.engine.jobs import Options

    access = access_of(revision, token, cache_dir, plan_file, config_folder, quiet=quiet or as_json, download=download)
    started = time.monotonic()
    far = any("://" in str(place) for place in (shards, out)) or not Path(shards).exists()
    with (
        prepared(wanted=far and not dry_run),
        interruptible(dry_run),
        Progress("merge", how="none" if quiet or as_json else progress) as shown,
    ):
        summary = merge(
            shards, out, access=access, options=Options(workers=workers, checksum=not no_checksum, fsync=fsync),
            max_shard_size=max_shard_size, overwrite=overwrite, dry_run=dry_run, part=part,
            progress=shown.moving,
        )  # fmt: skip
    seconds = time.monotonic() - started
    with work_is_done():
        print_summary(summary, shards, seconds, as_json=as_json, quiet=quiet)
