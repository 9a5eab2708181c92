"""HTML and SVG, escaped by construction: everything that is not ``Html`` becomes text, here and in the templates.

Names of tensors come from files that nobody has to trust. A page needs nothing else.

All plots are made of a frame, the lines of a grid, and marks that tell their numbers. A mark that is hovered or
tapped shows its numbers at the top, without any script, so that a page may forbid them.
"""

from __future__ import annotations

import base64
import hashlib
import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup, escape

from reshard.formats.errors import printable
from reshard.text import human_bytes, human_time, number, percent, ratio, shorten
from reshard.version import __version__

Html = Markup
"""Text that is markup already, and is not escaped again."""


def element(tag: str, *content: object, **attributes: object) -> Html:
    """``<tag attributes>content</tag>``. Attributes that are None are left out; ``class_`` is ``class``."""
    names = {key: key.rstrip("_").replace("_", "-") for key in attributes}
    pairs = ((names[key], value) for key, value in attributes.items() if value is not None)
    written = "".join(f' {name}="{_text(value)}"' for name, value in pairs)
    return Html(f"<{tag}{written}>{joined(*content)}</{tag}>")


def joined(*content: object) -> Html:
    """The pieces one after the other; None adds nothing."""
    return Html("".join(map(_text, content)))


def _text(value: object) -> Html:
    return value if isinstance(value, Html) else Html() if value is None else escape(printable(str(value)))


_ROOT = Path(__file__).parents[2]
_TEMPLATES = Environment(
    loader=FileSystemLoader(_ROOT), autoescape=True, finalize=_text, undefined=StrictUndefined,
    trim_blocks=True, lstrip_blocks=True,
)  # fmt: skip
_TEMPLATES.filters |= {
    "number": number, "percent": percent, "ratio": ratio, "bytes": human_bytes, "time": human_time,
    "count": lambda n: f"{n:,}",
}  # fmt: skip


def html_page(template: str, title: str, line: str, **values: object) -> str:
    """The text of a page: a template such as ``verify/report/page.html`` with these values. Below it stands how the
    page was made: by the command ``line``, by which version, and when. It has the style sheet beside the template,
    behind the rules that all pages share; nothing else may be loaded or run.
    """
    sheets = Path(__file__).with_name("base.css"), (_ROOT / template).with_suffix(".css")
    style = "".join(sheet.read_text(encoding="utf-8") for sheet in sheets if sheet.is_file())
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    values |= {"title": title, "line": line, "reshard_version": __version__, "today": time.strftime("%Y-%m-%d")}
    return _TEMPLATES.get_template(template).render(values, style=Html(style), digest=digest)


WIDTHS = {"wide": 860, "narrow": 340}
"""A plot is drawn twice, and the style sheet shows the one that fits: text keeps its size."""

CHARACTER = 6.6
"""The width of a character of a name or a number, at most."""
_BOLD = 7.4
TOP = 34
"""The height of the place in which a mark's numbers are shown."""


def both_widths(draw: Callable[[str, int], Html]) -> Html:
    """The plot for wide pages and the one for narrow ones."""
    return joined(*(draw(name, width) for name, width in WIDTHS.items()))


@dataclass(frozen=True)
class Frame:
    """The size of a plot, and the margins at its sides. ``name`` is the name of its width."""

    name: str
    width: int
    height: float
    left: int
    right: int

    @property
    def middle(self) -> float:
        """The centre of a title below the plot."""
        return (self.width + self.left) / 2

    @property
    def inner(self) -> int:
        """The width of the drawing without its margins."""
        return self.width - self.left - self.right

    def svg(self, content: Html, title: str, description: str | None = None) -> Html:
        """The plot as one element."""
        hint = element("text", "Hover or tap for numbers.", class_="label hint", x=6, y=14)
        head = joined(element("title", title), element("desc", description) if description else None, hint)
        label = f"{title}. {description}" if description else title
        box = f"0 0 {self.width} {self.height:g}"
        return element("svg", head, content, class_=self.name, viewBox=box, role="img", aria_label=label)

    def across(self, y: float, kind: str = "grid") -> Html:
        """A line from side to side."""
        return line(kind, self.left, y, self.width - self.right, y)

    def grid_line(self, y: float, label: str) -> Html:
        """A line of the grid, with its label at the left."""
        return joined(self.across(y), text(self.left - 6, y + 4, label, "label", "end"))

    def limit(self, y: float, label: str) -> Html:
        """A line that is not to be passed, with its label above it."""
        return joined(self.across(y, "factor"), text(self.width - self.right - 2, y - 5, label, "factor-label", "end"))

    def labels_below(self, labels: Iterable[tuple[float, str]], y: float) -> Iterator[tuple[float, Html]]:
        """The labels for which there is room, each with its place."""
        free = 0.0
        for x, label in labels:
            half = len(label) * CHARACTER / 2
            if x - half >= free and x + half <= self.width:
                free = x + half + 8
                yield x, text(x, y, label, "label", "middle")

    def hot(self, hit: Html, marks: Html, title: str, numbers: str) -> Html:
        """Marks that show their numbers when ``hit`` is hovered or tapped."""
        name = shorten(printable(title), int((self.width - 8) / _BOLD))
        shortened = shorten(numbers, int((self.width - 8) / CHARACTER), keep_beginning=True)
        tip = element(
            "g",
            element("rect", x=0, y=0, width=self.width, height=TOP),
            element("text", name, class_="title", x=6, y=13),
            element("text", shortened, x=6, y=28),
            class_="tip",
        )
        return element("g", element("title", f"{title}: {numbers}"), hit, marks, tip, class_="place", tabindex=-1)


