"""Compares everything but tensors of a folder of shards with its original: files, folders, manifest, indexes, headers.

The right manifest is computed from the original and the files in the folder, and compared with the one in the folder,
value by value, so that no field can be forgotten. Only values without another source are taken from it: the original's
location and commit, and the files that were read to make the shards (perhaps other shards, in any format).
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from reshard.formats.documents import MAX_INDEX, json_object, read_document
from reshard.formats.errors import brief
from reshard.formats.files.checkpoint import ADAPTER_CONFIG, CONFIG, METADATA, read_weights
from reshard.formats.files.checksum import PIECE, PartialSum, checksum, file_checksum, sum_part
from reshard.formats.files.chunks import OFFSETS_KEY, chunks_metadata, read_chunks
from reshard.formats.files.dcp import object_bytes
from reshard.formats.files.manifest import (
    INTACT_FILE,
    MANIFEST,
    METADATA_KEY,
    FileRecord,
    Manifest,
    is_fingerprint,
    manifest_text,
    read_shard,
)
from reshard.formats.files.safetensors import TensorInfo, parse_header, read_header
from reshard.formats.mesh import Mesh
from reshard.formats.notation.spellings import Spellings
from reshard.formats.store import FilePath, content_of, glob, is_in, name_in
from reshard.mesh.plan import Plan, rank_config
from reshard.model.model import in_order
from reshard.model.naming import respelled
from reshard.placement.program_plan import program_config
from reshard.source.folder import other_entries
from reshard.source.program_files import weights_folder
from reshard.source.source import Source, SourceFile
from reshard.store.selection import INDICES
from reshard.store.staging_names import STATE
from reshard.verify.bytes.exact_report import ConfigDifference, config_differences
from reshard.verify.bytes.reading import Files
from reshard.verify.bytes.rules import with_sound_config

INDEX = INDICES[0]

# ------------------------------------------------------------------------------------------------------ files, folders


def extra_entries(shards: Source, expected: Iterable[str]) -> list[str]:
    """Files and folders of ``shards`` that are not expected; for a folder only its own name.

    Names at the top that begin with a dot are ignored, as by all commands: other tools keep files there. The staging
    files of an unfinished run are not ignored. A link counts as its target.
    """
    extra = other_entries(shards.path, {*expected})
    return sorted(name for name in extra if not name.startswith(".") or name.startswith(STATE))


# ---------------------------------------------------------------------------------------------------------- manifest


def _expected_manifest(original: Source, shards: Source, plan: Plan, manifest: Manifest) -> Manifest:
    """The right manifest, with the checksums that the one in the folder has (see ``wrong_checksums``)."""
    identity = original.identity(plan)
    record = dataclasses.replace(original.record, location=manifest.source.location, commit=manifest.source.commit)
    if is_of_other_files(original, manifest):
        record, identity = manifest.source, dataclasses.replace(identity, source=manifest.source.id)
    if _made_without(original, manifest):  # shards without a manifest do not describe the original files
        record = dataclasses.replace(record, files=(), index=None, aliases={})
        record = record if is_fingerprint(manifest.source.id) else dataclasses.replace(record, id=manifest.source.id)
        identity = dataclasses.replace(identity, source=record.id)
    sums = {file.name: file.checksum for file in manifest.source.files}
    files = tuple(dataclasses.replace(file, checksum=sums.get(file.name)) for file in record.files)
    side = tuple(FileRecord(name, len(data), checksum([data])) for name, data in original.read_side_files().items())
    return dataclasses.replace(
        manifest,
        identity=dataclasses.replace(identity, plan=manifest.identity.plan, names=manifest.identity.names),
        source=dataclasses.replace(record, files=files),
        side_files=side,
        ranks={rank: tuple(_records(shards, plan, rank, manifest)) for rank in range(plan.mesh.size)},
    )


def _made_without(original: Source, manifest: Manifest) -> bool:
    """Whether shards were made of other shards, which do not describe the files of the original."""
    return not manifest.source.files and {stamp.name for stamp in manifest.inputs} != {s.name for s in original.states}


def is_of_other_files(original: Source, manifest: Manifest) -> bool:
    """Whether the shards were made of other files than the original's: with other names for its tensors or, if the
    original is itself put together from parts, in another order.
    """
    ours, theirs = original.record, manifest.source
    if original.was_split:
        return [file.header for file in ours.files] != [file.header for file in theirs.files]
    if not (ours.files and theirs.files and ours.names == theirs.names):
        return bool(theirs.files) and ours.names != theirs.names
    if [file.header for file in ours.files] == [file.header for file in theirs.files]:
        return False
    known, theirs_known = ({name for file in record.files for name in file.tensors} for record in (ours, theirs))
    stored, theirs_stored = (
        {name for file in record.files for name in parse_header(file.header, Path(file.name), file.size).tensors}
        for record in (ours, theirs)
    )
    spelled = respelled(known, theirs_known, Spellings(original.model.architecture, original.model.config))
    return stored != theirs_stored and known == {spelled.get(name, name) for name in theirs_known}


def expected_source(original: Source, shards: Source) -> str:
    """The original's fingerprint, which the shards' headers should state; if it is unknown, the one that they state."""
    fingerprint = original.record.id
    if (manifest := shards.manifest) is not None:
        is_other = _made_without(original, manifest) or is_of_other_files(original, manifest)
        return manifest.source.id if is_other else fingerprint
    headers = (read_shard(f.metadata, f.path) for f in shards.files.values() if METADATA_KEY in f.metadata)
    stated = next((shard.identity.source for shard in headers), None)
    return fingerprint if stated is None or is_fingerprint(stated) else stated


def _records(shards: Source, plan: Plan, rank: int, manifest: Manifest) -> Iterator[FileRecord]:
    """The records of a rank's files on the disk, in the order of a manifest."""
    checksums = {record.name: record.checksum for record in manifest.ranks.get(rank, ())}
    for name in _rank_files(shards, plan, rank):
        path = shards.path / name
        if path.is_file():
            value = checksums.get(name)
            is_always_summed = not name.endswith(".safetensors")
            yield FileRecord(
                name, path.stat().st_size, file_checksum(path) if is_always_summed and not value else value
            )


