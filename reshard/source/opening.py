"""Finds a source that a user names (a folder, an id on the Hub), and opens it: a full checkpoint, or shards in whatever
format. ``Folder`` says which of these it is.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from reshard.formats.documents import json_bytes, read_config
from reshard.formats.errors import CheckpointError, IncompleteError, MismatchError, PlanError, ReshardError
from reshard.formats.files.checkpoint import (
    ADAPTER,
    ADAPTER_CONFIG,
    CONFIG,
    Checkpoint,
    open_adapter,
    open_checkpoint,
    read_model_config,
)  # fmt: skip
from reshard.formats.files.manifest import MANIFEST, METADATA_KEY, Manifest, plan_digest
from reshard.formats.files.safetensors import TensorInfo, look_alike
from reshard.formats.files.sharded import is_sharded
from reshard.formats.notation.architecture import SETTINGS, Architecture
from reshard.formats.notation.format import MODULES
from reshard.formats.notation.format_file import HUGGING_FACE, OWN, in_modules
from reshard.formats.notation.spellings import Spellings
from reshard.formats.store import FilePath, StoredPath
from reshard.formats.wrappers import has_wrappers, without_wrappers
from reshard.mesh.plan import make_plan
from reshard.model.binding import bind, lines_for, may_be_tied, tied_twice
from reshard.model.model import AxisSizes, FullTensor, Model
from reshard.model.naming import (
    ChoiceError,
    Naming,
    SeveralError,
    are_states,
    explained,
    known_forms,
    name_all,
    refuse_lora,
)
from reshard.model.unknown import NoRuleError
from reshard.publishing.journal import unfinished_command
from reshard.source.access import Access, Place
from reshard.source.completeness import check_complete, check_stored
from reshard.source.folder import Folder
from reshard.source.recognition import recognise
from reshard.source.source import UNSPLIT, Source
from reshard.store.selection import HubAccess, Weights
from reshard.store.staging_names import SUFFIX

if TYPE_CHECKING:
    from reshard.model.draft import Draft


def find(source: Place, access: HubAccess, weights: Weights) -> FilePath:
    """Return the path from which a folder, a Hub id or a URL is read; a store is returned as it is. ``weights`` says
    how much of the weights is needed. Raises ReshardError.
    """
    if isinstance(source, StoredPath):
        return source
    path = Path(source)
    is_there = os.path.lexists(path) and path.exists()  # a name may be too long for one of a file
    if str(source) and access.revision is None and is_there:
        from reshard.store.weight_sets import chosen  # rarely needed

        return (chosen(path) if path.is_file() else None) or path
    from reshard.store.hub import fetch  # rarely needed

    return StoredPath(fetch(str(source), access, weights))


def found_config(access: Access) -> FilePath | None:
    """Return the folder of the given config.json, or of the side files that are given. Raises ReshardError."""
    hub = HubAccess(token=access.token, cache_dir=access.cache_dir, quiet=access.quiet)
    if access.config is None:
        return None
    path = find(access.config, hub, Weights.NONE)
    return path.parent if path.name == CONFIG else path


def open_source(
    path: FilePath,
    *,
    plan_file: Path | None = None,
    config: FilePath | None = None,
    model: Model | None = None,
    adapted: Model | None = None,
    is_part: bool = False,
) -> Source:
    """Open a full or a split checkpoint and bind it to its architecture, or to the user's plan file.

    ``config`` is a folder with the config.json and side files of a model in another program's format. Shards in a
    program's format are opened as those of a known ``model``, if one is given, whatever they hold; an adapter as one to
    the model ``adapted``. Of a full checkpoint that ``is_part`` of a model, tensors may be missing. Raises
    CheckpointError, MismatchError and PlanError.
    """
    folder = recognise(Folder(path, config=config, plan_file=plan_file))
    return open_folder(folder, model=model, adapted=adapted, is_part=is_part)


def open_folder(
    folder: Folder, *, model: Model | None = None, adapted: Model | None = None, is_part: bool = False
) -> Source:
    """Open what is recognised already (see ``open_source``)."""
    path, is_known = folder.path, model is not None and folder.kind == "program"
    if not is_known and isinstance(path, Path) and path.name.endswith(SUFFIX) and unfinished_command(path) is not None:
        raise CheckpointError(f"{path} is unfinished output", "run the command that wrote it again: it resumes")
    if folder.damage is not None:
        raise folder.damage
    if folder.manifest is not None:
        _check_recorded(path, folder.manifest, with_sizes=not is_known)
    may_choose = folder.kind == "full" or any(f.files.is_distributed or f.modules for f in folder.formats)
    if folder.beginning is not None and not may_choose:
        raise ChoiceError(f"{path} has one model", "leave out --weights")
    if folder.kind == "program":
        from reshard.source.opening_programs import open_program  # rarely needed

        return open_program(folder, model)
    if folder.kind == "split":
        return _open_sharded(folder)
    return _open_full(folder, model, adapted, is_part=is_part)


def _check_recorded(path: FilePath, manifest: Manifest, *, with_sizes: bool) -> None:
    """Raise CheckpointError unless all files of ranks that a manifest lists are there, ``with_sizes`` with theirs."""
    for rank, records in manifest.ranks.items():
        if lacking := [record.name for record in records if not (path / record.name).is_file()]:
            all_of_it = f"{path}: the files of rank {rank} of {manifest.identity.mesh.size} are missing ({lacking[0]})"
            one = f"{path / lacking[0]} is missing, {MANIFEST} lists it"
            what = all_of_it if len(lacking) == len(records) else one
            raise IncompleteError(what, "bring the files of all ranks together")
        for file, size in ((path / record.name, record.size) for record in (records if with_sizes else ())):
            if (there := file.stat().st_size) != size:
                kind = CheckpointError if there else IncompleteError
                raise kind(f"{file} has {there:,} bytes, {MANIFEST} says {size:,}", "copy it again from its origin")


def lines_of_any(source: Place, access: Access) -> Architecture:
    """The lines that cover the tensors of a folder or a Hub id, even if shapes do not fit. Raises ReshardError."""
    path = find(source, access, Weights.HEADERS)
    folder = recognise(Folder(path, plan_file=access.plan_file))
    if folder.kind == "split":
        return folder.architecture(read_model_config(path))
    checkpoint = open_adapter(path, found_config(access)) if folder.kind == "adapter" else open_checkpoint(path)
    lines = folder.architecture(checkpoint.config)
    return lines_for(lines, checkpoint.config, _with_aliases(checkpoint).values())


def draft_of(path: FilePath) -> Draft:
    """A draft of rules for a checkpoint's folder. Raises CheckpointError and PlanError."""
    from reshard.model.draft import draft  # rarely needed

    if is_sharded(path):
        raise CheckpointError(f"{path} is split already", "a draft is made from a full checkpoint")
    checkpoint = open_checkpoint(path)
    return draft(checkpoint.config, _with_aliases(checkpoint).values())


