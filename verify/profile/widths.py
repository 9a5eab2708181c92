"""Throughput against width: the parallel layers by themselves, an MLP and an attention, measured and predicted.

This is the figure that texts on tensor parallelism end in. ``mlp, gathered`` is the same MLP of two column-parallel
layers, of which each gathers its outputs: what is saved by following a column-parallel layer with a row-parallel one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from verify.profile.cost import Link, Work, communication, fit_rates, joined
from verify.profile.job import WIDTH_BLOCKS, WIDTH_HEAD, WIDTH_TOKENS, Found, Job, Step, WidthSteps
from verify.profile.meter import Meter
from verify.rank.device import free
from verify.rank.group import say, world
from verify.rank.layers import ColumnParallelLinear, RowParallelLinear


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


_PATIENCE = 5.0
"""A pass that is expected to take more than so many times the patience of a measurement is left to be predicted."""

Repeat = Callable[[Callable[[], None]], tuple[Step, ...]]


def time_widths(
    job: Job, device: torch.device, meter: Meter, repeat: Repeat, agreed: Callable[[bool], bool]
) -> Iterator[WidthSteps]:
    """Time each block at each width, in increasing order, until a pass takes too long or too much memory."""
    ranks, dtype = world().size, getattr(torch, job.dtype)
    for block in WIDTH_BLOCKS:
        last = 0.0
        for width in job.widths:
            weights = numbers_of(block, width) // ranks * dtype.itemsize
            is_too_much = last * 4 > _PATIENCE * job.patience.seconds or 2 * weights > free_for_widths(job, device)
            if width % (WIDTH_HEAD * ranks) or agreed(is_too_much):
                continue
            say(f"tp {ranks}: {block}, width {width}")
            made = _made(block, width, ranks, dtype, device)
            x = torch.ones(1, WIDTH_TOKENS, width, dtype=dtype, device=device)

            def run(made: nn.Module = made, x: Tensor = x) -> None:
                meter.enter("block")
                made(x)

            with torch.no_grad():
                steps = repeat(run)
            last = min(sum(span.seconds for span in step) for step in steps)
            yield WidthSteps(block, width, steps)


def free_for_widths(job: Job, device: torch.device) -> int:
    """The bytes that this rank may take now: on a GPU, what the model and the last block have left of it."""
    if device.type == "cpu":
        return job.free
    return free(device)


def _made(block: str, width: int, ranks: int, dtype: torch.dtype, device: torch.device) -> nn.Module:
    column = partial(ColumnParallelLinear, bias=False, group=world(), dtype=dtype, device=device)
    row = partial(RowParallelLinear, bias=False, group=world(), dtype=dtype, device=device)
    made: nn.Module
    if block == "attention":
        made = _Attention([column(width, width // ranks) for _ in range(3)], row(width // ranks, width))
    elif block == "mlp":
        made = nn.Sequential(column(width, 4 * width // ranks), nn.GELU(), row(4 * width // ranks, width))
    else:
        up = column(width, 4 * width // ranks, gather_output=True)
        made = nn.Sequential(up, nn.GELU(), column(4 * width, width // ranks, gather_output=True))
    for parameter in made.parameters():
        nn.init.constant_(parameter, 1 / width)
    return made


class _Attention(nn.Module):
    """Causal attention with as many KV heads as query heads; each rank has some of them."""

    def __init__(self, inputs: list[ColumnParallelLinear], output: RowParallelLinear) -> None:
        super().__init__()
        self.inputs, self.output = nn.ModuleList(inputs), output

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (layer(x).unflatten(-1, (-1, WIDTH_HEAD)).transpose(1, 2) for layer in self.inputs)
        found: Tensor = self.output(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return found
