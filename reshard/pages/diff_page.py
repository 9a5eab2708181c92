"""The page of a diff: a picture of which tensors differ in which layers, and how much."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from formats.notation.architecture import numbers_in, without_numbers
from reshard.delta.differences import CHANGED, HEAD, SAME, Diff, TensorDiff, cells, percent_text, rows_of, share_of
from reshard.pages.markup import Cell, Html, html_page, matrix
from reshard.text import human_bytes, plural

MOST = 96
"""More layers than these are drawn in groups of neighbours."""
_LEAST = 1e-6
_SCALE = (1e-6, 1e-4, 1e-2, 1.0)


class _Line(NamedTuple):
    """A row of the picture: a name with its numbers taken out, and the tensors of each layer."""

    name: str
    layers: Mapping[int, Sequence[TensorDiff]]


def diff_page(diff: Diff) -> str:
    """The text of the page."""
    kinds = {kind: len(diff.of(kind)) for kind in dict.fromkeys(tensor.kind for tensor in diff.tensors)}
    properties = [(kind, plural(count, "tensor")) for kind, count in kinds.items()]
    properties.append(("compared", f"{human_bytes(diff.nbytes)} of each"))
    properties += [("config.json differs", ", ".join(diff.config))] if diff.config else []
    marks = [Cell("some", _opacity(share), percent_text(share), "") for share in _SCALE]
    return html_page(
        "reshard/pages/diff_page.html", f"{diff.a} and {diff.b}", command="diff", properties=properties,
        legend=[Cell("none", 1, SAME, ""), *marks, Cell("other", 1, "other kinds", "")],
        pictures=[_picture(lines) for lines in _lines(diff.tensors) if lines], head=HEAD,
        rows=[cells(row) for row in rows_of([tensor for tensor in diff.tensors if tensor.kind != SAME])],
    )  # fmt: skip


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


def _picture(lines: Sequence[_Line]) -> Html:
    """A cell for each layer, or group of layers, of each row."""
    layers = max(max(line.layers) for line in lines) + 1
    size = -(-layers // MOST)
    groups = [range(first, min(first + size, layers)) for first in range(0, layers, size)]
    rows = [(line.name, [_cell(line, group) for group in groups]) for line in lines]
    count = sum(len(tensors) for line in lines for tensors in line.layers.values())
    labels = [str(group[0]) for group in groups]
    return matrix(rows, labels, "What differs where", plural(count, "tensor"), widest=32)


def _cell(line: _Line, layers: range) -> Cell | None:
    tensors = [tensor for layer in layers for tensor in line.layers.get(layer, ())]
    if not tensors:
        return None
    numbers = str(layers[0]) if len(layers) == 1 else f"{layers[0]}..{layers[-1]}"
    name, kinds, share = line.name.replace("*", numbers, 1), {tensor.kind for tensor in tensors}, share_of(tensors)
    notes = unlike = sorted(kinds - {SAME, CHANGED})
    if CHANGED in kinds:
        notes = [*unlike, f"{percent_text(share)} of the elements"]
    kind, opacity = ("other", 1.0) if unlike else ("some", _opacity(share)) if CHANGED in kinds else ("none", 1.0)
    return Cell(kind, opacity, name, ", ".join(notes) or SAME)


def _opacity(share: float) -> float:
    """How dark a share is: from 0.1 at one in a million to 1 at all, on a logarithmic scale."""
    return 1 + 0.9 * math.log10(max(share, _LEAST)) / -math.log10(_LEAST)