def _open_full(folder: Folder, like: Model | None, adapted: Model | None, *, is_part: bool) -> Source:
    path, is_adapter = folder.path, folder.kind == "adapter"
    known = dict(adapted.config) if adapted is not None else None
    if folder.lora is not None:
        checkpoint = folder.lora.checkpoint(folder.path, folder.weights, folder.config, folder.beginning)
    else:
        checkpoint = open_adapter(path, folder.config, known) if is_adapter else open_checkpoint(path, folder.weights)
    files, config, tensors = [*map(folder.file, checkpoint.files)], checkpoint.config, _with_aliases(checkpoint)
    # It looks like a full checkpoint, but file headers tell. A rank's adapter may be merged into the rank's weights.
    if adapted is None and METADATA_KEY in files[0].metadata:
        raise CheckpointError(f"{path} is one rank of a split checkpoint", "give the folder of all ranks")
    if is_adapter:
        _check_adapter(config[SETTINGS], checkpoint)
    if adapted is not None:
        from reshard.formats.notation.adapters import adapter_architecture  # rarely needed

        architecture = adapter_architecture(adapted.architecture, config, path)
    else:
        architecture = folder.architecture(config)
    if is_adapter:
        _check_vocabulary(architecture, config, tensors)
    naming: Naming | None = None
    may_be_spelled = adapted is None and not is_adapter
    try:
        if folder.beginning is not None or any(map(has_wrappers, checkpoint.tensors)):
            naming = _naming(folder, architecture, checkpoint)
        if naming is None:
            try:
                model, twice = _bound(folder, architecture, config, tensors)
            except NoRuleError:
                naming = _naming(folder, architecture, checkpoint) if may_be_spelled else None
                if naming is None:
                    raise
        if naming is not None:
            checkpoint = _renamed(checkpoint, naming)
            tensors = _with_aliases(checkpoint)
            model, twice = _bound(folder, architecture, config, tensors)
        without = () if is_part else check_complete(model, path)
        is_of_modules = may_be_spelled and Spellings(architecture, config).are_of_modules(k.name for k in model.kinds)
        if is_of_modules and (spelled := _in_modules(folder, checkpoint, like)) is not None:
            return spelled
    except (CheckpointError, NoRuleError) as error:
        if may_be_spelled and (spelled := _in_modules(folder, checkpoint, like)) is not None:
            return spelled
        if may_be_spelled and folder.lora is None:
            refuse_lora(path, map(without_wrappers, checkpoint.tensors))
            raise explained(error, path, checkpoint.tensors, Spellings(architecture, config)) from None
        raise
    index = path / checkpoint.index_name if checkpoint.index_name else None
    notes = (checkpoint.note, naming.note if naming is not None else None)
    has_own = folder.config is None and adapted is None and (path / CONFIG).is_file()
    return folder.source(
        HUGGING_FACE, make_plan(model, UNSPLIT), model, (name for name in tensors if name not in twice), [tensors],
        files, folder.side_files(),
        computed={CONFIG: json_bytes(config) + b"\n"} if is_adapter and not has_own else {},
        index=index if index is not None and index.is_file() else None, checkpoint=checkpoint, twice=twice,
        left_behind=naming.left_behind if naming else (), note="; ".join(filter(None, notes)) or None, without=without,
    )  # fmt: skip


