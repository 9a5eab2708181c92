"""Throughput against width: the blocks of verify/profile/widths.py, measured and predicted. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from verify.profile.compose import joined
from verify.profile.cost import Link, Work, communication, fit_rates
from verify.profile.job import WIDTH_BLOCKS, WIDTH_HEAD, WIDTH_TOKENS, Found


@dataclass(frozen=True)
class WidthRow:
    """One block at one width and degree: the seconds of a pass, and those of them in collectives."""

    block: str
    width: int
    tp: int
    seconds: float
    collectives: float
    is_measured: bool

    @property
    def rate(self) -> float:
        """Tokens per second through the block."""
        return WIDTH_TOKENS / self.seconds if self.seconds else 0.0


def numbers_of(block: str, width: int) -> int:
    """The elements of a block's weights, all ranks together."""
    return (4 if block == "attention" else 8) * width**2


def work_of(block: str, width: int, ranks: int, itemsize: int) -> Work:
    """What one rank does in a pass through a block: a weight's element counts 2 operations a token."""
    numbers = numbers_of(block, width) // ranks
    scores = 2.0 * WIDTH_TOKENS**2 * width / ranks if block == "attention" else 0.0
    row = WIDTH_TOKENS * width * itemsize
    reduced = (row,) if ranks > 1 and block != "mlp, gathered" else ()
    gathered = 5 * row // ranks if ranks > 1 and block == "mlp, gathered" else 0
    return Work(2.0 * numbers * WIDTH_TOKENS + scores, float(numbers * itemsize), reduced, gathered)


def width_rows(
    found: Mapping[int, Sequence[Found]], links: Mapping[int, Link | None], widths: Sequence[int], itemsize: int
) -> tuple[WidthRow, ...]:
    """All blocks at all widths and degrees at which they are possible; ``links`` has the degrees.

    What was not measured has the rates of the other widths at that degree, or else at the largest degree that ran.
    """
    rows = []
    for block in WIDTH_BLOCKS:
        times = {degree: _measured(block, ranks) for degree, ranks in found.items()}
        points = {
            degree: [(work_of(block, width, degree, itemsize), row.seconds - row.collectives)
                     for width, row in of_degree.items()]
            for degree, of_degree in times.items()
        }  # fmt: skip
        rates = {degree: fit_rates(known) for degree, known in points.items() if known}
        for degree, link in links.items():
            own = rates.get(degree) or (rates[max(rates)] if rates else None)
            for width in widths:
                measured = times.get(degree, {}).get(width)
                if measured is not None:
                    rows.append(measured)
                elif own is not None and not width % (WIDTH_HEAD * degree) and (link or degree == 1):
                    work = work_of(block, width, degree, itemsize)
                    sent = communication(work, link)
                    rows.append(WidthRow(block, width, degree, own.seconds(work) + sent, sent, is_measured=False))
    return tuple(rows)


def _measured(block: str, ranks: Sequence[Found]) -> dict[int, WidthRow]:
    """What all ranks of a degree found, by width."""
    rows = {}
    for of_ranks in zip(*(rank.widths for rank in ranks), strict=True):
        if of_ranks[0].block == block:
            spans, _ = joined([each.steps for each in of_ranks])
            sent = sum(span.seconds for span in spans if span.what.startswith("all-"))
            seconds, width = sum(span.seconds for span in spans), of_ranks[0].width
            rows[width] = WidthRow(block, width, len(ranks), seconds, sent, is_measured=True)
    return rows
