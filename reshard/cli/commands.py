"""The command line: reads arguments, calls the API, prints.

The result goes to stdout, all else to stderr. Exit codes: 0 done, 1 the answer is no, 2 the request cannot be carried
out, 130 interrupted. Nothing heavy is imported before a command needs it: ``reshard --help`` answers at once.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import os
import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from formats.errors import CheckpointError, MismatchError, PlanError, ReshardError, listed, one_line, printable
from reshard import __version__

if TYPE_CHECKING:
    from formats.notation.architecture import Architecture
    from reshard.api import Access, Padding, Summary
    from reshard.cli.demo import Compared
    from reshard.planning.degrees import Refusal
    from reshard.planning.model import Model
    from reshard.planning.plan import Plan
    from reshard.storage.inspect import Report

SCHEMA_VERSION = 1
SWEEP = (*range(1, 17), 20, 24, 32, 40, 48, 64, 96, 128)
"""The degrees that ``reshard plan`` without --tp tries."""

_F = TypeVar("_F", bound=Callable[..., Any])
_SETTINGS = {"help_option_names": ["-h", "--help"], "max_content_width": 100}


# ----------------------------------------------------------------------------------------------------- option types


_UNITS = {"": 0, "K": 1, "M": 2, "G": 3, "T": 4}


class Size(click.ParamType):  # type: ignore[type-arg]  # it takes none before click 8.4
    """A number of bytes: ``5GB`` (decimal, as on the Hub), ``512MiB``, ``1000000``."""

    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """Read the text."""
        if isinstance(value, int):
            return value
        match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?)(I?)B?\s*", str(value).upper())
        if match is None or (match[3] and not match[2]):
            self.fail(f"'{value}' is no size such as 5GB, 500MB or 2GiB", param, ctx)
        size = int(float(match[1]) * (1024 if match[3] else 1000) ** _UNITS[match[2]])
        if size < 1:
            self.fail(f"'{value}' is less than one byte", param, ctx)
        return size


def _options(*options: Callable[[_F], _F]) -> Callable[[_F], _F]:
    """Several options as one decorator, shown in the given order."""

    def decorate(function: _F) -> _F:
        for option in reversed(options):
            function = option(function)
        return function

    return decorate


class Output(click.Path):
    """A folder to be made: one that has a name of its own."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Path:
        """Read the text."""
        out = Path(value)
        if out.name in {"", ".."}:
            self.fail(f"'{value}' is no name for a new folder", param, ctx)
        return out


_PATH = click.Path(path_type=Path)

hub_options = _options(
    click.option("--revision", metavar="REV", help="Branch, tag or commit of a Hub repository."),
    click.option("--token", metavar="TOKEN", help="Token for the Hub; default: HF_TOKEN, or that of 'hf auth login'."),
    click.option("--cache-dir", type=_PATH, metavar="DIR", help="The Hub's cache; default: HF_HUB_CACHE."),
)
plan_option = click.option("--plan", "plan_file", type=_PATH, metavar="FILE", help="Your own architecture file.")
mesh_options = _options(
    click.option("--tp", type=int, metavar="N", help="Degree of tensor parallelism."),
    click.option("--ep", type=int, metavar="N", help="Degree of expert parallelism: deal whole experts over N ranks."),
    click.option("--same-ranks", is_flag=True, help="Deal the experts over the ranks of --tp itself, not beside them."),
    click.option("--uneven", is_flag=True, help="Let the last ranks have less of an MLP that has no N equal parts."),
)
padding_options = _options(
    click.option(
        "--pad-vocab-to", type=click.IntRange(min=1), metavar="M",
        help="Pad the vocabulary to a multiple of M, too, as some engines want it."
    ),
    click.option("--no-pad-vocab", is_flag=True, help="Refuse a vocabulary that does not divide."),
)  # fmt: skip
write_options = _options(
    click.option("--overwrite", is_flag=True, help="Replace an output that exists, once the new one is complete."),
    click.option("--fsync", is_flag=True, help="Have all on the disk before it gets its name, against power loss."),
    click.option("--no-checksum", is_flag=True, help="Neither record checksums nor compare them with recorded ones."),
    click.option("--workers", type=click.IntRange(min=1), metavar="N", help="Processes; default: one a core, 2 to 8."),
    click.option("--dry-run", is_flag=True, help="Check everything and write nothing."),
)
json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
debug_option = click.option("--debug", is_flag=True, expose_value=False, help="Show the traceback of an error.")
output_options = _options(
    json_option,
    click.option("-q", "--quiet", is_flag=True, help="Print the output's path and nothing else."),
    debug_option,
)


