"""``reshard split``, ``merge`` and ``patch``: one engine carries them out, and one summary tells the result."""

from __future__ import annotations

import dataclasses
import os
import time
from typing import Any, get_type_hints

import click

from reshard.cli.options import (
    MESH,
    PADDING,
    PLACE,
    WRITING,
    Command,
    Group,
    NewFolder,
    Option,
    Value,
    changed,
    check_degrees,
    fractions,
    has_degree,
    rank,
    request_of,
)
from reshard.cli.printing import (
    UnprintableError,
    fields_of,
    print_json,
    print_lines,
    print_note,
    print_path,
    progress_of,
)


def without_numpys_threads() -> None:
    """Have numpy start none for linear algebra: they are not used, and would spin beside the work."""
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")


def carry_out(options: dict[str, Any], **fields: Any) -> None:
    """Call the function of the command's name with a request of these options, show its progress, and print its
    summary.
    """
    without_numpys_threads()
    from reshard.commands import split as commands
    from reshard.writing.summary import file_document, move_document, move_lines

    command = getattr(commands, str(click.get_current_context().info_name))
    request = get_type_hints(command)["request"]
    as_json, quiet, progress, with_moves = (options.pop(name) for name in ("as_json", "quiet", "progress", "moves"))
    if quiet and with_moves:
        raise click.UsageError("--moves goes without --quiet")
    options["dry_run"] |= with_moves
    started, is_silent = time.monotonic(), quiet or as_json
    with progress_of(command.__name__, how="none" if is_silent else progress) as display:
        asked = request_of(request, options, **fields, quiet=is_silent, progress=lambda state: display(*state))
        summary = command(asked)
    seconds = time.monotonic() - started
    try:
        if as_json:
            keys = {"nbytes": "bytes", "written": "bytes_written", "fetched": "bytes_fetched", "error": "", "spent": ""}
            keys |= {"planned": "", "moves": ""}
            spent, error = summary.spent._asdict() if summary.spent else {}, summary.error
            document = {
                **fields_of(summary, **keys, tried_again="requests_tried_again"),
                "part": [summary.part.index, summary.part.count] if summary.part else None,
                "seconds": round(seconds, 3),
                "time": {key: round(value, 3) for key, value in spent.items()} or None,
                "quantization_error": {"weight": error[0], "relative": error[1]} if error else None,
            }
            if summary.dry_run:
                document["file_plans"] = [*map(file_document, summary.planned)]
            if with_moves:
                document["moves"] = [*map(move_document, summary.moves)]
            print_json(document)
        elif with_moves:
            print_lines("\n".join(line for job in summary.moves for line in move_lines(move_document(job))))
        elif quiet:
            print_path(summary.out)
        else:
            print_lines(str(dataclasses.replace(summary, source=str(asked.source))))  # as it was given
    except UnprintableError as error:  # on a full disk: no failure, the work is done
        print_note(f"Warning: this has been done, but {error.message}")


@click.command(
    "split",
    cls=Command,
    quiet="Print the path of OUT and nothing else.",
    examples={
        "reshard split model out --tp 4": "four ranks: out/rank-00-of-04 to out/rank-03-of-04",
        "reshard split out out8 --tp 8": "from four ranks to eight, without a full checkpoint in between",
        "reshard split model served --tp 4 --as vllm": "convert it to the format that vLLM loads",
    },
    options=(
        *MESH, "format", "dequantize", "quantize", "dtype", "patch", "adapter", *PADDING,
        Option("--rank", "ranks", group=Group.HOW, type=Value("rank", rank), multiple=True, metavar="R",
               help="Write only rank R (repeatable), or 'auto'."),
        changed("max_shard_size", help="Largest file of a rank; default: 5GB."), "names", *WRITING,
    ),
)  # fmt: skip
@click.argument("source", type=PLACE)
@click.argument("out", type=NewFolder())
def split_command(ranks: tuple[int | None, ...], **options: Any) -> None:
    """Split SOURCE into ranks, re-split it, or convert it to the format of an engine or a trainer.

    SOURCE may be a full checkpoint or a split one, in any format that 'reshard formats' lists. Without --as, OUT gets
    one folder per rank. '--as huggingface' writes one full checkpoint. --pp P --ep E --tp T makes P x E x T ranks, tp
    fastest (of --pp 2 --tp 4, rank 6 is pp 1, tp 2); with --same-ranks, E and T are one degree, as in vLLM with
    --enable-expert-parallel. A format that any number of ranks can load needs no degree. A LoRA adapter is converted to
    a format of adapters, such as peft, as a whole.

    If a run is interrupted or killed, the same command goes on from there: at most 64 MB a worker are lost (with
    --no-checksum, all unfinished files). Several processes, also on machines that share a disk, can write one OUT:
    --rank gives each its ranks, --part its share of the files. With 'auto', Slurm, torchrun, MPI or another launcher
    says which ranks or part.
    """
    check_degrees(options)
    from reshard.formats.notation.format_file import adapter_format_names, format_of

    any_mesh, name = {"huggingface", *adapter_format_names()}, options["format"]
    if not has_degree(options) and not (name in any_mesh or (name and format_of(name).container.chunks)):
        needs = f", which {name} needs" if name else "; --as FORMAT alone is enough for some formats"
        raise click.UsageError(f"Missing option '--tp' (or '--ep', '--pp'){needs}.")
    if None in ranks and len(ranks) > 1:
        raise click.UsageError("--rank auto goes without other ranks")
    from reshard.system import share_of_launcher

    carry_out(options, ranks=share_of_launcher() if None in ranks else ranks or None)


