"""Draws docs/pictures/profile-widths.svg: throughput against width, by ``reshard profile --widths A..B --json``.

python -m tools.profile_figure FOUND.json docs/pictures/profile-widths.svg
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from reshard.pages.markup import Html, element, joined
from verify.profile import page
from verify.profile import page as charts

WIDTH, HEIGHT, GAP, TOP = 340, 300, 16, 64
LIGHT = "--back:#fff;--panel:#fff;--text:#1b1f24;--muted:#57606a;--line:#d0d7de;"
DARK = "--back:#0f1317;--panel:#0f1317;--text:#e6edf3;--muted:#a5afb9;--line:#343c45;"
RULES = """
text { font: 11px system-ui, sans-serif; fill: var(--text); } .label { fill: var(--muted); }
.head { font-size: 13px; font-weight: 600; } .grid { stroke: var(--line); } .tip, .hit, .hint { display: none; }
.ground { fill: var(--back); }
"""


def figure(rows: Sequence[dict[str, Any]]) -> str:
    """The text of an SVG file with a plot for each block, side by side."""
    plots = [*page.width_lines(rows)]
    width = len(plots) * (WIDTH + GAP) + GAP
    style = (Path(charts.__file__).parent / "page.css").read_text(encoding="utf-8")
    ground = f":root{{{LIGHT}}}@media (prefers-color-scheme: dark){{:root{{{DARK}}}}}"
    parts = [element("style", Html(ground + style + RULES)), element("rect", class_="ground", width=width, height=400)]
    for number, (title, lines) in enumerate(plots):
        left = GAP + number * (WIDTH + GAP)
        plot = charts.plain_plot(title, lines, page.WIDTH_AXES)
        parts.append(element("text", title, class_="head", x=left, y=22))
        parts.append(_legend([line.name for line in lines], left))
        placed = f'<svg x="{left}" y="{TOP - 20}" width="{WIDTH}" height="{HEIGHT}" '
        parts.append(Html(plot.replace("<svg ", placed, 1)))
    attributes = {"xmlns": "http://www.w3.org/2000/svg", "viewBox": f"0 0 {width} {TOP + HEIGHT - 10}"}
    return element("svg", *parts, **attributes) + "\n"


def _legend(names: Sequence[str], left: float) -> Html:
    parts = []
    for number, name in enumerate(names):
        x = left + 8 + 56 * number
        parts.append(charts.mark(x, 40, f"mark c{number % charts.COLOURS}", number))
        parts.append(element("text", name, x=x + 9, y=44))
    dashes = element("line", class_="line predicted c0", x1=left + WIDTH - 98, x2=left + WIDTH - 74, y1=40, y2=40)
    return joined(*parts, dashes, element("text", "predicted", x=left + WIDTH - 68, y=44))


if __name__ == "__main__":
    found, drawn = map(Path, sys.argv[1:])
    drawn.write_text(figure(json.loads(found.read_text(encoding="utf-8"))["widths"]), encoding="utf-8")
