"""Opening a folder in another program's format: which format and mesh it has, and where each tensor lies.

It may be read as several formats, and as ranks of several meshes: the first that fits is taken.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import json
import math
from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import Any

from reshard.formats.documents import json_bytes, read_config
from reshard.formats.errors import CheckpointError, ReshardError
from reshard.formats.files.checkpoint import CONFIG, read_model_config
from reshard.formats.files.chunks import Chunk, whole_shape
from reshard.formats.files.dcp import Distributed
from reshard.formats.files.manifest import INTACT_FILE, MANIFEST
from reshard.formats.files.safetensors import TensorInfo, look_alike
from reshard.formats.files.side_files import find_side_files
from reshard.formats.files.training import model_files, read_training
from reshard.formats.mesh import Mesh, mesh_of
from reshard.formats.notation.architecture import SETTINGS, Architecture
from reshard.formats.notation.format import MODULES, PUBLISHED, Format
from reshard.formats.notation.format_file import is_in_modules, with_names
from reshard.formats.notation.spellings import Spellings
from reshard.formats.store import FilePath, name_in, read_file
from reshard.formats.wrappers import without_wrappers
from reshard.mesh.plan import Plan
from reshard.model.binding import bind, check_numbers, tied_twice
from reshard.model.config_dtype import dtype_of, with_dtype
from reshard.model.model import FEW, AxisSizes, FullTensor, Model
from reshard.model.naming import Spell, explained, known_forms, name_all
from reshard.placement.arrangement import Arrangement, arrangement_of, on_mesh
from reshard.placement.inverse import NameInverse
from reshard.placement.program_plan import made_config, program_plan
from reshard.placement.stored import Chunks, name_at, stack_of, unstacked
from reshard.source.completeness import check_complete, check_stored
from reshard.source.folder import Folder
from reshard.source.lora_side import LoraSide
from reshard.source.program_files import (
    left_behind,
    numbered_globally,
    read_chunked,
    read_ranks,
    read_shards,
    readings,
    weights_folder,
    without_files,
)
from reshard.source.source import UNSPLIT, ProgramFile, Source
from reshard.source.training import Affix, Training, parts_of


class _MisfitError(Exception):
    """The reason why a folder is not in a format. If no format fits, the reason with the highest ``rank`` is shown.

    It is 2 if the names are those of the format, and 0 if they are of no mesh.
    """

    def __init__(self, rank: int, error: ReshardError) -> None:
        super().__init__(str(error))
        self.rank, self.error = rank, error


@contextlib.contextmanager
def _misfit(rank: int) -> Iterator[None]:
    try:
        yield
    except ReshardError as error:
        raise _MisfitError(rank, error) from None


@dataclass(frozen=True)
class _ReadAs:
    """The content of a folder, read as one format: the tensors of each rank or the chunks in each file, and their
    model.
    """

    format: Format
    files: Sequence[ProgramFile]
    ranks: tuple[Mapping[str, TensorInfo], ...]
    chunks: Chunks | None
    training: Training | None
    model: Model
    mesh: Mesh | None
    """None if no file says it."""
    is_known: bool
    """Whether the padding is that of the format."""
    computed: Mapping[str, bytes] = field(default_factory=dict)
    """Side files that do not lie in the folder as they are."""
    given_dtype: str | None = None
    """The dtype of a config.json, if the weights have another."""
    twice: Mapping[str, str] = field(default_factory=dict)
    """The second names of tied tensors."""
    others: tuple[str, ...] = ()
    """Contents of its files besides the model."""

    @property
    def meshes(self) -> Iterable[Mesh]:
        """The meshes that the ranks may be, with pipeline stages as equal in length as possible."""
        if self.mesh is not None:
            return [self.mesh]
        stages = 1 + max(file.stage for file in self.files)
        tp, has_experts = len(_merged(self.ranks, self.chunks)) // stages, bool(self.model.architecture.expert_axes)
        dense = [mesh_of(tp, pp=stages)] if tp == 1 or not self.format.same_ranks or not has_experts else []
        return [*dense, mesh_of(tp, tp, same_ranks=True, pp=stages)] if has_experts and tp > 1 else dense

    def padded(self, plan: Plan, mesh: Mesh) -> Plan:
        """The plan on a mesh with the padding that the files have, if it is not known. Raises PlanError."""
        if self.is_known or not self.format.padding.free:
            return plan
        padding = padding_of(on_mesh(plan, self.format), _merged(self.ranks, self.chunks))
        return program_plan(self.model, self.format, mesh, padding=padding)

    def unlike(self, plan: Plan) -> tuple[int, _ReadAs, Plan]:
        """Count the tensors that differ from those of a plan. Returns also the first of them, in both. Raises
        ReshardError.
        """
        arrangement = arrangement_of(plan, self.format)
        if self.chunks is not None:
            lacking = {stored.name: dict[int, Chunk]() for stored in arrangement.stored}
            return len(lacking.keys() ^ self.chunks.keys()), replace(self, chunks={**lacking, **self.chunks}), plan
        planned = [
            {stored.name_on(rank): (stored.dtype, shape) for stored, shape in arrangement.tensors_of(rank)}
            for rank in range(plan.mesh.size)
        ]
        count = sum(
            planned[rank].get(name) != (info.dtype, info.shape)
            for rank, tensors in enumerate(self.ranks)
            for name, info in tensors.items()
        )
        return count, self, plan


def _merged(ranks: Sequence[Mapping[str, TensorInfo]], chunks: Chunks | None) -> Sequence[Mapping[str, TensorInfo]]:
    """The tensors of each rank; those in chunks as one rank would have them."""
    if chunks is None:
        return ranks
    infos = {name: info for tensors in ranks for name, info in tensors.items()}
    return [{name: info._replace(shape=whole_shape(chunks[name].values())) for name, info in infos.items()}]


def open_program(folder: Folder, model: Model | None = None) -> Source:
    """Open a folder in a program's format: in the first of the formats that it may be in, and on the first mesh, that
    fits.

    With a ``model`` it is opened as shards of that model, whatever it holds: with the format and mesh that most of its
    tensors fit. Then side files may be missing. Raises CheckpointError, MismatchError and PlanError.
    """
    ways = [(format, files) for format in folder.formats for files in readings(folder, format)]
    if not ways:
        raise without_files(folder.formats[0], folder.path)
    trained = [(format, files) for format, files in ways if format.files.is_distributed]
    if trained and folder.manifest is None:  # safetensors there are a part of what was saved
        known = _of_names((format for format, _ in trained), folder)
        ways = [(format, files) for format in known for files in readings(folder, format)]
    misfits: list[_MisfitError] = []
    unlike: list[tuple[int, _ReadAs, Plan]] = []
    for format, files in ways:
        try:
            reading = _read(folder, format, files, model)
        except _MisfitError as misfit:
            misfits.append(misfit)
            continue
        for mesh in reading.meshes:
            plan: Plan | None = None
            try:
                with _misfit(0 if files[0].mesh else 2):  # how much it says that a mesh is refused
                    unpadded = program_plan(reading.model, format, mesh)
                with _misfit(2):
                    plan = reading.padded(unpadded, mesh)
                    source = _source(folder, reading, plan, lacking=model is not None)
                    check_stored(source.arrangement, source.ranks, folder.path)
            except _MisfitError as misfit:
                misfits.append(misfit)
                if model is not None and plan is not None:
                    with contextlib.suppress(ReshardError):
                        unlike.append(reading.unlike(plan))
                continue
            if model is None:
                if folder.plan_file is not None:
                    check_numbers(reading.model)
                source = replace(source, without=_check_complete(reading, folder))
            return source
    if unlike:
        _, reading, nearest = min(unlike, key=lambda entry: entry[0])
        return _source(folder, reading, nearest, lacking=True)
    error = max(misfits, key=lambda misfit: misfit.rank).error
    if model is None and (trained or format.modules):
        config, _ = _config_of(format, folder, ())
        of_files = itertools.chain(*(folder.weights(file.path)[0] for file in files if not trained))
        names = _saved(folder, format).tensors if trained else of_files
        raise explained(error, folder.path, names, Spellings(folder.architecture(config), config))
    raise error


def _check_complete(reading: _ReadAs, folder: Folder) -> tuple[str, ...]:
    """The towers that the model is without (see ``check_complete``).

    Raises CheckpointError if tensors of the model are missing, or if most of those that are there are of another.
    """
    try:
        return check_complete(reading.model, folder.path)
    except CheckpointError as error:
        architecture = reading.model.architecture
        if reading.training is None and not reading.format.modules:
            raise
        saved = reading.training.saved.tensors if reading.training is not None else {}
        strangers = len(saved.keys() & {*reading.training.parts.rest}) if reading.training is not None else 0
        told: ReshardError = error
        if 2 * strangers > len(saved):
            what = f"{strangers:,} of {len(saved):,} tensors are none of '{architecture.name}'"
            told = CheckpointError(f"{folder.path}: {what}", "is config.json that of these tensors?")
        raise explained(told, folder.path, (), Spellings(architecture, reading.model.config)) from None


def _read(folder: Folder, format: Format, files: Sequence[ProgramFile], known: Model | None) -> _ReadAs:
    """Read the files as shards of a model: a known one, or the one that a config.json describes."""
    shards = read_shards(folder, files)
    split = shards[0].identity if shards else None
    ranks: tuple[Mapping[str, TensorInfo], ...] = ()
    chunks, training, given_dtype, computed = None, None, None, dict[str, bytes]()
    beside: tuple[str, ...] = ()
    with _misfit(1):
        if format.container.chunks and not format.files.is_distributed:
            ranks, chunks = read_chunked(folder, files)
        elif not format.container.chunks:
            ranks = read_ranks(folder, format, files, folder.mesh or (split.mesh if split else None))
    if known is not None:
        config, architecture = dict(known.config), known.architecture
    else:
        config, computed = _config_of(format, folder, ranks)
        architecture = folder.architecture(config)
    mesh = folder.mesh or files[0].mesh
    has_mesh = known is not None or all(
        name != "ep" or architecture.families.get(name) for name, _ in (mesh.degrees if mesh else ())
    )
    with _misfit(int(has_mesh)):
        inverse = NameInverse(format, architecture, config)
        record = folder.manifest.source if folder.manifest and folder.manifest.source.names is None else None
        twice = record.twice if record else {}
        recorded = [file.tensors for file in record.files] if record else []
        if format.files.is_distributed:
            saved, spell = _saved(folder, format), _spelling(format, architecture, config, twice, folder.lora)
            spell = _as_in(known, format, spell) if known is not None else spell
            beginning = folder.lora.beginning(folder.beginning) if folder.lora else folder.beginning
            parts = parts_of(saved, spell, format.container.ignores, beginning)
            training = Training(saved, parts, folder.beginning)
            ranks, chunks = _chunks_of(format, saved, parts.model)
        elif is_in_modules(format) or (format.modules and folder.manifest is None):
            spell = _spelling(format, architecture, config, twice)
            spell = _as_in(known, format, spell) if known is not None else spell
            ranks = ranks if folder.lora is None else tuple(map(folder.lora.of_file, ranks))
            stored = {name: without_wrappers(name) for tensors in ranks for name in tensors}
            naming = name_all(folder.path, stored, spell, folder.beginning).without_strangers(stored)
            ranks = tuple({new: info._replace(name=new) for new, info in naming.of(tensors)} for tensors in ranks)
            chunks = dict(naming.of(chunks)) if chunks is not None else None
            beside = naming.left_behind
        tensors = _merged(ranks, chunks)
        is_given = folder.config is not None and SETTINGS not in config
        if known is None and is_given:  # given apart from the weights, whose dtype it should say
            dtype, given = dtype_of(recorded or tensors), json.loads(computed[CONFIG])
            own, others = with_dtype(given, architecture.section(given), dtype)
            if others:
                config, _ = with_dtype(config, architecture.section(config), dtype)
                given_dtype = " and ".join(sorted(others))
                computed[CONFIG] = json_bytes(own) + b"\n"
        if mesh is not None and format.rules.numbered:
            mesh, tensors = numbered_globally(format, mesh, ranks)
        if known is not None:
            infos_of = {name: info for infos in reversed(tensors) for name, info in infos.items()}
            full = [FullTensor(name, info.dtype, None, MANIFEST, info.shape) for name, info in infos_of.items()]
        elif recorded:
            infos = itertools.chain.from_iterable(infos.values() for infos in recorded)
            full = [FullTensor(info.name, info.dtype, info.shape, MANIFEST) for info in infos]
        else:  # what is kept has the dtype of the original; what a program computes from it may have another
            intact = folder.path / INTACT_FILE
            unchanged = folder.weights(intact)[0] if intact.is_file() else {}
            own = {name: FullTensor(name, info.dtype, info.shape, INTACT_FILE) for name, info in unchanged.items()}
            inferred = inferred_tensors(inverse, tensors)
            full = [own.pop(tensor.name, tensor) for tensor in inferred] + [*own.values()]
        if not recorded and (format.rules.keep or any(line.also for line in format.rules.lines)):
            twice = tied_twice(architecture, config, full, partial(_look_alike, ranks, inverse.origins), inverse.again)
        full = [tensor for tensor in full if tensor.name not in twice]
        again = inverse.again if any(line.also for line in format.rules.lines) else {}  # its lines have these
        twice = {n: first for n, first in twice.items() if n not in again and any(n in infos for infos in ranks)}
    is_known = folder.manifest is not None
    if known is not None:
        if format.container.chunks:
            mesh, is_known = folder.mesh or (split.mesh if split else UNSPLIT), is_known or split is not None
        return _ReadAs(format, files, ranks, chunks, training, known, mesh, is_known, twice=twice, others=beside)
    with _misfit(2 * has_mesh):
        sizes = folder.manifest.identity.sizes if folder.manifest else None
        model = bind(architecture, config, full, axes=sizes or inferred_sizes(inverse, mesh, config, tensors, full))
        numbers = sum(math.prod(info.shape) for infos in tensors for info in infos.values())
        for kind in model.kinds:
            if math.prod(kind.shape) > _MARGIN * numbers + FEW:
                raise CheckpointError(
                    f"config.json: '{kind.name}' has the shape {list(kind.shape)} by it, and {numbers:,} numbers are "
                    "stored",
                    "it is not the config.json of these tensors, or is damaged",
                )
    more = (computed, given_dtype, twice, beside)
    return _ReadAs(format, files, ranks, chunks, training, model, mesh, is_known, *more)


def _look_alike(ranks: Sequence[Mapping[str, TensorInfo]], origins: Mapping[str, str], name: str, first: str) -> bool:
    """Whether two of a model's tensors look alike, by the stored tensors that they are in."""
    places = (origins.get(each, each) for each in (name, first))
    return look_alike(*(next(infos[at] for infos in ranks if at in infos) for at in places))


