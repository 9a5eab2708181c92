"""A profile as one HTML page that needs nothing else, made from the document that ``--json`` prints."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from reshard.pages.markup import Html, element, html_page, joined
from reshard.text import human_bytes, human_time
from verify.profile.charts import Axes, Bar, Line, Point, bar_chart, line_chart
from verify.profile.words import error_text, human_count, human_rate

Document = Mapping[str, Any]


def page(document: Document) -> str:
    """The text of the page."""
    style = (Path(__file__).parent / "page.css").read_text(encoding="utf-8")
    best = document["recommended"]["tp"]
    headline = f"Use tp {best}" if best else "No degree fits"
    parts: list[Html | None] = [_header(document, headline), _setting(document)]
    for phase in dict.fromkeys(row["phase"] for row in document["rows"]):
        parts.append(_phase(document, phase, [row for row in document["rows"] if row["phase"] == phase]))
    parts += [_links(document), _widths(document), _how()]
    foot = element("footer", element("p", "Written by ", element("code", "reshard profile"), ". The same in numbers: ",
                   element("code", "--json"), "."), class_="muted")  # fmt: skip
    body = element("body", element("main", *parts), foot)
    return html_page(f"{headline}: {document['source']} · reshard profile", style, body)


def _header(document: Document, headline: str) -> Html:
    found = document["recommended"]
    return element(
        "header",
        element("p", "reshard profile", class_="muted"),
        element("h1", headline),
        element("p", f"{found['reason'][:1].upper()}{found['reason'][1:]}."),
        *(element("p", f"For {each['phase']}, batch {each['batch']}, seq {each['seq']} alone: tp {each['tp']}.")
          for each in found["alone"]),
        class_=None if found["tp"] else "none",
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
    refused = [("not possible", f"tp {each['tp']}: {each['reason']}") for each in document["refused"]]
    return element("dl", *(joined(element("dt", name), element("dd", text)) for name, text in (*pairs, *refused)))


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
    found: dict[str, list[Document]] = {}
    for row in rows:
        found.setdefault(f"batch {row['batch']}, seq {row['seq']}", []).append(row)
    return [*found.items()]


def _time_of(row: Document) -> Document | None:
    found: Document | None = row["measured"] or row["predicted"]
    return found


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


_HEAD = ("batch", "seq", "tp", "tokens/s", "a step", "collectives", "weights", "gradients", "cache", "activations",
         "a rank", "fits", "prediction")  # fmt: skip


def _table(document: Document, rows: Sequence[Document]) -> Html:
    best, has_gradients = document["recommended"]["tp"], any(row["memory"]["gradients"] for row in rows)
    shown = [i for i, name in enumerate(_HEAD) if has_gradients or name != "gradients"]
    head = element("tr", *(element("th", _HEAD[i], class_="number" if i != 11 else None) for i in shown))
    lines = []
    for row in (row for _, of in _by_workload(rows) for row in of):
        cells = _cells(row)
        kind = "best" if row["tp"] == best else None if row["fits"] else "no"
        lines.append(element("tr", *(element("td", cells[i], class_="number" if i != 11 else None) for i in shown),
                             class_=kind))  # fmt: skip
    table = element("table", element("thead", head), element("tbody", *lines))
    notes = (
        element("p", f"tp {r['tp']}, batch {r['batch']}, seq {r['seq']} was not run: {r['not_run']}.", class_="muted")
        for r in rows if r["not_run"]
    )  # fmt: skip
    return joined(element("div", table, class_="scroll", tabindex=0), *notes)


def _cells(row: Document) -> list[str]:
    time, memory = _time_of(row), row["memory"]
    share = _share(time) if time else None
    return [
        str(row["batch"]), str(row["seq"]), str(row["tp"]),
        human_rate(row["tokens_per_second"]) if row["tokens_per_second"] else "–",
        human_time(time["seconds"]) if time else "–",
        "–" if share is None else _percent(share),
        *(human_bytes(memory[key]) for key in ("weights", "gradients", "cache", "activations", "total")),
        "yes" if row["fits"] else "no",
        "not measured" if row["measured"] is None else error_text(row["prediction_error"]),
    ]  # fmt: skip


# ----------------------------------------------------------------------------------------------- all-reduces, widths


def _links(document: Document) -> Html | None:
    links = document["all_reduce"]
    if not links:
        return None
    lines = []
    for link in links:
        moved = 2 * (link["ranks"] - 1) / link["ranks"]
        known = tuple(
            Point(each["bytes"], each["seconds"], False, f"{_binary(each['bytes'])}: {human_time(each['seconds'])}")
            for each in link["measured"]
        )
        fitted = tuple(
            Point(p.x, time, True, f"{_binary(p.x)}: {human_time(time)}, as fitted")
            for p in known
            for time in [link["latency"] + moved * p.x / link["bandwidth"]]
        )
        lines += [Line(f"{link['ranks']} ranks", known), Line(f"{link['ranks']} ranks, fitted", fitted)]
    axes = Axes("bytes of a rank", "seconds", _binary, human_time)
    text = (f"{link['ranks']} ranks: {human_time(link['latency'])}, then {human_bytes(link['bandwidth'])}/s."
            for link in links)  # fmt: skip
    return joined(
        element("h2", "All-reduces of this node"),
        element("p", "Fitted to the times by size: latency + 2 (N − 1) / N × bytes / bandwidth. ", " ".join(text)),
        element("div", line_chart("Time of an all-reduce", lines, axes), class_="plots"),
    )


def _widths(document: Document) -> Html | None:
    rows = document["widths"]
    if not rows:
        return None
    return joined(
        element("h2", "Throughput against width"),
        element("p", "One sequence of 512 tokens through one block, forward. The MLP is four times as wide inside."),
        element("div", *(line_chart(title, lines, WIDTH_AXES) for title, lines in width_lines(rows)), class_="plots"),
    )


def width_lines(rows: Sequence[Document]) -> Iterator[tuple[str, list[Line]]]:
    """The title of each block's plot, and its lines: one for each degree."""
    titles = {
        "mlp": "MLP, column-parallel and then row-parallel",
        "mlp, gathered": "MLP, both layers column-parallel",
        "attention": "Attention, heads of 128",
    }
    for block in dict.fromkeys(row["block"] for row in rows):
        of_block = [row for row in rows if row["block"] == block]
        yield (
            titles[block],
            [
                Line(f"tp {degree}", tuple(_width_point(row) for row in of_block if row["tp"] == degree))
                for degree in sorted({row["tp"] for row in of_block})
            ],
        )


