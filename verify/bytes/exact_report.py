"""What a comparison of bytes found."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal


@dataclass(frozen=True)
class FirstDifference:
    """The first element, in the order of the original's files, that is not as it should be.

    ``index`` counts in the full tensor (where it lies in the padding, in the padded one). ``offset`` and
    ``original_offset`` are where the element begins, in bytes of its file; the original is None in the padding, where
    zeros are expected.
    """

    tensor: str
    index: tuple[int, ...]
    rank: int
    file: str
    offset: int
    expected: bytes
    found: bytes
    original_file: str | None
    original_offset: int | None

    def __str__(self) -> str:
        place = "padding" if self.original_file is None else f"{self.original_file} byte {self.original_offset}"
        return (
            f"{self.tensor}{list(self.index)} on rank {self.rank}: {self.file} byte {self.offset} "
            f"has {self.found.hex(' ')}, expected {self.expected.hex(' ')} ({place})"
        )


@dataclass(frozen=True)
class Damage:
    """How much of a rank's part of a tensor is not as it should be."""

    tensor: str
    rank: int
    nbytes: int
    elements: int


@dataclass(frozen=True)
class ConfigDifference:
    """A setting of a config.json, or of another JSON file, that is not as planned, as JSON; None: not there."""

    file: str
    key: str
    expected: str | None
    found: str | None

    def __str__(self) -> str:
        expected, found = (value if value is not None else "nothing" for value in (self.expected, self.found))
        return f"{self.file}: '{self.key}' is {found}, expected {expected}"


@dataclass(frozen=True)
class ExactReport:
    """The result of a comparison. ``nbytes`` are the bytes of the shards' tensors that were compared.

    ``missing`` and ``extra`` name tensors and files; ``problems`` are other contradictions, one line each; ``first``
    and ``damages`` are about the content of tensors.
    """

    mesh: str
    ranks: int
    tensors: int
    nbytes: int
    first: FirstDifference | None = None
    damages: tuple[Damage, ...] = ()
    missing: tuple[str, ...] = ()
    extra: tuple[str, ...] = ()
    configs: tuple[ConfigDifference, ...] = ()
    problems: tuple[str, ...] = ()

    @property
    def verdict(self) -> Literal["same", "different"]:
        """Whether the shards are the original."""
        differs = self.first or self.damages or self.missing or self.extra or self.configs or self.problems
        return "different" if differs else "same"

    @property
    def comparable(self) -> bool:
        """Whether the shards hold the original's tensors in the planned shapes, whatever their content."""
        return not (self.missing or self.problems)

    def to_document(self) -> dict[str, Any]:
        """The report as it stands in ``--json``."""
        document = {"verdict": self.verdict, **asdict(self)}
        if self.first is not None:
            bytes_as_text = {"expected": self.first.expected.hex(), "found": self.first.found.hex()}
            document["first"] = {**asdict(self.first), **bytes_as_text}
        return document