_MARGIN = 64
"""The most numbers of a tensor that a program may pack into one integer."""


def _source(folder: Folder, reading: _ReadAs, plan: Plan, *, lacking: bool) -> Source:
    """Return what was read in a program's format as a source; with ``lacking``, side files may be missing."""
    path, manifest, format, training = folder.path, folder.manifest, reading.format, reading.training
    kept = path / INTACT_FILE
    intact = folder.weights(kept)[0] if kept.is_file() else {}
    infos: dict[FilePath, list[TensorInfo]] = {file.path: [] for file in reading.files}
    infos |= {kept: []} if kept.is_file() else {}
    states = training.chunks() if training else ()
    for info in itertools.chain(*(tensors.values() for tensors in (*reading.ranks, intact)), states):
        infos.setdefault(info.file, []).append(info)
    is_trainers = training is not None and training.saved.what is not None
    side = folder.side_files()
    if manifest is None and (is_trainers or (folder.config is not None and format.files.tracker is not None)):
        side = model_files(path) if folder.config is None and (path / CONFIG).is_file() else {}
    if folder.lora is not None and folder.lora.is_adapter:  # what lies there is the model's
        side = {}
    if lacking:
        side = {name: file for name, file in side.items() if file.is_file()}
    return folder.source(
        format, plan, plan.model, (tensor.name for tensor in plan.model.tensors), reading.ranks,
        (folder.file(file, entry) for file, entry in infos.items()), side, computed=reading.computed,
        intact=intact, chunks=reading.chunks, training=training, given_dtype=reading.given_dtype, twice=reading.twice,
        left_behind=training.parts.words() if training
        else (*left_behind(folder, format, reading.files), *reading.others),
        rank_files=reading.files,
    )  # fmt: skip


