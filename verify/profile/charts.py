"""The plots of a profile, as SVG: lines over degrees, widths and sizes, and bars of memory.

What was measured is drawn with filled marks and full lines, what is predicted with open marks and dashed lines. The
numbers that a mark shows are in the tables, too.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from reshard.pages.markup import (
    CHARACTER,
    TOP,
    WIDTHS,
    Frame,
    Html,
    both_widths,
    circle,
    element,
    joined,
    line,
    margin_of,
    rectangle,
    rounded,
    text,
)
from reshard.text import human_bytes

COLOURS = 6
_LEFT, _RIGHT, _BOTTOM = 62, 16, 40
_HEIGHT = 300
_MARK = 3.5
_KEY = 8  # the middle of a mark in the legend

Text = Callable[[float], str]


@dataclass(frozen=True)
class Point:
    """A point of a line, and whether it is a prediction; ``numbers`` is what it shows."""

    x: float
    y: float
    is_predicted: bool
    numbers: str


@dataclass(frozen=True)
class Line:
    """Points in increasing order of ``x``, with the name that the legend gives them."""

    name: str
    points: tuple[Point, ...]


@dataclass(frozen=True)
class Axes:
    """What the axes say. ``x`` is logarithmic, with a label at each value; ``y`` is too, or else begins at zero."""

    x: str
    y: str
    x_text: Text
    y_text: Text
    is_log: bool = True
    most: float | None = None


def line_chart(title: str, lines: Sequence[Line], axes: Axes) -> Html:
    """A plot with its legend."""
    shown = [each for each in lines if each.points]
    keys = [(mark(_KEY, _KEY, f"mark c{i % COLOURS}", i), each.name) for i, each in enumerate(shown)]
    if any(point.is_predicted for each in shown for point in each.points):
        dashes = line("line predicted", 0, _KEY, 2 * _KEY, _KEY)
        keys.append((joined(dashes, circle("mark open", _KEY, _KEY, _MARK)), "predicted"))
    plot = both_widths(lambda name, width: _line_plot(name, width, title, shown, axes))
    return element("figure", element("h3", title), legend(keys), plot)


def plain_plot(title: str, lines: Sequence[Line], axes: Axes) -> Html:
    """The plot for narrow pages by itself, as one SVG element without a legend."""
    return _line_plot("narrow", WIDTHS["narrow"], title, lines, axes)


def legend(keys: Sequence[tuple[Html, str]]) -> Html:
    """The marks of a plot and what they stand for."""
    box = f"0 0 {2 * _KEY} {2 * _KEY}"
    spans = (element("span", element("svg", drawn, viewBox=box, aria_hidden="true"), name) for drawn, name in keys)
    return element("p", *spans, class_="legend")


def _line_plot(name: str, width: int, title: str, lines: Sequence[Line], axes: Axes) -> Html:
    points = [point for line in lines for point in line.points]
    bottom, top = float(_HEIGHT - _BOTTOM), float(TOP + 22)
    upward = _Scale([p.y for p in points], bottom, top, is_log=axes.is_log, most=axes.most, has_round_ends=True)
    ticks = [(upward.at(y), axes.y_text(y)) for y in upward.ticks(6)]
    frame = Frame(name, width, _HEIGHT, margin_of((label for _, label in ticks), _LEFT), _RIGHT)
    across = _Scale([p.x for p in points], frame.left + 14, width - _RIGHT - 14, is_log=True)
    grid = [frame.grid_line(*tick) for tick in ticks]
    values = ((across.at(x), axes.x_text(x)) for x in sorted({p.x for p in points}))
    below = [label for _, label in frame.labels_below(values, bottom + 16)]
    drawn = [_line(each, across, upward, i, frame) for i, each in enumerate(lines)]
    return frame.svg(joined(*grid, *below, *_titles(frame, axes.x, axes.y), *drawn), title)


def _titles(frame: Frame, x: str, y: str) -> tuple[Html, Html]:
    """What the two axes say."""
    return text(6, TOP + 8, y, "label"), text(frame.middle, _HEIGHT - 6, x, "label", "middle")


class _Scale:
    """Values to coordinates; a linear one begins at zero. One with ``has_round_ends`` begins and ends at a tick if it
    is logarithmic, so it has three ticks or more.
    """

    def __init__(
        self, values: Sequence[float], start: float, end: float, *, is_log: bool, most: float | None = None,
        has_round_ends: bool = False,
    ) -> None:  # fmt: skip
        known = [value for value in values if value > 0] or [1.0]
        self._is_log, self._start, self._end = is_log, start, end
        self._low, self._high = (min(known), max(known)) if is_log else (0.0, most or max(known))
        if is_log and self._high < self._low * 1.01:
            self._low, self._high = self._low / 2, self._high * 2
        if is_log and has_round_ends:
            steps = [step for power in _powers(self._low, self._high) for step in _steps(power, _DIGITS[0])]
            self._low = max(step for step in steps if step <= self._low * 1.001)
            self._high = min(step for step in steps if step >= self._high * 0.999)

    def at(self, value: float) -> float:
        """The coordinate of a value."""
        if self._is_log:
            share = math.log(value / self._low) / math.log(self._high / self._low)
        else:
            share = value / self._high
        return self._start + share * (self._end - self._start)

    def ticks(self, most: int) -> list[float]:
        """Round values to label, about so many, and three or more; a short logarithmic scale has equal steps."""
        if not self._is_log or self._high <= self._low * 2.1:
            step = _round_up((self._high - self._low) / (4 if self._is_log else most))
            return [step * i for i in range(math.ceil(self._low / step - 1e-9), int(self._high / step + 1e-9) + 1)]
        for digits in _DIGITS:
            found = [step for power in _powers(self._low, self._high) for step in _steps(power, digits)]
            found = [value for value in found if self._low * 0.999 <= value <= self._high * 1.001]
            if len(found) <= most + 1:
                break
        return found[:: math.ceil(len(found) / (most + 1)) or 1]


_DIGITS = ((1, 2, 3, 5, 7), (1, 2, 5), (1, 3), (1,))
"""The first digits of the ticks of a logarithmic axis, from many ticks to few."""


def _powers(low: float, high: float) -> range:
    return range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)


def _steps(power: int, digits: Sequence[int]) -> list[float]:
    return [digit * 10.0**power for digit in digits]


def _round_up(value: float) -> float:
    power = 10.0 ** math.floor(math.log10(value)) if value > 0 else 1.0
    return next(digit * power for digit in (1, 2, 5, 10) if digit * power >= value * 0.999)


def _line(drawn: Line, across: _Scale, upward: _Scale, number: int, frame: Frame) -> Html:
    places, colour = [(across.at(p.x), upward.at(p.y), p) for p in drawn.points], f"c{number % COLOURS}"
    parts = []
    for (x1, y1, _), (x2, y2, second) in itertools.pairwise(places):
        kind = f"line {colour} predicted" if second.is_predicted else f"line {colour}"
        parts.append(line(kind, x1, y1, x2, y2))
    for x, y, point in places:
        kind = f"mark {colour} open" if point.is_predicted else f"mark {colour}"
        parts.append(frame.hot(circle("hit", x, y, 11), mark(x, y, kind, number), drawn.name, point.numbers))
    return joined(*parts)


def mark(x: float, y: float, kind: str, number: int) -> Html:
    """A circle, a square, a diamond: not by colour alone."""
    r = _MARK
    if number % 3 == 1:
        return rectangle(kind, x - r, y - r, 2 * r, 2 * r)
    if number % 3 == 2:
        path = f"M{rounded(x)} {rounded(y - 1.4 * r)}l{1.4 * r:g} {1.4 * r:g}l{-1.4 * r:g} {1.4 * r:g}"
        return element("path", class_=kind, d=f"{path}l{-1.4 * r:g} {-1.4 * r:g}z")
    return circle(kind, x, y, r)


# ------------------------------------------------------------------------------------------------------------- bars


@dataclass(frozen=True)
class Bar:
    """What a rank holds at a degree: names and bytes, from the bottom up."""

    label: str
    parts: tuple[tuple[str, int], ...]


def bar_chart(title: str, bars: Sequence[Bar], capacity: int | None, x: str) -> Html:
    """Stacked bars of bytes; a line at the capacity, where it is not far above them."""
    names = list(dict.fromkeys(name for bar in bars for name, _ in bar.parts))
    keys = [(rectangle(f"bar c{i % COLOURS}", 3, 3, 10, 10), name) for i, name in enumerate(names)]
    plot = both_widths(lambda name, width: _bar_plot(name, width, title, bars, names, capacity, x))
    return element("figure", element("h3", title), legend(keys), plot)


def _bar_plot(
    name: str, width: int, title: str, bars: Sequence[Bar], names: Sequence[str], capacity: int | None, x: str
) -> Html:
    totals = [float(sum(nbytes for _, nbytes in bar.parts)) for bar in bars]
    highest = max(totals)
    is_near = capacity is not None and capacity < 4 * highest
    most = max(highest, capacity or 0) * 1.08 if is_near else highest * 1.08
    bottom, top = float(_HEIGHT - _BOTTOM), float(TOP + 22)
    upward = _Scale(totals, bottom, top, is_log=False, most=most)
    ticks = [(upward.at(y), human_bytes(y)) for y in upward.ticks(5)]
    frame = Frame(name, width, _HEIGHT, margin_of((label for _, label in ticks), _LEFT), _RIGHT)
    drawn = [frame.grid_line(*tick) for tick in ticks]
    step = frame.inner / len(bars)
    has_room = max(len(human_bytes(total)) for total in totals) * CHARACTER < step  # else the table has the totals
    for i, (bar, total) in enumerate(zip(bars, totals, strict=True)):
        left, wide, low = frame.left + step * (i + 0.5) - min(step * 0.35, 40), min(step * 0.7, 80), 0.0
        pieces = []
        for part, nbytes in bar.parts:
            y = upward.at(low + nbytes)
            kind = f"bar c{names.index(part) % COLOURS}"
            pieces.append(rectangle(kind, left, y, wide, upward.at(low) - y))
            low += nbytes
        numbers = ", ".join(f"{part} {human_bytes(nbytes)}" for part, nbytes in bar.parts)
        above = text(left + wide / 2, upward.at(total) - 5, human_bytes(total), "label", "middle") if has_room else None
        marks = joined(*pieces, above)
        hit = rectangle("hit", left + (wide - step) / 2, top, step, bottom - top)
        drawn.append(frame.hot(hit, marks, f"tp {bar.label}", numbers))
        drawn.append(text(left + wide / 2, bottom + 16, bar.label, "label", "middle"))
    if is_near and capacity is not None:
        drawn.append(frame.limit(upward.at(capacity), f"{human_bytes(capacity)} a rank"))
    return frame.svg(joined(*drawn, *_titles(frame, x, "bytes on a rank")), title)
