"""The page of a push: a picture of who sends how much to whom, and the sums of each rank."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from reshard.live.routing import Routes
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
    text,
)
from reshard.text import human_bytes, human_time, plural

MOST = 64
"""More ranks of a side are drawn in groups of neighbours."""
_STYLE = "svg .sent { fill: var(--error); } svg .none { fill: none; stroke: var(--line); }"


def push_page(routes: Routes, title: str, link: float) -> str:
    """The text of the page; ``link`` is how many bytes a rank sends or receives in a second."""
    pairs = routes.pairs()
    properties = [
        ("sent in all", human_bytes(routes.nbytes)),
        ("steps", f"{len(routes.ends):,}"),
        ("pairs of ranks", f"{len(pairs):,}"),
        ("the busiest trainer sends", human_bytes(max(routes.sent))),
        ("the busiest receiver receives", human_bytes(max(routes.received))),
        (f"at {human_bytes(link)}/s at least", f"{human_time(routes.bound(link))}"),
    ]
    words = (
        "A row is a trainer's rank, a column a receiver's. The darker a cell, the more bytes go that way. Each byte "
        "goes once, from one of the ranks that hold it to each that lacks it, without a gather."
    )
    picture = both_widths(lambda name, width: _matrix(routes, pairs, name, width))
    return html_page(
        "reshard plan",
        title,
        _STYLE,
        element("header", element("h1", title)),
        facts(properties),
        element("h2", "Who sends how much to whom"),
        element("p", words),
        element("figure", picture),
    )


def _matrix(routes: Routes, pairs: Counter[tuple[int, int]], name: str, width: int) -> Html:
    """The picture: a cell for each pair of ranks, or of groups of ranks."""
    rows, columns = _groups(len(routes.sent)), _groups(len(routes.received))
    of_row, of_column = _group_of(rows), _group_of(columns)
    cells = Counter[tuple[int, int]]()
    for (sender, receiver), nbytes in pairs.items():
        cells[of_row[sender], of_column[receiver]] += nbytes
    margin = int(max(len(_label("trainer", ranks)) for ranks in rows) * CHARACTER) + 10
    wide = (width - margin - 8) / len(columns)
    high = min(28.0, wide)
    frame = Frame(name, width, TOP + 20 + high * len(rows), margin, 8)
    most = max(cells.values(), default=1)
    marks = [text(margin, TOP + 12, _label("receiver", range(len(routes.received))), "label")]
    for row, ranks in enumerate(rows):
        y = TOP + 18 + row * high
        if row % max(1, round(12 / high)) == 0:
            marks.append(text(margin - 6, y + high / 2 + 4, _label("trainer", ranks), "label", "end"))
        for column, takers in enumerate(columns):
            marks.append(_cell(frame, (margin + column * wide, y, wide, high), cells[row, column], most, ranks, takers))
    return frame.svg(joined(*marks), "Who sends how much to whom", plural(len(pairs), "pair") + " of ranks")


def _cell(frame: Frame, at: Sequence[float], nbytes: int, most: int, ranks: range, receivers: range) -> Html:
    x, y, wide, high = at
    mark = rectangle("sent" if nbytes else "none", x + 1, y + 1, max(wide - 2, 1), max(high - 2, 1))
    if nbytes:
        mark = element("g", mark, opacity=f"{0.15 + 0.85 * nbytes / most:.2f}")
    title = f"{_label('trainer', ranks)} to {_label('receiver', receivers)}"
    return frame.hot(rectangle("hit", x, y, wide, high), mark, title, human_bytes(nbytes) if nbytes else "nothing")


def _groups(count: int) -> Sequence[range]:
    size = -(-count // MOST)
    return [range(begin, min(begin + size, count)) for begin in range(0, count, size)]


def _group_of(groups: Sequence[range]) -> list[int]:
    return [number for number, ranks in enumerate(groups) for _ in ranks]


def _label(role: str, ranks: range) -> str:
    return f"{role} {ranks[0]}" if len(ranks) == 1 else f"{role}s {ranks[0]} to {ranks[-1]}"