def _saved(folder: Folder, format: Format) -> Distributed:
    saved = folder.once(read_training, weights_folder(format, folder.path))
    return folder.lora.of_distributed(saved) if folder.lora is not None else saved


def _spelling(
    format: Format,
    architecture: Architecture,
    config: Mapping[str, Any],
    twice: Iterable[str] = (),
    side: LoraSide | None = None,
) -> Spell:
    """Return a function that turns any known spelling of a tensor's name into the format's. ``side`` is for a run with
    an adapter.
    """
    origins, names = NameInverse(format, architecture, config), Spellings(architecture, config)
    second, is_adapter = {*twice}, side is not None and side.is_adapter

    def spell(name: str) -> str | None:
        name = side.spelled(name) if side is not None else name
        if format.modules and not is_adapter and name not in second and (spelled := names.in_modules(name)) is not None:
            return spelled
        if format.takes_any_names and names.is_joined(name):
            return None  # of transformers' modules, not of the checkpoint
        first = name
        while (stack := stack_of(format.rules.stacks, first)) is not None:
            first = name_at(stack, first, 0)
        if format.takes_any_names and origins.knows(first):
            return architecture.stated(name)
        return name if name in second or origins.knows(first) else None

    return spell


def _as_in(model: Model, format: Format, spell: Spell) -> Spell:
    """Return a function that turns any spelling that ``spell`` knows into the format's names of the model's tensors."""
    own, spellings = frozenset(model.kind_of), Spellings(model.architecture, model.config)

    @cache
    def stored() -> Mapping[Hashable, str]:
        arrangement = on_mesh(program_plan(model, format, UNSPLIT), format)
        return {spellings.tensor(each.name): each.name for each in arrangement.stored}

    def spelled(name: str) -> str | None:
        found = spell(name)
        return found if found is None or found in own else stored().get(spellings.tensor(found), found)

    return spelled