# --------------------------------------------------------------------------------------------------------- commands

_VERIFY_HELP = "Prove that shards are equivalent to the original."


def _has_verify() -> bool:
    """Whether the package of ``verify`` is installed with its command; without importing it."""
    spec = find_spec("verify")
    return any((Path(place) / "cli.py").is_file() for place in spec.submodule_search_locations or ()) if spec else False


def _import_numpy() -> None:
    """Import numpy without the threads of its linear algebra: they are not used, and would spin beside the work."""
    name = "OPENBLAS_NUM_THREADS"
    if name in os.environ:
        return
    os.environ[name] = "1"
    import_module("numpy")
    del os.environ[name]  # it is not meant for other programs


class Commands(click.Group):
    """The group, with ``verify`` loaded from its own package, and only when it is asked for."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Names in the order of use."""
        return [*self.commands, *(["verify"] if _has_verify() else [])]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """The command of a name, or None."""
        if cmd_name == "verify" and _has_verify():
            command: click.Command = import_module("verify.cli").verify_command
            return command
        return super().get_command(ctx, cmd_name)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """The list of commands in --help, without loading any."""
        rows = [(name, command.get_short_help_str(80)) for name, command in self.commands.items()]
        if _has_verify():
            rows.append(("verify", _VERIFY_HELP))
        with formatter.section("Commands"):
            formatter.write_dl(rows)


@click.group(cls=Commands, context_settings=_SETTINGS, no_args_is_help=False, invoke_without_command=True)
@click.version_option(__version__, "--version", prog_name="reshard", message="%(prog)s %(version)s")
@debug_option
@click.pass_context
def cli(ctx: click.Context) -> None:
    """Split, merge and re-split checkpoints of large language models for tensor parallelism.

    A SOURCE is a folder with a Hugging Face checkpoint, a Hub id such as org/name, or a folder that 'reshard split'
    wrote. Try 'reshard demo' first, and 'reshard plan SOURCE' to see which degrees a model allows.
    """
    if ctx.invoked_subcommand is None:
        click.echo(ctx.get_help())


@cli.command("split", short_help="Split a checkpoint into N ranks, or re-split one.")
@click.argument("source")
@click.argument("out", type=Output())
@mesh_options
@click.option("--rank", "ranks", type=int, multiple=True, metavar="R", help="Write only this rank (may be repeated).")
@click.option("--max-shard-size", type=Size(), default="5GB", show_default=True, help="Largest file of a rank.")
@click.option("--refine-blocks", is_flag=True, help="Lower the block size of scales where a rank cuts a block.")
@padding_options
@plan_option
@hub_options
@write_options
@output_options
def split_command(
    source: str, out: Path, tp: int | None, ep: int | None, same_ranks: bool, uneven: bool, ranks: tuple[int, ...],
    max_shard_size: int, refine_blocks: bool, pad_vocab_to: int | None, no_pad_vocab: bool, plan_file: Path | None,
    revision: str | None, token: str | None, cache_dir: Path | None, overwrite: bool, fsync: bool, no_checksum:
    bool, workers: int | None,
    dry_run: bool, as_json: bool, quiet: bool,
) -> None:  # fmt: skip
    """Split SOURCE into N ranks, one folder each, under OUT.

    SOURCE may be split already: then it is re-split directly, without a full checkpoint in between. With --rank, runs
    for different ranks into one OUT add up to the whole, also at the same time and on different machines that share the
    disk. A run that was interrupted goes on where it stopped when the same command is given again.

    --tp N cuts every weight. --ep N deals whole experts over N ranks and repeats the rest; --ep E --tp T does both, on
    E x T ranks; with --same-ranks on T ranks (T = E), as vLLM's --enable-expert-parallel and DeepSeek's inference do.
    """
    if tp is None and ep is None:
        raise click.UsageError("Missing option '--tp' (or '--ep').")
    _check_same_ranks(tp, ep, same_ranks)
    _import_numpy()
    from reshard.api import split
    from reshard.cli.progress import Progress
    from reshard.engine.move import Options

    access = _access(revision, token, cache_dir, plan_file, quiet or as_json)
    padding = _padding(pad_vocab_to, no_pad_vocab)
    started = time.monotonic()
    with _resumable(dry_run), Progress("split", quiet=quiet or as_json) as progress:
        summary = split(
            source, out, 1 if tp is None else tp, ep=1 if ep is None else ep, same_ranks=same_ranks,
            uneven=uneven, ranks=ranks or None, access=access, padding=padding,
            options=Options(workers=workers, checksum=not no_checksum, fsync=fsync),
            max_shard_size=max_shard_size, refine_blocks=refine_blocks, overwrite=overwrite, dry_run=dry_run,
            progress=progress,
        )  # fmt: skip
    _print_summary(summary, source, time.monotonic() - started, as_json, quiet)


