"""The weight files of another program's format: their names, and the tensors of each rank in them.

A distributed checkpoint of a trainer has dictionaries: the model may lie under a key (``model.``, ``state_dict.``), and
the states of the optimizer beside it, each named after its parameter (``optim.state.{name}.exp_avg``). The names
themselves tell them apart.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections import defaultdict
from collections.abc import Mapping, Sequence

from reshard.formats.errors import CheckpointError, IncompleteError, MismatchError, brief
from reshard.formats.files.checkpoint import step_of, weight_files
from reshard.formats.files.chunks import Chunk, read_chunks
from reshard.formats.files.containers import SAFETENSORS, Weights
from reshard.formats.files.manifest import MANIFEST, METADATA_KEY, Identity, Shard, read_shard
from reshard.formats.files.safetensors import TensorInfo
from reshard.formats.files.sharded import rank_folders
from reshard.formats.files.torch_archive import read_saved
from reshard.formats.files.training import find_training
from reshard.formats.mesh import Mesh, mesh_of
from reshard.formats.notation.format import Format, Pattern, numbered_names
from reshard.formats.notation.format_file import OWN, is_in_modules
from reshard.formats.store import FilePath, glob, name_in, read_file
from reshard.source.folder import Folder
from reshard.source.source import ProgramFile

LAYER = "layer"
"""The index of layers in a format's names."""


def weights_folder(format: Format, folder: FilePath) -> FilePath:
    """The folder of a program's weight files: the one that its tracker file names, or this one.

    Raises CheckpointError if the tracker names a folder that is not there.
    """
    files = format.files
    if files.is_single or files.tracker is None or not (folder / files.tracker).is_file():
        return folder
    name = step_of(folder / files.tracker, read_file(folder / files.tracker, 1 << 10))
    if not (folder / name).is_dir():
        raise CheckpointError(f"{folder / files.tracker} names {name}, and there is no such folder")
    return folder / name


def readings(folder: Folder, format: Format) -> list[list[ProgramFile]]:
    """The weight files of a folder that are named as a format says, in the order of their ranks and parts.

    They are there once for each way in which the names can be read, on the mesh of the manifest if there is one.
    """
    if format is OWN:
        return [_own_files(folder)]
    where = weights_folder(format, folder.path)
    if is_in_modules(format):  # one checkpoint, in whatever container
        files = [ProgramFile(file, 0, 0, None) for file in weight_files(where)]
        return [files] if files else []
    if format.files.is_single and not (where / str(format.files.tracker)).is_file():
        return []  # another program's states may be read as this, but are not called so
    pattern = "/".join("*" for _ in format.files.name.split("/"))
    is_listed = where.is_dir() and not format.files.is_single
    names = [name_in(path, where) for path in glob(where, pattern)] if is_listed else []
    if "{tp_rank" in format.files.name:
        mesh, ways = folder.mesh, list(itertools.product((False, True), repeat=2))
        if mesh is not None:
            ways = [(mesh.pp > 1, dict(mesh.degrees).get("ep", 1) > 1)]
        named = [(ep, files) for pp, ep in ways if (files := _of_coordinates(folder, format, where, names, pp, ep))]
        inside = format.container.inside
        first = [file for file in named[0][1] if file.path == named[0][1][0].path] if named else []
        if not any(".experts." in name for file in first for name in _weights_of(folder, file, inside)[0]):
            named = [way for way in named if not way[0]] or named  # mp_rank_00_001 is a stage, no rank of experts
        return [files for _, files in named]
    matches = numbered_names(format.files.pp, names) if format.files.pp else []
    width = max([words["tp"] for _, words in matches], default=0) + 1  # ranks of a stage
    for each in (format.files.name, format.files.parts) if not matches else ():
        matches += numbered_names(each, names) if each else []
    numbered = [
        (words.get("part", words.get("number", 0)), ProgramFile(
            where / name, words.get("pp", 0) * width + words.get("tp", words.get("rank", words.get("shard", 1) - 1)),
            words.get("pp", 0), words.get("ranks"),
        ))
        for name, words in matches
    ]  # fmt: skip
    if numbered:
        return [[file for _, file in sorted(numbered, key=lambda entry: (entry[1].rank, entry[0]))]]
    training = folder.once(find_training, where) if format.files.is_distributed else None
    return (
        [[ProgramFile(training.file, 0, 0, None)]] if training else []
    )  # its files have other names, or none is there


