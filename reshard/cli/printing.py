"""Output of commands, and their exit codes.

A result goes to stdout, as text or as one JSON document; notes, how far a long command is (a bar on a terminal,
elsewhere a plain line every minute), and the ``Error:`` and ``Hint:`` lines go to stderr.

Exit codes: 0: done. 1: the answer is no (a command that answers returns whether it is yes). 2: the request cannot be
carried out. 130: interrupted. 141: whoever read the output has closed it.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import shlex
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

import click

from reshard.formats.errors import MismatchError, ReshardError, one_line, printable, redacted
from reshard.text import human_bytes, human_seconds, plural

DONE, NO, FAILED, INTERRUPTED, CLOSED_PIPE = 0, 1, 2, 130, 141
SCHEMA_VERSION = 1


# ------------------------------------------------------------------------------------------------------------ results


class UnprintableError(ReshardError):
    """The result cannot be written to stdout, which is a file on a full disk, say."""

    def __init__(self, error: OSError) -> None:
        super().__init__(f"the result cannot be printed: {error.strerror or error}")


def print_lines(*lines: str) -> None:
    """Print lines of the result. Characters of a name that a terminal would obey are escaped."""
    _print("\n".join(printable(line) for text in lines for line in text.split("\n")))


def print_path(path: os.PathLike[str] | str) -> None:
    """Print a path byte for byte, whatever its encoding; a URL without its secrets."""
    _print(os.fsencode(redacted(path) if isinstance(path, str) else path))


def print_json(document: Mapping[str, Any]) -> None:
    """Print the one document of ``--json``: its ``schema_version`` and the ``command`` stand first."""
    first = {"schema_version": SCHEMA_VERSION, "command": click.get_current_context().info_name}
    _print(json.dumps(_plain({**first, **document}), indent=2, ensure_ascii=False, allow_nan=False))


def print_answer(as_json: bool, document: Mapping[str, Any], *lines: str) -> None:
    """Print the document of ``--json``, or the same as text."""
    print_json(document) if as_json else print_lines(*lines)


def _plain(value: Any) -> Any:
    """The same document in JSON's types, its texts without secrets."""
    if isinstance(value, str | Path):
        return redacted(str(value))
    if hasattr(value, "to_document"):  # a mesh
        return value.to_document()
    if isinstance(value, Mapping):
        return {_plain(key): _plain(item) for key, item in value.items()}
    return [*map(_plain, value)] if isinstance(value, list | tuple) else value


def _print(content: str | bytes) -> None:
    """Write to stdout now. Raises UnprintableError, after which stdout leads nowhere; BrokenPipeError."""
    try:
        click.echo(content)
        sys.stdout.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        _drop(sys.stdout)
        raise UnprintableError(error) from None


def fields_of(result: Any, **keys: str) -> dict[str, Any]:
    """The fields of a dataclass for a document, by their names or by these keys; those with an empty one are left out.

    ``padding`` has the ``size`` and the ``padded`` size of each axis.
    """
    named = {keys.get(name, name): value for name, value in vars(result).items()}
    named.pop("", None)
    if "padding" in named:
        named["padding"] = {axis: {"size": size, "padded": to} for axis, (size, to) in named["padding"].items()}
    return named


def pair_lines(*pairs: tuple[str, str]) -> list[str]:
    """``label  text`` lines, indented by two."""
    return [f"  {label:<11} {text}" for label, text in pairs]


def terminal_width() -> int | None:
    """Columns of the terminal that stdout is; None if it is not one."""
    return (os.get_terminal_size(sys.stdout.fileno()).columns or None) if sys.stdout.isatty() else None


def command_line() -> str:
    """The running command as one types it, without secrets."""
    words = click.get_current_context().ensure_object(dict).get("arguments", ())
    hidden = ["..." if before == "--token" else word for before, word in zip(("", *words), words, strict=False)]
    shown = ("--token=..." if word.startswith("--token=") else redacted(word) for word in hidden)
    return shlex.join(["reshard", *shown])


