"""A model with an adapter beside it, as PEFT runs it: the original that shards with the adapter in them must equal."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from reshard.source.source import Source


@dataclass(frozen=True)
class Unmerged:
    """The base model, and the folder of the adapter.

    ``is_alone``: the shards are those of the adapter, without the base model's weights.
    """

    base: Source
    adapter: Path
    is_alone: bool