def _of_names(formats: Iterable[Format], folder: Folder) -> list[Format]:
    """The formats of a distributed checkpoint that know each of the layers' names which one of them knows: also that
    with the names of transformers' modules. Those that know more of the other names come first. Raises CheckpointError
    if none does; without a config.json, all may be.
    """
    known = list[tuple[Format, set[str], int]]()
    for format in dict.fromkeys(spelled for each in formats for spelled in (each, with_names(each, MODULES, None))):
        forms, names, own = set[str](), [*map(without_wrappers, _saved(folder, format).tensors)], set[str]()
        with contextlib.suppress(ReshardError):
            config, _ = _config_of(format, folder, ())
            architecture = folder.architecture(config)
            forms = known_forms(names, _spelling(format, architecture, config))
            own = known_forms(names, Spellings(architecture, config).only(MODULES if format.modules else PUBLISHED))
        known.append((format, forms, len(own)))
    known.sort(key=lambda entry: (len(entry[1]), entry[2]), reverse=True)
    of_layers = [(format, {form for form in forms if "*" in form}) for format, forms, _ in known]
    every = set[str]().union(*(forms for _, forms in of_layers))
    found = [format for format, forms in of_layers if forms == every]
    if not found:
        (one, first), *others = of_layers
        other, second = next(entry for entry in others if entry[1] - first)
        raise CheckpointError(
            f"{folder.path} has names of two formats: '{min(first - second, default='none')}' of '{one.name}', "
            f"'{min(second - first)}' of '{other.name}'",
            "save the one model alone",
        )
    return found