def write_report(file: Path, text: str) -> None:
    """Write a page, whole or not at all; another page is replaced. Raises CheckpointError."""
    from reshard.publishing.existing import check_file
    from reshard.system import disk_errors

    check_file(file, is_page=True)
    part = file.with_name(f".{file.name}.{os.getpid()}.part")
    with disk_errors(file):
        try:
            part.write_text(text, encoding="utf-8")
            part.replace(file)
        finally:
            part.unlink(missing_ok=True)


# -------------------------------------------------------------------------------------------------------------- notes


def print_note(text: str) -> None:
    """One line on stderr. It is not part of the result: that it cannot be printed ends nothing."""
    _print_aside(one_line(text) + "\n")


def print_error(message: str, hint: str | None = None) -> None:
    """One ``Error:`` line and at most one ``Hint:`` line, on stderr."""
    colour = bool(os.environ.get("FORCE_COLOR")) or (_is_terminal() and not os.environ.get("NO_COLOR"))
    label = click.style("Error:", fg="red", bold=True) if colour else "Error:"
    _print_aside(f"{label} {one_line(message)}\n", colour=colour)
    if hint:
        print_note(f"Hint: {hint}")


def print_traceback(error: BaseException) -> None:
    """The traceback of an exception, on stderr."""
    import traceback

    _print_aside(printable("".join(traceback.format_exception(error))))


def _print_aside(text: str, colour: bool | None = None) -> None:
    try:
        click.echo(text, err=True, nl=False, color=colour)
    except OSError:
        _drop(sys.stderr)


