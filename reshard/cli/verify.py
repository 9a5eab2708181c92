"""``reshard verify``, alone or as one of the ranks that a launcher such as torchrun started."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from formats.errors import ReshardError
from formats.mesh import Mesh, mesh_of
from reshard.cli.errors import print_error, print_traceback, tracebacks_are_wanted
from reshard.cli.options import (
    FILE,
    Place,
    access_of,
    config_option,
    debug_option,
    dequantize_option,
    given_options,
    hub_options,
    json_option,
)
from reshard.cli.printing import print_json, print_lines, print_note
from reshard.cli.progress import Progress, bars_are_wanted

if TYPE_CHECKING:
    from reshard.storage.access import Access
    from reshard.storage.source import Source
    from verify.bytes.exact_report import ExactReport
    from verify.forward.crew import Crew
    from verify.report.answer import Answer


def _meshes(_: click.Context, option: click.Parameter, texts: tuple[str, ...]) -> tuple[Mesh, ...]:
    """The meshes of ``tp=2,pp=2`` and the like."""
    found = []
    for text in texts:
        degrees = [part.partition("=")[::2] for part in text.split(",")]
        known = {name: int(degree) for name, degree in degrees if name in ("tp", "pp", "ep") and degree.isdecimal()}
        if len(known) != len(degrees) or 0 in known.values():
            raise click.BadParameter(f"'{text}' is no mesh: give degrees such as tp=2,pp=2,ep=2")
        found.append(mesh_of(known.get("tp", 1), known.get("ep", 1), pp=known.get("pp", 1)))
    return tuple(found)


@click.command("verify")
@click.argument("original", type=Place(), metavar="ORIGINAL")
@click.argument("shards", type=Place(), metavar="SHARDS")
@click.option("--exact-only", is_flag=True, help="Compare bytes alone: no torch, no GPU.")
@click.option("--device", type=click.Choice(["auto", "cpu", "cuda"]), default="auto", show_default=True,
              help="Where the forward pass runs.")  # fmt: skip
@click.option("--dtype", metavar="NAME", help="Run in this dtype instead of the checkpoint's own.")
@click.option("--batch", type=click.IntRange(1), default=2, show_default=True, help="Sequences in the forward pass.")
@click.option("--seq", type=click.IntRange(1), default=32, show_default=True, help="Tokens in a sequence.")
@click.option("--seed", type=int, default=0, show_default=True, help="Seed of the random tokens.")
@click.option("--prompt", metavar="TEXT", help="Run on this text, with the checkpoint's tokenizer.")
@click.option("--backward", is_flag=True, help="Compare the gradient of every weight too.")
@click.option("--streamed", is_flag=True, help="One block at a time, for models larger than the memory.")
@click.option("--timeout", type=click.FloatRange(0, min_open=True), default=300.0, show_default=True, metavar="SECONDS",
              help="How long a rank waits for the others.")  # fmt: skip
@click.option("--engine", type=click.Choice(["vllm", "megatron"]),
              help="Also run the shards in the engine that they are for.")  # fmt: skip
@click.option("--engine-mesh", multiple=True, metavar="MESH", callback=_meshes,
              help="Load them on this mesh (tp=2,pp=2) if their format allows any; repeatable.")  # fmt: skip
@click.option("--engine-python", type=Place(), metavar="PATH", help="The python of the engine's environment.")
@click.option("--report", type=FILE, metavar="FILE", help="Write an HTML page, which needs no network.")
@click.option("--plan", "plan_file", type=FILE, metavar="FILE", help="The plan file that the shards were split by.")
@config_option
@dequantize_option
@hub_options
@json_option
@click.option("-q", "--quiet", is_flag=True, help="No progress and no summary: print same, different or unchecked.")
@debug_option
def verify_command(
    original: str, shards: str, exact_only: bool, device: str, dtype: str | None, batch: int, seq: int, seed: int,
    prompt: str | None, backward: bool, streamed: bool, timeout: float, engine: str | None, engine_python: str | None,
    engine_mesh: tuple[Mesh, ...], report: Path | None, plan_file: Path | None, config_folder: Path | None,
    revision: str | None, token: str | None, cache_dir: Path | None, as_json: bool, quiet: bool, dequantize: bool,
) -> int:  # fmt: skip
    """Prove that SHARDS are the model ORIGINAL: compare the bytes, then run the model and compare its outputs.

    ORIGINAL is the full checkpoint: a folder, a Hub id or a URL. SHARDS is the folder that 'reshard split' wrote, or
    one that another program wrote in a format that 'reshard formats' lists, or its URL or Hub id. What lies elsewhere
    is read where it is with --exact-only, and else downloaded into the cache first. Comparing bytes needs no GPU and no
    torch. The forward pass starts as many processes as there are ranks. Exit code 0: the same, 1: different, 2: could
    not be checked.

    Under a launcher of your own: torchrun --nproc-per-node N -m verify ORIGINAL SHARDS. Only the first rank prints.
    (torchrun itself exits with 1 for every code but 0.)
    """
    from verify.ending import one_line_when_interrupted
    from verify.report.answer import Answer

    if report is not None and not report.absolute().parent.is_dir():
        raise click.UsageError(f"--report: there is no folder {report.absolute().parent}")
    for option, given in (("--engine-python", engine_python), ("--engine-mesh", engine_mesh)):
        if given and engine is None:
            raise click.UsageError(f"{option} goes with --engine")
    if dequantize and (not exact_only or engine is not None):
        raise click.UsageError(
            "--dequantize goes with --exact-only: to run the model, write the dequantized checkpoint with "
            "'split ORIGINAL OUT --as huggingface --dequantize', and give that as ORIGINAL"
        )
    of_a_run = given_options() & {
        "--device", "--dtype", "--batch", "--seq", "--seed", "--prompt", "--backward", "--streamed", "--timeout",
    }  # fmt: skip
    if engine is not None:
        of_a_run -= {"--dtype", "--seed"}
    if exact_only and of_a_run:
        raise click.UsageError(f"{min(of_a_run)} is of the forward pass, which --exact-only leaves out")
    if prompt is not None and (others := given_options() & {"--batch", "--seq", "--seed"}):
        raise click.UsageError(f"{min(others)} is of random tokens, in place of which --prompt stands")
    settings = {
        "device": device, "dtype": dtype, "batch": batch, "seq": seq, "seed": seed, "prompt": prompt,
        "backward": backward, "streamed": streamed, "timeout": timeout,
    }  # fmt: skip
    answer = Answer(original, shards, {"exact_only": True} if exact_only else settings)
    if engine is not None:
        wanted = {"name": engine, "python": engine_python, "dtype": dtype, "seed": seed, "meshes": engine_mesh}
        answer.engine_options = {key: value for key, value in wanted.items() if value is not None}
    access = access_of(
        revision, token, cache_dir, plan_file, config_folder, quiet=quiet or as_json, dequantize=dequantize
    )

    def finish() -> int:
        return _finish(answer, report, as_json=as_json, quiet=quiet)

    with one_line_when_interrupted(_interrupted):
        if not _is_launched() or (exact_only and os.environ["RANK"] == "0"):
            _attempt(answer, access, (original, shards))
            return finish()
        if exact_only:
            return 0  # the first rank compares the bytes and speaks
        return _verify_as_rank(answer, access, (original, shards), finish)


def _interrupted() -> str:
    """The line of a command that is interrupted, in place of a bar that it may have drawn; of ranks, the first's."""
    if os.environ.get("RANK", "0") != "0":
        return ""
    return ("\r\x1b[K" if bars_are_wanted() else "") + "reshard: interrupted\n"


