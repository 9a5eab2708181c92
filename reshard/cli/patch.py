"""``reshard patch``."""

from __future__ import annotations

from typing import Any

import click

from reshard.cli.help import Command, Group, option
from reshard.cli.options import SIZE, NewFolder, Place, request_of, writing_options
from reshard.cli.summary import carry_out, without_numpys_threads


@click.command(
    "patch",
    cls=Command,
    examples={
        "reshard patch model delta patched": "the files of the tuned model again, byte for byte",
        "reshard patch model delta checked --dry-run": "check base and delta, and write nothing",
        "reshard patch s3://bucket/base s3://bucket/delta patched": "from a bucket",
    },
)
@click.argument("source", metavar="BASE", type=Place())
@click.argument("delta", metavar="DELTA", type=Place())
@click.argument("out", type=NewFolder())
@option("--max-shard-size", group=Group.OUTPUT, type=SIZE, help="Largest file; default: the original files.")
@writing_options
def patch_command(as_json: bool, quiet: bool, progress: str, **given: Any) -> None:
    """Put a DELTA, which 'reshard diff A B --out DELTA' wrote, on its BASE: OUT is B, as a merge writes it.

    BASE is a full checkpoint in safetensors. Each of its tensors must have the checksum that the delta states, before
    anything is written. So deltas chain: the result is the base of the next one. DELTA may also be a folder of slime's
    (weight_v000001), which has checksums of the result alone.

    'reshard split BASE OUT --patch DELTA' writes B in any form, without a copy in between; 'reshard verify BASE OUT
    --patch DELTA --exact-only' proves it.
    """
    without_numpys_threads()
    from reshard.commands.split import PatchRequest, patch

    carry_out(patch, request_of(PatchRequest, given, quiet=quiet or as_json), progress, as_json=as_json, quiet=quiet)
