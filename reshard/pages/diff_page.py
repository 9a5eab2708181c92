"""The page of a diff: a picture of which tensors differ in which layers, and how much."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import takewhile

from reshard.delta.differences import CHANGED, HEAD, SAME, Diff, TensorDiff, percent_text, rows_of, share_of
from reshard.formats.notation.architecture import numbers_in, without_numbers
from reshard.pages.markup import Cell, Html, groups, html_page, matrix
from reshard.text import human_bytes, plural

MOST = 96
"""More layers than these are drawn in groups of neighbours."""
_LEAST = 1e-6
_SCALE = (1e-6, 1e-4, 1e-2, 1.0)


def diff_page(diff: Diff, line: str = "reshard diff") -> str:
    """The text of the page."""
    kinds = {kind: len(diff.of(kind)) for kind in dict.fromkeys(tensor.kind for tensor in diff.tensors)}
    count = sum(tensor.kind != SAME for tensor in diff.tensors)
    where = f"{count:,} of {plural(len(diff.tensors), 'tensor')}" if count else "config.json alone"
    headline = "The same" if diff.same else f"Different in {where}"
    properties = [("A", diff.a), ("B", diff.b)]
    properties += [(kind, plural(count, "tensor")) for kind, count in kinds.items()]
    properties.append(("compared", f"{human_bytes(diff.nbytes)} of each"))
    properties += [("config.json differs", ", ".join(diff.config))] if diff.config else []
    marks = [Cell("some", _opacity(share), percent_text(share), "") for share in _SCALE]
    return html_page(
        "reshard/pages/diff_page.html", headline, line, properties=properties, is_same=diff.same,
        legend=[Cell("none", 1, SAME, ""), *marks, Cell("other", 1, "other kinds", "")],
        pictures=[*_pictures(diff.tensors)], head=HEAD,
        rows=rows_of([tensor for tensor in diff.tensors if tensor.kind != SAME]),
    )  # fmt: skip


def _pictures(tensors: Sequence[TensorDiff]) -> Iterator[Html]:
    """A picture of the tensors in layers, and one of the others: a row is a name without its first number, with a cell
    for each layer, or group of layers.
    """
    layered, alone = dict[str, dict[int, list[TensorDiff]]](), dict[str, dict[int, list[TensorDiff]]]()
    for tensor in tensors:
        if numbers := numbers_in(tensor.name):
            layered.setdefault(without_numbers(tensor.name), {}).setdefault(numbers[0], []).append(tensor)
        else:
            alone[tensor.name] = {0: [tensor]}
    for lines in filter(None, (layered, alone)):
        layers = max(map(max, lines.values())) + 1
        columns = groups(layers, MOST)
        words = takewhile(lambda same: len({*same}) == 1, zip(*(name.split(".")[:-1] for name in lines), strict=False))
        common = "".join(f"{word}." for word, *_ in words) if len(lines) > 1 else ""
        rows = [
            (name.removeprefix(common), [_cell(name, line, column) for column in columns])
            for name, line in lines.items()
        ]
        count = sum(len(tensors) for line in lines.values() for tensors in line.values())
        labels, count_text = [str(column[0]) for column in columns], plural(count, "tensor")
        yield matrix(rows, labels, "What differs where", count_text, widest=32)


def _cell(name: str, line: Mapping[int, Sequence[TensorDiff]], layers: range) -> Cell | None:
    tensors = [tensor for layer in layers for tensor in line.get(layer, ())]
    if not tensors:
        return None
    numbers = str(layers[0]) if len(layers) == 1 else f"{layers[0]}..{layers[-1]}"
    name, kinds, share = name.replace("*", numbers, 1), {tensor.kind for tensor in tensors}, share_of(tensors)
    notes = unlike = sorted(kinds - {SAME, CHANGED})
    if CHANGED in kinds:
        notes = [*unlike, f"{percent_text(share)} of the elements"]
    kind, opacity = ("other", 1.0) if unlike else ("some", _opacity(share)) if CHANGED in kinds else ("none", 1.0)
    return Cell(kind, opacity, name, ", ".join(notes) or SAME)


def _opacity(share: float) -> float:
    """Return the opacity for a share: from 0.1 at one in a million to 1 at all, on a logarithmic scale."""
    return 1 + 0.9 * math.log10(max(share, _LEAST)) / -math.log10(_LEAST)