@click.command(
    "merge",
    cls=Command,
    quiet="Print the path of OUT and nothing else.",
    examples={
        "reshard merge out full": "the original files again, byte for byte",
        "reshard merge served full-of-vllm": "the same from the files that vLLM loads",
        "reshard merge s3://bucket/out full": "from a bucket, without a copy on the disk",
    },
    options=(
        Option("--into", group=Group.WHAT, type=PLACE, metavar="BASE", help="Add SHARDS, a LoRA adapter, to BASE."),
        "quantize", "dtype", "names", "max_shard_size", *WRITING,
    ),
)  # fmt: skip
@click.argument("source", metavar="SHARDS", type=PLACE)
@click.argument("out", type=NewFolder())
def merge_command(into: str | None, **options: Any) -> None:
    """Merge the ranks in SHARDS into one full Hugging Face checkpoint, OUT.

    SHARDS may have any format that 'reshard formats' lists. What was split from safetensors comes back file by file:
    same names, same bytes, same sha256. Padding is removed, and copies of a tensor on several ranks are compared.

    With --into, OUT is BASE with W + alpha / r * (B A) for each weight W that an adapter changes.

    With --part, several processes share the files. The last of them makes OUT complete.
    """
    if into is not None:
        options |= {"source": into, "adapter": options["source"]}
    carry_out(options)


@click.command(
    "patch",
    cls=Command,
    quiet="Print the path of OUT and nothing else.",
    examples={
        "reshard patch model delta patched": "the files of the tuned model again, byte for byte",
        "reshard patch model delta checked --dry-run": "check base and delta, and write nothing",
        "reshard patch s3://bucket/base s3://bucket/delta patched": "from a bucket",
    },
    options=("max_shard_size", "names", *WRITING),
)
@click.argument("source", metavar="BASE", type=PLACE)
@click.argument("delta", metavar="DELTA", type=PLACE)
@click.argument("out", type=NewFolder())
def patch_command(**options: Any) -> None:
    """Put a DELTA, which 'reshard diff A B --out DELTA' wrote, on its BASE: OUT is B, as a merge writes it.

    BASE is a checkpoint in any form. Each of its tensors must have the checksum that the delta states, before
    anything is written. So deltas chain: the result is the base of the next one. DELTA may also be a folder of slime's
    (weight_v000001), which has checksums of the result alone.

    'reshard split BASE OUT --patch DELTA' writes B in any form, without a copy in between; 'reshard verify BASE OUT
    --patch DELTA --exact-only' proves it.
    """
    carry_out(options)


@click.command(
    "average",
    cls=Command,
    quiet="Print the path of OUT and nothing else.",
    examples={
        "reshard average model out mean": "the mean of two checkpoints of one model, each in any form",
        "reshard average model out out8 mixed --weights 0.5,0.3,0.2": "of three, with weights",
        "reshard average model out served-mean --tp 2 --as vllm": "in the format that vLLM loads",
    },
    options=(
        Option("--weights", group=Group.WHAT, metavar="W,W,..", help="Weight of each, with a sum of 1; default: equal.",
               type=Value("weights", fractions)),
        *MESH, "format", "quantize", "dtype", *PADDING,
        changed("max_shard_size", help="Largest file; default: the files of A."),
        *(name for name in WRITING if name != "weights"),
    ),
)  # fmt: skip
@click.argument("sources", nargs=-1, required=True, type=PLACE, metavar="A B [...] OUT")
def average_command(sources: tuple[str, ...], **options: Any) -> None:
    """Write the weighted mean of checkpoints A, B, ... of one model to OUT.

    Each may have any form that 'reshard formats' lists. The mean of each element is computed in float32, in the order
    of the checkpoints, and rounded once: to the dtype that it has in A, or to --dtype. Tensors that are not of floats
    must be the same in all. Without --tp (--ep, --pp) or --as, OUT is one full checkpoint with the files of A.
    """
    if len(sources) < 3:
        raise click.UsageError("give two checkpoints or more, and OUT")
    check_degrees(options)
    first, *others, place = sources
    carry_out(options, source=first, others=others, out=NewFolder().convert(place, None, None))
