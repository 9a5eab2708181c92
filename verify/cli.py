"""``reshard verify`` and ``python -m verify``: parse, let the libraries work, print."""

from __future__ import annotations

import importlib
import json
import math
import os
import platform
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from formats.errors import ReshardError
from formats.mesh import read_mesh
from verify.report.markup import number, percent, printable, ratio

if TYPE_CHECKING:
    from reshard.api import Access
    from reshard.storage.source import Source
    from verify.bytes.exact_report import ExactReport
    from verify.forward.crew import Crew

SCHEMA_VERSION = 1
SHOWN = 10
"""Lines of each kind that the summary shows; ``--json`` has all of them."""


@dataclass(frozen=True)
class _OwnPlan:
    """The user's plan that bytes were compared with, and what it says otherwise than the built-in rules of the type.

    ``differences`` is None if there are no such rules.
    """

    name: str
    model_type: str
    differences: tuple[str, ...] | None

    def __str__(self) -> str:
        if self.differences is None:
            return f"plan {self.name}: there are no built-in rules of model type '{self.model_type}' to compare it with"
        if not self.differences:
            return f"plan {self.name}: says the same as the built-in rules of model type '{self.model_type}'"
        title = f"plan {self.name}: differs from the built-in rules of model type '{self.model_type}'"
        return "\n".join([title, *_some("", self.differences)])


@dataclass
class _Run:
    """What was asked for, and what has been found so far."""

    original: str
    shards: str
    options: dict[str, Any]
    is_json: bool
    quiet: bool
    report: Path | None = None
    plan: _OwnPlan | None = None
    exact: Any = None
    forward: Any = None
    error: ReshardError | None = None
    unwritten: str = ""
    """Why the report is not there."""
    notes: list[str] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)
    created: str = field(default_factory=lambda: datetime.now(UTC).isoformat(timespec="seconds"))

    @property
    def is_silent(self) -> bool:
        """Whether no progress is shown."""
        return self.quiet or self.is_json

    @property
    def exit_code(self) -> int:
        """0 the same, 1 different, 2 could not be checked (or the report could not be written)."""
        code = ("same", "different", "unchecked").index(self.verdict)
        return 2 if self.unwritten and code == 0 else code

    @property
    def verdict(self) -> str:
        """The answer in one word."""
        bytes_differ = self.exact is not None and self.exact.verdict == "different"
        if bytes_differ or (self.forward is not None and not self.forward.is_same):
            return "different"
        return "unchecked" if self.error or self.exact is None else "same"

    @property
    def in_words(self) -> str:
        """The verdict in a sentence or two."""
        return in_words(self.exact, self.forward, self.error, self.plan)

    def to_document(self) -> dict[str, Any]:
        """The document of ``--json``, which is also what the page is made from."""
        from reshard import __version__

        error = {"message": self.error.message, "hint": self.error.hint} if self.error else None
        document = {
            "schema_version": SCHEMA_VERSION,
            "command": "verify",
            "original": self.original,
            "shards": self.shards,
            "verdict": self.verdict,
            "summary": self.in_words,
            "plan": asdict(self.plan) if self.plan is not None else None,
            "exact": self.exact.to_document() if self.exact is not None else None,
            "forward": asdict(self.forward) if self.forward is not None else None,
            "error": error,
            "notes": self.notes,
            "options": {key: value for key, value in self.options.items() if value not in (None, False)},
            "seconds": self.seconds,
            "environment": {
                "reshard": __version__,
                "python": platform.python_version(),
                "platform": platform.platform(terse=True),
            },
            "created": self.created,
        }
        cleaned: dict[str, Any] = _finite(document)
        return cleaned


def _finite(value: Any) -> Any:
    """The same without the numbers that JSON does not have: they become ``"inf"``, ``"-inf"`` and ``"nan"``."""
    if isinstance(value, dict):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value if value is None or isinstance(value, (bool, int, float, str)) else str(value)


