"""Draws the pictures of docs/pictures: from the library's plans, and from what a page of the docs shows.

``python -m tools.pictures``. They have no ground of their own, and are readable on white and on black.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from reshard.formats.mesh import Mesh
from reshard.formats.notation.architecture_files import BUILT_IN, load_architecture
from reshard.mesh.plan import make_plan
from reshard.model.binding import bind
from reshard.model.model import FullTensor
from reshard.pages.markup import Html, element
from reshard.verify.forward.noise import LIMIT

DOCS = Path(__file__).parents[1] / "docs"
WIDTH = 780
INK = "#767676"
"""The colour of lines and text: its contrast is 4.5 to 1 both on white and on black."""
RANKS = ("#8ab8f0", "#f2b36b", "#86cfa4", "#d7a3e3")
"""A colour for each rank, on which black text is readable."""
STYLE = f"""
text {{ font: 13px system-ui, sans-serif; fill: {INK}; }}
.head {{ font-weight: 600; font-size: 14px; }}
.code {{ font-family: ui-monospace, monospace; font-size: 12px; }}
.on {{ fill: #000; }}
.line {{ stroke: {INK}; fill: none; }}
"""


def drawing(height: int, title: str, *parts: Html) -> str:
    """The text of an SVG file."""
    named = [element("title", title), element("style", Html(STYLE))]
    sizes = {"width": WIDTH, "height": height, "viewBox": f"0 0 {WIDTH} {height}"}
    return element("svg", *named, *parts, xmlns="http://www.w3.org/2000/svg", role="img", **sizes) + "\n"


def text(x: float, y: float, content: str, kind: str | None = None, anchor: str | None = None) -> Html:
    """One line of text; ``anchor`` is ``middle`` or ``end`` where it is not the start."""
    return element("text", content, x=round(x, 1), y=round(y, 1), class_=kind, text_anchor=anchor)


def box(x: float, y: float, width: float, height: float, fill: str = "none") -> Html:
    """A rectangle."""
    place = {"x": round(x, 1), "y": round(y, 1), "width": round(width, 1), "height": height}
    return element("rect", **place, rx=3, class_="line", style=None if fill == "none" else f"fill:{fill}")


def line(x1: float, y1: float, x2: float, y2: float, dash: str | None = None) -> Html:
    """A straight line."""
    places = {"x1": round(x1, 1), "y1": round(y1, 1), "x2": round(x2, 1), "y2": round(y2, 1)}
    return element("line", **places, class_="line", stroke_dasharray=dash)


# ---------------------------------------------------------------------------------------------------------- four things

THINGS = (
    ("model", ("what each dimension", "of each tensor means"), ("formats/architectures/", "reshard/model/")),
    ("mesh", ("which runs of an axis", "a rank has"), ("reshard/mesh/",)),
    ("format", ("under which names, in", "which order and files"), ("formats/programs/", "formats/files/")),
    ("store", ("where ranges of", "bytes are"), ("formats/store.py", "reshard/store/")),
)
COLUMN, BOX = 200, 176


def four_things() -> str:
    """Model and mesh make a plan, plan and format an arrangement, two arrangements and a store a move."""
    parts = []
    for number, (name, lines, places) in enumerate(THINGS):
        left = 2 + number * COLUMN
        parts.append(box(left, 4, BOX, 112))
        parts.append(text(left + BOX / 2, 26, name, "head", "middle"))
        parts += [text(left + BOX / 2, 48 + 17 * row, each, None, "middle") for row, each in enumerate(lines)]
        parts += [text(left + BOX / 2, 88 + 17 * row, each, "code", "middle") for row, each in enumerate(places)]
    middles = [2 + number * COLUMN + BOX / 2 for number in range(len(THINGS))]
    steps = (
        ("plan", "what each rank owns of a tensor", "reshard/mesh/plan.py"),
        ("arrangement", "where each element lies in the files", "reshard/placement/"),
        ("moves", "from the source's arrangement to the target's", "reshard/move/"),
    )
    left_end = middles[0]
    for number, (name, what, place) in enumerate(steps):
        right, top = middles[number + 1], 150 + 84 * number
        start = 116 if number == 0 else top - 34
        parts.append(line(left_end, start, left_end, top))
        parts.append(line(right, 116, right, top))
        parts.append(box(left_end - 40, top, right - left_end + 80, 50, RANKS[number]))
        middle = (left_end + right) / 2
        parts.append(text(middle, top + 20, f"{name}: {what}", "on", "middle"))
        parts.append(text(middle, top + 39, place, "on code", "middle"))
        left_end = middle
    return drawing(
        372, "A model and a mesh make a plan, with a format an arrangement; moves go through a store", *parts
    )


# -------------------------------------------------------------------------------------------------------- packed weight

HEADS, KV, HEAD = 8, 4, 4
CONFIG = {
    "model_type": "phi3", "hidden_size": HEADS * HEAD, "intermediate_size": 16, "num_hidden_layers": 1,
    "num_attention_heads": HEADS, "num_key_value_heads": KV, "vocab_size": 8,
}  # fmt: skip
NAMES = [*(f"q{i}" for i in range(HEADS)), *(f"k{i}" for i in range(KV)), *(f"v{i}" for i in range(KV))]
"""The heads of the packed weight, in the order of its rows."""


def by_heads() -> tuple[str, list[list[int]]]:
    """The rule of phi3's qkv_proj, and for each of four ranks the places of its heads in the weight: by the plan."""
    name = "model.layers.0.self_attn.qkv_proj.weight"
    tensors = [FullTensor(name, "BF16", (len(NAMES) * HEAD, HEADS * HEAD), "phi3")]
    architecture = load_architecture(BUILT_IN / "phi3.toml")
    plan = make_plan(bind(architecture, CONFIG, tensors), Mesh((("tp", len(RANKS)),)))
    layout = plan.layouts[name]
    rows = [[row for run in runs for row in range(run.offset, run.offset + run.length)] for runs in layout.runs(0)]
    return str(layout.rule), [sorted({row // HEAD for row in owned}) for owned in rows]


def by_chunks() -> list[list[int]]:
    """The same of ``torch.chunk``: equal parts of the rows, whatever they mean."""
    each = len(NAMES) // len(RANKS)
    return [[*range(rank * each, (rank + 1) * each)] for rank in range(len(RANKS))]


def packed() -> str:
    """The heads of a packed weight, coloured by the rank that gets them, cut in two ways."""
    rule, right = by_heads()
    shape = f"qkv_proj.weight of a phi3 with {HEADS} query heads on {KV} KV heads, for {len(RANKS)} ranks"
    parts = [text(2, 18, shape, "head"), text(2, 38, f'rule: "{rule}"', "code")]
    wrong = "every shape is right, but ranks 0 and 1 have no key, and rank 2 has nothing else."
    parts += _cut(62, f"Equal chunks: {wrong}", by_chunks())
    parts += _cut(222, "By heads: each query has the key and the value of its own group on its rank.", right)
    return drawing(372, "A packed weight of q, k and v, cut into equal chunks and by heads", *parts)


def _cut(top: int, title: str, owned: Sequence[Sequence[int]]) -> Iterator[Html]:
    width = (WIDTH - 4) / len(NAMES)
    rank_of = {place: rank for rank, places in enumerate(owned) for place in places}
    yield text(2, top + 14, title)
    for place, name in enumerate(NAMES):
        yield box(2 + place * width, top + 24, width, 32, RANKS[rank_of[place]])
        yield text(2 + (place + 0.5) * width, top + 45, name, "on", "middle")
    for rank, places in enumerate(owned):
        left = 2 + rank * 4 * width
        yield text(left + 4, top + 84, f"rank {rank}")
        for number, place in enumerate(places):
            yield box(left + 4 + number * 40, top + 92, 38, 28, RANKS[rank])
            yield text(left + 23 + number * 40, top + 111, NAMES[place], "on", "middle")


# ---------------------------------------------------------------------------------------------------------------- noise

LEFT, STEP = 250, 22


def rows_of(page: str) -> dict[str, tuple[float, float]]:
    """Error and noise of each place, from the output of ``reshard verify`` that a page shows."""
    shown = re.search(r"<!-- verify, by make docs -->\n(.*?)<!-- end -->", page, re.DOTALL)
    assert shown is not None
    found = re.findall(r"^(\S+) +(\d\S*e-\d+) +(\d\S*e-\d+) +\d+\.\d+$", shown[1], re.MULTILINE)
    return {name: (float(error), float(noise)) for name, error, noise in found}


def noise(rows: Mapping[str, tuple[float, float]]) -> str:
    """Error, noise and limit at each place, on a logarithmic scale."""
    values = [*(error for error, _ in rows.values()), *(LIMIT * noise for _, noise in rows.values())]
    low, high = 10 ** math.floor(math.log10(min(values))), 10 ** math.ceil(math.log10(max(values)))
    bottom = 62 + STEP * len(rows)

    def across(value: float) -> float:
        return LEFT + (WIDTH - LEFT - 24) * math.log(value / low) / math.log(high / low)

    parts = [text(2, 18, "Error and noise of each layer, relative to its values", "head"), *_legend()]
    decade = low
    while decade <= high * 1.01:
        for tick in (decade, 2 * decade, 5 * decade):
            if tick <= high * 1.01:
                parts.append(line(across(tick), 52, across(tick), bottom, "1 5"))
                parts.append(text(across(tick), bottom + 18, f"{tick:g}", None, "middle"))
        decade *= 10
    for number, (name, (error, own)) in enumerate(rows.items()):
        y = 66 + STEP * number
        parts.append(text(LEFT - 10, y + 4, name.removeprefix("model."), "code", "end"))
        parts.append(line(across(low), y, across(LIMIT * own), y))
        parts.append(_bar(across(own), y, RANKS[0]))
        parts.append(_bar(across(LIMIT * own), y, RANKS[1]))
        parts.append(_dot(across(error), y))
    return drawing(bottom + 28, "Error, noise and limit of each layer of the demo's model", *parts)


def _legend() -> Iterator[Html]:
    yield _dot(LEFT + 6, 36)
    yield text(LEFT + 16, 40, "error of the shards")
    yield _bar(LEFT + 156, 36, RANKS[0])
    yield text(LEFT + 166, 40, "noise of the original")
    yield _bar(LEFT + 316, 36, RANKS[1])
    yield text(LEFT + 326, 40, f"limit: {LIMIT:g} times the noise")


def _bar(x: float, y: float, fill: str) -> Html:
    return element("rect", x=round(x - 3, 1), y=y - 7, width=6, height=14, class_="line", style=f"fill:{fill}")


def _dot(x: float, y: float) -> Html:
    return element("circle", cx=round(x, 1), cy=y, r=5, class_="line", style=f"fill:{RANKS[2]}")


def pictures() -> dict[str, str]:
    """All of them, by the names of their files."""
    page = (DOCS / "tutorial.md").read_text(encoding="utf-8")
    return {"four-things.svg": four_things(), "packed.svg": packed(), "noise.svg": noise(rows_of(page))}


def main() -> None:
    """Write them."""
    for name, drawn in pictures().items():
        (DOCS / "pictures" / name).write_text(drawn, encoding="utf-8")


if __name__ == "__main__":
    main()
