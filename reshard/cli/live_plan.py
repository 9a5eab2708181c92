"""What ``reshard plan --from --to`` prints: who sends how much to whom in a push, without a process."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from reshard.cli.printing import print_json, print_lines
from reshard.text import align, human_bytes, human_time, plural

if TYPE_CHECKING:
    from reshard.live.routing import Routes

MOST = 16
"""Of more ranks on a side, those that send or receive as much are shown as one line."""


def print_push(routes: Routes, source: str, ends: tuple[str, str], link: float, as_json: bool) -> None:
    """Print the plan of a push of a checkpoint's model between two programs."""
    if as_json:
        print_json({"command": "plan", "source": source, "from": ends[0], "to": ends[1], **document(routes, link)})
        return
    cells = [("", "sends", "receives")]
    cells += [(name, human_bytes(count), "") for name, count in _rows("trainer", routes.sent)]
    cells += [(name, "", human_bytes(count)) for name, count in _rows("receiver", routes.received)]
    most = "sends" if max(routes.sent) > max(routes.received) else "receives"
    print_lines(
        f"{source}: {ends[0]} -> {ends[1]}, {human_bytes(routes.nbytes)} in {plural(len(routes.ends), 'step')}", "",
        *align(cells, right=(1, 2), width=None), "",
        f"At least {human_time(routes.bound(link))}, by what the busiest {most} at {human_bytes(link)}/s.",
    )  # fmt: skip


def document(routes: Routes, link: float) -> dict[str, Any]:
    """The numbers of a plan for JSON."""
    return {
        "bytes": routes.nbytes,
        "sent": list(routes.sent),
        "received": list(routes.received),
        "steps": len(routes.ends),
        "link": link,
        "seconds_at_least": routes.bound(link),
        "digest": routes.digest,
    }


def _rows(role: str, counts: Sequence[int]) -> Iterator[tuple[str, int]]:
    """A line for each rank, or for neighbours with the same number of bytes."""
    first = 0
    for number in range(1, len(counts) + 1):
        if number == len(counts) or len(counts) <= MOST or counts[number] != counts[first]:
            name = f"{role} {first}" if number == first + 1 else f"{role}s {first} to {number - 1}, each"
            yield name, counts[first]
            first = number