def _is_launched() -> bool:
    """Whether a launcher such as torchrun started this process as one of several."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def _verify_as_rank(answer: Answer, access: Access, places: tuple[str, str], finish: Callable[[], int]) -> int:
    """As one of a launcher's ranks: the first compares the bytes and speaks for all, the others wait for its word."""
    from verify.forward.crew import Crew

    def take(end: Any) -> None:
        if isinstance(end, ReshardError):
            answer.error = end
        elif end is not None:
            answer.forward, answer.error = end, None

    def give_up(end: Any) -> int:
        take(end)
        return finish()

    crew = Crew(give_up)
    _attempt(answer, access, places, crew)
    failed = answer.forward if answer.forward is not None and answer.forward.failure is not None else None
    if not crew.is_first:
        crew.leave(answer.error or failed)
    take(crew.first_end(answer.error or failed))
    code = finish()
    crew.end(code)
    return code


def _attempt(answer: Answer, access: Access, places: tuple[str, str], crew: Crew | None = None) -> None:
    """Open both checkpoints and prove; what cannot be checked becomes the answer's error."""
    from reshard.storage.access import open_any
    from reshard.storage.fetched import Weights, told_as
    from reshard.storage.hub import fetch
    from verify.bytes.exact import open_shards
    from verify.prove import prove

    is_run = answer.wants_forward or answer.engine_options is not None
    weights = Weights.FILES if is_run or access.download else Weights.RANGES
    try:
        original = open_any(places[0], access, weights)
        place = fetch(places[1], token=access.token, cache_dir=access.cache_dir, weights=weights, quiet=access.quiet)
        named = original.location if original.location != os.path.realpath(original.path) else None
        with place.named(), told_as(original.path, named):
            shards = open_shards(
                place.path, original, plan_file=access.plan_file, remote=place.remote, beside=place.beside
            )
            is_silent = access.quiet or (crew is not None and not crew.is_first)
            prove(answer, original, shards, access.plan_file, _Display(is_silent), crew)
        if answer.exit_code == 1 and _lost_quantization(original, place.path, shards):
            answer.notes.append(
                "The original is quantized, these are not. If they were split with --dequantize, give it here, too."
            )
        if answer.exact is not None:
            found = {place.path: place.repo, original.path: named}
            answer.exact = answer.exact.calling({str(path): name for path, name in found.items() if name is not None})
    except ReshardError as error:
        if tracebacks_are_wanted():
            print_traceback()
        answer.error = error


