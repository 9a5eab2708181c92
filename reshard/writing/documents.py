"""The small files of an output besides the source's own and the manifest: configs, indices, a program's documents."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from reshard.formats.documents import json_bytes
from reshard.formats.errors import PlanError, brief
from reshard.formats.files.checkpoint import ADAPTER_CONFIG, CONFIG, METADATA
from reshard.formats.notation.format import ProgramConfig
from reshard.formats.notation.format_file import OWN
from reshard.mesh.plan import rank_config
from reshard.move.jobs import FilePlan
from reshard.move.moves import INTACT_RANK
from reshard.placement.program_plan import made_config, program_config
from reshard.writing.chunks import chunk_metadata
from reshard.writing.output import Output


class Documents(NamedTuple):
    """The small files of an output, by their names."""

    general: Mapping[str, bytes]
    of_ranks: Mapping[int, Mapping[str, bytes]]
    """The documents in the folders of ranks."""


def documents_of(new: Output) -> Documents:
    """The documents of an output. Raises PlanError if the source has one of another model."""
    ranks = {rank: _of_rank(new, rank) for rank in new.ranks} if new.format is OWN else {}
    return Documents(dict(_documents(new)), ranks)


def _of_rank(new: Output, rank: int) -> dict[str, bytes]:
    """A rank's config.json, the one of an adapter, and its index."""
    folder = new.plan.mesh.folder(rank)
    documents = {f"{folder}/{CONFIG}": json_bytes(rank_config(new.plan, rank)) + b"\n"}
    if new.adapter is not None:
        documents[f"{folder}/{ADAPTER_CONFIG}"] = new.adapter
    return documents | dict(_index(new, new.rank_files[rank], folder))


def _index(new: Output, files: Sequence[FilePlan], folder: str = "") -> Iterator[tuple[str, bytes]]:
    """The index of several files, as transformers writes it."""
    name = new.format.files.index
    if name is None or len(files) < 2:
        return
    tensors = [(file, tensor) for file in files if file.rank != INTACT_RANK for tensor in file.tensors]
    weight_map = {tensor.name: file.name.rpartition("/")[2] for file, tensor in tensors}
    total = sum(tensor.nbytes for _, tensor in tensors)
    document = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    yield name.format(folder=folder), (json.dumps(document, indent=2) + "\n").encode()


def _documents(new: Output) -> Iterator[tuple[str, bytes]]:
    """Yield the files that the program needs beside the weights and the source's own: its config file, an index."""
    files, settings, record = new.format.files, new.format.settings, new.source.record
    if new.is_restored:
        yield from [(record.index.name, record.index.content)] if record.index is not None else ()
        return
    if files.tracker is not None:
        yield files.tracker, str(files.folder).encode()
    if settings is not None:
        content = new.source.read_side_file(settings.file)
        if content is None:
            yield settings.file, json_bytes(program_config(settings, new.plan.model)) + b"\n"
        else:
            _check_own(new, settings, content)
    if files.is_single:
        from reshard.formats.files.deepspeed import universal_documents  # rarely needed

        shapes = {stored.name: shape for stored, shape in new.arrangement.tensors_of(0)}
        states = {tensor.name for output in new.states for file in output.files for tensor in file.tensors}
        shared = {at.stored.name: new.arrangement.atoms[atom].stored.name for atom, at in new.arrangement.copies}
        saved = new.training.saved if new.training is not None else None
        for name, content in universal_documents(shapes, states, shared, saved):
            yield files.place + name, content
    else:
        for name, document in new.format.container.documents.items():
            from reshard.formats.files.dcp import object_bytes  # rarely needed

            content = object_bytes(document) if name.endswith(".pt") else json_bytes(document) + b"\n"
            yield files.place + name, content
    if new.chunks.chunks:
        keys = new.source.training.saved.keys if new.source.training is not None else {}
        yield files.place + METADATA, chunk_metadata([part.chunks for part in (new, *new.states)], keys)
    if new.format is not OWN:
        yield from _index(new, new.files)


def _check_own(new: Output, settings: ProgramConfig, content: bytes) -> None:
    """Raise PlanError if the source has a program's config file that describes another model."""
    stored = [(tensor.name, tensor.dtype, shape) for tensor, shape in new.arrangement.tensors_of(0)]
    planned, stated = (
        made_config(settings, document, stored, new.plan.mesh.size)
        for document in (program_config(settings, new.plan.model), json.loads(content))
    )
    for key in planned:
        if planned[key] != stated.get(key):
            raise PlanError(
                f"{settings.file} of the source makes '{key}' {brief(stated.get(key))}, config.json "
                f"{brief(planned[key])}",
                f"remove {settings.file} from the source, and it is written anew",
            )
