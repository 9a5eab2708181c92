"""``reshard live``: the plan of a push between running processes, and its check with an engine's own loader."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import click

from reshard.cli.options import HUB, PATH, PLACE, RANKS, Command, Group, Option, Value, changed, given_options
from reshard.cli.printing import command_line, print_answer, print_note, write_report
from reshard.text import plural, speed_of

_OF_A_PLAN = {"--from", "--link", "--report", "--plan", "--config", "--revision", "--token", "--cache-dir"}


@click.command(
    "live",
    cls=Command,
    examples={
        "reshard live plan model --from fsdp2:8 --to vllm:tp2": "who sends how much, and the least time",
        "reshard live plan model --from fsdp2:8 --to vllm:tp2 --report push.html": "the same, and a picture of it",
        "reshard live check meta-llama/Llama-3.1-8B --to vllm:tp4": "whether vLLM's own loader agrees with the rules",
    },
    options=(
        Option("--from", "trainer", group=Group.WHAT, type=RANKS, metavar="WHO",
               help="The trainer, such as fsdp2:8."),
        Option("--to", "receiver", group=Group.WHAT, type=RANKS, metavar="WHO", required=True,
               help="The engine, such as vllm:tp4."),
        Option("--link", group=Group.HOW, type=Value("speed", speed_of), metavar="SPEED",
               help="Bandwidth of a rank; default: 50GB/s."),
        Option("--engine-python", "python", group=Group.HOW, type=PATH, metavar="FILE",
               help="The Python that has vLLM, and reshard."),
        changed("report", help="Draw the push, as an HTML page."), "plan_file", "config", *HUB,
    ),
)  # fmt: skip
@click.argument("what", type=click.Choice(["plan", "check"]))
@click.argument("source", type=PLACE)
def live_command(
    what: str, source: str, trainer: str | None, receiver: str, link: float | None, python: Path | None,
    report: Path | None, as_json: bool, **access: Any,
) -> bool:  # fmt: skip
    """Plan a push of SOURCE between running ranks, or check one before there is any. No process runs.

    'plan' says who sends how much to whom, from the headers alone. 'check' asks vLLM's own loader, in its environment
    on a CPU and without weights, where each element belongs, and compares that with the rules. To push from a program,
    see 'help(reshard.live)' in Python.

    Exit code 0: both agree. 1: not.
    """
    if what == "check":
        if further := given_options() & _OF_A_PLAN:
            raise click.UsageError(f"check goes without {min(further)}")
        return _check(source, receiver, python, as_json)
    if trainer is None or python is not None:
        raise click.UsageError("plan goes with --from, without --engine-python: --from fsdp2:8 --to vllm:tp4")
    _plan(source, trainer, receiver, link, report, as_json, access)
    return True


def _plan(
    source: str, trainer: str, receiver: str, link: float | None, report: Path | None, as_json: bool,
    access: dict[str, Any],
) -> None:  # fmt: skip
    from reshard.live.routing import LINK, routes

    plan, link = routes(source, source=trainer, target=receiver, quiet=as_json, **access), link or LINK
    document = {
        "source": source, "from": trainer, "to": receiver, "bytes": plan.nbytes, "sent": plan.sent,
        "received": plan.received, "steps": len(plan.ends), "link": link, "seconds_at_least": plan.bound(link),
        "digest": plan.digest,
    }  # fmt: skip
    print_answer(as_json, document, f"{source}: {trainer} -> {receiver}, {plan.to_text(link=link)}")
    if report is not None:
        from reshard.live.page import page

        write_report(report, page(plan, f"{source}: {trainer} to {receiver}", link, command_line()))
        print_note(f"Drew the push: {report}")


def _check(source: str, receiver: str, python: Path | None, as_json: bool) -> bool:
    from reshard.live.meshes import target_of
    from reshard.live.vllm_check import check
    from reshard.verify.ending import one_line_when_interrupted

    target = target_of(receiver)
    if target.program != "vllm" or target.pp > 1 or target.ep not in (1, target.tp):
        raise click.UsageError("--to names vLLM on ranks of tp: vllm:tp4, or vllm:tp4ep4 with experts over them")
    with one_line_when_interrupted(lambda: "reshard: interrupted\n"):  # vLLM's process ends, too
        lines = check(source, target, python=str(python or sys.executable))
    document = {"source": source, "to": str(target), "agree": not lines, "differences": lines}
    agreed = f"{source}: vLLM's own loader and the rules agree on each element of {plural(target.tp, 'rank')}"
    print_answer(as_json, document, *(lines or [agreed]))
    return not lines
