"""``reshard split``."""

from __future__ import annotations

from typing import Any

import click

from reshard.cli.help import Command, Group, option
from reshard.cli.options import (
    SIZE,
    NewFolder,
    Place,
    Value,
    check_degrees,
    dequantize_option,
    format_option,
    has_degree,
    mesh_options,
    padding_options,
    patch_option,
    rank,
    request_of,
    writing_options,
)
from reshard.cli.summary import carry_out, without_numpys_threads


def _is_for_any_mesh(form: str) -> bool:
    """Whether a format's files are loaded on any mesh, so that none need be given."""
    from formats.notation.adapter_file import adapter_format_names
    from formats.notation.format_file import format_of

    return form in {"huggingface", *adapter_format_names()} or format_of(form).container.chunks


@click.command(
    "split",
    cls=Command,
    examples={
        "reshard split model out --tp 4": "four ranks: out/rank-00-of-04 to out/rank-03-of-04",
        "reshard split out out8 --tp 8": "from four ranks to eight, without a full checkpoint in between",
        "reshard split model served --tp 4 --as vllm": "convert it to the format that vLLM loads",
    },
)
@click.argument("source", type=Place())
@click.argument("out", type=NewFolder())
@mesh_options
@format_option("The format to write: see 'reshard formats'.")
@dequantize_option
@patch_option
@option("--adapter", group=Group.WHAT, type=Place(), metavar="DIR",
        help="Add a LoRA adapter to SOURCE's weights first.")  # fmt: skip
@padding_options
@option("--refine-blocks", group=Group.RARE, is_flag=True, help="Use smaller scale blocks where a rank cuts one.")
@option("--rank", "ranks", group=Group.HOW, type=Value("rank", rank), multiple=True, metavar="R",
        help="Write only rank R (repeatable), or 'auto'.")  # fmt: skip
@option("--max-shard-size", group=Group.OUTPUT, type=SIZE, help="Largest file of a rank; default: 5GB.")
@writing_options
def split_command(ranks: tuple[int | None, ...], as_json: bool, quiet: bool, progress: str, **given: Any) -> None:
    """Split SOURCE into ranks, re-split it, or convert it to the format of an engine or a trainer.

    SOURCE may be a full checkpoint or a split one, in any format that 'reshard formats' lists. Without --as, OUT gets
    one folder per rank. '--as huggingface' writes one full checkpoint. --pp P --ep E --tp T makes P x E x T ranks;
    with --same-ranks, E and T are one degree, as in vLLM with --enable-expert-parallel. A format that any number of
    ranks can load needs no degree. A LoRA adapter is converted to a format of adapters, such as peft, as a whole.

    If a run is interrupted, the same command keeps the files that were finished, and begins the others again: a smaller
    --max-shard-size loses less. Several processes, also on machines that share a disk, can write one OUT: --rank gives
    each its ranks, --part its share of the files. With 'auto', Slurm, torchrun, MPI or another launcher says which
    ranks or part.
    """
    check_degrees(given)
    if not has_degree(given) and not (given["format"] and _is_for_any_mesh(given["format"])):
        raise click.UsageError("Missing option '--tp' (or '--ep', '--pp').")
    if None in ranks and len(ranks) > 1:
        raise click.UsageError("--rank auto goes without other ranks")
    without_numpys_threads()
    from reshard.commands.split import SplitRequest, split
    from reshard.launcher import share_of_launcher

    wanted = share_of_launcher() if None in ranks else ranks or None
    request = request_of(SplitRequest, given, ranks=wanted, quiet=quiet or as_json)
    carry_out(split, request, progress, as_json=as_json, quiet=quiet)