def _rank_files(shards: Source, plan: Plan, rank: int) -> list[str]:
    """The names of a rank's files, in the order of a manifest."""
    weights, folder = [file.name for file in _files(shards, plan.mesh, rank)], plan.mesh.folder(rank)
    if shards.format.files.is_single:
        place = shards.format.files.place
        names = (file.name for file in shards.files.values() if shards.format.files.is_named(file.name[len(place) :]))
        weights = sorted(name for name in names if not name.endswith("/step.pt"))
    if not shards.format.plain:
        return [*weights, *([INTACT_FILE] if rank == 0 and shards.intact else [])]
    index = [f"{folder}/{INDEX}"] if len(weights) > 1 else []
    return [*(f"{folder}/{name}" for name in _configs_of(shards.path)), *weights, *index]


def _configs_of(folder: FilePath) -> list[str]:
    """The settings of each rank: the model's, and the adapter's if the folder holds one."""
    return [CONFIG, *([ADAPTER_CONFIG] if (folder / ADAPTER_CONFIG).is_file() else [])]


def begun_sums(original: Source, shards: Source) -> dict[FilePath, PartialSum]:
    """For each weight file with a checksum in the manifest, the sum of everything but its tensors, which are added
    later.
    """
    files = [*original.files.values(), *shards.files.values()]
    summed = {path for path, value in stated_checksums(original, shards).items() if value is not None}
    sums = {}
    for file in files:
        parts = [*([(0, file.header)] if file.header is not None else []), *file.rest]
        if file.path in summed and parts:
            sums[file.path] = PartialSum(file.size)
            for offset, content in parts:
                sums[file.path].add(offset, len(content), sum_part(content, offset))
    return sums