def _chunks_of(
    format: Format, checkpoint: Distributed, names: Mapping[str, str]
) -> tuple[tuple[dict[str, TensorInfo], ...], dict[str, dict[int, Chunk]]]:
    """The chunks of each number of a distributed checkpoint, and the chunks of each tensor.

    ``names`` has the stored name of each tensor that is read.
    """
    pieces: dict[str, list[tuple[Chunk, TensorInfo]]] = {}
    for name, stored in names.items():
        renamed = [(at, info._replace(name=name)) for at, info in checkpoint.tensors[stored].chunks]
        pieces |= unstacked(format.rules.stacks, name, renamed)
    ranks: list[dict[str, TensorInfo]] = [{} for _ in range(max(map(len, pieces.values()), default=0))]
    for name, chunks in pieces.items():
        for tensors, (_, info) in zip(ranks, chunks, strict=False):
            tensors[name] = info
    return tuple(ranks), {name: dict(enumerate(at for at, _ in chunks)) for name, chunks in pieces.items()}


def _config_of(
    format: Format, folder: Folder, ranks: Sequence[Mapping[str, TensorInfo]]
) -> tuple[dict[str, Any], dict[str, bytes]]:
    """The Hugging Face config of a model in a program's format, and the side files that are not in its folder.

    The config is the one that was given, or that beside the weights, or is made from the program's own. Raises
    CheckpointError.
    """
    path, where, side = folder.path, folder.config, dict[str, FilePath]()
    if folder.lora is not None and folder.lora.is_adapter:
        apart = copy.copy(folder)
        apart.lora = None
        of_base = folder.lora.adapted.config if folder.lora.adapted else _config_of(format, apart, ranks)[0]
        config = folder.lora.config(of_base)
        return config, {CONFIG: json_bytes(config) + b"\n"}
    if where is not None:
        side = {name_in(file, where): file for file in find_side_files(where) if file.is_file()}
    elif format.files.is_distributed and not (path / CONFIG).is_file():
        side = model_files(path)
    if where is not None or side:
        at: FilePath = where or side[CONFIG].parent
        config = folder.once(read_model_config, at)
        return config, {name: folder.once(read_file, file) for name, file in side.items()}
    if (path / CONFIG).is_file() or format.settings is None or not (path / format.settings.file).is_file():
        try:
            return folder.once(read_model_config, path), {}
        except CheckpointError as error:
            hint = "give a folder that has the model's config.json, and its tokenizer, with --config DIR"
            raise CheckpointError(error.message, error.hint or hint) from None
    stored = ((info.name, info.dtype, info.shape) for info in ranks[0].values())
    config = made_config(format.settings, folder.once(read_config, path / format.settings.file), stored, len(ranks))
    return config, {CONFIG: json_bytes(config) + b"\n"}


