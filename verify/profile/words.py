"""The result of a profile, in words and as a JSON document. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from reshard.model.model import Model
from reshard.text import Result, align, human_bytes, human_time, plural
from verify.profile.cost import Link, Recommendation, Row, Time
from verify.profile.job import Workload

if TYPE_CHECKING:
    from verify.profile.job import LayerKind
    from verify.profile.processes import Node

_STEP = {
    "decode": "one token of each sequence",
    "prefill": "all tokens at once",
    "train": "forward and backward, without optimizer states",
}


@dataclass(frozen=True, repr=False)
class Profile(Result):
    """The result of a profile. ``exchanges`` has, by degree, the all-reduces that ``links`` were fitted to: bytes and
    seconds of each.
    """

    source: str
    model: Model
    kinds: tuple[LayerKind, ...]
    node: Node
    dtype: str
    backend: str
    device: str
    parameters: int
    rows: tuple[Row, ...]
    refused: tuple[tuple[int, str], ...]
    links: tuple[Link, ...]
    exchanges: tuple[tuple[int, tuple[tuple[int, float], ...]], ...]
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
            lines += ["", f"{workload}: {_STEP[workload.phase]}", *_table(rows)]
            lines += [f"tp {row.tp} was not run: {row.not_run.why}" for row in rows if row.not_run]
            lines += _differences(rows)
        lines.append("")
        for link in self.links:
            latency, speed = human_time(link.latency), human_bytes(link.bandwidth)
            lines.append(f"all-reduce over {link.ranks} ranks: {latency}, then {speed}/s")
        alone = (f"For {workload} alone: tp {degree}." for workload, degree in self.recommended.alone)
        return "\n".join([*lines, self.headline, *alone])


def _table(rows: Sequence[Row]) -> list[str]:
    head = ("tp", "tokens/s", "a step", "collectives", "weights", "cache", "activations", "a rank", "fits",
            "prediction")  # fmt: skip
    return align([head, *map(_cells, rows)], right=(0, 1, 2, 3, 4, 5, 6, 7, 9), width=None)


def _cells(row: Row) -> tuple[str, ...]:
    memory, time = row.memory, row.time
    how = "" if row.measured else "~"
    speed: tuple[str, ...] = ("–", "–", "–")
    if time is not None:
        speed = (f"{how}{human_rate(row.rate)}", f"{how}{human_time(time.seconds)}", f"{time.share:.0%}")
    sizes = map(human_bytes, (memory.weights + memory.gradients, memory.cache, memory.activations, memory.total))
    return (
        str(row.tp),
        *speed,
        *sizes,
        "yes" if row.fits else "no",
        error_text(row.error) if row.measured else "not measured",
    )


def _differences(rows: Sequence[Row]) -> Iterator[str]:
    """Where the ranks sum more, or less, than the plan states."""
    for row in rows:
        if row.measured is not None and row.measured.reduced != row.stated:
            reduced, stated = (nbytes // row.workload.tokens for nbytes in (row.measured.reduced, row.stated))
            yield f"tp {row.tp}: {human_bytes(reduced)} a token in all-reduces; the plan states {human_bytes(stated)}"


def error_text(error: float | None) -> str:
    """How far a predicted time is from the measured one, relative to that; a dash for None."""
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
        "all_reduce": [_link(link, dict(result.exchanges).get(link.ranks, ())) for link in result.links],
        "recommended": {
            "tp": result.recommended.tp,
            "reason": result.recommended.reason,
            "alone": [{**_workload(work), "tp": degree} for work, degree in result.recommended.alone],
        },
    }


def _row(row: Row) -> dict[str, Any]:
    memory = row.memory
    return {
        "tp": row.tp,
        **_workload(row.workload),
        "tokens_per_second": row.rate or None,
        "measured": _time(row.measured),
        "predicted": _time(row.predicted),
        "prediction_error": row.error,
        "memory": {
            "weights": memory.weights, "gradients": memory.gradients, "cache": memory.cache,
            "activations": memory.activations, "total": memory.total, "capacity": row.capacity,
        },
        "fits": row.fits,
        "all_reduce_bytes_per_token": row.measured.reduced / row.workload.tokens if row.measured else None,
        "all_reduce_bytes_per_token_of_plan": row.stated / row.workload.tokens,
        "not_run": row.not_run.why if row.not_run else None,
    }  # fmt: skip


def _workload(workload: Workload) -> dict[str, Any]:
    return {"phase": workload.phase, "batch": workload.batch, "seq": workload.seq}


def _time(time: Time | None) -> dict[str, Any] | None:
    if time is None:
        return None
    return {
        "seconds": time.seconds,
        "compute": time.compute,
        "collectives": time.collectives,
        "spread": time.spread,
        "parts": {
            name: {"count": time.counts[name], "compute": part.compute, "collectives": part.collectives}
            for name, part in time.parts.items()
        },
    }


def _link(link: Link, times: Sequence[tuple[int, float]]) -> dict[str, Any]:
    return {
        "ranks": link.ranks,
        "latency": link.latency,
        "bandwidth": link.bandwidth,
        "measured": [{"bytes": nbytes, "seconds": seconds} for nbytes, seconds in times],
    }
