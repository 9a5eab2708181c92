"""A profile as one HTML page that needs nothing else, made from the document that ``--json`` prints.

Its plots are SVG: lines over degrees and sizes, and bars of memory. What was measured is drawn with filled
marks and full lines, what is predicted with open marks and dashed lines. The numbers that a mark shows are in the
tables, too.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from reshard.pages.markup import (
    CHARACTER,
    TOP,
    Frame,
    Html,
    both_widths,
    circle,
    element,
    facts,
    html_page,
    joined,
    line,
    margin_of,
    rectangle,
    rounded,
    text,
)
from reshard.text import human_bytes, human_time
from verify.profile.words import human_count, human_rate, lines_of

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
    drawn = [curve for curve in lines if curve.points]
    keys = [(mark(_KEY, _KEY, f"mark c{i % COLOURS}", i), curve.name) for i, curve in enumerate(drawn)]
    if any(point.is_predicted for curve in drawn for point in curve.points):
        dashes = line("line predicted", 0, _KEY, 2 * _KEY, _KEY)
        keys.append((joined(dashes, circle("mark open", _KEY, _KEY, _MARK)), "predicted"))
    plot = both_widths(lambda name, width: _line_plot(name, width, title, drawn, axes))
    return element("figure", element("h3", title), legend(keys), plot)


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
    drawn = [_line(curve, across, upward, i, frame) for i, curve in enumerate(lines)]
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
        positive = [value for value in values if value > 0] or [1.0]
        self._is_log, self._start, self._end = is_log, start, end
        self._low, self._high = (min(positive), max(positive)) if is_log else (0.0, most or max(positive))
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
            values = [step for power in _powers(self._low, self._high) for step in _steps(power, digits)]
            values = [value for value in values if self._low * 0.999 <= value <= self._high * 1.001]
            if len(values) <= most + 1:
                break
        return values[:: math.ceil(len(values) / (most + 1)) or 1]


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
        x0, wide, low = frame.left + step * (i + 0.5) - min(step * 0.35, 40), min(step * 0.7, 80), 0.0
        pieces = []
        for part, nbytes in bar.parts:
            y = upward.at(low + nbytes)
            kind = f"bar c{names.index(part) % COLOURS}"
            pieces.append(rectangle(kind, x0, y, wide, upward.at(low) - y))
            low += nbytes
        numbers = ", ".join(f"{part} {human_bytes(nbytes)}" for part, nbytes in bar.parts)
        above = text(x0 + wide / 2, upward.at(total) - 5, human_bytes(total), "label", "middle") if has_room else None
        marks = joined(*pieces, above)
        hit = rectangle("hit", x0 + (wide - step) / 2, top, step, bottom - top)
        drawn.append(frame.hot(hit, marks, f"tp {bar.label}", numbers))
        drawn.append(text(x0 + wide / 2, bottom + 16, bar.label, "label", "middle"))
    if is_near and capacity is not None:
        drawn.append(frame.limit(upward.at(capacity), f"{human_bytes(capacity)} a rank"))
    return frame.svg(joined(*drawn, *_titles(frame, x, "bytes on a rank")), title)


Document = Mapping[str, Any]


def page(document: Document) -> str:
    """The text of the page."""
    style = (Path(__file__).parent / "page.css").read_text(encoding="utf-8")
    best = document["recommended"]["tp"]
    headline = f"Use tp {best}" if best else "No degree fits"
    parts: list[Html | None] = [_header(document, headline), _setting(document)]
    for phase in dict.fromkeys(row["phase"] for row in document["rows"]):
        parts.append(_phase(document, phase, [row for row in document["rows"] if row["phase"] == phase]))
    parts += [_links(document), element("h2", "What this is"), element("p", _HOW)]
    foot = element("footer", element("p", "Written by ", element("code", "reshard profile"), ". The same in numbers: ",
                   element("code", "--json"), "."), class_="muted")  # fmt: skip
    body = element("body", element("main", *parts), foot)
    return html_page(f"{headline}: {document['source']} · reshard profile", style, body)


def _header(document: Document, headline: str) -> Html:
    recommended = document["recommended"]
    return element(
        "header",
        element("p", "reshard profile", class_="muted"),
        element("h1", headline),
        element("p", f"{recommended['reason'][:1].upper()}{recommended['reason'][1:]}."),
        *(element("p", f"For {alone['phase']}, batch {alone['batch']}, seq {alone['seq']} alone: tp {alone['tp']}.")
          for alone in recommended["alone"]),
        class_=None if recommended["tp"] else "none",
    )  # fmt: skip


def _setting(document: Document) -> Html:
    kinds = ", ".join(f"{kind['part']} ({kind['count']} alike)" for kind in document["layers"])
    pairs = [
        ("model", element("code", document["source"])),
        ("parameters", f"{human_count(document['parameters'])}, {document['dtype']}"),
        ("ranks", f"{document['device']}, {document['backend']}"),
        ("timed", f"{kinds}, embedding and head"),
    ]
    if document["device"] == "cpu":
        pairs.append(("cores", f"{document['cores']} in all, {document['threads_per_rank']} a rank"))
    refused = [("not possible", f"tp {degree['tp']}: {degree['reason']}") for degree in document["refused"]]
    return facts([*pairs, *refused])


_HOW = (
    "One layer of each kind ran on the ranks, with the embedding and the head, random values and real "
    "collectives; the times of a layer count as often as there are such layers. A prediction has the rates "
    "that fit the other degrees: a time to start a part, a time for an operation, and a time for a byte of "
    "weights and cache. What ran is transformers' own code, which no engine's kernels and no CUDA graphs "
    "make faster: compare degrees with each other, not with an engine."
)


# ------------------------------------------------------------------------------------------------------------ phases

_TITLES = {
    "decode": "Decode: one token of each sequence",
    "prefill": "Prefill: all tokens at once",
    "train": "Training: forward and backward, without optimizer states",
}


def _phase(document: Document, phase: str, rows: Sequence[Document]) -> Html:
    speeds = [
        Line(name, tuple(_point(row, row["tokens_per_second"], _speed(row)) for row in of if row["tokens_per_second"]))
        for name, of in _by_workload(rows)
    ]
    shares = [
        Line(name, tuple(_point(row, share, f"{share:.1%} of {human_time(time['seconds'])}")
                         for row in of if (time := _time_of(row)) and (share := _share(time)) is not None))
        for name, of in _by_workload(rows)
    ]  # fmt: skip
    largest = max(_by_workload(rows), key=lambda item: max(row["memory"]["total"] for row in item[1]))
    plots = [
        line_chart("Tokens per second", speeds, Axes("tp", "tokens/s", _whole, human_rate)),
        line_chart("Share of the time in collectives", shares, Axes("tp", "share", _whole, _percent, False, 1.0)),
        _memory(largest[0], largest[1]),
    ]
    return joined(element("h2", _TITLES[phase]), element("div", *plots, class_="plots"), _table(document, rows))


def _by_workload(rows: Sequence[Document]) -> list[tuple[str, list[Document]]]:
    groups: dict[str, list[Document]] = {}
    for row in rows:
        groups.setdefault(f"batch {row['batch']}, seq {row['seq']}", []).append(row)
    return [*groups.items()]


def _time_of(row: Document) -> Document | None:
    time: Document | None = row["measured"] or row["predicted"]
    return time


def _share(time: Document) -> float | None:
    return time["collectives"] / time["seconds"] if time["seconds"] else None


def _point(row: Document, y: float, numbers: str) -> Point:
    is_predicted = row["measured"] is None
    text = f"tp {row['tp']}: {numbers}"
    return Point(row["tp"], y, is_predicted, f"{text}, predicted" if is_predicted else text)


def _speed(row: Document) -> str:
    time = _time_of(row)
    step = f", a step {human_time(time['seconds'])}" if time else ""
    return f"{human_rate(row['tokens_per_second'])} tokens/s{step}"


def _memory(name: str, rows: Sequence[Document]) -> Html:
    parts = [part for part in ("weights", "gradients", "cache", "activations") if any(r["memory"][part] for r in rows)]
    bars = [Bar(str(row["tp"]), tuple((part, row["memory"][part]) for part in parts)) for row in rows]
    capacities = {row["memory"]["capacity"] for row in rows}
    return bar_chart(f"Memory of a rank, {name}", bars, capacities.pop() if len(capacities) == 1 else None, "tp")


def _table(document: Document, rows: Sequence[Document]) -> Html:
    best, lines = document["recommended"]["tp"], []
    ordered = [row for _, of in _by_workload(rows) for row in of]
    for row, cells in zip(ordered, lines_of(ordered), strict=True):
        kind = "best" if row["tp"] == best else None if row["fits"] else "no"
        lines.append(element("tr", *(_cell("td", name, text) for name, text in cells.items()), class_=kind))
    head = element("tr", *(_cell("th", name, name) for name in cells))
    table = element("table", element("thead", head), element("tbody", *lines))
    notes = (
        element("p", f"tp {r['tp']}, batch {r['batch']}, seq {r['seq']} was not run: {r['not_run']}.", class_="muted")
        for r in rows if r["not_run"]
    )  # fmt: skip
    return joined(element("div", table, class_="scroll", tabindex=0), *notes)


def _cell(tag: str, column: str, text: str) -> Html:
    return element(tag, text, class_="number" if column != "fits" else None)


# -------------------------------------------------------------------------------------------------------- all-reduces


def _links(document: Document) -> Html | None:
    links = document["all_reduce"]
    if not links:
        return None
    lines = []
    for link in links:
        moved = 2 * (link["ranks"] - 1) / link["ranks"]
        measured = tuple(
            Point(point["bytes"], point["seconds"], False, f"{_binary(point['bytes'])}: {human_time(point['seconds'])}")
            for point in link["measured"]
        )
        fitted = tuple(
            Point(p.x, time, True, f"{_binary(p.x)}: {human_time(time)}, as fitted")
            for p in measured
            for time in [link["latency"] + moved * p.x / link["bandwidth"]]
        )
        lines += [Line(f"{link['ranks']} ranks", measured), Line(f"{link['ranks']} ranks, fitted", fitted)]
    axes = Axes("bytes of a rank", "seconds", _binary, human_time)
    text = (f"{link['ranks']} ranks: {human_time(link['latency'])}, then {human_bytes(link['bandwidth'])}/s."
            for link in links)  # fmt: skip
    return joined(
        element("h2", "All-reduces of this node"),
        element("p", "Fitted to the times by size: latency + 2 (N − 1) / N × bytes / bandwidth. ", " ".join(text)),
        element("div", line_chart("Time of an all-reduce", lines, axes), class_="plots"),
    )


def _whole(value: float) -> str:
    return f"{value:,.0f}"


def _binary(value: float) -> str:
    """``64 KiB``: the sizes are powers of two."""
    return f"{value / 1024:.0f} KiB" if value < 1 << 20 else f"{value / (1 << 20):.0f} MiB"


def _percent(value: float) -> str:
    return f"{value:.0%}"