def _of_coordinates(
    folder: Folder, format: Format, where: FilePath, names: Sequence[str], pp: bool, ep: bool
) -> list[ProgramFile]:
    """Files whose names say the place of their rank along each dimension of the mesh."""
    pattern = format.files.of(pp, ep)
    if (pp and "{pp_rank" not in pattern) or (ep and "{ep_rank" not in pattern):
        return []
    places = {
        tuple(words.get(f"{name}_rank", 0) for name in ("pp", "ep", "tp")): where / name
        for name, words in numbered_names(pattern, names)
    }
    if not places:
        return []
    stages, experts, tensors = (max(numbers) + 1 for numbers in zip(*places, strict=True))
    stages, experts = max(stages, 1 + pp), max(experts, 1 + ep)  # names have these numbers only where there are several
    chunks: list[str | None] = [None]  # the entries of a file that have tensors: several with virtual pipeline stages
    if (inside := format.container.inside) is not None:
        file = next(iter(places.values()))
        chunks = [
            *sorted(folder.once(read_saved, file, inside).states, key=lambda name: int(name.removeprefix(inside) or 0))
        ]
        if not chunks:
            raise CheckpointError(f"{file}: has no entry '{inside}' with tensors")
    width = max(tensors, experts)
    # Experts that no rank has a part of are dealt over the ranks that all else is divided over.
    diagonal = {(rank % experts, rank % tensors): rank for rank in range(width)}
    same = min(experts, tensors) > 1 and {place[1:] for place in places} <= diagonal.keys()
    mesh = mesh_of(tensors, experts, pp=stages * len(chunks))
    if same:
        inner = (("tp", tensors), ("ep", experts))
        mesh = Mesh(tuple(degree for degree in mesh.degrees if degree[0] == "pp") + inner, same_ranks=True)
    files = []
    for chunk, entry in enumerate(chunks):
        for (stage, expert, tensor), path in sorted(places.items()):
            number = chunk * stages + stage
            number_in_stage = diagonal[expert, tensor] if same else expert * tensors + tensor
            rank = number * (width if same else experts * tensors) + number_in_stage
            files.append(ProgramFile(path, rank, number, mesh.size, entry, mesh))
    return files


def _weights_of(folder: Folder, file: ProgramFile, inside: str | None) -> tuple[dict[str, TensorInfo], dict[str, str]]:
    """The tensors of a rank in a file, or in its entry, and the tied names."""
    if file.inside is None:
        return folder.weights(file.path)[:2]
    saved = folder.once(read_saved, file.path, str(inside))
    if file.inside not in saved.states:
        raise CheckpointError(f"{file.path}: has no entry '{file.inside}' with tensors")
    return saved.states[file.inside]


def left_behind(folder: Folder, format: Format, files: Sequence[ProgramFile]) -> tuple[str, ...]:
    """Return the names of what files hold besides the model's tensors. Raises MismatchError if the files are of
    different steps.
    """
    inside, first, names = format.container.inside, files[0].path, dict[str, None]()
    for path in (file.path for file in files) if inside is not None else ():
        settings, begun = (folder.once(read_saved, at, inside).extras for at in (path, first))
        step, expected = settings.get("iteration"), begun.get("iteration")
        if step != expected:
            raise MismatchError(f"{path} is of iteration {brief(step)}, {first} of iteration {brief(expected)}")
        names |= dict.fromkeys(name for name, value in settings.items() if isinstance(value, str))
    return tuple(names)


