"""How a command ends: its exit code, and the ``Error:`` and ``Hint:`` lines on stderr.

0: done. 1: the answer is no. 2: the request cannot be carried out. 130: interrupted. 141: whoever read the output has
closed it.
"""

from __future__ import annotations

import contextlib
import io
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TextIO

import click

from formats.errors import MismatchError, ReshardError, one_line, printable
from formats.hints import meaning, nearest, synonym, with_hint

DONE, NO, FAILED, INTERRUPTED, CLOSED_PIPE = 0, 1, 2, 130, 141


@dataclass
class _Settings:
    """What holds for one run of the command line, kept in click's context."""

    tracebacks: bool = False


def show_tracebacks(context: click.Context, _: click.Parameter, value: bool) -> None:
    """The callback of ``--debug``, which any command takes."""
    if value:
        context.ensure_object(_Settings).tracebacks = True


def tracebacks_are_wanted() -> bool:
    """Whether the command that is running was given ``--debug``."""
    return click.get_current_context().ensure_object(_Settings).tracebacks


class StoppedError(Exception):
    """Ctrl-C in a command that says what is kept of its work; click would drop the text of KeyboardInterrupt."""


@contextlib.contextmanager
def resumable() -> Iterator[None]:
    """In this block, Ctrl-C ends the command with the text of the KeyboardInterrupt."""
    try:
        yield
    except KeyboardInterrupt as stop:
        raise StoppedError(*stop.args) from None


class UnprintableError(ReshardError):
    """The result cannot be written to stdout, which is a file on a full disk, say."""

    def __init__(self, error: OSError) -> None:
        super().__init__(f"the result cannot be printed: {error.strerror or error}")


def print_result(content: str | bytes) -> None:
    """Write to stdout now. Raises UnprintableError, after which stdout leads nowhere; BrokenPipeError."""
    try:
        click.echo(content)
        sys.stdout.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        _drop(sys.stdout)
        raise UnprintableError(error) from None


@contextlib.contextmanager
def work_is_done() -> Iterator[None]:
    """In this block the work is done: that its summary cannot be printed (a full disk) is said, and is no failure."""
    try:
        yield
    except UnprintableError as error:
        say(f"Warning: this has been done, but {error.message}")


def say(text: str) -> None:
    """One line on stderr. It is not part of the result: that it cannot be printed ends nothing."""
    with _to_stderr():
        click.echo(one_line(text), err=True)


@contextlib.contextmanager
def _to_stderr() -> Iterator[None]:
    try:
        yield
    except OSError:
        _drop(sys.stderr)


def run_to_exit_code(group: click.Group, arguments: Sequence[str]) -> int:
    """Run the command that the arguments name, print what goes wrong, and return the exit code."""
    settings = _Settings()
    if isinstance(sys.stdout, io.TextIOWrapper):
        # names of files need not be UTF-8, and are shown as \udcff, which in JSON is the very name
        sys.stdout.reconfigure(errors="backslashreplace")
    code = _run(group, arguments, settings)
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        return _closed_pipe()
    except OSError as error:
        _drop(sys.stdout)
        return _fail(UnprintableError(error).message) if code == DONE else code
    return code


def _run(group: click.Group, arguments: Sequence[str], settings: _Settings) -> int:
    try:
        code = group.main(list(arguments), prog_name="reshard", standalone_mode=False, obj=settings)
        return code if isinstance(code, int) else DONE
    except click.NoSuchOption as error:
        return _no_such_option(error, group, arguments)
    except click.UsageError as error:
        return _fail(error.format_message(), f"see '{error.ctx.command_path if error.ctx else 'reshard'} --help'")
    except click.ClickException as error:
        return _fail(error.format_message())
    except ReshardError as error:
        code = NO if isinstance(error, MismatchError) else FAILED
        return _fail(error.message, error.hint, code=code, traceback=settings.tracebacks)
    except (StoppedError, KeyboardInterrupt, click.Abort) as stop:
        has_words = isinstance(stop, StoppedError) and stop.args
        say(f"reshard: interrupted: {stop}" if has_words else "reshard: interrupted")
        return INTERRUPTED
    except BrokenPipeError:
        return _closed_pipe()
    except SystemExit as stop:
        # Outside of shell completion click exits by itself for a closed pipe alone, with a code that means "no".
        if stop.code and "_RESHARD_COMPLETE" not in os.environ:
            return _closed_pipe()
        raise
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        return _fail(f"{where}{error.strerror or error}", traceback=settings.tracebacks)
    except MemoryError:
        return _fail("there is not enough memory", traceback=settings.tracebacks)
    except Exception as error:
        hint = None if settings.tracebacks else "run the same command with --debug and report what it shows"
        return _fail(f"internal error: {type(error).__name__}: {error}", hint, traceback=settings.tracebacks)


def _no_such_option(error: click.NoSuchOption, group: click.Group, arguments: Sequence[str]) -> int:
    """Say which option was meant: by one with a single dash, too (``-tp 2``), of which click knows the first letter."""
    assert error.ctx is not None
    names = [name for param in error.ctx.command.params for name in param.opts if name.startswith("-")]
    word = next((word.partition("=")[0] for word in arguments if word.startswith(error.option_name)), error.option_name)
    option = f"--{synonym(word).lstrip('-')}"
    commands = [group.get_command(error.ctx, name) for name in group.list_commands(error.ctx)]
    owners = [str(other.name) for other in commands if other and any(option in param.opts for param in other.params)]
    elsewhere = f"{option} is an option of {', '.join(owners)}" if owners else ""
    hint = meaning(word, names) or elsewhere or nearest(word, names)
    return _fail(f"No such option '{word}'", with_hint(hint, f"see '{error.ctx.command_path} --help'"))


def _fail(message: str, hint: str | None = None, *, code: int = FAILED, traceback: bool = False) -> int:
    if traceback and (error := sys.exception()) is not None:
        print_traceback(error)
    print_error(message, hint)
    return code


def print_error(message: str, hint: str | None = None) -> None:
    """One ``Error:`` line and at most one ``Hint:`` line, on stderr."""
    may_show = sys.stderr.isatty() and os.environ.get("TERM", "dumb") != "dumb"
    colour = bool(os.environ.get("FORCE_COLOR")) or (may_show and not os.environ.get("NO_COLOR"))
    label = click.style("Error:", fg="red", bold=True) if colour else "Error:"
    with _to_stderr():
        click.echo(f"{label} {one_line(message)}", err=True, color=colour)
    if hint:
        say(f"Hint: {hint}")


def print_traceback(error: BaseException) -> None:
    """The traceback of an exception, on stderr."""
    import traceback

    with _to_stderr():
        click.echo(printable("".join(traceback.format_exception(error))), err=True, nl=False)


def _closed_pipe() -> int:
    """Whoever read our output has gone (``| head``): end silently, as a program killed by SIGPIPE does."""
    _drop(sys.stdout)
    return CLOSED_PIPE


def _drop(stream: TextIO) -> None:
    """Let what could not be written lead nowhere, or Python would try again at its end."""
    with contextlib.suppress(OSError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
