"""``reshard inspect``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from reshard.cli.errors import DONE, NO
from reshard.cli.options import Command, Place, debug_option, hub_options, json_option, request_of
from reshard.cli.printing import print_json, print_lines

if TYPE_CHECKING:
    from reshard.source.inspect import Report


@click.command(
    "inspect",
    cls=Command,
    examples={
        "reshard inspect out": "what it is, and whether a rank is missing",
        "reshard inspect served --json": "the same as JSON, for a script",
        "reshard inspect meta-llama/Llama-3.1-8B": "on the Hub: only the headers are read",
    },
)
@click.argument("source", metavar="PATH", type=Place())
@hub_options
@json_option
@debug_option
def inspect_command(as_json: bool, **options: Any) -> int:
    """Say what PATH is: format, model type, dtypes, parameters, mesh, and whether it is complete.

    PATH may be a checkpoint in any format, the folder of one rank, a .safetensors file, unfinished output
    (OUT.partial), a Hub id or a URL. Exit code 0: complete. 1: not complete.
    """
    from reshard.commands.inspect import InspectRequest, inspect

    report = inspect(request_of(InspectRequest, options, quiet=as_json))
    if as_json:
        print_json(_document(report, options["source"]))
    else:
        print_lines(str(report))
    return DONE if report.complete else NO


def _document(report: Report, path: str) -> dict[str, Any]:
    return {
        "command": "inspect",
        "path": path,
        "kind": report.kind,
        "format": report.format,
        "loaded_by": report.loaded_by,
        "load": report.load,
        "written_by_reshard": report.has_manifest,
        "model_type": report.model_type,
        "architecture": report.architecture,
        "dtypes": report.dtypes,
        "parameters": report.parameters,
        "parameters_are_of": "ranks" if report.counts_ranks else "everything" if report.counts_all else "model",
        "beside": list(report.beside),
        "any_mesh": report.any_mesh,
        "tensors": report.tensors,
        "files": report.files,
        "bytes": report.nbytes,
        "mesh": report.mesh.to_document() if report.mesh else None,
        "rank": report.rank,
        "ranks_present": list(report.ranks_present),
        "ranks_missing": list(report.ranks_missing),
        "padding": {axis: {"size": size, "padded": padded} for axis, (size, padded) in report.padding.items()},
        "source": report.source,
        "commit": report.commit,
        "complete": report.complete,
        "problems": report.problems,
        "refused": report.refused,
        "hint": report.hint,
    }
