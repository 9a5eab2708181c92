"""A profile as one HTML page that needs nothing else, made from the document that ``--json`` prints.

Degrees are compared by bars, each with its number beside it. What was measured is drawn full, what is predicted open.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from reshard.pages.markup import html_page, rounded
from reshard.profile.words import STEP, human_count, human_rate, lines_of
from reshard.text import human_bytes, human_time

PageDocument = Mapping[str, Any]
Bars = tuple[Mapping[str, float], str]
"""The parts of a bar, and the words beside it."""


def page(document: PageDocument, line: str = "reshard profile") -> str:
    """The text of the page."""
    best = document["recommended"]["tp"]
    headline = f"Use tp {best}" if best else "No degree fits"
    phases = dict.fromkeys(row["phase"] for row in document["rows"])
    return html_page(
        "reshard/profile/page.html", f"{headline}: {document['source']}", line, **document,
        headline=headline, best=best, human_count=human_count,
        capacities=dict.fromkeys(human_bytes(row["memory"]["capacity"]) for row in document["rows"]),
        phases=[_phase(phase, [row for row in document["rows"] if row["phase"] == phase]) for phase in phases],
        exchanges=_exchanges(document["all_reduce"]),
    )  # fmt: skip


class _Bar(NamedTuple):
    """A bar of a figure: the class, beginning and length of each part, in percent of the longest."""

    tp: int
    parts: Sequence[tuple[str, str, str]]
    words: str
    is_open: bool


def _phase(phase: str, rows: Sequence[PageDocument]) -> PageDocument:
    """The figures of a phase, the lines of its table, and the row of each."""
    workloads: dict[str, list[PageDocument]] = {}
    for row in rows:
        workloads.setdefault(f"batch {row['batch']}, seq {row['seq']}", []).append(row)
    figures = (
        _figure("Tokens per second", workloads, _speed),
        _figure("Time of a step, share of collectives", workloads, _time),
        _figure("Memory of a rank", workloads, _memory),
    )
    ordered = [(name, row) for name, rows_of in workloads.items() for row in rows_of]
    cells = lines_of([row for _, row in ordered])
    lines = [{"workload": name, **line} for (name, _), line in zip(ordered, cells, strict=True)]
    title = f"{'Training' if phase == 'train' else phase.capitalize()}: {STEP[phase]}"
    return {"title": title, "figures": figures, "lines": lines, "rows": [row for _, row in ordered]}


def _speed(row: PageDocument) -> Bars | None:
    rate = row["tokens_per_second"]
    return ({"tokens": rate}, human_rate(rate)) if rate else None


def _time(row: PageDocument) -> Bars | None:
    time = row["measured"] or row["predicted"]
    if not time or not time["seconds"]:
        return None
    parts = {"computing": time["compute"], "collectives": time["collectives"]}
    return parts, f"{human_time(time['seconds'])}, {time['collectives'] / time['seconds']:.0%}"


def _memory(row: PageDocument) -> Bars:
    memory = row["memory"]
    parts = {part: memory[part] for part in ("weights", "gradients", "cache", "activations") if memory[part]}
    return parts, f"{human_bytes(memory['total'])}{'' if row['fits'] else ', does not fit'}"


def _figure(
    title: str, workloads: Mapping[str, Sequence[PageDocument]], numbers: Callable[[PageDocument], Bars | None]
) -> PageDocument:
    """A bar for each degree of each workload, those of a workload to one scale; the colour of each part."""
    colours, groups = dict[str, int](), dict[str, list[_Bar]]()
    for name, rows in workloads.items():
        drawn = [(row, *values) for row in rows if (values := numbers(row))]
        groups[name] = []
        longest = max((sum(parts.values()) for _, parts, _ in drawn), default=0) or 1
        for row, parts, words in drawn:
            is_open, total, end, rectangles = numbers is not _memory and row["measured"] is None, 0.0, 0.0, []
            for part, value in parts.items():
                kind = f"bar c{colours.setdefault(part, len(colours))}{' open' if is_open else ''}"
                total, begin, end = total + value, end, round(100 * (total + value) / longest, 1)
                rectangles.append((kind, rounded(begin), rounded(end - begin)))
            groups[name].append(_Bar(row["tp"], rectangles, words, is_open))
    return {"title": title, "groups": groups, "colours": colours}


def _exchanges(links: Sequence[PageDocument]) -> Mapping[int, Mapping[str, str]]:
    """Return the times of each all-reduce, by its bytes: measured and fitted."""
    times: dict[int, dict[str, str]] = {}
    for link in links:
        moved = 2 * (link["ranks"] - 1) / link["ranks"] / link["bandwidth"]
        for point in link["measured"]:
            line = times.setdefault(point["bytes"], {})
            line[f"{link['ranks']} ranks"] = human_time(point["seconds"])
            line[f"{link['ranks']} ranks, fitted"] = human_time(link["latency"] + moved * point["bytes"])
    columns = {name: "–" for line in times.values() for name in line}
    return {nbytes: columns | line for nbytes, line in times.items()}
