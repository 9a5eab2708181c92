"""DeepSpeed's checkpoints: ZeRO 1 to 3, whose ranks have ranges of flat lists, and Universal Checkpoints.

Stages 1 and 2: the parameters of a group lie end to end in one list, which is padded at its end and cut into equal
parts; ``param_slice_mappings`` says where each lies, older files have them in the order of ``param_shapes``. Stage 3:
each parameter by itself is padded and cut into equal parts, and a rank has its parts of all parameters end to end;
sub-groups divide that list between parameters. The weights are the masters in float32; what has none (frozen
parameters, buffers) is as the model's file has it. Tensor parallel ranks have files of their own;
``universal_checkpoint_info`` says how they cut each parameter.

A Universal Checkpoint, which is written too, has a file for each tensor and each state of one, and small files beside
them. ZeRO-1 and 2 read the settings of each group at the top of ``zero/optimizer_state.pt``, and
``zero/{tensor}/step.pt``; ZeRO-3 the settings of the first group and the step inside its ``optimizer_state_dict``. Each
has a name of its own for the model's states, from which no weight is read.

Source: files that DeepSpeed 0.19.8 wrote; ``deepspeed/runtime/{engine,base_optimizer}.py``,
``deepspeed/runtime/zero/{stage_1_and_2,stage3}.py``, ``deepspeed/utils/zero_to_fp32.py``,
``deepspeed/checkpoint/{ds_to_universal,universal_checkpoint}.py``.
"""

from __future__ import annotations

import math
import re
import struct
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from reshard.formats.errors import CheckpointError, IncompleteError, MismatchError
from reshard.formats.files.chunks import Chunk, Sharded, flat_chunks, from_list, list_range, together, whole
from reshard.formats.files.dcp import (
    STATE,
    TOGETHER,
    Distributed,
    Entries,
    check_steps,
    gathered,
    group_settings,
    object_bytes,
)
from reshard.formats.files.pickles import TENSORS, Inert, PickledTensor, are_sizes, attribute, is_plain, kind_of, quote
from reshard.formats.files.safetensors import TensorInfo
from reshard.formats.files.torch_archive import BESIDE, pickled_tensor, torch_file
from reshard.formats.store import FilePath, glob, read_ranges

MODEL = re.compile(r"(?:zero_pp_rank_(\d+)_)?mp_rank_(\d+)_model_states\.pt")
OPTIMIZER = re.compile(r"(?:bf16_|fp16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt")
OTHERS = re.compile(r"layer_.*-model_.*states\.pt|(layer_\d+_)?exp(ert|p_rank)_\d+_.*states\.pt")
_NAMES = TENSORS.with_classes(
    *BESIDE,
    *(f"deepspeed.runtime.fp16.loss_scaler.{name}" for name in ("LossScaler", "DynamicLossScaler")),
    "deepspeed.runtime.zero.config.ZeroStageEnum",
    "deepspeed.utils.tensor_fragment.fragment_address",
)
_ELSE = "save it with one model parallel rank, or as a Hugging Face checkpoint"
_CUTS = "universal_checkpoint_info"
_PLAIN = {"tp_replicated_parameter_patterns": None, "parameter_with_row_parallelism_patterns": 1}
_OTHERWISE = ("parameter_to_average_patterns", "parameter_with_2_sub_params_cat_dim_0", "parameter_with_sub_params",
              "autotp_unsupported_parameter_patterns")  # fmt: skip
_SIMPLE = re.compile(r"\^?(?:\\d\+|\\[^\w]|[^\\*+?{}()|\[\]$^])*\$?")
_DEEP = 6
_SETTINGS_FILE = "zero/optimizer_state.pt"
_CARRIED = ("loss_scaler", "dynamic_loss_scale", "overflow", "clip_grad")
"""The settings of an optimizer that are those of no group."""
Lengths = tuple[int, ...]

