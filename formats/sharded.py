"""A split checkpoint on disk: ``reshard.json``, side files, and a folder of safetensors files a rank.

Each shard file says in its header's metadata which rank of which mesh of which source it is, so that the manifest can
be rebuilt from the shards (all but the boundaries of the source's files).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from formats.axes import Run, merge_runs
from formats.checkpoint import WeightFile, find_side_files, with_modelopt
from formats.errors import CheckpointError, MismatchError
from formats.mesh import RANK_FOLDER, Mesh, mesh_from_document
from formats.safetensors import Header, TensorInfo, read_header, strict_json
from formats.stamps import Stamp, stamp_from_document

MANIFEST = "reshard.json"
VERSION = 1
METADATA_KEY = "reshard"


@dataclass(frozen=True)
class FileRecord:
    """A file of the output: its name relative to the root, its size in bytes, its checksum (None: not taken)."""

    name: str
    size: int
    checksum: str | None


@dataclass(frozen=True)
class SourceFileRecord:
    """A safetensors file of the source: enough to write it again byte for byte, given its tensors.

    ``checksum`` is that of the whole file; None where not all of it was read.
    """

    name: str
    size: int
    header: bytes
    checksum: str | None = None


@dataclass(frozen=True)
class SourceRecord:
    """Where the shards come from. ``id`` is the fingerprint of the weights; ``files`` is empty for a ``.bin`` source.

    ``aliases`` maps a tied tensor that is not stored to the one that is.
    """

    id: str
    location: str
    commit: str | None
    files: tuple[SourceFileRecord, ...]
    index_name: str | None
    index: bytes | None
    aliases: Mapping[str, str]


@dataclass(frozen=True)
class Identity:
    """What all shards of one run have in common: source, mesh, sizes of the axes, padded sizes, digest of the rules.

    ``blocks`` is the size of the blocks of quantized weights, where it is another than the source's.
    """

    source: str
    mesh: Mesh
    sizes: Mapping[str, int]
    padding: Mapping[str, int]
    plan: str
    blocks: tuple[int, int] | None = None

    def metadata(self, rank: int, places: Sequence[int] = ()) -> dict[str, str]:
        """The metadata of a shard file's header. ``places`` are those of its tensors among all of the model's, for a
        rank that does not hold each of them.
        """
        document = {
            "version": VERSION,
            "source": self.source,
            "mesh": self.mesh.to_document(),
            "rank": rank,
            "sizes": dict(sorted(self.sizes.items())),
            "padding": dict(sorted(self.padding.items())),
            "plan": self.plan,
        }
        document |= {"blocks": list(self.blocks)} if self.blocks else {}
        document |= {"places": _runs(places)} if places else {}
        return {"format": "pt", METADATA_KEY: json.dumps(document, separators=(",", ":"))}


@dataclass(frozen=True)
class Manifest:
    """The content of ``reshard.json``. ``architecture`` is the document of the plan; ``ranks`` has the files of each
    rank that is complete; ``side_files`` lie in the root; ``inputs`` are the weight files that were read, as they were.
    """

    identity: Identity
    source: SourceRecord
    architecture: Mapping[str, Any]
    max_shard_size: int
    side_files: tuple[FileRecord, ...]
    ranks: Mapping[int, tuple[FileRecord, ...]]
    inputs: tuple[Stamp, ...]


@dataclass(frozen=True)
class RankShards:
    """The files of one rank and the tensors in them, in the order of the files.

    ``places`` are those of the tensors among all of the model's; empty where the files do not say them.
    """

    rank: int
    folder: Path
    files: tuple[WeightFile, ...]
    tensors: Mapping[str, TensorInfo]
    places: Mapping[str, int]


@dataclass(frozen=True)
class ShardedCheckpoint:
    """A split checkpoint with all ranks there. ``manifest`` is None where it is lost."""

    path: Path
    config: dict[str, Any]
    identity: Identity
    manifest: Manifest | None
    ranks: tuple[RankShards, ...]
    side_files: tuple[Path, ...]


def plan_digest(architecture: Mapping[str, Any]) -> str:
    """A short id of a plan's rules."""
    return hashlib.sha256(json.dumps(architecture, sort_keys=True).encode()).hexdigest()[:16]


# ------------------------------------------------------------------------------------------------------- manifest


