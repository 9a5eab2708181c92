"""The settings with which a source is opened, as a user gives them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from reshard.formats.store import StoredPath
from reshard.store.selection import HubAccess
from reshard.system import Dtype, Taken, default

Place = str | Path | StoredPath
"""A source as a user names it: a folder, an id on the Hub, a URL, or what ``reshard.state_dict`` gave."""


@dataclass(frozen=True, kw_only=True)
class Access(HubAccess):
    """Settings with which a source is opened.

    ``plan_file``: an architecture file of the user's own.
    ``config``: a folder, a Hub id or a URL with the config.json of a model in another program's format.
    ``weights``: the prefix of the names of the chosen one of several models; ``/`` for the one at the top.
    ``download``: the weights of a Hub id are downloaded into the cache, not read by ranges.
    ``patch``: a delta, or several in order, that are put on the source first.
    ``dequantize``: weights of 8-bit floats are read as if they were in bfloat16.
    ``adapter``: a LoRA adapter; the source is read as if it had been merged into it.
    ``quantize``: ``fp8-block``: then weights are read as if they were in 8-bit floats with scales for blocks.
    ``dtype``: ``bf16``, ``fp16``, ``fp32``, or torch's: last, other weights are cast to it.
    """

    plan_file: Taken[str | Path | None, Path | None] = default(None)
    config: Place | None = field(default=None, repr=False)
    weights: str | None = None
    download: bool = False
    patch: str | Path | Sequence[str | Path] = field(default=(), repr=False)
    dequantize: bool = False
    adapter: str | Path | None = field(default=None, repr=False)
    quantize: str | None = None
    dtype: Taken[Dtype | None, str | None] = default(None)

    @property
    def beginning(self) -> str | None:
        """The prefix of the model's names, if the source has several models."""
        return self.weights

    @property
    def deltas(self) -> tuple[str | Path, ...]:
        """The deltas that are put on the source, in their order."""
        return (self.patch,) if isinstance(self.patch, str | Path) else tuple(self.patch)

    @property
    def is_changed(self) -> bool:
        """Whether the source is read as another checkpoint, apart from a cast."""
        return bool(self.averaged or self.deltas or self.dequantize or self.adapter is not None or self.quantize)

    @property
    def averaged(self) -> tuple[Sequence[Place], Sequence[float]] | None:
        """The checkpoints with which the source is averaged first of all, and the weights of the source and of
        these.
        """
        return None
