"""Names with wildcards: ``**`` is any text, ``*`` text without a dot, ``{expert}`` an index."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import count

_WILDCARD = re.compile(r"(^\*\*\.|\*\*|\*|\{\w+\})")
_REGEX = {"**.": r"(?:.*\.)?", "**": ".*", "*": "[^.]*"}
_INDEX = r"\{\w+\}|[0-9]+"
_NUMBER = re.compile(r"\\\{(\w+)(?::\w+)?\\\}")
"""A number's place in a pattern, as ``re.escape`` writes it: ``{rank}`` or ``{rank:02d}``."""


@dataclass(frozen=True)
class Pattern:
    """A name with wildcards."""

    text: str

    @cached_property
    def _parts(self) -> list[str]:
        """Text and wildcards in turn."""
        return _WILDCARD.split(self.text)

    @cached_property
    def _names(self) -> list[str]:
        """The names of the wildcards: of an index its own, of stars ``_0``, ``_1``, …"""
        stars = count()
        return [word[1:-1] if word.startswith("{") else f"_{next(stars)}" for word in self._parts[1::2]]

    @cached_property
    def _regex(self) -> re.Pattern[str]:
        parts = [re.escape(part) for part in self._parts]
        for i, name in enumerate(self._names):
            regex = f"(?P<{name}>{_REGEX.get(self._parts[2 * i + 1], _INDEX)})"
            parts[2 * i + 1] = f"(?P={name})" if name in self._names[:i] else regex
        return re.compile("".join(parts))

    def match(self, name: str) -> Mapping[str, str] | None:
        """What the wildcards stand for in a name, or None."""
        found = self._regex.fullmatch(name)
        return found.groupdict() if found else None

    def fill(self, found: Mapping[str, str]) -> str:
        """The name in which the wildcards stand for this."""
        parts = [*self._parts]
        parts[1::2] = [found[name] for name in self._names]
        return "".join(parts)

    @cached_property
    def indices(self) -> frozenset[str]:
        """The names of its indices."""
        return frozenset(name for name in self._names if not name.startswith("_"))

    @cached_property
    def stars(self) -> int:
        """The number of ``*`` and ``**``."""
        return sum(name.startswith("_") for name in self._names)


def numbered_names(pattern: str, names: Iterable[str]) -> list[tuple[str, dict[str, int]]]:
    """The names like ``pattern``, a format of Python's such as ``model_{rank:02d}.pt``, with the numbers in them."""
    regex = re.compile(_NUMBER.sub(r"(?P<\1>[0-9]+)", re.escape(pattern)))
    matches = ((name, regex.fullmatch(name)) for name in names)
    return [(name, {word: int(n) for word, n in match.groupdict().items()}) for name, match in matches if match]
