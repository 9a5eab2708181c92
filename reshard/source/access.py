"""Finds a source that a user names: a folder, or an id on the Hub."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from formats.notation.architecture import Architecture
from formats.store import FilePath
from reshard.source.opening import lines_of
from reshard.store.selection import Weights


@dataclass(frozen=True, kw_only=True)
class HubAccess:
    """How the Hub is reached.

    ``revision`` is a branch, tag or commit; ``token`` by default HF_TOKEN, or that of ``hf auth login``; ``cache_dir``
    the Hub's cache, by default HF_HUB_CACHE. ``quiet``: no progress of downloads on stderr.
    """

    revision: str | None = None
    token: str | None = field(default=None, repr=False)
    cache_dir: Path | None = None
    quiet: bool = False


@dataclass(frozen=True, kw_only=True)
class Access(HubAccess):
    """How a source is opened.

    ``plan_file`` is an architecture file of the user's own, ``config`` a folder with the config.json of a model in
    another program's format. With ``download`` the weights of a Hub id are downloaded into the cache, not read by
    ranges. ``patch`` is a delta, or several in order, that are put on the source first. With ``dequantize`` weights of
    8-bit floats are read as if they were in bfloat16. ``adapter`` is a LoRA adapter: the source is read as if it had
    been merged into it. ``quantize`` (``fp8-block``): then weights are read as if they were in 8-bit floats with scales
    for blocks. ``dtype`` (``bf16``, ``fp16`` or ``fp32``): last, other weights are cast to it.
    """

    plan_file: Path | None = None
    config: Path | None = None
    download: bool = False
    patch: str | Path | Sequence[str | Path] = field(default=(), repr=False)
    dequantize: bool = False
    adapter: str | Path | None = field(default=None, repr=False)
    quantize: str | None = None
    dtype: str | None = None

    @property
    def deltas(self) -> tuple[str | Path, ...]:
        """The deltas that are put on the source, in their order."""
        return (self.patch,) if isinstance(self.patch, str | Path) else tuple(self.patch)

    @property
    def is_changed(self) -> bool:
        """Whether the source is read as another checkpoint, but for a cast."""
        return bool(self.averaged or self.deltas or self.dequantize or self.adapter is not None or self.quantize)

    @property
    def averaged(self) -> tuple[Sequence[str | Path], Sequence[float]] | None:
        """The checkpoints with which the source is averaged before all else, and the weights of it and of them."""
        return None


def find(source: str | Path, access: HubAccess, weights: Weights) -> FilePath:
    """Where a folder, a Hub id or a URL is read from; ``weights`` says how much of the weights is needed. Raises
    ReshardError.
    """
    path = Path(source).expanduser()
    if str(source) and access.revision is None and path.exists():
        return path
    from reshard.store.hub import fetch  # rarely needed

    return fetch(
        str(source), revision=access.revision, token=access.token, cache_dir=access.cache_dir, quiet=access.quiet,
        weights=weights,
    )  # fmt: skip


def lines_of_any(source: str | Path, access: Access) -> Architecture:
    """The lines that cover the tensors of a folder or a Hub id, even if shapes do not fit. Raises ReshardError."""
    return lines_of(find(source, access, Weights.HEADERS), access.plan_file, access.config)
