"""What counts as equal: not a guessed tolerance, but the model's own rounding, measured.

Three runs see the same tokens: the original in its own dtype, the original in higher precision, and the shards in the
original's dtype. At each place in the model the *noise* is how far the first is from the second, the *error* how far the
third is from the second. Sharding changes the order of sums and so the rounding, but not its size: the error must stay within
``FACTOR`` times the noise.

A fault may touch everything a little or one token, one channel a lot. So each distance is taken three ways: over all elements, and the
largest over tokens and over channels (each of these a root mean square over the rest, so that it is no lottery). The noise of
a token or a channel is at least that of all elements: one that was rounded well by chance is no yardstick.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

FACTOR = 4.0
"""Error over noise up to which shards are the same model. See docs/verification.md for what correct and damaged shards measure."""

FLOOR = 0.25
"""Errors below this part of the dtype's own resolution at a place count as none: a lookup, say, has no noise at all."""


@dataclass(frozen=True)
class Distance:
    """How far two runs are from a third at one place: ``noise`` and ``error`` relative to its root mean square.

    ``ratio`` is the largest error over noise of the three ways; ``worst`` says where it is: ``all``, ``token 5`` or ``channel 7``.
    """

    noise: float
    error: float
    ratio: float
    worst: str

    @property
    def is_same(self) -> bool:
        """Whether the error is within the noise."""
        return self.ratio <= FACTOR


def measure(sharded: Tensor, own: Tensor, exact: Tensor, dtype: torch.dtype) -> Distance:
    """Compare two runs with an exact one, ``[..., channel]`` each; ``dtype`` is the one that the two were computed in.

    Infinities (masked scores) must be the same in the shards' and the exact run, NaN makes the ratio infinite.
    """
    exact, own, sharded = (_matrix(x) for x in (exact, own, sharded))
    same = (sharded == exact) & torch.isinf(exact)
    error, noise = (sharded - exact).masked_fill(same, 0), (own - exact).masked_fill((own == exact) & torch.isinf(own), 0)
    if not (error.isfinite().all() and noise.isfinite().all()):
        return Distance(_rms(noise.nan_to_num()), float("inf"), float("inf"), "all")
    finite = exact.masked_fill(same, 0)
    scale = _rms(finite) or 1.0
    floor = FLOOR * torch.finfo(dtype).eps
    typical = max(_rms(noise), floor * scale)
    ratios = {"all": _rms(error) / typical}
    for name, over in (("token", 1), ("channel", 0)):
        size = finite.square().mean(over).sqrt()
        allowed = noise.square().mean(over).sqrt().clamp(min=typical).maximum(floor * size)
        each = error.square().mean(over).sqrt() / allowed
        at = int(each.argmax())
        ratios[f"{name} {at}"] = float(each[at])
    worst = max(ratios, key=lambda key: ratios[key])
    return Distance(_rms(noise) / scale, _rms(error) / scale, ratios[worst], worst)


def _matrix(x: Tensor) -> Tensor:
    """Rows of channels in float64; what is near the end of its dtype's range (masks) counts as infinite."""
    wide = x.detach().to("cpu", torch.float64).reshape(-1, x.shape[-1] if x.dim() else 1)
    end = min(torch.finfo(x.dtype).max / 4, 1e30)
    return wide.masked_fill(wide >= end, float("inf")).masked_fill(wide <= -end, -float("inf"))


def _rms(x: Tensor) -> float:
    return float(x.square().mean().sqrt()) if x.numel() else 0.0