def _bound(
    folder: Folder, architecture: Architecture, config: Mapping[str, Any], tensors: Mapping[str, TensorInfo]
) -> tuple[Model, Mapping[str, str]]:
    """The model of these tensors, and the second names of tied ones."""
    tied = may_be_tied(architecture, config)
    seconds = Spellings(architecture, config).second_names(tensors) if tied else {}
    twice = tied_twice(architecture, config, tensors.values(), lambda a, b: look_alike(tensors[a], tensors[b]), seconds)
    full = (tensor for name, tensor in tensors.items() if name not in twice)
    return bind(architecture, config, full, every_rule=folder.plan_file is not None), twice


def _naming(folder: Folder, architecture: Architecture, checkpoint: Checkpoint) -> Naming | None:
    """Return the naming of a checkpoint by its model's names; None if it has these names already. Raises
    CheckpointError.
    """
    from reshard.placement.inverse import NameInverse  # rarely needed

    origins = NameInverse(HUGGING_FACE, architecture, checkpoint.config)
    spellings = Spellings(architecture, checkpoint.config)
    names = {stored: without_wrappers(stored) for stored in checkpoint.tensors}

    def spell(name: str) -> str | None:
        return architecture.stated(name) if origins.is_known(name) or spellings.is_second(name) else None

    if folder.beginning is None and not known_forms(names.values(), spell) and not are_states(names.values()):
        return None
    naming = name_all(checkpoint.path, names, spell, folder.beginning).without_strangers(names)
    return naming if naming.note is not None or naming.left_behind else None


