"""``reshard verify``, alone or as one of the ranks that a launcher such as torchrun started."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import click

from reshard.cli.options import FILE, HUB, PLACE, Command, Group, Option, changed, request_of, with_option_names
from reshard.cli.printing import (
    bars_are_wanted,
    command_line,
    print_answer,
    print_error,
    print_json,
    print_lines,
    print_note,
    print_traceback,
    progress_of,
    tracebacks_are_wanted,
    write_report,
)
from reshard.formats.errors import CheckpointError, ReshardError

if TYPE_CHECKING:
    from reshard.verify.command import VerifyRequest
    from reshard.verify.report.answer import Answer


@click.command(
    "verify",
    cls=Command,
    quiet="Print the verdict, no more.",
    examples={
        "reshard verify model out": "compare the bytes, then the outputs",
        "reshard verify model served --exact-only": "the bytes alone: no torch, no GPU",
        "reshard verify model out --backward --report proof.html": "the gradients too, and a page with the proof",
    },
    options=(
        Option("--exact-only", group=Group.WHAT, is_flag=True, help="Compare the bytes alone: no torch, no GPU."),
        changed("adapter", help="Compare with ORIGINAL plus this LoRA adapter."),
        Option("--backward", group=Group.WHAT, is_flag=True, help="Compare the gradient of every weight too."),
        Option("--engine", group=Group.WHAT, type=click.Choice(["vllm"]),
               help="Also run SHARDS in the engine they are for."),
        Option("--loader", group=Group.WHAT, type=PLACE, metavar="PYTHON",
               help="Also ask the loader of SHARDS' program, in its Python."),
        "patch", "dequantize", "quantize", "dtype",
        changed("plan_file", type=FILE, help="The file with which SHARDS were split."), "config", *HUB, "device",
        Option("--compute-dtype", group=Group.HOW, metavar="NAME", help="Dtype to run in; default: the model's own."),
        Option("--batch", group=Group.HOW, type=click.IntRange(1), default=2, show_default=True, metavar="N",
               help="Sequences at once."),
        Option("--seq", group=Group.HOW, type=click.IntRange(1), default=32, show_default=True, metavar="N",
               help="Tokens in a sequence."),
        Option("--prompt", group=Group.HOW, metavar="TEXT", help="Run on this text, not on random tokens."),
        Option("--streamed", group=Group.HOW, is_flag=True, help="One block at a time, for a model beyond memory."),
        Option("--engine-python", group=Group.HOW, type=PLACE, metavar="PATH",
               help="The python of the engine's environment."),
        changed("dry_run", help="Say what memory it needs; compare nothing."),
        Option("--seed", group=Group.RARE, type=int, default=0, show_default=True, metavar="N",
               help="Seed of the random tokens."),
        "timeout", "report",
    ),
)  # fmt: skip
@click.argument("original", type=PLACE, metavar="ORIGINAL")
@click.argument("shards", type=PLACE, metavar="SHARDS")
def verify_command(exact_only: bool, report: Path | None, as_json: bool, quiet: bool, **options: Any) -> int:
    """Prove that SHARDS are the model ORIGINAL: compare the bytes, then run both and compare the outputs.

    ORIGINAL is the full checkpoint, SHARDS what 'reshard split' or another program wrote, in any format that 'reshard
    formats' lists. Either is a folder, a Hub id or a URL. With --exact-only, what is not on this machine is read where
    it is; otherwise it is downloaded into the cache first. If ORIGINAL is split, or is what a trainer saved, its bytes
    alone are compared.

    The bytes are compared by the rules that 'reshard split' has. A wrong rule of a model is seen by the forward pass,
    in transformers, and a wrong rule of a format only by --loader or --engine. The verdict says what it rests on.

    With a launcher of your own: torchrun --nproc-per-node N -m reshard.verify ORIGINAL SHARDS. Only the first rank
    prints.

    Exit code 0: the same. 1: different. 2: it could not be checked, or files are missing. 3: an adapter without effect.
    (torchrun ends with 1 for every code but 0.)
    """
    from reshard.verify.command import SILENT, Display, VerifyRequest, attempt, needs
    from reshard.verify.ending import one_line_when_interrupted

    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # torch's threads of a rank that waits are not to spin
    is_dry = options.pop("dry_run")
    request = request_of(VerifyRequest, options, exact_only=exact_only, quiet=quiet or as_json)
    if is_dry:
        result = needs(request)
        print_answer(as_json, {"needs": asdict(result)}, str(result))
        return 0
    answer = request.begin()
    finish = partial(_finish, answer, report, as_json=as_json, quiet=quiet)
    with one_line_when_interrupted(_interrupted):
        is_launched = {"RANK", "WORLD_SIZE"} <= os.environ.keys()  # by torchrun, say
        if not is_launched or (exact_only and os.environ["RANK"] == "0"):
            attempt(answer, request, SILENT if request.quiet else Display(_bytes, _phases))
            return finish()
        if exact_only:
            return 0  # the first rank compares the bytes and speaks
        return _verify_as_rank(answer, request, finish)


def _interrupted() -> str:
    """The line of a command that is interrupted, in place of a bar that it may have drawn; of ranks, the first's."""
    if os.environ.get("RANK", "0") != "0":
        return ""
    return ("\r\x1b[K" if bars_are_wanted() else "") + "reshard: interrupted\n"


