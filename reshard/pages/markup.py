"""HTML and SVG, escaped by construction: everything that is not ``Html`` becomes text.

Names of tensors come from files that nobody has to trust.
"""

from __future__ import annotations

import html
import math
from typing import Any

from formats.errors import printable


class Html(str):
    """Text that is markup already, and is not escaped again."""

    __slots__ = ()


def element(tag: str, *content: object, **attributes: object) -> Html:
    """``<tag attributes>content</tag>``. Attributes that are None are left out; ``class_`` is ``class``."""
    names = {key: key.rstrip("_").replace("_", "-") for key in attributes}
    given = ((names[key], value) for key, value in attributes.items() if value is not None)
    written = "".join(f' {name}="{_text(value)}"' for name, value in given)
    return Html(f"<{tag}{written}>{joined(*content)}</{tag}>")


def void(tag: str, **attributes: object) -> Html:
    """An element without content and end tag: ``<meta …>``."""
    return Html(element(tag, **attributes).removesuffix(f"</{tag}>"))


def joined(*content: object) -> Html:
    """The pieces one after the other; None adds nothing."""
    return Html("".join(c if isinstance(c, Html) else _text(c) for c in content if c is not None))


def _text(value: object) -> str:
    return html.escape(printable(str(value)))


def to_number(value: Any) -> float:
    """The float that a document means: ``"inf"``, ``"-inf"`` and ``"nan"`` stand in it as text. None becomes NaN."""
    try:
        return float(value)
    except (TypeError, ValueError):
        return math.nan


def number(value: Any, form: str = ".2e") -> str:
    """A number as text: ``1.23e-04``, ``0``, ``∞``, ``not a number``; a dash for None."""
    if value is None:
        return "–"
    x = to_number(value)
    if math.isnan(x):
        return "not a number"
    if math.isinf(x):
        return "∞" if x > 0 else "−∞"
    return "0" if x == 0 else format(x, form)


def percent(value: Any) -> str:
    """A fraction as text: ``1.23%``; below 0.1 % ``1.23e-06``."""
    return number(value, ".2%" if to_number(value) >= 1e-3 else ".2e")


def ratio(value: Any) -> str:
    """A ratio as text: two decimals below 100, whole numbers below a million, else three digits and an exponent."""
    x = to_number(value)
    return number(value, ".2f" if abs(x) < 100 else ",.0f" if abs(x) < 1e6 else ".2e")
