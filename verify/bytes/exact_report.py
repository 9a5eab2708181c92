"""The result of a comparison of bytes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any, Literal


@dataclass(frozen=True)
class FirstDifference:
    """The first wrong element, in the order of the original's files."""

    tensor: str
    index: tuple[int, ...]
    """The element's index in the full tensor (in the padded tensor, if it is padding)."""
    rank: int
    file: str
    offset: int
    """The element's first byte in the shard's file."""
    expected: bytes
    found: bytes
    original_file: str | None
    """None for an element that comes from no file."""
    original_offset: int | None
    """The element's first byte in the original's file; None without one."""
    stored: str | None = None
    """The tensor's name in another program's format."""
    because: str = "padding"
    """The reason why an element comes from no file."""

    def __str__(self) -> str:
        place = self.because if self.original_file is None else f"{self.original_file} byte {self.original_offset}"
        stored = f", in '{self.stored}'" if self.stored else ""
        return (
            f"{self.tensor}{list(self.index)} on rank {self.rank}{stored}: {self.file} byte {self.offset} "
            f"has {self.found.hex(' ')}, expected {self.expected.hex(' ')} ({place})"
        )


@dataclass(frozen=True)
class Damage:
    """The number of wrong bytes and elements in a rank's part of a tensor; ``stored`` is its name in another program's
    format.
    """

    tensor: str
    rank: int
    nbytes: int
    elements: int
    stored: str | None = None


@dataclass(frozen=True)
class ConfigDifference:
    """A wrong setting in a config.json or another JSON file; values are JSON text, None for an absent value."""

    file: str
    key: str
    expected: str | None
    found: str | None

    def __str__(self) -> str:
        expected, stated = (value if value is not None else "nothing" for value in (self.expected, self.found))
        return f"{self.file}: '{self.key}' is {stated}, expected {expected}"


_ABSENT = object()


def config_differences(file: str, expected: Any, found: Any, key: str = "") -> Iterator[ConfigDifference]:
    """The differences of two JSON documents; 1, 1.0 and true are different, and NaN equals NaN."""
    if isinstance(expected, dict) and isinstance(found, dict):
        for name in dict.fromkeys((*expected, *found)):
            one, other = (side.get(name, _ABSENT) for side in (expected, found))
            yield from config_differences(file, one, other, f"{key}.{name}" if key else str(name))
    elif isinstance(expected, list) and isinstance(found, list):
        for number, (one, other) in enumerate(zip_longest(expected, found, fillvalue=_ABSENT)):
            yield from config_differences(file, one, other, f"{key}[{number}]")
    else:
        texts = [None if value is _ABSENT else json.dumps(value, sort_keys=True) for value in (expected, found)]
        if texts[0] != texts[1]:
            pairs = enumerate(zip(texts[0] or "", texts[1] or "", strict=False))
            first = next((place for place, (a, b) in pairs if a != b), 0)
            yield ConfigDifference(file, key, *(_around(text, first) for text in texts))


def _around(text: str | None, place: int) -> str | None:
    """The part of a long text around a place."""
    if text is None or len(text) <= 80:
        return text
    start = max(0, place - 20)
    return ("…" if start else "") + text[start : start + 60] + ("…" if start + 60 < len(text) else "")


@dataclass(frozen=True)
class ExactReport:
    """The result of a comparison."""

    mesh: str
    ranks: int | None
    """None where no file says the mesh."""
    tensors: int
    nbytes: int
    """The compared bytes of the shards' tensors."""
    first: FirstDifference | None = None
    damages: tuple[Damage, ...] = ()
    """The tensors whose content differs."""
    missing: tuple[str, ...] = ()
    """Names of tensors and files."""
    extra: tuple[str, ...] = ()
    """Names of tensors and files."""
    configs: tuple[ConfigDifference, ...] = ()
    """Wrong settings."""
    problems: tuple[str, ...] = ()
    """Other differences, one line each."""
    format: str | None = None
    """The name of another program's format."""
    is_listed: bool = True
    """Whether extra files were looked for: a web server cannot be listed."""
    not_compared: tuple[str, ...] = ()
    """Side files that cannot be checked without a manifest, and files that may belong there but are absent."""
    cast: str | None = None
    """The dtype to which the original was cast first."""

    @property
    def verdict(self) -> Literal["same", "different"]:
        """``same`` if nothing differs, else ``different``."""
        differs = self.first or self.damages or self.missing or self.extra or self.configs or self.problems
        return "different" if differs else "same"

    @property
    def comparable(self) -> bool:
        """Whether the shards have all tensors in the planned shapes, whatever their content."""
        return not (self.missing or self.problems)