@cli.command("merge", short_help="Merge ranks into one full checkpoint again.")
@click.argument("shards")
@click.argument("out", type=Output())
@click.option("--max-shard-size", type=Size(), help="Write new files, of at most this size; default: the source's own.")
@plan_option
@hub_options
@write_options
@output_options
def merge_command(
    shards: str, out: Path, max_shard_size: int | None, plan_file: Path | None, revision: str | None,
    token: str | None, cache_dir: Path | None, overwrite: bool, fsync: bool, no_checksum: bool, workers: int | None,
    dry_run: bool, as_json: bool, quiet: bool,
) -> None:  # fmt: skip
    """Merge the ranks in SHARDS into one full Hugging Face checkpoint, OUT.

    What was split from safetensors comes back file by file: same names, same bytes, same sha256. Padding is stripped,
    and ranks that should hold the same are compared.
    """
    _import_numpy()
    from reshard.api import merge
    from reshard.cli.progress import Progress
    from reshard.engine.move import Options

    access = _access(revision, token, cache_dir, plan_file, quiet or as_json)
    started = time.monotonic()
    with _resumable(dry_run), Progress("merge", quiet=quiet or as_json) as progress:
        summary = merge(
            shards, out, access=access, options=Options(workers=workers, checksum=not no_checksum, fsync=fsync),
            max_shard_size=max_shard_size, overwrite=overwrite, dry_run=dry_run, progress=progress,
        )  # fmt: skip
    _print_summary(summary, shards, time.monotonic() - started, as_json, quiet)


@cli.command("plan", short_help="Show what a split would do, or which degrees are possible.")
@click.argument("source")
@mesh_options
@click.option("--save", "save_file", type=_PATH, metavar="FILE", help="Write the architecture file in use.")
@click.option(
    "--draft", "draft_file", type=_PATH, metavar="FILE", help="Write a draft of one, for a model without rules."
)
@click.option("--as", "as_form", type=click.Choice(["transformers"]), help="Print the tp_plan for another program.")
@padding_options
@plan_option
@hub_options
@json_option
@debug_option
def plan_command(
    source: str, tp: int | None, ep: int | None, same_ranks: bool, uneven: bool, save_file: Path | None,
    draft_file: Path | None, as_form: str | None, pad_vocab_to: int | None, no_pad_vocab: bool,
    plan_file: Path | None, revision: str | None, token: str | None, cache_dir: Path | None, as_json: bool,
) -> None:  # fmt: skip
    """Show what a split of SOURCE would do, tensor by tensor, from the headers alone.

    Without --tp and --ep: which degrees are possible, and why not the others.

    For an architecture that has no rules yet, or a tensor that none covers: write a draft with --draft, or save the
    file of a similar model with --save, check and edit it (docs/design.md describes its form) and pass it to any
    command with --plan. --as transformers prints the tp_plan that transformers' own tensor parallelism takes.
    """
    from formats.mesh import mesh_of
    from reshard.planning.plan import plan_of
    from reshard.storage.access import lines_of_any, open_any

    padding = _padding(pad_vocab_to, no_pad_vocab)
    _check_same_ranks(tp, ep, same_ranks)
    if draft_file is not None:
        if (tp, ep, save_file, as_form, plan_file) != (None,) * 5 or as_json:
            raise click.UsageError("--draft goes alone: pass the file that it writes with --plan")
        _write_draft(source, draft_file, revision, token, cache_dir)
        return
    access = _access(revision, token, cache_dir, plan_file, as_json)
    try:
        opened = open_any(source, access, headers_only=True)
    except PlanError as error:
        if save_file is None:
            raise
        _save_plan(lines_of_any(source, access), save_file)
        raise PlanError(error.message, f"edit {save_file}, pass it with --plan {save_file}") from None
    if save_file is not None:
        used = opened.model.used_templates
        lines = {name: rules for name, rules in opened.model.architecture.tensors.items() if name in used}
        _save_plan(dataclasses.replace(opened.model.architecture, tensors=lines), save_file)
    if as_form is not None:
        if ep is not None:
            raise click.UsageError("--as transformers goes with --tp alone")
        _print_tp_plan(opened.model, tp, as_json)
    elif tp is not None or ep is not None:
        mesh = mesh_of(1 if tp is None else tp, 1 if ep is None else ep, same_ranks)
        _print_plan(plan_of(opened.model, mesh, uneven=uneven, padding=padding), source, as_json)
    elif save_file is None or as_json:
        _print_degrees(opened.model, source, padding, uneven, as_json)