_SETTING = re.compile(r"(?:.*\.)?param_groups\.(\d+)\.(\w+)")
_STEP = re.compile(r"(?:.*\.)?state\.(.+)\.step")
_NUMBERS = {"F32": "<f", "F64": "<d", "I32": "<i", "I64": "<q"}
_MODEL_STATES: dict[str, object] = {
    "module": {}, "buffer_names": [], "optimizer": None, "frozen_param_shapes": {}, "frozen_param_fragments": {},
    "lr_scheduler": None, "data_sampler": None, "random_ltd": None, "skipped_steps": 0, "dp_world_size": 1,
    "mp_world_size": 1, "checkpoint_parallel_dimensions": {"pp_degree": 1, "tp_degree": 1}, "ds_version": "0.19.8",
}  # fmt: skip
_PLACES = {*_MODEL_STATES, "param_shapes", "shared_params"} - {
    "lr_scheduler",
    "data_sampler",
    "random_ltd",
    "skipped_steps",
}
"""Keys of the model's states that describe how tensors are laid out in files."""


class _File(NamedTuple):
    """A file's dictionary; its tensors are where they lie."""

    path: FilePath
    content: dict[str, Any]

    def table(self, key: str) -> dict[str, Any]:
        """A dictionary in it; an empty one if there is none."""
        value = self.content.get(key)
        return value if isinstance(value, dict) else {}


def read_zero(folder: FilePath) -> Distributed:
    """A checkpoint of DeepSpeed, given the folder of the step. Raises CheckpointError and MismatchError."""
    names = [path.name for path in glob(folder, "*.pt")]
    if (other := next((name for name in names if OTHERS.fullmatch(name)), None)) is not None:
        what = f"stages of a pipeline or experts of its own ({other})"
        raise CheckpointError(f"{folder} has {what}, and no file says how its tensors are cut", _ELSE)
    parts, read, main, form, own = list[Entries](), list[FilePath](), _File(folder, {}), "", dict[str, Any]()
    is_universal = (folder / "zero").is_dir()
    parallel = {int(match[2]) for name in names if (match := MODEL.fullmatch(name) or OPTIMIZER.fullmatch(name))}
    cuts, origins = None, dict[str, str]()
    for rank in range(1 if is_universal else max(parallel) + 1):
        models, optimizers = (_files(folder, pattern, rank) for pattern in (MODEL, OPTIMIZER))
        if not models:
            problem = "the states of an optimizer, and no model" + (f" of model parallel rank {rank}" if rank else "")
            raise CheckpointError(f"{folder} has {problem}", "bring *_model_states.pt back")
        if rank == 0:
            main, own = models[0], optimizers[0].table("optimizer_state_dict") if optimizers else {}
            ranks = max(int(main.content.get("mp_world_size") or 1), *(number + 1 for number in parallel))
            if (missing := next((each for each in range(ranks) if each not in parallel), None)) is not None:
                raise IncompleteError(f"{folder}: the files of model parallel rank {missing} are missing", TOGETHER)
            origins = {str(copy): str(first) for copy, first in main.table("shared_params").items()}  # others have none
            info = main.table(_CUTS) or own.get(_CUTS)
            cuts = info if ranks > 1 and not is_universal else None
            if ranks > 1 and not is_universal and not isinstance(info, dict):
                why = f"{ranks} model parallel ranks, and no file says how its tensors are cut ({_CUTS})"
                raise CheckpointError(f"{folder} has {why}", _ELSE)
        for file in models:
            if len({quote(each.content.get("global_steps")) for each in (file, main)}) > 1:
                raise MismatchError(f"{file.path} and {main.path}: their global_steps differ", TOGETHER)
        groups = [_shapes(group, main.path) for group in models[0].content.get("param_shapes") or ()]
        if is_universal:
            settings = folder / _SETTINGS_FILE
            own, form = _read(settings).content if settings.is_file() else {}, "Universal Checkpoint"
            entries, files = _universal(folder, own, groups, origins if len(parallel) > 1 else {})
            read += [*([settings] if own else []), *files]
        else:
            form, entries = _of_lists(models[0], optimizers, groups)
        masters = {str(name) for part, name, *_ in entries if part == "model"}
        masters |= {name for group in groups for name in group} if optimizers or is_universal else set()
        if is_universal and len(parallel) > 1:  # what the model's file has are parts
            masters |= {*main.table("module")}
        entries |= _without_master(models, masters, origins)
        for copy, origin in origins.items():
            if (entry := entries.get(("model", origin))) is not None:
                entries.setdefault(("model", copy), entry)
        parts.append(entries)
        read += [file.path for file in (*models, *optimizers)]
    if cuts is not None:
        if (buffer := next(iter(main.content.get("buffer_names") or ()), None)) is not None:
            raise CheckpointError(f"{folder}: no file says how '{buffer}', a buffer, is cut", _ELSE)
        for keys, entry in parts[0].items():
            if isinstance(entry, Sharded):
                name = str(keys[1 if len(keys) == 2 else 2])
                dim = _dim_of(folder, cuts, origins.get(name, name)) if entry.shape else None
                others = (part.get(keys) for part in parts[1:])
                parts[0][keys] = _joined(f"{folder}: '{'.'.join(map(str, keys))}'", dim, entry, others)
        form += f", {len(parts)} model parallel ranks"
    step = f", step {quote(main.content['global_steps'])}" if "global_steps" in main.content else ""
    saved = gathered(folder, parts[0], f"saved by DeepSpeed: {form}{step}", read)
    extras = {"model": {key: value for key, value in main.content.items() if key not in _PLACES}}
    return replace(saved, extras=extras | {"optimizer": {key: own[key] for key in _CARRIED if key in own}})


