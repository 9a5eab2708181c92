"""``reshard formats``: the formats of other programs that are read and written."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from reshard.cli.options import ACCESS, PLACE, Command, changed, given_options, request_of
from reshard.cli.printing import pair_lines, print_answer, terminal_width
from reshard.formats.errors import ReshardError
from reshard.formats.notation.format_file import HUGGING_FACE, adapter_format, adapter_format_names
from reshard.text import align

if TYPE_CHECKING:
    from reshard.formats.notation.format import Format
    from reshard.source.source import Source


FormatRow = tuple[str, str, str, str]
"""A format's name, what loads it, the names of its files, and the command."""


@click.command(
    "formats",
    cls=Command,
    examples={
        "reshard formats": "all formats, and what loads them",
        "reshard formats --as vllm": "one of them",
        "reshard formats model": "which of them this model can be written in",
    },
    options=(changed("format", help="This format alone."), *ACCESS),
)
@click.argument("source", type=PLACE, required=False)
def formats_command(source: str | None, format: str | None, as_json: bool, **options: Any) -> None:
    """List the formats that are read and written, and the programs that load them.

    With SOURCE: which of them it can be written in, and which tensor is in the way of the others.
    """
    from reshard.formats.files.checkpoint import ADAPTER
    from reshard.formats.notation.format_file import all_formats, format_names, format_of, names_to_write

    def row(entry: Format) -> FormatRow:
        return entry.name, entry.loading.program, entry.files.name, entry.loading.command

    name, program, file, load = row(HUGGING_FACE)
    rows = [(name, program, f"{file}, or model-00001-of-0000N.safetensors", load)]
    rows += [row(entry) for name, entry in all_formats().items() if name in names_to_write()]
    rows += [(of.name, of.loaded_by, ADAPTER, of.load) for of in map(adapter_format, adapter_format_names())]
    if format is not None:
        rows = [entry for entry in rows if entry[0] == format] or [row(format_of(format))]
    if source is not None and source in format_names() and not Path(source).exists():
        raise click.UsageError(f"'{source}' is a format, not a SOURCE: give 'reshard formats --as {source}'")
    if source is None:
        if further := given_options() - {"--as", "--json", "--debug"}:
            raise click.UsageError(f"{min(further)} goes with a SOURCE")
        _print_formats(rows, as_json)
        return
    from reshard.source.access import Access
    from reshard.store.selection import Weights
    from reshard.transforms.opening import open_any

    opened = open_any(source, request_of(Access, options, quiet=as_json), Weights.HEADERS)
    reasons = {name: _why_not(opened, name) for name, *_ in rows}
    answers = {name: {"possible": why is None, "reason": why} for name, why in reasons.items()}
    cells = [("--as", "possible", ""), *((name, "no" if why else "yes", why or "") for name, why in reasons.items())]
    print_answer(as_json, {"source": source, "formats": answers}, *align(cells, right=(), width=None))


def _why_not(source: Source, name: str) -> str | None:
    """Return the reason why a source cannot be written in a format; None if it can."""
    from reshard.formats.mesh import Mesh
    from reshard.formats.notation.architecture import SETTINGS
    from reshard.formats.notation.format_file import format_of
    from reshard.placement.portions import uses_of
    from reshard.placement.program_plan import check_demands
    from reshard.transforms.convert import convert

    if name == HUGGING_FACE.name:
        return None if source.is_split else "it is one full checkpoint already"
    is_of_adapters = name in adapter_format_names()
    if is_of_adapters and SETTINGS not in source.model.config:
        return "it is for adapters"
    try:
        if is_of_adapters:
            convert(source, adapter_format(name))
        else:
            check_demands(source.model, format_of(name), Mesh())
            uses_of(source.model, format_of(name))
    except ReshardError as error:
        return error.message
    return None


def _print_formats(rows: Sequence[FormatRow], as_json: bool) -> None:
    keys = ("name", "loaded_by", "files", "load")
    # with names in the place of what a split decides
    loads = [re.sub(r"\{(\w+)\}", lambda match: match[1].upper(), command) for *_, command in rows]
    if len(rows) == 1:
        ((name, program, files, _),) = rows
        lines = [name, *pair_lines(("loaded by", program), ("files", files), ("load it", loads[0]))]
    else:
        cells = [("--as", "loaded by", "with"), *((*row[:2], load) for row, load in zip(rows, loads, strict=True))]
        lines = [
            *align(cells, right=(), width=terminal_width(), elastic=(1, 2), keep_beginnings=True), "",
            "All of them are read, too. 'reshard formats --as FORMAT' shows one in detail, 'reshard formats SOURCE' "
            "says which of them SOURCE can be written in.",
        ]  # fmt: skip
    print_answer(as_json, {"formats": [dict(zip(keys, row, strict=True)) for row in rows]}, *lines)
