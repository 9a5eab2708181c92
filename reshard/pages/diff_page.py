"""The page of a diff: a picture of which tensors differ in which layers, and how much."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import NamedTuple

from formats.notation.architecture import numbers_in, without_numbers
from reshard.delta.differences import (
    CHANGED,
    HEAD,
    SAME,
    Diff,
    TensorDiff,
    cells,
    percent_text,
    rows_of,
    share_of,
)
from reshard.pages.markup import (
    CHARACTER,
    TOP,
    Frame,
    Html,
    both_widths,
    element,
    facts,
    html_page,
    joined,
    rectangle,
    table,
    text,
)
from reshard.text import human_bytes, plural, shorten

MOST = 96
"""More layers than these are drawn in groups of neighbours."""
_HEIGHT, _LEAST = 16, 1e-6
_SCALE = (1e-6, 1e-4, 1e-2, 1.0)
_TEXTS = ("tensor", "what")
_STYLE = """
svg .changed { fill: var(--error); } svg .other { fill: var(--bad); } svg .same { fill: none; stroke: var(--line); }
.legend { display: flex; flex-wrap: wrap; gap: 0.25rem 1rem; font-size: 0.875rem; }
.legend svg { display: inline-block; width: 1.1rem; height: 1.1rem; vertical-align: text-bottom; margin-right: 0.3rem; }
"""
_WORDS = (
    "A row is a kind of tensor, a column a layer; the experts of a layer are one cell. The darker a cell, the more of "
    "its elements differ in a bit, on a logarithmic scale. Red: a tensor is only on one side, or has another dtype or "
    "shape there."
)


class _Line(NamedTuple):
    """A row of the picture: a name with its numbers taken out, and the tensors of each layer."""

    name: str
    layers: Mapping[int, Sequence[TensorDiff]]


def diff_page(diff: Diff) -> str:
    """The text of the page."""
    title = f"{diff.a} and {diff.b}"
    kinds = {kind: len(diff.of(kind)) for kind in dict.fromkeys(tensor.kind for tensor in diff.tensors)}
    properties = [(kind, plural(count, "tensor")) for kind, count in kinds.items()]
    properties.append(("compared", f"{human_bytes(diff.nbytes)} of each"))
    properties += [("config.json differs", ", ".join(diff.config))] if diff.config else []
    layered, alone = _lines(diff.tensors)
    pictures = [element("figure", both_widths(partial(_picture, lines))) for lines in (layered, alone) if lines]
    return html_page(
        "reshard diff",
        title,
        _STYLE,
        element("header", element("h1", title)),
        facts(properties),
        element("h2", "What differs where"),
        element("p", _WORDS),
        element("div", *_legend(), class_="legend"),
        *pictures,
        _table([tensor for tensor in diff.tensors if tensor.kind != SAME]),
    )


def _lines(tensors: Sequence[TensorDiff]) -> tuple[list[_Line], list[_Line]]:
    """The rows of the tensors in layers, and of the others, each a layer of its own."""
    layered: dict[str, dict[int, list[TensorDiff]]] = {}
    alone: list[_Line] = []
    for tensor in tensors:
        if numbers := numbers_in(tensor.name):
            layered.setdefault(without_numbers(tensor.name), {}).setdefault(numbers[0], []).append(tensor)
        else:
            alone.append(_Line(tensor.name, {0: [tensor]}))
    return [_Line(name, layers) for name, layers in layered.items()], alone


def _picture(lines: Sequence[_Line], name: str, width: int) -> Html:
    """A cell for each layer, or group of layers, of each row."""
    layers = max(max(line.layers) for line in lines) + 1
    per_cell = -(-layers // MOST)
    columns = -(-layers // per_cell)
    labels = [shorten(line.name, int(width * 0.45 / CHARACTER)) for line in lines]
    margin = int(max(map(len, labels)) * CHARACTER) + 12
    side = min(_HEIGHT * 2.0, (width - margin - 8) / columns)
    frame = Frame(name, width, TOP + 22 + _HEIGHT * len(lines), margin, 8)
    marks: list[Html] = []
    if layers > 1:
        below = frame.labels_below(((margin + (i + 0.5) * side, str(i * per_cell)) for i in range(columns)), TOP + 12)
        marks += [label for _, label in below]
    for row, (line, label) in enumerate(zip(lines, labels, strict=True)):
        y = TOP + 18 + row * _HEIGHT
        marks.append(text(margin - 6, y + _HEIGHT / 2 + 4, label, "label", "end"))
        for column in range(columns):
            layers_there = range(column * per_cell, min(column * per_cell + per_cell, layers))
            tensors = [tensor for layer in layers_there for tensor in line.layers.get(layer, ())]
            if tensors:
                marks.append(_cell(frame, (margin + column * side, y, side), _name(line, layers_there), tensors))
    count = sum(len(layers_there) for line in lines for layers_there in line.layers.values())
    return frame.svg(joined(*marks), "What differs where", plural(count, "tensor"))


def _cell(frame: Frame, at: tuple[float, float, float], name: str, tensors: Sequence[TensorDiff]) -> Html:
    x, y, side = at
    kinds = {tensor.kind for tensor in tensors}
    unlike, share = sorted(kinds - {SAME, CHANGED}), share_of(tensors)
    mark = rectangle("other" if unlike else "changed" if CHANGED in kinds else "same",
                     x + 0.5, y + 1, max(side - 1, 1), _HEIGHT - 2)  # fmt: skip
    if CHANGED in kinds and not unlike:
        mark = element("g", mark, opacity=_opacity(share))
    notes = [*unlike, *([f"{percent_text(share)} of the elements"] if CHANGED in kinds else [])]
    return frame.hot(rectangle("hit", x, y, side, _HEIGHT), mark, name, ", ".join(notes) or SAME)


def _opacity(share: float) -> str:
    """How dark a share is: from 0.1 at one in a million to 1 at all, on a logarithmic scale."""
    return f"{1 + 0.9 * math.log10(max(share, _LEAST)) / -math.log10(_LEAST):.2f}"


def _legend() -> Iterator[Html]:
    marks = [("changed", _opacity(share), percent_text(share)) for share in _SCALE]
    for kind, opacity, words in [("same", None, SAME), *marks, ("other", None, "other kinds")]:
        box = element("rect", class_=kind, x=1, y=1, width=14, height=14, opacity=opacity)
        yield element("span", element("svg", box, viewBox="0 0 16 16", aria_hidden="true"), words)


def _table(tensors: Sequence[TensorDiff]) -> Html | None:
    """The rows that the command prints."""
    if not tensors:
        return None
    rows = ([element("span", first, class_="name"), *numbers] for first, *numbers in map(cells, rows_of(tensors)))
    return table("What differs, in rows of tensors that are alike", HEAD, [*rows], texts=_TEXTS)


def _name(line: _Line, layers: range) -> str:
    if "*" not in line.name:
        return line.name
    numbers = str(layers[0]) if len(layers) == 1 else f"{layers[0]}..{layers[-1]}"
    return line.name.replace("*", numbers, 1)
