"""Opens a folder in another program's format, which the program or reshard wrote, as a source."""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from formats.documents import json_bytes, read_config
from formats.errors import CheckpointError, MismatchError, ReshardError, brief
from formats.files.checkpoint import CONFIG, METADATA, find_side_files, read_weights, with_modelopt
from formats.files.chunks import Chunk, check_tiling, read_chunks, whole_shape
from formats.files.dcp import Distributed, is_distributed
from formats.files.safetensors import Header, TensorInfo, read_header
from formats.files.sharded import KEPT, MANIFEST, METADATA_KEY, Identity, Manifest, Shard, read_shard
from formats.mesh import Mesh, mesh_of
from formats.notation.architecture import Architecture
from formats.notation.architecture_files import find_architecture, load_architecture
from formats.notation.format import Format
from formats.notation.format_file import all_formats
from formats.notation.format_rules import LaterLayers
from formats.notation.patterns import Pattern, numbered_names
from formats.store import FilePath, like, name_in, read_file
from reshard.model.model import FullTensor
from reshard.model.sizes import AxisSizes
from reshard.placement.arrangement import Arrangement
from reshard.placement.inverse import Origins
from reshard.placement.program_config import made_config
from reshard.placement.stacks import name_at, stack_of, unstacked
from reshard.source.distributed_source import Training, known_names, parts_of

if TYPE_CHECKING:
    from formats.files.torch_bin import Saved

DISTCP = ".distcp"
LAYER = "layer"
"""The index of layers in a format's names."""


class ProgramFile(NamedTuple):
    """A program's weight file: its rank and pipeline stage, and the number of all ranks if its name says that.

    ``inside`` is the entry of the file that has the rank's tensors, ``mesh`` what the names of all files say it is.
    """

    path: FilePath
    rank: int
    stage: int
    ranks: int | None
    inside: str | None = None
    mesh: Mesh | None = None


def weights_folder(format: Format, folder: FilePath) -> FilePath:
    """The folder of a program's weight files: the one that its tracker file names, or this one.

    Raises CheckpointError if the tracker names a folder that is not there.
    """
    if format.files.tracker is None or not (folder / format.files.tracker).is_file():
        return folder
    text = read_file(folder / format.files.tracker).decode("utf-8", "replace").strip()
    name = f"iter_{int(text):07d}" if text.isdecimal() and len(text) < 10 else text
    if not re.fullmatch(r"release|iter_[0-9]{7,}", name):
        raise CheckpointError(f"{folder / format.files.tracker}: {brief(text)} is neither a number nor 'release'")
    if not (folder / name).is_dir():
        raise CheckpointError(f"{folder / format.files.tracker} says {text}, and there is no folder {name}")
    return folder / name


def program_files(format: Format, folder: FilePath, mesh: Mesh | None = None) -> list[ProgramFile]:
    """The weight files of a folder that are named as a format says, in the order of their ranks and parts.

    If the names fit several meshes, they are read as those of ``mesh``, or of the first possible mesh.
    """
    return next(iter(readings(format, folder, mesh)), [])


def readings(format: Format, folder: FilePath, mesh: Mesh | None = None) -> list[list[ProgramFile]]:
    """The weight files of a folder, once for each way in which their names can be read."""
    folder = weights_folder(format, folder)
    pattern = "/".join("*" for _ in format.files.name.split("/"))
    names = [name_in(path, folder) for path in like(folder, pattern)] if folder.is_dir() else []
    if "{tp_rank" in format.files.name:
        ways = [(mesh.pp > 1, dict(mesh.degrees).get("ep", 1) > 1)] if mesh else itertools.product((0, 1), repeat=2)
        found = [_of_coordinates(format, folder, names, bool(pp), bool(ep)) for pp, ep in ways]
        return [files for files in found if files]
    files = _of_ranks(format, folder, names)
    return [files] if files else []


def _of_ranks(format: Format, folder: FilePath, names: Sequence[str]) -> list[ProgramFile]:
    staged = numbered_names(format.files.pp, names) if format.files.pp else []
    width = max([words["tp"] for _, words in staged], default=0) + 1  # ranks of a stage
    found: list[tuple[int, int, int, int | None, str]]
    found = [(w["pp"] * width + w["tp"], w["part"], w["pp"], None, name) for name, w in staged]
    plain = (
        []
        if found
        else [
            match for each in (format.files.name, format.files.parts) if each for match in numbered_names(each, names)
        ]
    )
    found += [
        (w.get("rank", w.get("shard", 1) - 1), w.get("part", w.get("number", 0)), 0, w.get("ranks"), name)
        for name, w in plain
    ]
    ordered = sorted(found, key=lambda file: file[:2])
    if not ordered and format.files.is_distributed and is_distributed(folder):
        return [ProgramFile(folder / METADATA, 0, 0, None)]  # its files have other names, or none is there
    return [ProgramFile(folder / name, rank, stage, ranks) for rank, _, stage, ranks, name in ordered]


