"""``--help``: what it shows in which order, and that each of its examples works."""

from __future__ import annotations

import shlex
import shutil
from collections import defaultdict
from pathlib import Path

import click
import pytest

from reshard.cli.commands import COMMANDS, cli
from reshard.cli.options import Command, Group, Option
from reshard.tiny_model import write_model
from tests.marks import thorough
from tests.support import command, ok

ELSEWHERE = ("meta-llama/", "s3://")
"""What an example names that is not on this machine."""
SHORTER = {"profile": ["--seconds", "0.01"]}
"""What spares time and changes nothing else."""


def command_named(name: str) -> Command:
    found = cli.get_command(click.Context(cli), name)
    assert isinstance(found, Command)
    return found


def help_of(name: str, width: int) -> str:
    found = command_named(name)
    context = click.Context(found, info_name=f"reshard {name}", terminal_width=width)
    context.help_option_names = ["-h", "--help"]
    return found.get_help(context)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("help") / "model")


def parse(name: str, arguments: list[str]) -> None:
    """Read a command line as ``reshard`` does: a command keeps the names of its ``--help`` from the first time."""
    with command_named(name).make_context(name, arguments, click.Context(cli, **cli.context_settings)):
        pass


def run_examples(name: str, folder: Path) -> None:
    """Runs the examples of a command in a folder; those that need what is elsewhere are read as a command line is."""
    for line in command_named(name).examples:
        program, word, *arguments = shlex.split(line)
        assert (program, word) == ("reshard", name)
        if any(argument.startswith(ELSEWHERE) for argument in arguments):
            parse(name, arguments)
            continue
        ok(word, *arguments, *SHORTER.get(name, ()), cwd=folder)


OF_RANKS = {"profile", "verify"}


@pytest.mark.parametrize("name", [pytest.param(name, marks=thorough if name in OF_RANKS else ()) for name in COMMANDS])
def test_examples_work(name: str, model: Path, tmp_path: Path) -> None:
    """In the order of ``reshard --help``: what inspect, verify and merge read, split has written."""
    folder = shutil.copytree(model, tmp_path / "model").parent
    if [*COMMANDS].index(name) > [*COMMANDS].index("split"):
        run_examples("split", folder)
    if name == "patch":
        run_examples("diff", folder)
    run_examples(name, folder)


@pytest.mark.parametrize("name", sorted(OF_RANKS))
def test_examples_of_ranks_are_command_lines(name: str, monkeypatch: pytest.MonkeyPatch, model: Path) -> None:
    """They are parsed here, and run by ``test_examples_work`` in ``make test-all``."""
    monkeypatch.chdir(model.parent)
    for line in command_named(name).examples:
        program, word, *arguments = shlex.split(line)
        assert (program, word) == ("reshard", name)
        parse(name, arguments)


def test_examples_write_nothing_that_the_demo_has_made(tmp_path: Path) -> None:
    """They work in the folder that ``reshard demo FOLDER`` has left."""
    assert command("demo", tmp_path / "demo").returncode == 0
    run_examples("split", tmp_path / "demo")
    run_examples("merge", tmp_path / "demo")


@pytest.mark.parametrize("name", COMMANDS)
def test_what_is_shown_and_in_which_order(name: str) -> None:
    found, text = command_named(name), help_of(name, 80)
    assert len(found.examples) == 3 and found.help is not None
    lines = text.splitlines()
    assert max(map(len, lines)) <= 80
    assert lines[0].startswith(f"Usage: reshard {name} ") and lines[2].startswith("  ")
    heads = [line.removesuffix(":") for line in lines if line.endswith(":") and not line.startswith(" ")]
    groups = {param.group for param in found.params if isinstance(param, Option)} | {Group.OUTPUT}
    assert heads == ["Examples", *(group.value for group in Group if group in groups)]
    shown = text.partition("Examples:\n")[2].splitlines()[:6]
    assert shown == [f"  {part}" for line, what in found.examples.items() for part in (f"# {what}", line)]


@pytest.mark.parametrize("name", COMMANDS)
def test_an_option_is_one_line(name: str) -> None:
    found = command_named(name)
    options = [param for param in found.params if isinstance(param, click.Option)]
    assert all(isinstance(param, Option) for param in options), "an option without a group"
    for param in options:
        assert param.help and param.help.endswith("."), param.opts
    lines = help_of(name, 80).splitlines()
    first = min(lines.index(f"{group.value}:") for group in Group if f"{group.value}:" in lines)
    rows = [line for line in lines[first:] if line.startswith("  ")]
    assert len(rows) == len(options) + 1, "one goes on in a second line"  # --help is click's own
    assert all(line.startswith("  -") for line in rows)


def test_an_option_is_in_the_same_group_everywhere() -> None:
    groups = defaultdict[str, set[Group]](set)
    for name in COMMANDS:
        for param in command_named(name).params:
            if isinstance(param, Option):
                groups[max(param.opts, key=len)].add(param.group)
    assert {name for name, found in groups.items() if len(found) > 1} == set()


def test_what_the_tool_is() -> None:
    text = " ".join(command("--help").stdout.split())
    assert "Split, merge, re-split and convert checkpoints" in text and "prove the result" in text
    lines = command("--help").stdout.partition("Commands")[2].splitlines()[1:]
    assert [line.split()[0] for line in lines] == [*COMMANDS]