def wrong_checksums(
    original: Source,
    shards: Source,
    sums: Mapping[FilePath, PartialSum],
    damaged: Iterable[FilePath],
    files: Files,
) -> Iterator[str]:
    """The wrong checksums in the manifest, one line each.

    A file is read again if its sum in ``sums`` is incomplete or different. ``damaged`` files are skipped: they are
    already reported, and the manifest may be right.
    """
    checksums, passed = stated_checksums(original, shards), {*damaged}
    own_files = [path for path in checksums if is_in(path, shards.path) and path.suffix == ".safetensors"]
    without = [path for path in own_files if checksums[path] is None]
    if 0 < len(without) < len(own_files):
        yield f"{MANIFEST}: {name_in(without[0], shards.path)} has no checksum, but other files have one"
    for path, value in checksums.items():
        if value is None or path in passed or not path.is_file():
            continue
        begun = sums.get(path)
        if begun is None or not begun.is_complete or begun.value() != value:
            value_now = _summed(path, files)
            if value_now != value:
                yield f"{MANIFEST}: the checksum of {path} is {value_now}, not {brief(value)}"


def stated_checksums(original: Source, shards: Source) -> dict[FilePath, str | None]:
    """The checksums that the manifest states for the ranks' files and the original's weights."""
    manifest = shards.manifest
    if manifest is None:
        return {}
    records = (record for files in manifest.ranks.values() for record in files)
    of_original = () if is_of_other_files(original, manifest) else manifest.source.files
    return {shards.path / record.name: record.checksum for record in records} | {
        original.path / file.name: file.checksum for file in of_original
    }


def _summed(path: FilePath, files: Files) -> str:
    size = path.stat().st_size
    return checksum(files.read(path, begin, min(PIECE, size - begin)) for begin in range(0, size, PIECE))


# -------------------------------------------------------------------------------------------------- order and headers


def header_differences(original: Source, shards: Source, plan: Plan) -> Iterator[ConfigDifference]:
    """The wrong values about the split in the headers that reshard wrote of ranks, and the format in a full
    checkpoint's.

    The rules themselves are not compared: another version may spell them differently. Of reshard's own form, source and
    sizes are the same in all headers (see ``Structure``).
    """
    if shards.checkpoint is not None:  # its format alone is anybody's concern, unless it is the original's file
        recorded = original.manifest.source.files if original.manifest is not None else ()
        own = [(file.name, dict(file.metadata)) for file in original.files.values()]
        own += [(file.name, parse_header(file.header, Path(file.name), file.size).metadata) for file in recorded]
        for file in (file for file in shards.files.values() if file.header and (file.name, file.metadata) not in own):
            yield from config_differences(file.name, {**file.metadata, "format": "pt"}, dict(file.metadata))
        return
    true = dataclasses.replace(original.identity(plan), source=expected_source(original, shards))
    if shards.stated is not None:
        true = dataclasses.replace(true, source=shards.stated.source, sizes=shards.stated.sizes)
    for rank in range(plan.mesh.size):
        names: dict[FilePath, list[str]] = {}  # of tensors, where the rank lacks some of the model's
        if shards.stated is not None and len(plan.boxes(rank)) != len(plan.laid):
            places = {tensor.name: place for place, tensor in enumerate(in_order(shards.plan.model.tensors))}
            for name, info in shards.ranks[rank].items():
                names.setdefault(info.file, []).append(name)
        for file in _files(shards, plan.mesh, rank):
            if METADATA_KEY not in file.metadata:
                continue
            stated = read_shard(file.metadata, file.path).identity
            should = dataclasses.replace(true, plan=stated.plan, names=stated.names)
            expected = should.metadata(rank, [places[name] for name in names.get(file.path, ())])
            if shards.chunks is not None:  # the offsets themselves are compared with the chunks of the mesh
                chunks = read_chunks(file.path, file.metadata, read_header(file.path).tensors)
                expected |= chunks_metadata({name: at.offset for name, at in chunks.items()})
            # One that is not expected may be no JSON
            texts = [key for key in (METADATA_KEY, OFFSETS_KEY) if key in expected and key in file.metadata]
            one, other = ({**side, **{k: json.loads(side[k]) for k in texts}} for side in (expected, file.metadata))
            yield from config_differences(file.name, one, other)