def _in_modules(folder: Folder, checkpoint: Checkpoint, like: Model | None) -> Source | None:
    """A checkpoint with the names of transformers' own modules; None if it has others. It may be shards of a model that
    it is ``like``. Raises SeveralError for several models, if each tensor is of one of them.
    """
    from reshard.source.opening_programs import open_program  # rarely needed

    folder.formats = (in_modules(HUGGING_FACE),)
    try:
        source = open_program(folder)
        source = open_program(folder, like) if like is not None else source
    except ReshardError as error:
        if isinstance(error, SeveralError) and error.is_all:
            raise
        return None
    if source.ranks[0].keys() != checkpoint.tensors.keys():  # a merge writes other names
        checkpoint = replace(checkpoint, records=(), index=None, index_name=None, renamed=True)
    note = "the source has the names of transformers' modules"
    return replace(source, checkpoint=checkpoint, note="; ".join(filter(None, (checkpoint.note, note))))


def _renamed(checkpoint: Checkpoint, naming: Naming) -> Checkpoint:
    """Return the checkpoint with its model's names, and without tensors of other models.

    If it has all of them, its files can be written again: their records know what stands before the names.
    """
    names = {stored: name for name, stored in naming.known.items()}
    left = {stored for stored in checkpoint.tensors if stored not in names and not naming.is_other(stored)}
    names |= {stored: without_wrappers(stored).removeprefix(naming.beginning) for stored in left}
    tensors = {names[n]: info._replace(name=names[n]) for n, info in checkpoint.tensors.items() if n in names}
    aliases = {
        without_wrappers(alias).removeprefix(naming.beginning): names[original]
        for alias, original in checkpoint.aliases.items()
        if original in names
    }
    records = tuple(replace(record, beginning=naming.beginning) for record in checkpoint.records)
    renamed = replace(checkpoint, tensors=tensors, aliases=aliases, records=records, renamed=True)
    if len(tensors) == len(checkpoint.tensors) and {name for r in records for name in r.tensors} == tensors.keys():
        return renamed
    return replace(renamed, records=(), index=None, index_name=None)


def _check_vocabulary(architecture: Architecture, config: Mapping[str, Any], tensors: Mapping[str, TensorInfo]) -> None:
    """Raise PlanError if an adapter has a table of another vocabulary than its base model's: it has added tokens."""
    sizes = AxisSizes(architecture, config, {}).of({})
    for name, info in tensors.items():
        match = architecture.match(name) if ".lora_" not in name else None
        dims = match.rules[0].shapes[0].dims if match is not None else ()
        for dim, rows in zip(dims, info.shape, strict=False):
            if dim.axis in architecture.pad and sizes.get(dim.axis, rows) != rows:
                raise PlanError(
                    f"{ADAPTER}: '{name}' is for a vocabulary of {rows:,}, and the base model has {sizes[dim.axis]:,}: "
                    "an adapter with added tokens (resize_token_embeddings) is neither split nor merged",
                    "resize the base model as in the training, and merge it with PEFT (merge_and_unload)",
                )


def _check_adapter(settings: object, checkpoint: Checkpoint) -> None:
    """Raise PlanError if an adapter has no tensors, or an A or B that is of no module it names, or no float."""
    from reshard.formats.notation.adapters import module_of, settings_of  # rarely needed

    lora, dtypes = settings_of(settings, checkpoint.path), ("BF16", "F16", "F32", "F64")
    if not checkpoint.tensors:
        raise PlanError(f"{ADAPTER} has no tensors: the adapter changes nothing")
    delta = next((name for name in checkpoint.tensors if name.endswith("trainable_tokens_delta")), None)
    if delta is not None:
        raise PlanError(
            f"{ADAPTER}: '{delta}' has rows for single tokens (trainable_token_indices), which are neither split nor "
            "merged",
            "merge it with PEFT (merge_and_unload)",
        )
    for name, info in checkpoint.tensors.items():
        if ".lora_" in name and info.dtype not in dtypes:
            raise PlanError(f"{ADAPTER}: tensor '{name}' is {info.dtype}; A and B are read in {', '.join(dtypes)}")
        if ".lora_" in name and len(info.shape) < 3 and not lora.names(module_of(name)):
            raise PlanError(
                f"{ADAPTER}: tensor '{name}' is of a module that {ADAPTER_CONFIG} does not name (target_modules)",
                "give the adapter_config.json that was saved with these tensors",
            )