def _joined(where: str, dim: int | None, first: Sharded, others: Iterable[object]) -> Sharded:
    """Join a tensor's parts on the tensor parallel ranks along ``dim``; with None, each rank has a copy."""
    shape, chunks = [*first.shape], [*first.chunks]
    for other in others:
        part = other if isinstance(other, Sharded) else Sharded((), ())
        around = [(*dims[:dim], *dims[dim + 1 :]) if dim is not None else (*dims,) for dims in (part.shape, shape)]
        if around[0] != around[1]:
            text = f"is {shape} on the first model parallel ranks, and {list(part.shape)} on the next"
            raise MismatchError(f"{where} {text}", TOGETHER)
        if dim is None:
            chunks += part.chunks
            continue
        for at, info in part.chunks:
            offset = (*at.offset[:dim], at.offset[dim] + shape[dim], *at.offset[dim + 1 :])
            chunks.append((Chunk(offset, at.shape), info))
        shape[dim] += part.shape[dim]
    return Sharded(tuple(shape), chunks)


def _dim_of(folder: FilePath, info: Mapping[str, Any], name: str) -> int | None:
    """The dimension of a parameter of which each tensor parallel rank has a part; None: each has all.

    ``info`` is DeepSpeed's ``universal_checkpoint_info``, lists of expressions. Raises CheckpointError if it is not
    said.
    """
    for key in (*_PLAIN, *_OTHERWISE):
        for entry in info.get(key) or ():
            for pattern in entry["patterns"] if isinstance(entry, dict) else (entry,):
                if not _SIMPLE.fullmatch(pattern):  # others may take forever
                    why = f"{_CUTS} has the expression {quote(pattern)}, which is not read"
                    raise CheckpointError(f"{folder}: {why}", _ELSE)
                if re.match(pattern, name) is None:
                    continue
                if key in _OTHERWISE:
                    raise CheckpointError(f"{folder}: '{name}' is cut in a way that is not read ({key})", _ELSE)
                return _PLAIN[key]
    return 0


# -------------------------------------------------------------------------------------------------------- the files


def _files(folder: FilePath, pattern: re.Pattern[str], parallel: int) -> list[_File]:
    """The files of all ranks of a model parallel rank, in order. Raises CheckpointError if one is missing."""
    matches = ((path, match) for path in glob(folder, "*.pt") if (match := pattern.fullmatch(path.name)))
    paths = {int(match[1] or 0): path for path, match in matches if int(match[2]) == parallel}
    missing = next((rank for rank in range(max(paths, default=0)) if rank not in paths), None)
    if missing is not None:
        raise IncompleteError(f"{folder}: of {paths[max(paths)].name} the file of rank {missing} is missing", TOGETHER)
    return [_read(paths[rank]) for rank in sorted(paths)]


