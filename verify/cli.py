"""``reshard verify`` and ``python -m verify``: parse, let the libraries work, print."""

from __future__ import annotations

import importlib
import json
import os
import sys
import traceback
from dataclasses import asdict, dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import click

from formats.errors import ReshardError

SCHEMA_VERSION = 1
SHOWN = 10
"""Lines of each kind that the summary shows; ``--json`` has all of them."""


@dataclass
class _Run:
    """What was asked for, and what has been found so far."""

    original: str
    shards: str
    is_json: bool
    quiet: bool
    exact: Any = None
    forward: Any = None
    error: ReshardError | None = None
    notes: list[str] = field(default_factory=list)

    @property
    def exit_code(self) -> int:
        """0 the same, 1 different, 2 could not be checked."""
        bytes_differ = self.exact is not None and self.exact.verdict == "different"
        if bytes_differ or (self.forward is not None and not self.forward.is_same):
            return 1
        return 2 if self.error or self.exact is None else 0

    @property
    def verdict(self) -> str:
        """The answer in one word."""
        return ("same", "different", "unchecked")[self.exit_code]

    def to_document(self) -> dict[str, Any]:
        """The document of ``--json``."""
        error = {"message": self.error.message, "hint": self.error.hint} if self.error else None
        return {
            "schema_version": SCHEMA_VERSION,
            "command": "verify",
            "original": self.original,
            "shards": self.shards,
            "verdict": self.verdict,
            "exact": self.exact.to_document() if self.exact is not None else None,
            "forward": asdict(self.forward) if self.forward is not None else None,
            "error": error,
        }


@click.command("verify", context_settings={"help_option_names": ["-h", "--help"]})
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
@click.option("--report", type=click.Path(dir_okay=False, path_type=Path), metavar="FILE", help="Write an HTML page.")
@click.option("--plan", "plan_file", type=click.Path(dir_okay=False, path_type=Path), metavar="FILE",
              help="The plan file that the shards were split by.")  # fmt: skip
@click.option("--revision", help="Of ORIGINAL on the Hub.")
@click.option("--token", help="For the Hub.")
@click.option("--cache-dir", type=click.Path(file_okay=False, path_type=Path), help="Of the Hub's files.")
@click.option("--json", "is_json", is_flag=True, help="One JSON document on stdout.")
@click.option("-q", "--quiet", is_flag=True, help="No progress and no summary: the verdict alone.")
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
) -> None:
    """Prove that SHARDS are the model ORIGINAL: byte for byte, then forward for forward.

    ORIGINAL is the full checkpoint, a folder or a Hub id; SHARDS the folder that 'reshard split' wrote. The bytes need
    no GPU and no torch; the forward pass runs as many processes as there are ranks. Exit code 0: the same,
    1: different, 2: could not be checked.
    """
    from reshard.api import Access

    if report is not None and find_spec("verify.page") is None:
        raise click.UsageError("--report is not available in this version")
    run = _Run(original, shards, is_json, quiet)
    access = Access(revision, token, cache_dir, plan_file, quiet or is_json)
    settings = {
        "device": device, "dtype": dtype, "batch": batch, "seq": seq, "seed": seed, "prompt": prompt,
        "backward": backward, "streamed": streamed, "timeout": timeout,
    }  # fmt: skip
    try:
        _verify(run, access, None if exact_only else settings)
        if report is not None and _is_first_rank():
            importlib.import_module("verify.page").write_page(report, run.to_document())
    except ReshardError as error:
        if debug:
            traceback.print_exc()
        run.error = error
    if _is_first_rank():
        _print(run)
    sys.exit(run.exit_code if _is_first_rank() or run.error else 0)


def _is_first_rank() -> bool:
    """Whether this process is to compare bytes and to print: under torchrun, only one of them is."""
    return os.environ.get("RANK", "0") == "0"


def _verify(run: _Run, access: Any, settings: dict[str, Any] | None) -> None:
    """Compare bytes, then run the model, unless ``settings`` is None or the shards could not be run."""
    from reshard.api import open_any
    from reshard.progress import Progress
    from verify.exact import ExactReport, compare, open_shards

    if settings is None and not _is_first_rank():
        return
    original = open_any(run.original, access)
    shards = open_shards(Path(run.shards), plan_file=access.plan_file)
    if isinstance(shards, ExactReport):
        run.exact = shards
        return
    if _is_first_rank():
        with Progress("comparing bytes", quiet=run.quiet) as progress:
            run.exact = compare(original, shards, progress)
        if settings is not None and not run.exact.comparable:
            run.notes.append("forward: not run, these are not the original's tensors")
            return
    if settings is not None:
        forward = importlib.import_module("verify.forward")
        is_silent = run.quiet or not _is_first_rank()
        run.forward = forward.run_forward(
            original, shards, forward.ForwardOptions(**settings), (lambda _: None) if is_silent else _say
        )


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


# ------------------------------------------------------------------------------------------------------------ printing


def _print(run: _Run) -> None:
    if run.error is not None:
        print(f"Error: {run.error.message}", file=sys.stderr)
        if run.error.hint:
            print(f"Hint: {run.error.hint}", file=sys.stderr)
    if run.is_json:
        print(json.dumps(run.to_document(), indent=2, ensure_ascii=False, default=str))
    elif run.quiet:
        print(run.verdict)
    else:
        parts = [exact_summary(run.exact)] if run.exact is not None else []
        parts += [*run.notes, *([forward_summary(run.forward)] if run.forward is not None else [])]
        words = ("the same model", "different", "could not be checked")[run.exit_code]
        print("\n".join([*parts, f"{run.shards}: {words}"]))


def exact_summary(report: Any) -> str:
    """What the byte comparison found, in words."""
    from reshard.table import human_bytes

    compared = f"{human_bytes(report.nbytes)} in {report.tensors} tensors on {report.ranks} ranks ({report.mesh})"
    if report.verdict == "same":
        return f"bytes: all equal, {compared}; nothing missing, nothing extra"
    lines = [f"bytes: different ({compared} compared)"]
    lines += _some("", report.problems)
    lines += _some("missing: ", report.missing)
    lines += _some("extra: ", report.extra)
    lines += _some("", report.configs)
    if report.first is not None:
        lines.append(f"  first: {report.first}")
    damages = [f"{d.tensor} on rank {d.rank}: {d.elements} elements differ ({d.nbytes} bytes)" for d in report.damages]
    return "\n".join(lines + _some("", damages))


def forward_summary(report: Any) -> str:
    """What the forward pass (and the backward one) found: a table of places, and the verdict in words."""
    rows = [*report.layers, *report.gradients]
    width = max((len(row.name) for row in rows), default=5)
    lines = [f"{'layer':{width}}  {'error':>9}  {'noise':>9}  {'ratio':>7}"]
    lines += [
        f"{row.name:{width}}  {row.error:9.2e}  {row.noise:9.2e}  {row.ratio:7.2f}"
        f"{'' if row.is_same else '  <- different'}"
        for row in rows
    ]
    return "\n".join([*lines, f"forward: {report.verdict}"])


def _some(title: str, items: Any) -> list[str]:
    lines = [f"  {title}{item}" for item in items[:SHOWN]]
    return [*lines, f"  {title}and {len(items) - SHOWN} more"] if len(items) > SHOWN else lines
