"""``reshard plan``: the table of one mesh, the list of possible degrees, plan files and the tp_plan of transformers."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from reshard.cli.options import (
    ACCESS,
    MESH,
    NUMBERS,
    PADDING,
    PLACE,
    Command,
    Group,
    NewFile,
    Option,
    Value,
    changed,
    check_degrees,
    given_options,
    has_degree,
    request_of,
)
from reshard.cli.printing import (
    command_line,
    fields_of,
    print_answer,
    print_json,
    print_lines,
    print_note,
    terminal_width,
    write_report,
)
from reshard.formats.errors import PlanError, ReshardError, require_transformers
from reshard.system import disk_errors
from reshard.text import align, flops_of, human_bytes, plural, shape_text, speed_of

if TYPE_CHECKING:
    from reshard.commands.plan import PlanRequest, PossibleDegrees
    from reshard.formats.notation.architecture import Architecture
    from reshard.formats.notation.format import Format
    from reshard.mesh.plan import Plan
    from reshard.mesh.traffic import Rates
    from reshard.model.model import Model
    from reshard.source.source import Source


_HUB = {"--revision", "--token", "--cache-dir", "--debug"}
"""Options that go with everything that ``plan`` can do."""
_OF_MESH = {"--ep", "--pp", "--pp-layers", "--same-ranks", "--uneven", "--pad-vocab-to", "--no-pad-vocab", "--as"}
_SPEEDS = {"--link", "--flops"}
"""Options besides ``--tp`` that change the parts of the ranks."""


@click.command(
    "plan",
    cls=Command,
    examples={
        "reshard plan model": "which degrees are possible, and why the others are not",
        "reshard plan model --tp 4 --report plan.html": "what each rank would hold, and a picture of it",
        "reshard plan meta-llama/Llama-3.1-8B --tp 8 --as vllm": "which tensors vLLM's files would have",
    },
    options=(
        changed("tp", type=NUMBERS, metavar="N,.."), *MESH[1:],
        changed("format", help="Show what 'split --as FORMAT' would write."),
        changed("names", help="With --as dcp: source, published or modules."),
        Option("--link", group=Group.HOW, type=Value("speed", speed_of), metavar="SPEED",
               help="How fast a rank sends; default: 450GB/s."),
        Option("--flops", group=Group.HOW, type=Value("speed", flops_of), metavar="SPEED",
               help="How fast it computes; default: 990TFLOP/s."),
        "dequantize", "dtype", *PADDING, *ACCESS,
        changed("report", help="Draw what each rank holds, as an HTML page."),
        Option("--tp-plan", group=Group.OUTPUT, is_flag=True, help="Print the tp_plan of transformers."),
        Option("--save", "save_file", group=Group.OUTPUT, type=NewFile(), metavar="FILE",
               help="Write the architecture file in use."),
        Option("--draft", "draft_file", group=Group.OUTPUT, type=NewFile(), metavar="FILE",
               help="Draft one, for a model that has no rules."),
    ),
)  # fmt: skip
@click.argument("source", type=PLACE)
def plan_command(
    save_file: Path | None, draft_file: Path | None, tp_plan: bool, report: Path | None, as_json: bool, **options: Any
) -> None:  # fmt: skip
    """Show which degrees are possible, or with a degree what each rank would hold, from the headers alone.

    If a model or one of its tensors has no rules, make an architecture file: --draft writes a draft, --save the rules
    in use, of a similar model for example. Check and edit the file, and pass it to every command with --plan.
    """
    from reshard.commands.plan import PlanRequest, planned_format, possible_degrees
    from reshard.formats.notation.format_file import with_names
    from reshard.mesh.plan import make_plan
    from reshard.placement.program_plan import plan_for
    from reshard.source.opening import lines_of_any
    from reshard.source.source import UNSPLIT
    from reshard.store.selection import Weights
    from reshard.transforms.opening import open_any

    given, degrees = given_options(), options["tp"] or (None,)
    if len(degrees) > 1 and (as_json or tp_plan or report is not None):
        raise click.UsageError("several degrees go without --json, --report and --tp-plan")
    options["tp"] = degrees[0]
    check_degrees(options)
    request = request_of(PlanRequest, options, quiet=as_json)
    source, format = str(request.source), planned_format(request)
    if draft_file is not None and (further := given - _HUB - {"--draft"}):
        raise click.UsageError(f"--draft goes without {min(further)}: pass the file that it writes with --plan")
    if tp_plan and (further := given & (_OF_MESH | _SPEEDS)):
        raise click.UsageError(f"--tp-plan goes with --tp alone, without {min(further)}")
    is_split = has_degree(options) or not format.plain
    if not has_degree(options) and not format.plain and (further := given & _SPEEDS):
        raise click.UsageError(f"{min(further)} goes with a degree, such as --tp 2: one rank sends nothing")
    if report is not None and (not has_degree(options) or not format.plain or tp_plan):
        raise click.UsageError("--report goes with --tp, --ep or --pp, without --as and --tp-plan")
    if draft_file is not None:
        _write_draft(request, draft_file)
        return
    opened, model = None, _model_of_config(request)
    try:
        if model is None:
            opened = open_any(source, request, Weights.HEADERS)
            model = opened.model
    except PlanError as error:
        if save_file is None:
            raise
        _save(lines_of_any(source, request), save_file)
        raise PlanError(error.message, f"edit {save_file}, pass it with --plan {save_file}") from None
    format = with_names(format, options["names"], opened.spelling if opened is not None else None)
    if save_file is not None:
        rules = model.architecture
        used = {line: rules.tensors[line] for line in rules.tensors if line in model.used_templates}
        _save(dataclasses.replace(rules, tensors=used), save_file)
    if tp_plan:
        _print_tp_plan(model, options["tp"], as_json)
    elif is_split:
        plans = [plan_for(model, format, dataclasses.replace(request, tp=degree or request.tp)) for degree in degrees]
        if report is not None:
            from reshard.pages.plan_page import plan_page

            possible = possible_degrees(make_plan(model, UNSPLIT), request)
            write_report(report, plan_page(plans[0], source, possible, command_line()))
            print_note(f"Drew the plan: {report}")
        for number, plan in enumerate(plans):
            if number:
                print_lines("")
            if format.plain:
                _print_plan(plan, opened, request, as_json)
            else:
                _print_program(plan, format, request, as_json)
    elif save_file is None or as_json:
        _print_degrees(possible_degrees(make_plan(model, UNSPLIT), request), as_json)


def _model_of_config(request: PlanRequest) -> Model | None:
    """The model of a folder that has a config.json and no weights yet, as transformers would make it; None otherwise.

    Of a quantized one, only the weights say what they are.
    """
    from reshard.formats.documents import read_config
    from reshard.formats.files.checkpoint import CONFIG
    from reshard.formats.files.side_files import is_side_file
    from reshard.formats.quantization.methods import quantization_settings

    path = Path(str(request.source))
    folder = path.parent if path.name == CONFIG else path
    if not (folder / CONFIG).is_file() or request.is_changed or request.dtype:
        return None
    if any(file.is_dir() or not is_side_file(file.name, ()) for file in folder.iterdir() if file.name[0] != "."):
        return None
    if quantization_settings(read_config(folder / CONFIG)):
        return None
    require_transformers("a plan of config.json alone")
    from reshard.model.skeleton import skeleton  # torch

    return skeleton(folder, plan_file=Path(request.plan_file) if request.plan_file else None)


# ------------------------------------------------------------------------------------------------------- plan files


def _save(architecture: Architecture, file: Path) -> None:
    from reshard.formats.notation.architecture_files import to_toml

    _write_new(file, to_toml(architecture))
    count = plural(len(architecture.tensors), "rule")
    print_note(f"Wrote {count} of '{architecture.name}' to {file}. Use it with --plan {file}")


def _write_new(file: Path, text: str) -> None:
    with disk_errors(file), file.open("x", encoding="utf-8") as stream:
        stream.write(text)


def _write_draft(request: PlanRequest, file: Path) -> None:
    from reshard.mesh.degrees import valid_degrees
    from reshard.source.opening import draft_of, find, open_source
    from reshard.store.selection import Weights

    path = find(request.source, dataclasses.replace(request, quiet=True), Weights.HEADERS)
    draft = draft_of(path)
    _write_new(file, draft.text)
    what = f"{file}: the rules of '{draft.base}', and {plural(draft.checks, 'line')} marked CHECK"
    try:
        degrees = valid_degrees(open_source(path, plan_file=file).model)
    except ReshardError as error:
        hint = f"edit {file} until 'reshard plan {request.source} --plan {file}' shows the degrees"
        raise PlanError(f"wrote {what}, which do not fit yet: {error.message}", hint) from error
    possible = ", ".join(map(str, degrees[:12])) if degrees != [1] else "1 alone: it splits nothing"
    print_note(
        f"Wrote a draft to {what}. It allows the degrees {possible}. Check it, split with --plan {file}, and let "
        f"'reshard verify {request.source} OUT --plan {file}' decide."
    )


# --------------------------------------------------------------------------------------------------------- one mesh


def _print_plan(plan: Plan, opened: Source | None, request: PlanRequest, as_json: bool) -> None:
    """Print the part of each rank."""
    from reshard.commands.plan import plan_text, title
    from reshard.formats.notation.format_file import OWN
    from reshard.mesh.totals import rows_of, totals_of
    from reshard.move.moves import download_of
    from reshard.placement.arrangement import arrangement_of

    source, ends, rates = str(request.source), (0, plan.mesh.size - 1), request.rates
    download = (
        max(download_of(opened, arrangement_of(plan, OWN), rank) for rank in ends) if opened and opened.is_remote else 0
    )
    if not as_json:
        print_lines(plan_text(plan, f"{source}: {title(plan.model)}", rates, terminal_width(), download or None))
        return
    rows = rows_of(plan)
    totals = totals_of(plan, rows)
    keys = {"name": "tensor", "full": "full_shape", "local": "rank_shape", "replicated": "bytes_replicated"}
    document = {
        "source": source, "architecture": plan.model.architecture.name, "mesh": plan.mesh,
        "sizes": plan.model.sizes.of({}), "padding": plan.padding,
        "rows": [fields_of(row, **keys, is_uneven="uneven") | {"copies": max(row.copies, default=1)} for row in rows],
    }  # fmt: skip
    keys = {"bytes_least": "bytes_per_rank_least", "replicated": "bytes_replicated_per_rank"}
    document |= fields_of(totals, **keys, forward="", backward="") | {"download_per_rank": download or None}
    passes = {name: fields_of(getattr(totals, name), nbytes="bytes") for name in ("forward", "backward")}
    print_json(document | {"all_reduce_per_token": passes} | _per_token(plan, rates))


def _per_token(plan: Plan, rates: Rates) -> dict[str, Any]:
    """The traffic of a rank for a document; null if it is not known."""
    from reshard.mesh.traffic import traffic_of

    traffic = traffic_of(plan)
    known = fields_of(traffic) | {"time_in_collectives": traffic.share(rates)} if traffic is not None else None
    return {"per_token": known, "rates": vars(rates)}


def _print_program(plan: Plan, format: Format, request: PlanRequest, as_json: bool) -> None:
    """Print the tensors that a program would store."""
    from reshard.commands.plan import sources_text, stored_rows, title, traffic_pairs
    from reshard.placement.arrangement import arrangement_of

    source, mesh, rows = str(request.source), plan.mesh, stored_rows(arrangement_of(plan, format))
    cells = [("tensor", "made of", "", "dtype", "on a rank", "tensors", "bytes")]
    for row in rows:
        sizes = (shape_text(row.shape) or "scalar", f"{row.tensors:,}", human_bytes(row.nbytes))
        cells.append((row.name, sources_text(row), row.how, row.dtype, *sizes))
    total = f"{human_bytes(sum(row.nbytes for row in rows))} on the first of {plural(mesh.size, 'rank')} of {mesh}"
    files, ends = format.files, (0, mesh.size - 1)
    names = dict.fromkeys(files.name_of(mesh, rank, 0, tensor="{tensor}", kind=files.weights) for rank in ends)
    table = align(cells, right=(5, 6), width=terminal_width(), elastic=(0, 1))
    document = {"source": source, "format": format.name, "mesh": mesh, "rows": [fields_of(row) for row in rows]}
    document |= _per_token(plan, request.rates)
    pairs = [*traffic_pairs(plan, request.rates)]
    sent = align(pairs, right=(), width=None) if pairs else []
    lines = (f"{source}: {title(plan.model)}", "", *table, "", total, f"files: {', '.join(names)}", *sent)
    print_answer(as_json, document, *lines)


def _print_tp_plan(model: Model, tp: int | None, as_json: bool) -> None:
    """Print the dict on stdout, and on stderr where transformers does something else than the rules say."""
    from reshard.formats.mesh import Mesh
    from reshard.mesh.degrees import check_degrees

    require_transformers("--tp-plan")
    from reshard.model.tp_plan import transformers_plan

    if tp is not None:
        check_degrees(model, Mesh((("tp", tp),)))
    plan = transformers_plan(model, tp)
    notes = {"gathered": plan.gathered, "whole": plan.whole, "degree_divides": list(plan.degrees_of)}
    print_answer(as_json, {"tp_plan": plan.styles, **notes}, json.dumps(plan.styles, indent=2))
    for name, why in plan.gathered.items():
        print_note(f"{name}: split, its vector whole on every rank before and after: {why}")
    for name, why in plan.whole.items():
        print_note(f"{name}: whole on every rank: {why}")
    if plan.degrees_of:
        counts = " and ".join(map(str, plan.degrees_of))
        print_note(f"For degrees that divide {counts}, the number of KV heads; for others give --tp N.")


# -------------------------------------------------------------------------------------------------- possible degrees


def _print_degrees(degrees: PossibleDegrees, as_json: bool) -> None:
    """Print which degrees are possible."""
    from reshard.commands.plan import other_ways

    swept, model, collectives = degrees.swept, degrees.model, dict(degrees.collectives([1]))
    attempts = [
        {
            "tp": degree, "valid": refusal is None, "reason": refusal and refusal.why,
            "possible_with": other_ways(refusal) if refusal else [],
            "time_in_collectives": collectives[degree][0] if degree in collectives else None,
        }
        for degree, refusal in swept.attempts.items()
    ]  # fmt: skip
    document = {
        "source": str(degrees.request.source), "architecture": model.architecture.name, "sizes": model.sizes.of({}),
        "valid_degrees": swept.valid, "valid_ep_degrees": swept.valid_ep, "degrees": attempts,
    }  # fmt: skip
    print_answer(as_json, document, degrees.to_text())
