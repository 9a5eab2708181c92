"""What differs, for people: the tensors of one kind over layers and experts in a row."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from reshard.delta.differences import CHANGED, DTYPE, SHAPE, TensorDiff
from reshard.delta.numbers import largest_ulps
from reshard.text import shape_text

HEAD = ("tensor", "tensors", "what", "elements", "largest", "rms", "ulp")
"""What the cells of a row are."""
NUMBER = re.compile(r"(?<=\.)\d+(?=\.)|(?<=\.)\d+$")
"""The number of a layer or an expert in a name."""


@dataclass(frozen=True)
class Row:
    """Tensors of one kind whose names differ in one number. ``name`` has all numbers: ``layers.{10..14}.mlp``."""

    name: str
    tensors: tuple[TensorDiff, ...]


def rows_of(tensors: Sequence[TensorDiff]) -> list[Row]:
    """Tensors that differ, those of one name, kind, dtype and shape together."""
    groups: dict[tuple[object, ...], list[TensorDiff]] = {}
    for tensor in tensors:
        shown = tuple(shape and len(shape) for shape in tensor.shapes)
        groups.setdefault((NUMBER.sub("{}", tensor.name), tensor.kind, tensor.dtypes, shown), []).append(tensor)
    return [Row(_joint(str(key[0]), found), tuple(found)) for key, found in groups.items()]


def _joint(template: str, tensors: Sequence[TensorDiff]) -> str:
    """A name with the numbers of all in place of each of its own."""
    numbers = zip(*(map(int, NUMBER.findall(tensor.name)) for tensor in tensors), strict=True)
    parts = template.split("{}")
    shown = ["", *map(_ranges, numbers)]
    return "".join(text + part for text, part in zip(shown, parts, strict=True))


def _ranges(numbers: Sequence[int]) -> str:
    """``{0..3,7}``; a number alone as it is."""
    found = [f"{a}..{b}" if b > a + 1 else f"{a},{b}" if b > a else str(a) for a, b in _stretches(sorted({*numbers}))]
    text = ",".join(found)
    return text if text.isdigit() else f"{{{text}}}"


def _stretches(numbers: Sequence[int]) -> Iterator[tuple[int, int]]:
    first = last = numbers[0]
    for number in numbers[1:]:
        if number != last + 1:
            yield first, last
            first = number
        last = number
    yield first, last


def cells(row: Row) -> tuple[str, ...]:
    """What ``HEAD`` names, as text; empty where there is nothing to say."""
    return row.name, f"{len(row.tensors):,}", *_numbers(row.tensors)


def _numbers(tensors: Sequence[TensorDiff]) -> tuple[str, str, str, str, str]:
    first = tensors[0]
    if first.kind != CHANGED:
        sides = {DTYPE: first.dtypes, SHAPE: tuple(shape_text(shape or ()) for shape in first.shapes)}
        shown = " -> ".join(map(str, sides[first.kind])) if first.kind in sides else ""
        return f"{first.kind} {shown}".rstrip(), "", "", "", ""
    elements, other = sum(t.elements for t in tensors), sum(t.other for t in tensors)
    what = f"changed ({other:,} inf or NaN)" if other else "changed"
    share = percent_text(share_of(tensors))
    if first.largest is None:
        return what, share, "", "", ""
    rms = math.sqrt(sum((t.rms or 0.0) ** 2 * t.elements for t in tensors) / elements)
    largest, ulps = max(t.largest or 0.0 for t in tensors), largest_ulps(*(t.ulps for t in tensors))
    return what, share, f"{largest:.3g}", f"{rms:.3g}", "" if ulps is None else f"{ulps:,}"


def share_of(tensors: Sequence[TensorDiff]) -> float:
    """The share of the compared elements of these that differ."""
    elements = sum(tensor.elements for tensor in tensors)
    return sum(tensor.changed for tensor in tensors) / elements if elements else 0.0


def percent_text(share: float) -> str:
    """``3.1 %``; a share that is not zero is never shown as zero, nor one that is not all as all."""
    if share == 1.0:
        return "100 %"
    return f"{share * 100:.2g} %" if share < 0.995 else "99.9 %" if share < 0.9995 else ">99.9 %"
