"""``reshard diff``."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import click

from reshard.cli.errors import DONE, NO
from reshard.cli.help import Command, Group, option
from reshard.cli.options import (
    NewFolder,
    Place,
    access_options,
    debug_option,
    json_option,
    progress_option,
    quiet_option,
    request_of,
)
from reshard.cli.printing import print_json, print_lines, terminal_width
from reshard.cli.progress import Progress
from reshard.cli.summary import without_numpys_threads
from reshard.text import align, human_bytes, plural, shape_text

if TYPE_CHECKING:
    from reshard.delta.differences import Diff, Row, TensorDiff


@click.command(
    "diff",
    cls=Command,
    examples={
        "reshard diff model out": "tensor by tensor, whatever the form and the mesh",
        "reshard diff out served --json": "the same as JSON, for a script",
        "reshard diff model out --out delta": "also write what changed, for 'reshard patch'",
    },
)
@click.argument("a", type=Place(), metavar="A")
@click.argument("b", type=Place(), metavar="B")
@option(
    "--out", group=Group.OUTPUT, type=NewFolder(), metavar="DELTA", help="Also write what changed, for 'reshard patch'."
)
@option("--compress", group=Group.OUTPUT, is_flag=True, help="Compress DELTA (needs zstandard).")
@access_options
@progress_option
@json_option
@quiet_option("Print same or different, no more.")
@debug_option
def diff_command(as_json: bool, quiet: bool, progress: str, **given: Any) -> int:
    """Show which tensors of two checkpoints differ, and how much.

    A and B may have any two formats and meshes. For each tensor: the same, changed, another dtype or shape, only in A,
    only in B. Of changed tensors it says the share of elements, the largest difference, its root mean square over all
    elements, and the largest in units of the dtype's last place (ulp). Bytes are compared: -0.0 is not 0.0.

    DELTA is a folder that 'reshard patch' puts on A. With --compress it has the layout of slime's folders of deltas,
    which its SGLang pulls: for that, call it weight_v000001, and so on.

    Exit code 0: the same. 1: different. 2: they could not be compared.
    """
    without_numpys_threads()
    from reshard.commands.diff import DiffRequest, diff

    with Progress("diff", how="none" if quiet or as_json else progress) as shown:
        found = diff(request_of(DiffRequest, given, quiet=quiet or as_json, progress=shown))
    if as_json:
        print_json(_document(found))
    elif quiet:
        print_lines("same" if found.same else "different")
    else:
        print_lines(*_text(found))
    return DONE if found.same else NO


def _text(found: Diff) -> list[str]:
    from reshard.delta.differences import SAME, rows_of

    rows = rows_of([tensor for tensor in found.tensors if tensor.kind != SAME])
    lines = _table(rows, terminal_width()) if rows else []
    kinds = {kind: len(found.of(kind)) for kind in dict.fromkeys(tensor.kind for tensor in found.tensors)}
    counts = ", ".join(f"{count:,} {kind}" for kind, count in kinds.items())
    read = f"{plural(len(found.tensors), 'tensor')}: {counts}; {human_bytes(found.nbytes)} of each compared."
    return [*lines, f"{'SAME' if found.same else 'DIFFERENT'}: {read}"]


def _table(rows: Sequence[Row], width: int | None) -> list[str]:
    cells = [("tensor", "tensors", "what", "elements", "largest", "rms", "ulp")]
    cells += [(row.name, f"{len(row.tensors):,}", *_cells(row.tensors)) for row in rows]
    return align(cells, right=(1, 3, 4, 5, 6), width=width, elastic=(0,))


def _cells(tensors: Sequence[TensorDiff]) -> tuple[str, str, str, str, str]:
    from reshard.delta.differences import CHANGED, DTYPE, SHAPE

    first = tensors[0]
    if first.kind != CHANGED:
        sides = {DTYPE: first.dtypes, SHAPE: tuple(shape_text(shape or ()) for shape in first.shapes)}
        shown = " -> ".join(map(str, sides[first.kind])) if first.kind in sides else ""
        return f"{first.kind} {shown}".rstrip(), "", "", "", ""
    elements, changed = sum(t.elements for t in tensors), sum(t.changed for t in tensors)
    other = sum(t.other for t in tensors)
    what = f"changed ({other:,} inf or NaN)" if other else "changed"
    if first.largest is None:
        return what, _percent(changed / elements), "", "", ""
    rms = math.sqrt(sum((t.rms or 0.0) ** 2 * t.elements for t in tensors) / elements)
    largest, ulps = max(t.largest or 0.0 for t in tensors), max(t.ulps or 0 for t in tensors)
    return what, _percent(changed / elements), f"{largest:.3g}", f"{rms:.3g}", f"{ulps:,}"


def _percent(share: float) -> str:
    """``3.1 %``; a share that is not zero is never shown as zero, nor one that is not all as all."""
    if share == 1.0:
        return "100 %"
    return f"{share * 100:.2g} %" if share < 0.995 else "99.9 %" if share < 0.9995 else ">99.9 %"


def _document(found: Diff) -> dict[str, Any]:
    return {
        "command": "diff",
        "a": found.a,
        "b": found.b,
        "same": found.same,
        "bytes": found.nbytes,
        "tensors": [
            {
                "name": tensor.name,
                "kind": tensor.kind,
                "dtypes": list(tensor.dtypes),
                "shapes": [None if shape is None else list(shape) for shape in tensor.shapes],
                "elements": tensor.elements,
                "changed": tensor.changed,
                "largest": tensor.largest,
                "rms": tensor.rms,
                "ulps": tensor.ulps,
                "other": tensor.other,
            }
            for tensor in found.tensors
        ],
    }
