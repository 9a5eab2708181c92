"""``reshard diff``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from reshard.cli.options import ACCESS, PLACE, Command, Group, NewFolder, Option, changed, request_of
from reshard.cli.printing import (
    command_line,
    fields_of,
    print_json,
    print_lines,
    print_note,
    progress_of,
    terminal_width,
    write_report,
)
from reshard.cli.split import without_numpys_threads
from reshard.text import human_bytes


@click.command(
    "diff",
    cls=Command,
    quiet="Print same or different, no more.",
    examples={
        "reshard diff model out": "tensor by tensor, whatever the form and the mesh",
        "reshard diff out served --json": "the same as JSON, for a script",
        "reshard diff model out --out delta": "also write what changed, for 'reshard patch'",
    },
    options=(
        Option("--out", group=Group.OUTPUT, type=NewFolder(), metavar="DELTA",
               help="Also write what changed, for 'reshard patch'."),
        Option("--compress", group=Group.OUTPUT, is_flag=True, help="Compress DELTA (needs zstandard)."),
        "dtype", changed("report", help="Draw what differs where, as an HTML page."), *ACCESS, "progress",
    ),
)  # fmt: skip
@click.argument("a", type=PLACE, metavar="A")
@click.argument("b", type=PLACE, metavar="B")
def diff_command(report: Path | None, as_json: bool, quiet: bool, progress: str, **options: Any) -> bool:
    """Show which tensors of two checkpoints differ, and how much.

    A and B may have any two formats and meshes. For each tensor: the same, changed, another dtype or shape, only in A,
    only in B. Of changed tensors it says the share of elements, the largest difference, its root mean square over all
    elements, and the largest in units of the dtype's last place (ulp), but for elements that cross zero. Bytes are
    compared: -0.0 is not 0.0.

    DELTA is a folder that 'reshard patch' puts on A. With --compress it has the layout of slime's folders of deltas,
    which its SGLang pulls: for that, call it weight_v000001, and so on.

    Exit code 0: the same. 1: different. 2: they could not be compared.
    """
    without_numpys_threads()
    from reshard.commands.diff import DiffRequest, diff

    with progress_of("diff", how="none" if quiet or as_json else progress) as display:
        result = diff(request_of(DiffRequest, options, quiet=quiet or as_json, progress=display))
    if as_json:
        tensors = [fields_of(tensor, squares="") | {"rms": tensor.rms} for tensor in result.tensors]
        print_json({**fields_of(result, nbytes="bytes"), "same": result.same, "tensors": tensors})
    elif quiet:
        print_lines("same" if result.same else "different")
    else:
        print_lines(result.to_text(terminal_width()))
    if options["out"] is not None:
        size = human_bytes(sum(file.stat().st_size for file in Path(options["out"]).iterdir()))
        print_note(f"Wrote what changed: {options['out']}, {size}, which 'reshard patch' puts on A")
    if report is not None:
        from reshard.pages.diff_page import diff_page

        write_report(report, diff_page(result, command_line()))
        print_note(f"Drew what differs: {report}")
    return result.same