def _lost_quantization(original: Source, path: Path, shards: Source | ExactReport) -> bool:
    """Whether the original's config has settings of quantization, and that of the shards in ``path`` has none."""
    from formats.documents import read_config
    from formats.quantization.settings import quantization_settings
    from reshard.storage.source import Source

    if not quantization_settings(original.model.config):
        return False
    with suppress(ReshardError):  # it was said what is wrong with them
        config = shards.read_config() if isinstance(shards, Source) else read_config(path / "config.json")
        return not quantization_settings(config)
    return False


def _finish(answer: Answer, report: Path | None, *, as_json: bool, quiet: bool) -> int:
    """Write the page, print the answer, and return the exit code: 2 also for a page that could not be written."""
    if answer.error is not None:
        print_error(answer.error.message, answer.error.hint)
    code = answer.exit_code
    if report is not None and not _write_report(answer, report):
        report, code = None, code or 2
    if as_json:
        print_json(answer.to_document())
    elif quiet:
        print_lines(answer.verdict)
    else:
        print_lines(answer.to_text(report))
    return code


def _write_report(answer: Answer, file: Path) -> bool:
    from verify.report.page import write_report

    try:
        write_report(file, answer.to_document())
    except OSError as error:
        print_error(f"--report {file}: {error.strerror or error}")
        return False
    return True


# ------------------------------------------------------------------------------------------------------------ progress


_TICK = 1.0  # seconds between two looks at the clock


class _Display:
    """How far the proof is, on stderr."""

    def __init__(self, is_silent: bool) -> None:
        self._is_silent = is_silent

    def bytes(self) -> Progress:
        if not self._is_silent:
            print_note("comparing bytes")
        return Progress("comparing bytes", how="none" if self._is_silent else "auto")

    @contextmanager
    def phases(self) -> Iterator[Callable[[str], None]]:
        """On a terminal one line a phase with its seconds, elsewhere the name of each phase as it begins."""
        if self._is_silent:
            yield lambda _: None
        elif bars_are_wanted():
            with _ticking() as begin:
                yield begin
        else:
            yield print_note


@contextmanager
def _ticking() -> Iterator[Callable[[str], None]]:
    """Show each phase on a line of its own, with the seconds that it takes."""
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
        while not done.wait(_TICK):
            show()

    thread = threading.Thread(target=tick, daemon=True)
    thread.start()
    try:
        yield begin
    finally:
        done.set()
        thread.join()
        show("\n")