def inferred_tensors(inverse: NameInverse, ranks: Sequence[Mapping[str, TensorInfo]]) -> list[FullTensor]:
    """The tensors of the original, inferred from the names of stored tensors. Raises CheckpointError."""
    stored = {name: info for rank in reversed(ranks) for name, info in rank.items()}
    lengths = {name: info.shape[0] for name, info in stored.items() if info.shape} if inverse.has_chunks else {}
    origins = inverse.of(stored, lengths)
    alone = Counter(origins.values() if inverse.has_chunks else ())  # a rank's shape may be another
    return [
        FullTensor(
            name, stored[origin].dtype, None, stored[origin].file.name,
            stored[origin].shape if name in inverse.unchanged or alone[origin] == 1 else None,
        )
        for name, origin in origins.items()
    ]  # fmt: skip


def inferred_sizes(
    inverse: NameInverse,
    mesh: Mesh | None,
    config: Mapping[str, object],
    ranks: Sequence[Mapping[str, TensorInfo]],
    full: Sequence[FullTensor],
) -> dict[str, int]:
    """The sizes of axes that config.json does not give, from tensors that are stored as they are, or of which the
    format cuts a dimension.

    ``full`` are the inferred tensors; of a single rank, those with a shape may have another name there.
    """
    architecture, tp = inverse.architecture, dict(mesh.degrees).get("tp", 1) if mesh else len(ranks)
    sizes = AxisSizes(architecture, config, {})
    configured, inferred = sizes.of({}), dict[str, int]()
    shapes = {name: info.shape for name, info in ranks[0].items()}
    if len(ranks) == 1:
        shapes |= {tensor.name: tensor.local for tensor in full if tensor.local is not None}
    for name, shape in shapes.items():
        match = architecture.match(name)
        rule = sizes.holds(match) if match else None
        for i, (dim, length) in enumerate(zip(rule.shapes[0].dims if rule else (), shape, strict=False)):
            if dim.axis is not None and dim.axis not in configured and dim.axis not in inferred:
                holders = sum(name in tensors for tensors in ranks)  # those of one pipeline stage
                is_dealt, is_cut = dim.axis in architecture.dealt, inverse.cut_of(name) == i
                inferred[dim.axis] = length * max(1, holders if is_dealt else min(holders, tp) if is_cut else 1)
    return inferred