def manifest_text(manifest: Manifest) -> str:
    """The text of ``reshard.json``."""
    identity, source = manifest.identity, manifest.source
    document = {
        "format": "reshard",
        "version": VERSION,
        "mesh": identity.mesh.to_document(),
        "sizes": dict(sorted(identity.sizes.items())),
        "padding": dict(sorted(identity.padding.items())),
        "blocks": list(identity.blocks) if identity.blocks else None,
        "max_shard_size": manifest.max_shard_size,
        "row_parallel_bias": "the same on every rank, to be added once, after the all-reduce",
        "checksum": "columns64",
        "ranks": [
            {"rank": rank, "folder": identity.mesh.folder(rank), "files": [_file(record) for record in records]}
            for rank, records in sorted(manifest.ranks.items())
        ],
        "side_files": [_file(record) for record in manifest.side_files],
        "plan": manifest.architecture,
        "source": {
            "id": source.id,
            "location": source.location,
            "commit": source.commit,
            "aliases": dict(source.aliases),
            "index": {"name": source.index_name, "content": _text(source.index)} if source.index_name else None,
            "files": [_source_file_document(file) for file in source.files],
        },
        "inputs": [stamp.to_document() for stamp in manifest.inputs],
    }
    return json.dumps(document, indent=2, ensure_ascii=False) + "\n"


def _file(record: FileRecord) -> dict[str, Any]:
    return {"name": record.name, "size": record.size, "checksum": record.checksum}


def _source_file_document(file: SourceFileRecord) -> dict[str, Any]:
    return {"name": file.name, "size": file.size, "checksum": file.checksum, "header": _text(file.header[8:])}


def _text(content: bytes | None) -> str | None:
    return None if content is None else content.decode("utf-8")


def read_manifest(path: Path) -> Manifest:
    """Read ``reshard.json``. Raises CheckpointError that names the file and what is wrong with it."""
    try:
        document = strict_json(path.read_text(encoding="utf-8"))
        return _manifest(document, path)
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path}: cannot be read: {error}") from None
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        hint = "remove it: the shards say themselves what they are (only the original file boundaries are lost)"
        raise CheckpointError(f"{path} is not a manifest of reshard: {type(error).__name__} {error}", hint) from None


def _manifest(document: Any, path: Path) -> Manifest:
    if document["format"] != "reshard" or document["version"] != VERSION:
        raise CheckpointError(f"{path}: version {document.get('version')!r}, this reshard reads version {VERSION}")
    mesh = mesh_from_document(document["mesh"], str(path))
    source, index = document["source"], document["source"]["index"]
    identity = Identity(
        source["id"],
        mesh,
        _int_dict(document["sizes"]),
        _int_dict(document["padding"]),
        plan_digest(document["plan"]),
        _blocks(document["blocks"]),
    )
    return Manifest(
        identity=identity,
        source=SourceRecord(
            id=source["id"],
            location=source["location"],
            commit=source["commit"],
            files=tuple(_source_file(entry, path) for entry in source["files"]),
            index_name=_inside(index["name"], path) if index else None,
            index=index["content"].encode() if index else None,
            aliases=dict(source["aliases"]),
        ),
        architecture=document["plan"],
        max_shard_size=int(document["max_shard_size"]),
        side_files=tuple(_record(entry, path) for entry in document["side_files"]),
        ranks={entry["rank"]: tuple(_record(f, path) for f in entry["files"]) for entry in document["ranks"]},
        inputs=tuple(stamp_from_document(entry) for entry in document["inputs"]),
    )


def _blocks(value: Any) -> tuple[int, int] | None:
    return None if value is None else (int(value[0]), int(value[1]))


def _int_dict(value: Mapping[str, Any]) -> dict[str, int]:
    return {str(key): int(item) for key, item in value.items()}


def _source_file(entry: Mapping[str, Any], path: Path) -> SourceFileRecord:
    content = entry["header"].encode()
    return SourceFileRecord(
        _inside(entry["name"], path),
        int(entry["size"]),
        len(content).to_bytes(8, "little") + content,
        entry["checksum"],
    )


def _record(entry: Mapping[str, Any], path: Path) -> FileRecord:
    return FileRecord(_inside(entry["name"], path), int(entry["size"]), entry["checksum"])


def _inside(name: str, path: Path) -> str:
    """A relative name that stays in its folder."""
    parts = Path(name).parts
    if not parts or Path(name).is_absolute() or ".." in parts:
        raise CheckpointError(f"{path}: the file name '{name}' points outside the folder")
    return name


# --------------------------------------------------------------------------------------------------------- opening