def _read(path: FilePath) -> _File:
    with torch_file(path) as archive:
        state, located = archive.read(_NAMES, "tensors and plain settings are read"), dict[tuple[int, int], Any]()

        def locate(name: str, value: object, depth: int) -> Any:
            """The same, with where tensors lie; what comes again is done once."""
            if isinstance(value, PickledTensor):
                return archive.place(name, value)
            if not isinstance(value, dict | list) or depth > _DEEP:
                return value
            if (at := (id(value), depth)) not in located:
                items = value.items() if isinstance(value, dict) else ((name, item) for item in value)
                inner = [(key, locate(str(key), item, depth + 1)) for key, item in items]
                located[at] = dict(inner) if isinstance(value, dict) else [item for _, item in inner]
            return located[at]

        if not isinstance(state, dict):
            raise CheckpointError(f"{path}: holds a {kind_of(state)}, not a dictionary")
        return _File(path, {str(key): locate(str(key), value, 1) for key, value in state.items()})


def _shapes(group: object, path: FilePath) -> dict[str, Lengths]:
    if not isinstance(group, dict) or not all(map(are_sizes, group.values())):
        raise CheckpointError(f"{path}: its param_shapes are no shapes")
    return group


# ------------------------------------------------------------------------------------------------------ flat lists


def _of_lists(main: _File, optimizers: Sequence[_File], groups: Sequence[dict[str, Lengths]]) -> tuple[str, Entries]:
    """Return the form of the optimizer's files (such as its ZeRO stage) and the entries of its masters and states."""
    if not optimizers:
        return "no ZeRO, whose optimizer is not read" if main.content.get("optimizer") else "no ZeRO", {}
    states = [file.table("optimizer_state_dict") for file in optimizers]
    forms = [_form(state) for state in states]
    (stage, world), wrong = forms[0], None
    if (other := next((at for at, form in enumerate(forms) if form != forms[0]), None)) is not None:
        wrong = f"{optimizers[other].path} and {optimizers[0].path} are of different stages or numbers of ranks"
    elif world != len(optimizers):
        wrong = f"{optimizers[0].path}: it is one of {quote(world)} ranks, and there are files of {len(optimizers)}"
    elif main.content.get("dp_world_size") not in (None, world):
        wrong = f"{main.path}: it is of {quote(main.content['dp_world_size'])} ranks, its optimizer of {world}"
    if wrong is not None:
        raise MismatchError(wrong, TOGETHER)
    inner = [state.get("optimizer_state_dict" if stage == 3 else "base_optimizer_state") for state in states]
    elastic = [{"state": dict(enumerate(each))} if isinstance(each, list) else each for each in inner]
    saved = [each if isinstance(each, dict) else {} for each in elastic]
    masters = "fp32_flat_groups" if stage == 3 else "single_partition_of_fp32_groups"
    lists = {"model": [_lists(state.get(masters)) for state in states]}
    maps = [state.get("param_slice_mappings") or () for state in states]
    lacking = next((at for at, each in enumerate(maps) if not each), None)
    if any(maps) and lacking is not None:
        some = f"{optimizers[lacking].path} has no param_slice_mappings, and others have them"
        raise MismatchError(f"{some}: nothing says where its parameters lie", TOGETHER)
    numbers = [*saved[0].get("state", {})]
    kinds = [kind for kind, value in (saved[0]["state"][numbers[0]] if numbers else {}).items() if _is_list(value)]
    for kind in kinds:
        lists[kind] = [_lists(each.get("state", {}).get(number, {}).get(kind) for number in numbers) for each in saved]
    entries: Entries = {}
    for kind, of_ranks in lists.items():
        try:
            for name, tensor in _tensors(groups, of_ranks, None if stage == 3 else maps):
                entries[("model", name) if kind == "model" else (*STATE, name, kind)] = tensor
        except CheckpointError as error:
            raise CheckpointError(f"{optimizers[-1].path}: {kind}: {error.message}", TOGETHER) from None
    steps = [next((entry.get("step") for entry in state.get("state", {}).values()), None) for state in saved]
    check_steps(zip((file.path for file in optimizers), steps, strict=True))
    entries |= _settings([*saved[0].get("state", {}).values()], saved[0], groups)
    return f"ZeRO-{stage}, {world} rank{'s' * (world != 1)}", entries


