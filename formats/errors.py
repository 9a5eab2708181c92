"""Errors that end a command with one line and perhaps a hint, and refusals that name the setting at fault."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any, ClassVar

from reshard.formats.hints import in_python

LONGEST_WORD = 300
"""The most characters of a message without a space between them, as in a name or a path. The middle of longer ones is
left out.
"""
LONGEST_LINE = 900
"""Characters of a message."""


class ReshardError(Exception):
    """A request that cannot be carried out, in words for the person who made it.

    ``message`` is one line: what is wrong, in which file, tensor or axis, what was expected and what was found.
    ``hint`` is one line: what to do about it; a traceback shows it too. Both are made printable and short, whatever
    they quote. Where they are written, they name options and commands; a Python caller reads arguments and functions.
    """

    names_options: ClassVar[bool] = False
    """Whether errors name options (``--tp``): true in the process of the command line, false in Python."""

    def __init__(self, message: str, hint: str | None = None) -> None:
        words: Callable[[str], str] = str if self.names_options else in_python
        self.message = one_line(words(message))
        self.hint = None if hint is None else one_line(words(hint))
        super().__init__(self.message)
        if self.hint:
            self.add_note(f"Hint: {self.hint}")


class NotationError(ReshardError):
    """An expression of the notation, or of the sizes, that cannot be read or evaluated."""


class CheckpointError(ReshardError):
    """Files on disk that are not the checkpoint they claim to be."""


class IncompleteError(CheckpointError):
    """Files of a checkpoint, such as those of a rank, are not there."""


class PlanError(ReshardError):
    """A plan that does not fit the checkpoint, or a degree that the model's axes do not allow."""


class MismatchError(ReshardError):
    """Things that should be equal are not: a checksum, replicas, shards of different runs."""


class LiveError(ReshardError):
    """A push between running processes that could not be carried out: the message names the rank and the cause."""


def one_line(text: str) -> str:
    """The same text on one line of at most ``LONGEST_LINE`` characters, all of them printable: others are escaped."""
    text = printable(" ".join(text.split()))
    if len(text) <= LONGEST_WORD:
        return text
    return _shortened(_LONG_WORD.sub(lambda word: _shortened(word[0], LONGEST_WORD), text), LONGEST_LINE)


def printable(text: str) -> str:
    """Return the text without secrets of URLs, and with escapes for characters that a terminal would obey or cannot
    show.

    Line ends are kept.
    """
    text = redacted(text)
    return text if text.isprintable() else "".join(c if c.isprintable() or c == "\n" else ascii(c)[1:-1] for c in text)


def redacted(text: str) -> str:
    """The text with each URL in it without user, password and query, which may hold secrets.

    A password may have an @, a / or a ? that should have been escaped: it ends at the last @. Where this is also the @
    of a query, nothing of the URL is kept. A host of the web with a port is no user with a password. A path that was
    made of a URL has one slash.
    """
    return _URL.sub(_without_secrets, text) if ":/" in text else text


def _without_secrets(url: re.Match[str]) -> str:
    place, _, query = url["rest"].partition("?")
    is_host = url["scheme"].startswith("http") and _HOST_AND_PORT.match(place)
    first = place.partition("/")[0]
    if not is_host and ":" in first:
        if "@" in query:
            return url["scheme"] + "…"
        place = place.rpartition("@")[2]
    elif "@" in first:
        place = place[first.rindex("@") + 1 :]
    return url["scheme"] + place


_URL = re.compile(r"(?P<scheme>[A-Za-z][\w+.-]*:/+)(?P<rest>\S+)")
_HOST_AND_PORT = re.compile(r"[^/:@]*:\d{1,5}(/|$)")


def brief(value: object) -> str:
    """A value from a file, as JSON and short enough for a message of one line."""
    try:
        text = value if isinstance(value, str) else json.dumps(value, default=str)
    except (RecursionError, ValueError):  # nested too deeply, a number of too many digits
        text = f"a {type(value).__name__} that is too large to show"
    text = text if len(text) <= 60 else text[:57] + "..."
    return repr(text) if isinstance(value, str) else text


def listed(things: Sequence[object], most: int = 20) -> str:
    """``0, 1, 2``; of more than ``most`` things the first ones, and how many there are."""
    first = ", ".join(one_line(str(thing)) for thing in things[:most])
    return first if len(things) <= most else f"{first}, … ({len(things):,} in all)"


_LONG_WORD = re.compile(rf"\S{{{LONGEST_WORD + 1},}}")


def _shortened(text: str, length: int) -> str:
    """Shorten a text to at most ``length`` characters: its beginning, and an end half as long."""
    tail = length // 3
    return text if len(text) <= length else f"{text[: length - tail - 1]}…{text[-tail:]}"


def setting_text(name: str, value: object) -> str:
    """A field of a request and its value, as a Python caller gives them."""
    return name if value is None else f"{name}={value}"


@dataclass(frozen=True)
class Refusal:
    """A field of a request that is not possible, as data."""

    name: str
    value: object
    """The value that is not possible; None if no value is."""
    why: str
    """The reason, as the end of a sentence."""
    beside: Mapping[str, object] = field(default_factory=dict)
    """The fields with which it is not possible."""
    format: str | None = None
    """The format with which it is not possible."""
    axes: tuple[str, ...] = ()
    """The axes that stand in the way."""
    tensor: str | None = None
    """The first tensor that stands in the way."""
    valid: tuple[int, ...] = ()
    """The values that are possible."""
    instead: tuple[Mapping[str, object], ...] = ()
    """Other fields with values that are possible: each mapping has those that belong together."""
    advice: str | None = None
    """Further advice."""

    def message(self, call: Callable[[str, object], str] = setting_text) -> str:
        """Return the sentence that names the refused setting and the reason. ``call`` writes a field with its value."""
        settings = " ".join(call(*setting) for setting in self.beside.items()) or (
            self.format and f"the format '{self.format}'"
        )
        return f"{call(self.name, self.value)} is not possible{f' with {settings}' if settings else ''}: {self.why}"

    def hint(self, call: Callable[[str, object], str] = setting_text) -> str | None:
        """Return the valid degrees, the settings to give instead, and the advice; None if there are none."""
        ways = ", or ".join(" ".join(call(*setting) for setting in settings.items()) for settings in self.instead)
        if self.valid:
            ways = f"valid degrees: {', '.join(map(str, self.valid))}{', or ' if ways else ''}{ways}"
        elif ways:
            ways = f"give {ways}"
        return "; ".join(filter(None, (ways, self.advice))) or None


class SettingError(PlanError):
    """A field of a request that is not possible; ``refusal`` says why."""

    def __init__(self, refusal: Refusal) -> None:
        super().__init__(refusal.message(), refusal.hint())
        self.refusal = refusal

    def __reduce__(self) -> tuple[type[SettingError], tuple[Refusal]]:
        return SettingError, (self.refusal,)


def refused(name: str, value: object, why: str, **fields: Any) -> SettingError:
    """The error of a ``Refusal``."""
    return SettingError(Refusal(name, value, why, **fields))


def require(what: str, *packages: str) -> None:
    """Raise PlanError unless the packages that ``what`` needs are installed."""
    missing = [name for name in packages if find_spec(name) is None]
    if missing:
        raise PlanError(f"{what} needs {' and '.join(missing)}", f"pip install {' '.join(missing)}")


def require_transformers(what: str, *packages: str) -> None:
    """Raise PlanError if a package is missing that runs or builds transformers' models, which ``what`` needs.

    ``packages`` are further packages that are needed with it.
    """
    require(what, "transformers", "accelerate", *packages)