def line(kind: str, x1: float, y1: float, x2: float, y2: float) -> Html:
    """A line."""
    return element("line", class_=kind, x1=rounded(x1), y1=rounded(y1), x2=rounded(x2), y2=rounded(y2))


def rectangle(kind: str, x: float, y: float, width: float, height: float) -> Html:
    """A rectangle; of no height, where ``height`` is negative."""
    sizes = {"width": rounded(width), "height": rounded(max(height, 0))}
    return element("rect", class_=kind, x=rounded(x), y=rounded(y), **sizes)


def circle(kind: str, x: float, y: float, radius: float) -> Html:
    """A circle."""
    return element("circle", class_=kind, cx=rounded(x), cy=rounded(y), r=rounded(radius))


def text(x: float, y: float, words: str, kind: str, anchor: str | None = None) -> Html:
    """A text, which begins at ``x``, or ends or is centred there."""
    return element("text", words, class_=kind, x=rounded(x), y=rounded(y), text_anchor=anchor)


def rounded(x: float) -> str:
    """A coordinate as it is written."""
    return f"{x:.1f}".removesuffix(".0")


class Cell(NamedTuple):
    """A cell of a matrix: its class (``some``, ``none``, ``other``), how dark it is (0 to 1), and what it tells."""

    kind: str
    opacity: float
    name: str
    numbers: str
    shown: str = ""
    """The text in the cell, if there is room."""


def matrix(
    rows: Sequence[tuple[str, Sequence[Cell | None]]], columns: Sequence[str], title: str, description: str,
    widest: float = math.inf,
) -> Html:  # fmt: skip
    """A picture of rows with a label each, and a cell for each column, of at most this width; None for no cell."""

    def draw(name: str, width: int) -> Html:
        labels = [shorten(label, int(width * 0.45 / CHARACTER)) for label, _ in rows]
        margin = int(max(map(len, labels)) * CHARACTER) + 12
        wide = min(widest, (width - margin - 8) / len(columns))
        high, marks = min(28.0, max(16.0, wide)), list[Html]()
        frame = Frame(name, width, TOP + 22 + high * len(rows), margin, 8)
        if len(columns) > 1:
            places = ((margin + (i + 0.5) * wide, label) for i, label in enumerate(columns))
            marks += [label for _, label in frame.labels_below(places, TOP + 12)]
        for row, (label, (_, cells)) in enumerate(zip(labels, rows, strict=True)):
            y = TOP + 18 + row * high
            marks.append(text(margin - 6, y + high / 2 + 4, label, "label", "end"))
            for x, cell in ((margin + column * wide, cell) for column, cell in enumerate(cells) if cell is not None):
                mark = rectangle(cell.kind, x + 0.5, y + 1, max(wide - 1, 1), high - 2)
                dark = mark if cell.opacity == 1 else element("g", mark, opacity=f"{cell.opacity:.2f}")
                marks.append(frame.hot(rectangle("hit", x, y, wide, high), dark, cell.name, cell.numbers))
                if cell.shown and len(cell.shown) * CHARACTER < wide:
                    marks.append(text(x + wide / 2, y + high / 2 + 4, cell.shown, "number", "middle"))
        return frame.svg(joined(*marks), title, description)

    return both_widths(draw)


def groups(count: int, most: int) -> Sequence[range]:
    """So many rows or columns in groups of neighbours: at most ``most``."""
    size = -(-count // most)
    return [range(begin, min(begin + size, count)) for begin in range(0, count, size)]