def _with_aliases(checkpoint: Checkpoint) -> dict[str, TensorInfo]:
    tensors = checkpoint.tensors
    aliases = checkpoint.aliases if checkpoint.config.get("tie_word_embeddings") is False else {}
    more = {alias: tensors[original]._replace(name=alias) for alias, original in aliases.items()}
    return tensors | more if more else tensors


def _open_sharded(folder: Folder) -> Source:
    from reshard.source.program_files import read_ranks, read_shards, readings  # rarely needed

    path, manifest = folder.path, folder.manifest
    (files,) = readings(folder, OWN)
    shards = read_shards(folder, files, manifest.identity if manifest else None)
    if not shards or len(shards) < len(files):
        raise CheckpointError(f"{path}: not all ranks' files say which rank of which split they are", _OURS)
    identity = shards[0].identity
    ranks = read_ranks(folder, OWN, files, identity.mesh)
    side = folder.side_files()
    for lacking in (at for at in side.values() if not at.is_file()):
        raise IncompleteError(f"{lacking} is missing, {MANIFEST} lists it")
    config = read_model_config(path)
    if ADAPTER_CONFIG in side and SETTINGS not in config:
        config[SETTINGS] = read_config(path / ADAPTER_CONFIG)
    architecture = folder.architecture(config)
    sizes = AxisSizes(architecture, config, {}).of({})
    for axis in sorted(sizes.keys() & identity.sizes.keys()):
        if sizes[axis] != identity.sizes[axis]:  # ranks' parts would be misread
            raise MismatchError(
                f"{path / CONFIG}: '{axis}' is {sizes[axis]}, but was {identity.sizes[axis]} when this was split",
                "put the config.json of the split there again",
            )
    holders = {name: info for tensors in reversed(ranks) for name, info in tensors.items()}
    names = dict.fromkeys(name for tensors in ranks for name in tensors)
    if manifest is not None:  # in the order of the original files
        order = (name for record in manifest.source.files for name in record.tensors if name in names)
        names = dict.fromkeys([*order, *names])
    else:  # headers state positions if no rank holds all tensors
        pairs = zip(files, shards, strict=True)
        places = {
            name: at
            for entry, shard in pairs
            for name, at in zip(folder.weights(entry.path)[0], shard.places, strict=False)
        }
        names = dict.fromkeys(sorted(names, key=lambda name: places.get(name, 0)))
    if identity.names == MODULES:
        from reshard.placement.inverse import NameInverse  # rarely needed

        origins = NameInverse(in_modules(HUGGING_FACE), architecture, config).of(names)
        spelled = {stored: name for name, stored in origins.items()}
        ranks = tuple({spelled.get(name, name): info for name, info in tensors.items()} for tensors in ranks)
        holders = {spelled.get(name, name): info for name, info in holders.items()}
        names = dict.fromkeys(spelled.get(name, name) for name in names)
    full = [FullTensor(name, t.dtype, None, t.file.name, t.shape) for name, t in ((n, holders[n]) for n in names)]
    model = bind(architecture, config, full, axes=identity.sizes, mesh=identity.mesh, padding=identity.padding)
    plan = make_plan(model, identity.mesh, padding=identity.padding)
    weights = (folder.file(file.path) for file in files)
    source = folder.source(OWN, plan, model, names, ranks, weights, side, stated=identity)
    check_stored(source.arrangement, source.ranks, path)
    without = check_complete(model, path)
    if plan_digest(source.rules) != identity.plan:
        raise MismatchError(
            f"{path}: the shards were split by another plan than '{architecture.name}'",
            "pass the plan file of the split with --plan",
        )
    return replace(source, without=without, was_named=None if manifest is not None else identity.names)


_OURS = "give the folder that 'reshard split' wrote"
