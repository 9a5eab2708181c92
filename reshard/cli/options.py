"""The options that several commands share, and the types of their values.

``--help`` of a command: what it does, three examples, a short explanation, and its options in groups.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable, Mapping
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click
from click.core import ParameterSource
from click.shell_completion import CompletionItem

from formats.errors import ReshardError, SettingError
from reshard.cli.errors import show_tracebacks
from reshard.text import size_of

if TYPE_CHECKING:
    from reshard.system import Share


_Function = TypeVar("_Function", bound=Callable[..., Any])
_WIDEST = 24
"""Columns of the longest option that stands in one line with its help."""


class Group(Enum):
    """What an option is about, and the heading of its group. The groups of a command are shown in this order."""

    WHAT = "What"
    WHERE = "Where from"
    HOW = "How"
    OUTPUT = "Output"
    RARE = "Rarely needed"


class Option(click.Option):
    """An option that ``--help`` shows in a group."""

    def __init__(self, *names: Any, group: Group, **settings: Any) -> None:
        super().__init__(*names, **settings)
        self.group = group

    def get_help_extra(self, ctx: click.Context) -> Any:
        """What click adds to the help: the default, but not ``x>=1``, which nobody tries to pass."""
        extra = super().get_help_extra(ctx)
        extra.pop("range", None)
        return extra


def debug_option() -> Option:
    """``--debug``, which the group of commands has, too."""
    settings = {"is_flag": True, "expose_value": False, "callback": show_tracebacks}
    return Option(["--debug"], group=Group.RARE, **settings, help="Show the traceback of an error.")


def option(*names: str, group: Group, **settings: Any) -> Callable[[_Function], _Function]:
    """``click.option`` with a group."""
    return click.option(*names, cls=Option, group=group, **settings)


class Command(click.Command):
    """A command with ``examples``: lines as one types them, each with what it does.

    They work in the folder of ``reshard demo FOLDER``, in the order of the commands. Of what is not in it,
    ``meta-llama/Llama-3.1-8B`` is a model of the Hub, and ``s3://bucket`` stands for any bucket. Each command has
    ``--json`` (``as_json``) and ``--debug``; with ``quiet`` also ``-q``, of which that is the help.
    """

    def __init__(
        self, *names: Any, examples: Mapping[str, str], quiet: str | None = None, params: list[Any], **settings: Any
    ) -> None:
        params.append(Option(["--json", "as_json"], group=Group.OUTPUT, is_flag=True, help="Print one JSON document."))
        if quiet:
            params.append(Option(["-q", "--quiet"], group=Group.OUTPUT, is_flag=True, help=quiet))
        super().__init__(*names, params=[*params, debug_option()], **settings)
        self.examples = examples

    def format_help_text(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """What the command does, the examples, and the rest of the docstring."""
        first, _, details = inspect.cleandoc(self.help or "").partition("\n\n")
        self._write_text(formatter, first)
        with formatter.section("Examples"):
            for line, what in self.examples.items():  # not wrapped: they are there to be copied
                formatter.write(f"{'':{formatter.current_indent}}# {what}\n{'':{formatter.current_indent}}{line}\n")
        if details:
            self._write_text(formatter, details)

    @staticmethod
    def _write_text(formatter: click.HelpFormatter, text: str) -> None:
        formatter.write_paragraph()
        with formatter.indentation():
            formatter.write_text(text)

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """The options by group, in columns that are as wide in all groups."""
        rows: dict[Group, list[tuple[str, str]]] = {group: [] for group in Group}
        for param in self.get_params(ctx):
            row = param.get_help_record(ctx) if isinstance(param, click.Option) else None
            if row is not None:  # click makes --help itself, without a group
                rows[param.group if isinstance(param, Option) else Group.OUTPUT].append(row)
        width = min(max(len(names) for entries in rows.values() for names, _ in entries), _WIDEST)
        for group, entries in rows.items():
            if entries:
                with formatter.section(group.value):
                    formatter.write_dl([(names.ljust(width), text) for names, text in entries], col_max=width)


_Request = TypeVar("_Request")


class Value(click.ParamType):  # type: ignore[type-arg]  # it takes none before click 8.4
    """What ``read`` makes of a text; its ValueError says what is wrong with it. ``known`` are words to complete."""

    def __init__(self, name: str, read: Callable[[str], Any] = str, known: Callable[[], Iterable[str]] = tuple) -> None:
        self.name, self._read, self._choices = name, read, known

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """The value of a text. Raises click.BadParameter."""
        try:
            return self._read(value) if isinstance(value, str) else value
        except ValueError as error:
            self.fail(str(error), param, ctx)

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        """The known words that begin so."""
        return [CompletionItem(word) for word in sorted(self._choices()) if word.startswith(incomplete)]


def numbers(text: str) -> tuple[int, ...]:
    """Whole numbers of at least 1, in order: ``1,8,64``, or ``1024..16384`` for all doublings. Raises ValueError."""
    listed = re.fullmatch(r"[1-9]\d{0,7}(,[1-9]\d{0,7})*", text)
    values = tuple(sorted(set(map(int, text.split(","))))) if listed else ()
    if ends := re.fullmatch(r"([1-9]\d{0,7})\.\.([1-9]\d{0,7})", text):
        first, last = map(int, ends.groups())
        values = tuple(first << i for i in range(32) if first << i <= last)
    if not values:
        raise ValueError(f"'{text}' is no list of numbers such as 1,2,4 or 1024..16384")
    return values


NUMBERS = Value("numbers", numbers)


def _programs() -> Iterable[str]:
    return [f"{name}:" for name in ("fsdp2", "torchtitan", "megatron", "vllm", "sglang", "transformers")]


RANKS = Value("ranks", str, _programs)
"""A program and its degrees, such as ``fsdp2:8`` (``reshard.live.meshes.target_of`` reads it)."""


def speed(text: str) -> float:
    """Bytes per second: ``450GB/s``. Raises ValueError."""
    if not text.endswith("/s"):
        raise ValueError(f"'{text}' is not a speed such as 450GB/s")
    return float(size_of(text.removesuffix("/s")))


def counts(text: str) -> tuple[int, ...]:
    """Whole numbers with commas between them: ``8,9,9,6``. Raises ValueError."""
    if re.fullmatch(r"\d{1,9}(,\d{1,9})*", text) is None:
        raise ValueError(f"'{text}' is no list of numbers such as 8,9,9,6")
    return tuple(map(int, text.split(",")))


def rank(text: str) -> int | None:
    """The number of a rank, or ``auto``, which becomes None. Raises ValueError."""
    if text != "auto" and re.fullmatch(r"-?\d{1,9}", text) is None:
        raise ValueError(f"'{text}' is not a rank's number, nor 'auto'")
    return None if text == "auto" else int(text)


def part_of(text: str) -> Share:
    """One of several processes: ``I/N``, or ``auto`` for what the launcher says. Raises ValueError, PlanError."""
    from reshard.system import Share, share_of_launcher

    return share_of_launcher() if text == "auto" else Share.of_text(text)


def format_names() -> Iterable[str]:
    """The names of the formats that are written, also those of adapters."""
    from formats.notation.format_file import names_to_write

    return names_to_write()


def dtypes() -> Iterable[str]:
    """The dtypes to which weights are cast."""
    from formats.files.safetensors import CASTS

    return CASTS


def model_types() -> Iterable[str]:
    """The model types that have rules."""
    from formats.notation.architecture_files import built_in_architectures

    return built_in_architectures()


class LocalPath(click.Path):
    """A place on this machine: no URL, of which a folder with the URL's password in its name would be made."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """The path. Raises click.BadParameter for a URL."""
        if "://" in str(value):
            self.fail(f"'{value}' is a URL; a path on this machine is needed", param, ctx)
        return super().convert(value, param, ctx)