@cli.command("inspect", short_help="Say what a folder is, and whether it is complete.")
@click.argument("path")
@hub_options
@json_option
@debug_option
def inspect_command(path: str, revision: str | None, token: str | None, cache_dir: Path | None, as_json: bool) -> None:
    """Say what PATH is: format, model type, dtypes, parameters, mesh, complete or not.

    PATH may also be a Hub id, one rank's folder, a single .safetensors file or unfinished output (OUT.partial). The
    exit code is 0 if it is complete and 1 if it is not.
    """
    from reshard.storage.inspect import inspect
    from reshard.storage.output import staging_of

    place = Path(path).expanduser()
    if not place.exists() and not staging_of(place).exists():
        from reshard.storage.hub import fetch

        place = fetch(path, revision=revision, token=token, cache_dir=cache_dir, headers_only=True, quiet=as_json).path
    report = inspect(place)
    if as_json:
        _print_json(_report_document(report, path))
    else:
        _print_report(report, path)
    if not report.complete:
        raise click.exceptions.Exit(1)


@cli.command("demo", short_help="Show the whole round on a tiny model.")
@click.argument("folder", type=_PATH, required=False)
@json_option
@debug_option
def demo_command(folder: Path | None, as_json: bool) -> None:
    """Make a tiny model and show the whole round on it: split, re-split, merge, compare.

    In FOLDER, which is kept, or in a temporary one. The exit code is 1 if any file comes back changed.
    """
    import tempfile

    from reshard.cli import demo

    def run_step(step: Sequence[str]) -> None:
        if not as_json:
            _echo(f"$ reshard {' '.join(step)}")
        cli.main([*step, *(["--quiet"] if as_json else [])], standalone_mode=False)

    def run_in(place: Path) -> list[Compared]:
        if not as_json:
            _echo(f"A Llama with random weights, 4 KV heads and a vocabulary of 1003, in {place / 'model'}\n")
        with contextlib.redirect_stdout(sys.stderr) if as_json else contextlib.nullcontext(), _working_in(place):
            return demo.run(Path(), run_step)

    if folder is not None:
        demo.check_folder(folder)
        compared = run_in(folder)
    else:
        with tempfile.TemporaryDirectory(prefix="reshard-demo-") as temporary:
            compared = run_in(Path(temporary))
    _print_compared(compared, folder, as_json)
    if not all(file.equal for file in compared):
        raise click.exceptions.Exit(1)


# ---------------------------------------------------------------------------------------------- what commands share


def _access(
    revision: str | None, token: str | None, cache_dir: Path | None, plan_file: Path | None, quiet: bool
) -> Access:
    from reshard.api import Access

    return Access(revision=revision, token=token, cache_dir=cache_dir, plan_file=plan_file, quiet=quiet)


def _check_same_ranks(tp: int | None, ep: int | None, same_ranks: bool) -> None:
    if same_ranks and (tp is None or ep is None):
        raise click.UsageError("--same-ranks goes with --tp N and --ep N, both of the same degree")


def _padding(pad_vocab_to: int | None, no_pad_vocab: bool) -> Padding:
    from reshard.api import Padding

    if no_pad_vocab and pad_vocab_to is not None:
        raise click.UsageError("--pad-vocab-to and --no-pad-vocab exclude each other")
    return Padding(allowed=not no_pad_vocab, to=pad_vocab_to or 1)


class _InterruptedError(Exception):
    """Ctrl-C in a command that can be taken up again."""


@contextlib.contextmanager
def _resumable(dry_run: bool) -> Iterator[None]:
    try:
        yield
    except KeyboardInterrupt:
        raise (KeyboardInterrupt if dry_run else _InterruptedError) from None


