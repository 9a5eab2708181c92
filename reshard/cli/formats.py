"""``reshard formats``: the formats of other programs that are read and written."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from formats.errors import PlanError
from reshard.cli.options import (
    access_of,
    config_option,
    debug_option,
    given_options,
    hub_options,
    json_option,
    plan_option,
)
from reshard.cli.printing import print_json, print_lines, terminal_width
from reshard.text import align

if TYPE_CHECKING:
    from formats.notation.rewrites import Page


@click.command("formats")
@click.argument("source", required=False)
@click.option("--as", "form", metavar="FORMAT", help="This format alone.")
@plan_option
@config_option
@hub_options
@json_option
@debug_option
def formats_command(
    source: str | None, form: str | None, plan_file: Path | None, config_folder: Path | None,
    revision: str | None, token: str | None, cache_dir: Path | None, as_json: bool,
) -> None:  # fmt: skip
    """List the formats that can be read and written, and the programs that load them.

    With SOURCE: whether it can be written in each of them and, if not, which tensor stops it.
    """
    from formats.notation.rewrites import page_of, pages

    chosen = [page_of(form)] if form else [*pages().values()]
    if source is None:
        if others := given_options() - {"--as", "--json", "--debug"}:
            raise click.UsageError(f"{min(others)} goes with a SOURCE")
        _print_pages(chosen, as_json)
        return
    from reshard.storage.access import open_any
    from reshard.storage.fetched import Weights

    access = access_of(revision, token, cache_dir, plan_file, config_folder, quiet=as_json)
    model = open_any(source, access, Weights.HEADERS).model
    found = {page.name: _obstacle(model, page) for page in chosen}
    if as_json:
        print_json({"command": "formats", "source": source, "formats": {n: _answer(e) for n, e in found.items()}})
        return
    rows = [(name, "no" if error else "yes", error.message if error else "") for name, error in found.items()]
    print_lines(*align([("--as", "possible", ""), *rows], right=(), width=None))


def _obstacle(model: Any, page: Page) -> PlanError | None:
    """Why a model cannot be written in a format; None if it can."""
    from formats.mesh import Mesh
    from reshard.planning.portions import uses_of
    from reshard.planning.program_plan import check_demands

    try:
        check_demands(model, page, Mesh())
        uses_of(model, page)
    except PlanError as error:
        return error
    return None


def _answer(error: PlanError | None) -> dict[str, Any]:
    return {"possible": error is None, "reason": error.message if error else None}


def _print_pages(found: list[Page], as_json: bool) -> None:
    if as_json:
        pages = [{"name": p.name, "loaded_by": p.loaded_by, "files": p.files, "load": p.load} for p in found]
        print_json({"command": "formats", "formats": pages})
        return
    rows = [("--as", "files", "loaded by"), *((page.name, page.files, page.loaded_by) for page in found)]
    print_lines(
        *align(rows, right=(), width=terminal_width()), "",
        "All of them are read, too. 'reshard formats SOURCE' says which of them SOURCE can be written in.",
    )  # fmt: skip
