"""The forward pass of several shards: an original that is in several pairs runs once."""

from __future__ import annotations

from collections.abc import MutableMapping, Sequence

from reshard.source.source import Source
from verify.forward.compare import DEFAULTS, Progress, run_forward
from verify.forward.job import ForwardOptions, Reference
from verify.forward.report import ForwardReport
from verify.run_settings import Unmerged


def run_forwards(
    pairs: Sequence[tuple[Source | Unmerged, Source]],
    options: ForwardOptions = DEFAULTS,
    progress: Progress = lambda _: None,
    *,
    references: MutableMapping[str, Reference] | None = None,
) -> list[ForwardReport]:
    cache = {} if references is None else references
    return [run_forward(original, shards, options, progress, references=cache) for original, shards in pairs]
