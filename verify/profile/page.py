"""A profile as one HTML page that needs nothing else, made from the document that ``--json`` prints.

Degrees are compared by bars, each with its number beside it. What was measured is drawn full, what is predicted open.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from reshard.pages.markup import Html, element, facts, html_page, joined, rectangle, table
from reshard.text import human_bytes, human_time
from verify.profile.words import human_count, human_rate, lines_of

Document = Mapping[str, Any]
Numbers = tuple[Mapping[str, float], str]
"""The parts of a bar, and the words beside it."""

_HOW = (
    "One layer of each kind ran on the ranks, with the embedding and the head, random values and real "
    "collectives; the times of a layer count as often as there are such layers. A prediction has the rates "
    "that fit the other degrees: a time to start a part, a time for an operation, and a time for a byte that is "
    "multiplied. What ran is transformers' own code, which no engine's kernels and no CUDA graphs "
    "make faster: compare degrees with each other, not with an engine."
)
_TITLES = {
    "decode": "Decode: one token of each sequence",
    "prefill": "Prefill: all tokens at once",
    "train": "Training: forward and backward, without optimizer states",
}


def page(document: Document) -> str:
    """The text of the page."""
    best, recommended = document["recommended"]["tp"], document["recommended"]
    headline = f"Use tp {best}" if best else "No degree fits"
    kinds = ", ".join(f"{kind['part']} ({kind['count']} alike)" for kind in document["layers"])
    capacities = dict.fromkeys(human_bytes(row["memory"]["capacity"]) for row in document["rows"])
    properties = [
        ("model", element("code", document["source"])),
        ("parameters", f"{human_count(document['parameters'])}, {document['dtype']}"),
        ("ranks", f"{document['device']}, {document['backend']}"),
        ("memory of a rank", ", ".join(capacities)),
        ("timed", f"{kinds}, embedding and head"),
        *([("cores", f"{document['cores']} in all, {document['threads_per_rank']} a rank")]
          if document["device"] == "cpu" else []),
        *(("not possible", f"tp {degree['tp']}: {degree['reason']}") for degree in document["refused"]),
    ]  # fmt: skip
    header = element(
        "header",
        element("p", "reshard profile", class_="muted"),
        element("h1", headline),
        element("p", f"{recommended['reason'][:1].upper()}{recommended['reason'][1:]}."),
        *(element("p", f"For {alone['phase']}, batch {alone['batch']}, seq {alone['seq']} alone: tp {alone['tp']}.")
          for alone in recommended["alone"]),
        class_=None if best else "none",
    )  # fmt: skip
    phases = dict.fromkeys(row["phase"] for row in document["rows"])
    sections = (_phase(best, phase, [row for row in document["rows"] if row["phase"] == phase]) for phase in phases)
    style = (Path(__file__).parent / "page.css").read_text(encoding="utf-8")
    return html_page(
        "reshard profile", f"{headline}: {document['source']}", style, header, facts(properties), *sections,
        _links(document["all_reduce"]), element("h2", "What this is"), element("p", _HOW),
    )  # fmt: skip


def _phase(best: int | None, phase: str, rows: Sequence[Document]) -> Html:
    """The bars of each workload, and the table of all."""
    workloads: dict[str, list[Document]] = {}
    for row in rows:
        workloads.setdefault(f"batch {row['batch']}, seq {row['seq']}", []).append(row)
    figures = (
        _figure("Tokens per second", workloads, _speed),
        _figure("Time of a step, share of collectives", workloads, _time),
        _figure("Memory of a rank", workloads, _memory),
    )
    ordered = [(name, row) for name, of in workloads.items() for row in of]
    cells = lines_of([row for _, row in ordered])
    return joined(
        element("h2", _TITLES[phase]),
        element("div", *figures, class_="plots"),
        table(
            "Ranks of each degree, and their numbers",
            ["workload", *cells[0]],
            [[name, *line.values()] for (name, _), line in zip(ordered, cells, strict=True)],
            texts={"workload", "fits"},
            kinds=["best" if row["tp"] == best else None if row["fits"] else "no" for _, row in ordered],
        ),
        *(element("p", f"tp {row['tp']}, {name} was not run: {row['not_run']}.", class_="muted")
          for name, row in ordered if row["not_run"]),
    )  # fmt: skip


def _speed(row: Document) -> Numbers | None:
    rate = row["tokens_per_second"]
    return ({"tokens": rate}, human_rate(rate)) if rate else None


def _time(row: Document) -> Numbers | None:
    time = row["measured"] or row["predicted"]
    if not time or not time["seconds"]:
        return None
    parts = {"computing": time["compute"], "collectives": time["collectives"]}
    return parts, f"{human_time(time['seconds'])}, {time['collectives'] / time['seconds']:.0%}"


def _memory(row: Document) -> Numbers:
    memory = row["memory"]
    parts = {part: memory[part] for part in ("weights", "gradients", "cache", "activations") if memory[part]}
    return parts, f"{human_bytes(memory['total'])}{'' if row['fits'] else ', does not fit'}"


def _figure(
    title: str, workloads: Mapping[str, Sequence[Document]], numbers: Callable[[Document], Numbers | None]
) -> Html:
    """A bar for each degree of each workload; those of a workload have one scale."""
    colours: dict[str, int] = {}
    groups, is_predicted = [], False
    for name, rows in workloads.items():
        drawn = [(row, *of) for row in rows if (of := numbers(row))]
        longest = max((sum(parts.values()) for _, parts, _ in drawn), default=0) or 1
        lines = []
        for row, parts, words in drawn:
            is_open, x, bars = numbers is not _memory and row["measured"] is None, 0.0, []
            is_predicted |= is_open
            for part, value in parts.items():
                kind = f"bar c{colours.setdefault(part, len(colours))}{' open' if is_open else ''}"
                bars.append(rectangle(kind, x, 0, 100 * value / longest, 10))
                x += 100 * value / longest
            label = f"tp {row['tp']}: {words}{', predicted' if is_open else ''}"
            box = {"viewBox": "0 0 100 10", "preserveAspectRatio": "none", "role": "img", "aria_label": label}
            lines += [element("span", f"tp {row['tp']}"), element("svg", element("title", label), *bars, **box),
                      element("span", words, class_="number")]  # fmt: skip
        groups += [element("p", name, class_="muted"), element("div", *lines, class_="bars")]
    keys = [(f"bar c{colour}", part) for part, colour in colours.items()] if len(colours) > 1 else []
    keys += [("bar c0 open", "predicted")] if is_predicted else []
    marks = (element("svg", rectangle(kind, 1, 1, 14, 14), viewBox="0 0 16 16", aria_hidden="true") for kind, _ in keys)
    legend = (element("span", mark, name) for mark, (_, name) in zip(marks, keys, strict=True))
    return element("figure", element("h3", title), element("p", *legend, class_="legend"), *groups)


def _links(links: Sequence[Document]) -> Html | None:
    """The times of all-reduces by size, beside those that the fitted line has."""
    if not links:
        return None
    times: dict[int, dict[str, str]] = {}
    for link in links:
        moved = 2 * (link["ranks"] - 1) / link["ranks"] / link["bandwidth"]
        for point in link["measured"]:
            line = times.setdefault(point["bytes"], {})
            line[f"{link['ranks']} ranks"] = human_time(point["seconds"])
            line[f"{link['ranks']} ranks, fitted"] = human_time(link["latency"] + moved * point["bytes"])
    columns = [*dict.fromkeys(name for line in times.values() for name in line)]
    rows = [[f"{nbytes:,}", *(line.get(name, "–") for name in columns)] for nbytes, line in times.items()]
    words = (f"{link['ranks']} ranks: {human_time(link['latency'])}, then {human_bytes(link['bandwidth'])}/s."
             for link in links)  # fmt: skip
    return joined(
        element("h2", "All-reduces of this node"),
        element("p", "Fitted to the times by size: latency + 2 (N − 1) / N × bytes / bandwidth. ", " ".join(words)),
        table("Time of an all-reduce, by the bytes of a rank", ["bytes", *columns], rows, texts={"bytes"}),
    )