def _form(state: Mapping[str, Any]) -> tuple[object, object]:
    """The stage of ZeRO, and the number of ranks."""
    stage, count = state.get("zero_stage"), state.get("partition_count")
    stages, counts = getattr(stage, "arguments", (stage,)), count if isinstance(count, list) else (count,)
    number, world = (max((n for n in each if type(n) is int), default=None) for each in (stages, counts))
    return number, world


def _settings(
    states: Sequence[dict[str, Any]], saved: Mapping[str, Any], groups: Sequence[Mapping[str, Lengths]]
) -> Entries:
    """Return an optimizer's entries that are not lists: its steps, of a group or of a sub-group, and its settings."""
    groups_of, named, entries = saved.get("param_groups"), [[*group] for group in groups], Entries()
    if not isinstance(groups_of, list) or len(groups_of) != len(groups):  # of sub-groups
        named = [[name for group in named for name in group]]
    for of_group, names in zip(states, named, strict=False):
        for key, value in of_group.items():
            if isinstance(value, int | float) or (isinstance(value, TensorInfo) and not value.shape):
                entry = whole(value) if isinstance(value, TensorInfo) else value
                entries |= {(*STATE, name, key): entry for name in names}
    return entries | group_settings(groups_of, named)


def _is_list(value: object) -> bool:
    return isinstance(value, TensorInfo) and len(value.shape) == 1


def _lists(values: Iterable[object] | None) -> list[TensorInfo]:
    infos = [*(values or ())]
    if not all(map(_is_list, infos)):
        raise CheckpointError("a group of parameters has no list")
    return infos  # type: ignore[return-value]


