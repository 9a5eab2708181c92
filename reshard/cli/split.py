"""``reshard split``."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING

import click

from reshard.cli.errors import work_is_done
from reshard.cli.options import (
    FormatName,
    NewFolder,
    Place,
    Rank,
    Size,
    access_of,
    config_option,
    degrees_of,
    dequantize_option,
    download_option,
    hub_options,
    mesh_options,
    output_options,
    padding_of,
    padding_options,
    part_option,
    plan_option,
    progress_option,
    write_options,
)
from reshard.cli.summary import import_numpy, interruptible, print_summary

if TYPE_CHECKING:
    from reshard.launcher import Share


def _is_for_any_mesh(form: str) -> bool:
    """Whether a format's files are loaded on any mesh, so that none need be given."""
    from formats.notation.format_file import format_of

    return form == "huggingface" or format_of(form).container.boxes


@click.command("split")
@click.argument("source", type=Place())
@click.argument("out", type=NewFolder())
@mesh_options
@click.option(
    "--rank",
    "ranks",
    type=Rank(),
    multiple=True,
    metavar="R",
    help="Write only this rank (may be repeated); 'auto': the ranks of this process, by Slurm, torchrun, MPI ...",
)
@click.option("--max-shard-size", type=Size(), help="Largest file of a rank; default: 5GB.")
@click.option("--refine-blocks", is_flag=True, help="Lower the block size of scales where a rank would cut a block.")
@click.option(
    "--as",
    "form",
    type=FormatName(),
    metavar="FORMAT",
    help="Write another program's format: see 'reshard formats'; 'huggingface' is one full checkpoint.",
)
@dequantize_option
@part_option
@padding_options
@plan_option
@config_option
@hub_options
@download_option
@write_options
@progress_option
@output_options
def split_command(
    source: str, out: Path | str, tp: int | None, ep: int | None, pp: int | None, pp_layers: tuple[int, ...] | None,
    same_ranks: bool, uneven: bool, ranks: tuple[int | None, ...], form: str | None, max_shard_size: int | None,
    refine_blocks: bool, part: Share | None,
    pad_vocab_to: int | None, no_pad_vocab: bool, plan_file: Path | None, config_folder: Path | None,
    revision: str | None, token: str | None, cache_dir: Path | None, download: bool, overwrite: bool, fsync: bool,
    no_checksum: bool, workers: int | None, dry_run: bool, progress: str, as_json: bool, quiet: bool,
    dequantize: bool,
) -> None:  # fmt: skip
    """Split SOURCE into N ranks, one folder each, under OUT.

    SOURCE may be split already: then it is re-split directly, without a full checkpoint in between. With --rank, runs
    for different ranks into one OUT add up to the whole. They may run at the same time, and on different machines that
    share the disk; --rank auto gives each process that a launcher started its share. With --part, processes share the
    files of all ranks instead. To go on with an interrupted run, give the same command again.

    --tp N splits every large weight over N ranks. --ep N gives each of N ranks whole experts and a copy of all else.
    --pp N gives each of N stages consecutive layers, the first stage the embedding and the last the norm and the head.
    --pp P --ep E --tp T does all, on P x E x T ranks. With --same-ranks, --ep and --tp use the same T ranks (E = T), as
    vLLM's --enable-expert-parallel and DeepSeek's own inference code do. A format that any number of ranks loads needs
    none of them.
    """
    degrees = degrees_of(tp, ep, pp, pp_layers, same_ranks)
    if not degrees.are_given and not (form and _is_for_any_mesh(form)):
        raise click.UsageError("Missing option '--tp' (or '--ep', '--pp').")
    if None in ranks and len(ranks) > 1:
        raise click.UsageError("--rank auto goes without other ranks")
    import_numpy()
    from reshard.api import split
    from reshard.cli.progress import Progress
    from reshard.engine.apart import prepared
    from reshard.engine.jobs import Options
    from reshard.launcher import share_of_launcher

    wanted = share_of_launcher() if None in ranks else [rank for rank in ranks if rank is not None] or None
    access = access_of(
        revision, token, cache_dir, plan_file, config_folder, quiet=quiet or as_json, download=download,
        dequantize=dequantize,
    )  # fmt: skip
    padding = padding_of(pad_vocab_to, no_pad_vocab)
    started = time.monotonic()
    far = dequantize or any("://" in str(place) for place in (source, out)) or not Path(source).exists()
    with (
        prepared(wanted=far and not dry_run),
        interruptible(dry_run),
        Progress("split", how="none" if quiet or as_json else progress) as shown,
    ):
        summary = split(
            source, out, **degrees.arguments, uneven=uneven, ranks=wanted, access=access, padding=padding,
            options=Options(workers=workers, checksum=not no_checksum, fsync=fsync),
            max_shard_size=max_shard_size, refine_blocks=refine_blocks, overwrite=overwrite, dry_run=dry_run, form=form,
            part=part, progress=shown.moving,
        )  # fmt: skip
    seconds = time.monotonic() - started
    with work_is_done():
        print_summary(summary, source, seconds, as_json=as_json, quiet=quiet)