@click.command("verify", context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.argument("original", metavar="ORIGINAL")
@click.argument("shards", metavar="SHARDS")
@click.option("--exact-only", is_flag=True, help="Compare bytes alone: no torch, no GPU.")
@click.option("--device", type=click.Choice(["auto", "cpu", "cuda"]), default="auto", show_default=True,
              help="Where the forward pass runs.")  # fmt: skip
@click.option("--dtype", metavar="NAME", help="Run in this dtype instead of the checkpoint's own.")
@click.option("--batch", type=click.IntRange(1), default=2, show_default=True, help="Sequences in the forward pass.")
@click.option("--seq", type=click.IntRange(1), default=32, show_default=True, help="Tokens in a sequence.")
@click.option("--seed", type=int, default=0, show_default=True, help="Of the random tokens.")
@click.option("--prompt", metavar="TEXT", help="Run on this text, with the checkpoint's tokenizer.")
@click.option("--backward", is_flag=True, help="Compare the gradient of every weight too.")
@click.option("--streamed", is_flag=True, help="One block at a time, for models larger than the memory.")
@click.option("--timeout", type=click.FloatRange(0, min_open=True), default=300.0, show_default=True, metavar="SECONDS",
              help="How long a rank waits for the others.")  # fmt: skip
@click.option("--report", type=click.Path(dir_okay=False, path_type=Path), metavar="FILE",
              help="Write an HTML page, which needs no network.")  # fmt: skip
@click.option("--plan", "plan_file", type=click.Path(dir_okay=False, path_type=Path), metavar="FILE",
              help="The plan file that the shards were split by.")  # fmt: skip
@click.option("--revision", metavar="REV", help="Of ORIGINAL on the Hub.")
@click.option("--token", metavar="TOKEN", help="For the Hub.")
@click.option("--cache-dir", type=click.Path(file_okay=False, path_type=Path), metavar="DIR",
              help="Of the Hub's files.")  # fmt: skip
@click.option("--json", "is_json", is_flag=True, help="One JSON document on stdout.")
@click.option("-q", "--quiet", is_flag=True, help="No progress and no summary: print same, different or unchecked.")
@click.option("--debug", is_flag=True, help="Show tracebacks.")
def verify_command(
    original: str,
    shards: str,
    exact_only: bool,
    device: str,
    dtype: str | None,
    batch: int,
    seq: int,
    seed: int,
    prompt: str | None,
    backward: bool,
    streamed: bool,
    timeout: float,
    report: Path | None,
    plan_file: Path | None,
    revision: str | None,
    token: str | None,
    cache_dir: Path | None,
    is_json: bool,
    quiet: bool,
    debug: bool,
) -> int:
    """Prove that SHARDS are the model ORIGINAL: byte for byte, then forward for forward.

    ORIGINAL is the full checkpoint, a folder or a Hub id; SHARDS the folder that 'reshard split' wrote. The bytes need
    no GPU and no torch; the forward pass runs as many processes as there are ranks. Exit code 0: the same,
    1: different, 2: could not be checked.

    Under a launcher of your own: torchrun --nproc-per-node N -m verify ORIGINAL SHARDS. Only the first rank prints.
    (torchrun itself exits with 1 for every code but 0.)
    """
    from reshard.api import Access
    from verify.ending import one_line_when_interrupted

    if report is not None and not report.absolute().parent.is_dir():
        raise click.UsageError(f"--report: there is no folder {report.absolute().parent}")
    settings = {
        "device": device, "dtype": dtype, "batch": batch, "seq": seq, "seed": seed, "prompt": prompt,
        "backward": backward, "streamed": streamed, "timeout": timeout,
    }  # fmt: skip
    run = _Run(original, shards, {"exact_only": True} if exact_only else settings, is_json, quiet, report)
    access = Access(revision, token, cache_dir, plan_file, quiet or is_json)
    with one_line_when_interrupted(_interrupted):
        if not is_launched() or (exact_only and os.environ["RANK"] == "0"):
            _attempt(run, access, debug)
            _finish(run)
        elif exact_only:
            return 0  # the first rank says it
        else:
            _verify_as_rank(run, access, debug)
    return run.exit_code


def _interrupted() -> str:
    """The line of a command that is interrupted, in place of a bar that it may have drawn; of ranks, the first's."""
    from reshard.cli.progress import bars_are_wanted

    if os.environ.get("RANK", "0") != "0":
        return ""
    return ("\r\x1b[K" if bars_are_wanted() else "") + "reshard: interrupted\n"


def is_launched() -> bool:
    """Whether a launcher such as torchrun started this process as one of several."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def _verify_as_rank(run: _Run, access: Access, debug: bool) -> None:
    """As one rank of a launcher's: the first compares the bytes and speaks for all, the others wait for its word."""
    from verify.forward.crew import Crew

    def take(end: Any) -> None:
        if isinstance(end, ReshardError):
            run.error = end
        elif end is not None:
            run.forward, run.error = end, None

    def give_up(end: Any) -> int:
        take(end)
        _finish(run)
        return run.exit_code

    crew = Crew(give_up)
    _attempt(run, access, debug, crew)
    failed = run.forward if run.forward is not None and run.forward.failure is not None else None
    if not crew.is_first:
        crew.leave(run.error or failed)
    take(crew.first_end(run.error or failed))
    _finish(run)
    crew.end(run.exit_code)


def _attempt(run: _Run, access: Access, debug: bool, crew: Crew | None = None) -> None:
    try:
        _verify(run, access, crew)
    except ReshardError as error:
        if debug:
            traceback.print_exc()
        run.error = error


def _verify(run: _Run, access: Access, crew: Crew | None) -> None:
    """Compare bytes, then run the model, unless that is not wanted or the shards could not be run."""
    from reshard.storage.access import open_any
    from verify.bytes.exact import open_shards
    from verify.bytes.exact_report import ExactReport

    is_first = crew is None or crew.is_first
    original = open_any(run.original, access)
    shards = open_shards(Path(run.shards), plan_file=access.plan_file)
    run.plan = _own_plan(original, shards, access.plan_file)
    is_wanted = is_first and _compare_bytes(run, original, shards) and "exact_only" not in run.options
    if crew is not None:
        is_wanted = crew.agree(is_wanted)
    if is_wanted and isinstance(shards, ExactReport):  # and the first rank has seen others, on a disk of its own
        raise ReshardError(f"rank {os.environ['RANK']}: {'; '.join(shards.problems)}")
    if is_wanted:
        forward = importlib.import_module("verify.forward.compare")
        started = time.monotonic()
        with _phases(is_silent=run.is_silent or not is_first) as progress:
            run.forward = forward.run_forward(original, shards, forward.ForwardOptions(**run.options), progress)
        run.seconds["forward"] = time.monotonic() - started


def _own_plan(original: Source, shards: Source | ExactReport, plan_file: Path | None) -> _OwnPlan | None:
    """The plan that is not a built-in one: the user's file, or what the shards say that they were split by."""
    from verify.bytes.exact_report import ExactReport
    from verify.rules import own_rules

    if isinstance(shards, ExactReport):
        return None
    differences = own_rules(shards.plan, original.model.architecture)
    if plan_file is None and not differences:
        return None
    name = str(plan_file) if plan_file is not None else f"of {shards.path}"
    return _OwnPlan(name, str(original.model.config.get("model_type")), differences)


def _compare_bytes(run: _Run, original: Source, shards: Source | ExactReport) -> bool:
    """Compare bytes, and return whether these shards can be run."""
    from reshard.cli.progress import Progress
    from verify.bytes.exact import compare
    from verify.bytes.exact_report import ExactReport

    if isinstance(shards, ExactReport):
        run.exact = shards
        return False
    started = time.monotonic()
    if not run.is_silent:
        _say("comparing bytes")
    with Progress("comparing bytes", quiet=run.is_silent) as progress:
        run.exact = compare(original, shards, progress)
    run.seconds["bytes"] = time.monotonic() - started
    if not run.exact.comparable and "exact_only" not in run.options:
        run.notes.append("The forward was not run: these are not the original's tensors.")
    return bool(run.exact.comparable)


# ------------------------------------------------------------------------------------------------------------ progress


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


@contextmanager
def _phases(*, is_silent: bool) -> Iterator[Callable[[str], None]]:
    """Show on stderr what is being done: on a terminal with the seconds that it takes, elsewhere a line each."""
    from reshard.cli.progress import bars_are_wanted

    if is_silent or not bars_are_wanted():
        yield (lambda _: None) if is_silent else _say
        return
    phase, started, done = "", time.monotonic(), threading.Event()

    def begin(text: str) -> None:
        nonlocal phase, started
        show("\n")
        phase, started = text, time.monotonic()
        show()

    def show(end: str = "") -> None:
        if phase:
            print(f"\r{phase}: {time.monotonic() - started:.0f} s\x1b[K", end=end, file=sys.stderr, flush=True)

    def tick() -> None:
        while not done.wait(1):
            show()

    thread = threading.Thread(target=tick, daemon=True)
    thread.start()
    try:
        yield begin
    finally:
        done.set()
        thread.join()
        show("\n")


# ------------------------------------------------------------------------------------------------------------ printing


def _finish(run: _Run) -> None:
    """Write the page, and print the answer."""
    if run.report is not None:
        from verify.report.page import write_page

        try:
            write_page(run.report, run.to_document())
        except OSError as error:
            run.unwritten = f"--report {run.report}: {error.strerror or error}"
    if run.error is not None:
        _say(f"Error: {_one_line(run.error.message)}")
        if run.error.hint:
            _say(f"Hint: {_one_line(run.error.hint)}")
    if run.unwritten:
        _say(f"Error: {run.unwritten}")
    if run.is_json:
        text = json.dumps(run.to_document(), indent=2, ensure_ascii=False, allow_nan=False)
        click.echo(text.encode("utf-8", "backslashreplace"))
    elif run.quiet:
        click.echo(run.verdict)
    else:
        click.echo(printable("\n".join(_summary(run))))


def _one_line(text: str) -> str:
    return printable(" ".join(text.split()))


def _summary(run: _Run) -> list[str]:
    """What is printed for a person; the verdict comes last."""
    parts = [str(run.plan)] if run.plan is not None else []
    parts += [exact_summary(run.exact)] if run.exact is not None else []
    parts += [*run.notes, *([forward_summary(run.forward)] if run.forward is not None else [])]
    if run.report is not None and run.report.exists():
        parts.append(f"report: {run.report}")
    if not parts:  # the error has been printed
        return [run.verdict.upper()]
    return [*parts, "", f"{run.verdict.upper()}: {run.in_words}"]


def in_words(exact: Any, forward: Any, error: ReshardError | None, plan: _OwnPlan | None = None) -> str:
    """The verdict in a sentence or two, with the first tensor and the first layer that differ by name."""
    parts = []
    if exact is not None and exact.verdict == "different":
        parts.append(_difference_in_words(exact))
    elif exact is not None:
        by = f" by the plan {plan.name}" if plan is not None else ""
        parts.append(f"Every byte is the original's{by} ({_amount(exact)}).")
        if plan is not None and plan.differences != () and forward is None:
            parts.append("Whether that plan is right, the forward alone can tell.")
    if forward is not None:
        parts.append(forward.verdict)
        parts += [power_in_words(forward)] if forward.is_same and forward.power is not None else []
    if error is not None:
        what = "The forward" if exact is not None else "It"
        parts.append(f"{what} could not be checked: {_one_line(error.message)}")
    return " ".join(parts) or "Nothing was checked."


def power_in_words(forward: Any) -> str:
    """How small a fault the run would have shown, and how to see smaller ones where that is poor."""
    power = forward.power
    text = (
        f"That noise is up to {percent(power.noise)} of the values ('{power.place}'): a fault that moves "
        f"them by {percent(power.seen_from)} is seen there, and elsewhere a smaller one."
    )
    if power.bias_ratio is not None and power.bias_ratio <= forward.factor:
        text += f" A bias added twice is not: it measures {ratio(power.bias_ratio)} at '{power.bias_place}'."
    if power.is_poor:
        text += " That is little power" + ("; --dtype float32 has more." if forward.dtype != "float32" else ".")
    return text


def _difference_in_words(exact: Any) -> str:
    if exact.first is not None:
        first, places = exact.first, len(exact.damages)
        more = "" if places == 1 else f"; {places} parts of tensors differ"
        return f"Bytes differ, first in tensor '{first.tensor}' at {list(first.index)} on rank {first.rank}{more}."
    kinds = [("missing", exact.missing), ("extra", exact.extra), ("contradiction", exact.problems)]
    for word, found in kinds:
        if found:
            more = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
            return f"The shards are not the original's: {word}: {found[0]}{more}."
    return f"A config is not as it should be: {exact.configs[0]}."


def _amount(report: Any) -> str:
    from reshard.cli.table import human_bytes, plural

    size, tensors, ranks = human_bytes(report.nbytes), plural(report.tensors, "tensor"), plural(report.ranks, "rank")
    return f"{size} in {tensors} on {ranks}, {report.mesh}"


def exact_summary(report: Any) -> str:
    """What the byte comparison found, in words."""
    if report.verdict == "same":
        return f"bytes: all equal, {_amount(report)}; nothing missing, nothing extra"
    lines = [f"bytes: different ({_amount(report)} compared)"]
    lines += _some("", report.problems)
    lines += _some("missing: ", report.missing)
    lines += _some("extra: ", report.extra)
    lines += _some("", report.configs)
    if report.first is not None:
        lines.append(f"  first: {report.first}")
    damages = [f"{d.tensor} on rank {d.rank}: {d.elements} elements differ ({d.nbytes} bytes)" for d in report.damages]
    return "\n".join(lines + _some("", damages))


def forward_summary(report: Any) -> str:
    """What the forward pass (and the backward one) found: tables of places, and the logits beside the original's."""
    mesh = read_mesh(report.mesh, "mesh")
    lines = [
        f"forward: {report.dtype} on {report.ranks} ranks ({mesh}), {report.device}, {report.backend}; "
        f"{report.batch} x {report.seq} tokens, seed {report.seed}; measured against {report.exact_dtype}"
    ]
    lines += _places("layer", report.layers)
    if report.cut:
        more = f" (and {len(report.cut) - 1} more)" if len(report.cut) > 1 else ""
        lines.append(
            f"A rank's config.json gives '{report.cut[0]}'{more} another shape: other programs may not load it."
        )
    if report.gradients:
        worst = sorted(report.gradients, key=lambda row: (row.is_same, -row.ratio))[:SHOWN]
        lines += ["", *_places("gradient of", worst)]
        if len(report.gradients) > SHOWN:
            lines.append(f"and {len(report.gradients) - SHOWN} more weights with smaller ratios")
    return "\n".join([*lines, *(["", *_logits(report.logits)] if report.logits is not None else [])])


def _places(what: str, rows: Sequence[Any]) -> list[str]:
    from reshard.cli.table import align

    cells = [(what, "error", "noise", "ratio", "")]
    for row in rows:
        worst = row.worst if what == "layer" else row.worst.replace("token", "row").replace("channel", "column")
        mark = "" if row.is_same else f"<- different, worst in {worst} on rank {row.rank}"
        cells.append((row.name, number(row.error), number(row.noise), ratio(row.ratio), mark))
    return align(cells, right=(1, 2, 3), width=None)


def _logits(logits: Any) -> list[str]:
    from reshard.cli.table import align

    cells: list[tuple[str, ...]] = [("logits", "max error", "relative", "KL, nats", "same top token")]
    for name, own in (("shards", ""), ("original's own", "own_")):
        found = [getattr(logits, f"{own}{key}") for key in ("max_error", "relative_error", "kl", "agreement")]
        cells.append((name, *(number(x) for x in found[:3]), number(found[3], ".2%")))
    lines = align(cells, right=(1, 2, 3, 4), width=None)
    for m in logits.mismatches[:SHOWN]:
        lines.append(f"  position {m.position}: top token {m.found} for {m.expected}, which led by {number(m.margin)}")
    more = len(logits.mismatches) - SHOWN
    return [*lines, *([f"  and {more} more positions"] if more > 0 else [])]


def _some(title: str, items: Any) -> list[str]:
    lines = [f"  {title}{item}" for item in items[:SHOWN]]
    return [*lines, f"  {title}and {len(items) - SHOWN} more"] if len(items) > SHOWN else lines