def padding_of(arrangement: Arrangement, ranks: Sequence[Mapping[str, TensorInfo]]) -> dict[str, int]:
    """The padded size of each axis that may be padded, from the shapes of stored tensors.

    Each is the sum of all ranks' parts of a stored tensor that has a dimension of this axis alone.
    """
    model, padded = arrangement.plan.model, dict[str, int]()
    for axis in model.architecture.pad:
        for location in arrangement.atoms.values():
            dims, order = location.portion.component.factors, location.portion.order
            place = next((i for i, factor in enumerate(order) if dims[factor].axis == axis), None)
            if place is None or location.portion.component.label is not None:
                continue
            layout, stored = location.layout, location.stored
            lengths = {
                layout.boxes[rank].dims[order[place]]: ranks[rank][stored.name_on(rank)].shape[place]
                for rank in layout.boxes
                if stored.name_on(rank) in ranks[rank] and len(ranks[rank][stored.name_on(rank)].shape) > place
            }
            size = sum(lengths.values())
            if size > layout.full[order[place]]:
                padded[axis] = size
            break
    return padded


def states_of(source: Source) -> Iterator[tuple[Affix, Source]]:
    """The training states that have the shapes of the model's tensors, each kind as a source of its own.

    Its tensors have the names of the model's. Raises CheckpointError, MismatchError and PlanError.
    """
    training, format = source.training, source.format.of_states
    if training is None:
        return
    architecture, config = source.model.architecture, source.model.config
    for affix, names in training.parts.states.items():
        ranks, chunks = _chunks_of(format, training.saved, names)
        tensors = _merged(ranks, chunks)
        inverse = NameInverse(format, architecture, config)
        full = inferred_tensors(inverse, tensors)
        second = {name: first for name, first in inverse.again.items() if name not in source.model.kind_of}
        twice = tied_twice(architecture, config, full, lambda *_: bool(source.twice), second)
        full = [tensor for tensor in full if tensor.name not in twice]
        model = bind(architecture, config, full, axes=inferred_sizes(inverse, None, config, tensors, full))
        plan = program_plan(model, format, source.plan.mesh, padding=source.plan.padding or None)
        check_stored(arrangement_of(plan, format, chunks, twice), ranks, source.path)
        states = replace(source, format=format, plan=plan, model=model, ranks=ranks, chunks=chunks, twice=twice)
        yield affix, replace(states, intact={})