def _of_coordinates(format: Format, folder: FilePath, names: Sequence[str], pp: bool, ep: bool) -> list[ProgramFile]:
    """Files whose names say the place of their rank along each dimension of the mesh."""
    pattern = format.files.of(pp, ep)
    if (pp and "{pp_rank" not in pattern) or (ep and "{ep_rank" not in pattern):
        return []
    places = {
        tuple(words.get(f"{name}_rank", 0) for name in ("pp", "ep", "tp")): folder / name
        for name, words in numbered_names(pattern, names)
    }
    if not places:
        return []
    stages, experts, tensors = (max(of) + 1 for of in zip(*places, strict=True))
    if (pp and stages == 1) or (ep and experts == 1):
        return []
    width = max(tensors, experts)
    # Experts that no rank has a part of are dealt over the ranks that all else is divided over.
    diagonal = {(rank % experts, rank % tensors): rank for rank in range(width)}
    same = min(experts, tensors) > 1 and {place[1:] for place in places} <= diagonal.keys()
    chunks = _chunks(format, next(iter(places.values())))
    mesh = mesh_of(tensors, experts, pp=stages * len(chunks))
    if same:
        inner = (("tp", tensors), ("ep", experts))
        mesh = Mesh(tuple(each for each in mesh.degrees if each[0] == "pp") + inner, same_ranks=True)
    found = []
    for chunk, inside in enumerate(chunks):
        for (stage, expert, tensor), path in sorted(places.items()):
            number = chunk * stages + stage
            here = diagonal[expert, tensor] if same else expert * tensors + tensor
            rank = number * (width if same else experts * tensors) + here
            found.append(ProgramFile(path, rank, number, mesh.size, inside, mesh))
    return found


def _chunks(format: Format, path: FilePath) -> list[str | None]:
    """The entries of a file that have tensors: several where a rank has several (virtual) pipeline stages."""
    if format.container.inside is None:
        return [None]
    inside, entries = format.container.inside, _saved(path, format.container.inside).tensors
    if not entries:
        raise CheckpointError(f"{path}: has no entry '{inside}' with tensors")
    return [*sorted(entries, key=lambda name: int(name.removeprefix(inside) or 0))]


def _saved(path: FilePath, inside: str) -> Saved:
    from formats.files.torch_bin import read_saved  # rarely needed

    pattern = re.compile(re.escape(inside.rstrip("0123456789")) + "[0-9]*")
    return read_saved(path, lambda name: pattern.fullmatch(name) is not None)


def read_program_file(file: ProgramFile) -> tuple[dict[str, TensorInfo], dict[str, str], Header | None]:
    """The tensors of a rank in a file, its tied names, and its header if it is safetensors. Raises CheckpointError."""
    if file.inside is None:
        return read_weights(file.path)
    saved = _saved(file.path, file.inside)
    if file.inside not in saved.tensors:
        raise CheckpointError(f"{file.path}: has no entry '{file.inside}' with tensors")
    return saved.tensors[file.inside], saved.aliases[file.inside], None


def tensors_in(path: FilePath, inside: str | None) -> list[TensorInfo]:
    """All tensors of the model in a file, in whichever entries that begin with ``inside``. Raises CheckpointError."""
    if inside is None:
        return [*read_weights(path)[0].values()]
    return [info for tensors in _saved(path, inside).tensors.values() for info in tensors.values()]


def left_behind(files: Sequence[ProgramFile]) -> list[str]:
    """What files have besides the tensors of the model, in a few words. Raises MismatchError if they are of different
    steps.
    """
    found: dict[str, None] = {}
    first: tuple[FilePath, object] | None = None
    for file in files:
        if file.inside is None:
            continue
        others = _saved(file.path, file.inside).others
        step = others.get("iteration")
        first = first or (file.path, step)
        if step != first[1]:
            raise MismatchError(f"{file.path} is of iteration {brief(step)}, {first[0]} of iteration {brief(first[1])}")
        found |= dict.fromkeys(name for name, value in others.items() if isinstance(value, str))
    return [*found]


