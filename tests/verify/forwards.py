"""The forward pass of several shards: an original that is in several pairs runs once."""

from __future__ import annotations

import hashlib
from collections.abc import MutableMapping, Sequence
from dataclasses import replace
from unittest import mock

import torch

from reshard.formats.store import local_folder
from reshard.source.source import Source
from reshard.verify.forward import original, shards
from reshard.verify.forward.compare import DEFAULTS, Progress, run_forward
from reshard.verify.forward.job import ForwardOptions, Job, Reference
from reshard.verify.forward.report import ForwardReport
from reshard.verify.rank.roles import roles
from reshard.verify.run_settings import Unmerged


def run_forwards(
    pairs: Sequence[tuple[Source | Unmerged, Source]],
    options: ForwardOptions = DEFAULTS,
    progress: Progress = lambda _: None,
    *,
    references: MutableMapping[str, Reference] | None = None,
) -> list[ForwardReport]:
    """``references`` keeps what originals computed for later calls."""
    cache = {} if references is None else references

    def reference_of(job: Job, device: torch.device) -> Reference:
        if (key := _key(job, device)) not in cache:
            cache[key] = original.reference_of(job, device)
        return cache[key]

    with mock.patch.object(shards, "reference_of", reference_of):
        return [run_forward(whole, parts, options, progress) for whole, parts in pairs]


def _key(job: Job, device: torch.device) -> str:
    """A hash of all that the original's run depends on: its files, how it runs, and the places that are looked at."""
    folders = [folder for folder in (local_folder(job.original.path), job.adapter) if folder is not None]
    files = sorted((str(file), file.stat()) for folder in folders for file in folder.iterdir() if file.is_file())
    stamps = [(name, stat.st_size, stat.st_mtime_ns, stat.st_ino) for name, stat in files]
    how = replace(job.options, device=str(device), timeout=0.0)
    ids = None if job.ids is None else job.ids.tolist()
    of_tensors = roles(job.plan, {name: (name,) for name in job.plan.layouts})
    kinds = job.plan.model.kind_of
    places = [
        (name, "layer}" in kinds[name].template, original._is_summed(role)) for name, role in sorted(of_tensors.items())
    ]
    avoided, rows = original._avoided(job), original._rows(job)
    text = repr((job.original.model.config, stamps, job.dtype, how, ids, avoided, rows, places, job.stored))
    return hashlib.sha256(text.encode()).hexdigest()
