"""Splits, re-splits and merges a checkpoint, and puts a delta on its base, in any format."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from reshard.formats.errors import CheckpointError, refused
from reshard.formats.files.manifest import MANIFEST
from reshard.formats.files.sharded import read_manifest
from reshard.formats.notation.architecture import SETTINGS
from reshard.formats.notation.format import MODULES, PUBLISHED, SOURCE_NAMES
from reshard.formats.notation.format_file import HUGGING_FACE, OWN, adapter_format_names, format_to_write, with_names
from reshard.formats.store import StoredPath
from reshard.mesh.plan import Degrees
from reshard.placement.kept_fields import check_kept
from reshard.placement.program_plan import plan_for
from reshard.source.written_names import published_names
from reshard.system import Share, Taken, default
from reshard.transforms.opening import open_any, open_converted
from reshard.writing.output import Output
from reshard.writing.request import WriteRequest, start
from reshard.writing.rewrite import rewrite
from reshard.writing.summary import Summary


@dataclass(frozen=True, kw_only=True)
class SplitRequest(WriteRequest, Degrees):
    """Arguments of ``split``.

    ``format``: the name of another program's format (``"vllm"``); ``"huggingface"`` is one full checkpoint.
    ``ranks``: only these are written; runs for other ranks into the same ``out`` complete it. A ``Share`` is the
        process's share of the ranks, except those that are already in ``out``.
    """

    format: str | None = None
    ranks: Taken[Sequence[int] | int | Share | str | None, Sequence[int] | Share | None] = default(None)


def split(request: SplitRequest) -> Summary:
    """Split a checkpoint (full or already split) into shards, as ``reshard split`` does.

    Raises ReshardError; ``out`` has only complete ranks.
    """
    if request.format in adapter_format_names():
        check_kept(request, HUGGING_FACE, request.format)
        for setting, why in _NOT_OF_ADAPTERS.items():
            if getattr(request, setting) not in (None, False, (), SOURCE_NAMES):
                raise refused(setting, None, why, format=request.format, advice="leave it out")
        began, opened = start(request), open_converted(request.source, request, str(request.format))
        return rewrite(Output(opened, opened.plan, HUGGING_FACE), began, request)
    format = format_to_write(request.format)
    check_kept(request, format)
    if format is HUGGING_FACE:
        return merge(request)
    if request.part is not None and request.ranks is not None:
        raise refused("part", None, "both share the work", beside={"ranks": None}, advice="give one of them")
    began, opened = start(request), open_any(request.source, request)
    format = with_names(format, request.names, opened.spelling)
    plan = plan_for(opened.model, format, request)
    chosen: tuple[int, ...] | None = None
    if isinstance(request.ranks, Share):  # of the ranks that are not in OUT already
        manifest = began.folder / MANIFEST
        present = read_manifest(manifest).ranks if manifest.is_file() and not request.overwrite else {}
        chosen = tuple(rank for rank in request.ranks.of(plan.mesh.size) if rank not in present)
    elif request.ranks is not None:
        chosen = plan.mesh.check_ranks(request.ranks, "ranks")
    more: dict[str, Any] = {"max_shard_size": request.max_shard_size, "names": request.names}
    if chosen is not None and format is OWN and began.bucket is None:
        more |= {"ranks": chosen, "added_to": began.folder}
    new = Output(opened, plan, format, **more)
    return rewrite(new, began, request, chosen)


_NOT_OF_ADAPTERS = {
    "dequantize": "the bytes of an adapter are moved",
    "adapter": "it is a format of adapters, not of what they are merged into",
    "quantize": "the bytes of an adapter are moved",
    "dtype": "the bytes of an adapter are moved",
    "patch": "it is a format of adapters",
    "max_shard_size": "it has one file",
    "names": "it has names of its own",
    "plan_file": "its rules follow from those of the model",
}


def merge(request: WriteRequest) -> Summary:
    """Merge shards into one full Hugging Face checkpoint.

    The original files are restored byte for byte, as the manifest describes them. With ``max_shard_size``, or without a
    manifest, or if the original was not safetensors or had other names, new files of at most this size are written. The
    source may be another full checkpoint only with ``patch``, ``dequantize``, ``adapter``, ``quantize`` or ``dtype``.
    Raises ReshardError; ``out`` exists only if it is complete.
    """
    began, opened = start(request), open_any(request.source, request)
    checkpoint, record = None if opened.was_split else opened.checkpoint, opened.record
    is_full = checkpoint is not None and bool(checkpoint.records) and not record.is_wrapped
    is_full &= request.names in {SOURCE_NAMES, record.names or PUBLISHED}
    is_full &= request.names != PUBLISHED or not published_names(opened)
    is_chosen = not isinstance(request.source, StoredPath) and Path(request.source).is_file()  # of several sets
    is_mended = checkpoint is not None and checkpoint.note is not None  # its index, or copies
    if is_full and not (request.is_changed or request.dtype or is_chosen or is_mended or opened.was_adapted):
        what, hint = "a full checkpoint", "give the folder that 'reshard split' wrote"
        if SETTINGS in opened.model.config:
            what, hint = "a whole adapter", "reshard merge ADAPTER --into BASE OUT"
        elif record.names is not None or request.names != SOURCE_NAMES:
            other = PUBLISHED if record.names is not None else MODULES
            what, hint = "a full checkpoint with these names", f"--names {other} writes it with the other ones"
        raise CheckpointError(f"{request.source} is {what}, there is nothing to merge", hint)
    new = Output(opened, opened.whole, HUGGING_FACE, request.max_shard_size, names=request.names)
    return rewrite(new, began, request)


@dataclass(frozen=True, kw_only=True)
class PatchRequest(WriteRequest):
    """Arguments of ``patch``; ``source`` is the base.

    ``delta``: a delta that ``diff`` wrote; ``patch`` names further deltas, which follow it.
    """

    delta: str | Path = field(repr=False)  # a URL may have a password

    @property
    def deltas(self) -> tuple[str | Path, ...]:
        """All deltas, in their order."""
        return (self.delta, *super().deltas)


def patch(request: PatchRequest) -> Summary:
    """Put a delta on its base: writes the files that a merge of the other checkpoint would write.

    Raises ReshardError; a delta for another base is refused before anything is written.
    """
    return merge(request)


@dataclass(frozen=True, kw_only=True)
class AverageRequest(SplitRequest):
    """Arguments of ``average``; ``source`` is the first checkpoint.

    ``others``: the other checkpoints, each in any form.
    ``weights``: one for the first and each of the others, with a sum of 1; by default all are equal.
    """

    others: Sequence[str | Path] = field(repr=False)  # a URL may have a password
    weights: Sequence[float] | None = None  # type: ignore[assignment]  # of the mean, as its users call them

    @property
    def beginning(self) -> None:
        """None: no prefix chooses among several models here."""

    @property
    def averaged(self) -> tuple[Sequence[str | Path], Sequence[float]]:
        """The others, and all weights."""
        count = 1 + len(self.others)
        return self.others, self.weights or (1 / count,) * count


def average(request: AverageRequest) -> Summary:
    """Write the weighted mean of checkpoints of one model: without a degree or a format as one full checkpoint.

    It is computed in float32, in their order, and rounded once to the dtypes of the first, or to ``dtype``. Raises
    ReshardError; ``out`` exists only if it is complete.
    """
    is_full = request.format is None and request.mesh.size == 1
    return split(replace(request, format=HUGGING_FACE.name) if is_full else request)
