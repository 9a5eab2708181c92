"""Opens a source that a user names, with the transforms that are asked for."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from reshard.formats.documents import json_bytes
from reshard.formats.errors import CheckpointError, MismatchError
from reshard.formats.files.checkpoint import ADAPTER_CONFIG, CONFIG
from reshard.formats.notation.architecture import SETTINGS, without_numbers
from reshard.formats.notation.format_file import adapter_format
from reshard.formats.store import FilePath, name_in
from reshard.model.binding import bind
from reshard.model.model import FullTensor, Model
from reshard.model.naming import LoraError
from reshard.source.access import Access, Place
from reshard.source.completeness import check_stored
from reshard.source.folder import Folder
from reshard.source.lora import find_lora, open_alone, open_base
from reshard.source.lora_side import SETTINGS_FILES, LoraRun
from reshard.source.opening import find, found_config, open_folder
from reshard.source.recognition import recognise
from reshard.source.source import Source
from reshard.store.selection import HubAccess, Weights
from reshard.store.weight_sets import sets_in

if TYPE_CHECKING:
    from reshard.formats.files.safetensors import TensorInfo


def open_any(source: Place, access: Access, weights: Weights = Weights.RANGES) -> Source:
    """Open a folder, a Hub id or a URL; ``weights`` says how much of the weights is needed. Raises ReshardError."""
    path = find(source, access, Weights.FILES if access.download and weights is Weights.RANGES else weights)
    return open_found(path, access, weights)


def open_converted(source: Place, access: Access, name: str) -> Source:
    """Open an adapter as if it were in the format of this name. Raises ReshardError."""
    from reshard.transforms.convert import convert  # numpy

    path = find(source, access, Weights.FILES)
    folder, note = recognise(Folder(path, config=found_config(access), beginning=access.beginning)), None
    run = find_lora(folder) if folder.manifest is None and folder.kind != "adapter" else None
    if run is not None and run.stated is None:
        note = f"{ADAPTER_CONFIG} has the ranks of the tensors; no file says lora_alpha: write it there"
    opened = open_alone(folder, run) if run is not None else open_folder(folder)
    return replace(convert(opened, adapter_format(name)), note=note)


def open_beside(path: FilePath, access: Access, model: Model | None) -> Source:
    """Open a checkpoint of the same model as another: files of a program that do not say which are read as ``model``.

    Raises ReshardError.
    """
    folder = recognise(Folder(path, plan_file=access.plan_file, beginning=access.beginning))
    if folder.kind != "program" or folder.manifest is not None:
        return open_found(path, replace(access, config=None))
    if model is None or access.config is not None:
        return open_found(path, access)
    try:
        opened = open_folder(folder, model=model)
        if (stored := _in_stored_dtypes(opened)) is not None:
            opened = open_folder(folder, model=stored)
    except LoraError:
        if (run := find_lora(folder)) is None:
            raise
        base = open_base(folder, run, model=model)
        sides = {CONFIG: json_bytes(dict(model.config)), **base.side_files}
        return _with_own_adapter(replace(base, side_files=sides), folder, run)
    try:
        check_stored(opened.arrangement, opened.ranks, path)
    except MismatchError as error:
        raise MismatchError(
            error.message,
            "they are of another model: 'reshard diff' compares them, given their config.json with --config",
        ) from None
    return opened


def _in_stored_dtypes(source: Source) -> Model | None:
    """The model of a source that was opened as that of another, in the dtypes that its files have; None if it is.

    A tensor that the format stores in another dtype than the model's is left as it is.
    """
    model, dtypes = source.model, dict[str, str]()
    for atom, (stored, _) in source.arrangement.atoms.items():
        infos = (tensors.get(stored.name_on(rank)) for rank, tensors in enumerate(source.ranks))
        there = next((info.dtype for info in infos if info is not None), stored.dtype)
        if there != stored.dtype == model.kind_of[atom.tensor].dtype:
            dtypes[atom.tensor] = there
    if not dtypes:
        return None
    full = [FullTensor(name, dtypes.get(name, kind.dtype), tensor.shape, source.path.name)
            for tensor in model.tensors for name, kind in [(tensor.name, tensor.kind)]]  # fmt: skip
    return bind(model.architecture, model.config, full, axes=model.sizes.measured)


def open_found(path: FilePath, access: Access, weights: Weights = Weights.RANGES) -> Source:
    """Open what ``find`` has found: averaged, patched, dequantized, with the adapter in it, quantized, then cast.

    Raises ReshardError.
    """
    hub = HubAccess(token=access.token, cache_dir=access.cache_dir, quiet=access.quiet)
    is_part = access.is_changed  # what comes of it is complete
    config = found_config(access)
    folder, run = recognise(Folder(path, plan_file=access.plan_file, config=config, beginning=access.beginning)), None
    try:
        opened = open_folder(folder, is_part=is_part)
    except LoraError:
        if (run := find_lora(folder)) is None:
            raise
        opened = open_base(folder, run, is_part=is_part)
    if access.config is not None and opened.format.plain and SETTINGS not in opened.model.config:
        raise CheckpointError(f"{opened.path} has a config.json of its own", "leave out --config")
    if weights is not Weights.HEADERS and opened.format.rules.constants:
        opened = _with_unlike_constants(opened)
    if opened.manifest is None and SETTINGS not in opened.model.config and len(sets_in(path)) > 1:
        from reshard.transforms.agreement import check_agreement  # numpy

        check_agreement(opened, config)
    if run is not None and access.adapter is None:
        opened = _with_own_adapter(opened, folder, run)
    elif run is not None:
        opened = opened.noted("the LoRA adapter in it was left behind")
    if access.averaged is not None:
        from reshard.transforms.average import average  # numpy

        others, factors = access.averaged
        alike = Access(plan_file=access.plan_file, download=access.download, **vars(hub))
        sources = [opened, *(open_beside(find(o, hub, Weights.RANGES), alike, opened.model) for o in others)]
        opened = average(sources, factors, wide=access.dtype is not None)
    for delta in access.deltas:
        from reshard.transforms.patch import patch  # numpy

        opened = patch(opened, find(delta, hub, Weights.FILES))
    if access.dequantize:
        from reshard.transforms.dequantize import dequantize  # numpy

        opened = dequantize(opened)
    if access.adapter is not None:
        from reshard.transforms.adapter import add_adapter  # numpy

        opened = add_adapter(opened, find(access.adapter, hub, Weights.FILES))
    if access.quantize is not None:
        from reshard.transforms.quantize import quantize  # numpy

        opened = quantize(opened, access.quantize)
    if access.dtype is not None:
        from reshard.transforms.cast import cast  # numpy

        opened = cast(opened, access.dtype)
    return opened


def _with_own_adapter(base: Source, folder: Folder, run: LoraRun) -> Source:
    """The base model in a training run as if the LoRA adapter there had been merged into it. Raises ReshardError."""
    from reshard.transforms.adapter import with_adapter  # numpy

    opened = with_adapter(base, open_alone(folder, run, base.model))
    which = f"rank {' and '.join(map(str, run.ranks))}, alpha {run.lora.alpha:g}"
    note = f"the LoRA adapter in it ({which}) was added to the weights, in float64, and rounded"
    read = {name_in(file, base.path) for file in base.training.saved.files} if base.training is not None else set()
    strays = (each for each in base.strays if each not in read and each.rpartition("/")[2] not in SETTINGS_FILES)
    return replace(opened, strays=tuple(strays), was_adapted=True).noted(note)


def _with_unlike_constants(source: Source) -> Source:
    """The source, with each constant that has another value listed as left behind: Hugging Face has no place for it.

    ``constants`` of the source keeps such values for a split into the same format. Each is only a few numbers. Raises
    CheckpointError if a file cannot be read.
    """
    from reshard.move.reading import contents_of  # numpy

    constants = {stored.name: stored for stored in source.arrangement.stored if stored.constant is not None}
    infos: list[tuple[str, TensorInfo]] = []
    for rank, tensors in enumerate(source.ranks):
        name_of = {stored.name_on(rank): stored.name for stored in constants.values()}
        infos += [(name_of[name], info) for name, info in tensors.items() if name in name_of]
    if not infos:
        return source
    unlike: dict[str, set[bytes]] = {}
    for (name, info), data in zip(infos, contents_of(source, [info for _, info in infos]), strict=True):
        if (content := data.tobytes()) != constants[name].constant_bytes(info.shape):
            unlike.setdefault(name, set()).add(content)
    one = {name: min(contents) for name, contents in unlike.items() if len(contents) == 1}
    whole = {name: content for name, content in one.items() if len(content) == len(constants[name].constant_bytes())}
    names = dict.fromkeys(map(without_numbers, unlike))
    return replace(source, left_behind=(*source.left_behind, *names), constants=whole)