def without_files(format: Format, folder: FilePath) -> CheckpointError:
    """The error for a folder whose manifest names a format, but which has none of that format's weight files."""
    if format.files.tracker is None or (folder / format.files.tracker).is_file():
        return CheckpointError(
            f"{folder} has no weight files of the format '{format.name}' ({format.files.name})",
            "bring the files of all ranks together, or write them again",
        )
    return CheckpointError(
        f"{folder}: {format.files.tracker} is missing, which names the folder of the weights",
        f"bring it back, with the text '{format.files.folder}' or the number of the iteration",
    )


def formats_for(folder: FilePath) -> list[Format]:
    """The formats whose file names a folder has."""
    return [format for format in all_formats().values() if program_files(format, folder)]


def read_chunked(
    files: Sequence[ProgramFile],
) -> tuple[tuple[dict[str, TensorInfo], ...], dict[str, dict[int, Chunk]]]:
    """The tensors of each file, and the chunks of each tensor. Raises CheckpointError."""
    ranks, chunks = list[dict[str, TensorInfo]](), defaultdict[str, dict[int, Chunk]](dict)
    for number, file in enumerate(files):
        header = read_header(file.path)
        ranks.append(header.tensors)
        shapes = {name: info.shape for name, info in header.tensors.items()}
        for name, at in read_chunks(file.path, header.metadata, shapes).items():
            chunks[name][number] = at
    return tuple(ranks), dict(chunks)


def training_of(format: Format, found: Distributed, origins: Origins) -> Training:
    """The parts of a distributed checkpoint. Raises CheckpointError if it has no tensor of the model."""
    knows = partial(_knows, format, origins)
    return Training(found, parts_of(found, knows, format.container.ignores))


def _knows(format: Format, origins: Origins, name: str) -> bool:
    while (stack := stack_of(format.rules.stacks, name)) is not None:
        name = name_at(stack, name, 0)
    return origins.knows(name)


def likeliest(
    candidates: Sequence[Format],
    path: FilePath,
    found: Distributed,
    config_folder: Path | None,
    plan_file: Path | None,
) -> list[Format]:
    """The formats of distributed checkpoints that know the most of the names; without a config.json, all of them."""
    counts: dict[str, int] = {}
    for format in candidates:
        try:
            config, _ = config_of(format, path, config_folder, ())
            architecture = load_architecture(plan_file) if plan_file else find_architecture(config, path)
            counts[format.name] = known_names(found, partial(_knows, format, origins_of(format, architecture, config)))
        except ReshardError:
            counts[format.name] = 0
    return [format for format in candidates if counts[format.name] == max(counts.values())]


def chunks_of(
    format: Format, found: Distributed, names: Mapping[str, str]
) -> tuple[tuple[dict[str, TensorInfo], ...], dict[str, dict[int, Chunk]]]:
    """The chunks of each number of a distributed checkpoint, and the chunks of each tensor.

    ``names`` has the stored name of each tensor that is read.
    """
    pieces: dict[str, list[tuple[Chunk, TensorInfo]]] = {}
    for name, stored in names.items():
        renamed = [(at, info._replace(name=name)) for at, info in found.tensors[stored].chunks]
        pieces |= unstacked(format.rules.stacks, name, renamed)
    ranks: list[dict[str, TensorInfo]] = [{} for _ in range(max(map(len, pieces.values()), default=0))]
    for name, of in pieces.items():
        for tensors, (_, info) in zip(ranks, of, strict=False):
            tensors[name] = info
    return tuple(ranks), {name: dict(enumerate(at for at, _ in of)) for name, of in pieces.items()}


def whole_tensors(
    ranks: Sequence[Mapping[str, TensorInfo]], chunks: Mapping[str, Mapping[int, Chunk]]
) -> dict[str, TensorInfo]:
    """The whole tensors that files have chunks of."""
    infos = {name: info for tensors in ranks for name, info in tensors.items()}
    return {name: info._replace(shape=whole_shape(chunks[name].values())) for name, info in infos.items()}