def _tensors(
    groups: Sequence[dict[str, Lengths]], of_ranks: Sequence[Sequence[TensorInfo]], maps: Sequence[Sequence[Any]] | None
) -> Iterator[tuple[str, Sharded]]:
    """The tensors of a kind, each with its name, given the lists of each rank.

    ``maps`` say, for each rank and group, where its parts of parameters lie; without them they lie end to end. None is
    for stage 3.
    """
    parts: dict[str, list[TensorInfo]] = defaultdict(list)  # the elements of each, in order
    flat = [{name: (math.prod(shape),) for name, shape in group.items()} for group in groups]
    if maps is None:
        lengths = {name: (-(-count // len(of_ranks)),) for group in flat for name, (count,) in group.items()}
        padded = sum(length for (length,) in lengths.values())
        for rank, lists in enumerate(of_ranks):
            if (total := sum(info.shape[0] for info in lists)) != padded:
                raise CheckpointError(f"the lists of rank {rank} have {total:,} elements, they should have {padded:,}")
            for name, part in from_list(lengths, lists).items():
                parts[name] += (info for _, info in part.chunks)
    elif any(len(lists) != len(groups) for lists in (*of_ranks, *(each for each in maps if each))):
        raise CheckpointError(f"there are {len(groups)} groups of parameters, and {len(of_ranks[0])} lists")
    for number, group in enumerate(flat if maps is not None else ()):
        lists = [of_rank[number] for of_rank in of_ranks]
        if maps and any(maps):
            parts |= _of_slices(groups[number], lists, [of_rank[number] for of_rank in maps])
            continue
        total, length = sum(count for (count,) in group.values()), lists[0].shape[0]
        for rank, info in enumerate(lists):
            n = min(max(total - rank * length, 0), length)  # without the padding
            if info.shape[0] not in (n, length):
                raise CheckpointError(f"the list of rank {rank} has {info.shape[0]:,} elements, it should have {n:,}")
        parts |= {name: [info for _, info in part.chunks] for name, part in from_list(group, lists).items()}
    for shapes in groups:
        yield from ((name, from_list({name: shape}, parts[name])[name]) for name, shape in shapes.items())


def _of_slices(
    shapes: dict[str, Lengths], parts: Sequence[TensorInfo], slices: Sequence[Mapping[str, Any]]
) -> dict[str, list[TensorInfo]]:
    """Parameters in another order than ``shapes`` (``round_robin_gradients``), or with padding between them."""
    fragments: dict[str, list[TensorInfo]] = defaultdict(list)
    next_rank: dict[str, int | None] = {}  # after a part at the end of a list
    for rank, (part, of_rank) in enumerate(zip(parts, slices, strict=True)):
        cuts, end = [(attribute(cut, "start"), attribute(cut, "numel"), name) for name, cut in of_rank.items()], 0
        if not all(are_sizes(cut[:2]) for cut in cuts):
            raise CheckpointError(f"the parts in the list of rank {rank} have no sizes")
        for begin, count, name in sorted(cuts):
            if begin < end or begin + count > part.shape[0]:
                raise CheckpointError(
                    f"the list of rank {rank} has {part.shape[0]:,} elements, and not all of '{name}'"
                )
            if fragments[name] and (begin or next_rank[name] != rank):
                why = f"'{name}' goes on in the list of rank {rank}, and not from the end of the list before it"
                raise CheckpointError(f"{why}: these are not the lists of the ranks of one save, in order")
            end = begin + count
            next_rank[name] = rank + 1 if end == part.shape[0] else None
            fragments[name].append(list_range(part, begin, count))
    for name, shape in shapes.items():
        if (count := sum(part.shape[0] for part in fragments[name])) != math.prod(shape):
            raise CheckpointError(f"the ranks have {count:,} elements of '{name}', a tensor {list(shape)}")
    return fragments


# ----------------------------------------------------------------------------------------------------- all the others


def _universal(
    folder: FilePath, settings: Mapping[str, Any], groups: Sequence[Mapping[str, Lengths]], shared: Mapping[str, str]
) -> tuple[Entries, list[FilePath]]:
    """A file a tensor, and the files; those made from stage 3 are flat, and ``param_shapes`` of the model has their
    shapes.

    Copies are not read: of tensor parallel ranks DeepSpeed's converter writes the first rank's part of one.
    """
    shapes, steps = {name: shape for group in groups for name, shape in group.items()}, glob(folder, "zero/*/step.pt")
    inside = _File(folder, {**settings}).table("optimizer_state_dict").get("state", {}) if not steps else {}
    entries, files = _settings([*inside.values()], settings, groups), list[FilePath]()
    for path in (path for path in glob(folder, "zero/*/*.pt") if path.parent.name not in shared):
        name, kind = path.parent.name, path.name.removesuffix(".pt")
        keys = ("model", name) if kind == "fp32" else (*STATE, name, kind)
        with torch_file(path) as archive:
            state = archive.read(_NAMES, "a tensor and its shape is read")
            value = state.get("param") if isinstance(state, dict) else state
            if isinstance(value, int | float) and path in steps:
                entries[keys] = value
                continue
            if not isinstance(value, PickledTensor):
                raise CheckpointError(f"{path}: holds a {kind_of(state)}, not a tensor")
            info = archive.place(name, value)
        is_flat = info.shape and not isinstance(state, dict)
        shape, count = shapes.get(name, info.shape) if is_flat else info.shape, math.prod(info.shape)
        if math.prod(shape) != count:
            raise MismatchError(f"{path}: it has {count:,} elements, param_shapes says {list(shape)}")
        entries[keys] = Sharded(shape, [*flat_chunks(info._replace(shape=(count,)), shape, 0)])
        files.append(path)
    return entries, files


def _without_master(models: Sequence[_File], names: set[str], shared: Mapping[str, str]) -> Entries:
    """Return the tensors without a master: frozen parameters, buffers and tied tensors; all of the model's if there are
    no lists.
    """
    main, world, entries = models[0], len(models), Entries()
    for name, shape in _shapes(main.table("frozen_param_shapes"), main.path).items():
        parts: list[Any] = [file.table("frozen_param_fragments").get(name) for file in models]
        if all(part is not None for part in parts) and name not in names:
            is_whole = world == 1 or len(parts[0].shape) != 1
            count = math.prod(shape) if is_whole else -(-math.prod(shape) // world)
            flat = [list_range(part, 0, min(math.prod(part.shape), count)) for part in parts]
            lists = [[part] for part in flat] if is_whole else [flat]
            entries["model", name] = together([from_list({name: shape}, each)[name] for each in lists])
    for name, info in main.table("module").items():
        if isinstance(info, TensorInfo) and info.nbytes and name not in names and name not in shared:
            copies = [whole(file.table("module")[name]) for file in models]
            entries.setdefault(("model", name), together(copies))
    return entries


# ---------------------------------------------------------------------------- a Universal Checkpoint's small files


class Step(NamedTuple):
    """The number of an optimizer's steps, and its saved form: the number itself, or a tensor and its bytes."""

    number: float
    value: object
    content: bytes | None = None


def is_setting(name: str) -> bool:
    """Whether these files keep an entry of this name: the step, or a setting of a group."""
    return bool(_STEP.fullmatch(name) or _SETTING.fullmatch(name))


def universal_documents(
    tensors: Mapping[str, Lengths], states: Collection[str], shared: Mapping[str, str], saved: Distributed | None
) -> Iterator[tuple[str, bytes]]:
    """The small files of a checkpoint of ``tensors``, of which some have ``states``; ``shared`` are copies of others.

    Without settings there are as many empty groups as a run can have: it keeps its own. Raises MismatchError if the
    parameters are at different steps, and CheckpointError if a file cannot be read.
    """
    tensors = dict(sorted(tensors.items()))  # whatever the route they came by
    step = _step_of(saved) if saved is not None and states else None
    groups = _groups_of(saved) if saved is not None and states else []
    members = [{*group.pop("params", ())} for group in groups]
    named = [{name: tensors[name] for name in tensors if name in names} for names in members]
    if {name for names in named for name in names} < {*states}:
        named = [{name: tensors[name] for name in tensors if name in states or not states}]
    of_groups = [{**group, "params": [number]} for number, group in enumerate(groups)] or [{} for _ in tensors]
    extras = saved.extras if saved is not None else {}
    model = _MODEL_STATES | {
        "param_shapes": [{n: Inert("torch.Size", (shape,)) for n, shape in names.items()} for names in named],
        "shared_params": {**shared}, "global_steps": int(step.number) if step else 0,
    }  # fmt: skip
    for prefix in ("", "zero_pp_rank_0_"):
        yield f"{prefix}mp_rank_00_model_states.pt", object_bytes(model | _plain(extras.get("model", {})))
    own = _plain(extras.get("optimizer", {})) | {"ds_version": _MODEL_STATES["ds_version"], "param_groups": of_groups}

    state = {0: {"step": step.value}} if step else {}
    settings = own | {"optimizer_state_dict": {"state": state, "param_groups": of_groups}}
    yield "zero/optimizer_state.pt", object_bytes(settings, step and step.content)
    if step:
        saved_step = object_bytes(step.value, step.content)
        yield from ((f"zero/{name}/step.pt", saved_step) for name in tensors if name in states)


def _plain(table: Mapping[str, object]) -> dict[str, object]:
    """The entries that can be saved again: those without tensors."""
    return {key: value for key, value in table.items() if is_plain(value)}


def _step_of(saved: Distributed) -> Step | None:
    infos = [info for name, whole in saved.tensors.items() if _STEP.fullmatch(name) for _, info in whole.chunks]
    contents = read_ranges([(info.file, info.offset, info.offset + info.nbytes) for info in infos])
    steps = [
        Step(number, pickled_tensor(0, "step", info.dtype, info.shape), content)
        for info, content in zip(infos, contents, strict=True)
        if info.dtype in _NUMBERS and len(content) == struct.calcsize(_NUMBERS[info.dtype])
        for (number,) in struct.iter_unpack(_NUMBERS[info.dtype], content)
    ]
    values = (saved.object(name) for name in saved.objects if _STEP.fullmatch(name))
    steps += [Step(value, value) for value in values if isinstance(value, int | float)]
    low, high = (extreme((step.number for step in steps), default=0) for extreme in (min, max))
    if not low == high < math.inf:
        why = f"its parameters have done {low:g} to {high:g} steps, and DeepSpeed has one number for all"
        raise MismatchError(f"{saved.path}: {why}", "merge it: the weights alone can be written")
    return next(iter(steps), None)


def _groups_of(saved: Distributed) -> list[dict[str, Any]]:
    groups: dict[int, dict[str, Any]] = {}
    for match in filter(None, map(_SETTING.fullmatch, saved.objects)):
        groups.setdefault(int(match[1]), {})[match[2]] = saved.object(match[0])
    return [_plain(groups[number]) for number in sorted(groups)]
