"""The limit of what counts as equal: not a guessed tolerance, but the model's own rounding, measured.

The same tokens go through the original in its own dtype, the original in higher precision, and the shards in the
original's dtype. At each place in the model the *noise* is how far the first is from the second, the *error* how far
the third is from the second. Sharding changes the order of sums, and the partial sums of ranks are rounded, which may
be larger than the whole sum: the error must stay within ``LIMIT`` times the noise.

One run in the own dtype is one sample of the rounding. It says little about a token whose rounding happens to cancel,
or about one where a norm of something tiny magnifies it. So the rounding is drawn a few times more, every second time
with partial sums like those of ranks (see verify/rank/trace.py), and the noise is the largest of the draws.

A fault may touch everything a little, or one token or one channel a lot. So each distance is taken three ways: over all
elements, the largest over tokens, and the largest over channels. Each is a root mean square over the rest, so that it
varies little; the largest of many is allowed what chance adds to it. The noise of a token or channel is at least that
of all elements, because one may be rounded well by chance.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

LIMIT = 4.0
"""The largest ratio of error to noise at which shards are the same model.

Over the models of the zoo, at 2, 4 and 8 ranks, in float32 and bfloat16, correct shards measure at most about 1.9 (and
2.3 where layers share their weights, 2.7 in linear attention, which divides by norms of almost nothing). Faults measure
5.6 and more, except two kinds that are hardly larger than rounding (docs/explanation/verification.md).
"""

SURE = 20.0
"""The ratio of error to noise above which no further samples are taken: below it, an alarm is measured again.

If a token's value is divided by a tiny norm, its rounding has a long tail, which a few samples may miss.
"""

FLOOR = 0.25
"""Noise counts as at least this part of the dtype's resolution: a lookup, for example, has no noise at all."""


@dataclass(frozen=True)
class Distance:
    """The distance of the shards from the exact run at one place, relative to its root mean square."""

    noise: float
    error: float
    ratio: float
    """The largest error over noise of the three ways."""
    worst: str
    """The place of that ratio: ``all``, ``token 5`` or ``channel 7``."""

    @property
    def is_same(self) -> bool:
        """Whether the error is within the limit; False for NaN."""
        return self.ratio <= LIMIT


@dataclass(frozen=True)
class Yardstick:
    """The exact values at one place, and how large an error the noise allows."""

    exact: Tensor
    """``[tokens, channels]``, in their dtype."""
    scale: float
    """The root mean square of the exact values."""
    noise: float
    """The root mean square of the noise."""
    typical: float
    """The error over all at a ratio of 1."""
    of_token: Tensor
    """The error of each token at a ratio of 1."""
    of_channel: Tensor
    """The error of each channel at a ratio of 1."""


class Noise(NamedTuple):
    """The distance of a run from the exact one at one place: root mean squares of all elements, each token, each
    channel.
    """

    of_all: float
    of_token: Tensor
    of_channel: Tensor


def noise_of(draw: Tensor, exact: Tensor) -> Noise:
    """The distance of a run from the exact one, ``[..., channel]`` each."""
    apart = _difference(_matrix(draw), _matrix(exact))
    return Noise(_rms(apart), apart.square().mean(1).sqrt(), apart.square().mean(0).sqrt())


def yardstick(exact: Tensor, draws: Sequence[Noise], dtype: torch.dtype) -> Yardstick:
    """The noise at one place: ``draws`` are of runs in ``dtype``, in which the shards run too."""
    wide = _matrix(exact)
    finite = wide.masked_fill(wide.isinf(), 0)
    scale = _rms(finite) or 1.0
    floor = FLOOR * torch.finfo(dtype).eps
    noise = max((draw.of_all for draw in draws), default=0.0)
    typical = max(noise, floor * scale)

    def allowed(over: int) -> Tensor:
        largest = torch.stack([draw.of_token if over else draw.of_channel for draw in draws]).amax(0)
        count, length = wide.shape[1 - over], wide.shape[over]
        # What the largest of `count` root mean squares over `length` normal numbers exceeds 1 by.
        chance = 1 + math.sqrt(math.log(max(count, 1)) / max(length, 1))
        return torch.maximum(largest, floor * finite.square().mean(over).sqrt()).clamp(min=typical) * chance

    return Yardstick(exact.detach().cpu(), scale, noise, typical, allowed(1), allowed(0))


def measure(state: Tensor, yardstick: Yardstick) -> Distance:
    """Compare a run with the exact one. Masked (infinite) scores must be so in both; NaN gives an infinite error."""
    error = _difference(_matrix(state), _matrix(yardstick.exact))
    size = _rms(error)
    if not math.isfinite(size):
        return Distance(yardstick.noise / yardstick.scale, math.inf, math.inf, "all")
    ratios = {"all": size / yardstick.typical}
    for name, over, allowed in (("token", 1, yardstick.of_token), ("channel", 0, yardstick.of_channel)):
        errors = error.square().mean(over).sqrt() / allowed
        at = int(errors.argmax())
        ratios[f"{name} {at}"] = float(errors[at])
    worst = max(ratios, key=lambda key: ratios[key])
    return Distance(yardstick.noise / yardstick.scale, size / yardstick.scale, ratios[worst], worst)


def _difference(state: Tensor, exact: Tensor) -> Tensor:
    return (state - exact).masked_fill((state == exact) & exact.isinf(), 0)


def _matrix(x: Tensor) -> Tensor:
    """Return rows of channels in float64. Values near the end of the dtype's range (masks) count as infinite."""
    wide = x.detach().to("cpu", torch.float64).reshape(-1, x.shape[-1] if x.dim() else 1)
    end = min(torch.finfo(x.dtype).max / 4, 1e30)
    return wide.masked_fill(wide >= end, math.inf).masked_fill(wide <= -end, -math.inf)


def _rms(x: Tensor) -> float:
    return float(x.square().mean().sqrt()) if x.numel() else 0.0