def _check_chunks(arrangement: Arrangement, ranks: Sequence[Mapping[str, TensorInfo]], path: FilePath) -> None:
    """Raise MismatchError unless the chunks are exactly those of the tensors of an arrangement."""
    assert arrangement.chunks is not None
    lacking = set(arrangement.chunks)
    for stored in arrangement.stored:
        lacking.discard(stored.name)
        if stored.constant is not None and not arrangement.chunks.get(stored.name):
            continue  # whoever wrote it did without
        check_tiling(stored.name, arrangement.chunks[stored.name], stored.whole_shape, path)
        infos = (tensors[stored.name] for tensors in ranks if stored.name in tensors)
        other = next((info for info in infos if info.dtype != stored.dtype), None)
        if other is not None:
            raise MismatchError(f"{other.file}: tensor '{stored.name}' is {other.dtype}, it should be {stored.dtype}")
    if lacking:
        raise MismatchError(f"{path}: tensor '{min(lacking)}' is none of this model's")


def read_ranks(
    format: Format, files: Sequence[ProgramFile], where: FilePath, mesh: Mesh | None = None
) -> tuple[dict[str, TensorInfo], ...]:
    """The tensors of each rank, of ``mesh`` if it is known.

    Raises CheckpointError if a rank is missing, or a tensor is there twice.
    """
    count = max([file.rank for file in files]) + 1
    said = {file.ranks for file in files if file.ranks is not None}
    if len(said) > 1:
        raise MismatchError(f"{where} has files of different numbers of ranks, {', '.join(map(str, sorted(said)))}")

    if mesh is not None and count > mesh.size:
        raise MismatchError(f"{where} has files of rank {count - 1}, which {mesh} does not have")
    ranks: list[dict[str, TensorInfo]] = [{} for _ in range(max([count, *said, mesh.size if mesh else 0]))]
    for file in files:
        found, aliases, _ = read_program_file(file)
        found |= {name: found[kept]._replace(name=name) for name, kept in aliases.items()}
        tensors = {name: info for name, info in found.items() if not format.container.ignores(name)}
        twice = tensors.keys() & ranks[file.rank].keys()
        if twice:
            raise CheckpointError(f"{file.path}: tensor '{min(twice)}' also stands in another file of this rank")
        ranks[file.rank].update(tensors)
    for rank, found in enumerate(ranks):
        if not found:
            mesh = files[0].mesh or mesh
            name = f" ({format.files.name_of(mesh, rank, 0)})" if mesh else ""
            hint = "bring the folders of all ranks together"
            if mesh is not None and dict(mesh.degrees).get("ep", 1) > 1:
                hint += (
                    "; with another --expert-tensor-parallel-size than tp, they are read if it is 1, and tp and ep are "
                    "equal or one divides the other: save others with --ckpt-format torch_dist, which is for any mesh"
                )
            raise CheckpointError(f"{where}: the files of rank {rank} of {len(ranks)} are missing{name}", hint)
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
    lines = [
        *(behind for further in format.rules.further for line in lines if (behind := _behind(further, line))),
        *lines,
    ]
    found = [{name: _first_match(lines, name) for name in rank} for rank in ranks]
    counts = [_counts(matches.values()) for matches in found]
    layers: list[int] = []
    for stage in range(mesh.pp):
        of = {count.get(LAYER, 0) for rank, count in enumerate(counts) if mesh.stage(rank) == stage}
        if len(of) > 1:
            raise MismatchError(f"the ranks of stage {stage} have {' and '.join(map(str, sorted(of)))} layers")
        layers += of
    named = []
    for number, (rank, matches) in enumerate(zip(ranks, found, strict=True)):
        held = {axis: count for axis, count in counts[number].items() if axis in format.rules.numbered}
        first = {axis: mesh.coordinates(number).get("ep", 0) * count for axis, count in held.items()}
        first[LAYER] = sum(layers[: mesh.stage(number)])
        named.append({_shifted(name, matches[name], first): info for name, info in rank.items()})
    return dataclasses.replace(mesh, stages=tuple(layers)) if mesh.pp > 1 else mesh, named


def _behind(further: LaterLayers, line: Pattern) -> Pattern | None:
    """The names of a line's tensors behind the last layer."""
    words = further.found.match(line.text)
    return Pattern(further.new.fill({**words, further.new_index: f"{{{further.new_index}}}"})) if words else None


_Match = tuple[Pattern, Mapping[str, str]]


def _first_match(lines: Iterable[Pattern], name: str) -> _Match | None:
    matches = ((line, line.match(name)) for line in lines)
    return next(((line, found) for line, found in matches if found is not None), None)


