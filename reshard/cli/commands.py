"""The command line: one table of all commands, each in a file of its own, imported when it is asked for.

The result goes to stdout, all else to stderr; ``reshard.cli.printing`` has the exit codes. ``reshard --help`` imports
no command, and none of numpy, torch and the Hub's client.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Mapping, Sequence
from importlib import import_module

import click

from reshard.cli.options import debug_option, with_option_names
from reshard.cli.printing import run_to_exit_code
from reshard.formats.errors import ReshardError, SettingError
from reshard.version import __version__

COMMANDS = {
    "demo": ("reshard.cli.demo:demo_command", "Split, re-split and merge a tiny model, and compare."),
    "models": ("reshard.cli.models:models_command", "List the model types that can be split."),
    "formats": ("reshard.cli.formats:formats_command", "List the formats of engines and trainers."),
    "plan": ("reshard.cli.plan:plan_command", "Show which degrees are possible, and what a rank would hold."),
    "profile": ("reshard.profile.cli:profile_command", "Measure which degree is fast on this node."),
    "split": ("reshard.cli.split:split_command", "Split a checkpoint, re-split it, or convert it."),
    "verify": ("reshard.verify.cli:verify_command", "Prove that shards are the same model as the original."),
    "diff": ("reshard.cli.diff:diff_command", "Show which tensors of two checkpoints differ."),
    "patch": ("reshard.cli.split:patch_command", "Put a delta, which diff wrote, on its base."),
    "average": ("reshard.cli.split:average_command", "Write the weighted mean of checkpoints."),
    "inspect": ("reshard.cli.inspect:inspect_command", "Say what a folder is, and whether it is complete."),
    "live": ("reshard.live.cli:live_command", "Push weights between running processes: plan it, check it."),
    "merge": ("reshard.cli.split:merge_command", "Merge ranks into one full checkpoint again."),
}
"""Each command's module, and its line in ``reshard --help``, by name; in the order in which one uses them."""


class LazyGroup(click.Group):
    """A group whose commands are imported when one is asked for, as click's documentation proposes."""

    def __init__(self, *, lazy: Mapping[str, tuple[str, str]], **settings: object) -> None:
        super().__init__(**settings)  # type: ignore[arg-type]  # click.command passes what click.Group takes
        self._lazy = lazy
        self.params.append(debug_option())

    def list_commands(self, ctx: click.Context) -> list[str]:
        """The names, in the order of the table."""
        return [*self._lazy]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """The command of a name, imported now, or None."""
        if cmd_name not in self._lazy:
            return None
        place, help_line = self._lazy[cmd_name]
        module, _, attribute = place.partition(":")
        command: click.Command = getattr(import_module(module), attribute)
        command.short_help = help_line
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Return the command that the first word names. Raises ReshardError for another word, with its likely
        meaning.
        """
        if args[:1] == ["help"]:  # help split
            args = [*args[1:2], "--help"]
            if args == ["--help"]:
                click.echo(ctx.get_help())
                ctx.exit()
        if args and not args[0].startswith("-") and args[0] not in self._lazy:
            from reshard.formats.hints import nearest, with_hint  # for an error alone

            hint = with_hint(nearest(args[0], self._lazy), "see 'reshard --help'")
            raise ReshardError(f"No such command '{args[0]}'", hint)
        return super().resolve_command(ctx, args)

    def invoke(self, ctx: click.Context) -> object:
        """Run the command. Raises ReshardError, which calls the fields of a request by the options of the command."""
        try:
            return super().invoke(ctx)
        except SettingError as error:
            command = self.get_command(ctx, ctx.invoked_subcommand or "")
            raise with_option_names(error, command or self) from error

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """The list of commands in ``--help``, from the table alone."""
        with formatter.section("Commands, in the order of use"):
            formatter.write_dl([(name, help_line) for name, (_, help_line) in self._lazy.items()])


@click.group(
    cls=LazyGroup,
    lazy=COMMANDS,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    no_args_is_help=False,
    invoke_without_command=True,
)
@click.version_option(__version__, "-V", "--version", prog_name="reshard", message="%(prog)s %(version)s")
@click.pass_context
def cli(ctx: click.Context) -> None:
    """Split, merge, re-split and convert checkpoints of large language models between the formats of engines and
    trainers, and prove the result.

    A checkpoint is a folder, a Hub id such as org/name or a URL such as s3://bucket/folder, in any format that 'reshard
    formats' lists. 'reshard COMMAND --help' has three examples of each command. 'reshard demo FOLDER' makes the model
    that they work on.
    """
    if ctx.invoked_subcommand is None:
        click.echo(ctx.get_help())


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line and exit with its code."""
    gc.set_threshold(100_000, 50, 100)  # the headers of a large checkpoint are a million objects, and none is garbage
    raise SystemExit(run_to_exit_code(cli, sys.argv[1:] if arguments is None else arguments))
