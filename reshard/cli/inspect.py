"""``reshard inspect``."""

from __future__ import annotations

from typing import Any

import click

from reshard.cli.options import HUB, PLACE, Command, request_of
from reshard.cli.printing import fields_of, print_answer


@click.command(
    "inspect",
    cls=Command,
    examples={
        "reshard inspect out": "what it is, and whether a rank is missing",
        "reshard inspect served --json": "the same as JSON, for a script",
        "reshard inspect meta-llama/Llama-3.1-8B": "on the Hub: only the headers are read",
    },
    options=HUB,
)
@click.argument("source", metavar="PATH", type=PLACE)
def inspect_command(as_json: bool, **options: Any) -> bool:
    """Say what PATH is: format, model type, dtypes, parameters, mesh, and whether it is complete.

    PATH may be a checkpoint in any format, the folder of one rank, a .safetensors file, unfinished output
    (OUT.partial), a Hub id or a URL. Exit code 0: complete. 1: not complete.
    """
    from reshard.commands.inspect import InspectRequest, inspect

    report = inspect(request_of(InspectRequest, options, quiet=as_json))
    document = fields_of(report, nbytes="bytes", has_manifest="written_by_reshard")
    document |= {"parameters": report.parameters, "path": options["source"], "complete": report.complete}
    print_answer(as_json, document, str(report))
    return report.complete
