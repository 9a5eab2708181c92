"""The parallel layers by themselves, at any width: an MLP and an attention, column-parallel and then row-parallel.

This is the figure that texts on tensor parallelism end in. ``mlp, gathered`` is the same MLP of two column-parallel
layers, of which each gathers its outputs: what is saved by following a column-parallel layer with a row-parallel one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from verify.profile.job import WIDTH_BLOCKS, WIDTH_HEAD, WIDTH_TOKENS, Job, Step, WidthSteps
from verify.profile.meter import Meter
from verify.profile.width_rows import numbers_of
from verify.rank.device import free
from verify.rank.group import say, world
from verify.rank.layers import ColumnParallelLinear, RowParallelLinear

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