def rank_folders(path: Path) -> list[Path]:
    """The folders in ``path`` that are named like those of ranks."""
    return sorted(p for p in path.iterdir() if p.is_dir() and RANK_FOLDER.fullmatch(p.name))


def is_sharded(path: Path) -> bool:
    """Whether a folder is a split checkpoint (complete or not)."""
    return path.is_dir() and ((path / MANIFEST).is_file() or bool(rank_folders(path)))


def open_sharded(path: Path) -> ShardedCheckpoint:
    """Open a split checkpoint: every rank, every header. No tensor data is read.

    Raises CheckpointError for what is missing or damaged, MismatchError for shards that do not belong together.
    """
    manifest = read_manifest(path / MANIFEST) if (path / MANIFEST).is_file() else None
    if manifest is None:
        identity, shards = _from_headers(path)
    else:
        identity = manifest.identity
        shards = {
            rank: _open_rank(path, manifest, rank) for rank in range(identity.mesh.size) if rank in manifest.ranks
        }
    missing = [identity.mesh.folder(rank) for rank in range(identity.mesh.size) if rank not in shards]
    if missing:
        more = f" and {len(missing) - 1} more are" if len(missing) > 1 else " is"
        raise CheckpointError(
            f"{path}: {missing[0]}{more} missing, the mesh is {identity.mesh}",
            "bring the folders of all ranks together",
        )
    ranks = tuple(shards[rank] for rank in range(identity.mesh.size))
    side = tuple(path / record.name for record in manifest.side_files) if manifest else _side_files(path)
    for file in side:
        if not file.is_file():
            raise CheckpointError(f"{file} is missing, {MANIFEST} lists it")
    return ShardedCheckpoint(path, _config(path), identity, manifest, ranks, side)


def _config(path: Path) -> dict[str, Any]:
    try:
        config = json.loads((path / "config.json").read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(
            f"{path / 'config.json'} is missing", "copy the one of the original model there"
        ) from None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path / 'config.json'} cannot be read: {error}") from None
    if not isinstance(config, dict):
        raise CheckpointError(f"{path / 'config.json'} is not a JSON object")
    return with_modelopt(config, path)


def _side_files(path: Path) -> tuple[Path, ...]:
    found = (file for file in find_side_files(path) if file.is_file() and file.name != MANIFEST)
    return tuple(file for file in found if not RANK_FOLDER.fullmatch(file.relative_to(path).parts[0]))


def _open_rank(path: Path, manifest: Manifest, rank: int) -> RankShards:
    files = []
    for record in manifest.ranks[rank]:
        file = path / record.name
        if not file.is_file():
            raise CheckpointError(f"{file} is missing, {MANIFEST} lists it")
        if file.stat().st_size != record.size:
            raise CheckpointError(f"{file} has {file.stat().st_size} bytes, {MANIFEST} says {record.size}")
        if file.suffix == ".safetensors":
            files.append(file)
    shards, identity = _read_rank(path, files, rank)
    _check_identity(identity, manifest.identity, files[0], path / MANIFEST)
    return shards


def _read_rank(path: Path, files: Sequence[Path], rank: int | None) -> tuple[RankShards, Identity]:
    """Read the headers of a rank's files; without ``rank`` the first header says which rank it is."""
    weight_files: list[WeightFile] = []
    tensors: dict[str, TensorInfo] = {}
    places: dict[str, int] = {}
    first: Identity | None = None
    for file in files:
        header = read_header(file)
        identity, found = _identity(header.metadata, file)
        rank = found if rank is None else rank
        if found != rank:
            raise MismatchError(f"{file} is a shard of rank {found}, it stands in the folder of rank {rank}")
        if first is not None:
            _check_identity(identity, first, file, files[0])
        first = first or identity
        twice = tensors.keys() & header.tensors.keys()
        if twice:
            raise CheckpointError(f"{file}: tensor '{min(twice)}' also stands in {tensors[min(twice)].file.name}")
        tensors.update(header.tensors)
        places.update(_places(header, file))
        weight_files.append(WeightFile(file.relative_to(path).as_posix(), file, file.stat().st_size, header.raw))
    if first is None or rank is None:
        raise CheckpointError(f"{path}: rank {rank} has no safetensors file")
    return RankShards(rank, files[0].parent, tuple(weight_files), tensors, places), first