@contextlib.contextmanager
def _working_in(folder: Path) -> Iterator[None]:
    """The working directory for a while."""
    folder.mkdir(parents=True, exist_ok=True)
    before = Path.cwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)


def _save_plan(architecture: Architecture, file: Path) -> None:
    from formats.notation.architecture_files import to_toml

    _write_new(file, to_toml(architecture), "--save")
    count = len(architecture.tensors)
    _note(f"Wrote {count} rules of '{architecture.name}' to {file}. Use it with --plan {file}")


def _write_new(file: Path, text: str, option: str) -> None:
    try:
        with file.open("x", encoding="utf-8") as stream:
            stream.write(text)
    except FileExistsError:
        raise CheckpointError(
            f"{file} exists, it will not be overwritten", f"choose another name for {option}"
        ) from None
    except OSError as error:
        raise CheckpointError(f"cannot write {file}: {error.strerror or error}") from None


def _write_draft(source: str, file: Path, revision: str | None, token: str | None, cache_dir: Path | None) -> None:
    from reshard.planning.degrees import valid_degrees
    from reshard.planning.draft import draft_of
    from reshard.storage.hub import fetch

    fetched = fetch(source, revision=revision, token=token, cache_dir=cache_dir, quiet=True, headers_only=True)
    draft = draft_of(fetched.path)
    _write_new(file, draft.text, "--draft")
    count, degrees = len(draft.model.architecture.tensors), valid_degrees(draft.model)
    possible = ", ".join(map(str, degrees[:12])) if degrees != [1] else "1 alone: it splits nothing"
    _note(
        f"Wrote a draft of {count} rules to {file}, {draft.checks} of its lines marked CHECK. It allows the degrees "
        f"{possible}. Check it, split with --plan {file}, and let 'reshard verify' decide."
    )


# --------------------------------------------------------------------------------------------------------- printing


def _echo(text: str = "") -> None:
    """Print lines; what a terminal would obey in a name that was read is escaped."""
    click.echo("\n".join(map(printable, text.split("\n"))))


def _note(text: str) -> None:
    """Print one line that is no part of the result."""
    click.echo(one_line(text), err=True)


def _print_json(document: dict[str, Any]) -> None:
    click.echo(json.dumps({"schema_version": SCHEMA_VERSION, **document}, indent=2, ensure_ascii=False))


def _width() -> int | None:
    """Columns of the terminal that stdout is; None if it is none."""
    return (os.get_terminal_size(sys.stdout.fileno()).columns or None) if sys.stdout.isatty() else None


def _print_summary(summary: Summary, source: str, seconds: float, as_json: bool, quiet: bool) -> None:
    if as_json:
        _print_json(_summary_document(summary, seconds))
    elif quiet:
        click.echo(os.fsencode(summary.out))
    else:
        click.echo(_summary_text(summary, source, seconds))


def _summary_document(summary: Summary, seconds: float) -> dict[str, Any]:
    return {
        "command": summary.command,
        "dry_run": summary.dry_run,
        "source": summary.source,
        "out": str(summary.out),
        "source_mesh": summary.source_mesh.to_document(),
        "mesh": summary.mesh.to_document(),
        "ranks": list(summary.ranks),
        "complete": summary.complete,
        "tensors": summary.tensors,
        "files": summary.files,
        "bytes": summary.nbytes,
        "bytes_written": summary.written,
        "seconds": round(seconds, 3),
        "padding": {axis: {"size": size, "padded": padded} for axis, (size, padded) in summary.padding.items()},
    }


def _summary_text(summary: Summary, source: str, seconds: float) -> str:
    """One paragraph: what, how many tensors and files, bytes, seconds, padding, where."""
    from reshard.cli.table import human_bytes, plural

    size, files = human_bytes(summary.nbytes), plural(summary.files, "file")
    parts = [f"{_did(summary, source)}: {plural(summary.tensors, 'tensor')} in {files}, {size}"]
    if not summary.dry_run:
        parts[0] += f", in {seconds:.2f} s"
        # of little data the time is that of starting, of a Hub id that of the download
        if summary.written >= 100_000_000 and Path(source).exists():
            parts[0] += f" ({summary.written / max(seconds, 1e-9) / 1e9:.2f} GB/s)"
        if summary.written < summary.nbytes:
            parts.append(f"{human_bytes(summary.nbytes - summary.written)} of that had been written before")
    for axis, (full, padded) in summary.padding.items():
        parts.append(f"{axis} padded from {full:,} to {padded:,} with zeros, which merge strips")
    for axis, unit in summary.mesh.uneven:
        parts.append(f"the last ranks have less of {axis}, which goes in units of {unit:,}")
    parts.append(f"nothing was written to {summary.out}" if summary.dry_run else _where(summary))
    return ". ".join(part[0].upper() + part[1:] for part in parts) + "."


