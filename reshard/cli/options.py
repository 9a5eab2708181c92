"""The options that several commands share, and the types of their values."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click
from click.core import ParameterSource
from click.shell_completion import CompletionItem

from reshard.cli.errors import show_tracebacks

if TYPE_CHECKING:
    from reshard.launcher import Share
    from reshard.planning.plan import Padding
    from reshard.storage.access import Access

_Function = TypeVar("_Function", bound=Callable[..., Any])
_UNITS = {"": 0, "K": 1, "M": 2, "G": 3, "T": 4}


class Size(click.ParamType):  # type: ignore[type-arg]  # it takes none before click 8.4
    """A number of bytes: ``5GB`` (decimal, as on the Hub), ``512MiB``, ``1000000``."""

    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """The number of bytes that a text stands for. Raises click.BadParameter for any other text, and for 0."""
        if isinstance(value, int):
            return value
        match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?)(I?)B?\s*", str(value).upper())
        if match is None or (match[3] and not match[2]):
            self.fail(f"'{value}' is not a size such as 5GB, 500MB or 2GiB", param, ctx)
        size = int(float(match[1]) * (1024 if match[3] else 1000) ** _UNITS[match[2]])
        if size < 1:
            self.fail(f"'{value}' is less than one byte", param, ctx)
        return size


class Counts(click.ParamType):  # type: ignore[type-arg]  # it takes none before click 8.4
    """Whole numbers with commas between them: ``8,9,9,6``."""

    name = "counts"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, ...]:
        """The numbers. Raises click.BadParameter for any other text."""
        if isinstance(value, tuple):
            return value
        if re.fullmatch(r"\d{1,9}(,\d{1,9})*", str(value)) is None:
            self.fail(f"'{value}' is no list of numbers such as 8,9,9,6", param, ctx)
        return tuple(map(int, str(value).split(",")))


class Rank(click.ParamType):  # type: ignore[type-arg]  # it takes none before click 8.4
    """The number of a rank, or ``auto``, which becomes None."""

    name = "rank"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int | None:
        """The number. Raises click.BadParameter for any other text."""
        if value is None or value == "auto":
            return None
        if re.fullmatch(r"-?\d{1,9}", str(value)) is None:
            self.fail(f"'{value}' is not a rank's number, nor 'auto'", param, ctx)
        return int(value)


class PartOf(click.ParamType):  # type: ignore[type-arg]  # it takes none before click 8.4
    """One of several processes that share the files: ``I/N``, or ``auto`` for what the launcher says."""

    name = "part"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Share:
        """The process and their number. Raises click.BadParameter for any other text, PlanError without a launcher."""
        from reshard.launcher import Share, share_of_launcher

        if isinstance(value, Share):
            return value
        if value == "auto":
            return share_of_launcher()
        match = re.fullmatch(r"(\d{1,9})/(\d{1,9})", str(value))
        if match is None or int(match[1]) >= int(match[2]):
            self.fail(f"'{value}' is not 'auto', nor I/N with I from 0 to N - 1", param, ctx)
        return Share(int(match[1]), int(match[2]))


class LocalPath(click.Path):
    """A place on this machine: no URL, of which a folder with the URL's password in its name would be made."""

    def __init__(self, *, dir_okay: bool = True) -> None:
        super().__init__(dir_okay=dir_okay, path_type=Path)

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


class FormatName(click.ParamType):  # type: ignore[type-arg]  # it takes none before click 8.4
    """The name of another program's format."""

    name = "format"

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        """The names that begin so."""
        from formats.notation.format_file import format_names
        from reshard.planning.kept_options import HUGGING_FACE

        return [CompletionItem(name) for name in sorted([*format_names(), HUGGING_FACE]) if name.startswith(incomplete)]


class ModelType(click.ParamType):  # type: ignore[type-arg]  # it takes none before click 8.4
    """A model type that has rules, or a part of its name."""

    name = "model type"

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        """The model types that begin so."""
        from formats.notation.architecture_files import built_in_architectures

        return [CompletionItem(name) for name in sorted(built_in_architectures()) if name.startswith(incomplete)]


