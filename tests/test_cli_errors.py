"""How a command ends: exit codes and the lines on stderr, for every command in the same way."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from reshard.cli.commands import COMMANDS, cli
from reshard.cli.printing import CLOSED_PIPE, FAILED, INTERRUPTED, NO, run_to_exit_code
from reshard.formats.errors import MismatchError, PlanError

FAILING = [
    ("split", "./none", "out", "--tp", "2"),
    ("merge", "./none", "out"),
    ("plan", "./none"),
    ("inspect", "./none.safetensors"),
    ("models", "none-such"),
    ("verify", "./none", "out", "--exact-only"),
]


@pytest.mark.parametrize("command", FAILING, ids=lambda command: command[0])
def test_an_error_is_one_line_and_with_debug_its_traceback(command, capsys, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert run_to_exit_code(cli, command) == FAILED
    plain = capsys.readouterr().err
    assert plain.count("Error: ") == 1 and "Traceback" not in plain
    for arguments in ((*command, "--debug"), ("--debug", *command)):
        assert run_to_exit_code(cli, arguments) == FAILED
        told = capsys.readouterr().err
        assert "Traceback" in told and told.endswith(plain)
    assert run_to_exit_code(cli, command) == FAILED
    assert capsys.readouterr().err == plain, "--debug is not remembered"


@pytest.mark.parametrize("name", [name for name in COMMANDS if name != "models"])
def test_a_wrong_option_leads_to_the_help_of_the_command(name: str, capsys) -> None:
    assert run_to_exit_code(cli, [name, "--bogus"]) == FAILED
    error, hint = capsys.readouterr().err.splitlines()
    assert error == "Error: No such option '--bogus'"
    assert hint == f"Hint: see 'reshard {name} --help'"


@pytest.mark.parametrize(
    ("raised", "code", "last"),
    [
        (MismatchError("they differ"), NO, "Error: they differ"),
        (PlanError("no", "do this"), FAILED, "Hint: do this"),
        (KeyboardInterrupt(), INTERRUPTED, "reshard: interrupted"),
        (KeyboardInterrupt("1 of 2 files is kept"), INTERRUPTED, "reshard: interrupted: 1 of 2 files is kept"),
        (OSError(28, "No space left on device", "there"), FAILED, "Error: there: No space left on device"),
        (MemoryError(), FAILED, "Error: there is not enough memory"),
        (BrokenPipeError(), CLOSED_PIPE, None),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_a_command_raises_decides_how_it_ends(raised, code, last, capfd, monkeypatch) -> None:
    def fail(*_: object) -> None:
        raise raised

    monkeypatch.setattr("reshard.cli.models.built_in_architectures", fail)
    monkeypatch.setattr(
        "reshard.cli.printing._closed_pipe", lambda: CLOSED_PIPE
    )  # it would close the tests' own stdout
    assert run_to_exit_code(cli, ["models"]) == code
    assert capfd.readouterr().err.splitlines()[-1:] == ([last] if last else [])


def texts(tree: ast.AST) -> Iterator[str]:
    """The texts of a module that somebody may be shown: no docstrings but those of commands, which are their help."""
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    yield from (ast.get_docstring(each) or "" for each in functions if each.name.endswith("_command"))
    docstrings = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    constants = (node for node in ast.walk(tree) if isinstance(node, ast.Constant) and id(node) not in docstrings)
    yield from (node.value for node in constants if isinstance(node.value, str))


def test_no_message_names_what_an_installation_lacks() -> None:
    """The pages of docs/ are not in the wheel, and no index has a package of our name."""
    root = Path(__file__).parents[1]
    files = [file for package in ("formats", "reshard", "verify") for file in (root / package).rglob("*.py")]
    contents = {file: file.read_text() for file in files}
    every = {
        file: [*texts(ast.parse(text))] for file, text in contents.items() if re.search("docs/|install|Hub id", text)
    }
    assert len(files) > 150 and any("Hub id" in text for found in every.values() for text in found)
    assert [
        (file.name, text)
        for file, found in every.items()
        for text in found
        if "docs/" in text or "install 'reshard" in text or "install reshard" in text
    ] == []