def _did(summary: Summary, source: str) -> str:
    verb = {"split": "split", "re-split": "re-split", "merge": "merged"}[summary.command]
    ranks, whole = summary.mesh.size, len(summary.ranks) == summary.mesh.size
    which = f"{ranks} ranks" if ranks > 1 else "1 rank"
    if not whole:
        which = f"rank{'s' if len(summary.ranks) > 1 else ''} {', '.join(map(str, summary.ranks))} of {ranks}"
    count = summary.source_mesh.size
    before = f"{count} rank{'s' if count > 1 else ''} of " if summary.command != "split" else ""
    would = f"would {summary.command}" if summary.dry_run else verb
    into = "one checkpoint" if summary.command == "merge" else which
    return f"{would} {before}{source} into {into}"


def _where(summary: Summary) -> str:
    if summary.complete:
        return f"the result is {summary.out}"
    return f"other ranks are still missing: see 'reshard inspect {summary.out}'"


def _print_plan(plan: Plan, source: str, as_json: bool) -> None:
    from reshard.cli import table

    rows = table.rows_of(plan)
    totals = table.totals_of(plan, rows)
    if as_json:
        passes = {"forward": totals.forward, "backward": totals.backward}
        _print_json(
            {
                "command": "plan",
                "source": source,
                "architecture": plan.model.architecture.name,
                "mesh": plan.mesh.to_document(),
                "sizes": plan.model.sizes.of({}),
                "padding": dict(plan.padding),
                "rows": [table.row_document(row) for row in rows],
                "tensors": totals.tensors,
                "parameters": totals.parameters,
                "bytes_full": totals.bytes_full,
                "bytes_per_rank": totals.bytes_per_rank,
                "bytes_per_rank_least": totals.bytes_least,
                "bytes_replicated_per_rank": totals.replicated,
                "all_reduce_per_token": {name: {"count": p.count, "bytes": p.nbytes} for name, p in passes.items()},
            }
        )
        return
    _echo(_title(plan.model, source))
    _echo()
    for line in (*table.format_table(rows, _width()), "", *table.totals_lines(plan, totals)):
        _echo(line)


def _print_tp_plan(model: Model, tp: int | None, as_json: bool) -> None:
    """The dict on stdout; on stderr what transformers does otherwise than the rules."""
    from formats.mesh import Mesh
    from reshard.planning.degrees import check_degrees
    from verify.rank.tp_plan import transformers_plan

    if tp is not None:
        check_degrees(model, Mesh((("tp", tp),)))
    plan = transformers_plan(model, tp)
    if as_json:
        notes = {"gathered": plan.gathered, "whole": plan.whole, "degree_divides": list(plan.degrees_of)}
        _print_json({"tp_plan": plan.styles, **notes})
    else:
        _echo(json.dumps(plan.styles, indent=2))
    for name, why in plan.gathered.items():
        _note(f"{name}: split, its vector whole on every rank before and after: {why}")
    for name, why in plan.whole.items():
        _note(f"{name}: whole on every rank: {why}")
    if plan.degrees_of:
        counts = " and ".join(map(str, plan.degrees_of))
        _note(f"For degrees that divide {counts}, the number of KV heads; for others give --tp N.")


def _title(model: Model, source: str) -> str:
    from reshard.cli.table import plural

    count = plural(len(model.tensors), "tensor")
    return f"{source}: {model.config.get('model_type', 'no model_type')} (rules: {model.architecture.name}), {count}"


