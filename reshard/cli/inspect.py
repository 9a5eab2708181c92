"""``reshard inspect``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from formats.errors import listed
from reshard.cli.errors import DONE, NO
from reshard.cli.help import Command
from reshard.cli.options import Place, debug_option, hub_options, json_option, request_of
from reshard.cli.printing import print_json, print_lines, print_pairs
from reshard.text import human_bytes, plural

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
def inspect_command(as_json: bool, **given: Any) -> int:
    """Say what PATH is: format, model type, dtypes, parameters, mesh, and whether it is complete.

    PATH may be a checkpoint in any format, the folder of one rank, a .safetensors file, unfinished output
    (OUT.partial), a Hub id or a URL. Exit code 0: complete. 1: not complete.
    """
    from reshard.commands.inspect import InspectRequest, inspect

    report = inspect(request_of(InspectRequest, given, quiet=as_json))
    if as_json:
        print_json(_document(report, given["source"]))
    else:
        print_lines(given["source"])
        print_pairs(_pairs(report), 11)
    return DONE if report.complete else NO


def _pairs(report: Report) -> list[tuple[str, str]]:
    pairs = [("what", report.kind), ("format", report.format)]
    if report.loaded_by is not None:
        pairs.append(("loaded by", report.loaded_by))
        pairs.append(("written by", "reshard" if report.has_manifest else "not known (there is no reshard.json)"))
    if report.model_type is not None or report.kind == "full checkpoint":
        pairs.append(("model type", f"{report.model_type or 'unknown'} ({_rules(report)})"))
    if report.mesh is not None or report.any_mesh:
        rank = f", rank {report.rank}" if report.rank is not None else ""
        pairs.append(("mesh", "any: its files have chunks" if report.any_mesh else f"{report.mesh}{rank}"))
    if report.ranks_missing:
        pairs.append(("ranks here", listed(report.ranks_present) or "none"))
        pairs.append(("missing", listed(report.ranks_missing)))
    if report.dtypes:
        of_ranks = " (all ranks here together)" if report.counts_ranks else ""
        of_ranks = " (all that is stored, states of training too)" if report.counts_all else of_ranks
        kinds = ", ".join(f"{dtype} {count:,}" for dtype, count in report.dtypes.items())
        pairs += [
            ("parameters", f"{report.parameters:,}{of_ranks}"),
            ("dtypes", kinds),
            ("tensors", f"{report.tensors:,}"),
        ]
    if report.beside:
        pairs.append(("beside", f"{listed(report.beside, 5)}: not of the model, and not counted"))
    if report.load is not None:
        pairs.append(("load it", report.load))
    size = f"{human_bytes(report.nbytes)} ({report.nbytes:,} bytes) in {plural(report.files, 'file')}"
    pairs.append(("weights", size))
    pairs += [("padding", f"{axis} {full:,} -> {padded:,}") for axis, (full, padded) in report.padding.items()]
    if report.source:
        pairs.append(("source", report.source + (f" at {report.commit}" if report.commit else "")))
    pairs.append(("complete", "yes" if report.complete else "no"))
    pairs += [("problem", problem) for problem in report.problems]
    pairs += [("refused", report.refused)] if report.refused else []
    if report.hint and (report.refused or not report.complete):
        pairs.append(("hint", report.hint))
    return pairs


def _rules(report: Report) -> str:
    return f"rules: {report.architecture}" if report.architecture else "no rules for it: see 'reshard plan --help'"


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