def _verify_as_rank(answer: Answer, request: VerifyRequest, finish: Callable[[], int]) -> NoReturn:
    """Verify as one of a launcher's ranks: the first compares the bytes and speaks for all, the others wait for its
    word.
    """
    from reshard.verify.command import SILENT, Display, attempt
    from reshard.verify.forward.launch import Crew

    crew = Crew()

    def work() -> Any:
        display = Display(_bytes, _phases) if crew.is_first and not request.quiet else SILENT
        attempt(answer, request, display, crew)
        failed = answer.forward if answer.forward is not None and answer.forward.failure is not None else None
        return answer.error or failed

    def report(end: Any) -> int:
        if isinstance(end, ReshardError):
            answer.error = end
        elif end is not None:
            answer.forward, answer.error = end, None
        return finish()

    crew.run(work, report)


def _finish(answer: Answer, report: Path | None, *, as_json: bool, quiet: bool) -> int:
    """Write the page, print the answer, and return the exit code: 2 also for a page that could not be written."""
    if answer.error is not None:
        if tracebacks_are_wanted():
            print_traceback(answer.error)
        answer.error = with_option_names(answer.error, verify_command)
        print_error(answer.error.message, answer.error.hint)
    code = answer.exit_code
    if report is not None:
        from reshard.verify.report.page import page

        try:
            write_report(report, page(answer.to_document(), command_line()))
        except CheckpointError as error:
            print_error(error.message)
            report, code = None, code or 2
    if as_json:
        print_json(answer.to_document())
    elif quiet:
        print_lines(answer.verdict)
    else:
        text = answer.to_text(report=report)
        print_lines(answer.verdict.upper() if text == answer.headline else text)  # the error has been printed
    return code


# ------------------------------------------------------------------------------------------------------------ progress


_TICK = 1.0  # seconds between two looks at the clock


def _bytes() -> AbstractContextManager[Callable[..., None]]:
    print_note("comparing bytes")
    return progress_of("comparing bytes", how="auto")


def _phases() -> AbstractContextManager[Callable[[str], None]]:
    """On a terminal one line a phase with its seconds, elsewhere the name of each phase as it begins."""
    return _ticking() if bars_are_wanted() else nullcontext(print_note)


@contextmanager
def _ticking() -> Iterator[Callable[[str], None]]:
    """Show each phase on a line of its own, with the seconds that it takes."""
    phase, started, ended = "", time.monotonic(), threading.Event()

    def begin(text: str) -> None:
        nonlocal phase, started
        show("\n")
        phase, started = text, time.monotonic()
        show()

    def show(end: str = "") -> None:
        if phase:
            print(f"\r{phase}: {time.monotonic() - started:.0f} s\x1b[K", end=end, file=sys.stderr, flush=True)

    def tick() -> None:
        while not ended.wait(_TICK):
            show()

    thread = threading.Thread(target=tick, daemon=True)
    thread.start()
    try:
        yield begin
    finally:
        ended.set()
        thread.join()
        show("\n")
