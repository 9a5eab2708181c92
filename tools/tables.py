"""The text of a generated table: outer levels are indented, and each rule has a line of its own.

A table begins with the versions of the programs that it was made with, so a reader knows what it holds for.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any

MADE_WITH = "made_with"


def text_of(document: Mapping[str, Any], made_with: Mapping[str, str], levels: Mapping[str, int] | None = None) -> str:
    """A table as text.

    ``made_with`` has a version for each program. ``levels`` says how many levels of an entry are indented (1 if it does
    not say). What lies deeper is one line, as is a list of plain values below the first level.
    """
    entries = {MADE_WITH: made_with, **dict(sorted(document.items()))}
    lines = (
        f" {json.dumps(name)}: " + "\n".join(_lines(value, (levels or {}).get(name, 1), " "))
        for name, value in entries.items()
    )
    return "{\n" + ",\n".join(lines) + "\n}\n"


def by_reason(reasons: Mapping[str, str]) -> list[dict[str, Any]]:
    """Group the refused model types by the reason that users see."""
    names: dict[str, list[str]] = defaultdict(list)
    for name, why in sorted(reasons.items()):
        names[why].append(name)
    return [{"why": why, "types": types} for why, types in sorted(names.items())]


def _lines(value: Any, levels: int, indent: str, *, is_first: bool = True) -> Iterator[str]:
    """The lines of a value, of which the first is not indented."""
    is_plain = isinstance(value, list) and not any(isinstance(each, (dict, list)) for each in value)
    if not levels or not value or not isinstance(value, (dict, list)) or (is_plain and not is_first):
        yield json.dumps(value, sort_keys=True)
        return
    items = value.items() if isinstance(value, dict) else [(None, each) for each in value]
    yield "{" if isinstance(value, dict) else "["
    for number, (key, each) in enumerate(items, 1):
        head = indent + " " + (f"{json.dumps(key)}: " if isinstance(value, dict) else "")
        text = "\n".join(_lines(each, levels - 1, indent + " ", is_first=False))
        yield head + text + ("," if number < len(items) else "")
    yield indent + ("}" if isinstance(value, dict) else "]")
