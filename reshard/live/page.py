"""The page of a push: a picture of who sends how much to whom, and the sums of each rank."""

from __future__ import annotations

from collections import Counter

from reshard.live.routing import Routes
from reshard.pages.markup import Cell, groups, html_page, matrix
from reshard.text import human_bytes, human_time, plural

MOST = 64
"""More ranks of a side are drawn in groups of neighbours."""


def page(routes: Routes, title: str, link: float, line: str = "reshard live") -> str:
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
    trainers, receivers = groups(len(routes.sent), MOST), groups(len(routes.received), MOST)
    sums = Counter[tuple[int, int]]()
    for (sender, receiver), nbytes in pairs.items():
        sums[sender // len(trainers[0]), receiver // len(receivers[0])] += nbytes
    most = max(sums.values(), default=1)

    def cell(row: int, column: int) -> Cell:
        name = f"{_label('trainer', trainers[row])} to {_label('receiver', receivers[column])}"
        if not (nbytes := sums[row, column]):
            return Cell("none", 1, name, "nothing")
        size = human_bytes(nbytes)
        return Cell("some", 0.15 + 0.85 * nbytes / most, name, size, size)

    rows = [
        (_label("trainer", ranks), [cell(row, column) for column in range(len(receivers))])
        for row, ranks in enumerate(trainers)
    ]
    labels, description = [_label("receiver", ranks) for ranks in receivers], plural(len(pairs), "pair") + " of ranks"
    picture = matrix(rows, labels, "Who sends how much to whom", description)
    return html_page("reshard/live/page.html", title, line, properties=properties, picture=picture)


def _label(role: str, ranks: range) -> str:
    return f"{role} {ranks[0]}" if len(ranks) == 1 else f"{role}s {ranks[0]} to {ranks[-1]}"
