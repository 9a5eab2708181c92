"""The result of a profile, in words and as a JSON document. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from reshard.model.model import Model
from reshard.profile.cost import DegreeRow, LinkRate, Recommendation, Time
from reshard.text import Result, align, human_bytes, human_time, plural

if TYPE_CHECKING:
    from reshard.profile.job import LayerKind
    from reshard.profile.processes import Node

STEP = {
    "decode": "one token of each sequence",
    "prefill": "all tokens at once",
    "train": "forward and backward, without optimizer states",
}
"""The work of a step in each phase."""


@dataclass(frozen=True, repr=False)
class Profile(Result):
    """The result of a profile."""

    source: str
    model: Model
    kinds: tuple[LayerKind, ...]
    node: Node
    dtype: str
    backend: str
    """The library of the collectives: ``nccl`` or ``gloo``, say."""
    device: str
    parameters: int
    rows: tuple[DegreeRow, ...]
    refused: tuple[tuple[int, str], ...]
    """The degrees that are not possible, and why."""
    links: tuple[LinkRate, ...]
    """The cost of an all-reduce over each number of ranks, fitted to those that were ``measured``."""
    recommended: Recommendation

    @property
    def headline(self) -> str:
        """The recommended degree, and why."""
        best = self.recommended
        return f"Recommended: {f'tp {best.tp}' if best.tp else 'none'}. {best.reason[:1].upper()}{best.reason[1:]}."

    def to_text(self, width: int | None = None) -> str:
        """A table for each workload, and the recommendation."""
        kinds = ", ".join(f"{kind.part} ({kind.count} alike)" for kind in self.kinds)
        node = self.node
        ranks = (
            "a GPU each" if node.device != "cpu"
            else f"{plural(node.threads, 'thread')} each, {plural(node.cores, 'core')} in all"
        )  # fmt: skip
        lines = [
            f"{self.source}: {human_count(self.parameters)} parameters, {self.dtype}; timed: {kinds}, embedding and "
            "head",
            f"ranks: {self.device}, {self.backend}, {ranks}",
            *(f"tp {degree} is not possible: {why}" for degree, why in self.refused),
        ]
        for workload in dict.fromkeys(row.workload for row in self.rows):
            rows = [row for row in self.rows if row.workload == workload]
            cells = lines_of([_row(row) for row in rows])
            right = [i for i, name in enumerate(cells[0]) if name != "fits"]
            table = align([[*cells[0]], *([*line.values()] for line in cells)], right=right, width=None)
            lines += ["", f"{workload}: {STEP[workload.phase]}", *table]
            lines += [f"tp {row.tp} was not run: {row.not_run.why}" for row in rows if row.not_run]
            lines += _differences(rows)
        lines.append("")
        for link in self.links:
            latency, speed = human_time(link.latency), human_bytes(link.bandwidth)
            lines.append(f"all-reduce over {link.ranks} ranks: {latency}, then {speed}/s")
        alone = (f"For {workload} alone: tp {degree}." for workload, degree in self.recommended.alone)
        return "\n".join([*lines, self.headline, *alone])


def lines_of(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, str]]:
    """The lines of a table of rows of the document, each by the names of the columns."""
    gradients = ["gradients"] if any(row["memory"]["gradients"] for row in rows) else []
    return [_cells(row, ("weights", *gradients, "cache", "activations")) for row in rows]


def _cells(row: Mapping[str, Any], parts: Iterable[str]) -> dict[str, str]:
    memory, time, how = row["memory"], row["measured"] or row["predicted"], "" if row["measured"] else "~"
    return {
        "tp": str(row["tp"]),
        "tokens/s": f"{how}{human_rate(row['tokens_per_second'])}" if row["tokens_per_second"] else "–",
        "a step": f"{how}{human_time(time['seconds'])}" if time else "–",
        "collectives": f"{time['collectives'] / time['seconds']:.0%}" if time and time["seconds"] else "–",
        **{part: human_bytes(memory[part]) for part in parts},
        "a rank": human_bytes(memory["total"]),
        "room for": f"{row['sequences']:,} x {row['seq']:,}" if row["sequences"] is not None else "–",
        "fits": "yes" if row["fits"] else "no",
        "prediction": error_text(row["prediction_error"]) if row["measured"] else "not measured",
    }


def _differences(rows: Sequence[DegreeRow]) -> Iterator[str]:
    """Yield a line for each degree at which the ranks sum more, or less, than the plan states."""
    for row in rows:
        if row.measured is not None and row.measured.reduced != row.stated:
            reduced, stated = (nbytes // row.workload.tokens for nbytes in (row.measured.reduced, row.stated))
            yield f"tp {row.tp}: {human_bytes(reduced)} a token in all-reduces; the plan states {human_bytes(stated)}"


def error_text(error: float | None) -> str:
    """Return the error of a predicted time in words, relative to the measured one; a dash for None."""
    if error is None:
        return "–"
    return f"{abs(error):.0%} too {'long' if error > 0 else 'short'}"


def human_rate(rate: float) -> str:
    """Tokens per second: three digits, or whole numbers."""
    return f"{rate:,.0f}" if rate >= 99.5 else f"{rate:.3g}"


def human_count(count: int) -> str:
    """``8.03 billion``."""
    for word, scale in (("billion", 1e9), ("million", 1e6)):
        if count >= scale:
            return f"{count / scale:.3g} {word}"
    return f"{count:,}"


# --------------------------------------------------------------------------------------------------------- document


def document_of(result: Profile) -> dict[str, Any]:
    """The profile as JSON: seconds, bytes and tokens per second."""
    return {
        "dtype": result.dtype,
        "parameters": result.parameters,
        "device": result.device or result.node.device,
        "backend": result.backend,
        "cores": result.node.cores,
        "threads_per_rank": result.node.threads,
        "layers": [{"part": kind.part, "count": kind.count} for kind in result.kinds],
        "refused": [{"tp": degree, "reason": why} for degree, why in result.refused],
        "rows": [_row(row) for row in result.rows],
        "all_reduce": [_link(link) for link in result.links],
        "recommended": {
            "tp": result.recommended.tp,
            "reason": result.recommended.reason,
            "alone": [{**asdict(work), "tp": degree} for work, degree in result.recommended.alone],
        },
    }


def _row(row: DegreeRow) -> dict[str, Any]:
    memory = row.memory
    return {
        "tp": row.tp,
        **asdict(row.workload),
        "tokens_per_second": row.rate or None,
        "measured": _time(row.measured),
        "predicted": _time(row.predicted),
        "prediction_error": row.error,
        "memory": {**asdict(memory), "total": memory.total, "capacity": row.capacity},
        "fits": row.fits,
        "sequences": row.sequences,
        "all_reduce_bytes_per_token": row.measured.reduced / row.workload.tokens if row.measured else None,
        "all_reduce_bytes_per_token_of_plan": row.stated / row.workload.tokens,
        "not_run": row.not_run.why if row.not_run else None,
    }  # fmt: skip


def _time(time: Time | None) -> dict[str, Any] | None:
    if time is None:
        return None
    document = {"seconds": time.seconds, **asdict(time)}
    del document["reduced"]
    return document


def _link(link: LinkRate) -> dict[str, Any]:
    return {**asdict(link), "measured": [{"bytes": nbytes, "seconds": seconds} for nbytes, seconds in link.measured]}