def without_files(format: Format, folder: FilePath) -> CheckpointError:
    """The error for a folder whose manifest names a format, but which has none of that format's weight files."""
    if format.files.tracker is None or (folder / format.files.tracker).is_file():
        return IncompleteError(
            f"{folder} has no weight files of the format '{format.name}' ({format.files.name})",
            "bring the files of all ranks together, or write them again",
        )
    return IncompleteError(
        f"{folder}: {format.files.tracker} is missing, which names the folder of the weights",
        f"bring it back, with the text '{format.files.folder}' or the number of the iteration",
    )


def read_chunked(
    folder: Folder, files: Sequence[ProgramFile]
) -> tuple[tuple[dict[str, TensorInfo], ...], dict[str, dict[int, Chunk]]]:
    """The tensors of each file, and the chunks of each tensor. Raises CheckpointError."""
    ranks, chunks = list[dict[str, TensorInfo]](), defaultdict[str, dict[int, Chunk]](dict)
    for number, file in enumerate(files):
        tensors, _, header = folder.weights(file.path)
        ranks.append(tensors)
        for name, at in read_chunks(file.path, header.metadata if header else {}, tensors).items():
            chunks[name][number] = at
    return tuple(ranks), dict(chunks)


def read_ranks(
    folder: Folder, format: Format, files: Sequence[ProgramFile], mesh: Mesh | None
) -> tuple[dict[str, TensorInfo], ...]:
    """The tensors of each rank, of ``mesh`` if it is known.

    Raises CheckpointError if a rank is missing, or a tensor is there twice.
    """
    count, where = max(file.rank for file in files) + 1, folder.path
    counts = {file.ranks for file in files if file.ranks is not None}
    if len(counts) > 1:
        raise MismatchError(f"{where} has files of different numbers of ranks, {', '.join(map(str, sorted(counts)))}")
    if mesh is not None and count > mesh.size:
        raise MismatchError(f"{where} has files of rank {count - 1}, which {mesh} does not have")
    ranks: list[dict[str, TensorInfo]] = [{} for _ in range(max([count, *counts, mesh.size if mesh else 0]))]
    for file in files:
        infos, aliases = _weights_of(folder, file, format.container.inside)
        infos = infos | {name: infos[original]._replace(name=name) for name, original in aliases.items()}
        tensors = {name: info for name, info in infos.items() if not format.container.ignores(name)}
        twice = tensors.keys() & ranks[file.rank].keys()
        if twice:
            raise CheckpointError(f"{file.path}: tensor '{min(twice)}' also stands in another file of this rank")
        ranks[file.rank].update(tensors)
    of_files = {file.rank for file in files}
    for rank, tensors in enumerate(ranks):
        if not tensors and not (format.plain and rank in of_files):
            mesh = files[0].mesh or mesh
            name = f" ({format.files.name_of(mesh, rank, 0)})" if mesh else ""
            hint = "bring the folders of all ranks together"
            if mesh is not None and dict(mesh.degrees).get("ep", 1) > 1:
                hint += (
                    "; with another --expert-tensor-parallel-size than tp, they are read if it is 1, and tp and ep are "
                    "equal or one divides the other: save others with --ckpt-format torch_dist, which is for any mesh"
                )
            raise IncompleteError(f"{where}: the files of rank {rank} of {len(ranks)} are missing{name}", hint)
    return tuple(ranks)


