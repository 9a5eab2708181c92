"""The report of ``reshard verify`` as one HTML page that needs nothing else: no network, no script, no font.

It is made from the document that ``--json`` prints, and has nothing that the document lacks. Its plots are SVG: places
in the model with error and noise, and the distribution of differences. Each point can be hovered or tapped, or read in
the table below it.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from formats.mesh import read_mesh
from reshard.pages.markup import (
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
    number,
    percent,
    ratio,
    rectangle,
    rounded,
    table,
    text,
    to_number,
)
from verify.report.answer import NOT_LISTED, not_compared

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
    size = math.ceil(len(rows) / COLUMNS) or 1
    worst = [max(rows[i : i + size], key=_badness) for i in range(0, len(rows), size)]
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
    """How many logits differ by how much from the exact run: the shards', and the original's in its own dtype."""
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
    "without effect": "The adapter has no effect",
}  # fmt: skip

Document = Mapping[str, Any]


def page(document: Document) -> str:
    """The text of the page for a document of ``--json``."""
    style = (Path(__file__).parent / "page.css").read_text(encoding="utf-8")
    headline = HEADLINES.get(str(document.get("verdict")), HEADLINES["unchecked"])
    parts = (_header(document, headline), _plan(document), _exact(document), _forward(document), _gradients(document))
    title = f"{headline}: {Path(str(document.get('shards'))).name}"
    return html_page("reshard verify", title, style, *parts, _setting(document))


# ----------------------------------------------------------------------------------------------------------- sections


def _header(document: Document, headline: str) -> Html:
    kind = str(document.get("verdict"))
    sign = {"same": "✓", "different": "✗"}.get(kind, "?")
    error = document.get("error")
    return element(
        "header",
        element("p", "reshard verify", class_="muted"),
        element("h1", element("span", sign, aria_hidden="true"), f" {headline}"),
        element("p", document.get("summary")),
        element("p", f"Hint: {error['hint']}") if error and error.get("hint") else None,
        *(element("p", note) for note in document.get("notes") or ()),
        facts([("original", _code(document.get("original"))), ("shards", _code(document.get("shards")))]),
        class_=kind if kind in {"same", "different"} else "unchecked",
    )


def _plan(document: Document) -> Html | None:
    plan = document.get("plan")
    if plan is None:
        return None
    differences, model_type = plan.get("differences"), _code(plan.get("model_type"))
    words = {
        None: "There are no built-in rules of the model type ",
        True: "It differs from the built-in rules of the model type ",
        False: "It says the same as the built-in rules of the model type ",
    }[differences if differences is None else bool(differences)]
    return element(
        "section",
        element("h2", "A plan of your own"),
        element("p", "The bytes were compared with ", _code(plan.get("name")), f". {words}", model_type, "."),
        _list("What differs", differences or ()),
    )


def _exact(document: Document) -> Html | None:
    report = document.get("exact")
    if report is None:
        return None
    differs = report.get("verdict") != "same"
    words = "Some are not the original's." if differs else "All are the original's, none is missing, and none is extra."
    if not report["is_listed"]:
        words += f" But {NOT_LISTED}."
    if report.get("not_compared"):
        words = words.replace("none is missing, and none is extra", "no tensor is missing or extra")
        words += f" But {not_compared(report['not_compared'])}."
    counts = [
        ("compared", f"{report['nbytes']:,} bytes"),
        ("tensors", f"{report['tensors']:,}"),
        ("mesh", f"{report['mesh']}, {report['ranks']} ranks" if report["ranks"] is not None else report["mesh"]),
    ]
    lists = [("Contradictions", "problems"), ("Missing", "missing"), ("Extra", "extra")]
    return element(
        "section",
        element("h2", "Byte for byte"),
        element("p", words, class_="bad" if differs else None),
        facts(counts),
        _first(report.get("first")),
        _damages(report.get("damages") or ()),
        *(_list(title, report.get(key) or ()) for title, key in lists),
        _configs(report.get("configs") or ()),
    )


def _first(first: Document | None) -> Html | None:
    if first is None:
        return None
    where = str(first.get("because") or "padding") if first.get("original_file") is None else None
    pairs = [
        ("tensor", _code(first["tensor"])),
        *([("stored in", _code(first["stored"]))] if first.get("stored") else []),
        ("index", _code(list(first["index"]))),
        ("rank", str(first["rank"])),
        ("found", joined(_code(_hex(first["found"])), " in ", _code(first["file"]), f" at byte {first['offset']:,}")),
        ("expected", joined(_code(_hex(first["expected"])), " from ", where or joined(
            _code(first["original_file"]), f" at byte {first['original_offset']:,}"))),
    ]  # fmt: skip
    return joined(element("h3", "First difference"), facts(pairs))


def _hex(digits: str) -> str:
    return " ".join(digits[i : i + 2] for i in range(0, len(digits), 2))


def _damages(damages: Sequence[Document]) -> Html | None:
    names = [f"{d['tensor']} in {d['stored']}" if d.get("stored") else d["tensor"] for d in damages]
    rows = [[name, d["rank"], f"{d['elements']:,}", f"{d['nbytes']:,}"] for name, d in zip(names, damages, strict=True)]
    return _table("Where bytes differ", ["tensor", "rank", "elements", "bytes"], rows, wide=1) if rows else None


def _configs(configs: Sequence[Document]) -> Html | None:
    rows = [[c["file"], c["key"], _or_nothing(c["found"]), _or_nothing(c["expected"])] for c in configs]
    columns = ["file", "setting", "found", "expected"]
    return _table("Configs that are not as they should be", columns, rows, wide=4) if rows else None


def _or_nothing(value: object) -> str:
    return "nothing" if value is None else str(value)


def _forward(document: Document) -> Html | None:
    report = document.get("forward")
    if report is None:
        return None
    factor = to_number(report.get("factor"))
    rows = report.get("layers") or ()
    explanation = (
        f"Error: how far the shards, in {report.get('dtype')}, are from the original in {report.get('exact_dtype')}. "
        f"Noise: how far the original is from that when it runs in {report.get('dtype')} itself. Both are relative to "
        "the size of the values. Ratio: the largest of error over noise, of all values, of any one token and of any "
        f"one channel. Up to {number(report.get('factor'), 'g')} is rounding."
    )
    return element(
        "section",
        element("h2", "Forward, layer by layer"),
        element("p", report.get("verdict"), class_=None if report.get("is_same") else "bad"),
        element("p", explanation, class_="muted"),
        _power(report),
        _places(rows, factor, "layer", "Layers, in the order of computation") if rows else None,
        _logits(report.get("logits"), report),
    )


def _power(report: Document) -> Html | None:
    power = report.get("power")
    if power is None:
        return None
    bias, limit = power.get("bias_ratio"), number(report.get("factor"), "g")
    pairs: list[tuple[str, object]] = [
        ("largest noise", joined(f"{percent(power.get('noise'))} of the values of ", _code(power.get("place")))),
        ("a fault is seen there from", f"{percent(power.get('seen_from'))} of the values on"),
    ]
    if bias is not None:
        where = _code(power.get("bias_place"))
        pairs.append(("a bias added twice", joined(f"would have a ratio of {ratio(bias)} or more, least at ", where)))
    poor = f"Faults that change much of the values may stay within {limit} times the noise."
    wider = " In float32 (--compute-dtype float32) they are seen." if report.get("dtype") != "float32" else ""
    return joined(
        element("h3", "How small a fault is seen"),
        element("p", poor + wider, class_="bad") if power.get("is_poor") else None,
        facts(pairs),
    )


def _gradients(document: Document) -> Html | None:
    report = document.get("forward") or {}
    rows = report.get("gradients") or ()
    if not rows:
        return None
    plot = _places(rows, to_number(report.get("factor")), "weight", "Gradients of the weights, by name")
    return element("section", element("h2", "Backward, weight by weight"), plot)


def _places(rows: Sequence[Document], factor: float, what: str, caption: str) -> Html:
    legend = element(
        "figcaption",
        element("span", class_="key"), " error of the shards ",
        element("span", class_="key of-noise"), " noise of the original ",
        element("span", "✗", class_="bad"), " more than the noise allows",
    )  # fmt: skip
    order = sorted(range(len(rows)), key=lambda i: bool(rows[i].get("is_same")))[:ROWS]
    drawn = [rows[i] for i in sorted(order)]
    first = next((row for row in rows if not row.get("is_same")), None)
    cells, marks = [], []
    for row in drawn:
        note = "" if row.get("is_same") else " ✗ the first that differs" if row is first else " ✗ differs"
        numbers = [number(row.get("error")), number(row.get("noise")), ratio(row.get("ratio"))]
        name = joined(_code(row.get("name")), element("span", note, class_="bad") if note else None)
        worst = str(row.get("worst"))
        worst = worst if what == "layer" else worst.replace("token", "row").replace("channel", "column")
        cells.append([name, *numbers, worst, row.get("rank")])
        marks.append(not row.get("is_same"))
    columns = [what, "error", "noise", "ratio", "largest in", "rank"]
    table = _table(caption, columns, cells, wide=1, marks=marks, left_out=len(rows) - len(drawn))
    return joined(element("figure", legend, place_plot(rows, factor, what)), table)


def _logits(logits: Document | None, report: Document) -> Html | None:
    if logits is None:
        return None
    pairs: list[tuple[str, str, Callable[[Any], str]]] = [
        ("largest error", "max_error", number),
        ("error, relative", "relative_error", number),
        ("KL divergence, in nats a token", "kl", number),
        ("same most likely token", "agreement", partial(number, form=".2%")),
    ]
    rows: list[list[object]]
    rows = [[_words(name), text(logits.get(key)), text(logits.get(f"own_{key}"))] for name, key, text in pairs]
    if report.get("choices"):
        overruled_own, shards, all_ = (f"{report.get(key) or 0:,}" for key in ("own_overruled", "overruled", "choices"))
        rows.append([_words(f"experts chosen otherwise, of {all_} choices"), shards, overruled_own])
    caption = f"At {logits.get('positions'):,} positions, against the original in {report.get('exact_dtype')}"
    legend = element(
        "figcaption",
        element("span", class_="key"), " shards ",
        element("span", class_="key of-own"), f" the original itself in {report.get('dtype')}",
    )  # fmt: skip
    bins = logits.get("histogram") or ()
    return joined(
        element("h3", "Logits"),
        _table(caption, ["", "shards", "original's own"], rows, wide=1),
        element("figure", legend, histogram_plot(bins)) if bins else element("p", "The logits are not finite."),
        _mismatches(logits.get("mismatches") or ()),
    )


def _mismatches(mismatches: Sequence[Document]) -> Html | None:
    rows = [[m["position"], m["expected"], m["found"], number(m["margin"])] for m in mismatches]
    caption = "Other most likely tokens. The margin is the exact run's, from its first token to its second, in logits"
    return _table(caption, ["position", "expected", "found", "margin"], rows, wide=1) if rows else None


def _setting(document: Document) -> Html:
    report, environment = document.get("forward") or {}, document.get("environment") or {}
    seconds = {key: value for key, value in (document.get("seconds") or {}).items() if value is not None}
    tokens = f"{report['batch']:,} × {report['seq']:,}, seed {report['seed']}" if report else None
    mesh = report.get("mesh")
    pairs = [
        ("mesh", str(read_mesh(mesh, "mesh")) if isinstance(mesh, Mapping) else mesh),
        ("ranks", report.get("ranks")),
        ("device", report.get("device")),
        ("backend", report.get("backend")),
        ("reason", report.get("reason")),
        ("dtype", f"{report['dtype']}; the exact run in {report['exact_dtype']}" if report else None),
        ("tokens", tokens),
        *((f"option --{key}", value) for key, value in (document.get("options") or {}).items()),
        *((f"seconds, {key}", number(value, ",.1f")) for key, value in seconds.items()),
        *((f"{key}", value) for key, value in {**environment, **(report.get("versions") or {})}.items()),
        ("date", document.get("created")),
    ]
    unused = report.get("unused") or ()
    return element(
        "section",
        element("h2", "What was run on what"),
        facts([(name, value) for name, value in pairs if value is not None]),
        _list("Weights that the model does not use", unused),
        _list("Weights to which a rank's config.json gives another shape", report.get("cut") or ()),
    )


# -------------------------------------------------------------------------------------------------------------- parts


def _code(text: object) -> Html:
    return element("code", text)


def _words(text: str) -> Html:
    return element("span", text)


def _list(title: str, items: Sequence[object]) -> Html | None:
    if not items:
        return None
    tail = element("li", f"and {len(items) - ROWS:,} more") if len(items) > ROWS else None
    return joined(element("h3", title), element("ul", *(element("li", _code(item)) for item in items[:ROWS]), tail))


def _table(
    caption: str, columns: Sequence[str], rows: Sequence[Sequence[object]], *, wide: int, marks: Sequence[bool] = (),
    left_out: int = 0,
) -> Html:  # fmt: skip
    """A table whose first ``wide`` columns are names, the others numbers; ``marks`` are the rows that differ."""
    left_out += max(0, len(rows) - ROWS)
    lines = (
        (cell if isinstance(cell, Html) or j >= wide else _code(cell) for j, cell in enumerate(row)) for row in rows
    )
    note = f"; {left_out:,} more lines are in --json" if left_out > 0 else ""
    kinds = ["different" if mark else None for mark in marks]
    return table(f"{caption}{note}.", columns, [[*line] for line in [*lines][:ROWS]], texts=columns[:wide], kinds=kinds)
