"""Settings of a run of the model: for ``verify``, and for the ranks. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from reshard.formats.errors import refused
from reshard.source.source import Source
from reshard.system import Device, Dtype, Taken, default

BYTES_ALONE = "--exact-only compares the bytes alone"


@dataclass(frozen=True, kw_only=True)
class RunSettings:
    """Settings of a run of the model.

    ``device``: ``auto``, ``cpu``, or what torch calls the accelerator.
    ``compute_dtype``: ``float32``, ``bfloat16`` or ``float16``; by default the checkpoint's own.
    ``batch``: the number of sequences.
    ``seq``: the number of tokens in each, which are random.
    ``seed``: the seed of the random tokens.
    ``prompt``: a text to run on, in place of random tokens.
    ``backward``: gradients are compared too.
    ``streamed``: one block runs at a time.
    ``timeout``: the seconds that a rank waits for the others.
    """

    device: Taken[Device, str] = default("auto")
    compute_dtype: Taken[Dtype | None, str | None] = default(None)
    batch: int = 2
    seq: int = 32
    seed: int = 0
    prompt: str | None = None
    backward: bool = False
    streamed: bool = False
    timeout: float = 300.0

    def __post_init__(self) -> None:
        if self.compute_dtype not in (None, "float32", "bfloat16", "float16"):
            raise refused("compute_dtype", self.compute_dtype, "it is float32, bfloat16 or float16")


@dataclass(frozen=True)
class Unmerged:
    """The base model, and the folder of the adapter.

    ``is_alone``: the shards are those of the adapter, without the base model's weights.
    """

    base: Source
    adapter: Path
    is_alone: bool
