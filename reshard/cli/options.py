"""The options that several commands share, and the types of their values.

``--help`` of a command: what it does, three examples, a short explanation, and its options in groups.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import Enum
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click
from click.core import ParameterSource
from click.shell_completion import CompletionItem

from reshard.cli.printing import show_tracebacks
from reshard.formats.errors import ReshardError, SettingError
from reshard.formats.hints import typed
from reshard.text import size_of

if TYPE_CHECKING:
    from reshard.system import Share


_WIDEST = 24
"""Columns of the longest option that stands in one line with its help."""


class Group(Enum):
    """The groups of options, with their headings. The help of a command shows them in this order."""

    WHAT = "What"
    WHERE = "Where from"
    HOW = "How"
    OUTPUT = "Output"
    RARE = "Rarely needed"


class Option(click.Option):
    """An option that ``--help`` shows in a group."""

    def __init__(self, *names: str, group: Group, **settings: Any) -> None:
        super().__init__(names, **settings)
        self.names, self.group, self.settings = names, group, settings

    def get_help_extra(self, ctx: click.Context) -> Any:
        """Return click's additions to the help: the default, but not ``x>=1``, which nobody tries to pass."""
        extra = super().get_help_extra(ctx)
        extra.pop("range", None)
        return extra


def debug_option() -> Option:
    """``--debug``, which the group of commands has, too."""
    settings = {"is_flag": True, "expose_value": False, "callback": show_tracebacks}
    return Option("--debug", group=Group.RARE, **settings, help="Show the traceback of an error.")