class NewFolder(click.Path):
    """A folder to be made, which needs a name of its own: not ``.``, ``..`` or ``/``; or the URL of one in a bucket."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Path | str:
        """The path, or the URL. Raises click.BadParameter where it has no name."""
        if "://" in str(value):
            return str(value)
        out = Path(value)
        if out.name in {"", ".."}:
            self.fail(f"'{value}' is no name for a new folder", param, ctx)
        return out


def together(*options: Callable[[_Function], _Function]) -> Callable[[_Function], _Function]:
    """Several options as one decorator, shown in the given order."""

    def decorate(function: _Function) -> _Function:
        for option in reversed(options):
            function = option(function)
        return function

    return decorate


PATH = LocalPath()
FILE = LocalPath(dir_okay=False)

hub_options = together(
    click.option("--revision", metavar="REV", help="Branch, tag or commit of a Hub repository."),
    click.option("--token", metavar="TOKEN", help="Token for the Hub; default: HF_TOKEN, or that of 'hf auth login'."),
    click.option("--cache-dir", type=PATH, metavar="DIR", help="The Hub's cache; default: HF_HUB_CACHE."),
)
dequantize_option = click.option(
    "--dequantize", is_flag=True,
    help="Take weights of 8-bit floats (fp8) as if the checkpoint were in BF16: number times scale, as DeepSeek's own "
    "script computes it."
)  # fmt: skip
download_option = click.option(
    "--download",
    is_flag=True,
    help="Download a Hub repository into the cache, instead of reading what is needed of it.",
)
plan_option = click.option("--plan", "plan_file", type=PATH, metavar="FILE", help="Your own architecture file.")
config_option = click.option(
    "--config", "config_folder", type=PATH, metavar="DIR",
    help="A folder with config.json and tokenizer, for a format that has none."
)  # fmt: skip
mesh_options = together(
    click.option("--tp", type=int, metavar="N", help="Degree of tensor parallelism."),
    click.option("--ep", type=int, metavar="N", help="Degree of expert parallelism: whole experts on each of N ranks."),
    click.option("--pp", type=int, metavar="N", help="Degree of pipeline parallelism: layers in N stages."),
    click.option(
        "--pp-layers", type=Counts(), metavar="A,B,..", help="Layers of each stage, where they should differ."
    ),
    click.option("--same-ranks", is_flag=True, help="Use the same ranks for --ep and --tp, with the same degree."),
    click.option("--uneven", is_flag=True, help="Where an MLP has no N equal parts, give the last ranks less of it."),
)
padding_options = together(
    click.option(
        "--pad-vocab-to", type=click.IntRange(min=1), metavar="M",
        help="Also pad the vocabulary to a multiple of M, as some engines want it."
    ),
    click.option("--no-pad-vocab", is_flag=True, help="Refuse a vocabulary that does not divide by N."),
)  # fmt: skip
write_options = together(
    click.option(
        "--overwrite", is_flag=True, help="Replace an existing output once the new one is complete (a bucket: before)."
    ),
    click.option("--fsync", is_flag=True, help="Flush the output to the disk before it gets its name (power loss)."),
    click.option("--no-checksum", is_flag=True, help="Neither record checksums nor compare them with recorded ones."),
    click.option("--workers", type=click.IntRange(min=1), metavar="N", help="Processes; default: one a core, 2 to 8."),
    click.option("--dry-run", is_flag=True, help="Check everything and write nothing."),
)
part_option = click.option(
    "--part", type=PartOf(), metavar="I/N",
    help="Write part I (from 0) of N of the files; N processes add up; 'auto': as Slurm, torchrun, MPI ... count."
)  # fmt: skip
progress_option = click.option(
    "--progress", type=click.Choice(["auto", "bar", "log", "none"]), default="auto", show_default=True,
    help="How far it is, on stderr: a bar, a line a minute, or nothing; auto: a bar on a terminal, else lines."
)  # fmt: skip
json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
debug_option = click.option(
    "--debug", is_flag=True, expose_value=False, callback=show_tracebacks, help="Show the traceback of an error."
)
output_options = together(
    json_option,
    click.option("-q", "--quiet", is_flag=True, help="Print the output's path and nothing else."),
    debug_option,
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


def access_of(
    revision: str | None,
    token: str | None,
    cache_dir: Path | None,
    plan_file: Path | None,
    config: Path | None = None,
    *,
    quiet: bool,
    download: bool = False,
    dequantize: bool = False,
) -> Access:
    """How to reach a source, by the options of ``hub_options``, ``plan_option`` and ``config_option``."""
    from reshard.storage.access import Access

    return Access(
        revision=revision, token=token, cache_dir=cache_dir, plan_file=plan_file, quiet=quiet, config=config,
        download=download, dequantize=dequantize,
    )  # fmt: skip


def padding_of(pad_vocab_to: int | None, no_pad_vocab: bool) -> Padding:
    """How to pad, by ``padding_options``. Raises click.UsageError for both of them."""
    from reshard.planning.plan import Padding

    if no_pad_vocab and pad_vocab_to is not None:
        raise click.UsageError("--pad-vocab-to and --no-pad-vocab exclude each other")
    return Padding(allowed=not no_pad_vocab, to=pad_vocab_to or 1)


@dataclass(frozen=True)
class Degrees:
    """The degrees that ``mesh_options`` say; one that was not given is None."""

    tp: int | None
    ep: int | None
    pp: int | None
    pp_layers: tuple[int, ...]
    same_ranks: bool

    @property
    def are_given(self) -> bool:
        """Whether any degree was given."""
        return (self.tp, self.ep, self.pp) != (None, None, None)

    @property
    def arguments(self) -> dict[str, Any]:
        """The same as arguments of ``reshard.split`` and ``mesh_of``."""
        return {
            "tp": 1 if self.tp is None else self.tp,
            "ep": 1 if self.ep is None else self.ep,
            "pp": 1 if self.pp is None else self.pp,
            "pp_layers": self.pp_layers,
            "same_ranks": self.same_ranks,
        }


def degrees_of(
    tp: int | None, ep: int | None, pp: int | None, pp_layers: tuple[int, ...] | None, same_ranks: bool
) -> Degrees:
    """The degrees of ``mesh_options``. Raises click.UsageError for ``--same-ranks`` without both degrees."""
    if same_ranks and (tp is None or ep is None):
        raise click.UsageError("--same-ranks goes with --tp N and --ep N, both of the same degree")
    if pp is None and pp_layers:
        pp = len(pp_layers)
    return Degrees(tp, ep, pp, pp_layers or (), same_ranks)