def _index(infos: Collection[TensorInfo]) -> dict[str, Any]:
    """The index of files with these tensors."""
    weight_map = {info.name: info.file.name for info in infos}
    total = sum(info.nbytes for info in infos)
    return {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}


def _whole_index(original: Source, shards: Source) -> Iterator[tuple[str, dict[str, Any] | None]]:
    """The index of a full checkpoint, if it needs one or has one. Its weights' size may be the original's own word."""
    is_safe = all(file.header is not None for file in shards.files.values())
    path = shards.path / INDICES[0 if is_safe else 1]
    if not path.is_file():
        yield from [(path.name, None)] if len(shards.files) > 1 else ()
        return
    contents = [(file.name, *read_weights(file.path)[:2]) for file in shards.files.values()]
    weight_map = {tensor: name for name, tensors, tied in contents for tensor in (*tensors, *tied)}
    stated = read_document(path, MAX_INDEX, json_object)[1]
    metadata, index = stated.get("metadata"), content_of(original.checkpoint.index if original.checkpoint else None)
    if (
        is_safe
        and isinstance(metadata, dict)
        and "total_size" in metadata
        and (not index or stated != json.loads(index))
    ):
        total = sum(info.nbytes for _, tensors, _ in contents for info in tensors.values())
        metadata = {**metadata, "total_size": total}
    yield path.name, {**stated, "metadata": metadata, "weight_map": weight_map}


def documents(original: Source, shards: Source, plan: Plan) -> dict[str, Any]:
    """The files besides weights and the original's side files: as JSON, as bytes, or None if any content will do.

    A program's own files without a manifest may have any: nobody says who wrote them.
    """
    format, contents = shards.format, dict[str, Any]({CONFIG: original.read_config()})
    if shards.stated is not None:
        planned = with_sound_config(plan)
        for rank in range(plan.mesh.size):
            folder = plan.mesh.folder(rank)
            contents |= {f"{folder}/{name}": None for name in _configs_of(shards.path)}
            contents[f"{folder}/{CONFIG}"] = rank_config(planned, rank)
            if len(_files(shards, plan.mesh, rank)) > 1:
                contents[f"{folder}/{INDEX}"] = _index(shards.ranks[rank].values())
    if shards.manifest is not None:
        contents[MANIFEST] = json.loads(manifest_text(_expected_manifest(original, shards, plan, shards.manifest)))
    if shards.checkpoint is not None:
        return contents | dict(_whole_index(original, shards))
    if format.plain:
        return contents
    own, files, is_known = dict[str, Any](), format.files, shards.manifest is not None
    if format.settings is not None and format.settings.file not in original.side_files:
        own[format.settings.file] = program_config(format.settings, shards.plan.model) if is_known else None
    infos = [info for rank in shards.ranks for info in rank.values()]
    if files.index is not None and len({info.file for info in infos}) > 1:
        own[files.index] = _index(infos)
    if files.tracker is not None:
        own[files.tracker] = str(files.folder).encode()
    weights = shards.path / files.place if is_known else weights_folder(format, shards.path)
    inside = f"{name_in(weights, shards.path)}/" if weights != shards.path else ""
    for name, content in format.container.documents.items():
        own[inside + name] = object_bytes(content) if name.endswith(".pt") else dict(content)
        if files.is_single:  # it says how far a run is
            own[inside + name] = None
    if files.is_single:
        own |= {name_in(path, shards.path): None for path in glob(weights, "*/*/step.pt")}
    elif (weights / METADATA).is_file():  # what it says is compared: where each chunk lies, and what of
        own[inside + METADATA] = None
    return contents | (own if is_known else dict.fromkeys(own))


def _files(shards: Source, mesh: Mesh, rank: int) -> list[SourceFile]:
    """The weight files of a rank."""
    if shards.format.plain:
        return [file for file in shards.files.values() if file.name.rpartition("/")[0] == mesh.folder(rank)]
    files = (file for file in shards.rank_files if file.rank % mesh.size == rank)
    return [shards.files[file.path] for file in files]
