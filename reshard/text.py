"""Numbers, words and columns as text for people. Pure: nothing is read or printed here."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Any

from reshard.formats.errors import MismatchError, one_line, printable


class Result:
    """The result of a command of the Python API: ``str`` is the text that the command prints, ``repr`` is one line of
    it.
    """

    @property
    def headline(self) -> str:
        """The result in one line."""
        raise NotImplementedError

    def to_text(self, width: int | None = None) -> str:
        """Return the text that the command prints. Tables are made narrower to fit ``width`` columns if possible."""
        raise NotImplementedError

    def __str__(self) -> str:
        return printable(self.to_text())

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: {one_line(self.headline)}>"


class Comparison(Result):
    """A result that says whether two checkpoints are the same. It is true only if they are."""

    def __bool__(self) -> bool:
        raise NotImplementedError

    def raise_if_different(self) -> None:
        """Raise MismatchError unless they are the same."""
        if not self:
            raise MismatchError(self.headline)


_UNITS = {"": 0, "K": 1, "M": 2, "G": 3, "T": 4}


def size_of(text: str) -> int:
    """A number of bytes: ``5GB`` (decimal, as on the Hub), ``512MiB``, ``1000000``. Raises ValueError, also for 0."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?)(I?)B?\s*", text.upper())
    if match is None or (match[3] and not match[2]):
        raise ValueError(f"'{text}' is not a size such as 5GB, 500MB or 2GiB")
    nbytes = int(float(match[1]) * (1024 if match[3] else 1000) ** _UNITS[match[2]])
    if nbytes < 1:
        raise ValueError(f"'{text}' is less than one byte")
    return nbytes


def speed_of(text: str) -> float:
    """Bytes per second: ``450GB/s``. Raises ValueError."""
    if not text.endswith("/s"):
        raise ValueError(f"'{text}' is not a speed such as 450GB/s")
    return float(size_of(text.removesuffix("/s")))


def flops_of(text: str) -> float:
    """Operations per second: ``990TFLOP/s``. Raises ValueError."""
    match = re.fullmatch(r"(.*[KMGT])FLOP(/S|S)", text.upper())
    if match is None:
        raise ValueError(f"'{text}' is not a speed such as 990TFLOP/s")
    return float(size_of(match[1]))


def human_bytes(count: float) -> str:
    """``1.23 GB``, in decimal units as the Hub has them."""
    return with_prefix(count, "B")


def with_prefix(count: float, unit: str) -> str:
    """A count with a decimal prefix: ``1.23 GFLOP``."""
    if count < 1000:
        return f"{count:.0f} {unit}"
    for prefix in ("k", "M", "G", "T"):
        count /= 1000
        if count < 999.995 or prefix == "T":
            break
    return f"{count:.2f} {prefix}{unit}"


def human_seconds(seconds: float) -> str:
    """``45 s``, ``12 min``, ``3.5 h``."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"


def human_time(seconds: float) -> str:
    """``1.23 s``, ``45.6 ms``, ``7.8 µs``."""
    unit, scale = next((pair for pair in (("s", 1.0), ("ms", 1e-3)) if seconds >= pair[1]), ("µs", 1e-6))
    value = seconds / scale
    return f"{value:.0f} {unit}" if value >= 99.5 else f"{value:.3g} {unit}"


def plural(count: int, word: str) -> str:
    """``1 file``, ``2 files``."""
    return f"{count:,} {word}{'' if count == 1 else 's'}"


def shape_text(shape: Sequence[int]) -> str:
    """``4096x1024``; ``scalar`` for no dimensions."""
    return "x".join(map(str, shape)) or "scalar"


def align(
    cells: Sequence[Sequence[str]], *, right: Sequence[int], width: int | None, elastic: Sequence[int] = (),
    keep_beginnings: bool = False,
) -> list[str]:  # fmt: skip
    """Lay cells out in columns, two spaces apart; if too wide, ``elastic`` ones lose their beginning, or their end."""
    widths = [max(len(line[i]) for line in cells) for i in range(len(cells[0]))]
    while width is not None and sum(widths) + 2 * (len(widths) - 1) > width:
        widest = max(elastic, key=lambda i: widths[i], default=None)
        if widest is None or widths[widest] <= 20:
            break
        widths[widest] -= 1
    lines = []
    for line in cells:
        shortened = [shorten(cell, widths[i], keep_beginning=keep_beginnings) for i, cell in enumerate(line)]
        padded = [cell.rjust(widths[i]) if i in right else cell.ljust(widths[i]) for i, cell in enumerate(shortened)]
        lines.append("  ".join(padded).rstrip())
    return lines


def shorten(text: str, width: int, *, keep_beginning: bool = False) -> str:
    """The end of a text for which there is room, or its beginning."""
    if len(text) <= width:
        return text
    return f"{text[: width - 1]}…" if keep_beginning else f"…{text[len(text) - width + 1 :]}"


def to_number(value: Any) -> float:
    """The float that a document means: ``"inf"``, ``"-inf"`` and ``"nan"`` stand in it as text. None becomes NaN."""
    try:
        return float(value)
    except (TypeError, ValueError):
        return math.nan


def number(value: Any, form: str = ".2e") -> str:
    """A number as text: ``1.23e-04``, ``0``, ``∞``, ``not a number``; a dash for None."""
    if value is None:
        return "–"
    x = to_number(value)
    if math.isnan(x):
        return "not a number"
    if math.isinf(x):
        return "∞" if x > 0 else "−∞"
    return "0" if x == 0 else format(x, form)


def percent(value: Any) -> str:
    """A fraction as text: ``1.23%``; below 0.1 % ``1.23e-06``."""
    return number(value, ".2%" if to_number(value) >= 1e-3 else ".2e")


def ratio(value: Any) -> str:
    """A ratio as text: two decimals below 100, whole numbers below a million, else three digits and an exponent."""
    x = to_number(value)
    return number(value, ".2f" if abs(x) < 100 else ",.0f" if abs(x) < 1e6 else ".2e")