def _width_point(row: Document) -> Point:
    share = row["collectives"] / row["seconds"]
    text = f"width {row['width']}: {human_rate(row['tokens_per_second'])} tokens/s, {share:.0%} in collectives"
    is_predicted = not row["measured"]
    return Point(row["width"], row["tokens_per_second"], is_predicted, f"{text}, predicted" if is_predicted else text)


def _how() -> Html:
    return joined(
        element("h2", "What this is"),
        element(
            "p",
            "One layer of each kind ran on the ranks, with the embedding and the head, random values and real "
            "collectives; the times of a layer count as often as there are such layers. A prediction has the rates "
            "that fit the other degrees: a time to start a part, a time for an operation, and a time for a byte of "
            "weights and cache. What ran is transformers' own code, which no engine's kernels and no CUDA graphs "
            "make faster: compare degrees with each other, not with an engine.",
        ),
    )


def _whole(value: float) -> str:
    return f"{value:,.0f}"


def _binary(value: float) -> str:
    """``64 KiB``: the sizes are powers of two."""
    return f"{value / 1024:.0f} KiB" if value < 1 << 20 else f"{value / (1 << 20):.0f} MiB"


def _percent(value: float) -> str:
    return f"{value:.0%}"


WIDTH_AXES = Axes("width", "tokens/s", _whole, human_rate)
