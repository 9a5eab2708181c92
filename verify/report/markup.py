"""HTML and SVG that are escaped by construction: whatever is not marked as ready markup becomes text.

Names of tensors come from files that nobody has to trust.
"""

from __future__ import annotations

import html
import math
from typing import Any


class Html(str):
    """Markup that is ready."""

    __slots__ = ()


def element(tag: str, *content: object, **attributes: object) -> Html:
    """``<tag attributes>content</tag>``. Attributes that are None are left out; ``class_`` is ``class``."""
    names = {key: key.rstrip("_").replace("_", "-") for key in attributes}
    given = ((names[key], value) for key, value in attributes.items() if value is not None)
    written = "".join(f' {name}="{_text(value)}"' for name, value in given)
    return Html(f"<{tag}{written}>{joined(*content)}</{tag}>")


def void(tag: str, **attributes: object) -> Html:
    """An element that has no content and no end, ``<meta …>``."""
    return Html(element(tag, **attributes).removesuffix(f"</{tag}>"))


def joined(*content: object) -> Html:
    """Several pieces, one after the other; None is nothing."""
    return Html("".join(c if isinstance(c, Html) else _text(c) for c in content if c is not None))


def _text(value: object) -> str:
    return html.escape(printable(str(value)))


def printable(text: str) -> str:
    """The text with each character that a terminal or browser would act upon (escapes, bidirectional marks) spelled."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c == "\n" else c.encode("unicode_escape").decode() for c in text)


def to_number(value: Any) -> float:
    """A number of a document, in which those that JSON has not are ``"inf"``, ``"-inf"`` and ``"nan"``. None is NaN."""
    try:
        return float(value)
    except (TypeError, ValueError):
        return math.nan


def number(value: Any, form: str = ".2e") -> str:
    """A number for people: ``1.23e-04``, ``0``, ``∞``, ``not a number``, and a dash for none at all."""
    if value is None:
        return "–"
    x = to_number(value)
    if math.isnan(x):
        return "not a number"
    if math.isinf(x):
        return "∞" if x > 0 else "−∞"
    return "0" if x == 0 else format(x, form)


def percent(value: Any) -> str:
    """A part of a whole: ``1.23%``, or ``1.23e-06`` where that would be next to nothing."""
    return number(value, ".2%" if to_number(value) >= 1e-3 else ".2e")


def ratio(value: Any) -> str:
    """A ratio: two digits after the point where it is small, else three digits in all."""
    x = to_number(value)
    return number(value, ".2f" if abs(x) < 100 else ",.0f" if abs(x) < 1e6 else ".2e")