def numbered_globally(
    format: Format, mesh: Mesh, ranks: Sequence[Mapping[str, TensorInfo]]
) -> tuple[Mesh, list[dict[str, TensorInfo]]]:
    """The tensors of each rank with the model's own layer and expert numbers in their names, if ranks count from 0.

    The returned mesh also has the number of layers of each stage, taken from the names. Raises MismatchError if the
    ranks of a stage have different numbers of layers.
    """
    targets = [*(renaming.new for renaming in format.rules.names), *(line.target for line in format.rules.lines)]
    lines = [target for target in targets if target.indices & {*format.rules.numbered}]
    lines[:0] = [  # names of tensors behind the last layer
        Pattern(further.new.fill({**words, further.new_index: f"{{{further.new_index}}}"}))
        for further in format.rules.further
        for line in lines
        if (words := further.old.match(line.text))
    ]
    matches = [
        {name: match for name in rank
         if (match := next(((line, words) for line in lines if (words := line.match(name)) is not None), None))}
        for rank in ranks
    ]  # fmt: skip
    counts: list[dict[str, int]] = [{} for _ in ranks]  # one more than the largest number of each index in names
    for count, of_rank in zip(counts, matches, strict=True):
        for line, words in of_rank.values():
            count |= {axis: max(count.get(axis, 0), 1 + int(words[axis])) for axis in line.indices}
    layers: list[int] = []
    for stage in range(mesh.pp):
        layer_counts = {count.get(LAYER, 0) for rank, count in enumerate(counts) if mesh.stage(rank) == stage}
        if len(layer_counts) > 1:
            raise MismatchError(
                f"the ranks of stage {stage} have {' and '.join(map(str, sorted(layer_counts)))} layers"
            )
        layers += layer_counts
    named: list[dict[str, TensorInfo]] = []
    for number, rank in enumerate(ranks):
        place = mesh.coordinates(number).get("ep", 0)
        first = {axis: place * count for axis, count in counts[number].items() if axis in format.rules.numbered}
        first[LAYER], shifted = sum(layers[: mesh.stage(number)]), dict[str, str]()
        for name, (line, words) in matches[number].items():
            numbers = {axis: str(int(words[axis]) + first.get(axis, 0)) for axis in line.indices}
            shifted[name] = line.fill({**words, **numbers})
        named.append({shifted.get(name, name): info for name, info in rank.items()})
    return dataclasses.replace(mesh, stages=tuple(layers)) if mesh.pp > 1 else mesh, named


def _own_files(folder: Folder) -> list[ProgramFile]:
    """The files in the ranks' folders: those in the manifest or, without one, those whose headers name their rank.

    Raises CheckpointError if a file does not say it, MismatchError if it lies in another rank's folder.
    """
    path, manifest, files = folder.path, folder.manifest, list[ProgramFile]()
    if manifest is not None:
        mesh, ranks = manifest.identity.mesh, sorted(manifest.ranks.items())
        recorded = ((rank, path / record.name) for rank, records in ranks for record in records)
        weights = ((rank, file) for rank, file in recorded if SAFETENSORS.holds(file.name) and file.is_file())
        return [ProgramFile(file, rank, 0, mesh.size, None, mesh) for rank, file in weights]
    for file in (file for rank_folder in rank_folders(path) for file in glob(rank_folder, "*.safetensors")):
        header = folder.weights(file)[2]
        shard = read_shard(header.metadata if header is not None else {}, file)
        if (name := shard.identity.mesh.folder(shard.rank)) != file.parent.name:
            raise MismatchError(f"{file} is a shard of {name}, not of {file.parent.name}")
        files.append(ProgramFile(file, shard.rank, 0, shard.identity.mesh.size, None, shard.identity.mesh))
    return files


def read_shards(folder: Folder, files: Sequence[ProgramFile], expected: Identity | None = None) -> list[Shard]:
    """Return the splits that files say they belong to, if reshard wrote them. Other programs' files do not say it.

    Raises MismatchError if such files are of another rank than their name says, or of different splits, or not of the
    one that is ``expected``; CheckpointError for a header that contradicts itself.
    """
    shards, where = list[Shard](), MANIFEST
    for file in files:
        tensors, _, header = folder.weights(file.path) if SAFETENSORS.holds(file.path.name) else Weights({})
        if header is None or METADATA_KEY not in header.metadata:
            continue
        shard = read_shard(header.metadata, file.path)
        if shard.places and len(shard.places) != len(tensors):
            raise CheckpointError(f"{file.path}: its header gives the places of other tensors than it holds")
        if shard.rank != file.rank % shard.identity.mesh.size:  # a rank may have several files with chunks
            raise MismatchError(f"{file.path} is a shard of rank {shard.rank}, its name says rank {file.rank}")
        expected, where = (shard.identity, str(file.path)) if expected is None else (expected, where)
        if shard.identity != expected:
            why = ": they come from different sources" if shard.identity.source != expected.source else ""
            raise MismatchError(f"{file.path} and {where} are of different splits{why}")
        shards.append(shard)
    return shards