def _counts(matches: Iterable[_Match | None]) -> dict[str, int]:
    """One more than the largest number of each index in names."""
    found: dict[str, int] = {}
    for line, words in filter(None, matches):
        for axis in line.indices:
            found[axis] = max(found.get(axis, 0), 1 + int(words[axis]))
    return found


def _shifted(name: str, match: _Match | None, first: Mapping[str, int]) -> str:
    if match is None:
        return name
    line, words = match
    return line.fill({**words, **{axis: str(int(words[axis]) + first.get(axis, 0)) for axis in line.indices}})


def check_belonging(files: Sequence[ProgramFile]) -> Identity | None:
    """The split that files belong to, if reshard wrote them. Other programs' files do not state it.

    Raises MismatchError if such files are of another rank than their name says, or of different splits.
    """
    first: tuple[Shard, FilePath] | None = None
    for file in files:
        header = read_header(file.path) if file.path.suffix == ".safetensors" else None
        if header is None or METADATA_KEY not in header.metadata:
            continue
        shard = read_shard(header, file.path)
        if shard.rank != file.rank % shard.identity.mesh.size:  # a rank may have several files with chunks
            raise MismatchError(f"{file.path} is a file of rank {shard.rank}, its name says rank {file.rank}")
        if first is not None and shard.identity != first[0].identity:
            raise MismatchError(f"{file.path} and {first[1]} are of different splits")
        first = first or (shard, file.path)
    return first[0].identity if first is not None else None


def config_of(
    format: Format, path: FilePath, given: Path | None, ranks: Sequence[Mapping[str, TensorInfo]]
) -> tuple[dict[str, Any], dict[str, bytes]]:
    """The Hugging Face config of a model in a program's format, and the side files that are not in its folder.

    The config is that of the folder ``given``, or that beside the weights, or is made from the program's own. Raises
    CheckpointError.
    """
    if given is not None:
        side = {name_in(file, given): file for file in find_side_files(given) if file.is_file()}
        config = with_modelopt(read_config(given / CONFIG), given)
        return config, {name: read_file(file) for name, file in side.items()}
    if (path / CONFIG).is_file() or format.settings is None or not (path / format.settings.file).is_file():
        try:
            return with_modelopt(read_config(path / CONFIG), path), {}
        except CheckpointError as error:
            hint = "give a folder that has the model's config.json, and its tokenizer, with --config DIR"
            raise CheckpointError(error.message, error.hint or hint) from None
    stored = ((info.name, info.dtype, info.shape) for info in ranks[0].values())
    config = made_config(format.settings, read_config(path / format.settings.file), stored, len(ranks))
    return config, {CONFIG: json_bytes(config) + b"\n"}


def side_files_of(format: Format, path: FilePath) -> Iterator[tuple[str, FilePath]]:
    """Files beside a program's weights that, by their names, belong to the model and not to the program."""
    own = {MANIFEST, KEPT, format.files.tracker, *format.container.documents}
    for file in find_side_files(path):
        name = name_in(file, path)
        of_a_step = format.files.tracker is not None and re.match(r"(release|iter_[0-9]+)/", name)
        if name not in own and not of_a_step:
            yield name, file


def full_tensors(manifest: Manifest | None) -> list[FullTensor] | None:
    """The tensors of the original, from a manifest; None if it does not have them."""
    if manifest is None or not manifest.source.files:
        return None
    infos = (info for file in manifest.source.files for info in file.tensors.values())
    return [FullTensor(info.name, info.dtype, info.shape, MANIFEST) for info in infos]


def origins_of(format: Format, architecture: Architecture, config: Mapping[str, object]) -> Origins:
    """Finds which Hugging Face tensors those of a format are made of."""
    return Origins(format, architecture, AxisSizes(architecture, config, {}), config)


def inferred_tensors(
    format: Format, architecture: Architecture, config: Mapping[str, object], ranks: Sequence[Mapping[str, TensorInfo]]
) -> list[FullTensor]:
    """The tensors of the original, inferred from the names of stored tensors. Raises CheckpointError."""
    stored = {name: info for rank in reversed(ranks) for name, info in rank.items()}
    found = origins_of(format, architecture, config).of(stored)
    forms = {name: architecture.form(name)[0] for name in found if format.rules.keep}
    first = {form: name for name, form in reversed(forms.items())}
    kept = {form for form, name in first.items() if not any(line.target.match(name) for line in format.rules.lines)}
    alone = Counter(found.values() if format.container.chunks else ())  # a rank's shape may be another
    return [
        FullTensor(
            name, stored[of].dtype, None, stored[of].file.name,
            stored[of].shape if forms.get(name) in kept or alone[of] == 1 else None,
        )
        for name, of in found.items()
    ]  # fmt: skip