class Place(click.ParamType):  # type: ignore[type-arg]  # it takes none before click 8.4
    """What names a checkpoint: a folder, which a shell completes, a Hub id or a URL."""

    name = "place"

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        """Has the shell complete a path."""
        return [CompletionItem(incomplete, type="file")]


class NewFolder(click.Path):
    """A folder to be made, or the URL of one in a bucket."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Path | str:
        """The path, or the URL."""
        return str(value) if "://" in str(value) else Path(value)


def together(*options: Callable[[_Function], _Function]) -> Callable[[_Function], _Function]:
    """Several options as one decorator, shown in the given order."""

    def decorate(function: _Function) -> _Function:
        for option in reversed(options):
            function = option(function)
        return function

    return decorate


def negated(_: click.Context, __: click.Parameter, is_given: bool) -> bool:
    """The value of a field of a request that an option switches off."""
    return not is_given


FORMAT, SIZE = Value("format", known=format_names), Value("size", size_of)
PATH = LocalPath(path_type=Path)
FILE = LocalPath(dir_okay=False, path_type=Path)

hub_options = together(
    option("--revision", group=Group.WHERE, metavar="REV", help="Branch, tag or commit on the Hub."),
    option("--token", group=Group.WHERE, metavar="TOKEN", help="Hub token; default: HF_TOKEN or 'hf auth login'."),
    option("--cache-dir", group=Group.RARE, type=PATH, metavar="DIR", help="The Hub's cache; default: HF_HUB_CACHE."),
)
cast_option = option(
    "--dtype", group=Group.WHAT, type=Value("dtype", known=dtypes), metavar="NAME",
    help="Cast weights to bf16, fp16 or fp32.",
)  # fmt: skip
dequantize_option = option(
    "--dequantize", group=Group.WHAT, is_flag=True, help="Turn fp8 weights into BF16: number times scale."
)
quantize_option = option(
    "--quantize", group=Group.WHAT, type=Value("form", known=lambda: ["fp8-block"]), metavar="fp8-block",
    help="Turn weights into fp8 in blocks, with scales.",
)  # fmt: skip
patch_option = option("--patch", group=Group.WHAT, type=Place(), multiple=True, metavar="DELTA",
                      help="First put a DELTA of 'diff' on it (repeatable).")  # fmt: skip
download_option = option(
    "--download", group=Group.WHERE, is_flag=True, help="Download the repository first, into the cache."
)
plan_option = option("--plan", "plan_file", group=Group.WHERE, type=PATH, metavar="FILE",
                     help="Your own architecture file.")  # fmt: skip
config_option = option("--config", group=Group.WHERE, type=PATH, metavar="DIR",
                       help="config.json and tokenizer, for a format without.")  # fmt: skip
other_mesh_options = together(
    option("--ep", group=Group.WHAT, type=int, metavar="N", help="Expert parallelism: whole experts, on N ranks."),
    option("--pp", group=Group.WHAT, type=int, metavar="N", help="Pipeline parallelism: the layers in N stages."),
    option("--pp-layers", group=Group.RARE, type=Value("counts", counts), metavar="A,B,..",
           help="Layers of each stage, if they should differ."),
    option("--same-ranks", group=Group.RARE, is_flag=True, help="--ep N and --tp N on the same N ranks."),
    option("--uneven", group=Group.RARE, is_flag=True, help="Let the last ranks hold less of an MLP."),
)  # fmt: skip
mesh_options = together(
    option("--tp", group=Group.WHAT, type=int, metavar="N", help="Tensor parallelism: large weights in N parts."),
    other_mesh_options,
)
padding_options = together(
    option("--pad-vocab-to", group=Group.WHAT, type=click.IntRange(min=1), metavar="M",
           help="Also pad the vocabulary to a multiple of M."),
    option("--no-pad-vocab", "pad_vocab", group=Group.RARE, is_flag=True, callback=negated,
           help="Refuse a vocabulary that N does not divide."),
)  # fmt: skip
write_options = together(
    option("--workers", group=Group.HOW, type=click.IntRange(min=1), metavar="N",
           help="Threads; default: one a core, 2 to 8."),
    option("--dry-run", group=Group.HOW, is_flag=True, help="Check everything and write nothing."),
    option("--overwrite", group=Group.OUTPUT, is_flag=True, help="Replace OUT at the end (in a bucket: at the start)."),
    option("--fsync", group=Group.RARE, is_flag=True, help="Flush OUT to the disk, against power failure."),
    option("--no-checksum", "checksum", group=Group.RARE, is_flag=True, callback=negated,
           help="Record and compare no checksums."),
)  # fmt: skip
part_option = option("--part", group=Group.HOW, type=Value("part", part_of), metavar="I/N",
                     help="Write part I (from 0) of N parts, or 'auto'.")  # fmt: skip
progress_option = option(
    "--progress", group=Group.OUTPUT, type=click.Choice(["auto", "bar", "log", "none"]), default="auto", metavar="HOW",
    help="bar, log (a line a minute), none; default: auto."
)  # fmt: skip
device_option = option("--device", group=Group.HOW, metavar="NAME", default="auto", show_default=True,
                       help="Ranks run on cpu, cuda, xpu or npu.")  # fmt: skip


def timeout_option(seconds: float) -> Callable[[_Function], _Function]:
    """``--timeout SECONDS``, by default so many."""
    return option("--timeout", group=Group.RARE, type=click.FloatRange(0, min_open=True), default=seconds,
                  metavar="SECONDS", help=f"How long a rank waits for others; default: {seconds:g}.")  # fmt: skip


def report_option(what: str) -> Callable[[_Function], _Function]:
    """``--report FILE``, for a page."""

    def checked(_: click.Context, __: click.Parameter, file: Path | None) -> Path | None:
        if file is not None and not file.absolute().parent.is_dir():
            raise click.UsageError(f"--report: there is no folder {file.absolute().parent}")
        return file

    return option("--report", group=Group.OUTPUT, type=FILE, metavar="FILE", callback=checked, help=what)


def format_option(what: str) -> Callable[[_Function], _Function]:
    """``--as FORMAT``."""
    return option("--as", "format", group=Group.WHAT, type=FORMAT, metavar="FORMAT", help=what)


access_options = together(plan_option, config_option, hub_options)
writing_options = together(
    part_option,
    access_options,
    download_option,
    write_options,
    progress_option,
)


def given_options() -> set[str]:
    """The options that the command line of the running command has, by their long names."""
    context = click.get_current_context()
    sources = {param: context.get_parameter_source(param.name or "") for param in context.command.params}
    return {
        max(param.opts, key=len)
        for param, source in sources.items()
        if isinstance(param, click.Option) and source is ParameterSource.COMMANDLINE
    }


def request_of(request: Callable[..., _Request], options: Mapping[str, Any], **fields: Any) -> _Request:
    """The request of the options and arguments of a command; those that were not given are as the request has them."""
    return request(**{name: value for name, value in options.items() if value not in (None, ())}, **fields)


def check_degrees(options: Mapping[str, Any]) -> None:
    """Raise UsageError for degrees that contradict each other as they are given."""
    if options["pp"] == 1 and options["pp_layers"]:
        raise click.UsageError("--pp 1 goes without --pp-layers")
    if options["same_ranks"] and (options["tp"] is None or options["ep"] is None):
        raise click.UsageError("--same-ranks goes with --tp N and --ep N, both of the same degree")


def has_degree(options: Mapping[str, Any]) -> bool:
    """Whether a degree is given."""
    return any(options[name] is not None for name in ("tp", "ep", "pp")) or bool(options["pp_layers"])


def option_names(command: click.Command) -> Callable[[str, object], str]:
    """How a field of a request with a value is given on the command line: ``--tp 4``."""
    options = {param.name: max(param.opts, key=len) for param in command.params if isinstance(param, click.Option)}

    def call(name: str, value: object) -> str:
        flag = options.get(name, f"--{name.replace('_', '-')}")
        if value is None or isinstance(value, bool):
            return flag
        return f"{flag} {','.join(map(str, value)) if isinstance(value, tuple) else value}"

    return call


def with_option_names(error: ReshardError, command: click.Command) -> ReshardError:
    """The error with the fields of a request called by the options of a command."""
    if not isinstance(error, SettingError):
        return error
    call = option_names(command)
    return ReshardError(error.refusal.message(call), error.refusal.hint(call))
