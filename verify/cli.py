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
from datetime import datetime, timezone
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from formats.errors import ReshardError
from verify.markup import number, printable, ratio

if TYPE_CHECKING:
    from reshard.progress import Progress
    from verify.launch import Crew

SCHEMA_VERSION = 1
SHOWN = 10
"""Lines of each kind that the summary shows; ``--json`` has all of them."""


@dataclass
class _Run:
    """What was asked for, and what has been found so far."""

    original: str
    shards: str
    options: dict[str, Any]
    is_json: bool
    quiet: bool
    report: Path | None = None
    exact: Any = None
    forward: Any = None
    error: ReshardError | None = None
    notes: list[str] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)

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
        """The document of ``--json``, which is also what the page is made from."""
        from reshard import __version__

        error = {"message": self.error.message, "hint": self.error.hint} if self.error else None
        document = {
            "schema_version": SCHEMA_VERSION,
            "command": "verify",
            "original": self.original,
            "shards": self.shards,
            "verdict": self.verdict,
            "summary": in_words(self.exact, self.forward, self.error),
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
            "created": datetime.now(timezone.utc).isoformat(timespec="seconds"),
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
@click.option("--cache-dir", type=click.Path(file_okay=False, path_type=Path), metavar="DIR", help="Of the Hub's files.")
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
) -> None:
    """Prove that SHARDS are the model ORIGINAL: byte for byte, then forward for forward.

    ORIGINAL is the full checkpoint, a folder or a Hub id; SHARDS the folder that 'reshard split' wrote. The bytes need
    no GPU and no torch; the forward pass runs as many processes as there are ranks. Exit code 0: the same,
    1: different, 2: could not be checked.

    Under a launcher of your own: torchrun --nproc-per-node N -m verify ORIGINAL SHARDS. Only the first rank prints.
    (torchrun itself exits with 1 for every code but 0.)
    """
    from reshard.api import Access

    if report is not None and not report.absolute().parent.is_dir():
        raise click.UsageError(f"--report: there is no folder {report.absolute().parent}")
    settings = {
        "device": device, "dtype": dtype, "batch": batch, "seq": seq, "seed": seed, "prompt": prompt,
        "backward": backward, "streamed": streamed, "timeout": timeout,
    }  # fmt: skip
    shown = {"exact-only": True} if exact_only else settings
    run = _Run(original, shards, shown, is_json, quiet or is_json, report)
    access = Access(revision, token, cache_dir, plan_file, quiet or is_json)
    if exact_only:
        if _rank() == 0:
            _attempt(run, access, None, debug)
            _finish(run, quiet)
        sys.exit(run.exit_code if _rank() == 0 else 0)
    if _rank() is None or find_spec("torch") is None:
        _attempt(run, access, settings, debug)
        _finish(run, quiet)
        sys.exit(run.exit_code)
