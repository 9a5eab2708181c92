"""Splits a full checkpoint, or re-splits shards, into reshard's own form or into that of another program."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from formats.files.sharded import MANIFEST, read_manifest
from formats.mesh import Mesh
from formats.notation.adapter_file import adapter_format_names
from formats.notation.format import HUGGING_FACE
from formats.notation.format_file import format_to_write
from formats.refusals import refused
from reshard.launcher import Share
from reshard.mesh.degrees import unevenly
from reshard.mesh.finer_blocks import finer_blocks, with_blocks
from reshard.mesh.plan import Degrees, Plan, make_plan
from reshard.placement.program_plan import check_kept, plan_for
from reshard.source.access import open_any, open_converted
from reshard.source.source import Source
from reshard.writing.output import Output
from reshard.writing.rewrite import WriteRequest, rewrite, start
from reshard.writing.summary import Summary


@dataclass(frozen=True, kw_only=True)
class SplitRequest(WriteRequest, Degrees):
    """What ``split`` takes.

    ``format`` is the name of another program's format (``"vllm"``), ``"huggingface"`` is one full checkpoint. With
    ``ranks`` only these are written; runs for other ranks into the same ``out`` complete it. If ``ranks`` is a
    ``Share``, these are the process's share of the ranks, except those that are already in ``out``. ``refine_blocks``
    makes scale blocks smaller if a rank's boundary would cut one.
    """

    format: str | None = None
    ranks: Sequence[int] | Share | None = None
    refine_blocks: bool = False


def split(request: SplitRequest) -> Summary:
    """Split a checkpoint (full or already split) into shards, as ``reshard split`` does.

    Raises ReshardError; ``out`` has only complete ranks.
    """
    if request.format in adapter_format_names():
        check_kept(request, HUGGING_FACE)
        for setting, why in _NOT_OF_ADAPTERS.items():
            if getattr(request, setting):
                raise refused(setting, None, why, format=request.format, advice="leave it out")
        began, opened = start(request), open_converted(request.source, request, str(request.format))
        return rewrite(Output(opened, opened.plan, HUGGING_FACE), began, request)
    format = format_to_write(request.format)
    check_kept(request, format)
    if format is HUGGING_FACE:
        from reshard.commands.merge import merge

        return merge(request)
    if request.part is not None and request.ranks is not None:
        raise refused("part", None, "both share the work", beside={"ranks": None}, advice="give one of them")
    began, opened = start(request), open_any(request.source, request)
    plan = _refined(opened, request) if request.refine_blocks else plan_for(opened.model, format, request)
    wanted = _wanted(request.ranks, plan.mesh, None if request.overwrite else began.folder)
    ranks, added_to = (None, None) if wanted is None or began.bucket is not None else (wanted, began.folder)
    new = Output(opened, plan, format, request.max_shard_size, ranks=ranks, added_to=added_to)
    return rewrite(new, began, request, wanted)


_NOT_OF_ADAPTERS = {
    "dequantize": "the bytes of an adapter are moved",
    "adapter": "it is a format of adapters, not of what they are merged into",
    "patch": "it is a format of adapters",
    "max_shard_size": "it has one file",
    "plan_file": "its rules follow from those of the model",
}


def _wanted(ranks: Sequence[int] | Share | None, mesh: Mesh, out: Path | None) -> tuple[int, ...] | None:
    """The ranks that are asked for, if not all; a share of them without those that are in ``out`` already."""
    if ranks is None:
        return None
    if not isinstance(ranks, Share):
        return mesh.check_ranks(ranks, "ranks")
    there = read_manifest(out / MANIFEST).ranks if out is not None and (out / MANIFEST).is_file() else {}
    return tuple(rank for rank in ranks.of(mesh.size) if rank not in there)


def _refined(source: Source, degrees: Degrees) -> Plan:
    """The plan of reshard's own form, with scale blocks that no rank's boundary cuts. Raises PlanError."""
    mesh = unevenly(source.model, degrees.mesh) if degrees.uneven else degrees.mesh
    finer = finer_blocks(source.model, mesh)
    model = with_blocks(source.model, finer) if finer else source.model
    return make_plan(model, mesh, pad=degrees.pad_vocab, pad_to=degrees.pad_vocab_to)