def _from_headers(path: Path) -> tuple[Identity, dict[int, RankShards]]:
    """What the manifest would say, from the metadata of the shards."""
    shards: dict[int, RankShards] = {}
    first: tuple[Identity, Path] | None = None
    for folder in rank_folders(path):
        files = sorted(folder.glob("*.safetensors"))
        if not files:
            raise CheckpointError(f"{folder} has no safetensors file")
        rank_shards, identity = _read_rank(path, files, None)
        if first is not None:
            _check_identity(identity, first[0], files[0], first[1])
        first = first or (identity, files[0])
        if identity.mesh.folder(rank_shards.rank) != folder.name:
            raise MismatchError(
                f"{files[0]} is a shard of {identity.mesh.folder(rank_shards.rank)}, not of {folder.name}"
            )
        shards[rank_shards.rank] = rank_shards
    if first is None:
        raise CheckpointError(
            f"{path}: neither {MANIFEST} nor a folder of a rank is there", "give the folder that 'reshard split' wrote"
        )
    return first[0], shards


def _identity(metadata: Mapping[str, str], file: Path) -> tuple[Identity, int]:
    try:
        document = json.loads(metadata[METADATA_KEY])
        identity = Identity(
            document["source"],
            mesh_from_document(document["mesh"], str(file)),
            _int_dict(document["sizes"]),
            _int_dict(document["padding"]),
            document["plan"],
            _blocks(document.get("blocks")),
        )
        return identity, int(document["rank"])
    except (KeyError, TypeError, ValueError, AttributeError):
        raise CheckpointError(
            f"{file}: its header does not say which rank of what it is", "it was not written by reshard split"
        ) from None


def _places(header: Header, file: Path) -> dict[str, int]:
    """The places of a file's tensors among all of the model's, where its header says them."""
    runs = json.loads(header.metadata[METADATA_KEY]).get("places")
    if runs is None:
        return {}
    try:
        if sum(length for _, length in runs) != len(header.tensors):
            raise ValueError
        places = [place for start, length in runs for place in range(start, start + length)]
        return dict(zip(header.tensors, places, strict=True))
    except (TypeError, ValueError):
        raise CheckpointError(f"{file}: its header gives the places of other tensors than it holds") from None


def _runs(places: Sequence[int]) -> list[list[int]]:
    """``[[3, 2]]`` for 3 and 4: where each run of consecutive numbers begins, and how long it is."""
    return [[run.offset, run.length] for run in merge_runs(Run(place, 1) for place in places)]


def _check_identity(found: Identity, expected: Identity, file: Path, other: Path) -> None:
    if found.source != expected.source:
        raise MismatchError(
            f"{file} and {other} come from different sources ({str(found.source)[:12]} and {str(expected.source)[:12]})"
        )
    if found.mesh != expected.mesh:
        raise MismatchError(f"{file} belongs to the mesh {found.mesh}, {other} to {expected.mesh}")
    if found != expected:
        raise MismatchError(f"{file} and {other} were split by different plans, sizes or paddings")


# --------------------------------------------------------------------------------------------------- shards of files


@dataclass(frozen=True)
class ShardFile:
    """A safetensors file to be written: its name, and its tensors as (name, dtype, shape) in order."""

    name: str
    tensors: tuple[tuple[str, str, tuple[int, ...]], ...]
    nbytes: int


def partition(tensors: Iterable[tuple[str, str, tuple[int, ...], int]], max_size: int) -> tuple[ShardFile, ...]:
    """Divide tensors (name, dtype, shape, bytes), in order, into files of at most ``max_size`` bytes of data.

    A tensor larger than that has a file of its own. Names are those of transformers' save_pretrained.
    """
    groups: list[list[tuple[str, str, tuple[int, ...]]]] = [[]]
    totals = [0]
    for name, dtype, shape, nbytes in tensors:
        if groups[-1] and totals[-1] + nbytes > max_size:
            groups.append([])
            totals.append(0)
        groups[-1].append((name, dtype, shape))
        totals[-1] += nbytes
    if len(groups) == 1:
        return (ShardFile("model.safetensors", tuple(groups[0]), totals[0]),)
    return tuple(
        ShardFile(f"model-{i:05d}-of-{len(groups):05d}.safetensors", tuple(group), total)
        for i, (group, total) in enumerate(zip(groups, totals, strict=True), 1)
    )


def index_text(files: Sequence[ShardFile]) -> str:
    """The ``model.safetensors.index.json`` of several files, as transformers writes it."""
    weight_map = {name: file.name for file in files for name, _, _ in file.tensors}
    document = {
        "metadata": {"total_size": sum(file.nbytes for file in files)},
        "weight_map": dict(sorted(weight_map.items())),
    }
    return json.dumps(document, indent=2) + "\n"
