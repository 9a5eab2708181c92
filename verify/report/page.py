"""The report of ``reshard verify`` as one HTML page that needs nothing else: no network, no script, no font.

It is made from the document that ``--json`` prints, and has nothing that the document lacks.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from formats.mesh import read_mesh
from reshard.pages.markup import Html, element, html_page, joined, number, percent, ratio, to_number
from verify.report.plots import histogram_plot, place_plot
from verify.report.words import NOT_LISTED, not_compared

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
    foot = element("footer", element("p", "Written by ", element("code", "reshard verify"), ". ",
                   "The same in numbers: ", element("code", "--json"), "."), class_="muted")  # fmt: skip
    body = element("body", element("main", *parts, _setting(document)), foot)
    return html_page(f"{headline}: {Path(str(document.get('shards'))).name} · reshard verify", style, body)


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
        _pairs([("original", _code(document.get("original"))), ("shards", _code(document.get("shards")))]),
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
        _pairs(counts),
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
    return joined(element("h3", "First difference"), _pairs(pairs))


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
    return element(
        "section",
        element("h2", "Forward, layer by layer"),
        element("p", report.get("verdict"), class_=None if report.get("is_same") else "bad"),
        element("p", _explanation(report), class_="muted"),
        _power(report),
        _places(rows, factor, "layer", "Layers, in the order of computation") if rows else None,
        _logits(report.get("logits"), report),
    )


def _explanation(report: Document) -> str:
    return (
        f"Error: how far the shards, in {report.get('dtype')}, are from the original in {report.get('exact_dtype')}. "
        f"Noise: how far the original is from that when it runs in {report.get('dtype')} itself. Both are relative to "
        "the size of the values. Ratio: the largest of error over noise, of all values, of any one token and of any "
        f"one channel. Up to {number(report.get('factor'), 'g')} is rounding."
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
    wider = " In float32 (--dtype float32) they are seen." if report.get("dtype") != "float32" else ""
    return joined(
        element("h3", "How small a fault is seen"),
        element("p", poor + wider, class_="bad") if power.get("is_poor") else None,
        _pairs(pairs),
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
    shown = [rows[i] for i in sorted(order)]
    first = next((row for row in rows if not row.get("is_same")), None)
    cells, marks = [], []
    for row in shown:
        note = "" if row.get("is_same") else " ✗ the first that differs" if row is first else " ✗ differs"
        numbers = [number(row.get("error")), number(row.get("noise")), ratio(row.get("ratio"))]
        name = joined(_code(row.get("name")), element("span", note, class_="bad") if note else None)
        worst = str(row.get("worst"))
        worst = worst if what == "layer" else worst.replace("token", "row").replace("channel", "column")
        cells.append([name, *numbers, worst, row.get("rank")])
        marks.append(not row.get("is_same"))
    columns = [what, "error", "noise", "ratio", "largest in", "rank"]
    table = _table(caption, columns, cells, wide=1, marks=marks, left_out=len(rows) - len(shown))
    return joined(element("figure", legend, place_plot(rows, factor, what)), table)


def _logits(logits: Document | None, report: Document) -> Html | None:
    if logits is None:
        return None
    pairs = [
        ("largest error", "max_error", number),
        ("error, relative", "relative_error", number),
        ("KL divergence, in nats a token", "kl", number),
        ("same most likely token", "agreement", _percent),
    ]
    rows: list[list[object]]
    rows = [[_words(name), text(logits.get(key)), text(logits.get(f"own_{key}"))] for name, key, text in pairs]
    if report.get("choices"):
        own, found, all_ = (f"{report.get(key) or 0:,}" for key in ("own_overruled", "overruled", "choices"))
        rows.append([_words(f"experts chosen otherwise, of {all_} choices"), found, own])
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


def _percent(value: object) -> str:
    return number(value, ".2%")


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
        _pairs([(name, value) for name, value in pairs if value is not None]),
        _list("Weights that the model does not use", unused),
        _list("Weights to which a rank's config.json gives another shape", report.get("cut") or ()),
    )


# -------------------------------------------------------------------------------------------------------------- parts


def _code(text: object) -> Html:
    return element("code", text)


def _words(text: str) -> Html:
    return element("span", text)


def _pairs(pairs: Iterable[tuple[str, object]]) -> Html:
    return element("dl", *(joined(element("dt", name), element("dd", value)) for name, value in pairs))


def _list(title: str, items: Sequence[object]) -> Html | None:
    if not items:
        return None
    more = element("li", f"and {len(items) - ROWS:,} more") if len(items) > ROWS else None
    return joined(element("h3", title), element("ul", *(element("li", _code(item)) for item in items[:ROWS]), more))


def _table(
    caption: str,
    columns: Sequence[str],
    rows: Sequence[Sequence[object]],
    *,
    wide: int,
    marks: Sequence[bool] = (),
    left_out: int = 0,
) -> Html:
    """A table that scrolls in its own box. The first ``wide`` columns are names, the others numbers."""
    left_out += max(0, len(rows) - ROWS)
    lines = []
    for i, row in enumerate(rows[:ROWS]):
        first, *others = (cell if isinstance(cell, Html) or j >= wide else _code(cell) for j, cell in enumerate(row))
        cells = (element("td", cell, class_="number" if j >= wide else None) for j, cell in enumerate(others, 1))
        kind = "different" if marks and marks[i] else None
        lines.append(element("tr", element("th", first, scope="row"), *cells, class_=kind))
    heads = (element("th", name, scope="col", class_="number" if j >= wide else None) for j, name in enumerate(columns))
    more = f"; {left_out:,} more lines are in --json" if left_out > 0 else ""
    table = element(
        "table",
        element("caption", caption, more, "."),
        element("thead", element("tr", *heads)),
        element("tbody", *lines),
    )
    return element("div", table, class_="scroll", tabindex=0, role="region", aria_label=caption)
