"""``reshard profile``: which degree is fast on this node."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from reshard.cli.options import HUB, NUMBERS, PLACE, Command, Group, Option, Value, changed, request_of
from reshard.cli.printing import command_line, print_answer, print_note, write_report
from reshard.text import size_of, speed_of

_LEAST_MEMORY = 1_000_000


def phases(text: str) -> tuple[str, ...]:
    """Names with commas between them."""
    return tuple(dict.fromkeys(text.split(",")))


def memory(text: str) -> int:
    """A number of bytes; a few bytes are a unit that was forgotten. Raises ValueError."""
    nbytes = size_of(text)
    if nbytes < _LEAST_MEMORY and text.strip().isdecimal():
        raise ValueError(f"'{text}' is {nbytes} bytes; with a unit it is {nbytes}GB or {nbytes}MB")
    return nbytes


@click.command(
    "profile",
    cls=Command,
    examples={
        "reshard profile model --report profile.html": "all degrees that are possible here, with plots",
        "reshard profile model --tp 1,2 --batch 1,8 --phase decode": "these degrees, batches and phase alone",
        "reshard profile model --predict-tp 4,8 --link 450GB/s": "also predict degrees that this node has no ranks for",
    },
    options=(
        changed("tp", type=NUMBERS, metavar="N,..", help="Degrees to run; default: all that are possible."),
        Option("--phase", group=Group.WHAT, type=Value("phases", phases), default="decode,prefill", metavar="NAME,..",
               help="decode, prefill, train; default: the first two."),
        Option("--predict-tp", group=Group.WHAT, type=NUMBERS, metavar="N,..",
               help="Degrees to predict without running them."),
        Option("--batch", group=Group.HOW, type=NUMBERS, default="1", show_default=True, metavar="N,..",
               help="Sequences at once."),
        Option("--seq", group=Group.HOW, type=NUMBERS, default="512", show_default=True, metavar="N,..",
               help="Tokens in a sequence."),
        "device",
        Option("--dtype", group=Group.WHAT, metavar="NAME", help="Dtype to run in; default: the model's own."),
        Option("--ranks", group=Group.HOW, type=click.IntRange(1), metavar="N",
               help="Ranks at most; default: one a GPU, or a core."),
        Option("--memory", group=Group.HOW, type=Value("size", memory), metavar="SIZE",
               help="Memory of a rank, such as 78GB; default: its own."),
        Option("--link", group=Group.HOW, type=Value("speed", speed_of), metavar="SPEED",
               help="Bandwidth to predict with; default: as measured."),
        Option("--seconds", group=Group.RARE, type=click.FloatRange(0, min_open=True), default=3.0, metavar="SECONDS",
               help="Longest time of one measurement; default: 3."),
        changed("timeout", default=600.0, help="How long a rank waits for others; default: 600."),
        "report", "plan_file", *HUB,
    ),
)  # fmt: skip
@click.argument("source", type=PLACE)
def profile_command(report: Path | None, as_json: bool, **options: Any) -> None:
    """Measure which degree of tensor parallelism is fast on this node.

    SOURCE needs a config.json alone: the weights are random numbers. For each degree, one layer of each kind runs on
    as many ranks, with the embedding, the head and real collectives, on GPUs or on this machine's cores. The time of
    the whole model and the memory of a rank follow from that, and so does one recommended degree.
    """
    from reshard.profile.job import ProfileRequest
    from reshard.verify.ending import one_line_when_interrupted

    request = request_of(ProfileRequest, options, quiet=as_json)
    say: Callable[[str], None] = (lambda _: None) if as_json else print_note
    with one_line_when_interrupted(lambda: "reshard: interrupted\n"):
        say("reading config.json")
        from reshard.profile.command import profile  # it imports torch, which takes a while

        result = profile(request, say)
    from reshard.profile.words import document_of

    document = {"command": "profile", "source": result.source, **document_of(result)}
    print_answer(as_json, document, str(result))
    if report is not None:
        from reshard.profile.page import page

        write_report(report, page(document, command_line()))
        print_note(f"Drew the profile: {report}")