class Command(click.Command):
    """A command with ``examples``: lines as one types them, each with what it does.

    They work in the folder of ``reshard demo FOLDER``, in the order of the commands. Of what is not in it,
    ``meta-llama/Llama-3.1-8B`` is a model of the Hub, and ``s3://bucket`` stands for any bucket.

    ``options`` are names of ``OPTIONS``, and such as no other command has, in the order of ``--help``. Each command has
    ``--json`` (``as_json``) and ``--debug``; with ``quiet`` also ``-q``, of which that is the help.
    """

    def __init__(
        self,
        name: str | None,
        *,
        examples: Mapping[str, str],
        options: Sequence[str | Option] = (),
        quiet: str | None = None,
        params: Sequence[click.Parameter],
        **settings: Any,
    ) -> None:
        own = [OPTIONS[option] if isinstance(option, str) else option for option in options]
        own.append(Option("--json", "as_json", group=Group.OUTPUT, is_flag=True, help="Print one JSON document."))
        if quiet:
            own.append(Option("-q", "--quiet", group=Group.OUTPUT, is_flag=True, help=quiet))
        super().__init__(name, params=[*params, *own, debug_option()], **settings)
        self.examples = examples

    def format_help_text(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the first sentence of the docstring, the examples, and the rest of the docstring."""
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
    """A type of values: ``read`` parses a text, or raises ValueError with the fault. ``known`` are words to
    complete.
    """

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
_PROGRAMS = ("fsdp2", "torchtitan", "megatron", "vllm", "sglang", "transformers")
RANKS = Value("ranks", known=lambda: [f"{name}:" for name in _PROGRAMS])
"""A program and its degrees, such as ``fsdp2:8`` (``reshard.live.meshes.target_of`` reads it)."""


def counts(text: str) -> tuple[int, ...]:
    """Whole numbers with commas between them: ``8,9,9,6``. Raises ValueError."""
    if re.fullmatch(r"\d{1,9}(,\d{1,9})*", text) is None:
        raise ValueError(f"'{text}' is no list of numbers such as 8,9,9,6")
    return tuple(map(int, text.split(",")))


def fractions(text: str) -> tuple[float, ...]:
    """Numbers with commas between them: ``0.5,0.3,0.2``. Raises ValueError."""
    try:
        return tuple(map(float, text.split(",")))
    except ValueError:
        raise ValueError(f"'{text}' is no list of numbers such as 0.5,0.3,0.2") from None


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
    from reshard.formats.notation.format_file import names_to_write

    return names_to_write()


def dtypes() -> Iterable[str]:
    """The dtypes to which weights are cast."""
    from reshard.formats.files.safetensors import CASTS

    return CASTS


def model_types() -> Iterable[str]:
    """The model types that have rules."""
    from reshard.formats.notation.architecture_files import built_in_architectures

    return built_in_architectures()


class LocalPath(click.Path):
    """A place on this machine. A URL is refused: it would become a folder with the URL's password in its name."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """The path. Raises click.BadParameter for a URL."""
        if "://" in str(value):
            self.fail(f"'{value}' is a URL; a path on this machine is needed", param, ctx)
        return super().convert(value, param, ctx)


class NewFolder(click.Path):
    """A folder to be made, or the URL of one in a bucket."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Path | str:
        """The path, or the URL."""
        return str(value) if "://" in str(value) else Path(value)


def negated(_: click.Context, __: click.Parameter, is_given: bool) -> bool:
    """The value of a field of a request that an option switches off."""
    return not is_given


PLACE = click.Path(readable=False)
"""The type of a checkpoint's name: a path, a Hub id or a URL. A shell completes it as a path; nothing checks it
here.
"""
PATH = LocalPath(path_type=Path)
FILE = LocalPath(dir_okay=False, path_type=Path)


class NewFile(LocalPath):
    """A file to be written, at a place where one may be: that is known before anything is read."""

    def __init__(self, *, is_page: bool = False) -> None:
        super().__init__(path_type=Path)
        self._is_page = is_page

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """The path. Raises click.BadParameter, CheckpointError."""
        from reshard.publishing.existing import check_file

        check_file(file := super().convert(value, param, ctx), is_page=self._is_page)
        return file


_WHAT, _WHERE, _HOW, _OUTPUT, _RARE = Group
_ALL = (
    Option("--tp", group=_WHAT, type=int, metavar="N", help="Tensor parallelism: large weights in N parts."),
    Option("--ep", group=_WHAT, type=int, metavar="N", help="Expert parallelism: whole experts, on N ranks."),
    Option("--pp", group=_WHAT, type=int, metavar="N", help="Pipeline parallelism: the layers in N stages."),
    Option("--pp-layers", group=_RARE, type=Value("counts", counts), metavar="A,B,..",
           help="Layers of each stage, if they should differ."),
    Option("--same-ranks", group=_RARE, is_flag=True, help="--ep N and --tp N on the same N ranks."),
    Option("--uneven", group=_RARE, is_flag=True, help="Let the last ranks hold less of an MLP."),
    Option("--as", "format", group=_WHAT, type=Value("format", known=format_names), metavar="FORMAT",
           help="The format to write: see 'reshard formats'."),
    Option("--dequantize", group=_WHAT, is_flag=True, help="Turn fp8 weights into BF16: number times scale."),
    Option("--quantize", group=_WHAT, type=Value("form", known=lambda: ["fp8-block"]), metavar="fp8-block",
           help="Turn weights into fp8 in blocks, with scales."),
    Option("--dtype", group=_WHAT, type=Value("dtype", known=dtypes), metavar="NAME",
           help="Cast weights to bf16, fp16 or fp32."),
    Option("--patch", group=_WHAT, type=PLACE, multiple=True, metavar="DELTA",
           help="First put a DELTA of 'diff' on it (repeatable)."),
    Option("--adapter", group=_WHAT, type=PLACE, metavar="DIR", help="Add a LoRA adapter to SOURCE's weights first."),
    Option("--pad-vocab-to", group=_WHAT, type=click.IntRange(min=1), metavar="M",
           help="Also pad the vocabulary to a multiple of M."),
    Option("--no-pad-vocab", "pad_vocab", group=_RARE, is_flag=True, callback=negated,
           help="Refuse a vocabulary that N does not divide."),
    Option("--max-shard-size", group=_OUTPUT, type=Value("size", size_of),
           help="Largest file; default: the original files."),
    Option("--names", group=_OUTPUT, type=click.Choice(["source", "published", "modules"]),
           default="source", metavar="WHOSE",
           help="Names in OUT: of source, published or modules."),
    Option("--part", group=_HOW, type=Value("part", part_of), metavar="I/N",
           help="Write part I (from 0) of N parts, or 'auto'."),
    Option("--plan", "plan_file", group=_WHERE, type=PATH, metavar="FILE", help="Your own architecture file."),
    Option("--config", group=_WHERE, type=PLACE, metavar="DIR",
           help="Folder or Hub id with config.json and tokenizer."),
    Option("--weights", group=_WHAT, metavar="PREFIX",
           help="If a place has several models, the prefix of one."),
    Option("--revision", group=_WHERE, metavar="REV", help="Branch, tag or commit on the Hub."),
    Option("--token", group=_WHERE, metavar="TOKEN", help="Hub token; default: HF_TOKEN or 'hf auth login'."),
    Option("--cache-dir", group=_RARE, type=PATH, metavar="DIR", help="The Hub's cache; default: HF_HUB_CACHE."),
    Option("--download", group=_WHERE, is_flag=True, help="Download the repository first, into the cache."),
    Option("--workers", group=_HOW, type=click.IntRange(min=1), metavar="N",
           help="Threads or processes; default: by the cores."),
    Option("--dry-run", group=_HOW, is_flag=True, help="Check everything and write nothing."),
    Option("--moves", group=_RARE, is_flag=True, help="Print what would go from where to where; write nothing."),
    Option("--overwrite", group=_OUTPUT, is_flag=True, help="Replace OUT at the end (in a bucket: at the start)."),
    Option("--fsync", group=_RARE, is_flag=True, help="Flush OUT to the disk, against power failure."),
    Option("--no-checksum", "checksum", group=_RARE, is_flag=True, callback=negated,
           help="Record and compare no checksums."),
    Option("--progress", group=_OUTPUT, type=click.Choice(["auto", "bar", "log", "none"]), default="auto",
           metavar="HOW", help="bar, log (a line a minute), none; default: auto."),
    Option("--device", group=_HOW, metavar="NAME", default="auto", show_default=True,
           help="Ranks run on cpu, cuda, xpu or npu."),
    Option("--timeout", group=_RARE, type=click.FloatRange(0, min_open=True), default=300.0, metavar="SECONDS",
           help="How long a rank waits for others; default: 300."),
    Option("--report", group=_OUTPUT, type=NewFile(is_page=True), metavar="FILE",
           help="Draw it as an HTML page, which needs no network."),
)  # fmt: skip
OPTIONS = {str(option.name): option for option in _ALL}
"""The options of several commands, by their fields in a request."""
MESH = ("tp", "ep", "pp", "pp_layers", "same_ranks", "uneven")
PADDING = ("pad_vocab_to", "pad_vocab")
HUB = ("revision", "token", "cache_dir")
ACCESS = ("plan_file", "config", "weights", *HUB)
WRITING = ("part", *ACCESS, "download", "workers", "dry_run", "moves", "overwrite", "fsync", "checksum", "progress")


def changed(field: str, **settings: Any) -> Option:
    """An option of the table with other settings: another help, say."""
    option = OPTIONS[field]
    return Option(*option.names, **{"group": option.group, **option.settings, **settings})


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
    """Return a function that writes a field of a request with its value as an option of this command: ``--tp 4``."""
    options = {str(par.name): max(par.opts, key=len) for par in command.params if isinstance(par, click.Option)}
    return partial(typed, options=options)


class _TypedError(ReshardError):
    names_options = True


def with_option_names(error: ReshardError, command: click.Command) -> ReshardError:
    """The error with the fields of a request called by the options of a command."""
    if not isinstance(error, SettingError):
        return error
    call = option_names(command)
    return _TypedError(error.refusal.message(call), error.refusal.hint(call))