def _drop(stream: TextIO) -> None:
    """Send unwritten output nowhere; else Python would try again when it ends."""
    with contextlib.suppress(OSError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def _is_terminal() -> bool:
    """Whether stderr is a terminal that has colours and can redraw a line."""
    return sys.stderr.isatty() and os.environ.get("TERM", "dumb") != "dumb"


def bars_are_wanted() -> bool:
    """Whether stderr is a terminal that can redraw a line, and the environment does not switch bars off."""
    return (
        os.environ.get("HF_HUB_DISABLE_PROGRESS_BARS", "").upper() not in {"1", "ON", "YES", "TRUE"} and _is_terminal()
    )


INTERVAL = 60.0
"""Seconds between two plain lines."""


@contextlib.contextmanager
def progress_of(title: str, *, how: str) -> Iterator[Callable[..., None]]:
    """Show progress; yields a function for any thread: it takes the bytes done, the total, and the number of repeated
    requests.

    ``how`` is ``bar``, ``log`` (plain lines), ``none``, or ``auto``: a bar where stderr is a terminal, else lines.
    """
    lock, bar, began, last = threading.Lock(), None, None, 0.0
    has_bar = how == "bar" or (how == "auto" and bars_are_wanted())

    def draw(moved: int, total: int, again: int) -> None:
        nonlocal bar
        if bar is None:
            from tqdm import tqdm

            tqdm.monitor_interval = 0  # it would start a thread, for nothing
            form: Any = {"unit": "B", "unit_scale": True, "dynamic_ncols": True, "leave": False}
            bar = tqdm(desc=title, total=total, initial=moved, file=sys.stderr, **form)
        if again:
            bar.set_postfix_str(f"tried again: {again:,}", refresh=False)
        bar.total = total
        bar.update(max(0, moved - bar.n))

    def show(moved: int, total: int, again: int = 0) -> None:
        nonlocal began, last
        with lock:
            now = time.monotonic()
            if began is None:
                began, last = (now, moved), now
            if has_bar:
                with contextlib.suppress(OSError):  # a terminal that has gone ends no work
                    draw(moved, total, again)
            elif now - last >= INTERVAL:
                last = now
                rate = (moved - began[1]) / max(now - began[0], 1e-9)
                text = f"{title}: {human_bytes(moved)} of {human_bytes(total)} "
                text += f"({moved / total if total else 1.0:.0%}), {human_bytes(rate)}/s"
                text += f", {human_seconds((total - moved) / rate)} left" if rate > 0 else ""
                print_note(text + (f"; {plural(again, 'request')} tried again" if again else ""))

    try:
        yield (lambda *_: None) if how == "none" else show
    finally:
        if bar is not None:
            bar.close()


# ------------------------------------------------------------------------------------------------- how a command ends


def show_tracebacks(context: click.Context, _: click.Parameter, value: bool) -> None:
    """The callback of ``--debug``, which any command takes: click's context has a dict for one run."""
    if value:
        context.ensure_object(dict)["tracebacks"] = True


def tracebacks_are_wanted() -> bool:
    """Whether the running command was given ``--debug``."""
    return bool(click.get_current_context().ensure_object(dict).get("tracebacks"))


def run_to_exit_code(group: click.Group, arguments: Sequence[str]) -> int:
    """Run the command that the arguments name, print what goes wrong, and return the exit code."""
    run = dict[str, Any](arguments=[*arguments])
    if isinstance(sys.stdout, io.TextIOWrapper):
        # names of files need not be UTF-8, and are shown as \udcff, which in JSON is the very name
        sys.stdout.reconfigure(errors="backslashreplace")
    code = _run(group, arguments, run)
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        return _closed_pipe()
    except OSError as error:
        _drop(sys.stdout)
        return _fail(UnprintableError(error).message) if code == DONE else code
    return code


def _run(group: click.Group, arguments: Sequence[str], run: dict[str, Any]) -> int:
    if os.environ.get("_RESHARD_COMPLETE"):  # a shell asks what a word may become
        group.main(prog_name="reshard")
    ReshardError.names_options = True
    try:
        # not by main: click would drop the words of a KeyboardInterrupt, and exit by itself for a closed pipe
        with group.make_context("reshard", [*arguments], obj=run) as context:
            code = group.invoke(context)
        if isinstance(code, bool):
            return DONE if code else NO
        return code if isinstance(code, int) else DONE
    except click.exceptions.Exit as end:  # of --help and --version
        return end.exit_code
    except click.NoSuchOption as error:
        return _no_such_option(error, group, arguments)
    except click.UsageError as error:
        return _fail(error.format_message(), _help_of(group, arguments))
    except click.ClickException as error:
        return _fail(error.format_message(), _help_of(group, arguments))
    except ReshardError as error:
        code = NO if isinstance(error, MismatchError) else FAILED
        is_refusal = code == FAILED and not isinstance(error, UnprintableError)
        hint = error.hint or (_help_of(group, arguments) if is_refusal else None)
        return _fail(error.message, hint, code=code, traceback="tracebacks" in run)
    except KeyboardInterrupt as stop:  # it says what is kept
        print_note(f"reshard: interrupted: {stop}" if stop.args else "reshard: interrupted")
        return getattr(stop, "code", INTERRUPTED)
    except BrokenPipeError:
        return _closed_pipe()
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        return _fail(f"{where}{error.strerror or error}", traceback="tracebacks" in run)
    except MemoryError:
        return _fail("there is not enough memory", traceback="tracebacks" in run)
    except Exception as error:
        hint = None if "tracebacks" in run else "run the same command with --debug and report what it shows"
        return _fail(f"internal error: {type(error).__name__}: {error}", hint, traceback="tracebacks" in run)
    finally:
        ReshardError.names_options = False


def _help_of(group: click.Group, arguments: Sequence[str]) -> str:
    """Return the hint with the ``--help`` of the command whose line is refused."""
    name = next((word for word in arguments if word in group.list_commands(click.Context(group))), None)
    return f"see 'reshard {f'{name} ' if name else ''}--help'"


def _no_such_option(error: click.NoSuchOption, group: click.Group, arguments: Sequence[str]) -> int:
    """Say which option was meant: by one with a single dash, too (``-tp 2``), of which click knows the first letter."""
    from reshard.formats.hints import meaning, nearest, synonym, with_hint  # for an error alone

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


def _closed_pipe() -> int:
    """Whoever read our output has gone (``| head``): end silently, as a program killed by SIGPIPE does."""
    _drop(sys.stdout)
    return CLOSED_PIPE
