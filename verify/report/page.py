"""The report of ``reshard verify`` as one HTML page that needs nothing else: no network, no script, no font.

It is made from the document that ``--json`` prints, and has nothing that the document lacks. Its plots are SVG: places
in the model with error and noise, and the distribution of differences. Each point can be hovered or tapped, or read in
the table below it.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from reshard.formats.mesh import read_mesh
from reshard.pages.markup import (
    TOP,
    Frame,
    Html,
    both_widths,
    circle,
    element,
    groups,
    html_page,
    joined,
    line,
    rectangle,
    rounded,
    text,
)
from reshard.text import number, ratio, to_number
from reshard.verify.report.answer import NOT_LISTED, not_compared

COLUMNS = 400
"""The largest number of points in a plot. With more places, a point is the worst of several neighbours."""

_LEFT, _RIGHT = 54, 10
_BEYOND = 14.0  # from an end of an axis to the place of zero, and of infinity


@dataclass(frozen=True)
class _Axis:
    """A logarithmic axis. Zero and non-finite numbers have places of their own, beyond its ends."""

    low: int
    high: int
    start: float
    end: float

    def at(self, value: float) -> float:
        """The coordinate of a value."""
        if not math.isfinite(value):
            return self.end + math.copysign(_BEYOND, self.end - self.start)
        if value <= 0 or math.log10(value) < self.low:
            return self.start - math.copysign(_BEYOND, self.end - self.start)
        share = (math.log10(value) - self.low) / (self.high - self.low)
        return self.start + min(share, 1.0) * (self.end - self.start)

    def decades(self, most: int) -> Iterator[int]:
        """The powers of ten to label, at most so many."""
        return iter(range(self.low, self.high + 1, max(1, math.ceil((self.high - self.low + 1) / most))))


def _axis(values: Iterable[float], start: float, end: float) -> _Axis:
    logs = [math.log10(v) for v in values if math.isfinite(v) and v > 0]
    low, high = (math.floor(min(logs)), math.ceil(max(logs))) if logs else (-1, 0)
    return _Axis(max(low, high - 18), max(high, low + 1), start, end)


# ------------------------------------------------------------------------------------------------------------- places


def place_plot(rows: Sequence[Mapping[str, Any]], factor: float, what: str) -> Html:
    """Error and noise of each place, and below them their ratio with the line of the factor; both on log axes."""
    worst = [max((rows[place] for place in group), key=_badness) for group in groups(len(rows), COLUMNS)]
    return both_widths(lambda name, width: _place_plot(name, width, worst, factor, what))


def _badness(row: Mapping[str, Any]) -> tuple[bool, float]:
    x = to_number(row.get("ratio"))
    return not row.get("is_same"), math.inf if math.isnan(x) else x


def _place_plot(name: str, width: int, rows: Sequence[Mapping[str, Any]], factor: float, what: str) -> Html:
    upper, lower = (TOP + 36, TOP + 226), (TOP + 296, TOP + 400)
    frame = Frame(name, width, lower[1] + 52, _LEFT, _RIGHT)
    errors, noises, ratios = ([to_number(row.get(key)) for row in rows] for key in ("error", "noise", "ratio"))
    values = _axis((*errors, *noises), upper[1], upper[0])
    shares = _axis((*ratios, factor / 10, factor * 10), lower[1], lower[0])
    step = frame.inner / max(len(rows), 1)
    xs = [_LEFT + step * (i + 0.5) for i in range(len(rows))]
    parts = [
        _grid(values, frame, "error relative to the values' size", (*errors, *noises)),
        _grid(shares, frame, "ratio of error to noise", ratios),
        _below(rows, xs, lower[1], frame, what),
        _line(xs, [values.at(v) for v in noises], "noise"),
        _line(xs, [values.at(v) for v in errors], "error"),
    ]
    radius = max(1.2, min(3.5, step / 2.5))
    for x, row, y, z in zip(xs, rows, errors, ratios, strict=True):
        marks = joined(*(_mark(x, at, bool(row.get("is_same")), radius) for at in (values.at(y), shares.at(z))))
        numbers = f"error {number(row.get('error'))}, noise {number(row.get('noise'))}, ratio {ratio(row.get('ratio'))}"
        parts.append(frame.hot(_hit(x, step, lower[1]), marks, str(row.get("name")), numbers))
    parts.append(frame.limit(shares.at(factor), f"{factor:g} × noise: above it is no rounding"))
    title = f"Error and noise, {what} by {what}"
    worst = max(rows, key=_badness, default={})
    description = (
        f"Two plots over {len(rows)} places, with logarithmic axes: error and noise, and their ratio with a line at "
        f"{factor:g}. The largest ratio is {ratio(worst.get('ratio'))} at {worst.get('name')}. "
        "The table below has all numbers."
    )
    return frame.svg(joined(*parts), title, description)


def _grid(axis: _Axis, frame: Frame, title: str, values: Iterable[float]) -> Html:
    short = {0: "1", 1: "10", 2: "100", -1: "0.1", -2: "0.01"}
    lines = [(axis.at(10.0**power), short.get(power, f"1e{power}")) for power in axis.decades(6)]
    numbers = list(values)
    if any(v <= 0 for v in numbers):
        lines.append((axis.at(0.0), "0"))
    if any(not math.isfinite(v) for v in numbers):
        lines.append((axis.at(math.inf), "∞"))
    title_above = text(_LEFT - 46, axis.end - _BEYOND - 10, title, "label")
    return joined(title_above, *(frame.grid_line(y, label) for y, label in lines))


def _below(rows: Sequence[Mapping[str, Any]], xs: Sequence[float], bottom: float, frame: Frame, what: str) -> Html:
    """The number of each layer, under its first place, for as many layers as there is room for."""
    names = [(x, _short(str(row.get("name")))) for x, row in zip(xs, rows, strict=True)]
    firsts = [next(same) for _, same in itertools.groupby(names, key=lambda place: place[1])]
    ticks = bottom + _BEYOND
    parts = [joined(line("grid", x, ticks, x, ticks + 4), label) for x, label in frame.labels_below(firsts, ticks + 16)]
    order = "in the order of computation" if what == "layer" else "by name"
    return joined(*parts, text(frame.middle, ticks + 33, f"{what}, {order}", "label", "middle"))


def _short(name: str) -> str:
    """The number of the layer; for a name without one, the end of the name."""
    match = re.search(r"\.(\d+)(?:\.|$)", name)
    return match[1] if match else name.removesuffix(".weight").rpartition(".")[2][:12]


def _hit(x: float, step: float, bottom: float) -> Html:
    return rectangle("hit", x - step / 2, TOP, step, bottom + _BEYOND - TOP)


def _line(xs: Sequence[float], ys: Sequence[float], kind: str) -> Html:
    points = " ".join(f"{rounded(x)},{rounded(y)}" for x, y in zip(xs, ys, strict=True))
    return element("polyline", class_=kind, points=points)


def _mark(x: float, y: float, is_same: bool, radius: float) -> Html:
    if is_same:
        return circle("dot", x, y, radius)
    r = max(3.0, radius)
    path = f"M{rounded(x - r)} {rounded(y - r)}l{2 * r:g} {2 * r:g}m0 {-2 * r:g}l{-2 * r:g} {2 * r:g}"
    return element("path", class_="cross", d=path)


# ---------------------------------------------------------------------------------------------------------- histogram


def histogram_plot(bins: Sequence[Sequence[Any]]) -> Html:
    """Plot the number of logits by their distance from the exact run: the shards', and the original's in its
    own dtype.
    """
    counts = [(to_number(b[0]), int(b[1]), int(b[2])) for b in bins]
    return both_widths(lambda name, width: _histogram(name, width, counts))


def _histogram(name: str, width: int, bins: Sequence[tuple[float, int, int]]) -> Html:
    bottom, top = float(TOP + 220), float(TOP + 36)
    frame = Frame(name, width, TOP + 262, _LEFT, _RIGHT)
    counts = [count for _, *pair in bins for count in pair]
    axis = _Axis(0, max(1, math.ceil(math.log10(max(max(counts, default=1), 1)))), bottom - _BEYOND, top)
    step = frame.inner / max(len(bins), 1)
    parts = [_grid(axis, frame, "logits", (0.0,))]
    outline, total = [], [0, 0]
    for i, (centre, sharded, plain) in enumerate(bins):
        x, total = _LEFT + step * i, [total[0] + sharded, total[1] + plain]
        y = axis.at(plain)
        bar = rectangle("noise-area", x, y, step, bottom - y)
        outline += [(x, axis.at(sharded)), (x + step, axis.at(sharded))]
        numbers = f"shards: {sharded:,} logits, original's own: {plain:,}"
        hit = _hit(x + step / 2, step, bottom)
        parts.append(frame.hot(hit, bar, f"difference {number(centre)}", numbers))
    parts.append(_line([x for x, _ in outline], [y for _, y in outline], "error"))
    for share in (0.0, 0.5, 1.0):
        if bins:
            reach = abs(bins[0][0]) + abs(bins[-1][0] - bins[0][0]) / max(len(bins) - 1, 1) / 2
            label = number(reach * (2 * share - 1), ".1e")
            anchor = ("start", "middle", "end")[int(2 * share)]
            x = _LEFT + share * frame.inner
            parts.append(text(x, bottom + 16, label, "label", anchor))
    parts.append(text(frame.middle, bottom + 34, "logit minus that of the exact run", "label", "middle"))
    description = (
        f"A histogram with {len(bins)} bins and a logarithmic axis of counts: "
        f"{total[0]:,} logits of the shards and {total[1]:,} of the original in its own dtype."
    )
    return frame.svg(joined(*parts), "Differences of the logits from the exact run", description)


ROWS = 2000
"""The page shows so many lines of a table, differing ones first; ``--json`` has all."""

HEADLINES = {
    "same": "The same model", "different": "Different", "unchecked": "Could not be checked",
    "incomplete": "Not all files are there", "without effect": "The adapter has no effect",
}  # fmt: skip

Document = Mapping[str, Any]


class _Drawn(NamedTuple):
    """Places in the model: their plot, and the lines of the table."""

    rows: Sequence[Document]
    left_out: int
    first: Document | None
    plot: Html


def page(document: Document, line: str = "reshard verify") -> str:
    """The text of the page for a document of ``--json``."""
    headline = HEADLINES.get(str(document["verdict"]), HEADLINES["unchecked"])
    forward = document["forward"] or {}
    return html_page(
        "reshard/verify/report/page.html", f"{headline}: {Path(str(document['shards'])).name}", line, **document,
        headline=headline, most=ROWS, not_listed=NOT_LISTED,
        not_compared=not_compared, setting=_setting(document, forward),
        layers=_drawn(forward, "layers", "layer"), gradients=_drawn(forward, "gradients", "weight"),
        histogram=histogram_plot((forward.get("logits") or {}).get("histogram") or ()),
    )  # fmt: skip


def _drawn(forward: Document, key: str, what: str) -> _Drawn:
    rows = forward.get(key) or ()
    order = sorted(range(len(rows)), key=lambda i: bool(rows[i]["is_same"]))[:ROWS]
    first = next((row for row in rows if not row["is_same"]), None)
    plot = place_plot(rows, to_number(forward["factor"]), what) if rows else Html()
    return _Drawn([rows[i] for i in sorted(order)], len(rows) - len(order), first, plot)


def _setting(document: Document, forward: Document) -> list[tuple[str, object]]:
    """Return the settings of the run as rows, without those that are None."""
    tokens = f"{forward['batch']:,} × {forward['seq']:,}, seed {forward['seed']}" if forward else None
    dtype = f"{forward['dtype']}; the exact run in {forward['exact_dtype']}" if forward else None
    mesh = forward.get("mesh")
    pairs = [
        ("mesh", str(read_mesh(mesh, "mesh")) if isinstance(mesh, Mapping) else mesh),
        *((name, forward.get(name)) for name in ("ranks", "device", "backend", "reason")),
        ("dtype", dtype),
        ("tokens", tokens),
        *((f"option --{key}", value) for key, value in document["options"].items()),
        *((f"seconds, {key}", number(value, ",.1f")) for key, value in document["seconds"].items()),
        *{**document["environment"], **forward.get("versions", {})}.items(),
        ("date", document["created"]),
    ]
    return [(name, value) for name, value in pairs if value is not None]
