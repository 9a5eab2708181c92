"""``reshard profile``: which degree is fast on this node."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from formats.errors import CheckpointError
from reshard.cli.options import FILE, Place, Size, debug_option, hub_options, json_option, plan_option
from reshard.cli.printing import print_json, print_lines, print_note

if TYPE_CHECKING:
    from verify.profile.job import Request
    from verify.profile.run import Profile

_LEAST_MEMORY = 1_000_000
_PHASES = ("decode", "prefill", "train")


class Numbers(click.ParamType):  # type: ignore[type-arg]  # it takes none before click 8.4
    """Whole numbers of at least 1: ``1,8,64``, or ``1024..16384`` for all doublings from the first to the last."""

    name = "numbers"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, ...]:
        """The numbers in increasing order. Raises click.BadParameter for any other text."""
        if isinstance(value, tuple):
            return value
        if found := re.fullmatch(r"([1-9]\d{0,7})\.\.([1-9]\d{0,7})", str(value)):
            first, last = map(int, found.groups())
            return tuple(first << i for i in range(32) if first << i <= last) or self._refuse(value, param, ctx)
        if re.fullmatch(r"[1-9]\d{0,7}(,[1-9]\d{0,7})*", str(value)) is None:
            return self._refuse(value, param, ctx)
        return tuple(sorted(set(map(int, str(value).split(",")))))

    def _refuse(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, ...]:
        self.fail(f"'{value}' is no list of numbers such as 1,2,4 or 1024..16384", param, ctx)


class Phases(click.ParamType):  # type: ignore[type-arg]  # it takes none before click 8.4
    """Some of decode, prefill and train, with commas between them."""

    name = "phases"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[str, ...]:
        """The phases as given. Raises click.BadParameter for any other word."""
        if isinstance(value, tuple):
            return value
        found = tuple(dict.fromkeys(str(value).split(",")))
        for each in found:
            if each not in _PHASES:
                self.fail(f"there is no phase '{each}'; the phases are {', '.join(_PHASES)}", param, ctx)
        return found


class Speed(click.ParamType):  # type: ignore[type-arg]  # it takes none before click 8.4
    """Bytes per second: ``450GB/s``."""

    name = "speed"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """Bytes per second. Raises click.BadParameter for any other text."""
        if isinstance(value, float):
            return value
        if not str(value).endswith("/s"):
            self.fail(f"'{value}' is not a speed such as 450GB/s", param, ctx)
        return float(Size().convert(str(value).removesuffix("/s"), param, ctx))


class Memory(Size):
    """A size of at least 1 MB where it has no unit: ``80`` means 80GB."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """The number of bytes. Raises click.BadParameter for any other text, and for a few bytes."""
        found = super().convert(value, param, ctx)
        if found < _LEAST_MEMORY and str(value).strip().isdecimal():
            self.fail(f"'{value}' is {found} bytes; with a unit it is {found}GB or {found}MB", param, ctx)
        return found


@click.command("profile")
@click.argument("source", type=Place())
@click.option("--tp", type=Numbers(), metavar="N,..", help="Degrees to run; default: all that are possible here.")
@click.option("--batch", type=Numbers(), default="1", show_default=True, metavar="N,..", help="Sequences at once.")
@click.option("--seq", type=Numbers(), default="512", show_default=True, metavar="N,..", help="Tokens in a sequence.")
@click.option("--phase", type=Phases(), default="decode,prefill", show_default=True, metavar="NAME,..",
              help="decode, prefill or train.")  # fmt: skip
@click.option("--device", type=click.Choice(["auto", "cpu", "cuda"]), default="auto", show_default=True,
              help="Where the ranks run.")  # fmt: skip
@click.option("--ranks", type=click.IntRange(1), metavar="N",
              help="Ranks that there may be; default: one a GPU, or a core.")  # fmt: skip
@click.option("--dtype", metavar="NAME", help="Dtype of weights and activations; default: the config's own.")
@click.option("--memory", type=Memory(), metavar="SIZE",
              help="Memory of a rank for tensors, such as 78GB of a GPU's 80GB; default: this node's.")  # fmt: skip
@click.option("--predict-tp", type=Numbers(), metavar="N,..", help="Degrees to predict without running them.")
@click.option("--link", type=Speed(), metavar="SPEED",
              help="Bandwidth between ranks of predicted degrees, such as 450GB/s; default: as measured.")  # fmt: skip
@click.option("--widths", type=Numbers(), metavar="A..B",
              help="Also time an MLP and an attention of these widths, multiples of 128: 1024..16384.")  # fmt: skip
@click.option("--report", type=FILE, metavar="FILE", help="Write an HTML page, which needs no network.")
@click.option("--seconds", type=click.FloatRange(0, min_open=True), default=3.0, show_default=True,
              help="Repeat a measurement for so long, unless its spread is small earlier.")  # fmt: skip
@click.option("--timeout", type=click.FloatRange(0, min_open=True), default=600.0, show_default=True, metavar="SECONDS",
              help="How long a rank waits for the others.")  # fmt: skip
@plan_option
@hub_options
@json_option
@debug_option
def profile_command(
    source: str, tp: tuple[int, ...] | None, batch: tuple[int, ...], seq: tuple[int, ...], phase: tuple[str, ...],
    device: str, ranks: int | None, dtype: str | None, memory: int | None, predict_tp: tuple[int, ...] | None,
    link: float | None, widths: tuple[int, ...] | None, report: Path | None, seconds: float, timeout: float,
    plan_file: Path | None, revision: str | None, token: str | None, cache_dir: Path | None, as_json: bool,
) -> None:  # fmt: skip
    """Say which degree of tensor parallelism is fast on this node.

    SOURCE needs a config.json alone: weights are random numbers. For each degree, one layer of each kind runs on as
    many ranks, with the embedding and the head and with real collectives, on GPUs or on this machine's cores. From
    that follow the time of the whole model, what a rank holds, and one recommended degree (docs/profile.md).
    """
    from verify.ending import one_line_when_interrupted
    from verify.profile.job import Patience, Request, Workload

    if link is not None and predict_tp is None:
        raise click.UsageError("--link goes with --predict-tp")
    if report is not None and not report.absolute().parent.is_dir():
        raise click.UsageError(f"--report: there is no folder {report.absolute().parent}")
    workloads = tuple(Workload(p, b, s) for p in phase for b in batch for s in seq)
    request = Request(
        workloads, tp, predict_tp or (), ranks, device, dtype, memory, link, Patience(seconds), widths or (), timeout,
        plan_file,
    )  # fmt: skip
    with one_line_when_interrupted(lambda: "reshard: interrupted\n"):
        found = _profile(source, request, revision, token, cache_dir, quiet=as_json)
    _print(found, source, report, as_json=as_json)


def _profile(
    source: str, request: Request, revision: str | None, token: str | None, cache_dir: Path | None, *, quiet: bool
) -> Profile:
    from reshard.storage.fetched import Weights
    from reshard.storage.hub import fetch

    say: Callable[[str], None] = (lambda _: None) if quiet else print_note
    say("reading config.json")
    from verify.profile.run import profile  # it imports torch, which takes a while

    fetched = fetch(source, revision=revision, token=token, cache_dir=cache_dir, quiet=quiet, weights=Weights.HEADERS)
    folder = fetched.path.parent if fetched.path.name == "config.json" else fetched.path
    if not folder.is_dir():
        raise CheckpointError(f"{folder}: not a folder", "give the folder that holds config.json, or that file")
    return profile(folder, request, say)


def _print(found: Profile, source: str, report: Path | None, *, as_json: bool) -> None:
    from verify.profile.words import document_of, text_of

    document = {"command": "profile", "source": source, **document_of(found)}
    if report is not None:
        _draw(document, report)
    if as_json:
        print_json(document)
    else:
        print_lines(*text_of(found, source))


def _draw(document: dict[str, Any], file: Path) -> None:
    """Write the page. Raises CheckpointError."""
    from reshard.pages.document import write_page
    from verify.profile.page import page

    try:
        write_page(file, page(document))
    except OSError as error:
        raise CheckpointError(f"cannot write {file}: {error.strerror or error}") from None
    print_note(f"Drew the profile: {file}")
