"""``reshard merge``."""

from __future__ import annotations

from typing import Any

import click

from reshard.cli.help import Command, Group, option
from reshard.cli.options import SIZE, NewFolder, Place, request_of, writing_options
from reshard.cli.summary import carry_out, without_numpys_threads


@click.command(
    "merge",
    cls=Command,
    examples={
        "reshard merge out full": "the original files again, byte for byte",
        "reshard merge served full-of-vllm": "the same from the files that vLLM loads",
        "reshard merge s3://bucket/out full": "from a bucket, without a copy on the disk",
    },
)
@click.argument("source", metavar="SHARDS", type=Place())
@click.argument("out", type=NewFolder())
@option("--into", group=Group.WHAT, type=Place(), metavar="BASE", help="Add SHARDS, a LoRA adapter, to BASE.")
@option("--max-shard-size", group=Group.OUTPUT, type=SIZE, help="Largest file; default: the original files.")
@writing_options
def merge_command(into: str | None, as_json: bool, quiet: bool, progress: str, **given: Any) -> None:
    """Merge the ranks in SHARDS into one full Hugging Face checkpoint, OUT.

    SHARDS may have any format that 'reshard formats' lists. What was split from safetensors comes back file by file:
    same names, same bytes, same sha256. Padding is removed, and copies of a tensor on several ranks are compared.

    With --into, OUT is BASE with W + alpha / r * (B A) for each weight W that an adapter changes.

    With --part, several processes share the files. The last of them makes OUT complete.
    """
    if into is not None:
        given |= {"source": into, "adapter": given["source"]}
    without_numpys_threads()
    from reshard.commands.split import merge
    from reshard.writing.rewrite import WriteRequest

    carry_out(merge, request_of(WriteRequest, given, quiet=quiet or as_json), progress, as_json=as_json, quiet=quiet)