def _print_degrees(model: Model, source: str, padding: Padding, uneven: bool, as_json: bool) -> None:
    from reshard.cli.table import align
    from reshard.planning.degrees import refusal, valid_degrees

    pad = padding.allowed
    valid = valid_degrees(model, pad=pad, uneven=uneven, limit=max(SWEEP))
    more = valid_degrees(model, pad=pad, uneven=uneven, limit=1 << 16)
    swept = {degree for degree in SWEEP if degree <= max(16, 2 * valid[-1])}
    tried = {n: refusal(model, "tp", n, pad=pad, uneven=uneven) for n in sorted({*swept, *valid})}
    ways = {n: _other_ways(model, n, why, pad) for n, why in tried.items()}
    if as_json:
        degrees = [
            {"tp": n, "valid": n in valid, "reason": None if n in valid else str(why), "possible_with": ways[n]}
            for n, why in tried.items()
        ]
        _print_json(
            {
                "command": "plan",
                "source": source,
                "architecture": model.architecture.name,
                "sizes": model.sizes.of({}),
                "valid_degrees": more,
                "valid_ep_degrees": valid_degrees(model, "ep"),
                "degrees": degrees,
            }
        )
        return
    _echo(_title(model, source))
    _echo()
    cells = [("--tp", "possible", "")]
    for degree, why in tried.items():
        cells.append(
            (
                str(degree),
                "yes" if degree in valid else "no",
                _remark(model, degree, padding, uneven) if degree in valid else _why_not(str(why), ways[degree]),
            )
        )
    for line in align(cells, right=(0,), width=None):
        _echo(line)
    _echo()
    experts = valid_degrees(model, "ep")
    if len(experts) > 1:
        _echo(f"Valid degrees of --ep: {', '.join(map(str, experts))}.")
    _echo(f"Valid degrees: {', '.join(map(str, more))}. 'reshard plan {source} --tp N' shows one in detail.")


def _other_ways(model: Model, degree: int, why: Refusal | None, pad: bool) -> list[str]:
    """The options with which a refused degree is possible."""
    from formats.mesh import Mesh
    from reshard.planning.degrees import other_ways

    return list(other_ways(model, Mesh((("tp", degree),)), "tp", why, pad=pad)) if why is not None else []


def _why_not(reason: str, ways: Sequence[str]) -> str:
    return f"{reason}; possible with {' or '.join(ways)}" if ways else reason


def _remark(model: Model, degree: int, padding: Padding, uneven: bool) -> str:
    """Bytes per rank of a degree, what is dealt unevenly or padded, and what is on more ranks than one."""
    from formats.mesh import Mesh
    from reshard.cli import table
    from reshard.planning.plan import plan_of

    plan = plan_of(model, Mesh((("tp", degree),)), uneven=uneven, padding=padding)
    totals = table.totals_of(plan, table.rows_of(plan))
    text = f"{table.human_bytes(totals.bytes_per_rank)} per rank{' at most' if plan.mesh.uneven else ''}"
    if degree > 1:
        text += f", {totals.share_replicated:.1%} of it on other ranks too"
    full = model.sizes.of({})
    text += "".join(f", uneven: {line}" for line in table.uneven_lines(plan))
    return text + "".join(f", {axis} padded {full[axis]:,} -> {size:,}" for axis, size in plan.padding.items())


def _print_report(report: Report, path: str) -> None:
    from reshard.cli.table import human_bytes, plural

    known = "" if report.architecture else " (no rules for it: see 'reshard plan --help')"
    mine = f" (rules: {report.architecture})" if report.architecture else known
    pairs = [
        ("what", report.kind),
        ("format", report.format),
        ("model type", f"{report.model_type or 'unknown'}{mine}"),
    ]
    if report.model_type is None and report.kind != "full checkpoint":
        pairs.pop()
    if report.mesh is not None:
        rank = f", rank {report.rank}" if report.rank is not None else ""
        pairs.append(("mesh", f"{report.mesh}{rank}"))
    if report.ranks_missing:
        pairs.append(("ranks here", listed(report.ranks_present) or "none"))
        pairs.append(("missing", listed(report.ranks_missing)))
    if report.dtypes:
        of_ranks = " (all ranks here together)" if report.counts_ranks else ""
        kinds = ", ".join(f"{dtype} {count:,}" for dtype, count in report.dtypes.items())
        pairs += [
            ("parameters", f"{report.parameters:,}{of_ranks}"),
            ("dtypes", kinds),
            ("tensors", f"{report.tensors:,}"),
        ]
    pairs.append(
        ("weights", f"{human_bytes(report.nbytes)} ({report.nbytes:,} bytes) in {plural(report.files, 'file')}")
    )
    for axis, (full, padded) in report.padding.items():
        pairs.append(("padding", f"{axis} {full:,} -> {padded:,}"))
    if report.source:
        pairs.append(("source", report.source + (f" at {report.commit}" if report.commit else "")))
    pairs.append(("complete", "yes" if report.complete else "no"))
    pairs += [("problem", problem) for problem in report.problems]
    if report.hint and not report.complete:
        pairs.append(("hint", report.hint))
    _echo(path)
    for label, text in pairs:
        _echo(f"  {label:<11} {text}")