def kept_tensors(path: FilePath) -> list[FullTensor]:
    """The tensors of the original that the program does not store, from the file that keeps them, if there is one."""
    infos = read_header(path).tensors.values() if path.is_file() else ()
    return [FullTensor(info.name, info.dtype, info.shape, path.name) for info in infos]


def inferred_sizes(
    architecture: Architecture,
    config: Mapping[str, object],
    ranks: Sequence[Mapping[str, TensorInfo]],
    full: Sequence[FullTensor],
) -> dict[str, int]:
    """The sizes of axes that config.json does not give, from tensors that are stored as they are.

    ``full`` are the inferred tensors; of a single rank, those with a shape may have another name there.
    """
    sizes = AxisSizes(architecture, config, {})
    dealt = {axis for families in architecture.families.values() for family in families for axis in family}
    known, found = sizes.of({}), dict[str, int]()
    shapes = {name: info.shape for name, info in ranks[0].items()}
    if len(ranks) == 1:
        shapes |= {tensor.name: tensor.held for tensor in full if tensor.held is not None}
    for name, shape in shapes.items():
        match = architecture.match(name)
        rule = sizes.holds(match) if match else None
        for dim, length in zip(rule.shapes[0].dims if rule else (), shape, strict=False):
            if dim.axis is not None and dim.axis not in known:
                holders = sum(name in tensors for tensors in ranks)  # those of one pipeline stage
                found.setdefault(dim.axis, length * (holders if dim.axis in dealt and holders else 1))
    return found


def padding_of(arrangement: Arrangement, ranks: Sequence[Mapping[str, TensorInfo]]) -> dict[str, int]:
    """The padded size of each axis that may be padded, from the shapes of stored tensors.

    Each is the sum of all ranks' parts of a stored tensor that has a dimension of this axis alone.
    """
    model, found = arrangement.plan.model, dict[str, int]()
    for axis in model.architecture.pad:
        for placed in arrangement.placed.values():
            dims, order = placed.portion.component.factors, placed.portion.order
            place = next((i for i, factor in enumerate(order) if dims[factor].axis == axis), None)
            if place is None or placed.portion.component.label is not None:
                continue
            layout, stored = placed.layout, placed.stored
            lengths = {
                layout.boxes[rank].dims[order[place]]: ranks[rank][stored.name_on(rank)].shape[place]
                for rank in layout.boxes
                if stored.name_on(rank) in ranks[rank] and len(ranks[rank][stored.name_on(rank)].shape) > place
            }
            size = sum(lengths.values())
            if size > layout.full[order[place]]:
                found[axis] = size
            break
    return found


def meshes(count: int, stages: int, format: Format, has_experts: bool) -> Iterator[Mesh]:
    """The possible meshes of a number of ranks with so many pipeline stages (as equal in length as possible)."""
    tp = count // stages
    if tp == 1 or not format.same_ranks or not has_experts:
        yield mesh_of(tp, pp=stages)
    if has_experts and tp > 1:
        yield mesh_of(tp, tp, same_ranks=True, pp=stages)


def check_stored(arrangement: Arrangement, ranks: Sequence[Mapping[str, TensorInfo]], path: FilePath) -> None:
    """Raise MismatchError unless each rank has exactly the tensors, dtypes and shapes of an arrangement."""
    if arrangement.chunks is not None:
        _check_chunks(arrangement, ranks, path)
        return
    for rank, tensors in enumerate(ranks):
        lacking = dict(tensors)
        for stored, shape in arrangement.held(rank):
            name = stored.name_on(rank)
            info = lacking.pop(name, None)
            if info is None:
                raise MismatchError(f"{path}: tensor '{name}' is missing in the files of rank {rank}")
            if info.shape != shape or info.dtype != stored.dtype:
                raise MismatchError(
                    f"{info.file}: tensor '{name}' is {info.dtype} {list(info.shape)}, rank {rank} of "
                    f"{arrangement.plan.mesh} has {stored.dtype} {list(shape)}"
                )
        if lacking:
            raise MismatchError(f"{path}: tensor '{min(lacking)}' of rank {rank} is none of this model's")