def _report_document(report: Report, path: str) -> dict[str, Any]:
    return {
        "command": "inspect",
        "path": path,
        "kind": report.kind,
        "format": report.format,
        "model_type": report.model_type,
        "architecture": report.architecture,
        "dtypes": report.dtypes,
        "parameters": report.parameters,
        "parameters_are_of": "ranks" if report.counts_ranks else "model",
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
        "hint": report.hint,
    }


def _print_compared(compared: Sequence[Compared], folder: Path | None, as_json: bool) -> None:
    from reshard.cli.table import align

    identical = all(file.equal for file in compared)
    if as_json:
        files = [{"name": f.name, "original": f.original, "merged": f.merged, "identical": f.equal} for f in compared]
        _print_json(
            {"command": "demo", "folder": str(folder) if folder else None, "identical": identical, "files": files}
        )
        return
    cells = [("sha256 of", "model", "merged", "")]
    for file in compared:
        original, merged = ((digest or "missing")[:16] for digest in (file.original, file.merged))
        cells.append((file.name, original, merged, "same" if file.equal else "DIFFERENT"))
    for line in ("", *align(cells, right=(), width=None)):
        _echo(line)
    count = sum(file.equal for file in compared)
    _echo(f"\n{count} of {len(compared)} files came back byte for byte.")
    if folder is None and identical:
        _echo("The folder was temporary: 'reshard demo FOLDER' keeps everything for you to look at.")


# ------------------------------------------------------------------------------------------------------ entry point


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line and exit with its code."""
    args = list(sys.argv[1:] if arguments is None else arguments)
    _escape_what_cannot_be_said()
    code = _run(args)
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        code = _closed_pipe()
    raise SystemExit(code)


def _escape_what_cannot_be_said() -> None:
    """Names of files need be no UTF-8, and a terminal's encoding may lack a character: both are shown as ``\\udcff``,
    which in JSON is the very name.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


def _run(args: list[str]) -> int:
    debug = "--debug" in args
    try:
        result = cli.main(args, prog_name="reshard", standalone_mode=False)
        return result if isinstance(result, int) else 0
    except click.UsageError as error:
        command = error.ctx.command_path if error.ctx else "reshard"
        return _fail(error.format_message(), f"{command} --help", code=2)
    except click.ClickException as error:
        return _fail(error.format_message(), None, code=2)
    except MismatchError as error:
        return _fail(error.message, error.hint, code=1, debug=debug)
    except ReshardError as error:
        return _fail(error.message, error.hint, code=2, debug=debug)
    except _InterruptedError:
        return _fail_plainly("interrupted: the same command goes on where it stopped", 130)
    except (KeyboardInterrupt, click.Abort):
        return _fail_plainly("interrupted", 130)
    except BrokenPipeError:
        return _closed_pipe()
    except SystemExit as stop:
        # Outside of shell completion click exits by itself for a closed pipe alone, with a code that means "no".
        if stop.code and "_RESHARD_COMPLETE" not in os.environ:
            return _closed_pipe()
        raise
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        return _fail(f"{where}{error.strerror or error}", None, code=2, debug=debug)
    except MemoryError:
        return _fail("there is not enough memory", None, code=2, debug=debug)
    except Exception as error:
        hint = None if debug else "run the same command with --debug and report what it shows"
        return _fail(f"internal error: {type(error).__name__}: {error}", hint, code=2, debug=debug)


def _fail(message: str, hint: str | None, *, code: int, debug: bool = False) -> int:
    """One ``Error:`` line and one ``Hint:`` line on stderr; with ``debug`` the traceback before them."""
    if debug:
        import traceback

        traceback.print_exc()
    colour = _colour_is_wanted()
    label = click.style("Error:", fg="red", bold=True) if colour else "Error:"
    click.echo(f"{label} {one_line(message)}", err=True, color=colour)
    if hint:
        click.echo(f"Hint: {one_line(hint)}", err=True)
    return code


def _fail_plainly(message: str, code: int) -> int:
    click.echo(f"reshard: {message}", err=True)
    return code


def _colour_is_wanted() -> bool:
    if os.environ.get("FORCE_COLOR"):
        return True
    return sys.stderr.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM", "dumb") != "dumb"


def _closed_pipe() -> int:
    """Whoever read our output has gone (``| head``): end silently, as a program killed by SIGPIPE does."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 141
